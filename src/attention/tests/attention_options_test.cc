// Attention forward with every combination of options, drawn at random, against the float64 reference; each draw on one
// level, with two numbers of threads that must give the same bits.
#include <gtest/gtest.h>

#include "attention/tests/drawn_call.h"

namespace opst::test {
namespace {

TEST(AttentionOptions, RandomCombinationsAgreeWithTheReference) {
  Random random(seed());
  const int draws = exhaustive() ? 40000 : static_cast<int>(2000 * kEffort);
  DrawCounts counts;
  double worst_ratio = 0;
  for (int n = 0; n < draws; ++n) {
    const Draw d = draw_all(random, true);
    DrawnCall call(d, random);
    const TestContext& t =
        contexts()[static_cast<size_t>(random.integer(0, static_cast<int64_t>(contexts().size()) - 1))];
    const auto others = contexts_like(t);
    const DrawnCall::Outputs out = call.make_outputs();
    const Status status = flash_attention_forward(t.context, call.inputs, out.tensors, d.options);
    ASSERT_TRUE(status.ok()) << status.message() << "\n  " << to_string(d);
    ASSERT_EQ(judge(call, out, t.context, 24, worst_ratio), "") << "draw " << n;
    const TestContext& other = *others[static_cast<size_t>(random.integer(0, static_cast<int64_t>(others.size()) - 1))];
    const DrawnCall::Outputs again = call.make_outputs();
    ASSERT_TRUE(flash_attention_forward(other.context, call.inputs, again.tensors, d.options).ok());
    ASSERT_EQ(again.differs_from(out), "") << t.name << " against " << other.name << "\n  " << to_string(d);
    counts.add(d);
  }
  counts.expect_shares(worst_ratio);
}

// The heads of a token in turn: every option that such calls may have, and the bits that keys and values have where each
// head's lie by themselves.
TEST(AttentionOptions, HeadsInTurnAgreeWithTheReference) {
  Random random(seed() + 4);
  double worst_ratio = 0;
  int in_turn = 0, split = 0, dense = 0, draws = static_cast<int>(200 * kEffort);
  for (int n = 0; n < draws; ++n) {
    Draw d = draw_all(random, true);
    if (d.keys == Keys::panel_pages) continue;
    share_tasks(d, random);
    if (d.keys == Keys::norm_pages) share_prefix(d, random);
    DrawnCall call(d, random);
    const auto chosen = random.integer(0, static_cast<int64_t>(contexts().size()) - 1);
    const TestContext& t = contexts()[static_cast<size_t>(chosen)];
    const Result<AttentionProblem> problem = attention_problem(call.inputs, d.options);
    ASSERT_TRUE(problem.ok()) << problem.status().message();
    const AttentionPlan plan = plan_attention(problem.value(), t.context.machine());
    in_turn += plan.heads_in_turn > 1 ? 1 : 0;
    split += plan.heads_in_turn > 1 && plan.kv_splits > 1 ? 1 : 0;
    const DrawnCall::Outputs out = call.make_outputs();
    const Status status = flash_attention_forward(t.context, call.inputs, out.tensors, d.options);
    ASSERT_TRUE(status.ok()) << status.message() << "\n  " << to_string(d);
    ASSERT_EQ(judge(call, out, t.context, 24, worst_ratio), "") << "draw " << n << " " << to_string(plan);
    for (const TestContext* const other : contexts_like(t)) {
      const DrawnCall::Outputs again = call.make_outputs();
      ASSERT_TRUE(flash_attention_forward(other->context, call.inputs, again.tensors, d.options).ok());
      ASSERT_EQ(again.differs_from(out), "") << t.name << " against " << other->name << "\n  " << to_string(d);
    }
    if (d.keys != Keys::dense || d.values_of_keys) continue;
    AttentionInputs by_head = call.inputs;
    std::vector<char> memory[2];
    for (const bool keys : {true, false}) {
      ConstTensor& tensor = keys ? by_head.key : by_head.value;
      memory[keys].resize(static_cast<size_t>(tensor.num_elements() * size_bytes(tensor.dtype)));
      const Tensor apart = Tensor::contiguous(
          tensor.dtype, {tensor.shape[0], tensor.shape[1], tensor.shape[2], tensor.shape[3]}, memory[keys].data());
      copy(tensor, apart);
      tensor = apart;
    }
    const Result<AttentionProblem> alone = attention_problem(by_head, d.options);
    ASSERT_EQ(plan_attention(alone.value(), t.context.machine()).heads_in_turn, 1);
    const DrawnCall::Outputs again = call.make_outputs();
    ASSERT_TRUE(flash_attention_forward(t.context, by_head, again.tensors, d.options).ok());
    ASSERT_EQ(again.differs_from(out), "") << to_string(d);
    ++dense;
  }
  std::printf(
      "%d draws, %d of heads in turn, %d of these split, %d compared with heads apart, worst error / bound %.2f\n",
      draws, in_turn, split, dense, worst_ratio);
  if (draws >= 100) {
    EXPECT_GE(in_turn, draws / 4);
    EXPECT_GE(split, draws / 10);
    EXPECT_GE(dense, draws / 12);
  }
}

// Sequences of few and of many queries in one call have two plans, which run one after the other in the same scratch
// memory. Each plan cuts the memory into pieces of its own.
TEST(AttentionOptions, PlansOfShortAndLongSequencesShareAWorkspace) {
  Random random(seed() + 3);
  double worst_ratio = 0;
  for (const AttentionPath path : {AttentionPath::standard, AttentionPath::flash}) {
    for (const TestContext& t : contexts_with_threads(2)) {
      for (int n = 0; n < 10; ++n) {
        Draw d;
        d.num_heads = d.num_kv_heads = 2, d.head_dim = d.value_head_dim = 16;
        d.varlen_q = true, d.keys = Keys::varlen;
        d.query_lens = {random.integer(30, 70), random.integer(1, 4)};
        d.kv_lens = {random.integer(1, 40), random.integer(500, 900)};
        d.options.path = path;
        DrawnCall call(d, random);
        const DrawnCall::Outputs out = call.make_outputs();
        const Status status = flash_attention_forward(t.context, call.inputs, out.tensors, d.options);
        ASSERT_TRUE(status.ok()) << status.message() << "\n  " << to_string(d);
        ASSERT_EQ(judge(call, out, t.context, 20, worst_ratio), "") << t.name;
      }
    }
  }
}

// Few queries of long sequences see a band of the keys, which is split.
TEST(AttentionOptions, BandsOfLongSequencesAgreeWithTheReference) {
  Random random(seed() + 2);
  double worst_ratio = 0;
  int split = 0, draws = static_cast<int>(120 * kEffort);
  for (int n = 0; n < draws; ++n) {
    Draw d = draw(random);
    d.num_kv_heads = 1, d.num_heads = random.pick<int64_t>({1, 2, 3});
    d.head_dim = d.value_head_dim = 8;
    d.varlen_q = random.chance(0.5);
    d.kv_lens = {random.integer(3000, 6000), random.chance(0.5) ? random.integer(2000, 6000) : 30};
    d.query_lens = {random.pick<int64_t>({1, 2, 40}), 1};
    if (!d.varlen_q) d.query_lens[1] = d.query_lens[0];
    d.mask = d.bias = d.drop_mask = d.non_finite = false;
    d.prefix = random.chance(0.2);
    // For these heads and sequences, and of blocks whose lists the reference goes through in time.
    d.mask_heads = random.chance(0.2) ? random.pick({int64_t{1}, d.num_heads}) : 0;
    d.mask_batch = random.pick<int64_t>({1, 2});
    d.mask_block_kv = random.integer(100, 300);
    AttentionOptions& o = d.options;
    o.block_q = random.chance(0.7) ? 0 : random.integer(1, 16);
    o.block_kv = d.keys == Keys::panel_pages || random.chance(0.7) ? 0 : random.integer(20, 100);
    o.path = AttentionPath::automatic;
    o.dropout.first_head = o.dropout.total_heads = 0;
    const auto side = [&](double unbounded) {
      return random.chance(unbounded) ? kUnbounded : random.integer(-300, 2500);
    };
    o.window_left = side(0.2), o.window_right = side(0.2);
    DrawnCall call(d, random);
    const auto chosen = random.integer(0, static_cast<int64_t>(contexts().size()) - 1);
    const TestContext& t = contexts()[static_cast<size_t>(chosen)];
    AttentionProblem p;
    p.query_dtype = d.query_dtype, p.kv_dtype = d.kv_dtype;
    p.batch = 2, p.num_heads = d.num_heads, p.query_len = d.query_lens[0], p.kv_len = d.longest_keys();
    p.head_dim = p.value_head_dim = 8;
    p.options = o;
    p.has_prefix = d.prefix;
    const bool band = o.window_left != kUnbounded && (o.window_right != kUnbounded || o.causal) && !d.prefix;
    split += band && plan_attention(p, t.context.machine()).kv_splits > 1 ? 1 : 0;
    const DrawnCall::Outputs out = call.make_outputs();
    const Status status = flash_attention_forward(t.context, call.inputs, out.tensors, o);
    ASSERT_TRUE(status.ok()) << status.message() << "\n  " << to_string(d);
    ASSERT_EQ(judge(call, out, t.context, 40, worst_ratio), "") << "draw " << n;
    const auto others = contexts_like(t);
    const DrawnCall::Outputs again = call.make_outputs();
    ASSERT_TRUE(flash_attention_forward(others.front()->context, call.inputs, again.tensors, o).ok());
    ASSERT_EQ(again.differs_from(out), "") << to_string(d);
  }
  std::printf("%d draws, %d of them bands that are split, worst error / bound %.2f\n", draws, split, worst_ratio);
  if (draws >= 100) {
    EXPECT_GE(split, draws / 12);
  }
}

// Inputs that break a careless softmax, with options that change the scores' unit, their size, or which of them count.
TEST(AttentionOptions, ClassicFillsAgreeWithTheReference) {
  Random random(seed() + 1);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const int64_t query_len : {2, 30}) {
      for (const Fill kind : {Fill::ones, Fill::large_normal, Fill::ascending_rows, Fill::outlier, Fill::denormals}) {
        for (int options = 0; options < 4; ++options) {
          ProblemOptions p;
          p.query_dtype = p.kv_dtype = p.out_dtype = dtype;
          p.num_heads = 2, p.query_len = query_len, p.kv_len = 77, p.head_dim = 16, p.value_head_dim = 24;
          p.query_fill = kind == Fill::ascending_rows ? Fill::ones : kind;
          p.key_fill = kind;
          p.options.block_kv = random.pick<int64_t>({0, 16});
          if (options == 1) p.options.softcap = 4;
          if (options >= 2) p.options.dropout = {.keep_prob = 0.7, .seed = random.bits()};
          Problem problem(p, random);
          View bias(DType::f32, 1, 2, query_len, 77, Strides::bnsd),
              mask(DType::boolean, 1, 1, query_len, 77, Strides::bnsd);
          View slopes(DType::f32, 1, 1, 1, 2, Strides::bnsd);
          fill(bias.tensor(), kind == Fill::denormals ? Fill::normal : kind, random);
          fill(slopes.tensor(), Fill::uniform, random);
          for (int64_t i = 0; i < query_len * 77; ++i) set(mask.tensor(), i, random.chance(0.6) ? 1 : 0);
          if (options == 0 || options == 3) problem.inputs.bias = bias.tensor();
          if (options == 0) problem.inputs.alibi_slopes = slopes.tensor().selected(0, 0).selected(0, 0).selected(0, 0);
          if (options >= 2) problem.inputs.mask = mask.tensor();
          for (const TestContext& t : contexts_with_threads(2)) {
            if (!exhaustive() && random.chance(0.5)) continue;
            ASSERT_EQ(problem.judge(problem.run(t.context), t.context), "") << "options " << options;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace opst::test

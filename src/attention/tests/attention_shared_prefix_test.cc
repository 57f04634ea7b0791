// Cascades: sequences whose block tables begin alike read these keys once, against the reference, which knows nothing
// of sharing. Found and told, groups of any sequences, tables that share by accident, every option, every kind of page.
#include <gtest/gtest.h>

#include "attention/shared_prefix.h"
#include "attention/tests/byte_pages.h"
#include "attention/tests/drawn_call.h"
#include "machine/context_impl.h"

namespace opst::test {
namespace {

SharedPrefixPlan plan_of(const DrawnCall& call, const Context& context) {
  const Result<AttentionProblem> problem = attention_problem(call.inputs, call.drawn().options);
  EXPECT_TRUE(problem.ok()) << problem.status().message();
  return plan_shared_prefix(problem.value(), context.machine());
}

// A call of pages whose sequences have few queries, and tables that begin alike: all of them by so many keys, told; or
// neighbours by 512 keys and more, found.
Draw draw_sharing(Random& random) {
  Draw d = draw_all(random, true);
  const bool told = random.chance(0.7), panels = random.chance(0.4);
  const bool fits_panels = d.query_dtype != DType::f64 && d.kv_dtype != DType::f16 && !d.values_of_keys;
  d.keys = panels && fits_panels && d.rope_dim == 0 ? Keys::panel_pages : Keys::norm_pages;
  if (d.keys == Keys::panel_pages && d.kv_dtype == DType::bf16) d.head_dim += d.head_dim % 2;
  if (d.values_of_keys) d.value_head_dim = std::min(d.value_head_dim, d.head_dim);
  d.block_size =
      d.keys == Keys::panel_pages ? random.pick<int64_t>({32, 64}) : random.pick<int64_t>({1, 3, 8, 16, 48, 160});
  d.options.page_layout = d.keys == Keys::panel_pages ? PageLayout::panel32 : PageLayout::norm;
  if (d.keys == Keys::panel_pages || random.chance(0.4)) d.options.block_kv = random.pick<int64_t>({0, 32});
  if (random.chance(0.5)) d.options.block_q = 0;
  if (random.chance(0.85)) d.mask_heads = 0, d.index_block = 0, d.prefix = false;
  if (d.index_block > 0 && d.keys == Keys::panel_pages) d.index_block = 32;
  if (d.mask_heads == 0) d.mask_batch = 1;
  const bool flash = d.keys == Keys::panel_pages || random.chance(0.85);
  if (d.options.path == AttentionPath::standard && flash) d.options.path = AttentionPath::automatic;
  if (d.options.dropout.total_heads > 0) d.options.dropout.first_head = 0;

  const int64_t batch = random.integer(2, 6), least = told ? 90 : 560;
  const int64_t query_len = random.pick<int64_t>({1, 1, 2, 5});
  d.mask_batch = d.mask_batch > 1 ? batch : 1;
  d.query_lens.assign(static_cast<size_t>(batch), query_len);
  d.kv_lens.clear();
  for (int64_t b = 0; b < batch; ++b) {
    if (d.varlen_q) d.query_lens[static_cast<size_t>(b)] = random.pick<int64_t>({0, 1, 1, 3, 60});
    d.kv_lens.push_back(random.chance(0.1) && !told ? random.integer(0, 30) : least + random.integer(0, 200));
  }
  if (told) {
    share_prefix(d, random);
    const int64_t most = *std::min_element(d.kv_lens.begin(), d.kv_lens.end());
    if (random.chance(0.7)) d.options.shared_prefix = std::min(most, d.block_size + random.integer(0, most));
    d.shared_blocks.assign(d.kv_lens.size(), ceil_div(d.options.shared_prefix, d.block_size));
  } else {
    d.options.shared_prefix = kFindShared;
    d.share_pages = false;
    d.shared_blocks.clear();
    for (int64_t b = 0; b < batch; ++b) {
      d.shared_blocks.push_back(random.chance(0.2) ? 0 : ceil_div(512 + random.integer(0, 60), d.block_size));
    }
  }
  if (random.chance(0.4)) d.options.window_left = random.integer(0, least + 200);  // often ends among the shared keys
  return d;
}

TEST(AttentionSharedPrefix, RandomCallsAgreeWithTheReference) {
  Random random(seed());
  const int draws = static_cast<int>((exhaustive() ? 20'000 : 700) * kEffort);
  double worst_ratio = 0;
  std::map<std::string, int> shared_by, alone_for;
  for (int n = 0; n < draws; ++n) {
    const Draw d = draw_sharing(random);
    DrawnCall call(d, random);
    const TestContext& t =
        contexts()[static_cast<size_t>(random.integer(0, static_cast<int64_t>(contexts().size()) - 1))];
    const SharedPrefixPlan plan = plan_of(call, t.context);
    plan.groups > 0 ? ++shared_by[to_string(plan.prefix.kv_access)] : ++alone_for[plan.reason];
    const DrawnCall::Outputs out = call.make_outputs();
    const Status status = flash_attention_forward(t.context, call.inputs, out.tensors, d.options);
    ASSERT_TRUE(status.ok()) << status.message() << "\n  " << to_string(d);
    ASSERT_EQ(judge(call, out, t.context, 24, worst_ratio), "") << "draw " << n << " " << to_string(plan);
    for (const TestContext* other : contexts_like(t)) {
      const DrawnCall::Outputs again = call.make_outputs();
      ASSERT_TRUE(flash_attention_forward(other->context, call.inputs, again.tensors, d.options).ok());
      ASSERT_EQ(again.differs_from(out), "") << t.name << " against " << other->name << "\n  " << to_string(d);
    }
  }
  int shared = 0;
  for (const auto& [name, count] : shared_by) shared += count, std::printf("  shared %-20s %d\n", name.c_str(), count);
  for (const auto& [name, count] : alone_for) std::printf("  alone: %-60s %d\n", name.c_str(), count);
  std::printf("%d draws, %d of them shared, worst error / bound %.2f\n", draws, shared, worst_ratio);
  if (draws < 500) return;
  EXPECT_GE(shared, draws / 3);
  for (const char* access : {"in_place", "panel_pages", "packed_per_task", "packed_shared"}) {
    EXPECT_GE(shared_by[access], draws / 50) << access;
  }
}

TEST(AttentionSharedPrefix, PagesOfEightBits) {
  Random random(seed() + 1);
  double worst_ratio = 0;
  for (const ByteFormat& format : kByteFormats) {
    for (int n = 0; n < 4; ++n) {
      Draw d;
      d.draws_all = d.for_forward = true;
      d.query_dtype = d.out_dtype = random.pick({DType::f32, DType::bf16});
      d.num_kv_heads = 2, d.num_heads = 8;
      d.head_dim = d.value_head_dim = random.pick<int64_t>({16, 48});
      const bool panels = n % 2 == 1;
      d.keys = Keys::norm_pages;
      d.block_size = panels ? 64 : random.pick<int64_t>({16, 24});
      const int64_t batch = random.pick<int64_t>({2, 7});  // rows of a group in place, or packed
      d.query_lens.assign(static_cast<size_t>(batch), 1);
      for (int64_t b = 0; b < batch; ++b) d.kv_lens.push_back(random.integer(650, 900));
      d.shared_blocks.assign(static_cast<size_t>(batch), 600 / d.block_size);
      DrawnCall call(d, random);
      const BytePages bytes(call.oracle_inputs, format, random);
      call.inputs = bytes.inputs;
      BytePages::Panels pages;
      AttentionOptions options = d.options;
      if (panels) call.inputs = bytes.as_panels(pages), options.page_layout = PageLayout::panel32;
      const Result<AttentionProblem> problem = attention_problem(call.inputs, options);
      ASSERT_TRUE(problem.ok()) << problem.status().message();
      for (const TestContext& t : contexts_with_threads(2)) {
        EXPECT_EQ(plan_shared_prefix(problem.value(), t.context.machine()).groups, 1);
        const DrawnCall::Outputs out = call.make_outputs();
        const Status status = flash_attention_forward(t.context, call.inputs, out.tensors, options);
        ASSERT_TRUE(status.ok()) << status.message();
        ASSERT_EQ(judge(call, out, t.context, 12, worst_ratio), "") << format.name << (panels ? " panel32" : "");
      }
    }
  }
}

// A call of tables that are given: pages of 16 keys, f32, 4 heads of 2 KV heads.
struct TableCall {
  static constexpr int64_t kBlock = 16, kBlocks = 80;
  std::vector<std::vector<int32_t>> rows;
  std::vector<int32_t> lengths;
  AttentionOptions options = {.causal = true};

  std::vector<int32_t> table = {};
  std::vector<float> numbers[3] = {}, result = {};
  AttentionInputs inputs = {};

  // The table ends with entries of nobody.
  void pose() {
    size_t columns = 1;
    for (const auto& row : rows) columns = std::max(columns, row.size() + 1);
    for (const auto& row : rows) {
      table.insert(table.end(), row.begin(), row.end());
      table.resize(table.size() + columns - row.size(), -7);
    }
    const auto batch = static_cast<int64_t>(rows.size());
    Random random(3);
    const int64_t sizes[] = {batch * 4 * 8, kBlocks * kBlock * 2 * 8, kBlocks * kBlock * 2 * 8};
    for (int i = 0; i < 3; ++i) {
      for (int64_t n = 0; n < sizes[i]; ++n) numbers[i].push_back(static_cast<float>(random.normal()));
    }
    inputs.query = ConstTensor::contiguous(DType::f32, {batch, 4, 1, 8}, numbers[0].data());
    inputs.key = ConstTensor::contiguous(DType::f32, {kBlocks, kBlock, 2, 8}, numbers[1].data());
    inputs.value = ConstTensor::contiguous(DType::f32, {kBlocks, kBlock, 2, 8}, numbers[2].data());
    inputs.block_table = ConstTensor::contiguous(DType::i32, {batch, static_cast<int64_t>(columns)}, table.data());
    inputs.kv_lengths = ConstTensor::contiguous(DType::i32, {batch}, lengths.data());
  }
  Result<AttentionProblem> problem() const { return attention_problem(inputs, options); }
  SharedPrefixSizes sizes() const { return problem().value().shared_prefix; }
  Status run(Context& context) {
    result.assign(rows.size() * 4 * 8, std::numeric_limits<float>::quiet_NaN());
    const auto batch = static_cast<int64_t>(rows.size());
    return flash_attention_forward(context, inputs,
                                   {.out = Tensor::contiguous(DType::f32, {batch, 4, 1, 8}, result.data())}, options);
  }
  // The largest distance from the reference, of the shared call and of the one that shares nothing.
  double worst(Context& context) {
    double distance = 0;
    for (const int64_t share : {options.shared_prefix, int64_t{0}}) {
      options.shared_prefix = share;
      const Status status = run(context);
      EXPECT_TRUE(status.ok()) << status.message();
      for (size_t row = 0; row < rows.size() * 4; ++row) {
        const auto b = static_cast<int64_t>(row / 4), h = static_cast<int64_t>(row % 4);
        const attention::ReferenceRow want = attention::reference_row(inputs, options, b, h, 0);
        for (size_t d = 0; d < 8; ++d) {
          distance = std::max(distance, std::fabs(want.out[d] - static_cast<double>(result[row * 8 + d])));
        }
      }
    }
    return distance;
  }
};
std::vector<int32_t> blocks(int32_t first, int32_t count, std::vector<int32_t> then = {}) {
  std::vector<int32_t> row;
  for (int32_t i = 0; i < count; ++i) row.push_back(first + i);
  row.insert(row.end(), then.begin(), then.end());
  return row;
}
TableCall posed(std::vector<std::vector<int32_t>> rows, std::vector<int32_t> lengths) {
  TableCall call{std::move(rows), std::move(lengths)};
  call.pose();
  return call;
}

TEST(AttentionSharedPrefix, FindsGroupsOfNeighbours) {
  Context context = fresh_context(2);
  const auto expect = [&](TableCall call, int64_t groups, int64_t queries, int64_t all, int64_t keys) {
    const SharedPrefixSizes s = call.sizes();
    EXPECT_EQ(s.groups, groups);
    EXPECT_EQ(s.queries, queries);
    EXPECT_EQ(s.all_queries, all);
    EXPECT_EQ(s.keys, keys);
    EXPECT_LT(call.worst(context), 2e-6);
  };
  // Three sequences that begin alike, and one that does not.
  expect(
      posed({blocks(0, 32, {40, 41}), blocks(0, 32, {42}), blocks(0, 32, {43}), blocks(8, 34)}, {540, 520, 513, 544}),
      1, 3, 3, 512);
  // Fewer than 512 keys: of a block less, and of keys that are a sequence's own query's.
  expect(posed({blocks(0, 31, {40}), blocks(0, 31, {41})}, {512, 512}), 0, 0, 0, 0);
  expect(posed({blocks(0, 33), blocks(0, 33)}, {512, 528}), 0, 0, 0, 0);
  expect(posed({blocks(0, 33), blocks(0, 33)}, {513, 528}), 1, 2, 2, 512);
  // Two groups: what two sequences share is more than a third would add.
  expect(posed({blocks(0, 70, {71}), blocks(0, 70, {72}), blocks(0, 33, {73}), blocks(0, 33, {74})},
               {1130, 1121, 535, 544}),
         2, 2, 4, 1120);
  // One group, although two of them share a block more.
  expect(posed({blocks(0, 35, {71}), blocks(0, 35, {72}), blocks(0, 34, {73, 74})}, {570, 570, 570}), 1, 3, 3, 544);
  // An empty sequence between, and the same block twice in a row of the table.
  expect(
      posed({blocks(0, 32, {5, 5, 60}), {}, blocks(0, 32, {5, 5, 61}), blocks(0, 32, {5, 5, 5})}, {550, 0, 551, 552}),
      1, 2, 2, 544);
}

// One row of a table, and one length, of a batch of any size: what takes no memory takes no time.
TEST(AttentionSharedPrefix, SequencesThatAreOne) {
  TableCall call = posed({blocks(0, 40)}, {600});
  call.inputs.query.shape[0] = call.inputs.block_table.shape[0] = call.inputs.kv_lengths.shape[0] = int64_t{1} << 40;
  call.inputs.query.strides[0] = call.inputs.block_table.strides[0] = call.inputs.kv_lengths.strides[0] = 0;
  const SharedPrefixSizes s = call.sizes();
  EXPECT_EQ(s.groups, 1);
  EXPECT_EQ(s.queries, int64_t{1} << 40);
  EXPECT_EQ(s.keys, 592);
}

// Told less than what the table shows, what only the end of it shows, and told what is there by accident.
TEST(AttentionSharedPrefix, IsTold) {
  Context context = fresh_context(2);
  for (const int64_t told : {1, 16, 64, 100, 520}) {
    TableCall call = posed({blocks(0, 34), blocks(0, 33, {70}), blocks(0, 33, {70})}, {530, 540, 521});
    call.options.shared_prefix = told;
    EXPECT_EQ(call.sizes().keys, told / 16 * 16);
    EXPECT_LT(call.worst(context), 2e-6);
  }
}

TEST(AttentionSharedPrefix, RefusalsNameWhatIsWrong) {
  Context context = fresh_context(1);
  const auto message = [&](int64_t told, bool dense = false) {
    TableCall call = posed({blocks(0, 34), blocks(0, 4, {9, 10}), blocks(0, 8)}, {530, 90, 120});
    call.options.shared_prefix = told;
    if (dense) {
      call.inputs.block_table = call.inputs.kv_lengths = {};
      call.inputs.key = call.inputs.value = call.inputs.query;
    }
    const Status status = call.run(context);
    for (const float x : call.result) EXPECT_TRUE(std::isnan(x));
    return status.message();
  };
  EXPECT_EQ(message(-2),
            "flash_attention_forward: shared_prefix is -2, must be a number of keys, 0, or -1 for what the block table "
            "shows");
  EXPECT_EQ(message(64, true), "flash_attention_forward: shared_prefix is 64, but there is no block_table");
  EXPECT_EQ(message(91), "flash_attention_forward: kv_lengths[1] is 90, less than shared_prefix = 91");
  EXPECT_EQ(message(65),
            "flash_attention_forward: block_table[1][4] is 9, but block_table[0][4] is 4 and shared_prefix = 65");
}

// What the plan says, of sixteen sequences of 8192 shared keys.
TEST(AttentionSharedPrefix, PlanPrints) {
  AttentionProblem p;
  p.query_dtype = p.kv_dtype = DType::bf16;
  p.batch = 16, p.num_heads = 32, p.num_kv_heads = 8, p.query_len = 1, p.kv_len = 8300;
  p.head_dim = p.value_head_dim = 128;
  p.paged = true, p.block_size = 16;
  p.shared_prefix = {1, 16, 16, 8192};
  Machine m;
  m.isa = Isa::avx512_bf16;
  m.cache = {.l1d_bytes = 32 << 10, .l2_bytes = 1 << 20, .l3_bytes_per_core = 4 << 20};
  m.bf16_product = Bf16Product::dot;
  const SharedPrefixPlan plan = plan_shared_prefix(p, m);
  EXPECT_EQ(to_string(plan).find("1 group shares 8192 keys: flash packed_per_task bf16_dot, block_q 64, block_kv "), 0u)
      << to_string(plan);
  // Each worker and each part is 64 rows of 128 sums, and so on; all of it whatever the threads.
  const AttentionPlan own = plan_attention(p, m);
  EXPECT_EQ(plan.scratch_bytes(own, 3),
            std::max(own.scratch_bytes(3), plan.prefix.scratch_bytes(3)) + plan.scratch_bytes_sums);
  EXPECT_GE(plan.scratch_bytes_sums, 16 * 32 * plan.prefix.kv_splits * (128 + 16 + 1) * 4);
  const auto reason = [&](const auto& change) {
    AttentionProblem q = p;
    change(q);
    const SharedPrefixPlan none = plan_shared_prefix(q, m);
    EXPECT_EQ(none.groups, 0);
    EXPECT_EQ(none.prefix.num_tasks, 0);
    EXPECT_EQ(none.scratch_bytes(own, 2), own.scratch_bytes(2));
    EXPECT_EQ(to_string(none), std::string("nothing is shared: ") + none.reason);
    return std::string(none.reason);
  };
  EXPECT_EQ(reason([](auto& q) { q.options.shared_prefix = 0; }), "options.shared_prefix is 0");
  EXPECT_EQ(reason([](auto& q) { q.paged = false; }), "keys are not in pages");
  EXPECT_EQ(reason([](auto& q) { q.shared_prefix = {}; }),
            "no neighbouring sequences of few queries begin with the same blocks");
  EXPECT_EQ(reason([](auto& q) { q.options.path = AttentionPath::standard; }), "options.path is standard");
  EXPECT_EQ(reason([](auto& q) { q.block_mask = {64, 64, 1, 1, 3, 3}; }), "a block mask has tiles of its own");
  EXPECT_EQ(reason([](auto& q) { q.sparse_indices = {1, 64}; }), "each query has a list of keys of its own");
  EXPECT_EQ(reason([](auto& q) { q.has_prefix = true; }), "queries see a prefix beside their window");
  EXPECT_EQ(reason([](auto& q) { q.shared_prefix.keys = -1; }), "a size is negative or beyond 2^56");
  EXPECT_EQ(reason([](auto& q) { q.head_dim = 0; }), "head_dim or value_head_dim is 0");
  EXPECT_GT(plan_shared_prefix({.shared_prefix = {kMaxBytes, kMaxBytes, kMaxBytes, kMaxBytes}}, m).reason[0], 0);
}

// The second call allocates nothing, and the first what the plans say.
TEST(AttentionSharedPrefix, MemoryIsWhatThePlansSay) {
  Context context = fresh_context(2);
  TableCall call = posed({blocks(0, 40), blocks(0, 40), blocks(0, 40)}, {640, 640, 630});
  const AttentionProblem p = call.problem().value();
  const int64_t bytes = plan_shared_prefix(p, context.machine()).scratch_bytes(plan_attention(p, context.machine()), 2);
  ASSERT_TRUE(call.run(context).ok());
  const WorkspacePool& pool = context.impl().workspaces;
  const int64_t allocations = pool.allocations();
  EXPECT_GE(pool.held_bytes(), bytes);
  EXPECT_LE(pool.held_bytes(), bytes + (2 << 20));  // a huge page at most
  ASSERT_TRUE(call.run(context).ok());
  EXPECT_EQ(pool.allocations(), allocations);
}

}  // namespace
}  // namespace opst::test

// Pages of eight bits, integers with scales and f8, read where they are, in norm and in panel32 pages: against the
// reference over the numbers that they stand for, at every level. What belongs to nobody is poisoned: scales NaN, f8 NaN.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>

#include "attention/tests/byte_pages.h"
#include "attention/tests/drawn_call.h"
#include "opst/attention_backward.h"
#include "testing/effort.h"

namespace opst::test {
namespace {

int64_t even(int64_t dim, const ByteFormat& format) { return dim + dim % format.numbers(); }

// The inputs in norm pages or in panel32 pages.
struct InSomeLayout {
  BytePages::Panels memory;
  AttentionInputs inputs;
  bool is_panels;

  InSomeLayout(const BytePages& bytes, bool as_panels) : inputs(bytes.inputs), is_panels(as_panels) {
    if (as_panels) inputs = bytes.as_panels(memory);
  }
};

TEST(AttentionBytePages, AgreeWithTheReference) {
  Random random(seed());
  int judged = 0;
  for (const ByteFormat& format : kByteFormats) {
    for (const int64_t query_len : {1, 2, 5, 37}) {
      for (const int64_t kv_len : {1, 7, 64, 65, 300, 1100}) {
        const bool panels = random.chance(0.5);
        ProblemOptions p;
        p.query_dtype = p.out_dtype = random.pick({DType::f32, DType::bf16, DType::f16});
        p.batch = random.pick<int64_t>({1, 2});
        p.num_kv_heads = random.pick<int64_t>({1, 2});
        p.num_heads = p.num_kv_heads * random.pick<int64_t>({1, 3, 4, 13});
        p.query_len = query_len, p.kv_len = kv_len;
        p.head_dim = even(random.pick<int64_t>({1, 3, 8, 16, 33, 64, 80}), format);
        p.value_head_dim = even(random.pick<int64_t>({1, 3, 16, 24, 40, 64, 71, 128}), format);
        p.ragged = p.batch > 1;
        p.options.causal = random.chance(0.6);
        p.options.window_left = random.chance(0.3) ? random.integer(0, 90) : kUnbounded;
        p.options.softcap = random.chance(0.3) ? 5 : 0;
        p.options.block_kv = panels ? random.pick<int64_t>({0, 0, 32, 96}) : random.pick<int64_t>({0, 0, 17, 32, 100});
        p.options.block_q = random.pick<int64_t>({0, 0, 5, 40});
        Problem problem(p, random);
        const int64_t block_size = panels ? random.pick<int64_t>({32, 64}) : random.pick<int64_t>({1, 5, 16, 64});
        const BytePagesOf pages(problem, format, block_size, random);
        const InSomeLayout call(pages.bytes, panels);
        problem.layout = panels ? PageLayout::panel32 : PageLayout::norm;
        for (const TestContext& t : contexts()) {
          if (!exhaustive() && random.chance(0.7)) continue;
          SCOPED_TRACE(t.name + ", " + format.name + (panels ? ", panel32" : ""));
          const Outcome r = problem.run(t.context, call.inputs);
          ASSERT_EQ(problem.judge(r, t.context, 200), "");
          ++judged;
        }
      }
    }
  }
  EXPECT_GT(judged, 200);
}

// Every option of attention, drawn as in attention_options_test.
TEST(AttentionBytePages, EveryOptionAgreesWithTheReference) {
  Random random(seed() + 4);
  double worst_ratio = 0;
  int draws_of[std::size(kByteFormats)][2] = {};
  const int draws = static_cast<int>(600 * kEffort);
  for (int n = 0; n < draws; ++n) {
    Draw d = draw_all(random, true);
    d.rope_dim = 0, d.values_of_keys = false;
    if (d.query_dtype == DType::f64) continue;
    const auto index = static_cast<size_t>(random.integer(0, std::size(kByteFormats) - 1));
    const ByteFormat& format = kByteFormats[index];
    const bool panels = random.chance(0.5);
    d.keys = Keys::norm_pages, d.kv_dtype = DType::f32, d.non_finite = false;
    d.options.page_layout = PageLayout::norm;
    d.options.path = AttentionPath::automatic;
    d.head_dim = even(d.head_dim, format), d.value_head_dim = even(d.value_head_dim, format);
    if (!panels && random.chance(0.3)) share_tasks(d, random);
    if (panels) {
      d.block_size = random.pick<int64_t>({32, 64});
      d.options.block_kv = d.options.block_kv == 0 ? 0 : 32;
      if (d.index_block > 0) d.index_block = 32;
    }
    share_prefix(d, random);
    DrawnCall call(d, random);
    const BytePages bytes(call.inputs, format, random);
    const InSomeLayout of_bytes(bytes, panels);
    AttentionOptions options = d.options;
    if (panels) options.page_layout = PageLayout::panel32;
    const TestContext& t =
        contexts()[static_cast<size_t>(random.integer(0, static_cast<int64_t>(contexts().size()) - 1))];
    const DrawnCall::Outputs out = call.make_outputs();
    const Status status = flash_attention_forward(t.context, of_bytes.inputs, out.tensors, options);
    ASSERT_TRUE(status.ok()) << status.message() << "\n  " << to_string(d);
    ASSERT_EQ(judge(call, out, t.context, 24, worst_ratio), "")
        << "draw " << n << ", " << format.name << (panels ? ", panel32" : "");
    const auto others = contexts_like(t);
    const DrawnCall::Outputs again = call.make_outputs();
    ASSERT_TRUE(flash_attention_forward(others.back()->context, of_bytes.inputs, again.tensors, options).ok());
    ASSERT_EQ(again.differs_from(out), "") << to_string(d);
    ++draws_of[index][panels];
  }
  for (size_t i = 0; draws >= 400 && i < std::size(kByteFormats); ++i) {
    for (const int drawn : draws_of[i]) EXPECT_GT(drawn, 0) << kByteFormats[i].name;
  }
  std::printf("%d draws, worst error / bound %.2f\n", draws, worst_ratio);
}

// Whether panels are multiplied as they are: else keys are copied out of them. Of a format in groups, keys and values may
// have drawn a single group each.
bool panels_multiplied(const ByteFormat& format, const BytePages& pages) {
  return !format.has_offsets && format.dtype != DType::u8 && pages.key.groups == 1 && pages.value.groups == 1;
}

// What is copied out of panels has the bits of norm pages. Strides of dimensions of size 1 say nothing.
TEST(AttentionBytePages, SameBitsForEveryNumberOfThreadsAndAnyPages) {
  Random random(seed());
  for (const ByteFormat& format : kByteFormats) {
    for (const int64_t query_len : {1, 30}) {
      ProblemOptions p;
      p.num_heads = 6, p.num_kv_heads = 2, p.query_len = query_len, p.kv_len = 2500, p.head_dim = p.value_head_dim = 64;
      p.options.causal = true;
      Problem problem(p, random);
      const BytePagesOf pages(problem, format, 32, random);
      std::vector<Outcome> outcomes;
      for (const bool panels : {false, true}) {
        InSomeLayout call(pages.bytes, panels);
        if (panels && panels_multiplied(format, pages.bytes)) outcomes.clear();
        for (const int threads : {1, 2, 3, 5}) {
          SCOPED_TRACE(std::string(format.name) + (panels ? ", panel32" : ""));
          Result<Context> context = Context::create({.num_threads = threads});
          ASSERT_TRUE(context.ok());
          outcomes.push_back(problem.run(context.value(), call.inputs));
          ASSERT_EQ(outcomes.back().status.message(), "");
          EXPECT_EQ(outcomes.front().differs_from(outcomes.back()), "");
          if (!panels) continue;
          for (ConstTensor* t : {&call.inputs.key, &call.inputs.key_scales, &call.inputs.key_offsets}) {
            if (*t) t->strides[2] = 12345;
          }
        }
      }
    }
  }
}

// Kernels that read in place take one register tile of rows, whatever blocks a mask is cut at; more rows are packed.
TEST(AttentionBytePages, BlocksInPlaceAreRegisterTilesUnderABlockMask) {
  int in_place = 0, packed = 0;
  for (const TestContext& t : contexts_with_threads(1)) {
    for (const int64_t query_len : {1, 4, 9, 12, 20, 200}) {
      for (const int64_t block : {1, 4, 8, 13, 16, 20, 32, 48, 64, 200}) {
        AttentionProblem p;
        p.query_dtype = DType::f32, p.kv_dtype = DType::i8;
        p.batch = 1, p.num_heads = p.num_kv_heads = 2, p.query_len = query_len, p.kv_len = 500;
        p.head_dim = p.value_head_dim = 64;
        p.paged = p.unit_stride_kv = true, p.block_size = 16;
        p.key_groups = p.value_groups = 1;
        p.block_mask.batch = p.block_mask.heads = 1, p.block_mask.row_blocks = 8, p.block_mask.entries = 100;
        p.block_mask.block_q = block, p.block_mask.block_kv = 64;
        const AttentionPlan plan = plan_attention(p, t.context.machine());
        EXPECT_EQ(plan.kv_access == KvAccess::in_place, query_len <= plan.tile_rows) << t.name << ", " << query_len;
        ++(plan.kv_access == KvAccess::in_place ? in_place : packed);
        if (plan.kv_access != KvAccess::in_place) continue;
        EXPECT_LE(plan.block_q, plan.tile_rows) << t.name << ", mask of " << block << " rows";
      }
    }
  }
  EXPECT_GT(in_place, 0);
  EXPECT_GT(packed, 0);
}

// Panels that no product takes are read as norm pages are, but for the copies of keys; the plan says so.
TEST(AttentionBytePages, PlansOfPanels) {
  Random random(seed());
  for (const ByteFormat& format : kByteFormats) {
    for (const int64_t query_len : {1, 30, 300}) {
      ProblemOptions o;
      o.num_heads = 4, o.num_kv_heads = 4, o.query_len = query_len, o.kv_len = 700;
      o.head_dim = 64, o.value_head_dim = 48;
      Problem problem(o, random);
      const BytePagesOf pages(problem, format, 32, random);
      const InSomeLayout in_panels(pages.bytes, true);
      const Result<AttentionProblem> norm = attention_problem(pages.inputs, {}),
                                     panel = attention_problem(in_panels.inputs, {.page_layout = PageLayout::panel32});
      ASSERT_TRUE(norm.ok() && panel.ok()) << norm.status().message() << panel.status().message();
      EXPECT_EQ(panel.value().has_offsets, format.has_offsets);
      for (const TestContext& t : contexts_with_threads(1)) {
        SCOPED_TRACE(t.name + ", " + format.name + ", " + std::to_string(query_len));
        const AttentionPlan of_norm = plan_attention(norm.value(), t.context.machine()),
                            of_panels = plan_attention(panel.value(), t.context.machine());
        const std::string reason = of_panels.reason;
        if (panels_multiplied(format, pages.bytes)) {
          EXPECT_EQ(of_panels.kv_access, KvAccess::panel_pages);
          EXPECT_EQ(reason, "the cache's pages are packed");
          continue;
        }
        EXPECT_EQ(of_panels.kv_access, of_norm.kv_access);
        EXPECT_EQ(of_panels.kv_access == KvAccess::in_place, query_len == 1);
        EXPECT_EQ(of_panels.block_kv, of_norm.block_kv);
        EXPECT_EQ(of_panels.kv_splits, of_norm.kv_splits);
        EXPECT_EQ(of_panels.heads_in_turn, 1);
        EXPECT_EQ(of_panels.scratch_bytes_shared, of_norm.scratch_bytes_shared);
        if (query_len > 1) {  // and a tile of keys
          EXPECT_GE(of_panels.scratch_bytes_per_worker,
                    of_norm.scratch_bytes_per_worker + of_norm.block_kv * 64 / format.numbers());
        }
        EXPECT_EQ(reason, std::string("panels of integers with groups, offsets or half bytes are not multiplied: ") +
                              (query_len == 1 ? "for few query rows keys are copied out of them, a tile at a time, "
                                                "values read in place"
                                              : "for many query rows each tile is widened and packed"));
      }
    }
  }
}

// Two queries, causal: the first does not see the last key. An infinite scale, the mark of a row that was not finite,
// makes NaN of what sees it, and of nothing else; with and without rules, in either layout, with a scale to a row and in
// groups.
TEST(AttentionBytePages, HiddenRowsDoNotReachAQuery) {
  Random random(seed());
  for (const auto& [format, panels] : {std::pair(kByteFormats[0], false),
                                       {kByteFormats[0], true},
                                       {kByteFormats[2], false},
                                       {kByteFormats[2], true},
                                       {kByteFormats[4], true},
                                       {kByteFormats[5], false},
                                       {kByteFormats[5], true}}) {
    for (const int variant : {0, 1, 2, 3, 4, 5}) {
      const bool rules = variant % 2 == 1, keys = variant / 2 == 1, packs = variant / 2 == 2;
      ProblemOptions p;
      p.options.block_q = packs ? 1 : 0;  // less than the rows there are
      p.query_len = 2, p.kv_len = 70, p.head_dim = p.value_head_dim = 32;
      p.options.causal = true;
      p.options.softcap = rules ? 20 : 0;
      Problem problem(p, random);
      const BytePagesOf pages(problem, format, 32, random);
      const BytePages::Side& side = keys ? pages.bytes.key : pages.bytes.value;
      const int64_t row = pages.norm.table[2] * 32 + 69 % 32, width = 32 / format.numbers();
      const InSomeLayout before(pages.bytes, panels);
      // Of what the last row holds the first group becomes the mark.
      static_cast<float*>(side.scales->data())[row * side.groups] = std::numeric_limits<float>::infinity();
      std::fill_n(static_cast<int8_t*>(side.bytes->data()) + row * width, width / side.groups, int8_t{0});
      const InSomeLayout after(pages.bytes, panels);
      for (const TestContext& t : contexts_with_threads(1)) {
        SCOPED_TRACE(t.name + ", " + format.name + (panels ? ", panel32" : ""));
        const Outcome with = problem.run(t.context, after.inputs);
        ASSERT_EQ(with.status.message(), "");
        const int64_t spoiled = keys ? 32 : 32 / side.groups;  // numbers of the second query's output
        for (int64_t d = 0; d < 32; ++d) {
          EXPECT_TRUE(std::isfinite(get(with.out->tensor(), d)));
          EXPECT_EQ(std::isnan(get(with.out->tensor(), 32 + d)), d < spoiled);
        }
        if (!panels) continue;  // elsewhere `before` has changed too
        const Outcome without = problem.run(t.context, before.inputs);
        for (int64_t d = 0; d < 32; ++d) {
          const double first = get(with.out->tensor(), d);
          EXPECT_LE(std::abs(first - get(without.out->tensor(), d)), 1e-5 * (1 + std::abs(first)));
        }
      }
    }
  }
}

// Before anything is written: scales that are read, and no others; gradients; forms that nothing reads.
TEST(AttentionBytePages, Refusals) {
  Random random(seed());
  ProblemOptions p;
  p.query_len = 1, p.kv_len = 40, p.num_heads = p.num_kv_heads = 2, p.head_dim = p.value_head_dim = 8;
  p.options.causal = true;
  p.options.window_left = 20;
  Problem problem(p, random);
  const BytePagesOf pages(problem, kByteFormats[1], 16, random);
  const TestContext& t = contexts_with_threads(2).back();
  const auto message = [&](const AttentionInputs& in) { return problem.run(t.context, in).status.message(); };
  const auto at = [&](const BytePages::Side& side, bool offsets, int64_t key, int64_t head) -> float& {
    const int64_t row = pages.norm.table[static_cast<size_t>(key / 16)] * 16 + key % 16;
    return static_cast<float*>((offsets ? side.offsets : side.scales)->data())[row * 2 + head];
  };
  const auto spoiled = [&](float& x, float bad) {
    const float kept = std::exchange(x, bad);
    const Outcome r = problem.run(t.context, pages.inputs);
    x = kept;
    if (!r.status.ok()) {
      EXPECT_TRUE(std::isnan(get(r.out->tensor(), 0)));  // as it was
    }
    return r.status.message();
  };
  const std::string where = " of block " + std::to_string(pages.norm.table[2]) + ", row 1, head 1, group 0 is ";
  EXPECT_EQ(message(pages.inputs), "");
  EXPECT_EQ(spoiled(at(pages.bytes.key, false, 33, 1), -1),
            "flash_attention_forward: key_scales" + where + "-1.000000, but must be >= 0");
  EXPECT_EQ(spoiled(at(pages.bytes.value, false, 33, 1), std::nanf("")),
            "flash_attention_forward: value_scales" + where + "nan, but must be >= 0");
  EXPECT_EQ(spoiled(at(pages.bytes.value, true, 33, 1), std::numeric_limits<float>::infinity()),
            "flash_attention_forward: value_offsets" + where + "inf, but must be finite");
  EXPECT_EQ(spoiled(at(pages.bytes.key, false, 3, 0), -1), "");  // outside the window

  AttentionInputs in = pages.inputs;
  in.value_scales = {};
  EXPECT_EQ(message(in),
            "flash_attention_forward: value_scales is absent, but value is i8: integers to be multiplied with scales");
  in = pages.inputs;
  in.key_offsets = {};
  EXPECT_EQ(message(in), "flash_attention_forward: key_offsets and value_offsets must both be given or both be absent");
  // Scales of another shape than their pages.
  const std::string of_blocks = std::to_string(pages.inputs.key.shape[0]);
  const struct {
    std::function<void(AttentionInputs&)> spoil;
    std::string message;
  } kShapes[] = {
      {[](AttentionInputs& x) { x.key_scales.shape[0] -= 1; }, "key_scales dim 0 (num_blocks) is " +
                                                                   std::to_string(pages.inputs.key.shape[0] - 1) +
                                                                   ", but key set num_blocks = " + of_blocks},
      {[](AttentionInputs& x) { x.value_scales.shape[1] = 15; },
       "value_scales dim 1 (block_size) is 15, but key set block_size = 16"},
      {[](AttentionInputs& x) { x.key_scales.shape[2] = 1; },
       "key_scales dim 2 (num_kv_heads) is 1, but key set num_kv_heads = 2"},
      {[](AttentionInputs& x) { x.key_offsets.shape[3] = 2; },
       "key_offsets dim 3 (key_groups) is 2, but key_scales set key_groups = 1"},
      {[](AttentionInputs& x) { x.key_scales = x.key_scales.selected(3, 0); },
       "key_scales has rank 3, but [num_blocks, block_size, num_kv_heads, key_groups] has rank 4"},
      {[](AttentionInputs& x) { x.value_scales.dtype = DType::bf16; }, "value_scales is bf16, but must be f32"},
  };
  for (const auto& c : kShapes) {
    in = pages.inputs;
    c.spoil(in);
    const Outcome r = problem.run(t.context, in);
    EXPECT_EQ(r.status.code(), StatusCode::invalid_argument);
    EXPECT_EQ(r.status.message(), "flash_attention_forward: " + c.message);
    EXPECT_TRUE(std::isnan(get(r.out->tensor(), 0)));  // as it was
  }
  in = pages.inputs;
  in.key.shape[3] = 4, in.key.strides[3] = 2, in.query.shape[3] = 4;
  EXPECT_EQ(message(in), "flash_attention_forward: key and value of i8 must have unit stride in dim 3");
  in = pages.norm.inputs;
  in.key_scales = pages.inputs.key_scales;
  EXPECT_EQ(message(in), "flash_attention_forward: key_scales is given, but key is f32, and only i8 and u8 have any");
  in = problem.inputs;
  in.key_scales = pages.inputs.key_scales;
  EXPECT_EQ(message(in),
            "flash_attention_forward: key_scales, value_scales, key_offsets or value_offsets is given, but key is no "
            "pages of i8 or u8");
  in = problem.inputs;
  in.key.dtype = in.value.dtype = DType::f8_e4m3;
  EXPECT_EQ(message(in), "flash_attention_forward: key is f8_e4m3, but must be f32, bf16, f16 or f64");
  EXPECT_EQ(flash_attention_backward(t.context, pages.inputs, {}, {}).message(),
            "flash_attention_backward: key is i8, but gradients are taken of f32, bf16, f16 and f64");
}

// Messages count groups, in either layout; groups that a row has no room for.
TEST(AttentionBytePages, RefusalsOfGroupsAndPanels) {
  Random random(seed());
  ProblemOptions p;
  p.kv_len = 40, p.head_dim = p.value_head_dim = 8;
  Problem problem(p, random);
  const TestContext& t = contexts_with_threads(2).back();
  const auto message = [&](const AttentionInputs& in) { return problem.run(t.context, in).status.message(); };
  const auto scales = [](const GuardedBuffer& memory, int64_t groups) {
    return memory.tensor(DType::f32, {4, 32, 1, groups});
  };
  const GuardedBuffer bytes(4 * 32 * 8), ones(4 * 32 * 8 * 4);
  std::fill_n(static_cast<uint8_t*>(bytes.data()), 4 * 32 * 8, uint8_t{17});
  std::fill_n(static_cast<float*>(ones.data()), 4 * 32 * 8, 1.0f);
  const int32_t table[] = {3, 1};
  const int32_t length = 40;
  const Tensor halves = bytes.tensor(DType::u8, {4, 32, 1, 4});
  AttentionInputs in = {.query = problem.query(), .key = halves, .value = halves};
  in.key_scales = in.value_scales = scales(ones, 2);
  in.block_table = ConstTensor::contiguous(DType::i32, {1, 2}, table);
  in.kv_lengths = ConstTensor::contiguous(DType::i32, {1}, &length);
  EXPECT_EQ(message(in), "");
  static_cast<float*>(ones.data())[(1 * 32 + 5) * 2 + 1] = -2;  // key 37
  EXPECT_EQ(message(in),
            "flash_attention_forward: key_scales of block 1, row 5, head 0, group 1 is -2.000000, but must be >= 0");
  static_cast<float*>(ones.data())[(1 * 32 + 5) * 2 + 1] = 1;
  in.value_scales = scales(ones, 3);
  EXPECT_EQ(
      message(in),
      "flash_attention_forward: value_scales has 3 groups (value_groups), which do not divide value_head_dim = 8");
  in.value_scales = scales(ones, 8);
  EXPECT_EQ(message(in),
            "flash_attention_forward: value_scales has groups of 1 numbers, but those of u8 must fill whole bytes");

  // panel32. A norm tensor of one head and as many rows has the same memory.
  const auto panel_keys = [&](DType dtype, int64_t dim) { return bytes.tensor(dtype, {4, 1, 1, dim, 32}); };
  const auto panel_values = [&](DType dtype, int64_t dim) { return bytes.tensor(dtype, {4, 1, 32, dim}); };
  const auto with_scales = [&](int64_t groups) {
    in.key_scales = ones.tensor(DType::f32, {4, 1, 1, groups, 32});
    in.value_scales = ones.tensor(DType::f32, {4, 1, 32, groups});
  };
  in.key = panel_keys(DType::i8, 8), in.value = panel_values(DType::i8, 8);
  with_scales(1);
  EXPECT_EQ(message(in), "");
  in.value_scales = {};
  EXPECT_EQ(message(in),
            "flash_attention_forward: value_scales is absent, but value is i8: integers to be multiplied with scales");
  in.key = panel_keys(DType::u8, 4), in.value = panel_values(DType::u8, 4);
  with_scales(2);
  EXPECT_EQ(message(in), "");
  float& of_key = static_cast<float*>(ones.data())[(1 * 2 + 1) * 32 + 5];  // block 1, group 1, row 5: key 37
  of_key = -2;
  EXPECT_EQ(message(in),
            "flash_attention_forward: key_scales of block 1, row 5, head 0, group 1 is -2.000000, but must be >= 0");
  of_key = 1;
  const GuardedBuffer more(4 * 32 * 2 * 4);
  std::fill_n(static_cast<float*>(more.data()), 4 * 32 * 2, 1.0f);
  in.value_scales = more.tensor(DType::f32, {4, 1, 32, 2});
  static_cast<float*>(ones.data())[(1 * 2 + 1) * 32 + 8] = -2;  // row 8 is beyond the last key
  EXPECT_EQ(message(in), "");
  static_cast<float*>(ones.data())[(1 * 2 + 1) * 32 + 8] = 1;
  in.key_offsets = in.key_scales;
  EXPECT_EQ(message(in), "flash_attention_forward: key_offsets and value_offsets must both be given or both be absent");
  in.value_offsets = in.value_scales;
  EXPECT_EQ(message(in), "");
}

}  // namespace
}  // namespace opst::test

// Block masks, forward and backward: what the lists of tiles hold, cases that went wrong elsewhere, work that is left
// out, rows without a key, plans, and what is refused. With every other option: attention_options_test.cc and
// attention_backward_options_test.cc.
#include <gtest/gtest.h>

#include <functional>

#include "attention/kv_blocks.h"
#include "attention/tests/attention_backward_call.h"
#include "attention/tests/block_mask_lists.h"
#include "testing/lazy_mapping.h"

namespace opst::test {
namespace {

// Every key of every row once, by the definition, and nothing else; tiles as their owners want them.
TEST(AttentionBlockMask, TilesHoldWhatEachRowSees) {
  using attention::HeadMask;
  using attention::KeyInterval;
  using attention::Visibility;
  Random random(seed());
  for (int n = 0; n < 10'000; ++n) {
    const int64_t query_len = random.integer(1, 40), kv_len = random.integer(0, 60), group = random.integer(1, 4);
    Visibility v{.kv_len = kv_len};
    if (random.chance(0.5)) v.low = random.integer(-50, 30);
    if (random.chance(0.5)) v.high = random.integer(-30, 50);
    if (random.chance(0.4)) v.prefix = random.integer(0, kv_len);
    const bool own_rows = random.chance(0.4);
    const double share = random.pick({0.1, 0.5, 0.9});
    const MaskLists lists(1, own_rows ? group : 1, query_len, kv_len, random.integer(1, 12), random.integer(1, 30),
                          [&](int64_t, int64_t, int64_t, int64_t) { return random.chance(share); });
    const HeadMask mask = {.mask = &lists.mask,
                           .head_stride = own_rows ? lists.mask.row_offsets.strides[1] : 0,
                           .heads = own_rows ? group : 1};
    const int64_t first_row = random.integer(0, query_len * group - 1);
    const int64_t rows = random.integer(1, query_len * group - first_row);
    // Tiles that shrink to what is seen, that come whole, and that begin at every third key.
    const int64_t thirds = random.integer(1, 7), block_kv = random.chance(0.3) ? 3 * thirds : random.integer(1, 20);
    const int64_t step = random.pick({int64_t{1}, block_kv, block_kv % 3 == 0 ? int64_t{3} : int64_t{1}});
    SCOPED_TRACE("draw " + std::to_string(n) + " of seed " + std::to_string(seed()));
    std::vector<attention::MaskCursor> cursors(static_cast<size_t>(rows + 2 * group));
    const attention::MaskedRows masked = {.mask = mask, .cursors = cursors.data(), .key_step = step};
    std::vector<int64_t> begin(static_cast<size_t>(rows)), end(begin), own_begin(begin), own_end(begin);
    attention::KvBlocks tiles(v, first_row, rows, group, {0, kv_len}, block_kv, begin.data(), end.data(), &masked);

    std::vector<std::vector<int64_t>> seen(static_cast<size_t>(rows));
    int64_t last_tile = -1;
    for (attention::KvTile t{}; tiles.next(&t, own_begin.data(), own_end.data());) {
      const int64_t tile = t.first_key / block_kv;
      ASSERT_GE(tile, last_tile);
      last_tile = tile;
      ASSERT_GT(t.count, 0);
      ASSERT_LE(t.first_key + t.count, std::min((tile + 1) * block_kv, kv_len));
      ASSERT_EQ(t.first_key % step, 0);
      if (step == block_kv) {
        ASSERT_EQ(t.count, std::min(block_kv, kv_len - t.first_key));
      }
      for (size_t r = 0; r < seen.size(); ++r) {
        int64_t from = t.first_key, to = t.first_key + t.count;
        if (t.partial) {
          from = std::max(from, t.visible_begin != nullptr ? t.visible_begin[r] : begin[r]);
          to = std::min(to, t.visible_end != nullptr ? t.visible_end[r] : end[r]);
        }
        for (int64_t key = from; key < to; ++key) seen[r].push_back(key);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t query = (first_row + r) / group, head = own_rows ? (first_row + r) % group : 0;
      std::vector<int64_t> expected;
      std::vector<int32_t> row;
      const auto at = static_cast<size_t>(head * lists.mask.row_offsets.shape[2] + query / lists.mask.block_q);
      for (int32_t i = lists.offsets[at]; i < lists.offsets[at + 1]; ++i) {
        row.push_back(lists.columns[static_cast<size_t>(i)]);
      }
      for (int64_t key = 0; key < kv_len; ++key) {
        const bool structure = key < v.prefix || (key >= query + v.low && key <= query + v.high);
        const bool block = std::count(row.begin(), row.end(), key / lists.mask.block_kv) > 0;
        if (structure && block) expected.push_back(key);
      }
      ASSERT_EQ(seen[static_cast<size_t>(r)], expected) << "row " << r;
    }
  }
}

// Rows that are part of a query's group: heads that have none of them show no tiles, wherever rows begin and end.
TEST(AttentionBlockMask, HeadsWithoutRowsShowNoTiles) {
  constexpr int64_t kGroup = 5, kQueries = 6, kKeys = 30;
  for (const int64_t block_q : {1, 2, 3}) {
    // Head h sees key block h alone.
    const MaskLists lists(1, kGroup, kQueries, kKeys, block_q, 6, [](auto, auto h, auto, auto j) { return h == j; });
    const attention::HeadMask mask = {
        .mask = &lists.mask, .head_stride = lists.mask.row_offsets.strides[1], .heads = kGroup};
    for (int64_t first = 0; first < kQueries * kGroup; ++first) {
      for (int64_t rows = 1; first + rows <= kQueries * kGroup; ++rows) {
        std::vector<attention::MaskCursor> cursors(static_cast<size_t>(rows + 2 * kGroup));
        std::vector<int64_t> intervals(static_cast<size_t>(4 * rows));
        const attention::MaskedRows masked = {.mask = mask, .cursors = cursors.data(), .key_step = 6};
        int64_t* const memory = intervals.data();
        attention::KvBlocks tiles({.kv_len = kKeys}, first, rows, kGroup, {0, kKeys}, 6, memory, memory + rows,
                                  &masked);
        int64_t found = 0;
        for (attention::KvTile t{}; tiles.next(&t, memory + 2 * rows, memory + 3 * rows); ++found) {
          const int64_t head = t.first_key / 6, to_head = (head - first % kGroup + kGroup) % kGroup;
          ASSERT_LT(to_head, rows) << "rows " << first << " to " << first + rows << " see no key of tile " << head;
        }
        ASSERT_EQ(found, std::min(rows, kGroup));
      }
    }
  }
}

// Parts of the list, one after the other, are the list.
TEST(AttentionBlockMask, SplitsShareOutTheTiles) {
  Random random(seed() + 1);
  for (int n = 0; n < 300; ++n) {
    const int64_t kv_len = random.integer(1, 400), block_kv = random.integer(1, 30), rows = random.integer(1, 12);
    const MaskLists lists(1, 1, rows, kv_len, random.integer(1, 5), random.integer(1, 20),
                          [&](int64_t, int64_t, int64_t, int64_t) { return random.chance(0.3); });
    attention::MaskCursor cursors[14];
    int64_t intervals[4][12];
    const attention::Visibility v{.kv_len = kv_len};
    const auto tiles_of = [&](int64_t first, int64_t count) {
      std::vector<int64_t> found;
      const attention::MaskedRows masked = {{.mask = &lists.mask}, cursors, block_kv, first, count};
      attention::KvBlocks tiles(v, 0, rows, 1, {0, kv_len}, block_kv, intervals[0], intervals[1], &masked);
      for (attention::KvTile t{}; tiles.next(&t, intervals[2], intervals[3]);) found.push_back(t.first_key);
      return found;
    };
    const std::vector<int64_t> all = tiles_of(0, INT64_MAX);
    const int64_t part = random.integer(1, 5);
    std::vector<int64_t> joined;
    for (int64_t first = 0; first <= kv_len; first += part) {
      for (const int64_t key : tiles_of(first, part)) joined.push_back(key);
    }
    ASSERT_EQ(joined, all);
  }
}

// A problem against the reference, on every level, with the plan's tiles.
void expect_right(Problem& problem, int64_t max_rows = 1 << 20) {
  problem.forget_reference();
  for (const TestContext& t : contexts_with_threads(2)) {
    const Outcome r = problem.run(t.context);
    ASSERT_EQ(problem.judge(r, t.context, max_rows), "") << t.name;
  }
}

ProblemOptions square(int64_t heads, int64_t length, int64_t dim) {
  ProblemOptions p;
  p.num_heads = p.num_kv_heads = heads;
  p.query_len = p.kv_len = length;
  p.head_dim = p.value_head_dim = dim;
  return p;
}

// Lower triangle of blocks, causal within: dense causal attention. The last block of keys is not whole.
TEST(AttentionBlockMask, B25_LengthsThatAreNoMultiplesOfABlock) {
  Random random(seed() + 2);
  for (const int64_t length : {129, 200, 255}) {
    ProblemOptions p = square(2, length, 32);
    p.options.causal = true;
    Problem problem(p, random);
    const MaskLists lists(1, 1, length, length, 128, 128,
                          [](int64_t, int64_t, int64_t i, int64_t j) { return j <= i; });
    problem.inputs.block_mask = lists.mask;
    expect_right(problem);
  }
}

// Elements of a mask as blocks of 1 x 1, the last row among them; rows without any are 0.
TEST(AttentionBlockMask, B59_EveryRowOfARandomElementMask) {
  Random random(seed() + 3);
  for (const bool large : {false, true}) {
    ProblemOptions p;
    p.batch = 2;
    p.query_len = large ? 1024 : 16, p.kv_len = large ? 768 : 12;
    p.head_dim = large ? 256 : 8, p.value_head_dim = large ? 384 : 8;
    Problem problem(p, random);
    const int64_t block = large ? 1 : 4;
    const double share = large ? 0.01 : 0.4;
    const MaskLists lists(2, 1, p.query_len, p.kv_len, block, block,
                          [&](int64_t, int64_t, int64_t, int64_t) { return random.chance(share); });
    problem.inputs.block_mask = lists.mask;
    expect_right(problem, 40);
  }
}

TEST(AttentionBlockMask, B60_BlocksOfAnySize) {
  Random random(seed() + 4);
  for (const int64_t length : {64, 96}) {
    for (const int64_t block : {1, 4, 16, 64, 128}) {
      Problem problem(square(2, length, 16), random);
      const MaskLists lists(1, 2, length, length, block, block, [&](int64_t, int64_t h, int64_t i, int64_t) {
        return !(h == 1 && i % 3 == 0) && random.chance(0.5);  // some rows of blocks are empty
      });
      problem.inputs.block_mask = lists.mask;
      expect_right(problem);
    }
  }
}

// N * N is beyond 32 bits: each query sees its own block of 64 keys.
TEST(AttentionBlockMask, B45_ManyQueriesAndKeys) {
  Random random(seed() + 5);
  constexpr int64_t kLength = 97'220;
  Problem problem(square(1, kLength, 8), random);
  const int64_t blocks = ceil_div(kLength, int64_t{64});
  std::vector<int64_t> offsets, columns;
  for (int64_t i = 0; i <= blocks; ++i) offsets.push_back(i), columns.push_back(i);
  problem.inputs.block_mask = {ConstTensor::contiguous(DType::i64, {1, 1, blocks + 1}, offsets.data()),
                               ConstTensor::contiguous(DType::i64, {blocks}, columns.data()), 64, 64};
  expect_right(problem, 30);
}

// Plans of their own choice: blocks that tiles fit and blocks that they straddle, masks of all, of KV heads and of
// heads, prompts and decoded tokens, whose keys are split.
TEST(AttentionBlockMask, SizesThatPlansFitAndStraddle) {
  Random random(seed() + 6);
  int splits = 0;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int64_t query_len : {1, 3, 50, 300}) {
      for (const int64_t block : {5, 48, 64, 128, 509}) {
        for (const int64_t heads : {1, 2, 6}) {
          ProblemOptions p;
          p.query_dtype = p.kv_dtype = p.out_dtype = dtype;
          p.num_heads = 6, p.num_kv_heads = 2;
          p.query_len = query_len, p.kv_len = query_len < 50 ? 4000 : 700;
          p.head_dim = 24, p.value_head_dim = 40;
          p.options.causal = random.chance(0.5);
          Problem problem(p, random);
          const MaskLists lists(1, heads, p.query_len, p.kv_len, block, block,
                                [&](int64_t, int64_t, int64_t, int64_t) { return random.chance(0.6); });
          problem.inputs.block_mask = lists.mask;
          const auto& all = contexts_with_threads(random.pick({1, 3}));
          const TestContext& t = all[static_cast<size_t>(random.integer(0, static_cast<int64_t>(all.size()) - 1))];
          const Outcome r = problem.run(t.context);
          ASSERT_EQ(problem.judge(r, t.context, 24), "") << t.name << " block " << block << " heads " << heads;
          const Result<AttentionProblem> posed = attention_problem(problem.inputs, p.options);
          ASSERT_TRUE(posed.ok()) << posed.status().message();
          splits += plan_attention(posed.value(), t.context.machine()).kv_splits > 1 ? 1 : 0;
        }
      }
    }
  }
  EXPECT_GT(splits, 10);
}

// The same for gradients.
TEST(AttentionBlockMask, GradientsOfSizesThatPlansFitAndStraddle) {
  Random random(seed() + 7);
  double worst_ratio = 0;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    for (const int64_t block : {7, 48, 64, 200}) {
      for (const int64_t heads : {1, 2, 4}) {
        Draw d;
        d.query_dtype = d.kv_dtype = d.out_dtype = dtype;
        d.num_heads = 4, d.num_kv_heads = 2, d.head_dim = 16, d.value_head_dim = 20;
        d.query_lens = {230}, d.kv_lens = {310};
        d.mask_heads = heads, d.mask_block_q = d.mask_block_kv = block;
        d.options.causal = random.chance(0.5);
        d.prefix = random.chance(0.3);
        DrawnCall call(d, random);
        BackwardForm form;
        form.grad_out_dtype = d.out_dtype;
        BackwardCallData data(call, form, random);
        const auto& all = contexts();
        const TestContext& t = all[static_cast<size_t>(random.integer(0, static_cast<int64_t>(all.size()) - 1))];
        const BackwardCallData::Outcome r = data.run(t.context);
        ASSERT_EQ(data.judge(r, t.context, worst_ratio), "") << t.name << " block " << block << " heads " << heads;
        const auto others = contexts_like(t);
        ASSERT_EQ(data.run(others[0]->context).differs_from(r), "") << t.name << " block " << block;
      }
    }
  }
}

// Keys and values that no query sees, and queries that see none, are never read: every second block of 64 lies on
// pages that may not be.
TEST(AttentionBlockMask, WhatNobodySeesIsNotRead) {
  constexpr int64_t kLength = 1024, kDim = 64, kBlock = 64, kBlockBytes = kBlock * kDim * 4;
  ASSERT_EQ(kBlockBytes % 4096, 0);
  Random random(seed() + 8);
  for (const bool decode : {false, true}) {
    const int64_t query_len = decode ? 1 : kLength;
    LazyMapping key(kLength * kDim * 4), value(kLength * kDim * 4);
    std::vector<float> query(static_cast<size_t>(query_len * kDim), 0.5f), out(query.size()), grad(query.size(), 0.25f);
    std::vector<float> lse(static_cast<size_t>(query_len));
    const Tensor k = Tensor::contiguous(DType::f32, {1, 1, kLength, kDim}, key.data());
    const Tensor v = Tensor::contiguous(DType::f32, {1, 1, kLength, kDim}, value.data());
    fill(k, Fill::normal, random);
    fill(v, Fill::normal, random);
    for (int64_t block = 1; block < kLength / kBlock; block += 2) {
      for (const LazyMapping* memory : {&key, &value}) {
        ASSERT_EQ(mprotect(static_cast<char*>(memory->data()) + block * kBlockBytes, kBlockBytes, PROT_NONE), 0);
      }
    }
    const MaskLists lists(1, 1, query_len, kLength, kBlock, kBlock,
                          [](int64_t, int64_t, int64_t i, int64_t j) { return j % 2 == 0 && (i + j) % 3 != 0; });
    AttentionInputs in = {
        .query = ConstTensor::contiguous(DType::f32, {1, 1, query_len, kDim}, query.data()), .key = k, .value = v};
    in.block_mask = lists.mask;
    const Tensor o = Tensor::contiguous(DType::f32, {1, 1, query_len, kDim}, out.data());
    const Tensor statistics = Tensor::contiguous(DType::f32, {1, 1, query_len}, lse.data());
    const ConstTensor go = ConstTensor::contiguous(DType::f32, {1, 1, query_len, kDim}, grad.data());
    std::vector<float> grads(static_cast<size_t>((2 * kLength + query_len) * kDim), 7);
    const AttentionGradients to = {
        .grad_query = Tensor::contiguous(DType::f32, {1, 1, query_len, kDim}, grads.data() + 2 * kLength * kDim),
        .grad_key = Tensor::contiguous(DType::f32, {1, 1, kLength, kDim}, grads.data()),
        .grad_value = Tensor::contiguous(DType::f32, {1, 1, kLength, kDim}, grads.data() + kLength * kDim)};
    for (const TestContext& t : contexts_with_threads(2)) {
      ASSERT_TRUE(flash_attention_forward(t.context, in, {.out = o, .softmax_lse = statistics}, {}).ok()) << t.name;
      const AttentionSaved saved = {.out = o, .softmax_lse = statistics, .grad_out = go};
      ASSERT_TRUE(flash_attention_backward(t.context, in, saved, to, {}).ok()) << t.name;
      for (int64_t row = kBlock; row < 2 * kBlock; ++row) {
        ASSERT_EQ(grads[static_cast<size_t>(row * kDim)], 0) << t.name;
      }
    }
  }
}

// A query block without key blocks: out 0, lse -inf or the sink, gradients 0, whatever its grad_out holds.
TEST(AttentionBlockMask, RowsOfNoBlock) {
  Random random(seed() + 9);
  for (const bool sinks : {false, true}) {
    Draw d;
    d.num_heads = 2, d.num_kv_heads = 1, d.head_dim = d.value_head_dim = 16;
    d.query_lens = {70}, d.kv_lens = {90};
    d.sinks = sinks;
    DrawnCall call(d, random);
    const MaskLists lists(1, 1, 70, 90, 16, 32, [](int64_t, int64_t, int64_t i, int64_t j) { return i % 2 && j < 2; });
    call.inputs.block_mask = call.oracle_inputs.block_mask = lists.mask;
    BackwardForm form;
    form.grad_lse = sinks;
    BackwardCallData data(call, form, random);
    for (int64_t i = 0; i < 70; ++i) {
      if (i / 16 % 2 == 1) continue;
      for (int64_t h = 0; h < 2; ++h)
        fill(data.grad_out().selected(0, 0).selected(0, h).selected(0, i), Fill::nan, random);
    }
    for (const TestContext& t : contexts_with_threads(2)) {
      const BackwardCallData::Outcome r = data.run(t.context);
      ASSERT_TRUE(r.status.ok()) << r.status.message();
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t i = 0; i < 70; ++i) {
          const bool none = i / 16 % 2 == 0;
          const ConstTensor out = call.row_of(r.forward.tensors.out, {0, h, i});
          const ConstTensor grad = call.row_of(r.tensors.grad_query, {0, h, i});
          const double lse = get(call.row_of(r.forward.tensors.softmax_lse, {0, h, i}), 0);
          for (int64_t x = 0; x < 16; ++x) {
            ASSERT_TRUE(std::isfinite(get(grad, x))) << t.name << " row " << i;
            if (none) {
              ASSERT_EQ(get(grad, x), 0) << t.name << " row " << i;
            }
            if (none) {
              ASSERT_EQ(get(out, x), 0) << t.name << " row " << i;
            }
          }
          if (none) {
            ASSERT_EQ(lse, sinks ? get(call.inputs.sinks, h) : -HUGE_VAL);
          }
        }
      }
      for (const Tensor* g : {&r.tensors.grad_key, &r.tensors.grad_value}) {
        for (int64_t i = 0; i < g->num_elements(); ++i) {
          ASSERT_TRUE(std::isfinite(get(*g, i))) << t.name;
          if (i / 16 >= 64) {  // keys of the block that nobody sees
            ASSERT_EQ(get(*g, i), 0) << t.name;
          }
        }
      }
      for (int64_t h = 0; sinks && h < 2; ++h) ASSERT_TRUE(std::isfinite(get(r.tensors.grad_sinks, h))) << t.name;
    }
  }
}

AttentionProblem long_problem(int64_t length, int64_t block, double share) {
  AttentionProblem p;
  p.query_len = p.kv_len = length;
  p.head_dim = p.value_head_dim = 64;
  const int64_t blocks = ceil_div(length, block);
  const auto row_blocks = static_cast<int64_t>(share * static_cast<double>(blocks)) + 1;
  p.block_mask = {block, block, 1, 1, row_blocks, row_blocks * blocks};
  return p;
}

TEST(AttentionBlockMask, PlansCutRowsAndKeysWhereTheMaskIsCut) {
  Machine machine;
  machine.cache = {.l1d_bytes = 48 << 10, .l2_bytes = 2 << 20, .l3_bytes_per_core = 2 << 20};
  for (const Isa isa : levels()) {
    machine.isa = isa;
    for (const int64_t block : {64, 128, 256, 512, 96}) {
      const AttentionProblem p = long_problem(8192, block, 0.1);
      const AttentionPlan plan = plan_attention(p, machine);
      EXPECT_EQ(block % plan.block_q, 0) << block << ": " << to_string(plan);
      EXPECT_EQ(block % plan.block_kv, 0) << block << ": " << to_string(plan);
      EXPECT_GE(plan.block_kv, 64);
      AttentionProblem dense = p;
      dense.block_mask = {};
      const AttentionPlan free = plan_attention(dense, machine);
      EXPECT_EQ(free.joined_tiles, 1);
      if (plan.block_kv % 32 == 0) {
        EXPECT_EQ(plan.joined_tiles, free.block_kv / plan.block_kv) << to_string(plan);
      }
      EXPECT_GE(plan.block_q, 4 * plan.tile_rows);
      AttentionBackwardProblem b;
      b.forward = p;
      const AttentionBackwardPlan backward = plan_attention_backward(b, machine);
      EXPECT_EQ(block % backward.block_q, 0) << block << ": " << to_string(backward);
      EXPECT_EQ(block % backward.block_kv, 0) << block << ": " << to_string(backward);
    }
    // Several whole small blocks; a block of no such part is straddled.
    EXPECT_EQ(plan_attention(long_problem(8192, 16, 0.1), machine).block_kv, 64);
    EXPECT_EQ(plan_attention(long_problem(8192, 40, 0.1), machine).block_kv, 80);
    EXPECT_GE(plan_attention(long_problem(8192, 2 * 1009, 0.1), machine).block_kv, 64);
    // Pages of eight bits are packed as floats are; few rows read them in place, a register tile at most, however small
    // the mask's blocks are.
    AttentionProblem bytes = long_problem(8192, 16, 0.1);
    const AttentionPlan of_floats = plan_attention(bytes, machine);
    bytes.kv_dtype = DType::i8, bytes.paged = true, bytes.block_size = 16, bytes.key_groups = bytes.value_groups = 1;
    const AttentionPlan packed = plan_attention(bytes, machine);
    EXPECT_EQ(packed.kv_access, KvAccess::packed_shared);
    EXPECT_EQ(packed.block_q, of_floats.block_q) << to_string(packed);
    bytes.query_len = 1;
    const AttentionPlan in_place = plan_attention(bytes, machine);
    EXPECT_EQ(in_place.kv_access, KvAccess::in_place);
    EXPECT_LE(in_place.block_q, in_place.tile_rows) << to_string(in_place);
  }
}

// A decoded token's keys are split by what it sees; scratch grows with the length and with the visible blocks.
TEST(AttentionBlockMask, PlansCountVisibleBlocks) {
  const Machine machine = detect_machine(detect_isa());
  AttentionProblem p = long_problem(64 << 10, 64, 0.5);
  p.query_len = 1;
  EXPECT_GT(plan_attention(p, machine).kv_splits, 8);
  p.block_mask.row_blocks = 4;
  EXPECT_EQ(plan_attention(p, machine).kv_splits, 1);
  const auto bytes = [&](int64_t length, double share) {
    AttentionBackwardProblem b;
    b.forward = long_problem(length, 64, share);
    return std::max(plan_attention(b.forward, machine).scratch_bytes(2),
                    plan_attention_backward(b, machine).scratch_bytes(2));
  };
  EXPECT_LT(bytes(128 << 10, 0.001), 2 * bytes(64 << 10, 0.002) + (1 << 20));
  EXPECT_LT(bytes(64 << 10, 0.01) - bytes(64 << 10, 0.001), int64_t{64} * 10 * 1024 * 2 * 8);
  AttentionProblem wrong = p;
  wrong.block_mask.block_kv = 0;
  EXPECT_STREQ(plan_attention(wrong, machine).reason, "block_mask.block_kv is 0");
  wrong.block_mask.block_kv = -1;
  EXPECT_STREQ(plan_attention(wrong, machine).reason, "a size is negative");
}

// Checks of 2 x 2 blocks of queries and 3 of keys: each with its message, and nothing written.
TEST(AttentionBlockMask, Refusals) {
  std::vector<float> memory(2 * 4 * 8 * 4, 0.5f), out(256, 7.0f);
  struct Call {
    AttentionInputs in;
    std::vector<int32_t> offsets, columns;
    void renew() {
      const auto queries = static_cast<int64_t>(offsets.size());
      in.block_mask.row_offsets = ConstTensor::contiguous(DType::i32, {1, 1, queries}, offsets.data());
      in.block_mask.columns =
          ConstTensor::contiguous(DType::i32, {static_cast<int64_t>(columns.size())}, columns.data());
    }
  };
  const std::string offsets = "block_mask.row_offsets", columns = "block_mask.columns";
  const struct {
    std::function<void(Call&)> spoil;
    std::string message;
  } kCases[] = {
      {[](Call& c) { c.in.block_mask.row_offsets.dtype = DType::f32; }, offsets + " is f32, but must be i32 or i64"},
      {[](Call& c) { c.in.block_mask.columns.dtype = DType::u8; }, columns + " is u8, but must be i32 or i64"},
      {[](Call& c) { c.in.block_mask.row_offsets = c.in.block_mask.row_offsets.selected(0, 0); },
       offsets + " has rank 2, must be 3: [batch or 1, heads or 1, query blocks + 1]"},
      {[](Call& c) { c.in.block_mask.columns = c.in.block_mask.row_offsets; }, columns + " has rank 3, must be 1"},
      {[](Call& c) { c.in.block_mask.row_offsets = {}; }, columns + " is given, but " + offsets + " is not"},
      {[](Call& c) { c.in.block_mask.block_q = 0; }, "block_mask.block_q is 0, must be 1 to 2^56"},
      {[](Call& c) { c.in.block_mask.block_kv = -3; }, "block_mask.block_kv is -3, must be 1 to 2^56"},
      {[](Call& c) { c.in.block_mask.row_offsets.shape[0] = 3, c.in.block_mask.row_offsets.strides[0] = 0; },
       offsets + " dim 0 is 3, but must be 1 or batch = 2"},
      {[](Call& c) { c.in.block_mask.row_offsets.shape[1] = 3, c.in.block_mask.row_offsets.strides[1] = 0; },
       offsets + " dim 1 is 3, but must be 1, num_kv_heads = 2 or num_heads = 4"},
      {[](Call& c) { c.offsets.pop_back(), c.renew(); },
       offsets + " dim 2 is 2, but must be 3: 2 blocks of 2 queries, of query_len = 3"},
      {[](Call& c) { c.offsets.push_back(3), c.renew(); },
       offsets + " dim 2 is 4, but must be 3: 2 blocks of 2 queries, of query_len = 3"},
      {[](Call& c) { c.offsets[0] = -1; }, offsets + "[0][0][0] is -1, must be 0 to 3, the columns"},
      {[](Call& c) { c.offsets[2] = 4; }, offsets + "[0][0][2] is 4, must be 0 to 3, the columns"},
      {[](Call& c) { c.offsets[1] = 1, c.offsets[2] = 0; },
       offsets + "[0][0][2] is 0, less than " + offsets + "[0][0][1] = 1"},
      {[](Call& c) { c.columns[1] = 3; }, columns + "[1] is 3, but kv_len = 7 has 3 blocks of 3 keys"},
      {[](Call& c) { c.columns[2] = -1; }, columns + "[2] is -1, but kv_len = 7 has 3 blocks of 3 keys"},
      {[](Call& c) { c.columns[0] = 2, c.columns[1] = 0; },
       columns + "[1] is 0, not more than " + columns + "[0] = 2 of the same row"},
      {[](Call& c) { c.columns[1] = 0; }, columns + "[1] is 0, not more than " + columns + "[0] = 0 of the same row"},
  };
  const Context& context = contexts_with_threads(1).front().context;
  const auto run = [&](const std::function<void(Call&)>& spoil) {
    Call call;
    call.offsets = {0, 2, 3}, call.columns = {0, 2, 1};
    call.in.query = ConstTensor::contiguous(DType::f32, {2, 4, 3, 4}, memory.data());
    call.in.key = ConstTensor::contiguous(DType::f32, {2, 2, 7, 4}, memory.data());
    call.in.value = ConstTensor::contiguous(DType::f32, {2, 2, 7, 4}, memory.data());
    call.in.block_mask.block_q = 2, call.in.block_mask.block_kv = 3;
    call.renew();
    spoil(call);
    const Tensor o = Tensor::contiguous(DType::f32, {2, 4, 3, 4}, out.data());
    return flash_attention_forward(const_cast<Context&>(context), call.in, {.out = o}, {});
  };
  ASSERT_EQ(run([](Call&) {}).message(), "");
  std::fill(out.begin(), out.end(), 7.0f);
  for (const auto& c : kCases) {
    const Status status = run(c.spoil);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_EQ(status.message(), "flash_attention_forward: " + c.message);
    EXPECT_EQ(std::count(out.begin(), out.end(), 7.0f), 256);
  }
}

}  // namespace
}  // namespace opst::test

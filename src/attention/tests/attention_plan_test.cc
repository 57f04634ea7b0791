// plan_attention is a pure function: invariants over invented problems and machines, without running a kernel.
#include <gtest/gtest.h>

#include "attention/kv_blocks.h"
#include "attention/layout.h"
#include "attention/tests/attention_problem.h"

namespace opst::test {
namespace {

constexpr Isa kAllLevels[] = {Isa::generic, Isa::avx2, Isa::avx512, Isa::avx512_vnni, Isa::avx512_bf16};

// Skewed to small numbers, now and then as large as `most`.
int64_t size(Random& random, int64_t most) {
  return static_cast<int64_t>(std::pow(static_cast<double>(most), random.uniform(0, 1)));
}

AttentionProblem draw_problem(Random& random) {
  AttentionProblem p;
  p.query_dtype = random.pick({DType::f32, DType::bf16, DType::f16, DType::f64});
  p.kv_dtype = p.query_dtype == DType::f64 ? DType::f64 : random.pick({DType::f32, DType::bf16, DType::f16});
  p.batch = size(random, 64);
  p.num_kv_heads = size(random, 64);
  p.num_heads = p.num_kv_heads * size(random, 32);
  p.query_len = random.chance(0.2) ? 1 : size(random, 1 << 20);
  p.kv_len = random.chance(0.05) ? 0 : size(random, 1 << 20);
  p.head_dim = random.integer(1, 768);
  p.value_head_dim = random.integer(1, 768);
  p.paged = random.chance(0.3);
  p.unit_stride_kv = random.chance(0.8);
  p.heads_side_by_side_kv = random.chance(0.5);
  p.options.causal = random.chance(0.5);
  p.options.path = random.pick({AttentionPath::automatic, AttentionPath::flash, AttentionPath::standard});
  if (random.chance(0.3)) p.options.block_q = size(random, 4096);
  if (random.chance(0.3)) p.options.block_kv = size(random, 4096);
  return p;
}

Machine draw_machine(Random& random) {
  Machine m;
  m.isa = kAllLevels[random.integer(0, 4)];
  m.cores = static_cast<int>(random.integer(1, 128));
  m.cache = {.l1d_bytes = size(random, 128 << 10) + 512,
             .l2_bytes = size(random, 4 << 20) + 1024,
             .l3_bytes_per_core = size(random, 64 << 20)};
  m.bf16_product = random.pick({Bf16Product::dot, Bf16Product::widen});
  return m;
}

std::string about(const AttentionProblem& p, const Machine& m, const AttentionPlan& plan) {
  return to_string(m) + "\n  " + std::string(to_string(p.query_dtype)) + " " + to_string(p.kv_dtype) + " batch " +
         std::to_string(p.batch) + " heads " + std::to_string(p.num_heads) + "/" + std::to_string(p.num_kv_heads) +
         " query_len " + std::to_string(p.query_len) + " kv_len " + std::to_string(p.kv_len) + " dims " +
         std::to_string(p.head_dim) + "/" + std::to_string(p.value_head_dim) + " blocks " +
         std::to_string(p.options.block_q) + " " + std::to_string(p.options.block_kv) + "\n  " + opst::to_string(plan) +
         "\n  seed " + std::to_string(seed());
}

void expect_same(const AttentionPlan& a, const AttentionPlan& b) {
  EXPECT_EQ(opst::to_string(a), opst::to_string(b));
  EXPECT_EQ(a.keys_per_split, b.keys_per_split);
  EXPECT_EQ(a.heads_per_wave, b.heads_per_wave);
  EXPECT_STREQ(a.reason, b.reason);
}

TEST(AttentionPlan, InvariantsHoldForRandomProblemsAndMachines) {
  Random random(seed());
  for (int i = 0; i < 10'000; ++i) {
    const AttentionProblem p = draw_problem(random);
    Machine m = draw_machine(random);
    const AttentionPlan plan = plan_attention(p, m);
    SCOPED_TRACE(about(p, m, plan));
    const int64_t heads = p.batch * p.num_kv_heads, group = p.num_heads / p.num_kv_heads, rows = p.query_len * group;

    // Pure, and the number of cores is not read: results must not depend on threads.
    m.cores = static_cast<int>(random.integer(1, 256));
    expect_same(plan, plan_attention(p, m));

    // What was asked for.
    if (p.options.path != AttentionPath::automatic) {
      EXPECT_EQ(plan.path, p.options.path);
    }
    EXPECT_NE(plan.path, AttentionPath::automatic);
    if (p.options.block_kv > 0) {
      EXPECT_EQ(plan.block_kv, p.options.block_kv);
    }
    if (p.options.block_q > 0) {
      EXPECT_EQ(plan.block_q, std::min(p.options.block_q, rows));
    }
    EXPECT_GE(plan.block_q, 1);
    EXPECT_LE(plan.block_q, std::min<int64_t>(rows, 4096));
    EXPECT_GE(plan.block_kv, 1);
    EXPECT_LE(plan.block_kv, 4096);

    // The product follows the dtypes and what the level may use.
    if (p.query_dtype == DType::f64) {
      EXPECT_EQ(plan.product, AttentionProduct::f64);
    } else if (plan.product == AttentionProduct::bf16_dot) {
      EXPECT_TRUE(p.query_dtype == DType::bf16 && p.kv_dtype == DType::bf16 && m.isa == Isa::avx512_bf16 &&
                  m.bf16_product == Bf16Product::dot);
    } else {
      EXPECT_EQ(plan.product, AttentionProduct::f32);
    }
    const attention::Geometry g = attention::geometry_of(m.isa, plan.product);
    EXPECT_EQ(plan.tile_rows, g.tile_rows);
    if (plan.kv_access == KvAccess::in_place) {
      EXPECT_TRUE(p.unit_stride_kv);
      EXPECT_LE(plan.block_q, g.tile_rows);
      EXPECT_EQ(plan.block_q, rows);
    }
    if (plan.kv_access == KvAccess::packed_per_task) {
      EXPECT_EQ(plan.block_q, rows);
    }

    // The parts cover the keys, and each holds some.
    EXPECT_GE(plan.kv_splits, 1);
    EXPECT_LE(plan.kv_splits, 16);
    if (plan.kv_splits > 1 || plan.parts_per_head > 0) {
      EXPECT_GE(plan.parts_per_head, ceil_div(rows, plan.block_q) * plan.kv_splits);
      // In place up to 8 heads count as one.
      const int64_t as_one = plan.kv_access == KvAccess::in_place ? std::min<int64_t>(p.num_kv_heads, 8) : 1;
      const int64_t heads_counted = ceil_div(p.num_kv_heads, as_one);
      EXPECT_LT(heads_counted * plan.parts_per_head, 2 * 16 + heads_counted);
    }
    EXPECT_EQ(plan.keys_per_split % plan.block_kv, 0);
    EXPECT_GE(plan.kv_splits * plan.keys_per_split, p.kv_len);
    EXPECT_LT((plan.kv_splits - 1) * plan.keys_per_split, std::max<int64_t>(p.kv_len, 1));
    EXPECT_EQ(plan.num_tasks, heads / plan.heads_in_turn * ceil_div(rows, plan.block_q) * plan.kv_splits);
    if (plan.heads_in_turn > 1) {
      EXPECT_EQ(plan.kv_access, KvAccess::in_place);
      EXPECT_TRUE(p.heads_side_by_side_kv);
      EXPECT_EQ(p.num_kv_heads % plan.heads_in_turn, 0);
      EXPECT_GE(plan.num_tasks, 16);
      // All that bits depend on is as where heads lie apart.
      AttentionProblem apart = p;
      apart.heads_side_by_side_kv = false;
      AttentionPlan other = plan_attention(apart, m);
      EXPECT_EQ(other.heads_in_turn, 1);
      other.heads_in_turn = plan.heads_in_turn, other.num_tasks /= plan.heads_in_turn;
      other.scratch_bytes_per_worker = plan.scratch_bytes_per_worker;
      expect_same(plan, other);
    }
    EXPECT_GE(plan.heads_per_wave, 1);
    EXPECT_LE(plan.heads_per_wave, heads);

    // Memory: whole cache lines, and what the layout hands out.
    EXPECT_GT(plan.scratch_bytes_per_worker, 0);
    EXPECT_EQ(plan.scratch_bytes_per_worker % 64, 0);
    EXPECT_GE(plan.scratch_bytes_shared, 0);
    EXPECT_EQ(plan.scratch_bytes_shared % 64, 0);
    EXPECT_EQ(plan.scratch_bytes(3),
              std::min(kMaxBytes, plan.scratch_bytes_shared + 3 * plan.scratch_bytes_per_worker));
    const attention::Layout layout{p, plan, g};
    EXPECT_EQ(plan.scratch_bytes_per_worker, layout.worker_bytes);
    EXPECT_EQ(plan.scratch_bytes_shared, layout.shared_bytes());
    if (plan.kv_access == KvAccess::packed_shared && p.kv_len > 0) {
      EXPECT_GE(plan.scratch_bytes_shared, p.kv_len * (p.head_dim + p.value_head_dim) *
                                               (p.query_dtype == DType::f64 ? 8
                                                : g.step == 2               ? 2
                                                                            : 4));
    }
    if (plan.path == AttentionPath::standard) {
      EXPECT_GE(plan.scratch_bytes_shared, (Size(heads) * rows * p.kv_len * g.accumulator_bytes).value());
    } else {
      // Linear: no more than one packed copy with every tile's padding, and the states of split rows.
      const int64_t tile_bytes = layout.key_tile_bytes + layout.value_tile_bytes + 64;
      EXPECT_LE(plan.scratch_bytes_shared, heads * ((p.kv_len / plan.block_kv + 1) * tile_bytes + 64) +
                                               heads * plan.parts_per_head * layout.state_bytes +
                                               layout.parts_done_bytes());
    }
    if (HasFailure()) return;
  }
}

TEST(AttentionPlan, NoQueriesNoTasks) {
  for (int i = 0; i < 4; ++i) {
    AttentionProblem p;
    p.query_len = p.kv_len = 5;
    (i == 0 ? p.batch : i == 1 ? p.num_heads : i == 2 ? p.num_kv_heads : p.query_len) = 0;
    if (i == 2) p.num_heads = 0;
    const AttentionPlan plan = plan_attention(p, Machine());
    EXPECT_EQ(plan.num_tasks, 0);
    EXPECT_EQ(plan.scratch_bytes(5), 0);
  }
}

// Decode reads keys and values where they are; many rows pack them once.
TEST(AttentionPlan, AccessFollowsTheRowsThatShareAKvHead) {
  for (const Isa isa : kAllLevels) {
    Machine m;
    m.isa = isa;
    AttentionProblem p;
    p.num_heads = 9, p.num_kv_heads = 3, p.query_len = 1, p.kv_len = 1000, p.head_dim = p.value_head_dim = 64;
    EXPECT_EQ(plan_attention(p, m).kv_access, KvAccess::in_place) << to_string(isa);
    p.unit_stride_kv = false;
    EXPECT_EQ(plan_attention(p, m).kv_access, KvAccess::packed_per_task) << to_string(isa);
    p.unit_stride_kv = true;
    p.query_len = 1000;
    EXPECT_EQ(plan_attention(p, m).kv_access, KvAccess::packed_shared) << to_string(isa);
    p.paged = true;
    EXPECT_EQ(plan_attention(p, m).kv_access, KvAccess::packed_shared) << to_string(isa);
  }
}

// As many as keep their tiles in a quarter of L2, and leave 16 tasks; those of one sequence, in equal parts.
TEST(AttentionPlan, HeadsTakeTurnsWhereTheRowsOfATokenAreNeighbours) {
  for (const Isa isa : kAllLevels) {
    Machine m;
    m.isa = isa, m.cache.l2_bytes = 1 << 20;
    AttentionProblem p;
    p.num_heads = 32, p.num_kv_heads = 8, p.query_len = 1, p.kv_len = 32768, p.head_dim = p.value_head_dim = 128;
    EXPECT_EQ(plan_attention(p, m).heads_in_turn, 1) << to_string(isa);
    p.heads_side_by_side_kv = true;
    const AttentionPlan plan = plan_attention(p, m);
    EXPECT_EQ(plan.heads_in_turn, 8) << to_string(isa);
    EXPECT_EQ(plan.kv_splits, 16);
    EXPECT_EQ(plan.num_tasks, 16);
    EXPECT_NE(opst::to_string(plan).find(", 16 splits of 2048 keys, 8 heads in turn, 16 tasks"), std::string::npos)
        << opst::to_string(plan);
    const auto heads = [&](AttentionProblem problem) { return plan_attention(problem, m).heads_in_turn; };
    AttentionProblem other = p;
    other.kv_len = 2048;  // 4 splits
    EXPECT_EQ(heads(other), 2);
    other.batch = 4;
    EXPECT_EQ(heads(other), 8);
    other = p;
    other.kv_len = 500, other.batch = 1;
    EXPECT_EQ(heads(other), 1);
    other = p;
    other.num_heads = other.num_kv_heads = 20;  // two parts of 10 are more than 8, 4 of 5 are not
    EXPECT_EQ(heads(other), 5);
    other = p;
    other.head_dim = other.value_head_dim = 512;  // 32 keys and values of a head: 128 KB
    EXPECT_EQ(heads(other), 2);
    other = p;
    other.copies_keys = true;
    EXPECT_EQ(heads(other), 1);
    other = p;
    other.sparse_indices = {.block_size = 64, .count = 64};
    EXPECT_EQ(heads(other), 1);
    other = p;
    other.block_mask = {.block_q = 1, .block_kv = 64, .row_blocks = 100, .entries = 100};
    EXPECT_EQ(heads(other), 1);
    other = p;
    other.query_len = 100;  // packed
    EXPECT_EQ(heads(other), 1);
  }
}

// Whichever the number of tiles: keys that hold the values have one block of rows, which others do not have here.
TEST(AttentionPlan, RowsOfLatentKeysAreOneBlock) {
  for (const Isa isa : kAllLevels) {
    Machine m;
    m.isa = isa, m.cache.l2_bytes = 1 << 20;
    AttentionProblem p;
    p.num_heads = 128, p.num_kv_heads = 1, p.query_len = 1, p.head_dim = 576, p.value_head_dim = 512;
    for (const int64_t kv_len : {8, 4096}) {
      p.kv_len = kv_len;
      p.values_of_keys = true;
      EXPECT_EQ(plan_attention(p, m).block_q, 128) << to_string(isa) << " " << kv_len;
      EXPECT_EQ(plan_attention(p, m).kv_access, KvAccess::packed_per_task);
      p.values_of_keys = false;
      EXPECT_LT(plan_attention(p, m).block_q, 128) << to_string(isa) << " " << kv_len;
    }
  }
}

// What is fetched of a token is the stretch from its first head to its last: gaps are no longer than rows.
TEST(AttentionPlan, TokensRowsLieInOneStretch) {
  std::vector<float> memory(2 * 5 * 4 * 64);
  const auto side_by_side = [&](int64_t head_stride, int64_t row_stride) {
    AttentionInputs in;
    in.query = ConstTensor::contiguous(DType::f32, {2, 4, 1, 8}, memory.data());
    ConstTensor rows = ConstTensor::contiguous(DType::f32, {2, 4, 5, 8}, memory.data());
    rows.strides[0] = 5 * row_stride, rows.strides[1] = head_stride, rows.strides[2] = row_stride;
    in.key = in.value = rows;
    const Result<AttentionProblem> problem = attention_problem(in, {});
    EXPECT_TRUE(problem.ok()) << problem.status().message();
    return problem.ok() && problem.value().heads_side_by_side_kv;
  };
  EXPECT_TRUE(side_by_side(8, 32));
  EXPECT_TRUE(side_by_side(8, 64));
  EXPECT_TRUE(side_by_side(16, 64));       // a head's keys and values side by side
  EXPECT_FALSE(side_by_side(17, 4 * 17));  // long gaps
  EXPECT_FALSE(side_by_side(16, 64 - 1));  // the next token begins among the heads
  EXPECT_FALSE(side_by_side(5 * 8, 8));
  EXPECT_FALSE(side_by_side(0, 8));
}

// A window is split as a sequence of its length would be, wherever its keys lie.
TEST(AttentionPlan, SplitsOfAWindowAreThoseOfItsKeys) {
  for (const Isa isa : kAllLevels) {
    Machine m;
    m.isa = isa;
    AttentionProblem p;
    p.num_heads = 4, p.query_len = 1, p.kv_len = 1 << 20, p.head_dim = p.value_head_dim = 64;
    const auto splits = [&](int64_t left, int64_t right, bool causal = false) {
      p.options.window_left = left, p.options.window_right = right, p.options.causal = causal;
      return plan_attention(p, m).kv_splits;
    };
    EXPECT_EQ(splits(kUnbounded, kUnbounded), 16);
    EXPECT_EQ(splits(kUnbounded, 0), 16);  // bottom right: all keys
    EXPECT_EQ(splits(4096, 0), 8);
    EXPECT_EQ(splits(4096, kUnbounded, true), 8);
    EXPECT_EQ(splits(2047, 2048), 8);
    EXPECT_EQ(splits(100, 0), 1);
    EXPECT_EQ(splits(-5, 3), 1);  // sees nothing
    p.options.alignment = CausalAlignment::top_left;
    EXPECT_EQ(splits(kUnbounded, 0), 1);  // the first key
    EXPECT_EQ(splits(kUnbounded, 4000), 7);
    p.options.alignment = CausalAlignment::bottom_right;
    p.has_prefix = true;
    EXPECT_EQ(splits(4096, 0), 16);
    p.has_prefix = false;
    // What hides nothing changes nothing.
    p.kv_len = 5000;
    splits(kUnbounded, kUnbounded);
    const std::string plain = opst::to_string(plan_attention(p, m));
    splits(4999, 0);
    EXPECT_EQ(opst::to_string(plan_attention(p, m)), plain);
  }
}

TEST(AttentionPlan, GeometryOfEveryStorageType) {
  for (const Isa isa : kAllLevels) {
    for (const AttentionProduct product : {AttentionProduct::f32, AttentionProduct::bf16_dot, AttentionProduct::f64}) {
      if (product == AttentionProduct::bf16_dot && isa != Isa::avx512_bf16) continue;
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        SCOPED_TRACE(std::string(to_string(isa)) + " " + to_string(product));
        const attention::Geometry& g = attention::geometry_of(isa, product);
        const attention::Kernels& k = attention::kernels_for(isa, product, dtype);
        EXPECT_EQ(g.tile_rows, k.geometry.tile_rows);
        EXPECT_EQ(g.lanes, k.geometry.lanes);
        EXPECT_EQ(g.panel, k.geometry.panel);
        EXPECT_EQ(g.step, k.geometry.step);
        EXPECT_EQ(g.word_bytes, k.geometry.word_bytes);
        EXPECT_EQ(g.accumulator_bytes, k.geometry.accumulator_bytes);
        EXPECT_NE(k.attend_in_place, nullptr);
        EXPECT_EQ(k.attend_at_once == nullptr, product == AttentionProduct::bf16_dot);
        EXPECT_NE(attention::standard_for(isa, product), nullptr);
      }
    }
  }
}

TEST(AttentionPlan, SaysWhyStandard) {
  AttentionProblem p{.num_heads = 1, .num_kv_heads = 1, .query_len = 300, .kv_len = 300};
  p.head_dim = p.value_head_dim = 64;
  const std::string flash = plan_attention(p, Machine()).reason;
  p.options.path = AttentionPath::standard;
  const std::string standard = plan_attention(p, Machine()).reason;
  EXPECT_EQ(flash.find("options.path"), std::string::npos) << flash;
  EXPECT_NE(standard.find("asked for by options.path"), std::string::npos) << standard;
}

TEST(AttentionPlan, PrintsWhatItDecided) {
  AttentionPlan plan;
  plan.path = AttentionPath::flash;
  plan.kv_access = KvAccess::in_place;
  plan.product = AttentionProduct::bf16_dot;
  plan.block_q = 3, plan.block_kv = 64, plan.kv_splits = 4, plan.keys_per_split = 512, plan.num_tasks = 12;
  plan.scratch_bytes_shared = 100, plan.scratch_bytes_per_worker = 200;
  EXPECT_EQ(opst::to_string(plan),
            "flash in_place bf16_dot, block_q 3, block_kv 64, 4 splits of 512 keys, 12 tasks, scratch 100 + 200 bytes "
            "per thread");
  EXPECT_STREQ(to_string(AttentionPath::standard), "standard");
  EXPECT_STREQ(to_string(AttentionPath::automatic), "automatic");
  EXPECT_STREQ(to_string(KvAccess::packed_per_task), "packed_per_task");
  EXPECT_STREQ(to_string(KvAccess::packed_shared), "packed_shared");
  EXPECT_STREQ(to_string(AttentionProduct::f32), "f32");
  EXPECT_STREQ(to_string(AttentionProduct::f64), "f64");
}

// Against every key of every row.
TEST(AttentionKvBlocks, ListsExactlyTheTilesThatSomeRowSees) {
  using attention::KeyInterval;
  using attention::KvBlocks;
  using attention::Visibility;
  Random random(seed() + 1);
  for (int n = 0; n < 20'000; ++n) {
    const int64_t kv_len = random.integer(0, 60);
    Visibility v{.kv_len = kv_len};
    if (random.chance(0.7)) v.low = random.integer(-70, 70);
    if (random.chance(0.7)) v.high = random.chance(0.8) ? random.integer(-70, 70) : v.low + random.integer(-3, 3);
    if (random.chance(0.4)) v.prefix = random.integer(0, kv_len);
    const int64_t group = random.integer(1, 4), first_row = random.integer(0, 50), rows = random.integer(1, 40);
    const int64_t block_kv = random.integer(1, 20), start = random.integer(0, 3) * block_kv;
    const KeyInterval range = {start, start + random.integer(1, 8) * block_kv};
    SCOPED_TRACE("kv_len " + std::to_string(kv_len) + " low " + std::to_string(v.low) + " high " +
                 std::to_string(v.high) + " prefix " + std::to_string(v.prefix) + " group " + std::to_string(group) +
                 " rows " + std::to_string(first_row) + " + " + std::to_string(rows) + " range " +
                 std::to_string(range.begin) + " " + std::to_string(range.end) + " block_kv " +
                 std::to_string(block_kv) + " seed " + std::to_string(seed()));

    const auto sees = [&](int64_t row, int64_t key) {
      const int64_t query = row / group;
      return key < v.prefix || (key >= query + v.low && key <= query + v.high);
    };
    std::vector<int64_t> begin(static_cast<size_t>(rows)), end(begin);
    KvBlocks blocks(v, first_row, rows, group, range, block_kv, begin.data(), end.data());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t key = 0; key < kv_len; ++key) {
        const bool inside = key >= begin[static_cast<size_t>(r)] && key < end[static_cast<size_t>(r)];
        ASSERT_EQ(inside || key < v.prefix, sees(first_row + r, key)) << "row " << r << " key " << key;
      }
    }
    attention::KvTile tile{};
    bool more = blocks.next(&tile);
    for (int64_t first = range.begin; first < std::min(range.end, kv_len); first += block_kv) {
      const int64_t last = std::min({first + block_kv, range.end, kv_len});
      bool some = false, all = true;
      for (int64_t r = first_row; r < first_row + rows; ++r) {
        for (int64_t key = first; key < last; ++key) (sees(r, key) ? some : all) = sees(r, key);
      }
      ASSERT_EQ(more && tile.first_key == first, some) << "tile of key " << first;
      if (!some) continue;
      ASSERT_EQ(tile.count, last - first);
      ASSERT_TRUE(all || tile.partial) << "tile of key " << first;
      more = blocks.next(&tile);
    }
    ASSERT_FALSE(more) << "tile of key " << tile.first_key;
  }
}

// attention_problem checks inputs as the call does, and finds the longest sequences.
TEST(AttentionPlan, TheProblemOfInputs) {
  std::vector<float> memory(9 * 4 * 16);
  const int32_t ends[] = {0, 2, 9};
  const float decimals[] = {0, 2, 9};
  const ConstTensor rows = ConstTensor::contiguous(DType::f32, {9, 4, 16}, memory.data());
  AttentionInputs in{.query = rows, .key = rows, .value = rows};
  in.cu_seqlens_q = in.cu_seqlens_k = ConstTensor::contiguous(DType::i32, {3}, ends);
  const Result<AttentionProblem> problem = attention_problem(in, {.causal = true});
  ASSERT_EQ(problem.status().message(), "");
  EXPECT_EQ(problem.value().batch, 2);
  EXPECT_EQ(problem.value().query_len, 7);
  EXPECT_EQ(problem.value().kv_len, 7);
  EXPECT_EQ(problem.value().value_head_dim, 16);
  EXPECT_TRUE(problem.value().varlen_q && problem.value().varlen_k && problem.value().options.causal);
  in.cu_seqlens_k = ConstTensor::contiguous(DType::f32, {3}, decimals);
  EXPECT_EQ(attention_problem(in).status().message(), "attention_problem: cu_seqlens_k is f32, but must be i32 or i64");
}

// Pair by pair from the definition in attention.h.
TEST(AttentionVisible, PairsAndKeysAreThoseOfTheDefinition) {
  Random random(seed());
  for (int n = 0; n < 3000; ++n) {
    const int64_t query_len = random.integer(0, 12), kv_len = random.integer(0, 14);
    const int64_t prefix = random.chance(0.5) ? 0 : random.integer(0, kv_len);
    AttentionOptions o;
    o.causal = random.chance(0.4);
    o.alignment = random.pick({CausalAlignment::top_left, CausalAlignment::bottom_right});
    const auto side = [&] { return random.chance(0.3) ? kUnbounded : random.integer(-9, 16); };
    o.window_left = side(), o.window_right = side();
    const int64_t off = o.alignment == CausalAlignment::bottom_right ? kv_len - query_len : 0;
    const int64_t right = o.causal ? std::min<int64_t>(o.window_right, 0) : o.window_right;
    double pairs = 0;
    std::vector<bool> seen(static_cast<size_t>(kv_len));
    for (int64_t i = 0; i < query_len; ++i) {
      for (int64_t j = 0; j < kv_len; ++j) {
        const bool after = o.window_left == kUnbounded || j >= i + off - o.window_left;
        const bool before = right == kUnbounded || j <= i + off + right;
        if (!(after && before) && j >= prefix) continue;
        ++pairs;
        seen[static_cast<size_t>(j)] = true;
      }
    }
    const VisibleKeys visible = count_visible(o, query_len, kv_len, prefix);
    ASSERT_EQ(visible.pairs, pairs) << query_len << " " << kv_len << " left " << o.window_left << " right "
                                    << o.window_right << " causal " << o.causal << " prefix " << prefix;
    ASSERT_EQ(visible.keys, std::count(seen.begin(), seen.end(), true));
  }
  // Sizes at which nobody counts one by one.
  EXPECT_EQ(count_visible({.causal = true}, int64_t{1} << 40, int64_t{1} << 40).pairs, 0x1p79 + 0x1p39);
  EXPECT_EQ(count_visible({.window_left = 9, .window_right = 0}, int64_t{1} << 40, int64_t{1} << 40).pairs,
            10 * 0x1p40 - 45);
}

TEST(AttentionPlan, NamesOfNoEnumeratorAreUnknown) {
  EXPECT_STREQ(opst::to_string(static_cast<AttentionPath>(9)), "unknown");
  EXPECT_STREQ(opst::to_string(static_cast<KvAccess>(9)), "unknown");
  EXPECT_STREQ(opst::to_string(static_cast<AttentionProduct>(9)), "unknown");
}

}  // namespace
}  // namespace opst::test

// What lightning_indexer refuses, with the whole message and nothing written, and invariants of its plan.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "attention/indexer.h"
#include "attention/tests/attention_problem.h"
#include "opst/lightning_indexer.h"

namespace opst::test {
namespace {

// A call that is right, for tests to spoil: 2 sequences, 4 heads over 2 key heads, 3 queries, 7 keys of 8 dimensions.
struct Call {
  std::vector<float> memory = std::vector<float>(4096, 0.5f);
  std::vector<float> weights = std::vector<float>(64, 0.5f);
  std::vector<int32_t> out_memory = std::vector<int32_t>(1024, 7);
  std::vector<int32_t> table = {0, 1, 2, 3};
  std::vector<int32_t> lengths = {7, 5};
  std::vector<int32_t> numbers = {3, 1};
  LightningIndexerInputs in;
  LightningIndexerOutputs out;
  LightningIndexerOptions options;

  Call() {
    in.query = ConstTensor::contiguous(DType::f32, {2, 4, 3, 8}, memory.data());
    in.key = ConstTensor::contiguous(DType::f32, {2, 2, 7, 8}, memory.data());
    in.weights = ConstTensor::contiguous(DType::f32, {2, 4, 3}, weights.data());
    out.indices = Tensor::contiguous(DType::i32, {2, 3, 2, 5}, out_memory.data());
    out.values = Tensor::contiguous(DType::f32, {2, 3, 2, 5}, out_memory.data() + 200);
  }
  // The same with pages: 4 blocks of 4 keys, two for each sequence.
  void make_paged() {
    in.key = ConstTensor::contiguous(DType::f32, {4, 4, 2, 8}, memory.data());
    in.block_table = ConstTensor::contiguous(DType::i32, {2, 2}, table.data());
    in.kv_lengths = ConstTensor::contiguous(DType::i32, {2}, lengths.data());
  }
  // Two sequences one after the other: 2 and 1 queries, 4 and 3 keys.
  void make_varlen(std::vector<int32_t> offsets = {0, 2, 3, 0, 4, 7}) {
    in.query = ConstTensor::contiguous(DType::f32, {3, 4, 8}, memory.data());
    in.key = ConstTensor::contiguous(DType::f32, {7, 2, 8}, memory.data());
    in.weights = ConstTensor::contiguous(DType::f32, {3, 4}, weights.data());
    out.indices = Tensor::contiguous(DType::i32, {3, 2, 5}, out_memory.data());
    out.values = Tensor::contiguous(DType::f32, {3, 2, 5}, out_memory.data() + 200);
    numbers = std::move(offsets);
    in.cu_seqlens_q = ConstTensor::contiguous(DType::i32, {3}, numbers.data());
    in.cu_seqlens_k = ConstTensor::contiguous(DType::i32, {3}, numbers.data() + 3);
  }
  void set_query_lengths(int32_t a, int32_t b) {
    numbers = {a, b};
    in.query_lengths = ConstTensor::contiguous(DType::i32, {2}, numbers.data());
  }
  Status run() { return lightning_indexer(contexts().front().context, in, out, options); }
};

struct Refusal {
  const char* name;
  std::function<void(Call&)> spoil;
  std::string message;  // after "lightning_indexer: "
};

const Refusal kRefusals[] = {
    {"query_rank", [](Call& c) { c.in.query = c.in.query.selected(0, 0); },
     "query has rank 3, but [batch, num_heads, query_len, head_dim] has rank 4"},
    {"query_dtype", [](Call& c) { c.in.query.dtype = DType::f64; }, "query is f64, but must be f32, bf16 or f16"},
    {"query_null", [](Call& c) { c.in.query.data = nullptr; },
     "query has null data, but 192 elements: f32 [2, 4, 3, 8]"},
    {"query_negative_stride", [](Call& c) { c.in.query.strides[3] = -1; }, "query stride 3 is -1, but must be >= 0"},
    {"key_dtype", [](Call& c) { c.in.key.dtype = DType::i8; }, "key is i8, but must be f32, bf16 or f16"},
    {"key_head_dim", [](Call& c) { c.in.key.shape[3] = 7; }, "key dim 3 (head_dim) is 7, but query set head_dim = 8"},
    {"key_batch", [](Call& c) { c.in.key.shape[0] = 1; }, "key dim 0 (batch) is 1, but query set batch = 2"},
    {"head_dim_769",
     [](Call& c) {
       c.in.query.shape[3] = c.in.key.shape[3] = 769;
       c.in.query.strides[3] = c.in.key.strides[3] = 0;
     },
     "head_dim is 769, must be 1 to 768"},
    {"heads_over_key_heads", [](Call& c) { c.in.query.shape[1] = c.in.weights.shape[1] = 3; },
     "num_heads is 3, not a multiple of num_kv_heads = 2"},
    {"no_heads", [](Call& c) { c.in.query.shape[1] = c.in.weights.shape[1] = 0; },
     "num_heads is 0, must be a positive multiple of num_kv_heads = 2"},
    {"weights_heads", [](Call& c) { c.in.weights.shape[1] = 2; },
     "weights dim 1 (num_heads) is 2, but query set num_heads = 4"},
    {"weights_queries", [](Call& c) { c.in.weights.shape[2] = 2; },
     "weights dim 2 (query_len) is 2, but query set query_len = 3"},
    {"weights_dtype", [](Call& c) { c.in.weights.dtype = DType::i32; }, "weights is i32, but must be f32, bf16 or f16"},
    {"weights_null", [](Call& c) { c.in.weights.data = nullptr; },
     "weights has null data, but 24 elements: f32 [2, 4, 3]"},
    {"indices_dtype",
     [](Call& c) {
       c.out.indices = Tensor::contiguous(DType::i64, {2, 3, 2, 5}, c.out_memory.data() + 400);
     },
     "indices is i64, but must be i32"},
    {"indices_queries", [](Call& c) { c.out.indices.shape[1] = 2; },
     "indices dim 1 (query_len) is 2, but query set query_len = 3"},
    {"indices_key_heads", [](Call& c) { c.out.indices.shape[2] = 1; },
     "indices dim 2 (num_kv_heads) is 1, but key set num_kv_heads = 2"},
    {"indices_alias", [](Call& c) { c.out.indices.strides[3] = 0; },
     "indices i32 [2, 3, 2, 5] has strides [30, 10, 5, 0], with which elements share addresses, but every element of "
     "an "
     "output needs its own"},
    {"indices_overlap_weights", [](Call& c) { c.out.indices.data = c.weights.data(); },
     "indices i32 [2, 3, 2, 5] overlaps weights f32 [2, 4, 3] in memory, but an output must not"},
    {"values_count", [](Call& c) { c.out.values.shape[3] = 4; },
     "values dim 3 (count) is 4, but indices set count = 5"},
    {"values_dtype", [](Call& c) { c.out.values.dtype = DType::i32; }, "values is i32, but must be f32, bf16 or f16"},
    {"values_overlap_indices", [](Call& c) { c.out.values.data = c.out_memory.data() + 59; },
     "values f32 [2, 3, 2, 5] overlaps indices i32 [2, 3, 2, 5] in memory, but an output must not"},
    {"block_q", [](Call& c) { c.options.block_q = 4097; }, "block_q is 4097, must be 0 to 4096"},
    {"block_kv", [](Call& c) { c.options.block_kv = -1; }, "block_kv is -1, must be 0 to 4096"},
    {"query_lengths_beyond", [](Call& c) { c.set_query_lengths(3, 4); },
     "query_lengths[1] is 4, must be 0 to 3 (query_len of query)"},
    {"query_lengths_negative", [](Call& c) { c.set_query_lengths(-1, 3); },
     "query_lengths[0] is -1, must be 0 to 3 (query_len of query)"},
    {"query_lengths_batch",
     [](Call& c) {
       c.set_query_lengths(1, 1);
       c.in.query_lengths.shape[0] = 1;
     },
     "query_lengths dim 0 (batch) is 1, but query set batch = 2"},
    {"query_lengths_dtype",
     [](Call& c) {
       c.set_query_lengths(1, 1);
       c.in.query_lengths.dtype = DType::f32;
     },
     "query_lengths is f32, but must be i32 or i64"},
    {"query_lengths_and_offsets",
     [](Call& c) {
       c.make_varlen();
       c.in.query_lengths = ConstTensor::contiguous(DType::i32, {2}, c.lengths.data());
     },
     "query_lengths and cu_seqlens_q are given, but only one may be"},
    {"kv_lengths_beyond",
     [](Call& c) {
       c.lengths[1] = 8;
       c.in.kv_lengths = ConstTensor::contiguous(DType::i32, {2}, c.lengths.data());
     },
     "kv_lengths[1] is 8, must be 0 to 7 (kv_len of key)"},
    {"paged_without_lengths",
     [](Call& c) {
       c.make_paged();
       c.in.kv_lengths = {};
     },
     "block_table is given, but kv_lengths is not"},
    {"paged_length",
     [](Call& c) {
       c.make_paged();
       c.lengths[0] = 9;
     },
     "kv_lengths[0] is 9, must be 0 to 8 (2 blocks of 4 keys in block_table)"},
    {"paged_block",
     [](Call& c) {
       c.make_paged();
       c.table[3] = 4;
     },
     "block_table[1][1] is 4, but the cache has 4 blocks"},
    {"paged_negative_block",
     [](Call& c) {
       c.make_paged();
       c.table[0] = -1;
     },
     "block_table[0][0] is -1, but the cache has 4 blocks"},
    {"offsets_decrease",
     [](Call& c) {
       c.make_varlen({0, 2, 1, 0, 4, 7});
     },
     "cu_seqlens_q[2] is 1, less than cu_seqlens_q[1] = 2"},
    {"offsets_beyond",
     [](Call& c) {
       c.make_varlen({0, 2, 3, 0, 4, 8});
     },
     "cu_seqlens_k[2] is 8, but key has 7 rows"},
    {"varlen_weights",
     [](Call& c) {
       c.make_varlen();
       c.in.weights.shape[0] = 2;
     },
     "weights dim 0 (total_q) is 2, but query set total_q = 3"},
    {"varlen_indices",
     [](Call& c) {
       c.make_varlen();
       c.out.indices.shape[0] = 2;
     },
     "indices dim 0 (total_q) is 2, but query set total_q = 3"},
    {"keys_beyond_i32",
     [](Call& c) {
       c.in.key.shape[2] = int64_t{1} << 31;
       c.in.key.strides[2] = 0;
     },
     "the longest sequence has 2147483648 keys, but indices are i32: at most 2147483647"},
};

class LightningIndexerRefuses : public testing::TestWithParam<Refusal> {};
TEST_P(LightningIndexerRefuses, WithItsWholeMessageAndWritesNothing) {
  Call call;
  GetParam().spoil(call);
  const std::vector<float> weights_before = call.weights;
  const std::vector<int32_t> out_before = call.out_memory;
  const Status status = call.run();
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_EQ(status.message(), "lightning_indexer: " + GetParam().message);
  EXPECT_EQ(call.out_memory, out_before);
  EXPECT_EQ(call.weights, weights_before);
  const auto problem = lightning_indexer_problem(call.in, call.out, call.options);
  EXPECT_EQ(problem.status().message(), "lightning_indexer_problem: " + GetParam().message);
}
INSTANTIATE_TEST_SUITE_P(All, LightningIndexerRefuses, testing::ValuesIn(kRefusals),
                         [](const auto& refusal) { return std::string(refusal.param.name); });

TEST(LightningIndexerContract, WhatTheRefusalsSpoilIsLegal) {
  Call dense, lengths, paged, varlen, no_values;
  EXPECT_EQ(dense.run().message(), "");
  lengths.set_query_lengths(3, 1);
  EXPECT_EQ(lengths.run().message(), "");
  paged.make_paged();
  EXPECT_EQ(paged.run().message(), "");
  varlen.make_varlen();
  EXPECT_EQ(varlen.run().message(), "");
  no_values.out.values = {};
  EXPECT_EQ(no_values.run().message(), "");
  EXPECT_EQ(no_values.out_memory[200], 7);
  for (const Call* call : {&dense, &lengths, &paged}) {
    EXPECT_NE(call->out_memory[0], 7);
    EXPECT_NE(call->out_memory[59], 7);
  }
  EXPECT_EQ(lengths.out_memory[59], -1);  // query 2 of a sequence of one
}

TEST(LightningIndexerPlan, InvariantsHoldForRandomProblemsAndMachines) {
  Random random(seed());
  const auto size = [&](int64_t most) {
    return static_cast<int64_t>(std::pow(static_cast<double>(most), random.uniform(0, 1)));
  };
  for (int n = 0; n < 10'000; ++n) {
    LightningIndexerProblem p;
    p.query_dtype = random.pick({DType::f32, DType::bf16, DType::f16});
    p.kv_dtype = random.pick({DType::f32, DType::bf16, DType::f16});
    p.batch = size(64), p.num_kv_heads = size(4), p.num_heads = p.num_kv_heads * size(200);
    p.query_len = random.chance(0.2) ? 1 : size(1 << 20), p.kv_len = random.chance(0.05) ? 0 : size(1 << 20);
    p.head_dim = random.integer(1, 768), p.count = size(8192);
    if (random.chance(0.3)) p.options.block_q = size(4096);
    if (random.chance(0.3)) p.options.block_kv = size(4096);
    Machine m;
    m.isa = random.pick({Isa::generic, Isa::avx2, Isa::avx512, Isa::avx512_vnni, Isa::avx512_bf16});
    m.cores = static_cast<int>(random.integer(1, 128));
    m.cache = {.l1d_bytes = size(128 << 10) + 512, .l2_bytes = size(4 << 20) + 1024, .l3_bytes_per_core = 1 << 20};
    const LightningIndexerPlan plan = plan_lightning_indexer(p, m);
    SCOPED_TRACE(opst::to_string(plan) + ", seed " + std::to_string(seed()));
    EXPECT_GE(plan.block_q, 1);
    EXPECT_LE(plan.block_q, p.query_len);
    EXPECT_GE(plan.block_kv, 1);
    EXPECT_EQ(plan.keys_per_split % plan.block_kv, 0);
    EXPECT_GE(plan.keys_per_split * plan.kv_splits, p.kv_len);
    EXPECT_EQ(plan.num_tasks, p.batch * p.num_kv_heads * ceil_div(p.query_len, plan.block_q) * plan.kv_splits);
    // No part is empty, and a tile's keys fit behind what is kept, unless all keys do.
    EXPECT_TRUE(p.kv_len == 0 || (plan.kv_splits - 1) * plan.keys_per_split < p.kv_len);
    const int64_t part_keys = std::min(p.kv_len, plan.keys_per_split);
    EXPECT_EQ(plan.kept, std::min(p.count, part_keys));
    EXPECT_TRUE(plan.candidates == part_keys || plan.candidates >= plan.kept + plan.block_kv);
    EXPECT_GE(plan.scratch_bytes_per_worker, 0);
    EXPECT_GE(plan.scratch_bytes_shared, 0);
    m.cores = 1;
    EXPECT_EQ(opst::to_string(plan_lightning_indexer(p, m)), opst::to_string(plan));
    if (testing::Test::HasFailure()) return;
  }
}

// Scratch is the packed keys and, for each worker, some queries' candidates: nothing grows with queries times keys.
TEST(LightningIndexerPlan, MemoryIsNoMatrix) {
  for (const TestContext& t : contexts_with_threads(2)) {
    LightningIndexerProblem p;
    p.num_heads = 64, p.head_dim = 128, p.count = 2048;
    int64_t beyond_keys[2];
    for (int i = 0; i < 2; ++i) {
      p.query_len = p.kv_len = 65536 << i;
      const LightningIndexerPlan plan = plan_lightning_indexer(p, t.context.machine());
      const int64_t packed = round_up(p.kv_len, plan.block_kv) * p.head_dim * 4;
      EXPECT_LE(plan.scratch_bytes_shared, packed + (1 << 20)) << opst::to_string(plan);
      beyond_keys[i] = plan.scratch_bytes_per_worker;
    }
    EXPECT_EQ(beyond_keys[0], beyond_keys[1]);
    EXPECT_LT(beyond_keys[0], 8 << 20);
  }
}

TEST(LightningIndexerPlan, ProblemsOfNoCallHaveAReason) {
  const Machine machine = contexts().front().context.machine();
  const auto reason = [&](const std::function<void(LightningIndexerProblem&)>& spoil) {
    LightningIndexerProblem p;
    p.num_heads = 4, p.query_len = 3, p.kv_len = 100, p.head_dim = 8, p.count = 5;
    spoil(p);
    const LightningIndexerPlan plan = plan_lightning_indexer(p, machine);
    EXPECT_EQ(plan.num_tasks, 0);
    EXPECT_EQ(plan.scratch_bytes(8), 0);
    return std::string(plan.reason);
  };
  using Problem = LightningIndexerProblem;
  EXPECT_EQ(reason([](Problem& p) { p.kv_len = -1; }), "a size is negative");
  EXPECT_EQ(reason([](Problem& p) { p.kv_len = INT64_MAX; }), "a size is beyond 2^56");
  EXPECT_EQ(reason([](Problem& p) { p.head_dim = 0; }), "head_dim or value_head_dim is 0");
  EXPECT_EQ(reason([](Problem& p) { p.options.block_kv = 5000; }), "block_q or block_kv is not 0 to 4096");
  EXPECT_EQ(reason([](Problem& p) { p.count = -1; }), "count is negative or beyond 2^56");
  EXPECT_EQ(reason([](Problem& p) { p.num_heads = 0; }), "num_heads is no positive multiple of num_kv_heads");
  EXPECT_EQ(reason([](Problem& p) { p.num_kv_heads = 3; }), "num_heads is no positive multiple of num_kv_heads");
  EXPECT_EQ(reason([](Problem& p) { p.kv_dtype = DType::f64; }), "a dtype is not f32, bf16 or f16");
  EXPECT_EQ(reason([](Problem& p) { p.count = 0; }), "nothing to select");
  EXPECT_EQ(reason([](Problem& p) { p.query_len = 0; }), "nothing to select");
}

TEST(LightningIndexerPlan, PrintsWhatItDecided) {
  LightningIndexerPlan plan;
  plan.block_q = 2, plan.block_kv = 1024, plan.num_tasks = 40, plan.kept = 2048, plan.candidates = 4096;
  plan.scratch_bytes_shared = 100, plan.scratch_bytes_per_worker = 7;
  EXPECT_EQ(opst::to_string(plan),
            "packed_shared f32, block_q 2, block_kv 1024, keeps 2048 of 4096 candidates, 40 tasks, scratch 100 + 7 "
            "bytes per thread");
  plan.kv_splits = 3, plan.keys_per_split = 2048;
  EXPECT_NE(opst::to_string(plan).find(", 3 splits of 2048 keys, "), std::string::npos);
}

}  // namespace
}  // namespace opst::test

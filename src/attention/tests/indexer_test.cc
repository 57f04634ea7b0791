// lightning_indexer against its reference: drawn calls, exact selections over many tiles and parts, ties, NaN, rows and
// problems of nothing, and scratch memory.
#include <gtest/gtest.h>

#include "attention/tests/indexer_call.h"
#include "testing/count_allocations.h"
#include "testing/lazy_mapping.h"

namespace opst::test {
namespace {

// Every draw in two numbers of threads and with tiles of another size: the same bits.
TEST(LightningIndexer, RandomCallsAgreeWithTheReference) {
  Random random(seed());
  const int draws = exhaustive() ? 20000 : static_cast<int>(1000 * kEffort);
  DrawCounts counts;
  for (int n = 0; n < draws; ++n) {
    const IndexerDraw d = draw_indexer(random);
    const IndexerTestCall call(d, random);
    const TestContext& t =
        contexts()[static_cast<size_t>(random.integer(0, static_cast<int64_t>(contexts().size()) - 1))];
    const IndexerResult r = call.run(t.context);
    ASSERT_EQ(call.judge(r, 24), "") << "draw " << n << ", " << t.name;
    for (const TestContext* other : contexts_like(t)) {
      ASSERT_EQ(call.run(other->context).differs_from(r), "")
          << t.name << " against " << other->name << "\n  " << to_string(d);
    }
    LightningIndexerOptions options = call.options();
    options.block_q = random.integer(0, 9), options.block_kv = random.integer(0, 50);
    ASSERT_EQ(call.run(t.context, options).differs_from(r), "")
        << t.name << ", block_q " << options.block_q << ", block_kv " << options.block_kv << "\n  " << to_string(d);
    counts.add(d.call);
  }
  std::printf("%d draws, with at least 3 tiles in both directions %.1f %%\n", draws, 100.0 * counts.many_tiles / draws);
  for (const char* name : {"causal", "varlen queries", "varlen keys", "pages", "lengths differ", "strides"}) {
    std::printf("  %-24s %5.1f %%\n", name, 100.0 * counts.of[name] / draws);
    if (draws >= 1000) {
      EXPECT_GE(counts.of[name], draws / 10) << name;
    }
  }
}

// A dense call of one sequence, whose scores a test sets: one head of weight 1 and of head_dim 1, query 1, so that key
// j is its score where it is positive. NaN and infinities pass.
struct Scores {
  std::vector<float> query, weights, keys;
  std::vector<int32_t> indices;
  std::vector<float> values;
  LightningIndexerInputs in;
  LightningIndexerOutputs out;

  Scores(std::vector<float> scores, int64_t queries, int64_t count)
      : query(static_cast<size_t>(queries), 1),
        weights(query),
        keys(std::move(scores)),
        indices(static_cast<size_t>(queries * count), 77),
        values(indices.size(), 77) {
    const auto kv_len = static_cast<int64_t>(keys.size());
    in.query = ConstTensor::contiguous(DType::f32, {1, 1, queries, 1}, query.data());
    in.key = ConstTensor::contiguous(DType::f32, {1, 1, kv_len, 1}, keys.data());
    in.weights = ConstTensor::contiguous(DType::f32, {1, 1, queries}, weights.data());
    out.indices = Tensor::contiguous(DType::i32, {1, queries, 1, count}, indices.data());
    out.values = Tensor::contiguous(DType::f32, {1, queries, 1, count}, values.data());
  }
  void run(const TestContext& t, const LightningIndexerOptions& options = {}) {
    std::fill(indices.begin(), indices.end(), 77);
    const Status status = lightning_indexer(t.context, in, out, options);
    ASSERT_TRUE(status.ok()) << status.message() << " " << t.name;
  }
  // Compares with the reference's order of all keys that each query sees.
  void expect_exact(const LightningIndexerOptions& options) const {
    const int64_t queries = in.query.shape[2], count = out.indices.shape[3];
    for (int64_t i = 0; i < queries; ++i) {
      const attention::IndexerRow row = attention::indexer_row(in, options.causal, 0, 0, i);
      const std::vector<int64_t> best = attention::selected(row.scores, count);
      for (int64_t n = 0; n < count; ++n) {
        const bool there = n < static_cast<int64_t>(best.size());
        ASSERT_EQ(indices[static_cast<size_t>(i * count + n)], there ? best[static_cast<size_t>(n)] : -1)
            << "query " << i << ", place " << n;
      }
    }
  }
};

// Orders of scores in which the threshold never rises, rises with every key, or meets ties everywhere; over so many
// keys that candidates are dropped several times, in one part and in parts of the keys.
TEST(LightningIndexer, AdversarialOrdersAreExact) {
  constexpr int64_t kKeys = 5000;
  Random random(seed() + 1);
  std::vector<std::vector<float>> orders(5);
  for (int64_t j = 0; j < kKeys; ++j) {
    orders[0].push_back(static_cast<float>(j + 1));
    orders[1].push_back(static_cast<float>(kKeys - j));
    orders[2].push_back(1);
    orders[3].push_back(static_cast<float>(random.integer(0, 3)));
    orders[4].push_back(static_cast<float>(random.integer(0, 1 << 20)));
  }
  for (const std::vector<float>& order : orders) {
    for (const int64_t count : {1, 40, 2048}) {
      for (const int64_t queries : {1, 3}) {
        Scores scores(order, queries, count);
        for (const TestContext& t : contexts()) {
          SCOPED_TRACE(t.name);
          for (const bool causal : {false, true}) {
            // Three queries: two blocks, which share packed keys.
            const LightningIndexerOptions options = {.causal = causal, .block_q = queries == 3 ? 2 : 0};
            scores.run(t, options);
            scores.expect_exact(options);
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(LightningIndexer, FewQueriesOfManyKeysAreSplit) {
  LightningIndexerProblem p;
  p.num_heads = 64, p.query_len = 1, p.kv_len = 65536, p.head_dim = 128, p.count = 2048;
  for (const TestContext& t : contexts_with_threads(2)) {
    const LightningIndexerPlan plan = plan_lightning_indexer(p, t.context.machine());
    EXPECT_GE(plan.kv_splits, 8) << opst::to_string(plan);
    EXPECT_EQ(plan.kv_access, KvAccess::packed_per_task);
    EXPECT_EQ(plan.kept, 2048);
  }
}

// NaN scores come last, behind -inf; equal scores, 0 and -0 among them, by their indices.
TEST(LightningIndexer, NanComesLastAndTiesBySmallerIndex) {
  const float nan = std::nanf(""), inf = HUGE_VALF;
  // Weight -1: the order of keys is turned round, and an infinite key scores -inf.
  Scores scores({nan, 2, inf, -3, nan, 2, -inf, 0, -0.0f, 1}, 1, 12);
  for (const TestContext& t : contexts()) {
    SCOPED_TRACE(t.name);
    scores.weights[0] = 1;
    scores.run(t);
    EXPECT_EQ(scores.indices, (std::vector<int32_t>{2, 1, 5, 9, 3, 6, 7, 8, 0, 4, -1, -1}));
    const std::vector<float> values(scores.values.begin(), scores.values.begin() + 8);
    EXPECT_EQ(values, (std::vector<float>{inf, 2, 2, 1, 0, 0, 0, 0}));
    for (size_t i = 4; i < 8; ++i) EXPECT_FALSE(std::signbit(scores.values[i])) << i;
    EXPECT_TRUE(std::isnan(scores.values[8]) && std::isnan(scores.values[9]));
    EXPECT_TRUE(scores.values[10] == -inf && scores.values[11] == -inf);
    scores.weights[0] = -1;
    scores.run(t);
    EXPECT_EQ(scores.indices, (std::vector<int32_t>{3, 6, 7, 8, 9, 1, 5, 2, 0, 4, -1, -1}));
  }
}
// Many NaN scores do not push out a number, nor does a NaN query lose its keys.
TEST(LightningIndexer, NanAmongThousandsOfKeys) {
  std::vector<float> order(4000, std::nanf(""));
  for (const size_t j : {size_t{17}, size_t{1999}, size_t{3998}}) order[j] = static_cast<float>(j);
  Scores scores(order, 1, 5);
  for (const TestContext& t : contexts()) {
    SCOPED_TRACE(t.name);
    scores.query[0] = 1;
    scores.run(t);
    EXPECT_EQ(scores.indices, (std::vector<int32_t>{3998, 1999, 17, 0, 1}));
    scores.query[0] = std::nanf("");
    scores.run(t);
    EXPECT_EQ(scores.indices, (std::vector<int32_t>{0, 1, 2, 3, 4}));
    EXPECT_TRUE(std::isnan(scores.values[0]));
  }
}

// The heads of a query lie in several register tiles, register tiles hold heads of two queries: the sum is the same.
TEST(LightningIndexer, AnyNumberOfHeads) {
  Random random(seed() + 2);
  for (const int64_t heads : {1, 11, 12, 13, 25, 130}) {
    IndexerDraw d;
    d.call.num_heads = heads, d.call.head_dim = 16, d.call.value_head_dim = 1;
    d.call.query_lens = {9, 9}, d.call.kv_lens = {301, 77};
    d.call.options.causal = true;
    d.count = 20;
    for (const bool exact : {false, true}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        d.exact = exact;
        d.call.query_dtype = d.call.kv_dtype = dtype;
        const IndexerTestCall call(d, random);
        for (const TestContext& t : contexts()) ASSERT_EQ(call.judge(call.run(t.context), 5), "") << t.name;
      }
    }
  }
}

// Several blocks of queries of several key heads, and several parts of the keys, which are joined for each of them.
TEST(LightningIndexer, SplitKeysOfSeveralBlocksAndHeads) {
  Random random(seed() + 6);
  IndexerDraw d;
  d.call.num_heads = 6, d.call.num_kv_heads = 2, d.call.head_dim = 8;
  d.call.query_lens = {20}, d.call.kv_lens = {3200};
  d.call.options.causal = true, d.call.options.block_q = 8, d.call.options.block_kv = 64;
  d.count = 700;
  d.exact = true;
  const IndexerTestCall call(d, random);
  for (const TestContext& t : contexts()) {
    const IndexerResult r = call.run(t.context);
    ASSERT_EQ(call.judge(r, 7), "") << t.name;
    const auto problem = lightning_indexer_problem(call.inputs, r.outputs, call.options());
    ASSERT_TRUE(problem.ok()) << problem.status().message();
    const LightningIndexerPlan plan = plan_lightning_indexer(problem.value(), t.context.machine());
    EXPECT_EQ(plan.kv_access, KvAccess::packed_shared);
    EXPECT_GE(plan.kv_splits, 2) << opst::to_string(plan);
    EXPECT_GT(plan.kv_splits * plan.kept, 2 * d.count);  // joining keeps the best now and then
  }
}

TEST(LightningIndexer, NothingToSelect) {
  Random random(seed() + 3);
  for (const TestContext& t : contexts_with_threads(2)) {
    IndexerDraw d;
    d.call.query_lens = {3, 3}, d.call.kv_lens = {0, 0};  // no keys
    d.count = 4;
    const IndexerTestCall no_keys(d, random);
    EXPECT_EQ(no_keys.judge(no_keys.run(t.context)), "") << t.name;
    d.call.query_lens = {0, 0}, d.call.kv_lens = {5, 5};  // no queries
    const IndexerTestCall no_queries(d, random);
    EXPECT_TRUE(no_queries.run(t.context).status.ok());
    d.call.query_lens = {2, 2}, d.count = 0;
    const IndexerTestCall no_places(d, random);
    EXPECT_TRUE(no_places.run(t.context).status.ok());
    // More queries than keys, causal: the first see nothing.
    d.call.query_lens = {7, 7}, d.call.kv_lens = {3, 3}, d.count = 5;
    d.call.options.causal = true;
    const IndexerTestCall few_keys(d, random);
    EXPECT_EQ(few_keys.judge(few_keys.run(t.context)), "") << t.name;
    // Varlen with rows behind the last sequence, and no sequence at all.
    d.call.varlen_q = true, d.call.rows_behind = 3;
    const IndexerTestCall behind(d, random);
    EXPECT_EQ(behind.judge(behind.run(t.context)), "") << t.name;
  }
}

// A pool of more than 2^31 elements, whose last block holds the keys.
TEST(LightningIndexer, B44_PagesBeyond32Bits) {
  constexpr int64_t kBlocks = 1'050'001, kBlockSize = 16, kDim = 128, kKeys = 13;
  const LazyMapping pool(kBlocks * kBlockSize * kDim * 2);
  if (pool.data() == nullptr) GTEST_SKIP() << "the system refuses such a mapping";
  Random random(seed() + 5);
  IndexerDraw d;
  d.call.query_dtype = d.call.kv_dtype = DType::bf16;
  d.call.num_heads = 5, d.call.head_dim = kDim, d.call.query_lens = {2}, d.call.kv_lens = {kKeys};
  d.call.options.causal = true;
  d.count = 20;
  IndexerTestCall call(d, random);
  const Tensor pages = Tensor::contiguous(DType::bf16, {kBlocks, kBlockSize, 1, kDim}, pool.data());
  const ConstTensor keys = call.inputs.key;  // [1, 1, kKeys, kDim]
  copy(keys.selected(0, 0).transposed(0, 1), pages.selected(0, kBlocks - 1).narrowed(0, 0, kKeys));
  const std::vector<int32_t> table = {kBlocks - 1}, lengths = {kKeys};
  for (const TestContext& t : contexts_with_threads(2)) {
    const IndexerResult dense = call.run(t.context);
    ASSERT_EQ(call.judge(dense), "");
    const LightningIndexerInputs before = call.inputs;
    call.inputs.key = pages;
    call.inputs.block_table = ConstTensor::contiguous(DType::i32, {1, 1}, table.data());
    call.inputs.kv_lengths = ConstTensor::contiguous(DType::i32, {1}, lengths.data());
    const IndexerResult paged = call.run(t.context);
    call.inputs = before;
    ASSERT_EQ(paged.status.message(), "");
    ASSERT_EQ(paged.differs_from(dense), "") << t.name;
  }
}

// A second call allocates nothing, and scratch is what the plan says, in every access and dtype.
TEST(LightningIndexer, ScratchIsThePlansAndIsLeasedOnce) {
  Random random(seed() + 4);
  for (int n = 0; n < 30; ++n) {
    IndexerDraw d = draw_indexer(random);
    d.call.non_finite = false;
    if (n % 3 == 0) {
      d.call.query_lens = {2}, d.call.kv_lens = {5000}, d.call.varlen_q = d.query_lengths = false;
      d.call.options.block_kv = 0;
    }
    const IndexerTestCall call(d, random);
    for (const int num_threads : {1, 3}) {
      Context context = fresh_context(num_threads);
      const IndexerResult r = call.run(context);
      ASSERT_TRUE(r.status.ok()) << r.status.message();
      const auto problem = lightning_indexer_problem(call.inputs, r.outputs, call.options());
      ASSERT_TRUE(problem.ok()) << problem.status().message();
      const LightningIndexerPlan plan = plan_lightning_indexer(problem.value(), context.machine());
      const int64_t planned = plan.scratch_bytes(num_threads);
      // Workspaces are rounded up to 64 KiB, or 2 MiB.
      EXPECT_EQ(context.workspace_bytes(), round_up(planned, planned < (2 << 20) ? 64 << 10 : 2 << 20))
          << opst::to_string(plan);
      const int64_t heap_before = num_allocations.load(), workspaces_before = context.workspace_allocations();
      const Status again = lightning_indexer(context, call.inputs, r.outputs, call.options());
      const int64_t heap_after = num_allocations.load();
      EXPECT_TRUE(again.ok());
      EXPECT_EQ(heap_after, heap_before) << to_string(d);
      EXPECT_EQ(context.workspace_allocations(), workspaces_before);
    }
  }
}

// Sequences without queries have nothing to select; rows that are no query of any still become -1.
TEST(LightningIndexer, RowsBehindSequencesWithoutQueriesAreWritten) {
  Random random(seed() + 5);
  IndexerDraw d = draw_indexer(random);
  d.call.varlen_q = true, d.query_lengths = d.call.non_finite = false;
  d.call.query_lens = {0, 0}, d.call.kv_lens = {3, 2}, d.call.rows_behind = 3;
  const IndexerTestCall call(d, random);
  for (const TestContext& t : contexts()) EXPECT_EQ(call.judge(call.run(t.context)), "") << t.name;
}

}  // namespace
}  // namespace opst::test

// panel32 pages against the reference: levels, types, groups, lengths around 32 and around a page, head sizes that are
// no whole vectors, causal blocks that end inside a page. What belongs to nobody is NaN.
#include <gtest/gtest.h>

#include "attention/tests/attention_problem.h"

namespace opst::test {
namespace {

struct Types {
  DType query, kv;
};
constexpr Types kTypes[] = {
    {DType::f32, DType::f32}, {DType::bf16, DType::bf16}, {DType::f32, DType::bf16}, {DType::f16, DType::f16}};

TEST(AttentionPanelPages, AgreeWithTheReference) {
  Random random(seed());
  int judged = 0;
  for (const Types types : kTypes) {
    for (const int64_t query_len : {1, 2, 5, 37, 150}) {
      for (const int64_t kv_len : {1, 2, 31, 32, 33, 64, 97, 300, 1100}) {
        ProblemOptions p;
        p.query_dtype = p.out_dtype = types.query;
        p.kv_dtype = types.kv;
        p.batch = random.pick<int64_t>({1, 2});
        p.num_kv_heads = random.pick<int64_t>({1, 2});
        p.num_heads = p.num_kv_heads * random.pick<int64_t>({1, 3, 4, 13});
        p.query_len = query_len, p.kv_len = kv_len;
        p.head_dim = 2 * random.pick<int64_t>({1, 5, 8, 32, 40});
        p.value_head_dim = random.pick<int64_t>({1, 3, 16, 24, 40, 64, 71});
        p.ragged = p.batch > 1;
        p.options.causal = random.chance(0.6);
        p.options.block_kv = random.pick<int64_t>({0, 0, 32, 64, 96});
        Problem problem(p, random);
        problem.layout = PageLayout::panel32;
        const Pages norm = problem.paged(random.pick<int64_t>({32, 64, 96, 128}), random, random.chance(0.5));
        const PanelPages panels = panels_of(norm.inputs);
        for (const TestContext& t : contexts()) {
          if (!exhaustive() && random.chance(0.7)) continue;
          SCOPED_TRACE(t.name);
          const Outcome r = problem.run(t.context, panels.inputs);
          ASSERT_EQ(problem.judge(r, t.context, 200), "");
          ++judged;
        }
      }
    }
  }
  RecordProperty("judged", judged);
  EXPECT_GT(judged, 100);
}

TEST(AttentionPanelPages, SameBitsForEveryNumberOfThreads) {
  Random random(seed());
  for (const Types types : kTypes) {
    ProblemOptions p;
    p.query_dtype = p.out_dtype = types.query;
    p.kv_dtype = types.kv;
    p.num_heads = 6, p.num_kv_heads = 2, p.query_len = 70, p.kv_len = 2500, p.head_dim = 64, p.value_head_dim = 64;
    p.options.causal = true;
    for (const int64_t query_len : {1, 70}) {
      p.query_len = query_len;
      Problem problem(p, random);
      const Pages norm = problem.paged(64, random);
      const PanelPages panels = panels_of(norm.inputs);
      std::vector<Outcome> outcomes;
      for (const int threads : {1, 2, 3, 5}) {
        Result<Context> context = Context::create({.num_threads = threads});
        ASSERT_TRUE(context.ok());
        outcomes.push_back(problem.run(context.value(), panels.inputs));
        ASSERT_EQ(outcomes.back().status.message(), "");
        EXPECT_EQ(outcomes.front().differs_from(outcomes.back()), "");
      }
    }
  }
}

// NaN among the values of keys that some rows see and others do not, at both halves of a pair.
TEST(AttentionPanelPages, HiddenNonFiniteValuesDoNotReachARow) {
  Random random(seed());
  for (const Types types : kTypes) {
    for (const int64_t bad : {40, 41, 63}) {
      ProblemOptions p;
      p.query_dtype = p.out_dtype = types.query;
      p.kv_dtype = types.kv;
      p.query_len = p.kv_len = 70, p.head_dim = 8, p.value_head_dim = 20;
      p.options.causal = true;
      Problem problem(p, random);
      problem.layout = PageLayout::panel32;
      const double nan = std::numeric_limits<double>::quiet_NaN();
      for (int64_t d = 0; d < p.value_head_dim; ++d) set(problem.value(), bad * p.value_head_dim + d, nan);
      const Pages norm = problem.paged(32, random);
      const PanelPages panels = panels_of(norm.inputs);
      for (const TestContext& t : contexts_with_threads(2)) {
        SCOPED_TRACE(t.name);
        const Outcome r = problem.run(t.context, panels.inputs);
        ASSERT_EQ(r.status.message(), "");
        for (int64_t i = 0; i < p.query_len; ++i) {
          for (int64_t d = 0; d < p.value_head_dim; ++d) {
            EXPECT_EQ(std::isnan(get(r.out->tensor(), i * p.value_head_dim + d)), i >= bad) << "row " << i;
          }
        }
      }
    }
  }
}

// The tiles of a prefix and of a window far behind it are no neighbours: dense keys, norm pages and panels, few rows
// and many.
TEST(AttentionTiles, OfAPrefixAndOfAWindowFarBehind) {
  Random random(seed());
  const int32_t prefix[] = {70};
  for (const Types types : kTypes) {
    for (const int64_t query_len : {1, 5, 150}) {
      ProblemOptions p;
      p.query_dtype = p.out_dtype = types.query;
      p.kv_dtype = types.kv;
      p.num_heads = 2, p.query_len = query_len, p.kv_len = 1000, p.head_dim = 64, p.value_head_dim = 48;
      p.options = {.block_kv = 32, .window_left = 100, .window_right = 0};
      Problem problem(p, random);
      Pages norm = problem.paged(64, random);
      problem.inputs.prefix = norm.inputs.prefix = ConstTensor::contiguous(DType::i32, {1}, prefix);
      const PanelPages panels = panels_of(norm.inputs);
      for (const TestContext& t : contexts_with_threads(2)) {
        SCOPED_TRACE(t.name);
        for (const AttentionInputs& in : {problem.inputs, norm.inputs, panels.inputs}) {
          problem.layout = in.key.rank == 5 ? PageLayout::panel32 : PageLayout::norm;
          ASSERT_EQ(problem.judge(problem.run(t.context, in), t.context, 100), "");
        }
      }
    }
  }
}

TEST(AttentionPanelPages, RefusalsNameWhatIsWrong) {
  Random random(1);
  ProblemOptions p;
  p.kv_len = 40, p.head_dim = 8, p.value_head_dim = 8;
  Problem problem(p, random);
  const Pages norm = problem.paged(32, random);
  const PanelPages panels = panels_of(norm.inputs);
  Result<Context> context = Context::create({.num_threads = 1});
  ASSERT_TRUE(context.ok());
  const auto message = [&](const AttentionInputs& in, const AttentionOptions& options) {
    ProblemOptions changed = p;
    changed.options = options;
    Problem other(changed, random);
    return other.run(context.value(), in).status.message();
  };
  EXPECT_EQ(message(panels.inputs, {.path = AttentionPath::standard}),
            "flash_attention_forward: path = standard does not read panel32 pages");
  EXPECT_EQ(message(panels.inputs, {.block_kv = 48}),
            "flash_attention_forward: block_kv is 48, must be a multiple of 32 for panel32 pages");
  AttentionInputs wrong = panels.inputs;
  wrong.key.shape[3] = 4;
  EXPECT_NE(message(wrong, {}), "");
}

}  // namespace
}  // namespace opst::test

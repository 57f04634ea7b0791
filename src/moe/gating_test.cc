#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "moe/test_moe.h"

namespace opst {
namespace {

using namespace test;

// One call's tensors; `out` is filled with NaN and -1 before.
struct Gating {
  Matrix logits, ids, weights, scores;
  std::optional<Matrix> bias, finished;  // [1, num_experts], [1, tokens]
  MoeGatingOptions options = {};
  bool wants_scores = false;

  Gating(Matrix rows, int64_t top_k, DType id_type = DType::i32, DType weight = DType::f32,
         RowLayout layout = RowLayout::contiguous)
      : logits(std::move(rows)),
        ids(id_type, tokens(), top_k, layout),
        weights(weight, tokens(), top_k, layout),
        scores(DType::f32, tokens(), experts(), layout) {}

  int64_t tokens() const { return logits.tensor.shape[0]; }
  int64_t experts() const { return logits.tensor.shape[1]; }
  Status run(Context& context) const {
    return moe_gating(
        context,
        {.logits = logits.tensor,
         .bias = bias ? vector_of(*bias) : Tensor{},
         .finished = finished ? vector_of(*finished) : Tensor{}},
        {.topk_ids = ids.tensor, .topk_weights = weights.tensor, .scores = wants_scores ? scores.tensor : Tensor{}},
        options);
  }
  Indices ids_of(int64_t t) const { return integers_of(ids.tensor.selected(0, t)); }
  Doubles weights_of(int64_t t) const { return row_of(weights.tensor, t); }
  bool intact() const { return logits.intact() && ids.intact() && weights.intact() && scores.intact(); }
};

Matrix random_logits(DType dtype, int64_t tokens, int64_t experts, Random& random,
                     RowLayout layout = RowLayout::contiguous) {
  Matrix m(dtype, tokens, experts, layout);
  fill(m.tensor, Fill::normal, random);
  return m;
}

void expect_ids(const Gating& g, int64_t t, const Indices& expected) {
  EXPECT_EQ(g.ids_of(t), expected) << "token " << t;
}

// Against the reference: ids (with a bias, c of the chosen is compared, since c itself is rounded), weights and scores.
void expect_reference(const Gating& g, const std::string& about) {
  SCOPED_TRACE(about);
  std::vector<Doubles> weights, scores;
  const Doubles bias = g.bias ? to_doubles(vector_of(*g.bias)) : Doubles{};
  const auto k = g.ids.tensor.shape[1];
  for (int64_t t = 0; t < g.tokens(); ++t) {
    const Doubles logits = row_of(g.logits.tensor, t);
    const Indices got = g.ids_of(t), expected = reference::gate_ids(logits, bias, k, g.options);
    scores.push_back(reference::gate_scores(logits, g.options.scores));
    if (g.finished && get(vector_of(*g.finished), t) != 0) {
      ASSERT_EQ(got, Indices(static_cast<size_t>(k), -1));
      weights.push_back(Doubles(static_cast<size_t>(k), 0.0));
      continue;
    }
    if (g.bias) {
      const Doubles c = reference::gate_choice(logits, bias, g.options.scores);
      Indices sorted = got;
      std::sort(sorted.begin(), sorted.end());
      ASSERT_EQ(std::unique(sorted.begin(), sorted.end()), sorted.end()) << "token " << t << ": an expert twice";
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_TRUE(got[i] >= 0 && got[i] < g.experts());
        const double at = c[static_cast<size_t>(got[i])], wanted = c[static_cast<size_t>(expected[i])];
        ASSERT_EQ(std::isnan(at), std::isnan(wanted)) << t << ", " << i;
        ASSERT_TRUE(std::isnan(at) || at == wanted || std::abs(at - wanted) < 1e-6) << t << ", " << i;
      }
    } else {
      ASSERT_EQ(got, expected) << "token " << t;
    }
    weights.push_back(reference::gate_weights(logits, got, g.options));
  }
  const double scale = std::abs(static_cast<double>(g.options.routed_scaling_factor));
  expect_close(g.weights.tensor, Expected(weights, k), about, 4e-7 * scale);
  if (g.wants_scores) expect_close(g.scores.tensor, Expected(scores, g.experts()), about, 4e-7);
  EXPECT_TRUE(g.intact());
}

MoeGatingOptions random_options(Random& random, int64_t experts) {
  MoeGatingOptions o;
  o.scores = random.pick({GateScores::softmax, GateScores::sigmoid});
  o.renormalise = random.chance(0.5);
  o.routed_scaling_factor = random.pick({1.0f, 2.5f, -1.0f});
  o.group_score = random.pick({GroupScore::max, GroupScore::top2_sum});
  if (random.chance(0.5)) {
    do o.num_groups = random.integer(1, experts);
    while (experts % o.num_groups != 0);
    o.kept_groups = random.integer(1, o.num_groups);
  }
  return o;
}

TEST(Gating, EqualsTheReferenceInEveryContext) {
  Random random(seed());
  constexpr int64_t kExperts[] = {1,  2,  3,  4,  5,   7,   8,   15,  16,  17,  31, 32,
                                  33, 60, 64, 65, 127, 128, 129, 256, 257, 300, 512};
  for (const TestContext& t : contexts()) {
    for (int64_t experts : kExperts) {
      const DType dtype = random_float_type(random);
      const MoeGatingOptions options = random_options(random, experts);
      const int64_t most = experts / options.num_groups * options.kept_groups;
      const int64_t top_k = std::min(most, random.pick<int64_t>({1, 2, 4, 8, 10, 17, most}));
      Gating g(random_logits(dtype, random.pick<int64_t>({1, 3, 40}), experts, random, random_layout(random)), top_k,
               random_integer_type(random), weight_type(dtype, random), random_layout(random));
      g.options = options;
      g.wants_scores = random.chance(0.5);
      if (random.chance(0.5)) {
        g.bias.emplace(weight_type(dtype, random), 1, experts, RowLayout::contiguous);
        fill(g.bias->tensor, Fill::uniform, random);
      }
      if (random.chance(0.3)) {
        g.finished.emplace(matrix(DType::boolean, 1, g.tokens(), {0}));
        set(vector_of(*g.finished), g.tokens() / 2, 1);
      }
      if (random.chance(0.3)) set(g.logits.tensor, random.integer(0, g.logits.tensor.num_elements() - 1), kNan);
      if (random.chance(0.3)) set(g.logits.tensor, random.integer(0, g.logits.tensor.num_elements() - 1), -kInf);
      const std::string about = t.name + ", " + to_string(dtype) + " " + std::to_string(experts) + " experts, top " +
                                std::to_string(top_k) + " of " + std::to_string(options.kept_groups) + " of " +
                                std::to_string(options.num_groups) + " groups";
      const Status status = g.run(t.context);
      ASSERT_TRUE(status.ok()) << about << ": " << status.message();
      expect_reference(g, about);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Gating, SameBitsForAnyNumberOfThreadsAndTokens) {
  Random random(seed());
  for (int64_t tokens : {1, 1023, 1024, 1025, 2048}) {
    Gating all(random_logits(DType::f32, tokens, 8, random), 2);
    all.options.scores = GateScores::softmax;
    for (const TestContext& t : contexts_with_threads(1)) {
      ASSERT_TRUE(all.run(t.context).ok());
      const Indices ids = integers_of(all.ids.tensor);
      const Doubles weights = to_doubles(all.weights.tensor);
      for (double w : weights) ASSERT_TRUE(w > 0 && w <= 1);
      // Token by token.
      for (int64_t row : {int64_t{0}, tokens / 2, tokens - 1}) {
        Gating one(matrix(DType::f32, 1, 8, row_of(all.logits.tensor, row)), 2);
        ASSERT_TRUE(one.run(t.context).ok());
        EXPECT_EQ(one.ids_of(0), all.ids_of(row));
        EXPECT_EQ(one.weights_of(0), all.weights_of(row));
      }
      for (const TestContext& other : contexts()) {
        if (other.context.machine().isa != t.context.machine().isa) continue;
        ASSERT_TRUE(all.run(other.context).ok());
        EXPECT_EQ(integers_of(all.ids.tensor), ids) << other.name;
        EXPECT_EQ(to_doubles(all.weights.tensor), weights) << other.name;
      }
    }
  }
}

TEST(Gating, NotANumberComesLast) {
  for (const TestContext& t : contexts_with_threads(2)) {
    SCOPED_TRACE(t.name);
    for (const bool renormalise : {false, true}) {
      for (const GateScores scores : {GateScores::softmax, GateScores::sigmoid}) {
        Matrix rows = matrix(DType::f32, 3, 128, {0});
        for (int64_t e = 0; e < 128; ++e) set(rows.tensor, e, kNan), set(rows.tensor, 256 + e, -kInf);
        set(rows.tensor, 128 + 5, kNan);
        set(rows.tensor, 128 + 7, 2);
        Gating g(std::move(rows), 8);
        g.options = {.scores = scores, .renormalise = renormalise, .routed_scaling_factor = 2};
        ASSERT_TRUE(g.run(t.context).ok());
        const Indices first = {0, 1, 2, 3, 4, 5, 6, 7};
        expect_ids(g, 0, first);
        expect_ids(g, 2, first);
        EXPECT_EQ(g.weights_of(0), Doubles(8, 0.25));
        EXPECT_EQ(g.weights_of(2), Doubles(8, 0.25));
        expect_ids(g, 1, {7, 0, 1, 2, 3, 4, 6, 8});
      }
    }
    // -inf before NaN, both behind numbers; a token of -inf and NaN alone has the first experts.
    Gating few(matrix(DType::f32, 2, 4, {kNan, -kInf, 3, kNan, kNan, -kInf, -kInf, -kInf}), 3);
    few.options.renormalise = true;
    ASSERT_TRUE(few.run(t.context).ok());
    expect_ids(few, 0, {2, 1, 0});
    EXPECT_EQ(few.weights_of(0), (Doubles{1, 0, 0}));
    expect_ids(few, 1, {0, 1, 2});

    Gating four(matrix(DType::f32, 1, 4, {-kInf}), 2);
    ASSERT_TRUE(four.run(t.context).ok());
    expect_ids(four, 0, {0, 1});
    EXPECT_EQ(four.weights_of(0), (Doubles{0.5, 0.5}));
  }
}

TEST(Gating, TiesGoToTheLowerIndexAndNothingElseTies) {
  for (const TestContext& t : contexts_with_threads(1)) {
    SCOPED_TRACE(t.name);
    Gating zeros(matrix(DType::f32, 1, 33, {0}), 6);
    set(zeros.logits.tensor, 4, -0.0);
    ASSERT_TRUE(zeros.run(t.context).ok());
    expect_ids(zeros, 0, {0, 1, 2, 3, 4, 5});

    for (const GateScores scores : {GateScores::softmax, GateScores::sigmoid}) {
      Gating near(matrix(DType::f32, 1, 16, {0}), 2);
      set(near.logits.tensor, 0, 0.5);
      set(near.logits.tensor, 15, static_cast<double>(std::nextafter(0.5f, 1.0f)));
      near.options.scores = scores;
      ASSERT_TRUE(near.run(t.context).ok());
      expect_ids(near, 0, {15, 0});
      // Scores that f32 cannot tell apart, or rounds to 0 or 1.
      Gating far(matrix(DType::f32, 1, 4, {-200, -150, 99, 98}), 4);
      far.options.scores = scores;
      ASSERT_TRUE(far.run(t.context).ok());
      expect_ids(far, 0, {2, 3, 1, 0});
    }
    // At the edge of groups: equal group scores keep the lower group.
    Gating groups(matrix(DType::f32, 1, 8, {1, 0, 1, 0, 1, 0, 1, 0}), 3);
    groups.options.num_groups = 4, groups.options.kept_groups = 2;
    for (const GroupScore score : {GroupScore::max, GroupScore::top2_sum}) {
      groups.options.group_score = score;
      ASSERT_TRUE(groups.run(t.context).ok());
      expect_ids(groups, 0, {0, 2, 1});
    }
  }
}

TEST(Gating, ManyExperts) {
  for (const TestContext& t : contexts_with_threads(1)) {
    SCOPED_TRACE(t.name);
    Gating many(matrix(DType::f32, 1, 512, {0}), 10);
    for (int64_t e = 0; e < 512; ++e) set(many.logits.tensor, e, static_cast<double>(e));
    ASSERT_TRUE(many.run(t.context).ok());
    expect_ids(many, 0, {511, 510, 509, 508, 507, 506, 505, 504, 503, 502});
    Gating one(matrix(DType::bf16, 1, 1, {-3}), 1);
    ASSERT_TRUE(one.run(t.context).ok());
    expect_ids(one, 0, {0});
    EXPECT_EQ(one.weights_of(0), Doubles{1});
    Gating all(matrix(DType::f32, 1, 10000, {0}), 10000);
    for (int64_t e = 0; e < 10000; ++e) set(all.logits.tensor, e, static_cast<double>(e * 7919 % 10000));
    ASSERT_TRUE(all.run(t.context).ok());
    expect_reference(all, t.name);
  }
}

// A bias chooses, and the weights are those of the scores without it, at every number of experts.
TEST(Gating, ABiasAffectsTheChoiceOnly) {
  Random random(seed());
  for (const TestContext& t : contexts_with_threads(1)) {
    SCOPED_TRACE(t.name);
    for (int64_t experts = 8; experts <= 256; experts += 8) {
      const int64_t top_k = std::min<int64_t>(random.integer(1, 16), experts);
      for (const GateScores scores : {GateScores::softmax, GateScores::sigmoid}) {
        Gating g(random_logits(DType::f32, 4, experts, random), top_k);
        g.bias.emplace(DType::f32, 1, experts, RowLayout::contiguous);
        fill(g.bias->tensor, Fill::normal, random);
        g.options.scores = scores;
        ASSERT_TRUE(g.run(t.context).ok());
        expect_reference(g, t.name + ", " + std::to_string(experts));
      }
    }
    Gating g(matrix(DType::f32, 1, 4, {3, 2, 1, -kInf}), 2);
    g.bias.emplace(matrix(DType::f32, 1, 4, {-1, -kInf, 0, 5}));
    ASSERT_TRUE(g.run(t.context).ok());
    expect_ids(g, 0, {3, 2});
    EXPECT_EQ(g.weights_of(0)[0], 0);
    g.options.renormalise = true;
    ASSERT_TRUE(g.run(t.context).ok());
    EXPECT_EQ(g.weights_of(0), (Doubles{0, 1}));
    // A bias that is NaN puts its expert last; one of +inf first.
    g.bias.emplace(matrix(DType::f32, 1, 4, {kNan, 0, kInf, 0}));
    ASSERT_TRUE(g.run(t.context).ok());
    expect_ids(g, 0, {2, 1});
    // Chosen are logits of -inf alone.
    Gating hidden(matrix(DType::f32, 1, 3, {0, -kInf, -kInf}), 2);
    hidden.bias.emplace(matrix(DType::f32, 1, 3, {0, 2, 2}));
    hidden.options.renormalise = true;
    ASSERT_TRUE(hidden.run(t.context).ok());
    expect_ids(hidden, 0, {1, 2});
    EXPECT_EQ(hidden.weights_of(0), (Doubles{0.5, 0.5}));
  }
}

TEST(Gating, ALogitOfInfinityIsLegal) {
  for (const TestContext& t : contexts_with_threads(1)) {
    SCOPED_TRACE(t.name);
    Gating g(matrix(DType::f32, 2, 5, {0, 1, kInf, 2, 3, 0, 1, 2, 3, 4}), 2);
    ASSERT_TRUE(g.run(t.context).ok());
    expect_ids(g, 0, {2, 4});
    EXPECT_TRUE(std::isnan(g.weights_of(0)[0]));
    expect_ids(g, 1, {4, 3});
    EXPECT_GT(g.weights_of(1)[0], 0.6);
    g.options.scores = GateScores::sigmoid;
    ASSERT_TRUE(g.run(t.context).ok());
    expect_ids(g, 0, {2, 4});
    EXPECT_EQ(g.weights_of(0)[0], 1);
  }
}

TEST(Gating, ZeroSizes) {
  Context& context = contexts_with_threads(2).back().context;
  EXPECT_TRUE(Gating(Matrix(DType::f32, 0, 4, RowLayout::contiguous), 2).run(context).ok());
  EXPECT_TRUE(Gating(matrix(DType::f32, 2, 3, {1}), 0).run(context).ok());
  EXPECT_TRUE(Gating(Matrix(DType::f32, 3, 0, RowLayout::contiguous), 0).run(context).ok());
  Gating scores(matrix(DType::f32, 2, 4, {1}), 0);
  scores.wants_scores = true;
  ASSERT_TRUE(scores.run(context).ok());
  EXPECT_EQ(to_doubles(scores.scores.tensor), Doubles(8, 0.25));
}

TEST(Gating, RefusesWithAMessage) {
  Context& context = contexts_with_threads(2).back().context;
  const auto refused = [&](const MoeGatingOptions& options, int64_t top_k, const std::string& message) {
    Gating g(matrix(DType::f32, 2, 6, {1, 2, 3, 4, 5, 6, 1, 2, kNan, 4, 5, 6}), top_k);
    g.options = options;
    expect_refused(g.run(context), "moe_gating: " + message);
    EXPECT_TRUE(untouched(g.ids) && untouched(g.weights));
  };
  refused({}, 7, "topk_ids dim 1 (top_k) is 7, but the choice is among 6 experts");
  refused({.num_groups = 3}, 3, "topk_ids dim 1 (top_k) is 3, but the choice is among 2 experts");
  refused({.num_groups = 4}, 1, "num_groups is 4, but must divide num_experts = 6");
  refused({.num_groups = 0}, 1, "num_groups is 0, but must be at least 1");
  refused({.num_groups = 3, .kept_groups = 4}, 1, "kept_groups is 4, but must be from 1 to num_groups = 3");
  refused({.num_groups = 3, .kept_groups = 0}, 1, "kept_groups is 0, but must be from 1 to num_groups = 3");
  refused({.routed_scaling_factor = kInf}, 1, "routed_scaling_factor is inf, but must be finite");
  refused({.eps = -1}, 1, "eps is -1.000000, but must be finite and at least 0");
  refused({.scores = static_cast<GateScores>(2)}, 1, "scores is 2, but must be softmax (0) or sigmoid (1)");
  refused({.group_score = static_cast<GroupScore>(9)}, 1, "group_score is 9, but must be max (0) or top2_sum (1)");
  refused({.nan_is_error = true}, 1, "logits[1, 2] is NaN, which nan_is_error refuses");

  Gating g(matrix(DType::f32, 2, 6, {1}), 2);
  g.bias.emplace(matrix(DType::f32, 1, 5, {1}));
  expect_refused(g.run(context), "moe_gating: bias dim 0 (num_experts) is 5, but logits set num_experts = 6");
  g.bias.reset();
  EXPECT_EQ(moe_gating(context, {.logits = g.logits.tensor}, {g.ids.tensor, g.logits.tensor.narrowed(1, 0, 2)}).code(),
            StatusCode::invalid_argument);
  Matrix wrong(DType::i8, 2, 2, RowLayout::contiguous);
  EXPECT_EQ(moe_gating(context, {.logits = g.logits.tensor}, {wrong.tensor, g.weights.tensor}).code(),
            StatusCode::invalid_argument);
}

TEST(Gating, PlansSayWhatIsDone) {
  MoeGatingProblem p = {.tokens = 1000, .num_experts = 128, .top_k = 8};
  EXPECT_FALSE(plan_moe_gating(p).all_scores);
  EXPECT_EQ(to_string(plan_moe_gating(p)).substr(0, 73),
            "scores of the chosen (logits choose), 8 tasks of 128 tokens, scratch 0 + ");
  p.options.group_score = GroupScore::top2_sum;
  EXPECT_FALSE(plan_moe_gating(p).all_scores);
  p.options.num_groups = 8;
  EXPECT_TRUE(plan_moe_gating(p).all_scores);
  p.has_bias = true;
  EXPECT_STREQ(plan_moe_gating(p).reason, "scores and a bias choose");
  p.wants_scores = true;
  EXPECT_STREQ(plan_moe_gating(p).reason, "scores are asked for");
  p.num_experts = int64_t{1} << 60, p.top_k = int64_t{1} << 60;
  EXPECT_EQ(plan_moe_gating(p).scratch_bytes_per_worker, int64_t{1} << 56);
  p.num_experts = -1;
  EXPECT_EQ(plan_moe_gating(p).num_tasks, 0);
}

// Gradients: central differences of the reference in double, the choice held.
Doubles expected_gradient(const Doubles& logits, const Indices& ids, const Doubles& grad_weights,
                          const Doubles& grad_scores, const MoeGatingOptions& options) {
  Indices chosen;
  Doubles grad_out;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0) continue;
    chosen.push_back(ids[i]);
    grad_out.push_back(grad_weights[i]);
  }
  grad_out.insert(grad_out.end(), grad_scores.begin(), grad_scores.end());
  return central_differences(grad_out, logits, [&](const Doubles& x) {
    Doubles y = reference::gate_weights(x, chosen, options);
    const Doubles s = reference::gate_scores(x, options.scores);
    if (!grad_scores.empty()) y.insert(y.end(), s.begin(), s.end());
    return y;
  });
}

TEST(GatingBackward, EqualsCentralDifferencesInEveryContext) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (int64_t experts : {1, 2, 5, 16, 17, 33, 64, 131}) {
      const DType dtype = random_float_type(random);
      const int64_t tokens = random.integer(1, 3), top_k = random.integer(1, std::min<int64_t>(experts, 9));
      const Matrix logits = random_logits(dtype, tokens, experts, random, random_layout(random));
      const bool has_scores = random.chance(0.5);
      Matrix ids(random_integer_type(random), tokens, top_k, random_layout(random));
      Matrix grad_weights = random_logits(weight_type(dtype, random), tokens, top_k, random, random_layout(random));
      const Matrix grad_scores = random_logits(DType::f32, tokens, experts, random, random_layout(random));
      Matrix grad_logits(dtype, tokens, experts, random_layout(random));
      const MoeGatingOptions options = {.scores = random.pick({GateScores::softmax, GateScores::sigmoid}),
                                        .renormalise = random.chance(0.5),
                                        .routed_scaling_factor = 1.5f};
      std::vector<Doubles> expected;
      for (int64_t row = 0; row < tokens; ++row) {
        for (int64_t k = 0; k < top_k; ++k)
          set(ids.tensor, row * top_k + k, static_cast<double>((row * 3 + k) % experts));
        if (row == 1) {  // a slot that goes nowhere: whatever its gradient is
          set(ids.tensor, row * top_k, -1);
          set(grad_weights.tensor, row * top_k, kNan);
        }
        expected.push_back(expected_gradient(row_of(logits.tensor, row), integers_of(ids.tensor.selected(0, row)),
                                             row_of(grad_weights.tensor, row),
                                             has_scores ? row_of(grad_scores.tensor, row) : Doubles{}, options));
      }
      const std::string about = t.name + ", " + std::to_string(experts) + " experts, top " + std::to_string(top_k);
      const Status status = moe_gating_backward(t.context,
                                                {.logits = logits.tensor,
                                                 .topk_ids = ids.tensor,
                                                 .grad_topk_weights = grad_weights.tensor,
                                                 .grad_scores = has_scores ? grad_scores.tensor : Tensor{}},
                                                grad_logits.tensor, options);
      ASSERT_TRUE(status.ok()) << status.message();
      expect_close(grad_logits.tensor, Expected(expected, experts), about, 2e-6);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(GatingBackward, NothingFlowsWhereNothingDepends) {
  for (const TestContext& t : contexts_with_threads(1)) {
    SCOPED_TRACE(t.name);
    for (const bool renormalise : {false, true}) {
      for (const GateScores scores : {GateScores::softmax, GateScores::sigmoid}) {
        const Matrix logits = matrix(DType::f32, 2, 3, {-kInf, kNan, -kInf, 1, kNan, 2});
        const Matrix ids = matrix(DType::i32, 2, 2, {0, 1, 2, 1}), ones = matrix(DType::f32, 2, 2, {1});
        const Matrix grad_scores = matrix(DType::f32, 2, 3, {1});
        Matrix grad(DType::f32, 2, 3, RowLayout::contiguous);
        ASSERT_TRUE(moe_gating_backward(t.context, {logits.tensor, ids.tensor, ones.tensor, grad_scores.tensor},
                                        grad.tensor, {.scores = scores, .renormalise = renormalise})
                        .ok());
        EXPECT_EQ(row_of(grad.tensor, 0), Doubles(3, 0.0));
        EXPECT_EQ(row_of(grad.tensor, 1)[1], 0);
      }
    }
  }
}

TEST(GatingBackward, RefusesIds) {
  Context& context = contexts_with_threads(2).back().context;
  const Matrix logits = matrix(DType::f32, 2, 3, {1}), ones = matrix(DType::f32, 2, 2, {1});
  Matrix grad(DType::f32, 2, 3, RowLayout::contiguous);
  for (const double id : {3.0, -2.0}) {
    const Matrix ids = matrix(DType::i64, 2, 2, {0, 1, id, 1});
    expect_refused(moe_gating_backward(context, {logits.tensor, ids.tensor, ones.tensor}, grad.tensor),
                   "moe_gating_backward: topk_ids[1, 0] is " + std::to_string(static_cast<int>(id)) +
                       ", but there are 3 experts (-1 is none)");
    EXPECT_TRUE(untouched(grad));
  }
  const Matrix many = matrix(DType::i32, 2, 4, {0}), weights = matrix(DType::f32, 2, 4, {1});
  expect_refused(moe_gating_backward(context, {logits.tensor, many.tensor, weights.tensor}, grad.tensor),
                 "moe_gating_backward: topk_ids dim 1 (top_k) is 4, but there are 3 experts");
}

}  // namespace
}  // namespace opst

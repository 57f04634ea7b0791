// Reported defects of routers and experts in other libraries, each with the input of the report and the right answer.
#include <gtest/gtest.h>

#include <cmath>

#include "moe/test_moe.h"
#include "opst/grouped_matmul.h"
#include "testing/contexts.h"

namespace opst {
namespace {

using reference::Doubles;
using reference::Indices;
using test::contexts;
using test::contexts_with_threads;
using test::Fill;
using test::kInf;
using test::kNan;
using test::Matrix;
using test::matrix;
using test::Random;
using test::RowLayout;
using test::TestContext;

struct Chosen {
  Status status;
  Indices ids;
  Doubles weights;
  Indices ids_of(int64_t token, int64_t top_k) const {
    return {ids.begin() + token * top_k, ids.begin() + (token + 1) * top_k};
  }
};
Chosen gate(Context& context, const Matrix& logits, int64_t top_k, const MoeGatingOptions& options = {},
            const ConstTensor& bias = {}) {
  const int64_t tokens = logits.tensor.shape[0];
  const Matrix ids(DType::i32, tokens, top_k, RowLayout::contiguous),
      weights(DType::f32, tokens, top_k, RowLayout::contiguous);
  const Status status =
      moe_gating(context, {.logits = logits.tensor, .bias = bias}, {ids.tensor, weights.tensor}, options);
  return {status, test::integers_of(ids.tensor), test::to_doubles(weights.tensor)};
}

Matrix random_rows(DType dtype, int64_t rows, int64_t cols, Random& random) {
  Matrix m(dtype, rows, cols, RowLayout::contiguous);
  test::fill(m.tensor, Fill::normal, random);
  return m;
}

// Rows of NaN or -inf gave duplicate, unwritten or invalid ids.
TEST(MoeCases, B68_RowsThatAreNotNumbers) {
  for (const TestContext& t : contexts_with_threads(2)) {
    SCOPED_TRACE(t.name);
    Random random(7);
    const Matrix logits = random_rows(DType::f32, 3, 128, random);
    const Chosen before = gate(t.context, logits, 8);
    for (int64_t e = 0; e < 128; ++e) test::set(logits.tensor, 128 + e, kNan);
    const Chosen whole = gate(t.context, logits, 8);
    EXPECT_EQ(whole.ids_of(1, 8), (Indices{0, 1, 2, 3, 4, 5, 6, 7}));
    EXPECT_EQ(whole.weights[8], 1.0 / 8);
    for (const int64_t token : {0, 2}) EXPECT_EQ(whole.ids_of(token, 8), before.ids_of(token, 8));
    EXPECT_EQ(gate(t.context, matrix(DType::f32, 1, 4, {-kInf}), 2).ids, (Indices{0, 1}));
    // One NaN: the others are chosen among.
    EXPECT_EQ(gate(t.context, matrix(DType::f32, 1, 4, {1, kNan, 3, 2}), 3).ids, (Indices{2, 3, 0}));
  }
}

// Equal scores gave any of the ids, a tolerance reordered unequal ones, and scores rounded to bf16 were equal.
TEST(MoeCases, B69_TiesAndNearTies) {
  for (const TestContext& t : contexts_with_threads(2)) {
    SCOPED_TRACE(t.name);
    EXPECT_EQ(gate(t.context, matrix(DType::f32, 1, 16, {0}), 4).ids, (Indices{0, 1, 2, 3}));
    const Matrix near = matrix(DType::f32, 1, 16, {0});
    test::set(near.tensor, 0, 0.5);
    test::set(near.tensor, 15, static_cast<double>(std::nextafter(0.5f, 1.0f)));
    EXPECT_EQ(gate(t.context, near, 1).ids, (Indices{15}));
    // 1 and 1 + 2^-20 are one number of bf16, and two here.
    const Chosen two = gate(t.context, matrix(DType::f32, 1, 3, {1, 1 + 0x1p-20, 0.5}), 2);
    EXPECT_EQ(two.ids, (Indices{1, 0}));
    EXPECT_EQ(gate(t.context, matrix(DType::bf16, 1, 3, {1, 1 + 0x1p-20, 0.5}), 2).ids, (Indices{0, 1}));
    // Equal ones on both sides of the edge between groups.
    MoeGatingOptions groups{.num_groups = 2, .kept_groups = 2};
    EXPECT_EQ(gate(t.context, matrix(DType::f32, 1, 8, {0, 0, 0, 9, 9, 0, 0, 0}), 2, groups).ids, (Indices{3, 4}));
    groups.kept_groups = 1;
    EXPECT_EQ(gate(t.context, matrix(DType::f32, 1, 8, {0, 0, 0, 9, 9, 0, 0, 0}), 2, groups).ids, (Indices{3, 0}));
  }
}

// Experts above 255 were never chosen.
TEST(MoeCases, B70_MoreThan256Experts) {
  for (const TestContext& t : contexts_with_threads(1)) {
    SCOPED_TRACE(t.name);
    const Matrix logits = matrix(DType::f32, 1, 512, {0});
    for (int64_t e = 0; e < 512; ++e) test::set(logits.tensor, e, static_cast<double>(e));
    EXPECT_EQ(gate(t.context, logits, 10).ids, (Indices{511, 510, 509, 508, 507, 506, 505, 504, 503, 502}));
    EXPECT_EQ(gate(t.context, matrix(DType::f32, 1, 1, {5}), 1).ids, (Indices{0}));
    EXPECT_EQ(gate(t.context, matrix(DType::f32, 1, 3, {5, 7, 6}), 3).ids, (Indices{1, 2, 0}));
    test::expect_refused(gate(t.context, matrix(DType::f32, 1, 3, {5, 7, 6}), 4).status,
                         "moe_gating: topk_ids dim 1 (top_k) is 4, but the choice is among 3 experts");
  }
}

// At 8 of 128 experts the weights were those of the biased scores.
TEST(MoeCases, B71_TheBiasChoosesAndDoesNotWeigh) {
  Random random(test::seed());
  for (const TestContext& t : contexts_with_threads(1)) {
    SCOPED_TRACE(t.name);
    for (const GateScores scores : {GateScores::softmax, GateScores::sigmoid}) {
      for (int64_t experts = 8; experts <= 256; experts += 8) {
        const int64_t top_k = experts == 128 ? 8 : std::min<int64_t>(experts, random.integer(1, 16));
        const Matrix logits = random_rows(DType::f32, 1, experts, random),
                     bias = random_rows(DType::f32, 1, experts, random);
        const Chosen got = gate(t.context, logits, top_k, {.scores = scores}, test::vector_of(bias));
        const Doubles s = reference::gate_scores(test::to_doubles(logits.tensor), scores);
        double last = kInf;
        for (int64_t k = 0; k < top_k; ++k) {
          const auto id = static_cast<size_t>(got.ids[static_cast<size_t>(k)]);
          EXPECT_NEAR(got.weights[static_cast<size_t>(k)], s[id], 1e-6 * s[id] + 1e-30);
          const double c = s[id] + test::get(bias.tensor, static_cast<int64_t>(id));
          EXPECT_LE(c, last + 1e-6);
          last = c;
        }
      }
    }
  }
}

// Rows from the 1024th on were infinite.
TEST(MoeCases, B72_ATokensChoiceDoesNotDependOnHowManyThereAre) {
  Random random(test::seed());
  const Matrix logits = random_rows(DType::f32, 2048, 8, random);
  for (const TestContext& t : contexts()) {
    SCOPED_TRACE(t.name);
    const Chosen all = gate(t.context, logits, 2);
    ASSERT_TRUE(all.status.ok());
    for (const int64_t tokens : {1, 1023, 1024, 1025}) {
      Matrix some(DType::f32, tokens, 8, RowLayout::contiguous);
      test::copy(logits.tensor.narrowed(0, 0, tokens), some.tensor);
      const Chosen got = gate(t.context, some, 2);
      ASSERT_TRUE(std::equal(got.ids.begin(), got.ids.end(), all.ids.begin())) << tokens;
      ASSERT_TRUE(std::equal(got.weights.begin(), got.weights.end(), all.weights.begin())) << tokens;
    }
  }
}

// Ids were checked by assert alone, and -1, which goes nowhere, was an index.
TEST(MoeCases, B74_IdsThatNoExpertHas) {
  for (const TestContext& t : contexts_with_threads(2)) {
    SCOPED_TRACE(t.name);
    const auto route = [&](const Matrix& ids, const Matrix& rows, const Matrix& slots, const Matrix& counts) {
      return moe_routing(t.context, ids.tensor, 4, {rows.tensor, test::vector_of(slots), test::vector_of(counts)});
    };
    for (const auto& [id, text] : {std::pair{4.0, "4"}, {-2.0, "-2"}, {1073741824.0, "1073741824"}}) {
      const Matrix rows(DType::i32, 1, 1, RowLayout::contiguous), slots(DType::i32, 1, 1, RowLayout::contiguous),
          counts(DType::i64, 1, 4, RowLayout::contiguous);
      const Status status = route(matrix(DType::i32, 1, 1, {id}), rows, slots, counts);
      EXPECT_EQ(status.message().rfind(
                    std::string("moe_routing: topk_ids[0, 0] is ") + text + ", but there are 4 experts", 0),
                0u)
          << status.message();
      EXPECT_TRUE(test::untouched(rows) && test::untouched(slots) && test::untouched(counts));
    }
    const Matrix rows(DType::i32, 2, 2, RowLayout::contiguous), slots(DType::i32, 1, 4, RowLayout::contiguous),
        counts(DType::i64, 1, 4, RowLayout::contiguous);
    ASSERT_TRUE(route(matrix(DType::i32, 2, 2, {3, -1, -1, 0}), rows, slots, counts).ok());
    EXPECT_EQ(test::integers_of(counts.tensor), (Indices{1, 0, 0, 1}));
    EXPECT_EQ(test::integers_of(rows.tensor), (Indices{1, -1, -1, 0}));
    // What has no row adds nothing.
    const Matrix expanded = matrix(DType::f32, 4, 1, {10, 20, kNan, kNan}),
                 out(DType::f32, 2, 1, RowLayout::contiguous);
    ASSERT_TRUE(moe_finalize(t.context, {.expanded = expanded.tensor, .row_of_slot = rows.tensor}, out.tensor).ok());
    EXPECT_EQ(test::to_doubles(out.tensor), (Doubles{20, 10}));
  }
}

// A whole layer of two tokens and four experts had no code for processors without wide vectors.
TEST(MoeCases, B90_ALayerAtEveryLevel) {
  constexpr int64_t kTokens = 2, kFeatures = 32, kExperts = 4, kTopK = 2, kSlots = kTokens * kTopK;
  Random random(9);
  const auto bf16 = [&](int64_t rows, int64_t cols) { return random_rows(DType::bf16, rows, cols, random); };
  const Matrix x = bf16(kTokens, kFeatures), gate_up = bf16(kExperts * 2 * kFeatures, kFeatures),
               down = bf16(kExperts * kFeatures, kFeatures);
  const Matrix logits = random_rows(DType::f32, kTokens, kExperts, random);
  const auto stack = [](const Matrix& m, int64_t n) {
    return ConstTensor::contiguous(DType::bf16, {kExperts, n, kFeatures}, m.tensor.data);
  };
  const Doubles xs = test::to_doubles(x.tensor), first = test::to_doubles(gate_up.tensor),
                second = test::to_doubles(down.tensor);
  for (const TestContext& t : contexts()) {
    SCOPED_TRACE(t.name);
    const auto made = [](DType dtype, int64_t rows, int64_t cols) {
      return Matrix(dtype, rows, cols, RowLayout::contiguous);
    };
    const Matrix ids = made(DType::i32, kTokens, kTopK), weights = made(DType::f32, kTokens, kTopK),
                 rows = made(DType::i32, kTokens, kTopK), slots = made(DType::i32, 1, kSlots),
                 counts = made(DType::i64, 1, kExperts), expanded = made(DType::bf16, kSlots, kFeatures),
                 hidden = made(DType::f32, kSlots, kFeatures), of_experts = made(DType::f32, kSlots, kFeatures),
                 out = made(DType::f32, kTokens, kFeatures);
    const GroupList groups{test::vector_of(counts), GroupListType::counts};
    ASSERT_TRUE(
        moe_gating(t.context, {.logits = logits.tensor}, {ids.tensor, weights.tensor}, {.renormalise = true}).ok());
    ASSERT_TRUE(
        moe_routing(t.context, ids.tensor, kExperts, {rows.tensor, test::vector_of(slots), test::vector_of(counts)})
            .ok());
    ASSERT_TRUE(moe_permute(t.context, x.tensor, test::vector_of(slots), kTopK, expanded.tensor).ok());
    ASSERT_TRUE(grouped_matmul(t.context, expanded.tensor, stack(gate_up, 2 * kFeatures), groups, hidden.tensor,
                               {.activation = Activation::swiglu})
                    .ok());
    ASSERT_TRUE(grouped_matmul(t.context, hidden.tensor, stack(down, kFeatures), groups, of_experts.tensor).ok());
    ASSERT_TRUE(
        moe_finalize(t.context,
                     {.expanded = of_experts.tensor, .row_of_slot = rows.tensor, .topk_weights = weights.tensor},
                     out.tensor)
            .ok());
    for (int64_t token = 0; token < kTokens; ++token) {
      const Doubles l = test::to_doubles(logits.tensor.narrowed(0, token, 1));
      const Indices best = reference::gate_ids(l, {}, kTopK, {.renormalise = true});
      const Doubles share = reference::gate_weights(l, best, {.renormalise = true});
      Doubles want(kFeatures, 0.0);
      double size = 0;
      for (int64_t k = 0; k < kTopK; ++k) {
        const int64_t e = best[static_cast<size_t>(k)];
        const auto dot = [&](const Doubles& a, int64_t a_row, const Doubles& b, int64_t b_row) {
          double sum = 0;
          for (int64_t i = 0; i < kFeatures; ++i) {
            sum += a[static_cast<size_t>(a_row * kFeatures + i)] * b[static_cast<size_t>(b_row * kFeatures + i)];
          }
          return sum;
        };
        Doubles activated;
        for (int64_t j = 0; j < kFeatures; ++j) {
          const double g = dot(xs, token, first, e * 2 * kFeatures + j),
                       u = dot(xs, token, first, (e * 2 + 1) * kFeatures + j);
          activated.push_back(g / (1 + std::exp(-g)) * u);
        }
        for (int64_t j = 0; j < kFeatures; ++j) {
          want[static_cast<size_t>(j)] += share[static_cast<size_t>(k)] * dot(activated, 0, second, e * kFeatures + j);
        }
        for (const double a : activated) size += std::fabs(a);
      }
      for (int64_t j = 0; j < kFeatures; ++j) {
        ASSERT_NEAR(test::get(out.tensor, token * kFeatures + j), want[static_cast<size_t>(j)], 1e-5 * (1 + size));
      }
    }
  }
}

}  // namespace
}  // namespace opst

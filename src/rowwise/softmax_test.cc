// softmax and its gradient.
#include <cmath>
#include <limits>

#include "opst/rowwise.h"
#include "rowwise/test_rows.h"

namespace opst {
namespace {

using namespace test;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kEpsilonF32 = 0x1p-24;

Tensor row(std::vector<float>& v) { return Tensor::contiguous(DType::f32, {static_cast<int64_t>(v.size())}, v.data()); }

TEST(Softmax, EqualsTheReferenceInEveryContext) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (int64_t cols : kRowSizes) {
      const DType dtype = kFloatTypes[random.integer(0, 2)];
      const int64_t rows = random.pick<int64_t>({0, 1, 2, 5});
      const float scale = random.pick({1.0f, 0.125f, -2.0f, 0.0f});
      const auto kind = random.pick({Fill::normal, Fill::ascending_rows, Fill::outlier, Fill::ones});
      const bool in_place = random.chance(0.4);
      const Guard guard = random.chance(0.5) ? Guard::after : Guard::before;
      Matrix x(dtype, rows, cols, random_layout(random), guard), other(dtype, rows, cols, random_layout(random), guard);
      fill(x.tensor, kind, random);
      const std::string about = t.name + ", " + to_string(dtype) + " [" + std::to_string(rows) + ", " +
                                std::to_string(cols) + "] " + to_string(kind) + ", scale " + std::to_string(scale) +
                                (in_place ? ", in place" : "");
      SCOPED_TRACE(about);
      std::vector<Doubles> expected;
      double largest = 0;  // score: its rounding is the result's relative error
      for (int64_t r = 0; r < rows; ++r) {
        const Doubles in = row_of(x.tensor, r);
        expected.push_back(reference::softmax(in, static_cast<double>(scale)));
        for (const double v : in) largest = std::max(largest, std::abs(v * static_cast<double>(scale)));
      }
      const Tensor out = in_place ? x.tensor : other.tensor;
      const Status status = softmax(t.context, x.tensor, out, {.scale = scale});
      ASSERT_TRUE(status.ok()) << status.message();
      if (rows > 0) expect_close(out, Expected(expected, cols), about, 2 * kEpsilonF32 * largest);
      EXPECT_TRUE(x.intact() && other.intact());
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Softmax, ReferenceGradientEqualsCentralDifferences) {
  Random random(seed());
  for (const size_t n : {size_t{1}, size_t{2}, size_t{9}}) {
    const Doubles x = random_doubles(n, random), g = random_doubles(n, random);
    expect_near(reference::softmax_backward(g, reference::softmax(x, 0.7), 0.7),
                central_differences(g, x, [](const Doubles& v) { return reference::softmax(v, 0.7); }), 1e-8);
  }
}

TEST(SoftmaxBackward, EqualsTheReferenceInEveryContext) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (int64_t cols : kRowSizes) {
      const DType dtype = kFloatTypes[random.integer(0, 2)];
      const int64_t rows = random.pick<int64_t>({0, 1, 2, 5});
      const int place = static_cast<int>(random.integer(0, 2));
      Matrix g(dtype, rows, cols, random_layout(random)), y(dtype, rows, cols, random_layout(random)),
          other(dtype, rows, cols, random_layout(random));
      for (const Matrix* m : {&g, &y}) fill(m->tensor, Fill::normal, random);
      ASSERT_TRUE(softmax(t.context, y.tensor, y.tensor).ok());
      const Tensor grad_x = place == 1 ? g.tensor : place == 2 ? y.tensor : other.tensor;
      const std::string about = t.name + ", " + to_string(dtype) + " [" + std::to_string(rows) + ", " +
                                std::to_string(cols) + "], place " + std::to_string(place);
      SCOPED_TRACE(about);
      std::vector<Doubles> expected;
      for (int64_t r = 0; r < rows; ++r) {
        expected.push_back(reference::softmax_backward(row_of(g.tensor, r), row_of(y.tensor, r), 0.5));
      }
      const Status status = softmax_backward(t.context, g.tensor, y.tensor, grad_x, {.scale = 0.5f});
      ASSERT_TRUE(status.ok()) << status.message();
      if (rows > 0) expect_close(grad_x, Expected(expected, cols), about, 16 * kEpsilonF32);
      EXPECT_TRUE(g.intact() && y.intact() && other.intact());
      if (HasFatalFailure()) return;
    }
  }
}

// Rows without a visible element; infinities and NaN in every lane, tails included.
TEST(Softmax, HiddenInfiniteAndNaNRows) {
  for (const TestContext& t : contexts_with_threads(2)) {
    for (const DType dtype : kFloatTypes) {
      for (const int64_t cols : {1, 3, 16, 17, 70}) {
        SCOPED_TRACE(t.name + ", " + to_string(dtype) + ", " + std::to_string(cols));
        // All hidden; all hidden but one; one +inf; one NaN; NaN among hidden ones; the lowest finite number
        // everywhere.
        Matrix x(dtype, 6, cols, RowLayout::contiguous), out(dtype, 6, cols, RowLayout::contiguous);
        const double lowest = dtype == DType::f16 ? -65504.0 : -0x1.fep127;
        for (int64_t i = 0; i < cols; ++i) {
          const bool last = i == cols - 1;
          const double values[] = {-kInf,
                                   last ? 3.0 : -kInf,
                                   last ? kInf : 1.0,
                                   last ? static_cast<double>(NAN) : 1.0,
                                   last ? static_cast<double>(NAN) : -kInf,
                                   lowest};
          for (int64_t r = 0; r < 6; ++r) set(x.tensor, r * cols + i, values[r]);
        }
        ASSERT_TRUE(softmax(t.context, x.tensor, out.tensor).ok());
        for (int64_t i = 0; i < cols; ++i) {
          EXPECT_EQ(get(out.tensor, i), 0.0);
          EXPECT_EQ(get(out.tensor, cols + i), i == cols - 1 ? 1.0 : 0.0);
          for (int64_t r = 2; r < 5; ++r) EXPECT_TRUE(std::isnan(get(out.tensor, r * cols + i))) << r << ", " << i;
          EXPECT_NEAR(get(out.tensor, 5 * cols + i), 1.0 / static_cast<double>(cols), epsilon(dtype)) << i;
        }
        // A hidden row has no gradient.
        Matrix g(dtype, 1, cols, RowLayout::contiguous), grad_x(dtype, 1, cols, RowLayout::contiguous);
        for (int64_t i = 0; i < cols; ++i) set(g.tensor, i, static_cast<double>(i) - 2);
        ASSERT_TRUE(softmax_backward(t.context, g.tensor, out.tensor.narrowed(0, 0, 1), grad_x.tensor).ok());
        for (int64_t i = 0; i < cols; ++i) EXPECT_EQ(get(grad_x.tensor, i), 0.0);
      }
    }
  }
}

// Exponentials in the range of subnormal numbers: 0, the same in the tail as in the body, and the sum is 1.
TEST(Softmax, SubnormalExponentials_B36) {
  constexpr float kScores[] = {0, -87, -90, -95, -100, -104};
  for (const TestContext& t : contexts_with_threads(1)) {
    SCOPED_TRACE(t.name);
    std::vector<float> x(4096 + 5), out(x.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = kScores[i % 6];
    ASSERT_TRUE(softmax(t.context, row(x), row(out)).ok());
    double sum = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(out[i], out[i % 6]) << i;
      if (i % 6 > 1) {
        EXPECT_EQ(out[i], 0.0f) << i;
      }
      sum += static_cast<double>(out[i]);
    }
    EXPECT_NEAR(sum, 1.0, 1e-5);
  }
}

// Shifting all scores changes nothing but their own rounding; here they are exact.
TEST(Softmax, ShiftsLeaveTheResult) {
  Random random(seed());
  std::vector<float> x(100), shifted(100), a(100), b(100);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(random.integer(-20, 20)) / 4;
    shifted[i] = x[i] + 64;
  }
  for (const TestContext& t : contexts_with_threads(1)) {
    ASSERT_TRUE(softmax(t.context, row(x), row(a)).ok());
    ASSERT_TRUE(softmax(t.context, row(shifted), row(b)).ok());
    EXPECT_EQ(a, b);
  }
}

TEST(Softmax, NamesWhatIsWrong) {
  Context& context = contexts_with_threads(1).back().context;
  std::vector<float> a(16), b(16), c(16);
  const auto view = [](std::vector<float>& v, int64_t rows, int64_t cols) {
    return Tensor::contiguous(DType::f32, {rows, cols}, v.data());
  };
  EXPECT_EQ(softmax(context, view(a, 2, 8), view(b, 2, 7)).message(),
            "softmax: out dim 1 (features) is 7, but x set features = 8");
  EXPECT_EQ(softmax(context, view(a, 2, 8), view(b, 2, 8), {.scale = kInf}).message(),
            "softmax: scale is inf, but must be finite");
  EXPECT_EQ(softmax(context, Tensor::contiguous(DType::i32, {4}, a.data()), view(b, 2, 8)).message(),
            "softmax: x is i32, but must be f32, bf16 or f16");
  EXPECT_EQ(softmax_backward(context, view(a, 2, 8), view(b, 2, 8), view(c, 1, 8)).message(),
            "softmax_backward: grad_x dim 0 (dim_0) is 1, but grad_out set dim_0 = 2");
  EXPECT_EQ(softmax_backward(context, view(a, 2, 8), view(b, 1, 8), view(c, 2, 8)).message(),
            "softmax_backward: out dim 0 (dim_0) is 1, but grad_out set dim_0 = 2");
}

}  // namespace
}  // namespace opst

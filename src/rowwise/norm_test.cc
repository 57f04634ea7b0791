// rms_norm, add_rms_norm, layer_norm and their gradients.
#include <cmath>
#include <optional>

#include "opst/rowwise.h"
#include "rowwise/test_rows.h"

namespace opst {
namespace {

using namespace test;

constexpr double kEpsilonF32 = 0x1p-24;

// One norm with random sizes, types, layouts and options, checked against the reference.
enum class Kind { rms, add_rms, layer };
constexpr Kind kKinds[] = {Kind::rms, Kind::add_rms, Kind::layer};

Doubles ones(int64_t n) { return Doubles(static_cast<size_t>(n), 1.0); }
Doubles zeros(int64_t n) { return Doubles(static_cast<size_t>(n), 0.0); }

TEST(Norm, EqualsTheReferenceInEveryContext) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (int64_t cols : kRowSizes) {
      for (Kind kind : kKinds) {
        const DType dtype = kFloatTypes[random.integer(0, 2)];
        const DType weight_dtype = random.chance(0.5) ? DType::f32 : dtype;
        const Guard guard = random.chance(0.5) ? Guard::after : Guard::before;
        const int64_t rows = random.pick<int64_t>({0, 1, 2, 5});
        const double eps = random.pick({0.0, 1e-5, 0.5});
        const auto matrix = [&](DType type, int64_t m) { return Matrix(type, m, cols, random_layout(random), guard); };
        Matrix a = matrix(dtype, rows), b = matrix(dtype, rows), weight = matrix(weight_dtype, 1),
               bias = matrix(weight_dtype, 1), out_memory = matrix(dtype, rows), sum_memory = matrix(dtype, rows);
        for (const Matrix* m : {&a, &b, &weight, &bias}) fill(m->tensor, Fill::normal, random);
        // Results in memory of their own, or in place of inputs.
        const int place = static_cast<int>(random.integer(0, 2));
        Tensor out = out_memory.tensor, sum = sum_memory.tensor;
        if (place == 1) out = a.tensor, sum = b.tensor;
        if (place == 2) out = b.tensor, sum = a.tensor;
        if (kind != Kind::add_rms) out = place == 1 ? a.tensor : out_memory.tensor;
        GuardedBuffer mean_memory(rows * 4), rstd_memory(rows * 4);
        const Tensor mean = mean_memory.tensor(DType::f32, {rows}), rstd = rstd_memory.tensor(DType::f32, {rows});
        const bool has_weight = kind != Kind::layer || random.chance(0.7), has_bias = random.chance(0.7);
        const bool tell = random.chance(0.5);
        const std::string about = t.name + ", kind " + std::to_string(static_cast<int>(kind)) + ", " +
                                  to_string(dtype) + " [" + std::to_string(rows) + ", " + std::to_string(cols) +
                                  "], eps " + std::to_string(eps) + ", place " + std::to_string(place);
        SCOPED_TRACE(about);

        const Tensor w = weight.tensor.selected(0, 0), c = bias.tensor.selected(0, 0);
        std::vector<Doubles> expected, sums, means, rstds;
        double largest_rstd = 1;
        for (int64_t r = 0; r < rows && cols > 0; ++r) {
          Doubles x = row_of(a.tensor, r);
          if (kind == Kind::add_rms) {
            // The sum is rounded before it is normalised.
            alignas(8) char rounded[8];
            const Tensor element = Tensor::contiguous(dtype, {}, rounded);
            const Doubles y = row_of(b.tensor, r);
            for (size_t i = 0; i < x.size(); ++i) {
              set(element, 0, x[i] + y[i]);
              x[i] = get(element, 0);
            }
            sums.push_back(x);
          }
          const Doubles d = kind == Kind::layer ? reference::centred(x) : x;
          means.push_back({reference::mean(x)});
          rstds.push_back({reference::rms_rstd(d, eps)});
          largest_rstd = std::max(largest_rstd, rstds.back()[0]);
          expected.push_back(kind == Kind::layer ? reference::layer_norm(x, has_weight ? to_doubles(w) : ones(cols),
                                                                         has_bias ? to_doubles(c) : zeros(cols), eps)
                                                 : reference::rms_norm(x, to_doubles(w), eps));
        }
        Status status;
        const auto optional = [](bool wanted, const Tensor& tensor) { return wanted ? tensor : Tensor(); };
        if (kind == Kind::rms) {
          status = rms_norm(t.context, a.tensor, w, out, {.eps = eps, .rstd = optional(tell, rstd)});
        } else if (kind == Kind::add_rms) {
          status = add_rms_norm(t.context, a.tensor, b.tensor, w, out, sum, {.eps = eps, .rstd = optional(tell, rstd)});
        } else {
          LayerNormOptions options{.eps = eps, .mean = optional(tell, mean), .rstd = optional(tell, rstd)};
          if (has_weight) options.weight = w;
          if (has_bias) options.bias = c;
          status = layer_norm(t.context, a.tensor, out, options);
        }
        ASSERT_TRUE(status.ok()) << status.message();
        if (cols == 0 || rows == 0) continue;
        if (kind == Kind::layer && cols == 1 && eps == 0) continue;  // 0 / 0
        // The mean of a layer norm costs digits where the row is nearly constant: eps times the row over its spread.
        const double extra = kind == Kind::layer ? 16 * kEpsilonF32 * largest_rstd : 0;
        expect_close(out, Expected(expected, cols), about, extra);
        if (kind == Kind::add_rms) expect_close(sum, Expected(sums, cols), about);
        if (tell) {
          const Tensor rstd_rows = rstd_memory.tensor(DType::f32, {rows, 1});
          expect_close(rstd_rows, Expected(rstds, 1), about, extra * largest_rstd);
          if (kind == Kind::layer) {
            expect_close(mean_memory.tensor(DType::f32, {rows, 1}), Expected(means, 1), about, 4 * kEpsilonF32);
          }
        }
        for (const Matrix* m : {&a, &b, &weight, &bias, &out_memory, &sum_memory}) EXPECT_TRUE(m->intact());
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Norm, ReferenceGradientsEqualCentralDifferences) {
  Random random(seed());
  for (const size_t n : {size_t{1}, size_t{2}, size_t{5}, size_t{16}}) {
    const Doubles x = random_doubles(n, random), w = random_doubles(n, random), b = random_doubles(n, random),
                  g = random_doubles(n, random);
    const double eps = 0.1;
    const reference::NormGradient rms = reference::rms_norm_backward(g, x, w, eps);
    expect_near(rms.x, central_differences(g, x, [&](const Doubles& v) { return reference::rms_norm(v, w, eps); }),
                1e-7);
    expect_near(rms.weight, central_differences(g, w, [&](const Doubles& v) { return reference::rms_norm(x, v, eps); }),
                1e-7);
    const reference::NormGradient layer = reference::layer_norm_backward(g, x, w, eps);
    expect_near(layer.x,
                central_differences(g, x, [&](const Doubles& v) { return reference::layer_norm(v, w, b, eps); }), 1e-7);
    expect_near(layer.weight,
                central_differences(g, w, [&](const Doubles& v) { return reference::layer_norm(x, v, b, eps); }), 1e-7);
    expect_near(layer.bias,
                central_differences(g, b, [&](const Doubles& v) { return reference::layer_norm(x, w, v, eps); }), 1e-7);
  }
}

TEST(NormBackward, EqualsTheReferenceInEveryContext) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (int64_t cols : kRowSizes) {
      for (const bool layer : {false, true}) {
        const DType dtype = kFloatTypes[random.integer(0, 2)];
        const DType weight_dtype = random.chance(0.5) ? DType::f32 : dtype;
        const DType grad_dtype = random.chance(0.5) ? DType::f32 : dtype;
        const Guard guard = random.chance(0.5) ? Guard::after : Guard::before;
        const int64_t rows = random.pick<int64_t>({0, 1, 4, 37});
        const double eps = random.pick({1e-3, 0.5});
        const auto matrix = [&](DType type, int64_t m) { return Matrix(type, m, cols, random_layout(random), guard); };
        Matrix g = matrix(dtype, rows), x = matrix(dtype, rows), weight = matrix(weight_dtype, 1),
               grad_sum = matrix(dtype, rows), grad_x_memory = matrix(dtype, rows), grad_weight = matrix(grad_dtype, 1),
               grad_bias = matrix(grad_dtype, 1);
        for (const Matrix* m : {&g, &x, &weight, &grad_sum}) fill(m->tensor, Fill::normal, random);
        const int place = static_cast<int>(random.integer(0, 2));
        const Tensor grad_x = place == 1 ? g.tensor : place == 2 ? x.tensor : grad_x_memory.tensor;
        const bool has_weight = !layer || random.chance(0.7), has_sum = !layer && random.chance(0.5);
        const bool want_x = random.chance(0.8), want_weight = random.chance(0.8),
                   want_bias = layer && random.chance(0.8);
        const std::string about = t.name + (layer ? ", layer, " : ", rms, ") + to_string(dtype) + " [" +
                                  std::to_string(rows) + ", " + std::to_string(cols) + "], place " +
                                  std::to_string(place) + (has_sum ? ", with the sum's" : "");
        SCOPED_TRACE(about);

        const Tensor w = weight.tensor.selected(0, 0);
        std::vector<Doubles> expected_x;
        Doubles expected_weight = zeros(cols), expected_bias = zeros(cols);
        double scale_x = 0, scale_weight = 0, scale_bias = 0;  // of the summands
        for (int64_t r = 0; r < rows; ++r) {
          const Doubles row = row_of(x.tensor, r), grad = row_of(g.tensor, r);
          const Doubles factor = has_weight ? to_doubles(w) : ones(cols);
          reference::NormGradient gradient = layer ? reference::layer_norm_backward(grad, row, factor, eps)
                                                   : reference::rms_norm_backward(grad, row, factor, eps);
          const double rstd = reference::rms_rstd(layer ? reference::centred(row) : row, eps);
          for (size_t i = 0; i < row.size(); ++i) {
            scale_x = std::max(scale_x, rstd * (std::abs(grad[i] * factor[i]) + 2) * (1 + std::abs(row[i]) * rstd));
            expected_weight[i] += gradient.weight[i];
            if (layer) expected_bias[i] += gradient.bias[i];
            if (has_sum) gradient.x[i] += row_of(grad_sum.tensor, r)[i];
          }
          // The mean is subtracted from x in f32: the error is of the size of x, not of the difference.
          double largest = 0;
          for (double value : row) largest = std::max(largest, std::abs(value));
          for (size_t i = 0; i < row.size(); ++i) {
            scale_weight = std::max(scale_weight, std::abs(grad[i]) * rstd * largest * static_cast<double>(rows));
            scale_bias = std::max(scale_bias, std::abs(grad[i]) * static_cast<double>(rows));
          }
          expected_x.push_back(gradient.x);
        }
        NormGradients gradients;
        if (want_x) gradients.x = grad_x;
        if (want_weight) gradients.weight = grad_weight.tensor.selected(0, 0);
        if (want_bias) gradients.bias = grad_bias.tensor.selected(0, 0);
        Status status;
        if (layer) {
          LayerNormOptions options{.eps = eps};
          if (has_weight) options.weight = w;
          status = layer_norm_backward(t.context, g.tensor, x.tensor, gradients, options);
        } else {
          RmsNormBackwardOptions options{.eps = eps};
          if (has_sum) options.grad_sum = grad_sum.tensor;
          status = rms_norm_backward(t.context, g.tensor, x.tensor, w, gradients, options);
        }
        ASSERT_TRUE(status.ok()) << status.message();
        if (want_x && rows > 0) expect_close(grad_x, Expected(expected_x, cols), about, 8 * kEpsilonF32 * scale_x);
        if (want_weight) {
          expect_close(grad_weight.tensor, Expected({expected_weight}, cols), about, 8 * kEpsilonF32 * scale_weight);
        }
        if (want_bias) {
          expect_close(grad_bias.tensor, Expected({expected_bias}, cols), about, 8 * kEpsilonF32 * scale_bias);
        }
        for (const Matrix* m : {&g, &x, &weight, &grad_sum, &grad_x_memory, &grad_weight, &grad_bias}) {
          EXPECT_TRUE(m->intact());
        }
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The gradient of both summands of add_rms_norm, by differences of two calls in f32 with a large step.
TEST(NormBackward, GivesTheGradientOfASum) {
  Random random(seed());
  constexpr size_t kN = 7;
  const Doubles a = random_doubles(kN, random), b = random_doubles(kN, random), w = random_doubles(kN, random),
                g_out = random_doubles(kN, random), g_sum = random_doubles(kN, random);
  Doubles sum(kN);
  for (size_t i = 0; i < kN; ++i) sum[i] = a[i] + b[i];
  // loss = g_out . rms_norm(a + b) + g_sum . (a + b)
  Doubles expected = central_differences(g_out, a, [&](Doubles v) {
    for (size_t i = 0; i < kN; ++i) v[i] += b[i];
    return reference::rms_norm(v, w, 0.1);
  });
  for (size_t i = 0; i < kN; ++i) expected[i] += g_sum[i];
  Matrix memory(DType::f32, 5, kN, RowLayout::contiguous);
  const Doubles* const rows[] = {&g_out, &sum, &w, &g_sum};
  for (int64_t r = 0; r < 4; ++r) {
    for (size_t i = 0; i < kN; ++i) set(memory.tensor, r * int64_t{kN} + static_cast<int64_t>(i), (*rows[r])[i]);
  }
  const auto row = [&](int64_t r) { return memory.tensor.narrowed(0, r, 1); };
  const Status status = rms_norm_backward(contexts().back().context, row(0), row(1), memory.tensor.selected(0, 2),
                                          {.x = row(4)}, {.eps = 0.1, .grad_sum = row(3)});
  ASSERT_TRUE(status.ok()) << status.message();
  expect_near(row_of(memory.tensor, 4), expected, 2e-5);
}

// A row far from zero keeps its digits: the mean is taken away before the squares.
TEST(Norm, LayerNormOfRowsFarFromZero) {
  std::vector<float> x(1000), out(1000);
  Doubles doubles(1000);
  for (size_t i = 0; i < x.size(); ++i) x[i] = 10000.0f + static_cast<float>(i % 7), doubles[i] = x[i];
  const Doubles expected = reference::layer_norm(doubles, ones(1000), zeros(1000), 0);
  for (const TestContext& t : contexts_with_threads(1)) {
    ASSERT_TRUE(layer_norm(t.context, ConstTensor::contiguous(DType::f32, {1000}, x.data()),
                           Tensor::contiguous(DType::f32, {1000}, out.data()), {.eps = 0})
                    .ok());
    for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(static_cast<double>(out[i]), expected[i], 2e-3) << i;
  }
}

// Weight gradients: the same bits for any number of threads, over many chunks of rows; NaN stays in its column there
// and in its row in the gradient of x.
TEST(NormBackward, TheSameBitsForAnyNumberOfThreads) {
  Random random(seed());
  constexpr int64_t kRows = 1031, kCols = 171;
  std::vector<float> g(kRows * kCols), x(kRows * kCols), w(kCols), grad_x(kRows * kCols), grad_w(kCols), grad_b(kCols);
  const auto matrix = [](std::vector<float>& v) { return Tensor::contiguous(DType::f32, {kRows, kCols}, v.data()); };
  const auto vec = [](std::vector<float>& v) { return Tensor::contiguous(DType::f32, {kCols}, v.data()); };
  for (const Tensor& tensor : {matrix(g), matrix(x), vec(w)}) fill(tensor, Fill::normal, random);
  g[17 * kCols + 3] = NAN;
  for (const bool layer : {false, true}) {
    for (size_t level = 0; level < contexts_with_threads(1).size(); ++level) {
      std::vector<float> first_x, first_w, first_b;
      for (int num_threads : {1, 2, 3, 5}) {
        const TestContext& t = contexts_with_threads(num_threads)[level];
        SCOPED_TRACE(t.name);
        const Status status =
            layer ? layer_norm_backward(t.context, matrix(g), matrix(x),
                                        {.x = matrix(grad_x), .weight = vec(grad_w), .bias = vec(grad_b)},
                                        {.weight = vec(w)})
                  : rms_norm_backward(t.context, matrix(g), matrix(x), vec(w),
                                      {.x = matrix(grad_x), .weight = vec(grad_w)});
        ASSERT_TRUE(status.ok()) << status.message();
        if (first_x.empty()) {
          first_x = grad_x, first_w = grad_w, first_b = grad_b;
          for (int64_t c = 0; c < kCols; ++c) EXPECT_EQ(std::isnan(grad_w[static_cast<size_t>(c)]), c == 3) << c;
          for (int64_t i = 0; i < kRows * kCols; ++i) {
            ASSERT_EQ(std::isnan(grad_x[static_cast<size_t>(i)]), i / kCols == 17) << i;
          }
        }
        EXPECT_TRUE(compare_bits(matrix(grad_x), matrix(first_x)).ok);
        EXPECT_TRUE(compare_bits(vec(grad_w), vec(first_w)).ok);
        if (layer) {
          EXPECT_TRUE(compare_bits(vec(grad_b), vec(first_b)).ok);
        }
      }
    }
  }
}

TEST(Norm, NamesWhatIsWrong) {
  Context& context = contexts_with_threads(1).back().context;
  std::vector<float> a(64), b(64), c(64), d(64), w(16);
  const auto view = [](std::vector<float>& v, int64_t rows, int64_t cols) {
    return Tensor::contiguous(DType::f32, {rows, cols}, v.data());
  };
  const auto vec = [](std::vector<float>& v, int64_t n, DType dtype = DType::f32) {
    return Tensor::contiguous(dtype, {n}, v.data());
  };
  const Tensor x = view(a, 2, 8), y = view(b, 2, 8), z = view(c, 2, 8), u = view(d, 2, 8), weight = vec(w, 8);
  EXPECT_EQ(rms_norm(context, x, vec(w, 8, DType::f16), y).message(), "rms_norm: weight is f16, but must be f32");
  EXPECT_EQ(rms_norm(context, x, weight, y, {.rstd = vec(c, 3)}).message(),
            "rms_norm: rstd dim 0 (dim_0) is 3, but x set dim_0 = 2");
  EXPECT_EQ(rms_norm(context, x, weight, y, {.rstd = vec(b, 2)}).message().substr(0, 32),
            "rms_norm: rstd f32 [2] overlaps ");
  EXPECT_EQ(add_rms_norm(context, x, view(b, 2, 7), weight, z, u).message(),
            "add_rms_norm: b dim 1 (features) is 7, but weight set features = 8");
  EXPECT_EQ(add_rms_norm(context, x, y, weight, z, z).message().substr(0, 42),
            "add_rms_norm: sum f32 [2, 8] overlaps out ");
  EXPECT_EQ(add_rms_norm(context, x, y, weight, z, u, {.eps = -2}).message(),
            "add_rms_norm: eps is -2.000000, but must be >= 0");
  EXPECT_EQ(layer_norm(context, x, y, {.weight = vec(w, 7)}).message(),
            "layer_norm: x dim 1 (features) is 8, but weight set features = 7");
  EXPECT_EQ(layer_norm(context, x, y, {.weight = weight, .bias = vec(c, 7)}).message(),
            "layer_norm: bias dim 0 (features) is 7, but weight set features = 8");
  const Tensor x16 = Tensor::contiguous(DType::bf16, {2, 8}, a.data()),
               y16 = Tensor::contiguous(DType::bf16, {2, 8}, b.data());
  EXPECT_EQ(layer_norm(context, x16, y16, {.weight = weight, .bias = vec(c, 8, DType::bf16)}).message(),
            "layer_norm: bias is bf16, but weight is f32");
  EXPECT_EQ(layer_norm(context, x, y, {.mean = vec(c, 2, DType::bf16)}).message(),
            "layer_norm: mean is bf16, but must be f32");
  EXPECT_EQ(rms_norm_backward(context, x, view(b, 3, 8), weight, {.x = z}).message(),
            "rms_norm_backward: grad_out dim 0 (dim_0) is 2, but x set dim_0 = 3");
  EXPECT_EQ(rms_norm_backward(context, x, y, weight, {.x = view(c, 2, 7)}).message(),
            "rms_norm_backward: gradients.x dim 1 (features) is 7, but weight set features = 8");
  EXPECT_EQ(rms_norm_backward(context, x, y, weight, {.bias = vec(c, 8)}).message(),
            "rms_norm_backward: gradients.bias is asked for, but rms_norm has no bias");
  EXPECT_EQ(rms_norm_backward(context, x, y, weight, {.weight = vec(c, 7)}).message(),
            "rms_norm_backward: gradients.weight dim 0 (features) is 7, but weight set features = 8");
  EXPECT_EQ(rms_norm_backward(context, x, y, weight, {.weight = weight}).message().substr(0, 52),
            "rms_norm_backward: gradients.weight f32 [8] overlaps");
  EXPECT_EQ(layer_norm_backward(context, x16, y, {.x = z}).message(),
            "layer_norm_backward: grad_out is bf16, but must be f32");
}

// Squares are summed in f32. What is above its range is infinite, and the row's rstd 0.
TEST(Norm, RowsWhoseSquaresOverflowGiveZeros) {
  constexpr int64_t kCols = 40;
  const auto row = [](std::vector<float>& v) { return Tensor::contiguous(DType::f32, {1, kCols}, v.data()); };
  const auto vec = [](std::vector<float>& v) { return Tensor::contiguous(DType::f32, {kCols}, v.data()); };
  for (const TestContext& t : contexts_with_threads(1)) {
    for (const float size : {1e18f, 1e20f, 1e30f, 3e38f}) {
      SCOPED_TRACE(t.name + ", elements of " + std::to_string(size));
      const bool fits = size < 2e18f;
      const bool sum_fits = size < 1e37f;
      std::vector<float> x(kCols), half(kCols), w(kCols, 2), bias(kCols, 3), g(kCols, 0), out(kCols), sum(kCols);
      std::vector<float> grad(kCols), grad_weight(kCols), grad_bias(kCols), rstd(1);
      for (size_t i = 0; i < kCols; ++i) x[i] = i % 4 == 1 ? -size : size, half[i] = x[i] / 2;
      g[0] = 1;
      const Tensor r = Tensor::contiguous(DType::f32, {1}, rstd.data());
      const auto expect = [&](const std::vector<float>& got, float at_0, float at_1) {
        EXPECT_NEAR(got[0], at_0, std::abs(at_0) * 1e-5);
        EXPECT_NEAR(got[1], at_1, std::abs(at_1) * 1e-5);
        for (size_t i = 0; i < kCols; ++i) EXPECT_EQ(got[i], got[i % 4 == 1 ? 1 : 0]) << i;
      };
      ASSERT_TRUE(rms_norm(t.context, row(x), vec(w), row(out), {.rstd = r}).ok());
      expect(out, fits ? 2 : 0, fits ? -2 : 0);
      EXPECT_NEAR(rstd[0], fits ? 1 / size : 0, 1e-23);
      ASSERT_TRUE(add_rms_norm(t.context, row(half), row(half), vec(w), row(out), row(sum)).ok());
      expect(out, fits ? 2 : 0, fits ? -2 : 0);
      EXPECT_EQ(sum, x);
      ASSERT_TRUE(
          rms_norm_backward(t.context, row(g), row(x), vec(w), {.x = row(grad), .weight = vec(grad_weight)}).ok());
      if (size < 1e38f) {
        EXPECT_NEAR(grad[0], fits ? 2 / size * (1 - 1.0f / kCols) : 0, 1e-23);
      } else {
        EXPECT_TRUE(std::isnan(grad[0]));  // weight x is above the range as well
      }
      EXPECT_NEAR(grad_weight[0], fits ? 1 : 0, 1e-5);

      // mean = size / 2, differences size / 2 and -3/2 size. A mean above the range makes the row NaN.
      ASSERT_TRUE(layer_norm(t.context, row(x), row(out), {.weight = vec(w), .bias = vec(bias), .rstd = r}).ok());
      ASSERT_TRUE(layer_norm_backward(t.context, row(g), row(x),
                                      {.x = row(grad), .weight = vec(grad_weight), .bias = vec(grad_bias)},
                                      {.weight = vec(w)})
                      .ok());
      EXPECT_EQ(grad_bias, g);
      if (sum_fits) {
        expect(out, fits ? 3 + 2 / std::sqrt(3.0f) : 3, fits ? 3 - 2 * std::sqrt(3.0f) : 3);
        EXPECT_NEAR(rstd[0], fits ? 2 / std::sqrt(3.0f) / size : 0, 1e-23);
        EXPECT_NEAR(grad_weight[0], fits ? 1 / std::sqrt(3.0f) : 0, 1e-5);
        EXPECT_EQ(grad[0] == 0, !fits);
      } else {
        for (const float y : out) EXPECT_TRUE(std::isnan(y));
        for (const float y : grad) EXPECT_TRUE(std::isnan(y));
      }
    }
  }
}

TEST(Norm, ZeroSizesAreLegalAndGiveZeroGradients) {
  Context& context = contexts_with_threads(2).back().context;
  std::vector<float> w(8, 1.0f), grad(8, 5.0f), grad_bias(8, 5.0f);
  const auto vec = [](std::vector<float>& v) { return Tensor::contiguous(DType::f32, {8}, v.data()); };
  const Tensor none = Tensor::contiguous(DType::f32, {0, 8}, nullptr);
  ASSERT_TRUE(layer_norm(context, none, none, {.weight = vec(w)}).ok());
  ASSERT_TRUE(add_rms_norm(context, none, none, vec(w), none, none).ok());
  ASSERT_TRUE(layer_norm_backward(context, none, none, {.x = none, .weight = vec(grad), .bias = vec(grad_bias)}).ok());
  EXPECT_EQ(grad, std::vector<float>(8, 0.0f));
  EXPECT_EQ(grad_bias, std::vector<float>(8, 0.0f));
  const Tensor narrow = Tensor::contiguous(DType::f32, {3, 0}, nullptr),
               nothing = Tensor::contiguous(DType::f32, {0}, nullptr);
  EXPECT_TRUE(layer_norm(context, narrow, narrow).ok());
  EXPECT_TRUE(rms_norm_backward(context, narrow, narrow, nothing, {.x = narrow, .weight = nothing}).ok());
}

// They held what was there before.
TEST(Norm, StatisticsOfRowsWithoutElementsAreNaN) {
  Context& context = contexts_with_threads(2).back().context;
  const Tensor narrow = Tensor::contiguous(DType::f32, {3, 0}, nullptr),
               nothing = Tensor::contiguous(DType::f32, {0}, nullptr);
  for (const Kind kind : {Kind::rms, Kind::add_rms, Kind::layer}) {
    std::vector<float> means(3, 7.0f), rstds(3, 7.0f);
    const Tensor mean = Tensor::contiguous(DType::f32, {3}, means.data()),
                 rstd = Tensor::contiguous(DType::f32, {3}, rstds.data());
    const Status status = kind == Kind::rms ? rms_norm(context, narrow, nothing, narrow, {.rstd = rstd})
                          : kind == Kind::add_rms
                              ? add_rms_norm(context, narrow, narrow, nothing, narrow, narrow, {.rstd = rstd})
                              : layer_norm(context, narrow, narrow, {.mean = mean, .rstd = rstd});
    ASSERT_TRUE(status.ok()) << status.message();
    for (const float r : rstds) EXPECT_TRUE(std::isnan(r));
    for (const float m : means) EXPECT_EQ(std::isnan(m), kind == Kind::layer);
  }
}

}  // namespace
}  // namespace opst

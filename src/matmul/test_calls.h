// Calls of matmul in every form, against the reference.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "matmul/reference.h"
#include "opst/matmul.h"
#include "testing/compare.h"
#include "testing/elements.h"
#include "testing/guarded_buffer.h"
#include "testing/random.h"

namespace opst::test {

// A [rows, cols] view of memory between forbidden pages: rows or columns outermost.
struct Matrix {
  GuardedBuffer memory;
  Tensor tensor;
  Matrix(DType dtype, int64_t rows, int64_t cols, bool transposed, Guard guard)
      : memory(rows * cols * size_bytes(dtype), guard) {
    tensor = transposed ? memory.tensor(dtype, {cols, rows}).transposed(0, 1) : memory.tensor(dtype, {rows, cols});
  }
};

struct Shape {
  int64_t m, n, k;
  std::string text() const {
    return "m " + std::to_string(m) + ", n " + std::to_string(n) + ", k " + std::to_string(k);
  }
};

inline constexpr DType kFloats[] = {DType::f32, DType::bf16, DType::f16};

inline PackedWeight packed(Context& context, const ConstTensor& weight) {
  Result<PackedWeight> result = PackedWeight::pack(context, weight);
  EXPECT_TRUE(result.ok()) << result.status().message();
  return result.ok() ? std::move(result.value()) : PackedWeight();
}

inline bool same_bits_or_nan(const ConstTensor& a, const ConstTensor& b) {
  const std::vector<double> x = test::to_doubles(a), y = test::to_doubles(b);
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::memcmp(&x[i], &y[i], sizeof(double)) != 0 && !(std::isnan(x[i]) && std::isnan(y[i]))) return false;
  }
  return x.size() == y.size();
}

inline std::vector<double> magnitudes(std::vector<double> values) {
  for (double& value : values) value = std::abs(value);
  return values;
}

inline constexpr Activation kActivations[] = {Activation::none,      Activation::silu,   Activation::gelu_erf,
                                              Activation::gelu_tanh, Activation::swiglu, Activation::swiglu_swapped};
inline bool halves(Activation activation) {
  return activation == Activation::swiglu || activation == Activation::swiglu_swapped;
}

// A call's options, dtypes and layouts, besides its shape.
struct Form {
  DType x = DType::f32, out = DType::f32, bias = DType::f32, residual = DType::f32;
  Activation activation = Activation::none;
  bool with_bias = false, with_residual = false, in_place = false;
  bool strided_x = false, strided_out = false, strided_residual = false;
  Guard guard = Guard::after;

  std::string text() const {
    std::string text = std::string("x ") + to_string(x) + ", out " + to_string(out) + ", " + to_string(activation);
    if (strided_x) text += ", x transposed";
    if (strided_out) text += ", out transposed";
    if (with_bias) text += std::string(", bias ") + to_string(bias);
    if (with_residual) text += in_place ? ", residual in place" : std::string(", residual ") + to_string(residual);
    return text;
  }
};

inline Form random_form(Random& random) {
  const auto dtype = [&] {
    return random.chance(0.4) ? DType::f32 : random.pick({DType::f32, DType::bf16, DType::f16});
  };
  Form f;
  f.x = dtype(), f.out = dtype(), f.bias = dtype(), f.residual = dtype();
  if (random.chance(0.5)) f.activation = kActivations[random.integer(0, std::size(kActivations) - 1)];
  f.with_bias = random.chance(0.5), f.with_residual = random.chance(0.4), f.in_place = random.chance(0.5);
  if (f.in_place) f.residual = f.out;
  f.strided_x = random.chance(0.3), f.strided_out = random.chance(0.3), f.strided_residual = random.chance(0.3);
  f.guard = random.chance(0.5) ? Guard::after : Guard::before;
  return f;
}

// One call by `run(x, out, options)` against the reference; n: of the weight.
template <class Run>
void check_call(const std::string& about, const std::vector<double>& weight, const Shape& s, const Form& f,
                Random& random, const Run& run) {
  SCOPED_TRACE(about + ", " + s.text() + ", " + f.text());
  const int64_t width = halves(f.activation) ? s.n / 2 : s.n;
  Matrix x(f.x, s.m, s.k, f.strided_x, f.guard), out(f.out, s.m, width, f.strided_out, f.guard);
  Matrix bias(f.bias, s.n, 2, false, f.guard), residual(f.residual, s.m, width, f.strided_residual, f.guard);
  fill(x.tensor, Fill::normal, random);
  fill(bias.tensor, Fill::normal, random);
  fill(residual.tensor, Fill::normal, random);
  const ConstTensor bias_view = bias.tensor.selected(1, 0);  // stride 2
  MatmulOptions options{.activation = f.activation};
  if (f.with_bias) options.bias = bias_view;
  if (f.with_residual) {
    if (f.in_place) copy(residual.tensor, out.tensor);
    options.residual = f.in_place ? out.tensor : residual.tensor;
  }
  const Status status = run(ConstTensor(x.tensor), out.tensor, options);
  ASSERT_TRUE(status.ok()) << status.message();

  const std::vector<double> xs = to_doubles(x.tensor);
  const std::vector<double> biases = f.with_bias ? to_doubles(bias_view) : std::vector<double>();
  const std::vector<double> y = reference::matmul(xs, weight, biases, s.m, s.n, s.k);
  // Sums of magnitudes, to which a sum's rounding errors are proportional. The errors grow like a random walk over k.
  const std::vector<double> scale =
      reference::matmul(magnitudes(xs), magnitudes(weight), magnitudes(biases), s.m, s.n, s.k);
  const double units = 4 + 2 * std::sqrt(static_cast<double>(s.k));
  const std::vector<double> got = to_doubles(out.tensor), added = to_doubles(residual.tensor);
  const auto silu_bound = [](double v) { return std::abs(reference::silu(v)); };
  for (int64_t i = 0; i < s.m; ++i) {
    for (int64_t j = 0; j < width; ++j) {
      const auto first = static_cast<size_t>(i * s.n + j), second = first + static_cast<size_t>(s.n - width);
      const auto at = static_cast<size_t>(i * width + j);
      double expected = reference::activated(f.activation, y[first], y[second]);
      const double error = units * 0x1p-24 * scale[first], second_error = units * 0x1p-24 * scale[second];
      // No activation is steeper than 1.13; each rounds a few times relative to its argument.
      double bound = f.activation == Activation::none ? error : 1.13 * error + 8 * 0x1p-24 * std::abs(y[first]);
      if (f.activation == Activation::swiglu) {
        bound = bound * std::abs(y[second]) + (silu_bound(y[first]) + bound) * second_error +
                4 * 0x1p-24 * std::abs(expected);
      } else if (f.activation == Activation::swiglu_swapped) {
        const double steep = 1.13 * second_error + 8 * 0x1p-24 * std::abs(y[second]);
        bound = steep * std::abs(y[first]) + (silu_bound(y[second]) + steep) * error + 4 * 0x1p-24 * std::abs(expected);
      }
      if (f.with_residual) {
        expected += added[at];
        bound += 0x1p-24 * std::abs(expected);
      }
      bound = bound * 1.01 + epsilon(f.out) / 2 * std::abs(expected);
      if (f.out == DType::f16) bound += 0x1p-25;
      ASSERT_LE(std::abs(got[at] - expected), bound) << index_text(out.tensor, static_cast<int64_t>(at)) << " is "
                                                     << got[at] << ", but the reference is " << expected;
    }
  }
  EXPECT_TRUE(out.memory.slack_intact());
}

}  // namespace opst::test

// The epilogue: bias, activation, residual and int8 output, behind every product.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "matmul/test_calls.h"
#include "matmul/test_int_weights.h"
#include "opst/rowwise.h"
#include "quant/random_blocks.h"
#include "testing/compare.h"
#include "testing/contexts.h"

namespace opst {
namespace {

using test::contexts_with_threads;
using test::Fill;
using test::Guard;
using test::IntWeight;
using test::kFloats;
using test::Matrix;
using test::packed;
using test::Random;
using test::same_bits_or_nan;
using test::TestContext;

// The fused form has the bits of the two operators, one after the other.
TEST(MatmulEpilogue, SwigluEqualsRowwiseSwiglu) {
  Random random(test::seed());
  constexpr int64_t kHalf = 53, kK = 70;
  for (DType dtype : kFloats) {
    Matrix weight(dtype, 2 * kHalf, kK, false, Guard::after), x(dtype, 30, kK, false, Guard::after);
    test::fill(weight.tensor, Fill::normal, random);
    test::fill(x.tensor, Fill::normal, random);
    for (const TestContext& t : contexts_with_threads(3)) {
      for (bool swapped : {false, true}) {
        for (int64_t m : {1, 5, 30}) {
          Matrix both(DType::f32, m, 2 * kHalf, false, Guard::after), apart(DType::f32, m, kHalf, false, Guard::after),
              fused(DType::f32, m, kHalf, false, Guard::after);
          const ConstTensor rows = x.tensor.narrowed(0, 0, m);
          ASSERT_TRUE(matmul(t.context, rows, weight.tensor, both.tensor).ok());
          ASSERT_TRUE(swiglu(t.context, both.tensor, apart.tensor, {.swapped = swapped}).ok());
          ASSERT_TRUE(matmul(t.context, rows, weight.tensor, fused.tensor,
                             {.activation = swapped ? Activation::swiglu_swapped : Activation::swiglu})
                          .ok());
          EXPECT_TRUE(same_bits_or_nan(fused.tensor, apart.tensor)) << t.name << ", m " << m;
        }
      }
    }
  }
}

// Every way to a product, quantised ones and those with rounded activations too, ends in the same epilogue: a call with
// everything equals the plain product in f32 and the steps one by one.
TEST(MatmulEpilogue, IsTheSameBehindEveryProduct) {
  Random random(test::seed());
  constexpr int64_t kHalf = 37, kN = 2 * kHalf, kK = 256;
  for (QuantFormat format : {QuantFormat::q4_1, QuantFormat::q8_0, QuantFormat::q6_k, QuantFormat::f16}) {
    const std::vector<unsigned char> blocks = test::random_blocks(format, kN, kK, random);
    const QuantMatrix matrix{format, kN, kK, blocks.data(), static_cast<int64_t>(blocks.size())};
    for (const TestContext& t : contexts_with_threads(2)) {
      const PackedWeight weight = std::move(PackedWeight::pack(t.context, matrix).value());
      for (ActivationType activations : {ActivationType::exact, ActivationType::int8}) {
        for (int64_t m : {1, 2, 3, 20}) {
          SCOPED_TRACE(t.name + ", " + to_string(format) + ", " + to_string(activations) + ", m " + std::to_string(m));
          Matrix x(DType::bf16, m, kK, true, Guard::after), wide(DType::f32, m, kK, false, Guard::after);
          test::fill(x.tensor, Fill::normal, random);
          test::copy(x.tensor, wide.tensor);
          // f16 biases and residuals of few bits: each step below is then exact or rounds as the call does.
          Matrix bias(DType::f16, 1, kN, false, Guard::after), residual(DType::bf16, m, kHalf, false, Guard::after);
          test::fill(bias.tensor, Fill::normal, random);
          test::fill(residual.tensor, Fill::normal, random);
          Matrix wide_bias(DType::f32, 1, kN, false, Guard::after), y(DType::f32, m, kN, false, Guard::after),
              hidden(DType::f32, m, kHalf, false, Guard::after),
              wide_residual(DType::f32, m, kHalf, false, Guard::after),
              expected(DType::bf16, m, kHalf, false, Guard::after), out(DType::bf16, m, kHalf, false, Guard::after);
          test::copy(bias.tensor, wide_bias.tensor);
          test::copy(residual.tensor, wide_residual.tensor);
          ASSERT_TRUE(matmul(t.context, wide.tensor, weight, y.tensor,
                             {.bias = wide_bias.tensor.selected(0, 0), .activations = activations})
                          .ok());
          ASSERT_TRUE(swiglu(t.context, y.tensor, hidden.tensor).ok());
          ASSERT_TRUE(add(t.context, wide_residual.tensor, hidden.tensor, hidden.tensor).ok());
          test::copy(hidden.tensor, expected.tensor);
          test::copy(residual.tensor, out.tensor);
          const Status status = matmul(t.context, x.tensor, weight, out.tensor,
                                       {.bias = bias.tensor.selected(0, 0),
                                        .activation = Activation::swiglu,
                                        .residual = out.tensor,
                                        .activations = activations});
          ASSERT_TRUE(status.ok()) << status.message();
          EXPECT_TRUE(same_bits_or_nan(out.tensor, expected.tensor));
        }
      }
    }
  }
}

// int8 and int4 weights end in the same epilogue: a call with everything equals the product in f32 and the steps one by
// one, of x in int8 and in floats, with one group of scales and several.
TEST(MatmulEpilogue, IsTheSameBehindIntegerWeights) {
  Random random(test::seed());
  constexpr int64_t kHalf = 37, kN = 2 * kHalf, kK = 64;
  for (int bits : {8, 4}) {
    for (int64_t groups : {1, 4}) {
      const IntWeight weight(bits, kN, kK, groups, true, random);
      for (const TestContext& t : contexts_with_threads(2)) {
        for (const DType x_type : {DType::i8, DType::f16}) {
          for (int64_t m : {1, 3, 8, 9, 30}) {
            SCOPED_TRACE(t.name + ", int" + std::to_string(bits) + ", " + std::to_string(groups) + " groups, x " +
                         to_string(x_type) + ", m " + std::to_string(m));
            Matrix x(x_type, m, kK, true, Guard::after), x_scales(DType::f32, m, 2, false, Guard::after);
            Matrix bias(DType::f16, 1, kN, false, Guard::after), residual(DType::bf16, m, kHalf, false, Guard::after);
            Matrix y(DType::f32, m, kN, false, Guard::after), hidden(DType::f32, m, kHalf, false, Guard::after),
                wide_residual(DType::f32, m, kHalf, false, Guard::after),
                expected(DType::bf16, m, kHalf, false, Guard::after), out(DType::bf16, m, kHalf, true, Guard::after);
            if (x_type == DType::i8) {
              for (int64_t i = 0; i < m * kK; ++i)
                test::set(x.tensor, i, static_cast<double>(random.integer(-128, 127)));
            } else {
              test::fill(x.tensor, Fill::normal, random);
            }
            test::fill(x_scales.tensor, Fill::normal, random);
            test::fill(bias.tensor, Fill::normal, random);
            test::fill(residual.tensor, Fill::normal, random);
            test::copy(residual.tensor, wide_residual.tensor);
            IntMatmulOptions options = {.bias = bias.tensor.selected(0, 0)};
            if (x_type == DType::i8) options.x_scales = x_scales.tensor.selected(1, 0);
            ASSERT_TRUE(matmul(t.context, x.tensor, weight.packed, y.tensor, options).ok());
            ASSERT_TRUE(swiglu(t.context, y.tensor, hidden.tensor).ok());
            options.activation = Activation::swiglu;

            Matrix q(DType::i8, m, kHalf, true, Guard::after), expected_q(DType::i8, m, kHalf, false, Guard::after),
                scales(DType::f32, m, 1, false, Guard::after), expected_scales(DType::f32, m, 1, false, Guard::after);
            ASSERT_TRUE(
                dynamic_quant(t.context, hidden.tensor, expected_q.tensor, expected_scales.tensor.selected(1, 0)).ok());
            options.out_scales = scales.tensor.selected(1, 0);
            Status status = matmul(t.context, x.tensor, weight.packed, q.tensor, options);
            ASSERT_TRUE(status.ok()) << status.message();
            EXPECT_EQ(test::to_doubles(q.tensor), test::to_doubles(expected_q.tensor));
            EXPECT_EQ(test::to_doubles(scales.tensor), test::to_doubles(expected_scales.tensor));

            ASSERT_TRUE(add(t.context, wide_residual.tensor, hidden.tensor, hidden.tensor).ok());
            test::copy(hidden.tensor, expected.tensor);
            test::copy(residual.tensor, out.tensor);
            options.residual = out.tensor;
            options.out_scales = {};
            status = matmul(t.context, x.tensor, weight.packed, out.tensor, options);
            ASSERT_TRUE(status.ok()) << status.message();
            EXPECT_TRUE(same_bits_or_nan(out.tensor, expected.tensor));
          }
        }
      }
    }
  }
}

// A quantised output is the f32 output, quantised.
TEST(MatmulEpilogue, OutScalesQuantiseEachRow) {
  Random random(test::seed());
  constexpr int64_t kN = 46, kK = 64;
  const std::vector<unsigned char> blocks = test::random_blocks(QuantFormat::q8_0, kN, kK, random);
  const QuantMatrix matrix{QuantFormat::q8_0, kN, kK, blocks.data(), static_cast<int64_t>(blocks.size())};
  Matrix dense(DType::bf16, kN, kK, false, Guard::after), x(DType::f32, 21, kK, false, Guard::after);
  test::fill(dense.tensor, Fill::normal, random);
  test::fill(x.tensor, Fill::normal, random);
  for (int64_t t = 0; t < kK; ++t) test::set(x.tensor, t, 0);  // row 0: scale 0
  for (const TestContext& t : contexts_with_threads(3)) {
    const PackedWeight weight = std::move(PackedWeight::pack(t.context, matrix).value());
    for (int64_t m : {1, 4, 21}) {
      for (bool unpacked : {false, true}) {
        const ConstTensor rows = x.tensor.narrowed(0, 0, m);
        Matrix wide(DType::f32, m, kN / 2, false, Guard::after), q(DType::i8, m, kN / 2, true, Guard::after),
            expected(DType::i8, m, kN / 2, false, Guard::after), scales(DType::f32, m, 1, false, Guard::after),
            expected_scales(DType::f32, m, 1, false, Guard::after);
        const auto run = [&](const Tensor& out, const MatmulOptions& options) {
          return unpacked ? matmul(t.context, rows, dense.tensor, out, options)
                          : matmul(t.context, rows, weight, out, options);
        };
        MatmulOptions options{.activation = Activation::swiglu};
        ASSERT_TRUE(run(wide.tensor, options).ok());
        ASSERT_TRUE(dynamic_quant(t.context, wide.tensor, expected.tensor, expected_scales.tensor.selected(1, 0)).ok());
        options.out_scales = scales.tensor.selected(1, 0);
        const Status status = run(q.tensor, options);
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_EQ(test::to_doubles(q.tensor), test::to_doubles(expected.tensor)) << t.name << ", m " << m;
        EXPECT_EQ(test::to_doubles(scales.tensor), test::to_doubles(expected_scales.tensor));
        EXPECT_EQ(test::get(scales.tensor, 0), 0);
      }
    }
  }
}

// A row that fixed point cannot hold sends the other row to a call of its own, with its own row of the residual.
TEST(MatmulEpilogue, FollowsARowThatIsMultipliedAlone) {
  Random random(test::seed());
  constexpr int64_t kN = 40, kK = 64;
  const std::vector<unsigned char> blocks = test::random_blocks(QuantFormat::q4_1, kN, kK, random);
  const QuantMatrix matrix{QuantFormat::q4_1, kN, kK, blocks.data(), static_cast<int64_t>(blocks.size())};
  for (const TestContext& t : contexts_with_threads(1)) {
    const PackedWeight weight = std::move(PackedWeight::pack(t.context, matrix).value());
    Matrix x(DType::f32, 2, kK, false, Guard::after), residual(DType::f32, 2, kN, false, Guard::after),
        out(DType::f32, 2, kN, false, Guard::after), alone(DType::f32, 1, kN, false, Guard::after);
    test::fill(x.tensor, Fill::normal, random);
    test::fill(residual.tensor, Fill::normal, random);
    static_cast<float*>(x.tensor.data)[3] = std::numeric_limits<float>::infinity();
    ASSERT_TRUE(matmul(t.context, x.tensor, weight, out.tensor, {.residual = residual.tensor}).ok());
    ASSERT_TRUE(matmul(t.context, x.tensor.narrowed(0, 1, 1), weight, alone.tensor,
                       {.residual = residual.tensor.narrowed(0, 1, 1)})
                    .ok());
    EXPECT_TRUE(same_bits_or_nan(out.tensor.narrowed(0, 1, 1), alone.tensor)) << t.name;
    for (const double v : test::to_doubles(alone.tensor)) EXPECT_TRUE(std::isfinite(v)) << t.name;
  }
}

TEST(MatmulEpilogue, NonFiniteRowsStayAlone) {
  Random random(test::seed());
  constexpr int64_t kN = 40, kK = 129;
  for (DType dtype : kFloats) {
    Matrix weight(dtype, kN, kK, false, Guard::after), x(dtype, 30, kK, false, Guard::after);
    test::fill(weight.tensor, Fill::normal, random);
    test::fill(x.tensor, Fill::normal, random);
    test::set(x.tensor, kK + kK - 1, std::numeric_limits<double>::quiet_NaN());  // the last one, which has no partner
    test::set(x.tensor, 2 * kK + 5, std::numeric_limits<double>::infinity());
    for (const TestContext& t : contexts_with_threads(2)) {
      for (Activation activation : test::kActivations) {
        for (int64_t m : {3, 30}) {
          const int64_t width = test::halves(activation) ? kN / 2 : kN;
          Matrix out(dtype, m, width, false, Guard::after);
          ASSERT_TRUE(
              matmul(t.context, x.tensor.narrowed(0, 0, m), weight.tensor, out.tensor, {.activation = activation})
                  .ok());
          const std::vector<double> got = test::to_doubles(out.tensor);
          for (size_t i = 0; i < got.size(); ++i) {
            const auto row = static_cast<int64_t>(i) / width;
            if (row == 1) {
              ASSERT_TRUE(std::isnan(got[i])) << t.name << ", " << to_string(activation) << ", element " << i;
            } else if (row != 2) {
              ASSERT_TRUE(std::isfinite(got[i])) << t.name << ", " << to_string(activation) << ", element " << i;
            }
          }
        }
      }
    }
  }
}

TEST(MatmulEpilogue, NamesWhatIsWrong) {
  Context& context = contexts_with_threads(1).back().context;
  std::vector<float> memory(4096), more(64);
  int64_t used = 0;
  const auto make = [&](DType dtype, std::initializer_list<int64_t> shape) {
    const Tensor view = Tensor::contiguous(dtype, shape, memory.data() + used);
    used += 128;
    return view;
  };
  const Tensor weight = make(DType::f32, {6, 8}), x = make(DType::f32, {2, 8}), out = make(DType::f32, {2, 6});
  const Tensor half = make(DType::f32, {2, 3});
  const PackedWeight kept = packed(context, weight);
  const auto message = [&](const Tensor& to, const MatmulOptions& options) {
    const std::string with_packed = matmul(context, x, kept, to, options).message();
    EXPECT_EQ(matmul(context, x, weight, to, options).message(), with_packed);
    return with_packed;
  };
  EXPECT_EQ(message(out, {.bias = make(DType::f32, {5})}), "matmul: out dim 1 (n) is 6, but bias set n = 5");
  EXPECT_EQ(message(out, {.bias = make(DType::i32, {6})}), "matmul: bias is i32, but must be f32, bf16 or f16");
  EXPECT_EQ(message(out, {.residual = make(DType::f32, {2, 5})}), "matmul: out dim 1 (n) is 6, but residual set n = 5");
  EXPECT_EQ(message(out, {.residual = make(DType::f32, {3, 6})}), "matmul: residual dim 0 (m) is 3, but x set m = 2");
  EXPECT_EQ(message(out, {.residual = make(DType::f64, {2, 6})}),
            "matmul: residual is f64, but must be f32, bf16 or f16");
  EXPECT_EQ(message(out, {.activation = Activation::swiglu}),
            "matmul: out dim 1 (half_n) is 6, but the weight has n = 6, of which swiglu makes half");
  EXPECT_EQ(message(half, {.bias = make(DType::f32, {3}), .activation = Activation::swiglu}),
            "matmul: bias dim 0 (n) is 3, but the weight has n = 6");
  const Tensor odd = weight.narrowed(0, 0, 5);
  EXPECT_EQ(matmul(context, x, packed(context, odd), half, {.activation = Activation::swiglu_swapped}).message(),
            "matmul: the weight has n = 5, but swiglu_swapped needs two halves");
  // A residual that is a part of out, or out in another type.
  Tensor shifted = Tensor::contiguous(DType::f32, {2, 6}, static_cast<float*>(out.data) + 1);
  EXPECT_NE(message(shifted, {.residual = out}).find("out f32 [2, 6] overlaps residual"), std::string::npos);
  Tensor other_type = out;
  other_type.dtype = DType::bf16;
  EXPECT_NE(message(out, {.residual = other_type}).find("out f32 [2, 6] overlaps residual"), std::string::npos);
  EXPECT_NE(matmul(context, x, weight, weight.narrowed(1, 0, 6).narrowed(0, 0, 2)).message().find("overlaps weight"),
            std::string::npos);
  // Quantised outputs.
  EXPECT_EQ(message(out, {.out_scales = make(DType::f32, {2})}), "matmul: out is f32, but must be i8");
  EXPECT_EQ(message(make(DType::i8, {2, 6}), {}), "matmul: out is i8, but must be f32, bf16 or f16");
  EXPECT_EQ(message(make(DType::i8, {2, 6}), {.out_scales = make(DType::f32, {3})}),
            "matmul: out_scales dim 0 (m) is 3, but x set m = 2");
  EXPECT_EQ(message(make(DType::i8, {2, 6}), {.out_scales = make(DType::f64, {2})}),
            "matmul: out_scales is f64, but must be f32");
  EXPECT_EQ(matmul(context, make(DType::f64, {2, 8}), make(DType::f64, {6, 8}), make(DType::i8, {2, 6}),
                   {.out_scales = make(DType::f32, {2})})
                .message(),
            "matmul: out_scales is given, but products of f64 are not quantised");
  const Tensor bytes = make(DType::i8, {2, 6});
  EXPECT_EQ(message(bytes, {.residual = bytes, .out_scales = make(DType::f32, {2})}),
            "matmul: residual is i8, but must be f32, bf16 or f16");
  // Optional tensors that were given, but have no memory.
  const ConstTensor nowhere = ConstTensor::contiguous(DType::f32, {6}, nullptr);
  EXPECT_EQ(message(out, {.bias = nowhere}), "matmul: bias has null data, but 6 elements: f32 [6]");
  EXPECT_EQ(message(out, {.residual = nowhere}), "matmul: residual has null data, but 6 elements: f32 [6]");
  EXPECT_EQ(message(out, {.bias = ConstTensor::contiguous(DType::f32, {0}, nullptr)}),
            "matmul: out dim 1 (n) is 6, but bias set n = 0");
  // f64 is all or nothing.
  EXPECT_EQ(matmul(context, make(DType::f64, {2, 8}), weight, out).message(),
            "matmul: x is f64, but must be f32, bf16 or f16");
  EXPECT_EQ(matmul(context, x, make(DType::f64, {6, 8}), out).message(), "matmul: x is f32, but must be f64");
  EXPECT_EQ(matmul(context, x, make(DType::i8, {6, 8}), out).message(),
            "matmul: weight is i8, but must be f32, bf16, f16 or f64");
  EXPECT_EQ(matmul(context, x, weight.narrowed(1, 0, 7), out).message(),
            "matmul: x dim 1 (k) is 8, but the weight has k = 7");
}

TEST(MatmulEpilogue, ZeroSizesAreLegal) {
  std::vector<float> out(12, 9.0f), bias{1, 2, 3, 4}, residual(12, 0.5f), ones(32, 1.0f);
  const Tensor weight = Tensor::contiguous(DType::f32, {4, 8}, ones.data());
  const auto empty = [](std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(DType::f32, shape, nullptr);
  };
  for (const TestContext& t : contexts_with_threads(2)) {
    EXPECT_TRUE(
        matmul(t.context, empty({0, 8}), empty({0, 8}), empty({0, 0}), {.activation = Activation::swiglu}).ok());
    EXPECT_TRUE(matmul(t.context, empty({3, 0}), empty({0, 0}), empty({3, 0})).ok());
    // Scales of no rows are given without data; Tensor{} is absent.
    EXPECT_TRUE(matmul(t.context, empty({0, 8}), weight, Tensor::contiguous(DType::i8, {0, 4}, nullptr),
                       {.out_scales = empty({0})})
                    .ok());
    EXPECT_EQ(matmul(t.context, empty({0, 8}), weight, Tensor::contiguous(DType::i8, {0, 4}, nullptr)).message(),
              "matmul: out is i8, but must be f32, bf16 or f16");
    // No outputs, but rows: their scales.
    std::vector<float> scales(3, 9.0f);
    const Tensor no_columns = Tensor::contiguous(DType::i8, {3, 0}, nullptr);
    ASSERT_TRUE(matmul(t.context, empty({3, 0}), empty({0, 0}), no_columns,
                       {.out_scales = Tensor::contiguous(DType::f32, {3}, scales.data())})
                    .ok());
    EXPECT_EQ(scales, std::vector<float>(3, 0.0f)) << t.name;
    // No inputs: the bias goes through the activation, the residual follows.
    ASSERT_TRUE(matmul(t.context, empty({3, 0}), empty({4, 0}), Tensor::contiguous(DType::f32, {3, 2}, out.data()),
                       {.bias = ConstTensor::contiguous(DType::f32, {4}, bias.data()),
                        .activation = Activation::swiglu,
                        .residual = ConstTensor::contiguous(DType::f32, {3, 2}, residual.data())})
                    .ok());
    for (size_t i = 0; i < 6; ++i) {
      const double expected =
          0.5 + reference::silu(1.0 + static_cast<double>(i % 2)) * (3.0 + static_cast<double>(i % 2));
      EXPECT_NEAR(static_cast<double>(out[i]), expected, 1e-6) << t.name;
    }
  }
}

// ---- cases from users' reports

}  // namespace
}  // namespace opst

// quantize, dequantize and dynamic_quant: int8 and int4 with scales beside them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/convert.h"
#include "opst/quant.h"
#include "testing/contexts.h"
#include "testing/elements.h"
#include "testing/guarded_buffer.h"
#include "testing/random.h"

namespace opst {
namespace {

using test::contexts;
using test::contexts_with_threads;
using test::Fill;
using test::Guard;
using test::GuardedBuffer;
using test::one_context;
using test::Random;
using test::TestContext;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// The contract of one group in plain loops.
struct Group {
  float scale = 0;
  int zero = 0;
  std::vector<int> q;
};
Group expected_group(const std::vector<float>& x, int bits, bool symmetric) {
  const float most = bits == 8 ? 127.0f : 7.0f;
  float low = 0, high = 0;
  bool finite = true;
  for (float v : x) {
    low = std::min(low, v);
    high = std::max(high, v);
    finite = finite && std::isfinite(v);
  }
  Group out;
  out.q.assign(x.size(), 0);
  out.scale = symmetric ? std::max(-low, high) / most : high / (2 * most + 1) - low / (2 * most + 1);
  if (!finite) {
    out.scale = kNan;
  } else if (out.scale > 0) {
    if (!symmetric)
      out.zero = static_cast<int>(std::clamp(std::nearbyint(-most - 1 - low / out.scale), -most - 1, most));
    for (size_t i = 0; i < x.size(); ++i) {
      const float q = std::nearbyint(x[i] / out.scale) + static_cast<float>(out.zero);
      out.q[i] = static_cast<int>(std::clamp(q, symmetric ? -most : -most - 1, most));
    }
  }
  return out;
}

int nibble(uint8_t byte, int64_t i) {
  const int q = i % 2 == 0 ? byte & 15 : byte >> 4;
  return q < 8 ? q : q - 16;
}

// [rows, cols] of a dtype between forbidden pages, possibly transposed.
struct Matrix {
  GuardedBuffer memory;
  Tensor tensor;
  Matrix(DType dtype, int64_t rows, int64_t cols, bool transposed, Guard guard)
      : memory(rows * cols * size_bytes(dtype), guard) {
    tensor = transposed ? memory.tensor(dtype, {cols, rows}).transposed(0, 1) : memory.tensor(dtype, {rows, cols});
  }
  template <class T>
  T& at(int64_t row, int64_t col) const {
    return static_cast<T*>(tensor.data)[row * tensor.strides[0] + col * tensor.strides[1]];
  }
};

int integer(const Matrix& q, int bits, int64_t row, int64_t col) {
  return bits == 8 ? q.at<int8_t>(row, col) : nibble(q.at<uint8_t>(row, col / 2), col);
}

TEST(Quantize, EqualsItsContractInEveryContext) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (int i = 0; i < 16; ++i) {
      const int bits = i % 2 == 0 ? 8 : 4;
      const bool symmetric = random.chance(0.5);
      const DType dtype = random.pick({DType::f32, DType::bf16, DType::f16});
      const int64_t rows = random.integer(1, 9), group = 2 * random.integer(1, 40), groups = random.integer(1, 5);
      const int64_t cols = group * groups;
      const Guard guard = random.pick({Guard::after, Guard::before});
      SCOPED_TRACE(t.name + ", int" + std::to_string(bits) + ", " + to_string(dtype) + ", rows " +
                   std::to_string(rows) + ", cols " + std::to_string(cols) + ", groups " + std::to_string(groups));
      Matrix x(dtype, rows, cols, random.chance(0.3), guard),
          scales(DType::f32, rows, groups, random.chance(0.3), guard);
      Matrix zeros(DType::i8, rows, groups, random.chance(0.3), guard);
      Matrix q(bits == 8 ? DType::i8 : DType::u8, rows, bits == 8 ? cols : cols / 2, bits == 8 && random.chance(0.3),
               guard);
      Matrix back(random.pick({DType::f32, DType::bf16, DType::f16}), rows, cols, random.chance(0.3), guard);
      test::fill(
          x.tensor,
          random.pick({Fill::normal, Fill::small_integers, Fill::outlier, Fill::denormals, Fill::zeros, Fill::ones}),
          random);
      QuantizeOptions options;
      if (!symmetric) options.zeros = zeros.tensor;
      Status status = quantize(t.context, x.tensor, q.tensor, scales.tensor, options);
      ASSERT_TRUE(status.ok()) << status.message();
      IntMatrix matrix{q.tensor, scales.tensor};
      if (!symmetric) matrix.zeros = zeros.tensor;
      status = dequantize(t.context, matrix, back.tensor);
      ASSERT_TRUE(status.ok()) << status.message();
      const std::vector<double> xs = test::to_doubles(x.tensor), values = test::to_doubles(back.tensor);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t g = 0; g < groups; ++g) {
          std::vector<float> in;
          for (int64_t c = 0; c < group; ++c)
            in.push_back(static_cast<float>(xs[static_cast<size_t>(row * cols + g * group + c)]));
          const Group expected = expected_group(in, bits, symmetric);
          ASSERT_TRUE(same(scales.at<float>(row, g), expected.scale)) << row << ", " << g;
          if (!symmetric) {
            ASSERT_EQ(zeros.at<int8_t>(row, g), expected.zero) << row << ", " << g;
          }
          for (int64_t c = 0; c < group; ++c) {
            const int64_t col = g * group + c;
            ASSERT_EQ(integer(q, bits, row, col), expected.q[static_cast<size_t>(c)]) << row << ", " << col;
            const float value = static_cast<float>(expected.q[static_cast<size_t>(c)] - expected.zero) * expected.scale;
            const float rounded = back.tensor.dtype == DType::bf16  ? to_f32(to_bf16(value))
                                  : back.tensor.dtype == DType::f16 ? to_f32(to_f16(value))
                                                                    : value;
            ASSERT_EQ(static_cast<float>(values[static_cast<size_t>(row * cols + col)]), rounded);
          }
        }
      }
      EXPECT_TRUE(q.memory.slack_intact() && scales.memory.slack_intact() && back.memory.slack_intact());
    }
  }
}

TEST(Quantize, TakesGivenScales) {
  const std::vector<float> x = {0.0f, 0.5f, 1.5f, -1.5f, 1000.0f, -1000.0f, kInfinity, -kInfinity, kNan, 63.5f};
  const auto n = static_cast<int64_t>(x.size());
  for (const TestContext& t : contexts_with_threads(1)) {
    std::vector<int8_t> q(x.size());
    float scale = 1;
    int8_t zero = 3;
    const auto run = [&](bool with_zero) {
      QuantizeOptions options{.scales_given = true};
      if (with_zero) options.zeros = Tensor::contiguous(DType::i8, {1, 1}, &zero);
      return quantize(t.context, ConstTensor::contiguous(DType::f32, {1, n}, x.data()),
                      Tensor::contiguous(DType::i8, {1, n}, q.data()), Tensor::contiguous(DType::f32, {1, 1}, &scale),
                      options);
    };
    ASSERT_TRUE(run(true).ok());
    EXPECT_EQ(q, (std::vector<int8_t>{3, 3, 5, 1, 127, -128, 127, -128, 3, 67})) << t.name;
    ASSERT_TRUE(run(false).ok());
    EXPECT_EQ(q, (std::vector<int8_t>{0, 0, 2, -2, 127, -128, 127, -128, 0, 64})) << t.name;
    scale = -0.5f;
    ASSERT_TRUE(run(false).ok());
    EXPECT_EQ(q, (std::vector<int8_t>{0, -1, -3, 3, -128, 127, -128, 127, 0, -127})) << t.name;
    for (float bad : {0.0f, kNan, kInfinity}) {
      scale = bad;
      ASSERT_TRUE(run(true).ok());
      EXPECT_EQ(q, std::vector<int8_t>(x.size(), 3)) << t.name << ", scale " << bad;
      EXPECT_TRUE(same(scale, bad));
    }
    EXPECT_EQ(zero, 3);
  }
}

// int4: the ends of the range, and quotients that are rounded.
TEST(Quantize, PacksTheLowerHalfFirst) {
  const std::vector<float> x = {7, -7, 1, -1, 0.5f, 1.5f, -8, 3};
  std::vector<uint8_t> q(4);
  float scale = 0;
  ASSERT_TRUE(quantize(one_context(), ConstTensor::contiguous(DType::f32, {1, 8}, x.data()),
                       Tensor::contiguous(DType::u8, {1, 4}, q.data()), Tensor::contiguous(DType::f32, {1, 1}, &scale))
                  .ok());
  EXPECT_EQ(scale, 8.0f / 7.0f);
  // 6.1, -6.1, 0.9, -0.9, 0.4, 1.3, -7, 2.6
  EXPECT_EQ(q, (std::vector<uint8_t>{0xa6, 0xf1, 0x10, 0x39}));
}

TEST(Quantize, MarksGroupsThatAreNotFinite) {
  for (const TestContext& t : contexts_with_threads(1)) {
    for (float bad : {kNan, kInfinity, -kInfinity}) {
      for (const bool symmetric : {true, false}) {
        std::vector<float> x(3 * 20, 1.0f), scales(3), back(60);
        std::vector<int8_t> q(60, 77), zeros(3, 77);
        x[25] = bad;
        QuantizeOptions options;
        const Tensor zero = Tensor::contiguous(DType::i8, {1, 3}, zeros.data());
        if (!symmetric) options.zeros = zero;
        const Tensor to = Tensor::contiguous(DType::i8, {1, 60}, q.data());
        const Tensor scale = Tensor::contiguous(DType::f32, {1, 3}, scales.data());
        ASSERT_TRUE(
            quantize(t.context, ConstTensor::contiguous(DType::f32, {1, 60}, x.data()), to, scale, options).ok());
        EXPECT_TRUE(std::isnan(scales[1]));
        EXPECT_FALSE(std::isnan(scales[0]) || std::isnan(scales[2]));
        for (int i = 20; i < 40; ++i) EXPECT_EQ(q[static_cast<size_t>(i)], 0);
        IntMatrix matrix{to, scale};
        if (!symmetric) {
          EXPECT_EQ(zeros[1], 0);
          matrix.zeros = zero;
        }
        ASSERT_TRUE(dequantize(t.context, matrix, Tensor::contiguous(DType::f32, {1, 60}, back.data())).ok());
        for (size_t i = 0; i < 60; ++i) {
          if (i >= 20 && i < 40) {
            EXPECT_TRUE(std::isnan(back[i]));
          } else {
            EXPECT_FLOAT_EQ(back[i], 1.0f);
          }
        }
      }
    }
  }
}

TEST(DynamicQuant, EqualsItsContractInEveryContext) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (int i = 0; i < 12; ++i) {
      const int bits = i % 3 == 2 ? 4 : 8;
      const DType dtype = random.pick({DType::f32, DType::bf16, DType::f16});
      const int64_t a = random.integer(1, 4), b = random.integer(1, 5);
      const int64_t k = bits == 8 ? random.integer(1, 100) : 2 * random.integer(1, 50);
      const bool smooth = random.chance(0.5);
      const Guard guard = random.pick({Guard::after, Guard::before});
      SCOPED_TRACE(t.name + ", int" + std::to_string(bits) + ", " + to_string(dtype) + ", k " + std::to_string(k));
      // x [a, b, k] stored as [b, a, k]; q and scales stored in order.
      GuardedBuffer x_memory(a * b * k * size_bytes(dtype), guard), q_memory(a * b * k * bits / 8, guard);
      GuardedBuffer scale_memory(a * b * 4, guard), smooth_memory(k * 8, guard);
      const Tensor x = x_memory.tensor(dtype, {b, a, k}).transposed(0, 1);
      const Tensor q = q_memory.tensor(bits == 8 ? DType::i8 : DType::u8, {a, b, k * bits / 8});
      const Tensor scales = scale_memory.tensor(DType::f32, {a, b});
      const Tensor factors = smooth_memory.tensor(DType::f32, {k, 2}).selected(1, 1);
      test::fill(x, random.pick({Fill::normal, Fill::outlier, Fill::small_integers}), random);
      test::fill(factors, Fill::normal, random);
      DynamicQuantOptions options;
      if (smooth) options.smooth_scales = factors;
      const Status status = dynamic_quant(t.context, x, q, scales, options);
      ASSERT_TRUE(status.ok()) << status.message();
      const std::vector<double> xs = test::to_doubles(x), factor = test::to_doubles(factors);
      for (int64_t row = 0; row < a * b; ++row) {
        std::vector<float> in;
        for (int64_t c = 0; c < k; ++c) {
          in.push_back(static_cast<float>(xs[static_cast<size_t>(row * k + c)]));
          if (smooth) in.back() *= static_cast<float>(factor[static_cast<size_t>(c)]);
        }
        const Group expected = expected_group(in, bits, true);
        ASSERT_EQ(static_cast<const float*>(scales.data)[row], expected.scale);
        for (int64_t c = 0; c < k; ++c) {
          const int got = bits == 8 ? static_cast<const int8_t*>(q.data)[row * k + c]
                                    : nibble(static_cast<const uint8_t*>(q.data)[(row * k + c) / 2], c);
          ASSERT_EQ(got, expected.q[static_cast<size_t>(c)]) << row << ", " << c;
        }
      }
      EXPECT_TRUE(q_memory.slack_intact() && scale_memory.slack_intact());
    }
  }
}

// Zeros, ones and a row with both extremes, in widths that fill no vector.
TEST(DynamicQuant, B78_ZeroRowsAndOddWidths) {
  for (const TestContext& t : contexts_with_threads(2)) {
    for (int64_t k : {1, 13, 31}) {
      SCOPED_TRACE(t.name + ", k " + std::to_string(k));
      std::vector<float> x(static_cast<size_t>(3 * k), 0.0f), scales(3, kNan);
      const auto row = [&](int64_t i) { return x.begin() + i * k; };
      std::fill(row(1), row(2), 1.0f);
      for (int64_t c = 0; c < k; ++c) row(2)[c] = c % 2 == 0 ? -127.0f : 127.0f;
      GuardedBuffer q(3 * k, Guard::after);
      ASSERT_TRUE(dynamic_quant(t.context, ConstTensor::contiguous(DType::f32, {3, k}, x.data()),
                                q.tensor(DType::i8, {3, k}), Tensor::contiguous(DType::f32, {3}, scales.data()))
                      .ok());
      EXPECT_EQ(scales, (std::vector<float>{0.0f, 1.0f / 127.0f, 1.0f}));
      const auto* const got = static_cast<const int8_t*>(q.data());
      for (int64_t c = 0; c < k; ++c) {
        EXPECT_EQ(got[c], 0);
        EXPECT_EQ(got[k + c], 127);
        EXPECT_EQ(got[2 * k + c], c % 2 == 0 ? -127 : 127);
      }
    }
  }
  // The example in the documentation of the operator that dynamic_quant is named after.
  const std::vector<float> x = {1, -4};
  std::vector<int8_t> q(2);
  float scale = 0;
  ASSERT_TRUE(dynamic_quant(one_context(), ConstTensor::contiguous(DType::f32, {2}, x.data()),
                            Tensor::contiguous(DType::i8, {2}, q.data()), Tensor::contiguous(DType::f32, {}, &scale))
                  .ok());
  EXPECT_EQ(q, (std::vector<int8_t>{32, -127}));
  EXPECT_EQ(scale, 4.0f / 127.0f);
}

// Halfway between two integers the even one is taken; the smallest numbers of f32 saturate and do not wrap.
TEST(DynamicQuant, RoundsToEvenAndSaturates) {
  std::vector<float> x = {127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 126.5f, 0.49999997f};
  std::vector<int8_t> q(8);
  float scale = 0;
  for (const TestContext& t : contexts_with_threads(1)) {
    const auto run = [&] {
      return dynamic_quant(t.context, ConstTensor::contiguous(DType::f32, {1, 8}, x.data()),
                           Tensor::contiguous(DType::i8, {1, 8}, q.data()),
                           Tensor::contiguous(DType::f32, {1}, &scale));
    };
    x = {127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 126.5f, 0.49999997f};
    ASSERT_TRUE(run().ok());
    EXPECT_EQ(q, (std::vector<int8_t>{127, 0, 2, 2, 0, -2, 126, 0})) << t.name;
    // 190 units of the smallest number: the scale is one unit, not 1.5.
    std::fill(x.begin(), x.end(), 190 * 0x1p-149f);
    x[1] = -x[1];
    ASSERT_TRUE(run().ok());
    EXPECT_EQ(scale, 0x1p-149f);
    EXPECT_EQ(q, (std::vector<int8_t>{127, -127, 127, 127, 127, 127, 127, 127})) << t.name;
    // 60 units: the scale is rounded to 0.
    std::fill(x.begin(), x.end(), 60 * 0x1p-149f);
    ASSERT_TRUE(run().ok());
    EXPECT_EQ(scale, 0.0f);
    EXPECT_EQ(q, std::vector<int8_t>(8, 0)) << t.name;
    // The largest numbers.
    std::fill(x.begin(), x.end(), -std::numeric_limits<float>::max());
    ASSERT_TRUE(run().ok());
    EXPECT_EQ(q, std::vector<int8_t>(8, -127)) << t.name;
  }
}

TEST(DynamicQuant, ThreadsDoNotChangeTheBits) {
  Random random(test::seed());
  constexpr int64_t kRows = 700, kK = 300;
  std::vector<float> x(kRows * kK);
  test::fill(Tensor::contiguous(DType::f32, {kRows, kK}, x.data()), Fill::normal, random);
  std::vector<std::vector<int8_t>> all;
  for (int threads : {1, 2, 3, 5}) {
    for (const TestContext& t : contexts_with_threads(threads)) {
      std::vector<int8_t> q(kRows * kK);
      std::vector<float> scales(kRows);
      ASSERT_TRUE(dynamic_quant(t.context, ConstTensor::contiguous(DType::f32, {kRows, kK}, x.data()),
                                Tensor::contiguous(DType::i8, {kRows, kK}, q.data()),
                                Tensor::contiguous(DType::f32, {kRows}, scales.data()))
                      .ok());
      q.resize(q.size() + scales.size() * 4);
      std::memcpy(q.data() + kRows * kK, scales.data(), scales.size() * 4);
      all.push_back(q);
      EXPECT_EQ(all.back(), all.front()) << t.name;  // and levels do not either
    }
  }
}

TEST(Integers, NameWhatIsWrong) {
  std::vector<float> floats(64);
  std::vector<int8_t> bytes(64);
  Context& context = one_context();
  const ConstTensor x = ConstTensor::contiguous(DType::f32, {2, 6}, floats.data());
  const Tensor q = Tensor::contiguous(DType::i8, {2, 6}, bytes.data());
  const Tensor half = Tensor::contiguous(DType::u8, {2, 3}, bytes.data());
  const auto scales = [&](int64_t groups) { return Tensor::contiguous(DType::f32, {2, groups}, floats.data() + 32); };
  EXPECT_EQ(quantize(context, x, q, scales(2)).message(), "");
  EXPECT_EQ(quantize(context, x, half, scales(1)).message(), "");
  EXPECT_EQ(quantize(context, x, q, scales(4)).message(),
            "quantize: scales has 4 groups, which do not divide cols = 6");
  EXPECT_EQ(quantize(context, x, q, scales(0)).message(),
            "quantize: scales has 0 groups, which do not divide cols = 6");
  EXPECT_EQ(quantize(context, x, half, scales(2)).message(),
            "quantize: scales has groups of 3 values, but those of int4 must fill whole bytes");
  EXPECT_EQ(quantize(context, x, Tensor::contiguous(DType::u8, {2, 2}, bytes.data()), scales(1)).message(),
            "quantize: q has 2 bytes a row, but 6 values of int4 fill half as many");
  EXPECT_EQ(quantize(context, x, Tensor::contiguous(DType::i8, {2, 5}, bytes.data()), scales(1)).message(),
            "quantize: q dim 1 (cols) is 5, but x set cols = 6");
  EXPECT_EQ(quantize(context, x, Tensor::contiguous(DType::i32, {2, 6}, floats.data() + 40), scales(1)).message(),
            "quantize: q is i32, but must be i8 or u8");
  EXPECT_NE(quantize(context, x, Tensor::contiguous(DType::i8, {2, 6}, floats.data()), scales(1))
                .message()
                .find("overlaps x"),
            std::string::npos);
  EXPECT_EQ(
      dequantize(context, IntMatrix{q, scales(2)}, Tensor::contiguous(DType::f32, {2, 5}, floats.data())).message(),
      "dequantize: out dim 1 (cols) is 5, but the matrix has cols = 6");
  EXPECT_EQ(
      dequantize(context, IntMatrix{q, scales(5)}, Tensor::contiguous(DType::f32, {2, 6}, floats.data())).message(),
      "dequantize: scales has 5 groups, which do not divide cols = 6");
  const Tensor one = Tensor::contiguous(DType::f32, {2}, floats.data() + 32);
  EXPECT_EQ(dynamic_quant(context, x, q, one).message(), "");
  EXPECT_EQ(dynamic_quant(context, x, half, one).message(), "");
  EXPECT_EQ(dynamic_quant(context, x, q, Tensor::contiguous(DType::f32, {3}, floats.data() + 32)).message(),
            "dynamic_quant: scales dim 0 (dim_0) is 3, but x set dim_0 = 2");
  EXPECT_EQ(dynamic_quant(context, x, Tensor::contiguous(DType::u8, {2, 6}, bytes.data()), one).message(),
            "dynamic_quant: q has 6 bytes a row, but 6 values of int4 fill half as many");
  EXPECT_EQ(
      dynamic_quant(context, x, q, one, {.smooth_scales = ConstTensor::contiguous(DType::f32, {5}, floats.data() + 16)})
          .message(),
      "dynamic_quant: smooth_scales dim 0 (k) is 5, but x set k = 6");
  EXPECT_EQ(dynamic_quant(context, ConstTensor::contiguous(DType::f32, {}, floats.data()), q, one).message(),
            "dynamic_quant: x has rank 0, but must have 1 to 5");
}

}  // namespace
}  // namespace opst

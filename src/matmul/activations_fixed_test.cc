// One and two rows times a quantised weight: the definition in activations.h.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "matmul/reference.h"
#include "opst/matmul.h"
#include "quant/random_blocks.h"
#include "quant/reference.h"
#include "testing/contexts.h"
#include "testing/elements.h"
#include "testing/random.h"

namespace opst {
namespace {

using test::contexts;
using test::Fill;
using test::kQuantFormats;
using test::Random;
using test::TestContext;

constexpr int64_t kN = 70, kK = 512;

struct Weight {
  std::vector<unsigned char> bytes;
  PackedWeight packed;
  std::vector<double> values;  // [n, k]

  Weight(Context& context, QuantFormat format, Random& random) : bytes(test::random_blocks(format, kN, kK, random)) {
    const QuantMatrix matrix{format, kN, kK, bytes.data(), static_cast<int64_t>(bytes.size())};
    packed = std::move(PackedWeight::pack(context, matrix).value());
    for (int64_t row = 0; row < kN; ++row) {
      for (int64_t col = 0; col < kK; ++col) values.push_back(reference::dequantized(matrix, row, col));
    }
  }
};

std::vector<float> multiplied(const TestContext& t, const std::vector<float>& x, const Weight& weight,
                              bool batch_invariant = false) {
  const auto m = static_cast<int64_t>(x.size()) / kK;
  std::vector<float> out(static_cast<size_t>(m * kN), std::numeric_limits<float>::quiet_NaN());
  const Status status =
      matmul(t.context, ConstTensor::contiguous(DType::f32, {m, kK}, x.data()), weight.packed,
             Tensor::contiguous(DType::f32, {m, kN}, out.data()), {.batch_invariant = batch_invariant});
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

std::vector<float> random_row(Random& random) {
  std::vector<float> x(kK);
  test::fill(Tensor::contiguous(DType::f32, {1, kK}, x.data()), Fill::normal, random);
  return x;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b, size_t first_of_a = 0) {
  return std::memcmp(a.data() + first_of_a, b.data(), b.size() * sizeof(float)) == 0;
}

bool in_fixed_point(const TestContext& t, QuantFormat format) {
  const MatmulProblem problem = {.m = 1, .n = kN, .k = kK, .format = format};
  return plan_matmul(problem, t.context.machine()).path == MatmulPath::activations_fixed;
}

TEST(FixedPoint, IsUsedForQuantisedFormatsWhereBytesMultiplyFast) {
  for (const TestContext& t : contexts()) {
    const Isa isa = t.context.machine().isa;
    for (QuantFormat format : kQuantFormats) {
      const bool is_float = block_values(format) == 1;
      const bool expected =
          !is_float && includes(isa, Isa::avx2) && (includes(isa, Isa::avx512_vnni) || format != QuantFormat::q8_0);
      EXPECT_EQ(in_fixed_point(t, format), expected) << t.name << ", " << to_string(format);
    }
  }
}

// Bound, relative to the largest value of each block of x: 2^-23 (half a unit of the coarser scale), and as much for
// sums in f32.
TEST(FixedPoint, IsAsAccurateAsItsScaleAllows) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (QuantFormat format : kQuantFormats) {
      if (!in_fixed_point(t, format)) continue;
      const Weight weight(t.context, format, random);
      for (int round = 0; round < 4; ++round) {
        std::vector<float> x = random_row(random);
        // Outliers; blocks of zeros; wide ranges from block to block.
        if (round == 1) {
          for (size_t i = 7; i < x.size(); i += 64) x[i] *= 1e6f;
        }
        if (round == 2) std::fill(x.begin() + 32, x.begin() + 128, 0.0f);
        if (round == 3) {
          for (size_t i = 0; i < x.size(); ++i) x[i] = std::ldexp(x[i], static_cast<int>(i / 32) * 12 - 90);
        }
        std::vector<double> wide(x.begin(), x.end()), largest(x.size());
        for (size_t i = 0; i < x.size(); ++i) {
          double& top = largest[i / 32 * 32];
          top = std::max(top, std::abs(wide[i]));
        }
        for (size_t i = 0; i < x.size(); ++i) largest[i] = largest[i / 32 * 32];
        std::vector<double> terms = weight.values;
        for (double& term : terms) term = std::abs(term) + 1;  // a minimum may cancel what it is added to
        const std::vector<double> expected = reference::matmul(wide, weight.values, {}, 1, kN, kK);
        const std::vector<double> scale = reference::matmul(largest, terms, {}, 1, kN, kK);
        const std::vector<float> got = multiplied(t, x, weight);
        for (size_t j = 0; j < got.size(); ++j) {
          ASSERT_LE(std::abs(static_cast<double>(got[j]) - expected[j]), 0x1p-22 * scale[j])
              << t.name << ", " << to_string(format) << ", round " << round << ", column " << j;
        }
      }
    }
  }
}

// Integers of up to 22 bits are themselves in fixed point; scales that are powers of two keep products and sums exact.
TEST(FixedPoint, IsExactForIntegers) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    if (!in_fixed_point(t, QuantFormat::q4_0)) continue;
    std::vector<unsigned char> bytes = test::random_blocks(QuantFormat::q4_0, kN, kK, random);
    for (size_t b = 0; b < bytes.size(); b += 18) {
      bytes[b] = 0;
      bytes[b + 1] = 0x3c;  // 1.0
    }
    Weight weight(t.context, QuantFormat::q4_0, random);
    const QuantMatrix matrix{QuantFormat::q4_0, kN, kK, bytes.data(), static_cast<int64_t>(bytes.size())};
    weight.packed = std::move(PackedWeight::pack(t.context, matrix).value());
    std::vector<float> x(kK);
    for (float& value : x) value = static_cast<float>(random.integer(-2000, 2000));
    const std::vector<float> got = multiplied(t, x, weight);
    for (int64_t j = 0; j < kN; ++j) {
      int64_t sum = 0;
      for (int64_t i = 0; i < kK; ++i) {
        sum += static_cast<int64_t>(x[static_cast<size_t>(i)]) *
               static_cast<int64_t>(reference::dequantized(matrix, j, i));
      }
      ASSERT_EQ(got[static_cast<size_t>(j)], static_cast<float>(sum)) << t.name << ", column " << j;
    }
  }
}

// The largest numbers of three bytes, one beyond which the scale must double, and every digit -128 and 127.
TEST(FixedPoint, HoldsAtTheEndsOfItsDigits) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (QuantFormat format : {QuantFormat::q4_1, QuantFormat::q6_k}) {
      if (!in_fixed_point(t, format)) continue;
      const Weight weight(t.context, format, random);
      for (float top : {8355711.0f, 8355712.0f, 8388607.0f, 4194304.0f, 4194303.0f}) {
        std::vector<float> x(kK);
        for (size_t i = 0; i < x.size(); ++i) {
          const float values[] = {top, -top, 8355711.0f - 65536, -8421504.0f + 65536, 127, -128, 128, 32640, -32896, 1};
          x[i] = values[static_cast<size_t>(random.integer(0, 9))];
          if (std::abs(x[i]) > top) x[i] = top;
        }
        const std::vector<double> wide(x.begin(), x.end());
        std::vector<double> terms = weight.values;
        for (double& term : terms) term = std::abs(term) + 1;
        const std::vector<double> expected = reference::matmul(wide, weight.values, {}, 1, kN, kK);
        const std::vector<double> scale = reference::matmul(std::vector<double>(kK, top), terms, {}, 1, kN, kK);
        const std::vector<float> got = multiplied(t, x, weight);
        for (size_t j = 0; j < got.size(); ++j) {
          ASSERT_LE(std::abs(static_cast<double>(got[j]) - expected[j]), 0x1p-22 * scale[j])
              << t.name << ", " << to_string(format) << ", top " << top << ", column " << j;
        }
      }
    }
  }
}

TEST(FixedPoint, RowsHaveTheSameBitsInAnyCompany) {
  Random random(test::seed());
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const TestContext& t : contexts()) {
    for (QuantFormat format : kQuantFormats) {
      const Weight weight(t.context, format, random);
      const std::vector<float> a = random_row(random);
      const std::vector<float> alone = multiplied(t, a, weight);
      for (float strange : {1.0f, kInf, std::nanf(""), 0x1p-120f, 0x1p125f, -0.0f}) {
        std::vector<float> b = random_row(random);
        if (strange == 0x1p-120f) std::fill(b.begin(), b.end(), strange);
        b[static_cast<size_t>(random.integer(0, kK - 1))] = strange;
        for (bool second : {false, true}) {
          std::vector<float> both = second ? b : a;
          const std::vector<float>& last = second ? a : b;
          both.insert(both.end(), last.begin(), last.end());
          const std::vector<float> got = multiplied(t, both, weight);
          EXPECT_TRUE(same_bits(got, alone, second ? kN : 0))
              << t.name << ", " << to_string(format) << ", beside " << strange;
          // A row that is not representable is multiplied in f32.
          if (strange != 1.0f && strange != 0.0f && !std::isnan(strange)) {
            const std::vector<float> other = multiplied(t, b, weight, true);
            for (size_t j = 0; j < kN; ++j) {
              const float x = got[(second ? 0 : kN) + j], y = other[j];
              EXPECT_TRUE(std::memcmp(&x, &y, 4) == 0 || (std::isnan(x) && std::isnan(y)))
                  << t.name << ", " << to_string(format) << ", " << strange << ", column " << j;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace opst

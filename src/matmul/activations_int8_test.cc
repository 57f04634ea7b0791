// matmul with activations rounded to int8 in blocks of 32: the definition in activations.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/convert.h"
#include "core/int_math.h"
#include "matmul/activations_int8_reference.h"
#include "matmul/reference.h"
#include "opst/matmul.h"
#include "quant/random_blocks.h"
#include "quant/reference.h"
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
using test::kQuantFormats;
using test::one_context;
using test::Random;
using test::TestContext;

constexpr MatmulOptions kInt8{.activations = ActivationType::int8};

bool has_integers(QuantFormat format) { return block_values(format) > 1; }

struct Weight {
  std::vector<unsigned char> bytes;
  QuantMatrix matrix;
  PackedWeight packed;
  std::vector<double> values;  // [n, k]

  Weight(QuantFormat format, int64_t n, int64_t k, std::vector<unsigned char> blocks) : bytes(std::move(blocks)) {
    matrix = {format, n, k, bytes.data(), static_cast<int64_t>(bytes.size())};
    packed = std::move(PackedWeight::pack(one_context(), matrix).value());
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t col = 0; col < k; ++col) values.push_back(reference::dequantized(matrix, row, col));
    }
  }
  Weight(QuantFormat format, int64_t n, int64_t k, Random& random)
      : Weight(format, n, k, test::random_blocks(format, n, k, random)) {}
};

std::vector<double> magnitudes(std::vector<double> values) {
  for (double& value : values) value = std::abs(value);
  return values;
}

void check(const TestContext& t, const Weight& weight, int64_t m, Random& random) {
  const int64_t n = weight.matrix.rows, k = weight.matrix.cols;
  const bool strided_x = random.chance(0.3), strided_out = random.chance(0.3), with_bias = random.chance(0.5);
  const Guard guard = random.chance(0.5) ? Guard::after : Guard::before;
  SCOPED_TRACE(t.name + ", " + to_string(weight.matrix.format) + ", m " + std::to_string(m) + ", n " +
               std::to_string(n) + ", k " + std::to_string(k));
  GuardedBuffer x_memory(m * k * 4, guard), out_memory(m * n * 4, guard), bias_memory(n * 4, guard);
  const Tensor x =
      strided_x ? x_memory.tensor(DType::f32, {k, m}).transposed(0, 1) : x_memory.tensor(DType::f32, {m, k});
  const Tensor out =
      strided_out ? out_memory.tensor(DType::f32, {n, m}).transposed(0, 1) : out_memory.tensor(DType::f32, {m, n});
  const Tensor bias = bias_memory.tensor(DType::f32, {n});
  test::fill(x, Fill::normal, random);
  test::fill(bias, Fill::normal, random);
  MatmulOptions options = kInt8;
  if (with_bias) options.bias = bias;
  const Status status = matmul(t.context, x, weight.packed, out, options);
  ASSERT_TRUE(status.ok()) << status.message();

  const std::vector<double> rounded = reference::rounded_to_int8_blocks(test::to_doubles(ConstTensor(x)));
  const std::vector<double> biases = with_bias ? test::to_doubles(bias) : std::vector<double>();
  const std::vector<double> expected = reference::matmul(rounded, weight.values, biases, m, n, k);
  // Magnitudes of the terms of each sum: a minimum and d * q may cancel, so the weights' integers count, not only their
  // values.
  std::vector<double> terms = magnitudes(weight.values);
  for (double& term : terms) term += 1;
  const std::vector<double> scale = reference::matmul(magnitudes(rounded), terms, magnitudes(biases), m, n, k);
  const double units = 8 + 2 * std::sqrt(static_cast<double>(k) / 8);
  const std::vector<double> got = test::to_doubles(ConstTensor(out));
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_LE(std::abs(got[i] - expected[i]), units * 0x1p-24 * scale[i])
        << test::index_text(out, static_cast<int64_t>(i)) << " is " << got[i] << ", but the reference is "
        << expected[i];
  }
  EXPECT_TRUE(out_memory.slack_intact());
}

TEST(Int8Blocks, EqualTheReferenceInEveryContext) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (QuantFormat format : kQuantFormats) {
      if (!has_integers(format)) continue;
      for (int i = 0; i < 4; ++i) {
        const int64_t k = round_up(random.integer(1, 1100), block_values(format));
        const int64_t m = i < 2 ? random.integer(1, 9) : random.integer(10, 50);
        check(t, Weight(format, random.integer(1, 150), k, random), m, random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Each dimension through the ends of every tile, block and panel.
TEST(Int8Blocks, HoldAtTheEdgesOfEveryDimension) {
  Random random(test::seed());
  for (QuantFormat format : kQuantFormats) {
    if (!has_integers(format)) continue;
    const int64_t block = block_values(format);
    struct Shape {
      int64_t m, n, k;
    };
    std::vector<Shape> shapes;
    for (int64_t m : {1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 191, 192, 193, 385}) shapes.push_back({m, 33, block});
    for (int64_t n : {1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129}) {
      for (int64_t m : {1, 3, 4, 7}) shapes.push_back({m, n, block});
    }
    for (int64_t k : {32, 64, 480, 512, 544, 768, 1024, 1056}) {
      if (k % block != 0) continue;
      for (int64_t m : {1, 4, 7}) shapes.push_back({m, 19, k});
    }
    for (const Shape& s : shapes) {
      const Weight weight(format, s.n, s.k, random);
      for (const TestContext& t : contexts_with_threads(s.m > 100 ? 2 : 1)) {
        check(t, weight, s.m, random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

bool same_bits_or_nan(const float* a, const float* b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (std::memcmp(a + i, b + i, 4) != 0 && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
  }
  return true;
}

// The bits of a row depend neither on how many rows there are, nor on its place among them, nor on the threads, nor on
// strides.
TEST(Int8Blocks, RowsHaveTheSameBitsInAnyCompany) {
  Random random(test::seed());
  constexpr int64_t kN = 70, kK = 1024, kM = 210;
  std::vector<float> x(kM * kK), turned(kM * kK), all(kM * kN), some(kM * kN);
  test::fill(Tensor::contiguous(DType::f32, {kM, kK}, x.data()), Fill::normal, random);
  for (int64_t i = 0; i < kM; ++i) {
    for (int64_t t = 0; t < kK; ++t) turned[static_cast<size_t>(t * kM + i)] = x[static_cast<size_t>(i * kK + t)];
  }
  for (QuantFormat format : kQuantFormats) {
    const Weight weight(format, kN, kK, random);
    for (size_t level = 0; level < contexts_with_threads(1).size(); ++level) {
      const auto run = [&](int threads, int64_t first, int64_t rows, bool strided, std::vector<float>& out) {
        const TestContext& t = contexts_with_threads(threads)[level];
        const ConstTensor in =
            strided
                ? ConstTensor::contiguous(DType::f32, {kK, kM}, turned.data()).transposed(0, 1).narrowed(0, first, rows)
                : ConstTensor::contiguous(DType::f32, {rows, kK}, x.data() + first * kK);
        const Status status =
            matmul(t.context, in, weight.packed, Tensor::contiguous(DType::f32, {rows, kN}, out.data()), kInt8);
        ASSERT_TRUE(status.ok()) << status.message();
      };
      run(1, 0, kM, false, all);
      for (int threads : {1, 2, 3, 5}) {
        for (const auto& [first, rows] :
             {std::pair<int64_t, int64_t>{0, kM}, {3, 1}, {7, 2}, {100, 3}, {5, 4}, {50, 8}, {60, 9}, {11, 100}}) {
          run(threads, first, rows, threads == 3, some);
          EXPECT_TRUE(same_bits_or_nan(some.data(), all.data() + first * kN, rows * kN))
              << to_string(format) << ", " << contexts_with_threads(threads)[level].name << ", rows from " << first;
        }
      }
    }
  }
}

// A row of q8_0 blocks with d = 1.
std::vector<unsigned char> q8_blocks(const std::vector<int>& q) {
  std::vector<unsigned char> bytes;
  for (size_t t = 0; t < q.size(); ++t) {
    if (t % 32 == 0) {
      bytes.push_back(0x00);
      bytes.push_back(0x3c);
    }
    bytes.push_back(static_cast<unsigned char>(q[t]));
  }
  return bytes;
}

// Integers up to 127 with a 127 in each block have scale 1 and are kept as they are: sums are exact, and pairs of
// extreme products do not saturate on their way.
TEST(Int8Blocks, B80_ExtremesAreExactAtEveryLevel) {
  Random random(test::seed());
  constexpr int64_t kK = 64;
  struct Case {
    int x, w;
  };
  for (const Case& c : {Case{127, 127}, Case{127, -128}, Case{-127, -128}, Case{-127, 127}, Case{127, 0}}) {
    const Weight weight(QuantFormat::q8_0, 1, kK, q8_blocks(std::vector<int>(kK, c.w)));
    for (int64_t m : {1, 8}) {
      std::vector<float> x(static_cast<size_t>(m * kK), static_cast<float>(c.x)), out(static_cast<size_t>(m));
      for (const TestContext& t : contexts_with_threads(1)) {
        ASSERT_TRUE(matmul(t.context, ConstTensor::contiguous(DType::f32, {m, kK}, x.data()), weight.packed,
                           Tensor::contiguous(DType::f32, {m, 1}, out.data()), kInt8)
                        .ok());
        for (float y : out) EXPECT_EQ(y, static_cast<float>(c.x * c.w * kK)) << t.name << ", m " << m;
      }
    }
  }
}

TEST(Int8Blocks, KeepIntegersExactly) {
  Random random(test::seed());
  constexpr int64_t kN = 37, kK = 512, kM = 13;
  for (QuantFormat format : kQuantFormats) {
    if (!has_integers(format)) continue;
    // Scales and minimums that are small integers.
    std::vector<unsigned char> blocks = test::random_blocks(format, kN, kK, random);
    test::edit_blocks(format, blocks, [&]<class Block>(Block& block) {
      if constexpr (!kIsFloat<Block>) {
        block.d = to_f16(1.0);
        if constexpr (Block::kMinimum != Minimum::none) {
          block.m = to_f16(Block::kScales == Scales::one ? static_cast<double>(random.integer(-9, 9)) : 1);
        }
        if constexpr (Block::kScales == Scales::int8) {
          for (int8_t& scale : block.scales) scale = static_cast<int8_t>(random.integer(-3, 3));
        }
      }
    });
    const Weight weight(format, kN, kK, blocks);
    std::vector<float> x(kM * kK), out(kM * kN);
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = i % 32 == 5 ? 127.0f : static_cast<float>(random.integer(-9, 9));
    }
    const ConstTensor in = ConstTensor::contiguous(DType::f32, {kM, kK}, x.data());
    const Tensor to = Tensor::contiguous(DType::f32, {kM, kN}, out.data());
    const std::vector<double> expected = reference::matmul(test::to_doubles(in), weight.values, {}, kM, kN, kK);
    for (const TestContext& t : contexts_with_threads(2)) {
      ASSERT_TRUE(matmul(t.context, in, weight.packed, to, kInt8).ok());
      EXPECT_EQ(test::to_doubles(to), expected) << t.name << ", " << to_string(format);
    }
  }
}

// Ties go to even; the largest is 127, never 128; a block too small for a scale becomes 0.
TEST(Int8Blocks, RoundAsDefined) {
  std::vector<int> unit(32 * 32, 0);
  for (size_t i = 0; i < 32; ++i) unit[i * 32 + i] = 1;
  const Weight weight(QuantFormat::q8_0, 32, 32, q8_blocks(unit));
  std::vector<float> x(32, 0.0f);
  x[0] = 127.0f;
  x[1] = 0.5f, x[2] = 1.5f, x[3] = -2.5f, x[4] = 126.5f, x[5] = -126.75f, x[6] = 0.49999997f;
  const std::vector<float> expected = {127, 0, 2, -2, 126, -127, 0, 0};
  std::vector<float> out(32);
  const ConstTensor in = ConstTensor::contiguous(DType::f32, {1, 32}, x.data());
  const Tensor to = Tensor::contiguous(DType::f32, {1, 32}, out.data());
  for (const TestContext& t : contexts_with_threads(1)) {
    ASSERT_TRUE(matmul(t.context, in, weight.packed, to, kInt8).ok());
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(out[i], expected[i]) << t.name << ", " << i;
  }
  for (float tiny : {1e-45f, 6e-44f, 1.2e-38f, 3e38f}) {
    x.assign(32, tiny);
    for (const TestContext& t : contexts_with_threads(1)) {
      ASSERT_TRUE(matmul(t.context, in, weight.packed, to, kInt8).ok());
      const std::vector<double> rounded = reference::rounded_to_int8_blocks(test::to_doubles(in));
      for (size_t i = 0; i < 32; ++i) EXPECT_EQ(out[i], static_cast<float>(rounded[i])) << t.name << ", " << tiny;
    }
  }
}

// A block with a value that is not finite makes its row of out NaN, and no other; zeros give zeros.
TEST(Int8Blocks, NanAndInfinityStayInTheirRow) {
  Random random(test::seed());
  constexpr int64_t kN = 40, kK = 256, kM = 9;
  for (QuantFormat format : kQuantFormats) {
    if (!has_integers(format)) continue;
    const Weight weight(format, kN, kK, random);
    std::vector<float> x(kM * kK), clean(kM * kN), out(kM * kN);
    const ConstTensor in = ConstTensor::contiguous(DType::f32, {kM, kK}, x.data());
    test::fill(Tensor::contiguous(DType::f32, {kM, kK}, x.data()), Fill::normal, random);
    std::fill(x.begin() + 7 * kK, x.begin() + 8 * kK, 0.0f);
    for (const TestContext& t : contexts_with_threads(1)) {
      std::vector<float> bad = x;
      bad[2 * kK + 33] = std::numeric_limits<float>::quiet_NaN();
      bad[4 * kK + 255] = std::numeric_limits<float>::infinity();
      bad[5 * kK] = -std::numeric_limits<float>::infinity();
      ASSERT_TRUE(
          matmul(t.context, in, weight.packed, Tensor::contiguous(DType::f32, {kM, kN}, clean.data()), kInt8).ok());
      ASSERT_TRUE(matmul(t.context, ConstTensor::contiguous(DType::f32, {kM, kK}, bad.data()), weight.packed,
                         Tensor::contiguous(DType::f32, {kM, kN}, out.data()), kInt8)
                      .ok());
      for (int64_t i = 0; i < kM; ++i) {
        for (int64_t j = 0; j < kN; ++j) {
          const float y = out[static_cast<size_t>(i * kN + j)];
          if (i == 2 || i == 4 || i == 5) {
            EXPECT_TRUE(std::isnan(y)) << t.name << ", row " << i;
          } else {
            EXPECT_EQ(y, clean[static_cast<size_t>(i * kN + j)]) << t.name << ", row " << i;
          }
          if (i == 7) {
            EXPECT_EQ(y, 0.0f);
          }
        }
      }
    }
  }
}

// f32 and f16 weights have no integers: the option changes nothing.
TEST(Int8Blocks, LeaveWeightsWithoutIntegersAlone) {
  Random random(test::seed());
  for (QuantFormat format : {QuantFormat::f32, QuantFormat::f16}) {
    const Weight weight(format, 20, 50, random);
    std::vector<float> x(3 * 50), exact(60), out(60);
    const ConstTensor in = ConstTensor::contiguous(DType::f32, {3, 50}, x.data());
    test::fill(Tensor::contiguous(DType::f32, {3, 50}, x.data()), Fill::normal, random);
    ASSERT_TRUE(matmul(one_context(), in, weight.packed, Tensor::contiguous(DType::f32, {3, 20}, exact.data())).ok());
    ASSERT_TRUE(
        matmul(one_context(), in, weight.packed, Tensor::contiguous(DType::f32, {3, 20}, out.data()), kInt8).ok());
    EXPECT_EQ(exact, out);
  }
}

TEST(Int8Blocks, AllocateNothingOnceTheWorkspaceIsLargeEnough) {
  Random random(test::seed());
  const Weight weight(QuantFormat::q4_1, 300, 576, random);
  Context& context = contexts_with_threads(2).back().context;
  std::vector<float> x(64 * 576), out(64 * 300);
  const auto run = [&] {
    return matmul(context, ConstTensor::contiguous(DType::f32, {64, 576}, x.data()), weight.packed,
                  Tensor::contiguous(DType::f32, {64, 300}, out.data()), kInt8);
  };
  ASSERT_TRUE(run().ok());
  const int64_t allocations = context.workspace_allocations();
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(run().ok());
  EXPECT_EQ(context.workspace_allocations(), allocations);
}

}  // namespace
}  // namespace opst

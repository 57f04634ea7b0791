// matmul with int8 and int4 weights.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/convert.h"
#include "matmul/test_int_weights.h"
#include "opst/matmul.h"
#include "opst/quant.h"
#include "testing/contexts.h"
#include "testing/elements.h"
#include "testing/random.h"

namespace opst {
namespace {

using test::contexts;
using test::contexts_with_threads;
using test::Fill;
using test::Guard;
using test::integers;
using test::Matrix;
using test::one_context;
using test::put_i8;
using test::Random;
using test::Shape;
using test::TestContext;
using Weight = test::IntWeight;

float element(const ConstTensor& tensor, int64_t i, int64_t j) {
  const int64_t at = i * tensor.strides[0] + j * tensor.strides[1];
  switch (tensor.dtype) {
    case DType::bf16:
      return to_f32(static_cast<const bf16*>(tensor.data)[at]);
    case DType::f16:
      return to_f32(static_cast<const f16*>(tensor.data)[at]);
    default:
      return static_cast<const float*>(tensor.data)[at];
  }
}
float rounded_to(DType dtype, float value) {
  return dtype == DType::bf16 ? to_f32(to_bf16(value)) : dtype == DType::f16 ? to_f32(to_f16(value)) : value;
}

std::string about(const TestContext& t, const Weight& weight, int64_t m) {
  return t.name + ", int" + std::to_string(weight.bits) + ", m " + std::to_string(m) + ", n " +
         std::to_string(weight.n) + ", k " + std::to_string(weight.k) + ", groups " + std::to_string(weight.groups) +
         (weight.zeros.empty() ? "" : ", zeros");
}

// Integer sums are the sums.
void check_integers(const TestContext& t, const Weight& weight, int64_t m, Random& random) {
  SCOPED_TRACE(about(t, weight, m));
  const Guard guard = random.pick({Guard::after, Guard::before});
  Matrix x(DType::i8, m, weight.k, random.chance(0.3), guard), out(DType::i32, m, weight.n, random.chance(0.3), guard);
  const std::vector<int64_t> xs = random.chance(0.2) ? std::vector<int64_t>(static_cast<size_t>(m * weight.k), -128)
                                                     : integers(m * weight.k, -128, 127, random);
  put_i8(x.tensor, xs);
  x.memory.make_read_only();
  std::vector<int32_t> bias(static_cast<size_t>(2 * weight.n));
  for (int32_t& b : bias) b = static_cast<int32_t>(random.integer(-1000, 1000));
  IntMatmulOptions options;
  const bool with_bias = random.chance(0.5);
  if (with_bias) options.bias = ConstTensor::contiguous(DType::i32, {weight.n, 2}, bias.data()).selected(1, 0);
  const Status status = matmul(t.context, x.tensor, weight.packed, out.tensor, options);
  ASSERT_TRUE(status.ok()) << status.message();
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < weight.n; ++j) {
      int64_t expected = with_bias ? bias[static_cast<size_t>(2 * j)] : 0;
      for (int64_t k = 0; k < weight.k; ++k)
        expected += xs[static_cast<size_t>(i * weight.k + k)] * weight.integer(j, k);
      ASSERT_EQ(static_cast<const int32_t*>(out.tensor.data)[i * out.tensor.strides[0] + j * out.tensor.strides[1]],
                expected)
          << i << ", " << j;
    }
  }
  EXPECT_TRUE(out.memory.slack_intact());
}

// Scaled sums have the bits of the contract's chain.
void check_scaled(const TestContext& t, const Weight& weight, int64_t m, Random& random) {
  SCOPED_TRACE(about(t, weight, m));
  const Guard guard = random.pick({Guard::after, Guard::before});
  const DType out_type = random.pick({DType::f32, DType::bf16, DType::f16});
  Matrix x(DType::i8, m, weight.k, random.chance(0.3), guard), out(out_type, m, weight.n, random.chance(0.3), guard);
  const std::vector<int64_t> xs = integers(m * weight.k, -128, 127, random);
  put_i8(x.tensor, xs);
  Matrix x_scales(DType::f32, m, 2, false, guard),
      bias(random.pick({DType::f32, DType::bf16, DType::f16}), weight.n, 2, false, guard);
  test::fill(x_scales.tensor, Fill::normal, random);
  test::fill(bias.tensor, Fill::normal, random);
  IntMatmulOptions options;
  const bool with_scales = random.chance(0.7), with_bias = random.chance(0.5);
  if (with_scales) options.x_scales = x_scales.tensor.selected(1, 1);
  if (with_bias) options.bias = bias.tensor.selected(1, 1);
  const Status status = matmul(t.context, x.tensor, weight.packed, out.tensor, options);
  ASSERT_TRUE(status.ok()) << status.message();
  const bool fused = t.context.machine().isa != Isa::generic;
  const int64_t group = weight.k / weight.groups;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < weight.n; ++j) {
      float y = 0;
      for (int64_t g = 0; g < weight.groups; ++g) {
        int64_t sum = 0;
        for (int64_t k = g * group; k < (g + 1) * group; ++k)
          sum += xs[static_cast<size_t>(i * weight.k + k)] * weight.integer(j, k);
        const float scale = weight.scales[static_cast<size_t>(j * weight.groups + g)];
        y = weight.groups == 1 ? static_cast<float>(sum) * scale
            : fused            ? std::fma(static_cast<float>(sum), scale, y)
                               : static_cast<float>(sum) * scale + y;
      }
      if (with_scales) y *= element(x_scales.tensor, i, 1);
      if (with_bias) y += element(bias.tensor, j, 1);
      ASSERT_EQ(element(out.tensor, i, j), rounded_to(out_type, y)) << i << ", " << j;
    }
  }
  EXPECT_TRUE(out.memory.slack_intact());
}

// With float x a product has the bits of that with the dequantised f32 matrix.
void check_floats(const TestContext& t, const Weight& weight, int64_t m, Random& random) {
  SCOPED_TRACE(about(t, weight, m));
  const Guard guard = random.pick({Guard::after, Guard::before});
  const DType x_type = random.pick({DType::f32, DType::bf16, DType::f16});
  const DType out_type = random.pick({DType::f32, DType::bf16, DType::f16});
  Matrix x(x_type, m, weight.k, random.chance(0.3), guard), out(out_type, m, weight.n, random.chance(0.3), guard);
  test::fill(x.tensor, Fill::normal, random);
  const Status status = matmul(t.context, x.tensor, weight.packed, out.tensor);
  ASSERT_TRUE(status.ok()) << status.message();

  std::vector<float> values, wide, expected(static_cast<size_t>(m * weight.n));
  for (int64_t j = 0; j < weight.n; ++j) {
    for (int64_t k = 0; k < weight.k; ++k) values.push_back(weight.value(j, k));
  }
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t k = 0; k < weight.k; ++k) wide.push_back(element(x.tensor, i, k));
  }
  const PackedWeight plain = std::move(
      PackedWeight::pack(one_context(), ConstTensor::contiguous(DType::f32, {weight.n, weight.k}, values.data()))
          .value());
  ASSERT_TRUE(matmul(t.context, ConstTensor::contiguous(DType::f32, {m, weight.k}, wide.data()), plain,
                     Tensor::contiguous(DType::f32, {m, weight.n}, expected.data()))
                  .ok());
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < weight.n; ++j) {
      ASSERT_EQ(element(out.tensor, i, j), rounded_to(out_type, expected[static_cast<size_t>(i * weight.n + j)]))
          << i << ", " << j;
    }
  }
  EXPECT_TRUE(out.memory.slack_intact());
}

// A random number of groups that divides k.
int64_t random_groups(int64_t k, int bits, Random& random) {
  for (int tries = 0; tries < 20; ++tries) {
    const int64_t groups = random.integer(1, std::max<int64_t>(1, k));
    if (k % groups == 0 && (bits == 8 || k / groups % 2 == 0)) return groups;
  }
  return 1;
}

TEST(IntMatmul, EqualsItsContractInEveryContext) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (int bits : {8, 4}) {
      for (int i = 0; i < 4; ++i) {
        const int64_t m = i % 2 == 0 ? random.integer(1, 8) : random.integer(9, 60);
        const int64_t n = random.integer(1, 140), k = 2 * random.integer(1, 200);
        check_integers(t, Weight(bits, n, k, 1, random.chance(0.3), random), m, random);
        const Weight weight(bits, n, k, random_groups(k, bits, random), random.chance(0.5), random);
        check_scaled(t, weight, m, random);
        check_floats(t, weight, m, random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(IntMatmul, HoldsAtTheEdgesOfEveryDimension) {
  Random random(test::seed());
  std::vector<Shape> shapes;
  for (int64_t m : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 23, 24, 25, 255, 256, 257, 513})
    shapes.push_back({m, 33, 64});
  for (int64_t n : {1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129}) {
    shapes.push_back({2, n, 32});
    shapes.push_back({13, n, 32});
  }
  for (int64_t k : {2, 4, 6, 8, 10, 14, 16, 18, 62, 64, 66, 1022, 1024, 1026, 2046, 2048, 2050, 4098}) {
    shapes.push_back({3, 19, k});
    shapes.push_back({14, 35, k});
  }
  for (int bits : {8, 4}) {
    for (const Shape& s : shapes) {
      const Weight whole(bits, s.n, s.k, 1, random.chance(0.3), random);
      const Weight grouped(bits, s.n, s.k, random_groups(s.k, bits, random), random.chance(0.3), random);
      for (const TestContext& t : contexts_with_threads(s.m > 100 ? 2 : 1)) {
        check_integers(t, whole, s.m, random);
        check_scaled(t, random.chance(0.5) ? whole : grouped, s.m, random);
        check_floats(t, random.chance(0.5) ? whole : grouped, s.m, random);
        if (HasFatalFailure()) return;
      }
    }
  }
  // Odd numbers of values.
  for (int64_t k : {1, 3, 5, 7, 13, 31, 33, 127}) {
    for (const TestContext& t : contexts_with_threads(1)) {
      check_integers(t, Weight(8, 17, k, 1, false, random), 2, random);
      check_scaled(t, Weight(8, 17, k, k, true, random), 12, random);
      check_floats(t, Weight(8, 17, k, 1, true, random), 12, random);
      if (HasFatalFailure()) return;
    }
  }
}

// One output, so that the sums are easy to write down.
int32_t one_sum(const TestContext& t, int64_t m, int64_t k, int x, int q, int zero) {
  std::vector<int8_t> xs(static_cast<size_t>(m * k), static_cast<int8_t>(x)),
      qs(static_cast<size_t>(k), static_cast<int8_t>(q));
  const auto z = static_cast<int8_t>(zero);
  const float scale = 1;
  const PackedIntWeight weight =
      std::move(PackedIntWeight::pack(t.context, IntMatrix{ConstTensor::contiguous(DType::i8, {1, k}, qs.data()),
                                                           ConstTensor::contiguous(DType::f32, {1, 1}, &scale),
                                                           ConstTensor::contiguous(DType::i8, {1, 1}, &z)})
                    .value());
  std::vector<int32_t> out(static_cast<size_t>(m));
  EXPECT_TRUE(matmul(t.context, ConstTensor::contiguous(DType::i8, {m, k}, xs.data()), weight,
                     Tensor::contiguous(DType::i32, {m, 1}, out.data()))
                  .ok());
  for (int32_t y : out) EXPECT_EQ(y, out[0]);
  return out[0];
}

// Pairs of products must not saturate in 16 bits, whatever the level and the number of rows.
TEST(IntMatmul, B80_ExtremesAreExactAtEveryLevel) {
  for (const TestContext& t : contexts_with_threads(1)) {
    for (int64_t m : {1, 8, 16}) {
      SCOPED_TRACE(t.name + ", m " + std::to_string(m));
      EXPECT_EQ(one_sum(t, m, 64, 127, 127, -128), 2072640);  // 255 * 127 * 64
      EXPECT_EQ(one_sum(t, m, 64, -128, -128, 0), 1048576);
      EXPECT_EQ(one_sum(t, m, 64, -128, 127, 0), -128 * 127 * 64);
      EXPECT_EQ(one_sum(t, m, 64, 127, -128, 0), -128 * 127 * 64);
      EXPECT_EQ(one_sum(t, m, 65536, -128, -128, 127), 255 * 128 * 65536);
      EXPECT_EQ(one_sum(t, m, 65536, -128, 127, -128), -255 * 128 * 65536);
      EXPECT_EQ(one_sum(t, m, 65536, 127, 127, 0), 127 * 127 * 65536);
    }
  }
}

// The one sum that can leave 32 bits is that with a bias: it wraps modulo 2^32, at any level, for few rows and many.
TEST(IntMatmul, ASumWithItsBiasWraps) {
  constexpr int64_t kK = 65536;
  constexpr int32_t kSum = 1 << 30;  // -128 * -128 * 65536
  const std::vector<int8_t> q(kK, -128);
  const std::vector<int32_t> bias = {INT32_MAX - kSum, INT32_MAX - kSum + 1, INT32_MAX, INT32_MIN};
  const std::vector<int32_t> expected = {INT32_MAX, INT32_MIN, INT32_MIN + kSum - 1, INT32_MIN + kSum};
  const auto n = static_cast<int64_t>(bias.size());
  const ConstTensor row = ConstTensor::contiguous(DType::i8, {1, kK}, q.data());
  const auto repeated = [&](int64_t rows) {
    ConstTensor t = row;
    t.shape[0] = rows, t.strides[0] = 0;
    return t;
  };
  for (const TestContext& t : contexts_with_threads(1)) {
    const Result<PackedIntWeight> weight = PackedIntWeight::pack(t.context, repeated(n));
    ASSERT_TRUE(weight.ok()) << weight.status().message();
    for (int64_t m : {1, 16}) {
      SCOPED_TRACE(t.name + ", m " + std::to_string(m));
      std::vector<int32_t> out(static_cast<size_t>(m * n));
      std::vector<float> floats(static_cast<size_t>(m * n));
      const IntMatmulOptions options = {.bias = ConstTensor::contiguous(DType::i32, {n}, bias.data())};
      ASSERT_TRUE(
          matmul(t.context, repeated(m), weight.value(), Tensor::contiguous(DType::i32, {m, n}, out.data()), options)
              .ok());
      ASSERT_TRUE(
          matmul(t.context, repeated(m), weight.value(), Tensor::contiguous(DType::f32, {m, n}, floats.data()), options)
              .ok());
      for (size_t i = 0; i < out.size(); ++i) {
        EXPECT_EQ(out[i], expected[i % bias.size()]) << i;
        EXPECT_EQ(floats[i], static_cast<float>(expected[i % bias.size()])) << i;
      }
    }
  }
}

TEST(IntMatmul, RowsHaveTheSameBitsInAnyCompany) {
  Random random(test::seed());
  constexpr int64_t kN = 150, kK = 384, kM = 300;
  for (int bits : {8, 4}) {
    for (int64_t groups : {1, 12}) {
      const Weight weight(bits, kN, kK, groups, true, random);
      std::vector<int8_t> x(kM * kK);
      std::vector<float> wide(kM * kK), scales(kM), all(kM * kN), some(kM * kN);
      for (size_t i = 0; i < x.size(); ++i) {
        x[i] = static_cast<int8_t>(random.integer(-128, 127));
        wide[i] = static_cast<float>(random.normal());
      }
      for (float& scale : scales) scale = static_cast<float>(random.normal());
      for (size_t level = 0; level < contexts_with_threads(1).size(); ++level) {
        for (const bool integer : {true, false}) {
          const auto run = [&](int threads, int64_t first, int64_t rows, std::vector<float>& out) {
            const TestContext& t = contexts_with_threads(threads)[level];
            IntMatmulOptions options;
            if (integer) options.x_scales = ConstTensor::contiguous(DType::f32, {rows}, scales.data() + first);
            const void* const data =
                integer ? static_cast<const void*>(x.data() + first * kK) : wide.data() + first * kK;
            ASSERT_TRUE(matmul(t.context, ConstTensor::contiguous(integer ? DType::i8 : DType::f32, {rows, kK}, data),
                               weight.packed, Tensor::contiguous(DType::f32, {rows, kN}, out.data()), options)
                            .ok());
          };
          run(1, 0, kM, all);
          for (int threads : {1, 2, 3, 5}) {
            for (const auto& [first, rows] :
                 {std::pair<int64_t, int64_t>{0, kM}, {3, 1}, {7, 2}, {100, 4}, {50, 8}, {60, 9}, {11, 270}}) {
              run(threads, first, rows, some);
              EXPECT_EQ(std::memcmp(some.data(), all.data() + first * kN, static_cast<size_t>(rows * kN) * 4), 0)
                  << contexts_with_threads(threads)[level].name << ", int" << bits << ", groups " << groups
                  << ", rows from " << first;
            }
          }
        }
      }
    }
  }
}

TEST(IntMatmul, QuantisesAndMultipliesAsOne) {
  // As users chain the calls: quantize the weight, dynamic_quant x, multiply.
  Random random(test::seed());
  constexpr int64_t kM = 20, kN = 48, kK = 256;
  std::vector<float> x(kM * kK), w(kN * kK), out(kM * kN), x_scales(kM), w_scales(kN);
  std::vector<int8_t> xq(kM * kK), wq(kN * kK);
  test::fill(Tensor::contiguous(DType::f32, {kM, kK}, x.data()), Fill::normal, random);
  test::fill(Tensor::contiguous(DType::f32, {kN, kK}, w.data()), Fill::normal, random);
  Context& context = one_context();
  ASSERT_TRUE(dynamic_quant(context, ConstTensor::contiguous(DType::f32, {kM, kK}, x.data()),
                            Tensor::contiguous(DType::i8, {kM, kK}, xq.data()),
                            Tensor::contiguous(DType::f32, {kM}, x_scales.data()))
                  .ok());
  ASSERT_TRUE(quantize(context, ConstTensor::contiguous(DType::f32, {kN, kK}, w.data()),
                       Tensor::contiguous(DType::i8, {kN, kK}, wq.data()),
                       Tensor::contiguous(DType::f32, {kN, 1}, w_scales.data()))
                  .ok());
  const PackedIntWeight weight =
      std::move(PackedIntWeight::pack(context, IntMatrix{ConstTensor::contiguous(DType::i8, {kN, kK}, wq.data()),
                                                         ConstTensor::contiguous(DType::f32, {kN, 1}, w_scales.data())})
                    .value());
  ASSERT_TRUE(matmul(context, ConstTensor::contiguous(DType::i8, {kM, kK}, xq.data()), weight,
                     Tensor::contiguous(DType::f32, {kM, kN}, out.data()),
                     {.x_scales = ConstTensor::contiguous(DType::f32, {kM}, x_scales.data())})
                  .ok());
  for (size_t i = 0; i < kM; ++i) {
    for (size_t j = 0; j < kN; ++j) {
      double exact = 0, bound = 0;
      for (size_t k = 0; k < kK; ++k) {
        const double a = x[i * kK + k], b = w[j * kK + k];
        exact += a * b;
        bound += 0.5 * x_scales[i] * std::abs(b) + 0.5 * w_scales[j] * std::abs(a) + 0.25 * x_scales[i] * w_scales[j];
      }
      EXPECT_LE(std::abs(out[i * kN + j] - exact), bound);
    }
  }
}

TEST(IntMatmul, EmptySizesAreLegal) {
  Random random(test::seed());
  Context& context = one_context();
  std::vector<float> out(6, 7.0f);
  std::vector<int32_t> sums(6, 7);
  const float scale = 1;
  const PackedIntWeight none =
      std::move(PackedIntWeight::pack(context, IntMatrix{ConstTensor::contiguous(DType::i8, {3, 0}, nullptr),
                                                         ConstTensor::contiguous(DType::f32, {3, 1}, out.data())})
                    .value());
  for (int64_t m : {2, 12}) {
    std::vector<int32_t> all(static_cast<size_t>(m * 3), 7);
    std::vector<float> floats(static_cast<size_t>(m * 3), 7.0f);
    ASSERT_TRUE(matmul(context, ConstTensor::contiguous(DType::i8, {m, 0}, nullptr), none,
                       Tensor::contiguous(DType::i32, {m, 3}, all.data()))
                    .ok());
    for (int32_t y : all) EXPECT_EQ(y, 0);
    ASSERT_TRUE(matmul(context, ConstTensor::contiguous(DType::f32, {m, 0}, nullptr), none,
                       Tensor::contiguous(DType::f32, {m, 3}, floats.data()))
                    .ok());
    for (float y : floats) EXPECT_EQ(y, 0.0f);
  }
  const PackedIntWeight narrow =
      std::move(PackedIntWeight::pack(context, IntMatrix{ConstTensor::contiguous(DType::i8, {0, 4}, nullptr),
                                                         ConstTensor::contiguous(DType::f32, {0, 1}, nullptr)})
                    .value());
  const int8_t x[8] = {};
  EXPECT_TRUE(matmul(context, ConstTensor::contiguous(DType::i8, {2, 4}, x), narrow,
                     Tensor::contiguous(DType::i32, {2, 0}, nullptr))
                  .ok());
  const Weight weight(8, 3, 4, 1, false, random);
  EXPECT_TRUE(matmul(context, ConstTensor::contiguous(DType::i8, {0, 4}, nullptr), weight.packed,
                     Tensor::contiguous(DType::i32, {0, 3}, nullptr))
                  .ok());
  static_cast<void>(scale);
}

TEST(IntMatmul, AllocatesNothingOnceTheWorkspaceIsLargeEnough) {
  Random random(test::seed());
  const Weight weight(4, 200, 256, 8, true, random);
  Context& context = contexts_with_threads(2).back().context;
  std::vector<int8_t> x(64 * 256);
  std::vector<float> out(64 * 200);
  const auto run = [&](int64_t m) {
    return matmul(context, ConstTensor::contiguous(DType::i8, {m, 256}, x.data()), weight.packed,
                  Tensor::contiguous(DType::f32, {m, 200}, out.data()));
  };
  ASSERT_TRUE(run(64).ok());
  const int64_t allocations = context.workspace_allocations();
  for (int64_t m : {64, 1, 9, 64}) ASSERT_TRUE(run(m).ok());
  EXPECT_EQ(context.workspace_allocations(), allocations);
}

TEST(IntMatmul, NamesWhatIsWrong) {
  Random random(test::seed());
  Context& context = one_context();
  const Weight weight(8, 3, 8, 2, false, random), whole(8, 3, 8, 1, false, random);
  std::vector<int8_t> bytes(64);
  std::vector<float> floats(64);
  std::vector<int32_t> sums(64);
  const ConstTensor x = ConstTensor::contiguous(DType::i8, {2, 8}, bytes.data());
  const ConstTensor wide = ConstTensor::contiguous(DType::f32, {2, 8}, floats.data());
  const Tensor out = Tensor::contiguous(DType::f32, {2, 3}, floats.data() + 32);
  const Tensor out_sums = Tensor::contiguous(DType::i32, {2, 3}, sums.data());
  const ConstTensor scales = ConstTensor::contiguous(DType::f32, {2}, floats.data());
  const ConstTensor bias = ConstTensor::contiguous(DType::f32, {3}, floats.data());
  const ConstTensor int_bias = ConstTensor::contiguous(DType::i32, {3}, sums.data() + 32);
  const auto message = [&](const ConstTensor& in, const Weight& w, const Tensor& to,
                           const IntMatmulOptions& options = {}) {
    return matmul(context, in, w.packed, to, options).message();
  };
  EXPECT_EQ(message(x, weight, out, {.x_scales = scales, .bias = bias}), "");
  EXPECT_EQ(message(x, whole, out, {.bias = int_bias}), "");
  EXPECT_EQ(message(ConstTensor::contiguous(DType::i8, {2, 7}, bytes.data()), weight, out),
            "matmul: x dim 1 (k) is 7, but the weight has k = 8");
  EXPECT_EQ(message(x, weight, Tensor::contiguous(DType::f32, {2, 4}, floats.data() + 32)),
            "matmul: out dim 1 (n) is 4, but the weight has n = 3");
  EXPECT_EQ(message(x, weight, Tensor::contiguous(DType::f32, {1, 3}, floats.data() + 32)),
            "matmul: out dim 0 (m) is 1, but x set m = 2");
  EXPECT_EQ(message(wide, weight, out, {.x_scales = scales}), "matmul: x_scales belong to an x of i8, but x is f32");
  EXPECT_EQ(message(x, weight, out_sums), "matmul: out is i32, but the weight has 2 groups, each with its scales");
  EXPECT_EQ(message(x, whole, out_sums, {.x_scales = scales}), "matmul: out is i32, which x_scales cannot multiply");
  EXPECT_EQ(message(x, whole, out_sums, {.bias = bias}), "matmul: out is i32, but bias is f32");
  EXPECT_EQ(message(x, weight, out, {.bias = int_bias}), "matmul: bias is i32, but must be f32, bf16 or f16");
  EXPECT_EQ(message(wide, whole, out_sums), "matmul: out is i32, but must be f32, bf16 or f16");
  EXPECT_EQ(message(ConstTensor::contiguous(DType::i64, {2, 8}, sums.data()), whole, out),
            "matmul: x is i64, but must be i8, f32, bf16 or f16");
  EXPECT_NE(message(wide, whole, Tensor::contiguous(DType::f32, {2, 3}, floats.data() + 4)).find("overlaps x"),
            std::string::npos);
  EXPECT_EQ(message(x, whole, out_sums, {.activation = Activation::silu}),
            "matmul: out is i32, the bare sums, but activation is silu");
  EXPECT_EQ(message(x, whole, out_sums, {.residual = out}),
            "matmul: out is i32, the bare sums, to which no residual is added");
  EXPECT_EQ(message(x, whole, out, {.activation = Activation::swiglu}),
            "matmul: the weight has n = 3, but swiglu needs two halves");
  EXPECT_EQ(message(x, whole, out_sums, {.out_scales = Tensor::contiguous(DType::f32, {2}, floats.data() + 40)}),
            "matmul: out is i32, but must be i8");
  EXPECT_EQ(message(x, whole, out, {.activation = static_cast<Activation>(9)}),
            "matmul: activation is 9, which is no Activation");

  const auto pack = [&](const IntMatrix& matrix) { return PackedIntWeight::pack(context, matrix).status().message(); };
  const ConstTensor q = ConstTensor::contiguous(DType::i8, {2, 6}, bytes.data());
  EXPECT_EQ(pack({q, ConstTensor::contiguous(DType::f32, {2, 4}, floats.data())}),
            "PackedIntWeight::pack: scales has 4 groups, which do not divide cols = 6");
  EXPECT_EQ(pack({ConstTensor::contiguous(DType::u8, {2, 3}, bytes.data()),
                  ConstTensor::contiguous(DType::f32, {2, 2}, floats.data())}),
            "PackedIntWeight::pack: scales has groups of 3 values, but those of int4 must fill whole bytes");
  EXPECT_EQ(pack({q, ConstTensor::contiguous(DType::f32, {3, 1}, floats.data())}),
            "PackedIntWeight::pack: scales dim 0 (rows) is 3, but q set rows = 2");
  EXPECT_EQ(pack({wide, ConstTensor::contiguous(DType::f32, {2, 1}, floats.data())}),
            "PackedIntWeight::pack: q is f32, but must be i8 or u8");
  ConstTensor repeated = ConstTensor::contiguous(DType::i8, {1, 65537}, bytes.data());
  repeated.strides[1] = 0;
  EXPECT_EQ(pack({repeated, ConstTensor::contiguous(DType::f32, {1, 1}, floats.data())}),
            "PackedIntWeight::pack: a group of the weight has 65537 values, but at most 65536 can be summed");
  EXPECT_EQ(PackedIntWeight::pack(context, wide).status().message(),
            "PackedIntWeight::pack: weight is f32, but must be i8");
}

}  // namespace
}  // namespace opst

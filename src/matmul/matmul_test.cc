#include "opst/matmul.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "core/convert.h"
#include "core/int_math.h"
#include "matmul/reference.h"
#include "matmul/test_calls.h"
#include "quant/random_blocks.h"
#include "quant/reference.h"
#include "testing/compare.h"
#include "testing/contexts.h"
#include "testing/elements.h"
#include "testing/guarded_buffer.h"
#include "testing/lazy_mapping.h"
#include "testing/random.h"

namespace opst {
namespace {

using test::contexts;
using test::contexts_with_threads;
using test::Fill;
using test::Form;
using test::Guard;
using test::GuardedBuffer;
using test::kQuantFormats;
using test::one_context;
using test::Random;
using test::Shape;
using test::TestContext;

// k, rounded up to whole blocks.
int64_t inputs(QuantFormat format, int64_t k) { return round_up(k, block_values(format)); }

// A quantised weight in its three forms.
struct Weight {
  std::vector<unsigned char> bytes;
  QuantMatrix matrix;
  PackedWeight packed;
  std::vector<double> values;  // [n, k]

  Weight(QuantFormat format, int64_t n, int64_t k, std::vector<unsigned char> blocks) : bytes(std::move(blocks)) {
    matrix = {format, n, k, bytes.data(), static_cast<int64_t>(bytes.size())};
    Result<PackedWeight> result = PackedWeight::pack(one_context(), matrix);
    EXPECT_TRUE(result.ok()) << result.status().message();
    if (result.ok()) packed = std::move(result.value());
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t col = 0; col < k; ++col)
        values.push_back(static_cast<float>(reference::dequantized(matrix, row, col)));
    }
  }
  Weight(QuantFormat format, int64_t n, int64_t k, Random& random)
      : Weight(format, n, k, test::random_blocks(format, n, k, random)) {}
};

void check(const TestContext& t, const Weight& weight, const Shape& s, Random& random) {
  Form form = test::random_form(random);
  if (s.n % 2 != 0 && test::halves(form.activation)) form.activation = Activation::none;
  test::check_call(t.name + ", " + to_string(weight.matrix.format), weight.values, s, form, random,
                   [&](const ConstTensor& x, const Tensor& out, const MatmulOptions& options) {
                     return matmul(t.context, x, weight.packed, out, options);
                   });
}

TEST(Matmul, EqualsTheReferenceInEveryContext) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (QuantFormat format : kQuantFormats) {
      for (int i = 0; i < 6; ++i) {
        Shape s{};
        s.m = i < 3 ? random.integer(1, 9) : random.integer(10, 50);
        s.n = random.integer(1, 150);
        s.k = inputs(format, random.integer(1, 12) * (block_values(format) == 1 ? random.integer(1, 32) : 32));
        check(t, Weight(format, s.n, s.k, random), s, random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Each dimension through the ends of every tile, block and panel.
TEST(Matmul, HoldsAtTheEdgesOfEveryDimension) {
  Random random(test::seed());
  for (QuantFormat format : kQuantFormats) {
    const int64_t block = block_values(format);
    std::vector<Shape> shapes;
    for (int64_t m : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 17, 23, 24, 25, 191, 192, 193, 385}) {
      shapes.push_back({m, 33, inputs(format, 64)});
    }
    for (int64_t n : {1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257}) {
      shapes.push_back({2, n, inputs(format, 32)});
      shapes.push_back({13, n, inputs(format, 32)});
    }
    for (int64_t k :
         {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 255, 256, 383, 384, 385, 416, 512, 768, 769, 1024, 1153}) {
      if (k % block != 0) continue;
      shapes.push_back({3, 19, k});
      shapes.push_back({14, 19, k});
    }
    for (const Shape& s : shapes) {
      const Weight weight(format, s.n, s.k, random);
      for (const TestContext& t : contexts_with_threads(s.m > 100 ? 2 : 1)) {
        check(t, weight, s, random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Small integers have exact sums: every level must give the same bits as the equation.
TEST(Matmul, IsExactOnSmallIntegers) {
  Random random(test::seed());
  for (int64_t m : {1, 5, 40}) {
    std::vector<float> w(50 * 70), x(static_cast<size_t>(m) * 70), out(static_cast<size_t>(m) * 50);
    const Tensor weight = Tensor::contiguous(DType::f32, {50, 70}, w.data());
    const Tensor in = Tensor::contiguous(DType::f32, {m, 70}, x.data());
    const Tensor to = Tensor::contiguous(DType::f32, {m, 50}, out.data());
    test::fill(weight, Fill::small_integers, random);
    test::fill(in, Fill::small_integers, random);
    const PackedWeight packed = std::move(PackedWeight::pack(one_context(), ConstTensor(weight)).value());
    const std::vector<double> expected =
        reference::matmul(test::to_doubles(in), test::to_doubles(weight), {}, m, 50, 70);
    for (const TestContext& t : contexts_with_threads(2)) {
      ASSERT_TRUE(matmul(t.context, in, packed, to).ok());
      EXPECT_EQ(test::to_doubles(to), expected) << t.name << ", m " << m;
    }
  }
}

bool same_bits_or_nan(const std::vector<float>& a, const std::vector<float>& b, size_t begin_a, size_t begin_b,
                      size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float x = a[begin_a + i], y = b[begin_b + i];
    if (std::memcmp(&x, &y, 4) != 0 && !(std::isnan(x) && std::isnan(y))) return false;
  }
  return true;
}

// The bits of a row depend neither on how many rows there are, nor on its place among them, nor on the threads.
TEST(Matmul, RowsHaveTheSameBitsInAnyCompany) {
  Random random(test::seed());
  constexpr int64_t kN = 150, kK = 1024, kM = 210;
  std::vector<float> x(kM * kK), all(kM * kN), some(kM * kN);
  test::fill(Tensor::contiguous(DType::f32, {kM, kK}, x.data()), Fill::normal, random);
  for (QuantFormat format : kQuantFormats) {
    const Weight weight(format, kN, kK, random);
    for (size_t level = 0; level < contexts_with_threads(1).size(); ++level) {
      const auto run = [&](int threads, int64_t first, int64_t rows, std::vector<float>& out) {
        const TestContext& t = contexts_with_threads(threads)[level];
        SCOPED_TRACE(t.name);
        const Status status =
            matmul(t.context, Tensor::contiguous(DType::f32, {rows, kK}, x.data() + first * kK), weight.packed,
                   Tensor::contiguous(DType::f32, {rows, kN}, out.data()), {.batch_invariant = true});
        ASSERT_TRUE(status.ok()) << status.message();
      };
      run(1, 0, kM, all);
      for (int64_t rows : {1, 2, 3, 4, 5, 8, 9, 12, 13, 24, 31, 100, 210}) {
        const int64_t first = random.integer(0, kM - rows);
        const int threads = random.pick({1, 2, 3, 5});
        run(threads, first, rows, some);
        ASSERT_TRUE(same_bits_or_nan(all, some, static_cast<size_t>(first * kN), 0, static_cast<size_t>(rows * kN)))
            << contexts_with_threads(threads)[level].name << ", " << to_string(format) << ", rows " << rows << " from "
            << first;
      }
    }
  }
}

// Whatever the scales are (infinite, NaN, subnormal), the product equals the one with the dequantised f32 weight.
TEST(Matmul, MultipliesExactlyTheDequantisedWeights) {
  Random random(test::seed());
  constexpr int64_t kN = 37, kK = 512;
  for (QuantFormat format : kQuantFormats) {
    if (format == QuantFormat::f32) continue;
    for (int round = 0; round < 4; ++round) {
      std::vector<unsigned char> bytes = test::random_blocks(format, kN, kK, random);
      // Scales of any bits, in the last rounds; all subnormal before.
      test::edit_blocks(format, bytes, [&]<class Block>(Block& block) {
        if (round == 0) return;
        const auto bits = static_cast<uint16_t>(round == 1 ? random.integer(0, 0x3ff) : random.integer(0, 0xffff));
        if constexpr (kIsFloat<Block>) {
          std::memcpy(&block.x, &bits, sizeof(bits));
        } else {
          block.d.bits = bits;
        }
      });
      const Weight weight(format, kN, kK, bytes);
      std::vector<float> values(kN * kK), x(20 * kK), out(20 * kN), expected(20 * kN);
      ASSERT_TRUE(
          dequantize(one_context(), weight.matrix, Tensor::contiguous(DType::f32, {kN, kK}, values.data())).ok());
      const PackedWeight wide = std::move(
          PackedWeight::pack(one_context(), ConstTensor::contiguous(DType::f32, {kN, kK}, values.data())).value());
      test::fill(Tensor::contiguous(DType::f32, {20, kK}, x.data()), Fill::normal, random);
      for (const TestContext& t : contexts_with_threads(1)) {
        for (int64_t m : {1, 3, 20}) {
          const Tensor in = Tensor::contiguous(DType::f32, {m, kK}, x.data());
          ASSERT_TRUE(matmul(t.context, in, weight.packed, Tensor::contiguous(DType::f32, {m, kN}, out.data()),
                             {.batch_invariant = true})
                          .ok());
          ASSERT_TRUE(matmul(t.context, in, wide, Tensor::contiguous(DType::f32, {m, kN}, expected.data())).ok());
          ASSERT_TRUE(same_bits_or_nan(out, expected, 0, 0, static_cast<size_t>(m * kN)))
              << t.name << ", " << to_string(format) << ", round " << round << ", m " << m;
        }
      }
    }
  }
}

// Infinity minus infinity must not occur on the way to a value: d * (q - 8) is not d * q - 8 * d.
TEST(Matmul, InfiniteScalesGiveInfinity) {
  constexpr int64_t kN = 20, kK = 512;
  for (QuantFormat format : kQuantFormats) {
    if (block_values(format) == 1) continue;
    // All bits set: no value is zero, all have one sign.
    std::vector<unsigned char> bytes(static_cast<size_t>(kN * kK / block_values(format) * block_bytes(format)), 0xff);
    test::edit_blocks(format, bytes, [&]<class Block>(Block& block) {
      if constexpr (!kIsFloat<Block>) {
        block.d = to_f16(std::numeric_limits<double>::infinity());
        if constexpr (Block::kMinimum != Minimum::none) block.m = to_f16(1.0);
      }
    });
    const Weight weight(format, kN, kK, bytes);
    for (const TestContext& t : contexts_with_threads(1)) {
      for (int64_t m : {1, 12}) {
        std::vector<float> x(static_cast<size_t>(m * kK), 1.0f), out(static_cast<size_t>(m * kN));
        ASSERT_TRUE(matmul(t.context, Tensor::contiguous(DType::f32, {m, kK}, x.data()), weight.packed,
                           Tensor::contiguous(DType::f32, {m, kN}, out.data()))
                        .ok());
        for (float value : out) ASSERT_TRUE(std::isinf(value)) << t.name << ", " << to_string(format) << ": " << value;
      }
    }
  }
}

TEST(Matmul, NonFiniteRowsStayAlone) {
  Random random(test::seed());
  constexpr int64_t kN = 40, kK = 256;
  const float bad[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()};
  for (QuantFormat format : kQuantFormats) {
    const Weight weight(format, kN, kK, random);
    for (const TestContext& t : contexts_with_threads(2)) {
      for (int64_t m : {3, 30}) {
        std::vector<float> x(static_cast<size_t>(m * kK)), out(static_cast<size_t>(m * kN));
        test::fill(Tensor::contiguous(DType::f32, {m, kK}, x.data()), Fill::normal, random);
        x[kK + 5] = bad[0];
        x[2 * kK + 63] = bad[1];
        ASSERT_TRUE(matmul(t.context, Tensor::contiguous(DType::f32, {m, kK}, x.data()), weight.packed,
                           Tensor::contiguous(DType::f32, {m, kN}, out.data()))
                        .ok());
        for (size_t i = 0; i < out.size(); ++i) {
          const size_t row = i / kN;
          ASSERT_EQ(std::isfinite(out[i]), row != 1 && row != 2) << t.name << ", m " << m << ", element " << i;
        }
      }
    }
  }
}

TEST(PackedWeight, TakesAnyStridesAndFloatTypes) {
  Random random(test::seed());
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (bool transposed : {false, true}) {
      GuardedBuffer memory(21 * 35 * size_bytes(dtype));
      const Tensor weight =
          transposed ? memory.tensor(dtype, {35, 21}).transposed(0, 1) : memory.tensor(dtype, {21, 35});
      test::fill(weight, Fill::normal, random);
      for (const TestContext& t : contexts_with_threads(2)) {
        Result<PackedWeight> packed = PackedWeight::pack(t.context, ConstTensor(weight));
        ASSERT_TRUE(packed.ok()) << packed.status().message();
        EXPECT_EQ(packed.value().n(), 21);
        EXPECT_EQ(packed.value().k(), 35);
        EXPECT_EQ(packed.value().size_bytes(),
                  32 * (dtype == DType::f32 ? 4 * 35 : 2 * (dtype == DType::f16 ? 35 : 36)));
        std::vector<int64_t> rows(21);
        for (size_t i = 0; i < 21; ++i) rows[i] = static_cast<int64_t>(i);
        std::vector<float> out(21 * 35);
        const Tensor to = Tensor::contiguous(DType::f32, {21, 35}, out.data());
        ASSERT_TRUE(
            lookup_rows(t.context, packed.value(), ConstTensor::contiguous(DType::i64, {21}, rows.data()), to).ok());
        EXPECT_EQ(test::to_doubles(to), test::to_doubles(weight));
      }
    }
  }
}

TEST(PackedWeight, KeepsTheBytesOfQuantisedFormats) {
  Random random(test::seed());
  for (QuantFormat format : kQuantFormats) {
    const Weight weight(format, 48, 512, random);
    EXPECT_EQ(weight.packed.size_bytes(), weight.matrix.size_bytes) << to_string(format);
    EXPECT_EQ(weight.packed.format(), format);
  }
}

TEST(PackedWeight, StacksMatricesOfOneKind) {
  Random random(test::seed());
  for (QuantFormat format : kQuantFormats) {
    const int64_t k = inputs(format, 64);
    const Weight a(format, 32, k, random), b(format, 16, k, random), c(format, 21, k, random);
    const QuantMatrix parts[] = {a.matrix, b.matrix, c.matrix};
    const Result<PackedWeight> stacked = PackedWeight::pack(one_context(), parts);
    ASSERT_TRUE(stacked.ok()) << stacked.status().message();
    EXPECT_EQ(stacked.value().n(), 69);
    std::vector<int64_t> rows(69);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i);
    std::vector<float> out(static_cast<size_t>(69 * k));
    ASSERT_TRUE(lookup_rows(one_context(), stacked.value(), ConstTensor::contiguous(DType::i64, {69}, rows.data()),
                            Tensor::contiguous(DType::f32, {69, k}, out.data()))
                    .ok());
    std::vector<double> expected = a.values;
    expected.insert(expected.end(), b.values.begin(), b.values.end());
    expected.insert(expected.end(), c.values.begin(), c.values.end());
    EXPECT_EQ(std::vector<double>(out.begin(), out.end()), expected) << to_string(format);
  }
  const Weight a(QuantFormat::q4_1, 20, 64, random), b(QuantFormat::q4_1, 16, 96, random);
  const Weight c(QuantFormat::q8_0, 16, 64, random);
  const auto message = [](std::initializer_list<QuantMatrix> parts) {
    return PackedWeight::pack(one_context(), std::span(parts.begin(), parts.size())).status().message();
  };
  EXPECT_EQ(message({}), "PackedWeight::pack: no matrix is given");
  EXPECT_EQ(message({a.matrix, a.matrix}),
            "PackedWeight::pack: part 0 has 20 rows, not a multiple of 16, and another part below it");
  EXPECT_EQ(message({b.matrix, a.matrix}),
            "PackedWeight::pack: part 1 is q4_1 with 64 columns, but part 0 is q4_1 with 96");
  EXPECT_EQ(message({c.matrix, a.matrix}),
            "PackedWeight::pack: part 1 is q4_1 with 64 columns, but part 0 is q8_0 with 64");
}

TEST(LookupRows, EqualsDequantiseRows) {
  Random random(test::seed());
  for (QuantFormat format : kQuantFormats) {
    const int64_t k = inputs(format, 96);
    const Weight weight(format, 53, k, random);
    const int64_t indices[8] = {0, 52, 16, 15, 52, 31, 32, 47};
    const ConstTensor rows = ConstTensor::contiguous(DType::i64, {4, 2}, indices).selected(1, 1);
    for (const TestContext& t : contexts_with_threads(2)) {
      GuardedBuffer a(4 * k * 4), b(4 * k * 4);
      const Tensor out = a.tensor(DType::f32, {k, 4}).transposed(0, 1);
      const Tensor expected = b.tensor(DType::f32, {4, k});
      ASSERT_TRUE(lookup_rows(t.context, weight.packed, rows, out).ok());
      ASSERT_TRUE(dequantize_rows(t.context, weight.matrix, rows, expected).ok());
      const test::Comparison c = test::compare_bits(out, expected);
      EXPECT_TRUE(c.ok) << c.message;
    }
    std::vector<float> out(static_cast<size_t>(k));
    const int64_t outside[1] = {53};
    EXPECT_EQ(lookup_rows(one_context(), weight.packed, ConstTensor::contiguous(DType::i64, {1}, outside),
                          Tensor::contiguous(DType::f32, {1, k}, out.data()))
                  .message(),
              "lookup_rows: rows[0] is 53, but the matrix has 53 rows");
  }
}

// Rows 1.1e9 elements apart, in x and in out.
TEST(Matmul, ReachesRowsBeyond32BitOffsets) {
  Random random(test::seed());
  const int64_t stride = 1'100'000'000;
  test::LazyMapping x_memory((8 * stride + 64) * 4), out_memory((8 * stride + 64) * 4);
  if (x_memory.data() == nullptr || out_memory.data() == nullptr) {
    GTEST_SKIP() << "no address space for 2 x " << x_memory.size_bytes() << " bytes";
  }
  const Weight weight(QuantFormat::q4_1, 40, 64, random);
  for (int64_t m : {3, 9}) {
    std::vector<float> x(static_cast<size_t>(m * 64)), out(static_cast<size_t>(m * 40));
    const Tensor near = Tensor::contiguous(DType::f32, {m, 64}, x.data());
    test::fill(near, Fill::normal, random);
    Tensor far = near, far_out = Tensor::contiguous(DType::f32, {m, 40}, out_memory.data());
    far.data = x_memory.data();
    far.strides[0] = far_out.strides[0] = stride;
    test::copy(near, far);
    const Tensor near_out = Tensor::contiguous(DType::f32, {m, 40}, out.data());
    ASSERT_TRUE(matmul(one_context(), far, weight.packed, far_out).ok());
    ASSERT_TRUE(matmul(one_context(), near, weight.packed, near_out).ok());
    EXPECT_TRUE(test::compare_bits(far_out, near_out).ok);
  }
}

TEST(Matmul, ZeroSizesAreLegal) {
  Random random(test::seed());
  const auto empty = [](std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(DType::f32, shape, nullptr);
  };
  const Weight weight(QuantFormat::q8_0, 5, 32, random);
  EXPECT_TRUE(matmul(one_context(), empty({0, 32}), weight.packed, empty({0, 5})).ok());
  const Weight no_outputs(QuantFormat::q4_1, 0, 32, random);
  std::vector<float> x(32), out(20, 9.0f), bias{1, 2, 3, 4, 5};
  EXPECT_TRUE(
      matmul(one_context(), Tensor::contiguous(DType::f32, {1, 32}, x.data()), no_outputs.packed, empty({1, 0})).ok());
  // No inputs: nothing but the bias.
  const Weight no_inputs(QuantFormat::q4_1, 5, 0, random);
  for (const TestContext& t : contexts_with_threads(1)) {
    for (int64_t m : {2, 12}) {
      out.assign(60, 9.0f);
      ASSERT_TRUE(
          matmul(t.context, empty({m, 0}), no_inputs.packed, Tensor::contiguous(DType::f32, {m, 5}, out.data())).ok());
      for (int64_t i = 0; i < m * 5; ++i) EXPECT_EQ(out[static_cast<size_t>(i)], 0.0f);
      ASSERT_TRUE(matmul(t.context, empty({m, 0}), no_inputs.packed, Tensor::contiguous(DType::f32, {m, 5}, out.data()),
                         {.bias = ConstTensor::contiguous(DType::f32, {5}, bias.data())})
                      .ok());
      for (int64_t i = 0; i < m * 5; ++i) EXPECT_EQ(out[static_cast<size_t>(i)], bias[static_cast<size_t>(i % 5)]);
    }
  }
  PackedWeight nothing;
  EXPECT_TRUE(matmul(one_context(), empty({3, 0}), nothing, empty({3, 0})).ok());
}

TEST(Matmul, NamesWhatIsWrong) {
  Random random(test::seed());
  const Weight weight(QuantFormat::q8_0, 5, 32, random);
  std::vector<float> x(64), out(64, 3.0f), bias(8);
  const auto view = [](std::vector<float>& v, int64_t rows, int64_t cols) {
    return Tensor::contiguous(DType::f32, {rows, cols}, v.data());
  };
  const auto message = [&](const ConstTensor& a, const Tensor& b, const MatmulOptions& options = {}) {
    return matmul(one_context(), a, weight.packed, b, options).message();
  };
  EXPECT_EQ(message(view(x, 2, 31), view(out, 2, 5)), "matmul: x dim 1 (k) is 31, but the weight has k = 32");
  EXPECT_EQ(message(view(x, 2, 32), view(out, 2, 4)), "matmul: out dim 1 (n) is 4, but the weight has n = 5");
  EXPECT_EQ(message(view(x, 2, 32), view(out, 1, 5)), "matmul: out dim 0 (m) is 1, but x set m = 2");
  EXPECT_EQ(message(ConstTensor::contiguous(DType::f64, {2, 16}, x.data()), view(out, 2, 5)),
            "matmul: x is f64, but must be f32, bf16 or f16");
  EXPECT_EQ(message(view(x, 2, 32), view(out, 2, 5), {.bias = ConstTensor::contiguous(DType::f32, {4}, bias.data())}),
            "matmul: out dim 1 (n) is 5, but bias set n = 4");
  EXPECT_NE(message(view(x, 2, 32), view(x, 2, 5)).find("out f32 [2, 5] overlaps x"), std::string::npos);
  EXPECT_EQ(message(Tensor::contiguous(DType::f32, {32}, x.data()), view(out, 2, 5)),
            "matmul: x has rank 1, but [m, k] has rank 2");
  for (float v : out) EXPECT_EQ(v, 3.0f);

  QuantMatrix matrix = weight.matrix;
  matrix.cols = 33;
  EXPECT_EQ(PackedWeight::pack(one_context(), matrix).status().message(),
            "PackedWeight::pack: weight cols is 33, but q8_0 has blocks of 32 values");
  matrix = weight.matrix;
  matrix.rows = 6;
  EXPECT_EQ(PackedWeight::pack(one_context(), matrix).status().message(),
            "PackedWeight::pack: weight has 170 bytes, but q8_0 [6, 32] needs 204");
  EXPECT_EQ(PackedWeight::pack(one_context(), ConstTensor::contiguous(DType::f64, {2, 2}, x.data())).status().message(),
            "PackedWeight::pack: weight is f64, but must be f32, bf16 or f16");
}

TEST(Matmul, AllocatesNothingOnceWarm) {
  Random random(test::seed());
  Context context = std::move(Context::create({.num_threads = 3}).value());
  const Weight weight(QuantFormat::q4_1, 300, 512, random);
  std::vector<float> x(100 * 512), out(100 * 300);
  for (int64_t round = 0; round < 4; ++round) {
    const int64_t before = context.workspace_allocations();
    for (int64_t m : {100, 1, 7, 50}) {
      ASSERT_TRUE(matmul(context, Tensor::contiguous(DType::f32, {m, 512}, x.data()), weight.packed,
                         Tensor::contiguous(DType::f32, {m, 300}, out.data()))
                      .ok());
    }
    if (round > 0) {
      EXPECT_EQ(context.workspace_allocations(), before);
    }
  }
}

}  // namespace
}  // namespace opst

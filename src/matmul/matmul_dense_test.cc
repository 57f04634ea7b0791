// Weights of floating point types, packed and as they are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/convert.h"
#include "matmul/test_calls.h"
#include "opst/rowwise.h"
#include "quant/random_blocks.h"
#include "testing/compare.h"
#include "testing/contexts.h"

namespace opst {
namespace {

using test::contexts;
using test::contexts_with_threads;
using test::Fill;
using test::Form;
using test::Guard;
using test::GuardedBuffer;
using test::kFloats;
using test::Matrix;
using test::packed;
using test::Random;
using test::same_bits_or_nan;
using test::Shape;
using test::TestContext;

// A view with every second row and column of a larger matrix.
struct Sparse {
  Matrix memory;
  Tensor tensor;
  Sparse(DType dtype, int64_t rows, int64_t cols)
      : memory(dtype, std::max<int64_t>(1, 2 * rows), std::max<int64_t>(1, 2 * cols), false, Guard::after) {
    tensor = memory.tensor;
    tensor.shape[0] = rows, tensor.shape[1] = cols;
    tensor.strides[0] *= 2, tensor.strides[1] *= 2;
  }
};

// Both forms of the call with a random weight of any strides.
void check_dense(const TestContext& t, DType dtype, const Shape& s, const Form& form, Random& random) {
  Matrix rows(dtype, s.n, s.k, false, form.guard), columns(dtype, s.n, s.k, true, form.guard);
  Sparse sparse(dtype, s.n, s.k);
  const Tensor& weight = random.pick({&rows.tensor, &columns.tensor, &sparse.tensor})[0];
  test::fill(weight, Fill::normal, random);
  const std::vector<double> values = test::to_doubles(weight);
  const std::string about = t.name + ", weight " + to_string(dtype) +
                            (&weight == &rows.tensor      ? " by rows"
                             : &weight == &columns.tensor ? " by columns"
                                                          : " with gaps");
  test::check_call(about + ", unpacked", values, s, form, random,
                   [&](const ConstTensor& x, const Tensor& out, const MatmulOptions& options) {
                     return matmul(t.context, x, weight, out, options);
                   });
  if (dtype == DType::f64 || ::testing::Test::HasFatalFailure()) return;
  const PackedWeight kept = packed(t.context, weight);
  test::check_call(about, values, s, form, random,
                   [&](const ConstTensor& x, const Tensor& out, const MatmulOptions& options) {
                     return matmul(t.context, x, kept, out, options);
                   });
}

Form form_for(const Shape& s, Random& random) {
  Form form = test::random_form(random);
  if (s.n % 2 != 0 && test::halves(form.activation)) form.activation = Activation::gelu_erf;
  return form;
}

TEST(MatmulDense, EqualsTheReferenceInEveryContext) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (DType dtype : kFloats) {
      for (int i = 0; i < 6; ++i) {
        const Shape s{i < 3 ? random.integer(1, 9) : random.integer(10, 60), random.integer(1, 150),
                      random.integer(1, 400)};
        check_dense(t, dtype, s, form_for(s, random), random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Each dimension through the ends of every tile, pair, block and panel, and halves that begin anywhere in a panel.
TEST(MatmulDense, HoldsAtTheEdgesOfEveryDimension) {
  Random random(test::seed());
  std::vector<Shape> shapes;
  for (int64_t m : {1, 2, 3, 4, 5, 8, 9, 12, 13, 25, 255, 256, 257, 513}) shapes.push_back({m, 34, 33});
  for (int64_t n : {1, 2, 4, 6, 8, 15, 16, 17, 30, 31, 32, 33, 34, 62, 63, 64, 66, 126, 127, 128, 130, 254, 258}) {
    shapes.push_back({2, n, 31}), shapes.push_back({14, n, 31});
  }
  for (int64_t k : {0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 1027, 2049}) {
    shapes.push_back({3, 18, k}), shapes.push_back({13, 18, k});
  }
  for (const Shape& s : shapes) {
    for (DType dtype : kFloats) {
      for (const TestContext& t : contexts_with_threads(s.m > 100 ? 2 : 1)) {
        Form form = form_for(s, random);
        check_dense(t, dtype, s, form, random);
        if (HasFatalFailure()) return;
        if (dtype != DType::bf16) continue;
        form.x = DType::bf16;  // pairs
        check_dense(t, dtype, s, form, random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(MatmulDense, F64) {
  Random random(test::seed());
  for (const TestContext& t : contexts_with_threads(2)) {
    for (int i = 0; i < 12; ++i) {
      const Shape s{random.integer(1, 20), 2 * random.integer(1, 20), random.integer(0, 40)};
      Form form = test::random_form(random);
      form.x = form.out = form.bias = form.residual = DType::f64;
      check_dense(t, DType::f64, s, form, random);
      if (HasFatalFailure()) return;
    }
  }
}

// Packed or not, in any company, with any threads: a row of any type of x and weight has the same bits.
TEST(MatmulDense, RowsHaveTheSameBitsInAnyCompany) {
  Random random(test::seed());
  constexpr int64_t kN = 150, kK = 1301, kM = 300;
  for (DType weight_type : kFloats) {
    for (DType x_type : kFloats) {
      Matrix weight(weight_type, kN, kK, false, Guard::after), x(x_type, kM, kK, false, Guard::after);
      test::fill(weight.tensor, Fill::normal, random);
      test::fill(x.tensor, Fill::normal, random);
      const PackedWeight kept = packed(contexts_with_threads(1)[0].context, weight.tensor);
      for (size_t level = 0; level < contexts_with_threads(1).size(); ++level) {
        Matrix all(DType::f32, kM, kN / 2, false, Guard::after), some(DType::f32, kM, kN / 2, false, Guard::after);
        const MatmulOptions options{.activation = Activation::swiglu};
        ASSERT_TRUE(matmul(contexts_with_threads(1)[level].context, x.tensor, kept, all.tensor, options).ok());
        for (int64_t rows : {1, 2, 4, 5, 8, 9, 24, 31, 257, 300}) {
          const int64_t first = random.integer(0, kM - rows);
          const TestContext& t = contexts_with_threads(random.pick({1, 2, 3, 5}))[level];
          const ConstTensor part = x.tensor.narrowed(0, first, rows);
          const Tensor out = some.tensor.narrowed(0, 0, rows);
          const Status status = random.chance(0.5) ? matmul(t.context, part, kept, out, options)
                                                   : matmul(t.context, part, weight.tensor, out, options);
          ASSERT_TRUE(status.ok()) << status.message();
          ASSERT_TRUE(same_bits_or_nan(out, all.tensor.narrowed(0, first, rows)))
              << t.name << ", weight " << to_string(weight_type) << ", x " << to_string(x_type) << ", rows " << rows;
        }
      }
    }
  }
}

// x in f32 meets a bf16 or f16 weight exactly: the bits of the widened weight's product.
TEST(MatmulDense, WideXSeesExactWeights) {
  Random random(test::seed());
  for (DType dtype : {DType::bf16, DType::f16}) {
    Matrix weight(dtype, 37, 301, false, Guard::after), wide(DType::f32, 37, 301, false, Guard::after);
    test::fill(weight.tensor, Fill::large_normal, random);
    test::copy(weight.tensor, wide.tensor);
    Matrix x(DType::f32, 20, 301, false, Guard::after), a(DType::f32, 20, 37, false, Guard::after),
        b(DType::f32, 20, 37, false, Guard::after);
    test::fill(x.tensor, Fill::normal, random);
    for (const TestContext& t : contexts_with_threads(1)) {
      for (int64_t m : {1, 7, 20}) {
        const ConstTensor rows = x.tensor.narrowed(0, 0, m);
        ASSERT_TRUE(matmul(t.context, rows, weight.tensor, a.tensor.narrowed(0, 0, m)).ok());
        ASSERT_TRUE(matmul(t.context, rows, wide.tensor, b.tensor.narrowed(0, 0, m)).ok());
        EXPECT_TRUE(same_bits_or_nan(a.tensor.narrowed(0, 0, m), b.tensor.narrowed(0, 0, m))) << t.name;
      }
    }
  }
}

// Sums of small integers are exact in any order, pairwise dot products included.
TEST(MatmulDense, Bf16IsExactOnSmallIntegers) {
  Random random(test::seed());
  for (int64_t k : {1, 2, 7, 64, 515}) {
    for (int64_t m : {1, 3, 40}) {
      Matrix weight(DType::bf16, 50, k, false, Guard::after), x(DType::bf16, m, k, false, Guard::after);
      Matrix out(DType::f32, m, 50, false, Guard::after);
      test::fill(weight.tensor, Fill::small_integers, random);
      test::fill(x.tensor, Fill::small_integers, random);
      const std::vector<double> expected =
          reference::matmul(test::to_doubles(x.tensor), test::to_doubles(weight.tensor), {}, m, 50, k);
      for (const TestContext& t : contexts_with_threads(2)) {
        ASSERT_TRUE(matmul(t.context, x.tensor, weight.tensor, out.tensor).ok());
        EXPECT_EQ(test::to_doubles(out.tensor), expected) << t.name << ", m " << m << ", k " << k;
      }
    }
  }
}

// Subnormal operands: exact where they are widened, 0 at most where they meet the dot instruction.
TEST(MatmulDense, SubnormalsCountOrCountAsZero) {
  Random random(test::seed());
  Matrix weight(DType::bf16, 20, 64, false, Guard::after), x(DType::bf16, 12, 64, false, Guard::after);
  test::fill(weight.tensor, Fill::denormals, random);
  test::fill(x.tensor, Fill::powers_of_two, random);
  const std::vector<double> expected =
      reference::matmul(test::to_doubles(x.tensor), test::to_doubles(weight.tensor), {}, 12, 20, 64);
  for (const TestContext& t : contexts_with_threads(1)) {
    const bool dot = t.context.machine().bf16_product == Bf16Product::dot;
    for (int64_t m : {2, 12}) {
      Matrix out(DType::f32, m, 20, false, Guard::after);
      ASSERT_TRUE(matmul(t.context, x.tensor.narrowed(0, 0, m), weight.tensor, out.tensor).ok());
      const std::vector<double> got = test::to_doubles(out.tensor);
      // Powers of two up to 8 times multiples of 2^-133: exact in f32, subnormals or not.
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(got[i] == expected[i] || (dot && got[i] == 0)) << t.name << ": " << got[i] << ", " << expected[i];
      }
    }
  }
}

double cosine(const std::vector<double>& a, const std::vector<double>& b) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) ab += a[i] * b[i], aa += a[i] * a[i], bb += b[i] * b[i];
  return ab / std::sqrt(aa * bb);
}

TEST(MatmulCases, B38_Bf16OnEveryLevel) {
  Random random(test::seed());
  Matrix x(DType::bf16, 64, 256, false, Guard::after), weight(DType::bf16, 256, 64, false, Guard::after);
  test::fill(x.tensor, Fill::normal, random);
  test::fill(weight.tensor, Fill::normal, random);
  const Tensor by_columns = weight.tensor.transposed(0, 1);  // [64, 256]
  const std::vector<double> expected =
      reference::matmul(test::to_doubles(x.tensor), test::to_doubles(by_columns), {}, 64, 64, 256);
  for (const TestContext& t : contexts_with_threads(2)) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      Matrix out(dtype, 64, 64, false, Guard::after);
      ASSERT_TRUE(matmul(t.context, x.tensor, packed(t.context, by_columns), out.tensor).ok());
      EXPECT_GE(cosine(test::to_doubles(out.tensor), expected), 0.9999) << t.name;
    }
  }
}

TEST(MatmulCases, B37_CallersFloatMode) {
  Random random(test::seed());
  constexpr int64_t kN = 40, kK = 64;
  const unsigned plain = __builtin_ia32_stmxcsr(), flushing = plain | 0x8040;
  const std::vector<unsigned char> blocks = test::random_blocks(QuantFormat::q4_1, kN, kK, random);
  const QuantMatrix matrix{QuantFormat::q4_1, kN, kK, blocks.data(), static_cast<int64_t>(blocks.size())};
  Matrix x(DType::f32, 20, kK, false, Guard::after), weight(DType::f32, kN, kK, false, Guard::after);
  Matrix bias(DType::bf16, 1, kN, false, Guard::after);
  for (const Tensor& tensor : {x.tensor, bias.tensor}) {
    for (int64_t i = 0; i < tensor.num_elements(); ++i) test::set(tensor, i, random.normal() * 1e-39);
  }
  test::fill(weight.tensor, Fill::normal, random);
  for (size_t level = 0; level < contexts_with_threads(1).size(); ++level) {
    const PackedWeight quantised =
        std::move(PackedWeight::pack(contexts_with_threads(1)[level].context, matrix).value());
    for (bool use_quantised : {false, true}) {
      for (int64_t m : {1, 20}) {
        std::vector<double> first;
        for (int threads : {1, 5}) {
          const TestContext& t = contexts_with_threads(threads)[level];
          for (const unsigned mode : {plain, flushing}) {
            Matrix out(DType::f32, m, kN, false, Guard::after);
            const ConstTensor rows = x.tensor.narrowed(0, 0, m);
            const MatmulOptions options{.bias = bias.tensor.selected(0, 0)};
            __builtin_ia32_ldmxcsr(mode);
            const Status status = use_quantised ? matmul(t.context, rows, quantised, out.tensor, options)
                                                : matmul(t.context, rows, weight.tensor, out.tensor, options);
            const unsigned after = __builtin_ia32_stmxcsr();
            __builtin_ia32_ldmxcsr(plain);
            EXPECT_EQ(after & ~0x3fu, mode & ~0x3fu) << "the caller's mode has changed";
            ASSERT_TRUE(status.ok());
            const std::vector<double> got = test::to_doubles(out.tensor);
            if (first.empty()) first = got;
            EXPECT_EQ(got, first) << t.name << (use_quantised ? ", q4_1" : ", f32") << ", m " << m << ", mode " << mode;
            EXPECT_TRUE(std::any_of(got.begin(), got.end(), [](double v) { return v != 0; })) << t.name;
          }
        }
      }
    }
  }
}

TEST(MatmulCases, B77_SwigluOperandOrder) {
  const float x = 1, weight[2] = {1, 2};
  for (const TestContext& t : contexts_with_threads(1)) {
    for (const Activation activation : {Activation::swiglu, Activation::swiglu_swapped}) {
      float out = 0;
      ASSERT_TRUE(matmul(t.context, ConstTensor::contiguous(DType::f32, {1, 1}, &x),
                         ConstTensor::contiguous(DType::f32, {2, 1}, weight),
                         Tensor::contiguous(DType::f32, {1, 1}, &out), {.activation = activation})
                      .ok());
      EXPECT_NEAR(static_cast<double>(out), activation == Activation::swiglu ? 1.4621172 : 1.7615942, 1e-6);
    }
  }
}

}  // namespace
}  // namespace opst

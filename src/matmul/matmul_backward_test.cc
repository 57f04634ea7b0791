#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "matmul/reference.h"
#include "matmul/test_calls.h"
#include "opst/matmul.h"
#include "testing/compare.h"
#include "testing/contexts.h"

namespace opst {
namespace {

using test::contexts;
using test::contexts_with_threads;
using test::Fill;
using test::Guard;
using test::Matrix;
using test::Random;
using test::Shape;
using test::TestContext;

// a^T of row-major [rows, cols].
std::vector<double> transposed(const std::vector<double>& a, int64_t rows, int64_t cols) {
  std::vector<double> out(a.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) out[static_cast<size_t>(j * rows + i)] = a[static_cast<size_t>(i * cols + j)];
  }
  return out;
}

// got[i, j] against sum_t a[i, t] b[j, t].
void expect_product(const char* name, const Tensor& got, const std::vector<double>& a, const std::vector<double>& b,
                    int64_t rows, int64_t columns, int64_t depth) {
  const std::vector<double> expected = reference::matmul(a, b, {}, rows, columns, depth);
  const std::vector<double> scale =
      reference::matmul(test::magnitudes(a), test::magnitudes(b), {}, rows, columns, depth);
  const std::vector<double> values = test::to_doubles(got);
  const double eps = got.dtype == DType::f64 ? 0x1p-52 : 0x1p-24;
  const double units = 4 + 2 * std::sqrt(static_cast<double>(depth));
  for (size_t i = 0; i < values.size(); ++i) {
    // Half a unit of the type's rounding, down to the smallest of f16.
    const double bound = units * eps * scale[i] * 1.01 + test::epsilon(got.dtype) / 2 * std::abs(expected[i]) +
                         (got.dtype == DType::f16 ? 0x1p-25 : 0);
    ASSERT_LE(std::abs(values[i] - expected[i]), bound)
        << name << test::index_text(got, static_cast<int64_t>(i)) << " is " << values[i] << ", not " << expected[i];
  }
}

struct Types {
  DType grad_out, x, weight, gradient;
};

void check(const TestContext& t, const Shape& s, const Types& types, Random& random) {
  SCOPED_TRACE(t.name + ", " + s.text() + ", grad_out " + to_string(types.grad_out) + ", x " + to_string(types.x) +
               ", weight " + to_string(types.weight) + ", gradients " + to_string(types.gradient));
  const auto any = [&] { return random.chance(0.4); };
  Matrix grad_out(types.grad_out, s.m, s.n, any(), Guard::after), x(types.x, s.m, s.k, any(), Guard::after);
  Matrix weight(types.weight, s.n, s.k, any(), Guard::after);
  Matrix grad_x(types.gradient, s.m, s.k, any(), Guard::after),
      grad_weight(types.gradient, s.n, s.k, any(), Guard::after);
  Matrix grad_bias(types.gradient, s.n, 2, false, Guard::after);
  for (Matrix* m : {&grad_out, &x, &weight}) {
    test::fill(m->tensor, Fill::normal, random);
    m->memory.make_read_only();
  }
  const Tensor bias = grad_bias.tensor.selected(1, 1);
  const Status status = matmul_backward(t.context, grad_out.tensor, x.tensor, weight.tensor,
                                        {.x = grad_x.tensor, .weight = grad_weight.tensor, .bias = bias});
  ASSERT_TRUE(status.ok()) << status.message();
  const std::vector<double> g = test::to_doubles(grad_out.tensor), xs = test::to_doubles(x.tensor),
                            w = test::to_doubles(weight.tensor), ones(static_cast<size_t>(s.m), 1.0);
  expect_product("gradients.x", grad_x.tensor, g, transposed(w, s.n, s.k), s.m, s.k, s.n);
  if (::testing::Test::HasFatalFailure()) return;
  expect_product("gradients.weight", grad_weight.tensor, transposed(g, s.m, s.n), transposed(xs, s.m, s.k), s.n, s.k,
                 s.m);
  if (::testing::Test::HasFatalFailure()) return;
  expect_product("gradients.bias", bias, transposed(g, s.m, s.n), ones, s.n, 1, s.m);
  for (Matrix* m : {&grad_x, &grad_weight, &grad_bias}) EXPECT_TRUE(m->memory.slack_intact());
}

TEST(MatmulBackward, EqualsTheReferenceInEveryContext) {
  Random random(test::seed());
  const auto dtype = [&] { return random.pick({DType::f32, DType::bf16, DType::f16}); };
  for (const TestContext& t : contexts()) {
    for (int i = 0; i < 10; ++i) {
      const auto size = [&] { return random.chance(0.3) ? random.integer(1, 9) : random.integer(10, 70); };
      Types types{dtype(), dtype(), dtype(), dtype()};
      if (i == 0) types = {DType::bf16, DType::bf16, DType::bf16, DType::f32};
      check(t, {size(), size(), size()}, types, random);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(MatmulBackward, HoldsAtTheEdgesOfEveryDimension) {
  Random random(test::seed());
  for (int64_t size : {0, 1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 63, 65, 129, 513}) {
    for (const Shape& s : {Shape{size, 19, 21}, Shape{19, size, 21}, Shape{19, 21, size}}) {
      for (const TestContext& t : contexts_with_threads(2)) {
        const DType dtype = random.pick({DType::f32, DType::bf16});
        check(t, s, {dtype, dtype, dtype, DType::f32}, random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Central differences of sum(grad_out * matmul(x, weight, bias)) in double.
// No rows, as in an empty group: the gradient of the weight is 0, whole tiles of it too.
TEST(MatmulBackward, OfNoRowsIsZero) {
  Random random(test::seed());
  for (const TestContext& t : contexts_with_threads(2)) {
    for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (int64_t k : {1, 32, 128, 130}) {
        const Matrix grad_out(dtype, 0, 64, false, Guard::after), x(dtype, 0, k, false, Guard::after);
        Matrix weight(dtype, 64, k, false, Guard::after), gradient(dtype, 64, k, false, Guard::after);
        test::fill(weight.tensor, Fill::normal, random);
        test::fill(gradient.tensor, Fill::normal, random);
        const Status status =
            matmul_backward(t.context, grad_out.tensor, x.tensor, weight.tensor, {.weight = gradient.tensor});
        ASSERT_TRUE(status.ok()) << status.message();
        for (const double value : test::to_doubles(gradient.tensor)) ASSERT_EQ(value, 0) << t.name << ", k " << k;
      }
    }
  }
}

TEST(MatmulBackward, IsTheDerivative) {
  Random random(test::seed());
  const Shape s{3, 4, 5};
  Context& context = contexts_with_threads(2)[0].context;
  Matrix grad_out(DType::f64, s.m, s.n, false, Guard::after), x(DType::f64, s.m, s.k, true, Guard::after);
  Matrix weight(DType::f64, s.n, s.k, false, Guard::after), bias(DType::f64, 1, s.n, false, Guard::after);
  Matrix out(DType::f64, s.m, s.n, false, Guard::after);
  Matrix grad_x(DType::f64, s.m, s.k, false, Guard::after), grad_weight(DType::f64, s.n, s.k, true, Guard::after);
  Matrix grad_bias(DType::f64, 1, s.n, false, Guard::after);
  for (Matrix* m : {&grad_out, &x, &weight, &bias}) test::fill(m->tensor, Fill::normal, random);
  ASSERT_TRUE(
      matmul_backward(context, grad_out.tensor, x.tensor, weight.tensor,
                      {.x = grad_x.tensor, .weight = grad_weight.tensor, .bias = grad_bias.tensor.selected(0, 0)})
          .ok());
  const auto loss = [&] {
    EXPECT_TRUE(matmul(context, x.tensor, weight.tensor, out.tensor, {.bias = bias.tensor.selected(0, 0)}).ok());
    const std::vector<double> g = test::to_doubles(grad_out.tensor), y = test::to_doubles(out.tensor);
    double sum = 0;
    for (size_t i = 0; i < g.size(); ++i) sum += g[i] * y[i];
    return sum;
  };
  const std::pair<Matrix*, Matrix*> pairs[] = {{&x, &grad_x}, {&weight, &grad_weight}, {&bias, &grad_bias}};
  for (const auto& [input, gradient] : pairs) {
    for (int64_t i = 0; i < input->tensor.num_elements(); ++i) {
      const double value = test::get(input->tensor, i), step = 1e-4;
      test::set(input->tensor, i, value + step);
      const double above = loss();
      test::set(input->tensor, i, value - step);
      const double below = loss();
      test::set(input->tensor, i, value);
      EXPECT_NEAR(test::get(gradient->tensor, i), (above - below) / (2 * step), 1e-8);
    }
  }
}

// sum(grad_out * (x w^T)) = sum(grad_x * x) = sum(grad_w * w), exactly on small integers.
TEST(MatmulBackward, ThreeSumsAreOne) {
  Random random(test::seed());
  const Shape s{40, 23, 37};
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (const TestContext& t : contexts_with_threads(3)) {
      Matrix grad_out(dtype, s.m, s.n, false, Guard::after), x(dtype, s.m, s.k, false, Guard::after),
          weight(dtype, s.n, s.k, false, Guard::after), y(DType::f32, s.m, s.n, false, Guard::after),
          grad_x(DType::f32, s.m, s.k, false, Guard::after), grad_weight(DType::f32, s.n, s.k, false, Guard::after);
      for (Matrix* m : {&grad_out, &x, &weight}) test::fill(m->tensor, Fill::small_integers, random);
      ASSERT_TRUE(matmul(t.context, x.tensor, weight.tensor, y.tensor).ok());
      ASSERT_TRUE(matmul_backward(t.context, grad_out.tensor, x.tensor, weight.tensor,
                                  {.x = grad_x.tensor, .weight = grad_weight.tensor})
                      .ok());
      const auto dot = [](const Tensor& a, const Tensor& b) {
        double sum = 0;
        for (int64_t i = 0; i < a.num_elements(); ++i) sum += test::get(a, i) * test::get(b, i);
        return sum;
      };
      const double loss = dot(grad_out.tensor, y.tensor);
      EXPECT_EQ(dot(grad_x.tensor, x.tensor), loss) << t.name;
      EXPECT_EQ(dot(grad_weight.tensor, weight.tensor), loss) << t.name;
    }
  }
}

TEST(MatmulBackward, HasTheSameBitsWithAnyThreads) {
  Random random(test::seed());
  const Shape s{300, 130, 200};
  for (DType dtype : {DType::f32, DType::bf16}) {
    Matrix grad_out(dtype, s.m, s.n, false, Guard::after), x(dtype, s.m, s.k, false, Guard::after),
        weight(dtype, s.n, s.k, false, Guard::after);
    for (Matrix* m : {&grad_out, &x, &weight}) test::fill(m->tensor, Fill::normal, random);
    for (size_t level = 0; level < contexts_with_threads(1).size(); ++level) {
      std::vector<std::vector<double>> first;
      for (int threads : {1, 2, 3, 5}) {
        const TestContext& t = contexts_with_threads(threads)[level];
        Matrix grad_x(DType::f32, s.m, s.k, false, Guard::after),
            grad_weight(DType::f32, s.n, s.k, false, Guard::after), grad_bias(DType::f32, 1, s.n, false, Guard::after);
        ASSERT_TRUE(
            matmul_backward(t.context, grad_out.tensor, x.tensor, weight.tensor,
                            {.x = grad_x.tensor, .weight = grad_weight.tensor, .bias = grad_bias.tensor.selected(0, 0)})
                .ok());
        const std::vector<std::vector<double>> all = {
            test::to_doubles(grad_x.tensor), test::to_doubles(grad_weight.tensor), test::to_doubles(grad_bias.tensor)};
        if (first.empty()) first = all;
        EXPECT_EQ(all, first) << t.name;
      }
    }
  }
}

TEST(MatmulBackward, NeedsOnlyWhatItUses) {
  Random random(test::seed());
  Context& context = contexts_with_threads(1).back().context;
  std::vector<float> grad_out(6, 1.0f), x{1, 2, 3, 4}, weight{1, 2, 3, 4, 5, 6}, out(6, 9.0f);
  const Tensor g = Tensor::contiguous(DType::f32, {2, 3}, grad_out.data());
  ASSERT_TRUE(matmul_backward(context, g, {}, Tensor::contiguous(DType::f32, {3, 2}, weight.data()),
                              {.x = Tensor::contiguous(DType::f32, {2, 2}, out.data())})
                  .ok());
  EXPECT_EQ(out, (std::vector<float>{9, 12, 9, 12, 9, 9}));
  ASSERT_TRUE(matmul_backward(context, g, Tensor::contiguous(DType::f32, {2, 2}, x.data()), {},
                              {.weight = Tensor::contiguous(DType::f32, {3, 2}, out.data())})
                  .ok());
  EXPECT_EQ(out, (std::vector<float>{4, 6, 4, 6, 4, 6}));
  ASSERT_TRUE(matmul_backward(context, g, {}, {}, {.bias = Tensor::contiguous(DType::f32, {3}, out.data())}).ok());
  EXPECT_EQ(out, (std::vector<float>{2, 2, 2, 6, 4, 6}));
  EXPECT_TRUE(matmul_backward(context, g, {}, {}, {}).ok());
}

TEST(MatmulBackward, NamesWhatIsWrong) {
  Context& context = contexts_with_threads(1).back().context;
  std::vector<float> memory(1024);
  int64_t used = 0;
  const auto make = [&](DType dtype, std::initializer_list<int64_t> shape) {
    const Tensor view = Tensor::contiguous(dtype, shape, memory.data() + used);
    used += 64;
    return view;
  };
  const Tensor g = make(DType::f32, {2, 3}), x = make(DType::f32, {2, 4}), w = make(DType::f32, {3, 4});
  const auto message = [&](const ConstTensor& a, const ConstTensor& b, const ConstTensor& c,
                           const MatmulGradients& gradients) {
    return matmul_backward(context, a, b, c, gradients).message();
  };
  EXPECT_EQ(message(make(DType::i32, {2, 3}), x, w, {}),
            "matmul_backward: grad_out is i32, but must be f32, bf16, f16 or f64");
  EXPECT_EQ(message(g, x, make(DType::f32, {2, 4}), {.x = make(DType::f32, {2, 4})}),
            "matmul_backward: weight dim 0 (n) is 2, but grad_out set n = 3");
  EXPECT_EQ(message(g, make(DType::f32, {3, 4}), w, {.weight = make(DType::f32, {3, 4})}),
            "matmul_backward: x dim 0 (m) is 3, but grad_out set m = 2");
  EXPECT_EQ(message(g, x, w, {.x = make(DType::f32, {2, 5})}),
            "matmul_backward: gradients.x dim 1 (k) is 5, but weight set k = 4");
  EXPECT_EQ(message(g, x, w, {.weight = make(DType::f32, {4, 3})}),
            "matmul_backward: gradients.weight dim 0 (n) is 4, but grad_out set n = 3");
  EXPECT_EQ(message(g, x, w, {.bias = make(DType::f32, {2})}),
            "matmul_backward: gradients.bias dim 0 (n) is 2, but grad_out set n = 3");
  EXPECT_EQ(message(g, make(DType::f64, {2, 4}), w, {.weight = make(DType::f32, {3, 4})}),
            "matmul_backward: x is f64, but must be f32, bf16 or f16");
  EXPECT_EQ(message(make(DType::f64, {2, 3}), x, w, {.x = make(DType::f64, {2, 4})}),
            "matmul_backward: weight is f32, but must be f64");
  const Tensor shared = make(DType::f32, {2, 4});
  EXPECT_NE(message(g, x, w, {.x = shared, .bias = shared.selected(0, 0).narrowed(0, 0, 3)}).find("overlaps"),
            std::string::npos);
  EXPECT_NE(message(g, x, w, {.x = x, .weight = make(DType::f32, {3, 4})}).find("overlaps x"), std::string::npos);
}

}  // namespace
}  // namespace opst

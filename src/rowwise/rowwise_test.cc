#include "opst/rowwise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "rowwise/test_rows.h"
#include "testing/lazy_mapping.h"

namespace opst {
namespace {

using namespace test;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

enum class Binary { swiglu, add };

TEST(Elementwise, EqualsTheReferenceInEveryContext) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (int64_t cols : kRowSizes) {
      for (Binary op : {Binary::swiglu, Binary::add}) {
        const DType dtype = kFloatTypes[random.integer(0, 2)];
        const int64_t rows = random.pick<int64_t>({0, 1, 3});
        const int in_place = static_cast<int>(random.integer(0, 2));  // 0: no, 1: a, 2: b
        Matrix a(dtype, rows, cols, random_layout(random));
        Matrix b(dtype, rows, cols, random_layout(random));
        Matrix other(dtype, rows, cols, random_layout(random));
        const std::string about = t.name + (op == Binary::add ? ", add " : ", swiglu ") + to_string(dtype) + " [" +
                                  std::to_string(rows) + ", " + std::to_string(cols) + "], in place " +
                                  std::to_string(in_place);
        SCOPED_TRACE(about);
        fill(a.tensor, Fill::normal, random);
        fill(b.tensor, Fill::normal, random);
        const Tensor out = in_place == 1 ? a.tensor : in_place == 2 ? b.tensor : other.tensor;
        std::vector<Doubles> expected;
        for (int64_t r = 0; r < rows; ++r) {
          Doubles x = row_of(a.tensor, r);
          const Doubles y = row_of(b.tensor, r);
          for (size_t i = 0; i < x.size(); ++i) {
            x[i] = op == Binary::add ? x[i] + y[i] : reference::silu(x[i]) * y[i];
          }
          expected.push_back(x);
        }
        const Status status =
            op == Binary::add ? add(t.context, a.tensor, b.tensor, out) : swiglu(t.context, a.tensor, b.tensor, out);
        ASSERT_TRUE(status.ok()) << status.message();
        expect_close(out, Expected(expected, cols), about);
        EXPECT_TRUE(a.intact() && b.intact() && other.intact());
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Each value close for itself, over all magnitudes; and where exp overflows or underflows.
TEST(Swiglu, IsAccurateForEveryMagnitude) {
  std::vector<float> gate, up, out;
  for (float magnitude = 1e-30f; magnitude < 1e30f; magnitude *= 1.37f) {
    gate.push_back(magnitude);
    gate.push_back(-magnitude);
  }
  for (float x : {0.0f, -0.0f, 87.0f, 88.0f, 88.5f, 88.7f, 89.0f, 103.0f, -87.0f, -87.5f, -88.5f, -88.8f, -90.0f}) {
    gate.push_back(x);
  }
  up.assign(gate.size(), 1.0f);
  out.resize(gate.size());
  const auto n = static_cast<int64_t>(gate.size());
  for (const TestContext& t : contexts_with_threads(1)) {
    SCOPED_TRACE(t.name);
    ASSERT_TRUE(swiglu(t.context, ConstTensor::contiguous(DType::f32, {n}, gate.data()),
                       ConstTensor::contiguous(DType::f32, {n}, up.data()),
                       Tensor::contiguous(DType::f32, {n}, out.data()))
                    .ok());
    for (size_t i = 0; i < gate.size(); ++i) {
      const double ref = reference::silu(static_cast<double>(gate[i]));
      EXPECT_NEAR(static_cast<double>(out[i]), ref, std::abs(ref) * 5e-7 + 1.2e-36) << gate[i];
    }
  }
}

TEST(Swiglu, TakesBothHalvesOfOneTensor) {
  Random random(seed());
  Context& context = contexts_with_threads(2).back().context;
  std::vector<float> gate_up(3 * 14), separate(3 * 7), joined(3 * 7);
  const Tensor both = Tensor::contiguous(DType::f32, {3, 14}, gate_up.data());
  fill(both, Fill::normal, random);
  const Tensor first = both.narrowed(1, 0, 7), second = both.narrowed(1, 7, 7);
  const Tensor out = Tensor::contiguous(DType::f32, {3, 7}, joined.data());
  const Tensor expected = Tensor::contiguous(DType::f32, {3, 7}, separate.data());
  for (bool swapped : {false, true}) {
    ASSERT_TRUE(swiglu(context, swapped ? second : first, swapped ? first : second, expected).ok());
    ASSERT_TRUE(swiglu(context, both, out, {.swapped = swapped}).ok());
    const Comparison c = compare_bits(out, expected);
    EXPECT_TRUE(c.ok) << c.message;
  }
  ASSERT_TRUE(swiglu(context, both, first).ok());  // in place of the gate; the last expected was swapped
  ASSERT_FALSE(compare_bits(first, expected).ok);
}

TEST(SwigluBackward, ReferenceGradientEqualsCentralDifferences) {
  for (double x = -12; x <= 12; x += 0.37) {
    EXPECT_NEAR(reference::silu_derivative(x), (reference::silu(x + 1e-5) - reference::silu(x - 1e-5)) / 2e-5, 1e-9);
  }
}

TEST(SwigluBackward, EqualsTheReferenceInEveryContext) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (int64_t cols : kRowSizes) {
      const DType dtype = kFloatTypes[random.integer(0, 2)];
      const int64_t rows = random.pick<int64_t>({0, 1, 3});
      Matrix g(dtype, rows, cols, random_layout(random)), gate(dtype, rows, cols, random_layout(random)),
          up(dtype, rows, cols, random_layout(random)), first(dtype, rows, cols, random_layout(random)),
          second(dtype, rows, cols, random_layout(random));
      for (const Matrix* m : {&g, &gate, &up}) fill(m->tensor, Fill::normal, random);
      // Gradients beside the inputs, or onto two of them.
      Tensor grad_gate = first.tensor, grad_up = second.tensor;
      const int place = static_cast<int>(random.integer(0, 3));
      if (place == 1) grad_gate = gate.tensor, grad_up = up.tensor;
      if (place == 2) grad_gate = up.tensor, grad_up = gate.tensor;
      if (place == 3) grad_gate = g.tensor;
      const std::string about = t.name + ", " + to_string(dtype) + " [" + std::to_string(rows) + ", " +
                                std::to_string(cols) + "], place " + std::to_string(place);
      SCOPED_TRACE(about);
      std::vector<Doubles> expected_gate, expected_up;
      for (int64_t r = 0; r < rows; ++r) {
        Doubles a = row_of(gate.tensor, r), b = row_of(up.tensor, r);
        const Doubles grad = row_of(g.tensor, r);
        for (size_t i = 0; i < a.size(); ++i) {
          const double x = a[i];
          a[i] = grad[i] * b[i] * reference::silu_derivative(x);
          b[i] = grad[i] * reference::silu(x);
        }
        expected_gate.push_back(a);
        expected_up.push_back(b);
      }
      const Status status = swiglu_backward(t.context, g.tensor, gate.tensor, up.tensor, grad_gate, grad_up);
      ASSERT_TRUE(status.ok()) << status.message();
      if (rows > 0) {
        expect_close(grad_gate, Expected(expected_gate, cols), about, 1e-6);
        expect_close(grad_up, Expected(expected_up, cols), about, 1e-6);
      }
      for (const Matrix* m : {&g, &gate, &up, &first, &second}) EXPECT_TRUE(m->intact());
      if (HasFatalFailure()) return;
    }
  }
}

TEST(SwigluBackward, TakesBothHalvesOfOneTensorAndLargeGates) {
  Context& context = contexts_with_threads(2).back().context;
  std::vector<float> gate_up = {-90.0f, -1e30f, 3e38f, 0.5f, 2, 2, 2, 2}, g(4, 1.0f), grad(8), a(4), b(4);
  const auto vec = [](std::vector<float>& v) {
    return Tensor::contiguous(DType::f32, {static_cast<int64_t>(v.size())}, v.data());
  };
  const Tensor both = vec(gate_up), gradient = vec(grad);
  for (const bool swapped : {false, true}) {
    const Tensor first = both.narrowed(0, 0, 4), second = both.narrowed(0, 4, 4);
    ASSERT_TRUE(swiglu_backward(context, vec(g), both, gradient, {.swapped = swapped}).ok());
    ASSERT_TRUE(
        swiglu_backward(context, vec(g), swapped ? second : first, swapped ? first : second, vec(a), vec(b)).ok());
    EXPECT_TRUE(compare_bits(gradient.narrowed(0, swapped ? 4 : 0, 4), vec(a)).ok);
    EXPECT_TRUE(compare_bits(gradient.narrowed(0, swapped ? 0 : 4, 4), vec(b)).ok);
    if (swapped) continue;
    EXPECT_EQ(a[1], 0.0f);
    EXPECT_EQ(b[1], 0.0f);
    EXPECT_EQ(a[2], 2.0f);
    EXPECT_EQ(b[2], 3e38f);
  }
}

// x = [gate = 1, up = 2]: 1.4621172; the wrong half through silu would give 1.7615942.
TEST(Swiglu, OperandOrder_B77) {
  for (const TestContext& t : contexts_with_threads(1)) {
    for (const DType dtype : kFloatTypes) {
      // Every second element of a wider tensor.
      Matrix x(dtype, 1, 4, RowLayout::contiguous), out(dtype, 1, 1, RowLayout::contiguous);
      set(x.tensor, 0, 1);
      set(x.tensor, 2, 2);
      Tensor view = x.tensor;
      view.shape[1] = 2, view.strides[1] = 2;
      ASSERT_TRUE(swiglu(t.context, view, out.tensor).ok());
      EXPECT_NEAR(get(out.tensor, 0), 1.4621172, 2 * epsilon(dtype));
      ASSERT_TRUE(swiglu(t.context, view, out.tensor, {.swapped = true}).ok());
      EXPECT_NEAR(get(out.tensor, 0), 1.7615942, 2 * epsilon(dtype));
    }
  }
}

// Five dimensions, each operator row by row the same as one row alone, NaN and Inf in their own rows only, the same
// bits for every number of threads.
TEST(Rowwise, RowsAreIndependent) {
  Random random(seed());
  constexpr int64_t kRows = 2 * 3 * 2 * 4, kCols = 533;
  std::vector<float> x(kRows * kCols), y(kRows * kCols), weight(kCols), out(kRows * kCols), alone(kCols);
  const auto five = [&](std::vector<float>& v) {
    return Tensor::contiguous(DType::f32, {2, 3, 2, 4, kCols}, v.data());
  };
  const auto row = [&](std::vector<float>& v, int64_t r) {
    return Tensor::contiguous(DType::f32, {1, kCols}, v.data() + r * kCols);
  };
  const Tensor w = Tensor::contiguous(DType::f32, {kCols}, weight.data());
  for (Tensor tensor : {five(x), five(y), w}) fill(tensor, Fill::normal, random);
  x[7 * kCols + 11] = kNan;
  x[9 * kCols + 12] = kInf;
  y[20 * kCols + 13] = -kInf;
  for (int num_threads : {1, 2, 3, 5}) {
    for (const TestContext& t : contexts_with_threads(num_threads)) {
      Context& one =
          contexts_with_threads(1)[static_cast<size_t>(&t - contexts_with_threads(num_threads).data())].context;
      for (int op = 0; op < 8; ++op) {
        // Whether b, too, is an input.
        const bool two = op == 1 || op == 2 || op >= 5;
        const auto run = [&](Context& context, const Tensor& a, const Tensor& b, const Tensor& to) {
          switch (op) {
            case 0:
              return rms_norm(context, a, w, to);
            case 1:
              return swiglu(context, a, b, to);
            case 2:
              return add(context, a, b, to);
            case 3:
              return layer_norm(context, a, to, {.weight = w, .bias = w});
            case 4:
              return softmax(context, a, to);
            case 5:
              return rms_norm_backward(context, a, b, w, {.x = to});
            case 6:
              return layer_norm_backward(context, a, b, {.x = to}, {.weight = w});
            default:
              return softmax_backward(context, a, b, to);
          }
        };
        SCOPED_TRACE(t.name + ", operator " + std::to_string(op));
        ASSERT_TRUE(run(t.context, five(x), five(y), five(out)).ok());
        for (int64_t r = 0; r < kRows; ++r) {
          ASSERT_TRUE(run(one, row(x, r), row(y, r), Tensor::contiguous(DType::f32, {1, kCols}, alone.data())).ok());
          const Comparison c = compare_bits(row(out, r), Tensor::contiguous(DType::f32, {1, kCols}, alone.data()));
          ASSERT_TRUE(c.ok) << "row " << r << ": " << c.message;
          bool finite = true;
          for (float v : alone) finite = finite && std::isfinite(v);
          EXPECT_EQ(finite, r != 7 && r != 9 && (!two || r != 20)) << "row " << r;
        }
      }
    }
  }
}

TEST(Rowwise, ReachesRowsBeyond32BitOffsets) {
  const int64_t stride = 1'100'000'000;
  LazyMapping mapping((2 * stride + 64) * 4);
  if (mapping.data() == nullptr) GTEST_SKIP() << "no address space for " << mapping.size_bytes() << " bytes";
  Tensor far = Tensor::contiguous(DType::f32, {3, 64}, mapping.data());
  far.strides[0] = stride;
  std::vector<float> near(3 * 64), ones(64, 1.0f), out(3 * 64), expected(3 * 64);
  const Tensor compact = Tensor::contiguous(DType::f32, {3, 64}, near.data());
  Random random(seed());
  fill(compact, Fill::normal, random);
  copy(compact, far);
  const Tensor w = Tensor::contiguous(DType::f32, {64}, ones.data());
  const Tensor to = Tensor::contiguous(DType::f32, {3, 64}, out.data());
  const Tensor reference = Tensor::contiguous(DType::f32, {3, 64}, expected.data());
  Context& context = contexts_with_threads(2).back().context;
  ASSERT_TRUE(rms_norm(context, far, w, to).ok());
  ASSERT_TRUE(rms_norm(context, compact, w, reference).ok());
  EXPECT_TRUE(compare_bits(to, reference).ok);
  ASSERT_TRUE(add(context, compact, compact, far).ok());  // written there
  ASSERT_TRUE(add(context, compact, compact, reference).ok());
  EXPECT_TRUE(compare_bits(far, reference).ok);
}

TEST(Rowwise, NamesWhatIsWrong) {
  Context& context = contexts_with_threads(1).back().context;
  std::vector<float> a(64), b(64), c(64), w(8);
  const auto view = [](std::vector<float>& v, int64_t rows, int64_t cols) {
    return Tensor::contiguous(DType::f32, {rows, cols}, v.data());
  };
  const auto vec = [](std::vector<float>& v, int64_t n) { return Tensor::contiguous(DType::f32, {n}, v.data()); };
  EXPECT_EQ(rms_norm(context, view(a, 2, 8), vec(w, 7), view(b, 2, 8)).message(),
            "rms_norm: x dim 1 (features) is 8, but weight set features = 7");
  EXPECT_EQ(rms_norm(context, view(a, 2, 8), vec(w, 8), view(b, 3, 8)).message(),
            "rms_norm: out dim 0 (dim_0) is 3, but x set dim_0 = 2");
  EXPECT_EQ(rms_norm(context, view(a, 2, 8), vec(w, 8), view(b, 2, 8), {.eps = -1}).message(),
            "rms_norm: eps is -1.000000, but must be >= 0");
  EXPECT_EQ(rms_norm(context, Tensor::contiguous(DType::f64, {2, 4}, a.data()), vec(w, 4), view(b, 2, 4)).message(),
            "rms_norm: x is f64, but must be f32, bf16 or f16");
  EXPECT_EQ(rms_norm(context, Tensor::contiguous(DType::f32, {}, a.data()), vec(w, 4), view(b, 2, 4)).message(),
            "rms_norm: rank is 0, but must be from 1 to 5");
  EXPECT_NE(rms_norm(context, view(a, 2, 8), vec(w, 8), vec(b, 16)).message().find("out has rank 1"),
            std::string::npos);
  Tensor shifted = view(a, 2, 8);
  shifted.data = a.data() + 1;
  EXPECT_NE(rms_norm(context, view(a, 2, 8), vec(w, 8), shifted).message().find("out f32 [2, 8] overlaps x"),
            std::string::npos);
  EXPECT_NE(add(context, view(a, 2, 8), shifted, view(a, 2, 8)).message().find("out f32 [2, 8] overlaps b"),
            std::string::npos);
  Tensor aliased = view(b, 2, 8);
  aliased.strides[0] = 0;
  EXPECT_NE(add(context, view(a, 2, 8), view(a, 2, 8), aliased).message().find("share addresses"), std::string::npos);
  EXPECT_EQ(swiglu(context, view(a, 2, 8), Tensor::contiguous(DType::bf16, {2, 8}, b.data()), view(c, 2, 8)).message(),
            "swiglu: up is bf16, but must be f32");
  EXPECT_EQ(swiglu(context, view(a, 2, 7), view(c, 2, 3)).message(),
            "swiglu: gate_up dim 1 is 7, but must be even: gate and up side by side");
  EXPECT_EQ(swiglu(context, Tensor::contiguous(DType::f32, {}, a.data()), view(c, 2, 3)).message(),
            "swiglu: gate_up has rank 0, but must be from 1 to 5");
}

TEST(Rowwise, ZeroSizesAreLegal) {
  Context& context = contexts_with_threads(2).back().context;
  float w[8] = {};
  const auto empty = [&](std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(DType::f32, shape, nullptr);
  };
  EXPECT_TRUE(rms_norm(context, empty({0, 8}), Tensor::contiguous(DType::f32, {8}, w), empty({0, 8})).ok());
  EXPECT_TRUE(rms_norm(context, empty({3, 0}), empty({0}), empty({3, 0})).ok());
  EXPECT_TRUE(add(context, empty({2, 0, 3}), empty({2, 0, 3}), empty({2, 0, 3})).ok());
  EXPECT_TRUE(swiglu(context, empty({0}), empty({0}), empty({0})).ok());
}

TEST(Rowwise, AllocatesNothingOnceWarm) {
  Context& context = contexts_with_threads(2).back().context;
  const int64_t positions[4] = {0, 1, 2, 3};
  std::vector<float> cos(4 * 32), sin(4 * 32);
  const auto call = [&] {
    return rope_table(context, ConstTensor::contiguous(DType::i64, {4}, positions),
                      Tensor::contiguous(DType::f32, {4, 32}, cos.data()),
                      Tensor::contiguous(DType::f32, {4, 32}, sin.data()));
  };
  ASSERT_TRUE(call().ok());
  const int64_t before = context.workspace_allocations();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(call().ok());
  EXPECT_EQ(context.workspace_allocations(), before);
}

}  // namespace
}  // namespace opst

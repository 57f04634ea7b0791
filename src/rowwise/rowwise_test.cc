#include "opst/rowwise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "rowwise/reference.h"
#include "testing/compare.h"
#include "testing/contexts.h"
#include "testing/elements.h"
#include "testing/guarded_buffer.h"
#include "testing/lazy_mapping.h"
#include "testing/random.h"

namespace opst {
namespace {

using reference::Doubles;
using test::contexts;
using test::contexts_with_threads;
using test::Fill;
using test::Guard;
using test::GuardedBuffer;
using test::Random;
using test::TestContext;

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

enum class Layout { contiguous, padded, transposed };
constexpr Layout kLayouts[] = {Layout::contiguous, Layout::padded, Layout::transposed};
const char* name_of(Layout layout) {
  return layout == Layout::contiguous ? "contiguous" : layout == Layout::padded ? "padded" : "transposed";
}

// A [rows, cols] tensor between forbidden pages.
struct Matrix {
  GuardedBuffer memory;
  Tensor tensor;

  Matrix(DType dtype, int64_t rows, int64_t cols, Layout layout, Guard guard = Guard::after)
      : memory((layout == Layout::padded ? rows * (cols + 3) - (rows > 0 ? 3 : 0) : rows * cols) * size_bytes(dtype),
               guard) {
    if (layout == Layout::transposed) {
      tensor = memory.tensor(dtype, {cols, rows}).transposed(0, 1);
    } else {
      tensor = memory.tensor(dtype, {rows, cols});
      if (layout == Layout::padded) tensor.strides[0] = cols + 3;
    }
  }
};

Doubles row_of(const ConstTensor& tensor, int64_t row) { return test::to_doubles(tensor.selected(0, row)); }

// A contiguous f64 tensor from rows of doubles.
struct Expected {
  Doubles values;
  ConstTensor tensor;
  Expected(const std::vector<Doubles>& rows, int64_t cols) {
    for (const Doubles& row : rows) values.insert(values.end(), row.begin(), row.end());
    tensor = ConstTensor::contiguous(DType::f64, {static_cast<int64_t>(rows.size()), cols}, values.data());
  }
};

void expect_close(const ConstTensor& got, const Expected& expected, const std::string& about) {
  const test::Comparison c = test::compare(got, expected.tensor, ConstTensor(), {.about = about});
  ASSERT_TRUE(c.ok) << c.message;
}

constexpr int64_t kSizes[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 67, 127, 128, 129, 131};

TEST(RmsNorm, EqualsTheReferenceInEveryContext) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (int64_t cols : kSizes) {
      const DType dtype = kTypes[random.integer(0, 2)];
      const DType weight_dtype = random.chance(0.5) ? DType::f32 : dtype;
      const Layout layout = kLayouts[random.integer(0, 2)];
      const Guard guard = random.chance(0.5) ? Guard::after : Guard::before;
      const bool in_place = random.chance(0.3);
      const int64_t rows = random.pick<int64_t>({1, 2, 5});
      const double eps = random.pick({0.0, 1e-5, 0.5});
      const std::string about = t.name + ", " + to_string(dtype) + " [" + std::to_string(rows) + ", " +
                                std::to_string(cols) + "] " + name_of(layout) + (in_place ? " in place" : "");
      SCOPED_TRACE(about);
      Matrix x(dtype, rows, cols, layout, guard);
      Matrix weight(weight_dtype, 1, cols, layout, guard);
      Matrix other(dtype, rows, cols, kLayouts[random.integer(0, 2)], guard);
      test::fill(x.tensor, Fill::normal, random);
      test::fill(weight.tensor, Fill::normal, random);
      const Tensor out = in_place ? x.tensor : other.tensor;
      const Tensor weight_row = weight.tensor.selected(0, 0);
      std::vector<Doubles> expected;
      for (int64_t r = 0; r < rows; ++r) {
        expected.push_back(reference::rms_norm(row_of(x.tensor, r), test::to_doubles(weight_row), eps));
      }
      const Status status = rms_norm(t.context, x.tensor, weight_row, out, {.eps = eps});
      ASSERT_TRUE(status.ok()) << status.message();
      expect_close(out, Expected(expected, cols), about);
      EXPECT_TRUE(x.memory.slack_intact() && other.memory.slack_intact());
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Rope, EqualsTheReferenceInEveryContext) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (int64_t half : kSizes) {
      const DType dtype = kTypes[random.integer(0, 2)];
      const RopeStyle style = random.pick({RopeStyle::pairs, RopeStyle::halves});
      const int64_t head_dim = 2 * half + random.pick<int64_t>({0, 1, 6});
      const int64_t tokens = random.pick<int64_t>({1, 3});
      const int64_t heads = random.pick<int64_t>({1, 3});
      const bool in_place = random.chance(0.5);
      const Layout layout = kLayouts[random.integer(0, 2)];
      const std::string about = t.name + ", " + to_string(dtype) + ", half " + std::to_string(half) + ", head_dim " +
                                std::to_string(head_dim) + ", " + to_string(style) + " " + name_of(layout) +
                                (in_place ? " in place" : "");
      SCOPED_TRACE(about);
      // [tokens * heads, head_dim] seen as [tokens, heads, head_dim]; or heads outermost in memory.
      const auto heads_view = [&](const Tensor& m, bool heads_first) {
        Tensor v = m;
        v.rank = 3;
        v.shape[0] = tokens, v.shape[1] = heads, v.shape[2] = head_dim;
        v.strides[0] = m.strides[0] * (heads_first ? 1 : heads);
        v.strides[1] = m.strides[0] * (heads_first ? tokens : 1);
        v.strides[2] = m.strides[1];
        return v;
      };
      Matrix x(dtype, tokens * heads, head_dim, layout);
      Matrix other(dtype, tokens * heads, head_dim, kLayouts[random.integer(0, 2)]);
      Matrix cos(DType::f32, tokens, half, kLayouts[random.integer(0, 2)]);
      Matrix sin(DType::f32, tokens, half, kLayouts[random.integer(0, 2)]);
      for (const Matrix* m : {&x, &cos, &sin}) test::fill(m->tensor, Fill::uniform, random);
      const Tensor in = heads_view(x.tensor, random.chance(0.5));
      const Tensor out = in_place ? in : heads_view(other.tensor, random.chance(0.5));
      std::vector<Doubles> expected;
      for (int64_t token = 0; token < tokens; ++token) {
        for (int64_t h = 0; h < heads; ++h) {
          expected.push_back(reference::rope(test::to_doubles(in.selected(0, token).selected(0, h)),
                                             row_of(cos.tensor, token), row_of(sin.tensor, token),
                                             style == RopeStyle::pairs));
        }
      }
      const Status status = rope(t.context, in, cos.tensor, sin.tensor, out, {.style = style});
      ASSERT_TRUE(status.ok()) << status.message();
      Expected reference(expected, head_dim);
      reference.tensor = ConstTensor::contiguous(DType::f64, {tokens, heads, head_dim}, reference.values.data());
      expect_close(out, reference, about);
      EXPECT_TRUE(x.memory.slack_intact() && other.memory.slack_intact());
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Rope, CopiesTheElementsThatDoNotTurnBitByBit) {
  // A NaN with a payload, and 8 elements of which 4 turn.
  std::vector<uint32_t> x(8, 0x7fc12345u), out(8);
  const float one[2] = {1, 1}, zero[2] = {0, 0};
  for (const TestContext& t : contexts_with_threads(1)) {
    ASSERT_TRUE(rope(t.context, ConstTensor::contiguous(DType::f32, {1, 1, 8}, x.data()),
                     ConstTensor::contiguous(DType::f32, {1, 2}, one),
                     ConstTensor::contiguous(DType::f32, {1, 2}, zero),
                     Tensor::contiguous(DType::f32, {1, 1, 8}, out.data()))
                    .ok());
    for (size_t i = 4; i < 8; ++i) EXPECT_EQ(out[i], 0x7fc12345u);
  }
}

TEST(RopeTable, HasTheAnglesRoundedOnce) {
  const int64_t positions[] = {0, 1, 2, 1000, 8191, 131071, -5, int64_t{1} << 40};
  constexpr int64_t kTokens = 8, kHalf = 32;
  for (const TestContext& t : contexts_with_threads(3)) {
    GuardedBuffer cos(kTokens * kHalf * 4), sin(kTokens * kHalf * 4);
    const Tensor cos_view = cos.tensor(DType::f32, {kHalf, kTokens}).transposed(0, 1);
    ASSERT_TRUE(rope_table(t.context, ConstTensor::contiguous(DType::i64, {kTokens}, positions), cos_view,
                           sin.tensor(DType::f32, {kTokens, kHalf}), {.theta = 1e5})
                    .ok());
    for (int64_t token = 0; token < kTokens; ++token) {
      for (int64_t i = 0; i < kHalf; ++i) {
        // An angle of 2^40 in double has an error of 2^-13 radians, so there only f64's own rounding can be asked for.
        const double angle = static_cast<double>(positions[token]) * std::pow(1e5, -static_cast<double>(i) / kHalf);
        const double tolerance = 6.0e-8 + std::abs(angle) * 4.5e-16;
        EXPECT_NEAR(static_cast<double>(static_cast<float*>(cos.data())[i * kTokens + token]), std::cos(angle),
                    tolerance);
        EXPECT_NEAR(static_cast<double>(static_cast<float*>(sin.data())[token * kHalf + i]), std::sin(angle),
                    tolerance);
      }
    }
  }
}

// Turning by p and then by q is turning by p + q; lengths stay.
TEST(Rope, ComposesAndKeepsLengths) {
  Random random(test::seed());
  Context& context = contexts_with_threads(2).back().context;
  const int64_t positions[3] = {37, 100, 137};
  std::vector<float> cos(3 * 16), sin(3 * 16), x(32), once(32), twice(32), sum(32);
  const auto table = [&](std::vector<float>& v) { return Tensor::contiguous(DType::f32, {3, 16}, v.data()); };
  ASSERT_TRUE(rope_table(context, ConstTensor::contiguous(DType::i64, {3}, positions), table(cos), table(sin)).ok());
  const auto head = [](std::vector<float>& v) { return Tensor::contiguous(DType::f32, {1, 1, 32}, v.data()); };
  for (RopeStyle style : {RopeStyle::pairs, RopeStyle::halves}) {
    test::fill(head(x), Fill::normal, random);
    const auto turn = [&](std::vector<float>& from, int64_t row, std::vector<float>& to) {
      ASSERT_TRUE(rope(context, head(from), table(cos).narrowed(0, row, 1), table(sin).narrowed(0, row, 1), head(to),
                       {.style = style})
                      .ok());
    };
    turn(x, 0, once);
    turn(once, 1, twice);
    turn(x, 2, sum);
    double before = 0, after = 0;
    for (size_t i = 0; i < 32; ++i) {
      EXPECT_NEAR(twice[i], sum[i], 2e-6);
      before += static_cast<double>(x[i]) * static_cast<double>(x[i]);
      after += static_cast<double>(twice[i]) * static_cast<double>(twice[i]);
    }
    EXPECT_NEAR(before, after, before * 1e-6);
  }
}

enum class Binary { swiglu, add };

TEST(Elementwise, EqualsTheReferenceInEveryContext) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (int64_t cols : kSizes) {
      for (Binary op : {Binary::swiglu, Binary::add}) {
        const DType dtype = kTypes[random.integer(0, 2)];
        const int64_t rows = random.pick<int64_t>({0, 1, 3});
        const int in_place = static_cast<int>(random.integer(0, 2));  // 0: no, 1: a, 2: b
        Matrix a(dtype, rows, cols, kLayouts[random.integer(0, 2)]);
        Matrix b(dtype, rows, cols, kLayouts[random.integer(0, 2)]);
        Matrix other(dtype, rows, cols, kLayouts[random.integer(0, 2)]);
        const std::string about = t.name + (op == Binary::add ? ", add " : ", swiglu ") + to_string(dtype) + " [" +
                                  std::to_string(rows) + ", " + std::to_string(cols) + "], in place " +
                                  std::to_string(in_place);
        SCOPED_TRACE(about);
        test::fill(a.tensor, Fill::normal, random);
        test::fill(b.tensor, Fill::normal, random);
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
        EXPECT_TRUE(a.memory.slack_intact() && b.memory.slack_intact() && other.memory.slack_intact());
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
  Random random(test::seed());
  Context& context = contexts_with_threads(2).back().context;
  std::vector<float> gate_up(3 * 14), separate(3 * 7), joined(3 * 7);
  const Tensor both = Tensor::contiguous(DType::f32, {3, 14}, gate_up.data());
  test::fill(both, Fill::normal, random);
  const Tensor first = both.narrowed(1, 0, 7), second = both.narrowed(1, 7, 7);
  const Tensor out = Tensor::contiguous(DType::f32, {3, 7}, joined.data());
  const Tensor expected = Tensor::contiguous(DType::f32, {3, 7}, separate.data());
  for (bool swapped : {false, true}) {
    ASSERT_TRUE(swiglu(context, swapped ? second : first, swapped ? first : second, expected).ok());
    ASSERT_TRUE(swiglu(context, both, out, {.swapped = swapped}).ok());
    const test::Comparison c = test::compare_bits(out, expected);
    EXPECT_TRUE(c.ok) << c.message;
  }
  ASSERT_TRUE(swiglu(context, both, first).ok());  // in place of the gate; the last expected was swapped
  ASSERT_FALSE(test::compare_bits(first, expected).ok);
}

// Five dimensions, each operator row by row the same as one row alone, NaN and Inf in their own rows only, the same
// bits for every number of threads.
TEST(Rowwise, RowsAreIndependent) {
  Random random(test::seed());
  constexpr int64_t kRows = 2 * 3 * 2 * 4, kCols = 533;
  std::vector<float> x(kRows * kCols), y(kRows * kCols), weight(kCols), out(kRows * kCols), alone(kCols);
  const auto five = [&](std::vector<float>& v) {
    return Tensor::contiguous(DType::f32, {2, 3, 2, 4, kCols}, v.data());
  };
  const auto row = [&](std::vector<float>& v, int64_t r) {
    return Tensor::contiguous(DType::f32, {1, kCols}, v.data() + r * kCols);
  };
  const Tensor w = Tensor::contiguous(DType::f32, {kCols}, weight.data());
  for (Tensor tensor : {five(x), five(y), w}) test::fill(tensor, Fill::normal, random);
  x[7 * kCols + 11] = kNan;
  x[9 * kCols + 12] = kInf;
  y[20 * kCols + 13] = -kInf;
  for (int num_threads : {1, 2, 3, 5}) {
    for (const TestContext& t : contexts_with_threads(num_threads)) {
      Context& one =
          contexts_with_threads(1)[static_cast<size_t>(&t - contexts_with_threads(num_threads).data())].context;
      for (int op = 0; op < 3; ++op) {
        const auto run = [&](Context& context, const Tensor& a, const Tensor& b, const Tensor& to) {
          return op == 0 ? rms_norm(context, a, w, to) : op == 1 ? swiglu(context, a, b, to) : add(context, a, b, to);
        };
        SCOPED_TRACE(t.name + ", operator " + std::to_string(op));
        ASSERT_TRUE(run(t.context, five(x), five(y), five(out)).ok());
        for (int64_t r = 0; r < kRows; ++r) {
          ASSERT_TRUE(run(one, row(x, r), row(y, r), Tensor::contiguous(DType::f32, {1, kCols}, alone.data())).ok());
          const test::Comparison c =
              test::compare_bits(row(out, r), Tensor::contiguous(DType::f32, {1, kCols}, alone.data()));
          ASSERT_TRUE(c.ok) << "row " << r << ": " << c.message;
          bool finite = true;
          for (float v : alone) finite = finite && std::isfinite(v);
          EXPECT_EQ(finite, r != 7 && r != 9 && (op == 0 || r != 20)) << "row " << r;
        }
      }
    }
  }
}

TEST(Rowwise, ReachesRowsBeyond32BitOffsets) {
  const int64_t stride = 1'100'000'000;
  test::LazyMapping mapping((2 * stride + 64) * 4);
  if (mapping.data() == nullptr) GTEST_SKIP() << "no address space for " << mapping.size_bytes() << " bytes";
  Tensor far = Tensor::contiguous(DType::f32, {3, 64}, mapping.data());
  far.strides[0] = stride;
  std::vector<float> near(3 * 64), ones(64, 1.0f), out(3 * 64), expected(3 * 64);
  const Tensor compact = Tensor::contiguous(DType::f32, {3, 64}, near.data());
  Random random(test::seed());
  test::fill(compact, Fill::normal, random);
  test::copy(compact, far);
  const Tensor w = Tensor::contiguous(DType::f32, {64}, ones.data());
  const Tensor to = Tensor::contiguous(DType::f32, {3, 64}, out.data());
  const Tensor reference = Tensor::contiguous(DType::f32, {3, 64}, expected.data());
  Context& context = contexts_with_threads(2).back().context;
  ASSERT_TRUE(rms_norm(context, far, w, to).ok());
  ASSERT_TRUE(rms_norm(context, compact, w, reference).ok());
  EXPECT_TRUE(test::compare_bits(to, reference).ok);
  ASSERT_TRUE(add(context, compact, compact, far).ok());  // written there
  ASSERT_TRUE(add(context, compact, compact, reference).ok());
  EXPECT_TRUE(test::compare_bits(far, reference).ok);
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

  const auto heads = [](std::vector<float>& v) { return Tensor::contiguous(DType::f32, {2, 2, 8}, v.data()); };
  EXPECT_EQ(rope(context, heads(a), view(b, 2, 5), view(b, 2, 5), heads(c)).message(),
            "rope: cos dim 1 (half) is 5, but x has head_dim = 8, which holds 4 pairs");
  EXPECT_EQ(rope(context, heads(a), view(b, 3, 4), view(b, 3, 4), heads(c)).message(),
            "rope: x dim 0 (tokens) is 2, but cos set tokens = 3");
  EXPECT_EQ(rope(context, heads(a), view(b, 2, 4), view(b, 2, 3), heads(c)).message(),
            "rope: sin dim 1 (half) is 3, but cos set half = 4");
  const int64_t positions[2] = {0, 1};
  EXPECT_EQ(rope_table(context, ConstTensor::contiguous(DType::i64, {2}, positions), view(a, 2, 4), view(b, 2, 4),
                       {.theta = 0})
                .message(),
            "rope_table: theta is 0.000000, but must be positive and finite");
}

TEST(Rowwise, ZeroSizesAreLegal) {
  Context& context = contexts_with_threads(2).back().context;
  float x[8] = {}, w[8] = {};
  const auto empty = [&](std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(DType::f32, shape, nullptr);
  };
  EXPECT_TRUE(rms_norm(context, empty({0, 8}), Tensor::contiguous(DType::f32, {8}, w), empty({0, 8})).ok());
  EXPECT_TRUE(rms_norm(context, empty({3, 0}), empty({0}), empty({3, 0})).ok());
  EXPECT_TRUE(add(context, empty({2, 0, 3}), empty({2, 0, 3}), empty({2, 0, 3})).ok());
  EXPECT_TRUE(swiglu(context, empty({0}), empty({0}), empty({0})).ok());
  EXPECT_TRUE(
      rope_table(context, ConstTensor::contiguous(DType::i64, {0}, nullptr), empty({0, 4}), empty({0, 4})).ok());
  EXPECT_TRUE(rope(context, empty({0, 2, 8}), empty({0, 4}), empty({0, 4}), empty({0, 2, 8})).ok());
  EXPECT_TRUE(rope(context, empty({1, 0, 8}), Tensor::contiguous(DType::f32, {1, 4}, x),
                   Tensor::contiguous(DType::f32, {1, 4}, x), empty({1, 0, 8}))
                  .ok());
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

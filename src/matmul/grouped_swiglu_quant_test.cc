// grouped_matmul_swiglu_quant against its definition in double, its scratch memory, and gradients of grouped products.
#include <gtest/gtest.h>

#include <cmath>

#include "matmul/test_groups.h"
#include "testing/contexts.h"

namespace opst {
namespace {

using test::contexts;
using test::contexts_with_threads;
using test::DrawnList;
using test::Fill;
using test::Guard;
using test::IntExperts;
using test::Matrix;
using test::one_context;
using test::Random;
using test::TestContext;

// ---- SwiGLU and quantisation in the epilogue

struct QuantCall {
  const IntExperts& experts;
  DrawnList list;
  int64_t m, half;
  Matrix x, x_scales, out, out_scales, smooth;
  GroupedSwigluQuantOptions options = {};

  QuantCall(const IntExperts& e, const std::vector<int64_t>& rows, int64_t behind, Random& random)
      : experts(e),
        list(rows, random),
        m(list.total() + behind),
        half(e.n / 2),
        x(DType::i8, m, e.k, random.chance(0.5), Guard::after),
        x_scales(DType::f32, m, 1, false, Guard::after),
        out(DType::i8, m, half, random.chance(0.5), Guard::after),
        out_scales(DType::f32, m, 1, false, Guard::after),
        smooth(DType::f32, static_cast<int64_t>(rows.size()), half, false, Guard::after) {
    for (int64_t i = 0; i < m * e.k; ++i) test::set(x.tensor, i, static_cast<double>(random.integer(-128, 127)));
    for (int64_t i = 0; i < m; ++i) test::set(x_scales.tensor, i, random.uniform(1e-4, 1e-3));
    for (int64_t i = 0; i < smooth.tensor.num_elements(); ++i) test::set(smooth.tensor, i, random.uniform(0.25, 4));
  }
  Status run(Context& context) {
    return grouped_matmul_swiglu_quant(context, x.tensor, x_scales.tensor.selected(1, 0), experts.grouped(), list.list,
                                       out.tensor, out_scales.tensor.selected(1, 0), options);
  }
  // S of a row of group e by the definition, and how far float32 may be from it: the groups of k are added with a few
  // roundings of the parts' magnitudes, which may cancel.
  struct Row {
    std::vector<double> s, error;
  };
  Row row_of(int64_t i, size_t e) const {
    const test::IntWeight& w = experts.weights[e];
    const double x_scale = test::get(x_scales.tensor, i);
    std::vector<double> c(static_cast<size_t>(w.n)), magnitude(c.size());
    for (int64_t j = 0; j < w.n; ++j) {
      const auto at = static_cast<size_t>(j);
      std::vector<double> parts(static_cast<size_t>(w.groups));
      for (int64_t t = 0; t < w.k; ++t) {
        parts[static_cast<size_t>(w.group(t))] +=
            test::get(x.tensor, i * w.k + t) * static_cast<double>(w.integer(j, t));
      }
      for (int64_t g = 0; g < w.groups; ++g) {
        const double part = parts[static_cast<size_t>(g)] *
                            static_cast<double>(w.scales[static_cast<size_t>(j * w.groups + g)]) * x_scale;
        c[at] += part;
        magnitude[at] += std::abs(part);
      }
    }
    Row row{std::vector<double>(static_cast<size_t>(half)), std::vector<double>(static_cast<size_t>(half))};
    for (size_t j = 0; j < row.s.size(); ++j) {
      const double gate = c[j] / (1 + std::exp(-c[j])), up = c[j + row.s.size()];
      const auto at = static_cast<int64_t>(e) * half + static_cast<int64_t>(j);
      const double factor =
          options.smooth_scales ? test::get(smooth.tensor, options.smooth_scales.rank == 2 ? at : at / half * half) : 1;
      row.s[j] = gate * up * factor;
      // silu's slope is at most 1.1.
      row.error[j] = 8 * 0x1p-24 * std::abs(factor) *
                     (1.1 * magnitude[j] * std::abs(up) + std::abs(gate) * magnitude[j + row.s.size()]);
    }
    return row;
  }
  // At most one step off, on one value in a thousand and two; scales to some roundings. Rows of no group: zeros.
  void check(Context& context) {
    const Status status = run(context);
    ASSERT_TRUE(status.ok()) << status.message();
    int64_t row = 0, off = 0, values = 0;
    for (size_t e = 0; e < list.rows.size(); ++e) {
      for (int64_t last = row + list.rows[e]; row < last; ++row) {
        const auto [s, error] = row_of(row, e);
        double top = 0, largest_error = 0;
        for (const double value : s) top = std::max(top, std::abs(value));
        for (const double value : error) largest_error = std::max(largest_error, value);
        ASSERT_NEAR(test::get(out_scales.tensor, row), top / 127, (top * 2e-5 + largest_error) / 127 + 1e-30)
            << "row " << row;
        // Far below the smallest normal f32: silu of -100 rounds to few bits or to 0.
        const bool tiny = top != 0 && top < 1e-30;
        for (size_t j = 0; !tiny && j < s.size(); ++j, ++values) {
          const double q = test::get(out.tensor, row * half + static_cast<int64_t>(j));
          const double exact = top == 0 ? 0 : std::nearbyint(s[j] / (top / 127));
          ASSERT_LE(std::abs(q - exact), 1) << "row " << row << ", column " << j;
          off += q != exact;
        }
      }
    }
    EXPECT_LE(off, values / 1000 + 2);
    for (; row < m; ++row) {
      EXPECT_EQ(test::get(out_scales.tensor, row), 0);
      for (int64_t j = 0; j < half; ++j) ASSERT_EQ(test::get(out.tensor, row * half + j), 0);
    }
    EXPECT_TRUE(out.memory.slack_intact());
  }
};

// int8 and int4, per output and per group of k, with zeros or without, smooth scales of every form.
TEST(GroupedSwigluQuant, FollowsItsDefinition) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (const int bits : {8, 4}) {
      const int64_t groups = random.pick<int64_t>({1, 1, 3}), count = random.integer(1, 4);
      const IntExperts experts =
          test::int_experts(one_context(), count, 2 * random.integer(1, 40), groups * 2 * random.integer(1, 12), bits,
                            groups, random.chance(0.3), random);
      QuantCall call(experts, test::drawn_rows(count, random), random.integer(0, 3), random);
      if (random.chance(0.6)) {
        call.options.smooth_scales = random.chance(0.5) ? call.smooth.tensor : call.smooth.tensor.selected(1, 0);
      }
      SCOPED_TRACE(t.name + ", " + experts.about + ", n " + std::to_string(experts.n) + ", k " +
                   std::to_string(experts.k));
      call.check(t.context);
      if (HasFatalFailure() || HasNonfatalFailure()) return;
    }
  }
}

// One weight [2, 1], gate 1 and up 2: silu(1) * 2, not silu(2) * 1. And [1, -4] becomes [32, -127] with scale 4 / 127.
TEST(GroupedSwigluQuant, B77_ActivatesTheFirstHalf) {
  int8_t q[2] = {1, 2}, x = 1, out = 0;
  float scales[2] = {1, 1}, x_scale = 1, out_scale = 0;
  int64_t end = 1;
  const PackedIntWeight weight =
      std::move(PackedIntWeight::pack(one_context(), {ConstTensor::contiguous(DType::i8, {2, 1}, q),
                                                      ConstTensor::contiguous(DType::f32, {2, 1}, scales)})
                    .value());
  const auto one = [](DType dtype, void* data) { return Tensor::contiguous(dtype, {1}, data); };
  for (const TestContext& t : contexts_with_threads(1)) {
    ASSERT_TRUE(grouped_matmul_swiglu_quant(t.context, Tensor::contiguous(DType::i8, {1, 1}, &x),
                                            one(DType::f32, &x_scale), weight, {one(DType::i64, &end)},
                                            Tensor::contiguous(DType::i8, {1, 1}, &out), one(DType::f32, &out_scale))
                    .ok());
    EXPECT_EQ(out, 127);
    EXPECT_NEAR(out_scale * 127, 1.4621172, 1e-6);
  }
  float row[2] = {1, -4};
  int8_t quantised[2];
  ASSERT_TRUE(dynamic_quant(one_context(), Tensor::contiguous(DType::f32, {1, 2}, row),
                            Tensor::contiguous(DType::i8, {1, 2}, quantised), one(DType::f32, &out_scale))
                  .ok());
  EXPECT_EQ(quantised[0], 32);
  EXPECT_EQ(quantised[1], -127);
  EXPECT_EQ(out_scale, 4.0f / 127.0f);
}

// A row of zeros: q = 0 and scale 0, beside rows that are not; widths that no vector divides.
TEST(GroupedSwigluQuant, B78_KeepsRowsOfZeros) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    const IntExperts experts =
        test::int_experts(one_context(), 2, 2 * random.pick<int64_t>({1, 13, 31}), 10, 8, 1, false, random);
    QuantCall call(experts, {3, 14}, 0, random);
    for (int64_t j = 0; j < 10; ++j) test::set(call.x.tensor, 4 * 10 + j, 0);
    SCOPED_TRACE(t.name);
    call.check(t.context);
    EXPECT_EQ(test::get(call.out_scales.tensor, 4), 0);
    if (HasFatalFailure() || HasNonfatalFailure()) return;
  }
}

// Sums of bytes do not saturate: 127 * 127 and (-128) * (-128), 64 of them, for one row and many.
TEST(GroupedSwigluQuant, B80_SumsTheLargestBytes) {
  constexpr int64_t kK = 64;
  std::vector<int8_t> q(2 * kK, 127), x(9 * kK, -128);
  std::fill(q.begin() + kK, q.end(), static_cast<int8_t>(-128));
  std::vector<int32_t> out(9 * 2);
  const PackedIntWeight weight =
      std::move(PackedIntWeight::pack(one_context(), ConstTensor::contiguous(DType::i8, {2, kK}, q.data())).value());
  for (const TestContext& t : contexts()) {
    for (const int64_t m : {1, 8, 9}) {
      ASSERT_TRUE(grouped_matmul(t.context, Tensor::contiguous(DType::i8, {m, kK}, x.data()), weight,
                                 {Tensor::contiguous(DType::i64, {1}, const_cast<int64_t*>(&m))},
                                 Tensor::contiguous(DType::i32, {m, 2}, out.data()))
                      .ok());
      EXPECT_EQ(out[0], -127 * 128 * 64) << t.name;
      EXPECT_EQ(out[1], 1048576) << t.name;
    }
  }
}

// No f32 copy of out: scratch that is shared holds rows of x alone, and a thread's a tile and the sums of some columns.
TEST(GroupedSwigluQuant, HasOneTilePerThread) {
  constexpr int64_t kN = 1536, kK = 2048;
  const std::vector<int64_t> rows(16, 300);
  for (const int bits : {8, 4}) {
    for (const int threads : {1, 2}) {
      const MatmulProblem product{.n = kN,
                                  .k = kK,
                                  .x_dtype = DType::i8,
                                  .weight = MatmulWeight::integers,
                                  .bits = bits,
                                  .activation = Activation::swiglu,
                                  .has_x_scales = true,
                                  .has_out_scales = true};
      const GroupedMatmulPlan plan =
          plan_grouped_matmul(product, rows, contexts_with_threads(1).back().context.machine(), threads).value();
      const int64_t tile = plan.largest.rows_per_task * kN / 2 * 4;
      EXPECT_LE(tile, 1 << 20) << to_string(plan);
      EXPECT_LE(plan.scratch_bytes_per_worker, tile + plan.largest.rows_per_task * 3 * 64 * 4 + (1 << 18))
          << to_string(plan);
      EXPECT_LE(plan.scratch_bytes_shared, 16 * (300 * (kK + 256) + 4096)) << to_string(plan);
    }
  }
}

TEST(GroupedSwigluQuant, Refuses) {
  Random random(1);
  const IntExperts experts = test::int_experts(one_context(), 2, 6, 4, 8, 1, false, random);
  QuantCall call(experts, {1, 2}, 0, random);
  const auto message = [&](const ConstTensor& x, const ConstTensor& x_scales, const GroupedWeight& weight,
                           const Tensor& out, const Tensor& out_scales) {
    return grouped_matmul_swiglu_quant(one_context(), x, x_scales, weight, call.list.list, out, out_scales).message();
  };
  const std::string name = "grouped_matmul_swiglu_quant: ";
  const ConstTensor scales = call.x_scales.tensor.selected(1, 0);
  const Tensor out_scales = call.out_scales.tensor.selected(1, 0);
  Matrix floats(DType::f32, 3, 4, false, Guard::after), stack(DType::f32, 12, 4, false, Guard::after);
  EXPECT_EQ(message(floats.tensor, scales, experts.grouped(), call.out.tensor, out_scales),
            name + "x is f32, but must be i8");
  EXPECT_EQ(message(call.x.tensor, {}, experts.grouped(), call.out.tensor, out_scales), name + "x_scales is absent");
  EXPECT_EQ(message(call.x.tensor, scales, experts.grouped(), call.out.tensor, {}), name + "out_scales is absent");
  EXPECT_EQ(message(call.x.tensor, scales, ConstTensor::contiguous(DType::f32, {2, 6, 4}, stack.tensor.data),
                    call.out.tensor, out_scales),
            name + "the weight is not int8 or int4");
  EXPECT_EQ(message(call.x.tensor, scales, experts.grouped(), call.out.tensor.narrowed(1, 0, 2), out_scales),
            name + "out dim 1 (half_n) is 2, but the weight has n = 6, of which swiglu makes half");
  const IntExperts odd = test::int_experts(one_context(), 2, 5, 4, 8, 1, false, random);
  EXPECT_EQ(message(call.x.tensor, scales, odd.grouped(), call.out.tensor, out_scales),
            name + "the weight has n = 5, but swiglu needs two halves");
  EXPECT_EQ(message(call.x.tensor, scales.narrowed(0, 0, 2), experts.grouped(), call.out.tensor, out_scales),
            name + "x_scales dim 0 (m) is 2, but x set m = 3");
}

// ---- Gradients

// Every group's by a call of its own: the same bits; what belongs to no group or to an empty one is zero.
void check_gradients(const TestContext& t, const std::vector<int64_t>& rows, DType dtype, Random& random) {
  const auto count = static_cast<int64_t>(rows.size());
  const DrawnList list(rows, random);
  const int64_t m = list.total() + random.integer(0, 2), n = random.integer(1, 70), k = random.integer(1, 70);
  SCOPED_TRACE(t.name + ", " + to_string(dtype) + ", n " + std::to_string(n) + ", k " + std::to_string(k));
  const bool transposed = random.chance(0.5);
  Matrix grad_out(dtype, m, n, random.chance(0.3), Guard::after), x(dtype, m, k, random.chance(0.3), Guard::after),
      weight(dtype, count * n, k, false, Guard::before), grad_x(DType::f32, m, k, random.chance(0.3), Guard::after),
      grad_weight(DType::f32, count * n, k, false, Guard::after),
      grad_bias(DType::f32, count, n, random.chance(0.3), Guard::after);
  test::fill(grad_out.tensor, Fill::normal, random);
  test::fill(x.tensor, Fill::normal, random);
  test::fill(weight.tensor, Fill::normal, random);
  ConstTensor weights = ConstTensor::contiguous(dtype, {count, n, k}, weight.tensor.data);
  if (transposed) weights = ConstTensor::contiguous(dtype, {count, k, n}, weight.tensor.data).transposed(1, 2);
  const Tensor grad_weights = Tensor::contiguous(DType::f32, {count, n, k}, grad_weight.tensor.data);
  const Status status = grouped_matmul_backward(t.context, grad_out.tensor, x.tensor, weights, list.list,
                                                {grad_x.tensor, grad_weights, grad_bias.tensor});
  ASSERT_TRUE(status.ok()) << status.message();
  int64_t first = 0;
  for (int64_t e = 0; e < count; ++e) {
    const int64_t some = rows[static_cast<size_t>(e)];
    Matrix gx(DType::f32, some, k, false, Guard::after), gw(DType::f32, n, k, false, Guard::after),
        gb(DType::f32, 1, n, false, Guard::after);
    ASSERT_TRUE(matmul_backward(t.context, grad_out.tensor.narrowed(0, first, some), x.tensor.narrowed(0, first, some),
                                weights.selected(0, e), {gx.tensor, gw.tensor, gb.tensor.selected(0, 0)})
                    .ok());
    EXPECT_TRUE(test::same_bits_or_nan(grad_x.tensor.narrowed(0, first, some), gx.tensor)) << "group " << e;
    EXPECT_TRUE(test::same_bits_or_nan(grad_weights.selected(0, e), gw.tensor)) << "group " << e;
    EXPECT_TRUE(test::same_bits_or_nan(grad_bias.tensor.selected(0, e), gb.tensor.selected(0, 0))) << "group " << e;
    for (int64_t i = 0; some == 0 && i < n * k; ++i) {
      ASSERT_EQ(test::get(grad_weights.selected(0, e), i), 0) << "group " << e;
    }
    first += some;
  }
  for (int64_t i = first * k; i < m * k; ++i) ASSERT_EQ(test::get(grad_x.tensor, i), 0);
}

TEST(GroupedMatmulBackward, IsALoopOfGradients) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (const std::vector<int64_t>& rows :
         {std::vector<int64_t>{3, 0, 5, 1, 0, 2}, {0, 0, 20, 0}, {0, 0, 0}, test::drawn_rows(4, random)}) {
      check_gradients(t, rows, random.pick({DType::f32, DType::bf16, DType::f16}), random);
      if (HasFatalFailure() || HasNonfatalFailure()) return;
    }
  }
}

// The only row may have any stride, also where an empty group begins behind it.
TEST(GroupedMatmulBackward, IgnoresTheStrideOfOneRow) {
  std::vector<float> grad_out = {1, 2, 3}, x = {4, 5}, grad_weight(12, 7);
  std::vector<int64_t> ends = {1, 1};
  ConstTensor g = ConstTensor::contiguous(DType::f32, {1, 3}, grad_out.data()),
              row = ConstTensor::contiguous(DType::f32, {1, 2}, x.data());
  g.strides[0] = INT64_MAX, row.strides[0] = INT64_MIN;
  ASSERT_TRUE(grouped_matmul_backward(one_context(), g, row, {},
                                      {ConstTensor::contiguous(DType::i64, {2}, ends.data())},
                                      {.weight = Tensor::contiguous(DType::f32, {2, 3, 2}, grad_weight.data())})
                  .ok());
  EXPECT_EQ(grad_weight, (std::vector<float>{4, 5, 8, 10, 12, 15, 0, 0, 0, 0, 0, 0}));
}

// Integers: gradients by the definition, exactly.
TEST(GroupedMatmulBackward, SumsSmallIntegersExactly) {
  Random random(test::seed());
  constexpr int64_t kM = 11, kN = 5, kK = 7;
  const DrawnList list({4, 0, 6}, random);
  Matrix grad_out(DType::f64, kM, kN, false, Guard::after), x(DType::f64, kM, kK, false, Guard::after),
      weight(DType::f64, 3 * kN, kK, false, Guard::after), grad_x(DType::f64, kM, kK, false, Guard::after),
      grad_weight(DType::f64, 3 * kN, kK, false, Guard::after), grad_bias(DType::f64, 3, kN, false, Guard::after);
  for (const Matrix* matrix : {&grad_out, &x, &weight}) test::fill(matrix->tensor, Fill::small_integers, random);
  const auto stacked = [](const Matrix& matrix) {
    return Tensor::contiguous(DType::f64, {3, kN, kK}, matrix.tensor.data);
  };
  ASSERT_TRUE(grouped_matmul_backward(one_context(), grad_out.tensor, x.tensor, stacked(weight), list.list,
                                      {grad_x.tensor, stacked(grad_weight), grad_bias.tensor})
                  .ok());
  const auto group_of = [](int64_t i) { return i < 4 ? 0 : i < 10 ? 2 : 3; };
  const auto at = [](const Matrix& matrix, int64_t i, int64_t j) {
    return test::get(matrix.tensor, i * matrix.tensor.shape[1] + j);
  };
  for (int64_t i = 0; i < kM; ++i) {
    for (int64_t t = 0; t < kK; ++t) {
      double sum = 0;
      for (int64_t j = 0; group_of(i) < 3 && j < kN; ++j)
        sum += at(grad_out, i, j) * at(weight, group_of(i) * kN + j, t);
      ASSERT_EQ(at(grad_x, i, t), sum);
    }
  }
  for (int64_t e = 0; e < 3; ++e) {
    for (int64_t j = 0; j < kN; ++j) {
      double bias = 0;
      for (int64_t i = 0; i < kM; ++i) bias += group_of(i) == e ? at(grad_out, i, j) : 0;
      ASSERT_EQ(at(grad_bias, e, j), bias);
      for (int64_t t = 0; t < kK; ++t) {
        double sum = 0;
        for (int64_t i = 0; i < kM; ++i) sum += group_of(i) == e ? at(grad_out, i, j) * at(x, i, t) : 0;
        ASSERT_EQ(at(grad_weight, e * kN + j, t), sum);
      }
    }
  }
}

TEST(GroupedMatmulBackward, Refuses) {
  Matrix grad_out(DType::f32, 4, 3, false, Guard::after), x(DType::f32, 4, 2, false, Guard::after),
      weight(DType::f32, 6, 2, false, Guard::after), grad_x(DType::f32, 4, 2, false, Guard::after);
  const ConstTensor stack = ConstTensor::contiguous(DType::f32, {2, 3, 2}, weight.tensor.data);
  const auto message = [&](std::vector<int64_t> ends, const ConstTensor& w, const MatmulGradients& gradients) {
    const auto list = ConstTensor::contiguous(DType::i64, {static_cast<int64_t>(ends.size())}, ends.data());
    return grouped_matmul_backward(one_context(), grad_out.tensor, x.tensor, w, {list}, gradients).message();
  };
  const std::string name = "grouped_matmul_backward: ";
  EXPECT_EQ(message({1, 5}, stack, {.x = grad_x.tensor}), name + "group_list[1] is 5, but x has 4 rows");
  EXPECT_EQ(message({1, 2, 3}, stack, {.x = grad_x.tensor}),
            name + "weight dim 0 (groups) is 2, but group_list set groups = 3");
  EXPECT_EQ(message({1, 2}, weight.tensor, {.x = grad_x.tensor}),
            name + "weight has rank 2, but [groups, n, k] has rank 3");
  EXPECT_EQ(message({1, 2}, stack, {.x = grad_x.tensor.narrowed(0, 0, 3)}),
            name + "gradients.x dim 0 (m) is 3, but grad_out set m = 4");
  EXPECT_EQ(message({1, 2}, stack, {.x = grad_out.tensor.narrowed(1, 0, 2)}),
            name + "gradients.x f32 [4, 2] overlaps grad_out f32 [4, 3] in memory, but an output must not");
  for (const double value : test::to_doubles(grad_x.tensor)) EXPECT_TRUE(std::isnan(value));
}

}  // namespace
}  // namespace opst

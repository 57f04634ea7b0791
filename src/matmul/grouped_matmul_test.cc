// grouped_matmul: each group's rows have the bits of a product of their own, and what is refused.
#include <gtest/gtest.h>

#include "core/int_math.h"
#include "matmul/test_groups.h"
#include "testing/contexts.h"
#include "testing/effort.h"

namespace opst {
namespace {

using test::contexts;
using test::contexts_with_threads;
using test::DrawnList;
using test::Experts;
using test::Fill;
using test::Guard;
using test::Matrix;
using test::one_context;
using test::Random;
using test::TestContext;

// The tensors of a grouped call, with every option by chance.
struct Call {
  const Experts& experts;
  DrawnList list;
  int64_t m, width;
  Matrix x, out, expected, x_scales, bias, residual, out_scales, expected_scales, smooth;
  GroupedMatmulOptions options;
  std::string about;

  // One more row than the groups have, now and then.
  Call(const Experts& e, const std::vector<int64_t>& rows, Activation activation, DType x_type, DType out_type,
       Random& random)
      : experts(e),
        list(rows, random),
        m(list.total() + random.pick<int64_t>({0, 0, 1, 7})),
        width(test::halves(activation) ? e.n / 2 : e.n),
        x(x_type, m, e.k, random.chance(0.3), Guard::after),
        out(out_type, m, width, random.chance(0.3), Guard::after),
        expected(out_type, m, width, false, Guard::after),
        x_scales(DType::f32, m, 2, false, Guard::after),
        bias(random.pick({DType::f32, DType::bf16}), static_cast<int64_t>(rows.size()), e.n, random.chance(0.3),
             Guard::after),
        residual(random.pick({DType::f32, DType::f16}), m, width, random.chance(0.3), Guard::after),
        out_scales(DType::f32, m, 2, false, Guard::after),
        expected_scales(DType::f32, m, 2, false, Guard::after),
        smooth(DType::f32, static_cast<int64_t>(rows.size()), width, false, Guard::after) {
    for (const Matrix* matrix : {&x, &x_scales, &bias, &residual, &smooth}) {
      test::fill(matrix->tensor, Fill::normal, random);
    }
    options.activation = activation;
    if (x_type == DType::i8 && out_type != DType::i32) options.x_scales = x_scales.tensor.selected(1, 0);
    if (out_type == DType::i32) return;
    if (random.chance(0.5)) options.bias = bias.tensor;
    if (random.chance(0.4)) options.residual = residual.tensor;
    if (!e.integers) options.activations = random.pick({ActivationType::exact, ActivationType::int8});
    options.batch_invariant = !e.integers && random.chance(0.3);
    if (out_type != DType::i8) return;
    options.out_scales = out_scales.tensor.selected(1, 0);
    if (random.chance(0.6)) options.smooth_scales = random.chance(0.5) ? smooth.tensor : smooth.tensor.selected(1, 0);
  }

  // A loop of single products.
  void expect_loop(Context& context) {
    int64_t first = 0;
    test::fill(expected.tensor, Fill::zeros, *std::make_unique<Random>(1));
    test::fill(expected_scales.tensor, Fill::zeros, *std::make_unique<Random>(1));
    for (size_t e = 0; e < list.rows.size(); ++e) {
      const int64_t rows = list.rows[e];
      GroupedMatmulOptions o = options;
      if (options.x_scales) o.x_scales = options.x_scales.narrowed(0, first, rows);
      if (options.bias) o.bias = options.bias.selected(0, static_cast<int64_t>(e));
      if (options.residual) o.residual = options.residual.narrowed(0, first, rows);
      const ConstTensor some = x.tensor.narrowed(0, first, rows);
      const Tensor result = expected.tensor.narrowed(0, first, rows);
      o.out_scales = {};
      Status status;
      if (options.out_scales) {
        Matrix wide(DType::f32, rows, width, false, Guard::after), factors(DType::f32, 1, width, false, Guard::after);
        status = experts.single(context, static_cast<int64_t>(e), some, wide.tensor, o);
        DynamicQuantOptions quant;
        if (options.smooth_scales) {
          for (int64_t j = 0; j < width; ++j) {
            const auto group = static_cast<int64_t>(e);
            test::set(factors.tensor, j,
                      test::get(smooth.tensor, group * width + (options.smooth_scales.rank == 2 ? j : 0)));
          }
          quant.smooth_scales = factors.tensor.selected(0, 0);
        }
        if (status.ok()) {
          status = dynamic_quant(context, wide.tensor, result,
                                 expected_scales.tensor.selected(1, 0).narrowed(0, first, rows), quant);
        }
      } else {
        status = experts.single(context, static_cast<int64_t>(e), some, result, o);
      }
      ASSERT_TRUE(status.ok()) << status.message();
      first += rows;
    }
  }
  void check(Context& context) {
    expect_loop(context);
    const Status status = grouped_matmul(context, x.tensor, experts.grouped(), list.list, out.tensor, options);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(test::same_bits_or_nan(out.tensor, expected.tensor));
    EXPECT_TRUE(out.memory.slack_intact());
    if (options.out_scales) {
      EXPECT_TRUE(test::same_bits_or_nan(options.out_scales, expected_scales.tensor.selected(1, 0)));
    }
  }
};

// Every kind of weight, dtype and option: the bits of single products, in every context, so for every number of threads.
TEST(GroupedMatmul, IsALoopOfProducts) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (int round = 0; round < 12; ++round) {
      const int64_t count = random.integer(1, 6);
      const Experts experts = test::drawn_experts(one_context(), count, random);
      const bool bytes = experts.integers && random.chance(0.6);
      const DType floats = random.pick({DType::f32, DType::bf16, DType::f16});
      const DType out = random.chance(0.3) ? DType::i8 : random.pick({DType::f32, DType::bf16, DType::f16});
      const Activation activation = random.pick(
          {Activation::none, Activation::silu, Activation::gelu_erf, Activation::swiglu, Activation::swiglu_swapped});
      Call call(experts, test::drawn_rows(count, random), activation, bytes ? DType::i8 : floats, out, random);
      SCOPED_TRACE(t.name + ", " + experts.about + ", n " + std::to_string(experts.n) + ", k " +
                   std::to_string(experts.k) + ", m " + std::to_string(call.m) + ", " + to_string(activation) + ", x " +
                   to_string(call.x.tensor.dtype) + ", out " + to_string(out));
      call.check(t.context);
      if (HasFatalFailure() || HasNonfatalFailure()) return;
    }
  }
}

// Against sums of integers that share nothing with the library: every product is exact.
TEST(GroupedMatmul, SumsSmallIntegersExactly) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    const int64_t count = 4, n = random.pick<int64_t>({1, 15, 33, 130}), k = random.pick<int64_t>({1, 31, 64, 600});
    const DType dtype = random.pick({DType::f32, DType::bf16, DType::f16});
    Matrix weight(dtype, count * n, k, false, Guard::before);
    test::fill(weight.tensor, Fill::small_integers, random);
    const ConstTensor stack = ConstTensor::contiguous(dtype, {count, n, k}, weight.tensor.data);
    const DrawnList list(random.pick<std::vector<int64_t>>({{3, 0, 12, 1}, {0, 0, 40, 0}, {9, 9, 9, 9}, {0, 0, 0, 0}}),
                         random);
    const int64_t m = list.total() + 2;
    Matrix x(DType::f32, m, k, false, Guard::after), out(DType::f32, m, n, false, Guard::after);
    test::fill(x.tensor, Fill::small_integers, random);
    const PackedWeight packed = std::move(PackedWeight::pack_stack(t.context, stack).value());
    for (const GroupedWeight& w : {GroupedWeight(packed), GroupedWeight(stack)}) {
      ASSERT_TRUE(grouped_matmul(t.context, x.tensor, w, list.list, out.tensor).ok());
      int64_t first = 0;
      const std::vector<double> got = test::to_doubles(out.tensor), xs = test::to_doubles(x.tensor),
                                ws = test::to_doubles(weight.tensor);
      for (int64_t e = 0; e <= count; ++e) {
        const int64_t rows = e == count ? 2 : list.rows[static_cast<size_t>(e)];
        for (int64_t i = first; i < first + rows; ++i) {
          for (int64_t j = 0; j < n; ++j) {
            double sum = 0;
            for (int64_t l = 0; e < count && l < k; ++l) {
              sum += xs[static_cast<size_t>(i * k + l)] * ws[static_cast<size_t>((e * n + j) * k + l)];
            }
            ASSERT_EQ(got[static_cast<size_t>(i * n + j)], sum)
                << t.name << ", group " << e << ", row " << i << ", column " << j;
          }
        }
        first += rows;
      }
    }
  }
}

// int8 sums without scales are i32.
TEST(GroupedMatmul, GivesBareSumsOfIntegers) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    const test::IntExperts experts = test::int_experts(one_context(), 3, 2 * random.integer(1, 20), 40,
                                                       random.pick({8, 4}), 1, random.chance(0.5), random);
    Call call(experts, {2, 0, 15}, Activation::none, DType::i8, DType::i32, random);
    SCOPED_TRACE(t.name + ", " + experts.about);
    call.check(t.context);
  }
}

// A bias of i32 joins the sums of its group.
TEST(GroupedMatmul, AddsAnIntegerBiasOfEachGroup) {
  Random random(test::seed());
  const test::IntExperts experts = test::int_experts(one_context(), 2, 20, 24, 8, 1, false, random);
  Call call(experts, {3, 11}, Activation::none, DType::i8, DType::f32, random);
  std::vector<int32_t> bias;
  for (int i = 0; i < 2 * 20; ++i) bias.push_back(static_cast<int32_t>(random.integer(-1000000, 1000000)));
  call.options.bias = ConstTensor::contiguous(DType::i32, {2, 20}, bias.data());
  call.check(one_context());
}

// Rows in fixed point beside rows that it cannot hold: each group is treated like a call of its own.
TEST(GroupedMatmul, FollowsRowsThatFixedPointCannotHold) {
  Random random(test::seed());
  for (const TestContext& t : contexts_with_threads(3)) {
    const Experts experts = test::block_experts(one_context(), 4, 30, 64, QuantFormat::q4_1, random);
    for (const DType out : {DType::f32, DType::i8}) {
      Call call(experts, {1, 2, 2, 12}, Activation::swiglu, DType::f32, out, random);
      call.options.activations = ActivationType::exact;
      test::set(call.x.tensor, 0, std::numeric_limits<double>::quiet_NaN());
      test::set(call.x.tensor, 64 * 3 + 5, 1e37);
      SCOPED_TRACE(t.name + ", out " + to_string(out));
      call.check(t.context);
    }
  }
}

// All tokens on one expert, one group, hundreds of groups, most of them empty, no rows at all, no group at all.
TEST(GroupedMatmul, TakesEveryKindOfList) {
  Random random(test::seed());
  std::vector<int64_t> sparse(512);
  sparse[7] = 1, sparse[300] = 20, sparse[511] = 3;
  for (const std::vector<int64_t>& rows : {std::vector<int64_t>{0, 0, 33, 0}, {17}, {0}, {0, 0, 0}, sparse}) {
    const auto count = static_cast<int64_t>(rows.size());
    const Experts experts = test::float_experts(one_context(), count, 18, 20, DType::bf16, random);
    Call call(experts, rows, Activation::none, DType::bf16, DType::f32, random);
    SCOPED_TRACE(experts.about + ", " + std::to_string(count) + " groups");
    call.check(contexts_with_threads(2).back().context);
  }
  float number = 0;
  const PackedWeight none = std::move(
      PackedWeight::pack_stack(one_context(), ConstTensor::contiguous(DType::f32, {0, 3, 2}, nullptr)).value());
  Matrix x(DType::f32, 4, 2, false, Guard::after), out(DType::f32, 4, 3, false, Guard::after);
  const GroupList list{ConstTensor::contiguous(DType::i64, {0}, &number)};
  ASSERT_TRUE(grouped_matmul(one_context(), x.tensor, none, list, out.tensor).ok());
  EXPECT_EQ(test::to_doubles(out.tensor), std::vector<double>(12, 0.0));
}

// The weight of an empty group is not read, x and residual behind the last group neither: they are NaN, and no row is.
TEST(GroupedMatmul, ReadsNothingOfEmptyGroups) {
  constexpr int64_t kN = 20, kK = 33;
  Random random(test::seed());
  Matrix x(DType::f32, 9, kK, false, Guard::after), out(DType::f32, 9, kN, false, Guard::after);
  Matrix weight(DType::f32, 3 * kN, kK, false, Guard::after), residual(DType::f32, 9, kN, false, Guard::after);
  test::fill(x.tensor, Fill::nan, random);
  test::fill(weight.tensor, Fill::nan, random);
  test::fill(residual.tensor, Fill::nan, random);
  test::fill(x.tensor.narrowed(0, 0, 7), Fill::normal, random);
  test::fill(residual.tensor.narrowed(0, 0, 7), Fill::normal, random);
  test::fill(weight.tensor.narrowed(0, kN, kN), Fill::normal, random);
  const ConstTensor stack = ConstTensor::contiguous(DType::f32, {3, kN, kK}, weight.tensor.data);
  const DrawnList list({0, 7, 0}, random);
  ASSERT_TRUE(
      grouped_matmul(one_context(), x.tensor, stack, list.list, out.tensor, {.residual = residual.tensor}).ok());
  for (int64_t i = 0; i < 9 * kN; ++i) {
    const double value = test::get(out.tensor, i);
    ASSERT_TRUE(i < 7 * kN ? std::isfinite(value) : value == 0) << i;
  }
}

// x += f(x): the residual is out itself; rows of no group become zeros all the same.
TEST(GroupedMatmul, AddsInPlace) {
  Random random(test::seed());
  const Experts experts = test::float_experts(one_context(), 2, 24, 16, DType::f32, random);
  Matrix x(DType::f32, 14, 16, false, Guard::after), out(DType::f32, 14, 24, false, Guard::after),
      expected(DType::f32, 14, 24, false, Guard::after), before(DType::f32, 14, 24, false, Guard::after);
  test::fill(x.tensor, Fill::normal, random);
  test::fill(before.tensor, Fill::normal, random);
  test::copy(before.tensor, out.tensor);
  const DrawnList list({3, 10}, random);
  ASSERT_TRUE(grouped_matmul(one_context(), x.tensor, experts.grouped(), list.list, expected.tensor,
                             {.residual = before.tensor})
                  .ok());
  ASSERT_TRUE(
      grouped_matmul(one_context(), x.tensor, experts.grouped(), list.list, out.tensor, {.residual = out.tensor}).ok());
  EXPECT_TRUE(test::same_bits_or_nan(out.tensor, expected.tensor));
}

// Large operands are multiplied in several waves; f64 by plain loops.
TEST(GroupedMatmul, MultipliesInWaves) {
  Random random(test::seed());
  constexpr int64_t kN = 1024, kK = 1100, kCount = 9;
  Context& context = contexts_with_threads(1).back().context;
  Matrix weight(DType::f32, kCount * kN, kK, false, Guard::after);
  test::fill(weight.tensor, Fill::uniform, random);
  const ConstTensor stack = ConstTensor::contiguous(DType::f32, {kCount, kN, kK}, weight.tensor.data);
  const std::vector<int64_t> rows = {1, 9, 0, 3, 2, 30, 1, 1, 1};
  const DrawnList list(rows, random);
  Matrix x(DType::f32, list.total(), kK, false, Guard::after), out(DType::f32, list.total(), kN, false, Guard::after),
      expected(DType::f32, list.total(), kN, false, Guard::after);
  test::fill(x.tensor, Fill::uniform, random);
  const MatmulProblem product = matmul_problem(x.tensor, ConstTensor(stack.selected(0, 0)), out.tensor).value();
  const GroupedMatmulPlan plan = plan_grouped_matmul(product, rows, context.machine(), 1).value();
  EXPECT_EQ(plan.groups, 8);
  EXPECT_GT(plan.waves, 1) << to_string(plan);
  EXPECT_LT(plan.scratch_bytes_shared, 20 << 20);
  EXPECT_EQ(to_string(plan_grouped_matmul(product, rows, context.machine(), -5).value()), to_string(plan));
  ASSERT_TRUE(grouped_matmul(context, x.tensor, stack, list.list, out.tensor).ok());
  int64_t first = 0;
  for (int64_t e = 0; e < kCount; ++e) {
    const int64_t count = rows[static_cast<size_t>(e)];
    ASSERT_TRUE(matmul(context, x.tensor.narrowed(0, first, count), ConstTensor(stack.selected(0, e)),
                       expected.tensor.narrowed(0, first, count))
                    .ok());
    first += count;
  }
  EXPECT_TRUE(test::same_bits_or_nan(out.tensor, expected.tensor));
}

TEST(GroupedMatmul, MultipliesF64) {
  Random random(test::seed());
  Matrix x(DType::f64, 7, 5, true, Guard::after), out(DType::f64, 7, 4, false, Guard::after),
      expected(DType::f64, 7, 4, false, Guard::after), weight(DType::f64, 8, 5, false, Guard::after);
  test::fill(x.tensor, Fill::normal, random);
  test::fill(weight.tensor, Fill::normal, random);
  test::fill(expected.tensor, Fill::zeros, random);
  const ConstTensor stack = ConstTensor::contiguous(DType::f64, {2, 4, 5}, weight.tensor.data);
  const DrawnList list({2, 4}, random);
  ASSERT_TRUE(grouped_matmul(one_context(), x.tensor, stack, list.list, out.tensor).ok());
  for (int64_t e = 0; e < 2; ++e) {
    const int64_t first = e * 2, rows = 2 + e * 2;
    ASSERT_TRUE(matmul(one_context(), x.tensor.narrowed(0, first, rows), ConstTensor(stack.selected(0, e)),
                       expected.tensor.narrowed(0, first, rows))
                    .ok());
  }
  EXPECT_EQ(test::to_doubles(out.tensor), test::to_doubles(expected.tensor));
}

// A call takes the memory that its plan says, and nothing more in the second call.
TEST(GroupedMatmul, TakesTheMemoryOfItsPlan) {
  Random random(test::seed());
  const std::vector<int64_t> rows = {1, 0, 40, 3, 9};
  const auto rounded = [](int64_t bytes) { return round_up(bytes, bytes < (2 << 20) ? 64 << 10 : 2 << 20); };
  for (const Isa isa : test::levels()) {
    for (const int threads : {1, 3}) {
      for (const bool packed : {false, true}) {
        constexpr int64_t kN = 300, kK = 512;
        Matrix weight(DType::bf16, 5 * kN, kK, false, Guard::after);
        test::fill(weight.tensor, Fill::normal, random);
        const ConstTensor stack = ConstTensor::contiguous(DType::bf16, {5, kN, kK}, weight.tensor.data);
        const PackedWeight in_advance = std::move(PackedWeight::pack_stack(one_context(), stack).value());
        const DrawnList list(rows, random);
        Matrix x(DType::bf16, list.total(), kK, false, Guard::after),
            out(DType::f32, list.total(), kN, false, Guard::after);
        test::fill(x.tensor, Fill::normal, random);
        Context context = std::move(Context::create({.isa = isa, .num_threads = threads}).value());
        MatmulProblem product = matmul_problem(x.tensor, ConstTensor(stack.selected(0, 0)), out.tensor).value();
        if (packed) product.weight = MatmulWeight::packed;
        const GroupedMatmulPlan plan = plan_grouped_matmul(product, rows, context.machine(), threads).value();
        SCOPED_TRACE(to_string(plan));
        for (int call = 0; call < 2; ++call) {
          ASSERT_TRUE(grouped_matmul(context, x.tensor, packed ? GroupedWeight(in_advance) : GroupedWeight(stack),
                                     list.list, out.tensor)
                          .ok());
          EXPECT_EQ(
              context.workspace_bytes(),
              rounded(plan.list_bytes) + rounded(plan.scratch_bytes_shared + threads * plan.scratch_bytes_per_worker));
        }
        EXPECT_EQ(plan.groups, 4);
        EXPECT_EQ(plan.waves, 1);
        EXPECT_EQ(to_string(plan.smallest.path), std::string("few_rows"));
        EXPECT_EQ(to_string(plan.largest.path), std::string("many_rows"));
      }
    }
  }
}

// ---- What is refused

struct Refused : testing::Test {
  static constexpr int64_t kN = 6, kK = 4;
  Random random{1};
  Matrix x{DType::f32, 8, kK, false, Guard::after}, out{DType::f32, 8, kN, false, Guard::after};
  Experts experts = test::float_experts(one_context(), 3, kN, kK, DType::f32, random);
  PackedWeight stack = std::move(
      PackedWeight::pack_stack(one_context(), ConstTensor::contiguous(DType::f32, {3, kN, kK}, zeros.data())).value());
  static inline const std::vector<float> zeros = std::vector<float>(1000);

  std::string message(const std::vector<int64_t>& list, GroupListType type, const GroupedMatmulOptions& options = {},
                      const GroupedWeight* weight = nullptr) {
    const auto tensor = ConstTensor::contiguous(DType::i64, {static_cast<int64_t>(list.size())}, list.data());
    const Status status = grouped_matmul(one_context(), x.tensor, weight == nullptr ? GroupedWeight(stack) : *weight,
                                         {tensor, type}, out.tensor, options);
    for (const double value : test::to_doubles(out.tensor)) EXPECT_TRUE(std::isnan(value)) << "written";
    return status.ok() ? "accepted" : status.message();
  }
};

TEST_F(Refused, Lists) {
  using enum GroupListType;
  EXPECT_EQ(message({2, 5, 4}, ends),
            "grouped_matmul: group_list[2] is 4, but group_list[1] is 5, and ends do not decrease");
  EXPECT_EQ(message({2, 5, 9}, ends), "grouped_matmul: group_list[2] is 9, but x has 8 rows");
  EXPECT_EQ(message({-1, 5, 6}, ends), "grouped_matmul: group_list[0] is -1, but must not be negative");
  EXPECT_EQ(message({4, -1, 2}, counts), "grouped_matmul: group_list[1] is -1, but must not be negative");
  EXPECT_EQ(message({4, 1 << 30, 2}, counts),
            "grouped_matmul: group_list[1] is 1073741824, but x has 4 rows behind the groups before");
  EXPECT_EQ(message({4, INT64_MAX, INT64_MAX}, counts),
            "grouped_matmul: group_list[1] is 9223372036854775807, but x has 4 rows behind the groups before");
  EXPECT_EQ(message({4, 2}, counts), "grouped_matmul: weight holds groups = 3, but group_list set groups = 2");
  EXPECT_EQ(message({4, 2, 1}, static_cast<GroupListType>(7)),
            "grouped_matmul: the type of group_list is 7, which is no GroupListType");
  const std::vector<float> floats(3);
  const Status status = grouped_matmul(one_context(), x.tensor, stack,
                                       {ConstTensor::contiguous(DType::f32, {3}, floats.data())}, out.tensor);
  EXPECT_EQ(status.message(), "grouped_matmul: group_list is f32, but must be i64 or i32");
  int64_t zero = 0;
  ConstTensor many = ConstTensor::contiguous(DType::i64, {int64_t{1} << 40}, &zero);
  many.strides[0] = 0;
  EXPECT_EQ(grouped_matmul(one_context(), x.tensor, stack, {many}, out.tensor).message(),
            "grouped_matmul: group_list has 1099511627776 groups, but there may be at most 1048576");
}

TEST_F(Refused, Tensors) {
  const std::vector<int64_t> list = {2, 4, 8};
  const auto ends = GroupListType::ends;
  const ConstTensor bias = ConstTensor::contiguous(DType::f32, {2, kN}, zeros.data());
  EXPECT_EQ(message(list, ends, {.bias = bias}),
            "grouped_matmul: bias dim 0 (groups) is 2, but group_list set groups = 3");
  const ConstTensor short_bias = ConstTensor::contiguous(DType::f32, {3, 5}, zeros.data());
  EXPECT_EQ(message(list, ends, {.bias = short_bias}), "grouped_matmul: out dim 1 (n) is 6, but bias set n = 5");
  EXPECT_EQ(message(list, ends, {.smooth_scales = bias}),
            "grouped_matmul: smooth_scales dim 0 (groups) is 2, but group_list set groups = 3");
  const ConstTensor smooth = ConstTensor::contiguous(DType::f32, {3}, zeros.data());
  EXPECT_EQ(message(list, ends, {.smooth_scales = smooth}),
            "grouped_matmul: smooth_scales are of an out that is quantised, but out_scales is absent");
  EXPECT_EQ(message(list, ends, {.x_scales = ConstTensor::contiguous(DType::f32, {8}, zeros.data())}),
            "grouped_matmul: x_scales belong to int8 or int4 weights");
  EXPECT_EQ(message(list, ends, {.activation = Activation::swiglu}),
            "grouped_matmul: out dim 1 (half_n) is 6, but the weight has n = 6, of which swiglu makes half");
  const Tensor narrow = x.tensor.narrowed(1, 0, 3);
  EXPECT_EQ(
      grouped_matmul(one_context(), narrow, stack, {ConstTensor::contiguous(DType::i64, {3}, list.data())}, out.tensor)
          .message(),
      "grouped_matmul: x dim 1 (k) is 3, but the weight has k = 4");
}

TEST_F(Refused, Weights) {
  const std::vector<int64_t> list = {2, 4};
  std::vector<PackedWeight> weights;
  weights.push_back(test::packed(one_context(), ConstTensor::contiguous(DType::f32, {kN, kK}, zeros.data())));
  weights.push_back(test::packed(one_context(), ConstTensor::contiguous(DType::f32, {kN + 1, kK}, zeros.data())));
  const GroupedWeight uneven(weights);
  EXPECT_EQ(message(list, GroupListType::ends, {}, &uneven),
            "grouped_matmul: weight 1 is f32 [7, 4], but weight 0 is f32 [6, 4]");
  const GroupedWeight none{std::span<const PackedWeight>()};
  EXPECT_EQ(message({}, GroupListType::ends, {}, &none), "grouped_matmul: no weight is given");
  const ConstTensor plain = ConstTensor::contiguous(DType::f32, {3, kN, kK}, zeros.data());
  const GroupedWeight three(plain);
  EXPECT_EQ(message(list, GroupListType::ends, {}, &three),
            "grouped_matmul: weight dim 0 (groups) is 3, but group_list set groups = 2");
  // A stack where one weight is meant.
  EXPECT_EQ(matmul(one_context(), x.tensor, stack, out.tensor).message(),
            "matmul: the weight is a stack of 3 matrices, of which grouped_matmul makes products");
  const int64_t row = 3 * kN;
  EXPECT_EQ(lookup_rows(one_context(), stack, ConstTensor::contiguous(DType::i64, {1}, &row),
                        out.tensor.narrowed(0, 0, 1).narrowed(1, 0, 4))
                .message(),
            "lookup_rows: rows[0] is 18, but the matrix has 18 rows");
}

TEST_F(Refused, Stacks) {
  const std::vector<unsigned char> bytes(4 * 34);
  const QuantMatrix two{QuantFormat::q8_0, 2, 32, bytes.data(), 68}, three{QuantFormat::q8_0, 3, 32, bytes.data(), 102};
  const QuantMatrix uneven[] = {two, three}, lacking[] = {two, {QuantFormat::q8_0, 2, 32, bytes.data(), 60}};
  EXPECT_EQ(PackedWeight::pack_stack(one_context(), uneven).status().message(),
            "PackedWeight::pack_stack: weight 1 is q8_0 [3, 32], but weight 0 is q8_0 [2, 32]");
  EXPECT_EQ(PackedWeight::pack_stack(one_context(), lacking).status().message(),
            "PackedWeight::pack_stack: weight 1 has 60 bytes, but q8_0 [2, 32] needs 68");
  EXPECT_EQ(PackedWeight::pack_stack(one_context(), ConstTensor::contiguous(DType::f32, {2, 3}, zeros.data()))
                .status()
                .message(),
            "PackedWeight::pack_stack: weights has rank 2, but [count, n, k] has rank 3");
  const std::vector<int8_t> q(16);
  const IntMatrix whole{ConstTensor::contiguous(DType::i8, {2, 4}, q.data()),
                        ConstTensor::contiguous(DType::f32, {2, 1}, zeros.data())};
  IntMatrix split = whole, zeros_too = whole, wrong = whole;
  split.scales = ConstTensor::contiguous(DType::f32, {2, 2}, zeros.data());
  zeros_too.zeros = ConstTensor::contiguous(DType::i8, {2, 1}, q.data());
  wrong.scales = ConstTensor::contiguous(DType::f32, {3, 1}, zeros.data());
  const IntMatrix uneven_groups[] = {whole, split}, some_zeros[] = {whole, zeros_too}, bad[] = {whole, wrong};
  EXPECT_EQ(
      PackedIntWeight::pack_stack(one_context(), uneven_groups).status().message(),
      "PackedIntWeight::pack_stack: weight 1 is int8 [2, 4] in 2 groups, but weight 0 is int8 [2, 4] in 1 groups");
  EXPECT_EQ(PackedIntWeight::pack_stack(one_context(), some_zeros).status().message(),
            "PackedIntWeight::pack_stack: weight 1 is int8 [2, 4] in 1 groups with zeros, but weight 0 is int8 [2, 4] "
            "in 1 groups");
  EXPECT_EQ(PackedIntWeight::pack_stack(one_context(), bad).status().message(),
            "PackedIntWeight::pack_stack: weight 1: scales dim 0 (rows) is 3, but q set rows = 2");
}

}  // namespace
}  // namespace opst

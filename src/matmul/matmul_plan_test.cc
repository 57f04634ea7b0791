// plan_matmul: which kernel multiplies and why, how outputs are cut into tasks, and the memory of a call.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "matmul/call.h"
#include "quant/random_blocks.h"
#include "testing/contexts.h"
#include "testing/elements.h"
#include "testing/random.h"

namespace opst {
namespace {

using test::kQuantFormats;
using test::Random;

constexpr Isa kLevels[] = {Isa::generic, Isa::avx2, Isa::avx512, Isa::avx512_vnni, Isa::avx512_bf16};

std::string about(const MatmulProblem& p, const Machine& machine, const MatmulPlan& plan) {
  return std::to_string(p.m) + " x " + std::to_string(p.n) + " x " + std::to_string(p.k) + ", " + to_string(p.format) +
         ", " + std::to_string(p.groups) + " groups of i" + std::to_string(p.bits) + ", x " + to_string(p.x_dtype) +
         ", " + to_string(p.activation) + ", " + to_string(machine.isa) + ": " + to_string(plan) + "; " + plan.reason;
}

MatmulProblem random_problem(Random& random) {
  MatmulProblem p;
  p.m = random.chance(0.5) ? random.integer(1, 20) : random.integer(1, 100000);
  p.n = random.chance(0.5) ? random.integer(1, 200) : random.integer(1, 300000);
  p.x_dtype = random.pick({DType::f32, DType::bf16, DType::f16});
  p.unit_stride_x = random.chance(0.5);
  p.has_bias = random.chance(0.5), p.has_out_scales = random.chance(0.2);
  p.activations = random.pick({ActivationType::exact, ActivationType::int8});
  p.batch_invariant = random.chance(0.3);
  if (random.chance(0.3)) p.n *= 2, p.activation = Activation::swiglu;
  int64_t unit = 1;
  if (random.chance(0.4)) {
    p.weight = MatmulWeight::integers;
    p.bits = random.pick({8, 4});
    p.groups = random.chance(0.5) ? 1 : random.integer(1, 20);
    if (random.chance(0.6)) p.x_dtype = DType::i8, p.has_x_scales = random.chance(0.5);
    unit = p.groups;
  } else {
    p.format = kQuantFormats[static_cast<size_t>(random.integer(0, kNumQuantFormats - 1))];
    unit = block_values(p.format);
    if (unit == 1 && random.chance(0.5)) p.weight = MatmulWeight::unpacked;
    p.unit_stride_outputs = random.chance(0.3);
  }
  p.k = random.integer(0, random.chance(0.5) ? 8 : 2000) * unit;
  return p;
}

// The columns that the kernel of a path takes at once. (Tasks begin at whole panels of 16 besides.)
int64_t columns_at_once(MatmulPath path, Isa isa) {
  switch (path) {
    case MatmulPath::few_rows:
    case MatmulPath::weights_int_floats_few_rows:
      return gemm::float_kernels(isa).few_columns;
    case MatmulPath::many_rows:
    case MatmulPath::many_rows_in_place:
      return gemm::float_kernels(isa).many_columns;
    case MatmulPath::activations_fixed:
    case MatmulPath::activations_int8_few_rows:
      return 32;
    case MatmulPath::activations_int8_many_rows:
      return gemm::byte_kernels(isa).many_columns;
    case MatmulPath::weights_int_few_rows:
      return 32;
    case MatmulPath::weights_int_many_rows:
    case MatmulPath::weights_int_floats_many_rows:
      return gemm::byte_kernels(isa).many_columns;
    case MatmulPath::f64:
      break;
  }
  return 1;
}

// Every output belongs to exactly one task, and tasks fit the kernels and the scratch.
TEST(MatmulPlan, CutsEveryProblemIntoWholeParts) {
  Random random(test::seed());
  const auto covers = [](int64_t size, int64_t part, int64_t tasks) {
    return part >= 1 && part * tasks >= size && part * (tasks - 1) < size;
  };
  for (int i = 0; i < 20000; ++i) {
    const MatmulProblem p = random_problem(random);
    Machine machine;
    machine.isa = kLevels[random.integer(0, kNumIsaLevels - 1)];
    machine.bf16_product = random.pick({Bf16Product::dot, Bf16Product::widen});
    const int threads = static_cast<int>(random.integer(1, 70));
    const gemm::Plan plan = gemm::make_plan(p, machine, threads);
    SCOPED_TRACE(about(p, machine, plan));
    ASSERT_TRUE(covers(p.m, plan.rows_per_task, plan.row_tasks));
    ASSERT_TRUE(covers(plan.width, plan.columns_per_task, plan.column_tasks));
    ASSERT_NE(plan.kernel, nullptr);
    ASSERT_EQ(plan.chunk_columns % 16, 0);
    ASSERT_EQ(plan.chunk_columns % columns_at_once(plan.path, machine.isa), 0);
    ASSERT_GE(plan.sums_stride, plan.chunk_columns);
    ASSERT_GE(plan.sums_bytes_per_worker, plan.rows_per_task * plan.sums_stride * 4);
    if (plan.two_halves) {
      // Up to 15 columns before the second half, and a last vector that is not full.
      ASSERT_GE(plan.second_stride, plan.chunk_columns + 15);
      ASSERT_GE(plan.second_bytes_per_worker, plan.rows_per_task * plan.second_stride * 4);
    }
    // Rows that are quantised lie as f32 in a task's tile or, where such tasks were too few, all together.
    ASSERT_EQ(plan.whole_rows, plan.tile_bytes_per_worker > 0);
    ASSERT_EQ(p.has_out_scales, plan.whole_rows || plan.wide_out_bytes > 0);
    ASSERT_EQ(plan.chunk_columns < plan.columns_per_task, plan.whole_rows && plan.chunk_columns < plan.width);
    if (plan.whole_rows) {
      ASSERT_EQ(plan.wide_out_bytes, 0);
      ASSERT_LE(plan.tile_bytes_per_worker, 1 << 20);
      ASSERT_GE(plan.tile_bytes_per_worker, plan.rows_per_task * plan.width * 4);
      ASSERT_GE(plan.row_tasks, threads);
    }
    ASSERT_EQ(plan.scratch_bytes(3) - plan.scratch_bytes(2), plan.scratch_bytes_per_worker);
    if (p.weight == MatmulWeight::unpacked && plan.path != MatmulPath::many_rows_in_place) {
      ASSERT_GE(plan.weight_bytes, (p.n + 15) / 16 * 16 * p.k * block_bytes(p.format));
    }
    if (std::string_view(to_string(plan.path)).find("few_rows") != std::string_view::npos) {
      ASSERT_EQ(plan.row_tasks, 1);
      ASSERT_LE(plan.sums_bytes_per_worker, 128 << 10);
      // A task reads up to 1 MB (2 MB where there is one thread), or what the kernel takes at once.
      const int64_t column_bytes = std::max<int64_t>(1, plan.column_bytes * (plan.two_halves ? 2 : 1));
      const int64_t unit = columns_at_once(plan.path, machine.isa);
      ASSERT_LE(plan.chunk_columns, std::max(unit, ((threads > 1 ? 1 : 2) << 20) / column_bytes + unit));
      // Every thread has work where there is enough, and the busiest one at most a few columns more than its share.
      if (plan.width / unit * unit * column_bytes >= threads * ((64 << 10) + 4 * unit * column_bytes)) {
        const int64_t rounds = ceil_div(plan.column_tasks, threads), busiest = rounds * plan.columns_per_task;
        ASSERT_GE(plan.column_tasks, std::min<int64_t>(threads, 2));
        ASSERT_LE(busiest, ceil_div(plan.width, threads) * 5 / 4 + 4 * unit);
      }
    }
    switch (plan.path) {
      case MatmulPath::few_rows:
        ASSERT_EQ(plan.x_bytes, plan.x == gemm::XForm::in_place ? 0 : 4 * p.m * std::max<int64_t>(1, plan.words));
        break;
      case MatmulPath::many_rows_in_place:
        ASSERT_EQ(plan.weight_bytes, 0);
        [[fallthrough]];
      case MatmulPath::many_rows:
        ASSERT_EQ(plan.k_block % std::max<int64_t>(32, block_values(p.format)), 0);
        ASSERT_GE(plan.x_bytes, ceil_div(plan.words, plan.k_block) * p.m * plan.x_stride * 4);
        ASSERT_GT(plan.x_stride, plan.k_block);
        // The memory that one worker touches again and again stays below 1 MB.
        ASSERT_LE(plan.rows_per_task * plan.x_stride * 4 + plan.decoded_bytes_per_worker + plan.sums_bytes_per_worker,
                  1 << 20);
        break;
      case MatmulPath::activations_fixed:
      case MatmulPath::activations_int8_few_rows:
        ASSERT_EQ(plan.row_tasks, 1);
        break;
      case MatmulPath::activations_int8_many_rows:
        ASSERT_EQ(plan.k_block % 32, 0);
        break;
      case MatmulPath::weights_int_few_rows:
      case MatmulPath::weights_int_many_rows:
        ASSERT_GE(plan.x_stride, plan.group_bytes * p.groups);
        ASSERT_GE(plan.group_bytes * p.groups, p.k);
        ASSERT_GE(plan.x_sums_bytes, 4 * p.m * p.groups);
        break;
      case MatmulPath::weights_int_floats_few_rows:
        ASSERT_EQ(plan.x_bytes, plan.x == gemm::XForm::in_place ? 0 : 4 * p.m * std::max<int64_t>(1, p.k));
        break;
      case MatmulPath::weights_int_floats_many_rows:
        ASSERT_GE(plan.x_bytes, 4 * p.m * p.k);
        break;
      case MatmulPath::f64:
        FAIL();
    }
  }
}

// Of docs/matmul.md: the table of paths.
TEST(MatmulPlan, ChoosesByRowsFormatAndLevel) {
  struct Case {
    MatmulProblem problem;
    MatmulPath generic, vnni;
  };
  using enum MatmulPath;
  const auto with = [](int64_t m, QuantFormat format, ActivationType type = ActivationType::exact,
                       bool batch_invariant = false) {
    return MatmulProblem{
        .m = m, .n = 64, .k = 256, .format = format, .activations = type, .batch_invariant = batch_invariant};
  };
  const auto integers = [](int64_t m, DType x) {
    return MatmulProblem{.m = m, .n = 64, .k = 256, .x_dtype = x, .weight = MatmulWeight::integers};
  };
  const auto in_place = [](int64_t m) {
    return MatmulProblem{.m = m, .n = 64, .k = 256, .weight = MatmulWeight::unpacked, .unit_stride_outputs = true};
  };
  const MatmulProblem doubles = {.m = 3, .n = 4, .k = 5, .x_dtype = DType::f64, .weight = MatmulWeight::unpacked};
  const Case cases[] = {
      {with(1, QuantFormat::f32), few_rows, few_rows},
      {with(8, QuantFormat::f32), few_rows, few_rows},
      {with(9, QuantFormat::f32), many_rows, many_rows},
      {with(2, QuantFormat::f16, ActivationType::int8), few_rows, few_rows},
      {with(1, QuantFormat::q4_k), few_rows, activations_fixed},
      {with(2, QuantFormat::q8_0), few_rows, activations_fixed},
      {with(3, QuantFormat::q4_k), few_rows, few_rows},
      {with(1, QuantFormat::q4_k, ActivationType::exact, true), few_rows, few_rows},
      {with(9, QuantFormat::q4_k), many_rows, many_rows},
      {with(1, QuantFormat::q6_k, ActivationType::int8), activations_int8_many_rows, activations_int8_few_rows},
      {with(4, QuantFormat::q6_k, ActivationType::int8), activations_int8_many_rows, activations_int8_few_rows},
      {with(5, QuantFormat::q6_k, ActivationType::int8), activations_int8_many_rows, activations_int8_many_rows},
      {in_place(1), many_rows_in_place, many_rows_in_place},
      {in_place(9), many_rows_in_place, many_rows_in_place},
      {integers(8, DType::i8), weights_int_few_rows, weights_int_few_rows},
      {integers(9, DType::i8), weights_int_many_rows, weights_int_many_rows},
      {integers(8, DType::bf16), weights_int_floats_few_rows, weights_int_floats_few_rows},
      {integers(9, DType::f32), weights_int_floats_many_rows, weights_int_floats_many_rows},
      {doubles, f64, f64},
  };
  Machine generic, vnni;
  vnni.isa = Isa::avx512_vnni;
  for (const Case& c : cases) {
    const MatmulPlan on_generic = plan_matmul(c.problem, generic), on_vnni = plan_matmul(c.problem, vnni);
    EXPECT_EQ(on_generic.path, c.generic) << about(c.problem, generic, on_generic);
    EXPECT_EQ(on_vnni.path, c.vnni) << about(c.problem, vnni, on_vnni);
    for (const MatmulPlan& plan : {on_generic, on_vnni}) {
      EXPECT_NE(std::string(plan.reason), "");
      EXPECT_EQ(to_string(plan).rfind(to_string(plan.path), 0), 0u);
      EXPECT_GT(plan.num_tasks(), 0);
    }
  }
  // avx2 and avx512 have no dot product of bytes up to 255, which q8_0 needs.
  Machine avx2;
  avx2.isa = Isa::avx2;
  EXPECT_EQ(plan_matmul(with(1, QuantFormat::q8_0), avx2).path, few_rows);
  EXPECT_EQ(plan_matmul(with(1, QuantFormat::q4_0), avx2).path, activations_fixed);
  // bf16 is paired where level and machine say so.
  MatmulProblem bf16 = with(9, QuantFormat::bf16);
  bf16.x_dtype = DType::bf16;
  Machine dot;
  dot.isa = Isa::avx512_bf16;
  EXPECT_EQ(plan_matmul(bf16, dot).product, MatmulProduct::f32);
  dot.bf16_product = Bf16Product::dot;
  EXPECT_EQ(plan_matmul(bf16, dot).product, MatmulProduct::bf16_dot);
  dot.isa = Isa::avx512;
  EXPECT_EQ(plan_matmul(bf16, dot).product, MatmulProduct::f32);
}

// A problem that no call may pose has no tasks and no memory; huge ones have counts within 2^56.
TEST(MatmulPlan, AnswersAnyNumbers) {
  Random random(test::seed());
  const auto size = [&]() -> int64_t {
    return random.chance(0.6) ? random.integer(0, 40)
                              : random.pick<int64_t>({-1, 256, int64_t{1} << 31, int64_t{1} << 40, int64_t{1} << 56,
                                                      (int64_t{1} << 56) + 1, std::numeric_limits<int64_t>::max(),
                                                      std::numeric_limits<int64_t>::min()});
  };
  const auto byte = [&](int most) { return random.chance(0.1) ? random.integer(0, 255) : random.integer(0, most); };
  int planned = 0;
  for (int i = 0; i < 20000; ++i) {
    MatmulProblem p;
    p.m = size(), p.n = size(), p.k = size(), p.groups = random.chance(0.5) ? 1 : size();
    p.x_dtype = static_cast<DType>(byte(10));
    p.weight = static_cast<MatmulWeight>(byte(2));
    p.format = static_cast<QuantFormat>(byte(kNumQuantFormats - 1));
    p.activation = static_cast<Activation>(byte(5));
    p.activations = static_cast<ActivationType>(byte(1));
    p.bits = static_cast<int>(random.pick({8, 4, 0, -3}));
    p.batch_invariant = random.chance(0.5), p.has_bias = random.chance(0.5);
    p.has_x_scales = random.chance(0.5), p.has_out_scales = random.chance(0.5);
    Machine machine;
    machine.isa = kLevels[random.integer(0, kNumIsaLevels - 1)];
    const MatmulPlan plan = plan_matmul(p, machine, static_cast<int>(random.integer(-1, 1024)));
    SCOPED_TRACE(about(p, machine, plan));
    ASSERT_NE(std::string(plan.reason), "");
    ASSERT_GE(plan.num_tasks(), 0);
    ASSERT_LE(plan.num_tasks(), kMaxBytes);
    ASSERT_GE(plan.scratch_bytes(1024), 0);
    ASSERT_LE(plan.scratch_bytes(1024), kMaxBytes);
    planned += plan.num_tasks() > 0 ? 1 : 0;
    if (plan.num_tasks() == 0) {
      ASSERT_EQ(plan.scratch_bytes(3), 0);
    }
  }
  EXPECT_GT(planned, 200);
}

// The problem of a call, or the words by which the call is refused.
TEST(MatmulPlan, TakesTheProblemFromACall) {
  Random random(test::seed());
  Context& context = test::contexts_with_threads(1).back().context;
  std::vector<float> x(3 * 64), weight(10 * 64), out(3 * 10), scales(16), bias(10);
  const Tensor xs = Tensor::contiguous(DType::f32, {3, 64}, x.data());
  const Tensor ws = Tensor::contiguous(DType::f32, {10, 64}, weight.data());
  const Tensor outs = Tensor::contiguous(DType::f32, {3, 10}, out.data());
  const Tensor biases = Tensor::contiguous(DType::f32, {10}, bias.data());
  const MatmulOptions options = {.bias = biases, .activation = Activation::silu, .batch_invariant = true};
  const MatmulProblem dense = matmul_problem(xs, ConstTensor(ws), outs, options).value();
  EXPECT_EQ(dense.weight, MatmulWeight::unpacked);
  EXPECT_EQ(dense.format, QuantFormat::f32);
  EXPECT_TRUE(dense.m == 3 && dense.n == 10 && dense.k == 64 && dense.has_bias && dense.batch_invariant);
  EXPECT_EQ(dense.activation, Activation::silu);
  EXPECT_TRUE(dense.unit_stride_x);
  std::vector<float> columns(64 * 3);
  const Tensor transposed = Tensor::contiguous(DType::f32, {64, 3}, columns.data()).transposed(0, 1);
  EXPECT_FALSE(matmul_problem(transposed, ConstTensor(ws), outs).value().unit_stride_x);

  const std::vector<unsigned char> blocks = test::random_blocks(QuantFormat::q5_0, 10, 64, random);
  const PackedWeight packed = std::move(
      PackedWeight::pack(context, {QuantFormat::q5_0, 10, 64, blocks.data(), static_cast<int64_t>(blocks.size())})
          .value());
  const MatmulProblem quantised = matmul_problem(xs, packed, outs, {.activations = ActivationType::int8}).value();
  EXPECT_EQ(quantised.format, QuantFormat::q5_0);
  EXPECT_EQ(quantised.weight, MatmulWeight::packed);
  EXPECT_EQ(quantised.activations, ActivationType::int8);

  std::vector<int8_t> q(8 * 32), xq(3 * 64);
  const PackedIntWeight integers =
      std::move(PackedIntWeight::pack(context, {Tensor::contiguous(DType::u8, {8, 32}, q.data()),
                                                Tensor::contiguous(DType::f32, {8, 2}, scales.data())})
                    .value());
  const Tensor narrow = outs.narrowed(1, 0, 8);
  const MatmulProblem ints =
      matmul_problem(Tensor::contiguous(DType::i8, {3, 64}, xq.data()), integers, narrow).value();
  EXPECT_EQ(ints.weight, MatmulWeight::integers);
  EXPECT_TRUE(ints.bits == 4 && ints.groups == 2 && ints.x_dtype == DType::i8 && !ints.has_x_scales);

  for (const Tensor& bad : {outs.narrowed(1, 0, 4), outs.narrowed(0, 0, 2)}) {
    EXPECT_FALSE(matmul(context, xs, packed, bad).ok());
    EXPECT_EQ(matmul_problem(xs, packed, bad).status().message(), matmul(context, xs, packed, bad).message());
    EXPECT_EQ(matmul_problem(xs, ConstTensor(ws), bad).status().message(),
              matmul(context, xs, ConstTensor(ws), bad).message());
    EXPECT_FALSE(matmul_problem(xs, integers, bad).ok());
    EXPECT_EQ(matmul_problem(xs, integers, bad).status().message(), matmul(context, xs, integers, bad).message());
  }
}

// A call takes the scratch that its plan says, on every path.
TEST(MatmulPlan, ScratchIsWhatThePlanSays) {
  Random random(test::seed());
  constexpr int64_t kN = 300, kK = 512;
  Context& packer = test::contexts_with_threads(1).back().context;
  std::vector<float> x(40 * kK, 1.0f), dense(kN * kK, 0.5f), out(40 * kN), bias(2 * kN), scales(kN * 2, 1.0f);
  std::vector<int8_t> xq(40 * kK), q(kN * kK), small_out(40 * kN);
  const std::vector<unsigned char> blocks = test::random_blocks(QuantFormat::q4_k, kN, kK, random);
  const PackedWeight packed = std::move(
      PackedWeight::pack(packer, {QuantFormat::q4_k, kN, kK, blocks.data(), static_cast<int64_t>(blocks.size())})
          .value());
  const PackedIntWeight integers =
      std::move(PackedIntWeight::pack(packer, {Tensor::contiguous(DType::i8, {kN, kK}, q.data()),
                                               Tensor::contiguous(DType::f32, {kN, 2}, scales.data())})
                    .value());
  const ConstTensor biases = Tensor::contiguous(DType::f32, {kN, 2}, bias.data()).selected(1, 0);
  for (const Isa isa : test::levels()) {
    for (const int num_threads : {1, 3}) {
      for (const int64_t m : {1, 3, 9, 40}) {
        const Tensor xs = Tensor::contiguous(DType::f32, {m, kK}, x.data());
        const auto expect_planned = [&](const MatmulProblem& problem, const auto& call) {
          Context context = std::move(Context::create({.isa = isa, .num_threads = num_threads}).value());
          const MatmulPlan plan = plan_matmul(problem, context.machine(), num_threads);
          SCOPED_TRACE(about(problem, context.machine(), plan));
          const Status status = call(context);
          ASSERT_TRUE(status.ok()) << status.message();
          // Workspaces are rounded up to 64 KiB, or 2 MiB.
          const int64_t planned = plan.scratch_bytes(num_threads);
          ASSERT_GT(planned, 0);
          EXPECT_EQ(context.workspace_bytes(), round_up(planned, planned < (2 << 20) ? 64 << 10 : 2 << 20));
        };
        for (const ActivationType type : {ActivationType::exact, ActivationType::int8}) {
          for (const bool halves : {false, true}) {
            const Tensor outs = Tensor::contiguous(DType::f32, {m, halves ? kN / 2 : kN}, out.data());
            MatmulOptions options = {
                .bias = biases, .activation = halves ? Activation::swiglu : Activation::gelu_erf, .activations = type};
            expect_planned(matmul_problem(xs, packed, outs, options).value(),
                           [&](Context& context) { return matmul(context, xs, packed, outs, options); });
            const ConstTensor ws = Tensor::contiguous(DType::f32, {kN, kK}, dense.data());
            expect_planned(matmul_problem(xs, ws, outs, options).value(),
                           [&](Context& context) { return matmul(context, xs, ws, outs, options); });
          }
        }
        const Tensor quantised = Tensor::contiguous(DType::i8, {m, kN}, small_out.data());
        const MatmulOptions options = {.out_scales = Tensor::contiguous(DType::f32, {m}, scales.data())};
        expect_planned(matmul_problem(xs, packed, quantised, options).value(),
                       [&](Context& context) { return matmul(context, xs, packed, quantised, options); });
        const Tensor outs = Tensor::contiguous(DType::f32, {m, kN}, out.data());
        for (const ConstTensor& rows : {ConstTensor(xs), ConstTensor::contiguous(DType::i8, {m, kK}, xq.data())}) {
          expect_planned(matmul_problem(rows, integers, outs, {.bias = biases}).value(),
                         [&](Context& context) { return matmul(context, rows, integers, outs, {.bias = biases}); });
        }
      }
    }
  }
}

}  // namespace
}  // namespace opst

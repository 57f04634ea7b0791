// The one driver of all products: pack x -> tasks -> product -> finish.
#include <algorithm>
#include <cmath>

#include "machine/levels.h"
#include "matmul/call.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_BF16_LEVELS, gemm, FloatKernels, kFloatKernels, float_kernels)
OPST_KERNELS_BY_LEVEL(OPST_INT8_LEVELS, gemm, ByteKernels, kByteKernels, byte_kernels)

namespace gemm {
namespace {

// The panels from a panel's first column on.
IntWeightPart from_column(IntWeightPart ints, int64_t column) {
  ints.words += column * ints.groups * ints.group_words;
  ints.scales += column * ints.groups;
  if (ints.zeros != nullptr) ints.zeros += column * ints.groups;
  return ints;
}

// A vector as contiguous f32: the tensor itself where it is that, else a copy in `copy`.
const float* plain_floats(const FloatKernels& floats, const ConstTensor& tensor, char* copy) {
  if (!tensor) return nullptr;
  if (tensor.dtype == DType::f32 && tensor.strides[0] == 1) return static_cast<const float*>(tensor.data);
  auto* const to = reinterpret_cast<float*>(copy);
  // One row, or as many rows of one element.
  const int64_t n = tensor.shape[0], rows = tensor.strides[0] == 1 ? 1 : n;
  floats.widen_rows[float_index(tensor.dtype)](tensor.data, tensor.strides[0], 1, rows, n / rows, to, 1);
  return to;
}

// An i32 bias in whole panels of columns.
const int32_t* whole_panels(const ConstTensor& bias, char* copy) {
  auto* const to = reinterpret_cast<int32_t*>(copy);
  const int64_t n = bias.shape[0];
  for (int64_t j = 0; j < n; ++j) to[j] = static_cast<const int32_t*>(bias.data)[j * bias.strides[0]];
  std::fill(to + n, to + round_up(n, kPanelColumns), 0);
  return to;
}

// The rectangle of out and of the residual that begins at [row, column]; sums and bias are left to the caller.
Finish finish_part(const Operands& o, int64_t row, int64_t column, int64_t rows, int64_t columns) {
  const auto at = [&](const ConstTensor& tensor) {
    return (row * tensor.strides[0] + column * tensor.strides[1]) * size_bytes(tensor.dtype);
  };
  Finish part{.rows = rows,
              .columns = columns,
              .out = static_cast<char*>(o.out.data) + at(o.out),
              .out_type = float_type(o.out.dtype),
              .row_stride = o.out.strides[0],
              .column_stride = o.out.strides[1]};
  if (o.residual) {
    part.residual = {static_cast<const char*>(o.residual.data) + at(o.residual), float_type(o.residual.dtype),
                     o.residual.strides[0], o.residual.strides[1]};
  }
  return part;
}

// finish of sums that stay integers.
void store_integers(const Finish& part) {
  const auto* const sums = reinterpret_cast<const int32_t*>(part.sums);
  auto* const out = static_cast<int32_t*>(part.out);
  for (int64_t i = 0; i < part.rows; ++i) {
    const int32_t* const from = sums + i * part.sums_stride;
    int32_t* const to = out + i * part.row_stride;
    if (part.column_stride == 1) {
      std::copy_n(from, part.columns, to);
      continue;
    }
    for (int64_t j = 0; j < part.columns; ++j) to[j * part.column_stride] = from[j];
  }
}

// False, and nothing written, where the form of x cannot hold one of its rows.
bool run(Context& context, const MatmulProblem& problem, const Plan& plan, const Operands& o, Arena& arena) {
  const FloatKernels& floats = float_kernels(context.machine().isa);
  ThreadPool& pool = context.impl().pool;
  char* const bias_copy = arena.take<char>(plan.bias_bytes);
  const bool int_bias = o.bias && o.bias.dtype == DType::i32, int_sums = o.out.dtype == DType::i32;
  const int32_t* const int_biases = int_bias ? whole_panels(o.bias, bias_copy) : nullptr;
  const float* const biases = int_bias ? nullptr : plain_floats(floats, o.bias, bias_copy);
  const float* const x_scales = plain_floats(floats, o.x_scales, arena.take<char>(plan.x_scales_bytes));
  auto* const scratch = static_cast<char*>(arena.take_bytes(pool.num_threads() * plan.scratch_bytes_per_worker));
  const std::optional<Rows> x = pack_x(context, plan, o, arena, scratch);
  if (!x) return false;

  const auto finish = int_sums ? store_integers : floats.finish[static_cast<int>(problem.activation)];
  const bool ints = problem.weight == MatmulWeight::integers;
  const int64_t column_bytes = ints ? 0 : packed_column_bytes(problem.format, problem.k);
  const int64_t out_bytes = size_bytes(o.out.dtype);
  pool.parallel_for(plan.num_tasks(), [&](int64_t task, int worker) {
    // A rectangle of out. (Of a grouped product, whose rows belong to several weights, a task would name its weight.)
    const int64_t row = task / plan.column_tasks * plan.rows_per_task,
                  rows = std::min(plan.rows_per_task, plan.m - row);
    const int64_t column = task % plan.column_tasks * plan.columns_per_task;
    const int64_t columns = std::min(plan.columns_per_task, plan.width - column);
    const WorkerScratch own(plan, scratch, worker);
    Finish part = finish_part(o, row, column, rows, columns);
    // The sums of `count` columns of the weight from a panel's first one on.
    const auto multiply_columns = [&](int64_t first, int64_t count, float* sums, int64_t sums_stride, const void* out) {
      ProductPart rectangle = {.x = x->data + row * x->stride * element_bytes(plan.x),
                               .x_stride = x->stride,
                               .x_block_stride = plan.m * x->stride,
                               .rows = rows,
                               .columns = count,
                               .k = plan.words,
                               .k_block = plan.k_block,
                               .panels = static_cast<const char*>(o.panels) + first * column_bytes,
                               .scratch = own.decoded,
                               .sums = sums,
                               .sums_stride = sums_stride};
      if (ints) {
        rectangle.ints = from_column(o.ints, first);
        if (x->sums != nullptr) rectangle.x_sums = x->sums + row * o.ints.groups;
        if (int_biases != nullptr) rectangle.int_bias = int_biases + first;
        rectangle.int_sums = int_sums;
        rectangle.out = static_cast<const char*>(out);
        rectangle.out_row_bytes = part.row_stride * out_bytes;
        rectangle.out_column_bytes = part.column_stride * out_bytes;
      }
      plan.kernel(rectangle);
    };
    part.sums = own.sums;
    part.sums_stride = plan.sums_stride;
    multiply_columns(column, columns, own.sums, plan.sums_stride, part.out);
    if (x_scales != nullptr) part.x_scales = x_scales + row;
    if (biases != nullptr) part.bias = biases + column;
    if (plan.two_halves) {
      const int64_t second = plan.width + column, before = second % kPanelColumns;
      multiply_columns(second - before, before + columns, own.second, plan.second_stride, nullptr);
      part.second = own.second + before;
      part.second_stride = plan.second_stride;
      if (biases != nullptr) part.second_bias = biases + second;
    }
    finish(part);
  });
  return true;
}

// Each row by a call of its own, so that the rows which fixed point holds keep their bits.
Status multiply_row_by_row(Context& context, const MatmulProblem& problem, const Operands& o) {
  MatmulProblem row = problem;
  row.m = 1;
  row.has_out_scales = false;
  row.batch_invariant = problem.m == 1;  // a single row that fixed point does not hold is multiplied in f32
  for (int64_t i = 0; i < problem.m; ++i) {
    Operands of_row = o;
    of_row.x = o.x.narrowed(0, i, 1);
    of_row.out = o.out.narrowed(0, i, 1);
    if (o.residual) of_row.residual = o.residual.narrowed(0, i, 1);
    const Status status = multiply(context, row, of_row);
    if (!status.ok()) return status;
  }
  return {};
}

// ---- f64: plain loops, for gradient checks. Sums in ascending order of k, as everywhere in the room.

double element(const ConstTensor& t, int64_t i, int64_t j) {
  return static_cast<const double*>(t.data)[i * t.strides[0] + j * t.strides[1]];
}

double silu(double y) { return y / (1 + std::exp(-y)); }

// `second`: of swiglu.
double activated(Activation activation, double y, double second) {
  switch (activation) {
    case Activation::none:
      return y;
    case Activation::silu:
      return silu(y);
    case Activation::gelu_erf:
      return y * (1 + std::erf(y / std::sqrt(2.0))) / 2;
    case Activation::gelu_tanh:
      return y * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (y + 0.044715 * y * y * y))) / 2;
    case Activation::swiglu:
      return silu(y) * second;
    case Activation::swiglu_swapped:
      return y * silu(second);
  }
  return y;
}

void multiply_f64(Context& context, Activation activation, const Operands& o) {
  const int64_t m = o.out.shape[0], width = o.out.shape[1], k = o.weight.shape[1];
  const bool halves = takes_two_halves(activation);
  const auto y = [&](int64_t i, int64_t j) {
    double sum = 0;
    for (int64_t t = 0; t < k; ++t) sum += element(o.x, i, t) * element(o.weight, j, t);
    return o.bias ? sum + static_cast<const double*>(o.bias.data)[j * o.bias.strides[0]] : sum;
  };
  context.impl().pool.parallel_for(m, [&](int64_t i, int) {
    for (int64_t j = 0; j < width; ++j) {
      double value = activated(activation, y(i, j), halves ? y(i, width + j) : 0);
      if (o.residual) value += element(o.residual, i, j);
      static_cast<double*>(o.out.data)[i * o.out.strides[0] + j * o.out.strides[1]] = value;
    }
  });
}

}  // namespace

Status multiply(Context& context, const MatmulProblem& problem, const Operands& operands) {
  const int threads = context.impl().pool.num_threads();
  const Plan plan = make_plan(problem, context.machine(), threads);
  if (plan.num_tasks() == 0) {  // scales of rows without columns are written all the same
    if (!problem.has_out_scales) return {};
    return dynamic_quant(context, Tensor::contiguous(DType::f32, {plan.m, 0}, nullptr), operands.out,
                         operands.out_scales);
  }
  if (plan.path == MatmulPath::f64) {
    multiply_f64(context, problem.activation, operands);
    return {};
  }
  Result<WorkspaceLease> lease = context.impl().workspaces.lease(plan.scratch_bytes(threads));
  if (!lease.ok()) return lease.status();
  Arena arena(lease.value());
  Operands o = operands;
  if (problem.weight == MatmulWeight::unpacked) {
    char* const panels = arena.take<char>(plan.weight_bytes);
    pack_float_weight(context, o.weight, panels);
    o.panels = panels;
  }
  // A row's scale is known when the whole row is.
  if (problem.has_out_scales) {
    o.out = Tensor::contiguous(DType::f32, {plan.m, plan.width}, arena.take<char>(plan.wide_out_bytes));
    o.out_scales = {};
  }
  if (!run(context, problem, plan, o, arena)) {
    const Status status = multiply_row_by_row(context, problem, o);
    if (!status.ok()) return status;
  }
  return problem.has_out_scales ? dynamic_quant(context, o.out, operands.out, operands.out_scales) : Status();
}

}  // namespace gemm
}  // namespace opst

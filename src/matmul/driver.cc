// The one driver of all products: pack x -> tasks -> product -> finish.
#include <algorithm>
#include <cstring>

#include "core/convert.h"
#include "core/int_math.h"
#include "machine/context_impl.h"
#include "machine/levels.h"
#include "matmul/call.h"
#include "matmul/packed_layout.h"
#include "matmul/plan.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_BF16_LEVELS, gemm, Kernels, kKernels, kernels)
OPST_KERNELS_BY_LEVEL(OPST_INT8_LEVELS, gemm, FewRowsBlockKernels, kFewRowsBlockKernels, few_rows_block_kernels)
OPST_KERNELS_BY_LEVEL(OPST_INT8_LEVELS, gemm, Int8BlockKernels, kInt8BlockKernels, int8_block_kernels)

namespace gemm {
namespace {

// ---- pack x

// Words [k0, k0 + words) of at most kMostRows rows of bf16 pairs -> [rows][out_stride]; elements from k on are 0.
constexpr int64_t kMostRows = 32;
void pack_pairs(const ConstTensor& x, int64_t row, int64_t rows, int64_t k0, int64_t words, uint32_t* out,
                int64_t out_stride) {
  const int64_t k = x.shape[1], stride = x.strides[1], row_stride = x.strides[0];
  const bf16* const first = static_cast<const bf16*>(x.data) + row * row_stride;
  const int64_t whole = std::min(words, k / 2 - k0);
  if (stride == 1) {
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(out + i * out_stride, first + i * row_stride + 2 * k0, static_cast<size_t>(whole) * sizeof(uint32_t));
    }
  } else {
    // Down the columns, which may be contiguous, into a square that stays in L1.
    constexpr int64_t kWords = 16;
    uint32_t square[kWords][kMostRows];
    for (int64_t w0 = 0; w0 < whole; w0 += kWords) {
      const int64_t count = std::min(kWords, whole - w0);
      for (int64_t w = 0; w < count; ++w) {
        const bf16* const low = first + 2 * (k0 + w0 + w) * stride;
        const bf16* const high = low + stride;
        if (row_stride == 1) {
          for (int64_t i = 0; i < rows; ++i) square[w][i] = low[i].bits | static_cast<uint32_t>(high[i].bits) << 16;
          continue;
        }
        for (int64_t i = 0; i < rows; ++i) {
          square[w][i] = low[i * row_stride].bits | static_cast<uint32_t>(high[i * row_stride].bits) << 16;
        }
      }
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t w = 0; w < count; ++w) out[i * out_stride + w0 + w] = square[w][i];
      }
    }
  }
  for (int64_t i = 0; whole < words && i < rows; ++i) {
    out[i * out_stride + whole] = first[i * row_stride + (k - 1) * stride].bits;
  }
}

// What the tasks that pack rows of x share.
struct Packing {
  const Plan& plan;
  const ConstTensor& x;
  const Kernels& table;
  Isa isa;

  const char* row(int64_t i, int64_t t = 0) const {
    return static_cast<const char*>(x.data) + (i * x.strides[0] + t * x.strides[1]) * size_bytes(x.dtype);
  }
  void widen(int64_t first, int64_t rows, int64_t k0, int64_t count, float* out, int64_t out_stride) const {
    table.widen_rows[static_cast<int>(float_type(x.dtype))](row(first, k0), x.strides[0], x.strides[1], rows, count,
                                                            out, out_stride);
  }
  // Rows that are read together: one where a row is contiguous, so that it is read as one stream.
  int64_t at_once(int64_t rows) const { return x.strides[1] == 1 ? 1 : rows; }

  void words(int64_t begin, int64_t end, float* out) const;
  template <class Block, class Fill>
  bool blocks(int64_t begin, int64_t end, float* widened, Block* out, const Fill& fill) const;
  bool rows(int64_t begin, int64_t end, float* widened, void* out) const;
};

// -> [runs of k][m][x_stride].
void Packing::words(int64_t begin, int64_t end, float* out) const {
  const int64_t k = x.shape[1], step = at_once(end - begin);
  for (int64_t i = begin; i < end; i += step) {
    for (int64_t k0 = 0; k0 < plan.words; k0 += plan.run_words) {
      const int64_t count = std::min(plan.run_words, plan.words - k0);
      float* const to = out + (k0 / plan.run_words * plan.m + i) * plan.x_stride;
      if (plan.product == MatmulProduct::bf16_dot) {
        pack_pairs(x, i, step, k0, count, reinterpret_cast<uint32_t*>(to), plan.x_stride);
        continue;
      }
      widen(i, step, k0, std::min(count, k - k0), to, plan.x_stride);
      if (k0 + count > k) {
        for (int64_t j = 0; j < step; ++j) to[j * plan.x_stride + count - 1] = 0;
      }
    }
  }
}

// -> [m][x_stride] by fill(x, stride, k, blocks); false where fill says so.
template <class Block, class Fill>
bool Packing::blocks(int64_t begin, int64_t end, float* widened, Block* out, const Fill& fill) const {
  const int64_t k = x.shape[1];
  const bool in_place = x.dtype == DType::f32;
  const int64_t step = in_place ? 1 : at_once(end - begin);
  for (int64_t i = begin; i < end; i += step) {
    if (!in_place) widen(i, step, 0, k, widened, k);
    for (int64_t j = 0; j < step; ++j) {
      const float* const from = in_place ? reinterpret_cast<const float*>(row(i)) : widened + j * k;
      if (!fill(from, in_place ? x.strides[1] : 1, k, out + (i + j) * plan.x_stride)) return false;
    }
  }
  return true;
}

// Rows [begin, end) in the plan's form. False where the form cannot hold one of them.
bool Packing::rows(int64_t begin, int64_t end, float* widened, void* out) const {
  switch (plan.x) {
    case XForm::in_place:
      return true;
    case XForm::words:
      words(begin, end, static_cast<float*>(out));
      return true;
    case XForm::int8_blocks:
      return blocks(begin, end, widened, static_cast<ActivationBlock*>(out),
                    [quantise = int8_block_kernels(isa).quantise_row](auto... of) {
                      quantise(of...);
                      return true;
                    });
    case XForm::fixed_blocks:
      return blocks(begin, end, widened, static_cast<FixedBlock*>(out), few_rows_block_kernels(isa).fix_row);
    case XForm::bytes:
      break;
  }
  return false;
}

int64_t element_bytes(XForm form) {
  switch (form) {
    case XForm::in_place:
    case XForm::words:
      return sizeof(float);
    case XForm::int8_blocks:
      return sizeof(ActivationBlock);
    case XForm::fixed_blocks:
      return sizeof(FixedBlock);
    case XForm::bytes:
      return 1;
  }
  return 0;
}

// ---- product

Product product_of(const Plan& plan, QuantFormat format, Isa isa) {
  const auto f = static_cast<size_t>(format);
  const bool dot = plan.product == MatmulProduct::bf16_dot;
  switch (plan.path) {
    case MatmulPath::few_rows:
      return dot ? kernels(isa).few_rows_dot : kernels(isa).few_rows[f];
    case MatmulPath::many_rows:
      return dot ? kernels(isa).many_rows_dot : kernels(isa).many_rows[f];
    case MatmulPath::activations_fixed:
      return few_rows_block_kernels(isa).fixed[f];
    case MatmulPath::activations_int8_few_rows:
      return few_rows_block_kernels(isa).int8[f];
    case MatmulPath::activations_int8_many_rows:
      return int8_block_kernels(isa).rows[f];
    default:
      return nullptr;
  }
}

// ---- finish

// bias as contiguous f32: the tensor itself where it is that, else a copy in `copy`.
const float* plain_floats(const std::optional<ConstTensor>& tensor, float* copy) {
  if (!tensor) return nullptr;
  if (tensor->dtype == DType::f32 && tensor->strides[0] == 1) return static_cast<const float*>(tensor->data);
  for (int64_t j = 0; j < tensor->shape[0]; ++j) {
    const int64_t at = j * tensor->strides[0];
    copy[j] = tensor->dtype == DType::f32    ? static_cast<const float*>(tensor->data)[at]
              : tensor->dtype == DType::bf16 ? to_f32(static_cast<const bf16*>(tensor->data)[at])
                                             : to_f32(static_cast<const f16*>(tensor->data)[at]);
  }
  return copy;
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
    part.residual = {static_cast<const char*>(o.residual->data) + at(*o.residual), float_type(o.residual->dtype),
                     o.residual->strides[0], o.residual->strides[1]};
  }
  return part;
}

// ---- the driver

// The memory of one worker.
struct WorkerScratch {
  char* decoded;
  float *sums, *second, *widened;
  WorkerScratch(const Plan& plan, char* all, int worker) : decoded(all + worker * plan.scratch_bytes_per_worker) {
    sums = reinterpret_cast<float*>(decoded + plan.decoded_bytes_per_worker);
    second = reinterpret_cast<float*>(decoded + plan.decoded_bytes_per_worker + plan.sums_bytes_per_worker);
    widened = reinterpret_cast<float*>(decoded + plan.scratch_bytes_per_worker - plan.widened_bytes_per_worker);
  }
};

// A rectangle of out. (Of a grouped product, whose rows belong to several weights, a task would name its weight here.)
struct Task {
  int64_t row, column, rows, columns;
  Task(const Plan& plan, int64_t index)
      : row(index / plan.column_tasks * plan.rows_per_task),
        column(index % plan.column_tasks * plan.columns_per_task),
        rows(std::min(plan.rows_per_task, plan.m - row)),
        columns(std::min(plan.columns_per_task, plan.width - column)) {}
};

// False, and nothing written, where the form of x cannot hold one of its rows.
bool run(Context& context, const MatmulProblem& problem, const Plan& plan, const Operands& o, Arena& arena) {
  const Isa isa = context.machine().isa;
  const Kernels& table = kernels(isa);
  ThreadPool& pool = context.impl().pool;
  const float* const bias = plain_floats(o.bias, static_cast<float*>(arena.take_bytes(plan.bias_bytes)));
  void* const packed_x = arena.take_bytes(plan.x_bytes);
  auto* const scratch = static_cast<char*>(arena.take_bytes(pool.num_threads() * plan.scratch_bytes_per_worker));

  const bool in_place = plan.x == XForm::in_place;
  if (!in_place) {
    const Packing packing{plan, o.x, table, isa};
    bool holds = true;  // only rows in fixed point may not, and these are one task
    pool.parallel_for(ceil_div(plan.m, plan.pack_rows), [&](int64_t task, int worker) {
      const int64_t begin = task * plan.pack_rows, end = std::min(plan.m, begin + plan.pack_rows);
      if (!packing.rows(begin, end, WorkerScratch(plan, scratch, worker).widened, packed_x)) holds = false;
    });
    if (!holds) return false;
  }
  const int64_t x_stride = in_place ? o.x.strides[0] : plan.x_stride;
  const char* const x = static_cast<const char*>(in_place ? o.x.data : packed_x);

  const Product product = product_of(plan, problem.format, isa);
  const auto finish = table.finish[static_cast<int>(problem.activation)];
  const int64_t column_bytes = packed_column_bytes(problem.format, problem.k);
  pool.parallel_for(plan.num_tasks(), [&](int64_t index, int worker) {
    const Task task(plan, index);
    const WorkerScratch own(plan, scratch, worker);
    // `count` columns of the weight from a panel's first one on.
    const auto multiply_columns = [&](int64_t first, int64_t count, float* sums, int64_t sums_stride) {
      product({.x = x + task.row * x_stride * element_bytes(plan.x),
               .x_stride = x_stride,
               .x_block_stride = plan.m * x_stride,
               .rows = task.rows,
               .columns = count,
               .k = plan.words,
               .k_block = plan.k_block,
               .panels = static_cast<const char*>(o.panels) + first * column_bytes,
               .scratch = own.decoded,
               .sums = sums,
               .sums_stride = sums_stride});
    };
    Finish part = finish_part(o, task.row, task.column, task.rows, task.columns);
    part.sums = own.sums;
    part.sums_stride = plan.sums_stride;
    multiply_columns(task.column, task.columns, own.sums, plan.sums_stride);
    if (bias != nullptr) part.bias = bias + task.column;
    if (plan.two_halves) {
      const int64_t column = plan.width + task.column, before = column % kPanelColumns;
      multiply_columns(column - before, before + task.columns, own.second, plan.second_stride);
      part.second = own.second + before;
      part.second_stride = plan.second_stride;
      if (bias != nullptr) part.second_bias = bias + column;
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
    if (o.residual) of_row.residual = o.residual->narrowed(0, i, 1);
    const Status status = multiply(context, row, of_row);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace

Status multiply(Context& context, const ConstTensor& x, const ConstTensor& weight, const Tensor& out) {
  return multiply(context,
                  {.m = out.shape[0],
                   .n = out.shape[1],
                   .k = x.shape[1],
                   .x_dtype = x.dtype,
                   .unit_stride_x = x.strides[1] == 1,
                   .weight = MatmulWeight::unpacked,
                   .format = weight_format(weight.dtype)},
                  {.x = x, .weight = weight, .out = out});
}

Status multiply(Context& context, const MatmulProblem& problem, const Operands& operands) {
  const int threads = context.impl().pool.num_threads();
  const Plan plan = make_plan(problem, context.machine(), threads);
  if (plan.num_tasks() == 0) return {};
  if (plan.path == MatmulPath::f64) {
    multiply_f64(context, problem.activation, operands);
    return {};
  }
  Result<WorkspaceLease> lease = context.impl().workspaces.lease(plan.scratch_bytes(threads));
  if (!lease.ok()) return lease.status();
  Arena arena(lease.value());
  Operands o = operands;
  if (problem.weight == MatmulWeight::unpacked) {
    void* const panels = arena.take_bytes(plan.weight_bytes);
    pack_float_weight(context, o.weight, panels);
    o.panels = panels;
  }
  // A row's scale is known when the whole row is.
  if (problem.has_out_scales) {
    o.out = Tensor::contiguous(DType::f32, {plan.m, plan.width}, arena.take_bytes(plan.wide_out_bytes));
    o.out_scales.reset();
  }
  if (!run(context, problem, plan, o, arena)) {
    const Status status = multiply_row_by_row(context, problem, o);
    if (!status.ok()) return status;
  }
  return problem.has_out_scales ? dynamic_quant(context, o.out, operands.out, *operands.out_scales) : Status();
}

}  // namespace gemm
}  // namespace opst

// The one driver of all products: pack x -> tasks -> product -> finish.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "core/shape_check.h"
#include "machine/levels.h"
#include "matmul/call.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_BF16_LEVELS, gemm, FloatKernels, kFloatKernels, float_kernels)
OPST_KERNELS_BY_LEVEL(OPST_INT8_LEVELS, gemm, ByteKernels, kByteKernels, byte_kernels)

namespace gemm {
namespace {

// The memory of one worker.
struct WorkerScratch {
  char* decoded;
  float *sums, *second, *widened;
  WorkerScratch(const Plan& plan, char* all, int worker) {
    Arena own(all + worker * plan.scratch_bytes_per_worker, plan.scratch_bytes_per_worker);
    decoded = own.take<char>(plan.decoded_bytes_per_worker);
    sums = reinterpret_cast<float*>(own.take<char>(plan.sums_bytes_per_worker));
    second = reinterpret_cast<float*>(own.take<char>(plan.second_bytes_per_worker));
    widened = reinterpret_cast<float*>(own.take<char>(plan.widened_bytes_per_worker));
  }
};

// Rows of x as the product takes them.
struct Rows {
  const char* data = nullptr;
  int64_t stride = 0;             // elements of the form
  const int32_t* sums = nullptr;  // of the form bytes
};

// ---- Packing: rows of x in the form that the plan's kernel multiplies

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
  const IntWeightPart& ints;
  const FloatKernels& floats;
  const ByteKernels& bytes;

  const char* row(int64_t i, int64_t t = 0) const {
    return static_cast<const char*>(x.data) + (i * x.strides[0] + t * x.strides[1]) * size_bytes(x.dtype);
  }
  void widen(int64_t first, int64_t rows, int64_t k0, int64_t count, float* out, int64_t out_stride) const {
    floats.widen_rows[float_index(x.dtype)](row(first, k0), x.strides[0], x.strides[1], rows, count, out, out_stride);
  }
  // Rows that are read together: one where a row is contiguous, so that it is read as one stream.
  int64_t at_once(int64_t rows) const { return x.strides[1] == 1 ? 1 : rows; }

  // -> [runs of k][m][x_stride].
  void words(int64_t begin, int64_t end, float* out) const {
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
  bool blocks(int64_t begin, int64_t end, float* widened, Block* out, const Fill& fill) const {
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
  bool rows(int64_t begin, int64_t end, float* widened, void* out, int32_t* sums) const {
    switch (plan.x) {
      case XForm::in_place:
        return true;
      case XForm::words:
        words(begin, end, static_cast<float*>(out));
        return true;
      case XForm::int8_blocks:
        return blocks(begin, end, widened, static_cast<ActivationBlock*>(out),
                      [quantise = bytes.quantise_row](auto... of) {
                        quantise(of...);
                        return true;
                      });
      case XForm::fixed_blocks:
        return blocks(begin, end, widened, static_cast<FixedBlock*>(out), bytes.fix_row);
      case XForm::bytes:
        for (int64_t i = begin; i < end; ++i) {
          bytes.pack_int_row(reinterpret_cast<const int8_t*>(row(i)), x.strides[1], ints, plan.group_bytes,
                             static_cast<int8_t*>(out) + i * plan.x_stride, sums + i * ints.groups);
        }
        return true;
    }
    return false;
  }
};

// Nothing where the form cannot hold one of the rows. `scratch`: the workers' memory.
std::optional<Rows> pack_x(Context& context, const Plan& plan, const Operands& o, Arena& arena, char* scratch) {
  if (plan.x == XForm::in_place) return Rows{static_cast<const char*>(o.x.data), o.x.strides[0]};
  const Isa isa = context.machine().isa;
  const Packing packing{plan, o.x, o.ints, float_kernels(isa), byte_kernels(isa)};
  char* const packed = arena.take<char>(plan.x_bytes);
  auto* const sums = plan.x_sums_bytes == 0 ? nullptr : reinterpret_cast<int32_t*>(arena.take<char>(plan.x_sums_bytes));
  bool holds = true;  // only rows in fixed point may not, and these are one task
  context.impl().pool.parallel_for(ceil_div(plan.m, plan.pack_rows), [&](int64_t task, int worker) {
    const int64_t begin = task * plan.pack_rows, end = std::min(plan.m, begin + plan.pack_rows);
    if (!packing.rows(begin, end, WorkerScratch(plan, scratch, worker).widened, packed, sums)) holds = false;
  });
  if (!holds) return std::nullopt;
  return Rows{packed, plan.x_stride, sums};
}

// ---- Tasks

// The panels from a panel's first column on.
IntWeightPart from_column(IntWeightPart ints, int64_t column) {
  ints.words += column * ints.groups * ints.group_words;
  ints.scales += column * ints.groups;
  if (ints.zeros != nullptr) ints.zeros += column * ints.groups;
  return ints;
}

// A vector as contiguous f32: the tensor itself where it is that, else a copy in `copy`.
const float* plain_floats(const FloatKernels& floats, const ConstTensor* tensor, char* copy) {
  if (tensor == nullptr) return nullptr;
  const int64_t n = tensor->shape[0], stride = tensor->strides[0];
  if (tensor->dtype == DType::f32 && stride == 1) return static_cast<const float*>(tensor->data);
  auto* const to = reinterpret_cast<float*>(copy);
  // One row, or as many rows of one element.
  const int64_t rows = stride == 1 ? 1 : n;
  floats.widen_rows[float_index(tensor->dtype)](tensor->data, stride, 1, rows, n / rows, to, 1);
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
  const auto at = [&](const auto& tensor) {
    return (row * tensor.strides[0] + column * tensor.strides[1]) * size_bytes(tensor.dtype);
  };
  Finish part{.rows = rows,
              .columns = columns,
              .out = static_cast<char*>(o.out.data) + at(o.out),
              .out_type = o.out.dtype,
              .row_stride = o.out.strides[0],
              .column_stride = o.out.strides[1]};
  if (o.residual != nullptr) {
    part.residual = static_cast<const char*>(o.residual->data) + at(*o.residual);
    part.residual_type = o.residual->dtype;
    part.residual_row_stride = o.residual->strides[0];
    part.residual_column_stride = o.residual->strides[1];
  }
  return part;
}

// finish of sums that stay integers.
void store_integers(const Finish& part) {
  for (int64_t i = 0; i < part.rows; ++i) {
    const auto* const from = reinterpret_cast<const int32_t*>(part.sums) + i * part.sums_stride;
    int32_t* const to = static_cast<int32_t*>(part.out) + i * part.row_stride;
    if (part.column_stride == 1) std::copy_n(from, part.columns, to);
    for (int64_t j = 0; part.column_stride != 1 && j < part.columns; ++j) to[j * part.column_stride] = from[j];
  }
}

// False, and nothing written, where the form of x cannot hold one of its rows.
bool run(Context& context, const MatmulProblem& problem, const Plan& plan, const Operands& o, Arena& arena) {
  const FloatKernels& floats = float_kernels(context.machine().isa);
  ThreadPool& pool = context.impl().pool;
  char* const bias_copy = arena.take<char>(plan.bias_bytes);
  const bool int_bias = o.bias != nullptr && o.bias->dtype == DType::i32, int_sums = o.out.dtype == DType::i32;
  const int32_t* const int_biases = int_bias ? whole_panels(*o.bias, bias_copy) : nullptr;
  const float* const biases = int_bias ? nullptr : plain_floats(floats, o.bias, bias_copy);
  const float* const x_scales = plain_floats(floats, o.x_scales, arena.take<char>(plan.x_scales_bytes));
  auto* const scratch = static_cast<char*>(arena.take_bytes(pool.num_threads() * plan.scratch_bytes_per_worker));
  const std::optional<Rows> x = pack_x(context, plan, o, arena, scratch);
  if (!x) return false;

  const auto finish = int_sums ? store_integers : floats.finish[static_cast<int>(problem.activation)];
  const bool ints = problem.weight == MatmulWeight::integers;
  pool.parallel_for(plan.num_tasks(), [&](int64_t task, int worker) {
    // A rectangle of out. (Of a grouped product, whose rows belong to several weights, a task would name its weight.)
    const int64_t row = task / plan.column_tasks * plan.rows_per_task,
                  rows = std::min(plan.rows_per_task, plan.m - row);
    const int64_t column = task % plan.column_tasks * plan.columns_per_task;
    const int64_t columns = std::min(plan.columns_per_task, plan.width - column);
    const WorkerScratch own(plan, scratch, worker);
    Finish part = finish_part(o, row, column, rows, columns);
    // The sums of `count` columns of the weight from a panel's first one on.
    const auto multiply_columns = [&](int64_t first, int64_t count, float* sums, int64_t sums_stride) {
      ProductPart rectangle = {
          .x = x->data + row * x->stride * element_bytes(plan.x),
          .x_stride = x->stride,
          .x_block_stride = plan.m * x->stride,
          .rows = rows,
          .columns = count,
          .k = plan.words,
          .k_block = plan.k_block,
          .panels = ints ? nullptr : static_cast<const char*>(o.panels) + first * plan.column_bytes,
          .scratch = own.decoded,
          .sums = sums,
          .sums_stride = sums_stride};
      if (ints) {
        rectangle.ints = from_column(o.ints, first);
        if (x->sums != nullptr) rectangle.x_sums = x->sums + row * o.ints.groups;
        if (int_biases != nullptr) rectangle.int_bias = int_biases + first;
        rectangle.int_sums = int_sums;
      }
      plan.kernel(rectangle);
    };
    part.sums = own.sums;
    part.sums_stride = plan.sums_stride;
    multiply_columns(column, columns, own.sums, plan.sums_stride);
    if (x_scales != nullptr) part.x_scales = x_scales + row;
    if (biases != nullptr) part.bias = biases + column;
    if (plan.two_halves) {
      const int64_t second = plan.width + column, before = second % kPanelColumns;
      multiply_columns(second - before, before + columns, own.second, plan.second_stride);
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
    ConstTensor residual;
    if (o.residual != nullptr) {
      residual = o.residual->narrowed(0, i, 1);
      of_row.residual = &residual;
    }
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
  const double cubic = std::sqrt(2 / std::acos(-1.0)) * (y + 0.044715 * y * y * y);
  if (activation == Activation::silu) return silu(y);
  if (activation == Activation::gelu_erf) return y * (1 + std::erf(y / std::sqrt(2.0))) / 2;
  if (activation == Activation::gelu_tanh) return y * (1 + std::tanh(cubic)) / 2;
  if (activation == Activation::swiglu) return silu(y) * second;
  if (activation == Activation::swiglu_swapped) return y * silu(second);
  return y;
}

void multiply_f64(Context& context, Activation activation, const Operands& o) {
  const int64_t m = o.out.shape[0], width = o.out.shape[1], k = o.weight->shape[1];
  const bool halves = takes_two_halves(activation);
  const auto y = [&](int64_t i, int64_t j) {
    double sum = 0;
    for (int64_t t = 0; t < k; ++t) sum += element(o.x, i, t) * element(*o.weight, j, t);
    return o.bias != nullptr ? sum + static_cast<const double*>(o.bias->data)[j * o.bias->strides[0]] : sum;
  };
  context.impl().pool.parallel_for(m, [&](int64_t i, int) {
    for (int64_t j = 0; j < width; ++j) {
      double value = activated(activation, y(i, j), halves ? y(i, width + j) : 0);
      if (o.residual != nullptr) value += element(*o.residual, i, j);
      static_cast<double*>(o.out.data)[i * o.out.strides[0] + j * o.out.strides[1]] = value;
    }
  });
}

}  // namespace

Status multiply(Context& context, const MatmulProblem& problem, Operands& o) {
  const int threads = context.impl().pool.num_threads();
  const Plan plan = make_plan(problem, context.machine(), threads);
  if (plan.num_tasks() == 0) {  // scales of rows without columns are written all the same
    if (!problem.has_out_scales) return {};
    return dynamic_quant(context, Tensor::contiguous(DType::f32, {plan.m, plan.width}, nullptr), o.out, *o.out_scales);
  }
  if (plan.path == MatmulPath::f64) {
    multiply_f64(context, problem.activation, o);
    return {};
  }
  Result<WorkspaceLease> lease = context.impl().workspaces.lease(plan.scratch_bytes(threads));
  if (!lease.ok()) return lease.status();
  Arena arena(lease.value());
  if (problem.weight == MatmulWeight::unpacked) {
    char* const panels = arena.take<char>(plan.weight_bytes);
    pack_float_weight(context, normal_strides(*o.weight), panels);
    o.panels = panels;
  }
  // A row's scale is known when the whole row is.
  const Tensor out = o.out;
  if (problem.has_out_scales) {
    o.out = Tensor::contiguous(DType::f32, {plan.m, plan.width}, arena.take<char>(plan.wide_out_bytes));
  }
  if (!run(context, problem, plan, o, arena)) {
    const Status status = multiply_row_by_row(context, problem, o);
    if (!status.ok()) return status;
  }
  return problem.has_out_scales ? dynamic_quant(context, o.out, out, *o.out_scales) : Status();
}

}  // namespace gemm
}  // namespace opst

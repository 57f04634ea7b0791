#include "opst/matmul.h"

#include <algorithm>
#include <cstring>

#include "core/convert.h"
#include "core/guarded.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "machine/context_impl.h"
#include "machine/float_control.h"
#include "machine/levels.h"
#include "matmul/call.h"
#include "matmul/fixed_point_matmul.h"
#include "matmul/int8_blocks_matmul.h"
#include "matmul/kernels.h"
#include "matmul/packed_layout.h"
#include "matmul/plan.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_BF16_LEVELS, gemm, Kernels, kKernels, kernels)
OPST_KERNELS_BY_LEVEL(OPST_INT8_LEVELS, gemm, FewRowsBlockKernels, kFewRowsBlockKernels, few_rows_block_kernels)

namespace gemm {

namespace {

bool is_known(Activation activation) { return activation <= Activation::swiglu_swapped; }
bool is_known(ActivationType type) { return type == ActivationType::exact || type == ActivationType::int8; }

bool takes_two_halves(Activation activation) {
  return activation == Activation::swiglu || activation == Activation::swiglu_swapped;
}

// Checks x, bias, residual and out, beside a weight [n, k] that has been checked.
void check_operands(ShapeCheck& check, std::initializer_list<DType> dtypes, int64_t n, int64_t k, const ConstTensor& x,
                    const Tensor& out, const MatmulOptions& options) {
  check.require(is_known(options.activation), [&] {
    return "activation is " + std::to_string(static_cast<int>(options.activation)) + ", which is no Activation";
  });
  check.require(is_known(options.activations), [&] {
    return "activations is " + std::to_string(static_cast<int>(options.activations)) + ", which is no ActivationType";
  });
  const bool halves = takes_two_halves(options.activation);
  const char* const width = halves ? "half_n" : "n";
  check.tensor("x", x).dtype(dtypes).dims({"m", "k"});
  if (options.bias) check.tensor("bias", *options.bias).dtype(dtypes).dims({"n"});
  // A residual that is the same view as out is checked with out; any other overlap is refused.
  if (options.residual && !same_view(*options.residual, out)) {
    check.tensor("residual", *options.residual).dtype(dtypes).dims({"m", width});
  }
  if (options.out_scales) {
    check.output("out", out).dtype({DType::i8}).dims({"m", width});
    check.output("out_scales", *options.out_scales).dtype({DType::f32}).dims({"m"});
    check.require(x.dtype != DType::f64, "out_scales is given, but products of f64 are not quantised");
  } else {
    check.output("out", out).dtype(dtypes).dims({"m", width});
  }
  if (!check.ok()) return;
  const auto differs = [](const char* where, int64_t size, const char* name, int64_t expected) {
    return std::string(where) + " is " + std::to_string(size) + ", but the weight has " + name + " = " +
           std::to_string(expected);
  };
  check.require(check["k"] == k, [&] { return differs("x dim 1 (k)", check["k"], "k", k); });
  if (options.bias) {
    check.require(check["n"] == n, [&] {
      return halves ? differs("bias dim 0 (n)", check["n"], "n", n) : differs("out dim 1 (n)", check["n"], "n", n);
    });
  }
  if (halves) {
    check.require(n % 2 == 0, [&] {
      return "the weight has n = " + std::to_string(n) + ", but " + to_string(options.activation) + " needs two halves";
    });
    check.require(check["half_n"] == n / 2, [&] {
      return "out dim 1 (half_n) is " + std::to_string(check["half_n"]) +
             ", but the weight has n = " + std::to_string(n) + ", of which " + to_string(options.activation) +
             " makes half";
    });
  } else {
    check.require(check["n"] == n, [&] { return differs("out dim 1 (n)", check["n"], "n", n); });
  }
}

// Rows of x per packing task.
constexpr int64_t kPackRows = 32;

// Words [k0, k0 + words) of rows of bf16 pairs -> [rows][out_stride]; elements from k on are 0.
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
    uint32_t square[kWords][kPackRows];
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

// Rows [begin, end) of x, at most kPackRows, -> [runs of k_block words][m][x_stride].
void pack_x(const Kernels& table, const ConstTensor& x, const Plan& plan, bool dot, int64_t begin, int64_t end,
            float* out) {
  const int64_t m = x.shape[0], k = x.shape[1];
  const auto widen_rows = table.widen_rows[static_cast<int>(float_type(x.dtype))];
  // A row from its beginning to its end where it is contiguous, so that it is read as one stream.
  const int64_t at_once = x.strides[1] == 1 ? 1 : end - begin;
  for (int64_t i = begin; i < end; i += at_once) {
    for (int64_t k0 = 0; k0 < plan.words; k0 += plan.k_block) {
      const int64_t words = std::min(plan.k_block, plan.words - k0);
      float* const to = out + (k0 / plan.k_block * m + i) * plan.x_stride;
      if (dot) {
        pack_pairs(x, i, at_once, k0, words, reinterpret_cast<uint32_t*>(to), plan.x_stride);
        continue;
      }
      const char* const from =
          static_cast<const char*>(x.data) + (i * x.strides[0] + k0 * x.strides[1]) * size_bytes(x.dtype);
      widen_rows(from, x.strides[0], x.strides[1], at_once, std::min(words, k - k0), to, plan.x_stride);
      if (k0 + words > k) {
        for (int64_t j = 0; j < at_once; ++j) to[j * plan.x_stride + words - 1] = 0;
      }
    }
  }
}

void widen_bias(const ConstTensor& bias, float* out) {
  for (int64_t j = 0; j < bias.shape[0]; ++j) {
    const int64_t at = j * bias.strides[0];
    out[j] = bias.dtype == DType::f32    ? static_cast<const float*>(bias.data)[at]
             : bias.dtype == DType::bf16 ? to_f32(static_cast<const bf16*>(bias.data)[at])
                                         : to_f32(static_cast<const f16*>(bias.data)[at]);
  }
}

// The rectangle of out and of the residual that begins at [row, column]; sums and bias are left to the caller.
Finish finish_part(const Tensor& out, const MatmulOptions& options, int64_t row, int64_t column, int64_t rows,
                   int64_t columns) {
  const auto at = [&](const ConstTensor& tensor) {
    return (row * tensor.strides[0] + column * tensor.strides[1]) * size_bytes(tensor.dtype);
  };
  Finish part{.rows = rows,
              .columns = columns,
              .out = static_cast<char*>(out.data) + at(out),
              .out_type = float_type(out.dtype),
              .row_stride = out.strides[0],
              .column_stride = out.strides[1]};
  if (options.residual) {
    const ConstTensor& residual = *options.residual;
    part.residual = {static_cast<const char*>(residual.data) + at(residual), float_type(residual.dtype),
                     residual.strides[0], residual.strides[1]};
  }
  return part;
}

// The bias as contiguous f32: the tensor itself where it is that, else a copy in the arena.
bool copies_bias(const MatmulOptions& options) {
  if (!options.bias) return false;
  return options.bias->dtype != DType::f32 || (options.bias->strides[0] != 1 && options.bias->shape[0] > 1);
}
int64_t bias_copy_bytes(const MatmulOptions& options) {
  return copies_bias(options) ? Arena::size_of<float>(options.bias->shape[0]) : 0;
}
const float* plain_bias(const MatmulOptions& options, Arena& arena) {
  if (!copies_bias(options)) return options.bias ? static_cast<const float*>(options.bias->data) : nullptr;
  auto* const copy = arena.take<float>(options.bias->shape[0]);
  widen_bias(*options.bias, copy);
  return copy;
}

OutputPart plain_sums(float* sums, int64_t stride) {
  return {.data = sums, .row_stride = stride, .column_stride = 1, .bias = nullptr, .bias_stride = 0};
}

// The rows of one task, and its worker's memory for decoded weights.
struct TaskRows {
  int64_t first, count;
  char* scratch;
};

// All tasks of a plan: sums by `product(rows, first column of the weight, columns, sums, stride)`, where the first
// column is a panel's first, then the epilogue.
template <class Product>
void run_tasks(Context& context, const Plan& plan, const Tensor& out, const MatmulOptions& options, const float* bias,
               char* worker_scratch, const Product& product) {
  const int64_t m = out.shape[0], width = out.shape[1];
  const bool halves = takes_two_halves(options.activation);
  const auto finish = kernels(context.machine().isa).finish[static_cast<int>(options.activation)];
  context.impl().pool.parallel_for(plan.num_tasks(), [&](int64_t task, int worker) {
    const int64_t column = task % plan.column_tasks * plan.columns_per_task;
    const int64_t columns = std::min(plan.columns_per_task, width - column);
    char* const scratch = worker_scratch + worker * plan.bytes_per_worker();
    TaskRows rows = {.first = task / plan.column_tasks * plan.rows_per_task, .count = 0, .scratch = scratch};
    rows.count = std::min(plan.rows_per_task, m - rows.first);
    Finish part = finish_part(out, options, rows.first, column, rows.count, columns);
    part.sums = reinterpret_cast<float*>(scratch + plan.decoded_bytes_per_worker);
    part.sums_stride = plan.sums_stride;
    product(rows, column, columns, part.sums, part.sums_stride);
    if (bias != nullptr) part.bias = bias + column;
    if (halves) {
      auto* const second =
          reinterpret_cast<float*>(scratch + plan.decoded_bytes_per_worker + plan.sums_bytes_per_worker);
      const int64_t first = (width + column) / kPanelColumns * kPanelColumns, before = width + column - first;
      product(rows, first, before + columns, second, plan.second_stride);
      part.second = second + before;
      part.second_stride = plan.second_stride;
      if (bias != nullptr) part.second_bias = bias + width + column;
    }
    finish(part);
  });
}

// weight [n, k] in panels; tensors checked.
Status multiply_panels(Context& context, const ConstTensor& x, QuantFormat format, const void* panels, int64_t k,
                       const Tensor& out, const MatmulOptions& options) {
  const int64_t m = out.shape[0], width = out.shape[1];
  if (m == 0 || width == 0) return {};

  // Plan.
  const Kernels& table = kernels(context.machine().isa);
  const bool dot = x.dtype == DType::bf16 && format == QuantFormat::bf16 && table.few_rows_dot != nullptr &&
                   context.machine().bf16_product == Bf16Product::dot;
  const bool halves = takes_two_halves(options.activation);
  const bool in_place = x.dtype == DType::f32 && (x.strides[1] == 1 || k <= 1) && packed_inputs(format, k) == k;
  const Plan plan = make_plan(
      {.m = m, .n = width, .k = k, .format = format, .dot = dot, .read_x_in_place = in_place, .two_halves = halves},
      table.few_columns, table.many_columns);
  ThreadPool& pool = context.impl().pool;
  Result<WorkspaceLease> lease =
      context.impl().workspaces.lease(plan.scratch_bytes(pool.num_threads()) + bias_copy_bytes(options));
  if (!lease.ok()) return lease.status();
  Arena arena(lease.value());

  // Run.
  const float* const bias = plain_bias(options, arena);
  const float* words = static_cast<const float*>(x.data);
  int64_t x_stride = x.strides[0];
  if (plan.x_stride > 0) {
    auto* const packed = static_cast<float*>(arena.take_bytes(plan.packed_x_bytes));
    pool.parallel_for(ceil_div(m, kPackRows), [&](int64_t task, int) {
      pack_x(table, x, plan, dot, task * kPackRows, std::min(m, (task + 1) * kPackRows), packed);
    });
    words = packed;
    x_stride = plan.x_stride;
  }
  auto* const worker_scratch = static_cast<char*>(arena.take_bytes(pool.num_threads() * plan.bytes_per_worker()));

  const auto few_rows = dot ? table.few_rows_dot : table.few_rows[static_cast<int>(format)];
  const auto many_rows = dot ? table.many_rows_dot : table.many_rows[static_cast<int>(format)];
  const int64_t column_bytes = packed_column_bytes(format, k);
  run_tasks(context, plan, out, options, bias, worker_scratch,
            [&](const TaskRows& rows, int64_t first, int64_t count, float* sums, int64_t sums_stride) {
              const void* const from = static_cast<const char*>(panels) + first * column_bytes;
              if (plan.path == Path::few_rows) {
                few_rows({.x = words + rows.first * x_stride,
                          .x_stride = x_stride,
                          .rows = rows.count,
                          .columns = count,
                          .k = plan.words,
                          .panels = from,
                          .out = plain_sums(sums, sums_stride)});
                return;
              }
              many_rows({.x = words + rows.first * x_stride,
                         .x_stride = x_stride,
                         .x_block_stride = m * x_stride,
                         .rows = rows.count,
                         .columns = count,
                         .k = plan.words,
                         .k_block = plan.k_block,
                         .panels = from,
                         .decoded = reinterpret_cast<float*>(rows.scratch),
                         .sums = sums,
                         .sums_stride = sums_stride});
            });
  return {};
}

// x as f32: as it is, with any strides, or a contiguous copy in the arena.
int64_t wide_x_bytes(const ConstTensor& x) {
  return x.dtype == DType::f32 ? 0 : Arena::size_of<float>(x.shape[0] * x.shape[1]);
}
ConstTensor widen_x(Context& context, const ConstTensor& x, Arena& arena) {
  if (x.dtype == DType::f32) return x;
  const int64_t m = x.shape[0], k = x.shape[1];
  auto* const wide = arena.take<float>(m * k);
  const auto widen_rows = kernels(context.machine().isa).widen_rows[static_cast<int>(float_type(x.dtype))];
  context.impl().pool.parallel_for(ceil_div(m, kPackRows), [&](int64_t task, int) {
    const int64_t row = task * kPackRows;
    widen_rows(static_cast<const char*>(x.data) + row * x.strides[0] * size_bytes(x.dtype), x.strides[0], x.strides[1],
               std::min(kPackRows, m - row), k, wide + row * k, k);
  });
  return ConstTensor::contiguous(DType::f32, {m, k}, wide);
}

// Few rows, each cut into blocks of activations by `fill(x, stride, k, blocks)`, times columns of the weight by
// `multiply`. False, and nothing written, where fill says of a row that its blocks cannot hold it.
template <class Block, class Fill>
Result<bool> multiply_few_blocks(Context& context, const ConstTensor& x, const PackedWeight& weight, const Tensor& out,
                                 const MatmulOptions& options, const Fill& fill,
                                 void (*multiply)(const BlockRows<Block>&)) {
  const int64_t m = out.shape[0], k = weight.k(), blocks = k / kActivationBlock;
  const int threads = context.impl().pool.num_threads();
  const Plan plan = plan_few_blocks({.m = m,
                                     .n = out.shape[1],
                                     .k = k,
                                     .format = weight.format(),
                                     .two_halves = takes_two_halves(options.activation)},
                                    threads);
  Result<WorkspaceLease> lease = context.impl().workspaces.lease(
      Arena::size_of<Block>(m * blocks) + wide_x_bytes(x) + bias_copy_bytes(options) + plan.scratch_bytes(threads));
  if (!lease.ok()) return lease.status();
  Arena arena(lease.value());
  auto* const a = arena.take<Block>(m * blocks);
  const ConstTensor wide_x = widen_x(context, x, arena);
  {
    const DefaultFloatControl float_control;  // as in a parallel region
    for (int64_t i = 0; i < m; ++i) {
      const float* const row = static_cast<const float*>(wide_x.data) + i * wide_x.strides[0];
      if (!fill(row, wide_x.strides[1], k, a + i * blocks)) return false;
    }
  }
  const float* const bias = plain_bias(options, arena);
  auto* const scratch = static_cast<char*>(arena.take_bytes(threads * plan.bytes_per_worker()));
  const int64_t column_bytes = packed_column_bytes(weight.format(), k);
  run_tasks(context, plan, out, options, bias, scratch,
            [&](const TaskRows& rows, int64_t first, int64_t count, float* sums, int64_t sums_stride) {
              multiply({.a = a + rows.first * blocks,
                        .a_stride = blocks,
                        .rows = rows.count,
                        .columns = count,
                        .k = k,
                        .panels = static_cast<const char*>(weight.data()) + first * column_bytes,
                        .out = plain_sums(sums, sums_stride)});
            });
  return true;
}

// Many rows rounded to int8: the whole product into f32, then the epilogue.
Status multiply_int8_blocks(Context& context, const ConstTensor& x, const PackedWeight& weight, const Tensor& out,
                            const MatmulOptions& options) {
  const int64_t m = out.shape[0], width = out.shape[1];
  const bool direct = out.dtype == DType::f32 && options.activation == Activation::none && !options.residual;
  const int64_t y_stride = round_up(weight.n(), kPanelColumns);  // room for whole vectors
  Result<WorkspaceLease> lease = context.impl().workspaces.lease(wide_x_bytes(x) + bias_copy_bytes(options) +
                                                                 (direct ? 0 : Arena::size_of<float>(m * y_stride)));
  if (!lease.ok()) return lease.status();
  Arena arena(lease.value());
  const ConstTensor wide_x = widen_x(context, x, arena);
  const float* const bias = plain_bias(options, arena);
  if (direct) {
    return matmul_int8_blocks(context, wide_x, weight,
                              {.data = static_cast<float*>(out.data),
                               .row_stride = out.strides[0],
                               .column_stride = out.strides[1],
                               .bias = bias,
                               .bias_stride = 1});
  }
  auto* const y = arena.take<float>(m * y_stride);
  const Status status = matmul_int8_blocks(context, wide_x, weight, plain_sums(y, y_stride));
  if (!status.ok()) return status;
  const auto finish = kernels(context.machine().isa).finish[static_cast<int>(options.activation)];
  context.impl().pool.parallel_for(m, [&](int64_t row, int) {
    Finish part = finish_part(out, options, row, 0, 1, width);
    part.sums = y + row * y_stride;  // the last vector's surplus falls on second halves that have been read
    part.bias = bias;
    if (takes_two_halves(options.activation)) {
      part.second = part.sums + width;
      part.second_bias = bias != nullptr ? bias + width : nullptr;
    }
    finish(part);
  });
  return {};
}

// A packed weight by the way that suits format, machine and options; tensors checked.
Status multiply_packed(Context& context, const ConstTensor& x, const PackedWeight& weight, const Tensor& out,
                       const MatmulOptions& options) {
  const int64_t m = out.shape[0];
  if (m == 0 || out.shape[1] == 0) return {};
  const FewRowsBlockKernels& few = few_rows_block_kernels(context.machine().isa);
  const auto format = static_cast<size_t>(weight.format());
  if (options.activations == ActivationType::int8 && multiplies_int8_blocks(weight.format())) {
    if (m > kMaxInt8FewRows || few.int8[format] == nullptr) {
      return multiply_int8_blocks(context, x, weight, out, options);
    }
    const auto quantise = [quantise_row = int8_quantise_row(context.machine().isa)](auto... row) {
      quantise_row(row...);
      return true;
    };
    return multiply_few_blocks<ActivationBlock>(context, x, weight, out, options, quantise, few.int8[format]).status();
  }
  if (!options.batch_invariant && m <= kMaxFixedRows && few.fixed[format] != nullptr) {
    const Result<bool> done =
        multiply_few_blocks<FixedBlock>(context, x, weight, out, options, few.fix_row, few.fixed[format]);
    if (!done.ok()) return done.status();
    if (done.value()) return {};
    // One row cannot be held: each row gets a call of its own, so that the other rows keep their bits.
    if (m > 1) {
      for (int64_t i = 0; i < m; ++i) {
        MatmulOptions row_options = options;
        if (options.residual) row_options.residual = options.residual->narrowed(0, i, 1);
        const Status status = multiply_packed(context, x.narrowed(0, i, 1), weight, out.narrowed(0, i, 1), row_options);
        if (!status.ok()) return status;
      }
      return {};
    }
  }
  return multiply_panels(context, x, weight.format(), weight.data(), weight.k(), out, options);
}

// multiply(out, options), through f32 where out is quantised: a row's scale is known when the whole row is.
template <class Multiply>
Status with_out_scales(Context& context, const Tensor& out, const MatmulOptions& options, const Multiply& multiply) {
  if (!options.out_scales) return multiply(out, options);
  const int64_t m = out.shape[0], width = out.shape[1];
  if (m == 0) return {};
  Result<WorkspaceLease> lease = context.impl().workspaces.lease(Arena::size_of<float>(m * width));
  if (!lease.ok()) return lease.status();
  const Tensor wide = Tensor::contiguous(DType::f32, {m, width}, lease.value().data());
  MatmulOptions wide_options = options;
  wide_options.out_scales.reset();
  const Status status = multiply(wide, wide_options);
  if (!status.ok()) return status;
  return dynamic_quant(context, wide, out, *options.out_scales);
}

constexpr std::initializer_list<DType> kFloats = {DType::f32, DType::bf16, DType::f16};

// `options` with normal_strides.
MatmulOptions normal_options(MatmulOptions options) {
  for (std::optional<ConstTensor>* const tensor : {&options.bias, &options.residual}) {
    if (*tensor) **tensor = normal_strides(**tensor);
  }
  return options;
}

}  // namespace

Status multiply(Context& context, const ConstTensor& x, const ConstTensor& weight, const Tensor& out,
                const MatmulOptions& options) {
  if (out.shape[0] == 0 || out.shape[1] == 0) return {};
  if (weight.dtype == DType::f64) {
    multiply_f64(context, x, weight, out, options);
    return {};
  }
  const int64_t n = weight.shape[0], k = weight.shape[1];
  const QuantFormat format = weight_format(weight.dtype);
  const Size bytes = Size(packed_column_bytes(format, k)) * round_up(n, kPanelColumns);
  Result<WorkspaceLease> lease = context.impl().workspaces.lease(bytes.value());
  if (!lease.ok()) return lease.status();
  pack_float_weight(context, weight, lease.value().data());
  return multiply_panels(context, x, format, lease.value().data(), k, out, options);
}

}  // namespace gemm

void read_ahead(Context& context, const PackedWeight& weight, Activation activation) {
  // A worker has some microseconds between two parallel regions, and an L2 of its own to fetch into.
  constexpr int64_t kMostBytes = 128 << 10;
  const int threads = context.num_threads();
  if (threads == 1 || weight.size_bytes() == 0 || !gemm::is_known(activation)) return;
  const bool halves = gemm::takes_two_halves(activation);
  const gemm::Plan plan = gemm::plan_few_blocks({.m = 1,
                                                 .n = halves ? weight.n() / 2 : weight.n(),
                                                 .k = weight.k(),
                                                 .format = weight.format(),
                                                 .two_halves = halves},
                                                threads);
  const int64_t piece = plan.columns_per_task * gemm::packed_column_bytes(weight.format(), weight.k());
  context.impl().pool.read_ahead(weight.data(), piece, std::min(piece, kMostBytes));
}

const char* to_string(ActivationType type) {
  switch (type) {
    case ActivationType::exact:
      return "exact";
    case ActivationType::int8:
      return "int8";
  }
  return "unknown";
}

const char* to_string(Activation activation) {
  switch (activation) {
    case Activation::none:
      return "none";
    case Activation::silu:
      return "silu";
    case Activation::gelu_erf:
      return "gelu_erf";
    case Activation::gelu_tanh:
      return "gelu_tanh";
    case Activation::swiglu:
      return "swiglu";
    case Activation::swiglu_swapped:
      return "swiglu_swapped";
  }
  return "unknown";
}

Status matmul(Context& context, const ConstTensor& x, const PackedWeight& weight, const Tensor& out,
              const MatmulOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("matmul");
    check.tensor("weight", ConstTensor::contiguous(DType::u8, {weight.size_bytes()}, weight.data()));
    gemm::check_operands(check, gemm::kFloats, weight.n(), weight.k(), x, out, options);
    if (!check.ok()) return check.status();
    return gemm::with_out_scales(context, normal_strides(out), gemm::normal_options(options),
                                 [&, x = normal_strides(x)](const Tensor& to, const MatmulOptions& to_options) {
                                   return gemm::multiply_packed(context, x, weight, to, to_options);
                                 });
  });
}

Status matmul(Context& context, const ConstTensor& x, const ConstTensor& weight, const Tensor& out,
              const MatmulOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("matmul");
    check.tensor("weight", weight)
        .dtype({DType::f32, DType::bf16, DType::f16, DType::f64})
        .dims({"weight_n", "weight_k"});
    if (!check.ok()) return check.status();
    if (weight.dtype == DType::f64) {
      gemm::check_operands(check, {DType::f64}, check["weight_n"], check["weight_k"], x, out, options);
    } else {
      gemm::check_operands(check, gemm::kFloats, check["weight_n"], check["weight_k"], x, out, options);
    }
    if (!check.ok()) return check.status();
    return gemm::with_out_scales(
        context, normal_strides(out), gemm::normal_options(options),
        [&, x = normal_strides(x), weight = normal_strides(weight)](const Tensor& to, const MatmulOptions& to_options) {
          return gemm::multiply(context, x, weight, to, to_options);
        });
  });
}

}  // namespace opst

// The one driver of all products: pack x -> tasks -> product -> finish.
#include <algorithm>
#include <cmath>

#include "machine/levels.h"
#include "matmul/call.h"
#include "quant/kernels.h"
#include "quant/matrices.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_BF16_LEVELS, gemm, FloatKernels, kFloatKernels, float_kernels)
OPST_KERNELS_BY_LEVEL(OPST_INT8_LEVELS, gemm, ByteKernels, kByteKernels, byte_kernels)

namespace gemm {
namespace {

// Products that run together have so much shared memory for each thread: for hundreds of tasks, while a training step's
// weights, packed in each call, are not all there at once.
constexpr int64_t kWaveBytes = 16 << 20;

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

// Where a kernel leaves a task's sums: in the worker's scratch, or rounded in out.
struct SumsPlace {
  float* sums;
  int64_t stride;
  void* out = nullptr;
};

// The tasks of products whose rows of x are packed.
struct Tasks {
  std::span<SingleProduct> products;
  void (*finish)(const Finish& part);
  void (*quantise)(const quant::QuantizeGroup& group);
  bool integers;  // int8 or int4 weights
  char* scratch;
  int64_t worker_bytes;

  // The sums of rows times `count` columns of the weight from a panel's first one on.
  static void multiply_columns(const SingleProduct& product, bool integers, int64_t row, int64_t rows, int64_t first,
                               int64_t count, char* decoded, const SumsPlace& sums) {
    const Plan& plan = product.plan;
    const Rows& x = product.x;
    ProductPart rectangle = {
        .x = x.data + row * x.stride * element_bytes(plan.x),
        .x_stride = x.stride,
        .x_block_stride = plan.m * x.stride,
        .rows = rows,
        .columns = count,
        .k = plan.words,
        .k_block = plan.k_block,
        .panels = integers ? nullptr : static_cast<const char*>(product.panels) + first * plan.column_bytes,
        .scratch = decoded,
        .sums = sums.sums,
        .sums_stride = sums.stride,
        .inputs = product.inputs,
        .input_stride = product.input_stride,
        .out = sums.out,
        .out_type = product.operands->out.dtype};
    if (integers) {
      rectangle.ints = from_column(product.operands->ints, first);
      if (x.sums != nullptr) rectangle.x_sums = x.sums + row * rectangle.ints.groups;
      if (product.int_biases != nullptr) rectangle.int_bias = product.int_biases + first;
      rectangle.int_sums = product.operands->out.dtype == DType::i32;
    }
    plan.kernel(rectangle);
  }

  // A rectangle of out. `wide`: its rows as f32 before they are quantised; null: in out.
  void rectangle(const SingleProduct& product, int64_t row, int64_t rows, int64_t column, int64_t columns,
                 const WorkerScratch& own, float* wide) const {
    const Plan& plan = product.plan;
    Finish part = finish_part(*product.operands, row, column, rows, columns);
    if (wide != nullptr) {
      part.out = wide + column;
      part.out_type = DType::f32;
      part.row_stride = plan.width;
      part.column_stride = 1;
    }
    if (product.sums_in_out && columns % plan.columns_at_once == 0) {
      multiply_columns(product, integers, row, rows, column, columns, own.decoded,
                       {nullptr, part.row_stride, part.out});
      return;
    }
    part.sums = own.sums;
    part.sums_stride = plan.sums_stride;
    multiply_columns(product, integers, row, rows, column, columns, own.decoded, {own.sums, plan.sums_stride});
    if (product.x_scales != nullptr) part.x_scales = product.x_scales + row;
    if (product.biases != nullptr) part.bias = product.biases + column;
    if (plan.two_halves) {
      const int64_t second = plan.width + column, before = second % kPanelColumns;
      multiply_columns(product, integers, row, rows, second - before, before + columns, own.decoded,
                       {own.second, plan.second_stride});
      part.second = own.second + before;
      part.second_stride = plan.second_stride;
      if (product.biases != nullptr) part.second_bias = product.biases + second;
    }
    finish(part);
  }

  // Whole rows as dynamic_quant quantises them.
  void quantise_rows(const SingleProduct& product, int64_t row, int64_t rows, const float* wide) const {
    const Operands& o = *product.operands;
    for (int64_t i = row; i < row + rows; ++i, wide += product.plan.width) {
      quantise({.x = wide,
                .x_stride = 1,
                .count = product.plan.width,
                .smooth = o.smooth_scales == nullptr ? nullptr : static_cast<const float*>(o.smooth_scales->data),
                .smooth_stride = o.smooth_scales == nullptr ? 0 : o.smooth_scales->strides[0],
                .bits = 8,
                .scale = static_cast<float*>(o.out_scales->data) + i * o.out_scales->strides[0],
                .q = static_cast<int8_t*>(o.out.data) + i * o.out.strides[0],
                .q_stride = o.out.strides[1]});
    }
  }

  void operator()(int64_t task, int worker) const {
    const SingleProduct& product = product_of(products, task, &SingleProduct::tasks_before);
    if (!product.held) return;
    const Plan& plan = product.plan;
    const WorkerScratch own(plan, scratch + worker * worker_bytes);
    task -= product.tasks_before;
    const int64_t row = task / plan.column_tasks * plan.rows_per_task,
                  rows = std::min(plan.rows_per_task, plan.m - row);
    const int64_t first = task % plan.column_tasks * plan.columns_per_task,
                  end = std::min(plan.width, first + plan.columns_per_task);
    float* const wide = plan.whole_rows           ? own.tile
                        : product.wide != nullptr ? product.wide + row * plan.width
                                                  : nullptr;
    for (int64_t column = first; column < end; column += plan.chunk_columns) {
      rectangle(product, row, rows, column, std::min(plan.chunk_columns, end - column), own, wide);
    }
    if (plan.whole_rows) quantise_rows(product, row, rows, wide);
  }
};

// Whether a kernel may store outputs: it has all of k at once, they lie side by side, and nothing joins a sum.
bool sums_are_outputs(const MatmulProblem& problem, const Plan& plan, const Operands& o) {
  const bool stored_once = plan.path == MatmulPath::many_rows || plan.path == MatmulPath::many_rows_in_place;
  return stored_once && plan.words > 0 && plan.words <= plan.k_block && problem.activation == Activation::none &&
         o.bias == nullptr && o.residual == nullptr && o.x_scales == nullptr && !problem.has_out_scales &&
         o.out.strides[1] == 1;
}

// What the tasks read of a product's operands beside x.
void prepare(Context& context, SingleProduct& product, Arena& arena) {
  const FloatKernels& floats = float_kernels(context.machine().isa);
  const Operands& o = *product.operands;
  const Plan& plan = product.plan;
  product.panels = o.panels;
  if (plan.path == MatmulPath::many_rows_in_place) {
    const ConstTensor weight = normal_strides(*o.weight);
    product.panels = weight.data, product.inputs = weight.shape[1], product.input_stride = weight.strides[1];
  } else if (o.weight != nullptr) {
    char* const panels = arena.take<char>(plan.weight_bytes);
    pack_float_weight(context, normal_strides(*o.weight), panels);
    product.panels = panels;
  }
  if (plan.wide_out_bytes > 0) product.wide = reinterpret_cast<float*>(arena.take<char>(plan.wide_out_bytes));
  char* const bias_copy = arena.take<char>(plan.bias_bytes);
  const bool int_bias = o.bias != nullptr && o.bias->dtype == DType::i32;
  product.int_biases = int_bias ? whole_panels(*o.bias, bias_copy) : nullptr;
  product.biases = int_bias ? nullptr : plain_floats(floats, o.bias, bias_copy);
  product.x_scales = plain_floats(floats, o.x_scales, arena.take<char>(plan.x_scales_bytes));
}

// Each row by a call of its own, so that the rows which fixed point holds keep their bits.
Status multiply_row_by_row(Context& context, const MatmulProblem& problem, const SingleProduct& product) {
  const Operands& o = *product.operands;
  MatmulProblem row = problem;
  row.m = 1;
  row.batch_invariant = product.plan.m == 1;  // a single row that fixed point does not hold is multiplied in f32
  for (int64_t i = 0; i < product.plan.m; ++i) {
    Operands of_row = o;
    if (o.row_of_x == nullptr) {
      of_row.x = o.x.narrowed(0, i, 1);
    } else {
      of_row.row_of_x = o.row_of_x + i;
    }
    of_row.out = o.out.narrowed(0, i, 1);
    ConstTensor residual;
    if (o.residual != nullptr) {
      residual = o.residual->narrowed(0, i, 1);
      of_row.residual = &residual;
    }
    Tensor scale;
    if (problem.has_out_scales) {
      scale = o.out_scales->narrowed(0, i, 1);
      of_row.out_scales = &scale;
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
    const int64_t row = o.row_of_x == nullptr ? i : o.row_of_x[i];
    double sum = 0;
    for (int64_t t = 0; t < k; ++t) sum += element(o.x, row, t) * element(*o.weight, j, t);
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

// Quantises rows that lie as f32 in the workspace; scales of rows without columns are written all the same.
Status quantise_wide(Context& context, const SingleProduct& product) {
  const Operands& o = *product.operands;
  const auto wide = Tensor::contiguous(DType::f32, {product.plan.m, product.plan.width}, product.wide);
  return dynamic_quant(context, wide, o.out, *o.out_scales,
                       {.smooth_scales = o.smooth_scales == nullptr ? ConstTensor() : *o.smooth_scales});
}

// Products whose scratch memory is there.
Status run_wave(Context& context, const MatmulProblem& problem, std::span<SingleProduct> products, const Wave& wave,
                Arena arena) {
  const Isa isa = context.machine().isa;
  ThreadPool& pool = context.impl().pool;
  int64_t tasks = 0;
  for (SingleProduct& product : products) {
    product.tasks_before = tasks;
    tasks += product.plan.num_tasks();
    if (product.plan.num_tasks() == 0) continue;
    product.sums_in_out = sums_are_outputs(problem, product.plan, *product.operands);
    prepare(context, product, arena);
  }
  const int64_t worker_bytes = wave.scratch_bytes_per_worker;
  auto* const scratch = static_cast<char*>(arena.take_bytes(pool.num_threads() * worker_bytes));
  pack_x(context, products, arena, scratch, worker_bytes);
  const bool int_sums = products[0].operands->out.dtype == DType::i32;
  pool.parallel_for(tasks, Tasks{.products = products,
                                 .finish = int_sums ? store_integers
                                                    : float_kernels(isa).finish[static_cast<int>(problem.activation)],
                                 .quantise = quant::kernels(isa).quantize_group[0],
                                 .integers = problem.weight == MatmulWeight::integers,
                                 .scratch = scratch,
                                 .worker_bytes = worker_bytes});
  for (const SingleProduct& product : products) {
    Status status;
    if (!product.held) {
      status = multiply_row_by_row(context, problem, product);
    } else if (problem.has_out_scales && !product.plan.whole_rows) {
      status = quantise_wide(context, product);
    }
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace

Wave wave_from(std::span<const SingleProduct> products, size_t begin, int num_threads) {
  Wave wave{.end = begin};
  Size shared = 0;
  while (wave.end < products.size()) {
    const Plan& plan = products[wave.end].plan;
    const Size more = shared + plan.scratch_bytes_shared;
    if (wave.end > begin && more > Size(kWaveBytes) * num_threads) break;
    shared = more;
    wave.scratch_bytes_per_worker = std::max(wave.scratch_bytes_per_worker, plan.scratch_bytes_per_worker);
    ++wave.end;
  }
  wave.scratch_bytes_shared = shared.value();
  return wave;
}

Status multiply_all(Context& context, const MatmulProblem& problem, std::span<SingleProduct> products) {
  const int threads = context.impl().pool.num_threads();
  if (problem.x_dtype == DType::f64) {
    const Status ready = context.impl().workspaces.ready();
    if (!ready.ok()) return ready;
    for (const SingleProduct& product : products) {
      if (product.plan.num_tasks() > 0) multiply_f64(context, problem.activation, *product.operands);
    }
    return {};
  }
  int64_t most = 0;
  Wave wave;
  for (size_t begin = 0; begin < products.size(); begin = wave.end) {
    wave = wave_from(products, begin, threads);
    most = std::max(most, wave.scratch_bytes(threads));
  }
  if (most == 0 && !problem.has_out_scales) return context.impl().workspaces.ready();
  const Result<WorkspaceLease> lease = context.impl().workspaces.lease(most);
  if (!lease.ok()) return lease.status();
  for (size_t begin = 0; begin < products.size(); begin = wave.end) {
    wave = wave_from(products, begin, threads);
    if (begin > 0) lease.value().renew();
    const Status status =
        run_wave(context, problem, products.subspan(begin, wave.end - begin), wave, Arena(lease.value()));
    if (!status.ok()) return status;
  }
  return {};
}

Status multiply(Context& context, const MatmulProblem& problem, const Operands& operands) {
  SingleProduct product{.operands = &operands,
                        .plan = make_plan(problem, context.machine(), context.impl().pool.num_threads())};
  return multiply_all(context, problem, {&product, 1});
}

}  // namespace gemm
}  // namespace opst

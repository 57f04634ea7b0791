// int8 and int4 weights with scales: packing (layout: weights_int.h), and products with int8 or float x.
#include <algorithm>
#include <optional>
#include <string>

#include "core/convert.h"
#include "core/elements.h"
#include "core/guarded.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "machine/context_impl.h"
#include "machine/levels.h"
#include "matmul/call.h"
#include "matmul/plan.h"
#include "opst/matmul.h"
#include "quant/int_matrix.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_INT8_LEVELS, gemm, IntKernels, kIntKernels, int_kernels)

namespace {

using gemm::IntFloatRows;
using gemm::IntOutputPart;
using gemm::IntRows;
using gemm::IntWeightPart;
using gemm::kIntPanelColumns;

// u * s summed over a group stays below 2^31: 255 * 128 * 2^16.
constexpr int64_t kMaxGroupValues = 1 << 16;

// A packed weight's sizes; words, scales and zeros follow one another.
struct Layout {
  int64_t n, groups, group_values, group_words;
  bool has_zeros;

  Layout(int64_t n_, int64_t k, int64_t groups_, int bits, bool has_zeros_)
      : n(n_),
        groups(groups_),
        group_values(k / groups_),
        group_words(ceil_div(group_values, 32 / bits)),
        has_zeros(has_zeros_) {}

  int64_t panels() const { return ceil_div(n, kIntPanelColumns); }
  int64_t panel_words() const { return groups * group_words * kIntPanelColumns; }
  int64_t panel_numbers() const { return groups * kIntPanelColumns; }
  // kMaxBytes where there are more, which no memory holds.
  int64_t bytes() const {
    const Size per_group = 4 * kIntPanelColumns * (group_words + (has_zeros ? 2 : 1));
    return (per_group * groups * panels()).value();
  }
  uint32_t* words(void* data) const { return static_cast<uint32_t*>(data); }
  float* scales(void* data) const { return reinterpret_cast<float*>(words(data) + panels() * panel_words()); }
  int32_t* zeros(void* data) const { return reinterpret_cast<int32_t*>(scales(data) + panels() * panel_numbers()); }
  // From the panel that begins with output `column` on.
  IntWeightPart part(const void* packed, int64_t column, int64_t columns) const {
    void* const data = const_cast<void*>(packed);
    const int64_t panel = column / kIntPanelColumns;
    return {.words = words(data) + panel * panel_words(),
            .scales = scales(data) + panel * panel_numbers(),
            .zeros = has_zeros ? zeros(data) + panel * panel_numbers() : nullptr,
            .columns = columns,
            .groups = groups,
            .group_words = group_words,
            .group_values = group_values};
  }
};

// One panel: outputs [first, first + 16) of the weight, as far as there are any.
void pack_panel(const IntMatrix& weight, int bits, const Layout& layout, int64_t panel, void* data) {
  const int64_t first = panel * kIntPanelColumns;
  const int values = 32 / bits;
  uint32_t* words = layout.words(data) + panel * layout.panel_words();
  std::fill(words, words + layout.panel_words(), 0u);
  float* const scales = layout.scales(data) + panel * layout.panel_numbers();
  std::fill(scales, scales + layout.panel_numbers(), 0.0f);
  int32_t* const zeros = layout.has_zeros ? layout.zeros(data) + panel * layout.panel_numbers() : nullptr;
  if (zeros != nullptr) std::fill(zeros, zeros + layout.panel_numbers(), 0);
  for (int64_t c = 0; c < std::min<int64_t>(kIntPanelColumns, layout.n - first); ++c) {
    const IntRow row(weight, first + c);
    for (int64_t g = 0; g < layout.groups; ++g) {
      uint32_t* const group = words + g * layout.group_words * kIntPanelColumns + c;
      for (int64_t t = 0; t < layout.group_values; ++t) {
        const auto u = static_cast<uint32_t>(row.q(g * layout.group_values + t) + (1 << (bits - 1)));
        const int64_t i = t % values;
        const int64_t bit = bits == 8 ? 8 * i : 8 * (i % 4) + 4 * (i / 4);
        group[t / values * kIntPanelColumns] |= u << bit;
      }
      scales[g * kIntPanelColumns + c] = row.scale(g);
      if (zeros != nullptr) zeros[g * kIntPanelColumns + c] = row.zero(g);
    }
  }
}

// from [count], any stride -> contiguous T.
template <class T>
void gather(const ConstTensor& from, T* to) {
  for (int64_t i = 0; i < from.shape[0]; ++i) {
    const int64_t at = i * from.strides[0];
    switch (from.dtype) {
      case DType::i32:
        to[i] = static_cast<T>(static_cast<const int32_t*>(from.data)[at]);
        break;
      case DType::bf16:
        to[i] = static_cast<T>(to_f32(static_cast<const bf16*>(from.data)[at]));
        break;
      case DType::f16:
        to[i] = static_cast<T>(to_f32(static_cast<const f16*>(from.data)[at]));
        break;
      default:
        to[i] = static_cast<T>(static_cast<const float*>(from.data)[at]);
    }
  }
}

struct Call {
  Context& context;
  const MatmulProblem& problem;
  const ConstTensor& x;
  const PackedIntWeight& weight;
  const Tensor& out;
  const IntMatmulOptions& options;
  const gemm::IntKernels& table = gemm::int_kernels(context.machine().isa);
  Layout layout = Layout(weight.n(), weight.k(), weight.groups(), weight.bits(), weight.has_zeros());
  int64_t m = x.shape[0], n = weight.n(), k = weight.k();
  const int format = weight.bits() == 8 ? 0 : 1;

  bool int_bias() const { return options.bias && options.bias->dtype == DType::i32; }
  // The whole output, with bias and scales gathered in the arena.
  IntOutputPart whole(Arena& arena) const {
    IntOutputPart part = {out.dtype, out.data, out.strides[0], out.strides[1], nullptr, nullptr, nullptr};
    if (int_bias()) {
      auto* const bias = arena.take<int32_t>(round_up(n, kIntPanelColumns));
      gather(*options.bias, bias);
      part.int_bias = bias;
    } else if (options.bias) {
      auto* const bias = arena.take<float>(round_up(n, kIntPanelColumns));
      gather(*options.bias, bias);
      part.bias = bias;
    }
    if (options.x_scales) {
      auto* const scales = arena.take<float>(m);
      gather(*options.x_scales, scales);
      part.x_scales = scales;
    }
    return part;
  }
  IntOutputPart from(IntOutputPart part, int64_t row, int64_t column) const {
    part.data =
        static_cast<char*>(part.data) + (row * part.row_stride + column * part.column_stride) * size_bytes(part.type);
    if (part.int_bias != nullptr) part.int_bias += column;
    if (part.bias != nullptr) part.bias += column;
    if (part.x_scales != nullptr) part.x_scales += row;
    return part;
  }

  Status with_integers();
  Status with_floats();
};

Status Call::with_integers() {
  ThreadPool& pool = context.impl().pool;
  const gemm::Plan plan = gemm::make_plan(problem, context.machine(), pool.num_threads());
  Result<WorkspaceLease> lease = context.impl().workspaces.lease(plan.scratch_bytes(pool.num_threads()));
  if (!lease.ok()) return lease.status();
  Arena arena(lease.value());
  const IntOutputPart whole_out = whole(arena);
  auto* const a = static_cast<int8_t*>(arena.take_bytes(plan.x_bytes));
  auto* const a_sums = static_cast<int32_t*>(arena.take_bytes(plan.x_sums_bytes));
  const IntWeightPart whole_weight = layout.part(weight.data(), 0, n);
  pool.parallel_for(ceil_div(m, plan.pack_rows), [&](int64_t task, int) {
    for (int64_t i = task * plan.pack_rows; i < std::min(m, (task + 1) * plan.pack_rows); ++i) {
      table.pack_row(static_cast<const int8_t*>(x.data) + i * x.strides[0], x.strides[1], whole_weight,
                     plan.group_bytes, a + i * plan.x_stride, a_sums + i * layout.groups);
    }
  });
  auto* const scratch = static_cast<char*>(arena.take_bytes(pool.num_threads() * plan.scratch_bytes_per_worker));
  const auto multiply = (plan.path == MatmulPath::weights_int_few_rows ? table.few : table.many)[format];
  pool.parallel_for(plan.num_tasks(), [&](int64_t task, int worker) {
    const int64_t row = task / plan.column_tasks * plan.rows_per_task;
    const int64_t column = task % plan.column_tasks * plan.columns_per_task;
    char* const own = scratch + worker * plan.scratch_bytes_per_worker;
    multiply({.a = a + row * plan.x_stride,
              .a_stride = plan.x_stride,
              .a_sums = a_sums + row * layout.groups,
              .rows = std::min(plan.rows_per_task, m - row),
              .weight = layout.part(weight.data(), column, std::min(plan.columns_per_task, n - column)),
              .out = from(whole_out, row, column),
              .unpacked = reinterpret_cast<uint32_t*>(own),
              .sums = own + plan.decoded_bytes_per_worker});
  });
  return {};
}

Status Call::with_floats() {
  ThreadPool& pool = context.impl().pool;
  const gemm::Plan plan = gemm::make_plan(problem, context.machine(), pool.num_threads());
  Result<WorkspaceLease> lease = context.impl().workspaces.lease(plan.scratch_bytes(pool.num_threads()));
  if (!lease.ok()) return lease.status();
  Arena arena(lease.value());
  const IntOutputPart whole_out = whole(arena);
  auto* const rows = static_cast<float*>(arena.take_bytes(plan.x_bytes));
  const auto widen = table.widen_row[float_index(x.dtype)];
  pool.parallel_for(ceil_div(m, plan.pack_rows), [&](int64_t task, int) {
    for (int64_t i = task * plan.pack_rows; i < std::min(m, (task + 1) * plan.pack_rows); ++i) {
      widen(static_cast<const char*>(x.data) + i * x.strides[0] * size_bytes(x.dtype), x.strides[1], k,
            rows + i * plan.x_stride);
    }
  });
  auto* const scratch = static_cast<char*>(arena.take_bytes(pool.num_threads() * plan.scratch_bytes_per_worker));
  pool.parallel_for(plan.num_tasks(), [&](int64_t task, int worker) {
    const int64_t row = task / plan.column_tasks * plan.rows_per_task;
    const int64_t column = task % plan.column_tasks * plan.columns_per_task;
    char* const own = scratch + worker * plan.scratch_bytes_per_worker;
    table.with_floats[format](
        {.x = rows + row * plan.x_stride,
         .x_stride = plan.x_stride,
         .rows = std::min(plan.rows_per_task, m - row),
         .weight = layout.part(weight.data(), column, std::min(plan.columns_per_task, n - column)),
         .out = from(whole_out, row, column),
         .decoded = reinterpret_cast<float*>(own),
         .sums = reinterpret_cast<float*>(own + plan.decoded_bytes_per_worker)});
  });
  return {};
}

}  // namespace

Result<PackedIntWeight> PackedIntWeight::pack(Context& context, const IntMatrix& weight) {
  return guarded([&]() -> Result<PackedIntWeight> {
    ShapeCheck check("PackedIntWeight::pack");
    const IntMatrixSizes sizes = check_int_matrix(check, weight);
    if (!check.ok()) return check.status();
    const Layout layout(sizes.rows, sizes.cols, sizes.groups, sizes.bits, weight.zeros.has_value());
    check.require(layout.group_values <= kMaxGroupValues, [&] {
      return "a group of the weight has " + std::to_string(layout.group_values) + " values, but at most " +
             std::to_string(kMaxGroupValues) + " can be summed";
    });
    if (!check.ok()) return check.status();
    const int64_t bytes = layout.bytes();
    if (bytes == kMaxBytes) return Status::out_of_memory();
    Result<Buffer> buffer = context.impl().weights.allocate(bytes);
    if (!buffer.ok()) return buffer.status();
    context.impl().pool.parallel_for(layout.panels(), [&](int64_t panel, int) {
      pack_panel(weight, sizes.bits, layout, panel, buffer.value().data());
    });
    return PackedIntWeight(sizes.rows, sizes.cols, sizes.groups, sizes.bits, weight.zeros.has_value(),
                           std::move(buffer.value()));
  });
}

Result<PackedIntWeight> PackedIntWeight::pack(Context& context, const ConstTensor& weight) {
  return guarded([&]() -> Result<PackedIntWeight> {
    static constexpr float kOne = 1;
    ShapeCheck check("PackedIntWeight::pack");
    check.tensor("weight", weight).dtype({DType::i8}).dims({"n", "k"});
    if (!check.ok()) return check.status();
    IntMatrix matrix;
    matrix.q = weight;
    matrix.scales = ConstTensor::contiguous(DType::f32, {weight.shape[0], 1}, &kOne);
    matrix.scales.strides[0] = 0;
    return pack(context, matrix);
  });
}

namespace {

Result<MatmulProblem> check_call(const ConstTensor& x, const PackedIntWeight& weight, const Tensor& out,
                                 const IntMatmulOptions& options) {
  ShapeCheck check("matmul");
  check.tensor("weight", ConstTensor::contiguous(DType::u8, {weight.size_bytes()}, weight.data()));
  check.tensor("x", x).dtype({DType::i8, DType::f32, DType::bf16, DType::f16}).dims({"m", "k"});
  if (options.x_scales) check.tensor("x_scales", *options.x_scales).dtype({DType::f32}).dims({"m"});
  const bool integers = x.dtype == DType::i8;
  if (options.bias) {
    auto bias = check.tensor("bias", *options.bias);
    if (integers && weight.groups() == 1) {
      bias.dtype({DType::f32, DType::bf16, DType::f16, DType::i32});
    } else {
      bias.dtype({DType::f32, DType::bf16, DType::f16});
    }
    bias.dims({"n"});
  }
  auto output = check.output("out", out);
  if (integers) {
    output.dtype({DType::i32, DType::f32, DType::bf16, DType::f16});
  } else {
    output.dtype({DType::f32, DType::bf16, DType::f16});
  }
  output.dims({"m", "n"});
  if (!check.ok()) return check.status();
  const auto differs = [](const char* where, int64_t size, const char* name, int64_t expected) {
    return std::string(where) + " is " + std::to_string(size) + ", but the weight has " + name + " = " +
           std::to_string(expected);
  };
  check.require(check["k"] == weight.k(), [&] { return differs("x dim 1 (k)", check["k"], "k", weight.k()); });
  check.require(check["n"] == weight.n(), [&] { return differs("out dim 1 (n)", check["n"], "n", weight.n()); });
  check.require(integers || !options.x_scales,
                [&] { return std::string("x_scales belong to an x of i8, but x is ") + to_string(x.dtype); });
  if (out.dtype == DType::i32) {
    check.require(weight.groups() == 1, [&] {
      return "out is i32, but the weight has " + std::to_string(weight.groups()) + " groups, each with its scales";
    });
    check.require(!options.x_scales, "out is i32, which x_scales cannot multiply");
    check.require(!options.bias || options.bias->dtype == DType::i32,
                  [&] { return std::string("out is i32, but bias is ") + to_string(options.bias->dtype); });
  }
  if (!check.ok()) return check.status();
  return MatmulProblem{.m = x.shape[0],
                       .n = weight.n(),
                       .k = weight.k(),
                       .x_dtype = x.dtype,
                       .unit_stride_x = normal_strides(x).strides[1] == 1,
                       .weight = MatmulWeight::integers,
                       .bits = weight.bits(),
                       .groups = weight.groups(),
                       .has_bias = options.bias.has_value(),
                       .has_x_scales = options.x_scales.has_value()};
}

}  // namespace

Result<MatmulProblem> matmul_problem(const ConstTensor& x, const PackedIntWeight& weight, const Tensor& out,
                                     const IntMatmulOptions& options) {
  return guarded([&] { return check_call(x, weight, out, options); });
}

Status matmul(Context& context, const ConstTensor& x, const PackedIntWeight& weight, const Tensor& out,
              const IntMatmulOptions& options) {
  return guarded([&]() -> Status {
    const Result<MatmulProblem> problem = check_call(x, weight, out, options);
    if (!problem.ok()) return problem.status();
    if (problem.value().m == 0 || problem.value().n == 0) return {};
    const ConstTensor normal_x = normal_strides(x);
    const Tensor normal_out = normal_strides(out);
    Call call{context, problem.value(), normal_x, weight, normal_out, options};
    return x.dtype == DType::i8 ? call.with_integers() : call.with_floats();
  });
}

}  // namespace opst

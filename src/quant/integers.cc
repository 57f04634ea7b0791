// int8 and int4 with scales beside them: quantize, dequantize, dynamic_quant.
#include <algorithm>

#include "core/elements.h"
#include "core/guarded.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "machine/context_impl.h"
#include "opst/quant.h"
#include "quant/matrices.h"

namespace opst {
namespace {

// Values per task: some tens of microseconds.
constexpr int64_t kTaskValues = int64_t{1} << 15;

template <class T>
T* at(const Tensor& tensor, int64_t offset) {
  return static_cast<T*>(tensor.data) + offset;
}

// Calls row(i) for 0 <= i < count, rows of `values` elements.
template <class Row>
void for_each_row(Context& context, int64_t count, int64_t values, const Row& row) {
  const int64_t rows_per_task = std::max<int64_t>(1, kTaskValues / std::max<int64_t>(1, values));
  context.impl().pool.parallel_for(ceil_div(count, rows_per_task), [&](int64_t task, int) {
    for (int64_t i = task * rows_per_task; i < std::min(count, (task + 1) * rows_per_task); ++i) row(i);
  });
}

void check_groups(ShapeCheck& check, int64_t cols, int64_t groups, int bits) {
  check.require(groups >= 1 && cols % groups == 0, "scales has ", groups, " groups, which do not divide cols = ", cols);
  if (!check.ok()) return;
  check.require(bits == 8 || cols / groups % 2 == 0, "scales has groups of ", cols / groups,
                " values, but those of int4 must fill whole bytes");
}

void check_half(ShapeCheck& check, int64_t bytes, int64_t cols) {
  check.require(bytes * 2 == cols, "q has ", bytes, " bytes a row, but ", cols, " values of int4 fill half as many");
}

}  // namespace

IntMatrixSizes check_int_matrix(ShapeCheck& check, const IntMatrix& matrix) {
  const bool bytes = matrix.q.dtype == DType::i8;
  auto q = check.tensor("q", matrix.q).dtype({DType::i8, DType::u8}).dims({"rows", bytes ? "cols" : "bytes"});
  if (!bytes) q.unit_inner_stride();
  check.tensor("scales", matrix.scales).dtype({DType::f32}).dims({"rows", "groups"});
  if (matrix.zeros) check.tensor("zeros", matrix.zeros).dtype({DType::i8}).dims({"rows", "groups"});
  IntMatrixSizes sizes;
  if (!check.ok()) return sizes;
  sizes = {check["rows"], bytes ? check["cols"] : 2 * check["bytes"], check["groups"], bytes ? 8 : 4};
  check_groups(check, sizes.cols, sizes.groups, sizes.bits);
  return sizes;
}

Status quantize(Context& context, const ConstTensor& values, const Tensor& integers, const Tensor& scales,
                const QuantizeOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("quantize");
    const bool bytes = integers.dtype != DType::u8;
    check.tensor("x", values).dtype({DType::f32, DType::bf16, DType::f16}).dims({"rows", "cols"});
    if (options.scales_given) {
      check.tensor("scales", scales).dtype({DType::f32}).dims({"rows", "groups"});
      if (options.zeros) check.tensor("zeros", options.zeros).dtype({DType::i8}).dims({"rows", "groups"});
    }
    auto out = check.output("q", integers).dtype({DType::i8, DType::u8}).dims({"rows", bytes ? "cols" : "bytes"});
    if (!bytes) out.unit_inner_stride();
    if (!options.scales_given) {
      check.output("scales", scales).dtype({DType::f32}).dims({"rows", "groups"});
      if (options.zeros) check.output("zeros", options.zeros).dtype({DType::i8}).dims({"rows", "groups"});
    }
    const int64_t rows = check["rows"], cols = check["cols"], groups = check["groups"];
    if (!bytes) check_half(check, check["bytes"], cols);
    check_groups(check, cols, groups, bytes ? 8 : 4);
    if (!check.ok()) return check.status();

    // No columns: nothing reads scales that are given, while scales that are asked for are written (0) below.
    if (cols == 0 && options.scales_given) return {};
    const ConstTensor x = normal_strides(values);
    const Tensor q = normal_strides(integers);
    const int64_t count = cols / groups;
    const auto kernel = quant::kernels(context.machine().isa).quantize_group[float_index(x.dtype)];
    for_each_row(context, rows, cols, [&](int64_t row) {
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t first = g * count;
        kernel(
            {.x = static_cast<const char*>(x.data) + (row * x.strides[0] + first * x.strides[1]) * size_bytes(x.dtype),
             .x_stride = x.strides[1],
             .count = count,
             .bits = bytes ? 8 : 4,
             .scales_given = options.scales_given,
             .scale = at<float>(scales, row * scales.strides[0] + g * scales.strides[1]),
             .zero = options.zeros
                         ? at<int8_t>(options.zeros, row * options.zeros.strides[0] + g * options.zeros.strides[1])
                         : nullptr,
             .q = at<int8_t>(q, row * q.strides[0] + (bytes ? first * q.strides[1] : first / 2)),
             .q_stride = q.strides[1]});
      }
    });
    return {};
  });
}

Status dequantize(Context& context, const IntMatrix& matrix, const Tensor& result) {
  return guarded([&]() -> Status {
    ShapeCheck check("dequantize");
    const IntMatrixSizes sizes = check_int_matrix(check, matrix);
    check.output("out", result).dtype({DType::f32, DType::bf16, DType::f16}).dims({"rows", "columns"});
    const int64_t columns = check["columns"];
    check.require(columns == sizes.cols, "out dim 1 (cols) is ", columns, ", but the matrix has cols = ", sizes.cols);
    if (!check.ok()) return check.status();

    if (sizes.cols == 0) return {};
    const int64_t count = sizes.cols / sizes.groups;
    const ConstTensor q = normal_strides(matrix.q);
    const Tensor out = normal_strides(result);
    const auto kernel = quant::kernels(context.machine().isa).dequantize_group[float_index(out.dtype)];
    for_each_row(context, sizes.rows, sizes.cols, [&](int64_t row) {
      const IntRow numbers(matrix, row);
      for (int64_t g = 0; g < sizes.groups; ++g) {
        const int64_t first = g * count;
        kernel({.q = static_cast<const int8_t*>(q.data) + row * q.strides[0] +
                     (sizes.bits == 8 ? first * q.strides[1] : first / 2),
                .q_stride = q.strides[1],
                .count = count,
                .bits = sizes.bits,
                .scale = numbers.scale(g),
                .zero = numbers.zero(g),
                .out = static_cast<char*>(out.data) +
                       (row * out.strides[0] + first * out.strides[1]) * size_bytes(out.dtype),
                .out_stride = out.strides[1]});
      }
    });
    return {};
  });
}

Status dynamic_quant(Context& context, const ConstTensor& values, const Tensor& integers, const Tensor& scales,
                     const DynamicQuantOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("dynamic_quant");
    const bool bytes = integers.dtype != DType::u8;
    check.require(values.rank >= 1 && values.rank <= kMaxRank, "x has rank ", values.rank, ", but must have 1 to 5");
    if (!check.ok()) return check.status();
    const int leading = values.rank - 1;
    check.tensor("x", values).dtype({DType::f32, DType::bf16, DType::f16}).leading_dims(leading, "k");
    if (options.smooth_scales) check.tensor("smooth_scales", options.smooth_scales).dtype({DType::f32}).dims({"k"});
    auto out = check.output("q", integers).dtype({DType::i8, DType::u8});
    if (!bytes) out.unit_inner_stride();
    out.leading_dims(leading, bytes ? "k" : "bytes");
    check.output("scales", scales).dtype({DType::f32}).leading_dims(leading, nullptr);
    const int64_t k = check["k"];
    if (!bytes) check_half(check, check["bytes"], k);
    if (!check.ok()) return check.status();

    const ConstTensor x = normal_strides(values);
    const Tensor q = normal_strides(integers);
    const auto kernel = quant::kernels(context.machine().isa).quantize_group[float_index(x.dtype)];
    for_each_row(context, num_rows(x), k, [&](int64_t row) {
      kernel({.x = static_cast<const char*>(x.data) + row_offset(x, row, leading) * size_bytes(x.dtype),
              .x_stride = x.strides[leading],
              .count = k,
              .smooth = static_cast<const float*>(options.smooth_scales.data),
              .smooth_stride = options.smooth_scales.strides[0],
              .bits = bytes ? 8 : 4,
              .scale = at<float>(scales, row_offset(scales, row, leading)),
              .q = at<int8_t>(q, row_offset(q, row, leading)),
              .q_stride = q.strides[leading]});
    });
    return {};
  });
}

}  // namespace opst

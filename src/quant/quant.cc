#include "opst/quant.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <iterator>
#include <string_view>

#include "core/elements.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "machine/context_impl.h"
#include "machine/levels.h"
#include "quant/formats.h"
#include "quant/kernels.h"
#include "quant/matrices.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_FLOAT_LEVELS, quant, Kernels, kKernels, kernels)

namespace {

// In the order of QuantFormat.
constexpr const char* kNames[] = {"f32", "f16", "q8_0", "q4_1", "q4_0", "q5_0", "q5_1", "q6_k", "q4_k", "q5_k", "bf16"};
static_assert(std::size(kNames) == kNumQuantFormats);

struct BlockSize {
  int64_t values = 0, bytes = 0;
};
constexpr std::array<BlockSize, kNumQuantFormats> kBlockSizes = [] {
  std::array<BlockSize, kNumQuantFormats> sizes;
  QuantBlocks::each([&]<class Block>() {
    sizes[static_cast<size_t>(Block::kFormat)] = {Block::kValues, sizeof(Block)};
  });
  return sizes;
}();
static_assert(std::all_of(kBlockSizes.begin(), kBlockSizes.end(),
                          [](const BlockSize& size) { return size.bytes > 0; }));

// Zeros for a value that is no enumerator.
constexpr BlockSize block_size(QuantFormat format) {
  const auto i = static_cast<size_t>(format);
  return i < kBlockSizes.size() ? kBlockSizes[i] : BlockSize{};
}

// The bytes of a row of `cols` values. Checks that it is whole blocks; `name`: the matrix in messages, "": none.
Size check_row(ShapeCheck& check, const char* name, QuantFormat format, int64_t cols) {
  const auto [values, bytes] = block_size(format);
  check.require(values > 0, name, *name ? "'s " : "", "format is ", static_cast<int>(format),
                ", which is no QuantFormat");
  if (!check.ok()) return 0;
  check.require(cols >= 0 && cols % values == 0, name, *name ? " " : "", "cols is ", cols, ", but ", to_string(format),
                " has blocks of ", values, " values");
  return check.ok() ? Size(cols / values) * bytes : Size(0);
}

// Values per task: some tens of microseconds.
constexpr int64_t kBlockTaskValues = int64_t{1} << 16, kIntTaskValues = int64_t{1} << 15;

// Calls row(i) for 0 <= i < count, rows of `values` elements.
template <class Row>
void for_each_row(Context& context, int64_t count, int64_t values, int64_t task_values, const Row& row) {
  const int64_t rows_per_task = std::max<int64_t>(1, task_values / std::max<int64_t>(1, values));
  context.impl().pool.for_each(count, rows_per_task, [&](int64_t i, int) { row(i); });
}

// Row source_row(i) of the matrix into row i of `out`.
template <class SourceRow>
void run(Context& context, const QuantMatrix& matrix, const Tensor& result, int64_t count,
         const SourceRow& source_row) {
  if (count == 0 || matrix.cols == 0) return;
  const Tensor out = normal_strides(result);
  const auto dequantize_row = quant::kernels(context.machine().isa).dequantize_row[static_cast<int>(matrix.format)];
  const int64_t bytes = matrix.cols / block_values(matrix.format) * block_bytes(matrix.format);
  for_each_row(context, count, matrix.cols, kBlockTaskValues, [&](int64_t i) {
    dequantize_row(static_cast<const char*>(matrix.data) + source_row(i) * bytes, matrix.cols,
                   static_cast<float*>(out.data) + i * out.strides[0], out.strides[1]);
  });
}

// Dimension `dim` of out, bound as `name`, has the matrix's size.
void check_size(ShapeCheck& check, int dim, const char* name, int64_t expected) {
  const int64_t size = check[name];
  check.require(size == expected, "out dim ", dim, " (", name, ") is ", size, ", but the matrix has ", name, " = ",
                expected);
}

// The matrix of a call, with its bytes, so that an output which overlaps them is found.
void check_matrix(ShapeCheck& check, const QuantMatrix& matrix) {
  check_quant_matrix(check, "matrix", matrix);
  check.tensor("matrix", ConstTensor::contiguous(DType::u8, {matrix.size_bytes}, matrix.data));
}

}  // namespace

const char* to_string(QuantFormat format) { return name_of(format, kNames); }

std::optional<QuantFormat> parse_quant_format(const std::string& name) {
  const auto same_letter = [](char a, char b) { return std::tolower(static_cast<unsigned char>(a)) == b; };
  for (size_t i = 0; i < std::size(kNames); ++i) {
    const std::string_view format = kNames[i];
    if (std::equal(name.begin(), name.end(), format.begin(), format.end(), same_letter)) {
      return static_cast<QuantFormat>(i);
    }
  }
  return std::nullopt;
}

int64_t block_values(QuantFormat format) { return block_size(format).values; }
int64_t block_bytes(QuantFormat format) { return block_size(format).bytes; }

Result<int64_t> row_bytes(QuantFormat format, int64_t cols) {
  return checked("row_bytes", [&](ShapeCheck& check) -> Result<int64_t> {
    const Size bytes = check_row(check, "", format, cols);
    check.require(bytes.within_limit(), "cols is ", cols, ", and such a row has more bytes than the limit of 2^56");
    if (!check.ok()) return check.status();
    return bytes.value();
  });
}

void check_quant_matrix(ShapeCheck& check, const char* name, const QuantMatrix& matrix) {
  const auto [format, rows, cols, data, size_bytes] = matrix;
  check.require(rows >= 0, name, " rows is ", rows, ", but must be >= 0");
  const Size row = check_row(check, name, format, cols);
  if (!check.ok()) return;
  // One row at least must be within the limit: sizes of a matrix without rows are multiplied as well.
  check.require((row * std::max<int64_t>(rows, 1)).within_limit() && Size(rows).within_limit(), name, " [", rows, ", ",
                cols, "] has more rows or bytes than the limit of 2^56");
  const int64_t bytes = (row * rows).value();
  check.require(size_bytes >= bytes, name, " has ", size_bytes, " bytes, but ", to_string(format), " [", rows, ", ",
                cols, "] needs ", bytes);
  check.require(bytes == 0 || data != nullptr, name, " has null data, but shape [", rows, ", ", cols, "]");
}

void check_row_indices(ShapeCheck& check, const ConstTensor& rows, int64_t num_rows) {
  for (int64_t i = 0; check.ok() && i < distinct(rows, 0); ++i) {
    const int64_t row = static_cast<const int64_t*>(rows.data)[i * rows.strides[0]];
    check.require(row >= 0 && row < num_rows, "rows[", i, "] is ", row, ", but the matrix has ", num_rows, " rows");
  }
}

Status dequantize(Context& context, const QuantMatrix& matrix, const Tensor& out) {
  return checked("dequantize", [&](ShapeCheck& check) {
    check_matrix(check, matrix);
    check.output("out", out).dtype({DType::f32}).dims({"rows", "cols"});
    check_size(check, 0, "rows", matrix.rows);
    check_size(check, 1, "cols", matrix.cols);
    if (!check.ok()) return;
    run(context, matrix, out, matrix.rows, [](int64_t i) { return i; });
  });
}

Status dequantize_rows(Context& context, const QuantMatrix& matrix, const ConstTensor& rows, const Tensor& out) {
  return checked("dequantize_rows", [&](ShapeCheck& check) {
    check_matrix(check, matrix);
    check.tensor("rows", rows).dtype({DType::i64}).dims({"count"});
    check.output("out", out).dtype({DType::f32}).dims({"count", "cols"});
    check_size(check, 1, "cols", matrix.cols);
    check_row_indices(check, rows, matrix.rows);
    if (!check.ok()) return;
    const auto* index = static_cast<const int64_t*>(rows.data);
    run(context, matrix, out, rows.shape[0], [&](int64_t i) { return index[i * rows.strides[0]]; });
  });
}

// ---- int8 and int4 with scales beside them

namespace {

template <class T>
T* at(const Tensor& tensor, int64_t offset) {
  return static_cast<T*>(tensor.data) + offset;
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
  if (is_given(matrix.zeros)) check.tensor("zeros", matrix.zeros).dtype({DType::i8}).dims({"rows", "groups"});
  IntMatrixSizes sizes;
  if (!check.ok()) return sizes;
  sizes = {check["rows"], bytes ? check["cols"] : 2 * check["bytes"], check["groups"], bytes ? 8 : 4};
  check_groups(check, sizes.cols, sizes.groups, sizes.bits);
  return sizes;
}

Status quantize(Context& context, const ConstTensor& values, const Tensor& integers, const Tensor& scales,
                const QuantizeOptions& options) {
  return checked("quantize", [&](ShapeCheck& check) {
    const bool bytes = integers.dtype != DType::u8;
    check.tensor("x", values).dtype({DType::f32, DType::bf16, DType::f16}).dims({"rows", "cols"});
    if (options.scales_given) {
      check.tensor("scales", scales).dtype({DType::f32}).dims({"rows", "groups"});
      if (is_given(options.zeros)) check.tensor("zeros", options.zeros).dtype({DType::i8}).dims({"rows", "groups"});
    }
    auto out = check.output("q", integers).dtype({DType::i8, DType::u8}).dims({"rows", bytes ? "cols" : "bytes"});
    if (!bytes) out.unit_inner_stride();
    if (!options.scales_given) {
      check.output("scales", scales).dtype({DType::f32}).dims({"rows", "groups"});
      if (is_given(options.zeros)) check.output("zeros", options.zeros).dtype({DType::i8}).dims({"rows", "groups"});
    }
    const int64_t rows = check["rows"], cols = check["cols"], groups = check["groups"];
    if (!bytes) check_half(check, check["bytes"], cols);
    check_groups(check, cols, groups, bytes ? 8 : 4);
    if (!check.ok()) return;

    // No columns: nothing reads scales that are given, while scales that are asked for are written (0) below.
    if (cols == 0 && options.scales_given) return;
    const ConstTensor x = normal_strides(values);
    const Tensor q = normal_strides(integers);
    const int64_t count = cols / groups;
    const auto kernel = quant::kernels(context.machine().isa).quantize_group[float_index(x.dtype)];
    for_each_row(context, rows, cols, kIntTaskValues, [&](int64_t row) {
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
  });
}

Status dequantize(Context& context, const IntMatrix& matrix, const Tensor& result) {
  return checked("dequantize", [&](ShapeCheck& check) {
    const IntMatrixSizes sizes = check_int_matrix(check, matrix);
    check.output("out", result).dtype({DType::f32, DType::bf16, DType::f16}).dims({"rows", "columns"});
    const int64_t columns = check["columns"];
    check.require(columns == sizes.cols, "out dim 1 (cols) is ", columns, ", but the matrix has cols = ", sizes.cols);
    if (!check.ok()) return;

    if (sizes.cols == 0) return;
    const int64_t count = sizes.cols / sizes.groups;
    const ConstTensor q = normal_strides(matrix.q);
    const Tensor out = normal_strides(result);
    const auto kernel = quant::kernels(context.machine().isa).dequantize_group[float_index(out.dtype)];
    for_each_row(context, sizes.rows, sizes.cols, kIntTaskValues, [&](int64_t row) {
      const IntRow numbers{matrix, row};
      for (int64_t g = 0; g < sizes.groups; ++g) {
        const int64_t first = g * count;
        kernel({.q = static_cast<const int8_t*>(q.data) + row * q.strides[0] +
                     (sizes.bits == 8 ? first * q.strides[1] : first / 2),
                .q_stride = q.strides[1],
                .count = count,
                .bits = sizes.bits,
                .scale = numbers.scale(g),
                .zero = static_cast<float>(numbers.zero(g)),
                .out = static_cast<char*>(out.data) +
                       (row * out.strides[0] + first * out.strides[1]) * size_bytes(out.dtype),
                .out_stride = out.strides[1]});
      }
    });
  });
}

Status dynamic_quant(Context& context, const ConstTensor& values, const Tensor& integers, const Tensor& scales,
                     const DynamicQuantOptions& options) {
  return checked("dynamic_quant", [&](ShapeCheck& check) {
    const bool bytes = integers.dtype != DType::u8;
    check.require(values.rank >= 1 && values.rank <= kMaxRank, "x has rank ", values.rank, ", but must have 1 to 5");
    if (!check.ok()) return;
    const int leading = values.rank - 1;
    check.tensor("x", values).dtype({DType::f32, DType::bf16, DType::f16}).leading_dims(leading, "k");
    if (is_given(options.smooth_scales))
      check.tensor("smooth_scales", options.smooth_scales).dtype({DType::f32}).dims({"k"});
    auto out = check.output("q", integers).dtype({DType::i8, DType::u8});
    if (!bytes) out.unit_inner_stride();
    out.leading_dims(leading, bytes ? "k" : "bytes");
    check.output("scales", scales).dtype({DType::f32}).leading_dims(leading, nullptr);
    const int64_t k = check["k"];
    if (!bytes) check_half(check, check["bytes"], k);
    if (!check.ok()) return;

    const ConstTensor x = normal_strides(values);
    const Tensor q = normal_strides(integers);
    const auto kernel = quant::kernels(context.machine().isa).quantize_group[float_index(x.dtype)];
    for_each_row(context, num_rows(x), k, kIntTaskValues, [&](int64_t row) {
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
  });
}

}  // namespace opst

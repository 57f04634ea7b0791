#include "opst/quant.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>

#include "core/guarded.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "machine/context_impl.h"
#include "machine/levels.h"
#include "quant/formats.h"
#include "quant/kernels.h"
#include "quant/quant_check.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_FLOAT_LEVELS, quant, Kernels, kKernels, kernels)

namespace {

struct FormatInfo {
  const char* name = nullptr;
  int64_t block_values = 0;
  int64_t block_bytes = 0;
};
constexpr std::array<FormatInfo, kNumQuantFormats> kFormats = [] {
  std::array<FormatInfo, kNumQuantFormats> formats;
  QuantBlocks::each([&]<class Block>() {
    formats[static_cast<size_t>(Block::kFormat)] = {Block::kName, Block::kValues, sizeof(Block)};
  });
  return formats;
}();
static_assert(std::all_of(kFormats.begin(), kFormats.end(), [](const FormatInfo& f) { return f.name != nullptr; }));

// Null for a value that is no enumerator.
const FormatInfo* info_of(QuantFormat format) {
  const auto i = static_cast<size_t>(format);
  return i < kFormats.size() ? &kFormats[i] : nullptr;
}
std::string unknown(QuantFormat format) {
  return "format is " + std::to_string(static_cast<int>(format)) + ", which is no QuantFormat";
}

// Values per task: some tens of microseconds.
constexpr int64_t kTaskValues = int64_t{1} << 16;

// Row source_row(i) of the matrix into row i of `out`.
template <class SourceRow>
void run(Context& context, const QuantMatrix& matrix, const Tensor& result, int64_t count,
         const SourceRow& source_row) {
  if (count == 0 || matrix.cols == 0) return;
  const Tensor out = normal_strides(result);
  const quant::DequantizeRow dequantize_row =
      quant::kernels(context.machine().isa).dequantize_row[static_cast<int>(matrix.format)];
  const int64_t bytes = matrix.cols / block_values(matrix.format) * block_bytes(matrix.format);
  const int64_t rows_per_task = std::max<int64_t>(1, kTaskValues / matrix.cols);
  context.impl().pool.parallel_for(ceil_div(count, rows_per_task), [&](int64_t task, int) {
    const int64_t end = std::min(count, (task + 1) * rows_per_task);
    for (int64_t i = task * rows_per_task; i < end; ++i) {
      dequantize_row(static_cast<const char*>(matrix.data) + source_row(i) * bytes, matrix.cols,
                     static_cast<float*>(out.data) + i * out.strides[0], out.strides[1]);
    }
  });
}

// Dimension `dim` of out, bound as `name`, has the matrix's size.
void check_size(ShapeCheck& check, int dim, const char* name, int64_t expected) {
  check.require(check[name] == expected, [&] {
    return "out dim " + std::to_string(dim) + " (" + name + ") is " + std::to_string(check[name]) +
           ", but the matrix has " + name + " = " + std::to_string(expected);
  });
}

// The matrix's bytes, so that an output which overlaps them is found.
ConstTensor bytes_of(const QuantMatrix& matrix) {
  return ConstTensor::contiguous(DType::u8, {matrix.size_bytes}, matrix.data);
}

}  // namespace

const char* to_string(QuantFormat format) {
  const FormatInfo* const info = info_of(format);
  return info != nullptr ? info->name : "unknown";
}

std::optional<QuantFormat> parse_quant_format(const std::string& name) {
  const auto same_letter = [](char a, char b) { return std::tolower(static_cast<unsigned char>(a)) == b; };
  for (size_t i = 0; i < kFormats.size(); ++i) {
    const std::string_view format = kFormats[i].name;
    if (std::equal(name.begin(), name.end(), format.begin(), format.end(), same_letter)) {
      return static_cast<QuantFormat>(i);
    }
  }
  return std::nullopt;
}

int64_t block_values(QuantFormat format) {
  const FormatInfo* const info = info_of(format);
  return info != nullptr ? info->block_values : 0;
}
int64_t block_bytes(QuantFormat format) {
  const FormatInfo* const info = info_of(format);
  return info != nullptr ? info->block_bytes : 0;
}

Result<int64_t> row_bytes(QuantFormat format, int64_t cols) {
  return guarded([&]() -> Result<int64_t> {
    const FormatInfo* const info = info_of(format);
    if (info == nullptr) return Status::invalid_argument("row_bytes: " + unknown(format));
    const FormatInfo& block = *info;
    if (cols < 0 || cols % block.block_values != 0) {
      return Status::invalid_argument("row_bytes: cols is " + std::to_string(cols) + ", but " + block.name +
                                      " has blocks of " + std::to_string(block.block_values) + " values");
    }
    const Size bytes = Size(cols / block.block_values) * block.block_bytes;
    if (!bytes.within_limit()) {
      return Status::invalid_argument("row_bytes: cols is " + std::to_string(cols) +
                                      ", and such a row has more bytes than the limit of 2^56");
    }
    return bytes.value();
  });
}

void check_quant_matrix(ShapeCheck& check, const char* name, const QuantMatrix& matrix) {
  check.require(matrix.rows >= 0,
                [&] { return std::string(name) + " rows is " + std::to_string(matrix.rows) + ", but must be >= 0"; });
  const FormatInfo* const info = info_of(matrix.format);
  check.require(info != nullptr, [&] { return std::string(name) + "'s " + unknown(matrix.format); });
  if (!check.ok()) return;
  const FormatInfo& block = *info;
  check.require(matrix.cols >= 0 && matrix.cols % block.block_values == 0, [&] {
    return std::string(name) + " cols is " + std::to_string(matrix.cols) + ", but " + block.name + " has blocks of " +
           std::to_string(block.block_values) + " values";
  });
  if (!check.ok()) return;
  // One row at least must be within the limit: sizes of a matrix without rows are multiplied as well.
  const Size row = Size(matrix.cols / block.block_values) * block.block_bytes;
  const int64_t bytes = (row * matrix.rows).value();
  const auto shape = [&] {
    return std::string("[") + std::to_string(matrix.rows) + ", " + std::to_string(matrix.cols) + "]";
  };
  check.require((row * std::max<int64_t>(matrix.rows, 1)).within_limit() && Size(matrix.rows).within_limit(),
                [&] { return std::string(name) + " " + shape() + " has more rows or bytes than the limit of 2^56"; });
  if (!check.ok()) return;
  check.require(matrix.size_bytes >= bytes, [&] {
    return std::string(name) + " has " + std::to_string(matrix.size_bytes) + " bytes, but " + block.name + " " +
           shape() + " needs " + std::to_string(bytes);
  });
  check.require(bytes == 0 || matrix.data != nullptr,
                [&] { return std::string(name) + " has null data, but shape " + shape(); });
}

void check_row_indices(ShapeCheck& check, const ConstTensor& rows, int64_t num_rows) {
  if (!check.ok()) return;
  for (int64_t i = 0; i < distinct(rows, 0); ++i) {
    const int64_t row = static_cast<const int64_t*>(rows.data)[i * rows.strides[0]];
    if (row >= 0 && row < num_rows) continue;
    check.require(false, std::string("rows[") + std::to_string(i) + "] is " + std::to_string(row) +
                             ", but the matrix has " + std::to_string(num_rows) + " rows");
    return;
  }
}

Status dequantize(Context& context, const QuantMatrix& matrix, const Tensor& out) {
  return guarded([&]() -> Status {
    ShapeCheck check("dequantize");
    check_quant_matrix(check, "matrix", matrix);
    check.tensor("matrix", bytes_of(matrix));
    check.output("out", out).dtype({DType::f32}).dims({"rows", "cols"});
    check_size(check, 0, "rows", matrix.rows);
    check_size(check, 1, "cols", matrix.cols);
    if (!check.ok()) return check.status();
    run(context, matrix, out, matrix.rows, [](int64_t i) { return i; });
    return {};
  });
}

Status dequantize_rows(Context& context, const QuantMatrix& matrix, const ConstTensor& rows, const Tensor& out) {
  return guarded([&]() -> Status {
    ShapeCheck check("dequantize_rows");
    check_quant_matrix(check, "matrix", matrix);
    check.tensor("matrix", bytes_of(matrix));
    check.tensor("rows", rows).dtype({DType::i64}).dims({"count"});
    check.output("out", out).dtype({DType::f32}).dims({"count", "cols"});
    check_size(check, 1, "cols", matrix.cols);
    check_row_indices(check, rows, matrix.rows);
    if (!check.ok()) return check.status();
    const auto* index = static_cast<const int64_t*>(rows.data);
    run(context, matrix, out, rows.shape[0], [&](int64_t i) { return index[i * rows.strides[0]]; });
    return {};
  });
}

}  // namespace opst

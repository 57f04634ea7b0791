#include "opst/quant.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <iterator>
#include <string_view>

#include "core/guarded.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "machine/context_impl.h"
#include "machine/levels.h"
#include "quant/formats.h"
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
constexpr int64_t kTaskValues = int64_t{1} << 16;

// Row source_row(i) of the matrix into row i of `out`.
template <class SourceRow>
void run(Context& context, const QuantMatrix& matrix, const Tensor& result, int64_t count,
         const SourceRow& source_row) {
  if (count == 0 || matrix.cols == 0) return;
  const Tensor out = normal_strides(result);
  const auto dequantize_row = quant::kernels(context.machine().isa).dequantize_row[static_cast<int>(matrix.format)];
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
  const int64_t size = check[name];
  check.require(size == expected, "out dim ", dim, " (", name, ") is ", size, ", but the matrix has ", name, " = ",
                expected);
}

// The matrix's bytes, so that an output which overlaps them is found.
ConstTensor bytes_of(const QuantMatrix& matrix) {
  return ConstTensor::contiguous(DType::u8, {matrix.size_bytes}, matrix.data);
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
  return guarded([&]() -> Result<int64_t> {
    ShapeCheck check("row_bytes");
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

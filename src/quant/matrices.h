// Shared by every operator that reads a QuantMatrix or an IntMatrix: their checks, and elements.
#pragma once

#include "core/shape_check.h"
#include "opst/quant.h"

namespace opst {

namespace quant {
struct Kernels;
const Kernels& kernels(Isa isa);  // kernels.h
}  // namespace quant

// Checks sizes, whole blocks, enough bytes, data. `name` stands for the matrix in messages.
void check_quant_matrix(ShapeCheck& check, const char* name, const QuantMatrix& matrix);

// Indices of rows: a failure names the first one outside [0, num_rows).
void check_row_indices(ShapeCheck& check, const ConstTensor& rows, int64_t num_rows);

struct IntMatrixSizes {
  int64_t rows = 0, cols = 0, groups = 0;
  int bits = 8;
};

// Ranks, dtypes, sizes of q, scales and zeros.
IntMatrixSizes check_int_matrix(ShapeCheck& check, const IntMatrix& matrix);

// One row of a checked matrix: q of a column, scale and zero of a group.
struct IntRow {
  const IntMatrix& matrix;
  int64_t row;

  int q(int64_t col) const {
    const auto* const bytes = static_cast<const int8_t*>(matrix.q.data) + row * matrix.q.strides[0];
    if (matrix.q.dtype == DType::i8) return bytes[col * matrix.q.strides[1]];
    const int both = bytes[col / 2];
    return col % 2 == 0 ? static_cast<int8_t>(both * 16) / 16 : both >> 4;
  }
  float scale(int64_t group) const { return *number<float>(matrix.scales, group); }
  int zero(int64_t group) const { return matrix.zeros ? *number<int8_t>(matrix.zeros, group) : 0; }

  template <class T>
  const T* number(const ConstTensor& numbers, int64_t group) const {
    return static_cast<const T*>(numbers.data) + row * numbers.strides[0] + group * numbers.strides[1];
  }
};

}  // namespace opst

// Shared by every operator that reads a QuantMatrix or an IntMatrix: their checks, elements, and the room's kernels.
#pragma once

#include "core/shape_check.h"
#include "opst/quant.h"
#include "quant/kernels.h"

namespace opst {

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
class IntRow {
 public:
  IntRow(const IntMatrix& matrix, int64_t row)
      : bits_(matrix.q.dtype == DType::i8 ? 8 : 4),
        stride_(matrix.q.strides[1]),
        scale_stride_(matrix.scales.strides[1]),
        zero_stride_(matrix.zeros.strides[1]),
        q_(static_cast<const int8_t*>(matrix.q.data) + row * matrix.q.strides[0]),
        scales_(static_cast<const float*>(matrix.scales.data) + row * matrix.scales.strides[0]),
        zeros_(matrix.zeros ? static_cast<const int8_t*>(matrix.zeros.data) + row * matrix.zeros.strides[0] : nullptr) {
  }

  int q(int64_t col) const {
    if (bits_ == 8) return q_[col * stride_];
    const int both = q_[col / 2];
    return col % 2 == 0 ? static_cast<int8_t>(both * 16) / 16 : both >> 4;
  }
  float scale(int64_t group) const { return scales_[group * scale_stride_]; }
  int zero(int64_t group) const { return zeros_ == nullptr ? 0 : zeros_[group * zero_stride_]; }

 private:
  int bits_;
  int64_t stride_, scale_stride_, zero_stride_;
  const int8_t* q_;
  const float* scales_;
  const int8_t* zeros_;
};

namespace quant {
// The table of the highest level of this room that `isa` includes.
const Kernels& kernels(Isa isa);
}  // namespace quant

}  // namespace opst

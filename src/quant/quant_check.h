// Shared by every operator that reads a QuantMatrix: the checks, and the room's kernels.
#pragma once

#include "core/shape_check.h"
#include "opst/quant.h"
#include "quant/kernels.h"

namespace opst {

// Checks sizes, whole blocks, enough bytes, data. `name` stands for the matrix in messages.
void check_quant_matrix(ShapeCheck& check, const char* name, const QuantMatrix& matrix);

// Indices of rows: a failure names the first one outside [0, num_rows).
void check_row_indices(ShapeCheck& check, const ConstTensor& rows, int64_t num_rows);

namespace quant {
// The table of the highest level of this room that `isa` includes.
const Kernels& kernels(Isa isa);
}  // namespace quant

}  // namespace opst

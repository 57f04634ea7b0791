// The parts of every operator that reads a QuantMatrix: its check and its kernels.
#pragma once

#include "core/shape_check.h"
#include "opst/quant.h"
#include "quant/kernels.h"

namespace opst {

// Sizes, whole blocks, enough bytes, data. `name` is the matrix's in messages.
void check_quant_matrix(ShapeCheck& check, const char* name, const QuantMatrix& matrix);

// Indices of rows: a failure names the first one outside [0, num_rows).
void check_row_indices(ShapeCheck& check, const ConstTensor& rows, int64_t num_rows);

// The highest level at or below `isa` that this room is compiled for.
const quant::Kernels& quant_kernels(Isa isa);

}  // namespace opst

// matmul of a few rows with activations in fixed point: what fixed_point.h defines.
#pragma once

#include "matmul/fixed_point.h"
#include "opst/matmul.h"

namespace opst::gemm {

// Rows that are worth it: from three on, decoding weights to floats costs less.
inline constexpr int64_t kMaxFixedRows = 2;

// Whether m rows times a weight of this format go this way on this machine.
bool multiplies_fixed_point(const Machine& machine, QuantFormat format, int64_t m);

// x [m, k] f32, checked by matmul, m and n >= 1; `out` from its first element on. False, and nothing written, where a
// row is not representable.
Result<bool> matmul_fixed_point(Context& context, const ConstTensor& x, const PackedWeight& weight,
                                const OutputPart& out);

// The same for rows that are in blocks of int8 already; false where the machine has no kernel of few rows for it.
//   a  [m][k / 32]
bool multiply_few_int8_rows(Context& context, const ActivationBlock* a, int64_t m, const PackedWeight& weight,
                            const OutputPart& out);

}  // namespace opst::gemm

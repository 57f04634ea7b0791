// matmul with activations rounded to blocks of int8: what int8_blocks.h defines.
#pragma once

#include "matmul/int8_blocks_kernels.h"
#include "opst/matmul.h"

namespace opst::gemm {

// Whether a weight of this format has a product with blocks of int8; f32 and f16 have none.
bool multiplies_int8_blocks(QuantFormat format);

// x [m, k], checked by matmul, m and n >= 1; `out` from its first element on.
Status matmul_int8_blocks(Context& context, const ConstTensor& x, const PackedWeight& weight, const OutputPart& out);

}  // namespace opst::gemm

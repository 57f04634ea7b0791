// matmul with int8 activations in blocks of 32, times GGUF weights, as int8_blocks.h defines it.
#pragma once

#include "matmul/int8_blocks_kernels.h"
#include "opst/matmul.h"

namespace opst::gemm {

// Whether a weight of this format has a product with int8 blocks; f32, f16 and bf16 have none.
bool multiplies_int8_blocks(QuantFormat format);

// Up to this many rows unpacking the weight costs more than it saves, where there is a kernel of few rows
// (FewRowsBlockKernels::int8 in fixed_point.h).
inline constexpr int64_t kMaxInt8FewRows = 4;

QuantiseRow int8_quantise_row(Isa isa);

// x [m, k], checked by matmul, m and n >= 1; `out` from its first element on.
Status matmul_int8_blocks(Context& context, const ConstTensor& x, const PackedWeight& weight, const OutputPart& out);

}  // namespace opst::gemm

// The kernels of few_rows_blocks.h for matmul.
#pragma once

#include "matmul/fixed_point.h"
#include "opst/context.h"

namespace opst::gemm {

// All null where the level has none.
const FewRowsBlockKernels& few_rows_block_kernels(Isa isa);

// Rows that are worth fixed point: from three on, decoding weights to floats costs less.
inline constexpr int64_t kMaxFixedRows = 2;

}  // namespace opst::gemm

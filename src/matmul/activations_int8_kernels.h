// int8 activations in blocks of 32, times GGUF weights (activations_int8.h): the kernel table, one per level. Int8 and int4
// weights (IntRows) are weights_int_kernels.h.
#pragma once

#include <cstdint>

#include "matmul/activations_int8.h"
#include "matmul/kernels.h"

namespace opst {
namespace gemm {

// k values `x_stride` apart -> k / 32 blocks.
using QuantiseRow = void (*)(const float* x, int64_t x_stride, int64_t k, ActivationBlock* out);

struct Int8BlockKernels {
  int columns_at_once;
  QuantiseRow quantise_row;
  // null for f32, f16 and bf16. Scratch: words of four bytes [k_block / 4][columns_at_once], scales [k_block / 16] of
  // them, minimums [k_block / 32] of them.
  Product rows[kNumBlockFormats];
};

}  // namespace gemm

}  // namespace opst

// int8 activations in blocks of 32 (Int8Rows), times GGUF weights (int8_blocks.h): the kernel table, one per level.
// Int8 and int4 weights (IntRows) are int8_kernels.h.
#pragma once

#include <cstdint>

#include "matmul/int8_blocks.h"
#include "matmul/kernels.h"

namespace opst {
namespace gemm {

struct Int8Rows {
  // [rows][a_stride >= k / 32]
  const ActivationBlock* a;
  int64_t a_stride;
  int64_t rows, columns, k;
  int64_t k_block;     // values of k unpacked at once; whole pieces
  const void* panels;  // packed weight, from the panel that begins with the first column on
  OutputPart out;
  uint32_t* bytes;  // scratch [k_block / 4][columns_at_once]; all scratch is 64-byte aligned
  float* scales;    // scratch [k_block / 16][columns_at_once]
  float* minimums;  // scratch [k_block / 32][columns_at_once]
  float* sums;      // scratch [rows][columns rounded up to columns_at_once]
};

// k values `x_stride` apart -> k / 32 blocks.
using QuantiseRow = void (*)(const float* x, int64_t x_stride, int64_t k, ActivationBlock* out);

struct Int8BlockKernels {
  int columns_at_once;
  QuantiseRow quantise_row;
  // null for f32, f16 and bf16
  void (*rows[kNumBlockFormats])(const Int8Rows& part);
};

}  // namespace gemm

}  // namespace opst

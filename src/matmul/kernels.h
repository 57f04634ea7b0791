// The kernel table of the matmul room, one per instruction set level. Entries compute a rectangle of the output, whole
// sums over k; the two kinds give the same bits.
#pragma once

#include <cstdint>

#include "quant/formats.h"

namespace opst {
namespace gemm {

// Part of the output: rows x columns, all strides in elements.
struct OutputPart {
  float* data;
  int64_t row_stride, column_stride;
  const float* bias;  // of the first column; null: none
  int64_t bias_stride;
};

struct FewRows {
  const float* x;  // [rows][k], elements next to each other
  int64_t x_stride;
  int64_t rows, columns, k;
  const void* panels;  // packed weight, from the panel that begins with the first column on
  OutputPart out;
};

struct ManyRows {
  // [k / k_block][rows of the whole problem][x_stride]: element k0 + t of row i at x[k0 / k_block * x_block_stride +
  // i * x_stride + t]. 64-byte aligned.
  const float* x;
  int64_t x_stride, x_block_stride;
  int64_t rows, columns, k;
  int64_t k_block;  // whole pieces
  const void* panels;
  OutputPart out;
  float* decoded;  // scratch [k_block][many_columns]
  float* sums;     // scratch [rows][columns rounded up to many_columns]
};

struct Kernels {
  int few_columns;   // columns that few_rows treats at once: parts should be multiples of it
  int many_columns;  // likewise
  void (*few_rows[kNumBlockFormats])(const FewRows& part);
  void (*many_rows[kNumBlockFormats])(const ManyRows& part);
};

}  // namespace gemm

namespace generic::gemm {
extern const opst::gemm::Kernels kKernels;
}
namespace avx2::gemm {
extern const opst::gemm::Kernels kKernels;
}
namespace avx512::gemm {
extern const opst::gemm::Kernels kKernels;
}

}  // namespace opst

// The contract of the matmul room's kernels, and the table of those that multiply floats, one per instruction set level.
// A product computes a rectangle of sums over the whole of k; the epilogue (finish) makes outputs of the sums.
#pragma once

#include <cstdint>

#include "opst/dtype.h"
#include "quant/formats.h"

namespace opst {
namespace gemm {

// What every product takes: a rectangle of sums, and the operands from its first row and its first column on.
struct ProductPart {
  // Rows of x in the kernel's form, 64-byte aligned where they are packed:
  //   few_rows, many_rows  words: floats or, in the products named dot, pairs of bf16 (k, k + 1)
  //   blocks               ActivationBlock (activations_int8.h) or FixedBlock (activations_fixed.h)
  const void* x;
  int64_t x_stride;        // elements of the form from row to row
  int64_t x_block_stride;  // many_rows: from run to run of k; word k0 + t of row i lies at
                           // x[k0 / k_block * x_block_stride + i * x_stride + t]
  int64_t rows, columns;
  int64_t k;           // words; blocks: values
  int64_t k_block;     // of them decoded or unpacked at once; whole pieces
  const void* panels;  // packed weight, from the panel that begins with the first column on
  void* scratch;       // what the kernel says, 64-byte aligned
  float* sums;         // [rows][sums_stride], room for columns rounded up to what the kernel takes at once
  int64_t sums_stride;
};
using Product = void (*)(const ProductPart& part);

// The type of elements, for kernels that take any floating point type.
enum class FloatType : uint8_t { f32, bf16, f16 };
inline constexpr int kNumFloatTypes = 3;

struct StridedMatrix {
  const void* data = nullptr;  // null: none
  FloatType type = FloatType::f32;
  int64_t row_stride = 0, column_stride = 0;
};

// out = residual + activation(sums * x_scales + bias). `sums` is scratch and changes.
struct Finish {
  float* sums = nullptr;  // [rows][sums_stride], room for whole vectors
  int64_t sums_stride = 0;
  const float* x_scales = nullptr;  // [rows]; null: all 1
  const float* bias = nullptr;      // [columns]; null: none
  // Sums and bias of the second half: swiglu only.
  const float* second = nullptr;
  int64_t second_stride = 0;
  const float* second_bias = nullptr;
  int64_t rows = 0, columns = 0;
  StridedMatrix residual = {};
  void* out = nullptr;
  FloatType out_type = FloatType::f32;
  int64_t row_stride = 0, column_stride = 0;
};
inline constexpr int kNumActivations = 6;

struct Kernels {
  int few_columns;   // columns that few_rows takes at once: rectangles should be multiples of it
  int many_columns;  // likewise
  // few_rows and many_rows give the same bits. Scratch of many_rows: f32 [k_block][many_columns].
  Product few_rows[kNumBlockFormats];
  Product many_rows[kNumBlockFormats];
  // bf16 x times bf16 weights by the pairwise dot instruction; null where the level has none.
  Product few_rows_dot, many_rows_dot;
  void (*finish[kNumActivations])(const Finish& part);  // in the order of Activation
  // Elements of a type -> packed panel of up to 16 outputs by k inputs (packed_layout.h); missing ones are 0.
  // Addresses need no alignment.
  void (*pack_panel[kNumFloatTypes])(const void* first, int64_t output_stride, int64_t input_stride, int64_t outputs,
                                     int64_t k, void* panel);
  // rows x columns elements of a type -> [rows][out_stride] floats.
  void (*widen_rows[kNumFloatTypes])(const void* first, int64_t row_stride, int64_t column_stride, int64_t rows,
                                     int64_t columns, float* out, int64_t out_stride);
};

}  // namespace gemm

}  // namespace opst

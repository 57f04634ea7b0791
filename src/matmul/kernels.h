// The kernel table of the matmul room, one per instruction set level. Products (few_rows, many_rows) compute a
// rectangle of sums over the whole of k, both with the same bits. The epilogue (finish) makes outputs of the sums.
//
// A word of x is a float, or, in the products named dot, a pair of bf16 (k, k + 1); `k` and `k_block` count words.
// Strides are in elements (words of x).
#pragma once

#include <cstdint>

#include "opst/dtype.h"
#include "quant/formats.h"

namespace opst {
namespace gemm {

// A rectangle of the output.
struct OutputPart {
  float* data;
  int64_t row_stride, column_stride;
  const float* bias;  // of the first column; null: none
  int64_t bias_stride;
};

struct FewRows {
  const float* x;  // [rows][k] words, next to each other
  int64_t x_stride;
  int64_t rows, columns, k;
  const void* panels;  // packed weight, from the panel that begins with the first column on
  OutputPart out;
};

struct ManyRows {
  // [k / k_block][rows of the whole problem][x_stride]: word k0 + t of row i at x[k0 / k_block * x_block_stride +
  // i * x_stride + t]. 64-byte aligned.
  const float* x;
  int64_t x_stride, x_block_stride;
  int64_t rows, columns, k;
  int64_t k_block;  // whole pieces
  const void* panels;
  float* decoded;  // scratch [k_block][many_columns]
  float* sums;     // [rows][sums_stride], room for columns rounded up to many_columns
  int64_t sums_stride;
};

// The type of elements, for kernels that take any floating point type.
enum class FloatType : uint8_t { f32, bf16, f16 };
inline constexpr int kNumFloatTypes = 3;

struct StridedMatrix {
  const void* data = nullptr;  // null: none
  FloatType type = FloatType::f32;
  int64_t row_stride = 0, column_stride = 0;
};

// out = residual + activation(sums + bias). `sums` is scratch and changes.
struct Finish {
  float* sums = nullptr;  // [rows][sums_stride], room for whole vectors
  int64_t sums_stride = 0;
  const float* bias = nullptr;  // [columns]; null: none
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
  void (*few_rows[kNumBlockFormats])(const FewRows& part);
  void (*many_rows[kNumBlockFormats])(const ManyRows& part);
  // bf16 x times bf16 weights by the pairwise dot instruction; null where the level has none.
  void (*few_rows_dot)(const FewRows& part);
  void (*many_rows_dot)(const ManyRows& part);
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

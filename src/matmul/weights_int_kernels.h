// int8 and int4 weights with scales (PackedIntWeight), times int8 rows (IntRows) or f32 rows: the kernel table, one per
// level. int8 activations in blocks, times GGUF weights (Int8Rows), are activations_int8_kernels.h.
#pragma once

#include <cstdint>

#include "matmul/weights_int.h"
#include "opst/dtype.h"

namespace opst {
namespace gemm {

// A rectangle of the weight: panels from the one that begins with the first column on.
struct IntWeightPart {
  const uint32_t* words;
  const float* scales;
  const int32_t* zeros;  // null: all 0
  int64_t columns;
  int64_t groups, group_words, group_values;
};

// A rectangle of the output, from its first element on. Strides in elements.
struct IntOutputPart {
  DType type;  // i32: sums; f32, bf16, f16: sums * scale * x_scale + bias
  void* data;
  int64_t row_stride, column_stride;
  const int32_t* int_bias;  // [columns]; null: none
  const float* bias;        // likewise
  const float* x_scales;    // [rows]; null: all 1
};

struct IntRows {
  const int8_t* a;        // [rows][groups][group bytes: the values, filled up with zeros to whole words of the weight]
  int64_t a_stride;       // bytes
  const int32_t* a_sums;  // [rows][groups]: sum of the group
  int64_t rows;
  IntWeightPart weight;
  IntOutputPart out;
  // Scratch of many rows, 64-byte aligned:
  uint32_t* unpacked;  // i4: words of four bytes [kIntFours, or with more groups a group's words][columns_at_once]
  void* sums;          // [rows][columns rounded up to columns_at_once], 4 bytes each
};

// Words of four bytes along k that are summed before the next columns' turn.
inline constexpr int64_t kIntFours = 256;

struct IntFloatRows {
  const float* x;  // [rows][x_stride >= k]
  int64_t x_stride;
  int64_t rows;
  IntWeightPart weight;
  IntOutputPart out;  // no i32, no int_bias, no x_scales
  float* decoded;     // scratch [kIntDecoded][columns_at_once]
  float* sums;        // scratch as above
};
inline constexpr int64_t kIntDecoded = 384;

struct IntKernels {
  int columns_at_once;
  // A row of k values in groups -> a, a_sums of IntRows.
  void (*pack_row)(const int8_t* x, int64_t x_stride, const IntWeightPart& weight, int64_t group_bytes, int8_t* a,
                   int32_t* a_sums);
  // k floats -> f32 next to each other. Index 0: f32, 1: bf16, 2: f16.
  void (*widen_row[3])(const void* x, int64_t x_stride, int64_t k, float* out);
  // Index 0: i8, 1: i4. few: up to kIntFewRows rows.
  void (*few[2])(const IntRows& part);
  void (*many[2])(const IntRows& part);
  void (*with_floats[2])(const IntFloatRows& part);
};
inline constexpr int kIntFewRows = 8;

}  // namespace gemm

}  // namespace opst

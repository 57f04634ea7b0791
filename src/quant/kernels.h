// The kernel table of the quant room, one per instruction set level.
#pragma once

#include <cstdint>

#include "quant/formats.h"

namespace opst::quant {

// out[i * out_stride] = value i of a row, 0 <= i < cols. `blocks` may have any alignment; nothing beyond the row's last
// block is read and nothing beyond its last value written. cols is whole blocks.
using DequantizeRow = void (*)(const void* blocks, int64_t cols, float* out, int64_t out_stride);

// One group of a row: `count` values with one scale. Strides in elements.
struct QuantizeGroup {
  const void* x;
  int64_t x_stride;
  int64_t count;
  const float* smooth = nullptr;  // null: none
  int64_t smooth_stride = 0;
  int bits;                   // 8, or 4: two values to a byte, and count is even
  bool scales_given = false;  // *scale and *zero are read; else written
  float* scale;
  int8_t* zero = nullptr;  // null: symmetric
  int8_t* q;
  int64_t q_stride;  // between bytes
};
struct DequantizeGroup {
  const int8_t* q;
  int64_t q_stride;
  int64_t count;
  int bits;
  float scale;
  float zero;
  void* out;
  int64_t out_stride;
};

struct Kernels {
  DequantizeRow dequantize_row[kNumQuantFormats];
  // Index 0: f32, 1: bf16, 2: f16, of x and of out.
  void (*quantize_group[3])(const QuantizeGroup& group);
  void (*dequantize_group[3])(const DequantizeGroup& group);
};

}  // namespace opst::quant

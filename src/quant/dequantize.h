// Computes   out[i] = d * q[i] (+ m): a row of quantised blocks as f32.
// Shapes     cols values in cols / Block::kValues blocks, out with any stride.
// Loop nest  pieces of 32 values (one block, or 32 of the unquantised formats); inside, lanes over values.
// Memory     a block is copied to the stack, since its address may be odd; everything streams.
// Numerics   d and m widen exactly; d * q has at most 18 significant bits, so only the addition of m rounds, and the
//            result is the one f32 that the format defines.
#pragma once

#include "quant/formats.h"
#include "simd/vec.h"

namespace opst::OPST_ISA_NS::quant {

using simd::F32;

inline constexpr int kPiece = 32;

OPST_INLINE float widen_one(f16 x) {
  float out;
  F32::load_n(&x, 1).store_n(&out, 1);
  return out;
}

// n <= 32 values from the blocks at `p`.
OPST_INLINE void decode(const BlockF32*, const uint8_t* p, int64_t n, float* out) {
  __builtin_memcpy(out, p, static_cast<size_t>(n) * sizeof(float));
}

OPST_INLINE void decode(const BlockF16*, const uint8_t* p, int64_t n, float* out) {
  f16 x[kPiece];
  __builtin_memcpy(x, p, static_cast<size_t>(n) * sizeof(f16));
  for (int64_t i = 0; i < n; i += F32::kLanes) {
    const int64_t lanes = n - i < F32::kLanes ? n - i : F32::kLanes;
    F32::load_n(x + i, lanes).store_n(out + i, lanes);
  }
}

OPST_INLINE void decode(const BlockQ8_0*, const uint8_t* p, int64_t, float* out) {
  BlockQ8_0 block;
  __builtin_memcpy(&block, p, sizeof(block));
  const float d = widen_one(block.d);
  for (int i = 0; i < kPiece; ++i) out[i] = d * static_cast<float>(block.q[i]);
}

OPST_INLINE void decode(const BlockQ4_1*, const uint8_t* p, int64_t, float* out) {
  BlockQ4_1 block;
  __builtin_memcpy(&block, p, sizeof(block));
  const float d = widen_one(block.d);
  const float m = widen_one(block.m);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * static_cast<float>(block.q[i] & 15) + m;
    out[i + 16] = d * static_cast<float>(block.q[i] >> 4) + m;
  }
}

template <class Block>
void dequantize_row(const void* blocks, int64_t cols, float* out, int64_t out_stride) {
  const uint8_t* p = static_cast<const uint8_t*>(blocks);
  constexpr int64_t kPieceBytes = kPiece / Block::kValues * static_cast<int64_t>(sizeof(Block));
  for (int64_t i = 0; i < cols; i += kPiece, p += kPieceBytes) {
    const int64_t n = cols - i < kPiece ? cols - i : kPiece;
    if (out_stride == 1) {
      decode(static_cast<const Block*>(nullptr), p, n, out + i);
    } else {
      float values[kPiece];
      decode(static_cast<const Block*>(nullptr), p, n, values);
      for (int64_t j = 0; j < n; ++j) out[(i + j) * out_stride] = values[j];
    }
  }
}

}  // namespace opst::OPST_ISA_NS::quant

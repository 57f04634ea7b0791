// Computes   out[i] = d * q[i] (+ m): a row of quantised blocks as f32; d and m of 256-value blocks are products
// Shapes     cols values in cols / Block::kValues blocks (formats.h); out [cols], any stride
// Loop nest  for each piece: one block, or 32 values of the unquantised formats; lanes over the values of the piece
// Memory     a block is copied to the stack, since its address may be odd; everything streams
// Numerics   d and m widen exactly, and every product fits into 24 bits (the widest, of q6_k: 11 + 7 + 5), so only the
//            addition of m rounds, and the result is the one f32 that the format defines, fused or not
#pragma once

#include "quant/formats.h"
#include "simd/vec.h"

namespace opst::OPST_ISA_NS::quant {

using simd::F32;

template <class Block>
inline constexpr int kPiece = Block::kValues == 1 ? 32 : Block::kValues;

OPST_INLINE float widen_one(f16 x) {
  float out;
  F32::load_n(&x, 1).store_n(&out, 1);
  return out;
}

// One piece from the blocks at `p`: n <= 32 values of the unquantised formats, a whole block (any n) of the others.
OPST_INLINE void decode(const BlockF32*, const uint8_t* p, int64_t n, float* out) {
  __builtin_memcpy(out, p, static_cast<size_t>(n) * sizeof(float));
}

// f16 and bf16.
template <class T>
OPST_INLINE void decode_halves(const uint8_t* p, int64_t n, float* out) {
  T x[kPiece<BlockF16>];
  __builtin_memcpy(x, p, static_cast<size_t>(n) * sizeof(T));
  for (int64_t i = 0; i < n; i += F32::kLanes) {
    const int64_t lanes = n - i < F32::kLanes ? n - i : F32::kLanes;
    F32::load_n(x + i, lanes).store_n(out + i, lanes);
  }
}

OPST_INLINE void decode(const BlockF16*, const uint8_t* p, int64_t n, float* out) { decode_halves<f16>(p, n, out); }
OPST_INLINE void decode(const BlockBf16*, const uint8_t* p, int64_t n, float* out) { decode_halves<bf16>(p, n, out); }

OPST_INLINE void decode(const BlockQ8_0*, const uint8_t* p, int64_t, float* out) {
  BlockQ8_0 block;
  __builtin_memcpy(&block, p, sizeof(block));
  const float d = widen_one(block.d);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(block.q[i]);
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

OPST_INLINE void decode(const BlockQ4_0*, const uint8_t* p, int64_t, float* out) {
  BlockQ4_0 block;
  __builtin_memcpy(&block, p, sizeof(block));
  const float d = widen_one(block.d);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * static_cast<float>((block.q[i] & 15) - 8);
    out[i + 16] = d * static_cast<float>((block.q[i] >> 4) - 8);
  }
}

// The five-bit q of q5_0 and q5_1.
template <class Block>
OPST_INLINE void five_bits(const Block& block, int (&q)[32]) {
  uint32_t high;
  __builtin_memcpy(&high, block.high, sizeof(high));
  for (int i = 0; i < 16; ++i) {
    q[i] = (block.q[i] & 15) | static_cast<int>(high >> i & 1u) << 4;
    q[i + 16] = block.q[i] >> 4 | static_cast<int>(high >> (i + 16) & 1u) << 4;
  }
}

OPST_INLINE void decode(const BlockQ5_0*, const uint8_t* p, int64_t, float* out) {
  BlockQ5_0 block;
  __builtin_memcpy(&block, p, sizeof(block));
  int q[32];
  five_bits(block, q);
  const float d = widen_one(block.d);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(q[i] - 16);
}

OPST_INLINE void decode(const BlockQ5_1*, const uint8_t* p, int64_t, float* out) {
  BlockQ5_1 block;
  __builtin_memcpy(&block, p, sizeof(block));
  int q[32];
  five_bits(block, q);
  const float d = widen_one(block.d);
  const float m = widen_one(block.m);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(q[i]) + m;
}

OPST_INLINE void decode(const BlockQ6_K*, const uint8_t* p, int64_t, float* out) {
  BlockQ6_K block;
  __builtin_memcpy(&block, p, sizeof(block));
  const float d = widen_one(block.d);
  for (int part = 0; part < 8; ++part) {  // 32 values each
    const int half = part / 4;
    const uint8_t* const low = block.low + 64 * half + 32 * (part % 2);
    const uint8_t* const high = block.high + 32 * half;
    const int low_shift = part % 4 / 2 * 4, high_shift = part % 4 * 2;
    for (int i = 0; i < 32; ++i) {
      const int q = (low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4;
      out[32 * part + i] = d * static_cast<float>(block.scales[2 * part + i / 16]) * static_cast<float>(q - 32);
    }
  }
}

OPST_INLINE void decode(const BlockQ4_K*, const uint8_t* p, int64_t, float* out) {
  BlockQ4_K block;
  __builtin_memcpy(&block, p, sizeof(block));
  for (int s = 0; s < 8; ++s) {
    const ScaleAndMinimum factors = scale_and_minimum(block.scales, s);
    const float d = widen_one(block.d) * static_cast<float>(factors.scale);
    const float m = widen_one(block.dmin) * static_cast<float>(factors.minimum);
    const uint8_t* const q = block.q + 32 * (s / 2);
    for (int i = 0; i < 32; ++i) out[32 * s + i] = d * static_cast<float>(q[i] >> (s % 2 * 4) & 15) - m;
  }
}

OPST_INLINE void decode(const BlockQ5_K*, const uint8_t* p, int64_t, float* out) {
  BlockQ5_K block;
  __builtin_memcpy(&block, p, sizeof(block));
  for (int s = 0; s < 8; ++s) {
    const ScaleAndMinimum factors = scale_and_minimum(block.scales, s);
    const float d = widen_one(block.d) * static_cast<float>(factors.scale);
    const float m = widen_one(block.dmin) * static_cast<float>(factors.minimum);
    const uint8_t* const low = block.q + 32 * (s / 2);
    for (int i = 0; i < 32; ++i) {
      const int q = (low[i] >> (s % 2 * 4) & 15) | (block.high[i] >> s & 1) << 4;
      out[32 * s + i] = d * static_cast<float>(q) - m;
    }
  }
}

template <class Block>
void dequantize_row(const void* blocks, int64_t cols, float* out, int64_t out_stride) {
  const uint8_t* p = static_cast<const uint8_t*>(blocks);
  constexpr int64_t kValues = kPiece<Block>;
  constexpr int64_t kPieceBytes = kValues / Block::kValues * static_cast<int64_t>(sizeof(Block));
  for (int64_t i = 0; i < cols; i += kValues, p += kPieceBytes) {
    const int64_t n = cols - i < kValues ? cols - i : kValues;
    if (out_stride == 1) {
      decode(static_cast<const Block*>(nullptr), p, n, out + i);
    } else {
      float values[kValues];
      decode(static_cast<const Block*>(nullptr), p, n, values);
      for (int64_t j = 0; j < n; ++j) out[(i + j) * out_stride] = values[j];
    }
  }
}

}  // namespace opst::OPST_ISA_NS::quant

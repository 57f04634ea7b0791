// Computes   out[i] = a row of quantised blocks as f32, by the equation of its format (formats.h)
// Shapes     cols values in cols / Block::kValues blocks; out [cols], any stride
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
inline constexpr int kPiece = kIsFloat<Block> ? 32 : Block::kValues;

OPST_INLINE float widen_one(f16 x) {
  float out;
  F32::load_n(&x, 1).store_n(&out, 1);
  return out;
}

// Up to 32 values of an unquantised format.
template <class Block>
OPST_INLINE void widen(const uint8_t* p, int64_t n, float* out) {
  decltype(Block::x) x[kPiece<Block>];
  __builtin_memcpy(x, p, static_cast<size_t>(n) * sizeof(Block));
  for (int64_t i = 0; i < n; i += F32::kLanes) {
    const int64_t lanes = n - i < F32::kLanes ? n - i : F32::kLanes;
    F32::load_n(x + i, lanes).store_n(out + i, lanes);
  }
}

// A block of a quantised one.
template <class Block>
OPST_INLINE void decode(const uint8_t* p, float* out) {
  constexpr int kRun = 32, kPart = Block::kPart;
  Block block;
  __builtin_memcpy(&block, p, sizeof(block));
  for (int run = 0; run < Block::kValues / kRun; ++run) {
    uint8_t u[kRun];
    block.integers(run, u);
    for (int i = 0; i < kRun; i += kPart, out += kPart) {
      const Factors factors = factors_of(block, (run * kRun + i) / kPart);
      const float d = widen_one(block.d) * static_cast<float>(factors.scale);
      float m = 0;
      if constexpr (Block::kMinimum != Minimum::none) m = widen_one(block.m) * static_cast<float>(factors.minimum);
      for (int j = 0; j < kPart; ++j) {
        const float product = d * static_cast<float>(u[i + j] - Block::kOffset);
        out[j] = Block::kMinimum == Minimum::none    ? product
                 : Block::kMinimum == Minimum::added ? product + m
                                                     : product - m;
      }
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
    float values[kValues];
    float* const to = out_stride == 1 ? out + i : values;
    if constexpr (kIsFloat<Block>) {
      widen<Block>(p, n, to);
    } else {
      decode<Block>(p, to);
    }
    if (out_stride == 1) continue;
    for (int64_t j = 0; j < n; ++j) out[(i + j) * out_stride] = values[j];
  }
}

}  // namespace opst::OPST_ISA_NS::quant

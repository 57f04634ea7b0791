// The blocks of the quantised formats, as they lie in a GGUF file (see include/opst/quant.h). Plain data for kernels.
//
// A block in a file may start at any address: kernels copy a block before they look inside.
#pragma once

#include <cstdint>

#include "opst/dtype.h"

namespace opst {

struct BlockF32 {
  static constexpr int kValues = 1;
  float x;
};

struct BlockF16 {
  static constexpr int kValues = 1;
  f16 x;
};

struct BlockBf16 {
  static constexpr int kValues = 1;
  bf16 x;
};

// value j = d * q[j]
struct BlockQ8_0 {
  static constexpr int kValues = 32;
  f16 d;
  int8_t q[32];
};

// value j = d * (q[j] & 15) + m, value j + 16 = d * (q[j] >> 4) + m
struct BlockQ4_1 {
  static constexpr int kValues = 32;
  f16 d;
  f16 m;
  uint8_t q[16];
};

// value j = d * ((q[j] & 15) - 8), value j + 16 = d * ((q[j] >> 4) - 8)
struct BlockQ4_0 {
  static constexpr int kValues = 32;
  f16 d;
  uint8_t q[16];
};

// Five-bit q of value j: the low four bits as in q4_1; above them bit j % 8 of high[j / 8].
// value j = d * (q - 16)
struct BlockQ5_0 {
  static constexpr int kValues = 32;
  f16 d;
  uint8_t high[4];
  uint8_t q[16];
};

// value j = d * q + m, q as in q5_0
struct BlockQ5_1 {
  static constexpr int kValues = 32;
  f16 d;
  f16 m;
  uint8_t high[4];
  uint8_t q[16];
};

// Six-bit q of value j = 128 h + i: the low four bits are half i / 64 (0: the lower) of low[64 h + i % 64]; above them
// bits 2 (i / 32), 2 (i / 32) + 1 of high[32 h + i % 32].
// value j = d * scales[j / 16] * (q - 32)
struct BlockQ6_K {
  static constexpr int kValues = 256;
  uint8_t low[128];
  uint8_t high[64];
  int8_t scales[16];
  f16 d;
};

// Q4_K and Q5_K: scale s and minimum s, 0 <= s < 8, six bits each, in 12 bytes.
//   s < 4   scale: low six bits of byte s; minimum: low six bits of byte s + 4
//   s >= 4  low four bits: the lower (scale) and upper (minimum) half of byte s + 4; above them the upper two bits of
//           byte s - 4 (scale) and byte s (minimum)
struct ScaleAndMinimum {
  int scale, minimum;
};
// Always inlined: the code of one instruction set level must not be called at another.
[[gnu::always_inline]] constexpr ScaleAndMinimum scale_and_minimum(const uint8_t (&bytes)[12], int s) {
  if (s < 4) return {bytes[s] & 63, bytes[s + 4] & 63};
  return {(bytes[s + 4] & 15) | bytes[s - 4] >> 6 << 4, bytes[s + 4] >> 4 | bytes[s] >> 6 << 4};
}

// Four-bit q of value j = 32 s + i: half s % 2 of q[32 (s / 2) + i].
// value j = d * scale s * q - dmin * minimum s
struct BlockQ4_K {
  static constexpr int kValues = 256;
  f16 d;
  f16 dmin;
  uint8_t scales[12];
  uint8_t q[128];
};

// As q4_k, with a fifth bit of value 32 s + i: bit s of high[i].
struct BlockQ5_K {
  static constexpr int kValues = 256;
  f16 d;
  f16 dmin;
  uint8_t scales[12];
  uint8_t high[32];
  uint8_t q[128];
};

static_assert(sizeof(BlockF32) == 4 && sizeof(BlockF16) == 2 && sizeof(BlockQ8_0) == 34 && sizeof(BlockQ4_1) == 20 &&
              sizeof(BlockQ4_0) == 18 && sizeof(BlockQ5_0) == 22 && sizeof(BlockQ5_1) == 24 &&
              sizeof(BlockQ6_K) == 210 && sizeof(BlockQ4_K) == 144 && sizeof(BlockQ5_K) == 176 &&
              sizeof(BlockBf16) == 2);

// Entries of kernel tables, in the order of QuantFormat.
inline constexpr int kNumBlockFormats = 11;

}  // namespace opst

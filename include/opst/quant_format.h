// The GGUF block formats by name. A row of values is a sequence of blocks; a block holds its scales and its values.
//
//   format   block        bytes  value
//   f32      1            4      x
//   f16      1            2      x
//   bf16     1            2      x
//   q8_0     32 values    34     d * q                 d f16, q int8
//   q4_0     32 values    18     d * (q - 8)           d f16, q in 0..15; value j is the low half of byte j, value
//                                                      j + 16 the high half
//   q4_1     32 values    20     d * q + m             d, m f16, q as q4_0
//   q5_0     32 values    22     d * (q - 16)          d f16, q in 0..31
//   q5_1     32 values    24     d * q + m             d, m f16, q in 0..31
//   q4_k     256 values   144    d * s * q - e * m     d, e f16, s, m in 0..63 per 32 values, q in 0..15
//   q5_k     256 values   176    d * s * q - e * m     d, e f16, s, m in 0..63 per 32 values, q in 0..31
//   q6_k     256 values   210    d * s * (q - 32)      d f16, s int8 per 16 values, q in 0..63
//
// Numbers are little-endian and blocks need no alignment.
//
// Kernel code includes this file, so it holds no function (see dtype.h).
#pragma once

#include <cstdint>

namespace opst {

enum class QuantFormat : uint8_t { f32, f16, q8_0, q4_1, q4_0, q5_0, q5_1, q6_k, q4_k, q5_k, bf16 };
inline constexpr int kNumQuantFormats = 11;

}  // namespace opst

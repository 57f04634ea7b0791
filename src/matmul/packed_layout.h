// How a PackedWeight lies in memory. Plain data for kernels.
//
// A weight [n, k] is cut into panels of 16 outputs, the last one filled up with zeros. A panel is a sequence of pieces
// along k, one per block of the format, in which the 16 outputs lie side by side, so that they become the lanes of a
// vector of 16, 8 or 4. A piece takes exactly the bytes of 16 blocks:
//
//   weight  [ceil(n / 16)] panels of [k / values per piece] pieces
//
// One layout serves all instruction set levels.
#pragma once

#include <cstdint>

#include "opst/dtype.h"

namespace opst::gemm {

inline constexpr int kPanelColumns = 16;

struct PieceF32 {
  static constexpr int kValues = 1;
  float x[kPanelColumns];
};

struct PieceF16 {
  static constexpr int kValues = 1;
  f16 x[kPanelColumns];
};

// Inputs k and k + 1, the first in the lower half; an odd k is filled up with 0.
struct PieceBf16 {
  static constexpr int kValues = 2;
  uint32_t words[kPanelColumns];
};

// Quantised values lie eight by eight, so that both kinds of kernel find them with few instructions: one value to a
// lane as a float, or four to a lane as bytes, the even values of the eight and the odd ones.

// value t of column c = d[c] * q, q the signed byte t % 8 / 2 of words[t / 8 * 2 + t % 2][c]
struct PieceQ8_0 {
  static constexpr int kValues = 32;
  f16 d[kPanelColumns];
  uint32_t words[8][kPanelColumns];
};

// value t of column c = d[c] * (4-bit field t % 8 of words[t / 8][c]) + m[c]
struct PieceQ4_1 {
  static constexpr int kValues = 32;
  f16 d[kPanelColumns];
  f16 m[kPanelColumns];
  uint32_t words[4][kPanelColumns];
};

// value t of column c = d[c] * (4-bit field as in PieceQ4_1 - 8)
struct PieceQ4_0 {
  static constexpr int kValues = 32;
  f16 d[kPanelColumns];
  uint32_t words[4][kPanelColumns];
};

// q of value t: low four bits as in PieceQ4_1, above them bit t / 8 % 4 of the 4-bit field t % 8 of high[t / 32][c].
// value t of column c = d[c] * (q - 16)
struct PieceQ5_0 {
  static constexpr int kValues = 32;
  f16 d[kPanelColumns];
  uint32_t high[1][kPanelColumns];
  uint32_t words[4][kPanelColumns];
};

// value t of column c = d[c] * q + m[c], q as in PieceQ5_0
struct PieceQ5_1 {
  static constexpr int kValues = 32;
  f16 d[kPanelColumns];
  f16 m[kPanelColumns];
  uint32_t high[1][kPanelColumns];
  uint32_t words[4][kPanelColumns];
};

// q of value t: low four bits as in PieceQ4_1, above them the lower (t / 8 even) or upper two bits of the 4-bit field
// t % 8 of high[t / 16][c].
// value t of column c = d[c] * scales[t / 16][c] * (q - 32)
struct PieceQ6_K {
  static constexpr int kValues = 256;
  f16 d[kPanelColumns];
  int8_t scales[16][kPanelColumns];
  uint32_t high[16][kPanelColumns];
  uint32_t words[32][kPanelColumns];
};

// Scale s (0 <= s < 8) of column c: 4-bit field s of scale_words[0][c], above it 2-bit field s of scale_high[0][c];
// minimum s likewise with index 1. The factor of the minimums is stored negated.
// value t of column c = d[c] * scale t / 32 * (4-bit field as in PieceQ4_1) + minus_dmin[c] * minimum t / 32
struct PieceQ4_K {
  static constexpr int kValues = 256;
  f16 d[kPanelColumns];
  f16 minus_dmin[kPanelColumns];
  uint16_t scale_high[2][kPanelColumns];
  uint32_t scale_words[2][kPanelColumns];
  uint32_t words[32][kPanelColumns];
};

// As PieceQ4_K, with q as in PieceQ5_0.
struct PieceQ5_K {
  static constexpr int kValues = 256;
  f16 d[kPanelColumns];
  f16 minus_dmin[kPanelColumns];
  uint16_t scale_high[2][kPanelColumns];
  uint32_t scale_words[2][kPanelColumns];
  uint32_t high[8][kPanelColumns];
  uint32_t words[32][kPanelColumns];
};

static_assert(sizeof(PieceF32) == 16 * 4 && sizeof(PieceF16) == 16 * 2 && sizeof(PieceBf16) == 16 * 4 &&
              sizeof(PieceQ8_0) == 16 * 34 && sizeof(PieceQ4_1) == 16 * 20 && sizeof(PieceQ4_0) == 16 * 18 &&
              sizeof(PieceQ5_0) == 16 * 22 && sizeof(PieceQ5_1) == 16 * 24 && sizeof(PieceQ6_K) == 16 * 210 &&
              sizeof(PieceQ4_K) == 16 * 144 && sizeof(PieceQ5_K) == 16 * 176);

}  // namespace opst::gemm

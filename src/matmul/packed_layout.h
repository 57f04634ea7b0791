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

// value t of column c = d[c] * q[t][c]
struct PieceQ8_0 {
  static constexpr int kValues = 32;
  f16 d[kPanelColumns];
  int8_t q[32][kPanelColumns];
};

// value t of column c = d[c] * (4-bit field t % 8 of words[t / 8][c]) + m[c]
struct PieceQ4_1 {
  static constexpr int kValues = 32;
  f16 d[kPanelColumns];
  f16 m[kPanelColumns];
  uint32_t words[4][kPanelColumns];
};

static_assert(sizeof(PieceF32) == 16 * 4 && sizeof(PieceF16) == 16 * 2 && sizeof(PieceQ8_0) == 16 * 34 &&
              sizeof(PieceQ4_1) == 16 * 20);

}  // namespace opst::gemm

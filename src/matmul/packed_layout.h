// How a PackedWeight lies in memory, and below it a PackedIntWeight. Plain data for kernels.
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
#include "quant/formats.h"

namespace opst::gemm {

inline constexpr int kPanelColumns = 16;

// Integers of 4, 5, 6 or 8 bits (u of formats.h) lie eight by eight, so that both kinds of kernel find them with few
// instructions: one value to a lane as a float, or four to a lane as bytes, the even values of the eight and the odd
// ones. Value t of column c:
template <int bits, int values>
struct PackedIntegers;

// 4-bit field t % 8 of words[t / 8][c]
template <int values>
struct PackedIntegers<4, values> {
  uint32_t words[values / 8][kPanelColumns];
};

// The low four bits as above; above them bit t / 8 % 4 of the 4-bit field t % 8 of high[t / 32][c].
template <int values>
struct PackedIntegers<5, values> {
  uint32_t high[values / 32][kPanelColumns];
  uint32_t words[values / 8][kPanelColumns];
};

// The low four bits as above; above them the lower (t / 8 even) or upper two bits of the 4-bit field t % 8 of
// high[t / 16][c].
template <int values>
struct PackedIntegers<6, values> {
  uint32_t high[values / 16][kPanelColumns];
  uint32_t words[values / 8][kPanelColumns];
};

// u - 128 is the signed byte t % 8 / 2 of words[t / 8 * 2 + t % 2][c].
template <int values>
struct PackedIntegers<8, values> {
  uint32_t words[values / 4][kPanelColumns];
};

// d and m of column c, and the scales and minimums of its `parts` parts. m is negated where the format subtracts.
template <Scales scales, bool minimum, int parts>
struct PackedScales;

template <>
struct PackedScales<Scales::one, false, 1> {
  f16 d[kPanelColumns];
};

template <>
struct PackedScales<Scales::one, true, 1> {
  f16 d[kPanelColumns];
  f16 m[kPanelColumns];
};

template <int parts>
struct PackedScales<Scales::int8, false, parts> {
  f16 d[kPanelColumns];
  int8_t scales[parts][kPanelColumns];
};

// Scale s: 4-bit field s of scale_words[0][c], above it 2-bit field s of scale_high[0][c]; minimum s likewise with
// index 1.
template <>
struct PackedScales<Scales::six, true, 8> {
  f16 d[kPanelColumns];
  f16 m[kPanelColumns];
  uint16_t scale_high[2][kPanelColumns];
  uint32_t scale_words[2][kPanelColumns];
};

template <class Block>
using ScalesOf = PackedScales<Block::kScales, Block::kMinimum != Minimum::none, Block::kValues / Block::kPart>;

// Sixteen blocks of a format side by side.
template <class Block>
struct Piece : ScalesOf<Block>, PackedIntegers<Block::kBits, Block::kValues> {
  static constexpr int kValues = Block::kValues;
};

template <>
struct Piece<BlockF32> {
  static constexpr int kValues = 1;
  float x[kPanelColumns];
};

template <>
struct Piece<BlockF16> {
  static constexpr int kValues = 1;
  f16 x[kPanelColumns];
};

// Inputs k and k + 1, the first in the lower half; an odd k is filled up with 0.
template <>
struct Piece<BlockBf16> {
  static constexpr int kValues = 2;
  uint32_t words[kPanelColumns];
};

// int8 and int4 weights with scales. Panels of 16 outputs too; every group of k (the whole of k where scales are per
// output) is filled up with zeros to whole words:
//
//   words   [ceil(n / 16)] panels of [groups][words per group][16], 32 bits each
//     i8    four values: byte i of word w is value 4 w + i
//     i4    eight values: the lower half of byte i of word w is value 8 w + i, the upper half value 8 w + 4 + i
//   scales  [panels][groups][16] f32
//   zeros   [panels][groups][16] i32; absent where all are 0
//
// Values are stored unsigned, q + 128 or q + 8, since the products of bytes take one unsigned side; kernels take the
// offset times the sum of the activations off the sums.
inline constexpr int kIntPanelColumns = kPanelColumns;  // plans cut the columns of every weight alike

template <int bits>
struct IntWord {
  static constexpr int kBits = bits;
  static constexpr int kValues = 32 / bits;
  static constexpr int kOffset = 1 << (bits - 1);
};
using WordI8 = IntWord<8>;
using WordI4 = IntWord<4>;

// The panels from some column on.
struct IntWeightPart {
  const uint32_t* words;
  const float* scales;
  const int32_t* zeros;  // null: all 0
  int64_t groups, group_words, group_values;
};

}  // namespace opst::gemm

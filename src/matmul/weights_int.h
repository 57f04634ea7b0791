// int8 and int4 weights with scales: how a PackedIntWeight lies in memory. Plain data for kernels.
//
// A weight [n, k] is cut into panels of 16 outputs, the last one filled up with zeros, and every group of k (the whole
// of k where scales are per output) is filled up with zeros to whole words:
//
//   words   [ceil(n / 16)] panels of [groups][words per group][16], 32 bits each
//     i8    four values: byte i of word w is value 4 w + i
//     i4    eight values: the lower half of byte i of word w is value 8 w + i, the upper half value 8 w + 4 + i
//   scales  [panels][groups][16] f32
//   zeros   [panels][groups][16] i32; absent where all are 0
//
// Values are stored unsigned, q + 128 or q + 8, since the products of bytes take one unsigned side; kernels take the
// offset times the sum of the activations off the sums.
#pragma once

#include <cstdint>

namespace opst::gemm {

inline constexpr int kIntPanelColumns = 16;

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

// Rows of x that weights_int_few_rows takes.
inline constexpr int kIntFewRows = 8;
// weights_int_many_rows: words of four bytes along k that are summed before the next columns' turn.
inline constexpr int64_t kIntFours = 256;
// weights_int_floats: values decoded at once, at most.
inline constexpr int64_t kIntDecoded = 384;

}  // namespace opst::gemm

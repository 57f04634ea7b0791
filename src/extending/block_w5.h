// A weight format that GGUF does not have, described as quant/formats.h describes its own: 32 values of five bits, and
// an int8 scale for each 16 of them.
//
//   value t = d * scales[t / 16] * (u - 16)
#pragma once

#include "quant/formats.h"

namespace opst::extending {

struct BlockW5 {
  static constexpr int kValues = 32, kPart = 16, kBits = 5, kOffset = 16;
  static constexpr Scales kScales = Scales::int8;
  static constexpr Minimum kMinimum = Minimum::none;
  f16 d;
  int8_t scales[2];
  uint8_t high[4];
  uint8_t q[16];
  OPST_FORMAT_INLINE void integers(int, uint8_t* u) const {
    split_halves(q, u);
    add_fifth_bits(high, u);
  }
};

}  // namespace opst::extending

// The blocks of the quantised formats, as they lie in a GGUF file (see include/opst/quant.h). Plain data for kernels.
//
// A block in a file may start at any address: copy it before looking inside.
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

static_assert(sizeof(BlockF32) == 4 && sizeof(BlockF16) == 2 && sizeof(BlockQ8_0) == 34 && sizeof(BlockQ4_1) == 20);

}  // namespace opst

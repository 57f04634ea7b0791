// Random quantised matrices for tests.
#pragma once

#include <cstring>
#include <iterator>
#include <vector>

#include "core/convert.h"
#include "opst/quant.h"
#include "testing/random.h"

namespace opst::test {

// All formats.
inline constexpr QuantFormat kQuantFormats[] = {
    QuantFormat::f32,  QuantFormat::f16,  QuantFormat::q8_0, QuantFormat::q4_1, QuantFormat::q4_0, QuantFormat::q5_0,
    QuantFormat::q5_1, QuantFormat::q6_k, QuantFormat::q4_k, QuantFormat::q5_k, QuantFormat::bf16};
static_assert(std::size(kQuantFormats) == kNumQuantFormats);

// Where the scale lies that multiplies every value of a block.
inline int64_t scale_offset(QuantFormat format) { return format == QuantFormat::q6_k ? 208 : 0; }

// Bytes of rows x cols values with scales about `scale`, so that no value is infinite or NaN.
inline std::vector<unsigned char> random_blocks(QuantFormat format, int64_t rows, int64_t cols, Random& random,
                                                double scale = 0.1) {
  const int64_t blocks = rows * cols / block_values(format);
  std::vector<unsigned char> bytes(static_cast<size_t>(blocks * block_bytes(format)));
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random.integer(0, 255));
  for (int64_t b = 0; b < blocks; ++b) {
    unsigned char* const block = bytes.data() + b * block_bytes(format);
    const auto put_half = [&](int64_t at, double x) {
      const f16 half = to_f16(x);
      std::memcpy(block + at, &half, 2);
    };
    switch (format) {
      case QuantFormat::f32: {
        const float x = static_cast<float>(random.normal() * scale * 10);
        std::memcpy(block, &x, 4);
        break;
      }
      case QuantFormat::f16:
        put_half(0, random.normal() * scale * 10);
        break;
      case QuantFormat::bf16: {
        const bf16 x = to_bf16(random.normal() * scale * 10);
        std::memcpy(block, &x, 2);
        break;
      }
      case QuantFormat::q8_0:
        put_half(0, random.normal() * scale / 10);
        break;
      case QuantFormat::q4_1:
        put_half(0, random.normal() * scale);
        put_half(2, random.normal() * scale * 8);
        break;
      case QuantFormat::q4_0:
        put_half(0, random.normal() * scale);
        break;
      case QuantFormat::q5_0:
        put_half(0, random.normal() * scale / 2);
        break;
      case QuantFormat::q5_1:
        put_half(0, random.normal() * scale / 2);
        put_half(2, random.normal() * scale * 8);
        break;
      case QuantFormat::q6_k:
        put_half(208, random.normal() * scale / 64);
        break;
      case QuantFormat::q4_k:
        put_half(0, random.normal() * scale / 32);
        put_half(2, random.normal() * scale / 4);
        break;
      case QuantFormat::q5_k:
        put_half(0, random.normal() * scale / 64);
        put_half(2, random.normal() * scale / 4);
        break;
    }
  }
  return bytes;
}

}  // namespace opst::test

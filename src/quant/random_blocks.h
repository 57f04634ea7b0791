// Random quantised matrices for tests.
#pragma once

#include <array>
#include <cstring>
#include <vector>

#include "core/convert.h"
#include "opst/quant.h"
#include "quant/formats.h"
#include "testing/random.h"

namespace opst::test {

// All formats.
inline constexpr auto kQuantFormats = [] {
  std::array<QuantFormat, kNumQuantFormats> formats;
  for (size_t i = 0; i < formats.size(); ++i) formats[i] = static_cast<QuantFormat>(i);
  return formats;
}();

// Calls edit(block) for every block of a matrix's bytes, with the struct of the format (quant/formats.h).
template <class Edit>
void edit_blocks(QuantFormat format, std::vector<unsigned char>& bytes, const Edit& edit) {
  QuantBlocks::each([&]<class Block>() {
    if (format != Block::kFormat) return;
    for (size_t at = 0; at < bytes.size(); at += sizeof(Block)) {
      Block block;
      std::memcpy(&block, bytes.data() + at, sizeof(Block));
      edit(block);
      std::memcpy(bytes.data() + at, &block, sizeof(Block));
    }
  });
}

// Bytes of rows x cols values with scales about `scale`, so that no value is infinite or NaN.
inline std::vector<unsigned char> random_blocks(QuantFormat format, int64_t rows, int64_t cols, Random& random,
                                                double scale = 0.1) {
  const int64_t blocks = rows * cols / block_values(format);
  std::vector<unsigned char> bytes(static_cast<size_t>(blocks * block_bytes(format)));
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random.integer(0, 255));
  edit_blocks(format, bytes, [&]<class Block>(Block& block) {
    const auto about = [&](auto& x, double size) {
      const double value = random.normal() * size;
      if constexpr (requires { x = float{}; }) x = static_cast<float>(value);
      if constexpr (requires { x = f16{}; }) x = to_f16(value);
      if constexpr (requires { x = bf16{}; }) x = to_bf16(value);
    };
    if constexpr (kIsFloat<Block>) {
      about(block.x, scale * 10);
    } else {
      // Sizes of an integer, in units of 4 bits, and of a part's scale.
      constexpr double kInteger = Block::kBits == 8 ? 10 : 1 << (Block::kBits - 4);
      constexpr double kScale = Block::kScales == Scales::six ? 32 : Block::kScales == Scales::int8 ? 16 : 1;
      about(block.d, scale / kInteger / kScale);
      if constexpr (Block::kMinimum != Minimum::none) about(block.m, scale * 8 / kScale);
    }
  });
  return bytes;
}

}  // namespace opst::test

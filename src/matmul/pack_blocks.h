// Quant blocks (quant/formats.h) into the pieces of a packed weight (packed_layout.h), and single values back.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "core/convert.h"
#include "matmul/packed_layout.h"
#include "quant/formats.h"

namespace opst::gemm {

// Bytes 0, 2, 4 and 6.
inline uint32_t gather_even(uint64_t bytes) {
  bytes &= 0x00ff00ff00ff00ff;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffff;
  return static_cast<uint32_t>(bytes | bytes >> 16);
}
// The low halves of 8 bytes side by side, the first byte's lowest.
inline uint32_t gather_nibbles(uint64_t bytes) {
  bytes &= 0x0f0f0f0f0f0f0f0f;
  return gather_even(bytes | bytes >> 4);
}
// Likewise the lowest two bits.
inline uint16_t gather_pairs(uint64_t bytes) {
  bytes &= 0x0303030303030303;
  bytes = (bytes | bytes >> 6) & 0x000f000f000f000f;
  bytes = (bytes | bytes >> 12) & 0x000000ff000000ff;
  return static_cast<uint16_t>(bytes | bytes >> 24);
}
inline uint64_t eight_bytes(const uint8_t* p) {
  uint64_t bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  if constexpr (std::endian::native == std::endian::big) bytes = __builtin_bswap64(bytes);
  return bytes;
}

// ---- put: column `c` of a piece from one block

// u of eight values, one to a byte: group `g` of a column.
template <int bits, int values>
void put_group(PackedIntegers<bits, values>& piece, int c, int g, uint64_t u) {
  if constexpr (bits == 8) {
    u ^= 0x8080808080808080;
    piece.words[2 * g][c] = gather_even(u);
    piece.words[2 * g + 1][c] = gather_even(u >> 8);
  } else {
    piece.words[g][c] = gather_nibbles(u);
  }
  // Upper bits of groups share a word, which the first one clears.
  if constexpr (bits == 5 || bits == 6) {
    constexpr int kUpper = bits - 4, kShare = 4 / kUpper;
    uint32_t& high = piece.high[g / kShare][c];
    high = (g % kShare == 0 ? 0 : high) | gather_nibbles(u >> 4) << g % kShare * kUpper;
  }
}

template <class Block>
void put_scales(Piece<Block>& piece, int c, const Block& block) {
  piece.d[c] = block.d;
  if constexpr (Block::kMinimum != Minimum::none) piece.m[c] = block.m;
  if constexpr (Block::kMinimum == Minimum::subtracted) piece.m[c].bits ^= 0x8000;
  constexpr int kParts = Block::kValues / Block::kPart;
  if constexpr (Block::kScales == Scales::int8) {
    for (int s = 0; s < kParts; ++s) piece.scales[s][c] = block.scales[s];
  } else if constexpr (Block::kScales == Scales::six) {
    uint8_t factors[2][kParts];
    for (int s = 0; s < kParts; ++s) {
      const Factors both = factors_of(block, s);
      factors[0][s] = static_cast<uint8_t>(both.scale);
      factors[1][s] = static_cast<uint8_t>(both.minimum);
    }
    for (int which = 0; which < 2; ++which) {
      piece.scale_words[which][c] = gather_nibbles(eight_bytes(factors[which]));
      piece.scale_high[which][c] = gather_pairs(eight_bytes(factors[which]) >> 4);
    }
  }
}

template <class Block>
void put(Piece<Block>& piece, int c, const Block& block) {
  static_assert(sizeof(Piece<Block>) == kPanelColumns * sizeof(Block));
  static_assert(Block::kPart == 32 || (Block::kPart == 16 && Block::kMinimum == Minimum::none), "kernels of bytes");
  put_scales(piece, c, block);
  for (int run = 0; run < Block::kValues / 32; ++run) {
    uint8_t u[32];
    block.integers(run, u);
    for (int g = 0; g < 4; ++g) put_group(piece, c, 4 * run + g, eight_bytes(u + 8 * g));
  }
}

// ---- get: value `t` of a column back

// Field `i` of `bits` bits.
inline int field(uint32_t word, int i, int bits) { return static_cast<int>(word >> (i * bits) & ((1u << bits) - 1)); }

template <int bits, int values>
int integer_of(const PackedIntegers<bits, values>& piece, int c, int t) {
  if constexpr (bits == 8) {
    return field(piece.words[t / 8 * 2 + t % 2][c], t % 8 / 2, 8) ^ 128;
  } else {
    int q = field(piece.words[t / 8][c], t % 8, 4);
    if constexpr (bits > 4) {
      constexpr int kUpper = bits - 4, kShare = 4 / kUpper;
      const int four = field(piece.high[t / 8 / kShare][c], t % 8, 4);
      q += 16 * (four >> t / 8 % kShare * kUpper & ((1 << kUpper) - 1));
    }
    return q;
  }
}

// The integer that multiplies d (which = 0) or m (1) in a part.
template <class Block>
int factor_of(const Piece<Block>& piece, int c, int which, int part) {
  if constexpr (Block::kScales == Scales::six) {
    return field(piece.scale_words[which][c], part, 4) + 16 * field(piece.scale_high[which][c], part, 2);
  } else if constexpr (Block::kScales == Scales::int8) {
    return piece.scales[part][c];
  } else {
    return 1;
  }
}

template <class Block>
float get(const Piece<Block>& piece, int c, int t) {
  const int part = t / Block::kPart, q = integer_of(piece, c, t) - Block::kOffset;
  const float product = to_f32(piece.d[c]) * static_cast<float>(factor_of(piece, c, 0, part)) * static_cast<float>(q);
  if constexpr (Block::kMinimum == Minimum::none) {
    return product;
  } else {
    return product + to_f32(piece.m[c]) * static_cast<float>(factor_of(piece, c, 1, part));
  }
}
inline float get(const Piece<BlockF32>& piece, int c, int) { return piece.x[c]; }
inline float get(const Piece<BlockF16>& piece, int c, int) { return to_f32(piece.x[c]); }
inline float get(const Piece<BlockBf16>& piece, int c, int t) {
  return to_f32(bf16{static_cast<uint16_t>(piece.words[c] >> 16 * t)});
}

}  // namespace opst::gemm

// The formats of quantised weights (opst/quant_format.h): one struct each, and one list of them. A struct holds a block
// as it lies in a GGUF file, and states what its bytes mean; sizes, dequantisation, packing and every product follow
// from the struct. Plain data for kernels.
//
// A block of one value is a float x. Any other is
//
//   value t = d * scale * (u - kOffset)                     kMinimum none
//   value t = d * scale * (u - kOffset) + m * minimum       added
//   value t = d * scale * (u - kOffset) - m * minimum       subtracted
//
//   u               kBits wide, 0 or more: integers(run, u) writes those of the values 32 run .. 32 run + 31
//   scale, minimum  small integers, one for each kPart values: factors_of(block, t / kPart)
//   d, m            f16, fields of the block (m where there is a minimum)
//
// A block in a file may start at any address: kernels copy a block before they look inside.
#pragma once

#include <cstdint>

#include "opst/dtype.h"
#include "opst/quant_format.h"

// The code of one instruction set level must not be called at another, so no function here is ever a symbol.
#define OPST_FORMAT_INLINE [[gnu::always_inline]] constexpr

namespace opst {

// Where scale and minimum of a part lie.
enum class Scales : uint8_t {
  one,   // nowhere: both are 1
  int8,  // scale: int8_t scales[kValues / kPart]; minimum: 1
  six    // six bits each: uint8_t scales[12], see six_bit_factors
};
enum class Minimum : uint8_t { none, added, subtracted };

struct Factors {
  int scale, minimum;
};

// Scale s and minimum s, 0 <= s < 8:
//   s < 4   scale: low six bits of byte s; minimum: low six bits of byte s + 4
//   s >= 4  low four bits: the lower (scale) and upper (minimum) half of byte s + 4; above them the upper two bits of
//           byte s - 4 (scale) and byte s (minimum)
OPST_FORMAT_INLINE Factors six_bit_factors(const uint8_t (&bytes)[12], int s) {
  if (s < 4) return {bytes[s] & 63, bytes[s + 4] & 63};
  return {(bytes[s + 4] & 15) | bytes[s - 4] >> 6 << 4, bytes[s + 4] >> 4 | bytes[s] >> 6 << 4};
}

template <class Block>
OPST_FORMAT_INLINE Factors factors_of(const Block& block, int part) {
  if constexpr (Block::kScales == Scales::int8) {
    return {block.scales[part], 1};
  } else if constexpr (Block::kScales == Scales::six) {
    return six_bit_factors(block.scales, part);
  } else {
    return {1, 1};
  }
}

// `low` of four bits, and bits above them.
OPST_FORMAT_INLINE uint8_t joined_bits(int low, int high) { return static_cast<uint8_t>(low | high << 4); }

// 16 bytes of two values each, the lower halves first.
OPST_FORMAT_INLINE void split_halves(const uint8_t (&q)[16], uint8_t* u) {
  for (int i = 0; i < 16; ++i) {
    u[i] = q[i] & 15;
    u[i + 16] = static_cast<uint8_t>(q[i] >> 4);
  }
}
// Above them the fifth bits: bit i % 8 of high[i / 8].
OPST_FORMAT_INLINE void add_fifth_bits(const uint8_t (&high)[4], uint8_t* u) {
  const uint32_t bits = high[0] | static_cast<uint32_t>(high[1]) << 8 | static_cast<uint32_t>(high[2]) << 16 |
                        static_cast<uint32_t>(high[3]) << 24;
  for (int i = 0; i < 32; ++i) u[i] = joined_bits(u[i], static_cast<int>(bits >> i & 1u));
}

template <QuantFormat format, DType type, class T>
struct FloatBlock {
  static constexpr QuantFormat kFormat = format;
  static constexpr DType kType = type;
  static constexpr int kValues = 1;
  T x;
};
using BlockF32 = FloatBlock<QuantFormat::f32, DType::f32, float>;
using BlockF16 = FloatBlock<QuantFormat::f16, DType::f16, f16>;
using BlockBf16 = FloatBlock<QuantFormat::bf16, DType::bf16, bf16>;

// The constants of a block.
template <QuantFormat format, int values, int part, Scales scales, int bits, int offset, Minimum minimum>
struct BlockOf {
  static constexpr QuantFormat kFormat = format;
  static constexpr int kValues = values, kPart = part, kBits = bits, kOffset = offset;
  static constexpr Scales kScales = scales;
  static constexpr Minimum kMinimum = minimum;
};
// Of 32 values with one scale.
template <QuantFormat format, int bits, int offset, Minimum minimum>
using BlockOf32 = BlockOf<format, 32, 32, Scales::one, bits, offset, minimum>;

struct BlockQ8_0 : BlockOf32<QuantFormat::q8_0, 8, 128, Minimum::none> {
  f16 d;
  int8_t q[32];
  OPST_FORMAT_INLINE void integers(int, uint8_t* u) const {
    for (int i = 0; i < 32; ++i) u[i] = static_cast<uint8_t>(q[i] ^ 128);
  }
};

struct BlockQ4_0 : BlockOf32<QuantFormat::q4_0, 4, 8, Minimum::none> {
  f16 d;
  uint8_t q[16];
  OPST_FORMAT_INLINE void integers(int, uint8_t* u) const { split_halves(q, u); }
};

struct BlockQ4_1 : BlockOf32<QuantFormat::q4_1, 4, 0, Minimum::added> {
  f16 d;
  f16 m;
  uint8_t q[16];
  OPST_FORMAT_INLINE void integers(int, uint8_t* u) const { split_halves(q, u); }
};

struct BlockQ5_0 : BlockOf32<QuantFormat::q5_0, 5, 16, Minimum::none> {
  f16 d;
  uint8_t high[4];
  uint8_t q[16];
  OPST_FORMAT_INLINE void integers(int, uint8_t* u) const {
    split_halves(q, u);
    add_fifth_bits(high, u);
  }
};

struct BlockQ5_1 : BlockOf32<QuantFormat::q5_1, 5, 0, Minimum::added> {
  f16 d;
  f16 m;
  uint8_t high[4];
  uint8_t q[16];
  OPST_FORMAT_INLINE void integers(int, uint8_t* u) const {
    split_halves(q, u);
    add_fifth_bits(high, u);
  }
};

// Value 128 h + i: the low four bits are half i / 64 (0: the lower) of low[64 h + i % 64]; above them bits 2 (i / 32),
// 2 (i / 32) + 1 of high[32 h + i % 32].
struct BlockQ6_K : BlockOf<QuantFormat::q6_k, 256, 16, Scales::int8, 6, 32, Minimum::none> {
  uint8_t low[128];
  uint8_t high[64];
  int8_t scales[16];
  f16 d;
  OPST_FORMAT_INLINE void integers(int run, uint8_t* u) const {
    const uint8_t* const four = low + 64 * (run / 4) + 32 * (run % 2);
    const uint8_t* const two = high + 32 * (run / 4);
    const int four_at = run % 4 / 2 * 4, two_at = run % 4 * 2;
    for (int i = 0; i < 32; ++i) u[i] = joined_bits(four[i] >> four_at & 15, two[i] >> two_at & 3);
  }
};

// Value 32 s + i: half s % 2 of q[32 (s / 2) + i].
struct BlockQ4_K : BlockOf<QuantFormat::q4_k, 256, 32, Scales::six, 4, 0, Minimum::subtracted> {
  f16 d;
  f16 m;
  uint8_t scales[12];
  uint8_t q[128];
  OPST_FORMAT_INLINE void integers(int run, uint8_t* u) const {
    for (int i = 0; i < 32; ++i) u[i] = q[32 * (run / 2) + i] >> (run % 2 * 4) & 15;
  }
};

// As q4_k, with a fifth bit of value 32 s + i: bit s of high[i].
struct BlockQ5_K : BlockOf<QuantFormat::q5_k, 256, 32, Scales::six, 5, 0, Minimum::subtracted> {
  f16 d;
  f16 m;
  uint8_t scales[12];
  uint8_t high[32];
  uint8_t q[128];
  OPST_FORMAT_INLINE void integers(int run, uint8_t* u) const {
    const uint8_t* const four = q + 32 * (run / 2);
    for (int i = 0; i < 32; ++i) u[i] = joined_bits(four[i] >> (run % 2 * 4) & 15, high[i] >> run & 1);
  }
};

// Calls visit.operator()<Block>() for every block of the list.
template <class... Blocks>
struct BlockList {
  static constexpr int kCount = sizeof...(Blocks);
  template <class Visit>
  OPST_FORMAT_INLINE static void each(const Visit& visit) {
    (visit.template operator()<Blocks>(), ...);
  }
};

using QuantBlocks = BlockList<BlockF32, BlockF16, BlockBf16, BlockQ8_0, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1,
                              BlockQ4_K, BlockQ5_K, BlockQ6_K>;
static_assert(QuantBlocks::kCount == kNumQuantFormats);

// Numbers beside scales: a block of one value is a float itself.
template <class Block>
inline constexpr bool kIsFloat = Block::kValues == 1;

}  // namespace opst

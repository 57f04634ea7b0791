// Weights from a packed piece, outputs on the lanes of a vector: as floats, one k (Decoder), or as bytes, eight k
// (Group::bytes), by the description of the format (quant/formats.h).
//
// A float is exactly the dequantised f32: every product of a scale and q fits into 24 bits (the widest, of q6_k:
// 11 + 7 + 5), so a fused multiply-add with m rounds once, as the format's product and sum do.
#pragma once

#include "matmul/packed_layout.h"
#include "simd/dot_i8.h"
#include "simd/small_ints.h"
#include "simd/vec.h"
#include "tile/gemm_tile.h"

namespace opst::OPST_ISA_NS::gemm {

using opst::gemm::kPanelColumns;
using opst::gemm::PackedIntegers;
using opst::gemm::PackedScales;
using opst::gemm::Piece;
using simd::F32;
using simd::shift_right;
using simd::Words;

// ---- Integers of one vector of columns, whose first one within the panel is `lane`, eight values (a group) at a time

// The eight as bytes, as they meet bytes of activations: values 0 2 4 6 and 1 3 5 7.
struct EvenOdd {
  Words even, odd;
};
OPST_INLINE EvenOdd split_nibbles(Words words) {
  const Words mask = simd::words_of(0x0f0f0f0f);
  return {words & mask, shift_right<4>(words) & mask};
}

// load(integers, lane, group), then value<M>(j): value j of the group minus M; bytes(integers, lane, group): u.
template <int bits>
struct Group;

template <>
struct Group<4> {
  Words words;
  template <int values>
  OPST_INLINE void load(const PackedIntegers<4, values>& q, int lane, int group) {
    words = Words::load(q.words[group] + lane);
  }
  template <int M>
  OPST_INLINE F32 value(int j) const {
    return simd::nibble<M>(words, j);
  }
  template <int values>
  static OPST_INLINE EvenOdd bytes(const PackedIntegers<4, values>& q, int lane, int group) {
    return split_nibbles(Words::load(q.words[group] + lane));
  }
};

template <>
struct Group<5> {
  Words words, high;
  template <int values>
  OPST_INLINE void load(const PackedIntegers<5, values>& q, int lane, int group) {
    words = Words::load(q.words[group] + lane);
    high = Words::load(q.high[group / 4] + lane) >> group % 4;
  }
  template <int M>
  OPST_INLINE F32 value(int j) const {
    return simd::field5<M>(words, high, j);
  }
  template <int values>
  static OPST_INLINE EvenOdd bytes(const PackedIntegers<5, values>& q, int lane, int group) {
    const EvenOdd low = split_nibbles(Words::load(q.words[group] + lane));
    const Words high = Words::load(q.high[group / 4] + lane), mask = simd::words_of(0x01010101);
    const int bit = group % 4;
    return {low.even | (high >> bit & mask) << 4, low.odd | (high >> (bit + 4) & mask) << 4};
  }
};

template <>
struct Group<6> {
  Words words, high;
  template <int values>
  OPST_INLINE void load(const PackedIntegers<6, values>& q, int lane, int group) {
    words = Words::load(q.words[group] + lane);
    high = Words::load(q.high[group / 2] + lane) >> group % 2 * 2;
  }
  template <int M>
  OPST_INLINE F32 value(int j) const {
    return simd::field6<M>(words, high, j);
  }
  template <int values>
  static OPST_INLINE EvenOdd bytes(const PackedIntegers<6, values>& q, int lane, int group) {
    const EvenOdd low = split_nibbles(Words::load(q.words[group] + lane));
    const Words high = Words::load(q.high[group / 2] + lane) >> group % 2 * 2, mask = simd::words_of(0x03030303);
    return {low.even | (high & mask) << 4, low.odd | (shift_right<4>(high) & mask) << 4};
  }
};

template <>
struct Group<8> {
  Words words[2];
  template <int values>
  OPST_INLINE void load(const PackedIntegers<8, values>& q, int lane, int group) {
    words[0] = Words::load(q.words[2 * group] + lane);
    words[1] = Words::load(q.words[2 * group + 1] + lane);
  }
  template <int M>
  OPST_INLINE F32 value(int j) const {
    static_assert(M == 128);
    return simd::signed_byte(words[j % 2], j / 2);
  }
  template <int values>
  static OPST_INLINE EvenOdd bytes(const PackedIntegers<8, values>& q, int lane, int group) {
    const Words signs = simd::words_of(0x80808080);
    return {Words::load(q.words[2 * group] + lane) ^ signs, Words::load(q.words[2 * group + 1] + lane) ^ signs};
  }
};

// ---- d * scale and m * minimum of one part

template <bool minimum>
OPST_INLINE F32 scale_of(const PackedScales<Scales::one, minimum, 1>& piece, int lane, int) {
  return F32::load(piece.d + lane);
}
OPST_INLINE F32 minimum_of(const PackedScales<Scales::one, true, 1>& piece, int lane, int) {
  return F32::load(piece.m + lane);
}

template <int parts>
OPST_INLINE F32 scale_of(const PackedScales<Scales::int8, false, parts>& piece, int lane, int part) {
  return F32::load(piece.d + lane) * simd::load_i8(piece.scales[part] + lane);
}

using SixBits = PackedScales<Scales::six, true, 8>;
OPST_INLINE F32 six_bit_product(const SixBits& piece, int lane, const f16* factor, int which, int part) {
  const Words words = Words::load(piece.scale_words[which] + lane) >> 4 * part;
  const Words high = Words::load(piece.scale_high[which] + lane) >> 2 * part;
  return F32::load(factor + lane) * simd::field6(words, high, 0);
}
OPST_INLINE F32 scale_of(const SixBits& piece, int lane, int part) {
  return six_bit_product(piece, lane, piece.d, 0, part);
}
OPST_INLINE F32 minimum_of(const SixBits& piece, int lane, int part) {
  return six_bit_product(piece, lane, piece.m, 1, part);
}

// ---- Floats
//   Piece decoding:  Decoder<Piece> d(piece, lane);
//                    for each kScaled values:  d.begin_scale(t);
//                      for each kGroup values:  d.begin_group(t);  d.weight(j) ...
template <class Piece>
struct Decoder;

template <class Block>
struct Decoder<Piece<Block>> {
  using Product = tile::ProductF32;
  static constexpr int kScaled = Block::kPart, kGroup = 8;
  const Piece<Block>* piece;
  int lane;
  F32 d, m;
  Group<Block::kBits> group;

  OPST_INLINE Decoder(const Piece<Block>* p, int l) : piece(p), lane(l) {}
  OPST_INLINE void begin_scale(int t) {
    d = scale_of(*piece, lane, t / kScaled);
    if constexpr (Block::kMinimum != Minimum::none) m = minimum_of(*piece, lane, t / kScaled);
  }
  OPST_INLINE void begin_group(int t) { group.load(*piece, lane, t / kGroup); }
  OPST_INLINE F32 weight(int j) const {
    const F32 q = group.template value<Block::kOffset>(j);
    if constexpr (Block::kMinimum == Minimum::none) {
      return d * q;
    } else {
      return fma(d, q, m);
    }
  }
};

// f32 and f16.
template <class Block>
requires kIsFloat<Block>
struct Decoder<Piece<Block>> {
  using Product = tile::ProductF32;
  static constexpr int kScaled = 1, kGroup = 1;
  const Piece<Block>* piece;
  int lane;

  OPST_INLINE Decoder(const Piece<Block>* p, int l) : piece(p), lane(l) {}
  OPST_INLINE void begin_scale(int) {}
  OPST_INLINE void begin_group(int) {}
  OPST_INLINE F32 weight(int) const { return F32::load(piece->x + lane); }
};

template <>
struct Decoder<Piece<BlockBf16>> {
  using Product = tile::ProductF32;
  static constexpr int kScaled = 2, kGroup = 2;
  const Piece<BlockBf16>* piece;
  int lane;
  simd::Bf16Words words;

  OPST_INLINE Decoder(const Piece<BlockBf16>* p, int l) : piece(p), lane(l) {}
  OPST_INLINE void begin_scale(int) {}
  OPST_INLINE void begin_group(int) { words = simd::Bf16Words::load(piece->words + lane); }
  OPST_INLINE F32 weight(int j) const { return j == 0 ? words.low() : words.high(); }
};

#if defined(__AVX512BF16__)
// The memory of Piece<BlockBf16>, whose words are multiplied as they are with words of x.
struct PieceBf16Words {
  static constexpr int kValues = 1;
  uint32_t words[kPanelColumns];
};

struct RawWords : simd::Bf16Words {
  OPST_INLINE void store(float* p) const { store_bits(p); }
};

template <>
struct Decoder<PieceBf16Words> {
  using Product = tile::ProductBf16Dot;
  static constexpr int kScaled = 1, kGroup = 1;
  const PieceBf16Words* piece;
  int lane;

  OPST_INLINE Decoder(const PieceBf16Words* p, int l) : piece(p), lane(l) {}
  OPST_INLINE void begin_scale(int) {}
  OPST_INLINE void begin_group(int) {}
  OPST_INLINE RawWords weight(int) const { return {simd::Bf16Words::load(piece->words + lane)}; }
};
#endif

// The panel of vector `vec` of a weight's outputs (kLanes outputs each), and the vector's first lane in the panel.
inline constexpr int kVecsPerPanel = kPanelColumns / F32::kLanes;
template <class Piece>
OPST_INLINE const Piece* panel_of(const void* panels, int64_t pieces, int64_t vec) {
  return static_cast<const Piece*>(panels) + vec / kVecsPerPanel * pieces;
}
OPST_INLINE int lane_of(int64_t vec) { return static_cast<int>(vec % kVecsPerPanel) * F32::kLanes; }

}  // namespace opst::OPST_ISA_NS::gemm

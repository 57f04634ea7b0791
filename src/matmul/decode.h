// Weights from a packed piece, outputs on the lanes of a vector: as floats, one k (Decoder), or as bytes, eight k
// (bytes_of), by the description of the format (quant/formats.h).
//
// A float is exactly the dequantised f32: every product of a scale and q fits into 24 bits (the widest, of q6_k:
// 11 + 7 + 5), so a fused multiply-add with m rounds once, as the format's product and sum do.
#pragma once

#include "matmul/panels.h"

namespace opst::OPST_ISA_NS::gemm {

// ---- Integers of one vector of columns, whose first one within the panel is `lane`, eight values (a group) at a time

// The eight as bytes, as they meet bytes of activations: values 0 2 4 6 and 1 3 5 7.
struct EvenOdd {
  Words even, odd;
};

// load(integers, lane, group); then value<M>(j): value j of the group minus M, or bytes(): u of all eight.
template <int bits>
struct Group {
  static constexpr int kUpper = bits - 4;  // bits above the low four
  Words words, high;

  template <int values>
  OPST_INLINE void load(const PackedIntegers<bits, values>& q, int lane, int group) {
    words = Words::load(q.words[group] + lane);
    if constexpr (kUpper > 0) {
      constexpr int kShare = 4 / kUpper;  // groups whose upper bits share a word
      high = Words::load(q.high[group / kShare] + lane) >> group % kShare * kUpper;
    }
  }
  template <int M>
  OPST_INLINE F32 value(int j) const {
    if constexpr (bits == 4) {
      return simd::nibble<M>(words, j);
    } else if constexpr (bits == 5) {
      return simd::field5<M>(words, high, j);
    } else {
      return simd::field6<M>(words, high, j);
    }
  }
  OPST_INLINE EvenOdd bytes() const {
    const Words four = simd::words_of(0x0f0f0f0f);
    const EvenOdd low = {words & four, words >> 4 & four};
    if constexpr (kUpper == 0) {
      return low;
    } else {
      const Words upper = simd::words_of(0x01010101 * ((1 << kUpper) - 1));
      return {low.even | (high & upper) << 4, low.odd | (high >> 4 & upper) << 4};
    }
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
  OPST_INLINE EvenOdd bytes() const {
    const Words signs = simd::words_of(0x80808080);
    return {words[0] ^ signs, words[1] ^ signs};
  }
};

template <class Block>
OPST_INLINE EvenOdd bytes_of(const Piece<Block>& piece, int lane, int group) {
  Group<Block::kBits> integers;
  integers.load(piece, lane, group);
  return integers.bytes();
}

// ---- d * scale and m * minimum of one part

// Scale (which = 0) or minimum (1) of six bits.
template <class Block>
OPST_INLINE F32 six_bits(const Piece<Block>& piece, int which, int lane, int part) {
  const Words words = Words::load(piece.scale_words[which] + lane) >> 4 * part;
  const Words high = Words::load(piece.scale_high[which] + lane) >> 2 * part;
  return simd::field6(words, high, 0);
}
template <class Block>
OPST_INLINE F32 scale_of(const Piece<Block>& piece, int lane, int part) {
  const F32 d = F32::load(piece.d + lane);
  if constexpr (Block::kScales == Scales::six) return d * six_bits(piece, 0, lane, part);
  if constexpr (Block::kScales == Scales::int8) return d * simd::load_i8(piece.scales[part] + lane);
  return d;
}
template <class Block>
OPST_INLINE F32 minimum_of(const Piece<Block>& piece, int lane, int part) {
  const F32 m = F32::load(piece.m + lane);
  if constexpr (Block::kScales == Scales::six) return m * six_bits(piece, 1, lane, part);
  return m;
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

// Pieces without scales.
template <class Piece>
struct PlainDecoder {
  static constexpr int kScaled = Piece::kValues, kGroup = Piece::kValues;
  const Piece* piece;
  int lane;

  OPST_INLINE PlainDecoder(const Piece* p, int l) : piece(p), lane(l) {}
  OPST_INLINE void begin_scale(int) {}
  OPST_INLINE void begin_group(int) {}
};

// f32 and f16.
template <class Block>
requires kIsFloat<Block>
struct Decoder<Piece<Block>> : PlainDecoder<Piece<Block>> {
  using Product = tile::ProductF32;
  using PlainDecoder<Piece<Block>>::PlainDecoder;
  OPST_INLINE F32 weight(int) const { return F32::load(this->piece->x + this->lane); }
};

template <>
struct Decoder<Piece<BlockBf16>> : PlainDecoder<Piece<BlockBf16>> {
  using Product = tile::ProductF32;
  using PlainDecoder::PlainDecoder;
  simd::Bf16Words words;
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
struct Decoder<PieceBf16Words> : PlainDecoder<PieceBf16Words> {
  using Product = tile::ProductBf16Dot;
  using PlainDecoder::PlainDecoder;
  OPST_INLINE RawWords weight(int) const { return {simd::Bf16Words::load(piece->words + lane)}; }
};
#endif

}  // namespace opst::OPST_ISA_NS::gemm

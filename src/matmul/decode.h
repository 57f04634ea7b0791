// One vector of weights from a packed piece: outputs on lanes, one k.
//
// A weight is exactly the dequantised f32: every product of a scale and q fits into 24 bits (the widest, of q6_k:
// 11 + 7 + 5), so a fused multiply-add with m rounds once, as the format's product and sum do.
#pragma once

#include "matmul/packed_layout.h"
#include "simd/small_ints.h"
#include "simd/vec.h"
#include "tile/gemm_tile.h"

namespace opst::OPST_ISA_NS::gemm {

using opst::gemm::kPanelColumns;
using opst::gemm::PieceBf16;
using opst::gemm::PieceF16;
using opst::gemm::PieceF32;
using opst::gemm::PieceQ4_0;
using opst::gemm::PieceQ4_1;
using opst::gemm::PieceQ4_K;
using opst::gemm::PieceQ5_0;
using opst::gemm::PieceQ5_1;
using opst::gemm::PieceQ5_K;
using opst::gemm::PieceQ6_K;
using opst::gemm::PieceQ8_0;
using simd::F32;
using simd::Words;

// A vector's columns within their panel: `lane` is the first one.
//   Piece decoding:  Decoder<Piece> d(piece, lane);
//                    for each kScaled values:  d.begin_scale(t);
//                      for each kGroup values:  d.begin_group(t);  d.weight(j) ...
template <class Piece>
struct Decoder;

template <>
struct Decoder<PieceF32> {
  using Product = tile::ProductF32;
  static constexpr int kScaled = 1, kGroup = 1;
  const PieceF32* piece;
  int lane;

  OPST_INLINE Decoder(const PieceF32* p, int l) : piece(p), lane(l) {}
  OPST_INLINE void begin_scale(int) {}
  OPST_INLINE void begin_group(int) {}
  OPST_INLINE F32 weight(int) const { return F32::load(piece->x + lane); }
};

template <>
struct Decoder<PieceF16> {
  using Product = tile::ProductF32;
  static constexpr int kScaled = 1, kGroup = 1;
  const PieceF16* piece;
  int lane;

  OPST_INLINE Decoder(const PieceF16* p, int l) : piece(p), lane(l) {}
  OPST_INLINE void begin_scale(int) {}
  OPST_INLINE void begin_group(int) {}
  OPST_INLINE F32 weight(int) const { return F32::load(piece->x + lane); }
};

template <>
struct Decoder<PieceBf16> {
  using Product = tile::ProductF32;
  static constexpr int kScaled = 2, kGroup = 2;
  const PieceBf16* piece;
  int lane;
  simd::Bf16Words words;

  OPST_INLINE Decoder(const PieceBf16* p, int l) : piece(p), lane(l) {}
  OPST_INLINE void begin_scale(int) {}
  OPST_INLINE void begin_group(int) { words = simd::Bf16Words::load(piece->words + lane); }
  OPST_INLINE F32 weight(int j) const { return j == 0 ? words.low() : words.high(); }
};

#if defined(__AVX512BF16__)
// The memory of PieceBf16, whose words are multiplied as they are with words of x.
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

template <>
struct Decoder<PieceQ8_0> {
  using Product = tile::ProductF32;
  static constexpr int kScaled = 32, kGroup = 8;
  const PieceQ8_0* piece;
  int lane;
  F32 d;
  Words words[2];

  OPST_INLINE Decoder(const PieceQ8_0* p, int l) : piece(p), lane(l), d(F32::load(p->d + l)) {}
  OPST_INLINE void begin_scale(int) {}
  OPST_INLINE void begin_group(int t) {
    words[0] = Words::load(piece->words[t / 4] + lane);
    words[1] = Words::load(piece->words[t / 4 + 1] + lane);
  }
  OPST_INLINE F32 weight(int j) const { return d * simd::signed_byte(words[j % 2], j / 2); }
};

template <>
struct Decoder<PieceQ4_1> {
  using Product = tile::ProductF32;
  static constexpr int kScaled = 32, kGroup = 8;
  const PieceQ4_1* piece;
  int lane;
  F32 d, m;
  Words words;

  OPST_INLINE Decoder(const PieceQ4_1* p, int l) : piece(p), lane(l), d(F32::load(p->d + l)), m(F32::load(p->m + l)) {}
  OPST_INLINE void begin_scale(int) {}
  OPST_INLINE void begin_group(int t) { words = Words::load(piece->words[t / 8] + lane); }
  OPST_INLINE F32 weight(int j) const { return fma(d, simd::nibble(words, j), m); }
};

template <>
struct Decoder<PieceQ4_0> {
  using Product = tile::ProductF32;
  static constexpr int kScaled = 32, kGroup = 8;
  const PieceQ4_0* piece;
  int lane;
  F32 d;
  Words words;

  OPST_INLINE Decoder(const PieceQ4_0* p, int l) : piece(p), lane(l), d(F32::load(p->d + l)) {}
  OPST_INLINE void begin_scale(int) {}
  OPST_INLINE void begin_group(int t) { words = Words::load(piece->words[t / 8] + lane); }
  OPST_INLINE F32 weight(int j) const { return d * simd::nibble<8>(words, j); }
};

template <>
struct Decoder<PieceQ5_0> {
  using Product = tile::ProductF32;
  static constexpr int kScaled = 32, kGroup = 8;
  const PieceQ5_0* piece;
  int lane;
  F32 d;
  Words words, high;

  OPST_INLINE Decoder(const PieceQ5_0* p, int l) : piece(p), lane(l), d(F32::load(p->d + l)) {}
  OPST_INLINE void begin_scale(int) {}
  OPST_INLINE void begin_group(int t) {
    words = Words::load(piece->words[t / 8] + lane);
    high = Words::load(piece->high[t / 32] + lane) >> t / 8 % 4;
  }
  OPST_INLINE F32 weight(int j) const { return d * simd::field5<16>(words, high, j); }
};

template <>
struct Decoder<PieceQ5_1> {
  using Product = tile::ProductF32;
  static constexpr int kScaled = 32, kGroup = 8;
  const PieceQ5_1* piece;
  int lane;
  F32 d, m;
  Words words, high;

  OPST_INLINE Decoder(const PieceQ5_1* p, int l) : piece(p), lane(l), d(F32::load(p->d + l)), m(F32::load(p->m + l)) {}
  OPST_INLINE void begin_scale(int) {}
  OPST_INLINE void begin_group(int t) {
    words = Words::load(piece->words[t / 8] + lane);
    high = Words::load(piece->high[t / 32] + lane) >> t / 8 % 4;
  }
  OPST_INLINE F32 weight(int j) const { return fma(d, simd::field5(words, high, j), m); }
};

template <>
struct Decoder<PieceQ6_K> {
  using Product = tile::ProductF32;
  static constexpr int kScaled = 16, kGroup = 8;
  const PieceQ6_K* piece;
  int lane;
  F32 d;
  Words words, high;

  OPST_INLINE Decoder(const PieceQ6_K* p, int l) : piece(p), lane(l) {}
  OPST_INLINE void begin_scale(int t) { d = F32::load(piece->d + lane) * simd::load_i8(piece->scales[t / 16] + lane); }
  OPST_INLINE void begin_group(int t) {
    words = Words::load(piece->words[t / 8] + lane);
    high = Words::load(piece->high[t / 16] + lane) >> t / 8 % 2 * 2;
  }
  OPST_INLINE F32 weight(int j) const { return d * simd::field6<32>(words, high, j); }
};

// factor * 6-bit field s, which PieceQ4_K and PieceQ5_K keep for scales (which = 0) and minimums (1).
template <class Piece>
OPST_INLINE F32 scale_of(const Piece& piece, int lane, const f16* factor, int which, int s) {
  const Words words = Words::load(piece.scale_words[which] + lane) >> 4 * s;
  const Words high = Words::load(piece.scale_high[which] + lane) >> 2 * s;
  return F32::load(factor + lane) * simd::field6(words, high, 0);
}

template <>
struct Decoder<PieceQ4_K> {
  using Product = tile::ProductF32;
  static constexpr int kScaled = 32, kGroup = 8;
  const PieceQ4_K* piece;
  int lane;
  F32 d, m;
  Words words;

  OPST_INLINE Decoder(const PieceQ4_K* p, int l) : piece(p), lane(l) {}
  OPST_INLINE void begin_scale(int t) {
    d = scale_of(*piece, lane, piece->d, 0, t / 32);
    m = scale_of(*piece, lane, piece->minus_dmin, 1, t / 32);
  }
  OPST_INLINE void begin_group(int t) { words = Words::load(piece->words[t / 8] + lane); }
  OPST_INLINE F32 weight(int j) const { return fma(d, simd::nibble(words, j), m); }
};

template <>
struct Decoder<PieceQ5_K> {
  using Product = tile::ProductF32;
  static constexpr int kScaled = 32, kGroup = 8;
  const PieceQ5_K* piece;
  int lane;
  F32 d, m;
  Words words, high;

  OPST_INLINE Decoder(const PieceQ5_K* p, int l) : piece(p), lane(l) {}
  OPST_INLINE void begin_scale(int t) {
    d = scale_of(*piece, lane, piece->d, 0, t / 32);
    m = scale_of(*piece, lane, piece->minus_dmin, 1, t / 32);
  }
  OPST_INLINE void begin_group(int t) {
    words = Words::load(piece->words[t / 8] + lane);
    high = Words::load(piece->high[t / 32] + lane) >> t / 8 % 4;
  }
  OPST_INLINE F32 weight(int j) const { return fma(d, simd::field5(words, high, j), m); }
};

// The panel of vector `vec` of a weight's outputs (kLanes outputs each), and the vector's first lane in the panel.
inline constexpr int kVecsPerPanel = kPanelColumns / F32::kLanes;
template <class Piece>
OPST_INLINE const Piece* panel_of(const void* panels, int64_t pieces, int64_t vec) {
  return static_cast<const Piece*>(panels) + vec / kVecsPerPanel * pieces;
}
OPST_INLINE int lane_of(int64_t vec) { return static_cast<int>(vec % kVecsPerPanel) * F32::kLanes; }

}  // namespace opst::OPST_ISA_NS::gemm

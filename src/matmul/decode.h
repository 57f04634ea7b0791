// One vector of weights from a packed piece: outputs on lanes, one k.
//
// The value is exactly the dequantised f32: d * q has at most 18 significant bits, so a fused multiply-add with m
// rounds once, as the format's product and sum do.
#pragma once

#include "matmul/packed_layout.h"
#include "simd/small_ints.h"
#include "simd/vec.h"

namespace opst::OPST_ISA_NS::gemm {

using opst::gemm::kPanelColumns;
using opst::gemm::PieceF16;
using opst::gemm::PieceF32;
using opst::gemm::PieceQ4_1;
using opst::gemm::PieceQ8_0;
using simd::F32;

// A vector's columns within their panel: `lane` is the first one.
//   Piece decoding:  Decoder<Piece> d(piece, lane);  for groups of kGroup values:  d.begin_group(t);  d.weight(j) ...
template <class Piece>
struct Decoder;

template <>
struct Decoder<PieceF32> {
  static constexpr int kGroup = 1;
  const PieceF32* piece;
  int lane;

  OPST_INLINE Decoder(const PieceF32* p, int l) : piece(p), lane(l) {}
  OPST_INLINE void begin_group(int) {}
  OPST_INLINE F32 weight(int) const { return F32::load(piece->x + lane); }
};

template <>
struct Decoder<PieceF16> {
  static constexpr int kGroup = 1;
  const PieceF16* piece;
  int lane;

  OPST_INLINE Decoder(const PieceF16* p, int l) : piece(p), lane(l) {}
  OPST_INLINE void begin_group(int) {}
  OPST_INLINE F32 weight(int) const { return F32::load(piece->x + lane); }
};

template <>
struct Decoder<PieceQ8_0> {
  static constexpr int kGroup = 8;
  const PieceQ8_0* piece;
  int lane;
  F32 d;
  const int8_t* q;

  OPST_INLINE Decoder(const PieceQ8_0* p, int l) : piece(p), lane(l), d(F32::load(p->d + l)) {}
  OPST_INLINE void begin_group(int t) { q = piece->q[t] + lane; }
  OPST_INLINE F32 weight(int j) const { return d * simd::load_i8(q + j * kPanelColumns); }
};

template <>
struct Decoder<PieceQ4_1> {
  static constexpr int kGroup = 8;
  const PieceQ4_1* piece;
  int lane;
  F32 d, m;
  simd::Words words;

  OPST_INLINE Decoder(const PieceQ4_1* p, int l) : piece(p), lane(l), d(F32::load(p->d + l)), m(F32::load(p->m + l)) {}
  OPST_INLINE void begin_group(int t) { words = simd::Words::load(piece->words[t / 8] + lane); }
  OPST_INLINE F32 weight(int j) const { return fma(d, simd::nibble(words, j), m); }
};

// Where vector `index` of a weight's outputs lies: kLanes outputs each.
inline constexpr int kVecsPerPanel = kPanelColumns / F32::kLanes;
template <class Piece>
OPST_INLINE const Piece* panel_of(const void* panels, int64_t pieces, int64_t vec) {
  return static_cast<const Piece*>(panels) + vec / kVecsPerPanel * pieces;
}
OPST_INLINE int lane_of(int64_t vec) { return static_cast<int>(vec % kVecsPerPanel) * F32::kLanes; }

}  // namespace opst::OPST_ISA_NS::gemm

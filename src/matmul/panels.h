// What the kernels of matmul share: where a vector of columns lies in a packed weight (packed_layout.h), how a
// rectangle of sums begins.
#pragma once

#include "matmul/kernels.h"
#include "matmul/packed_layout.h"
#include "simd/dot_i8.h"
#include "tile/gemm_tile.h"

namespace opst::OPST_ISA_NS::gemm {

using namespace opst::gemm;
using simd::F32;
using simd::I32;
using simd::Words;

// Rows of a register tile of floats or int8, and what all tiles of many rows take at once: two vectors of columns.
inline constexpr int kTileRows = tile::RegisterTile::kTileRows, kTileVecs = tile::RegisterTile::kTileVecs;
inline constexpr int kTileColumns = kTileVecs * F32::kLanes;

// The address of base[index], only to fetch from: it may lie beyond the memory that base points into.
template <class T>
OPST_INLINE const char* fetch_address(const T* base, int64_t index) {
  const auto bytes = static_cast<uintptr_t>(index * static_cast<int64_t>(sizeof(T)));
  return reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(base) + bytes);
}

// ---- Columns, by their vectors of kLanes

inline constexpr int kVecsPerPanel = kPanelColumns / F32::kLanes;

// The vector that begins at `column`; beyond the end the last one.
OPST_INLINE int64_t clamped_vec(const ProductPart& part, int64_t column) {
  const int64_t vec = column / F32::kLanes, last = (part.columns - 1) / F32::kLanes;
  return vec < last ? vec : last;
}
// The panel of a vector, and the vector's first lane in the panel.
template <class Piece>
OPST_INLINE const Piece* panel_of(const ProductPart& part, int64_t vec) {
  return static_cast<const Piece*>(part.panels) + vec / kVecsPerPanel * (part.k / Piece::kValues);
}
OPST_INLINE int lane_of(int64_t vec) { return static_cast<int>(vec % kVecsPerPanel) * F32::kLanes; }

// Panels and lanes of NV vectors from `column` on. Beyond the end: the last vector once more, and nothing is stored.
template <class Piece, int NV>
OPST_INLINE void find_vecs(const ProductPart& part, int64_t column, const Piece* (&panel)[NV], int (&lane)[NV]) {
  OPST_UNROLL for (int v = 0; v < NV; ++v) {
    const int64_t vec = clamped_vec(part, column + v * F32::kLanes);
    panel[v] = panel_of<Piece>(part, vec);
    lane[v] = lane_of(vec);
  }
}

// ---- Sums

// All sums 0, in whole tiles of columns.
OPST_INLINE void clear_sums(const ProductPart& part) {
  for (int64_t row = 0; row < part.rows; ++row) {
    float* const sums = part.sums + row * part.sums_stride;
    for (int64_t c = 0; c < part.columns; c += kTileColumns) {
      OPST_UNROLL for (int j = 0; j < kTileVecs; ++j) F32::zero().store(sums + c + j * F32::kLanes);
    }
  }
}

// Lanes below `left`, all of them where left >= kLanes.
template <class T>
OPST_INLINE void store_first(F32 v, T* to, int64_t left) {
  if (left >= F32::kLanes) {
    v.store(to);
  } else {
    v.store_n(to, left);
  }
}

// ---- int8 and int4 weights

template <class Word>
inline constexpr int kFoursPerWord = Word::kValues / 4;
template <class Word>
inline constexpr int kMostOf = (1 << Word::kBits) - 1;

// Where vector `vec` of the columns lies, with `per_panel` elements per output and panel.
template <class T>
OPST_INLINE const T* vector_of(const T* base, int64_t per_panel, int64_t vec) {
  return base + vec / kVecsPerPanel * per_panel * kIntPanelColumns + lane_of(vec);
}

OPST_INLINE Words four_bytes(const int8_t* p) {
  uint32_t four;
  __builtin_memcpy(&four, p, sizeof(four));
  return simd::words_of(four);
}

// Four values to a lane: those of an int8 word, or of an int4 word the lower halves (i = 0) or the upper ones (1).
template <class Word>
OPST_INLINE Words fours_of(Words word, int i) {
  if constexpr (Word::kBits == 8) return word;
  return (i == 0 ? word : word >> 4) & simd::words_of(0x0f0f0f0f);
}

// -(offset + zero) * sum: takes off the excess of the unsigned products.
template <class Word>
OPST_INLINE I32 correction(const int32_t* zeros, int32_t sum) {
  const I32 offset = I32::set1(-Word::kOffset * sum);
  return zeros == nullptr ? offset : offset - I32::load(zeros) * I32::set1(sum);
}

// What the sums of a group begin with: the correction and, where there is one group, the integer bias.
template <class Word>
OPST_INLINE I32 first_sums(const ProductPart& part, int64_t row, int64_t group, int64_t vec) {
  const IntWeightPart& weight = part.ints;
  I32 sums = correction<Word>(
      weight.zeros == nullptr ? nullptr : vector_of(weight.zeros, weight.groups, vec) + group * kIntPanelColumns,
      part.x_sums[row * weight.groups + group]);
  if (part.int_bias != nullptr) sums = sums + I32::load(part.int_bias + vec * F32::kLanes);
  return sums;
}

}  // namespace opst::OPST_ISA_NS::gemm

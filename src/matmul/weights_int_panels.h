// What the kernels of int8 and int4 weights (weights_int.h) share: where a vector of columns lies, and what the unsigned
// storage of weights adds to a sum.
#pragma once

#include "matmul/kernels.h"
#include "simd/dot_i8.h"
#include "tile/gemm_tile.h"

namespace opst::OPST_ISA_NS::gemm {

using opst::gemm::IntWeightPart;
using opst::gemm::kIntPanelColumns;
using opst::gemm::ProductPart;
using opst::gemm::WordI4;
using opst::gemm::WordI8;
using simd::F32;
using simd::I32;
using simd::Words;
inline constexpr int kTileRows = tile::RegisterTile::kTileRows, kTileVecs = tile::RegisterTile::kTileVecs;

inline constexpr int kIntColumns = kTileVecs * F32::kLanes;
inline constexpr int kIntPanelVecs = kIntPanelColumns / F32::kLanes;

template <class Word>
inline constexpr int kFoursPerWord = Word::kValues / 4;
template <class Word>
inline constexpr int kMostOf = (1 << Word::kBits) - 1;

// Where vector `vec` of the columns lies, with `per_panel` elements per output and panel.
template <class T>
OPST_INLINE const T* vector_of(const T* base, int64_t per_panel, int64_t vec) {
  return base + vec / kIntPanelVecs * per_panel * kIntPanelColumns + vec % kIntPanelVecs * F32::kLanes;
}

OPST_INLINE Words four_bytes(const int8_t* p) {
  uint32_t four;
  __builtin_memcpy(&four, p, sizeof(four));
  return simd::words_of(four);
}

// -(offset + zero) * sum: takes off the excess of the unsigned products.
template <class Word>
OPST_INLINE I32 correction(const int32_t* zeros, int32_t sum) {
  const I32 offset = I32::set1(-Word::kOffset * sum);
  return zeros == nullptr ? offset : offset - I32::load(zeros) * I32::set1(sum);
}

OPST_INLINE int64_t clamped_vec(int64_t column, int64_t columns) {
  const int64_t vec = column / F32::kLanes, last = (columns - 1) / F32::kLanes;
  return vec < last ? vec : last;
}

// What the sums of a group begin with: -(offset + zero) * sum of x, which takes off the excess of the unsigned products,
// and, where there is one group, the integer bias.
template <class Word>
OPST_INLINE I32 first_sums(const ProductPart& part, int64_t row, int64_t group, int64_t vec) {
  const IntWeightPart& weight = part.ints;
  I32 sums = correction<Word>(
      weight.zeros == nullptr ? nullptr : vector_of(weight.zeros, weight.groups, vec) + group * kIntPanelColumns,
      part.x_sums[row * weight.groups + group]);
  if (part.int_bias != nullptr) sums = sums + I32::load(part.int_bias + vec * F32::kLanes);
  return sums;
}

// All sums 0, in whole tiles of columns.
OPST_INLINE void clear_sums(const ProductPart& part) {
  for (int64_t row = 0; row < part.rows; ++row) {
    for (int64_t c = 0; c < part.columns; c += kIntColumns) {
      OPST_UNROLL for (int j = 0; j < kTileVecs; ++j) {
        F32::zero().store(part.sums + row * part.sums_stride + c + j * F32::kLanes);
      }
    }
  }
}

// A row of x in groups, each filled up with zeros to group_bytes, and the groups' sums.
inline void pack_int_row(const int8_t* x, int64_t x_stride, const IntWeightPart& weight, int64_t group_bytes, int8_t* a,
                         int32_t* x_sums) {
  const int64_t values = weight.group_values;
  for (int64_t g = 0; g < weight.groups; ++g, x += values * x_stride, a += group_bytes) {
    if (x_stride == 1 && values > 0) {  // x may be null where there are none
      __builtin_memcpy(a, x, static_cast<size_t>(values));
    } else {
      for (int64_t t = 0; t < values; ++t) a[t] = x[t * x_stride];
    }
    __builtin_memset(a + values, 0, static_cast<size_t>(group_bytes - values));
    // group_bytes is a multiple of 4, and bytes beyond the values are zero.
    I32 sums = I32::zero();
    int64_t t = 0;
    for (; t + 4 * F32::kLanes <= group_bytes; t += 4 * F32::kLanes) {
      sums = simd::dot<1>(sums, simd::words_of(0x01010101), Words::load(reinterpret_cast<const uint32_t*>(a + t)));
    }
    int32_t lanes[F32::kLanes];
    sums.store(lanes);
    int32_t sum = 0;
    for (int i = 0; i < F32::kLanes; ++i) sum += lanes[i];
    for (; t < values; ++t) sum += a[t];
    x_sums[g] = sum;
  }
}

}  // namespace opst::OPST_ISA_NS::gemm

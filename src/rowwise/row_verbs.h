// Vectors of a row whose elements may be any distance apart, and sums over a row.
#pragma once

#include "rowwise/kernels.h"
#include "simd/vec.h"
#include "tile/pack.h"

namespace opst::OPST_ISA_NS::rowwise {

using namespace opst::rowwise;
using simd::F32;

// Elements begin .. begin + kLanes - 1 of a row of `length`; 0 from `length` on.
template <class T>
OPST_INLINE F32 load(ConstRow row, int64_t begin, int64_t length) {
  return tile::load_row<F32>(static_cast<const T*>(row.data), row.stride, begin, length);
}

// The counterpart of load: writes the elements below `length`.
template <class T>
OPST_INLINE void store(F32 x, Row row, int64_t begin, int64_t length) {
  T* const data = static_cast<T*>(row.data);
  const int64_t n = length - begin < F32::kLanes ? length - begin : F32::kLanes;
  if (row.stride == 1) return n == F32::kLanes ? x.store(data + begin) : x.store_n(data + begin, n);
  T rounded[F32::kLanes];
  x.store(rounded);
  for (int64_t i = 0; i < n; ++i) data[(begin + i) * row.stride] = rounded[i];
}

// x, with `other` in the lanes of elements from `length` on.
OPST_INLINE F32 within(F32 x, int64_t begin, int64_t length, F32 other) {
  return length - begin < F32::kLanes ? simd::blend_n(length - begin, x, other) : x;
}

// Combines a row's vectors into one: step(accumulator, i) takes in elements i .. i + kLanes - 1. Four accumulators,
// combined in a fixed order.
template <class Step, class Combine>
OPST_INLINE F32 reduce(int64_t length, F32 start, const Step& step, const Combine& combine) {
  constexpr int64_t kLanes = F32::kLanes;
  F32 part[4] = {start, start, start, start};
  for (int64_t i = 0; i < length; i += 4 * kLanes) {
    OPST_UNROLL for (int j = 0; j < 4; ++j) {
      if (i + j * kLanes >= length) break;
      part[j] = step(part[j], i + j * kLanes);
    }
  }
  return combine(combine(part[0], part[1]), combine(part[2], part[3]));
}
template <class Step>
OPST_INLINE float sum(int64_t length, const Step& step) {
  return simd::hsum(reduce(length, F32::zero(), step, [](F32 a, F32 b) OPST_INLINE_LAMBDA { return a + b; }));
}

}  // namespace opst::OPST_ISA_NS::rowwise

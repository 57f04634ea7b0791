// Verbs on a row of any number of elements, which may lie any distance apart: the counterpart of load_row (pack.h), and
// sums over a row.
#pragma once

#include "tile/pack.h"

namespace opst::OPST_ISA_NS::tile {

using simd::F32;

// Writes the elements below `length` of begin .. begin + kLanes - 1, rounded to T.
template <class T>
OPST_INLINE void store_row(F32 x, T* row, int64_t stride, int64_t begin, int64_t length) {
  const int64_t n = length - begin < F32::kLanes ? length - begin : F32::kLanes;
  if (stride == 1) return n == F32::kLanes ? x.store(row + begin) : x.store_n(row + begin, n);
  T rounded[F32::kLanes];
  x.store(rounded);
  for (int64_t i = 0; i < n; ++i) row[(begin + i) * stride] = rounded[i];
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
// Passes over NaN where step does.
template <class Step>
OPST_INLINE float greatest(int64_t length, const Step& step) {
  return simd::hmax(reduce(length, F32::set1(-__builtin_inff()), step,
                           [](F32 a, F32 b) OPST_INLINE_LAMBDA { return simd::max(a, b); }));
}

}  // namespace opst::OPST_ISA_NS::tile

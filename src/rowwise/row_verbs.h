// Vectors of a row whose elements may be any distance apart.
#pragma once

#include "rowwise/kernels.h"
#include "simd/vec.h"
#include "tile/pack.h"

namespace opst::OPST_ISA_NS::rowwise {

using opst::rowwise::ConstRow;
using opst::rowwise::Row;
using simd::F32;
using tile::load_row;

// Elements begin .. begin + kLanes - 1 of a row of `length`; 0 from `length` on.
template <class T>
OPST_INLINE F32 load(ConstRow row, int64_t begin, int64_t length) {
  return load_row<F32>(static_cast<const T*>(row.data), row.stride, begin, length);
}

// The counterpart: writes what lies below `length`.
template <class T>
OPST_INLINE void store(F32 x, Row row, int64_t begin, int64_t length) {
  T* const data = static_cast<T*>(row.data);
  const int64_t n = length - begin < F32::kLanes ? length - begin : F32::kLanes;
  if (row.stride == 1) {
    if (n == F32::kLanes) {
      x.store(data + begin);
    } else {
      x.store_n(data + begin, n);
    }
    return;
  }
  T rounded[F32::kLanes];
  x.store(rounded);
  for (int64_t i = 0; i < n; ++i) data[(begin + i) * row.stride] = rounded[i];
}

}  // namespace opst::OPST_ISA_NS::rowwise

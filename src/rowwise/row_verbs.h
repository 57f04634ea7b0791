// Vectors of this room's rows, and the sums of tile/row_verbs.h by their own names.
#pragma once

#include "rowwise/kernels.h"
#include "tile/row_verbs.h"

namespace opst::OPST_ISA_NS::rowwise {

using namespace opst::rowwise;
using simd::F32;
using tile::greatest;
using tile::reduce;
using tile::sum;
using tile::within;

// Elements begin .. begin + kLanes - 1 of a row of `length`; 0 from `length` on.
template <class T>
OPST_INLINE F32 load(ConstRow row, int64_t begin, int64_t length) {
  return tile::load_row<F32>(static_cast<const T*>(row.data), row.stride, begin, length);
}

// The counterpart of load: writes the elements below `length`.
template <class T>
OPST_INLINE void store(F32 x, Row row, int64_t begin, int64_t length) {
  tile::store_row(x, static_cast<T*>(row.data), row.stride, begin, length);
}

}  // namespace opst::OPST_ISA_NS::rowwise

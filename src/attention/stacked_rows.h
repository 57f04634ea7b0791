// StackedRows as kernels read and write them: addresses of rows, whatever type is stored there.
#pragma once

#include <type_traits>

#include "attention/kernels.h"
#include "attention/score_ops.h"
#include "tile/pack.h"

namespace opst::OPST_ISA_NS::attention {

// In elements.
OPST_INLINE int64_t offset_of(const StackedRows& rows, int64_t row) {
  return row / rows.group * rows.seq_stride + row % rows.group * rows.head_stride;
}

// visit(pointer to element 0 of the row)
template <class S, class Visit>
OPST_INLINE void with_row(const StackedRows& rows, int64_t row, const Visit& visit) {
  const int64_t at = offset_of(rows, row);
  with_type<S>(rows.dtype, [&](auto zero) OPST_INLINE_LAMBDA { visit(static_cast<decltype(zero)*>(rows.data) + at); });
}

// The first n lanes of x to elements d, d + 1, ... of a row.
template <class V, class T>
OPST_INLINE void store_elements(V x, T* row, int64_t dim_stride, int64_t d, int64_t n) {
  if (dim_stride == 1) {
    n == V::kLanes ? x.store(row + d) : x.store_n(row + d, n);
  } else {
    T lanes[V::kLanes];
    x.store(lanes);
    for (int64_t j = 0; j < n; ++j) row[(d + j) * dim_stride] = lanes[j];
  }
}

// A row of `length` elements, times `factor`, as words; zero to the end of the last word. Exact: the factor is 0, or a
// power of two with a sign, and where words are pairs the row is bf16.
template <class P, class T>
OPST_INLINE void copy_words(const T* row, int64_t dim_stride, int64_t length, double factor, typename P::Word* out) {
  using V = typename P::V;
  using Element = std::conditional_t<P::kStep == 1, typename V::Scalar, bf16>;
  Element* elements = reinterpret_cast<Element*>(out);
  const int64_t padded = tile::words<P>(length) * P::kStep;
  if (std::is_same<T, Element>::value && factor == 1 && dim_stride == 1) {
    __builtin_memcpy(elements, row, static_cast<size_t>(length) * sizeof(T));
    if (padded > length) elements[length] = {};
    return;
  }
  const V f = V::set1(static_cast<typename V::Scalar>(factor));
  for (int64_t d = 0; d < padded; d += V::kLanes) {
    store_elements(tile::load_row<V>(row, dim_stride, d, length) * f, elements, 1, d, simd::clamp_lanes<V>(padded - d));
  }
}

}  // namespace opst::OPST_ISA_NS::attention

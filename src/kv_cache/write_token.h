// Computes   to[h, d] = from[h, d], converted to the cache's type
// Shapes     from, to [num_heads, head_dim], any strides
// Loop nest  for each head; lanes over its elements
// Memory     everything streams
// Numerics   one rounding, to nearest even; equal types keep their bits
#pragma once

#include "kv_cache/kernels.h"
#include "simd/vec.h"

namespace opst::OPST_ISA_NS::kv_cache {

using opst::kv_cache::TokenRows;
using simd::F32;

template <class From, class To>
struct Same {
  static constexpr bool value = false;
};
template <class T>
struct Same<T, T> {
  static constexpr bool value = true;
};

template <class From, class To>
void write_token(const TokenRows& rows) {
  for (int64_t head = 0; head < rows.num_heads; ++head) {
    const From* const from = static_cast<const From*>(rows.from) + head * rows.from_head_stride;
    To* const to = static_cast<To*>(rows.to) + head * rows.to_head_stride;
    const bool contiguous = rows.from_dim_stride == 1 && rows.to_dim_stride == 1;
    if constexpr (Same<From, To>::value) {
      if (contiguous) {
        __builtin_memcpy(to, from, static_cast<size_t>(rows.head_dim) * sizeof(To));
      } else {
        for (int64_t d = 0; d < rows.head_dim; ++d) to[d * rows.to_dim_stride] = from[d * rows.from_dim_stride];
      }
    } else if (contiguous) {
      int64_t d = 0;
      for (; d + F32::kLanes <= rows.head_dim; d += F32::kLanes) F32::load(from + d).store(to + d);
      F32::load_n(from + d, rows.head_dim - d).store_n(to + d, rows.head_dim - d);
    } else {
      for (int64_t d = 0; d < rows.head_dim; ++d) {
        F32::load_n(from + d * rows.from_dim_stride, 1).store_n(to + d * rows.to_dim_stride, 1);
      }
    }
  }
}

}  // namespace opst::OPST_ISA_NS::kv_cache

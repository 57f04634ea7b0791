// Computes   to[i, d] = from[i, d], converted to the target's type
// Shapes     from, to [num_rows, dim], rows as RowsView says
// Loop nest  for each row; pieces of 64 elements: collect, convert (lanes over elements), spread
// Memory     rows that are contiguous stream; what a column of a transposed page touches stays in L1 for the next row
// Numerics   one rounding, to nearest even; equal types keep their bits
#pragma once

#include "kv_cache/kernels.h"
#include "simd/vec.h"

namespace opst::OPST_ISA_NS::kv_cache {

using opst::kv_cache::CopyRows;
using opst::kv_cache::RowsView;
using simd::F32;

template <class From, class To>
struct Same {
  static constexpr bool value = false;
};
template <class T>
struct Same<T, T> {
  static constexpr bool value = true;
};

// n contiguous elements.
template <class From, class To>
OPST_INLINE void copy_contiguous(const From* from, To* to, int64_t n) {
  if constexpr (Same<From, To>::value) {
    __builtin_memcpy(to, from, static_cast<size_t>(n) * sizeof(To));
  } else {
    int64_t d = 0;
    for (; d + F32::kLanes <= n; d += F32::kLanes) F32::load(from + d).store(to + d);
    F32::load_n(from + d, n - d).store_n(to + d, n - d);
  }
}

// n elements between a contiguous piece and one whose words are word_stride apart. The piece starts at a word.
template <class T>
OPST_INLINE void collect(const T* from, const RowsView& view, int64_t n, T* piece) {
  if (view.step == 1) {
    for (int64_t d = 0; d < n; ++d) piece[d] = from[d * view.word_stride];
  } else {
    for (int64_t d = 0; d < n; d += 2) __builtin_memcpy(piece + d, from + d / 2 * view.word_stride, 2 * sizeof(T));
  }
}
template <class T>
OPST_INLINE void spread(const T* piece, const RowsView& view, int64_t n, T* to) {
  if (view.step == 1) {
    for (int64_t d = 0; d < n; ++d) to[d * view.word_stride] = piece[d];
  } else {
    for (int64_t d = 0; d < n; d += 2) __builtin_memcpy(to + d / 2 * view.word_stride, piece + d, 2 * sizeof(T));
  }
}

template <class From, class To>
void copy_rows(const CopyRows& rows) {
  constexpr int64_t kPiece = 64;
  const RowsView& in = rows.from_view;
  const RowsView& out = rows.to_view;
  const bool contiguous_in = in.word_stride == in.step, contiguous_out = out.word_stride == out.step;
  int64_t num_rows = rows.num_rows, dim = rows.dim;
  if (contiguous_in && contiguous_out && in.row_stride == dim && out.row_stride == dim) {
    dim *= num_rows;
    num_rows = 1;
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    const From* const from = static_cast<const From*>(rows.from) + row * in.row_stride;
    To* const to = static_cast<To*>(rows.to) + row * out.row_stride;
    if (contiguous_in && contiguous_out) {
      copy_contiguous(from, to, dim);
      continue;
    }
    for (int64_t d = 0; d < dim; d += kPiece) {
      const int64_t n = dim - d < kPiece ? dim - d : kPiece;
      From collected[kPiece];
      const From* source = from + d;
      if (!contiguous_in) {
        collect(from + d / in.step * in.word_stride, in, n, collected);
        source = collected;
      }
      if (contiguous_out) {
        copy_contiguous(source, to + d, n);
        continue;
      }
      To* const target = to + d / out.step * out.word_stride;
      if constexpr (Same<From, To>::value) {
        spread(source, out, n, target);
      } else {
        To converted[kPiece];
        copy_contiguous(source, converted, n);
        spread(converted, out, n, target);
      }
    }
  }
}

}  // namespace opst::OPST_ISA_NS::kv_cache

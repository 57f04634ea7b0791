// Products of up to four rows with operands that are read once: bound by the stream of B.
//
// Computes   as gemm_tile.h: C = A B with row maxima, and C = factor C + A B
// Shapes     i < MR <= 4 rows, j < NV vectors, k < depth words
// Loop nest  as gemm_tile.h, with more vectors side by side, so that rows of B are read whole
// Memory     each word of k fetches the lines at the same offsets of `ahead`, the piece of the stream that is read next
//            but one or two: the caller knows its address, while the hardware's prefetchers stop at the end of a page
// Numerics   as gemm_tile.h: the same bits
#pragma once

#include "tile/gemm_tile.h"

namespace opst::OPST_ISA_NS::tile {

inline constexpr int kStreamRows = 4;
#if defined(__AVX512F__)
inline constexpr int kStreamVecs = 4;
#else
inline constexpr int kStreamVecs = 2;
#endif

template <class P, int MR, int NV>
OPST_INLINE void stream_multiply_add(int64_t depth, const typename P::Word* a, int64_t lda, const typename P::WordB* b,
                                     int64_t ldb, const typename P::WordB* ahead, typename P::V (&acc)[MR][NV]) {
  constexpr int kLanes = P::V::kLanes;
  constexpr int kWordsPerLine = 64 / static_cast<int>(sizeof(typename P::WordB));
  for (int64_t k = 0; k < depth; ++k) {
    typename P::OperandB bs[NV];
    OPST_UNROLL for (int j = 0; j < NV; ++j) {
      bs[j] = P::load(b + k * ldb + j * kLanes);
      if (j * kLanes % kWordsPerLine == 0) __builtin_prefetch(ahead + k * ldb + j * kLanes);
    }
    OPST_UNROLL for (int part = 0; part < P::kParts; ++part) {
      OPST_UNROLL for (int i = 0; i < MR; ++i) {
        const typename P::Operand ai = P::broadcast(a + i * lda + k * P::kParts + part);
        OPST_UNROLL for (int j = 0; j < NV; ++j) acc[i][j] = P::multiply_add(ai, bs[j], part, acc[i][j]);
      }
    }
  }
}

// C = A B, and row_max[i] (one vector per row) takes the maximum over C's vectors.
template <class P, int MR, int NV>
OPST_NOINLINE void stream_product_with_max(int64_t depth, const typename P::Word* a, int64_t lda,
                                           const typename P::WordB* b, int64_t ldb, const typename P::WordB* ahead,
                                           typename P::V::Scalar* c, int64_t ldc, typename P::V::Scalar* row_max) {
  typename P::V acc[MR][NV];
  clear_tile<P, MR, NV>(acc);
  stream_multiply_add<P, MR, NV>(depth, a, lda, b, ldb, ahead, acc);
  store_tile_with_max<P, MR, NV>(acc, c, ldc, row_max);
}

// C = factor[i] * C + A B.
template <class P, int MR, int NV>
OPST_NOINLINE void stream_scaled_accumulate(int64_t depth, const typename P::Word* a, int64_t lda,
                                            const typename P::WordB* b, int64_t ldb, const typename P::WordB* ahead,
                                            typename P::V::Scalar* c, int64_t ldc,
                                            const typename P::V::Scalar* factor) {
  typename P::V acc[MR][NV];
  load_scaled_tile<P, MR, NV>(c, ldc, factor, acc);
  stream_multiply_add<P, MR, NV>(depth, a, lda, b, ldb, ahead, acc);
  store_tile<P, MR, NV>(acc, c, ldc);
}

template <class P>
using StreamProductWithMax = void (*)(int64_t, const typename P::Word*, int64_t, const typename P::WordB*, int64_t,
                                      const typename P::WordB*, typename P::V::Scalar*, int64_t,
                                      typename P::V::Scalar*);
template <class P>
using StreamScaledAccumulate = void (*)(int64_t, const typename P::Word*, int64_t, const typename P::WordB*, int64_t,
                                        const typename P::WordB*, typename P::V::Scalar*, int64_t,
                                        const typename P::V::Scalar*);

// The instantiation for `rows` rows, 1 <= rows <= kStreamRows.
template <class P, int NV, int MR = kStreamRows>
OPST_INLINE StreamProductWithMax<P> stream_product_with_max_for(int rows) {
  if constexpr (MR == 1) {
    return stream_product_with_max<P, 1, NV>;
  } else {
    return rows == MR ? stream_product_with_max<P, MR, NV> : stream_product_with_max_for<P, NV, MR - 1>(rows);
  }
}
template <class P, int NV, int MR = kStreamRows>
OPST_INLINE StreamScaledAccumulate<P> stream_scaled_accumulate_for(int rows) {
  if constexpr (MR == 1) {
    return stream_scaled_accumulate<P, 1, NV>;
  } else {
    return rows == MR ? stream_scaled_accumulate<P, MR, NV> : stream_scaled_accumulate_for<P, NV, MR - 1>(rows);
  }
}

}  // namespace opst::OPST_ISA_NS::tile

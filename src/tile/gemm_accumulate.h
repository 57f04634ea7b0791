// Register-tile matrix products that write C, or add to C without a factor; the last also reads A by columns.
//
//   product                  C = A B
//   accumulate               C += A B
//   accumulate_transposed    C += A^T B        A [depth][at least MR] words, rows `lda` apart
//
// Shapes, loop nest, memory and numerics as in gemm_tile.h. The transposed form needs no transposed copy: a register
// tile takes one word of A at a time, whether the next word lies beside it or in the next row. C is the first summand
// of a row's sum, so that splitting the depth over several calls adds in the same order.
#pragma once

#include "tile/gemm_tile.h"

namespace opst::OPST_ISA_NS::tile {

template <class P, int MR, int NV>
OPST_INLINE void load_tile(const typename P::V::Scalar* c, int64_t ldc, typename P::V (&acc)[MR][NV]) {
  using V = typename P::V;
  OPST_UNROLL for (int i = 0; i < MR; ++i) {
    OPST_UNROLL for (int j = 0; j < NV; ++j) acc[i][j] = V::load(c + i * ldc + j * V::kLanes);
  }
}
template <class P, int MR, int NV>
OPST_NOINLINE void product(int64_t depth, const typename P::Word* a, int64_t lda, const typename P::WordB* b,
                           int64_t ldb, typename P::V::Scalar* c, int64_t ldc, const char* prefetch) {
  typename P::V acc[MR][NV];
  clear_tile<P, MR, NV>(acc);
  multiply_add_tile<P, MR, NV>(depth, a, lda, b, ldb, prefetch, acc);
  store_tile<P, MR, NV>(acc, c, ldc);
}

template <class P, int MR, int NV>
OPST_NOINLINE void accumulate(int64_t depth, const typename P::Word* a, int64_t lda, const typename P::WordB* b,
                              int64_t ldb, typename P::V::Scalar* c, int64_t ldc, const char* prefetch) {
  typename P::V acc[MR][NV];
  load_tile<P, MR, NV>(c, ldc, acc);
  multiply_add_tile<P, MR, NV>(depth, a, lda, b, ldb, prefetch, acc);
  store_tile<P, MR, NV>(acc, c, ldc);
}

template <class P, int MR, int NV>
OPST_NOINLINE void accumulate_transposed(int64_t depth, const typename P::Word* a, int64_t lda,
                                         const typename P::WordB* b, int64_t ldb, typename P::V::Scalar* c, int64_t ldc,
                                         const char* prefetch) {
  static_assert(P::kParts == 1, "a word of A per word of B");
  constexpr int kLanes = P::V::kLanes;
  typename P::V acc[MR][NV];
  load_tile<P, MR, NV>(c, ldc, acc);
  const auto step = [&](const typename P::Word* ak, const typename P::WordB* bk) OPST_INLINE_LAMBDA {
    typename P::OperandB bs[NV];
    OPST_UNROLL for (int j = 0; j < NV; ++j) bs[j] = P::load(bk + j * kLanes);
    OPST_UNROLL for (int i = 0; i < MR; ++i) {
      const typename P::Operand ai = P::broadcast(ak + i);
      OPST_UNROLL for (int j = 0; j < NV; ++j) acc[i][j] = P::multiply_add(ai, bs[j], 0, acc[i][j]);
    }
  };
  int64_t k = 0;
  for (; k + 2 <= depth; k += 2) {
    __builtin_prefetch(prefetch);
    prefetch += 64;
    step(a, b);
    step(a + lda, b + ldb);
    a += 2 * lda;
    b += 2 * ldb;
  }
  if (k < depth) step(a, b);
  store_tile<P, MR, NV>(acc, c, ldc);
}

template <class P>
using TileProduct = void (*)(int64_t, const typename P::Word*, int64_t, const typename P::WordB*, int64_t,
                             typename P::V::Scalar*, int64_t, const char*);

// The instantiations for 1 <= rows <= P::kTileRows.
template <class P, int NV, int MR = P::kTileRows>
OPST_INLINE TileProduct<P> product_for(int rows) {
  if constexpr (MR == 1) {
    return product<P, 1, NV>;
  } else {
    return rows == MR ? product<P, MR, NV> : product_for<P, NV, MR - 1>(rows);
  }
}
template <class P, int NV, int MR = P::kTileRows>
OPST_INLINE TileProduct<P> accumulate_for(int rows) {
  if constexpr (MR == 1) {
    return accumulate<P, 1, NV>;
  } else {
    return rows == MR ? accumulate<P, MR, NV> : accumulate_for<P, NV, MR - 1>(rows);
  }
}
template <class P, int NV, int MR = P::kTileRows>
OPST_INLINE TileProduct<P> accumulate_transposed_for(int rows) {
  if constexpr (MR == 1) {
    return accumulate_transposed<P, 1, NV>;
  } else {
    return rows == MR ? accumulate_transposed<P, MR, NV> : accumulate_transposed_for<P, NV, MR - 1>(rows);
  }
}

}  // namespace opst::OPST_ISA_NS::tile

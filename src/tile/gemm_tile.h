// Register-tile matrix products: the micro-kernels under attention and matmul.
//
// Computes   C[i][j] (+)= sum over k of A[i][k] * B[k][j]     for one tile of C that stays in registers
// Shapes     i < MR rows, j < NV vectors of P::V, k < depth words of B
// Loop nest  k outer; per k: NV loads of B, then per row one broadcast of A and NV multiply-adds
// Memory     A: MR rows, `lda` words apart, read one word at a time                              L1
//            B: packed rows of NV vectors, `ldb` words apart (in a panel: ldb = NV * lanes)      L1 or L2, streamed
//            C: MR * NV accumulators                                                             registers
// Numerics   k strictly ascending, so a row's bits do not depend on MR; one multiply-add per word of A
//
// A word is one lane of the product instruction's operand: a float, a double, or a pair of bf16 (k, k + 1). Where B is
// narrower than A (ProductWiden), a word of B goes with kParts words of A.
//
// MR x NV: 12 x 2 on 32 registers (24 accumulators hide the latency of two FMA units; loads per FMA 0.58), 6 x 2 on 16.
// Each instantiation is a function of its own: inlined into a larger loop, g++ keeps that loop's constants in registers
// and spills accumulators.
#pragma once

#include "simd/vec.h"

namespace opst::OPST_ISA_NS::tile {

using simd::F32;

// Rows and vectors of a full tile, by the number of registers. Every product inherits them or
// has its own.
struct RegisterTile {
#if defined(__AVX512F__)
  static constexpr int kTileRows = 12;
#elif defined(__AVX2__)
  static constexpr int kTileRows = 6;
#else
  static constexpr int kTileRows = 4;
#endif
  static constexpr int kTileVecs = 2;
};

// Words of A that hold so many elements.
template <class P>
OPST_INLINE int64_t words(int64_t elements) {
  return (elements + P::kStep - 1) / P::kStep;
}

struct ProductF32 : RegisterTile {
  using V = F32;
  using Word = float;
  using WordB = float;
  static constexpr int kStep = 1;   // elements per word of A
  static constexpr int kParts = 1;  // words of A per word of B
  using Operand = F32;
  using OperandB = F32;
  static OPST_INLINE Operand broadcast(const Word* p) { return F32::set1(*p); }
  static OPST_INLINE OperandB load(const WordB* p) { return F32::load(p); }
  static OPST_INLINE V multiply_add(Operand a, OperandB b, int, V c) { return simd::fma(a, b, c); }
};

// f32 times pairs of bf16, which are widened in registers.
struct ProductWiden : RegisterTile {
  using V = F32;
  using Word = float;
  using WordB = uint32_t;
  static constexpr int kStep = 1;
  static constexpr int kParts = 2;
  using Operand = F32;
  using OperandB = simd::Bf16Words;
  static OPST_INLINE Operand broadcast(const Word* p) { return F32::set1(*p); }
  static OPST_INLINE OperandB load(const WordB* p) { return OperandB::load(p); }
  static OPST_INLINE V multiply_add(Operand a, OperandB b, int part, V c) {
    return simd::fma(a, part == 0 ? b.low() : b.high(), c);
  }
};

#if defined(__AVX512BF16__)
struct ProductBf16Dot : RegisterTile {
  using V = F32;
  using Word = uint32_t;
  using WordB = uint32_t;
  static constexpr int kStep = 2;
  static constexpr int kParts = 1;
  using Operand = simd::Bf16Words;
  using OperandB = simd::Bf16Words;
  static OPST_INLINE Operand broadcast(const Word* p) { return Operand::set1(*p); }
  static OPST_INLINE OperandB load(const WordB* p) { return OperandB::load(p); }
  static OPST_INLINE V multiply_add(Operand a, OperandB b, int, V c) { return simd::dot_pairs(c, a, b); }
};
#endif

#if !defined(__AVX2__)
struct ProductF64 : RegisterTile {
  using V = simd::F64;
  using Word = double;
  using WordB = double;
  static constexpr int kStep = 1;
  static constexpr int kParts = 1;
  using Operand = V;
  using OperandB = V;
  static OPST_INLINE Operand broadcast(const Word* p) { return V::set1(*p); }
  static OPST_INLINE OperandB load(const WordB* p) { return V::load(p); }
  static OPST_INLINE V multiply_add(Operand a, OperandB b, int, V c) { return simd::fma(a, b, c); }
};
#endif

// ---- How a tile of C enters and leaves the registers

template <class P, int MR, int NV>
OPST_INLINE void clear_tile(typename P::V (&acc)[MR][NV]) {
  OPST_UNROLL for (int i = 0; i < MR; ++i) { OPST_UNROLL for (int j = 0; j < NV; ++j) acc[i][j] = P::V::zero(); }
}
template <class P, int MR, int NV>
OPST_INLINE void load_scaled_tile(const typename P::V::Scalar* c, int64_t ldc, const typename P::V::Scalar* factor,
                                  typename P::V (&acc)[MR][NV]) {
  using V = typename P::V;
  OPST_UNROLL for (int i = 0; i < MR; ++i) {
    OPST_UNROLL for (int j = 0; j < NV; ++j) { acc[i][j] = V::load(c + i * ldc + j * V::kLanes) * V::set1(factor[i]); }
  }
}
template <class P, int MR, int NV>
OPST_INLINE void store_tile(const typename P::V (&acc)[MR][NV], typename P::V::Scalar* c, int64_t ldc) {
  using V = typename P::V;
  OPST_UNROLL for (int i = 0; i < MR; ++i) {
    OPST_UNROLL for (int j = 0; j < NV; ++j) acc[i][j].store(c + i * ldc + j * V::kLanes);
  }
}

// store_tile, and row_max[i] (one vector per row) takes the maximum over the row's vectors.
template <class P, int MR, int NV>
OPST_INLINE void store_tile_with_max(const typename P::V (&acc)[MR][NV], typename P::V::Scalar* c, int64_t ldc,
                                     typename P::V::Scalar* row_max) {
  using V = typename P::V;
  OPST_UNROLL for (int i = 0; i < MR; ++i) {
    V top = V::load(row_max + i * V::kLanes);
    OPST_UNROLL for (int j = 0; j < NV; ++j) {
      acc[i][j].store(c + i * ldc + j * V::kLanes);
      top = max(top, acc[i][j]);
    }
    top.store(row_max + i * V::kLanes);
  }
}

// acc += A B. Meanwhile the memory from `prefetch` on is fetched, a cache line of 64 bytes per four words of k.
template <class P, int MR, int NV>
OPST_INLINE void multiply_add_tile(int64_t depth, const typename P::Word* a, int64_t lda, const typename P::WordB* b,
                                   int64_t ldb, const char* prefetch, typename P::V (&acc)[MR][NV]) {
  constexpr int kLanes = P::V::kLanes;
  // Rows by fours: each address is one base plus 0, 1, 2 or 3 times lda, which the hardware adds for free.
  constexpr int kGroups = (MR + 3) / 4;
  const typename P::Word* group[kGroups];
  OPST_UNROLL for (int g = 0; g < kGroups; ++g) group[g] = a + 4 * g * lda;
  const auto step = [&](int64_t k) OPST_INLINE_LAMBDA {
    typename P::OperandB bs[NV];
    OPST_UNROLL for (int j = 0; j < NV; ++j) bs[j] = P::load(b + k * ldb + j * kLanes);
    OPST_UNROLL for (int part = 0; part < P::kParts; ++part) {
      OPST_UNROLL for (int i = 0; i < MR; ++i) {
        const typename P::Operand ai = P::broadcast(group[i / 4] + (i % 4) * lda + k * P::kParts + part);
        OPST_UNROLL for (int j = 0; j < NV; ++j) acc[i][j] = P::multiply_add(ai, bs[j], part, acc[i][j]);
      }
    }
  };
  int64_t k = 0;
  for (; k + 4 <= depth; k += 4) {
    __builtin_prefetch(prefetch);
    prefetch += 64;
    step(k);
    step(k + 1);
    step(k + 2);
    step(k + 3);
  }
  for (; k < depth; ++k) step(k);
}

// C = A B, and row_max[i] (one vector per row) takes the maximum over C's vectors.
template <class P, int MR, int NV>
OPST_NOINLINE void product_with_max(int64_t depth, const typename P::Word* a, int64_t lda, const typename P::WordB* b,
                                    int64_t ldb, typename P::V::Scalar* c, int64_t ldc, typename P::V::Scalar* row_max,
                                    const char* prefetch) {
  typename P::V acc[MR][NV];
  clear_tile<P, MR, NV>(acc);
  multiply_add_tile<P, MR, NV>(depth, a, lda, b, ldb, prefetch, acc);
  store_tile_with_max<P, MR, NV>(acc, c, ldc, row_max);
}

// C = factor[i] * C + A B.
template <class P, int MR, int NV>
OPST_NOINLINE void scaled_accumulate(int64_t depth, const typename P::Word* a, int64_t lda, const typename P::WordB* b,
                                     int64_t ldb, typename P::V::Scalar* c, int64_t ldc,
                                     const typename P::V::Scalar* factor, const char* prefetch) {
  typename P::V acc[MR][NV];
  load_scaled_tile<P, MR, NV>(c, ldc, factor, acc);
  multiply_add_tile<P, MR, NV>(depth, a, lda, b, ldb, prefetch, acc);
  store_tile<P, MR, NV>(acc, c, ldc);
}

// C = factor[i] * (A B).
template <class P, int MR, int NV>
OPST_NOINLINE void scaled_product(int64_t depth, const typename P::Word* a, int64_t lda, const typename P::WordB* b,
                                  int64_t ldb, typename P::V::Scalar* c, int64_t ldc,
                                  const typename P::V::Scalar* factor, const char* prefetch) {
  using V = typename P::V;
  V acc[MR][NV];
  clear_tile<P, MR, NV>(acc);
  multiply_add_tile<P, MR, NV>(depth, a, lda, b, ldb, prefetch, acc);
  OPST_UNROLL for (int i = 0; i < MR; ++i) {
    OPST_UNROLL for (int j = 0; j < NV; ++j) acc[i][j] = acc[i][j] * V::set1(factor[i]);
  }
  store_tile<P, MR, NV>(acc, c, ldc);
}

template <class P>
using ProductWithMax = void (*)(int64_t, const typename P::Word*, int64_t, const typename P::WordB*, int64_t,
                                typename P::V::Scalar*, int64_t, typename P::V::Scalar*, const char*);
template <class P>
using ScaledAccumulate = void (*)(int64_t, const typename P::Word*, int64_t, const typename P::WordB*, int64_t,
                                  typename P::V::Scalar*, int64_t, const typename P::V::Scalar*, const char*);

// The instantiation for `rows` rows, 1 <= rows <= P::kTileRows.
template <class P, int NV, int MR = P::kTileRows>
OPST_INLINE ProductWithMax<P> product_with_max_for(int rows) {
  if constexpr (MR == 1) {
    return product_with_max<P, 1, NV>;
  } else {
    return rows == MR ? product_with_max<P, MR, NV> : product_with_max_for<P, NV, MR - 1>(rows);
  }
}
template <class P, int NV, int MR = P::kTileRows>
OPST_INLINE ScaledAccumulate<P> scaled_accumulate_for(int rows) {
  if constexpr (MR == 1) {
    return scaled_accumulate<P, 1, NV>;
  } else {
    return rows == MR ? scaled_accumulate<P, MR, NV> : scaled_accumulate_for<P, NV, MR - 1>(rows);
  }
}
template <class P, int NV, int MR = P::kTileRows>
OPST_INLINE ScaledAccumulate<P> scaled_product_for(int rows) {
  if constexpr (MR == 1) {
    return scaled_product<P, 1, NV>;
  } else {
    return rows == MR ? scaled_product<P, MR, NV> : scaled_product_for<P, NV, MR - 1>(rows);
  }
}

}  // namespace opst::OPST_ISA_NS::tile

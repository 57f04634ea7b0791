// Register-tile matrix products: the micro-kernels under attention and matmul.
//
// Computes   sum over k of A[i][k] * B[k][j], a tile that stays in registers until it is written:
//              product                  C = A B
//              product_with_max         C = A B, and row_max[i] (one vector per row) takes the maximum over C's vectors
//              scaled_product           C = factor[i] * (A B)
//              scaled_accumulate        C = factor[i] * C + A B
//              accumulate               C += A B
//              accumulate_transposed    C += A^T B, A [depth][at least MR] words, rows `lda` apart
// Shapes     i < MR rows, j < NV vectors of P::V, k < depth words of B
// Loop nest  k outer; per k: NV loads of B, then per row one broadcast of A and NV multiply-adds
// Memory     A: MR rows, `lda` words apart, read one word at a time                              L1
//            B: packed rows of NV vectors, `ldb` words apart (in a panel: ldb = NV * lanes)      L1 or L2, streamed
//            C: MR * NV accumulators                                                             registers
//            Meanwhile memory is fetched: a line per four words of k (which may lie in rows of their own), or (stream_*, up to kStreamRows, bound by the
//            stream of B) the lines at the same offsets of `ahead`, the piece of the stream that is read next but one
//            or two, into L2: the caller knows its address, while the hardware's prefetchers stop at the end of a page
// Numerics   k strictly ascending, so a row's bits do not depend on MR; one multiply-add per word of A. C is the first
//            summand, so that splitting the depth over several calls adds in the same order
//
// A word is one lane of the product instruction's operand: a float, a double, or a pair of bf16 (k, k + 1). Where B is
// narrower than A (ProductWiden, ProductOfStored), a word of B goes with kParts words of A.
//
// MR x NV: 12 x 2 on 32 registers (24 accumulators hide the latency of two FMA units; loads per FMA 0.58), 6 x 2 on 16.
// Each instantiation is a function of its own: inlined into a larger loop, g++ keeps that loop's constants in registers
// and spills accumulators.
#pragma once

#include <type_traits>

#include "simd/float8.h"
#include "simd/vec.h"

namespace opst::OPST_ISA_NS::tile {

using simd::F32;

// Rows and vectors of a full tile, by the number of registers. Every product inherits them.
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

struct RowTile {
  int64_t first;
  int rows;
};

// Rows dealt out to register tiles of nearly equal height: 64 rows by at most 12 are 6 tiles of 11, 11, 11, 11, 10 and
// 10, not 5 of 12 and one of 4.
class RowTiles {
 public:
  // `most`: rows of a full tile. Heights are multiples of `unit`, but for the last tile, which ends with the rows.
  OPST_INLINE RowTiles(int64_t rows, int64_t most, int64_t unit = 1) : rows_(rows), unit_(unit) {
    const int64_t units = (rows + unit - 1) / unit, most_units = most / unit;
    count_ = (units + most_units - 1) / most_units;
    height_ = count_ > 0 ? units / count_ : 0;
    num_taller_ = units - height_ * count_;
  }

  OPST_INLINE int64_t count() const { return count_; }
  // Where unit is 1: rows of the first tiles, for which is_tall(), and of the others.
  OPST_INLINE int tallest() const { return static_cast<int>((height_ + (num_taller_ > 0 ? 1 : 0)) * unit_); }
  OPST_INLINE int lowest() const { return static_cast<int>(height_ * unit_); }
  OPST_INLINE bool is_tall(int64_t index) const { return index < num_taller_; }

  OPST_INLINE RowTile operator[](int64_t index) const {
    const int64_t first = (index * height_ + (index < num_taller_ ? index : num_taller_)) * unit_;
    const int64_t rows = (height_ + (index < num_taller_ ? 1 : 0)) * unit_, left = rows_ - first;
    return {first, static_cast<int>(rows < left ? rows : left)};
  }

 private:
  int64_t rows_, unit_;
  int64_t count_, height_, num_taller_;
};

// Words of A that hold so many elements.
template <class P>
OPST_INLINE int64_t words(int64_t elements) {
  return (elements + P::kStep - 1) / P::kStep;
}

// Elements of row `key` among the first n words of a vector, each of kStep rows.
template <class V, int64_t kStep, class Word>
OPST_INLINE V element_of_words(const Word* words, int64_t n, int64_t key) {
  if constexpr (kStep == 1) {
    return simd::load_stored_n<V>(words, n);
  } else {
    const simd::Bf16Words pairs = simd::Bf16Words::load_n(words, n);
    return key % 2 == 0 ? pairs.low() : pairs.high();
  }
}

// Of one element a word.
template <class Vec>
struct ProductOf : RegisterTile {
  using V = Vec;
  using Word = typename V::Scalar;
  using WordB = Word;
  static constexpr int kStep = 1;   // elements per word of A
  static constexpr int kParts = 1;  // words of A per word of B
  using Operand = V;
  using OperandB = V;
  static OPST_INLINE Operand broadcast(const Word* p) { return Operand::set1(*p); }
  static OPST_INLINE V multiply_add(Operand a, OperandB b, int, V c) { return simd::fma(a, b, c); }
};
struct ProductF32 : ProductOf<F32> {};
#if !defined(__AVX2__)
struct ProductF64 : ProductOf<simd::F64> {};
#endif

// f32 times pairs of bf16, which are widened in registers.
struct ProductWiden : ProductF32 {
  using WordB = uint32_t;
  static constexpr int kParts = 2;
  using OperandB = simd::Bf16Words;
  static OPST_INLINE V multiply_add(Operand a, OperandB b, int part, V c) {
    return simd::fma(a, part == 0 ? b.low() : b.high(), c);
  }
};

// f32 times numbers of another type (f16, int8_t, f8_e4m3, f8_e5m2), which are widened in registers.
template <class T>
struct ProductOfStored : ProductF32 {
  using WordB = T;
  struct OperandB {
    V v;
    static OPST_INLINE OperandB load(const T* p) { return {simd::load_stored<V>(p)}; }
  };
  static OPST_INLINE V multiply_add(Operand a, OperandB b, int, V c) { return simd::fma(a, b.v, c); }
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
  static OPST_INLINE V multiply_add(Operand a, OperandB b, int, V c) { return simd::dot_pairs(c, a, b); }
};
#endif

// ---- The sums of a tile

template <class P, int MR, int NV>
OPST_INLINE void clear_tile(typename P::V (&acc)[MR][NV]) {
  OPST_UNROLL for (int i = 0; i < MR; ++i) { OPST_UNROLL for (int j = 0; j < NV; ++j) acc[i][j] = P::V::zero(); }
}
template <class P, int MR, int NV>
OPST_INLINE void load_tile(const typename P::V::Scalar* c, int64_t ldc, typename P::V (&acc)[MR][NV]) {
  using V = typename P::V;
  OPST_UNROLL for (int i = 0; i < MR; ++i) {
    OPST_UNROLL for (int j = 0; j < NV; ++j) acc[i][j] = V::load(c + i * ldc + j * V::kLanes);
  }
}
template <class P, int MR, int NV>
OPST_INLINE void store_tile(const typename P::V (&acc)[MR][NV], typename P::V::Scalar* c, int64_t ldc) {
  using V = typename P::V;
  OPST_UNROLL for (int i = 0; i < MR; ++i) {
    OPST_UNROLL for (int j = 0; j < NV; ++j) acc[i][j].store(c + i * ldc + j * V::kLanes);
  }
}

// Two lines, `apart` bytes from each other, of each of many rows, `stride` bytes apart.
struct LinesOfRows {
  const char* line;
  int64_t stride, apart;
};
OPST_INLINE void fetch_next(const char*& memory) {
  __builtin_prefetch(memory);
  memory += 64;
}
OPST_INLINE void fetch_next(LinesOfRows& lines) {
  __builtin_prefetch(lines.line);
  __builtin_prefetch(lines.line + lines.apart);
  lines.line += lines.stride;
}
template <class Fetched>
inline constexpr bool kIsFetched = std::is_same_v<Fetched, const char*> || std::is_same_v<Fetched, LinesOfRows>;

// acc += A B. Meanwhile the memory from `prefetch` on, or one line after the other, is fetched: a line of 64 bytes (two,
// of rows) per four words of k.
template <class P, int MR, int NV, class Fetched>
requires kIsFetched<Fetched> OPST_INLINE void multiply_add_tile(int64_t depth, const typename P::Word* a, int64_t lda,
                                                                const typename P::WordB* b, int64_t ldb,
                                                                Fetched prefetch, typename P::V (&acc)[MR][NV]) {
  constexpr int kLanes = P::V::kLanes;
  // Rows by fours: each address is one base plus 0, 1, 2 or 3 times lda, which the hardware adds for free.
  constexpr int kGroups = (MR + 3) / 4;
  const typename P::Word* group[kGroups];
  OPST_UNROLL for (int g = 0; g < kGroups; ++g) group[g] = a + 4 * g * lda;
  const auto step = [&](int64_t k) OPST_INLINE_LAMBDA {
    typename P::OperandB bs[NV];
    OPST_UNROLL for (int j = 0; j < NV; ++j) bs[j] = P::OperandB::load(b + k * ldb + j * kLanes);
    OPST_UNROLL for (int part = 0; part < P::kParts; ++part) {
      OPST_UNROLL for (int i = 0; i < MR; ++i) {
        const typename P::Operand ai = P::broadcast(group[i / 4] + (i % 4) * lda + k * P::kParts + part);
        OPST_UNROLL for (int j = 0; j < NV; ++j) acc[i][j] = P::multiply_add(ai, bs[j], part, acc[i][j]);
      }
    }
  };
  int64_t k = 0;
  for (; k + 4 <= depth; k += 4) {
    fetch_next(prefetch);
    step(k);
    step(k + 1);
    step(k + 2);
    step(k + 3);
  }
  for (; k < depth; ++k) step(k);
}

// The same sums of a stream: each word of k fetches the lines at the same offsets of `ahead`.
template <class P, int MR, int NV>
OPST_INLINE void multiply_add_tile(int64_t depth, const typename P::Word* a, int64_t lda, const typename P::WordB* b,
                                   int64_t ldb, const typename P::WordB* ahead, typename P::V (&acc)[MR][NV]) {
  constexpr int kLanes = P::V::kLanes;
  constexpr int kWordsPerLine = 64 / static_cast<int>(sizeof(typename P::WordB));
  for (int64_t k = 0; k < depth; ++k) {
    typename P::OperandB bs[NV];
    OPST_UNROLL for (int j = 0; j < NV; ++j) {
      bs[j] = P::OperandB::load(b + k * ldb + j * kLanes);
      if (j * kLanes % kWordsPerLine == 0) simd::fetch_into_l2(ahead + k * ldb + j * kLanes);
    }
    OPST_UNROLL for (int part = 0; part < P::kParts; ++part) {
      OPST_UNROLL for (int i = 0; i < MR; ++i) {
        const typename P::Operand ai = P::broadcast(a + i * lda + k * P::kParts + part);
        OPST_UNROLL for (int j = 0; j < NV; ++j) acc[i][j] = P::multiply_add(ai, bs[j], part, acc[i][j]);
      }
    }
  }
}

// ---- Functions of one instantiation each. Ahead: const char* or LinesOfRows (prefetch), or const WordB* (a stream)

template <class P, int MR, int NV, class Ahead>
OPST_NOINLINE void product_with_max(int64_t depth, const typename P::Word* a, int64_t lda, const typename P::WordB* b,
                                    int64_t ldb, typename P::V::Scalar* c, int64_t ldc, typename P::V::Scalar* row_max,
                                    Ahead ahead) {
  using V = typename P::V;
  V acc[MR][NV];
  clear_tile<P, MR, NV>(acc);
  multiply_add_tile<P, MR, NV>(depth, a, lda, b, ldb, ahead, acc);
  OPST_UNROLL for (int i = 0; i < MR; ++i) {
    V top = V::load(row_max + i * V::kLanes);
    OPST_UNROLL for (int j = 0; j < NV; ++j) {
      acc[i][j].store(c + i * ldc + j * V::kLanes);
      top = max(top, acc[i][j]);
    }
    top.store(row_max + i * V::kLanes);
  }
}

template <class P, int MR, int NV, class Ahead>
OPST_NOINLINE void scaled_accumulate(int64_t depth, const typename P::Word* a, int64_t lda, const typename P::WordB* b,
                                     int64_t ldb, typename P::V::Scalar* c, int64_t ldc,
                                     const typename P::V::Scalar* factor, Ahead ahead) {
  using V = typename P::V;
  V acc[MR][NV];
  OPST_UNROLL for (int i = 0; i < MR; ++i) {
    OPST_UNROLL for (int j = 0; j < NV; ++j) acc[i][j] = V::load(c + i * ldc + j * V::kLanes) * V::set1(factor[i]);
  }
  multiply_add_tile<P, MR, NV>(depth, a, lda, b, ldb, ahead, acc);
  store_tile<P, MR, NV>(acc, c, ldc);
}
template <class P, class Ahead = const char*>
using ScaledAccumulate = decltype(&scaled_accumulate<P, 1, 1, Ahead>);

template <class P, int MR, int NV, class Ahead>
OPST_NOINLINE void scaled_product(int64_t depth, const typename P::Word* a, int64_t lda, const typename P::WordB* b,
                                  int64_t ldb, typename P::V::Scalar* c, int64_t ldc,
                                  const typename P::V::Scalar* factor, Ahead prefetch) {
  typename P::V acc[MR][NV];
  clear_tile<P, MR, NV>(acc);
  multiply_add_tile<P, MR, NV>(depth, a, lda, b, ldb, prefetch, acc);
  OPST_UNROLL for (int i = 0; i < MR; ++i) {
    OPST_UNROLL for (int j = 0; j < NV; ++j) acc[i][j] = acc[i][j] * P::V::set1(factor[i]);
  }
  store_tile<P, MR, NV>(acc, c, ldc);
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

// A register tile takes one word of A at a time, whether the next word lies beside it or in the next row: nothing is
// transposed.
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
    OPST_UNROLL for (int j = 0; j < NV; ++j) bs[j] = P::OperandB::load(bk + j * kLanes);
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

// visit(n) for n = rows as a constant, 1 <= rows <= kMost.
template <int kMost, class Visit>
OPST_INLINE auto with_rows(int rows, const Visit& visit) {
  if constexpr (kMost > 1) {
    if (rows != kMost) return with_rows<kMost - 1>(rows, visit);
  }
  return visit(std::integral_constant<int, kMost>());
}

// The instantiations for `rows` rows: 1 <= rows <= P::kTileRows, or kStreamRows.
template <class P, int NV>
OPST_INLINE auto product_for(int rows) {
  return with_rows<P::kTileRows>(rows, [](auto n) OPST_INLINE_LAMBDA { return product<P, n, NV>; });
}
template <class P, int NV>
OPST_INLINE auto product_with_max_for(int rows) {
  return with_rows<P::kTileRows>(rows,
                                 [](auto n) OPST_INLINE_LAMBDA { return product_with_max<P, n, NV, const char*>; });
}
template <class P, int NV, class Ahead = const char*>
OPST_INLINE auto scaled_product_for(int rows) {
  return with_rows<P::kTileRows>(rows, [](auto n) OPST_INLINE_LAMBDA { return scaled_product<P, n, NV, Ahead>; });
}
template <class P, int NV, class Ahead = const char*>
OPST_INLINE auto scaled_accumulate_for(int rows) {
  return with_rows<P::kTileRows>(rows, [](auto n) OPST_INLINE_LAMBDA { return scaled_accumulate<P, n, NV, Ahead>; });
}
template <class P, int NV>
OPST_INLINE auto accumulate_for(int rows) {
  return with_rows<P::kTileRows>(rows, [](auto n) OPST_INLINE_LAMBDA { return accumulate<P, n, NV>; });
}
template <class P, int NV>
OPST_INLINE auto accumulate_transposed_for(int rows) {
  return with_rows<P::kTileRows>(rows, [](auto n) OPST_INLINE_LAMBDA { return accumulate_transposed<P, n, NV>; });
}

// Vectors side by side, so that rows of B are read whole: kStreamVecs of few rows of A, kTileVecs of more.
inline constexpr int kFewStreamRows = 4;
#if defined(__AVX512F__)
inline constexpr int kStreamRows = 8, kStreamVecs = 4;
#else
inline constexpr int kStreamRows = kFewStreamRows, kStreamVecs = 2;
#endif
template <class P, int NV>
OPST_INLINE auto stream_product_with_max_for(int rows) {
  using Ahead = const typename P::WordB*;
  return with_rows<kStreamRows>(rows, [](auto n) OPST_INLINE_LAMBDA { return product_with_max<P, n, NV, Ahead>; });
}
template <class P, int NV>
OPST_INLINE auto stream_scaled_accumulate_for(int rows) {
  using Ahead = const typename P::WordB*;
  constexpr int kMost = NV > P::kTileVecs ? kFewStreamRows : kStreamRows;
  return with_rows<kMost>(rows, [](auto n) OPST_INLINE_LAMBDA { return scaled_accumulate<P, n, NV, Ahead>; });
}

}  // namespace opst::OPST_ISA_NS::tile

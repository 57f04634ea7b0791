// Packing: strided rows into the layouts that the micro-kernels read.
//
//   row panels      [rows][depth words]                     the A operand, row-major
//   column panels   [panel][depth words][W]                 the B operand of Q K^T: W = 2 vectors of keys per panel,
//                                                           the last panel W / 2 wide where that holds the rest
//   value panels    [panel of W columns][key words][W]      the B operand of P V, likewise
//
// A word is a float, a double, or a pair of bf16: in column panels two consecutive elements of a key's row, in
// value panels two consecutive keys' elements of one column. Places of a panel beyond the data (keys up to a whole
// vector, the second half of an odd pair, columns up to a whole vector) are zero.
//
// Sources are arrays of row pointers plus a stride between the elements of a row, so any tensor view and any page table
// is absorbed here.
#pragma once

#include "tile/gemm_tile.h"

namespace opst::OPST_ISA_NS::tile {

// Rows of T at rows[i], elements dim_stride apart.
template <class T>
struct Rows {
  const void* const* rows;
  int64_t dim_stride;

  OPST_INLINE const T* row(int64_t i) const { return static_cast<const T*>(rows[i]); }
};

// kLanes elements of a row from `begin` on, zero from element `length` on, widened.
template <class V, class T>
OPST_INLINE V load_row(const T* row, int64_t dim_stride, int64_t begin, int64_t length) {
  const int64_t n = length - begin < V::kLanes ? length - begin : V::kLanes;
  if (dim_stride == 1) return n == V::kLanes ? V::load(row + begin) : V::load_n(row + begin, n);
  T gathered[V::kLanes];
  for (int64_t i = 0; i < n; ++i) gathered[i] = row[(begin + i) * dim_stride];
  return V::load_n(gathered, n);
}

// kLanes words of kLanes rows from element `begin` on, transposed. Pairs travel as raw 32-bit lanes.
template <class P, class T>
OPST_INLINE void load_words_transposed(const void* const* rows, int64_t begin, typename P::V (&block)[P::V::kLanes]) {
  using V = typename P::V;
  if constexpr (P::kStep > 1 || sizeof(T) == sizeof(typename V::Scalar)) {
    simd::load_transposed(rows, begin / P::kStep, block);
  } else {
    OPST_UNROLL for (int i = 0; i < V::kLanes; ++i) block[i] = V::load(static_cast<const T*>(rows[i]) + begin);
    simd::transpose(block);
  }
}
// kLanes words of a row from word `begin` on, zero beyond `length` elements.
template <class P, class T>
OPST_NOINLINE typename P::V load_part(const T* row, int64_t dim_stride, int64_t begin, int64_t length) {
  if constexpr (P::kStep == 1) {
    return load_row<typename P::V>(row, dim_stride, begin, length);
  } else {
    bf16 elements[2 * P::V::kLanes] = {};
    const int64_t left = length - 2 * begin;
    for (int64_t i = 0; i < left && i < 2 * P::V::kLanes; ++i) elements[i] = row[(2 * begin + i) * dim_stride];
    return P::V::load(reinterpret_cast<const float*>(elements));
  }
}

// count rows of `length` elements -> column panels. `out` has room for whole vectors of keys.
template <class P, class T>
OPST_NOINLINE void pack_columns(const Rows<T>& in, int64_t count, int64_t length, typename P::Word* out) {
  using V = typename P::V;
  constexpr int kLanes = V::kLanes, kPanel = P::kTileVecs * kLanes;
  const int64_t depth = words<P>(length);
  for (int64_t first = 0; first < count; first += kPanel) {
    const int64_t left = count - first;
    const int64_t width = left > kLanes ? kPanel : kLanes;
    for (int64_t half = 0; half < width; half += kLanes) {
      const int64_t present = left - half;
      for (int64_t d = 0; d < depth; d += kLanes) {
        V block[kLanes];
        // Fetches the same columns of the next kLanes rows: more short rows than the hardware's prefetchers follow.
        const int64_t ahead = first + half + kLanes;
        for (int64_t i = ahead; i < ahead + kLanes && i < count; ++i) {
          __builtin_prefetch(in.row(i) + d * P::kStep * in.dim_stride);
        }
        if (present >= kLanes && in.dim_stride == 1 && P::kStep * (d + kLanes) <= length) {
          load_words_transposed<P, T>(in.rows + first + half, P::kStep * d, block);
        } else {
          typename V::Scalar part[kLanes][kLanes];  // not `block`, which stays in registers
          for (int i = 0; i < kLanes; ++i) {
            if (i < present)
              load_part<P>(in.row(first + half + i), in.dim_stride, d, length).store(part[i]);
            else
              V::zero().store(part[i]);
          }
          OPST_UNROLL for (int i = 0; i < kLanes; ++i) block[i] = V::load(part[i]);
          simd::transpose(block);
        }
        typename P::Word* target = out + d * width + half;
        const int64_t n = depth - d < kLanes ? depth - d : kLanes;
        if (n == kLanes) {
          OPST_UNROLL for (int i = 0; i < kLanes; ++i) {
            block[i].store(reinterpret_cast<typename V::Scalar*>(target + i * width));
          }
        } else {
          typename V::Scalar spilled[kLanes][kLanes];
          for (int i = 0; i < kLanes; ++i) block[i].store(spilled[i]);
          for (int64_t i = 0; i < n; ++i) {
            V::load(spilled[i]).store(reinterpret_cast<typename V::Scalar*>(target + i * width));
          }
        }
      }
    }
    out += depth * width;
  }
}

// Whether the elements of count rows, `length` next to each other in each, are finite.
template <class V, class T>
OPST_NOINLINE bool rows_finite(const void* const* rows, int64_t count, int64_t length) {
  constexpr int kChains = 4;
  V not_finite[kChains] = {V::zero(), V::zero(), V::zero(), V::zero()};  // 0 * x: NaN where x is not finite
  for (int64_t i = 0; i < count; ++i) {
    const T* row = static_cast<const T*>(rows[i]);
    int64_t d = 0;
    for (; d + kChains * V::kLanes <= length; d += kChains * V::kLanes) {
      OPST_UNROLL for (int c = 0; c < kChains; ++c) {
        not_finite[c] = simd::fma(V::load(row + d + c * V::kLanes), V::zero(), not_finite[c]);
      }
    }
    for (; d < length; d += V::kLanes) {
      not_finite[0] = simd::fma(load_row<V>(row, 1, d, length), V::zero(), not_finite[0]);
    }
  }
  return simd::hsum((not_finite[0] + not_finite[1]) + (not_finite[2] + not_finite[3])) == 0;
}

// count rows (keys) of `length` elements (columns) -> value panels. Returns whether every element is finite.
template <class P, class T>
OPST_NOINLINE bool pack_values(const Rows<T>& in, int64_t count, int64_t length, typename P::Word* out) {
  using V = typename P::V;
  constexpr int kLanes = V::kLanes, kPanel = P::kTileVecs * kLanes;
  const int64_t num_words = words<P>(count);
  const V zero = V::zero();
  V not_finite = zero;  // 0 * x: NaN where x is not finite
  for (int64_t w = 0; w < num_words; ++w) {
    for (int64_t column = 0; column < length; column += kPanel) {
      const int64_t left = length - column;
      constexpr int64_t kRowsAhead = 8;
      for (int64_t i = 0; i < P::kStep; ++i) {
        const int64_t row = P::kStep * (w + kRowsAhead) + i;
        if (row >= count) break;
        for (int64_t d = 0; d < kPanel; d += 64 / static_cast<int64_t>(sizeof(T))) {
          __builtin_prefetch(in.row(row) + (column + d) * in.dim_stride);
        }
      }
      const int64_t width = left > kLanes ? kPanel : kLanes;
      typename P::Word* target = out + column * num_words + w * width;
      if constexpr (P::kStep == 1) {
        for (int64_t half = 0; half < width; half += kLanes) {
          const V x = load_row<V>(in.row(w), in.dim_stride, column + half, length);
          not_finite = simd::fma(x, zero, not_finite);
          x.store(target + half);
        }
      } else {
#if defined(__AVX512BF16__)
        const bool has_odd = 2 * w + 1 < count;
        const bf16* even = in.row(2 * w) + column * in.dim_stride;
        const bf16* odd = has_odd ? in.row(2 * w + 1) + column * in.dim_stride : even;
        const int64_t n = left < kPanel ? left : kPanel;
        bf16 gathered[2][kPanel];
        if (in.dim_stride != 1) {
          for (int64_t i = 0; i < n; ++i) {
            gathered[0][i] = even[i * in.dim_stride];
            gathered[1][i] = odd[i * in.dim_stride];
          }
          even = gathered[0];
          odd = gathered[1];
        }
        simd::interleave_words(even, odd, n, has_odd, target);
        for (int64_t half = 0; half < n; half += kLanes) {
          const int64_t m = n - half < kLanes ? n - half : kLanes;
          not_finite = simd::fma(V::load_n(even + half, m), zero, not_finite);
          if (has_odd) not_finite = simd::fma(V::load_n(odd + half, m), zero, not_finite);
        }
#endif
      }
    }
  }
  return simd::hsum(not_finite) == 0;
}

}  // namespace opst::OPST_ISA_NS::tile

// OnlineSoftmax: between the two products of attention, the rows of a register tile at a time.
//
// Computes   hide           scores of keys that a row does not see, and padding, -> -inf; their maxima
//            shape          the same by rules, which also turn raw scores into S (score_ops.h)
//            raise_maxima   m' = max(m, rowmax(S));  alpha = exp2(c (m - m'))
//            exponentiate   P = exp2(c (S - m')), in place;  sum = alpha sum + rowsum(P)
//            drop           weights that dropout does not keep -> 0
// Shapes     scores [rows][stride], columns of a tile; row_max [rows][lanes]; m and sum in RowState
// Memory     scores stay in L1; P takes their place, as words of the product
// Numerics   The exponents of a row are c (s - max), subtracted first. (One multiply-add, c s - (c max as rounded),
//            would be an instruction less per vector of scores, which no bench shows, but is not 0 at the maximum.) A
//            row that has seen no key has m = -inf, and contributes exp2(-inf) = 0. P is rounded to bf16 for the
//            pairwise product, the sums are not.
#pragma once

#include <type_traits>

#include "attention/kernels.h"
#include "attention/key_span.h"
#include "attention/score_ops.h"
#include "simd/math.h"
#include "tile/gemm_tile.h"

namespace opst::OPST_ISA_NS::attention {

// What of a tile's scores is computed for a register tile of rows.
template <class S>
struct Scores {
  RowTile rt;
  KeySpan span;
  S* data;  // [rt.rows][stride], from column span.begin on
  int64_t stride;

  OPST_INLINE S* row(int64_t i) const { return data + i * stride; }
};

OPST_INLINE TileKeys keys_of(const QueryBlock& q, const KvTile& tile) {
  const int64_t prefix = q.rules == nullptr ? 0 : q.rules->prefix;
  const bool own = tile.visible_begin != nullptr;
  const int64_t* begin = own ? tile.visible_begin : q.visible_begin;
  const int64_t* end = own ? tile.visible_end : q.visible_end;
  return {begin, end, prefix, tile.first_key, tile.count, tile.partial, !own && prefix == 0};
}

template <class P>
struct OnlineSoftmax {
  using V = typename P::V;
  using S = typename V::Scalar;
  using Ops = ScoreOps<V>;
  static constexpr int kLanes = V::kLanes, kPanel = P::kTileVecs * kLanes;
  static constexpr int kTileRows = P::kTileRows;

  // multiply(j, wide, maxima) for each panel: columns j, j + 1, ... of the scores, two vectors wide or one, and where
  // their maxima go. Those of whole panels are taken while they are in registers: a pass of its own over scores that
  // fill L1 costs 1.5 cycles per 16 scores.
  template <class Multiply>
  static OPST_INLINE void for_panels(const Scores<S>& s, S* row_max, const Multiply& multiply) {
    alignas(64) S unused[kTileRows * kLanes];
    for (int i = 0; i < s.rt.rows; ++i) V::set1(-__builtin_inff()).store(row_max + i * kLanes);
    for (int i = 0; s.span.ragged() && i < s.rt.rows; ++i) V::zero().store(unused + i * kLanes);
    for (int64_t j = 0; j < s.span.width; j += kPanel) {
      const bool wide = s.span.width - j > kLanes;
      multiply(j, wide, s.span.whole(j, j + (wide ? kPanel : kLanes)) ? row_max : unused);
    }
  }

  // row_max[r] = the maximum of row r's first `width` scores, or of those from `begin` on, in each lane.
  static OPST_INLINE void take_maxima(const Scores<S>& s, int64_t width, S* row_max, int64_t begin = 0) {
    for (int i = 0; i < s.rt.rows; ++i) {
      V top = V::set1(-__builtin_inff());
      for (int64_t j = begin; j < width; j += kLanes) top = simd::max(top, V::load(s.row(i) + j));
      top.store(row_max + i * kLanes);
    }
  }

  // The number (score or weight) of each key times the key's factor, of which a tile has `count`; padding times 0.
  static OPST_NOINLINE void scale_columns(const Scores<S>& s, const float* factors, int64_t count) {
    for (int64_t j = 0; j < s.span.width; j += kLanes) {
      const int64_t key = s.span.begin + j;
      const V factor = V::load_n(factors + key, simd::clamp_lanes<V>(count - key));
      for (int i = 0; i < s.rt.rows; ++i) (V::load(s.row(i) + j) * factor).store(s.row(i) + j);
    }
  }

  // Scores of keys that a row does not see, and of padding, become -inf; the others join row_max.
  static OPST_NOINLINE void hide(const QueryBlock& q, const KvTile& tile, const Scores<S>& scores, S* row_max) {
    const V hidden = V::set1(-__builtin_inff());
    const KeySpan span = scores.span;
    for (int i = 0; i < scores.rt.rows; ++i) {
      const RowKeys seen = interval(q, tile, scores, i);
      S* row = scores.row(i);
      V top = V::load(row_max + i * kLanes);
      const auto mask = [&](int64_t from, int64_t to) OPST_INLINE_LAMBDA {
        for (int64_t j = from; j < to; j += kLanes) {
          V s = simd::blend_n(simd::clamp_lanes<V>(seen.end - j), V::load(row + j), hidden);
          s = simd::blend_n(simd::clamp_lanes<V>(seen.begin - j), hidden, s);
          s.store(row + j);
          top = simd::max(top, s);
        }
      };
      mask(0, span.whole_begin);
      mask(span.whole_end, span.width);
      top.store(row_max + i * kLanes);
    }
  }
  // Scores [begin, end) of row i that are of keys in the row's interval.
  static OPST_INLINE RowKeys interval(const QueryBlock& q, const KvTile& tile, const Scores<S>& s, int64_t i) {
    const auto [begin, end] = keys_of(q, tile).of_row(s.rt.first + i);
    return {begin - s.span.begin, end - s.span.begin};
  }

  // As the product and hide, where there are rules: raw scores become S.
  static OPST_NOINLINE void shape(const QueryBlock& q, const KvTile& tile, const Scores<S>& s, S* row_max) {
    const int64_t origin = tile.first_key + s.span.begin, count = s.span.end - s.span.begin;
    for (int i = 0; i < s.rt.rows; ++i) {
      const RowRules& row = q.rules->rows[s.rt.first + i];
      Ops::shape(*q.rules, row, origin, count, s.span.width, s.row(i), nullptr);
      const RowKeys seen = interval(q, tile, s, i);
      Ops::hide(*q.rules, row, origin, count, s.span.width, seen.begin, seen.end, s.row(i)).store(row_max + i * kLanes);
    }
  }
  // Weights that dropout does not keep become 0; sums have been taken.
  static OPST_NOINLINE void drop(const QueryBlock& q, const KvTile& tile, const Scores<S>& s) {
    using Weight = std::conditional_t<P::kStep == 1, S, bf16>;
    KeepBits bits;
    for (int i = 0; i < s.rt.rows; ++i) {
      const RowRules& row = q.rules->rows[s.rt.first + i];
      Ops::keep(*q.rules, row, tile.first_key + s.span.begin, s.span.end - s.span.begin, bits);
      Ops::drop(bits, s.span.width, reinterpret_cast<Weight*>(s.row(i)));
    }
  }

  struct Exponents {
    S alpha[kTileRows];  // factor for what was summed against the old maximum
    S max[kTileRows];    // 0 where a row has seen no key
  };

  // Lane j: vector first + j of an array of `rows` vectors, its lanes joined; any value beyond the array.
  template <class Each>
  static OPST_INLINE V across(const S* vectors, int first, int rows, const Each& each) {
    V row[kLanes];
    OPST_UNROLL for (int j = 0; j < kLanes; ++j) {
      row[j] = first + j < kTileRows ? V::load(vectors + (first + j < rows ? first + j : 0) * kLanes) : V::zero();
    }
    return each(row);
  }
  static OPST_INLINE V maxima_of(const S* vectors, int first, int rows) {
    return across(vectors, first, rows, [](const V(&row)[kLanes]) OPST_INLINE_LAMBDA { return simd::hmax_each(row); });
  }
  static OPST_INLINE V sums_of(const S* vectors, int first, int rows) {
    return across(vectors, first, rows, [](const V(&row)[kLanes]) OPST_INLINE_LAMBDA { return simd::hsum_each(row); });
  }

  // Raises the rows' maxima. kOnly: they have seen no key before, and there is nothing to rescale.
  template <bool kOnly>
  static OPST_INLINE void raise_maxima(const QueryBlock& q, RowTile rt, const S* row_max, Exponents& e) {
    S* max = static_cast<S*>(q.state.max) + rt.first;
    const V zero = V::zero(), unseen = V::set1(-__builtin_inff());
    const V c = V::set1(static_cast<S>(q.exponent_scale));
    OPST_UNROLL for (int i = 0; i < kTileRows; i += kLanes) {
      const int64_t n = simd::clamp_lanes<V>(rt.rows - i);
      V top = maxima_of(row_max, i, rt.rows);
      const V old = kOnly ? unseen : V::load_n(max + i, n);
      if (!kOnly) top = simd::max(old, top);                  // a NaN row stays NaN: its sum is NaN already
      const V used = simd::select(top == unseen, zero, top);  // -inf - (-inf) would be NaN
      if (!kOnly) simd::exp2((old - used) * c).store_n(e.alpha + i, n);
      used.store_n(e.max + i, n);
      top.store_n(max + i, n);
    }
  }
  // The first `width` scores of each row -> P, as words in place; adds to the rows' sums.
  template <bool kOnly>
  static OPST_NOINLINE void exponentiate(const QueryBlock& q, const Scores<S>& s, int64_t width, const Exponents& e) {
    const V c = V::set1(static_cast<S>(q.exponent_scale));
    for (int i = 0; i < s.rt.rows; ++i) {
      S* row = s.row(i);
      S* sums = static_cast<S*>(q.state.sums) + (s.rt.first + i) * kLanes;
      const V max = V::set1(e.max[i]);
      V sum0 = kOnly ? V::zero() : V::load(sums) * V::set1(e.alpha[i]);
      V sum1 = V::zero();
      int64_t j = 0;
      for (; j + 2 * kLanes <= width; j += 2 * kLanes) {
        const V p0 = exponential<P>((V::load(row + j) - max) * c);
        const V p1 = exponential<P>((V::load(row + j + kLanes) - max) * c);
        store_pair(p0, p1, row, j);
        sum0 = sum0 + p0;
        sum1 = sum1 + p1;
      }
      if (j < width) {
        const V p0 = exponential<P>((V::load(row + j) - max) * c);
        store_pair(p0, V::zero(), row, j);
        sum0 = sum0 + p0;
      }
      (sum0 + sum1).store(sums);
    }
  }
  static OPST_INLINE void store_pair(V p0, V p1, S* row, int64_t j) {
    if constexpr (P::kStep == 1) {
      p0.store(row + j);
      p1.store(row + j + kLanes);
    } else {
#if defined(__AVX512BF16__)
      // Two vectors shrink to one behind the place they were read from.
      simd::store_bf16_fast(p0, p1, reinterpret_cast<bf16*>(row) + j);
#endif
    }
  }

  // Weight j of a row of P.
  static OPST_INLINE V weight(const S* row, int64_t j) {
    if constexpr (P::kStep == 1) {
      return V::set1(row[j]);
    } else {
      return V::set1(__builtin_bit_cast(S, static_cast<uint32_t>(reinterpret_cast<const bf16*>(row)[j].bits) << 16));
    }
  }
  // Columns of the tile whose keys reach row i of a register tile, in ascending order.
  template <class Visit>
  static OPST_INLINE void for_visible(const QueryBlock& q, const KvTile& tile, const Scores<S>& s, int64_t i,
                                      const Visit& visit) {
    const int64_t r = s.rt.first + i;
    const RowKeys row = keys_of(q, tile).of_row(r);
    const RowKeys keys = q.rules == nullptr ? row : RowKeys{s.span.begin, s.span.end};
    const int64_t first = tile.first_key;
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      const bool seen = q.rules == nullptr ||
                        Ops::contributes(*q.rules, q.rules->rows[r], first + j, first + row.begin, first + row.end);
      if (seen) visit(j);
    }
  }
};

}  // namespace opst::OPST_ISA_NS::attention

// PairsInPlaceSource: rows of bf16 read where they are, for few query rows of bf16, multiplied in pairs (VDPBF16PS).
//
// Computes   as InPlaceSource, with half the instructions: two numbers of a row, or two keys, in one step
// Shapes     Q [rows][words of head_dim]; keys and values as row pointers of bf16
// Loop nest  score: for each 8 rows (or the 1 to 7 that are left), for each few keys: pairs along head_dim
//            weigh: for each 8 rows, each 2 to 8 vectors of columns, each two keys: their rows are interleaved, once for
//              the 8 rows, and multiplied with the two weights, which are one word of P
// Memory     as InPlaceSource. Decoding with 8 rows is bound by arithmetic there, since each number is widened and each
//            product one instruction of 16 lanes (Zen 4, 32K keys, D = 128)
// Numerics   as packed pairs: P is rounded to bf16, subnormals count as zero. A weight of 0 beside a value that is not
//            finite would be NaN, so where keys are hidden whether values are finite is looked up.
#pragma once

#include "attention/few_rows.h"
#include "attention/online_softmax.h"
#include "simd/bf16_pairs.h"
#include "tile/pack.h"

#if defined(__AVX512BF16__)
namespace opst::OPST_ISA_NS::attention {

template <class P>
class PairsInPlaceSource {
 public:
  using Product = P;
  using V = typename P::V;
  using S = typename V::Scalar;
  using Word = typename P::Word;
  using Words = typename P::Operand;
  static constexpr int kLanes = V::kLanes, kPairs = 2 * kLanes;  // numbers of a vector of words

  OPST_INLINE PairsInPlaceSource(const QueryBlock& q, const KvTile* tiles, int64_t t, int64_t)
      : q_(q), tile_(tiles[t]) {}

  // All of the tile.
  OPST_INLINE KeySpan span(RowTile) const { return whole_tile<V>(tile_); }

  template <bool kRules>
  OPST_INLINE void score(const Scores<S>& s, S* row_max) const {
    for_groups<V>(s.rt.rows,
                  [&](auto rows, int i) OPST_INLINE_LAMBDA { score_rows<rows>(s.rt.first + i, s.row(i), s.stride); });
    if constexpr (!kRules) OnlineSoftmax<P>::take_maxima(s, s.span.whole_end, row_max);
  }

  template <class Sink>
  OPST_INLINE void weigh(const Scores<S>& s, const S* alpha, S* out, int64_t out_stride) const {
    static_assert(!Sink::kOnly, "adds to what is there");
    for_groups<V>(s.rt.rows, [&](auto rows, int i) OPST_INLINE_LAMBDA {
      weigh_rows<rows>(reinterpret_cast<const Word*>(s.row(i)), s.stride, alpha + i, out + i * out_stride, out_stride,
                       s.rt.first == 0 && i == 0);
    });
  }

  OPST_INLINE bool values_finite() const {
    return tile::rows_finite<V, bf16>(tile_.value_rows, tile_.count, q_.value_head_dim);
  }
  OPST_INLINE V value(int64_t key, int64_t column) const {
    return V::load_n(value_row(key) + column, simd::clamp_lanes<V>(q_.value_head_dim - column));
  }

 private:
  OPST_INLINE const bf16* key_row(int64_t key) const { return static_cast<const bf16*>(tile_.key_rows[key]); }
  OPST_INLINE const bf16* value_row(int64_t key) const { return static_cast<const bf16*>(tile_.value_rows[key]); }

  // scores[i][j] = q_i . k_j for R rows from `first` on and all keys of the tile.
  template <int R>
  OPST_NOINLINE void score_rows(int64_t first, S* scores, int64_t stride) const {
    const Word* q = static_cast<const Word*>(q_.query) + first * q_.query_stride;
    const int64_t whole = q_.head_dim / kPairs * kPairs, rest = q_.head_dim - whole;
    score_few_rows<V, R>(tile_, first == 0, scores, stride, [&](const auto& keys, auto& acc) OPST_INLINE_LAMBDA {
      constexpr int kKeys = sizeof(keys) / sizeof(keys[0]);
      const bf16* rows[kKeys];
      OPST_UNROLL for (int c = 0; c < kKeys; ++c) rows[c] = key_row(keys[c]);
      const auto add = [&](int64_t d, const auto& query, const auto& key) OPST_INLINE_LAMBDA {
        Words words[R];
        OPST_UNROLL for (int i = 0; i < R; ++i) words[i] = query(q + i * q_.query_stride + d / 2);
        OPST_UNROLL for (int c = 0; c < kKeys; ++c) {
          const Words k = key(rows[c] + d);
          OPST_UNROLL for (int i = 0; i < R; ++i) {
            acc[i * kKeys + c] = P::multiply_add(words[i], k, 0, acc[i * kKeys + c]);
          }
        }
      };
      for (int64_t d = 0; d < whole; d += kPairs) {
        add(
            d, [](const Word* p) OPST_INLINE_LAMBDA { return Words::load(p); },
            [](const bf16* p) OPST_INLINE_LAMBDA { return Words::load(reinterpret_cast<const Word*>(p)); });
      }
      if (rest == 0) return;
      add(
          whole, [&](const Word* p) OPST_INLINE_LAMBDA { return Words::load_n(p, (rest + 1) / 2); },
          [&](const bf16* p) OPST_INLINE_LAMBDA { return simd::load_pairs_n(p, rest); });
    });
  }

  // O_i = alpha_i O_i + sum over keys of p_ij v_j for R rows.
  template <int R>
  OPST_NOINLINE void weigh_rows(const Word* p, int64_t stride, const S* alpha, S* out, int64_t out_stride,
                                bool fetches) const {
    Fetching fetching(fetches ? tile_.with_values : RowsToFetch(), tile_.count);
    for_columns<V, R>(q_.value_head_dim, false, [&](auto vectors, int64_t column, int64_t n) OPST_INLINE_LAMBDA {
      constexpr int C = vectors;
      weigh_columns<R, C>(p, stride, alpha, column, C > 1 ? kPairs : n, out + column, out_stride, fetching);
    });
  }
  // Of C vectors of columns; n of the columns that two vectors could have are there.
  template <int R, int C>
  OPST_INLINE void weigh_columns(const Word* p, int64_t stride, const S* alpha, int64_t column, int64_t n, S* out,
                                 int64_t out_stride, Fetching& fetching) const {
    V acc[R][C];
    OPST_UNROLL for (int i = 0; i < R; ++i) {
      OPST_UNROLL for (int c = 0; c < C; ++c) acc[i][c] =
          V::load(out + i * out_stride + c * kLanes) * V::set1(alpha[i]);
    }
    const auto add = [&](int64_t j, bool has_odd) OPST_INLINE_LAMBDA {
      const bf16* even = value_row(j) + column;
      const bf16* odd = has_odd ? value_row(j + 1) + column : even;
      if (column == 0) fetching.after_row(), fetching.after_row();
      Words v[C < 2 ? 2 : C];
      OPST_UNROLL for (int c = 0; c < C; c += 2) {
        simd::interleave_pairs(even + c * kLanes, odd + c * kLanes, n, has_odd, v[c], v[c + 1]);
      }
      OPST_UNROLL for (int i = 0; i < R; ++i) {
        const Words weights = P::broadcast(p + i * stride + j / 2);
        OPST_UNROLL for (int c = 0; c < C; ++c) acc[i][c] = P::multiply_add(weights, v[c], 0, acc[i][c]);
      }
    };
    int64_t j = 0;
    for (; j + 2 <= tile_.count; j += 2) add(j, true);
    if (j < tile_.count) add(j, false);
    OPST_UNROLL for (int i = 0; i < R; ++i) {
      OPST_UNROLL for (int c = 0; c < C; ++c) acc[i][c].store(out + i * out_stride + c * kLanes);
    }
  }

  const QueryBlock& q_;
  const KvTile& tile_;
};

}  // namespace opst::OPST_ISA_NS::attention
#endif

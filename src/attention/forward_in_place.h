// Attention forward for few query rows: keys and values are read where they are.
//
// Computes   what forward.h computes, for at most one register tile of rows (decode: the query heads of one KV head)
// Shapes     Q [rows <= kTileRows, head_dim] f32 words; keys and values as row pointers of T (f32, bf16, f16, f64)
// Loop nest  for each tile of keys
//              for each 4 rows (or the 1 to 3 that are left), for each few keys: dot products over head_dim, kLanes
//                accumulators, reduced together              prefetches the key rows of the next tile
//              online softmax of rows x tile (forward.h)
//              for each 4 rows, each 4 vectors of columns: O += p V row by row
//                                                            prefetches the values of the next tile
// Memory     scores [rows][tile] in L1; everything else is the stream of K and V: 2 flops per byte and row, so the loop
//            is bound by memory and the prefetches decide (none: half the rate of plain reading). K is fetched while K
//            is read, V while V is read: with both in the first phase the second starves.
// Numerics   as forward.h, each dot product in one partial sum per lane. In a partial tile each row sums over its own
//            visible keys only, so a hidden non-finite value cannot reach it.
#pragma once

#include "attention/forward.h"

namespace opst::OPST_ISA_NS::attention {

template <class P, class T>
struct ForwardInPlace {
  using Tiled = Forward<P>;
  using V = typename P::V;
  using S = typename V::Scalar;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kTileRows = P::kTileRows;
  static constexpr int kMaxGroup = kLanes >= 8 ? 4 : kLanes >= 4 ? 2 : 1;  // rows that share one read of a key
  static constexpr int kColumns = 4;                                       // vectors of O per row held in registers

  static OPST_INLINE const T* at(const void* const* rows, int64_t i) { return static_cast<const T*>(rows[i]); }
  static OPST_INLINE void prefetch_row(const void* const* rows, int64_t i, int64_t limit, int64_t length) {
    if (i >= limit) return;
    const char* p = static_cast<const char*>(rows[i]);
    const int64_t bytes = length * static_cast<int64_t>(sizeof(T));
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(p + b);
  }

  // scores[i][j] = q_i . k_j for R rows and all keys of the tile.
  template <int R>
  static OPST_NOINLINE void score_rows(const S* q, int64_t q_stride, int64_t head_dim, const KvTile& tile, S* scores,
                                       int64_t stride, bool prefetch) {
    constexpr int kKeys = kLanes / (R == 3 ? 4 : R);
    const int64_t whole = head_dim / kLanes * kLanes, rest = head_dim - whole;
    const int64_t limit = prefetch ? tile.count + tile.rows_ahead : 0;
    for (int64_t j = 0; j < tile.count; j += kKeys) {
      // Beyond the last key its row is read again; the columns are padding.
      const T* keys[kKeys];
      OPST_UNROLL for (int c = 0; c < kKeys; ++c) {
        keys[c] = at(tile.key_rows, j + c < tile.count ? j + c : tile.count - 1);
        prefetch_row(tile.key_rows, j + c + tile.count, limit, head_dim);
      }
      V acc[kLanes];
      OPST_UNROLL for (int a = 0; a < kLanes; ++a) acc[a] = V::zero();
      for (int64_t d = 0; d < whole; d += kLanes) {
        V rows[R];
        OPST_UNROLL for (int i = 0; i < R; ++i) rows[i] = V::load(q + i * q_stride + d);
        OPST_UNROLL for (int c = 0; c < kKeys; ++c) {
          const V k = V::load(keys[c] + d);
          OPST_UNROLL for (int i = 0; i < R; ++i) acc[i * kKeys + c] = simd::fma(rows[i], k, acc[i * kKeys + c]);
        }
      }
      if (rest > 0) {
        V rows[R];
        OPST_UNROLL for (int i = 0; i < R; ++i) rows[i] = V::load_n(q + i * q_stride + whole, rest);
        OPST_UNROLL for (int c = 0; c < kKeys; ++c) {
          const V k = V::load_n(keys[c] + whole, rest);
          OPST_UNROLL for (int i = 0; i < R; ++i) acc[i * kKeys + c] = simd::fma(rows[i], k, acc[i * kKeys + c]);
        }
      }
      S dots[kLanes];
      simd::hsum_each(acc).store(dots);
      OPST_UNROLL for (int i = 0; i < R; ++i) {
        __builtin_memcpy(scores + i * stride + j, dots + i * kKeys, kKeys * sizeof(S));
      }
    }
  }

  // O_i = alpha_i O_i + sum over keys [begin, end) of p_ij v_j for R rows.
  template <int R>
  static OPST_NOINLINE void weigh_rows(const S* p, int64_t stride, const S* alpha, const KvTile& tile, int64_t begin,
                                       int64_t end, int64_t value_head_dim, S* out, int64_t out_stride, bool prefetch) {
    const int64_t limit = prefetch ? tile.count + tile.rows_ahead : 0;
    for (int64_t column = 0; column < value_head_dim; column += kColumns * kLanes) {
      const int64_t left = value_head_dim - column;
      if (left >= kColumns * kLanes) {
        V acc[R][kColumns];
        OPST_UNROLL for (int i = 0; i < R; ++i) {
          OPST_UNROLL for (int c = 0; c < kColumns; ++c) {
            acc[i][c] = V::load(out + i * out_stride + column + c * kLanes) * V::set1(alpha[i]);
          }
        }
        for (int64_t j = begin; j < end; ++j) {
          const T* values = at(tile.value_rows, j) + column;
          if (j + tile.count < limit) {
            const char* next =
                static_cast<const char*>(tile.value_rows[j + tile.count]) + column * static_cast<int64_t>(sizeof(T));
            OPST_UNROLL for (int b = 0; b < kColumns * kLanes * static_cast<int>(sizeof(T)); b += 64) {
              __builtin_prefetch(next + b);
            }
          }
          V v[kColumns];
          OPST_UNROLL for (int c = 0; c < kColumns; ++c) v[c] = V::load(values + c * kLanes);
          OPST_UNROLL for (int i = 0; i < R; ++i) {
            const V pi = V::set1(p[i * stride + j]);
            OPST_UNROLL for (int c = 0; c < kColumns; ++c) acc[i][c] = simd::fma(pi, v[c], acc[i][c]);
          }
        }
        OPST_UNROLL for (int i = 0; i < R; ++i) {
          OPST_UNROLL for (int c = 0; c < kColumns; ++c) acc[i][c].store(out + i * out_stride + column + c * kLanes);
        }
      } else {
        for (int64_t part = column; part < value_head_dim; part += kLanes) {
          const int64_t n = value_head_dim - part < kLanes ? value_head_dim - part : kLanes;
          V acc[R];
          OPST_UNROLL for (int i = 0; i < R; ++i) acc[i] = V::load(out + i * out_stride + part) * V::set1(alpha[i]);
          for (int64_t j = begin; j < end; ++j) {
            const V v = V::load_n(at(tile.value_rows, j) + part, n);
            OPST_UNROLL for (int i = 0; i < R; ++i) acc[i] = simd::fma(V::set1(p[i * stride + j]), v, acc[i]);
          }
          OPST_UNROLL for (int i = 0; i < R; ++i) acc[i].store(out + i * out_stride + part);
        }
      }
    }
  }

  // Up to kMaxGroup rows at once: each key and value is read once for all of them.
  template <int R = kMaxGroup>
  static OPST_INLINE void score_group(int rows, const S* q, int64_t q_stride, int64_t head_dim, const KvTile& tile,
                                      S* scores, int64_t stride, bool prefetch) {
    if constexpr (R > 1) {
      if (rows < R) return score_group<R - 1>(rows, q, q_stride, head_dim, tile, scores, stride, prefetch);
    }
    score_rows<R>(q, q_stride, head_dim, tile, scores, stride, prefetch);
  }
  template <int R = kMaxGroup>
  static OPST_INLINE void weigh_group(int rows, const S* p, int64_t stride, const S* alpha, const KvTile& tile,
                                      int64_t value_head_dim, S* out, int64_t out_stride, bool prefetch) {
    if constexpr (R > 1) {
      if (rows < R) {
        return weigh_group<R - 1>(rows, p, stride, alpha, tile, value_head_dim, out, out_stride, prefetch);
      }
    }
    weigh_rows<R>(p, stride, alpha, tile, 0, tile.count, value_head_dim, out, out_stride, prefetch);
  }

  static void attend(const QueryBlock& q, const KvTile* tiles, int64_t num_tiles) {
    if (q.rules == nullptr)
      attend_tiles<false>(q, tiles, num_tiles);
    else
      attend_tiles<true>(q, tiles, num_tiles);
  }
  template <bool kRules>
  static OPST_NOINLINE void attend_tiles(const QueryBlock& q, const KvTile* tiles, int64_t num_tiles) {
    const RowTile rt{0, static_cast<int>(q.rows)};
    S* scores = static_cast<S*>(q.scores);
    const S* query = static_cast<const S*>(q.query);
    S* out = static_cast<S*>(q.state.acc);
    const int64_t stride = q.scores_stride;
    alignas(64) S row_max[kTileRows * kLanes];
    typename Tiled::Exponents e;
    for (int64_t t = 0; t < num_tiles; ++t) {
      const KvTile& tile = tiles[t];
      for (int i = 0; i < rt.rows; i += kMaxGroup) {
        score_group(rt.rows - i, query + i * q.query_stride, q.query_stride, q.head_dim, tile, scores + i * stride,
                    stride, i == 0);
      }
      const KeySpan span{.end = tile.count,
                         .width = (tile.count + kLanes - 1) / kLanes * kLanes,
                         .common_end = tile.partial ? 0 : tile.count};
      if constexpr (kRules) {
        Tiled::shape(q, rt, tile, span, scores, stride, row_max);
      } else if (span.ragged()) {
        Tiled::take_maxima(rt.rows, 0, scores, stride, row_max);
        Tiled::hide(q, rt, tile, span, scores, stride, row_max);
      } else {
        Tiled::take_maxima(rt.rows, span.width, scores, stride, row_max);
      }
      Tiled::template raise_maxima<false>(q, rt, row_max, e);
      Tiled::template exponentiate<false>(q, rt, span.width, scores, stride, e);
      if constexpr (kRules) {
        if (q.rules->drops()) Tiled::drop(q, rt, tile, span, scores, stride);
        if ((tile.partial || q.rules->hides()) &&
            !tile::rows_finite<V, T>(tile.value_rows, tile.count, q.value_head_dim)) {
          weigh_visible(q, rt, tile, span, scores, stride, e.alpha);
          continue;
        }
      } else if (tile.partial) {
        for (int i = 0; i < rt.rows; ++i) {
          const auto [begin, end] = keys_of_row(q, tile, i);
          weigh_rows<1>(scores + i * stride, stride, e.alpha + i, tile, begin, end, q.value_head_dim,
                        out + i * q.acc_stride, q.acc_stride, i == 0);
        }
        continue;
      }
      for (int i = 0; i < rt.rows; i += kMaxGroup) {
        weigh_group(rt.rows - i, scores + i * stride, stride, e.alpha + i, tile, q.value_head_dim,
                    out + i * q.acc_stride, q.acc_stride, i == 0);
      }
    }
  }

  // Each row over the keys that reach it.
  static OPST_NOINLINE void weigh_visible(const QueryBlock& q, RowTile rt, const KvTile& tile, KeySpan span,
                                          const S* scores, int64_t stride, const S* alpha) {
    const S one = 1;
    for (int i = 0; i < rt.rows; ++i) {
      S* out = static_cast<S*>(q.state.acc) + i * q.acc_stride;
      const auto add = [&](const S* factor, int64_t begin, int64_t end) OPST_INLINE_LAMBDA {
        weigh_rows<1>(scores + i * stride, stride, factor, tile, begin, end, q.value_head_dim, out, q.acc_stride,
                      false);
      };
      add(alpha + i, 0, 0);
      Tiled::for_visible(q, tile, span, i, [&](int64_t j) OPST_INLINE_LAMBDA { add(&one, j, j + 1); });
    }
  }
};

}  // namespace opst::OPST_ISA_NS::attention

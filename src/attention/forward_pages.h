// Attention forward over panel32 pages: keys and values are multiplied where they are, for any number of query rows.
//
// Computes   what forward.h computes; only where the operands of the two products come from differs
// Shapes     a tile's keys in stretches of 32 (`group` in names), each somewhere in a page (opst/page_layout.h):
//              key_rows[g]    [head_dim / e][32] words       e = elements of a stored word: 1 (f32) or 2 (bf16)
//              value_rows[g]  [32 / e][value_head_dim] words
// Loop nest  as forward.h. Values of stretches that follow one another in memory (in a page) are multiplied as one
// Memory     nothing is packed. Up to four rows the products are bound by the stream of pages: a tile's keys, stretch
//            by stretch, its values, the next tile's keys. While a stretch is read, the stretch 8 KB or more ahead is
//            fetched (tile/stream_tile.h), whichever page holds it
// Numerics   as forward.h. What lies in a page beyond the context never counts: its keys are hidden, its values are not
//            multiplied, and half a pair is taken from a copy whose other half is 0. Whether the values of a partial
//            tile are finite is looked up here, since no packing has seen them.
#pragma once

#include "attention/forward.h"
#include "opst/page_layout.h"
#include "tile/stream_tile.h"

namespace opst::OPST_ISA_NS::attention {

template <class P>
struct ForwardPages {
  using Tiled = Forward<P>;
  using V = typename P::V;
  using S = typename V::Scalar;
  using Word = typename P::Word;
  using Stored = typename P::WordB;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kTileRows = P::kTileRows, kTileVecs = P::kTileVecs;
  static constexpr int kPanel = kTileVecs * kLanes;
  static constexpr int64_t kGroup = kPanelRows;
  static constexpr int64_t kElements = P::kStep * P::kParts;  // of a stored word

  static OPST_INLINE const Stored* group(const void* const* rows, int64_t key) {
    return static_cast<const Stored*>(rows[key / kGroup]);
  }

  // The stretch that is read `distance` stretches after stretch `index` of a tile's keys (of its values). Where nothing
  // is known to follow: the tile's last values (stretch `index` itself).
  static OPST_INLINE const Stored* key_group_ahead(const KvTile& tile, int64_t index, int64_t distance) {
    const int64_t count = num_groups(tile), next = index + distance;
    if (next < count) return static_cast<const Stored*>(tile.key_rows[next]);
    return static_cast<const Stored*>(tile.value_rows[next - count < count ? next - count : count - 1]);
  }
  static OPST_INLINE const Stored* value_group_ahead(const KvTile& tile, int64_t index, int64_t distance) {
    const int64_t count = num_groups(tile), next = index + distance;
    if (next < count) return static_cast<const Stored*>(tile.value_rows[next]);
    // The next tile's keys follow this tile's.
    const bool known = (next - count) * kGroup < tile.rows_ahead;
    return static_cast<const Stored*>(known ? tile.key_rows[next] : tile.value_rows[index]);
  }
  static OPST_INLINE int64_t num_groups(const KvTile& tile) { return (tile.count + kGroup - 1) / kGroup; }
  static constexpr int64_t kAheadBytes = 8192;
  static OPST_INLINE int64_t groups_ahead(int64_t head_dim) {
    const int64_t bytes = kGroup / kElements * head_dim * static_cast<int64_t>(sizeof(Stored));
    return (kAheadBytes + bytes - 1) / bytes;
  }

  // scores[r][0 .. width) = Q K^T, and the maxima of whole panels.
  static OPST_INLINE void score(const QueryBlock& q, RowTile rt, const KvTile& tile, KeySpan span, S* scores,
                                int64_t stride, S* row_max) {
    const int64_t depth = q.head_dim / kElements;
    const Word* a = static_cast<const Word*>(q.query) + rt.first * q.query_stride;
    for (int i = 0; i < rt.rows; ++i) V::set1(-__builtin_inff()).store(row_max + i * kLanes);
    alignas(64) S unused[kTileRows * kLanes];
    for (int i = 0; i < rt.rows; ++i) V::zero().store(unused + i * kLanes);
    const int64_t distance = groups_ahead(q.head_dim);
    for (int64_t j = 0; j < span.width; j += kPanel) {
      const int64_t end = span.width - j > kLanes ? j + kPanel : j + kLanes;
      S* const maxima = span.whole(j, end) ? row_max : unused;
      const int64_t key = span.begin + j;
      const Stored* b = group(tile.key_rows, key) + key % kGroup;
      if (rt.rows <= tile::kStreamRows) {
        const auto stream = span.width - j > kLanes ? tile::stream_product_with_max_for<P, kTileVecs>(rt.rows)
                                                    : tile::stream_product_with_max_for<P, 1>(rt.rows);
        stream(depth, a, q.query_stride, b, kGroup, key_group_ahead(tile, key / kGroup, distance) + key % kGroup,
               scores + j, stride, maxima);
        continue;
      }
      const auto product = span.width - j > kLanes ? tile::product_with_max_for<P, kTileVecs>(rt.rows)
                                                   : tile::product_with_max_for<P, 1>(rt.rows);
      product(depth, a, q.query_stride, b, kGroup, scores + j, stride, maxima, reinterpret_cast<const char*>(b));
    }
  }

  // O = alpha O + P V over columns [span.begin, span.end) of the tile.
  static OPST_INLINE void weigh(const QueryBlock& q, RowTile rt, const KvTile& tile, KeySpan span, const S* scores,
                                int64_t stride, const S* alpha) {
    S ones[kTileRows];
    for (S& one : ones) one = 1;
    const int64_t row_words = q.value_head_dim, distance = groups_ahead(q.value_head_dim);
    const int64_t whole_end = span.end / kElements * kElements;
    const auto p_of = [&](int64_t key) OPST_INLINE_LAMBDA {
      return reinterpret_cast<const Word*>(scores) + (key - span.begin) / P::kStep;
    };
    for (int64_t key = span.begin; key < whole_end;) {
      const Stored* values = group(tile.value_rows, key);
      int64_t end = (key / kGroup + 1) * kGroup;
      while (end < whole_end && rt.rows > tile::kStreamRows &&
             group(tile.value_rows, end) == values + (end - key / kGroup * kGroup) / kElements * row_words) {
        end += kGroup;
      }
      end = end < whole_end ? end : whole_end;
      values += key % kGroup / kElements * row_words;
      const Stored* const ahead =
          value_group_ahead(tile, key / kGroup, distance) + (values - group(tile.value_rows, key));
      multiply(q, rt, p_of(key), stride, values, (end - key) / kElements, alpha, ahead);
      alpha = ones;
      key = end;
    }
    if (whole_end < span.end) {  // half a pair
      Stored row[kMaxColumns];
      const Stored* values = group(tile.value_rows, whole_end) + whole_end % kGroup / kElements * row_words;
      for (int64_t d = 0; d < row_words; ++d) row[d] = lower_half(values[d]);
      multiply(q, rt, p_of(whole_end), stride, row, 1, alpha, row);
    }
  }
  static constexpr int kMaxColumns = 768;
  static OPST_INLINE float lower_half(float word) { return word; }  // never called: a float is no pair
  static OPST_INLINE uint32_t lower_half(uint32_t word) { return word & 0xffffu; }

  // O = alpha O + P V for `depth` rows of stored words at `values`, all columns.
  static OPST_INLINE void multiply(const QueryBlock& q, RowTile rt, const Word* p, int64_t stride, const Stored* values,
                                   int64_t depth, const S* alpha, const Stored* ahead) {
    const int64_t columns = q.value_head_dim;
    S* out = static_cast<S*>(q.state.acc) + rt.first * q.acc_stride;
    int64_t c = 0;
    if (rt.rows <= tile::kStreamRows) {
      constexpr int kWide = tile::kStreamVecs * kLanes;
      for (; c + kLanes <= columns; c += columns - c >= kWide ? kWide : kLanes) {
        const auto stream = columns - c >= kWide ? tile::stream_scaled_accumulate_for<P, tile::kStreamVecs>(rt.rows)
                                                 : tile::stream_scaled_accumulate_for<P, 1>(rt.rows);
        stream(depth, p, stride, values + c, columns, ahead + c, out + c, q.acc_stride, alpha);
      }
    }
    for (; c + kLanes <= columns; c += columns - c >= kPanel ? kPanel : kLanes) {
      const auto accumulate = columns - c >= kPanel ? tile::scaled_accumulate_for<P, kTileVecs>(rt.rows)
                                                    : tile::scaled_accumulate_for<P, 1>(rt.rows);
      accumulate(depth, p, stride, values + c, columns, out + c, q.acc_stride, alpha,
                 reinterpret_cast<const char*>(values));
    }
    if (c == columns) return;
    // The last columns are less than a vector: from a padded copy, a few rows at a time.
    constexpr int64_t kRows = 16;
    Stored padded[kRows * kLanes] = {};
    S ones[kTileRows];
    for (S& one : ones) one = 1;
    for (int64_t k = 0; k < depth; k += kRows) {
      const int64_t n = depth - k < kRows ? depth - k : kRows;
      for (int64_t r = 0; r < n; ++r) {
        __builtin_memcpy(padded + r * kLanes, values + (k + r) * columns + c,
                         static_cast<size_t>(columns - c) * sizeof(Stored));
      }
      tile::scaled_accumulate_for<P, 1>(rt.rows)(n, p + k * P::kParts, stride, padded, kLanes, out + c, q.acc_stride,
                                                 k == 0 ? alpha : ones, reinterpret_cast<const char*>(padded));
    }
  }

  // Value row of one key, widened.
  static OPST_INLINE V value_of_key(const KvTile& tile, int64_t key, int64_t column, int64_t columns) {
    const Stored* row = group(tile.value_rows, key) + key % kGroup / kElements * columns + column;
    const int64_t n = columns - column < kLanes ? columns - column : kLanes;
    if constexpr (kElements == 1) {
      return V::load_n(row, n);
    } else {
      const auto pair = simd::Bf16Words::load_n(row, n);
      return key % 2 == 0 ? pair.low() : pair.high();
    }
  }

  static OPST_NOINLINE bool values_finite(const KvTile& tile, int64_t columns) {
    V not_finite = V::zero();  // 0 * x is NaN where x is Inf or NaN, and 0 elsewhere
    for (int64_t key = 0; key < tile.count; ++key) {
      for (int64_t d = 0; d < columns; d += kLanes) {
        not_finite = simd::fma(value_of_key(tile, key, d, columns), V::zero(), not_finite);
      }
    }
    return simd::hsum(not_finite) == 0;
  }

  // As weigh, for a tile with non-finite values of which some are hidden: each row over the keys that reach it.
  static OPST_NOINLINE void weigh_visible(const QueryBlock& q, RowTile rt, const KvTile& tile, KeySpan span,
                                          const S* scores, int64_t stride, const S* alpha) {
    for (int i = 0; i < rt.rows; ++i) {
      const int64_t r = rt.first + i;
      S* out = static_cast<S*>(q.state.acc) + r * q.acc_stride;
      for (int64_t column = 0; column < q.value_head_dim; column += kLanes) {
        const V factor = V::set1(alpha[i]);
        (V::load(out + column) * factor).store(out + column);
      }
      Tiled::for_visible(q, tile, span, r, [&](int64_t j) OPST_INLINE_LAMBDA {
        const V p = Tiled::probability(scores + i * stride, j - span.begin);
        for (int64_t column = 0; column < q.value_head_dim; column += kLanes) {
          const V value = value_of_key(tile, j, column, q.value_head_dim);
          simd::fma(p, value, V::load(out + column)).store(out + column);
        }
      });
    }
  }

  static void attend(const QueryBlock& q, const KvTile* tiles, int64_t num_tiles) {
    if (q.rules == nullptr)
      attend_tiles<false>(q, tiles, num_tiles);
    else
      attend_tiles<true>(q, tiles, num_tiles);
  }
  template <bool kRules>
  static OPST_NOINLINE void attend_tiles(const QueryBlock& q, const KvTile* tiles, int64_t num_tiles) {
    const RowTiles row_tiles(q.rows, kTileRows);
    S* scores = static_cast<S*>(q.scores);
    const int64_t stride = q.scores_stride;
    alignas(64) S row_max[kTileRows * kLanes];
    typename Tiled::Exponents e;
    for (int64_t t = 0; t < num_tiles; ++t) {
      const KvTile& tile = tiles[t];
      const bool some_hidden = tile.partial || (kRules && q.rules->hides());
      const bool by_row = some_hidden && !values_finite(tile, q.value_head_dim);
      for (int64_t b = 0; b < row_tiles.count(); ++b) {
        const RowTile rt = row_tiles[b];
        const KeySpan span = Tiled::key_span(q, rt, tile);
        if (span.width == 0) continue;
        score(q, rt, tile, span, scores, stride, row_max);
        if constexpr (kRules) {
          Tiled::shape(q, rt, tile, span, scores, stride, row_max);
        } else {
          if (span.ragged()) Tiled::hide(q, rt, tile, span, scores, stride, row_max);
        }
        Tiled::template raise_maxima<false>(q, rt, row_max, e);
        Tiled::template exponentiate<false>(q, rt, span.width, scores, stride, e);
        if constexpr (kRules) {
          if (q.rules->drops()) Tiled::drop(q, rt, tile, span, scores, stride);
        }
        if (by_row)
          weigh_visible(q, rt, tile, span, scores, stride, e.alpha);
        else
          weigh(q, rt, tile, span, scores, stride, e.alpha);
      }
    }
  }
};

}  // namespace opst::OPST_ISA_NS::attention

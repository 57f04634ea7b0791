// PagesSource: panel32 pages, whose keys and values are multiplied where they are, for any number of query rows.
//
// Shapes     a tile's keys in stretches of 32 (`group` in names), each somewhere in a page (opst/page_layout.h):
//              key_rows[g]    [head_dim / e][32] words       e = elements of a stored word: 2 of bf16, else 1
//              value_rows[g]  [32 / e][value_head_dim] words
//            of i8 a scale for each key, and for each value
// Loop nest  as packed tiles. Values of stretches that follow one another in memory (in a page) are multiplied as one
// Memory     nothing is packed. Of few rows (tile::kStreamRows) the products are bound by the stream of pages: a tile's
//            keys, stretch by stretch, its values, the next tile's keys. While a stretch is read, the stretch 24 KB or
//            more ahead is fetched (tile/gemm_tile.h), whichever page holds it
// Numerics   What lies in a page beyond the context never counts: its keys are hidden, its values are not multiplied,
//            and half a pair is taken from a copy whose other half is 0. Whether the values of a tile are finite is
//            looked up where some may be hidden, since no packing has seen them. Of i8 a key's scale multiplies the
//            finished dot product, a value's the weight.
#pragma once

#include "attention/online_softmax.h"
#include "opst/page_layout.h"
#include "tile/gemm_tile.h"

namespace opst::OPST_ISA_NS::attention {

template <class P>
class PagesSource {
 public:
  using Product = P;
  using V = typename P::V;
  using S = typename V::Scalar;
  using Word = typename P::Word;
  using Stored = typename P::WordB;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kTileRows = P::kTileRows, kTileVecs = P::kTileVecs;
  static constexpr int kPanel = kTileVecs * kLanes;
  static constexpr int64_t kGroup = kPanelRows;
  static constexpr int64_t kElements = P::kStep * P::kParts;  // of a stored word
  static constexpr bool kScaled = __is_same(Stored, int8_t);

  OPST_INLINE PagesSource(const QueryBlock& q, const KvTile* tiles, int64_t t, int64_t)
      : q_(q),
        tile_(tiles[t]),
        finite_(!(tile_.partial || (q.rules != nullptr && q.rules->hides())) || all_finite(tile_, q.value_head_dim)) {}

  OPST_INLINE KeySpan span(RowTile rt) const { return keys_of(q_, tile_).template span<P>(rt); }

  template <bool kRules>
  OPST_INLINE void score(const Scores<S>& s, S* row_max) const {
    const int64_t depth = q_.head_dim / kElements, distance = groups_ahead(q_.head_dim);
    const Word* a = static_cast<const Word*>(q_.query) + s.rt.first * q_.query_stride;
    alignas(64) S unscaled[kScaled ? kTileRows * kLanes : 1];  // maxima of no use
    S* const tops = kScaled ? unscaled : row_max;
    OnlineSoftmax<P>::for_panels(s, tops, [&](int64_t j, bool wide, S* maxima) OPST_INLINE_LAMBDA {
      const int64_t key = s.span.begin + j;
      const Stored* b = group(tile_.key_rows, key) + key % kGroup;
      if (s.rt.rows <= tile::kStreamRows) {
        const auto stream = wide ? tile::stream_product_with_max_for<P, kTileVecs>(s.rt.rows)
                                 : tile::stream_product_with_max_for<P, 1>(s.rt.rows);
        stream(depth, a, q_.query_stride, b, kGroup, s.data + j, s.stride, maxima,
               in_stream(key / kGroup + distance) + key % kGroup);
      } else {
        const auto product =
            wide ? tile::product_with_max_for<P, kTileVecs>(s.rt.rows) : tile::product_with_max_for<P, 1>(s.rt.rows);
        product(depth, a, q_.query_stride, b, kGroup, s.data + j, s.stride, maxima, reinterpret_cast<const char*>(b));
      }
    });
    if constexpr (kScaled) {
      OnlineSoftmax<P>::scale_columns(s, tile_.key_scales, tile_.count);
      if constexpr (!kRules) OnlineSoftmax<P>::take_maxima(s, s.span.whole_end, row_max, s.span.whole_begin);
    }
  }

  template <class Sink>
  OPST_INLINE void weigh(const Scores<S>& s, const S* alpha, S* out, int64_t out_stride) const {
    static_assert(!Sink::kOnly, "adds to what is there");
    if constexpr (kScaled) OnlineSoftmax<P>::scale_columns(s, tile_.value_scales, tile_.count);
    S ones[kTileRows];
    for (S& one : ones) one = 1;
    const int64_t row_words = q_.value_head_dim, distance = groups_ahead(q_.value_head_dim);
    const int64_t whole_end = s.span.end / kElements * kElements;
    const auto multiply_from = [&](int64_t key, const Stored* values, int64_t depth,
                                   const Stored* ahead) OPST_INLINE_LAMBDA {
      const Word* p = reinterpret_cast<const Word*>(s.data) + (key - s.span.begin) / P::kStep;
      multiply(s.rt.rows, p, s.stride, values, depth, alpha, out, out_stride, ahead);
    };
    for (int64_t key = s.span.begin; key < whole_end;) {
      const Stored* values = group(tile_.value_rows, key);
      int64_t end = (key / kGroup + 1) * kGroup;
      while (end < whole_end && s.rt.rows > tile::kStreamRows &&
             group(tile_.value_rows, end) == values + (end - key / kGroup * kGroup) / kElements * row_words) {
        end += kGroup;
      }
      end = end < whole_end ? end : whole_end;
      values += key % kGroup / kElements * row_words;
      const Stored* ahead = in_stream(num_groups() + key / kGroup + distance);
      multiply_from(key, values, (end - key) / kElements, ahead + (values - group(tile_.value_rows, key)));
      alpha = ones;
      key = end;
    }
    if constexpr (kElements == 2) {
      if (whole_end == s.span.end) return;
      Stored row[kMaxColumns];  // half a pair
      const Stored* values = group(tile_.value_rows, whole_end) + whole_end % kGroup / kElements * row_words;
      for (int64_t d = 0; d < row_words; ++d) row[d] = values[d] & 0xffffu;
      multiply_from(whole_end, row, 1, row);
    }
  }

  OPST_INLINE bool values_finite() const { return finite_; }
  OPST_INLINE V value(int64_t key, int64_t column) const { return value_of(tile_, key, column, q_.value_head_dim); }

 private:
  static OPST_INLINE const Stored* group(const void* const* rows, int64_t key) {
    return static_cast<const Stored*>(rows[key / kGroup]);
  }

  OPST_INLINE int64_t num_groups() const { return (tile_.count + kGroup - 1) / kGroup; }
  // Stretch `index` of what is read: the tile's keys, its values, the next tiles' keys; the tile's last values where
  // nothing is known to follow.
  OPST_INLINE const Stored* in_stream(int64_t index) const {
    const int64_t count = num_groups(), value = index - count;
    if (index < count) return static_cast<const Stored*>(tile_.key_rows[index]);
    if (value >= count && (value - count) * kGroup < tile_.rows_ahead) {
      return static_cast<const Stored*>(tile_.key_rows[value]);
    }
    return static_cast<const Stored*>(tile_.value_rows[value < count ? value : count - 1]);
  }
  static constexpr int64_t kAheadBytes = 24576;
  static OPST_INLINE int64_t groups_ahead(int64_t head_dim) {
    const int64_t bytes = kGroup / kElements * head_dim * static_cast<int64_t>(sizeof(Stored));
    return (kAheadBytes + bytes - 1) / bytes;
  }

  static constexpr int kMaxColumns = 768;

  // O = alpha O + P V for `depth` rows of stored words at `values`, all columns.
  OPST_INLINE void multiply(int rows, const Word* p, int64_t stride, const Stored* values, int64_t depth,
                            const S* alpha, S* out, int64_t out_stride, const Stored* ahead) const {
    const int64_t columns = q_.value_head_dim;
    int64_t c = 0;
    if (rows <= tile::kStreamRows) {
      const bool few = rows <= tile::kFewStreamRows;
      const int64_t wide = (few ? tile::kStreamVecs : kTileVecs) * kLanes;
      for (; c + kLanes <= columns; c += columns - c >= wide ? wide : kLanes) {
        const auto stream = columns - c < wide ? tile::stream_scaled_accumulate_for<P, 1>(rows)
                            : few              ? tile::stream_scaled_accumulate_for<P, tile::kStreamVecs>(rows)
                                               : tile::stream_scaled_accumulate_for<P, kTileVecs>(rows);
        stream(depth, p, stride, values + c, columns, out + c, out_stride, alpha, ahead + c);
      }
    }
    for (; c + kLanes <= columns; c += columns - c >= kPanel ? kPanel : kLanes) {
      const auto accumulate = columns - c >= kPanel ? tile::scaled_accumulate_for<P, kTileVecs>(rows)
                                                    : tile::scaled_accumulate_for<P, 1>(rows);
      accumulate(depth, p, stride, values + c, columns, out + c, out_stride, alpha,
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
      tile::scaled_accumulate_for<P, 1>(rows)(n, p + k * P::kParts, stride, padded, kLanes, out + c, out_stride,
                                              k == 0 ? alpha : ones, reinterpret_cast<const char*>(padded));
    }
  }

  static OPST_INLINE V value_of(const KvTile& tile, int64_t key, int64_t column, int64_t columns) {
    const Stored* words = group(tile.value_rows, key) + key % kGroup / kElements * columns + column;
    const V v = tile::element_of_words<V, kElements>(words, simd::clamp_lanes<V>(columns - column), key);
    return kScaled ? v * V::set1(tile.value_scales[key]) : v;
  }
  static OPST_NOINLINE bool all_finite(const KvTile& tile, int64_t columns) {
    V not_finite = V::zero();  // 0 * x is NaN where x is Inf or NaN, and 0 elsewhere
    for (int64_t key = 0; key < tile.count; ++key) {
      for (int64_t d = 0; d < columns; d += kLanes) {
        not_finite = simd::fma(value_of(tile, key, d, columns), V::zero(), not_finite);
      }
    }
    return simd::hsum(not_finite) == 0;
  }

  const QueryBlock& q_;
  const KvTile& tile_;
  const bool finite_;  // the values, or none is hidden
};

}  // namespace opst::OPST_ISA_NS::attention

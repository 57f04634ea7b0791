// PackedSource: column panels of keys, and value panels (tile/pack.h) or rows of values in the tensor. Loops over
// panels of 32 keys, then of 32 columns; the next tile is prefetched meanwhile.
#pragma once

#include "attention/online_softmax.h"

namespace opst::OPST_ISA_NS::attention {

template <class P>
class PackedSource {
 public:
  using Product = P;
  using V = typename P::V;
  using S = typename V::Scalar;
  using Word = typename P::Word;
  static constexpr int kLanes = V::kLanes, kPanel = P::kTileVecs * kLanes;
  static constexpr bool kJoins = true;

  OPST_INLINE PackedSource(const QueryBlock& q, const KvTile* tiles, int64_t t, int64_t num_tiles)
      : q_(q), tile_(tiles[t]), prefetch_(static_cast<const char*>(tiles[t + 1 < num_tiles ? t + 1 : t].keys)) {}

  OPST_INLINE KeySpan span(RowTile rt) const { return keys_of(q_, tile_).template span<P>(rt); }

  // With rules, masks and biases are fetched meanwhile: their rows lie pages apart, and nothing else foresees them (a
  // bool mask of 4096 x 4096: 1.33 times the time of no mask without fetching, 1.05 times with; f32: 1.26 and 1.08).
  template <bool kRules>
  OPST_INLINE void score(const Scores<S>& s, S* row_max) {
    const int64_t depth = tile::words<P>(q_.head_dim);
    const Word* a = static_cast<const Word*>(q_.query) + s.rt.first * q_.query_stride;
    const Word* b = static_cast<const Word*>(tile_.keys) + s.span.begin * depth;
    const auto full = tile::product_with_max_for<P, P::kTileVecs>(s.rt.rows);
    OnlineSoftmax<P>::for_panels(s, row_max, [&](int64_t j, bool wide, S* maxima) OPST_INLINE_LAMBDA {
      const int64_t column = s.span.begin + j, ldb = tile_.count - column > kLanes ? kPanel : kLanes;
      for (int i = 0; kRules && wide && i < s.rt.rows; ++i) {
        ScoreOps<V>::prefetch(*q_.rules, q_.rules->rows[s.rt.first + i], tile_.first_key + column);
      }
      const auto product = wide ? full : tile::product_with_max_for<P, 1>(s.rt.rows);
      product(depth, a, q_.query_stride, b + j * depth, ldb, s.data + j, s.stride, maxima, prefetch_);
      if (wide) prefetch_ += depth / 4 * 64;
    });
  }

  template <class Sink>
  OPST_INLINE void weigh(const Scores<S>& s, const S* factor, S* out, int64_t out_stride) {
    const int64_t first = s.span.begin / P::kStep, depth = tile::words<P>(s.span.end) - first;
    const bool rows = tile_.values_stride > 0;
    const int64_t column_words = rows ? 1 : tile::words<P>(tile_.count);
    const auto full = Sink::template product_for<P::kTileVecs>(s.rt.rows);
    for (int64_t column = 0; column < q_.value_head_dim; column += kPanel) {
      const bool wide = q_.value_head_dim - column > kLanes;
      const int64_t ldb = rows ? tile_.values_stride : wide ? kPanel : kLanes;
      const Word* b = static_cast<const Word*>(tile_.values) + column * column_words + first * ldb;
      const auto product = wide ? full : Sink::template product_for<1>(s.rt.rows);
      product(depth, reinterpret_cast<const Word*>(s.data), s.stride, b, ldb, out + column, out_stride, factor,
              prefetch_);
      prefetch_ += depth / 4 * 64;
    }
  }

  OPST_INLINE bool values_finite() const { return tile_.values_finite; }

  // Only of panels: rows of values in the tensor are finite, or none is hidden.
  OPST_INLINE V value(int64_t key, int64_t column) const {
    const int64_t panel = column / kPanel * kPanel, width = q_.value_head_dim - panel > kLanes ? kPanel : kLanes;
    const Word* words = static_cast<const Word*>(tile_.values) + panel * tile::words<P>(tile_.count) +
                        key / P::kStep * width + (column - panel);
    return tile::element_of_words<V, P::kStep>(words, kLanes, key);
  }

 private:
  const QueryBlock& q_;
  const KvTile& tile_;
  const char* prefetch_;
};

}  // namespace opst::OPST_ISA_NS::attention

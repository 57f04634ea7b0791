// ScaledRows: the attention source of docs/extending.md: keys and values of int8, with a scale for each token.
//
// Computes   S = Q K^T and O = factor O + P V for a tile, k_jd = scale_j byte_jd, v_jd likewise
// Shapes     Q f32 words [rows, head_dim]; row j of keys or values: its scale (f32), behind it head_dim or
//            value_head_dim bytes (int8), which are a multiple of 16
// Loop nest  score: for each row of queries, for each key: a dot product over head_dim
//            weigh: for each row of queries, for each vector of columns: a sum over the keys
// Memory     the rows where they are. Each row of queries reads all of them: InPlaceSource shows how several share one
//            read of a key, PackedSource how a whole register tile does.
// Numerics   a key's scale multiplies the finished dot product, a value's scale the weight.
#pragma once

#include "attention/forward.h"
#include "simd/small_ints.h"

namespace opst::OPST_ISA_NS::extending {

using attention::KeySpan;
using attention::KvTile;
using attention::QueryBlock;
using attention::Scores;

class ScaledRows {
 public:
  using Product = tile::ProductF32;
  using V = Product::V;
  using S = float;

  OPST_INLINE ScaledRows(const QueryBlock& q, const KvTile* tiles, int64_t t, int64_t) : q_(q), tile_(tiles[t]) {}

  // All of the tile; the product takes maxima only of tiles that every row sees whole.
  OPST_INLINE KeySpan span(tile::RowTile) const {
    const int64_t width = (tile_.count + V::kLanes - 1) / V::kLanes * V::kLanes;
    return {.end = tile_.count, .width = width, .whole_end = tile_.partial || tile_.count < width ? 0 : width};
  }

  template <bool kRules>
  OPST_INLINE void score(const Scores<S>& s, S* row_max) const {
    for (int i = 0; i < s.rt.rows; ++i) {
      const float* query = static_cast<const float*>(q_.query) + (s.rt.first + i) * q_.query_stride;
      for (int64_t j = 0; j < s.span.width; ++j) s.row(i)[j] = j < tile_.count ? dot(query, tile_.key_rows[j]) : 0;
    }
    if constexpr (!kRules) attention::OnlineSoftmax<Product>::take_maxima(s, s.span.whole_end, row_max);
  }

  template <class Sink>
  OPST_INLINE void weigh(const Scores<S>& s, const S* factor, S* out, int64_t out_stride) const {
    static_assert(!Sink::kOnly, "sums are kept in memory");
    for (int i = 0; i < s.rt.rows; ++i) {
      for (int64_t column = 0; column < q_.value_head_dim; column += V::kLanes) {
        V sum = V::load(out + i * out_stride + column) * V::set1(factor[i]);
        for (int64_t j = 0; j < tile_.count; ++j) sum = simd::fma(V::set1(s.row(i)[j]), value(j, column), sum);
        sum.store(out + i * out_stride + column);
      }
    }
  }

  OPST_INLINE bool values_finite() const {
    for (int64_t j = 0; j < tile_.count; ++j) {
      if (!(scale_of(tile_.value_rows[j]) * 0 == 0)) return false;
    }
    return true;
  }
  OPST_INLINE V value(int64_t key, int64_t column) const {
    const void* row = tile_.value_rows[key];
    return V::set1(scale_of(row)) * simd::load_i8(bytes_of(row) + column);
  }

 private:
  static OPST_INLINE float scale_of(const void* row) { return *static_cast<const float*>(row); }
  static OPST_INLINE const int8_t* bytes_of(const void* row) { return static_cast<const int8_t*>(row) + sizeof(float); }
  OPST_INLINE float dot(const float* query, const void* key) const {
    V sum = V::zero();
    for (int64_t d = 0; d < q_.head_dim; d += V::kLanes) {
      sum = simd::fma(V::load(query + d), simd::load_i8(bytes_of(key) + d), sum);
    }
    return simd::hsum(sum) * scale_of(key);
  }

  const QueryBlock& q_;
  const KvTile& tile_;
};

}  // namespace opst::OPST_ISA_NS::extending

// InPlaceSource: keys and values are read where they are, for few query rows (decode: the query heads of one KV head).
//
// Shapes     Q [rows, head_dim] f32 words; keys and values as row pointers of T: f32, bf16, f16, f64, f8_e4m3,
//            f8_e5m2, or integers: int8_t, or uint8_t for two of four bits. These have a scale and an offset for each
//            row or, with kGroups, for each group of a row (KvTile): a number is (q + offset) * scale
// Loop nest  score: for each 8 rows (or the 1 to 7 that are left), for each few keys: dot products over head_dim,
//              kLanes accumulators, reduced together       fetches keys of a later tile
//            weigh: for each 8 rows, each 2 to 8 vectors of columns: O += p V row by row
//                                                          fetches values of a later tile
// Memory     scores [rows][tile] in L1; everything else is the stream of K and V: 2 flops per byte and row, so the loop
//            is bound by memory and the fetches decide. A tile says what is to be fetched meanwhile (a later tile's rows,
//            or whole rows of tokens where heads take turns), early and in memory's order: the loads, of several rows at
//            a time, leave the hardware's prefetchers helpless. Of several groups of rows the first one fetches, the
//            others find the tile in L1 or L2; so does V where values are columns of the keys' rows (value_rows =
//            key_rows).
// Numerics   each dot product in one partial sum per lane. Of a partial tile each row sums over its own visible keys
//            only, so a hidden non-finite value cannot reach it. With rules, whether values are finite is looked up.
//            Of i8, q + offset is exact; a key's scale multiplies the finished dot product, a value's the weight. In
//            groups each number is multiplied with its scale as it is read, rounded to f32. Groups that end within a
//            vector (of fewer numbers than it has lanes, or of a number that these do not divide) are slow: a vector's
//            scales are fetched lane by lane.
#pragma once

#include "attention/few_rows.h"
#include "attention/online_softmax.h"
#include "simd/float8.h"
#include "tile/pack.h"

namespace opst::OPST_ISA_NS::attention {

template <class P, class T, bool kGroups = false>
class InPlaceSource {
 public:
  using Product = P;
  using V = typename P::V;
  using S = typename V::Scalar;
  static constexpr int kLanes = V::kLanes;
  static constexpr bool kScaled = __is_same(T, int8_t) && !kGroups;  // a scale for each row

  OPST_INLINE InPlaceSource(const QueryBlock& q, const KvTile* tiles, int64_t t, int64_t) : q_(q), tile_(tiles[t]) {}

  // All of the tile.
  OPST_INLINE KeySpan span(RowTile) const { return whole_tile<V>(tile_); }

  template <bool kRules>
  OPST_INLINE void score(const Scores<S>& s, S* row_max) const {
    for_groups<V>(s.rt.rows,
                  [&](auto rows, int i) OPST_INLINE_LAMBDA { score_rows<rows>(s.rt.first + i, s.row(i), s.stride); });
    if constexpr (kScaled) OnlineSoftmax<P>::scale_columns(s, tile_.key_scales, tile_.count);
    if constexpr (!kRules) OnlineSoftmax<P>::take_maxima(s, s.span.whole_end, row_max);
  }

  template <class Sink>
  OPST_INLINE void weigh(const Scores<S>& s, const S* alpha, S* out, int64_t out_stride) const {
    static_assert(!Sink::kOnly, "adds to what is there");
    if constexpr (kScaled) OnlineSoftmax<P>::scale_columns(s, tile_.value_scales, tile_.count);
    const bool by_row = tile_.partial && q_.rules == nullptr;
    for (int i = 0; i < s.rt.rows; i += by_row ? 1 : kMostSharing<V>) {
      const RowKeys keys = by_row ? keys_of(q_, tile_).of_row(s.rt.first + i) : RowKeys{0, tile_.count};
      for_group<V>(by_row ? 1 : s.rt.rows - i, [&](auto rows) OPST_INLINE_LAMBDA {
        weigh_rows<rows>(s.row(i), s.stride, alpha + i, keys, out + i * out_stride, out_stride,
                         s.rt.first == 0 && i == 0);
      });
    }
  }

  // Without rules nothing hidden is multiplied.
  OPST_INLINE bool values_finite() const {
    if (q_.rules == nullptr) return true;
    if constexpr (sizeof(T) == 1)
      return bytes_finite();
    else
      return tile::rows_finite<V, T>(tile_.value_rows, tile_.count, q_.value_head_dim);
  }
  OPST_INLINE V value(int64_t key, int64_t column) const {
    const int64_t n = simd::clamp_lanes<V>(q_.value_head_dim - column);
    const V v = simd::load_stored_n<V>(simd::number_at(at(tile_.value_rows, key), column), n);
    if constexpr (kGroups) {
      const RowGroups& groups = tile_.value_groups;
      if (n < kLanes || !share_scales(groups, q_.value_head_dim)) return scaled(v, groups, key, column, n);
      return in_group(v, groups, key, static_cast<int>(column) / static_cast<int>(groups.size));
    } else if constexpr (kScaled) {
      const V offset = V::set1(tile_.value_offsets != nullptr ? tile_.value_offsets[key] : 0);
      return (v + offset) * V::set1(tile_.value_scales[key]);
    } else {
      return v;
    }
  }

 private:
  static OPST_INLINE const T* at(const void* const* rows, int64_t i) { return static_cast<const T*>(rows[i]); }

  // Whether the lanes of a vector of a row's numbers share a scale.
  static OPST_INLINE bool share_scales(const RowGroups& groups, int64_t length) {
    return groups.size % kLanes == 0 || groups.size >= length;
  }
  static OPST_INLINE S number_of(const GroupList& list, int64_t j, int64_t group) {
    return static_cast<const float*>(list.rows[j])[group * list.stride];
  }
  static OPST_INLINE V in_group(V q, const RowGroups& groups, int64_t j, int64_t group) {
    return (q + V::set1(number_of(groups.offsets, j, group))) * V::set1(number_of(groups.scales, j, group));
  }
  // Numbers [first, first + n) of row j, whatever the groups; other lanes are 0.
  static OPST_NOINLINE V scaled(V q, const RowGroups& groups, int64_t j, int64_t first, int64_t n) {
    S scales[kLanes] = {}, offsets[kLanes] = {};
    int64_t group = first / groups.size, left = (group + 1) * groups.size - first;
    for (int64_t i = 0; i < n; ++i) {
      scales[i] = number_of(groups.scales, j, group);
      offsets[i] = number_of(groups.offsets, j, group);
      if (--left == 0) ++group, left = groups.size;
    }
    return (q + V::load(offsets)) * V::load(scales);
  }
  OPST_NOINLINE bool bytes_finite() const {
    V not_finite = V::zero();  // 0 * x is NaN where x is Inf or NaN, and 0 elsewhere
    for (int64_t key = 0; key < tile_.count; ++key) {
      const int64_t columns = kScaled ? 1 : q_.value_head_dim;  // of i8 one scale tells of all
      for (int64_t d = 0; d < columns; d += kLanes) not_finite = simd::fma(value(key, d), V::zero(), not_finite);
    }
    return simd::hsum(not_finite) == 0;
  }

  // scores[i][j] = q_i . k_j for R rows from `first` on and all keys of the tile.
  template <int R>
  OPST_NOINLINE void score_rows(int64_t first, S* scores, int64_t stride) const {
    const S* q = static_cast<const S*>(q_.query) + first * q_.query_stride;
    score_few_rows<V, R>(tile_, first == 0, scores, stride,
                         [&](const auto& keys, auto& acc) OPST_INLINE_LAMBDA { add_products<R>(q, keys, acc); });
  }
  // acc[i * kKeys + c] += q_i . k_c, in one partial sum per lane.
  template <int R, int kKeys>
  OPST_INLINE void add_products(const S* q, const int64_t (&keys)[kKeys], V (&acc)[kLanes]) const {
    const int64_t head_dim = q_.head_dim, q_stride = q_.query_stride;
    const int64_t whole = head_dim / kLanes * kLanes, rest = head_dim - whole;
    const T* key_rows[kKeys];
    OPST_UNROLL for (int c = 0; c < kKeys; ++c) key_rows[c] = at(tile_.key_rows, keys[c]);
    // Some vectors of numbers from d on of each key, in groups those of group g; scale(k, c, d, g): key c's numbers as
    // floats.
    const auto add = [&](auto vectors, int64_t d, int64_t g, const auto& load, const auto& scale) OPST_INLINE_LAMBDA {
      constexpr int N = vectors;
      V rows[R][N];
      OPST_UNROLL for (int i = 0; i < R; ++i) load(q + i * q_stride + d, rows[i]);
      OPST_UNROLL for (int c = 0; c < kKeys; ++c) {
        V numbers[N];
        load(simd::number_at(key_rows[c], d), numbers);
        OPST_UNROLL for (int n = 0; n < N; ++n) {
          const V k = scale(numbers[n], c, d + n * kLanes, g);
          OPST_UNROLL for (int i = 0; i < R; ++i) acc[i * kKeys + c] = simd::fma(rows[i][n], k, acc[i * kKeys + c]);
        }
      }
    };
    const auto load_all = [](const auto* p, auto& v) OPST_INLINE_LAMBDA { simd::load_stored<V>(p, v); };
    const auto load_rest = [&](const auto* p, auto& v) OPST_INLINE_LAMBDA { v[0] = simd::load_stored_n<V>(p, rest); };
    const auto add_all = [&](int64_t group_size, const auto& scale, const auto& scale_rest) OPST_INLINE_LAMBDA {
      constexpr std::integral_constant<int, 1> one;
      for (int64_t d = 0, g = 0; d < whole; ++g) {
        const int64_t end = whole - d > group_size ? d + group_size : whole;
        if constexpr (simd::kIsFloat8<T>) {
          for (; d + 2 * kLanes <= end; d += 2 * kLanes) add(std::integral_constant<int, 2>(), d, g, load_all, scale);
        }
        for (; d < end; d += kLanes) add(one, d, g, load_all, scale);
      }
      if (rest > 0) add(one, whole, 0, load_rest, scale_rest);
    };
    if constexpr (kGroups) {
      const RowGroups& groups = tile_.key_groups;
      const auto by_lane = [&](V k, int c, int64_t d, int64_t) OPST_INLINE_LAMBDA {
        return scaled(k, groups, keys[c], d, simd::clamp_lanes<V>(head_dim - d));
      };
      const auto by_group = [&](V k, int c, int64_t, int64_t g)
                                OPST_INLINE_LAMBDA { return in_group(k, groups, keys[c], g); };
      if (share_scales(groups, head_dim))
        add_all(groups.size, by_group, by_lane);
      else
        add_all(head_dim, by_lane, by_lane);
    } else {
      const auto as_it_is = [](V k, int, int64_t, int64_t) OPST_INLINE_LAMBDA { return k; };
      const auto from_offset = [&](V k, int c, int64_t, int64_t)
                                   OPST_INLINE_LAMBDA { return k + V::set1(tile_.key_offsets[keys[c]]); };
      if (kScaled && tile_.key_offsets != nullptr)
        add_all(head_dim, from_offset, from_offset);
      else
        add_all(head_dim, as_it_is, as_it_is);
    }
  }

  // O_i = alpha_i O_i + sum over `keys` of p_ij v_j for R rows.
  template <int R>
  OPST_NOINLINE void weigh_rows(const S* p, int64_t stride, const S* alpha, RowKeys keys, S* out, int64_t out_stride,
                                bool fetches) const {
    const int64_t length = q_.value_head_dim;
    Fetching fetching(fetches ? tile_.with_values : RowsToFetch(), tile_.count);
    const bool apart = kGroups && !share_scales(tile_.value_groups, length);
    for_columns<V, R>(length, apart, [&](auto vectors, int64_t column, int64_t n) OPST_INLINE_LAMBDA {
      constexpr int C = vectors;
      weigh_columns<R, C>(p, stride, alpha, keys, column, n, out + column, out_stride, fetching);
    });
  }
  // Of C vectors of columns, `n` lanes of each.
  template <int R, int C>
  OPST_INLINE void weigh_columns(const S* p, int64_t stride, const S* alpha, RowKeys keys, int64_t column, int64_t n,
                                 S* out, int64_t out_stride, Fetching& fetching) const {
    const void* const* value_rows = tile_.value_rows;
    V acc[R][C];
    OPST_UNROLL for (int i = 0; i < R; ++i) {
      OPST_UNROLL for (int c = 0; c < C; ++c) acc[i][c] =
          V::load(out + i * out_stride + c * kLanes) * V::set1(alpha[i]);
    }
    int64_t group[C];  // of each vector; not of those that groups cut
    if constexpr (kGroups) {
      for (int c = 0; c < C; ++c) group[c] = (column + c * kLanes) / tile_.value_groups.size;
    }
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      const T* values = simd::number_at(at(value_rows, j), column);
      if (column == 0) fetching.after_row();
      V v[C];
      if constexpr (C > 1)
        simd::load_stored<V>(values, v);
      else
        v[0] = simd::load_stored_n<V>(values, n);
      if (kScaled && tile_.value_offsets != nullptr) {
        OPST_UNROLL for (int c = 0; c < C; ++c) v[c] = v[c] + V::set1(tile_.value_offsets[j]);
      }
      OPST_UNROLL for (int c = 0; c < C; ++c) {
        if constexpr (kGroups) {
          // Several vectors at a time come only where lanes share scales.
          const bool lane_by_lane = C == 1 && !share_scales(tile_.value_groups, q_.value_head_dim);
          v[c] = lane_by_lane ? scaled(v[c], tile_.value_groups, j, column, n)
                              : in_group(v[c], tile_.value_groups, j, group[c]);
        }
      }
      OPST_UNROLL for (int i = 0; i < R; ++i) {
        const V pi = V::set1(p[i * stride + j]);
        OPST_UNROLL for (int c = 0; c < C; ++c) acc[i][c] = simd::fma(pi, v[c], acc[i][c]);
      }
    }
    OPST_UNROLL for (int i = 0; i < R; ++i) {
      OPST_UNROLL for (int c = 0; c < C; ++c) acc[i][c].store(out + i * out_stride + c * kLanes);
    }
  }

  const QueryBlock& q_;
  const KvTile& tile_;
};

}  // namespace opst::OPST_ISA_NS::attention

// AtOnce: the sink of a block that sees all its keys in one tile.
//
// Computes   O = (P V) / rowsum(P), in the registers of the second product, written to the output from there
// Memory     no accumulators, but for rows that see nothing, or non-finite values beside hidden ones
// Numerics   as finish.h: one factor per row
//
// Meanwhile rows of another head are fetched, which the worker attends next: a slice beside each register tile's
// products, in time for the next block, and never so much that loads queue up.
#pragma once

#include "attention/finish.h"
#include "attention/forward.h"

namespace opst::OPST_ISA_NS::attention {

template <class P>
class AtOnce {
 public:
  using V = typename P::V;
  using S = typename V::Scalar;
  static constexpr bool kOnly = true;
  static constexpr int kLanes = V::kLanes, kTileRows = P::kTileRows;
  template <int kVecs>
  static OPST_INLINE auto product_for(int rows) {
    return tile::scaled_product_for<P, kVecs>(rows);
  }

  OPST_INLINE AtOnce(const FinishRows& finish, const RowsAhead (&ahead)[3]) : f_(finish), ahead_(ahead) {}

  template <class Source>
  OPST_INLINE void weigh(Source& source, const QueryBlock& q, const Scores<S>& s, const S*) const {
    S scale[(kTileRows + kLanes - 1) / kLanes * kLanes];
    const bool some_empty = find_scales(q, s.rt, scale);
    const int64_t out_stride = f_.out.row_stride();
    S* out = static_cast<S*>(f_.out.data) + (f_.first_row + s.rt.first) * out_stride;
    source.template weigh<AtOnce>(s, scale, out, out_stride);
    for (int64_t i = 0; some_empty && i < s.rt.rows; ++i) {  // 0 * Inf among their values
      if (simd::hsum(V::load(sums_of(q, s.rt) + i * kLanes)) != 0) continue;
      for (int64_t d = 0; d < q.value_head_dim; d += kLanes) V::zero().store(out + i * out_stride + d);
    }
  }
  // By way of accumulators.
  template <class Source>
  OPST_INLINE void weigh_by_key(const Source& source, const QueryBlock& q, const KvTile& tile, const Scores<S>& s,
                                const S*) const {
    const S zeros[kTileRows] = {};
    if (s.span.width == 0) {
      empty_rows<V>(q, s.rt.first, s.rt.rows);
    } else {
      S* acc = static_cast<S*>(q.state.acc) + s.rt.first * q.acc_stride;
      for (int64_t i = 0; i < s.rt.rows * q.acc_stride; i += kLanes) V::zero().store(acc + i);
      attention::weigh_by_key(source, q, tile, s, zeros);
    }
    Finish<V>::finish_some(f_, s.rt.first, s.rt.first + s.rt.rows);
  }

  // Fetches slice `part` of `parts`.
  OPST_INLINE void fetch(int which, int64_t part, int64_t parts) const {
    const RowsAhead& a = ahead_[which];
    const int64_t end = a.rows * (part + 1) / parts;
    for (int64_t r = a.rows * part / parts; r < end; ++r) {
      for (int64_t b = 0; b < a.row_bytes; b += 64) __builtin_prefetch(a.data + r * a.stride_bytes + b);
    }
  }

 private:
  static OPST_INLINE const S* sums_of(const QueryBlock& q, RowTile rt) {
    return static_cast<const S*>(q.state.sums) + rt.first * kLanes;
  }
  // Returns whether some row has seen no key, or may have: a look at lanes beyond the rows costs nothing.
  OPST_INLINE bool find_scales(const QueryBlock& q, RowTile rt, S* scale) const {
    bool some_empty = false;
    if (f_.writes_statistics() || f_.sinks != nullptr) {
      for (int i = 0; i < rt.rows; ++i) {
        S weight;
        const auto end = Finish<V>::end_row(f_, rt.first + i, &weight);
        scale[i] = end.scale;
        some_empty |= end.empty;
      }
      return some_empty;
    }
    OPST_UNROLL for (int i = 0; i < kTileRows; i += kLanes) {
      const V sum = OnlineSoftmax<P>::sums_of(sums_of(q, rt), i, rt.rows);
      const auto none = sum == V::zero();
      simd::select(none, V::zero(), V::set1(1) / (sum * V::set1(static_cast<S>(f_.keep_prob)))).store(scale + i);
      some_empty |= simd::any(none);
    }
    return some_empty;
  }

  const FinishRows& f_;
  const RowsAhead (&ahead_)[3];  // keys, queries, values
};

template <class Source>
void attend_at_once(const QueryBlock& q, const KvTile& tile, const FinishRows& finish, const RowsAhead (&ahead)[3]) {
  attend_with<Source>(q, &tile, 1, AtOnce<typename Source::Product>(finish, ahead));
}

}  // namespace opst::OPST_ISA_NS::attention

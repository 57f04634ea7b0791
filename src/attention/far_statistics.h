// FarStatistics: maxima and sums of exp2(c (S - max)) taken anew, tile by tile, where scores are so large
// (BackwardPack::kFar) that what forward saved, rounded to f32, says too little about exp. Only the task that packs the
// block, in its worker's memory.
#pragma once

#include "attention/backward_scores.h"

namespace opst::OPST_ISA_NS::attention {

template <class P>
struct FarStatistics : BackwardScores<P> {
  using F = BackwardScores<P>;
  using F::kLanes, F::accumulators;
  using typename F::S, typename F::V;

  // max and sum join what they hold.
  static void add_statistics(const GradBlock& b, const GradTile& t, void* max, void* sum) {
    const V c = V::set1(static_cast<S>(b.exponent_scale));
    const char* prefetch = b.prefetch;
    const RowTiles row_tiles = F::tiles_of(b.queries);
    for (int64_t i = 0; i < row_tiles.count(); ++i) {
      const RowTile rows = row_tiles[i];
      const KeySpan span = F::span_of(b, t, rows);
      if (span.width == 0) continue;
      const S* scores = F::template score<false>(b, t, rows, span, prefetch).scores;
      for (int64_t r = 0; r < rows.rows; ++r) {
        const S* row = scores + r * b.scores_stride;
        S* row_max = accumulators(max) + rows.first + r;
        S* row_sum = accumulators(sum) + rows.first + r;
        V top = V::set1(*row_max);
        for (int64_t j = 0; j < span.width; j += kLanes) top = simd::max(top, V::load(row + j));
        const S new_max = simd::hmax(top);
        const V origin = V::set1(new_max == -__builtin_inff() ? S(0) : new_max);
        V sums = simd::exp2((V::set1(*row_max) - origin) * c) * V::set1(*row_sum / kLanes);
        for (int64_t j = 0; j < span.width; j += kLanes) sums = sums + simd::exp2((V::load(row + j) - origin) * c);
        *row_max = new_max;
        *row_sum = simd::hsum(sums);
      }
    }
  }
  static void keep_statistics(const QueryRows& q, const void* max, const void* sum) {
    for (int64_t r = 0; r < q.rows; ++r) {
      if (accumulators(q.weight)[r] == 0) continue;
      const S total = static_cast<const S*>(sum)[r];
      accumulators(q.origin)[r] = static_cast<const S*>(max)[r];
      accumulators(q.reference)[r] = 0;
      accumulators(q.weight)[r] = total == 0 ? S(0) : 1 / total;
      if (!F::is_finite(accumulators(q.origin)[r]) || !F::is_finite(total)) *q.finite = false;
    }
  }
};

}  // namespace opst::OPST_ISA_NS::attention

// BackwardSums: what P and dS of a block against a tile add to the gradients.
//
// Computes   dV += P^T dO;  dK += dS^T Q        over the rows of the block: the A operand is read by columns
//            dQ += dS K                         over the keys of the tile
//            targets += factor * dS             row by row, for the bias
// Loop nest  for each panel of 32 columns, for each 12 keys (dV, dK) or MR rows (dQ): a register tile of the sum, which
//            passes over the rows or keys that a partial tile hides from all of it
// Memory     P, dS and operands in L2; dV and dK the worker's, dQ the block's: in the turn of its tiles.
#pragma once

#include "attention/backward_forms.h"

namespace opst::OPST_ISA_NS::attention {

template <class P>
struct BackwardSums : BackwardForms<P> {
  using F = BackwardForms<P>;
  using F::accumulators, F::kLanes, F::kPanel, F::kStep, F::kTileRows;
  using typename F::Columns, typename F::S, typename F::Span, typename F::V, typename F::Word;

  // Spans of all register tiles of a block against one KV tile.
  static constexpr int kMaxRowTiles = 4096 / kTileRows + 1;
  struct TileSpans {
    int64_t count = 0;
    int32_t begin[kMaxRowTiles], end[kMaxRowTiles];
  };

  // acc[key] += sum over rows of A[row][key] * B[row].
  static OPST_INLINE void add_to_keys(const GradBlock& b, const GradTile& t, const TileSpans& spans, const void* a,
                                      const Columns& from, void* acc, int64_t acc_stride, const char*& prefetch) {
    const RowTiles key_tiles(t.count, kTileRows), row_tiles = F::tiles_of(b.queries);
    const auto add = [&](auto vectors, int64_t column) OPST_INLINE_LAMBDA {
      constexpr int kVectors = decltype(vectors)::kCount;
      const Word* panel = from.panel(column);
      const int64_t ldb = from.stride(column);
      for (int64_t k = 0; k < key_tiles.count(); ++k) {
        const RowTile keys = key_tiles[k];
        int64_t first = 0, end = b.queries.rows;
        if (b.partial) {
          int64_t low = 0, high = spans.count;
          const auto apart = [&](int64_t i) OPST_INLINE_LAMBDA {
            return spans.end[i] <= keys.first || spans.begin[i] >= keys.first + keys.rows;
          };
          while (low < high && apart(low)) ++low;
          while (low < high && apart(high - 1)) --high;
          if (low == high) continue;
          first = row_tiles[low].first;
          const RowTile last = row_tiles[high - 1];
          end = last.first + last.rows;
        }
        const int64_t from_word = first / kStep, depth = tile::words<P>(end) - from_word;
        tile::accumulate_transposed_for<P, kVectors>(keys.rows)(
            depth, static_cast<const Word*>(a) + from_word * b.scores_stride + keys.first, b.scores_stride,
            panel + from_word * ldb, ldb, accumulators(acc) + keys.first * acc_stride + column, acc_stride, prefetch);
        prefetch += depth / 2 * 64;
      }
    };
    F::for_panels(from, add);
  }

  // dQ += dS K.
  static OPST_INLINE void add_to_queries(const GradBlock& b, const GradTile& t) {
    const BackwardSizes& sizes = b.sizes;
    const Columns keys = F::columns(t.key_columns, sizes.query_stride, t.key_columns, t.count, sizes.head_dim);
    const RowTiles row_tiles = F::tiles_of(b.queries);
    const int64_t stride = b.scores_stride / kStep;
    const char* prefetch = static_cast<const char*>(t.keys);
    const auto add = [&](auto vectors, int64_t column) OPST_INLINE_LAMBDA {
      constexpr int kVectors = decltype(vectors)::kCount;
      const int64_t ldb = keys.stride(column);
      for (int64_t i = 0; i < row_tiles.count(); ++i) {
        const RowTile rows = row_tiles[i];
        const Span span = F::span_of(b, t, rows);
        if (span.width == 0) continue;
        const int64_t first = span.begin / kStep, depth = tile::words<P>(span.end) - first;
        tile::accumulate_for<P, kVectors>(rows.rows)(
            depth, static_cast<const Word*>(b.grad_scores) + rows.first * stride + first, stride,
            keys.panel(column) + first * ldb, ldb,
            accumulators(b.queries.grad_query) + rows.first * sizes.acc_stride + column, sizes.acc_stride, prefetch);
      }
    };
    F::for_panels(keys, add);
  }

  static void add_grad_bias(const GradBlock& b, const GradTile& t, void* const* targets, int64_t first_target,
                            int64_t stride, double factor) {
    const V f = V::set1(static_cast<S>(factor));
    const RowTiles row_tiles = F::tiles_of(b.queries);
    for (int64_t i = 0; i < row_tiles.count(); ++i) {
      const RowTile rows = row_tiles[i];
      const Span span = F::span_of(b, t, rows);
      for (int64_t r = rows.first; r < rows.first + rows.rows && span.width > 0; ++r) {
        const S* ds = static_cast<const S*>(b.bias_grads) + r * b.scores_stride;
        S* target = accumulators(targets[r]) + (t.first_key - first_target) * stride;
        V total = V::zero();
        for (int64_t j = span.begin; j < span.end; j += kLanes) {
          const int64_t n = simd::clamp_lanes<V>(span.end - j);
          const V x = V::load_n(ds + j, n) * f;
          if (stride == 1) {
            (V::load_n(target + j, n) + x).store_n(target + j, n);
          } else if (stride == 0) {
            total = total + x;
          } else {
            S lanes[kLanes];
            x.store(lanes);
            for (int64_t k = 0; k < n; ++k) target[(j + k) * stride] += lanes[k];
          }
        }
        if (stride == 0) *target += simd::hsum(total);
      }
    }
  }
};

}  // namespace opst::OPST_ISA_NS::attention

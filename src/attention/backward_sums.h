// BackwardSums, and VisiblePairs in their place: what P and dS of a block against a tile add to the gradients.
//
// Computes   dV += P^T dO;  dK += dS^T Q        over the rows of the block: the A operand is read by columns
//            dQ += dS K                         over the keys of the tile
//            targets += factor * dS             row by row, for the bias
// Loop nest  for each panel of 32 columns, for each 12 keys (dV, dK) or MR rows (dQ): a register tile of the sum, which
//            passes over the rows or keys that a partial tile hides from all of it
// Numerics   backward.h has why VisiblePairs adds the visible pairs alone, one by one. Slow: such inputs went wrong
//            elsewhere.
// Memory     P, dS and operands in L2; dV and dK the worker's, dQ the block's: in the turn of its tiles.
#pragma once

#include "attention/backward_forms.h"
#include "attention/stacked_rows.h"

namespace opst::OPST_ISA_NS::attention {

template <class P>
struct BackwardSums : BackwardForms<P> {
  using F = BackwardForms<P>;
  using F::accumulators, F::kLanes, F::kPanel, F::kStep, F::kTileRows;
  using typename F::Columns, typename F::Ops, typename F::S, typename F::V, typename F::Word;

  // add(number of vectors, as a type, column) for each panel of columns.
  template <class Add>
  static OPST_INLINE void for_panels(const Columns& from, const Add& add) {
    for (int64_t column = 0; column < from.length; column += kPanel) {
      if (from.wide(column)) {
        add(std::integral_constant<int, P::kTileVecs>(), column);
      } else {
        add(std::integral_constant<int, 1>(), column);
      }
    }
  }

  // acc[key] += sum over rows of A[row][key] * B[row]. `spans`: of the block's register tiles.
  static OPST_INLINE void add_to_keys(const GradBlock& b, const GradTile& t, const RowKeys* spans, const void* a,
                                      const Columns& from, void* acc, int64_t acc_stride, const char*& prefetch) {
    const RowTiles key_tiles(t.count, kTileRows), row_tiles = F::tiles_of(b.queries);
    const auto add = [&](auto vectors, int64_t column) OPST_INLINE_LAMBDA {
      constexpr int kVectors = decltype(vectors)::value;
      const Word* panel = from.panel(column);
      const int64_t ldb = from.stride(column);
      for (int64_t k = 0; k < key_tiles.count(); ++k) {
        const RowTile keys = key_tiles[k];
        int64_t first = 0, end = b.queries.rows;
        if (b.partial) {
          int64_t low = 0, high = row_tiles.count();
          const auto apart = [&](int64_t i) OPST_INLINE_LAMBDA {
            return spans[i].end <= keys.first || spans[i].begin >= keys.first + keys.rows;
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
    for_panels(from, add);
  }

  // dQ += dS K.
  static OPST_INLINE void add_to_queries(const GradBlock& b, const GradTile& t) {
    const BackwardSizes& sizes = b.sizes;
    const Columns keys = F::columns(t.key_columns, sizes.query_stride, t.key_columns, t.count, sizes.head_dim);
    const RowTiles row_tiles = F::tiles_of(b.queries);
    const int64_t stride = b.scores_stride / kStep;
    const char* prefetch = static_cast<const char*>(t.keys);
    const auto add = [&](auto vectors, int64_t column) OPST_INLINE_LAMBDA {
      constexpr int kVectors = decltype(vectors)::value;
      const int64_t ldb = keys.stride(column);
      for (int64_t i = 0; i < row_tiles.count(); ++i) {
        const RowTile rows = row_tiles[i];
        const KeySpan span = F::span_of(b, t, rows);
        if (span.width == 0) continue;
        const int64_t first = span.begin / kStep, depth = tile::words<P>(span.end) - first;
        tile::accumulate_for<P, kVectors>(rows.rows)(
            depth, static_cast<const Word*>(b.grad_scores) + rows.first * stride + first, stride,
            keys.panel(column) + first * ldb, ldb,
            accumulators(b.queries.grad_query) + rows.first * sizes.acc_stride + column, sizes.acc_stride, prefetch);
      }
    };
    for_panels(keys, add);
  }

  static void add_grad_bias(const GradBlock& b, const GradTile& t, void* const* targets, int64_t first_target,
                            int64_t stride, double factor) {
    const V f = V::set1(static_cast<S>(factor));
    const RowTiles row_tiles = F::tiles_of(b.queries);
    for (int64_t i = 0; i < row_tiles.count(); ++i) {
      const RowTile rows = row_tiles[i];
      const KeySpan span = F::span_of(b, t, rows);
      for (int64_t r = rows.first; r < rows.first + rows.rows && span.width > 0; ++r) {
        const S* ds = static_cast<const S*>(b.bias_grads) + r * b.scores_stride;
        S* target = accumulators(targets[r]) + (t.first_key - first_target) * stride;
        V total = V::zero();
        for (int64_t j = span.begin; j < span.end; j += kLanes) {
          const int64_t n = simd::clamp_lanes<V>(span.end - j);
          const V x = V::load_n(ds + j, n) * f;
          if (stride == 0) {
            total = total + x;
          } else {
            store_elements(Ops::load_strided(target + j * stride, stride, n) + x, target, stride, j, n);
          }
        }
        if (stride == 0) *target += simd::hsum(total);
      }
    }
  }
};

// The same sums over visible pairs.
template <class P>
struct VisiblePairs : BackwardForms<P> {
  using F = BackwardForms<P>;
  using F::accumulators, F::kLanes, F::kPanel, F::kStep;
  using typename F::Columns, typename F::Ops, typename F::S, typename F::V, typename F::Word;

  static OPST_INLINE bool needed(const GradBlock& b, const GradTile& t) {
    const bool some_hidden = b.partial || (b.rules != nullptr && b.rules->hides());
    return some_hidden && !(t.keys_finite && *b.queries.finite);
  }
  // Element (row, key) of a column form.
  static OPST_INLINE S number(const void* column_form, int64_t stride, int64_t row, int64_t key) {
    const Word* word = static_cast<const Word*>(column_form) + row / kStep * stride + key;
    if constexpr (kStep == 1)
      return *word;
    else
      return __builtin_bit_cast(S, row % 2 == 0 ? *word << 16 : *word & 0xffff0000u);
  }
  static OPST_INLINE void add_row(S factor, const void* row_form, int64_t stride, int64_t row, int64_t length, S* acc) {
    for (int64_t d = 0; d < length; d += kLanes) {
      simd::fma(V::set1(factor), F::elements(row_form, stride, row, d), V::load(acc + d)).store(acc + d);
    }
  }

  // Whether row r sees column j of the tile; `kept`: and dropout keeps the weight.
  static OPST_INLINE bool sees(const GradBlock& b, const GradTile& t, int64_t r, int64_t j, bool kept) {
    if (accumulators(b.queries.weight)[r] == 0) return false;
    const RowKeys row = F::keys_of(b, t).of_row(r);
    if (b.rules == nullptr) return j >= row.begin && j < row.end;
    ScoreRules rules = *b.rules;
    if (!kept) rules.keep_below = 0, rules.drop_mask = nullptr;
    // A bias of -inf hides no NaN score, whose dS is NaN; of a key that it does hide dS is 0.
    rules.has_bias = false;
    if (!Ops::contributes(rules, rules.rows[r], t.first_key + j, t.first_key + row.begin, t.first_key + row.end)) {
      return false;
    }
    if (!b.rules->has_bias || !Ops::bias_hides(*b.rules, b.rules->rows[r], t.first_key + j)) return true;
    const S ds = number(b.grad_score_columns, b.scores_stride, r, j);
    return ds != ds;
  }
  static bool sees_key(const ScoreRules& all, int64_t r, int64_t begin, int64_t end) {
    ScoreRules rules = all;
    rules.keep_below = 0, rules.drop_mask = nullptr;
    const int64_t first = rules.prefix > 0 ? 0 : begin, last = end > rules.prefix ? end : rules.prefix;
    for (int64_t key = first; key < last; ++key) {
      if (Ops::contributes(rules, rules.rows[r], key, begin, end)) return true;
    }
    return false;
  }

  static OPST_NOINLINE void add_to_keys(const GradBlock& b, const GradTile& t) {
    const BackwardSizes& z = b.sizes;
    for (int64_t r = 0; r < b.queries.rows; ++r) {
      for (int64_t j = 0; j < t.count; ++j) {
        if (t.grad_value != nullptr && sees(b, t, r, j, true)) {
          add_row(number(b.probability_columns, b.scores_stride, r, j), b.queries.grad_out, z.value_stride, r,
                  z.value_head_dim, accumulators(t.grad_value) + j * z.value_acc_stride);
        }
        if (t.grad_key != nullptr && sees(b, t, r, j, false)) {
          add_row(number(b.grad_score_columns, b.scores_stride, r, j), b.queries.query, z.query_stride, r, z.head_dim,
                  accumulators(t.grad_key) + j * z.acc_stride);
        }
      }
    }
  }

  static OPST_NOINLINE void add_to_queries(const GradBlock& b, const GradTile& t) {
    const BackwardSizes& z = b.sizes;
    const Columns keys = F::columns(t.key_columns, z.query_stride, t.key_columns, t.count, z.head_dim);
    for (int64_t r = 0; r < b.queries.rows; ++r) {
      S* acc = accumulators(b.queries.grad_query) + r * z.acc_stride;
      for (int64_t j = 0; j < t.count; ++j) {
        if (!sees(b, t, r, j, false)) continue;
        const V ds = V::set1(number(b.grad_score_columns, b.scores_stride, r, j));
        for (int64_t d = 0; d < z.head_dim; d += kLanes) {
          const int64_t column = d / kPanel * kPanel;
          const Word* at = keys.panel(column) + j / kStep * keys.stride(column) + (d - column);
          simd::fma(ds, tile::element_of_words<V, kStep>(at, kLanes, j), V::load(acc + d)).store(acc + d);
        }
      }
    }
  }
};

}  // namespace opst::OPST_ISA_NS::attention

// VisiblePairs: the sums of backward_sums.h over visible pairs alone, one by one.
//
// Computes   dV[j] += P[r][j] dO[r];  dK[j] += dS[r][j] Q[r];  dQ[r] += dS[r][j] K[j]       where row r sees key j
// Why        Hidden pairs have P = dS = 0, but where K of the tile, or Q or dO of the block, holds a NaN or Inf, 0 * NaN
//            would spoil sums of rows and keys that do not see it. Slow: such inputs went wrong elsewhere.
// Memory     as in BackwardSums
#pragma once

#include "attention/backward_forms.h"

namespace opst::OPST_ISA_NS::attention {

template <class P>
struct VisiblePairs : BackwardForms<P> {
  using F = BackwardForms<P>;
  using F::accumulators, F::kLanes, F::kPanel, F::kStep;
  using typename F::Columns, typename F::Ops, typename F::S, typename F::Span, typename F::V, typename F::Word;

  static OPST_INLINE bool needed(const GradBlock& b, const GradTile& t) {
    const bool some_hidden = b.partial || (b.rules != nullptr && b.rules->hides());
    return some_hidden && !(t.keys_finite && *b.queries.finite);
  }
  static OPST_INLINE S widened(uint32_t bits) {
    S x = 0;
    __builtin_memcpy(&x, &bits, sizeof(bits));
    return x;
  }
  // Element (row, key) of a column form.
  static OPST_INLINE S number(const void* column_form, int64_t stride, int64_t row, int64_t key) {
    const Word* word = static_cast<const Word*>(column_form) + row / kStep * stride + key;
    if constexpr (kStep == 1)
      return *word;
    else
      return widened(row % 2 == 0 ? *word << 16 : *word & 0xffff0000u);
  }
  static OPST_INLINE V element(const void* column_form, int64_t stride, int64_t row, int64_t key) {
    return V::set1(number(column_form, stride, row, key));
  }
  static OPST_INLINE void add_row(V factor, const void* row_form, int64_t stride, int64_t row, int64_t length, S* acc) {
    for (int64_t d = 0; d < length; d += kLanes) {
      simd::fma(factor, F::elements(row_form, stride, row, d), V::load(acc + d)).store(acc + d);
    }
  }

  // Whether row r sees column j of the tile; `kept`: and dropout keeps the weight.
  static OPST_INLINE bool sees(const GradBlock& b, const GradTile& t, int64_t r, int64_t j, bool kept) {
    if (accumulators(b.queries.weight)[r] == 0) return false;
    const Span row = b.partial ? F::columns_of_row(b, t, r) : Span{0, t.count, 0};
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
  // Whether row r sees any key of the block's sequence, whatever dropout keeps.
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
          add_row(element(b.probability_columns, b.scores_stride, r, j), b.queries.grad_out, z.value_stride, r,
                  z.value_head_dim, accumulators(t.grad_value) + j * z.value_acc_stride);
        }
        if (t.grad_key != nullptr && sees(b, t, r, j, false)) {
          add_row(element(b.grad_score_columns, b.scores_stride, r, j), b.queries.query, z.query_stride, r, z.head_dim,
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
        const V ds = element(b.grad_score_columns, b.scores_stride, r, j);
        for (int64_t d = 0; d < z.head_dim; d += kLanes) {
          const int64_t column = d / kPanel * kPanel;
          const Word* at = keys.panel(column) + j / kStep * keys.stride(column) + (d - column);
          simd::fma(ds, key_of_words(at, j), V::load(acc + d)).store(acc + d);
        }
      }
    }
  }
  static OPST_INLINE V key_of_words(const Word* at, int64_t key) {
    if constexpr (kStep == 1) {
      return V::load(at);
    } else {
      const simd::Bf16Words pairs = simd::Bf16Words::load(at);
      return key % 2 == 0 ? pairs.low() : pairs.high();
    }
  }
};

}  // namespace opst::OPST_ISA_NS::attention

// BackwardScores: S and dP of a register tile of query rows against a tile of keys, and P and dS of them.
//
// Computes   S = Q K^T;  dP = dO V^T;  P = exp2(c (S - origin) - reference) * weight;  dS = P (dP - delta)
// Shapes     Q [rows, head_dim], dO [rows, value_head_dim], K^T and V^T panels; S, dP, P, dS [rows][span.width]
// Memory     S and dP stay in L1: where P and dS will be, or in `raw` for pairs of bf16, whose P and dS are rounded
//            into column forms (and dS into the row form, too). One task, in its worker's memory.
// Numerics   Hidden pairs and padding: S = -inf, P = dS = 0. Rules of the rows: score_ops.h.
#pragma once

#include "attention/backward_forms.h"

namespace opst::OPST_ISA_NS::attention {

template <class P>
struct BackwardScores : BackwardForms<P> {
  using F = BackwardForms<P>;
  using F::kLanes, F::kPanel, F::kStep, F::kTileRows, F::accumulators, F::keys_of;
  using typename F::Ops, typename F::S, typename F::V, typename F::Word;

  // S and dP of a register tile, rows b.scores_stride apart.
  struct Tile {
    S* scores;
    S* grads;
  };
  // S, by the rules of the rows, and dP, where wanted: with S = -inf and dP = 0 where a structure hides.
  template <bool kGrads>
  static OPST_INLINE Tile score(const GradBlock& b, const GradTile& t, RowTile rt, KeySpan span,
                                const char*& prefetch) {
    const QueryRows& q = b.queries;
    const BackwardSizes& z = b.sizes;
    const int64_t at = rt.first * b.scores_stride + span.begin;
    const Tile to = kStep == 1 ? Tile{accumulators(b.probability_columns) + at, accumulators(b.grad_scores) + at}
                               : Tile{accumulators(b.raw), accumulators(b.raw) + kTileRows * b.scores_stride};
    multiply(b, t, rt, span, q.query, z.query_stride, z.head_dim, t.keys, to.scores, prefetch);
    if constexpr (kGrads) {
      multiply(b, t, rt, span, q.grad_out, z.value_stride, z.value_head_dim, t.values, to.grads, prefetch);
    }
    if (b.rules != nullptr) {
      shape(b, t, rt, span, to.scores, accumulators(b.cap_slopes));
    } else if (b.partial || span.end < span.begin + span.width) {
      hide(b, t, rt, span, to.scores, to.grads);
    }
    return to;
  }

  static OPST_INLINE void multiply(const GradBlock& block, const GradTile& t, RowTile rt, KeySpan span,
                                   const void* rows, int64_t row_stride, int64_t length, const void* panels, S* out,
                                   const char*& prefetch) {
    const int64_t depth = tile::words<P>(length);
    const Word* a = static_cast<const Word*>(rows) + rt.first * row_stride;
    const Word* b = static_cast<const Word*>(panels) + span.begin * depth;
    const auto full = tile::product_for<P, P::kTileVecs>(rt.rows);
    int64_t j = 0;
    for (; j + kPanel <= span.width; j += kPanel) {
      full(depth, a, row_stride, b + j * depth, kPanel, out + j, block.scores_stride, prefetch);
      prefetch += depth / 4 * 64;
    }
    if (j < span.width) {  // one vector, of a whole panel or of a last one that is only as wide
      const int64_t ldb = t.count - (span.begin + j) > kLanes ? kPanel : kLanes;
      tile::product_for<P, 1>(rt.rows)(depth, a, row_stride, b + j * depth, ldb, out + j, block.scores_stride,
                                       prefetch);
    }
  }

  // Hidden pairs, and padding: score -inf, dP = 0.
  static OPST_NOINLINE void hide(const GradBlock& b, const GradTile& t, RowTile rt, KeySpan span, S* scores, S* grads) {
    const V hidden = V::set1(-__builtin_inff()), zero = V::zero();
    for (int64_t i = 0; i < rt.rows; ++i) {
      const RowKeys seen = keys_of(b, t).of_row(rt.first + i);
      const int64_t begin = seen.begin - span.begin, end = seen.end - span.begin;
      const auto hide_in = [&](S* row, int64_t j, V instead) OPST_INLINE_LAMBDA {
        const V x = simd::blend_n(simd::clamp_lanes<V>(end - j), V::load(row + j), instead);
        simd::blend_n(simd::clamp_lanes<V>(begin - j), instead, x).store(row + j);
      };
      for (int64_t j = 0; j < span.width; j += kLanes) {
        if (begin <= j && j + kLanes <= end) continue;
        hide_in(scores + i * b.scores_stride, j, hidden);
        hide_in(grads + i * b.scores_stride, j, zero);
      }
    }
  }

  struct Pair {
    V p, ds;
  };
  struct Row {
    V origin, minus_reference, weight, delta;
  };
  static OPST_INLINE Row row_of(const QueryRows& q, int64_t r) {
    return {V::set1(accumulators(q.origin)[r]), V::set1(-accumulators(q.reference)[r]),
            V::set1(accumulators(q.weight)[r]), V::set1(accumulators(q.delta)[r])};
  }
  static OPST_INLINE V probability(V score, V c, const Row& row) {
    return exponential<P>(simd::fma(score - row.origin, c, row.minus_reference)) * row.weight;
  }

  // A vector of S and one of dP -> a vector of P and one of dS.
  struct Plain {
    V c;
    OPST_INLINE Pair operator()(V score, V grad, const Row& row, int64_t, int64_t, int) const {
      const V p = probability(score, c, row);
      return {p, p * (grad - row.delta)};
    }
  };
  // The same by the rules of the rows: a dropped pair has weight 0 in dV and dP = 0, a softcap multiplies dS by its
  // derivative, a hidden pair has dS = 0.
  struct Ruled {
    V c, kept_scale;
    bool drops, caps;
    const S* slopes;       // [rows of the register tile][stride]
    S* bias_grads;         // null, or likewise
    const KeepBits* bits;  // of the rows at hand
    OPST_INLINE Pair operator()(V score, V grad, const Row& row, int64_t first, int64_t column, int which) const {
      const V zero = V::zero();
      const int64_t at = first + column;
      V p = probability(score, c, row), kept = p;
      if (drops) {
        const uint32_t keep = bits[which].at(column);
        kept = simd::select_bits(keep, p, zero);
        grad = simd::select_bits(keep, grad * kept_scale, zero);
      }
      V ds = p * (grad - row.delta);
      ds = simd::select(score == V::set1(-__builtin_inff()), zero, ds);
      if (bias_grads != nullptr) ds.store(bias_grads + at);
      if (caps) ds = ds * V::load(slopes + at);
      return {kept, ds};
    }
  };

  // S of a register tile by the rules; hidden pairs -inf.
  static OPST_NOINLINE void shape(const GradBlock& b, const GradTile& t, RowTile rt, KeySpan span, S* scores,
                                  S* slopes) {
    const int64_t origin = t.first_key + span.begin, count = span.end - span.begin;
    for (int64_t i = 0; i < rt.rows; ++i) {
      const int64_t r = rt.first + i;
      S* s = scores + i * b.scores_stride;
      if (accumulators(b.queries.weight)[r] == 0) {
        for (int64_t j = 0; j < span.width; j += kLanes) V::set1(-__builtin_inff()).store(s + j);
        for (int64_t j = 0; j < span.width; j += kLanes) V::zero().store(slopes + i * b.scores_stride + j);
        continue;
      }
      const RowRules& row = b.rules->rows[r];
      Ops::shape(*b.rules, row, origin, count, span.width, s, slopes + i * b.scores_stride);
      const RowKeys seen = keys_of(b, t).of_row(r);
      Ops::hide(*b.rules, row, origin, count, span.width, seen.begin - span.begin, seen.end - span.begin, s);
    }
  }
  static OPST_INLINE Ruled ruled(const GradBlock& b, RowTile rt, KeySpan span, const KeepBits* bits) {
    const int64_t at = rt.first * b.scores_stride + span.begin;
    S* bias_grads = b.bias_grads != nullptr ? accumulators(b.bias_grads) + at : nullptr;
    const V c = V::set1(static_cast<S>(b.exponent_scale)), kept_scale = V::set1(static_cast<S>(1 / b.keep_prob));
    return {c, kept_scale, b.rules->drops(), b.rules->softcap > 0, accumulators(b.cap_slopes), bias_grads, bits};
  }
  static OPST_INLINE void find_kept(const GradBlock& b, const GradTile& t, int64_t r, KeySpan span, KeepBits& bits) {
    if (b.rules == nullptr || !b.rules->drops()) return;
    Ops::keep(*b.rules, b.rules->rows[r], t.first_key + span.begin, span.end - span.begin, bits);
  }

  // S -> P and dP -> dS, in place.
  template <class Rule>
  static OPST_NOINLINE void differentiate_rows(const GradBlock& b, const GradTile& t, RowTile rt, KeySpan span,
                                               S* scores, S* grads, const Rule& rule, KeepBits* bits) {
    for (int64_t i = 0; i < rt.rows; ++i) {
      const Row row = row_of(b.queries, rt.first + i);
      find_kept(b, t, rt.first + i, span, *bits);
      const int64_t first = i * b.scores_stride;
      S* p = scores + first;
      S* ds = grads + first;
      const auto at = [&](int64_t j)
                          OPST_INLINE_LAMBDA { return rule(V::load(p + j), V::load(ds + j), row, first, j, 0); };
      const auto put = [&](int64_t j, const Pair& x) OPST_INLINE_LAMBDA {
        x.p.store(p + j);
        x.ds.store(ds + j);
      };
      int64_t j = 0;
      for (; j + 2 * kLanes <= span.width; j += 2 * kLanes) {
        const Pair x = at(j), y = at(j + kLanes);
        put(j, x);
        put(j + kLanes, y);
      }
      if (j < span.width) put(j, at(j));
    }
  }

#if defined(__AVX512BF16__)
  // S, dP -> P by columns, dS by rows and by columns, rounded to bf16. Two rows at a time, whose elements make the
  // words of the column forms.
  template <class Rule>
  static OPST_NOINLINE void differentiate_pairs(const GradBlock& b, const GradTile& t, RowTile rt, KeySpan span,
                                                const S* scores, const S* grads, const Rule& rule, KeepBits* bits) {
    for (int64_t i = 0; i < rt.rows; i += 2) {
      const int64_t r = rt.first + i;
      const bool has_odd = i + 1 < rt.rows;
      const Row even = row_of(b.queries, r), odd = row_of(b.queries, has_odd ? r + 1 : r);
      find_kept(b, t, r, span, bits[0]);
      if (has_odd) find_kept(b, t, r + 1, span, bits[1]);
      const int64_t first = i * b.scores_stride, next = has_odd ? b.scores_stride : 0;
      uint32_t* p_columns = static_cast<uint32_t*>(b.probability_columns) + r / 2 * b.scores_stride + span.begin;
      uint32_t* ds_columns = static_cast<uint32_t*>(b.grad_score_columns) + r / 2 * b.scores_stride + span.begin;
      bf16* ds_even = static_cast<bf16*>(b.grad_scores) + r * b.scores_stride + span.begin;
      bf16* ds_odd = ds_even + next;
      for (int64_t j = 0; j < span.width; j += 2 * kLanes) {
        V ds[2][2];
        OPST_UNROLL for (int half = 0; half < 2; ++half) {
          const int64_t at = j + half * kLanes, from = first + at;
          Pair x = {V::zero(), V::zero()}, y = x;
          if (at < span.width) {
            x = rule(V::load(scores + from), V::load(grads + from), even, first, at, 0);
            if (has_odd)
              y = rule(V::load(scores + from + next), V::load(grads + from + next), odd, first + next, at, 1);
          }
          simd::store_interleaved_bf16_fast(x.p, y.p, p_columns + at);
          simd::store_interleaved_bf16_fast(x.ds, y.ds, ds_columns + at);
          ds[0][half] = x.ds;
          ds[1][half] = y.ds;
        }
        if (has_odd) simd::store_bf16_fast(ds[1][0], ds[1][1], ds_odd + j);
        simd::store_bf16_fast(ds[0][0], ds[0][1], ds_even + j);
      }
    }
  }
#endif

  // P and dS of S and dP.
  static OPST_INLINE void differentiate(const GradBlock& b, const GradTile& t, RowTile rt, KeySpan span, Tile of,
                                        KeepBits* bits) {
    const auto by = [&](const auto& rule) OPST_INLINE_LAMBDA {
      if constexpr (kStep == 1) {
        differentiate_rows(b, t, rt, span, of.scores, of.grads, rule, bits);
      } else {
        differentiate_pairs(b, t, rt, span, of.scores, of.grads, rule, bits);
      }
    };
    if (b.rules == nullptr) {
      by(Plain{V::set1(static_cast<S>(b.exponent_scale))});
    } else {
      by(ruled(b, rt, span, bits));
    }
  }
};

}  // namespace opst::OPST_ISA_NS::attention

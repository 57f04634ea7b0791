// Attention backward for one block of query rows and one tile of keys: the tile computation.
//
// Computes   S = Q K^T
//            P = exp2(c (S - origin) - reference) * weight         the probabilities again, from what forward saved
//            dP = dO V^T
//            dS = P (dP - delta)                                   delta = rowsum(dO * O) - grad_lse
//            dV += P^T dO;  dK += dS^T Q;  dQ += dS K              softmax_scale is multiplied to dQ and dK at the end
//            c = |softmax_scale| log2(e), the sign is in Q; log2(e) where rules make S natural (score_ops.h)
// Shapes     Q, dQ  [rows, head_dim]         dO     [rows, value_head_dim]       S, P, dP, dS  [rows, keys]
//            K, dK  [keys, head_dim]         V, dV  [keys, value_head_dim]
// Loop nest  grad_tile     for each register tile of MR <= 12 rows             S and dP of its rows stay in L1
//                            for each panel of 32 keys                         S [MR, 32] = Q K^T
//                            for each panel of 32 keys                         dP [MR, 32] = dO V^T
//                            hide keys of partial tiles; P and dS, one pass
//                          for each panel of 32 columns, for each 12 keys      dV [12, 32] += P^T dO
//                          for each panel of 32 columns, for each 12 keys      dK [12, 32] += dS^T Q
//            grad_query    for each panel of 32 columns, for each MR rows      dQ [MR, 32] += dS K
// Memory     f32, avx512, head_dim 128; block_q 120 and block_kv 96, as planned for 1 MB of L2, which holds all of it:
//              of the tile     K^T and V^T panels   2 x [128][96]     48 KB each
//                              K rows               [96][144]         54 KB
//                              dK and dV            2 x [96][128]     48 KB each
//              of the block    Q and dO             2 x [120][144]    68 KB each
//                              dQ                   [120][128]        60 KB
//                              P and dS             2 x [120][112]    53 KB each
// Numerics   Five products, all accumulators f32 (f64 for f64) in every storage type. P and dS are rounded to bf16 for
//            the pairwise product. A row of weight 0 takes no part: forward saw no key there, or saved an infinite
//            statistic. Hidden pairs have P = dS = 0. Where pairs are hidden and K of the tile, or Q or dO of the
//            block, holds a NaN or Inf, 0 * NaN would spoil the sums: the visible pairs are then added one by one.
// Source     Dao et al., FlashAttention (2022), appendix B.4, with the keys in the outer loop.
#pragma once

#include "attention/backward_kernels.h"
#include "attention/score_ops.h"
#include "simd/math.h"
#include "tile/gemm_accumulate.h"
#include "tile/pack.h"
#include "tile/row_tiles.h"

namespace opst::OPST_ISA_NS::attention {

using opst::attention::BackwardSizes;
using opst::attention::FinishGradient;
using opst::attention::GradBlock;
using opst::attention::GradTile;
using opst::attention::PackKeys;
using opst::attention::PackQueries;
using opst::attention::QueryRows;
using opst::attention::StackedRows;
using tile::RowTile;
using tile::RowTiles;

template <class P>
struct Backward {
  using V = typename P::V;
  using S = typename V::Scalar;
  using Word = typename P::Word;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kPanel = P::kTileVecs * kLanes;
  static constexpr int kStep = P::kStep;
  static constexpr int kTileRows = P::kTileRows;
  using Ops = ScoreOps<V>;

  static OPST_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
  static OPST_INLINE S* accumulators(void* base) { return static_cast<S*>(base); }

  // The query rows of a block by register tiles, in whole words of the column forms.
  static OPST_INLINE RowTiles tiles_of(const QueryRows& q) { return RowTiles(q.rows, kTileRows, kStep); }

  // Keys of the KV tile that some row of a register tile sees: columns [begin, end), begin at the start of a panel, and
  // `width`, the columns from begin on in whole vectors.
  struct Span {
    int64_t begin = 0, end = 0, width = 0;
  };
  static OPST_INLINE Span span_of(const GradBlock& b, const GradTile& t, RowTile rt) {
    int64_t low = 0, high = t.count;
    if (b.partial) {
      low = t.count, high = 0;
      for (int64_t r = rt.first; r < rt.first + rt.rows; ++r) {
        const Span row = columns_of_row(b, t, r);
        if (row.begin >= row.end) continue;
        low = smaller(low, row.begin);
        high = row.end > high ? row.end : high;
      }
      if (const int64_t below = b.rules == nullptr ? 0 : b.rules->prefix - t.first_key; below > 0) {
        low = 0;
        high = high > below ? high : smaller(below, t.count);
      }
      if (low >= high) return {};
    }
    const int64_t begin = low / kPanel * kPanel;
    return {begin, high, (high - begin + kLanes - 1) / kLanes * kLanes};
  }
  static OPST_INLINE Span columns_of_row(const GradBlock& b, const GradTile& t, int64_t r) {
    const int64_t begin = b.visible_begin[r] - t.first_key, end = b.visible_end[r] - t.first_key;
    return {begin < 0 ? 0 : begin, smaller(end, t.count), 0};
  }

  // A matrix as B operand: panels of columns.
  struct Columns {
    const Word* base;
    int64_t row_stride;  // of the row form
    int64_t rows;        // words in a column of a value panel; unused where the row form serves
    int64_t length;

    OPST_INLINE bool wide(int64_t column) const { return length - column > kLanes; }
    OPST_INLINE const Word* panel(int64_t column) const { return kStep == 1 ? base + column : base + column * rows; }
    OPST_INLINE int64_t stride(int64_t column) const {
      return kStep == 1 ? row_stride : wide(column) ? kPanel : kLanes;
    }
  };
  static OPST_INLINE Columns columns(const void* row_form, int64_t row_stride, const void* column_form, int64_t rows,
                                     int64_t length) {
    return {static_cast<const Word*>(kStep == 1 ? row_form : column_form), row_stride, tile::words<P>(rows), length};
  }

  // ---- S and dP, P and dS

  static OPST_INLINE void multiply(RowTile rt, Span span, const GradTile& t, const void* rows, int64_t row_stride,
                                   int64_t length, const void* panels, S* out, int64_t out_stride,
                                   const char*& prefetch) {
    const int64_t depth = tile::words<P>(length);
    const Word* a = static_cast<const Word*>(rows) + rt.first * row_stride;
    const Word* b = static_cast<const Word*>(panels) + span.begin * depth;
    const auto full = tile::product_for<P, P::kTileVecs>(rt.rows);
    int64_t j = 0;
    for (; j + kPanel <= span.width; j += kPanel) {
      full(depth, a, row_stride, b + j * depth, kPanel, out + j, out_stride, prefetch);
      prefetch += depth / 4 * 64;
    }
    if (j < span.width) {  // one vector, of a whole panel or of a last one that is only as wide
      const int64_t ldb = t.count - (span.begin + j) > kLanes ? kPanel : kLanes;
      tile::product_for<P, 1>(rt.rows)(depth, a, row_stride, b + j * depth, ldb, out + j, out_stride, prefetch);
    }
  }

  // Hidden pairs, and padding: score -inf, dP = 0.
  static OPST_NOINLINE void hide(const GradBlock& b, const GradTile& t, RowTile rt, Span span, S* scores, S* grads,
                                 int64_t stride) {
    const V hidden = V::set1(-__builtin_inff()), zero = V::zero();
    for (int64_t i = 0; i < rt.rows; ++i) {
      Span seen = {0, t.count, 0};
      if (b.partial) seen = columns_of_row(b, t, rt.first + i);
      const int64_t begin = seen.begin - span.begin, end = seen.end - span.begin;
      for (int64_t j = 0; j < span.width; j += kLanes) {
        if (begin <= j && j + kLanes <= end) continue;
        S* s = scores + i * stride + j;
        S* g = grads + i * stride + j;
        simd::blend_n(simd::clamp_lanes<V>(begin - j), hidden,
                      simd::blend_n(simd::clamp_lanes<V>(end - j), V::load(s), hidden))
            .store(s);
        simd::blend_n(simd::clamp_lanes<V>(begin - j), zero,
                      simd::blend_n(simd::clamp_lanes<V>(end - j), V::load(g), zero))
            .store(g);
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
    const V x = simd::fma(score - row.origin, c, row.minus_reference);
    if constexpr (kStep == 1)
      return simd::exp2_short(x) * row.weight;
    else
      return simd::exp2_bf16(x) * row.weight;
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
  static OPST_NOINLINE void shape(const GradBlock& b, const GradTile& t, RowTile rt, Span span, S* scores, S* slopes) {
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
      const int64_t begin = b.partial ? b.visible_begin[r] - origin : 0;
      const int64_t end = b.partial ? b.visible_end[r] - origin : count;
      Ops::hide(*b.rules, row, origin, count, span.width, begin, end, s);
    }
  }
  static OPST_INLINE Ruled ruled(const GradBlock& b, RowTile rt, Span span, const KeepBits* bits) {
    const ScoreRules& o = *b.rules;
    S* bias_grads = accumulators(b.bias_grads);
    if (bias_grads != nullptr) bias_grads += rt.first * b.scores_stride + span.begin;
    return {V::set1(static_cast<S>(b.exponent_scale)),
            V::set1(static_cast<S>(1 / b.keep_prob)),
            o.drops(),
            o.softcap > 0,
            static_cast<const S*>(b.cap_slopes),
            bias_grads,
            bits};
  }
  static OPST_INLINE void find_kept(const GradBlock& b, const GradTile& t, int64_t r, Span span, KeepBits& bits) {
    if (b.rules == nullptr || !b.rules->drops()) return;
    Ops::keep(*b.rules, b.rules->rows[r], t.first_key + span.begin, span.end - span.begin, bits);
  }

  // S -> P and dP -> dS, in place.
  template <class Rule>
  static OPST_NOINLINE void differentiate_rows(const GradBlock& b, const GradTile& t, RowTile rt, Span span, S* scores,
                                               S* grads, const Rule& rule, KeepBits* bits) {
    for (int64_t i = 0; i < rt.rows; ++i) {
      const Row row = row_of(b.queries, rt.first + i);
      find_kept(b, t, rt.first + i, span, *bits);
      const int64_t first = i * b.scores_stride;
      S* p = scores + first;
      S* ds = grads + first;
      int64_t j = 0;
      for (; j + 2 * kLanes <= span.width; j += 2 * kLanes) {
        const Pair x = rule(V::load(p + j), V::load(ds + j), row, first, j, 0);
        const Pair y = rule(V::load(p + j + kLanes), V::load(ds + j + kLanes), row, first, j + kLanes, 0);
        x.p.store(p + j);
        y.p.store(p + j + kLanes);
        x.ds.store(ds + j);
        y.ds.store(ds + j + kLanes);
      }
      if (j < span.width) {
        const Pair x = rule(V::load(p + j), V::load(ds + j), row, first, j, 0);
        x.p.store(p + j);
        x.ds.store(ds + j);
      }
    }
  }

#if defined(__AVX512BF16__)
  // S, dP -> P by columns, dS by rows and by columns, rounded to bf16. Two rows at a time, whose elements make the
  // words of the column forms.
  template <class Rule>
  static OPST_NOINLINE void differentiate_pairs(const GradBlock& b, const GradTile& t, RowTile rt, Span span,
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
      bf16* ds_even = grad_score_row(b, r) + span.begin;
      bf16* ds_odd = grad_score_row(b, has_odd ? r + 1 : r) + span.begin;
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
  static OPST_INLINE bf16* grad_score_row(const GradBlock& b, int64_t r) {
    return reinterpret_cast<bf16*>(static_cast<uint32_t*>(b.grad_scores) + r * (b.scores_stride / kStep));
  }
  template <class Rule>
  static OPST_INLINE void differentiate(const GradBlock& b, const GradTile& t, RowTile rt, Span span, S* scores,
                                        S* grads, const Rule& rule, KeepBits* bits) {
    if constexpr (kStep == 1) {
      differentiate_rows(b, t, rt, span, scores, grads, rule, bits);
    } else {
#if defined(__AVX512BF16__)
      differentiate_pairs(b, t, rt, span, scores, grads, rule, bits);
#endif
    }
  }

  // Columns [begin, end) of the column forms of P and dS become 0 for the rows of a register tile.
  static OPST_INLINE void clear(const GradBlock& b, RowTile rt, int64_t begin, int64_t end) {
    for (int64_t w = rt.first / kStep; w < tile::words<P>(rt.first + rt.rows); ++w) {
      S* p = reinterpret_cast<S*>(static_cast<Word*>(b.probability_columns) + w * b.scores_stride);
      S* ds = reinterpret_cast<S*>(static_cast<Word*>(b.grad_score_columns) + w * b.scores_stride);
      for (int64_t j = begin; j < end; j += kLanes) {
        V::zero().store(p + j);
        V::zero().store(ds + j);
      }
    }
  }

  // ---- Sums over rows: dV and dK

  // Spans of all register tiles of a block against one KV tile.
  static constexpr int kMaxRowTiles = 4096 / kTileRows + 1;
  struct TileSpans {
    int64_t count = 0;
    int32_t begin[kMaxRowTiles], end[kMaxRowTiles];
  };

  // acc[key] += sum over rows of A[row][key] * B[row].
  static OPST_INLINE void add_columns(const GradBlock& b, const GradTile& t, const TileSpans& spans, const void* a,
                                      const Columns& from, void* acc, int64_t acc_stride, const char*& prefetch) {
    const RowTiles key_tiles(t.count, kTileRows), row_tiles = tiles_of(b.queries);
    const auto add = [&](const auto& function_for, int64_t column) OPST_INLINE_LAMBDA {
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
        function_for(keys.rows)(depth, static_cast<const Word*>(a) + from_word * b.scores_stride + keys.first,
                                b.scores_stride, panel + from_word * ldb, ldb,
                                accumulators(acc) + keys.first * acc_stride + column, acc_stride, prefetch);
        prefetch += depth / 2 * 64;
      }
    };
    for (int64_t column = 0; column < from.length; column += kPanel) {
      if (from.wide(column)) {
        add([](int rows) { return tile::accumulate_transposed_for<P, P::kTileVecs>(rows); }, column);
      } else {
        add([](int rows) { return tile::accumulate_transposed_for<P, 1>(rows); }, column);
      }
    }
  }

  // Where S and dP of a register tile are computed.
  static OPST_INLINE S* tile_scores(const GradBlock& b, RowTile rows, Span span) {
    if constexpr (kStep == 1)
      return static_cast<S*>(b.probability_columns) + rows.first * b.scores_stride + span.begin;
    else
      return static_cast<S*>(b.raw);
  }
  static OPST_INLINE S* tile_grads(const GradBlock& b, RowTile rows, Span span) {
    if constexpr (kStep == 1)
      return static_cast<S*>(b.grad_scores) + rows.first * b.scores_stride + span.begin;
    else
      return static_cast<S*>(b.raw) + kTileRows * b.scores_stride;
  }

  static void add_statistics(const GradBlock& b, const GradTile& t, void* max, void* sum) {
    const V c = V::set1(static_cast<S>(b.exponent_scale));
    const char* prefetch = b.prefetch;
    const RowTiles row_tiles = tiles_of(b.queries);
    for (int64_t i = 0; i < row_tiles.count(); ++i) {
      const RowTile rows = row_tiles[i];
      const Span span = span_of(b, t, rows);
      if (span.width == 0) continue;
      S* scores = tile_scores(b, rows, span);
      S* grads = tile_grads(b, rows, span);
      multiply(rows, span, t, b.queries.query, b.sizes.query_stride, b.sizes.head_dim, t.keys, scores, b.scores_stride,
               prefetch);
      if (b.rules == nullptr)
        hide(b, t, rows, span, scores, grads, b.scores_stride);
      else
        shape(b, t, rows, span, scores, static_cast<S*>(b.cap_slopes));
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
      if (!is_finite(accumulators(q.origin)[r]) || !is_finite(total)) *q.finite = false;
    }
  }

  static void grad_tile(const GradBlock& b, const GradTile& t) {
    const BackwardSizes& sizes = b.sizes;
    const QueryRows& q = b.queries;
    const char* prefetch = b.prefetch;
    TileSpans spans;
    KeepBits bits[kStep];
    const RowTiles row_tiles = tiles_of(q);
    spans.count = row_tiles.count();
    const int64_t width = (t.count + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = 0; i < spans.count; ++i) {
      const RowTile rows = row_tiles[i];
      const Span span = span_of(b, t, rows);
      spans.begin[i] = static_cast<int32_t>(span.begin);
      spans.end[i] = static_cast<int32_t>(span.end);
      if (b.partial) {
        clear(b, rows, 0, span.begin);
        clear(b, rows, span.begin + span.width, width);
      }
      if (span.width == 0) continue;
      S* scores = tile_scores(b, rows, span);
      S* grads = tile_grads(b, rows, span);
      multiply(rows, span, t, q.query, sizes.query_stride, sizes.head_dim, t.keys, scores, b.scores_stride, prefetch);
      multiply(rows, span, t, q.grad_out, sizes.value_stride, sizes.value_head_dim, t.values, grads, b.scores_stride,
               prefetch);
      if (b.rules == nullptr) {
        if (b.partial || span.end < span.begin + span.width) hide(b, t, rows, span, scores, grads, b.scores_stride);
        differentiate(b, t, rows, span, scores, grads, Plain{V::set1(static_cast<S>(b.exponent_scale))}, bits);
      } else {
        shape(b, t, rows, span, scores, static_cast<S*>(b.cap_slopes));
        differentiate(b, t, rows, span, scores, grads, ruled(b, rows, span, bits), bits);
      }
    }
    if (pair_by_pair(b, t)) {
      add_visible_to_keys(b, t);
      return;
    }
    if (t.grad_value != nullptr) {
      add_columns(b, t, spans, b.probability_columns,
                  columns(q.grad_out, sizes.value_stride, q.grad_out_columns, q.rows, sizes.value_head_dim),
                  t.grad_value, sizes.value_acc_stride, prefetch);
    }
    if (t.grad_key != nullptr) {
      add_columns(b, t, spans, b.grad_score_columns,
                  columns(q.query, sizes.query_stride, q.query_columns, q.rows, sizes.head_dim), t.grad_key,
                  sizes.acc_stride, prefetch);
    }
  }

  // ---- Sums over keys: dQ

  static void grad_query(const GradBlock& b, const GradTile& t) {
    if (pair_by_pair(b, t)) {
      add_visible_to_queries(b, t);
      return;
    }
    const BackwardSizes& sizes = b.sizes;
    const Columns keys = columns(t.key_columns, sizes.query_stride, t.key_columns, t.count, sizes.head_dim);
    const RowTiles row_tiles = tiles_of(b.queries);
    const int64_t stride = b.scores_stride / kStep;
    const char* prefetch = static_cast<const char*>(t.keys);
    const auto add = [&](const auto& function_for, int64_t column) OPST_INLINE_LAMBDA {
      const int64_t ldb = keys.stride(column);
      for (int64_t i = 0; i < row_tiles.count(); ++i) {
        const RowTile rows = row_tiles[i];
        const Span span = span_of(b, t, rows);
        if (span.width == 0) continue;
        const int64_t first = span.begin / kStep, depth = tile::words<P>(span.end) - first;
        function_for(rows.rows)(depth, static_cast<const Word*>(b.grad_scores) + rows.first * stride + first, stride,
                                keys.panel(column) + first * ldb, ldb,
                                accumulators(b.queries.grad_query) + rows.first * sizes.acc_stride + column,
                                sizes.acc_stride, prefetch);
      }
    };
    for (int64_t column = 0; column < sizes.head_dim; column += kPanel) {
      if (keys.wide(column)) {
        add([](int rows) { return tile::accumulate_for<P, P::kTileVecs>(rows); }, column);
      } else {
        add([](int rows) { return tile::accumulate_for<P, 1>(rows); }, column);
      }
    }
  }

  // ---- Sums for the bias

  static void add_grad_bias(const GradBlock& b, const GradTile& t, void* const* targets, int64_t first_target,
                            int64_t stride, double factor) {
    const V f = V::set1(static_cast<S>(factor));
    const RowTiles row_tiles = tiles_of(b.queries);
    for (int64_t i = 0; i < row_tiles.count(); ++i) {
      const RowTile rows = row_tiles[i];
      const Span span = span_of(b, t, rows);
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

  // ---- The same sums over visible pairs alone

  static OPST_INLINE bool pair_by_pair(const GradBlock& b, const GradTile& t) {
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
  // kLanes elements of a row form.
  static OPST_INLINE V elements(const void* row_form, int64_t stride, int64_t row, int64_t d) {
    const Word* words_of_row = static_cast<const Word*>(row_form) + row * stride;
    if constexpr (kStep == 1)
      return V::load(words_of_row + d);
    else
      return V::load(reinterpret_cast<const bf16*>(words_of_row) + d);
  }
  static OPST_INLINE void add_row(V factor, const void* row_form, int64_t stride, int64_t row, int64_t length, S* acc) {
    for (int64_t d = 0; d < length; d += kLanes) {
      simd::fma(factor, elements(row_form, stride, row, d), V::load(acc + d)).store(acc + d);
    }
  }

  // Whether row r sees column j of the tile; `kept`: and dropout keeps the weight.
  static OPST_INLINE bool sees(const GradBlock& b, const GradTile& t, int64_t r, int64_t j, bool kept) {
    if (accumulators(b.queries.weight)[r] == 0) return false;
    const Span row = b.partial ? columns_of_row(b, t, r) : Span{0, t.count, 0};
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

  static OPST_NOINLINE void add_visible_to_keys(const GradBlock& b, const GradTile& t) {
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

  static OPST_NOINLINE void add_visible_to_queries(const GradBlock& b, const GradTile& t) {
    const BackwardSizes& z = b.sizes;
    const Columns keys = columns(t.key_columns, z.query_stride, t.key_columns, t.count, z.head_dim);
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

  // ---- Packing

  // A row as words, zeros up to `stride`. False where it is seen not to be finite: rows of pairs are looked at once
  // more when they become columns.
  template <class T>
  static OPST_INLINE bool copy_row(const T* row, int64_t dim_stride, int64_t length, double factor, Word* out,
                                   int64_t stride) {
    if constexpr ((sizeof(T) == 8) != (sizeof(S) == 8)) {  // f64 has f64 kernels only
      return true;
    } else {
      if (is_pair_type(row) && factor == 1 && dim_stride == 1) {
        T* elements = reinterpret_cast<T*>(out);
        __builtin_memcpy(elements, row, static_cast<size_t>(length) * sizeof(T));
        __builtin_memset(elements + length, 0, static_cast<size_t>(stride * kStep - length) * sizeof(T));
        return true;
      }
      const V f = V::set1(static_cast<S>(factor)), zero = V::zero();
      V not_finite = zero;
      for (int64_t d = 0; d < stride * kStep; d += kLanes) {
        const V x = d < length ? tile::load_row<V>(row, dim_stride, d, length) : zero;
        not_finite = simd::fma(x, zero, not_finite);
        store_words(x * f, out, d);
      }
      return simd::hsum(not_finite) == 0;
    }
  }
  static OPST_INLINE bool is_pair_type(const bf16*) { return kStep == 2; }
  static OPST_INLINE bool is_pair_type(const void*) { return false; }
  static OPST_INLINE void store_words(V x, Word* out, int64_t d) {
    if constexpr (kStep == 1)
      x.store(out + d);
    else  // exact: it was bf16, and the factor is a power of two
      x.store(reinterpret_cast<bf16*>(out) + d);
  }
  static OPST_INLINE bool copy_row(const StackedRows& from, int64_t offset, int64_t length, double factor, Word* out,
                                   int64_t stride) {
    switch (from.dtype) {
      case DType::f32:
        return copy_row(static_cast<const float*>(from.data) + offset, from.dim_stride, length, factor, out, stride);
      case DType::bf16:
        return copy_row(static_cast<const bf16*>(from.data) + offset, from.dim_stride, length, factor, out, stride);
      case DType::f16:
        return copy_row(static_cast<const f16*>(from.data) + offset, from.dim_stride, length, factor, out, stride);
      default:
        return copy_row(static_cast<const double*>(from.data) + offset, from.dim_stride, length, factor, out, stride);
    }
  }

  // delta[r] = sum of packed row r times the same row of O, for rows that share a register tile. Where O is of a type
  // that the product takes, it is dP's own arithmetic: a row that sees one key alone then has dS = 0 exactly.
  static constexpr int kDeltaRows = kTileRows < kLanes ? kTileRows : kLanes;
  template <class T>
  static OPST_NOINLINE void find_deltas(const void* const* out_rows, int64_t dim_stride, int rows, int64_t length,
                                        const Word* packed, int64_t stride, S* delta) {
    if constexpr ((sizeof(T) == 8) != (sizeof(S) == 8)) {  // f64 has f64 kernels only
      return;
    } else if constexpr (kStep == 2 && sizeof(T) != 2) {
      for (int r = 0; r < rows; ++r) delta[r] = dot_row<T>(out_rows[r], dim_stride, length, packed + r * stride);
    } else {
      alignas(64) Word panel[(kMaxDim + kStep - 1) / kStep * kLanes];
      alignas(64) S products[kDeltaRows * kLanes];
      tile::pack_columns<P, T>({out_rows, dim_stride}, rows, length, panel);
      tile::product_for<P, 1>(rows)(tile::words<P>(length), packed, stride, panel, kLanes, products, kLanes,
                                    reinterpret_cast<const char*>(packed));
      for (int r = 0; r < rows; ++r) delta[r] = products[r * kLanes + r];
    }
  }
  static constexpr int kMaxDim = 768 + 2 * kLanes;
  template <class T>
  static OPST_INLINE S dot_row(const void* row, int64_t dim_stride, int64_t length, const Word* packed) {
    V sum = V::zero();
    for (int64_t d = 0; d < length; d += kLanes) {
      const V x = tile::load_row<V>(static_cast<const T*>(row), dim_stride, d, length);
      sum = simd::fma(elements(packed, 0, 0, d), x, sum);
    }
    return simd::hsum(sum);
  }
  static OPST_INLINE void find_deltas(const PackQueries& from, const BackwardSizes& z, const QueryRows& to, int64_t r,
                                      S* delta) {
    const int rows = static_cast<int>(smaller(kDeltaRows, to.rows - r));
    const int64_t size = from.out.dtype == DType::f64 ? 8 : from.out.dtype == DType::f32 ? 4 : 2;
    const void* pointers[kDeltaRows];
    for (int i = 0; i < rows; ++i) {
      pointers[i] = static_cast<const char*>(from.out.data) + offset_of(from.out, from.first_row + r + i) * size;
    }
    const Word* packed = static_cast<const Word*>(to.grad_out) + r * z.value_stride;
    const int64_t dim_stride = from.out.dim_stride, length = z.value_head_dim;
    switch (from.out.dtype) {
      case DType::f32:
        return find_deltas<float>(pointers, dim_stride, rows, length, packed, z.value_stride, delta);
      case DType::bf16:
        return find_deltas<bf16>(pointers, dim_stride, rows, length, packed, z.value_stride, delta);
      case DType::f16:
        if constexpr (kStep == 1)
          find_deltas<f16>(pointers, dim_stride, rows, length, packed, z.value_stride, delta);
        else
          for (int i = 0; i < rows; ++i) {
            delta[i] = dot_row<f16>(pointers[i], dim_stride, length, packed + i * z.value_stride);
          }
        return;
      default:
        return find_deltas<double>(pointers, dim_stride, rows, length, packed, z.value_stride, delta);
    }
  }

  static OPST_INLINE int64_t offset_of(const StackedRows& t, int64_t row) {
    return row / t.group * t.seq_stride + row % t.group * t.head_stride;
  }
  static OPST_INLINE S statistic(const StackedRows& t, int64_t row) {
    return static_cast<const S*>(t.data)[offset_of(t, row)];
  }
  static OPST_INLINE bool is_finite(S x) { return x - x == 0; }

  static void pack_queries(const PackQueries& from, const BackwardSizes& z, const QueryRows& to) {
    bool all_finite = true;
    *to.far = false;
    for (int64_t r = 0; r < to.rows; ++r) {
      const int64_t row = from.first_row + r;
      Word* query = static_cast<Word*>(to.query) + r * z.query_stride;
      Word* grad_out = static_cast<Word*>(to.grad_out) + r * z.value_stride;
      S* acc = accumulators(to.grad_query) + r * z.acc_stride;
      if (to.grad_query != nullptr) {
        for (int64_t d = 0; d < z.acc_stride; d += kLanes) V::zero().store(acc + d);
      }
      S origin = 0, reference = 0, weight = 0;
      if (takes_part(from, row, r)) {
        const bool has_max = from.max.data != nullptr;
        const S top = statistic(has_max ? from.max : from.lse, row);
        const double sum = has_max ? static_cast<double>(statistic(from.sum, row)) : 1;
        const double c = static_cast<double>(static_cast<S>(from.exponent_scale));
        const double exact = static_cast<double>(top) / from.score_scale * c;
        double rest = 0;
        if (exact > -kFar && exact < kFar) {  // the reference is rounded; its rest goes into the weight
          reference = static_cast<S>(exact);
          rest = (static_cast<double>(reference) - exact) * 0x1.62e42fefa39efp-1;
        } else {
          origin = static_cast<S>(static_cast<double>(top) / from.score_scale);
          *to.far = true;
        }
        weight = static_cast<S>(__builtin_exp(rest) / sum);
        const bool finite_query =
            copy_row(from.query, offset_of(from.query, row), z.head_dim, from.query_factor, query, z.query_stride);
        const bool finite_grad =
            copy_row(from.grad_out, offset_of(from.grad_out, row), z.value_head_dim, 1, grad_out, z.value_stride);
        all_finite =
            all_finite && finite_query && finite_grad && is_finite(weight) && is_finite(reference) && is_finite(origin);
      } else {
        for (int64_t d = 0; d < z.query_stride * kStep; d += kLanes) store_words(V::zero(), query, d);
        for (int64_t d = 0; d < z.value_stride * kStep; d += kLanes) store_words(V::zero(), grad_out, d);
      }
      accumulators(to.origin)[r] = origin;
      accumulators(to.reference)[r] = reference;
      accumulators(to.weight)[r] = weight;
    }
    for (int64_t first = 0; first < to.rows; first += kDeltaRows) {
      S deltas[kDeltaRows];
      find_deltas(from, z, to, first, deltas);
      for (int64_t r = first; r < to.rows && r < first + kDeltaRows; ++r) {
        S delta = deltas[r - first];
        if (from.grad_lse.data != nullptr) delta -= statistic(from.grad_lse, from.first_row + r);
        if (accumulators(to.weight)[r] == 0) delta = 0;
        accumulators(to.delta)[r] = delta;
        all_finite = all_finite && is_finite(delta);
      }
    }
    if constexpr (kStep == 2) {
      const bool finite_query =
          to_columns(to.query, z.query_stride, to.rows, z.head_dim, from.pointers, to.query_columns);
      const bool finite_grad =
          to_columns(to.grad_out, z.value_stride, to.rows, z.value_head_dim, from.pointers, to.grad_out_columns);
      all_finite = all_finite && finite_query && finite_grad;
    }
    *to.finite = all_finite;
  }
  // In exponents of 2; a score of 710. Beyond it a statistic rounded to f32 says too little about exp.
  static constexpr double kFar = 1024;
  // Whether forward may have seen a key of the row, and saved statistics of it that are finite or NaN.
  static OPST_INLINE bool takes_part(const PackQueries& from, int64_t row, int64_t r) {
    if (from.visible_begin[r] >= from.visible_end[r]) return false;
    const S inf = __builtin_inff();
    const auto infinite = [&](S x) { return x == inf || x == -inf; };
    if (from.max.data == nullptr) return !infinite(statistic(from.lse, row));
    const S sum = statistic(from.sum, row);
    return !infinite(statistic(from.max, row)) && !infinite(sum) && sum != 0;
  }
  static OPST_INLINE bool to_columns(const void* row_form, int64_t stride, int64_t rows, int64_t length,
                                     const void** pointers, void* out) {
    for (int64_t r = 0; r < rows; ++r) pointers[r] = static_cast<const Word*>(row_form) + r * stride;
    return tile::pack_values<P, bf16>({pointers, 1}, rows, length, static_cast<Word*>(out));
  }

  template <class T>
  static bool pack_keys(const PackKeys& from, const BackwardSizes& z) {
    const tile::Rows<T> keys = {from.key_rows, from.key_dim_stride}, values = {from.value_rows, from.value_dim_stride};
    tile::pack_columns<P, T>(keys, from.count, z.head_dim, static_cast<Word*>(from.keys));
    tile::pack_columns<P, T>(values, from.count, z.value_head_dim, static_cast<Word*>(from.values));
    if constexpr (kStep == 2) {
      return tile::pack_values<P, T>(keys, from.count, z.head_dim, static_cast<Word*>(from.key_columns));
    } else {
      bool finite = true;
      for (int64_t j = 0; j < from.count; ++j) {
        finite = copy_row(keys.row(j), keys.dim_stride, z.head_dim, 1,
                          static_cast<Word*>(from.key_columns) + j * z.query_stride, z.query_stride) &&
                 finite;
      }
      return finite;
    }
  }

  // ---- Outputs

  static void finish_rows(const FinishGradient& f) {
    for (int64_t r = 0; r < f.rows; ++r) {
      const S* acc = static_cast<const S*>(f.acc) + r * f.acc_stride;
      const int64_t offset = offset_of(f.out, f.first_row + r);
      switch (f.out.dtype) {
        case DType::f32:
          write_row(f, acc, static_cast<float*>(f.out.data) + offset);
          break;
        case DType::bf16:
          write_row(f, acc, static_cast<bf16*>(f.out.data) + offset);
          break;
        case DType::f16:
          write_row(f, acc, static_cast<f16*>(f.out.data) + offset);
          break;
        default:
          write_row(f, acc, static_cast<double*>(f.out.data) + offset);
          break;
      }
    }
  }
  template <class T>
  static OPST_INLINE void write_row(const FinishGradient& f, const S* acc, T* out) {
    if constexpr ((sizeof(S) == 8) == (sizeof(T) == 8)) {
      const V factor = V::set1(static_cast<S>(f.factor));
      for (int64_t d = 0; d < f.length; d += kLanes) {
        const V x = V::load(acc + d) * factor;
        const int64_t n = simd::clamp_lanes<V>(f.length - d);
        if (f.out.dim_stride == 1) {
          n == kLanes ? x.store(out + d) : x.store_n(out + d, n);
        } else {
          T lanes[kLanes];
          x.store(lanes);
          for (int64_t j = 0; j < n; ++j) out[(d + j) * f.out.dim_stride] = lanes[j];
        }
      }
    }
  }
};

}  // namespace opst::OPST_ISA_NS::attention

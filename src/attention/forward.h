// Attention forward for one block of query rows: the tile computation.
//
// Computes   S = Q K^T;  m = rowmax(S);  P = exp2(c (S - m));  O = P V / rowsum(P)
//            c = |softmax_scale| log2(e), the sign is in Q
// Shapes     Q [rows, head_dim]; K [keys, head_dim], V [keys, value_head_dim] in tiles; O [rows, value_head_dim]
// Loop nest  for each KV tile                              one after the other, K and V of a tile stay in L2
//              for each register tile of MR <= 12 rows     its scores stay in L1 from first to last
//                for each panel of 32 keys                 scores [MR, 32] = Q K^T, running row maxima (gemm_tile.h)
//                hide keys of partial tiles
//                online softmax of [MR, keys] scores, in place
//                for each panel of 32 columns              O [MR, 32] = alpha O + P V
//              Where all keys are one tile, the last line is O [MR, 32] = (P V) / rowsum(P), written to the outputs.
// Memory     f32, avx512, head_dim 128; block_q 120 and block_kv 256, as planned for 1 MB of L2:
//              of a register tile    scores     [12][272]          13 KB   L1
//                                    Q and O    2 x [12][128]      12 KB   L1
//              of the block          O          [120][128]         60 KB   L2
//              of the KV tile        K and V    2 x [256][128]    256 KB   L2; the next tile is prefetched meanwhile
// Numerics   S, O and the sums in f32 (f64 for f64). Exponents are c (S - m): exactly 0 where a row has its maximum, so
//            that a row which sees one key has P = 1 and O = V to the bit. A row that has seen no key has m = -inf, and
//            contributes exp2(-inf) = 0. P is rounded to bf16 for the pairwise product, the sums are not. exp2 results
//            below 2^-126 are 0. NaN scores make the row's sum NaN, hence the whole row. Hidden keys of a partial tile
//            have P = 0; where such a tile holds a non-finite value, 0 * value would be NaN, so its rows are summed one
//            by one over their visible keys.
// Source     Dao et al., FlashAttention (2022), algorithm 1; Dao, FlashAttention-2 (2023), section 3.1 (one division at
//            the end).
#pragma once

#include "attention/kernels.h"
#include "attention/score_ops.h"
#include "simd/math.h"
#include "tile/gemm_tile.h"
#include "tile/pack.h"
#include "tile/row_tiles.h"

namespace opst::OPST_ISA_NS::attention {

using opst::attention::FinishRows;
using opst::attention::KvTile;
using opst::attention::QueryBlock;
using opst::attention::RowsAhead;
using opst::attention::RowState;
using opst::attention::StackedRows;
using tile::RowTile;
using tile::RowTiles;

// Keys of a tile that some row of a register tile sees: columns [begin, end) of the tile, begin at the start of a
// panel. Scores are computed for `width` columns from begin on, whole vectors. All rows see the columns
// [common_begin, common_end), counted from begin; the others are hidden from some row, or padding. Of the panels that
// all rows see, columns [whole_begin, whole_end), `score` takes the maxima; of the others `hide` does.
struct KeySpan {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t width = 0;
  int64_t common_begin = 0;
  int64_t common_end = 0;
  int64_t whole_begin = 0;
  int64_t whole_end = 0;

  OPST_INLINE bool ragged() const { return common_begin > 0 || common_end < width; }
  // Whether columns [from, to) are a panel that all rows see.
  OPST_INLINE bool whole(int64_t from, int64_t to) const { return from >= whole_begin && to <= whole_end; }
};

// The columns of a tile that row r of the block sees; none where end <= begin.
struct RowKeys {
  int64_t begin, end;
};
OPST_INLINE RowKeys keys_of_row(const QueryBlock& q, const KvTile& tile, int64_t r) {
  const int64_t begin = q.visible_begin[r] - tile.first_key, end = q.visible_end[r] - tile.first_key;
  return {begin < 0 ? 0 : begin, end > tile.count ? tile.count : end};
}

template <class P>
struct Forward {
  using V = typename P::V;
  using S = typename V::Scalar;
  using Word = typename P::Word;
  using Ops = ScoreOps<V>;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kTileRows = P::kTileRows, kTileVecs = P::kTileVecs;
  static constexpr int kPanel = kTileVecs * kLanes;

  static OPST_INLINE S* row_of(void* base, int64_t row, int64_t stride) { return static_cast<S*>(base) + row * stride; }

  static OPST_INLINE KeySpan key_span(const QueryBlock& q, RowTile rt, const KvTile& tile) {
    int64_t low = 0, high = tile.count, common_low = 0, common_high = tile.count;
    if (tile.partial) {
      const RowKeys first = keys_of_row(q, tile, rt.first), last = keys_of_row(q, tile, rt.first + rt.rows - 1);
      // Both ends only grow from row to row, unless there is a prefix, which every row sees.
      low = first.begin, high = last.end, common_low = last.begin, common_high = first.end;
      if (q.rules != nullptr && q.rules->prefix > 0) with_prefix(q, rt, tile, low, high, common_low, common_high);
      if (low >= high) return {};
    }
    KeySpan span;
    span.begin = low / kPanel * kPanel;
    span.end = high;
    span.width = (high - span.begin + kLanes - 1) / kLanes * kLanes;
    span.common_begin = common_low - span.begin;
    span.common_end = common_high - span.begin;
    const int64_t whole_begin = span.common_begin <= 0 ? 0 : (span.common_begin + kPanel - 1) / kPanel * kPanel;
    const int64_t whole_end = span.common_end >= span.width ? span.width : span.common_end / kPanel * kPanel;
    span.whole_begin = whole_begin < span.width ? whole_begin : span.width;
    span.whole_end = whole_end < span.whole_begin ? span.whole_begin : whole_end;
    return span;
  }
  static OPST_NOINLINE void with_prefix(const QueryBlock& q, RowTile rt, const KvTile& tile, int64_t& low,
                                        int64_t& high, int64_t& common_low, int64_t& common_high) {
    low = tile.count, high = 0, common_low = 0, common_high = tile.count;
    if (q.rules->prefix > tile.first_key) low = 0, high = q.rules->prefix - tile.first_key;
    if (high > tile.count) high = tile.count;
    for (int64_t r = rt.first; r < rt.first + rt.rows; ++r) {
      const auto [begin, end] = keys_of_row(q, tile, r);
      common_low = begin > common_low ? begin : common_low;
      common_high = end < common_high ? end : common_high;
      if (begin >= end) continue;  // sees nothing here
      low = begin < low ? begin : low;
      high = end > high ? end : high;
    }
  }

  // scores[r][0 .. width) = Q K^T; row_max[r] = the maximum of whole panels in each lane, taken while they are in
  // registers: a pass of its own over scores that fill L1 costs 1.5 cycles per 16 scores.
  // With rules, masks and biases are fetched meanwhile: their rows lie pages apart, and nothing else foresees them (a
  // bool mask of 4096 x 4096: 1.33 times the time of no mask without fetching, 1.05 times with; f32: 1.26 and 1.08).
  template <bool kRules = false>
  static OPST_INLINE void score(const QueryBlock& q, RowTile rt, const KvTile& tile, KeySpan span, S* scores,
                                int64_t stride, S* row_max, const char*& prefetch) {
    const int64_t depth = tile::words<P>(q.head_dim);
    const Word* a = static_cast<const Word*>(q.query) + rt.first * q.query_stride;
    const Word* b = static_cast<const Word*>(tile.keys) + span.begin * depth;
    for (int i = 0; i < rt.rows; ++i) V::set1(-__builtin_inff()).store(row_max + i * kLanes);
    alignas(64) S unused[kTileRows * kLanes];
    if (span.whole_end - span.whole_begin < span.width) {
      for (int i = 0; i < rt.rows; ++i) V::zero().store(unused + i * kLanes);
    }
    const auto maxima_to = [&](int64_t from, int64_t to)
                               OPST_INLINE_LAMBDA { return span.whole(from, to) ? row_max : unused; };
    const auto full = tile::product_with_max_for<P, kTileVecs>(rt.rows);
    int64_t j = 0;
    for (; j + kPanel <= span.width; j += kPanel) {
      if constexpr (kRules) {
        const int64_t key = tile.first_key + span.begin + j;
        for (int i = 0; i < rt.rows; ++i) Ops::prefetch(*q.rules, q.rules->rows[rt.first + i], key);
      }
      full(depth, a, q.query_stride, b + j * depth, kPanel, scores + j, stride, maxima_to(j, j + kPanel), prefetch);
      prefetch += depth / 4 * 64;
    }
    if (j < span.width) {  // one vector, of a whole panel or of a last one that is only as wide
      const int64_t ldb = tile.count - (span.begin + j) > kLanes ? kPanel : kLanes;
      tile::product_with_max_for<P, 1>(rt.rows)(depth, a, q.query_stride, b + j * depth, ldb, scores + j, stride,
                                                maxima_to(j, j + kLanes), prefetch);
    }
  }

  // row_max[r] = the maximum of scores[r][0 .. width) in each lane.
  static OPST_INLINE void take_maxima(int rows, int64_t width, const S* scores, int64_t stride, S* row_max) {
    for (int i = 0; i < rows; ++i) {
      V top = V::set1(-__builtin_inff());
      for (int64_t j = 0; j < width; j += kLanes) top = simd::max(top, V::load(scores + i * stride + j));
      top.store(row_max + i * kLanes);
    }
  }

  // Scores of keys that a row does not see, and of padding, become -inf; the others join row_max.
  static OPST_NOINLINE void hide(const QueryBlock& q, RowTile rt, const KvTile& tile, KeySpan span, S* scores,
                                 int64_t stride, S* row_max) {
    const V hidden = V::set1(-__builtin_inff());
    const int64_t origin = tile.first_key + span.begin;
    for (int i = 0; i < rt.rows; ++i) {
      int64_t begin = 0, end = span.end - span.begin;
      if (tile.partial) {
        begin = q.visible_begin[rt.first + i] - origin;
        const int64_t row_end = q.visible_end[rt.first + i] - origin;
        end = row_end < end ? row_end : end;
      }
      S* row = scores + i * stride;
      V top = V::load(row_max + i * kLanes);
      const auto mask = [&](int64_t from, int64_t to) OPST_INLINE_LAMBDA {
        for (int64_t j = from; j < to; j += kLanes) {
          V s = simd::blend_n(simd::clamp_lanes<V>(end - j), V::load(row + j), hidden);
          s = simd::blend_n(simd::clamp_lanes<V>(begin - j), hidden, s);
          s.store(row + j);
          top = simd::max(top, s);
        }
      };
      mask(0, span.whole_begin);
      mask(span.whole_end, span.width);
      top.store(row_max + i * kLanes);
    }
  }

  // As score and hide, where there are rules: raw scores become S.
  static OPST_NOINLINE void shape(const QueryBlock& q, RowTile rt, const KvTile& tile, KeySpan span, S* scores,
                                  int64_t stride, S* row_max) {
    const int64_t origin = tile.first_key + span.begin, count = span.end - span.begin;
    for (int i = 0; i < rt.rows; ++i) {
      const int64_t r = rt.first + i;
      const RowRules& row = q.rules->rows[r];
      S* s = scores + i * stride;
      Ops::shape(*q.rules, row, origin, count, span.width, s, nullptr);
      const int64_t begin = tile.partial ? q.visible_begin[r] - origin : 0;
      const int64_t end = tile.partial ? q.visible_end[r] - origin : count;
      Ops::hide(*q.rules, row, origin, count, span.width, begin, end, s).store(row_max + i * kLanes);
    }
  }
  // Weights that dropout does not keep become 0; sums have been taken.
  static OPST_NOINLINE void drop(const QueryBlock& q, RowTile rt, const KvTile& tile, KeySpan span, S* scores,
                                 int64_t stride) {
    KeepBits bits;
    for (int i = 0; i < rt.rows; ++i) {
      Ops::keep(*q.rules, q.rules->rows[rt.first + i], tile.first_key + span.begin, span.end - span.begin, bits);
      if constexpr (P::kStep == 1) {
        Ops::drop(bits, span.width, scores + i * stride);
      } else {
#if defined(__AVX512BF16__)
        Ops::drop(bits, span.width, reinterpret_cast<bf16*>(scores + i * stride));
#endif
      }
    }
  }

  // The exponents of a row are c (s - max), subtracted first. (One multiply-add, c s - (c max as rounded), would be an
  // instruction less per vector of scores, which no bench shows, but is not 0 at the maximum.)
  struct Exponents {
    S alpha[kTileRows];  // factor for what was summed against the old maximum
    S max[kTileRows];    // 0 where a row has seen no key
  };

  // Lane j: vector first + j of an array of `rows` vectors, its lanes joined; any value beyond the array.
  template <class Each>
  static OPST_INLINE V across(const S* vectors, int first, int rows, const Each& each) {
    V row[kLanes];
    OPST_UNROLL for (int j = 0; j < kLanes; ++j) {
      row[j] = first + j < kTileRows ? V::load(vectors + (first + j < rows ? first + j : 0) * kLanes) : V::zero();
    }
    return each(row);
  }
  static OPST_INLINE V maxima_of(const S* vectors, int first, int rows) {
    return across(vectors, first, rows, [](const V(&row)[kLanes]) OPST_INLINE_LAMBDA { return simd::hmax_each(row); });
  }
  static OPST_INLINE V sums_of(const S* vectors, int first, int rows) {
    return across(vectors, first, rows, [](const V(&row)[kLanes]) OPST_INLINE_LAMBDA { return simd::hsum_each(row); });
  }

  // Raises the rows' maxima. kOnly: they have seen no key before, and there is nothing to rescale.
  template <bool kOnly>
  static OPST_INLINE void raise_maxima(const QueryBlock& q, RowTile rt, const S* row_max, Exponents& e) {
    S* max = row_of(q.state.max, rt.first, 1);
    const V zero = V::zero(), unseen = V::set1(-__builtin_inff());
    const V c = V::set1(static_cast<S>(q.exponent_scale));
    OPST_UNROLL for (int i = 0; i < kTileRows; i += kLanes) {
      const int64_t n = simd::clamp_lanes<V>(rt.rows - i);
      V top = maxima_of(row_max, i, rt.rows);
      const V old = kOnly ? unseen : V::load_n(max + i, n);
      if (!kOnly) top = simd::max(old, top);                  // a NaN row stays NaN: its sum is NaN already
      const V used = simd::select(top == unseen, zero, top);  // -inf - (-inf) would be NaN
      if (!kOnly) simd::exp2((old - used) * c).store_n(e.alpha + i, n);
      used.store_n(e.max + i, n);
      top.store_n(max + i, n);
    }
  }
  // scores[i][0 .. width) -> P, as words in place; adds to the rows' sums.
  template <bool kOnly>
  static OPST_NOINLINE void exponentiate(const QueryBlock& q, RowTile rt, int64_t width, S* scores, int64_t stride,
                                         const Exponents& e) {
    const V c = V::set1(static_cast<S>(q.exponent_scale));
    for (int i = 0; i < rt.rows; ++i) {
      S* row = scores + i * stride;
      S* sums = row_of(q.state.sums, rt.first + i, kLanes);
      const V max = V::set1(e.max[i]);
      V sum0 = kOnly ? V::zero() : V::load(sums) * V::set1(e.alpha[i]);
      V sum1 = V::zero();
      int64_t j = 0;
      for (; j + 2 * kLanes <= width; j += 2 * kLanes) {
        const V p0 = exponential((V::load(row + j) - max) * c);
        const V p1 = exponential((V::load(row + j + kLanes) - max) * c);
        store_pair(p0, p1, row, j);
        sum0 = sum0 + p0;
        sum1 = sum1 + p1;
      }
      if (j < width) {
        const V p0 = exponential((V::load(row + j) - max) * c);
        store_pair(p0, V::zero(), row, j);
        sum0 = sum0 + p0;
      }
      (sum0 + sum1).store(sums);
    }
  }
  static OPST_INLINE V exponential(V x) {
    if constexpr (P::kStep == 1)
      return simd::exp2_short(x);
    else
      return simd::exp2_bf16(x);
  }
  static OPST_INLINE void store_pair(V p0, V p1, S* row, int64_t j) {
    if constexpr (P::kStep == 1) {
      p0.store(row + j);
      p1.store(row + j + kLanes);
    } else {
#if defined(__AVX512BF16__)
      // Two vectors shrink to one behind the place they were read from.
      simd::store_bf16_fast(p0, p1, reinterpret_cast<bf16*>(row) + j);
#endif
    }
  }

  // O = alpha O + P V over columns [span.begin, span.end) of the tile.
  static OPST_INLINE void weigh(const QueryBlock& q, RowTile rt, const KvTile& tile, KeySpan span, const S* scores,
                                int64_t stride, const S* alpha, const char*& prefetch) {
    const int64_t tile_words = tile::words<P>(tile.count);
    const int64_t first = span.begin / P::kStep, depth = tile::words<P>(span.end) - first;
    const Word* p = reinterpret_cast<const Word*>(scores);
    S* out = row_of(q.state.acc, rt.first, q.acc_stride);
    const auto full = tile::scaled_accumulate_for<P, kTileVecs>(rt.rows);
    for (int64_t column = 0; column < q.value_head_dim; column += kPanel) {
      const Word* panel = static_cast<const Word*>(tile.values) + column * tile_words;
      if (q.value_head_dim - column > kLanes) {
        full(depth, p, stride, panel + first * kPanel, kPanel, out + column, q.acc_stride, alpha, prefetch);
      } else {
        tile::scaled_accumulate_for<P, 1>(rt.rows)(depth, p, stride, panel + first * kLanes, kLanes, out + column,
                                                   q.acc_stride, alpha, prefetch);
      }
      prefetch += depth / 4 * 64;
    }
  }

  // The same for a tile with non-finite values of which some are hidden: each row over the keys that reach it, one key
  // at a time.
  static OPST_NOINLINE void weigh_visible(const QueryBlock& q, RowTile rt, const KvTile& tile, KeySpan span,
                                          const S* scores, int64_t stride, const S* alpha) {
    const int64_t tile_words = tile::words<P>(tile.count);
    for (int i = 0; i < rt.rows; ++i) {
      const int64_t r = rt.first + i;
      S* out = row_of(q.state.acc, r, q.acc_stride);
      for (int64_t column = 0; column < q.value_head_dim; column += kLanes) {
        const V factor = V::set1(alpha[i]);
        (V::load(out + column) * factor).store(out + column);
      }
      for_visible(q, tile, span, r, [&](int64_t j) OPST_INLINE_LAMBDA {
        const V p = probability(scores + i * stride, j - span.begin);
        for (int64_t column = 0; column < q.value_head_dim; column += kLanes) {
          const int64_t panel = column / kPanel * kPanel;
          const int64_t width = q.value_head_dim - panel > kLanes ? kPanel : kLanes;
          const Word* values = static_cast<const Word*>(tile.values) + panel * tile_words + (column - panel);
          const V value = value_of_key(values + j / P::kStep * width, j);
          simd::fma(p, value, V::load(out + column)).store(out + column);
        }
      });
    }
  }
  // Columns of the tile whose keys reach row r, in ascending order.
  template <class Visit>
  static OPST_INLINE void for_visible(const QueryBlock& q, const KvTile& tile, KeySpan span, int64_t r,
                                      const Visit& visit) {
    if (q.rules == nullptr) {
      const auto [begin, end] = keys_of_row(q, tile, r);
      for (int64_t j = begin; j < end; ++j) visit(j);
      return;
    }
    for (int64_t j = span.begin; j < span.end; ++j) {
      const bool seen =
          Ops::contributes(*q.rules, q.rules->rows[r], tile.first_key + j, q.visible_begin[r], q.visible_end[r]);
      if (seen) visit(j);
    }
  }
  static OPST_INLINE V probability(const S* row, int64_t j) {
    if constexpr (P::kStep == 1) {
      return V::set1(row[j]);
    } else {
      const bf16* p = reinterpret_cast<const bf16*>(row) + j;
      const uint32_t bits = static_cast<uint32_t>(p->bits) << 16;
      S x;
      __builtin_memcpy(&x, &bits, sizeof(x));
      return V::set1(x);
    }
  }
  static OPST_INLINE V value_of_key(const Word* words_of_pair, int64_t key) {
    if constexpr (P::kStep == 1) {
      return V::load(words_of_pair);
    } else {
      bf16 one[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        one[i].bits = static_cast<uint16_t>(key % 2 == 0 ? words_of_pair[i] : words_of_pair[i] >> 16);
      }
      return V::load(one);
    }
  }

  static OPST_INLINE void weigh_tile(const QueryBlock& q, RowTile rt, const KvTile& tile, KeySpan span, const S* scores,
                                     int64_t stride, const S* alpha, const char*& prefetch) {
    if (!tile.values_finite && (tile.partial || (q.rules != nullptr && q.rules->hides()))) {
      weigh_visible(q, rt, tile, span, scores, stride, alpha);
    } else {
      weigh(q, rt, tile, span, scores, stride, alpha, prefetch);
    }
  }

  // A register tile's outputs where all keys are one tile: O = (P V) / sum. Leaves finish_rows nothing to do for it.
  static OPST_NOINLINE void weigh_and_finish(const QueryBlock& q, RowTile rt, const KvTile& tile, KeySpan span,
                                             const S* scores, int64_t stride, const char*& prefetch) {
    const FinishRows& f = *q.finish;
    const bool hides = tile.partial || (q.rules != nullptr && q.rules->hides());
    if (span.width == 0 || (hides && !tile.values_finite)) {
      S* acc = row_of(q.state.acc, rt.first, q.acc_stride);
      for (int64_t i = 0; i < rt.rows * q.acc_stride; i += kLanes) V::zero().store(acc + i);
      const S alpha[kTileRows] = {};
      if (span.width > 0) weigh_visible(q, rt, tile, span, scores, stride, alpha);
      finish_some(f, rt.first, rt.first + rt.rows);
      return;
    }
    S scale[(kTileRows + kLanes - 1) / kLanes * kLanes];
    const S* const sums = row_of(q.state.sums, rt.first, kLanes);
    bool empty = false;
    if (f.writes_statistics() || f.sinks != nullptr) {
      for (int i = 0; i < rt.rows; ++i) {
        S weight;
        const int64_t row = f.first_row + rt.first + i;
        const RowEnd end = end_row(f, rt.first + i, row / f.out.group, row % f.out.group, &weight);
        scale[i] = end.scale;
        empty |= end.empty;
      }
    } else {
      OPST_UNROLL for (int i = 0; i < kTileRows; i += kLanes) {
        const V sum = sums_of(sums, i, rt.rows);
        const auto none = sum == V::zero();
        simd::select(none, V::zero(), V::set1(1) / (sum * V::set1(static_cast<S>(f.keep_prob)))).store(scale + i);
        empty |= simd::any(none);  // or of a lane beyond the rows, which costs a look
      }
    }
    const int64_t out_stride = f.out.row_stride();
    S* out = static_cast<S*>(f.out.data) + (f.first_row + rt.first) * out_stride;
    const int64_t first = span.begin, depth = span.end - first;
    const Word* p = reinterpret_cast<const Word*>(scores);
    const Word* values = static_cast<const Word*>(tile.values);
    const auto full = tile::scaled_product_for<P, kTileVecs>(rt.rows);
    for (int64_t column = 0; column < q.value_head_dim; column += kPanel) {
      const bool wide = q.value_head_dim - column > kLanes;
      const int64_t width = wide ? kPanel : kLanes;
      const int64_t ldb = tile.values_stride > 0 ? tile.values_stride : width;
      const Word* b = values + (tile.values_stride > 0 ? column : column * tile.count) + first * ldb;
      const auto product = wide ? full : tile::scaled_product_for<P, 1>(rt.rows);
      product(depth, p, stride, b, ldb, out + column, out_stride, scale, prefetch);
      prefetch += depth / 4 * 64;
    }
    for (int i = 0; empty && i < rt.rows; ++i) {  // 0 * Inf among their values
      if (simd::hsum(V::load(sums + i * kLanes)) != 0) continue;
      for (int64_t d = 0; d < q.value_head_dim; d += kLanes) V::zero().store(out + i * out_stride + d);
    }
  }

  // The flash path.
  static void attend(const QueryBlock& q, const KvTile* tiles, int64_t num_tiles) {
    constexpr bool kCanFinish = P::kStep == 1;
    const bool only = kCanFinish && q.finish != nullptr;
    if (q.rules == nullptr)
      only ? attend_tiles<false, kCanFinish>(q, tiles, num_tiles) : attend_tiles<false, false>(q, tiles, num_tiles);
    else
      only ? attend_tiles<true, kCanFinish>(q, tiles, num_tiles) : attend_tiles<true, false>(q, tiles, num_tiles);
  }
  // Fetches slice `part` of `parts`, beside the products: in time for the next block, and never so much that loads
  // queue up.
  static OPST_INLINE void fetch(const RowsAhead& a, int64_t part, int64_t parts) {
    const int64_t end = a.rows * (part + 1) / parts;
    for (int64_t r = a.rows * part / parts; r < end; ++r) {
      for (int64_t b = 0; b < a.row_bytes; b += 64) __builtin_prefetch(a.data + r * a.stride_bytes + b);
    }
  }

  // kOnly: there is one tile, and the outputs are written at once.
  template <bool kRules, bool kOnly>
  static OPST_NOINLINE void attend_tiles(const QueryBlock& q, const KvTile* tiles, int64_t num_tiles) {
    const RowTiles row_tiles(q.rows, kTileRows);
    S* scores = static_cast<S*>(q.scores);
    alignas(64) S row_max[kTileRows * kLanes];
    Exponents e;
    for (int64_t t = 0; t < num_tiles; ++t) {
      const KvTile& tile = tiles[t];
      const char* prefetch = static_cast<const char*>(tiles[t + 1 < num_tiles ? t + 1 : t].keys);
      for (int64_t b = 0; b < row_tiles.count(); ++b) {
        const RowTile rt = row_tiles[b];
        const KeySpan span = key_span(q, rt, tile);
        if constexpr (kOnly) fetch(q.next_keys, b, row_tiles.count());
        if (span.width == 0) {
          if constexpr (kOnly) weigh_and_finish(q, rt, tile, span, scores, q.scores_stride, prefetch);
          continue;
        }
        score<kRules>(q, rt, tile, span, scores, q.scores_stride, row_max, prefetch);
        if constexpr (kRules) {
          shape(q, rt, tile, span, scores, q.scores_stride, row_max);
        } else {
          if (span.ragged()) hide(q, rt, tile, span, scores, q.scores_stride, row_max);
        }
        if constexpr (kOnly) fetch(q.next_query, b, row_tiles.count());
        raise_maxima<kOnly>(q, rt, row_max, e);
        exponentiate<kOnly>(q, rt, span.width, scores, q.scores_stride, e);
        if constexpr (kRules) {
          if (q.rules->drops()) drop(q, rt, tile, span, scores, q.scores_stride);
        }
        if constexpr (kOnly) {
          fetch(q.next_values, b, row_tiles.count());
          weigh_and_finish(q, rt, tile, span, scores, q.scores_stride, prefetch);
        } else {
          weigh_tile(q, rt, tile, span, scores, q.scores_stride, e.alpha, prefetch);
        }
      }
    }
  }

  // The standard path: all scores, then their softmax, then the weighted sum. A row's scores of KV tile t begin at
  // column t * (a tile's padded width) of the matrix.
  static void attend_standard(const QueryBlock& q, const KvTile* tiles, int64_t num_tiles, void* matrix,
                              int64_t matrix_stride) {
    const RowTiles row_tiles(q.rows, kTileRows);
    alignas(64) S row_max[kTileRows * kLanes];
    Exponents e;
    const int64_t tile_width = num_tiles > 0 ? (tiles[0].count + kPanel - 1) / kPanel * kPanel : 0;
    const char* prefetch = static_cast<const char*>(q.query);
    for (int64_t t = 0; t < num_tiles; ++t) {
      for (int64_t b = 0; b < row_tiles.count(); ++b) {
        const RowTile rt = row_tiles[b];
        const KeySpan span = key_span(q, rt, tiles[t]);
        S* scores = row_of(matrix, rt.first, matrix_stride) + t * tile_width;
        if (span.width > 0) {
          score(q, rt, tiles[t], span, scores + span.begin, matrix_stride, row_max, prefetch);
          if (q.rules != nullptr)
            shape(q, rt, tiles[t], span, scores + span.begin, matrix_stride, row_max);
          else if (span.ragged())
            hide(q, rt, tiles[t], span, scores + span.begin, matrix_stride, row_max);
        }
        fill_hidden(rt.rows, scores, matrix_stride, 0, span.begin);
        fill_hidden(rt.rows, scores, matrix_stride, span.begin + span.width, tile_width);
      }
    }
    const int64_t width = num_tiles * tile_width;
    for (int64_t b = 0; b < row_tiles.count(); ++b) {
      const RowTile rt = row_tiles[b];
      S* scores = row_of(matrix, rt.first, matrix_stride);
      take_maxima(rt.rows, width, scores, matrix_stride, row_max);
      raise_maxima<false>(q, rt, row_max, e);
      exponentiate<false>(q, rt, width, scores, matrix_stride, e);
    }
    for (S& factor : e.alpha) factor = 1;
    for (int64_t t = 0; t < num_tiles; ++t) {
      for (int64_t b = 0; b < row_tiles.count(); ++b) {
        const RowTile rt = row_tiles[b];
        const KeySpan span = key_span(q, rt, tiles[t]);
        if (span.width == 0) continue;
        // P's words are as far into the row as its elements.
        Word* p = reinterpret_cast<Word*>(row_of(matrix, rt.first, matrix_stride)) +
                  tile::words<P>(t * tile_width + span.begin);
        S* scores = reinterpret_cast<S*>(p);
        if (q.rules != nullptr && q.rules->drops()) drop(q, rt, tiles[t], span, scores, matrix_stride);
        weigh_tile(q, rt, tiles[t], span, scores, matrix_stride, e.alpha, prefetch);
      }
    }
  }
  static OPST_INLINE void fill_hidden(int rows, S* scores, int64_t stride, int64_t begin, int64_t end) {
    for (int i = 0; i < rows; ++i) {
      for (int64_t j = begin; j < end; j += kLanes) V::set1(-__builtin_inff()).store(scores + i * stride + j);
    }
  }

  static void begin_block(const StackedRows& query, int64_t first_row, double sign, void* out, const QueryBlock& q) {
    const auto offset_of = [&](int64_t row) OPST_INLINE_LAMBDA {
      return row / query.group * query.seq_stride + row % query.group * query.head_stride;
    };
    const int64_t size = query.dtype == DType::f64 ? 8 : query.dtype == DType::f32 ? 4 : 2;
    for (int64_t r = 0; r < q.rows; ++r) {
      *row_of(q.state.max, r, 1) = -__builtin_inff();
      V::zero().store(row_of(q.state.sums, r, kLanes));
      if (q.finish == nullptr) {
        S* acc = row_of(q.state.acc, r, q.acc_stride);
        for (int64_t d = 0; d < q.acc_stride; d += kLanes) V::zero().store(acc + d);
      }
      if (out == nullptr) continue;
      const int64_t offset = offset_of(first_row + r);
      constexpr int64_t kRowsAhead = 8;
      if (r + kRowsAhead < q.rows) {
        const char* ahead = static_cast<const char*>(query.data) + offset_of(first_row + r + kRowsAhead) * size;
        for (int64_t b = 0; b < q.head_dim * size; b += 64) __builtin_prefetch(ahead + b);
      }
      Word* target = static_cast<Word*>(out) + r * q.query_stride;
      switch (query.dtype) {
        case DType::f32:
          copy_query(static_cast<const float*>(query.data) + offset, query.dim_stride, q.head_dim, sign, target);
          break;
        case DType::bf16:
          copy_query(static_cast<const bf16*>(query.data) + offset, query.dim_stride, q.head_dim, sign, target);
          break;
        case DType::f16:
          copy_query(static_cast<const f16*>(query.data) + offset, query.dim_stride, q.head_dim, sign, target);
          break;
        default:
          copy_query(static_cast<const double*>(query.data) + offset, query.dim_stride, q.head_dim, sign, target);
          break;
      }
    }
  }
  template <class T>
  static OPST_INLINE void copy_query(const T* row, int64_t dim_stride, int64_t length, double sign, Word* out) {
    if constexpr ((sizeof(T) == 8) == (sizeof(S) == 8)) {  // f64 queries have f64 kernels only
      const int64_t padded = tile::words<P>(length) * P::kStep;
      if (is_stored_type(row) && sign == 1 && dim_stride == 1) {
        T* elements = reinterpret_cast<T*>(out);
        __builtin_memcpy(elements, row, static_cast<size_t>(length) * sizeof(T));
        if (padded > length) elements[length] = {};
        return;
      }
      const V factor = V::set1(static_cast<S>(sign));
      for (int64_t d = 0; d < padded; d += kLanes) {
        store_query(tile::load_row<V>(row, dim_stride, d, length) * factor, out, d, simd::clamp_lanes<V>(padded - d));
      }
    }
  }
  // Whether words are made of this type.
  static OPST_INLINE bool is_stored_type(const S*) { return P::kStep == 1; }
  static OPST_INLINE bool is_stored_type(const bf16*) { return P::kStep == 2; }
  static OPST_INLINE bool is_stored_type(const void*) { return false; }
  static OPST_INLINE void store_query(V x, Word* out, int64_t d, int64_t n) {
    if constexpr (P::kStep == 1) {
      n == kLanes ? x.store(out + d) : x.store_n(out + d, n);
    } else {  // exact: it was bf16
      bf16* elements = reinterpret_cast<bf16*>(out) + d;
      n == kLanes ? x.store(elements) : x.store_n(elements, n);
    }
  }

  // Joins the parts in key order, divides once, writes outputs and statistics.
  static void finish_rows(const FinishRows& f) { finish_some(f, 0, f.rows); }
  static OPST_NOINLINE void finish_some(const FinishRows& f, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t row = f.first_row + r;
      const int64_t i = row / f.out.group, g = row % f.out.group;
      S weights[kMaxParts];
      const RowEnd row_end = end_row(f, r, i, g, weights);
      write_row(f, r, weights, row_end.scale, row_end.empty, f.out.seq_stride * i + f.out.head_stride * g);
    }
  }
  // `scale`: what a row's accumulators are multiplied by, after the parts' weights. An empty row becomes 0 instead.
  struct RowEnd {
    S scale;
    bool empty;
  };
  // Joins the parts of row r, query i of head g, and writes its statistics.
  static OPST_INLINE RowEnd end_row(const FinishRows& f, int64_t r, int64_t i, int64_t g, S* weights) {
    const S c = static_cast<S>(f.exponent_scale);
    S max = -__builtin_inff();
    for (int64_t p = 0; p < f.num_parts; ++p) {
      const S part_max = *row_of(f.parts[p].max, r, 1);
      max = part_max > max ? part_max : max;  // a NaN part reaches the sum through its weight
    }
    S sum = 0;
    for (int64_t p = 0; p < f.num_parts; ++p) {
      const S part_max = *row_of(f.parts[p].max, r, 1);
      weights[p] = 1;
      if (f.num_parts > 1) {
        weights[p] = part_max == -__builtin_inff() ? S(0) : exp2_scalar((part_max - max) * c);
      }
      sum += weights[p] * simd::hsum(V::load(row_of(f.parts[p].sums, r, kLanes)));
    }
    const bool empty = sum == 0;
    RowEnd end = {empty ? S(0) : S(1) / (sum * static_cast<S>(f.keep_prob)), empty};
    if (!f.writes_statistics() && f.sinks == nullptr) return end;
    double top = static_cast<double>(max) * f.score_scale;
    double exact = static_cast<double>(sum);
    if (empty) top = -__builtin_inf(), exact = 0;
    if (f.sinks != nullptr) end.scale *= add_sink(static_cast<const S*>(f.sinks)[g * f.sinks_stride], top, exact);
    if (exact != exact) top = exact = __builtin_nan("");
    const bool nothing = exact == 0;
    if (f.lse.data != nullptr) write_statistic(f.lse, i, g, nothing ? top : top + __builtin_log(exact));
    if (f.max.data != nullptr) write_statistic(f.max, i, g, top);
    if (f.sum.data != nullptr) write_statistic(f.sum, i, g, exact);
    return end;
  }
  // One more score joins maximum and sum. Returns the share of the sum that the keys keep.
  static OPST_NOINLINE S add_sink(S sink, double& top, double& sum) {
    const double score = static_cast<double>(sink);
    if (score == -__builtin_inf()) return 1;
    const double keys_top = top;
    if (!(score <= top)) top = score;
    const double keys = sum == 0 ? 0 : sum * __builtin_exp(keys_top - top);
    sum = keys + __builtin_exp(score - top);  // NaN for a sink of +inf
    return static_cast<S>(keys / sum);
  }
  static constexpr int kMaxParts = 256;
  static OPST_INLINE S exp2_scalar(S x) {
    S lanes[kLanes];
    simd::exp2(V::set1(x)).store(lanes);
    return lanes[0];
  }
  static OPST_INLINE void write_row(const FinishRows& f, int64_t r, const S* weights, S scale, bool empty,
                                    int64_t offset) {
    switch (f.out.dtype) {
      case DType::f32:
        write_row_as<float>(f, r, weights, scale, empty, offset);
        break;
      case DType::bf16:
        write_row_as<bf16>(f, r, weights, scale, empty, offset);
        break;
      case DType::f16:
        write_row_as<f16>(f, r, weights, scale, empty, offset);
        break;
      default:
        write_row_as<double>(f, r, weights, scale, empty, offset);
        break;
    }
  }
  template <class T>
  static OPST_INLINE void write_row_as(const FinishRows& f, int64_t r, const S* weights, S scale, bool empty,
                                       int64_t offset) {
    if constexpr ((sizeof(S) == 8) == (sizeof(T) == 8)) {
      T* out = static_cast<T*>(f.out.data) + offset;
      for (int64_t d = 0; d < f.value_head_dim; d += kLanes) {
        V acc = V::load(row_of(f.parts[0].acc, r, f.acc_stride) + d);
        if (f.num_parts > 1) acc = acc * V::set1(weights[0]);
        for (int64_t p = 1; p < f.num_parts; ++p) {
          acc = simd::fma(V::load(row_of(f.parts[p].acc, r, f.acc_stride) + d), V::set1(weights[p]), acc);
        }
        acc = empty ? V::zero() : acc * V::set1(scale);
        const int64_t n = simd::clamp_lanes<V>(f.value_head_dim - d);
        if (f.out.dim_stride == 1) {
          if (n == kLanes)
            acc.store(out + d);
          else
            acc.store_n(out + d, n);
        } else {
          T lanes[kLanes];
          acc.store(lanes);
          for (int64_t j = 0; j < n; ++j) out[(d + j) * f.out.dim_stride] = lanes[j];
        }
      }
    }
  }
  static OPST_INLINE void write_statistic(const StackedRows& out, int64_t i, int64_t g, double x) {
    static_cast<S*>(out.data)[i * out.seq_stride + g * out.head_stride] = static_cast<S>(x);
  }
};

}  // namespace opst::OPST_ISA_NS::attention

// Attention forward for one block of query rows: the tile computation, over any source of keys and values.
//
// Computes   S = Q K^T;  m = rowmax(S);  P = exp2(c (S - m));  O = P V / rowsum(P)
//            c = |softmax_scale| log2(e), the sign is in Q
// Shapes     Q [rows, head_dim]; K [keys, head_dim], V [keys, value_head_dim] in tiles; O [rows, value_head_dim]
// Loop nest  for each KV tile                              one after the other, K and V of a tile stay in L2
//              for each register tile of MR <= 12 rows     its scores stay in L1 from first to last
//                scores [MR, keys] = Q K^T                 the source: packed_source.h, in_place_source.h,
//                                                          pages_source.h
//                hide keys of partial tiles                online_softmax.h
//                online softmax of [MR, keys] scores, in place
//                O [MR, value_head_dim] = alpha O + P V    the source, into the sink: Accumulate
//              Where all keys are one tile, the last line is O = (P V) / rowsum(P), written to the outputs: AtOnce
//              (at_once.h).
// Memory     packed f32, avx512, head_dim 128; block_q 120 and block_kv 256, as planned for 1 MB of L2:
//              of a register tile    scores     [12][272]          13 KB   L1
//                                    Q and O    2 x [12][128]      12 KB   L1
//              of the block          O          [120][128]         60 KB   L2
//              of the KV tile        K and V    2 x [256][128]    256 KB   L2; the next tile is prefetched meanwhile
// Numerics   S, O and the sums in f32 (f64 for f64). A row that sees one key has P = 1 and O = V to the bit. exp2
//            results below 2^-126 are 0. NaN scores make the row's sum NaN, hence the whole row. Hidden keys of a
//            partial tile have P = 0; where such a tile holds a non-finite value, 0 * value would be NaN, so its rows
//            are summed one by one over their visible keys.
// Source     Dao et al., FlashAttention (2022), algorithm 1; Dao, FlashAttention-2 (2023), section 3.1 (one division at
//            the end).
//
// A source is made for tile t of a list, and has
//   Product                    the types of tile/gemm_tile.h
//   span(rt)                   the columns of the tile to compute for a register tile of rows
//   score<kRules>(s, row_max)  s = Q K^T; unless kRules, row_max = the maxima of the panels that all rows see
//   weigh<Sink>(s, factor, out, out_stride)
//                              by the sink's product: out = factor out + P V, or factor (P V)
//   values_finite()            false where 0 * value may be NaN for a hidden key
//   value(key, column)         a vector of the value of one key
//   kJoins                     if it is there, tiles may be joined: keys of several come as scores of one row
#pragma once

#include "attention/online_softmax.h"
#include "attention/stacked_rows.h"

namespace opst::OPST_ISA_NS::attention {

using tile::RowTiles;

// O = alpha O + P V of a register tile, row by row and key by key, over the keys that reach the row.
template <class Source, class S>
OPST_NOINLINE void weigh_by_key(const Source source, const QueryBlock& q, const KvTile& tile, const Scores<S>& s,
                                const S* alpha) {
  using V = typename Source::V;
  using Softmax = OnlineSoftmax<typename Source::Product>;
  for (int i = 0; i < s.rt.rows; ++i) {
    S* out = static_cast<S*>(q.state.acc) + (s.rt.first + i) * q.acc_stride;
    for (int64_t column = 0; column < q.value_head_dim; column += V::kLanes) {
      (V::load(out + column) * V::set1(alpha[i])).store(out + column);
    }
    Softmax::for_visible(q, tile, s, i, [&](int64_t j) OPST_INLINE_LAMBDA {
      const V p = Softmax::weight(s.row(i), j - s.span.begin);
      for (int64_t column = 0; column < q.value_head_dim; column += V::kLanes) {
        simd::fma(p, source.value(j, column), V::load(out + column)).store(out + column);
      }
    });
  }
}

// The sink of most blocks: sums in state.acc, which finish_rows divides.
template <class P>
struct Accumulate {
  using S = typename P::V::Scalar;
  static constexpr bool kOnly = false;  // whether there is but one tile
  template <int kVecs>
  static OPST_INLINE auto product_for(int rows) {
    return tile::scaled_accumulate_for<P, kVecs>(rows);
  }

  template <class Source>
  OPST_INLINE void weigh(Source& source, const QueryBlock& q, const Scores<S>& s, const S* alpha) const {
    S* out = static_cast<S*>(q.state.acc) + s.rt.first * q.acc_stride;
    source.template weigh<Accumulate>(s, alpha, out, q.acc_stride);
  }
  template <class Source>
  OPST_INLINE void weigh_by_key(const Source& source, const QueryBlock& q, const KvTile& tile, const Scores<S>& s,
                                const S* alpha) const {
    if (s.span.width > 0) attention::weigh_by_key(source, q, tile, s, alpha);
  }
  OPST_INLINE void fetch(int, int64_t, int64_t) const {}
};

// One step of the softmax over tiles that are joined: their scores lie side by side in L1. A tile of 64 keys, which a
// block mask may ask for, would have as many steps as 1024 keys have elsewhere.
template <class Source, bool kRules>
OPST_NOINLINE void attend_joined(const QueryBlock& q, const KvTile* tiles, int64_t first, int64_t num_tiles,
                                 RowTile rt) {
  using P = typename Source::Product;
  using V = typename Source::V;
  using S = typename Source::S;
  using Softmax = OnlineSoftmax<P>;
  constexpr int kLanes = V::kLanes;
  const int64_t joined = tiles[first].joined, count = tiles[first].count;
  S* scores = static_cast<S*>(q.scores);
  alignas(64) S row_max[P::kTileRows * kLanes], max_of_tile[P::kTileRows * kLanes];
  for (int i = 0; i < rt.rows; ++i) V::set1(-__builtin_inff()).store(row_max + i * kLanes);
  for (int64_t t = 0; t < joined; ++t) {
    Source source(q, tiles, first + t, num_tiles);
    const Scores<S> s = {rt, source.span(rt), scores + t * count, q.scores_stride};
    source.template score<kRules>(s, max_of_tile);
    if constexpr (kRules) Softmax::shape(q, tiles[first + t], s, max_of_tile);
    for (int i = 0; i < rt.rows * kLanes; i += kLanes) {
      simd::max(V::load(row_max + i), V::load(max_of_tile + i)).store(row_max + i);
    }
  }
  typename Softmax::Exponents e;
  Softmax::template raise_maxima<false>(q, rt, row_max, e);
  const Scores<S> all = {rt, {}, scores, q.scores_stride};
  Softmax::template exponentiate<false>(q, all, joined * count, e);
  const Accumulate<P> sink;
  for (int64_t t = 0; t < joined; ++t) {
    const KvTile& tile = tiles[first + t];
    Source source(q, tiles, first + t, num_tiles);
    // P's words are as far into the row as its elements.
    const Scores<S> s = {rt, source.span(rt), scores + tile::words<P>(t * count), q.scores_stride};
    if constexpr (kRules) {
      if (q.rules->drops()) Softmax::drop(q, tile, s);
    }
    if (kRules && q.rules->hides() && !source.values_finite())
      sink.weigh_by_key(source, q, tile, s, e.alpha);
    else
      sink.weigh(source, q, s, e.alpha);
    for (S& factor : e.alpha) factor = 1;
  }
}

template <class Source, bool kRules, class Sink>
OPST_NOINLINE void attend_tiles(const QueryBlock& q, const KvTile* tiles, int64_t num_tiles, const Sink& sink) {
  using P = typename Source::Product;
  using S = typename Source::S;
  using Softmax = OnlineSoftmax<P>;
  const RowTiles row_tiles(q.rows, P::kTileRows);
  alignas(64) S row_max[P::kTileRows * P::V::kLanes];
  typename Softmax::Exponents e;
  for (int64_t t = 0; t < num_tiles; t += tiles[t].joined) {
    const KvTile& tile = tiles[t];
    if constexpr (requires { Source::kJoins; } && !Sink::kOnly) {
      if (tile.joined > 1) {
        for (int64_t b = 0; b < row_tiles.count(); ++b) {
          attend_joined<Source, kRules>(q, tiles, t, num_tiles, row_tiles[b]);
        }
        continue;
      }
    }
    Source source(q, tiles, t, num_tiles);
    const bool some_hidden = tile.partial || (kRules && q.rules->hides());
    for (int64_t b = 0; b < row_tiles.count(); ++b) {
      const RowTile rt = row_tiles[b];
      const Scores<S> s = {rt, source.span(rt), static_cast<S*>(q.scores), q.scores_stride};
      sink.fetch(0, b, row_tiles.count());
      if (s.span.width == 0) {
        sink.weigh_by_key(source, q, tile, s, e.alpha);
        continue;
      }
      source.template score<kRules>(s, row_max);
      if constexpr (kRules) {
        Softmax::shape(q, tile, s, row_max);
      } else {
        if (s.span.ragged()) Softmax::hide(q, tile, s, row_max);
      }
      sink.fetch(1, b, row_tiles.count());
      Softmax::template raise_maxima<Sink::kOnly>(q, rt, row_max, e);
      Softmax::template exponentiate<Sink::kOnly>(q, s, s.span.width, e);
      if constexpr (kRules) {
        if (q.rules->drops()) Softmax::drop(q, tile, s);
      }
      sink.fetch(2, b, row_tiles.count());
      if (some_hidden && !source.values_finite())
        sink.weigh_by_key(source, q, tile, s, e.alpha);
      else
        sink.weigh(source, q, s, e.alpha);
    }
  }
}
// By any source and sink.
template <class Source, class Sink>
OPST_INLINE void attend_with(const QueryBlock& q, const KvTile* tiles, int64_t num_tiles, const Sink& sink) {
  if (q.rules == nullptr)
    attend_tiles<Source, false>(q, tiles, num_tiles, sink);
  else
    attend_tiles<Source, true>(q, tiles, num_tiles, sink);
}
template <class Source>
void attend(const QueryBlock& q, const KvTile* tiles, int64_t num_tiles) {
  attend_with<Source>(q, tiles, num_tiles, Accumulate<typename Source::Product>());
}

// Before the first tile.
template <class V>
OPST_NOINLINE void empty_rows(const QueryBlock& q, int64_t first, int64_t rows) {
  using S = typename V::Scalar;
  const auto fill = [&](void* numbers, int64_t stride) OPST_INLINE_LAMBDA {
    for (int64_t i = first * stride; i < (first + rows) * stride; i += V::kLanes) {
      V::zero().store(static_cast<S*>(numbers) + i);
    }
  };
  fill(q.state.acc, q.acc_stride);
  fill(q.state.sums, V::kLanes);
  for (int64_t r = first; r < first + rows; ++r) static_cast<S*>(q.state.max)[r] = -__builtin_inff();
}
template <class V>
void empty_state(const QueryBlock& q) {
  empty_rows<V>(q, 0, q.rows);
}

template <class P>
void copy_queries(const StackedRows& query, int64_t first_row, double factor, const QueryBlock& q, void* out) {
  using S = typename P::V::Scalar;
  constexpr int64_t kRowsAhead = 8;
  for (int64_t r = 0; r < q.rows; ++r) {
    if (r + kRowsAhead < q.rows) {
      with_row<S>(query, first_row + r + kRowsAhead, [&](const auto* row) OPST_INLINE_LAMBDA {
        const char* ahead = reinterpret_cast<const char*>(row);
        const int64_t bytes = q.head_dim * static_cast<int64_t>(sizeof(*row));
        for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(ahead + b);
      });
    }
    with_row<S>(query, first_row + r, [&](const auto* row) OPST_INLINE_LAMBDA {
      copy_words<P>(row, query.dim_stride, q.head_dim, factor,
                    static_cast<typename P::Word*>(out) + r * q.query_stride);
    });
  }
}

}  // namespace opst::OPST_ISA_NS::attention

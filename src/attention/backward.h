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
// Parts      backward_pack.h, backward_scores.h, far_statistics.h, backward_sums.h; forms of operands: backward_forms.h
// Source     Dao et al., FlashAttention (2022), appendix B.4, with the keys in the outer loop.
#pragma once

#include "attention/backward_pack.h"
#include "attention/backward_scores.h"
#include "attention/backward_sums.h"

namespace opst::OPST_ISA_NS::attention {

template <class P>
struct Backward : BackwardForms<P> {
  using F = BackwardForms<P>;
  using Scores = BackwardScores<P>;
  using Sums = BackwardSums<P>;
  using Pairs = VisiblePairs<P>;
  using F::kLanes, F::kStep;
  using typename F::S, typename F::V, typename F::Word;

  static void grad_tile(const GradBlock& b, const GradTile& t) {
    const BackwardSizes& sizes = b.sizes;
    const QueryRows& q = b.queries;
    const char* prefetch = b.prefetch;
    RowKeys spans[4096 / F::kTileRows + 1];  // of the register tiles of the most rows (kMaxBlock)
    KeepBits bits[kStep];
    const RowTiles row_tiles = F::tiles_of(q);
    const int64_t width = (t.count + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = 0; i < row_tiles.count(); ++i) {
      const RowTile rows = row_tiles[i];
      const KeySpan span = F::span_of(b, t, rows);
      spans[i] = {span.begin, span.end};
      if (b.partial) {
        clear(b, rows, 0, span.begin);
        clear(b, rows, span.begin + span.width, width);
      }
      if (span.width == 0) continue;
      const auto products = Scores::template score<true>(b, t, rows, span, prefetch);
      Scores::differentiate(b, t, rows, span, products, bits);
    }
    if (Pairs::needed(b, t)) return Pairs::add_to_keys(b, t);
    if (t.grad_value != nullptr) {
      Sums::add_to_keys(b, t, spans, b.probability_columns,
                        F::columns(q.grad_out, sizes.value_stride, q.grad_out_columns, q.rows, sizes.value_head_dim),
                        t.grad_value, sizes.value_acc_stride, prefetch);
    }
    if (t.grad_key != nullptr) {
      Sums::add_to_keys(b, t, spans, b.grad_score_columns,
                        F::columns(q.query, sizes.query_stride, q.query_columns, q.rows, sizes.head_dim), t.grad_key,
                        sizes.acc_stride, prefetch);
    }
  }

  static void grad_query(const GradBlock& b, const GradTile& t) {
    if (Pairs::needed(b, t))
      Pairs::add_to_queries(b, t);
    else
      Sums::add_to_queries(b, t);
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
};

}  // namespace opst::OPST_ISA_NS::attention

// Attention in its standard form for one block of query rows: matmul, softmax, matmul over its rows of the whole score
// matrix.
//
// Computes   as forward.h, whose pieces these are; the softmax is online only in name, with one step over all keys
// Loop nest  for each KV tile, for each register tile of rows     scores, those of hidden keys -inf
//            for each register tile of rows                       maxima; P and its sums
//            for each KV tile, for each register tile of rows     O += P V
// Memory     matrix [rows][matrix_stride]; scores of KV tile t begin at column t * (a tile's keys rounded up to panels)
// Numerics   as forward.h
#include "attention/forward.h"
#include "attention/packed_source.h"

namespace opst::OPST_ISA_NS::attention {

template <class P>
void attend_standard(const QueryBlock& q, const KvTile* tiles, int64_t num_tiles, void* matrix, int64_t stride) {
  using V = typename P::V;
  using S = typename V::Scalar;
  using Softmax = OnlineSoftmax<P>;
  constexpr int64_t kLanes = V::kLanes, kPanel = P::kTileVecs * kLanes;
  const RowTiles row_tiles(q.rows, P::kTileRows);
  alignas(64) S row_max[P::kTileRows * kLanes];
  typename Softmax::Exponents e;
  const bool hides = q.rules != nullptr && q.rules->hides(), drops = q.rules != nullptr && q.rules->drops();
  const int64_t tile_width = num_tiles > 0 ? (tiles[0].count + kPanel - 1) / kPanel * kPanel : 0;
  const int64_t width = num_tiles * tile_width;
  const auto row_of = [&](RowTile rt) { return static_cast<S*>(matrix) + rt.first * stride; };
  const auto for_each_tile = [&](const auto& visit) {
    for (int64_t t = 0; t < num_tiles; ++t) {
      PackedSource<P> source(q, tiles, t, num_tiles);
      for (int64_t b = 0; b < row_tiles.count(); ++b) visit(source, tiles[t], row_tiles[b], t * tile_width);
    }
  };

  for_each_tile([&](PackedSource<P>& source, const KvTile& tile, RowTile rt, int64_t column) {
    const KeySpan span = source.span(rt);
    S* first = row_of(rt) + column;
    const Scores<S> s = {rt, span, first + span.begin, stride};
    if (span.width > 0) {
      source.template score<false>(s, row_max);
      if (q.rules != nullptr)
        Softmax::shape(q, tile, s, row_max);
      else if (span.ragged())
        Softmax::hide(q, tile, s, row_max);
    }
    const V hidden = V::set1(-__builtin_inff());
    for (int i = 0; i < rt.rows; ++i) {
      for (int64_t j = 0; j < span.begin; j += kLanes) hidden.store(first + i * stride + j);
      for (int64_t j = span.begin + span.width; j < tile_width; j += kLanes) hidden.store(first + i * stride + j);
    }
  });
  for (int64_t b = 0; b < row_tiles.count(); ++b) {
    const Scores<S> s = {row_tiles[b], {}, row_of(row_tiles[b]), stride};
    Softmax::take_maxima(s, width, row_max);
    Softmax::template raise_maxima<false>(q, s.rt, row_max, e);
    Softmax::template exponentiate<false>(q, s, width, e);
  }
  for (S& factor : e.alpha) factor = 1;
  for_each_tile([&](PackedSource<P>& source, const KvTile& tile, RowTile rt, int64_t column) {
    const KeySpan span = source.span(rt);
    // P's words are as far into the row as its elements.
    const Scores<S> s = {rt, span, row_of(rt) + tile::words<P>(column + span.begin), stride};
    if (span.width == 0) return;
    if (drops) Softmax::drop(q, tile, s);
    if ((tile.partial || hides) && !source.values_finite())
      weigh_by_key(source, q, tile, s, e.alpha);
    else
      Accumulate<P>().weigh(source, q, s, e.alpha);
  });
}

extern const StandardTable kStandardTable;
constinit const StandardTable kStandardTable = {
    .f32 = attend_standard<tile::ProductF32>,
#if defined(__AVX512BF16__)
    .bf16_dot = attend_standard<tile::ProductBf16Dot>,
#endif
#if !defined(__AVX2__)
    .f64 = attend_standard<tile::ProductF64>,
#endif
};

}  // namespace opst::OPST_ISA_NS::attention

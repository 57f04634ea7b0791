// LightningIndexer for one block of queries against one tile of keys: scores, and which of them are candidates.
//
// Computes   s[t, j] = sum over heads g of w[t, g] relu(q[t, g] . k[j])
//            appends key j to the candidates of query t unless s[t, j] <= threshold[t]
// Shapes     Q [queries * group, head_dim] stacked rows, K [keys, head_dim] one tile, s [queries, keys]
// Loop nest  for each register tile of MR <= 12 rows      products stay in L1 from first to last
//              products [MR, keys] = Q K^T                PackedSource, panel by panel
//              for each query among the rows              s += w relu(products), a sum stays in registers for its rows
//            for each query of the block                  compare with its threshold, append
// Memory     f32, avx512, head_dim 128, 64 heads; 2 queries and 320 keys, as planned for 48 KB of L1:
//              products of a register tile   [12][336]             16 KB   L1, beside a panel of K and rows of Q
//              s                             [2][320]               3 KB   L1
//              Q                             [128][128]            64 KB   L2
//              K of the tile                 [320][128]           160 KB   L2
//              candidates                    2 x count             32 KB each at count 2048, appended at their end
//            The next tile is prefetched meanwhile: its panels, or the rows that the task will pack.
//            Of 16 scores and one head the product takes 128 multiply-adds, relu and sum two instructions.
// Numerics   s in f32, heads in ascending order whichever register tile holds their rows: its bits depend on nothing
//            but the query and the key. NaN passes every comparison.
// Source     opst/lightning_indexer.h
#include "attention/forward.h"
#include "attention/indexer_kernels.h"
#include "attention/packed_source.h"

namespace opst::OPST_ISA_NS::attention {
namespace {

using simd::F32;

// sums[0 .. width) of one query += weights[i] relu(row i of s), for rows first to first + rows - 1; from 0 where
// `begins`, which is with head 0. width is whole vectors.
template <int kVecs>
OPST_INLINE void add_columns(const Scores<float>& s, int first, int rows, const float* weights, bool begins, int64_t j,
                             float* sums) {
  const F32 zero = F32::zero();
  F32 sum[kVecs];
  OPST_UNROLL for (int v = 0; v < kVecs; ++v) sum[v] = begins ? zero : F32::load(sums + j + v * F32::kLanes);
  for (int i = 0; i < rows; ++i) {
    const F32 w = F32::set1(weights[i]);
    const float* products = s.row(first + i) + j;
    // max gives its second operand where one is NaN.
    OPST_UNROLL for (int v = 0; v < kVecs; ++v) {
      sum[v] = simd::fma(w, simd::max(zero, F32::load(products + v * F32::kLanes)), sum[v]);
    }
  }
  OPST_UNROLL for (int v = 0; v < kVecs; ++v) sum[v].store(sums + j + v * F32::kLanes);
}
// Four vectors side by side: of one alone each addition would wait for the one before.
OPST_NOINLINE void add_heads(const Scores<float>& s, int first, int rows, const float* weights, bool begins,
                             float* sums) {
  constexpr int kVecs = 4;
  int64_t j = 0;
  for (; j + kVecs * F32::kLanes <= s.span.width; j += kVecs * F32::kLanes) {
    add_columns<kVecs>(s, first, rows, weights, begins, j, sums);
  }
  for (; j < s.span.width; j += F32::kLanes) add_columns<1>(s, first, rows, weights, begins, j, sums);
}

OPST_INLINE uint64_t candidate(float score, int64_t key) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, score + 0.0f);  // -0 + 0 is 0
  const uint32_t flips = (bits & 0x80000000u) != 0 ? 0xffffffffu : 0x80000000u;
  const uint32_t high = score == score ? bits ^ flips : 0;
  return static_cast<uint64_t>(high) << 32 | static_cast<uint32_t>(~key);
}

// Appends keys first_key + j, j < n, unless scores[j] <= threshold. After the first few thousand keys of a row most
// vectors of scores hold one candidate or none, which one comparison tells.
OPST_NOINLINE void append(const float* scores, int64_t n, int64_t first_key, Candidates& candidates) {
  const float last = candidates.threshold;
  const F32 threshold = F32::set1(last), zero = F32::zero(), one = F32::set1(1);
  int64_t count = candidates.count;
  for (int64_t j = 0; j < n; j += F32::kLanes) {
    const F32 passed = simd::select(F32::load(scores + j) <= threshold, zero, one);
    if (!simd::any(zero < passed)) continue;
    const int64_t end = n - j < F32::kLanes ? n : j + F32::kLanes;
    for (int64_t i = j; i < end; ++i) {  // without branches, which nothing would predict
      candidates.words[count] = candidate(scores[i], first_key + i);
      count += scores[i] <= last ? 0 : 1;
    }
  }
  candidates.count = count;
}

template <class P>
void score_tile(const IndexerBlock& block, const KvTile* tiles, int64_t num_tiles) {
  const QueryBlock& q = block.rows;
  alignas(64) float row_max[P::kTileRows * F32::kLanes];  // which the product takes besides
  const RowTiles row_tiles(q.rows, P::kTileRows);
  KvTile pair[2] = {tiles[0], tiles[num_tiles - 1]};
  const bool rows_ahead = num_tiles > 1 && pair[1].keys == nullptr;
  PackedSource<P> packed(q, pair, 0, num_tiles);
  for (int64_t b = 0; b < row_tiles.count(); ++b) {
    const RowTile rt = row_tiles[b];
    // Rows that lie anywhere: each register tile fetches from the first of its share on.
    if (rows_ahead) pair[1].keys = pair[1].key_rows[b * pair[1].count / row_tiles.count()];
    PackedSource<P> anywhere(q, pair, 0, num_tiles);
    PackedSource<P>& source = rows_ahead ? anywhere : packed;
    const Scores<float> s = {rt, source.span(rt), static_cast<float*>(q.scores), q.scores_stride};
    if (s.span.width == 0) continue;
    source.template score<false>(s, row_max);
    for (int i = 0; i < rt.rows;) {
      const int64_t row = rt.first + i, query = row / block.group, head = row % block.group;
      const int64_t left = block.group - head;
      const int rows = left < rt.rows - i ? static_cast<int>(left) : rt.rows - i;
      add_heads(s, i, rows, block.weights + row, head == 0, block.sums + query * block.sums_stride);
      i += rows;
    }
  }
  // Keys are hidden at their end only, so a query's columns begin with the tile.
  for (int64_t query = 0; query * block.group < q.rows; ++query) {
    const RowKeys seen = keys_of(q, tiles[0]).of_row(query * block.group);
    const float* scores = block.sums + query * block.sums_stride;
    if (seen.end > 0) append(scores, seen.end, tiles[0].first_key, block.candidates[query]);
  }
}

}  // namespace

extern const IndexerTable kIndexerTable;
constinit const IndexerTable kIndexerTable = {
    .f32 = score_tile<tile::ProductF32>,
#if defined(__AVX512BF16__)
    .bf16_dot = score_tile<tile::ProductBf16Dot>,
#endif
};

}  // namespace opst::OPST_ISA_NS::attention

// The contract between indexer.cc and the per-level kernels: a block of queries against one tile of keys.
//
// The rows of a block are stacked as attention's are (kernels.h): row r is query r / group, head r % group. Keys are
// packed and rows copied by attention's own kernels; what is new begins behind the product. Plain data only.
//
// A candidate is one word of 64 bits, of which the larger comes first in the order of opst/lightning_indexer.h:
//
//   high half   the bits of the score, -0 as 0, all of them flipped where the sign is set, else only the sign;
//               0 where the score is NaN
//   low half    the bits of the key's index, flipped
//
// No two words of a query are equal, so the order is total: what is selected does not depend on how the keys are cut
// into tiles and parts.
#pragma once

#include <cstdint>

#include "attention/kernels.h"

namespace opst::attention {

// The candidates of one query: every key seen so far whose score may be among the best.
struct Candidates {
  uint64_t* words;  // keys ascend; with room for those of one more tile, and one word more
  int64_t count;
  // A key with this score, or less, is behind what is kept already: keys ascend. NaN: every key is a candidate.
  float threshold;
};

struct IndexerBlock {
  QueryBlock rows;         // of whole queries; without values, rules and state
  int64_t group;           // query heads of a key head
  const float* weights;    // of the rows
  float* sums;             // [queries][sums_stride], scratch
  int64_t sums_stride;     // at least a tile's keys, rounded up to panels
  Candidates* candidates;  // of the queries
};

// Appends the keys of tiles[0], packed, to the candidates of the queries that see them, unless their scores are at most
// the threshold. What will be read for tiles[1], if num_tiles is 2, is fetched meanwhile: `keys`, or where that is null
// the rows of `key_rows`, which will be packed.
using ScoreTile = void (*)(const IndexerBlock& block, const KvTile* tiles, int64_t num_tiles);
struct IndexerTable {
  ScoreTile f32, bf16_dot = nullptr;  // by AttentionProduct, as in KernelTable
};

}  // namespace opst::attention

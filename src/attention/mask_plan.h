// How plans, forward and backward, cut rows and keys where a block mask is cut: a tile that no mask block ends within
// is seen whole or not at all, and costs what it would without a mask.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/int_math.h"
#include "opst/attention.h"

namespace opst::attention {

// Keys (rows) of a tile (block): as large a part of a mask's block as `most` allows, if that is at least `least`;
// several whole blocks where they are small; or `most`, where no part is large enough.
inline int64_t fit_mask_block(int64_t most, int64_t mask_block, int64_t least) {
  if (mask_block <= least) {
    return std::min(ceil_div(least, mask_block), std::max<int64_t>(most / mask_block, 1)) * mask_block;
  }
  for (int64_t part = std::min(most, mask_block); part >= least; --part) {
    if (mask_block % part == 0) return part;
  }
  return most;
}
// Fewer keys: the softmax between the products takes too much of the time. Fewer rows, in register tiles: reading keys.
// (Both estimated; backward's tiles are smaller, and half of one is enough there.)
inline constexpr int64_t kLeastMaskedKeys = 64, kLeastMaskedTiles = 4;

inline int64_t fit_masked_keys(const AttentionProblem& p, int64_t most) {
  const int64_t block = p.block_mask.block_kv;
  const bool free = !p.block_mask || p.options.block_kv > 0 || block >= p.kv_len;
  return free ? most : fit_mask_block(most, block, std::min(kLeastMaskedKeys, ceil_div(most, 2)));
}
// Stacked rows that have a row of the mask in common, or one each of the group's heads.
inline int64_t rows_of_mask_row(const AttentionProblem& p) {
  return (Size(p.block_mask.block_q) * (p.num_heads / p.num_kv_heads)).value();
}
inline int64_t fit_masked_rows(const AttentionProblem& p, int64_t most, int64_t rows, int64_t tile_rows) {
  const int64_t least = kLeastMaskedTiles * tile_rows;
  const bool free = !p.block_mask || p.options.block_q > 0 || rows <= least || rows_of_mask_row(p) >= rows;
  return free ? most : fit_mask_block(most, rows_of_mask_row(p), least);
}

// A line cut at multiples of `length`, and at multiples of `size`: the most cells of the latter that one of the former
// touches.
inline int64_t cells_touched(int64_t length, int64_t size) {
  if (length % size == 0) return length / size;
  return size % length == 0 ? 1 : (length - 1) / size + 2;
}
// The most tiles that a block of rows sees.
inline Size tiles_seen(const AttentionProblem& p, int64_t block_q, int64_t block_kv) {
  const bool own_rows = p.block_mask.heads == p.num_heads && p.num_heads > p.num_kv_heads;
  const Size mask_rows =
      Size(cells_touched(block_q, rows_of_mask_row(p))) * (own_rows ? p.num_heads / p.num_kv_heads : 1);
  const Size tiles = mask_rows * p.block_mask.row_blocks * cells_touched(p.block_mask.block_kv, block_kv);
  return std::min(tiles, Size(ceil_div(p.kv_len, block_kv)));
}

// Of backward's lists, which belong to rows of row_offsets, the heads of a group together: how many there are, and the
// most pairs of a block of rows and a tile that they have in all.
inline Size mask_lists(const AttentionProblem& p) {
  return p.block_mask ? Size(p.block_mask.batch) * std::min(p.block_mask.heads, p.num_kv_heads) : 0;
}
inline Size mask_pairs(const AttentionProblem& p, int64_t blocks, int64_t block_q, int64_t tiles, int64_t block_kv) {
  if (!p.block_mask) return 0;
  const Size pairs_of_entry =
      Size(cells_touched(rows_of_mask_row(p), block_q)) * cells_touched(p.block_mask.block_kv, block_kv);
  return std::min(pairs_of_entry * p.block_mask.entries, mask_lists(p) * blocks * tiles);
}

}  // namespace opst::attention

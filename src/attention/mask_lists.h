// MaskLists: which tiles of keys a block mask shows to which blocks of query rows, as backward needs it: the tiles of
// each block, in whose order its dQ is summed, and, transposed, the blocks of each tile, which a task meets.
//
// There is a list for every row of row_offsets (the query heads of a KV head have one together), whatever the lengths of
// sequences and the structure: who uses it leaves out what these hide.
//
//   tiles of block i of list l     tiles [block_ends[l][i]],  [block_ends[l][i + 1]]), ascending
//   blocks of tile t of list l     blocks[tile_ends[l][t]],   [tile_ends[l][t + 1]]),  ascending
//
// Made once per call, in three loops over the mask: count, write, transpose; the first two over blocks, the last over
// lists, each by all threads. Memory: BackwardCallPieces; as large as the mask's own columns where blocks and tiles are
// as large as the mask's.
#pragma once

#include <span>

#include "attention/backward_layout.h"

namespace opst::attention {

class MaskLists {
 public:
  explicit MaskLists(const BackwardData& data) : d_(data) {}

  void build(ThreadPool& pool) const {
    if (lists_ == 0) return;
    pool.parallel_for(lists_ * blocks_, [&](int64_t i, int worker) {
      int64_t count = 0;
      for_tiles(i / blocks_, i % blocks_, worker, [&](int64_t) { ++count; });
      block_ends(i / blocks_)[i % blocks_ + 1] = count;
    });
    int64_t total = 0;
    for (int64_t list = 0; list < lists_; ++list) {
      block_ends(list)[0] = total;
      for (int64_t i = 0; i < blocks_; ++i) total = block_ends(list)[i + 1] += total;
    }
    pool.parallel_for(lists_ * blocks_, [&](int64_t i, int worker) {
      int64_t* to = d_.call.mask_tiles + block_ends(i / blocks_)[i % blocks_];
      for_tiles(i / blocks_, i % blocks_, worker, [&](int64_t tile) { *to++ = tile; });
    });
    pool.parallel_for(lists_, [&](int64_t list, int) { transpose(list); });
  }

  std::span<const int64_t> tiles_of(int64_t head, int64_t block) const {
    const int64_t* ends = block_ends(list_of(head)) + block;
    return {d_.call.mask_tiles + ends[0], d_.call.mask_tiles + ends[1]};
  }
  std::span<const int64_t> blocks_of(int64_t head, int64_t tile) const {
    const int64_t* ends = tile_ends(list_of(head)) + tile;
    return {d_.call.mask_blocks + ends[0], d_.call.mask_blocks + ends[1]};
  }

 private:
  int64_t lists_of_sequence() const { return std::min(d_.p.block_mask.heads, d_.p.num_kv_heads); }
  int64_t list_of(int64_t head) const {
    const int64_t sequence = d_.p.block_mask.batch > 1 ? d_.batch(head) : 0;
    return sequence * lists_of_sequence() + (lists_of_sequence() > 1 ? d_.kv_head(head) : 0);
  }
  int64_t head_of(int64_t list) const {
    return list / lists_of_sequence() * d_.p.num_kv_heads + list % lists_of_sequence();
  }
  // One more than there are blocks, or tiles; of tiles another one, which transpose needs.
  int64_t* block_ends(int64_t list) const { return d_.call.mask_block_ends + list * (blocks_ + 1); }
  int64_t* tile_ends(int64_t list) const { return d_.call.mask_tile_ends + list * (tiles_ + 2); }

  template <class Visit>
  void for_tiles(int64_t list, int64_t block, int worker, const Visit& visit) const {
    const int64_t first_row = block * d_.plan.block_q, rows = std::min(d_.plan.block_q, rows_of(d_.p) - first_row);
    MaskWalk walk(d_.head_mask(head_of(list)), {first_row, rows, d_.group}, 0, {0, d_.p.kv_len},
                  d_.worker(worker).mask_cursors);
    for (int64_t key = walk.next_key(); key != MaskWalk::kNone; key = walk.next_key()) {
      const int64_t tile = key / d_.plan.block_kv;
      visit(tile);
      walk.skip_to((tile + 1) * d_.plan.block_kv);
    }
  }
  // A counting sort: ends[t + 2] counts tile t, then ends[t + 1] is where the next of its blocks goes.
  void transpose(int64_t list) const {
    int64_t* ends = tile_ends(list);
    const int64_t *from = block_ends(list), *tiles = d_.call.mask_tiles;
    std::fill_n(ends, tiles_ + 2, 0);
    ends[0] = ends[1] = from[0];
    for (int64_t i = from[0]; i < from[blocks_]; ++i) ++ends[tiles[i] + 2];
    for (int64_t t = 0; t < tiles_; ++t) ends[t + 2] += ends[t + 1];
    for (int64_t block = 0; block < blocks_; ++block) {
      for (int64_t i = from[block]; i < from[block + 1]; ++i) d_.call.mask_blocks[ends[tiles[i] + 1]++] = block;
    }
  }

  const BackwardData& d_;
  const int64_t blocks_ = d_.layout.blocks, tiles_ = d_.layout.tiles, lists_ = d_.layout.mask_lists;
};

}  // namespace opst::attention

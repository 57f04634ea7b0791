// Which keys a block of query rows sees, as an interval per row and as a list of tiles.
//
// Masks of structure, block masks and trees change the list, and nothing else. A tile that no row sees is skipped, and only
// `partial` tiles, which some row does not see whole, make the kernel look at positions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "attention/kernels.h"
#include "attention/mask_walk.h"
#include "attention/visibility.h"
#include "opst/attention.h"

namespace opst::attention {

// What KvBlocks needs of a block mask or a tree.
struct MaskedRows {
  HeadMask mask;
  MaskCursor* cursors;  // [MaskWalk::most_cursors]
  // Where keys of a tile may begin: block_kv where packed tiles are shared and come whole; else at multiples of it from
  // the first key to the last one that some row sees, and never across a multiple of block_kv.
  int64_t key_step;
  int64_t first_tile = 0;         // of those that some row sees: how many to leave out,
  int64_t num_tiles = INT64_MAX;  // and how many to list at most
  TreeRows tree = {};             // in the place of a mask
};

// seen[tile]: whether a block mask shows some of `queries` queries some key of the tile; of tiles of keys below kv_len.
inline void mark_seen_tiles(const HeadMask& mask, int64_t kv_len, int64_t queries, int64_t block_kv, bool* seen) {
  std::fill_n(seen, (kv_len + block_kv - 1) / block_kv, false);
  for (int64_t query = 0; query < queries; query += mask.mask->block_q) {
    for (int64_t head = 0; head < mask.heads; ++head) {
      mask.any_run(query, head, {0, kv_len}, [&](KeyInterval keys) {
        std::fill(seen + keys.begin / block_kv, seen + (keys.end - 1) / block_kv + 1, true);
        return false;
      });
    }
  }
}

// Joins whole tiles of a list, up to `most` neighbours at a time (KvTile::joined).
inline void join_tiles(KvTile* tiles, int64_t n, int64_t block_kv, int64_t most) {
  const auto whole = [&](const KvTile& t) { return !t.partial && t.count == block_kv; };
  for (int64_t first = 0, end = 0; first < n; first = end) {
    while (end < n && end - first < most && whole(tiles[end])) ++end;
    end = std::max(end, first + 1);
    tiles[first].joined = end - first;
  }
}

// The tiles of [range.begin, range.end), cut on multiples of block_kv, that rows [first_row, first_row + rows) see: a
// list of runs of neighbouring tiles. Row r is query r / group. With a block mask (its range is all keys) or a tree a
// tile may come several times, with intervals of its own (mask_walk.h).
class KvBlocks {
 public:
  // Writes the visible interval of each row to visible_begin and visible_end.
  KvBlocks(const Visibility& visibility, int64_t first_row, int64_t rows, int64_t group, KeyInterval range,
           int64_t block_kv, int64_t* visible_begin, int64_t* visible_end, const MaskedRows* masked = nullptr)
      : block_kv_(block_kv), some_{range.end, range.begin}, all_(range) {
    int64_t r = 0;
    if (visibility.all()) {
      std::fill_n(visible_begin, rows, 0);
      std::fill_n(visible_end, rows, visibility.kv_len);
      r = rows;
    }
    for (int64_t query = first_row / group; r < rows; ++query) {
      const KeyInterval keys = visibility.keys_of_query(query);
      const int64_t end = std::min(rows, (query + 1) * group - first_row);  // of the query's rows
      for (; r < end; ++r) {
        visible_begin[r] = keys.begin;
        visible_end[r] = keys.end;
      }
    }
    if (visibility.prefix > 0) {
      for (r = 0; r < rows; ++r) see({visible_begin[r], visible_end[r]}, visibility.prefix);
    } else if (rows > 0) {
      // Both ends only grow from row to row: the first and the last that see something are enough.
      int64_t first = 0, last = rows - 1;
      while (first < last && visible_begin[first] >= visible_end[first]) ++first;
      while (last > first && visible_begin[last] >= visible_end[last]) --last;
      for (const int64_t row : {int64_t{0}, first, last, rows - 1}) see({visible_begin[row], visible_end[row]});
    }
    range_end_ = std::min(range.end, visibility.kv_len);
    prefix_end_ = std::min(visibility.prefix, range_end_);
    next_ = range.begin;
    run_end_ = prefix_end_;
    last_run_ = {std::max(some_.begin, range.begin) / block_kv * block_kv, std::min(some_.end, range.end)};
    if (masked == nullptr || rows == 0) return;
    key_step_ = masked->key_step;
    tiles_left_ = masked->num_tiles;
    visible_begin_ = visible_begin, visible_end_ = visible_end;
    first_row_ = first_row, group_ = group;
    const MaskWalk::Rows of_block = {first_row, rows, group};
    const KeyInterval behind = {std::max(some_.begin, prefix_end_), std::min(some_.end, range_end_)};
    walk_ = masked->tree ? MaskWalk(masked->tree, of_block, prefix_end_, behind, masked->cursors)
                         : MaskWalk(masked->mask, of_block, prefix_end_, behind, masked->cursors);
    walk_.skip_to(range.begin);
    for (int64_t i = 0; i < masked->first_tile && find_tile(); ++i) walk_.skip_to(tile_.end);
    tile_ = {};
  }

  // Of rows that see any intervals, which are given.
  KvBlocks(KeyInterval range, int64_t block_kv, int64_t rows, const int64_t* visible_begin, const int64_t* visible_end)
      : block_kv_(block_kv), some_{range.end, range.begin}, all_(range), range_end_(range.end), next_(range.begin) {
    for (int64_t r = 0; r < rows; ++r) see({visible_begin[r], visible_end[r]});
    last_run_ = {std::max(some_.begin, range.begin) / block_kv * block_kv, std::min(some_.end, range.end)};
    visible_begin_ = visible_begin, visible_end_ = visible_end;
  }

  // Describes the next tile, all but where its keys lie; false where none is left. Tiles ascend, with gaps. With a
  // block mask or a tree, own_begin and own_end [rows] have room for intervals of the tile's own.
  bool next(KvTile* tile, int64_t* own_begin = nullptr, int64_t* own_end = nullptr) {
    if (walk_) return next_masked(tile, own_begin, own_end);
    if (next_ >= run_end_) {  // the next run, behind the tiles of this one
      next_ = std::max(next_, last_run_.begin);
      run_end_ = last_run_.end;
      if (next_ >= run_end_) return false;
    }
    // Tiles are whole except at the end of the keys: packed tiles are shared between blocks of rows.
    const int64_t count = std::min(block_kv_, range_end_ - next_), last = next_ + count;
    const bool partial = (next_ < all_.begin || last > all_.end) && last > prefix_end_;
    *tile = {.first_key = next_, .count = count, .partial = partial};
    // The block's intervals would have to ascend.
    if (partial) tile->visible_begin = visible_begin_, tile->visible_end = visible_end_;
    next_ += block_kv_;
    return true;
  }
  // The keys of a tile, as runs of neighbouring ones: one run.
  std::span<const KeyInterval> runs_of(const KvTile& tile) {
    keys_of_tile_ = {tile.first_key, tile.first_key + tile.count};
    return {&keys_of_tile_, 1};
  }

 private:
  // The next tile that some row sees by the block mask or the tree.
  bool find_tile() {
    const int64_t key = walk_.next_key();
    if (key == MaskWalk::kNone) return false;
    const int64_t first = key / block_kv_ * block_kv_;
    tile_ = {first, std::min(first + block_kv_, range_end_)};
    return true;
  }
  bool next_masked(KvTile* tile, int64_t* own_begin, int64_t* own_end) {
    while (tile_.begin == tile_.end || !walk_.next_entry(tile_.end)) {
      if (tiles_left_ == 0 || !find_tile()) return false;
      --tiles_left_;
    }
    const KeyInterval seen = walk_.hull();
    const bool shared = key_step_ == block_kv_;
    const KeyInterval keys = shared ? tile_ : KeyInterval{seen.begin / key_step_ * key_step_, seen.end};
    const bool by_mask = walk_.same() && seen.begin == keys.begin && seen.end == keys.end;  // all rows see all of it
    const bool by_structure = walk_.in_prefix() || (all_.begin <= keys.begin && keys.end <= all_.end);
    *tile = {.first_key = keys.begin, .count = keys.end - keys.begin, .partial = !(by_mask && by_structure)};
    if (by_mask && (by_structure || prefix_end_ == 0)) return true;  // the block's intervals serve
    const auto structure = [&](int64_t query) {
      const int64_t r = std::max<int64_t>(query * group_ - first_row_, 0);
      return KeyInterval{visible_begin_[r], visible_end_[r]};
    };
    walk_.write_intervals(structure, own_begin, own_end);
    tile->visible_begin = own_begin;
    tile->visible_end = own_end;
    return true;
  }

  // Counts a row's keys in. Keys of the prefix alone stay out of `some_`: behind them may lie tiles that no row sees.
  void see(KeyInterval keys, int64_t prefix = 0) {
    all_ = {std::max(all_.begin, keys.begin), std::min(all_.end, keys.end)};
    if (keys.begin >= keys.end || keys.end <= prefix) return;
    some_ = {std::min(some_.begin, keys.begin), std::max(some_.end, keys.end)};
  }

  int64_t block_kv_;
  KeyInterval some_;  // from the first to the last key that some row sees, beyond the prefix
  KeyInterval all_;   // seen by every row
  int64_t range_end_ = 0;
  int64_t prefix_end_ = 0;
  // What is left: the tiles of keys [next_, run_end_), first of the prefix, and those of the last run.
  int64_t next_ = 0, run_end_ = 0;
  KeyInterval last_run_;
  KeyInterval keys_of_tile_;
  // With a block mask or a tree:
  MaskWalk walk_;
  KeyInterval tile_;  // the tile at hand
  int64_t key_step_ = 0, tiles_left_ = 0;
  const int64_t *visible_begin_ = nullptr, *visible_end_ = nullptr;
  int64_t first_row_ = 0, group_ = 1;
};

}  // namespace opst::attention

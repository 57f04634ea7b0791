// SelectedKeys: the keys that a query reads by its list of sparse indices, tile by tile.
//
// All query heads of a KV head share the list, so a block of rows is (part of) one query's group, and sees every key of
// its tiles. To kernels a tile is a list of row pointers: keys of any places make one tile, of several *runs* of
// neighbouring keys. Only what asks for the position of a key (reads_positions) takes a tile for each run.
//
//   list 5 0 9 -1, block_size 4, tiles of 6 keys, all keys visible
//   gathered      keys 20 21 22 23 0 1 | 2 3 36 37 38 39
//   by runs       keys 20 21 22 23 | 0 1 2 3 | 36 37 38 39
//
// Work: a step for each block of the list, and a pointer for each key.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "attention/kernels.h"
#include "attention/visibility.h"
#include "core/int_math.h"
#include "opst/attention.h"
#include "opst/page_layout.h"

namespace opst::attention {

// Of the longest list, keys in whole blocks: no block comes twice.
inline Size listed_keys(const SparseIndicesSizes& s, int64_t kv_len) {
  return Size(std::min(s.count, ceil_div(kv_len, s.block_size))) * s.block_size;
}
// The most keys that a row reads.
inline int64_t keys_read(const AttentionProblem& p) {
  return p.sparse_indices ? std::min(Size(p.kv_len), listed_keys(p.sparse_indices, p.kv_len)).value() : p.kv_len;
}
// Whether scores or weights depend on the positions of keys.
inline bool reads_positions(const AttentionProblem& p) {
  return p.has_mask || p.has_bias || p.has_alibi || p.has_drop_mask || p.options.dropout.keep_prob < 1;
}
// Rows of a block: the largest part of a group, in equal parts, that `most` >= 1 allows.
inline int64_t part_of_group(int64_t group, int64_t most) {
  int64_t rows = std::min(group, most);
  while (group % rows != 0) --rows;
  return rows;
}

// Entries of a query for a KV head.
struct IndexList {
  const int32_t* entries = nullptr;
  int64_t stride = 0, count = 0, block_size = 1;

  int32_t operator[](int64_t i) const { return entries[i * stride]; }
};

class SelectedKeys {
 public:
  struct Tiles {
    int64_t most_keys;  // of a tile
    bool by_runs;       // a tile is one run,
    int64_t key_step;   // and begins at a multiple of it
    KeyInterval* runs;  // [most_keys] room
    int64_t rows;       // of the block
  };
  // `part`: of the list's keys, counted in whole blocks. `seen`: by structure, besides keys below `prefix`.
  SelectedKeys(const IndexList& list, const Visibility& visibility, int64_t query, KeyInterval part, const Tiles& tiles)
      : list_(list), tiles_(tiles), kv_len_(visibility.kv_len), prefix_(visibility.prefix), next_(part.begin) {
    end_ = std::min(part.end, (Size(list.count) * list.block_size).value());
    seen_ = visibility.keys_of_query(query);
    seen_.begin = std::max(seen_.begin, prefix_);
  }

  // As KvBlocks::next; own_begin and own_end have room only where key_step > 1.
  bool next(KvTile* tile, int64_t* own_begin, int64_t* own_end) {
    int64_t count = 0, hidden = 0;
    for (num_runs_ = 0; count < tiles_.most_keys && find_run();) {
      hidden = tiles_.by_runs ? run_.begin % tiles_.key_step : 0;
      const int64_t n = std::min(run_.end - run_.begin, tiles_.most_keys - count - hidden);
      tiles_.runs[num_runs_++] = {run_.begin - hidden, run_.begin + n};
      run_.begin += n;
      count += hidden + n;
      if (tiles_.by_runs) break;
    }
    if (count == 0) return false;
    *tile = {.first_key = tiles_.runs[0].begin, .count = count, .partial = hidden > 0};
    if (hidden > 0) {
      std::fill_n(own_begin, tiles_.rows, tile->first_key + hidden);
      std::fill_n(own_end, tiles_.rows, tile->first_key + count);
      tile->visible_begin = own_begin;
      tile->visible_end = own_end;
    }
    return true;
  }
  // Keys of the tile that next() described last.
  std::span<const KeyInterval> runs_of(const KvTile&) const { return {tiles_.runs, static_cast<size_t>(num_runs_)}; }

 private:
  // Whether run_ has keys, after it has been moved on to the next ones where it had none. A block has up to two: what
  // it has of the prefix, and behind it.
  bool find_run() {
    while (run_.begin >= run_.end) {
      if (rest_.begin < rest_.end) {
        run_ = rest_, rest_ = {};
        break;
      }
      if (next_ >= end_) return false;
      const int64_t entry = next_ / list_.block_size, index = list_[entry];
      if (index < 0) {
        next_ = end_;
        return false;
      }
      const int64_t stop = std::min((entry + 1) * list_.block_size, end_), shift = (index - entry) * list_.block_size;
      const KeyInterval keys = {next_ + shift, std::min(stop + shift, kv_len_)};
      run_ = {keys.begin, std::min(keys.end, prefix_)};
      rest_ = {std::max(keys.begin, seen_.begin), std::min(keys.end, seen_.end)};
      next_ = stop;
    }
    return true;
  }

  const IndexList list_;
  const Tiles tiles_;
  const int64_t kv_len_, prefix_;
  KeyInterval seen_;        // behind the prefix
  int64_t next_, end_ = 0;  // of the list's keys
  KeyInterval run_, rest_;
  int64_t num_runs_ = 0;
};

}  // namespace opst::attention

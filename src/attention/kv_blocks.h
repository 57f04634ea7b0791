// Which keys a block of query rows sees, as an interval per row and as a list of tiles.
//
// Masks of structure live here and nowhere else: they change the list. A tile that no row sees is skipped, and only
// `partial` tiles, which some row does not see whole, make the kernel look at positions.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/kernels.h"
#include "opst/attention.h"

namespace opst::attention {

struct KeyInterval {
  int64_t begin = 0;
  int64_t end = 0;  // empty where end <= begin
};

// What the structure of one sequence shows: query i sees keys [i + low, i + high], and those below the prefix.
struct Visibility {
  int64_t kv_len = 0;
  int64_t low = -kFar, high = kFar;
  int64_t prefix = 0;

  static Visibility of(const AttentionOptions& options, int64_t query_len, int64_t kv_len, int64_t prefix = 0) {
    const int64_t off = options.alignment == CausalAlignment::bottom_right ? kv_len - query_len : 0;
    // Sides beyond any length do not limit; what is added to them must not overflow.
    const int64_t left = std::clamp(options.window_left, -kFar, kFar);
    int64_t right = std::clamp(options.window_right, -kFar, kFar);
    if (options.causal) right = std::min<int64_t>(right, 0);
    return {kv_len, left == kFar ? -kFar : off - left, right == kFar ? kFar : off + right, prefix};
  }

  // The interval of query i. An interval that touches the prefix holds it; otherwise the prefix is seen besides.
  KeyInterval keys_of_query(int64_t i) const {
    const int64_t begin = std::clamp<int64_t>(i + low, 0, kv_len), end = std::clamp<int64_t>(i + high + 1, 0, kv_len);
    if (prefix == 0) return {begin, end};
    if (begin >= end) return {0, prefix};
    return begin <= prefix ? KeyInterval{0, std::max(end, prefix)} : KeyInterval{begin, end};
  }

  // Whether every query sees every key.
  bool all() const { return low == -kFar && high == kFar; }
  // First key that query i or a later one sees, unless by the prefix.
  int64_t first_key(int64_t i) const { return std::clamp<int64_t>(i + low, 0, kv_len); }
  // Whether some of `query_len` queries may see some of keys [begin, end).
  bool may_see(KeyInterval keys, int64_t query_len) const {
    return query_len > 0 && (keys.begin < prefix || (keys.begin < query_len + high && keys.end > low));
  }
  // The most keys from the first to the last one that `queries` neighbouring queries of a sequence see, of which any
  // has at most kv_len keys and query_len queries.
  static int64_t most_keys(const AttentionOptions& options, int64_t query_len, int64_t kv_len, int64_t queries) {
    const Visibility v = of(options, query_len, kv_len);
    int64_t keys = kv_len;
    if (v.low != -kFar && v.high != kFar) keys = queries + v.high - v.low;
    if (v.high != kFar && options.alignment == CausalAlignment::top_left) keys = std::min(keys, query_len + v.high);
    return std::clamp<int64_t>(keys, 0, kv_len);
  }

  static constexpr int64_t kFar = int64_t{1} << 60;
};

// The tiles of [range.begin, range.end), cut on multiples of block_kv, that rows [first_row, first_row + rows) see: a
// list of runs of neighbouring tiles. Row r is query r / group.
class KvBlocks {
 public:
  // Writes the visible interval of each row to visible_begin and visible_end.
  KvBlocks(const Visibility& visibility, int64_t first_row, int64_t rows, int64_t group, KeyInterval range,
           int64_t block_kv, int64_t* visible_begin, int64_t* visible_end)
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
  }

  // Describes the next tile, all but where its keys lie; false where none is left. Tiles ascend, with gaps.
  bool next(KvTile* tile) {
    if (next_ >= run_end_) {  // the next run, behind the tiles of this one
      next_ = std::max(next_, last_run_.begin);
      run_end_ = last_run_.end;
      if (next_ >= run_end_) return false;
    }
    // Tiles are whole except at the end of the keys: packed tiles are shared between blocks of rows.
    const int64_t count = std::min(block_kv_, range_end_ - next_), last = next_ + count;
    const bool partial = (next_ < all_.begin || last > all_.end) && last > prefix_end_;
    *tile = {.first_key = next_, .count = count, .partial = partial};
    next_ += block_kv_;
    return true;
  }

 private:
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
};

}  // namespace opst::attention

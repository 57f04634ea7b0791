// MaskWalk: what a block mask shows to a block of query rows, tile by tile.
//
// Kernels know of a tile one interval of keys per row. But the rows of a block may belong to several rows of the mask,
// and each of these may show several runs of a tile's keys. So a tile comes as one or more *entries*: the first run of
// every row of the mask, then the second of every row, until none has any left. Of one tile of 8 keys:
//
//   keys      0 1 2 3 4 5 6 7     entry 0    entry 1
//   row 0     x x . . x . . .     [0, 2)     [4, 5)
//   row 1     . x x . . . x x     [1, 3)     [6, 8)
//   row 2     . . . . x x x x     [4, 8)     none
//
// Where rows and tiles are cut as the mask is, which plans see to, an entry is a whole tile for all rows.
//
// A tree of draft tokens is walked in the same way: a query is a row, whose first run is all keys before the drafts.
//
// Work: each row's list is read once from the first tile to the last, a tile that some row sees costs a look at all
// rows of the mask that the block has, and a tile that none sees costs nothing.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "attention/visibility.h"
#include "core/elements.h"
#include "core/int_math.h"
#include "opst/block_mask.h"

namespace opst::attention {

// Entries of BlockMask::columns.
struct MaskRow {
  int64_t begin, end;
};

// The rows of a block mask for one (batch, KV head) pair, and for the query heads of its group.
struct HeadMask {
  const BlockMask* mask = nullptr;
  int64_t offset = 0;       // of the first head's row 0 among the elements of row_offsets
  int64_t head_stride = 0;  // between the group's heads that have rows of their own, in elements
  int64_t heads = 1;        // of the group that have

  int64_t column(int64_t entry) const { return index_at(mask->columns, entry); }
  MaskRow row(int64_t query_block, int64_t head) const {
    const int64_t first = offset + head * head_stride + query_block * mask->row_offsets.strides[2];
    return {offset_at(first), offset_at(first + mask->row_offsets.strides[2])};
  }
  // The first of entries [begin, end) whose block, or a later one, holds `key`; `end` where there is none.
  int64_t find(int64_t begin, int64_t end, int64_t key) const {
    const int64_t block = key / mask->block_kv;
    while (begin < end) {
      const int64_t middle = begin + (end - begin) / 2;
      if (column(middle) < block) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    return begin;
  }
  // visit(KeyInterval) for what a query's visible key blocks have of `keys`, ascending, until it returns true; whether
  // it has.
  template <class Visit>
  bool any_run(int64_t query, int64_t head, KeyInterval keys, const Visit& visit) const {
    if (keys.begin >= keys.end) return false;
    const MaskRow r = row(query / mask->block_q, head);
    for (int64_t entry = find(r.begin, r.end, keys.begin); entry < r.end; ++entry) {
      const int64_t first = column(entry) * mask->block_kv;
      if (first >= keys.end) return false;
      if (visit(KeyInterval{std::max(first, keys.begin), std::min(first + mask->block_kv, keys.end)})) return true;
    }
    return false;
  }
  // The same for all that a query sees: keys below the prefix and those of its interval, as Visibility has them.
  template <class Visit>
  bool any_run_of(const Visibility& v, int64_t query, int64_t head, const Visit& visit) const {
    const auto [begin, end] = v.keys_of_query(query);
    return any_run(query, head, {0, v.prefix}, visit) || any_run(query, head, {std::max(begin, v.prefix), end}, visit);
  }

 private:
  int64_t offset_at(int64_t i) const {
    const ConstTensor& t = mask->row_offsets;
    return t.dtype == DType::i64 ? static_cast<const int64_t*>(t.data)[i] : static_cast<const int32_t*>(t.data)[i];
  }
};

// What a tree mask shows the queries of one sequence: all keys before the draft tokens, and those of its own bits.
struct TreeRows {
  const int64_t* words = nullptr;  // of query 0; null: no tree
  int64_t stride = 0;
  int64_t first_draft = 0;  // the key of query 0

  explicit operator bool() const { return words != nullptr; }
  // The first key from `key` on that a word shows, or kNone.
  int64_t next_key(uint64_t word, int64_t key) const {
    if (key < first_draft) return key;
    const uint64_t left = key - first_draft < 64 ? word >> (key - first_draft) : 0;
    return left == 0 ? kNone : key + std::countr_zero(left);
  }
  // One more than the last of the neighbouring keys from `key` on, which the word shows.
  int64_t run_end(uint64_t word, int64_t key) const {
    if (key < first_draft) return first_draft + std::countr_one(word);
    return key + std::countr_one(word >> (key - first_draft));
  }

  static constexpr int64_t kMostQueries = 64;
  static constexpr int64_t kNone = INT64_MAX;
};

// A row of the mask, as far as a walk has come.
struct MaskCursor {
  int64_t entry, end;  // what is left of the row; of a tree: its word
  int64_t key;         // keys below it are behind
  KeyInterval run;     // of the entry at hand; empty where end <= begin
};

class MaskWalk {
 public:
  // Stacked rows [first_row, first_row + rows) of a head, row r being query r / group of head r % group of the group.
  struct Rows {
    int64_t first_row = 0, count = 0, group = 1;

    int64_t first_query() const { return first_row / group; }
    int64_t last_query() const { return (first_row + count - 1) / group; }
  };
  // The most rows of the mask, and so cursors, that a block of so many rows may have.
  static Size most_cursors(Size rows, int64_t group) { return rows + 2 * group; }

  MaskWalk() = default;
  // Walks over keys below `prefix` and over `keys`, which lie behind it, of rows > 0.
  MaskWalk(const HeadMask& mask, Rows rows, int64_t prefix, KeyInterval keys, MaskCursor* cursors)
      : mask_(mask),
        rows_(rows),
        prefix_(prefix),
        keys_(keys),
        last_(std::max(prefix, keys.end)),
        first_block_(rows.first_query() / block_q()),
        cursors_(cursors) {
    const int64_t last_row = rows.first_row + rows.count - 1, last_block = last_row / rows.group / block_q();
    for (int64_t block = first_block_; block <= last_block; ++block) {
      // The block's rows that are queries of this row of the mask.
      const int64_t first = block == first_block_ ? rows.first_row : block * block_q() * rows.group;
      const int64_t last = block == last_block ? last_row : (block + 1) * block_q() * rows.group - 1;
      for (int64_t head = 0; head < mask_.heads; ++head) {
        // A head that none of them has gets the cursor of one that has some: what it sees does not matter.
        const int64_t after = (head - first % rows.group + rows.group) % rows.group;
        const MaskRow row = mask_.row(block, mask_.heads == 1 || first + after <= last ? head : first % rows.group);
        cursors_[num_cursors_++] = {row.begin, row.end, 0, {}};
      }
    }
  }
  MaskWalk(const TreeRows& tree, Rows rows, int64_t prefix, KeyInterval keys, MaskCursor* cursors)
      : tree_(tree),
        rows_(rows),
        prefix_(prefix),
        keys_(keys),
        last_(std::max(prefix, keys.end)),
        first_block_(rows.first_query()),
        cursors_(cursors) {
    for (int64_t query = first_block_; query <= rows.last_query(); ++query) {
      cursors_[num_cursors_++] = {tree_.words[query * tree_.stride], 0, 0, {}};
    }
  }
  explicit operator bool() const { return mask_.mask != nullptr || tree_; }

  // Goes on with the first key that some row sees, which it returns, or kNone.
  int64_t next_key() {
    int64_t first = kNone;
    for (int64_t i = 0; i < num_cursors_; ++i) first = std::min(first, next_key(cursors_[i]));
    return first;
  }
  static constexpr int64_t kNone = INT64_MAX;
  // Leaves out the keys below `key`.
  void skip_to(int64_t key) {
    for (int64_t i = 0; i < num_cursors_; ++i) {
      MaskCursor& c = cursors_[i];
      if (c.key >= key) continue;
      c.key = key;
      if (!tree_) c.entry = mask_.find(c.entry, c.end, key);
    }
  }
  // The next run of every row, of keys below `end`; false where no row has any. Runs do not cross the prefix.
  bool next_entry(int64_t end) {
    hull_ = {kNone, 0};
    same_ = true;
    for (int64_t i = 0; i < num_cursors_; ++i) {
      MaskCursor& c = cursors_[i];
      c.run = next_run(c, end);
      same_ = same_ && c.run.begin == cursors_[0].run.begin && c.run.end == cursors_[0].run.end;
      if (c.run.begin < c.run.end) hull_ = {std::min(hull_.begin, c.run.begin), std::max(hull_.end, c.run.end)};
    }
    return hull_.begin < hull_.end;
  }

  // Of the entry at hand: from the first key of a run to the last one; whether all rows have the same run, that;
  // whether structure does not matter to it.
  KeyInterval hull() const { return hull_; }
  bool same() const { return same_; }
  bool in_prefix() const { return hull_.end <= prefix_; }
  // The keys of the entry at hand that each row of the block sees, where the structure shows a row those of
  // structure(query), besides the prefix: absolute, empty where end <= begin.
  template <class Structure>
  void write_intervals(const Structure& structure, int64_t* begin, int64_t* end) const {
    const int64_t group = rows_.group;
    int64_t query = rows_.first_row / group, head = rows_.first_row % group;
    const MaskCursor* of_block = cursors_;
    int64_t next_block = (first_block_ + 1) * block_q();  // the first query of it
    for (int64_t r = 0; r < rows_.count; ++query, head = 0) {
      if (query == next_block) of_block += mask_.heads, next_block += block_q();
      const KeyInterval shown = structure(query);
      for (; head < group && r < rows_.count; ++head, ++r) {
        KeyInterval run = of_block[mask_.heads > 1 ? head : 0].run;
        if (run.begin >= prefix_) run = {std::max(run.begin, shown.begin), std::min(run.end, shown.end)};
        if (run.end <= run.begin) run = {hull_.begin, hull_.begin};
        begin[r] = run.begin;
        end[r] = run.end;
      }
    }
  }

 private:
  int64_t block_q() const { return tree_ ? 1 : mask_.mask->block_q; }
  int64_t block_kv() const { return mask_.mask->block_kv; }

  int64_t next_key(MaskCursor& c) const {
    if (tree_) return next_key_of_tree(c);
    while (c.entry < c.end) {
      const int64_t first = mask_.column(c.entry) * block_kv(), begin = std::max(first, c.key);
      if (begin >= last_) break;
      if (begin >= first + block_kv()) {
        ++c.entry;
      } else if (begin >= prefix_ && begin < keys_.begin) {  // between the prefix and the rest
        c.key = keys_.begin;
        c.entry = mask_.find(c.entry, c.end, c.key);
      } else {
        return begin;
      }
    }
    c.entry = c.end;
    return kNone;
  }
  int64_t next_key_of_tree(MaskCursor& c) const {
    const auto word = static_cast<uint64_t>(c.entry);
    int64_t key = tree_.next_key(word, c.key);
    if (key >= prefix_ && key < keys_.begin) key = tree_.next_key(word, keys_.begin);
    if (key >= last_) return kNone;
    return c.key = key;
  }
  KeyInterval next_run(MaskCursor& c, int64_t end) const {
    const int64_t begin = next_key(c);
    if (begin >= end) return {end, end};
    const int64_t stop = std::min({end, last_, begin < prefix_ ? prefix_ : last_});
    if (tree_) {
      c.key = std::min(tree_.run_end(static_cast<uint64_t>(c.entry), begin), stop);
      return {begin, c.key};
    }
    int64_t run_end = (mask_.column(c.entry) + 1) * block_kv();
    while (run_end < stop && c.entry + 1 < c.end && mask_.column(c.entry + 1) * block_kv() == run_end) {
      ++c.entry;
      run_end += block_kv();
    }
    c.key = std::min(run_end, stop);
    return {begin, c.key};
  }

  HeadMask mask_;  // or:
  TreeRows tree_;
  Rows rows_;
  int64_t prefix_ = 0;
  KeyInterval keys_;
  int64_t last_ = 0;         // keys from it on show nothing
  int64_t first_block_ = 0;  // of queries
  MaskCursor* cursors_ = nullptr;
  int64_t num_cursors_ = 0;
  KeyInterval hull_;
  bool same_ = false;
};

}  // namespace opst::attention

// KeySpan: the keys of a tile that the rows of a register tile see, as columns of the tile.
#pragma once

#include "tile/gemm_tile.h"

namespace opst::OPST_ISA_NS::attention {

using tile::RowTile;

// Columns [begin, end) that one row sees; none where end <= begin.
struct RowKeys {
  int64_t begin, end;
};

// Columns [begin, end) that some row of a register tile sees, begin at the start of a panel. Scores are computed for
// `width` columns from begin on, whole vectors. Counted from begin, all rows see the panels of
// [whole_begin, whole_end): of these the product takes the maxima, of the others OnlineSoftmax::hide does.
struct KeySpan {
  int64_t begin = 0, end = 0, width = 0;
  int64_t whole_begin = 0, whole_end = 0;

  OPST_INLINE bool ragged() const { return whole_begin > 0 || whole_end < width; }
  OPST_INLINE bool whole(int64_t from, int64_t to) const { return from >= whole_begin && to <= whole_end; }
};

// Keys [first_key, first_key + count) as the rows of a block see them: row r those of [visible_begin[r],
// visible_end[r]), and those below the prefix.
struct TileKeys {
  const int64_t* visible_begin;
  const int64_t* visible_end;
  int64_t prefix;
  int64_t first_key, count;
  bool partial;    // some row does not see some key
  bool ascending;  // the ends of the intervals only grow from row to row, and there is no prefix

  // Of the row's interval, besides which the prefix is seen; of a tile that is not partial, all of its keys.
  OPST_INLINE RowKeys of_row(int64_t r) const {
    if (!partial) return {0, count};
    const int64_t begin = visible_begin[r] - first_key, end = visible_end[r] - first_key;
    return {begin < 0 ? 0 : begin, end > count ? count : end};
  }

  template <class P>
  OPST_INLINE KeySpan span(RowTile rt) const {
    constexpr int64_t kLanes = P::V::kLanes, kPanel = P::kTileVecs * kLanes;
    RowKeys some = {0, count}, all = {0, count};
    if (partial) {
      const RowKeys first = of_row(rt.first), last = of_row(rt.first + rt.rows - 1);
      some = {first.begin, last.end}, all = {last.begin, first.end};
      if (!ascending) find_ends(rt, some, all);
      if (some.begin >= some.end) return {};
    }
    KeySpan span;
    span.begin = some.begin / kPanel * kPanel;
    span.end = some.end;
    span.width = (some.end - span.begin + kLanes - 1) / kLanes * kLanes;
    all.begin -= span.begin, all.end -= span.begin;
    const int64_t whole_begin = all.begin <= 0 ? 0 : (all.begin + kPanel - 1) / kPanel * kPanel;
    const int64_t whole_end = all.end >= span.width ? span.width : all.end / kPanel * kPanel;
    span.whole_begin = whole_begin < span.width ? whole_begin : span.width;
    span.whole_end = whole_end < span.whole_begin ? span.whole_begin : whole_end;
    return span;
  }
  // For any rows: the ends of the columns that some row sees, and of those that the intervals of all rows hold.
  OPST_NOINLINE void find_ends(RowTile rt, RowKeys& some, RowKeys& all) const {
    some = {count, 0}, all = {0, count};
    if (prefix > first_key) some = {0, prefix - first_key < count ? prefix - first_key : count};
    for (int64_t r = rt.first; r < rt.first + rt.rows; ++r) {
      const RowKeys row = of_row(r);
      all = {row.begin > all.begin ? row.begin : all.begin, row.end < all.end ? row.end : all.end};
      if (row.begin >= row.end) continue;  // sees nothing here
      some = {row.begin < some.begin ? row.begin : some.begin, row.end > some.end ? row.end : some.end};
    }
  }
};

}  // namespace opst::OPST_ISA_NS::attention

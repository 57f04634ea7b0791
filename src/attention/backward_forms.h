// BackwardForms: the words in which backward's kernels speak of their operands.
//
//   row form       words [rows][stride]: A operand of Q K^T, dO V^T and dS K; of P and dS also A^T operand of dV and dK
//   column form    B operand: for one element a word the row form itself, for pairs of bf16 value panels (tile/pack.h)
//   Span           the keys of a tile that some row of a register tile sees
// Who owns the memory: backward_layout.h. Kernels of one task write it, of the next read it.
#pragma once

#include "attention/backward_kernels.h"
#include "attention/score_ops.h"
#include "simd/math.h"
#include "tile/gemm_tile.h"
#include "tile/pack.h"
#include "tile/row_tiles.h"

namespace opst::OPST_ISA_NS::attention {

using opst::attention::BackwardSizes;
using opst::attention::GradBlock;
using opst::attention::GradTile;
using opst::attention::QueryRows;
using tile::RowTile;
using tile::RowTiles;

template <class P>
struct BackwardForms {
  using V = typename P::V;
  using S = typename V::Scalar;
  using Word = typename P::Word;
  using Ops = ScoreOps<V>;
  static constexpr int kLanes = V::kLanes, kPanel = P::kTileVecs * kLanes;
  static constexpr int kStep = P::kStep, kTileRows = P::kTileRows;

  static OPST_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
  static OPST_INLINE S* accumulators(void* base) { return static_cast<S*>(base); }

  static OPST_INLINE bool is_finite(S x) { return x - x == 0; }

  // The query rows of a block by register tiles, in whole words of the column forms.
  static OPST_INLINE RowTiles tiles_of(const QueryRows& q) { return RowTiles(q.rows, kTileRows, kStep); }

  // Keys of the KV tile that some row of a register tile sees: columns [begin, end), begin at the start of a panel, and
  // `width`, the columns from begin on in whole vectors.
  struct Span {
    int64_t begin = 0, end = 0, width = 0;
  };
  static OPST_INLINE Span span_of(const GradBlock& b, const GradTile& t, RowTile rt) {
    int64_t low = 0, high = t.count;
    if (b.partial) {
      low = t.count, high = 0;
      for (int64_t r = rt.first; r < rt.first + rt.rows; ++r) {
        const Span row = columns_of_row(b, t, r);
        if (row.begin >= row.end) continue;
        low = smaller(low, row.begin);
        high = row.end > high ? row.end : high;
      }
      if (const int64_t below = b.rules == nullptr ? 0 : b.rules->prefix - t.first_key; below > 0) {
        low = 0;
        high = high > below ? high : smaller(below, t.count);
      }
      if (low >= high) return {};
    }
    const int64_t begin = low / kPanel * kPanel;
    return {begin, high, (high - begin + kLanes - 1) / kLanes * kLanes};
  }
  static OPST_INLINE Span columns_of_row(const GradBlock& b, const GradTile& t, int64_t r) {
    const int64_t begin = b.visible_begin[r] - t.first_key, end = b.visible_end[r] - t.first_key;
    return {begin < 0 ? 0 : begin, smaller(end, t.count), 0};
  }

  // A matrix as B operand: panels of columns.
  struct Columns {
    const Word* base;
    int64_t row_stride;  // of the row form
    int64_t rows;        // words in a column of a value panel; unused where the row form serves
    int64_t length;

    OPST_INLINE bool wide(int64_t column) const { return length - column > kLanes; }
    OPST_INLINE const Word* panel(int64_t column) const { return kStep == 1 ? base + column : base + column * rows; }
    OPST_INLINE int64_t stride(int64_t column) const {
      return kStep == 1 ? row_stride : wide(column) ? kPanel : kLanes;
    }
  };
  static OPST_INLINE Columns columns(const void* row_form, int64_t row_stride, const void* column_form, int64_t rows,
                                     int64_t length) {
    return {static_cast<const Word*>(kStep == 1 ? row_form : column_form), row_stride, tile::words<P>(rows), length};
  }

  // add(Vectors<n>, column) for each panel of n vectors of columns.
  template <int N>
  struct Vectors {
    static constexpr int kCount = N;
  };
  template <class Add>
  static OPST_INLINE void for_panels(const Columns& from, const Add& add) {
    for (int64_t column = 0; column < from.length; column += kPanel) {
      if (from.wide(column)) {
        add(Vectors<P::kTileVecs>(), column);
      } else {
        add(Vectors<1>(), column);
      }
    }
  }

  // kLanes elements of a row form.
  static OPST_INLINE V elements(const void* row_form, int64_t stride, int64_t row, int64_t d) {
    const Word* words_of_row = static_cast<const Word*>(row_form) + row * stride;
    if constexpr (kStep == 1)
      return V::load(words_of_row + d);
    else
      return V::load(reinterpret_cast<const bf16*>(words_of_row) + d);
  }
};

}  // namespace opst::OPST_ISA_NS::attention

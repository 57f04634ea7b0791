// BackwardForms: the words in which backward's kernels speak of their operands.
//
//   row form       words [rows][stride]: A operand of Q K^T, dO V^T and dS K; of P and dS also A^T operand of dV and dK
//   column form    B operand: for one element a word the row form itself, for pairs of bf16 value panels (tile/pack.h)
//   KeySpan        the keys of a tile that some row of a register tile sees (key_span.h)
// Who owns the memory: backward_layout.h. Kernels of one task write it, of the next read it.
#pragma once

#include <type_traits>

#include "attention/backward_kernels.h"
#include "attention/key_span.h"
#include "attention/score_ops.h"
#include "simd/math.h"
#include "tile/gemm_tile.h"
#include "tile/pack.h"

namespace opst::OPST_ISA_NS::attention {

using tile::RowTiles;

template <class P>
struct BackwardForms {
  using V = typename P::V;
  using S = typename V::Scalar;
  using Word = typename P::Word;
  using Element = std::conditional_t<P::kStep == 1, S, bf16>;  // of a word
  using Ops = ScoreOps<V>;
  static constexpr int kLanes = V::kLanes, kPanel = P::kTileVecs * kLanes;
  static constexpr int kStep = P::kStep, kTileRows = P::kTileRows;

  static OPST_INLINE S* accumulators(void* base) { return static_cast<S*>(base); }
  static OPST_INLINE bool is_finite(S x) { return x - x == 0; }

  // The query rows of a block by register tiles, in whole words of the column forms.
  static OPST_INLINE RowTiles tiles_of(const QueryRows& q) { return RowTiles(q.rows, kTileRows, kStep); }

  static OPST_INLINE TileKeys keys_of(const GradBlock& b, const GradTile& t) {
    const int64_t prefix = b.rules == nullptr ? 0 : b.rules->prefix;
    // Intervals of rows that take no part are empty, so the ends do not only grow.
    return {b.visible_begin, b.visible_end, prefix, t.first_key, t.count, b.partial, false};
  }
  static OPST_INLINE KeySpan span_of(const GradBlock& b, const GradTile& t, RowTile rt) {
    RowKeys some = {0, t.count}, all;
    if (b.partial) keys_of(b, t).find_ends(rt, some, all);
    if (some.begin >= some.end) return {};
    const int64_t begin = some.begin / kPanel * kPanel;
    return {begin, some.end, (some.end - begin + kLanes - 1) / kLanes * kLanes};
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

  // kLanes elements of a row form.
  static OPST_INLINE V elements(const void* row_form, int64_t stride, int64_t row, int64_t d) {
    return V::load(reinterpret_cast<const Element*>(static_cast<const Word*>(row_form) + row * stride) + d);
  }
};

}  // namespace opst::OPST_ISA_NS::attention

// widen_rows: rows of eight bits become rows of f32, to be packed: many rows of queries read a tile's keys and values.
//
// Computes   out[j][d] = number d of row j of a tile's keys or values, as InPlaceSource reads it
// Shapes     out [count][dim] f32, dim next to each other
// Memory     a tile's keys or values at a time: 256 x 128 numbers of 4 bytes, half as much as what is packed of them
// Numerics   each number is rounded to f32 once (f8 and i8 without scales that round: exact)
#pragma once

#include "attention/in_place_source.h"

namespace opst::OPST_ISA_NS::attention {

template <class T, bool kGroups>
void widen_rows(const KvTile& tile, bool keys, int64_t dim, float* out) {
  using V = tile::ProductF32::V;
  // What a source tells one by one are values.
  KvTile rows = tile;
  if (keys) {
    rows.value_rows = tile.key_rows, rows.value_groups = tile.key_groups;
    rows.value_scales = tile.key_scales, rows.value_offsets = tile.key_offsets;
  }
  QueryBlock none = {};
  none.value_head_dim = dim;
  const InPlaceSource<tile::ProductF32, T, kGroups> source(none, &rows, 0, 1);
  for (int64_t j = 0; j < tile.count; ++j, out += dim) {
    for (int64_t d = 0; d < dim; d += V::kLanes) {
      source.value(j, d).store_n(out + d, simd::clamp_lanes<V>(dim - d));
    }
  }
}

}  // namespace opst::OPST_ISA_NS::attention

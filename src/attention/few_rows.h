// What the sources that read keys and values in place share (in_place_source.h, pairs_in_place_source.h): groups of query
// rows for which a key is read once, the fetches meanwhile, and the loop that takes a few keys at a time.
#pragma once

#include <type_traits>

#include "attention/kernels.h"
#include "attention/key_span.h"
#include "tile/gemm_tile.h"

namespace opst::OPST_ISA_NS::attention {

// The most rows that share one read of a key.
template <class V>
inline constexpr int kMostSharing = V::kLanes >= 16  ? 8
                                    : V::kLanes >= 8 ? 4
                                    : V::kLanes >= 4 ? 2
                                                     : 1;

// visit(R), R = min(rows, kMostSharing) as a constant: rows for which each key and value is read once.
template <class V, class Visit>
OPST_INLINE void for_group(int rows, const Visit& visit) {
  tile::with_rows<kMostSharing<V>>(rows < kMostSharing<V> ? rows : kMostSharing<V>, visit);
}

// visit(R, i): rows [i, i + R) of `rows`, group by group.
template <class V, class Visit>
OPST_INLINE void for_groups(int rows, const Visit& visit) {
  for (int i = 0; i < rows; i += kMostSharing<V>) {
    for_group<V>(rows - i, [&](auto group) OPST_INLINE_LAMBDA { visit(group, i); });
  }
}

// visit(C, column, n): the next C vectors of O's columns, which are held in registers for R rows; n lanes of each are
// there. Of few rows more vectors, or each sum would wait for the one before. `apart`: one vector at a time.
template <class V, int R, class Visit>
OPST_INLINE void for_columns(int64_t length, bool apart, const Visit& visit) {
  constexpr int kLanes = V::kLanes;
  int64_t column = 0;
  const auto visit_by = [&](auto vectors) OPST_INLINE_LAMBDA {
    for (; length - column >= vectors * kLanes; column += vectors * kLanes) visit(vectors, column, int64_t{kLanes});
  };
  if (!apart) {
    if constexpr (R <= 2 && kLanes >= 16) visit_by(std::integral_constant<int, 8>());
    if constexpr (R <= 4) visit_by(std::integral_constant<int, 4>());
    visit_by(std::integral_constant<int, 2>());
  }
  for (; column < length; column += kLanes) {
    visit(std::integral_constant<int, 1>(), column, int64_t{simd::clamp_lanes<V>(length - column)});
  }
}

// The span of all keys of a tile.
template <class V>
OPST_INLINE KeySpan whole_tile(const KvTile& tile) {
  const int64_t width = (tile.count + V::kLanes - 1) / V::kLanes * V::kLanes;
  return {.end = tile.count, .width = width, .whole_end = tile.partial || tile.count < width ? 0 : width};
}

// Fetches memory that is read later, a share of it at each row of the tile.
class Fetching {
 public:
  OPST_INLINE Fetching(const RowsToFetch& what, int64_t tile_rows) : row_(what.rows), bytes_(what.bytes) {
    end_ = row_ + what.count;
    const int64_t lines = what.count * ((bytes_ + 63) / 64);
    lines_ = static_cast<int>((lines + tile_rows - 1) / tile_rows);
  }
  OPST_INLINE void after_row() {
    for (int line = 0; line < lines_ && row_ < end_; ++line) {
      simd::fetch_into_l2(static_cast<const char*>(*row_) + at_);
      if ((at_ += 64) >= bytes_) at_ = 0, ++row_;
    }
  }

 private:
  const void* const* row_;
  const void* const* end_;
  int64_t bytes_, at_ = 0;
  int lines_;
};

// scores[i][j] = q_i . k_j for R rows and all keys of the tile, a few keys at a time.
// add(keys, acc): acc[i * K + c] += q_i . k_keys[c] in one partial sum per lane, for the K elements of `keys`.
template <class V, int R, class Add>
OPST_INLINE void score_few_rows(const KvTile& tile, bool fetches, typename V::Scalar* scores, int64_t stride,
                                const Add& add) {
  constexpr int kLanes = V::kLanes, kKeys = kLanes / (R > 4 ? 8 : R == 3 ? 4 : R);
  Fetching fetching(fetches ? tile.with_keys : RowsToFetch(), tile.count);
  for (int64_t j = 0; j < tile.count; j += kKeys) {
    // Beyond the last key its row is read again; the columns are padding.
    int64_t keys[kKeys];
    OPST_UNROLL for (int c = 0; c < kKeys; ++c) keys[c] = j + c < tile.count ? j + c : tile.count - 1;
    V acc[kLanes];
    OPST_UNROLL for (int a = 0; a < kLanes; ++a) acc[a] = V::zero();
    OPST_UNROLL for (int c = 0; c < kKeys; ++c) fetching.after_row();
    add(keys, acc);
    typename V::Scalar dots[kLanes];
    simd::hsum_each(acc).store(dots);
    OPST_UNROLL for (int i = 0; i < R; ++i) {
      __builtin_memcpy(scores + i * stride + j, dots + i * kKeys, kKeys * sizeof(dots[0]));
    }
  }
}

}  // namespace opst::OPST_ISA_NS::attention

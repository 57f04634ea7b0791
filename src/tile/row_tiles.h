// Rows dealt out to register tiles of nearly equal height: 64 rows by at most 12 are 6 tiles of 11, 11, 11, 11, 10 and
// 10, not 5 of 12 and one of 4.
#pragma once

#include "simd/vec.h"

namespace opst::OPST_ISA_NS::tile {

struct RowTile {
  int64_t first;
  int rows;
};

class RowTiles {
 public:
  // `most`: rows of a full tile. Heights are multiples of `unit`, but for the last tile, which ends with the rows.
  OPST_INLINE RowTiles(int64_t rows, int64_t most, int64_t unit = 1) : rows_(rows), unit_(unit) {
    const int64_t units = (rows + unit - 1) / unit, most_units = most / unit;
    count_ = (units + most_units - 1) / most_units;
    height_ = count_ > 0 ? units / count_ : 0;
    num_taller_ = units - height_ * count_;
  }

  OPST_INLINE int64_t count() const { return count_; }
  // Where unit is 1: rows of the first tiles, for which is_tall(), and of the others.
  OPST_INLINE int tallest() const { return static_cast<int>((height_ + (num_taller_ > 0 ? 1 : 0)) * unit_); }
  OPST_INLINE int lowest() const { return static_cast<int>(height_ * unit_); }
  OPST_INLINE bool is_tall(int64_t index) const { return index < num_taller_; }

  OPST_INLINE RowTile operator[](int64_t index) const {
    const int64_t first = (index * height_ + (index < num_taller_ ? index : num_taller_)) * unit_;
    const int64_t rows = (height_ + (index < num_taller_ ? 1 : 0)) * unit_, left = rows_ - first;
    return {first, static_cast<int>(rows < left ? rows : left)};
  }

 private:
  int64_t rows_, unit_;
  int64_t count_, height_, num_taller_;
};

}  // namespace opst::OPST_ISA_NS::tile

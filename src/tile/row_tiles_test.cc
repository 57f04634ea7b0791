// RowTiles does no vector arithmetic: one level, in a namespace of this file's own, says it for all.
#define OPST_ISA_NS row_tiles_test
#include <gtest/gtest.h>

#include <string>

#include "tile/gemm_tile.h"

namespace opst {
namespace {

using row_tiles_test::tile::RowTile;
using row_tiles_test::tile::RowTiles;

TEST(RowTiles, CoverEveryRowOnceInTilesOfNearlyEqualHeight) {
  for (const int64_t unit : {1, 2, 3}) {
    for (int64_t most = unit; most <= 12; most += unit) {
      for (int64_t rows = 0; rows <= 80; ++rows) {
        SCOPED_TRACE("rows " + std::to_string(rows) + ", most " + std::to_string(most) + ", unit " +
                     std::to_string(unit));
        const RowTiles tiles(rows, most, unit);
        const int64_t units = (rows + unit - 1) / unit;
        ASSERT_EQ(tiles.count(), (units + most / unit - 1) / (most / unit)) << "as few tiles as hold the rows";
        int64_t next = 0;
        for (int64_t i = 0; i < tiles.count(); ++i) {
          const RowTile tile = tiles[i];
          ASSERT_EQ(tile.first, next);
          ASSERT_GE(tile.rows, 1);
          ASSERT_LE(tile.rows, most);
          next += tile.rows;
          const bool is_last = i + 1 == tiles.count();
          if (!is_last || unit == 1) {
            ASSERT_EQ(tile.rows, tiles.is_tall(i) ? tiles.tallest() : tiles.lowest());
          }
          ASSERT_TRUE(is_last || tile.rows % unit == 0);
        }
        ASSERT_EQ(next, rows);
        ASSERT_LE(tiles.tallest() - tiles.lowest(), unit);
      }
    }
  }
}

}  // namespace
}  // namespace opst

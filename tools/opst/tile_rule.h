// Tiles of attention in a core's memory, by the rule that articles on the accelerators give:
//
//   2 d Br + 4 d Bc + 2 Br Bc <= sram / heads
//
// Bytes of Q [Br, d], of K and V [Bc, d] and of the scores [Br, Bc] in 16 bits; `heads` of them lie there at a time.
#pragma once

#include <cstdint>
#include <vector>

namespace opst::tools {

struct TileSize {
  int64_t block_q = 32, block_kv = 32;
};

// The candidates, from the largest on; the last is taken where nothing fits.
const std::vector<TileSize>& tile_candidates();

double tile_bytes(const TileSize& tile, int64_t head_dim);
// With K and V in turn in one place: 2 (d Br + d Bc + Br Bc), the formula of another article.
double tile_bytes_in_turn(const TileSize& tile, int64_t head_dim);

struct TileChoice {
  TileSize tile;
  double bytes = 0;   // by the rule
  double budget = 0;  // sram / heads
  bool fits = true;   // false: the smallest candidate, which does not fit either
};
TileChoice choose_tile(int64_t head_dim, double sram_bytes, int64_t heads);

}  // namespace opst::tools

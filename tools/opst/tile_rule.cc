#include "tile_rule.h"

namespace opst::tools {

namespace {

double product(int64_t a, int64_t b) { return static_cast<double>(a) * static_cast<double>(b); }

}  // namespace

const std::vector<TileSize>& tile_candidates() {
  static const std::vector<TileSize> candidates = {{256, 256}, {256, 128}, {128, 128}, {128, 64},
                                                   {64, 64},   {64, 32},   {32, 32}};
  return candidates;
}

double tile_bytes(const TileSize& t, int64_t head_dim) {
  return 2 * product(head_dim, t.block_q) + 4 * product(head_dim, t.block_kv) + 2 * product(t.block_q, t.block_kv);
}

double tile_bytes_in_turn(const TileSize& t, int64_t head_dim) {
  return 2 * (product(head_dim, t.block_q) + product(head_dim, t.block_kv) + product(t.block_q, t.block_kv));
}

TileChoice choose_tile(int64_t head_dim, double sram_bytes, int64_t heads) {
  TileChoice choice;
  choice.budget = sram_bytes / static_cast<double>(heads);
  for (const TileSize& tile : tile_candidates()) {
    choice.tile = tile;
    choice.bytes = tile_bytes(tile, head_dim);
    choice.fits = choice.bytes <= choice.budget;
    if (choice.fits) break;
  }
  return choice;
}

}  // namespace opst::tools

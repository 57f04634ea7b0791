// Computes   sums[i, j] = sum_t x[i, t] * weight[j, t] for many rows: prefill, bound by multiply-adds
// Shapes     x [rows, k] in runs of k_block words; weight: packed panels (packed_layout.h), or in place
//            (many_rows_in_place.h); sums [rows, columns]
// Loop nest  for each run of k
//              for each 2 vectors of columns: decode [k_block][32] once
//                for each register tile of rows: sums += x * decoded               (tile/gemm_tile.h)
// Memory     at k_block 512, 256 rows, avx512:
//              decoded     [512][32] words    64 KB   L2, streamed by each tile
//              x of a tile [12][512] words    24 KB   L1
//              x of a run  [256][512] words  512 KB   L2, read again for each 32 columns
//              sums        [256][128] f32    128 KB   L2, touched once per tile and run of k
//            While a tile is multiplied, it fetches some of the weights that are decoded next: they come from memory.
// Numerics   one sum per output, k ascending, f32: a sum rests in memory between runs of k and loses nothing there
#pragma once

#include "matmul/few_rows.h"

namespace opst::OPST_ISA_NS::gemm {

// Words k0 .. k0 + depth of kTileVecs vectors of columns -> scratch [depth][kTileColumns].
template <class Piece>
OPST_NOINLINE void decode_columns(const ProductPart& part, int64_t column, int64_t k0, int64_t depth) {
  for (int v = 0; v < kTileVecs; ++v) {
    const int64_t vec = clamped_vec(part, column + v * F32::kLanes);
    const Piece* piece = panel_of<Piece>(part, vec) + k0 / Piece::kValues;
    const int lane = lane_of(vec);
    float* to = static_cast<float*>(part.scratch) + v * F32::kLanes;
    for (int64_t k = 0; k < depth; k += Piece::kValues, ++piece) {
      Decoder<Piece> decoder(piece, lane);
      for (int t0 = 0; t0 < Piece::kValues; t0 += Decoder<Piece>::kScaled) {
        decoder.begin_scale(t0);
        for (int t = t0; t < t0 + Decoder<Piece>::kScaled; t += Decoder<Piece>::kGroup) {
          decoder.begin_group(t);
          OPST_UNROLL for (int j = 0; j < Decoder<Piece>::kGroup; ++j, to += kTileColumns) decoder.weight(j).store(to);
        }
      }
    }
  }
}

// The register tiles of a part's rows.
template <class Product>
struct FloatTiles {
  using Lines = tile::LinesOfRows;
  using Tile = tile::ScaledAccumulate<Product, Lines>;
  const ProductPart& part;
  const tile::RowTiles tiles{part.rows, Product::kTileRows};
  // Of the first run of k, which finds no sums yet, and of the others.
  const Tile first_tall = tile::scaled_product_for<Product, kTileVecs, Lines>(tiles.tallest());
  const Tile first_low = tile::scaled_product_for<Product, kTileVecs, Lines>(tiles.lowest());
  const Tile tall = tile::scaled_accumulate_for<Product, kTileVecs, Lines>(tiles.tallest());
  const Tile low = tile::scaled_accumulate_for<Product, kTileVecs, Lines>(tiles.lowest());

  // Sums of the columns from `column` on = (first run) or += rows of x * scratch [depth][kTileColumns]. ahead(t,
  // next_x): the lines that tile t fetches, a row of them per four words of k; next_x: the rows of the next tile.
  template <class Ahead>
  OPST_INLINE void add(int64_t column, int64_t depth, const typename Product::Word* x, bool first_run,
                       const Ahead& ahead) const {
    float ones[Product::kTileRows];
    for (float& factor : ones) factor = 1;
    const Tile of_tall = first_run ? first_tall : tall, of_low = first_run ? first_low : low;
    for (int64_t t = 0; t < tiles.count(); ++t) {
      const auto [row, rows] = tiles[t];
      const auto* const of_tile = x + row * part.x_stride;
      const auto* const next_x = reinterpret_cast<const char*>(of_tile + rows * part.x_stride);
      const Lines lines = part.sums_in_out ? sums_after(t, column) : ahead(t, next_x);
      (tiles.is_tall(t) ? of_tall : of_low)(depth, of_tile, part.x_stride,
                                            static_cast<const typename Product::WordB*>(part.scratch), kTileColumns,
                                            part.sums + row * part.sums_stride + column, part.sums_stride, ones, lines);
    }
  }

 private:
  // Where the tile behind t stores its sums: stores into memory wait for its lines one after the other.
  OPST_INLINE Lines sums_after(int64_t t, int64_t column) const {
    const bool last = t + 1 == tiles.count();
    const bool more = !last || column + kTileColumns < part.columns;
    const float* const sums = part.sums + tiles[last ? 0 : t + 1].first * part.sums_stride;
    return {reinterpret_cast<const char*>(sums + (last && more ? column + kTileColumns : column)),
            part.sums_stride * static_cast<int64_t>(sizeof(float)), 64};
  }
};

// What the register tiles of one run of k and 2 vectors of columns fetch: first the weights that are decoded next,
// which come from memory, then the rows of x of the next tile.
template <class Piece>
struct Ahead {
  static constexpr int kMaxPanels = kTileColumns > kPanelColumns ? kTileColumns / kPanelColumns : 1;
  static constexpr auto kPieceBytes = static_cast<int64_t>(sizeof(Piece));
  // Lines per four words of k. A run of f32 or bf16 has more of them than few tiles would fetch one by one.
  static constexpr int64_t kLines = kPieceBytes / Piece::kValues >= 32 ? 2 : 1;
  const char* panel[kMaxPanels];
  int64_t tile_bytes, tiles_per_panel;

  // Of the words k0 .. k0 + depth of the columns from `column` on.
  OPST_INLINE Ahead(const ProductPart& part, int64_t column, int64_t k0, int64_t depth)
      : tile_bytes(16 * kLines * depth) {
    for (int i = 0; i < kMaxPanels; ++i) {
      const int64_t pieces = (column / kPanelColumns + i) * (part.k / Piece::kValues) + k0 / Piece::kValues;
      // The address may lie beyond the weight; nothing is read there.
      panel[i] = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(part.panels) +
                                               static_cast<uintptr_t>(pieces * kPieceBytes));
    }
    tiles_per_panel = (depth / Piece::kValues * kPieceBytes + tile_bytes - 1) / tile_bytes;
  }
  OPST_INLINE tile::LinesOfRows operator()(int64_t t, const char* next_x) const {
    const int64_t i = t / tiles_per_panel;
    if (i >= kMaxPanels) return {next_x, 64, 0};
    return {panel[i] + (t - i * tiles_per_panel) * tile_bytes, 64 * kLines, kLines == 2 ? 64 : 0};
  }
};

// Where the columns come from: a packed weight. Another source: many_rows_in_place.h.
template <class Piece>
struct PackedColumns {
  using Product = typename Decoder<Piece>::Product;
  using Ahead = gemm::Ahead<Piece>;
  static OPST_INLINE void decode(const ProductPart& part, int64_t column, int64_t k0, int64_t depth) {
    decode_columns<Piece>(part, column, k0, depth);
  }
};

template <class Columns>
void many_rows(const ProductPart& part) {
  using Product = typename Columns::Product;
  if (part.k == 0) return clear_sums(part);
  const FloatTiles<Product> tiles{part};
  for (int64_t k0 = 0; k0 < part.k; k0 += part.k_block) {
    const int64_t depth = part.k - k0 < part.k_block ? part.k - k0 : part.k_block;
    const auto* const x = static_cast<const typename Product::Word*>(part.x) + k0 / part.k_block * part.x_block_stride;
    for (int64_t column = 0; column < part.columns; column += kTileColumns) {
      Columns::decode(part, column, k0, depth);
      const bool last_columns = column + kTileColumns >= part.columns, last_block = k0 + depth >= part.k;
      const int64_t next_column = last_columns && !last_block ? 0 : column + kTileColumns;
      const int64_t next_k = !last_columns ? k0 : last_block ? 0 : k0 + depth;
      tiles.add(column, depth, x, k0 == 0, typename Columns::Ahead(part, next_column, next_k, depth));
    }
  }
}

}  // namespace opst::OPST_ISA_NS::gemm

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
  template <class Out>
  using Tile = decltype(&tile::scaled_product<Product, 1, 1, Lines, Out>);
  const ProductPart& part;
  const tile::RowTiles tiles{part.rows, Product::kTileRows};
  // Of the first run of k, which finds no sums yet, and of the others.
  const Tile<float> first_tall = tile::scaled_product_for<Product, kTileVecs, Lines>(tiles.tallest());
  const Tile<float> first_low = tile::scaled_product_for<Product, kTileVecs, Lines>(tiles.lowest());
  const Tile<float> tall = tile::scaled_accumulate_for<Product, kTileVecs, Lines>(tiles.tallest());
  const Tile<float> low = tile::scaled_accumulate_for<Product, kTileVecs, Lines>(tiles.lowest());

  // Sums of the columns from `column` on = (first run) or += rows of x * scratch [depth][kTileColumns]. ahead(t, next):
  // the lines that tile t fetches, a row of them per four words of k; next: those that the next tile will want.
  template <class Ahead>
  OPST_INLINE void add(int64_t column, int64_t depth, const typename Product::Word* x, bool first_run,
                       const Ahead& ahead) const {
    const Tile<float> of_tall = first_run ? first_tall : tall, of_low = first_run ? first_low : low;
    each(column, depth, x, part.sums, of_tall, of_low, [&](int64_t t, const char* next_x) OPST_INLINE_LAMBDA {
      return ahead(t, Lines{next_x, 64, 0});
    });
  }
  // The outputs of these columns, all of k at once.
  template <class Ahead>
  OPST_INLINE void store(int64_t column, int64_t depth, const typename Product::Word* x, const Ahead& ahead) const {
    const auto as = [&](auto* out) OPST_INLINE_LAMBDA {
      using Out = std::remove_reference_t<decltype(*out)>;
      each(column, depth, x, out, tile::scaled_product_for<Product, kTileVecs, Lines, Out>(tiles.tallest()),
           tile::scaled_product_for<Product, kTileVecs, Lines, Out>(tiles.lowest()),
           [&](int64_t t, const char*) OPST_INLINE_LAMBDA { return ahead(t, outputs_after(t, column, out)); });
    };
    switch (part.out_type) {
      case DType::bf16:
        return as(static_cast<bf16*>(part.out));
      case DType::f16:
        return as(static_cast<f16*>(part.out));
      default:
        return as(static_cast<float*>(part.out));
    }
  }

 private:
  template <class Out, class Fetched>
  OPST_INLINE void each(int64_t column, int64_t depth, const typename Product::Word* x, Out* sums, Tile<Out> of_tall,
                        Tile<Out> of_low, const Fetched& fetched) const {
    float ones[Product::kTileRows];
    for (float& factor : ones) factor = 1;
    for (int64_t t = 0; t < tiles.count(); ++t) {
      const auto [row, rows] = tiles[t];
      const auto* const of_tile = x + row * part.x_stride;
      (tiles.is_tall(t) ? of_tall : of_low)(depth, of_tile, part.x_stride,
                                            static_cast<const typename Product::WordB*>(part.scratch), kTileColumns,
                                            sums + row * part.sums_stride + column, part.sums_stride, ones,
                                            fetched(t, reinterpret_cast<const char*>(of_tile + rows * part.x_stride)));
    }
  }
  // Where the tile behind t stores: stores into memory wait for its lines one after the other.
  template <class Out>
  OPST_INLINE Lines outputs_after(int64_t t, int64_t column, const Out* out) const {
    constexpr auto kBytes = static_cast<int64_t>(sizeof(Out));
    const bool last = t + 1 == tiles.count();
    const bool more = !last || column + kTileColumns < part.columns;
    const Out* const to = out + tiles[last ? 0 : t + 1].first * part.sums_stride;
    return {reinterpret_cast<const char*>(to + (last && more ? column + kTileColumns : column)),
            part.sums_stride * kBytes, kTileColumns * kBytes > 64 ? 64 : 0};
  }
};

// What the register tiles of one run of k and 2 vectors of columns fetch: first the weights that are decoded next,
// which come from memory, then what the next tile wants.
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
      panel[i] = fetch_address(static_cast<const Piece*>(part.panels), pieces);
    }
    tiles_per_panel = (depth / Piece::kValues * kPieceBytes + tile_bytes - 1) / tile_bytes;
  }
  OPST_INLINE tile::LinesOfRows operator()(int64_t t, const tile::LinesOfRows& next) const {
    const int64_t i = t / tiles_per_panel;
    if (i >= kMaxPanels) return next;
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
      const typename Columns::Ahead ahead(part, next_column, next_k, depth);
      if (part.out != nullptr) {
        tiles.store(column, depth, x, ahead);
      } else {
        tiles.add(column, depth, x, k0 == 0, ahead);
      }
    }
  }
}

}  // namespace opst::OPST_ISA_NS::gemm

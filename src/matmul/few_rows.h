// Computes   sums[i, j] = sum_t x[i, t] * weight[j, t] for a few rows: decoding, bound by reading the weight
// Shapes     x [rows, k] words; weight: packed panels (packed_layout.h); sums [rows, columns]
// Loop nest  for each kFewVecs vectors of columns
//              for each kRowsAtOnce rows
//                over k: decode a vector of weights in registers, then one multiply-add per row
// Memory     weights stream once per kRowsAtOnce rows, kFewColumns / 16 panels side by side; x stays in L1
// Numerics   one sum per output, k ascending, f32: the bits of many_rows.h
#pragma once

#include "matmul/decode.h"

namespace opst::OPST_ISA_NS::gemm {

// Vectors of columns at once: enough independent sums to hide the latency of the multiply-add, as far as registers go.
inline constexpr int kFewVecs = 4, kRowsAtOnce = F32::kLanes == 16 ? 4 : 2;
inline constexpr int kFewColumns = kFewVecs * F32::kLanes;

// How many bytes ahead in each panel's stream are fetched.
inline constexpr int64_t kPrefetchBytes = 2048;
inline constexpr int64_t kGroupPanels = kFewColumns / kPanelColumns;

// Sums of MR rows and NV vectors of columns, as far as there are columns.
template <int MR, int NV>
OPST_INLINE void store_sums(const ProductPart& part, int64_t first_row, int64_t column, const F32 (&acc)[MR][NV]) {
  OPST_UNROLL for (int i = 0; i < MR; ++i) {
    OPST_UNROLL for (int v = 0; v < NV; ++v) {
      const int64_t c = column + v * F32::kLanes;
      if (c < part.columns) acc[i][v].store(part.sums + (first_row + i) * part.sums_stride + c);
    }
  }
}

template <class Piece, int MR>
OPST_NOINLINE void few_rows_group(const ProductPart& part, int64_t first_row, int64_t column) {
  using Product = typename Decoder<Piece>::Product;
  constexpr int NV = kFewVecs;
  constexpr int kScaled = Decoder<Piece>::kScaled, kGroup = Decoder<Piece>::kGroup;
  constexpr int64_t kFetchBytes = static_cast<int64_t>(sizeof(Piece)) * kScaled / Piece::kValues;
  constexpr int64_t kAhead = (kPrefetchBytes + sizeof(Piece) - 1) / sizeof(Piece);
  const int64_t pieces = part.k / Piece::kValues;
  const Piece* stream[NV];
  int lane[NV];
  find_vecs(part, column, stream, lane);
  const int64_t x_stride = part.x_stride;
  const auto* x = static_cast<const typename Product::Word*>(part.x) + first_row * x_stride;

  F32 acc[MR][NV];
  tile::clear_tile<tile::ProductF32, MR, NV>(acc);
  for (int64_t p = 0; p < pieces; ++p) {
    // At a panel's end the panels of the next kFewVecs vectors are fetched: a panel of 576 inputs is no longer than
    // three times kPrefetchBytes.
    const int64_t ahead = p + kAhead < pieces ? p + kAhead : p + kAhead + (kGroupPanels - 1) * pieces;
    Decoder<Piece> decoder[NV] = {
        {stream[0] + p, lane[0]}, {stream[1] + p, lane[1]}, {stream[2] + p, lane[2]}, {stream[3] + p, lane[3]}};
    for (int t0 = 0; t0 < Piece::kValues; t0 += kScaled) {
      OPST_UNROLL for (int v = 0; v < NV; v += kVecsPerPanel) {
        const char* const line = reinterpret_cast<const char*>(stream[v] + ahead) + t0 / kScaled * kFetchBytes;
        OPST_UNROLL for (int64_t i = 0; i < kFetchBytes; i += 64) simd::fetch_into_l2(line + i);
      }
      OPST_UNROLL for (int v = 0; v < NV; ++v) decoder[v].begin_scale(t0);
      for (int t = t0; t < t0 + kScaled; t += kGroup, x += kGroup) {
        OPST_UNROLL for (int v = 0; v < NV; ++v) decoder[v].begin_group(t);
        OPST_UNROLL for (int j = 0; j < kGroup; ++j) {
          OPST_UNROLL for (int v = 0; v < NV; ++v) {
            const auto w = decoder[v].weight(j);
            OPST_UNROLL for (int i = 0; i < MR; ++i) {
              acc[i][v] = Product::multiply_add(Product::broadcast(x + i * x_stride + j), w, 0, acc[i][v]);
            }
          }
        }
      }
    }
  }
  store_sums(part, first_row, column, acc);
}

// The whole part, by get(MR)(part, first row, column), MR a constant.
template <class Get>
OPST_INLINE void for_groups(const ProductPart& part, const Get& get) {
  for (int64_t column = 0; column < part.columns; column += kFewColumns) {
    for (int64_t row = 0; row < part.rows; row += kRowsAtOnce) {
      const int64_t left = part.rows - row;
      tile::with_rows<kRowsAtOnce>(left < kRowsAtOnce ? static_cast<int>(left) : kRowsAtOnce, get)(part, row, column);
    }
  }
}

template <class Piece>
void few_rows(const ProductPart& part) {
  for_groups(part, [](auto n) OPST_INLINE_LAMBDA { return &few_rows_group<Piece, n>; });
}

}  // namespace opst::OPST_ISA_NS::gemm

// int8 activations in blocks of 32, times GGUF weights: many rows. Int8 and int4 weights: weights_int_many_rows.h.
//
// Computes   sums[i, j] = sum over blocks of int8 activations times quantised weights (activations.h)
// Shapes     x [rows, k / 32] blocks; weight: packed panels (packed_layout.h); sums [rows, columns]
// Loop nest  for each run of k_block values of k
//              for each 2 vectors of columns: unpack [k_block / 4][columns] words of four bytes once
//                for each register tile of rows: sums += blocks * unpacked
// Memory     at k_block 512, 192 rows, k = 576, avx512:
//              bytes    [128][32] words    16 KB   L1
//              scales   [16][32] f32        2 KB   L1, minimums likewise
//              a tile   [6][16] blocks    4.5 KB   L1
//              x        [192][18] blocks  162 KB   L2, read again for each 2 vectors of columns
//              sums     [192][64] f32      48 KB   L2
// Numerics   activations.h; a sum rests in memory between runs of k and loses nothing there
#pragma once

#include "matmul/decode.h"
#include "tile/pack.h"

namespace opst::OPST_ISA_NS::gemm {

// Rows of a register tile, whose f32 sums and integer totals fill the registers.
inline constexpr int kInt8TileRows = F32::kLanes == 16 ? 6 : 2;

// A format as the register tile sees it (activations.h): values per scale, offset, largest u, whether there is an m.
// Formats with the same shape share one tile.
template <int part, int offset, int most, bool minimum>
struct Int8Shape {
  static constexpr int kPart = part, kOffset = offset, kMost = most;
  static constexpr bool kMinimum = minimum;
};

template <class Piece>
struct Int8Piece;
template <class Block>
struct Int8Piece<Piece<Block>> {
  using Shape = Int8Shape<Block::kPart, Block::kOffset, (1 << Block::kBits) - 1, Block::kMinimum != Minimum::none>;
};

// Unpacked columns in scratch.
struct UnpackedColumns {
  uint32_t* bytes;  // [k_block / 4][kTileColumns]
  float* scales;    // [k_block / 16][kTileColumns]
  float* minimums;  // [k_block / 32][kTileColumns]
};

// Values k0 .. k0 + depth of kTileVecs vectors of columns -> scratch.
template <class Piece>
OPST_NOINLINE void unpack_columns(const ProductPart& part, const UnpackedColumns& to, int64_t column, int64_t k0,
                                  int64_t depth) {
  using Shape = typename Int8Piece<Piece>::Shape;
  for (int v = 0; v < kTileVecs; ++v) {
    const int64_t vec = clamped_vec(part, column + v * F32::kLanes);
    const int lane = lane_of(vec);
    const Piece* piece = panel_of<Piece>(part, vec) + k0 / Piece::kValues;
    uint32_t* bytes = to.bytes + v * F32::kLanes;
    float* scales = to.scales + v * F32::kLanes;
    float* minimums = to.minimums + v * F32::kLanes;
    for (int64_t k = 0; k < depth; k += Piece::kValues, ++piece) {
      for (int group = 0; group < Piece::kValues / 8; ++group, bytes += 2 * kTileColumns) {
        const EvenOdd q = bytes_of(*piece, lane, group);
        simd::store(q.even, bytes);
        simd::store(q.odd, bytes + kTileColumns);
      }
      for (int s = 0; s < Piece::kValues / Shape::kPart; ++s, scales += kTileColumns) {
        scale_of(*piece, lane, s).store(scales);
        if constexpr (Shape::kMinimum) {
          minimum_of(*piece, lane, s).store(minimums);
          minimums += kTileColumns;
        }
      }
    }
  }
}

// The sum of a plane's values of a run with one scale: all of the block, or a half.
template <int kPart, class Block>
OPST_INLINE int32_t sum_of_run(const Block& block, int half, int plane) {
  return kPart == 32 ? block.sums[0][plane] + block.sums[1][plane] : block.sums[half][plane];
}

// sums [MR][kTileColumns] += MR rows of blocks * the unpacked columns.
template <class Shape, int MR>
OPST_NOINLINE void int8_block_tile(const UnpackedColumns& columns, int64_t blocks, const ActivationBlock* a,
                                   int64_t a_stride, float* sums, int64_t sums_stride) {
  constexpr int NV = kTileVecs;
  const uint32_t* bytes = columns.bytes;
  const float* scales = columns.scales;
  const float* minimums = columns.minimums;
  F32 acc[MR][NV];
  tile::load_tile<tile::ProductF32, MR, NV>(sums, sums_stride, acc);
  for (int64_t block = 0; block < blocks; ++block, ++a) {
    OPST_UNROLL for (int p = 0; p < kActivationBlock / Shape::kPart; ++p) {
      I32 total[MR][NV];
      OPST_UNROLL for (int i = 0; i < MR; ++i) {
        const int32_t sum = sum_of_run<Shape::kPart>(a[i * a_stride], p, 0);
        OPST_UNROLL for (int j = 0; j < NV; ++j) {
          total[i][j] = Shape::kOffset == 0 ? I32::zero() : I32::set1(-Shape::kOffset * sum);
        }
      }
      OPST_UNROLL for (int w = 0; w < Shape::kPart / 4; ++w, bytes += kTileColumns) {
        Words u[NV];
        OPST_UNROLL for (int j = 0; j < NV; ++j) u[j] = Words::load(bytes + j * F32::kLanes);
        OPST_UNROLL for (int i = 0; i < MR; ++i) {
          const Words s = four_bytes(a[i * a_stride].q[0] + Shape::kPart * p + 4 * w);
          OPST_UNROLL for (int j = 0; j < NV; ++j) total[i][j] = simd::dot<Shape::kMost>(total[i][j], u[j], s);
        }
      }
      OPST_UNROLL for (int j = 0; j < NV; ++j) {
        const F32 d = F32::load(scales + j * F32::kLanes);
        OPST_UNROLL for (int i = 0; i < MR; ++i) {
          acc[i][j] = fma(to_f32(total[i][j]), d * F32::set1(a[i * a_stride].scale), acc[i][j]);
        }
        if constexpr (Shape::kMinimum) {
          const F32 m = F32::load(minimums + j * F32::kLanes);
          OPST_UNROLL for (int i = 0; i < MR; ++i) {
            acc[i][j] = fma(F32::set1(a[i * a_stride].scaled_sum), m, acc[i][j]);
          }
        }
      }
      scales += kTileColumns;
      if constexpr (Shape::kMinimum) minimums += kTileColumns;
    }
  }
  tile::store_tile<tile::ProductF32, MR, NV>(acc, sums, sums_stride);
}

template <class Piece>
void int8_block_rows(const ProductPart& part) {
  using Shape = typename Int8Piece<Piece>::Shape;
  const auto* const a = static_cast<const ActivationBlock*>(part.x);
  UnpackedColumns unpacked = {static_cast<uint32_t*>(part.scratch), nullptr, nullptr};
  unpacked.scales = reinterpret_cast<float*>(unpacked.bytes + part.k_block / 4 * kTileColumns);
  unpacked.minimums = unpacked.scales + part.k_block / 16 * kTileColumns;
  clear_sums(part);
  for (int64_t k0 = 0; k0 < part.k; k0 += part.k_block) {
    const int64_t depth = part.k - k0 < part.k_block ? part.k - k0 : part.k_block;
    for (int64_t column = 0; column < part.columns; column += kTileColumns) {
      unpack_columns<Piece>(part, unpacked, column, k0, depth);
      for (int64_t row = 0; row < part.rows; row += kInt8TileRows) {
        const int rows = part.rows - row < kInt8TileRows ? static_cast<int>(part.rows - row) : kInt8TileRows;
        const auto add =
            tile::with_rows<kInt8TileRows>(rows, [](auto n) OPST_INLINE_LAMBDA { return &int8_block_tile<Shape, n>; });
        add(unpacked, depth / kActivationBlock, a + row * part.x_stride + k0 / kActivationBlock, part.x_stride,
            part.sums + row * part.sums_stride + column, part.sums_stride);
      }
    }
  }
}

inline constexpr int kBlockVecs = kActivationBlock / F32::kLanes;
// A block of x, its largest magnitude, and whether all of it is finite.
OPST_INLINE bool load_block(const float* x, int64_t x_stride, F32 (&v)[kBlockVecs], float& largest) {
  F32 top = F32::zero(), not_finite = F32::zero();  // 0 * x: NaN where x is not finite
  OPST_UNROLL for (int i = 0; i < kBlockVecs; ++i) {
    v[i] = tile::load_row<F32>(x, x_stride, i * F32::kLanes, kActivationBlock);
    top = max(abs(v[i]), top);
    not_finite = fma(v[i], F32::zero(), not_finite);
  }
  largest = simd::hmax(top);
  return simd::hsum(not_finite) == 0;
}

OPST_INLINE void quantise_block(const float* x, int64_t x_stride, ActivationBlock* out) {
  F32 v[kBlockVecs];
  float largest;
  const bool finite = load_block(x, x_stride, v, largest);
  const float scale = largest / 127.0f;
  const bool nonzero = finite && scale > 0;
  F32 half[2] = {F32::zero(), F32::zero()};
  OPST_UNROLL for (int i = 0; i < kBlockVecs; ++i) {
    F32 q = F32::zero();
    if (nonzero) q = min(max(round(v[i] / F32::set1(scale)), F32::set1(-127.0f)), F32::set1(127.0f));
    simd::store_i8(q, out->q[0] + i * F32::kLanes);
    half[i * 2 / kBlockVecs] = half[i * 2 / kBlockVecs] + q;
  }
  simd::even_odd(out->q[0]);
  simd::even_odd(out->q[0] + 16);
  const float sum0 = simd::hsum(half[0]), sum1 = simd::hsum(half[1]);
  out->scale = finite ? scale : __builtin_nanf("");
  out->scaled_sum = out->scale * (sum0 + sum1);
  out->sums[0][0] = static_cast<int32_t>(sum0);
  out->sums[1][0] = static_cast<int32_t>(sum1);
}

inline void quantise_row(const float* x, int64_t x_stride, int64_t k, ActivationBlock* out) {
  for (int64_t t = 0; t < k; t += kActivationBlock, ++out) quantise_block(x + t * x_stride, x_stride, out);
}

}  // namespace opst::OPST_ISA_NS::gemm

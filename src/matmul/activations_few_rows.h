// Blocks of activations, in fixed point or int8, times GGUF weights: few rows.
//
// Computes   sums[i, j] = sum over blocks of activations (activations.h) times quantised weights, for a few rows at a
//            time (int8: up to four, fixed point: up to two): decoding, bound by reading the weight
// Shapes     x [rows, k / 32] blocks; weight: packed panels (packed_layout.h); sums [rows, columns]
// Loop nest  for each four rows (fixed point: two); at last for those left
//              for each panel (several rows: for each 2 vectors of columns at least)
//                for each run of k with one scale
//                  four weights to a lane come out of a word as bytes, and meet four bytes of each plane of x in one
//                  instruction; the exact total of the run becomes a float, and meets scale and minimum
// Memory     weights stream once per four rows (two); x stays in L1. One row, one panel at a time: q4_1 on Zen 5, 0.95 of
//            plain reading with the stream fetched 8 KB ahead (4 KB 0.88, 2 KB 0.81; four panels side by side at best
//            0.87); on Zen 4, into L2, 0.72, one int8 row into L1, 4 KB ahead, 0.86 to 0.97 (more rows or planes: less)
// Numerics   activations.h
#pragma once

#include "matmul/activations_int8_many_rows.h"
#include "matmul/few_rows.h"

namespace opst::OPST_ISA_NS::gemm {

inline constexpr int64_t kBlockPrefetchBytes = 8192;

// sum of planes[p] * 256^p
OPST_INLINE F32 join_planes(const I32 (&planes)[1]) { return to_f32(planes[0]); }
OPST_INLINE F32 join_planes(const I32 (&planes)[kFixedPlanes]) {
  return fma(to_f32((planes[2] << 8) + planes[1]), F32::set1(256), to_f32(planes[0]));
}

// Totals of a run with one scale, for MR rows and NV vectors of columns. Where both are 1, even and odd values have
// sums of their own, or the latency of the products would show.
template <class Shape, class Block, int MR, int NV>
struct RunTotals {
  static constexpr int kGroups = Shape::kPart / 8, P = Block::kPlanes, kSums = MR * NV == 1 ? 2 : 1;
  simd::DotSum<Shape::kMost> sums[kSums][MR][NV][P];

  OPST_INLINE void begin(const Block* a, int64_t a_stride, int half) {
    OPST_UNROLL for (int i = 0; i < MR; ++i) {
      OPST_UNROLL for (int plane = 0; plane < P; ++plane) {
        const int32_t sum = sum_of_run<Shape::kPart>(a[i * a_stride], half, plane);
        OPST_UNROLL for (int v = 0; v < NV; ++v) {
          sums[0][i][v][plane].begin(Shape::kOffset == 0 ? I32::zero() : I32::set1(-Shape::kOffset * sum));
          if constexpr (kSums == 2) sums[1][i][v][plane].begin(I32::zero());
        }
      }
    }
  }
  // Eight values of vector v, the group `g` of the run.
  OPST_INLINE void add(const Block* a, int64_t a_stride, int half, int v, int g, EvenOdd q) {
    OPST_UNROLL for (int i = 0; i < MR; ++i) {
      OPST_UNROLL for (int plane = 0; plane < P; ++plane) {
        const int8_t* const eight = a[i * a_stride].q[plane] + half * 16 + g * 8;
        sums[0][i][v][plane].add(q.even, four_bytes(eight), g * 2 / kSums);
        sums[kSums - 1][i][v][plane].add(q.odd, four_bytes(eight + 4), g * 2 / kSums + (kSums == 1 ? 1 : 0));
      }
    }
  }
  OPST_INLINE F32 joined(int i, int v) const {
    I32 total[P];
    OPST_UNROLL for (int plane = 0; plane < P; ++plane) {
      total[plane] = sums[0][i][v][plane].template total<kGroups * 2 / kSums>();
      if constexpr (kSums == 2) total[plane] = total[plane] + sums[1][i][v][plane].template total<kGroups>();
    }
    return join_planes(total);
  }
};

// MR rows times NV vectors of columns.
template <class Piece, class Block, int MR, int NV>
OPST_NOINLINE void few_rows_blocks_group(const ProductPart& part, int64_t first_row, int64_t column) {
  using Shape = typename Int8Piece<Piece>::Shape;
  using Totals = RunTotals<Shape, Block, MR, NV>;
  constexpr int kParts = Piece::kValues / Shape::kPart;
  constexpr int64_t kFetchBytes = static_cast<int64_t>(sizeof(Piece)) / kParts;
  constexpr bool kIntoL1 = MR * Block::kPlanes == 1;
  constexpr int64_t kAhead = ((kIntoL1 ? 4096 : kBlockPrefetchBytes) + sizeof(Piece) - 1) / sizeof(Piece);
  constexpr int64_t kPanels = NV > kVecsPerPanel ? NV / kVecsPerPanel : 1;
  const int64_t pieces = part.k / Piece::kValues;
  const Piece* stream[NV];
  int lane[NV];
  find_vecs(part, column, stream, lane);
  const Piece* const last = panel_of<Piece>(part, clamped_vec(part, part.columns)) + (pieces > 0 ? pieces - 1 : 0);
  const int64_t a_stride = part.x_stride;
  const Block* a = static_cast<const Block*>(part.x) + first_row * a_stride;

  F32 acc[MR][NV];
  tile::clear_tile<tile::ProductF32, MR, NV>(acc);
  for (int64_t p = 0; p < pieces; ++p) {
    // At a panel's end the panels of the next NV vectors are fetched.
    const int64_t ahead = p + kAhead < pieces ? p + kAhead : p + kAhead + (kPanels - 1) * pieces;
    const Piece* fetched[NV];
    OPST_UNROLL for (int v = 0; v < NV; ++v) fetched[v] = stream[v] + ahead < last ? stream[v] + ahead : last;
    for (int s = 0; s < kParts; ++s) {
      const int half = Shape::kPart == 16 ? s % 2 : 0;
      OPST_UNROLL for (int v = 0; v < NV; v += kVecsPerPanel) {
        const char* const line = reinterpret_cast<const char*>(fetched[v]) + s * kFetchBytes;
        OPST_UNROLL for (int64_t i = 0; i < kFetchBytes; i += 64) kIntoL1 ? __builtin_prefetch(line + i)
                                                                          : simd::fetch_into_l2(line + i);
      }
      Totals totals;
      totals.begin(a, a_stride, half);
      OPST_UNROLL for (int g = 0; g < Totals::kGroups; ++g) {
        OPST_UNROLL for (int v = 0; v < NV; ++v) {
          totals.add(a, a_stride, half, v, g, bytes_of(stream[v][p], lane[v], s * Totals::kGroups + g));
        }
      }
      OPST_UNROLL for (int v = 0; v < NV; ++v) {
        const F32 d = scale_of(stream[v][p], lane[v], s);
        OPST_UNROLL for (int i = 0; i < MR; ++i) {
          acc[i][v] = fma(totals.joined(i, v), d * F32::set1(a[i * a_stride].scale), acc[i][v]);
        }
        if constexpr (Shape::kMinimum) {
          const F32 m = minimum_of(stream[v][p], lane[v], s);
          OPST_UNROLL for (int i = 0; i < MR; ++i) {
            acc[i][v] = fma(F32::set1(a[i * a_stride].scaled_sum), m, acc[i][v]);
          }
        }
      }
      if (Shape::kPart == 32 || half == 1) ++a;
    }
  }
  store_sums(part, first_row, column, acc);
}

template <class Piece, class Block>
void few_rows_blocks(const ProductPart& part) {
  // The first lines of the stream, which fetching ahead leaves out.
  const char* const panels = static_cast<const char*>(part.panels);
  const int64_t panel_bytes = part.k / Piece::kValues * static_cast<int64_t>(sizeof(Piece));
  for (int64_t b = 0; b < kBlockPrefetchBytes && b < panel_bytes; b += 64) __builtin_prefetch(panels + b);
  // Another core has just written the blocks: all their lines are asked for at once, not one by one as they are needed.
  for (int64_t i = 0; i < part.rows; ++i) {
    const auto* const blocks = reinterpret_cast<const char*>(static_cast<const Block*>(part.x) + i * part.x_stride);
    const int64_t bytes = part.k / kActivationBlock * static_cast<int64_t>(sizeof(Block));
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(blocks + b);
  }
  constexpr int kMostAtOnce = Block::kPlanes == 1 ? 4 : 2;
  for (int64_t row = 0; row < part.rows; row += kMostAtOnce) {
    const auto left = static_cast<int>(part.rows - row);
    tile::with_rows<kMostAtOnce>(left < kMostAtOnce ? left : kMostAtOnce, [&](auto rows) OPST_INLINE_LAMBDA {
      constexpr int NV = rows > 1 && kVecsPerPanel < 2 ? 2 : kVecsPerPanel, kColumns = NV * F32::kLanes;
      for (int64_t c = 0; c < part.columns; c += kColumns) few_rows_blocks_group<Piece, Block, rows, NV>(part, row, c);
    });
  }
}

// 2^(e - 1) <= x < 2^e for a normal x > 0.
OPST_INLINE int exponent_of(float x) { return static_cast<int>(__builtin_bit_cast(uint32_t, x) >> 23) - 126; }
OPST_INLINE float power_of_two(int exponent) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(exponent + 127) << 23);
}

OPST_INLINE bool fix_block(const float* x, int64_t x_stride, FixedBlock* out) {
  F32 v[kBlockVecs];
  float largest;
  if (!load_block(x, x_stride, v, largest) || largest > kFixedLargest) return false;
  if (largest != 0 && largest < kFixedSmallest) return false;
  // The exponent alone: largest * inverse lies between 2^22 and 2^23, where not every number has three signed bytes.
  int exponent = largest != 0 ? exponent_of(largest) : 0;
  if (largest * power_of_two(23 - exponent) > static_cast<float>(kFixedMost)) ++exponent;
  const float scale = power_of_two(exponent - 23);
  const F32 inverse = F32::set1(power_of_two(23 - exponent));
  F32 sums[2][kFixedPlanes] = {{F32::zero(), F32::zero(), F32::zero()}, {F32::zero(), F32::zero(), F32::zero()}};
  OPST_UNROLL for (int i = 0; i < kBlockVecs; ++i) {
    I32 rest = simd::to_i32(round(v[i] * inverse));
    OPST_UNROLL for (int plane = 0; plane < kFixedPlanes; ++plane) {
      const I32 digit = simd::low_byte(rest);
      rest = simd::high_bytes(rest - digit);
      simd::store_i8(to_f32(digit), out->q[plane] + i * F32::kLanes);
      sums[i * 2 / kBlockVecs][plane] = sums[i * 2 / kBlockVecs][plane] + to_f32(digit);
    }
  }
  int64_t total = 0;
  for (int plane = kFixedPlanes - 1; plane >= 0; --plane) {
    simd::even_odd(out->q[plane]);
    simd::even_odd(out->q[plane] + 16);
    for (int half = 0; half < 2; ++half) out->sums[half][plane] = static_cast<int32_t>(simd::hsum(sums[half][plane]));
    total = total * 256 + out->sums[0][plane] + out->sums[1][plane];
  }
  out->scale = scale;
  out->scaled_sum = scale * static_cast<float>(total);
  return true;
}

inline bool fix_row(const float* x, int64_t x_stride, int64_t k, FixedBlock* out) {
  for (int64_t t = 0; t < k; t += kActivationBlock, ++out) {
    if (!fix_block(x + t * x_stride, x_stride, out)) return false;
  }
  return true;
}

}  // namespace opst::OPST_ISA_NS::gemm

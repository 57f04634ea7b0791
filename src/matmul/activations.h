// Activations in blocks of 32, int8 or in fixed point, times GGUF weights: the one definition that every kernel
// follows, few rows or many, so that all give the same bits. (Of int8 and int4 weights: weights_int_many_rows.h.)
//
// int8. Each row of x is cut into blocks of 32 consecutive values. A block becomes
//   scale = max |x| / 127                                        one rounding to f32
//   q     = x / scale, rounded to f32, then to the nearest integer (ties to even), at most 127 in magnitude
//   scale = 0 (no value above 2^-143 or so): all q are 0
//   a NaN or an infinity among the values: scale = NaN, all q are 0; so the whole row of out becomes NaN
//
// Weights. The values of a format come in runs of one scale (Block::kPart of quant/formats.h): 32 values, for q6_k 16.
// Value t of a run is d * (u[t] - offset) + m, with u an unsigned integer and d (and m) one f32 per run and output: the
// products of the block's f16 with the run's scale and minimum, the latter negated where the format subtracts it.
//
// Sums. Each output is one chain of f32 multiply-adds over the runs in ascending order, beginning with 0:
//   total = sum over the run of q[t] * (u[t] - offset)           an exact integer, below 2^20 in magnitude
//   sum   = fma(total, d * scale, sum)                           the product d * scale is rounded once
//   sum   = fma(scale * (sum of q), m, sum)                      where there is an m; the product is rounded once
// and at last the bias is added. (The generic level has no fma: product and sum round.)
//
// Fixed point, for one or two rows: as accurate as multiply-adds in f32, and bound by reading the weight.
// A block becomes
//   scale = a power of two, the smallest for which every X is at most 0x7f7f7f = 8355711, the largest number of three
//           signed bytes, in magnitude
//   X     = x / scale, rounded to the nearest integer, = q[2] * 65536 + q[1] * 256 + q[0], -128 <= q <= 127
// so that a value is off by at most 2^-22 of the block's largest magnitude, mostly 2^-24, and values of up to 22
// significant bits below it are exact. A row with a value that is not finite or above 2^120 in magnitude, or with a
// block whose largest magnitude lies between 0 and 2^-100, is not representable: it is multiplied in f32 instead.
// Weights and sums as above, with
//   total = sum over the run of X[t] * (u[t] - offset)     exact in three integers, one per plane of bytes, joined as
//           fma(f32(plane 2 * 256 + plane 1), 256, f32(plane 0))
//
// f32, f16 and bf16 weights have no integers: they are multiplied with x itself.
#pragma once

#include <cstdint>

namespace opst::gemm {

inline constexpr int kActivationBlock = 32, kFixedPlanes = 3;
inline constexpr int kFixedMost = 0x7f7f7f;
inline constexpr float kFixedSmallest = 0x1p-100f, kFixedLargest = 0x1p120f;

// Value 8 g + 2 i of the block is q[plane][8 g + i], value 8 g + 2 i + 1 is q[plane][8 g + 4 + i], for i < 4: the order
// in which masking and shifting a word of eight 4-bit fields hands out its bytes.
template <int planes>
struct BlockOfPlanes {
  static constexpr int kPlanes = planes;
  int8_t q[planes][kActivationBlock];
  float scale;
  float scaled_sum;         // scale * (sum of the integers)
  int32_t sums[2][planes];  // of q: values 0..15, 16..31
};
using ActivationBlock = BlockOfPlanes<1>;
using FixedBlock = BlockOfPlanes<kFixedPlanes>;
static_assert(sizeof(ActivationBlock) == 48 && sizeof(FixedBlock) == 128);

}  // namespace opst::gemm

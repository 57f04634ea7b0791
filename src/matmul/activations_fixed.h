// Activations in fixed point, times GGUF weights: as accurate as multiply-adds in f32, and so quick that reading the
// weight bounds them. For one or two rows.
//
// Activations. Each row of x is cut into blocks of 32 consecutive values. A block becomes
//   scale = a power of two, the smallest for which every X is at most 0x7f7f7f = 8355711, the largest number of three
//           signed bytes, in magnitude
//   X     = x / scale, rounded to the nearest integer, = q[2] * 65536 + q[1] * 256 + q[0], -128 <= q <= 127
// so that a value is off by at most 2^-22 of the block's largest magnitude, mostly 2^-24, and values of up to 22
// significant bits below it are exact. A row with a value that is not finite or above 2^120 in magnitude, or with a
// block whose largest magnitude lies between 0 and 2^-100, is not representable: it is multiplied in f32 instead.
//
// Weights and sums: as in activations_int8.h, with
//   total = sum over the run of X[t] * (u[t] - offset)     exact in three integers, one per plane of bytes, joined as
//           fma(f32(plane 2 * 256 + plane 1), 256, f32(plane 0))
#pragma once

#include <cstdint>

#include "matmul/activations_int8.h"

namespace opst {
namespace gemm {

inline constexpr int kFixedPlanes = 3;
inline constexpr int kFixedMost = 0x7f7f7f;
inline constexpr float kFixedSmallest = 0x1p-100f, kFixedLargest = 0x1p120f;

struct FixedBlock {
  int8_t q[kFixedPlanes][kActivationBlock];  // each in the order of ActivationBlock
  float scale;
  float scaled_sum;               // scale * (sum of X)
  int32_t sums[2][kFixedPlanes];  // of q: values 0..15, 16..31
};
static_assert(sizeof(FixedBlock) == 128);

}  // namespace gemm

}  // namespace opst

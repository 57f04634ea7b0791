// Computes   quantize    q = round(x * smooth / scale) + zero for one group of a row, and the group's scale and zero
//                        unless they are given (include/opst/quant.h)
//            dequantize  out = (q - zero) * scale
// Shapes     count values with any stride; int4: two values to a byte, count is even
// Loop nest  quantize: two passes over the group, lanes over values: the range (unless scales are given), the integers
//            dequantize: one pass
// Memory     everything streams; the second pass finds the group in a cache
// Numerics   quotients are rounded to f32, then to the nearest integer (ties to even), then clamped
#pragma once

#include "quant/kernels.h"
#include "simd/dot_i8.h"
#include "tile/pack.h"

namespace opst::OPST_ISA_NS::quant {

using namespace opst::quant;
using simd::F32;

template <class T>
OPST_INLINE F32 group_values(const QuantizeGroup& group, int64_t t) {
  const F32 x = tile::load_row<F32>(static_cast<const T*>(group.x), group.x_stride, t, group.count);
  if (group.smooth == nullptr) return x;
  return x * tile::load_row<F32>(group.smooth, group.smooth_stride, t, group.count);
}

// n <= kLanes integers as bytes or halves of bytes, from value t of the group on.
OPST_INLINE void store_integers(const QuantizeGroup& group, int64_t t, int64_t n, F32 q) {
  if (group.bits == 8 && group.q_stride == 1 && n == F32::kLanes) return simd::store_i8(q, group.q + t);
  int8_t lanes[F32::kLanes];
  simd::store_i8(q, lanes);
  if (group.bits == 8) {
    for (int64_t i = 0; i < n; ++i) group.q[(t + i) * group.q_stride] = lanes[i];
  } else {
    for (int64_t i = 0; i + 1 < n; i += 2) {
      group.q[(t + i) / 2 * group.q_stride] = static_cast<int8_t>((lanes[i] & 15) | lanes[i + 1] * 16);
    }
  }
}

template <class T>
OPST_NOINLINE void quantize_group(const QuantizeGroup& group) {
  const float most = group.bits == 8 ? 127.0f : 7.0f;
  const float lowest = -most - 1;
  float scale, zero = 0;
  bool usable;
  if (group.scales_given) {
    scale = *group.scale;
    usable = scale - scale == 0 && scale != 0;
    if (group.zero != nullptr) zero = *group.zero;
  } else {
    F32 low = F32::zero(), high = F32::zero(), not_finite = F32::zero();  // 0 * x: NaN where x is not finite
    for (int64_t t = 0; t < group.count; t += F32::kLanes) {
      const F32 x = group_values<T>(group, t);
      low = min(x, low);
      high = max(x, high);
      not_finite = fma(x, F32::zero(), not_finite);
    }
    const float smallest = -simd::hmax(F32::zero() - low), largest = simd::hmax(high);
    const bool finite = simd::hsum(not_finite) == 0;
    scale = group.zero != nullptr ? largest / (2 * most + 1) - smallest / (2 * most + 1)
                                  : (-smallest > largest ? -smallest : largest) / most;
    usable = finite && scale > 0;
    if (!finite) scale = __builtin_nanf("");
    *group.scale = scale;
    if (group.zero != nullptr) {
      if (usable) {
        float rounded[F32::kLanes];
        const F32 exact = F32::set1(lowest) - F32::set1(smallest) / F32::set1(scale);
        min(max(round(exact), F32::set1(lowest)), F32::set1(most)).store(rounded);
        zero = rounded[0];
      }
      *group.zero = static_cast<int8_t>(zero);
    }
  }
  // Quotients pass -most where a symmetric scale was rounded down (by much only where the scale is subnormal).
  const F32 bottom = F32::set1(group.zero == nullptr && !group.scales_given ? -most : lowest), top = F32::set1(most);
  const F32 zeros = F32::set1(zero), divisor = F32::set1(scale);
  for (int64_t t = 0; t < group.count; t += F32::kLanes) {
    F32 q = zeros;
    if (usable) {
      const F32 quotient = round(group_values<T>(group, t) / divisor);
      q = min(max(select(quotient == quotient, quotient, F32::zero()) + zeros, bottom), top);
    }
    store_integers(group, t, simd::clamp_lanes<F32>(group.count - t), q);
  }
}

template <class T>
OPST_NOINLINE void dequantize_group(const DequantizeGroup& group) {
  const F32 scale = F32::set1(group.scale), zero = F32::set1(group.zero);
  T* const out = static_cast<T*>(group.out);
  for (int64_t t = 0; t < group.count; t += F32::kLanes) {
    const int64_t n = simd::clamp_lanes<F32>(group.count - t);
    int8_t lanes[F32::kLanes] = {};
    if (group.bits == 8) {
      for (int64_t i = 0; i < n; ++i) lanes[i] = group.q[(t + i) * group.q_stride];
    } else {
      for (int64_t i = 0; i + 1 < n; i += 2) {
        const int both = group.q[(t + i) / 2 * group.q_stride];
        lanes[i] = static_cast<int8_t>(static_cast<int8_t>(both * 16) / 16);
        lanes[i + 1] = static_cast<int8_t>(both >> 4);
      }
    }
    const F32 value = (simd::load_i8(lanes) - zero) * scale;
    if (group.out_stride == 1) {
      value.store_n(out + t, n);
    } else {
      T values[F32::kLanes];
      value.store_n(values, n);
      for (int64_t i = 0; i < n; ++i) out[(t + i) * group.out_stride] = values[i];
    }
  }
}

}  // namespace opst::OPST_ISA_NS::quant

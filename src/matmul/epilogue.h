// Computes   out[i, j] = residual[i, j] + activation(sums[i, j] * x_scales[i] + bias[j])
// Shapes     sums [rows, columns] f32 (swiglu: two of them); x_scales [rows]; bias [columns]; residual, out [rows,
//            columns], any strides
// Loop nest  rows; per row up to three passes, each over one type only: activation in place, residual, store. The
//            commonest output, rows of f32 without a residual, is stored by the first
// Memory     sums: one task's, in L1 or L2; a row of it stays in L1 between the passes
// Numerics   f32; out is rounded once. silu as in rowwise swiglu: the same bits
#pragma once

#include "matmul/panels.h"
#include "simd/math.h"
#include "tile/pack.h"

namespace opst::OPST_ISA_NS::gemm {

OPST_INLINE F32 silu(F32 y) { return y / (F32::set1(1) + simd::exp(F32::zero() - y)); }

struct NoActivation {
  static OPST_INLINE F32 of(F32 y, F32) { return y; }
};
struct Silu {
  static OPST_INLINE F32 of(F32 y, F32) { return silu(y); }
};
struct GeluErf {
  static OPST_INLINE F32 of(F32 y, F32) {
    const F32 half = F32::set1(0.5f) * y;
    return fma(half, simd::erf(y * F32::set1(0.707106781f)), half);
  }
};
struct GeluTanh {
  static OPST_INLINE F32 of(F32 y, F32) {
    const F32 half = F32::set1(0.5f) * y;
    const F32 cubic = fma(y * y, F32::set1(0.797884561f * 0.044715f), F32::set1(0.797884561f)) * y;
    return fma(half, simd::tanh(cubic), half);
  }
};
struct Swiglu {
  static OPST_INLINE F32 of(F32 first, F32 second) { return silu(first) * second; }
};
struct SwigluSwapped {
  static OPST_INLINE F32 of(F32 first, F32 second) { return silu(second) * first; }
};

template <class Activation>
inline constexpr bool kTakesTwo = __is_same(Activation, Swiglu) || __is_same(Activation, SwigluSwapped);

// activation(sums * x_scales + bias) of rows [first, first + rows), from `to` on; may be the sums' own place.
template <class Activation>
OPST_NOINLINE void activate(const Finish& part, int64_t first, int64_t rows, float* to, int64_t to_stride) {
  const int64_t n = part.columns;
  const float *const bias = part.bias, *const second_bias = part.second_bias;
  for (int64_t row = first; row < first + rows; ++row, to += to_stride) {
    const float* const y = part.sums + row * part.sums_stride;
    const bool scaled = part.x_scales != nullptr;
    const F32 x_scale = F32::set1(scaled ? part.x_scales[row] : 1);
    const auto with_bias = [&](F32 sum, const float* b, int64_t i) OPST_INLINE_LAMBDA {
      if (scaled) sum = sum * x_scale;
      return b == nullptr ? sum : sum + tile::load_row<F32>(b, 1, i, n);
    };
    for (int64_t i = 0; i < n; i += F32::kLanes) {
      F32 other = F32::zero();
      // The second half's sums may begin anywhere in their own rows, so that the last vector may not be a whole one.
      if constexpr (kTakesTwo<Activation>) {
        const float* const second = part.second + row * part.second_stride;
        other = with_bias(tile::load_row<F32>(second, 1, i, n), second_bias, i);
      }
      const F32 value = Activation::of(with_bias(F32::load(y + i), bias, i), other);
      store_first(value, to + i, n - i);
    }
  }
}

template <class T>
void add_row(const void* data, int64_t stride, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += F32::kLanes) {
    (tile::load_row<F32>(static_cast<const T*>(data), stride, i, n) + F32::load(y + i)).store(y + i);
  }
}

template <class T>
void store_row(const float* y, int64_t n, void* data, int64_t stride) {
  T* const out = static_cast<T*>(data);
  for (int64_t i = 0; i < n; i += F32::kLanes) {
    const F32 v = F32::load(y + i);
    if (stride == 1) {
      store_first(v, out + i, n - i);
    } else {
      T lanes[F32::kLanes];
      v.store(lanes);
      for (int64_t j = 0; j < simd::clamp_lanes<F32>(n - i); ++j) out[(i + j) * stride] = lanes[j];
    }
  }
}

template <class Activation>
void finish(const Finish& part) {
  // In the order of DType, of whose f64 there are no products.
  constexpr int64_t kBytes[] = {4, 0, 2, 2};
  constexpr void (*kAdd[])(const void*, int64_t, int64_t, float*) = {add_row<float>, nullptr, add_row<bf16>,
                                                                     add_row<f16>};
  constexpr void (*kStore[])(const float*, int64_t, void*, int64_t) = {store_row<float>, nullptr, store_row<bf16>,
                                                                       store_row<f16>};
  if (part.residual == nullptr && part.out_type == DType::f32 && part.column_stride == 1) {
    return activate<Activation>(part, 0, part.rows, static_cast<float*>(part.out), part.row_stride);
  }
  const auto residual_type = static_cast<int>(part.residual_type), out_type = static_cast<int>(part.out_type);
  const bool plain = __is_same(Activation, NoActivation) && part.bias == nullptr && part.x_scales == nullptr;
  for (int64_t i = 0; i < part.rows; ++i) {
    float* const y = part.sums + i * part.sums_stride;
    if (!plain) activate<Activation>(part, i, 1, y, 0);
    if (part.residual != nullptr) {
      kAdd[residual_type](
          static_cast<const char*>(part.residual) + i * part.residual_row_stride * kBytes[residual_type],
          part.residual_column_stride, part.columns, y);
    }
    kStore[out_type](y, part.columns, static_cast<char*>(part.out) + i * part.row_stride * kBytes[out_type],
                     part.column_stride);
  }
}

}  // namespace opst::OPST_ISA_NS::gemm

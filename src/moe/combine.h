// Weighted sums of rows, and their gradient for one token.
//
// Computes   out = skip1 + skip2 + sum_i w[i] (rows[index[i]] + bias[bias_index[i]]),  i ascending
//            backward: grad_rows[index[i]] = w[i] g;  dots[i] = sum_f g[f] (rows[index[i]][f] + bias[bias_index[i]][f])
// Shapes     rows [.., features], out, skips, g [features], w, index, dots [count]
// Loop nest  for blocks of 8 vectors of features: for each i: sums stay in registers, so out is written once
//            backward: for each i: one pass over features; g comes from L1 for all but the first
// Memory     every row is read once, from wherever it lies; a block of 8 vectors is 512 bytes of it at avx512, f32
// Numerics   f32, one fma per term, one rounding at the end. An index < 0 is not read: its row counts as zeros
// Source     opst/moe.h
#pragma once

#include "moe/kernels.h"
#include "tile/row_verbs.h"

namespace opst::OPST_ISA_NS::moe {

using namespace opst::moe;
using simd::F32;

template <class T>
OPST_INLINE const T* row_at(const Rows& rows, int64_t index) {
  return static_cast<const T*>(rows.data) + index * rows.row_stride;
}

// kVecs vectors of features from `begin` on, all of them below c.features where there are several.
template <class T, int kVecs>
OPST_INLINE void combine_columns(const Combine& c, int64_t begin) {
  const auto load = [&](const T* row, int64_t stride, int v) OPST_INLINE_LAMBDA {
    const int64_t at = begin + v * F32::kLanes;
    if (kVecs > 1 && stride == 1) return F32::load(row + at);
    return tile::load_row<F32>(row, stride, at, c.features);
  };
  F32 sum[kVecs];
  OPST_UNROLL for (int v = 0; v < kVecs; ++v) sum[v] = F32::zero();
  for (int s = 0; s < 2; ++s) {
    if (c.skip[s] == nullptr) continue;
    const T* const skip = static_cast<const T*>(c.skip[s]);
    OPST_UNROLL for (int v = 0; v < kVecs; ++v) sum[v] = sum[v] + load(skip, c.skip_stride[s], v);
  }
  for (int64_t i = 0; i < c.count; ++i) {
    const F32 w = F32::set1(c.weights[i]);
    const T* const row = c.index[i] < 0 ? nullptr : row_at<T>(c.rows, c.index[i]);
    if (c.bias.data == nullptr || c.bias_index[i] < 0) {
      if (row == nullptr) continue;
      OPST_UNROLL for (int v = 0; v < kVecs; ++v) sum[v] = simd::fma(w, load(row, c.rows.stride, v), sum[v]);
      continue;
    }
    const T* const bias = row_at<T>(c.bias, c.bias_index[i]);
    OPST_UNROLL for (int v = 0; v < kVecs; ++v) {
      const F32 b = load(bias, c.bias.stride, v);
      sum[v] = simd::fma(w, row == nullptr ? b : load(row, c.rows.stride, v) + b, sum[v]);
    }
  }
  OPST_UNROLL for (int v = 0; v < kVecs; ++v) {
    tile::store_row(sum[v], static_cast<T*>(c.out), c.out_stride, begin + v * F32::kLanes, c.features);
  }
}

template <class T>
void combine(const Combine& c) {
  constexpr int kVecs = 8;
  int64_t f = 0;
  for (; f + kVecs * F32::kLanes <= c.features; f += kVecs * F32::kLanes) combine_columns<T, kVecs>(c, f);
  for (; f < c.features; f += F32::kLanes) combine_columns<T, 1>(c, f);
}

template <class T>
void combine_backward(const CombineBackward& c) {
  const T* const grad = static_cast<const T*>(c.grad_out);
  const auto g = [&](int64_t f)
                     OPST_INLINE_LAMBDA { return tile::load_row<F32>(grad, c.grad_out_stride, f, c.features); };
  for (int64_t i = 0; i < c.count; ++i) {
    const int64_t index = c.index[i];
    if (c.grad_rows.data != nullptr && index >= 0) {
      T* const to = const_cast<T*>(row_at<T>(c.grad_rows, index));
      const F32 w = F32::set1(c.weights[i]);
      for (int64_t f = 0; f < c.features; f += F32::kLanes) {
        tile::store_row(w * g(f), to, c.grad_rows.stride, f, c.features);
      }
    }
    if (c.dots == nullptr) continue;
    const T* const row = index < 0 ? nullptr : row_at<T>(c.rows, index);
    const bool biased = c.bias.data != nullptr && c.bias_index[i] >= 0;
    const T* const bias = biased ? row_at<T>(c.bias, c.bias_index[i]) : nullptr;
    const auto part = [&](const T* from, int64_t stride, int64_t f) OPST_INLINE_LAMBDA {
      return from == nullptr ? F32::zero() : tile::load_row<F32>(from, stride, f, c.features);
    };
    c.dots[i] =
        row == nullptr && bias == nullptr ? 0 : tile::sum(c.features, [&](F32 acc, int64_t f) OPST_INLINE_LAMBDA {
          return simd::fma(g(f), part(row, c.rows.stride, f) + part(bias, c.bias.stride, f), acc);
        });
  }
}

}  // namespace opst::OPST_ISA_NS::moe

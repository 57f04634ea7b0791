// Computes   r = 1 / sqrt(mean_j x[j]^2 + eps);   out[i] = x[i] r weight[i]
//            backward, g = grad_out:
//              grad_x[i]       = r (g[i] weight[i] - x[i] r^2 mean_j g[j] weight[j] x[j]) + grad_sum[i]
//              grad_weight[i] += g[i] x[i] r
// Shapes     x, weight, out and all gradients [features]
// Loop nest  passes over the row: the sums, four vectors each, then the products
// Memory     a row is read from memory once, then from L1 (beyond 10,000 features: L2)
// Numerics   f32; the four vectors are summed at the end in a fixed order; (x * r) * weight
#pragma once

#include "rowwise/row_verbs.h"

namespace opst::OPST_ISA_NS::rowwise {

using opst::rowwise::Moments;
using opst::rowwise::NormBackwardRow;

template <class T>
OPST_INLINE F32 reciprocal_root_mean_square(ConstRow x, int64_t features, double eps) {
  const float squares = sum(features, [&](F32 acc, int64_t i) OPST_INLINE_LAMBDA {
    const F32 v = load<T>(x, i, features);
    return fma(v, v, acc);
  });
  const F32 mean = F32::set1(squares / static_cast<float>(features));
  return F32::set1(1) / sqrt(mean + F32::set1(static_cast<float>(eps)));
}

template <class T, class W>
Moments rms_norm(ConstRow x, ConstRow weight, ConstRow, Row out, int64_t features, double eps) {
  const F32 r = reciprocal_root_mean_square<T>(x, features, eps);
  for (int64_t i = 0; i < features; i += F32::kLanes) {
    store<T>(load<T>(x, i, features) * r * load<W>(weight, i, features), out, i, features);
  }
  float rstd[F32::kLanes];
  r.store(rstd);
  return {0, rstd[0]};
}

// to[begin ..] += x, below `length`.
OPST_INLINE void accumulate(F32 x, float* to, int64_t begin, int64_t length) {
  const Row row{to, 1};
  store<float>(load<float>({to, 1}, begin, length) + x, row, begin, length);
}

template <class T, class W>
void rms_norm_backward(const NormBackwardRow& row) {
  const int64_t n = row.features;
  const F32 r = reciprocal_root_mean_square<T>(row.x, n, row.eps);
  F32 along = F32::zero();  // r^2 mean g weight x
  if (row.grad_x.data != nullptr) {
    const float dot = sum(n, [&](F32 acc, int64_t i) OPST_INLINE_LAMBDA {
      return fma(load<T>(row.grad_out, i, n) * load<W>(row.weight, i, n), load<T>(row.x, i, n), acc);
    });
    along = F32::set1(dot / static_cast<float>(n)) * r * r;
  }
  for (int64_t i = 0; i < n; i += F32::kLanes) {
    const F32 g = load<T>(row.grad_out, i, n), x = load<T>(row.x, i, n);
    if (row.grad_weight != nullptr) accumulate(g * (x * r), row.grad_weight, i, n);
    if (row.grad_x.data == nullptr) continue;
    F32 grad = r * (g * load<W>(row.weight, i, n) - x * along);
    if (row.grad_sum.data != nullptr) grad = grad + load<T>(row.grad_sum, i, n);
    store<T>(grad, row.grad_x, i, n);
  }
}

}  // namespace opst::OPST_ISA_NS::rowwise

// Computes   out[i] = x[i] / sqrt(mean_j x[j]^2 + eps) * weight[i]
// Shapes     x, weight, out [features]
// Loop nest  two passes over the row: the sum of squares in four vectors, then the products
// Memory     a row is read twice, the second time from L1 (or L2 beyond 10,000 features)
// Numerics   f32; the four vectors are summed at the end in a fixed order; (x * r) * weight with r = 1 / sqrt(..)
#pragma once

#include "rowwise/row_verbs.h"

namespace opst::OPST_ISA_NS::rowwise {

template <class T, class W>
void rms_norm(ConstRow x, ConstRow weight, Row out, int64_t features, double eps) {
  constexpr int64_t kLanes = F32::kLanes;
  F32 squares[4] = {F32::zero(), F32::zero(), F32::zero(), F32::zero()};
  for (int64_t i = 0; i < features; i += 4 * kLanes) {
    OPST_UNROLL for (int j = 0; j < 4; ++j) {
      if (i + j * kLanes >= features) break;
      const F32 v = load<T>(x, i + j * kLanes, features);
      squares[j] = fma(v, v, squares[j]);
    }
  }
  const float sum = simd::hsum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  const F32 mean = F32::set1(sum / static_cast<float>(features));
  const F32 r = F32::set1(1) / sqrt(mean + F32::set1(static_cast<float>(eps)));
  for (int64_t i = 0; i < features; i += kLanes) {
    store<T>(load<T>(x, i, features) * r * load<W>(weight, i, features), out, i, features);
  }
}

}  // namespace opst::OPST_ISA_NS::rowwise

// Computes   swiglu: out[i] = a[i] / (1 + exp(-a[i])) * b[i]        add: out[i] = a[i] + b[i]
// Shapes     a, b, out [n]
// Loop nest  one pass, lanes over elements
// Memory     everything streams
// Numerics   f32, exp within 1.5 ulp (simd/math.h). exp overflows for a < -88.7: there silu is 0 to f32's smallest
// normal
#pragma once

#include "rowwise/row_verbs.h"
#include "simd/math.h"

namespace opst::OPST_ISA_NS::rowwise {

template <class T>
void swiglu(ConstRow a, ConstRow b, Row out, int64_t n) {
  for (int64_t i = 0; i < n; i += F32::kLanes) {
    const F32 gate = load<T>(a, i, n);
    const F32 silu = gate / (F32::set1(1) + simd::exp(F32::zero() - gate));
    store<T>(silu * load<T>(b, i, n), out, i, n);
  }
}

template <class T>
void add(ConstRow a, ConstRow b, Row out, int64_t n) {
  for (int64_t i = 0; i < n; i += F32::kLanes) store<T>(load<T>(a, i, n) + load<T>(b, i, n), out, i, n);
}

}  // namespace opst::OPST_ISA_NS::rowwise

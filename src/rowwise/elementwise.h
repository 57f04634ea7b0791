// Computes   swiglu           out[i] = a[i] s[i] b[i],   s[i] = 1 / (1 + exp(-a[i]));   a: gate, b: up
//            swiglu backward  grad_b[i] = g[i] a[i] s[i];   g = grad_out
//                             grad_a[i] = g[i] b[i] s[i] (1 + a[i] (1 - s[i]))
//            add              out[i] = a[i] + b[i]
// Shapes     all [n]
// Loop nest  one pass, lanes over elements
// Memory     everything streams
// Numerics   f32, exp within 1.5 ulp (simd/math.h). exp overflows for a < -88.7: silu, below 2.7e-37 in magnitude
//            there, becomes 0
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
void swiglu_backward(ConstRow grad_out, ConstRow gate, ConstRow up, Row grad_gate, Row grad_up, int64_t n) {
  const F32 one = F32::set1(1);
  for (int64_t i = 0; i < n; i += F32::kLanes) {
    const F32 g = load<T>(grad_out, i, n), a = load<T>(gate, i, n), b = load<T>(up, i, n);
    // 1 - s from the same exponential, so that it keeps its digits where s is close to 1.
    const F32 e = simd::exp(F32::zero() - abs(a));
    const F32 small = e / (one + e), large = one / (one + e);
    const auto negative = a < F32::zero();
    const F32 s = select(negative, small, large), rest = select(negative, large, small);
    store<T>(g * b * (s * fma(a, rest, one)), grad_gate, i, n);
    store<T>(g * (a * s), grad_up, i, n);
  }
}

template <class T>
void add(ConstRow a, ConstRow b, Row out, int64_t n) {
  for (int64_t i = 0; i < n; i += F32::kLanes) store<T>(load<T>(a, i, n) + load<T>(b, i, n), out, i, n);
}

}  // namespace opst::OPST_ISA_NS::rowwise

// softmax, swiglu and add, with the gradients of the first two.
//
// Computes   out[i] = exp(scale x[i] - m) / l,   m = max_j scale x[j],   l = sum_j exp(scale x[j] - m)
//            backward: grad_x[i] = scale y[i] (grad_out[i] - sum_j grad_out[j] y[j])
// Shapes     x, out and all gradients [n]
// Loop nest  three passes over the row: maximum; exponentials and their sum; products
// Memory     a row is read from memory once, then from L1 (beyond 10,000 elements: L2). f32 keeps the exponentials in
//            out; narrower types, which would round them, compute them twice
// Numerics   f32; exp within 1.5 ulp (narrower types: a shorter one, within 2^-16); exponentials below f32's smallest
//            normal number are 0
//              a NaN in x     the maximum passes over it, the sum does not: the row is NaN
//              m = +inf       inf - inf: the row is NaN
//              all x = -inf   m counts as 0, so l is 0 and the row is 0
//
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
void softmax(ConstRow x, Row out, int64_t n, float scale_factor) {
  const F32 scale = F32::set1(scale_factor), lowest = F32::set1(-__builtin_inff());
  const float highest = greatest(n, [&](F32 acc, int64_t i) OPST_INLINE_LAMBDA {
    return max(within(load<T>(x, i, n) * scale, i, n, lowest), acc);
  });
  const F32 m = F32::set1(highest == -__builtin_inff() ? 0.0f : highest);
  constexpr bool kKeep = sizeof(T) == sizeof(float);
  const F32 log2e = F32::set1(0x1.715476p0f);
  const auto e = [&](int64_t i) OPST_INLINE_LAMBDA {
    const F32 below = load<T>(x, i, n) * scale - m;
    return kKeep ? simd::exp(below) : simd::exp2_short(below * log2e);
  };
  const float total = sum(n, [&](F32 acc, int64_t i) OPST_INLINE_LAMBDA {
    const F32 exponential = e(i);
    if (kKeep) store<T>(exponential, out, i, n);
    return acc + within(exponential, i, n, F32::zero());
  });
  const F32 factor = F32::set1(total == 0 ? 0.0f : 1 / total);
  for (int64_t i = 0; i < n; i += F32::kLanes) {
    store<T>((kKeep ? load<T>({out.data, out.stride}, i, n) : e(i)) * factor, out, i, n);
  }
}

template <class T>
void softmax_backward(ConstRow grad_out, ConstRow y, Row grad_x, int64_t n, float scale) {
  const float dot = sum(
      n, [&](F32 acc, int64_t i) OPST_INLINE_LAMBDA { return fma(load<T>(grad_out, i, n), load<T>(y, i, n), acc); });
  for (int64_t i = 0; i < n; i += F32::kLanes) {
    const F32 p = load<T>(y, i, n) * F32::set1(scale);
    store<T>(p * (load<T>(grad_out, i, n) - F32::set1(dot)), grad_x, i, n);
  }
}

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

// exp2, exp and tanh on vectors, in f32 and (generic level) f64; erf in f32.
//
// Bounds, in units in the last place of the exact result, checked by simd_test (every float: OPST_EXHAUSTIVE=1):
//               f32                         f64
//   exp2        1.5                         2
//   exp2_short  3.1                         2, exp2 itself     five coefficients: the softmax of f32
//   exp2_bf16   2^-13.2, a relative error   -                  three coefficients: values that are rounded to bf16 next
//   exp         1.5                         2
//   tanh        2.5                         7
//   tanh_short  6.5                         7, tanh itself     one division, no exponential: the softcap
//   erf         1.5                         -
// Everywhere: NaN gives NaN, exp(-inf) = 0, exp(+inf) = +inf, and a result below the smallest normal number is 0:
// subnormal results are slow on some processors, and a vector's tail must give what its body gives.
//
// Method: 2^x = p(f) * 2^n, n the nearest integer to x (below x where the level has an instruction for the rest: avx512
// and above), f = x - n; p a polynomial of least relative error with p(0) = 1, fitted for this library.
#pragma once

#include "simd/vec.h"

namespace opst::OPST_ISA_NS::simd {

#if defined(__AVX512F__)
inline constexpr bool kExp2Floor = true;  // exp2_fraction in [0, 1)
#else
inline constexpr bool kExp2Floor = false;  // exp2_fraction in [-0.5, 0.5]
#endif

// c[0] + x (c[1] + x (c[2] + ...)), Horner.
template <class V, int N>
OPST_INLINE V polynomial(V x, const typename V::Scalar (&c)[N]) {
  V p = V::set1(c[N - 1]);
  OPST_UNROLL for (int i = N - 2; i >= 0; --i) p = fma(p, x, V::set1(c[i]));
  return p;
}
// 1 + x (c[0] + x (c[1] + ...))
template <class V, int N>
OPST_INLINE V polynomial_from_one(V x, const typename V::Scalar (&c)[N]) {
  return fma(polynomial(x, c), x, V::set1(1));
}

// Taylor series of 2^x on [-0.5, 0.5]; the remainder is below 2^-57.
inline constexpr double kExp2TaylorF64[13] = {
    0x1.62e42fefa39efp-1,  0x1.ebfbdff82c58fp-3,  0x1.c6b08d704a0cp-5,   0x1.3b2ab6fba4e77p-7,  0x1.5d87fe78a6731p-10,
    0x1.430912f86c787p-13, 0x1.ffcbfc588b0c7p-17, 0x1.62c0223a5c824p-20, 0x1.b5253d395e7c4p-24, 0x1.e4cf5158b8ecap-28,
    0x1.e8cac7351bb25p-32, 0x1.c3bd650fc2986p-36, 0x1.816193166d0f9p-40};
inline constexpr float kExp2Floor3[3] = {0x1.63e65ap-1f, 0x1.d23786p-3f, 0x1.3baaaep-4f};
inline constexpr float kExp2Floor5[5] = {0x1.62e4bap-1f, 0x1.ebdb56p-3f, 0x1.c91ce6p-5f, 0x1.277854p-7f,
                                         0x1.e97502p-10f};
inline constexpr float kExp2Floor6[6] = {0x1.62e42cp-1f, 0x1.ebfd58p-3f,  0x1.c68912p-5f,
                                         0x1.3d0b92p-7f, 0x1.46d64cp-10f, 0x1.c5417ap-13f};
inline constexpr float kExp2Round3[3] = {0x1.62f5fap-1f, 0x1.f00c4ep-3f, 0x1.c2a218p-5f};
inline constexpr float kExp2Round5[5] = {0x1.62e42ap-1f, 0x1.ebf9bcp-3f, 0x1.c6b752p-5f, 0x1.3cea88p-7f,
                                         0x1.5bba14p-10f};
inline constexpr float kExp2Round6[6] = {0x1.62e430p-1f, 0x1.ebfbdcp-3f,  0x1.c6aee8p-5f,
                                         0x1.3b2d4cp-7f, 0x1.5f3e54p-10f, 0x1.41fbbcp-13f};

template <class V>
OPST_INLINE V exp2(V x) {
  const V f = exp2_fraction(x);
  if constexpr (sizeof(typename V::Scalar) == 8)
    return exp2_scale(polynomial_from_one(f, kExp2TaylorF64), x);
  else
    return exp2_scale(polynomial_from_one(f, kExp2Floor ? kExp2Floor6 : kExp2Round6), x);
}

template <class V>
OPST_INLINE V exp2_short(V x) {
  if constexpr (sizeof(typename V::Scalar) == 8)
    return exp2(x);
  else
    return exp2_scale(polynomial_from_one(exp2_fraction(x), kExp2Floor ? kExp2Floor5 : kExp2Round5), x);
}

template <class V>
OPST_INLINE V exp2_bf16(V x) {
  return exp2_scale(polynomial_from_one(exp2_fraction(x), kExp2Floor ? kExp2Floor3 : kExp2Round3), x);
}

// n = round(x log2 e), r = x - n ln 2 by two subtractions (the first exact), e^r by its Taylor series, times 2^n.
template <class V>
OPST_INLINE V exp(V x) {
  using S = typename V::Scalar;
  constexpr bool kF64 = sizeof(S) == 8;
  constexpr S kLog2e = static_cast<S>(0x1.71547652b82fep0);
  // ln 2 split so that n * high is exact for every n in range.
  constexpr S kLn2High = kF64 ? static_cast<S>(0x1.62e42fefa0000p-1) : static_cast<S>(0x1.62e4p-1);
  constexpr S kLn2Low = kF64 ? static_cast<S>(0x1.cf79abc9e3b3ap-40) : static_cast<S>(0x1.7f7d1cf79abcap-20);
  constexpr S kLowest =
      kF64 ? static_cast<S>(-0x1.6232bdd7abcd2p+9) : static_cast<S>(-0x1.5d589ep+6);  // the lowest with a normal result
  constexpr S kHighest = kF64 ? static_cast<S>(709.782712893384) : static_cast<S>(88.72283905);  // ln of the largest
  const V clamped = min(V::set1(kHighest), max(V::set1(kLowest), x));                            // NaN stays
  const V n = round(clamped * V::set1(kLog2e));
  const V r = fma(n, V::set1(-kLn2Low), fma(n, V::set1(-kLn2High), clamped));
  V p;
  if constexpr (kF64) {
    constexpr double kTaylor[13] = {
        1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,       1.0 / 5040,
        1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
    p = polynomial_from_one(r, kTaylor);
  } else {
    constexpr float kTaylor[7] = {1.0f, 1.0f / 2, 1.0f / 6, 1.0f / 24, 1.0f / 120, 1.0f / 720, 1.0f / 5040};
    p = polynomial_from_one(r, kTaylor);
  }
  V y = scale_pow2(p, n);
  y = select(x < V::set1(kLowest), V::zero(), y);
  return select(V::set1(kHighest) < x, V::set1(__builtin_inff()), y);
}

// Below 0.55 an odd series; above, 1 - 2 / (e^(2|x|) + 1), where the subtraction loses nothing.
template <class V>
OPST_INLINE V tanh(V x) {
  using S = typename V::Scalar;
  const V magnitude = abs(x);
  const V far = V::set1(1) - V::set1(2) / (exp(magnitude + magnitude) + V::set1(1));
  V near;
  if constexpr (sizeof(S) == 8) {
    // (e^2m - 1) / (e^2m + 1) with e^2m - 1 from its own series: m <= 0.55 needs 2m <= 1.1, halved three times.
    constexpr double kHalves = 1.0 / 8;
    const V t = (magnitude + magnitude) * V::set1(kHalves);
    constexpr double c[12] = {1.0 / 2,       1.0 / 6,        1.0 / 24,        1.0 / 120,
                              1.0 / 720,     1.0 / 5040,     1.0 / 40320,     1.0 / 362880,
                              1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
    V e = fma(polynomial(t, c) * t, t, t);                 // e^t - 1
    for (int i = 0; i < 3; ++i) e = e * (e + V::set1(2));  // e^2t - 1 = (e^t - 1)(e^t + 1)
    near = e / (e + V::set1(2));
  } else {
    const V s = magnitude * magnitude;
    // tanh(m) / m - 1 in s, fitted on [0, 0.55].
    constexpr float c[6] = {-0x1.555554p-2f, 0x1.1110dap-3f,  -0x1.ba095ap-5f,
                            0x1.64e046p-6f,  -0x1.139e28p-7f, 0x1.399522p-9f};
    near = fma(polynomial(s, c) * s, magnitude, magnitude);
  }
  return copy_sign(select(magnitude < V::set1(static_cast<S>(0.55)), near, far), x);
}

// Below 0.92 an odd series; above, 1 - exp(h) with h = ln(1 - erf), a smooth function, whose errors count for less the
// closer the result is to 1. Beyond 4 the nearest float is 1. Both fitted for this library.
template <class V>
OPST_INLINE V erf(V x) {
  static_assert(sizeof(typename V::Scalar) == 4);
  const V magnitude = abs(x);
  const V s = magnitude * magnitude;
  constexpr float kNear[6] = {0x1.06eba6p-3f,  -0x1.8126e8p-2f, 0x1.ce1abap-4f,
                              -0x1.b68ff4p-6f, 0x1.475758p-8f,  -0x1.3a8aa4p-11f};
  const V near = fma(polynomial(s, kNear), magnitude, magnitude);
  constexpr float kFar[7] = {-0x1.5d0c4ep-13f, -0x1.20b752p0f,  -0x1.4621b8p-1f, -0x1.aa732cp-4f,
                             0x1.6d9cfp-6f,    -0x1.91cd1ap-9f, 0x1.9fb2eep-13f};
  const V t = min(V::set1(4), magnitude);  // NaN stays
  const V far = V::set1(1) - exp(polynomial(t, kFar));
  return copy_sign(select(magnitude < V::set1(0.92f), near, far), x);
}

// x P(x^2) / Q(x^2), fitted on [-9, 9], beyond which tanh is 1 to the last bit.
template <class V>
OPST_INLINE V tanh_short(V x) {
  if constexpr (sizeof(typename V::Scalar) == 8) {
    return tanh(x);
  } else {
    constexpr float p[4] = {0x1.120b16p-3f, 0x1.ca2c4ep-9f, 0x1.59c2fcp-16f, 0x1.cadbe2p-27f};
    constexpr float q[4] = {0x1.de5ad4p-2f, 0x1.a7f7dap-6f, 0x1.5885dep-12f, 0x1.a17f94p-21f};
    const V one = V::set1(1), m = max(V::set1(-9), min(V::set1(9), x));  // NaN stays
    const V s = m * m;
    return max(V::zero() - one, min(one, m * polynomial_from_one(s, p) / polynomial_from_one(s, q)));
  }
}

}  // namespace opst::OPST_ISA_NS::simd

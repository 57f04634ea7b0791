// Vec: one register of numbers, and the verbs that every instruction set level offers on it.
//
// A kernel is a template over such a type; src/simd/vec_<level>.h supplies it:
//
//   F32   float  lanes    generic 4, avx2 8, avx512 and above 16
//   F64   double lanes    generic 2 (only there: f64 has no speed bar)
//
//   construct    V::zero()  V::set1(x)  V::iota() = {0, 1, 2, ...}
//   memory       V::load(p)  V::load_n(p, n)  v.store(p)  v.store_n(p, n)        0 <= n <= kLanes, any alignment
//                F32: p may point to float, bf16 or f16 (widened exactly; stores round to nearest even and keep
//                subnormals and NaN). load_n gives 0 in the lanes from n on; neither load_n nor store_n touches a byte
//                beyond element n - 1.
//   arithmetic   a + b, a - b, a * b, a / b, fma(a, b, c) = a * b + c, max(a, b), min(a, b), sqrt(a), abs(a), round(a)
//                max and min return b where either is NaN. fma is one rounding except at the generic level.
//   choice       a < b, a <= b, a == b -> V::Mask (false on NaN);  select(mask, a, b);  any(mask)
//                blend_n(n, a, b) = a in lanes below n, b in the others
//                select_bits(bits, a, b): lane i of a where bit i is set, else of b
//                bits_of_bytes<V>(p, n): bit i set where p[i] != 0; n <= kLanes bytes are read, bits from n on are 0
//                keep_bf16(p, bits): 32 values of bf16 in place become 0 where their bit is not set (avx512_bf16 only)
//   bits         copy_sign(magnitude, sign)
//   exponent     scale_pow2(p, n) = p * 2^n; exp2_fraction(x), exp2_scale(p, x): the two halves of exp2, see math.h
//   across       hsum(v), hmax(v) in a fixed order
//                hsum_each(v[kLanes]), hmax_each(v[kLanes]): lane i = hsum (hmax) of v[i], with its bits
//                transpose(v[kLanes]) in place
//                load_transposed(rows, offset, v): v[c] lane i = rows[i][offset + c], rows of V::Scalar
//
// Bf16Words: a vector of pairs of bf16, load(p), load_n(p, n); low() and high() widen the lower and the upper values.
// Levels with the pairwise dot instruction multiply them as they are (dot_pairs).
//
// All of it lives in namespace opst::OPST_ISA_NS (see cmake/OpstBuild.cmake): the linker can never exchange the code of
// two levels. Nothing here, and nothing that kernel code includes, uses a function of the standard library.
#pragma once

#ifndef OPST_ISA_NS
#error "kernel code is compiled once per instruction set level, through opst_kernels()"
#endif

#include <cstddef>
#include <cstdint>

#include "opst/dtype.h"

#define OPST_INLINE inline __attribute__((always_inline))
#define OPST_INLINE_LAMBDA __attribute__((always_inline))
#define OPST_NOINLINE __attribute__((noinline))
// Register arrays are walked by loops with constant bounds; they must be unrolled, or the array goes to the stack.
#define OPST_UNROLL _Pragma("GCC unroll 32")

#if defined(__AVX512F__)
#include "simd/vec_avx512.h"
#elif defined(__AVX2__)
#include "simd/vec_avx2.h"
#else
#include "simd/vec_generic.h"
#endif

namespace opst::OPST_ISA_NS::simd {

// How many of a vector's lanes lie before `n`.
template <class V>
OPST_INLINE int64_t clamp_lanes(int64_t n) {
  return n < 0 ? 0 : n > V::kLanes ? V::kLanes : n;
}

// Fetches the line at p into L2, for streams that are read once. On a Zen 4, loads and fetches into L1 wait in the same
// few places for lines from memory: rows of 1152 bytes, of four read at a time and fetched 8 rows ahead, arrive at 14 GB/s
// fetched into L1, at 30 GB/s into L2 (rows of 2304 bytes in any order: 12 and 17 GB/s).
OPST_INLINE void fetch_into_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// Words of two bf16 values, at any even address: they travel as floats.
struct Bf16Words {
  typedef uint32_t Register __attribute__((vector_size(4 * F32::kLanes)));
  Register v;

  static OPST_INLINE Bf16Words of(F32 bits) { return {(Register)bits.v}; }
  static OPST_INLINE F32 bits(Register v) { return {(decltype(F32::v))v}; }
  static OPST_INLINE Bf16Words load(const uint32_t* p) { return of(F32::load(reinterpret_cast<const float*>(p))); }
  static OPST_INLINE Bf16Words load_n(const uint32_t* p, int64_t n) {
    return of(F32::load_n(reinterpret_cast<const float*>(p), n));
  }
  static OPST_INLINE Bf16Words set1(uint32_t word) { return {Register{} + word}; }
  // The words as they are, to the memory of floats.
  OPST_INLINE void store_bits(float* p) const { bits(v).store(p); }
  // The lower and the upper value of each word, widened.
  OPST_INLINE F32 low() const { return bits(v << 16); }
  OPST_INLINE F32 high() const { return bits(v & 0xffff0000u); }
};
#if defined(__AVX512BF16__)
// acc + a.low * b.low + a.high * b.high per lane (subnormals count as zero).
OPST_INLINE F32 dot_pairs(F32 acc, Bf16Words a, Bf16Words b) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)};
}
#endif

}  // namespace opst::OPST_ISA_NS::simd

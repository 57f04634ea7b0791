// Bytes, four to a lane: products of unsigned with signed bytes, and the verbs that prepare them. Exact at every level.
//
//   dot<kMost>(acc, u, s)    acc + the sum over the four bytes of each lane of u * s; 0 <= u <= kMost, s signed
//   DotSum<kMost>            a sum of such products
//   to_i32(x)                x integral
//   store_i8(v, p)           kLanes floats, integers in -128..127, as bytes
//   even_odd(p)              16 bytes in place: each eight in the order 0 2 4 6 1 3 5 7
//
// The dot instruction (avx512_vnni) does not saturate. Without it, products of bytes are formed in pairs of 16 bits
// where u <= 127 (2 * 127 * 128 < 2^15); else both sides are widened first.
#pragma once

#include "simd/small_ints.h"

namespace opst::OPST_ISA_NS::simd {

typedef int16_t Pairs __attribute__((vector_size(kIntsBytes)));
typedef uint16_t PairBits __attribute__((vector_size(kIntsBytes)));

// Of bytes: u * s, added up in pairs. Of pairs: a * b, added up in lanes (generic: products of 16 bits).
#if defined(__AVX512F__)
OPST_INLINE Pairs multiply_bytes(Words u, Words s) { return (Pairs)_mm512_maddubs_epi16((__m512i)u.v, (__m512i)s.v); }
OPST_INLINE I32 multiply_pairs(Pairs a, Pairs b) { return {(I32::Register)_mm512_madd_epi16((__m512i)a, (__m512i)b)}; }
OPST_INLINE I32 to_i32(F32 a) { return {(I32::Register)_mm512_cvtps_epi32(a.v)}; }
OPST_INLINE void store_i8(F32 v, int8_t* p) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v.v)));
}
#elif defined(__AVX2__)
OPST_INLINE Pairs multiply_bytes(Words u, Words s) { return (Pairs)_mm256_maddubs_epi16((__m256i)u.v, (__m256i)s.v); }
OPST_INLINE I32 multiply_pairs(Pairs a, Pairs b) { return {(I32::Register)_mm256_madd_epi16((__m256i)a, (__m256i)b)}; }
OPST_INLINE I32 to_i32(F32 a) { return {(I32::Register)_mm256_cvtps_epi32(a.v)}; }
OPST_INLINE void store_i8(F32 v, int8_t* p) {
  const __m256i words = _mm256_cvtps_epi32(v.v);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
}
#else
OPST_INLINE I32 multiply_pairs(Pairs a, Pairs b) {
  const I32 products = {(I32::Register)(a * b)};
  return {((products << 16).v >> 16) + (products.v >> 16)};
}
OPST_INLINE I32 to_i32(F32 a) { return {__builtin_convertvector(a.v, I32::Register)}; }
OPST_INLINE void store_i8(F32 v, int8_t* p) {
  for (int i = 0; i < F32::kLanes; ++i) p[i] = static_cast<int8_t>(v.v[i]);
}
#endif

template <int kMost>
OPST_INLINE I32 dot(I32 acc, Words u, Words s) {
#if defined(__AVX512VNNI__)
  return {(I32::Register)_mm512_dpbusd_epi32((__m512i)acc.v, (__m512i)u.v, (__m512i)s.v)};
#else
#if defined(__AVX2__)
  if constexpr (kMost <= 127) return acc + multiply_pairs(multiply_bytes(u, s), Pairs{} + 1);
#endif
  const PairBits a = (PairBits)u.v, b = (PairBits)s.v;
  return acc + multiply_pairs((Pairs)(a & 255), (Pairs)(b << 8) >> 8) + multiply_pairs((Pairs)(a >> 8), (Pairs)b >> 8);
#endif
}

OPST_INLINE void even_odd(int8_t* p) {
#if defined(__AVX2__)
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  __m128i* const at = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(at, _mm_shuffle_epi8(_mm_loadu_si128(at), order));
#else
  int8_t in[16];
  __builtin_memcpy(in, p, sizeof(in));
  for (int i = 0; i < 16; ++i) p[i] = in[i / 8 * 8 + i % 4 * 2 + i % 8 / 4];
#endif
}

// A sum of dot<kMost> products: begin(first value), add(u, s, n) for n = 0, 1, 2 .. (constants after unrolling), then
// total<count>() after `count` products. Without the dot instruction, pairs are added up in 16 bits while they fit.
template <int kMost>
struct DotSum {
  I32 sum;
  OPST_INLINE void begin(I32 first) { sum = first; }
#if defined(__AVX512VNNI__) || !defined(__AVX2__)
  OPST_INLINE void add(Words u, Words s, int) { sum = dot<kMost>(sum, u, s); }
  template <int kCount>
  OPST_INLINE I32 total() const {
    return sum;
  }
#else
  static constexpr int kFit = 32767 / (2 * 128 * kMost);  // products; the sum of a pair is 2 * 128 * kMost at most
  Pairs pairs;
  static OPST_INLINE I32 widened(Pairs x) { return multiply_pairs(x, Pairs{} + 1); }
  OPST_INLINE void add(Words u, Words s, int n) {
    if constexpr (kFit < 2) {
      sum = dot<kMost>(sum, u, s);
    } else {
      pairs = n % kFit == 0 ? multiply_bytes(u, s) : pairs + multiply_bytes(u, s);
      if (n % kFit == kFit - 1) sum = sum + widened(pairs);
    }
  }
  template <int kCount>
  OPST_INLINE I32 total() const {
    if constexpr (kFit >= 2 && kCount % (kFit < 1 ? 1 : kFit) != 0) return sum + widened(pairs);
    return sum;
  }
#endif
};

}  // namespace opst::OPST_ISA_NS::simd

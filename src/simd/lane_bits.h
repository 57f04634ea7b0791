// Lanes chosen by the bits of a word: bit i stands for lane i (or element i). Masks in memory and random bits become
// such words.
//
//   select_bits(bits, a, b)     lane i of a where bit i is set, else of b
//   bits_of_bytes<V>(p, n)      bit i set where p[i] != 0; n <= V::kLanes bytes are read, bits from n on are 0
//   keep_bf16(p, bits)          32 values of bf16 in place: a value whose bit is not set becomes 0 (avx512_bf16 only)
#pragma once

#include "simd/vec.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace opst::OPST_ISA_NS::simd {

#if defined(__AVX512F__)

OPST_INLINE F32 select_bits(uint32_t bits, F32 a, F32 b) { return select(static_cast<__mmask16>(bits), a, b); }
template <class V>
OPST_INLINE uint32_t bits_of_bytes(const uint8_t* p, int64_t n) {
  const __m128i bytes = _mm_maskz_loadu_epi8(F32::first_lanes(n), p);
  return _mm_test_epi8_mask(bytes, bytes);
}
#if defined(__AVX512BF16__)
OPST_INLINE void keep_bf16(bf16* p, uint32_t bits) { _mm512_storeu_si512(p, _mm512_maskz_loadu_epi16(bits, p)); }
#endif

#elif defined(__AVX2__)

OPST_INLINE F32 select_bits(uint32_t bits, F32 a, F32 b) {
  const __m256i lane_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i chosen = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane_bit);
  return {_mm256_blendv_ps(b.v, a.v, _mm256_castsi256_ps(_mm256_cmpeq_epi32(chosen, lane_bit)))};
}
template <class V>
OPST_INLINE uint32_t bits_of_bytes(const uint8_t* p, int64_t n) {
  uint64_t bytes = 0;
  if (n == 8)
    __builtin_memcpy(&bytes, p, 8);
  else
    for (int64_t i = 0; i < n; ++i) bytes |= static_cast<uint64_t>(p[i]) << (8 * i);
  const __m128i x = _mm_cvtsi64_si128(static_cast<int64_t>(bytes));
  return ~static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(x, _mm_setzero_si128()))) & 0xffu;
}

#else

template <class T>
OPST_INLINE GenericVec<T> select_bits(uint32_t bits, GenericVec<T> a, GenericVec<T> b) {
  return each(b, [&](T y, int i) { return (bits >> i & 1u) != 0 ? a.v[i] : y; });
}
template <class V>
OPST_INLINE uint32_t bits_of_bytes(const uint8_t* p, int64_t n) {
  uint32_t bits = 0;
  for (int64_t i = 0; i < n; ++i) bits |= static_cast<uint32_t>(p[i] != 0) << i;
  return bits;
}

#endif

}  // namespace opst::OPST_ISA_NS::simd

// Philox4x32-10 on vectors, as bits that say which of its words are below a threshold.
//
// A counter and a key of 32-bit words give four random words through ten rounds of
//   c0, c1, c2, c3  <-  high(M1 c2) ^ c1 ^ k0,  low(M1 c2),  high(M0 c0) ^ c3 ^ k1,  low(M0 c0)
// with k0 += W0, k1 += W1 after each. On vectors a word stands in the lower half of a 64-bit lane: the 32 x 32 -> 64
// bit product reads that half only, so the upper one need not be cleared.
//
// Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
#pragma once

#include "simd/vec.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace opst::OPST_ISA_NS::simd {

struct PhiloxStream {
  uint32_t key[2];
  uint32_t counter[3];  // words 1 to 3; word 0 counts
};

inline constexpr uint32_t kPhiloxM0 = 0xD2511F53, kPhiloxM1 = 0xCD9E8D57;
inline constexpr uint32_t kPhiloxW0 = 0x9E3779B9, kPhiloxW1 = 0xBB67AE85;

// The four words of one counter.
OPST_INLINE void philox_words(const PhiloxStream& s, uint32_t c0, uint32_t (&words)[4]) {
  uint32_t c1 = s.counter[0], c2 = s.counter[1], c3 = s.counter[2], k0 = s.key[0], k1 = s.key[1];
  for (int round = 0; round < 10; ++round, k0 += kPhiloxW0, k1 += kPhiloxW1) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxM0) * c0, p1 = static_cast<uint64_t>(kPhiloxM1) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// Bit b of bits[g] is set where word b % 4 of counter c0 + 8 g + b / 4 is at most `last_kept`, for g < groups.
OPST_INLINE void philox_bits(const PhiloxStream& s, uint32_t c0, int64_t groups, uint32_t last_kept, uint32_t* bits) {
#if defined(__AVX512F__)
  __m512i k0[10], k1[10];
  OPST_UNROLL for (int r = 0; r < 10; ++r) {
    const auto round = static_cast<uint32_t>(r);
    k0[r] = _mm512_set1_epi64(s.key[0] + round * kPhiloxW0);
    k1[r] = _mm512_set1_epi64(s.key[1] + round * kPhiloxW1);
  }
  const __m512i m0 = _mm512_set1_epi64(kPhiloxM0), m1 = _mm512_set1_epi64(kPhiloxM1);
  const __m512i most = _mm512_set1_epi32(static_cast<int>(last_kept));
  const __m512i lane = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  for (int64_t g = 0; g < groups; ++g) {
    __m512i x0 = _mm512_add_epi64(_mm512_set1_epi64(c0 + static_cast<uint32_t>(8 * g)), lane);
    __m512i x1 = _mm512_set1_epi64(s.counter[0]), x2 = _mm512_set1_epi64(s.counter[1]);
    __m512i x3 = _mm512_set1_epi64(s.counter[2]);
    OPST_UNROLL for (int r = 0; r < 10; ++r) {
      const __m512i p0 = _mm512_mul_epu32(x0, m0), p1 = _mm512_mul_epu32(x2, m1);
      x0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), x1, k0[r], 0x96);  // exclusive or of three
      x2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), x3, k1[r], 0x96);
      x1 = p1;
      x3 = p0;
    }
    // Words 0 and 1 (2 and 3) of a counter next to each other, the second one moved into the upper half.
    const __m512i w01 = _mm512_mask_shuffle_epi32(x0, 0xaaaa, x1, _MM_PERM_CCAA);
    const __m512i w23 = _mm512_mask_shuffle_epi32(x2, 0xaaaa, x3, _MM_PERM_CCAA);
    bits[g] = _pdep_u32(_mm512_cmple_epu32_mask(w01, most), 0x33333333u) |
              _pdep_u32(_mm512_cmple_epu32_mask(w23, most), 0xccccccccu);
  }
#elif defined(__AVX2__)
  const __m256i m0 = _mm256_set1_epi64x(kPhiloxM0), m1 = _mm256_set1_epi64x(kPhiloxM1);
  const __m256i most = _mm256_set1_epi32(static_cast<int>(last_kept));
  const __m256i lane = _mm256_setr_epi64x(0, 1, 2, 3);
  const auto kept = [&](__m256i even, __m256i odd) OPST_INLINE_LAMBDA {
    const __m256i words = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    const __m256i below = _mm256_cmpeq_epi32(_mm256_min_epu32(words, most), words);
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(below)));
  };
  for (int64_t half = 0; half < 2 * groups; ++half) {
    __m256i x0 = _mm256_add_epi64(_mm256_set1_epi64x(c0 + static_cast<uint32_t>(4 * half)), lane);
    __m256i x1 = _mm256_set1_epi64x(s.counter[0]), x2 = _mm256_set1_epi64x(s.counter[1]);
    __m256i x3 = _mm256_set1_epi64x(s.counter[2]);
    uint32_t k0 = s.key[0], k1 = s.key[1];
    for (int round = 0; round < 10; ++round, k0 += kPhiloxW0, k1 += kPhiloxW1) {
      const __m256i p0 = _mm256_mul_epu32(x0, m0), p1 = _mm256_mul_epu32(x2, m1);
      x0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), x1), _mm256_set1_epi64x(k0));
      x2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), x3), _mm256_set1_epi64x(k1));
      x1 = p1;
      x3 = p0;
    }
    const uint32_t sixteen = _pdep_u32(kept(x0, x1), 0x3333u) | _pdep_u32(kept(x2, x3), 0xccccu);
    bits[half / 2] = half % 2 == 0 ? sixteen : bits[half / 2] | sixteen << 16;
  }
#else
  for (int64_t g = 0; g < groups; ++g) {
    bits[g] = 0;
    for (uint32_t counter = 0; counter < 8; ++counter) {
      uint32_t words[4];
      philox_words(s, c0 + static_cast<uint32_t>(8 * g) + counter, words);
      for (uint32_t w = 0; w < 4; ++w) bits[g] |= static_cast<uint32_t>(words[w] <= last_kept) << (4 * counter + w);
    }
  }
#endif
}

}  // namespace opst::OPST_ISA_NS::simd

// Small packed integers to float lanes: what decoding quantised weights needs besides vec.h.
//
//   Words::load(p)           kLanes 32-bit words
//   nibble(words, i)         lane: the i-th 4-bit field of its word (0 the lowest), 0..15, as float; i is a constant
//                            after unrolling
//   load_i8(p)               lane: p[lane] as float
#pragma once

#include "simd/vec.h"

namespace opst::OPST_ISA_NS::simd {

#if defined(__AVX512F__)

struct Words {
  __m512i v;
  static OPST_INLINE Words load(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
};
// The table look-up uses the low four bits of an index only, so nothing needs masking.
OPST_INLINE F32 nibble(Words words, int field) {
  return {_mm512_permutexvar_ps(_mm512_srli_epi32(words.v, static_cast<unsigned>(4 * field)), F32::iota().v)};
}
OPST_INLINE F32 load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

#elif defined(__AVX2__)

struct Words {
  __m256i v;
  static OPST_INLINE Words load(const uint32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
};
OPST_INLINE F32 nibble(Words words, int field) {
  return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(words.v, 4 * field), _mm256_set1_epi32(15)))};
}
OPST_INLINE F32 load_i8(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}

#else

struct Words {
  uint32_t lane[F32::kLanes];
  static OPST_INLINE Words load(const uint32_t* p) {
    Words out;
    __builtin_memcpy(out.lane, p, sizeof(out.lane));
    return out;
  }
};
OPST_INLINE F32 nibble(Words words, int field) {
  F32::Lanes out;
  for (int i = 0; i < F32::kLanes; ++i) out.x[i] = static_cast<float>(words.lane[i] >> (4 * field) & 15u);
  return F32::of(out);
}
OPST_INLINE F32 load_i8(const int8_t* p) {
  F32::Lanes out;
  for (int i = 0; i < F32::kLanes; ++i) out.x[i] = static_cast<float>(p[i]);
  return F32::of(out);
}

#endif

}  // namespace opst::OPST_ISA_NS::simd

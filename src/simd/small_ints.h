// Small packed integers to float lanes: the verbs that decoding quantised weights needs besides vec.h.
//
//   Words::load(p)              kLanes 32-bit words; p may point to uint16_t (widened)
//   words >> n                  any n in 0..31
//
// Each lane of the results is a float; M is subtracted from it; i is a constant after unrolling:
//   nibble<M>(words, i)         field i of four bits of the lane's word (0 the lowest): 0..15
//   field5<M>(words, high, i)   0..31: the low four bits are field i of words, the fifth is the lowest bit of the 4-bit
//                               field i of high
//   field6<M>(words, high, i)   0..63: likewise, the upper two bits are the lowest two of the 4-bit field i of high
//   signed_byte(words, i)       byte i of the lane's word, signed (no M)
//   load_i8(p)                  p[lane] (no M)
#pragma once

#include "simd/vec.h"

namespace opst::OPST_ISA_NS::simd {

#if defined(__AVX512F__)

struct Words {
  __m512i v;
  static OPST_INLINE Words load(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
  static OPST_INLINE Words load(const uint16_t* p) {
    return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
};
OPST_INLINE Words operator>>(Words words, int n) { return {_mm512_srl_epi32(words.v, _mm_cvtsi32_si128(n))}; }
// Shifts by a constant of either sign, positive to the right.
OPST_INLINE __m512i shifted(__m512i v, int n) {
  return n >= 0 ? _mm512_srli_epi32(v, static_cast<unsigned>(n)) : _mm512_slli_epi32(v, static_cast<unsigned>(-n));
}
// Bits 0..3: a field of words; above them: bits of high, whose bit `from` goes to bit 4.
OPST_INLINE __m512i joined(Words words, Words high, int field, int from) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi32(15), shifted(words.v, 4 * field), shifted(high.v, from - 4), 0xca);
}
// 0..15, minus M: a table of floats.
template <int M>
OPST_INLINE __m512 counting() {
  return (F32::iota() - F32::set1(static_cast<float>(M))).v;
}
// The table look-up uses the low four bits of an index only, so nothing needs masking; of two tables, the low five.
template <int M = 0>
OPST_INLINE F32 nibble(Words words, int field) {
  return {_mm512_permutexvar_ps(shifted(words.v, 4 * field), counting<M>())};
}
template <int M = 0>
OPST_INLINE F32 field5(Words words, Words high, int field) {
  return {_mm512_permutex2var_ps(counting<M>(), joined(words, high, field, 4 * field), counting<M - 16>())};
}
// With the exponent of 2^23 above it, a small integer is a float that exceeds 2^23 by just that integer.
template <int M = 0>
OPST_INLINE F32 field6(Words words, Words high, int field) {
  const __m512i bits = _mm512_ternarylogic_epi32(joined(words, high, field, 4 * field), _mm512_set1_epi32(63),
                                                 _mm512_set1_epi32(0x4b000000), 0xea);
  return F32{_mm512_castsi512_ps(bits)} - F32::set1(static_cast<float>((1 << 23) + M));
}
OPST_INLINE F32 signed_byte(Words words, int i) {
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(shifted(words.v, 8 * i - 24), 24))};
}
OPST_INLINE F32 load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

#elif defined(__AVX2__)

struct Words {
  __m256i v;
  static OPST_INLINE Words load(const uint32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
  static OPST_INLINE Words load(const uint16_t* p) {
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
};
OPST_INLINE Words operator>>(Words words, int n) { return {_mm256_srl_epi32(words.v, _mm_cvtsi32_si128(n))}; }
// Shifts by a constant of either sign, positive to the right.
OPST_INLINE __m256i shifted(__m256i v, int n) { return n >= 0 ? _mm256_srli_epi32(v, n) : _mm256_slli_epi32(v, -n); }
// Bits 0..3: a field of words; above them: the bits in `mask` of high, whose bit `from` goes to bit 4. Minus M.
template <int M>
OPST_INLINE F32 joined(Words words, Words high, int field, int from, int mask) {
  const __m256i low_bits = _mm256_and_si256(shifted(words.v, 4 * field), _mm256_set1_epi32(15));
  const __m256i high_bits = _mm256_and_si256(shifted(high.v, from - 4), _mm256_set1_epi32(mask));
  return {_mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_or_si256(low_bits, high_bits), _mm256_set1_epi32(M)))};
}
template <int M = 0>
OPST_INLINE F32 nibble(Words words, int field) {
  const __m256i bits = _mm256_and_si256(shifted(words.v, 4 * field), _mm256_set1_epi32(15));
  return {_mm256_cvtepi32_ps(_mm256_sub_epi32(bits, _mm256_set1_epi32(M)))};
}
template <int M = 0>
OPST_INLINE F32 field5(Words words, Words high, int field) {
  return joined<M>(words, high, field, 4 * field, 16);
}
template <int M = 0>
OPST_INLINE F32 field6(Words words, Words high, int field) {
  return joined<M>(words, high, field, 4 * field, 48);
}
OPST_INLINE F32 signed_byte(Words words, int i) {
  return {_mm256_cvtepi32_ps(_mm256_srai_epi32(shifted(words.v, 8 * i - 24), 24))};
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
  static OPST_INLINE Words load(const uint16_t* p) {
    Words out;
    for (int i = 0; i < F32::kLanes; ++i) out.lane[i] = p[i];
    return out;
  }
};
OPST_INLINE Words operator>>(Words words, int n) {
  for (uint32_t& lane : words.lane) lane >>= n;
  return words;
}
// Bits 0..3: a field of words; above them: the bits in `mask` of high >> from. Minus M.
template <int M>
OPST_INLINE F32 joined(Words words, Words high, int field, int from, uint32_t mask) {
  F32::Lanes out;
  for (int i = 0; i < F32::kLanes; ++i) {
    const uint32_t bits = (words.lane[i] >> (4 * field) & 15u) | (high.lane[i] >> from & mask) << 4;
    out.x[i] = static_cast<float>(static_cast<int>(bits) - M);
  }
  return F32::of(out);
}
template <int M = 0>
OPST_INLINE F32 nibble(Words words, int field) {
  return joined<M>(words, words, field, 0, 0);
}
template <int M = 0>
OPST_INLINE F32 field5(Words words, Words high, int field) {
  return joined<M>(words, high, field, 4 * field, 1);
}
template <int M = 0>
OPST_INLINE F32 field6(Words words, Words high, int field) {
  return joined<M>(words, high, field, 4 * field, 3);
}
OPST_INLINE F32 signed_byte(Words words, int i) {
  F32::Lanes out;
  for (int l = 0; l < F32::kLanes; ++l) {
    out.x[l] = static_cast<float>(static_cast<int8_t>(words.lane[l] >> (8 * i) & 255u));
  }
  return F32::of(out);
}
OPST_INLINE F32 load_i8(const int8_t* p) {
  F32::Lanes out;
  for (int i = 0; i < F32::kLanes; ++i) out.x[i] = static_cast<float>(p[i]);
  return F32::of(out);
}

#endif

}  // namespace opst::OPST_ISA_NS::simd

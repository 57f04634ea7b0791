// Vectors of 32-bit integers: packed small integers to float lanes, the verbs that decoding quantised weights needs
// besides vec.h, and the sums of their products (dot_i8.h).
//
//   Words                       kLanes 32-bit words: load(p), p may point to uint16_t (widened); store(words, p)
//                               words_of(x): the same 32 bits in every lane
//                               a & b, a | b, a ^ b, a << n, a >> n (any n in 0..31)
//   I32                         kLanes sums: zero(), set1(x), load(p), store(p)
//                               a + b, a - b, a * b, a << n: wrap around
//                               to_f32(a); as_ints(words): the same bits
//                               load_ints(p): kLanes of int8_t
//                               low_byte(a): the lowest eight bits, signed; high_bytes(a): a / 256, rounded down
//
// Each lane of the results is a float; M is subtracted from it; i is a constant after unrolling:
//   nibble<M>(words, i)         field i of four bits of the lane's word (0 the lowest): 0..15
//   field5<M>(words, high, i)   0..31: the low four bits are field i of words, the fifth is the lowest bit of the 4-bit
//                               field i of high
//   field6<M>(words, high, i)   0..63: likewise, the upper two bits are the lowest two of the 4-bit field i of high
//   signed_byte(words, i)       byte i of the lane's word, signed (no M)
//   load_i8(p)                  p[lane] (no M)
//   load_i4(p)                  number `lane` of kLanes / 2 bytes of two signed numbers each, the lower half first (no M)
#pragma once

#include "simd/vec.h"

namespace opst::OPST_ISA_NS::simd {

// The compiler's own vector types: g++-12 copies and spills __m512i accumulators of the dot product.
inline constexpr int kIntsBytes = 4 * F32::kLanes;

struct Words {
  typedef uint32_t Register __attribute__((vector_size(kIntsBytes)));
  typedef uint32_t Unaligned __attribute__((vector_size(kIntsBytes), aligned(1), may_alias));
  Register v;
  static OPST_INLINE Words load(const uint32_t* p) { return {*reinterpret_cast<const Unaligned*>(p)}; }
  static OPST_INLINE Words load(const uint16_t* p);
};
OPST_INLINE void store(Words words, uint32_t* p) { *reinterpret_cast<Words::Unaligned*>(p) = words.v; }
OPST_INLINE Words words_of(uint32_t x) { return {Words::Register{} + x}; }
OPST_INLINE Words operator&(Words a, Words b) { return {a.v & b.v}; }
OPST_INLINE Words operator|(Words a, Words b) { return {a.v | b.v}; }
OPST_INLINE Words operator^(Words a, Words b) { return {a.v ^ b.v}; }
OPST_INLINE Words operator<<(Words a, int n) { return {a.v << n}; }
OPST_INLINE Words operator>>(Words a, int n) { return {a.v >> n}; }
// Shifts by a constant of either sign, positive to the right.
OPST_INLINE Words shifted(Words a, int n) { return n >= 0 ? a >> n : a << -n; }

struct I32 {
  typedef int32_t Register __attribute__((vector_size(kIntsBytes)));
  typedef int32_t Unaligned __attribute__((vector_size(kIntsBytes), aligned(1), may_alias));
  using Wrapping = Words::Register;
  Register v;
  static OPST_INLINE I32 zero() { return {Register{}}; }
  static OPST_INLINE I32 set1(int32_t x) { return {Register{} + x}; }
  static OPST_INLINE I32 load(const int32_t* p) { return {*reinterpret_cast<const Unaligned*>(p)}; }
  OPST_INLINE void store(int32_t* p) const { *reinterpret_cast<Unaligned*>(p) = v; }
};
OPST_INLINE I32 as_ints(Words words) { return {(I32::Register)words.v}; }
OPST_INLINE I32 operator+(I32 a, I32 b) { return {(I32::Register)((I32::Wrapping)a.v + (I32::Wrapping)b.v)}; }
OPST_INLINE I32 operator-(I32 a, I32 b) { return {(I32::Register)((I32::Wrapping)a.v - (I32::Wrapping)b.v)}; }
OPST_INLINE I32 operator*(I32 a, I32 b) { return {(I32::Register)((I32::Wrapping)a.v * (I32::Wrapping)b.v)}; }
OPST_INLINE I32 operator<<(I32 a, int n) { return {(I32::Register)((I32::Wrapping)a.v << n)}; }
OPST_INLINE I32 low_byte(I32 a) { return {(a << 24).v >> 24}; }
OPST_INLINE I32 high_bytes(I32 a) { return {a.v >> 8}; }

#if defined(__AVX512F__)
OPST_INLINE Words Words::load(const uint16_t* p) {
  return {(Register)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
OPST_INLINE F32 to_f32(I32 a) { return {_mm512_cvtepi32_ps((__m512i)a.v)}; }
OPST_INLINE I32 load_ints(const int8_t* p) {
  return {(I32::Register)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
#elif defined(__AVX2__)
OPST_INLINE Words Words::load(const uint16_t* p) {
  return {(Register)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
OPST_INLINE F32 to_f32(I32 a) { return {_mm256_cvtepi32_ps((__m256i)a.v)}; }
OPST_INLINE I32 load_ints(const int8_t* p) {
  return {(I32::Register)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
}
#else
OPST_INLINE Words Words::load(const uint16_t* p) { return {Register{p[0], p[1], p[2], p[3]}}; }
OPST_INLINE F32 to_f32(I32 a) { return {__builtin_convertvector(a.v, F32::Raw)}; }
OPST_INLINE I32 load_ints(const int8_t* p) { return {I32::Register{p[0], p[1], p[2], p[3]}}; }
#endif
OPST_INLINE F32 load_i8(const int8_t* p) { return to_f32(load_ints(p)); }

#if defined(__AVX512F__)
// Each lane gets its byte and moves the number down; the low four bits choose a float.
OPST_INLINE F32 load_i4(const uint8_t* p) {
  int64_t bytes;
  __builtin_memcpy(&bytes, p, 8);
  const __m512i own = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  const __m512i words = _mm512_shuffle_epi8(_mm512_set1_epi64(bytes), own);
  const __m512i numbers = _mm512_srlv_epi32(words, _mm512_set1_epi64(int64_t{4} << 32));
  const __m512 floats = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  return {_mm512_permutexvar_ps(numbers, floats)};
}
#else
// Four bytes hold the numbers of eight lanes (at the generic level, two of four): each lane moves its own to the top of
// its word, whence it comes down with its sign.
OPST_INLINE F32 load_i4(const uint8_t* p) {
  constexpr Words::Register kLift =
#if defined(__AVX2__)
      {28, 24, 20, 16, 12, 8, 4, 0};
  uint32_t bits;
  __builtin_memcpy(&bits, p, 4);
  const Words words = words_of(bits);
#else
      {28, 24, 20, 16};
  uint16_t bits;
  __builtin_memcpy(&bits, p, 2);
  const Words words = words_of(bits);
#endif
  return to_f32({as_ints(Words{words.v << kLift}).v >> 28});
}
#endif

#if defined(__AVX512F__)
// Bits 0..3: a field of words; above them: bits of high, of whose field the lowest goes to bit 4.
OPST_INLINE __m512i joined(Words words, Words high, int field) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi32(15), (__m512i)shifted(words, 4 * field).v,
                                   (__m512i)shifted(high, 4 * field - 4).v, 0xca);
}
// 0..15, minus M: a table of floats.
template <int M>
OPST_INLINE __m512 counting() {
  return (F32::iota() - F32::set1(static_cast<float>(M))).v;
}
// The table look-up uses the low four bits of an index only, so nothing needs masking; of two tables, the low five.
template <int M = 0>
OPST_INLINE F32 nibble(Words words, int field) {
  return {_mm512_permutexvar_ps((__m512i)shifted(words, 4 * field).v, counting<M>())};
}
template <int M = 0>
OPST_INLINE F32 field5(Words words, Words high, int field) {
  return {_mm512_permutex2var_ps(counting<M>(), joined(words, high, field), counting<M - 16>())};
}
// With the exponent of 2^23 above it, a small integer is a float that exceeds 2^23 by just that integer.
template <int M = 0>
OPST_INLINE F32 field6(Words words, Words high, int field) {
  const __m512i bits =
      _mm512_ternarylogic_epi32(joined(words, high, field), _mm512_set1_epi32(63), _mm512_set1_epi32(0x4b000000), 0xea);
  return F32{_mm512_castsi512_ps(bits)} - F32::set1(static_cast<float>((1 << 23) + M));
}
#else
// Bits 0..3: a field of words; above them: the bits in `mask` of high, the lowest of its field at bit 4. Minus M.
template <int M>
OPST_INLINE F32 joined(Words words, Words high, int field, uint32_t mask) {
  const Words bits = (shifted(words, 4 * field) & words_of(15)) | (shifted(high, 4 * field - 4) & words_of(mask));
  return to_f32(as_ints(bits) - I32::set1(M));
}
template <int M = 0>
OPST_INLINE F32 nibble(Words words, int field) {
  return joined<M>(words, words, field, 0);
}
template <int M = 0>
OPST_INLINE F32 field5(Words words, Words high, int field) {
  return joined<M>(words, high, field, 16);
}
template <int M = 0>
OPST_INLINE F32 field6(Words words, Words high, int field) {
  return joined<M>(words, high, field, 48);
}
#endif
OPST_INLINE F32 signed_byte(Words words, int i) { return to_f32({as_ints(shifted(words, 8 * i - 24)).v >> 24}); }

}  // namespace opst::OPST_ISA_NS::simd

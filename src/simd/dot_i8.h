// Bytes, four to a lane: products of unsigned with signed bytes, and the verbs that prepare them. Exact at every level.
//
//   Words (small_ints.h)     words_of(x): the same 32 bits in every lane
//                            a & b, a | b, a ^ b, a << n, shift_right<n>(a), store(words, p)
//   I32                      kLanes sums: zero(), set1(x), load(p), store(p)
//                            a + b, a - b, a * b, a << n: wrap around
//                            to_f32(a); to_i32(x): x integral; as_ints(words): the same bits
//                            low_byte(a): the lowest eight bits, signed; high_bytes(a): a / 256, rounded down
//   dot<kMost>(acc, u, s)    acc + the sum over the four bytes of each lane of u * s; 0 <= u <= kMost, s signed
//   DotSum<kMost>            a sum of such products
//   store_i8(v, p)           kLanes floats, integers in -128..127, as bytes
//   even_odd(p)              16 bytes in place: each eight in the order 0 2 4 6 1 3 5 7
//
// The dot instruction (avx512_vnni) does not saturate. Without it, products of bytes are formed in pairs of 16 bits
// where u <= 127 (2 * 127 * 128 < 2^15); else both sides are widened first.
#pragma once

#include "simd/small_ints.h"

namespace opst::OPST_ISA_NS::simd {

#if defined(__AVX512F__)

OPST_INLINE Words words_of(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
OPST_INLINE Words operator&(Words a, Words b) { return {_mm512_and_si512(a.v, b.v)}; }
OPST_INLINE Words operator|(Words a, Words b) { return {_mm512_or_si512(a.v, b.v)}; }
OPST_INLINE Words operator^(Words a, Words b) { return {_mm512_xor_si512(a.v, b.v)}; }
OPST_INLINE Words operator<<(Words a, int n) { return {_mm512_slli_epi32(a.v, static_cast<unsigned>(n))}; }
template <int kBits>
OPST_INLINE Words shift_right(Words a) {
  return {_mm512_srli_epi32(a.v, kBits)};
}
OPST_INLINE void store(Words words, uint32_t* p) { _mm512_storeu_si512(p, words.v); }

// The compiler's own vector type: g++-12 copies and spills __m512i accumulators of the dot product.
struct I32 {
  typedef int Register __attribute__((vector_size(64)));
  typedef unsigned Wrapping __attribute__((vector_size(64)));
  static constexpr int kLanes = 16;
  Register v;
  static OPST_INLINE I32 zero() { return {Register{}}; }
  static OPST_INLINE I32 set1(int32_t x) { return {(Register)_mm512_set1_epi32(x)}; }
  static OPST_INLINE I32 load(const int32_t* p) { return {(Register)_mm512_loadu_si512(p)}; }
  OPST_INLINE void store(int32_t* p) const { _mm512_storeu_si512(p, (__m512i)v); }
};
OPST_INLINE F32 to_f32(I32 a) { return {_mm512_cvtepi32_ps((__m512i)a.v)}; }
OPST_INLINE I32 to_i32(F32 a) { return {(I32::Register)_mm512_cvtps_epi32(a.v)}; }

template <int kMost>
OPST_INLINE I32 dot(I32 acc, Words u, Words s) {
#if defined(__AVX512VNNI__)
  return {(I32::Register)_mm512_dpbusd_epi32((__m512i)acc.v, u.v, s.v)};
#else
  if constexpr (kMost <= 127) {
    const __m512i pairs = _mm512_maddubs_epi16(u.v, s.v);
    const __m512i sums = _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
    return {(I32::Register)((I32::Wrapping)acc.v + (I32::Wrapping)sums)};
  } else {
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(u.v, _mm512_set1_epi16(255)),
                                           _mm512_srai_epi16(_mm512_slli_epi16(s.v, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(u.v, 8), _mm512_srai_epi16(s.v, 8));
    return {(I32::Register)((I32::Wrapping)acc.v + (I32::Wrapping)even + (I32::Wrapping)odd)};
  }
#endif
}

OPST_INLINE void store_i8(F32 v, int8_t* p) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v.v)));
}

#elif defined(__AVX2__)

OPST_INLINE Words words_of(uint32_t x) { return {_mm256_set1_epi32(static_cast<int>(x))}; }
OPST_INLINE Words operator&(Words a, Words b) { return {_mm256_and_si256(a.v, b.v)}; }
OPST_INLINE Words operator|(Words a, Words b) { return {_mm256_or_si256(a.v, b.v)}; }
OPST_INLINE Words operator^(Words a, Words b) { return {_mm256_xor_si256(a.v, b.v)}; }
OPST_INLINE Words operator<<(Words a, int n) { return {_mm256_slli_epi32(a.v, n)}; }
template <int kBits>
OPST_INLINE Words shift_right(Words a) {
  return {_mm256_srli_epi32(a.v, kBits)};
}
OPST_INLINE void store(Words words, uint32_t* p) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words.v); }

struct I32 {
  typedef int Register __attribute__((vector_size(32)));
  typedef unsigned Wrapping __attribute__((vector_size(32)));
  static constexpr int kLanes = 8;
  Register v;
  static OPST_INLINE I32 zero() { return {Register{}}; }
  static OPST_INLINE I32 set1(int32_t x) { return {(Register)_mm256_set1_epi32(x)}; }
  static OPST_INLINE I32 load(const int32_t* p) {
    return {(Register)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
  }
  OPST_INLINE void store(int32_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)v); }
};
OPST_INLINE F32 to_f32(I32 a) { return {_mm256_cvtepi32_ps((__m256i)a.v)}; }
OPST_INLINE I32 to_i32(F32 a) { return {(I32::Register)_mm256_cvtps_epi32(a.v)}; }

template <int kMost>
OPST_INLINE I32 dot(I32 acc, Words u, Words s) {
  if constexpr (kMost <= 127) {
    const __m256i pairs = _mm256_maddubs_epi16(u.v, s.v);
    const __m256i sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    return {(I32::Register)((I32::Wrapping)acc.v + (I32::Wrapping)sums)};
  } else {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u.v, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(s.v, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u.v, 8), _mm256_srai_epi16(s.v, 8));
    return {(I32::Register)((I32::Wrapping)acc.v + (I32::Wrapping)even + (I32::Wrapping)odd)};
  }
}

OPST_INLINE void store_i8(F32 v, int8_t* p) {
  const __m256i words = _mm256_cvtps_epi32(v.v);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
}

#else

OPST_INLINE Words words_of(uint32_t x) {
  Words out;
  for (uint32_t& lane : out.lane) lane = x;
  return out;
}
OPST_INLINE Words operator&(Words a, Words b) {
  for (int i = 0; i < F32::kLanes; ++i) a.lane[i] &= b.lane[i];
  return a;
}
OPST_INLINE Words operator|(Words a, Words b) {
  for (int i = 0; i < F32::kLanes; ++i) a.lane[i] |= b.lane[i];
  return a;
}
OPST_INLINE Words operator^(Words a, Words b) {
  for (int i = 0; i < F32::kLanes; ++i) a.lane[i] ^= b.lane[i];
  return a;
}
OPST_INLINE Words operator<<(Words a, int n) {
  for (uint32_t& lane : a.lane) lane <<= n;
  return a;
}
template <int kBits>
OPST_INLINE Words shift_right(Words a) {
  for (uint32_t& lane : a.lane) lane >>= kBits;
  return a;
}
OPST_INLINE void store(Words words, uint32_t* p) { __builtin_memcpy(p, words.lane, sizeof(words.lane)); }

struct I32 {
  typedef int Register __attribute__((vector_size(16)));
  typedef unsigned Wrapping __attribute__((vector_size(16)));
  static constexpr int kLanes = F32::kLanes;
  Register v;
  static OPST_INLINE I32 zero() { return {Register{}}; }
  static OPST_INLINE I32 set1(int32_t x) { return {Register{x, x, x, x}}; }
  static OPST_INLINE I32 load(const int32_t* p) {
    I32 out;
    __builtin_memcpy(&out.v, p, sizeof(out.v));
    return out;
  }
  OPST_INLINE void store(int32_t* p) const { __builtin_memcpy(p, &v, sizeof(v)); }
};
OPST_INLINE F32 to_f32(I32 a) { return {__builtin_convertvector(a.v, F32::Raw)}; }
OPST_INLINE I32 to_i32(F32 a) { return {__builtin_convertvector(a.v, I32::Register)}; }

template <int kMost>
OPST_INLINE I32 dot(I32 acc, Words u, Words s) {
  for (int i = 0; i < F32::kLanes; ++i) {
    uint32_t sum = static_cast<uint32_t>(acc.v[i]);
    for (int byte = 0; byte < 32; byte += 8) {
      const int32_t a = static_cast<int32_t>(u.lane[i] >> byte & 255u);
      sum += static_cast<uint32_t>(a * static_cast<int8_t>(s.lane[i] >> byte & 255u));
    }
    acc.v[i] = static_cast<int32_t>(sum);
  }
  return acc;
}

OPST_INLINE void store_i8(F32 v, int8_t* p) {
  for (int i = 0; i < F32::kLanes; ++i) p[i] = static_cast<int8_t>(v.v[i]);
}

#endif

OPST_INLINE I32 as_ints(Words words) {
  I32 out;
  __builtin_memcpy(&out.v, &words, sizeof(out.v));
  return out;
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

OPST_INLINE I32 operator+(I32 a, I32 b) { return {(I32::Register)((I32::Wrapping)a.v + (I32::Wrapping)b.v)}; }
OPST_INLINE I32 operator*(I32 a, I32 b) { return {(I32::Register)((I32::Wrapping)a.v * (I32::Wrapping)b.v)}; }
OPST_INLINE I32 operator-(I32 a, I32 b) { return {(I32::Register)((I32::Wrapping)a.v - (I32::Wrapping)b.v)}; }

OPST_INLINE I32 operator<<(I32 a, int n) { return {(I32::Register)((I32::Wrapping)a.v << n)}; }
OPST_INLINE I32 low_byte(I32 a) { return {(a << 24).v >> 24}; }
OPST_INLINE I32 high_bytes(I32 a) { return {a.v >> 8}; }

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
#if defined(__AVX512F__)
  typedef short Pairs __attribute__((vector_size(64)));
  static OPST_INLINE Pairs multiplied(Words u, Words s) { return (Pairs)_mm512_maddubs_epi16(u.v, s.v); }
  static OPST_INLINE I32 widened(Pairs x) {
    return {(I32::Register)_mm512_madd_epi16((__m512i)x, _mm512_set1_epi16(1))};
  }
#else
  typedef short Pairs __attribute__((vector_size(32)));
  static OPST_INLINE Pairs multiplied(Words u, Words s) { return (Pairs)_mm256_maddubs_epi16(u.v, s.v); }
  static OPST_INLINE I32 widened(Pairs x) {
    return {(I32::Register)_mm256_madd_epi16((__m256i)x, _mm256_set1_epi16(1))};
  }
#endif
  static constexpr int kFit = 32767 / (2 * 128 * kMost);  // products; the sum of a pair is 2 * 128 * kMost at most
  Pairs pairs;
  OPST_INLINE void add(Words u, Words s, int n) {
    if constexpr (kFit < 2) {
      sum = dot<kMost>(sum, u, s);
    } else {
      pairs = n % kFit == 0 ? multiplied(u, s) : pairs + multiplied(u, s);
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

// Numbers of eight bits (f8_e4m3, f8_e5m2) as vectors of floats. No processor here converts them, so integer arithmetic
// does; both ways the results are those of core/convert.h, to the bit.
//
//   load_f8(p), load_f8_n(p, n)        kLanes numbers, or n of them and zeros: exact
//   store_f8(x, p), store_f8_n(x, p, n)  rounded to nearest even; numbers that are too large saturate
//
//   load_stored<V>(p), load_stored_n<V>(p, n)  the same of any storage type: also int8_t, and uint8_t for two numbers of
//                                              four bits in a byte, of which n is even
//   load_stored<V>(p, v)                       vectors v[0 .. N) of N * kLanes numbers; of f8 two cost less than one and
//                                              one
//   number_at(p, i), stored_bytes<T>(n)        where number i lies, an even one in uint8_t; bytes of n numbers
//
// Widening: the bits of a magnitude, moved to where f16 has exponent and mantissa, are its value times a power of two,
// subnormals included, and processors widen f16 at full speed (moved to where f32 has them, a subnormal number costs
// Intel's cores 150 cycles when it is multiplied). Narrowing: above the smallest normal number the exponent is moved and
// the bits that go are rounded as an integer; below it, adding 2^23 units of the last place rounds. Subnormal floats
// occur on the way: the processor must not take them for zeros (the pool's threads do not).
#pragma once

#include "simd/small_ints.h"

namespace opst::OPST_ISA_NS::simd {

template <class T>
struct Float8;
template <>
struct Float8<f8_e4m3> {
  static constexpr int kMantissaBits = 3, kBias = 7;
  // Magnitudes: the largest number, what becomes of an infinity, above what all is NaN.
  static constexpr uint32_t kLargest = 0x7e, kInfinity = 0x7f, kNanAbove = 0x7e;
};
template <>
struct Float8<f8_e5m2> {
  static constexpr int kMantissaBits = 2, kBias = 15;
  static constexpr uint32_t kLargest = 0x7b, kInfinity = 0x7c, kNanAbove = 0x7c;
};

OPST_INLINE F32 as_floats(Words words) { return {(decltype(F32::v))words.v}; }
OPST_INLINE Words as_words(F32 x) { return {(Words::Register)x.v}; }
// a in the lanes where x > most, else b; x and most below 2^31.
OPST_INLINE Words where_above(Words x, uint32_t most, Words a, Words b) {
  const Words::Register mask = (Words::Register)(as_ints(x).v > as_ints(words_of(most)).v);
  return {(a.v & mask) | (b.v & ~mask)};
}

// As f16, f8_e4m3 is 2^-8 times as large, and its NaN a number that lacks kNanLacks.
inline constexpr int kNanAsF16 = 0x7f << 7, kNanLacks = 0x7e00 - kNanAsF16;
#if defined(__AVX512F__)
template <class T>
OPST_INLINE void widen_f8(__m256i bytes, F32& low, F32& high) {
  constexpr bool kE4m3 = __is_same(T, f8_e4m3);
  __m512i halves = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), kE4m3 ? 7 : 8);
  if constexpr (kE4m3) {
    halves = _mm512_and_si512(halves, _mm512_set1_epi16(-0x4001));  // the sign came twice
    const __m512i magnitude = _mm512_and_si512(halves, _mm512_set1_epi16(0x7fff));
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(kNanAsF16));
    halves = _mm512_mask_add_epi16(halves, nan, halves, _mm512_set1_epi16(kNanLacks));
  }
  low = {_mm512_cvtph_ps(_mm512_castsi512_si256(halves))};
  high = {_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1))};
  if constexpr (kE4m3) low = low * F32::set1(256), high = high * F32::set1(256);
}
template <class T>
OPST_INLINE void load_f8(const T* p, F32& low, F32& high) {
  widen_f8<T>(F32::load_halves(p), low, high);
}
template <class T>
OPST_INLINE F32 load_f8(const T* p) {
  F32 low, unused;
  widen_f8<T>(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), low, unused);
  return low;
}
#else
template <class T>
OPST_INLINE F32 load_f8(const T* p) {
  constexpr bool kE4m3 = __is_same(T, f8_e4m3);
  f16 halves[F32::kLanes];
  for (int i = 0; i < F32::kLanes; ++i) {
    const int sign = (p[i].bits & 0x80) << 8, magnitude = (p[i].bits & 0x7f) << (kE4m3 ? 7 : 8);
    halves[i].bits = static_cast<uint16_t>(sign | (magnitude + (kE4m3 && magnitude == kNanAsF16 ? kNanLacks : 0)));
  }
  return kE4m3 ? F32::load(halves) * F32::set1(256) : F32::load(halves);
}
template <class T>
OPST_INLINE void load_f8(const T* p, F32& low, F32& high) {
  low = load_f8(p), high = load_f8(p + F32::kLanes);
}
#endif

// The bytes, one to a lane.
template <class T>
OPST_INLINE Words narrow_f8(F32 x) {
  using Format = Float8<T>;
  constexpr int kShift = 23 - Format::kMantissaBits, kRebias = 127 - Format::kBias;
  const Words bits = as_words(x), magnitude = bits & words_of(0x7fffffffu);
  const Words odd = (magnitude >> kShift) & words_of(1);
  const Words normal = {(magnitude.v - (static_cast<uint32_t>(kRebias) << 23) + ((1u << (kShift - 1)) - 1) + odd.v) >>
                        kShift};
  // The smallest normal number is 2^(1 - bias), a unit of the last place below it 2^(1 - bias - mantissa bits).
  constexpr uint32_t kUnits = static_cast<uint32_t>(127 + 1 - Format::kBias - Format::kMantissaBits + 23) << 23;
  const Words small = {as_words(as_floats(magnitude) + as_floats(words_of(kUnits))).v - kUnits};
  Words out = where_above(magnitude, (static_cast<uint32_t>(kRebias + 1) << 23) - 1, normal, small);
  out = where_above(out, Format::kLargest, words_of(Format::kLargest), out);
  out = where_above(magnitude, 0x7f7fffffu, words_of(Format::kInfinity), out);
  out = where_above(magnitude, 0x7f800000u, words_of(0x7fu), out);
  return out | ((bits >> 24) & words_of(0x80u));
}

template <class T>
OPST_INLINE F32 load_f8_n(const T* p, int64_t n) {
  T lanes[F32::kLanes] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
  return load_f8(lanes);
}
template <class T>
OPST_INLINE void store_f8_n(F32 x, T* p, int64_t n) {
  uint32_t words[F32::kLanes];
  store(narrow_f8<T>(x), words);
  for (int64_t i = 0; i < n; ++i) p[i].bits = static_cast<uint8_t>(words[i]);
}
template <class T>
OPST_INLINE void store_f8(F32 x, T* p) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)narrow_f8<T>(x).v));
#else
  store_f8_n(x, p, F32::kLanes);
#endif
}

template <class T>
OPST_INLINE const T* number_at(const T* p, int64_t i) {
  return p + (__is_same(T, uint8_t) ? i / 2 : i);
}
template <class T>
OPST_INLINE int64_t stored_bytes(int64_t n) {
  return __is_same(T, uint8_t) ? (n + 1) / 2 : n * static_cast<int64_t>(sizeof(T));
}

// kLanes numbers of any type that is stored, or n of them and zeros: V::load knows those of 16 bits and more.
template <class T>
inline constexpr bool kIsFloat8 = __is_same(T, f8_e4m3) || __is_same(T, f8_e5m2);
template <class V, class T>
OPST_INLINE V load_stored(const T* p) {
  if constexpr (kIsFloat8<T>)
    return load_f8(p);
  else if constexpr (__is_same(T, int8_t))
    return load_i8(p);
  else if constexpr (__is_same(T, uint8_t))
    return load_i4(p);
  else
    return V::load(p);
}
template <class V, class T, int N>
OPST_INLINE void load_stored(const T* p, V (&v)[N]) {
  if constexpr (kIsFloat8<T> && N % 2 == 0) {
    OPST_UNROLL for (int i = 0; i < N; i += 2) load_f8(p + i * V::kLanes, v[i], v[i + 1]);
  } else {
    OPST_UNROLL for (int i = 0; i < N; ++i) v[i] = load_stored<V>(number_at(p, i * V::kLanes));
  }
}
template <class V, class T>
OPST_INLINE V load_stored_n(const T* p, int64_t n) {
  if constexpr (sizeof(T) == 1) {
    if (n == V::kLanes) return load_stored<V>(p);  // below, byte by byte
  }
  if constexpr (kIsFloat8<T>) {
    return load_f8_n(p, n);
  } else if constexpr (__is_same(T, int8_t) || __is_same(T, uint8_t)) {
    T lanes[V::kLanes] = {};
    for (int64_t i = 0; i < stored_bytes<T>(n); ++i) lanes[i] = p[i];
    return load_stored<V>(lanes);
  } else {
    return V::load_n(p, n);
  }
}

}  // namespace opst::OPST_ISA_NS::simd

// Vec for avx2: 8 float lanes. Contract in vec.h.
#pragma once

#include <immintrin.h>

namespace opst::OPST_ISA_NS::simd {

struct F32 {
  using Scalar = float;
  struct Mask {
    __m256 v;
  };
  static constexpr int kLanes = 8;
  __m256 v;

  static OPST_INLINE F32 zero() { return {_mm256_setzero_ps()}; }
  static OPST_INLINE F32 set1(float x) { return {_mm256_set1_ps(x)}; }
  static OPST_INLINE F32 iota() { return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7)}; }
  // All ones in the lanes below n.
  static OPST_INLINE __m256i first_lanes(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  static OPST_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static OPST_INLINE F32 load_n(const float* p, int64_t n) { return {_mm256_maskload_ps(p, first_lanes(n))}; }
  OPST_INLINE void store(float* p) const { _mm256_storeu_ps(p, v); }
  OPST_INLINE void store_n(float* p, int64_t n) const { _mm256_maskstore_ps(p, first_lanes(n), v); }

  static OPST_INLINE F32 load(const bf16* p) { return widen_bf16(load_halves(p)); }
  static OPST_INLINE F32 load_n(const bf16* p, int64_t n) { return widen_bf16(load_halves_n(p, n)); }
  OPST_INLINE void store(bf16* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_bf16()); }
  OPST_INLINE void store_n(bf16* p, int64_t n) const { store_halves_n(p, n, narrow_bf16()); }

  static OPST_INLINE F32 load(const f16* p) { return {_mm256_cvtph_ps(load_halves(p))}; }
  static OPST_INLINE F32 load_n(const f16* p, int64_t n) { return {_mm256_cvtph_ps(load_halves_n(p, n))}; }
  OPST_INLINE void store(f16* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_f16()); }
  OPST_INLINE void store_n(f16* p, int64_t n) const { store_halves_n(p, n, narrow_f16()); }

  static OPST_INLINE __m128i load_halves(const void* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static OPST_INLINE __m128i load_halves_n(const void* p, int64_t n) {
    uint16_t lanes[8] = {};
    __builtin_memcpy(lanes, p, static_cast<size_t>(n) * 2);
    return load_halves(lanes);
  }
  static OPST_INLINE void store_halves_n(void* p, int64_t n, __m128i halves) {
    uint16_t lanes[8];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(lanes), halves);
    __builtin_memcpy(p, lanes, static_cast<size_t>(n) * 2);
  }
  static OPST_INLINE F32 widen_bf16(__m128i bits) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
  }
  OPST_INLINE __m128i narrow_bf16() const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
    const __m256i out = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan)), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(out), _mm256_extracti128_si256(out, 1));
  }
  OPST_INLINE __m128i narrow_f16() const { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
};

OPST_INLINE F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
OPST_INLINE F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
OPST_INLINE F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
OPST_INLINE F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
OPST_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
OPST_INLINE F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
OPST_INLINE F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.v, b.v)}; }
OPST_INLINE F32 sqrt(F32 a) { return {_mm256_sqrt_ps(a.v)}; }
OPST_INLINE F32 abs(F32 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
OPST_INLINE F32 round(F32 a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
OPST_INLINE F32::Mask operator<(F32 a, F32 b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
OPST_INLINE F32::Mask operator<=(F32 a, F32 b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ)}; }
OPST_INLINE F32::Mask operator==(F32 a, F32 b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)}; }
OPST_INLINE F32 select(F32::Mask mask, F32 a, F32 b) { return {_mm256_blendv_ps(b.v, a.v, mask.v)}; }
OPST_INLINE bool any(F32::Mask mask) { return _mm256_movemask_ps(mask.v) != 0; }
OPST_INLINE F32 blend_n(int64_t n, F32 a, F32 b) {
  return select(F32::Mask{_mm256_castsi256_ps(F32::first_lanes(n))}, a, b);
}
OPST_INLINE F32 copy_sign(F32 magnitude, F32 sign) {
  const __m256 bit = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_and_ps(bit, sign.v), _mm256_andnot_ps(bit, magnitude.v))};
}

// x clamped to the exponents that a float can have; NaN stays NaN.
OPST_INLINE F32 exp2_clamp(F32 x) { return min(F32::set1(128.0f), max(F32::set1(-127.0f), x)); }
// 2^x = p(fraction) * 2^round(x) with fraction = x - round(x) in [-0.5, 0.5].
OPST_INLINE F32 exp2_fraction(F32 x) {
  const F32 clamped = exp2_clamp(x);
  return clamped - round(clamped);
}
// p * 2^round(x), p near 1; 0 where x < -126, so that no subnormal number is ever made.
OPST_INLINE F32 exp2_scale(F32 p, F32 x) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(exp2_clamp(x).v), 23);
  const __m256 scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p.v), exponent));
  return {_mm256_and_ps(scaled, _mm256_cmp_ps(x.v, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ))};
}
// p * 2^n for integral n, by two factors, neither of which leaves the range of exponents.
OPST_INLINE F32 scale_pow2(F32 p, F32 n) {
  const F32 clamped = min(F32::set1(252.0f), max(F32::set1(-252.0f), n));
  const __m256i whole = _mm256_cvtps_epi32(clamped.v);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const __m256i rest = _mm256_sub_epi32(whole, half);
  const __m256i one = _mm256_set1_epi32(127);
  const __m256 a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, one), 23));
  const __m256 b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, one), 23));
  return {_mm256_mul_ps(_mm256_mul_ps(p.v, a), b)};
}

OPST_INLINE float hsum(F32 a) {
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}
OPST_INLINE float hmax(F32 a) {
  const __m128 m4 = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  const __m128 m2 = _mm_max_ps(m4, _mm_movehl_ps(m4, m4));
  return _mm_cvtss_f32(_mm_max_ss(m2, _mm_movehdup_ps(m2)));
}

OPST_INLINE void transpose(F32 (&row)[8]) {
  __m256 t[8];
  OPST_UNROLL for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(row[i].v, row[i + 1].v);
    t[i + 1] = _mm256_unpackhi_ps(row[i].v, row[i + 1].v);
  }
  __m256 u[8];
  OPST_UNROLL for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  OPST_UNROLL for (int j = 0; j < 4; ++j) {
    row[j].v = _mm256_permute2f128_ps(u[j], u[4 + j], 0x20);
    row[4 + j].v = _mm256_permute2f128_ps(u[j], u[4 + j], 0x31);
  }
}

// out[c] lane i = rows[i][offset + c]. Rows i and i + 4 share a register from the load on.
OPST_INLINE void load_transposed(const void* const* rows, int64_t offset, F32 (&out)[8]) {
  const auto quarter = [&](int i, int64_t column) OPST_INLINE_LAMBDA {
    return _mm_loadu_ps(static_cast<const float*>(rows[i]) + offset + column);
  };
  OPST_UNROLL for (int column = 0; column < 8; column += 4) {
    __m256 row[4];
    OPST_UNROLL for (int i = 0; i < 4; ++i) {
      row[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(quarter(i, column)), quarter(i + 4, column), 1);
    }
    const __m256 a = _mm256_unpacklo_ps(row[0], row[1]), b = _mm256_unpackhi_ps(row[0], row[1]);
    const __m256 c = _mm256_unpacklo_ps(row[2], row[3]), d = _mm256_unpackhi_ps(row[2], row[3]);
    out[column].v = _mm256_shuffle_ps(a, c, 0x44);
    out[column + 1].v = _mm256_shuffle_ps(a, c, 0xee);
    out[column + 2].v = _mm256_shuffle_ps(b, d, 0x44);
    out[column + 3].v = _mm256_shuffle_ps(b, d, 0xee);
  }
}

// Lane i = the lanes of row[i] joined in the order of hsum.
template <class Join>
OPST_INLINE F32 reduce_each(const F32 (&row)[8], const Join& join) {
  // In 128-bit lane q of t[j]: row 4q + j, its two lanes joined.
  __m256 t[4];
  OPST_UNROLL for (int j = 0; j < 4; ++j) {
    const __m256 a = row[j].v, b = row[4 + j].v;
    t[j] = join(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }
  const __m256 u0 = join(_mm256_shuffle_ps(t[0], t[1], 0x44), _mm256_shuffle_ps(t[0], t[1], 0xee));
  const __m256 u1 = join(_mm256_shuffle_ps(t[2], t[3], 0x44), _mm256_shuffle_ps(t[2], t[3], 0xee));
  return {join(_mm256_shuffle_ps(u0, u1, 0x88), _mm256_shuffle_ps(u0, u1, 0xdd))};
}
OPST_INLINE F32 hsum_each(const F32 (&row)[8]) {
  return reduce_each(row, [](__m256 a, __m256 b) OPST_INLINE_LAMBDA { return _mm256_add_ps(a, b); });
}
OPST_INLINE F32 hmax_each(const F32 (&row)[8]) {
  return reduce_each(row, [](__m256 a, __m256 b) OPST_INLINE_LAMBDA { return _mm256_max_ps(a, b); });
}

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

}  // namespace opst::OPST_ISA_NS::simd

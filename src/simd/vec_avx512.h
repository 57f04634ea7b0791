// Vec for avx512 and above: 16 float lanes. Contract in vec.h.
#pragma once

#include <immintrin.h>

namespace opst::OPST_ISA_NS::simd {

struct F32 {
  using Scalar = float;
  using Mask = __mmask16;
  static constexpr int kLanes = 16;
  __m512 v;

  static OPST_INLINE F32 zero() { return {_mm512_setzero_ps()}; }
  static OPST_INLINE F32 set1(float x) { return {_mm512_set1_ps(x)}; }
  static OPST_INLINE F32 iota() { return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
  static OPST_INLINE __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }

  static OPST_INLINE F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static OPST_INLINE F32 load_n(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
  OPST_INLINE void store(float* p) const { _mm512_storeu_ps(p, v); }
  OPST_INLINE void store_n(float* p, int64_t n) const { _mm512_mask_storeu_ps(p, first_lanes(n), v); }

  static OPST_INLINE __m256i load_halves(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static OPST_INLINE __m256i load_halves_n(const void* p, int64_t n) {
    return _mm256_maskz_loadu_epi16(first_lanes(n), p);
  }

  static OPST_INLINE F32 load(const bf16* p) { return widen_bf16(load_halves(p)); }
  static OPST_INLINE F32 load_n(const bf16* p, int64_t n) { return widen_bf16(load_halves_n(p, n)); }
  OPST_INLINE void store(bf16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16()); }
  OPST_INLINE void store_n(bf16* p, int64_t n) const { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16()); }

  static OPST_INLINE F32 load(const f16* p) { return {_mm512_cvtph_ps(load_halves(p))}; }
  static OPST_INLINE F32 load_n(const f16* p, int64_t n) { return {_mm512_cvtph_ps(load_halves_n(p, n))}; }
  OPST_INLINE void store(f16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_f16()); }
  OPST_INLINE void store_n(f16* p, int64_t n) const { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_f16()); }

  static OPST_INLINE F32 widen_bf16(__m256i bits) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
  // Round to nearest even by integer arithmetic: vcvtneps2bf16 would flush subnormals.
  OPST_INLINE __m256i narrow_bf16() const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
  OPST_INLINE __m256i narrow_f16() const { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
};

OPST_INLINE F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
OPST_INLINE F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
OPST_INLINE F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
OPST_INLINE F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
OPST_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
OPST_INLINE F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
OPST_INLINE F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
OPST_INLINE F32 sqrt(F32 a) { return {_mm512_sqrt_ps(a.v)}; }
OPST_INLINE F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
OPST_INLINE F32 round(F32 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
OPST_INLINE __mmask16 operator<(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
OPST_INLINE __mmask16 operator<=(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ); }
OPST_INLINE __mmask16 operator==(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
OPST_INLINE F32 select(__mmask16 mask, F32 a, F32 b) { return {_mm512_mask_blend_ps(mask, b.v, a.v)}; }
OPST_INLINE bool any(__mmask16 mask) { return mask != 0; }
OPST_INLINE F32 blend_n(int64_t n, F32 a, F32 b) { return select(F32::first_lanes(n), a, b); }
OPST_INLINE F32 copy_sign(F32 magnitude, F32 sign) {
  // bitwise: sign bit from `sign`, the rest from `magnitude`
  return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_set1_epi32(INT32_MIN), _mm512_castps_si512(sign.v),
                                                        _mm512_castps_si512(magnitude.v), 0xca))};
}

// 2^x = p(fraction) * 2^floor(x) with fraction = x - floor(x) in [0, 1), 0 for infinities.
OPST_INLINE F32 exp2_fraction(F32 x) { return {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
// p * 2^floor(x); 0 where x < -126, so that no subnormal number is ever made.
OPST_INLINE F32 exp2_scale(F32 p, F32 x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return {_mm512_maskz_scalef_ps(normal, p.v, x.v)};
}
// p * 2^n for integral n; exact where the result is normal, +inf above, correctly rounded below.
OPST_INLINE F32 scale_pow2(F32 p, F32 n) { return {_mm512_scalef_ps(p.v, n.v)}; }

OPST_INLINE float hsum(F32 a) {
  const __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}
OPST_INLINE float hmax(F32 a) {
  const __m256 m8 = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 m4 = _mm_max_ps(_mm256_castps256_ps128(m8), _mm256_extractf128_ps(m8, 1));
  const __m128 m2 = _mm_max_ps(m4, _mm_movehl_ps(m4, m4));
  return _mm_cvtss_f32(_mm_max_ss(m2, _mm_movehdup_ps(m2)));
}

// 16 x 16 transpose: 32-bit and 64-bit interleaves within 128-bit lanes, then two rounds of lane exchanges.
OPST_INLINE void transpose(F32 (&row)[16]) {
  __m512 t[16];
  OPST_UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(row[i].v, row[i + 1].v);
    t[i + 1] = _mm512_unpackhi_ps(row[i].v, row[i + 1].v);
  }
  __m512 u[16];
  OPST_UNROLL for (int i = 0; i < 16; i += 4) {
    const __m512d a = _mm512_castps_pd(t[i]), b = _mm512_castps_pd(t[i + 1]);
    const __m512d c = _mm512_castps_pd(t[i + 2]), d = _mm512_castps_pd(t[i + 3]);
    u[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    u[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    u[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    u[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  // u[4g + j] holds, in 128-bit lane q, column 4q + j of rows 4g .. 4g + 3.
  OPST_UNROLL for (int j = 0; j < 4; ++j) {
    const __m512 a = _mm512_shuffle_f32x4(u[j], u[4 + j], 0x88), b = _mm512_shuffle_f32x4(u[j], u[4 + j], 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0x88),
                 d = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0xdd);
    row[j].v = _mm512_shuffle_f32x4(a, c, 0x88);
    row[4 + j].v = _mm512_shuffle_f32x4(b, d, 0x88);
    row[8 + j].v = _mm512_shuffle_f32x4(a, c, 0xdd);
    row[12 + j].v = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}

// out[c] lane i = rows[i][offset + c]. Rows i and i + 4 share a register from the load on, which saves the exchange of
// 256-bit halves: 36 against 58 cycles for load and transpose.
OPST_INLINE void load_transposed(const void* const* rows, int64_t offset, F32 (&out)[16]) {
  const auto half = [&](int i, int64_t column) OPST_INLINE_LAMBDA {
    return _mm256_loadu_ps(static_cast<const float*>(rows[i]) + offset + column);
  };
  OPST_UNROLL for (int column = 0; column < 16; column += 8) {
    // Columns column + j and column + 4 + j of rows 8g .. 8g + 3 and 8g + 4 .. 8g + 7, in 128-bit lanes.
    __m512 u[2][4];
    OPST_UNROLL for (int g = 0; g < 2; ++g) {
      __m512d t[4];
      OPST_UNROLL for (int i = 0; i < 4; i += 2) {
        const int first = 8 * g + i;
        const __m512 a = _mm512_insertf32x8(_mm512_castps256_ps512(half(first, column)), half(first + 4, column), 1);
        const __m512 b =
            _mm512_insertf32x8(_mm512_castps256_ps512(half(first + 1, column)), half(first + 5, column), 1);
        t[i] = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
        t[i + 1] = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
      }
      u[g][0] = _mm512_castpd_ps(_mm512_unpacklo_pd(t[0], t[2]));
      u[g][1] = _mm512_castpd_ps(_mm512_unpackhi_pd(t[0], t[2]));
      u[g][2] = _mm512_castpd_ps(_mm512_unpacklo_pd(t[1], t[3]));
      u[g][3] = _mm512_castpd_ps(_mm512_unpackhi_pd(t[1], t[3]));
    }
    OPST_UNROLL for (int j = 0; j < 4; ++j) {
      out[column + j].v = _mm512_shuffle_f32x4(u[0][j], u[1][j], 0x88);
      out[column + 4 + j].v = _mm512_shuffle_f32x4(u[0][j], u[1][j], 0xdd);
    }
  }
}

// Lane i = the lanes of row[i] joined in the order of hsum: 30 shuffles instead of 16 separate reductions.
template <class Join>
OPST_INLINE F32 reduce_each(const F32 (&row)[16], const Join& join) {
  // In 128-bit lane q of u[j]: row 4q + j, its four lanes joined.
  __m512 u[4];
  OPST_UNROLL for (int j = 0; j < 4; ++j) {
    const __m512 a = row[j].v, b = row[4 + j].v, c = row[8 + j].v, d = row[12 + j].v;
    const __m512 ab = join(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const __m512 cd = join(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    u[j] = join(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  }
  const __m512 w0 = join(_mm512_shuffle_ps(u[0], u[1], 0x44), _mm512_shuffle_ps(u[0], u[1], 0xee));
  const __m512 w1 = join(_mm512_shuffle_ps(u[2], u[3], 0x44), _mm512_shuffle_ps(u[2], u[3], 0xee));
  return {join(_mm512_shuffle_ps(w0, w1, 0x88), _mm512_shuffle_ps(w0, w1, 0xdd))};
}
OPST_INLINE F32 hsum_each(const F32 (&row)[16]) {
  return reduce_each(row, [](__m512 a, __m512 b) OPST_INLINE_LAMBDA { return _mm512_add_ps(a, b); });
}
OPST_INLINE F32 hmax_each(const F32 (&row)[16]) {
  return reduce_each(row, [](__m512 a, __m512 b) OPST_INLINE_LAMBDA { return _mm512_max_ps(a, b); });
}

#if defined(__AVX512BF16__)
// 32 consecutive values rounded to bf16 (nearest even, subnormals to zero).
OPST_INLINE void store_bf16_fast(F32 low, F32 high, bf16* p) {
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v));
}
// 16 words {even[c], odd[c]}, rounded as by store_bf16_fast.
OPST_INLINE void store_interleaved_bf16_fast(F32 even, F32 odd, uint32_t* p) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd.v, even.v);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), halves));
}
OPST_INLINE void keep_bf16(bf16* p, uint32_t bits) { _mm512_storeu_si512(p, _mm512_maskz_loadu_epi16(bits, p)); }
#endif

// Rows 2j and 2j + 1 of a bf16 matrix as words: out[c] = {even[c], odd[c]} for c < n <= 32, 0 for odd[c] without
// has_odd. Whole vectors are written, zeros from n on.
OPST_INLINE void interleave_words(const bf16* even, const bf16* odd, int64_t n, bool has_odd, uint32_t* out) {
  const __mmask32 mask = n >= 32 ? 0xffffffffu : (1u << n) - 1u;
  const __m512i a = _mm512_maskz_loadu_epi16(mask, even);
  const __m512i b = has_odd ? _mm512_maskz_loadu_epi16(mask, odd) : _mm512_setzero_si512();
  alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                    8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, low, b));
  if (n > 16) _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi16(a, high, b));
}

OPST_INLINE F32 select_bits(uint32_t bits, F32 a, F32 b) { return select(static_cast<__mmask16>(bits), a, b); }
template <class V>
OPST_INLINE uint32_t bits_of_bytes(const uint8_t* p, int64_t n) {
  const __m128i bytes = _mm_maskz_loadu_epi8(F32::first_lanes(n), p);
  return _mm_test_epi8_mask(bytes, bytes);
}

}  // namespace opst::OPST_ISA_NS::simd

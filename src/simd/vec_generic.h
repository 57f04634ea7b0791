// Vec for every processor: 128 bits of the compiler's own vector type, 4 float or 2 double lanes. Contract in vec.h.
// Verbs that this type has no operator for go through an array of lanes: the level is for correctness first.
#pragma once

namespace opst::OPST_ISA_NS::simd {

// Scalar conversions: widening is exact, narrowing rounds to nearest even.
OPST_INLINE float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
OPST_INLINE uint32_t as_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
OPST_INLINE float widen(bf16 x) { return as_float(static_cast<uint32_t>(x.bits) << 16); }
OPST_INLINE float widen(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u)
    return as_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13 | (magnitude > 0x7c00u ? 0x400000u : 0u));
  // 2^112 moves the exponent from f16's bias to f32's; subnormals become normal on the way.
  return as_float(sign | as_bits(as_float(magnitude << 13) * 0x1p112f));
}
OPST_INLINE void narrow(float x, bf16* out) {
  const uint32_t bits = as_bits(x);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out->bits = static_cast<uint16_t>((nan ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
OPST_INLINE void narrow(float x, f16* out) {
  const uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | (magnitude >> 13 & 0x1ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 1/2 rounds at bit 2^-24
    half = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}
OPST_INLINE float widen(float x) { return x; }
OPST_INLINE double widen(double x) { return x; }
OPST_INLINE void narrow(float x, float* out) { *out = x; }
OPST_INLINE void narrow(double x, double* out) { *out = x; }

template <class T>
struct GenericVec {
  using Scalar = T;
  using Raw [[gnu::vector_size(16)]] = T;
  static constexpr int kLanes = 16 / static_cast<int>(sizeof(T));
  struct Mask {
    decltype(Raw{} < Raw{}) v;
  };
  Raw v;

  static OPST_INLINE GenericVec zero() { return {Raw{}}; }
  static OPST_INLINE GenericVec set1(T x) { return {Raw{} + x}; }
  static OPST_INLINE GenericVec iota() {
    GenericVec out = zero();
    for (int i = 0; i < kLanes; ++i) out.v[i] = static_cast<T>(i);
    return out;
  }

  static OPST_INLINE GenericVec load(const T* p) {
    GenericVec out;
    __builtin_memcpy(&out.v, p, sizeof(out.v));
    return out;
  }
  OPST_INLINE void store(T* p) const { __builtin_memcpy(p, &v, sizeof(v)); }
  template <class S>
  static OPST_INLINE GenericVec load(const S* p) {
    return load_n(p, kLanes);
  }
  template <class S>
  OPST_INLINE void store(S* p) const {
    store_n(p, kLanes);
  }
  // As bytes: pairs of 16-bit numbers travel as floats, and lie at any even address.
  template <class S>
  static OPST_INLINE GenericVec load_n(const S* p, int64_t n) {
    GenericVec out = zero();
    for (int64_t i = 0; i < n; ++i) {
      S x;
      __builtin_memcpy(&x, reinterpret_cast<const char*>(p) + i * static_cast<int64_t>(sizeof(S)), sizeof(S));
      out.v[i] = widen(x);
    }
    return out;
  }
  template <class S>
  OPST_INLINE void store_n(S* p, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) {
      S x;
      narrow(v[i], &x);
      __builtin_memcpy(reinterpret_cast<char*>(p) + i * static_cast<int64_t>(sizeof(S)), &x, sizeof(S));
    }
  }

  friend OPST_INLINE GenericVec operator+(GenericVec a, GenericVec b) { return {a.v + b.v}; }
  friend OPST_INLINE GenericVec operator-(GenericVec a, GenericVec b) { return {a.v - b.v}; }
  friend OPST_INLINE GenericVec operator*(GenericVec a, GenericVec b) { return {a.v * b.v}; }
  friend OPST_INLINE GenericVec operator/(GenericVec a, GenericVec b) { return {a.v / b.v}; }
  friend OPST_INLINE Mask operator<(GenericVec a, GenericVec b) { return {a.v < b.v}; }
  friend OPST_INLINE Mask operator<=(GenericVec a, GenericVec b) { return {a.v <= b.v}; }
  friend OPST_INLINE Mask operator==(GenericVec a, GenericVec b) { return {a.v == b.v}; }
};

using F32 = GenericVec<float>;
using F64 = GenericVec<double>;

template <class T>
OPST_INLINE GenericVec<T> fma(GenericVec<T> a, GenericVec<T> b, GenericVec<T> c) {
  return {a.v * b.v + c.v};
}
template <class T>
OPST_INLINE GenericVec<T> max(GenericVec<T> a, GenericVec<T> b) {
  return {a.v > b.v ? a.v : b.v};
}
template <class T>
OPST_INLINE GenericVec<T> min(GenericVec<T> a, GenericVec<T> b) {
  return {a.v < b.v ? a.v : b.v};
}
template <class T>
OPST_INLINE GenericVec<T> select(typename GenericVec<T>::Mask mask, GenericVec<T> a, GenericVec<T> b) {
  return {mask.v ? a.v : b.v};
}
OPST_INLINE bool any(F32::Mask mask) { return (mask.v[0] | mask.v[1] | mask.v[2] | mask.v[3]) != 0; }
OPST_INLINE bool any(F64::Mask mask) { return (mask.v[0] | mask.v[1]) != 0; }

// One lane at a time.
template <class T, class F>
OPST_INLINE GenericVec<T> each(GenericVec<T> a, F f) {
  for (int i = 0; i < GenericVec<T>::kLanes; ++i) a.v[i] = f(a.v[i], i);
  return a;
}
OPST_INLINE float sqrt_scalar(float x) { return __builtin_sqrtf(x); }
OPST_INLINE double sqrt_scalar(double x) { return __builtin_sqrt(x); }
template <class T>
OPST_INLINE GenericVec<T> sqrt(GenericVec<T> a) {
  return each(a, [](T x, int) { return sqrt_scalar(x); });
}
template <class T>
OPST_INLINE GenericVec<T> abs(GenericVec<T> a) {
  return each(a, [](T x, int) { return static_cast<T>(__builtin_fabs(x)); });
}
template <class T>
OPST_INLINE GenericVec<T> copy_sign(GenericVec<T> magnitude, GenericVec<T> sign) {
  return each(magnitude, [&](T x, int i) { return static_cast<T>(__builtin_copysign(x, sign.v[i])); });
}
// To nearest even: above 2^(mantissa bits) there are integers only, so adding that power and taking it away drops the
// fraction.
template <class T>
OPST_INLINE GenericVec<T> round(GenericVec<T> a) {
  const auto whole = GenericVec<T>::set1(sizeof(T) == 4 ? static_cast<T>(0x1p23) : static_cast<T>(0x1p52));
  const auto size = abs(a);
  return select(size < whole, copy_sign((size + whole) - whole, a), a);
}
template <class T>
OPST_INLINE GenericVec<T> blend_n(int64_t n, GenericVec<T> a, GenericVec<T> b) {
  return each(b, [&](T y, int i) { return i < n ? a.v[i] : y; });
}

// Exponents of the format: 2^kMin is the smallest normal number, 2^kMax is infinity.
template <class T>
struct Exponents {
  static constexpr int kMin = sizeof(T) == 4 ? -126 : -1022, kMax = sizeof(T) == 4 ? 128 : 1024;
};
// 2^n for kMin <= n < kMax
OPST_INLINE float pow2(float n) { return as_float(static_cast<uint32_t>(static_cast<int>(n) + 127) << 23); }
OPST_INLINE double pow2(double n) {
  return __builtin_bit_cast(double, static_cast<uint64_t>(static_cast<int64_t>(n) + 1023) << 52);
}
// p * 2^n for integral n, by factors that stay within the range of exponents.
template <class T>
OPST_INLINE GenericVec<T> scale_pow2(GenericVec<T> p, GenericVec<T> n) {
  constexpr T kStep = static_cast<T>(Exponents<T>::kMax - 4);
  return each(p, [&](T x, int i) {
    T left = n.v[i];
    if (!(left > -3 * kStep)) left = -3 * kStep;
    if (left > 3 * kStep) left = 3 * kStep;
    while (left > kStep) x *= pow2(kStep), left -= kStep;
    while (left < -kStep) x *= pow2(-kStep), left += kStep;
    return x * pow2(left);
  });
}
// 2^x = p(fraction) * 2^round(x) with fraction = x - round(x), 0 for infinities.
template <class T>
OPST_INLINE GenericVec<T> exp2_fraction(GenericVec<T> x) {
  constexpr T kLow = static_cast<T>(Exponents<T>::kMin - 1), kHigh = static_cast<T>(Exponents<T>::kMax);
  const GenericVec<T> clamped = min(GenericVec<T>::set1(kHigh), max(GenericVec<T>::set1(kLow), x));
  return clamped - round(clamped);
}
// p * 2^round(x); 0 where x < kMin, so that no subnormal number is ever made.
template <class T>
OPST_INLINE GenericVec<T> exp2_scale(GenericVec<T> p, GenericVec<T> x) {
  constexpr T kLow = static_cast<T>(Exponents<T>::kMin), kHigh = static_cast<T>(Exponents<T>::kMax);
  const auto k = round(min(GenericVec<T>::set1(kHigh), max(GenericVec<T>::set1(kLow), x)));
  return each(p, [&](T y, int i) {
    if (x.v[i] < kLow) return T(0);
    if (!(k.v[i] < kHigh)) return y * pow2(kHigh - 1) * 2;
    return y * pow2(k.v[i]);
  });
}

template <class T>
OPST_INLINE T hsum(GenericVec<T> a) {
  if constexpr (GenericVec<T>::kLanes == 2)
    return a.v[0] + a.v[1];
  else
    return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
}
template <class T>
OPST_INLINE T hmax(GenericVec<T> a) {
  T best = a.v[0];
  for (int i = 1; i < GenericVec<T>::kLanes; ++i) best = best > a.v[i] ? best : a.v[i];
  return best;
}
template <class T, int N>
OPST_INLINE void transpose(GenericVec<T> (&row)[N]) {
  T cell[N][N];
  for (int i = 0; i < N; ++i) row[i].store(cell[i]);
  for (int i = 0; i < N; ++i) row[i] = each(row[i], [&](T, int j) { return cell[j][i]; });
}
template <class T, int N>
OPST_INLINE void load_transposed(const void* const* rows, int64_t offset, GenericVec<T> (&out)[N]) {
  for (int i = 0; i < N; ++i) out[i] = GenericVec<T>::load(static_cast<const T*>(rows[i]) + offset);
  transpose(out);
}
template <class T, int N>
OPST_INLINE GenericVec<T> hsum_each(const GenericVec<T> (&row)[N]) {
  return each(row[0], [&](T, int i) { return hsum(row[i]); });
}
template <class T, int N>
OPST_INLINE GenericVec<T> hmax_each(const GenericVec<T> (&row)[N]) {
  return each(row[0], [&](T, int i) { return hmax(row[i]); });
}

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

}  // namespace opst::OPST_ISA_NS::simd

// The verbs of one level as functions on arrays. See verb_table_test.h.
#include "simd/float8.h"
#include "simd/math.h"
#include "simd/philox.h"
#include "simd/small_ints.h"
#include "simd/vec.h"
#include "simd/verb_table_test.h"

namespace opst::OPST_ISA_NS::simd_test {
namespace {

using opst::simd_test::BitTable;
using opst::simd_test::LevelTables;
using opst::simd_test::StorageTable;
using opst::simd_test::VerbTable;

template <class V, class F>
OPST_INLINE void map(const typename V::Scalar* x, typename V::Scalar* out, int64_t n, F f) {
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) f(V::load(x + i)).store(out + i);
  f(V::load_n(x + i, n - i)).store_n(out + i, n - i);
}

template <class V>
struct Verbs {
  using S = typename V::Scalar;

  static void exp2(const S* x, S* out, int64_t n) {
    map<V>(x, out, n, [](V v) { return simd::exp2(v); });
  }
  static void exp2_short(const S* x, S* out, int64_t n) {
    map<V>(x, out, n, [](V v) { return simd::exp2_short(v); });
  }
  static void exp2_bf16(const S* x, S* out, int64_t n) {
    map<V>(x, out, n, [](V v) {
      if constexpr (sizeof(S) == 4) {
        return simd::exp2_bf16(v);
      } else {
        return v;
      }
    });
  }
  static void exp(const S* x, S* out, int64_t n) {
    map<V>(x, out, n, [](V v) { return simd::exp(v); });
  }
  static void tanh(const S* x, S* out, int64_t n) {
    map<V>(x, out, n, [](V v) { return simd::tanh(v); });
  }
  static void tanh_short(const S* x, S* out, int64_t n) {
    map<V>(x, out, n, [](V v) { return simd::tanh_short(v); });
  }
  static void erf(const S* x, S* out, int64_t n) {
    map<V>(x, out, n, [](V v) {
      if constexpr (sizeof(S) == 4) {
        return simd::erf(v);
      } else {
        return v;
      }
    });
  }

  static void zero(S* out) { V::zero().store(out); }
  static void set1(S x, S* out) { V::set1(x).store(out); }
  static void iota(S* out) { V::iota().store(out); }
  static void load(const S* p, S* out) { V::load(p).store(out); }
  static void load_n(const S* p, int64_t n, S* out) { V::load_n(p, n).store(out); }
  static void store(const S* x, S* p) { V::load(x).store(p); }
  static void store_n(const S* x, S* p, int64_t n) { V::load(x).store_n(p, n); }

  static void add(const S* a, const S* b, S* out) { (V::load(a) + V::load(b)).store(out); }
  static void subtract(const S* a, const S* b, S* out) { (V::load(a) - V::load(b)).store(out); }
  static void multiply(const S* a, const S* b, S* out) { (V::load(a) * V::load(b)).store(out); }
  static void divide(const S* a, const S* b, S* out) { (V::load(a) / V::load(b)).store(out); }
  static void max(const S* a, const S* b, S* out) { simd::max(V::load(a), V::load(b)).store(out); }
  static void min(const S* a, const S* b, S* out) { simd::min(V::load(a), V::load(b)).store(out); }
  static void copy_sign(const S* a, const S* b, S* out) { simd::copy_sign(V::load(a), V::load(b)).store(out); }
  static void less(const S* a, const S* b, S* out) {
    simd::select(V::load(a) < V::load(b), V::set1(1), V::zero()).store(out);
  }
  static void less_equal(const S* a, const S* b, S* out) {
    simd::select(V::load(a) <= V::load(b), V::set1(1), V::zero()).store(out);
  }
  static void equal(const S* a, const S* b, S* out) {
    simd::select(V::load(a) == V::load(b), V::set1(1), V::zero()).store(out);
  }
  static void scale_pow2(const S* a, const S* b, S* out) { simd::scale_pow2(V::load(a), V::load(b)).store(out); }
  static void fma(const S* a, const S* b, const S* c, S* out) {
    simd::fma(V::load(a), V::load(b), V::load(c)).store(out);
  }
  static void sqrt(const S* a, S* out) { simd::sqrt(V::load(a)).store(out); }
  static void abs(const S* a, S* out) { simd::abs(V::load(a)).store(out); }
  static void round(const S* a, S* out) { simd::round(V::load(a)).store(out); }
  static void blend_n(int64_t n, const S* a, const S* b, S* out) {
    simd::blend_n(n, V::load(a), V::load(b)).store(out);
  }
  static void select_less(const S* a, const S* b, const S* x, const S* y, S* out) {
    simd::select(V::load(a) < V::load(b), V::load(x), V::load(y)).store(out);
  }
  static bool any_less(const S* a, const S* b) { return simd::any(V::load(a) < V::load(b)); }
  static S hsum(const S* a) { return simd::hsum(V::load(a)); }
  static S hmax(const S* a) { return simd::hmax(V::load(a)); }
  static void hsum_each(const S* rows, S* out) {
    V v[V::kLanes];
    for (int i = 0; i < V::kLanes; ++i) v[i] = V::load(rows + i * V::kLanes);
    simd::hsum_each(v).store(out);
  }
  static void hmax_each(const S* rows, S* out) {
    V v[V::kLanes];
    for (int i = 0; i < V::kLanes; ++i) v[i] = V::load(rows + i * V::kLanes);
    simd::hmax_each(v).store(out);
  }
  static void transpose(const S* rows, S* out) {
    V v[V::kLanes];
    for (int i = 0; i < V::kLanes; ++i) v[i] = V::load(rows + i * V::kLanes);
    simd::transpose(v);
    for (int i = 0; i < V::kLanes; ++i) v[i].store(out + i * V::kLanes);
  }

  static void load_transposed(const void* const* rows, int64_t offset, S* out) {
    V v[V::kLanes];
    simd::load_transposed(rows, offset, v);
    for (int i = 0; i < V::kLanes; ++i) v[i].store(out + i * V::kLanes);
  }

  static constexpr VerbTable<S> table() {
    return {V::kLanes, exp2,       exp2_short, exp2_bf16, exp,       tanh,      tanh_short,     erf,
            zero,      set1,       iota,       load,      load_n,    store,     store_n,        add,
            subtract,  multiply,   divide,     max,       min,       copy_sign, less,           less_equal,
            equal,     scale_pow2, fma,        sqrt,      abs,       round,     blend_n,        select_less,
            any_less,  hsum,       hmax,       hsum_each, hmax_each, transpose, load_transposed};
  }
};

using simd::F32;

void load_bf16(const bf16* p, float* out) { F32::load(p).store(out); }
void load_n_bf16(const bf16* p, int64_t n, float* out) { F32::load_n(p, n).store(out); }
void store_bf16(const float* x, bf16* p) { F32::load(x).store(p); }
void store_n_bf16(const float* x, bf16* p, int64_t n) { F32::load(x).store_n(p, n); }
void load_f16(const f16* p, float* out) { F32::load(p).store(out); }
void load_n_f16(const f16* p, int64_t n, float* out) { F32::load_n(p, n).store(out); }
void store_f16(const float* x, f16* p) { F32::load(x).store(p); }
void store_n_f16(const float* x, f16* p, int64_t n) { F32::load(x).store_n(p, n); }
void nibbles(const uint32_t* words, float* out) {
  const simd::Words w = simd::Words::load(words);
  OPST_UNROLL for (int i = 0; i < 8; ++i) simd::nibble(w, i).store(out + i * F32::kLanes);
}
void nibbles_minus_8(const uint32_t* words, float* out) {
  const simd::Words w = simd::Words::load(words);
  OPST_UNROLL for (int i = 0; i < 8; ++i) simd::nibble<8>(w, i).store(out + i * F32::kLanes);
}
void fields5_minus_16(const uint32_t* words, const uint32_t* high, float* out) {
  const simd::Words w = simd::Words::load(words), h = simd::Words::load(high);
  OPST_UNROLL for (int i = 0; i < 8; ++i) simd::field5<16>(w, h, i).store(out + i * F32::kLanes);
}
void fields6_minus_32(const uint32_t* words, const uint32_t* high, float* out) {
  const simd::Words w = simd::Words::load(words), h = simd::Words::load(high);
  OPST_UNROLL for (int i = 0; i < 8; ++i) simd::field6<32>(w, h, i).store(out + i * F32::kLanes);
}
void shifted_nibbles(const uint32_t* words, float* out) {
  const simd::Words w = simd::Words::load(words);
  for (int i = 0; i < 8; ++i) simd::nibble(w >> 4 * i, 0).store(out + i * F32::kLanes);
}
void signed_bytes(const uint32_t* words, float* out) {
  const simd::Words w = simd::Words::load(words);
  OPST_UNROLL for (int i = 0; i < 4; ++i) simd::signed_byte(w, i).store(out + i * F32::kLanes);
}
void load_i8(const int8_t* p, float* out) { simd::load_i8(p).store(out); }
void load_i4(const uint8_t* p, int64_t n, float* out) {
  (n == F32::kLanes ? simd::load_stored<F32>(p) : simd::load_stored_n<F32>(p, n)).store(out);
}
template <class T>
void load_f8(const T* p, int64_t n, float* out) {
  (n == F32::kLanes ? simd::load_f8(p) : simd::load_f8_n(p, n)).store(out);
}
template <class T>
void store_f8(const float* x, int64_t n, T* p) {
  if (n == F32::kLanes) return simd::store_f8(F32::load(x), p);
  simd::store_f8_n(F32::load(x), p, n);
}

void load_words(const uint32_t* p, float* low, float* high) {
  const simd::Bf16Words words = simd::Bf16Words::load(p);
  words.low().store(low);
  words.high().store(high);
}
void load_n_words(const uint32_t* p, int64_t n, float* low, float* high) {
  const simd::Bf16Words words = simd::Bf16Words::load_n(p, n);
  words.low().store(low);
  words.high().store(high);
}

#if defined(__AVX512F__)
void interleave_words(const bf16* even, const bf16* odd, int64_t n, bool has_odd, uint32_t* out) {
  simd::interleave_words(even, odd, n, has_odd, out);
}
#endif
#if defined(__AVX512BF16__)
void dot_pairs(const float* acc, const uint32_t* a, const uint32_t* b, uint32_t repeated_b, float* out) {
  const F32 sum = simd::dot_pairs(F32::load(acc), simd::Bf16Words::load(a), simd::Bf16Words::load(b));
  simd::dot_pairs(sum, simd::Bf16Words::load(a), simd::Bf16Words::set1(repeated_b)).store(out);
}
void store_bf16_fast(const float* x, bf16* p) { simd::store_bf16_fast(F32::load(x), F32::load(x + F32::kLanes), p); }
#endif

void select_bits(uint32_t bits, const float* a, const float* b, float* out) {
  simd::select_bits(bits, F32::load(a), F32::load(b)).store(out);
}
uint32_t bits_of_bytes(const uint8_t* p, int64_t n) { return simd::bits_of_bytes<F32>(p, n); }
void philox_bits(const uint32_t* key, const uint32_t* counter, uint32_t c0, int64_t groups, uint32_t last_kept,
                 uint32_t* bits) {
  simd::philox_bits({{key[0], key[1]}, {counter[0], counter[1], counter[2]}}, c0, groups, last_kept, bits);
}
void philox_words(const uint32_t* key, const uint32_t* counter, uint32_t c0, uint32_t* words) {
  uint32_t w[4];
  simd::philox_words({{key[0], key[1]}, {counter[0], counter[1], counter[2]}}, c0, w);
  for (int i = 0; i < 4; ++i) words[i] = w[i];
}
constexpr BitTable bit_table() { return {select_bits, bits_of_bytes, philox_bits, philox_words}; }

constexpr StorageTable storage_table() {
  StorageTable t = {load_bf16,        load_n_bf16,      store_bf16,       store_n_bf16,      load_f16,
                    load_n_f16,       store_f16,        store_n_f16,      nibbles,           nibbles_minus_8,
                    fields5_minus_16, fields6_minus_32, shifted_nibbles,  signed_bytes,      load_i8,
                    load_i4,          load_f8<f8_e4m3>, load_f8<f8_e5m2>, store_f8<f8_e4m3>, store_f8<f8_e5m2>,
                    load_words,       load_n_words,     nullptr,          nullptr,           nullptr};
#if defined(__AVX512F__)
  t.interleave_words = interleave_words;
#endif
#if defined(__AVX512BF16__)
  t.dot_pairs = dot_pairs;
  t.store_bf16_fast = store_bf16_fast;
#endif
  return t;
}

#if !defined(__AVX2__)
constexpr VerbTable<double> kF64 = Verbs<simd::F64>::table();
#endif

}  // namespace

extern const LevelTables kTables;
#if defined(__AVX2__)
constinit const LevelTables kTables = {Verbs<F32>::table(), storage_table(), bit_table(), nullptr};
#else
constinit const LevelTables kTables = {Verbs<F32>::table(), storage_table(), bit_table(), &kF64};
#endif

}  // namespace opst::OPST_ISA_NS::simd_test

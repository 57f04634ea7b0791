// Every verb of src/simd as a function on arrays, one table per instruction set level, for simd_test alone.
#pragma once

#include <cstdint>

#include "opst/dtype.h"

namespace opst::simd_test {

template <class S>
using Map = void (*)(const S* x, S* out, int64_t n);  // any n; tails through load_n and store_n

// Below, `lanes` values at a and b; comparisons give 1 or 0.
template <class S>
struct VerbTable {
  int lanes;

  Map<S> exp2, exp2_short, exp2_bf16, exp, tanh, tanh_short, erf;

  void (*zero)(S* out);
  void (*set1)(S x, S* out);
  void (*iota)(S* out);
  void (*load)(const S* p, S* out);
  void (*load_n)(const S* p, int64_t n, S* out);
  void (*store)(const S* x, S* p);
  void (*store_n)(const S* x, S* p, int64_t n);

  using Binary = void (*)(const S* a, const S* b, S* out);
  Binary add, subtract, multiply, divide, max, min, copy_sign, less, less_equal, equal, scale_pow2;
  void (*fma)(const S* a, const S* b, const S* c, S* out);
  using Unary = void (*)(const S* a, S* out);
  Unary sqrt, abs, round;
  void (*blend_n)(int64_t n, const S* a, const S* b, S* out);
  void (*select_less)(const S* a, const S* b, const S* x, const S* y, S* out);  // a < b ? x : y
  bool (*any_less)(const S* a, const S* b);
  S (*hsum)(const S* a);
  S (*hmax)(const S* a);
  void (*hsum_each)(const S* rows, S* out);  // [lanes][lanes]
  void (*hmax_each)(const S* rows, S* out);
  void (*transpose)(const S* rows, S* out);  // [lanes][lanes]
  void (*load_transposed)(const void* const* rows, int64_t offset, S* out);
};

// Bits and random bits, at f32 levels.
struct BitTable {
  // Lane i of a where bit i is set, else of b; bit i set where byte i is not 0.
  void (*select_bits)(uint32_t bits, const float* a, const float* b, float* out);
  uint32_t (*bits_of_bytes)(const uint8_t* p, int64_t n);
  void (*philox_bits)(const uint32_t* key, const uint32_t* counter, uint32_t c0, int64_t groups, uint32_t last_kept,
                      uint32_t* bits);
  void (*philox_words)(const uint32_t* key, const uint32_t* counter, uint32_t c0, uint32_t* words);
};

// 16-bit storage and small integers, at f32 levels.
struct StorageTable {
  void (*load_bf16)(const bf16* p, float* out);
  void (*load_n_bf16)(const bf16* p, int64_t n, float* out);
  void (*store_bf16)(const float* x, bf16* p);
  void (*store_n_bf16)(const float* x, bf16* p, int64_t n);
  void (*load_f16)(const f16* p, float* out);
  void (*load_n_f16)(const f16* p, int64_t n, float* out);
  void (*store_f16)(const float* x, f16* p);
  void (*store_n_f16)(const float* x, f16* p, int64_t n);
  void (*nibbles)(const uint32_t* words, float* out);  // [8][lanes], and so below
  void (*nibbles_minus_8)(const uint32_t* words, float* out);
  void (*fields5_minus_16)(const uint32_t* words, const uint32_t* high, float* out);
  void (*fields6_minus_32)(const uint32_t* words, const uint32_t* high, float* out);
  void (*shifted_nibbles)(const uint32_t* words, float* out);  // of words >> 4 * i: field 0
  void (*signed_bytes)(const uint32_t* words, float* out);     // [4][lanes]
  void (*load_i8)(const int8_t* p, float* out);
  void (*load_i4)(const uint8_t* p, int64_t n, float* out);    // n lanes, an even number, or all
  void (*load_e4m3)(const f8_e4m3* p, int64_t n, float* out);  // n lanes, or all
  void (*load_e5m2)(const f8_e5m2* p, int64_t n, float* out);
  void (*store_e4m3)(const float* x, int64_t n, f8_e4m3* p);
  void (*store_e5m2)(const float* x, int64_t n, f8_e5m2* p);
  void (*load_words)(const uint32_t* p, float* low, float* high);  // Bf16Words
  void (*load_n_words)(const uint32_t* p, int64_t n, float* low, float* high);
  // Null below the levels that have them.
  void (*interleave_words)(const bf16* even, const bf16* odd, int64_t n, bool has_odd, uint32_t* out);
  void (*dot_pairs)(const float* acc, const uint32_t* a, const uint32_t* b, uint32_t repeated_b, float* out);
  void (*store_bf16_fast)(const float* x, bf16* p);  // 2 * lanes values
};

struct LevelTables {
  VerbTable<float> f32;
  StorageTable storage;
  BitTable bits;
  const VerbTable<double>* f64;  // null: the level has no doubles
};

}  // namespace opst::simd_test

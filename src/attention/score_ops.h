// ScoreOps: what ScoreRules say, applied to one row of scores at a time. The one definition for every kernel: packed
// tiles, keys in place, panel32 pages and the backward pass.
//
// Computes   shape          raw scores -> S, in place; on request dY/dZ = 1 - (Y / softcap)^2, the softcap's derivative
//            hide           scores of hidden keys, and padding, -> -inf; the row's maxima
//            keep           one bit per key: whether dropout keeps its weight
//            drop           weights that dropout does not keep -> 0
//            bias_hides     whether the bias of one key is -inf
//            contributes    whether the value of one key reaches the row
// Shapes     a row is `width` scores, whole vectors, of keys from first_key on; the first `count` are keys, the rest is
//            padding. No mask, bias or drop_mask is read beyond the keys.
// Memory     the row stays in L1; masks and biases are read once, through their strides.
// Numerics   Y, alibi and bias are added in the accumulator type. -inf added to a NaN or +inf stays NaN.
#pragma once

#include "attention/kernels.h"
#include "simd/math.h"
#include "simd/philox.h"

namespace opst::OPST_ISA_NS::attention {

// What kernels share with their callers, for all of the room's kernels.
using namespace opst::attention;

// visit(T()) for the type of elements that are stored: f64 meets kernels of S = double, and no other type does.
template <class S, class Visit>
OPST_INLINE void with_type(DType dtype, const Visit& visit) {
  if constexpr (sizeof(S) == 8) {
    visit(double());
  } else if (dtype == DType::f32) {
    visit(float());
  } else if (dtype == DType::bf16) {
    visit(bf16());
  } else {
    visit(f16());
  }
}

// exp2 as exact as the words of P need.
template <class P>
OPST_INLINE typename P::V exponential(typename P::V x) {
  if constexpr (P::kStep == 1)
    return simd::exp2_short(x);
  else
    return simd::exp2_bf16(x);
}

// One bit per key of a row: bit j is key first_key + j.
struct KeepBits {
  static constexpr int64_t kMaxKeys = 4096 + 64;  // of a tile
  uint32_t words[kMaxKeys / 32 + 3];
  int shift;  // of bit 0

  // Bits j to j + 31.
  OPST_INLINE uint32_t at(int64_t j) const {
    const int64_t bit = j + shift;
    uint64_t two;
    __builtin_memcpy(&two, words + bit / 32, 8);
    return static_cast<uint32_t>(two >> (bit % 32));
  }
};

template <class V>
struct ScoreOps {
  using S = typename V::Scalar;
  static constexpr int kLanes = V::kLanes;

  // Elements p[0], p[stride], ... ; 0 beyond n of them.
  template <class T>
  static OPST_INLINE V load_strided(const T* p, int64_t stride, int64_t n) {
    if (stride == 1) return n >= kLanes ? V::load(p) : V::load_n(p, n);
    T lanes[kLanes] = {};
    for (int64_t i = 0; i < n; ++i) lanes[i] = p[i * stride];
    return V::load(lanes);
  }

  // row[j] = factor row[j] + bias_scale bias[j]
  template <class T>
  static OPST_INLINE void add_bias(const T* bias, int64_t stride, S scale, int64_t count, int64_t width, S factor,
                                   S* row) {
    const V by = V::set1(scale), times = V::set1(factor);
    for (int64_t j = 0; j < width; j += kLanes) {
      const V b = load_strided(bias + j * stride, stride, simd::clamp_lanes<V>(count - j));
      simd::fma(V::load(row + j), times, b * by).store(row + j);
    }
  }
  static OPST_INLINE void add_bias(const ScoreRules& o, const RowRules& w, int64_t first_key, int64_t count,
                                   int64_t width, S factor, S* row) {
    const int64_t stride = o.bias_stride;
    with_type<S>(o.bias_dtype, [&](auto zero) OPST_INLINE_LAMBDA {
      const auto* bias = static_cast<const decltype(zero)*>(w.bias) + first_key * stride;
      add_bias(bias, stride, static_cast<S>(o.bias_scale), count, width, factor, row);
    });
  }

  // Fetches the mask and bias of 32 keys from `key` on.
  static OPST_INLINE void prefetch(const ScoreRules& o, const RowRules& w, int64_t key) {
    if (o.has_mask) __builtin_prefetch(w.mask + key * o.mask_stride);
    if (o.has_bias) {
      const int64_t size = o.bias_dtype == DType::f64 ? 8 : o.bias_dtype == DType::f32 ? 4 : 2;
      const char* bias = static_cast<const char*>(w.bias) + key * o.bias_stride * size;
      __builtin_prefetch(bias);
      if (size == 4) __builtin_prefetch(bias + 64);
    }
  }

  // Raw scores -> S. `cap_slope` [width], or null: receives dY/dZ.
  static OPST_NOINLINE void shape(const ScoreRules& o, const RowRules& w, int64_t first_key, int64_t count,
                                  int64_t width, S* row, S* cap_slope) {
    if (!o.natural) return;
    S factor = static_cast<S>(o.score_scale);
    if (o.softcap > 0) {
      const V cap = V::set1(static_cast<S>(o.softcap)), scale = V::set1(static_cast<S>(o.score_scale / o.softcap));
      for (int64_t j = 0; j < width; j += kLanes) {
        const V t = simd::tanh_short(V::load(row + j) * scale);
        if (cap_slope != nullptr) (V::set1(1) - t * t).store(cap_slope + j);
        (t * cap).store(row + j);
      }
      factor = 1;
    }
    if (o.has_alibi) {
      const V slope = V::set1(static_cast<S>(-w.slope)), times = V::set1(factor);
      V distance = V::set1(static_cast<S>(first_key - w.position)) + V::iota();
      const V step = V::set1(static_cast<S>(kLanes));
      for (int64_t j = 0; j < width; j += kLanes, distance = distance + step) {
        V d = simd::abs(distance);
        if (o.alibi_square_root) d = simd::sqrt(d);
        simd::fma(V::load(row + j), times, d * slope).store(row + j);
      }
      factor = 1;
    }
    if (o.has_bias) {
      add_bias(o, w, first_key, count, width, factor, row);
    } else if (factor != 1) {
      const V times = V::set1(factor);
      for (int64_t j = 0; j < width; j += kLanes) (V::load(row + j) * times).store(row + j);
    }
  }

  // Scores outside columns [begin, end) and not below the prefix, of keys that the mask hides, and of padding become
  // -inf. Returns the maxima of each lane.
  static OPST_NOINLINE V hide(const ScoreRules& o, const RowRules& w, int64_t first_key, int64_t count, int64_t width,
                              int64_t begin, int64_t end, S* row) {
    const V hidden = V::set1(-__builtin_inff());
    if (end > count) end = count;
    int64_t below = o.prefix - first_key;
    if (below > count) below = count;
    V top = hidden;
    for (int64_t j = 0; j < width; j += kLanes) {
      const V raw = V::load(row + j);
      V s = raw;
      if (end - j < kLanes || begin > j) {
        s = simd::blend_n(simd::clamp_lanes<V>(end - j), s, hidden);
        s = simd::blend_n(simd::clamp_lanes<V>(begin - j), hidden, s);
        if (below > j) s = simd::blend_n(simd::clamp_lanes<V>(below - j), raw, s);
      }
      if (o.has_mask) s = simd::select_bits(mask_bits(o, w, first_key + j, simd::clamp_lanes<V>(count - j)), s, hidden);
      s.store(row + j);
      top = simd::max(top, s);
    }
    return top;
  }
  static OPST_INLINE uint32_t mask_bits(const ScoreRules& o, const RowRules& w, int64_t key, int64_t n) {
    const uint8_t* p = w.mask + key * o.mask_stride;
    if (o.mask_stride == 1) return simd::bits_of_bytes<V>(p, n);
    uint8_t bytes[kLanes] = {};
    for (int64_t i = 0; i < n; ++i) bytes[i] = p[i * o.mask_stride];
    return simd::bits_of_bytes<V>(bytes, kLanes);
  }

  static OPST_INLINE simd::PhiloxStream stream(const ScoreRules& o, const RowRules& w) {
    return {{o.seed[0], o.seed[1]}, {w.query, w.head, o.offset}};
  }
  // Which of keys first_key to first_key + count - 1 dropout keeps.
  static OPST_NOINLINE void keep(const ScoreRules& o, const RowRules& w, int64_t first_key, int64_t count,
                                 KeepBits& bits) {
    if (o.keep_below > 0) {
      const int64_t first = o.first_key + first_key;
      bits.shift = static_cast<int>(first % 4);
      simd::philox_bits(stream(o, w), static_cast<uint32_t>(first / 4), (bits.shift + count + 31) / 32,
                        static_cast<uint32_t>(o.keep_below - 1), bits.words);
      return;
    }
    const int64_t first = w.drop_bit + first_key;
    bits.shift = static_cast<int>(first % 8);
    __builtin_memcpy(bits.words, o.drop_mask + first / 8, static_cast<size_t>((bits.shift + count + 7) / 8));
  }

  // Weights of keys that are not kept become 0: f32 (f64) weights, or bf16 ones.
  static OPST_INLINE void drop(const KeepBits& bits, int64_t width, S* weights) {
    for (int64_t j = 0; j < width; j += kLanes) {
      simd::select_bits(bits.at(j), V::load(weights + j), V::zero()).store(weights + j);
    }
  }
#if defined(__AVX512BF16__)
  static OPST_INLINE void drop(const KeepBits& bits, int64_t width, bf16* weights) {
    for (int64_t j = 0; j < width; j += 32) simd::keep_bf16(weights + j, bits.at(j));
  }
#endif

  // Whether the bias of key `key` is -inf: it hides the key unless the score is NaN or +inf, and the sum NaN.
  static OPST_NOINLINE bool bias_hides(const ScoreRules& o, const RowRules& w, int64_t key) {
    S s[kLanes] = {};
    add_bias(o, w, key, 1, kLanes, 0, s);
    return s[0] == -__builtin_inff();
  }

  // Whether key `key` reaches the row: shown by the structure (the row's interval is [begin, end)), by the mask and by
  // the bias, and kept by dropout. Slow: for rows that must be summed one key at a time.
  static OPST_NOINLINE bool contributes(const ScoreRules& o, const RowRules& w, int64_t key, int64_t begin,
                                        int64_t end) {
    if ((key < begin || key >= end) && key >= o.prefix) return false;
    if (o.has_mask && w.mask[key * o.mask_stride] == 0) return false;
    if (o.has_bias && bias_hides(o, w, key)) return false;
    if (!o.drops()) return true;
    KeepBits bits;
    keep(o, w, key, 1, bits);
    return (bits.at(0) & 1u) != 0;
  }
};

}  // namespace opst::OPST_ISA_NS::attention

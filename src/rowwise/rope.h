// Computes   (a, b) -> (a cos - b sin, a sin + b cos) for the first 2 * half elements of each head, inverse with -sin;
//            the other elements are copied
// Shapes     x, out [num_heads, head_dim]; cos, sin [half]
// Loop nest  for each head; for each vector of pairs
// Memory     everything streams; the angles stay in L1
// Numerics   f32; each product rounded, then the sum
#pragma once

#include "rowwise/row_verbs.h"

namespace opst::OPST_ISA_NS::rowwise {

// Lanes 1, 0, 3, 2, ..; each lane of the first half twice, of the second half twice.
template <int... kLane>
struct PairLanes {
  static constexpr int kHalf = sizeof...(kLane) / 2;
  static OPST_INLINE F32 swapped(F32 x) { return {__builtin_shufflevector(x.v, x.v, (kLane ^ 1)...)}; }
  static OPST_INLINE F32 double_low(F32 x) { return {__builtin_shufflevector(x.v, x.v, (kLane / 2)...)}; }
  static OPST_INLINE F32 double_high(F32 x) { return {__builtin_shufflevector(x.v, x.v, (kHalf + kLane / 2)...)}; }
};
#if defined(__AVX512F__)
using Pairs = PairLanes<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>;
#elif defined(__AVX2__)
using Pairs = PairLanes<0, 1, 2, 3, 4, 5, 6, 7>;
#else
using Pairs = PairLanes<0, 1, 2, 3>;
#endif

// Even lanes negated.
OPST_INLINE F32 alternate_signs(F32 x) {
  static constexpr float kSigns[16] = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
  return x * F32::load(kSigns);
}

// Pairs side by side: x cos + swapped x times -sin, sin.
template <class T>
OPST_INLINE void turn_pairs(ConstRow x, Row out, int64_t begin, int64_t length, F32 cos, F32 sin) {
  if (begin >= length) return;
  const F32 v = load<T>(x, begin, length);
  store<T>(v * cos + Pairs::swapped(v) * alternate_signs(sin), out, begin, length);
}

template <class T>
void rope(const RopeToken& token) {
  const int64_t half = token.half, x_stride = token.x.stride, out_stride = token.out.stride;
  const F32 direction = F32::set1(token.inverse ? -1.0f : 1.0f);
  for (int64_t head = 0; head < token.num_heads; ++head) {
    const T* const x = static_cast<const T*>(token.x.data) + head * token.x_head_stride;
    T* const out = static_cast<T*>(token.out.data) + head * token.out_head_stride;
    const ConstRow xa{x, x_stride}, xb{x + half * x_stride, x_stride};
    const Row out_a{out, out_stride}, out_b{out + half * out_stride, out_stride};
    for (int64_t i = 0; i < half; i += F32::kLanes) {
      const F32 cos = load<float>(token.cos, i, half);
      const F32 sin = load<float>(token.sin, i, half) * direction;
      if (token.pairs) {
        turn_pairs<T>(xa, out_a, 2 * i, 2 * half, Pairs::double_low(cos), Pairs::double_low(sin));
        turn_pairs<T>(xa, out_a, 2 * i + F32::kLanes, 2 * half, Pairs::double_high(cos), Pairs::double_high(sin));
      } else {
        const F32 a = load<T>(xa, i, half), b = load<T>(xb, i, half);
        store<T>(a * cos - b * sin, out_a, i, half);
        store<T>(a * sin + b * cos, out_b, i, half);
      }
    }
    // Bit for bit: elements that do not turn are not rounded.
    if (x == out) continue;
    for (int64_t i = 2 * half; i < token.head_dim; ++i) out[i * out_stride] = x[i * x_stride];
  }
}

}  // namespace opst::OPST_ISA_NS::rowwise

// Computes   (a, b) -> (a cos - b sin, a sin + b cos) for the first 2 * half elements of each head, inverse with -sin;
//            the other elements are copied
// Shapes     x, out [num_heads, head_dim]; cos, sin [half]
// Loop nest  for each head; for each vector of pairs
// Memory     everything streams; the angles stay in L1
// Numerics   f32; each product rounded, then the sum
#pragma once

#include "rowwise/row_verbs.h"

namespace opst::OPST_ISA_NS::rowwise {

using opst::rowwise::RopeToken;

// Row + begin elements.
template <class T>
OPST_INLINE ConstRow at(ConstRow row, int64_t begin) {
  return {static_cast<const T*>(row.data) + begin, row.stride};
}
template <class T>
OPST_INLINE Row at(Row row, int64_t begin) {
  return {static_cast<T*>(row.data) + begin, row.stride};
}

// Lanes 1, 0, 3, 2, ..; each lane of the first half twice, of the second half twice.
#if defined(__AVX512F__)
OPST_INLINE F32 swap_pairs(F32 x) {
  return {__builtin_shufflevector(x.v, x.v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)};
}
OPST_INLINE F32 double_low(F32 x) {
  return {__builtin_shufflevector(x.v, x.v, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7)};
}
OPST_INLINE F32 double_high(F32 x) {
  return {__builtin_shufflevector(x.v, x.v, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15)};
}
#elif defined(__AVX2__)
OPST_INLINE F32 swap_pairs(F32 x) { return {__builtin_shufflevector(x.v, x.v, 1, 0, 3, 2, 5, 4, 7, 6)}; }
OPST_INLINE F32 double_low(F32 x) { return {__builtin_shufflevector(x.v, x.v, 0, 0, 1, 1, 2, 2, 3, 3)}; }
OPST_INLINE F32 double_high(F32 x) { return {__builtin_shufflevector(x.v, x.v, 4, 4, 5, 5, 6, 6, 7, 7)}; }
#else
OPST_INLINE F32 swap_pairs(F32 x) { return {__builtin_shufflevector(x.v, x.v, 1, 0, 3, 2)}; }
OPST_INLINE F32 double_low(F32 x) { return {__builtin_shufflevector(x.v, x.v, 0, 0, 1, 1)}; }
OPST_INLINE F32 double_high(F32 x) { return {__builtin_shufflevector(x.v, x.v, 2, 2, 3, 3)}; }
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
  store<T>(v * cos + swap_pairs(v) * alternate_signs(sin), out, begin, length);
}

template <class T>
OPST_INLINE void turn_halves(ConstRow xa, ConstRow xb, Row out_a, Row out_b, int64_t i, int64_t half, F32 cos,
                             F32 sin) {
  const F32 a = load<T>(xa, i, half), b = load<T>(xb, i, half);
  store<T>(a * cos - b * sin, out_a, i, half);
  store<T>(a * sin + b * cos, out_b, i, half);
}

template <class T>
void rope(const RopeToken& token) {
  const int64_t half = token.half;
  const F32 direction = F32::set1(token.inverse ? -1.0f : 1.0f);
  for (int64_t head = 0; head < token.num_heads; ++head) {
    const ConstRow x = at<T>(token.x, head * token.x_head_stride);
    const Row out = at<T>(token.out, head * token.out_head_stride);
    for (int64_t i = 0; i < half; i += F32::kLanes) {
      const F32 cos = load<float>(token.cos, i, half);
      const F32 sin = load<float>(token.sin, i, half) * direction;
      if (token.pairs) {
        turn_pairs<T>(x, out, 2 * i, 2 * half, double_low(cos), double_low(sin));
        turn_pairs<T>(x, out, 2 * i + F32::kLanes, 2 * half, double_high(cos), double_high(sin));
      } else {
        turn_halves<T>(x, at<T>(x, half * x.stride), out, at<T>(out, half * out.stride), i, half, cos, sin);
      }
    }
    // Bit for bit: elements that do not turn are not rounded.
    if (x.data == out.data) continue;
    for (int64_t i = 2 * half; i < token.head_dim; ++i) {
      static_cast<T*>(out.data)[i * out.stride] = static_cast<const T*>(x.data)[i * x.stride];
    }
  }
}

}  // namespace opst::OPST_ISA_NS::rowwise

// Computes   (a, b) -> (a cos - b sin, a sin + b cos) for the first 2 * half elements of each head; copies the others
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

struct TurningPair {
  F32 a, b;
};
OPST_INLINE TurningPair turn(TurningPair x, F32 cos, F32 sin) { return {x.a * cos - x.b * sin, x.a * sin + x.b * cos}; }

// Elements 2i and 2i + 1 for i in [begin, begin + kLanes), zero from pair `half` on.
template <class T>
OPST_INLINE TurningPair load_pairs(ConstRow x, int64_t begin, int64_t half) {
  constexpr int kLanes = F32::kLanes;
  float mixed[2 * kLanes], a[kLanes], b[kLanes];
  load<T>(x, 2 * begin, 2 * half).store(mixed);
  if (2 * begin + kLanes < 2 * half) {
    load<T>(x, 2 * begin + kLanes, 2 * half).store(mixed + kLanes);
  } else {
    F32::zero().store(mixed + kLanes);
  }
  for (int i = 0; i < kLanes; ++i) a[i] = mixed[2 * i], b[i] = mixed[2 * i + 1];
  return {F32::load(a), F32::load(b)};
}
template <class T>
OPST_INLINE void store_pairs(TurningPair x, Row out, int64_t begin, int64_t half) {
  constexpr int kLanes = F32::kLanes;
  float mixed[2 * kLanes], a[kLanes], b[kLanes];
  x.a.store(a);
  x.b.store(b);
  for (int i = 0; i < kLanes; ++i) mixed[2 * i] = a[i], mixed[2 * i + 1] = b[i];
  store<T>(F32::load(mixed), out, 2 * begin, 2 * half);
  if (2 * begin + kLanes < 2 * half) store<T>(F32::load(mixed + kLanes), out, 2 * begin + kLanes, 2 * half);
}

template <class T>
void rope(const RopeToken& token) {
  const int64_t half = token.half;
  for (int64_t head = 0; head < token.num_heads; ++head) {
    const ConstRow x = at<T>(token.x, head * token.x_head_stride);
    const Row out = at<T>(token.out, head * token.out_head_stride);
    for (int64_t i = 0; i < half; i += F32::kLanes) {
      const F32 cos = load<float>(token.cos, i, half);
      const F32 sin = load<float>(token.sin, i, half);
      if (token.pairs) {
        store_pairs<T>(turn(load_pairs<T>(x, i, half), cos, sin), out, i, half);
      } else {
        const TurningPair turned = turn({load<T>(x, i, half), load<T>(at<T>(x, half * x.stride), i, half)}, cos, sin);
        store<T>(turned.a, out, i, half);
        store<T>(turned.b, at<T>(out, half * out.stride), i, half);
      }
    }
    // As bits: what does not turn is not rounded.
    if (x.data == out.data) continue;
    for (int64_t i = 2 * half; i < token.head_dim; ++i) {
      static_cast<T*>(out.data)[i * out.stride] = static_cast<const T*>(x.data)[i * x.stride];
    }
  }
}

}  // namespace opst::OPST_ISA_NS::rowwise

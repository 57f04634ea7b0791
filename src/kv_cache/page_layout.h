// Where an element lies in a page of a KV cache (see include/opst/kv_cache.h). Plain data for kernels.
//
// `norm` has a row of each token and head, addressed by the tensor's strides.
//
// `panel32` has K transposed in panels of 32 rows, so that a vector of keys is one load, and V by rows. A word is one
// f32 or a pair of bf16: two consecutive elements of a key, or the same element of two consecutive values. step =
// elements of a word. Within the block and head that start at strides[0] * block + strides[1] * head, in elements:
//   K [block_size / 32][head_dim / step][32][step]
//     row, d at  (row / 32) * 32 * head_dim + (d / step) * 32 * step + (row % 32) * step + d % step
//   V [block_size / step][value_head_dim][step]
//     row, d at  (row / step) * step * value_head_dim + d * step + row % step
#pragma once

#include <cstdint>

#include "opst/dtype.h"

namespace opst {

inline constexpr int64_t kPanelRows = 32;

// Elements of a word of panel32; no member for a type that panel32 cannot hold.
template <class T>
struct PanelStep {};
template <>
struct PanelStep<float> {
  static constexpr int64_t kValue = 1;
};
template <>
struct PanelStep<bf16> {
  static constexpr int64_t kValue = 2;
};

}  // namespace opst

// Keys whose rope lies apart: rows of both, side by side, as kernels read them.
#pragma once

#include <cstring>
#include <span>

#include "attention/call_heads.h"

namespace opst::attention {

inline void copy_elements(const void* row, int64_t stride, int64_t count, int64_t element_bytes, char* to) {
  const char* from = static_cast<const char*>(row);
  if (stride == 1) {
    std::memcpy(to, from, static_cast<size_t>(count * element_bytes));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * element_bytes, from + i * stride * element_bytes, static_cast<size_t>(element_bytes));
  }
}

// Pointers to `count` keys of a head, in runs: rows of the tensor, which hold their ropes or have none, or where the
// problem copies keys [count][head_dim] at `copies`. Returns the stride of their elements. `ropes`: scratch [count].
inline int64_t locate_keys(const CallHeads& call, int64_t head, std::span<const KeyInterval> runs, int64_t count,
                           const void** ropes, char* copies, const void** pointers) {
  const AttentionProblem& p = call.p;
  const ConstTensor &key = call.in.key, &rope = call.in.key_rope;
  call.kv_rows(key, head).locate(runs, pointers);
  if (!p.copies_keys) return key.strides[3];
  call.kv_rows(rope, head).locate(runs, ropes);
  const int64_t element = size_bytes(p.kv_dtype), key_dim = p.head_dim - p.rope_dim;
  for (int64_t i = 0; i < count; ++i) {
    char* const copy = copies + i * p.head_dim * element;
    copy_elements(pointers[i], key.strides[3], key_dim, element, copy);
    copy_elements(ropes[i], rope.strides[3], p.rope_dim, element, copy + key_dim * element);
    pointers[i] = copy;
  }
  return 1;
}

}  // namespace opst::attention

// Keys as rows that kernels read, where the tensor has none: a rope lies apart, or rows interleave in panels.
#pragma once

#include <span>

#include "attention/call_heads.h"
#include "attention/layout.h"
#include "core/elements.h"

namespace opst::attention {

// Pointers to `count` keys of a head, in runs: rows of the tensor, which hold their ropes or have none, or where the
// problem copies keys [count][head_dim] at `copies`. Returns the stride of their elements. `ropes`: scratch [count], where
// they lie apart.
inline int64_t locate_keys(const CallHeads& call, int64_t head, std::span<const KeyInterval> runs, int64_t count,
                           const void** ropes, char* copies, const void** pointers) {
  const AttentionProblem& p = call.p;
  const ConstTensor &key = call.in.key, &rope = call.in.key_rope;
  call.kv_rows(key, head).locate(runs, pointers);
  if (unpacks_panels(p)) {
    const int64_t bytes = row_bytes(p, p.head_dim);
    for (int64_t i = 0; i < count; ++i, copies += bytes) {
      copy_elements(pointers[i], kPanelRows, copies, 1, bytes, 1);
      pointers[i] = copies;
    }
    return 1;
  }
  if (!p.copies_keys) return key.strides[3];
  call.kv_rows(rope, head).locate(runs, ropes);
  const int64_t element = size_bytes(p.kv_dtype), key_dim = p.head_dim - p.rope_dim;
  for (int64_t i = 0; i < count; ++i) {
    char* const copy = copies + i * p.head_dim * element;
    copy_elements(pointers[i], key.strides[3], copy, 1, key_dim, element);
    copy_elements(ropes[i], rope.strides[3], copy + key_dim * element, 1, p.rope_dim, element);
    pointers[i] = copy;
  }
  return 1;
}

}  // namespace opst::attention

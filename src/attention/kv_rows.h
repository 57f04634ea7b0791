// KvRows: where the keys (or values, or gradients of either) of one sequence for one KV head are, dense or in pages.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/sequences.h"
#include "opst/attention.h"

namespace opst::attention {

struct KvRows {
  const char* base = nullptr;  // key 0, or row 0 of page 0
  // Between keys, or rows of a page; in panel32 pages where whole panels begin.
  int64_t row_bytes = 0;
  int64_t page_bytes = 0;              // paged: between pages
  int64_t block_size = 0;              // paged: rows of a page; 0: dense
  const ConstTensor* table = nullptr;  // paged: the block table, which outlives the rows,
  int64_t sequence = 0;                // and the row of it

  // `tensor`: key or value, or a tensor of the shape of one, as in a call without varlen (uniform_shapes).
  static KvRows of(const ConstTensor& tensor, const AttentionInputs& in, const AttentionProblem& p,
                   const Sequences& sequences, int64_t b, int64_t kv_head) {
    const int64_t size = size_bytes(tensor.dtype);
    KvRows kv;
    const char* data = static_cast<const char*>(tensor.data);
    if (!p.paged) {
      const int64_t start = sequences.key_start(b) * tensor.strides[2];
      kv.base = data + (b * tensor.strides[0] + kv_head * tensor.strides[1] + start) * size;
      kv.row_bytes = tensor.strides[2] * size;
      return kv;
    }
    // Only panels of keys have five dimensions; norm pages of keys and values are alike.
    const PageFormat& format =
        page_format(p.options.page_layout, tensor.dtype, tensor.rank == 5 ? PageSide::key : PageSide::value);
    kv.block_size = p.block_size;
    kv.table = &in.block_table;
    kv.sequence = b;
    kv.base = data + kv_head * tensor.strides[format.heads_dim] * size;
    kv.page_bytes = tensor.strides[0] * size;
    kv.row_bytes = tensor.strides[format.rows_dim] / format.panel_rows * size;
    return kv;
  }

  int64_t page(int64_t index) const { return index_at(*table, sequence, index); }
  int64_t page_of(int64_t key) const { return page(key / block_size); }
  const char* row(int64_t key) const {
    if (block_size == 0) return base + key * row_bytes;
    return base + page_of(key) * page_bytes + key % block_size * row_bytes;
  }
  // How many of keys [key, key + count) lie row_bytes apart, from the first on.
  int64_t run(int64_t key, int64_t count) const {
    return block_size == 0 ? count : std::min(count, block_size - key % block_size);
  }

  // Pointers to every `step`-th of keys [first, first + count). In a page, `step` rows follow one another.
  void locate_groups(int64_t first, int64_t count, int64_t step, const void** groups) const {
    for (int64_t key = first; key < first + count; key += step) *groups++ = row(key);
  }
  // Pointers to keys [first, first + count).
  void locate(int64_t first, int64_t count, const void** rows) const {
    for (int64_t i = 0; i < count;) {
      const char* at = row(first + i);
      for (const int64_t end = i + run(first + i, count - i); i < end; ++i, at += row_bytes) rows[i] = at;
    }
  }
};

}  // namespace opst::attention

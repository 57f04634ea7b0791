// Sparse indices: attention of each query over keys that a list selects. Keys of a sequence are cut into blocks of
// block_size (1: single keys), and each query has a list of the blocks that it reads, in any order:
//
//   block_size = 2, 7 keys      keys   0 1   2 3   4 5   6
//   indices  3  0 -1            row 0  x x   . .   . .   x       blocks 3 and 0
//            1 -1 -1            row 1  . .   x x   . .   .
//           -1 -1 -1            row 2  . .   . .   . .   .       sees no key
//
// indices  i32 [batch, query_len, num_kv_heads, count]; with cu_seqlens_q [total_q, num_kv_heads, count]
//          Entry x is the block of keys x * block_size to x * block_size + block_size - 1 of the query's sequence; its
//          last block may be shorter. Each block stands at most once in a list, which -1 ends: all behind it is -1.
//          Query heads of one KV head share the query's list. lightning_indexer (lightning_indexer.h) makes such lists.
//          Rows behind the last sequence of cu_seqlens_q are not looked at.
//
// A query sees a key where its list and all else that hides keys (lengths, causal masks, windows, bool masks) show it:
// selected keys beyond the causal limit are left out, and a prefix brings no key back. A query whose list shows nothing
// sees no key.
//
// Refused before anything is written: a block beyond the sequence's keys, a block that comes twice, an entry below -1,
// one behind -1. A list and a block_mask do not go together; path = standard takes no list; in panel32 pages, whose
// keys come 32 at a time, block_size must be a multiple of 32.
//
// Time and memory are proportional to the listed keys (with kv_len bits per thread to find those that come twice). Keys
// are read where they lie, once per query and KV head; where many query heads share a list, packed. Where values are the
// first columns of the keys' rows (the same data and strides), these come from memory once. The position of a key
// matters to bool masks, biases, ALiBi and dropout: with any of them the keys of a block are computed apart from those
// of other blocks, which is slow where blocks are short.
//
// Backward (attention_backward.h) takes lists, and ropes apart, which have gradients of their own; of a bias there is no
// gradient with lists. Of values that are columns of the keys grad_key and grad_value are tensors of their own, which the
// caller adds.
//
// Rope apart. With query_rope [batch, num_heads, query_len, rope_dim] and key_rope [batch, num_kv_heads, kv_len,
// rope_dim] (varlen and paged: shaped like query and key) the score is [query | query_rope] . [key | key_rope], and
// softmax_scale defaults to 1 / sqrt(head_dim + rope_dim); head_dim + rope_dim is at most 768. It goes with any
// attention forward over f32, bf16, f16 and f64 keys but panel32 pages. Where key_rope is not the columns behind key's in one tensor, keys are
// copied tile by tile.
//
//   flash_attention_forward(context, {.query = q, .key = k, .value = v, .sparse_indices = {best, 1}}, {.out = o});
//
// Source: DeepSeek-AI, "DeepSeek-V3.2-Exp: Boosting Long-Context Efficiency with DeepSeek Sparse Attention" (2025),
// equation 2; blocks: Yuan et al., "Native Sparse Attention" (2025), section 3.3.2.
#pragma once

#include <cstdint>

#include "opst/tensor.h"

namespace opst {

// Absent where `indices` is a default ConstTensor. Lists of no entries, which need no data, select nothing.
struct SparseIndices {
  ConstTensor indices = {};
  int64_t block_size = 1;  // 1 or a power of two, to 2^30

  explicit operator bool() const { return indices.data != nullptr || indices.rank > 0; }
};

}  // namespace opst

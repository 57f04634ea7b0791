// Builders of block masks (block_mask.h): patterns of sparse attention by name, and from a dense mask.
//
//   Result<BlockMaskBuffer> longformer = make_block_mask(
//       {.query_len = n, .kv_len = n, .causal = true, .window_left = 511, .global = 16});
//   AttentionInputs in = {.query = q, .key = k, .value = v};
//   in.block_mask = longformer.value().mask;
//
// A pattern says which pairs of tokens it shows. Its block mask has every pair of blocks in which it shows one, so a
// query may see more of these blocks than the pattern: options of attention (causal, windows, a bool mask) hide that.
//
// Query i of the pattern is at position p = i + kv_len - query_len (bottom_right) or i (top_left) among the keys. It
// sees key j where any of these shows it, or if none of them is asked for, every key:
//   window    p - window_left <= j <= p + window_right, and p - j a multiple of `dilation`
//   global    j < global, or p < global                       (Longformer: tokens that all see, and that see all)
//   stride    p - j a multiple of `stride`                    (Sparse Transformers)
//   random    j in one of `random` key blocks, drawn anew for each query block and head       (BigBird)
// and where all of these hold, if asked for:
//   causal    j <= p
//   documents j and p in the same [documents[n], documents[n + 1])
//
// The same mask on every machine. Time and memory: proportional to the pairs of blocks, with a dilation or stride beyond
// block_q to that and for each query block to the keys by it. Errors: invalid_argument names the field and its value; out_of_memory.
//
// Source: Child et al., "Generating Long Sequences with Sparse Transformers" (2019); Beltagy et al., "Longformer"
// (2020); Zaheer et al., "Big Bird" (2020); the generator is splitmix64 (Steele et al., 2014).
#pragma once

#include <cstdint>
#include <optional>

#include "opst/attention.h"

namespace opst {

struct BlockPattern {
  int64_t query_len = 0, kv_len = 0;
  int64_t block_q = 64, block_kv = 64;  // >= 1
  int64_t heads = 1;                    // rows of their own, which only random blocks tell apart
  CausalAlignment alignment = CausalAlignment::bottom_right;
  bool causal = false;
  std::optional<int64_t> window_left = {}, window_right = {};  // >= 0; a window if one of them is given, the other 0
  int64_t dilation = 1;
  int64_t global = 0;
  int64_t stride = 0;
  int64_t random = 0;
  uint64_t seed = 0;
  ConstTensor documents = {};  // i32 or i64 [n + 1], not decreasing, 0 to kv_len; absent: one document
};

// A block mask and the memory it is in: i64, row_offsets [batch, heads, query blocks + 1].
struct BlockMaskBuffer {
  Buffer memory;
  BlockMask mask;
};

Result<BlockMaskBuffer> make_block_mask(const BlockPattern& pattern);

// Of a bool mask [query_len, kv_len], [heads, query_len, kv_len] or [batch, heads, query_len, kv_len], not 0 = visible,
// of any strides >= 0. The expanded block mask is the mask itself where the mask is made of whole blocks.
Result<BlockMaskBuffer> block_mask_of(const ConstTensor& mask, int64_t block_q, int64_t block_kv);

}  // namespace opst

// Block masks: attention that costs what it sees. Queries and keys of a sequence are cut into blocks of fixed sizes,
// and a list tells which pairs of a query block and a key block are computed. The list is a CSR matrix:
//
//   block_q = 2, block_kv = 3; 6 queries, 8 keys            row_offsets [1, 1, 4] = 0 2 3 5
//                                                           columns     [5]       = 0 2 1 0 1
//                  keys  0 1 2   3 4 5   6 7
//   queries 0, 1         x x x   . . .   x x      row 0: columns[0], columns[1]
//   queries 2, 3         . . .   x x x   . .      row 1: columns[2]
//   queries 4, 5         x x x   x x x   . .      row 2: columns[3], columns[4]
//
// row_offsets  i32 or i64 [batch or 1, num_heads or num_kv_heads or 1, query blocks + 1]
//              A size of 1 repeats. With num_kv_heads, which may differ from num_heads, all query heads of a KV head
//              share a mask. Query blocks are ceil(query_len / block_q); with cu_seqlens_q, at least those of the
//              longest sequence.
// columns      i32 or i64 [any size]
//              Entries row_offsets[b, h, i] to row_offsets[b, h, i + 1] - 1 are the key blocks that query block i sees,
//              ascending, each once. Rows of several heads may be the same entries.
//
// Query i belongs to query block i / block_q and key j to key block j / block_kv, indices within their sequence, whose
// last blocks may be shorter. Key blocks are ceil(kv_len / block_kv) of the key tensor (with cu_seqlens_k or pages: of
// the longest sequence); those behind a shorter sequence's keys show nothing.
//
// A block mask hides, as a bool mask does: a query sees a key where the block mask, and all else that hides keys, show
// it; a prefix does not bring hidden blocks back. A query block may have no key block: its rows see no key.
//
// Time and memory are proportional to the visible pairs. Blocks of 64 and more are as fast as their share of the dense
// call; of smaller ones the register tiles compute more than is seen: rows 12 at a time, keys 16 or 32. Heads of one KV
// head that have masks of their own are computed together, where some of them see.
#pragma once

#include <cstdint>

#include "opst/tensor.h"

namespace opst {

// Absent where row_offsets has no data.
struct BlockMask {
  ConstTensor row_offsets = {};
  ConstTensor columns = {};
  int64_t block_q = 0, block_kv = 0;  // queries and keys of a block, 1 to 2^56

  explicit operator bool() const { return bool{row_offsets}; }
};

}  // namespace opst

// CallHeads: the (batch, KV head) pairs of a call, forward or backward, and where the rows of each lie in the tensors.
//
// `head` counts the pairs throughout. The query heads of a pair, its group, are stacked: row r is query r / group of
// head r % group. Tensors have the shapes of a call without varlen (uniform_shapes).
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/kernels.h"
#include "attention/kv_blocks.h"
#include "attention/selected_keys.h"
#include "attention/sequences.h"
#include "opst/attention.h"
#include "opst/page_layout.h"

namespace opst::attention {

// Where the keys (or values, or gradients of either) of one sequence for one KV head are, dense or in pages.
struct KvRows {
  const char* base = nullptr;          // key 0, or row 0 of page 0
  int64_t row_bytes = 0;               // between keys, or rows of a page or panel
  int64_t panel_bytes = 0;             // between panels of kPanelRows keys of a page, whose rows interleave; else 0
  int64_t page_bytes = 0;              // paged: between pages
  int64_t block_size = 0;              // paged: rows of a page; 0: dense
  const ConstTensor* table = nullptr;  // paged: the block table, which outlives the rows,
  int64_t sequence = 0;                // and the row of it

  int64_t page_of(int64_t key) const { return index_at(*table, sequence, key / block_size); }
  const char* row(int64_t key) const {
    if (block_size == 0) return base + key * row_bytes;
    const char* const page = base + page_of(key) * page_bytes;
    const int64_t row = key % block_size;
    if (panel_bytes == 0) return page + row * row_bytes;
    return page + row / kPanelRows * panel_bytes + row % kPanelRows * row_bytes;
  }
  // How many of keys [key, key + count) lie row_bytes apart, from the first on.
  int64_t run(int64_t key, int64_t count) const {
    const int64_t together = panel_bytes == 0 ? block_size : kPanelRows;
    return block_size == 0 ? count : std::min(count, together - key % together);
  }
  // Pointers to keys [first, first + count).
  void locate(int64_t first, int64_t count, const void** rows) const {
    for (int64_t i = 0; i < count;) {
      const char* at = row(first + i);
      for (const int64_t end = i + run(first + i, count - i); i < end; ++i, at += row_bytes) rows[i] = at;
    }
  }
  // Of runs of keys, one after the other.
  void locate(std::span<const KeyInterval> runs, const void** rows) const {
    for (const KeyInterval& keys : runs) {
      locate(keys.begin, keys.end - keys.begin, rows);
      rows += keys.end - keys.begin;
    }
  }
};

// Elements between the scales (or offsets) of a row's groups; only panels of keys' have five dimensions.
inline int64_t groups_stride(const ConstTensor& scales) { return scales.rank == 4 ? scales.strides[3] : kPanelRows; }

// Sequences [first, first + count), whose first keys are the same rows of pages (shared_prefix.h).
struct SharedGroup {
  int64_t first, count;
  int64_t keys;
  int64_t first_query, queries;  // of those of all groups, one after the other
};

struct CallHeads {
  const AttentionInputs& in;
  const AttentionProblem& p;
  // Not null: a head is a pair of a group of sequences and a KV head, and its batch is the group's first sequence.
  const SharedGroup* groups = nullptr;
  const Sequences sequences{in, p};
  const int64_t group = p.num_heads / p.num_kv_heads;  // query heads per KV head
  const int64_t heads = p.batch * p.num_kv_heads;

  int64_t batch(int64_t head) const {
    const int64_t index = head / p.num_kv_heads;
    return groups == nullptr ? index : groups[index].first;
  }
  int64_t kv_head(int64_t head) const { return head % p.num_kv_heads; }
  // The query head of a stacked row.
  int64_t query_head(int64_t head, int64_t row) const { return kv_head(head) * group + row % group; }
  int64_t query_rows(int64_t head) const { return sequences.query_len(batch(head)) * group; }

  Visibility visibility(int64_t head) const {
    const int64_t b = batch(head);
    return Visibility::of(p.options, sequences.query_len(b), sequences.kv_len(b), sequences.prefix(b));
  }

  // The rows of the block mask, which the call has, for a head.
  HeadMask head_mask(int64_t head) const {
    const BlockMaskSizes& sizes = p.block_mask;
    const ConstTensor& offsets = in.block_mask.row_offsets;
    HeadMask of = {.mask = &in.block_mask};
    if (sizes.batch > 1) of.offset = batch(head) * offsets.strides[0];
    if (sizes.heads <= 1) return of;
    if (sizes.heads == p.num_heads && group > 1) of.heads = group, of.head_stride = offsets.strides[1];
    of.offset += kv_head(head) * of.heads * offsets.strides[1];
    return of;
  }

  // The tree of draft tokens of a head's sequence, if there is one.
  TreeRows tree_of(int64_t head) const {
    const int64_t b = batch(head);
    if (!sequences.has_tree(b)) return {};
    return {static_cast<const int64_t*>(in.tree_mask.data) + sequences.tree_offset(b),
            in.tree_mask.strides[in.tree_mask.rank - 1], sequences.kv_len(b) - sequences.query_len(b)};
  }

  // The list of a query, where the call has sparse indices.
  IndexList index_list(int64_t head, int64_t query) const {
    const ConstTensor& t = in.sparse_indices.indices;
    const int64_t b = batch(head), row = sequences.query_start(b) + query;
    const int64_t offset = b * t.strides[0] + kv_head(head) * t.strides[1] + row * t.strides[2];
    return {static_cast<const int32_t*>(t.data) + offset, t.strides[3], t.shape[3], in.sparse_indices.block_size};
  }

  // visit(KeyInterval) for what a query sees of its list, until it returns true; whether it has.
  template <class Visit>
  bool any_selected_run(int64_t head, int64_t query, const Visit& visit) const {
    constexpr int64_t kSome = 64;
    KeyInterval runs[kSome];
    const SelectedKeys::Tiles some = {.most_keys = kSome, .by_runs = false, .key_step = 1, .runs = runs, .rows = 1};
    SelectedKeys list(index_list(head, query), visibility(head), query, {0, INT64_MAX}, some);
    for (KvTile tile{}; list.next(&tile, nullptr, nullptr);) {
      for (const KeyInterval& keys : list.runs_of(tile)) {
        if (visit(keys)) return true;
      }
    }
    return false;
  }

  // Rows of key or value, or of a tensor of the shape of one.
  KvRows kv_rows(const ConstTensor& t, int64_t head) const {
    const char* data = static_cast<const char*>(t.data);
    const int64_t b = batch(head), h = kv_head(head), size = size_bytes(t.dtype);
    if (!p.paged) {
      const int64_t offset = b * t.strides[0] + h * t.strides[1] + sequences.key_start(b) * t.strides[2];
      return {.base = data + offset * size, .row_bytes = t.strides[2] * size};
    }
    // Only panels of keys have five dimensions; norm pages of keys and values are alike.
    const PageSide side = t.rank == 5 ? PageSide::key : PageSide::value;
    const PageFormat& format = page_format(p.options.page_layout, t.dtype, side);
    const int64_t rows_stride = t.strides[format.rows_dim];  // of a panel
    const bool panels = format.panel_rows == kPanelRows;
    return {.base = data + h * t.strides[format.heads_dim] * size,
            .row_bytes = panels ? format.step * size : rows_stride / format.panel_rows * size,
            .panel_bytes = panels ? rows_stride * size : 0,
            .page_bytes = t.strides[0] * size,
            .block_size = p.block_size,
            .table = &in.block_table,
            .sequence = b};
  }

  // Rows of query, of a tensor of its shape, or of a statistic. Nothing for a tensor without data.
  StackedRows stacked_rows(const ConstTensor& t, int64_t head) const {
    if (!t) return {};
    const int64_t b = batch(head);
    const int64_t offset =
        b * t.strides[0] + query_head(head, 0) * t.strides[1] + sequences.query_start(b) * t.strides[2];
    // The kernels' struct serves inputs and outputs; inputs are only read through it.
    char* data = const_cast<char*>(static_cast<const char*>(t.data)) + offset * size_bytes(t.dtype);
    return {data, t.dtype, t.strides[2], t.strides[1], t.strides[3], group};
  }
};

}  // namespace opst::attention

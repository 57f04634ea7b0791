// TileRows: how a forward call brings keys and values to the kernels, wherever they lie: pointers to rows or panels, or
// packed tiles. The keys of a tile come in runs of neighbouring ones (KvBlocks and SelectedKeys).
#pragma once

#include <algorithm>
#include <cstring>
#include <span>

#include "attention/call_memory.h"

namespace opst::attention {

struct TileRows : CallMemory {
  using Worker = Layout::Worker;
  using Runs = std::span<const KeyInterval>;

  const Kernels& kernels;
  // Values are the first columns of the keys' rows, in memory or in copies of them: their pointers are one list.
  const bool values_are_keys = plan.kv_access == KvAccess::in_place && in.key.data == in.value.data &&
                               p.value_head_dim <= p.head_dim - p.rope_dim && same_rows(in.key, in.value);

  // Pointers to `count` keys of a head, in runs: rows of the tensor, or copies of them with their rope.
  void locate_keys(int64_t head, Runs runs, int64_t count, const Worker& w, const void** pointers) const {
    kv_rows(in.key, head).locate(runs, pointers);
    if (!p.copies_keys) return;
    kv_rows(in.key_rope, head).locate(runs, w.rope_rows);
    const int64_t element = size_bytes(p.kv_dtype), key_dim = p.head_dim - p.rope_dim;
    for (int64_t i = 0; i < count; ++i) {
      char* copy = w.key_copies + i * p.head_dim * element;
      copy_elements(pointers[i], in.key.strides[3], key_dim, element, copy);
      copy_elements(w.rope_rows[i], in.key_rope.strides[3], p.rope_dim, element, copy + key_dim * element);
      pointers[i] = copy;
    }
  }
  // Packs `count` keys of a head to `to`.
  void pack_keys(int64_t head, Runs runs, int64_t count, const Worker& w, char* to) const {
    locate_keys(head, runs, count, w, w.key_rows);
    kernels.pack_keys(w.key_rows, p.copies_keys ? 1 : in.key.strides[3], count, p.head_dim, to);
  }
  // The values, behind the keys' place; true where they are finite.
  bool pack_values(int64_t head, Runs runs, int64_t count, const Worker& w, char* to) const {
    kv_rows(in.value, head).locate(runs, w.value_rows);
    return kernels.pack_values(w.value_rows, in.value.strides[3], count, p.value_head_dim, to + layout.key_tile_bytes);
  }

  // Pointers to the rows of a tile, or to every 32 of them where pages are panels; returns how many. Those of all tiles
  // of a kernel's call are one array, so that it may look ahead from one tile to the next.
  int64_t locate_rows(int64_t head, Runs runs, const Worker& w, int64_t pointers, KvTile& t) const {
    const void **keys = w.key_rows + pointers, **values = values_are_keys ? keys : w.value_rows + pointers;
    t.key_rows = keys;
    t.value_rows = values;
    if (plan.kv_access == KvAccess::in_place) {
      locate_keys(head, runs, t.count, w, keys);
      if (!values_are_keys) kv_rows(in.value, head).locate(runs, values);
      return t.count;
    }
    const int64_t panels = ceil_div(t.count, kPanelRows);
    const KvRows key_pages = kv_rows(in.key, head), value_pages = kv_rows(in.value, head);
    for (int64_t i = 0; i < panels; ++i) {
      keys[i] = key_pages.row(t.first_key + i * kPanelRows);
      values[i] = value_pages.row(t.first_key + i * kPanelRows);
    }
    return panels;
  }

  // Scales and offsets of a tile's rows, next to each other from `to` on; the lists are pointers_per_call apart.
  void copy_scales(int64_t head, Runs runs, float* to, KvTile& t) const {
    const ConstTensor* const lists[] = {&in.key_scales, &in.value_scales, &in.key_offsets, &in.value_offsets};
    const float** const of_tile[] = {&t.key_scales, &t.value_scales, &t.key_offsets, &t.value_offsets};
    for (int list = 0; list < 4; ++list, to += layout.pointers_per_call) {
      *of_tile[list] = to;
      if (!*lists[list]) {
        std::fill_n(to, t.count, 0.0f);
        continue;
      }
      const KvRows rows = kv_rows(*lists[list], head);
      float* next = to;
      for (const KeyInterval& keys : runs) {
        for (int64_t key = keys.begin; key < keys.end;) {
          const char* at = rows.row(key);
          for (const int64_t end = key + rows.run(key, keys.end - key); key < end; ++key, at += rows.row_bytes) {
            *next++ = *reinterpret_cast<const float*>(at);
          }
        }
      }
    }
  }

 private:
  static void copy_elements(const void* row, int64_t stride, int64_t count, int64_t element_bytes, char* to) {
    const char* from = static_cast<const char*>(row);
    if (stride == 1) {
      std::memcpy(to, from, static_cast<size_t>(count * element_bytes));
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(to + i * element_bytes, from + i * stride * element_bytes, static_cast<size_t>(element_bytes));
    }
  }
};

}  // namespace opst::attention

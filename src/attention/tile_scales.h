// TileScales: the scales and offsets of the rows of a tile, where a call has pages of integers.
//
// A row with one scale: lists of numbers, copied next to each other (a row's scale may lie anywhere, and a vector of scores
// wants those of neighbouring keys). Rows in groups: pointers to each row's own list. There are four lists, of keys' and
// values' scales and of their offsets, and scratch memory holds those of all tiles of a kernel's call.
#pragma once

#include <span>

#include "attention/call_heads.h"

namespace opst::attention {

struct TileScales {
  const CallHeads& call;
  const int64_t keys_per_call;  // between lists, in entries

  using Runs = std::span<const KeyInterval>;

  // `to`: where the tile's entries of the first list begin. Null where the cache has none.
  void copy(int64_t head, Runs runs, float* to, KvTile& t) const {
    const AttentionInputs& in = call.in;
    const ConstTensor* const lists[] = {&in.key_scales, &in.value_scales, &in.key_offsets, &in.value_offsets};
    const float** const of_tile[] = {&t.key_scales, &t.value_scales, &t.key_offsets, &t.value_offsets};
    for (int list = 0; list < 4; ++list, to += keys_per_call) {
      *of_tile[list] = *lists[list] ? to : nullptr;
      if (!*lists[list]) continue;
      const KvRows rows = call.kv_rows(*lists[list], head);
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

  void locate(int64_t head, Runs runs, const void** to, KvTile& t) const {
    const AttentionProblem& p = call.p;
    const AttentionInputs& in = call.in;
    t.key_groups.size = p.head_dim / p.key_groups;
    t.value_groups.size = p.value_head_dim / p.value_groups;
    const ConstTensor* const lists[] = {&in.key_scales, &in.value_scales, &in.key_offsets, &in.value_offsets};
    GroupList* const of_tile[] = {&t.key_groups.scales, &t.value_groups.scales, &t.key_groups.offsets,
                                  &t.value_groups.offsets};
    static constexpr float kNoOffset = 0;
    for (int list = 0; list < 4; ++list, to += keys_per_call) {
      const ConstTensor& numbers = *lists[list];
      *of_tile[list] = {to, numbers ? groups_stride(numbers) : 0};
      if (numbers)
        call.kv_rows(numbers, head).locate(runs, to);
      else
        std::fill_n(to, t.count, static_cast<const void*>(&kNoOffset));
    }
  }
};

}  // namespace opst::attention

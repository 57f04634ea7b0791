// TileRows: how a forward call brings keys and values to the kernels, wherever they lie: pointers to rows or panels, or
// packed tiles. The keys of a tile come in runs of neighbouring ones (KvBlocks and SelectedKeys).
#pragma once

#include <algorithm>
#include <span>

#include "attention/call_memory.h"
#include "attention/key_rows.h"
#include "attention/tile_scales.h"

namespace opst::attention {

struct TileRows : CallMemory {
  using Worker = Layout::Worker;
  using Runs = std::span<const KeyInterval>;

  const Kernels& kernels;
  const TileScales scales{*this, layout.keys_per_call};
  // Values are the first columns of the keys' rows, in memory or in copies of them: their pointers are one list.
  const bool values_are_keys = plan.kv_access == KvAccess::in_place && p.values_of_keys;
  const int64_t key_bytes = row_bytes(p, p.head_dim), value_bytes = row_bytes(p, p.value_head_dim);
  const bool in_place = plan.kv_access == KvAccess::in_place || plan.kv_access == KvAccess::panel_pages;
  decltype(Kernels::attend) const attend = plan.kv_access == KvAccess::in_place      ? kernels.attend_in_place
                                           : plan.kv_access == KvAccess::panel_pages ? kernels.attend_pages
                                                                                     : kernels.attend;

  // A block of so many rows, in the worker's memory but for their running softmax; its rules are the caller's.
  QueryBlock query_block(int64_t rows, const RowState& state, double exponent_scale, const Worker& w) const {
    return {.rows = rows,
            .head_dim = p.head_dim,
            .value_head_dim = p.value_head_dim,
            .query = w.query,
            .query_stride = layout.query_stride,
            .state = state,
            .acc_stride = layout.acc_stride,
            .exponent_scale = exponent_scale,
            .scores = w.scores,
            .scores_stride = layout.scores_stride,
            .visible_begin = w.visible_begin,
            .visible_end = w.visible_end,
            .rules = nullptr};
  }

  // The words of q.rows query rows of a head of `of` to `to`, before those of query_rope.
  void copy_queries(const CallHeads& of, int64_t head, int64_t first_row, double factor, QueryBlock q, void* to) const {
    q.head_dim -= p.rope_dim;
    kernels.copy_queries(of.stacked_rows(in.query, head), first_row, factor, q, to);
    if (p.rope_dim == 0) return;
    char* rest = static_cast<char*>(to) + q.head_dim / geometry.step * geometry.word_bytes;
    q.head_dim = p.rope_dim;
    kernels.copy_queries(of.stacked_rows(in.query_rope, head), first_row, factor, q, rest);
  }

  // As attention::locate_keys (key_rows.h), with the worker's memory.
  int64_t locate_keys(int64_t head, Runs runs, int64_t count, const Worker& w, const void** pointers) const {
    return attention::locate_keys(*this, head, runs, count, w.rope_rows, w.key_copies, pointers);
  }
  // Where keys (values) are bytes, the pointers to `count` of them become pointers to floats.
  bool widen(int64_t head, Runs runs, int64_t count, bool keys, const Worker& w) const {
    if (kernels.widen_rows == nullptr) return false;
    const void** const rows = keys ? w.key_rows : w.value_rows;
    KvTile tile = {.first_key = 0, .count = count, .partial = false};
    (keys ? tile.key_rows : tile.value_rows) = rows;
    bring_scales(head, runs, 0, w, tile);
    const int64_t dim = keys ? p.head_dim : p.value_head_dim;
    kernels.widen_rows(tile, keys, dim, w.floats);
    for (int64_t i = 0; i < count; ++i) rows[i] = w.floats + i * dim;
    return true;
  }
  // Packs `count` keys of a head to `to`.
  void pack_keys(int64_t head, Runs runs, int64_t count, const Worker& w, char* to) const {
    const int64_t dim_stride = locate_keys(head, runs, count, w, w.key_rows);
    const bool widened = widen(head, runs, count, true, w);
    kernels.pack_keys(w.key_rows, widened ? 1 : dim_stride, count, p.head_dim, to);
  }
  // The values, behind the keys' place; true where they are finite.
  bool pack_values(int64_t head, Runs runs, int64_t count, const Worker& w, char* to) const {
    kv_rows(in.value, head).locate(runs, w.value_rows);
    const int64_t dim_stride = widen(head, runs, count, false, w) ? 1 : in.value.strides[3];
    return kernels.pack_values(w.value_rows, dim_stride, count, p.value_head_dim, to + layout.key_tile_bytes);
  }

  // A tile that the blocks of a head share.
  void pack_shared_tile(int64_t head, KeyInterval keys, const Worker& w) const {
    const int64_t tile = keys.begin / plan.block_kv, count = keys.end - keys.begin;
    char* packed = packed_tile(head, tile);
    pack_keys(head, {&keys, 1}, count, w, packed);
    values_finite(head)[tile] = pack_values(head, {&keys, 1}, count, w, packed);
  }
  // A tile that is packed when it is used.
  void pack_own_tile(int64_t head, Runs runs, const Worker& w, char* packed, KvTile& t) const {
    pack_keys(head, runs, t.count, w, packed);
    t.keys = packed;
    t.values_finite = pack_values(head, runs, t.count, w, packed);
    t.values = packed + layout.key_tile_bytes;
  }

  // Describes up to tiles_per_task of the tiles that a list has left, KvBlocks or SelectedKeys; returns how many.
  // packed_per_task: pack_tile(runs, memory, tile) packs them, too.
  template <class List, class PackTile>
  int64_t next_tiles(int64_t head, List& list, const Worker& w, const PackTile& pack_tile) const {
    int64_t n = 0, pointers = 0, keys_before = 0;
    const int64_t own = layout.own_rows;
    for (; n < layout.tiles_per_task && list.next(&w.tiles[n], w.own_begin + n * own, w.own_end + n * own); ++n) {
      KvTile& t = w.tiles[n];
      if (in_place) {
        const Runs runs = list.runs_of(t);
        bring_scales(head, runs, keys_before, w, t);
        keys_before += t.count;
        pointers += locate_rows(head, runs, w, pointers, t);
      } else if (plan.kv_access == KvAccess::packed_shared) {
        const int64_t index = t.first_key / plan.block_kv;
        const char* packed = packed_tile(head, index);
        t.keys = packed;
        t.values = packed + layout.key_tile_bytes;
        t.values_finite = values_finite(head)[index];
      } else {
        pack_tile(list.runs_of(t), w.packed + n * layout.tile_bytes, t);
      }
    }
    if (plan.joined_tiles > 1) join_tiles(w.tiles, n, plan.block_kv, plan.joined_tiles);
    if (plan.kv_access == KvAccess::panel_pages) count_rows_ahead(w.tiles, n);
    if (plan.kv_access == KvAccess::in_place) {
      for (int64_t i = 0; i + 1 < n; ++i) fetch_next(&w.tiles[i], &w.tiles[i + 1]);
      if (n == 1 && !values_are_keys) w.tiles[0].with_keys = {w.tiles[0].value_rows, w.tiles[0].count, value_bytes};
    }
    return n;
  }
  static void count_rows_ahead(KvTile* tiles, int64_t n) {
    for (int64_t i = n - 1, ahead = 0; i >= 0; --i) {
      tiles[i].rows_ahead = ahead;
      ahead += tiles[i].count;
    }
  }

  // The next tile of a list for each of the heads in turn from `head` on, which all see the same keys; in one of two
  // places, slot 0 or 1.
  template <class List>
  bool next_tile_in_turn(int64_t head, List& list, const Worker& w, int64_t slot) const {
    const int64_t turns = plan.heads_in_turn, first = slot * turns, own = slot * layout.own_rows;
    KvTile tile{};
    if (!list.next(&tile, w.own_begin + own, w.own_end + own)) return false;
    const Runs runs = list.runs_of(tile);
    for (int64_t i = first; i < first + turns; ++i) {
      KvTile& t = w.tiles[i];
      t = tile;
      bring_scales(head + i - first, runs, i * plan.block_kv, w, t);
      locate_rows(head + i - first, runs, w, i * plan.block_kv, t);
    }
    return true;
  }
  // While `tiles`, one for each of the heads in turn, are attended, they fetch the next ones, a share each: from each
  // token on all that the heads have of it.
  void fetch_next(KvTile* tiles, const KvTile* next) const {
    const int64_t turns = plan.heads_in_turn, parts = values_are_keys ? 2 * turns : turns;
    const auto share = [&](const void* const* first, const void* const* last, int64_t bytes,
                           int64_t part) -> RowsToFetch {
      const int64_t begin = next->count * part / parts, end = next->count * (part + 1) / parts;
      return {first + begin, end - begin, static_cast<const char*>(*last) - static_cast<const char*>(*first) + bytes};
    };
    const KvTile& last = next[turns - 1];
    for (int64_t i = 0; i < turns; ++i) {
      tiles[i].with_keys = share(next->key_rows, last.key_rows, key_bytes, i);
      tiles[i].with_values = values_are_keys ? share(next->key_rows, last.key_rows, key_bytes, turns + i)
                                             : share(next->value_rows, last.value_rows, value_bytes, i);
    }
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

  // Scales and offsets of a tile's rows, entries `first` and on of a worker's lists; nothing where keys are no integers.
  void bring_scales(int64_t head, Runs runs, int64_t first, const Worker& w, KvTile& t) const {
    if (layout.scale_lists > 0) scales.copy(head, runs, w.scales + first, t);
    if (layout.group_lists > 0) scales.locate(head, runs, w.groups + first, t);
  }
};

}  // namespace opst::attention

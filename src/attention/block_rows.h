// BlockRows: what a backward call reads for one block of query rows: which keys its rows see, what is packed of queries
// and keys, and, with sparse indices, the tiles of its list.
#pragma once

#include <algorithm>
#include <span>

#include "attention/backward_layout.h"
#include "attention/key_rows.h"

namespace opst::attention {

struct BlockRows {
  using Block = BackwardBlock;
  using Worker = BackwardWorker;

  const BackwardData& d_;

  // The intervals of keys that a block's rows see.
  void find_visible(const Block& b, const Worker& w) const {
    const Visibility v = d_.visibility(b.head);
    for (int64_t r = 0; r < b.queries.rows; ++r) {
      const auto [begin, end] = v.keys_of_query((b.first_row + r) / d_.group);
      w.block.visible_begin[r] = begin;
      w.block.visible_end[r] = end;
    }
  }
  // Empties the intervals of rows of which the block mask, or the list, shows no key.
  void hide_masked_rows(const Block& b, const Worker& w) const {
    const auto any = [](KeyInterval) { return true; };
    if (d_.p.sparse_indices && !d_.any_selected_run(b.head, b.first_row / d_.group, any)) {
      std::copy_n(w.block.visible_begin, b.queries.rows, w.block.visible_end);
    }
    if (!d_.p.block_mask) return;
    const HeadMask mask = d_.head_mask(b.head);
    const Visibility v = d_.visibility(b.head);
    for (int64_t r = 0; r < b.queries.rows; ++r) {
      const int64_t query = (b.first_row + r) / d_.group, head = mask.heads > 1 ? (b.first_row + r) % d_.group : 0;
      if (!mask.any_run_of(v, query, head, any)) {
        w.block.visible_end[r] = w.block.visible_begin[r];
      }
    }
  }
  // Empties the intervals of rows of weight 0.
  void hide_absent_rows(const Block& b, const Worker& w) const {
    for (int64_t r = 0; r < b.queries.rows; ++r) {
      if (d_.numbers.get(b.queries.weight, r) == 0) w.block.visible_end[r] = w.block.visible_begin[r];
    }
  }

  PackQueries rows_of_block(const Block& b, const Worker& w) const {
    const auto rows = [&](const ConstTensor& t) { return d_.stacked_rows(t, b.head); };
    return {.query = rows(d_.in.query),
            .out = rows(d_.saved.out),
            .grad_out = rows(d_.saved.grad_out),
            .query_rope = rows(d_.in.query_rope),
            .rope_dim = d_.p.rope_dim,
            .top = rows(d_.saved.softmax_max ? d_.saved.softmax_max : d_.saved.softmax_lse),
            .sum = rows(d_.saved.softmax_sum),
            .grad_lse = rows(d_.saved.grad_lse),
            .first_row = b.first_row,
            .visible_begin = w.block.visible_begin,
            .visible_end = w.block.visible_end,
            .query_factor = d_.rules.scale().of_query,
            .score_scale = d_.rules.score_scale(),
            .exponent_scale = d_.rules.exponent_scale(),
            .pointers = w.query_rows};
  }
  // Keys and values of a tile, in runs.
  void pack_keys(int64_t head, std::span<const KeyInterval> runs, const Worker& w, GradTile& tile) const {
    const int64_t stride = locate_keys(d_, head, runs, tile.count, w.rope_rows, w.key_copies, w.key_rows);
    d_.kv_rows(d_.in.value, head).locate(runs, w.value_rows);
    const PackKeys pack = {w.key_rows, w.value_rows, stride, d_.in.value.strides[3]};
    d_.kernels.pack_keys(pack, d_.layout.sizes, tile);
  }
  GradBlock block_against(const Block& b, const Worker& w, bool partial) const {
    const ScoreRules* rules = b.state->has_rules ? &b.state->rules : nullptr;
    const int64_t next = std::min(b.index + 1, d_.layout.blocks - 1);
    const char* ahead = static_cast<const char*>(b.queries.query) + (next - b.index) * d_.layout.block_bytes;
    const double c = d_.rules.exponent_scale(), keep_prob = d_.rules.keep_prob();
    return {w.block, d_.layout.sizes, b.queries, c, keep_prob, rules, partial, ahead};
  }

  // The keys of a block's list that its rows see (sparse indices).
  SelectedKeys list_of(const Block& b, const Worker& w) const {
    const int64_t query = b.first_row / d_.group;
    return {d_.index_list(b.head, query),
            d_.visibility(b.head),
            query,
            {0, INT64_MAX},
            {.most_keys = d_.plan.block_kv,
             .by_runs = reads_positions(d_.p),
             .key_step = 1,
             .runs = w.runs,
             .rows = b.queries.rows}};
  }
  // visit(GradBlock, GradTile) for the tiles of a block's list, whose dK and dV lie one after the other, 0.
  template <class Visit>
  void for_listed(const Block& b, const Worker& w, const Visit& visit) const {
    const BackwardSizes& z = d_.layout.sizes;
    const auto room = [&](void* acc, int64_t first, int64_t count, int64_t stride) {
      return d_.cleared(d_.numbers.at(acc, first * stride), count, stride);
    };
    SelectedKeys list = list_of(b, w);
    int64_t first = 0;
    for (KvTile t{}; list.next(&t, nullptr, nullptr); first += t.count) {
      GradTile tile = {t.first_key, t.count, w.keys, w.values, w.key_columns};
      if (d_.wants_key()) tile.grad_key = room(w.grad_key, first, t.count, z.acc_stride);
      if (d_.wants_value()) tile.grad_value = room(w.grad_value, first, t.count, z.value_acc_stride);
      pack_keys(b.head, list.runs_of(t), w, tile);
      if (b.state->absent) {  // the others see all of the tile
        std::fill_n(w.block.visible_begin, b.queries.rows, t.first_key);
        std::fill_n(w.block.visible_end, b.queries.rows, t.first_key + t.count);
        hide_absent_rows(b, w);
      }
      visit(block_against(b, w, b.state->absent), tile);
    }
  }
};

}  // namespace opst::attention

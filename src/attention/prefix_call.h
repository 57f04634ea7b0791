// PrefixCall: the first of a cascade's two loops (shared_prefix.h). A task is a block of the stacked query rows of a
// group's sequences, for one KV head, against one part of the keys that the group shares.
//
// Rows of several sequences see keys by rules and intervals of their own: positions count from the end of each, so that
// windows may cut the shared keys anywhere. `head` counts pairs of a group and a KV head.
#pragma once

#include "attention/call_rules.h"
#include "attention/shared_prefix.h"
#include "attention/tile_rows.h"
#include "attention/wave_loop.h"
#include "machine/context_impl.h"
#include "machine/interruption.h"

namespace opst::attention {

class PrefixCall : TileRows {
 public:
  // `whole`: the call, whose sequences' queries these are; `keys`: of prefix_problem.
  PrefixCall(const AttentionInputs& inputs, const AttentionProblem& whole, const SequenceGroup& keys,
             const AttentionPlan& prefix, const PrefixSums& sums, Context::Impl& impl, char* memory,
             Interruption& interruption)
      : TileRows{{{inputs, keys.problem, sums.group},
                  keys,
                  prefix,
                  geometry_of(impl.machine.isa, prefix.product),
                  memory},
                 kernels_for(impl.machine.isa, prefix.product, keys.problem.kv_dtype, in_groups(keys.problem))},
        queries_{inputs, whole},
        rules_(inputs, whole),
        sums_(sums),
        pool_(impl.pool),
        interruption_(interruption) {}

  void run() const {
    const WaveLoop loop = {.heads = heads,
                           .heads_per_wave = plan.heads_per_wave,
                           .packs_per_head = plan.kv_access == KvAccess::packed_shared ? layout.tiles_per_head : 0,
                           .tasks_per_head = layout.blocks * plan.kv_splits,
                           .order = WaveLoop::Order::by_head};
    const auto pack = [&](int64_t head, int64_t tile, int index) {
      const int64_t begin = tile * plan.block_kv, end = std::min(begin + plan.block_kv, group_of(head).keys);
      if (begin < end && !interruption_.requested(index)) pack_shared_tile(head, {begin, end}, worker(index));
    };
    loop.run(pool_, pack, [&](int64_t head, int64_t task, int64_t, int index) {
      if (head >= heads || interruption_.requested(index)) return;
      attend_block(head, task / plan.kv_splits, task % plan.kv_splits, worker(index));
    });
  }

 private:
  const SharedGroup& group_of(int64_t head) const { return groups[head / p.num_kv_heads]; }

  void attend_block(int64_t head, int64_t block, int64_t split, const Worker& w) const {
    const SharedGroup& shared = group_of(head);
    const int64_t rows_of_group = shared.queries * group, most = plan.block_q;
    const int64_t dealt = p.options.block_q > 0 ? most : ceil_div(rows_of_group, ceil_div(rows_of_group, most));
    const int64_t first_row = block * dealt, end_row = std::min(first_row + dealt, rows_of_group);
    if (first_row >= end_row) return;
    ScoreRules rules;
    QueryBlock q = {.rows = end_row - first_row,
                    .head_dim = p.head_dim,
                    .value_head_dim = p.value_head_dim,
                    .query = w.query,
                    .query_stride = layout.query_stride,
                    .state = sums_.state_of_query(shared.first_query, kv_head(head), first_row, split),
                    .acc_stride = layout.acc_stride,
                    .exponent_scale = rules_.exponent_scale(),
                    .scores = w.scores,
                    .scores_stride = layout.scores_stride,
                    .visible_begin = w.visible_begin,
                    .visible_end = w.visible_end,
                    .rules = rules_.any(shared.first) ? &rules : nullptr};
    // Of each sequence those of its rows that the block has.
    int64_t row = 0;  // the sequence's first one, among the group's
    for (int64_t b = shared.first; b < shared.first + shared.count && row < end_row; ++b) {
      const int64_t rows = queries_.sequences.query_len(b) * group, begin = std::max(first_row - row, int64_t{0});
      const int64_t end = std::min(rows, end_row - row);
      if (begin < end) bring_rows(b, kv_head(head), begin, end - begin, row + begin - first_row, q, rules, w);
      row += rows;
    }
    rules.rows = w.rules;
    const int64_t start = std::min(split * plan.keys_per_split, shared.keys);
    KvBlocks tiles({start, std::min(start + plan.keys_per_split, shared.keys)}, plan.block_kv, q.rows, w.visible_begin,
                   w.visible_end);
    kernels.empty_state(q);
    const auto pack_tile = [&](Runs runs, char* packed, KvTile& t) { pack_own_tile(head, runs, w, packed, t); };
    while (const int64_t n = next_tiles(head, tiles, w, pack_tile)) attend(q, w.tiles, n);
  }
  // Rows [first_row, first_row + rows) of a sequence become rows `at` and on of the block.
  void bring_rows(int64_t b, int64_t kv_head, int64_t first_row, int64_t rows, int64_t at, QueryBlock q,
                  ScoreRules& rules, const Worker& w) const {
    const int64_t head = b * p.num_kv_heads + kv_head;
    q.rows = rows;
    char* const words = static_cast<char*>(w.query) + at * layout.query_stride * geometry.word_bytes;
    copy_queries(queries_, head, first_row, rules_.scale().of_query, q, words);
    if (q.rules != nullptr) rules = rules_.of_block(b, kv_head, first_row, rows, w.rules + at);
    const Visibility visible = queries_.visibility(head);
    for (int64_t r = 0; r < rows; ++r) {
      const KeyInterval keys = visible.keys_of_query((first_row + r) / group);
      w.visible_begin[at + r] = keys.begin;
      w.visible_end[at + r] = keys.end;
    }
  }

  const CallHeads queries_;
  const CallRules rules_;
  const PrefixSums& sums_;
  ThreadPool& pool_;
  Interruption& interruption_;
};

}  // namespace opst::attention

// Layout of a plan's scratch memory: sizes and strides that plan.cc adds up and attention.cc hands out.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/kernel_table.h"
#include "core/int_math.h"
#include "machine/workspace.h"
#include "opst/attention.h"
#include "opst/page_layout.h"

namespace opst::attention {

// Elements of a row of the whole score matrix: the tiles side by side, and one vector more, since the softmax may write
// beyond the last.
inline int64_t matrix_stride(int64_t kv_len, int64_t block_kv, const Geometry& g) {
  return (Size(ceil_div(kv_len, block_kv)) * round_up(block_kv, g.panel) + g.lanes).value();
}

// The largest tile sizes that a caller may ask for.
inline constexpr int64_t kMaxBlock = 4096;

// Why a problem has no plan, or null: a plan is defined for these problems and arithmetic on them does not wrap. A call
// has been checked, so only a problem that a caller made up comes to a reason.
const char* without_plan(const AttentionProblem& problem);

// Dimensions of a problem that a plan is made for.
inline int64_t heads_of(const AttentionProblem& p) { return (Size(p.batch) * p.num_kv_heads).value(); }
inline int64_t rows_of(const AttentionProblem& p) {
  return p.num_kv_heads == 0 ? 0 : (Size(p.query_len) * (p.num_heads / p.num_kv_heads)).value();
}

// Whether scores are more than products that a structure hides.
inline bool has_rules(const AttentionProblem& p) {
  return p.options.softcap > 0 || p.has_alibi || p.has_bias || p.has_mask || p.has_prefix || p.has_drop_mask ||
         p.options.dropout.keep_prob < 1;
}

struct Layout {
  // Tiles handed to a kernel in one call; more only cost memory for their descriptions.
  static constexpr int64_t kTilesPerCall = 16;

  int64_t query_stride;  // in words
  int64_t acc_stride;    // in accumulators, like the next two
  int64_t scores_stride;
  int64_t matrix_stride;
  int64_t key_tile_bytes, value_tile_bytes;
  int64_t tiles_per_head;
  int64_t shared_head_bytes;  // of one KV head: packed tiles, states of split tasks
  int64_t packed_head_bytes;  // packed tiles of one KV head, keys and values of a tile next to each other
  int64_t state_bytes;        // RowState of one task
  int64_t query_bytes, scores_bytes, pointers_per_call;
  int64_t row_rules;  // RowRules of a block's rows; 0 where no option needs them
  int64_t matrix_head_bytes;
  int64_t worker_bytes;

  Layout(const AttentionProblem& p, const AttentionPlan& plan, const Geometry& g) : heads_(heads_of(p)) {
    const int64_t blocks = ceil_div(rows_of(p), plan.block_q);
    query_stride = ceil_div(p.head_dim, g.step);
    acc_stride = round_up(p.value_head_dim, g.lanes);
    // A stride of a power of two would put a column of scores into few cache sets.
    scores_stride = round_up(plan.block_kv, g.panel) + g.lanes;
    matrix_stride = attention::matrix_stride(p.kv_len, plan.block_kv, g);
    key_tile_bytes = Arena::round_up(Size(round_up(plan.block_kv, g.panel)) * query_stride * g.word_bytes);
    value_tile_bytes = Arena::round_up(Size(ceil_div(plan.block_kv, g.step)) * acc_stride * g.word_bytes);
    tiles_per_head = ceil_div(p.kv_len, plan.block_kv);
    const bool shared = plan.kv_access == KvAccess::packed_shared;
    const Size tile_bytes = Size(key_tile_bytes) + value_tile_bytes;
    const Size packed = tile_bytes * tiles_per_head + Arena::size_of<bool>(tiles_per_head);
    packed_head_bytes = shared ? packed.value() : 0;
    const auto per_row = [&](Size numbers) { return Arena::round_up(numbers * plan.block_q * g.accumulator_bytes); };
    state_bytes = (Size(per_row(acc_stride)) + per_row(1) + per_row(g.lanes)).value();
    const Size split_states = plan.kv_splits > 1 ? Size(blocks) * plan.kv_splits : 0;
    shared_head_bytes = (Size(packed_head_bytes) + split_states * state_bytes).value();

    const bool standard = plan.path == AttentionPath::standard;
    matrix_head_bytes = standard ? (Size(blocks) * per_row(matrix_stride)).value() : 0;
    query_bytes = Arena::round_up(Size(plan.block_q) * query_stride * g.word_bytes);
    scores_bytes = standard ? 0 : Arena::round_up(Size(g.tile_rows) * scores_stride * g.accumulator_bytes);
    // Row pointers of one tile (packing), or of all tiles of a kernel call (in place; panel32 pages: one per 32 keys).
    const bool in_place = plan.kv_access == KvAccess::in_place;
    const bool pages = plan.kv_access == KvAccess::panel_pages;
    pointers_per_call = plan.block_kv * (in_place ? kTilesPerCall : 1);
    if (pages) pointers_per_call = plan.block_kv / kPanelRows * kTilesPerCall;
    row_rules = has_rules(p) ? plan.block_q : 0;
    Size worker = Size(query_bytes) + scores_bytes + 2 * Arena::size_of<int64_t>(plan.block_q) +
                  Arena::round_up(row_rules * kRowRulesBytes) + 2 * Arena::size_of<void*>(pointers_per_call);
    if (plan.kv_splits == 1) worker += state_bytes;
    // The standard path goes through its tiles twice, so all of them stay packed.
    if (plan.kv_access == KvAccess::packed_per_task) {
      private_tiles = standard ? tiles_per_head : 1;
      worker += tile_bytes * private_tiles;
    }
    tiles_per_task = standard ? tiles_per_head : in_place || pages ? kTilesPerCall : shared ? kTilesPerCall : 1;
    worker += Arena::round_up(Size(tiles_per_task) * kTileDescriptionBytes);
    worker_bytes = worker.value();
  }

  int64_t private_tiles = 0;
  int64_t tiles_per_task = 1;  // tiles described at a time

  // Two waves are in flight at a time, if there are two.
  int64_t wave_bytes(const AttentionPlan& plan) const {
    return (Size(std::min(heads_, 2 * plan.heads_per_wave)) * shared_head_bytes).value();
  }
  int64_t shared_bytes(const AttentionPlan& plan) const {
    return (Size(heads_) * matrix_head_bytes + wave_bytes(plan)).value();
  }

 private:
  static constexpr int64_t kTileDescriptionBytes = 64;  // sizeof(KvTile), checked in call_memory.h
  static constexpr int64_t kRowRulesBytes = 48;         // sizeof(RowRules), likewise
  int64_t heads_;
};

}  // namespace opst::attention

// CallMemory: where the data of one forward call lies: rows of the tensors (CallHeads), and the pieces of scratch memory
// whose sizes layout.h adds up.
//
//   shared, once
//     wave buffers          [min(heads, 2 heads_per_wave)] times, of each head
//       packed tiles          [tiles_per_head][panels of K, panels of V]       packed_shared
//       finite bits           [tiles_per_head] bool                            packed_shared
//       states                [most_blocks][kv_splits] RowState                kv_splits > 1
//     score matrices        [heads][most_blocks][block_q][matrix_stride]     standard path
//   of each worker
//     query rows            [block_q][query_stride] words
//     scores                [rows of a register tile][scores_stride]         flash path
//     visible intervals     [block_q] begins, [block_q] ends
//     rules of rows         [block_q] RowRules                               where an option needs them
//     row pointers          [pointers_per_call] of keys, as many of values
//     tile descriptions     [tiles_per_task] KvTile
//     state                 RowState                                         kv_splits = 1
//     private tiles         [private_tiles][panels of K, panels of V]        packed_per_task
#pragma once

#include "attention/call_heads.h"
#include "attention/check.h"
#include "attention/layout.h"

namespace opst::attention {

static_assert(sizeof(KvTile) == 64, "layout.h counts on it");
static_assert(sizeof(RowRules) == 48, "layout.h counts on it");

class CallMemory : public CallHeads {
 public:
  CallMemory(const AttentionInputs& inputs, const SequenceGroup& chosen, const AttentionPlan& plan,
             const Geometry& geometry, void* scratch)
      : CallHeads{inputs, chosen.problem},
        layout(chosen.problem, plan, geometry),
        most_blocks(ceil_div(p.query_len * group, plan.block_q)),
        above_(chosen.above),
        most_(chosen.most),
        plan_(plan),
        geometry_(geometry),
        shared_(static_cast<char*>(scratch)) {}

  const Layout layout;
  const int64_t most_blocks;  // of the rows of a head

  // Query rows of a head, stacked, and how they are dealt out to blocks: evenly, unless the caller chose block_q.
  int64_t rows(int64_t head) const {
    const int64_t query_len = sequences.query_len(batch(head));
    return query_len > above_ && query_len <= most_ ? query_len * group : 0;  // not in this SequenceGroup
  }
  int64_t block_rows(int64_t head) const {
    const int64_t n = rows(head);
    if (p.options.block_q > 0 || n <= plan_.block_q) return plan_.block_q;
    return ceil_div(n, ceil_div(n, plan_.block_q));
  }
  int64_t blocks(int64_t head) const { return ceil_div(rows(head), block_rows(head)); }

  struct Worker {
    void* query;
    void* scores;
    int64_t* visible_begin;
    int64_t* visible_end;
    RowRules* rules;
    const void** key_rows;
    const void** value_rows;
    KvTile* tiles;
    RowState state;  // of an unsplit task
    Arena tiles_memory;
  };
  Worker worker(int index) const {
    char* base = shared_ + plan_.scratch_bytes_shared + index * plan_.scratch_bytes_per_worker;
    Arena arena(base, plan_.scratch_bytes_per_worker);
    void* query = arena.take_bytes(layout.query_bytes);
    void* scores = arena.take_bytes(layout.scores_bytes);
    int64_t* begin = arena.take<int64_t>(plan_.block_q);
    int64_t* end = arena.take<int64_t>(plan_.block_q);
    RowRules* rules = arena.take<RowRules>(layout.row_rules);
    const void** keys = arena.take<const void*>(layout.pointers_per_call);
    const void** values = arena.take<const void*>(layout.pointers_per_call);
    KvTile* tiles = arena.take<KvTile>(layout.tiles_per_task);
    const RowState state = plan_.kv_splits == 1 ? take_state(arena) : RowState{};
    return {query, scores, begin, end, rules, keys, values, tiles, state, arena};
  }

  char* packed_tile(int64_t head, int64_t tile) const {
    return shared_head(head) + tile * (layout.key_tile_bytes + layout.value_tile_bytes);
  }
  bool* values_finite(int64_t head) const { return reinterpret_cast<bool*>(packed_tile(head, layout.tiles_per_head)); }

  RowState split_state(int64_t head, int64_t block, int64_t split) const {
    const int64_t index = block * plan_.kv_splits + split;
    char* base = shared_head(head) + layout.packed_head_bytes + index * layout.state_bytes;
    Arena arena(base, layout.state_bytes);
    return take_state(arena);
  }

  // The block's rows of its head's score matrix (standard path).
  void* score_matrix(int64_t head, int64_t block) const {
    return shared_ + layout.wave_bytes(plan_) + head * layout.matrix_head_bytes +
           block * (layout.matrix_head_bytes / most_blocks);
  }

 private:
  // The head's place in the buffer of its wave; waves take the two buffers in turn. Where keys are split there is one
  // wave.
  char* shared_head(int64_t head) const {
    return shared_ + head % (2 * plan_.heads_per_wave) * layout.shared_head_bytes;
  }
  RowState take_state(Arena& arena) const {
    const int64_t bytes = geometry_.accumulator_bytes;
    void* acc = arena.take_bytes(Arena::round_up(plan_.block_q * layout.acc_stride * bytes));
    void* max = arena.take_bytes(Arena::round_up(plan_.block_q * bytes));
    return {acc, max, arena.take_bytes(Arena::round_up(plan_.block_q * geometry_.lanes * bytes))};
  }

  const int64_t above_, most_;  // queries of the sequences that belong to the call
  const AttentionPlan& plan_;
  const Geometry geometry_;
  char* const shared_;
};

}  // namespace opst::attention

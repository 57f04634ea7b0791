// CallMemory: where the data of one forward call lies: rows of the tensors (CallHeads), and the pieces of scratch memory
// (layout.h).
#pragma once

#include "attention/call_heads.h"
#include "attention/layout.h"

namespace opst::attention {

class CallMemory : public CallHeads {
 public:
  CallMemory(const AttentionInputs& inputs, const SequenceGroup& chosen, const AttentionPlan& plan,
             const Geometry& geometry, void* scratch)
      : CallHeads{inputs, chosen.problem},
        layout{chosen.problem, plan, geometry},
        chosen_(chosen),
        shared_(static_cast<char*>(scratch)) {}

  const Layout layout;

  // Query rows of a head, stacked, and how they are dealt out to blocks: evenly, unless the caller chose block_q.
  int64_t rows(int64_t head) const {
    const int64_t query_len = sequences.query_len(batch(head));
    return query_len > chosen_.above && query_len <= chosen_.most ? query_len * group : 0;
  }
  int64_t block_rows(int64_t head) const {
    const int64_t n = rows(head), most = layout.plan.block_q;
    return p.options.block_q > 0 || n <= most ? most : ceil_div(n, ceil_div(n, most));
  }
  int64_t blocks(int64_t head) const { return ceil_div(rows(head), block_rows(head)); }

  Layout::Worker worker(int index) const {
    const int64_t bytes = layout.plan.scratch_bytes_per_worker;
    Arena arena(shared_ + layout.plan.scratch_bytes_shared + index * bytes, bytes);
    return layout.take_worker(arena);
  }

  char* packed_tile(int64_t head, int64_t tile) const { return shared_head(head) + tile * layout.tile_bytes; }
  bool* values_finite(int64_t head) const { return reinterpret_cast<bool*>(packed_tile(head, layout.tiles_per_head)); }

  RowState split_state(int64_t head, int64_t block, int64_t split) const {
    const int64_t index = block * layout.plan.kv_splits + split;
    Arena arena(shared_head(head) + layout.packed_head_bytes + index * layout.state_bytes, layout.state_bytes);
    return layout.take_state(arena);
  }

  // The block's rows of its head's score matrix (standard path).
  void* score_matrix(int64_t head, int64_t block) const {
    return shared_ + layout.wave_bytes() + (head * layout.blocks + block) * layout.matrix_block_bytes;
  }

 private:
  // The head's place in the buffer of its wave; waves take the two buffers in turn. Where keys are split there is one
  // wave.
  char* shared_head(int64_t head) const {
    return shared_ + head % (2 * layout.plan.heads_per_wave) * layout.shared_head_bytes;
  }

  const SequenceGroup& chosen_;  // the sequences that belong to the call
  char* const shared_;
};

}  // namespace opst::attention

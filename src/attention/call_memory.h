// CallMemory: where the data of one forward call lies, rows of the tensors (CallHeads) and the pieces of scratch memory
// (layout.h), and how rows are dealt out to blocks.
#pragma once

#include "attention/call_heads.h"
#include "attention/key_splits.h"
#include "attention/layout.h"

namespace opst::attention {

struct CallMemory : CallHeads {
  const SequenceGroup& chosen;  // the sequences that belong to the call
  const AttentionPlan& plan;
  const Geometry& geometry;
  char* const scratch;
  const Layout layout{p, plan, geometry};
  const SplitKeys split_keys{p, plan};

  // Query rows of a head, stacked, and how they are dealt out to blocks: evenly, unless the caller chose block_q.
  int64_t rows(int64_t head) const {
    const int64_t n = query_rows(head);
    return chosen.kinds.of(n, sequences.kv_len(batch(head))) == chosen.kind ? n : 0;
  }
  int64_t block_rows(int64_t head) const {
    const int64_t n = rows(head), most = plan.block_q;
    // To what the caller, a mask, or a query's group is cut at.
    const bool fixed = p.options.block_q > 0 || p.block_mask || p.sparse_indices || n <= most;
    return fixed ? most : ceil_div(n, ceil_div(n, most));
  }
  int64_t blocks(int64_t head) const { return ceil_div(rows(head), block_rows(head)); }

  // Of a head that has blocks.
  KeySplits splits_of(int64_t head, int64_t num_blocks) const {
    if (plan.parts_per_head == 0) return {plan.kv_splits, plan.keys_per_split};
    const int64_t b = batch(head);
    // A sequence whose rows are one block has no more of them, however many a longer one has.
    const int64_t most_rows = std::min(block_rows(head), rows(head));
    return split_keys.of(sequences.query_len(b), sequences.kv_len(b), num_blocks, most_rows);
  }

  Layout::Worker worker(int index) const {
    const int64_t bytes = plan.scratch_bytes_per_worker;
    Arena arena(scratch + plan.scratch_bytes_shared + index * bytes, bytes);
    return layout.take_worker(arena);
  }

  char* packed_tile(int64_t head, int64_t tile) const { return shared_head(head) + tile * layout.tile_bytes; }
  bool* values_finite(int64_t head) const { return reinterpret_cast<bool*>(packed_tile(head, layout.tiles_per_head)); }

  RowState split_state(int64_t head, int64_t index) const {
    Arena arena(shared_head(head) + layout.packed_head_bytes + index * layout.state_bytes, layout.state_bytes);
    return layout.take_state(arena);
  }

  // The block's rows of its head's score matrix (standard path).
  void* score_matrix(int64_t head, int64_t block) const {
    return scratch + layout.wave_bytes() + (head * layout.blocks + block) * layout.matrix_block_bytes;
  }

  // Which tiles of a head some query sees by the block mask.
  bool* seen_tiles(int64_t head) const {
    return reinterpret_cast<bool*>(scratch + layout.wave_bytes() + layout.matrix_bytes()) +
           head * layout.tiles_per_head;
  }

  // How many parts of the keys a block has behind it.
  int32_t& parts_done(int64_t head, int64_t block) const {
    char* at = scratch + layout.wave_bytes() + layout.matrix_bytes() + layout.seen_bytes();
    return reinterpret_cast<int32_t*>(at)[head * layout.blocks + block];
  }

  // The head's place in the buffer of its wave; waves take the two buffers in turn.
  char* shared_head(int64_t head) const {
    return scratch + head % (2 * plan.heads_per_wave) * layout.shared_head_bytes;
  }
};

}  // namespace opst::attention

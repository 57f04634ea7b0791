// Ring attention: the sequence's division into chunks and tiles, and a call that was checked.
#pragma once

#include "machine/workspace.h"
#include "mc2/call.h"
#include "opst/sequence_parallel.h"

namespace opst::mc2 {

// Rows of a rank that are neighbours in the sequence, where the first of them is token `position`.
struct Chunk {
  int64_t first = 0, rows = 0, position = 0;
};

// Rows of a rank, all of one chunk.
struct KeyTile {
  int64_t first = 0, rows = 0, position = 0;
};

class Sequence {
 public:
  Sequence() = default;
  Sequence(const Split& rows, const RingAttentionOptions& options);
  int64_t tile_rows = 0;

  Chunk chunk(int rank, int index) const;
  int64_t tiles(int rank) const;
  KeyTile tile(int rank, int64_t i) const;
  // What queries of a chunk see of a tile, as windows of a call whose first query and first key are the first ones.
  struct Window {
    int64_t left, right;
    bool visible;
  };
  Window window(const Chunk& queries, const KeyTile& keys) const;
  // Whether some query of rank `reader` sees tile i of rank `owner`.
  bool needs(int reader, int owner, int64_t i) const;
  int64_t count_needed(int reader, int owner) const;

 private:
  const Split* rows_ = nullptr;
  bool zigzag_ = false;
  int64_t left_ = kUnbounded, right_ = kUnbounded;
};

struct RingCall {
  Context& context;
  Communicator::Impl& communicator;
  Mc2Operator op;
  RingAttentionInputs in;
  const RingAttentionOptions& options;
  AttentionOutputs out = {};          // forward
  AttentionSaved saved = {};          // backward
  AttentionGradients gradients = {};  // backward
  Split rows = {};
  Sequence sequence = {};
  Mc2Plan plan = {};

  bool backward() const { return op == Mc2Operator::ring_attention_backward; }
  int rank() const { return communicator.transport->rank(); }
  int ranks() const { return communicator.transport->world_size(); }
  // f32 numbers, or those of the keys' dtype, of a row of keys and values.
  int64_t numbers_of_row() const {
    return (Size(in.key.shape[0]) * in.key.shape[1] * (Size(in.key.shape[3]) + in.value.shape[3])).value();
  }
};

// Runs a call that was checked and planned.
Status run_ring(RingCall& call, const Entry& entry);

}  // namespace opst::mc2

// BackwardLayout: the pieces of a backward call's scratch memory, in one list for the plan, which adds them up, and for
// the call, which takes them.
//
//   shared, once
//     wave buffers       [min(heads, 2 heads_per_wave)][blocks] BackwardBlock
//     of the call        BackwardCallPieces
//   of each worker       BackwardWorker
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/backward_kernels.h"
#include "attention/kv_blocks.h"
#include "attention/layout.h"
#include "attention/shared_pages.h"
#include "attention/wave_loop.h"
#include "opst/attention_backward.h"

namespace opst::attention {

// The tiles of keys that add to the gradients of one block of query rows, in ascending order. The one place where
// backward takes them for an interval: a list of tiles answers the same three questions.
class BlockTiles {
 public:
  BlockTiles() = default;
  // From the first key that some row of the block sees to the last; some tiles between may hold none.
  BlockTiles(KeyInterval keys, int64_t block_kv) {
    if (keys.begin < keys.end) first_ = keys.begin / block_kv, count_ = (keys.end - 1) / block_kv + 1 - first_;
  }
  int64_t count() const { return count_; }
  // Index of the block's tile `place` among the tiles of its head.
  int64_t operator[](int64_t place) const { return first_ + place; }
  // How many tiles of the block come before tile `index` of the head; -1 where that is none of the block's.
  int64_t place_of(int64_t index) const { return index >= first_ && index - first_ < count_ ? index - first_ : -1; }

 private:
  int64_t first_ = 0, count_ = 0;
};

// The keys that a block of query rows sees, and how far its dQ is.
struct BlockState {
  ScoreRules rules;
  KeyInterval all;   // seen by every row
  BlockTiles tiles;  // that add to dQ
  bool finite, far;
  bool has_rules;
  Turn turn;  // of the tiles, by their places
};

struct BackwardLayout {
  const AttentionBackwardProblem& problem;
  const Geometry g;
  const int64_t block_q, block_kv;
  const int64_t group = problem.forward.num_heads / problem.forward.num_kv_heads;
  const int64_t blocks = ceil_div(rows_of(problem.forward), block_q);  // of the longest sequence
  const int64_t tiles = ceil_div(problem.forward.kv_len, block_kv);
  const bool rules = has_rules(problem.forward);
  const bool pairs = g.step > 1;                        // of bf16
  const int64_t pair_rows = ceil_div(block_q, g.step);  // words that hold a column of a block
  const BackwardSizes sizes = sizes_of(problem.forward, g);
  const int64_t scores_stride = round_up(block_kv, g.panel) + g.lanes * g.step;  // words; of row forms divided by step
  const int64_t block_bytes = bytes_of<struct BackwardBlock>();
  const int64_t head_bytes = (Size(blocks) * block_bytes).value();
  const int64_t call_bytes = bytes_of<struct BackwardCallPieces>();
  const int64_t worker_bytes = bytes_of<struct BackwardWorker>();

  // Two waves are in flight at a time, if there are two.
  int64_t wave_bytes(int64_t heads, int64_t heads_per_wave) const {
    return (Size(std::min(heads, 2 * heads_per_wave)) * head_bytes).value();
  }
  int64_t shared_bytes(int64_t heads, int64_t heads_per_wave) const {
    return (Size(wave_bytes(heads, heads_per_wave)) + call_bytes).value();
  }
  template <class Pieces>
  int64_t bytes_of() const {
    return Pieces{{*this}}.take.bytes.value();
  }
  static BackwardSizes sizes_of(const AttentionProblem& p, const Geometry& g) {
    // One vector more than the data: rows a power of two apart would share few cache sets.
    const auto row_stride = [&](int64_t length) { return round_up(ceil_div(length, g.step), g.lanes) + g.lanes; };
    return {p.head_dim,
            p.value_head_dim,
            row_stride(p.head_dim),
            row_stride(p.value_head_dim),
            round_up(p.head_dim, g.lanes),
            round_up(p.value_head_dim, g.lanes)};
  }
};

// Takes one piece after the other from an arena; without one adds up what the pieces take.
struct TakePieces {
  const BackwardLayout& of;
  Arena* arena = nullptr;
  Size bytes = 0;

  void* words(Size count, int64_t stride) { return take_bytes(count * stride * of.g.word_bytes); }
  void* numbers(Size count, int64_t stride) { return take_bytes(count * stride * of.g.accumulator_bytes); }
  void* take_bytes(Size piece) {
    bytes += Arena::round_up(piece);
    return arena != nullptr ? arena->take_bytes(Arena::round_up(piece)) : nullptr;
  }
  template <class T>
  T* take(Size count) {
    bytes += Arena::size_of<T>(count);
    return arena != nullptr ? arena->take<T>(count) : nullptr;
  }
};

// A block of query rows in a wave buffer.
struct BackwardBlock {
  TakePieces take;
  const BackwardLayout& of = take.of;

  BlockState* state = take.take<BlockState>(1);
  RowRules* row_rules = take.take<RowRules>(of.rules ? of.block_q : 0);
  void** bias_targets = take.take<void*>(of.problem.grad_bias ? of.block_q : 0);  // addresses of rows of grad_bias
  QueryRows queries = {.rows = 0,
                       .query = take.words(of.block_q, of.sizes.query_stride),
                       .grad_out = take.words(of.block_q, of.sizes.value_stride),
                       .query_columns = take.words(of.pairs ? of.pair_rows : 0, of.sizes.acc_stride),
                       .grad_out_columns = take.words(of.pairs ? of.pair_rows : 0, of.sizes.value_acc_stride),
                       .origin = take.numbers(of.block_q, 1),
                       .reference = take.numbers(of.block_q, 1),
                       .weight = take.numbers(of.block_q, 1),
                       .delta = take.numbers(of.block_q, 1),
                       .grad_query = take.numbers(of.block_q, of.sizes.acc_stride),
                       .finite = nullptr,
                       .far = nullptr};
  int64_t first_row = 0;
};

struct BackwardWorker {
  TakePieces take;
  const BackwardLayout& of = take.of;

  void* keys = take.words(round_up(of.block_kv, of.g.panel), ceil_div(of.sizes.head_dim, of.g.step));
  void* values = take.words(round_up(of.block_kv, of.g.panel), ceil_div(of.sizes.value_head_dim, of.g.step));
  void* key_columns = of.pairs ? take.words(ceil_div(of.block_kv, of.g.step), of.sizes.acc_stride)
                               : take.words(of.block_kv, of.sizes.query_stride);
  void* grad_key = take.numbers(of.block_kv, of.sizes.acc_stride);
  void* grad_value = take.numbers(of.block_kv, of.sizes.value_acc_stride);
  GradScratch block = {.scores_stride = of.scores_stride,
                       .probability_columns = take.words(of.pair_rows, of.scores_stride),
                       .grad_score_columns = take.words(of.pair_rows, of.scores_stride),
                       .grad_scores = of.pairs ? take.words(of.block_q, of.scores_stride / of.g.step) : nullptr,
                       .raw = take.numbers(of.pairs ? 2 * of.g.tile_rows : 0, of.scores_stride),
                       .cap_slopes = take.numbers(of.rules ? of.g.tile_rows : 0, of.scores_stride),
                       .bias_grads = of.problem.grad_bias ? take.numbers(of.block_q, of.scores_stride) : nullptr,
                       .visible_begin = take.take<int64_t>(of.block_q),
                       .visible_end = take.take<int64_t>(of.block_q)};
  void* bias_sums = take.numbers(of.problem.grad_bias ? of.group : 0, of.scores_stride);  // over each head's rows
  const void** key_rows = take.take<const void*>(of.block_kv);
  const void** value_rows = take.take<const void*>(of.block_kv);
  const void** query_rows = take.take<const void*>(of.block_q);
  void* max = take.numbers(of.block_q, 1);
  void* sum = take.numbers(of.block_q, 1);
};

struct BackwardCallPieces {
  TakePieces take;
  const BackwardLayout& of = take.of;

  // [heads][blocks][group] of grad_sinks; [blocks + 1] of grad_bias; as in shared_pages.h.
  double* sink_sums = take.take<double>(
      of.problem.grad_sinks ? Size(of.problem.forward.batch) * of.problem.forward.num_heads * of.blocks : 0);
  Turn* bias_turns = take.take<Turn>(of.problem.grad_bias ? of.blocks + 1 : 0);
  void* pages = take.take_bytes(SharedPages::bytes(of.problem, of.sizes, of.g.accumulator_bytes));
};

}  // namespace opst::attention

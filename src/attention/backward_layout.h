// BackwardLayout: the pieces of a backward call's scratch memory, in one list for the plan, which adds them up, and for
// BackwardData, what the parts of a call read, which takes them.
//
//   shared, once
//     wave buffers       [min(heads, 2 heads_per_wave)][blocks] BackwardBlock
//     of the call        BackwardCallPieces
//   of each worker       BackwardWorker
//
// A worker's memory is its own. A block belongs to the task that packs it, then to the tasks of its head: they read it,
// and add to dQ in turn. Who may touch the pieces of the call: bias_gradient.h, key_gradients.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>

#include "attention/backward_kernels.h"
#include "attention/call_heads.h"
#include "attention/call_rules.h"
#include "attention/layout.h"
#include "attention/mask_plan.h"
#include "attention/wave_loop.h"
#include "opst/attention_backward.h"

namespace opst::attention {

// The tiles of keys that add to the gradients of one block of query rows, in ascending order: from the first key that
// some row of the block sees to the last, all of them or those in a list. Some may hold no key that a row sees.
class BlockTiles {
 public:
  BlockTiles() = default;
  BlockTiles(KeyInterval keys, int64_t block_kv) {
    if (keys.begin < keys.end) first_ = keys.begin / block_kv, count_ = (keys.end - 1) / block_kv + 1 - first_;
  }
  BlockTiles(KeyInterval keys, int64_t block_kv, std::span<const int64_t> list) : BlockTiles(keys, block_kv) {
    const auto begin = std::lower_bound(list.begin(), list.end(), first_);
    list_ = list.data() + (begin - list.begin());
    count_ = std::lower_bound(begin, list.end(), first_ + count_) - begin;
  }
  int64_t count() const { return count_; }
  // Index of the block's tile `place` among the tiles of its head.
  int64_t operator[](int64_t place) const { return list_ != nullptr ? list_[place] : first_ + place; }
  // How many tiles of the block come before tile `index` of the head; -1 where that is none of the block's.
  int64_t place_of(int64_t index) const {
    if (list_ == nullptr) return index >= first_ && index - first_ < count_ ? index - first_ : -1;
    const int64_t* at = std::lower_bound(list_, list_ + count_, index);
    return at != list_ + count_ && *at == index ? at - list_ : -1;
  }

 private:
  int64_t first_ = 0, count_ = 0;
  const int64_t* list_ = nullptr;  // count_ tiles
};

// The keys that a block of query rows sees, and how far its dQ is.
struct BlockState {
  ScoreRules rules;
  KeyInterval all;   // seen by every row, by structure
  bool absent;       // some row takes no part
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
  const int64_t mask_lists = attention::mask_lists(problem.forward).value();
  const Size mask_pairs = attention::mask_pairs(problem.forward, blocks, block_q, tiles, block_kv);
  const bool lists{problem.forward.sparse_indices};
  // Keys whose dK and dV a task holds: of a tile, or of a list.
  const int64_t grad_rows = std::max(block_kv, lists ? keys_read(problem.forward) : 0);
  const int64_t copied_keys = problem.forward.copies_keys ? block_kv : 0;
  const bool pairs = g.step > 1;                        // of bf16
  const int64_t pair_rows = ceil_div(block_q, g.step);  // words that hold a column of a block
  const BackwardSizes sizes = sizes_of(problem.forward, g);
  const int64_t scores_stride = round_up(block_kv, g.panel) + g.lanes * g.step;  // words; of row forms divided by step
  const int64_t block_bytes = bytes_of<struct BackwardBlock>();
  const int64_t head_bytes = (Size(blocks) * block_bytes).value();
  const int64_t call_bytes = bytes_of<struct BackwardCallPieces>();
  const int64_t worker_bytes = bytes_of<struct BackwardWorker>();

  // Two waves are in flight at a time, if there are two.
  int64_t shared_bytes(int64_t heads, int64_t heads_per_wave) const {
    return (Size(std::min(heads, 2 * heads_per_wave)) * head_bytes + call_bytes).value();
  }
  template <class Pieces>
  int64_t bytes_of() const {
    return Pieces{{*this}}.take.bytes.value();
  }
  static BackwardSizes sizes_of(const AttentionProblem& p, const Geometry& g) {
    // One vector more than the data: rows a power of two apart would share few cache sets.
    const auto row = [&](int64_t length) { return round_up(ceil_div(length, g.step), g.lanes) + g.lanes; };
    const auto acc = [&](int64_t length) { return round_up(length, g.lanes); };
    const int64_t d = p.head_dim, v = p.value_head_dim;
    return {d, v, row(d), row(v), acc(d), acc(v)};
  }
};

// Takes one piece after the other from an arena, and adds up what they take. An empty arena serves the plan.
struct TakePieces {
  const BackwardLayout& of;
  Arena arena{nullptr, 0};
  Size bytes = 0;

  void* words(Size count, int64_t stride) { return take_bytes(count * stride * of.g.word_bytes); }
  void* numbers(Size count, int64_t stride) { return take_bytes(count * stride * of.g.accumulator_bytes); }
  void* take_bytes(Size piece) {
    bytes += Arena::round_up(piece);
    return arena.take_bytes(Arena::round_up(piece));
  }
  template <class T>
  T* take(Size count) {
    bytes += Arena::size_of<T>(count);
    return arena.take<T>(count);
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
                       .grad_query = take.numbers(of.block_q, of.sizes.acc_stride)};
  int64_t head = 0, index = 0, first_row = 0;
};

struct BackwardWorker {
  TakePieces take;
  const BackwardLayout& of = take.of;

  void* keys = take.words(round_up(of.block_kv, of.g.panel), ceil_div(of.sizes.head_dim, of.g.step));
  void* values = take.words(round_up(of.block_kv, of.g.panel), ceil_div(of.sizes.value_head_dim, of.g.step));
  void* key_columns = of.pairs ? take.words(ceil_div(of.block_kv, of.g.step), of.sizes.acc_stride)
                               : take.words(of.block_kv, of.sizes.query_stride);
  void* grad_key = take.numbers(of.grad_rows, of.sizes.acc_stride);
  void* grad_value = take.numbers(of.grad_rows, of.sizes.value_acc_stride);
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
  MaskCursor* mask_cursors =
      take.take<MaskCursor>(of.mask_lists > 0 ? MaskWalk::most_cursors(of.block_q, of.group) : Size(0));
  KeyInterval* runs = take.take<KeyInterval>(of.lists ? of.block_kv : 0);
  const void** sum_rows = take.take<const void*>(of.lists ? of.grad_rows : 0);  // of a list's keys: list_gradients.h
  // Where key_rope is not behind key: keys of a tile with theirs [block_kv][head_dim], of key's dtype (key_rows.h).
  const void** rope_rows = take.take<const void*>(of.copied_keys);
  char* key_copies = static_cast<char*>(
      take.take_bytes(Size(of.copied_keys) * of.sizes.head_dim * size_bytes(of.problem.forward.kv_dtype)));
};

// Parts of the sums that blocks of a head add to in turn, one block here and another there (list_gradients.h).
inline constexpr int64_t kListShards = 16;

struct BackwardCallPieces {
  TakePieces take;
  const BackwardLayout& of = take.of;
  const AttentionProblem& p = of.problem.forward;

  double* sink_sums = take.take<double>(of.problem.grad_sinks ? Size(p.batch) * p.num_heads * of.blocks : 0);
  Turn* bias_turns = take.take<Turn>(of.problem.grad_bias ? of.blocks + 1 : 0);
  // [num_blocks], and [shared_blocks][num_kv_heads][block_size][acc_stride + value_acc_stride] (key_gradients.h).
  int64_t* page_ordinals = take.take<int64_t>(of.problem.shared_blocks > 0 ? of.problem.num_blocks : 0);
  void* page_sums = take.numbers(Size(of.problem.shared_blocks) * p.num_kv_heads * p.block_size,
                                 of.sizes.acc_stride + of.sizes.value_acc_stride);
  // Of a block mask: mask_lists.h.
  int64_t* mask_block_ends = take.take<int64_t>(Size(of.mask_lists) * (of.blocks + 1));
  int64_t* mask_tile_ends = take.take<int64_t>(Size(of.mask_lists) * (of.tiles + 2));
  int64_t* mask_tiles = take.take<int64_t>(of.mask_pairs);
  int64_t* mask_blocks = take.take<int64_t>(of.mask_pairs);
  // Of sparse indices: list_gradients.h.
  Turn* list_turns = take.take<Turn>(of.lists ? Size(heads_of(p)) * kListShards : 0);
  void* list_sums = take.numbers(of.problem.key_rows, of.sizes.acc_stride + of.sizes.value_acc_stride);
};

// Numbers in the accumulator type of a product, float, or double for f64, outside the kernels.
struct Accumulators {
  const bool f64;

  void* at(void* numbers, int64_t i) const { return static_cast<char*>(numbers) + i * (f64 ? 8 : 4); }
  double get(const void* numbers, int64_t i) const {
    return f64 ? static_cast<const double*>(numbers)[i] : double{static_cast<const float*>(numbers)[i]};
  }
  void set(void* numbers, int64_t i, double x) const {
    if (f64)
      static_cast<double*>(numbers)[i] = x;
    else
      static_cast<float*>(numbers)[i] = static_cast<float>(x);
  }
  // to[i * stride] += from[i]; whole rows: BackwardKernels::add_row
  void add(const void* from, int64_t count, void* to, int64_t stride) const {
    const auto add_numbers = [&](const auto* terms, auto* sums) {
      for (int64_t i = 0; i < count; ++i) sums[i * stride] += terms[i];
    };
    if (f64) return add_numbers(static_cast<const double*>(from), static_cast<double*>(to));
    add_numbers(static_cast<const float*>(from), static_cast<float*>(to));
  }
};

struct BackwardData : CallHeads {
  const AttentionSaved& saved;
  const AttentionGradients& grads;
  const AttentionBackwardProblem& problem;
  const AttentionBackwardPlan& plan;
  const BackwardKernels& kernels;
  const Geometry geometry;
  char* const memory;
  const CallRules rules{in, p};
  const BackwardLayout layout{problem, geometry, plan.block_q, plan.block_kv};
  const Accumulators numbers{plan.product == AttentionProduct::f64};
  const BackwardCallPieces call{{layout, at(plan.scratch_bytes_shared - layout.call_bytes, layout.call_bytes)}};

  // Blocks of a head; fewer than layout.blocks for a shorter sequence of the batch.
  int64_t blocks(int64_t head) const { return ceil_div(query_rows(head), plan.block_q); }

  BackwardBlock block(int64_t head, int64_t index) const {
    const int64_t place = head % (2 * plan.heads_per_wave);
    BackwardBlock b{{layout, at(place * layout.head_bytes + index * layout.block_bytes, layout.block_bytes)}};
    b.head = head, b.index = index, b.first_row = index * plan.block_q;
    b.queries.rows = std::min(plan.block_q, query_rows(head) - b.first_row);
    b.queries.finite = &b.state->finite;
    b.queries.far = &b.state->far;
    return b;
  }
  BackwardWorker worker(int index) const {
    const int64_t offset = plan.scratch_bytes_shared + index * plan.scratch_bytes_per_worker;
    BackwardWorker w{{layout, at(offset, layout.worker_bytes)}};
    if (!layout.pairs) w.block.grad_scores = w.block.grad_score_columns;
    return w;
  }
  Arena at(int64_t offset, int64_t bytes) const { return {memory + offset, bytes}; }

  bool wants_query() const { return grads.grad_query || grads.grad_query_rope; }
  bool wants_key() const { return grads.grad_key || grads.grad_key_rope; }
  bool wants_value() const { return bool{grads.grad_value}; }

  // Rows of a head's sequence in key and value, whatever its kv_lengths; of pages those that hold its keys.
  int64_t key_rows(int64_t head) const {
    return p.paged ? sequences.kv_len(batch(head)) : sequences.key_rows(batch(head));
  }
  // Rows of accumulators, set to 0.
  void* cleared(void* rows, int64_t count, int64_t stride) const {
    return std::memset(rows, 0, static_cast<size_t>(count * stride * geometry.accumulator_bytes));
  }
  double statistic(const StackedRows& t, int64_t row) const {
    return numbers.get(t.data, row / group * t.seq_stride + row % group * t.head_stride);
  }
  double sink(int64_t head, int64_t row) const {
    return numbers.get(in.sinks.data, query_head(head, row) * in.sinks.strides[0]);
  }
};

}  // namespace opst::attention

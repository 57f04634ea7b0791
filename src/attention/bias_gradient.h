// BiasGradient, SinkGradient: gradients of the bias and of the sinks, in an order that does not depend on the threads.
//
//   grad_bias[b, h, i, j] = bias_scale * sum of dS over the indices that the bias repeats
//   grad_sinks[h] = - sum over rows of head h of exp(sink - m) / l * delta       m, l: maximum and sum, or lse and 1
//
// Memory   bias    the tensor itself, in the accumulator type; a worker's bias_sums; bias_turns [blocks + 1]: all tasks
//          sinks   sink_sums [heads][blocks][group] of double: the task that packs a block adds to the block's; summed
//                  in the end, in the order of batches and blocks
//
// Who adds to an element, and so what keeps the order of the additions, is a BiasOrder.
//
// Bias turns. Tasks are numbered as they are handed out: tile 0 of each head of a wave, tile 1 of each head, ... With
// by_block, turns[i] is the turn of adding to what block i of any head adds to. A task takes the turn of every block,
// ascending, also where the block does not see its tile, and passes it on. Three blocks; + is the addition, whose
// dS was multiplied before without waiting:
//
//   time ->          |           |           |           |           |
//   task 0           + block 0   + block 1   + block 2
//   task 1                       + block 0   + block 1   + block 2
//   task 2                                   + block 0   + block 1   + block 2
//
// Every element becomes ((task 0) + task 1) + task 2 ..., whoever runs the tasks. Where block_q is no multiple of the
// group, the last query of a block has heads in the next ones, which add to the same elements: a task that adds from
// block i waits for the turns of these blocks as well, so that task 0 is done with them before task 1 begins.
//
// With by_task there is one turn, turns[blocks]: a task sums over all its rows in its worker's memory, and then adds.
#pragma once

#include <cmath>
#include <new>

#include "attention/backward_layout.h"
#include "core/elements.h"

namespace opst::attention {

enum class BiasOrder : uint8_t {
  none,      // not wanted
  by_tile,   // one block of rows: in the order of its tiles, with dQ
  by_block,  // the same rows of several heads: tasks take turns at each block
  by_task,   // all rows: a task sums over its rows, then tasks take turns
};

class BiasGradient {
 public:
  explicit BiasGradient(const BackwardData& data) : d_(data) {
    if (to_.data == nullptr) return;
    for (int i = 0; i < to_.rank; ++i) {
      if (to_.shape[i] != 1) strides_[4 - to_.rank + i] = to_.strides[i];
    }
    const auto repeats = [&](int i, int64_t size) { return size > 1 && strides_[i] == 0; };
    const bool query_in_blocks = repeats(1, d_.group) && d_.plan.block_q % d_.group != 0;
    order_ = repeats(2, d_.p.query_len)                                                   ? BiasOrder::by_task
             : repeats(0, d_.p.batch) || repeats(1, d_.p.num_kv_heads) || query_in_blocks ? BiasOrder::by_block
                                                                                          : BiasOrder::by_tile;
    for (int64_t i = 0; i <= blocks_; ++i) new (&turns_[i]) Turn;
  }

  // Finds the addresses that rows of a block add to.
  void locate(const BackwardBlock& b) const {
    for (int64_t r = 0; adds_by_row() && r < b.queries.rows; ++r) b.bias_targets[r] = target(b.head, b.first_row + r);
  }

  // A task calls `begin`; for each block that sees its tile `sum` after grad_tile, and `add` in the turn of the block's
  // tiles; `pass` after each block, seen or not; and `finish`. A task that does nothing passes all.
  void begin(const BackwardWorker& w) const {
    if (order_ == BiasOrder::by_task) d_.cleared(w.bias_sums, d_.group, d_.layout.scores_stride);
  }
  void sum(const GradBlock& g, const GradTile& tile, const BackwardBlock& b, const BackwardWorker& w) const {
    if (order_ != BiasOrder::by_task) return;
    void** targets = const_cast<void**>(w.query_rows);
    for (int64_t r = 0; r < b.queries.rows; ++r) targets[r] = sums(w, (b.first_row + r) % d_.group);
    d_.kernels.add_grad_bias(g, tile, targets, tile.first_key, 1, scale());
  }
  void add(const GradBlock& g, const GradTile& tile, const BackwardBlock& b, int64_t number) const {
    if (order_ == BiasOrder::by_block) {
      const int64_t last_query = (b.first_row + b.queries.rows - 1) / d_.group;
      const int64_t last_block = std::min(((last_query + 1) * d_.group - 1) / d_.plan.block_q, blocks_ - 1);
      for (int64_t i = b.index; i <= last_block; ++i) turns_[i].wait_for(number);
    }
    if (adds_by_row()) d_.kernels.add_grad_bias(g, tile, b.bias_targets, 0, strides_[3], scale());
  }
  void pass(int64_t block, int64_t end, int64_t number) const {  // of blocks [block, end)
    for (; order_ == BiasOrder::by_block && block < end; ++block) turns_[block].take_and_pass(number);
  }
  void finish(int64_t head, const BackwardWorker& w, const GradTile& tile, int64_t number) const {
    if (order_ != BiasOrder::by_task) return;
    turns_[blocks_].wait_for(number);
    for (int64_t g = 0; g < d_.group; ++g) {
      void* to = d_.numbers.at(target(head, g), tile.first_key * strides_[3]);
      d_.numbers.add(sums(w, g), tile.count, to, strides_[3]);
    }
    turns_[blocks_].pass(number);
  }
  void pass_all(int64_t number) const {
    pass(0, blocks_, number);
    if (order_ == BiasOrder::by_task) turns_[blocks_].take_and_pass(number);
  }

 private:
  bool adds_by_row() const { return order_ == BiasOrder::by_tile || order_ == BiasOrder::by_block; }
  double scale() const { return static_cast<double>(d_.p.options.bias_scale); }
  // Where key 0 of a stacked row has its sum.
  void* target(int64_t head, int64_t row) const {
    const int64_t query = row / d_.group, query_head = d_.query_head(head, row);
    return d_.numbers.at(to_.data, d_.batch(head) * strides_[0] + query_head * strides_[1] + query * strides_[2]);
  }
  // A task's sums for head g of the group, over the keys of its tile.
  void* sums(const BackwardWorker& w, int64_t g) const {
    return d_.numbers.at(w.bias_sums, g * d_.layout.scores_stride);
  }

  const BackwardData& d_;
  const Tensor& to_ = d_.grads.grad_bias;
  const int64_t blocks_ = d_.layout.blocks;
  Turn* const turns_ = d_.call.bias_turns;
  BiasOrder order_ = BiasOrder::none;
  int64_t strides_[4] = {};  // of the tensor; 0 where it repeats
};

class SinkGradient {
 public:
  explicit SinkGradient(const BackwardData& data) : d_(data) {
    if (wanted()) std::fill_n(sums_, d_.heads * d_.layout.blocks * d_.group, 0.0);
  }
  // When the block is packed.
  void add(const BackwardBlock& b, const PackQueries& pack) const {
    for (int64_t r = 0; r < b.queries.rows && wanted(); ++r) {
      const int64_t row = b.first_row + r;
      const double sink = d_.sink(b.head, row);
      const double top = d_.statistic(pack.top, row);
      const double l = pack.sum.data != nullptr ? d_.statistic(pack.sum, row) : 1;
      if (std::isinf(sink) || std::isinf(top)) continue;
      double delta = d_.numbers.get(b.queries.delta, r);
      // dO of a row that sees no key does not matter. O is 0 there, so a finite delta has nothing of dO.
      if (d_.numbers.get(b.queries.weight, r) == 0 || (!std::isfinite(delta) && !sees_key(b, pack, r))) {
        delta = pack.grad_lse.data != nullptr ? -d_.statistic(pack.grad_lse, row) : 0;
      }
      sum(b.head, b.index, row % d_.group) -= std::exp(sink - top) / l * delta;
    }
  }
  void finish() const {
    for (int64_t h = 0; h < d_.p.num_heads && wanted(); ++h) {
      double total = 0;
      for (int64_t head = h / d_.group; head < d_.heads; head += d_.p.num_kv_heads) {
        for (int64_t i = 0; i < d_.layout.blocks; ++i) total += sum(head, i, h % d_.group);
      }
      store_element(to_, h * to_.strides[0], total);
    }
  }

 private:
  bool wanted() const { return to_.data != nullptr; }
  bool sees_key(const BackwardBlock& b, const PackQueries& pack, int64_t r) const {
    if (!b.state->has_rules) return true;
    const auto sees_some = [&](KeyInterval keys) {
      return d_.kernels.sees_key(b.state->rules, r, keys.begin, keys.end);
    };
    if (d_.p.sparse_indices) return d_.any_selected_run(b.head, (b.first_row + r) / d_.group, sees_some);
    if (!d_.p.block_mask) return sees_some({pack.visible_begin[r], pack.visible_end[r]});
    const HeadMask mask = d_.head_mask(b.head);
    const int64_t row = b.first_row + r, head = mask.heads > 1 ? row % d_.group : 0;
    return mask.any_run_of(d_.visibility(b.head), row / d_.group, head, sees_some);
  }
  double& sum(int64_t head, int64_t block, int64_t g) const {
    return sums_[(head * d_.layout.blocks + block) * d_.group + g];
  }

  const BackwardData& d_;
  const Tensor& to_ = d_.grads.grad_sinks;
  double* const sums_ = d_.call.sink_sums;
};

}  // namespace opst::attention

// KeyGradients: what becomes of a task's dK and dV: grad_key and grad_value, of a dense tensor or of pages.
//
//   grad_key = softmax_scale dK,  grad_value = dV / keep_prob       rounded once to the tensor's dtype
//
// Shared pages come more than once in a block table. No task owns their gradients: tasks add to sums in accumulators,
// in turn, which are rounded to the output when all is added. So the memory grows with the pages, however many
// sequences share them.
//
// Memory   the tensors; page_ordinals [num_blocks]: place of each block among the shared ones, or -1;
//          page_sums [shared_blocks][num_kv_heads]: sums of keys [block_size][acc_stride], then of values. A task calls
//          `put` or `pass`.
#pragma once

#include "attention/backward_layout.h"

namespace opst::attention {

class KeyGradients {
 public:
  explicit KeyGradients(const BackwardData& data) : d_(data) {
    if (shared_ > 0) number_shared(d_.in, d_.p, d_.problem.num_blocks, d_.call.page_ordinals);
  }
  // Writes the ordinals of the blocks; returns how many are shared.
  static int64_t number_shared(const AttentionInputs& in, const AttentionProblem& p, int64_t num_blocks,
                               int64_t* ordinals) {
    std::fill_n(ordinals, num_blocks, 0);
    const Sequences sequences(in, p);
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t used = ceil_div(sequences.kv_len(b), p.block_size);
      for (int64_t i = 0; i < used; ++i) ++ordinals[index_at(in.block_table, b, i)];
    }
    int64_t shared = 0;
    for (int64_t i = 0; i < num_blocks; ++i) ordinals[i] = ordinals[i] > 1 ? shared++ : -1;
    return shared;
  }

  // What no task writes, and what tasks add to, becomes 0.
  void clear(ThreadPool& pool) const {
    for (const Gradient* g : {&keys_, &values_, &ropes_}) {
      if (d_.p.paged) fill(g->to, 0, pool);
    }
    pool.parallel_for(shared_, [&](int64_t ordinal, int) {
      d_.cleared(sums(keys_, ordinal, 0, 0), d_.p.num_kv_heads * d_.p.block_size, page_stride_);
    });
  }
  // Writes or adds a task's sums for the keys of its tile: all that the tensor has, maybe more than the sequence.
  void put(int64_t head, const GradTile& tile, int64_t number) {
    const int64_t rows = d_.key_rows(head), count = std::clamp<int64_t>(rows - tile.first_key, 0, d_.plan.block_kv);
    if (shared_ > 0) turn_.wait_for(number);
    if (keys_.to) put(keys_, tile.grad_key, tile.first_key, count, head);
    if (values_.to) put(values_, tile.grad_value, tile.first_key, count, head);
    if (ropes_.to) put(ropes_, tile.grad_key, tile.first_key, count, head);
    if (shared_ > 0) turn_.pass(number);
  }
  // Of a task that adds nothing.
  void pass(int64_t number) {
    if (shared_ > 0) turn_.take_and_pass(number);
  }
  // Rounds the sums of shared pages, when all tasks are done.
  void finish(ThreadPool& pool) const {
    if (shared_ == 0) return;
    pool.parallel_for(d_.problem.num_blocks, [&](int64_t page, int) {
      const int64_t ordinal = d_.call.page_ordinals[page];
      if (ordinal < 0) return;
      for (const Gradient* g : {&keys_, &values_, &ropes_}) {
        for (int64_t h = 0; h < d_.p.num_kv_heads && g->to.data != nullptr; ++h) {
          const KvRows rows = d_.kv_rows(g->to, h);
          finish_rows(*g, rows, sums(*g, ordinal, h, 0), d_.p.block_size, rows.base + page * rows.page_bytes);
        }
      }
    });
  }

 private:
  struct Gradient {
    const Tensor& to;
    int64_t length, acc_stride;
    double factor;
    int64_t before;  // accumulators before it in the sums of a shared page, for each row of the page
    int64_t column;  // of the accumulators' rows: ropes share those of the keys
  };

  void* sums(const Gradient& g, int64_t ordinal, int64_t kv_head, int64_t row) const {
    const int64_t page_head = ordinal * d_.p.num_kv_heads + kv_head, rows = d_.p.block_size;
    return d_.numbers.at(d_.call.page_sums, rows * (page_head * page_stride_ + g.before) + row * g.acc_stride);
  }
  void put(const Gradient& g, void* acc, int64_t first, int64_t count, int64_t head) const {
    const KvRows rows = d_.kv_rows(g.to, head);
    for (int64_t key = first, run = 0; key < first + count; key += run) {
      run = rows.run(key, first + count - key);
      const void* from = d_.numbers.at(acc, (key - first) * g.acc_stride);
      const int64_t ordinal = shared_ > 0 ? d_.call.page_ordinals[rows.page_of(key)] : -1;
      if (ordinal >= 0) {
        const bool added = g.column > 0 && keys_.to;  // with the keys
        void* to = sums(g, ordinal, d_.kv_head(head), key % d_.p.block_size);
        if (!added) d_.kernels.add_row(from, run * g.acc_stride, to);
      } else {
        finish_rows(g, rows, from, run, rows.row(key));
      }
    }
  }
  void finish_rows(const Gradient& g, const KvRows& rows, const void* acc, int64_t count, const char* to) const {
    const int64_t stride = rows.row_bytes / size_bytes(g.to.dtype);
    const StackedRows out = {const_cast<char*>(to), g.to.dtype, stride, 0, g.to.strides[3], 1};
    const void* from = d_.numbers.at(const_cast<void*>(acc), g.column);
    d_.kernels.finish_rows({from, count, g.length, g.acc_stride, g.factor, 0, out});
  }

  const BackwardData& d_;
  const BackwardSizes& sizes_ = d_.layout.sizes;
  const int64_t shared_ = d_.problem.shared_blocks, page_stride_ = sizes_.acc_stride + sizes_.value_acc_stride;
  const double key_factor_ = d_.rules.scale().of_score;
  const int64_t key_dim_ = sizes_.head_dim - d_.p.rope_dim;
  const Gradient keys_{d_.grads.grad_key, key_dim_, sizes_.acc_stride, key_factor_, 0, 0};
  const Gradient values_{d_.grads.grad_value,      sizes_.value_head_dim, sizes_.value_acc_stride,
                         1 / d_.rules.keep_prob(), sizes_.acc_stride,     0};
  const Gradient ropes_{d_.grads.grad_key_rope, d_.p.rope_dim, sizes_.acc_stride, key_factor_, 0, key_dim_};
  Turn turn_;  // of adding to shared pages
};

}  // namespace opst::attention

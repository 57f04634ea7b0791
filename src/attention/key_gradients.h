// KeyGradients: what becomes of a task's dK and dV: grad_key and grad_value, of a dense tensor or of pages.
//
//   grad_key = softmax_scale dK,  grad_value = dV / keep_prob       rounded once to the tensor's dtype
//
// Memory   the tensors; sums of pages that several sequences share (SharedPages), to which tasks add in turn. A task calls
//          `put` or `pass`.
#pragma once

#include "attention/backward_check.h"
#include "attention/backward_data.h"
#include "attention/fill.h"
#include "attention/shared_pages.h"

namespace opst::attention {

class KeyGradients {
 public:
  explicit KeyGradients(const BackwardData& data)
      : d_(data),
        pages_(d_.problem, d_.layout.sizes, d_.geometry.accumulator_bytes, d_.call().pages),
        keys_{d_.grads.grad_key, d_.p.head_dim, d_.layout.sizes.acc_stride, d_.rules.scale().of_score, 0},
        values_{d_.grads.grad_value, d_.p.value_head_dim, d_.layout.sizes.value_acc_stride, 1 / d_.rules.keep_prob(),
                d_.p.block_size * d_.layout.sizes.acc_stride} {
    if (pages_.count() > 0) SharedPages::number(d_.in, d_.p, d_.problem.num_blocks, pages_.ordinals());
  }

  // What no task writes, and what tasks add to, becomes 0.
  void clear(ThreadPool& pool) const {
    if (d_.p.paged) fill(keys_.to, 0, pool), fill(values_.to, 0, pool);
    pool.parallel_for(pages_.count(), [&](int64_t ordinal, int) { pages_.clear(ordinal); });
  }
  // Writes or adds a task's sums for the keys of its tile: all that the tensor has, which may be more than the sequence.
  void put(int64_t head, const GradTile& tile, int64_t number) {
    const int64_t count = std::clamp<int64_t>(rows_of_sequence(d_.batch(head)) - tile.first_key, 0, d_.layout.block_kv);
    if (pages_.count() > 0) turn_.wait_for(number);
    if (tile.grad_key != nullptr) put(keys_, tile.grad_key, tile.first_key, count, head);
    if (tile.grad_value != nullptr) put(values_, tile.grad_value, tile.first_key, count, head);
    if (pages_.count() > 0) turn_.pass(number);
  }
  // Of a task that adds nothing.
  void pass(int64_t number) {
    if (pages_.count() > 0) turn_.take_and_pass(number);
  }
  // Rounds the sums of shared pages, when all tasks are done.
  void finish(ThreadPool& pool) const {
    if (pages_.count() == 0) return;
    pool.parallel_for(d_.problem.num_blocks, [&](int64_t page, int) {
      const int64_t ordinal = pages_.ordinal(page);
      if (ordinal < 0) return;
      for (const Gradient* g : {&keys_, &values_}) {
        for (int64_t h = 0; h < d_.p.num_kv_heads && g->to.data != nullptr; ++h) {
          const int64_t at = page * g->to.strides[0] + h * g->to.strides[2];
          finish_rows(*g, sums(*g, ordinal, h, 0), d_.p.block_size,
                      static_cast<char*>(g->to.data) + at * size_bytes(g->to.dtype));
        }
      }
    });
  }

 private:
  struct Gradient {
    const Tensor& to;
    int64_t length, acc_stride;
    double factor;
    int64_t page_offset;  // in the sums of a shared page, in accumulators
  };

  int64_t rows_of_sequence(int64_t b) const { return d_.p.paged ? d_.sequences.kv_len(b) : key_rows_of(d_.in, b); }
  void* sums(const Gradient& g, int64_t ordinal, int64_t kv_head, int64_t row) const {
    return d_.numbers.at(pages_.sums(ordinal, kv_head), g.page_offset + row * g.acc_stride);
  }
  void put(const Gradient& g, void* acc, int64_t first, int64_t count, int64_t head) const {
    const KvRows rows = d_.kv_rows(g.to, head);
    for (int64_t key = first, run = 0; key < first + count; key += run) {
      run = rows.run(key, first + count - key);
      const void* from = d_.numbers.at(acc, (key - first) * g.acc_stride);
      const int64_t ordinal = d_.p.paged ? pages_.ordinal(rows.page_of(key)) : -1;
      if (ordinal >= 0) {
        void* to = sums(g, ordinal, d_.kv_head(head), key % d_.p.block_size);
        d_.numbers.add(from, run * g.acc_stride, to, 1);
      } else {
        finish_rows(g, from, run, const_cast<char*>(rows.row(key)));
      }
    }
  }
  void finish_rows(const Gradient& g, const void* acc, int64_t count, void* to) const {
    const StackedRows out = {to, g.to.dtype, g.to.strides[d_.p.paged ? 1 : 2], 0, g.to.strides[3], 1};
    d_.kernels.finish_rows({acc, count, g.length, g.acc_stride, g.factor, 0, out});
  }

  const BackwardData& d_;
  const SharedPages pages_;
  const Gradient keys_, values_;
  Turn turn_;  // of adding to shared pages
};

}  // namespace opst::attention

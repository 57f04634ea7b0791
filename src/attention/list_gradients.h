// ListGradients: grad_key and grad_value where queries have lists of keys (sparse indices).
//
// A task of backward is then a block of rows, of one query's group, against the tiles that are gathered of its list.
// It owns its dQ, but every key may stand in the lists of many queries. So a task leaves dK and dV of its keys in its
// worker's memory, and adds them in turn, when the blocks before it have, to sums over all rows of the tensors:
//
//   time ->   block 0    dK, dV of its list    + add
//             block 1    dK, dV of its list           + add
//             block 2    dK, dV of its list                  + add
//
// Every sum is ((block 0) + block 1) + block 2 ..., whoever runs the tasks, and is rounded to the tensor once, in the
// end. Blocks of one head wait for one another; in pages, whose rows may belong to several sequences, all blocks do.
//
// Memory   list_sums: accumulators [outer][num_kv_heads][rows][acc_stride], and behind them those of the values; outer
//          and rows are batch and kv_len, 1 and total_k, or num_blocks and block_size; list_turns [heads]
#pragma once

#include <new>

#include "attention/block_rows.h"
#include "core/elements.h"

namespace opst::attention {

class ListGradients {
 public:
  explicit ListGradients(const BlockRows& rows) : rows_(rows) {
    for (int64_t i = 0; d_.p.sparse_indices && i < d_.heads; ++i) new (&d_.call.list_turns[i]) Turn;
  }

  void clear(ThreadPool& pool) const {
    for (const Side& s : {keys(), values()}) {
      if (s.to.data != nullptr) fill(mutable_view(s.sums), 0, pool);
    }
  }
  // Adds what a task has of a block's list, tile after tile, to the sums, or nothing; in its turn.
  void add(const BackwardBlock& b, const BackwardWorker& w, bool some, int64_t number) const {
    const int64_t place = d_.p.paged ? number : b.index;
    turn(b.head).wait_for(place);
    int64_t first = 0;
    SelectedKeys list = rows_.list_of(b, w);
    for (KvTile t{}; some && list.next(&t, nullptr, nullptr); first += t.count) {
      for (const auto& [s, from] : {std::pair{keys(), w.grad_key}, std::pair{values(), w.grad_value}}) {
        if (s.to.data == nullptr) continue;
        d_.kv_rows(s.sums, b.head).locate(list.runs_of(t), w.key_rows);
        for (int64_t i = 0; i < t.count; ++i) {
          d_.numbers.add(d_.numbers.at(from, (first + i) * s.stride), s.stride, const_cast<void*>(w.key_rows[i]), 1);
        }
      }
    }
    turn(b.head).pass(place);
  }
  // Of a task that adds nothing: of a block, of a shorter sequence, of no head.
  void pass(int64_t head, int64_t index, int64_t number) const {
    if (d_.p.paged) {
      turn(0).take_and_pass(number);
    } else if (head < d_.heads) {
      turn(head).take_and_pass(index);
    }
  }
  // Rounds the sums, when all tasks are done: every row of the tensors.
  void finish(ThreadPool& pool) const {
    for (const Side& s : {keys(), values()}) {
      if (s.to.data == nullptr) continue;
      const int64_t rows = s.sums.shape[rows_dim_], heads = s.sums.shape[heads_dim_], chunks = ceil_div(rows, kChunk);
      pool.parallel_for(s.sums.shape[0] * heads * chunks, [&](int64_t task, int) {
        const int64_t outer = task / chunks / heads, h = task / chunks % heads, first = task % chunks * kChunk;
        const auto at = [&](const ConstTensor& t) {
          return outer * t.strides[0] + h * t.strides[heads_dim_] + first * t.strides[rows_dim_];
        };
        char* const to = static_cast<char*>(s.to.data) + at(s.to) * size_bytes(s.to.dtype);
        const StackedRows out = {to, s.to.dtype, s.to.strides[rows_dim_], 0, s.to.strides[3], 1};
        const void* acc = d_.numbers.at(const_cast<void*>(s.sums.data), at(s.sums));
        d_.kernels.finish_rows({acc, std::min(kChunk, rows - first), s.length, s.stride, s.factor, 0, out});
      });
    }
  }

 private:
  static constexpr int64_t kChunk = 1024;

  struct Side {
    const Tensor& to;
    ConstTensor sums;  // of the tensor's shape, but for the last dimension
    int64_t length, stride;
    double factor;
  };
  Side keys() const { return side(d_.grads.grad_key, z_.head_dim, z_.acc_stride, 0, d_.rules.scale().of_score); }
  Side values() const {
    return side(d_.grads.grad_value, z_.value_head_dim, z_.value_acc_stride, d_.problem.key_rows * z_.acc_stride,
                1 / d_.rules.keep_prob());
  }
  Side side(const Tensor& to, int64_t length, int64_t stride, int64_t before, double factor) const {
    ConstTensor sums = to;
    sums.dtype = d_.numbers.f64 ? DType::f64 : DType::f32;
    sums.data = d_.numbers.at(d_.call.list_sums, before);
    sums.shape[3] = stride;
    sums.strides[3] = 1;
    sums.strides[rows_dim_] = stride;
    sums.strides[heads_dim_] = to.shape[rows_dim_] * stride;
    sums.strides[0] = d_.p.varlen_k ? 0 : to.shape[heads_dim_] * sums.strides[heads_dim_];
    return {to, sums, length, stride, factor};
  }
  Turn& turn(int64_t head) const { return d_.call.list_turns[d_.p.paged ? 0 : head]; }

  const BlockRows& rows_;
  const BackwardData& d_ = rows_.d_;
  const BackwardSizes& z_ = d_.layout.sizes;
  const int heads_dim_ = d_.p.paged ? 2 : 1, rows_dim_ = d_.p.paged ? 1 : 2;
};

}  // namespace opst::attention

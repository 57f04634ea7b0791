// ListGradients: grad_key and grad_value where queries have lists of keys (sparse indices).
//
// A task of backward is then a block of rows, of one query's group, against the tiles that are gathered of its list.
// It owns its dQ, but every key may stand in the lists of many queries. So a task leaves dK and dV of its keys in its
// worker's memory, and adds them in turn to sums over all rows of the tensors. The rows are dealt out to 16 shards, each
// with a turn of its own, so that blocks add behind one another instead of waiting for one another:
//
//   time ->   block 0    dK, dV of its list    + shard 0   + shard 1   + shard 2  ...
//             block 1    dK, dV of its list                + shard 0   + shard 1  ...
//             block 2    dK, dV of its list                            + shard 0  ...
//
// Every sum is ((block 0) + block 1) + block 2 ..., whoever runs the tasks and whatever the shards are, and is rounded
// to the tensor once, in the end. Blocks of one head take turns; in pages, whose rows may belong to several sequences, all
// blocks do.
//
// Memory   list_sums: accumulators [outer][num_kv_heads][rows][acc_stride], and behind them those of the values; outer
//          and rows are batch and kv_len, 1 and total_k, or num_blocks and block_size; list_turns [heads][shards]; of a
//          worker sum_rows: where the keys of its list have their sums
#pragma once

#include <new>

#include "attention/block_rows.h"
#include "core/elements.h"

namespace opst::attention {

class ListGradients {
 public:
  explicit ListGradients(const BlockRows& rows) : rows_(rows) {
    for (int64_t i = 0; d_.p.sparse_indices && i < d_.heads * kListShards; ++i) new (&d_.call.list_turns[i]) Turn;
  }

  void clear(ThreadPool& pool) const {
    if (d_.wants_key()) fill(mutable_view(keys().sums), 0, pool);
    if (d_.wants_value()) fill(mutable_view(values().sums), 0, pool);
  }
  // Adds what a task has of a block's list, or nothing, to the sums of each shard in its turn.
  void add(const BackwardBlock& b, const BackwardWorker& w, bool some, int64_t number) const {
    const int64_t place = d_.p.paged ? number : b.index, count = some ? locate_sums(b, w) : 0;
    const Side k = keys(), v = values(), &located = d_.wants_key() ? k : v;
    const auto* const base = static_cast<const char*>(located.sums.data);
    const int64_t row_bytes = located.stride * d_.geometry.accumulator_bytes;
    for (int64_t shard = 0; shard < kListShards; ++shard) {
      turn(b.head, shard).wait_for(place);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = (static_cast<const char*>(w.sum_rows[i]) - base) / row_bytes;
        if (row / kShardRows % kListShards != shard) continue;
        if (d_.wants_key()) add_row(k, w.grad_key, i, row);
        if (d_.wants_value()) add_row(v, w.grad_value, i, row);
      }
      turn(b.head, shard).pass(place);
    }
  }
  // Of a task that adds nothing: of a block, of a shorter sequence, of no head.
  void pass(int64_t head, int64_t index, int64_t number) const {
    if (!d_.p.paged && head >= d_.heads) return;
    for (int64_t shard = 0; shard < kListShards; ++shard) {
      turn(head, shard).take_and_pass(d_.p.paged ? number : index);
    }
  }
  // Rounds the sums, when all tasks are done: every row of the tensors.
  void finish(ThreadPool& pool) const {
    for (const Side& s : {keys(), values(), ropes()}) {
      if (!s.to) continue;
      const int64_t rows = s.sums.shape[rows_dim_], heads = s.sums.shape[heads_dim_], chunks = ceil_div(rows, kChunk);
      pool.parallel_for(s.sums.shape[0] * heads * chunks, [&](int64_t task, int) {
        const int64_t outer = task / chunks / heads, h = task / chunks % heads, first = task % chunks * kChunk;
        const auto at = [&](const ConstTensor& t) {
          return outer * t.strides[0] + h * t.strides[heads_dim_] + first * t.strides[rows_dim_];
        };
        char* const to = static_cast<char*>(s.to.data) + at(s.to) * size_bytes(s.to.dtype);
        const StackedRows out = {to, s.to.dtype, s.to.strides[rows_dim_], 0, s.to.strides[3], 1};
        const void* acc = d_.numbers.at(const_cast<void*>(s.sums.data), at(s.sums) + s.column);
        d_.kernels.finish_rows({acc, std::min(kChunk, rows - first), s.length, s.stride, s.factor, 0, out});
      });
    }
  }

 private:
  static constexpr int64_t kChunk = 1024;
  // Neighbouring rows of a shard: blocks of keys stay together.
  static constexpr int64_t kShardRows = 64;

  struct Side {
    const Tensor& to;
    ConstTensor sums;  // of the input's shape, but for the last dimension
    int64_t length, stride, column;
    double factor;
  };
  // Gradients of ropes are the last columns of the sums of keys.
  Side keys() const { return of_keys(d_.grads.grad_key, 0, key_dim_); }
  Side ropes() const { return of_keys(d_.grads.grad_key_rope, key_dim_, d_.p.rope_dim); }
  Side of_keys(const Tensor& to, int64_t column, int64_t length) const {
    return {to, sums(d_.in.key, z_.acc_stride, 0), length, z_.acc_stride, column, d_.rules.scale().of_score};
  }
  Side values() const {
    return {d_.grads.grad_value,
            sums(d_.in.value, z_.value_acc_stride, d_.problem.key_rows * z_.acc_stride),
            z_.value_head_dim,
            z_.value_acc_stride,
            0,
            1 / d_.rules.keep_prob()};
  }
  ConstTensor sums(ConstTensor t, int64_t stride, int64_t before) const {
    const int64_t heads = t.shape[heads_dim_], rows = t.shape[rows_dim_];
    t.dtype = d_.numbers.f64 ? DType::f64 : DType::f32;
    t.data = d_.numbers.at(d_.call.list_sums, before);
    t.shape[3] = stride;
    t.strides[3] = 1;
    t.strides[rows_dim_] = stride;
    t.strides[heads_dim_] = rows * stride;
    t.strides[0] = d_.p.varlen_k ? 0 : heads * rows * stride;
    return t;
  }

  // Finds the sums of the keys of a block's list (those of the values, where keys have none); returns how many they are.
  int64_t locate_sums(const BackwardBlock& b, const BackwardWorker& w) const {
    const Side s = d_.wants_key() ? keys() : values();
    const KvRows rows = d_.kv_rows(s.sums, b.head);
    int64_t count = 0;
    SelectedKeys list = rows_.list_of(b, w);
    for (KvTile t{}; list.next(&t, nullptr, nullptr); count += t.count)
      rows.locate(list.runs_of(t), w.sum_rows + count);
    return count;
  }
  void add_row(const Side& s, void* from, int64_t i, int64_t row) const {
    void* const to = d_.numbers.at(const_cast<void*>(s.sums.data), row * s.stride);
    d_.kernels.add_row(d_.numbers.at(from, i * s.stride), s.stride, to);
  }
  Turn& turn(int64_t head, int64_t shard) const {
    return d_.call.list_turns[(d_.p.paged ? 0 : head) * kListShards + shard];
  }

  const BlockRows& rows_;
  const BackwardData& d_ = rows_.d_;
  const BackwardSizes& z_ = d_.layout.sizes;
  const int64_t key_dim_ = d_.p.head_dim - d_.p.rope_dim;
  const int heads_dim_ = d_.p.paged ? 2 : 1, rows_dim_ = d_.p.paged ? 1 : 2;
};

}  // namespace opst::attention

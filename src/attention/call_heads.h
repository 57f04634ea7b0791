// CallHeads: the (batch, KV head) pairs of a call, forward or backward, and where the rows of each lie in the tensors.
//
// `head` counts the pairs throughout. The query heads of a pair, its group, are stacked: row r is query r / group of
// head r % group. Tensors have the shapes of a call without varlen (uniform_shapes).
#pragma once

#include "attention/kernels.h"
#include "attention/kv_blocks.h"
#include "attention/kv_rows.h"
#include "attention/sequences.h"

namespace opst::attention {

struct CallHeads {
  const AttentionInputs& in;
  const AttentionProblem& p;
  const Sequences sequences{in, p};
  const int64_t group = p.num_heads / p.num_kv_heads;  // query heads per KV head
  const int64_t heads = p.batch * p.num_kv_heads;

  int64_t batch(int64_t head) const { return head / p.num_kv_heads; }
  int64_t kv_head(int64_t head) const { return head % p.num_kv_heads; }
  // The query head of a stacked row.
  int64_t query_head(int64_t head, int64_t row) const { return kv_head(head) * group + row % group; }
  int64_t query_rows(int64_t head) const { return sequences.query_len(batch(head)) * group; }

  Visibility visibility(int64_t head) const {
    const int64_t b = batch(head);
    return Visibility::of(p.options, sequences.query_len(b), sequences.kv_len(b), sequences.prefix(b));
  }

  // Rows of key or value, or of a tensor of the shape of one.
  KvRows kv_rows(const ConstTensor& t, int64_t head) const {
    return KvRows::of(t, in, p, sequences, batch(head), kv_head(head));
  }

  // Rows of query, of a tensor of its shape, or of a statistic. Nothing for a tensor without data.
  StackedRows stacked_rows(const ConstTensor& t, int64_t head) const {
    if (t.data == nullptr) return {};
    const int64_t b = batch(head);
    const int64_t offset =
        b * t.strides[0] + query_head(head, 0) * t.strides[1] + sequences.query_start(b) * t.strides[2];
    // The kernels' struct serves inputs and outputs; inputs are only read through it.
    char* data = const_cast<char*>(static_cast<const char*>(t.data)) + offset * size_bytes(t.dtype);
    return {data, t.dtype, t.strides[2], t.strides[1], t.strides[3], group};
  }
};

}  // namespace opst::attention

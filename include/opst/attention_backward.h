// Attention backward: the gradients of flash_attention_forward, in O(N) memory.
//
//   P = exp(S - lse)                    recomputed from what forward saved; S, its masks and biases as in attention.h
//   delta = rowsum(dO * O);  dV = dropout(P)^T dO;  dP = dropout(dO V^T);  dS = P (dP - delta + grad_lse)
//   dZ = dS (1 - (Y / softcap)^2), or dS without a softcap
//   dQ = softmax_scale dZ K;  dK = softmax_scale dZ^T Q     summed over the query heads of a KV head
//   dbias = bias_scale dS, summed where the bias repeats;  dsink = -sum over rows of exp(sink - lse) (delta - grad_lse)
//
// The same inputs and options that forward was called with, and
//   out          [batch, num_heads, query_len, value_head_dim]   what forward wrote, in any of its dtypes
//   grad_out     out's shape                                     f32, bf16, f16; f64 if all are f64
//   softmax_lse  f32 (f64) [batch, num_heads, query_len]         or softmax_max and softmax_sum
// give
//   grad_query, grad_key, grad_value    shapes of query, key, value; f32, bf16, f16; f64 where query is
//   grad_query_rope, grad_key_rope      shapes of query_rope, key_rope, where ropes lie apart; dtypes as grad_query's
//   grad_bias, grad_sinks               shapes of bias, sinks; f32 (f64)
// With cu_seqlens_q or cu_seqlens_k these, too, hold the sequences one after the other. Rows behind the last sequence
// get 0. With a block_table grad_key and grad_value have the shapes of the cache, [num_blocks, block_size,
// num_kv_heads, ...], of PageLayout::norm, and every element is written. A row of a page that belongs to several
// sequences, or to several places of one, gets the sum of all its gradients, rounded once; one of nobody 0.
//
// Rules: a row that sees no key gets grad_query = 0 and adds nothing to the other gradients, whatever its grad_out
// holds; so does a row whose saved lse is infinite. (With a sink its lse is a number, and its grad_lse reaches the
// sink.) A bias of -inf hides its key as in forward: a NaN score stays NaN. A key that no row sees gets 0. NaN and Inf
// in an input reach what depends on them and nothing else. Every sum is in f32 (f64 for f64) whatever the storage type,
// in an order that depends on the problem only: the same bits on every run and for any number of threads. Outputs must
// not overlap each other, themselves or an input.
//
// Time 2 * (3 head_dim + 2 value_head_dim) * visible pairs * num_heads flops: five products, S and dP once. Parallel
// over tiles of keys and over heads. Memory beyond inputs and outputs: packed queries and gradients of a few heads at a
// time, and a fixed amount per thread (plan_attention_backward tells).
//
//   flash_attention_forward(context, inputs, {.out = o, .softmax_lse = lse}, options);
//   flash_attention_backward(context, inputs, {.out = o, .softmax_lse = lse, .grad_out = go},
//                            {.grad_query = gq, .grad_key = gk, .grad_value = gv}, options);
//
// Errors: invalid_argument names the tensor or option, the dimension and both values; nothing has been written then.
// unsupported: panel32 pages (convert_pages gives norm ones); grad_bias with sparse indices. With sparse indices memory
// grows by sums for every key in f32 (f64), and by those of a list for each thread.
//
// Source: Dao et al., "FlashAttention" (2022), appendix B.4.
#pragma once

#include "opst/attention.h"

namespace opst {

// What forward wrote, and the gradient with respect to it.
struct AttentionSaved {
  ConstTensor out;
  ConstTensor softmax_lse = {};  // this one, or
  ConstTensor softmax_max = {};  // these two
  ConstTensor softmax_sum = {};
  ConstTensor grad_out;
  // With respect to softmax_lse, softmax_lse's dtype and shape; only if it has data. Makes merged parts differentiable.
  ConstTensor grad_lse = {};
};

// Each only if it has data: what is not wanted is not computed.
struct AttentionGradients {
  Tensor grad_query = {};
  Tensor grad_key = {};
  Tensor grad_value = {};
  Tensor grad_bias = {};
  Tensor grad_sinks = {};
  Tensor grad_query_rope = {};
  Tensor grad_key_rope = {};
};

Status flash_attention_backward(Context& context, const AttentionInputs& inputs, const AttentionSaved& saved,
                                const AttentionGradients& gradients, const AttentionOptions& options = {});

// What a plan depends on.
struct AttentionBackwardProblem {
  AttentionProblem forward = {};  // kv_len: of the key tensor; varlen and paged: of the longest sequence
  DType grad_out_dtype = DType::f32;
  bool grad_bias = false, grad_sinks = false;  // wanted
  int64_t num_blocks = 0;                      // paged: of the cache
  int64_t shared_blocks = 0;                   // paged: blocks that come more than once in the block table
  int64_t key_rows = 0;                        // with sparse indices: rows of the key tensor, of all KV heads
};

// A pure function of problem and machine; never of the number of threads.
struct AttentionBackwardPlan {
  AttentionProduct product = AttentionProduct::f32;
  int64_t block_q = 0;         // rows of queries that meet a tile of keys at a time
  int64_t block_kv = 0;        // keys of a tile; a task is one tile against all rows that see it, or, with sparse
                               // indices, one block against all tiles of its list
  int64_t heads_per_wave = 0;  // (batch, KV head) pairs whose packed queries are one of the two buffers
  int64_t num_tasks = 0;       // of the whole call, packing not counted
  int64_t scratch_bytes_shared = 0;
  int64_t scratch_bytes_per_worker = 0;

  int64_t scratch_bytes(int num_threads) const;
};

// For any numbers, as plan_attention: no tasks and no memory for a problem that no call may pose.
AttentionBackwardPlan plan_attention_backward(const AttentionBackwardProblem& problem, const Machine& machine);
std::string to_string(const AttentionBackwardPlan& plan);

}  // namespace opst

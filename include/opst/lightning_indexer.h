// LightningIndexer: which keys of a long context are worth attending to. Each query scores the keys that it sees by a
// cheap product, and the best of them are selected, for attention that reads those keys alone.
//
//   score[t, j] = sum over heads g of weights[t, g] * relu(query[t, g] . key[j])
//   indices[t]  = the `count` keys with the largest scores among those that query t sees, best first
//   values[t]   = their scores
//
// query    [batch, num_heads, query_len, head_dim]             f32, bf16, f16
// key      [batch, num_kv_heads, kv_len, head_dim]             f32, bf16, f16; may differ from query's dtype
// weights  [batch, num_heads, query_len]                       f32, bf16, f16
// indices  [batch, query_len, num_kv_heads, count]             i32: keys of the sequence, then -1
// values   [batch, query_len, num_kv_heads, count]             f32, bf16, f16: scores, rounded once; -inf beside -1
//
// num_heads is a positive multiple of num_kv_heads, which is 1 in the models that have such an indexer. Query head h
// belongs to key head h / (num_heads / num_kv_heads), and each key head has a selection of its own: the sum goes over
// its query heads. head_dim is 1 to 768. Inputs may have any strides >= 0; outputs must not overlap themselves or
// another tensor of the call. A sequence has at most 2^31 - 1 keys.
//
// Varlen, as in attention.h: with cu_seqlens_q
//   query [total_q, num_heads, head_dim], weights [total_q, num_heads],
//   indices and values [total_q, num_kv_heads, count]
// and with cu_seqlens_k key [total_k, num_kv_heads, head_dim]. Each may be given without the other. Paged keys: with a
// block_table key is [num_blocks, block_size, num_kv_heads, head_dim], pages of PageLayout::norm, and kv_lengths must
// be given. Entries of the table beyond a sequence's keys are never read, nor are the rows of a page beyond them.
//
// Query i of a sequence sees key j where j < kv_len and, if causal, j <= i + kv_len - query_len (the last query sees
// every key), with the lengths of the sequence. Queries at query_lengths[b] and beyond see none, nor do rows behind the
// last sequence of cu_seqlens_q. What is not seen never matters, NaN included.
//
// The order. Larger scores come first; of equal scores (0 and -0 are equal) the smaller index; NaN scores come last,
// behind -inf, smaller index first: a key whose score is NaN is selected only where fewer than `count` others are seen,
// and its value is NaN. A query that sees n < count keys has all n of them, then -1. A zero among `values` is +0.
//
// Numerics. Products are summed over head_dim, then over the heads in ascending order, in f32 (bf16 times bf16 by the
// pairwise dot product where that is the faster instruction). relu(NaN) is NaN, and infinities follow IEEE 754: a
// weight of 0 times an infinite product is NaN. The same bits for any number of threads, any tile sizes, and for dense
// keys and pages of the same values.
//
// Time 2 * head_dim * visible pairs * num_heads flops. Memory beyond inputs and outputs: at most one packed copy of the
// keys, and for each task, a few queries, a multiple of count. The [queries, keys] matrix of scores never exists.
//
//   lightning_indexer(context, {.query = q, .key = k, .weights = w}, {.indices = best}, {.causal = true});
//
// Errors: invalid_argument names the tensor or option, the dimension and both values; nothing has been written then.
//
// Source: DeepSeek-AI, "DeepSeek-V3.2-Exp: Boosting Long-Context Efficiency with DeepSeek Sparse Attention" (2025),
// equation 1.
#pragma once

#include <cstdint>
#include <string>

#include "opst/attention.h"
#include "opst/context.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst {

struct LightningIndexerInputs {
  ConstTensor query;
  ConstTensor key;
  ConstTensor weights;

  // Each of the following only if it has data.
  ConstTensor block_table = {};  // i32 or i64 [batch, max_blocks]
  ConstTensor kv_lengths = {};   // i32 or i64 [batch]: keys of each sequence; required with a block_table
  ConstTensor query_lengths =
      {};                         // i32 or i64 [batch], 0 to query_len: queries of each sequence; not with cu_seqlens_q
  ConstTensor cu_seqlens_q = {};  // i32 or i64 [batch + 1]: where sequences begin
  ConstTensor cu_seqlens_k = {};
};

struct LightningIndexerOutputs {
  Tensor indices;
  Tensor values = {};  // only if it has data
};

struct LightningIndexerOptions {
  bool causal = false;
  // Queries of a task, and keys of a tile. 0: the plan's choice. Up to 4096.
  int64_t block_q = 0, block_kv = 0;
};

Status lightning_indexer(Context& context, const LightningIndexerInputs& inputs, const LightningIndexerOutputs& outputs,
                         const LightningIndexerOptions& options = {});

// What a plan depends on.
struct LightningIndexerProblem {
  DType query_dtype = DType::f32, kv_dtype = DType::f32;
  int64_t batch = 1, num_heads = 1, num_kv_heads = 1;
  int64_t query_len = 0, kv_len = 0;  // varlen, paged: of the longest sequence
  int64_t head_dim = 1;
  int64_t count = 0;
  LightningIndexerOptions options = {};
};

// The problem that a call of lightning_indexer with these tensors poses, or why the call would be refused.
Result<LightningIndexerProblem> lightning_indexer_problem(const LightningIndexerInputs& inputs,
                                                          const LightningIndexerOutputs& outputs,
                                                          const LightningIndexerOptions& options = {});

// A pure function of problem and machine; never of the number of threads.
struct LightningIndexerPlan {
  KvAccess kv_access = KvAccess::packed_shared;  // packed_per_task or packed_shared
  AttentionProduct product = AttentionProduct::f32;
  int64_t block_q = 0;         // queries of one task
  int64_t block_kv = 0;        // keys of one tile
  int64_t tile_rows = 0;       // rows (a head of a query each) of one register tile, whose products stay in L1
  int64_t kv_splits = 1;       // parts of the keys; selected from apart, then joined
  int64_t keys_per_split = 0;  // a multiple of block_kv
  int64_t heads_per_wave = 0;  // (batch, key head) pairs whose packed keys are held at once
  int64_t num_tasks = 0;       // packing and joining not counted
  int64_t kept = 0;            // candidates of a query that a selection leaves: count, or all keys of a part
  int64_t candidates = 0;      // of a query, held until the next selection
  int64_t scratch_bytes_shared = 0;
  int64_t scratch_bytes_per_worker = 0;
  const char* reason = "";  // why this access

  int64_t scratch_bytes(int num_threads) const;
};

// For any numbers: a problem that no call may pose has a plan of no tasks and no memory whose reason says so. More than
// 2^56 tasks or bytes count as 2^56.
LightningIndexerPlan plan_lightning_indexer(const LightningIndexerProblem& problem, const Machine& machine);
std::string to_string(const LightningIndexerPlan& plan);

}  // namespace opst

// Attention forward, exact and in O(N) memory.
//
//   S = softmax_scale * Q K^T;   hide keys;   P = softmax(S) by rows;   O = P V
//
// query  [batch, num_heads, query_len, head_dim]            f32, bf16, f16; f64 if all are f64
// key    [batch, num_kv_heads, kv_len, head_dim]            f32, bf16, f16, f64; may differ from query's dtype
// value  [batch, num_kv_heads, kv_len, value_head_dim]      key's dtype
// out    [batch, num_heads, query_len, value_head_dim]      f32, bf16, f16; f64 where query is
//
// num_heads is a multiple of num_kv_heads; query head h reads KV head h / (num_heads / num_kv_heads). head_dim and
// value_head_dim are 1 to 768 each and may differ. Inputs may have any strides >= 0; nothing needs to be contiguous.
// The output must not overlap itself or an input.
//
// Paged keys and values: with a block_table,
//   key    [num_blocks, block_size, num_kv_heads, head_dim],  value likewise with value_head_dim (PageLayout::norm), or
//          the shapes of another PageLayout (kv_cache.h): panel32 pages are multiplied without packing
//   key j of sequence b is row j % block_size of block block_table[b][j / block_size]. Entries of the table beyond
//   kv_lengths[b] are never read, nor are the rows of a page beyond it.
//
// Rules: a row that sees no key gives out = 0 and softmax_lse = -inf. NaN and Inf in an input reach exactly the rows
// that depend on it; the bytes of a hidden key never matter. Accumulation is in f32 (f64 for f64). The same bits for
// any number of threads, and for contiguous keys and norm pages of the same values.
//
// Time 2 * (head_dim + value_head_dim) * visible pairs * num_heads flops; memory beyond inputs and outputs: at most one
// packed copy of the keys and values and a fixed amount per thread (plan_attention tells).
//
//   flash_attention_forward(context, {.query = q, .key = k, .value = v}, {.out = o}, {.causal = true});
//
// Source: Dao et al., "FlashAttention" (2022), algorithm 1; Milakov and Gimelshein, "Online normalizer calculation for
// softmax" (2018).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "opst/context.h"
#include "opst/kv_cache.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst {

// Where the diagonal of a causal mask lies when query_len and kv_len differ: query i sees keys
//   top_left       j <= i
//   bottom_right   j <= i + kv_len - query_len       (the last query sees every key; what a KV cache needs)
enum class CausalAlignment : uint8_t { top_left, bottom_right };

enum class AttentionPath : uint8_t {
  automatic,  // the plan's choice
  standard,   // the whole score matrix in memory: scores, softmax, weighted sum, one after the other
  flash,      // tiles of keys with an online softmax
};
const char* to_string(AttentionPath path);

struct AttentionInputs {
  ConstTensor query;
  ConstTensor key;
  ConstTensor value;
  // i32 or i64 [batch, max_blocks]; absent (data = nullptr): dense keys and values.
  ConstTensor block_table = {};
  // i32 or i64 [batch]: keys of each sequence. Required with a block_table; absent: kv_len for all.
  ConstTensor kv_lengths = {};
  PageLayout page_layout = PageLayout::norm;  // with a block_table
};

struct AttentionOutputs {
  Tensor out;
  // f32 (f64 for f64 inputs) [batch, num_heads, query_len], each only if it has data:
  Tensor softmax_lse = {};  // natural logarithm of the sum of exp(score)
  Tensor softmax_max = {};  // largest score; -inf where no key is seen
  Tensor softmax_sum = {};  // sum of exp(score - max)
};

struct AttentionOptions {
  std::optional<float> softmax_scale = {};  // default 1 / sqrt(head_dim); any finite number
  bool causal = false;
  CausalAlignment alignment = CausalAlignment::bottom_right;
  AttentionPath path = AttentionPath::automatic;
  // Tile sizes: rows of queries (query heads of one KV head are stacked) and keys. 0: the plan's choice. Up to 4096.
  int64_t block_q = 0;
  int64_t block_kv = 0;
};

Status flash_attention_forward(Context& context, const AttentionInputs& inputs, const AttentionOutputs& outputs,
                               const AttentionOptions& options = {});

// What a plan depends on.
struct AttentionProblem {
  DType query_dtype = DType::f32;
  DType kv_dtype = DType::f32;
  int64_t batch = 1;
  int64_t num_heads = 1;
  int64_t num_kv_heads = 1;
  int64_t query_len = 0;
  int64_t kv_len = 0;  // paged: the longest sequence
  int64_t head_dim = 1;
  int64_t value_head_dim = 1;
  bool paged = false;
  PageLayout page_layout = PageLayout::norm;
  int64_t block_size = 0;      // paged: keys of a page
  bool unit_stride_kv = true;  // the elements of a key, and of a value, are next to each other
  AttentionOptions options = {};
};

// How keys and values reach the micro-kernels.
enum class KvAccess : uint8_t {
  in_place,         // rows are read where they are: few query rows, bound by memory
  panel_pages,      // panel32 pages are multiplied as they are
  packed_per_task,  // each task packs the tile that it is about to use: one block of query rows per KV head
  packed_shared,    // packed once per KV head, read by all its blocks of query rows
};
const char* to_string(KvAccess access);

// Which instruction multiplies: f32 FMA, pairwise bf16 dot, f64.
enum class AttentionProduct : uint8_t { f32, bf16_dot, f64 };
const char* to_string(AttentionProduct product);

// A pure function of problem and machine; never of the number of threads.
struct AttentionPlan {
  AttentionPath path = AttentionPath::flash;  // standard or flash
  KvAccess kv_access = KvAccess::packed_shared;
  AttentionProduct product = AttentionProduct::f32;
  int64_t block_q = 0;         // rows of one task
  int64_t block_kv = 0;        // keys of one tile
  int64_t kv_splits = 1;       // parts of the keys that are attended separately, then merged in order
  int64_t keys_per_split = 0;  // a multiple of block_kv
  int64_t heads_per_wave = 0;  // (batch, KV head) pairs whose packed keys and values are held at once
  int64_t num_tasks = 0;       // of the whole call, packing not counted
  int64_t scratch_bytes_shared = 0;
  int64_t scratch_bytes_per_worker = 0;
  const char* reason = "";  // why this path and this access

  int64_t scratch_bytes(int num_threads) const { return scratch_bytes_shared + num_threads * scratch_bytes_per_worker; }
};

AttentionPlan plan_attention(const AttentionProblem& problem, const Machine& machine);
std::string to_string(const AttentionPlan& plan);

}  // namespace opst

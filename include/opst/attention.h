// Attention forward, exact and in O(N) memory on every combination of options.
//
//   Z = softmax_scale * Q K^T;   Y = softcap * tanh(Z / softcap);   S = Y + alibi + bias_scale * bias;   hide keys
//   P = softmax(S) by rows, with the sink among the scores;   O = dropout(P) V
//
// query  [batch, num_heads, query_len, head_dim]            f32, bf16, f16; f64 if all are f64
// key    [batch, num_kv_heads, kv_len, head_dim]            f32, bf16, f16, f64; may differ from query's dtype
//        of pages also i8, u8 (two numbers of four bits), f8_e4m3, f8_e5m2
// value  [batch, num_kv_heads, kv_len, value_head_dim]      key's dtype
// out    [batch, num_heads, query_len, value_head_dim]      f32, bf16, f16; f64 where query is
//
// num_heads is a multiple of num_kv_heads; query head h reads KV head h / (num_heads / num_kv_heads). head_dim and
// value_head_dim are 1 to 768 each and may differ. Inputs may have any strides >= 0; nothing needs to be contiguous.
// The output must not overlap itself or an input.
//
// Varlen. With cu_seqlens_q, query, out and the statistics hold sequences of any lengths end to end, without padding:
//   query [total_q, num_heads, head_dim], out [total_q, num_heads, value_head_dim], softmax_lse [num_heads, total_q]
// and sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1. With cu_seqlens_k the same holds for
//   key [total_k, num_kv_heads, head_dim], value [total_k, num_kv_heads, value_head_dim].
// Each may be given without the other; cu_seqlens_q also with pages (chunked prefill and mixed batches in one call).
// The first entry is 0, entries do not decrease, the last is at most the total. Sequences may be empty. Rows of the
// outputs behind the last sequence become rows that see no key. Below, query_len and kv_len are those of sequence b.
//
// Paged keys and values: with a block_table,
//   key    [num_blocks, block_size, num_kv_heads, head_dim],  value likewise with value_head_dim (PageLayout::norm), or
//          the shapes of options.page_layout (page_layout.h): panel32 pages are multiplied without packing, but for u8
//          and for i8 with offsets or several scales to a row
//   key j of sequence b is row j % block_size of block block_table[b][j / block_size]. Entries of the table beyond
//   kv_lengths[b] are never read, nor are the rows of a page beyond it. Pages of i8, u8 (with scales,
//   and offsets where there are some), f8_e4m3 and f8_e5m2 are read where they are, without a copy of the cache in floats. Rows of
//   norm pages lie with unit stride then. A scale that is read and is negative or NaN, and an offset that is not finite,
//   are refused: those of keys that some query sees.
//
// Which keys query i of a sequence sees: key j where all of these hold
//   - j < kv_lengths[b], if there are lengths;
//   - i + off - window_left <= j <= i + off + window_right, or j < prefix[b];  causal means window_right <= 0.
//     off = 0 (top_left) or kv_len - query_len (bottom_right). A side that is kUnbounded does not limit. Both ends are
//     included: a window of (4, 0) sees 5 keys. Negative sides are bands away from the diagonal, and may see nothing;
//   - the bool mask is not 0 there;
//   - the block mask (block_mask.h) shows the pair's blocks, or the query's list of indices has the key's block
//     (sparse_indices.h);
//   - the tree mask has the key's bit, or the key is before the draft tokens;
//   - the biased score is not -inf.
//
// Rules: a row that sees no key gives out = 0 and softmax_lse = -inf (with a sink: softmax_lse = sink). NaN and Inf in
// an input reach exactly the rows that depend on it; the bytes of a key hidden by structure (lengths, windows, prefix),
// by the bool mask, the block mask or a list never matter. A bias adds: -inf hides its key (a NaN score stays NaN), the
// lowest finite float is only a very small score. Accumulation is in f32 (f64 for f64). The same bits for any number of
// threads, for contiguous keys and norm pages of the same values, and for a sequence whatever others the call has (but
// with a block mask, dropout, or pages that neighbours share, options.shared_prefix). An option that changes nothing (a
// mask of ones, keep_prob = 1) changes no bit; a block mask of all blocks may, since tiles are cut where it is.
//
// Time 2 * (head_dim + value_head_dim) * visible pairs * num_heads flops; memory beyond inputs and outputs: at most one
// packed copy of the keys and values, sums of up to 31 blocks of rows for each sequence whose keys are split, sums of the
// rows of sequences that share keys, and a fixed amount per thread (plan_attention and plan_shared_prefix tell). Masks
// are never expanded.
//
//   flash_attention_forward(context, {.query = q, .key = k, .value = v}, {.out = o}, {.causal = true});
//
// Errors: invalid_argument names the tensor or option, the dimension and both values; nothing has been written then.
//
// Threads: the structs here are plain values, and plans are pure functions. Several threads may call the operators on
// one Context at once, as long as no call writes memory that another one reads or writes.
//
// Source: Dao et al., "FlashAttention" (2022), algorithm 1; Milakov, Gimelshein, "Online normalizer calculation for
// softmax" (2018); ALiBi: Press et al., "Train Short, Test Long" (2022); Philox: Salmon et al., "Parallel Random
// Numbers: As Easy as 1, 2, 3" (2011). Trees: Miao et al., "SpecInfer" (2024); Li et al., "EAGLE-2" (2024); words of bits
// are spec_decoding_packed_mask of TensorRT-LLM and QLEN_ONLY_BITPACKING of SGLang.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "opst/block_mask.h"
#include "opst/context.h"
#include "opst/page_layout.h"
#include "opst/sparse_indices.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst {

// Where the diagonal of causal masks, windows and ALiBi lies. Under a causal mask query i sees keys
//   top_left       j <= i
//   bottom_right   j <= i + kv_len - query_len       (the last query sees every key; what a KV cache needs)
enum class CausalAlignment : uint8_t { top_left, bottom_right };

// The value of AttentionOptions::shared_prefix by which the plan finds what sequences share.
inline constexpr int64_t kFindShared = -1;

// A side of a window that hides nothing.
inline constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();

// The bias of distance d = |(j + key_start) - (i + query_start) - off|:
enum class AlibiForm : uint8_t {
  linear,       // -slope d
  square_root,  // -slope sqrt(d)
};

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
  // f32, of pages of i8 and u8, one for each group of a row: pages in the keys' layout (PageScales in kv_cache.h), norm
  // ones [num_blocks, block_size, num_kv_heads, key_groups (value_groups)] with any strides. A number of key j is
  // (q + offset) * scale; the offsets of keys and of values only both.
  ConstTensor key_scales = {}, value_scales = {};
  ConstTensor key_offsets = {}, value_offsets = {};

  // Each of the following only if it has data.
  // i32 or i64 [batch + 1]: where sequences begin; see above.
  ConstTensor cu_seqlens_q = {};
  ConstTensor cu_seqlens_k = {};
  // i32 or i64 [batch], 0 to the sequence's kv_len: the first prefix[b] keys are visible to every query.
  ConstTensor prefix = {};
  // bool, not 0 = visible; shape broadcasts to [batch, num_heads, query_len, kv_len] (missing dimensions in front and
  // sizes of 1 repeat). Varlen and paged: the last two sizes, where not 1, are at least the longest sequence's; a
  // sequence reads from index 0.
  ConstTensor mask = {};
  // f32 or query's dtype, shapes as for mask: added to the score in f32 (f64 for f64).
  ConstTensor bias = {};
  // f32 (f64 for f64) [num_heads] or [batch, num_heads].
  ConstTensor alibi_slopes = {};
  // f32 (f64 for f64) [num_heads]: one more score of each row, which joins max, sum and lse but has no value.
  ConstTensor sinks = {};
  // u8, contiguous: bit k of byte m is element 8 m + k of [batch, num_heads, query_len, kv_len] (dense: kv_len of the
  // tensor; paged: the longest length; varlen: the sequences' [num_heads, query_len, kv_len] one after the other);
  // 1 = keep. Takes the place of the seed; kept values are scaled by 1 / keep_prob.
  ConstTensor drop_mask = {};
  // Which pairs of a query block and a key block are computed; absent: all.
  BlockMask block_mask = {};
  // Which keys each query reads; absent: all.
  SparseIndices sparse_indices = {};
  // i64 [batch, query_len], varlen [total_q]: trees of draft tokens (speculative decoding). The last query_len keys of a
  // sequence are those of its queries, up to 64: query i sees key kv_len - query_len + j where bit j of its word is 1,
  // and keys before the draft tokens whatever the word. Bits from query_len on are 0, or the word is -1, which hides
  // nothing: so a call takes sequences of trees beside others, whose queries may be any number. Windows and ALiBi
  // count in keys, not in steps of the tree.
  ConstTensor tree_mask = {};
  // The score is [query | query_rope] . [key | key_rope] (sparse_indices.h): query's and key's dtype, both or neither.
  ConstTensor query_rope = {}, key_rope = {};
};

struct AttentionOutputs {
  Tensor out;
  // f32 (f64 for f64 inputs) [batch, num_heads, query_len], each only if it has data:
  Tensor softmax_lse = {};  // natural logarithm of the sum of exp(score)
  Tensor softmax_max = {};  // largest score; -inf where no key is seen
  Tensor softmax_sum = {};  // sum of exp(score - max), before dropout
};

// Weights are kept with probability keep_prob and then scaled by 1 / keep_prob. Which are kept is a pure function of
// seed, offset and position, whatever the tiles, and the same in forward and backward:
//   Philox4x32-10 with key = {low, high half of seed} and
//   counter = {key index / 4, query index, batch * num_heads + head, low half of offset};
//   word (key index % 4) of the result, as a 32-bit number, < keep_prob * 2^32 keeps the weight.
// Indices are within the sequence. A call that holds a piece of a larger problem says where the piece begins.
struct DropoutOptions {
  double keep_prob = 1;  // in [2^-32, 1]
  uint64_t seed = 0;
  uint64_t offset = 0;
  int64_t first_query = 0, first_key = 0, first_head = 0;
  int64_t total_heads = 0;  // query heads of the larger problem; 0: num_heads
};

struct AttentionOptions {
  // Default 1 / sqrt(head_dim); any finite number, as is for f64 and rounded to f32 for other queries.
  std::optional<double> softmax_scale = {};
  bool causal = false;
  CausalAlignment alignment = CausalAlignment::bottom_right;
  AttentionPath path = AttentionPath::automatic;
  // Tile sizes: rows of queries (query heads of one KV head are stacked) and keys. 0: the plan's choice. Up to 4096.
  int64_t block_q = 0, block_kv = 0;
  int64_t window_left = kUnbounded, window_right = kUnbounded;
  double softcap = 0;     // > 0: scores are bounded by +-softcap; 0: they are not
  double bias_scale = 1;  // any finite number
  AlibiForm alibi_form = AlibiForm::linear;
  int64_t alibi_query_start = 0, alibi_key_start = 0;  // of a sequence that was cut: indices of its first query and key
  PageLayout page_layout = PageLayout::norm;           // of keys and values, with a block_table
  // Leading keys that neighbouring sequences hold in the same pages, read once for all of them: those that block_table
  // shows (kFindShared); none (0); or the first n keys of all sequences, which it must show. See plan_shared_prefix.
  int64_t shared_prefix = kFindShared;
  DropoutOptions dropout = {};
};

Status flash_attention_forward(Context& context, const AttentionInputs& inputs, const AttentionOutputs& outputs,
                               const AttentionOptions& options = {});

// What causal masks, windows and a prefix show of one sequence, for one head. Masks, block masks and biases are not
// looked at.
struct VisibleKeys {
  double pairs = 0;  // of a query and a key that it sees
  int64_t keys = 0;  // that some query sees
};
VisibleKeys count_visible(const AttentionOptions& options, int64_t query_len, int64_t kv_len, int64_t prefix = 0);

// What a plan depends on of a block mask.
struct BlockMaskSizes {
  int64_t block_q = 0, block_kv = 0;  // 0: there is no block mask
  int64_t batch = 1, heads = 1;       // of row_offsets, as far as its rows differ in memory
  int64_t row_blocks = 0;             // the most key blocks that a query block sees
  int64_t entries = 0;                // visible pairs of blocks, of all rows

  explicit operator bool() const { return block_q > 0; }
};

// The same of sparse indices.
struct SparseIndicesSizes {
  int64_t block_size = 0;  // 0: there are none
  int64_t count = 0;       // entries of a list

  explicit operator bool() const { return block_size > 0; }
};

// Groups of neighbouring sequences of few queries whose first keys lie in the same pages.
struct SharedPrefixSizes {
  int64_t groups = 0;       // 0: nothing is shared
  int64_t queries = 0;      // the most of a group, of all its sequences
  int64_t all_queries = 0;  // of all groups
  int64_t keys = 0;         // the most that a group shares
};

// What a plan depends on.
struct AttentionProblem {
  DType query_dtype = DType::f32, kv_dtype = DType::f32;
  int64_t batch = 1, num_heads = 1, num_kv_heads = 1;
  int64_t query_len = 0;
  int64_t kv_len = 0;                        // paged: the longest sequence
  int64_t head_dim = 1, value_head_dim = 1;  // rope_dim among the former
  bool paged = false;
  int64_t block_size = 0;  // paged: keys of a page
  // Scales of a row of integers, 0 where there are none; whether there are offsets.
  int64_t key_groups = 0, value_groups = 0;
  bool has_offsets = false;
  bool unit_stride_kv = true;  // the elements of a key, and of a value, are next to each other
  // A token's rows of all KV heads lie in one stretch, of keys and of values (norm pages, [batch, seq, heads, dim]): no
  // rows of other tokens between them.
  bool heads_side_by_side_kv = false;
  AttentionOptions options = {};
  // Varlen: the longest sequences count as query_len and kv_len above.
  bool varlen_q = false, varlen_k = false;
  // Which optional tensors are there.
  bool has_prefix = false, has_mask = false, has_bias = false, has_alibi = false, has_sinks = false,
       has_drop_mask = false, has_tree_mask = false;
  BlockMaskSizes block_mask = {};
  SparseIndicesSizes sparse_indices = {};
  int64_t rope_dim = 0;         // columns of query_rope and key_rope
  bool copies_keys = false;     // key_rope is not the columns behind key's: keys of a tile are copied
  bool values_of_keys = false;  // values are the first columns of the keys' rows (multi-head latent attention)
  SharedPrefixSizes shared_prefix = {};
};

// How keys and values reach the micro-kernels.
enum class KvAccess : uint8_t {
  in_place,         // rows are read where they are (keys with a rope apart, or of panels, copied): few query rows
  panel_pages,      // panel32 pages are multiplied as they are
  packed_per_task,  // each task packs the tile that it is about to use: one block of query rows per KV head
  packed_shared,    // packed once per KV head, read by all its blocks of query rows
};
const char* to_string(KvAccess access);

// Which instruction multiplies: f32 FMA, pairwise bf16 dot, f64.
enum class AttentionProduct : uint8_t { f32, bf16_dot, f64 };
const char* to_string(AttentionProduct product);

// The problem that a call of flash_attention_forward with these inputs poses, or why the call would be refused.
Result<AttentionProblem> attention_problem(const AttentionInputs& inputs, const AttentionOptions& options = {});

// A pure function of problem and machine; never of the number of threads.
struct AttentionPlan {
  AttentionPath path = AttentionPath::flash;  // standard or flash
  KvAccess kv_access = KvAccess::packed_shared;
  AttentionProduct product = AttentionProduct::f32;
  int64_t block_q = 0;       // rows of one task, at most
  int64_t block_kv = 0;      // keys of one tile
  int64_t joined_tiles = 1;  // the most neighbouring tiles of a block mask's list that share a step of the softmax
  int64_t tile_rows = 0;     // rows of one register tile, whose scores stay in L1
  // Parts of the keys that a block may see, attended apart, then joined in key order; of the longest sequence, the others
  // have their own. keys_per_split is a multiple of block_kv.
  int64_t kv_splits = 1, keys_per_split = 0;
  // KV heads of a sequence that one task attends, taking turns: a tile of keys for each, then the next tile.
  int64_t heads_in_turn = 1;
  int64_t parts_per_head = 0;  // of all blocks of a (batch, KV head) pair, at most; 0: no keys are split
  int64_t heads_per_wave = 0;  // (batch, KV head) pairs whose packed keys and values are held at once
  int64_t num_tasks = 0;       // of the whole call, packing not counted
  bool fetch_ahead = false;    // a task of a single tile fetches what the next one reads
  int64_t scratch_bytes_shared = 0;
  int64_t scratch_bytes_per_worker = 0;
  const char* reason = "";  // why this path and this access

  int64_t scratch_bytes(int num_threads) const;
};

// For any numbers: a problem that no call may pose (a size that is negative or beyond 2^56, head_dim 0, an unknown
// enumerator) has a plan of no tasks and no memory whose reason says so. More than 2^56 tasks or bytes count as 2^56.
AttentionPlan plan_attention(const AttentionProblem& problem, const Machine& machine);
std::string to_string(const AttentionPlan& plan);

// A cascade: where groups of sequences share leading keys (AttentionOptions::shared_prefix), the call begins with a
// loop over these, whose rows are the stacked queries of a group; the loops of plan_attention begin behind them, and
// join.
struct SharedPrefixPlan {
  int64_t groups = 0;              // 0: nothing is shared
  int64_t keys = 0;                // the most that a group shares
  AttentionPlan prefix = {};       // of the first loop
  int64_t scratch_bytes_sums = 0;  // which the loops have in common
  const char* reason = "";         // why, or why nothing is shared

  // Of a call with this and a plan of its own.
  int64_t scratch_bytes(const AttentionPlan& own, int num_threads) const;
};
SharedPrefixPlan plan_shared_prefix(const AttentionProblem& problem, const Machine& machine);
std::string to_string(const SharedPrefixPlan& plan);

// Joins attention over parts k of the keys (split keys, a ring of ranks, a shared prefix) into attention over all keys.
//   out = sum over k of exp(lse_k - L) out_k          L: the lse of the result
// in either form of the statistics:
//   softmax_lse          L = log(sum over k of exp(lse_k))
//   softmax_max, _sum    max = largest max_k;   sum = sum over k of sum_k exp(max_k - max);   L = max + log(sum)
// A part with lse = -inf (max = -inf or sum = 0) has seen no key and contributes nothing, whatever its out holds; so
// does a part with lse = +inf, with which other libraries mark such rows. Where all parts are so the result is out = 0,
// lse = max = -inf, sum = 0. One part alone is passed on bit for bit. Parts are added in their order. A sink belongs to
// one part only, or is a part of its own: out = 0, lse = sink. A NaN statistic makes its row NaN.
//
// Sums are in f32 (f64) whatever the parts' type, and each element of the result is rounded once. With `accumulate`
// the outputs hold the first part, element for element: a ring adds each part that arrives to the sum so far. An out of
// f32 is rounded to 16 bits once, at the end; an out of 16 bits is rounded again by every call.
struct AttentionParts {
  ConstTensor out;  // f32, bf16, f16 or f64 [parts, ...], up to 4 more dimensions; the last one is value_head_dim
  ConstTensor softmax_lse = {};  // f32 (f64 for f64 parts), out's shape without its last dimension; or
  ConstTensor softmax_max = {};  // both of these
  ConstTensor softmax_sum = {};
};

// outputs.out [...] without the parts dimension, in any floating dtype (f64 for f64 parts); each of lse, max and sum
// only if it has data. max and sum need the parts' max and sum; accumulate needs the statistics of the parts' form.
Status merge_attention(Context& context, const AttentionParts& parts, const AttentionOutputs& outputs,
                       bool accumulate = false);

}  // namespace opst

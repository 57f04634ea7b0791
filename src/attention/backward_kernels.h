// The contract between backward.cc, which has the order of calls, and its per-level kernels: blocks of query rows
// against one KV tile at a time.
//
// As in kernels.h, kernels know neither layouts nor masks: a layout is an array of row pointers or a StackedRows, a
// mask an interval of visible keys per row. Plain data only; all memory is the caller's. "Words" and "accumulator type"
// as in kernels.h. Row forms and column forms: backward_forms.h.
#pragma once

#include "attention/kernels.h"

namespace opst::attention {

struct BackwardSizes {
  int64_t head_dim, value_head_dim;
  int64_t query_stride, value_stride;    // of row forms of Q and K, and of dO, in words
  int64_t acc_stride, value_acc_stride;  // of accumulators of head_dim and value_head_dim
};

// A block of query rows in scratch memory.
struct QueryRows {
  int64_t rows;
  void* query;          // words [rows][query_stride]
  void* grad_out;       // words [rows][value_stride]
  void* query_columns;  // column forms of the two; unused where the row form serves
  void* grad_out_columns;
  void* origin;            // accumulators [rows]: P = exp2(c (s - origin) - reference) * weight
  void* reference;         // [rows]
  void* weight;            // [rows]; 0 where the row takes no part: its Q, dO and delta are 0 then
  void* delta;             // [rows]: rowsum(dO * O) - grad_lse
  void* grad_query;        // [rows][acc_stride]
  bool* finite = nullptr;  // no NaN or Inf in Q and dO of the block
  bool* far = nullptr;     // scores are so large that the saved statistics tell too little of them: see add_statistics
};

struct PackQueries {
  StackedRows query, out, grad_out;
  StackedRows query_rope;  // the last rope_dim columns of the packed rows, where rope_dim > 0
  int64_t rope_dim;
  StackedRows top, sum, grad_lse;  // lse, or max with its sum; sum and grad_lse may have no data
  int64_t first_row;               // row r of the block is row first_row + r of these
  const int64_t* visible_begin;    // keys that row r may see; a row without any takes no part
  const int64_t* visible_end;
  double query_factor;    // 0 or a power of two, goes into Q
  double score_scale;     // turns a kernel's score into one of the statistics' unit
  double exponent_scale;  // c
  const void** pointers;  // scratch: one per row
};

// One tile of keys, with dK and dV as summed so far.
struct GradTile {
  int64_t first_key;
  int64_t count;
  void* keys;  // column panels of K and of V (tile/pack.h): B operands of Q K^T and dO V^T
  void* values;
  void* key_columns;           // column form of K: B operand of dS K
  void* grad_key = nullptr;    // accumulators [count][acc_stride]
  void* grad_value = nullptr;  // [count][value_acc_stride]; either null where not wanted
  bool keys_finite = false;
};

struct PackKeys {
  const void* const* key_rows;  // a tile's keys, and its values
  const void* const* value_rows;
  int64_t key_dim_stride, value_dim_stride;
};

// A worker's memory for a block against a tile: written by grad_tile, read by it and by grad_query.
struct GradScratch {
  int64_t scores_stride;
  void* probability_columns;  // column forms of P and dS: words [rows / step][scores_stride]
  void* grad_score_columns;
  void* grad_scores;       // row form of dS: words [rows][scores_stride]
  void* raw;               // pairs of bf16: accumulators [2][tile_rows][scores_stride], S and dP of a register tile
  void* cap_slopes;        // with rules: accumulators [tile_rows][scores_stride], derivatives of the softcap
  void* bias_grads;        // accumulators [rows][scores_stride]: dS, for add_grad_bias; null where not wanted
  int64_t* visible_begin;  // as in QueryBlock; read where partial
  int64_t* visible_end;
};

// A block against a tile.
struct GradBlock : GradScratch {
  BackwardSizes sizes;
  QueryRows queries;
  double exponent_scale;    // c = |softmax_scale| * log2(e); log2(e) where scores are natural
  double keep_prob;         // of dropout
  const ScoreRules* rules;  // of the block's rows; null: scores are used as they are
  bool partial;             // some row does not see some key of the tile
  const char* prefetch;     // query rows of the next block, fetched a cache line at a time
};

struct FinishGradient {
  const void* acc;  // accumulators [rows][acc_stride]
  int64_t rows, length, acc_stride;
  double factor;
  int64_t first_row;
  StackedRows out;
};

struct BackwardKernels {
  void (*pack_queries)(const PackQueries& pack, const BackwardSizes& sizes, const QueryRows& out);
  void (*pack_keys)(const PackKeys& pack, const BackwardSizes& sizes, GradTile& tile);  // keys_finite, too
  // For a block that is far: the tiles that it sees, packed for it, give maxima and sums of grad_tile's scores anew.
  // `max` and `sum` [rows] begin as -inf and 0, or as a sink's; then keep_statistics.
  void (*add_statistics)(const GradBlock& block, const GradTile& tile, void* max, void* sum);
  void (*keep_statistics)(const QueryRows& queries, const void* max, const void* sum);
  void (*grad_tile)(const GradBlock& block, const GradTile& tile);   // dV += P^T dO, dK += dS^T Q
  void (*grad_query)(const GradBlock& block, const GradTile& tile);  // dQ += dS K
  // targets[r] + (first_key + j - first_target) * stride += factor * dS[r][j] after grad_tile, row by row.
  void (*add_grad_bias)(const GradBlock& block, const GradTile& tile, void* const* targets, int64_t first_target,
                        int64_t stride, double factor);
  // Whether row r sees a key: one of [begin, end) or below the prefix that neither the mask nor a bias of -inf hides,
  // whatever dropout keeps. Slow, one key at a time.
  bool (*sees_key)(const ScoreRules& rules, int64_t r, int64_t begin, int64_t end);
  void (*finish_rows)(const FinishGradient& finish);
  // sums[i] += terms[i], accumulators; count is a multiple of the lanes.
  void (*add_row)(const void* terms, int64_t count, void* sums);
};

using BackwardKernelTable = TableOf<BackwardKernels>;

}  // namespace opst::attention

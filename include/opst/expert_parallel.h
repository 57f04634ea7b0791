// Experts that are spread over ranks: rows of tokens go to the ranks that own their experts, and results come back.
//
// P ranks call the same operator with tensors of their own; communicator.h says how, and which errors there are. Experts
// 0 .. E - 1 belong to ranks in ascending order: rank s owns E_s of them (ExpertShardOptions::experts), which may be
// none; r is the calling rank.
//
//   moe_dispatch, moe_combine      rows to their experts, and the weighted sum of their results (like moe_permute and
//                                  moe_finalize in one process)
//   all_to_allv_grouped_matmul     rows to their experts, times the experts' weights as they arrive
//   grouped_matmul_all_to_allv     rows of experts times their weights, tile by tile back to where the tokens are
//   moe_layer_forward              gating, both of these and the sum: the layer of moe_layer.h over all ranks
//   attention_to_ffn, ffn_to_attention   ranks of two kinds: some attend, the others are feed-forward networks
//
// Rows of a rank's tokens are sorted by expert, hence by owner: [expert][slot]. Rows at an owner are sorted by expert,
// then by the rank that they are from: [expert][rank][slot]. Counts need no agreement in advance: the first message of a
// call holds them.
//
// Numerics: values are copied bit by bit; products have the bits of grouped_matmul with batch_invariant = true. No bit
// depends on timing, tiles or threads, nor on how experts are spread.
// Memory: tiles in flight, at most 2 P tiles per rank, and from the workspace counts [P, E], lists of slots, and what
// operators say.
// Legal: ranks without tokens or experts, experts without tokens, ids of -1 (the slot goes nowhere).
#pragma once

#include <cstdint>
#include <span>

#include "opst/communicator.h"
#include "opst/context.h"
#include "opst/grouped_matmul.h"
#include "opst/moe_layer.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst {

// All ranks pass the same.
struct ExpertShardOptions {
  std::span<const int64_t> experts = {};  // [P] E_s. Empty: all of them divided, the first ranks one more if need be
  int64_t tile_rows = 0;                  // 0: the plan's choice
};

// rows [at least as many as arrive, hidden], the dtype of x; those behind stay as they are
// expert_tokens [E_r] i64 or i32: rows of each expert; the group list of its products
// rank_tokens   [E_r, P] likewise: those from each rank
struct MoeDispatchOutputs {
  Tensor rows;
  Tensor expert_tokens = {};
  Tensor rank_tokens = {};
};
//   x         [tokens, hidden] of any dtype
//   topk_ids  [tokens, top_k] i32 or i64 in [-1, num_experts)
Status moe_dispatch(Context& context, Communicator& communicator, const ConstTensor& x, const ConstTensor& topk_ids,
                    int64_t num_experts, const MoeDispatchOutputs& outputs, const ExpertShardOptions& options = {});

// out[t] = residual[t] + sum over k of topk_weights[t, k] * (the result of slot t, k), in ascending order of k
//   rows          [at least as many as moe_dispatch gave, hidden] f32, bf16 or f16
//   topk_ids      as moe_dispatch took them
//   topk_weights  [tokens, top_k] f32 or the dtype of rows; absent: 1
//   residual, out [tokens, hidden], the dtype of rows
// Memory: this rank's slots [tokens * top_k, hidden], as moe_layer_forward has them.
struct MoeCombineInputs {
  ConstTensor rows;
  ConstTensor topk_ids;
  ConstTensor topk_weights = {};
  ConstTensor residual = {};
};
Status moe_combine(Context& context, Communicator& communicator, const MoeCombineInputs& inputs, int64_t num_experts,
                   const Tensor& out, const ExpertShardOptions& options = {});

struct GroupedExchangeOptions {
  ExpertShardOptions shards = {};
  ConstTensor bias = {};                     // [E_r, n]
  Activation activation = Activation::none;  // all_to_allv_grouped_matmul
  ActivationType activations = ActivationType::exact;
  ConstTensor x_scales = {};  // of an x of i8: all_to_allv_grouped_matmul, [rows of x] f32
  Tensor exchanged = {};      // all_to_allv_grouped_matmul: x as it arrives, of at least as many rows as out needs
};

//   x            [sum of send_counts or more, k]: my tokens' rows; dtypes as grouped_matmul takes them
//   send_counts  [E] i32 or i64: how many are of each expert
//   weight       E_r of [n, k]
//   out          [at least as many as arrive, n]
// Memory: one tile of x besides.
Status all_to_allv_grouped_matmul(Context& context, Communicator& communicator, const ConstTensor& x,
                                  const ConstTensor& send_counts, const GroupedWeight& weight, const Tensor& out,
                                  const GroupedExchangeOptions& options = {});

//   x            [at least as many as all_to_allv_grouped_matmul gave, k]: rows of my experts
//   send_counts  as all_to_allv_grouped_matmul took them: how many rows of each expert come back
//   weight       E_r of [n, k]
//   out          [sum of send_counts or more, n]
// Memory: one tile of the product besides.
Status grouped_matmul_all_to_allv(Context& context, Communicator& communicator, const ConstTensor& x,
                                  const ConstTensor& send_counts, const GroupedWeight& weight, const Tensor& out,
                                  const GroupedExchangeOptions& options = {});

// moe_layer_forward of moe_layer.h of this rank's tokens, with the bits that it has with batch_invariant = true in one
// process that has all experts. inputs.experts: those of this rank, E_r of each; the shared expert whole on every rank;
// num_experts is that of the logits, or options.num_experts. expert_tokens is [E_r].
// Not taken: gate and up projections apart (`up`), ranges of experts, int8 activations with int8 or int4 weights.
// Memory: the hidden rows that arrive, and this rank's slots [tokens * top_k, hidden].
Status moe_layer_forward(Context& context, Communicator& communicator, const MoeLayerInputs& inputs,
                         const MoeLayerOutputs& outputs, const MoeLayerOptions& options = {},
                         const ExpertShardOptions& shards = {});

// Ranks of two kinds: 0 .. A - 1 attend, and have tokens; the F = P - A others are feed-forward networks, and have rows.
// Each kind passes tensors without rows for what the other one has ([0, hidden], without data).
struct AttentionFfnOptions {
  int attention_ranks = 1;  // A: 1 to P - 1
  // Of experts: those of the F ranks, as in ExpertShardOptions with [F] sizes. 0: there are none, and of an attention
  // rank's n tokens the F ranks get n / F each, neighbours, the first ones one more if need be.
  int64_t num_experts = 0;
  std::span<const int64_t> experts = {};
  int64_t tile_rows = 0;
};

// Calls of different communicators do not wait for one another: several micro-batches are in flight with as many
// communicators, each in a thread of its own on every rank.

//   x         [tokens, k], topk_ids [tokens, top_k] as in moe_dispatch (without experts: absent)
//   weight    [hidden, k], one, packed; without experts only: rows are x . weight^T + bias, multiplied tile by tile on
//             the way, with the bits of matmul (the output projection of attention). Absent: k = hidden
//   outputs   as in moe_dispatch, on FFN ranks; without experts, each FFN rank is one expert: rows are sorted by
//             attention rank and token
struct AttentionToFfnInputs {
  ConstTensor x;
  ConstTensor topk_ids = {};
  GroupedWeight weight = ConstTensor();
  ConstTensor bias = {};  // [hidden]
};
Status attention_to_ffn(Context& context, Communicator& communicator, const AttentionToFfnInputs& inputs,
                        const MoeDispatchOutputs& outputs, const AttentionFfnOptions& options = {});

// The way back, as moe_combine: without experts out[t] = residual[t] + the row of t.
//   combine.rows  [rows or more, k] on FFN ranks; topk_ids, topk_weights, residual and out [tokens, hidden] on the others
//   weight, bias  as above, of FFN ranks, without experts only: rows . weight^T + bias come back (a down projection)
struct FfnToAttentionInputs {
  MoeCombineInputs combine;
  GroupedWeight weight = ConstTensor();
  ConstTensor bias = {};
};
Status ffn_to_attention(Context& context, Communicator& communicator, const FfnToAttentionInputs& inputs,
                        const Tensor& out, const AttentionFfnOptions& options = {});

}  // namespace opst

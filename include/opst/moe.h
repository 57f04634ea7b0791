// Mixture of experts, around the products of the experts: which experts a token goes to (gating), in which order their
// rows lie (routing), and the ways of the tokens there and back (permute, finalize); with their gradients.
//
//   moe_gating(context, {.logits = logits}, {.topk_ids = ids, .topk_weights = weights}, {.renormalise = true});
//   moe_routing(context, ids, num_experts, {.row_of_slot = rows, .slot_of_row = slots, .expert_tokens = counts});
//   moe_permute(context, tokens, slots, top_k, expanded);     // the rows of expert 0, of expert 1, ..
//   ..                                                        // products of groups of rows: `counts` is their list
//   moe_finalize(context, {.expanded = expanded, .row_of_slot = rows, .topk_weights = weights}, out);
//
// Slot t * top_k + k is the k-th choice of token t; a row is a place among the expanded tokens. Everywhere: tensors with
// any strides >= 0 (slots in another order are a transposed view), arithmetic in f32, one rounding where a result is
// stored, the same bits for any number of threads; a token's results depend on its own inputs only. Outputs overlap
// nothing. Zero sizes are legal; so are experts without tokens, all tokens at one expert, one expert twice in a token.
// Tensors whose default is {} are optional: absent without data.
//
// Errors: invalid_argument names operator, tensor, index and both values, those of integers inside tensors included;
// nothing has been written then. out_of_memory.
#pragma once

#include <cstdint>
#include <string>

#include "opst/context.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst {

enum class GateScores : uint8_t { softmax, sigmoid };
enum class GroupScore : uint8_t {
  max,      // the largest of a group
  top2_sum  // the sum of the two largest (of the one that there is, or that is above -inf)
};

// s = softmax(logits) or sigmoid(logits), per token;  c = s + bias, or without a bias the logits themselves
//   groups  num_groups runs of num_experts / num_groups experts; the kept_groups with the largest group scores stay.
//           max is of c; top2_sum of c with a bias, of s without one
//   ids     the top_k experts of the groups that stay with the largest c, in descending order; equal ones (0 and -0 are
//           equal) by ascending index. c is compared in f32 as it is
//   weights of the ids i, without the bias:
//             s_i                                         times routed_scaling_factor
//             renormalise, softmax   exp(l_i) / sum_j exp(l_j) over the ids: softmax of the chosen logits
//             renormalise, sigmoid   s_i / (sum_j s_j + eps)
//
//   logits        [tokens, num_experts] f32, bf16 or f16
//   bias          [num_experts] f32 or the dtype of logits: affects the choice, not the weights
//   finished      [tokens] bool: tokens that go nowhere. Their ids are -1, their weights 0
//   topk_ids      [tokens, top_k] i32 or i64, top_k <= kept_groups * num_experts / num_groups
//   topk_weights  [tokens, top_k] f32 or the dtype of logits
//   scores        [tokens, num_experts] f32: s, of finished tokens too
//
// NaN: an expert whose logit (or c) is NaN comes last, behind those of -inf; its s is 0. With nan_is_error such a logit
// is refused. A token whose logits are all -inf or NaN has ids 0 .. top_k - 1, weights routed_scaling_factor / top_k and
// scores 0; where a bias chooses logits of -inf alone, renormalised softmax weights are routed_scaling_factor / top_k
// too. A logit of +inf makes its token's softmax NaN, and with a bias c as well; without one it is chosen first.
struct MoeGatingInputs {
  ConstTensor logits;
  ConstTensor bias = {};
  ConstTensor finished = {};
};
struct MoeGatingOutputs {
  Tensor topk_ids;
  Tensor topk_weights;
  Tensor scores = {};
};
struct MoeGatingOptions {
  GateScores scores = GateScores::softmax;
  bool renormalise = false;
  float routed_scaling_factor = 1;  // finite
  float eps = 1e-20f;               // finite, >= 0
  int64_t num_groups = 1;           // divides num_experts
  int64_t kept_groups = 1;
  GroupScore group_score = GroupScore::max;
  bool nan_is_error = false;
};
Status moe_gating(Context& context, const MoeGatingInputs& inputs, const MoeGatingOutputs& outputs,
                  const MoeGatingOptions& options = {});

// grad_logits of topk_weights and, if given, of scores; the choice is constant.
//   logits, topk_ids       as moe_gating took and gave them; top_k <= num_experts. Slots of id -1 give nothing
//   grad_topk_weights      [tokens, top_k] f32 or the dtype of logits
//   grad_scores            [tokens, num_experts] f32
//   grad_logits            [tokens, num_experts], the dtype of logits
// Of the options, scores, renormalise, routed_scaling_factor and eps are read. Where moe_gating gave
// routed_scaling_factor / top_k, the gradient is 0; so it is for a logit that is NaN.
struct MoeGatingBackwardInputs {
  ConstTensor logits;
  ConstTensor topk_ids;
  ConstTensor grad_topk_weights;
  ConstTensor grad_scores = {};
};
Status moe_gating_backward(Context& context, const MoeGatingBackwardInputs& inputs, const Tensor& grad_logits,
                           const MoeGatingOptions& options = {});

// What a plan depends on.
struct MoeGatingProblem {
  int64_t tokens = 0, num_experts = 1, top_k = 1;
  bool has_bias = false, wants_scores = false;
  MoeGatingOptions options = {};
};
// A pure function of the problem.
struct MoeGatingPlan {
  bool all_scores = false;  // s of every expert is computed, not of the chosen ones only
  int64_t tokens_per_task = 0, num_tasks = 0;
  int64_t scratch_bytes_shared = 0, scratch_bytes_per_worker = 0;
  const char* reason = "";  // why all_scores or not
};
MoeGatingPlan plan_moe_gating(const MoeGatingProblem& problem);
std::string to_string(const MoeGatingPlan& plan);

inline constexpr int64_t kDropless = -1;

// A stable sort of all slots by expert: rows of one expert lie next to each other, in ascending order of their slots.
//   topk_ids       [tokens, top_k] i32 or i64, each in [0, num_experts), or -1: the slot goes nowhere
//   row_of_slot    [tokens, top_k] i32 or i64: where the slot's row is (the gather form); -1 where it has none
//   slot_of_row    [rows] i32 or i64: whose row it is (the scatter form); -1 in rows of nobody
//   expert_tokens  [experts of the range] i64 or i32: slots of each expert, dropped ones too; counts, or with
//                  cumulative_ends running totals. A group list for products of groups
// Experts: those of [expert_begin, expert_end) have rows here; slots of others have none.
//   dropless   the rows of the first expert begin at 0, those of the next behind them. slot_of_row may have any number
//              of rows (tokens * top_k always suffice); slots whose rows would lie behind them are dropped
//   capacity   expert e of the range has rows [e * capacity, (e + 1) * capacity); slots beyond them, which are those of
//              the last tokens, are dropped. slot_of_row has exactly experts * capacity rows
struct MoeRoutingOutputs {
  Tensor row_of_slot;
  Tensor slot_of_row = {};
  Tensor expert_tokens = {};
};
struct MoeRoutingOptions {
  int64_t capacity = kDropless;  // or >= 1
  int64_t expert_begin = 0;
  int64_t expert_end = -1;  // -1: num_experts
  bool cumulative_ends = false;
};
Status moe_routing(Context& context, const ConstTensor& topk_ids, int64_t num_experts, const MoeRoutingOutputs& outputs,
                   const MoeRoutingOptions& options = {});

// The sort counts: tasks count the experts of their tokens, prefix sums tell where each task's slots of an expert begin,
// and the tasks write them. A pure function of the sizes.
struct MoeRoutingPlan {
  int64_t tokens_per_task = 0, num_tasks = 0;
  int64_t scratch_bytes = 0;
};
MoeRoutingPlan plan_moe_routing(int64_t tokens, int64_t top_k, int64_t num_experts);  // of the range
std::string to_string(const MoeRoutingPlan& plan);

// expert_tokens[e] = number of ids <= e
//   sorted_ids     [n] i32 or i64, ascending, each in [0, num_experts)
//   expert_tokens  [num_experts] i32 or i64
Status moe_compute_expert_tokens(Context& context, const ConstTensor& sorted_ids, const Tensor& expert_tokens);

// expanded[r] = tokens[slot_of_row[r] / top_k], zeros where slot_of_row[r] is -1
//   tokens       [tokens, features] of any dtype, copied bit by bit
//   slot_of_row  [rows] i32 or i64, each in [-1, tokens * top_k)
//   expanded     [rows, features]
// Weights of rows: weights [tokens * top_k, 1] as tokens, top_k = 1. The gradient of tokens is moe_finalize of the
// gradient of expanded, without weights.
Status moe_permute(Context& context, const ConstTensor& tokens, const ConstTensor& slot_of_row, int64_t top_k,
                   const Tensor& expanded);

// out[t] = skip1[t] + skip2[t] + sum over k of weights[t, k] * (expanded[row_of_slot[t, k]] + bias[topk_ids[t, k]])
// in ascending order of k. A row_of_slot of -1 is a row of zeros, which is not read; a topk_id of -1 has no bias.
//   expanded          [rows, features] f32, bf16 or f16
//   row_of_slot       [tokens, top_k] i32 or i64, each in [-1, rows)
//   topk_weights      [tokens, top_k] f32 or the dtype of expanded; absent: 1
//   skip1, skip2      [tokens, features], the dtype of expanded
//   bias, topk_ids    [num_experts, features], the dtype of expanded, and [tokens, top_k] i32 or i64 in
//                     [-1, num_experts): both or neither
//   out               [tokens, features], the dtype of expanded
struct MoeFinalizeInputs {
  ConstTensor expanded;
  ConstTensor row_of_slot;
  ConstTensor topk_weights = {};
  ConstTensor skip1 = {}, skip2 = {};
  ConstTensor bias = {}, topk_ids = {};
};
Status moe_finalize(Context& context, const MoeFinalizeInputs& inputs, const Tensor& out);

// Gradients of moe_finalize; those without data are not computed. The gradient of either skip is grad_out.
//   grad_out       [tokens, features], the dtype of expanded
//   inputs         as in moe_finalize; skips are not read. No two slots have one row. `expanded` is read for
//                  grad.topk_weights only; where they are not asked for it may be absent
struct MoeFinalizeGradients {
  Tensor expanded = {};      // [rows, features], the dtype of grad_out; zeros in rows of nobody
  Tensor topk_weights = {};  // [tokens, top_k] f32 or the dtype of grad_out
  Tensor bias = {};          // [num_experts, features], the dtype of grad_out; sums in ascending order of slots
};
Status moe_finalize_backward(Context& context, const ConstTensor& grad_out, const MoeFinalizeInputs& inputs,
                             const MoeFinalizeGradients& gradients);

}  // namespace opst

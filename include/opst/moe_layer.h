// A whole layer of experts in one call: gating, routing, the experts' two products, and the weighted sum per token.
//
//   out[t] = residual[t] + sum over k of topk_weights[t, k] * expert(topk_ids[t, k], x[t])     in ascending order of k
//                        + share[t] * shared_expert(x[t])
//   expert(e, x) = down[e] . activation(gate_up[e] . x + gate_up_bias[e]) + down_bias[e]
//   share[t]     = 1, or sigmoid(x[t] . shared.gate)
//
//   Result<PackedWeight> gate_up = PackedWeight::pack_stack(context, weights);      // [E, 2 * intermediate, hidden]
//   Status status = moe_layer_forward(context, {.x = x, .logits = logits, .experts = {gate_up.value(), down.value()}},
//                                     {.out = out}, {.top_k = 8, .gating = {.renormalise = true}});
//
// Gate and up projections that lie apart, as in GGUF files, make one stack where they have one format and a multiple of
// 16 rows: PackedWeight::pack_stack of the matrices gate 0, up 0, gate 1, up 1, .. in `parts` of 2. Else they are given
// apart: gate_up holds the gate projections alone, and `up` the others. In a model several shared experts are one, whose
// intermediate size is theirs together.
//
// Tensors have any strides >= 0. Those whose default is {} are optional: absent without data, as are weights of type
// GroupedWeight that are a ConstTensor without data.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "opst/grouped_matmul.h"
#include "opst/moe.h"

namespace opst {

// Weights of E experts, all of them or those of the range of MoeLayerOptions.
//   gate_up       E of [2 * intermediate, hidden], gate rows above up rows; [intermediate, hidden] where the activation
//                 does not take two halves, and where `up` is given
//   down          E of [hidden, intermediate]
//   up            E of [intermediate, hidden], of any format; only with an activation of two halves. No biases then
//   gate_up_bias  [E, rows of gate_up] f32, bf16 or f16
//   down_bias     [E, hidden] likewise
struct MoeExperts {
  GroupedWeight gate_up = ConstTensor();
  GroupedWeight down = ConstTensor();
  GroupedWeight up = ConstTensor();
  ConstTensor gate_up_bias = {}, down_bias = {};
};

// An expert of every token. gate_up, down and up: as above, one weight each (of a tensor [1, n, k]), of any
// intermediate size.
//   gate  [hidden], the dtype of x: its share is sigmoid(x . gate). Absent: 1
struct MoeSharedExpert {
  GroupedWeight gate_up = ConstTensor();
  GroupedWeight down = ConstTensor();
  GroupedWeight up = ConstTensor();
  ConstTensor gate = {};
};

//   x             [tokens, hidden] f32, bf16 or f16
// Either logits (and what moe_gating takes beside them), or ids and weights:
//   logits        [tokens, num_experts] f32, bf16 or f16; gate_bias, finished: `bias` and `finished` of moe_gating
//   topk_ids      [tokens, top_k] i32 or i64, each in [0, num_experts), or -1: the slot gives nothing
//   topk_weights  [tokens, top_k] f32 or the dtype of x
//   residual      [tokens, hidden], the dtype of x; the very same view as out, or no overlap with it
struct MoeLayerInputs {
  ConstTensor x;
  ConstTensor logits = {}, gate_bias = {}, finished = {};
  ConstTensor topk_ids = {}, topk_weights = {};
  MoeExperts experts;
  MoeSharedExpert shared = {};
  ConstTensor residual = {};
};

//   out            [tokens, hidden], the dtype of x
//   topk_ids       [tokens, top_k] i32 or i64, and
//   topk_weights   [tokens, top_k] f32: what gating chose; only with logits
//   expert_tokens  [experts of the range] i64 or i32: slots of each expert
struct MoeLayerOutputs {
  Tensor out;
  Tensor topk_ids = {}, topk_weights = {};
  Tensor expert_tokens = {};
};

struct MoeLayerOptions {
  int64_t top_k = 0;             // with logits; with ids it is their dim 1, and this may stay 0
  MoeGatingOptions gating = {};  // with logits
  Activation activation = Activation::swiglu;
  // int8: rows of x and of the activation's result are rounded to int8: with GGUF formats in blocks of 32 as matmul
  // does, with int8 and int4 weights each row by one scale as dynamic_quant does. f32, bf16 and f16 weights take them
  // exactly either way.
  ActivationType activations = ActivationType::exact;
  bool batch_invariant = false;  // as in MatmulOptions
  // Experts [expert_begin, expert_end) have weights here; slots of others give nothing.
  int64_t num_experts = -1;  // with ids; -1: as many as the range needs. With logits it is their dim 1
  int64_t expert_begin = 0;
  int64_t expert_end = -1;  // -1: num_experts, or without it expert_begin + the number of weights
};

// Numerics: the bits of the sequence of public operators that it stands for, for any number of threads:
//   moe_gating      with weights of f32
//   moe_routing
//   moe_permute     not made: the products read each row of x where it is
//   grouped_matmul  the hidden rows, of the dtype of x. With `up`: both products in f32, and the activation of their
//                   sums. With int8 or int4 weights and ActivationType::int8: x by dynamic_quant, and where `down` has
//                   such weights, hidden rows of i8 by out_scales (grouped_matmul_swiglu_quant)
//   grouped_matmul  the experts' rows, of the dtype of x; then those of the shared expert
//   moe_finalize    skip1 = residual; the shared expert is the slot behind the last one, its weight the share
// A token's result depends on its own inputs only, and on how many rows its experts have as batch_invariant tells.
// Memory: from the context's workspace: ids and lists, the rows of all experts [slots of the range, hidden] and of the
// shared one, of the dtype of x, and the hidden rows of some experts at a time (plan_moe_layer); x as i8 where it is
// quantised. No other copy of x but what products pack.
// Legal: zero tokens, experts without tokens, all tokens at one expert, one expert twice in a token.
// Errors: invalid_argument names tensor, index and both values, those of integers inside tensors included;
// out_of_memory. Nothing has been written then.
Status moe_layer_forward(Context& context, const MoeLayerInputs& inputs, const MoeLayerOutputs& outputs,
                         const MoeLayerOptions& options = {});

// Gradients of sum(grad_out * out); those without data are not computed. That of residual is grad_out.
//   x                            [tokens, hidden], the dtype of x
//   logits                       [tokens, num_experts], the dtype of logits: where those are given
//   topk_weights                 [tokens, top_k] f32 or the dtype of x: where those are given
//   gate_up, down, their biases, shared_gate_up, shared_down
//                                the shapes of what they belong to; f32, bf16 or f16
//   shared_gate                  [hidden], the dtype of x
struct MoeLayerGradients {
  Tensor x = {};
  Tensor logits = {}, topk_weights = {};
  Tensor gate_up = {}, down = {};
  Tensor gate_up_bias = {}, down_bias = {};
  Tensor shared_gate_up = {}, shared_down = {}, shared_gate = {};
};

// Everything between is computed again: inputs are those of the forward call, and nothing of it needs to be kept.
//   grad_out  [tokens, hidden], the dtype of x
//   inputs    weights are tensors [E, n, k] f32, bf16 or f16, gate and up in one (`up` absent). residual is not read
//   options   activation swiglu; activations exact. batch_invariant changes nothing
// Numerics: rows between have the dtype of x, each value rounded once; sums are of f32: over an expert's slots, over a
// token's slots (then its shared expert) and over features in ascending order. The choice of experts is constant. With h
// the hidden row of a slot, its weight's gradient is (grad_out . down) . h + grad_out . down_bias. The same bits for any
// number of threads. An expert without tokens has gradients of zeros, a slot without a row a weight's gradient of 0.
// Memory: from the workspace, the rows of some experts at a time (at most eight times the caches, or those of one expert),
// those of the shared one, and with gradients.x a row of it for every slot.
// Errors: as above; where memory is exhausted, some gradients may have been written.
Status moe_layer_backward(Context& context, const ConstTensor& grad_out, const MoeLayerInputs& inputs,
                          const MoeLayerGradients& gradients, const MoeLayerOptions& options = {});

// What a plan depends on: the products of an expert, of any m. (up: of the up projections apart, where has_up.)
struct MoeLayerProblem {
  DType dtype = DType::f32;                        // of x
  int64_t tokens = 0, top_k = 1, num_experts = 1;  // num_experts: of logits
  bool has_logits = true;
  MoeGatingOptions gating = {};
  MatmulProblem gate_up, down;
  bool has_up = false;  // gate and up apart
  MatmulProblem up = {};
  bool has_shared = false;  // with problems of its own, gate and up in one
  MatmulProblem shared_gate_up = {}, shared_down = {};
};

struct MoeLayerPlan {
  MoeGatingPlan gating;
  MoeRoutingPlan routing;
  int64_t rows = 0;           // of the experts
  int64_t rows_per_wave = 0;  // experts whose rows are at most so many (or one expert) go through both products at once
  int64_t waves = 0;
  int64_t hidden_bytes = 0;         // of a wave
  int64_t expanded_bytes = 0;       // of every expert's rows
  int64_t scratch_bytes = 0;        // these and the lists, beside what the products take: see the largest wave's
  GroupedMatmulPlan gate_up, down;  // of the wave with the most rows
  const char* reason = "";          // what bounds a wave
};

// What a call does whose experts of the range have `expert_tokens` slots each: pure. Errors: out_of_memory.
Result<MoeLayerPlan> plan_moe_layer(const MoeLayerProblem& problem, std::span<const int64_t> expert_tokens,
                                    const Machine& machine, int num_threads = 1);
std::string to_string(const MoeLayerPlan& plan);

}  // namespace opst

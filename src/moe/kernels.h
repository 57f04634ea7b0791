// The kernel table of the moe room, one per instruction set level: the gate of one token, its gradient, and weighted
// sums of rows. Plain data only.
#pragma once

#include <cstdint>

namespace opst::moe {

// Vectors of every level divide it. padded(n) below: n rounded up to it.
inline constexpr int64_t kMaxLanes = 16;

struct GateRules {
  int64_t num_experts, top_k;
  bool sigmoid, renormalise;
  float factor, eps;
  // Of the choice only.
  int64_t num_groups, kept_groups;
  bool top2_sum;
  bool all_scores;  // scores[] is filled; so it is wherever the choice needs it
};

// Scratch of a worker: padded(num_experts) floats each, if nothing else is said.
struct GateScratch {
  float* logits;         // in f32, NaN as it is, -inf behind the last
  float* scores;         // s, 0 where the logit is NaN; or exponentials
  float* choice;         // c while the best are taken: -inf where it is NaN, or was taken; or gradients of s
  float* maxima;         // of each vector of `choice`; or gradients with respect to the logits
  float* group_scores;   // [padded(num_groups)]
  int64_t* kept_groups;  // [kept_groups]
  uint8_t* is_kept;      // [num_groups]
};

// T: dtype of logits. ids[top_k]; weights[padded(top_k)], of which the first top_k count.
struct Gate {
  const void* logits;
  int64_t stride;     // between elements, in elements
  const float* bias;  // [num_experts], or null
  int64_t* ids;
  float* weights;
};
using GateToken = void (*)(const GateRules& rules, const Gate& gate, const GateScratch& scratch);

struct GateBackward {
  const void* logits;
  int64_t stride;
  const int64_t* ids;         // [top_k], -1: gives nothing
  const float* grad_weights;  // [top_k]
  const float* grad_scores;   // null: none
  int64_t grad_scores_stride;
  void* grad_logits;
  int64_t grad_logits_stride;
  float* chosen;  // [padded(top_k)], scratch
};
using GateTokenBackward = void (*)(const GateRules& rules, const GateBackward& gate, const GateScratch& scratch);

// Rows of T; data = nullptr: there are none.
struct Rows {
  const void* data;
  int64_t row_stride, stride;
};

// out = skip1 + skip2 + sum over i < count of weights[i] * (rows[index[i]] + bias[bias_index[i]]), i ascending. An index
// < 0 adds nothing.
struct Combine {
  Rows rows, bias;
  const int64_t *index, *bias_index;  // [count]; bias_index only where there is a bias
  const float* weights;               // [count]
  int64_t count, features;
  const void* skip[2];  // a row each, or null
  int64_t skip_stride[2];
  void* out;
  int64_t out_stride;
};
using CombineRows = void (*)(const Combine& combine);

// One token and its slots: grad_rows[index[i]] = weights[i] * grad_out;
// dots[i] = sum over features of grad_out * (rows[index[i]] + bias[bias_index[i]]).
struct CombineBackward {
  const void* grad_out;
  int64_t grad_out_stride;
  Rows rows, bias;
  Rows grad_rows;  // written; may be absent
  const int64_t *index, *bias_index;
  const float* weights;
  float* dots;  // [count], or null
  int64_t count, features;
};
using CombineRowsBackward = void (*)(const CombineBackward& combine);

struct TypeKernels {
  GateToken gate;
  GateTokenBackward gate_backward;
  CombineRows combine;
  CombineRowsBackward combine_backward;
};
struct Kernels {
  TypeKernels of[3];  // f32, bf16, f16
};

}  // namespace opst::moe

// Attention as people write it, for benchmarks to stand beside: three passes, each through memory, the whole score
// matrix in the storage type.
//
//   S = scale * Q K^T + mask;   P = softmax(S), by exp of the C library;   O = P V
//
// What it is: three loops each, the inner one over neighbouring elements at the level's vector width (K^T is made by a
// copy), products summed in f32 (f64), every pass rounded to the storage type; rows dealt out to the threads of the
// context. S and P are tensors of their own, as in frameworks that run one operator after the other. What it is not: no
// register tiles, no blocks for caches, no approximated exp; a framework's matrix product is better than this, its
// softmax goes through memory more often. A row that sees no key is NaN, as there.
//
// Backward keeps P and makes dP = dO V^T, dS = scale * P (dP - rowsum(P dP)), dQ = dS K, dK = dS^T Q, dV = P^T dO the
// same way.
#pragma once

#include <cstdint>
#include <vector>

#include "opst/context.h"
#include "opst/tensor.h"

namespace opst::test {

// Contiguous tensors of one dtype: query, out, grad_out, grad_query [batch, heads, queries, dim]; key, value and their
// gradients [batch, kv_heads, keys, dim]. Dimensions up to 768.
struct NaiveProblem {
  ConstTensor query, key, value;
  Tensor out;
  double scale = 1;
  const float* mask = nullptr;  // [queries][keys], added to every head's scores; null: none
};
struct NaiveGradients {
  ConstTensor grad_out;
  Tensor grad_query, grad_key, grad_value;
};

class NaiveAttention {
 public:
  // Bytes of the matrices and the copies, inputs and outputs not counted.
  static int64_t bytes(const NaiveProblem& problem, bool backward);

  // Allocates; ok() tells whether the memory was there.
  NaiveAttention(const NaiveProblem& problem, bool backward);
  bool ok() const { return scores_.data() != nullptr || problem_.query.num_elements() == 0; }

  void forward(Context& context);
  // After forward.
  void backward(Context& context, const NaiveGradients& gradients);

 private:
  NaiveProblem problem_;
  Buffer scores_, probabilities_, grads_, key_columns_, value_columns_;
};

}  // namespace opst::test

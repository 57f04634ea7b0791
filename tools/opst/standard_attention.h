// Standard attention as a framework without a fused operator runs it, for `opst bench tables`: this library's operators
// one after the other, each over all heads, with whole matrices of scores between them.
//
//   forward   S = Q K^T           matmul
//             P = softmax(s S)    softmax; in place where nothing is kept for gradients
//             O = P V             matmul
//   backward  dV = P^T dO, dP = dO V^T, dS = softmax_backward(dP, P), dQ = dS K, dK = dS^T Q
//
// Memory: matrices [batch, heads, queries, keys] in the tensors' type: one for inference; three for training (S, P, dP;
// dS takes the place of S), so that nothing is computed twice. What it is not: AttentionPath::standard of `opst bench
// attention`, where one operator has all three steps and a block of rows stays near; that is why its products are as
// fast as the library's others, and its time is that of passes through memory.
#pragma once

#include <vector>

#include "attention_case.h"
#include "opst/attention_backward.h"

namespace opst::tools {

class StandardAttention {
 public:
  // Of the case's query, key and value, which must be dense, of one type and of as many KV heads as query heads; the
  // case must outlive this. Its outputs are its own. All memory is touched. Errors: out_of_memory.
  static Result<StandardAttention> create(const Context& context, const AttentionCase& data, bool train);

  Status forward(Context& context) const;
  // After forward. grad_out as out.
  Status backward(Context& context, const ConstTensor& grad_out) const;

  const Tensor& out() const { return out_; }
  const AttentionGradients& gradients() const { return gradients_; }
  // Of matrices and outputs.
  int64_t size_bytes() const;

 private:
  StandardAttention() = default;
  Status make(const Context& context, std::initializer_list<int64_t> shape, Tensor& tensor);

  AttentionInputs inputs_;
  float scale_ = 1;
  std::vector<Buffer> buffers_;
  Tensor out_ = {}, scores_ = {}, weights_ = {}, grad_weights_ = {};  // inference: weights_ is scores_
  AttentionGradients gradients_;
};

}  // namespace opst::tools

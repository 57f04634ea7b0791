// The backward pass for `opst bench|check|plan attention --backward`: gradients for the tensors of an AttentionCase,
// and what is printed of them.
#pragma once

#include <vector>

#include "attention_case.h"
#include "opst/attention_backward.h"

namespace opst::tools {

AttentionBackwardProblem backward_problem(const AttentionProblem& problem);

class AttentionBackwardCase {
 public:
  // Runs forward once, unless the caller will before run(); `forward` must outlive this.
  AttentionBackwardCase(Context& context, const AttentionCase& forward, bool run_forward = true);

  const ConstTensor& grad_out() const { return saved_.grad_out; }
  // Bytes of grad_out and the gradients.
  int64_t size_bytes() const;
  // Those of pages in the shape of forward.inputs().
  AttentionGradients gradients() const;
  // A CommandError where the operator refuses.
  void run(Context& context) const;

 private:
  Tensor make(const ConstTensor& like, DType dtype);

  const AttentionCase& forward_;
  std::vector<Buffer> buffers_;
  AttentionSaved saved_;
  AttentionGradients gradients_;
  Tensor dense_key_ = {}, dense_value_ = {};  // of gradients of pages
};

// Time, memory, fraction of peak and error for each length, beside the naive form, which may take limit_bytes.
void bench_attention_backward(const AttentionArguments& arguments, int64_t limit_bytes);
// Every gradient against float64. `spoil`: as computed without some values.
void check_attention_backward(const AttentionArguments& arguments, bool spoil);
void plan_attention_backward_command(const AttentionArguments& arguments);

}  // namespace opst::tools

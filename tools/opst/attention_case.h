// What `opst bench|check|plan attention` share: the options that pose a problem, and tensors that hold it.
#pragma once

#include <string>
#include <vector>

#include "command.h"
#include "opst/attention.h"

namespace opst::tools {

struct AttentionArguments {
  std::string dtype = "f32";
  std::string kv_dtype;  // empty: dtype
  int64_t batch = 1;
  int64_t heads = 1;
  int64_t kv_heads = 0;  // 0: heads
  std::vector<int64_t> seq = {1024};
  int64_t query_len = 0;  // 0: seq
  int64_t head_dim = 64;
  int64_t value_head_dim = 0;  // 0: head_dim
  bool causal = false;
  bool top_left = false;
  std::string path = "automatic";
  int64_t block_q = 0;
  int64_t block_kv = 0;
  int num_threads = 0;
  bool json = false;
};

void add_attention_options(CLI::App& command, AttentionArguments& arguments);

// The problem for keys of length kv_len; a CommandError where the options contradict each other.
AttentionProblem attention_problem(const AttentionArguments& arguments, int64_t kv_len);

// Visible (query, key) pairs of one head, summed over the batch.
double visible_pairs(const AttentionProblem& problem);
// 2 (head_dim + value_head_dim) per visible pair and head.
double attention_flops(const AttentionProblem& problem);

// Random normal tensors [batch, heads, seq, dim], contiguous, and outputs with softmax_lse.
class AttentionCase {
 public:
  explicit AttentionCase(const AttentionProblem& problem);

  const AttentionProblem& problem() const { return problem_; }
  const AttentionInputs& inputs() const { return inputs_; }
  const AttentionOutputs& outputs() const { return outputs_; }
  // Bytes of inputs and outputs.
  int64_t size_bytes() const;

  // Runs the operator by the given path; a CommandError where it is refused.
  void run(Context& context, AttentionPath path) const;

  struct RowIndex {
    int64_t batch, head, query;
  };
  // Rows spread over batch, heads and queries, first and last included; all of them where they are no more than `most`.
  std::vector<RowIndex> sampled_rows(int64_t most) const;

 private:
  Tensor make(DType dtype, std::initializer_list<int64_t> shape);

  AttentionProblem problem_;
  std::vector<Buffer> buffers_;
  AttentionInputs inputs_;
  AttentionOutputs outputs_;
};

}  // namespace opst::tools

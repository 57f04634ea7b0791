// The mixture of experts of `opst bench|check|plan moe`: sizes as options, and a layer with random tokens, router logits
// and weights whose steps are called one by one.
#pragma once

#include "command.h"
#include "matmul_case.h"
#include "opst/grouped_matmul.h"
#include "opst/moe.h"
#include "random_weights.h"

namespace opst::tools {

struct MoeArguments {
  std::vector<int64_t> tokens = {1, 256};
  int64_t experts = 32, top_k = 4, hidden = 1024, intermediate = 512;
  std::vector<std::string> dtypes = {"f32", "bf16"};
  std::string scores = "softmax";
  bool no_renormalise = false;
  int num_threads = 0;
  bool json = false;

  MoeGatingOptions gating() const {
    return {.scores = scores == "sigmoid" ? GateScores::sigmoid : GateScores::softmax, .renormalise = !no_renormalise};
  }
  // Of the gate and up projections together, and of the down projection, for `m` rows of one expert.
  MatmulShape gate_up(int64_t m) const { return {m, 2 * intermediate, hidden}; }
  MatmulShape down(int64_t m) const { return {m, hidden, intermediate}; }
};

void add_moe_options(CLI::App& command, MoeArguments& arguments);
// Sizes that do not fit together are a usage error. Before anything is printed.
void check_moe_arguments(const MoeArguments& arguments);

class MoeCase {
 public:
  MoeCase(Context& context, const MoeArguments& arguments, const std::string& dtype, int64_t tokens);

  // Each from what the one before left. quantise: int8 rows of the tokens, with integer weights only.
  void gate(Context& context) const;
  void route(Context& context) const;
  void quantise(Context& context) const;
  void permute(Context& context) const;
  void multiply_gate_up(Context& context) const;
  void multiply_down(Context& context) const;
  void finalize(Context& context) const;
  // All of them.
  void run(Context& context) const;

  bool integers() const { return gate_up_weights.integers(); }
  int64_t tokens() const { return x.shape[0]; }
  int64_t slots() const { return ids.num_elements(); }
  int64_t touched_experts() const;  // those with rows, once they are routed
  double flops() const;
  int64_t touched_bytes() const;  // of their weights, packed
  GroupList groups() const { return {expert_tokens, GroupListType::counts}; }

  MoeArguments arguments;
  std::string dtype;
  RandomWeights gate_up_weights, down_weights;

 private:
  std::vector<Buffer> memory_;
  Tensor tensor(DType type, std::initializer_list<int64_t> shape);
  PackedWeight gate_up_, down_;
  PackedIntWeight gate_up_int_, down_int_;

 public:
  // x and rows are of the dtype's own type (integers: f32, and int8 with scales beside it).
  Tensor logits, ids, topk_weights, row_of_slot, slot_of_row, expert_tokens;
  Tensor x, x_int8, x_scales, expanded, row_scales, activated, activated_scales, expert_out, out;
};

}  // namespace opst::tools

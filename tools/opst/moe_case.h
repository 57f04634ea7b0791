// The mixture of experts of `opst bench|check|plan moe`: sizes as options, and a layer with random tokens, router logits
// and weights whose steps are called one by one.
#pragma once

#include <optional>

#include "command.h"
#include "matmul_case.h"
#include "opst/grouped_matmul.h"
#include "opst/moe.h"
#include "random_weights.h"

namespace opst::tools {

struct MoeArguments {
  std::vector<int64_t> tokens = {1, 256};
  int64_t experts = 32, top_k = 4, hidden = 1024, intermediate = 512;
  int64_t shared = 0;  // width of the shared expert; 0: there is none
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
  MatmulShape shared_gate_up(int64_t m) const { return {m, 2 * shared, hidden}; }
  MatmulShape shared_down(int64_t m) const { return {m, hidden, shared}; }
};

// The type of tokens and of what comes out: that of float weights, f32 of others.
DType float_type_of(const std::string& dtype);

void add_moe_options(CLI::App& command, MoeArguments& arguments);
// --backward of bench and check.
void add_moe_backward_option(CLI::App& command, bool& backward);
// With --backward, weights of another type than f32, bf16 and f16 are a usage error.
void check_moe_backward(const MoeArguments& arguments, bool backward);
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
  void multiply_shared(Context& context) const;  // both products, of every token; with a shared expert only
  void finalize(Context& context) const;
  // All of them.
  void run(Context& context) const;

  bool integers() const { return gate_up_weights.integers(); }
  bool has_shared() const { return arguments.shared > 0; }
  int64_t tokens() const { return x.shape[0]; }
  int64_t slots() const { return ids.num_elements(); }
  int64_t touched_experts() const;  // those with rows, once they are routed
  double flops() const;
  double shared_flops() const;    // among them
  int64_t touched_bytes() const;  // of their weights, packed, and of the shared expert's
  int64_t shared_bytes() const;   // among them
  GroupList groups() const { return {expert_tokens, GroupListType::counts}; }
  GroupList shared_group() const { return {every_token, GroupListType::counts}; }
  // Of the experts, packed.
  GroupedWeight gate_up() const { return gate_up_.weight(integers()); }
  GroupedWeight down() const { return down_.weight(integers()); }
  GroupedWeight shared_gate_up() const { return shared_gate_up_.weight(integers()); }
  GroupedWeight shared_down() const { return shared_down_.weight(integers()); }

  MoeArguments arguments;
  std::string dtype;
  RandomWeights gate_up_weights, down_weights;
  std::optional<RandomWeights> shared_gate_up_weights, shared_down_weights;

 private:
  struct Stack {
    PackedWeight floats;
    PackedIntWeight integers;

    GroupedWeight weight(bool of_integers) const {
      return of_integers ? GroupedWeight(integers) : GroupedWeight(floats);
    }
    int64_t size_bytes(bool of_integers) const { return of_integers ? integers.size_bytes() : floats.size_bytes(); }
  };
  Stack packed(Context& context, const RandomWeights& weights) const;
  std::vector<Buffer> memory_;
  Tensor tensor(DType type, std::initializer_list<int64_t> shape);
  void multiply_expert(Context& context, const Tensor& rows, const Tensor& scales, const GroupedWeight& weight,
                       const GroupList& groups, const Tensor& hidden, const Tensor& hidden_scales) const;
  Stack gate_up_, down_, shared_gate_up_, shared_down_;

 public:
  // x and rows are of the dtype's own type (integers: f32, and int8 with scales beside it).
  Tensor logits, ids, topk_weights, row_of_slot, slot_of_row, expert_tokens;
  Tensor x, x_int8, x_scales, expanded, row_scales, activated, activated_scales, expert_out, out;
  // The shared expert is the slot behind the last one of every token, with the weight 1; its rows of expert_out lie behind
  // the others. Without one there are top_k slots, and no rows.
  Tensor slots_row, slots_weight, shared_activated, shared_scales, shared_out, every_out, every_token;
};

// Changes one of every 256 elements: ids and rows (below `other`) become others, numbers zero.
void spoil(const Tensor& tensor, double other = 0);

}  // namespace opst::tools

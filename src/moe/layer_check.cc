// The checks of a layer's inputs: tensors, weights, the range of experts. Integers inside tensors are counted and
// checked in one pass (layer_route.cc).
#include "core/text.h"
#include "moe/layer.h"

namespace opst::moe {
namespace {

constexpr const char* kRange = "experts of the range";
// More are a mistake: weights with a stride of 0 have no memory for each.
constexpr int64_t kMostExperts = 1 << 20;

// What differs between the experts' weights and the shared one's in messages.
struct Names {
  const char *gate_up, *up, *down;
  const char *count, *both, *intermediate;  // dimensions
};
constexpr Names kOfExperts = {"gate_up", "up", "down", kRange, "2 * intermediate", "intermediate"};
constexpr Names kOfShared = {"shared.gate_up",          "shared.up",          "shared.down", "shared experts",
                             "2 * shared intermediate", "shared intermediate"};

// Whether rows become bytes for a product with this weight.
bool takes_bytes(const MoeLayerOptions& o, const MatmulProblem& problem) {
  return o.activations == ActivationType::int8 && problem.weight == MatmulWeight::integers;
}

// A problem whose weight is known becomes that of a layer's product with rows of `dtype`.
void pose(MatmulProblem& problem, const LayerCall& call, bool has_bias) {
  const MoeLayerOptions& o = call.options;
  const bool bytes = takes_bytes(o, problem);
  problem.x_dtype = bytes ? DType::i8 : call.dtype;
  problem.has_x_scales = bytes;
  problem.activations = o.activations;
  problem.batch_invariant = o.batch_invariant;
  problem.has_bias = has_bias;
}

void check_experts(ShapeCheck& check, const LayerCall& call, const Names& names, Experts& experts) {
  const Activation activation = call.options.activation;
  const bool halves = gemm::takes_two_halves(activation);
  const bool apart = experts.apart, one_stack = halves && !apart;
  check.require(halves || !apart, names.up, " is given, but ", to_string(activation), " takes no two halves");
  check.require(!apart || (!experts.gate_up_bias && !experts.down_bias), "biases are given, but so is ", names.up);
  const char* const first_rows = one_stack ? names.both : names.intermediate;
  experts.first =
      gemm::check_grouped_weight(check, names.gate_up, *experts.gate_up, {names.count, first_rows, "hidden"});
  if (apart) {
    experts.second_half =
        gemm::check_grouped_weight(check, names.up, *experts.up, {names.count, names.intermediate, "hidden"});
  }
  if (one_stack && check.ok()) {
    check.require(experts.first.n % 2 == 0, names.gate_up, " has ", experts.first.n, " outputs, but ",
                  to_string(activation), " needs two halves");
    check.holds(names.gate_up, names.intermediate, experts.first.n / 2);
  }
  experts.second =
      gemm::check_grouped_weight(check, names.down, *experts.down, {names.count, "hidden", names.intermediate});
  if (experts.gate_up_bias) {
    check.tensor("gate_up_bias", experts.gate_up_bias).dtype(kFloats).dims({names.count, first_rows});
  }
  if (experts.down_bias) check.tensor("down_bias", experts.down_bias).dtype(kFloats).dims({names.count, "hidden"});
  if (!check.ok()) return;
  experts.intermediate = check[names.intermediate];
  pose(experts.first, call, static_cast<bool>(experts.gate_up_bias));
  pose(experts.second, call, static_cast<bool>(experts.down_bias));
  if (apart) {
    pose(experts.second_half, call, false);
  } else {
    experts.first.activation = activation;
    experts.first.has_out_scales = experts.hides_bytes();
  }
}

void check_gating_inputs(ShapeCheck& check, const LayerCall& call) {
  const MoeLayerInputs& in = call.in;
  check.tensor("logits", in.logits).dtype(kFloats).dims({"tokens", "num_experts"});
  if (in.gate_bias) check.tensor("gate_bias", in.gate_bias).dtype({DType::f32, in.logits.dtype}).dims({"num_experts"});
  if (in.finished) check.tensor("finished", in.finished).dtype({DType::boolean}).dims({"tokens"});
  check.require(!is_given(in.topk_ids) && !is_given(in.topk_weights),
                "logits are given, but so are topk_ids or topk_weights, which are in their place");
  check.require(call.options.top_k >= 0, "top_k is ", call.options.top_k, ", but must not be negative");
  if (check.ok()) check_choice(check, call.options.gating, check["num_experts"], call.options.top_k, "top_k");
  check_weights(check, call.options.gating);
}

void check_ids_inputs(ShapeCheck& check, const LayerCall& call) {
  const MoeLayerInputs& in = call.in;
  check.require(!is_given(in.gate_bias) && !is_given(in.finished),
                "gate_bias and finished belong to logits, which are absent");
  check.tensor("topk_ids", in.topk_ids).dtype(kIntegers).dims({"tokens", "top_k"});
  check.tensor("topk_weights", in.topk_weights).dtype({DType::f32, in.x.dtype}).dims({"tokens", "top_k"});
  const int64_t stated = call.options.top_k, top_k = check["top_k"];
  check.require(stated == 0 || stated == top_k, "top_k is ", stated, ", but topk_ids dim 1 (top_k) is ", top_k);
}

void find_range(ShapeCheck& check, LayerCall& call) {
  const MoeLayerOptions& o = call.options;
  const int64_t given = call.has_logits ? check["num_experts"] : o.num_experts;
  if (call.has_logits) {
    check.require(o.num_experts == -1 || o.num_experts == given, "num_experts is ", o.num_experts,
                  ", but logits dim 1 (num_experts) is ", given);
  } else {
    check.require(given >= -1, "num_experts is ", given, ", but must be at least 0, or -1");
  }
  check.require(o.expert_begin >= 0 && o.expert_begin <= kMaxBytes && given <= kMaxBytes, "expert_begin is ",
                o.expert_begin, ", of ", given, " experts, but both must be from 0 to 2^56");
  if (!check.ok()) return;
  const int64_t weights = check[kRange];
  check.require(weights <= kMostExperts, "gate_up holds ", weights, " experts, but there may be at most ",
                kMostExperts);
  call.begin = o.expert_begin;
  call.end = o.expert_end != -1 ? o.expert_end : given != -1 ? given : o.expert_begin + weights;
  call.num_experts = given != -1 ? given : call.end;
  check.require(call.begin <= call.end && call.end <= call.num_experts, "the range of experts is [", call.begin, ", ",
                call.end, "), but must lie in [0, ", call.num_experts, ")");
  check.require(call.end - call.begin == weights, "the range of experts is [", call.begin, ", ", call.end,
                "), but gate_up holds ", weights, " of them");
}

}  // namespace

void check_layer_inputs(ShapeCheck& check, LayerCall& call) {
  const MoeLayerInputs& in = call.in;
  const MoeLayerOptions& o = call.options;
  check.require(o.activation <= Activation::swiglu_swapped, "activation is ", static_cast<int>(o.activation),
                ", which is no Activation");
  check.require(o.activations <= ActivationType::int8, "activations is ", static_cast<int>(o.activations),
                ", which is no ActivationType");
  if (!check.ok()) return;
  check.tensor("x", in.x).dtype(kFloats).dims({"tokens", "hidden"});
  call.dtype = in.x.dtype;
  call.has_logits = is_given(in.logits);
  call.has_logits ? check_gating_inputs(check, call) : check_ids_inputs(check, call);
  call.experts = {.gate_up = &in.experts.gate_up,
                  .up = is_there(in.experts.up) ? &in.experts.up : nullptr,
                  .down = &in.experts.down,
                  .apart = is_there(in.experts.up),
                  .gate_up_bias = in.experts.gate_up_bias,
                  .down_bias = in.experts.down_bias};
  check_experts(check, call, kOfExperts, call.experts);
  call.experts.first.gathers_rows = call.experts.second_half.gathers_rows = true;
  const bool shared_gate_up = is_there(in.shared.gate_up), shared_down = is_there(in.shared.down);
  call.has_shared = shared_gate_up || shared_down;
  check.require(call.has_shared || (!is_there(in.shared.up) && !is_given(in.shared.gate)),
                "shared.up or shared.gate is given, but no weights of a shared expert are");
  check.require(shared_gate_up == shared_down, shared_gate_up ? "shared.gate_up" : "shared.down", " is given, but ",
                shared_gate_up ? "shared.down" : "shared.gate_up", " is not");
  if (call.has_shared) {
    call.shared = {.gate_up = &in.shared.gate_up,
                   .up = is_there(in.shared.up) ? &in.shared.up : nullptr,
                   .down = &in.shared.down,
                   .apart = is_there(in.shared.up)};
    check_experts(check, call, kOfShared, call.shared);
    check.require(check[kOfShared.count] == 1, "shared.gate_up holds ", check[kOfShared.count],
                  " weights, but a shared expert has one");
    if (in.shared.gate) check.tensor("shared.gate", in.shared.gate).dtype({in.x.dtype}).dims({"hidden"});
  }
  find_range(check, call);
  if (!check.ok()) return;
  call.tokens = check["tokens"];
  call.hidden = check["hidden"];
  call.top_k = call.has_logits ? o.top_k : check["top_k"];
  const Size rows = Size(call.tokens) * call.top_k + call.tokens;
  check.require((rows * std::max<int64_t>(1, call.hidden)).within_limit(), "tokens is ", call.tokens, " and top_k ",
                call.top_k, ", more than 2^56 elements of rows");
}

void check_layer_output(ShapeCheck& check, const LayerCall& call, const ConstTensor& output) {
  for (const Experts* experts : {&call.experts, &call.shared}) {
    const char* const names[] = {"gate_up", "up", "down"};
    const GroupedWeight* const weights[] = {experts->gate_up, experts->up, experts->down};
    for (int i = 0; i < 3; ++i) {
      if (weights[i] != nullptr) gemm::check_apart(check, names[i], *weights[i], output);
    }
  }
}

}  // namespace opst::moe

// The node of a mixture's experts.
#include "graph/new_node.h"
#include "opst/moe_layer.h"

namespace opst {

namespace {

struct MoeLayerCall {
  MoeLayerOptions options;
  int8_t residual = -1;  // of the inputs; -1: none

  Status operator()(Context& context, const NodeTensors& t) const {
    return moe_layer_forward(context,
                             {.x = t.input(0),
                              .logits = t.input(1),
                              .experts = {.gate_up = t.weight(2), .down = t.weight(3)},
                              .residual = t.input(residual)},
                             {.out = t.output(0)}, options);
  }
};

// Bytes of those experts of a stack that `slots` choices can reach at most.
int64_t bytes_read(const PackedWeight& stack, int64_t slots) {
  if (stack.count() == 0) return 0;
  return stack.size_bytes() / stack.count() * std::min(stack.count(), slots);
}

}  // namespace

Value Graph::weight_stack(std::string name, int64_t count, int64_t n, int64_t k) {
  return building(*impl_, [&] { return impl_->add_value(std::move(name), Kind::weight, DType::f32, {count, n, k}); });
}

Value Graph::moe_layer(std::string name, const MoeLayer& layer, const MoeLayerNodeOptions& options) {
  return made(*impl_, name, "moe_layer", [&](NewNode& node) {
    node.input("x", layer.x).dtype({DType::f32}).dims({"tokens", "width"});
    node.input("router_logits", layer.router_logits).dtype({DType::f32}).dims({"tokens", "num_experts"});
    node.input("gate_up", layer.gate_up, Counted::not_all_packed).dims({"num_experts", "2 * ffn_size", "width"});
    node.input("down", layer.down, Counted::not_all_packed).dims({"num_experts", "width", "ffn_size"});
    const int8_t residual = node.optional("residual", layer.residual, {DType::f32}, {"tokens", "width"});
    if (!node.check.ok()) return;
    const int64_t experts = node.check["num_experts"], ffn_size = node.check["ffn_size"],
                  gate_up = node.check["2 * ffn_size"], top_k = options.top_k;
    node.check.require(gate_up == 2 * ffn_size, "gate_up dim 1 is ", gate_up,
                       ", but must be 2 * ffn_size = ", 2 * ffn_size);
    node.check.require(top_k >= 1 && top_k <= experts, "top_k is ", top_k, ", must be 1 to num_experts = ", experts);
    if (!node.check.ok()) return;
    node.result(DType::f32, {node.dim("tokens"), node.dim("width")});
    if (residual >= 0) node.in_place = {{residual, 0}};
    const auto call = std::make_shared<MoeLayerCall>(
        MoeLayerCall{{.top_k = top_k, .gating = options.gating, .activations = options.activations}, residual});
    node.run = [call](Context& context, const NodeTensors& t) { return (*call)(context, t); };
    node.also_costs = [top_k](const NodeTensors& t) -> NodeCost {
      const int64_t rows = t.input(0).shape[0] * top_k;
      const auto of_one = [](const PackedWeight& w) { return static_cast<double>(w.n()) * static_cast<double>(w.k()); };
      return {.flops = 2.0 * static_cast<double>(rows) * (of_one(t.weight(2)) + of_one(t.weight(3))),
              .weight_bytes = bytes_read(t.weight(2), rows) + bytes_read(t.weight(3), rows)};
    };
    node.plan = [experts, ffn_size, top_k, has_residual = residual >= 0, activations = options.activations](
                    const Machine&, const NodeTensors& t) {
      const bool rounds = activations != ActivationType::exact;
      return text(experts, " experts of ", ffn_size, ", ", top_k, " used by each token: gate and up ",
                  to_string(t.weight(2).format()), ", down ", to_string(t.weight(3).format()), ", ",
                  bytes_read(t.weight(2), 1) + bytes_read(t.weight(3), 1), " bytes each",
                  has_residual ? ", residual" : "", rounds ? ", x " : "", rounds ? to_string(activations) : "");
    };
  })[0];
}

}  // namespace opst

#include "opst/moe.h"

#include <nanobind/stl/string.h>

#include "given.h"
#include "opst/moe_layer.h"
#include "view.h"

namespace opst::python {

namespace {

GateScores parse_scores(const std::string& name) {
  if (name == "softmax") return GateScores::softmax;
  if (name == "sigmoid") return GateScores::sigmoid;
  raise(PyExc_ValueError, "scores is \"" + name + "\", must be one of softmax, sigmoid");
}
GroupScore parse_group_score(const std::string& name) {
  if (name == "max") return GroupScore::max;
  if (name == "top2_sum") return GroupScore::top2_sum;
  raise(PyExc_ValueError, "group_score is \"" + name + "\", must be one of max, top2_sum");
}

}  // namespace

MoeLayerInputs layer_inputs(const Given& in) {
  return {.x = in.input("x"),
          .logits = in.input("logits"),
          .gate_bias = in.input("gate_bias"),
          .finished = in.input("finished"),
          .topk_ids = in.input("topk_ids"),
          .topk_weights = in.input("topk_weights"),
          .experts = {.gate_up = in.weight("gate_up"),
                      .down = in.weight("down"),
                      .up = in.weight("up"),
                      .gate_up_bias = in.input("gate_up_bias"),
                      .down_bias = in.input("down_bias")},
          .shared = {.gate_up = in.weight("shared_gate_up"),
                     .down = in.weight("shared_down"),
                     .up = in.weight("shared_up"),
                     .gate = in.input("shared_gate")},
          .residual = in.input("residual")};
}

MoeLayerOptions layer_options(const Given& o) {
  const MoeGatingOptions gating = {.scores = parse_scores(o.option<std::string>("scores")),
                                   .renormalise = o.option<bool>("renormalise"),
                                   .routed_scaling_factor = o.option<float>("routed_scaling_factor"),
                                   .eps = o.option<float>("eps"),
                                   .num_groups = o.option<int64_t>("num_groups"),
                                   .kept_groups = o.option<int64_t>("kept_groups"),
                                   .group_score = parse_group_score(o.option<std::string>("group_score")),
                                   .nan_is_error = o.option<bool>("nan_is_error")};
  return {.top_k = o.option<int64_t>("top_k"),
          .gating = gating,
          .activation = parse_activation(o.option<std::string>("activation")),
          .activations = o.option<bool>("int8_activations") ? ActivationType::int8 : ActivationType::exact,
          .batch_invariant = o.option<bool>("batch_invariant"),
          .num_experts = o.option<int64_t>("num_experts"),
          .expert_begin = o.option<int64_t>("expert_begin"),
          .expert_end = o.option<int64_t>("expert_end")};
}

namespace {

void bind_layer(nb::module_& module) {
  using nb::arg;
  module.def(
      "moe_layer_forward",
      [](Context& context, const nb::dict& inputs, const nb::dict& options, const nb::dict& outputs) {
        const MoeLayerInputs in = layer_inputs(Given(inputs));
        const MoeLayerOptions o = layer_options(Given(options));
        const Given of(outputs);
        const MoeLayerOutputs out = {.out = of.output("out"),
                                     .topk_ids = of.output("topk_ids"),
                                     .topk_weights = of.output("topk_weights"),
                                     .expert_tokens = of.output("expert_tokens")};
        run([&] { return moe_layer_forward(context, in, out, o); });
      },
      arg("context"), arg("inputs"), arg("options"), arg("outputs"));
  module.def(
      "moe_layer_backward",
      [](Context& context, const View& grad_out, const nb::dict& inputs, const nb::dict& options,
         const nb::dict& gradients) {
        const MoeLayerInputs in = layer_inputs(Given(inputs));
        const MoeLayerOptions o = layer_options(Given(options));
        const Given of(gradients);
        const MoeLayerGradients to = {.x = of.output("x"),
                                      .logits = of.output("logits"),
                                      .topk_weights = of.output("topk_weights"),
                                      .gate_up = of.output("gate_up"),
                                      .down = of.output("down"),
                                      .gate_up_bias = of.output("gate_up_bias"),
                                      .down_bias = of.output("down_bias"),
                                      .shared_gate_up = of.output("shared_gate_up"),
                                      .shared_down = of.output("shared_down"),
                                      .shared_gate = of.output("shared_gate")};
        run([&] { return moe_layer_backward(context, grad_out.input(), in, to, o); });
      },
      arg("context"), arg("grad_out"), arg("inputs"), arg("options"), arg("gradients"));
}

void bind_gating(nb::module_& module) {
  using nb::arg;
  module.def(
      "moe_gating",
      [](Context& context, const View& logits, const View* bias, const View* finished, const View& topk_ids,
         const View& topk_weights, const View* scores, const std::string& kind, bool renormalise, float factor,
         float eps, int64_t num_groups, int64_t kept_groups, const std::string& group_score, bool nan_is_error) {
        const MoeGatingInputs in = {logits.input(), input_or_empty(bias), input_or_empty(finished)};
        const MoeGatingOutputs out = {topk_ids.output("topk_ids"), topk_weights.output("topk_weights"),
                                      output_or_empty(scores, "scores")};
        const MoeGatingOptions options = {.scores = parse_scores(kind),
                                          .renormalise = renormalise,
                                          .routed_scaling_factor = factor,
                                          .eps = eps,
                                          .num_groups = num_groups,
                                          .kept_groups = kept_groups,
                                          .group_score = parse_group_score(group_score),
                                          .nan_is_error = nan_is_error};
        run([&] { return moe_gating(context, in, out, options); });
      },
      arg("context"), arg("logits"), arg("bias").none(), arg("finished").none(), arg("topk_ids"), arg("topk_weights"),
      arg("scores").none(), arg("kind"), arg("renormalise"), arg("routed_scaling_factor"), arg("eps"),
      arg("num_groups"), arg("kept_groups"), arg("group_score"), arg("nan_is_error"));
  module.def(
      "moe_gating_backward",
      [](Context& context, const View& logits, const View& topk_ids, const View& grad_topk_weights,
         const View* grad_scores, const View& grad_logits, const std::string& kind, bool renormalise, float factor,
         float eps) {
        const MoeGatingBackwardInputs in = {logits.input(), topk_ids.input(), grad_topk_weights.input(),
                                            input_or_empty(grad_scores)};
        const MoeGatingOptions options = {
            .scores = parse_scores(kind), .renormalise = renormalise, .routed_scaling_factor = factor, .eps = eps};
        run([&, g = grad_logits.output("grad_logits")] { return moe_gating_backward(context, in, g, options); });
      },
      arg("context"), arg("logits"), arg("topk_ids"), arg("grad_topk_weights"), arg("grad_scores").none(),
      arg("grad_logits"), arg("kind"), arg("renormalise"), arg("routed_scaling_factor"), arg("eps"));
}

void bind_routing(nb::module_& module) {
  using nb::arg;
  module.def(
      "moe_routing",
      [](Context& context, const View& topk_ids, int64_t num_experts, const View& row_of_slot, const View& slot_of_row,
         const View& expert_tokens, int64_t capacity, int64_t expert_begin, int64_t expert_end, bool cumulative_ends) {
        const MoeRoutingOutputs out = {row_of_slot.output("row_of_slot"), slot_of_row.output("slot_of_row"),
                                       expert_tokens.output("expert_tokens")};
        const MoeRoutingOptions options = {.capacity = capacity,
                                           .expert_begin = expert_begin,
                                           .expert_end = expert_end,
                                           .cumulative_ends = cumulative_ends};
        run([&] { return moe_routing(context, topk_ids.input(), num_experts, out, options); });
      },
      arg("context"), arg("topk_ids"), arg("num_experts"), arg("row_of_slot"), arg("slot_of_row"), arg("expert_tokens"),
      arg("capacity"), arg("expert_begin"), arg("expert_end"), arg("cumulative_ends"));
  module.def(
      "moe_compute_expert_tokens",
      [](Context& context, const View& sorted_ids, const View& expert_tokens) {
        run([&, out = expert_tokens.output("expert_tokens")] {
          return moe_compute_expert_tokens(context, sorted_ids.input(), out);
        });
      },
      arg("context"), arg("sorted_ids"), arg("expert_tokens"));
  module.def(
      "moe_permute",
      [](Context& context, const View& tokens, const View& slot_of_row, int64_t top_k, const View& expanded) {
        run([&, out = expanded.output("expanded")] {
          return moe_permute(context, tokens.input(), slot_of_row.input(), top_k, out);
        });
      },
      arg("context"), arg("tokens"), arg("slot_of_row"), arg("top_k"), arg("expanded"));
}

}  // namespace

void bind_moe(nb::module_& module) {
  using nb::arg;
  bind_gating(module);
  bind_routing(module);
  bind_layer(module);
  const auto inputs = [](const View* expanded, const View& row_of_slot, const View* topk_weights, const View* skip1,
                         const View* skip2, const View* bias, const View* topk_ids) {
    return MoeFinalizeInputs{input_or_empty(expanded), row_of_slot.input(),   input_or_empty(topk_weights),
                             input_or_empty(skip1),    input_or_empty(skip2), input_or_empty(bias),
                             input_or_empty(topk_ids)};
  };
  module.def(
      "moe_finalize",
      [inputs](Context& context, const View& expanded, const View& row_of_slot, const View* topk_weights,
               const View* skip1, const View* skip2, const View* bias, const View* topk_ids, const View& out) {
        const MoeFinalizeInputs in = inputs(&expanded, row_of_slot, topk_weights, skip1, skip2, bias, topk_ids);
        run([&, y = out.output("out")] { return moe_finalize(context, in, y); });
      },
      arg("context"), arg("expanded"), arg("row_of_slot"), arg("topk_weights").none(), arg("skip1").none(),
      arg("skip2").none(), arg("bias").none(), arg("topk_ids").none(), arg("out"));
  module.def(
      "moe_finalize_backward",
      [inputs](Context& context, const View& grad_out, const View* expanded, const View& row_of_slot,
               const View* topk_weights, const View* bias, const View* topk_ids, const View* grad_expanded,
               const View* grad_topk_weights, const View* grad_bias) {
        const MoeFinalizeInputs in = inputs(expanded, row_of_slot, topk_weights, nullptr, nullptr, bias, topk_ids);
        const MoeFinalizeGradients gradients = {output_or_empty(grad_expanded, "grad_expanded"),
                                                output_or_empty(grad_topk_weights, "grad_topk_weights"),
                                                output_or_empty(grad_bias, "grad_bias")};
        run([&] { return moe_finalize_backward(context, grad_out.input(), in, gradients); });
      },
      arg("context"), arg("grad_out"), arg("expanded").none(), arg("row_of_slot"), arg("topk_weights").none(),
      arg("bias").none(), arg("topk_ids").none(), arg("grad_expanded").none(), arg("grad_topk_weights").none(),
      arg("grad_bias").none());
}

}  // namespace opst::python

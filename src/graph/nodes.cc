// The operators of include/opst as nodes: what they infer, where they may write, what they cost.
#include "graph/node_check.h"

namespace opst {

using graph::bytes_of;
using graph::kFloats;
using graph::NodeCheck;
using graph::only;
using graph::str;

namespace {

// Small enough for a std::function to hold without memory of its own.
struct MatmulCall {
  Activation activation;
  ActivationType activations;
  int8_t bias = 0, residual = 0;  // inputs; 0: none
};

NodeCost norm_cost(const NodeTensors& t, int weight, int bias) {
  NodeCost cost = {.tensor_bytes = bytes_of(t.input(0)) + bytes_of(t.output(0))};
  for (const int i : {weight, bias}) cost.weight_bytes += i != 0 ? bytes_of(t.input(i)) : 0;
  return cost;
}

}  // namespace

Value Graph::matmul(std::string name, Value x, Value weight, const MatmulNodeOptions& options) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "matmul");
    check.tensor("x", x, kFloats, {"rows", "k"});
    check.weight("weight", weight, {"n", "k"});
    if (options.bias.exists()) check.tensor("bias", options.bias, kFloats, {"n"});
    if (std::find(kFloats.begin(), kFloats.end(), options.dtype) == kFloats.end()) {
      check.fail(std::string("the result's dtype is ") + to_string(options.dtype) + ", expected f32, bf16 or f16");
    }
    Dim columns = check["n"];
    if (options.activation == Activation::swiglu || options.activation == Activation::swiglu_swapped) {
      if (columns.bound() % 2 != 0) {
        check.fail("weight dim 0 (n) is " + str(columns.bound()) + ", but must be even: gate and up");
      }
      columns = columns.bound() / 2;
    }
    const Shape shape = {check["rows"], columns};
    std::vector<Value> inputs = {x, weight};
    MatmulCall call = {.activation = options.activation, .activations = options.activations};
    if (options.bias.exists()) {
      call.bias = static_cast<int8_t>(inputs.size());
      inputs.push_back(options.bias);
    }
    std::vector<NodeSpec::InPlace> in_place;
    if (options.residual.exists()) {
      check.shaped("residual", options.residual, shape);
      call.residual = static_cast<int8_t>(inputs.size());
      in_place.push_back({call.residual, 0});
      inputs.push_back(options.residual);
    }
    if (!check.ok()) return {};
    return only(node({.name = name,
                      .op = "matmul",
                      .inputs = inputs,
                      .outputs = {{name, options.dtype, shape}},
                      .in_place = in_place,
                      .run =
                          [call](Context& context, const NodeTensors& t) {
                            MatmulOptions with = {.activation = call.activation, .activations = call.activations};
                            if (call.bias != 0) with.bias = t.input(call.bias);
                            if (call.residual != 0) with.residual = t.input(call.residual);
                            return opst::matmul(context, t.input(0), t.weight(1), t.output(0), with);
                          },
                      .read_ahead =
                          [activation = options.activation](Context& context, const NodeTensors& t) {
                            if (t.input(0).shape[0] == 1) opst::read_ahead(context, t.weight(1), activation);
                          },
                      .cost =
                          [call](const NodeTensors& t) {
                            const PackedWeight& w = t.weight(1);
                            const double multiply_adds = static_cast<double>(t.input(0).shape[0]) *
                                                         static_cast<double>(w.n()) * static_cast<double>(w.k());
                            int64_t bytes = bytes_of(t.input(0)) + bytes_of(t.output(0));
                            for (const int i : {call.bias, call.residual}) bytes += i != 0 ? bytes_of(t.input(i)) : 0;
                            return NodeCost{
                                .flops = 2.0 * multiply_adds, .weight_bytes = w.size_bytes(), .tensor_bytes = bytes};
                          },
                      .plan =
                          [call](const Machine&, const NodeTensors& t) {
                            const PackedWeight& w = t.weight(1);
                            std::string text = std::string(to_string(w.format())) + ", " + str(t.input(0).shape[0]) +
                                               " x " + str(w.n()) + " x " + str(w.k());
                            if (call.bias != 0) text += ", bias";
                            if (call.activation != Activation::none) {
                              text += std::string(", ") + to_string(call.activation);
                            }
                            if (call.residual != 0) text += ", residual";
                            if (call.activations != ActivationType::exact) {
                              text += std::string(", x ") + to_string(call.activations);
                            }
                            return text;
                          }}));
  });
}

Value Graph::lookup_rows(std::string name, Value weight, Value rows) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "lookup_rows");
    check.weight("weight", weight, {"n", "k"});
    check.tensor("rows", rows, {DType::i64}, {"count"});
    if (!check.ok()) return {};
    return only(node(
        {.name = name,
         .op = "lookup_rows",
         .inputs = {weight, rows},
         .outputs = {{name, DType::f32, {check["count"], check["k"]}}},
         .run = [](Context& context,
                   const NodeTensors& t) { return opst::lookup_rows(context, t.weight(0), t.input(1), t.output(0)); },
         .cost =
             [](const NodeTensors& t) {
               const PackedWeight& w = t.weight(0);
               const Size looked_up = t.input(1).shape[0];
               return NodeCost{.weight_bytes = w.n() > 0 ? (looked_up * (w.size_bytes() / w.n())).value() : 0,
                               .tensor_bytes = bytes_of(t.input(1)) + bytes_of(t.output(0))};
             }}));
  });
}

Value Graph::rms_norm(std::string name, Value x, Value weight, const RmsNormOptions& options) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "rms_norm");
    check.last_dim("x", x, kFloats, "features");
    check.tensor("weight", weight, {DType::f32, dtype(x)}, {"features"});
    if (!check.ok()) return {};
    return only(node({.name = name,
                      .op = "rms_norm",
                      .inputs = {x, weight},
                      .outputs = {{name, dtype(x), shape(x)}},
                      .in_place = {{0, 0}},
                      .run =
                          [eps = options.eps](Context& context, const NodeTensors& t) {
                            return opst::rms_norm(context, t.input(0), t.input(1), t.output(0), {.eps = eps});
                          },
                      .cost = [](const NodeTensors& t) { return norm_cost(t, 1, 0); }}));
  });
}

Graph::NormedSum Graph::add_rms_norm(std::string name, Value a, Value b, Value weight, const RmsNormOptions& options) {
  return building(*impl_, [&]() -> NormedSum {
    NodeCheck check(*impl_, name, "add_rms_norm");
    check.last_dim("a", a, kFloats, "features");
    check.same("b", b, "a", a);
    check.tensor("weight", weight, {DType::f32, dtype(a)}, {"features"});
    if (!check.ok()) return {};
    const std::vector<Value> outputs =
        node({.name = name,
              .op = "add_rms_norm",
              .inputs = {a, b, weight},
              .outputs = {{name, dtype(a), shape(a)}, {name + ".sum", dtype(a), shape(a)}},
              .in_place = {{0, 1}, {1, 1}, {1, 0}, {0, 0}},
              .run =
                  [eps = options.eps](Context& context, const NodeTensors& t) {
                    return opst::add_rms_norm(context, t.input(0), t.input(1), t.input(2), t.output(0), t.output(1),
                                              {.eps = eps});
                  },
              .cost =
                  [](const NodeTensors& t) {
                    NodeCost cost = norm_cost(t, 2, 0);
                    cost.tensor_bytes += bytes_of(t.input(1)) + bytes_of(t.output(1));
                    return cost;
                  }});
    if (outputs.empty()) return {};
    return {outputs[0], outputs[1]};
  });
}

Value Graph::layer_norm(std::string name, Value x, const LayerNormNodeOptions& options) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "layer_norm");
    check.last_dim("x", x, kFloats, "features");
    std::vector<Value> inputs = {x};
    int8_t weight = 0, bias = 0;
    for (const bool is_bias : {false, true}) {
      const Value value = is_bias ? options.bias : options.weight;
      if (!value.exists()) continue;
      check.tensor(is_bias ? "bias" : "weight", value, {DType::f32, dtype(x)}, {"features"});
      (is_bias ? bias : weight) = static_cast<int8_t>(inputs.size());
      inputs.push_back(value);
    }
    if (!check.ok()) return {};
    return only(node({.name = name,
                      .op = "layer_norm",
                      .inputs = inputs,
                      .outputs = {{name, dtype(x), shape(x)}},
                      .in_place = {{0, 0}},
                      .run =
                          [eps = options.eps, weight, bias](Context& context, const NodeTensors& t) {
                            LayerNormOptions with = {.eps = eps};
                            if (weight != 0) with.weight = t.input(weight);
                            if (bias != 0) with.bias = t.input(bias);
                            return opst::layer_norm(context, t.input(0), t.output(0), with);
                          },
                      .cost = [weight, bias](const NodeTensors& t) { return norm_cost(t, weight, bias); }}));
  });
}

Value Graph::softmax(std::string name, Value x, const SoftmaxOptions& options) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "softmax");
    check.last_dim("x", x, kFloats, "features");
    if (!check.ok()) return {};
    return only(node({.name = name,
                      .op = "softmax",
                      .inputs = {x},
                      .outputs = {{name, dtype(x), shape(x)}},
                      .in_place = {{0, 0}},
                      .run = [options](Context& context, const NodeTensors& t) {
                        return opst::softmax(context, t.input(0), t.output(0), options);
                      }}));
  });
}

namespace {

// Positions of one axis, or of three where there are sections. Binds tokens.
void check_positions(NodeCheck& check, Value positions, const RopeSections& sections) {
  const bool axes = sections.temporal != 0 || sections.height != 0 || sections.width != 0;
  if (axes) {
    check.tensor("positions", positions, {DType::i64}, {"axes", "tokens"});
    check.holds("positions", positions, "axes", 3);
  } else {
    check.tensor("positions", positions, {DType::i64}, {"tokens"});
  }
}

void check_pairs(NodeCheck& check, const char* role) {
  if (check.ok() && 2 * check["half"].bound() > check["head_dim"].bound()) {
    check.fail(std::string(role) + " dim 1 (half) is " + str(check["half"].bound()) +
               ", more than half of head_dim = " + str(check["head_dim"].bound()));
  }
}

}  // namespace

Graph::RopeTable Graph::rope_table(std::string name, Value positions, int64_t half, const RopeTableOptions& options) {
  return building(*impl_, [&]() -> RopeTable {
    NodeCheck check(*impl_, name, "rope_table");
    check_positions(check, positions, options.sections);
    if (!check.ok()) return {};
    const Shape table = {check["tokens"], half};
    const std::vector<Value> outputs =
        node({.name = name,
              .op = "rope_table",
              .inputs = {positions},
              .outputs = {{name + ".cos", DType::f32, table}, {name + ".sin", DType::f32, table}},
              .run = [options](Context& context, const NodeTensors& t) {
                return opst::rope_table(context, t.input(0), t.output(0), t.output(1), options);
              }});
    if (outputs.empty()) return {};
    return {outputs[0], outputs[1]};
  });
}

Value Graph::rope(std::string name, Value x, const RopeTable& table, const RopeOptions& options) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "rope");
    check.tensor("x", x, kFloats, {"tokens", "num_heads", "head_dim"});
    check.tensor("cos", table.cos, {DType::f32}, {"tokens", "half"});
    check.tensor("sin", table.sin, {DType::f32}, {"tokens", "half"});
    check_pairs(check, "cos");
    if (!check.ok()) return {};
    return only(node({.name = name,
                      .op = "rope",
                      .inputs = {x, table.cos, table.sin},
                      .outputs = {{name, dtype(x), shape(x)}},
                      .in_place = {{0, 0}},
                      .run = [options](Context& context, const NodeTensors& t) {
                        return opst::rope(context, t.input(0), t.input(1), t.input(2), t.output(0), options);
                      }}));
  });
}

Value Graph::rope_cached(std::string name, Value x, Value positions, const RopeTable& cache,
                         const RopeCachedOptions& options) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "rope_cached");
    check_positions(check, positions, options.sections);
    check.tensor("x", x, kFloats, {"tokens", "num_heads", "head_dim"});
    check.tensor("cos", cache.cos, {DType::f32, dtype(x)}, {"max_positions", "half"});
    check.tensor("sin", cache.sin, {dtype(cache.cos)}, {"max_positions", "half"});
    check_pairs(check, "cos");
    if (!check.ok()) return {};
    return only(node({.name = name,
                      .op = "rope_cached",
                      .inputs = {x, positions, cache.cos, cache.sin},
                      .outputs = {{name, dtype(x), shape(x)}},
                      .in_place = {{0, 0}},
                      .run = [options](Context& context, const NodeTensors& t) {
                        return opst::rope_cached(context, t.input(0), t.input(1), t.input(2), t.input(3), t.output(0),
                                                 options);
                      }}));
  });
}

Value Graph::swiglu(std::string name, Value gate, Value up) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "swiglu");
    check.same("up", up, "gate", gate);
    if (!check.ok()) return {};
    return only(node({.name = name,
                      .op = "swiglu",
                      .inputs = {gate, up},
                      .outputs = {{name, dtype(gate), shape(gate)}},
                      .in_place = {{0, 0}, {1, 0}},
                      .run = [](Context& context, const NodeTensors& t) {
                        return opst::swiglu(context, t.input(0), t.input(1), t.output(0));
                      }}));
  });
}

Value Graph::swiglu(std::string name, Value gate_up, const SwigluOptions& options) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "swiglu");
    check.last_dim("gate_up", gate_up, kFloats, "2 * features");
    if (check.ok() && (GraphImpl::symbol(check["2 * features"]) >= 0 || check["2 * features"].bound() % 2 != 0)) {
      check.fail("gate_up's last dimension is " + impl_->text(check["2 * features"]) + ", but must be an even number");
    }
    if (!check.ok()) return {};
    Shape half = shape(gate_up);
    half.dims[half.rank - 1] = half.dims[half.rank - 1].bound() / 2;
    return only(node({.name = name,
                      .op = "swiglu",
                      .inputs = {gate_up},
                      .outputs = {{name, dtype(gate_up), half}},
                      .run = [options](Context& context, const NodeTensors& t) {
                        return opst::swiglu(context, t.input(0), t.output(0), options);
                      }}));
  });
}

Value Graph::add(std::string name, Value a, Value b) {
  return building(*impl_, [&]() -> Value {
    NodeCheck check(*impl_, name, "add");
    check.same("b", b, "a", a);
    if (!check.ok()) return {};
    return only(node({.name = name,
                      .op = "add",
                      .inputs = {a, b},
                      .outputs = {{name, dtype(a), shape(a)}},
                      .in_place = {{0, 0}, {1, 0}},
                      .run = [](Context& context, const NodeTensors& t) {
                        return opst::add(context, t.input(0), t.input(1), t.output(0));
                      }}));
  });
}

}  // namespace opst

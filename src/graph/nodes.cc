// The operators of include/opst as nodes: what they infer, where they may write, what they cost.
#include "graph/new_node.h"

namespace opst {

using graph::Counted;
using graph::kFloats;
using graph::made;
using graph::NewNode;
using graph::str;

namespace {

// Small enough for a std::function to hold without memory of its own.
struct MatmulCall {
  Activation activation;
  ActivationType activations;
  int8_t bias = 0, residual = 0;  // inputs; 0: none

  Status run(Context& context, const NodeTensors& t) const {
    MatmulOptions with = {.activation = activation, .activations = activations};
    if (bias != 0) with.bias = t.input(bias);
    if (residual != 0) with.residual = t.input(residual);
    return opst::matmul(context, t.input(0), t.weight(1), t.output(0), with);
  }

  std::string plan(const Machine& machine, const NodeTensors& t) const {
    const PackedWeight& w = t.weight(1);
    const MatmulPlan chosen = plan_matmul({.m = t.input(0).shape[0],
                                           .n = w.n(),
                                           .k = w.k(),
                                           .x_dtype = t.input(0).dtype,
                                           .format = w.format(),
                                           .activation = activation,
                                           .activations = activations},
                                          machine);
    return std::string(to_string(w.format())) + ", " + str(t.input(0).shape[0]) + " x " + str(w.n()) + " x " +
           str(w.k()) + (bias != 0 ? ", bias" : "") +
           (activation != Activation::none ? std::string(", ") + to_string(activation) : "") +
           (residual != 0 ? ", residual" : "") +
           (activations != ActivationType::exact ? std::string(", x ") + to_string(activations) : "") + ": " +
           to_string(chosen.path) + ", " + chosen.reason;
  }
};

// Positions of one axis, or of three where there are sections. Binds tokens.
void add_positions(NewNode& node, Value positions, const RopeSections& sections) {
  if (sections.temporal != 0 || sections.height != 0 || sections.width != 0) {
    node.input("positions", positions).dtype({DType::i64}).dims({"3", "tokens"});
  } else {
    node.input("positions", positions).dtype({DType::i64}).dims({"tokens"});
  }
}

}  // namespace

Value Graph::matmul(std::string name, Value x, Value weight, const MatmulNodeOptions& options) {
  return made(*impl_, name, "matmul", [&](NewNode& node) {
    node.input("x", x).dtype(kFloats).dims({"rows", "k"});
    node.input("weight", weight, Counted::packed).dims({"n", "k"});
    MatmulCall call = {options.activation, options.activations, node.next(options.bias)};
    if (call.bias != 0) node.input("bias", options.bias).dtype(kFloats).dims({"n"});
    const bool gated = call.activation == Activation::swiglu || call.activation == Activation::swiglu_swapped;
    const int64_t n = node.check["n"];
    node.check.require(!gated || n % 2 == 0,
                       [n] { return "weight dim 0 (n) is " + str(n) + ", but must be even: gate and up"; });
    node.result(options.dtype, {node.dim("rows"), gated ? n / 2 : n}).dtype(kFloats).dims({"rows", "columns"});
    call.residual = node.next(options.residual);
    if (call.residual != 0) {
      node.input("residual", options.residual).dtype(kFloats).dims({"rows", "columns"});
      node.in_place = {{call.residual, 0}};
    }
    node.run = [call](Context& context, const NodeTensors& t) { return call.run(context, t); };
    node.read_ahead = [activation = call.activation](Context& context, const NodeTensors& t) {
      if (t.input(0).shape[0] == 1) opst::read_ahead(context, t.weight(1), activation);
    };
    node.also_costs = [](const NodeTensors& t) -> NodeCost {
      const double multiply_adds = static_cast<double>(t.input(0).shape[0]) * static_cast<double>(t.weight(1).n()) *
                                   static_cast<double>(t.weight(1).k());
      return {.flops = 2.0 * multiply_adds};
    };
    node.plan = [call](const Machine& machine, const NodeTensors& t) { return call.plan(machine, t); };
  })[0];
}

Value Graph::lookup_rows(std::string name, Value weight, Value rows) {
  return made(*impl_, name, "lookup_rows", [&](NewNode& node) {
    node.input("weight", weight, Counted::not_all_packed).dims({"n", "k"});
    node.input("rows", rows).dtype({DType::i64}).dims({"count"});
    node.result(DType::f32, {node.dim("count"), node.dim("k")});
    node.run = [](Context& context, const NodeTensors& t) {
      return opst::lookup_rows(context, t.weight(0), t.input(1), t.output(0));
    };
    node.also_costs = [](const NodeTensors& t) -> NodeCost {
      const PackedWeight& w = t.weight(0);
      return {.weight_bytes = w.n() > 0 ? (Size(t.input(1).shape[0]) * (w.size_bytes() / w.n())).value() : 0};
    };
  })[0];
}

Value Graph::rms_norm(std::string name, Value x, Value weight, const RmsNormOptions& options) {
  return made(*impl_, name, "rms_norm", [&](NewNode& node) {
    node.rows("x", x).dtype(kFloats);
    node.input("weight", weight, Counted::weight).dtype({DType::f32, dtype(x)}).dims({"features"});
    node.result(dtype(x), shape(x));
    node.in_place = {{0, 0}};
    node.run = [eps = options.eps](Context& context, const NodeTensors& t) {
      return opst::rms_norm(context, t.input(0), t.input(1), t.output(0), {.eps = eps});
    };
  })[0];
}

Graph::NormedSum Graph::add_rms_norm(std::string name, Value a, Value b, Value weight, const RmsNormOptions& options) {
  const auto [out, sum] = made(*impl_, name, "add_rms_norm", [&](NewNode& node) {
    node.rows("a", a).dtype(kFloats);
    node.rows("b", b).dtype({dtype(a)});
    node.input("weight", weight, Counted::weight).dtype({DType::f32, dtype(a)}).dims({"features"});
    node.result(dtype(a), shape(a));
    node.result(dtype(a), shape(a), ".sum");
    node.in_place = {{0, 1}, {1, 1}, {1, 0}, {0, 0}};
    node.run = [eps = options.eps](Context& context, const NodeTensors& t) {
      return opst::add_rms_norm(context, t.input(0), t.input(1), t.input(2), t.output(0), t.output(1), {.eps = eps});
    };
  });
  return {out, sum};
}

Value Graph::layer_norm(std::string name, Value x, const LayerNormNodeOptions& options) {
  return made(*impl_, name, "layer_norm", [&](NewNode& node) {
    node.rows("x", x).dtype(kFloats);
    const std::initializer_list<DType> types = {DType::f32, dtype(x)};
    const int8_t weight = node.next(options.weight);
    if (weight != 0) node.input("weight", options.weight, Counted::weight).dtype(types).dims({"features"});
    const int8_t bias = node.next(options.bias);
    if (bias != 0) node.input("bias", options.bias, Counted::weight).dtype(types).dims({"features"});
    node.result(dtype(x), shape(x));
    node.in_place = {{0, 0}};
    node.run = [eps = options.eps, weight, bias](Context& context, const NodeTensors& t) {
      LayerNormOptions with = {.eps = eps};
      if (weight != 0) with.weight = t.input(weight);
      if (bias != 0) with.bias = t.input(bias);
      return opst::layer_norm(context, t.input(0), t.output(0), with);
    };
  })[0];
}

Value Graph::softmax(std::string name, Value x, const SoftmaxOptions& options) {
  return made(*impl_, name, "softmax", [&](NewNode& node) {
    node.rows("x", x).dtype(kFloats);
    node.result(dtype(x), shape(x));
    node.in_place = {{0, 0}};
    node.run = [options](Context& context, const NodeTensors& t) {
      return opst::softmax(context, t.input(0), t.output(0), options);
    };
  })[0];
}

Graph::RopeTable Graph::rope_table(std::string name, Value positions, int64_t half, const RopeTableOptions& options) {
  const auto [cos, sin] = made(*impl_, name, "rope_table", [&](NewNode& node) {
    add_positions(node, positions, options.sections);
    node.result(DType::f32, {node.dim("tokens"), half}, ".cos");
    node.result(DType::f32, {node.dim("tokens"), half}, ".sin");
    node.run = [options](Context& context, const NodeTensors& t) {
      return opst::rope_table(context, t.input(0), t.output(0), t.output(1), options);
    };
  });
  return {cos, sin};
}

Value Graph::rope(std::string name, Value x, const RopeTable& table, const RopeOptions& options) {
  return made(*impl_, name, "rope", [&](NewNode& node) {
    node.input("x", x).dtype(kFloats).dims({"tokens", "num_heads", "head_dim"});
    node.input("cos", table.cos).dtype({DType::f32}).dims({"tokens", "half"});
    node.input("sin", table.sin).dtype({DType::f32}).dims({"tokens", "half"});
    node.half_of_head_dim();
    node.result(dtype(x), shape(x));
    node.in_place = {{0, 0}};
    node.run = [options](Context& context, const NodeTensors& t) {
      return opst::rope(context, t.input(0), t.input(1), t.input(2), t.output(0), options);
    };
  })[0];
}

Value Graph::rope_cached(std::string name, Value x, Value positions, const RopeTable& cache,
                         const RopeCachedOptions& options) {
  return made(*impl_, name, "rope_cached", [&](NewNode& node) {
    node.input("x", x).dtype(kFloats).dims({"tokens", "num_heads", "head_dim"});
    add_positions(node, positions, options.sections);
    node.input("cos", cache.cos).dtype({DType::f32, dtype(x)}).dims({"max_positions", "half"});
    node.input("sin", cache.sin).dtype({dtype(cache.cos)}).dims({"max_positions", "half"});
    node.half_of_head_dim();
    node.result(dtype(x), shape(x));
    node.in_place = {{0, 0}};
    node.run = [options](Context& context, const NodeTensors& t) {
      return opst::rope_cached(context, t.input(0), t.input(1), t.input(2), t.input(3), t.output(0), options);
    };
  })[0];
}

Value Graph::swiglu(std::string name, Value gate, Value up) {
  return made(*impl_, name, "swiglu", [&](NewNode& node) {
    node.rows("gate", gate).dtype(kFloats);
    node.rows("up", up).dtype({dtype(gate)});
    node.result(dtype(gate), shape(gate));
    node.in_place = {{0, 0}, {1, 0}};
    node.run = [](Context& context, const NodeTensors& t) {
      return opst::swiglu(context, t.input(0), t.input(1), t.output(0));
    };
  })[0];
}

Value Graph::swiglu(std::string name, Value gate_up, const SwigluOptions& options) {
  return made(*impl_, name, "swiglu", [&](NewNode& node) {
    node.rows("gate_up", gate_up, "2 * features").dtype(kFloats);
    const int64_t both = node.check["2 * features"];
    node.check.require(both >= 0 && both % 2 == 0, [&] {
      return "gate_up's last dimension is " + node.text(both) + ", but must be an even number";
    });
    if (!node.check.ok()) return;
    Shape half = shape(gate_up);
    half.dims[half.rank - 1] = both / 2;
    node.result(dtype(gate_up), half);
    node.run = [options](Context& context, const NodeTensors& t) {
      return opst::swiglu(context, t.input(0), t.output(0), options);
    };
  })[0];
}

Value Graph::add(std::string name, Value a, Value b) {
  return made(*impl_, name, "add", [&](NewNode& node) {
    node.rows("a", a).dtype(kFloats);
    node.rows("b", b).dtype({dtype(a)});
    node.result(dtype(a), shape(a));
    node.in_place = {{0, 0}, {1, 0}};
    node.run = [](Context& context, const NodeTensors& t) {
      return opst::add(context, t.input(0), t.input(1), t.output(0));
    };
  })[0];
}

}  // namespace opst

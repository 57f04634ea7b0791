// The operators of include/opst as nodes: what they infer, where they may write, what they cost.
#include "graph/new_node.h"
#include "kv_cache/pages.h"

namespace opst {

namespace {

// What ShapeCheck sees of a tensor that has no memory yet.
ConstTensor declared(DType dtype, const Shape& shape) {
  ConstTensor tensor;
  tensor.dtype = dtype, tensor.rank = std::clamp(shape.rank, 0, kMaxRank);
  for (int i = 0; i < tensor.rank; ++i) tensor.shape[i] = GraphImpl::number_of(shape.dims[i]);
  return tensor;
}

// Small enough for a std::function to hold without memory of its own.
struct MatmulCall {
  Activation activation;
  ActivationType activations;
  int8_t bias = -1, residual = -1;  // inputs; -1: none

  Status operator()(Context& context, const NodeTensors& t) const {
    return matmul(
        context, t.input(0), t.weight(1), t.output(0),
        {.bias = t.input(bias), .activation = activation, .residual = t.input(residual), .activations = activations});
  }

  std::string plan(const Machine& machine, const NodeTensors& t) const {
    const PackedWeight& w = t.weight(1);
    const int64_t m = t.input(0).shape[0];
    const MatmulPlan chosen = plan_matmul({.m = m,
                                           .n = w.n(),
                                           .k = w.k(),
                                           .x_dtype = t.input(0).dtype,
                                           .format = w.format(),
                                           .activation = activation,
                                           .activations = activations},
                                          machine);
    const bool activates = activation != Activation::none, rounds = activations != ActivationType::exact;
    return text(to_string(w.format()), ", ", m, " x ", w.n(), " x ", w.k(), bias >= 0 ? ", bias" : "",
                activates ? ", " : "", activates ? to_string(activation) : "", residual >= 0 ? ", residual" : "",
                rounds ? ", x " : "", rounds ? to_string(activations) : "", ": ", to_string(chosen.path), ", ",
                chosen.reason);
  }
};

// Positions of one axis, or of three where there are sections. Binds tokens.
void add_positions(NewNode& node, Value positions, const RopeSections& sections) {
  static constexpr const char* kDims[] = {"3", "tokens"};
  const bool is_one = sections.temporal == 0 && sections.height == 0 && sections.width == 0;
  node.input("positions", positions).dtype({DType::i64}).dims(std::span(kDims).subspan(is_one ? 1 : 0));
}

}  // namespace

NewNode::NewNode(GraphImpl& graph, const std::string& node, const char* operator_name)
    : NodeSpec{.name = node, .op = operator_name, .run = {}},
      where_(node + " (" + operator_name + ")"),
      graph_(graph),
      check(where_.c_str(), *this) {}

const char* NewNode::named(const char* role, Value value) {
  if (!graph_.has(value)) return role;
  return names_.emplace_back(opst::text(role, " ", quoted(graph_.at(value).name))).c_str();
}

ShapeCheck::TensorCheck NewNode::input(const char* role, Value value, Counted counted) {
  inputs.push_back(value);
  counted_.push_back(counted);
  const char* const known_as = named(role, value);
  check.require(graph_.has(value), known_as, " is no tensor of this graph");
  if (!check.ok()) return check.tensor(known_as, {});
  const ValueData& data = graph_.at(value);
  const bool packed = data.kind == Kind::weight;
  check.require(packed == (counted == Counted::packed || counted == Counted::not_all_packed), known_as,
                packed ? " is a packed weight, expected a tensor" : " is a tensor, expected a packed weight");
  return check.tensor(known_as, declared(data.dtype, data.shape));
}

ShapeCheck::TensorCheck NewNode::rows(const char* role, Value value, const char* last) {
  ShapeCheck::TensorCheck of_rows = input(role, value);
  if (!check.ok()) return of_rows;
  if (rank_ == 0) rank_ = graph_.at(value).shape.rank;
  check.require(rank_ > 0, named(role, value), " has no dimension ", last);
  return check.ok() ? of_rows.leading_dims(rank_ - 1, last) : of_rows;
}

NewNode::ScaleInputs NewNode::pages(PageLayout layout, Value key_cache, Value value_cache, const ScaleValues& scales,
                                    bool written) {
  const auto integers = [&](Value cache) {
    return graph_.has(cache) && kv_cache::holds_integers(graph_.at(cache).dtype);
  };
  const bool in_groups = integers(key_cache) || integers(value_cache);
  const auto side = [&](PageSide which, const char* role, Value cache, const char*& known_as) -> ConstTensor {
    input(role, cache, Counted::not_all);
    known_as = named(role, cache);
    if (!check.ok()) return {};
    const ValueData& data = graph_.at(cache);
    check.require(!written || data.kind == Kind::cache, known_as, " is written, but is no cache");
    ConstTensor tensor = declared(data.dtype, data.shape);
    // What lies in one piece of a page is counted with, and so are numbers in groups: a named size is its bound.
    const PageFormat& format = page_format(layout, tensor.dtype, which);
    const int counted_from = in_groups ? std::min(format.contiguous_from, 3) : format.contiguous_from;
    for (int i = counted_from; i < tensor.rank; ++i) tensor.shape[i] = dim(tensor.shape[i]).bound();
    make_contiguous(tensor);
    return tensor;
  };
  kv_cache::CacheNames names = kv_cache::kCacheNames;
  kv_cache::CacheTensors cache = {layout, side(PageSide::key, names.key, key_cache, names.key), {}, {}};
  cache.value = side(PageSide::value, names.value, value_cache, names.value);
  ScaleInputs found;
  const auto list = [&](PageSide which, const char*& known_as, Value value, int8_t& index, ConstTensor& tensor) {
    if (!value.exists()) return;
    tensor = side(which, known_as, value, known_as);
    index = static_cast<int8_t>(inputs.size() - 1);
  };
  list(PageSide::key_scales, names.key_scales, scales.key, found.key, cache.scales.key);
  list(PageSide::value_scales, names.value_scales, scales.value, found.value, cache.scales.value);
  list(PageSide::key_scales, names.key_offsets, scales.key_offsets, found.key_offsets, cache.scales.key_offsets);
  list(PageSide::value_scales, names.value_offsets, scales.value_offsets, found.value_offsets,
       cache.scales.value_offsets);
  if (check.ok()) kv_cache::check_cache(check, names, cache, kv_cache::CacheUse::read);
  return found;
}

ShapeCheck::TensorCheck NewNode::result(DType dtype, const Shape& shape, const char* suffix) {
  outputs.push_back({name + suffix, dtype, shape});
  return check.tensor("the result", declared(dtype, shape));
}

std::array<Value, 2> NewNode::add() && {
  std::array<Value, 2> results;
  if (!check.ok()) return graph_.fail(check.status().message()), results;
  cost = [counted = std::move(counted_), also = std::move(also_costs)](const NodeTensors& t) {
    NodeCost total = GraphImpl::count_bytes(t, counted.data());
    if (also) total += also(t);
    return total;
  };
  const std::vector<Value> all = graph_.add_node(std::move(*this));
  std::copy_n(all.begin(), std::min(all.size(), results.size()), results.begin());
  return results;
}

Value Graph::matmul(std::string name, Value x, Value weight, const MatmulNodeOptions& options) {
  return made(*impl_, name, "matmul", [&](NewNode& node) {
    node.input("x", x).dtype(kFloats).dims({"rows", "k"});
    node.input("weight", weight, Counted::packed).dims({"n", "k"});
    MatmulCall call = {options.activation, options.activations};
    call.bias = node.optional("bias", options.bias, kFloats, {"n"});
    const bool gated = call.activation == Activation::swiglu || call.activation == Activation::swiglu_swapped;
    const int64_t n = node.check["n"];
    node.check.require(!gated || n % 2 == 0, "weight dim 0 (n) is ", n, ", but must be even: gate and up");
    node.result(options.dtype, {node.dim("rows"), gated ? n / 2 : n}).dtype(kFloats).dims({"rows", "columns"});
    call.residual = node.optional("residual", options.residual, kFloats, {"rows", "columns"});
    if (call.residual >= 0) node.in_place = {{call.residual, 0}};
    node.run = call;
    node.read_ahead = [activation = call.activation](Context& context, const NodeTensors& t) {
      if (t.input(0).shape[0] == 1) opst::read_ahead(context, t.weight(1), activation);
    };
    node.also_costs = [](const NodeTensors& t) -> NodeCost {
      const PackedWeight& w = t.weight(1);
      const auto m = static_cast<double>(t.input(0).shape[0]);
      return {.flops = 2.0 * (m * static_cast<double>(w.n()) * static_cast<double>(w.k()))};
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
    node.result_as(x, {0});
    node.calls<2>([eps = options.eps](auto&... call) { return opst::rms_norm(call..., {.eps = eps}); });
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
    node.calls<3, 2>([eps = options.eps](auto&... call) { return opst::add_rms_norm(call..., {.eps = eps}); });
  });
  return {out, sum};
}

Value Graph::layer_norm(std::string name, Value x, const LayerNormNodeOptions& options) {
  return made(*impl_, name, "layer_norm", [&](NewNode& node) {
    node.rows("x", x).dtype(kFloats);
    const auto vector = [&](const char* role, Value value) {
      return node.optional(role, value, {DType::f32, dtype(x)}, {"features"}, Counted::weight);
    };
    const int8_t weight = vector("weight", options.weight), bias = vector("bias", options.bias);
    node.result_as(x, {0});
    node.run = [eps = options.eps, weight, bias](Context& context, const NodeTensors& t) {
      return opst::layer_norm(context, t.input(0), t.output(0),
                              {.eps = eps, .weight = t.input(weight), .bias = t.input(bias)});
    };
  })[0];
}

Value Graph::softmax(std::string name, Value x, const SoftmaxOptions& options) {
  return made(*impl_, name, "softmax", [&](NewNode& node) {
    node.rows("x", x).dtype(kFloats);
    node.result_as(x, {0});
    node.calls<1>([options](auto&... call) { return opst::softmax(call..., options); });
  })[0];
}

Graph::RopeTable Graph::rope_table(std::string name, Value positions, int64_t half, const RopeTableOptions& options) {
  const auto [cos, sin] = made(*impl_, name, "rope_table", [&](NewNode& node) {
    add_positions(node, positions, options.sections);
    node.result(DType::f32, {node.dim("tokens"), half}, ".cos");
    node.result(DType::f32, {node.dim("tokens"), half}, ".sin");
    node.calls<1, 2>([options](auto&... call) { return opst::rope_table(call..., options); });
  });
  return {cos, sin};
}

Value Graph::rope(std::string name, Value x, const RopeTable& table, const RopeOptions& options) {
  return made(*impl_, name, "rope", [&](NewNode& node) {
    node.input("x", x).dtype(kFloats).dims({"tokens", "num_heads", "head_dim"});
    node.input("cos", table.cos).dtype({DType::f32}).dims({"tokens", "half"});
    node.input("sin", table.sin).dtype({DType::f32}).dims({"tokens", "half"});
    node.half_of_head_dim();
    node.result_as(x, {0});
    node.calls<3>([options](auto&... call) { return opst::rope(call..., options); });
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
    node.result_as(x, {0});
    node.calls<4>([options](auto&... call) { return opst::rope_cached(call..., options); });
  })[0];
}

Value Graph::swiglu(std::string name, Value gate, Value up) {
  return made(*impl_, name, "swiglu", [&](NewNode& node) {
    node.rows("gate", gate).dtype(kFloats);
    node.rows("up", up).dtype({dtype(gate)});
    node.result_as(gate, {0, 1});
    node.calls<2>([](auto&... call) { return opst::swiglu(call...); });
  })[0];
}

Value Graph::swiglu(std::string name, Value gate_up, const SwigluOptions& options) {
  return made(*impl_, name, "swiglu", [&](NewNode& node) {
    node.rows("gate_up", gate_up, "2 * features").dtype(kFloats);
    const int64_t both = node.check["2 * features"];
    node.check.require(both >= 0 && both % 2 == 0, "gate_up's last dimension is ", node.text(both),
                       ", but must be an even number");
    if (!node.check.ok()) return;
    Shape half = shape(gate_up);
    half.dims[half.rank - 1] = both / 2;
    node.result(dtype(gate_up), half);
    node.calls<1>([options](auto&... call) { return opst::swiglu(call..., options); });
  })[0];
}

Value Graph::add(std::string name, Value a, Value b) {
  return made(*impl_, name, "add", [&](NewNode& node) {
    node.rows("a", a).dtype(kFloats);
    node.rows("b", b).dtype({dtype(a)});
    node.result_as(a, {0, 1});
    node.calls<2>([](auto&... call) { return opst::add(call...); });
  })[0];
}

}  // namespace opst

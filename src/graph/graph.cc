// Building a graph.
#include "graph/graph_impl.h"

namespace opst {

Shape::Shape(std::initializer_list<Dim> sizes) : rank(static_cast<int>(sizes.size())) {
  std::copy_n(sizes.begin(), std::min<size_t>(sizes.size(), kMaxRank), dims);
}

Shape::Shape(const ConstTensor& tensor) : rank(tensor.rank) {
  std::copy_n(tensor.shape, std::clamp(rank, 0, kMaxRank), dims);
}

NodeCost& NodeCost::operator+=(const NodeCost& other) {
  flops += other.flops;
  weight_bytes = (Size(weight_bytes) + other.weight_bytes).value();
  cache_bytes = (Size(cache_bytes) + other.cache_bytes).value();
  tensor_bytes = (Size(tensor_bytes) + other.tensor_bytes).value();
  return *this;
}

int64_t NodeTensors::size(Dim dim) const { return graph_->has(dim) ? graph_->size_of(dim) : -1; }

// --- Graph

Graph::Graph(std::unique_ptr<GraphImpl> impl) : impl_(std::move(impl)) {}
Graph::~Graph() = default;
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;

Result<Graph> Graph::create(std::string name) {
  return guarded([&]() -> Result<Graph> {
    auto impl = std::make_unique<GraphImpl>();
    impl->name = std::move(name);
    return Graph(std::move(impl));
  });
}

Dim Graph::dim(std::string name, int64_t bound) {
  return building(*impl_, [&]() -> Dim {
    if (bound < 1) return impl_->fail("size ", quoted(name), " has the bound ", bound, ", must be >= 1");
    impl_->symbols.push_back({std::move(name), bound, bound, {}});
    return impl_->dim_of(-static_cast<int64_t>(impl_->symbols.size()));
  });
}

Value Graph::input(std::string name, DType dtype, const Shape& shape) {
  return building(*impl_, [&] { return impl_->add_value(std::move(name), Kind::input, dtype, shape); });
}

Value Graph::cache(std::string name, DType dtype, const Shape& shape) {
  return building(*impl_, [&] { return impl_->add_value(std::move(name), Kind::cache, dtype, shape); });
}

Value Graph::weight(std::string name, int64_t n, int64_t k) {
  return building(*impl_, [&] { return impl_->add_value(std::move(name), Kind::weight, DType::f32, {n, k}); });
}

Value Graph::view(Value base, const Shape& shape) {
  return building(*impl_, [&]() -> Value {
    if (!impl_->has(base)) return impl_->fail("a view of no tensor of this graph");
    const ValueData& of = impl_->at(base);
    if (of.kind == Kind::weight) return impl_->fail("weight ", quoted(of.name), " cannot be viewed");
    if (of.of_columns) return impl_->fail("columns of ", quoted(of.name), " cannot be viewed");
    if (of.depth == GraphImpl::kMostViewsOfViews) {
      return impl_->fail("a view of ", of.depth, " views of one another, of ", quoted(of.name));
    }
    const int64_t available = GraphImpl::most_bytes(of.dtype, of.shape);
    const Value view = impl_->add_value(of.name, Kind::view, of.dtype, shape);
    if (!view.exists()) return view;
    ValueData& made = impl_->at(view);
    if (const int64_t needed = GraphImpl::most_bytes(made.dtype, shape); needed > available) {
      return impl_->fail("view ", impl_->text(shape), " of ", impl_->text(base), " has up to ", needed,
                         " bytes, but there are ", available);
    }
    made.base = GraphImpl::index(base);
    made.depth = impl_->at(base).depth + 1;
    impl_->at(base).views.push_back(GraphImpl::index(view));
    impl_->refresh(GraphImpl::index(view));
    return view;
  });
}

Value Graph::columns(Value base, int64_t first, const Shape& shape) {
  return building(*impl_, [&]() -> Value {
    const Value value = view(base, shape);
    if (!impl_->has(value)) return value;
    const Shape& whole = impl_->at(base).shape;
    if (whole.rank != 2 || shape.rank < 2) {
      return impl_->fail("columns ", impl_->text(shape), " of ", impl_->text(base), " need rows in both");
    }
    // At the bounds of the sizes; refresh() asks again at those of the moment.
    Size width = 1;
    for (int i = 1; i < shape.rank; ++i) width *= shape.dims[i].bound();
    if (first < 0 || width > whole.dims[1].bound() - std::min(first, whole.dims[1].bound())) {
      return impl_->fail("columns ", first, " to ", (Size(first) + width).value(), " of ", impl_->text(base),
                         " are not all there");
    }
    impl_->at(value).of_columns = true;
    impl_->at(value).first_column = first;
    impl_->refresh(GraphImpl::index(value));
    return value;
  });
}

void Graph::output(std::string name, Value value) {
  building(*impl_, [&]() -> Value {
    if (!impl_->has(value)) return impl_->fail("output ", quoted(name), " is no tensor of this graph");
    ValueData& result = impl_->at(value);
    if (result.kind != Kind::intermediate) {
      return impl_->fail("output ", quoted(name), ": ", quoted(result.name), " is not the result of a node");
    }
    if (!impl_->by_name.emplace(name, GraphImpl::index(value)).second) {
      return impl_->fail("two tensors are named ", quoted(name));
    }
    // Nothing fails from here on.
    impl_->by_name.erase(impl_->by_name.find(result.name));
    result.kind = Kind::output;
    result.name = std::move(name);
    impl_->refresh(GraphImpl::index(value));
    return value;
  });
}

std::vector<Value> Graph::node(NodeSpec spec) {
  return building(*impl_, [&] { return impl_->add_node(std::move(spec)); });
}

std::vector<Value> GraphImpl::add_node(NodeSpec spec) {
  const auto refuse = [&](const auto&... message) {
    const std::string op = spec.op != nullptr ? opst::text(" (", spec.op, ")") : "";
    return fail(spec.name, op, ": ", message...);
  };
  if (spec.op == nullptr) return refuse("op is null");
  if (!spec.run) return refuse("nothing to run");
  if (!spec.cost) spec.cost = [](const NodeTensors& t) { return count_bytes(t, nullptr); };
  const auto num_inputs = static_cast<int>(spec.inputs.size()), num_outputs = static_cast<int>(spec.outputs.size());
  for (size_t i = 0; i < spec.inputs.size(); ++i) {
    if (!has(spec.inputs[i])) return refuse("input ", i, " is no tensor of this graph");
  }
  for (const auto& [input, output] : spec.in_place) {
    if (input < 0 || input >= num_inputs || output < 0 || output >= num_outputs) {
      return refuse("in place from input ", input, " to output ", output, ", which do not exist");
    }
  }
  Step step = {std::move(spec.run), std::move(spec.read_ahead), static_cast<int>(arguments.size()), num_inputs,
               num_outputs};
  std::vector<Value> results;
  for (const Value input : spec.inputs) arguments.push_back(static_cast<int>(index(input)));
  for (const NodeSpec::Output& output : spec.outputs) {
    const Value result = add_value(output.name, Kind::intermediate, output.dtype, output.shape);
    if (!result.exists()) return {};
    arguments.push_back(static_cast<int>(index(result)));
    results.push_back(result);
  }
  nodes.push_back(std::move(spec));
  steps.push_back(std::move(step));
  return results;
}

DType Graph::dtype(Value value) const { return impl_->has(value) ? impl_->at(value).dtype : DType::f32; }

Shape Graph::shape(Value value) const { return impl_->has(value) ? impl_->at(value).shape : Shape(); }

Value Graph::find(std::string_view name) const {
  const auto found = impl_->by_name.find(name);
  return found != impl_->by_name.end() ? impl_->value_at(found->second) : Value();
}

Status Graph::no_such_value(std::string_view name) const {
  return guarded([&]() -> Status {
    return impl_->status.ok() ? impl_->error("no tensor is named ", quoted(name)) : impl_->status;
  });
}

const std::string& Graph::name() const { return impl_->name; }

int Graph::num_nodes() const { return static_cast<int>(impl_->nodes.size()); }

}  // namespace opst

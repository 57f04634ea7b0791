#include "opst/graph.h"

#include <algorithm>
#include <cstdio>

#include "graph/graph_impl.h"

namespace opst {

using Kind = GraphImpl::Kind;
using ValueData = GraphImpl::ValueData;

namespace {

// What a weight is before it is bound.
const PackedWeight& no_weight() {
  static const PackedWeight kNone;
  return kNone;
}

std::string str(int64_t number) { return std::to_string(number); }

std::string quoted(std::string_view name) { return std::string("'").append(name) + "'"; }

int64_t num_bytes(DType dtype, const Shape& shape) {
  int64_t bytes = size_bytes(dtype);
  for (int i = 0; i < shape.rank; ++i) bytes *= shape.dims[i].bound();
  return bytes;
}

void make_contiguous(Tensor& tensor) {
  int64_t stride = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    tensor.strides[i] = stride;
    stride *= std::max<int64_t>(tensor.shape[i], 1);
  }
}

}  // namespace

Shape::Shape(std::initializer_list<Dim> sizes) : rank(static_cast<int>(sizes.size())) {
  std::copy_n(sizes.begin(), std::min<size_t>(sizes.size(), kMaxRank), dims);
}

Shape::Shape(const ConstTensor& tensor) : rank(tensor.rank) {
  std::copy_n(tensor.shape, std::clamp(rank, 0, kMaxRank), dims);
}

NodeCost& NodeCost::operator+=(const NodeCost& other) {
  flops += other.flops;
  weight_bytes += other.weight_bytes;
  cache_bytes += other.cache_bytes;
  tensor_bytes += other.tensor_bytes;
  return *this;
}

int64_t NodeTensors::size(Dim dim) const { return graph_->size_of(dim); }

// --- GraphImpl

std::string GraphImpl::text(const Dim& dim) const {
  const int i = symbol(dim);
  return i < 0 ? str(dim.bound()) : symbols[static_cast<size_t>(i)].name;
}

std::string GraphImpl::text(const Shape& shape) const {
  std::string s = "[";
  for (int i = 0; i < shape.rank; ++i) s += (i > 0 ? ", " : "") + text(shape.dims[i]);
  return s + "]";
}

std::string GraphImpl::text(int i) const {
  const ValueData& value = values[static_cast<size_t>(i)];
  if (value.kind == Kind::weight) {
    const char* const format = value.is_bound ? to_string(weights[static_cast<size_t>(i)]->format()) : "weight";
    return value.name + " " + format + " " + text(value.shape);
  }
  return value.name + " " + to_string(value.dtype) + " " + text(value.shape);
}

int GraphImpl::add_value(std::string value_name, Kind kind, DType dtype, const Shape& shape) {
  ready = false;
  if (shape.rank > kMaxRank) {
    fail(quoted(value_name) + " has " + str(shape.rank) + " dimensions, at most " + str(kMaxRank) + " are possible");
    return -1;
  }
  int64_t bytes = size_bytes(dtype);
  for (int i = 0; i < shape.rank; ++i) {
    const int64_t size = shape.dims[i].bound();
    if (size < 0 || (size > 0 && bytes > kMostBytes / size)) {
      fail(quoted(value_name) + " dim " + str(i) + " is " + str(size) + (size < 0 ? ", must be >= 0" : ", too large"));
      return -1;
    }
    bytes *= size;
  }
  // Views go by their base's name.
  const auto i = static_cast<int>(values.size());
  if (kind != Kind::view) {
    if (value_name.empty()) return fail("a tensor needs a name"), -1;
    if (!by_name.emplace(value_name, i).second) return fail("two tensors are named " + quoted(value_name)), -1;
  }
  ValueData& value = values.emplace_back();
  tensors.emplace_back();
  weights.push_back(&no_weight());
  value.name = std::move(value_name);
  value.kind = kind;
  value.dtype = dtype;
  value.shape = shape;
  for (int d = 0; d < shape.rank; ++d) {
    if (const int s = symbol(shape.dims[d]); s >= 0) {
      std::vector<int>& users = symbols[static_cast<size_t>(s)].values;
      if (users.empty() || users.back() != i) users.push_back(i);
    }
  }
  ++num_unfit;
  return i;
}

void GraphImpl::refresh(int index) {
  ValueData& value = values[static_cast<size_t>(index)];
  Tensor& t = tensors[static_cast<size_t>(index)];
  t.dtype = value.dtype;
  t.rank = value.shape.rank;
  for (int i = 0; i < t.rank; ++i) t.shape[i] = size_of(value.shape.dims[i]);
  bool fits = true;
  switch (value.kind) {
    case Kind::weight:
      fits = value.is_bound;
      break;
    case Kind::intermediate:
      make_contiguous(t);
      fits = value.offset >= 0;
      t.data = fits ? static_cast<char*>(workspace.data()) + value.offset : nullptr;
      break;
    case Kind::view: {
      const Tensor& base = tensors[static_cast<size_t>(value.base)];
      make_contiguous(t);
      fits = values[static_cast<size_t>(value.base)].fits && base.is_contiguous() &&
             t.num_elements() <= base.num_elements();
      t.data = base.data;
      if (value.of_columns) {
        fits = fits && t.shape[0] <= base.shape[0];
        t.strides[0] = base.strides[0];
        if (t.data != nullptr) t.data = static_cast<char*>(t.data) + value.first_column * size_bytes(t.dtype);
      }
      break;
    }
    case Kind::input:
    case Kind::cache:
    case Kind::output:
      fits = value.is_bound;
      for (int i = 0; i < t.rank; ++i) {
        t.strides[i] = value.bound.strides[i];
        fits = fits && t.shape[i] <= value.bound.shape[i];
      }
      t.data = value.bound.data;
      break;
  }
  num_unfit += static_cast<int>(value.fits) - static_cast<int>(fits);
  value.fits = fits;
  for (const int view : value.views) refresh(view);
}

std::string GraphImpl::unfit_reason(int index) const {
  const ValueData& value = values[static_cast<size_t>(index)];
  const Tensor& tensor = tensors[static_cast<size_t>(index)];
  const std::string what = "tensor " + quoted(value.name);
  switch (value.kind) {
    case Kind::weight:
      return "weight " + quoted(value.name) + " is not bound";
    case Kind::intermediate:
      return what + " is in no workspace";
    case Kind::view: {
      const Tensor& base = tensors[static_cast<size_t>(value.base)];
      if (!values[static_cast<size_t>(value.base)].fits) return unfit_reason(value.base);
      if (!base.is_contiguous()) return what + " is viewed in another shape, but is not contiguous";
      return what + " has " + str(base.num_elements()) + " elements, but its view " + text(value.shape) + " has " +
             str(tensor.num_elements());
    }
    default:
      if (!value.is_bound) return what + " is not bound";
      for (int i = 0; i < tensor.rank; ++i) {
        if (tensor.shape[i] > value.bound.shape[i]) {
          return what + " dim " + str(i) + " is " + str(value.bound.shape[i]) + ", but " + text(value.shape.dims[i]) +
                 " is " + str(tensor.shape[i]);
        }
      }
      return what + " does not fit";
  }
}

void GraphImpl::prefetch(size_t step) const {
  if (step >= steps.size()) return;
  const Step& next = steps[step];
  const int* const first = arguments.data() + next.first_argument;
  for (int i = 0; i < next.num_inputs + next.num_outputs; ++i) {
    const auto* const tensor = reinterpret_cast<const char*>(&tensors[static_cast<size_t>(first[i])]);
    __builtin_prefetch(tensor);
    __builtin_prefetch(tensor + sizeof(Tensor) - 1);
    __builtin_prefetch(weights[static_cast<size_t>(first[i])]);
  }
}

size_t GraphImpl::read_ahead(size_t step, Context& context) const {
  while (step < steps.size() && !steps[step].read_ahead) ++step;
  if (step < steps.size()) steps[step].read_ahead(context, tensors_of(static_cast<int>(step)));
  return step;
}

int GraphImpl::storage(int value) const {
  while (values[static_cast<size_t>(value)].base >= 0) value = values[static_cast<size_t>(value)].base;
  return value;
}

// Lifetimes of what nodes make, merged where a node may write onto its input, and their places.
Status GraphImpl::lay_out() {
  const size_t count = values.size();
  std::vector<int> last(count, -1);  // node that reads the memory last, or writes it
  std::vector<int> home(count);      // value whose place in the workspace this value takes
  for (size_t i = 0; i < count; ++i) home[i] = storage(static_cast<int>(i));
  for (size_t n = 0; n < nodes.size(); ++n) {
    for (const int output : nodes[n].outputs) last[static_cast<size_t>(output)] = static_cast<int>(n);
    for (const Value input : nodes[n].spec.inputs) {
      last[static_cast<size_t>(home[static_cast<size_t>(index(input))])] = static_cast<int>(n);
    }
  }
  const auto internal = [&](int value) { return values[static_cast<size_t>(value)].kind == Kind::intermediate; };
  const auto home_of = [&](int value) {
    value = storage(value);
    while (home[static_cast<size_t>(value)] != value) value = home[static_cast<size_t>(value)];
    return value;
  };
  for (size_t n = 0; n < nodes.size(); ++n) {
    const Node& node = nodes[n];
    for (const auto& [input, output] : node.spec.in_place) {
      const int from = index(node.spec.inputs[static_cast<size_t>(input)]);
      const int to = node.outputs[static_cast<size_t>(output)];
      const int place = home_of(from);
      const ValueData& a = values[static_cast<size_t>(from)];
      const ValueData& b = values[static_cast<size_t>(to)];
      // Another input that is a view of the same memory would be overwritten while it is read.
      const auto same_place = [&](Value v) { return internal(storage(index(v))) && home_of(index(v)) == place; };
      const auto readers = std::count_if(node.spec.inputs.begin(), node.spec.inputs.end(), same_place);
      if (a.of_columns || !internal(to) || !internal(storage(from)) || home[static_cast<size_t>(to)] != to ||
          readers != 1)
        continue;
      // Another result of the node may have it already.
      const bool taken = std::any_of(node.outputs.begin(), node.outputs.end(),
                                     [&](int other) { return other != to && home_of(other) == place; });
      if (taken || last[static_cast<size_t>(place)] != static_cast<int>(n) || a.dtype != b.dtype || a.shape != b.shape)
        continue;
      home[static_cast<size_t>(to)] = place;
      last[static_cast<size_t>(place)] = last[static_cast<size_t>(to)];
    }
  }

  std::vector<graph::Lifetime> lifetimes;
  std::vector<int> place_of(count, -1);
  for (size_t i = 0; i < count; ++i) {
    if (values[i].kind != Kind::intermediate || home[i] != static_cast<int>(i)) continue;
    place_of[i] = static_cast<int>(lifetimes.size());
    lifetimes.push_back({num_bytes(values[i].dtype, values[i].shape), values[i].producer, last[i]});
  }
  memory = graph::plan_memory(lifetimes);
  for (size_t i = 0; i < count; ++i) {
    if (values[i].kind != Kind::intermediate) continue;
    values[i].offset = memory.offsets[static_cast<size_t>(place_of[static_cast<size_t>(home_of(static_cast<int>(i)))])];
  }
  if (workspace.size_bytes() != memory.bytes) {
    workspace = Buffer();
    Result<Buffer> buffer = Buffer::allocate(memory.bytes);
    if (!buffer.ok()) return buffer.status();
    workspace = std::move(buffer.value());
  }
  return {};
}

// --- Graph

Graph::Graph(std::unique_ptr<GraphImpl> impl) : impl_(std::move(impl)) {}
Graph::~Graph() = default;
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;

Result<Graph> Graph::create(std::string name) {
  try {
    auto impl = std::make_unique<GraphImpl>();
    impl->name = std::move(name);
    return Graph(std::move(impl));
  } catch (const std::bad_alloc&) {
    return Status::out_of_memory();
  }
}

Dim Graph::dim(std::string name, int64_t bound) {
  return building(*impl_, [&]() -> Dim {
    impl_->ready = false;
    if (bound < 1) impl_->fail("size " + quoted(name) + " has the bound " + str(bound) + ", must be >= 1");
    impl_->symbols.push_back({std::move(name), bound, bound, {}});
    return GraphImpl::symbolic(static_cast<int>(impl_->symbols.size()) - 1, bound);
  });
}

Value Graph::input(std::string name, DType dtype, const Shape& shape) {
  return building(*impl_, [&]() -> Value {
    return GraphImpl::value_at(impl_->add_value(std::move(name), Kind::input, dtype, shape));
  });
}

Value Graph::cache(std::string name, DType dtype, const Shape& shape) {
  return building(*impl_, [&]() -> Value {
    return GraphImpl::value_at(impl_->add_value(std::move(name), Kind::cache, dtype, shape));
  });
}

Value Graph::weight(std::string name, int64_t n, int64_t k) {
  return building(*impl_, [&]() -> Value {
    return GraphImpl::value_at(impl_->add_value(std::move(name), Kind::weight, DType::f32, {n, k}));
  });
}

Value Graph::columns(Value base, int64_t first, const Shape& shape) {
  return building(*impl_, [&]() -> Value {
    const Value value = view(base, shape);
    if (!impl_->has(value)) return value;
    ValueData& of = impl_->values[static_cast<size_t>(GraphImpl::index(value))];
    const Shape& whole = impl_->at(base).shape;
    if (whole.rank != 2 || shape.rank < 2) {
      return impl_->fail("columns " + impl_->text(shape) + " of " + impl_->text(base) + " need rows in both"), Value();
    }
    int64_t width = 1;
    for (int i = 1; i < shape.rank; ++i) width *= shape.dims[i].bound();
    if (first < 0 || width > whole.dims[1].bound() - first) {
      return impl_->fail("columns " + str(first) + " to " + str(first + width) + " of " + impl_->text(base) +
                         " are not all there"),
             Value();
    }
    of.of_columns = true;
    of.first_column = first;
    return value;
  });
}

Value Graph::view(Value base, const Shape& shape) {
  return building(*impl_, [&]() -> Value {
    if (!impl_->has(base)) return impl_->fail("a view of no tensor"), Value();
    const ValueData& of = impl_->at(base);
    if (of.kind == Kind::weight) return impl_->fail("weight " + quoted(of.name) + " cannot be viewed"), Value();
    const DType dtype = of.dtype;
    const int64_t available = num_bytes(dtype, of.shape);
    const int i = impl_->add_value(of.name, Kind::view, dtype, shape);
    if (i < 0) return {};
    if (const int64_t needed = num_bytes(dtype, shape); needed > available) {
      impl_->fail("view " + impl_->text(shape) + " of " + impl_->text(base) + " has up to " + str(needed) +
                  " bytes, but there are " + str(available));
    }
    impl_->values[static_cast<size_t>(i)].base = GraphImpl::index(base);
    impl_->values[static_cast<size_t>(GraphImpl::index(base))].views.push_back(i);
    return GraphImpl::value_at(i);
  });
}

void Graph::output(std::string name, Value value) {
  building(*impl_, [&]() -> int {
    if (!impl_->has(value)) return impl_->fail("output " + quoted(name) + " is no tensor"), 0;
    ValueData& result = impl_->values[static_cast<size_t>(GraphImpl::index(value))];
    if (result.kind != Kind::intermediate) {
      return impl_->fail("output " + quoted(name) + ": " + quoted(result.name) + " is not the result of a node"), 0;
    }
    if (!impl_->by_name.emplace(name, GraphImpl::index(value)).second) {
      return impl_->fail("two tensors are named " + quoted(name)), 0;
    }
    impl_->by_name.erase(result.name);
    result.kind = Kind::output;
    result.name = std::move(name);
    impl_->ready = false;
    return 0;
  });
}

std::vector<Value> Graph::node(NodeSpec spec) {
  return building(*impl_, [&]() -> std::vector<Value> {
    const std::string where = spec.name + " (" + spec.op + "): ";
    if (!spec.run) return impl_->fail(where + "nothing to run"), std::vector<Value>();
    for (size_t i = 0; i < spec.inputs.size(); ++i) {
      if (!impl_->has(spec.inputs[i])) {
        return impl_->fail(where + "input " + str(static_cast<int64_t>(i)) + " is no tensor of this graph"),
               std::vector<Value>();
      }
    }
    for (const auto& [input, output] : spec.in_place) {
      if (input < 0 || input >= static_cast<int>(spec.inputs.size()) || output < 0 ||
          output >= static_cast<int>(spec.outputs.size())) {
        return impl_->fail(where + "in place from input " + str(input) + " to output " + str(output) +
                           ", which do not exist"),
               std::vector<Value>();
      }
    }
    std::vector<Value> results;
    GraphImpl::Node node;
    GraphImpl::Step step = {std::move(spec.run), std::move(spec.read_ahead), static_cast<int>(impl_->arguments.size()),
                            static_cast<int>(spec.inputs.size()), static_cast<int>(spec.outputs.size())};
    for (const NodeSpec::Output& output : spec.outputs) {
      const int i = impl_->add_value(output.name, Kind::intermediate, output.dtype, output.shape);
      if (i < 0) return {};
      impl_->values[static_cast<size_t>(i)].producer = static_cast<int>(impl_->nodes.size());
      node.outputs.push_back(i);
      results.push_back(GraphImpl::value_at(i));
    }
    node.spec = std::move(spec);
    for (const Value input : node.spec.inputs) impl_->arguments.push_back(GraphImpl::index(input));
    impl_->arguments.insert(impl_->arguments.end(), node.outputs.begin(), node.outputs.end());
    impl_->nodes.push_back(std::move(node));
    impl_->steps.push_back(std::move(step));
    impl_->ready = false;
    return results;
  });
}

DType Graph::dtype(Value value) const { return impl_->has(value) ? impl_->at(value).dtype : DType::f32; }

Shape Graph::shape(Value value) const { return impl_->has(value) ? impl_->at(value).shape : Shape(); }

Value Graph::find(std::string_view name) const {
  return building(*impl_, [&]() -> Value {
    const auto found = impl_->by_name.find(std::string(name));
    return found != impl_->by_name.end() ? GraphImpl::value_at(found->second) : Value();
  });
}

Status Graph::no_such_value(std::string_view name) const {
  return running([&] { return impl_->error("no tensor is named " + quoted(name)); });
}

Status Graph::setup(const Machine& machine) {
  return running([&]() -> Status {
    if (!impl_->status.ok()) return impl_->status;
    impl_->machine = machine;
    if (Status status = impl_->lay_out(); !status.ok()) return status;
    for (size_t i = 0; i < impl_->values.size(); ++i) impl_->refresh(static_cast<int>(i));
    impl_->ready = true;
    return {};
  });
}

Status Graph::bind(Value value, const Tensor& tensor) {
  return running([&]() -> Status {
    if (!impl_->has(value)) return impl_->error("no such tensor to bind");
    ValueData& data = impl_->values[static_cast<size_t>(GraphImpl::index(value))];
    if (!GraphImpl::is_external(data.kind) || data.kind == Kind::weight) {
      return impl_->error("tensor " + quoted(data.name) + " is not one that is bound to a tensor");
    }
    if (tensor.dtype != data.dtype) {
      return impl_->error("tensor " + quoted(data.name) + " is " + to_string(tensor.dtype) + ", expected " +
                          to_string(data.dtype));
    }
    if (tensor.rank != data.shape.rank) {
      return impl_->error("tensor " + quoted(data.name) + " has " + str(tensor.rank) + " dimensions, expected " +
                          impl_->text(data.shape));
    }
    for (int i = 0; i < tensor.rank; ++i) {
      if (GraphImpl::symbol(data.shape.dims[i]) < 0 && tensor.shape[i] != data.shape.dims[i].bound()) {
        return impl_->error("tensor " + quoted(data.name) + " dim " + str(i) + " is " + str(tensor.shape[i]) +
                            ", expected " + str(data.shape.dims[i].bound()));
      }
    }
    data.bound = tensor;
    data.is_bound = true;
    impl_->refresh(GraphImpl::index(value));
    return {};
  });
}

Status Graph::bind(Value value, const ConstTensor& tensor) {
  return running([&]() -> Status {
    if (impl_->has(value) && (impl_->at(value).kind == Kind::output || impl_->at(value).kind == Kind::cache)) {
      return impl_->error("tensor " + quoted(impl_->at(value).name) + " is written, but bound to a const tensor");
    }
    Tensor mutable_view;
    mutable_view.dtype = tensor.dtype;
    mutable_view.rank = tensor.rank;
    std::copy_n(tensor.shape, kMaxRank, mutable_view.shape);
    std::copy_n(tensor.strides, kMaxRank, mutable_view.strides);
    mutable_view.data = const_cast<void*>(tensor.data);  // nodes only read inputs
    return bind(value, mutable_view);
  });
}

Status Graph::bind(Value value, const PackedWeight& weight) {
  return running([&]() -> Status {
    if (!impl_->has(value)) return impl_->error("no such weight to bind");
    ValueData& data = impl_->values[static_cast<size_t>(GraphImpl::index(value))];
    if (data.kind != Kind::weight) return impl_->error("tensor " + quoted(data.name) + " is not a packed weight");
    const int64_t sizes[] = {weight.n(), weight.k()};
    for (int i = 0; i < 2; ++i) {
      if (sizes[i] != data.shape.dims[i].bound()) {
        return impl_->error("weight " + quoted(data.name) + " dim " + str(i) + (i == 0 ? " (n)" : " (k)") + " is " +
                            str(sizes[i]) + ", expected " + str(data.shape.dims[i].bound()));
      }
    }
    impl_->weights[static_cast<size_t>(GraphImpl::index(value))] = &weight;
    data.is_bound = true;
    impl_->refresh(GraphImpl::index(value));
    return {};
  });
}

Status Graph::set(Dim dim, int64_t size) {
  return running([&]() -> Status {
    const int i = GraphImpl::symbol(dim);
    if (i < 0 || i >= static_cast<int>(impl_->symbols.size())) return impl_->error("no such size to set");
    GraphImpl::Symbol& symbol = impl_->symbols[static_cast<size_t>(i)];
    if (size < 1 || size > symbol.bound) {
      return impl_->error("size " + quoted(symbol.name) + " is " + str(size) + ", expected 1 to " + str(symbol.bound));
    }
    if (size == symbol.size) return {};
    symbol.size = size;
    for (const int value : symbol.values) impl_->refresh(value);
    return {};
  });
}

Status Graph::execute(Context& context, NodeListener* listener) {
  return running([&]() -> Status {
    if (!impl_->ready) return impl_->error("executed without a setup");
    if (impl_->num_unfit > 0) {
      for (size_t i = 0; i < impl_->values.size(); ++i) {
        if (!impl_->values[i].fits) return impl_->error(impl_->unfit_reason(static_cast<int>(i)));
      }
    }
    NodeListener::Clock::time_point begin;
    if (listener != nullptr) begin = NodeListener::Clock::now();
    size_t announced = 0;
    for (size_t i = 0; i < impl_->steps.size(); ++i) {
      impl_->prefetch(i + 1);
      if (announced <= i) announced = impl_->read_ahead(i + 1, context);
      Status status = impl_->steps[i].run(context, impl_->tensors_of(static_cast<int>(i)));
      if (!status.ok()) {
        if (status.code() == StatusCode::out_of_memory) return status;
        return {status.code(), "graph " + impl_->name + ": " + impl_->nodes[i].spec.name + ": " + status.message()};
      }
      if (listener == nullptr) continue;
      const NodeListener::Clock::time_point end = NodeListener::Clock::now();
      listener->on_node(impl_->nodes[i].spec.op, impl_->nodes[i].spec.name, begin, end);
      begin = NodeListener::Clock::now();
    }
    return {};
  });
}

const std::string& Graph::name() const { return impl_->name; }

int Graph::num_nodes() const { return static_cast<int>(impl_->nodes.size()); }

namespace {

int64_t used_bytes(const Tensor& tensor) { return tensor.num_elements() * size_bytes(tensor.dtype); }

NodeCost cost_of(const GraphImpl& graph, int index) {
  const GraphImpl::Node& node = graph.nodes[static_cast<size_t>(index)];
  if (node.spec.cost) return node.spec.cost(graph.tensors_of(index));
  NodeCost cost;
  const NodeTensors tensors = graph.tensors_of(index);
  for (size_t i = 0; i < node.spec.inputs.size(); ++i) {
    cost.tensor_bytes += used_bytes(tensors.input(static_cast<int>(i)));
  }
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    cost.tensor_bytes += used_bytes(tensors.output(static_cast<int>(i)));
  }
  return cost;
}

std::string padded(std::string s, size_t width, bool right = false) {
  if (s.size() < width) s.insert(right ? 0 : s.size(), width - s.size(), ' ');
  return s;
}

}  // namespace

NodeInfo Graph::describe(int node) const {
  const GraphImpl::Node& data = impl_->nodes[static_cast<size_t>(node)];
  NodeInfo info;
  info.name = data.spec.name;
  info.op = data.spec.op;
  for (const Value input : data.spec.inputs) info.inputs.push_back(impl_->text(input));
  for (const int output : data.outputs) {
    info.outputs.push_back(impl_->text(output));
    const ValueData& value = impl_->values[static_cast<size_t>(output)];
    info.offsets.push_back(value.kind == Kind::intermediate ? value.offset : -1);
  }
  if (data.spec.plan) info.plan = data.spec.plan(impl_->machine, impl_->tensors_of(node));
  info.cost = cost_of(*impl_, node);
  return info;
}

NodeCost Graph::cost() const {
  NodeCost cost;
  for (int i = 0; i < num_nodes(); ++i) cost += cost_of(*impl_, i);
  return cost;
}

GraphMemory Graph::memory() const {
  return {impl_->memory.bytes, impl_->memory.sum_bytes, impl_->memory.peak_live_bytes};
}

std::string to_string(const Graph& graph) {
  std::string table = padded("node", 24) + padded("operator", 26) + padded("result", 44) + padded("at", 10, true) +
                      padded("MFLOP", 10, true) + padded("weights", 11, true) + padded("cache", 11, true) + "  plan\n";
  for (int i = 0; i < graph.num_nodes(); ++i) {
    const NodeInfo info = graph.describe(i);
    std::string results;
    for (const std::string& output : info.outputs) results += (results.empty() ? "" : ", ") + output;
    const std::string place = info.offsets.empty() ? "" : info.offsets[0] < 0 ? "external" : str(info.offsets[0]);
    char flops[32];
    std::snprintf(flops, sizeof(flops), "%.2f", info.cost.flops / 1e6);
    table += padded(info.name, 24) + padded(info.op, 26) + padded(results, 44) + padded(place, 10, true) +
             padded(info.cost.flops > 0 ? flops : "", 10, true) +
             padded(info.cost.weight_bytes > 0 ? str(info.cost.weight_bytes) : "", 11, true) +
             padded(info.cost.cache_bytes > 0 ? str(info.cost.cache_bytes) : "", 11, true) + "  " + info.plan + "\n";
  }
  const GraphMemory memory = graph.memory();
  return table + "workspace " + str(memory.workspace_bytes) + " bytes (without sharing " + str(memory.sum_bytes) +
         ", needed at once " + str(memory.peak_live_bytes) + ")\n";
}

}  // namespace opst

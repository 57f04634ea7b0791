// Setting up, binding, setting sizes, executing.
#include "core/elements.h"
#include "graph/graph_impl.h"

namespace opst {

Status GraphImpl::thrown_by(size_t node) const noexcept {
  return guarded([&]() -> Status {
    const std::string where = "graph " + name + ": " + nodes[node].name + ": threw ";
    try {
      throw;
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& e) {
      return Status::internal(where + e.what());
    } catch (...) {
      return Status::internal(where + "an exception");
    }
  });
}

namespace {

// Fetches what a step will read.
void prefetch(const GraphImpl& graph, size_t step) {
  if (step >= graph.steps.size()) return;
  const GraphImpl::Step& next = graph.steps[step];
  const int* const first = graph.arguments.data() + next.first_argument;
  for (int i = 0; i < next.num_inputs + next.num_outputs; ++i) {
    const auto value = static_cast<size_t>(first[i]);
    const auto* const tensor = reinterpret_cast<const char*>(&graph.tensors[value]);
    __builtin_prefetch(tensor);
    __builtin_prefetch(tensor + sizeof(Tensor) - 1);
    __builtin_prefetch(graph.weights[value]);
  }
}

// Tells the context the wish of the first step from `step` on that has one; returns that step.
size_t read_ahead(const GraphImpl& graph, size_t step, Context& context) {
  while (step < graph.steps.size() && !graph.steps[step].read_ahead) ++step;
  if (step < graph.steps.size()) graph.steps[step].read_ahead(context, graph.tensors_of(step));
  return step;
}

// All of them in order; `at` is the one that runs.
Status run_steps(const GraphImpl& graph, Context& context, NodeListener* listener, size_t& at) {
  NodeListener::Clock::time_point begin;
  if (listener != nullptr) begin = NodeListener::Clock::now();
  size_t announced = 0;
  for (at = 0; at < graph.steps.size(); ++at) {
    const std::string& node = graph.nodes[at].name;
    prefetch(graph, at + 1);
    if (announced <= at) announced = read_ahead(graph, at + 1, context);
    Status ran = graph.steps[at].run(context, graph.tensors_of(at));
    if (!ran.ok()) {
      if (ran.code() == StatusCode::out_of_memory) return ran;
      return {ran.code(), text("graph ", graph.name, ": ", node, ": ", ran.message())};
    }
    if (listener == nullptr) continue;
    const NodeListener::Clock::time_point end = NodeListener::Clock::now();
    listener->on_node(graph.nodes[at].op, node, begin, end);
    if (listener->stop()) return {StatusCode::internal, "graph " + graph.name + ": interrupted by its listener"};
    begin = NodeListener::Clock::now();
  }
  return {};
}

// What `body` returns; an error of a graph that failed, or that is used by a node that it runs.
template <class Body>
Status using_graph(const GraphImpl& graph, const char* what, Body&& body) noexcept {
  return guarded([&]() -> Status {
    if (!graph.status.ok()) return graph.status;
    return graph.executing ? graph.error(what, " by a node that it runs") : body();
  });
}

}  // namespace

Status Graph::setup(const Machine& machine) {
  return using_graph(*impl_, "set up", [&]() -> Status {
    if (Status status = impl_->lay_out(); !status.ok()) return status;
    impl_->machine = machine;
    impl_->ready = true;
    return {};
  });
}

Status Graph::bind(Value value, const Tensor& tensor) {
  return using_graph(*impl_, "bound", [&]() -> Status {
    if (!impl_->has(value)) return impl_->error("what is bound to a tensor is no value of this graph");
    ValueData& data = impl_->at(value);
    const auto refuse = [&](const auto&... why) { return impl_->error("tensor ", quoted(data.name), why...); };
    if (data.kind < Kind::input) return refuse(" is not one that is bound to a tensor");
    if (tensor.dtype != data.dtype) {
      return refuse(" is ", to_string(tensor.dtype), ", expected ", to_string(data.dtype));
    }
    if (tensor.rank != data.shape.rank) {
      return refuse(" has ", tensor.rank, " dimensions, expected ", impl_->text(data.shape));
    }
    for (int i = 0; i < tensor.rank; ++i) {
      const Dim& dim = data.shape.dims[i];
      if (!GraphImpl::has_name(dim) && tensor.shape[i] != dim.bound()) {
        return refuse(" dim ", i, " is ", tensor.shape[i], ", expected ", dim.bound());
      }
    }
    data.bound = tensor;
    data.is_bound = true;
    impl_->refresh(GraphImpl::index(value));
    return {};
  });
}

Status Graph::bind(Value value, const ConstTensor& tensor) {
  return using_graph(*impl_, "bound", [&]() -> Status {
    if (impl_->has(value) && impl_->at(value).kind > Kind::input) {
      return impl_->error("tensor ", quoted(impl_->at(value).name), " is written, but bound to a const tensor");
    }
    return bind(value, mutable_view(tensor));  // nodes only read inputs
  });
}

Status Graph::bind(Value value, const PackedWeight& weight) {
  return using_graph(*impl_, "bound", [&]() -> Status {
    if (!impl_->has(value)) return impl_->error("what is bound to a weight is no value of this graph");
    ValueData& data = impl_->at(value);
    if (data.kind != Kind::weight) return impl_->error("tensor ", quoted(data.name), " is not a packed weight");
    const int64_t sizes[] = {weight.count(), weight.n(), weight.k()};
    const char* const names[] = {"count", "n", "k"};
    const int first = 3 - data.shape.rank;  // of one matrix there is no count
    if (first > 0 && weight.count() != 1) {
      return impl_->error("weight ", quoted(data.name), " is a stack of ", weight.count(), ", expected one matrix");
    }
    for (int i = first; i < 3; ++i) {
      if (const int64_t expected = data.shape.dims[i - first].bound(); sizes[i] != expected) {
        return impl_->error("weight ", quoted(data.name), " dim ", i - first, " (", names[i], ") is ", sizes[i],
                            ", expected ", expected);
      }
    }
    impl_->weights[GraphImpl::index(value)] = &weight;
    data.is_bound = true;
    impl_->refresh(GraphImpl::index(value));
    return {};
  });
}

Status Graph::set(Dim dim, int64_t size) {
  return using_graph(*impl_, "given a size", [&]() -> Status {
    if (!GraphImpl::has_name(dim)) return impl_->error("size ", dim.bound(), " has no name to be set by");
    if (!impl_->has(dim)) return impl_->error("the size to set is one of another graph");
    GraphImpl::Symbol& symbol = impl_->symbol(dim);
    if (size < 1 || size > symbol.bound) {
      return impl_->error("size ", quoted(symbol.name), " is ", size, ", expected 1 to ", symbol.bound);
    }
    if (size == symbol.size) return {};
    symbol.size = size;
    for (const size_t value : symbol.values) impl_->refresh(value);
    return {};
  });
}

Status Graph::execute(Context& context, NodeListener* listener) {
  return using_graph(*impl_, "executed", [&]() -> Status {
    if (!impl_->ready) return impl_->error("executed without a setup");
    for (size_t i = 0; impl_->num_unfit > 0 && i < impl_->values.size(); ++i) {
      if (!impl_->values[i].fits) return impl_->error(impl_->unfit_reason(i));
    }
    impl_->executing = true;
    Status ran;
    size_t at = 0;
    try {
      ran = run_steps(*impl_, context, listener, at);
    } catch (...) {
      ran = impl_->thrown_by(at);
    }
    impl_->executing = false;
    return ran;
  });
}

}  // namespace opst

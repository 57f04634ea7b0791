// Setting up, binding, setting sizes, executing.
#include "core/elements.h"
#include "graph/graph_impl.h"

namespace opst {

using graph::quoted;
using graph::str;
using Kind = GraphImpl::Kind;
using ValueData = GraphImpl::ValueData;

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

Status GraphImpl::run_steps(Context& context, NodeListener* listener, size_t& at) {
  NodeListener::Clock::time_point begin;
  if (listener != nullptr) begin = NodeListener::Clock::now();
  size_t announced = 0;
  for (at = 0; at < steps.size(); ++at) {
    prefetch(at + 1);
    if (announced <= at) announced = read_ahead(at + 1, context);
    Status ran = steps[at].run(context, tensors_of(static_cast<int>(at)));
    if (!ran.ok()) {
      if (ran.code() == StatusCode::out_of_memory) return ran;
      return {ran.code(), "graph " + name + ": " + nodes[at].spec.name + ": " + ran.message()};
    }
    if (listener == nullptr) continue;
    const NodeListener::Clock::time_point end = NodeListener::Clock::now();
    listener->on_node(nodes[at].spec.op, nodes[at].spec.name, begin, end);
    if (listener->stop()) return {StatusCode::internal, "graph " + name + ": interrupted by its listener"};
    begin = NodeListener::Clock::now();
  }
  return {};
}

Status GraphImpl::thrown_by(size_t node) const noexcept {
  return guarded([&]() -> Status {
    const std::string where = "graph " + name + ": " + nodes[node].spec.name + ": threw ";
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

Status GraphImpl::may_change(const char* what) const {
  if (!status.ok()) return status;
  return executing ? error(std::string(what) + " by a node that it runs") : Status();
}

namespace {

class Executing {
 public:
  explicit Executing(GraphImpl& graph) : graph_(graph) { graph_.executing = true; }
  ~Executing() { graph_.executing = false; }
  Executing(const Executing&) = delete;
  Executing& operator=(const Executing&) = delete;

 private:
  GraphImpl& graph_;
};

}  // namespace

Status Graph::setup(const Machine& machine) {
  return guarded([&]() -> Status {
    if (Status status = impl_->may_change("set up"); !status.ok()) return status;
    if (Status status = impl_->lay_out(); !status.ok()) return status;
    impl_->machine = machine;
    impl_->ready = true;
    return {};
  });
}

Status Graph::bind(Value value, const Tensor& tensor) {
  return guarded([&]() -> Status {
    if (Status status = impl_->may_change("bound"); !status.ok()) return status;
    if (!impl_->has(value)) return impl_->error("what is bound to a tensor is no value of this graph");
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
  return guarded([&]() -> Status {
    if (Status status = impl_->may_change("bound"); !status.ok()) return status;
    if (impl_->has(value) && (impl_->at(value).kind == Kind::output || impl_->at(value).kind == Kind::cache)) {
      return impl_->error("tensor " + quoted(impl_->at(value).name) + " is written, but bound to a const tensor");
    }
    return bind(value, mutable_view(tensor));  // nodes only read inputs
  });
}

Status Graph::bind(Value value, const PackedWeight& weight) {
  return guarded([&]() -> Status {
    if (Status status = impl_->may_change("bound"); !status.ok()) return status;
    if (!impl_->has(value)) return impl_->error("what is bound to a weight is no value of this graph");
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
  return guarded([&]() -> Status {
    if (Status status = impl_->may_change("given a size"); !status.ok()) return status;
    const int i = GraphImpl::symbol(dim);
    if (i < 0) return impl_->error("size " + str(dim.bound()) + " has no name to be set by");
    if (!impl_->has(dim)) return impl_->error("the size to set is one of another graph");
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
  return guarded([&]() -> Status {
    if (Status status = impl_->may_change("executed"); !status.ok()) return status;
    if (!impl_->ready) return impl_->error("executed without a setup");
    if (impl_->num_unfit > 0) {
      for (size_t i = 0; i < impl_->values.size(); ++i) {
        if (!impl_->values[i].fits) return impl_->error(impl_->unfit_reason(static_cast<int>(i)));
      }
    }
    const Executing scope(*impl_);
    size_t at = 0;
    try {
      return impl_->run_steps(context, listener, at);
    } catch (...) {
      return impl_->thrown_by(at);
    }
  });
}

}  // namespace opst

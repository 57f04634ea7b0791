// What a Graph is made of; see include/opst/graph.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <span>
#include <utility>

#include "core/guarded.h"
#include "core/int_math.h"
#include "core/text.h"
#include "opst/graph.h"

namespace opst {

namespace graph {

inline std::string quoted(std::string_view name) { return std::string("'").append(name) + "'"; }

// Row-major strides; a size < 0 counts as 1.
template <class T>
void make_contiguous(T& tensor) {
  int64_t stride = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    tensor.strides[i] = stride;
    stride *= std::max<int64_t>(tensor.shape[i], 1);
  }
}

// As which of NodeCost's bytes an input counts: a tensor's, a weight's, a packed weight's; or as none of them, where
// the node's own cost has what is read of it.
enum class Counted : uint8_t { tensor, weight, packed, not_all, not_all_packed };

// Needed from node `first` to node `last`, both included. 0 <= bytes, 0 <= first <= last.
struct Lifetime {
  int64_t bytes = 0;
  int first = 0, last = 0;
};

struct MemoryPlan {
  std::vector<int64_t> offsets;  // of each lifetime, multiples of kAlignment; -1: of none
  GraphMemory memory;
};

inline constexpr int64_t kAlignment = 64;  // a cache line, the widest vector

// Where the intermediates of a graph lie in one workspace: those that live at the same time do not overlap, the others
// share memory. The largest are placed first, each into the smallest gap that the lifetimes crossing its own leave.
// Sizes are rounded up to kAlignment. For any numbers: sums stop at kMaxBytes (where workspace_bytes is kMaxBytes the
// offsets mean nothing, and no memory has so many); a lifetime of negative bytes, or that ends before it begins or
// begins before node 0, is none: it has no place and counts nowhere.
MemoryPlan plan_memory(const std::vector<Lifetime>& lifetimes);

// From `input` on bound to tensors, of which inputs are only read.
enum class Kind : uint8_t { intermediate, view, weight, input, cache, output };

struct ValueData {
  std::string name;
  Kind kind = Kind::intermediate;
  DType dtype = DType::f32;
  Shape shape;
  size_t base = 0;  // of a view; else the value itself
  int depth = 0;    // views between it and what has memory of its own, itself counted
  int64_t first_column = 0;
  bool of_columns = false;         // a view of columns of its base's rows, from first_column on
  std::vector<size_t> views = {};  // of this value
  int64_t offset = -1;             // in the workspace
  Tensor bound = {};               // external tensors
  bool is_bound = false;
  bool fits = false;  // its tensor may be used
};

}  // namespace graph

using namespace graph;  // in the files of this room, which alone include this one

struct GraphImpl {
  struct Symbol {
    std::string name;
    int64_t bound = 0, size = 0;
    std::vector<size_t> values;  // that have this size in their shape
  };

  // A node is kept in two structs. An execution streams all weights through the caches, so that its own data comes from
  // memory each time: Step has what an execution reads, and lies close together; `nodes` has the rest.
  struct Step {
    std::function<Status(Context&, const NodeTensors&)> run;
    std::function<void(Context&, const NodeTensors&)> read_ahead;
    int first_argument = 0, num_inputs = 0, num_outputs = 0;
  };

  std::string name;
  static inline std::atomic<uint32_t> last_number{0};
  const uint32_t number = ++last_number;  // its id among all graphs of the process
  Status status;                          // of the first call that failed
  std::vector<Symbol> symbols;
  std::vector<ValueData> values;
  std::vector<NodeSpec> nodes;               // without `run` and `read_ahead`
  std::vector<Step> steps;                   // of each node
  std::vector<int> arguments;                // of all steps: values, inputs before outputs
  std::vector<Tensor> tensors;               // of each value, at the sizes of the moment
  std::vector<const PackedWeight*> weights;  // of each value
  std::map<std::string, size_t, std::less<>> by_name;
  bool ready = false, executing = false;
  int num_unfit = 0;
  Machine machine;
  GraphMemory memory;
  Buffer workspace;

  // refresh() goes from a value to its views and to theirs.
  static constexpr int kMostViewsOfViews = 64;

  // A message behind the graph's name.
  template <class... Parts>
  Status error(const Parts&... parts) const {
    return Status::invalid_argument(opst::text("graph ", name, ": ", parts...));
  }
  // What a call that fails gives: the default of its type.
  struct Nothing {
    template <class T>
    operator T() const {
      return T();
    }
  };
  // Keeps the first.
  template <class... Parts>
  Nothing fail(const Parts&... parts) {
    if (status.ok()) status = error(parts...);
    return {};
  }
  // What a function of a node is throwing, as a Status: exhausted memory, or with the names of graph and node.
  Status thrown_by(size_t node) const noexcept;

  static size_t index(Value value) { return static_cast<size_t>(value.index_); }
  Value value_at(size_t index) const { return {static_cast<int32_t>(index), number}; }
  static bool has_name(const Dim& dim) { return dim.symbol_ >= 0; }
  // Of a size that has a name of this graph.
  Symbol& symbol(const Dim& dim) { return symbols[static_cast<size_t>(dim.symbol_)]; }
  const Symbol& symbol(const Dim& dim) const { return symbols[static_cast<size_t>(dim.symbol_)]; }
  // A size as one number, which is < 0 for a name; and the size of this graph that has the number.
  static int64_t number_of(const Dim& dim) { return has_name(dim) ? -1 - dim.symbol_ : dim.bound(); }
  Dim dim_of(int64_t size) const {
    if (size >= 0) return size;
    Dim dim;
    dim.symbol_ = static_cast<int32_t>(-1 - size);
    dim.bound_ = symbol(dim).bound;
    dim.graph_ = number;
    return dim;
  }
  NodeTensors tensors_of(size_t node) const {
    const Step& step = steps[node];
    NodeTensors t;
    t.graph_ = this;
    t.tensors_ = tensors.data();
    t.weights_ = weights.data();
    t.arguments_ = arguments.data() + step.first_argument;
    t.num_inputs_ = step.num_inputs;
    t.num_outputs_ = step.num_outputs;
    return t;
  }
  // The values that a node makes.
  std::span<const int> outputs_of(size_t node) const {
    return std::span(arguments).subspan(static_cast<size_t>(steps[node].first_argument + steps[node].num_inputs),
                                        static_cast<size_t>(steps[node].num_outputs));
  }
  // Bytes of inputs and outputs, each once. `counted`: of each input; null: all are tensors.
  static NodeCost count_bytes(const NodeTensors& t, const Counted* counted);

  bool has(Value value) const { return value.graph_ == number && value.index_ >= 0 && index(value) < values.size(); }
  // A fixed size, or a name of this graph.
  bool has(const Dim& dim) const {
    return !has_name(dim) || (dim.graph_ == number && dim.symbol_ < static_cast<int>(symbols.size()));
  }
  ValueData& at(Value value) { return values[index(value)]; }
  int64_t size_of(const Dim& dim) const { return has_name(dim) ? symbol(dim).size : dim.bound(); }

  // "576", "rows", "[rows, 576]", "f32 [rows, 576]"
  std::string text(const Dim& dim) const { return has_name(dim) ? symbol(dim).name : std::to_string(dim.bound()); }
  std::string text(const Shape& shape) const;
  std::string text(size_t value) const;
  std::string text(Value value) const { return text(index(value)); }

  // Checks name, dtype and shape; none after a failure.
  Value add_value(std::string value_name, Kind kind, DType dtype, const Shape& shape);
  // A node whose inputs are values of this graph, or none; its results.
  std::vector<Value> add_node(NodeSpec spec);
  // Takes back what was added after `before`.
  struct Counts {
    size_t symbols, values, nodes, arguments;
  };
  Counts counts() const { return {symbols.size(), values.size(), nodes.size(), arguments.size()}; }
  void roll_back(const Counts& before) noexcept;

  // The tensor of a value, and of its views, at the sizes of the moment.
  void refresh(size_t value) noexcept;
  void refresh_all() noexcept {
    for (size_t i = 0; i < values.size(); ++i) refresh(i);
  }
  // Of a value, at the bounds of its sizes.
  static int64_t most_bytes(DType dtype, const Shape& shape) {
    int64_t bytes = size_bytes(dtype);
    for (int i = 0; i < shape.rank; ++i) bytes *= shape.dims[i].bound();
    return bytes;
  }
  // Why a value does not fit.
  std::string unfit_reason(size_t value) const;
  // Which values share memory, and where they lie in the workspace.
  Status lay_out();
};

// Runs what builds a part of a graph, whole or not at all: what `body` had added before it failed or threw is taken
// back, the graph keeps the reason, and `body` gives its type's default.
template <class Body>
auto building(GraphImpl& graph, Body&& body) noexcept -> decltype(body()) {
  if (!graph.status.ok()) return decltype(body())();
  const GraphImpl::Counts before = graph.counts();
  graph.ready = false;
  try {
    if (graph.executing) graph.fail("something was added by a node that it runs");
    if (graph.status.ok()) {
      auto added = std::forward<Body>(body)();
      if (graph.status.ok()) return added;
    }
  } catch (...) {
    graph.status = status_of_exception();
  }
  graph.roll_back(before);
  return decltype(body())();
}

}  // namespace opst

// What a Graph is made of; see include/opst/graph.h.
#pragma once

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <utility>

#include "core/guarded.h"
#include "core/int_math.h"
#include "graph/memory_plan.h"
#include "opst/graph.h"

namespace opst {

namespace graph {
inline std::string str(int64_t number) { return std::to_string(number); }
inline std::string quoted(std::string_view name) { return std::string("'").append(name) + "'"; }
// Bytes of all elements; of a tensor of a graph, whose shape has been checked.
inline int64_t bytes_of(const Tensor& tensor) { return tensor.num_elements() * size_bytes(tensor.dtype); }
// Row-major strides; a size < 0 counts as 1.
template <class T>
void make_contiguous(T& tensor) {
  int64_t stride = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    tensor.strides[i] = stride;
    stride *= std::max<int64_t>(tensor.shape[i], 1);
  }
}

// As which of NodeCost's bytes an input counts: a tensor's, a weight's, a packed weight's; or as none of them, since the
// node's own cost has what is read of it.
enum class Counted : uint8_t { tensor, weight, packed, not_all, not_all_packed };
inline bool is_packed(Counted counted) { return counted == Counted::packed || counted == Counted::not_all_packed; }
// Bytes of inputs and outputs, each once. `counted`: of each input; null: all are tensors.
NodeCost count_bytes(const NodeTensors& t, int num_inputs, int num_outputs, const Counted* counted);
}  // namespace graph

struct GraphImpl {
  enum class Kind : uint8_t { intermediate, view, input, cache, output, weight };

  // Lets a name be looked up as it is, without a string of its own.
  struct NameHash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };

  struct Symbol {
    std::string name;
    int64_t bound = 0;
    int64_t size = 0;
    std::vector<int> values;  // that have this size in their shape
  };

  struct ValueData {
    std::string name;
    Kind kind = Kind::intermediate;
    DType dtype = DType::f32;
    Shape shape;
    int base = -1;  // of a view
    int depth = 0;  // views between it and what has memory of its own, itself counted
    int64_t first_column = 0;
    bool of_columns = false;  // a view of columns of its base's rows, from first_column on
    std::vector<int> views;   // of this value
    int producer = -1;        // node
    int64_t offset = -1;      // in the workspace
    Tensor bound;             // external tensors
    bool is_bound = false;
    bool fits = false;  // its tensor may be used
  };

  // A node is kept in two structs. An execution streams all weights through the caches, so that its own data comes from
  // memory each time: Step has what an execution reads, and lies close together; Node has the rest.
  struct Node {
    NodeSpec spec;  // without `run` and `read_ahead`
    std::vector<int> outputs;
  };
  struct Step {
    std::function<Status(Context&, const NodeTensors&)> run;
    std::function<void(Context&, const NodeTensors&)> read_ahead;
    int first_argument = 0;
    int num_inputs = 0;
    int num_outputs = 0;
  };

  std::string name;
  const uint32_t number = next_number();  // its id among all graphs of the process
  Status status;                          // of the first call that failed
  std::vector<Symbol> symbols;
  std::vector<ValueData> values;
  std::vector<Node> nodes;
  std::vector<Step> steps;                   // of each node
  std::vector<int> arguments;                // of all steps: values, inputs before outputs
  std::vector<Tensor> tensors;               // of each value, at the sizes of the moment
  std::vector<const PackedWeight*> weights;  // of each value
  std::unordered_map<std::string, int, NameHash, std::equal_to<>> by_name;
  bool ready = false;
  bool executing = false;
  int num_unfit = 0;
  Machine machine;
  GraphMemory memory;
  Buffer workspace;

  // refresh() goes from a value to its views and to theirs.
  static constexpr int kMostViewsOfViews = 64;

  // Message behind the graph's name.
  Status error(const std::string& message) const { return Status::invalid_argument("graph " + name + ": " + message); }
  // Keeps the first.
  void fail(const std::string& message) {
    if (status.ok()) status = error(message);
  }

  static uint32_t next_number();
  static int index(Value value) { return value.index_; }
  Value value_at(int index) const { return {index, number}; }
  static int symbol(const Dim& dim) { return dim.symbol_; }
  // A size as one number, which is < 0 for a name; and the size of this graph that has the number.
  static int64_t number_of(const Dim& dim) { return dim.symbol_ < 0 ? dim.bound() : -1 - dim.symbol_; }
  Dim dim_of(int64_t size) const {
    return size >= 0 ? Dim(size) : symbolic(static_cast<int>(-1 - size), symbols[static_cast<size_t>(-1 - size)].bound);
  }
  Dim symbolic(int symbol, int64_t bound) const {
    Dim dim(bound);
    dim.symbol_ = symbol;
    dim.graph_ = number;
    return dim;
  }
  NodeTensors tensors_of(int node) const {
    const Step& step = steps[static_cast<size_t>(node)];
    NodeTensors t;
    t.graph_ = this;
    t.tensors_ = tensors.data();
    t.weights_ = weights.data();
    t.arguments_ = arguments.data() + step.first_argument;
    t.num_inputs_ = step.num_inputs;
    t.num_outputs_ = step.num_outputs;
    return t;
  }
  // What a function of a node is throwing, as a Status: exhausted memory, or with the names of graph and node.
  Status thrown_by(size_t node) const noexcept;
  // Fetches what the next step will read.
  void prefetch(size_t step) const;
  // All of them in order; `at` is the one that runs.
  Status run_steps(Context& context, NodeListener* listener, size_t& at);
  // The error of a graph that failed, or that is used by a node that it runs; else ok.
  Status may_change(const char* what) const;
  // Tells the context the wish of the first step from `step` on that has one; returns that step.
  size_t read_ahead(size_t step, Context& context) const;

  bool has(Value value) const {
    return value.graph_ == number && value.index_ >= 0 && value.index_ < static_cast<int>(values.size());
  }
  // A fixed size, or a name of this graph.
  bool has(const Dim& dim) const {
    return dim.symbol_ < 0 || (dim.graph_ == number && dim.symbol_ < static_cast<int>(symbols.size()));
  }
  const ValueData& at(Value value) const { return values[static_cast<size_t>(value.index_)]; }
  int64_t size_of(const Dim& dim) const {
    return dim.symbol_ < 0 ? dim.bound() : symbols[static_cast<size_t>(dim.symbol_)].size;
  }
  static bool is_external(Kind kind) { return kind >= Kind::input; }

  // "576", "rows", "[rows, 576]", "f32 [rows, 576]"
  std::string text(const Dim& dim) const;
  std::string text(const Shape& shape) const;
  std::string text(int value) const;
  std::string text(Value value) const { return text(value.index_); }

  // Whether dtype and shape are those of a tensor of this graph.
  bool check_shape(const std::string& value_name, DType dtype, const Shape& shape);
  // Checks name, dtype and shape; -1 after a failure.
  int add_value(std::string value_name, Kind kind, DType dtype, const Shape& shape);
  // A node whose inputs are values of this graph, or none; its results.
  std::vector<Value> add_node(NodeSpec spec);
  // Takes back what was added after `before`.
  struct Counts {
    size_t symbols, values, nodes, arguments;
  };
  Counts counts() const { return {symbols.size(), values.size(), nodes.size(), arguments.size()}; }
  void roll_back(const Counts& before) noexcept;

  // The tensor of a value, and of its views, at the sizes of the moment.
  void refresh(int value) noexcept;
  void refresh_all() noexcept {
    for (size_t i = 0; i < values.size(); ++i) refresh(static_cast<int>(i));
  }
  // Of a value, at the bounds of its sizes.
  static int64_t most_bytes(DType dtype, const Shape& shape) {
    int64_t bytes = size_bytes(dtype);
    for (int i = 0; i < shape.rank; ++i) bytes *= shape.dims[i].bound();
    return bytes;
  }
  // Why a value does not fit.
  std::string unfit_reason(int value) const;
  // The value whose memory this one is.
  int storage(int value) const;
  Status lay_out();
};

// Runs what builds a part of a graph, whole or not at all: what `body` had added before it failed or threw is taken
// back, the graph keeps the reason, and `body` gives its type's default.
template <class Body>
auto building(GraphImpl& graph, Body&& body) noexcept -> decltype(body()) {
  if (!graph.status.ok()) return decltype(body())();
  const GraphImpl::Counts before = graph.counts();
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

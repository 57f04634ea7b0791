// What a Graph is made of; see include/opst/graph.h.
#pragma once

#include <new>
#include <unordered_map>
#include <utility>

#include "graph/memory_plan.h"
#include "opst/graph.h"

namespace opst {

struct GraphImpl {
  enum class Kind : uint8_t { intermediate, view, input, cache, output, weight };

  struct Symbol {
    std::string name;
    int64_t bound = 0;
    int64_t size = 0;
    std::vector<int> values;  // that have it in their shape
  };

  struct ValueData {
    std::string name;
    Kind kind = Kind::intermediate;
    DType dtype = DType::f32;
    Shape shape;
    int base = -1;  // of a view
    int64_t first_column = 0;
    bool of_columns = false;  // a view of columns of its base's rows, from first_column on
    std::vector<int> views;   // of this value
    int producer = -1;        // node
    int64_t offset = -1;      // in the workspace
    Tensor bound;             // external tensors
    bool is_bound = false;
    bool fits = false;  // its tensor may be used
  };

  // What an execution does not need. An execution streams all weights through the caches, so that whatever it reads
  // itself comes from memory: that lies close together, below.
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
  Status status;  // the first contradiction
  std::vector<Symbol> symbols;
  std::vector<ValueData> values;
  std::vector<Node> nodes;
  std::vector<Step> steps;                   // of each node
  std::vector<int> arguments;                // of all steps: values, inputs before outputs
  std::vector<Tensor> tensors;               // of each value, at the sizes of the moment
  std::vector<const PackedWeight*> weights;  // of each value
  std::unordered_map<std::string, int> by_name;
  bool ready = false;
  int num_unfit = 0;
  Machine machine;
  graph::MemoryPlan memory;
  Buffer workspace;

  static constexpr int64_t kMostBytes = int64_t{1} << 62;

  // Message behind the graph's name.
  Status error(const std::string& message) const { return Status::invalid_argument("graph " + name + ": " + message); }
  // Keeps the first.
  void fail(const std::string& message) {
    if (status.ok()) status = error(message);
  }

  static int index(Value value) { return value.index_; }
  static Value value_at(int index) { return Value(index); }
  static int symbol(const Dim& dim) { return dim.symbol_; }
  static Dim symbolic(int symbol, int64_t bound) {
    Dim dim(bound);
    dim.symbol_ = symbol;
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
    return t;
  }
  // Fetches what the next step will read.
  void prefetch(size_t step) const;
  // Tells the context the wish of the first step from `step` on that has one; returns that step.
  size_t read_ahead(size_t step, Context& context) const;

  bool has(Value value) const { return value.index_ >= 0 && value.index_ < static_cast<int>(values.size()); }
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

  // Checks name and shape; -1 after a failure.
  int add_value(std::string value_name, Kind kind, DType dtype, const Shape& shape);
  // The tensor of a value, and of its views, at the sizes of the moment.
  void refresh(int value);
  // Why a value does not fit.
  std::string unfit_reason(int value) const;
  // The value whose memory this one is.
  int storage(int value) const;
  Status lay_out();
};

// Runs what builds a part of a graph: exhausted memory becomes the graph's status and `body` gives its type's default.
template <class Body>
auto building(GraphImpl& graph, Body&& body) noexcept -> decltype(body()) {
  try {
    return std::forward<Body>(body)();
  } catch (const std::bad_alloc&) {
    graph.status = Status::out_of_memory();
    return decltype(body())();
  }
}

template <class Body>
Status running(Body&& body) noexcept {
  try {
    return std::forward<Body>(body)();
  } catch (const std::bad_alloc&) {
    return Status::out_of_memory();
  }
}

}  // namespace opst

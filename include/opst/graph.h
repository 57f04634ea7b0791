// Graph: operators as nodes with named tensors, planned once, executed often.
//
//   Graph graph = std::move(Graph::create("ffn").value());
//   const Dim rows = graph.dim("rows", 512);                          // any number of rows up to 512
//   const Value x = graph.input("x", DType::f32, {rows, 576});
//   const Value normed = graph.rms_norm("norm", x, graph.input("norm.weight", DType::f32, {576}));
//   const Value gate = graph.matmul("gate", normed, graph.weight("gate.weight", 1536, 576));
//   const Value up = graph.matmul("up", normed, graph.weight("up.weight", 1536, 576));
//   graph.output("y", graph.swiglu("act", gate, up));
//   Status status = graph.setup(context.machine());                   // checks, lays out the workspace
//   status = graph.bind("x", x_tensor); ...                           // inputs, weights, outputs, by name
//   status = graph.set(rows, 17);
//   status = graph.execute(context);                                  // allocates nothing
//
// Building. Each call that adds something names it and gives the Value or Dim for later calls; the shapes of results
// follow from those of the inputs. A call adds all that it should or nothing. The first one that fails (a
// contradiction, exhausted memory, a Value or Dim of another graph) marks the graph as failed: later calls add nothing,
// and setup(), bind(), set() and execute() return its Status. Nodes run in the order in which they were added.
//
// Memory. Results of nodes share one workspace of the graph. Inputs, weights, caches and outputs are external: bound by
// name, and bound anew whenever the caller likes. What is bound must outlive its executions.
//
// Sizes. A Dim is a fixed size, or a name with an upper bound whose size is set before an execution. setup() lays out
// memory for the upper bounds; a new size needs no new setup. Tensors of the workspace are contiguous at their size of
// the moment. An external tensor may be larger than a named size: its first elements are used.
//
// Errors: invalid_argument, naming graph, node, tensor, dimension and both values; those of the operators, behind the
// names of graph and node; internal, with the node's name, where a function of a node or a listener throws;
// out_of_memory.
//
// Threads. A Graph is used by one thread at a time, and not by the nodes that it runs; const methods may run at once,
// if the `cost` and `plan` of its nodes may. Different graphs are independent, also where they share weights, inputs
// and a Context (context.h says what that does); caches and outputs are written. Functions of nodes, and a
// NodeListener, are called by the thread that called the graph; NodeTensors ends with the function that it is given to.
// The other structs and classes are plain values.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "opst/attention.h"
#include "opst/context.h"
#include "opst/kv_cache.h"
#include "opst/matmul.h"
#include "opst/moe.h"
#include "opst/rowwise.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst {

struct GraphImpl;

class Dim {
 public:
  Dim() = default;
  Dim(int64_t size) : bound_(size) {}
  // The fixed size, or the largest that the named one may become.
  int64_t bound() const { return bound_; }
  bool operator==(const Dim&) const = default;

 private:
  friend struct GraphImpl;
  int64_t bound_ = 0;
  int32_t symbol_ = -1;  // index of the name; -1: a fixed size
  uint32_t graph_ = 0;   // id of the graph that has the name
};

struct Shape {
  Shape() = default;
  // More than kMaxRank dimensions are refused where the shape is used.
  Shape(std::initializer_list<Dim> sizes);
  // That of a tensor, which may have no data: Shape(key_pages(layout, dtype, sizes, nullptr)).
  explicit Shape(const ConstTensor& tensor);
  int rank = 0;
  Dim dims[kMaxRank] = {};
  bool operator==(const Shape&) const = default;
};

// A tensor or weight of a graph. Default: none.
class Value {
 public:
  Value() = default;
  bool exists() const { return index_ >= 0; }
  bool operator==(const Value&) const = default;

 private:
  friend struct GraphImpl;
  Value(int32_t index, uint32_t graph) : index_(index), graph_(graph) {}
  int32_t index_ = -1;
  uint32_t graph_ = 0;  // id of the graph that has the value
};

// What a node costs at the sizes of the moment. Bytes stop at 2^56.
struct NodeCost {
  double flops = 0;          // 2 per multiply-add of matrix products and attention; others count 0
  int64_t weight_bytes = 0;  // weights read
  int64_t cache_bytes = 0;   // cached keys and values read or written
  int64_t tensor_bytes = 0;  // other inputs and outputs, each once
  NodeCost& operator+=(const NodeCost& other);
};

// The tensors of a node that runs, in the order of its NodeSpec, at the sizes of the moment. An index that the node
// does not have gives a tensor of rank 0 without data; one that is no weight, a weight [0, 0].
class NodeTensors {
 public:
  const Tensor& input(int i) const { return has(i, num_inputs_) ? tensors_[arguments_[i]] : kNone; }
  const PackedWeight& weight(int i) const { return has(i, num_inputs_) ? *weights_[arguments_[i]] : kNoWeight; }
  const Tensor& output(int i) const { return has(i, num_outputs_) ? tensors_[arguments_[num_inputs_ + i]] : kNone; }
  // -1 for a Dim of another graph.
  int64_t size(Dim dim) const;

 private:
  friend struct GraphImpl;
  NodeTensors() = default;
  static bool has(int i, int count) { return static_cast<unsigned>(i) < static_cast<unsigned>(count); }
  static constinit inline const Tensor kNone = {};
  static constinit inline const PackedWeight kNoWeight = {};  // also a weight that is not bound
  const GraphImpl* graph_ = nullptr;
  const Tensor* tensors_ = nullptr;               // of all values
  const PackedWeight* const* weights_ = nullptr;  // of all values
  const int* arguments_ = nullptr;                // inputs, then outputs
  int num_inputs_ = 0, num_outputs_ = 0;
};

// Any operator as a node; the methods of Graph below are made of this.
struct NodeSpec {
  struct Output {
    std::string name;
    DType dtype = DType::f32;
    Shape shape;
  };
  struct InPlace {
    int input = 0, output = 0;  // `output` may be written onto `input`
  };
  std::string name;
  const char* op = "";               // kept as a pointer, not null
  std::vector<Value> inputs = {};    // read; caches may be written as well
  std::vector<Output> outputs = {};  // written, every element
  std::vector<InPlace> in_place = {};
  std::function<Status(Context&, const NodeTensors&)> run;  // must not allocate
  // Called some nodes earlier: a wish for what `run` will read first, see read_ahead in matmul.h.
  std::function<void(Context&, const NodeTensors&)> read_ahead = {};
  // These two may meet tensors without data and weights [0, 0]: nothing needs to be bound. `plan` gives one line.
  std::function<NodeCost(const NodeTensors&)> cost = {};  // default: tensor_bytes alone
  std::function<std::string(const Machine&, const NodeTensors&)> plan = {};
};

// A product with what follows it (see MatmulOptions).
struct MatmulNodeOptions {
  Value bias = {};  // [n]
  Activation activation = Activation::none;
  Value residual = {};       // as the result
  DType dtype = DType::f32;  // of the result: f32, bf16 or f16
  ActivationType activations = ActivationType::exact;
};

struct MoeLayerNodeOptions {
  int64_t top_k = 1;  // experts of each token
  MoeGatingOptions gating = {};
  ActivationType activations = ActivationType::exact;
};

struct LayerNormNodeOptions {
  double eps = 1e-5;
  Value weight = {}, bias = {};  // [features], where they are
};

struct NodeInfo {
  std::string name;
  const char* op = "";
  std::vector<std::string> inputs, outputs;  // "norm f32 [rows, 576]"
  std::vector<int64_t> offsets;              // of the outputs in the workspace; -1: external
  std::string plan;
  NodeCost cost;
};

struct GraphMemory {
  int64_t workspace_bytes = 0;
  int64_t sum_bytes = 0;        // of all intermediates, if none shared memory
  int64_t peak_live_bytes = 0;  // most that is needed at one node
};

// Is told about every node that ran.
class NodeListener {
 public:
  using Clock = std::chrono::steady_clock;
  virtual ~NodeListener() = default;
  virtual void on_node(const char* op, const std::string& name, Clock::time_point begin, Clock::time_point end) = 0;
  // Asked after each node's on_node; true ends the execution with an error. What has run is not undone.
  virtual bool stop() { return false; }
};

// Scales (and offsets) of a cache of integers, of the shapes that kv_cache.h gives them. Nodes that write pages write these
// too: they are caches then. Of caches of floats all are absent.
struct ScaleValues {
  Value key = {}, value = {}, key_offsets = {}, value_offsets = {};
};

class Graph {
 public:
  static Result<Graph> create(std::string name);
  ~Graph();
  Graph(Graph&&) noexcept;
  Graph& operator=(Graph&&) noexcept;

  // --- Building

  // A size with a name, 1 to `bound`; at first it is `bound`.
  Dim dim(std::string name, int64_t bound);
  // External tensors: read, or (caches) read and written in place.
  Value input(std::string name, DType dtype, const Shape& shape);
  Value cache(std::string name, DType dtype, const Shape& shape);
  // A packed weight [n, k].
  Value weight(std::string name, int64_t n, int64_t k);
  // A stack of them, [count, n, k].
  Value weight_stack(std::string name, int64_t count, int64_t n, int64_t k);
  // The first elements of a contiguous tensor in another shape.
  Value view(Value base, const Shape& shape);
  // Columns [first, first + the product of shape's other dimensions) of each row of a contiguous tensor [rows, n]: what
  // several weights, stacked into one, have made of the same x. Views of it are refused.
  Value columns(Value base, int64_t first, const Shape& shape);
  // The result of a node becomes external, under a name of its own.
  void output(std::string name, Value value);

  // Operators: see their headers for what they compute. `name` is the node's and its result's.
  //   x [rows, k], weight [n, k] -> [rows, n] (swiglu: [rows, n / 2])
  Value matmul(std::string name, Value x, Value weight, const MatmulNodeOptions& options = {});
  // A mixture of experts, each with a feed-forward of its own: the top_k experts that moe_gating (moe.h) chooses,
  //   residual + sum over them of weight * (down[e] . (silu(gate[e] . x) * (up[e] . x)))
  //   x, residual [tokens, width] f32, router_logits [tokens, num_experts] f32; stacks: gate_up [num_experts,
  //   2 ffn_size, width], the rows of up below those of gate, down [num_experts, width, ffn_size] -> as x
  struct MoeLayer {
    Value x, router_logits, gate_up, down;
    Value residual = {};
  };
  Value moe_layer(std::string name, const MoeLayer& layer, const MoeLayerNodeOptions& options = {});
  //   weight [n, k], rows [count] i64 -> [count, k] f32
  Value lookup_rows(std::string name, Value weight, Value rows);
  //   x [.., features], weight [features] -> as x
  Value rms_norm(std::string name, Value x, Value weight, const RmsNormOptions& options = {});
  //   a, b as one another -> the norm of their sum and the sum, each as a
  struct NormedSum {
    Value out, sum;
  };
  NormedSum add_rms_norm(std::string name, Value a, Value b, Value weight, const RmsNormOptions& options = {});
  Value layer_norm(std::string name, Value x, const LayerNormNodeOptions& options = {});
  //   x [.., features] -> as x
  Value softmax(std::string name, Value x, const SoftmaxOptions& options = {});
  //   positions [tokens] i64 (with sections [3, tokens]) -> cos and sin, [tokens, half] f32 each
  struct RopeTable {
    Value cos, sin;
  };
  RopeTable rope_table(std::string name, Value positions, int64_t half, const RopeTableOptions& options = {});
  //   x [tokens, num_heads, head_dim] -> as x
  Value rope(std::string name, Value x, const RopeTable& table, const RopeOptions& options = {});
  //   the same, cache [max_positions, half]
  Value rope_cached(std::string name, Value x, Value positions, const RopeTable& cache,
                    const RopeCachedOptions& options = {});
  //   gate_up [.., 2n] -> [.., n]
  Value swiglu(std::string name, Value gate_up, const SwigluOptions& options);
  //   a, b -> as a
  Value swiglu(std::string name, Value gate, Value up);
  Value add(std::string name, Value a, Value b);
  //   key, value [tokens, num_kv_heads, head_dim], slots [tokens] i64,
  //   caches: pages in options.layout (kv_cache.h), written in place; options.scales stays absent
  void scatter_pa_kv_cache(std::string name, Value key, Value value, Value slots, Value key_cache, Value value_cache,
                           const ScatterOptions& options = {}, const ScaleValues& scales = {});
  //   the same with norms and rotation: query, key as they come from their projections -> the turned query, as query
  struct Step {
    Value query, key, value;
    RopeTable table;
    Value slots;
    Value query_weight = {}, key_weight = {};  // [head_dim] f32, where there are norms
  };
  Value rope_scatter_pa_kv_cache(std::string name, const Step& step, Value key_cache, Value value_cache,
                                 const RopeScatterOptions& options = {}, const ScaleValues& scales = {});
  // One sequence (several: paged_attention):
  //   query  [tokens, num_heads, head_dim] -> [tokens, num_heads, value_head_dim] of its dtype
  //   key    [kv_len, num_kv_heads, head_dim], value [kv_len, num_kv_heads, value_head_dim]
  Value attention(std::string name, Value query, Value key, Value value, const AttentionOptions& options = {});
  // The same over pages in options.page_layout, for `batch` sequences whose queries lie one after the other:
  //   block_table [batch, max_blocks], kv_lengths [batch], cu_seqlens_q [batch + 1] (see attention.h)    i64 or i32
  // Without cu_seqlens_q all have as many: batch is 1, or divides tokens, or is the same named size (one query each: a
  // step of decoding). Each is planned and counted with tokens / batch queries and kv_len keys, which should be the
  // largest that kv_lengths will hold. docs/graph.md has an example.
  struct Pages {
    Value block_table, kv_lengths;
    Dim kv_len;
    Value cu_seqlens_q = {};
    ScaleValues scales = {};
  };
  Value paged_attention(std::string name, Value query, Value key_cache, Value value_cache, const Pages& pages,
                        const AttentionOptions& options = {});

  // Any operator: gives the outputs, in order.
  std::vector<Value> node(NodeSpec spec);

  // What a value was declared or inferred to be; f32 [] of none.
  DType dtype(Value value) const;
  Shape shape(Value value) const;
  // The value of this name; none if there is none.
  Value find(std::string_view name) const;

  // --- Running

  // Reports the first contradiction of building, lays out the workspace and allocates it. Adding something asks for a
  // new setup; what was bound stays bound.
  Status setup(const Machine& machine);

  // Before or after setup. Rank, dtype and sizes without a name must agree; whether a tensor has room for named sizes
  // is seen when it is used. Inputs may be const. A Tensor is copied; a weight is not, and a temporary one does not
  // compile.
  Status bind(Value value, const Tensor& tensor);
  Status bind(Value value, const ConstTensor& tensor);
  Status bind(Value value, const PackedWeight& weight);
  Status bind(Value value, const PackedWeight&& weight) = delete;
  Status bind(std::string_view name, const PackedWeight&& weight) = delete;
  template <class T>
  Status bind(std::string_view name, const T& bound) {
    const Value value = find(name);
    return value.exists() ? bind(value, bound) : no_such_value(name);
  }
  Status set(Dim dim, int64_t size);

  Status execute(Context& context, NodeListener* listener = nullptr);

  // --- Explaining, at the sizes of the moment: of any graph, also of one that failed or is not set up or bound. Before
  // setup() there is no memory, offsets are -1 and plans are those of a default Machine.

  const std::string& name() const;
  int num_nodes() const;
  // 0 <= node < num_nodes(), else invalid_argument.
  Result<NodeInfo> describe(int node) const;
  Result<NodeCost> cost() const;  // of all nodes
  GraphMemory memory() const;

 private:
  explicit Graph(std::unique_ptr<GraphImpl> impl);
  Status no_such_value(std::string_view name) const;
  std::unique_ptr<GraphImpl> impl_;
};

// A table of the nodes: name, operator, result, place in the workspace, cost, plan; or why there is none.
std::string to_string(const Graph& graph);

}  // namespace opst

// What graphs refuse, and how they say it.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <stdexcept>

#include "graph/test_graphs.h"

namespace opst {
namespace {

std::string setup_message(const std::function<void(Graph&, Dim)>& build) {
  Graph graph = make_graph();
  const Dim rows = graph.dim("rows", 8);
  build(graph, rows);
  const Status status = graph.setup(Machine());
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  return status.message();
}

TEST(GraphContract, BuildingNamesNodeTensorDimensionAndBothValues) {
  EXPECT_EQ(setup_message([](Graph& g, Dim n) {
              g.columns(g.input("x", DType::f32, {n, 4}), 2, {n, 3});
            }),
            "graph test: columns 2 to 5 of x f32 [rows, 4] are not all there");
  EXPECT_EQ(setup_message([](Graph& g, Dim n) {
              g.columns(g.input("x", DType::f32, {n, 2, 2}), 0, {n, 2});
            }),
            "graph test: columns [rows, 2] of x f32 [rows, 2, 2] need rows in both");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.matmul("gate", g.input("x", DType::f32, {rows, 32}), g.weight("w", 48, 31));
            }),
            "graph test: gate (matmul): weight 'w' dim 1 (k) is 31, but x 'x' set k = 32");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.matmul("gate", g.input("x", DType::i32, {rows, 32}), g.weight("w", 48, 32));
            }),
            "graph test: gate (matmul): x 'x' is i32, but must be f32, bf16 or f16");
  EXPECT_EQ(setup_message(
                [](Graph& g, Dim rows) { g.matmul("gate", g.input("x", DType::f32, {rows}), g.weight("w", 48, 32)); }),
            "graph test: gate (matmul): x 'x' [rows] has rank 1, but [rows, k] has rank 2");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.matmul("gate", g.input("x", DType::f32, {rows, 32}), g.input("w", DType::f32, {48, 32}));
            }),
            "graph test: gate (matmul): weight 'w' is a tensor, expected a packed weight");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              const Value x = g.input("x", DType::f32, {rows, 32});
              g.add("sum", x, g.input("z", DType::f32, {8, 32}));
            }),
            "graph test: sum (add): b 'z' dim 0 (dim_0) is 8, but a 'x' set dim_0 = rows");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.rms_norm("norm", g.input("x", DType::f32, {rows, 32}), g.input("w", DType::f32, {31}));
            }),
            "graph test: norm (rms_norm): weight 'w' dim 0 (features) is 31, but x 'x' set features = 32");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              const Value kv = g.input("kv", DType::f32, {rows, 2, 8});
              g.attention("attend", g.input("q", DType::f32, {rows, 5, 8}), kv, kv);
            }),
            "graph test: attend (attention): query dim 1 (num_heads) is 5, not a multiple of num_kv_heads = 2");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              const Graph::RopeTable table = g.rope_table("t", g.input("p", DType::i64, {rows}), 5);
              g.rope("turn", g.input("x", DType::f32, {rows, 2, 8}), table);
            }),
            "graph test: turn (rope): cos dim 1 (half) is 5, more than half of head_dim = 8");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.rope_table("t", g.input("p", DType::i64, {2, rows}), 5, {.sections = {.temporal = 5}});
            }),
            "graph test: t (rope_table): positions 'p' dim 0 is 2, but must be 3");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.add_rms_norm("norm", g.input("a", DType::f32, {rows, 8}), g.input("b", DType::f32, {rows, 7}),
                             g.input("w", DType::f32, {8}));
            }),
            "graph test: norm (add_rms_norm): b 'b' dim 1 (features) is 7, but a 'a' set features = 8");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.layer_norm("norm", g.input("x", DType::f32, {rows, 8}), {.bias = g.input("b", DType::f32, {7})});
            }),
            "graph test: norm (layer_norm): bias 'b' dim 0 (features) is 7, but x 'x' set features = 8");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.swiglu("act", g.input("x", DType::f32, {8, rows}), SwigluOptions());
            }),
            "graph test: act (swiglu): gate_up's last dimension is rows, but must be an even number");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.matmul("product", g.input("x", DType::f32, {rows, 32}), g.weight("w", 48, 32),
                       {.activation = Activation::swiglu, .residual = g.input("r", DType::f32, {rows, 48})});
            }),
            "graph test: product (matmul): residual 'r' dim 1 (columns) is 48, but the result set columns = 24");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.matmul("product", g.input("x", DType::f32, {rows, 32}), g.weight("w", 48, 32),
                       {.bias = g.input("b", DType::f32, {32})});
            }),
            "graph test: product (matmul): bias 'b' dim 0 (n) is 32, but weight 'w' set n = 48");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              const Value k = g.input("k", DType::f32, {rows, 2, 8}), c = g.input("c", DType::f32, {1, 9, 2, 8});
              g.scatter_pa_kv_cache("write", k, k, g.input("s", DType::i64, {rows}), c, c);
            }),
            "graph test: write (scatter_pa_kv_cache): key_cache 'c' is written, but is no cache");
  const auto write_panels = [](DType dtype, const Shape& keys, const Shape& values) {
    return setup_message([&](Graph& g, Dim rows) {
      const Value k = g.input("k", DType::f32, {rows, 2, 8});
      g.scatter_pa_kv_cache("write", k, k, g.input("s", DType::i64, {rows}), g.cache("keys", dtype, keys),
                            g.cache("values", dtype, values), {.layout = PageLayout::panel32});
    });
  };
  EXPECT_EQ(write_panels(DType::f32, {3, 2, 2, 9, 32}, {3, 2, 64, 8}),
            "graph test: write (scatter_pa_kv_cache): key_cache 'keys' dim 3 (head_dim) is 9, but key 'k' set "
            "head_dim = 8");
  EXPECT_EQ(write_panels(DType::f32, {3, 2, 2, 8, 16}, {3, 2, 64, 8}),
            "graph test: write (scatter_pa_kv_cache): key_cache 'keys' dim 4 is 16, but must be 32");
  EXPECT_EQ(write_panels(DType::f32, {3, 2, 2, 8, 32}, {3, 2, 32, 8}),
            "graph test: write (scatter_pa_kv_cache): value_cache 'values' dim 2 (block_size) is 32, but key_cache "
            "'keys' set block_size = 64");
  EXPECT_EQ(write_panels(DType::bf16, {3, 2, 2, 3, 64}, {3, 2, 32, 16}),
            "graph test: write (scatter_pa_kv_cache): key_cache 'keys' holds head_dim = 6, but key 'k' set "
            "head_dim = 8");
  EXPECT_EQ(write_panels(DType::bf16, {3, 2, 2, 4, 64}, {3, 2, 32, 14}),
            "graph test: write (scatter_pa_kv_cache): value_cache 'values' holds value_head_dim = 7, but value 'k' set "
            "value_head_dim = 8");
  EXPECT_EQ(write_panels(DType::f16, {3, 2, 2, 8, 32}, {3, 2, 64, 8}),
            "graph test: write (scatter_pa_kv_cache): page layout panel32: dtype is f16, but must be f32 or bf16");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.input("x", DType::f32, {rows});
              g.input("x", DType::f32, {rows});
            }),
            "graph test: two tensors are named 'x'");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.view(g.input("x", DType::f32, {rows, 4}), {rows, 5});
            }),
            "graph test: view [rows, 5] of x f32 [rows, 4] has up to 160 bytes, but there are 128");
  EXPECT_EQ(setup_message([](Graph& g, Dim) { g.input("x", DType::f32, {-1}); }),
            "graph test: 'x' dim 0 is -1, must be >= 0");
  EXPECT_EQ(setup_message([](Graph& g, Dim) {
              g.input("x", DType::f32, {1 << 30, 1 << 30, 8});
            }),
            "graph test: 'x' dim 1 is 1073741824, too large: more than 2^56 bytes");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) { g.output("y", g.input("x", DType::f32, {rows})); }),
            "graph test: output 'y': 'x' is not the result of a node");
  EXPECT_EQ(setup_message([](Graph& g, Dim) { g.swiglu("act", Value(), Value()); }),
            "graph test: act (swiglu): gate is no tensor of this graph");
  EXPECT_EQ(setup_message([](Graph& g, Dim) { g.dim("n", 0); }), "graph test: size 'n' has the bound 0, must be >= 1");
  EXPECT_EQ(setup_message([](Graph& g, Dim) { g.node({.name = "mine", .op = "op", .run = {}}); }),
            "graph test: mine (op): nothing to run");
}

TEST(GraphContract, BindingAndRunningNameTensorDimensionAndBothValues) {
  FeedForward net;
  Graph graph = net.graph();
  std::vector<float> x(9 * net.kWidth), y(x.size());
  const auto message = [](const Status& status) { return status.message(); };
  EXPECT_EQ(message(graph.execute(net.context)), "graph test: executed without a setup");
  ASSERT_OK(graph.setup(net.context.machine()));
  EXPECT_EQ(message(graph.execute(net.context)), "graph test: tensor 'x' is not bound");
  EXPECT_EQ(message(graph.bind("z", view(x, {9, 32}))), "graph test: no tensor is named 'z'");
  EXPECT_EQ(message(graph.bind("x", view(x, {9, 31}))), "graph test: tensor 'x' dim 1 is 31, expected 32");
  EXPECT_EQ(message(graph.bind("x", view(x, {9}))), "graph test: tensor 'x' has 1 dimensions, expected [rows, 32]");
  EXPECT_EQ(message(graph.bind("x", Tensor::contiguous(DType::bf16, {9, 32}, x.data()))),
            "graph test: tensor 'x' is bf16, expected f32");
  EXPECT_EQ(message(graph.bind("y", ConstTensor(view(y, {9, 32})))),
            "graph test: tensor 'y' is written, but bound to a const tensor");
  EXPECT_EQ(message(graph.bind("gate.weight", view(x, {9, 32}))),
            "graph test: tensor 'gate.weight' is not one that is bound to a tensor");
  EXPECT_EQ(message(graph.bind("norm", view(x, {9, 32}))),
            "graph test: tensor 'norm' is not one that is bound to a tensor");
  const PackedWeight narrow = std::move(PackedWeight::pack(net.context, view(x, {9, 32})).value());
  EXPECT_EQ(message(graph.bind("gate.weight", narrow)), "graph test: weight 'gate.weight' dim 0 (n) is 9, expected 48");
  EXPECT_EQ(message(graph.bind("x", narrow)), "graph test: tensor 'x' is not a packed weight");
  EXPECT_EQ(message(graph.set(net.rows, 10)), "graph test: size 'rows' is 10, expected 1 to 9");
  EXPECT_EQ(message(graph.set(net.rows, 0)), "graph test: size 'rows' is 0, expected 1 to 9");
  EXPECT_EQ(message(graph.set(Dim(4), 4)), "graph test: size 4 has no name to be set by");
  ASSERT_OK(graph.bind("x", view(x, {3, 32})));
  ASSERT_OK(graph.bind("y", view(y, {9, 32})));
  EXPECT_EQ(message(graph.execute(net.context)), "graph test: tensor 'x' dim 0 is 3, but rows is 9");
  ASSERT_OK(graph.set(net.rows, 3));
  EXPECT_EQ(message(graph.execute(net.context)), "graph test: tensor 'norm.weight' is not bound");
  net.bind(graph);
  ASSERT_OK(graph.execute(net.context));
  // What an operator refuses comes with the node's name: here the output lies on the input.
  ASSERT_OK(graph.bind("y", view(x, {9, 32}).narrowed(0, 1, 8)));
  const Status overlap = graph.execute(net.context);
  EXPECT_EQ(overlap.code(), StatusCode::invalid_argument);
  EXPECT_EQ(overlap.message().rfind("graph test: sum: add: ", 0), 0u) << overlap.message();
}

TEST(GraphContract, AViewNeedsContiguousMemoryAndEnoughOfIt) {
  Context context = make_context();
  Graph graph = make_graph();
  const Dim n = graph.dim("n", 8), m = graph.dim("m", 8);
  const Value x = graph.input("x", DType::f32, {n, 2});
  graph.output("y", graph.add("sum", graph.view(x, {m, 2}), graph.view(x, {m, 2})));
  std::vector<float> data(64, 1.0f), y(16);
  ASSERT_OK(graph.bind("y", view(y, {8, 2})));
  ASSERT_OK(graph.bind("x", view(data, {8, 4}).narrowed(1, 0, 2)));
  ASSERT_OK(graph.setup(context.machine()));
  EXPECT_EQ(graph.execute(context).message(),
            "graph test: tensor 'x' is viewed in another shape, but is not contiguous");
  ASSERT_OK(graph.bind("x", view(data, {8, 2})));
  ASSERT_OK(graph.set(n, 3));
  EXPECT_EQ(graph.execute(context).message(), "graph test: tensor 'x' has 6 elements, but its view [m, 2] has 16");
  ASSERT_OK(graph.set(m, 3));
  ASSERT_OK(graph.execute(context));
  EXPECT_EQ(y[5], 2.0f);
}

// What a node would refuse of a tensor alone is refused before the first node has written anything.
TEST(GraphContract, UnsoundTensorsAreRefusedBeforeTheFirstNodeRuns) {
  Context context = make_context();
  Graph graph = make_graph();
  const Dim rows = graph.dim("rows", 4);
  const Value x = graph.input("x", DType::f32, {rows, 4});
  graph.output("y", graph.softmax("first", x));
  graph.output("z", graph.softmax("second", x));
  std::vector<float> x_data(16, 1.0f), y(16, -7.0f), z(16, -7.0f);
  ASSERT_OK(graph.bind("x", view(x_data, {4, 4})));
  ASSERT_OK(graph.bind("y", view(y, {4, 4})));
  ASSERT_OK(graph.setup(context.machine()));
  const auto refuses = [&](const char* name, const Tensor& tensor, const char* message) {
    ASSERT_OK(graph.bind(name, tensor));
    EXPECT_EQ(graph.execute(context).message(), message);
    EXPECT_EQ(y, std::vector<float>(y.size(), -7.0f));
    EXPECT_EQ(z, std::vector<float>(z.size(), -7.0f));
  };
  Tensor shared = view(z, {4, 4});
  shared.strides[0] = 1;
  refuses("z", shared,
          "graph test: a bound tensor: tensor 'z' f32 [4, 4] has strides [1, 1], with which elements share addresses, "
          "but every element of an output needs its own");
  ASSERT_OK(graph.set(rows, 2));
  refuses("z", shared,
          "graph test: a bound tensor: tensor 'z' f32 [2, 4] has strides [1, 1], with which elements share addresses, "
          "but every element of an output needs its own");
  Tensor none = view(z, {4, 4});
  none.data = nullptr;
  refuses("z", none, "graph test: a bound tensor: tensor 'z' has null data, but 8 elements: f32 [2, 4]");
  ASSERT_OK(graph.bind("z", view(z, {4, 4})));
  Tensor backwards = view(x_data, {4, 4}).narrowed(0, 3, 1);
  backwards.shape[0] = 4, backwards.strides[0] = -4;
  refuses("x", backwards, "graph test: a bound tensor: tensor 'x' stride 0 is -4, but must be >= 0");
  // Of one row the stride means nothing.
  ASSERT_OK(graph.set(rows, 1));
  ASSERT_OK(graph.bind("z", shared));
  ASSERT_OK(graph.execute(context));
  EXPECT_EQ(y[0], 0.25f);
  EXPECT_EQ(z[3], 0.25f);
}

// Columns of a named size at a size of the moment that does not hold them.
TEST(GraphContract, ColumnsFitAtTheSizesOfTheMoment) {
  Context context = make_context();
  Graph graph = make_graph();
  const Dim rows = graph.dim("rows", 4), width = graph.dim("width", 8), taken = graph.dim("taken", 4);
  const Value both =
      graph.add("both", graph.input("a", DType::f32, {rows, width}), graph.input("b", DType::f32, {rows, width}));
  graph.output("y", graph.softmax("soft", graph.columns(both, 3, {rows, taken})));
  graph.output("z", graph.softmax("soft_2", graph.columns(graph.find("a"), 3, {rows, taken})));
  std::vector<float> a(4 * 8, 1.0f), y(4 * 4, -7.0f), z(y);
  ASSERT_OK(graph.bind("a", view(a, {4, 8})));
  ASSERT_OK(graph.bind("b", view(a, {4, 8})));
  ASSERT_OK(graph.bind("y", view(y, {4, 4})));
  ASSERT_OK(graph.bind("z", view(z, {4, 4})));
  ASSERT_OK(graph.setup(context.machine()));
  ASSERT_OK(graph.execute(context));
  EXPECT_EQ(y[0], 0.25f);
  std::fill(y.begin(), y.end(), -7.0f);
  ASSERT_OK(graph.set(width, 6));
  ASSERT_OK(graph.bind("a", view(a, {4, 6})));
  ASSERT_OK(graph.bind("b", view(a, {4, 6})));
  EXPECT_EQ(graph.execute(context).message(),
            "graph test: tensor 'both' has 4 rows of 6 columns, but its columns [rows, taken] are 4 rows of 3 to 7");
  EXPECT_EQ(y, std::vector<float>(y.size(), -7.0f));
  ASSERT_OK(graph.set(taken, 3));
  ASSERT_OK(graph.execute(context));
  EXPECT_EQ(y[0], 1.0f / 3.0f);
  ASSERT_OK(graph.set(width, 2));
  ASSERT_OK(graph.bind("a", view(a, {4, 2})));
  ASSERT_OK(graph.bind("b", view(a, {4, 2})));
  EXPECT_EQ(graph.execute(context).message(),
            "graph test: tensor 'both' has 4 rows of 2 columns, but its columns [rows, taken] are 4 rows of 3 to 6");
}

// A call that fails takes back what it had added; the graph keeps the first reason, whatever is called.
TEST(GraphContract, AFailedGraphSaysWhyToEveryCall) {
  Context context = make_context();
  Graph graph = make_graph();
  const Dim rows = graph.dim("rows", 4);
  const Value x = graph.input("x", DType::f32, {rows, 8});
  const Value soft = graph.softmax("soft", x);
  std::vector<float> data(32);
  NodeSpec spec{
      .name = "two", .op = "two", .inputs = {x}, .run = [](Context&, const NodeTensors&) { return Status(); }};
  spec.outputs = {{"first", DType::f32, {rows, 8}}, {"x", DType::f32, {rows, 8}}};  // the second name is taken
  EXPECT_TRUE(graph.node(spec).empty());
  const std::string reason = "graph test: two tensors are named 'x'";
  EXPECT_FALSE(graph.find("first").exists());
  EXPECT_EQ(graph.num_nodes(), 1);
  EXPECT_FALSE(graph.input("later", DType::f32, {rows}).exists());
  EXPECT_FALSE(graph.view(x, {rows, 8}).exists());
  EXPECT_EQ(graph.dim("size", 3), Dim());
  graph.output("y", soft);
  EXPECT_FALSE(graph.find("y").exists());
  EXPECT_EQ(graph.setup(context.machine()).message(), reason);
  EXPECT_EQ(graph.bind(x, view(data, {4, 8})).message(), reason);
  EXPECT_EQ(graph.bind("later", view(data, {4, 8})).message(), reason);
  EXPECT_EQ(graph.set(rows, 2).message(), reason);
  EXPECT_EQ(graph.execute(context).message(), reason);
  EXPECT_EQ(info_of(graph, 0).name, "soft");
  EXPECT_NE(to_string(graph).find("soft"), std::string::npos);
}

TEST(GraphContract, ValuesSizesAndIndicesOfAnotherGraph) {
  Context context = make_context();
  Graph other = make_graph();
  std::vector<Dim> dims;
  std::vector<Value> values;
  for (int i = 0; i < 9; ++i) dims.push_back(other.dim(std::string("d").append(std::to_string(i)), 8));
  for (int i = 0; i < 9; ++i) {
    values.push_back(other.input(std::string("v").append(std::to_string(i)), DType::f32, {dims[8], 4}));
  }
  // Indices that this graph does not have, and indices that it has as well.
  for (const size_t i : {size_t{8}, size_t{0}}) {
    const Value value = values[i];
    const Dim dim = dims[i];
    const auto message = [&](const std::function<void(Graph&, Value)>& build) {
      return setup_message([&](Graph& g, Dim rows) { build(g, g.input("x", DType::f32, {rows, 4})); });
    };
    EXPECT_EQ(message([&](Graph& g, Value) {
                g.input("y", DType::f32, {4, dim});
              }),
              "graph test: 'y' dim 1 is a size of another graph");
    EXPECT_EQ(message([&](Graph& g, Value x) { g.view(x, {dim}); }),
              "graph test: 'x' dim 0 is a size of another graph");
    EXPECT_EQ(message([&](Graph& g, Value) { g.view(value, {4}); }), "graph test: a view of no tensor of this graph");
    EXPECT_EQ(message([&](Graph& g, Value) {
                g.columns(value, 0, {4, 4});
              }),
              "graph test: a view of no tensor of this graph");
    EXPECT_EQ(message([&](Graph& g, Value) { g.output("y", value); }),
              "graph test: output 'y' is no tensor of this graph");
    EXPECT_EQ(message([&](Graph& g, Value x) { g.add("sum", x, value); }),
              "graph test: sum (add): b is no tensor of this graph");
    EXPECT_EQ(message([&](Graph& g, Value x) { g.layer_norm("norm", x, {.bias = value}); }),
              "graph test: norm (layer_norm): bias is no tensor of this graph");
    const auto run = [](Context&, const NodeTensors&) { return Status(); };
    EXPECT_EQ(message([&](Graph& g, Value x) {
                g.node({.name = "n", .op = "op", .inputs = {x, value}, .run = run});
              }),
              "graph test: n (op): input 1 is no tensor of this graph");
    EXPECT_EQ(message([&](Graph& g, Value x) {
                g.node({.name = "n", .op = "op", .inputs = {x}, .in_place = {{0, 0}}, .run = run});
              }),
              "graph test: n (op): in place from input 0 to output 0, which do not exist");
    EXPECT_EQ(message([&](Graph& g, Value) { g.node({.name = "n", .op = nullptr, .run = run}); }),
              "graph test: n: op is null");
    const Value none = Graph(make_graph()).find("x");
    Graph graph = make_graph();
    const Value x = graph.input("x", DType::f32, {4});
    std::vector<float> data(4);
    const PackedWeight weight = std::move(PackedWeight::pack(context, view(data, {2, 2})).value());
    EXPECT_EQ(graph.bind(value, view(data, {4})).message(),
              "graph test: what is bound to a tensor is no value of this graph");
    EXPECT_EQ(graph.bind(none, ConstTensor(view(data, {4}))).message(),
              "graph test: what is bound to a tensor is no value of this graph");
    EXPECT_EQ(graph.bind(value, weight).message(), "graph test: what is bound to a weight is no value of this graph");
    EXPECT_EQ(graph.set(dim, 4).message(), "graph test: the size to set is one of another graph");
    EXPECT_EQ(graph.shape(value), Shape());
    EXPECT_EQ(graph.dtype(value), DType::f32);
    EXPECT_EQ(graph.shape(x), Shape({4}));
    for (const int node : {-1, 0, 1 << 30}) {
      EXPECT_EQ(graph.describe(node).status().message(),
                "graph test: node " + std::to_string(node) + " of 0 is asked for");
    }
  }
}

TEST(GraphContract, ANodeThatLooksForWhatItDoesNotHave) {
  Context context = make_context();
  Graph graph = make_graph(), other = make_graph();
  const Dim foreign = other.dim("m", 3), size = graph.dim("n", 5);
  const Value x = graph.input("x", DType::f32, {size});
  int64_t seen[8] = {};
  NodeSpec spec{.name = "looks", .op = "op", .inputs = {x}, .run = {}};
  spec.run = [&](Context&, const NodeTensors& t) {
    for (const int i : {-1, 1, 1 << 30}) {
      seen[0] += t.input(i).rank + t.output(i).rank + (t.input(i).data != nullptr) + (t.output(i).data != nullptr);
      seen[1] += t.weight(i).n() + t.weight(0).k();
    }
    seen[2] = t.size(foreign);
    seen[3] = t.size(size);
    seen[4] = t.size(7);
    return Status();
  };
  spec.outputs = {{"y", DType::f32, {size}}};
  graph.node(spec);
  std::vector<float> data(5);
  ASSERT_OK(graph.bind("x", view(data, {5})));
  ASSERT_OK(graph.setup(context.machine()));
  ASSERT_OK(graph.set(size, 2));
  ASSERT_OK(graph.execute(context));
  EXPECT_EQ(std::vector<int64_t>(seen, seen + 5), (std::vector<int64_t>{0, 0, -1, 2, 7}));
}

// What a node throws is a Status, and the graph runs on afterwards.
TEST(GraphContract, WhatANodeThrowsIsAStatus) {
  class Thrower : public NodeListener {
   public:
    void on_node(const char*, const std::string&, Clock::time_point, Clock::time_point) override {
      throw std::logic_error("heard enough");
    }
  };
  enum What { nothing, error, bad_alloc, number, wish, price, text };
  Context context = make_context();
  Graph graph = make_graph();
  What what = nothing;
  const auto act = [&](What now) {
    if (what != now) return;
    if (what == bad_alloc) throw std::bad_alloc();
    if (what == number) throw 42;
    throw std::runtime_error("no luck");
  };
  NodeSpec spec{.name = "unlucky", .op = "op", .run = {}};
  spec.run = [&](Context&, const NodeTensors&) {
    for (const What now : {error, bad_alloc, number}) act(now);
    return Status();
  };
  spec.read_ahead = [&](Context&, const NodeTensors&) { act(wish); };
  spec.cost = [&](const NodeTensors&) { return act(price), NodeCost{.flops = 3}; };
  spec.plan = [&](const Machine&, const NodeTensors&) { return act(text), std::string("a plan"); };
  NodeSpec first{.name = "first", .op = "op", .run = [](Context&, const NodeTensors&) { return Status(); }};
  graph.node(first);
  graph.node(spec);
  ASSERT_OK(graph.setup(context.machine()));
  const auto run = [&](What now) {
    what = now;
    const Status status = graph.execute(context);
    what = nothing;
    EXPECT_TRUE(graph.execute(context).ok());
    return std::string(to_string(status.code())) + ": " + status.message();
  };
  EXPECT_EQ(run(error), "internal: graph test: unlucky: threw no luck");
  EXPECT_EQ(run(number), "internal: graph test: unlucky: threw an exception");
  EXPECT_EQ(run(bad_alloc), "out_of_memory: out of memory");
  EXPECT_EQ(run(wish), "internal: graph test: first: threw no luck");  // while the first node is run
  Thrower listener;
  EXPECT_EQ(graph.execute(context, &listener).message(), "graph test: first: threw heard enough");
  const std::string told = "graph test: unlucky: threw no luck";
  what = price;
  EXPECT_EQ(graph.cost().status().message(), told);
  EXPECT_EQ(graph.describe(1).status().message(), told);
  EXPECT_EQ(graph.describe(0).status().message(), "");
  EXPECT_EQ(to_string(graph), told);
  what = text;
  EXPECT_EQ(graph.describe(1).status().message(), told);
  what = nothing;
  EXPECT_EQ(graph.cost().value().flops, 3);
}

TEST(GraphContract, ANodeThatUsesTheGraphThatRunsIt) {
  Context context = make_context();
  Graph graph = make_graph();
  const Dim size = graph.dim("n", 4);
  const Value x = graph.input("x", DType::f32, {size});
  std::vector<float> data(4);
  std::vector<Status> statuses;
  bool build = false;
  NodeSpec spec{.name = "self", .op = "op", .inputs = {x}, .run = {}};
  spec.run = [&](Context& inner, const NodeTensors&) {
    statuses = {graph.execute(inner), graph.setup(inner.machine()), graph.bind(x, view(data, {4})), graph.set(size, 1)};
    EXPECT_FALSE(build && graph.input("y", DType::f32, {4}).exists());
    return Status();
  };
  graph.node(spec);
  ASSERT_OK(graph.bind(x, view(data, {4})));
  ASSERT_OK(graph.setup(context.machine()));
  ASSERT_OK(graph.execute(context));
  ASSERT_EQ(statuses.size(), 4u);
  EXPECT_EQ(statuses[0].message(), "graph test: executed by a node that it runs");
  EXPECT_EQ(statuses[1].message(), "graph test: set up by a node that it runs");
  EXPECT_EQ(statuses[2].message(), "graph test: bound by a node that it runs");
  EXPECT_EQ(statuses[3].message(), "graph test: given a size by a node that it runs");
  ASSERT_OK(graph.execute(context));
  build = true;
  ASSERT_OK(graph.execute(context));
  EXPECT_EQ(graph.execute(context).message(), "graph test: something was added by a node that it runs");
}

TEST(GraphContract, HeadsThatAreNone) {
  const auto attend = [](int64_t heads, int64_t kv_heads, int64_t dim, int64_t value_dim, int64_t keys = 9) {
    return setup_message([=](Graph& g, Dim rows) {
      g.attention("attend", g.input("q", DType::f32, {rows, heads, dim}),
                  g.input("k", DType::f32, {keys, kv_heads, dim}),
                  g.input("v", DType::f32, {keys, kv_heads, value_dim}));
    });
  };
  EXPECT_EQ(attend(4, 2, 0, 8), "graph test: attend (attention): query 'q' has head_dim = 0, but must be >= 1");
  EXPECT_EQ(attend(4, 2, 8, 0), "graph test: attend (attention): value 'v' has value_head_dim = 0, but must be >= 1");
  EXPECT_EQ(attend(0, 2, 8, 8), "graph test: attend (attention): query 'q' has num_heads = 0, but must be >= 1");
  EXPECT_EQ(attend(4, 0, 8, 8), "graph test: attend (attention): key 'k' has num_kv_heads = 0, but must be >= 1");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              const Value cache = g.cache("c", DType::f32, {3, 4, 2, 0});
              g.paged_attention("attend", g.input("q", DType::f32, {rows, 2, 0}), cache, cache,
                                {g.input("t", DType::i64, {1, 3}), g.input("l", DType::i64, {1}), 4});
            }),
            "graph test: attend (paged_attention): query 'q' has head_dim = 0, but must be >= 1");
  const auto attend_pages = [](Dim kv_len) {
    return setup_message([=](Graph& g, Dim rows) {
      const Value cache = g.cache("c", DType::f32, {3, 4, 2, 8});
      g.paged_attention("attend", g.input("q", DType::f32, {rows, 2, 8}), cache, cache,
                        {g.input("t", DType::i64, {1, 3}), g.input("l", DType::i64, {1}), kv_len});
    });
  };
  EXPECT_EQ(attend_pages(-4), "graph test: attend (paged_attention): kv_len is -4, must be >= 0");
  EXPECT_EQ(attend_pages(int64_t{1} << 62),
            "graph test: attend (paged_attention): kv_len is 4611686018427387904, too large: more than 2^56 bytes");
  EXPECT_EQ(attend_pages(make_graph().dim("n", 4)),
            "graph test: attend (paged_attention): kv_len is a size of another graph");
}

}  // namespace
}  // namespace opst

// What graphs refuse while they are built, and how they say it.
#include <gtest/gtest.h>

#include <functional>

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
  EXPECT_EQ(write_panels(DType::f64, {3, 2, 2, 8, 32}, {3, 2, 64, 8}),
            "graph test: write (scatter_pa_kv_cache): page layout panel32: dtype is f64, but must be f32, bf16, f16, "
            "i8, u8, f8_e4m3 or f8_e5m2");
  const auto write_integers = [](DType dtype, int64_t groups, bool are_caches, const ScatterOptions& options = {}) {
    return setup_message([&](Graph& g, Dim rows) {
      const Value k = g.input("k", DType::f32, {rows, 2, 8});
      const Shape pages = {3, 4, 2, dtype == DType::u8 ? 4 : 8}, lists = {3, 4, 2, groups};
      ScaleValues scales;
      const auto list = [&](const char* name) {
        return are_caches ? g.cache(name, DType::f32, lists) : g.input(name, DType::f32, lists);
      };
      if (groups > 0) scales = {list("ks"), list("vs")};
      g.scatter_pa_kv_cache("write", k, k, g.input("s", DType::i64, {rows}), g.cache("keys", dtype, pages),
                            g.cache("values", dtype, pages), options, scales);
    });
  };
  EXPECT_EQ(write_integers(DType::i8, 0, true),
            "graph test: write (scatter_pa_kv_cache): key_scales is absent, but key_cache 'keys' is i8: integers to be "
            "multiplied with scales");
  EXPECT_EQ(write_integers(DType::f32, 1, true),
            "graph test: write (scatter_pa_kv_cache): key_scales 'ks' is given, but key_cache 'keys' is f32, and only "
            "i8 and u8 have any");
  EXPECT_EQ(write_integers(DType::i8, 1, false),
            "graph test: write (scatter_pa_kv_cache): key_scales 'ks' is written, but is no cache");
  EXPECT_EQ(write_integers(DType::u8, 3, true),
            "graph test: write (scatter_pa_kv_cache): key_scales 'ks' has 3 groups (key_groups), which do not divide "
            "head_dim = 8");
  EXPECT_EQ(write_integers(DType::u8, 8, true),
            "graph test: write (scatter_pa_kv_cache): key_scales 'ks' has groups of 1 numbers, but those of u8 must "
            "fill whole bytes");
  EXPECT_EQ(write_integers(DType::i8, 1, true, {.scales_given = true}),
            "graph test: write (scatter_pa_kv_cache): options.scales or scales_given is set, but a node's scales are "
            "values");
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

// Of one node for several sequences.
TEST(GraphContract, SequencesThatAreNone) {
  const auto attend = [](Dim batch, Dim starts) {
    return setup_message([=](Graph& g, Dim rows) {
      const Value cache = g.cache("c", DType::f32, {3, 4, 2, 8});
      g.paged_attention("attend", g.input("q", DType::f32, {rows, 2, 8}), cache, cache,
                        {.block_table = g.input("t", DType::i32, {batch, 3}),
                         .kv_lengths = g.input("l", DType::i32, {batch}),
                         .kv_len = 12,
                         .cu_seqlens_q = starts == Dim() ? Value() : g.input("starts", DType::i32, {starts})});
    });
  };
  EXPECT_EQ(attend(4, {}),
            "graph test: attend (paged_attention): query dim 0 (tokens) is rows, not a multiple of batch = 4, and "
            "sequences of different lengths need cu_seqlens_q");
  EXPECT_EQ(attend(4, 4),
            "graph test: attend (paged_attention): cu_seqlens_q dim 0 is 4, but must be 5: one more than batch");
  EXPECT_EQ(setup_message([](Graph& g, Dim) {
              const Value cache = g.cache("c", DType::f32, {3, 4, 2, 8});
              g.paged_attention("attend", g.input("q", DType::f32, {6, 2, 8}), cache, cache,
                                {g.input("t", DType::i32, {4, 3}), g.input("l", DType::i32, {4}), 12});
            }),
            "graph test: attend (paged_attention): query dim 0 (tokens) is 6, not a multiple of batch = 4, and "
            "sequences of different lengths need cu_seqlens_q");
}

}  // namespace
}  // namespace opst

// Exhausted memory: every allocation of every call of a graph fails in turn, alone and with all that follow. Always a
// Status; nothing is leaked; the graph goes on, or says why it cannot.
#include <gtest/gtest.h>

#include <optional>

#include "graph/test_graphs.h"
#include "testing/fail_allocations.h"

namespace opst {
namespace {

using test::fail_each_allocation;
using test::live_allocations;

constexpr int64_t kTokens = 4, kHeads = 2, kDim = 8, kWidth = kHeads * kDim;

// A graph with every kind of value and node. Names fit into small strings: what an argument takes is the caller's.
struct Everything {
  std::vector<float> x = random_floats(kTokens * kWidth, 1), norm = random_floats(kWidth, 2),
                     angles = random_floats(16, 3), cache = std::vector<float>(kTokens * kWidth), y = cache,
                     gated = std::vector<float>(kTokens * kWidth / 2);
  std::vector<int64_t> positions = {0, 1, 2, 3};
  int64_t block = 0, length = kTokens;
  Context context = make_context();
  PackedWeight weight;

  Everything() {
    std::vector<float> numbers = random_floats(kWidth * kWidth, 4);
    weight = std::move(PackedWeight::pack(context, view(numbers, {kWidth, kWidth})).value());
  }

  // Makes the call of index `only`; -1: all calls.
  void build(Graph& g, int only = -1) const {
    int call = 0;
    const auto step = [&](const auto& add) {
      if (only < 0 || call == only) add();
      ++call;
    };
    Dim tokens = g.find("x").exists() ? g.shape(g.find("x")).dims[0] : Dim();
    const auto value = [&](const char* name) { return g.find(name); };
    step([&] { tokens = g.dim("tokens", kTokens); });
    step([&] { g.input("x", DType::f32, {tokens, kWidth}); });
    step([&] { g.input("norm", DType::f32, {kWidth}); });
    step([&] { g.input("positions", DType::i64, {tokens}); });
    step([&] { g.input("slots", DType::i64, {tokens}); });
    step([&] { g.input("table", DType::i64, {1, 1}); });
    step([&] { g.input("lengths", DType::i64, {1}); });
    step([&] { g.cache("keys", DType::f32, {1, kTokens, kHeads, kDim}); });
    step([&] { g.cache("values", DType::f32, {1, kTokens, kHeads, kDim}); });
    step([&] { g.weight("weight", kWidth, kWidth); });
    step([&] { g.rms_norm("normed", value("x"), value("norm")); });
    step([&] {
      g.matmul("product", value("normed"), value("weight"), {.bias = value("norm"), .residual = value("x")});
    });
    step([&] { g.rope_table("rope", value("positions"), kDim / 2); });
    step([&] { g.add("rows", value("product"), value("x")); });
    step([&] {
      g.rope("turned", g.view(value("rows"), {tokens, kHeads, kDim}), {value("rope.cos"), value("rope.sin")});
    });
    step([&] {
      g.rope_scatter_pa_kv_cache("stepped",
                                 {.query = value("turned"),
                                  .key = value("turned"),
                                  .value = value("turned"),
                                  .table = {value("rope.cos"), value("rope.sin")},
                                  .slots = value("slots")},
                                 value("keys"), value("values"));
    });
    step([&] {
      g.scatter_pa_kv_cache("written", value("stepped"), value("stepped"), value("slots"), value("keys"),
                            value("values"));
    });
    step([&] {
      g.paged_attention("attended", value("stepped"), value("keys"), value("values"),
                        {value("table"), value("lengths"), kTokens});
    });
    step([&] { g.attention("dense", value("attended"), value("turned"), value("turned")); });
    step([&] { g.softmax("soft", g.view(value("dense"), {tokens, kWidth})); });
    step([&] { g.layer_norm("layered", value("soft"), {.weight = value("norm"), .bias = value("norm")}); });
    step([&] { g.add_rms_norm("sum", value("layered"), value("soft"), value("norm")); });
    step([&] { g.swiglu("gate", value("sum"), SwigluOptions()); });
    step([&] { g.swiglu("gates", value("sum.sum"), value("sum")); });
    step([&] { g.softmax("left", g.columns(value("gates"), 0, {tokens, 2, 4})); });
    step([&] { g.output("y", value("gates")); });
    step([&] { g.output("gated", value("gate")); });
    num_calls = call;
  }
  mutable int num_calls = 0;

  Status bind(Graph& g) {
    const auto ints = [](std::vector<int64_t>& v) { return Tensor::contiguous(DType::i64, {kTokens}, v.data()); };
    const std::pair<const char*, Tensor> bound[] = {{"x", view(x, {kTokens, kWidth})},
                                                    {"norm", view(norm, {kWidth})},
                                                    {"positions", ints(positions)},
                                                    {"slots", ints(positions)},
                                                    {"table", Tensor::contiguous(DType::i64, {1, 1}, &block)},
                                                    {"lengths", Tensor::contiguous(DType::i64, {1}, &length)},
                                                    {"keys", view(cache, {1, kTokens, kHeads, kDim})},
                                                    {"values", view(values, {1, kTokens, kHeads, kDim})},
                                                    {"y", view(y, {kTokens, kWidth})},
                                                    {"gated", view(gated, {kTokens, kWidth / 2})}};
    for (const auto& [name, tensor] : bound) {
      if (Status status = g.bind(name, tensor); !status.ok()) return status;
    }
    return g.bind("weight", weight);
  }
  std::vector<float> values = cache;

  // All of a graph's life.
  Status live() {
    Result<Graph> made = Graph::create("g");
    if (!made.ok()) return made.status();
    Graph g = std::move(made.value());
    build(g);
    if (Status status = g.setup(context.machine()); !status.ok()) return status;
    if (Status status = bind(g); !status.ok()) return status;
    return g.execute(context);
  }
};

TEST(GraphMemory, AWholeLife) {
  Everything all;
  ASSERT_OK(all.live());
  const std::vector<float> expected = all.y;
  const int64_t live = live_allocations;
  const int64_t failed =
      fail_each_allocation([&] { return all.live(); }, [&] { ASSERT_EQ(live_allocations.load(), live); });
  EXPECT_GT(failed, 500);
  ASSERT_OK(all.live());
  EXPECT_EQ(all.y, expected);
}

// One call after another: the one that fails takes back what it had added, and the graph says so from then on.
TEST(GraphMemory, EachCallThatBuilds) {
  Everything all;
  {
    Graph counted = make_graph();
    all.build(counted);
  }
  ASSERT_GT(all.num_calls, 20);
  for (int call = 0; call < all.num_calls; ++call) {
    std::optional<Graph> graph;
    int num_nodes = 0;
    const auto anew = [&] {
      if (graph && graph->setup(Machine()).code() == StatusCode::out_of_memory) {
        EXPECT_EQ(graph->num_nodes(), num_nodes) << call;
        EXPECT_EQ(graph->bind(graph->find("x"), view(all.x, {kTokens, kWidth})).code(), StatusCode::out_of_memory);
        EXPECT_EQ(graph->execute(all.context).code(), StatusCode::out_of_memory);
        EXPECT_FALSE(graph->input("late", DType::f32, {4}).exists());
        EXPECT_TRUE(graph->cost().ok());
        EXPECT_NE(to_string(*graph).find("workspace"), std::string::npos);
      }
      graph.emplace(make_graph());
      for (int before = 0; before < call; ++before) all.build(*graph, before);
      num_nodes = graph->num_nodes();
    };
    anew();
    fail_each_allocation(
        [&] {
          all.build(*graph, call);
          return graph->setup(Machine());
        },
        anew);
    if (HasFailure()) FAIL() << "call " << call;
  }
}

// A setup that fails may be tried again.
TEST(GraphMemory, Setup) {
  Everything all;
  ASSERT_OK(all.live());
  const std::vector<float> expected = all.y;
  std::optional<Graph> graph;
  const auto anew = [&] {
    if (graph) {
      ASSERT_OK(graph->setup(all.context.machine()));
      ASSERT_OK(graph->execute(all.context));
      EXPECT_EQ(all.y, expected);
    }
    graph.emplace(make_graph());
    all.build(*graph);
    ASSERT_OK(all.bind(*graph));
  };
  anew();
  EXPECT_GT(fail_each_allocation([&] { return graph->setup(all.context.machine()); }, anew), 10);
}

// What is refused is refused, or out of memory; the graph runs on.
TEST(GraphMemory, RefusalsAndExplanations) {
  Everything all;
  Graph graph = make_graph(), other = make_graph();
  all.build(graph);
  ASSERT_OK(graph.setup(all.context.machine()));
  ASSERT_OK(all.bind(graph));
  const Value x = graph.find("x"), foreign = other.input("x", DType::f32, {4});
  const Dim size = graph.shape(x).dims[0];
  const auto runs = [&] { ASSERT_OK(graph.execute(all.context)); };
  const auto refused = [&](const auto& call) {
    EXPECT_GT(fail_each_allocation(call, runs, StatusCode::invalid_argument), 0);
  };
  refused([&] { return graph.bind(x, view(all.x, {kTokens})); });
  refused([&] { return graph.bind(x, ConstTensor(view(all.x, {kWidth, kTokens}))); });
  refused([&] { return graph.bind(foreign, view(all.x, {kTokens})); });
  refused([&] { return graph.bind("no such tensor", view(all.x, {kTokens})); });
  refused([&] { return graph.bind(x, all.weight); });
  refused([&] { return graph.set(size, 99); });
  refused([&] { return graph.describe(99).status(); });
  // None of these allocates.
  for (const auto& call : std::vector<std::function<Status()>>{
           [&] { return graph.set(size, 2); }, [&] { return graph.set(size, kTokens); },
           [&] { return graph.execute(all.context); }, [&] { return graph.cost().status(); }}) {
    EXPECT_EQ(fail_each_allocation(call), 0);
  }
  for (int node = 0; node < graph.num_nodes(); ++node) {
    EXPECT_GT(fail_each_allocation([&] { return graph.describe(node).status(); }), 0);
  }
  fail_each_allocation([&] { return to_string(graph).empty() ? Status::internal("empty") : Status(); });
}

}  // namespace
}  // namespace opst

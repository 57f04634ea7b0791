// What graphs refuse when they are bound and run, and how they say it.
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "graph/test_graphs.h"

namespace opst {
namespace {

TEST(RunningContract, BindingAndRunningNameTensorDimensionAndBothValues) {
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

// A weight is kept by its address: one that ends with the call is no argument. A temporary Tensor is copied.
template <class Place, class Bound>
concept MayBind = requires(Graph& graph, Place place, Bound&& bound) {
  graph.bind(place, std::forward<Bound>(bound));
};
template <class Place>
constexpr bool kKeepsWeightsAlive = MayBind<Place, PackedWeight&>&& MayBind<Place, const PackedWeight&> &&
                                    !MayBind<Place, PackedWeight> && !MayBind<Place, const PackedWeight>;
static_assert(kKeepsWeightsAlive<Value> && kKeepsWeightsAlive<std::string_view> && kKeepsWeightsAlive<const char*> &&
              kKeepsWeightsAlive<std::string>);
static_assert(MayBind<Value, Tensor> && MayBind<const char*, ConstTensor>);

TEST(RunningContract, AViewNeedsContiguousMemoryAndEnoughOfIt) {
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
TEST(RunningContract, UnsoundTensorsAreRefusedBeforeTheFirstNodeRuns) {
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
TEST(RunningContract, ColumnsFitAtTheSizesOfTheMoment) {
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

TEST(RunningContract, ANodeThatLooksForWhatItDoesNotHave) {
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
TEST(RunningContract, WhatANodeThrowsIsAStatus) {
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

TEST(RunningContract, ANodeThatUsesTheGraphThatRunsIt) {
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

}  // namespace
}  // namespace opst

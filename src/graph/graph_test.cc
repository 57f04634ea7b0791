#include "opst/graph.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "graph/test_graphs.h"
#include "testing/count_allocations.h"

namespace opst {
namespace {

TEST(Graph, EqualsTheOperatorsBitForBitAtAnySizeAndBinding) {
  FeedForward net;
  Graph graph = net.graph();
  net.bind(graph);
  ASSERT_OK(graph.setup(net.context.machine()));
  for (const int64_t n : {9, 1, 4, 9, 2}) {
    std::vector<float> x = random_floats(n * net.kWidth, static_cast<uint32_t>(n)), y(x.size() + 1, -7.0f);
    ASSERT_OK(graph.bind("x", ConstTensor(view(x, {n, net.kWidth}))));
    ASSERT_OK(graph.bind("y", view(y, {n, net.kWidth})));
    ASSERT_OK(graph.set(net.rows, n));
    ASSERT_OK(graph.execute(net.context));
    EXPECT_EQ(y.back(), -7.0f);
    y.pop_back();
    EXPECT_EQ(y, net.expected(view(x, {n, net.kWidth})));
  }
  // Larger tensors than needed, with strides: the first rows are used.
  std::vector<float> x = random_floats(6 * 40, 8), y(6 * 50, -7.0f);
  const Tensor strided_x = view(x, {6, 40}).narrowed(1, 3, net.kWidth);
  const Tensor strided_y = view(y, {6, 50}).narrowed(1, 5, net.kWidth);
  ASSERT_OK(graph.bind("x", strided_x));
  ASSERT_OK(graph.bind("y", strided_y));
  ASSERT_OK(graph.set(net.rows, 3));
  ASSERT_OK(graph.execute(net.context));
  const std::vector<float> expected = net.expected(strided_x.narrowed(0, 0, 3));
  for (int64_t row = 0; row < 6; ++row) {
    for (int64_t i = 0; i < 50; ++i) {
      const bool inside = row < 3 && i >= 5 && i < 5 + net.kWidth;
      EXPECT_EQ(y[static_cast<size_t>(row * 50 + i)],
                inside ? expected[static_cast<size_t>(row * net.kWidth + i - 5)] : -7.0f);
    }
  }
}

TEST(Graph, ExecutingAndRebindingAllocateNothing) {
  FeedForward net;
  Graph graph = net.graph();
  net.bind(graph);
  ASSERT_OK(graph.setup(net.context.machine()));
  std::vector<float> x = random_floats(9 * net.kWidth, 1), y(x.size());
  const Value x_value = graph.find("x"), y_value = graph.find("y");
  const auto run = [&](int64_t n) {
    return graph.bind(x_value, view(x, {n, net.kWidth})).ok() && graph.bind(y_value, view(y, {n, net.kWidth})).ok() &&
           graph.set(net.rows, n).ok() && graph.execute(net.context).ok();
  };
  ASSERT_TRUE(run(9) && run(1));
  const int64_t news = test::num_allocations, allocations = net.context.workspace_allocations();
  bool ok = true;
  for (const int64_t n : {1, 9, 5, 1, 1, 8}) ok = run(n) && ok;
  EXPECT_EQ(test::num_allocations, news);
  EXPECT_TRUE(ok);
  EXPECT_EQ(net.context.workspace_allocations(), allocations);
}

TEST(Graph, MemoryIsSharedAndWrittenInPlace) {
  FeedForward net;
  Graph graph = net.graph();
  ASSERT_OK(graph.setup(net.context.machine()));
  // norm beside gate and up; the activation lies on the gate; down where norm was.
  const int64_t width = 9 * 32 * 4, size = (9 * 48 * 4 + 63) / 64 * 64;
  EXPECT_EQ(graph.memory().workspace_bytes, width + 2 * size);
  EXPECT_EQ(graph.memory().peak_live_bytes, width + 2 * size);
  EXPECT_EQ(graph.memory().sum_bytes, 2 * width + 2 * size);
  EXPECT_EQ(info_of(graph, 3).op, std::string("swiglu"));
  EXPECT_EQ(info_of(graph, 3).offsets, info_of(graph, 1).offsets);
  EXPECT_EQ(info_of(graph, 5).offsets, std::vector<int64_t>{-1});
}

TEST(Graph, CostsFollowTheSizes) {
  FeedForward net;
  Graph graph = net.graph();
  net.bind(graph);
  ASSERT_OK(graph.setup(net.context.machine()));
  ASSERT_OK(graph.set(net.rows, 4));
  EXPECT_EQ(graph.cost().value().flops, 2.0 * 4 * 3 * 32 * 48);
  EXPECT_EQ(graph.cost().value().weight_bytes, 4 * (3 * 32 * 48 + 32));
  EXPECT_EQ(info_of(graph, 0).cost.tensor_bytes, 2 * 4 * 32 * 4);
  EXPECT_NE(to_string(graph).find("down"), std::string::npos);
  EXPECT_NE(to_string(graph).find("sum"), std::string::npos);
  EXPECT_NE(to_string(graph).find("y f32 [rows, 32]"), std::string::npos) << to_string(graph);
}

// Nodes c = 2 a - b with random inputs, views and permissions to write in place, against the same in memory of its own
// for every value. What is overwritten too early shows in a result.
TEST(Graph, RandomGraphsComputeWhatTheyShould) {
  Context context = make_context();
  std::mt19937 random(11);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  double used = 0, naive = 0;
  for (int round = 0; round < 3000; ++round) {
    Graph graph = make_graph();
    const size_t longest = 4 + below(40);
    const Dim n = graph.dim("n", static_cast<int64_t>(longest));
    struct Known {
      Value value;
      bool doubled;  // [2, n] or [n, 2], else [n]
      std::vector<float> expected;
    };
    std::vector<Known> known;
    std::vector<std::vector<float>> memory;
    const auto size = static_cast<int64_t>(1 + below(longest));
    ASSERT_OK(graph.set(n, size));
    const auto shape_of = [&](bool doubled) { return doubled ? Shape{2, n} : Shape{n}; };
    const auto external = [&](bool doubled) {
      return doubled ? Tensor::contiguous(DType::f32, {2, size}, memory.back().data())
                     : Tensor::contiguous(DType::f32, {size}, memory.back().data());
    };
    for (const bool doubled : {false, true}) {
      const std::string name = doubled ? "in2" : "in1";
      memory.push_back(random_floats(size * (doubled ? 2 : 1), static_cast<uint32_t>(round)));
      known.push_back({graph.input(name, DType::f32, shape_of(doubled)), doubled, memory.back()});
      ASSERT_OK(graph.bind(name, ConstTensor(external(doubled))));
    }
    const size_t num_nodes = 1 + below(40);
    std::vector<std::pair<size_t, size_t>> outputs;  // known, memory
    for (size_t i = 0; i < num_nodes; ++i) {
      const bool doubled = below(2) == 1;
      // Mostly recent values, so that others die.
      const auto pick = [&]() -> size_t {
        for (;;) {
          const size_t k =
              below(2) == 0 ? below(known.size()) : known.size() - 1 - below(std::min<size_t>(known.size(), 4));
          if (known[k].doubled == doubled) return k;
        }
      };
      const size_t a = pick(), b = pick();
      Known c{{}, doubled, std::vector<float>(known[a].expected.size())};
      // An input that may not be written onto is read backwards.
      const bool onto_a = below(2) == 0, onto_b = below(2) == 0;
      for (size_t j = 0, end = c.expected.size(); j < end; ++j) {
        const float x = known[a].expected[onto_a ? j : end - 1 - j], y = known[b].expected[onto_b ? j : end - 1 - j];
        c.expected[j] = std::remainder(2 * x - y, 64.0f);
      }
      NodeSpec spec;
      spec.name = std::string("c").append(std::to_string(i));
      spec.op = "mix";
      // The input through a view now and then.
      const auto seen = [&](size_t k) {
        const bool as_is = below(3) > 0;
        return as_is ? known[k].value : graph.view(known[k].value, doubled ? Shape{n, 2} : Shape{1, n});
      };
      spec.inputs = {seen(a), seen(b)};
      spec.outputs = {{spec.name, DType::f32, shape_of(doubled)}};
      if (onto_a) spec.in_place.push_back({0, 0});
      if (onto_b) spec.in_place.push_back({1, 0});
      spec.run = [onto_a, onto_b](Context&, const NodeTensors& t) {
        const auto* x = static_cast<const float*>(t.input(0).data);
        const auto* y = static_cast<const float*>(t.input(1).data);
        auto* z = static_cast<float*>(t.output(0).data);
        for (int64_t j = 0, end = t.output(0).num_elements(); j < end; ++j) {
          z[j] = std::remainder(2 * x[onto_a ? j : end - 1 - j] - y[onto_b ? j : end - 1 - j], 64.0f);
        }
        return Status();
      };
      const std::vector<Value> results = graph.node(std::move(spec));
      ASSERT_EQ(results.size(), 1u);
      c.value = results[0];
      if (below(6) == 0 || i + 1 == num_nodes) {
        memory.emplace_back(c.expected.size(), -1.0f);
        outputs.emplace_back(known.size(), memory.size() - 1);
        const std::string name = std::string("out") + std::to_string(i);
        graph.output(name, c.value);
        ASSERT_OK(graph.bind(name, external(doubled)));
      }
      known.push_back(std::move(c));
    }
    ASSERT_OK(graph.setup(context.machine()));
    ASSERT_OK(graph.execute(context));
    for (const auto& [k, m] : outputs) ASSERT_EQ(memory[m], known[k].expected) << "round " << round;
    used += static_cast<double>(graph.memory().workspace_bytes);
    naive += static_cast<double>(graph.memory().sum_bytes);
    ASSERT_LE(graph.memory().workspace_bytes, graph.memory().sum_bytes);
  }
  std::printf("workspaces: %.3f of the sum\n", used / naive);
}

class Recorder : public NodeListener {
 public:
  void on_node(const char* op, const std::string& name, Clock::time_point begin, Clock::time_point end) override {
    EXPECT_LE(begin, end);
    EXPECT_LE(last_, begin);
    last_ = end;
    seen.push_back(name + ":" + op);
  }
  std::vector<std::string> seen;

 private:
  Clock::time_point last_ = {};
};

// Between two nodes a listener can end the execution; the graph is as usable as before.
TEST(Graph, AListenerEndsTheExecution) {
  class Stopper : public Recorder {
   public:
    bool stop() override { return seen.size() == wanted; }
    size_t wanted = 1;
  };
  Graph graph = std::move(Graph::create("graph test").value());
  const Value a = graph.input("a", DType::f32, {4, 1}), once = graph.add("once", a, a);
  graph.output("twice", graph.add("again", once, once));
  Context context = std::move(Context::create({.num_threads = 1}).value());
  ASSERT_OK(graph.setup(context.machine()));
  std::vector<float> in = {1, 2, 3, 4}, out(4);
  ASSERT_OK(graph.bind("a", ConstTensor(view(in, {4, 1}))));
  ASSERT_OK(graph.bind("twice", view(out, {4, 1})));
  Stopper stopper;
  EXPECT_EQ(graph.execute(context, &stopper).message(), "graph graph test: interrupted by its listener");
  EXPECT_EQ(stopper.seen, std::vector<std::string>{"once:add"});
  EXPECT_EQ(out, std::vector<float>(4));
  stopper.wanted = 0;
  ASSERT_OK(graph.execute(context, &stopper));
  EXPECT_EQ(out, (std::vector<float>{4, 8, 12, 16}));
}

// Columns of rows are read where they lie, and no node may take their place for its result.
TEST(Graph, ColumnsOfRows) {
  Graph graph = std::move(Graph::create("graph test").value());
  const Dim rows = graph.dim("rows", 5);
  const Value both =
      graph.add("both", graph.input("a", DType::f32, {rows, 10}), graph.input("b", DType::f32, {rows, 10}));
  const Value left = graph.columns(both, 0, {rows, 2, 3}), right = graph.columns(both, 4, {rows, 2, 3});
  graph.output("sum", graph.add("sum_of_both", graph.add("left_twice", left, left), graph.add("mixed", left, right)));
  ASSERT_OK(graph.setup(Context::create({.num_threads = 1}).value().machine()));
  std::vector<float> a(50), b(50), sum(30);
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i), b[i] = 100 * static_cast<float>(i);
  ASSERT_OK(graph.bind("a", ConstTensor(view(a, {5, 10}))));
  ASSERT_OK(graph.bind("b", ConstTensor(view(b, {5, 10}))));
  ASSERT_OK(graph.bind("sum", view(sum, {5, 2, 3})));
  Context context = std::move(Context::create({.num_threads = 2}).value());
  for (const int64_t n : {5, 3}) {
    ASSERT_OK(graph.set(rows, n));
    ASSERT_OK(graph.execute(context));
    for (size_t i = 0; i < static_cast<size_t>(n * 6); ++i) {
      const size_t at = i / 6 * 10 + i % 6;
      EXPECT_EQ(sum[i], 101 * (3 * static_cast<float>(at) + static_cast<float>(at + 4))) << i;
    }
  }
}

TEST(Graph, AListenerHearsEveryNodeInOrder) {
  FeedForward net;
  Graph graph = net.graph();
  net.bind(graph);
  ASSERT_OK(graph.setup(net.context.machine()));
  std::vector<float> x = random_floats(9 * net.kWidth, 1), y(x.size());
  ASSERT_OK(graph.bind("x", view(x, {9, net.kWidth})));
  ASSERT_OK(graph.bind("y", view(y, {9, net.kWidth})));
  Recorder recorder;
  ASSERT_OK(graph.execute(net.context, &recorder));
  EXPECT_EQ(recorder.seen, (std::vector<std::string>{"norm:rms_norm", "gate:matmul", "up:matmul", "act:swiglu",
                                                     "down:matmul", "sum:add"}));
}

// A node's wish is told while what comes before it runs, one wish at a time.
TEST(Graph, WishesAreToldOneNodeWithAWishAhead) {
  FeedForward net;
  Graph graph = make_graph();
  std::vector<std::string> events;
  std::vector<float> x(8), y(8);
  Value value = graph.input("x", DType::f32, {8});
  for (const char* name : {"a", "B", "c", "D", "e"}) {
    const std::string event = name;
    NodeSpec spec;
    spec.name = name, spec.op = "copy";
    spec.inputs = {value};
    spec.outputs = {{name, DType::f32, {8}}};
    spec.run = [&events, event](Context&, const NodeTensors& t) {
      events.push_back("run " + event);
      std::memcpy(t.output(0).data, t.input(0).data, 32);
      return Status();
    };
    if (event == "B" || event == "D") {
      spec.read_ahead = [&events, event](Context&, const NodeTensors& t) {
        EXPECT_EQ(t.input(0).shape[0], 8);
        events.push_back("wish " + event);
      };
    }
    value = graph.node(spec)[0];
  }
  graph.output("y", value);
  ASSERT_OK(graph.bind("x", view(x, {8})));
  ASSERT_OK(graph.bind("y", view(y, {8})));
  ASSERT_OK(graph.setup(net.context.machine()));
  for (int i = 0; i < 2; ++i) {
    events.clear();
    ASSERT_OK(graph.execute(net.context));
    EXPECT_EQ(events, (std::vector<std::string>{"wish B", "run a", "wish D", "run B", "run c", "run D", "run e"}));
  }
}

}  // namespace
}  // namespace opst

#include "opst/graph.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>

#include "testing/count_allocations.h"

namespace opst {
namespace {

Context make_context() { return std::move(Context::create({.num_threads = 2}).value()); }

Graph make_graph() { return std::move(Graph::create("test").value()); }

std::vector<float> random_floats(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> numbers(static_cast<size_t>(count));
  for (float& x : numbers) x = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 500.0f;
  return numbers;
}

Tensor view(std::vector<float>& numbers, std::initializer_list<int64_t> shape) {
  return Tensor::contiguous(DType::f32, shape, numbers.data());
}

#define ASSERT_OK(call)                             \
  do {                                              \
    const Status status_ = (call);                  \
    ASSERT_TRUE(status_.ok()) << status_.message(); \
  } while (false)

// y = Wdown swiglu(Wgate norm(x), Wup norm(x)) + x, as a graph and as calls.
class FeedForward {
 public:
  static constexpr int64_t kWidth = 32, kSize = 48, kMaxRows = 9;

  FeedForward() {
    for (auto* weight : {&gate_, &up_}) *weight = pack(kSize, kWidth, weight == &gate_ ? 1 : 2);
    down_ = pack(kWidth, kSize, 3);
  }

  Graph graph() const {
    Graph g = make_graph();
    rows = g.dim("rows", kMaxRows);
    const Value x = g.input("x", DType::f32, {rows, kWidth});
    const Value normed = g.rms_norm("norm", x, g.input("norm.weight", DType::f32, {kWidth}));
    const Value gate = g.matmul("gate", normed, g.weight("gate.weight", kSize, kWidth));
    const Value up = g.matmul("up", normed, g.weight("up.weight", kSize, kWidth));
    const Value down = g.matmul("down", g.swiglu("act", gate, up), g.weight("down.weight", kWidth, kSize));
    g.output("y", g.add("sum", x, down));
    return g;
  }

  void bind(Graph& g) {
    ASSERT_OK(g.bind("gate.weight", gate_));
    ASSERT_OK(g.bind("up.weight", up_));
    ASSERT_OK(g.bind("down.weight", down_));
    ASSERT_OK(g.bind("norm.weight", ConstTensor(view(norm_, {kWidth}))));
  }

  std::vector<float> expected(const ConstTensor& x) {
    const int64_t n = x.shape[0];
    const auto narrow = static_cast<size_t>(n * kWidth), wide = static_cast<size_t>(n * kSize);
    std::vector<float> normed(narrow), gate(wide), up(wide), down(narrow), y(narrow);
    EXPECT_TRUE(rms_norm(context, x, view(norm_, {kWidth}), view(normed, {n, kWidth})).ok());
    EXPECT_TRUE(matmul(context, view(normed, {n, kWidth}), gate_, view(gate, {n, kSize})).ok());
    EXPECT_TRUE(matmul(context, view(normed, {n, kWidth}), up_, view(up, {n, kSize})).ok());
    EXPECT_TRUE(swiglu(context, view(gate, {n, kSize}), view(up, {n, kSize}), view(gate, {n, kSize})).ok());
    EXPECT_TRUE(matmul(context, view(gate, {n, kSize}), down_, view(down, {n, kWidth})).ok());
    EXPECT_TRUE(add(context, x, view(down, {n, kWidth}), view(y, {n, kWidth})).ok());
    return y;
  }

  Context context = make_context();
  mutable Dim rows;

 private:
  PackedWeight pack(int64_t n, int64_t k, uint32_t seed) {
    std::vector<float> numbers = random_floats(n * k, seed);
    return std::move(PackedWeight::pack(context, view(numbers, {n, k})).value());
  }
  PackedWeight gate_, up_, down_;
  std::vector<float> norm_ = random_floats(kWidth, 4);
};

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
  EXPECT_EQ(graph.describe(3).op, std::string("swiglu"));
  EXPECT_EQ(graph.describe(3).offsets, graph.describe(1).offsets);
  EXPECT_EQ(graph.describe(5).offsets, std::vector<int64_t>{-1});
}

TEST(Graph, CostsFollowTheSizes) {
  FeedForward net;
  Graph graph = net.graph();
  net.bind(graph);
  ASSERT_OK(graph.setup(net.context.machine()));
  ASSERT_OK(graph.set(net.rows, 4));
  EXPECT_EQ(graph.cost().flops, 2.0 * 4 * 3 * 32 * 48);
  EXPECT_EQ(graph.cost().weight_bytes, 4 * (3 * 32 * 48 + 32));
  EXPECT_EQ(graph.describe(0).cost.tensor_bytes, 2 * 4 * 32 * 4);
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

TEST(Graph, AttentionOverPagesAndRows) {
  Context context = make_context();
  constexpr int64_t kHeads = 4, kKvHeads = 2, kDim = 8, kContext = 12;
  Graph graph = make_graph();
  const Dim tokens = graph.dim("tokens", 5), kv_len = graph.dim("kv_len", kContext);
  const Value query = graph.input("query", DType::f32, {tokens, kHeads, kDim});
  const Value key = graph.input("key", DType::f32, {tokens, kKvHeads, kDim});
  const Value slots = graph.input("slots", DType::i64, {tokens});
  const Graph::RopeTable table = graph.rope_table("rope", graph.input("positions", DType::i64, {tokens}), kDim / 2);
  const Value turned_query = graph.rope("turned_query", query, table),
              turned_key = graph.rope("turned_key", key, table);
  for (const bool paged : {false, true}) {
    const std::string p = paged ? "paged." : "rows.";
    const Shape shape = paged ? Shape{3, 4, kKvHeads, kDim} : Shape{1, kContext, kKvHeads, kDim};
    const Value keys = graph.cache(p + "keys", DType::f32, shape),
                values = graph.cache(p + "values", DType::f32, shape);
    graph.scatter_pa_kv_cache(p + "write", turned_key, key, slots, keys, values);
    const Shape rows = {kv_len, kKvHeads, kDim};
    graph.output(p + "out", paged ? graph.paged_attention(p + "attend", turned_query, keys, values,
                                                          {graph.input("table", DType::i64, {1, 3}),
                                                           graph.input("lengths", DType::i64, {1}), kv_len},
                                                          {.causal = true})
                                  : graph.attention(p + "attend", turned_query, graph.view(keys, rows),
                                                    graph.view(values, rows), {.causal = true}));
  }
  std::vector<float> q = random_floats(5 * kHeads * kDim, 1), k = random_floats(5 * kKvHeads * kDim, 2);
  std::map<std::string, std::vector<float>> caches, outs;
  for (const std::string p : {"rows.", "paged."}) {
    for (const std::string which : {"keys", "values"}) {
      std::vector<float>& cache = caches[p + which];
      cache.assign(kContext * kKvHeads * kDim, NAN);
      ASSERT_OK(graph.bind(
          p + which, p == "rows." ? view(cache, {1, kContext, kKvHeads, kDim}) : view(cache, {3, 4, kKvHeads, kDim})));
    }
    outs[p].resize(q.size());
    ASSERT_OK(graph.bind(p + "out", view(outs[p], {5, kHeads, kDim})));
  }
  int64_t positions[5], length = 0;
  const int64_t blocks[] = {0, 1, 2};
  const auto i64 = [](const int64_t* data, std::initializer_list<int64_t> shape) {
    return ConstTensor::contiguous(DType::i64, shape, data);
  };
  ASSERT_OK(graph.bind("query", view(q, {5, kHeads, kDim})));
  ASSERT_OK(graph.bind("key", view(k, {5, kKvHeads, kDim})));
  ASSERT_OK(graph.bind("positions", i64(positions, {5})));
  ASSERT_OK(graph.bind("slots", i64(positions, {5})));
  ASSERT_OK(graph.bind("table", i64(blocks, {1, 3})));
  ASSERT_OK(graph.bind("lengths", i64(&length, {1})));
  ASSERT_OK(graph.setup(context.machine()));
  for (const int64_t n : {5, 1, 4, 1}) {
    for (int64_t i = 0; i < n; ++i) positions[i] = length + i;
    length += n;
    ASSERT_OK(graph.set(tokens, n));
    ASSERT_OK(graph.set(kv_len, length));
    ASSERT_OK(graph.execute(context));
    EXPECT_EQ(caches["rows.keys"].size(), caches["paged.keys"].size());
    for (size_t i = 0; i < static_cast<size_t>(n * kHeads * kDim); ++i) {
      ASSERT_EQ(outs["rows."][i], outs["paged."][i]) << length << ", " << i;
      ASSERT_TRUE(std::isfinite(outs["rows."][i]));
    }
    // Causal, the last query sees all: (length - n + 1) + .. + length pairs.
    const double pairs = static_cast<double>(n * (2 * length - n + 1)) / 2;
    for (int node = 0; node < graph.num_nodes(); ++node) {
      const NodeInfo info = graph.describe(node);
      if (info.name.find("attend") == std::string::npos) continue;
      EXPECT_EQ(info.cost.flops, 4.0 * kDim * kHeads * pairs);
      EXPECT_EQ(info.cost.cache_bytes, length * 2 * kKvHeads * kDim * 4);
      EXPECT_NE(info.plan.find("block_kv"), std::string::npos);
    }
  }
  // The first row of the whole sequence sees one key: its own value.
  const std::vector<float>& values = caches["rows.values"];
  EXPECT_EQ(std::vector<float>(values.begin(), values.begin() + kDim), std::vector<float>(k.begin(), k.begin() + kDim));
}

// Caches of two blocks, written and read in any layout, against the calls themselves.
TEST(Graph, PagesInAnyLayout) {
  Context context = make_context();
  constexpr int64_t kHeads = 4, kKvHeads = 2, kDim = 8, kValueDim = 6, kTokens = 40;
  const PageSizes sizes = {
      .num_blocks = 2, .block_size = 32, .num_kv_heads = kKvHeads, .head_dim = kDim, .value_head_dim = kValueDim};
  std::vector<float> q = random_floats(kTokens * kHeads * kDim, 1), k = random_floats(kTokens * kKvHeads * kDim, 2),
                     v = random_floats(kTokens * kKvHeads * kValueDim, 3);
  const Tensor query = view(q, {kTokens, kHeads, kDim}), key = view(k, {kTokens, kKvHeads, kDim}),
               value = view(v, {kTokens, kKvHeads, kValueDim});
  int64_t slots[kTokens];
  for (int64_t i = 0; i < kTokens; ++i) slots[i] = i;
  const int64_t blocks[] = {0, 1}, length = kTokens;
  const ConstTensor slot_mapping = ConstTensor::contiguous(DType::i64, {kTokens}, slots);
  const ConstTensor table = ConstTensor::contiguous(DType::i64, {1, 2}, blocks);
  const ConstTensor lengths = ConstTensor::contiguous(DType::i64, {1}, &length);
  for (const auto& [layout, dtype] :
       {std::pair(PageLayout::norm, DType::f16), std::pair(PageLayout::panel32, DType::f32),
        std::pair(PageLayout::panel32, DType::bf16)}) {
    const std::string what = std::string(to_string(layout)) + " " + to_string(dtype);
    Buffer memory[4];
    Tensor pages[4];  // keys and values of the graph, then of the calls
    for (int i = 0; i < 4; ++i) {
      memory[i] = std::move(Buffer::allocate(1 << 13).value());
      std::fill_n(static_cast<char*>(memory[i].data()), memory[i].size_bytes(), '\0');
      pages[i] = (i % 2 == 0 ? key_pages : value_pages)(layout, dtype, sizes, memory[i].data());
    }
    Graph graph = make_graph();
    const Value keys = graph.cache("keys", dtype, Shape(pages[0])),
                values = graph.cache("values", dtype, Shape(pages[1]));
    graph.scatter_pa_kv_cache("write", graph.input("key", DType::f32, Shape(key)),
                              graph.input("value", DType::f32, Shape(value)),
                              graph.input("slots", DType::i64, {kTokens}), keys, values, {.layout = layout});
    graph.output("out", graph.paged_attention("attend", graph.input("query", DType::f32, Shape(query)), keys, values,
                                              {.block_table = graph.input("table", DType::i64, {1, 2}),
                                               .kv_lengths = graph.input("lengths", DType::i64, {1}),
                                               .kv_len = kTokens,
                                               .layout = layout},
                                              {.causal = true}));
    std::vector<float> out(kTokens * kHeads * kValueDim), expected(out.size());
    ASSERT_OK(graph.bind("keys", pages[0]));
    ASSERT_OK(graph.bind("values", pages[1]));
    ASSERT_OK(graph.bind("query", query));
    ASSERT_OK(graph.bind("key", key));
    ASSERT_OK(graph.bind("value", value));
    ASSERT_OK(graph.bind("slots", slot_mapping));
    ASSERT_OK(graph.bind("table", table));
    ASSERT_OK(graph.bind("lengths", lengths));
    ASSERT_OK(graph.bind("out", view(out, {kTokens, kHeads, kValueDim})));
    ASSERT_OK(graph.setup(context.machine()));
    ASSERT_OK(graph.execute(context));

    ASSERT_OK(scatter_pa_kv_cache(context, key, value, slot_mapping, pages[2], pages[3], {.layout = layout}));
    const auto as_batch = [](const Tensor& t) {
      Tensor batch = t.transposed(0, 1);
      for (int i = 3; i > 0; --i) batch.shape[i] = batch.shape[i - 1], batch.strides[i] = batch.strides[i - 1];
      batch.rank = 4, batch.shape[0] = 1, batch.strides[0] = 0;
      return batch;
    };
    ASSERT_OK(flash_attention_forward(context,
                                      {.query = as_batch(query),
                                       .key = pages[2],
                                       .value = pages[3],
                                       .block_table = table,
                                       .kv_lengths = lengths,
                                       .page_layout = layout},
                                      {.out = as_batch(view(expected, {kTokens, kHeads, kValueDim}))},
                                      {.causal = true}));
    EXPECT_EQ(out, expected) << what;
    EXPECT_TRUE(std::any_of(out.begin(), out.end(), [](float x) { return x != 0; })) << what;
    const NodeInfo attend = graph.describe(1);
    EXPECT_EQ(attend.cost.cache_bytes, kTokens * kKvHeads * (kDim + kValueDim) * size_bytes(dtype)) << what;
    EXPECT_EQ(attend.cost.flops, 2.0 * (kDim + kValueDim) * kHeads * kTokens * (kTokens + 1) / 2) << what;
    EXPECT_EQ(attend.plan.find("panel_pages") != std::string::npos, layout == PageLayout::panel32) << attend.plan;
  }
}

// What follows a product: bias, activation, residual (written in place where it may be), other types; against the
// calls.
TEST(Graph, ProductsWithWhatFollowsThem) {
  Context context = make_context();
  constexpr int64_t kRows = 6, kN = 24, kK = 16;
  std::vector<float> x = random_floats(kRows * kK, 1), w = random_floats(kN * kK, 2), bias = random_floats(kN, 3),
                     r = random_floats(kRows * kN / 2, 4), gated(r.size()), expected(r.size());
  const PackedWeight weight = std::move(PackedWeight::pack(context, view(w, {kN, kK})).value());
  std::vector<uint16_t> half(static_cast<size_t>(kRows * kN)), half_expected(half.size());
  const auto as_bf16 = [](std::vector<uint16_t>& v) { return Tensor::contiguous(DType::bf16, {kRows, kN}, v.data()); };
  Graph graph = make_graph();
  const Dim rows = graph.dim("rows", kRows);
  const Value in = graph.input("x", DType::f32, {rows, kK}), matrix = graph.weight("w", kN, kK),
              biases = graph.input("bias", DType::f32, {kN});
  const Shape result = {rows, kN / 2};
  const Value residual =
      graph.swiglu("doubled", graph.input("r", DType::f32, result), graph.input("r2", DType::f32, result));
  const Value product =
      graph.matmul("product", in, matrix, {.bias = biases, .activation = Activation::swiglu, .residual = residual});
  graph.output("y", graph.swiglu("gate", product, product));
  graph.output("z", graph.matmul("half", in, matrix, {.activation = Activation::gelu_tanh, .dtype = DType::bf16}));
  ASSERT_OK(graph.bind("x", view(x, {kRows, kK})));
  ASSERT_OK(graph.bind("w", weight));
  ASSERT_OK(graph.bind("bias", view(bias, {kN})));
  ASSERT_OK(graph.bind("r", view(r, {kRows, kN / 2})));
  ASSERT_OK(graph.bind("r2", view(r, {kRows, kN / 2})));
  ASSERT_OK(graph.bind("y", view(gated, {kRows, kN / 2})));
  ASSERT_OK(graph.bind("z", as_bf16(half)));
  ASSERT_OK(graph.setup(context.machine()));
  ASSERT_OK(graph.execute(context));
  const Tensor to = view(expected, {kRows, kN / 2});
  ASSERT_OK(swiglu(context, view(r, {kRows, kN / 2}), view(r, {kRows, kN / 2}), to));
  MatmulOptions options;
  options.bias = view(bias, {kN});
  options.activation = Activation::swiglu;
  options.residual = to;
  ASSERT_OK(matmul(context, view(x, {kRows, kK}), weight, to, options));
  ASSERT_OK(swiglu(context, to, to, to));
  EXPECT_EQ(gated, expected);
  ASSERT_OK(
      matmul(context, view(x, {kRows, kK}), weight, as_bf16(half_expected), {.activation = Activation::gelu_tanh}));
  EXPECT_EQ(half, half_expected);
  // The product lies where the residual was.
  EXPECT_EQ(graph.describe(1).offsets, graph.describe(0).offsets);
  EXPECT_EQ(graph.describe(1).plan, "f32, 6 x 24 x 16, bias, swiglu, residual");
  EXPECT_EQ(graph.describe(1).cost.flops, 2.0 * kRows * kN * kK);
  EXPECT_EQ(graph.describe(1).cost.tensor_bytes, 4 * (kRows * kK + kN + 2 * kRows * kN / 2));
}

// Every node that works by rows, in one graph, against the calls: bit for bit.
TEST(Graph, NodesByRowsEqualTheirOperators) {
  Context context = make_context();
  constexpr int64_t kTokens = 5, kHeads = 3, kDim = 8, kWidth = kHeads * kDim;
  std::vector<float> a = random_floats(kTokens * kWidth, 1), b = random_floats(kTokens * kWidth, 2),
                     w = random_floats(kWidth, 3), cos_cache = random_floats(50 * 4, 4),
                     sin_cache = random_floats(50 * 4, 5);
  std::vector<int64_t> positions = {3, 49, 0, 7, 20, 1, 1, 2, 3, 5, 8, 13, 21, 34, 4};
  const ConstTensor three_axes = ConstTensor::contiguous(DType::i64, {3, kTokens}, positions.data());
  const RopeSections sections = {.temporal = 2, .height = 1, .width = 1};
  std::map<std::string, std::vector<float>> outs;
  Graph graph = make_graph();
  const Dim tokens = graph.dim("tokens", kTokens);
  const Shape rows = {tokens, kWidth}, heads = {tokens, kHeads, kDim};
  const Value in_a = graph.input("a", DType::f32, rows), in_b = graph.input("b", DType::f32, rows),
              weight = graph.input("w", DType::f32, {kWidth}),
              places = graph.input("positions", DType::i64, {3, tokens}),
              cosines = graph.input("cos_cache", DType::f32, {50, 4}),
              sines = graph.input("sin_cache", DType::f32, {50, 4});
  const auto output = [&](const std::string& name, Value value) {
    outs[name].resize(static_cast<size_t>(kTokens * kWidth));
    graph.output(name, value);
  };
  const Graph::NormedSum sum = graph.add_rms_norm("add_norm", in_a, in_b, weight, {.eps = 0.5});
  const Value x = graph.add("again", sum.out, sum.sum);
  // Nobody reads the sum: it must not lie on the norm, though both could take the place of the one input that ends
  // here.
  const Graph::NormedSum unread = graph.add_rms_norm("unread", graph.add("x1", x, in_a), in_b, weight);
  output("normed", graph.layer_norm("layer", unread.out, {.eps = 0.25, .weight = weight, .bias = weight}));
  output("bare", graph.layer_norm("bare_layer", x));
  output("soft", graph.softmax("softmax", x, {.scale = 0.5f}));
  output("turned", graph.rope_cached("turn", graph.view(x, heads), places, {cosines, sines}, {.sections = sections}));
  const Graph::RopeTable table = graph.rope_table("table", places, 4, {.theta = 50, .sections = sections});
  output("back", graph.rope("turn_back", graph.view(x, heads), table, {.style = RopeStyle::pairs, .inverse = true}));
  output("gated", graph.swiglu("gate", x, {.swapped = true}));
  outs["gated"].resize(static_cast<size_t>(kTokens * kWidth / 2));

  ASSERT_OK(graph.bind("a", view(a, {kTokens, kWidth})));
  ASSERT_OK(graph.bind("b", view(b, {kTokens, kWidth})));
  ASSERT_OK(graph.bind("w", view(w, {kWidth})));
  ASSERT_OK(graph.bind("positions", three_axes));
  ASSERT_OK(graph.bind("cos_cache", view(cos_cache, {50, 4})));
  ASSERT_OK(graph.bind("sin_cache", view(sin_cache, {50, 4})));
  for (auto& [name, out] : outs) {
    const bool by_heads = name == "turned" || name == "back";
    ASSERT_OK(graph.bind(name, by_heads          ? view(out, {kTokens, kHeads, kDim})
                               : name == "gated" ? view(out, {kTokens, kWidth / 2})
                                                 : view(out, {kTokens, kWidth})));
  }
  ASSERT_OK(graph.setup(context.machine()));
  ASSERT_OK(graph.execute(context));

  const auto row_tensor = [&](std::vector<float>& v) { return view(v, {kTokens, kWidth}); };
  const auto head_tensor = [&](std::vector<float>& v) { return view(v, {kTokens, kHeads, kDim}); };
  const auto size = static_cast<size_t>(kTokens * kWidth);
  std::vector<float> out(size), total(size), both(size), expected(size), cos(kTokens * 4), sin(kTokens * 4);
  ASSERT_OK(add_rms_norm(context, row_tensor(a), row_tensor(b), view(w, {kWidth}), row_tensor(out), row_tensor(total),
                         {.eps = 0.5}));
  ASSERT_OK(add(context, row_tensor(out), row_tensor(total), row_tensor(both)));
  ASSERT_OK(layer_norm(context, row_tensor(both), row_tensor(expected)));
  EXPECT_EQ(outs["bare"], expected);
  ASSERT_OK(softmax(context, row_tensor(both), row_tensor(expected), {.scale = 0.5f}));
  EXPECT_EQ(outs["soft"], expected);
  ASSERT_OK(rope_cached(context, head_tensor(both), three_axes, view(cos_cache, {50, 4}), view(sin_cache, {50, 4}),
                        head_tensor(expected), {.sections = sections}));
  EXPECT_EQ(outs["turned"], expected);
  ASSERT_OK(rope_table(context, three_axes, view(cos, {kTokens, 4}), view(sin, {kTokens, 4}),
                       {.theta = 50, .sections = sections}));
  ASSERT_OK(rope(context, head_tensor(both), view(cos, {kTokens, 4}), view(sin, {kTokens, 4}), head_tensor(expected),
                 {.style = RopeStyle::pairs, .inverse = true}));
  EXPECT_EQ(outs["back"], expected);
  std::vector<float> gated(size / 2);
  ASSERT_OK(swiglu(context, row_tensor(both), view(gated, {kTokens, kWidth / 2}), {.swapped = true}));
  EXPECT_EQ(outs["gated"], gated);
  std::vector<float> x1(size);
  ASSERT_OK(add(context, row_tensor(both), row_tensor(a), row_tensor(x1)));
  ASSERT_OK(
      add_rms_norm(context, row_tensor(x1), row_tensor(b), view(w, {kWidth}), row_tensor(out), row_tensor(total)));
  ASSERT_OK(layer_norm(context, row_tensor(out), row_tensor(expected),
                       {.eps = 0.25, .weight = view(w, {kWidth}), .bias = view(w, {kWidth})}));
  EXPECT_EQ(outs["normed"], expected);
}

// The step's one node against the nodes it joins.
TEST(Graph, AStepInOneNode) {
  Context context = make_context();
  constexpr int64_t kTokens = 6, kHeads = 4, kKvHeads = 2, kDim = 8;
  const PageSizes sizes = {
      .num_blocks = 2, .block_size = 32, .num_kv_heads = kKvHeads, .head_dim = kDim, .value_head_dim = kDim};
  std::vector<float> q = random_floats(kTokens * kHeads * kDim, 1), k = random_floats(kTokens * kKvHeads * kDim, 2),
                     v = random_floats(kTokens * kKvHeads * kDim, 3), w = random_floats(kDim, 4);
  std::vector<int64_t> slots = {40, 2, -1, 63, 0, 7};
  std::vector<float> memory[4], outs[2];
  Graph graph = make_graph();
  const Value query = graph.input("query", DType::f32, {kTokens, kHeads, kDim}),
              key = graph.input("key", DType::f32, {kTokens, kKvHeads, kDim}),
              value = graph.input("value", DType::f32, {kTokens, kKvHeads, kDim}),
              weight = graph.input("weight", DType::f32, {kDim}), places = graph.input("slots", DType::i64, {kTokens});
  const Graph::RopeTable table = graph.rope_table("table", places, kDim / 2);
  for (const bool joined : {false, true}) {
    const std::string p = joined ? "joined." : "parts.";
    Value caches[2];
    for (int i = 0; i < 2; ++i) {
      std::vector<float>& pages = memory[2 * (joined ? 1 : 0) + i];
      pages.assign(2 * 32 * kKvHeads * kDim, 0.0f);
      const Tensor tensor = (i == 0 ? key_pages : value_pages)(PageLayout::panel32, DType::f32, sizes, pages.data());
      caches[i] = graph.cache(p + (i == 0 ? "keys" : "values"), DType::f32, Shape(tensor));
      ASSERT_OK(graph.bind(p + (i == 0 ? "keys" : "values"), tensor));
    }
    if (joined) {
      graph.output(
          p + "out",
          graph.rope_scatter_pa_kv_cache(
              p + "step",
              {.query = query, .key = key, .value = value, .table = table, .slots = places, .key_weight = weight},
              caches[0], caches[1], {.layout = PageLayout::panel32}));
    } else {
      graph.scatter_pa_kv_cache(p + "write",
                                graph.rope(p + "key", graph.rms_norm(p + "normed_key", key, weight), table), value,
                                places, caches[0], caches[1], {.layout = PageLayout::panel32});
      graph.output(p + "out", graph.rope(p + "query", query, table));
    }
    outs[joined].resize(q.size());
    ASSERT_OK(graph.bind(p + "out", view(outs[joined], {kTokens, kHeads, kDim})));
  }
  ASSERT_OK(graph.bind("query", view(q, {kTokens, kHeads, kDim})));
  ASSERT_OK(graph.bind("key", view(k, {kTokens, kKvHeads, kDim})));
  ASSERT_OK(graph.bind("value", view(v, {kTokens, kKvHeads, kDim})));
  ASSERT_OK(graph.bind("weight", view(w, {kDim})));
  ASSERT_OK(graph.bind("slots", ConstTensor::contiguous(DType::i64, {kTokens}, slots.data())));
  ASSERT_OK(graph.setup(context.machine()));
  ASSERT_OK(graph.execute(context));
  EXPECT_EQ(outs[0], outs[1]);
  EXPECT_EQ(memory[0], memory[2]);
  EXPECT_EQ(memory[1], memory[3]);
  EXPECT_TRUE(std::any_of(memory[2].begin(), memory[2].end(), [](float x) { return x != 0; }));
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

// --- Messages

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
            "graph test: gate (matmul): weight 'w' dim 1 (k) is 31, but x 'x' has k = 32");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.matmul("gate", g.input("x", DType::i32, {rows, 32}), g.weight("w", 48, 32));
            }),
            "graph test: gate (matmul): x 'x' is i32, expected f32 or bf16 or f16");
  EXPECT_EQ(setup_message(
                [](Graph& g, Dim rows) { g.matmul("gate", g.input("x", DType::f32, {rows}), g.weight("w", 48, 32)); }),
            "graph test: gate (matmul): x 'x' is [rows], expected [rows, k]");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.matmul("gate", g.input("x", DType::f32, {rows, 32}), g.input("w", DType::f32, {48, 32}));
            }),
            "graph test: gate (matmul): weight 'w' is a tensor, expected a packed weight");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              const Value x = g.input("x", DType::f32, {rows, 32});
              g.add("sum", x, g.input("z", DType::f32, {8, 32}));
            }),
            "graph test: sum (add): b 'z' is f32 [8, 32], but a 'x' is f32 [rows, 32]");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.rms_norm("norm", g.input("x", DType::f32, {rows, 32}), g.input("w", DType::f32, {31}));
            }),
            "graph test: norm (rms_norm): weight 'w' dim 0 (features) is 31, but x 'x' has features = 32");
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
            "graph test: t (rope_table): positions 'p' holds axes = 3, but positions 'p' has axes = 2");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.add_rms_norm("norm", g.input("a", DType::f32, {rows, 8}), g.input("b", DType::f32, {rows, 7}),
                             g.input("w", DType::f32, {8}));
            }),
            "graph test: norm (add_rms_norm): b 'b' is f32 [rows, 7], but a 'a' is f32 [rows, 8]");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.layer_norm("norm", g.input("x", DType::f32, {rows, 8}), {.bias = g.input("b", DType::f32, {7})});
            }),
            "graph test: norm (layer_norm): bias 'b' dim 0 (features) is 7, but x 'x' has features = 8");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.swiglu("act", g.input("x", DType::f32, {8, rows}), SwigluOptions());
            }),
            "graph test: act (swiglu): gate_up's last dimension is rows, but must be an even number");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.matmul("product", g.input("x", DType::f32, {rows, 32}), g.weight("w", 48, 32),
                       {.activation = Activation::swiglu, .residual = g.input("r", DType::f32, {rows, 48})});
            }),
            "graph test: product (matmul): residual 'r' is [rows, 48], but the result is [rows, 24]");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) {
              g.matmul("product", g.input("x", DType::f32, {rows, 32}), g.weight("w", 48, 32),
                       {.bias = g.input("b", DType::f32, {32})});
            }),
            "graph test: product (matmul): bias 'b' dim 0 (n) is 32, but weight 'w' has n = 48");
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
            "graph test: write (scatter_pa_kv_cache): key_cache 'keys' dim 3 (head_dim) is 9, but key 'k' has "
            "head_dim = 8");
  EXPECT_EQ(write_panels(DType::f32, {3, 2, 2, 8, 16}, {3, 2, 64, 8}),
            "graph test: write (scatter_pa_kv_cache): key_cache 'keys' dim 4 is 16, but a panel has 32 elements");
  EXPECT_EQ(write_panels(DType::f32, {3, 2, 2, 8, 32}, {3, 2, 32, 8}),
            "graph test: write (scatter_pa_kv_cache): key_cache 'keys' holds block_size = 64, but value_cache 'values' "
            "has block_size = 32");
  EXPECT_EQ(write_panels(DType::bf16, {3, 2, 2, 3, 64}, {3, 2, 32, 16}),
            "graph test: write (scatter_pa_kv_cache): key_cache 'keys' holds head_dim = 6, but key 'k' has "
            "head_dim = 8");
  EXPECT_EQ(write_panels(DType::bf16, {3, 2, 2, 4, 64}, {3, 2, 32, 14}),
            "graph test: write (scatter_pa_kv_cache): value_cache 'values' holds value_head_dim = 7, but value 'k' has "
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
            "graph test: 'x' dim 2 is 8, too large");
  EXPECT_EQ(setup_message([](Graph& g, Dim rows) { g.output("y", g.input("x", DType::f32, {rows})); }),
            "graph test: output 'y': 'x' is not the result of a node");
  EXPECT_EQ(setup_message([](Graph& g, Dim) { g.swiglu("act", Value(), Value()); }),
            "graph test: act (swiglu): up is no tensor of this graph");
  EXPECT_EQ(setup_message([](Graph& g, Dim) { g.dim("n", 0); }), "graph test: size 'n' has the bound 0, must be >= 1");
  EXPECT_EQ(setup_message([](Graph& g, Dim) { g.node({.name = "mine", .op = "op", .run = {}}); }),
            "graph test: mine (op): nothing to run");
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
  EXPECT_EQ(message(graph.set(Dim(4), 4)), "graph test: no such size to set");
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

}  // namespace
}  // namespace opst

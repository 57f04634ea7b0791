#include "opst/graph.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
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

// What a window hides is neither multiplied nor read.
TEST(Graph, CostOfAttentionCountsWhatTheWindowShows) {
  Graph graph = make_graph();
  AttentionOptions options;
  options.causal = true;
  options.window_left = 9;
  const Value keys = graph.input("keys", DType::f32, {100, 2, 8});
  graph.output("wide_out", graph.attention("wide", graph.input("q", DType::f32, {100, 4, 8}), keys, keys, options));
  graph.output("late_out", graph.attention("late", graph.input("last", DType::f32, {1, 4, 8}), keys, keys, options));
  std::vector<float> q(100 * 4 * 8), k(100 * 2 * 8), last(4 * 8), wide(q.size()), late(last.size());
  ASSERT_OK(graph.bind("q", view(q, {100, 4, 8})));
  ASSERT_OK(graph.bind("keys", view(k, {100, 2, 8})));
  ASSERT_OK(graph.bind("last", view(last, {1, 4, 8})));
  ASSERT_OK(graph.bind("wide_out", view(wide, {100, 4, 8})));
  ASSERT_OK(graph.bind("late_out", view(late, {1, 4, 8})));
  Context context = make_context();
  ASSERT_OK(graph.setup(context.machine()));
  EXPECT_EQ(graph.describe(0).value().cost.flops, 2.0 * 16 * 4 * (90 * 10 + 55));  // rows 0 to 9 see 1 to 10 keys
  EXPECT_EQ(graph.describe(1).value().cost.flops, 2.0 * 16 * 4 * 10);
  EXPECT_EQ(graph.describe(0).value().cost.cache_bytes, 100 * 2 * 16 * 4);
  EXPECT_EQ(graph.describe(1).value().cost.cache_bytes, 10 * 2 * 16 * 4);
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
      const NodeInfo info = info_of(graph, node);
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
    ASSERT_OK(flash_attention_forward(
        context,
        {.query = as_batch(query), .key = pages[2], .value = pages[3], .block_table = table, .kv_lengths = lengths},
        {.out = as_batch(view(expected, {kTokens, kHeads, kValueDim}))}, {.causal = true, .page_layout = layout}));
    EXPECT_EQ(out, expected) << what;
    EXPECT_TRUE(std::any_of(out.begin(), out.end(), [](float x) { return x != 0; })) << what;
    const NodeInfo attend = info_of(graph, 1);
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
  EXPECT_EQ(info_of(graph, 1).offsets, info_of(graph, 0).offsets);
  EXPECT_EQ(info_of(graph, 1).plan, "f32, 6 x 24 x 16, bias, swiglu, residual");
  EXPECT_EQ(info_of(graph, 1).cost.flops, 2.0 * kRows * kN * kK);
  EXPECT_EQ(info_of(graph, 1).cost.tensor_bytes, 4 * (kRows * kK + kN + 2 * kRows * kN / 2));
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

// rope_scatter_pa_kv_cache as one node, against the nodes that it joins: norm, rotation, scatter.
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

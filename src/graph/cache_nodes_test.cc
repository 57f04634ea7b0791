// Attention and the nodes of caches, against their operators.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "attention/reference.h"
#include "graph/test_graphs.h"

namespace opst {
namespace {

// What a window hides is neither multiplied nor read.
TEST(CacheNodes, CostOfAttentionCountsWhatTheWindowShows) {
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

TEST(CacheNodes, AttentionOverPagesAndRows) {
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

// Caches of two blocks, written and read in any layout and format, against the calls themselves.
TEST(CacheNodes, PagesInAnyLayout) {
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
  constexpr auto kNorm = PageLayout::norm, kPanel32 = PageLayout::panel32;
  for (const auto& [layout, name] :
       {std::pair(kNorm, "f16"), std::pair(kPanel32, "f16"), std::pair(kPanel32, "f32"), std::pair(kPanel32, "bf16"),
        std::pair(kNorm, "int8"), std::pair(kPanel32, "int8"), std::pair(kNorm, "int8_offset"),
        std::pair(kPanel32, "int8_offset"), std::pair(kNorm, "int4"), std::pair(kPanel32, "int4"),
        std::pair(kNorm, "int4_offset"), std::pair(kNorm, "f8_e4m3"), std::pair(kPanel32, "f8_e5m2")}) {
    const std::string what = std::string(to_string(layout)) + " " + name;
    KvFormat format = kv_format(name, kDim, kValueDim).value();
    if (format.dtype == DType::u8) format.key_groups = 2, format.value_groups = 3;
    const DType dtype = format.dtype;
    const bool scaled = format.key_groups > 0;
    Buffer memory[4], scale_memory[8];
    Tensor pages[4];  // keys and values of the graph, then of the calls
    Tensor lists[8];  // scales of keys and of values, offsets of both, likewise
    for (int i = 0; i < 4; ++i) {
      memory[i] = std::move(Buffer::allocate(1 << 13).value());
      std::fill_n(static_cast<char*>(memory[i].data()), memory[i].size_bytes(), '\0');
      pages[i] = (i % 2 == 0 ? key_pages : value_pages)(layout, dtype, sizes, memory[i].data());
    }
    for (int i = 0; i < 8; ++i) {
      if (!scaled || (i % 4 >= 2 && !format.has_offsets)) continue;
      scale_memory[i] = std::move(Buffer::allocate(1 << 13).value());
      std::fill_n(static_cast<char*>(scale_memory[i].data()), scale_memory[i].size_bytes(), '\0');
      lists[i] = i % 2 == 0 ? key_scale_pages(layout, sizes, format.key_groups, scale_memory[i].data())
                            : value_scale_pages(layout, sizes, format.value_groups, scale_memory[i].data());
    }
    const PageScales scales = {lists[4], lists[5], lists[6], lists[7]};
    Graph graph = make_graph();
    const Value keys = graph.cache("keys", dtype, Shape(pages[0])),
                values = graph.cache("values", dtype, Shape(pages[1]));
    ScaleValues of_graph;
    Value* const values_of[] = {&of_graph.key, &of_graph.value, &of_graph.key_offsets, &of_graph.value_offsets};
    for (int i = 0; i < 4; ++i) {
      if (!lists[i]) continue;
      *values_of[i] = graph.cache("list" + std::to_string(i), DType::f32, Shape(lists[i]));
      ASSERT_OK(graph.bind("list" + std::to_string(i), lists[i]));
    }
    graph.scatter_pa_kv_cache("write", graph.input("key", DType::f32, Shape(key)),
                              graph.input("value", DType::f32, Shape(value)),
                              graph.input("slots", DType::i64, {kTokens}), keys, values, {.layout = layout}, of_graph);
    graph.output("out", graph.paged_attention("attend", graph.input("query", DType::f32, Shape(query)), keys, values,
                                              {.block_table = graph.input("table", DType::i64, {1, 2}),
                                               .kv_lengths = graph.input("lengths", DType::i64, {1}),
                                               .kv_len = kTokens,
                                               .scales = of_graph},
                                              {.causal = true, .page_layout = layout}));
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

    ASSERT_OK(scatter_pa_kv_cache(context, key, value, slot_mapping, pages[2], pages[3], {layout, scales}));
    ASSERT_OK(flash_attention_forward(context,
                                      {.query = as_batch(query),
                                       .key = pages[2],
                                       .value = pages[3],
                                       .block_table = table,
                                       .kv_lengths = lengths,
                                       .key_scales = scales.key,
                                       .value_scales = scales.value,
                                       .key_offsets = scales.key_offsets,
                                       .value_offsets = scales.value_offsets},
                                      {.out = as_batch(view(expected, {kTokens, kHeads, kValueDim}))},
                                      {.causal = true, .page_layout = layout}));
    EXPECT_EQ(out, expected) << what;
    EXPECT_TRUE(std::any_of(out.begin(), out.end(), [](float x) { return x != 0; })) << what;
    const NodeInfo attend = info_of(graph, 1);
    const int64_t of_scales = (format.key_groups + format.value_groups) * 4 * (format.has_offsets ? 2 : 1);
    const int64_t row = (kDim + kValueDim) * size_bytes(dtype) / (dtype == DType::u8 ? 2 : 1) + of_scales;
    EXPECT_EQ(attend.cost.cache_bytes, kTokens * kKvHeads * row) << what;
    EXPECT_EQ(info_of(graph, 0).cost.cache_bytes, kTokens * kKvHeads * row) << what;
    EXPECT_EQ(attend.cost.flops, 2.0 * (kDim + kValueDim) * kHeads * kTokens * (kTokens + 1) / 2) << what;
    const bool as_they_are = layout == PageLayout::panel32 && !format.has_offsets && dtype != DType::u8;
    EXPECT_EQ(attend.plan.find("panel_pages") != std::string::npos, as_they_are) << attend.plan;
  }
}

// rope_scatter_pa_kv_cache as one node, against the nodes that it joins: norm, rotation, scatter.
TEST(CacheNodes, AStepInOneNode) {
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

// Sequences of different lengths in one node: one query of each, and different numbers of them. Against one call for
// each sequence.
TEST(CacheNodes, SequencesOfDifferentLengths) {
  Context context = make_context();
  constexpr int64_t kHeads = 4, kKvHeads = 2, kDim = 8, kValueDim = 6, kBlocks = 40, kMaxBlocks = 8, kMaxBatch = 5,
                    kMaxTokens = 12;
  const PageSizes sizes = {
      .num_blocks = kBlocks, .block_size = 4, .num_kv_heads = kKvHeads, .head_dim = kDim, .value_head_dim = kValueDim};
  std::vector<float> q = random_floats(kMaxTokens * kHeads * kDim, 1),
                     k = random_floats(kBlocks * 4 * kKvHeads * kDim, 2),
                     v = random_floats(kBlocks * 4 * kKvHeads * kValueDim, 3), out(kMaxTokens * kHeads * kValueDim),
                     decoded(kMaxBatch * kHeads * kValueDim), alone(out.size());
  const Tensor keys = key_pages(PageLayout::norm, DType::f32, sizes, k.data()),
               values = value_pages(PageLayout::norm, DType::f32, sizes, v.data()),
               query = view(q, {kMaxTokens, kHeads, kDim}), alone_out = view(alone, {kMaxTokens, kHeads, kValueDim});
  std::vector<int32_t> blocks(kMaxBatch * kMaxBlocks);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<int32_t>(i * 7 % kBlocks);
  const auto ints = [](const std::vector<int32_t>& numbers) {
    return ConstTensor::contiguous(DType::i32, {static_cast<int64_t>(numbers.size())}, numbers.data());
  };
  const ConstTensor table = ConstTensor::contiguous(DType::i32, {kMaxBatch, kMaxBlocks}, blocks.data());

  Graph graph = make_graph();
  const Dim batch = graph.dim("batch", kMaxBatch), starts = graph.dim("starts", kMaxBatch + 1),
            tokens = graph.dim("tokens", kMaxTokens), kv_len = graph.dim("kv_len", 4 * kMaxBlocks);
  Graph::Pages pages = {.block_table = graph.input("table", DType::i32, {batch, kMaxBlocks}),
                        .kv_lengths = graph.input("lengths", DType::i32, {batch}),
                        .kv_len = kv_len};
  const Value key_cache = graph.cache("keys", DType::f32, Shape(keys)),
              value_cache = graph.cache("values", DType::f32, Shape(values));
  graph.output("decoded", graph.paged_attention("decode", graph.input("last", DType::f32, {batch, kHeads, kDim}),
                                                key_cache, value_cache, pages, {.causal = true}));
  pages.cu_seqlens_q = graph.input("query_starts", DType::i32, {starts});
  graph.output("out", graph.paged_attention("attend", graph.input("query", DType::f32, {tokens, kHeads, kDim}),
                                            key_cache, value_cache, pages, {.causal = true}));
  ASSERT_OK(graph.bind("keys", keys));
  ASSERT_OK(graph.bind("values", values));
  ASSERT_OK(graph.bind("table", table));
  ASSERT_OK(graph.bind("last", query));
  ASSERT_OK(graph.bind("query", query));
  ASSERT_OK(graph.bind("decoded", view(decoded, {kMaxBatch, kHeads, kValueDim})));
  ASSERT_OK(graph.bind("out", view(out, {kMaxTokens, kHeads, kValueDim})));
  ASSERT_OK(graph.setup(context.machine()));

  struct Step {
    std::vector<int32_t> lengths, starts;
  };
  const std::vector<Step> steps = {{{9, 1, 16, 5, 30}, {0, 3, 4, 4, 8, 10}},
                                   {{2, 7}, {0, 2, 3}},
                                   {{32}, {0, kMaxTokens}},
                                   {{4, 31, 8}, {0, 4, 11, 12}}};
  for (const Step& step : steps) {
    const auto n = static_cast<int64_t>(step.lengths.size());
    const int32_t longest = *std::max_element(step.lengths.begin(), step.lengths.end());
    ASSERT_OK(graph.bind("lengths", ints(step.lengths)));
    ASSERT_OK(graph.bind("query_starts", ints(step.starts)));
    ASSERT_OK(graph.set(batch, n));
    ASSERT_OK(graph.set(starts, n + 1));
    ASSERT_OK(graph.set(tokens, step.starts.back()));
    ASSERT_OK(graph.set(kv_len, longest));
    ASSERT_OK(graph.execute(context));
    const auto expect_alone = [&](int64_t b, int64_t first, int64_t count, const std::vector<float>& results) {
      if (count == 0) return;
      const auto at = static_cast<size_t>(b);
      ASSERT_OK(flash_attention_forward(context,
                                        {.query = as_batch(query.narrowed(0, first, count)),
                                         .key = keys,
                                         .value = values,
                                         .block_table = table.narrowed(0, b, 1),
                                         .kv_lengths = ints(step.lengths).narrowed(0, b, 1)},
                                        {.out = as_batch(alone_out.narrowed(0, first, count))}, {.causal = true}));
      for (int64_t i = first * kHeads * kValueDim; i < (first + count) * kHeads * kValueDim; ++i) {
        ASSERT_NEAR(results[static_cast<size_t>(i)], alone[static_cast<size_t>(i)], 1e-5)
            << n << " sequences, " << b << " of " << step.lengths[at] << " keys, element " << i;
      }
    };
    for (int64_t b = 0; b < n; ++b) {
      const int32_t first = step.starts[static_cast<size_t>(b)];
      expect_alone(b, first, step.starts[static_cast<size_t>(b) + 1] - first, out);
      expect_alone(b, b, 1, decoded);
    }
    const NodeInfo decode = info_of(graph, 0), attend = info_of(graph, 1);
    EXPECT_EQ(decode.cost.flops, 2.0 * (kDim + kValueDim) * kHeads * static_cast<double>(n * longest));
    EXPECT_EQ(decode.cost.cache_bytes, n * longest * kKvHeads * (kDim + kValueDim) * 4);
    EXPECT_NE(decode.plan.find("block_kv"), std::string::npos) << decode.plan;
    EXPECT_NE(attend.plan.find("block_kv"), std::string::npos) << attend.plan;
  }
  // A size that does not go with the others is the operator's to refuse.
  ASSERT_OK(graph.set(starts, 3));
  const std::string message = graph.execute(context).message();
  EXPECT_EQ(message.rfind("graph test: attend: flash_attention_forward: ", 0), 0u) << message;
}

// Several queries of each sequence without cu_seqlens_q, one of which sees no key. Against each sequence alone, in
// float64.
TEST(CacheNodes, EquallyManyQueriesOfEachSequence) {
  Context context = make_context();
  constexpr int64_t kHeads = 4, kKvHeads = 2, kDim = 8, kValueDim = 6, kBlocks = 12, kMaxBlocks = 4, kBatch = 3,
                    kQueries = 3, kTokens = kBatch * kQueries;
  const PageSizes sizes = {
      .num_blocks = kBlocks, .block_size = 4, .num_kv_heads = kKvHeads, .head_dim = kDim, .value_head_dim = kValueDim};
  std::vector<float> q = random_floats(kTokens * kHeads * kDim, 1), k = random_floats(kBlocks * 4 * kKvHeads * kDim, 2),
                     v = random_floats(kBlocks * 4 * kKvHeads * kValueDim, 3), out(kTokens * kHeads * kValueDim, 7.0f);
  const Tensor keys = key_pages(PageLayout::norm, DType::f32, sizes, k.data()),
               values = value_pages(PageLayout::norm, DType::f32, sizes, v.data()),
               query = view(q, {kTokens, kHeads, kDim});
  std::vector<int32_t> blocks(kBatch * kMaxBlocks), numbers = {9, 2, 16};
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<int32_t>(i * 7 % kBlocks);
  const ConstTensor table = ConstTensor::contiguous(DType::i32, {kBatch, kMaxBlocks}, blocks.data()),
                    lengths = ConstTensor::contiguous(DType::i32, {kBatch}, numbers.data());
  const AttentionOptions options = {.causal = true};

  Graph graph = make_graph();
  const Value caches[] = {graph.cache("keys", DType::f32, Shape(keys)),
                          graph.cache("values", DType::f32, Shape(values))};
  graph.output("out",
               graph.paged_attention("attend", graph.input("query", DType::f32, Shape(query)), caches[0], caches[1],
                                     {.block_table = graph.input("table", DType::i32, Shape(table)),
                                      .kv_lengths = graph.input("lengths", DType::i32, Shape(lengths)),
                                      .kv_len = 16},
                                     options));
  ASSERT_OK(graph.bind("keys", keys));
  ASSERT_OK(graph.bind("values", values));
  ASSERT_OK(graph.bind("table", table));
  ASSERT_OK(graph.bind("lengths", lengths));
  ASSERT_OK(graph.bind("query", query));
  ASSERT_OK(graph.bind("out", view(out, {kTokens, kHeads, kValueDim})));
  ASSERT_OK(graph.setup(context.machine()));
  ASSERT_OK(graph.execute(context));

  for (int64_t b = 0; b < kBatch; ++b) {
    const AttentionInputs alone = {.query = as_batch(query.narrowed(0, b * kQueries, kQueries)),
                                   .key = keys,
                                   .value = values,
                                   .block_table = table.narrowed(0, b, 1),
                                   .kv_lengths = lengths.narrowed(0, b, 1)};
    for (int64_t i = 0; i < kQueries; ++i) {
      for (int64_t h = 0; h < kHeads; ++h) {
        const std::vector<double> row = attention::reference_row(alone, options, 0, h, i).out;
        for (int64_t d = 0; d < kValueDim; ++d) {
          const auto at = static_cast<size_t>((((b * kQueries + i) * kHeads) + h) * kValueDim + d);
          ASSERT_NEAR(out[at], row[static_cast<size_t>(d)], 1e-5)
              << "sequence " << b << ", query " << i << ", head " << h;
        }
      }
    }
  }
  // The first of three queries sees none of two keys.
  EXPECT_EQ(out[static_cast<size_t>(kQueries * kHeads * kValueDim)], 0);
  const NodeInfo attend = info_of(graph, 0);
  EXPECT_EQ(attend.cost.flops, 2.0 * (kDim + kValueDim) * kHeads * kBatch * (14 + 15 + 16));
  EXPECT_EQ(attend.cost.cache_bytes, kBatch * 16 * kKvHeads * (kDim + kValueDim) * 4);
  EXPECT_NE(attend.plan.find("block_kv"), std::string::npos) << attend.plan;
}

// Decoding from norm pages, where the rows of a token's heads are neighbours: the plan is that of the call.
TEST(CacheNodes, PlansAreThoseOfTheCalls) {
  Context context = make_context();
  for (const PageLayout layout : {PageLayout::norm, PageLayout::panel32}) {
    const PageSizes sizes = {1, 32, 2, 8, 8};
    std::vector<float> k(32 * 2 * 8), v(k.size()), q(32 * 4 * 8), out(q.size());
    const Tensor keys = key_pages(layout, DType::f32, sizes, k.data()),
                 values = value_pages(layout, DType::f32, sizes, v.data()), query = view(q, {32, 4, 8});
    const std::vector<int32_t> blocks(32, 0), numbers(32, 20);
    const AttentionInputs in = {.query = as_batch(query).transposed(0, 2),
                                .key = keys,
                                .value = values,
                                .block_table = ConstTensor::contiguous(DType::i32, {32, 1}, blocks.data()),
                                .kv_lengths = ConstTensor::contiguous(DType::i32, {32}, numbers.data())};
    const AttentionOptions options = {.causal = true, .page_layout = layout};
    Graph graph = make_graph();
    const Value caches[] = {graph.cache("keys", DType::f32, Shape(keys)),
                            graph.cache("values", DType::f32, Shape(values))};
    graph.output("out",
                 graph.paged_attention("attend", graph.input("query", DType::f32, Shape(query)), caches[0], caches[1],
                                       {.block_table = graph.input("table", DType::i32, Shape(in.block_table)),
                                        .kv_lengths = graph.input("lengths", DType::i32, Shape(in.kv_lengths)),
                                        .kv_len = 20},
                                       options));
    ASSERT_OK(graph.bind("keys", keys));
    ASSERT_OK(graph.bind("values", values));
    ASSERT_OK(graph.bind("table", in.block_table));
    ASSERT_OK(graph.bind("lengths", in.kv_lengths));
    ASSERT_OK(graph.bind("query", query));
    ASSERT_OK(graph.bind("out", view(out, {32, 4, 8})));
    ASSERT_OK(graph.setup(context.machine()));
    const Result<AttentionProblem> problem = attention_problem(in, options);
    ASSERT_TRUE(problem.ok()) << problem.status().message();
    EXPECT_EQ(info_of(graph, 0).plan, to_string(plan_attention(problem.value(), context.machine())));
    EXPECT_EQ(info_of(graph, 0).plan.find("2 heads in turn") != std::string::npos, layout == PageLayout::norm);
  }
}

// Without sequences there are no queries; with cu_seqlens_q there may be, which see no key.
TEST(CacheNodes, NoSequences) {
  Context context = make_context();
  std::vector<float> numbers = random_floats(2 * 4 * 2 * 8, 1), none(1, 7.0f), out(3 * 4 * 8, 7.0f);
  const std::vector<int32_t> integers = {0};
  const auto ints = [&](std::initializer_list<int64_t> shape) {
    return ConstTensor::contiguous(DType::i32, shape, integers.data());
  };
  Graph graph = make_graph();
  const Value cache = graph.cache("cache", DType::f32, {2, 4, 2, 8});
  Graph::Pages pages = {.block_table = graph.input("table", DType::i32, {0, 2}),
                        .kv_lengths = graph.input("lengths", DType::i32, {0}),
                        .kv_len = 8};
  graph.output("none",
               graph.paged_attention("decode", graph.input("last", DType::f32, {0, 4, 8}), cache, cache, pages));
  pages.cu_seqlens_q = graph.input("starts", DType::i32, {1});
  graph.output("out",
               graph.paged_attention("attend", graph.input("query", DType::f32, {3, 4, 8}), cache, cache, pages));
  ASSERT_OK(graph.bind("cache", view(numbers, {2, 4, 2, 8})));
  ASSERT_OK(graph.bind("table", ints({0, 2})));
  ASSERT_OK(graph.bind("lengths", ints({0})));
  ASSERT_OK(graph.bind("starts", ints({1})));
  ASSERT_OK(graph.bind("last", view(numbers, {0, 4, 8})));
  ASSERT_OK(graph.bind("query", view(numbers, {3, 4, 8})));
  ASSERT_OK(graph.bind("none", view(none, {0, 4, 8})));
  ASSERT_OK(graph.bind("out", view(out, {3, 4, 8})));
  ASSERT_OK(graph.setup(context.machine()));
  ASSERT_OK(graph.execute(context));
  EXPECT_EQ(none, std::vector<float>(none.size(), 7.0f));
  EXPECT_EQ(out, std::vector<float>(out.size(), 0.0f));
  for (const int node : {0, 1}) {
    const NodeInfo info = info_of(graph, node);
    EXPECT_EQ(info.cost.flops, 0);
    EXPECT_EQ(info.cost.cache_bytes, 0);
    EXPECT_NE(info.plan, "");
  }
}

}  // namespace
}  // namespace opst

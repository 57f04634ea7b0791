// The nodes that work by rows and products, against their operators.
#include <gtest/gtest.h>

#include <map>

#include "graph/test_graphs.h"

namespace opst {
namespace {

// What follows a product: bias, activation, residual (written in place where it may be), other types; against the
// calls.
TEST(Nodes, ProductsWithWhatFollowsThem) {
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
  EXPECT_EQ(info_of(graph, 1).plan,
            "f32, 6 x 24 x 16, bias, swiglu, residual: few_rows, up to 8 rows: reading the weight is the time");
  EXPECT_EQ(info_of(graph, 1).cost.flops, 2.0 * kRows * kN * kK);
  EXPECT_EQ(info_of(graph, 1).cost.tensor_bytes, 4 * (kRows * kK + kN + 2 * kRows * kN / 2));
}

// Every node that works by rows, in one graph, against the calls: bit for bit.
TEST(Nodes, NodesByRowsEqualTheirOperators) {
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

}  // namespace
}  // namespace opst

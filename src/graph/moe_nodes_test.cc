// The node of a mixture's experts, against the operators that it calls.
#include <gtest/gtest.h>

#include <cmath>

#include "graph/test_graphs.h"

namespace opst {
namespace {

constexpr int64_t kTokens = 7, kWidth = 32, kSize = 16, kExperts = 5, kUsed = 2;

struct Experts {
  Context context = make_context();
  std::vector<float> gate_up_values = random_floats(kExperts * 2 * kSize * kWidth, 1),
                     down_values = random_floats(kExperts * kWidth * kSize, 2), x = random_floats(kTokens * kWidth, 3),
                     logits = random_floats(kTokens * kExperts, 4), residual = random_floats(kTokens * kWidth, 5),
                     y = std::vector<float>(x.size());
  PackedWeight gate_up = pack(gate_up_values, 2 * kSize, kWidth), down = pack(down_values, kWidth, kSize);

  PackedWeight pack(std::vector<float>& values, int64_t n, int64_t k) {
    return std::move(PackedWeight::pack_stack(context, view(values, {kExperts, n, k})).value());
  }
};

// The names of the graph's values; sizes that a test may change.
struct Sizes {
  int64_t logits = kExperts, gate_up = 2 * kSize, down_experts = kExperts, top_k = kUsed;
};
Graph graph_of(Dim& tokens, const Sizes& sizes = {}, const MoeGatingOptions& gating = {.renormalise = true}) {
  Graph g = make_graph();
  tokens = g.dim("tokens", kTokens);
  const Value layer = g.moe_layer("ffn",
                                  {.x = g.input("x", DType::f32, {tokens, kWidth}),
                                   .router_logits = g.input("logits", DType::f32, {tokens, sizes.logits}),
                                   .gate_up = g.weight_stack("gate_up", kExperts, sizes.gate_up, kWidth),
                                   .down = g.weight_stack("down", sizes.down_experts, kWidth, kSize),
                                   .residual = g.input("residual", DType::f32, {tokens, kWidth})},
                                  {.top_k = sizes.top_k, .gating = gating});
  g.output("y", layer);
  return g;
}

TEST(MoeNodes, EqualsTheEquationsForAnyNumberOfTokens) {
  Experts e;
  Dim tokens;
  Graph graph = graph_of(tokens, {}, {.renormalise = true, .routed_scaling_factor = 1.5f});
  ASSERT_OK(graph.setup(e.context.machine()));
  ASSERT_OK(graph.bind("x", view(e.x, {kTokens, kWidth})));
  ASSERT_OK(graph.bind("logits", view(e.logits, {kTokens, kExperts})));
  ASSERT_OK(graph.bind("residual", view(e.residual, {kTokens, kWidth})));
  ASSERT_OK(graph.bind("gate_up", e.gate_up));
  ASSERT_OK(graph.bind("down", e.down));
  ASSERT_OK(graph.bind("y", view(e.y, {kTokens, kWidth})));
  for (const int64_t count : {int64_t{1}, kTokens}) {
    ASSERT_OK(graph.set(tokens, count));
    ASSERT_OK(graph.execute(e.context));
    for (int64_t t = 0; t < count; ++t) {
      const float* logits = e.logits.data() + t * kExperts;
      int64_t best = 0, second = -1;
      for (int64_t i = 1; i < kExperts; ++i) best = logits[i] > logits[best] ? i : best;
      for (int64_t i = 0; i < kExperts; ++i) {
        if (i != best && (second < 0 || logits[i] > logits[second])) second = i;
      }
      std::vector<double> expected(kWidth);
      double weights = 0;
      for (const int64_t expert : {best, second}) weights += std::exp(static_cast<double>(logits[expert]));
      for (const int64_t expert : {best, second}) {
        const double weight = 1.5 * std::exp(static_cast<double>(logits[expert])) / weights;
        for (int64_t h = 0; h < kSize; ++h) {
          double gate = 0, up = 0;
          for (int64_t i = 0; i < kWidth; ++i) {
            const double x = e.x[static_cast<size_t>(t * kWidth + i)];
            const auto row = (expert * 2 * kSize + h) * kWidth + i;
            gate += x * e.gate_up_values[static_cast<size_t>(row)];
            up += x * e.gate_up_values[static_cast<size_t>(row + kSize * kWidth)];
          }
          const double hidden = gate / (1 + std::exp(-gate)) * up;
          for (int64_t i = 0; i < kWidth; ++i) {
            expected[static_cast<size_t>(i)] +=
                weight * hidden * e.down_values[static_cast<size_t>((expert * kWidth + i) * kSize + h)];
          }
        }
      }
      double size = 0;
      for (const double value : expected) size = std::max(size, std::fabs(value));
      for (int64_t i = 0; i < kWidth; ++i) {
        const auto at = static_cast<size_t>(t * kWidth + i);
        EXPECT_NEAR(e.y[at], expected[static_cast<size_t>(i)] + e.residual[at], 1e-5 * size) << count << " " << at;
      }
    }
  }
}

TEST(MoeNodes, SaysWhatItCosts) {
  Experts e;
  Dim tokens;
  Graph graph = graph_of(tokens);
  ASSERT_OK(graph.setup(e.context.machine()));
  ASSERT_OK(graph.bind("gate_up", e.gate_up));
  ASSERT_OK(graph.bind("down", e.down));
  const int64_t each = (e.gate_up.size_bytes() + e.down.size_bytes()) / kExperts;
  ASSERT_OK(graph.set(tokens, 1));
  NodeInfo info = info_of(graph, 0);
  EXPECT_EQ(info.op, std::string("moe_layer"));
  EXPECT_EQ(info.cost.flops, 2.0 * kUsed * 3 * kWidth * kSize);
  EXPECT_EQ(info.cost.weight_bytes, kUsed * each);
  EXPECT_EQ(info.plan.rfind("5 experts of 16, 2 used by each token: gate and up f32, down f32, " +
                                std::to_string(each) + " bytes each",
                            0),
            0u)
      << info.plan;
  ASSERT_OK(graph.set(tokens, kTokens));
  EXPECT_EQ(info_of(graph, 0).cost.weight_bytes, kExperts * each);
}

TEST(MoeNodes, ContradictionsAreNamed) {
  Context context = make_context();
  const auto refusal = [&](const Sizes& sizes) {
    Dim tokens;
    return graph_of(tokens, sizes).setup(context.machine()).message();
  };
  EXPECT_EQ(refusal({}), "");
  EXPECT_EQ(refusal({.logits = 4}),
            "graph test: ffn (moe_layer): gate_up 'gate_up' dim 0 (num_experts) is 5, but router_logits 'logits' set "
            "num_experts = 4");
  EXPECT_EQ(refusal({.gate_up = 2 * kSize - 1}),
            "graph test: ffn (moe_layer): gate_up dim 1 is 31, but must be 2 * ffn_size = 32");
  EXPECT_EQ(refusal({.down_experts = 6}),
            "graph test: ffn (moe_layer): down 'down' dim 0 (num_experts) is 6, but router_logits 'logits' set "
            "num_experts = 5");
  EXPECT_EQ(refusal({.top_k = 6}), "graph test: ffn (moe_layer): top_k is 6, must be 1 to num_experts = 5");
  EXPECT_EQ(refusal({.top_k = 0}), "graph test: ffn (moe_layer): top_k is 0, must be 1 to num_experts = 5");
}

TEST(MoeNodes, AStackIsNoMatrix) {
  Experts e;
  Graph graph = make_graph();
  graph.weight("one", 2 * kSize, kWidth);
  graph.weight_stack("six", 6, 2 * kSize, kWidth);
  EXPECT_EQ(graph.bind("one", e.gate_up).message(), "graph test: weight 'one' is a stack of 5, expected one matrix");
  EXPECT_EQ(graph.bind("six", e.gate_up).message(), "graph test: weight 'six' dim 0 (count) is 5, expected 6");
}

}  // namespace
}  // namespace opst

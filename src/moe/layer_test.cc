// moe_layer_forward: the bits of the sequence it stands for, the equations in double, its refusals and its memory.
#include <gtest/gtest.h>

#include <cmath>

#include "core/text.h"
#include "moe/test_layer.h"
#include "testing/count_allocations.h"

namespace opst {
namespace {

using namespace test;
using reference::Doubles;

LayerSizes drawn_sizes(Random& random) {
  LayerSizes s;
  s.tokens = random.pick<int64_t>({0, 1, 2, 3, 9, 40, 300, random.integer(10, 70)});  // 300: several waves
  s.hidden = 32 * random.pick<int64_t>({1, 2, 3, 8});
  s.intermediate = 32 * random.pick<int64_t>({1, 2, 3});
  s.experts = random.pick<int64_t>({1, 2, 5, 16});
  s.top_k = random.integer(1, std::min<int64_t>(s.experts, 3));
  if (random.chance(0.3)) {
    s.begin = random.integer(0, s.experts - 1);
    s.end = random.integer(s.begin + 1, s.experts);
  }
  return s;
}

TEST(MoeLayer, HasTheBitsOfTheSequence) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (int round = 0; round < 6; ++round) {
      const LayerSizes sizes = drawn_sizes(random);
      const DType dtype = random.pick({DType::f32, DType::bf16, DType::f16});
      const auto kind = random.pick({Weights::floats, Weights::blocks, Weights::int8, Weights::int4});
      const LayerCase c(t.context, sizes, dtype, kind, random);
      Matrix expected(dtype, sizes.tokens, sizes.hidden, false, Guard::after);
      Matrix out(dtype, sizes.tokens, sizes.hidden, random.chance(0.5), Guard::after);
      expect_sequence(t.context, c, expected.tensor);
      const Status status = c.run(t.context, out.tensor);
      ASSERT_TRUE(status.ok()) << status.message() << " " << c.about;
      ASSERT_TRUE(same_bits_or_nan(out.tensor, expected.tensor)) << t.name << ", " << c.about;
      EXPECT_TRUE(out.memory.slack_intact());
    }
  }
}

// Tensors of a small call, each of which a test may spoil.
struct SmallCall {
  static constexpr int64_t kTokens = 3, kHidden = 4, kSize = 2, kExperts = 3, kTopK = 2;
  Owned x{DType::f32, {kTokens, kHidden}}, logits{DType::f32, {kTokens, kExperts}}, ids{DType::i32, {kTokens, kTopK}},
      weights{DType::f32, {kTokens, kTopK}}, gate_up{DType::f32, {kExperts, 2 * kSize, kHidden}},
      down{DType::f32, {kExperts, kHidden, kSize}}, out{DType::f32, {kTokens, kHidden}}, gate{DType::f32, {kHidden}};
  MoeLayerInputs in{.x = x.tensor,
                    .topk_ids = ids.tensor,
                    .topk_weights = weights.tensor,
                    .experts = {.gate_up = gate_up.tensor, .down = down.tensor}};
  MoeLayerOutputs to{.out = out.tensor};
  MoeLayerOptions options;

  SmallCall() {
    Random random(1);
    for (const Owned* o : {&x, &logits, &weights, &gate_up, &down, &gate}) fill(o->tensor, Fill::normal, random);
    std::fill(out.bytes.begin(), out.bytes.end(), static_cast<unsigned char>(0xee));
  }
  void use_logits() {
    in.topk_ids = in.topk_weights = {};
    in.logits = logits.tensor;
    options.top_k = kTopK;
  }
  Status run() const { return moe_layer_forward(contexts_with_threads(2).back().context, in, to, options); }
  void expect_refused(const std::string& message) const {
    const Status status = run();
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_EQ(status.message(), "moe_layer_forward: " + message);
    EXPECT_TRUE(std::all_of(out.bytes.begin(), out.bytes.end(), [](unsigned char b) { return b == 0xee; }));
  }
};

template <class Spoil>
void expect_refused(const std::string& message, const Spoil& spoil) {
  SmallCall call;
  ASSERT_TRUE(call.run().ok());
  std::fill(call.out.bytes.begin(), call.out.bytes.end(), static_cast<unsigned char>(0xee));
  spoil(call);
  call.expect_refused(message);
}

TEST(MoeLayer, RefusesWithAMessage) {
  using C = SmallCall;
  expect_refused("topk_ids[1, 0] is 3, but there are 3 experts (-1 is none)", [](C& c) { set(c.ids.tensor, 2, 3); });
  expect_refused("topk_ids[2, 1] is -2, but there are 3 experts (-1 is none)", [](C& c) { set(c.ids.tensor, 5, -2); });
  expect_refused("logits are given, but so are topk_ids or topk_weights, which are in their place",
                 [](C& c) { c.in.logits = c.logits.tensor; });
  expect_refused("top_k is 4, but the choice is among 3 experts", [](C& c) { c.use_logits(), c.options.top_k = 4; });
  expect_refused("top_k is -1, but must not be negative", [](C& c) { c.use_logits(), c.options.top_k = -1; });
  expect_refused("top_k is 3, but topk_ids dim 1 (top_k) is 2", [](C& c) { c.options.top_k = 3; });
  expect_refused("num_experts is 5, but logits dim 1 (num_experts) is 3",
                 [](C& c) { c.use_logits(), c.options.num_experts = 5; });
  expect_refused("gate_bias and finished belong to logits, which are absent",
                 [](C& c) { c.in.gate_bias = c.gate.tensor; });
  expect_refused("logits[1, 0] is NaN, which nan_is_error refuses", [](C& c) {
    c.use_logits(), c.options.gating.nan_is_error = true;
    set(c.logits.tensor, 3, std::nan(""));
  });
  expect_refused("the range of experts is [1, 3), but gate_up holds 3 of them",
                 [](C& c) { c.options.num_experts = 3, c.options.expert_begin = 1; });
  expect_refused("the range of experts is [0, 3), but must lie in [0, 2)",
                 [](C& c) { c.options.num_experts = 2, c.options.expert_end = 3; });
  expect_refused("down dim 1 (hidden) is 3, but x set hidden = 4",
                 [](C& c) { c.in.experts.down = c.down.tensor.narrowed(1, 0, 3); });
  expect_refused("down dim 2 (intermediate) is 1, but gate_up set intermediate = 2",
                 [](C& c) { c.in.experts.down = c.down.tensor.narrowed(2, 0, 1); });
  expect_refused("down dim 0 (experts of the range) is 2, but gate_up set experts of the range = 3",
                 [](C& c) { c.in.experts.down = c.down.tensor.narrowed(0, 0, 2); });
  expect_refused("gate_up has 3 outputs, but swiglu needs two halves",
                 [](C& c) { c.in.experts.gate_up = c.gate_up.tensor.narrowed(1, 0, 3); });
  expect_refused("up is given, but silu takes no two halves",
                 [](C& c) { c.options.activation = Activation::silu, c.in.experts.up = c.gate_up.tensor; });
  expect_refused("activation is 9, which is no Activation",
                 [](C& c) { c.options.activation = static_cast<Activation>(9); });
  expect_refused("activations is 2, which is no ActivationType",
                 [](C& c) { c.options.activations = static_cast<ActivationType>(2); });
  expect_refused("shared.up or shared.gate is given, but no weights of a shared expert are",
                 [](C& c) { c.in.shared.gate = c.gate.tensor; });
  expect_refused("shared.gate_up is given, but shared.down is not",
                 [](C& c) { c.in.shared.gate_up = c.gate_up.tensor.narrowed(0, 0, 1); });
  expect_refused("shared.down is given, but shared.gate_up is not",
                 [](C& c) { c.in.shared.down = c.down.tensor.narrowed(0, 0, 1); });
  expect_refused("shared.gate_up holds 3 weights, but a shared expert has one",
                 [](C& c) { c.in.shared = {.gate_up = c.gate_up.tensor, .down = c.down.tensor}; });
  expect_refused("topk_ids or topk_weights are asked for, but there are no logits to choose by",
                 [](C& c) { c.to.topk_weights = c.weights.tensor; });
  expect_refused("x is i32, but must be f32, bf16 or f16", [](C& c) { c.in.x.dtype = DType::i32; });
  expect_refused("out f32 [3, 4] overlaps x f32 [3, 4] in memory, but an output must not",
                 [](C& c) { c.in.x = c.out.tensor; });
  expect_refused("out f32 [3, 4] overlaps gate_up f32 [3, 4, 4] in memory, but an output must not",
                 [](C& c) { c.to.out = c.gate_up.tensor.selected(0, 0).narrowed(0, 0, 3); });
}

TEST(MoeLayer, TakesItsResidualInPlaceAndTellsItsRoutes) {
  SmallCall c, plain;
  plain.use_logits(), c.use_logits();
  ASSERT_TRUE(plain.run().ok());
  fill(c.out.tensor, Fill::ones, *std::make_unique<Random>(1));
  Owned ids(DType::i32, {3, 2}), weights(DType::f32, {3, 2}), counts(DType::i64, {3});
  c.in.residual = c.out.tensor;
  c.to = {c.out.tensor, ids.tensor, weights.tensor, counts.tensor};
  ASSERT_TRUE(c.run().ok());
  const std::vector<double> with = to_doubles(c.out.tensor), without = to_doubles(plain.out.tensor);
  for (size_t i = 0; i < with.size(); ++i) EXPECT_NEAR(with[i], without[i] + 1, 1e-5);
  std::vector<double> of_expert(3);
  for (int64_t t = 0; t < 3; ++t) {
    double total = 0;
    for (int64_t k = 0; k < 2; ++k) ++of_expert[static_cast<size_t>(get(ids.tensor, t * 2 + k))];
    for (int64_t k = 0; k < 2; ++k) total += get(weights.tensor, t * 2 + k);
    EXPECT_GT(total, 0);
  }
  EXPECT_EQ(to_doubles(counts.tensor), of_expert);
}

// E = 1 and E = 512, all tokens at one expert, the same expert twice in a token, slots that go nowhere, NaN logits.
TEST(MoeLayer, TakesEveryDistributionOfTokens) {
  Random random(seed());
  for (const TestContext& t : contexts_with_threads(3)) {
    for (const int64_t experts : {1, 512}) {
      for (const double same : {0.0, 5.0 / 8, -1.0}) {
        LayerSizes s{.tokens = 20, .hidden = 32, .intermediate = 32, .experts = experts, .top_k = 2};
        LayerCase c(t.context, s, DType::f32, Weights::floats, random);
        c.has_logits = false, c.options.top_k = 0, c.options.num_experts = experts;
        const auto id = same < 0 ? -1.0 : std::floor(same * static_cast<double>(experts));
        fill(c.ids.tensor, Fill::zeros, random);
        for (int64_t i = 0; i < s.tokens * s.top_k; ++i) set(c.ids.tensor, i, id);
        Owned out(DType::f32, {s.tokens, s.hidden}), expected(DType::f32, {s.tokens, s.hidden});
        expect_sequence(t.context, c, expected.tensor);
        ASSERT_TRUE(c.run(t.context, out.tensor).ok());
        ASSERT_TRUE(same_bits_or_nan(out.tensor, expected.tensor)) << t.name << ", " << c.about;
      }
    }
  }
  SmallCall c;
  c.use_logits();
  fill(c.logits.tensor, Fill::nan, random);
  Owned ids(DType::i64, {3, 2}), weights(DType::f32, {3, 2});
  c.to.topk_ids = ids.tensor, c.to.topk_weights = weights.tensor;
  ASSERT_TRUE(c.run().ok());
  EXPECT_EQ(to_doubles(ids.tensor), (std::vector<double>{0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(to_doubles(weights.tensor), std::vector<double>(6, 0.5));
}

// Matrices of experts [n, k] of one format.
struct Matrices {
  std::vector<std::vector<unsigned char>> bytes;
  std::vector<QuantMatrix> each;
  Matrices(QuantFormat format, int64_t count, int64_t n, int64_t k, Random& random) {
    for (int64_t e = 0; e < count; ++e) bytes.push_back(random_blocks(format, n, k, random));
    for (const auto& b : bytes) each.push_back({format, n, k, b.data(), static_cast<int64_t>(b.size())});
  }
};

TEST(MoeLayer, TakesGateAndUpInOneStackOrApart) {
  Random random(seed());
  for (const TestContext& t : contexts_with_threads(2)) {
    for (const QuantFormat format : {QuantFormat::q8_0, QuantFormat::q4_k, QuantFormat::f16}) {
      const Matrices gate(format, 3, 32, 256, random), up(format, 3, 32, 256, random),
          down(QuantFormat::f32, 3, 256, 32, random);
      std::vector<QuantMatrix> both;
      for (size_t e = 0; e < 3; ++e) both.insert(both.end(), {gate.each[e], up.each[e]});
      const auto packed = [&](const std::vector<QuantMatrix>& weights, int64_t parts) {
        Result<PackedWeight> stack = PackedWeight::pack_stack(t.context, weights, parts);
        EXPECT_TRUE(stack.ok()) << stack.status().message();
        return std::move(stack.value());
      };
      const PackedWeight one = packed(both, 2), of_gate = packed(gate.each, 1), of_up = packed(up.each, 1),
                         narrow = packed(down.each, 1);
      EXPECT_EQ(one.n(), 64);
      EXPECT_EQ(one.count(), 3);
      const Matrix x = drawn_matrix(DType::f32, 9, 256, random), logits = drawn_matrix(DType::f32, 9, 3, random);
      Owned in_one(DType::f32, {9, 256}), apart(DType::f32, {9, 256});
      MoeLayerInputs in{.x = x.tensor, .logits = logits.tensor, .experts = {.gate_up = one, .down = narrow}};
      ASSERT_TRUE(moe_layer_forward(t.context, in, {.out = in_one.tensor}, {.top_k = 2}).ok());
      in.experts.gate_up = of_gate, in.experts.up = of_up;
      ASSERT_TRUE(moe_layer_forward(t.context, in, {.out = apart.tensor}, {.top_k = 2}).ok());
      EXPECT_EQ(in_one.bytes, apart.bytes) << t.name << ", " << to_string(format);
      // The same of a shared expert.
      const PackedWeight shared = packed({both[0], both[1]}, 2), shared_gate = packed({gate.each[0]}, 1),
                         shared_up = packed({up.each[0]}, 1), shared_down = packed({down.each[0]}, 1);
      in.shared = {.gate_up = shared, .down = shared_down};
      ASSERT_TRUE(moe_layer_forward(t.context, in, {.out = in_one.tensor}, {.top_k = 2}).ok());
      EXPECT_NE(in_one.bytes, apart.bytes);
      in.shared.gate_up = shared_gate, in.shared.up = shared_up;
      const Status status = moe_layer_forward(t.context, in, {.out = apart.tensor}, {.top_k = 2});
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(in_one.bytes, apart.bytes) << t.name << ", shared, " << to_string(format);
    }
  }
  Context& context = contexts_with_threads(1).back().context;
  const auto refused = [&](const std::vector<QuantMatrix>& weights, int64_t parts, const std::string& message) {
    EXPECT_EQ(PackedWeight::pack_stack(context, weights, parts).status().message(),
              "PackedWeight::pack_stack: " + message);
  };
  const Matrices eight(QuantFormat::q8_0, 4, 8, 32, random), wide(QuantFormat::q8_0, 1, 16, 64, random),
      high(QuantFormat::q8_0, 2, 16, 32, random);
  refused(eight.each, 3, "parts is 3, but must be at least 1 and divide the 4 matrices");
  refused(eight.each, 0, "parts is 0, but must be at least 1 and divide the 4 matrices");
  refused(eight.each, 2, "weight 0 has 8 rows, not a multiple of 16, and another part below it");
  refused({high.each[0], wide.each[0]}, 2,
          "weight 1 is q8_0 with 64 columns, but weight 0, which it lies below, is q8_0 with 32");
  refused({high.each[0], eight.each[0], high.each[1], high.each[0]}, 2,
          "weight 3 is q8_0 [16, 32], but weight 1 is q8_0 [8, 32]");
}

TEST(MoeLayer, AllocatesNothingInTheSecondCall) {
  Random random(seed());
  const LayerSizes sizes{.tokens = 30};
  const LayerCase c(contexts_with_threads(1).back().context, sizes, DType::bf16, Weights::blocks, random);
  ContextOptions options;
  options.num_threads = 2;
  Result<Context> context = Context::create(options);
  Owned out(DType::bf16, {sizes.tokens, sizes.hidden});
  const MoeLayerInputs in = c.inputs();
  const auto run = [&] { return moe_layer_forward(context.value(), in, {.out = out.tensor}, c.options); };
  ASSERT_TRUE(run().ok());
  const int64_t before = num_allocations;
  const Status status = run();
  EXPECT_EQ(num_allocations - before, 0);
  EXPECT_TRUE(status.ok());
}

TEST(MoeLayer, PlansWaves) {
  const Machine machine{.cache = {.l2_bytes = 1 << 20, .l3_bytes_per_core = 1 << 20}};
  const MoeLayerProblem problem{.dtype = DType::bf16,
                                .tokens = 2048,
                                .top_k = 8,
                                .num_experts = 128,
                                .gate_up = {.n = 1536,
                                            .k = 2048,
                                            .x_dtype = DType::bf16,
                                            .format = QuantFormat::bf16,
                                            .activation = Activation::swiglu},
                                .down = {.n = 2048, .k = 768, .x_dtype = DType::bf16, .format = QuantFormat::bf16}};
  const std::vector<int64_t> counts(128, 128);
  const MoeLayerPlan plan = plan_moe_layer(problem, counts, machine, 2).value();
  EXPECT_EQ(plan.rows, 16384);
  EXPECT_EQ(plan.rows_per_wave, (2 << 20) / (768 * 2 + 4));  // half of the caches of two threads
  EXPECT_EQ(plan.waves, 13);                                 // ten experts of 128 rows each
  EXPECT_EQ(plan.gate_up.groups, 10);
  EXPECT_EQ(plan.expanded_bytes, 16384 * 2048 * 2);
  EXPECT_NE(to_string(plan).find("16384 rows of experts in 13 waves of at most 1361 (hidden rows take half of L2"),
            std::string::npos)
      << to_string(plan);
}

}  // namespace
}  // namespace opst

// moe_layer_backward, and the forward call beside it, against the equations in double and their central differences.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "moe/layer_reference.h"
#include "moe/test_layer.h"

namespace opst {
namespace {

using namespace test;
using reference::Doubles;
using reference::Indices;

// Tensors of a layer with weights that are tensors, and the same in double.
struct TensorLayer {
  LayerSizes s;
  int64_t shared = 0;  // intermediate size
  DType dtype;
  bool has_logits;
  Owned x, logits, ids, weights, gate_up, down, gate_up_bias, down_bias, shared_gate_up, shared_down, shared_gate;
  Owned grad_out;
  MoeLayerOptions options;
  reference::Layer ref;

  TensorLayer(const LayerSizes& sizes, DType type, bool of_logits, int64_t shared_size, Random& random)
      : s(sizes),
        shared(shared_size),
        dtype(type),
        has_logits(of_logits),
        x(type, {s.tokens, s.hidden}),
        logits(type, {s.tokens, s.experts}),
        ids(DType::i64, {s.tokens, s.top_k}),
        weights(DType::f32, {s.tokens, s.top_k}),
        gate_up(type, {s.local(), 2 * s.intermediate, s.hidden}),
        down(type, {s.local(), s.hidden, s.intermediate}),
        gate_up_bias(type, {s.local(), 2 * s.intermediate}),
        down_bias(type, {s.local(), s.hidden}),
        shared_gate_up(type, {1, 2 * shared, s.hidden}),
        shared_down(type, {1, s.hidden, shared}),
        shared_gate(type, {s.hidden}),
        grad_out(type, {s.tokens, s.hidden}) {
    for (const Owned* o : {&x, &logits, &weights, &gate_up, &down, &gate_up_bias, &down_bias, &shared_gate_up,
                           &shared_down, &shared_gate, &grad_out}) {
      fill(o->tensor, Fill::uniform, random);
    }
    for (int64_t i = 0; i < s.tokens * s.top_k; ++i) {
      set(ids.tensor, i, static_cast<double>(random.integer(random.chance(0.1) ? -1 : 0, s.experts - 1)));
    }
    options = {.top_k = s.top_k, .expert_begin = s.begin, .expert_end = s.end};
    options.gating.renormalise = random.chance(0.5);
    options.gating.scores = random.pick({GateScores::softmax, GateScores::sigmoid});
    if (!has_logits) options.num_experts = s.experts;
    ref = {.tokens = s.tokens,
           .hidden = s.hidden,
           .top_k = s.top_k,
           .num_experts = s.experts,
           .begin = s.begin,
           .end = s.last(),
           .x = to_doubles(x.tensor),
           .logits = has_logits ? to_doubles(logits.tensor) : Doubles(),
           .ids = {},
           .weights = to_doubles(weights.tensor),
           .experts = {s.intermediate, to_doubles(gate_up.tensor), to_doubles(down.tensor),
                       to_doubles(gate_up_bias.tensor), to_doubles(down_bias.tensor)},
           .shared = {shared, to_doubles(shared_gate_up.tensor), to_doubles(shared_down.tensor), {}, {}},
           .shared_gate = to_doubles(shared_gate.tensor),
           .gating = options.gating};
    for (int64_t t = 0; t < s.tokens; ++t) {
      if (!has_logits) break;
      const auto row = ref.logits.begin() + t * s.experts;
      const Indices chosen = reference::gate_ids(Doubles(row, row + s.experts), {}, s.top_k, options.gating);
      ref.ids.insert(ref.ids.end(), chosen.begin(), chosen.end());
    }
    for (double id : to_doubles(ids.tensor)) {
      if (!has_logits) ref.ids.push_back(static_cast<int64_t>(id));
    }
  }

  MoeLayerInputs inputs() const {
    MoeLayerInputs in{.x = x.tensor,
                      .experts = {.gate_up = gate_up.tensor,
                                  .down = down.tensor,
                                  .gate_up_bias = gate_up_bias.tensor,
                                  .down_bias = down_bias.tensor}};
    if (shared > 0)
      in.shared = {.gate_up = shared_gate_up.tensor, .down = shared_down.tensor, .gate = shared_gate.tensor};
    if (has_logits) {
      in.logits = logits.tensor;
    } else {
      in.topk_ids = ids.tensor, in.topk_weights = weights.tensor;
    }
    return in;
  }
};

// Of all elements together: rounding of rows between is relative to the largest of them, and where sums cancel to the
// size of their terms.
void expect_all_near(const Doubles& got, const Doubles& expected, double tolerance, const std::string& about) {
  ASSERT_EQ(got.size(), expected.size()) << about;
  double largest = 0.1;
  for (double v : expected) largest = std::max(largest, std::abs(v));
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], tolerance * largest) << about << ", " << i;
}

double tolerance_of(DType dtype) { return dtype == DType::f32 ? 2e-5 : dtype == DType::bf16 ? 4e-2 : 6e-3; }

LayerSizes small_sizes(Random& random) {
  LayerSizes s;
  s.tokens = random.integer(1, 7);
  s.hidden = random.integer(1, 6);
  s.intermediate = random.integer(1, 5);
  s.experts = random.integer(1, 5);
  s.top_k = random.integer(1, s.experts);
  if (random.chance(0.3)) {
    s.begin = random.integer(0, s.experts);
    s.end = random.integer(s.begin, s.experts);
  }
  return s;
}

TEST(MoeLayerReference, ForwardIsTheEquations) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (int round = 0; round < 4; ++round) {
      const DType dtype = random.pick({DType::f32, DType::bf16, DType::f16});
      const TensorLayer l(small_sizes(random), dtype, random.chance(0.5), random.integer(0, 4), random);
      Owned out(dtype, {l.s.tokens, l.s.hidden});
      const Status status = moe_layer_forward(t.context, l.inputs(), {.out = out.tensor}, l.options);
      ASSERT_TRUE(status.ok()) << status.message();
      expect_all_near(to_doubles(out.tensor), reference::layer(l.ref), tolerance_of(dtype), t.name);
    }
  }
}

// d sum(grad_out * layer) / d values, where `values` is a part of the reference.
Doubles differences(reference::Layer& ref, Doubles& values, const Doubles& grad_out) {
  constexpr double kStep = 1e-5;
  const auto loss = [&] {
    double sum = 0;
    const Doubles y = reference::layer(ref);
    for (size_t i = 0; i < y.size(); ++i) sum += grad_out[i] * y[i];
    return sum;
  };
  Doubles out;
  for (double& value : values) {
    const double at = value;
    value = at + kStep;
    const double above = loss();
    value = at - kStep;
    out.push_back((above - loss()) / (2 * kStep));
    value = at;
  }
  return out;
}

TEST(MoeLayerBackward, IsTheGradientByCentralDifferences) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    const DType dtype = random.pick({DType::f32, DType::f32, DType::bf16, DType::f16});
    TensorLayer l(small_sizes(random), dtype, random.chance(0.5), random.integer(0, 3), random);
    const Owned x(dtype, {l.s.tokens, l.s.hidden}), logits(dtype, {l.s.tokens, l.s.experts}),
        weights(DType::f32, {l.s.tokens, l.s.top_k}), gate_up(dtype, {l.s.local(), 2 * l.s.intermediate, l.s.hidden}),
        down(DType::f32, {l.s.local(), l.s.hidden, l.s.intermediate}),
        gate_up_bias(dtype, {l.s.local(), 2 * l.s.intermediate}), down_bias(DType::f32, {l.s.local(), l.s.hidden}),
        shared_gate_up(dtype, {1, 2 * l.shared, l.s.hidden}), shared_down(dtype, {1, l.s.hidden, l.shared}),
        shared_gate(dtype, {l.s.hidden});
    MoeLayerGradients to{.x = x.tensor,
                         .gate_up = gate_up.tensor,
                         .down = down.tensor,
                         .gate_up_bias = gate_up_bias.tensor,
                         .down_bias = down_bias.tensor};
    l.has_logits ? to.logits = logits.tensor : to.topk_weights = weights.tensor;
    if (l.shared > 0) {
      to.shared_gate_up = shared_gate_up.tensor, to.shared_down = shared_down.tensor;
      to.shared_gate = shared_gate.tensor;
    }
    const Status status = moe_layer_backward(t.context, l.grad_out.tensor, l.inputs(), to, l.options);
    ASSERT_TRUE(status.ok()) << status.message();
    const Doubles g = to_doubles(l.grad_out.tensor);
    const double tolerance = 2 * tolerance_of(dtype);
    const auto check = [&](const Tensor& got, Doubles& part, const char* name) {
      if (got) expect_all_near(to_doubles(got), differences(l.ref, part, g), tolerance, t.name + ", " + name);
    };
    check(to.x, l.ref.x, "x");
    check(to.logits, l.ref.logits, "logits");
    check(to.topk_weights, l.ref.weights, "topk_weights");
    check(to.gate_up, l.ref.experts.gate_up, "gate_up");
    check(to.down, l.ref.experts.down, "down");
    check(to.gate_up_bias, l.ref.experts.gate_up_bias, "gate_up_bias");
    check(to.down_bias, l.ref.experts.down_bias, "down_bias");
    check(to.shared_gate_up, l.ref.shared.gate_up, "shared_gate_up");
    check(to.shared_down, l.ref.shared.down, "shared_down");
    check(to.shared_gate, l.ref.shared_gate, "shared_gate");
  }
}

// 900 rows: with tiny caches several waves.
TEST(MoeLayerBackward, HasTheSameBitsForAnyThreadsAndWaves) {
  Random random(seed());
  for (const bool of_logits : {false, true}) {
    const LayerSizes sizes{.tokens = 300, .hidden = 5, .intermediate = 3, .experts = 8, .top_k = 3};
    const TensorLayer l(sizes, DType::f32, of_logits, 2, random);
    struct Run {
      Isa isa;
      std::vector<unsigned char> bytes;
    };
    std::vector<Run> runs;
    for (const TestContext& t : contexts()) {
      const Owned x(DType::f32, {300, 5}), of_slots(DType::f32, {300, of_logits ? 8 : 3}),
          gate_up(DType::f32, {8, 6, 5}), down(DType::f32, {8, 5, 3}), bias(DType::f32, {8, 5}), gate(DType::f32, {5});
      MoeLayerGradients to{.x = x.tensor, .gate_up = gate_up.tensor, .down = down.tensor, .down_bias = bias.tensor};
      (of_logits ? to.logits : to.topk_weights) = of_slots.tensor;
      to.shared_gate = gate.tensor;
      ASSERT_TRUE(moe_layer_backward(t.context, l.grad_out.tensor, l.inputs(), to, l.options).ok());
      Run run{t.context.machine().isa, {}};
      for (const Owned* o : {&x, &of_slots, &gate_up, &down, &bias, &gate}) {
        run.bytes.insert(run.bytes.end(), o->bytes.begin(), o->bytes.end());
      }
      const auto like = std::find_if(runs.begin(), runs.end(), [&](const Run& r) { return r.isa == run.isa; });
      if (like == runs.end()) {
        runs.push_back(run);
      } else {
        EXPECT_EQ(like->bytes, run.bytes) << t.name;
      }
    }
  }
}

TEST(MoeLayerBackward, RefusesWithAMessage) {
  Random random(1);
  const LayerSizes sizes{.tokens = 3, .hidden = 4, .intermediate = 2, .experts = 3, .top_k = 2};
  TensorLayer l(sizes, DType::f32, false, 0, random);
  Context& context = contexts_with_threads(2).back().context;
  const Owned x(DType::f32, {3, 4}), logits(DType::f32, {3, 3}), gate(DType::f32, {4});
  const auto refused = [&](const std::string& message, const MoeLayerInputs& in, const MoeLayerGradients& to,
                           const MoeLayerOptions& options) {
    const Status status = moe_layer_backward(context, l.grad_out.tensor, in, to, options);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_EQ(status.message(), "moe_layer_backward: " + message);
  };
  const MoeLayerGradients to{.x = x.tensor};
  MoeLayerInputs in = l.inputs();
  refused("gradients.logits is asked for, but there are no logits", in, {.logits = logits.tensor}, l.options);
  refused("gradients of a shared expert are asked for, but there is none", in, {.shared_gate = gate.tensor}, l.options);
  refused("gradients.x f32 [3, 4] overlaps grad_out f32 [3, 4] in memory, but an output must not", in,
          {.x = l.grad_out.tensor}, l.options);
  MoeLayerOptions options = l.options;
  options.activation = Activation::swiglu_swapped;
  refused("activation is swiglu_swapped, but must be swiglu", in, to, options);
  options = l.options, options.activations = ActivationType::int8;
  refused("activations is int8, but must be exact", in, to, options);
  in.experts.gate_up_bias = {};
  refused("gradients.gate_up_bias is asked for, but there is no bias", in, {.gate_up_bias = l.gate_up_bias.tensor},
          l.options);
  const PackedWeight packed = std::move(PackedWeight::pack_stack(context, l.down.tensor).value());
  in.experts.down = packed;
  refused("down is packed, but gradients are taken with weights that are tensors", in, to, l.options);
  in = l.inputs();
  set(l.ids.tensor, 1, 3);
  refused("topk_ids[0, 1] is 3, but there are 3 experts (-1 is none)", in, to, l.options);
}

}  // namespace
}  // namespace opst

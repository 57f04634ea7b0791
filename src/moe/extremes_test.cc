// Every call of the room with sizes, strides, ranks and enumerators that mean nothing: a Status, at once.
#include "testing/extremes.h"

#include <gtest/gtest.h>

#include "opst/moe_layer.h"
#include "testing/contexts.h"

namespace opst {
namespace {

using test::Extremes;

class MoeExtremes : public test::ExtremesTest {
 protected:
  // Lists of 2^31 slots of one token would be summed in earnest.
  MoeExtremes() : ExtremesTest(20000, int64_t{1} << 40) {}
  // Zeros, or all -1.
  ConstTensor indices(Extremes& draw, const std::vector<int64_t>& shape) {
    return draw.input(random_.pick({DType::i32, DType::i64}), shape, random_.chance(0.5) ? 0 : 0xff);
  }
};

TEST_F(MoeExtremes, Gating) {
  rounds([&](Extremes& draw) {
    const DType type = float_type();
    const int64_t tokens = draw.size(), experts = draw.size(), top_k = random_.chance(0.5) ? 1 : draw.size();
    MoeGatingOptions options;
    options.scores = draw.enumerator({GateScores::softmax, GateScores::sigmoid});
    options.group_score = draw.enumerator({GroupScore::max, GroupScore::top2_sum});
    options.num_groups = random_.chance(0.7) ? 1 : draw.size();
    options.kept_groups = random_.chance(0.7) ? 1 : draw.size();
    options.nan_is_error = random_.chance(0.3);
    const ConstTensor logits = draw.input(type, {tokens, experts});
    if (random_.chance(0.3)) {
      return moe_gating_backward(context_,
                                 {logits, indices(draw, {tokens, top_k}), draw.input(type, {tokens, top_k}), {}},
                                 draw.output(type, {tokens, experts}), options);
    }
    MoeGatingInputs in = {.logits = logits};
    if (random_.chance(0.3)) in.bias = draw.input(DType::f32, {experts});
    if (random_.chance(0.3)) in.finished = draw.input(DType::boolean, {tokens});
    MoeGatingOutputs out = {draw.output(DType::i32, {tokens, top_k}), draw.output(DType::f32, {tokens, top_k})};
    if (random_.chance(0.3)) out.scores = draw.output(DType::f32, {tokens, experts});
    return moe_gating(context_, in, out, options);
  });
}

TEST_F(MoeExtremes, Routing) {
  rounds([&](Extremes& draw) {
    const int64_t tokens = draw.size(), top_k = draw.size(), experts = draw.size();
    if (random_.chance(0.2)) {
      return moe_compute_expert_tokens(context_, indices(draw, {tokens}), draw.output(DType::i64, {experts}));
    }
    MoeRoutingOptions options;
    if (random_.chance(0.5)) options.capacity = draw.size();
    if (random_.chance(0.3)) options.expert_begin = draw.size();
    if (random_.chance(0.3)) options.expert_end = draw.size();
    MoeRoutingOutputs out = {.row_of_slot = draw.output(DType::i64, {tokens, top_k})};
    if (random_.chance(0.5)) out.slot_of_row = draw.output(DType::i32, {draw.size()});
    if (random_.chance(0.5)) out.expert_tokens = draw.output(DType::i64, {experts});
    return moe_routing(context_, indices(draw, {tokens, top_k}), experts, out, options);
  });
}

TEST_F(MoeExtremes, Rows) {
  rounds([&](Extremes& draw) {
    const DType type = float_type();
    const int64_t tokens = draw.size(), top_k = draw.size(), rows = draw.size(), features = draw.size(),
                  experts = draw.size();
    if (random_.chance(0.2)) {
      return moe_permute(context_, draw.input(type, {tokens, features}), indices(draw, {rows}), top_k,
                         draw.output(type, {rows, features}));
    }
    MoeFinalizeInputs in = {.expanded = draw.input(type, {rows, features}),
                            .row_of_slot = indices(draw, {tokens, top_k})};
    if (random_.chance(0.5)) in.topk_weights = draw.input(DType::f32, {tokens, top_k});
    if (random_.chance(0.3)) in.skip1 = draw.input(type, {tokens, features});
    if (random_.chance(0.3)) in.bias = draw.input(type, {experts, features});
    if (random_.chance(0.3)) in.topk_ids = indices(draw, {tokens, top_k});
    if (random_.chance(0.5)) return moe_finalize(context_, in, draw.output(type, {tokens, features}));
    MoeFinalizeGradients gradients;
    if (random_.chance(0.5)) gradients.expanded = draw.output(type, {rows, features});
    // A gradient of rows takes memory for every feature: no sum over features is longer than that.
    if (gradients.expanded && random_.chance(0.5)) gradients.topk_weights = draw.output(type, {tokens, top_k});
    if (random_.chance(0.3)) gradients.bias = draw.output(type, {experts, features});
    return moe_finalize_backward(context_, draw.input(type, {tokens, features}), in, gradients);
  });
}

// 2^40 tokens without a slot are no work: without optimisation a loop over them would take an hour.
TEST_F(MoeExtremes, TokensWithoutSlots) {
  const float zeros[6] = {};
  float grad[6] = {1, 1, 1, 1, 1, 1};
  ConstTensor grad_out = ConstTensor::contiguous(DType::f32, {1, 2}, zeros);
  grad_out.shape[0] = int64_t{1} << 40, grad_out.strides[0] = 0;
  const MoeFinalizeInputs in = {.expanded = ConstTensor::contiguous(DType::f32, {3, 2}, zeros),
                                .row_of_slot = ConstTensor::contiguous(DType::i32, {int64_t{1} << 40, 0}, zeros)};
  const MoeFinalizeGradients gradients = {.expanded = Tensor::contiguous(DType::f32, {3, 2}, grad)};
  const Status status = moe_finalize_backward(context_, grad_out, in, gradients);
  ASSERT_TRUE(status.ok()) << status.message();
  for (const float element : grad) EXPECT_EQ(element, 0);
}

TEST_F(MoeExtremes, Layer) {
  rounds([&](Extremes& draw) {
    const DType type = float_type();
    const int64_t tokens = draw.size(), top_k = draw.size(), hidden = draw.size(), size = draw.size(),
                  experts = draw.size();
    MoeLayerInputs in = {
        .x = draw.input(type, {tokens, hidden}),
        .experts = {.gate_up = draw.input(type, {experts, size, hidden}),
                    .down = draw.input(type, {experts, hidden, random_.chance(0.5) ? size : size / 2})}};
    MoeLayerOptions options;
    options.activation = draw.enumerator({Activation::swiglu, Activation::silu});
    options.activations = draw.enumerator({ActivationType::exact, ActivationType::int8});
    if (random_.chance(0.5)) {
      in.logits = draw.input(type, {tokens, experts});
      options.top_k = top_k;
    } else {
      in.topk_ids = indices(draw, {tokens, top_k});
      in.topk_weights = draw.input(type, {tokens, top_k});
    }
    if (random_.chance(0.2)) options.num_experts = draw.size();
    if (random_.chance(0.2)) options.expert_begin = draw.size();
    if (random_.chance(0.2)) options.expert_end = draw.size();
    const Tensor out = draw.output(type, {tokens, hidden});
    if (random_.chance(0.7)) return moe_layer_forward(context_, in, {.out = out}, options);
    return moe_layer_backward(context_, in.x, in, {.x = out}, options);
  });
}

}  // namespace
}  // namespace opst

#include "moe_layer_case.h"

#include <cmath>
#include <utility>

#include "testing/elements.h"

namespace opst::tools {

namespace {

void require(const Status& status) {
  if (!status.ok()) run_error(status.message());
}

}  // namespace

Tensor MoeLayerCase::tensor(DType type, std::initializer_list<int64_t> shape) {
  const int64_t elements = Tensor::contiguous(type, shape, nullptr).num_elements();
  memory_.push_back(value_or_fail(Buffer::allocate(elements * size_bytes(type))));
  return memory_.back().tensor(type, shape);
}

Tensor MoeLayerCase::stack(const RandomWeights& weights, int64_t count, const MatmulShape& shape) {
  memory_.push_back(weights.unpacked());
  return memory_.back().tensor(data_.x.dtype, {count, shape.n, shape.k});
}

MoeLayerCase::MoeLayerCase(const MoeCase& data, bool with_gradients) : data_(data) {
  const MoeArguments& a = data.arguments;
  const DType type = data.x.dtype;
  const int64_t tokens = data.tokens(), slots = data.slots();
  out = tensor(type, {tokens, a.hidden});
  if (!with_gradients) return;
  const auto like = [&](const Tensor& t) { return tensor(t.dtype, {t.shape[0], t.shape[1], t.shape[2]}); };
  grad_out = tensor(type, {tokens, a.hidden});
  grad_slots_ = tensor(type, {slots, a.hidden});
  test::Random random(14);
  // Of length 1, as the tokens.
  const double scale = 1 / std::sqrt(static_cast<double>(a.hidden));
  for (int64_t i = 0; i < grad_out.num_elements(); ++i) test::set(grad_out, i, random.normal() * scale);
  test::fill(grad_slots_, test::Fill::normal, random);
  gate_up = stack(data.gate_up_weights, a.experts, a.gate_up(1));
  down = stack(data.down_weights, a.experts, a.down(1));
  gradients = {.x = tensor(type, {tokens, a.hidden}),
               .logits = tensor(DType::f32, {tokens, a.experts}),
               .gate_up = like(gate_up),
               .down = like(down)};
  routed_ = {tensor(type, {slots, 2 * a.intermediate}), tensor(type, {slots, a.hidden})};
  if (!data.has_shared()) return;
  shared_gate_up = stack(*data.shared_gate_up_weights, 1, a.shared_gate_up(1));
  shared_down = stack(*data.shared_down_weights, 1, a.shared_down(1));
  gradients.shared_gate_up = like(shared_gate_up);
  gradients.shared_down = like(shared_down);
  shared_ = {tensor(type, {tokens, 2 * a.shared}), tensor(type, {tokens, a.hidden})};
}

void MoeLayerCase::forward(Context& context) const {
  MoeLayerInputs in{
      .x = data_.x, .logits = data_.logits, .experts = {.gate_up = data_.gate_up(), .down = data_.down()}};
  if (data_.has_shared()) in.shared = {.gate_up = data_.shared_gate_up(), .down = data_.shared_down()};
  require(moe_layer_forward(context, in, {.out = out},
                            {.top_k = data_.arguments.top_k,
                             .gating = data_.arguments.gating(),
                             .activations = data_.integers() ? ActivationType::int8 : ActivationType::exact}));
}

void MoeLayerCase::backward(Context& context) const {
  MoeLayerInputs in{.x = data_.x, .logits = data_.logits, .experts = {.gate_up = gate_up, .down = down}};
  if (data_.has_shared()) in.shared = {.gate_up = shared_gate_up, .down = shared_down};
  require(moe_layer_backward(context, grad_out, in, gradients,
                             {.top_k = data_.arguments.top_k, .gating = data_.arguments.gating()}));
}

// gate and up again, d down, d hidden, d gate_up, d x.
void MoeLayerCase::multiply_gradients(Context& context, const Tensor& x, const Tensor& hidden, const Tensor& grad_rows,
                                      const Products& memory, bool shared) const {
  const Tensor& first = shared ? shared_gate_up : gate_up;
  const Tensor& second = shared ? shared_down : down;
  const GroupList groups = shared ? data_.shared_group() : data_.groups();
  require(grouped_matmul(context, x, first, groups, memory.both));
  require(grouped_matmul_backward(context, grad_rows, hidden, {}, groups,
                                  {.weight = shared ? gradients.shared_down : gradients.down}));
  const Tensor grad_hidden = memory.both.narrowed(1, 0, hidden.shape[1]);
  require(grouped_matmul_backward(context, grad_rows, {}, second, groups, {.x = grad_hidden}));
  require(grouped_matmul_backward(
      context, memory.both, x, first, groups,
      {.x = memory.grad_rows, .weight = shared ? gradients.shared_gate_up : gradients.gate_up}));
}

void MoeLayerCase::multiply_backward(Context& context) const {
  multiply_gradients(context, data_.expanded, data_.activated, grad_slots_, routed_, false);
  if (data_.has_shared()) multiply_gradients(context, data_.x, data_.shared_activated, grad_out, shared_, true);
}

}  // namespace opst::tools

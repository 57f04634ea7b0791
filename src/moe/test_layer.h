// Calls of the layer of experts: drawn operands of every kind, and the sequence of public operators it stands for.
#pragma once

#include <optional>

#include "core/text.h"
#include "matmul/test_groups.h"
#include "moe/reference.h"
#include "opst/moe_layer.h"
#include "testing/contexts.h"

namespace opst::test {

inline Matrix drawn_matrix(DType dtype, int64_t rows, int64_t cols, Random& random, Fill kind = Fill::normal) {
  Matrix m(dtype, rows, cols, random.chance(0.3), Guard::after);
  fill(m.tensor, kind, random);
  return m;
}

inline void draw(std::optional<Matrix>& to, DType dtype, int64_t rows, int64_t cols, Random& random) {
  fill(to.emplace(dtype, rows, cols, random.chance(0.3), Guard::after).tensor, Fill::normal, random);
}

struct LayerSizes {
  int64_t tokens = 5, hidden = 32, intermediate = 32, experts = 4, top_k = 2;
  int64_t begin = 0, end = -1;  // of the range

  int64_t last() const { return end == -1 ? experts : end; }
  int64_t local() const { return last() - begin; }
};

enum class Weights { floats, blocks, int8, int4 };

// Weights of one kind, n outputs and k inputs; where they have blocks, k is a multiple of 32.
inline Experts drawn_weights(Context& context, Weights kind, int64_t count, int64_t n, int64_t k, Random& random) {
  if (kind == Weights::floats) {
    return float_experts(context, count, n, k, random.pick({DType::f32, DType::bf16, DType::f16}), random);
  }
  if (kind == Weights::blocks) {
    std::vector<QuantFormat> fitting;
    for (const QuantFormat format : kQuantFormats) {
      if (block_values(format) > 1 && k % block_values(format) == 0) fitting.push_back(format);
    }
    const int64_t last = static_cast<int64_t>(fitting.size()) - 1;
    return block_experts(context, count, n, k, fitting[static_cast<size_t>(random.integer(0, last))], random);
  }
  return int_experts(context, count, n, k, kind == Weights::int8 ? 8 : 4, random.pick<int64_t>({1, 2}),
                     random.chance(0.3), random);
}

struct LayerCase {
  LayerSizes sizes;
  DType dtype;
  bool has_logits;
  Matrix x, logits, ids, weights;
  std::optional<Matrix> residual, shared_gate, gate_up_bias, down_bias;
  Experts gate_up, down;
  std::optional<Experts> up, shared_gate_up, shared_up, shared_down;
  MoeLayerOptions options;
  std::string about;

  LayerCase(Context& context, const LayerSizes& s, DType type, Weights kind, Random& random)
      : sizes(s),
        dtype(type),
        has_logits(random.chance(0.5)),
        x(drawn_matrix(type, s.tokens, s.hidden, random)),
        logits(drawn_matrix(random.pick({DType::f32, type}), s.tokens, s.experts, random)),
        ids(random.pick({DType::i32, DType::i64}), s.tokens, s.top_k, random.chance(0.3), Guard::after),
        weights(drawn_matrix(random.pick({DType::f32, type}), s.tokens, s.top_k, random)) {
    for (int64_t i = 0; i < s.tokens * s.top_k; ++i) {
      set(ids.tensor, i, static_cast<double>(random.integer(random.chance(0.1) ? -1 : 0, s.experts - 1)));
    }
    options.activation = random.pick(
        {Activation::swiglu, Activation::swiglu, Activation::swiglu_swapped, Activation::silu, Activation::gelu_tanh});
    const bool halves = options.activation == Activation::swiglu || options.activation == Activation::swiglu_swapped;
    const bool apart = halves && random.chance(0.25);
    const int64_t n = halves && !apart ? 2 * s.intermediate : s.intermediate;
    gate_up = drawn_weights(context, kind, s.local(), n, s.hidden, random);
    if (apart) up = drawn_weights(context, kind, s.local(), n, s.hidden, random);
    down = drawn_weights(context, kind, s.local(), s.hidden, s.intermediate, random);
    if (random.chance(0.3)) draw(residual, type, s.tokens, s.hidden, random);
    if (!apart && random.chance(0.3)) {
      draw(gate_up_bias, random.pick({DType::f32, type}), s.local(), n, random);
      draw(down_bias, random.pick({DType::f32, type}), s.local(), s.hidden, random);
    }
    if (random.chance(0.4)) {
      const int64_t size = 32 * random.integer(1, 2);
      const bool shared_apart = halves && random.chance(0.25);
      shared_gate_up = drawn_weights(context, kind, 1, halves && !shared_apart ? 2 * size : size, s.hidden, random);
      if (shared_apart) shared_up = drawn_weights(context, kind, 1, size, s.hidden, random);
      shared_down = drawn_weights(context, kind, 1, s.hidden, size, random);
    }
    if (kind != Weights::floats && random.chance(0.5)) options.activations = ActivationType::int8;
    options.batch_invariant = random.chance(0.3);
    options.gating.renormalise = random.chance(0.5);
    options.gating.scores = random.pick({GateScores::softmax, GateScores::sigmoid});
    if (has_logits) options.top_k = s.top_k;
    options.expert_begin = s.begin, options.expert_end = s.end;
    if (!has_logits) options.num_experts = s.experts;
    about = text("x ", to_string(type), ", gate_up ", gate_up.about, apart ? ", up apart" : "", ", down ", down.about,
                 ", tokens ", s.tokens, ", experts ", s.experts, ", ", to_string(options.activation), ", ",
                 to_string(options.activations), has_logits ? ", logits" : "", shared_gate_up ? ", shared" : "",
                 shared_up ? " apart" : "");
  }

  // The weights' views live here.
  MoeLayerInputs inputs() const {
    const auto view = [](const std::optional<Matrix>& m) { return m ? ConstTensor(m->tensor) : ConstTensor(); };
    MoeLayerInputs in{.x = x.tensor,
                      .experts = {.gate_up = gate_up.grouped(),
                                  .down = down.grouped(),
                                  .gate_up_bias = view(gate_up_bias),
                                  .down_bias = view(down_bias)},
                      .residual = view(residual)};
    if (up) in.experts.up = up->grouped();
    if (shared_gate_up) in.shared = {.gate_up = shared_gate_up->grouped(), .down = shared_down->grouped()};
    if (shared_up) in.shared.up = shared_up->grouped();
    if (shared_gate) in.shared.gate = shared_gate->tensor.selected(0, 0);
    if (has_logits) {
      in.logits = logits.tensor;
    } else {
      in.topk_ids = ids.tensor, in.topk_weights = weights.tensor;
    }
    return in;
  }

  Status run(Context& context, const Tensor& out) const {
    return moe_layer_forward(context, inputs(), {.out = out}, options);
  }
};

// Memory of a contiguous tensor.
struct Owned {
  std::vector<unsigned char> bytes;
  Tensor tensor;
  Owned(DType dtype, std::initializer_list<int64_t> shape) {
    tensor = Tensor::contiguous(dtype, shape, nullptr);
    bytes.resize(static_cast<size_t>(std::max<int64_t>(1, tensor.num_elements()) * size_bytes(dtype)));
    tensor.data = bytes.data();
  }
};

// Both products of some experts by public operators: x [rows, hidden] -> out [rows, hidden].
inline void expect_products(Context& context, const LayerCase& c, const MoeExperts& experts, int64_t intermediate,
                            const ConstTensor& x, const GroupList& groups, const Tensor& out) {
  const int64_t rows = x.shape[0];
  const bool int8 = c.options.activations == ActivationType::int8;
  const auto bytes = [&](const GroupedWeight& weight) { return int8 && weight.kind() == MatmulWeight::integers; };
  Owned xq(DType::i8, {rows, x.shape[1]}), xs(DType::f32, {rows});
  ASSERT_TRUE(dynamic_quant(context, x, xq.tensor, xs.tensor).ok());
  const auto product = [&](const GroupedWeight& weight, const Tensor& to, GroupedMatmulOptions options) {
    if (bytes(weight)) options.x_scales = xs.tensor;
    options.activations = c.options.activations;
    options.batch_invariant = c.options.batch_invariant;
    const Status status =
        grouped_matmul(context, bytes(weight) ? ConstTensor(xq.tensor) : x, weight, groups, to, options);
    ASSERT_TRUE(status.ok()) << status.message();
  };
  const bool hides_bytes = bytes(experts.down);
  Owned hidden(hides_bytes ? DType::i8 : c.dtype, {rows, intermediate}), scales(DType::f32, {rows});
  const bool apart = experts.up.kind() != MatmulWeight::unpacked || experts.up.stack().data != nullptr;
  if (apart) {
    // Halves in f32, and the activation of one product with the unit matrix of both: exact.
    Owned both(DType::f32, {rows, 2 * intermediate}), unit(DType::f32, {2 * intermediate, 2 * intermediate});
    product(experts.gate_up, both.tensor.narrowed(1, 0, intermediate), {});
    product(experts.up, both.tensor.narrowed(1, intermediate, intermediate), {});
    for (int64_t i = 0; i < 2 * intermediate; ++i) set(unit.tensor, i * (2 * intermediate + 1), 1);
    MatmulOptions options{.activation = c.options.activation};
    if (hides_bytes) options.out_scales = scales.tensor;
    ASSERT_TRUE(matmul(context, both.tensor, ConstTensor(unit.tensor), hidden.tensor, options).ok());
  } else {
    GroupedMatmulOptions options{.bias = experts.gate_up_bias, .activation = c.options.activation};
    if (hides_bytes) options.out_scales = scales.tensor;
    product(experts.gate_up, hidden.tensor, options);
  }
  GroupedMatmulOptions options{
      .bias = experts.down_bias, .activations = c.options.activations, .batch_invariant = c.options.batch_invariant};
  if (hides_bytes) options.x_scales = scales.tensor;
  const Status status = grouped_matmul(context, hidden.tensor, experts.down, groups, out, options);
  ASSERT_TRUE(status.ok()) << status.message();
}

// The layer by public operators, one after another. Shares are 1.
inline void expect_sequence(Context& context, const LayerCase& c, const Tensor& out) {
  const LayerSizes& s = c.sizes;
  const MoeLayerInputs in = c.inputs();
  const int64_t slots = s.tokens * s.top_k, extra = c.shared_gate_up ? 1 : 0;
  Owned chosen(DType::i64, {s.tokens, s.top_k}), weights(DType::f32, {s.tokens, s.top_k + extra});
  ConstTensor ids = in.topk_ids;
  const Tensor of_slots = weights.tensor.narrowed(1, 0, s.top_k);
  if (c.has_logits) {
    ASSERT_TRUE(moe_gating(context, {.logits = in.logits}, {chosen.tensor, of_slots}, c.options.gating).ok());
    ids = chosen.tensor;
  } else {
    for (int64_t i = 0; i < slots; ++i) set(of_slots, i, get(in.topk_weights, i));
  }
  Owned rows(DType::i64, {s.tokens, s.top_k + extra}), slot_of_row(DType::i64, {slots}),
      counts(DType::i64, {s.local()});
  ASSERT_TRUE(moe_routing(context, ids, s.experts,
                          {.row_of_slot = rows.tensor.narrowed(1, 0, s.top_k),
                           .slot_of_row = slot_of_row.tensor,
                           .expert_tokens = counts.tensor},
                          {.expert_begin = s.begin, .expert_end = s.end})
                  .ok());
  Owned x(c.dtype, {slots, s.hidden}), expanded(c.dtype, {slots + s.tokens, s.hidden});
  if (s.top_k > 0) {
    ASSERT_TRUE(moe_permute(context, in.x, slot_of_row.tensor, s.top_k, x.tensor).ok());
  }
  expect_products(context, c, in.experts, s.intermediate, x.tensor, {counts.tensor, GroupListType::counts},
                  expanded.tensor.narrowed(0, 0, slots));
  if (extra == 1) {
    const int64_t all = s.tokens;
    for (int64_t t = 0; t < s.tokens; ++t) {
      set(rows.tensor, t * (s.top_k + 1) + s.top_k, static_cast<double>(slots + t));
      set(weights.tensor, t * (s.top_k + 1) + s.top_k, 1);
    }
    const MoeExperts shared = {.gate_up = in.shared.gate_up, .down = in.shared.down, .up = in.shared.up};
    expect_products(context, c, shared, c.shared_down->k, in.x, {ConstTensor::contiguous(DType::i64, {1}, &all)},
                    expanded.tensor.narrowed(0, slots, s.tokens));
  }
  const Status status = moe_finalize(
      context,
      {.expanded = expanded.tensor, .row_of_slot = rows.tensor, .topk_weights = weights.tensor, .skip1 = in.residual},
      out);
  ASSERT_TRUE(status.ok()) << status.message();
}

}  // namespace opst::test

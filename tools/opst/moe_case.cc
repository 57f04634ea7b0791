#include "moe_case.h"

#include <cmath>

#include "testing/elements.h"

namespace opst::tools {

namespace {

void require(const Status& status) {
  if (!status.ok()) run_error(status.message());
}

constexpr int64_t kSpoilEvery = 256;

}  // namespace

DType float_type_of(const std::string& dtype) {
  const DType type = x_dtype_of(dtype);
  return type == DType::i8 ? DType::f32 : type;
}

void add_moe_options(CLI::App& command, MoeArguments& arguments) {
  MatmulArguments products;  // its list of types
  products.dtypes = arguments.dtypes;
  add_list(command, "--tokens", arguments.tokens, "Tokens of a call, separated by commas", between(1, 1 << 24))
      ->type_name("N");
  const auto add_size = [&](const char* name, int64_t& size, int64_t most, const char* help) {
    command.add_option(name, size, help)->check(between(1, most))->capture_default_str();
  };
  add_size("--experts", arguments.experts, 4096, "Experts");
  add_size("--top-k", arguments.top_k, 4096, "Experts of a token");
  add_size("--hidden", arguments.hidden, 1 << 20, "Features of a token");
  add_size("--intermediate", arguments.intermediate, 1 << 20, "Width of an expert");
  command
      .add_option("--shared", arguments.shared, "Width of an expert that serves every token (default: there is none)")
      ->check(between(1, 1 << 20))
      ->type_name("N");
  add_weight_types_option(command, arguments.dtypes);
  command.add_option("--scores", arguments.scores, "What the router's logits become")
      ->check(one_of({"softmax", "sigmoid"}))
      ->capture_default_str();
  command.add_flag("--no-renormalise", arguments.no_renormalise, "A token's weights need not have the sum 1");
  add_threads_option(command, arguments.num_threads);
  command.add_flag("--json", arguments.json, "Print one JSON object");
}

void check_moe_arguments(const MoeArguments& a) {
  if (a.top_k > a.experts) {
    usage_error("top-k is " + std::to_string(a.top_k) + ", but there are " + std::to_string(a.experts) + " experts");
  }
  MatmulArguments products;
  products.dtypes = a.dtypes;
  products.k = {a.hidden, a.intermediate};
  if (a.shared > 0) products.k.push_back(a.shared);
  check_products(products);
}

void add_moe_backward_option(CLI::App& command, bool& backward) {
  command.add_flag("--backward", backward, "The gradients of the one call too, with weights of f32, bf16 and f16");
}

void check_moe_backward(const MoeArguments& a, bool backward) {
  for (const std::string& dtype : a.dtypes) {
    if (backward && dtype != "f32" && dtype != "bf16" && dtype != "f16") {
      usage_error("--backward takes weights of f32, bf16 and f16, but --dtype names " + dtype);
    }
  }
}

Tensor MoeCase::tensor(DType type, std::initializer_list<int64_t> shape) {
  const int64_t elements = Tensor::contiguous(type, shape, nullptr).num_elements();
  memory_.push_back(value_or_fail(Buffer::allocate(elements * size_bytes(type))));
  return memory_.back().tensor(type, shape);
}

MoeCase::MoeCase(Context& context, const MoeArguments& a, const std::string& type, int64_t count)
    : arguments(a),
      dtype(type),
      gate_up_weights([&] {
        test::Random random(11);
        return RandomWeights(type, a.experts, 2 * a.intermediate, a.hidden, random);
      }()),
      down_weights([&] {
        test::Random random(12);
        return RandomWeights(type, a.experts, a.hidden, a.intermediate, random);
      }()) {
  const int64_t extra = has_shared() ? 1 : 0;
  const int64_t slots = count * a.top_k;
  const DType io = float_type_of(type), rows = x_dtype_of(type);
  logits = tensor(DType::f32, {count, a.experts});
  ids = tensor(DType::i32, {count, a.top_k});
  slots_weight = tensor(DType::f32, {count, a.top_k + extra});
  slots_row = tensor(DType::i32, {count, a.top_k + extra});
  topk_weights = slots_weight.narrowed(1, 0, a.top_k);
  row_of_slot = slots_row.narrowed(1, 0, a.top_k);
  slot_of_row = tensor(DType::i32, {slots});
  expert_tokens = tensor(DType::i64, {a.experts});
  x = tensor(io, {count, a.hidden});
  expanded = tensor(rows, {slots, a.hidden});
  activated = tensor(rows, {slots, a.intermediate});
  every_out = tensor(io, {slots + extra * count, a.hidden});
  expert_out = every_out.narrowed(0, 0, slots);
  out = tensor(io, {count, a.hidden});
  test::Random random(13);
  test::fill(logits, test::Fill::normal, random);
  // Rows of length 1: what comes out of the products is about 1 as well, and f16 holds it.
  const double scale = 1 / std::sqrt(static_cast<double>(a.hidden));
  for (int64_t i = 0; i < x.num_elements(); ++i) test::set(x, i, random.normal() * scale);
  if (integers()) {
    x_int8 = tensor(DType::i8, {count, a.hidden});
    x_scales = tensor(DType::f32, {count});
    row_scales = tensor(DType::f32, {slots});
    activated_scales = tensor(DType::f32, {slots});
  }
  gate_up_ = packed(context, gate_up_weights);
  down_ = packed(context, down_weights);
  if (!has_shared()) return;
  shared_gate_up_weights.emplace(type, 1, 2 * a.shared, a.hidden, random);
  shared_down_weights.emplace(type, 1, a.hidden, a.shared, random);
  shared_gate_up_ = packed(context, *shared_gate_up_weights);
  shared_down_ = packed(context, *shared_down_weights);
  shared_activated = tensor(rows, {count, a.shared});
  if (integers()) shared_scales = tensor(DType::f32, {count});
  shared_out = every_out.narrowed(0, slots, count);
  every_token = tensor(DType::i64, {1});
  test::set(every_token, 0, static_cast<double>(count));
  for (int64_t t = 0; t < count; ++t) {
    test::set(slots_row, t * (a.top_k + 1) + a.top_k, static_cast<double>(slots + t));
    test::set(slots_weight, t * (a.top_k + 1) + a.top_k, 1);
  }
}

MoeCase::Stack MoeCase::packed(Context& context, const RandomWeights& weights) const {
  Stack stack;
  if (integers()) {
    stack.integers = weights.pack_integers(context, true);
  } else {
    stack.floats = weights.pack(context, true);
  }
  return stack;
}

void MoeCase::gate(Context& context) const {
  require(moe_gating(context, {.logits = logits}, {ids, topk_weights}, arguments.gating()));
}

void MoeCase::route(Context& context) const {
  require(moe_routing(context, ids, arguments.experts, {row_of_slot, slot_of_row, expert_tokens}));
}

void MoeCase::quantise(Context& context) const {
  if (integers()) require(dynamic_quant(context, x, x_int8, x_scales));
}

void MoeCase::permute(Context& context) const {
  const int64_t top_k = arguments.top_k;
  require(moe_permute(context, integers() ? x_int8 : x, slot_of_row, top_k, expanded));
  if (!integers()) return;
  const auto column = [](const Tensor& t) { return Tensor::contiguous(t.dtype, {t.shape[0], 1}, t.data); };
  require(moe_permute(context, column(x_scales), slot_of_row, top_k, column(row_scales)));
}

// The hidden rows of experts, with integer weights of i8 with a scale each.
void MoeCase::multiply_expert(Context& context, const Tensor& rows, const Tensor& scales, const GroupedWeight& weight,
                              const GroupList& groups, const Tensor& hidden, const Tensor& hidden_scales) const {
  require(integers() ? grouped_matmul_swiglu_quant(context, rows, scales, weight, groups, hidden, hidden_scales)
                     : grouped_matmul(context, rows, weight, groups, hidden, {.activation = Activation::swiglu}));
}

void MoeCase::multiply_gate_up(Context& context) const {
  multiply_expert(context, expanded, row_scales, gate_up(), groups(), activated, activated_scales);
}

void MoeCase::multiply_down(Context& context) const {
  require(grouped_matmul(context, activated, down(), groups(), expert_out, {.x_scales = activated_scales}));
}

void MoeCase::multiply_shared(Context& context) const {
  if (!has_shared()) return;
  multiply_expert(context, integers() ? x_int8 : x, x_scales, shared_gate_up(), shared_group(), shared_activated,
                  shared_scales);
  require(grouped_matmul(context, shared_activated, shared_down(), shared_group(), shared_out,
                         {.x_scales = shared_scales}));
}

void MoeCase::finalize(Context& context) const {
  require(moe_finalize(context, {.expanded = every_out, .row_of_slot = slots_row, .topk_weights = slots_weight}, out));
}

void MoeCase::run(Context& context) const {
  gate(context);
  route(context);
  quantise(context);
  permute(context);
  multiply_gate_up(context);
  multiply_down(context);
  multiply_shared(context);
  finalize(context);
}

int64_t MoeCase::touched_experts() const {
  int64_t count = 0;
  for (int64_t e = 0; e < arguments.experts; ++e) count += test::get(expert_tokens, e) > 0;
  return count;
}

double MoeCase::shared_flops() const {
  return 6.0 * static_cast<double>(tokens()) * static_cast<double>(arguments.hidden) *
         static_cast<double>(arguments.shared);
}

double MoeCase::flops() const {
  return 6.0 * static_cast<double>(slots()) * static_cast<double>(arguments.hidden) *
             static_cast<double>(arguments.intermediate) +
         shared_flops();
}

int64_t MoeCase::shared_bytes() const {
  return has_shared() ? shared_gate_up_.size_bytes(integers()) + shared_down_.size_bytes(integers()) : 0;
}

int64_t MoeCase::touched_bytes() const {
  const int64_t all = gate_up_.size_bytes(integers()) + down_.size_bytes(integers());
  return all / arguments.experts * touched_experts() + shared_bytes();
}

void spoil(const Tensor& tensor, double other) {
  for (int64_t i = 0; i < tensor.num_elements(); i += kSpoilEvery) {
    const double value = test::get(tensor, i);
    test::set(tensor, i, other == 0 ? (value == 0 ? 1.0 : 0.0) : std::fmod(value + 1, other));
  }
}

}  // namespace opst::tools

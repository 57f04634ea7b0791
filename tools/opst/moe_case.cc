#include "moe_case.h"

#include <cmath>

#include "testing/elements.h"

namespace opst::tools {

namespace {

void require(const Status& status) {
  if (!status.ok()) run_error(status.message());
}

DType float_type_of(const std::string& dtype) {
  const DType type = x_dtype_of(dtype);
  return type == DType::i8 ? DType::f32 : type;
}

}  // namespace

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
  check_products(products);
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
  const int64_t slots = count * a.top_k;
  const DType io = float_type_of(type), rows = x_dtype_of(type);
  logits = tensor(DType::f32, {count, a.experts});
  ids = tensor(DType::i32, {count, a.top_k});
  topk_weights = tensor(DType::f32, {count, a.top_k});
  row_of_slot = tensor(DType::i32, {count, a.top_k});
  slot_of_row = tensor(DType::i32, {slots});
  expert_tokens = tensor(DType::i64, {a.experts});
  x = tensor(io, {count, a.hidden});
  expanded = tensor(rows, {slots, a.hidden});
  activated = tensor(rows, {slots, a.intermediate});
  expert_out = tensor(io, {slots, a.hidden});
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
    gate_up_int_ = gate_up_weights.pack_integers(context, true);
    down_int_ = down_weights.pack_integers(context, true);
  } else {
    gate_up_ = gate_up_weights.pack(context, true);
    down_ = down_weights.pack(context, true);
  }
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

void MoeCase::multiply_gate_up(Context& context) const {
  require(integers()
              ? grouped_matmul_swiglu_quant(context, expanded, row_scales, gate_up_int_, groups(), activated,
                                            activated_scales)
              : grouped_matmul(context, expanded, gate_up_, groups(), activated, {.activation = Activation::swiglu}));
}

void MoeCase::multiply_down(Context& context) const {
  require(integers()
              ? grouped_matmul(context, activated, down_int_, groups(), expert_out, {.x_scales = activated_scales})
              : grouped_matmul(context, activated, down_, groups(), expert_out));
}

void MoeCase::finalize(Context& context) const {
  require(
      moe_finalize(context, {.expanded = expert_out, .row_of_slot = row_of_slot, .topk_weights = topk_weights}, out));
}

void MoeCase::run(Context& context) const {
  gate(context);
  route(context);
  quantise(context);
  permute(context);
  multiply_gate_up(context);
  multiply_down(context);
  finalize(context);
}

int64_t MoeCase::touched_experts() const {
  int64_t count = 0;
  for (int64_t e = 0; e < arguments.experts; ++e) count += test::get(expert_tokens, e) > 0;
  return count;
}

double MoeCase::flops() const {
  return 6.0 * static_cast<double>(slots()) * static_cast<double>(arguments.hidden) *
         static_cast<double>(arguments.intermediate);
}

int64_t MoeCase::touched_bytes() const {
  const int64_t all =
      integers() ? gate_up_int_.size_bytes() + down_int_.size_bytes() : gate_up_.size_bytes() + down_.size_bytes();
  return all / arguments.experts * touched_experts();
}

}  // namespace opst::tools

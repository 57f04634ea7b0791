// moe_layer_forward: check -> routes -> waves of experts through both products -> the weighted sum per token.
//
// A wave is experts whose hidden rows fit into the caches: the second product begins while what the first one wrote is
// still there. Rows of x are gathered by the products as they pack them.
#include "moe/layer.h"

#include <algorithm>
#include <cmath>

#include "core/text.h"
#include "moe/layer_memory.h"

namespace opst {

namespace moe {
namespace {

// Rows of the tokens as the products take them.
struct Tokens {
  ConstTensor x, bytes;           // bytes: i8, each row with a scale; where a product takes them
  const float* scales = nullptr;  // [tokens]
};

// Groups of rows with their weights: experts of a wave, or tokens of the shared one.
struct WaveRows {
  GroupList groups;
  int64_t first_group = 0, rows = 0;
  const int64_t* row_of_x = nullptr;  // null: the tokens themselves
  const float* x_scales = nullptr;    // [rows], where x is bytes
};

class TwoProducts {
 public:
  TwoProducts(Context& context, const LayerCall& call, const Experts& experts)
      : context_(context), call_(call), experts_(experts) {}

  // out [rows, hidden]
  Status run(const WaveRows& wave, const Tokens& tokens, const Tensor& out, Arena arena) const {
    const HiddenMemory memory = take_hidden(arena, experts_, call_.dtype, wave.rows);
    const bool bytes = experts_.hides_bytes();
    const Tensor hidden = matrix_of(bytes ? DType::i8 : call_.dtype, wave.rows, experts_.intermediate, memory.rows);
    Tensor scales;
    if (bytes) scales = Tensor::contiguous(DType::f32, {wave.rows}, memory.scales);
    const GroupedMatmulOptions first{
        .bias = experts_.gate_up_bias, .activation = experts_.first.activation, .out_scales = scales};
    const Status status = experts_.apart ? run_halves(wave, tokens, hidden, scales, memory)
                                         : product(experts_.first, wave, tokens, *experts_.gate_up, hidden, first);
    if (!status.ok()) return status;
    const GroupedMatmulOptions second{.bias = experts_.down_bias, .x_scales = scales};
    return gemm::run_grouped(context_, experts_.second, hidden, *experts_.down, wave.groups, out, second,
                             {.first_group = wave.first_group});
  }

 private:
  Status product(const MatmulProblem& problem, const WaveRows& wave, const Tokens& tokens, const GroupedWeight& weight,
                 const Tensor& out, GroupedMatmulOptions options) const {
    const bool bytes = problem.x_dtype == DType::i8;
    if (bytes) options.x_scales = ConstTensor::contiguous(DType::f32, {wave.rows}, wave.x_scales);
    return gemm::run_grouped(context_, problem, bytes ? tokens.bytes : tokens.x, weight, wave.groups, out, options,
                             {.first_group = wave.first_group, .row_of_x = wave.row_of_x});
  }

  // Gate and up projections apart: both in f32, then the activation as the epilogue of one product computes it.
  Status run_halves(const WaveRows& wave, const Tokens& tokens, const Tensor& hidden, const Tensor& scales,
                    const HiddenMemory& memory) const {
    const int64_t n = experts_.intermediate, stride = padded(n);
    const auto half = [&](float* data) { return matrix_of(DType::f32, wave.rows, stride, data).narrowed(1, 0, n); };
    const Tensor gate = half(memory.gate), up = half(memory.up);
    Status status = product(experts_.first, wave, tokens, *experts_.gate_up, gate, {});
    if (status.ok()) status = product(experts_.second_half, wave, tokens, *experts_.up, up, {});
    if (!status.ok() || n == 0) return status;
    const bool bytes = experts_.hides_bytes();
    const Tensor& to = bytes ? gate : hidden;
    const auto finish = gemm::float_kernels(context_.machine().isa).finish[static_cast<int>(call_.options.activation)];
    const int64_t per_task = rows_per_task(n);
    context_.impl().pool.parallel_for(ceil_div(wave.rows, per_task), [&](int64_t task, int) {
      const int64_t row = task * per_task;
      finish({.sums = memory.gate + row * stride,
              .sums_stride = stride,
              .second = memory.up + row * stride,
              .second_stride = stride,
              .rows = std::min(per_task, wave.rows - row),
              .columns = n,
              .out = row_at(to, row),
              .out_type = to.dtype,
              .row_stride = to.strides[0],
              .column_stride = 1});
    });
    return bytes ? dynamic_quant(context_, gate, hidden, scales) : status;
  }

  Context& context_;
  const LayerCall& call_;
  const Experts& experts_;
};

// The rows of every expert into memory.expanded.
Status run_experts(Context& context, const LayerCall& call, const Routes& routes, const Tokens& tokens,
                   const RowsMemory& memory, Arena hidden) {
  const int threads = context.num_threads();
  const DType dtype = call.dtype;
  const int64_t row_bytes = call.hidden * size_bytes(dtype), local = call.num_local();
  const TwoProducts products(context, call, call.experts);
  const int64_t limit = wave_limit(call.experts, dtype, context.machine(), threads).rows;
  ExpertWave wave;
  for (int64_t e = 0, row = 0; e < local; e = wave.end, row += wave.rows) {
    wave = wave_of(routes.counts, e, local, limit);
    if (wave.rows == 0) continue;
    const WaveRows rows{.groups = counts_of(routes.counts + e, wave.end - e),
                        .first_group = e,
                        .rows = wave.rows,
                        .row_of_x = routes.token_of_row + row,
                        .x_scales = memory.of_rows == nullptr ? nullptr : memory.of_rows + row};
    const Tensor out = matrix_of(dtype, wave.rows, call.hidden, memory.expanded + row * row_bytes);
    const Status status = products.run(rows, tokens, out, hidden);
    if (!status.ok()) return status;
  }
  if (!call.has_shared) return {};
  const TwoProducts shared(context, call, call.shared);
  const int64_t parts = shared_parts(call.tokens, wave_limit(call.shared, dtype, context.machine(), threads).rows);
  for (int64_t i = 0; i < parts; ++i) {
    const int64_t begin = i * call.tokens / parts, count = (i + 1) * call.tokens / parts - begin;
    Tokens part = tokens;
    part.x = tokens.x.narrowed(0, begin, count);
    if (tokens.bytes) part.bytes = tokens.bytes.narrowed(0, begin, count);
    const WaveRows rows{.groups = counts_of(&count, 1),
                        .rows = count,
                        .x_scales = tokens.scales == nullptr ? nullptr : tokens.scales + begin};
    const Tensor out = matrix_of(dtype, count, call.hidden, memory.expanded + (routes.rows + begin) * row_bytes);
    const Status status = shared.run(rows, part, out, hidden);
    if (!status.ok()) return status;
  }
  return {};
}

// out = residual + the weighted sum of a token's rows.
void combine(Context& context, const LayerCall& call, const Routes& routes, const RowsMemory& memory,
             const Tensor& out) {
  const TypeKernels& kernels = kernels_of(context, call.dtype);
  const int64_t top_k = call.top_k, count = top_k + (call.has_shared ? 1 : 0);
  const ConstTensor& residual = call.in.residual;
  const int64_t elements = (Size(count + 1) * call.hidden).value();
  context.impl().pool.for_each(call.tokens, rows_per_task(elements), [&](int64_t t, int worker) {
    int64_t* const indices = memory.indices + worker * padded(top_k + 1);
    float* const weights = memory.weights + worker * padded(top_k + 1);
    for (int64_t k = 0; k < top_k; ++k) {
      indices[k] = routes.row_of_slot[t * top_k + k];
      weights[k] = float_at(routes.weights, t, k);
    }
    if (call.has_shared) indices[top_k] = routes.rows + t, weights[top_k] = share_of(kernels, call, t);
    kernels.combine({.rows = {memory.expanded, call.hidden, 1},
                     .bias = {},
                     .index = indices,
                     .bias_index = nullptr,
                     .weights = weights,
                     .count = count,
                     .features = call.hidden,
                     .skip = {residual ? row_at(residual, t) : nullptr, nullptr},
                     .skip_stride = {residual.strides[1], 0},
                     .out = row_at(out, t),
                     .out_stride = out.strides[1]});
  });
}

// What a caller asks for of the routes.
void store_routes(const LayerCall& call, const Routes& routes, const MoeLayerOutputs& out) {
  const bool of_slots = out.topk_ids || out.topk_weights;
  for (int64_t t = 0; of_slots && t < call.tokens; ++t) {
    for (int64_t k = 0; k < call.top_k; ++k) {
      if (out.topk_ids) store_index(out.topk_ids, index_at(routes.ids, t, k), t, k);
      if (!out.topk_weights) continue;
      const int64_t offset = t * out.topk_weights.strides[0] + k * out.topk_weights.strides[1];
      store_element(out.topk_weights, offset, float_at(routes.weights, t, k));
    }
  }
  for (int64_t e = 0; out.expert_tokens && e < call.num_local(); ++e)
    store_index(out.expert_tokens, routes.counts[e], e);
}

// The tokens as bytes, and the scales of the experts' rows.
Status quantise_tokens(Context& context, const LayerCall& call, const Routes& routes, const RowsMemory& memory,
                       Tokens& tokens) {
  if (!call.experts.takes_bytes() && !call.shared.takes_bytes()) return {};
  const Tensor bytes = matrix_of(DType::i8, call.tokens, call.hidden, memory.bytes);
  const Status status =
      dynamic_quant(context, tokens.x, bytes, Tensor::contiguous(DType::f32, {call.tokens}, memory.scales));
  tokens.bytes = bytes, tokens.scales = memory.scales;
  for (int64_t row = 0; call.experts.takes_bytes() && row < routes.rows; ++row) {
    memory.of_rows[row] = memory.scales[routes.token_of_row[row]];
  }
  return status;
}

Status run_layer(Context& context, const LayerCall& call, const Routes& routes, const MoeLayerOutputs& out) {
  const int threads = context.num_threads();
  const int64_t bytes = rows_bytes(call, routes.counts, routes.rows, context.machine(), threads).value();
  const Result<WorkspaceLease> lease = context.impl().workspaces.lease(bytes);
  if (!lease.ok()) return lease.status();
  Arena arena(lease.value());
  const RowsMemory memory = take_rows(arena, call, routes.rows, threads);
  Tokens tokens{.x = normal_strides(call.in.x), .bytes = {}};
  Status status = quantise_tokens(context, call, routes, memory, tokens);
  if (status.ok()) status = run_experts(context, call, routes, tokens, memory, arena);
  if (!status.ok()) return status;
  if (call.hidden > 0) combine(context, call, routes, memory, normal_strides(out.out));
  store_routes(call, routes, out);
  return {};
}

void check_outputs(ShapeCheck& check, const LayerCall& call, const MoeLayerOutputs& out) {
  const MoeLayerInputs& in = call.in;
  if (is_given(in.residual) && !same_view(in.residual, out.out)) {
    check.tensor("residual", in.residual).dtype({in.x.dtype}).dims({"tokens", "hidden"});
  }
  check.output("out", out.out).dtype({in.x.dtype}).dims({"tokens", "hidden"});
  check.require(call.has_logits || (!out.topk_ids && !out.topk_weights),
                "topk_ids or topk_weights are asked for, but there are no logits to choose by");
  if (check.ok() && call.has_logits) check.holds("options", "top_k", call.top_k);
  if (out.topk_ids) check.output("outputs.topk_ids", out.topk_ids).dtype(kIntegers).dims({"tokens", "top_k"});
  if (out.topk_weights) {
    check.output("outputs.topk_weights", out.topk_weights).dtype({DType::f32}).dims({"tokens", "top_k"});
  }
  if (out.expert_tokens) {
    check.output("expert_tokens", out.expert_tokens).dtype(kIntegers).dims({"experts of the range"});
  }
  if (!check.ok()) return;
  check_fits(check, "outputs.topk_ids", out.topk_ids, call.num_experts);
  check_fits(check, "expert_tokens", out.expert_tokens, call.slots());
  for (const Tensor& output : {out.out, out.topk_ids, out.topk_weights, out.expert_tokens}) {
    check_layer_output(check, call, output);
  }
  if (call.has_logits && call.options.gating.nan_is_error) check_numbers(check, in.logits);
}

}  // namespace

float share_of(const TypeKernels& kernels, const LayerCall& call, int64_t token) {
  const ConstTensor& gate = call.in.shared.gate;
  if (!gate) return 1;
  const int64_t first = 0;
  const float one = 1;
  float dot = 0;
  kernels.combine_backward({.grad_out = row_at(call.in.x, token),
                            .grad_out_stride = call.in.x.strides[1],
                            .rows = {gate.data, 0, gate.strides[0]},
                            .bias = {},
                            .grad_rows = {},
                            .index = &first,
                            .bias_index = nullptr,
                            .weights = &one,
                            .dots = &dot,
                            .count = 1,
                            .features = call.hidden});
  return 1 / (1 + std::exp(-dot));
}

}  // namespace moe

using namespace moe;

Status moe_layer_forward(Context& context, const MoeLayerInputs& inputs, const MoeLayerOutputs& outputs,
                         const MoeLayerOptions& options) {
  return checked("moe_layer_forward", [&](ShapeCheck& check) -> Status {
    LayerCall call(inputs, options);
    check_layer_inputs(check, call);
    if (check.ok()) check_outputs(check, call, outputs);
    if (!check.ok()) return check.status();
    const bool of_routes = outputs.topk_ids || outputs.topk_weights || outputs.expert_tokens;
    if (outputs.out.num_elements() == 0 && !of_routes) {
      if (!call.has_logits) check_indices(check, "topk_ids", inputs.topk_ids, call.num_experts, "experts");
      return check.status();
    }
    return Routes::with(context, check, call,
                        [&](const Routes& routes) { return run_layer(context, call, routes, outputs); });
  });
}

}  // namespace opst

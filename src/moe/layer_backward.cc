// moe_layer_backward: check -> routes -> waves of experts -> gradients per token. Everything between is computed again.
//
// Of an expert's rows, with w the weight of a row's slot, x and g the rows of x and grad_out of its token:
//   gu = x . gate_up^T + gate_up_bias       h  = swiglu(gu)              dh = g . down
//   d weight = dh . h + g . down_bias       d gu = swiglu'(gu) * w dh
//   d gate_up = d gu^T . x                  d down = g^T . (w h)         d x row = d gu . gate_up
// The gradient of a weight is taken of hidden rows: the experts' rows of the forward call are not needed.
#include <algorithm>

#include "moe/layer.h"
#include "opst/rowwise.h"

namespace opst {

namespace moe {
namespace {

// Rows between are written once and read once or twice, beside weights that are packed in each call: memory is bounded
// at little cost when a wave has so many times the caches, and enough rows of an expert for each packing.
constexpr int64_t kWaveCaches = 8, kLeastWaveRows = 256;

// Weights and gradients of experts of one kind: those of the range, or the shared one.
struct ExpertGradients {
  const Experts& experts;
  Tensor gate_up, down, gate_up_bias, down_bias;
};

// Memory of a wave, in the dtype of x.
struct WaveMemory {
  char *x, *g;              // [rows][hidden]
  char *gate_up, *grad;     // [rows][2 intermediate]: gu, d gu
  char *h, *wh, *dh, *wdh;  // [rows][intermediate]
};
template <class From>
WaveMemory take_wave(From& from, const LayerCall& call, const Experts& experts, int64_t rows) {
  const Size bytes = Size(rows) * size_bytes(call.dtype);
  const auto take = [&](Size columns) { return from.template take<char>(bytes * columns.value()); };
  const Size n = experts.intermediate;
  return {take(call.hidden), take(call.hidden), take(n * 2), take(n * 2), take(n), take(n), take(n), take(n)};
}

// Memory of the whole call behind its routes.
struct CallMemory {
  char* x_rows;              // [rows + tokens][hidden]: gradients of x by rows
  float *weights, *shares;   // gradients [tokens][top_k] of slots, and of the shared expert's share before its sigmoid
  int64_t *indices, *gates;  // [threads][top_k + 2]
  float* ones;               // likewise
};
template <class From>
CallMemory take_call(From& from, const LayerCall& call, int64_t rows, bool wants_x, int num_threads) {
  const Size all = Size(rows) + (call.has_shared ? call.tokens : 0);
  const Size lists = Size(num_threads) * padded(call.top_k + 2);
  return {.x_rows = from.template take<char>(wants_x ? all * call.hidden * size_bytes(call.dtype) : Size(0)),
          .weights = from.template take<float>(call.slots()),
          .shares = from.template take<float>(call.has_shared ? call.tokens : 0),
          .indices = from.template take<int64_t>(lists),
          .gates = from.template take<int64_t>(lists),
          .ones = from.template take<float>(lists)};
}

// Rows of a wave: row r is of token_of(r), weighs weight_of(r), and the gradient of that goes to place_of(r).
struct WaveRows {
  int64_t first_group = 0, num_groups = 0, rows = 0;
  const int64_t* counts = nullptr;
  const int64_t* tokens = nullptr;  // null: row r is of token r
  const int64_t* slots = nullptr;   // null: the shared expert's

  int64_t token_of(int64_t row) const { return tokens == nullptr ? row : tokens[row]; }
};

class Backward {
 public:
  Backward(Context& context, const LayerCall& call, const Routes& routes, const ConstTensor& grad_out,
           const CallMemory& memory)
      : context_(context),
        call_(call),
        routes_(routes),
        grad_out_(grad_out),
        memory_(memory),
        kernels_(kernels_of(context, call.dtype)) {}

  // x_rows [rows, hidden]; without data where the gradient of x is not asked for.
  Status run(const ExpertGradients& to, const WaveRows& wave, const Tensor& x_rows, Arena arena) const {
    const Experts& experts = to.experts;
    const WaveMemory m = take_wave(arena, call_, experts, wave.rows);
    const int64_t n = experts.intermediate;
    const auto matrix = [&](char* data, int64_t columns) { return matrix_of(call_.dtype, wave.rows, columns, data); };
    const Tensor x = matrix(m.x, call_.hidden), g = matrix(m.g, call_.hidden), gu = matrix(m.gate_up, 2 * n),
                 grad = matrix(m.grad, 2 * n), h = matrix(m.h, n), wh = matrix(m.wh, n), dh = matrix(m.dh, n),
                 wdh = matrix(m.wdh, n);
    const auto of_wave = [&](const auto& tensor) {
      return tensor ? tensor.narrowed(0, wave.first_group, wave.num_groups) : tensor;
    };
    const ConstTensor gate_up = of_wave(experts.gate_up->stack()), down = of_wave(experts.down->stack());
    const GroupList groups = counts_of(wave.counts, wave.num_groups);
    gather(wave, x, g);
    Status status = grouped_matmul(context_, x, gate_up, groups, gu, {.bias = of_wave(experts.gate_up_bias)});
    const auto then = [&](const auto& step) {
      if (status.ok()) status = step();
    };
    then([&] { return swiglu(context_, gu, h); });
    then([&] { return grouped_matmul_backward(context_, g, {}, down, groups, {.x = dh}); });
    if (status.ok()) weigh(wave, experts, g, h, wh, dh, wdh);
    then([&] { return swiglu_backward(context_, wdh, gu, grad); });
    then([&] {
      return grouped_matmul_backward(context_, grad, x, gate_up, groups,
                                     {.x = x_rows, .weight = of_wave(to.gate_up), .bias = of_wave(to.gate_up_bias)});
    });
    then([&] { return grouped_matmul_backward(context_, g, wh, {}, groups, {.weight = of_wave(to.down)}); });
    if (!status.ok() || !to.down_bias) return status;
    weigh_rows(wave, g, x);  // x has done its part
    return grouped_matmul_backward(context_, x, {}, {}, groups, {.bias = of_wave(to.down_bias)});
  }

  // grad_x[t] = the sum of its rows, in ascending order of k, then the shared expert's, then that of the share.
  void combine(const Tensor& grad_x) const {
    const int64_t top_k = call_.top_k, stride = padded(top_k + 2);
    const ConstTensor& gate = call_.in.shared.gate;
    const int64_t count = top_k + (call_.has_shared ? 1 : 0) + (gate ? 1 : 0);
    const int64_t elements = (Size(count + 1) * call_.hidden).value();
    context_.impl().pool.for_each(call_.tokens, rows_per_task(elements), [&](int64_t t, int worker) {
      int64_t *const indices = memory_.indices + worker * stride, *const gates = memory_.gates + worker * stride;
      float* const weights = memory_.ones + worker * stride;
      std::fill_n(gates, count, -1);
      std::fill_n(weights, count, 1.0f);
      for (int64_t k = 0; k < top_k; ++k) indices[k] = routes_.row_of_slot[t * top_k + k];
      if (call_.has_shared) indices[top_k] = routes_.rows + t;
      if (gate) indices[top_k + 1] = -1, gates[top_k + 1] = 0, weights[top_k + 1] = memory_.shares[t];
      kernels_.combine({.rows = {memory_.x_rows, call_.hidden, 1},
                        .bias = {gate.data, 0, gate.strides[0]},
                        .index = indices,
                        .bias_index = gates,
                        .weights = weights,
                        .count = count,
                        .features = call_.hidden,
                        .skip = {},
                        .skip_stride = {},
                        .out = row_at(grad_x, t),
                        .out_stride = grad_x.strides[1]});
    });
  }

  // sum over tokens, ascending, of shares[t] * x[t]. `tokens`: 0, 1, ..
  void grad_gate(const Tensor& grad, int64_t* tokens) const {
    constexpr int64_t kPiece = 128;
    for (int64_t t = 0; t < call_.tokens; ++t) tokens[t] = t;
    const ConstTensor x = normal_strides(call_.in.x);
    context_.impl().pool.parallel_for(ceil_div(call_.hidden, kPiece), [&](int64_t task, int) {
      const int64_t begin = task * kPiece, n = std::min(kPiece, call_.hidden - begin);
      kernels_.combine({.rows = rows_of(x.narrowed(1, begin, n)),
                        .bias = {},
                        .index = tokens,
                        .bias_index = nullptr,
                        .weights = memory_.shares,
                        .count = call_.tokens,
                        .features = n,
                        .skip = {},
                        .skip_stride = {},
                        .out = grad.narrowed(0, begin, n).data,
                        .out_stride = grad.strides[0]});
    });
  }

 private:
  void gather(const WaveRows& wave, const Tensor& x, const Tensor& g) const {
    const int64_t bytes = size_bytes(call_.dtype);
    const ConstTensor of_x = normal_strides(call_.in.x);
    context_.impl().pool.for_each(wave.rows, rows_per_task(2 * call_.hidden), [&](int64_t row, int) {
      const int64_t t = wave.token_of(row);
      copy_elements(row_at(of_x, t), of_x.strides[1], row_at(x, row), 1, call_.hidden, bytes);
      copy_elements(row_at(grad_out_, t), grad_out_.strides[1], row_at(g, row), 1, call_.hidden, bytes);
    });
  }

  float weight_of(const WaveRows& wave, int64_t row) const {
    if (wave.slots == nullptr) return share_of(kernels_, call_, row);
    return float_at(routes_.weights, wave.slots[row] / call_.top_k, wave.slots[row] % call_.top_k);
  }

  // to = weight * from, row by row.
  CombineBackward weighing(const ConstTensor& from, const Tensor& to, int64_t row, const int64_t& zero,
                           const float& weight) const {
    return {.grad_out = row_at(from, row),
            .grad_out_stride = 1,
            .rows = {},
            .bias = {},
            .grad_rows = {row_at(to, row), 0, 1},
            .index = &zero,
            .bias_index = nullptr,
            .weights = &weight,
            .dots = nullptr,
            .count = 1,
            .features = from.shape[1]};
  }
  void weigh_rows(const WaveRows& wave, const Tensor& from, const Tensor& to) const {
    context_.impl().pool.for_each(wave.rows, rows_per_task(from.shape[1]), [&](int64_t row, int) {
      const int64_t zero = 0;
      const float weight = weight_of(wave, row);
      kernels_.combine_backward(weighing(from, to, row, zero, weight));
    });
  }

  // wdh = w dh, wh = w h, and the gradient of w.
  void weigh(const WaveRows& wave, const Experts& experts, const Tensor& g, const Tensor& h, const Tensor& wh,
             const Tensor& dh, const Tensor& wdh) const {
    context_.impl().pool.for_each(wave.rows, rows_per_task(4 * experts.intermediate), [&](int64_t row, int) {
      const int64_t zero = 0;
      const float weight = weight_of(wave, row);
      float dot = 0;
      CombineBackward of_dh = weighing(dh, wdh, row, zero, weight);
      of_dh.rows = {row_at(h, row), 0, 1};
      of_dh.dots = &dot;
      kernels_.combine_backward(of_dh);
      kernels_.combine_backward(weighing(h, wh, row, zero, weight));
      if (experts.down_bias) dot += bias_dot(wave, experts.down_bias, g, row);
      if (wave.slots == nullptr) {
        memory_.shares[row] = call_.in.shared.gate ? dot * weight * (1 - weight) : 0;
      } else {
        memory_.weights[wave.slots[row]] = dot;
      }
    });
  }

  // g . down_bias of the row's expert
  float bias_dot(const WaveRows& wave, const ConstTensor& bias, const Tensor& g, int64_t row) const {
    int64_t e = 0;
    for (int64_t end = wave.counts[0]; end <= row; end += wave.counts[++e]) {
    }
    float sum = 0;
    for (int64_t f = 0; f < call_.hidden; ++f) sum += float_at(g, row, f) * float_at(bias, wave.first_group + e, f);
    return sum;
  }

  Context& context_;
  const LayerCall& call_;
  const Routes& routes_;
  const ConstTensor& grad_out_;
  const CallMemory& memory_;
  const TypeKernels& kernels_;
};

int64_t wave_limit_of(const LayerCall& call, const Machine& machine, int num_threads) {
  CountBytes of_row;
  take_wave(of_row, call, call.experts, 1);
  const Size caches = (Size(machine.cache.l2_bytes) + machine.cache.l3_bytes_per_core) * num_threads;
  return std::max(kLeastWaveRows, (caches * kWaveCaches).value() / std::max<int64_t>(1, of_row.bytes.value()));
}

// Rows of the largest wave.
int64_t most_rows(const LayerCall& call, const Routes& routes, int64_t limit) {
  int64_t most = 0;
  ExpertWave wave;
  for (int64_t e = 0; e < call.num_local(); e = wave.end) {
    wave = wave_of(routes.counts, e, call.num_local(), limit);
    most = std::max(most, wave.rows);
  }
  return most;
}

void store_weights(const LayerCall& call, const CallMemory& memory, const Tensor& grad) {
  for (int64_t t = 0; t < call.tokens; ++t) {
    for (int64_t k = 0; k < call.top_k; ++k) {
      store_element(grad, t * grad.strides[0] + k * grad.strides[1], memory.weights[t * call.top_k + k]);
    }
  }
}

Status run_backward(Context& context, const LayerCall& call, const Routes& routes, const ConstTensor& grad_out,
                    const MoeLayerGradients& to) {
  const int threads = context.num_threads();
  const int64_t limit = wave_limit_of(call, context.machine(), threads), local = call.num_local(),
                columns = call.hidden;
  const bool wants_x = static_cast<bool>(to.x);
  CountBytes bytes, of_experts, of_shared;
  take_call(bytes, call, routes.rows, wants_x, threads);
  take_wave(of_experts, call, call.experts, most_rows(call, routes, limit));
  if (call.has_shared) take_wave(of_shared, call, call.shared, call.tokens);
  const Size list = Arena::size_of<int64_t>(call.has_shared ? call.tokens : 0);
  const int64_t waves = std::max(of_experts.bytes.value(), of_shared.bytes.value());
  const Result<WorkspaceLease> lease = context.impl().workspaces.lease((bytes.bytes + list + waves).value());
  if (!lease.ok()) return lease.status();
  Arena arena(lease.value());
  const CallMemory memory = take_call(arena, call, routes.rows, wants_x, threads);
  int64_t* const tokens = arena.take<int64_t>(call.has_shared ? call.tokens : 0);
  std::fill_n(memory.weights, call.slots(), 0.0f);

  const Backward backward(context, call, routes, grad_out, memory);
  const auto x_rows = [&](int64_t first, int64_t rows) {
    char* const data = memory.x_rows + (wants_x ? first * columns * size_bytes(call.dtype) : 0);
    return wants_x ? matrix_of(call.dtype, rows, columns, data) : Tensor();
  };
  ExpertWave wave;
  for (int64_t e = 0, row = 0; e < local; e = wave.end, row += wave.rows) {
    wave = wave_of(routes.counts, e, local, limit);
    const Status status = backward.run({call.experts, to.gate_up, to.down, to.gate_up_bias, to.down_bias},
                                       {.first_group = e,
                                        .num_groups = wave.end - e,
                                        .rows = wave.rows,
                                        .counts = routes.counts + e,
                                        .tokens = routes.token_of_row + row,
                                        .slots = routes.slot_of_row + row},
                                       x_rows(row, wave.rows), arena);
    if (!status.ok()) return status;
  }
  if (call.has_shared) {
    const Status status = backward.run({call.shared, to.shared_gate_up, to.shared_down, {}, {}},
                                       {.num_groups = 1, .rows = call.tokens, .counts = &call.tokens},
                                       x_rows(routes.rows, call.tokens), arena);
    if (!status.ok()) return status;
  }
  if (wants_x && columns > 0) backward.combine(normal_strides(to.x));
  if (to.shared_gate) backward.grad_gate(normal_strides(to.shared_gate), tokens);
  if (to.topk_weights) store_weights(call, memory, to.topk_weights);
  if (!to.logits) return {};
  return moe_gating_backward(
      context,
      {.logits = call.in.logits,
       .topk_ids = routes.ids,
       .grad_topk_weights = ConstTensor::contiguous(DType::f32, {call.tokens, call.top_k}, memory.weights)},
      to.logits, call.options.gating);
}

void check_backward(ShapeCheck& check, const LayerCall& call, const ConstTensor& grad_out,
                    const MoeLayerGradients& to) {
  const MoeLayerInputs& in = call.in;
  const auto is_tensor = [&](const char* name, const GroupedWeight* weight) {
    check.require(weight == nullptr || weight->kind() == MatmulWeight::unpacked, name,
                  " is packed, but gradients are taken with weights that are tensors");
  };
  is_tensor("gate_up", call.experts.gate_up);
  is_tensor("down", call.experts.down);
  is_tensor("shared.gate_up", call.shared.gate_up);
  is_tensor("shared.down", call.shared.down);
  check.require(!call.experts.apart && !call.shared.apart,
                "up is given, but gradients are of gate and up in one tensor");
  check.require(call.options.activation == Activation::swiglu, "activation is ", to_string(call.options.activation),
                ", but must be swiglu");
  check.require(call.options.activations == ActivationType::exact, "activations is int8, but must be exact");
  check.tensor("grad_out", grad_out).dtype({in.x.dtype}).dims({"tokens", "hidden"});
  const auto output = [&](const char* name, const Tensor& gradient, std::initializer_list<DType> types,
                          std::initializer_list<const char*> dims) {
    if (gradient) check.output(name, gradient).dtype(types).dims(dims);
  };
  const char *const range = "experts of the range", *const both = "2 * intermediate", *const n = "intermediate";
  output("gradients.x", to.x, {in.x.dtype}, {"tokens", "hidden"});
  check.require(call.has_logits || !to.logits, "gradients.logits is asked for, but there are no logits");
  check.require(!call.has_logits || !to.topk_weights, "gradients.topk_weights is asked for, but there are logits");
  output("gradients.logits", to.logits, {in.logits.dtype}, {"tokens", "num_experts"});
  output("gradients.topk_weights", to.topk_weights, {DType::f32, in.x.dtype}, {"tokens", "top_k"});
  output("gradients.gate_up", to.gate_up, kFloats, {range, both, "hidden"});
  output("gradients.down", to.down, kFloats, {range, "hidden", n});
  check.require(!to.gate_up_bias || in.experts.gate_up_bias,
                "gradients.gate_up_bias is asked for, but there is no bias");
  check.require(!to.down_bias || in.experts.down_bias, "gradients.down_bias is asked for, but there is no bias");
  output("gradients.gate_up_bias", to.gate_up_bias, kFloats, {range, both});
  output("gradients.down_bias", to.down_bias, kFloats, {range, "hidden"});
  const bool of_shared = to.shared_gate_up || to.shared_down || to.shared_gate;
  check.require(call.has_shared || !of_shared, "gradients of a shared expert are asked for, but there is none");
  check.require(!to.shared_gate || in.shared.gate, "gradients.shared_gate is asked for, but shared.gate is absent");
  output("gradients.shared_gate_up", to.shared_gate_up, kFloats,
         {"shared experts", "2 * shared intermediate", "hidden"});
  output("gradients.shared_down", to.shared_down, kFloats, {"shared experts", "hidden", "shared intermediate"});
  output("gradients.shared_gate", to.shared_gate, {in.x.dtype}, {"hidden"});
  if (check.ok() && call.has_logits && call.options.gating.nan_is_error) check_numbers(check, in.logits);
}

}  // namespace
}  // namespace moe

using namespace moe;

Status moe_layer_backward(Context& context, const ConstTensor& grad_out, const MoeLayerInputs& inputs,
                          const MoeLayerGradients& gradients, const MoeLayerOptions& options) {
  return checked("moe_layer_backward", [&](ShapeCheck& check) -> Status {
    LayerCall call(inputs, options);
    check_layer_inputs(check, call);
    if (check.ok()) check_backward(check, call, grad_out, gradients);
    if (!check.ok()) return check.status();
    const ConstTensor grad = normal_strides(grad_out);
    return Routes::with(context, check, call,
                        [&](const Routes& routes) { return run_backward(context, call, routes, grad, gradients); });
  });
}

}  // namespace opst

// Checks that the room's files share, and the operators without a weight: softmax, swiglu, add.
#include "opst/rowwise.h"

#include <cmath>

#include "core/guarded.h"
#include "machine/levels.h"
#include "rowwise/rows.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_FLOAT_LEVELS, rowwise, Kernels, kKernels, kernels)

namespace rowwise {

namespace {

// The leading dimensions, and behind them `last` unless it is null.
void check_dims(ShapeCheck& check, ShapeCheck::TensorCheck tensor, int rank, const char* last) {
  const bool has_last = last != nullptr;
  check.require(rank >= (has_last ? 1 : 0) && rank <= kMaxRank - (has_last ? 0 : 1),
                [&] { return "rank is " + std::to_string(rank) + ", but must be from 1 to 5"; });
  if (check.ok()) tensor.leading_dims(has_last ? rank - 1 : rank, last);
}

}  // namespace

// An input that is the same view as an output is checked after the outputs, so that the outputs are searched for
// overlaps with one another and with the other inputs only.
void check_rows(ShapeCheck& check, std::initializer_list<Input> inputs, std::initializer_list<Output> outputs,
                const char* last) {
  const ConstTensor& first = *inputs.begin()->tensor;
  const auto is_written = [&](const Input& input) {
    return std::any_of(outputs.begin(), outputs.end(), [&](const Output& output) {
      return output.tensor != nullptr && same_view(*input.tensor, *output.tensor);
    });
  };
  const auto check_inputs = [&](bool written) {
    for (const Input& input : inputs) {
      if (input.tensor == nullptr || is_written(input) != written) continue;
      ShapeCheck::TensorCheck tensor = check.tensor(input.name, *input.tensor);
      if (&input == inputs.begin()) tensor.dtype({DType::f32, DType::bf16, DType::f16});
      check_dims(check, tensor.dtype({first.dtype}), first.rank, last);
    }
  };
  check_inputs(false);
  for (const Output& output : outputs) {
    if (output.tensor == nullptr) continue;
    check_dims(check, check.output(output.name, *output.tensor).dtype({first.dtype}), first.rank, last);
  }
  check_inputs(true);
}

void check_row_numbers(ShapeCheck& check, const char* name, const Tensor& numbers, int row_rank) {
  if (check.ok()) check_dims(check, check.output(name, numbers).dtype({DType::f32}), row_rank - 1, nullptr);
}

void check_weight(ShapeCheck& check, const char* name, const ConstTensor& weight, DType dtype) {
  ShapeCheck::TensorCheck tensor = check.tensor(name, weight);
  (dtype == DType::f32 ? tensor.dtype({dtype}) : tensor.dtype({DType::f32, dtype})).dims({"features"});
}

namespace {

void run_binary(Context& context, Binary kernel, const ConstTensor& a, const ConstTensor& b, const Tensor& out) {
  const int64_t n = out.shape[out.rank - 1];
  for_each_row(context, num_rows(out), n,
               [&](int64_t row) { kernel(row_of(a, row), row_of(b, row), row_of(out, row), n); });
}

void check_scale(ShapeCheck& check, float scale) {
  check.require(std::isfinite(scale), [&] { return "scale is " + std::to_string(scale) + ", but must be finite"; });
}

// Gate and up side by side in `tensor`; the halves mean nothing where the check fails.
template <class AnyTensor>
struct Halves {
  AnyTensor gate, up;
};
template <class AnyTensor>
Halves<AnyTensor> halves_of(ShapeCheck& check, const char* name, const AnyTensor& tensor, bool swapped) {
  check.tensor(name, tensor);
  if (!check.ok()) return {};
  check.require(tensor.rank >= 1, [&] { return std::string(name) + " has rank 0, but must be from 1 to 5"; });
  if (!check.ok()) return {};
  const int last = tensor.rank - 1;
  const int64_t n = tensor.shape[last] / 2;
  check.require(tensor.shape[last] % 2 == 0, [&] {
    return std::string(name) + " dim " + std::to_string(last) + " is " + std::to_string(tensor.shape[last]) +
           ", but must be even: gate and up side by side";
  });
  if (!check.ok()) return {};
  const AnyTensor first = tensor.narrowed(last, 0, n), second = tensor.narrowed(last, n, n);
  return swapped ? Halves<AnyTensor>{second, first} : Halves<AnyTensor>{first, second};
}

}  // namespace
}  // namespace rowwise

using rowwise::check_rows;
using rowwise::for_each_row;
using rowwise::kernels;
using rowwise::row_of;

Status softmax(Context& context, const ConstTensor& x, const Tensor& out, const SoftmaxOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("softmax");
    check_rows(check, {{"x", &x}}, {{"out", &out}});
    rowwise::check_scale(check, options.scale);
    if (!check.ok()) return check.status();
    const rowwise::Softmax kernel = kernels(context.machine().isa).softmax[float_index(x.dtype)];
    const int64_t n = check["features"];
    for_each_row(context, num_rows(x), n,
                 [&](int64_t row) { kernel(row_of(x, row), row_of(out, row), n, options.scale); });
    return {};
  });
}

Status softmax_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& out, const Tensor& grad_x,
                        const SoftmaxOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("softmax_backward");
    check_rows(check, {{"grad_out", &grad_out}, {"out", &out}}, {{"grad_x", &grad_x}});
    rowwise::check_scale(check, options.scale);
    if (!check.ok()) return check.status();
    const rowwise::SoftmaxBackward kernel = kernels(context.machine().isa).softmax_backward[float_index(out.dtype)];
    const int64_t n = check["features"];
    for_each_row(context, num_rows(out), n, [&](int64_t row) {
      kernel(row_of(grad_out, row), row_of(out, row), row_of(grad_x, row), n, options.scale);
    });
    return {};
  });
}

Status swiglu(Context& context, const ConstTensor& gate, const ConstTensor& up, const Tensor& out) {
  return guarded([&]() -> Status {
    ShapeCheck check("swiglu");
    check_rows(check, {{"gate", &gate}, {"up", &up}}, {{"out", &out}});
    if (!check.ok()) return check.status();
    rowwise::run_binary(context, kernels(context.machine().isa).swiglu[float_index(gate.dtype)], gate, up, out);
    return {};
  });
}

Status swiglu(Context& context, const ConstTensor& gate_up, const Tensor& out, const SwigluOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("swiglu");
    const auto halves = rowwise::halves_of(check, "gate_up", gate_up, options.swapped);
    if (!check.ok()) return check.status();
    return swiglu(context, halves.gate, halves.up, out);
  });
}

Status swiglu_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& gate, const ConstTensor& up,
                       const Tensor& grad_gate, const Tensor& grad_up) {
  return guarded([&]() -> Status {
    ShapeCheck check("swiglu_backward");
    check_rows(check, {{"grad_out", &grad_out}, {"gate", &gate}, {"up", &up}},
               {{"grad_gate", &grad_gate}, {"grad_up", &grad_up}});
    if (!check.ok()) return check.status();
    const rowwise::SwigluBackward kernel = kernels(context.machine().isa).swiglu_backward[float_index(gate.dtype)];
    const int64_t n = check["features"];
    for_each_row(context, num_rows(gate), n, [&](int64_t row) {
      kernel(row_of(grad_out, row), row_of(gate, row), row_of(up, row), row_of(grad_gate, row), row_of(grad_up, row),
             n);
    });
    return {};
  });
}

Status swiglu_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& gate_up,
                       const Tensor& grad_gate_up, const SwigluOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("swiglu_backward");
    const auto halves = rowwise::halves_of(check, "gate_up", gate_up, options.swapped);
    const auto gradients = rowwise::halves_of(check, "grad_gate_up", grad_gate_up, options.swapped);
    if (!check.ok()) return check.status();
    return swiglu_backward(context, grad_out, halves.gate, halves.up, gradients.gate, gradients.up);
  });
}

Status add(Context& context, const ConstTensor& a, const ConstTensor& b, const Tensor& out) {
  return guarded([&]() -> Status {
    ShapeCheck check("add");
    check_rows(check, {{"a", &a}, {"b", &b}}, {{"out", &out}});
    if (!check.ok()) return check.status();
    rowwise::run_binary(context, kernels(context.machine().isa).add[float_index(a.dtype)], a, b, out);
    return {};
  });
}

}  // namespace opst

// Checks that the room's files share, and the operators without a weight: softmax, swiglu, add.
#include "opst/rowwise.h"

#include <cmath>
#include <utility>

#include "machine/levels.h"
#include "rowwise/rows.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_FLOAT_LEVELS, rowwise, Kernels, kKernels, kernels)

namespace rowwise {

void check_dims(ShapeCheck& check, ShapeCheck::TensorCheck tensor, int rank, const char* last) {
  const int num_last = last != nullptr ? 1 : 0;
  check.require(rank >= num_last && rank < kMaxRank + num_last, "rank is ", rank, ", but must be from 1 to 5");
  if (check.ok()) tensor.leading_dims(rank - num_last, last);
}

// An input that is the same view as an output is checked after the outputs, so that the outputs are searched for
// overlaps with one another and with the other inputs only.
void check_rows(ShapeCheck& check, std::initializer_list<Input> inputs, std::initializer_list<Output> outputs) {
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
      check_dims(check, tensor.dtype({first.dtype}), first.rank, "features");
    }
  };
  check_inputs(false);
  for (const auto& [name, tensor] : outputs) {
    if (tensor == nullptr) continue;
    check_dims(check, check.output(name, *tensor).dtype({first.dtype}), first.rank, "features");
  }
  check_inputs(true);
}

}  // namespace rowwise

using namespace rowwise;

namespace {

void check_scale(ShapeCheck& check, float scale) {
  check.require(std::isfinite(scale), "scale is ", scale, ", but must be finite");
}

// Gate and up, side by side in `tensor`; they mean nothing where the check fails.
template <class AnyTensor>
std::pair<AnyTensor, AnyTensor> halves_of(ShapeCheck& check, const char* name, const AnyTensor& tensor, bool swapped) {
  check.tensor(name, tensor);
  check.require(tensor.rank >= 1, name, " has rank 0, but must be from 1 to 5");
  if (!check.ok()) return {};
  const int last = tensor.rank - 1;
  const int64_t size = tensor.shape[last], n = size / 2;
  check.require(size % 2 == 0, name, " dim ", last, " is ", size, ", but must be even: gate and up side by side");
  const AnyTensor first = tensor.narrowed(last, 0, n), second = tensor.narrowed(last, n, n);
  return swapped ? std::pair(second, first) : std::pair(first, second);
}

// kernel(row of each tensor.., elements of a row): the tensors have the shape of the first.
template <class Kernel, class... Tensors>
void run_rows(Context& context, const Kernel& kernel, const ConstTensor& first, const Tensors&... others) {
  const int64_t n = first.shape[first.rank - 1];
  for_each_row(context, num_rows(first), n,
               [&](int64_t row, int) { kernel(row_of(first, row), row_of(others, row)..., n); });
}

Status run_binary(Context& context, const char* operator_name, Binary TypeKernels::*kernel, const Input& a,
                  const Input& b, const Tensor& out) {
  return checked(operator_name, [&](ShapeCheck& check) {
    check_rows(check, {a, b}, {{"out", &out}});
    if (!check.ok()) return;
    run_rows(context, kernels_of(context, out.dtype).*kernel, *a.tensor, *b.tensor, out);
  });
}

}  // namespace

Status softmax(Context& context, const ConstTensor& x, const Tensor& out, const SoftmaxOptions& options) {
  return checked("softmax", [&](ShapeCheck& check) {
    check_rows(check, {{"x", &x}}, {{"out", &out}});
    check_scale(check, options.scale);
    if (!check.ok()) return;
    const Softmax kernel = kernels_of(context, x.dtype).softmax;
    const auto scaled = [&](ConstRow from, Row to, int64_t n) { kernel(from, to, n, options.scale); };
    run_rows(context, scaled, x, out);
  });
}

Status softmax_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& out, const Tensor& grad_x,
                        const SoftmaxOptions& options) {
  return checked("softmax_backward", [&](ShapeCheck& check) {
    check_rows(check, {{"grad_out", &grad_out}, {"out", &out}}, {{"grad_x", &grad_x}});
    check_scale(check, options.scale);
    if (!check.ok()) return;
    const SoftmaxBackward kernel = kernels_of(context, out.dtype).softmax_backward;
    const auto scaled = [&](ConstRow g, ConstRow y, Row to, int64_t n) { kernel(g, y, to, n, options.scale); };
    run_rows(context, scaled, grad_out, out, grad_x);
  });
}

Status swiglu(Context& context, const ConstTensor& gate, const ConstTensor& up, const Tensor& out) {
  return run_binary(context, "swiglu", &TypeKernels::swiglu, {"gate", &gate}, {"up", &up}, out);
}

Status swiglu(Context& context, const ConstTensor& gate_up, const Tensor& out, const SwigluOptions& options) {
  return checked("swiglu", [&](ShapeCheck& check) -> Status {
    const auto [gate, up] = halves_of(check, "gate_up", gate_up, options.swapped);
    if (!check.ok()) return check.status();
    return swiglu(context, gate, up, out);
  });
}

Status swiglu_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& gate, const ConstTensor& up,
                       const Tensor& grad_gate, const Tensor& grad_up) {
  return checked("swiglu_backward", [&](ShapeCheck& check) {
    check_rows(check, {{"grad_out", &grad_out}, {"gate", &gate}, {"up", &up}},
               {{"grad_gate", &grad_gate}, {"grad_up", &grad_up}});
    if (!check.ok()) return;
    run_rows(context, kernels_of(context, gate.dtype).swiglu_backward, grad_out, gate, up, grad_gate, grad_up);
  });
}

Status swiglu_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& gate_up,
                       const Tensor& grad_gate_up, const SwigluOptions& options) {
  return checked("swiglu_backward", [&](ShapeCheck& check) -> Status {
    const auto [gate, up] = halves_of(check, "gate_up", gate_up, options.swapped);
    const auto [grad_gate, grad_up] = halves_of(check, "grad_gate_up", grad_gate_up, options.swapped);
    if (!check.ok()) return check.status();
    return swiglu_backward(context, grad_out, gate, up, grad_gate, grad_up);
  });
}

Status add(Context& context, const ConstTensor& a, const ConstTensor& b, const Tensor& out) {
  return run_binary(context, "add", &TypeKernels::add, {"a", &a}, {"b", &b}, out);
}

}  // namespace opst

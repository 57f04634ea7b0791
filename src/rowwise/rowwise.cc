#include "opst/rowwise.h"

#include <cmath>

#include "core/guarded.h"
#include "rowwise/rows.h"

namespace opst {

using rowwise::check_dims;
using rowwise::for_each_row;
using rowwise::num_rows;
using rowwise::row_of;
using rowwise::same_view;
using rowwise::type_index;

namespace rowwise {

const Kernels& kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::avx512) return avx512::rowwise::kKernels;
  if (isa >= Isa::avx2) return avx2::rowwise::kKernels;
#endif
  static_cast<void>(isa);
  return generic::rowwise::kKernels;
}

namespace {

struct Input {
  const char* name;
  ConstTensor tensor;
};

// Inputs and `out` all of the shape [.., last] and the dtype of the first. An output that is the same view as an input
// is in place, and legal: it is checked before that input, so that only the others are searched for overlaps.
void check_same_shape(ShapeCheck& check, std::initializer_list<Input> inputs, const Tensor& out, const char* last) {
  const ConstTensor& first = inputs.begin()->tensor;
  const auto check_input = [&](const Input& input) {
    ShapeCheck::TensorCheck tensor = check.tensor(input.name, input.tensor);
    if (&input == inputs.begin()) tensor.dtype({DType::f32, DType::bf16, DType::f16});
    check_dims(check, tensor.dtype({first.dtype}), first.rank, last);
  };
  for (const Input& input : inputs) {
    if (!same_view(input.tensor, out)) check_input(input);
  }
  check_dims(check, check.output("out", out).dtype({first.dtype}), first.rank, last);
  for (const Input& input : inputs) {
    if (same_view(input.tensor, out)) check_input(input);
  }
}

void run_binary(Context& context, Binary kernel, const ConstTensor& a, const ConstTensor& b, const Tensor& out) {
  const int64_t n = out.shape[out.rank - 1];
  for_each_row(context, num_rows(out), n,
               [&](int64_t row) { kernel(row_of(a, row), row_of(b, row), row_of(out, row), n); });
}

}  // namespace
}  // namespace rowwise

Status rms_norm(Context& context, const ConstTensor& x, const ConstTensor& weight, const Tensor& out,
                const RmsNormOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("rms_norm");
    check.tensor("weight", weight).dtype({DType::f32, x.dtype}).dims({"features"});
    rowwise::check_same_shape(check, {{"x", x}}, out, "features");
    check.require(options.eps >= 0, [&] { return "eps is " + std::to_string(options.eps) + ", but must be >= 0"; });
    if (!check.ok()) return check.status();

    const rowwise::Kernels& kernels = rowwise::kernels(context.machine().isa);
    const int type = type_index(x.dtype);
    const rowwise::RmsNorm kernel =
        weight.dtype == DType::f32 ? kernels.rms_norm_f32_weight[type] : kernels.rms_norm[type];
    const int64_t features = check["features"];
    const rowwise::ConstRow weight_row{weight.data, weight.strides[0]};
    for_each_row(context, num_rows(x), features,
                 [&](int64_t row) { kernel(row_of(x, row), weight_row, row_of(out, row), features, options.eps); });
    return {};
  });
}

Status rope_table(Context& context, const ConstTensor& positions, const Tensor& cos, const Tensor& sin,
                  const RopeTableOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("rope_table");
    check.tensor("positions", positions).dtype({DType::i64}).dims({"tokens"});
    check.output("cos", cos).dtype({DType::f32}).dims({"tokens", "half"});
    check.output("sin", sin).dtype({DType::f32}).dims({"tokens", "half"});
    check.require(options.theta > 0 && std::isfinite(options.theta),
                  [&] { return "theta is " + std::to_string(options.theta) + ", but must be positive and finite"; });
    if (!check.ok()) return check.status();

    const int64_t half = check["half"];
    Result<WorkspaceLease> lease = context.impl().workspaces.lease(Arena::size_of<double>(half));
    if (!lease.ok()) return lease.status();
    auto* const frequency = Arena(lease.value()).take<double>(half);
    for (int64_t i = 0; i < half; ++i) {
      frequency[i] = std::pow(options.theta, -static_cast<double>(i) / static_cast<double>(half));
    }
    // A sine costs as much as some hundred elements of the other operators.
    for_each_row(context, check["tokens"], 64 * half, [&](int64_t token) {
      const int64_t position = static_cast<const int64_t*>(positions.data)[token * positions.strides[0]];
      for (int64_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(position) * frequency[i];
        static_cast<float*>(cos.data)[token * cos.strides[0] + i * cos.strides[1]] =
            static_cast<float>(std::cos(angle));
        static_cast<float*>(sin.data)[token * sin.strides[0] + i * sin.strides[1]] =
            static_cast<float>(std::sin(angle));
      }
    });
    return {};
  });
}

const char* to_string(RopeStyle style) { return style == RopeStyle::pairs ? "pairs" : "halves"; }

Status rope(Context& context, const ConstTensor& x, const ConstTensor& cos, const ConstTensor& sin, const Tensor& out,
            const RopeOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("rope");
    check.tensor("cos", cos).dtype({DType::f32}).dims({"tokens", "half"});
    check.tensor("sin", sin).dtype({DType::f32}).dims({"tokens", "half"});
    const bool in_place = same_view(x, out);
    if (in_place) check.output("out", out).dims({"tokens", "num_heads", "head_dim"});
    check.tensor("x", x).dtype({DType::f32, DType::bf16, DType::f16}).dims({"tokens", "num_heads", "head_dim"});
    if (!in_place) check.output("out", out).dtype({x.dtype}).dims({"tokens", "num_heads", "head_dim"});
    const int64_t half = check["half"];
    const int64_t head_dim = check["head_dim"];
    check.require(half <= head_dim / 2, [&] {
      return "cos dim 1 (half) is " + std::to_string(half) + ", but x has head_dim = " + std::to_string(head_dim) +
             ", which holds " + std::to_string(head_dim / 2) + " pairs";
    });
    if (!check.ok()) return check.status();

    const rowwise::Rope kernel = rowwise::kernels(context.machine().isa).rope[type_index(x.dtype)];
    const int64_t num_heads = check["num_heads"];
    for_each_row(context, check["tokens"], num_heads * head_dim, [&](int64_t token) {
      kernel({.x = row_of(x.selected(1, 0), token),  // the first head's
              .out = row_of(out.selected(1, 0), token),
              .num_heads = num_heads,
              .x_head_stride = x.strides[1],
              .out_head_stride = out.strides[1],
              .head_dim = head_dim,
              .half = half,
              .cos = row_of(cos, token),
              .sin = row_of(sin, token),
              .pairs = options.style == RopeStyle::pairs});
    });
    return {};
  });
}

Status swiglu(Context& context, const ConstTensor& gate, const ConstTensor& up, const Tensor& out) {
  return guarded([&]() -> Status {
    ShapeCheck check("swiglu");
    rowwise::check_same_shape(check, {{"gate", gate}, {"up", up}}, out, "features");
    if (!check.ok()) return check.status();
    rowwise::run_binary(context, rowwise::kernels(context.machine().isa).swiglu[type_index(gate.dtype)], gate, up, out);
    return {};
  });
}

Status swiglu(Context& context, const ConstTensor& gate_up, const Tensor& out, const SwigluOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("swiglu");
    check.tensor("gate_up", gate_up);
    if (!check.ok()) return check.status();
    check.require(gate_up.rank >= 1, [] { return "gate_up has rank 0, but must be from 1 to 5"; });
    if (!check.ok()) return check.status();
    const int last = gate_up.rank - 1;
    const int64_t n = gate_up.shape[last] / 2;
    check.require(gate_up.shape[last] % 2 == 0, [&] {
      return "gate_up dim " + std::to_string(last) + " is " + std::to_string(gate_up.shape[last]) +
             ", but must be even: gate and up side by side";
    });
    if (!check.ok()) return check.status();
    const ConstTensor halves[2] = {gate_up.narrowed(last, 0, n), gate_up.narrowed(last, n, n)};
    return swiglu(context, halves[options.swapped ? 1 : 0], halves[options.swapped ? 0 : 1], out);
  });
}

Status add(Context& context, const ConstTensor& a, const ConstTensor& b, const Tensor& out) {
  return guarded([&]() -> Status {
    ShapeCheck check("add");
    rowwise::check_same_shape(check, {{"a", a}, {"b", b}}, out, "features");
    if (!check.ok()) return check.status();
    rowwise::run_binary(context, rowwise::kernels(context.machine().isa).add[type_index(a.dtype)], a, b, out);
    return {};
  });
}

}  // namespace opst

// rms_norm, add_rms_norm, layer_norm and their gradients.
#include <limits>

#include "rowwise/rows.h"

namespace opst {

void rowwise::check_eps(ShapeCheck& check, double eps) {
  check.require(eps >= 0, "eps is ", eps, ", but must be >= 0");
}

using namespace rowwise;

namespace {

// A weight or its gradient: [features], f32 or the dtype of x.
void check_features(ShapeCheck::TensorCheck tensor, DType dtype) {
  (dtype == DType::f32 ? tensor.dtype({dtype}) : tensor.dtype({DType::f32, dtype})).dims({"features"});
}
void check_gradient(ShapeCheck& check, const char* name, const Tensor& gradient, DType dtype) {
  if (gradient) check_features(check.output(name, gradient), dtype);
}

// What the three norms share: rows, statistics [..] f32 and eps.
void check_norm(ShapeCheck& check, std::initializer_list<Input> inputs, std::initializer_list<Output> outputs,
                const LayerNormOptions& options) {
  check_rows(check, inputs, outputs);
  for (const auto& [name, numbers] : {Output{"mean", &options.mean}, Output{"rstd", &options.rstd}}) {
    if (!*numbers || !check.ok()) continue;
    check_dims(check, check.output(name, *numbers).dtype({DType::f32}), inputs.begin()->tensor->rank - 1, nullptr);
  }
  check_eps(check, options.eps);
}

// Whether a norm runs: its call is in order, and no rehearsal.
bool ready(ShapeCheck& check, Context& context) {
  return check.ok() && check.require(context.impl().workspaces.ready()).ok();
}

ConstRow weight_row(const ConstTensor& weight) { return {weight.data, weight.strides[0]}; }

// `before(row)` may write the row of x.
template <class Before>
void run_norm(Context& context, Norm kernel, const ConstTensor& x, const Tensor& out, const LayerNormOptions& options,
              const Before& before) {
  const int64_t features = x.shape[x.rank - 1], rows = num_rows(x);
  const ConstRow weight = weight_row(options.weight), bias = weight_row(options.bias);
  const auto write = [](const Tensor& numbers, int64_t row, float number) {
    if (numbers) static_cast<float*>(numbers.data)[row_offset(numbers, row, numbers.rank)] = number;
  };
  // Of rows without elements: means of nothing, as 0 / 0 is.
  if (features == 0 && (options.mean || options.rstd)) {
    for_each_row(context, rows, 1, [&](int64_t row, int) {
      write(options.mean, row, std::numeric_limits<float>::quiet_NaN());
      write(options.rstd, row, std::numeric_limits<float>::quiet_NaN());
    });
  }
  for_each_row(context, rows, features, [&](int64_t row, int) {
    before(row);
    const Moments moments = kernel(row_of(x, row), weight, bias, row_of(out, row), features, options.eps);
    write(options.mean, row, moments.mean);
    write(options.rstd, row, moments.rstd);
  });
}

// `sums` [num_chunks][features]: adds up the chunks and writes them.
void finish_weight_gradient(Context& context, float* sums, int64_t num_chunks, const Tensor& gradient) {
  constexpr int64_t kColumns = 512;
  const int64_t features = gradient.shape[0];
  context.impl().pool.parallel_for(ceil_div(features, kColumns), [&](int64_t task, int) {
    const int64_t begin = task * kColumns, end = std::min(features, begin + kColumns);
    for (int64_t chunk = 1; chunk < num_chunks; ++chunk) {
      const float* const part = sums + chunk * features;
      for (int64_t i = begin; i < end; ++i) sums[i] += part[i];
    }
    for (int64_t i = begin; i < end; ++i) store_element(gradient, i * gradient.strides[0], sums[i]);
  });
}

Status run_backward(Context& context, NormBackward kernel, const ConstTensor& grad_out, const ConstTensor& x,
                    const ConstTensor& weight, const ConstTensor& grad_sum, double eps,
                    const NormGradients& gradients) {
  const int64_t features = x.shape[x.rank - 1], rows = num_rows(x);
  const auto run = [&](int64_t row, float* grad_weight, float* grad_bias) {
    kernel({.grad_out = row_of(grad_out, row),
            .x = row_of(x, row),
            .weight = weight_row(weight),
            .grad_sum = grad_sum ? row_of(grad_sum, row) : ConstRow{},
            .grad_x = gradients.x ? row_of(gradients.x, row) : Row{},
            .grad_weight = grad_weight,
            .grad_bias = grad_bias,
            .features = features,
            .eps = eps});
  };
  if (!gradients.weight && !gradients.bias) {
    const Status ready = context.impl().workspaces.ready();
    if (!ready.ok()) return ready;
    if (gradients.x) for_each_row(context, rows, features, [&](int64_t row, int) { run(row, nullptr, nullptr); });
    return {};
  }
  if (features == 0) return context.impl().workspaces.ready();
  // Sums of a weight's gradient: the rows are cut into chunks, each with a sum of its own, in an order that depends on
  // the sizes alone. 64 chunks keep that many threads at work.
  constexpr int64_t kChunkElements = int64_t{1} << 14, kMaxChunks = 64;
  const int64_t wanted = std::clamp<int64_t>(rows * features / kChunkElements, 1, kMaxChunks);
  const int64_t chunk_rows = std::max<int64_t>(1, ceil_div(rows, wanted));
  const int64_t num_chunks = std::max<int64_t>(1, ceil_div(rows, chunk_rows));
  const int64_t size = num_chunks * features;
  Result<WorkspaceLease> lease = context.impl().workspaces.lease(2 * Arena::size_of<float>(size));
  if (!lease.ok()) return lease.status();
  Arena arena(lease.value());
  float* const weight_sums = gradients.weight ? arena.take<float>(size) : nullptr;
  float* const bias_sums = gradients.bias ? arena.take<float>(size) : nullptr;
  context.impl().pool.parallel_for(num_chunks, [&](int64_t chunk, int) {
    float* const weight_sum = weight_sums != nullptr ? weight_sums + chunk * features : nullptr;
    float* const bias_sum = bias_sums != nullptr ? bias_sums + chunk * features : nullptr;
    for (float* const sum : {weight_sum, bias_sum}) {
      if (sum != nullptr) std::fill_n(sum, features, 0.0f);
    }
    const int64_t end = std::min(rows, (chunk + 1) * chunk_rows);
    for (int64_t row = chunk * chunk_rows; row < end; ++row) run(row, weight_sum, bias_sum);
  });
  if (gradients.weight) finish_weight_gradient(context, weight_sums, num_chunks, gradients.weight);
  if (gradients.bias) finish_weight_gradient(context, bias_sums, num_chunks, gradients.bias);
  return {};
}

}  // namespace

Status rms_norm(Context& context, const ConstTensor& x, const ConstTensor& weight, const Tensor& out,
                const RmsNormOptions& options) {
  return checked("rms_norm", [&](ShapeCheck& check) {
    const LayerNormOptions norm = {.eps = options.eps, .weight = weight, .rstd = options.rstd};
    check_features(check.tensor("weight", weight), x.dtype);
    check_norm(check, {{"x", &x}}, {{"out", &out}}, norm);
    if (!ready(check, context)) return;
    const Norm kernel = kernels_of(context, x.dtype).rms_norm[weight.dtype == DType::f32];
    run_norm(context, kernel, x, out, norm, [](int64_t) {});
  });
}

Status add_rms_norm(Context& context, const ConstTensor& a, const ConstTensor& b, const ConstTensor& weight,
                    const Tensor& out, const Tensor& sum, const RmsNormOptions& options) {
  return checked("add_rms_norm", [&](ShapeCheck& check) {
    const LayerNormOptions norm = {.eps = options.eps, .weight = weight, .rstd = options.rstd};
    check_features(check.tensor("weight", weight), a.dtype);
    check_norm(check, {{"a", &a}, {"b", &b}}, {{"out", &out}, {"sum", &sum}}, norm);
    if (!ready(check, context)) return;
    const TypeKernels& table = kernels_of(context, a.dtype);
    const int64_t features = check["features"];
    run_norm(context, table.rms_norm[weight.dtype == DType::f32], sum, out, norm,
             [&](int64_t row) { table.add(row_of(a, row), row_of(b, row), row_of(sum, row), features); });
  });
}

Status rms_norm_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& x, const ConstTensor& weight,
                         const NormGradients& gradients, const RmsNormBackwardOptions& options) {
  return checked("rms_norm_backward", [&](ShapeCheck& check) -> Status {
    check_features(check.tensor("weight", weight), x.dtype);
    check_rows(check, {{"x", &x}, {"grad_out", &grad_out}, {"grad_sum", if_there(options.grad_sum)}},
               {{"gradients.x", if_there(gradients.x)}});
    check_gradient(check, "gradients.weight", gradients.weight, x.dtype);
    check.require(!gradients.bias, "gradients.bias is asked for, but rms_norm has no bias");
    check_eps(check, options.eps);
    if (!check.ok()) return check.status();
    const NormBackward kernel = kernels_of(context, x.dtype).rms_norm_backward[weight.dtype == DType::f32];
    return run_backward(context, kernel, grad_out, x, weight, options.grad_sum, options.eps, gradients);
  });
}

Status layer_norm(Context& context, const ConstTensor& x, const Tensor& out, const LayerNormOptions& options) {
  return checked("layer_norm", [&](ShapeCheck& check) {
    const ConstTensor &weight = options.weight, &bias = options.bias;
    if (weight) check_features(check.tensor("weight", weight), x.dtype);
    if (bias) check_features(check.tensor("bias", bias), x.dtype);
    if (weight && bias) {
      check.require(weight.dtype == bias.dtype, "bias is ", to_string(bias.dtype), ", but weight is ",
                    to_string(weight.dtype));
    }
    check_norm(check, {{"x", &x}}, {{"out", &out}}, options);
    if (!ready(check, context)) return;
    const ConstTensor& any = weight ? weight : bias;
    const Norm kernel = kernels_of(context, x.dtype).layer_norm[!any || any.dtype == DType::f32];
    run_norm(context, kernel, x, out, options, [](int64_t) {});
  });
}

Status layer_norm_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& x,
                           const NormGradients& gradients, const LayerNormOptions& options) {
  return checked("layer_norm_backward", [&](ShapeCheck& check) -> Status {
    const ConstTensor& weight = options.weight;
    if (weight) check_features(check.tensor("weight", weight), x.dtype);
    check_rows(check, {{"x", &x}, {"grad_out", &grad_out}}, {{"gradients.x", if_there(gradients.x)}});
    check_gradient(check, "gradients.weight", gradients.weight, x.dtype);
    check_gradient(check, "gradients.bias", gradients.bias, x.dtype);
    check_eps(check, options.eps);
    if (!check.ok()) return check.status();
    const NormBackward kernel = kernels_of(context, x.dtype).layer_norm_backward[!weight || weight.dtype == DType::f32];
    return run_backward(context, kernel, grad_out, x, weight, {}, options.eps, gradients);
  });
}

}  // namespace opst

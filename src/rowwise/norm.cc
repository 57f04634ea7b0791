// rms_norm, add_rms_norm, layer_norm and their gradients.
#include <algorithm>
#include <limits>

#include "core/elements.h"
#include "core/guarded.h"
#include "opst/rowwise.h"
#include "rowwise/rows.h"

namespace opst {
namespace rowwise {
namespace {

void check_eps(ShapeCheck& check, double eps) {
  check.require(eps >= 0, [&] { return "eps is " + std::to_string(eps) + ", but must be >= 0"; });
}

ConstRow weight_row(const ConstTensor& weight) { return {weight.data, weight.strides[0]}; }

struct NormCall {
  Norm kernel;
  ConstTensor x;
  ConstRow weight, bias;
  Tensor out;
  double eps;
  Tensor mean, rstd;
};

void run_row(const NormCall& call, int64_t row) {
  const Moments moments = call.kernel(row_of(call.x, row), call.weight, call.bias, row_of(call.out, row),
                                      call.x.shape[call.x.rank - 1], call.eps);
  if (call.mean) *row_number(call.mean, row) = moments.mean;
  if (call.rstd) *row_number(call.rstd, row) = moments.rstd;
}

// Of rows without elements: means of nothing, as 0 / 0 is.
void fill_statistics_of_nothing(Context& context, const NormCall& call) {
  if (call.x.shape[call.x.rank - 1] != 0 || (!call.mean && !call.rstd)) return;
  for_each_row(context, num_rows(call.x), 1, [&](int64_t row) {
    for (const Tensor* const numbers : {&call.mean, &call.rstd}) {
      if (*numbers) *row_number(*numbers, row) = std::numeric_limits<float>::quiet_NaN();
    }
  });
}

struct NormBackwardCall {
  NormBackward kernel;
  ConstTensor grad_out, x, weight, grad_sum;
  const NormGradients* gradients;
  double eps;
};

// Sums of a weight's gradient over rows: the rows are cut into chunks, each with a sum of its own, in an order that
// depends on the sizes alone. 64 chunks keep that many threads at work.
struct RowChunks {
  int64_t count, rows;
};
RowChunks chunks_of(int64_t rows, int64_t features) {
  constexpr int64_t kChunkElements = int64_t{1} << 14, kMaxChunks = 64;
  const int64_t wanted = std::clamp<int64_t>(rows * features / kChunkElements, 1, kMaxChunks);
  const int64_t chunk_rows = std::max<int64_t>(1, ceil_div(rows, wanted));
  return {std::max<int64_t>(1, ceil_div(rows, chunk_rows)), chunk_rows};
}

// `sums` [chunks.count][features]: adds up the chunks and writes them.
void finish_weight_gradient(Context& context, float* sums, const RowChunks& chunks, const Tensor& gradient) {
  constexpr int64_t kColumns = 512;
  const int64_t features = gradient.shape[0];
  context.impl().pool.parallel_for(ceil_div(features, kColumns), [&](int64_t task, int) {
    const int64_t begin = task * kColumns, end = std::min(features, begin + kColumns);
    for (int64_t chunk = 1; chunk < chunks.count; ++chunk) {
      const float* const part = sums + chunk * features;
      for (int64_t i = begin; i < end; ++i) sums[i] += part[i];
    }
    for (int64_t i = begin; i < end; ++i) store_element(gradient, i * gradient.strides[0], sums[i]);
  });
}

Status run_backward(Context& context, const NormBackwardCall& call) {
  const int64_t features = call.x.shape[call.x.rank - 1], rows = num_rows(call.x);
  const NormGradients& gradients = *call.gradients;
  if (!gradients.x && !gradients.weight && !gradients.bias) return {};
  const auto run = [&](int64_t row, float* grad_weight, float* grad_bias) {
    call.kernel({.grad_out = row_of(call.grad_out, row),
                 .x = row_of(call.x, row),
                 .weight = weight_row(call.weight),
                 .grad_sum = call.grad_sum ? row_of(call.grad_sum, row) : ConstRow{nullptr, 0},
                 .grad_x = gradients.x ? row_of(gradients.x, row) : Row{nullptr, 0},
                 .grad_weight = grad_weight,
                 .grad_bias = grad_bias,
                 .features = features,
                 .eps = call.eps});
  };
  if (!gradients.weight && !gradients.bias) {
    if (gradients.x) for_each_row(context, rows, features, [&](int64_t row) { run(row, nullptr, nullptr); });
    return {};
  }
  if (features == 0) return {};
  const RowChunks chunks = chunks_of(rows, features);
  const int64_t size = chunks.count * features;
  Result<WorkspaceLease> lease = context.impl().workspaces.lease(2 * Arena::size_of<float>(size));
  if (!lease.ok()) return lease.status();
  Arena arena(lease.value());
  float* const weight_sums = gradients.weight ? arena.take<float>(size) : nullptr;
  float* const bias_sums = gradients.bias ? arena.take<float>(size) : nullptr;
  context.impl().pool.parallel_for(chunks.count, [&](int64_t chunk, int) {
    float* const weight_sum = weight_sums != nullptr ? weight_sums + chunk * features : nullptr;
    float* const bias_sum = bias_sums != nullptr ? bias_sums + chunk * features : nullptr;
    for (float* const sum : {weight_sum, bias_sum}) {
      if (sum != nullptr) std::fill_n(sum, features, 0.0f);
    }
    const int64_t end = std::min(rows, (chunk + 1) * chunks.rows);
    for (int64_t row = chunk * chunks.rows; row < end; ++row) run(row, weight_sum, bias_sum);
  });
  if (gradients.weight) finish_weight_gradient(context, weight_sums, chunks, gradients.weight);
  if (gradients.bias) finish_weight_gradient(context, bias_sums, chunks, gradients.bias);
  return {};
}

void check_weight_gradient(ShapeCheck& check, const char* name, const Tensor& gradient, DType dtype) {
  if (!gradient) return;
  ShapeCheck::TensorCheck tensor = check.output(name, gradient);
  (dtype == DType::f32 ? tensor.dtype({dtype}) : tensor.dtype({DType::f32, dtype})).dims({"features"});
}

}  // namespace
}  // namespace rowwise

using rowwise::check_rows;
using rowwise::for_each_row;
using rowwise::if_there;
using rowwise::kernels;
using rowwise::row_of;

Status rms_norm(Context& context, const ConstTensor& x, const ConstTensor& weight, const Tensor& out,
                const RmsNormOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("rms_norm");
    rowwise::check_weight(check, "weight", weight, x.dtype);
    check_rows(check, {{"x", &x}}, {{"out", &out}});
    if (options.rstd) rowwise::check_row_numbers(check, "rstd", options.rstd, x.rank);
    rowwise::check_eps(check, options.eps);
    if (!check.ok()) return check.status();

    const rowwise::NormCall call = {
        .kernel = kernels(context.machine().isa).rms_norm[float_index(x.dtype)][weight.dtype == DType::f32],
        .x = x,
        .weight = rowwise::weight_row(weight),
        .bias = {nullptr, 0},
        .out = out,
        .eps = options.eps,
        .mean = {},
        .rstd = options.rstd};
    fill_statistics_of_nothing(context, call);
    for_each_row(context, num_rows(x), check["features"], [&](int64_t row) { run_row(call, row); });
    return {};
  });
}

Status add_rms_norm(Context& context, const ConstTensor& a, const ConstTensor& b, const ConstTensor& weight,
                    const Tensor& out, const Tensor& sum, const RmsNormOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("add_rms_norm");
    rowwise::check_weight(check, "weight", weight, a.dtype);
    check_rows(check, {{"a", &a}, {"b", &b}}, {{"out", &out}, {"sum", &sum}});
    if (options.rstd) rowwise::check_row_numbers(check, "rstd", options.rstd, a.rank);
    rowwise::check_eps(check, options.eps);
    if (!check.ok()) return check.status();

    const rowwise::Kernels& table = kernels(context.machine().isa);
    const rowwise::Binary add_rows = table.add[float_index(a.dtype)];
    const rowwise::NormCall call = {.kernel = table.rms_norm[float_index(a.dtype)][weight.dtype == DType::f32],
                                    .x = sum,
                                    .weight = rowwise::weight_row(weight),
                                    .bias = {nullptr, 0},
                                    .out = out,
                                    .eps = options.eps,
                                    .mean = {},
                                    .rstd = options.rstd};
    const int64_t features = check["features"];
    fill_statistics_of_nothing(context, call);
    for_each_row(context, num_rows(a), features, [&](int64_t row) {
      add_rows(row_of(a, row), row_of(b, row), row_of(sum, row), features);
      run_row(call, row);
    });
    return {};
  });
}

Status rms_norm_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& x, const ConstTensor& weight,
                         const NormGradients& gradients, const RmsNormBackwardOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("rms_norm_backward");
    rowwise::check_weight(check, "weight", weight, x.dtype);
    check_rows(check, {{"x", &x}, {"grad_out", &grad_out}, {"grad_sum", if_there(options.grad_sum)}},
               {{"gradients.x", if_there(gradients.x)}});
    rowwise::check_weight_gradient(check, "gradients.weight", gradients.weight, x.dtype);
    check.require(!gradients.bias, "gradients.bias is asked for, but rms_norm has no bias");
    rowwise::check_eps(check, options.eps);
    if (!check.ok()) return check.status();
    return rowwise::run_backward(
        context,
        {.kernel = kernels(context.machine().isa).rms_norm_backward[float_index(x.dtype)][weight.dtype == DType::f32],
         .grad_out = grad_out,
         .x = x,
         .weight = weight,
         .grad_sum = options.grad_sum,
         .gradients = &gradients,
         .eps = options.eps});
  });
}

namespace {

// Weight and bias of layer_norm; gives whether they are f32.
bool check_affine(ShapeCheck& check, const LayerNormOptions& options, DType dtype) {
  if (options.weight) rowwise::check_weight(check, "weight", options.weight, dtype);
  if (options.bias) rowwise::check_weight(check, "bias", options.bias, dtype);
  if (options.weight && options.bias) {
    check.require(options.weight.dtype == options.bias.dtype, [&] {
      return std::string("bias is ") + to_string(options.bias.dtype) + ", but weight is " +
             to_string(options.weight.dtype);
    });
  }
  const ConstTensor& any = options.weight ? options.weight : options.bias;
  return !any || any.dtype == DType::f32;
}

}  // namespace

Status layer_norm(Context& context, const ConstTensor& x, const Tensor& out, const LayerNormOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("layer_norm");
    const bool f32_weight = check_affine(check, options, x.dtype);
    check_rows(check, {{"x", &x}}, {{"out", &out}});
    if (options.mean) rowwise::check_row_numbers(check, "mean", options.mean, x.rank);
    if (options.rstd) rowwise::check_row_numbers(check, "rstd", options.rstd, x.rank);
    rowwise::check_eps(check, options.eps);
    if (!check.ok()) return check.status();

    const rowwise::NormCall call = {
        .kernel = kernels(context.machine().isa).layer_norm[float_index(x.dtype)][f32_weight],
        .x = x,
        .weight = rowwise::weight_row(options.weight),
        .bias = rowwise::weight_row(options.bias),
        .out = out,
        .eps = options.eps,
        .mean = options.mean,
        .rstd = options.rstd};
    fill_statistics_of_nothing(context, call);
    for_each_row(context, num_rows(x), check["features"], [&](int64_t row) { run_row(call, row); });
    return {};
  });
}

Status layer_norm_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& x,
                           const NormGradients& gradients, const LayerNormOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("layer_norm_backward");
    if (options.weight) rowwise::check_weight(check, "weight", options.weight, x.dtype);
    check_rows(check, {{"x", &x}, {"grad_out", &grad_out}}, {{"gradients.x", if_there(gradients.x)}});
    rowwise::check_weight_gradient(check, "gradients.weight", gradients.weight, x.dtype);
    rowwise::check_weight_gradient(check, "gradients.bias", gradients.bias, x.dtype);
    rowwise::check_eps(check, options.eps);
    if (!check.ok()) return check.status();
    const bool f32_weight = !options.weight || options.weight.dtype == DType::f32;
    return rowwise::run_backward(
        context, {.kernel = kernels(context.machine().isa).layer_norm_backward[float_index(x.dtype)][f32_weight],
                  .grad_out = grad_out,
                  .x = x,
                  .weight = options.weight,
                  .grad_sum = {},
                  .gradients = &gradients,
                  .eps = options.eps});
  });
}

}  // namespace opst

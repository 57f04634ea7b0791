// Gradients of a product: products themselves, of transposed views.
#include <algorithm>

#include "core/shape_check.h"
#include "matmul/call.h"

namespace opst {
namespace {

// Columns per task of the bias's gradient: some cache lines of each row.
constexpr int64_t kBiasColumns = 64;

// out[j] = sum over i of grad_out[i, j], rows in ascending order, in f32.
void sum_rows(Context& context, const ConstTensor& grad_out, const Tensor& out) {
  const int64_t m = grad_out.shape[0], n = grad_out.shape[1];
  const auto widen_rows = gemm::float_kernels(context.machine().isa).widen_rows[float_index(grad_out.dtype)];
  context.impl().pool.parallel_for(ceil_div(n, kBiasColumns), [&](int64_t task, int) {
    const int64_t column = task * kBiasColumns, columns = std::min(kBiasColumns, n - column);
    float sums[kBiasColumns] = {}, row[kBiasColumns];
    for (int64_t i = 0; i < m; ++i) {
      widen_rows(static_cast<const char*>(grad_out.data) +
                     (i * grad_out.strides[0] + column * grad_out.strides[1]) * size_bytes(grad_out.dtype),
                 grad_out.strides[0], grad_out.strides[1], 1, columns, row, kBiasColumns);
      for (int64_t j = 0; j < columns; ++j) sums[j] += row[j];
    }
    for (int64_t j = 0; j < columns; ++j) store_element(out, (column + j) * out.strides[0], sums[j]);
  });
}

void sum_rows_f64(const ConstTensor& grad_out, const Tensor& out) {
  for (int64_t j = 0; j < grad_out.shape[1]; ++j) {
    double sum = 0;
    for (int64_t i = 0; i < grad_out.shape[0]; ++i) {
      sum += static_cast<const double*>(grad_out.data)[i * grad_out.strides[0] + j * grad_out.strides[1]];
    }
    static_cast<double*>(out.data)[j * out.strides[0]] = sum;
  }
}

}  // namespace

Status matmul_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& x, const ConstTensor& weight,
                       const MatmulGradients& gradients) {
  return checked("matmul_backward", [&](ShapeCheck& check) -> Status {
    check.tensor("grad_out", grad_out).dtype({DType::f32, DType::bf16, DType::f16, DType::f64}).dims({"m", "n"});
    const bool is_f64 = grad_out.dtype == DType::f64;
    const gemm::DTypes types = is_f64 ? gemm::kF64 : gemm::kFloats;
    if (is_given(gradients.weight)) check.tensor("x", x).dtype(types).dims({"m", "k"});
    if (is_given(gradients.x)) check.tensor("weight", weight).dtype(types).dims({"n", "k"});
    if (is_given(gradients.x)) check.output("gradients.x", gradients.x).dtype(types).dims({"m", "k"});
    if (is_given(gradients.weight)) check.output("gradients.weight", gradients.weight).dtype(types).dims({"n", "k"});
    if (is_given(gradients.bias)) check.output("gradients.bias", gradients.bias).dtype(types).dims({"n"});
    if (!check.ok()) return check.status();

    const auto product = [&](const ConstTensor& a, const ConstTensor& b, const Tensor& out) {
      gemm::Operands operands{.x = normal_strides(a), .out = normal_strides(out), .weight = &b};
      return gemm::multiply(context,
                            {.m = out.shape[0],
                             .n = out.shape[1],
                             .k = a.shape[1],
                             .x_dtype = a.dtype,
                             .unit_stride_x = operands.x.strides[1] == 1,
                             .weight = MatmulWeight::unpacked,
                             .format = gemm::weight_format(b.dtype)},
                            operands);
    };
    Status status;
    if (gradients.x) status = product(grad_out, weight.transposed(0, 1), gradients.x);
    if (status.ok() && gradients.weight) {
      status = product(grad_out.transposed(0, 1), x.transposed(0, 1), gradients.weight);
    }
    if (!status.ok()) return status;
    if (gradients.bias) is_f64 ? sum_rows_f64(grad_out, gradients.bias) : sum_rows(context, grad_out, gradients.bias);
    return {};
  });
}

}  // namespace opst

// Gradients of a product, and of a grouped one: products themselves, of transposed views.
#include <algorithm>

#include "matmul/groups.h"

namespace opst {

using namespace gemm;

namespace {

// Columns per task of the bias's gradient: some cache lines of each row.
constexpr int64_t kBiasColumns = 64;

// out[e, j] = sum of grad_out[i, j] over the rows i of group e, in ascending order, in f32.
void sum_rows(Context& context, const ConstTensor& grad_out, const Tensor& out, int64_t column, Group group) {
  const int64_t columns = std::min(kBiasColumns, grad_out.shape[1] - column);
  const auto widen_rows = float_kernels(context.machine().isa).widen_rows[float_index(grad_out.dtype)];
  float sums[kBiasColumns] = {}, row[kBiasColumns];
  for (int64_t i = group.first; i < group.first + group.rows; ++i) {
    widen_rows(static_cast<const char*>(grad_out.data) +
                   (i * grad_out.strides[0] + column * grad_out.strides[1]) * size_bytes(grad_out.dtype),
               grad_out.strides[0], grad_out.strides[1], 1, columns, row, kBiasColumns);
    for (int64_t j = 0; j < columns; ++j) sums[j] += row[j];
  }
  for (int64_t j = 0; j < columns; ++j) {
    store_element(out, group.index * out.strides[0] + (column + j) * out.strides[1], sums[j]);
  }
}

void sum_rows_f64(Context&, const ConstTensor& grad_out, const Tensor& out, int64_t column, Group group) {
  for (int64_t j = column; j < std::min(column + kBiasColumns, grad_out.shape[1]); ++j) {
    double sum = 0;
    for (int64_t i = group.first; i < group.first + group.rows; ++i) {
      sum += static_cast<const double*>(grad_out.data)[i * grad_out.strides[0] + j * grad_out.strides[1]];
    }
    static_cast<double*>(out.data)[group.index * out.strides[0] + j * out.strides[1]] = sum;
  }
}

// The bias's gradients of all groups: out [groups, n].
void sum_groups(Context& context, const ConstTensor& grad_out, const GroupList& groups, const Tensor& out) {
  const auto sum = grad_out.dtype == DType::f64 ? sum_rows_f64 : sum_rows;
  for_each_group(groups, [&](const Group& group) {
    context.impl().pool.parallel_for(ceil_div(grad_out.shape[1], kBiasColumns), [&](int64_t task, int) {
      sum(context, grad_out, out, task * kBiasColumns, group);
    });
  });
}

// Dimensions and dtypes. Grouped: the weight, its gradient and that of bias are [groups, ..].
void check_gradients(ShapeCheck& check, const ConstTensor& grad_out, const ConstTensor& x, const ConstTensor& weight,
                     const MatmulGradients& gradients, bool grouped) {
  check.tensor("grad_out", grad_out).dtype({DType::f32, DType::bf16, DType::f16, DType::f64}).dims({"m", "n"});
  const DTypes types = grad_out.dtype == DType::f64 ? kF64 : kFloats;
  const auto dims = [&](auto part, std::initializer_list<const char*> names) {
    part.dtype(types).dims({names.begin() + (grouped ? 0 : 1), names.size() - (grouped ? 0 : 1)});
  };
  if (is_given(gradients.weight)) check.tensor("x", x).dtype(types).dims({"m", "k"});
  if (is_given(gradients.x)) dims(check.tensor("weight", weight), {"groups", "n", "k"});
  if (is_given(gradients.x)) check.output("gradients.x", gradients.x).dtype(types).dims({"m", "k"});
  if (is_given(gradients.weight)) dims(check.output("gradients.weight", gradients.weight), {"groups", "n", "k"});
  if (is_given(gradients.bias)) dims(check.output("gradients.bias", gradients.bias), {"groups", "n"});
}

// A product of views: grad_out . weight, or grad_out^T . x.
MatmulProblem problem_of(const ConstTensor& a, const ConstTensor& b, int64_t n) {
  return {.n = n, .x_dtype = a.dtype, .weight = MatmulWeight::unpacked, .format = weight_format(b.dtype)};
}

}  // namespace

Status matmul_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& x, const ConstTensor& weight,
                       const MatmulGradients& gradients) {
  return checked("matmul_backward", [&](ShapeCheck& check) -> Status {
    check_gradients(check, grad_out, x, weight, gradients, false);
    if (!check.ok()) return check.status();
    const auto product = [&](const ConstTensor& a, const ConstTensor& b, const Tensor& out) {
      const Operands operands{.x = normal_strides(a), .out = normal_strides(out), .weight = &b};
      MatmulProblem problem = problem_of(a, b, out.shape[1]);
      problem.m = out.shape[0];
      problem.k = a.shape[1];
      problem.unit_stride_x = operands.x.strides[1] == 1;
      problem.unit_stride_outputs = has_unit_stride_outputs(b);
      return multiply(context, problem, operands);
    };
    Status status;
    if (gradients.x) status = product(grad_out, weight.transposed(0, 1), gradients.x);
    if (status.ok() && gradients.weight) {
      status = product(grad_out.transposed(0, 1), x.transposed(0, 1), gradients.weight);
    }
    if (!status.ok()) return status;
    if (gradients.bias) {
      Tensor bias = gradients.bias;  // [1, n]
      bias.rank = 2, bias.shape[1] = bias.shape[0], bias.strides[1] = bias.strides[0], bias.shape[0] = 1;
      const int64_t m = grad_out.shape[0];
      sum_groups(context, grad_out, {ConstTensor::contiguous(DType::i64, {1}, &m)}, bias);
    }
    return {};
  });
}

Status grouped_matmul_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& x,
                               const ConstTensor& weight, const GroupList& groups, const MatmulGradients& gradients) {
  return checked("grouped_matmul_backward", [&](ShapeCheck& check) -> Status {
    check_group_list(check, groups);
    check_gradients(check, grad_out, x, weight, gradients, true);
    if (check.ok()) check_group_rows(check, groups, grad_out.shape[0]);
    if (!check.ok()) return check.status();
    if (gradients.x) {
      const MatmulProblem problem = problem_of(grad_out, weight, gradients.x.shape[1]);
      const Status status = multiply_groups(context, problem, groups, false, [&](const Group& g, GroupOperands& to) {
        to.operands.x = grad_out.narrowed(0, g.first, g.rows);
        to.operands.out = gradients.x.narrowed(0, g.first, g.rows);
        to.give(to.operands.weight, to.weight, weight.selected(0, g.index).transposed(0, 1));
      });
      if (!status.ok()) return status;
      clear_rows(context, gradients.x, for_each_group(groups, [](const Group&) {}));
    }
    if (gradients.weight) {
      const MatmulProblem problem = problem_of(grad_out, x, gradients.weight.shape[2]);
      // An empty group may begin behind the only row, whose stride means nothing.
      const ConstTensor g_rows = normal_strides(grad_out), x_rows = normal_strides(x);
      const Status status = multiply_groups(context, problem, groups, true, [&](const Group& g, GroupOperands& to) {
        to.operands.x = g_rows.narrowed(0, g.first, g.rows).transposed(0, 1);
        to.operands.out = gradients.weight.selected(0, g.index);
        to.give(to.operands.weight, to.weight, x_rows.narrowed(0, g.first, g.rows).transposed(0, 1));
      });
      if (!status.ok()) return status;
    }
    if (gradients.bias) sum_groups(context, grad_out, groups, gradients.bias);
    return {};
  });
}

}  // namespace opst

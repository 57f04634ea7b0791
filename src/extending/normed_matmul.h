// The example of docs/extending.md: an operator made of what is on the ground floors.
#pragma once

#include "opst/context.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst::extending {

// out[i, j] = sum_t normed[i, t] * weight[j, t],   normed[i, t] = x[i, t] / sqrt(mean_t x[i, t]^2 + eps) * gain[t]
//   x       [m, k] f32, any strides
//   gain    [k] f32, any stride
//   weight  [n, k] f32, any strides
//   out     [m, n] f32, any strides; overlaps nothing
// normed exists for the rows of one task at a time. Rows are independent, and a row's bits depend neither on the
// other rows nor on the number of threads. Errors: invalid_argument, naming tensor, dimension and both values;
// out_of_memory.
Status normed_matmul(Context& context, const ConstTensor& x, const ConstTensor& gain, const ConstTensor& weight,
                     const Tensor& out, double eps = 1e-5);

}  // namespace opst::extending

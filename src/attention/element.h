// One element of a tensor of floating point numbers, outside the kernels.
#pragma once

#include "core/convert.h"
#include "opst/tensor.h"

namespace opst::attention {

// Rounds x to t's dtype; `offset` in elements.
inline void store(const Tensor& t, int64_t offset, double x) {
  switch (t.dtype) {
    case DType::f64:
      static_cast<double*>(t.data)[offset] = x;
      break;
    case DType::f32:
      static_cast<float*>(t.data)[offset] = static_cast<float>(x);
      break;
    case DType::bf16:
      static_cast<bf16*>(t.data)[offset] = to_bf16(x);
      break;
    default:
      static_cast<f16*>(t.data)[offset] = to_f16(x);
      break;
  }
}

}  // namespace opst::attention

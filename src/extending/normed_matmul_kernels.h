// The kernel table of normed_matmul, one per instruction set level.
#pragma once

#include <cstdint>

namespace opst::extending {

struct Kernels {
  void (*normalise)(const float* x, int64_t x_stride, const float* gain, int64_t gain_stride, int64_t k, float eps,
                    float* normed);
};

}  // namespace opst::extending

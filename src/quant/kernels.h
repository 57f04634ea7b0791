// The kernel table of the quant room, one per instruction set level.
#pragma once

#include <cstdint>

#include "quant/formats.h"

namespace opst {
namespace quant {

// out[i * out_stride] = value i of a row, 0 <= i < cols. `blocks` may have any alignment; nothing beyond the row's last
// block is read and nothing beyond its last value written. cols is whole blocks.
using DequantizeRow = void (*)(const void* blocks, int64_t cols, float* out, int64_t out_stride);

struct Kernels {
  DequantizeRow dequantize_row[kNumBlockFormats];
};

}  // namespace quant

namespace generic::quant {
extern const opst::quant::Kernels kKernels;
}
namespace avx2::quant {
extern const opst::quant::Kernels kKernels;
}
namespace avx512::quant {
extern const opst::quant::Kernels kKernels;
}

}  // namespace opst

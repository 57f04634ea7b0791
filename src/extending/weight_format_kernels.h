// What the kernels of quant and matmul are for a format, one table per instruction set level.
#pragma once

#include "matmul/kernels.h"
#include "quant/kernels.h"

namespace opst::extending {

struct FormatKernels {
  quant::DequantizeRow dequantize_row;
  gemm::Product few_rows;
  int int8_columns;
  void (*quantise_row)(const float* x, int64_t x_stride, int64_t k, gemm::ActivationBlock* out);
  gemm::Product int8_rows;
};

}  // namespace opst::extending

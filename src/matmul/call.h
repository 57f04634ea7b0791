// Declarations that several files of matmul share.
#pragma once

#include "matmul/kernels.h"
#include "opst/matmul.h"

namespace opst::gemm {

const Kernels& kernels(Isa isa);

// Of f32, bf16 and f16.
inline FloatType float_type(DType dtype) {
  return dtype == DType::f32 ? FloatType::f32 : dtype == DType::bf16 ? FloatType::bf16 : FloatType::f16;
}
inline QuantFormat weight_format(DType dtype) {
  return dtype == DType::f32 ? QuantFormat::f32 : dtype == DType::bf16 ? QuantFormat::bf16 : QuantFormat::f16;
}

// weight [n, k] f32, bf16 or f16 -> panels (packed_layout.h) of its type.
void pack_float_weight(Context& context, const ConstTensor& weight, void* panels);

// matmul with an unpacked weight; tensors checked.
Status multiply(Context& context, const ConstTensor& x, const ConstTensor& weight, const Tensor& out,
                const MatmulOptions& options);

// multiply for f64 tensors.
void multiply_f64(Context& context, const ConstTensor& x, const ConstTensor& weight, const Tensor& out,
                  const MatmulOptions& options);

}  // namespace opst::gemm

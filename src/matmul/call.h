// Declarations that several files of matmul share.
#pragma once

#include <optional>

#include "matmul/kernels.h"
#include "matmul/packed_layout.h"
#include "opst/matmul.h"

namespace opst::gemm {

static_assert(kIntPanelColumns == kPanelColumns, "plans cut the columns of every weight alike");

// The tables of the highest level that `isa` includes.
const FloatKernels& float_kernels(Isa isa);
const ByteKernels& byte_kernels(Isa isa);

// An enumerator's name, in the order of the enumeration.
template <class Enum, size_t n>
const char* name_of(const char* const (&names)[n], Enum value) {
  return static_cast<size_t>(value) < n ? names[static_cast<size_t>(value)] : "unknown";
}

// Of f32, bf16 and f16.
inline FloatType float_type(DType dtype) {
  return dtype == DType::f32 ? FloatType::f32 : dtype == DType::bf16 ? FloatType::bf16 : FloatType::f16;
}
inline QuantFormat weight_format(DType dtype) {
  return dtype == DType::f32 ? QuantFormat::f32 : dtype == DType::bf16 ? QuantFormat::bf16 : QuantFormat::f16;
}

// weight [n, k] f32, bf16 or f16 -> panels (packed_layout.h) of its type.
void pack_float_weight(Context& context, const ConstTensor& weight, void* panels);

// The tensors of a call, checked and with normal strides.
struct Operands {
  ConstTensor x;
  const void* panels = nullptr;  // of a packed weight
  IntWeightPart ints = {};       // of int8 or int4
  ConstTensor weight = {};       // an unpacked one
  Tensor out;                    // i32: the sums of one group
  std::optional<ConstTensor> x_scales = {}, bias = {}, residual = {};
  std::optional<Tensor> out_scales = {};
};

// out as MatmulOptions and IntMatmulOptions tell. The problem is one that a call may pose.
Status multiply(Context& context, const MatmulProblem& problem, const Operands& operands);

// The product alone: out = x . weight^T, all float tensors of any normal strides, or all f64.
Status multiply(Context& context, const ConstTensor& x, const ConstTensor& weight, const Tensor& out);

// The whole of a packed weight.
IntWeightPart int_weight(const PackedIntWeight& weight);

// multiply for f64 tensors.
void multiply_f64(Context& context, Activation activation, const Operands& operands);

}  // namespace opst::gemm

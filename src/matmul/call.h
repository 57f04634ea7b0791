// Declarations that several files of matmul share: tables of kernels, a call's operands, the steps of the driver.
#pragma once

#include <optional>

#include "core/elements.h"
#include "machine/context_impl.h"
#include "matmul/packed_layout.h"
#include "matmul/plan.h"

namespace opst::gemm {

static_assert(kIntPanelColumns == kPanelColumns, "plans cut the columns of every weight alike");

// The tables of the highest level that `isa` includes.
const FloatKernels& float_kernels(Isa isa);
const ByteKernels& byte_kernels(Isa isa);

// Of f32, bf16 and f16.
inline FloatType float_type(DType dtype) { return static_cast<FloatType>(float_index(dtype)); }
inline QuantFormat weight_format(DType dtype) {
  return dtype == DType::f32 ? QuantFormat::f32 : dtype == DType::bf16 ? QuantFormat::bf16 : QuantFormat::f16;
}

// Memory of a packed weight. May throw bad_alloc.
inline Result<Buffer> allocate_weight(Context& context, Size bytes) {
  if (!bytes.within_limit()) return Status::out_of_memory();
  return context.impl().weights.allocate(bytes.value());
}

// weight [n, k] f32, bf16 or f16 -> panels (packed_layout.h) of its type.
void pack_float_weight(Context& context, const ConstTensor& weight, void* panels);

// The tensors of a call, checked and with normal strides.
struct Operands {
  ConstTensor x;
  const void* panels = nullptr;                         // of a packed weight
  IntWeightPart ints = {};                              // of int8 or int4
  ConstTensor weight = {};                              // an unpacked one
  Tensor out;                                           // i32: the sums of one group
  ConstTensor x_scales = {}, bias = {}, residual = {};  // absent without data
  Tensor out_scales = {};                               // of an out that is quantised
};

// out as MatmulOptions and IntMatmulOptions tell. The problem is one that a call may pose.
Status multiply(Context& context, const MatmulProblem& problem, const Operands& operands);

// The product alone: out = x . weight^T, all float tensors of any normal strides, or all f64.
Status multiply(Context& context, const ConstTensor& x, const ConstTensor& weight, const Tensor& out);

// The whole of a packed weight.
IntWeightPart int_weight(const PackedIntWeight& weight);

// The memory of one worker.
struct WorkerScratch {
  char* decoded;
  float *sums, *second, *widened;
  WorkerScratch(const Plan& plan, char* all, int worker) {
    Arena own(all + worker * plan.scratch_bytes_per_worker, plan.scratch_bytes_per_worker);
    decoded = own.take<char>(plan.decoded_bytes_per_worker);
    sums = reinterpret_cast<float*>(own.take<char>(plan.sums_bytes_per_worker));
    second = reinterpret_cast<float*>(own.take<char>(plan.second_bytes_per_worker));
    widened = reinterpret_cast<float*>(own.take<char>(plan.widened_bytes_per_worker));
  }
};

// Rows of x as the product takes them.
struct Rows {
  const char* data = nullptr;
  int64_t stride = 0;             // elements of the form
  const int32_t* sums = nullptr;  // of the form bytes
};

// The driver's first step (pack_x.cc): rows of x in the form of the plan. Nothing where the form cannot hold one of
// them. `scratch`: the workers' memory.
std::optional<Rows> pack_x(Context& context, const Plan& plan, const Operands& o, Arena& arena, char* scratch);

}  // namespace opst::gemm

// Shared by the operators of this room: checks of tensors with any number of leading dimensions, the loop over rows.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "core/elements.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "machine/context_impl.h"
#include "opst/rowwise.h"
#include "rowwise/kernels.h"

namespace opst::rowwise {

const Kernels& kernels(Isa isa);
inline const TypeKernels& kernels_of(const Context& context, DType dtype) {
  return kernels(context.machine().isa).of[float_index(dtype)];
}

// Tensors of rows: null where an optional one is absent.
template <class AnyTensor>
struct Named {
  const char* name;
  const AnyTensor* tensor;
};
using Input = Named<ConstTensor>;
using Output = Named<Tensor>;
template <class AnyTensor>
const AnyTensor* if_there(const AnyTensor& tensor) {
  return tensor ? &tensor : nullptr;
}

// The leading dimensions, and behind them `last` unless it is null.
void check_dims(ShapeCheck& check, ShapeCheck::TensorCheck tensor, int rank, const char* last);
// All of the shape [.., features] (rank 1 to 5) and dtype of the first, which is f32, bf16 or f16. An output may be the
// same view as one of the inputs, and overlaps nothing else.
void check_rows(ShapeCheck& check, std::initializer_list<Input> inputs, std::initializer_list<Output> outputs);
void check_eps(ShapeCheck& check, double eps);

// x and out [tokens, num_heads, head_dim] of one dtype, which is among `dtypes`; out may be the same view as x.
void check_heads(ShapeCheck& check, const Input& x, const Output& out, std::initializer_list<DType> dtypes);
// `half` pairs, the dimension of `cos`, fit into head_dim, that of `tensor`.
void check_pairs(ShapeCheck& check, const char* cos, const char* tensor);
void check_style(ShapeCheck& check, RopeStyle style);

inline ConstRow row_of(const ConstTensor& tensor, int64_t row) {
  const int64_t offset = row_offset(tensor, row, tensor.rank - 1) * size_bytes(tensor.dtype);
  return {static_cast<const char*>(tensor.data) + offset, tensor.strides[tensor.rank - 1]};
}
inline Row row_of(const Tensor& tensor, int64_t row) {
  const ConstRow found = row_of(ConstTensor(tensor), row);
  return {const_cast<void*>(found.data), found.stride};
}

// Calls body(row, worker) for every row, in tasks of some microseconds.
template <class Body>
void for_each_row(Context& context, int64_t rows, int64_t elements_per_row, const Body& body) {
  if (rows == 0 || elements_per_row == 0) return;
  context.impl().pool.for_each(rows, rows_per_task(elements_per_row), body);
}

}  // namespace opst::rowwise

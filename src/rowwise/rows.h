// Shared by the operators of this room: checks of tensors with any number of leading dimensions, the loop over rows.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "core/elements.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "machine/context_impl.h"
#include "opst/rowwise.h"
#include "rowwise/kernels.h"

namespace opst::rowwise {

const Kernels& kernels(Isa isa);

// Tensors of rows: null where an optional one is absent.
struct Input {
  const char* name;
  const ConstTensor* tensor;
};
struct Output {
  const char* name;
  const Tensor* tensor;
};

// All of the shape [.., last] (rank 1 to 5) and dtype of the first, which is f32, bf16 or f16. An output may be the
// same view as one of the inputs, and overlaps nothing else.
void check_rows(ShapeCheck& check, std::initializer_list<Input> inputs, std::initializer_list<Output> outputs,
                const char* last = "features");
// `numbers` [..] f32, one per row; called after check_rows.
void check_row_numbers(ShapeCheck& check, const char* name, const Tensor& numbers, int row_rank);
// Style is one of the enumerators.
void check_style(ShapeCheck& check, RopeStyle style);
// [features], f32 or `dtype`.
void check_weight(ShapeCheck& check, const char* name, const ConstTensor& weight, DType dtype);

template <class AnyTensor>
const AnyTensor* if_there(const AnyTensor& tensor) {
  return tensor ? &tensor : nullptr;
}

inline ConstRow row_of(const ConstTensor& tensor, int64_t row) {
  const int64_t offset = row_offset(tensor, row, tensor.rank - 1) * size_bytes(tensor.dtype);
  return {static_cast<const char*>(tensor.data) + offset, tensor.strides[tensor.rank - 1]};
}
inline Row row_of(const Tensor& tensor, int64_t row) {
  const ConstRow found = row_of(ConstTensor(tensor), row);
  return {const_cast<void*>(found.data), found.stride};
}

// The f32 of row `row` in `numbers` [..].
inline float* row_number(const Tensor& numbers, int64_t row) {
  return static_cast<float*>(numbers.data) + row_offset(numbers, row, numbers.rank);
}

// Calls body(row), or body(row, worker), for every row, in tasks of some microseconds.
template <class Body>
void for_each_row(Context& context, int64_t rows, int64_t elements_per_row, const Body& body) {
  constexpr int64_t kTaskElements = int64_t{1} << 14;
  if (rows == 0 || elements_per_row == 0) return;
  const int64_t rows_per_task = std::max<int64_t>(1, kTaskElements / elements_per_row);
  context.impl().pool.parallel_for(ceil_div(rows, rows_per_task), [&](int64_t task, int worker) {
    const int64_t end = std::min(rows, (task + 1) * rows_per_task);
    for (int64_t row = task * rows_per_task; row < end; ++row) {
      if constexpr (std::is_invocable_v<Body, int64_t, int>) {
        body(row, worker);
      } else {
        body(row);
      }
    }
  });
}

}  // namespace opst::rowwise

// What the operators of this room share: checks of tensors with any number of leading dimensions, and the loop over
// rows.
#pragma once

#include <algorithm>
#include <string>

#include "core/int_math.h"
#include "core/shape_check.h"
#include "machine/context_impl.h"
#include "rowwise/kernels.h"

namespace opst::rowwise {

const Kernels& kernels(Isa isa);

// Index of f32, bf16, f16 in the tables.
inline int type_index(DType dtype) { return dtype == DType::f32 ? 0 : dtype == DType::bf16 ? 1 : 2; }

// Rank 1 to 5 and the sizes of `like`, the last dimension named `last`.
inline void check_dims(ShapeCheck& check, ShapeCheck::TensorCheck tensor, int rank, const char* last) {
  switch (rank) {
    case 1:
      tensor.dims({last});
      break;
    case 2:
      tensor.dims({"dim_0", last});
      break;
    case 3:
      tensor.dims({"dim_0", "dim_1", last});
      break;
    case 4:
      tensor.dims({"dim_0", "dim_1", "dim_2", last});
      break;
    case 5:
      tensor.dims({"dim_0", "dim_1", "dim_2", "dim_3", last});
      break;
    default:
      check.require(false, std::string("rank is ") + std::to_string(rank) + ", but must be from 1 to 5");
  }
}

// The same elements at the same addresses.
inline bool same_view(const ConstTensor& a, const ConstTensor& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.rank != b.rank || a.rank < 0 || a.rank > kMaxRank) return false;
  return std::equal(a.shape, a.shape + a.rank, b.shape) && std::equal(a.strides, a.strides + a.rank, b.strides);
}

// Everything but the last dimension.
inline int64_t num_rows(const ConstTensor& tensor) {
  int64_t rows = 1;
  for (int i = 0; i + 1 < tensor.rank; ++i) rows *= tensor.shape[i];
  return rows;
}

// The row with this row-major index.
inline int64_t row_offset_bytes(const ConstTensor& tensor, int64_t row) {
  int64_t offset = 0;
  for (int i = tensor.rank - 2; i > 0; --i) {
    offset += row % tensor.shape[i] * tensor.strides[i];
    row /= tensor.shape[i];
  }
  if (tensor.rank >= 2) offset += row * tensor.strides[0];
  return offset * size_bytes(tensor.dtype);
}
inline ConstRow row_of(const ConstTensor& tensor, int64_t row) {
  return {static_cast<const char*>(tensor.data) + row_offset_bytes(tensor, row), tensor.strides[tensor.rank - 1]};
}
inline Row row_of(const Tensor& tensor, int64_t row) {
  return {static_cast<char*>(tensor.data) + row_offset_bytes(tensor, row), tensor.strides[tensor.rank - 1]};
}

// Calls body(row) for every row, in tasks of some microseconds.
template <class Body>
void for_each_row(Context& context, int64_t rows, int64_t elements_per_row, const Body& body) {
  constexpr int64_t kTaskElements = int64_t{1} << 14;
  if (rows == 0 || elements_per_row == 0) return;
  const int64_t rows_per_task = std::max<int64_t>(1, kTaskElements / elements_per_row);
  context.impl().pool.parallel_for(ceil_div(rows, rows_per_task), [&](int64_t task, int) {
    const int64_t end = std::min(rows, (task + 1) * rows_per_task);
    for (int64_t row = task * rows_per_task; row < end; ++row) body(row);
  });
}

}  // namespace opst::rowwise

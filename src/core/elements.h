// Where elements of tensors lie, and of which type they are, for code that runs on every processor.
#pragma once

#include <bit>
#include <cstdint>

#include "core/convert.h"
#include "opst/tensor.h"

namespace opst {

// Place of a storage type of floats in kernel tables: f32, bf16, f16.
constexpr int float_index(DType dtype) { return dtype == DType::f32 ? 0 : dtype == DType::bf16 ? 1 : 2; }

// Element i of an i32 or i64 tensor [n], or element (i, j) of [m, n].
inline int64_t index_at(const ConstTensor& tensor, int64_t i, int64_t j = 0) {
  const int64_t offset = i * tensor.strides[0] + (tensor.rank > 1 ? j * tensor.strides[1] : 0);
  return tensor.dtype == DType::i64 ? static_cast<const int64_t*>(tensor.data)[offset]
                                    : static_cast<const int32_t*>(tensor.data)[offset];
}

// The same view, writable. The caller knows that its memory may be written, or only reads.
inline Tensor mutable_view(const ConstTensor& tensor) { return std::bit_cast<Tensor>(tensor); }

// Rounds x, a float or double, to the tensor's dtype: f64, f32, bf16 or f16. `offset` in elements.
template <class Real>
void store_element(const Tensor& tensor, int64_t offset, Real x) {
  if (tensor.dtype == DType::f64) {
    static_cast<double*>(tensor.data)[offset] = static_cast<double>(x);
  } else if (tensor.dtype == DType::f32) {
    static_cast<float*>(tensor.data)[offset] = static_cast<float>(x);
  } else if (tensor.dtype == DType::bf16) {
    static_cast<bf16*>(tensor.data)[offset] = to_bf16(x);
  } else {
    static_cast<f16*>(tensor.data)[offset] = to_f16(x);
  }
}

// The product of all dimensions but the last.
inline int64_t num_rows(const ConstTensor& tensor) {
  int64_t rows = 1;
  for (int i = 0; i + 1 < tensor.rank; ++i) rows *= tensor.shape[i];
  return rows;
}

// In elements: from the first row of a tensor to the row with this row-major index over `num_leading` dimensions from
// `first` on.
inline int64_t row_offset(const ConstTensor& tensor, int64_t row, int num_leading, int first = 0) {
  int64_t offset = 0;
  for (int i = first + num_leading - 1; i > first; --i) {
    offset += row % tensor.shape[i] * tensor.strides[i];
    row /= tensor.shape[i];
  }
  return num_leading > 0 ? offset + row * tensor.strides[first] : 0;
}

// Whether an optional tensor takes part in the checks: tensors without elements are given without data, by their rank.
inline bool is_given(const ConstTensor& tensor) { return tensor || tensor.rank > 0; }

}  // namespace opst

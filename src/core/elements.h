// Where elements of tensors lie, and of which type they are, for code that runs on every processor.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

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

// Copies n elements of `bytes` bytes each, 1, 2, 4 or 8. Strides in elements; a source of stride 0 is repeated.
inline void copy_elements(const void* from, int64_t from_stride, void* to, int64_t to_stride, int64_t n,
                          int64_t bytes) {
  const auto* const source = static_cast<const char*>(from);
  auto* const target = static_cast<char*>(to);
  const auto copy_each = [&](auto size) {  // a constant, so that memcpy is a load and a store
    for (int64_t i = 0; i < n; ++i) std::memcpy(target + i * to_stride * size, source + i * from_stride * size, size);
  };
  if (from_stride == 1 && to_stride == 1) {
    if (n > 0) std::memcpy(target, source, static_cast<size_t>(n * bytes));
  } else if (bytes == 1) {
    copy_each(std::integral_constant<int, 1>());
  } else if (bytes == 2) {
    copy_each(std::integral_constant<int, 2>());
  } else if (bytes == 4) {
    copy_each(std::integral_constant<int, 4>());
  } else {
    copy_each(std::integral_constant<int, 8>());
  }
}
// n elements become 0.
inline void clear_elements(void* to, int64_t stride, int64_t n, int64_t bytes) {
  constexpr uint64_t kZero = 0;
  if (stride != 1) return copy_elements(&kZero, 0, to, stride, n, bytes);
  if (n > 0) std::memset(to, 0, static_cast<size_t>(n * bytes));
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

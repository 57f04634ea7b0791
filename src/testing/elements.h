// One element of any dtype, or of any tensor by its row-major index, as a double. General, not fast: for tests and
// references.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "opst/tensor.h"

namespace opst::test {

// The number at `data` plus `offset` elements. Of unknown dtypes: as of u8.
double get(DType dtype, const void* data, int64_t offset);
// Rounds to the dtype; integers are clamped to its range, NaN becomes 0 there.
void set(DType dtype, void* data, int64_t offset, double value);

// Where the element with this row-major index lies, in elements from the view's start.
int64_t offset_of(const ConstTensor& tensor, int64_t index);
double get(const ConstTensor& tensor, int64_t index);
void set(const Tensor& tensor, int64_t index, double value);
// "[1, 0, 37]"
std::string index_text(const ConstTensor& tensor, int64_t index);
// All elements in row-major order.
std::vector<double> to_doubles(const ConstTensor& tensor);
// Rounds `from`, of the same shape, into `to`.
void copy(const ConstTensor& from, const Tensor& to);

// 2^-mantissa bits of a floating point type; 0 for integers.
double epsilon(DType dtype);

}  // namespace opst::test

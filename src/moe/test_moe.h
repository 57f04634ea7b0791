// Shared by the room's tests: matrices of rowwise's tests, integers, a check of messages.
#pragma once

#include <string>
#include <vector>

#include "moe/reference.h"
#include "opst/moe.h"
#include "rowwise/test_rows.h"

namespace opst::test {

using reference::Indices;

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

// [rows, cols] of the values, row-major, or all of one value.
inline Matrix matrix(DType dtype, int64_t rows, int64_t cols, const std::vector<double>& values,
                     RowLayout layout = RowLayout::contiguous) {
  Matrix m(dtype, rows, cols, layout);
  for (int64_t i = 0; i < rows * cols; ++i) set(m.tensor, i, values[values.size() == 1 ? 0 : static_cast<size_t>(i)]);
  return m;
}
// The only row of a [1, n] matrix as a vector [n].
inline Tensor vector_of(const Matrix& m) { return m.tensor.selected(0, 0); }

inline Indices integers_of(const ConstTensor& tensor) {
  Indices out;
  for (double v : to_doubles(tensor)) out.push_back(static_cast<int64_t>(v));
  return out;
}

inline DType random_integer_type(Random& random) { return random.pick({DType::i32, DType::i64}); }
inline DType random_float_type(Random& random) { return random.pick({DType::f32, DType::bf16, DType::f16}); }
// f32, or the other operands' dtype.
inline DType weight_type(DType dtype, Random& random) { return random.pick({DType::f32, dtype}); }

inline void expect_refused(const Status& status, const std::string& message) {
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_EQ(status.message(), message);
}
// Every byte is still 0xff.
inline bool untouched(const Matrix& m) {
  const auto* const bytes = static_cast<const uint8_t*>(m.memory.data());
  return std::all_of(bytes, bytes + m.memory.size_bytes(), [](uint8_t b) { return b == 0xff; });
}

}  // namespace opst::test

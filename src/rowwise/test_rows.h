// Shared by the room's tests: matrices of any layout between forbidden pages, and comparison with rows of doubles.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "rowwise/reference.h"
#include "testing/compare.h"
#include "testing/contexts.h"
#include "testing/elements.h"
#include "testing/guarded_buffer.h"
#include "testing/random.h"

namespace opst::test {

using reference::Doubles;

inline constexpr DType kFloatTypes[] = {DType::f32, DType::bf16, DType::f16};

enum class RowLayout { contiguous, padded, transposed };
inline RowLayout random_layout(Random& random) {
  return random.pick({RowLayout::contiguous, RowLayout::padded, RowLayout::transposed});
}
inline const char* name_of(RowLayout layout) {
  return layout == RowLayout::contiguous ? "contiguous" : layout == RowLayout::padded ? "padded" : "transposed";
}

// A [rows, cols] tensor between forbidden pages.
struct Matrix {
  GuardedBuffer memory;
  Tensor tensor;

  Matrix(DType dtype, int64_t rows, int64_t cols, RowLayout layout, Guard guard = Guard::after)
      : memory((layout == RowLayout::padded ? rows * (cols + 3) - (rows > 0 ? 3 : 0) : rows * cols) * size_bytes(dtype),
               guard) {
    if (layout == RowLayout::transposed) {
      tensor = memory.tensor(dtype, {cols, rows}).transposed(0, 1);
    } else {
      tensor = memory.tensor(dtype, {rows, cols});
      if (layout == RowLayout::padded) tensor.strides[0] = cols + 3;
    }
  }
  bool intact() const { return memory.slack_intact(); }
};

inline Doubles row_of(const ConstTensor& tensor, int64_t row) { return to_doubles(tensor.selected(0, row)); }

// A contiguous f64 tensor from rows of doubles.
struct Expected {
  Doubles values;
  ConstTensor tensor;
  Expected(const std::vector<Doubles>& rows, int64_t cols) {
    for (const Doubles& row : rows) values.insert(values.end(), row.begin(), row.end());
    tensor = ConstTensor::contiguous(DType::f64, {static_cast<int64_t>(rows.size()), cols}, values.data());
  }
};

// `extra`: an absolute error that cancellation may add.
inline void expect_close(const ConstTensor& got, const Expected& expected, const std::string& about, double extra = 0) {
  const Comparison c = compare(got, expected.tensor, ConstTensor(), {.about = about, .extra = extra});
  ASSERT_TRUE(c.ok) << c.message;
}

// Central differences of sum_i grad_out[i] f(x)[i] with respect to x.
template <class F>
Doubles central_differences(const Doubles& grad_out, Doubles x, const F& f) {
  constexpr double kStep = 1e-5;
  Doubles out(x.size());
  const auto loss = [&] {
    double sum = 0;
    const Doubles y = f(x);
    for (size_t i = 0; i < y.size(); ++i) sum += grad_out[i] * y[i];
    return sum;
  };
  for (size_t i = 0; i < x.size(); ++i) {
    const double at = x[i];
    x[i] = at + kStep;
    const double above = loss();
    x[i] = at - kStep;
    out[i] = (above - loss()) / (2 * kStep);
    x[i] = at;
  }
  return out;
}

inline void expect_near(const Doubles& a, const Doubles& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], tolerance) << i;
}

inline Doubles random_doubles(size_t count, Random& random) {
  Doubles out(count);
  for (double& v : out) v = random.normal();
  return out;
}

inline constexpr int64_t kRowSizes[] = {0,  1,  2,  3,  4,  5,  7,  8,   9,   15,  16, 17,
                                        31, 32, 33, 63, 64, 65, 67, 127, 128, 129, 131};

}  // namespace opst::test

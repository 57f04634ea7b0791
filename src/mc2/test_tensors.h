// Tensors of a test, with guard pages around them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "testing/compare.h"
#include "testing/guarded_buffer.h"
#include "testing/random.h"

namespace opst::test {

struct Owned {
  std::unique_ptr<GuardedBuffer> memory;
  Tensor tensor;
};

// NaN everywhere.
inline Owned owned(DType dtype, std::initializer_list<int64_t> shape) {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  Owned o{std::make_unique<GuardedBuffer>(std::max<int64_t>(1, elements) * size_bytes(dtype)), {}};
  o.tensor = o.memory->tensor(dtype, shape);
  return o;
}
inline Owned random_tensor(DType dtype, std::initializer_list<int64_t> shape, Random& random) {
  Owned o = owned(dtype, shape);
  fill(o.tensor, Fill::normal, random);
  return o;
}

inline void expect_bits(const ConstTensor& got, const ConstTensor& expected, const std::string& what) {
  const Comparison c = compare_bits(got, expected, {.name = what});
  EXPECT_TRUE(c.ok) << c.message;
}

inline int64_t first_of(const std::vector<int64_t>& sizes, int rank) {
  return std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0});
}

}  // namespace opst::test

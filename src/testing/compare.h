// compare: a result against a float64 reference, with a bound taken from what a naive computation achieves.
//
//   Comparison c = compare(out, reference, naive, {.about = plan + ", " + context.name});
//   EXPECT_TRUE(c.ok) << c.message;
//
// The naive result is the same equation computed step by step in the result's dtype. Each element must satisfy
//   |got - ref| <= 2 * max|naive - ref| + 4 * eps * scale + extra
// over the whole tensor, and again within its row (the last dimension) with the row's own largest reference value as
// scale and the worst naive error, relative to that scale, that any row shows: an error that is small only beside
// another row's values fails.
#pragma once

#include <cstdint>
#include <string>

#include "opst/tensor.h"

namespace opst::test {

struct CompareOptions {
  std::string name = "result";
  std::string about = {};  // context, plan, whatever helps to repeat a failure; the seed is added
  double scale = 0;        // 0: the largest finite |ref|, of the tensor and of each row
  double extra = 0;        // absolute
  bool per_row = true;
  double factor = 2;  // times the naive error
  double eps_factor = 4;
  bool names_seed = true;  // in the message, for tests
};

struct Comparison {
  bool ok = false;
  std::string message;         // empty where ok
  double max_error = 0;        // over finite elements
  double bound = 0;            // of the whole tensor
  double max_error_ratio = 0;  // largest error / bound, the row bound included
  int64_t worst_index = -1;    // row-major; -1 where nothing was compared
  int64_t num_compared = 0;
};

// `reference` and `naive` have the shape of `got` and any dtype; a naive tensor without data stands for no error at
// all. Where the reference is NaN or infinite the result must be the same (any NaN); a finite reference that rounds to
// infinity in got's dtype may become that infinity.
Comparison compare(const ConstTensor& got, const ConstTensor& reference, const ConstTensor& naive,
                   const CompareOptions& options = {});

// Equal shape, dtype and bits (strides may differ).
Comparison compare_bits(const ConstTensor& got, const ConstTensor& expected, const CompareOptions& options = {});

}  // namespace opst::test

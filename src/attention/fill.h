// One value for all elements of a tensor, or for its last rows, which no task computes.
#pragma once

#include <cstdint>

#include "machine/thread_pool.h"
#include "opst/tensor.h"

namespace opst::attention {

// Every element becomes x, rounded to t's dtype (f32, bf16, f16, f64); not the memory between them. The pool's threads
// share the elements in pieces of 64 KB. A tensor without data or elements is left alone.
void fill(const Tensor& t, double x, ThreadPool& pool);
// The same for rows [first, ...) of dimension 2.
void fill_rows(const Tensor& t, int64_t first, double x, ThreadPool& pool);

}  // namespace opst::attention

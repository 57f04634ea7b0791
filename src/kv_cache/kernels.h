// The kernel table of the kv_cache room, one per instruction set level.
#pragma once

#include <cstdint>

namespace opst::kv_cache {

// Rows in memory. Element d of row i lies at  i * row_stride + d / step * word_stride + d % step  from `data`, all in
// elements. step is 1, or 2 for the pairs of a transposed page; the number of elements is then even.
struct Rows {
  void* data;
  int64_t row_stride, word_stride, step;
};
// num_rows rows of dim >= 1 elements; `from` is only read.
struct CopyRows {
  int64_t num_rows, dim;
  Rows from, to;
};

// Indexed by storage types: f32, bf16, f16. Equal types are copied as bits; others round once, to nearest even.
struct Kernels {
  void (*copy_rows[3][3])(const CopyRows& rows);  // [from][to]
};

}  // namespace opst::kv_cache

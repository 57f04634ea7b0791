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

// Indexed by storage types: f32, bf16, f16, f8_e4m3, f8_e5m2. Equal types are copied as bits; others round once, to
// nearest even.
inline constexpr int kNumStorageTypes = 5;
struct Kernels {
  void (*copy_rows[kNumStorageTypes][kNumStorageTypes])(const CopyRows& rows);  // [from][to]
  void (*copy_bytes)(const CopyRows& rows);                                     // i8, u8
};

}  // namespace opst::kv_cache

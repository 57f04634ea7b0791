// How a matmul is cut into tasks: a pure function of the problem and the kernels' granularity, never of the thread
// count. Every output is one whole sum over k, so the cut never shows in the result.
#pragma once

#include <cstdint>
#include <string>

#include "opst/quant.h"

namespace opst::gemm {

struct Problem {
  int64_t m = 0, n = 0, k = 0;
  QuantFormat format = QuantFormat::f32;
  bool x_rows_contiguous = true;  // elements of a row next to each other
};

enum class Path : uint8_t {
  few_rows,   // weights are decoded in registers, once per few rows
  many_rows,  // weights are decoded into scratch, once per block of rows
};

struct Plan {
  Path path = Path::few_rows;
  int64_t rows_per_task = 0;
  int64_t columns_per_task = 0;  // whole panels
  int64_t row_tasks = 0, column_tasks = 0;
  int64_t k_block = 0;   // many_rows; whole blocks of the format
  int64_t x_stride = 0;  // of the packed rows of x; 0: read in place
  int64_t packed_x_bytes = 0;
  int64_t decoded_bytes_per_worker = 0, sums_bytes_per_worker = 0;

  int64_t num_tasks() const { return row_tasks * column_tasks; }
  int64_t k_blocks(int64_t k) const { return (k + k_block - 1) / k_block; }
  int64_t scratch_bytes(int num_workers) const {
    return packed_x_bytes + num_workers * (decoded_bytes_per_worker + sums_bytes_per_worker);
  }
};

// few_columns, many_columns: see kernels.h. m, n >= 1.
Plan make_plan(const Problem& problem, int few_columns, int many_columns);
std::string to_string(const Plan& plan);

}  // namespace opst::gemm

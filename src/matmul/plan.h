// How a matmul is cut into tasks: a pure function of the problem and the columns that the kernels take at once; only
// plan_few_blocks looks at the number of threads. Every output is one whole sum over k, so the cut shows in no bit.
#pragma once

#include <cstdint>
#include <string>

#include "opst/quant.h"

namespace opst::gemm {

struct Problem {
  int64_t m = 0, n = 0, k = 0;
  QuantFormat format = QuantFormat::f32;
  bool dot = false;             // words of x are pairs of bf16
  bool read_x_in_place = true;  // few rows could: floats next to each other
  bool two_halves = false;      // swiglu: column j of out needs columns j and n + j of the weight
};

enum class Path : uint8_t {
  few_rows,   // weights are decoded in registers, once per few rows
  many_rows,  // weights are decoded into scratch, once per task
};

struct Plan {
  Path path = Path::few_rows;
  int64_t rows_per_task = 0;
  int64_t columns_per_task = 0;  // of out; whole panels
  int64_t row_tasks = 0, column_tasks = 0;
  int64_t words = 0;     // of a row of x: floats or pairs, the filling up to the weight's last piece included
  int64_t k_block = 0;   // words decoded at once; many_rows: whole quant blocks
  int64_t x_stride = 0;  // of the packed rows of x, in words; 0: read in place
  int64_t packed_x_bytes = 0;
  int64_t sums_stride = 0, second_stride = 0;  // of a task's sums, and of those of the second half
  int64_t decoded_bytes_per_worker = 0, sums_bytes_per_worker = 0, second_bytes_per_worker = 0;

  int64_t num_tasks() const { return row_tasks * column_tasks; }
  int64_t bytes_per_worker() const {
    return decoded_bytes_per_worker + sums_bytes_per_worker + second_bytes_per_worker;
  }
  int64_t scratch_bytes(int num_workers) const { return packed_x_bytes + num_workers * bytes_per_worker(); }
};

// few_columns, many_columns: see kernels.h. m, n >= 1.
Plan make_plan(const Problem& problem, int few_columns, int many_columns);
// A product of blocks of activations with a quantised weight (few_rows_blocks.h), bound by reading the weight: long
// pieces, whose count follows the threads.
Plan plan_few_blocks(const Problem& problem, int num_threads);
std::string to_string(const Plan& plan);

// Inputs of a packed weight, the filling included, and the bytes of one output's inputs.
int64_t packed_inputs(QuantFormat format, int64_t k);
int64_t packed_column_bytes(QuantFormat format, int64_t k);

}  // namespace opst::gemm

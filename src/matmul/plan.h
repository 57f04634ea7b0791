// How a matmul is cut into tasks, and the memory that a call takes: a MatmulPlan, and what the driver alone has to know.
// Every output is one whole sum over k, so the cut shows in no bit.
#pragma once

#include <cstdint>

#include "core/int_math.h"
#include "matmul/kernels.h"
#include "opst/matmul.h"

namespace opst::gemm {

// What rows of x become before they are multiplied.
enum class XForm : uint8_t {
  in_place,      // floats next to each other, read where they are
  words,         // floats, or pairs of bf16: [words / run_words][m][x_stride], 4 bytes each
  int8_blocks,   // [m][x_stride] ActivationBlock
  fixed_blocks,  // [m][x_stride] FixedBlock
  bytes,         // [m][x_stride] int8 in groups that are filled up to whole words, and [m][groups] their sums
};

constexpr int64_t element_bytes(XForm form) {
  constexpr size_t kBytes[] = {sizeof(float), sizeof(float), sizeof(ActivationBlock), sizeof(FixedBlock), 1};
  return static_cast<int64_t>(kBytes[static_cast<size_t>(form)]);
}

struct Plan : MatmulPlan {
  Product kernel = nullptr;  // of the path; null: f64
  int64_t m = 0, width = 0;  // of out
  bool two_halves = false;   // swiglu: column j of out needs columns j and width + j of the weight
  XForm x = XForm::in_place;
  int64_t words = 0;        // of a row of x: floats or pairs, the filling up to the weight's last piece included
  int64_t run_words = 0;    // of the form words: of a row before the next row's follow
  int64_t x_stride = 0;     // from row to row, in elements of the form; 0: that of x itself
  int64_t pack_rows = 0;    // rows of x per packing task
  int64_t group_bytes = 0;  // of a row in the form bytes
  int64_t sums_stride = 0, second_stride = 0;  // of a task's sums, and of those of the second half
  // Bytes of the pieces of memory that the workers share, each without what an Arena adds to it.
  int64_t weight_bytes = 0;    // an unpacked weight, packed
  int64_t wide_out_bytes = 0;  // out as f32, where it is quantised afterwards
  int64_t bias_bytes = 0, x_scales_bytes = 0;
  int64_t x_bytes = 0, x_sums_bytes = 0;
  // Likewise of each worker's own pieces, in this order; widened rows are those of x that are being packed.
  int64_t decoded_bytes_per_worker = 0, sums_bytes_per_worker = 0, second_bytes_per_worker = 0;
  int64_t widened_bytes_per_worker = 0;
};

// As plan_matmul.
Plan make_plan(const MatmulProblem& problem, const Machine& machine, int num_threads);

// Columns of out per task of a product of few rows in blocks (activations_fixed, activations_int8_few_rows), where
// `column_bytes` of the weight make one output.
int64_t columns_per_piece(int64_t width, int64_t column_bytes, int num_threads);

bool takes_two_halves(Activation activation);

// Inputs of a packed weight, the filling included; the bytes of one output's inputs, and of the whole.
int64_t packed_inputs(QuantFormat format, int64_t k);
int64_t packed_column_bytes(QuantFormat format, int64_t k);
Size packed_bytes(QuantFormat format, int64_t n, int64_t k);

}  // namespace opst::gemm

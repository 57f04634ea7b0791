// The contract of the matmul room's kernels, and their tables, one per instruction set level: those that multiply
// floats, and those that multiply bytes. Two, because different levels have their instructions.
//
// A product computes a rectangle of sums over the whole of k; the epilogue (finish) makes outputs of the sums.
#pragma once

#include <cstdint>

#include "matmul/activations.h"
#include "matmul/packed_layout.h"

namespace opst::gemm {

// What every product takes: a rectangle of sums, and the operands from its first row and its first column on.
struct ProductPart {
  // Rows of x in the kernel's form, 64-byte aligned where they are packed:
  //   few_rows, many_rows  words: floats or, in the products named dot, pairs of bf16 (k, k + 1)
  //   activations_         ActivationBlock or FixedBlock
  //   weights_int_         bytes [groups][the group's values, filled up to whole words of the weight]; floats
  const void* x;
  int64_t x_stride;        // elements of the form from row to row
  int64_t x_block_stride;  // many_rows: from run to run of k; word k0 + t of row i lies at
                           // x[k0 / k_block * x_block_stride + i * x_stride + t]
  int64_t rows, columns;
  int64_t k;           // words; activations_: values
  int64_t k_block;     // of them decoded or unpacked at once; whole pieces
  const void* panels;  // packed weight, from the panel that begins with the first column on; not of weights_int_. In
                       // place: a weight [inputs][columns] from its first column on
  void* scratch;       // what the table says, 64-byte aligned
  float* sums;         // [rows][sums_stride], room for columns rounded up to what the kernel takes at once
  int64_t sums_stride;

  // many_rows in place alone: the weight's inputs, and elements from one to the next.
  int64_t inputs = 0, input_stride = 0;
  // many_rows, of all k at once: outputs that the sums are rounded to, in place of `sums`, sums_stride elements apart, whole
  // vectors of columns; null: sums are stored.
  void* out = nullptr;
  DType out_type = DType::f32;

  // weights_int_ alone.
  IntWeightPart ints = {};            // in place of panels
  const int32_t* x_sums = nullptr;    // x of bytes: [rows][groups], the sum of each group
  const int32_t* int_bias = nullptr;  // one group: [columns filled up to whole panels], joins the sums; null: none
  bool int_sums = false;              // one group: sums are left as i32, not multiplied with the weight's scales
};
using Product = void (*)(const ProductPart& part);

// out = residual + activation(sums * x_scales + bias). `sums` is scratch and changes. Types: f32, bf16 or f16.
struct Finish {
  float* sums = nullptr;  // [rows][sums_stride], room for whole vectors
  int64_t sums_stride = 0;
  const float* x_scales = nullptr;  // [rows]; null: all 1
  const float* bias = nullptr;      // [columns]; null: none
  // Sums and bias of the second half: swiglu only.
  const float* second = nullptr;
  int64_t second_stride = 0;
  const float* second_bias = nullptr;
  int64_t rows = 0, columns = 0;
  const void* residual = nullptr;  // null: none
  DType residual_type = DType::f32;
  int64_t residual_row_stride = 0, residual_column_stride = 0;
  void* out = nullptr;
  DType out_type = DType::f32;
  int64_t row_stride = 0, column_stride = 0;
};
inline constexpr int kNumActivations = 6;

// Rows of x that few_rows and the few_rows of integers take at most. Decoding in registers once per 4 rows (2 without
// AVX-512) costs less than filling scratch and a register tile.
inline constexpr int kMaxFewRows = 8;
// weights_int_many_rows: words of four bytes along k that are summed before the next columns' turn. int8, 64 rows, of the
// peak on Zen 4: 256 words 0.81 to 0.84, 512 words 0.87 to 0.90.
inline constexpr int64_t kIntFours = 512;
// weights_int_floats_many_rows: values decoded at once, at most.
inline constexpr int64_t kIntDecoded = 384;

// Products of floats, the epilogue and packing.
struct FloatKernels {
  int few_columns;   // columns that few_rows takes at once: rectangles should be multiples of it
  int many_columns;  // likewise
  // Both give the same bits. Scratch of many_rows: f32 [k_block][many_columns].
  Product few_rows[kNumQuantFormats];
  Product many_rows[kNumQuantFormats];
  // bf16 x times bf16 weights by the pairwise dot instruction; null where the level has none.
  Product few_rows_dot, many_rows_dot, many_rows_dot_in_place;
  // many_rows of a weight that is not packed and lies [inputs][columns], by its type (index 0: f32, 1: bf16, 2: f16).
  Product many_rows_in_place[3];
  void (*finish[kNumActivations])(const Finish& part);  // in the order of Activation
  // Index 0: f32, 1: bf16, 2: f16, of the elements. They become a packed panel of up to 16 outputs by k inputs
  // (packed_layout.h); missing ones are 0. Addresses need no alignment.
  void (*pack_panel[3])(const void* first, int64_t output_stride, int64_t input_stride, int64_t outputs, int64_t k,
                        void* panel);
  // Likewise: rows x columns elements become [rows][out_stride] floats.
  void (*widen_rows[3])(const void* first, int64_t row_stride, int64_t column_stride, int64_t rows, int64_t columns,
                        float* out, int64_t out_stride);
};

// Products of bytes. Formats that are null: f32, f16 and bf16 have no integers; of activations_fixed and
// activations_int8_few_rows also those whose bytes the level has no quick product for.
struct ByteKernels {
  int many_columns;  // columns that the products of many rows take at once
  Product activations_fixed[kNumQuantFormats];
  Product activations_int8_few_rows[kNumQuantFormats];
  // Scratch: words of four bytes [k_block / 4][many_columns], scales [k_block / 16] of them, minimums [k_block / 32].
  Product activations_int8_many_rows[kNumQuantFormats];
  // Index 0: i8, 1: i4. few_rows: up to kMaxFewRows rows.
  Product weights_int_few_rows[2];
  // Scratch of i4: words of four bytes [kIntFours, or with more groups those of a group][many_columns].
  Product weights_int_many_rows[2];
  // Both give the same bits.
  Product weights_int_floats_few_rows[2];
  Product weights_int_floats_many_rows[2];  // scratch: f32 [k_block][many_columns]
  // k values `x_stride` apart -> k / 32 blocks. fix_row: false where the row is not representable; null where there is
  // no product.
  void (*quantise_row)(const float* x, int64_t x_stride, int64_t k, ActivationBlock* out);
  bool (*fix_row)(const float* x, int64_t x_stride, int64_t k, FixedBlock* out);
  // A row of values in the groups of a weight -> ProductPart::x of bytes, and x_sums.
  void (*pack_int_row)(const int8_t* x, int64_t x_stride, const IntWeightPart& weight, int64_t group_bytes, int8_t* a,
                       int32_t* x_sums);
};

}  // namespace opst::gemm

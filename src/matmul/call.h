// What the files of matmul share: the plan of a call, its operands, the steps of the driver.
#pragma once

#include <algorithm>
#include <span>

#include "core/elements.h"
#include "core/shape_check.h"
#include "machine/context_impl.h"
#include "matmul/kernels.h"
#include "opst/matmul.h"

namespace opst::gemm {

// The tables of the highest level that `isa` includes.
const FloatKernels& float_kernels(Isa isa);
const ByteKernels& byte_kernels(Isa isa);

// ---- plan.cc: how a matmul is cut into tasks, and the memory that a call takes

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

// A MatmulPlan, and what the driver alone has to know. An output is one whole sum over k, so the cut shows in no bit.
struct Plan : MatmulPlan {
  Product kernel = nullptr;  // of the path; null: f64
  int64_t m = 0, width = 0;  // of out
  bool two_halves = false;   // swiglu: column j of out needs columns j and width + j of the weight
  XForm x = XForm::in_place;
  int64_t column_bytes = 0;   // of a weight, per output, without scales beside it; in place: from output to output
  int64_t words = 0;          // of a row of x: floats or pairs, the filling up to the weight's last piece included
  int64_t run_words = 0;      // of the form words: of a row before the next row's follow
  int64_t x_stride = 0;       // from row to row, in elements of the form; 0: that of x itself
  int64_t pack_rows = 0;      // rows of x per packing task
  int64_t group_bytes = 0;    // of a row in the form bytes
  int64_t chunk_columns = 0;  // of a task, whose sums are there at once
  bool whole_rows = false;    // a task has whole rows of out, which it quantises; else out passes through f32 first
  int64_t sums_stride = 0, second_stride = 0;  // of a task's sums, and of those of the second half
  int64_t columns_at_once = 1;                 // of the kernel: what it stores of a task's sums is a multiple
  // Bytes of the pieces of memory that the workers share, each without what an Arena adds to it.
  int64_t weight_bytes = 0;    // an unpacked weight, packed; in place: 0
  int64_t wide_out_bytes = 0;  // out as f32, where it is quantised afterwards
  int64_t bias_bytes = 0, x_scales_bytes = 0;
  int64_t x_bytes = 0, x_sums_bytes = 0;
  // Likewise of each worker's own pieces, in this order; widened rows are those of x that are being packed.
  int64_t decoded_bytes_per_worker = 0, sums_bytes_per_worker = 0, second_bytes_per_worker = 0;
  int64_t widened_bytes_per_worker = 0;
  int64_t tile_bytes_per_worker = 0;  // of whole rows: a task's rows of out as f32
};

// As plan_matmul.
Plan make_plan(const MatmulProblem& problem, const Machine& machine, int num_threads);

// For how many threads each of `groups` products is planned that share a call's: enough tasks for all threads.
int threads_per_group(int64_t groups, int num_threads);

bool takes_two_halves(Activation activation);

// Inputs of a packed weight, the filling included; the bytes of one output's inputs, and of the whole.
int64_t packed_inputs(QuantFormat format, int64_t k);
int64_t packed_column_bytes(QuantFormat format, int64_t k);
Size packed_bytes(QuantFormat format, int64_t n, int64_t k);

// Words of 32 bits that a group of an int8 or int4 weight fills.
inline int64_t int_group_words(int64_t group_values, int bits) { return ceil_div(group_values, 32 / bits); }

// Whether a weight [n, k] lies [k, n].
inline bool has_unit_stride_outputs(const ConstTensor& weight) { return normal_strides(weight).strides[0] == 1; }

// ---- packed_weight.cc

using DTypes = std::initializer_list<DType>;
inline constexpr DTypes kFloats = {DType::f32, DType::bf16, DType::f16}, kF64 = {DType::f64};

// Of f32, bf16 and f16.
inline QuantFormat weight_format(DType dtype) {
  return dtype == DType::f32 ? QuantFormat::f32 : dtype == DType::bf16 ? QuantFormat::bf16 : QuantFormat::f16;
}

// Memory of a packed weight. May throw bad_alloc.
inline Result<Buffer> allocate_weight(Context& context, Size bytes) {
  if (!bytes.within_limit()) return Status::out_of_memory();
  return context.impl().weights.allocate(bytes.value());
}

// weight [n, k] f32, bf16 or f16 -> panels (packed_layout.h) of its type.
void pack_float_weight(Context& context, const ConstTensor& weight, void* panels);

// The whole of a packed weight, or of matrix `index` of a stack.
IntWeightPart int_weight(const PackedIntWeight& weight, int64_t index = 0);

// ---- matmul.cc

// The checks of a call's tensors: each gives the problem of a call with such a weight. Of a grouped product
// (grouped_matmul.h) m is that of all groups, and bias has a row for each.
struct CallTensors {
  const ConstTensor& x;
  const Tensor& out;
  const MatmulOptions& options;
  ConstTensor x_scales = {};
  bool grouped = false;
};
Result<MatmulProblem> check_call(ShapeCheck& check, const PackedWeight& weight, const CallTensors& tensors);
Result<MatmulProblem> check_call(ShapeCheck& check, const PackedIntWeight& weight, const CallTensors& tensors);
// weight [n, k] or, grouped, [groups, n, k]
Result<MatmulProblem> check_call(ShapeCheck& check, const ConstTensor& weight, const CallTensors& tensors);

// ---- driver.cc

// The tensors of a product, checked. Those that a call may leave out, null where absent, belong to the caller: copies of
// tensors would be a tenth of the smallest product's time.
struct Operands {
  ConstTensor x;                        // with normal strides
  Tensor out;                           // likewise; i32: the sums of one group
  const int64_t* row_of_x = nullptr;    // row i of the product is row row_of_x[i] of x; null: row i
  const void* panels = nullptr;         // of a packed weight
  IntWeightPart ints = {};              // of int8 or int4
  const ConstTensor* weight = nullptr;  // an unpacked one
  const ConstTensor *x_scales = nullptr, *bias = nullptr, *residual = nullptr;
  const Tensor* out_scales = nullptr;          // of an out that is quantised
  const ConstTensor* smooth_scales = nullptr;  // likewise: [width], out is multiplied with them first
};

// Rows of x as the product takes them.
struct Rows {
  const char* data = nullptr;
  int64_t stride = 0;             // elements of the form
  const int32_t* sums = nullptr;  // of the form bytes
};

// One of the products that a call runs together, in one loop over the tasks of all: the call's only one, or that of a
// group of rows with its own weight.
struct SingleProduct {
  const Operands* operands = nullptr;
  Plan plan = {};
  // What the driver makes of them.
  Rows x = {};
  bool held = true;  // false: the form of x cannot hold one of its rows
  const void* panels = nullptr;
  int64_t inputs = 0, input_stride = 0;  // in place
  bool sums_in_out = false;              // where a task's columns are whole tiles: each sum is stored once, in out
  float* wide = nullptr;                 // out as f32, where a task has no whole rows
  const float *biases = nullptr, *x_scales = nullptr;
  const int32_t* int_biases = nullptr;
  int64_t pack_tasks_before = 0, tasks_before = 0;  // of the products before this one
};

// Products that run together, since their memory is there at once: products [begin, end).
struct Wave {
  size_t end = 0;
  int64_t scratch_bytes_shared = 0, scratch_bytes_per_worker = 0;

  int64_t scratch_bytes(int num_threads) const {
    return (Size(scratch_bytes_per_worker) * num_threads + scratch_bytes_shared).value();
  }
};
Wave wave_from(std::span<const SingleProduct> products, size_t begin, int num_threads);

// out as MatmulOptions and IntMatmulOptions tell. The problem is one that a call may pose.
Status multiply(Context& context, const MatmulProblem& problem, const Operands& operands);
// Likewise, of every product: its operands and its plan are given, and what the problem tells holds for all of them, but
// for m, n and k. Where memory is exhausted, nothing is written. (Rows that fixed point cannot hold take theirs later.)
Status multiply_all(Context& context, const MatmulProblem& problem, std::span<SingleProduct> products);

// ---- pack_x.cc

// A worker's memory.
struct WorkerScratch {
  char* decoded;
  float *sums, *second, *widened, *tile;
  WorkerScratch(const Plan& plan, char* memory);
};

// Packs the rows of x of every product: their `x` and `held`. `scratch`: the workers' memory, so many bytes each.
void pack_x(Context& context, std::span<SingleProduct> products, Arena& arena, char* scratch, int64_t worker_bytes);

// The product that a task belongs to.
template <class Products>
auto& product_of(const Products& products, int64_t task, int64_t SingleProduct::*before) {
  if (products.size() == 1) return products[0];
  const auto after = std::upper_bound(products.begin(), products.end(), task,
                                      [&](int64_t t, const SingleProduct& product) { return t < product.*before; });
  return *(after - 1);
}

}  // namespace opst::gemm

// Matrix product of activations with a weight: packed once, or as it is.
//
//   out = residual + activation(x . weight^T + bias)
//
//   Result<PackedWeight> weight = PackedWeight::pack(context, QuantMatrix{QuantFormat::q4_1, n, k, bytes, num_bytes});
//   Status status = matmul(context, x, weight.value(), out);
//   Status status = matmul(context, x, gate_up.value(), hidden, {.activation = Activation::swiglu});
//   Status status = matmul(context, hidden, down.value(), x, {.residual = x});
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "opst/context.h"
#include "opst/quant.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst {

// A weight [n, k] (n outputs, k inputs) repacked for the multiply kernels; owns its memory. Quantised weights stay
// quantised: a packed weight takes the bytes of its source, n rounded up to a multiple of 16 (bf16: k to one of 2). The
// packed form is the same at every instruction set level, so a weight may be used with any Context.
class PackedWeight {
 public:
  PackedWeight() = default;

  // weight [n, k] f32, bf16 or f16, any strides (a [k, n] matrix is its transposed view). Kept in its own type.
  // Errors: invalid_argument for another rank or dtype; out_of_memory.
  static Result<PackedWeight> pack(Context& context, const ConstTensor& weight);

  // The rows of a quantised matrix. Errors: those of dequantize; out_of_memory.
  static Result<PackedWeight> pack(Context& context, const QuantMatrix& weight) { return pack(context, {&weight, 1}); }

  // Several matrices of one format and k, one below another, so that one product serves all that take the same x.
  // Each but the last has a multiple of 16 rows. Errors: as above, and invalid_argument where they do not fit together.
  static Result<PackedWeight> pack(Context& context, std::span<const QuantMatrix> parts);

  // A stack: `count` weights of one shape in one buffer, each of which a grouped product multiplies with rows of its own
  // (grouped_matmul.h). weights [count, n, k], or the matrices; every `parts` of these lie one below another in one
  // weight of the stack, as in pack. Errors: as above.
  static Result<PackedWeight> pack_stack(Context& context, const ConstTensor& weights);
  static Result<PackedWeight> pack_stack(Context& context, std::span<const QuantMatrix> weights, int64_t parts = 1);

  QuantFormat format() const { return format_; }
  int64_t count() const { return count_; }  // of a stack; else 1
  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  int64_t size_bytes() const { return data_.size_bytes(); }
  const void* data() const { return data_.data(); }

 private:
  PackedWeight(QuantFormat format, int64_t count, int64_t n, int64_t k, Buffer data)
      : format_(format), count_(count), n_(n), k_(k), data_(std::move(data)) {}

  QuantFormat format_ = QuantFormat::f32;
  int64_t count_ = 1, n_ = 0, k_ = 0;
  Buffer data_;
};

// Applied to y = x . weight^T + bias, element by element, before the residual is added.
enum class Activation : uint8_t {
  none,
  silu,       // y / (1 + exp(-y))
  gelu_erf,   // y (1 + erf(y / sqrt(2))) / 2
  gelu_tanh,  // y (1 + tanh(sqrt(2 / pi) (y + 0.044715 y^3))) / 2
  // The weight's rows are a gate's and, below them, as many of an up projection: n is even, out [m, n / 2].
  swiglu,          // silu(y[:, :n/2]) * y[:, n/2:]
  swiglu_swapped,  // y[:, :n/2] * silu(y[:, n/2:])
};
const char* to_string(Activation activation);

// How x meets a quantised weight. (f32, bf16 and f16 weights are multiplied exactly either way.)
//   exact  as it is
//   int8   each row rounded in blocks of 32: scale = max |x| / 127, q = round(x / scale) to nearest even; products with
//          the weight's integers are summed exactly in each block, and scales applied once per block. Faster, with an
//          error of at most half a scale in each x. A block with a NaN or an infinity makes its row of y NaN.
enum class ActivationType : uint8_t { exact, int8 };
const char* to_string(ActivationType type);

// All may be combined. Tensors f32, bf16 or f16 (in a product of f64: f64), any strides; ConstTensor{} is absent.
struct MatmulOptions {
  ConstTensor bias = {};  // [n]
  Activation activation = Activation::none;
  ConstTensor residual = {};  // out's shape; the very same view as out, or no overlap with it
  ActivationType activations = ActivationType::exact;
  // True: the same bits for any number of rows. Else one or two rows meet a quantised weight in fixed point (24 bits a
  // value, one scale for 32) where the instruction set level makes that faster: as accurate, but with other bits.
  bool batch_invariant = false;
  // Given: out is i8, and each of its rows is quantised by its own scale, as dynamic_quant (quant.h) does; the scales
  // [m] f32 go here. out may then not be a residual. Absent only as Tensor{}: scales of m = 0 rows are given without
  // data, by their rank.
  Tensor out_scales = {};
};

// y[i, j] = sum_t x[i, t] * weight[j, t] + bias[j];   out = residual + activation(y)
//   x       [m, k] f32, bf16 or f16, any strides; m = 0 is legal, and k = 0 gives y = bias or 0
//   weight  [n, k]
//   out     [m, n] (swiglu: [m, n / 2]) f32, bf16 or f16 (out_scales: i8), any strides; must not overlap x, bias or
//           weight
// Numerics: every weight is exactly its dequantised f32 value; each sum runs over t in ascending order in f32, one
// fused multiply-add per term (generic level: two roundings); bias, activation and residual follow in f32, and out is
// rounded once. Two other ways to a sum:
//   bf16 x, bf16 weight  the pairwise dot instruction, where the context's Machine says so: an instruction adds two
//                        products, and subnormal operands count as 0
//   quantised weight     fixed point for one or two rows (options.batch_invariant); int8 (options.activations)
// A row's bits depend neither on the other rows nor on the threads, and on the number of rows only as batch_invariant
// tells. NaN and Inf of a row of x reach that row of out only.
// Errors: invalid_argument for ranks, dtypes or sizes that disagree; out_of_memory.
Status matmul(Context& context, const ConstTensor& x, const PackedWeight& weight, const Tensor& out,
              const MatmulOptions& options = {});

// A hint: the context's next product of few rows will be with this weight. Threads that wait for work in the meantime
// fetch the beginning of their share of it. The weight may be gone by then.
void read_ahead(Context& context, const PackedWeight& weight, Activation activation = Activation::none);

// matmul with a weight that changes from call to call: it is packed into the context's workspace first, or, where it lies
// [k, n], multiplied as it is.
//   weight  [n, k] f32, bf16 or f16, any strides >= 0
// f64: x, weight, out, bias and residual all f64; sums in f64, in the same order.
// f32, bf16, f16: the bits of the product with the packed weight.
Status matmul(Context& context, const ConstTensor& x, const ConstTensor& weight, const Tensor& out,
              const MatmulOptions& options = {});

// Gradients of sum(grad_out * (x . weight^T + bias)). Tensor{} is absent: not computed.
struct MatmulGradients {
  Tensor x = {};       // [m, k] = grad_out . weight
  Tensor weight = {};  // [n, k] = grad_out^T . x
  Tensor bias = {};    // [n]    = sum of grad_out over its rows
};

//   grad_out  [m, n], x [m, k], weight [n, k]: f32, bf16 or f16 each, or all f64; any strides
//   gradients f32, bf16 or f16 each (f64 where the inputs are); any strides; must not overlap an input or one another
// x is needed for the weight's gradient only, weight for that of x only; what is not needed may be ConstTensor{}.
// Sums run over n or m in ascending order as in matmul, for any number of threads. Errors: as matmul.
Status matmul_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& x, const ConstTensor& weight,
                       const MatmulGradients& gradients);

// out[i, t] = weight[rows[i], t]: embedding lookup in a weight that is also multiplied with (tied embeddings).
//   rows  [count] i64, each in [0, n); any stride. Row e * n + r of a stack is row r of its weight e
//   out   [count, k] f32, any strides
// Errors: an index out of range is refused before anything is written.
Status lookup_rows(Context& context, const PackedWeight& weight, const ConstTensor& rows, const Tensor& out);

// An int8 or int4 weight [n, k] with scales, repacked, for any Context; owns its memory: the bytes of its source, with
// n rounded up to a multiple of 16 and each group to whole words of 4 bytes, and 4 (with zeros 8) bytes per scale.
class PackedIntWeight {
 public:
  PackedIntWeight() = default;

  // weight.q [n, k] (IntMatrix in quant.h), groups of at most 65536 values, so that sums of products fit into 32 bits.
  // Errors: those of dequantize(IntMatrix), longer groups; out_of_memory.
  static Result<PackedIntWeight> pack(Context& context, const IntMatrix& weight);
  // [n, k] i8 as it is: every scale is 1.
  static Result<PackedIntWeight> pack(Context& context, const ConstTensor& weight);
  // A stack, as PackedWeight::pack_stack: matrices of one shape, all with zeros or none. Errors: as above.
  static Result<PackedIntWeight> pack_stack(Context& context, std::span<const IntMatrix> weights);

  int64_t count() const { return count_; }  // of a stack; else 1
  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  int64_t groups() const { return groups_; }
  int bits() const { return bits_; }
  bool has_zeros() const { return has_zeros_; }
  int64_t size_bytes() const { return data_.size_bytes(); }
  const void* data() const { return data_.data(); }

 private:
  PackedIntWeight(int64_t count, int64_t n, int64_t k, int64_t groups, int bits, bool has_zeros, Buffer data)
      : count_(count), n_(n), k_(k), groups_(groups), bits_(bits), has_zeros_(has_zeros), data_(std::move(data)) {}

  int64_t count_ = 1, n_ = 0, k_ = 0, groups_ = 1;
  int bits_ = 8;
  bool has_zeros_ = false;
  Buffer data_;
};

struct IntMatmulOptions {
  ConstTensor x_scales = {};  // [m] f32: x is i8 and stands for x * x_scales, as dynamic_quant makes it. Absent: 1
  // [n]: f32, bf16 or f16, added to the scaled sums; or, with x i8 and one group, i32, added to the sums.
  ConstTensor bias = {};
  // As in MatmulOptions, of an out that is not i32.
  Activation activation = Activation::none;
  ConstTensor residual = {};
  Tensor out_scales = {};
};

// matmul with an int8 or int4 weight. With S[i, j, g] = sum over t in group g of x[i, t] * (q[j, t] - zero[j, g]):
//   x      out    y[i, j]
//   i8     i32    S[i, j, 0] (+ i32 bias[j]): one group; scales are not used
//   i8     float  (sum_g S[i, j, g] * scale[j, g]) * x_scales[i] (+ bias[j]); an i32 bias, with one group, joins S
//   float  float  sum_t x[i, t] * value[j, t] (+ bias[j]), value as in IntMatrix: the weight alone is quantised
// out = residual + activation(y), for an out of i32 y itself. x [m, k] and out [m, n] (swiglu: [m, n / 2]), float: f32,
// bf16 or f16 (out_scales: i8); any strides; out must not overlap another tensor, but may be the residual.
// Numerics: each S is exact; a total with an i32 bias that leaves 32 bits wraps modulo 2^32, as that of
// torch._int_mm(x, q) + bias does. With x i8 and float out each S is rounded to f32 and joins one chain of
// multiply-adds over ascending groups (one group: a single product), then x_scales and bias follow, each rounded to
// f32, activation and residual likewise, and out is rounded once. With float x each value is rounded to f32, and each
// sum is one chain of multiply-adds over ascending t. A row's bits depend neither on the other rows nor on the threads.
// Errors: invalid_argument for ranks, dtypes or sizes that disagree; out_of_memory.
Status matmul(Context& context, const ConstTensor& x, const PackedIntWeight& weight, const Tensor& out,
              const IntMatmulOptions& options = {});

// Which kernel multiplies.
enum class MatmulPath : uint8_t {
  few_rows,                     // weights are decoded in registers, once per few rows of x
  many_rows,                    // weights are decoded to scratch, once per task
  many_rows_in_place,           // an unpacked weight that lies [k, n]: its columns are copied to scratch, once per task
  activations_fixed,            // x in fixed point meets the integers of a quantised weight; one or two rows
  activations_int8_few_rows,    // x rounded to int8 (ActivationType::int8) meets them
  activations_int8_many_rows,   // likewise, with the weight's integers unpacked to scratch once per task
  weights_int_few_rows,         // x of i8 times an int8 or int4 weight
  weights_int_many_rows,        // likewise, int4 unpacked to scratch once per task
  weights_int_floats_few_rows,  // x of floats times an int8 or int4 weight, decoded as in few_rows
  weights_int_floats_many_rows,  // likewise, decoded as in many_rows
  f64,                           // plain loops
};
const char* to_string(MatmulPath path);

// Which instruction multiplies: f32 FMA, pairwise bf16 dot, dot of four bytes, f64.
enum class MatmulProduct : uint8_t { f32, bf16_dot, int8_dot, f64 };
const char* to_string(MatmulProduct product);

// How a weight is given: a PackedWeight, a tensor that may change from call to call, or a PackedIntWeight.
enum class MatmulWeight : uint8_t { packed, unpacked, integers };

// What a plan depends on.
struct MatmulProblem {
  int64_t m = 0, n = 0, k = 0;  // x [m, k], weight [n, k]
  DType x_dtype = DType::f32;   // f64: the weight too
  bool unit_stride_x = true;    // the elements of a row of x are next to each other
  bool gathers_rows = false;    // rows of x lie anywhere (moe_layer.h): never read in place
  MatmulWeight weight = MatmulWeight::packed;
  QuantFormat format = QuantFormat::f32;  // of a packed weight, or f32, bf16 or f16 of an unpacked one
  bool unit_stride_outputs = false;  // an unpacked weight lies [k, n]: the weights of an input are next to each other
  int bits = 8;                      // of integers: 8 or 4
  int64_t groups = 1;                // likewise
  Activation activation = Activation::none;
  ActivationType activations = ActivationType::exact;
  bool batch_invariant = false;
  // Which optional tensors are there.
  bool has_bias = false, has_x_scales = false, has_out_scales = false;
};

// The problem that such a call of matmul poses, by the checks of the call itself; or why the call would be refused.
Result<MatmulProblem> matmul_problem(const ConstTensor& x, const PackedWeight& weight, const Tensor& out,
                                     const MatmulOptions& options = {});
Result<MatmulProblem> matmul_problem(const ConstTensor& x, const ConstTensor& weight, const Tensor& out,
                                     const MatmulOptions& options = {});
Result<MatmulProblem> matmul_problem(const ConstTensor& x, const PackedIntWeight& weight, const Tensor& out,
                                     const IntMatmulOptions& options = {});

struct MatmulPlan {
  MatmulPath path = MatmulPath::few_rows;
  MatmulProduct product = MatmulProduct::f32;
  int64_t rows_per_task = 0, columns_per_task = 0;  // of out
  int64_t row_tasks = 0, column_tasks = 0;
  int64_t k_block = 0;               // inputs (of bf16_dot: pairs) decoded at once; all, where that is in registers
  int64_t scratch_bytes_shared = 0;  // an unpacked weight's packed form, packed x, out before it is quantised
  int64_t scratch_bytes_per_worker = 0;
  const char* reason = "";  // why this path

  int64_t num_tasks() const;
  int64_t scratch_bytes(int num_threads) const;
};

// A pure function. The number of threads decides only how products of few rows cut the outputs into tasks, and whether
// tasks of rows that are quantised have whole rows; no bit of a result depends on it. Rows that fixed point cannot hold
// are multiplied by few_rows nevertheless: a plan does not know the values of x. For any numbers: a problem that no call
// may pose (a size that is negative or beyond 2^56, k that is not whole blocks, an unknown enumerator) has a plan of no
// tasks and no memory whose reason says so. Counts of tasks and bytes beyond 2^56 are 2^56.
MatmulPlan plan_matmul(const MatmulProblem& problem, const Machine& machine, int num_threads = 1);
std::string to_string(const MatmulPlan& plan);

}  // namespace opst

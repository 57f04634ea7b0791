// Matrix product of activations with a weight that was packed once.
//
//   Result<PackedWeight> weight = PackedWeight::pack(context, QuantMatrix{QuantFormat::q4_1, n, k, bytes, num_bytes});
//   Status status = matmul(context, x, weight.value(), out);      // out = x . weight^T
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "opst/context.h"
#include "opst/quant.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst {

// A weight [n, k] (n outputs, k inputs) repacked for the multiply kernels; owns its memory. Quantised weights stay
// quantised: a packed weight takes the bytes of its source, n rounded up to a multiple of 16.
//
// The packed form is the same at every instruction set level, so a weight may be used with any Context.
class PackedWeight {
 public:
  PackedWeight() = default;

  // weight [n, k] f32, bf16 or f16, any strides (a [k, n] matrix is its transposed view). bf16 is kept as f32.
  // Errors: invalid_argument for another rank or dtype; out_of_memory.
  static Result<PackedWeight> pack(Context& context, const ConstTensor& weight);

  // The rows of a quantised matrix. Errors: those of dequantize; out_of_memory.
  static Result<PackedWeight> pack(Context& context, const QuantMatrix& weight);

  QuantFormat format() const { return format_; }
  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  int64_t size_bytes() const { return data_.size_bytes(); }
  const void* data() const { return data_.data(); }

 private:
  PackedWeight(QuantFormat format, int64_t n, int64_t k, Buffer data)
      : format_(format), n_(n), k_(k), data_(std::move(data)) {}

  QuantFormat format_ = QuantFormat::f32;
  int64_t n_ = 0;
  int64_t k_ = 0;
  Buffer data_;
};

struct MatmulOptions {
  std::optional<ConstTensor> bias;  // [n] f32, added last; any stride
};

// out[i, j] = sum_t x[i, t] * weight[j, t] (+ bias[j])
//   x       [m, k] f32, any strides; m = 0 is legal, and k = 0 gives the bias or 0
//   weight  [n, k]
//   out     [m, n] f32, any strides; must not overlap x or bias
// Numerics: every weight is exactly its dequantised f32 value; each sum runs over t in ascending order in f32, one
// fused multiply-add per term (generic level: two roundings). So a row's bits depend neither on the number of rows, nor
// on the number of threads. NaN and Inf of a row of x reach that row of out only. Errors: invalid_argument for ranks,
// dtypes or sizes that disagree; out_of_memory.
Status matmul(Context& context, const ConstTensor& x, const PackedWeight& weight, const Tensor& out,
              const MatmulOptions& options = {});

// out[i, t] = weight[rows[i], t]: embedding lookup in a weight that is also multiplied with (tied embeddings).
//   rows  [count] i64, each in [0, n); any stride
//   out   [count, k] f32, any strides
// Errors: an index out of range is refused before anything is written.
Status lookup_rows(Context& context, const PackedWeight& weight, const ConstTensor& rows, const Tensor& out);

}  // namespace opst

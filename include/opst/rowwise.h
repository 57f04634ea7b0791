// Operators that work a row at a time: normalisation, softmax, rotary positions, the gate of a feed-forward layer, the
// residual sum; and their gradients.
//
// Everywhere: tensors f32, bf16 or f16 with any strides; arithmetic in f32, one rounding when a result is stored. An
// output may be the very same view as an input of its shape and dtype (in place); any other overlap is refused. Rows
// are independent: NaN and Inf reach their own row only, and the bits depend neither on the other rows nor on the
// number of threads. Zero sizes are legal. A tensor whose default is {} is optional: absent where it has no data.
// Errors: invalid_argument, naming operator, tensor, dimension and both values; nothing has been written then. Threads:
// several may call these operators on one Context at once, as long as no call writes memory that another one uses.
//
// Gradients. X_backward takes grad_out, the gradient of a loss with respect to out of X, and gives the gradients with
// respect to the inputs of X; it computes means, roots and exponentials of X again. Gradients of a weight sum over all
// rows: in f32, in an order that depends on the sizes alone. The gradient of add is grad_out, for a and for b; the
// gradient of rope is rope with `inverse`.
#pragma once

#include <cstdint>

#include "opst/context.h"
#include "opst/rope_style.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst {

// out[.., i] = x[.., i] * rstd[..] * weight[i],  rstd[..] = 1 / sqrt(mean_j x[.., j]^2 + eps)
//   x, out  [.., features], rank 1 to 5, the same dtype
//   weight  [features], f32 or the dtype of x
// eps >= 0 lies inside the root.
// Range: squares are summed in f32. A row whose sum of squares is above 3.4e38 (elements from about 1.8e19 on, which
// f16 has not) has rstd = 0 and gives zeros, and zeros as gradients, as torch's rms_norm does; where in the backward
// pass products of grad_out, weight and x overflow as well, grad_x is NaN.
struct RmsNormOptions {
  double eps = 1e-5;
  Tensor rstd = {};  // f32 [..]: written as well
};
Status rms_norm(Context& context, const ConstTensor& x, const ConstTensor& weight, const Tensor& out,
                const RmsNormOptions& options = {});

// sum = a + b, rounded to its dtype;  out = rms_norm(sum)
//   a, b, out, sum  [.., features], the same dtype. `sum` may be a or b, and out the other one or neither.
Status add_rms_norm(Context& context, const ConstTensor& a, const ConstTensor& b, const ConstTensor& weight,
                    const Tensor& out, const Tensor& sum, const RmsNormOptions& options = {});

// Gradients without data are not computed.
struct NormGradients {
  Tensor x = {};       // as x
  Tensor weight = {};  // [features], f32 or the dtype of x
  Tensor bias = {};    // likewise; layer_norm only
};

//   grad_out, x  [.., features], the same dtype
struct RmsNormBackwardOptions {
  double eps = 1e-5;
  // As x, added to the gradient of x. With x = sum and grad_sum = the gradient of sum, the result is the gradient of
  // a and of b of add_rms_norm.
  ConstTensor grad_sum = {};
};
Status rms_norm_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& x, const ConstTensor& weight,
                         const NormGradients& gradients, const RmsNormBackwardOptions& options = {});

// out[.., i] = (x[.., i] - mean[..]) * rstd[..] * weight[i] + bias[i]
//   mean[..] = mean_j x[.., j],  rstd[..] = 1 / sqrt(mean_j (x[.., j] - mean[..])^2 + eps)
//   x, out        [.., features], rank 1 to 5, the same dtype
//   weight, bias  [features], f32 or the dtype of x; absent: 1 and 0
// Range: a row whose sum of squared differences is above 3.4e38 has rstd = 0 and gives its bias, with gradients of x
// and weight that are 0 (torch's layer_norm gives NaN); one whose sum is above it gives NaN.
struct LayerNormOptions {
  double eps = 1e-5;
  ConstTensor weight = {};
  ConstTensor bias = {};  // of the dtype of weight, where both are there
  Tensor mean = {};       // f32 [..]: written as well
  Tensor rstd = {};
};
Status layer_norm(Context& context, const ConstTensor& x, const Tensor& out, const LayerNormOptions& options = {});

//   grad_out, x  [.., features], the same dtype
// Of the options, only eps and weight are read.
Status layer_norm_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& x,
                           const NormGradients& gradients, const LayerNormOptions& options = {});

// out[.., i] = exp(scale * x[.., i] - max) / sum_j exp(scale * x[.., j] - max),  max = max_j scale * x[.., j]
//   x, out  [.., features], rank 1 to 5, the same dtype
// A row whose elements are all -inf gives zeros; a row with +inf (before or after the scale) gives NaN.
struct SoftmaxOptions {
  float scale = 1;  // finite
};
Status softmax(Context& context, const ConstTensor& x, const Tensor& out, const SoftmaxOptions& options = {});

// grad_x[.., i] = scale * out[.., i] * (grad_out[.., i] - sum_j grad_out[.., j] * out[.., j])
//   grad_out, out, grad_x  [.., features], the same dtype; out is the result of softmax
// A row of zeros in out gives zeros.
Status softmax_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& out, const Tensor& grad_x,
                        const SoftmaxOptions& options = {});

// Positions in three axes (time, height, width): pair i of a head turns by the position of one axis. All zero: there
// is one axis.
//   temporal + height + width = half, the number of pairs
//   in turn      pairs 0 .. temporal - 1 by the first axis, the next `height` by the second, the others by the third
//   interleaved  pairs 1, 4, 7 .. 3 * height - 2 by the second, 2, 5, 8 .. 3 * width - 1 by the third, others by the
//                first; all of them must exist
struct RopeSections {
  int64_t temporal = 0, height = 0, width = 0;
  bool interleaved = false;
};

// The angles of rotary positions, once for all layers of a token:
//   cos[t, i] = cos(positions[t] * theta^(-i / half)), sin likewise;  computed in f64, rounded to f32
//   positions  [tokens] i64, any value; with sections [3, tokens]
//   cos, sin   [tokens, half] f32, half = half of the rotated dimensions
// theta > 0, finite.
struct RopeTableOptions {
  double theta = 10000.0;
  RopeSections sections = {};
};
Status rope_table(Context& context, const ConstTensor& positions, const Tensor& cos, const Tensor& sin,
                  const RopeTableOptions& options = {});

// (a, b) -> (a cos - b sin, a sin + b cos) for the first 2 * half elements of every head; the others are copied.
//   x, out    [tokens, num_heads, head_dim], the same dtype
//   cos, sin  [tokens, half] f32 (from rope_table or elsewhere), 2 * half <= head_dim
struct RopeOptions {
  RopeStyle style = RopeStyle::halves;
  bool inverse = false;  // by the negative angle: turns back, and turns the gradient of out into that of x
};
Status rope(Context& context, const ConstTensor& x, const ConstTensor& cos, const ConstTensor& sin, const Tensor& out,
            const RopeOptions& options = {});

// rope with the angles of all positions in a cache, from which each token takes the row of its position:
//   positions             [tokens] i64, each in [0, max_positions); with sections [3, tokens]
//   cos_cache, sin_cache  [max_positions, half] f32, or the dtype of x
// A position out of range is refused before anything is written.
struct RopeCachedOptions {
  RopeStyle style = RopeStyle::halves;
  bool inverse = false;
  RopeSections sections = {};
};
Status rope_cached(Context& context, const ConstTensor& x, const ConstTensor& positions, const ConstTensor& cos_cache,
                   const ConstTensor& sin_cache, const Tensor& out, const RopeCachedOptions& options = {});

// out = silu(gate) * up, silu(x) = x / (1 + exp(-x))
//   gate, up, out  the same shape (rank 1 to 5) and dtype
Status swiglu(Context& context, const ConstTensor& gate, const ConstTensor& up, const Tensor& out);

// swiglu of gate and up in one tensor: gate_up [.., 2n], out [.., n]. The gate is the first half, or with `swapped`
// the second. `out` may be exactly one of the halves.
struct SwigluOptions {
  bool swapped = false;
};
Status swiglu(Context& context, const ConstTensor& gate_up, const Tensor& out, const SwigluOptions& options = {});

// grad_up = grad_out * silu(gate);  grad_gate = grad_out * up * s * (1 + gate * (1 - s)), s = 1 / (1 + exp(-gate))
//   all the same shape and dtype. Each gradient may be one of the inputs, not both the same one.
Status swiglu_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& gate, const ConstTensor& up,
                       const Tensor& grad_gate, const Tensor& grad_up);
//   gate_up, grad_gate_up [.., 2n], grad_out [.., n]
Status swiglu_backward(Context& context, const ConstTensor& grad_out, const ConstTensor& gate_up,
                       const Tensor& grad_gate_up, const SwigluOptions& options = {});

// out = a + b
//   a, b, out  the same shape (rank 1 to 5) and dtype
Status add(Context& context, const ConstTensor& a, const ConstTensor& b, const Tensor& out);

}  // namespace opst

// What works a row at a time: normalisation, rotary positions, the gate of a feed-forward block, the residual sum.
//
// Everywhere: tensors f32, bf16 or f16 with any strides; arithmetic in f32, one rounding when a result is stored. `out`
// may be the very same view as an input of its shape (in place); any other overlap is refused. Rows are independent:
// NaN and Inf reach their own row only, and the bits depend neither on the other rows nor on the number of threads.
// Errors: invalid_argument, naming operator, tensor, dimension and both values; nothing has been written then.
#pragma once

#include <cstdint>

#include "opst/context.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst {

// out[.., i] = x[.., i] / sqrt(mean_j x[.., j]^2 + eps) * weight[i]
//   x, out  [.., features], rank 1 to 5, the same dtype
//   weight  [features], f32 or the dtype of x
// eps >= 0 lies inside the root. Zero features are legal.
struct RmsNormOptions {
  double eps = 1e-5;
};
Status rms_norm(Context& context, const ConstTensor& x, const ConstTensor& weight, const Tensor& out,
                const RmsNormOptions& options = {});

// The angles of rotary positions, once for all layers of a step:
//   cos[t, i] = cos(positions[t] * theta^(-i / half)), sin likewise, 0 <= i < half = half the rotated dimensions,
// computed in f64 and rounded to f32.
//   positions  [tokens] i64, any value
//   cos, sin   [tokens, half] f32
// theta > 0.
struct RopeTableOptions {
  double theta = 10000.0;
};
Status rope_table(Context& context, const ConstTensor& positions, const Tensor& cos, const Tensor& sin,
                  const RopeTableOptions& options = {});

// Which two elements of a head turn together.
enum class RopeStyle : uint8_t {
  pairs,   // 2i and 2i + 1 (GGUF's llama files)
  halves,  // i and i + half (GPT-NeoX, Hugging Face)
};
const char* to_string(RopeStyle style);

// (a, b) -> (a cos - b sin, a sin + b cos) for the first 2 * half elements of every head; the others are copied.
//   x, out    [tokens, num_heads, head_dim], the same dtype
//   cos, sin  [tokens, half] f32 (of rope_table, or any others), 2 * half <= head_dim
struct RopeOptions {
  RopeStyle style = RopeStyle::halves;
};
Status rope(Context& context, const ConstTensor& x, const ConstTensor& cos, const ConstTensor& sin, const Tensor& out,
            const RopeOptions& options = {});

// out = silu(gate) * up, silu(x) = x / (1 + exp(-x))
//   gate, up, out  the same shape (rank 1 to 5) and dtype
Status swiglu(Context& context, const ConstTensor& gate, const ConstTensor& up, const Tensor& out);

// The same for gate and up in one tensor: gate_up [.., 2n], out [.., n]. The gate is the first half, or with `swapped`
// the second. `out` may be exactly one of the halves.
struct SwigluOptions {
  bool swapped = false;
};
Status swiglu(Context& context, const ConstTensor& gate_up, const Tensor& out, const SwigluOptions& options = {});

// out = a + b
//   a, b, out  the same shape (rank 1 to 5) and dtype
Status add(Context& context, const ConstTensor& a, const ConstTensor& b, const Tensor& out);

}  // namespace opst

// The kernel table of the rowwise room, one per instruction set level. Every entry works on one row (rope: on the heads
// of one token) whose elements are `stride` apart; an output may be the very memory of an input of its shape.
#pragma once

#include <cstdint>

namespace opst::rowwise {

// data = nullptr: absent, where that is legal.
struct ConstRow {
  const void* data = nullptr;
  int64_t stride = 0;  // between elements, in elements
};
struct Row {
  void* data = nullptr;
  int64_t stride = 0;
};

struct Moments {
  float mean, rstd;
};
// out = (x - mean) rstd weight + bias: gives mean and rstd. features >= 1. RMSNorm has no mean and no bias, LayerNorm
// may have neither weight nor bias.
using Norm = Moments (*)(ConstRow x, ConstRow weight, ConstRow bias, Row out, int64_t features, double eps);

struct NormBackwardRow {
  ConstRow grad_out, x, weight;
  ConstRow grad_sum;   // added to grad_x; may be absent
  Row grad_x;          // may be absent
  float* grad_weight;  // [features], added to; may be null
  float* grad_bias;    // likewise
  int64_t features;
  double eps;
};
using NormBackward = void (*)(const NormBackwardRow& row);

using Softmax = void (*)(ConstRow x, Row out, int64_t n, float scale);
using SoftmaxBackward = void (*)(ConstRow grad_out, ConstRow y, Row grad_x, int64_t n, float scale);

// Swiglu: out = silu(a) * b. Add: out = a + b.
using Binary = void (*)(ConstRow a, ConstRow b, Row out, int64_t n);
using SwigluBackward = void (*)(ConstRow grad_out, ConstRow gate, ConstRow up, Row grad_gate, Row grad_up, int64_t n);

struct RopeToken {
  ConstRow x;
  Row out;
  int64_t num_heads, x_head_stride, out_head_stride;
  int64_t head_dim, half;  // 2 * half <= head_dim
  ConstRow cos, sin;       // f32 [half]
  bool pairs;              // else halves
  bool inverse;
};
using Rope = void (*)(const RopeToken& token);

// For one storage type of x and out. The index: whether weight and bias are f32, else of the type of x.
struct TypeKernels {
  Norm rms_norm[2];
  NormBackward rms_norm_backward[2];
  Norm layer_norm[2];
  NormBackward layer_norm_backward[2];
  Softmax softmax;
  SoftmaxBackward softmax_backward;
  Rope rope;
  Binary swiglu;
  SwigluBackward swiglu_backward;
  Binary add;
};
struct Kernels {
  TypeKernels of[3];  // f32, bf16, f16
};

}  // namespace opst::rowwise

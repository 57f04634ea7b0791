// The kernel table of the rowwise room, one per instruction set level. Every entry works on one row (rope: on the heads
// of one token) whose elements are `stride` apart; an output may be the very memory of an input of its shape.
#pragma once

#include <cstdint>

namespace opst {
namespace rowwise {

struct ConstRow {
  const void* data;
  int64_t stride;  // between elements, in elements
};
struct Row {
  void* data;
  int64_t stride;
};

using RmsNorm = void (*)(ConstRow x, ConstRow weight, Row out, int64_t features, double eps);
// Swiglu: out = silu(a) * b. Add: out = a + b.
using Binary = void (*)(ConstRow a, ConstRow b, Row out, int64_t n);

struct RopeToken {
  ConstRow x;
  Row out;
  int64_t num_heads, x_head_stride, out_head_stride;
  int64_t head_dim, half;  // 2 * half <= head_dim
  ConstRow cos, sin;       // f32 [half]
  bool pairs;              // else halves
};
using Rope = void (*)(const RopeToken& token);

// Indexed by the storage type of x and out: f32, bf16, f16.
inline constexpr int kNumTypes = 3;
struct Kernels {
  RmsNorm rms_norm[kNumTypes];             // weight of the same type
  RmsNorm rms_norm_f32_weight[kNumTypes];  // weight f32
  Rope rope[kNumTypes];
  Binary swiglu[kNumTypes];
  Binary add[kNumTypes];
};

}  // namespace rowwise

namespace generic::rowwise {
extern const opst::rowwise::Kernels kKernels;
}
namespace avx2::rowwise {
extern const opst::rowwise::Kernels kKernels;
}
namespace avx512::rowwise {
extern const opst::rowwise::Kernels kKernels;
}

}  // namespace opst

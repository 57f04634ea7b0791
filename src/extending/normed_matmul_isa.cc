// Computes   normed[t] = x[t] / sqrt(mean_t x[t]^2 + eps) * gain[t]
// Shapes     one row: x [k], gain [k], elements any distance apart; normed [k]
// Loop nest  twice over k, a vector at a time: the squares, then the products
// Memory     x comes from memory once, the second time from L1; normed stays in L2 for the product
// Numerics   f32; a sum of squares per lane, k ascending, then the sum of the lanes
#include "extending/normed_matmul_kernels.h"
#include "simd/vec.h"
#include "tile/pack.h"

namespace opst::OPST_ISA_NS::extending {

using simd::F32;
using tile::load_row;

void normalise(const float* x, int64_t x_stride, const float* gain, int64_t gain_stride, int64_t k, float eps,
               float* normed) {
  constexpr int64_t kLanes = F32::kLanes;
  F32 squares = F32::zero();
  for (int64_t t = 0; t < k; t += kLanes) {
    const F32 v = load_row<F32>(x, x_stride, t, k);
    squares = fma(v, v, squares);
  }
  const F32 mean = F32::set1(simd::hsum(squares) / static_cast<float>(k));
  const F32 r = F32::set1(1) / sqrt(mean + F32::set1(eps));
  for (int64_t t = 0; t < k; t += kLanes) {
    const F32 v = load_row<F32>(x, x_stride, t, k) * r * load_row<F32>(gain, gain_stride, t, k);
    k - t < kLanes ? v.store_n(normed + t, k - t) : v.store(normed + t);
  }
}

extern const opst::extending::Kernels kKernels;
constinit const opst::extending::Kernels kKernels = {normalise};

}  // namespace opst::OPST_ISA_NS::extending

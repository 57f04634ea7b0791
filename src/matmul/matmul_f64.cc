// Products of f64: plain loops, for gradient checks. Sums in ascending order of k, as everywhere in the room.
#include <algorithm>
#include <cmath>

#include "core/int_math.h"
#include "machine/context_impl.h"
#include "matmul/call.h"
#include "matmul/plan.h"

namespace opst::gemm {
namespace {

double element(const ConstTensor& t, int64_t i, int64_t j) {
  return static_cast<const double*>(t.data)[i * t.strides[0] + j * t.strides[1]];
}

double silu(double y) { return y / (1 + std::exp(-y)); }

// `second`: of swiglu.
double activated(Activation activation, double y, double second) {
  switch (activation) {
    case Activation::none:
      return y;
    case Activation::silu:
      return silu(y);
    case Activation::gelu_erf:
      return y * (1 + std::erf(y / std::sqrt(2.0))) / 2;
    case Activation::gelu_tanh:
      return y * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (y + 0.044715 * y * y * y))) / 2;
    case Activation::swiglu:
      return silu(y) * second;
    case Activation::swiglu_swapped:
      return y * silu(second);
  }
  return y;
}

}  // namespace

void multiply_f64(Context& context, Activation activation, const Operands& o) {
  const int64_t m = o.out.shape[0], width = o.out.shape[1], k = o.weight.shape[1];
  const bool halves = takes_two_halves(activation);
  const auto y = [&](int64_t i, int64_t j) {
    double sum = 0;
    for (int64_t t = 0; t < k; ++t) sum += element(o.x, i, t) * element(o.weight, j, t);
    return o.bias ? sum + static_cast<const double*>(o.bias->data)[j * o.bias->strides[0]] : sum;
  };
  context.impl().pool.parallel_for(m, [&](int64_t i, int) {
    for (int64_t j = 0; j < width; ++j) {
      double value = activated(activation, y(i, j), halves ? y(i, width + j) : 0);
      if (o.residual) value += element(*o.residual, i, j);
      static_cast<double*>(o.out.data)[i * o.out.strides[0] + j * o.out.strides[1]] = value;
    }
  });
}

}  // namespace opst::gemm

// out = residual + activation(x . weight^T + bias) in plain double loops.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "opst/matmul.h"

namespace opst::reference {

// y[i, j] = sum_t x[i, t] * weight[j, t] + bias[j]. All row-major: x [m, k], weight [n, k], bias [n] or empty.
inline std::vector<double> matmul(const std::vector<double>& x, const std::vector<double>& weight,
                                  const std::vector<double>& bias, int64_t m, int64_t n, int64_t k) {
  std::vector<double> out(static_cast<size_t>(m * n));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = bias.empty() ? 0 : bias[static_cast<size_t>(j)];
      for (int64_t t = 0; t < k; ++t) {
        sum += x[static_cast<size_t>(i * k + t)] * weight[static_cast<size_t>(j * k + t)];
      }
      out[static_cast<size_t>(i * n + j)] = sum;
    }
  }
  return out;
}

inline double silu(double y) { return y / (1 + std::exp(-y)); }

// The activation of y; `second` is the other half's element, of swiglu only.
inline double activated(Activation activation, double y, double second) {
  constexpr double kPi = 3.14159265358979323846;
  switch (activation) {
    case Activation::none:
      return y;
    case Activation::silu:
      return silu(y);
    case Activation::gelu_erf:
      return 0.5 * y * (1 + std::erf(y / std::sqrt(2.0)));
    case Activation::gelu_tanh:
      return 0.5 * y * (1 + std::tanh(std::sqrt(2 / kPi) * (y + 0.044715 * y * y * y)));
    case Activation::swiglu:
      return silu(y) * second;
    case Activation::swiglu_swapped:
      return y * silu(second);
  }
  return y;
}

}  // namespace opst::reference

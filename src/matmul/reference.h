// out[i, j] = sum_t x[i, t] * weight[j, t] + bias[j] in plain double loops.
#pragma once

#include <cstdint>
#include <vector>

namespace opst::reference {

// All row-major: x [m, k], weight [n, k], bias [n] or empty.
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

}  // namespace opst::reference

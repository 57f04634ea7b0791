// normed_matmul in plain double loops.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace opst::reference {

inline std::vector<double> normed_matmul(const std::vector<double>& x, const std::vector<double>& gain,
                                         const std::vector<double>& weight, int64_t m, int64_t n, int64_t k,
                                         double eps) {
  std::vector<double> out(static_cast<size_t>(m * n));
  for (int64_t i = 0; i < m; ++i) {
    double squares = 0;
    for (int64_t t = 0; t < k; ++t) squares += x[static_cast<size_t>(i * k + t)] * x[static_cast<size_t>(i * k + t)];
    const double root = std::sqrt(squares / static_cast<double>(k) + eps);
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t t = 0; t < k; ++t) {
        sum += x[static_cast<size_t>(i * k + t)] / root * gain[static_cast<size_t>(t)] *
               weight[static_cast<size_t>(j * k + t)];
      }
      out[static_cast<size_t>(i * n + j)] = sum;
    }
  }
  return out;
}

}  // namespace opst::reference

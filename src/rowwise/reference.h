// The operators' equations in plain double loops, on rows of doubles.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace opst::reference {

using Doubles = std::vector<double>;

inline Doubles rms_norm(const Doubles& x, const Doubles& weight, double eps) {
  double sum = 0;
  for (double v : x) sum += v * v;
  const double root = std::sqrt(sum / static_cast<double>(x.size()) + eps);
  Doubles out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = x[i] / root * weight[i];
  return out;
}

// One head. cos and sin of its token, half elements each.
inline Doubles rope(const Doubles& x, const Doubles& cos, const Doubles& sin, bool pairs) {
  Doubles out = x;
  const size_t half = cos.size();
  for (size_t i = 0; i < half; ++i) {
    const size_t a = pairs ? 2 * i : i;
    const size_t b = pairs ? 2 * i + 1 : i + half;
    out[a] = x[a] * cos[i] - x[b] * sin[i];
    out[b] = x[a] * sin[i] + x[b] * cos[i];
  }
  return out;
}

inline double silu(double x) { return x / (1 + std::exp(-x)); }

}  // namespace opst::reference

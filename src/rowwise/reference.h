// The operators' equations in plain double loops, on rows of doubles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace opst::reference {

using Doubles = std::vector<double>;

inline double mean(const Doubles& x) {
  double sum = 0;
  for (double v : x) sum += v;
  return sum / static_cast<double>(x.size());
}

inline Doubles product(const Doubles& a, const Doubles& b) {
  Doubles out(a.size());
  for (size_t i = 0; i < a.size(); ++i) out[i] = a[i] * b[i];
  return out;
}

inline double rms_rstd(const Doubles& x, double eps) { return 1 / std::sqrt(mean(product(x, x)) + eps); }

inline Doubles rms_norm(const Doubles& x, const Doubles& weight, double eps) {
  const double root = std::sqrt(mean(product(x, x)) + eps);
  Doubles out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = x[i] / root * weight[i];
  return out;
}

// Gradients of one row.
struct NormGradient {
  Doubles x, weight, bias;
};

// d/dx_i of sum_j g_j w_j x_j r(x) = r g_i w_i + dr/dx_i sum_j g_j w_j x_j,   dr/dx_i = -r^3 x_i / n
inline NormGradient rms_norm_backward(const Doubles& grad_out, const Doubles& x, const Doubles& weight, double eps) {
  const double r = rms_rstd(x, eps);
  const double along = mean(product(product(grad_out, weight), x)) * r * r * r;
  NormGradient out{Doubles(x.size()), Doubles(x.size()), {}};
  for (size_t i = 0; i < x.size(); ++i) {
    out.x[i] = r * grad_out[i] * weight[i] - along * x[i];
    out.weight[i] = grad_out[i] * x[i] * r;
  }
  return out;
}

inline Doubles centred(const Doubles& x) {
  const double m = mean(x);
  Doubles out = x;
  for (double& v : out) v -= m;
  return out;
}

inline Doubles layer_norm(const Doubles& x, const Doubles& weight, const Doubles& bias, double eps) {
  const Doubles d = centred(x);
  const double root = std::sqrt(mean(product(d, d)) + eps);
  Doubles out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = d[i] / root * weight[i] + bias[i];
  return out;
}

// The gradient of RMSNorm at the centred row, without its mean: centring is a linear map that subtracts the mean.
inline NormGradient layer_norm_backward(const Doubles& grad_out, const Doubles& x, const Doubles& weight, double eps) {
  NormGradient out = rms_norm_backward(grad_out, centred(x), weight, eps);
  out.x = centred(out.x);
  out.bias = grad_out;
  return out;
}

inline Doubles softmax(const Doubles& x, double scale) {
  double highest = -std::numeric_limits<double>::infinity();
  for (double v : x) highest = std::max(highest, scale * v);
  Doubles out(x.size(), 0.0);
  if (highest == -std::numeric_limits<double>::infinity()) return out;
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += out[i] = std::exp(scale * x[i] - highest);
  for (double& v : out) v /= sum;
  return out;
}

inline Doubles softmax_backward(const Doubles& grad_out, const Doubles& y, double scale) {
  double dot = 0;
  for (size_t i = 0; i < y.size(); ++i) dot += grad_out[i] * y[i];
  Doubles out(y.size());
  for (size_t i = 0; i < y.size(); ++i) out[i] = scale * y[i] * (grad_out[i] - dot);
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

inline double silu_derivative(double x) {
  const double s = 1 / (1 + std::exp(-x));
  return s + x * s * (1 - s);
}

}  // namespace opst::reference

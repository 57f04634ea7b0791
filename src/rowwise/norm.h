// Computes   rms_norm    r = 1 / sqrt(mean_j x[j]^2 + eps);   out[i] = x[i] r weight[i]
//            backward    grad_x[i]       = r (g[i] weight[i] - x[i] r^2 mean_j g[j] weight[j] x[j]) + grad_sum[i]
//                        grad_weight[i] += g[i] x[i] r;   g = grad_out
//            layer_norm  m = mean_j x[j];   r = 1 / sqrt(mean_j (x[j] - m)^2 + eps);   h[i] = (x[i] - m) r
//                        out[i] = h[i] weight[i] + bias[i]
//            backward    grad_x[i]       = r (u[i] - mean_j u[j] - h[i] mean_j u[j] h[j]) + grad_sum[i];   u = g weight
//                        grad_weight[i] += g[i] h[i];   grad_bias[i] += g[i]
// Shapes     x, weight, bias, out and all gradients [features]
// Loop nest  passes over the row: the sums, four vectors each (layer_norm: the mean, then the variance); backward: the
//            sums of the gradient; then the products
// Memory     a row is read from memory once, then from L1 (beyond 10,000 features: L2)
// Numerics   f32; the four vectors are summed at the end in a fixed order; (x * r) * weight; the variance from the
//            differences to the mean, so that a large mean costs no digits
#pragma once

#include "rowwise/row_verbs.h"

namespace opst::OPST_ISA_NS::rowwise {

// 1 / sqrt(mean + eps), the mean of squares.
OPST_INLINE F32 reciprocal_root(float sum_of_squares, int64_t features, double eps) {
  const F32 mean = F32::set1(sum_of_squares / static_cast<float>(features));
  return F32::set1(1) / sqrt(mean + F32::set1(static_cast<float>(eps)));
}

template <class T>
OPST_INLINE F32 reciprocal_root_mean_square(ConstRow x, int64_t features, double eps) {
  const float squares = sum(features, [&](F32 acc, int64_t i) OPST_INLINE_LAMBDA {
    const F32 v = load<T>(x, i, features);
    return fma(v, v, acc);
  });
  return reciprocal_root(squares, features, eps);
}

template <class T, class W>
Moments rms_norm(ConstRow x, ConstRow weight, ConstRow, Row out, int64_t features, double eps) {
  const F32 r = reciprocal_root_mean_square<T>(x, features, eps);
  for (int64_t i = 0; i < features; i += F32::kLanes) {
    store<T>(load<T>(x, i, features) * r * load<W>(weight, i, features), out, i, features);
  }
  return {0, r.v[0]};
}

// to[begin ..] += x, below `length`.
OPST_INLINE void accumulate(F32 x, float* to, int64_t begin, int64_t length) {
  store<float>(load<float>({to, 1}, begin, length) + x, {to, 1}, begin, length);
}

template <class T, class W>
void rms_norm_backward(const NormBackwardRow& row) {
  const int64_t n = row.features;
  const F32 r = reciprocal_root_mean_square<T>(row.x, n, row.eps);
  F32 along = F32::zero();  // r^2 mean g weight x
  if (row.grad_x.data != nullptr) {
    const float dot = sum(n, [&](F32 acc, int64_t i) OPST_INLINE_LAMBDA {
      return fma(load<T>(row.grad_out, i, n) * load<W>(row.weight, i, n), load<T>(row.x, i, n), acc);
    });
    along = F32::set1(dot / static_cast<float>(n)) * r * r;
  }
  for (int64_t i = 0; i < n; i += F32::kLanes) {
    const F32 g = load<T>(row.grad_out, i, n), x = load<T>(row.x, i, n);
    if (row.grad_weight != nullptr) accumulate(g * (x * r), row.grad_weight, i, n);
    if (row.grad_x.data == nullptr) continue;
    F32 grad = r * (g * load<W>(row.weight, i, n) - x * along);
    if (row.grad_sum.data != nullptr) grad = grad + load<T>(row.grad_sum, i, n);
    store<T>(grad, row.grad_x, i, n);
  }
}

struct Centre {
  F32 mean, rstd;
};

template <class T>
OPST_INLINE Centre centre(ConstRow x, int64_t features, double eps) {
  const float total =
      sum(features, [&](F32 acc, int64_t i) OPST_INLINE_LAMBDA { return acc + load<T>(x, i, features); });
  const F32 mean = F32::set1(total / static_cast<float>(features));
  const float squares = sum(features, [&](F32 acc, int64_t i) OPST_INLINE_LAMBDA {
    const F32 d = within(load<T>(x, i, features) - mean, i, features, F32::zero());
    return fma(d, d, acc);
  });
  return {mean, reciprocal_root(squares, features, eps)};
}

// 1 where there is no weight.
template <class W>
OPST_INLINE F32 load_weight(ConstRow weight, int64_t begin, int64_t length) {
  return weight.data != nullptr ? load<W>(weight, begin, length) : F32::set1(1);
}

template <class T, class W>
Moments layer_norm(ConstRow x, ConstRow weight, ConstRow bias, Row out, int64_t features, double eps) {
  const Centre c = centre<T>(x, features, eps);
  for (int64_t i = 0; i < features; i += F32::kLanes) {
    F32 y = (load<T>(x, i, features) - c.mean) * c.rstd;
    if (weight.data != nullptr) y = y * load<W>(weight, i, features);
    if (bias.data != nullptr) y = y + load<W>(bias, i, features);
    store<T>(y, out, i, features);
  }
  return {c.mean.v[0], c.rstd.v[0]};
}

template <class T, class W>
void layer_norm_backward(const NormBackwardRow& row) {
  const int64_t n = row.features;
  const Centre c = centre<T>(row.x, n, row.eps);
  const auto hat = [&](int64_t i) OPST_INLINE_LAMBDA { return (load<T>(row.x, i, n) - c.mean) * c.rstd; };
  F32 mean_u = F32::zero(), mean_uh = F32::zero();
  if (row.grad_x.data != nullptr) {
    // Elements beyond the row have g = 0.
    const auto u = [&](int64_t i)
                       OPST_INLINE_LAMBDA { return load<T>(row.grad_out, i, n) * load_weight<W>(row.weight, i, n); };
    const float sum_u = sum(n, [&](F32 acc, int64_t i) OPST_INLINE_LAMBDA { return acc + u(i); });
    const float sum_uh = sum(n, [&](F32 acc, int64_t i) OPST_INLINE_LAMBDA { return fma(u(i), hat(i), acc); });
    mean_u = F32::set1(sum_u / static_cast<float>(n));
    mean_uh = F32::set1(sum_uh / static_cast<float>(n));
  }
  for (int64_t i = 0; i < n; i += F32::kLanes) {
    const F32 g = load<T>(row.grad_out, i, n), h = hat(i);
    if (row.grad_weight != nullptr) accumulate(g * h, row.grad_weight, i, n);
    if (row.grad_bias != nullptr) accumulate(g, row.grad_bias, i, n);
    if (row.grad_x.data == nullptr) continue;
    F32 grad = c.rstd * (g * load_weight<W>(row.weight, i, n) - mean_u - h * mean_uh);
    if (row.grad_sum.data != nullptr) grad = grad + load<T>(row.grad_sum, i, n);
    store<T>(grad, row.grad_x, i, n);
  }
}

}  // namespace opst::OPST_ISA_NS::rowwise

// Attention backward in plain loops over (query, key) pairs: what the kernels are measured against. Shares nothing with
// them. For tests, benchmarks and tools.
//
//   reference_gradients   the equations in double (long double for f64 inputs), forward included: nothing that an
//                         implementation saved is used
//   naive_gradients       the same in f32 (double for f64), the result of each step rounded to `storage`
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention/reference.h"
#include "opst/attention_backward.h"

namespace opst::attention {

struct ReferenceGradients {
  std::vector<double> query;  // [batch, num_heads, query_len, head_dim]
  std::vector<double> key;    // [batch, num_kv_heads, kv_len, head_dim]
  std::vector<double> value;  // [batch, num_kv_heads, kv_len, value_head_dim]
};

namespace reference {

template <class Real>
ReferenceGradients gradients(const AttentionInputs& in, const ConstTensor& grad_out, const ConstTensor& grad_lse,
                             const AttentionOptions& options, DType storage) {
  const int64_t batch = in.query.shape[0], heads = in.query.shape[1], query_len = in.query.shape[2];
  const int64_t kv_heads = in.key.shape[1], kv_len = in.key.shape[2];
  const int64_t head_dim = in.query.shape[3], value_head_dim = in.value.shape[3];
  const Real scale = options.softmax_scale ? static_cast<Real>(*options.softmax_scale)
                                           : static_cast<Real>(1 / std::sqrt(static_cast<long double>(head_dim)));
  const Real infinity = std::numeric_limits<Real>::infinity();
  std::vector<Real> grad_query(static_cast<size_t>(batch * heads * query_len * head_dim));
  std::vector<Real> grad_key(static_cast<size_t>(batch * kv_heads * kv_len * head_dim));
  std::vector<Real> grad_value(static_cast<size_t>(batch * kv_heads * kv_len * value_head_dim));
  const auto row_at = [](const ConstTensor& t, int64_t b, int64_t h, int64_t i) {
    return b * t.strides[0] + h * t.strides[1] + i * t.strides[2];
  };
  const auto dot = [](const ConstTensor& x, int64_t at_x, const ConstTensor& y, int64_t at_y, int64_t length) {
    Real sum = 0;
    for (int64_t d = 0; d < length; ++d) {
      sum += static_cast<Real>(number_at(x, at_x + d * x.strides[3])) *
             static_cast<Real>(number_at(y, at_y + d * y.strides[3]));
    }
    return sum;
  };
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t kv_head = h / (heads / kv_heads);
      for (int64_t i = 0; i < query_len; ++i) {
        const int64_t query = row_at(in.query, b, h, i), grad = row_at(grad_out, b, h, i);
        const int64_t num_keys = visible_keys(in, options, b, i);
        std::vector<Real> p(static_cast<size_t>(num_keys)), dp(p.size());
        Real max = -infinity, sum = 0, delta = 0;
        for (int64_t j = 0; j < num_keys; ++j) {
          Real& score = p[static_cast<size_t>(j)];
          score = rounded_to(storage, scale * dot(in.query, query, in.key, row_at(in.key, b, kv_head, j), head_dim));
          max = score > max || std::isnan(score) ? score : max;
        }
        if (max == -infinity) continue;
        for (Real& x : p) sum += x = std::exp(x - max);
        for (Real& x : p) x = rounded_to(storage, x / sum);
        for (int64_t j = 0; j < num_keys; ++j) {
          dp[static_cast<size_t>(j)] =
              rounded_to(storage, dot(grad_out, grad, in.value, row_at(in.value, b, kv_head, j), value_head_dim));
          delta += p[static_cast<size_t>(j)] * dp[static_cast<size_t>(j)];
        }
        if (grad_lse.data != nullptr) {
          delta -= static_cast<Real>(
              number_at(grad_lse, b * grad_lse.strides[0] + h * grad_lse.strides[1] + i * grad_lse.strides[2]));
        }
        Real* dq = &grad_query[static_cast<size_t>(((b * heads + h) * query_len + i) * head_dim)];
        for (int64_t j = 0; j < num_keys; ++j) {
          const int64_t key = row_at(in.key, b, kv_head, j), index = (b * kv_heads + kv_head) * kv_len + j;
          Real* dk = &grad_key[static_cast<size_t>(index * head_dim)];
          Real* dv = &grad_value[static_cast<size_t>(index * value_head_dim)];
          const Real pj = p[static_cast<size_t>(j)];
          const Real ds = rounded_to(storage, pj * (dp[static_cast<size_t>(j)] - delta));
          for (int64_t d = 0; d < head_dim; ++d) {
            dq[d] += scale * ds * static_cast<Real>(number_at(in.key, key + d * in.key.strides[3]));
            dk[d] += scale * ds * static_cast<Real>(number_at(in.query, query + d * in.query.strides[3]));
          }
          for (int64_t d = 0; d < value_head_dim; ++d) {
            dv[d] += pj * static_cast<Real>(number_at(grad_out, grad + d * grad_out.strides[3]));
          }
        }
      }
    }
  }
  const auto rounded = [&](const std::vector<Real>& from) {
    std::vector<double> to(from.size());
    for (size_t i = 0; i < from.size(); ++i) to[i] = static_cast<double>(rounded_to(storage, from[i]));
    return to;
  };
  return {rounded(grad_query), rounded(grad_key), rounded(grad_value)};
}

}  // namespace reference

// The tensors must satisfy flash_attention_backward's contract.
inline ReferenceGradients reference_gradients(const AttentionInputs& inputs, const ConstTensor& grad_out,
                                              const ConstTensor& grad_lse, const AttentionOptions& options) {
  if (inputs.query.dtype == DType::f64)
    return reference::gradients<long double>(inputs, grad_out, grad_lse, options, DType::f64);
  return reference::gradients<double>(inputs, grad_out, grad_lse, options, DType::f64);
}

// `storage`: f32, bf16 or f16; f64 for f64 inputs.
inline ReferenceGradients naive_gradients(const AttentionInputs& inputs, const ConstTensor& grad_out,
                                          const ConstTensor& grad_lse, const AttentionOptions& options, DType storage) {
  if (inputs.query.dtype == DType::f64)
    return reference::gradients<double>(inputs, grad_out, grad_lse, options, DType::f64);
  return reference::gradients<float>(inputs, grad_out, grad_lse, options, storage);
}

}  // namespace opst::attention

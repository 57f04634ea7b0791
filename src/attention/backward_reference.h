// Attention backward in plain loops over (query, key) pairs: what the kernels are measured against. Shares nothing with
// them, and uses nothing that forward saved. For tests, benchmarks and tools.
//
//   reference_gradients   the equations in double (long double for f64 inputs)
//   naive_gradients       the same operations in f32 (double for f64), each result rounded to `storage`
//
// Rules of pairs: a hidden pair, by a bias of -inf too, adds nothing to anything; a dropped one nothing to dV. A row
// with an undefined softmax makes NaN what it reaches.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention/reference.h"
#include "opst/attention_backward.h"

namespace opst::attention {

// Row-major in the shape of the tensor whose gradient it is. Empty where that tensor is absent.
struct ReferenceGradients {
  std::vector<double> query, key, value, bias, sinks, query_rope, key_rope;
};

// Every gradient of a backward call: its name, where the operator writes it, and where the reference has it.
struct NamedGradient {
  const char* name;
  Tensor AttentionGradients::*written;
  std::vector<double> ReferenceGradients::*reference;
};
inline constexpr NamedGradient kNamedGradients[] = {
    {"grad_query", &AttentionGradients::grad_query, &ReferenceGradients::query},
    {"grad_key", &AttentionGradients::grad_key, &ReferenceGradients::key},
    {"grad_value", &AttentionGradients::grad_value, &ReferenceGradients::value},
    {"grad_bias", &AttentionGradients::grad_bias, &ReferenceGradients::bias},
    {"grad_sinks", &AttentionGradients::grad_sinks, &ReferenceGradients::sinks},
    {"grad_query_rope", &AttentionGradients::grad_query_rope, &ReferenceGradients::query_rope},
    {"grad_key_rope", &AttentionGradients::grad_key_rope, &ReferenceGradients::key_rope},
};

namespace reference {

// The tensor's shape, as if it were contiguous: to find places in a ReferenceGradients.
inline ConstTensor packed_shape(const ConstTensor& t) {
  ConstTensor packed = t;
  int64_t stride = 1;
  for (int d = t.rank - 1; d >= 0; --d) {
    packed.strides[d] = stride;
    stride *= t.shape[d];
  }
  return packed;
}
inline int64_t broadcast_offset(const ConstTensor& t, const int64_t (&index)[4]) {
  int64_t offset = 0;
  for (int d = 1; d <= t.rank; ++d) {
    if (t.shape[t.rank - d] > 1) offset += index[4 - d] * t.strides[t.rank - d];
  }
  return offset;
}

// `absolute`: every term by its magnitude, as if nothing cancelled. Tells how large the rounding of a sum may be.
template <class Real>
ReferenceGradients gradients(const AttentionInputs& in, const ConstTensor& grad_out, const ConstTensor& grad_lse,
                             const AttentionOptions& options, DType storage, bool absolute) {
  const int64_t batch = in.cu_seqlens_q.data != nullptr   ? in.cu_seqlens_q.shape[0] - 1
                        : in.cu_seqlens_k.data != nullptr ? in.cu_seqlens_k.shape[0] - 1
                                                          : in.query.shape[0];
  const int64_t heads = in.query.shape[1], kv_heads = num_kv_heads(in);
  const int64_t head_dim = in.query.shape[in.query.rank - 1], value_head_dim = in.value.shape[in.value.rank - 1];
  const ConstTensor at_query = packed_shape(in.query), at_key = packed_shape(in.key), at_value = packed_shape(in.value);
  const ConstTensor at_bias = packed_shape(in.bias);
  const bool rope = in.query_rope.data != nullptr && in.key_rope.data != nullptr;
  const int64_t rope_dim = rope ? in.query_rope.shape[in.query_rope.rank - 1] : 0;
  const ConstTensor at_query_rope = packed_shape(in.query_rope), at_key_rope = packed_shape(in.key_rope);
  const auto zeros = [](const ConstTensor& t) {
    return std::vector<Real>(t.data != nullptr || t.num_elements() == 0 ? static_cast<size_t>(t.num_elements()) : 0);
  };
  std::vector<Real> grad_query = zeros(in.query), grad_key = zeros(in.key), grad_value = zeros(in.value);
  std::vector<Real> grad_bias = zeros(in.bias), grad_sinks = zeros(in.sinks);
  std::vector<Real> grad_query_rope = zeros(in.query_rope), grad_key_rope = zeros(in.key_rope);
  const Real scale = options.softmax_scale
                         ? static_cast<Real>(*options.softmax_scale)
                         : static_cast<Real>(1 / std::sqrt(static_cast<long double>(head_dim + rope_dim)));
  const Real kept_scale = 1 / static_cast<Real>(options.dropout.keep_prob);
  const auto bias_scale = static_cast<Real>(options.bias_scale);
  const Real infinity = std::numeric_limits<Real>::infinity(), undefined = std::numeric_limits<Real>::quiet_NaN();
  const auto number = [](const ConstTensor& t, int64_t at, int64_t d) {
    return static_cast<Real>(number_at(t, at + d * t.strides[t.rank - 1]));
  };
  const auto term = [&](Real x) { return absolute ? std::fabs(x) : x; };

  for (int64_t b = 0; b < batch; ++b) {
    const Place place = place_of(in, b);
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t kv_head = h / (heads / kv_heads);
      for (int64_t i = 0; i < place.query_len; ++i) {
        const Softmax<Real> row = softmax<Real>(in, options, b, h, i, storage);
        Real from_lse = 0;
        if (grad_lse.data != nullptr) {
          const int64_t at = in.cu_seqlens_q.data != nullptr
                                 ? h * grad_lse.strides[0] + (place.query_start + i) * grad_lse.strides[1]
                                 : b * grad_lse.strides[0] + h * grad_lse.strides[1] + i * grad_lse.strides[2];
          from_lse = static_cast<Real>(number_at(grad_lse, at));
        }
        if (row.defined && row.max == -infinity) continue;
        const int64_t query = query_offset(in, in.query, b, h, i), grad = query_offset(in, grad_out, b, h, i);
        const size_t num_keys = row.keys.size();
        std::vector<Real> p = row.probability, dp(num_keys);
        Real delta = 0, magnitude = 0;
        for (size_t n = 0; n < num_keys; ++n) {
          if (!row.defined) p[n] = undefined;
          if (!row.kept[n]) continue;
          const int64_t value = row_offset(in, in.value, b, kv_head, row.keys[n]);
          Real sum = 0;
          for (int64_t d = 0; d < value_head_dim; ++d)
            sum += term(number(grad_out, grad, d) * number(in.value, value, d));
          dp[n] = rounded_to(storage, sum * kept_scale);
          if (!row.hidden[n]) delta += p[n] * dp[n];
        }
        magnitude = std::fabs(delta) + std::fabs(from_lse);
        delta = absolute ? magnitude : delta - from_lse;
        if (in.sinks.data != nullptr) {
          const auto sink = static_cast<Real>(number_at(in.sinks, h * in.sinks.strides[0]));
          const Real share = !row.defined ? undefined : std::exp(sink - row.max) / row.sum;
          if (sink != -infinity) grad_sinks[static_cast<size_t>(h)] -= absolute ? -share * delta : share * delta;
        }
        Real* dq = &grad_query[static_cast<size_t>(query_offset(in, at_query, b, h, i))];
        for (size_t n = 0; n < num_keys; ++n) {
          const int64_t j = row.keys[n];
          Real ds = absolute ? p[n] * (dp[n] + delta) : p[n] * (dp[n] - delta);
          if (in.bias.data != nullptr) {
            const Real bias = bias_scale * static_cast<Real>(broadcast_at(in.bias, b, h, i, j));
            if (row.score[n] != -infinity) {
              grad_bias[static_cast<size_t>(broadcast_offset(at_bias, {b, h, i, j}))] += term(bias_scale * ds);
            }
            if (bias == -infinity && row.score[n] == -infinity) continue;
          }
          // The slope of the cap is 1 - tanh^2, which cancels where scores reach the cap.
          ds = rounded_to(storage, ds * (absolute ? 2 - row.cap_slope[n] : row.cap_slope[n]));
          const int64_t key = row_offset(in, in.key, b, kv_head, j);
          Real* dk = &grad_key[static_cast<size_t>(row_offset(in, at_key, b, kv_head, j))];
          Real* dv = &grad_value[static_cast<size_t>(row_offset(in, at_value, b, kv_head, j))];
          for (int64_t d = 0; d < head_dim; ++d) {
            dq[d] += term(scale * ds * number(in.key, key, d));
            dk[d] += term(scale * ds * number(in.query, query, d));
          }
          if (rope_dim > 0) {
            const int64_t of_query = query_offset(in, in.query_rope, b, h, i);
            const int64_t of_key = row_offset(in, in.key_rope, b, kv_head, j);
            Real* dqr = &grad_query_rope[static_cast<size_t>(query_offset(in, at_query_rope, b, h, i))];
            Real* dkr = &grad_key_rope[static_cast<size_t>(row_offset(in, at_key_rope, b, kv_head, j))];
            for (int64_t d = 0; d < rope_dim; ++d) {
              dqr[d] += term(scale * ds * number(in.key_rope, of_key, d));
              dkr[d] += term(scale * ds * number(in.query_rope, of_query, d));
            }
          }
          if (!row.kept[n]) continue;
          for (int64_t d = 0; d < value_head_dim; ++d) dv[d] += term(p[n] * kept_scale * number(grad_out, grad, d));
        }
      }
    }
  }
  const auto rounded = [&](const std::vector<Real>& from) {
    std::vector<double> to(from.size());
    for (size_t i = 0; i < from.size(); ++i) to[i] = static_cast<double>(rounded_to(storage, from[i]));
    return to;
  };
  return {rounded(grad_query), rounded(grad_key),        rounded(grad_value),   rounded(grad_bias),
          rounded(grad_sinks), rounded(grad_query_rope), rounded(grad_key_rope)};
}

}  // namespace reference

// The tensors must satisfy flash_attention_backward's contract; grad_lse may have no data. `absolute`: sums of
// magnitudes, which bound what rounding does.
inline ReferenceGradients reference_gradients(const AttentionInputs& inputs, const ConstTensor& grad_out,
                                              const ConstTensor& grad_lse, const AttentionOptions& options,
                                              bool absolute = false) {
  if (inputs.query.dtype == DType::f64)
    return reference::gradients<long double>(inputs, grad_out, grad_lse, options, DType::f64, absolute);
  return reference::gradients<double>(inputs, grad_out, grad_lse, options, DType::f64, absolute);
}

// `storage`: f32, bf16 or f16; f64 for f64 inputs.
inline ReferenceGradients naive_gradients(const AttentionInputs& inputs, const ConstTensor& grad_out,
                                          const ConstTensor& grad_lse, const AttentionOptions& options, DType storage) {
  if (inputs.query.dtype == DType::f64)
    return reference::gradients<double>(inputs, grad_out, grad_lse, options, DType::f64, false);
  return reference::gradients<float>(inputs, grad_out, grad_lse, options, storage, false);
}

}  // namespace opst::attention

// Attention forward in plain loops, one row of queries at a time: what the kernels are measured against. Shares nothing
// with them. For tests, benchmarks and tools.
//
//   reference_row   the equation in double (long double for f64 inputs)
//   naive_row       the three steps in f32 (double for f64), the result of each rounded to `storage`: what a plain
//                   implementation in that type achieves, hence the unit that errors are judged in
//
// Rules of rows: a row that sees no key, or whose scores are all -inf, has out = 0, lse = max = -inf, sum = 0. A score
// that is NaN or +inf makes the whole row NaN, statistics included.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/convert.h"
#include "opst/attention.h"

namespace opst::attention {

struct ReferenceRow {
  std::vector<double> out;  // [value_head_dim]
  double lse = 0;           // natural logarithm of the sum of exp(score)
  double max = 0;           // largest score
  double sum = 0;           // sum of exp(score - max)
};

namespace reference {

inline double number_at(const ConstTensor& t, int64_t offset) {
  switch (t.dtype) {
    case DType::f32:
      return static_cast<double>(static_cast<const float*>(t.data)[offset]);
    case DType::f64:
      return static_cast<const double*>(t.data)[offset];
    case DType::bf16:
      return static_cast<double>(to_f32(static_cast<const bf16*>(t.data)[offset]));
    case DType::f16:
      return static_cast<double>(to_f32(static_cast<const f16*>(t.data)[offset]));
    case DType::i32:
      return static_cast<double>(static_cast<const int32_t*>(t.data)[offset]);
    case DType::i64:
      return static_cast<double>(static_cast<const int64_t*>(t.data)[offset]);
    default:
      return std::numeric_limits<double>::quiet_NaN();
  }
}

template <class Real>
Real rounded_to(DType storage, Real x) {
  switch (storage) {
    case DType::f32:
      return static_cast<Real>(static_cast<float>(x));
    case DType::bf16:
      return static_cast<Real>(to_f32(to_bf16(static_cast<double>(x))));
    case DType::f16:
      return static_cast<Real>(to_f32(to_f16(static_cast<double>(x))));
    default:
      return x;
  }
}

// Number of keys that query i of sequence b sees; they are keys 0, 1, ...
inline int64_t visible_keys(const AttentionInputs& in, const AttentionOptions& options, int64_t b, int64_t i) {
  const bool paged = in.block_table.data != nullptr;
  int64_t kv_len = paged ? 0 : in.key.shape[2];
  if (in.kv_lengths.data != nullptr) {
    kv_len = static_cast<int64_t>(number_at(in.kv_lengths, b * in.kv_lengths.strides[0]));
  }
  if (!options.causal) return kv_len;
  const int64_t query_len = in.query.shape[2];
  const int64_t last = options.alignment == CausalAlignment::top_left ? i : i + kv_len - query_len;
  if (last < 0) return 0;
  return last + 1 < kv_len ? last + 1 : kv_len;
}

// Where key (or value) j of sequence b begins.
inline int64_t row_offset(const AttentionInputs& in, const ConstTensor& t, int64_t b, int64_t kv_head, int64_t j) {
  if (in.block_table.data == nullptr) return b * t.strides[0] + kv_head * t.strides[1] + j * t.strides[2];
  const ConstTensor& table = in.block_table;
  const int64_t block_size = t.shape[1];
  const auto block = static_cast<int64_t>(number_at(table, b * table.strides[0] + j / block_size * table.strides[1]));
  return block * t.strides[0] + j % block_size * t.strides[1] + kv_head * t.strides[2];
}

template <class Real>
ReferenceRow row(const AttentionInputs& in, const AttentionOptions& options, int64_t b, int64_t h, int64_t i,
                 DType storage) {
  const bool paged = in.block_table.data != nullptr;
  const int64_t num_kv_heads = paged ? in.key.shape[2] : in.key.shape[1];
  const int64_t kv_head = h / (in.query.shape[1] / num_kv_heads);
  const int64_t head_dim = in.query.shape[3], value_head_dim = in.value.shape[3];
  const int64_t num_keys = visible_keys(in, options, b, i);
  const Real scale = options.softmax_scale ? static_cast<Real>(*options.softmax_scale)
                                           : static_cast<Real>(1 / std::sqrt(static_cast<long double>(head_dim)));
  const int64_t query = b * in.query.strides[0] + h * in.query.strides[1] + i * in.query.strides[2];

  // scores = scale * q K^T
  std::vector<Real> scores(static_cast<size_t>(num_keys));
  const Real infinity = std::numeric_limits<Real>::infinity();
  Real max = -infinity;
  bool defined = true;
  for (int64_t j = 0; j < num_keys; ++j) {
    const int64_t key = row_offset(in, in.key, b, kv_head, j);
    Real dot = 0;
    for (int64_t d = 0; d < head_dim; ++d) {
      dot += static_cast<Real>(number_at(in.query, query + d * in.query.strides[3])) *
             static_cast<Real>(number_at(in.key, key + d * in.key.strides[3]));
    }
    const Real score = rounded_to(storage, dot * scale);
    scores[static_cast<size_t>(j)] = score;
    if (std::isnan(score) || score == infinity) defined = false;
    if (score > max) max = score;
  }

  ReferenceRow result;
  const double undefined = std::numeric_limits<double>::quiet_NaN();
  result.out.assign(static_cast<size_t>(value_head_dim), defined ? 0.0 : undefined);
  if (!defined || max == -infinity) {
    result.lse = result.max = defined ? -std::numeric_limits<double>::infinity() : undefined;
    result.sum = defined ? 0.0 : undefined;
    return result;
  }

  // probabilities = softmax(scores)
  Real sum = 0;
  for (const Real score : scores) sum += std::exp(score - max);
  for (Real& score : scores) score = rounded_to(storage, std::exp(score - max) / sum);
  result.max = static_cast<double>(max);
  result.sum = static_cast<double>(sum);
  result.lse = static_cast<double>(max + std::log(sum));

  // out = probabilities V
  for (int64_t d = 0; d < value_head_dim; ++d) {
    Real out = 0;
    for (int64_t j = 0; j < num_keys; ++j) {
      const int64_t value = row_offset(in, in.value, b, kv_head, j) + d * in.value.strides[3];
      out += scores[static_cast<size_t>(j)] * static_cast<Real>(number_at(in.value, value));
    }
    result.out[static_cast<size_t>(d)] = static_cast<double>(rounded_to(storage, out));
  }
  return result;
}

}  // namespace reference

// Row i of head h of sequence b. The tensors must satisfy flash_attention_forward's contract.
inline ReferenceRow reference_row(const AttentionInputs& inputs, const AttentionOptions& options, int64_t b, int64_t h,
                                  int64_t i) {
  if (inputs.query.dtype == DType::f64) return reference::row<long double>(inputs, options, b, h, i, DType::f64);
  return reference::row<double>(inputs, options, b, h, i, DType::f64);
}

// `storage`: f32, bf16 or f16; f64 for f64 inputs.
inline ReferenceRow naive_row(const AttentionInputs& inputs, const AttentionOptions& options, int64_t b, int64_t h,
                              int64_t i, DType storage) {
  if (inputs.query.dtype == DType::f64) return reference::row<double>(inputs, options, b, h, i, DType::f64);
  return reference::row<float>(inputs, options, b, h, i, storage);
}

}  // namespace opst::attention

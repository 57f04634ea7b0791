// Attention forward in plain loops, one row of queries at a time: what the kernels are measured against. Shares nothing
// with them. For tests, benchmarks and tools.
//
//   reference_row   the equation in double (long double for f64 inputs)
//   naive_row       the same operations in f32 (double for f64), each result rounded to `storage`: what a plain
//                   implementation in that type achieves, hence the unit that errors are judged in
//
// Rules of rows: a row that sees no key, or whose scores are all -inf, has out = 0, lse = max = -inf, sum = 0; a sink
// is a score, but no key. A score that is NaN or +inf makes the whole row NaN, statistics included. Values of keys that
// are hidden (by a bias of -inf, too) or dropped count nothing. Indices are within the sequence.
#pragma once

#include <algorithm>
#include <array>
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
  // Largest sum of the absolute products that add up to a score, or |max|: the scale of what rounding does to scores.
  double score_scale = 0;
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

inline int64_t integer(const ConstTensor& t, int64_t index) {
  return static_cast<int64_t>(number_at(t, index * t.strides[0]));
}

// Where a sequence's queries and keys are.
struct Place {
  int64_t query_start = 0, query_len = 0, key_start = 0, kv_len = 0;
};
inline Place place_of(const AttentionInputs& in, int64_t b) {
  Place p;
  if (in.cu_seqlens_q.data != nullptr) {
    p.query_start = integer(in.cu_seqlens_q, b);
    p.query_len = integer(in.cu_seqlens_q, b + 1) - p.query_start;
  } else {
    p.query_len = in.query.shape[2];
  }
  if (in.cu_seqlens_k.data != nullptr) {
    p.key_start = integer(in.cu_seqlens_k, b);
    p.kv_len = integer(in.cu_seqlens_k, b + 1) - p.key_start;
  } else if (in.block_table.data == nullptr) {
    p.kv_len = in.key.shape[2];
  }
  if (in.kv_lengths.data != nullptr) p.kv_len = integer(in.kv_lengths, b);
  return p;
}

// Element [b, h, i, j] of what a mask or bias broadcasts to.
inline double broadcast_at(const ConstTensor& t, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t index[4] = {b, h, i, j};
  int64_t offset = 0;
  for (int d = 1; d <= t.rank; ++d) {
    if (t.shape[t.rank - d] > 1) offset += index[4 - d] * t.strides[t.rank - d];
  }
  if (t.dtype == DType::boolean) return static_cast<const uint8_t*>(t.data)[offset] != 0 ? 1 : 0;
  return number_at(t, offset);
}

inline int64_t diagonal(const Place& place, const AttentionOptions& options) {
  return options.alignment == CausalAlignment::bottom_right ? place.kv_len - place.query_len : 0;
}

// Whether the block mask shows query i key j.
inline bool in_visible_blocks(const AttentionInputs& in, int64_t b, int64_t h, int64_t i, int64_t j) {
  const BlockMask& mask = in.block_mask;
  const ConstTensor& offsets = mask.row_offsets;
  int64_t at = i / mask.block_q * offsets.strides[2];
  if (offsets.shape[0] > 1) at += b * offsets.strides[0];
  if (offsets.shape[1] > 1) at += h / (in.query.shape[1] / offsets.shape[1]) * offsets.strides[1];
  auto begin = static_cast<int64_t>(number_at(offsets, at));
  const auto last = static_cast<int64_t>(number_at(offsets, at + offsets.strides[2]));
  for (int64_t end = last; begin < end;) {  // columns ascend
    const int64_t middle = (begin + end) / 2;
    if (integer(mask.columns, middle) < j / mask.block_kv)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin < last && integer(mask.columns, begin) == j / mask.block_kv;
}

inline int64_t num_kv_heads(const AttentionInputs& in) {
  return in.block_table.data != nullptr ? in.key.shape[2] : in.key.shape[1];
}

// Whether the list of query i has the block of key j.
inline bool is_listed(const AttentionInputs& in, const Place& place, int64_t b, int64_t h, int64_t i, int64_t j) {
  const ConstTensor& t = in.sparse_indices.indices;
  const int64_t kv_head = h / (in.query.shape[1] / num_kv_heads(in)), last = t.rank - 1;
  int64_t at = kv_head * t.strides[last - 1];
  at += t.rank == 3 ? (place.query_start + i) * t.strides[0] : b * t.strides[0] + i * t.strides[1];
  for (int64_t n = 0; n < t.shape[last]; ++n) {
    const double block = number_at(t, at + n * t.strides[last]);
    if (block < 0) return false;
    if (block == std::floor(static_cast<double>(j) / static_cast<double>(in.sparse_indices.block_size))) return true;
  }
  return false;
}

// Whether the tree of draft tokens shows query i key j.
inline bool in_tree(const AttentionInputs& in, const Place& place, int64_t b, int64_t i, int64_t j) {
  const ConstTensor& t = in.tree_mask;
  const int64_t token = j - (place.kv_len - place.query_len);
  const int64_t at = t.rank == 1 ? (place.query_start + i) * t.strides[0] : b * t.strides[0] + i * t.strides[1];
  const int64_t word = static_cast<const int64_t*>(t.data)[at];
  return word == -1 || token < 0 || (static_cast<uint64_t>(word) >> token) % 2 == 1;
}

// Whether query i sees key j, by structure, bool mask, block mask, list and tree.
inline bool sees(const AttentionInputs& in, const AttentionOptions& options, const Place& place, int64_t b, int64_t h,
                 int64_t i, int64_t j) {
  const int64_t distance = j - (i + diagonal(place, options));  // to the right of the diagonal
  bool shown = true;
  if (options.causal && distance > 0) shown = false;
  if (options.window_right != kUnbounded && distance > options.window_right) shown = false;
  if (options.window_left != kUnbounded && -distance > options.window_left) shown = false;
  if (in.prefix.data != nullptr && j < integer(in.prefix, b)) shown = true;
  if (in.mask.data != nullptr && broadcast_at(in.mask, b, h, i, j) == 0) shown = false;
  if (shown && in.block_mask) shown = in_visible_blocks(in, b, h, i, j);
  if (shown && in.sparse_indices) shown = is_listed(in, place, b, h, i, j);
  if (shown && in.tree_mask.data != nullptr) shown = in_tree(in, place, b, i, j);
  return shown;
}

// Of a call whose rows see keys 0, 1, ... without gaps: how many.
inline int64_t visible_keys(const AttentionInputs& in, const AttentionOptions& options, int64_t b, int64_t i) {
  const Place place = place_of(in, b);
  int64_t count = 0;
  while (count < place.kv_len && sees(in, options, place, b, 0, i, count)) ++count;
  return count;
}

// Philox4x32-10.
inline std::array<uint32_t, 4> random_words(std::array<uint32_t, 4> x, uint64_t seed) {
  auto low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{x[0]} * 0xD2511F53u, third = uint64_t{x[2]} * 0xCD9E8D57u;
    const auto upper = [](uint64_t y) { return static_cast<uint32_t>(y >> 32); };
    x = {upper(third) ^ x[1] ^ low, static_cast<uint32_t>(third), upper(first) ^ x[3] ^ high,
         static_cast<uint32_t>(first)};
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  return x;
}

// Whether dropout keeps the weight of key j.
inline bool keeps(const AttentionInputs& in, const AttentionOptions& options, const Place& place, int64_t b, int64_t h,
                  int64_t i, int64_t j) {
  const DropoutOptions& drop = options.dropout;
  const bool varlen = in.cu_seqlens_q.data != nullptr || in.cu_seqlens_k.data != nullptr;
  const int64_t num_heads = in.query.shape[1];
  if (in.drop_mask.data != nullptr) {
    int64_t before = 0, columns = place.kv_len;
    if (varlen) {
      for (int64_t s = 0; s < b; ++s) before += place_of(in, s).query_len * place_of(in, s).kv_len * num_heads;
    } else if (in.block_table.data == nullptr) {
      columns = in.key.shape[2];
    } else {
      for (int64_t s = 0; s < in.query.shape[0]; ++s) columns = std::max(columns, place_of(in, s).kv_len);
    }
    if (!varlen) before = b * num_heads * place.query_len * columns;
    const int64_t bit = before + (h * place.query_len + i) * columns + j;
    return (static_cast<const uint8_t*>(in.drop_mask.data)[bit / 8] >> (bit % 8) & 1) != 0;
  }
  const int64_t key = drop.first_key + j;
  const int64_t row = b * (drop.total_heads > 0 ? drop.total_heads : num_heads) + drop.first_head + h;
  const auto words = random_words({static_cast<uint32_t>(key / 4), static_cast<uint32_t>(drop.first_query + i),
                                   static_cast<uint32_t>(row), static_cast<uint32_t>(drop.offset)},
                                  drop.seed);
  return static_cast<double>(words[static_cast<size_t>(key % 4)]) < drop.keep_prob * 4294967296.0;
}

// Where key (or value) j of sequence b begins.
inline int64_t row_offset(const AttentionInputs& in, const ConstTensor& t, int64_t b, int64_t kv_head, int64_t j) {
  if (in.cu_seqlens_k.data != nullptr) {
    return (integer(in.cu_seqlens_k, b) + j) * t.strides[0] + kv_head * t.strides[1];
  }
  if (in.block_table.data == nullptr) return b * t.strides[0] + kv_head * t.strides[1] + j * t.strides[2];
  const ConstTensor& table = in.block_table;
  const int64_t block_size = t.shape[1];
  const auto block = static_cast<int64_t>(number_at(table, b * table.strides[0] + j / block_size * table.strides[1]));
  return block * t.strides[0] + j % block_size * t.strides[1] + kv_head * t.strides[2];
}

// Where row i of head h of sequence b of query, out or their gradients begins.
inline int64_t query_offset(const AttentionInputs& in, const ConstTensor& t, int64_t b, int64_t h, int64_t i) {
  if (in.cu_seqlens_q.data != nullptr) {
    return (integer(in.cu_seqlens_q, b) + i) * t.strides[0] + h * t.strides[1];
  }
  return b * t.strides[0] + h * t.strides[1] + i * t.strides[2];
}

// One row of the softmax.
template <class Real>
struct Softmax {
  std::vector<int64_t> keys;      // that the row sees; element n of the other vectors belongs to keys[n]
  std::vector<Real> score;        // S
  std::vector<Real> cap_slope;    // dY / dZ
  std::vector<Real> probability;  // exp(score - max) / sum, before dropout
  std::vector<char> kept;         // by dropout
  std::vector<char> hidden;       // by a bias of -inf
  Real max = -std::numeric_limits<Real>::infinity();
  Real max_of_keys = max;  // without the sink
  Real sum = 0;            // the sink's share is in it
  bool defined = true;     // no score is NaN or +inf
  Real largest_parts = 0;  // sum of the absolute products of a score
};

template <class Real>
Softmax<Real> softmax(const AttentionInputs& in, const AttentionOptions& options, int64_t b, int64_t h, int64_t i,
                      DType storage) {
  const Place place = place_of(in, b);
  const int64_t kv_head = h / (in.query.shape[1] / num_kv_heads(in));
  const int64_t head_dim = in.query.shape[in.query.rank - 1];
  const bool rope = in.query_rope.data != nullptr && in.key_rope.data != nullptr;
  const int64_t rope_dim = rope ? in.query_rope.shape[in.query_rope.rank - 1] : 0;
  const Real scale = options.softmax_scale
                         ? static_cast<Real>(*options.softmax_scale)
                         : static_cast<Real>(1 / std::sqrt(static_cast<long double>(head_dim + rope_dim)));
  const int64_t query = query_offset(in, in.query, b, h, i);
  const int64_t query_step = in.query.strides[in.query.rank - 1], key_step = in.key.strides[in.key.rank - 1];
  const Real infinity = std::numeric_limits<Real>::infinity();
  const bool drops = in.drop_mask.data != nullptr || options.dropout.keep_prob < 1;

  Softmax<Real> row;
  const auto see_score = [&](Real score) {
    if (std::isnan(score) || score == infinity) row.defined = false;
    if (score > row.max) row.max = score;
  };
  for (int64_t j = 0; j < place.kv_len; ++j) {
    if (!sees(in, options, place, b, h, i, j)) continue;
    const int64_t key = row_offset(in, in.key, b, kv_head, j);
    Real dot = 0, parts = 0;
    const auto add = [&](double of_query, double of_key) {
      const Real product = static_cast<Real>(of_query) * static_cast<Real>(of_key);
      dot += product;
      parts += std::abs(product);
    };
    for (int64_t d = 0; d < head_dim; ++d) {
      add(number_at(in.query, query + d * query_step), number_at(in.key, key + d * key_step));
    }
    for (int64_t d = 0; d < rope_dim; ++d) {
      const ConstTensor &q = in.query_rope, &k = in.key_rope;
      add(number_at(q, query_offset(in, q, b, h, i) + d * q.strides[q.rank - 1]),
          number_at(k, row_offset(in, k, b, kv_head, j) + d * k.strides[k.rank - 1]));
    }
    row.largest_parts = std::max(row.largest_parts, parts * std::abs(scale));
    Real score = rounded_to(storage, dot * scale);
    Real cap_slope = 1;
    if (options.softcap > 0) {
      const auto cap = static_cast<Real>(options.softcap);
      const Real t = std::tanh(score / cap);
      cap_slope = 1 - t * t;
      score = rounded_to(storage, cap * t);
    }
    if (in.alibi_slopes.data != nullptr) {
      const ConstTensor& slopes = in.alibi_slopes;
      const auto slope = static_cast<Real>(
          number_at(slopes, slopes.rank == 1 ? h * slopes.strides[0] : b * slopes.strides[0] + h * slopes.strides[1]));
      const int64_t signed_distance =
          j + options.alibi_key_start - (i + options.alibi_query_start) - diagonal(place, options);
      const auto distance = static_cast<Real>(signed_distance < 0 ? -signed_distance : signed_distance);
      score = rounded_to(storage,
                         score - slope * (options.alibi_form == AlibiForm::linear ? distance : std::sqrt(distance)));
    }
    Real bias = 0;
    if (in.bias.data != nullptr) {
      bias = static_cast<Real>(options.bias_scale) * static_cast<Real>(broadcast_at(in.bias, b, h, i, j));
      score = rounded_to(storage, score + bias);
    }
    row.keys.push_back(j);
    row.score.push_back(score);
    row.cap_slope.push_back(cap_slope);
    row.kept.push_back(!drops || keeps(in, options, place, b, h, i, j));
    row.hidden.push_back(bias == -infinity && score == -infinity);
    see_score(score);
  }
  row.max_of_keys = row.max;
  Real sink = -infinity;
  if (in.sinks.data != nullptr) see_score(sink = static_cast<Real>(number_at(in.sinks, h * in.sinks.strides[0])));

  row.probability.assign(row.score.size(), 0);
  if (!row.defined || row.max == -infinity) return row;
  row.sum = std::exp(sink - row.max);
  for (const Real score : row.score) row.sum += std::exp(score - row.max);
  for (size_t n = 0; n < row.score.size(); ++n) {
    row.probability[n] = rounded_to(storage, std::exp(row.score[n] - row.max) / row.sum);
  }
  return row;
}

template <class Real>
ReferenceRow row(const AttentionInputs& in, const AttentionOptions& options, int64_t b, int64_t h, int64_t i,
                 DType storage) {
  const int64_t kv_head = h / (in.query.shape[1] / num_kv_heads(in));
  const int64_t value_head_dim = in.value.shape[in.value.rank - 1], step = in.value.strides[in.value.rank - 1];
  const Softmax<Real> p = softmax<Real>(in, options, b, h, i, storage);
  const Real infinity = std::numeric_limits<Real>::infinity();

  ReferenceRow result;
  const double undefined = std::numeric_limits<double>::quiet_NaN();
  result.out.assign(static_cast<size_t>(value_head_dim), p.defined ? 0.0 : undefined);
  if (!p.defined || p.max == -infinity) {
    result.lse = result.max = p.defined ? -std::numeric_limits<double>::infinity() : undefined;
    result.sum = p.defined ? 0.0 : undefined;
    return result;
  }
  result.max = static_cast<double>(p.max);
  result.score_scale = std::max(std::fabs(result.max), static_cast<double>(p.largest_parts));
  result.sum = static_cast<double>(p.sum);
  result.lse = static_cast<double>(p.max + std::log(p.sum));

  // out = dropout(probabilities) V
  const Real kept_scale = 1 / static_cast<Real>(options.dropout.keep_prob);
  for (int64_t d = 0; d < value_head_dim; ++d) {
    Real out = 0;
    for (size_t n = 0; n < p.keys.size(); ++n) {
      if (!p.kept[n] || p.hidden[n] || p.max_of_keys == -infinity) continue;
      const int64_t value = row_offset(in, in.value, b, kv_head, p.keys[n]) + d * step;
      out += p.probability[n] * kept_scale * static_cast<Real>(number_at(in.value, value));
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

// LightningIndexer in plain loops, one query at a time: what the kernels are measured against. Shares nothing with
// them. For tests, benchmarks and tools.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "attention/reference.h"
#include "opst/lightning_indexer.h"

namespace opst::attention {

struct IndexerRow {
  // Of the keys that the query sees, which are the first of its sequence:
  std::vector<double> scores;
  std::vector<double> parts;  // sums of |weight| |query| |key|: the scale of what rounding does to a score
};

// Query i of sequence b, for one key head; i < the sequence's length.
inline IndexerRow indexer_row(const LightningIndexerInputs& in, bool causal, int64_t b, int64_t kv_head, int64_t i) {
  using namespace reference;
  const AttentionInputs inputs = {.query = in.query,
                                  .key = in.key,
                                  .value = in.key,
                                  .block_table = in.block_table,
                                  .kv_lengths = in.kv_lengths,
                                  .cu_seqlens_q = in.cu_seqlens_q,
                                  .cu_seqlens_k = in.cu_seqlens_k};
  const Place place = place_of(inputs, b);
  const bool varlen = in.cu_seqlens_q.data != nullptr;
  const int64_t query_len = in.query_lengths.data != nullptr ? integer(in.query_lengths, b) : place.query_len;
  const int64_t head_dim = in.query.shape[in.query.rank - 1], dim_stride = in.query.strides[in.query.rank - 1];
  const int64_t group = in.query.shape[1] / num_kv_heads(inputs);
  IndexerRow row;
  for (int64_t j = 0; j < place.kv_len; ++j) {
    if (causal && j > i + place.kv_len - query_len) break;
    const int64_t key = row_offset(inputs, in.key, b, kv_head, j);
    double score = 0, parts = 0;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const int64_t query = query_offset(inputs, in.query, b, head, i);
      double product = 0, products = 0;
      for (int64_t d = 0; d < head_dim; ++d) {
        const double x =
            number_at(in.query, query + d * dim_stride) * number_at(in.key, key + d * in.key.strides[in.key.rank - 1]);
        product += x;
        products += std::fabs(x);
      }
      const double weight =
          varlen ? number_at(in.weights, (place.query_start + i) * in.weights.strides[0] + head * in.weights.strides[1])
                 : number_at(in.weights,
                             b * in.weights.strides[0] + head * in.weights.strides[1] + i * in.weights.strides[2]);
      score += weight * (product < 0 ? 0 : product);  // NaN < 0 is false
      parts += std::fabs(weight) * products;
    }
    row.scores.push_back(score);
    row.parts.push_back(parts);
  }
  return row;
}

// The order of the operator: whether key i, with score a, comes before key j with score b.
inline bool comes_before(double a, int64_t i, double b, int64_t j) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b) ? i < j : std::isnan(b);
  return a != b ? a > b : i < j;
}

// The first `count` keys, in their order.
inline std::vector<int64_t> selected(const std::vector<double>& scores, int64_t count) {
  std::vector<int64_t> keys(scores.size());
  std::iota(keys.begin(), keys.end(), 0);
  std::sort(keys.begin(), keys.end(), [&](int64_t i, int64_t j) {
    return comes_before(scores[static_cast<size_t>(i)], i, scores[static_cast<size_t>(j)], j);
  });
  if (static_cast<int64_t>(keys.size()) > count) keys.resize(static_cast<size_t>(count));
  return keys;
}

}  // namespace opst::attention

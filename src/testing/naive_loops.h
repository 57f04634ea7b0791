// The loops of naive attention at one instruction set level and for one storage type: a row at a time.
#pragma once

#include <cstdint>

namespace opst::test {

// Rows are contiguous and of the storage type; `work` holds `keys` (or `dim`) elements of the type that is computed in,
// f32, or f64 for f64.
struct NaiveLoops {
  // out[j] = scale * sum over d of row[d] * columns[d][j], + mask[j] unless mask is null
  void (*multiply)(const void* row, const void* columns, int64_t dim, int64_t keys, double scale, const float* mask,
                   void* work, void* out);
  // out = softmax(scores)
  void (*softmax)(const void* scores, int64_t keys, void* work, void* out);
  // out[d] = sum over j of weights[j] * rows[j][d]
  void (*weigh)(const void* weights, const void* rows, int64_t keys, int64_t dim, void* work, void* out);
  // out = scale * probabilities * (grads - sum of probabilities * grads)
  void (*softmax_grad)(const void* probabilities, const void* grads, int64_t keys, double scale, void* work, void* out);
  // sums[j][d] += weights[j] * row[d], in the type that is computed in
  void (*add_outer)(const void* weights, const void* row, int64_t keys, int64_t dim, void* sums);
  // sums -> out
  void (*round)(const void* sums, int64_t count, void* out);
};

// By storage type: f32, bf16, f16, and f64 at the generic level.
struct NaiveTable {
  NaiveLoops f32, bf16, f16, f64;
};

}  // namespace opst::test

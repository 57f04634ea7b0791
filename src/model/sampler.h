// Sampler: chooses the next token from logits.
//
// Greedy: the largest logit, of equal ones the lowest id. Otherwise, in this order: keep the top_k largest; of these
// the smallest set whose probability (at temperature 1) reaches top_p; draw from softmax(logit / temperature). The n-th
// draw is a pure function of the seed, n and the logits.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "opst/status.h"

namespace opst::model {

struct SamplingOptions {
  bool greedy = true;
  int64_t top_k = 0;         // 0: all
  double top_p = 1.0;        // in (0, 1]
  double temperature = 1.0;  // >= 0; 0 is greedy
  uint64_t seed = 0;
};

class Sampler {
 public:
  static Result<Sampler> create(const SamplingOptions& options);

  // Fails where a logit is not finite: something has overflowed, and no token is the right one then.
  Result<int32_t> next(std::span<const float> logits);

 private:
  explicit Sampler(const SamplingOptions& options) : options_(options) {}

  SamplingOptions options_;
  uint64_t draws_ = 0;
  std::vector<std::pair<float, int32_t>> candidates_;  // logit, id
  std::vector<double> weights_;
};

}  // namespace opst::model

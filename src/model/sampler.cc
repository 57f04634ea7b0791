#include "model/sampler.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/guarded.h"
#include "model/philox.h"

namespace opst::model {

Result<Sampler> Sampler::create(const SamplingOptions& options) try {
  if (options.top_k < 0)
    return Status::invalid_argument("top_k is " + std::to_string(options.top_k) + ", must be >= 0");
  if (!(options.top_p > 0.0 && options.top_p <= 1.0)) {
    return Status::invalid_argument("top_p is " + std::to_string(options.top_p) + ", must be in (0, 1]");
  }
  if (!(options.temperature >= 0.0) || std::isinf(options.temperature)) {
    return Status::invalid_argument("temperature is " + std::to_string(options.temperature) +
                                    ", must be finite and >= 0");
  }
  return Sampler(options);
} catch (...) {
  return status_of_exception();
}

Result<int32_t> Sampler::next(std::span<const float> logits) try {
  const uint64_t draw = draws_++;
  candidates_.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!std::isfinite(logits[i])) {
      return Status(StatusCode::internal, "the logit of token " + std::to_string(i) + " is " +
                                              std::to_string(logits[i]) + ", not a finite number");
    }
    candidates_.emplace_back(logits[i], static_cast<int32_t>(i));
  }
  if (candidates_.empty()) return Status::invalid_argument("no logits to choose from");
  const auto before = [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  };
  if (options_.greedy || options_.temperature == 0.0) {
    return std::min_element(candidates_.begin(), candidates_.end(), before)->second;
  }

  if (options_.top_k > 0 && static_cast<uint64_t>(options_.top_k) < candidates_.size()) {
    const auto end = candidates_.begin() + options_.top_k;
    std::nth_element(candidates_.begin(), end - 1, candidates_.end(), before);
    candidates_.erase(end, candidates_.end());
  }
  std::sort(candidates_.begin(), candidates_.end(), before);

  const auto weigh = [&](double temperature) {
    const double largest = candidates_[0].first;
    weights_.clear();
    double sum = 0.0;
    for (const auto& candidate : candidates_) {
      weights_.push_back(std::exp((candidate.first - largest) / temperature));
      sum += weights_.back();
    }
    return sum;
  };
  if (options_.top_p < 1.0) {
    const double wanted = options_.top_p * weigh(1.0);
    double sum = 0.0;
    size_t kept = 0;
    while (kept < weights_.size() && sum < wanted) sum += weights_[kept++];
    candidates_.resize(kept);
  }

  const double total = weigh(options_.temperature);
  const auto bits = philox({static_cast<uint32_t>(draw), static_cast<uint32_t>(draw >> 32), 0, 0},
                           {static_cast<uint32_t>(options_.seed), static_cast<uint32_t>(options_.seed >> 32)});
  const uint64_t high53 = (static_cast<uint64_t>(bits[1]) << 32 | bits[0]) >> 11;
  const double target = static_cast<double>(high53) * 0x1p-53 * total;
  double sum = 0.0;
  for (size_t i = 0; i < weights_.size(); ++i) {
    sum += weights_[i];
    if (target < sum) return candidates_[i].second;
  }
  return candidates_.back().second;  // the sum rounded below the target
} catch (...) {
  return status_of_exception();
}

}  // namespace opst::model

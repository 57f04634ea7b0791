#include "model/perplexity.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/guarded.h"

namespace opst::model {

namespace {

// -ln softmax(logits)[target]; NaN where a logit is not finite.
double negative_log_likelihood(std::span<const float> logits, int32_t target) {
  const double highest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  bool finite = true;
  for (const float logit : logits) {
    sum += std::exp(static_cast<double>(logit) - highest);
    finite = finite && std::isfinite(logit);
  }
  if (!finite) return std::nan("");
  return highest + std::log(sum) - static_cast<double>(logits[static_cast<size_t>(target)]);
}

}  // namespace

double Perplexity::mean_nll() const { return nll_sum / static_cast<double>(counted); }
double Perplexity::perplexity() const { return std::exp(mean_nll()); }

Result<Perplexity> measure_perplexity(LlamaSession& session, std::span<const int32_t> tokens,
                                      const std::function<void(const WindowScore&)>& on_window,
                                      const std::function<bool()>& interrupted) try {
  if (tokens.size() < 2) {
    return Status::invalid_argument("the text has " + std::to_string(tokens.size()) +
                                    " tokens, but predicting one from another takes 2");
  }
  if (session.context() < 2) return Status::invalid_argument("the context is 1, but a window of one predicts nothing");
  Perplexity total{.tokens = static_cast<int64_t>(tokens.size())};
  for (size_t begin = 0; tokens.size() - begin >= 2;) {
    const auto window = tokens.subspan(begin, std::min(tokens.size() - begin, static_cast<size_t>(session.context())));
    WindowScore score{.begin = static_cast<int64_t>(begin), .tokens = static_cast<int64_t>(window.size())};
    session.reset();
    // Nothing follows the last token.
    const auto visit = [&](int64_t position, std::span<const float> logits) {
      score.nll_sum += negative_log_likelihood(logits, window[static_cast<size_t>(position) + 1]);
    };
    if (Status status = session.feed_all(window.first(window.size() - 1), visit, interrupted); !status.ok()) {
      return status;
    }
    if (!std::isfinite(score.nll_sum)) {
      return Status(StatusCode::internal,
                    "the logits of the window at token " + std::to_string(begin) + " are not all finite");
    }
    total.counted += score.tokens - 1;
    total.nll_sum += score.nll_sum;
    if (on_window) on_window(score);
    begin += window.size();
  }
  return total;
} catch (...) {
  return status_of_exception();
}

}  // namespace opst::model

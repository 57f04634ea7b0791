// How well a model predicts a text: the mean of -ln p(token | the tokens before it), and its exponential.
//
// The tokens are cut into windows as long as the session's context, not overlapping, each starting fresh at position 0.
// Every token of a window but the first is predicted from those before it in the window. A last window of one token
// predicts nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "model/llama.h"

namespace opst::model {

struct WindowScore {
  int64_t begin = 0;   // its first token
  int64_t tokens = 0;  // in the window; all but the first are predicted
  double nll_sum = 0;  // natural logarithm
};

struct Perplexity {
  int64_t tokens = 0;   // of the text
  int64_t counted = 0;  // of these, predicted
  double nll_sum = 0;
  double mean_nll() const;
  double perplexity() const;  // exp(mean_nll)
};

// Log-softmax in double. `on_window` may be empty; it gets every window that counts, in order. Refused: fewer than two
// tokens, a context of one, a logit that is not finite. `interrupted` as in LlamaSession::feed.
Result<Perplexity> measure_perplexity(LlamaSession& session, std::span<const int32_t> tokens,
                                      const std::function<void(const WindowScore&)>& on_window,
                                      const std::function<bool()>& interrupted = {});

}  // namespace opst::model

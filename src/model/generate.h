// The loop that turns a prompt into an answer.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/llama.h"
#include "model/sampler.h"
#include "model/tokenizer.h"

namespace opst::model {

enum class FinishReason : uint8_t {
  stop,     // the model ended its text
  length,   // max_tokens
  context,  // prompt and answer fill the context
};
const char* to_string(FinishReason reason);

struct GenerateOptions {
  int64_t max_tokens = 256;
  bool ignore_end = false;  // go on behind the end token
  SamplingOptions sampling = {};
};

struct Generation {
  std::vector<int32_t> tokens;  // the ending one included
  std::string text;             // of `tokens` without special ones; UTF-8, invalid bytes replaced by U+FFFD
  FinishReason finish_reason = FinishReason::length;
  double ttft_ms = 0;                         // from the start to the first token
  double prefill_tokens_per_s = 0;            // prompt tokens over the time until their logits are there
  std::optional<double> tpot_ms;              // mean time of every token but the first; none where there is one only
  std::optional<double> decode_tokens_per_s;  // 1000 / tpot_ms
};

// Feeds `prompt` to an empty session and samples until the end token, max_tokens, or the context is full. `on_text`
// gets the text as it grows, whole characters only; if it fails, generation stops with its status. A prompt that leaves
// no room for an answer is refused.
Result<Generation> generate(LlamaSession& session, const Tokenizer& tokenizer, std::span<const int32_t> prompt,
                            const GenerateOptions& options,
                            const std::function<Status(std::string_view text)>& on_text);

}  // namespace opst::model

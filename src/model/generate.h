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
  stop,         // the model ended its text
  length,       // max_tokens
  context,      // the session has no room for another token
  interrupted,  // continue_sequence was told to
};
const char* to_string(FinishReason reason);

struct GenerateOptions {
  int64_t max_tokens = 256;
  bool ignore_end = false;  // go on behind an end token
  SamplingOptions sampling = {};
};

struct Generation {
  std::vector<int32_t> tokens;  // the ending one included
  std::string text;             // of `tokens` without hidden ones; UTF-8, invalid bytes replaced by U+FFFD
  FinishReason finish_reason = FinishReason::length;
  double ttft_ms = 0;                         // from the start to the first token; 0 where there is none
  double prefill_tokens_per_s = 0;            // prompt tokens over the time until their logits are there
  std::optional<double> tpot_ms;              // mean time of every token but the first; none where there is one only
  std::optional<double> decode_tokens_per_s;  // 1000 / tpot_ms
};

// Gets the text as it grows, whole characters only; if it fails, generation stops with its status.
using TextReader = std::function<Status(std::string_view text)>;

// Feeds `prompt` to an empty session and samples until an end token (Tokenizer::is_end), max_tokens, or the context is
// full. A prompt that leaves no room for an answer is refused; a logit that is not finite is an error.
Result<Generation> generate(LlamaSession& session, const Tokenizer& tokenizer, std::span<const int32_t> prompt,
                            const GenerateOptions& options, const TextReader& on_text,
                            const std::function<bool()>& interrupted = {});

// The same behind what the session holds, with a sampler that lives on; options.sampling is not read. `interrupted` is
// asked before every step and many times a second within one, and ends the generation where it says so: while the
// tokens are fed (the session has taken none of them then) or after any sampled one. The last sampled token has not
// been fed.
Result<Generation> continue_sequence(LlamaSession& session, const Tokenizer& tokenizer, Sampler& sampler,
                                     std::span<const int32_t> tokens, const GenerateOptions& options,
                                     const TextReader& on_text, const std::function<bool()>& interrupted);

}  // namespace opst::model

#include "model/generate.h"

#include <chrono>

#include "model/utf8.h"

namespace opst::model {

const char* to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::stop:
      return "stop";
    case FinishReason::length:
      return "length";
    case FinishReason::context:
      return "context";
  }
  return "unknown";
}

Result<Generation> generate(LlamaSession& session, const Tokenizer& tokenizer, std::span<const int32_t> prompt,
                            const GenerateOptions& options,
                            const std::function<Status(std::string_view text)>& on_text) {
  const auto str = [](auto value) { return std::to_string(value); };
  if (tokenizer.vocab_size() != session.config().vocab_size) {
    return Status::invalid_argument("the tokenizer has " + str(tokenizer.vocab_size()) + " tokens, but the model has " +
                                    str(session.config().vocab_size));
  }
  if (options.max_tokens < 1) {
    return Status::invalid_argument("max_tokens is " + str(options.max_tokens) + ", must be >= 1");
  }
  const auto prompt_tokens = static_cast<int64_t>(prompt.size());
  if (prompt_tokens >= session.context()) {
    return Status::invalid_argument("the prompt has " + str(prompt_tokens) +
                                    " tokens, which leaves no room in a context of " + str(session.context()));
  }
  Result<Sampler> created = Sampler::create(options.sampling);
  if (!created.ok()) return created.status();
  Sampler& sampler = created.value();

  using Clock = std::chrono::steady_clock;
  const auto ms = [](Clock::duration duration) { return std::chrono::duration<double, std::milli>(duration).count(); };
  Generation generation;
  Utf8Stream stream;
  const auto emit = [&](std::string_view text) {
    generation.text += text;
    return text.empty() ? Status() : on_text(text);
  };

  session.reset();
  const Clock::time_point start = Clock::now();
  Result<std::span<const float>> logits = session.feed(prompt);
  if (!logits.ok()) return logits.status();
  generation.prefill_tokens_per_s = static_cast<double>(prompt_tokens) * 1000.0 / ms(Clock::now() - start);
  Clock::time_point first_token, last_token;
  for (;;) {
    const Result<int32_t> token = sampler.next(logits.value());
    if (!token.ok()) return token.status();
    last_token = Clock::now();
    if (generation.tokens.empty()) first_token = last_token;
    generation.tokens.push_back(token.value());
    if (!tokenizer.is_special(token.value())) {
      if (Status status = emit(stream.push(tokenizer.piece(token.value()))); !status.ok()) return status;
    }
    const auto generated = static_cast<int64_t>(generation.tokens.size());
    if (token.value() == tokenizer.end_token() && !options.ignore_end) {
      generation.finish_reason = FinishReason::stop;
      break;
    }
    if (generated == options.max_tokens) {
      generation.finish_reason = FinishReason::length;
      break;
    }
    if (prompt_tokens + generated == session.context()) {
      generation.finish_reason = FinishReason::context;
      break;
    }
    logits = session.feed({&generation.tokens.back(), 1});
    if (!logits.ok()) return logits.status();
  }
  if (Status status = emit(stream.finish()); !status.ok()) return status;

  generation.ttft_ms = ms(first_token - start);
  if (const size_t n = generation.tokens.size(); n > 1) {
    generation.tpot_ms = ms(last_token - first_token) / static_cast<double>(n - 1);
    generation.decode_tokens_per_s = 1000.0 / *generation.tpot_ms;
  }
  return generation;
}

}  // namespace opst::model

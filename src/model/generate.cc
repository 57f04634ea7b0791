#include "model/generate.h"

#include <chrono>

#include "core/guarded.h"
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
    case FinishReason::interrupted:
      return "interrupted";
  }
  return "unknown";
}

namespace {

std::string str(int64_t value) { return std::to_string(value); }

Status check_continuation(const LlamaSession& session, const Tokenizer& tokenizer, std::span<const int32_t> tokens,
                          const GenerateOptions& options) {
  if (tokenizer.vocab_size() != session.config().vocab_size) {
    return Status::invalid_argument("the tokenizer has " + str(tokenizer.vocab_size()) + " tokens, but the model has " +
                                    str(session.config().vocab_size));
  }
  if (options.max_tokens < 1) {
    return Status::invalid_argument("max_tokens is " + str(options.max_tokens) + ", must be >= 1");
  }
  const auto prompt_tokens = static_cast<int64_t>(tokens.size());
  if (session.position() + prompt_tokens >= session.context()) {
    const std::string behind = session.position() > 0 ? " behind " + str(session.position()) + " others" : "";
    return Status::invalid_argument("the prompt has " + str(prompt_tokens) + " tokens" + behind +
                                    ", which leaves no room in a context of " + str(session.context()));
  }
  return {};
}

}  // namespace

Result<Generation> generate(LlamaSession& session, const Tokenizer& tokenizer, std::span<const int32_t> prompt,
                            const GenerateOptions& options, const TextReader& on_text,
                            const std::function<bool()>& interrupted) try {
  Result<Sampler> sampler = Sampler::create(options.sampling);
  if (!sampler.ok()) return sampler.status();
  session.reset();
  return continue_sequence(session, tokenizer, sampler.value(), prompt, options, on_text, interrupted);
} catch (...) {
  return status_of_exception();
}

Result<Generation> continue_sequence(LlamaSession& session, const Tokenizer& tokenizer, Sampler& sampler,
                                     std::span<const int32_t> tokens, const GenerateOptions& options,
                                     const TextReader& on_text, const std::function<bool()>& interrupted) try {
  if (Status status = check_continuation(session, tokenizer, tokens, options); !status.ok()) return status;

  using Clock = std::chrono::steady_clock;
  const auto ms = [](Clock::duration duration) { return std::chrono::duration<double, std::milli>(duration).count(); };
  Generation generation;
  Utf8Stream stream;
  const auto emit = [&](std::string_view text) {
    generation.text += text;
    return text.empty() ? Status() : on_text(text);
  };

  const Clock::time_point start = Clock::now();
  if (interrupted && interrupted()) {
    generation.finish_reason = FinishReason::interrupted;
    return generation;
  }
  Result<std::span<const float>> logits = session.feed(tokens, interrupted);
  if (session.was_interrupted()) {
    generation.finish_reason = FinishReason::interrupted;
    return generation;
  }
  if (!logits.ok()) return logits.status();
  generation.prefill_tokens_per_s = static_cast<double>(tokens.size()) * 1000.0 / ms(Clock::now() - start);
  Clock::time_point first_token, last_token;
  for (;;) {
    const Result<int32_t> token = sampler.next(logits.value());
    if (!token.ok()) return token.status();
    last_token = Clock::now();
    if (generation.tokens.empty()) first_token = last_token;
    generation.tokens.push_back(token.value());
    if (!tokenizer.is_hidden(token.value())) {
      if (Status status = emit(stream.push(tokenizer.piece(token.value()))); !status.ok()) return status;
    }
    if (tokenizer.is_end(token.value()) && !options.ignore_end) {
      generation.finish_reason = FinishReason::stop;
      break;
    }
    if (static_cast<int64_t>(generation.tokens.size()) == options.max_tokens) {
      generation.finish_reason = FinishReason::length;
      break;
    }
    if (session.position() + 1 == session.context()) {
      generation.finish_reason = FinishReason::context;
      break;
    }
    if (interrupted && interrupted()) {
      generation.finish_reason = FinishReason::interrupted;
      break;
    }
    logits = session.feed({&generation.tokens.back(), 1}, interrupted);
    if (session.was_interrupted()) {
      generation.finish_reason = FinishReason::interrupted;
      break;
    }
    if (!logits.ok()) return logits.status();
  }
  if (Status status = emit(stream.finish()); !status.ok()) return status;

  generation.ttft_ms = ms(first_token - start);
  if (const size_t n = generation.tokens.size(); n > 1) {
    generation.tpot_ms = ms(last_token - first_token) / static_cast<double>(n - 1);
    generation.decode_tokens_per_s = 1000.0 / *generation.tpot_ms;
  }
  return generation;
} catch (...) {
  return status_of_exception();
}

}  // namespace opst::model

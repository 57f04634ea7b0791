#include "model/conversation.h"

#include <span>

#include "core/guarded.h"

namespace opst::model {

Result<Conversation> Conversation::create(LlamaSession& session, const Tokenizer& tokenizer,
                                          const ChatTemplate& chat_template, std::optional<std::string> system,
                                          const SamplingOptions& sampling) try {
  Result<Sampler> sampler = Sampler::create(sampling);
  if (!sampler.ok()) return sampler.status();
  Conversation conversation(session, tokenizer, chat_template, std::move(system), std::move(sampler.value()));
  const Result<std::vector<int32_t>> shortest = conversation.turn("");
  if (!shortest.ok()) return shortest.status();
  if (static_cast<int64_t>(shortest.value().size()) >= session.context()) {
    return Status::invalid_argument(
        "the system message and the marks of one turn have " + std::to_string(shortest.value().size()) +
        " tokens, which leaves no room in a context of " + std::to_string(session.context()));
  }
  return conversation;
} catch (...) {
  return status_of_exception();
}

Result<std::vector<int32_t>> Conversation::turn(const std::string& message) const {
  if (!ids_.empty()) return template_.next({"user", message});
  std::vector<ChatMessage> messages;
  if (system_) messages.push_back({"system", *system_});
  messages.push_back({"user", message});
  return template_.prompt(messages);
}

Result<Generation> Conversation::answer(const std::string& message, int64_t max_tokens, const TextReader& on_text,
                                        const std::function<bool()>& interrupted) try {
  const Result<std::vector<int32_t>> turn = this->turn(message);
  if (!turn.ok()) return turn.status();
  const auto str = [](auto number) { return std::to_string(number); };
  if (tokens() + static_cast<int64_t>(turn.value().size()) >= session_->context()) {
    const std::string before = ids_.empty() ? "" : " and the conversation " + str(tokens());
    return Status::invalid_argument("the message has " + str(turn.value().size()) + " tokens" + before +
                                    ", which leaves no room in a context of " + str(session_->context()));
  }
  ids_.insert(ids_.end(), turn.value().begin(), turn.value().end());
  Result<Generation> generation =
      continue_sequence(*session_, *tokenizer_, sampler_,
                        std::span<const int32_t>(ids_).subspan(static_cast<size_t>(session_->position())),
                        {.max_tokens = max_tokens}, on_text, interrupted);
  if (!generation.ok()) {
    reset();
    return generation;
  }
  const std::vector<int32_t>& answer = generation.value().tokens;
  const bool ended = generation.value().finish_reason == FinishReason::stop;
  ids_.insert(ids_.end(), answer.begin(), answer.end() - (ended ? 1 : 0));
  return generation;
} catch (...) {
  reset();
  return status_of_exception();
}

void Conversation::reset() {
  ids_.clear();
  session_->reset();
}

}  // namespace opst::model

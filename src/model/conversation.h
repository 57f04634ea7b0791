// Conversation: turns of a user and a model in one session. The history stays in the session's cache: a turn feeds what
// is new, and nothing of it again.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "model/generate.h"
#include "model/prompt.h"

namespace opst::model {

class Conversation {
 public:
  // Session and tokenizer must outlive it and stay where they are; the session is its own from now on. Without `system`
  // the template's own system message begins it.
  static Result<Conversation> create(LlamaSession& session, const Tokenizer& tokenizer,
                                     const ChatTemplate& chat_template, std::optional<std::string> system,
                                     const SamplingOptions& sampling);

  // The answer to a message. invalid_argument, the conversation as it was: the message is not UTF-8, or the context has
  // no room for it and an answer of one token. Any other failure loses the history.
  // An interrupted answer stays in the history as far as it came, and so does a message whose reading was interrupted:
  // the next turn reads it first.
  Result<Generation> answer(const std::string& message, int64_t max_tokens, const TextReader& on_text,
                            const std::function<bool()>& interrupted);

  // Starts anew behind the system message.
  void reset();

  // Tokens of the history, all turns and their marks.
  int64_t tokens() const { return static_cast<int64_t>(ids_.size()); }

 private:
  Conversation(LlamaSession& session, const Tokenizer& tokenizer, const ChatTemplate& chat_template,
               std::optional<std::string> system, Sampler sampler)
      : session_(&session),
        tokenizer_(&tokenizer),
        template_(chat_template),
        system_(std::move(system)),
        sampler_(std::move(sampler)) {
    session_->reset();
  }
  Result<std::vector<int32_t>> turn(const std::string& message) const;

  LlamaSession* session_;
  const Tokenizer* tokenizer_;
  ChatTemplate template_;
  std::optional<std::string> system_;
  Sampler sampler_;
  // The history but for an answer's end token, which the next turn puts there. The session holds its beginning.
  std::vector<int32_t> ids_;
};

}  // namespace opst::model

// From what a user wrote to the ids that the model reads.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/gguf.h"
#include "model/tokenizer.h"

namespace opst::model {

// How a text becomes ids, the same for whoever reads one: generation, perplexity, logits, `opst tokenize`.
struct TextOptions {
  bool add_bos = true;        // the tokenizer's leading token, if it has one, goes in front; never a second one
  bool parse_special = true;  // the names of control tokens become those tokens, as in Tokenizer::encode
};
Result<std::vector<int32_t>> text_ids(const Tokenizer& tokenizer, std::string_view text,
                                      const TextOptions& options = {});

struct ChatMessage {
  std::string role;  // system, user, assistant
  std::string content;
};

// ChatML, for models whose template (tokenizer.chat_template) is the one of SmolLM2; any other is refused. The
// template's markers are control tokens; role and content are plain text whatever they contain, so that no text can
// pose as a turn. The tokenizer's leading token goes in front unless the template begins with it.
class ChatTemplate {
 public:
  // The tokenizer must outlive it and stay where it is; of the file nothing is kept.
  static Result<ChatTemplate> from_gguf(const GgufFile& file, const Tokenizer& tokenizer);

  // A conversation up to where the assistant's answer begins. Puts in the template's own system message where the first
  // one is not from `system`.
  Result<std::vector<int32_t>> prompt(const std::vector<ChatMessage>& messages) const;
  // The ids behind an answer, whole or broken off, that lacks its end token: the end token, the message, and the
  // beginning of the next answer.
  Result<std::vector<int32_t>> next(const ChatMessage& message) const;

 private:
  ChatTemplate(const Tokenizer& tokenizer, int32_t turn_begin, int32_t turn_end)
      : tokenizer_(&tokenizer), turn_begin_(turn_begin), turn_end_(turn_end) {}
  Status append_turn(const ChatMessage& message, std::vector<int32_t>& ids) const;
  Status append_plain(std::string_view text, std::vector<int32_t>& ids) const;
  Result<std::vector<int32_t>> up_to_answer(std::vector<int32_t> ids, const std::vector<ChatMessage>& messages) const;

  const Tokenizer* tokenizer_;
  int32_t turn_begin_, turn_end_;
};

// ChatTemplate's prompt, for one conversation.
Result<std::vector<int32_t>> chat_prompt(const GgufFile& file, const Tokenizer& tokenizer,
                                         const std::vector<ChatMessage>& messages);

}  // namespace opst::model

// From what a user wrote to the ids that the model reads.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/gguf.h"
#include "model/tokenizer.h"

namespace opst::model {

// One text, behind the tokenizer's leading token if it has one. parse_special as in Tokenizer::encode.
Result<std::vector<int32_t>> raw_prompt(const Tokenizer& tokenizer, std::string_view text, bool parse_special);

struct ChatMessage {
  std::string role;  // system, user, assistant
  std::string content;
};

// ChatML, for models whose template (tokenizer.chat_template) is the one of SmolLM2; any other is refused. The
// template's markers are special tokens; role and content are plain text whatever they contain, so that no text can
// pose as a turn. Puts in the template's own system message where the first one is not from `system`, and ends where
// the assistant's answer begins.
Result<std::vector<int32_t>> chat_prompt(const GgufFile& file, const Tokenizer& tokenizer,
                                         const std::vector<ChatMessage>& messages);

}  // namespace opst::model

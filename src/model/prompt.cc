#include "model/prompt.h"

#include "core/guarded.h"

namespace opst::model {

namespace {

// What the only known template says, as its identity: Jinja itself is not interpreted.
constexpr std::string_view kSmolLm2Template =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are "
    "a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}";
constexpr const char* kSmolLm2System = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";

// A leading token marks the beginning of a text, so a second one would be text that no model has been trained on.
void put_in_front(std::optional<int32_t> leading_token, std::vector<int32_t>& ids) {
  if (leading_token && (ids.empty() || ids.front() != *leading_token)) ids.insert(ids.begin(), *leading_token);
}

}  // namespace

Result<std::vector<int32_t>> text_ids(const Tokenizer& tokenizer, std::string_view text,
                                      const TextOptions& options) try {
  Result<std::vector<int32_t>> ids = tokenizer.encode(text, options.parse_special);
  if (ids.ok() && options.add_bos) put_in_front(tokenizer.leading_token(), ids.value());
  return ids;
} catch (...) {
  return status_of_exception();
}

Result<ChatTemplate> ChatTemplate::from_gguf(const GgufFile& file, const Tokenizer& tokenizer) try {
  const Result<std::string_view> chat_template = file.string("tokenizer.chat_template");
  if (!chat_template.ok()) return chat_template.status();
  if (chat_template.value() != kSmolLm2Template) {
    return file.error("tokenizer.chat_template is not the one known chat template (SmolLM2's ChatML): " +
                      quoted(chat_template.value()));
  }
  const auto turn_begin = tokenizer.find_named("<|im_start|>"), turn_end = tokenizer.find_named("<|im_end|>");
  if (!turn_begin || !turn_end) return file.error("the tokens <|im_start|> and <|im_end|> are missing");
  return ChatTemplate(tokenizer, *turn_begin, *turn_end);
} catch (...) {
  return status_of_exception();
}

Result<std::vector<int32_t>> ChatTemplate::prompt(const std::vector<ChatMessage>& messages) const try {
  std::vector<int32_t> ids;
  if (messages.empty() || messages[0].role != "system") {
    if (Status status = append_turn({"system", kSmolLm2System}, ids); !status.ok()) return status;
  }
  Result<std::vector<int32_t>> all = up_to_answer(std::move(ids), messages);
  if (all.ok()) put_in_front(tokenizer_->leading_token(), all.value());
  return all;
} catch (...) {
  return status_of_exception();
}

Result<std::vector<int32_t>> ChatTemplate::next(const ChatMessage& message) const try {
  std::vector<int32_t> ids = {turn_end_};
  if (Status status = append_plain("\n", ids); !status.ok()) return status;
  return up_to_answer(std::move(ids), {message});
} catch (...) {
  return status_of_exception();
}

Result<std::vector<int32_t>> ChatTemplate::up_to_answer(std::vector<int32_t> ids,
                                                        const std::vector<ChatMessage>& messages) const {
  for (const ChatMessage& message : messages) {
    if (Status status = append_turn(message, ids); !status.ok()) return status;
  }
  ids.push_back(turn_begin_);
  if (Status status = append_plain("assistant\n", ids); !status.ok()) return status;
  return ids;
}

Status ChatTemplate::append_turn(const ChatMessage& message, std::vector<int32_t>& ids) const {
  ids.push_back(turn_begin_);
  if (Status status = append_plain(message.role + "\n" + message.content, ids); !status.ok()) return status;
  ids.push_back(turn_end_);
  return append_plain("\n", ids);
}

Status ChatTemplate::append_plain(std::string_view text, std::vector<int32_t>& ids) const {
  const Result<std::vector<int32_t>> more = tokenizer_->encode(text, false);
  if (more.ok()) ids.insert(ids.end(), more.value().begin(), more.value().end());
  return more.status();
}

Result<std::vector<int32_t>> chat_prompt(const GgufFile& file, const Tokenizer& tokenizer,
                                         const std::vector<ChatMessage>& messages) try {
  const Result<ChatTemplate> chat_template = ChatTemplate::from_gguf(file, tokenizer);
  if (!chat_template.ok()) return chat_template.status();
  return chat_template.value().prompt(messages);
} catch (...) {
  return status_of_exception();
}

}  // namespace opst::model

#include "model/prompt.h"

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

}  // namespace

Result<std::vector<int32_t>> raw_prompt(const Tokenizer& tokenizer, std::string_view text, bool parse_special) {
  Result<std::vector<int32_t>> ids = tokenizer.encode(text, parse_special);
  if (ids.ok() && tokenizer.leading_token()) ids.value().insert(ids.value().begin(), *tokenizer.leading_token());
  return ids;
}

Result<std::vector<int32_t>> chat_prompt(const GgufFile& file, const Tokenizer& tokenizer,
                                         const std::vector<ChatMessage>& messages) {
  const Result<std::string_view> chat_template = file.string("tokenizer.chat_template");
  if (!chat_template.ok()) return chat_template.status();
  if (chat_template.value() != kSmolLm2Template) {
    return file.error("tokenizer.chat_template is not the one known chat template (SmolLM2's ChatML): " +
                      quoted(chat_template.value()));
  }
  const auto turn_begin = tokenizer.find_special("<|im_start|>"), turn_end = tokenizer.find_special("<|im_end|>");
  if (!turn_begin || !turn_end) return file.error("the special tokens <|im_start|> and <|im_end|> are missing");

  std::vector<int32_t> ids;
  if (tokenizer.leading_token()) ids.push_back(*tokenizer.leading_token());
  Status status;
  const auto append_plain = [&](const std::string& text) {
    const Result<std::vector<int32_t>> more = tokenizer.encode(text, false);
    if (more.ok()) {
      ids.insert(ids.end(), more.value().begin(), more.value().end());
    } else {
      status = more.status();
    }
  };
  const auto append_turn = [&](const ChatMessage& message) {
    ids.push_back(*turn_begin);
    append_plain(message.role + "\n" + message.content);
    ids.push_back(*turn_end);
    append_plain("\n");
  };
  if (messages.empty() || messages[0].role != "system") append_turn({"system", kSmolLm2System});
  for (const ChatMessage& message : messages) append_turn(message);
  ids.push_back(*turn_begin);
  append_plain("assistant\n");
  if (!status.ok()) return status;
  return ids;
}

}  // namespace opst::model

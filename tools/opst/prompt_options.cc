#include "prompt_options.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "model/utf8.h"

namespace opst::tools {

std::string read_file(const std::string& path) {
  const auto fail = [&] { run_error(path + ": cannot read: " + std::strerror(errno)); };
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (file == nullptr) fail();
  // A device such as /dev/zero has no end.
  constexpr size_t kMaxBytes = size_t{1} << 28;
  std::string content;
  char block[1 << 16];
  while (const size_t got = std::fread(block, 1, sizeof block, file.get())) {
    content.append(block, got);
    if (content.size() > kMaxBytes) run_error(path + ": a text of more than " + std::to_string(kMaxBytes) + " bytes");
  }
  if (std::ferror(file.get()) != 0) fail();
  return content;
}

void TextArguments::add_to(CLI::App& command) {
  command.add_flag("--no-special", no_special, "The names of control tokens (<|im_end|>) are plain text, not tokens");
  command.add_flag("--no-bos", no_bos, "No leading token in front of the text, even where the model file asks for one");
}

void PromptOptions::add_to(CLI::App& command) {
  command.add_option("-m,--model", model_path, "Model file (GGUF)")->required()->type_name("FILE");
  CLI::Option* argument = command.add_option("-p,--prompt", prompt, "The prompt")->type_name("TEXT");
  command.add_option("-f,--prompt-file", prompt_path, "A file that holds the prompt, taken byte for byte")
      ->type_name("FILE")
      ->excludes(argument);
  as_tokens.add_to(command);
}

std::string PromptOptions::text() const {
  if (prompt.empty() && prompt_path.empty())
    usage_error("the prompt is empty: give one with --prompt or --prompt-file");
  const std::string text = prompt_path.empty() ? prompt : read_file(prompt_path);
  if (text.empty()) usage_error("the prompt is empty");
  if (!model::is_valid_utf8(text)) usage_error("the prompt is not valid UTF-8");
  return text;
}

}  // namespace opst::tools

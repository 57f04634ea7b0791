#include "prompt_options.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "model/utf8.h"

namespace opst::tools {

void PromptOptions::add_to(CLI::App& command) {
  command.add_option("-m,--model", model_path, "Model file (GGUF)")->required()->type_name("FILE");
  CLI::Option_group* source = command.add_option_group("prompt");
  source->add_option("-p,--prompt", prompt, "The prompt")->type_name("TEXT");
  source->add_option("-f,--prompt-file", prompt_path, "A file that holds the prompt, taken byte for byte")
      ->type_name("FILE");
  source->require_option(1);
  command.add_flag("--no-special", no_special, "Special tokens written in the prompt are plain text");
}

std::string PromptOptions::text() const {
  std::string text = prompt;
  if (!prompt_path.empty()) {
    std::ifstream file(prompt_path, std::ios::binary);
    std::ostringstream content;
    if (!file || (file.peek() != EOF && !(content << file.rdbuf()))) {
      run_error(prompt_path + ": cannot read: " + std::strerror(errno));
    }
    text = content.str();
  }
  if (text.empty()) usage_error("the prompt is empty");
  if (!model::is_valid_utf8(text)) usage_error("the prompt is not valid UTF-8");
  return text;
}

ModelFile open_model(const std::string& path) {
  model::GgufFile file = value_or_fail(model::GgufFile::open(path));
  model::Tokenizer tokenizer = value_or_fail(model::Tokenizer::from_gguf(file));
  return {std::move(file), std::move(tokenizer)};
}

}  // namespace opst::tools

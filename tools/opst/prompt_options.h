// --model, --prompt, --prompt-file and --no-special, which `generate` and `tokenize` share.
#pragma once

#include <string>

#include "command.h"
#include "model/gguf.h"
#include "model/tokenizer.h"

namespace opst::tools {

struct PromptOptions {
  std::string model_path;
  std::string prompt;
  std::string prompt_path;
  bool no_special = false;

  void add_to(CLI::App& command);
  // The prompt's bytes: the argument's, or the file's as they are. Not empty, valid UTF-8; else a usage error.
  std::string text() const;
};

// The file's bytes; run_error where it cannot be read.
std::string read_file(const std::string& path);

struct ModelFile {
  model::GgufFile file;
  model::Tokenizer tokenizer;
};
ModelFile open_model(const std::string& path);

}  // namespace opst::tools

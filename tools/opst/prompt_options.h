// How the subcommands take a text and a model: --no-special and --no-bos wherever a text becomes tokens; --model,
// --prompt and --prompt-file, which `generate` and `tokenize` share.
#pragma once

#include <string>

#include "command.h"
#include "model/model_file.h"
#include "model/prompt.h"

namespace opst::tools {

// --no-special, --no-bos
struct TextArguments {
  bool no_special = false, no_bos = false;

  void add_to(CLI::App& command);
  model::TextOptions options() const { return {.add_bos = !no_bos, .parse_special = !no_special}; }
};

struct PromptOptions {
  std::string model_path;
  std::string prompt;
  std::string prompt_path;
  TextArguments as_tokens;

  void add_to(CLI::App& command);
  // The prompt's bytes: the argument's, or the file's as they are. Not empty, valid UTF-8; else a usage error.
  std::string text() const;
};

// The file's bytes; run_error where it cannot be read.
std::string read_file(const std::string& path);

}  // namespace opst::tools

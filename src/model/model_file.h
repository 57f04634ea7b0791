// ModelFile: a GGUF file that can answer, checked as a whole before anything large of it is read.
#pragma once

#include <string>

#include "model/gguf.h"
#include "model/llama.h"
#include "model/tokenizer.h"

namespace opst::model {

struct ModelFile {
  GgufFile file;
  LlamaConfig config;
  Tokenizer tokenizer;

  // Refused: whatever GgufFile::open, read_llama_config or Tokenizer::from_gguf refuse, and a tokenizer that has not as
  // many tokens as the model has rows in its embedding.
  static Result<ModelFile> open(const std::string& path);
};

}  // namespace opst::model

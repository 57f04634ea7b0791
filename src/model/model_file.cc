#include "model/model_file.h"

#include <utility>

#include "core/guarded.h"

namespace opst::model {

Result<ModelFile> ModelFile::open(const std::string& path) try {
  Result<GgufFile> file = GgufFile::open(path);
  if (!file.ok()) return file.status();
  const Result<LlamaConfig> config = read_llama_config(file.value());
  if (!config.ok()) return config.status();
  Result<Tokenizer> tokenizer = Tokenizer::from_gguf(file.value());
  if (!tokenizer.ok()) return tokenizer.status();
  if (tokenizer.value().vocab_size() != config.value().vocab_size) {
    return file.value().error("the tokenizer has " + std::to_string(tokenizer.value().vocab_size()) +
                              " tokens, but the model has " + std::to_string(config.value().vocab_size));
  }
  return ModelFile{std::move(file.value()), config.value(), std::move(tokenizer.value())};
} catch (...) {
  return status_of_exception();
}

}  // namespace opst::model

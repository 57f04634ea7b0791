// libFuzzer target of all that takes a file from anywhere: its reader, the tokenizer, loading, and a session of two
// tokens.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <utility>
#include <vector>

#include "model/gguf.h"
#include "model/llama.h"
#include "model/tokenizer.h"

using opst::model::GgufFile;
using opst::model::LlamaSession;
using opst::model::Tokenizer;

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

// What loads can be fed: logits for every token of the vocabulary, whatever the numbers in the file.
void run_model(const GgufFile& file) {
  static opst::Context context = std::move(opst::Context::create({.num_threads = 2}).value());
  const opst::Result<opst::model::LlamaModel> model = opst::model::LlamaModel::load(context, file);
  if (!model.ok()) return;
  const opst::model::LlamaConfig& config = model.value().config();
  opst::model::SessionOptions options;
  options.context = std::min<int64_t>(config.max_context, 8);
  opst::Result<LlamaSession> session = LlamaSession::create(context, model.value(), options);
  if (!session.ok()) return;
  const int32_t tokens[] = {0, static_cast<int32_t>(config.vocab_size - 1)};
  const auto count = static_cast<size_t>(std::min<int64_t>(options.context, 2));
  const opst::Result<std::span<const float>> logits = session.value().feed(std::span(tokens).first(count));
  require(logits.ok() ? logits.value().size() == static_cast<size_t>(config.vocab_size)
                      : session.value().position() == 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const opst::Result<GgufFile> file = GgufFile::parse("f.gguf", {reinterpret_cast<const std::byte*>(data), size});
  if (!file.ok()) return 0;
  size_t sum = 0;
  for (const opst::model::GgufTensor& tensor : file.value().tensors()) {
    std::vector<std::byte> values(tensor.size_bytes);
    if (!file.value().read(tensor, values).ok()) std::abort();
    for (const std::byte byte : values) sum += static_cast<size_t>(byte);
  }
  run_model(file.value());
  const opst::Result<Tokenizer> tokenizer = Tokenizer::from_gguf(file.value());
  if (!tokenizer.ok()) return 0;
  for (const bool parse_special : {false, true}) {
    const opst::Result<std::vector<int32_t>> ids = tokenizer.value().encode("ab <|a|> ba  12 \xC3\xA9", parse_special);
    if (!ids.ok()) continue;
    for (const int32_t id : ids.value()) {
      if (id < 0 || id >= tokenizer.value().vocab_size()) std::abort();
      sum += tokenizer.value().piece(id).size();
    }
  }
  volatile size_t sink = sum;
  (void)sink;
  return 0;
}

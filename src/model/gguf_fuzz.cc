// libFuzzer target of the two readers that take a file from anywhere: GgufFile::parse and Tokenizer::from_gguf.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "model/gguf.h"
#include "model/tokenizer.h"

using opst::model::GgufFile;
using opst::model::Tokenizer;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const opst::Result<GgufFile> file = GgufFile::parse("f.gguf", {reinterpret_cast<const std::byte*>(data), size});
  if (!file.ok()) return 0;
  size_t sum = 0;
  for (const opst::model::GgufTensor& tensor : file.value().tensors()) {
    for (const std::byte byte : tensor.data) sum += static_cast<size_t>(byte);
  }
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

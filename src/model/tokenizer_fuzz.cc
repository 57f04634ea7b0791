// libFuzzer target of Tokenizer::encode with a small vocabulary. The first byte chooses parse_special, the others are
// the text. UTF-8 comes back to the byte (the vocabulary lacks 04, which is dropped); anything else is refused.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "model/tiny_model.h"
#include "model/tokenizer.h"
#include "model/utf8.h"

using namespace opst::model;

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

Tokenizer tiny_tokenizer() {
  GgufWriter writer;
  write_tiny_tokenizer(writer);
  const std::string bytes = writer.bytes();
  return std::move(Tokenizer::from_gguf(GgufFile::parse("tiny.gguf", as_bytes(bytes)).value()).value());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Tokenizer tokenizer = tiny_tokenizer();
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const opst::Result<std::vector<int32_t>> ids = tokenizer.encode(text, data[0] % 2 == 1);
  require(ids.ok() == is_valid_utf8(text));
  if (!ids.ok()) return 0;
  std::string back, expected(text);
  for (const int32_t id : ids.value()) {
    require(id >= 0 && id < tokenizer.vocab_size());
    require(data[0] % 2 == 1 || !tokenizer.is_hidden(id));
    back += tokenizer.piece(id);
  }
  std::erase(expected, '\x04');
  require(back == expected);
  return 0;
}

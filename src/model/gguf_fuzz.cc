// libFuzzer target of the two readers that take a file from anywhere: GgufFile::parse and Tokenizer::from_gguf.
// The last argument is the corpus folder; a well-formed small model is put there first, or mutation would never get
// past the magic number.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "model/gguf.h"
#include "model/gguf_writer.h"
#include "model/tokenizer.h"

using opst::model::GgufFile;
using opst::model::GgufWriter;
using opst::model::Tokenizer;

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  GgufWriter writer;
  writer.string("general.architecture", "llama").u32("llama.block_count", 1).f32("llama.rope.freq_base", 1e5f);
  writer.string("tokenizer.ggml.model", "gpt2").string("tokenizer.ggml.pre", "smollm");
  writer.strings("tokenizer.ggml.tokens", {"<|a|>", "<|b|>", "a", "b", "ab", "Ġ"});
  writer.integers("tokenizer.ggml.token_type", {3, 3, 1, 1, 1, 1}).strings("tokenizer.ggml.merges", {"a b"});
  writer.u32("tokenizer.ggml.bos_token_id", 0).u32("tokenizer.ggml.eos_token_id", 1);
  writer.boolean("tokenizer.ggml.add_bos_token", false);
  writer.tensor("output_norm.weight", {32}, std::vector<float>(32, 1.0f));
  writer.tensor("token_embd.weight", {32, 6}, 8, std::string(34 * 6, '\1'));
  std::ofstream(std::string((*argv)[*argc - 1]) + "/seed", std::ios::binary) << writer.bytes();
  return 0;
}

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

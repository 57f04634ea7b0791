// A llama model of a few hundred KB with random weights and a small byte-level vocabulary, for tests.
//
//   TinyModel model = make_tiny_model();
//   std::string file = model.writer.bytes();            // GGUF
//   model.weights.at("output_norm.weight")              // what the file's blocks stand for, [rows * columns]
//
// Matrices take the tensor types of the options in turn.
#pragma once

#include <cmath>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "model/gguf.h"
#include "model/gguf_writer.h"
#include "model/utf8.h"
#include "quant/random_blocks.h"
#include "quant/reference.h"

namespace opst::model {

struct TinyModelOptions {
  int64_t num_layers = 2, num_heads = 3, num_kv_heads = 1, head_dim = 32, ffn_size = 160, context = 512;
  bool separate_output = false;  // an output.weight beside token_embd.weight
  int64_t extra_rows = 0;        // of the embedding, for which there are no tokens
  float rope_base = 10000.0f;
  uint32_t seed = 1;
  // TensorType::id of any QuantFormat: Q4_1, Q8_0, F16, F32. Blocks of 256 values need sizes that are multiples of 256.
  std::vector<uint32_t> types = {3, 8, 1, 0};
  uint32_t embedding_type = 8;
  // A mixture where there are experts, each of ffn_size, and a shared one where it has a size.
  int64_t num_experts = 0, experts_used = 2, shared_size = 0;
  std::string architecture = "llama";  // of the keys; the tensors are always those of llama
};

struct TinyModel {
  TinyModelOptions options;
  GgufWriter writer;
  std::map<std::string, std::vector<float>> weights;
  int64_t vocab_size = 0;
  int64_t width() const { return options.num_heads * options.head_dim; }
};

inline constexpr const char* kSmolLm2ChatTemplate =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are "
    "a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}";

// Ids: 0 <|endoftext|>, 1 <|im_start|>, 2 <|im_end|>, then all bytes but 04 and FF, then the merges' results. Returns
// the number of tokens.
inline int64_t write_tiny_tokenizer(GgufWriter& writer) {
  std::vector<std::string> tokens = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
  std::vector<int32_t> types = {3, 3, 3};
  char32_t next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    std::string symbol;
    append_utf8(symbol, printable ? static_cast<char32_t>(byte) : next++);
    if (byte != 0x04 && byte != 0xFF) tokens.push_back(symbol);
  }
  const std::vector<std::string> merges = {"h e",        "l l", "he ll", "hell o", "\u0120 w",      "o r",
                                           "\u0120w or", "a a", "aa aa", "aa a",   "\u00C3 \u00A9", "\u0120 \u0120"};
  for (const std::string& merge : merges) {
    const size_t space = merge.find(' ');
    tokens.push_back(merge.substr(0, space) + merge.substr(space + 1));
  }
  types.resize(tokens.size(), 1);
  writer.string("tokenizer.ggml.model", "gpt2").string("tokenizer.ggml.pre", "smollm");
  writer.strings("tokenizer.ggml.tokens", tokens).integers("tokenizer.ggml.token_type", types);
  writer.strings("tokenizer.ggml.merges", merges);
  writer.u32("tokenizer.ggml.bos_token_id", 1).u32("tokenizer.ggml.eos_token_id", 2);
  writer.string("tokenizer.chat_template", kSmolLm2ChatTemplate);
  return static_cast<int64_t>(tokens.size());
}

// IEEE binary16 of a value that it holds exactly: zero, or of normal size with at most 11 significant bits.
inline uint16_t exact_f16(float value) {
  if (value == 0.0f) return 0;
  int exponent = 0;
  const float fraction = std::frexp(std::fabs(value), &exponent);  // [0.5, 1)
  const auto mantissa = static_cast<unsigned>(fraction * 2048.0f) - 1024;
  return static_cast<uint16_t>((value < 0 ? 0x8000u : 0u) | static_cast<unsigned>(exponent + 14) << 10 | mantissa);
}

// Blocks of random bits with scales of the right size, and the values that the formats' equations give them.
inline std::string random_matrix_of_blocks(std::mt19937& random, QuantFormat format, int64_t rows, int64_t columns,
                                           std::vector<float>& values) {
  test::Random blocks(random());
  const std::vector<unsigned char> bytes =
      test::random_blocks(format, rows, columns, blocks, 0.03 / std::sqrt(static_cast<double>(columns)));
  const QuantMatrix matrix{format, rows, columns, bytes.data(), static_cast<int64_t>(bytes.size())};
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      values.push_back(static_cast<float>(reference::dequantized(matrix, row, column)));
    }
  }
  return {bytes.begin(), bytes.end()};
}

// A random [rows, columns] matrix in file form and what it stands for; values of about 1/sqrt(columns).
inline std::string random_matrix(std::mt19937& random, uint32_t type, int64_t rows, int64_t columns,
                                 std::vector<float>& values) {
  std::string bytes;
  values.clear();
  if (type != 0 && type != 1 && type != 3 && type != 8) {
    const QuantFormat format = parse_quant_format(find_tensor_type(type)->name).value();
    return random_matrix_of_blocks(random, format, rows, columns, values);
  }
  const int shift = static_cast<int>(std::lround(std::log2(std::sqrt(static_cast<double>(columns)))));
  const float unit = std::ldexp(1.0f, -shift);
  const auto uniform = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  const int64_t num_blocks = rows * columns / 32;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const float scale_step = uniform(0, 1) == 0 ? 1.0f : 0.5f;
    if (type == 0 || type == 1) {
      for (int i = 0; i < 32; ++i) {
        const float value = static_cast<float>(uniform(-1023, 1023)) / 512.0f * unit;
        values.push_back(value);
        if (type == 0) GgufWriter::append(bytes, value);
        if (type == 1) GgufWriter::append(bytes, exact_f16(value));
      }
    } else if (type == 3) {  // Q4_1: scale, minimum, 16 bytes: low halves are the first 16 elements
      const float scale = unit / 4.0f * scale_step, minimum = -unit * 2.0f * scale_step;
      GgufWriter::append(bytes, exact_f16(scale));
      GgufWriter::append(bytes, exact_f16(minimum));
      int quants[32];
      for (int& quant : quants) quant = uniform(0, 15);
      for (int i = 0; i < 16; ++i) bytes += static_cast<char>(quants[i] | quants[i + 16] << 4);
      for (const int quant : quants) values.push_back(static_cast<float>(quant) * scale + minimum);
    } else {  // Q8_0: scale, 32 bytes
      const float scale = unit / 64.0f * scale_step;
      GgufWriter::append(bytes, exact_f16(scale));
      for (int i = 0; i < 32; ++i) {
        const int quant = uniform(-127, 127);
        bytes += static_cast<char>(quant);
        values.push_back(static_cast<float>(quant) * scale);
      }
    }
  }
  return bytes;
}

inline TinyModel make_tiny_model(const TinyModelOptions& options = {}) {
  TinyModel model;
  model.options = options;
  GgufWriter& writer = model.writer;
  const std::string arch = options.architecture + ".";
  const auto u32 = [&](const char* key, int64_t value) { writer.u32(arch + key, static_cast<uint32_t>(value)); };
  writer.string("general.architecture", options.architecture);
  u32("block_count", options.num_layers);
  u32("context_length", options.context);
  u32("embedding_length", model.width());
  u32("feed_forward_length", options.ffn_size);
  u32("attention.head_count", options.num_heads);
  u32("attention.head_count_kv", options.num_kv_heads);
  u32("rope.dimension_count", options.head_dim);
  writer.f32(arch + "rope.freq_base", options.rope_base).f32(arch + "attention.layer_norm_rms_epsilon", 1e-5f);
  if (options.num_experts > 0) {
    u32("expert_count", options.num_experts);
    u32("expert_used_count", options.experts_used);
  }
  if (options.shared_size > 0) u32("expert_shared_feed_forward_length", options.shared_size);
  model.vocab_size = write_tiny_tokenizer(writer) + options.extra_rows;

  std::mt19937 random(options.seed);
  size_t turn = 0;
  const auto matrix = [&](const std::string& name, int64_t rows, int64_t columns, uint32_t type) {
    const std::string bytes = random_matrix(random, type, rows, columns, model.weights[name]);
    writer.tensor(name, {columns, rows}, type, bytes);
  };
  const auto next_type = [&] { return options.types[turn++ % options.types.size()]; };
  const auto norm = [&](const std::string& name) {
    std::vector<float>& values = model.weights[name];
    for (int64_t i = 0; i < model.width(); ++i) values.push_back(0.5f + static_cast<float>(random() % 256) / 256.0f);
    writer.tensor(name, {model.width()}, values);
  };
  const auto feed_forward = [&](const std::string& prefix, const std::string& suffix, int64_t size) {
    matrix(prefix + "ffn_gate" + suffix, size, model.width(), next_type());
    matrix(prefix + "ffn_up" + suffix, size, model.width(), next_type());
    matrix(prefix + "ffn_down" + suffix, model.width(), size, next_type());
  };
  const auto stack = [&](const std::string& name, int64_t rows, int64_t columns, uint32_t type) {
    const int64_t count = options.num_experts;
    const std::string bytes = random_matrix(random, type, count * rows, columns, model.weights[name]);
    writer.tensor(name, {columns, rows, count}, type, bytes);
  };
  const auto mixture = [&](const std::string& prefix) {
    matrix(prefix + "ffn_gate_inp.weight", options.num_experts, model.width(), 0);
    const uint32_t type = next_type();  // of gate and up
    stack(prefix + "ffn_gate_exps.weight", options.ffn_size, model.width(), type);
    stack(prefix + "ffn_up_exps.weight", options.ffn_size, model.width(), type);
    stack(prefix + "ffn_down_exps.weight", model.width(), options.ffn_size, next_type());
    if (options.shared_size > 0) feed_forward(prefix, "_shexp.weight", options.shared_size);
  };
  const int64_t kv_width = options.num_kv_heads * options.head_dim;
  matrix("token_embd.weight", model.vocab_size, model.width(), options.embedding_type);
  if (options.separate_output) matrix("output.weight", model.vocab_size, model.width(), 3);
  norm("output_norm.weight");
  for (int64_t layer = 0; layer < options.num_layers; ++layer) {
    const std::string prefix = "blk." + std::to_string(layer) + ".";
    norm(prefix + "attn_norm.weight");
    matrix(prefix + "attn_q.weight", model.width(), model.width(), next_type());
    matrix(prefix + "attn_k.weight", kv_width, model.width(), next_type());
    matrix(prefix + "attn_v.weight", kv_width, model.width(), next_type());
    matrix(prefix + "attn_output.weight", model.width(), model.width(), next_type());
    norm(prefix + "ffn_norm.weight");
    options.num_experts > 0 ? mixture(prefix) : feed_forward(prefix, ".weight", options.ffn_size);
  }
  return model;
}

}  // namespace opst::model

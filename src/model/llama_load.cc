// LlamaModel::load: from a GGUF file's tensors to packed weights.
#include <algorithm>
#include <cctype>
#include <cstring>
#include <unordered_set>

#include "core/guarded.h"
#include "model/llama.h"
#include "model/try.h"

namespace opst::model {

namespace {

std::string str(int64_t value) { return std::to_string(value); }

// The names of all formats as files spell them.
std::string supported_types() {
  std::string types;
  for (int i = 0; i < kNumQuantFormats; ++i) {
    if (i > 0) types += i + 1 < kNumQuantFormats ? ", " : " and ";
    for (const char* c = to_string(static_cast<QuantFormat>(i)); *c != 0; ++c) {
      types += static_cast<char>(std::toupper(static_cast<unsigned char>(*c)));
    }
  }
  return types;
}

int64_t aligned_bytes(const QuantMatrix& matrix) { return (matrix.size_bytes + 63) / 64 * 64; }

// Takes tensors from a file by name, checks their shapes and types, and knows which were taken. With Pass::check it
// reads and packs nothing.
class TensorSource {
 public:
  enum class Pass : uint8_t { check, pack };
  TensorSource(Context& context, const GgufFile& file, Pass pass) : context_(context), file_(file), pass_(pass) {}

  bool has(const std::string& name) const { return file_.find_tensor(name) != nullptr; }

  // f32 [size]
  Status vector(const std::string& name, int64_t size, Buffer& out) {
    const GgufTensor* tensor = nullptr;
    OPST_TRY(find(name, 1, size, 1, tensor));
    if (std::strcmp(tensor->type->name, "F32") != 0) {
      return file_.error("tensor '" + name + "' is " + to_string(*tensor) + ", expected type F32");
    }
    if (pass_ == Pass::check) return {};
    Result<Buffer> buffer = Buffer::allocate(size * static_cast<int64_t>(sizeof(float)));
    if (!buffer.ok()) return buffer.status();
    out = std::move(buffer.value());
    return file_.read(*tensor, {static_cast<std::byte*>(out.data()), tensor->size_bytes});
  }

  Status matrix(const std::string& name, int64_t rows, int64_t columns, PackedWeight& out) {
    std::vector<PackedWeight> one;
    OPST_TRY(matrices({{name, rows}}, columns, one));
    if (pass_ == Pass::pack) out = std::move(one[0]);
    return {};
  }

  // Matrices that multiply the same x, stacked into one weight where their types allow it, else one by one.
  struct Part {
    std::string name;
    int64_t rows;
  };
  Status matrices(const std::vector<Part>& parts, int64_t columns, std::vector<PackedWeight>& out) {
    std::vector<const GgufTensor*> tensors;
    std::vector<QuantMatrix> sources;
    bool stacked = true;
    for (const Part& part : parts) {
      const GgufTensor* tensor = nullptr;
      OPST_TRY(find(part.name, 2, columns, part.rows, tensor));
      const std::optional<QuantFormat> format = parse_quant_format(tensor->type->name);
      if (!format) {
        return file_.error("tensor '" + part.name + "' is of type " + tensor->type->name + ", but only " +
                           supported_types() + " are supported");
      }
      if (pass_ == Pass::check && !file_.has_data(*tensor)) {
        return file_.error("tensor '" + part.name + "' has no data, as the file has a hole there: is it complete?");
      }
      tensors.push_back(tensor);
      sources.push_back({*format, part.rows, columns, nullptr, static_cast<int64_t>(tensor->size_bytes)});
      stacked = stacked && *format == sources[0].format && (&part == &parts.back() || part.rows % 16 == 0);
    }
    if (pass_ == Pass::check) return {};
    const size_t step = stacked ? sources.size() : 1;
    for (size_t i = 0; i < sources.size(); i += step) {
      OPST_TRY(pack(std::span(tensors).subspan(i, step), std::span(sources).subspan(i, step), out));
    }
    return {};
  }

  Status refuse_others() const {
    for (const GgufTensor& tensor : file_.tensors()) {
      if (!taken_.contains(tensor.name)) {
        return file_.error("tensor " + quoted(tensor.name) + " is not part of a supported llama model");
      }
    }
    return {};
  }

 private:
  // The file's bytes are in memory only until they are packed.
  Status pack(std::span<const GgufTensor* const> tensors, std::span<QuantMatrix> sources,
              std::vector<PackedWeight>& out) {
    int64_t bytes = 0;
    for (const QuantMatrix& source : sources) bytes += aligned_bytes(source);
    OPST_TRY(have_room(bytes));
    auto* next = static_cast<std::byte*>(room_.data());
    for (size_t i = 0; i < sources.size(); ++i) {
      OPST_TRY(file_.read(*tensors[i], {next, tensors[i]->size_bytes}));
      sources[i].data = next;
      next += aligned_bytes(sources[i]);
    }
    Result<PackedWeight> packed = PackedWeight::pack(context_, sources);
    if (!packed.ok()) return packed.status();
    out.push_back(std::move(packed.value()));
    return {};
  }

  // One piece of memory for matrices of about one size; a much larger one, as the embedding's, does not stay. From
  // kLeastRoom on memory comes from the system and goes back to it: pieces between the packed weights would stay.
  Status have_room(int64_t bytes) {
    constexpr int64_t kLeastRoom = int64_t{2} << 20;
    const int64_t wanted = std::max(bytes, kLeastRoom);
    if (room_.size_bytes() >= wanted && room_.size_bytes() / 4 <= wanted) return {};
    room_ = Buffer();
    Result<Buffer> room = Buffer::allocate(wanted);
    if (!room.ok()) return room.status();
    room_ = std::move(room.value());
    return {};
  }

  Status find(const std::string& name, int num_dims, int64_t dim0, int64_t dim1, const GgufTensor*& tensor) {
    tensor = file_.find_tensor(name);
    if (tensor == nullptr) return file_.error("tensor '" + name + "' is missing");
    if (tensor->num_dims != num_dims || tensor->dims[0] != dim0 || tensor->dims[1] != dim1) {
      return file_.error("tensor '" + name + "' is " + to_string(*tensor) + ", expected shape [" + str(dim0) +
                         (num_dims == 2 ? ", " + str(dim1) : "") + "]");
    }
    taken_.insert(tensor->name);
    return {};
  }

  Context& context_;
  const GgufFile& file_;
  Pass pass_;
  Buffer room_;
  std::unordered_set<std::string_view> taken_;
};

}  // namespace

// Visits every tensor of the model: to check it, or to pack it.
template <class Source>
Status LlamaModel::take_all(Source& source) {
  const LlamaConfig& c = config_;
  const int64_t query_width = c.num_heads * c.head_dim, kv_width = c.num_kv_heads * c.head_dim;
  layers_.clear();
  OPST_TRY(source.matrix("token_embd.weight", c.vocab_size, c.width, embedding_));
  if (source.has("output.weight")) OPST_TRY(source.matrix("output.weight", c.vocab_size, c.width, output_));
  OPST_TRY(source.vector("output_norm.weight", c.width, output_norm_));
  for (int64_t i = 0; i < c.num_layers; ++i) {
    const std::string prefix = "blk." + str(i) + ".";
    Layer layer;
    OPST_TRY(source.vector(prefix + "attn_norm.weight", c.width, layer.attention_norm));
    OPST_TRY(source.matrices({{prefix + "attn_q.weight", query_width},
                              {prefix + "attn_k.weight", kv_width},
                              {prefix + "attn_v.weight", kv_width}},
                             c.width, layer.query_key_value));
    OPST_TRY(source.matrix(prefix + "attn_output.weight", c.width, query_width, layer.attention_output));
    OPST_TRY(source.vector(prefix + "ffn_norm.weight", c.width, layer.ffn_norm));
    OPST_TRY(source.matrices({{prefix + "ffn_gate.weight", c.ffn_size}, {prefix + "ffn_up.weight", c.ffn_size}},
                             c.width, layer.gate_up));
    OPST_TRY(source.matrix(prefix + "ffn_down.weight", c.width, c.ffn_size, layer.down));
    layers_.push_back(std::move(layer));
  }
  return source.refuse_others();
}

Result<LlamaModel> LlamaModel::load(Context& context, const GgufFile& file) try {
  const Result<LlamaConfig> config = read_llama_config(file);
  if (!config.ok()) return config.status();
  if (file.find_tensor("rope_freqs.weight") != nullptr) {
    return file.error("tensor 'rope_freqs.weight' (rope scaling by factors) is not supported");
  }
  LlamaModel model;
  model.config_ = config.value();
  // All tensors are checked before the first is read: a file that will be refused costs neither time nor memory.
  for (const auto pass : {TensorSource::Pass::check, TensorSource::Pass::pack}) {
    TensorSource source(context, file, pass);
    OPST_TRY(model.take_all(source));
  }
  return model;
} catch (...) {
  return status_of_exception();
}

int64_t LlamaModel::weight_bytes() const {
  int64_t bytes = embedding_.size_bytes() + output_.size_bytes() + output_norm_.size_bytes();
  for (const Layer& layer : layers_) {
    bytes += layer.attention_norm.size_bytes() + layer.ffn_norm.size_bytes();
    bytes += layer.attention_output.size_bytes() + layer.down.size_bytes();
    for (const PackedWeight& weight : layer.query_key_value) bytes += weight.size_bytes();
    for (const PackedWeight& weight : layer.gate_up) bytes += weight.size_bytes();
  }
  return bytes;
}

}  // namespace opst::model

// LlamaModel::load: from a GGUF file's tensors to packed weights.
#include <algorithm>
#include <cctype>
#include <cstring>
#include <optional>
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

  Status error(const std::string& problem) const { return file_.error(problem); }
  bool has(const std::string& name) const { return file_.find_tensor(name) != nullptr; }

  struct Part {
    std::string name;
    int64_t rows;  // elements of a vector
  };

  // f32 [size]
  Status vector(const std::string& name, int64_t size, Buffer& out) { return vectors({{name, size}}, out); }

  // The same of several, one behind another.
  Status vectors(const std::vector<Part>& parts, Buffer& out) {
    std::vector<const GgufTensor*> tensors;
    uint64_t bytes = 0;
    for (const auto& [name, size] : parts) {
      OPST_TRY(find(name, {size}, tensors.emplace_back()));
      if (std::strcmp(tensors.back()->type->name, "F32") != 0) {
        return file_.error("tensor '" + name + "' is " + to_string(*tensors.back()) + ", expected type F32");
      }
      bytes += tensors.back()->size_bytes;
    }
    if (pass_ == Pass::check) return {};
    Result<Buffer> buffer = Buffer::allocate(static_cast<int64_t>(bytes));
    if (!buffer.ok()) return buffer.status();
    out = std::move(buffer.value());
    auto* next = static_cast<std::byte*>(out.data());
    for (const GgufTensor* tensor : tensors) {
      OPST_TRY(file_.read(*tensor, {next, tensor->size_bytes}));
      next += tensor->size_bytes;
    }
    return {};
  }

  // f32 [columns] as a matrix of one row.
  Status row(const std::string& name, int64_t columns, PackedWeight& out) {
    Buffer buffer;
    OPST_TRY(vector(name, columns, buffer));
    if (pass_ == Pass::check) return {};
    Result<PackedWeight> packed = PackedWeight::pack(context_, buffer.tensor(DType::f32, {1, columns}));
    if (!packed.ok()) return packed.status();
    out = std::move(packed.value());
    return {};
  }

  Status matrix(const std::string& name, int64_t rows, int64_t columns, PackedWeight& out) {
    std::vector<PackedWeight> one;
    OPST_TRY(matrices({{name, rows}}, columns, one));
    if (pass_ == Pass::pack) out = std::move(one[0]);
    return {};
  }

  // Matrices that multiply the same x, stacked into one weight where their types allow it, else one by one.
  Status matrices(const std::vector<Part>& parts, int64_t columns, std::vector<PackedWeight>& out) {
    std::vector<const GgufTensor*> tensors;
    std::vector<QuantMatrix> sources;
    bool stacked = true;
    for (const Part& part : parts) {
      OPST_TRY(find_matrix(part, columns, {}, tensors.emplace_back(), sources.emplace_back()));
      const bool same = sources.back().format == sources[0].format;
      stacked = stacked && same && (&part == &parts.back() || part.rows % 16 == 0);
    }
    if (pass_ == Pass::check) return {};
    const size_t step = stacked ? sources.size() : 1;
    for (size_t i = 0; i < sources.size(); i += step) {
      OPST_TRY(pack(std::span(tensors).subspan(i, step), std::span(sources).subspan(i, step), out));
    }
    return {};
  }

  // The matrices of `count` experts, which lie one after the other in each tensor (without a count: of one, whose tensors
  // have two dimensions): a stack of as many weights, each that expert's parts one below another. Blocks stay as they are.
  Status stack(const std::vector<Part>& parts, int64_t columns, std::optional<int64_t> count, PackedWeight& out) {
    std::vector<const GgufTensor*> tensors;
    QuantMatrix expert;  // all parts of one
    for (const Part& part : parts) {
      QuantMatrix all;
      OPST_TRY(find_matrix(part, columns, count, tensors.emplace_back(), all));
      if (tensors.size() > 1 && all.format != expert.format) {
        return file_.error("tensor '" + part.name + "' is " + to_string(*tensors.back()) + ", but '" + parts[0].name +
                           "' is " + to_string(*tensors[0]) + ": both must be of one type");
      }
      expert = {all.format, expert.rows + part.rows, columns, nullptr,
                expert.size_bytes + all.size_bytes / count.value_or(1)};
    }
    if (pass_ == Pass::check) return {};
    std::vector<QuantMatrix> experts(static_cast<size_t>(count.value_or(1)), expert);
    OPST_TRY(have_room(static_cast<int64_t>(experts.size()) * aligned_bytes(expert)));
    for (size_t e = 0; e < experts.size(); ++e) {
      auto* next = static_cast<std::byte*>(room_.data()) + e * static_cast<size_t>(aligned_bytes(expert));
      experts[e].data = next;
      for (const GgufTensor* tensor : tensors) {
        const uint64_t bytes = tensor->size_bytes / experts.size();
        OPST_TRY(file_.read_part(*tensor, e * bytes, {next, bytes}));
        next += bytes;
      }
    }
    Result<PackedWeight> packed = PackedWeight::pack_stack(context_, experts);
    if (!packed.ok()) return packed.status();
    out = std::move(packed.value());
    return {};
  }

  Status refuse_others(const std::string& architecture) const {
    for (const GgufTensor& tensor : file_.tensors()) {
      if (!taken_.contains(tensor.name)) {
        return file_.error("tensor " + quoted(tensor.name) + " is not part of a supported " + architecture + " model");
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

  // A tensor that is a matrix, or a stack of `count`, whose rows then are all counted. `matrix` has no data yet.
  Status find_matrix(const Part& part, int64_t columns, std::optional<int64_t> count, const GgufTensor*& tensor,
                     QuantMatrix& matrix) {
    if (count) {
      OPST_TRY(find(part.name, {columns, part.rows, *count}, tensor));
    } else {
      OPST_TRY(find(part.name, {columns, part.rows}, tensor));
    }
    const std::optional<QuantFormat> format = parse_quant_format(tensor->type->name);
    if (!format) {
      return file_.error("tensor '" + part.name + "' is of type " + tensor->type->name + ", but only " +
                         supported_types() + " are supported");
    }
    if (pass_ == Pass::check && !file_.has_data(*tensor)) {
      return file_.error("tensor '" + part.name + "' has no data, as the file has a hole there: is it complete?");
    }
    matrix = {*format, part.rows * count.value_or(1), columns, nullptr, static_cast<int64_t>(tensor->size_bytes)};
    return {};
  }

  Status find(const std::string& name, std::initializer_list<int64_t> dims, const GgufTensor*& tensor) {
    tensor = file_.find_tensor(name);
    if (tensor == nullptr) return file_.error("tensor '" + name + "' is missing");
    const std::span<const int64_t> found(tensor->dims, static_cast<size_t>(tensor->num_dims));
    if (!std::equal(found.begin(), found.end(), dims.begin(), dims.end())) {
      std::string expected;
      for (const int64_t size : dims) expected += (expected.empty() ? "" : ", ") + str(size);
      return file_.error("tensor '" + name + "' is " + to_string(*tensor) + ", expected shape [" + expected + "]");
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
    const auto projections = [&](const std::string& what) -> std::vector<typename Source::Part> {
      return {{prefix + "attn_q." + what, query_width},
              {prefix + "attn_k." + what, kv_width},
              {prefix + "attn_v." + what, kv_width}};
    };
    OPST_TRY(source.vector(prefix + "attn_norm.weight", c.width, layer.attention_norm));
    OPST_TRY(source.matrices(projections("weight"), c.width, layer.query_key_value));
    if (c.projection_biases) OPST_TRY(source.vectors(projections("bias"), layer.projection_biases));
    if (c.head_norms) {
      OPST_TRY(source.vector(prefix + "attn_q_norm.weight", c.head_dim, layer.query_norm));
      OPST_TRY(source.vector(prefix + "attn_k_norm.weight", c.head_dim, layer.key_norm));
    }
    OPST_TRY(source.matrix(prefix + "attn_output.weight", c.width, query_width, layer.attention_output));
    OPST_TRY(source.vector(prefix + "ffn_norm.weight", c.width, layer.ffn_norm));
    OPST_TRY(c.mixture.num_experts > 0 ? take_experts(source, prefix, layer)
                                       : take_feed_forward(source, prefix, "", c.ffn_size, layer.every_token));
    layers_.push_back(std::move(layer));
  }
  return source.refuse_others(c.architecture);
}

// `suffix` is behind the names of the tensors' kinds: "", or "_shexp" of the shared expert.
template <class Source>
Status LlamaModel::take_feed_forward(Source& source, const std::string& prefix, const std::string& suffix, int64_t size,
                                     FeedForward& out) {
  OPST_TRY(source.matrices(
      {{prefix + "ffn_gate" + suffix + ".weight", size}, {prefix + "ffn_up" + suffix + ".weight", size}}, config_.width,
      out.gate_up));
  return source.matrix(prefix + "ffn_down" + suffix + ".weight", config_.width, size, out.down);
}

template <class Source>
Status LlamaModel::take_experts(Source& source, const std::string& prefix, Layer& layer) {
  const MixtureConfig& m = config_.mixture;
  if (source.has(prefix + "ffn_gate.0.weight")) {
    return source.error("tensor '" + prefix +
                        "ffn_gate.0.weight' is that of one expert, an old form, which is not "
                        "supported: convert the model again");
  }
  const auto names = [&](const std::string& what) { return prefix + "ffn_" + what + ".weight"; };
  const auto stacks = [&](const std::string& suffix, int64_t size, std::optional<int64_t> count, Layer::Experts& out) {
    OPST_TRY(source.stack({{names("gate" + suffix), size}, {names("up" + suffix), size}}, config_.width, count,
                          out.gate_up));
    return source.stack({{names("down" + suffix), config_.width}}, size, count, out.down);
  };
  OPST_TRY(source.matrix(names("gate_inp"), m.num_experts, config_.width, layer.experts.router));
  OPST_TRY(stacks("_exps", m.ffn_size, m.num_experts, layer.experts));
  if (m.shared_ffn_size == 0) return {};
  if (!m.shared_gate) return take_feed_forward(source, prefix, "_shexp", m.shared_ffn_size, layer.every_token);
  OPST_TRY(source.row(names("gate_inp_shexp"), config_.width, layer.gated_expert.router));
  return stacks("_shexp", m.shared_ffn_size, {}, layer.gated_expert);
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
  int64_t bytes = embedding_.size_bytes() + output_.size_bytes() + output_norm_.size_bytes() + expert_bytes();
  for (const Layer& layer : layers_) {
    for (const Buffer* buffer :
         {&layer.attention_norm, &layer.ffn_norm, &layer.projection_biases, &layer.query_norm, &layer.key_norm}) {
      bytes += buffer->size_bytes();
    }
    for (const PackedWeight* weight :
         {&layer.attention_output, &layer.every_token.down, &layer.experts.router, &layer.gated_expert.router,
          &layer.gated_expert.gate_up, &layer.gated_expert.down}) {
      bytes += weight->size_bytes();
    }
    for (const PackedWeight& weight : layer.query_key_value) bytes += weight.size_bytes();
    for (const PackedWeight& weight : layer.every_token.gate_up) bytes += weight.size_bytes();
  }
  return bytes;
}

int64_t LlamaModel::expert_bytes() const {
  int64_t bytes = 0;
  for (const Layer& layer : layers_) bytes += layer.experts.gate_up.size_bytes() + layer.experts.down.size_bytes();
  return bytes;
}

}  // namespace opst::model

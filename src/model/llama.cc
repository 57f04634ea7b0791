#include "model/llama.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_set>

#include "core/guarded.h"

namespace opst::model {

#define OPST_TRY(call) \
  if (Status status_ = (call); !status_.ok()) return status_

namespace {

// Keeps every product of two sizes far from overflow; no real model is near it.
constexpr int64_t kLargestSize = int64_t{1} << 24;
constexpr int64_t kLargestHeadDim = 768;  // of the attention operator

std::string str(int64_t value) { return std::to_string(value); }

// A key of the architecture, with the limits of its value. Missing: `fallback` if that is not negative.
Status read_size(const GgufFile& file, const std::string& key, int64_t fallback, int64_t& value) {
  if (fallback >= 0 && !file.has(key)) {
    value = fallback;
    return {};
  }
  const Result<int64_t> number = file.integer(key);
  if (!number.ok()) return number.status();
  value = number.value();
  if (value < 1 || value > kLargestSize) {
    return file.error("key '" + key + "' is " + str(value) + ", expected 1 to " + str(kLargestSize));
  }
  return {};
}

Status read_real(const GgufFile& file, const std::string& key, double fallback, double& value) {
  if (fallback > 0 && !file.has(key)) {
    value = fallback;
    return {};
  }
  const Result<double> number = file.real(key);
  if (!number.ok()) return number.status();
  value = number.value();
  if (!std::isfinite(value) || value < 0) {
    return file.error("key '" + key + "' is " + std::to_string(value) + ", expected a finite number >= 0");
  }
  return {};
}

// Keys that change the arithmetic, and the value at which they do not.
Status refuse_unknown_arithmetic(const GgufFile& file) {
  if (file.has("llama.rope.scaling.type")) {
    const Result<std::string_view> type = file.string("llama.rope.scaling.type");
    if (!type.ok()) return type.status();
    if (type.value() != "none") {
      return file.error("llama.rope.scaling.type is " + quoted(type.value()) + ", but only 'none' is supported");
    }
  }
  struct Neutral {
    const char* key;
    double value;
  };
  constexpr Neutral kNeutral[] = {
      {"llama.rope.scaling.factor", 1},
      {"llama.rope.scale_linear", 1},
      {"llama.rope.scaling.attn_factor", 1},
      {"llama.expert_count", 0},
      {"llama.expert_used_count", 0},
      {"llama.attention.sliding_window", 0},
      {"llama.attention.max_alibi_bias", 0},
      {"llama.attention.clamp_kqv", 0},
      {"llama.attn_logit_softcapping", 0},
      {"llama.final_logit_softcapping", 0},
      {"llama.logit_scale", 1},
      {"llama.residual_scale", 1},
      {"llama.embedding_scale", 1},
  };
  for (const Neutral& neutral : kNeutral) {
    if (!file.has(neutral.key)) continue;
    const Result<double> value = file.real(neutral.key);
    if (!value.ok()) return value.status();
    if (value.value() != neutral.value) {
      return file.error("key '" + std::string(neutral.key) + "' is " + std::to_string(value.value()) +
                        ", which is not supported");
    }
  }
  for (const char* key : {"llama.attention.scale", "llama.rope.scaling.yarn_log_multiplier"}) {
    if (file.has(key)) return file.error("key '" + std::string(key) + "' is not supported");
  }
  if (file.has("llama.attention.causal")) {
    const Result<bool> causal = file.boolean("llama.attention.causal");
    if (!causal.ok()) return causal.status();
    if (!causal.value()) return file.error("key 'llama.attention.causal' is false, which is not supported");
  }
  return {};
}

// Takes tensors from a file by name, checks their shapes, and knows which were taken.
class TensorSource {
 public:
  TensorSource(Context& context, const GgufFile& file) : context_(context), file_(file) {}

  bool has(const std::string& name) const { return file_.find_tensor(name) != nullptr; }

  // f32 [size]
  Status vector(const std::string& name, int64_t size, Buffer& out) {
    const GgufTensor* tensor = nullptr;
    OPST_TRY(find(name, 1, size, 1, tensor));
    if (std::strcmp(tensor->type->name, "F32") != 0) {
      return file_.error("tensor '" + name + "' is " + to_string(*tensor) + ", expected type F32");
    }
    Result<Buffer> buffer = Buffer::allocate(size * static_cast<int64_t>(sizeof(float)));
    if (!buffer.ok()) return buffer.status();
    std::memcpy(buffer.value().data(), tensor->data.data(), tensor->data.size());
    out = std::move(buffer.value());
    return {};
  }

  Status matrix(const std::string& name, int64_t rows, int64_t columns, PackedWeight& out) {
    std::vector<PackedWeight> one;
    OPST_TRY(matrices({{name, rows}}, columns, one));
    out = std::move(one[0]);
    return {};
  }

  // Matrices that meet the same x, stacked into one weight where their types allow it, else one by one.
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
        return file_.error("tensor '" + part.name + "' is of type " + tensor->type->name +
                           ", but only F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K are supported");
      }
      tensors.push_back(tensor);
      sources.push_back({*format, part.rows, columns, tensor->data.data(), static_cast<int64_t>(tensor->data.size())});
      stacked = stacked && *format == sources[0].format && (&part == &parts.back() || part.rows % 16 == 0);
    }
    const size_t step = stacked ? sources.size() : 1;
    for (size_t i = 0; i < sources.size(); i += step) {
      Result<PackedWeight> packed = PackedWeight::pack(context_, std::span(sources).subspan(i, step));
      if (!packed.ok()) return packed.status();
      out.push_back(std::move(packed.value()));
      for (size_t t = i; t < i + step; ++t) file_.release(*tensors[t]);
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
  std::unordered_set<std::string_view> taken_;
};

}  // namespace

Result<LlamaConfig> read_llama_config(const GgufFile& file) try {
  const Result<std::string_view> architecture = file.string("general.architecture");
  if (!architecture.ok()) return architecture.status();
  if (architecture.value() != "llama") {
    return file.error("general.architecture is " + quoted(architecture.value()) + ", but only 'llama' is supported");
  }
  OPST_TRY(refuse_unknown_arithmetic(file));

  constexpr int64_t kRequired = -1;
  LlamaConfig config;
  OPST_TRY(read_size(file, "llama.block_count", kRequired, config.num_layers));
  OPST_TRY(read_size(file, "llama.context_length", kRequired, config.max_context));
  OPST_TRY(read_size(file, "llama.embedding_length", kRequired, config.width));
  OPST_TRY(read_size(file, "llama.feed_forward_length", kRequired, config.ffn_size));
  OPST_TRY(read_size(file, "llama.attention.head_count", kRequired, config.num_heads));
  OPST_TRY(read_size(file, "llama.attention.head_count_kv", config.num_heads, config.num_kv_heads));
  OPST_TRY(read_real(file, "llama.attention.layer_norm_rms_epsilon", 0, config.rms_eps));
  OPST_TRY(read_real(file, "llama.rope.freq_base", 10000, config.rope_theta));
  if (config.rope_theta <= 0) return file.error("key 'llama.rope.freq_base' is 0, expected more");
  if (config.num_heads % config.num_kv_heads != 0) {
    return file.error("llama.attention.head_count is " + str(config.num_heads) +
                      ", not a multiple of head_count_kv = " + str(config.num_kv_heads));
  }
  const bool has_head_dim = file.has("llama.attention.key_length");
  if (!has_head_dim && config.width % config.num_heads != 0) {
    return file.error("llama.embedding_length is " + str(config.width) +
                      ", not a multiple of head_count = " + str(config.num_heads));
  }
  const int64_t usual_head_dim = config.width / config.num_heads;
  OPST_TRY(read_size(file, "llama.attention.key_length", has_head_dim ? kRequired : usual_head_dim, config.head_dim));
  if (config.head_dim > kLargestHeadDim) {
    return file.error("the head size is " + str(config.head_dim) + ", but at most " + str(kLargestHeadDim) +
                      " is supported");
  }
  int64_t value_dim = 0;
  OPST_TRY(read_size(file, "llama.attention.value_length", config.head_dim, value_dim));
  if (value_dim != config.head_dim) {
    return file.error("llama.attention.value_length is " + str(value_dim) + ", but the head size is " +
                      str(config.head_dim) + "; different ones are not supported");
  }
  OPST_TRY(read_size(file, "llama.rope.dimension_count", config.head_dim, config.rope_dims));
  if (config.rope_dims > config.head_dim || config.rope_dims % 2 != 0) {
    return file.error("llama.rope.dimension_count is " + str(config.rope_dims) +
                      ", expected an even number up to the head size " + str(config.head_dim));
  }
  const GgufTensor* embedding = file.find_tensor("token_embd.weight");
  if (embedding == nullptr) return file.error("tensor 'token_embd.weight' is missing");
  OPST_TRY(read_size(file, "llama.vocab_size", embedding->dims[1], config.vocab_size));
  if (config.vocab_size > kLargestSize) return file.error("the vocabulary has " + str(config.vocab_size) + " tokens");
  return config;
} catch (...) {
  return status_of_exception();
}

Result<LlamaModel> LlamaModel::load(Context& context, const GgufFile& file) try {
  const Result<LlamaConfig> config = read_llama_config(file);
  if (!config.ok()) return config.status();
  LlamaModel model;
  model.config_ = config.value();
  const LlamaConfig& c = model.config_;
  const int64_t query_width = c.num_heads * c.head_dim, kv_width = c.num_kv_heads * c.head_dim;

  TensorSource source(context, file);
  if (source.has("rope_freqs.weight")) {
    return file.error("tensor 'rope_freqs.weight' (rope scaling by factors) is not supported");
  }
  OPST_TRY(source.matrix("token_embd.weight", c.vocab_size, c.width, model.embedding_));
  if (source.has("output.weight")) OPST_TRY(source.matrix("output.weight", c.vocab_size, c.width, model.output_));
  OPST_TRY(source.vector("output_norm.weight", c.width, model.output_norm_));
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
    model.layers_.push_back(std::move(layer));
  }
  OPST_TRY(source.refuse_others());
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

Result<LlamaSession> LlamaSession::create(Context& context, const LlamaModel& model,
                                          const SessionOptions& options) try {
  const auto positive = [](const char* name, int64_t value) {
    return value >= 1 ? Status() : Status::invalid_argument(std::string(name) + " is " + str(value) + ", must be >= 1");
  };
  OPST_TRY(positive("context", options.context));
  OPST_TRY(positive("prefill_chunk", options.prefill_chunk));
  OPST_TRY(positive("logit_rows", options.logit_rows));
  OPST_TRY(positive("block_size", options.block_size));
  if (options.context > model.config().max_context) {
    return Status::invalid_argument("context is " + str(options.context) + ", but the model's is " +
                                    str(model.config().max_context));
  }
  if (options.kv_dtype != DType::f32 && options.kv_dtype != DType::bf16 && options.kv_dtype != DType::f16) {
    return Status::invalid_argument(std::string("kv_dtype is ") + to_string(options.kv_dtype) +
                                    ", must be f32, bf16 or f16");
  }
  Result<Graph> layers = Graph::create("layers");
  if (!layers.ok()) return layers.status();
  Result<Graph> head = Graph::create("logits");
  if (!head.ok()) return head.status();
  LlamaSession session(context, model, options, std::move(layers.value()), std::move(head.value()));
  session.options_.prefill_chunk = std::min(options.prefill_chunk, options.context);
  session.options_.block_size = std::min(options.block_size, options.context);
  session.options_.logit_rows = std::min(options.logit_rows, session.options_.prefill_chunk);
  OPST_TRY(session.build_layers());
  OPST_TRY(session.build_head());
  return session;
} catch (...) {
  return status_of_exception();
}

Status LlamaSession::allocate(DType dtype, std::initializer_list<int64_t> shape, Tensor& tensor) {
  int64_t bytes = size_bytes(dtype);
  for (const int64_t size : shape) bytes *= size;
  Result<Buffer> buffer = Buffer::allocate(bytes);
  if (!buffer.ok()) return buffer.status();
  tensor = buffer.value().tensor(dtype, shape);
  buffers_.push_back(std::move(buffer.value()));
  return {};
}

// What all layers of a step share.
struct StepValues {
  Graph::RopeTable rope;
  Value slots;
  Graph::Pages pages;
};

namespace {

// Adds external values to a graph together with what they are bound to, and keeps the first failure.
class Binder {
 public:
  explicit Binder(Graph& graph) : graph_(graph) {}

  Value vector(const std::string& name, const Buffer& buffer, int64_t size) {
    return bound(graph_.input(name, DType::f32, {size}), ConstTensor(buffer.tensor(DType::f32, {size})));
  }
  Value weight(const std::string& name, const PackedWeight& weight) {
    return bound(graph_.weight(name, weight.n(), weight.k()), weight);
  }
  template <class T>
  Value bound(Value value, const T& to) {
    if (Status status = graph_.bind(value, to); !status.ok() && status_.ok()) status_ = std::move(status);
    return value;
  }
  const Status& status() const { return status_; }

 private:
  Graph& graph_;
  Status status_;
};

}  // namespace

Status LlamaSession::build_layers() {
  const LlamaConfig& c = model_->config();
  const int64_t chunk = options_.prefill_chunk;
  OPST_TRY(allocate(DType::f32, {chunk, c.width}, hidden_));
  for (Tensor* tensor : {&tokens_, &positions_, &slots_}) OPST_TRY(allocate(DType::i64, {chunk}, *tensor));

  Graph& g = layers_;
  Binder binder(g);
  rows_ = g.dim("rows", chunk);
  kv_len_ = g.dim("kv_len", options_.context);
  StepValues step;
  const Value tokens = binder.bound(g.input("tokens", DType::i64, {rows_}), tokens_);
  const Value positions = binder.bound(g.input("positions", DType::i64, {rows_}), positions_);
  step.slots = binder.bound(g.input("slots", DType::i64, {rows_}), slots_);

  // Contiguous: one block that holds the whole context.
  constexpr int64_t kPanel = 32;
  const bool paged = options_.cache == CacheKind::paged;
  block_size_ = paged ? options_.block_size : (options_.context + kPanel - 1) / kPanel * kPanel;
  num_blocks_ = (options_.context + block_size_ - 1) / block_size_;
  page_layout_ = supports(PageLayout::panel32, options_.kv_dtype, block_size_, c.head_dim).ok() ? PageLayout::panel32
                                                                                                : PageLayout::norm;
  // One allocation for all layers: what is beyond 2 MiB is rounded up to whole huge pages, which come as they are
  // touched.
  cache_elements_ = num_blocks_ * block_size_ * c.num_kv_heads * c.head_dim;
  OPST_TRY(allocate(options_.kv_dtype, {2 * c.num_layers * cache_elements_}, cache_));
  kv_cache_bytes_ = cache_.num_elements() * size_bytes(cache_.dtype);
  OPST_TRY(allocate(DType::i64, {1, num_blocks_}, block_table_));
  OPST_TRY(allocate(DType::i64, {1}, kv_lengths_));
  // The sequence takes blocks from the end of the pool, so that its order is not memory's.
  for (int64_t i = 0; i < num_blocks_; ++i) static_cast<int64_t*>(block_table_.data)[i] = num_blocks_ - 1 - i;
  step.pages = {binder.bound(g.input("block_table", DType::i64, {1, num_blocks_}), block_table_),
                binder.bound(g.input("kv_lengths", DType::i64, {1}), kv_lengths_), kv_len_, page_layout_};

  Value hidden = g.lookup_rows("embedding", binder.weight("token_embd.weight", model_->embedding_), tokens);
  step.rope = g.rope_table("rope", positions, c.rope_dims / 2, {.theta = c.rope_theta});
  for (int64_t i = 0; i < c.num_layers; ++i) OPST_TRY(add_layer(i, step, hidden));
  g.output("hidden", hidden);
  binder.bound(hidden, hidden_);
  OPST_TRY(binder.status());
  return g.setup(context_->machine());
}

Status LlamaSession::add_layer(int64_t index, const StepValues& step, Value& hidden) {
  const LlamaConfig& c = model_->config();
  const LlamaModel::Layer& layer = model_->layers_[static_cast<size_t>(index)];
  const std::string name = "blk." + str(index) + ".";
  Graph& g = layers_;
  Binder binder(g);
  const auto project = [&](const char* what, Value x, const PackedWeight& weight, MatmulNodeOptions options) {
    options.activations = options_.activations;
    return g.matmul(name + what, x, binder.weight(name + what + ".weight", weight), options);
  };
  const auto norm = [&](const char* what, Value x, const Buffer& weight) {
    return g.rms_norm(name + what, x, binder.vector(name + what + ".weight", weight, c.width), {.eps = c.rms_eps});
  };
  Value x = norm("attn_norm", hidden, layer.attention_norm);
  Value query, key, value;
  if (layer.query_key_value.size() == 1) {
    const Value all = project("attn_qkv", x, layer.query_key_value[0], {});
    const auto heads = [&](int64_t first, int64_t num_heads) {
      return g.columns(all, first * c.head_dim, {rows_, num_heads, c.head_dim});
    };
    query = heads(0, c.num_heads);
    key = heads(c.num_heads, c.num_kv_heads);
    value = heads(c.num_heads + c.num_kv_heads, c.num_kv_heads);
  } else {
    const auto heads = [&](const char* what, size_t i, int64_t num_heads) {
      return g.view(project(what, x, layer.query_key_value[i], {}), {rows_, num_heads, c.head_dim});
    };
    query = heads("attn_q", 0, c.num_heads);
    key = heads("attn_k", 1, c.num_kv_heads);
    value = heads("attn_v", 2, c.num_kv_heads);
  }

  Value caches[2];
  const PageSizes sizes{num_blocks_, block_size_, c.num_kv_heads, c.head_dim, c.head_dim};
  for (int i = 0; i < 2; ++i) {
    const Tensor memory = cache_.narrowed(0, (2 * index + i) * cache_elements_, cache_elements_);
    const Tensor cache = i == 0 ? key_pages(page_layout_, memory.dtype, sizes, memory.data)
                                : value_pages(page_layout_, memory.dtype, sizes, memory.data);
    caches[i] = binder.bound(g.cache(name + (i == 0 ? "key_cache" : "value_cache"), cache.dtype, Shape(cache)), cache);
  }
  query = g.rope_scatter_pa_kv_cache(
      name + "rope_write", {.query = query, .key = key, .value = value, .table = step.rope, .slots = step.slots},
      caches[0], caches[1], {.layout = page_layout_, .style = RopeStyle::pairs});
  Value attended = g.paged_attention(name + "attention", query, caches[0], caches[1], step.pages, {.causal = true});
  attended = g.view(attended, {rows_, c.num_heads * c.head_dim});
  hidden = project("attn_output", attended, layer.attention_output, {.residual = hidden});

  x = norm("ffn_norm", hidden, layer.ffn_norm);
  Value gated;
  if (layer.gate_up.size() == 1) {
    gated = project("ffn_gate_up", x, layer.gate_up[0], {.activation = Activation::swiglu});
  } else {
    const Value gate = project("ffn_gate", x, layer.gate_up[0], {});
    const Value up = project("ffn_up", x, layer.gate_up[1], {});
    gated = g.swiglu(name + "swiglu", gate, up);
  }
  hidden = project("ffn_down", gated, layer.down, {.residual = hidden});
  return binder.status();
}

Status LlamaSession::build_head() {
  const LlamaConfig& c = model_->config();
  OPST_TRY(allocate(DType::f32, {options_.logit_rows, c.vocab_size}, logits_));
  Binder binder(head_);
  logit_rows_ = head_.dim("logit_rows", options_.logit_rows);
  head_hidden_ = binder.bound(head_.input("hidden", DType::f32, {logit_rows_, c.width}), hidden_);
  const Value x =
      head_.rms_norm("output_norm", head_hidden_, binder.vector("output_norm.weight", model_->output_norm_, c.width),
                     {.eps = c.rms_eps});
  const Value logits = head_.matmul("output", x, binder.weight("output.weight", model_->output()),
                                    {.activations = options_.activations});
  head_.output("logits", logits);
  binder.bound(logits, logits_);
  OPST_TRY(binder.status());
  return head_.setup(context_->machine());
}

Status LlamaSession::size_graphs(int64_t tokens, int64_t kv_len) try {
  OPST_TRY(layers_.set(rows_, tokens));
  OPST_TRY(layers_.set(kv_len_, kv_len));
  return head_.set(logit_rows_, 1);
} catch (...) {
  return status_of_exception();
}

Status LlamaSession::check(std::span<const int32_t> tokens) const {
  const auto count = static_cast<int64_t>(tokens.size());
  if (count == 0) return Status::invalid_argument("no tokens to feed");
  if (count > options_.context - position_) {
    return Status::invalid_argument(str(count) + " tokens at position " + str(position_) + " do not fit a context of " +
                                    str(options_.context));
  }
  for (const int32_t token : tokens) {
    if (token < 0 || token >= model_->config().vocab_size) {
      return Status::invalid_argument("token " + str(token) + " is outside the vocabulary of " +
                                      str(model_->config().vocab_size));
    }
  }
  return {};
}

namespace {

// Puts a position back where it was, unless the call comes to its end.
class Advance {
 public:
  explicit Advance(int64_t& position) : position_(position), before_(position) {}
  ~Advance() {
    if (!kept_) position_ = before_;
  }
  Advance(const Advance&) = delete;
  Advance& operator=(const Advance&) = delete;
  void keep() { kept_ = true; }

 private:
  int64_t& position_;
  const int64_t before_;
  bool kept_ = false;
};

}  // namespace

Result<std::span<const float>> LlamaSession::feed(std::span<const int32_t> tokens) try {
  OPST_TRY(check(tokens));
  Advance advance(position_);
  int64_t in_last_chunk = 0;
  while (!tokens.empty()) {
    const auto chunk = tokens.first(std::min(tokens.size(), static_cast<size_t>(options_.prefill_chunk)));
    OPST_TRY(run_layers(chunk));
    in_last_chunk = static_cast<int64_t>(chunk.size());
    tokens = tokens.subspan(chunk.size());
  }
  OPST_TRY(compute_logits(in_last_chunk - 1, 1));
  advance.keep();
  return std::span<const float>(static_cast<const float*>(logits_.data),
                                static_cast<size_t>(model_->config().vocab_size));
} catch (...) {
  return status_of_exception();
}

Status LlamaSession::feed_all(std::span<const int32_t> tokens, const LogitsVisitor& visit) try {
  OPST_TRY(check(tokens));
  Advance advance(position_);
  const auto vocab_size = static_cast<size_t>(model_->config().vocab_size);
  while (!tokens.empty()) {
    const auto chunk = tokens.first(std::min(tokens.size(), static_cast<size_t>(options_.prefill_chunk)));
    const int64_t first_position = position_;
    const auto rows = static_cast<int64_t>(chunk.size());
    OPST_TRY(run_layers(chunk));
    for (int64_t begin = 0; begin < rows; begin += options_.logit_rows) {
      const int64_t count = std::min(options_.logit_rows, rows - begin);
      OPST_TRY(compute_logits(begin, count));
      for (int64_t i = 0; i < count; ++i) {
        visit(first_position + begin + i,
              {static_cast<const float*>(logits_.data) + static_cast<size_t>(i) * vocab_size, vocab_size});
      }
    }
    tokens = tokens.subspan(chunk.size());
  }
  advance.keep();
  return {};
} catch (...) {
  return status_of_exception();
}

Status LlamaSession::run_layers(std::span<const int32_t> tokens) {
  const auto n = static_cast<int64_t>(tokens.size());
  for (int64_t i = 0; i < n; ++i) {
    const int64_t position = position_ + i;
    static_cast<int64_t*>(tokens_.data)[i] = tokens[static_cast<size_t>(i)];
    static_cast<int64_t*>(positions_.data)[i] = position;
    const int64_t block = static_cast<const int64_t*>(block_table_.data)[position / block_size_];
    static_cast<int64_t*>(slots_.data)[i] = block * block_size_ + position % block_size_;
  }
  *static_cast<int64_t*>(kv_lengths_.data) = position_ + n;

  OPST_TRY(layers_.set(rows_, n));
  OPST_TRY(layers_.set(kv_len_, position_ + n));
  OPST_TRY(layers_.execute(*context_, listener_));
  position_ += n;
  return {};
}

Status LlamaSession::compute_logits(int64_t begin, int64_t count) {
  OPST_TRY(head_.bind(head_hidden_, hidden_.narrowed(0, begin, count)));
  OPST_TRY(head_.set(logit_rows_, count));
  return head_.execute(*context_, listener_);
}

}  // namespace opst::model

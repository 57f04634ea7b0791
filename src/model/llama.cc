#include "model/llama.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_set>

#include "opst/attention.h"
#include "opst/kv_cache.h"
#include "opst/rowwise.h"

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
    const GgufTensor* tensor = nullptr;
    OPST_TRY(find(name, 2, columns, rows, tensor));
    const std::optional<QuantFormat> format = parse_quant_format(tensor->type->name);
    if (!format) {
      return file_.error("tensor '" + name + "' is of type " + tensor->type->name +
                         ", but only F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K are supported");
    }
    Result<PackedWeight> packed = PackedWeight::pack(
        context_, QuantMatrix{*format, rows, columns, tensor->data.data(), static_cast<int64_t>(tensor->data.size())});
    if (!packed.ok()) return packed.status();
    out = std::move(packed.value());
    file_.release(*tensor);
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

ConstTensor vector_view(const Buffer& buffer, int64_t size) { return buffer.tensor(DType::f32, {size}); }

// [rows, heads * dim] as [rows, heads, dim]
Tensor by_heads(const Tensor& matrix, int64_t rows, int64_t num_heads, int64_t head_dim) {
  return Tensor::contiguous(matrix.dtype, {rows, num_heads, head_dim}, matrix.data);
}

// [rows, heads, dim] as [1, heads, rows, dim]
template <bool kConst>
BasicTensor<kConst> as_batch(const BasicTensor<kConst>& rows_heads_dim) {
  BasicTensor<kConst> view = rows_heads_dim.transposed(0, 1);
  for (int i = view.rank; i > 0; --i) view.shape[i] = view.shape[i - 1], view.strides[i] = view.strides[i - 1];
  view.shape[0] = 1;
  ++view.rank;
  return view;
}

}  // namespace

Result<LlamaConfig> read_llama_config(const GgufFile& file) {
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
}

Result<LlamaModel> LlamaModel::load(Context& context, const GgufFile& file) {
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
    OPST_TRY(source.matrix(prefix + "attn_q.weight", query_width, c.width, layer.query));
    OPST_TRY(source.matrix(prefix + "attn_k.weight", kv_width, c.width, layer.key));
    OPST_TRY(source.matrix(prefix + "attn_v.weight", kv_width, c.width, layer.value));
    OPST_TRY(source.matrix(prefix + "attn_output.weight", c.width, query_width, layer.attention_output));
    OPST_TRY(source.vector(prefix + "ffn_norm.weight", c.width, layer.ffn_norm));
    OPST_TRY(source.matrix(prefix + "ffn_gate.weight", c.ffn_size, c.width, layer.gate));
    OPST_TRY(source.matrix(prefix + "ffn_up.weight", c.ffn_size, c.width, layer.up));
    OPST_TRY(source.matrix(prefix + "ffn_down.weight", c.width, c.ffn_size, layer.down));
    model.layers_.push_back(std::move(layer));
  }
  OPST_TRY(source.refuse_others());
  return model;
}

int64_t LlamaModel::weight_bytes() const {
  int64_t bytes = embedding_.size_bytes() + output_.size_bytes() + output_norm_.size_bytes();
  for (const Layer& layer : layers_) {
    bytes += layer.attention_norm.size_bytes() + layer.ffn_norm.size_bytes();
    for (const PackedWeight* weight :
         {&layer.query, &layer.key, &layer.value, &layer.attention_output, &layer.gate, &layer.up, &layer.down}) {
      bytes += weight->size_bytes();
    }
  }
  return bytes;
}

Result<LlamaSession> LlamaSession::create(Context& context, const LlamaModel& model, const SessionOptions& options) {
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
  LlamaSession session(context, model, options);
  session.options_.prefill_chunk = std::min(options.prefill_chunk, options.context);
  session.options_.block_size = std::min(options.block_size, options.context);
  session.options_.logit_rows = std::min(options.logit_rows, session.options_.prefill_chunk);
  OPST_TRY(session.allocate());
  return session;
}

Status LlamaSession::allocate() {
  const LlamaConfig& c = model_->config();
  const int64_t chunk = options_.prefill_chunk;
  const auto take = [&](DType dtype, std::initializer_list<int64_t> shape, Tensor& tensor) -> Status {
    int64_t bytes = size_bytes(dtype);
    for (const int64_t size : shape) bytes *= size;
    Result<Buffer> buffer = Buffer::allocate(bytes);
    if (!buffer.ok()) return buffer.status();
    tensor = buffer.value().tensor(dtype, shape);
    buffers_.push_back(std::move(buffer.value()));
    return {};
  };
  const int64_t query_width = c.num_heads * c.head_dim, kv_width = c.num_kv_heads * c.head_dim;
  OPST_TRY(take(DType::f32, {chunk, c.width}, hidden_));
  OPST_TRY(take(DType::f32, {chunk, c.width}, normed_));
  OPST_TRY(take(DType::f32, {chunk, query_width}, query_));
  OPST_TRY(take(DType::f32, {chunk, query_width}, attended_));
  OPST_TRY(take(DType::f32, {chunk, kv_width}, key_));
  OPST_TRY(take(DType::f32, {chunk, kv_width}, value_));
  OPST_TRY(take(DType::f32, {chunk, c.ffn_size}, gate_));
  OPST_TRY(take(DType::f32, {chunk, c.ffn_size}, up_));
  OPST_TRY(take(DType::f32, {options_.logit_rows, c.vocab_size}, logits_));
  OPST_TRY(take(DType::f32, {chunk, c.rope_dims / 2}, cos_));
  OPST_TRY(take(DType::f32, {chunk, c.rope_dims / 2}, sin_));
  OPST_TRY(take(DType::i64, {chunk}, tokens_));
  OPST_TRY(take(DType::i64, {chunk}, positions_));
  OPST_TRY(take(DType::i64, {chunk}, slots_));

  block_size_ = options_.context;
  if (options_.cache == CacheKind::paged) {
    block_size_ = options_.block_size;
    num_blocks_ = (options_.context + block_size_ - 1) / block_size_;
    OPST_TRY(supports(PageLayout::norm, options_.kv_dtype, block_size_));
    OPST_TRY(take(DType::i64, {1, num_blocks_}, block_table_));
    OPST_TRY(take(DType::i64, {1}, kv_lengths_));
    // The sequence takes blocks from the end of the pool, so that its order is not memory's.
    for (int64_t i = 0; i < num_blocks_; ++i) static_cast<int64_t*>(block_table_.data)[i] = num_blocks_ - 1 - i;
  }
  for (int64_t i = 0; i < c.num_layers; ++i) {
    LayerCache cache;
    OPST_TRY(take(options_.kv_dtype, {num_blocks_, block_size_, c.num_kv_heads, c.head_dim}, cache.key));
    OPST_TRY(take(options_.kv_dtype, {num_blocks_, block_size_, c.num_kv_heads, c.head_dim}, cache.value));
    caches_.push_back(cache);
  }
  return {};
}

int64_t LlamaSession::kv_cache_bytes() const {
  int64_t bytes = 0;
  for (const LayerCache& cache : caches_) {
    bytes += (cache.key.num_elements() + cache.value.num_elements()) * size_bytes(options_.kv_dtype);
  }
  return bytes;
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

Result<std::span<const float>> LlamaSession::feed(std::span<const int32_t> tokens) {
  OPST_TRY(check(tokens));
  const int64_t before = position_;
  int64_t in_last_chunk = 0;
  while (!tokens.empty()) {
    const auto chunk = tokens.first(std::min(tokens.size(), static_cast<size_t>(options_.prefill_chunk)));
    if (const Status status = run_layers(chunk); !status.ok()) {
      position_ = before;
      return status;
    }
    in_last_chunk = static_cast<int64_t>(chunk.size());
    tokens = tokens.subspan(chunk.size());
  }
  if (const Status status = compute_logits(in_last_chunk - 1, 1); !status.ok()) {
    position_ = before;
    return status;
  }
  return std::span<const float>(static_cast<const float*>(logits_.data),
                                static_cast<size_t>(model_->config().vocab_size));
}

Status LlamaSession::feed_all(std::span<const int32_t> tokens, const LogitsVisitor& visit) {
  OPST_TRY(check(tokens));
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
  return {};
}

Status LlamaSession::run_layers(std::span<const int32_t> tokens) {
  const auto n = static_cast<int64_t>(tokens.size());
  for (int64_t i = 0; i < n; ++i) {
    const int64_t position = position_ + i;
    static_cast<int64_t*>(tokens_.data)[i] = tokens[static_cast<size_t>(i)];
    static_cast<int64_t*>(positions_.data)[i] = position;
    int64_t slot = position;
    if (options_.cache == CacheKind::paged) {
      const int64_t block = static_cast<const int64_t*>(block_table_.data)[position / block_size_];
      slot = block * block_size_ + position % block_size_;
    }
    static_cast<int64_t*>(slots_.data)[i] = slot;
  }
  if (options_.cache == CacheKind::paged) *static_cast<int64_t*>(kv_lengths_.data) = position_ + n;

  OPST_TRY(lookup_rows(*context_, model_->embedding_, tokens_.narrowed(0, 0, n), hidden_.narrowed(0, 0, n)));
  OPST_TRY(rope_table(*context_, positions_.narrowed(0, 0, n), cos_.narrowed(0, 0, n), sin_.narrowed(0, 0, n),
                      {.theta = model_->config().rope_theta}));
  for (size_t i = 0; i < caches_.size(); ++i) OPST_TRY(run_layer(model_->layers_[i], caches_[i], n));
  position_ += n;
  return {};
}

Status LlamaSession::run_layer(const LlamaModel::Layer& layer, const LayerCache& cache, int64_t n) {
  const LlamaConfig& c = model_->config();
  Context& context = *context_;
  const auto rows = [n](const Tensor& tensor) { return tensor.narrowed(0, 0, n); };
  const Tensor hidden = rows(hidden_), normed = rows(normed_);
  const Tensor query = by_heads(query_, n, c.num_heads, c.head_dim);
  const Tensor key = by_heads(key_, n, c.num_kv_heads, c.head_dim);
  const Tensor value = by_heads(value_, n, c.num_kv_heads, c.head_dim);
  const Tensor attended = by_heads(attended_, n, c.num_heads, c.head_dim);

  OPST_TRY(rms_norm(context, hidden, vector_view(layer.attention_norm, c.width), normed, {.eps = c.rms_eps}));
  OPST_TRY(matmul(context, normed, layer.query, rows(query_)));
  OPST_TRY(matmul(context, normed, layer.key, rows(key_)));
  OPST_TRY(matmul(context, normed, layer.value, rows(value_)));
  OPST_TRY(rope(context, query, rows(cos_), rows(sin_), query, {.style = RopeStyle::pairs}));
  OPST_TRY(rope(context, key, rows(cos_), rows(sin_), key, {.style = RopeStyle::pairs}));
  OPST_TRY(scatter_pa_kv_cache(context, key, value, rows(slots_), cache.key, cache.value));

  AttentionInputs inputs{.query = as_batch(query), .key = cache.key, .value = cache.value};
  if (options_.cache == CacheKind::paged) {
    inputs.block_table = block_table_;
    inputs.kv_lengths = kv_lengths_;
  } else {
    const int64_t kv_len = position_ + n;
    inputs.key = as_batch(cache.key.selected(0, 0).narrowed(0, 0, kv_len));
    inputs.value = as_batch(cache.value.selected(0, 0).narrowed(0, 0, kv_len));
  }
  OPST_TRY(flash_attention_forward(context, inputs, {.out = as_batch(attended)}, {.causal = true}));
  OPST_TRY(matmul(context, rows(attended_), layer.attention_output, normed));
  OPST_TRY(add(context, hidden, normed, hidden));

  OPST_TRY(rms_norm(context, hidden, vector_view(layer.ffn_norm, c.width), normed, {.eps = c.rms_eps}));
  OPST_TRY(matmul(context, normed, layer.gate, rows(gate_)));
  OPST_TRY(matmul(context, normed, layer.up, rows(up_)));
  OPST_TRY(swiglu(context, rows(gate_), rows(up_), rows(gate_)));
  OPST_TRY(matmul(context, rows(gate_), layer.down, normed));
  return add(context, hidden, normed, hidden);
}

Status LlamaSession::compute_logits(int64_t begin, int64_t count) {
  const LlamaConfig& c = model_->config();
  const Tensor normed = normed_.narrowed(0, 0, count);
  OPST_TRY(rms_norm(*context_, hidden_.narrowed(0, begin, count), vector_view(model_->output_norm_, c.width), normed,
                    {.eps = c.rms_eps}));
  return matmul(*context_, normed, model_->output(), logits_.narrowed(0, 0, count));
}

}  // namespace opst::model

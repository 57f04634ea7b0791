#include "model/llama.h"

#include <algorithm>
#include <chrono>

#include "core/guarded.h"
#include "model/try.h"

namespace opst::model {

namespace {

std::string str(int64_t value) { return std::to_string(value); }

Result<KvFormat> format_of(DType dtype, int64_t head_dim) {
  std::string known;
  for (const KvType& type : kKvTypes) {
    if (type.dtype == dtype) return kv_format(type.format, head_dim, head_dim);
    known += std::string(known.empty() ? "" : ", ") + to_string(type.dtype);
  }
  return Status::invalid_argument(std::string("kv_dtype is ") + to_string(dtype) + ", must be one of " + known);
}

}  // namespace

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
  const Result<KvFormat> format = format_of(options.kv_dtype, model.config().head_dim);
  if (!format.ok()) return format.status();
  Result<Graph> layers = Graph::create("layers");
  if (!layers.ok()) return layers.status();
  Result<Graph> head = Graph::create("logits");
  if (!head.ok()) return head.status();
  LlamaSession session(context, model, options, std::move(layers.value()), std::move(head.value()));
  session.options_.prefill_chunk = std::min(options.prefill_chunk, options.context);
  session.options_.block_size = std::min(options.block_size, options.context);
  session.options_.logit_rows = std::min(options.logit_rows, session.options_.prefill_chunk);
  session.format_ = format.value();
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

  // Elements of a buffer, from `first` on.
  Value vector(const std::string& name, const Buffer& buffer, int64_t size, int64_t first = 0) {
    const Tensor all = buffer.tensor(DType::f32, {first + size});
    return bound(graph_.input(name, DType::f32, {size}), ConstTensor(all.narrowed(0, first, size)));
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

Status LlamaSession::allocate_caches() {
  const LlamaConfig& c = model_->config();
  // Contiguous: one block that holds the whole context.
  const int64_t whole = (options_.context + kPanelRows - 1) / kPanelRows * kPanelRows;
  block_size_ = options_.cache == CacheKind::paged ? options_.block_size : whole;
  num_blocks_ = (options_.context + block_size_ - 1) / block_size_;
  // Panels, unless attention reads none of them: it reads no panels of u8.
  const bool panels = supports(PageLayout::panel32, format_.dtype, block_size_, c.head_dim).ok();
  page_layout_ = panels && format_.dtype != DType::u8 ? PageLayout::panel32 : PageLayout::norm;
  OPST_TRY(supports(page_layout_, format_.dtype, block_size_, c.head_dim));
  // One allocation for all layers: beyond 2 MiB it is whole huge pages, which come as they are touched.
  const int64_t rows = num_blocks_ * block_size_ * c.num_kv_heads;
  cache_elements_ = rows * c.head_dim / page_format(page_layout_, format_.dtype, PageSide::key).numbers;
  scale_elements_ = rows * format_.key_groups;
  OPST_TRY(allocate(format_.dtype, {2 * c.num_layers * cache_elements_}, cache_));
  if (scale_elements_ > 0) OPST_TRY(allocate(DType::f32, {2 * c.num_layers * scale_elements_}, scales_));
  kv_cache_bytes_ =
      2 * c.num_layers * (cache_elements_ * size_bytes(format_.dtype) + scale_elements_ * size_bytes(DType::f32));
  OPST_TRY(allocate(DType::i64, {1, num_blocks_}, block_table_));
  OPST_TRY(allocate(DType::i64, {1}, kv_lengths_));
  // The sequence takes blocks from the end of the pool, so that its order is not memory's.
  for (int64_t i = 0; i < num_blocks_; ++i) static_cast<int64_t*>(block_table_.data)[i] = num_blocks_ - 1 - i;
  return {};
}

Status LlamaSession::add_caches(int64_t index, Value (&caches)[2], ScaleValues& scales) {
  const LlamaConfig& c = model_->config();
  const PageSizes sizes{num_blocks_, block_size_, c.num_kv_heads, c.head_dim, c.head_dim};
  Binder binder(layers_);
  const auto part_of = [&](const Tensor& all, int64_t elements, int64_t side) {
    return all.narrowed(0, (2 * index + side) * elements, elements).data;
  };
  const auto cache = [&](const char* name, const Tensor& pages) {
    return binder.bound(layers_.cache("blk." + str(index) + "." + name, pages.dtype, Shape(pages)), pages);
  };
  caches[0] = cache("key_cache", key_pages(page_layout_, format_.dtype, sizes, part_of(cache_, cache_elements_, 0)));
  caches[1] =
      cache("value_cache", value_pages(page_layout_, format_.dtype, sizes, part_of(cache_, cache_elements_, 1)));
  if (scale_elements_ == 0) return binder.status();
  const auto scale_pages = [&](int64_t side) {
    void* const data = part_of(scales_, scale_elements_, side);
    // Attention reads those of a head after one another: in norm, whose strides are free, they lie so.
    const Tensor by_head =
        Tensor::contiguous(DType::f32, {num_blocks_, c.num_kv_heads, block_size_, format_.key_groups}, data);
    if (page_layout_ == PageLayout::norm) return by_head.transposed(1, 2);
    return (side == 0 ? key_scale_pages : value_scale_pages)(page_layout_, sizes, format_.key_groups, data);
  };
  scales.key = cache("key_scales", scale_pages(0));
  scales.value = cache("value_scales", scale_pages(1));
  return binder.status();
}

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

  OPST_TRY(allocate_caches());
  step.pages = {binder.bound(g.input("block_table", DType::i64, {1, num_blocks_}), block_table_),
                binder.bound(g.input("kv_lengths", DType::i64, {1}), kv_lengths_), kv_len_};

  Value hidden = g.lookup_rows("embedding", binder.weight("token_embd.weight", model_->embedding_), tokens);
  step.rope = g.rope_table("rope", positions, c.rope_dims / 2, {.theta = c.rope_theta});
  for (int64_t i = 0; i < c.num_layers; ++i) OPST_TRY(add_layer(i, step, hidden));
  g.output("hidden", hidden);
  binder.bound(hidden, hidden_);
  OPST_TRY(binder.status());
  return g.setup(context_->machine());
}

// What is added to the graph for one layer, by the names of its tensors.
struct LlamaSession::LayerBuilder {
  LlamaSession& session;
  const LlamaModel::Layer& layer;
  const std::string name;  // "blk.3."
  Graph& g = session.layers_;
  Binder binder{g};
  const LlamaConfig& c = session.model_->config();

  Value project(const std::string& what, Value x, const PackedWeight& weight, MatmulNodeOptions options) {
    options.activations = session.options_.activations;
    return g.matmul(name + what, x, binder.weight(name + what + ".weight", weight), options);
  }
  Value norm(const char* what, Value x, const Buffer& weight) {
    return g.rms_norm(name + what, x, binder.vector(name + what + ".weight", weight, c.width), {.eps = c.rms_eps});
  }
  Value head_norm(const char* what, const Buffer& weight) {
    return weight.size_bytes() > 0 ? binder.vector(name + what + ".weight", weight, c.head_dim) : Value();
  }

  // [rows, heads, head_dim] each.
  struct Projections {
    Value query, key, value;
  };
  Projections project_heads(Value x) {
    const auto bias = [&](const char* what, int64_t first, int64_t num_heads) {
      return c.projection_biases ? binder.vector(name + what + ".bias", layer.projection_biases, num_heads * c.head_dim,
                                                 first * c.head_dim)
                                 : Value();
    };
    const int64_t first_value = c.num_heads + c.num_kv_heads, all_heads = first_value + c.num_kv_heads;
    const Dim rows = session.rows_;
    if (layer.query_key_value.size() == 1) {
      const Value all = project("attn_qkv", x, layer.query_key_value[0], {.bias = bias("attn_qkv", 0, all_heads)});
      const auto heads = [&](int64_t first, int64_t num_heads) {
        return g.columns(all, first * c.head_dim, {rows, num_heads, c.head_dim});
      };
      return {heads(0, c.num_heads), heads(c.num_heads, c.num_kv_heads), heads(first_value, c.num_kv_heads)};
    }
    const auto heads = [&](const char* what, size_t i, int64_t first, int64_t num_heads) {
      const Value all = project(what, x, layer.query_key_value[i], {.bias = bias(what, first, num_heads)});
      return g.view(all, {rows, num_heads, c.head_dim});
    };
    return {heads("attn_q", 0, 0, c.num_heads), heads("attn_k", 1, c.num_heads, c.num_kv_heads),
            heads("attn_v", 2, first_value, c.num_kv_heads)};
  }

  // residual + the feed-forward that every token goes through; `suffix` as in the names of its tensors.
  Value feed_forward(const std::string& suffix, Value x, Value residual) {
    Value gated;
    if (const auto& weights = layer.every_token.gate_up; weights.size() == 1) {
      gated = project("ffn_gate_up" + suffix, x, weights[0], {.activation = Activation::swiglu});
    } else {
      const Value gate = project("ffn_gate" + suffix, x, weights[0], {});
      const Value up = project("ffn_up" + suffix, x, weights[1], {});
      gated = g.swiglu(name + "swiglu" + suffix, gate, up);
    }
    return project("ffn_down" + suffix, gated, layer.every_token.down, {.residual = residual});
  }

  // residual + those of the experts that each token chooses.
  Value mixture(const std::string& suffix, const std::string& router, Value x, Value residual,
                const LlamaModel::Layer::Experts& experts, MoeLayerNodeOptions options) {
    const auto stack = [&](const std::string& what, const PackedWeight& w) {
      const std::string full = name + what + suffix + ".weight";
      return binder.bound(g.weight_stack(full, w.count(), w.n(), w.k()), w);
    };
    options.activations = session.options_.activations;
    return g.moe_layer(name + "ffn" + suffix,
                       {.x = x,
                        .router_logits = project(router, x, experts.router, {}),
                        .gate_up = stack("ffn_gate_up", experts.gate_up),
                        .down = stack("ffn_down", experts.down),
                        .residual = residual},
                       options);
  }

  Value mixture(Value x, Value residual) {
    const MixtureConfig& m = c.mixture;
    if (layer.gated_expert.router.n() > 0) {
      // One expert, whose score is a sigmoid and is its weight.
      residual = mixture("_shexp", "ffn_gate_inp_shexp", x, residual, layer.gated_expert,
                         {.gating = {.scores = GateScores::sigmoid}});
    } else if (m.shared_ffn_size > 0) {
      residual = feed_forward("_shexp", x, residual);
    }
    return mixture("_exps", "ffn_gate_inp", x, residual, layer.experts,
                   {.top_k = m.used,
                    .gating = {.scores = m.scores,
                               .renormalise = m.renormalise,
                               .routed_scaling_factor = static_cast<float>(m.weights_scale)}});
  }
};

Status LlamaSession::add_layer(int64_t index, const StepValues& step, Value& hidden) {
  const LlamaModel::Layer& layer = model_->layers_[static_cast<size_t>(index)];
  const LlamaConfig& c = model_->config();
  LayerBuilder b{*this, layer, "blk." + str(index) + "."};
  const auto [query, key, value] = b.project_heads(b.norm("attn_norm", hidden, layer.attention_norm));
  Value caches[2];
  Graph::Pages pages = step.pages;
  OPST_TRY(add_caches(index, caches, pages.scales));
  const Value turned = layers_.rope_scatter_pa_kv_cache(
      b.name + "rope_write",
      {.query = query,
       .key = key,
       .value = value,
       .table = step.rope,
       .slots = step.slots,
       .query_weight = b.head_norm("attn_q_norm", layer.query_norm),
       .key_weight = b.head_norm("attn_k_norm", layer.key_norm)},
      caches[0], caches[1], {.layout = page_layout_, .style = c.rope_style, .eps = c.rms_eps}, pages.scales);
  const Value attended = layers_.paged_attention(b.name + "attention", turned, caches[0], caches[1], pages,
                                                 {.causal = true, .page_layout = page_layout_});
  hidden = b.project("attn_output", layers_.view(attended, {rows_, c.num_heads * c.head_dim}), layer.attention_output,
                     {.residual = hidden});
  const Value x = b.norm("ffn_norm", hidden, layer.ffn_norm);
  hidden = c.mixture.num_experts > 0 ? b.mixture(x, hidden) : b.feed_forward("", x, hidden);
  return b.binder.status();
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

// Between the nodes of a graph: asks at most every 20 ms whether to stop, as asking may be dear (a lock, a system
// call).
class LlamaSession::Poll : public NodeListener {
 public:
  Poll(NodeListener* listener, const Interrupted& interrupted, bool& stopped)
      : listener_(listener), interrupted_(interrupted), stopped_(stopped) {
    stopped_ = false;
  }
  // What a graph is to be told: itself, or the session's listener where nobody may interrupt.
  NodeListener* listener() { return interrupted_ ? this : listener_; }
  void on_node(const char* op, const std::string& name, Clock::time_point begin, Clock::time_point end) override {
    if (listener_ != nullptr) listener_->on_node(op, name, begin, end);
    if (end - asked_ < std::chrono::milliseconds(20)) return;
    asked_ = end;
    stopped_ = interrupted_();
  }
  bool stop() override { return stopped_; }

 private:
  NodeListener* listener_;
  const Interrupted& interrupted_;
  bool& stopped_;
  Clock::time_point asked_ = Clock::now();
};

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

Result<std::span<const float>> LlamaSession::feed(std::span<const int32_t> tokens, const Interrupted& interrupted) try {
  Poll poll(listener_, interrupted, was_interrupted_);
  OPST_TRY(check(tokens));
  Advance advance(position_);
  int64_t in_last_chunk = 0;
  while (!tokens.empty()) {
    const auto chunk = tokens.first(std::min(tokens.size(), static_cast<size_t>(options_.prefill_chunk)));
    OPST_TRY(run_layers(chunk, poll.listener()));
    in_last_chunk = static_cast<int64_t>(chunk.size());
    tokens = tokens.subspan(chunk.size());
  }
  OPST_TRY(compute_logits(in_last_chunk - 1, 1, poll.listener()));
  advance.keep();
  return std::span<const float>(static_cast<const float*>(logits_.data),
                                static_cast<size_t>(model_->config().vocab_size));
} catch (...) {
  return status_of_exception();
}

Status LlamaSession::feed_all(std::span<const int32_t> tokens, const LogitsVisitor& visit,
                              const Interrupted& interrupted) try {
  Poll poll(listener_, interrupted, was_interrupted_);
  OPST_TRY(check(tokens));
  Advance advance(position_);
  while (!tokens.empty()) {
    const auto chunk = tokens.first(std::min(tokens.size(), static_cast<size_t>(options_.prefill_chunk)));
    OPST_TRY(feed_chunk(chunk, visit, poll.listener()));
    tokens = tokens.subspan(chunk.size());
  }
  advance.keep();
  return {};
} catch (...) {
  return status_of_exception();
}

Status LlamaSession::feed_chunk(std::span<const int32_t> tokens, const LogitsVisitor& visit, NodeListener* listener) {
  const auto vocab_size = static_cast<size_t>(model_->config().vocab_size);
  const int64_t first_position = position_;
  const auto rows = static_cast<int64_t>(tokens.size());
  OPST_TRY(run_layers(tokens, listener));
  for (int64_t begin = 0; begin < rows; begin += options_.logit_rows) {
    const int64_t count = std::min(options_.logit_rows, rows - begin);
    OPST_TRY(compute_logits(begin, count, listener));
    for (int64_t i = 0; i < count; ++i) {
      visit(first_position + begin + i,
            {static_cast<const float*>(logits_.data) + static_cast<size_t>(i) * vocab_size, vocab_size});
    }
  }
  return {};
}

Status LlamaSession::run_layers(std::span<const int32_t> tokens, NodeListener* listener) {
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
  OPST_TRY(layers_.execute(*context_, listener));
  position_ += n;
  return {};
}

Status LlamaSession::compute_logits(int64_t begin, int64_t count, NodeListener* listener) {
  OPST_TRY(head_.bind(head_hidden_, hidden_.narrowed(0, begin, count)));
  OPST_TRY(head_.set(logit_rows_, count));
  return head_.execute(*context_, listener);
}

}  // namespace opst::model

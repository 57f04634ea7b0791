// LlamaModel and LlamaSession: the llama architecture (GGUF architecture "llama") on the operators of include/opst.
//
//   h = token_embd[token]
//   every layer:  x = rms_norm(h);  q, k, v = Wq x, Wk x, Wv x;  rope(q), rope(k);  cache k, v at this position
//                 h += Wo attention(q, cached k, cached v)                          causal, grouped KV heads
//                 x = rms_norm(h);  h += Wdown (silu(Wgate x) * Wup x)
//   logits = Woutput rms_norm(h)                                    Woutput = output.weight, else token_embd.weight
//
// Each session has this as two graphs (opst/graph.h), from tokens to the last layer's h and from h to logits.
//
// Rope turns adjacent pairs (the files store Q and K rows in that order), positions count from 0. Arithmetic is f32 on
// exactly dequantised weights, unless SessionOptions say otherwise.
//
//   Result<LlamaModel> model = LlamaModel::load(context, file);
//   Result<LlamaSession> session = LlamaSession::create(context, model.value(), {});
//   Result<std::span<const float>> logits = session.value().feed(prompt);
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/gguf.h"
#include "opst/context.h"
#include "opst/graph.h"
#include "opst/kv_cache.h"
#include "opst/matmul.h"
#include "opst/moe.h"
#include "opst/tensor.h"

namespace opst::model {

// The experts that stand in place of each layer's feed-forward.
struct MixtureConfig {
  int64_t num_experts = 0;      // 0: the model is dense
  int64_t used = 0;             // of them by each token
  int64_t ffn_size = 0;         // of each
  int64_t shared_ffn_size = 0;  // of the expert that every token goes through; 0: there is none
  bool shared_gate = false;     // ..whose result each token multiplies with a sigmoid of its own
  GateScores scores = GateScores::softmax;
  bool renormalise = true;  // the weights of a token's experts have the sum weights_scale
  double weights_scale = 1;
};

struct LlamaConfig {
  std::string architecture;  // "llama", "qwen2moe", "qwen3moe"
  RopeStyle rope_style = RopeStyle::pairs;
  bool projection_biases = false;  // of query, key and value
  bool head_norms = false;         // of each head of query and key
  int64_t num_layers = 0;
  int64_t width = 0;  // embedding_length
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t rope_dims = 0;  // of each head, the first ones
  int64_t ffn_size = 0;
  int64_t vocab_size = 0;
  int64_t max_context = 0;
  double rope_theta = 0;
  double rms_eps = 0;
  MixtureConfig mixture;
};

// Checks every value. What would change the arithmetic and is not implemented (another architecture, rope scaling,
// sliding windows, any key of the architecture that is not known here) is refused by name, and so is a file that is a
// part of a model or an adapter.
Result<LlamaConfig> read_llama_config(const GgufFile& file);

class LlamaModel {
 public:
  // Packs all weights, one after the other; the file is not needed afterwards. First every tensor's shape is checked
  // against the configuration; a tensor that does not belong to the architecture, or of a type that is no QuantFormat,
  // is refused by name.
  static Result<LlamaModel> load(Context& context, const GgufFile& file);

  const LlamaConfig& config() const { return config_; }
  int64_t weight_bytes() const;
  int64_t expert_bytes() const;  // of these, those of the experts among which tokens choose

 private:
  friend class LlamaSession;
  // Matrices that multiply the same x are one weight, their rows one below another, where the file's types allow it;
  // else each is its own.
  struct FeedForward {
    std::vector<PackedWeight> gate_up;
    PackedWeight down;
  };
  struct Layer {
    Buffer attention_norm, ffn_norm;  // f32 [width]
    std::vector<PackedWeight> query_key_value;
    Buffer projection_biases;     // f32, as their rows; empty: none
    Buffer query_norm, key_norm;  // f32 [head_dim]; empty: none
    PackedWeight attention_output;
    FeedForward every_token;  // the dense one, or a shared expert without a gate; empty: none
    // Of a mixture; a shared expert with a gate is one of its own, of one expert.
    struct Experts {
      PackedWeight router;         // [experts, width]; empty: there are none
      PackedWeight gate_up, down;  // stacks [experts, 2 ffn_size, width] and [experts, width, ffn_size]
    };
    Experts experts, gated_expert;
  };
  LlamaModel() = default;
  template <class Source>
  Status take_all(Source& source);
  template <class Source>
  Status take_feed_forward(Source& source, const std::string& prefix, const std::string& suffix, int64_t size,
                           FeedForward& out);
  template <class Source>
  Status take_experts(Source& source, const std::string& prefix, Layer& layer);

  const PackedWeight& output() const { return output_.n() > 0 ? output_ : embedding_; }

  LlamaConfig config_;
  std::vector<Layer> layers_;
  PackedWeight embedding_;
  PackedWeight output_;  // empty where tied to the embedding
  Buffer output_norm_;   // f32 [width]
};

enum class CacheKind : uint8_t {
  contiguous,  // one block that holds the whole context
  paged,       // blocks of block_size positions, found through a block table
};

// What a session's cache may hold: the names that users give, dtypes of pages, formats of kv_format (opst/kv_cache.h).
struct KvType {
  const char* name;
  DType dtype;
  const char* format;
};
inline constexpr KvType kKvTypes[] = {
    {"f32", DType::f32, "f32"},         {"bf16", DType::bf16, "bf16"},
    {"f16", DType::f16, "f16"},         {"int8", DType::i8, "int8"},  // a scale for each token and head
    {"int4", DType::u8, "int4"},  // a scale for each 32 numbers of those, where 32 divides head_dim
    {"fp8", DType::f8_e4m3, "f8_e4m3"}, {"f8_e5m2", DType::f8_e5m2, "f8_e5m2"},
};
// By either name; null for others.
inline const KvType* find_kv_type(std::string_view name) {
  for (const KvType& type : kKvTypes) {
    if (name == type.name || name == type.format) return &type;
  }
  return nullptr;
}

struct SessionOptions {
  int64_t context = 4096;       // positions, at most the model's max_context
  DType kv_dtype = DType::f32;  // one of kKvTypes
  // int8: rounded where they meet quantised weights (opst/matmul.h).
  ActivationType activations = ActivationType::exact;
  CacheKind cache = CacheKind::contiguous;
  // Of a paged cache. Multiples of 32 are read fastest (all but int4): the layout is then panel32, else norm.
  int64_t block_size = 32;
  int64_t prefill_chunk = 512;  // tokens that go through the layers together
  int64_t logit_rows = 1;       // positions whose logits feed_all computes together
};

// One sequence. Everything is allocated by create(); feeding allocates nothing. The context and the model must outlive
// it and stay where they are.
class LlamaSession {
 public:
  static Result<LlamaSession> create(Context& context, const LlamaModel& model, const SessionOptions& options);

  // Appends tokens to the sequence and gives the logits [vocab_size] after the last one, valid until the next call.
  // Refused: no tokens, ids outside the vocabulary, more tokens than the context has room for. After a failure the
  // sequence is as before.
  // `interrupted`, where it is not empty, is asked between the nodes of the graphs, many times a second; where it says
  // true, the call fails and was_interrupted() is true.
  using Interrupted = std::function<bool()>;
  Result<std::span<const float>> feed(std::span<const int32_t> tokens, const Interrupted& interrupted = {});

  // The same with the logits after every token, in order. After a failure, which an exception of `visit` is too, the
  // sequence is as before; what was visited was right.
  using LogitsVisitor = std::function<void(int64_t position, std::span<const float> logits)>;
  Status feed_all(std::span<const int32_t> tokens, const LogitsVisitor& visit, const Interrupted& interrupted = {});

  // Whether the last feed or feed_all failed because it was interrupted.
  bool was_interrupted() const { return was_interrupted_; }

  // Number of tokens fed.
  int64_t position() const { return position_; }
  int64_t context() const { return options_.context; }
  const LlamaConfig& config() const { return model_->config(); }
  int64_t kv_cache_bytes() const { return kv_cache_bytes_; }  // scales counted
  // Starts an empty sequence.
  void reset() { position_ = 0; }
  // Forgets the tokens from `position` on; position <= position().
  void rewind(int64_t position) { position_ = std::min(position, position_); }

  // Is told about every node that runs from now on; null: nobody. Must outlive the session or be taken off.
  void set_listener(NodeListener* listener) { listener_ = listener; }
  // The graphs, at the sizes of the last call of feed or of size_graphs.
  const Graph& layers_graph() const { return layers_; }
  const Graph& logits_graph() const { return head_; }
  // Sizes the graphs for a step of `tokens` tokens, the last of which sees `kv_len` keys, and for logits of one row.
  Status size_graphs(int64_t tokens, int64_t kv_len);

 private:
  LlamaSession(Context& context, const LlamaModel& model, const SessionOptions& options, Graph layers, Graph head)
      : context_(&context), model_(&model), options_(options), layers_(std::move(layers)), head_(std::move(head)) {}

  class Poll;
  struct LayerBuilder;

  Status allocate(DType dtype, std::initializer_list<int64_t> shape, Tensor& tensor);
  Status build_layers();
  // Block table, keys and values, and the scales of integers, for all layers.
  Status allocate_caches();
  // The parts of layer `index`, as values of the graph.
  Status add_caches(int64_t index, Value (&caches)[2], ScaleValues& scales);
  // The decoder layer on `hidden`, which becomes its result.
  Status add_layer(int64_t index, const struct StepValues& step, Value& hidden);
  Status build_head();
  Status check(std::span<const int32_t> tokens) const;
  // Runs up to prefill_chunk tokens through all layers; their hidden states are then in hidden_.
  Status run_layers(std::span<const int32_t> tokens, NodeListener* listener);
  // The same, and the logits of each.
  Status feed_chunk(std::span<const int32_t> tokens, const LogitsVisitor& visit, NodeListener* listener);
  // Logits of rows [begin, begin + count) of hidden_ into logits_.
  Status compute_logits(int64_t begin, int64_t count, NodeListener* listener);

  Context* context_;
  const LlamaModel* model_;
  SessionOptions options_;
  int64_t position_ = 0;
  bool was_interrupted_ = false;
  NodeListener* listener_ = nullptr;

  // Tokens, positions and slots [rows] -> hidden [rows, width]; hidden [logit_rows, width] -> logits.
  Graph layers_, head_;
  Dim rows_, kv_len_, logit_rows_;
  Value head_hidden_;

  std::vector<Buffer> buffers_;
  int64_t num_blocks_ = 1, block_size_ = 0, cache_elements_ = 0, scale_elements_ = 0, kv_cache_bytes_ = 0;
  KvFormat format_;
  Tensor cache_;                       // keys and values of all layers, cache_elements_ each
  Tensor scales_;                      // f32, of integers: scales of the same, scale_elements_ each
  Tensor hidden_;                      // f32 [prefill_chunk, width]
  Tensor logits_;                      // f32 [logit_rows, vocab_size]
  Tensor tokens_, positions_, slots_;  // i64 [prefill_chunk]
  Tensor block_table_, kv_lengths_;    // i64 [1, num_blocks], [1]
  PageLayout page_layout_ = PageLayout::norm;
};

}  // namespace opst::model

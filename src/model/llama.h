// LlamaModel and LlamaSession: the llama architecture (GGUF architecture "llama") on the operators of include/opst.
//
//   h = token_embd[token]
//   every layer:  x = rms_norm(h);  q, k, v = Wq x, Wk x, Wv x;  rope(q), rope(k);  cache k, v at this position
//                 h += Wo attention(q, cached k, cached v)                          causal, grouped KV heads
//                 x = rms_norm(h);  h += Wdown (silu(Wgate x) * Wup x)
//   logits = Woutput rms_norm(h)                                    Woutput = output.weight, else token_embd.weight
//
// Rope turns adjacent pairs (the files store Q and K rows in that order), positions count from 0. Arithmetic is f32 on
// exactly dequantised weights.
//
//   Result<LlamaModel> model = LlamaModel::load(context, file);
//   Result<LlamaSession> session = LlamaSession::create(context, model.value(), {});
//   Result<std::span<const float>> logits = session.value().feed(prompt);
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "model/gguf.h"
#include "opst/context.h"
#include "opst/matmul.h"
#include "opst/tensor.h"

namespace opst::model {

struct LlamaConfig {
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
};

// Checks every value. What would change the arithmetic and is not implemented (another architecture, rope scaling,
// experts, sliding windows ...) is refused by name.
Result<LlamaConfig> read_llama_config(const GgufFile& file);

class LlamaModel {
 public:
  // Packs all weights, one after the other; the file is not needed afterwards. Every tensor's shape is checked against
  // the configuration; a tensor that does not belong to the architecture, or of a type that is no QuantFormat, is
  // refused by name.
  static Result<LlamaModel> load(Context& context, const GgufFile& file);

  const LlamaConfig& config() const { return config_; }
  int64_t weight_bytes() const;

 private:
  friend class LlamaSession;
  struct Layer {
    Buffer attention_norm, ffn_norm;  // f32 [width]
    PackedWeight query, key, value, attention_output, gate, up, down;
  };
  LlamaModel() = default;

  const PackedWeight& output() const { return output_.n() > 0 ? output_ : embedding_; }

  LlamaConfig config_;
  std::vector<Layer> layers_;
  PackedWeight embedding_;
  PackedWeight output_;  // empty where tied to the embedding
  Buffer output_norm_;   // f32 [width]
};

enum class CacheKind : uint8_t {
  contiguous,  // one row of memory per position
  paged,       // blocks of block_size positions, found through a block table
};

struct SessionOptions {
  int64_t context = 4096;       // positions, at most the model's max_context
  DType kv_dtype = DType::f32;  // f32, bf16 or f16
  CacheKind cache = CacheKind::contiguous;
  int64_t block_size = 16;      // of a paged cache
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
  Result<std::span<const float>> feed(std::span<const int32_t> tokens);

  // The same with the logits after every token, in order.
  using LogitsVisitor = std::function<void(int64_t position, std::span<const float> logits)>;
  Status feed_all(std::span<const int32_t> tokens, const LogitsVisitor& visit);

  // Number of tokens fed.
  int64_t position() const { return position_; }
  int64_t context() const { return options_.context; }
  const LlamaConfig& config() const { return model_->config(); }
  int64_t kv_cache_bytes() const;
  // Starts an empty sequence.
  void reset() { position_ = 0; }

 private:
  struct LayerCache {
    Tensor key, value;  // [num_blocks, block_size, num_kv_heads, head_dim]; contiguous: one block
  };
  LlamaSession(Context& context, const LlamaModel& model, const SessionOptions& options)
      : context_(&context), model_(&model), options_(options) {}

  Status allocate();
  Status check(std::span<const int32_t> tokens) const;
  // Runs up to prefill_chunk tokens through all layers; their hidden states are then in hidden_.
  Status run_layers(std::span<const int32_t> tokens);
  Status run_layer(const LlamaModel::Layer& layer, const LayerCache& cache, int64_t num_tokens);
  // Logits of rows [begin, begin + count) of hidden_ into logits_.
  Status compute_logits(int64_t begin, int64_t count);

  Context* context_;
  const LlamaModel* model_;
  SessionOptions options_;
  int64_t position_ = 0;

  std::vector<Buffer> buffers_;
  std::vector<LayerCache> caches_;
  int64_t num_blocks_ = 1, block_size_ = 0;
  // [prefill_chunk, columns] each
  Tensor hidden_, normed_, query_, key_, value_, attended_, gate_, up_;
  Tensor logits_;                      // [logit_rows, vocab_size]
  Tensor cos_, sin_;                   // [prefill_chunk, rope_dims / 2]
  Tensor tokens_, positions_, slots_;  // i64 [prefill_chunk]
  Tensor block_table_, kv_lengths_;    // i64 [1, num_blocks], [1]; paged only
};

}  // namespace opst::model

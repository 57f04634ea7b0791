// read_llama_config: a GGUF file's keys, each checked.
#include <algorithm>
#include <cmath>

#include "core/guarded.h"
#include "model/llama.h"
#include "model/try.h"

namespace opst::model {

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

// A key that the architecture has in other models, and the value at which it changes nothing here.
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
    {"llama.expert_shared_count", 0},
    {"llama.expert_feed_forward_length", 0},
    {"llama.leading_dense_block_count", 0},
    {"llama.attention.sliding_window", 0},
    {"llama.attention.max_alibi_bias", 0},
    {"llama.attention.clamp_kqv", 0},
    {"llama.attn_logit_softcapping", 0},
    {"llama.final_logit_softcapping", 0},
    {"llama.logit_scale", 1},
    {"llama.residual_scale", 1},
    {"llama.embedding_scale", 1},
    {"llama.pooling_type", 0},
};
struct NeutralText {
  const char* key;
  const char* value;
};
constexpr NeutralText kNeutralTexts[] = {
    {"llama.rope.scaling.type", "none"},
    {"llama.hidden_act", "silu"},
    {"llama.activation_function", "silu"},
    // The order of rows that this code expects of query and key.
    {"llama.tensor_data_layout", "Meta AI original pth"},
};
struct NeutralFlag {
  const char* key;
  bool value;
};
constexpr NeutralFlag kNeutralFlags[] = {
    {"llama.attention.causal", true},
    {"llama.use_parallel_residual", false},
};
// Read by read_llama_config, or of no consequence without rope scaling.
constexpr const char* kKnownKeys[] = {
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.attention.key_length",
    "llama.attention.value_length",
    "llama.rope.freq_base",
    "llama.rope.dimension_count",
    "llama.rope.scaling.original_context_length",
    "llama.rope.scaling.finetuned",
    "llama.vocab_size",
};

template <class Entries>
auto entry_of(const Entries& entries, std::string_view key) {
  return std::find_if(std::begin(entries), std::end(entries), [&](const auto& entry) { return key == entry.key; });
}

// Whatever the architecture's namespace holds may change the arithmetic: a key that this code does not know is refused,
// never read over.
Status refuse_unknown_arithmetic(const GgufFile& file) {
  for (const std::string_view key : file.keys()) {
    if (!key.starts_with("llama.")) continue;
    const std::string label = "key " + quoted(key);
    if (std::find(std::begin(kKnownKeys), std::end(kKnownKeys), key) != std::end(kKnownKeys)) continue;
    if (const auto* neutral = entry_of(kNeutral, key); neutral != std::end(kNeutral)) {
      const Result<double> value = file.real(key);
      if (!value.ok()) return value.status();
      if (value.value() != neutral->value) {
        return file.error(label + " is " + std::to_string(value.value()) + ", which is not supported");
      }
    } else if (const auto* text = entry_of(kNeutralTexts, key); text != std::end(kNeutralTexts)) {
      const Result<std::string_view> value = file.string(key);
      if (!value.ok()) return value.status();
      if (value.value() != text->value) {
        return file.error(label + " is " + quoted(value.value()) + ", but only '" + text->value + "' is supported");
      }
    } else if (const auto* flag = entry_of(kNeutralFlags, key); flag != std::end(kNeutralFlags)) {
      const Result<bool> value = file.boolean(key);
      if (!value.ok()) return value.status();
      if (value.value() != flag->value) {
        return file.error(label + " is " + (value.value() ? "true" : "false") + ", which is not supported");
      }
    } else {
      return file.error(label + " is not supported: it may change what the model computes");
    }
  }
  return {};
}

// Files that hold tensors and are no whole model.
Status refuse_parts_of_models(const GgufFile& file) {
  if (file.has("general.type")) {
    const Result<std::string_view> type = file.string("general.type");
    if (!type.ok()) return type.status();
    if (type.value() == "adapter") {
      return file.error("is an adapter (LoRA), which changes a model and is none itself; adapters are not supported");
    }
    if (type.value() != "model") {
      return file.error("general.type is " + quoted(type.value()) + ", but only 'model' is supported");
    }
  }
  if (file.has("split.count")) {
    const Result<int64_t> count = file.integer("split.count");
    if (!count.ok()) return count.status();
    if (count.value() > 1) {
      const Result<int64_t> part = file.integer("split.no");
      const std::string which = part.ok() ? "part " + str(part.value() + 1) : std::string("a part");
      return file.error("is " + which + " of a model that is split into " + str(count.value()) +
                        " files, which is not supported: merge them (llama-gguf-split --merge)");
    }
  }
  return {};
}

}  // namespace

Result<LlamaConfig> read_llama_config(const GgufFile& file) try {
  OPST_TRY(refuse_parts_of_models(file));
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

}  // namespace opst::model

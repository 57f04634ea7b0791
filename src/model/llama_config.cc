// read_llama_config: a GGUF file's keys, each checked.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/guarded.h"
#include "model/llama.h"
#include "model/try.h"

namespace opst::model {

namespace {

// Keeps every product of two sizes far from overflow; no real model is near it.
constexpr int64_t kLargestSize = int64_t{1} << 24;
constexpr int64_t kLargestHeadDim = 768;  // of the attention operator
constexpr int64_t kRequired = -1;         // in place of the value of a key that is missing

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

// What differs between the architectures.
struct Architecture {
  const char* name;
  RopeStyle rope_style;
  bool projection_biases;
  bool head_norms;
  bool always_mixture;  // a file without experts is no model of it
  bool renormalise;     // the weights of a token's experts, where the file does not say
  bool shared_expert;   // there always is one, with a gate
};
constexpr Architecture kArchitectures[] = {
    {"llama", RopeStyle::pairs, false, false, false, true, false},
    {"qwen2moe", RopeStyle::halves, true, false, true, false, true},
    {"qwen3moe", RopeStyle::halves, false, true, true, true, false},
};

// A key that an architecture has in other models, behind its name, and the value at which it changes nothing here.
struct Neutral {
  const char* key;
  double value;
};
constexpr Neutral kNeutral[] = {
    {"rope.scaling.factor", 1},
    {"rope.scale_linear", 1},
    {"rope.scaling.attn_factor", 1},
    {"leading_dense_block_count", 0},
    {"attention.sliding_window", 0},
    {"attention.max_alibi_bias", 0},
    {"attention.clamp_kqv", 0},
    {"attn_logit_softcapping", 0},
    {"final_logit_softcapping", 0},
    {"logit_scale", 1},
    {"residual_scale", 1},
    {"embedding_scale", 1},
    {"pooling_type", 0},
};
struct NeutralText {
  const char* key;
  const char* value;
};
constexpr NeutralText kNeutralTexts[] = {
    {"rope.scaling.type", "none"},
    {"hidden_act", "silu"},
    {"activation_function", "silu"},
    // The order of rows that this code expects of query and key.
    {"tensor_data_layout", "Meta AI original pth"},
};
struct NeutralFlag {
  const char* key;
  bool value;
};
constexpr NeutralFlag kNeutralFlags[] = {
    {"attention.causal", true},
    {"use_parallel_residual", false},
};
// Read below, or of no consequence without rope scaling.
constexpr const char* kKnownKeys[] = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "attention.key_length",
    "attention.value_length",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "vocab_size",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "expert_weights_scale",
    "expert_weights_norm",
    "expert_gating_func",
};

template <class Entries>
auto entry_of(const Entries& entries, std::string_view key) {
  return std::find_if(std::begin(entries), std::end(entries), [&](const auto& entry) { return key == entry.key; });
}

// Whatever the architecture's namespace (prefix "llama.") holds may change the arithmetic: a key that this code does not
// know is refused, never read over.
Status refuse_unknown_arithmetic(const GgufFile& file, const std::string& prefix) {
  for (const std::string_view full : file.keys()) {
    if (!full.starts_with(prefix)) continue;
    const std::string_view key = full.substr(prefix.size());
    const std::string label = "key " + quoted(full);
    if (std::find(std::begin(kKnownKeys), std::end(kKnownKeys), key) != std::end(kKnownKeys)) continue;
    if (const auto* neutral = entry_of(kNeutral, key); neutral != std::end(kNeutral)) {
      const Result<double> value = file.real(full);
      if (!value.ok()) return value.status();
      if (value.value() != neutral->value) {
        return file.error(label + " is " + std::to_string(value.value()) + ", which is not supported");
      }
    } else if (const auto* text = entry_of(kNeutralTexts, key); text != std::end(kNeutralTexts)) {
      const Result<std::string_view> value = file.string(full);
      if (!value.ok()) return value.status();
      if (value.value() != text->value) {
        return file.error(label + " is " + quoted(value.value()) + ", but only '" + text->value + "' is supported");
      }
    } else if (const auto* flag = entry_of(kNeutralFlags, key); flag != std::end(kNeutralFlags)) {
      const Result<bool> value = file.boolean(full);
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

Status read_architecture(const GgufFile& file, const Architecture*& found) {
  const Result<std::string_view> name = file.string("general.architecture");
  if (!name.ok()) return name.status();
  std::string known;
  for (const Architecture& architecture : kArchitectures) {
    if (name.value() == architecture.name) found = &architecture;
    known += std::string(known.empty() ? "'" : ", '") + architecture.name + "'";
  }
  if (found != nullptr) return {};
  return file.error("general.architecture is " + quoted(name.value()) + ", but only " + known + " are supported");
}

Status read_heads(const GgufFile& file, const std::string& prefix, LlamaConfig& config) {
  OPST_TRY(read_size(file, prefix + "attention.head_count", kRequired, config.num_heads));
  OPST_TRY(read_size(file, prefix + "attention.head_count_kv", config.num_heads, config.num_kv_heads));
  if (config.num_heads % config.num_kv_heads != 0) {
    return file.error(prefix + "attention.head_count is " + str(config.num_heads) +
                      ", not a multiple of head_count_kv = " + str(config.num_kv_heads));
  }
  const bool has_head_dim = file.has(prefix + "attention.key_length");
  if (!has_head_dim && config.width % config.num_heads != 0) {
    return file.error(prefix + "embedding_length is " + str(config.width) +
                      ", not a multiple of head_count = " + str(config.num_heads));
  }
  const int64_t usual_head_dim = config.width / config.num_heads;
  OPST_TRY(
      read_size(file, prefix + "attention.key_length", has_head_dim ? kRequired : usual_head_dim, config.head_dim));
  if (config.head_dim > kLargestHeadDim) {
    return file.error("the head size is " + str(config.head_dim) + ", but at most " + str(kLargestHeadDim) +
                      " is supported");
  }
  int64_t value_dim = 0;
  OPST_TRY(read_size(file, prefix + "attention.value_length", config.head_dim, value_dim));
  if (value_dim != config.head_dim) {
    return file.error(prefix + "attention.value_length is " + str(value_dim) + ", but the head size is " +
                      str(config.head_dim) + "; different ones are not supported");
  }
  OPST_TRY(read_size(file, prefix + "rope.dimension_count", config.head_dim, config.rope_dims));
  if (config.rope_dims > config.head_dim || config.rope_dims % 2 != 0) {
    return file.error(prefix + "rope.dimension_count is " + str(config.rope_dims) +
                      ", expected an even number up to the head size " + str(config.head_dim));
  }
  return {};
}

// A dense model: what says anything of experts says 0.
Status refuse_experts(const GgufFile& file, const std::string& prefix) {
  for (const std::string_view key : file.keys()) {
    if (!key.starts_with(prefix + "expert_")) continue;
    const Result<double> value = file.real(key);
    if (value.ok() && value.value() == 0) continue;
    return file.error("key " + quoted(key) + " is given, but '" + prefix +
                      "expert_count' says that there are no experts");
  }
  return {};
}

// How a token's experts are weighted.
Status read_gating(const GgufFile& file, const std::string& prefix, MixtureConfig& mixture) {
  OPST_TRY(read_real(file, prefix + "expert_weights_scale", 1, mixture.weights_scale));
  // As an f32, which is what the operator takes.
  if (!(mixture.weights_scale > 0 && mixture.weights_scale <= std::numeric_limits<float>::max())) {
    return file.error("key '" + prefix + "expert_weights_scale' is " + std::to_string(mixture.weights_scale) +
                      ", expected more than 0");
  }
  if (const std::string key = prefix + "expert_weights_norm"; file.has(key)) {
    const Result<bool> norm = file.boolean(key);
    if (!norm.ok()) return norm.status();
    mixture.renormalise = norm.value();
  }
  constexpr int64_t kSoftmax = 1, kSigmoid = 2;
  int64_t scores = 0;
  OPST_TRY(read_size(file, prefix + "expert_gating_func", kSoftmax, scores));
  if (scores != kSoftmax && scores != kSigmoid) {
    return file.error("key '" + prefix + "expert_gating_func' is " + str(scores) +
                      ", but only 1 (softmax) and 2 (sigmoid) are supported");
  }
  mixture.scores = scores == kSigmoid ? GateScores::sigmoid : GateScores::softmax;
  return {};
}

Status read_mixture(const GgufFile& file, const std::string& prefix, const Architecture& architecture,
                    LlamaConfig& config) {
  MixtureConfig& mixture = config.mixture;
  const auto is_zero = [&](const char* key) {
    const Result<int64_t> value = file.integer(prefix + key);
    return value.ok() && value.value() == 0;
  };
  const bool dense = !file.has(prefix + "expert_count") || is_zero("expert_count");
  if (dense && !architecture.always_mixture) return refuse_experts(file, prefix);
  OPST_TRY(read_size(file, prefix + "expert_count", kRequired, mixture.num_experts));
  OPST_TRY(read_size(file, prefix + "expert_used_count", kRequired, mixture.used));
  if (mixture.used > mixture.num_experts) {
    return file.error(prefix + "expert_used_count is " + str(mixture.used) + ", but expert_count is " +
                      str(mixture.num_experts));
  }
  OPST_TRY(read_size(file, prefix + "expert_feed_forward_length", config.ffn_size, mixture.ffn_size));
  if (architecture.shared_expert) {
    OPST_TRY(read_size(file, prefix + "expert_shared_feed_forward_length", config.ffn_size, mixture.shared_ffn_size));
  } else if (!is_zero("expert_shared_feed_forward_length") && file.has(prefix + "expert_shared_feed_forward_length")) {
    OPST_TRY(read_size(file, prefix + "expert_shared_feed_forward_length", kRequired, mixture.shared_ffn_size));
  } else if (!is_zero("expert_shared_count") && file.has(prefix + "expert_shared_count")) {
    // So many experts of the common size, one below another.
    OPST_TRY(read_size(file, prefix + "expert_shared_count", kRequired, mixture.shared_ffn_size));
    mixture.shared_ffn_size *= mixture.ffn_size;
    if (mixture.shared_ffn_size > kLargestSize) {
      return file.error("the shared experts have a size of " + str(mixture.shared_ffn_size) + ", at most " +
                        str(kLargestSize) + " is supported");
    }
  }
  mixture.shared_gate = architecture.shared_expert || file.find_tensor("blk.0.ffn_gate_inp_shexp.weight") != nullptr;
  mixture.renormalise = architecture.renormalise;
  return read_gating(file, prefix, mixture);
}

}  // namespace

Result<LlamaConfig> read_llama_config(const GgufFile& file) try {
  OPST_TRY(refuse_parts_of_models(file));
  const Architecture* architecture = nullptr;
  OPST_TRY(read_architecture(file, architecture));
  const std::string prefix = std::string(architecture->name) + ".";
  OPST_TRY(refuse_unknown_arithmetic(file, prefix));

  LlamaConfig config;
  config.architecture = architecture->name;
  config.rope_style = architecture->rope_style;
  config.projection_biases = architecture->projection_biases;
  config.head_norms = architecture->head_norms;
  OPST_TRY(read_size(file, prefix + "block_count", kRequired, config.num_layers));
  OPST_TRY(read_size(file, prefix + "context_length", kRequired, config.max_context));
  OPST_TRY(read_size(file, prefix + "embedding_length", kRequired, config.width));
  OPST_TRY(read_size(file, prefix + "feed_forward_length", kRequired, config.ffn_size));
  OPST_TRY(read_real(file, prefix + "attention.layer_norm_rms_epsilon", 0, config.rms_eps));
  OPST_TRY(read_real(file, prefix + "rope.freq_base", 10000, config.rope_theta));
  if (config.rope_theta <= 0) return file.error("key '" + prefix + "rope.freq_base' is 0, expected more");
  OPST_TRY(read_heads(file, prefix, config));
  OPST_TRY(read_mixture(file, prefix, *architecture, config));
  const GgufTensor* embedding = file.find_tensor("token_embd.weight");
  if (embedding == nullptr) return file.error("tensor 'token_embd.weight' is missing");
  OPST_TRY(read_size(file, prefix + "vocab_size", embedding->dims[1], config.vocab_size));
  if (config.vocab_size > kLargestSize) return file.error("the vocabulary has " + str(config.vocab_size) + " tokens");
  return config;
} catch (...) {
  return status_of_exception();
}

}  // namespace opst::model

// What the subcommands that run a model share: how it is sampled, and its session's context and cache.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "command.h"
#include "model/llama.h"
#include "model/sampler.h"

namespace opst::tools {

// --greedy, --temperature, --top-k, --top-p, --seed
class SamplingArguments {
 public:
  // To be called once. The object must outlive the command's parsing.
  void add_to(CLI::App& command);
  // Greedy unless one of the others was given. A value out of range is a usage error.
  model::SamplingOptions chosen() const;

 private:
  bool greedy_ = false;
  model::SamplingOptions sampling_;
  std::vector<CLI::Option*> sampled_;
};

// --activations, and what its text means.
void add_activations_option(CLI::App& command, std::string& activations);
ActivationType activation_type(const std::string& activations);

// --kv-dtype, one of model::kKvTypes by either name, and the dtype of pages that it means.
void add_kv_dtype_option(CLI::App& command, std::string& name);
DType kv_dtype_of(const std::string& name);

// --context, --kv-dtype, --activations
class SessionArguments {
 public:
  void add_to(CLI::App& command, const std::string& context_help, int64_t least_context = 1);
  // What was given, else the default or, where that is less, the model's. More than the model's is a usage error.
  int64_t context(const model::LlamaConfig& config, int64_t default_context) const;
  DType kv_dtype() const { return kv_dtype_of(kv_dtype_); }
  const std::string& kv_dtype_name() const { return kv_dtype_; }
  ActivationType activations() const { return activation_type(activations_); }

 private:
  std::optional<int64_t> context_;
  std::string kv_dtype_ = "f32";
  std::string activations_ = "exact";
};

}  // namespace opst::tools

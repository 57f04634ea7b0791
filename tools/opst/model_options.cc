#include "model_options.h"

#include <algorithm>

namespace opst::tools {

void SamplingArguments::add_to(CLI::App& command) {
  CLI::Option* greedy = command.add_flag(
      "--greedy", greedy_, "Always take the likeliest token. The default, unless an option below is given");
  sampled_ = {
      command.add_option("--temperature", sampling_.temperature, "Divides the logits; 0 is greedy (default 1)")
          ->type_name("T"),
      command.add_option("--top-k", sampling_.top_k, "Draw from the K likeliest tokens; 0: all (default 0)")
          ->check(at_least(0))
          ->type_name("K"),
      command
          .add_option("--top-p", sampling_.top_p, "Draw from the fewest tokens whose probability reaches P (default 1)")
          ->type_name("P"),
      command
          .add_option("-s,--seed", sampling_.seed,
                      "Of the random numbers; the same seed gives the same text (default 0)")
          ->check(any_uint64())
          ->type_name("N"),
  };
  for (CLI::Option* option : sampled_) option->excludes(greedy);
}

model::SamplingOptions SamplingArguments::chosen() const {
  model::SamplingOptions sampling = sampling_;
  sampling.greedy =
      std::none_of(sampled_.begin(), sampled_.end(), [](const CLI::Option* option) { return option->count() > 0; });
  if (const auto sampler = model::Sampler::create(sampling); !sampler.ok()) status_error(sampler.status(), 2);
  return sampling;
}

void add_activations_option(CLI::App& command, std::string& activations) {
  command
      .add_option("--activations", activations,
                  "What quantised weights are multiplied with. int8: numbers rounded in blocks of 32, faster where "
                  "many tokens are read at once")
      ->check(one_of({"exact", "int8"}))
      ->type_name("exact|int8")
      ->capture_default_str();
}

ActivationType activation_type(const std::string& activations) {
  return activations == "int8" ? ActivationType::int8 : ActivationType::exact;
}

void add_kv_dtype_option(CLI::App& command, std::string& name) {
  std::vector<std::string> names;
  std::string all;
  for (const model::KvType& type : model::kKvTypes) {
    names.emplace_back(type.name);
    if (names.back() != type.format) names.emplace_back(type.format);
  }
  for (const std::string& known : names) all += (all.empty() ? "" : "|") + known;
  command
      .add_option("--kv-dtype", name,
                  "How keys and values are cached. int8: with a scale for each token and head; int4: with one for each "
                  "32 numbers; fp8, f8_e4m3: three bits of mantissa; f8_e5m2: two")
      ->check(one_of(names))
      ->type_name(all)
      ->capture_default_str();
}

DType kv_dtype_of(const std::string& name) {
  const model::KvType* const type = model::find_kv_type(name);
  return type == nullptr ? DType::f32 : type->dtype;
}

void SessionArguments::add_to(CLI::App& command, const std::string& context_help, int64_t least_context) {
  command.add_option("-c,--context", context_, context_help)->check(at_least(least_context))->type_name("N");
  add_kv_dtype_option(command, kv_dtype_);
  add_activations_option(command, activations_);
}

int64_t SessionArguments::context(const model::LlamaConfig& config, int64_t default_context) const {
  const int64_t context = context_.value_or(std::min(default_context, config.max_context));
  if (context > config.max_context) {
    usage_error("--context is " + std::to_string(context) + ", but the model's is " +
                std::to_string(config.max_context));
  }
  return context;
}

}  // namespace opst::tools

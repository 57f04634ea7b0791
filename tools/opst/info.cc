// opst info: what the library sees of this machine and what it chose.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "command.h"
#include "machine_profile.h"
#include "model/llama.h"
#include "opst/tensor.h"
#include "testing/peak.h"

namespace opst::tools {

namespace {

struct Options {
  std::string model_path;
  int num_threads = 0;
  bool json = false;
  bool profile = false;
};

std::string how_bf16_was_chosen(const Machine& machine) {
  if (!includes(machine.isa, Isa::avx512_bf16)) return "the level has no bf16 dot product";
  return std::getenv("OPST_BF16") != nullptr ? "pinned by OPST_BF16" : "measured at start";
}

// What this machine does now, at this level and on these threads: the best of a few bursts, as others may share it.
struct Rates {
  double f32_flops_per_second = 0, bf16_flops_per_second = 0, read_bytes_per_second = 0;
};

Rates measure_rates(const Context& context) {
  constexpr int kBursts = 5;
  constexpr double kBurstSeconds = 0.02;
  // More than caches hold.
  const Buffer memory = value_or_fail(Buffer::allocate(int64_t{256} << 20));
  std::fill_n(static_cast<char*>(memory.data()), memory.size_bytes(), char{1});
  const auto raise_to = [](double& best, double value) { best = std::max(best, value); };
  const auto flops = [&](test::PeakKind kind) {
    return test::measure_peak(context, kind, kBurstSeconds).flops_per_second;
  };
  Rates rates;
  for (int i = 0; i < kBursts; ++i) {
    raise_to(rates.f32_flops_per_second, flops(test::PeakKind::f32));
    raise_to(rates.bf16_flops_per_second, flops(test::PeakKind::bf16));
    raise_to(rates.read_bytes_per_second, test::measure_read_bandwidth(context, memory.data(), memory.size_bytes()));
  }
  return rates;
}

// What a model's file holds: its sizes, and the bytes of its tensors, those of experts apart.
void describe_model(const Options& options) {
  const model::GgufFile file = value_or_fail(model::GgufFile::open(options.model_path));
  const model::LlamaConfig c = value_or_fail(model::read_llama_config(file));
  uint64_t all = 0, experts = 0;
  for (const model::GgufTensor& tensor : file.tensors()) {
    all += tensor.size_bytes;
    if (tensor.name.find("_exps.") != std::string_view::npos) experts += tensor.size_bytes;
  }
  if (options.json) {
    write_json({{"architecture", c.architecture},
                {"layers", c.num_layers},
                {"width", c.width},
                {"heads", c.num_heads},
                {"kv_heads", c.num_kv_heads},
                {"head_dim", c.head_dim},
                {"vocab_size", c.vocab_size},
                {"max_context", c.max_context},
                {"experts", c.mixture.num_experts},
                {"experts_used", c.mixture.used},
                {"shared_expert_size", c.mixture.shared_ffn_size},
                {"tensor_bytes", all},
                {"expert_bytes", experts}});
    return;
  }
  const auto str = [](int64_t value) { return std::to_string(value); };
  const auto megabytes = [](uint64_t bytes) { return std::to_string(bytes / 1000000) + " MB"; };
  const model::MixtureConfig& m = c.mixture;
  const std::string ffn =
      m.num_experts == 0 ? "feed-forward  " + str(c.ffn_size) + "\n"
                         : "experts       " + str(m.num_experts) + " of " + str(m.ffn_size) + ", " + str(m.used) +
                               " used by each token" +
                               (m.shared_ffn_size > 0 ? ", and a shared one of " + str(m.shared_ffn_size) : "") + "\n";
  write_output("architecture  " + c.architecture + "\nlayers        " + str(c.num_layers) + " of width " +
               str(c.width) + "\nheads         " + str(c.num_heads) + " of " + str(c.head_dim) + ", keys and values " +
               str(c.num_kv_heads) + "\n" + ffn + "tokens        " + str(c.vocab_size) + ", context " +
               str(c.max_context) + "\ntensors       " + megabytes(all) +
               (m.num_experts > 0 ? ", of which " + megabytes(experts) + " are experts'" : "") + "\n");
}

void run(const Options& options) {
  if (!options.model_path.empty()) return describe_model(options);
  Context context = make_context(options.num_threads);
  if (options.profile) return write_output(to_text(measure_machine(context)));
  const Machine& machine = context.machine();
  const Rates rates = measure_rates(context);
  const std::string bf16_reason = how_bf16_was_chosen(machine);
  if (options.json) {
    write_json({{"version", OPST_VERSION},
                {"isa", to_string(machine.isa)},
                {"isa_detected", to_string(detect_isa())},
                {"cores", machine.cores},
                {"threads", context.num_threads()},
                {"l1d_bytes", machine.cache.l1d_bytes},
                {"l2_bytes", machine.cache.l2_bytes},
                {"l3_bytes_per_core", machine.cache.l3_bytes_per_core},
                {"bf16_product", to_string(machine.bf16_product)},
                {"bf16_product_reason", bf16_reason},
                {"f32_flops_per_second", rates.f32_flops_per_second},
                {"bf16_flops_per_second", rates.bf16_flops_per_second},
                {"read_bytes_per_second", rates.read_bytes_per_second}});
    return;
  }
  const auto kib = [](int64_t bytes) { return std::to_string(bytes / 1024) + " KiB"; };
  char measured[256];
  std::snprintf(measured, sizeof measured,
                "multiply-add  f32 %.0f GFLOP/s, bf16 %.0f GFLOP/s (measured now, all threads)\n"
                "read          %.1f GB/s from 256 MB (measured now, all threads)\n",
                rates.f32_flops_per_second / 1e9, rates.bf16_flops_per_second / 1e9, rates.read_bytes_per_second / 1e9);
  write_output(std::string("version       ") + OPST_VERSION + "\nisa           " + to_string(machine.isa) +
               " (this processor has " + to_string(detect_isa()) + ")" + "\ncores         " +
               std::to_string(machine.cores) + "\nthreads       " + std::to_string(context.num_threads()) +
               "\ncaches        L1d " + kib(machine.cache.l1d_bytes) + ", L2 " + kib(machine.cache.l2_bytes) +
               ", L3 per core " + kib(machine.cache.l3_bytes_per_core) + "\nbf16 product  " +
               to_string(machine.bf16_product) + " (" + bf16_reason + ")\n" + measured);
}

}  // namespace

void add_info(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("info", "Show the machine as the library sees it, what it chose, and how fast it is");
  CLI::Option* model =
      command->add_option("-m,--model", options->model_path, "A GGUF file: show what it holds, in place of the machine")
          ->type_name("FILE");
  add_threads_option(*command, options->num_threads);
  CLI::Option* json = command->add_flag("--json", options->json, "Print one JSON object");
  command->add_flag("--profile", options->profile, "Measure the machine as a file for --machine of opst plan")
      ->excludes(model)
      ->excludes(json);
  command->callback([options] { run(*options); });
}

}  // namespace opst::tools

// opst plan memory: what the score matrix of standard attention takes, and at which length memory ends.
// opst plan kv: what a cache of keys and values takes, and what reading it costs a decoded token.
#include <cstdio>

#include "attention_outlook.h"
#include "bench.h"
#include "opst/kv_cache.h"
#include "plan_machine.h"
#include "system_memory.h"

namespace opst::tools {

namespace {

struct MemoryArguments {
  AttentionArguments problem;
  std::string machine;
  bool train = false;
};

void run_memory(const MemoryArguments& a) {
  const MachineProfile m = machine_profile(a.machine, a.problem.num_threads);
  const double capacity = m.total_bytes(m.main_memory());
  const double matrices = a.train ? kTrainingMatrices : 1;
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  AttentionProblem any;
  if (!a.problem.json) {
    char text[256];
    std::snprintf(text, sizeof text, "%s%s, %s of %s\n%9s  %12s  %12s  %12s  %s\n", machine_text(m).c_str(),
                  a.train ? "training" : "inference", m.main_memory().name.c_str(), binary_bytes(capacity).c_str(),
                  "keys", "scores", "standard", "flash", "fits");
    write_output(text);
  }
  for (const AttentionSetup& setup : attention_setups(a.problem)) {
    const AttentionProblem& p = any = setup.problem;
    const double scores = matrices * score_bytes(p), standard = standard_memory_bytes(p, a.train);
    const double flash = flash_memory_bytes(p, a.train);
    const char* fits = standard <= capacity ? "both" : flash <= capacity ? "flash only" : "neither";
    if (a.problem.json) {
      rows.push_back({{"kv_len", p.kv_len},
                      {"score_bytes", scores},
                      {"standard_bytes", standard},
                      {"flash_bytes", flash},
                      {"fits", fits}});
      continue;
    }
    char text[160];
    std::snprintf(text, sizeof text, "%9lld  %12s  %12s  %12s  %s\n", static_cast<long long>(p.kv_len),
                  binary_bytes(scores).c_str(), binary_bytes(standard).c_str(), binary_bytes(flash).c_str(), fits);
    write_output(text);
  }
  const int64_t standard = longest_that_fits(any, capacity, standard_memory_bytes, a.train);
  const int64_t flash = longest_that_fits(any, capacity, flash_memory_bytes, a.train);
  if (a.problem.json) {
    write_json({{"machine", to_json(m)},
                {"train", a.train},
                {"capacity_bytes", capacity},
                {"standard_ends_at", standard},
                {"flash_ends_at", flash},
                {"rows", rows}});
    return;
  }
  write_output("scores: " + std::string(a.train ? "three matrices (scores, weights, their gradient)" : "one matrix") +
               " of " + a.problem.dtype + "; memory ends at " + std::to_string(standard) +
               " keys of the standard form, at " + std::to_string(flash) + " of flash\n");
}

struct KvArguments {
  std::string machine, format = "bf16";
  std::vector<int64_t> context = {4096, 32768, 131072};
  int64_t layers = 32, kv_heads = 32, head_dim = 128, value_head_dim = 0, batch = 1;
  int num_threads = 0;
  bool json = false;
};

// Bytes of a token's keys and values in a layer and a head, scales and offsets counted.
double token_bytes(const KvArguments& a, int64_t value_dim) {
  const KvFormat format = value_or_fail(kv_format(a.format, a.head_dim, value_dim), 2);
  for (const int64_t dim : {a.head_dim, value_dim}) {
    if (format.dtype == DType::u8 && dim % 2 != 0) {
      usage_error("head_dim is " + std::to_string(dim) + ", but " + a.format + " has two values to a byte");
    }
  }
  const auto side = [&](int64_t dim, int64_t groups) {
    const double scales = static_cast<double>(groups) * 4 * (format.has_offsets ? 2 : 1);
    return static_cast<double>(dim) * static_cast<double>(size_bytes(format.dtype)) /
               (format.dtype == DType::u8 ? 2 : 1) +
           scales;
  };
  return side(a.head_dim, format.key_groups) + side(value_dim, format.value_groups);
}

void run_kv(const KvArguments& a) {
  const MachineProfile m = machine_profile(a.machine, a.num_threads);
  const int64_t value_dim = a.value_head_dim > 0 ? a.value_head_dim : a.head_dim;
  const double token = token_bytes(a, value_dim) * static_cast<double>(a.layers) * static_cast<double>(a.kv_heads);
  const double capacity = m.total_bytes(m.main_memory()), rate = m.main_memory().read.value;
  const auto longest = static_cast<int64_t>(capacity / (token * static_cast<double>(a.batch)));
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  if (!a.json) {
    write_output(machine_text(m) + "cache of " + a.format + ": " + binary_bytes(token) +
                 " per token; its memory ends at " + std::to_string(longest) + " tokens of each of " +
                 std::to_string(a.batch) + " sequence(s)\n");
  }
  for (const int64_t context : a.context) {
    const double bytes = token * static_cast<double>(context) * static_cast<double>(a.batch);
    if (a.json) {
      rows.push_back(
          {{"context", context}, {"bytes", bytes}, {"fits", bytes <= capacity}, {"read_ms", bytes / rate * 1e3}});
      continue;
    }
    char text[200];
    std::snprintf(text, sizeof text, "%9lld tokens  %10s  %5.1f %% of %s; read for a decoded token in %s%s\n",
                  static_cast<long long>(context), binary_bytes(bytes).c_str(), bytes / capacity * 100,
                  m.main_memory().name.c_str(), human_seconds(bytes / rate).c_str(),
                  bytes <= capacity ? "" : ", no fit");
    write_output(text);
  }
  if (a.json) {
    write_json({{"machine", to_json(m)},
                {"bytes_per_token", token},
                {"capacity_bytes", capacity},
                {"ends_at", longest},
                {"rows", rows}});
  }
}

}  // namespace

void add_plan_memory(CLI::App& plan) {
  auto a = std::make_shared<MemoryArguments>();
  a->problem.heads = 32, a->problem.head_dim = 128, a->problem.dtype = "bf16";
  a->problem.seq = {4096, 8192, 16384, 32768, 65536, 131072};
  CLI::App* command = plan.add_subcommand("memory", "Memory of standard and flash attention, and where it ends");
  add_machine_option(*command, a->machine)->required();
  AttentionArguments& p = a->problem;
  command->add_option("--dtype", p.dtype, "Type of the tensors and the scores")
      ->check(one_of({"f32", "bf16", "f16"}))
      ->capture_default_str();
  command->add_option("--batch", p.batch, "Sequences")->check(between(1, 1 << 20))->capture_default_str();
  command->add_option("--heads", p.heads, "Query heads")->check(between(1, 1 << 20))->capture_default_str();
  command->add_option("--kv-heads", p.kv_heads, "Key/value heads (default: as --heads)")->check(between(1, 1 << 20));
  command->add_option("--head-dim", p.head_dim, "Size of queries, keys and values")
      ->check(between(1, 768))
      ->capture_default_str();
  add_list(*command, "--seq", p.seq, "Keys and queries, separated by commas", between(1, int64_t{1} << 30))
      ->type_name("INT");
  command->add_flag("--train", a->train, "What the gradients need too");
  add_threads_option(*command, p.num_threads);
  command->add_flag("--json", p.json, "Print one JSON object");
  command->callback([a] { run_memory(*a); });
}

void add_plan_kv(CLI::App& plan) {
  auto a = std::make_shared<KvArguments>();
  CLI::App* command = plan.add_subcommand("kv", "Memory of a cache of keys and values, and the time of reading it");
  add_machine_option(*command, a->machine)->required();
  command->add_option("--kv-dtype", a->format, "f32, bf16, f16, f8_e4m3, f8_e5m2, int8, int8_offset, int4, int4_offset")
      ->capture_default_str();
  add_list(*command, "--context", a->context, "Tokens of a sequence, separated by commas", between(1, int64_t{1} << 30))
      ->type_name("INT");
  const auto size = [&](const char* name, int64_t& value, const char* help, int64_t most) {
    return command->add_option(name, value, help)->check(between(1, most));
  };
  size("--layers", a->layers, "Layers", 4096)->capture_default_str();
  size("--kv-heads", a->kv_heads, "Key/value heads", 1 << 20)->capture_default_str();
  size("--head-dim", a->head_dim, "Size of a key", 768)->capture_default_str();
  size("--value-head-dim", a->value_head_dim, "Size of a value (default: as --head-dim)", 768);
  size("--batch", a->batch, "Sequences", 1 << 20)->capture_default_str();
  add_threads_option(*command, a->num_threads);
  command->add_flag("--json", a->json, "Print one JSON object");
  command->callback([a] { run_kv(*a); });
}

}  // namespace opst::tools

// opst plan attention: what the operator would do with a problem, where its data lives, and what bounds its time.
#include <algorithm>
#include <cstdio>

#include "attention_backward_case.h"
#include "attention_case.h"
#include "bench.h"
#include "plan_machine.h"
#include "testing/peak.h"

namespace opst::tools {

namespace {

struct Traffic {
  double inputs_outputs = 0;  // bytes of q, k, v and out, each once
  double flash = 0;           // through memory
  double standard = 0;
};

Traffic traffic_of(const AttentionProblem& p, const AttentionPlan& plan, const Machine& machine) {
  const auto mul = [](int64_t a, int64_t b, int64_t c, int64_t d) {
    return static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(c) * static_cast<double>(d);
  };
  const double q = mul(p.batch, p.num_heads, p.query_len, p.head_dim + p.value_head_dim) *
                   static_cast<double>(size_bytes(p.query_dtype));
  const int64_t again = p.shared_prefix.groups > 0 ? (p.batch - 1) * p.shared_prefix.keys : 0;  // read once only
  const double kv = mul(p.batch * p.kv_len - again, p.num_kv_heads, 1, p.head_dim + p.value_head_dim) *
                    static_cast<double>(size_bytes(p.kv_dtype));
  Traffic t;
  t.inputs_outputs = q + kv;
  t.flash = q + kv;
  // Packed keys and values that outgrow the last-level cache are written and then read once per block of rows.
  if (plan.kv_access == KvAccess::packed_shared) {
    const double heads = static_cast<double>(p.batch * p.num_kv_heads);
    const double packed = static_cast<double>(plan.scratch_bytes_shared) / static_cast<double>(plan.heads_per_wave);
    const double l3 = static_cast<double>(machine.cache.l3_bytes_per_core) * machine.cores;
    const double blocks = static_cast<double>(plan.num_tasks) / heads / static_cast<double>(plan.kv_splits);
    if (packed > l3) t.flash += heads * packed * (1 + blocks * (p.options.causal ? 0.5 : 1.0));
  }
  // Scores are written, read and written by the softmax, and read again.
  t.standard = q + kv + 4 * mul(p.batch, p.num_heads, p.query_len, p.kv_len) * 4.0;
  return t;
}

// The smallest cache that `bytes` fit into.
const char* home_of(int64_t bytes, const Machine& machine) {
  if (bytes <= machine.cache.l1d_bytes) return "L1";
  if (bytes <= machine.cache.l2_bytes) return "L2";
  if (bytes <= machine.cache.l3_bytes_per_core * machine.cores) return "L3";
  return "memory";
}

void run(const AttentionArguments& arguments, bool draw) {
  const std::vector<AttentionSetup> setups = attention_setups(arguments);
  const Context context = make_context(arguments.num_threads);
  const Machine& machine = context.machine();
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  const double peak =
      test::measure_peak(context, test::peak_kind(setups.front().problem.query_dtype), 0.02).flops_per_second;
  const Buffer stream = value_or_fail(Buffer::allocate(int64_t{256} << 20));
  std::fill_n(static_cast<char*>(stream.data()), stream.size_bytes(), char{1});
  const double bandwidth = test::measure_read_bandwidth(context, stream.data(), stream.size_bytes());

  for (const AttentionSetup& setup : setups) {
    const AttentionProblem& p = setup.problem;
    const int64_t kv_len = p.kv_len;
    const AttentionPlan plan = plan_attention(p, machine);
    const SharedPrefixPlan shared = plan_shared_prefix(p, machine);
    const Traffic traffic = traffic_of(p, plan, machine);
    const double flops = attention_flops(setup);
    const double arithmetic_s = flops / peak, transfer_s = traffic.flash / bandwidth;
    const int64_t word = p.query_dtype == DType::f64 ? 8 : 4;
    const int64_t element = plan.product == AttentionProduct::bf16_dot ? 2 : word;
    const int64_t rows_of_tile = std::min(plan.block_q, plan.tile_rows);
    const int64_t tile = plan.heads_in_turn * plan.block_kv * (p.head_dim + p.value_head_dim) * element;
    const int64_t scores = rows_of_tile * plan.block_kv * word;
    const int64_t state = plan.block_q * (p.head_dim * element + p.value_head_dim * word);
    if (arguments.json) {
      rows.push_back({{"kv_len", kv_len},
                      {"plan", to_string(plan)},
                      {"reason", plan.reason},
                      {"path", to_string(plan.path)},
                      {"kv_access", to_string(plan.kv_access)},
                      {"block_q", plan.block_q},
                      {"block_kv", plan.block_kv},
                      {"kv_splits", plan.kv_splits},
                      {"num_tasks", plan.num_tasks},
                      {"scratch_bytes", shared.scratch_bytes(plan, context.num_threads())},
                      {"shared_prefix", to_string(shared)},
                      {"tile_bytes", tile},
                      {"flops", flops},
                      {"flash_bytes", traffic.flash},
                      {"standard_bytes", traffic.standard},
                      {"arithmetic_ms", arithmetic_s * 1e3},
                      {"transfer_ms", transfer_s * 1e3},
                      {"bound", arithmetic_s >= transfer_s ? "arithmetic" : "memory"}});
      if (draw) rows.back()["picture"] = draw_mask(setup.block_mask->mask, p);
      continue;
    }
    const std::string shared_line = p.paged ? "  shared      " + to_string(shared) + "\n" : "";
    char text[2048];
    std::snprintf(
        text, sizeof(text),
        "%lld keys: %s\n"
        "  why         %s\n%s"
        "  in cache    scores of %lld x %lld: %.0f KB (%s); keys and values of a tile: %.0f KB (%s); queries and\n"
        "              outputs of a task: %.0f KB (%s)\n"
        "  through memory  flash %.2f MB (inputs and outputs %.2f MB), standard %.2f MB\n"
        "  bound       %.3g GFLOP at %.0f GFLOP/s: %.3g ms; %.2f MB at %.1f GB/s: %.3g ms; bound by %s\n",
        static_cast<long long>(kv_len), to_string(plan).c_str(), plan.reason, shared_line.c_str(),
        static_cast<long long>(rows_of_tile), static_cast<long long>(plan.block_kv), static_cast<double>(scores) / 1e3,
        home_of(scores, machine), static_cast<double>(tile) / 1e3, home_of(tile, machine),
        static_cast<double>(state) / 1e3, home_of(state, machine), traffic.flash / 1e6, traffic.inputs_outputs / 1e6,
        traffic.standard / 1e6, flops / 1e9, peak / 1e9, arithmetic_s * 1e3, traffic.flash / 1e6, bandwidth / 1e9,
        transfer_s * 1e3, arithmetic_s >= transfer_s ? "arithmetic" : "memory");
    write_output(text);
    if (draw) write_output(draw_mask(setup.block_mask->mask, p));
  }
  if (arguments.json) {
    write_json({{"machine", to_string(machine)}, {"threads", context.num_threads()}, {"rows", rows}});
  }
}

}  // namespace

void add_plan_attention(CLI::App& plan) {
  auto arguments = std::make_shared<AttentionArguments>();
  CLI::App* command =
      plan.add_subcommand("attention", "Tiles, what lives in which cache, bytes moved, and what bounds the time");
  const AttentionCommandOptions common = add_attention_options(*command, *arguments);
  CLI::Option* path = command->add_option("--path", arguments->path, "automatic, standard or flash")
                          ->check(one_of({"automatic", "standard", "flash"}))
                          ->capture_default_str();
  auto backward = std::make_shared<bool>(false);
  command->add_flag("--backward", *backward, "Plan the gradients instead")
      ->excludes(path)
      ->excludes(common.shared_prefix);
  auto draw = std::make_shared<bool>(false);
  command->add_flag("--draw", *draw, "Print the block mask of --sparse as text")->needs(common.sparse);
  auto machine = std::make_shared<std::string>();
  auto on_machine = std::make_shared<MachinePlanOptions>();
  CLI::Option* named = add_machine_option(*command, *machine)->excludes(path)->excludes(common.sparse);
  command->add_flag("--train", on_machine->train, "With --machine: the gradients too")->needs(named);
  command
      ->add_option(
          "--sram-heads", on_machine->sram_heads,
          "With --machine: heads whose tiles share the tile memory (default: --heads, as the tile rule has it)")
      ->check(at_least(1))
      ->needs(named);
  command->callback([arguments, backward, draw, machine, on_machine] {
    if (!machine->empty()) {
      if (*backward) usage_error("--backward does not go with --machine: --train plans both passes");
      return plan_attention_on(*machine, *arguments, *on_machine);
    }
    *backward ? plan_attention_backward_command(*arguments) : run(*arguments, *draw);
  });
}

}  // namespace opst::tools

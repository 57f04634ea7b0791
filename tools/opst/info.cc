// opst info: what the library sees of this machine and what it chose.
#include <cstdlib>

#include "command.h"

namespace opst::tools {

namespace {

struct Options {
  int num_threads = 0;
  bool json = false;
};

std::string how_bf16_was_chosen(const Machine& machine) {
  if (machine.isa < Isa::avx512_bf16) return "the level has no bf16 dot product";
  return std::getenv("OPST_BF16") != nullptr ? "pinned by OPST_BF16" : "measured at start";
}

void run(const Options& options) {
  const Context context = make_context(options.num_threads);
  const Machine& machine = context.machine();
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
                {"bf16_product_reason", bf16_reason}});
    return;
  }
  const auto kib = [](int64_t bytes) { return std::to_string(bytes / 1024) + " KiB"; };
  write_output(std::string("version       ") + OPST_VERSION + "\nisa           " + to_string(machine.isa) +
               " (this processor has " + to_string(detect_isa()) + ")" + "\ncores         " +
               std::to_string(machine.cores) + "\nthreads       " + std::to_string(context.num_threads()) +
               "\ncaches        L1d " + kib(machine.cache.l1d_bytes) + ", L2 " + kib(machine.cache.l2_bytes) +
               ", L3 per core " + kib(machine.cache.l3_bytes_per_core) + "\nbf16 product  " +
               to_string(machine.bf16_product) + " (" + bf16_reason + ")\n");
}

}  // namespace

void add_info(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("info", "Show the machine as the library sees it and what it chose");
  add_threads_option(*command, options->num_threads);
  command->add_flag("--json", options->json, "Print one JSON object");
  command->callback([options] { run(*options); });
}

}  // namespace opst::tools

#include "command.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace opst::tools {

void add_threads_option(CLI::App& command, int& num_threads) {
  command
      .add_option("-t,--threads", num_threads,
                  "Threads (default: OPST_NUM_THREADS, else the cores this process may use)")
      ->check(CLI::Range(1, 1024))
      ->type_name("N");
}

Context make_context(int num_threads) { return value_or_fail(Context::create({.num_threads = num_threads}), 2); }

Status try_write_output(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) return {};
  return {StatusCode::internal, std::string("cannot write to standard output: ") + std::strerror(errno)};
}

void write_output(std::string_view text) {
  if (const Status status = try_write_output(text); !status.ok()) run_error(status.message());
}

void write_json(const nlohmann::ordered_json& json) { write_output(json.dump() + "\n"); }

}  // namespace opst::tools

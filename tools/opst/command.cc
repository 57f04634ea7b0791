#include "command.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace opst::tools {

CLI::Validator at_least(int64_t least) {
  const auto check = [least](std::string& text) {
    int64_t value = 0;
    const bool good = CLI::detail::lexical_cast(text, value) && value >= least;
    return good ? std::string() : "'" + text + "' is not a whole number from " + std::to_string(least) + " on";
  };
  return {check, ""};
}

CLI::Validator between(int64_t least, int64_t most) {
  const auto check = [least, most](std::string& text) {
    int64_t value = 0;
    const bool good = CLI::detail::lexical_cast(text, value) && value >= least && value <= most;
    return good ? std::string()
                : "'" + text + "' is not a whole number from " + std::to_string(least) + " to " + std::to_string(most);
  };
  return {check, ""};
}

CLI::Validator number_between(double least, double most) {
  const auto check = [least, most](std::string& text) {
    double value = 0;
    if (CLI::detail::lexical_cast(text, value) && value >= least && value <= most) return std::string();
    char range[64];
    std::snprintf(range, sizeof(range), "%g to %g", least, most);
    return "'" + text + "' is not a number from " + range;
  };
  return {check, ""};
}

CLI::Validator one_of(std::vector<std::string> words) {
  const auto check = [words](std::string& text) {
    std::string list;
    for (const std::string& word : words) {
      if (text == word) return std::string();
      list += (list.empty() ? "" : ", ") + word;
    }
    return "'" + text + "' is none of " + list;
  };
  return {check, ""};
}

void add_threads_option(CLI::App& command, int& num_threads) {
  command
      .add_option("-t,--threads", num_threads,
                  "Threads (default: OPST_NUM_THREADS, else the cores this process may use, at most OMP_NUM_THREADS)")
      ->check(at_least(1))
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

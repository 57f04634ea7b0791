// What the subcommands share. Each is one file with one function, declared here and called in main.cc:
//
//   void add_generate(CLI::App& app);     // app.add_subcommand("generate", ...), its options, its callback
//
// A callback that returns has succeeded (exit code 0). It fails by throwing CommandError; main prints the message in
// one line on standard error. Exit codes: 0 done; 1 failed while running, or a check's verdict; 2 the command line, the
// environment or the prompt is wrong.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "opst/context.h"
#include "opst/status.h"

namespace opst::tools {

class CommandError : public std::runtime_error {
 public:
  CommandError(int exit_code, const std::string& message) : std::runtime_error(message), exit_code_(exit_code) {}
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

[[noreturn]] inline void usage_error(const std::string& message) { throw CommandError(2, message); }
[[noreturn]] inline void run_error(const std::string& message) { throw CommandError(1, message); }

// Exhausted memory is no wrong command line, whatever asked for it.
[[noreturn]] inline void status_error(const Status& status, int exit_code) {
  throw CommandError(status.code() == StatusCode::out_of_memory ? 1 : exit_code, status.message());
}

// The value, or a CommandError with the status' message.
template <class T>
T value_or_fail(Result<T> result, int exit_code = 1) {
  if (!result.ok()) status_error(result.status(), exit_code);
  return std::move(result.value());
}

// Validators that leave an option's help as it is written.
CLI::Validator at_least(int64_t least);                    // an integer of at most 63 bits
CLI::Validator any_uint64();                               // an integer of at most 64 bits
CLI::Validator between(int64_t least, int64_t most);       // an integer, both ends included
CLI::Validator number_between(double least, double most);  // any number, both ends included; NaN is refused
CLI::Validator one_of(std::vector<std::string> words);

// The items of a list as users write it, "1,2,3"; CLI11 would leave out empty ones.
std::vector<std::string> list_items(const std::string& text);
// Every item of a list: not empty, and passed by `item`.
CLI::Validator each(const CLI::Validator& item);

// An option that takes several values, separated by commas; `item` passes every one.
template <class T>
CLI::Option* add_list(CLI::App& command, const std::string& name, std::vector<T>& values, const std::string& help,
                      const CLI::Validator& item) {
  const auto take = [&values](const std::vector<std::string>& lists) {
    values.clear();
    for (const std::string& list : lists) {
      for (const std::string& text : list_items(list)) CLI::detail::lexical_cast(text, values.emplace_back());
    }
  };
  CLI::Option* option = command.add_option_function<std::vector<std::string>>(name, take, help)->check(each(item));
  if (!values.empty()) option->default_str(CLI::detail::to_string(values));
  return option;
}

// --threads / -t. 0, the default: OPST_NUM_THREADS, else what affinity and cgroup quota give, at most OMP_NUM_THREADS.
void add_threads_option(CLI::App& command, int& num_threads);
// A Context with that many threads, at the level that OPST_ISA names or this processor's best.
Context make_context(int num_threads);

// Text from a file, a user or the environment as it may stand on a terminal: control characters (C0, DEL, C1) and bytes
// that are not UTF-8 are written as \xNN, so that none of them moves the cursor or changes the terminal. Line ends and
// tabs stay.
std::string printable(std::string_view text);

// Writes to standard output and flushes; printable() if that is a terminal, else byte for byte. Fails on a closed pipe,
// a full disk.
Status try_write_output(std::string_view text);
// The same, with a CommandError.
void write_output(std::string_view text);
// One line.
void write_json(const nlohmann::ordered_json& json);

void add_chat(CLI::App& app);
void add_generate(CLI::App& app);
void add_info(CLI::App& app);
void add_perplexity(CLI::App& app);
void add_tokenize(CLI::App& app);

}  // namespace opst::tools

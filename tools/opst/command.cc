#include "command.h"

#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <limits>

#include "model/utf8.h"

namespace opst::tools {

namespace {

// CLI11 would take the nearest number that fits in place of one that does not.
template <class T>
CLI::Validator integer_from(T least) {
  const auto check = [least](std::string& text) {
    T value = 0;
    const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
    const auto [end, error] = std::from_chars(begin, text.data() + text.size(), value);
    const bool whole = end == text.data() + text.size();
    if (error == std::errc() && whole && value >= least) return std::string();
    const std::string shown = "'" + printable(text) + "'";
    if (error == std::errc::result_out_of_range && whole && !text.starts_with('-')) {
      return shown + " is larger than " + std::to_string(std::numeric_limits<T>::max());
    }
    return shown + " is not a whole number from " + std::to_string(least) + " on";
  };
  return {check, ""};
}

}  // namespace

CLI::Validator at_least(int64_t least) { return integer_from<int64_t>(least); }
CLI::Validator any_uint64() { return integer_from<uint64_t>(0); }

CLI::Validator between(int64_t least, int64_t most) {
  const auto check = [least, most](std::string& text) {
    const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
    int64_t value = 0;
    const auto [end, error] = std::from_chars(begin, text.data() + text.size(), value);
    const bool good = error == std::errc() && end == text.data() + text.size() && value >= least && value <= most;
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

std::vector<std::string> list_items(const std::string& text) {
  std::vector<std::string> items;
  size_t begin = 0;
  for (size_t comma; (comma = text.find(',', begin)) != std::string::npos; begin = comma + 1) {
    items.push_back(text.substr(begin, comma - begin));
  }
  items.push_back(text.substr(begin));
  return items;
}

CLI::Validator each(const CLI::Validator& item) {
  const auto check = [item](std::string& text) {
    for (std::string& word : list_items(text)) {
      if (word.empty()) return "'" + text + "' has an empty item: values are separated by single commas";
      if (std::string wrong = item(word); !wrong.empty()) return wrong;
    }
    return std::string();
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

std::string printable(std::string_view text) {
  std::string shown;
  while (!text.empty()) {
    const model::Utf8Char next = model::first_char(text);
    const std::string_view bytes = text.substr(0, static_cast<size_t>(next.length));
    const bool control = next.value < 0x20 || (next.value >= 0x7F && next.value < 0xA0);
    if (next.state == model::Utf8Char::State::complete && (!control || next.value == '\n' || next.value == '\t')) {
      shown += bytes;
    } else {
      for (const char byte : bytes) {
        char escape[8];
        std::snprintf(escape, sizeof escape, "\\x%02X", static_cast<unsigned>(static_cast<unsigned char>(byte)));
        shown += escape;
      }
    }
    text.remove_prefix(bytes.size());
  }
  return shown;
}

Status try_write_output(std::string_view text) {
  std::string shown;
  if (isatty(STDOUT_FILENO) != 0) text = shown = printable(text);
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) return {};
  return {StatusCode::internal, std::string("cannot write to standard output: ") + std::strerror(errno)};
}

void write_output(std::string_view text) {
  if (const Status status = try_write_output(text); !status.ok()) run_error(status.message());
}

void write_json(const nlohmann::ordered_json& json) { write_output(json.dump() + "\n"); }

}  // namespace opst::tools

// The file form of a MachineProfile: a key on each line, errors that name file, line, key, got and expected.
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <sstream>
#include <string_view>

#include "machine_profile.h"

namespace opst::tools {

namespace {

struct Scale {
  const char* unit;
  double factor;
};
// The units of a kind of number; the first is the one that a profile is written with.
using Scales = std::vector<Scale>;
const Scales kCount = {{"", 1}};
const Scales kBytes = {{"KiB", 1024}, {"B", 1}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
const Scales kByteRate = {{"GB/s", 1e9}, {"MB/s", 1e6}, {"TB/s", 1e12}};
const Scales kFlops = {{"GFLOP/s", 1e9}, {"TFLOP/s", 1e12}};
const Scales kElements = {{"G/s", 1e9}, {"M/s", 1e6}, {"T/s", 1e12}};
const Scales kTime = {{"us", 1e-6}, {"ns", 1e-9}, {"ms", 1e-3}};

struct NumberKey {
  const char* name;
  const Scales& scales;
  Quantity MachineProfile::*member;
};
const NumberKey kNumbers[] = {
    {"cores", kCount, &MachineProfile::cores},
    {"matrix_f32", kFlops, &MachineProfile::matrix_f32},
    {"matrix_bf16", kFlops, &MachineProfile::matrix_bf16},
    {"matrix_tile", kCount, &MachineProfile::matrix_tile},
    {"exponentials", kElements, &MachineProfile::exponentials},
    {"start", kTime, &MachineProfile::start},
};
struct MemoryKey {
  const char* name;
  const Scales& scales;
  Quantity MemoryLevel::*member;
};
const MemoryKey kMemoryNumbers[] = {{"bytes", kBytes, &MemoryLevel::bytes}, {"read", kByteRate, &MemoryLevel::read}};
constexpr const char* kWords[] = {"name", "kind", "isa", "tile_memory"};
constexpr double kMost = 1e18;
constexpr size_t kMostLevels = 16;

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

std::string units_of(const Scales& scales) {
  if (scales.front().unit[0] == '\0') return "a whole number";
  std::string list;
  for (const Scale& s : scales) list += (list.empty() ? "" : "|") + std::string(s.unit);
  return "a number and " + list;
}

class Reader {
 public:
  Reader(const std::string& text, const std::string& file) : text_(text), file_(file) { profile_.origin = file; }

  MachineProfile read() {
    std::istringstream lines(text_);
    for (std::string line; std::getline(lines, line);) {
      ++line_;
      if (const size_t comment = line.find('#'); comment != std::string::npos) line.resize(comment);
      if (const std::string_view content = trimmed(line); !content.empty()) take(content);
    }
    finish();
    return std::move(profile_);
  }

 private:
  [[noreturn]] void fail(int line, const std::string& key, const std::string& got, const std::string& expected) const {
    run_error(file_ + ":" + std::to_string(line) + ": " + key + ": got " + got + ", expected " + expected);
  }
  static std::string quoted(std::string_view text) {
    constexpr size_t kShown = 60;
    return "'" + std::string(text.substr(0, kShown)) + (text.size() > kShown ? "...'" : "'");
  }

  void take(std::string_view content) {
    if (content.front() == '[') return open_memory(content);
    const size_t equals = content.find('=');
    const std::string key(trimmed(content.substr(0, equals)));
    if (equals == std::string_view::npos || key.empty()) {
      fail(line_, "a line", quoted(content), "KEY = VALUE or [memory NAME]");
    }
    const std::string_view value = trimmed(content.substr(equals + 1));
    const bool in_memory = !profile_.levels.empty();
    if (!seen_.insert(section_ + key).second) fail(line_, section_ + key, "it a second time", "it once");
    if (value.empty()) fail(line_, section_ + key, "nothing", "a value");
    in_memory ? take_memory(key, value) : take_machine(key, value);
  }

  void open_memory(std::string_view content) {
    std::string_view name;
    if (content.back() == ']') name = trimmed(content.substr(1, content.size() - 2));
    if (!name.starts_with("memory ")) fail(line_, "a section", quoted(content), "[memory NAME]");
    name = trimmed(name.substr(7));
    if (name.empty() || name.find_first_of(" .[]") != std::string_view::npos) {
      fail(line_, "a section", quoted(content), "[memory NAME], a name of one word");
    }
    for (const MemoryLevel& level : profile_.levels) {
      if (level.name == name) fail(line_, "[memory " + level.name + "]", "it a second time", "it once");
    }
    if (profile_.levels.size() == kMostLevels) {
      fail(line_, "a section", quoted(content), "at most " + std::to_string(kMostLevels) + " memories");
    }
    profile_.levels.push_back({.name = std::string(name)});
    level_lines_.push_back(line_);
    section_ = std::string(name) + ".";
  }

  void take_machine(const std::string& key, std::string_view value) {
    for (const NumberKey& number : kNumbers) {
      if (key == number.name) return read_number(key, value, number.scales, profile_.*number.member);
    }
    if (key == "name") {
      profile_.name = value;
    } else if (key == "tile_memory") {
      profile_.tile_memory = value;
      tile_line_ = line_;
    } else if (key == "kind") {
      if (value != "cpu" && value != "accelerator") fail(line_, key, quoted(value), "cpu or accelerator");
      profile_.kind = value == "cpu" ? MachineProfile::Kind::cpu : MachineProfile::Kind::accelerator;
    } else if (key == "isa") {
      const std::optional<Isa> isa = parse_isa(std::string(value));
      if (!isa) fail(line_, key, quoted(value), "a level such as generic, avx2, avx512_bf16");
      profile_.isa = *isa;
    } else {
      std::string known;
      for (const char* word : kWords) known += std::string(word) + ", ";
      for (const NumberKey& number : kNumbers) known += std::string(number.name) + ", ";
      fail(line_, key, "an unknown key", "one of " + known + "or [memory NAME]");
    }
  }

  void take_memory(const std::string& key, std::string_view value) {
    MemoryLevel& level = profile_.levels.back();
    for (const MemoryKey& number : kMemoryNumbers) {
      if (key == number.name) return read_number(section_ + key, value, number.scales, level.*number.member);
    }
    if (key != "per") fail(line_, section_ + key, "an unknown key", "one of per, bytes, read");
    if (value != "core" && value != "machine") fail(line_, section_ + key, quoted(value), "core or machine");
    level.per_core = value == "core";
  }

  // NUMBER UNIT ; SOURCE
  void read_number(const std::string& key, std::string_view value, const Scales& scales, Quantity& out) {
    const std::string expected = units_of(scales) + ", then ; and the number's source";
    const size_t semicolon = value.find(';');
    const std::string_view number = trimmed(value.substr(0, semicolon));
    const std::string_view source =
        semicolon == std::string_view::npos ? std::string_view() : trimmed(value.substr(semicolon + 1));
    double parsed = 0;
    const auto [rest, error] = std::from_chars(number.data(), number.data() + number.size(), parsed);
    if (error != std::errc() || !std::isfinite(parsed)) fail(line_, key, quoted(value), expected);
    const std::string_view unit = trimmed(number.substr(static_cast<size_t>(rest - number.data())));
    const Scale* found = nullptr;
    for (const Scale& scale : scales) {
      if (unit == scale.unit) found = &scale;
    }
    if (found == nullptr) fail(line_, key, quoted(value), expected);
    if (source.empty()) fail(line_, key, quoted(value) + " without a source", expected);
    parsed *= found->factor;
    const bool whole = found->unit[0] != '\0' || std::floor(parsed) == parsed;
    if (!(parsed > 0 && parsed <= kMost) || !whole)
      fail(line_, key, quoted(number), "more than 0 and at most 1e18" + std::string(whole ? "" : ", whole"));
    out = {parsed, std::string(source)};
  }

  void at_most(const char* key, double value, int64_t most) const {
    if (value <= static_cast<double>(most)) return;
    fail(line_, key, std::to_string(static_cast<int64_t>(value)), "at most " + std::to_string(most));
  }

  void finish() {
    const int last = std::max(line_, 1);
    for (const char* word : {"name", "kind"}) {
      if (!seen_.contains(word)) fail(last, word, "the end of the file", "it before the first [memory NAME]");
    }
    for (const NumberKey& number : kNumbers) {
      if ((profile_.*number.member).value == 0) {
        fail(last, number.name, "the end of the file", units_of(number.scales) + " before the first [memory NAME]");
      }
    }
    at_most("cores", profile_.cores.value, 1 << 16);
    at_most("matrix_tile", profile_.matrix_tile.value, 1 << 12);
    if (profile_.levels.size() < 2) {
      fail(last, "[memory NAME]", std::to_string(profile_.levels.size()) + " of them",
           "a near memory and the main one");
    }
    for (size_t i = 0; i < profile_.levels.size(); ++i) {
      const std::string& name = profile_.levels[i].name;
      for (const MemoryKey& number : kMemoryNumbers) {
        if ((profile_.levels[i].*number.member).value == 0) {
          fail(level_lines_[i], name + "." + number.name, "no such line in its section", units_of(number.scales));
        }
      }
      if (!seen_.contains(name + ".per"))
        fail(level_lines_[i], name + ".per", "no such line in its section", "core or machine");
    }
    if (profile_.tile_memory.empty()) fail(last, "tile_memory", "the end of the file", "the name of a memory");
    bool found = false;
    for (size_t i = 0; i + 1 < profile_.levels.size(); ++i) found |= profile_.levels[i].name == profile_.tile_memory;
    if (!found) fail(tile_line_, "tile_memory", quoted(profile_.tile_memory), "the name of a memory before the last");
  }

  const std::string& text_;
  const std::string& file_;
  MachineProfile profile_;
  int line_ = 0, tile_line_ = 0;
  std::vector<int> level_lines_;
  std::string section_;  // "L2." within [memory L2]
  std::set<std::string> seen_;
};

// With as few digits as give the same value again.
std::string number_line(const std::string& key, const Quantity& q, const Scales& scales) {
  const double factor = scales.front().factor;
  char number[64];
  for (int digits = 4; digits <= 17; ++digits) {
    std::snprintf(number, sizeof number, "%.*g", digits, q.value / factor);
    if (std::strtod(number, nullptr) * factor == q.value) break;
  }
  const std::string unit = scales.front().unit;
  return key + " = " + number + (unit.empty() ? "" : " ") + unit + " ; " + q.source + "\n";
}

}  // namespace

MachineProfile parse_machine_profile(const std::string& text, const std::string& file) {
  return Reader(text, file).read();
}

std::string to_text(const MachineProfile& profile) {
  std::string text = "name = " + profile.name + "\nkind = " + to_string(profile.kind) + "\n";
  if (profile.kind == MachineProfile::Kind::cpu) text += "isa = " + std::string(to_string(profile.isa)) + "\n";
  text += "tile_memory = " + profile.tile_memory + "\n";
  for (const NumberKey& number : kNumbers) text += number_line(number.name, profile.*number.member, number.scales);
  for (const MemoryLevel& level : profile.levels) {
    text += "\n[memory " + level.name + "]\nper = " + (level.per_core ? "core" : "machine") + "\n";
    for (const MemoryKey& number : kMemoryNumbers)
      text += number_line(number.name, level.*number.member, number.scales);
  }
  return text;
}

}  // namespace opst::tools

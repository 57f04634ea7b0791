#include "machine_profile.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace opst::tools {

namespace {

constexpr const char* kSuffix = ".machine";
// A profile is a page of text; a larger file is something else.
constexpr int64_t kMostFileBytes = 1 << 20;

// Beside the program in the build tree; in the share folder of the prefix that it is installed in.
std::vector<std::filesystem::path> profile_folders() {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return {};
  const std::filesystem::path folder = program.parent_path();
  return {folder / "machines", (folder / OPST_MACHINES_FROM_BIN).lexically_normal()};
}

std::string read_profile(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) run_error(path + ": is a folder, expected a machine profile");
  std::ifstream file(path, std::ios::binary);
  if (!file) run_error(path + ": cannot be opened");
  std::string text;
  char buffer[4096];
  while (file.read(buffer, sizeof buffer), file.gcount() > 0) {
    text.append(buffer, static_cast<size_t>(file.gcount()));
    if (static_cast<int64_t>(text.size()) > kMostFileBytes) {
      run_error(path + ": more than " + std::to_string(kMostFileBytes) + " bytes, expected a machine profile");
    }
  }
  return text;
}

}  // namespace

const char* to_string(MachineProfile::Kind kind) { return kind == MachineProfile::Kind::cpu ? "cpu" : "accelerator"; }

const MemoryLevel& MachineProfile::tile_level() const {
  return *std::find_if(levels.begin(), levels.end() - 1, [&](const MemoryLevel& l) { return l.name == tile_memory; });
}

double MachineProfile::seconds_per_byte(double working_set) const {
  constexpr double kWholly = 4;  // of a level's size: from here on nothing is found in it when it is read again
  for (size_t i = 0; i + 1 < levels.size(); ++i) {
    const double size = total_bytes(levels[i]), here = 1 / levels[i].read.value, next = 1 / levels[i + 1].read.value;
    if (working_set <= size) return here;
    if (working_set >= size * kWholly || working_set >= total_bytes(levels[i + 1])) continue;
    return here + (next - here) * std::log(working_set / size) / std::log(kWholly);
  }
  return 1 / levels.back().read.value;
}

MachineProfile MachineProfile::with_cores(double factor) const {
  MachineProfile p = *this;
  for (Quantity* rate : {&p.matrix_f32, &p.matrix_bf16, &p.exponentials}) rate->value *= factor;
  for (size_t i = 0; i + 1 < p.levels.size(); ++i) p.levels[i].read.value *= factor;
  p.start.value /= factor;
  return p;
}

Machine MachineProfile::machine() const {
  Machine m{.isa = isa, .cores = static_cast<int>(cores.value)};
  const auto one_core = [&](const char* level, int64_t& bytes) {
    for (const MemoryLevel& l : levels) {
      if (l.name == level) bytes = static_cast<int64_t>(l.per_core ? l.bytes.value : l.bytes.value / cores.value);
    }
  };
  one_core("L1", m.cache.l1d_bytes), one_core("L2", m.cache.l2_bytes), one_core("L3", m.cache.l3_bytes_per_core);
  m.bf16_product = matrix_bf16.value > 1.2 * matrix_f32.value ? Bf16Product::dot : Bf16Product::widen;
  return m;
}

nlohmann::ordered_json to_json(const MachineProfile& profile) {
  const auto number = [](const Quantity& q) {
    return nlohmann::ordered_json{{"value", q.value}, {"source", q.source}};
  };
  nlohmann::ordered_json levels = nlohmann::ordered_json::array();
  for (const MemoryLevel& level : profile.levels) {
    levels.push_back({{"name", level.name},
                      {"per", level.per_core ? "core" : "machine"},
                      {"bytes", number(level.bytes)},
                      {"read_bytes_per_s", number(level.read)}});
  }
  return {{"name", profile.name},
          {"origin", profile.origin},
          {"kind", to_string(profile.kind)},
          {"cores", number(profile.cores)},
          {"matrix_f32_flops_per_s", number(profile.matrix_f32)},
          {"matrix_bf16_flops_per_s", number(profile.matrix_bf16)},
          {"matrix_tile", number(profile.matrix_tile)},
          {"exponentials_per_s", number(profile.exponentials)},
          {"start_s", number(profile.start)},
          {"tile_memory", profile.tile_memory},
          {"memories", levels}};
}

std::string known_profiles() {
  std::vector<std::string> names;
  for (const std::filesystem::path& folder : profile_folders()) {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
      if (entry.path().extension() == kSuffix) names.push_back(entry.path().stem().string());
    }
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  return list.empty() ? "none was found beside the program" : list;
}

MachineProfile machine_profile(const std::string& machine, int num_threads) {
  if (machine == "this") {
    Context context = make_context(num_threads);
    return measure_machine(context);
  }
  if (machine.find_first_of("/.") != std::string::npos) return parse_machine_profile(read_profile(machine), machine);
  for (const std::filesystem::path& folder : profile_folders()) {
    const std::filesystem::path path = folder / (machine + kSuffix);
    std::error_code error;
    if (std::filesystem::exists(path, error)) return parse_machine_profile(read_profile(path.string()), path.string());
  }
  usage_error("--machine: '" + machine + "' is no profile; expected this, a file's path or one of " + known_profiles());
}

CLI::Option* add_machine_option(CLI::App& command, std::string& machine) {
  return command
      .add_option("--machine", machine,
                  "Plan for a machine: this (measured now), a profile that came with the program, or a profile's file")
      ->type_name("this|PROFILE|FILE");
}

}  // namespace opst::tools

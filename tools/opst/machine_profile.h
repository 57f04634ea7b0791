// A machine as the planner sees it: what its units do in a second, what its memories hold and deliver. It comes from a
// file, in which every number names its source, or from measuring this machine.
//
// The file is text, a line for each key, # begins a comment:
//
//   name = two cores of a server
//   kind = cpu
//   cores = 2 ; the data sheet, page 3             NUMBER UNIT ; SOURCE
//   matrix_f32 = 230 GFLOP/s ; measured, all cores
//   [memory L2]                                    from the nearest memory to the main one, which comes last
//   per = core
//   bytes = 1 MiB ; the data sheet, page 3
//   read = 187 GB/s ; measured, all cores together
#pragma once

#include <string>
#include <vector>

#include "command.h"
#include "opst/context.h"
#include "opst/dtype.h"

namespace opst::tools {

struct Quantity {
  double value = 0;
  std::string source = {};
};

struct MemoryLevel {
  std::string name = {};
  bool per_core = false;
  Quantity bytes = {};  // of one core where per_core, else of the machine
  Quantity read = {};   // bytes per second, all cores together
};

struct MachineProfile {
  enum class Kind : uint8_t { cpu, accelerator };

  std::string name = {};
  std::string origin = {};  // the file, or how it was measured
  Kind kind = Kind::cpu;
  Isa isa = Isa::generic;  // of a cpu
  Quantity cores = {};
  Quantity matrix_f32 = {}, matrix_bf16 = {};  // flops per second of all cores; 16 bits multiplied, 32 summed
  Quantity matrix_tile = {};                   // rows and columns that the matrix unit multiplies at once
  Quantity exponentials = {};                  // softmax elements per second, all cores
  Quantity start = {};                         // seconds until all cores work on a call
  std::string tile_memory = {};                // which level holds a task's tile
  std::vector<MemoryLevel> levels = {};        // from the nearest to the main memory

  double matrix_rate(DType dtype) const {
    return dtype == DType::bf16 || dtype == DType::f16 ? matrix_bf16.value : matrix_f32.value;
  }
  const MemoryLevel& main_memory() const { return levels.back(); }
  const MemoryLevel& tile_level() const;
  // Bytes of a level, all cores together.
  double total_bytes(const MemoryLevel& level) const { return level.bytes.value * (level.per_core ? cores.value : 1); }
  // Seconds per byte of reading again and again what takes so many bytes: those of the level that holds them; between
  // its size and four times that, what lies between it and the next level, by the logarithm.
  double seconds_per_byte(double working_set) const;
  // The same machine with its cores `factor` times as fast: what a shared machine gave beside a call. Its main memory has
  // the speed that it had.
  MachineProfile with_cores(double factor) const;
  // For plan_attention and plan_matmul; an accelerator has none of them.
  Machine machine() const;
};

const char* to_string(MachineProfile::Kind kind);

// A CommandError that names file, line, key, what was found and what was expected.
MachineProfile parse_machine_profile(const std::string& text, const std::string& file);
// The file's text for a profile: parse_machine_profile reads it back.
std::string to_text(const MachineProfile& profile);
nlohmann::ordered_json to_json(const MachineProfile& profile);

// Of --machine: "this" (measured now, about a second, on num_threads), a path (with a / or a dot in it), or the name of
// a profile that came with the program.
MachineProfile machine_profile(const std::string& machine, int num_threads);
// "epyc-zen4, ascend-910": the profiles that came with the program, and where they lie.
std::string known_profiles();
// --machine of a subcommand.
CLI::Option* add_machine_option(CLI::App& command, std::string& machine);

// What the context's threads do now: multiply-adds, exponentials, reading at sizes of every cache. About a second.
MachineProfile measure_machine(Context& context);

}  // namespace opst::tools

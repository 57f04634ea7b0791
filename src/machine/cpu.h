// The parts of detect_machine. Each reads the system's files below `root` ("" is the real system), so that a test can
// show it another machine.
#pragma once

#include <optional>
#include <string>

#include "opst/context.h"

namespace opst {

// Processors that this process may run on: the affinity mask, limited by the cgroup's quota rounded up. At least 1.
int available_cores(const std::string& root = "");

// The smallest CPU quota of this process's cgroup and its parents, in processors. Nothing where there is none.
std::optional<double> cgroup_cpu_quota(const std::string& root = "");

// Cache sizes, clamped to what one core can reasonably call its own; where the system says nothing, the defaults.
CacheSizes read_cache_sizes(const std::string& root = "");

// Measured at the first call, which takes a fraction of a millisecond; then remembered. `widen` below avx512_bf16.
Bf16Product measured_bf16_product();

}  // namespace opst

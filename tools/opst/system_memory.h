// What memory the system has and would still give, control groups counted; and sizes as words.
#pragma once

#include <cstdint>
#include <string>

namespace opst::tools {

int64_t available_memory_bytes();
int64_t physical_memory_bytes();

// "1.5 MB", "1.20 ms"
std::string human_bytes(int64_t bytes);
std::string human_seconds(double seconds);
// "1.5 MiB"
std::string binary_bytes(double bytes);

}  // namespace opst::tools

#include "system_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <utility>

namespace opst::tools {

namespace {

// The first number of a file, or -1.
int64_t number_in(const std::string& path) {
  std::ifstream file(path);
  int64_t number = -1;
  return file >> number ? number : -1;
}

constexpr std::pair<const char*, const char*> kGroups[] = {
    {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
    {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"}};

}  // namespace

int64_t available_memory_bytes() {
  int64_t available = static_cast<int64_t>(sysconf(_SC_AVPHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  std::ifstream meminfo("/proc/meminfo");
  for (std::string key, unit; meminfo >> key;) {
    int64_t kib = 0;
    if (!(meminfo >> kib)) break;
    std::getline(meminfo, unit);
    if (key == "MemAvailable:") available = kib * 1024;
  }
  for (const auto& [limit, used] : kGroups) {
    const int64_t most = number_in(limit), now = number_in(used);
    if (most > 0 && now >= 0) available = std::min(available, most - now);
  }
  return available;
}

int64_t physical_memory_bytes() {
  int64_t bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  for (const auto& [limit, used] : kGroups) {
    if (const int64_t most = number_in(limit); most > 0) bytes = std::min(bytes, most);
  }
  return bytes;
}

std::string human_bytes(int64_t bytes) {
  char text[32];
  const double b = static_cast<double>(bytes);
  if (b < 1e6)
    std::snprintf(text, sizeof(text), "%.0f KB", b / 1e3);
  else if (b < 1e9)
    std::snprintf(text, sizeof(text), "%.1f MB", b / 1e6);
  else
    std::snprintf(text, sizeof(text), "%.1f GB", b / 1e9);
  return text;
}

std::string human_seconds(double seconds) {
  char text[32];
  if (seconds < 1e-3)
    std::snprintf(text, sizeof(text), "%.1f us", seconds * 1e6);
  else if (seconds < 1)
    std::snprintf(text, sizeof(text), "%.2f ms", seconds * 1e3);
  else
    std::snprintf(text, sizeof(text), "%.2f s", seconds);
  return text;
}

std::string binary_bytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < std::size(kUnits); ++unit) bytes /= 1024;
  char text[32];
  // Whole numbers are written whole; else three digits.
  const bool whole = std::floor(bytes) == bytes;
  std::snprintf(text, sizeof(text),
                whole || bytes >= 100 ? "%.0f %s"
                : bytes >= 10         ? "%.1f %s"
                                      : "%.2f %s",
                bytes, kUnits[unit]);
  return text;
}

}  // namespace opst::tools

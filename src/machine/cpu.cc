#include "machine/cpu.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>
#include <vector>

#include "core/text.h"
#include "machine/levels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

namespace opst::avx512_bf16 {  // bf16_rate_isa.cc
void fma_burst(int64_t iterations, float* sink);
void dot_burst(int64_t iterations, float* sink);
}  // namespace opst::avx512_bf16
#endif

namespace opst {
namespace {

constexpr int kUnknown = -1;

// The value of the first call that ends, for all callers. Not a static variable's initialiser: a child that is forked
// while another thread is inside one waits for its end for ever.
template <class Value>
Value remembered(std::atomic<int>& memory, Value (*find)()) {
  int known = memory.load(std::memory_order_relaxed);
  if (known == kUnknown) {
    const int found = static_cast<int>(find());
    if (memory.compare_exchange_strong(known, found, std::memory_order_relaxed)) known = found;
  }
  return static_cast<Value>(known);
}

#if defined(__x86_64__)
struct CpuidRegisters {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidRegisters cpuid(unsigned leaf, unsigned subleaf) {
  CpuidRegisters r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

bool has(unsigned word, std::initializer_list<int> bits) {
  return std::all_of(bits.begin(), bits.end(), [word](int bit) { return (word >> bit & 1u) != 0; });
}

// The register states that the operating system saves; only to be called where it announced XGETBV (OSXSAVE).
__attribute__((target("xsave"))) unsigned enabled_states() { return static_cast<unsigned>(_xgetbv(0)); }

Isa detect() {
  const CpuidRegisters basic = cpuid(1, 0);
  const CpuidRegisters extended = cpuid(7, 0);
  const CpuidRegisters extended1 = extended.eax >= 1 ? cpuid(7, 1) : CpuidRegisters();
  constexpr int kOsxsave = 27;
  if (!has(basic.ecx, {kOsxsave})) return Isa::generic;
  const unsigned states = enabled_states();

  const bool ymm_saved = has(states, {1, 2});
  const bool avx2 = has(basic.ecx, {12, 28, 29}) &&  // FMA, AVX, F16C
                    has(extended.ebx, {3, 5, 8});    // BMI1, AVX2, BMI2
  if (!ymm_saved || !avx2) return Isa::generic;

  const bool zmm_saved = has(states, {5, 6, 7});
  const bool avx512 = has(extended.ebx, {16, 17, 28, 30, 31});  // F, DQ, CD, BW, VL
  if (!zmm_saved || !avx512) return Isa::avx2;

  if (!has(extended.ecx, {11})) return Isa::avx512;
  return has(extended1.eax, {5}) ? Isa::avx512_bf16 : Isa::avx512_vnni;
}

double seconds_of(void (*burst)(int64_t, float*), int64_t iterations, float* sink) {
  const auto start = std::chrono::steady_clock::now();
  burst(iterations, sink);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Bf16Product measure_bf16_product() {
  if (!includes(detect_isa(), Isa::avx512_bf16)) return Bf16Product::widen;
  // 16 instructions an iteration at two a cycle and 3.5 GHz: about 20 us a burst.
  constexpr int64_t kIterations = 8192;
  constexpr int kBursts = 5;
  constexpr double kWorthIt = 1.2;  // below that, widening has the simpler packing and exact denormals
  alignas(64) float sink[16];
  double fma_seconds = std::numeric_limits<double>::max();
  double dot_seconds = fma_seconds;
  for (int i = 0; i < kBursts; ++i) {
    fma_seconds = std::min(fma_seconds, seconds_of(avx512_bf16::fma_burst, kIterations, sink));
    dot_seconds = std::min(dot_seconds, seconds_of(avx512_bf16::dot_burst, kIterations, sink));
  }
  // A dot instruction forms twice as many products as an FMA.
  return 2 * fma_seconds >= kWorthIt * dot_seconds ? Bf16Product::dot : Bf16Product::widen;
}
#else
Isa detect() { return Isa::generic; }

Bf16Product measure_bf16_product() { return Bf16Product::widen; }
#endif

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Processors in a list like "0-3,8,10-11"; 0 where it is malformed.
int count_in_list(const std::string& list) {
  std::istringstream parts(list);
  std::string part;
  int count = 0;
  while (std::getline(parts, part, ',')) {
    int first = 0, last = 0;
    char dash = 0;
    std::istringstream range(part);
    if (!(range >> first)) return 0;
    if (!(range >> dash >> last)) last = first;
    if (last < first) return 0;
    count += last - first + 1;
  }
  return count;
}

int cores_in_affinity_mask() {
  // The kernel refuses masks shorter than its own, so the set grows until it fits.
  for (int capacity = 1024; capacity <= (1 << 20); capacity *= 2) {
    std::vector<cpu_set_t> set(static_cast<size_t>(capacity / 1024));
    const size_t bytes = set.size() * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, set.data()) == 0) return CPU_COUNT_S(bytes, set.data());
  }
  return 1;
}

bool lists_cpu(const std::string& comma_separated) {
  return ("," + comma_separated + ",").find(",cpu,") != std::string::npos;
}

// This process's directory in the hierarchy of cgroups, from /proc/self/cgroup: "0::/path" (v2) or
// "4:cpu,cpuacct:/path" (v1); where none is listed, the hierarchy's root.
std::string cgroup_path(const std::string& root, bool v2) {
  std::ifstream file(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::string id, controllers, path;
    std::getline(std::getline(std::getline(fields, id, ':'), controllers, ':'), path);
    if (fields && (v2 ? controllers.empty() && id == "0" : lists_cpu(controllers))) return path;
  }
  return "/";
}

std::optional<double> quota_of(const std::string& directory, bool v2) {
  // Microseconds: "max 100000" or "150000 100000"; of v1 in two files, "-1" or "150000" and "100000".
  std::istringstream line(v2 ? first_line(directory + "/cpu.max")
                             : first_line(directory + "/cpu.cfs_quota_us") + " " +
                                   first_line(directory + "/cpu.cfs_period_us"));
  double quota = 0, period = 0;
  if (!(line >> quota >> period) || quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

}  // namespace

const char* to_string(Isa isa) { return name_of(isa, {"generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16"}); }

std::optional<Isa> parse_isa(const std::string& name) {
  for (int i = 0; i < kNumIsaLevels; ++i) {
    if (name == to_string(static_cast<Isa>(i))) return static_cast<Isa>(i);
  }
  return std::nullopt;
}

const char* to_string(Bf16Product product) { return product == Bf16Product::dot ? "dot" : "widen"; }

std::string to_string(const Machine& machine) {
  const auto kib = [](int64_t bytes) { return text(bytes / 1024, " KiB"); };
  return text(to_string(machine.isa), ", ", machine.cores, machine.cores == 1 ? " core" : " cores", ", L1d ",
              kib(machine.cache.l1d_bytes), ", L2 ", kib(machine.cache.l2_bytes), ", L3 ",
              kib(machine.cache.l3_bytes_per_core), " per core, bf16 ", to_string(machine.bf16_product));
}

Isa detect_isa() {
  static constinit std::atomic<int> isa = kUnknown;
  return remembered(isa, detect);
}

Bf16Product measured_bf16_product() {
  static constinit std::atomic<int> product = kUnknown;
  return remembered(product, measure_bf16_product);
}

std::optional<double> cgroup_cpu_quota(const std::string& root) {
  std::optional<double> smallest;
  std::ifstream mounts(root + "/proc/self/mountinfo");
  std::string line;
  while (std::getline(mounts, line)) {
    // id parent major:minor root mount_point options [optional fields] - type source super_options
    std::istringstream fields(line);
    std::string skipped, mount_root, mount_point, type, super_options;
    fields >> skipped >> skipped >> skipped >> mount_root >> mount_point;
    while (fields >> skipped && skipped != "-") {
    }
    fields >> type >> skipped >> super_options;
    const bool v2 = type == "cgroup2";
    if (!v2 && !(type == "cgroup" && lists_cpu(super_options))) continue;
    std::string path = cgroup_path(root, v2);
    // Inside a container the mount may show only the part of the hierarchy below mount_root.
    if (mount_root != "/" && path.compare(0, mount_root.size(), mount_root) == 0) path.erase(0, mount_root.size());
    for (size_t length = path.size(); length != std::string::npos; length = path.rfind('/')) {
      path.erase(length);
      const std::optional<double> quota = quota_of(root + mount_point + path, v2);
      if (quota) smallest = std::min(*quota, smallest.value_or(*quota));
    }
  }
  return smallest;
}

int available_cores(const std::string& root) {
  const int cores = cores_in_affinity_mask();
  const double quota = cgroup_cpu_quota(root).value_or(cores);
  return std::max(static_cast<int>(std::min<double>(cores, std::ceil(quota))), 1);
}

CacheSizes read_cache_sizes(const std::string& root) {
  CacheSizes cache;
  const std::string base = root + "/sys/devices/system/cpu/cpu0/cache/index";
  for (int index = 0; index < 16; ++index) {
    const std::string directory = base + std::to_string(index);
    const std::string type = first_line(directory + "/type");
    if (type != "Data" && type != "Unified") continue;
    int64_t size = 0;
    char unit = 0;
    std::istringstream(first_line(directory + "/size")) >> size >> unit;
    if (unit == 'K') size *= 1024;
    if (unit == 'M') size *= 1024 * 1024;
    if (size <= 0) continue;
    const std::string level = first_line(directory + "/level");
    if (level == "1") cache.l1d_bytes = size;
    if (level == "2") cache.l2_bytes = size;
    // A host's whole L3 reaches a virtual machine as if it were its own: the clamp below is what can be believed.
    if (level == "3")
      cache.l3_bytes_per_core = size / std::max(count_in_list(first_line(directory + "/shared_cpu_list")), 1);
  }
  cache.l1d_bytes = std::clamp<int64_t>(cache.l1d_bytes, 16 << 10, 128 << 10);
  cache.l2_bytes = std::clamp<int64_t>(cache.l2_bytes, 256 << 10, 2 << 20);
  cache.l3_bytes_per_core = std::clamp<int64_t>(cache.l3_bytes_per_core, 512 << 10, 4 << 20);
  return cache;
}

Machine detect_machine(Isa isa) {
  const Isa level = common_level(isa, detect_isa());
  const bool has_dot = includes(level, Isa::avx512_bf16);
  return {.isa = level,
          .cores = available_cores(),
          .cache = read_cache_sizes(),
          .bf16_product = has_dot ? measured_bf16_product() : Bf16Product::widen};
}

}  // namespace opst

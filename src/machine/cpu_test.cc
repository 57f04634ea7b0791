#include "machine/cpu.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>

namespace opst {
namespace {

TEST(Isa, Names) {
  const char* const names[] = {"generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16"};
  for (int i = 0; i < kNumIsaLevels; ++i) {
    EXPECT_STREQ(to_string(static_cast<Isa>(i)), names[i]);
    EXPECT_EQ(parse_isa(names[i]), static_cast<Isa>(i));
  }
  for (const char* wrong : {"", "AVX2", "avx", "avx512 ", "avx512_bf1"}) EXPECT_EQ(parse_isa(wrong), std::nullopt);
}

// Against what the kernel says, which has asked the processor and itself.
TEST(Isa, DetectionAgreesWithTheKernel) {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  std::set<std::string> flags;
  while (std::getline(file, line)) {
    if (line.compare(0, 5, "flags") != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    std::string word;
    while (words >> word) flags.insert(word);
    break;
  }
  const auto all = [&](std::initializer_list<const char*> names) {
    for (const char* name : names) {
      if (flags.count(name) == 0) return false;
    }
    return true;
  };
  Isa expected = Isa::generic;
  if (all({"avx2", "fma", "f16c", "bmi1", "bmi2"})) {
    expected = Isa::avx2;
    if (all({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"})) {
      expected = Isa::avx512;
      if (all({"avx512_vnni"})) expected = all({"avx512_bf16"}) ? Isa::avx512_bf16 : Isa::avx512_vnni;
    }
  }
  EXPECT_EQ(detect_isa(), expected);
}

TEST(Machine, IsPlausibleAtEveryLevel) {
  for (int i = 0; i < kNumIsaLevels; ++i) {
    if (!includes(detect_isa(), static_cast<Isa>(i))) continue;
    const Machine machine = detect_machine(static_cast<Isa>(i));
    EXPECT_EQ(machine.isa, static_cast<Isa>(i));
    EXPECT_GE(machine.cores, 1);
    EXPECT_LE(machine.cores, static_cast<int>(std::thread::hardware_concurrency()));
    EXPECT_LT(machine.cache.l1d_bytes, machine.cache.l2_bytes);
    EXPECT_LE(machine.cache.l3_bytes_per_core, 4 << 20);
    EXPECT_TRUE(machine.bf16_product == Bf16Product::widen || machine.isa == Isa::avx512_bf16);
  }
  for (int i = 0; i < kNumIsaLevels; ++i) EXPECT_TRUE(includes(detect_isa(), detect_machine(static_cast<Isa>(i)).isa));
  // No level at all: what every processor runs.
  EXPECT_EQ(detect_machine(static_cast<Isa>(99)).isa, Isa::generic);
}

TEST(Machine, Text) {
  const Machine machine;
  EXPECT_EQ(to_string(machine), "generic, 1 core, L1d 32 KiB, L2 512 KiB, L3 2048 KiB per core, bf16 widen");
  Machine other;
  other.isa = Isa::avx512_bf16;
  other.cores = 2;
  other.bf16_product = Bf16Product::dot;
  EXPECT_EQ(to_string(other), "avx512_bf16, 2 cores, L1d 32 KiB, L2 512 KiB, L3 2048 KiB per core, bf16 dot");
}

TEST(Machine, Bf16ProductIsMeasuredOnce) {
  const Bf16Product first = measured_bf16_product();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(measured_bf16_product(), first);
  EXPECT_TRUE(first == Bf16Product::widen || detect_isa() == Isa::avx512_bf16);
}

TEST(Cores, FollowTheAffinityMask) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(available_cores(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

// A made-up system below a folder.
class FakeSystem : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/opst_cpu_test_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    root_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  void mount(const std::string& type, const std::string& mount_root, const std::string& point,
             const std::string& super_options) {
    mountinfo_ += "31 23 0:28 " + mount_root + " " + point + " rw,relatime shared:9 - " + type + " cgroup " +
                  super_options + "\n";
    write("/proc/self/mountinfo", "1 0 8:1 / / rw - ext4 /dev/sda rw\n" + mountinfo_);
  }

  std::string root_;
  std::string mountinfo_;
};

TEST_F(FakeSystem, NothingKnown) {
  EXPECT_EQ(cgroup_cpu_quota(root_), std::nullopt);
  EXPECT_GE(available_cores(root_), 1);
  const CacheSizes defaults;
  const CacheSizes cache = read_cache_sizes(root_);
  EXPECT_EQ(cache.l1d_bytes, defaults.l1d_bytes);
  EXPECT_EQ(cache.l2_bytes, defaults.l2_bytes);
  EXPECT_EQ(cache.l3_bytes_per_core, defaults.l3_bytes_per_core);
}

TEST_F(FakeSystem, QuotaOfVersion2) {
  mount("cgroup2", "/", "/sys/fs/cgroup", "rw");
  write("/proc/self/cgroup", "0::/user/job\n");
  EXPECT_EQ(cgroup_cpu_quota(root_), std::nullopt);
  write("/sys/fs/cgroup/user/job/cpu.max", "max 100000\n");
  EXPECT_EQ(cgroup_cpu_quota(root_), std::nullopt);
  write("/sys/fs/cgroup/user/job/cpu.max", "350000 100000\n");
  EXPECT_EQ(cgroup_cpu_quota(root_), 3.5);
  write("/sys/fs/cgroup/user/cpu.max", "120000 100000\n");  // a parent limits its children
  EXPECT_EQ(cgroup_cpu_quota(root_), 1.2);
  EXPECT_EQ(available_cores(root_), std::min(available_cores(), 2));  // rounded up
  write("/sys/fs/cgroup/user/cpu.max", "50000 100000\n");
  EXPECT_EQ(available_cores(root_), 1);
  write("/sys/fs/cgroup/user/cpu.max", "nonsense\n");
  EXPECT_EQ(cgroup_cpu_quota(root_), 3.5);
}

TEST_F(FakeSystem, QuotaOfVersion1) {
  mount("cgroup", "/", "/sys/fs/cgroup/memory", "rw,memory");
  mount("cgroup", "/", "/sys/fs/cgroup/cpu,cpuacct", "rw,cpu,cpuacct");
  write("/proc/self/cgroup", "5:memory:/other\n4:cpu,cpuacct:/job\n0::/\n");
  write("/sys/fs/cgroup/memory/other/cpu.cfs_quota_us", "1000\n");
  write("/sys/fs/cgroup/memory/other/cpu.cfs_period_us", "100000\n");
  write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n");
  write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cgroup_cpu_quota(root_), std::nullopt);
  write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "150000\n");
  EXPECT_EQ(cgroup_cpu_quota(root_), 1.5);
}

TEST_F(FakeSystem, QuotaInsideAContainer) {
  // The mount shows only the container's own part of the hierarchy.
  mount("cgroup2", "/docker/abc", "/sys/fs/cgroup", "rw");
  write("/proc/self/cgroup", "0::/docker/abc\n");
  write("/sys/fs/cgroup/cpu.max", "200000 100000\n");
  EXPECT_EQ(cgroup_cpu_quota(root_), 2.0);
}

TEST_F(FakeSystem, CachesAreClamped) {
  const auto cache = [&](int index, const char* level, const char* type, const char* size, const char* shared) {
    const std::string directory = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index);
    write(directory + "/level", level);
    write(directory + "/type", type);
    write(directory + "/size", size);
    write(directory + "/shared_cpu_list", shared);
  };
  cache(0, "1", "Data", "48K", "0");
  cache(1, "1", "Instruction", "64K", "0");
  cache(2, "2", "Unified", "1024K", "0");
  cache(3, "3", "Unified", "520192K", "0-1");
  CacheSizes sizes = read_cache_sizes(root_);
  EXPECT_EQ(sizes.l1d_bytes, 48 << 10);
  EXPECT_EQ(sizes.l2_bytes, 1 << 20);
  EXPECT_EQ(sizes.l3_bytes_per_core, 4 << 20);
  cache(3, "3", "Unified", "32M", "0-7,64-71\n");
  EXPECT_EQ(read_cache_sizes(root_).l3_bytes_per_core, 2 << 20);
  cache(2, "2", "Unified", "64M", "0");
  cache(0, "1", "Data", "1K", "0");
  sizes = read_cache_sizes(root_);
  EXPECT_EQ(sizes.l1d_bytes, 16 << 10);
  EXPECT_EQ(sizes.l2_bytes, 2 << 20);
  cache(0, "1", "Data", "what", "0");
  EXPECT_EQ(read_cache_sizes(root_).l1d_bytes, CacheSizes().l1d_bytes);
}

}  // namespace
}  // namespace opst

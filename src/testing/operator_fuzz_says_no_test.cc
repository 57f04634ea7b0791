// The fuzz target of operators can say no: with each fault planted in turn it ends its process.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <vector>

#include "core/sanitizers.h"
#include "testing/operator_fuzz.h"
#include "testing/random.h"

namespace opst::test {
namespace {

std::vector<uint8_t> input(uint64_t seed) {
  Random random(seed);
  std::vector<uint8_t> bytes(200);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.integer(0, 255));
  return bytes;
}

// Whether the target aborts on this input. In a child, so that this process goes on.
bool says_no(const std::vector<uint8_t>& bytes, PlantedFault fault) {
  const pid_t child = fork();
  if (child == 0) {
    std::fclose(stderr);
    fuzz_operator(bytes.data(), bytes.size(), fault);
    _exit(0);
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

TEST(OperatorFuzz, SaysNoToEachPlantedFault) {
  if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer allows no new threads in a forked child";
  std::vector<std::vector<uint8_t>> accepted, refused;
  for (uint64_t seed = 1; seed < 5000 && (accepted.size() < 24 || refused.size() < 24); ++seed) {
    const std::vector<uint8_t> bytes = input(seed);
    auto& kind = fuzz_operator(bytes.data(), bytes.size(), PlantedFault::none) ? accepted : refused;
    if (kind.size() < 24) kind.push_back(bytes);
  }
  ASSERT_EQ(accepted.size(), 24u);
  ASSERT_EQ(refused.size(), 24u);
  const auto count = [](const std::vector<std::vector<uint8_t>>& inputs, PlantedFault fault) {
    int no = 0;
    for (const std::vector<uint8_t>& bytes : inputs) no += says_no(bytes, fault) ? 1 : 0;
    return no;
  };
  EXPECT_EQ(count(accepted, PlantedFault::none), 0);
  EXPECT_EQ(count(refused, PlantedFault::none), 0);
  // Not of all: an output may be empty, or hold a NaN there.
  EXPECT_GE(count(accepted, PlantedFault::outside), 4);
  EXPECT_GE(count(accepted, PlantedFault::threads), 4);
  EXPECT_GE(count(accepted, PlantedFault::value), 4);
  EXPECT_GE(count(refused, PlantedFault::refused), 4);  // some are never called
}

}  // namespace
}  // namespace opst::test

#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "machine/workspace.h"

namespace opst {
namespace {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;

Buffer allocate(WeightMemory& memory, int64_t bytes) {
  Result<Buffer> buffer = memory.allocate(bytes);
  EXPECT_TRUE(buffer.ok()) << bytes;
  EXPECT_EQ(buffer.value().size_bytes(), bytes);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.value().data()) % 64, 0u);
  return std::move(buffer.value());
}

// Whether weights share pages at all: where their bounds are watched they do not.
bool shared() {
  WeightMemory memory;
  const Buffer a = allocate(memory, 64), b = allocate(memory, 64);
  return static_cast<char*>(a.data()) + 64 == b.data();
}

TEST(WeightMemory, WeightsOfAnySizeKeepWhatIsWritten) {
  std::vector<Buffer> weights;
  {
    WeightMemory memory;
    for (int i = 0; i < 200; ++i) {
      const int64_t bytes = i % 50 == 7 ? kHugePageBytes + i : 1 + i * 7919 % 300000;
      weights.push_back(allocate(memory, bytes));
      std::memset(weights.back().data(), i, static_cast<size_t>(bytes));
    }
    for (size_t i = 0; i < weights.size(); i += 3) weights[i] = Buffer();
  }
  // They outlive what they came from, and their neighbours.
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto* const bytes = static_cast<const unsigned char*>(weights[i].data());
    for (int64_t b = 0; b < weights[i].size_bytes(); ++b) ASSERT_EQ(bytes[b], i) << b;
  }
}

TEST(WeightMemory, NeighboursShareAHugePage) {
  if (!shared()) GTEST_SKIP() << "the bounds of each weight are watched";
  WeightMemory memory;
  const Buffer a = allocate(memory, 100), b = allocate(memory, 200000);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data()) % kHugePageBytes, 0u);
  EXPECT_EQ(static_cast<char*>(a.data()) + 128, b.data());
}

TEST(WeightMemory, TheLastWeightsPlaceIsUsedAgain) {
  if (!shared()) GTEST_SKIP() << "the bounds of each weight are watched";
  WeightMemory memory;
  const Buffer kept = allocate(memory, 1000);
  const void* const place = allocate(memory, 100000).data();
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(allocate(memory, 100000).data(), place);
}

TEST(WeightMemory, RefusesWhatCannotBe) {
  WeightMemory memory;
  EXPECT_EQ(memory.allocate(-1).status().code(), StatusCode::invalid_argument);
  EXPECT_EQ(memory.allocate(int64_t{1} << 62).status().code(), StatusCode::out_of_memory);
  EXPECT_EQ(memory.allocate(0).value().data(), nullptr);
}

}  // namespace
}  // namespace opst

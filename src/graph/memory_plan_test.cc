#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <random>

#include "core/int_math.h"
#include "graph/graph_impl.h"

namespace opst::graph {
namespace {

void check_plan(const std::vector<Lifetime>& lifetimes, const MemoryPlan& plan) {
  ASSERT_EQ(plan.offsets.size(), lifetimes.size());
  int64_t sum = 0, end = 0;
  for (size_t a = 0; a < lifetimes.size(); ++a) {
    const Lifetime& x = lifetimes[a];
    sum += (x.bytes + kAlignment - 1) / kAlignment * kAlignment;
    end = std::max(end, plan.offsets[a] + x.bytes);
    EXPECT_GE(plan.offsets[a], 0);
    EXPECT_EQ(plan.offsets[a] % kAlignment, 0);
    for (size_t b = 0; b < a; ++b) {
      const Lifetime& y = lifetimes[b];
      if (x.first > y.last || y.first > x.last || x.bytes == 0 || y.bytes == 0) continue;
      EXPECT_TRUE(plan.offsets[a] + x.bytes <= plan.offsets[b] || plan.offsets[b] + y.bytes <= plan.offsets[a])
          << a << " [" << x.first << ", " << x.last << "] and " << b << " [" << y.first << ", " << y.last << "]";
    }
  }
  EXPECT_EQ(plan.memory.sum_bytes, sum);
  EXPECT_LE(end, plan.memory.workspace_bytes);
  EXPECT_LE(plan.memory.workspace_bytes, plan.memory.sum_bytes);
  EXPECT_GE(plan.memory.workspace_bytes, plan.memory.peak_live_bytes);
  // The peak by counting, node by node.
  int64_t peak = 0;
  for (const Lifetime& at : lifetimes) {
    int64_t live = 0;
    for (const Lifetime& x : lifetimes) {
      if (x.first <= at.first && at.first <= x.last) live += (x.bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
    peak = std::max(peak, live);
  }
  EXPECT_EQ(plan.memory.peak_live_bytes, peak);
}

TEST(MemoryPlan, NothingThatLivesTogetherOverlaps) {
  std::mt19937 random(7);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  double used = 0, naive = 0, least = 0;
  for (int round = 0; round < 4000; ++round) {
    const int num_nodes = 1 + below(60), longest = 1 + below(12), largest = 1 << below(16);
    std::vector<Lifetime> lifetimes;
    for (int i = below(80); i > 0; --i) {
      const int first = below(num_nodes);
      lifetimes.push_back({below(largest), first, first + below(longest)});
    }
    const MemoryPlan plan = plan_memory(lifetimes);
    check_plan(lifetimes, plan);
    if (HasFailure()) FAIL() << "round " << round;
    used += static_cast<double>(plan.memory.workspace_bytes);
    naive += static_cast<double>(plan.memory.sum_bytes);
    least += static_cast<double>(plan.memory.peak_live_bytes);
  }
  std::printf("workspace: %.3f of the sum, %.3f times the most that lives at once\n", used / naive, used / least);
  EXPECT_LT(used, 1.1 * least);
}

TEST(MemoryPlan, AChainTakesTwo) {
  std::vector<Lifetime> chain;
  for (int i = 0; i < 100; ++i) chain.push_back({1000, i, i + 1});
  EXPECT_EQ(plan_memory(chain).memory.workspace_bytes, 2 * 1024);
}

TEST(MemoryPlan, TheSmallestGapIsTaken) {
  // At node 1 the gaps are 128 bytes (where lifetime 1 was) and 64 (where lifetime 3 was): 64 belong into the second.
  const std::vector<Lifetime> lifetimes = {{512, 0, 2}, {128, 0, 0}, {128, 0, 2}, {64, 0, 0}, {64, 0, 2}, {64, 1, 2}};
  const MemoryPlan plan = plan_memory(lifetimes);
  check_plan(lifetimes, plan);
  EXPECT_EQ(plan.offsets.back(), plan.offsets[3]);
  EXPECT_EQ(plan.memory.workspace_bytes, 512 + 128 + 128 + 64 + 64);
}

// Sums stop at the limit where int64_t would wrap.
TEST(MemoryPlan, MoreThanAnyMemory) {
  for (const int64_t bytes : {kMaxBytes - 1, kMaxBytes, int64_t{1} << 62, INT64_MAX}) {
    std::vector<Lifetime> lifetimes;
    for (int i = 0; i < 300; ++i) lifetimes.push_back({bytes, i % 7, i % 7 + i % 3});
    const MemoryPlan plan = plan_memory(lifetimes);
    EXPECT_EQ(plan.memory.workspace_bytes, kMaxBytes);
    EXPECT_EQ(plan.memory.sum_bytes, kMaxBytes);
    EXPECT_EQ(plan.memory.peak_live_bytes, kMaxBytes);
    for (const int64_t offset : plan.offsets) EXPECT_TRUE(offset >= 0 && offset <= kMaxBytes);
  }
}

// What is no lifetime has no place, and the others have theirs.
TEST(MemoryPlan, LifetimesThatAreNone) {
  const std::vector<Lifetime> lifetimes = {
      {128, 0, 2},      {-1, 0, 2},  {INT64_MIN, 0, 2},      {64, 3, 2}, {64, INT_MAX, 0},
      {64, 1, INT_MAX}, {64, -1, 2}, {64, INT_MIN, INT_MAX}, {64, 0, 0}};
  const MemoryPlan plan = plan_memory(lifetimes);
  EXPECT_EQ(plan.offsets, (std::vector<int64_t>{0, -1, -1, -1, -1, 128, -1, -1, 128}));
  EXPECT_EQ(plan.memory.workspace_bytes, 192);
  EXPECT_EQ(plan.memory.sum_bytes, 256);
  EXPECT_EQ(plan.memory.peak_live_bytes, 192);
}

TEST(MemoryPlan, NothingAndEmptyTensors) {
  EXPECT_EQ(plan_memory({}).memory.workspace_bytes, 0);
  const std::vector<Lifetime> empty = {{0, 0, 1}, {10, 0, 1}, {0, 1, 1}};
  const MemoryPlan plan = plan_memory(empty);
  check_plan(empty, plan);
  EXPECT_EQ(plan.memory.workspace_bytes, 64);
}

}  // namespace
}  // namespace opst::graph

#include "machine/workspace.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "core/sanitizers.h"
#include "testing/random.h"

namespace opst {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

WorkspaceLease lease(WorkspacePool& pool, int64_t size_bytes) {
  Result<WorkspaceLease> result = pool.lease(size_bytes);
  EXPECT_TRUE(result.ok()) << size_bytes;
  return std::move(result.value());
}

TEST(Workspace, ReusesMemory) {
  WorkspacePool pool;
  void* data = nullptr;
  for (int i = 0; i < 5; ++i) {
    const WorkspaceLease memory = lease(pool, 1000);
    EXPECT_GE(memory.size_bytes(), 1000);
    EXPECT_TRUE(i == 0 || memory.data() == data);
    data = memory.data();
    std::memset(memory.data(), i, 1000);
  }
  EXPECT_EQ(pool.allocations(), 1);
}

TEST(Workspace, TakesTheSmallestThatFits) {
  WorkspacePool pool;
  void* small = nullptr;
  void* large = nullptr;
  {
    const WorkspaceLease a = lease(pool, 4 * kMiB);
    const WorkspaceLease b = lease(pool, kMiB);
    const WorkspaceLease c = lease(pool, 8 * kMiB);
    large = a.data();
    small = b.data();
  }
  EXPECT_EQ(pool.held_bytes(), 13 * kMiB);
  const WorkspaceLease first = lease(pool, kMiB / 2);
  EXPECT_EQ(first.data(), small);
  const WorkspaceLease second = lease(pool, kMiB / 2);
  EXPECT_EQ(second.data(), large);
  EXPECT_EQ(pool.allocations(), 3);
}

TEST(Workspace, ReplacesTheLargestWhenNoneFits) {
  WorkspacePool pool;
  {
    const WorkspaceLease a = lease(pool, kMiB);
    const WorkspaceLease b = lease(pool, 4 * kMiB);
  }
  { const WorkspaceLease c = lease(pool, 6 * kMiB); }
  EXPECT_EQ(pool.held_bytes(), 7 * kMiB);
  EXPECT_EQ(pool.allocations(), 3);
  { const WorkspaceLease c = lease(pool, 4 * kMiB); }
  EXPECT_EQ(pool.allocations(), 3);
}

TEST(Workspace, ZeroBytesNeedNothing) {
  WorkspacePool pool;
  const WorkspaceLease none = lease(pool, 0);
  EXPECT_EQ(none.data(), nullptr);
  EXPECT_EQ(pool.allocations(), 0);
  EXPECT_EQ(pool.held_bytes(), 0);
}

// A call that plans with one lease and runs with another: first its rehearsal, then itself in lent memory.
TEST(Workspace, RehearsesACallAndLendsItMemory) {
  WorkspacePool pool;
  bool ran = false;
  const auto call = [&](int64_t plan_bytes, int64_t run_bytes) -> Status {
    Result<WorkspaceLease> plan = pool.lease_for_plan(plan_bytes);
    if (!plan.ok()) return plan.status();
    std::memset(plan.value().data(), 1, static_cast<size_t>(plan_bytes));
    Result<WorkspaceLease> run = pool.lease(run_bytes);
    if (!run.ok()) return run.status();
    EXPECT_EQ(static_cast<char*>(run.value().data()) - static_cast<char*>(plan.value().data()), 128);
    std::memset(run.value().data(), 2, static_cast<size_t>(run_bytes));
    ran = true;
    return {};
  };
  pool.rehearse();
  EXPECT_FALSE(call(100, 1000).ok());
  EXPECT_TRUE(pool.rehearsed());
  EXPECT_EQ(pool.most_bytes(), 128 + 1024);
  EXPECT_FALSE(ran);
  EXPECT_EQ(pool.allocations(), 0);

  alignas(64) char memory[128 + 1024];
  for (int i = 0; i < 3; ++i) {
    ran = false;
    pool.lend(memory, sizeof(memory));
    EXPECT_TRUE(call(100, 1000).ok());
    EXPECT_TRUE(ran);
    EXPECT_FALSE(pool.exhausted());
    EXPECT_EQ(memory[99], 1);
    EXPECT_EQ(memory[128 + 999], 2);
  }
  pool.lend(memory, sizeof(memory) - 64);
  EXPECT_EQ(call(100, 1000).code(), StatusCode::out_of_memory);
  EXPECT_TRUE(pool.exhausted());
  EXPECT_TRUE(call(100, 900).ok());
  EXPECT_EQ(pool.allocations(), 0);
  EXPECT_EQ(pool.held_bytes(), 0);
}

// What is given back before the run counts once.
TEST(Workspace, RehearsalsAndLentMemoryReuseWhatIsGivenBack) {
  WorkspacePool pool;
  const auto call = [&]() -> Status {
    {
      Result<WorkspaceLease> plan = pool.lease_for_plan(640);
      if (!plan.ok()) return plan.status();
    }
    return pool.lease(1000).status();
  };
  pool.rehearse();
  EXPECT_FALSE(call().ok());
  EXPECT_EQ(pool.most_bytes(), 1024);
  alignas(64) char memory[1024];
  pool.lend(memory, sizeof(memory));
  EXPECT_TRUE(call().ok());
}

TEST(Workspace, ARehearsalEndsWhereNoMemoryIsNeeded) {
  WorkspacePool pool;
  EXPECT_TRUE(pool.ready().ok());
  pool.rehearse();
  EXPECT_FALSE(pool.ready().ok());
  EXPECT_TRUE(pool.rehearsed());
  EXPECT_EQ(pool.most_bytes(), 0);
  pool.rehearse();
  EXPECT_FALSE(pool.rehearsed());
  EXPECT_EQ(pool.lease(kMaxBytes).status().code(), StatusCode::out_of_memory);
  EXPECT_FALSE(pool.rehearsed());
  pool.lend(nullptr, 0);
  EXPECT_TRUE(pool.ready().ok());
  EXPECT_FALSE(pool.lease(1).ok());
}

TEST(Workspace, ImpossibleSizesAreOutOfMemoryAndLeaveThePoolUsable) {
  WorkspacePool pool;
  { const WorkspaceLease a = lease(pool, kMiB); }
  for (int64_t bytes : {int64_t{1} << 55, INT64_MAX, int64_t{-1}}) {
    EXPECT_EQ(pool.lease(bytes).status().code(), StatusCode::out_of_memory) << bytes;
  }
  { const WorkspaceLease a = lease(pool, kMiB); }
  EXPECT_EQ(pool.held_bytes(), kMiB);
}

TEST(Workspace, MovedLeasesGiveBackOnce) {
  WorkspacePool pool;
  {
    WorkspaceLease a = lease(pool, 1000);
    const WorkspaceLease b = std::move(a);
    EXPECT_EQ(a.data(), nullptr);
    EXPECT_NE(b.data(), nullptr);
  }
  const WorkspaceLease a = lease(pool, 1000);
  const WorkspaceLease b = lease(pool, 1000);
  EXPECT_NE(a.data(), b.data());
  EXPECT_EQ(pool.allocations(), 2);
}

TEST(Workspace, TrimFreesWhatIsIdle) {
  WorkspacePool pool;
  const WorkspaceLease kept = lease(pool, kMiB);
  for (int i = 0; i < 5; ++i) lease(pool, 2 * kMiB);
  EXPECT_EQ(pool.held_bytes(), 3 * kMiB);
  pool.trim();
  EXPECT_EQ(pool.held_bytes(), kMiB);
  std::memset(kept.data(), 1, static_cast<size_t>(kMiB));
  const WorkspaceLease again = lease(pool, 2 * kMiB);
  const WorkspaceLease more = lease(pool, 2 * kMiB);
  EXPECT_EQ(pool.allocations(), 4);
}

TEST(Workspace, ConcurrentLeasesAreDistinct) {
  WorkspacePool pool;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      test::Random random(test::seed() + static_cast<uint64_t>(t));
      for (int i = 0; i < 300; ++i) {
        const int64_t bytes = random.integer(1, 300000);
        const WorkspaceLease memory = lease(pool, bytes);
        const int value = static_cast<int>(random.integer(0, 255));
        std::memset(memory.data(), value, static_cast<size_t>(bytes));
        const auto* read = static_cast<const unsigned char*>(memory.data());
        EXPECT_EQ(read[0], value);
        EXPECT_EQ(read[bytes - 1], value);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(pool.held_bytes(), 4 * 320 * 1024);
}

// Nothing under TSan, whose shadow of touched memory counts too and stays.
int64_t resident_bytes() {
  if (kThreadSanitizer) return 0;
  long pages_total = 0;
  long pages_resident = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr || std::fscanf(file, "%ld %ld", &pages_total, &pages_resident) != 2) return 0;
  std::fclose(file);
  return pages_resident * 4096;
}

// Calls of ever other sizes, two leases at a time: memory reaches a level and stays there.
TEST(Workspace, MemoryReachesAPlateau) {
  WorkspacePool pool;
  test::Random random(test::seed());
  const int64_t largest = 24 * kMiB;
  const int64_t before = resident_bytes();
  int64_t held_after_half = 0;
  int64_t allocations_after_half = 0;
  for (int call = 0; call < 400; ++call) {
    // The largest size comes early, as in a program that has warmed up.
    const WorkspaceLease a = lease(pool, call < 2 ? largest : random.integer(1, largest));
    const WorkspaceLease b = lease(pool, call < 2 ? largest : random.integer(1, largest));
    for (const WorkspaceLease* memory : {&a, &b}) {
      for (int64_t i = 0; i < memory->size_bytes(); i += 4096) static_cast<char*>(memory->data())[i] = 1;
    }
    if (call == 200) {
      held_after_half = pool.held_bytes();
      allocations_after_half = pool.allocations();
    }
  }
  EXPECT_EQ(pool.held_bytes(), held_after_half);
  EXPECT_EQ(pool.allocations(), allocations_after_half);
  EXPECT_LE(pool.held_bytes(), 2 * largest);
  EXPECT_LE(resident_bytes() - before, 2 * largest + 8 * kMiB);
  pool.trim();
  EXPECT_LE(resident_bytes() - before, 8 * kMiB);
}

TEST(Workspace, SizesThatGrowSlowlyAllocateSeldom) {
  WorkspacePool pool;
  for (int64_t bytes = 1; bytes < kMiB; bytes += 1000) lease(pool, bytes);
  EXPECT_LE(pool.allocations(), 17);
  EXPECT_LE(pool.held_bytes(), kMiB);
}

TEST(Arena, HandsOutAlignedPiecesUntilItIsEmpty) {
  if (!kAddressSanitizer) {
    EXPECT_EQ(Arena::size_of<float>(17), 128);
    EXPECT_EQ(Arena::size_of<int8_t>(1), 64);
  }
  EXPECT_EQ(Arena::size_of<float>(0), 0);
  WorkspacePool pool;
  const int64_t bytes = Arena::size_of<float>(17) + Arena::size_of<int8_t>(1) + Arena::size_of<double>(8);
  const WorkspaceLease memory = lease(pool, bytes);
  Arena arena(memory.data(), bytes);
  float* a = arena.take<float>(17);
  int8_t* b = arena.take<int8_t>(1);
  double* c = arena.take<double>(8);
  EXPECT_EQ(a, memory.data());
  EXPECT_EQ(reinterpret_cast<char*>(b) - reinterpret_cast<char*>(a), Arena::size_of<float>(17));
  EXPECT_EQ(reinterpret_cast<char*>(c) - reinterpret_cast<char*>(b), Arena::size_of<int8_t>(1));
  EXPECT_EQ(arena.take<char>(1), nullptr);
}

// What AddressSanitizer is told (core/sanitizers.h).
TEST(Arena, OneElementTooFarIsReported) {
  if (!kAddressSanitizer) GTEST_SKIP() << "only in a build with AddressSanitizer";
  WorkspacePool pool;
  float* left_over = nullptr;
  for (const int64_t count : {16, 17, 1, 100}) {
    const int64_t bytes = 2 * Arena::size_of<float>(count);
    const WorkspaceLease memory = lease(pool, bytes);
    EXPECT_EQ(memory.size_bytes(), bytes);
    Arena arena(memory);
    volatile float* const a = arena.take<float>(count);
    volatile float* const b = arena.take<float>(count);
    for (int64_t i = 0; i < count; ++i) EXPECT_TRUE(a[i] != a[i] && b[i] != b[i]) << "scratch begins as NaN";
    EXPECT_DEATH(a[count] = 1, "use-after-poison");
    EXPECT_DEATH(b[count] = 1, "use-after-poison");
    EXPECT_DEATH(b[-1] = 1, "use-after-poison");
    left_over = const_cast<float*>(a);
  }
  EXPECT_DEATH(*static_cast<volatile float*>(left_over) = 1, "use-after-poison");
}

TEST(Arena, RenewedMemoryHasNoRedZonesOfBefore) {
  if (!kAddressSanitizer) GTEST_SKIP() << "only in a build with AddressSanitizer";
  WorkspacePool pool;
  const int64_t bytes = 3 * Arena::size_of<float>(1);
  const WorkspaceLease memory = lease(pool, bytes);
  auto* const all = static_cast<volatile unsigned char*>(memory.data());
  Arena arena(memory);
  for (int i = 0; i < 3; ++i) *arena.take<float>(1) = 1;
  EXPECT_DEATH(all[4] = 1, "use-after-poison");
  memory.renew();
  for (int64_t i = 0; i < bytes; ++i) ASSERT_EQ(all[i], 0xff) << i;
  EXPECT_DEATH(all[bytes] = 1, "use-after-poison");
}

}  // namespace
}  // namespace opst

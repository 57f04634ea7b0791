// What contexts, their scratch memory and their weights do when an allocation fails.
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <utility>

#include "machine/context_impl.h"
#include "opst/context.h"
#include "testing/fail_allocations.h"

namespace opst {
namespace {

using test::fail_each_allocation;

constexpr int64_t kMiB = int64_t{1} << 20;
// How often a mapping fails that an attempt makes once: alone, and with all that follow. ThreadSanitizer's never do
// (fail_allocations.h).
constexpr int64_t kOfMappings = kThreadSanitizer ? 0 : 2;

TEST(ExhaustedMemory, BuffersOfAnySize) {
  for (const int64_t bytes : {int64_t{100}, 3 * kMiB}) {
    const int64_t failed = fail_each_allocation([&] { return Buffer::allocate(bytes).status(); });
    EXPECT_EQ(failed, bytes < kMiB ? 2 : kOfMappings) << bytes;
  }
  fail_each_allocation([] { return Buffer::allocate(-1).status(); }, [] {}, StatusCode::invalid_argument);
}

TEST(ExhaustedMemory, LeavesAWorkspacePoolUsable) {
  WorkspacePool pool;
  const auto two_leases = [&] {
    const Result<WorkspaceLease> small = pool.lease(1000);
    const Result<WorkspaceLease> large = pool.lease(3 * kMiB);
    return small.ok() ? large.status() : small.status();
  };
  const int64_t failed = fail_each_allocation(two_leases, [&] {
    EXPECT_TRUE(two_leases().ok());
    pool.trim();
    EXPECT_EQ(pool.held_bytes(), 0);
  });
  EXPECT_GE(failed, 2 + kOfMappings);
}

// The destructor of a lease cannot report that there is no memory, so giving a buffer back must need none.
TEST(ExhaustedMemory, TrimLeavesRoomForWhatIsOnLease) {
  WorkspacePool pool;
  std::optional<WorkspaceLease> leases[3];
  for (auto& lease : leases) lease.emplace(std::move(pool.lease(kMiB).value()));
  leases[0].reset();
  pool.trim();
  const int64_t before = test::num_allocations;
  leases[1].reset();
  leases[2].reset();
  EXPECT_EQ(test::num_allocations, before);
  EXPECT_EQ(pool.held_bytes(), 2 * kMiB);
}

TEST(ExhaustedMemory, ContextsAreMadeAndUsedOrRefused) {
  ContextOptions options;
  options.num_threads = 3;
  const auto make_and_use = [&]() -> Status {
    Result<Context> made = Context::create(options);
    if (!made.ok()) return made.status();
    Context& context = made.value();
    std::atomic<int> tasks{0};
    context.impl().pool.parallel_for(9, [&](int64_t, int) { tasks.fetch_add(1); });
    if (tasks.load() != 9) return Status::internal("lost tasks");
    const Result<WorkspaceLease> scratch = context.impl().workspaces.lease(3 * kMiB);
    context.trim();
    return scratch.status();
  };
  ASSERT_TRUE(make_and_use().ok());
  const int64_t live = test::live_allocations;
  const int64_t failed = fail_each_allocation(make_and_use, [&] { EXPECT_EQ(test::live_allocations, live); });
  EXPECT_GT(failed, 10);
  // The message of a refusal needs memory, too.
  options.num_threads = -1;
  fail_each_allocation([&] { return Context::create(options).status(); }, [] {}, StatusCode::invalid_argument);
}

TEST(ExhaustedMemory, WeightsShareBlocksOrAreRefused) {
  WeightMemory memory;
  const int64_t failed = fail_each_allocation(
      [&]() -> Status {
        try {
          return memory.allocate(1000).status();
        } catch (const std::bad_alloc&) {  // allowed here, see workspace.h
          return Status::out_of_memory();
        }
      },
      [&] {
        const Result<Buffer> a = memory.allocate(1000), b = memory.allocate(1000);
        EXPECT_TRUE(a.ok() && b.ok() && a.value().data() != b.value().data());
      });
  EXPECT_GE(failed, 2);
}

}  // namespace
}  // namespace opst

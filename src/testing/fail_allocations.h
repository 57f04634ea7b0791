// Exhausted memory on demand: fails the n-th allocation from here, of every form of new (Buffer's among them) and of
// mmap. Included by one source file of the program.
//
//   Context context = ...;                       // what may fail is made inside, what may not outside
//   const int64_t failed = fail_each_allocation([&] { return flash_attention_forward(context, ...); });
//   EXPECT_GT(failed, 0);
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "core/sanitizers.h"
#include "opst/status.h"
#include "testing/count_allocations.h"

namespace opst::test {

enum class Failing { once, from_there_on };

// While it lives, the n-th allocation (from 1) fails, or it and all that follow. Nothing of GoogleTest in its scope.
class FailAllocations {
 public:
  FailAllocations(int64_t n, Failing failing) : first_(num_allocations.load() + n) {
    last_refused = failing == Failing::once ? first_ : std::numeric_limits<int64_t>::max();
    first_refused = first_;
  }
  ~FailAllocations() { first_refused = std::numeric_limits<int64_t>::max(); }
  FailAllocations(const FailAllocations&) = delete;
  FailAllocations& operator=(const FailAllocations&) = delete;

  bool happened() const { return num_allocations.load() >= first_; }

 private:
  int64_t first_;
};

// Runs `attempt` (it returns a Status) with its first allocation failing, then with its second, and so on until one
// makes fewer; all of that once with the single failure and once with all allocations from there on failing. Each
// attempt must return `with_memory` or out_of_memory and must not throw. After each, `between` runs with memory at
// hand: there the test sees that its objects still work. Gives the number of attempts in which an allocation failed.
template <class Attempt, class Between>
int64_t fail_each_allocation(const Attempt& attempt, const Between& between, StatusCode with_memory = StatusCode::ok) {
  int64_t failed = 0;
  for (const Failing failing : {Failing::once, Failing::from_there_on}) {
    const char* const what = failing == Failing::once ? " alone" : " and all later ones";
    for (int64_t n = 1;; ++n) {
      bool happened = false, thrown = false;
      {
        Status status;
        {
          const FailAllocations refused(n, failing);
          try {
            status = attempt();
          } catch (...) {
            thrown = true;
          }
          happened = refused.happened();
        }
        EXPECT_FALSE(thrown) << "allocation " << n << what << ": an exception crossed the API";
        EXPECT_TRUE(status.code() == with_memory || (happened && status.code() == StatusCode::out_of_memory))
            << "allocation " << n << what << ": " << to_string(status.code()) << ": " << status.message();
      }  // the status is gone: its message is memory, too
      between();
      if (!happened) break;
      ++failed;
      if (testing::Test::HasFailure()) {
        ADD_FAILURE() << "at allocation " << n << what;
        return failed;
      }
    }
  }
  return failed;
}
template <class Attempt>
int64_t fail_each_allocation(const Attempt& attempt) {
  return fail_each_allocation(attempt, [] {});
}

}  // namespace opst::test

// ThreadSanitizer must see every mapping itself: there they do not fail.
#if !OPST_THREAD_SANITIZER
[[gnu::noinline]] void* mmap(void* address, std::size_t size, int protection, int flags, int file,
                             off_t offset) noexcept {
  if (!opst::test::allocation_granted()) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return reinterpret_cast<void*>(syscall(SYS_mmap, address, size, protection, flags, file, offset));
}
#endif

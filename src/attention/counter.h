// How tasks of one parallel loop wait for tasks that have begun before them.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace opst::attention {

// Returns once the counter holds at least `count`.
inline void wait_for(const std::atomic<int64_t>& counter, int64_t count) {
  for (int spins = 0; counter.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 1000) std::this_thread::yield();
  }
}

// Counts finished tasks; others wait until enough are.
class Counter {
 public:
  void add_one() { count_.fetch_add(1, std::memory_order_release); }
  void wait_for(int64_t count) const { attention::wait_for(count_, count); }

 private:
  alignas(64) std::atomic<int64_t> count_{0};
};

}  // namespace opst::attention

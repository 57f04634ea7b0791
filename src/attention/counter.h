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

// Keeps the order of additions: tasks are numbered from 0, and each adds in its turn.
class Turn {
 public:
  // Returns once all tasks before `number` have passed the turn on.
  void wait_for(int64_t number) const { attention::wait_for(next_, number); }
  // To the task after `number`, whose turn it is.
  void pass(int64_t number) { next_.store(number + 1, std::memory_order_release); }
  // Of a task that adds nothing.
  void take_and_pass(int64_t number) { wait_for(number), pass(number); }

 private:
  std::atomic<int64_t> next_{0};
};

}  // namespace opst::attention

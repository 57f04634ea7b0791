// ThreadPool: persistent workers for parallel loops over tasks.
//
//   pool.parallel_for(num_tasks, [&](int64_t task, int worker) { ... });
//
// One parallel_for is a region. Its tasks are handed out in ascending order, one at a time, to whoever is free; the
// caller works too, as worker 0. Results must not depend on which worker ran a task: `worker` in [0, num_threads) is
// only for choosing scratch memory.
//
// - A region waits only for workers that entered it: one that the system has not scheduled cannot hold it up.
// - Idle workers spin briefly, then sleep on a futex. A sleeping worker's affinity leaves out the core of the last
//   caller, so that it is not woken there; awake it has the affinity that it had before.
// - A parallel_for inside a task runs serially on that worker.
// - Concurrent calls from several threads are legal; one of them gets the workers, the others run alone.
// - Floating point control (MXCSR) is set to its default in every worker and in the caller for the length of the
//   region, and the caller's is restored: results do not depend on a caller's flush-to-zero mode.
// - Workers that wait may fetch what the next region will read: read_ahead.
// - In a forked child the first region starts new workers. Where the system grants fewer threads, those do the work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "core/int_math.h"

namespace opst {

inline constexpr int kMaxThreads = 1024;

// Elements of a task whose work for each is little: some microseconds, fewer are not worth handing out.
inline constexpr int64_t kTaskElements = int64_t{1} << 14;
inline int64_t rows_per_task(int64_t elements_per_row) {
  return std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, elements_per_row));
}

class ThreadPool {
 public:
  // The caller included, clamped to [1, kMaxThreads]. Workers start with the first region that can use them.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;

  template <class Body>  // void(int64_t task, int worker) noexcept
  void parallel_for(int64_t num_tasks, const Body& body) {
    const TaskFunction call = [](const void* closure, int64_t task, int worker) {
      (*static_cast<const Body*>(closure))(task, worker);
    };
    run(num_tasks, call, &body);
  }

  // body(i, worker) for 0 <= i < count, `per_task` >= 1 of them to a task.
  template <class Body>
  void for_each(int64_t count, int64_t per_task, const Body& body) {
    parallel_for(ceil_div(count, per_task), [&](int64_t task, int worker) {
      const int64_t end = std::min(count, (task + 1) * per_task);
      for (int64_t i = task * per_task; i < end; ++i) body(i, worker);
    });
  }

  // A wish for the time until the next region: worker w fetches [data + w * stride, + bytes) into its caches.
  void read_ahead(const void* data, int64_t stride, int64_t bytes);

 private:
  using TaskFunction = void (*)(const void* closure, int64_t task, int worker);
  void run(int64_t num_tasks, TaskFunction function, const void* closure);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace opst

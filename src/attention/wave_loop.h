// WaveLoop: packs operands that tasks share and runs the tasks, in waves of heads, as one parallel loop:
//
//     pack wave 0, tasks of wave 0, pack wave 1, tasks of wave 1, ...
//
// A wave is as many heads as keep their packed operands in a cache until tasks have read them. No thread stands idle at
// a barrier between waves: indices are handed out in ascending order, so what an index waits for is done or being done.
//
// Two buffers of shared memory take turns, each with two counters: pieces that are `packed` and tasks that are `done`.
// A wave packs P = heads_per_wave * packs_per_head pieces and runs T = heads_per_wave * tasks_per_head tasks (those of
// heads that the last wave lacks count, too):
//
//   wave   buffer   each piece is packed after           each task runs after
//     0      0      -                                    packed[0] >= P         all of wave 0 is packed
//     1      1      -                                    packed[1] >= P         all of wave 1 is packed
//     2      0      done[0] >= T     wave 0 is done      packed[0] >= 2 P       all of wave 2 is packed
//     w    w % 2    done[w % 2] >= (w / 2) T             packed[w % 2] >= (w / 2 + 1) P
//
// A head's place in the buffers is head % (2 heads_per_wave).
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "core/int_math.h"
#include "machine/thread_pool.h"

namespace opst::attention {

// Counts finished tasks; tasks of the same loop that have begun later wait until enough are.
class Counter {
 public:
  void add_one() { count_.fetch_add(1, std::memory_order_release); }
  // Returns once the counter holds at least `count`.
  void wait_for(int64_t count) const {
    for (int spins = 0; count_.load(std::memory_order_acquire) < count; ++spins) {
      if (spins > 1000) std::this_thread::yield();
    }
  }

 protected:
  std::atomic<int64_t> count_{0};
};

// Keeps the order of additions: tasks are numbered from 0, and each waits for its number, adds, and passes the turn on.
class Turn : public Counter {
 public:
  void pass(int64_t number) { count_.store(number + 1, std::memory_order_release); }
  // Of a task that adds nothing.
  void take_and_pass(int64_t number) { wait_for(number), pass(number); }
};

struct WaveLoop {
  // All tasks of a head, then all of the next; or the first of each head, then the second: neighbours do not wait.
  enum class Order : uint8_t { by_head, heads_in_turn };

  int64_t heads, heads_per_wave;
  int64_t packs_per_head;  // 0: nothing is shared
  int64_t tasks_per_head;
  Order order;

  // pack(head, index, worker) for every piece; task(head, index, number, worker) for every task, also of heads that the
  // last wave lacks. `number` counts tasks as they are handed out.
  template <class Pack, class Task>
  void run(ThreadPool& pool, const Pack& pack, const Task& task) const {
    const int64_t packs = heads_per_wave * packs_per_head, tasks = heads_per_wave * tasks_per_head;
    struct Progress {
      alignas(64) Counter packed;
      alignas(64) Counter done;
    };
    Progress progress[2];  // of the waves that use buffer 0 and buffer 1
    pool.parallel_for(ceil_div(heads, heads_per_wave) * (packs + tasks), [&](int64_t index, int worker) {
      const int64_t wave = index / (packs + tasks), in_wave = index % (packs + tasks);
      const int64_t first_head = wave * heads_per_wave, turn = wave / 2;  // of the wave's buffer
      auto& [packed, done] = progress[wave % 2];
      if (in_wave < packs) {
        const int64_t head = first_head + in_wave / packs_per_head;
        done.wait_for(turn * tasks);
        if (tasks == 0) packed.wait_for(turn * packs);  // of no keys: packing is all that uses the buffer
        if (head < heads) pack(head, in_wave % packs_per_head, worker);
        packed.add_one();
        return;
      }
      const int64_t i = in_wave - packs, number = wave * tasks + i;
      packed.wait_for((turn + 1) * packs);
      if (order == Order::by_head) {
        task(first_head + i / tasks_per_head, i % tasks_per_head, number, worker);
      } else {
        task(first_head + i % heads_per_wave, i / heads_per_wave, number, worker);
      }
      done.add_one();
    });
  }
};

}  // namespace opst::attention

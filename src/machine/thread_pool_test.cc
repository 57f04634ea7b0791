#include "machine/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/sanitizers.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace opst {
namespace {

int threads_of_this_process() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) ++count;
  return count;
}

// Holds everybody until `expected` threads have come: proves that they run at the same time.
class Meeting {
 public:
  explicit Meeting(int expected) : expected_(expected) {}
  void wait() {
    arrived_.fetch_add(1);
    while (arrived_.load() < expected_) std::this_thread::yield();
  }

 private:
  const int expected_;
  std::atomic<int> arrived_{0};
};

// All of the pool's threads take part in one region.
void use_all_threads(ThreadPool& pool) {
  Meeting meeting(pool.num_threads());
  pool.parallel_for(pool.num_threads(), [&](int64_t, int) { meeting.wait(); });
}

// Whether another thread of this process may use these cores, and no others.
bool another_thread_is_bound_to(const cpu_set_t& cores) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    const int thread = std::stoi(entry.path().filename().string());
    cpu_set_t its;
    if (thread != static_cast<int>(syscall(SYS_gettid)) && sched_getaffinity(thread, sizeof(its), &its) == 0 &&
        CPU_EQUAL(&its, &cores)) {
      return true;
    }
  }
  return false;
}

TEST(ThreadPool, ForEachTakesEveryIndexOnceWhateverATaskHolds) {
  ThreadPool pool(2);
  for (const int64_t count : {0, 1, 7, 8, 9}) {
    for (const int64_t per_task : {1, 4, 100}) {
      std::vector<std::atomic<int>> seen(static_cast<size_t>(count));
      pool.for_each(count, per_task, [&](int64_t i, int) { seen[static_cast<size_t>(i)].fetch_add(1); });
      for (const auto& times : seen) EXPECT_EQ(times.load(), 1);
    }
  }
}

TEST(ThreadPool, RunsEveryTaskOnce) {
  for (int num_threads : {1, 2, 3, 5, 8}) {
    ThreadPool pool(num_threads);
    EXPECT_EQ(pool.num_threads(), num_threads);
    for (int64_t num_tasks : {0, 1, 2, 3, 7, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(num_tasks));
      std::vector<std::atomic<bool>> at_work(static_cast<size_t>(num_threads));
      std::vector<int64_t> last(static_cast<size_t>(num_threads), -1);
      pool.parallel_for(num_tasks, [&](int64_t task, int worker) {
        ASSERT_TRUE(worker >= 0 && worker < num_threads) << worker;
        EXPECT_FALSE(at_work[static_cast<size_t>(worker)].exchange(true)) << "two tasks at once as worker " << worker;
        EXPECT_LT(last[static_cast<size_t>(worker)], task) << "not in ascending order";
        last[static_cast<size_t>(worker)] = task;
        runs[static_cast<size_t>(task)].fetch_add(1);
        at_work[static_cast<size_t>(worker)].store(false);
      });
      for (auto& count : runs) EXPECT_EQ(count.load(), 1);
    }
  }
}

TEST(ThreadPool, WorkersAreWokenAwayFromTheCallerAndThenRunAnywhere) {
  cpu_set_t all;
  ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
  if (CPU_COUNT(&all) < 2) GTEST_SKIP() << "one core";
  ThreadPool pool(2);
  use_all_threads(pool);
  // From here on the caller stays where it is.
  const int core = sched_getcpu();
  cpu_set_t here, elsewhere = all;
  CPU_ZERO(&here);
  CPU_SET(core, &here);
  CPU_CLR(core, &elsewhere);
  ASSERT_EQ(sched_setaffinity(0, sizeof(here), &here), 0);
  for (int i = 0; i < 3; ++i) {
    use_all_threads(pool);
    const auto asleep = [&] { return another_thread_is_bound_to(elsewhere); };
    for (int wait = 0; wait < 5000 && !asleep(); ++wait) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ASSERT_TRUE(asleep());  // the worker has spun, and sleeps
    Meeting meeting(2);
    pool.parallel_for(2, [&](int64_t, int worker) {
      meeting.wait();
      if (worker == 0) return;
      cpu_set_t mine;
      EXPECT_EQ(sched_getaffinity(0, sizeof(mine), &mine), 0);
      EXPECT_TRUE(CPU_EQUAL(&mine, &all));
    });
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof(all), &all), 0);
}

TEST(ThreadPool, ClampsItsSize) {
  EXPECT_EQ(ThreadPool(0).num_threads(), 1);
  EXPECT_EQ(ThreadPool(-4).num_threads(), 1);
  EXPECT_EQ(ThreadPool(1 << 20).num_threads(), kMaxThreads);
}

TEST(ThreadPool, StartsThreadsOnlyWhenNeeded) {
  const int before = threads_of_this_process();
  ThreadPool one(1);
  ThreadPool four(4);
  one.parallel_for(100, [](int64_t, int) {});
  four.parallel_for(0, [](int64_t, int) {});
  four.parallel_for(1, [](int64_t, int worker) { EXPECT_EQ(worker, 0); });
  EXPECT_EQ(threads_of_this_process(), before);
  four.parallel_for(2, [](int64_t, int) {});
  EXPECT_EQ(threads_of_this_process(), before + 3);
}

TEST(ThreadPool, UsesAllThreadsAtOnce) {
  for (int num_threads : {2, 3, 5, 16}) {
    ThreadPool pool(num_threads);
    for (int i = 0; i < 20; ++i) use_all_threads(pool);
  }
}

TEST(ThreadPool, ManyShortRegions) {
  for (int num_threads : {2, 3, 16}) {
    ThreadPool pool(num_threads);
    std::atomic<int64_t> sum{0};
    int64_t expected = 0;
    for (int region = 0; region < 3000; ++region) {
      const int64_t num_tasks = region % 7;
      expected += num_tasks * (num_tasks - 1) / 2;
      pool.parallel_for(num_tasks, [&](int64_t task, int) { sum.fetch_add(task); });
      if (region % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the workers fall asleep
    }
    EXPECT_EQ(sum.load(), expected);
  }
}

// Whatever is wished for, also memory that is not there: it changes nothing, and the region after it is not kept
// waiting.
TEST(ThreadPool, WishesToReadAheadChangeNothing) {
  std::vector<char> memory(size_t{1} << 20, 'x');
  for (int num_threads : {1, 2, 5}) {
    ThreadPool pool(num_threads);
    std::atomic<int64_t> sum{0};
    for (int region = 0; region < 300; ++region) {
      if (region % 4 == 0) pool.read_ahead(nullptr, 4096, int64_t{1} << 40);
      if (region % 4 == 1) pool.read_ahead(memory.data(), 1 << 16, 1 << 16);
      if (region % 4 == 2) pool.read_ahead(memory.data(), 0, 0);
      pool.parallel_for(10, [&](int64_t task, int) {
        if (task == 5) pool.read_ahead(memory.data(), 64, 1000);
        sum.fetch_add(task);
      });
    }
    EXPECT_EQ(sum.load(), 300 * 45);
  }
  EXPECT_EQ(memory, std::vector<char>(memory.size(), 'x'));
}

TEST(ThreadPool, WorkOfARegionIsVisibleAfterIt) {
  ThreadPool pool(3);
  std::vector<int64_t> values(1000);
  for (int64_t round = 1; round <= 200; ++round) {
    pool.parallel_for(1000, [&](int64_t task, int) { values[static_cast<size_t>(task)] += round; });
    for (int64_t value : values) ASSERT_EQ(value, round * (round + 1) / 2);
  }
}

TEST(ThreadPool, NestedRegionsRunOnTheirWorker) {
  ThreadPool pool(4);
  ThreadPool other(3);
  std::atomic<int> inner_tasks{0};
  use_all_threads(other);  // its workers are awake and would gladly help
  Meeting meeting(4);
  pool.parallel_for(4, [&](int64_t, int worker) {
    meeting.wait();
    const auto self = std::this_thread::get_id();
    int64_t next = 0;
    pool.parallel_for(10, [&](int64_t task, int inner_worker) {
      EXPECT_EQ(std::this_thread::get_id(), self);
      EXPECT_EQ(inner_worker, worker);
      EXPECT_EQ(task, next++);
      inner_tasks.fetch_add(1);
    });
    // Another pool may have fewer workers, for which this worker's index would be too large.
    other.parallel_for(10, [&](int64_t, int inner_worker) {
      EXPECT_EQ(std::this_thread::get_id(), self);
      EXPECT_EQ(inner_worker, 0);
      usleep(200);
      pool.parallel_for(2, [&](int64_t, int) { inner_tasks.fetch_add(1); });
    });
  });
  EXPECT_EQ(inner_tasks.load(), 4 * 10 + 4 * 10 * 2);
  use_all_threads(pool);  // and afterwards regions are parallel again
}

TEST(ThreadPool, ConcurrentCallers) {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int region = 0; region < 500; ++region) {
        std::vector<int> runs(20);  // a lost or doubled task shows, and TSan sees any exchange between regions
        std::vector<std::atomic<bool>> at_work(3);
        pool.parallel_for(20, [&](int64_t task, int worker) {
          if (at_work[static_cast<size_t>(worker)].exchange(true)) wrong.fetch_add(1);
          runs[static_cast<size_t>(task)] += 1;
          at_work[static_cast<size_t>(worker)].store(false);
        });
        for (int count : runs) wrong.fetch_add(count != 1);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong.load(), 0);
}

// A worker that the system does not run must not hold a region up. Here it sits in a signal handler instead.
std::atomic<bool> held{false};
std::atomic<bool> may_go{false};

TEST(ThreadPool, WaitsForNobodyWhoDidNotEnter) {
  if (kThreadSanitizer) GTEST_SKIP() << "TSan runs the handler later, where the worker may have entered already";
  held.store(false), may_go.store(false);
  ThreadPool pool(2);
  Meeting meeting(2);
  std::atomic<pid_t> worker_thread{0};
  pool.parallel_for(2, [&](int64_t, int worker) {
    if (worker == 1) worker_thread.store(static_cast<pid_t>(syscall(SYS_gettid)));
    meeting.wait();
  });
  struct sigaction hold = {};
  struct sigaction before = {};
  hold.sa_handler = [](int) {
    held.store(true);
    while (!may_go.load()) usleep(1000);
  };
  ASSERT_EQ(sigaction(SIGTRAP, &hold, &before), 0);  // the one signal without a meaning that workers do not block
  ASSERT_EQ(syscall(SYS_tgkill, getpid(), worker_thread.load(), SIGTRAP), 0);
  while (!held.load()) usleep(1000);

  std::atomic<bool> finished{false};
  std::thread watchdog([&] {  // ends the hold, so that a failure is a failure and not a hang
    for (int i = 0; i < 20000 && !finished.load(); ++i) usleep(1000);
    may_go.store(true);
  });
  for (int region = 0; region < 100; ++region) {
    int64_t sum = 0;
    pool.parallel_for(10, [&](int64_t task, int worker) {
      EXPECT_EQ(worker, 0);
      sum += task;
    });
    EXPECT_EQ(sum, 45);
  }
  EXPECT_FALSE(may_go.load()) << "a region ended only when the worker could run";
  finished.store(true);
  watchdog.join();
  sigaction(SIGTRAP, &before, nullptr);
  use_all_threads(pool);  // the worker is back
}

TEST(ThreadPool, WorkersLeaveSignalsToTheApplication) {
  ThreadPool pool(2);
  Meeting meeting(2);
  pool.parallel_for(2, [&](int64_t, int worker) {
    meeting.wait();
    if (worker == 0) return;
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    for (int signal : {SIGINT, SIGTERM, SIGUSR1, SIGCHLD, SIGALRM}) EXPECT_EQ(sigismember(&blocked, signal), 1);
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE}) EXPECT_EQ(sigismember(&blocked, signal), 0);
  });
}

#if defined(__x86_64__)
// Flush-to-zero, denormals-are-zero and the rounding mode of a caller must not reach any task.
TEST(ThreadPool, CallersFloatControlDoesNotReachTasks) {
  const unsigned before = _mm_getcsr();
  constexpr unsigned kFlush = 0x9fc0 | 0x2000;  // FTZ, DAZ, round down
  for (int num_threads : {1, 2, 4}) {
    ThreadPool pool(num_threads);
    std::vector<float> plain(64);
    std::vector<float> flushed(64);
    std::vector<float> nested[2] = {std::vector<float>(64), std::vector<float>(64)};
    const auto work = [](std::vector<float>& out) {
      return [&out](int64_t task, int) {
        volatile float tiny = 1e-39f;
        EXPECT_EQ(_mm_getcsr() & 0xffc0u, 0x1f80u);
        out[static_cast<size_t>(task)] = tiny * static_cast<float>(task) / 3.0f;
      };
    };
    pool.parallel_for(64, work(plain));
    _mm_setcsr(kFlush);
    pool.parallel_for(64, work(flushed));
    pool.parallel_for(1, work(flushed));
    pool.parallel_for(2, [&](int64_t task, int) { pool.parallel_for(64, work(nested[task])); });
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    EXPECT_EQ(after, kFlush);
    EXPECT_EQ(plain, flushed);
    EXPECT_EQ(plain, nested[0]);
    EXPECT_EQ(plain, nested[1]);
    EXPECT_GT(plain[1], 0.0f);
  }
}

TEST(ThreadPool, WhatATaskLeavesBehindEndsWithItsRegion) {
  ThreadPool pool(2);
  const unsigned before = _mm_getcsr();
  for (int round = 0; round < 3; ++round) {
    Meeting meeting(2);
    pool.parallel_for(2, [&](int64_t, int) {
      EXPECT_EQ(_mm_getcsr() & 0xffc0u, 0x1f80u);
      meeting.wait();
      _mm_setcsr(0x9fc0);
    });
  }
  EXPECT_EQ(_mm_getcsr() & 0xffc0u, before & 0xffc0u);
}
#endif

TEST(ThreadPool, EndsWhileWorkersSpinOrSleep) {
  const int before = threads_of_this_process();
  for (int round = 0; round < 50; ++round) {
    ThreadPool pool(4);
    use_all_threads(pool);
    if (round % 10 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_EQ(threads_of_this_process(), before);
}

// The child's part runs in a forked process, which must end with code 0. A hang ends by SIGALRM.
void in_child(const std::function<bool()>& child) {
  const pid_t pid = fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    alarm(60);
    _exit(child() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

bool works_in_parallel(ThreadPool& pool) {
  use_all_threads(pool);  // hangs where workers are missing
  std::atomic<int64_t> sum{0};
  for (int i = 0; i < 100; ++i) pool.parallel_for(10, [&](int64_t task, int) { sum.fetch_add(task); });
  return sum.load() == 4500;
}

class ThreadPoolFork : public testing::Test {
  void SetUp() override {
    if (kThreadSanitizer) GTEST_SKIP() << "TSan does not support threads in a forked child";
  }
};

TEST_F(ThreadPoolFork, ChildOfAPoolInUse) {
  ThreadPool pool(4);
  use_all_threads(pool);  // the workers are still spinning when fork happens
  in_child([&] { return works_in_parallel(pool); });
  EXPECT_TRUE(works_in_parallel(pool));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));  // now they sleep
  in_child([&] { return works_in_parallel(pool); });
  EXPECT_TRUE(works_in_parallel(pool));
}

TEST_F(ThreadPoolFork, ChildOfAPoolThatNeverRan) {
  ThreadPool pool(4);
  in_child([&] { return works_in_parallel(pool); });
  EXPECT_TRUE(works_in_parallel(pool));
}

TEST_F(ThreadPoolFork, Grandchild) {
  ThreadPool pool(3);
  use_all_threads(pool);
  in_child([&] {
    if (!works_in_parallel(pool)) return false;
    in_child([&] { return works_in_parallel(pool); });
    return works_in_parallel(pool) && !testing::Test::HasFailure();
  });
}

TEST_F(ThreadPoolFork, ForkWhileAnotherThreadIsInsideARegion) {
  ThreadPool pool(3);
  const pid_t parent = getpid();
  std::atomic<bool> stop{false};
  std::atomic<bool> running{false};
  std::thread user([&] {
    while (!stop.load()) {
      pool.parallel_for(1000, [&](int64_t, int) {
        if (getpid() != parent) _exit(2);  // the child's workers took up what the parent's were doing
        running.store(true);
        if (!stop.load()) usleep(100);
      });
    }
  });
  while (!running.load()) std::this_thread::yield();
  for (int i = 0; i < 10; ++i) in_child([&] { return works_in_parallel(pool); });
  stop.store(true);
  user.join();
}

TEST_F(ThreadPoolFork, SeveralThreadsOfAChildCallAtOnce) {
  ThreadPool pool(3);
  use_all_threads(pool);
  in_child([&] {
    std::atomic<int64_t> sum{0};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
      callers.emplace_back([&] {
        for (int i = 0; i < 100; ++i) pool.parallel_for(10, [&](int64_t task, int) { sum.fetch_add(task); });
      });
    }
    for (std::thread& caller : callers) caller.join();
    return sum.load() == 4 * 4500 && works_in_parallel(pool);
  });
}

TEST_F(ThreadPoolFork, PoolsEndInTheChild) {
  auto used = std::make_unique<ThreadPool>(4);
  auto unused = std::make_unique<ThreadPool>(4);
  use_all_threads(*used);
  in_child([&] {
    used.reset();
    unused.reset();
    return true;
  });
  in_child([&] {
    const bool ok = works_in_parallel(*used);
    used.reset();
    return ok && threads_of_this_process() == 1;
  });
  EXPECT_TRUE(works_in_parallel(*used));
}

}  // namespace
}  // namespace opst

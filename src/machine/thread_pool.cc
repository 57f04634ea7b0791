#include "machine/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <vector>

#include "machine/cpu.h"

namespace opst {
namespace {

// Longer than the serial stretches between the regions of a decoded token, short enough to leave a shared core alone.
constexpr auto kIdleSpin = std::chrono::microseconds(40);
// The caller sleeps after this long, so that a worker which lost its core to somebody else can take the caller's.
constexpr auto kJoinSpin = std::chrono::microseconds(40);

// The gate: one word on which everybody agrees, and the futex on which idle workers and a waiting caller sleep.
//   bits  0..11   count of workers inside the region
//   bits 12..14   flags
//   bits 16..31   index of the region, modulo 2^16
using Gate = uint32_t;
constexpr Gate kCountMask = 0xfff;
constexpr Gate kOpen = 1u << 12;         // workers may enter
constexpr Gate kCallerWaits = 1u << 13;  // the last worker to leave wakes the caller
constexpr Gate kStop = 1u << 14;         // workers end
constexpr Gate kRegion = 1u << 16;
constexpr Gate kRegionMask = ~(kRegion - 1);
static_assert(kMaxThreads <= static_cast<int>(kCountMask));

// Whom a wake-up on the gate is for.
constexpr uint32_t kWorkers = 1;
constexpr uint32_t kCaller = 2;

void futex_wait(const std::atomic<Gate>& word, Gate expected, uint32_t whom) {
  syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, expected, nullptr, nullptr, whom);
}
void futex_wake(const std::atomic<Gate>& word, int64_t count, uint32_t whom) {
  syscall(SYS_futex, &word, FUTEX_WAKE_BITSET_PRIVATE, static_cast<int>(count), nullptr, nullptr, whom);
}

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Rounding, flush-to-zero and exception masks at their defaults for a scope, then as they were. Results must not depend
// on the mode that a caller happens to run in, nor differ between its thread and the workers.
class DefaultFloatControl {
 public:
#if defined(__x86_64__)
  DefaultFloatControl() { __builtin_ia32_ldmxcsr(0x1f80); }  // exceptions masked, nearest, no flush to zero
  ~DefaultFloatControl() { __builtin_ia32_ldmxcsr(saved_); }

 private:
  const unsigned saved_ = __builtin_ia32_stmxcsr();
#else
  DefaultFloatControl() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatControl() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
#endif
  DefaultFloatControl(const DefaultFloatControl&) = delete;
  DefaultFloatControl& operator=(const DefaultFloatControl&) = delete;
};

// Spins until `done()` or until the time is up; returns the last done(). Where threads outnumber cores a spinning
// thread is in the way of a working one, so there it offers its core at each turn.
template <class Done>
bool spin_until(std::chrono::nanoseconds limit, bool crowded, const Done& done) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < (crowded ? 1 : 16); ++i) {
      if (done()) return true;
      if (!crowded) pause_cpu();
    }
    if (crowded) sched_yield();
  } while (std::chrono::steady_clock::now() < deadline);
  return done();
}

// Keeps a thread that goes to sleep from being woken on the core of the thread that will wake it. There it would wait
// for the scheduler to move it, for milliseconds, while other cores idle: kernels avoid waking cores that sleep deeply,
// virtual ones above all. Once awake it may run anywhere, as before.
class WakeElsewhere {
 public:
  explicit WakeElsewhere(int core) {
    if (core < 0 || core >= CPU_SETSIZE || sched_getaffinity(0, sizeof(before_), &before_) != 0) return;
    elsewhere_ = before_;
    CPU_CLR(core, &elsewhere_);
    if (CPU_COUNT(&elsewhere_) == 0 || CPU_EQUAL(&elsewhere_, &before_)) return;
    changed_ = sched_setaffinity(0, sizeof(elsewhere_), &elsewhere_) == 0;
  }
  ~WakeElsewhere() {
    cpu_set_t now;  // not what this object set: somebody else did meanwhile
    if (!changed_ || sched_getaffinity(0, sizeof(now), &now) != 0 || !CPU_EQUAL(&now, &elsewhere_)) return;
    sched_setaffinity(0, sizeof(before_), &before_);
  }
  WakeElsewhere(const WakeElsewhere&) = delete;
  WakeElsewhere& operator=(const WakeElsewhere&) = delete;

 private:
  cpu_set_t before_, elsewhere_;
  bool changed_ = false;
};

// What this thread is doing: set while it runs tasks.
struct CurrentTask {
  const void* pool = nullptr;
  int worker = 0;
};
thread_local CurrentTask current_task;

}  // namespace

struct ThreadPool::Impl {
  explicit Impl(int threads)
      : num_threads(std::clamp(threads, 1, kMaxThreads)), crowded(num_threads > available_cores()) {
    workers.reserve(static_cast<size_t>(num_threads - 1));
  }

  const int num_threads;
  const bool crowded;  // more threads than cores
  std::vector<pthread_t> workers;

  // The process whose threads `workers` are: its pid, or minus that while they are being started; 0 before the first
  // region. A forked child finds another process's pid here.
  std::atomic<int64_t> process{0};
  std::atomic<bool> busy{false};  // somebody's region has the workers
  std::atomic<int> next_worker{1};

  alignas(64) std::atomic<Gate> gate{0};
  std::atomic<int> sleepers{0};
  std::atomic<int> caller_core{-1};  // where the last caller ran

  // The region. Written while the gate is shut and nobody is inside, read after entering.
  alignas(64) TaskFunction function = nullptr;
  const void* closure = nullptr;
  int64_t num_tasks = 0;
  alignas(64) std::atomic<int64_t> next_task{0};

  // What the next region will read. A torn wish costs time at most: fetching an address never faults.
  struct Wish {
    std::atomic<int64_t> number{0};
    std::atomic<const char*> data{nullptr};
    std::atomic<int64_t> stride{0}, bytes{0};
  };
  alignas(64) Wish wish;
  struct Fetched {  // of a wish, by one worker
    int64_t number = 0, bytes = 0;
  };

  // Takes the workers for one region, starting them if this process has none. False where somebody else has them.
  bool acquire() {
    const int64_t pid = getpid();
    int64_t known = process.load(std::memory_order_acquire);
    if (known == pid) return !busy.exchange(true, std::memory_order_acquire);
    if (known == -pid || !process.compare_exchange_strong(known, -pid, std::memory_order_acquire)) return false;
    // Nobody else in this process touches the state now. In a forked child it may have been copied from the midst of a
    // region, and the threads it speaks of exist only in the parent.
    busy.store(true, std::memory_order_relaxed);
    gate.store(0, std::memory_order_relaxed);
    sleepers.store(0, std::memory_order_relaxed);
    start_workers();
    process.store(pid, std::memory_order_release);
    return true;
  }
  void release() { busy.store(false, std::memory_order_release); }

  void start_workers() {
    next_worker.store(1, std::memory_order_relaxed);
    workers.clear();
    // Signals belong to the application's threads; faults stay deliverable.
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    const auto main_of_worker = [](void* impl) -> void* {
      auto* const self = static_cast<Impl*>(impl);
      self->worker_loop(self->next_worker.fetch_add(1, std::memory_order_relaxed));
      return nullptr;
    };
    for (int i = 1; i < num_threads; ++i) {
      pthread_t thread;
      if (pthread_create(&thread, nullptr, main_of_worker, this) != 0) break;  // fewer workers do the same work
      workers.push_back(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void work(int worker) {
    while (true) {
      const int64_t task = next_task.fetch_add(1, std::memory_order_relaxed);
      if (task >= num_tasks) return;
      function(closure, task, worker);
    }
  }

  // Fetches from where this worker stopped last, until the gate has news.
  template <class News>
  void read_ahead(int worker, Fetched& fetched, const News& news) const {
    constexpr int64_t kLine = 64, kLines = 4;
    const int64_t number = wish.number.load(std::memory_order_acquire);
    if (fetched.number != number) fetched = {number, 0};
    const int64_t bytes = wish.bytes.load(std::memory_order_relaxed);
    if (fetched.bytes >= bytes) return;
    const char* const data =
        wish.data.load(std::memory_order_relaxed) + worker * wish.stride.load(std::memory_order_relaxed);
    while (fetched.bytes < bytes && !news()) {
      for (int64_t i = 0; i < kLines; ++i) __builtin_prefetch(data + fetched.bytes + i * kLine);
      fetched.bytes += kLines * kLine;
    }
  }

  void worker_loop(int worker) {
    current_task = {this, worker};
    Fetched fetched;
    Gate seen_region = 0;
    const auto news = [&](Gate g) {
      return (g & kStop) != 0 || ((g & kOpen) != 0 && (g & kRegionMask) != seen_region);
    };
    while (true) {
      Gate g = gate.load(std::memory_order_acquire);
      const auto any_news = [&] { return news(g = gate.load(std::memory_order_acquire)); };
      if (!news(g)) {
        read_ahead(worker, fetched, any_news);
        if (!spin_until(kIdleSpin, crowded, any_news)) {
          // Announced before the futex looks at the gate; the caller opens the gate before it looks for sleepers.
          sleepers.fetch_add(1, std::memory_order_seq_cst);
          g = gate.load(std::memory_order_seq_cst);
          if (!news(g)) {
            const WakeElsewhere elsewhere(crowded ? -1 : caller_core.load(std::memory_order_relaxed));
            futex_wait(gate, g, kWorkers);
          }
          sleepers.fetch_sub(1, std::memory_order_relaxed);
          // A short region may be over before its worker is awake. The next one is near then: it waits for that awake.
          continue;
        }
      }
      if ((g & kStop) != 0) return;
      if (!gate.compare_exchange_strong(g, g + 1, std::memory_order_acquire)) continue;
      seen_region = g & kRegionMask;
      {
        const DefaultFloatControl float_control;
        work(worker);
      }
      const Gate left = gate.fetch_sub(1, std::memory_order_acq_rel) - 1;
      if ((left & kCallerWaits) != 0 && (left & kCountMask) == 0) futex_wake(gate, 1, kCaller);
    }
  }

  void run_region(int64_t tasks, TaskFunction task_function, const void* task_closure) {
    function = task_function;
    closure = task_closure;
    num_tasks = tasks;
    next_task.store(0, std::memory_order_relaxed);
    caller_core.store(sched_getcpu(), std::memory_order_relaxed);
    const Gate region = (gate.load(std::memory_order_relaxed) & kRegionMask) + kRegion;
    gate.store(region | kOpen, std::memory_order_seq_cst);
    if (const int asleep = sleepers.load(std::memory_order_seq_cst); asleep > 0) {
      futex_wake(gate, std::min<int64_t>(asleep, tasks - 1), kWorkers);
    }

    work(0);

    // Whoever is not inside by now stays outside.
    Gate g = gate.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    const auto alone = [&] { return ((g = gate.load(std::memory_order_acquire)) & kCountMask) == 0; };
    if ((g & kCountMask) == 0 || spin_until(kJoinSpin, crowded, alone)) return;
    g = gate.fetch_or(kCallerWaits, std::memory_order_acq_rel) | kCallerWaits;
    while ((g & kCountMask) != 0) {
      futex_wait(gate, g, kCaller);
      g = gate.load(std::memory_order_acquire);
    }
  }
};

ThreadPool::ThreadPool(int num_threads) : impl_(std::make_unique<Impl>(num_threads)) {}

ThreadPool::~ThreadPool() {
  if (impl_->process.load(std::memory_order_acquire) != getpid()) return;  // no workers, or they are another process's
  impl_->gate.fetch_or(kStop, std::memory_order_seq_cst);
  futex_wake(impl_->gate, kMaxThreads, kWorkers);
  for (pthread_t worker : impl_->workers) pthread_join(worker, nullptr);
}

void ThreadPool::read_ahead(const void* data, int64_t stride, int64_t bytes) {
  impl_->wish.data.store(static_cast<const char*>(data), std::memory_order_relaxed);
  impl_->wish.stride.store(stride, std::memory_order_relaxed);
  impl_->wish.bytes.store(bytes, std::memory_order_relaxed);
  impl_->wish.number.fetch_add(1, std::memory_order_release);
}

int ThreadPool::num_threads() const { return impl_->num_threads; }

void ThreadPool::run(int64_t num_tasks, TaskFunction function, const void* closure) {
  const DefaultFloatControl float_control;
  const CurrentTask outer = current_task;
  const bool nested = outer.pool != nullptr;
  if (num_tasks > 1 && impl_->num_threads > 1 && !nested && impl_->acquire()) {
    current_task = {impl_.get(), 0};
    impl_->run_region(num_tasks, function, closure);
    impl_->release();
  } else {
    // A task of this pool keeps its worker index, which no other thread in the region has.
    const int worker = outer.pool == impl_.get() ? outer.worker : 0;
    current_task = {impl_.get(), worker};
    for (int64_t task = 0; task < num_tasks; ++task) function(closure, task, worker);
  }
  current_task = outer;
}

}  // namespace opst

// What a region costs.
//
//   BM_region      tasks of a fixed amount of work; `ideal_us` is the work over the threads that can share it
//   BM_contended   the same while another process spins; `ratio` is the median over the quiet median just before it.
//                  The single-thread row beside it shows what the other process takes from any program.
#include <benchmark/benchmark.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "machine/thread_pool.h"
#include "testing/peak.h"

namespace opst {
namespace {

using Clock = std::chrono::steady_clock;

double microseconds(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double, std::micro>(end - start).count();
}

// A chain of multiplications: the same work wherever it runs, no memory.
void work(int64_t steps) {
  double x = 1;
  for (int64_t i = 0; i < steps; ++i) x = x * 1.0000001 + 1e-9;
  benchmark::DoNotOptimize(x);
}

int64_t steps_per_microsecond() {
  static const int64_t steps = [] {
    double best = 1e9;
    for (int i = 0; i < 200; ++i) {
      const auto start = Clock::now();
      work(10000);
      best = std::min(best, microseconds(start, Clock::now()));
    }
    return static_cast<int64_t>(10000 / best);
  }();
  return steps;
}

struct Region {
  int num_threads;
  int64_t num_tasks;
  int64_t task_us;

  double ideal_us() const {
    const int64_t rounds = (num_tasks + num_threads - 1) / num_threads;
    return static_cast<double>(rounds * task_us);
  }
};

Region region_of(const benchmark::State& state) {
  return {static_cast<int>(state.range(0)), state.range(1), state.range(2)};
}

std::vector<double> run(ThreadPool& pool, const Region& region, double seconds) {
  const int64_t steps = region.task_us * steps_per_microsecond();
  std::vector<double> times;
  const auto begin = Clock::now();
  while (microseconds(begin, Clock::now()) < seconds * 1e6) {
    const auto start = Clock::now();
    pool.parallel_for(region.num_tasks, [steps](int64_t, int) { work(steps); });
    times.push_back(microseconds(start, Clock::now()));
  }
  return times;
}

void BM_region(benchmark::State& state) {
  const Region region = region_of(state);
  ThreadPool pool(region.num_threads);
  const int64_t steps = region.task_us * steps_per_microsecond();
  std::vector<double> times;
  for (auto _ : state) {
    const auto start = Clock::now();
    pool.parallel_for(region.num_tasks, [steps](int64_t, int) { work(steps); });
    times.push_back(microseconds(start, Clock::now()));
  }
  state.counters["ideal_us"] = region.ideal_us();
  state.counters["p10_us"] = test::quantile(times, 0.1);
  state.counters["median_us"] = test::quantile(times, 0.5);
  state.counters["p90_us"] = test::quantile(times, 0.9);
}
BENCHMARK(BM_region)
    ->ArgNames({"threads", "tasks", "task_us"})
    ->Args({1, 2, 10})
    ->Args({2, 2, 0})
    ->Args({2, 2, 10})
    ->Args({2, 16, 10})
    ->Args({2, 100, 20})
    ->Args({5, 5, 10})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

// A child process that spins until its scope ends.
class Spinner {
 public:
  Spinner() : pid_(fork()) {
    if (pid_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int64_t i = 0;; ++i) benchmark::DoNotOptimize(i);
  }
  ~Spinner() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

 private:
  pid_t pid_;
};

void BM_contended(benchmark::State& state) {
  const Region region = region_of(state);
  ThreadPool pool(region.num_threads);
  run(pool, region, 0.02);
  const std::vector<double> quiet = run(pool, region, 0.5);
  std::vector<double> contended;
  for (auto _ : state) {
    const Spinner spinner;
    usleep(50000);  // the scheduler has placed it
    contended = run(pool, region, 1.5);
  }
  const auto mean = [](const std::vector<double>& times) {
    double sum = 0;
    for (double t : times) sum += t;
    return sum / static_cast<double>(times.size());
  };
  state.counters["quiet_us"] = test::quantile(quiet, 0.5);
  state.counters["contended_us"] = test::quantile(contended, 0.5);
  state.counters["ratio"] = test::quantile(contended, 0.5) / test::quantile(quiet, 0.5);
  state.counters["mean_ratio"] = mean(contended) / mean(quiet);
}
BENCHMARK(BM_contended)
    ->ArgNames({"threads", "tasks", "task_us"})
    ->ArgsProduct({{2, 1}, {2}, {10}})
    ->ArgsProduct({{2, 1}, {16}, {10}})
    ->ArgsProduct({{2, 1}, {100}, {20}})
    ->ArgsProduct({{2, 1}, {200}, {100}})
    ->Iterations(1)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace opst

BENCHMARK_MAIN();

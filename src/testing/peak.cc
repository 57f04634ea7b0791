#include "testing/peak.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <mutex>

#include "core/convert.h"
#include "core/int_math.h"
#include "machine/context_impl.h"
#include "machine/levels.h"
#include "testing/peak_kernels.h"
#include "testing/random.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_ALL_LEVELS, test, PeakKernels, kPeakKernels, peak_kernels)

}  // namespace opst

namespace opst::test {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

struct alignas(64) Operands {
  unsigned char bytes[kPeakBytes];
};

// Normal f32 and bf16, and bytes such that no sequence of 8- or 16-bit products saturates.
Operands make_operands(PeakKind kind) {
  Operands operands;
  Random random(1);
  for (int i = 0; i < kPeakBytes;) {
    if (kind == PeakKind::f32) {
      const float value = static_cast<float>(random.normal());
      std::memcpy(operands.bytes + i, &value, sizeof value);
      i += static_cast<int>(sizeof value);
    } else if (kind == PeakKind::bf16) {
      const bf16 value = to_bf16(random.normal());
      std::memcpy(operands.bytes + i, &value, sizeof value);
      i += static_cast<int>(sizeof value);
    } else {
      operands.bytes[i++] = static_cast<unsigned char>(std::clamp(random.normal() * 32, -127.0, 127.0));
    }
  }
  return operands;
}

const Operands& operands_for(PeakKind kind) {
  static const std::array<Operands, 3> all = {make_operands(PeakKind::f32), make_operands(PeakKind::bf16),
                                              make_operands(PeakKind::i8)};
  return all[static_cast<size_t>(kind)];
}

// A burst with its operands and how fast one thread runs it.
struct ReadyBurst {
  PeakBurst burst;
  const Operands* operands = nullptr;
  double seconds_per_iteration = 0;
};

double seconds_per_iteration(const PeakBurst& burst, const Operands& operands) {
  alignas(64) char sink[64];
  double best = HUGE_VAL;
  for (int64_t iterations = 16; iterations <= 4096; iterations *= 2) {
    // The fastest of three: one may have waited for the core.
    double seconds = HUGE_VAL;
    for (int repeat = 0; repeat < 3; ++repeat) {
      const auto start = Clock::now();
      burst.run(iterations, operands.bytes, sink);
      seconds = std::min(seconds, seconds_between(start, Clock::now()));
    }
    if (seconds > 10e-6) best = std::min(best, seconds / static_cast<double>(iterations));
    if (seconds > 200e-6) return best;
  }
  return best;
}

ReadyBurst prepare(Isa isa, PeakKind kind) {
  const PeakKernels& level = peak_kernels(isa);
  const auto ready = [](const PeakBurst& burst, PeakKind operands_kind) {
    const Operands& operands = operands_for(operands_kind);
    return ReadyBurst{burst, &operands, seconds_per_iteration(burst, operands)};
  };
  const ReadyBurst f32 = ready(level.f32, PeakKind::f32);
  if (kind == PeakKind::i8 && level.i8.run != nullptr) return ready(level.i8, PeakKind::i8);
  if (kind != PeakKind::bf16 || level.bf16_dot.run == nullptr) return f32;
  const ReadyBurst dot = ready(level.bf16_dot, PeakKind::bf16);
  const auto rate = [](const ReadyBurst& r) { return r.burst.flops_per_iteration / r.seconds_per_iteration; };
  return rate(dot) > rate(f32) ? dot : f32;
}

const ReadyBurst& ready_burst(Isa isa, PeakKind kind) {
  static std::mutex mutex;
  static std::array<std::array<ReadyBurst, 3>, kNumIsaLevels> known;
  const std::lock_guard<std::mutex> lock(mutex);
  ReadyBurst& entry = known[static_cast<size_t>(isa)][static_cast<size_t>(kind)];
  if (entry.operands == nullptr) entry = prepare(isa, kind);
  return entry;
}

// Runs `work(thread)` once on each of the context's threads, all at once. Seconds from the first start to the last end.
template <class Work>
double run_together(const Context& context, const Work& work) {
  const int num_threads = context.num_threads();
  std::atomic<int> arrived{0};
  std::mutex mutex;
  Clock::time_point first_start = Clock::time_point::max();
  Clock::time_point last_end = Clock::time_point::min();
  context.impl().pool.parallel_for(num_threads, [&](int64_t thread, int) {
    // Each waits at the line, so that nobody takes two turns. A pool that lacks workers goes on after a while; the rate
    // it shows then is what it has.
    const auto patience = Clock::now() + std::chrono::seconds(1);
    arrived.fetch_add(1);
    while (arrived.load() < num_threads && Clock::now() < patience) {
    }
    const auto start = Clock::now();
    work(static_cast<int>(thread));
    const auto end = Clock::now();
    const std::lock_guard<std::mutex> lock(mutex);
    first_start = std::min(first_start, start);
    last_end = std::max(last_end, end);
  });
  return seconds_between(first_start, last_end);
}

}  // namespace

const char* to_string(PeakKind kind) {
  switch (kind) {
    case PeakKind::f32:
      return "f32";
    case PeakKind::bf16:
      return "bf16";
    case PeakKind::i8:
      return "i8";
  }
  return "unknown";
}

PeakKind peak_kind(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return PeakKind::bf16;
    case DType::i8:
    case DType::u8:
      return PeakKind::i8;
    default:
      return PeakKind::f32;
  }
}

Peak measure_peak(const Context& context, PeakKind kind, double seconds) {
  constexpr double kShortest = 20e-6;
  const ReadyBurst& ready = ready_burst(context.machine().isa, kind);
  const auto iterations = static_cast<int64_t>(std::ceil(std::max(seconds, kShortest) / ready.seconds_per_iteration));
  Peak peak;
  peak.seconds = run_together(context, [&](int) {
    alignas(64) char sink[64];
    ready.burst.run(iterations, ready.operands->bytes, sink);
  });
  peak.flops_per_second =
      ready.burst.flops_per_iteration * static_cast<double>(iterations) * context.num_threads() / peak.seconds;
  return peak;
}

double measure_read_bandwidth(const Context& context, const void* data, int64_t size_bytes, int64_t passes) {
  const auto read = peak_kernels(context.machine().isa).read;
  const int64_t part = round_up(ceil_div(size_bytes, context.num_threads()), 64);
  const double seconds = run_together(context, [&](int thread) {
    alignas(64) char sink[64];
    const int64_t begin = std::min(thread * part, size_bytes);
    const int64_t length = std::min(part, size_bytes - begin) / 64 * 64;
    for (int64_t i = 0; i < passes; ++i) read(static_cast<const char*>(data) + begin, length, sink);
  });
  return static_cast<double>(size_bytes) * static_cast<double>(passes) / seconds;
}

double measure_copy_seconds(const Context& context, const void* from, void* to, int64_t size_bytes) {
  const int64_t part = round_up(ceil_div(size_bytes, context.num_threads()), 64);
  return run_together(context, [&](int thread) {
    const int64_t begin = std::min(thread * part, size_bytes);
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                static_cast<size_t>(std::min(part, size_bytes - begin)));
  });
}

double measure_clock() {
  // A product of two 64-bit registers takes 3 cycles, the or 1, on every x86-64 core since 2008; each waits for the one
  // before.
  constexpr double kCyclesPerStep = 4;
  constexpr int kSteps = 25000;
  static std::atomic<uint64_t> seed{3};
  uint64_t x = seed.load(std::memory_order_relaxed);
  const auto start = Clock::now();
  for (int i = 0; i < kSteps; ++i) x *= x | 1;
  seed.store(x | 2, std::memory_order_relaxed);
  return kCyclesPerStep * kSteps / seconds_between(start, Clock::now());
}

double ideal_flops_per_cycle(const Context& context, PeakKind kind) {
  static std::mutex mutex;
  static std::array<std::array<double, 3>, kNumIsaLevels> known;
  const std::lock_guard<std::mutex> lock(mutex);
  double& ideal = known[static_cast<size_t>(context.machine().isa)][static_cast<size_t>(kind)];
  if (ideal > 0) return ideal;
  const ReadyBurst& ready = ready_burst(context.machine().isa, kind);
  double best_clock = 0;
  double best_rate = 0;
  for (int i = 0; i < 20; ++i) {
    best_clock = std::max(best_clock, measure_clock());
    alignas(64) char sink[64];
    const auto iterations = static_cast<int64_t>(std::ceil(50e-6 / ready.seconds_per_iteration));
    const auto start = Clock::now();
    ready.burst.run(iterations, ready.operands->bytes, sink);
    const double seconds = seconds_between(start, Clock::now());
    best_rate = std::max(best_rate, ready.burst.flops_per_iteration * static_cast<double>(iterations) / seconds);
  }
  const double one_unit = 2.0 * ready.burst.lanes;
  const double seen_units = best_rate / best_clock / one_unit;
  double units = ready.burst.single ? 0.5 : seen_units;
  for (double candidate : {1.0, 2.0}) {
    if (ready.burst.single && std::abs(std::log(seen_units / candidate)) < std::abs(std::log(seen_units / units)))
      units = candidate;
  }
  ideal = one_unit * units;
  return ideal;
}

double quantile(std::vector<double> numbers, double part) {
  if (numbers.empty()) return 0;
  std::sort(numbers.begin(), numbers.end());
  const double place = part * static_cast<double>(numbers.size() - 1);
  const auto below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, numbers.size() - 1);
  return numbers[below] + (place - static_cast<double>(below)) * (numbers[above] - numbers[below]);
}

Fraction measure_fraction(const Context& context, PeakKind kind, double flops, const std::function<void()>& call) {
  const auto timed_call = [&] {
    const auto start = Clock::now();
    call();
    return seconds_between(start, Clock::now());
  };
  double estimate = timed_call();
  if (estimate < 1) estimate = timed_call();  // the first one paid for scratch memory and sleeping threads
  const double ideal = ideal_flops_per_cycle(context, kind) * context.num_threads();

  Fraction result;
  constexpr double kShortCallBudget = 0.5;  // seconds for all pairs, where 11 take less
  result.num_pairs = estimate < 1    ? static_cast<int>(std::clamp(kShortCallBudget / (3 * estimate), 11.0, 101.0))
                     : estimate < 10 ? 3
                                     : 1;
  const double burst_seconds = std::min(estimate, 0.3);
  std::vector<double> calls, peaks, fractions, clocks, of_ideal;
  for (int pair = 0; pair < result.num_pairs; ++pair) {
    const double clock_before = measure_clock();
    const Peak before = measure_peak(context, kind, burst_seconds);
    calls.push_back(timed_call());
    const Peak after = measure_peak(context, kind, burst_seconds);
    const double clock = std::max(clock_before, measure_clock());
    const double peak = (before.flops_per_second + after.flops_per_second) / 2;
    peaks.push_back(peak);
    clocks.push_back(clock);
    fractions.push_back(flops / calls.back() / peak);
    of_ideal.push_back(peak / (ideal * clock));
  }
  result.call_seconds = quantile(calls, 0.5);
  result.flops_per_second = flops / result.call_seconds;
  result.peak_flops_per_second = quantile(peaks, 0.5);
  result.fraction = quantile(fractions, 0.5);
  result.fraction_q1 = quantile(fractions, 0.25);
  result.fraction_q3 = quantile(fractions, 0.75);
  result.clock_hz = quantile(clocks, 0.5);
  result.peak_of_ideal = quantile(of_ideal, 0.5);
  result.valid = result.peak_of_ideal >= 0.9;
  return result;
}

}  // namespace opst::test

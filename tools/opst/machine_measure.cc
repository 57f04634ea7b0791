// --machine this: a MachineProfile of what the context's threads do now.
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "machine_profile.h"
#include "opst/rowwise.h"
#include "opst/tensor.h"
#include "system_memory.h"
#include "testing/elements.h"
#include "testing/peak.h"
#include "testing/random.h"

namespace opst::tools {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_of(const auto& call) {
  const auto start = Clock::now();
  call();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The median of bursts of the length that calls have; the best one would promise what no call gets.
double flops_now(const Context& context, test::PeakKind kind) {
  constexpr int kBursts = 15;
  constexpr double kBurstSeconds = 0.005;
  std::vector<double> rates;
  for (int i = 0; i < kBursts; ++i) rates.push_back(test::measure_peak(context, kind, kBurstSeconds).flops_per_second);
  return test::quantile(rates, 0.75);
}

double read_now(const Context& context, const Buffer& memory, int64_t bytes) {
  constexpr int64_t kAtLeast = 16 << 20;  // bytes of a measurement: a millisecond at least
  const int rounds = bytes > 2 * kAtLeast ? 5 : 25;
  const int64_t passes = std::max<int64_t>(1, kAtLeast / bytes);
  std::vector<double> rates;
  for (int i = 0; i < rounds; ++i) rates.push_back(test::measure_read_bandwidth(context, memory.data(), bytes, passes));
  return test::quantile(rates, 0.75);
}

// Softmax of rows that lie in each core's own caches.
double exponentials_now(Context& context) {
  constexpr int64_t kRowsOfThread = 128, kColumns = 512;
  constexpr int kRounds = 100;
  const int64_t rows = kRowsOfThread * context.num_threads();
  const Buffer in = value_or_fail(Buffer::allocate(rows * kColumns * 4));
  const Buffer out = value_or_fail(Buffer::allocate(rows * kColumns * 4));
  const Tensor x = Tensor::contiguous(DType::f32, {rows, kColumns}, in.data());
  const Tensor y = Tensor::contiguous(DType::f32, {rows, kColumns}, out.data());
  test::Random random(1);
  test::fill(x, test::Fill::normal, random);
  std::vector<double> rates;
  for (int i = 0; i < kRounds; ++i) {
    Status status;
    const double seconds = seconds_of([&] { status = softmax(context, x, y); });
    if (!status.ok()) run_error(status.message());
    rates.push_back(static_cast<double>(rows * kColumns) / seconds);
  }
  return test::quantile(rates, 0.75);
}

// A parallel loop whose tasks do next to nothing.
double start_now(const Context& context) {
  constexpr int64_t kMostThreads = 64;
  alignas(64) char from[64 * kMostThreads] = {}, to[64 * kMostThreads];
  const int64_t bytes = 64 * std::min<int64_t>(context.num_threads(), kMostThreads);
  std::vector<double> seconds;
  for (int i = 0; i < 200; ++i) {
    seconds.push_back(seconds_of([&] { (void)test::measure_copy_seconds(context, from, to, bytes); }));
  }
  return test::quantile(seconds, 0.5);
}

}  // namespace

MachineProfile measure_machine(Context& context) {
  const Machine& m = context.machine();
  const std::string how = "measured now, " + std::to_string(context.num_threads()) + " thread(s)";
  const std::string told = "what the system reports";
  const auto measured = [&](double value) { return Quantity{value, how}; };
  MachineProfile p;
  p.name = "this machine at level " + std::string(to_string(m.isa));
  p.origin = how;
  p.isa = m.isa;
  p.cores = {static_cast<double>(context.num_threads()), "threads of the call"};
  p.matrix_f32 = measured(flops_now(context, test::PeakKind::f32));
  p.matrix_bf16 =
      measured(m.bf16_product == Bf16Product::dot ? flops_now(context, test::PeakKind::bf16) : p.matrix_f32.value);
  p.matrix_tile = {16, "columns of a vector of the level avx512, which a product's panel is rounded up to"};
  p.exponentials = measured(exponentials_now(context));
  p.start = measured(start_now(context));
  p.tile_memory = "L2";

  constexpr int64_t kMainBytes = int64_t{256} << 20;
  const Buffer memory = value_or_fail(Buffer::allocate(kMainBytes));
  std::fill_n(static_cast<char*>(memory.data()), memory.size_bytes(), char{1});
  const int64_t threads = context.num_threads();
  const auto level = [&](const char* name, bool per_core, int64_t bytes, double read) {
    p.levels.push_back({name, per_core, {static_cast<double>(bytes), told}, measured(read)});
  };
  // Half of a cache is its own whatever else a call holds.
  level("L1", true, m.cache.l1d_bytes, read_now(context, memory, m.cache.l1d_bytes / 2 * threads));
  level("L2", true, m.cache.l2_bytes, read_now(context, memory, m.cache.l2_bytes / 2 * threads));
  level("L3", false, m.cache.l3_bytes_per_core * threads,
        read_now(context, memory, m.cache.l3_bytes_per_core * threads));
  level("memory", false, physical_memory_bytes(), read_now(context, memory, kMainBytes));
  return p;
}

}  // namespace opst::tools

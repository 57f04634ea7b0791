// int8 and int4 weights: many rows beside the machine's 8-bit dot products, few rows beside plain reading of the
// weights.
//
//   of_peak   operations over 8-bit dot products of the same length just before and after (testing/peak.h)
//   of_read   bytes of the weights over the time of plainly reading the same buffers, 256 MB of them in turn, so that
//             no cache holds them; q1, q3: quartiles of the rounds
#include <benchmark/benchmark.h>

#include <chrono>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "opst/matmul.h"
#include "opst/quant.h"
#include "testing/peak.h"
#include "testing/random.h"

namespace opst {
namespace {

struct Case {
  int bits;
  int64_t group;  // 0: one scale per output
  bool integers;  // x is int8; else f32
  int64_t m, n, k;
  int num_threads;
  std::string name() const {
    std::string text = integers ? "matmul/i8_i" : "matmul/f32_i";
    return text + std::to_string(bits) + (group > 0 ? "g" + std::to_string(group) : "") + "/m" + std::to_string(m) +
           "_n" + std::to_string(n) + "_k" + std::to_string(k) + "/threads" + std::to_string(num_threads);
  }
};

constexpr int64_t kRotationBytes = 256 << 20;
constexpr int64_t kFewRows = 8;
constexpr int kRounds = 11;

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void run(benchmark::State& state, const Case& c) {
  Result<Context> created = Context::create({.num_threads = c.num_threads});
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  Context& context = created.value();
  test::Random random(1);
  const int64_t groups = c.group > 0 ? c.k / c.group : 1;
  Buffer q_buffer = std::move(Buffer::allocate(c.n * c.k).value());
  Buffer scale_buffer = std::move(Buffer::allocate(c.n * groups * 4).value());
  const Tensor q = c.bits == 8 ? q_buffer.tensor(DType::i8, {c.n, c.k}) : q_buffer.tensor(DType::u8, {c.n, c.k / 2});
  const Tensor scales = scale_buffer.tensor(DType::f32, {c.n, groups});
  test::fill(q, test::Fill::uniform, random);
  test::fill(scales, test::Fill::normal, random);
  const bool few = c.m <= kFewRows;
  std::vector<PackedIntWeight> weights;
  do {
    weights.push_back(std::move(PackedIntWeight::pack(context, IntMatrix{q, scales}).value()));
  } while (few && static_cast<int64_t>(weights.size()) * weights[0].size_bytes() < kRotationBytes);
  Buffer x_buffer = std::move(Buffer::allocate(c.m * c.k * 4).value());
  Buffer out_buffer = std::move(Buffer::allocate(c.m * c.n * 4).value());
  Buffer x_scale_buffer = std::move(Buffer::allocate(c.m * 4).value());
  const Tensor x = x_buffer.tensor(c.integers ? DType::i8 : DType::f32, {c.m, c.k});
  const Tensor out = out_buffer.tensor(DType::f32, {c.m, c.n});
  const Tensor x_scales = x_scale_buffer.tensor(DType::f32, {c.m});
  test::fill(x, test::Fill::normal, random);
  test::fill(x_scales, test::Fill::normal, random);
  IntMatmulOptions options;
  if (c.integers) options.x_scales = x_scales;
  const double flops = 2.0 * static_cast<double>(c.m) * static_cast<double>(c.n) * static_cast<double>(c.k);
  Status status = matmul(context, x, weights[0], out, options);
  if (!status.ok()) return state.SkipWithError(status.message().c_str());

  for (auto _ : state) {
    if (!few) {
      const test::Fraction f =
          test::measure_fraction(context, c.integers ? test::PeakKind::i8 : test::PeakKind::f32, flops,
                                 [&] { status = matmul(context, x, weights[0], out, options); });
      state.SetIterationTime(f.call_seconds);
      state.counters["GOP/s"] = f.flops_per_second / 1e9;
      state.counters["of_peak"] = f.fraction;
      state.counters["q1"] = f.fraction_q1;
      state.counters["q3"] = f.fraction_q3;
      state.counters["valid"] = f.valid;
      continue;
    }
    std::vector<double> call_seconds, fractions;
    for (int round = 0; round < kRounds; ++round) {
      const double begin = seconds_now();
      for (const PackedIntWeight& weight : weights) status = matmul(context, x, weight, out, options);
      const double seconds = seconds_now() - begin;
      double read_seconds = 0;
      for (const PackedIntWeight& weight : weights) {
        const auto bytes = static_cast<double>(weight.size_bytes());
        read_seconds += bytes / test::measure_read_bandwidth(context, weight.data(), weight.size_bytes());
      }
      call_seconds.push_back(seconds / static_cast<double>(weights.size()));
      fractions.push_back(read_seconds / seconds);
    }
    const double median = test::quantile(call_seconds, 0.5);
    state.SetIterationTime(median);
    state.counters["GB/s"] = static_cast<double>(weights[0].size_bytes()) / median / 1e9;
    state.counters["of_read"] = test::quantile(fractions, 0.5);
    state.counters["q1"] = test::quantile(fractions, 0.25);
    state.counters["q3"] = test::quantile(fractions, 0.75);
  }
}

void add(const Case& c) {
  benchmark::RegisterBenchmark(c.name().c_str(), [c](benchmark::State& state) { run(state, c); })
      ->UseManualTime()
      ->Iterations(1)
      ->Unit(benchmark::kMicrosecond);
}

}  // namespace
}  // namespace opst

int main(int argc, char** argv) {
  const std::pair<int64_t, int64_t> shapes[] = {{1024, 2048}, {4096, 2048}, {1024, 8192}};
  for (const auto& [bits, group] : {std::pair<int, int64_t>{8, 0}, {8, 128}, {4, 0}, {4, 128}, {4, 32}}) {
    for (const auto& [n, k] : shapes) {
      for (const bool integers : {true, false}) {
        for (const int threads : {1, 2}) {
          for (const int64_t m : {1, 2, 4, 8, 16, 64, 256, 512}) opst::add({bits, group, integers, m, n, k, threads});
        }
      }
    }
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

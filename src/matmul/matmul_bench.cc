// Matmul with packed weights: many rows beside the machine's multiply-adds, few rows beside plain reading of the
// weights.
//
//   of_peak   flops over f32 multiply-adds of the same length just before and after (testing/peak.h)
//   of_read   bytes of the weights over the time of plainly reading the same buffers, 256 MB of them in turn, so that
//             no cache holds them
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "opst/matmul.h"
#include "quant/random_blocks.h"
#include "testing/bench.h"
#include "testing/random.h"

namespace opst {
namespace {

struct Case {
  QuantFormat format;
  int64_t m, n, k;
  int num_threads;
  std::string name() const {
    return std::string("matmul/") + to_string(format) + "/m" + std::to_string(m) + "_n" + std::to_string(n) + "_k" +
           std::to_string(k) + "/threads" + std::to_string(num_threads);
  }
};

constexpr int64_t kRotationBytes = 256 << 20;
constexpr int64_t kFewRows = 8;
constexpr int kRounds = 7;

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void run(benchmark::State& state, const Case& c) {
  Result<Context> created = Context::create({.num_threads = c.num_threads});
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  Context& context = created.value();
  test::Random random(1);
  const std::vector<unsigned char> blocks = test::random_blocks(c.format, c.n, c.k, random);
  const QuantMatrix matrix{c.format, c.n, c.k, blocks.data(), static_cast<int64_t>(blocks.size())};
  const bool few = c.m <= kFewRows;
  std::vector<PackedWeight> weights;
  for (int64_t bytes = 0; weights.empty() || (few && bytes < kRotationBytes); bytes += matrix.size_bytes) {
    weights.push_back(std::move(PackedWeight::pack(context, matrix).value()));
  }
  Buffer x_buffer = std::move(Buffer::allocate(c.m * c.k * 4).value());
  Buffer out_buffer = std::move(Buffer::allocate(c.m * c.n * 4).value());
  const Tensor x = x_buffer.tensor(DType::f32, {c.m, c.k});
  const Tensor out = out_buffer.tensor(DType::f32, {c.m, c.n});
  test::fill(x, test::Fill::normal, random);
  const double flops = 2.0 * static_cast<double>(c.m) * static_cast<double>(c.n) * static_cast<double>(c.k);
  Status status = matmul(context, x, weights[0], out);
  if (!status.ok()) return state.SkipWithError(status.message().c_str());

  for (auto _ : state) {
    if (!few) {
      const test::Fraction f = test::measure_fraction(context, test::PeakKind::f32, flops,
                                                      [&] { status = matmul(context, x, weights[0], out); });
      state.SetIterationTime(f.call_seconds);
      state.counters["GFLOP/s"] = f.flops_per_second / 1e9;
      state.counters["of_peak"] = f.fraction;
      state.counters["valid"] = f.valid;
      continue;
    }
    std::vector<double> call_seconds, fractions;
    for (int round = 0; round < kRounds; ++round) {
      const double begin = seconds_now();
      for (const PackedWeight& weight : weights) status = matmul(context, x, weight, out);
      const double seconds = seconds_now() - begin;
      double read_seconds = 0;
      for (const PackedWeight& weight : weights) {
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
  }
}

void register_case(const Case& c) {
  test::register_bench(c.name(), [c](benchmark::State& state) { run(state, c); });
}

}  // namespace
}  // namespace opst

int main(int argc, char** argv) {
  using opst::QuantFormat;
  const std::pair<int64_t, int64_t> shapes[] = {{1024, 2048}, {4096, 2048}, {576, 576}, {1536, 576}, {576, 1536}};
  for (const QuantFormat format : opst::test::kQuantFormats) {
    for (const auto& [n, k] : shapes) {
      if (k % opst::block_values(format) != 0) continue;
      for (const int threads : {1, 2}) {
        for (const int64_t m : {1, 2, 4, 16, 64, 256, 512}) opst::register_case({format, m, n, k, threads});
      }
    }
  }
  return opst::test::run_benches(argc, argv);
}

// The operators of this room, beside plainly copying as many bytes.
//
//   of_copy   time of a memcpy of the call's bytes (all that the call reads and writes, half of them each way) over the
//             call's time, on one thread; `small` rows stay in L1 and L2, `large` rows come from memory
#include <time.h>

#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "opst/rowwise.h"
#include "testing/bench.h"
#include "testing/random.h"

namespace opst {
namespace {

constexpr int kRounds = 15;
constexpr int64_t kFeatures = 2048;

// Processor time of this thread, so that other users of the machine do not count.
double seconds_now() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Seconds of one call, of `repetitions` that together take about a millisecond.
double seconds_of(int64_t repetitions, const std::function<void()>& work) {
  const double begin = seconds_now();
  for (int64_t i = 0; i < repetitions; ++i) work();
  return (seconds_now() - begin) / static_cast<double>(repetitions);
}

// Five tensors of `rows` rows; the weight and angles of a row.
struct Rows {
  DType dtype;
  int64_t rows;
  Buffer memory[5], weight, angles, gradient;

  Rows(DType type, int64_t count) : dtype(type), rows(count) {
    test::Random random(1);
    for (Buffer& buffer : memory) {
      buffer = std::move(Buffer::allocate(rows * kFeatures * size_bytes(dtype)).value());
      test::fill(buffer.tensor(dtype, {rows * kFeatures}), test::Fill::uniform, random);
    }
    weight = std::move(Buffer::allocate(kFeatures * 4).value());
    gradient = std::move(Buffer::allocate(kFeatures * 4).value());
    angles = std::move(Buffer::allocate(rows * kHeadDim / 2 * 4).value());
    test::fill(weight.tensor(DType::f32, {kFeatures}), test::Fill::uniform, random);
    test::fill(angles.tensor(DType::f32, {rows * kHeadDim / 2}), test::Fill::uniform, random);
  }
  static constexpr int64_t kHeadDim = 64;
  Tensor at(int i) const { return memory[i].tensor(dtype, {rows, kFeatures}); }
  Tensor heads(int i) const { return memory[i].tensor(dtype, {rows, kFeatures / kHeadDim, kHeadDim}); }
  Tensor w() const { return weight.tensor(DType::f32, {kFeatures}); }
  Tensor table() const { return angles.tensor(DType::f32, {rows, kHeadDim / 2}); }
};

struct Operation {
  const char* name;
  int tensors;  // read or written
  std::function<Status(Context&, const Rows&)> call;
};

void run(benchmark::State& state, const Operation& operation, DType dtype, int64_t bytes_each) {
  Result<Context> created = Context::create({.num_threads = 1});
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  const Rows rows(dtype, bytes_each / (kFeatures * size_bytes(dtype)));
  const int64_t bytes = operation.tensors * bytes_each;
  // A memcpy of as many bytes as the call moves, in memory of the same size.
  const Buffer from = std::move(Buffer::allocate(bytes / 2).value()),
               to = std::move(Buffer::allocate(bytes / 2).value());
  std::memset(from.data(), 1, static_cast<size_t>(bytes / 2));
  std::memset(to.data(), 1, static_cast<size_t>(bytes / 2));
  const int64_t repetitions = std::max<int64_t>(1, (int64_t{8} << 20) / bytes);
  Status status;
  const auto call = [&] { status = operation.call(created.value(), rows); };
  const auto copy = [&] {
    std::memcpy(to.data(), from.data(), static_cast<size_t>(bytes / 2));
    benchmark::ClobberMemory();
  };
  for (auto _ : state) {
    std::vector<double> seconds, fractions;
    call();
    for (int round = 0; round < kRounds; ++round) {
      const double before = seconds_of(repetitions, copy);
      seconds.push_back(seconds_of(repetitions, call));
      fractions.push_back((before + seconds_of(repetitions, copy)) / 2 / seconds.back());
    }
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    const double median = test::quantile(seconds, 0.5);
    state.SetIterationTime(median);
    state.counters["GB/s"] = static_cast<double>(bytes) / median / 1e9;
    state.counters["of_copy"] = test::quantile(fractions, 0.5);
  }
}

const std::vector<Operation>& operations() {
  static const std::vector<Operation> kOperations = {
      {"add", 3, [](Context& c, const Rows& r) { return add(c, r.at(0), r.at(1), r.at(2)); }},
      {"swiglu", 3, [](Context& c, const Rows& r) { return swiglu(c, r.at(0), r.at(1), r.at(2)); }},
      {"rms_norm", 2, [](Context& c, const Rows& r) { return rms_norm(c, r.at(0), r.w(), r.at(1)); }},
      {"add_rms_norm", 4,
       [](Context& c, const Rows& r) { return add_rms_norm(c, r.at(0), r.at(1), r.w(), r.at(2), r.at(3)); }},
      {"layer_norm", 2,
       [](Context& c, const Rows& r) { return layer_norm(c, r.at(0), r.at(1), {.weight = r.w(), .bias = r.w()}); }},
      {"softmax", 2, [](Context& c, const Rows& r) { return softmax(c, r.at(0), r.at(1)); }},
      {"rope_halves", 2,
       [](Context& c, const Rows& r) { return rope(c, r.heads(0), r.table(), r.table(), r.heads(1)); }},
      {"rope_pairs", 2,
       [](Context& c, const Rows& r) {
         return rope(c, r.heads(0), r.table(), r.table(), r.heads(1), {.style = RopeStyle::pairs});
       }},
      {"rms_norm_backward", 3,
       [](Context& c, const Rows& r) {
         return rms_norm_backward(c, r.at(0), r.at(1), r.w(),
                                  {.x = r.at(2), .weight = r.gradient.tensor(DType::f32, {kFeatures})});
       }},
      {"softmax_backward", 3, [](Context& c, const Rows& r) { return softmax_backward(c, r.at(0), r.at(1), r.at(2)); }},
      {"swiglu_backward", 5,
       [](Context& c, const Rows& r) { return swiglu_backward(c, r.at(0), r.at(1), r.at(2), r.at(3), r.at(4)); }}};
  return kOperations;
}

}  // namespace
}  // namespace opst

int main(int argc, char** argv) {
  using opst::DType;
  for (const opst::Operation& operation : opst::operations()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const bool large : {false, true}) {
        const int64_t bytes = large ? int64_t{32} << 20 : int64_t{64} << 10;
        const std::string name = std::string(operation.name) + "/" + to_string(dtype) + (large ? "/large" : "/small");
        opst::test::register_bench(
            name, [=, &operation](benchmark::State& state) { opst::run(state, operation, dtype, bytes); });
      }
    }
  }
  return opst::test::run_benches(argc, argv);
}

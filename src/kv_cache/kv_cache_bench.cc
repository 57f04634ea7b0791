// Moving keys and values into, between and out of pages, beside a plain copy of as many bytes.
//
//   of_copy   time of a memcpy of the call's bytes over the call's time, on one thread
//             34 MB (f32) or 17 MB (bf16) each way
#include <time.h>

#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "opst/kv_cache.h"
#include "testing/bench.h"
#include "testing/random.h"

namespace opst {
namespace {

constexpr int kRounds = 11;
constexpr PageSizes kSizes = {
    .num_blocks = 128, .block_size = 64, .num_kv_heads = 8, .head_dim = 64, .value_head_dim = 64};
constexpr int64_t kTokens = kSizes.num_blocks * kSizes.block_size;

// Processor time of this thread, so that other users of the machine do not count.
double seconds_now() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double seconds_of(const std::function<void()>& work) {
  const double begin = seconds_now();
  work();
  return seconds_now() - begin;
}

// Keys and values as a cache in some layout, or as rows.
struct Memory {
  Buffer keys, values;

  explicit Memory(DType dtype) {
    const int64_t bytes = kTokens * kSizes.num_kv_heads * kSizes.head_dim * size_bytes(dtype);
    keys = std::move(Buffer::allocate(bytes).value());
    values = std::move(Buffer::allocate(bytes).value());
    test::Random random(1);
    for (const Buffer* buffer : {&keys, &values}) {
      test::fill(buffer->tensor(dtype, {bytes / size_bytes(dtype)}), test::Fill::uniform, random);
    }
  }
  Tensor key(PageLayout layout, DType dtype) const { return key_pages(layout, dtype, kSizes, keys.data()); }
  Tensor value(PageLayout layout, DType dtype) const { return value_pages(layout, dtype, kSizes, values.data()); }
  static Tensor rows(const Buffer& buffer, DType dtype) {
    return buffer.tensor(dtype, {kTokens, kSizes.num_kv_heads, kSizes.head_dim});
  }
};

enum class Operation { scatter, gather, convert };

void run(benchmark::State& state, Operation operation, PageLayout layout, DType dtype) {
  Result<Context> created = Context::create({.num_threads = 1});
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  Context& context = created.value();
  const Memory from(dtype), to(dtype);
  std::vector<int64_t> slots(kTokens), table(kSizes.num_blocks);
  std::iota(table.begin(), table.end(), 0);
  test::Random random(1);
  for (size_t i = table.size(); i-- > 1;) {
    std::swap(table[i], table[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i)))]);
  }
  for (int64_t t = 0; t < kTokens; ++t) {
    slots[static_cast<size_t>(t)] =
        table[static_cast<size_t>(t / kSizes.block_size)] * kSizes.block_size + t % kSizes.block_size;
  }
  const int64_t length = kTokens;
  const PageLayout other = layout == PageLayout::norm ? PageLayout::panel32 : PageLayout::norm;
  Status status;
  const auto call = [&] {
    if (operation == Operation::scatter) {
      status = scatter_pa_kv_cache(context, Memory::rows(from.keys, dtype), Memory::rows(from.values, dtype),
                                   ConstTensor::contiguous(DType::i64, {kTokens}, slots.data()), to.key(layout, dtype),
                                   to.value(layout, dtype), {.layout = layout});
    } else if (operation == Operation::gather) {
      status = gather_pa_kv_cache(context, from.key(layout, dtype), from.value(layout, dtype),
                                  ConstTensor::contiguous(DType::i64, {1, kSizes.num_blocks}, table.data()),
                                  ConstTensor::contiguous(DType::i64, {1}, &length), Memory::rows(to.keys, dtype),
                                  Memory::rows(to.values, dtype), {.layout = layout});
    } else {
      status = convert_pages(context, from.key(other, dtype), from.value(other, dtype), to.key(layout, dtype),
                             to.value(layout, dtype), {.from = other, .to = layout});
    }
  };
  const auto copy = [&] {
    std::memcpy(to.keys.data(), from.keys.data(), static_cast<size_t>(from.keys.size_bytes()));
    std::memcpy(to.values.data(), from.values.data(), static_cast<size_t>(from.values.size_bytes()));
  };
  for (auto _ : state) {
    std::vector<double> seconds, fractions;
    call();
    for (int round = 0; round < kRounds; ++round) {
      const double before = seconds_of(copy);
      seconds.push_back(seconds_of(call));
      fractions.push_back((before + seconds_of(copy)) / 2 / seconds.back());
    }
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    const double median = test::quantile(seconds, 0.5);
    state.SetIterationTime(median);
    state.counters["GB/s"] =
        2.0 * static_cast<double>(from.keys.size_bytes() + from.values.size_bytes()) / median / 1e9;
    state.counters["of_copy"] = test::quantile(fractions, 0.5);
  }
}

void register_case(const char* name, Operation operation, PageLayout layout, DType dtype) {
  test::register_bench(std::string(name) + "/" + to_string(layout) + "/" + to_string(dtype),
                       [=](benchmark::State& state) { run(state, operation, layout, dtype); });
}

}  // namespace
}  // namespace opst

int main(int argc, char** argv) {
  using opst::DType, opst::Operation, opst::PageLayout;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const PageLayout layout : {PageLayout::norm, PageLayout::panel32}) {
      opst::register_case("scatter", Operation::scatter, layout, dtype);
      opst::register_case("gather", Operation::gather, layout, dtype);
    }
    opst::register_case("convert_to", Operation::convert, PageLayout::panel32, dtype);
    opst::register_case("convert_to", Operation::convert, PageLayout::norm, dtype);
  }
  return opst::test::run_benches(argc, argv);
}

// Decoding: one query of a sequence against 32768 keys of 8 KV heads, beside plain reading of the same keys and values.
//
//   of_reading   bytes of keys, values and their scales, each once, per second, over the rate of reading their memory
//                from front to back (testing/peak.h), before and after each call on the same threads; q1, q3: quartiles
//
// Keys and values lie dense or in pages of 128 tokens whose order is not memory's, in pages of the system of 4 KB (what
// malloc gives) or 2 MiB (Buffer). A key and its value are 160 (int4) to 1024 bytes, a case 40 to 256 MB.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "opst/attention.h"
#include "opst/kv_cache.h"
#include "testing/bench.h"
#include "testing/random.h"

namespace opst {
namespace {

enum class Keys : uint8_t { dense, norm, panel32 };

struct Case {
  const char* format;  // of kv_format
  Keys keys;
  int64_t group;  // query heads of a KV head
  bool huge;
  int threads = 1;
  int64_t kv_len = 32768, kv_heads = 8, head_dim = 128;
  std::string name() const {
    static constexpr const char* kNames[] = {"dense", "norm", "panel32"};
    return std::string("decode/") + format + "/" + kNames[static_cast<int>(keys)] + "/keys" + std::to_string(kv_len) +
           "/group" + std::to_string(group) + (huge ? "/2MiB" : "/4KB") + "/threads" + std::to_string(threads);
  }
};

constexpr int64_t kBlockSize = 128;

// Memory of a case, full of numbers, and what is read of it.
class Operands {
 public:
  explicit Operands(const Case& c) : huge_(c.huge) {}

  test::Random random{1};

  void* memory(int64_t elements, DType dtype) {
    const int64_t bytes = elements * size_bytes(dtype);
    Buffer buffer = std::move(Buffer::allocate(bytes).value());
    if (!huge_) madvise(buffer.data(), static_cast<size_t>(bytes), MADV_NOHUGEPAGE);
    // Some numbers again and again: what they are matters to no kernel, unless they are subnormal.
    std::vector<char> some(static_cast<size_t>(std::min<int64_t>(bytes, 1 << 20)));
    if (dtype == DType::i8 || dtype == DType::u8) {
      for (char& byte : some) byte = static_cast<char>(random.integer(-128, 127));
    } else {
      const int64_t count = static_cast<int64_t>(some.size()) / size_bytes(dtype);
      test::fill(Tensor::contiguous(dtype, {count}, some.data()), test::Fill::normal, random);
    }
    for (int64_t at = 0; at < bytes; at += static_cast<int64_t>(some.size())) {
      std::memcpy(static_cast<char*>(buffer.data()) + at, some.data(),
                  static_cast<size_t>(std::min(bytes - at, static_cast<int64_t>(some.size()))));
    }
    buffers_.push_back(std::move(buffer));
    return buffers_.back().data();
  }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const Buffer& b : buffers_) sum += b.size_bytes();
    return sum;
  }
  double read_seconds(const Context& context) const {
    double seconds = 0;
    for (const Buffer& b : buffers_) {
      seconds += static_cast<double>(b.size_bytes()) / test::measure_read_bandwidth(context, b.data(), b.size_bytes());
    }
    return seconds;
  }

 private:
  const bool huge_;
  std::vector<Buffer> buffers_;
};

void run(benchmark::State& state, const Case& c) {
  Result<Context> created = Context::create({.num_threads = c.threads});
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  Context& context = created.value();
  const KvFormat format = kv_format(c.format, c.head_dim, c.head_dim).value();
  const PageLayout layout = c.keys == Keys::panel32 ? PageLayout::panel32 : PageLayout::norm;
  const int64_t num_heads = c.kv_heads * c.group, blocks = c.kv_len / kBlockSize, rows = c.kv_len * c.kv_heads;
  const PageSizes sizes = {blocks, kBlockSize, c.kv_heads, c.head_dim, c.head_dim};
  Operands operands(c);
  AttentionInputs in;
  AttentionOptions options = {.page_layout = layout};
  const int64_t elements = rows * c.head_dim / (format.dtype == DType::u8 ? 2 : 1);
  void *const keys = operands.memory(elements, format.dtype), *const values = operands.memory(elements, format.dtype);
  std::vector<int32_t> table(static_cast<size_t>(blocks));
  const int32_t length = static_cast<int32_t>(c.kv_len);
  if (c.keys == Keys::dense) {
    in.key = ConstTensor::contiguous(format.dtype, {1, c.kv_heads, c.kv_len, c.head_dim}, keys);
    in.value = ConstTensor::contiguous(format.dtype, {1, c.kv_heads, c.kv_len, c.head_dim}, values);
  } else {
    in.key = key_pages(layout, format.dtype, sizes, keys);
    in.value = value_pages(layout, format.dtype, sizes, values);
    std::iota(table.begin(), table.end(), 0);
    for (int64_t i = blocks - 1; i > 0; --i) {
      std::swap(table[static_cast<size_t>(i)], table[static_cast<size_t>(operands.random.integer(0, i))]);
    }
    in.block_table = ConstTensor::contiguous(DType::i32, {1, blocks}, table.data());
    in.kv_lengths = ConstTensor::contiguous(DType::i32, {1}, &length);
  }
  const auto scales = [&](const auto& panels) -> ConstTensor {
    float* const data = static_cast<float*>(operands.memory(rows * format.key_groups, DType::f32));
    std::fill_n(data, rows * format.key_groups, 0.01f);
    if (layout == PageLayout::panel32) return panels(layout, sizes, format.key_groups, data);
    // Those of a head next to each other, as Python's new_pages makes them.
    const std::initializer_list<int64_t> shape = {blocks, c.kv_heads, kBlockSize, format.key_groups};
    return Tensor::contiguous(DType::f32, shape, data).transposed(1, 2);
  };
  if (format.key_groups > 0) in.key_scales = scales(key_scale_pages), in.value_scales = scales(value_scale_pages);
  const double bytes = static_cast<double>(operands.bytes());

  // Beside them a query and an output, f32 or of the cache's own type.
  const bool own = size_bytes(format.dtype) == 2;
  const DType dtype = own ? format.dtype : DType::f32;
  Operands rest(c);
  const int64_t shape[] = {1, num_heads, 1, c.head_dim};
  const auto tensor = [&] {
    return Tensor::contiguous(dtype, {shape[0], shape[1], shape[2], shape[3]},
                              rest.memory(num_heads * c.head_dim, dtype));
  };
  in.query = tensor();
  const AttentionOutputs out = {tensor()};

  using Clock = std::chrono::steady_clock;
  std::vector<double> calls, readings, fractions;
  Status status;
  for (auto _ : state) {
    double before = operands.read_seconds(context);
    const int pairs = c.kv_len < 4096 ? 201 : 15;
    for (int i = 0; i < pairs && status.ok(); ++i) {
      const auto start = Clock::now();
      status = flash_attention_forward(context, in, out, options);
      calls.push_back(std::chrono::duration<double>(Clock::now() - start).count());
      const double after = operands.read_seconds(context);
      readings.push_back(after);
      fractions.push_back((before + after) / 2 / calls.back());
      before = after;
    }
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    state.SetIterationTime(test::quantile(calls, 0.5));
  }
  state.counters["GB/s"] = bytes / test::quantile(calls, 0.5) / 1e9;
  state.counters["reading_GB/s"] = bytes / test::quantile(readings, 0.5) / 1e9;
  state.counters["of_reading"] = test::quantile(fractions, 0.5);
  state.counters["q1"] = test::quantile(fractions, 0.25);
  state.counters["q3"] = test::quantile(fractions, 0.75);
  const Result<AttentionProblem> problem = attention_problem(in, options);
  if (problem.ok()) state.SetLabel(to_string(plan_attention(problem.value(), context.machine())));
}

}  // namespace
}  // namespace opst

int main(int argc, char** argv) {
  using opst::Keys;
  std::vector<opst::Case> cases;
  for (const char* format : {"f32", "bf16", "f16", "f8_e4m3", "f8_e5m2", "int8", "int4"}) {
    const std::string name = format;
    for (const Keys keys : {Keys::dense, Keys::norm, Keys::panel32}) {
      const bool floats = name == "f32" || name == "bf16" || name == "f16";
      if (keys == Keys::dense && !floats) continue;
      for (const bool huge : {false, true}) {
        for (const int64_t group : {1, 4, 8}) cases.push_back({format, keys, group, huge});
        cases.push_back({format, keys, 4, huge, 2});
        // Little is read, and a call's work apart from it shows.
        if (huge) cases.push_back({format, keys, 4, huge, 1, 128});
      }
    }
  }
  for (const opst::Case& c : cases) {
    opst::test::register_bench(c.name(), [c](benchmark::State& state) { run(state, c); });
  }
  return opst::test::run_benches(argc, argv);
}

// Attention forward, from short to long: each case by the flash and by the standard path, beside the machine's peak.
//
//   of_peak     flops of the visible pairs over multiply-adds of the same length just before and after (testing/peak.h)
//   q1, q3      the middle half of the pairs' fractions
//   scratch     bytes beyond inputs and outputs
//
// Decoding (query_len 1) is bound by memory: there `of_read` compares the bytes of keys and values with plain reading.
#include <string>

#include "opst/attention.h"
#include "testing/bench.h"
#include "testing/random.h"

namespace opst {
namespace {

struct Case {
  DType dtype;
  int64_t batch, heads, kv_heads, query_len, kv_len, head_dim;
  bool causal;
  AttentionPath path;
  int num_threads;

  double pairs() const {
    const double all = static_cast<double>(query_len) * static_cast<double>(kv_len);
    if (!causal) return all;
    return all - static_cast<double>(query_len) * static_cast<double>(query_len - 1) / 2;  // bottom right
  }
  double flops() const { return 4.0 * static_cast<double>(head_dim * heads * batch) * pairs(); }
  std::string name() const {
    return std::string("attention/") + to_string(dtype) + "/B" + std::to_string(batch) + "_H" + std::to_string(heads) +
           "_" + std::to_string(kv_heads) + "/q" + std::to_string(query_len) + "_k" + std::to_string(kv_len) + "/D" +
           std::to_string(head_dim) + (causal ? "/causal/" : "/full/") + to_string(path) + "/threads" +
           std::to_string(num_threads);
  }
};

void run(benchmark::State& state, const Case& c) {
  Result<Context> created = Context::create({.num_threads = c.num_threads});
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  Context& context = created.value();
  test::Random random(1);
  const auto make = [&](Buffer& buffer, int64_t heads, int64_t length) {
    buffer = std::move(Buffer::allocate(c.batch * heads * length * c.head_dim * size_bytes(c.dtype)).value());
    const Tensor t = buffer.tensor(c.dtype, {c.batch, heads, length, c.head_dim});
    test::fill(t, test::Fill::normal, random);
    return t;
  };
  Buffer buffers[4];
  const AttentionInputs in = {.query = make(buffers[0], c.heads, c.query_len),
                              .key = make(buffers[1], c.kv_heads, c.kv_len),
                              .value = make(buffers[2], c.kv_heads, c.kv_len)};
  const AttentionOutputs out = {.out = make(buffers[3], c.heads, c.query_len)};
  const AttentionOptions options = {.causal = c.causal, .path = c.path};
  Status status = flash_attention_forward(context, in, out, options);
  if (!status.ok()) return state.SkipWithError(status.message().c_str());

  test::Fraction f;
  for (auto _ : state) {
    f = test::measure_fraction(context, test::peak_kind(c.dtype), c.flops(),
                               [&] { status = flash_attention_forward(context, in, out, options); });
    state.SetIterationTime(f.call_seconds);
  }
  test::report(state, f);
  state.counters["scratch"] = static_cast<double>(context.workspace_bytes());
  if (c.query_len == 1) {
    const double read = test::measure_read_bandwidth(context, buffers[1].data(), buffers[1].size_bytes());
    state.counters["of_read"] =
        static_cast<double>(buffers[1].size_bytes() + buffers[2].size_bytes()) / f.call_seconds / read;
  }
}

void register_case(const Case& c) {
  test::register_bench(c.name(), [c](benchmark::State& state) { run(state, c); });
}

}  // namespace
}  // namespace opst

int main(int argc, char** argv) {
  using opst::AttentionPath;
  using opst::DType;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int64_t head_dim : {64, 128}) {
      for (const bool causal : {false, true}) {
        for (const int64_t heads : {1, 8}) {
          for (const int64_t n : {1, 16, 64, 128, 256, 512, 1024}) {
            for (const AttentionPath path : {AttentionPath::flash, AttentionPath::standard}) {
              opst::register_case({dtype, 1, heads, heads, n, n, head_dim, causal, path, 1});
            }
          }
        }
        for (const int64_t n : {2048, 4096}) {
          for (const int threads : {1, 2}) {
            opst::register_case({dtype, 1, 4, 4, n, n, head_dim, causal, AttentionPath::flash, threads});
          }
        }
      }
    }
    for (const int threads : {1, 2}) {
      opst::register_case({dtype, 1, 32, 8, 1, 32768, 128, true, AttentionPath::flash, threads});
    }
  }
  return opst::test::run_benches(argc, argv);
}

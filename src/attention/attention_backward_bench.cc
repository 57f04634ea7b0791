// Attention backward from short to long, beside the machine's peak.
//
//   of_peak     2 (3 D + 2 Dv) flops per visible pair over multiply-adds of the same length just before and after
//   q1, q3      the middle half of the pairs' fractions
//   scratch     bytes beyond inputs and outputs
#include <string>

#include "opst/attention_backward.h"
#include "testing/bench.h"
#include "testing/random.h"

namespace opst {
namespace {

struct Case {
  DType dtype;
  int64_t heads, kv_heads, length, head_dim;
  bool causal;
  int num_threads;

  double flops() const {
    const auto n = static_cast<double>(length);
    return 10.0 * static_cast<double>(head_dim * heads) * (causal ? n * (n + 1) / 2 : n * n);
  }
  std::string name() const {
    return std::string("attention_backward/") + to_string(dtype) + "/H" + std::to_string(heads) + "_" +
           std::to_string(kv_heads) + "/n" + std::to_string(length) + "/D" + std::to_string(head_dim) +
           (causal ? "/causal" : "/full") + "/threads" + std::to_string(num_threads);
  }
};

void run(benchmark::State& state, const Case& c) {
  Result<Context> created = Context::create({.num_threads = c.num_threads});
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  Context& context = created.value();
  test::Random random(1);
  Buffer buffers[9];
  int used = 0;
  const auto make = [&](int64_t heads, int64_t dim, DType dtype) {
    Buffer& buffer = buffers[used++];
    buffer = std::move(Buffer::allocate(heads * c.length * dim * size_bytes(dtype)).value());
    const Tensor t = buffer.tensor(dtype, {1, heads, c.length, dim});
    test::fill(t, test::Fill::normal, random);
    return t;
  };
  const AttentionInputs in = {.query = make(c.heads, c.head_dim, c.dtype),
                              .key = make(c.kv_heads, c.head_dim, c.dtype),
                              .value = make(c.kv_heads, c.head_dim, c.dtype)};
  const Tensor out = make(c.heads, c.head_dim, c.dtype), grad_out = make(c.heads, c.head_dim, c.dtype);
  const Tensor lse = make(c.heads, 1, DType::f32).selected(3, 0);
  const AttentionGradients grads = {.grad_query = make(c.heads, c.head_dim, c.dtype),
                                    .grad_key = make(c.kv_heads, c.head_dim, c.dtype),
                                    .grad_value = make(c.kv_heads, c.head_dim, c.dtype)};
  const AttentionOptions options = {.causal = c.causal};
  Status status = flash_attention_forward(context, in, {.out = out, .softmax_lse = lse}, options);
  const AttentionSaved saved = {.out = out, .softmax_lse = lse, .grad_out = grad_out};
  if (status.ok()) status = flash_attention_backward(context, in, saved, grads, options);
  if (!status.ok()) return state.SkipWithError(status.message().c_str());

  test::Fraction f;
  for (auto _ : state) {
    f = test::measure_fraction(context, test::peak_kind(c.dtype), c.flops(),
                               [&] { status = flash_attention_backward(context, in, saved, grads, options); });
    state.SetIterationTime(f.call_seconds);
  }
  test::report(state, f);
  state.counters["scratch"] = static_cast<double>(context.workspace_bytes());
}

void register_case(const Case& c) {
  test::register_bench(c.name(), [c](benchmark::State& state) { run(state, c); });
}

}  // namespace
}  // namespace opst

int main(int argc, char** argv) {
  using opst::DType;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int64_t head_dim : {64, 128}) {
      for (const bool causal : {false, true}) {
        for (const int64_t n : {128, 512, 1024, 2048, 4096}) {
          for (const int threads : {1, 2}) {
            opst::register_case({dtype, 4, 4, n, head_dim, causal, threads});
            opst::register_case({dtype, 1, 1, n, head_dim, causal, threads});
          }
        }
      }
    }
    opst::register_case({dtype, 8, 2, 2048, 128, true, 1});
  }
  return opst::test::run_benches(argc, argv);
}

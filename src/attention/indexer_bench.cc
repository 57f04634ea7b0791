// lightning_indexer beside the machine's multiply-adds of the same length (testing/peak.h), on one thread.
//
//   of_peak   flops of the product, 2 * head_dim * visible pairs * num_heads, over the burst's
//
// 64 heads of 128 dimensions, 2048 of the keys selected: a prompt's chunk, a decoded token, and scores that rise with
// every key, so that every key is a candidate.
#include <string>
#include <utility>
#include <vector>

#include "opst/lightning_indexer.h"
#include "testing/bench.h"
#include "testing/random.h"

namespace opst {
namespace {

struct Case {
  DType dtype;
  int64_t queries, keys;
  int64_t heads = 64;
  bool rising = false;
  std::string name() const {
    return std::string("indexer/") + to_string(dtype) + "/heads" + std::to_string(heads) + "/q" +
           std::to_string(queries) + "_k" + std::to_string(keys) + (rising ? "/rising" : "");
  }
};

void run(benchmark::State& state, const Case& c) {
  constexpr int64_t kDim = 128, kCount = 2048;
  Result<Context> created = Context::create({.num_threads = 1});
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  Context& context = created.value();
  test::Random random(1);
  std::vector<Buffer> memory;
  const auto tensor = [&](DType dtype, std::initializer_list<int64_t> shape) {
    const int64_t elements = Tensor::contiguous(dtype, shape, nullptr).num_elements();
    memory.push_back(std::move(Buffer::allocate(elements * size_bytes(dtype)).value()));
    const Tensor t = memory.back().tensor(dtype, shape);
    test::fill(t, c.rising ? test::Fill::ones : test::Fill::normal, random);
    return t;
  };
  const Tensor query = tensor(c.dtype, {1, c.heads, c.queries, kDim}), key = tensor(c.dtype, {1, 1, c.keys, kDim});
  const Tensor weights = tensor(DType::f32, {1, c.heads, c.queries});
  const Tensor indices = tensor(DType::i32, {1, c.queries, 1, kCount});
  for (int64_t j = 0; c.rising && j < c.keys; ++j) {
    static_cast<float*>(key.data)[j * kDim] = 0.001f * static_cast<float>(j);
  }
  const LightningIndexerOptions options = {.causal = true};
  AttentionOptions mask;
  mask.causal = true;
  const double pairs = count_visible(mask, c.queries, c.keys).pairs;
  const double flops = 2.0 * static_cast<double>(kDim * c.heads) * pairs;
  Status status;
  for (auto _ : state) {
    const test::Fraction f = test::measure_fraction(context, test::peak_kind(c.dtype), flops, [&] {
      status =
          lightning_indexer(context, {.query = query, .key = key, .weights = weights}, {.indices = indices}, options);
    });
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    state.SetIterationTime(f.call_seconds);
    test::report(state, f);
  }
  const auto problem =
      lightning_indexer_problem({.query = query, .key = key, .weights = weights}, {.indices = indices}, options);
  if (problem.ok()) state.SetLabel(to_string(plan_lightning_indexer(problem.value(), context.machine())));
}

}  // namespace
}  // namespace opst

int main(int argc, char** argv) {
  using opst::DType;
  std::vector<opst::Case> cases;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    cases.push_back({dtype, 512, 8192});
    cases.push_back({dtype, 64, 65536});
    cases.push_back({dtype, 1, 65536});
    cases.push_back({dtype, 64, 65536, 16});
  }
  cases.push_back({DType::f32, 64, 65536, 64, true});
  for (const opst::Case& c : cases) {
    opst::test::register_bench(c.name(), [c](benchmark::State& state) { run(state, c); });
  }
  return opst::test::run_benches(argc, argv);
}

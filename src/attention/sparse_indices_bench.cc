// Attention by sparse indices beside plain reading of the selected rows and the machine's multiply-adds, on one thread.
//
//   of_reading   bytes of the selected keys and values, each once, per second, over the rate of reading the whole key
//                tensor from front to back (testing/peak.h)
//   of_peak      flops 2 * (head_dim + value_head_dim) * selected pairs * num_heads, over the burst's
//   of_bound     the larger share of the two: what would take longest
//
// 2048 random keys of 65536, 16 queries of each of four sequences with lists of their own, so that rows come from
// memory: multi-head latent attention, 512 + 64 columns whose first 512 are the values, with the rope in the keys' rows
// and apart; grouped heads with keys and values of 128; single keys, and blocks of 64.
#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "opst/attention.h"
#include "testing/bench.h"
#include "testing/random.h"

namespace opst {
namespace {

struct Case {
  DType dtype;
  int64_t heads, block;
  int64_t head_dim = 576, rope_dim = 0;  // 576: values are columns of the keys; else a tensor of their own
  std::string name() const {
    return std::string("sparse_indices/") + to_string(dtype) + "/d" + std::to_string(head_dim) + "/heads" +
           std::to_string(heads) + "/block" + std::to_string(block) + (rope_dim > 0 ? "/rope_apart" : "");
  }
};

void run(benchmark::State& state, const Case& c) {
  constexpr int64_t kBatch = 4, kQueries = 16, kKeys = 65536, kSelected = 2048;
  Result<Context> created = Context::create({.num_threads = 1});
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  Context& context = created.value();
  test::Random random(1);
  std::vector<Buffer> memory;
  const auto tensor = [&](DType dtype, std::initializer_list<int64_t> shape) {
    const int64_t elements = Tensor::contiguous(dtype, shape, nullptr).num_elements();
    memory.push_back(std::move(Buffer::allocate(elements * size_bytes(dtype)).value()));
    const Tensor t = memory.back().tensor(dtype, shape);
    if (dtype != DType::i32) test::fill(t, test::Fill::normal, random);
    return t;
  };
  const int64_t dim = c.head_dim - c.rope_dim, value_dim = c.head_dim == 576 ? 512 : c.head_dim;
  AttentionInputs in = {.query = tensor(c.dtype, {kBatch, c.heads, kQueries, dim}),
                        .key = tensor(c.dtype, {kBatch, 1, kKeys, dim}),
                        .value = {}};
  in.value = c.head_dim == 576 ? in.key.narrowed(3, 0, value_dim) : tensor(c.dtype, {kBatch, 1, kKeys, value_dim});
  if (c.rope_dim > 0) {
    in.query_rope = tensor(c.dtype, {kBatch, c.heads, kQueries, c.rope_dim});
    in.key_rope = tensor(c.dtype, {kBatch, 1, kKeys, c.rope_dim});
  }
  const int64_t count = kSelected / c.block;
  const Tensor indices = tensor(DType::i32, {kBatch, kQueries, 1, count});
  std::vector<int32_t> blocks(static_cast<size_t>(kKeys / c.block));
  std::iota(blocks.begin(), blocks.end(), 0);
  for (int64_t row = 0; row < kBatch * kQueries; ++row) {
    for (int64_t i = 0; i < count; ++i) {
      std::swap(blocks[static_cast<size_t>(i)],
                blocks[static_cast<size_t>(random.integer(i, static_cast<int64_t>(blocks.size()) - 1))]);
    }
    std::copy_n(blocks.begin(), count, static_cast<int32_t*>(indices.data) + row * count);
  }
  in.sparse_indices = {indices, c.block};
  const AttentionOutputs out = {tensor(c.dtype, {kBatch, c.heads, kQueries, value_dim})};

  const double rows = static_cast<double>(kBatch * kQueries * kSelected);
  const double flops = 2.0 * static_cast<double>((c.head_dim + value_dim) * c.heads) * rows;
  const int64_t columns = c.head_dim == 576 ? c.head_dim : c.head_dim + value_dim;
  const double bytes = rows * static_cast<double>(columns * size_bytes(c.dtype));
  Status status;
  for (auto _ : state) {
    const auto read = [&] {
      return test::measure_read_bandwidth(context, in.key.data, in.key.num_elements() * size_bytes(c.dtype));
    };
    const double before = read();
    const test::Fraction f = test::measure_fraction(context, test::peak_kind(c.dtype), flops,
                                                    [&] { status = flash_attention_forward(context, in, out); });
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    const double of_reading = bytes / f.call_seconds / ((before + read()) / 2);
    state.SetIterationTime(f.call_seconds);
    test::report(state, f);
    state.counters["GB/s"] = bytes / f.call_seconds / 1e9;
    state.counters["of_reading"] = of_reading;
    state.counters["of_bound"] = std::max(of_reading, f.fraction);
  }
  const Result<AttentionProblem> problem = attention_problem(in);
  if (problem.ok()) state.SetLabel(to_string(plan_attention(problem.value(), context.machine())));
}

}  // namespace
}  // namespace opst

int main(int argc, char** argv) {
  using opst::DType;
  std::vector<opst::Case> cases;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const int64_t block : {1, 64}) {
      for (const int64_t heads : {1, 4, 16, 32, 128}) cases.push_back({dtype, heads, block});
      cases.push_back({dtype, 8, block, 128});
    }
    cases.push_back({dtype, 16, 1, 576, 64});
    cases.push_back({dtype, 128, 1, 576, 64});
  }
  for (const opst::Case& c : cases) {
    opst::test::register_bench(c.name(), [c](benchmark::State& state) { run(state, c); });
  }
  return opst::test::run_benches(argc, argv);
}

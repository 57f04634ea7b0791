// One call for sequences of many lengths beside the calls of its parts, in turns within one run; chunks of prompts beside
// the same rows and keys in dense tensors; trees beside chains; multi-head latent attention.
//
//   mixed/...    of_parts: the time of the parts' calls, one after the other, over the one call's; 1 is as fast
//   chunk/...    512 queries at the end of 8192 keys, in norm and panel32 pages: of_dense is the share of the machine's
//                multiply-adds over that of the dense call of the same rows and keys
//   tree/...     8 queries of 8192 keys: of_chain, the time of the causal call over that of the tree's
//   shared/...   16 sequences of one query whose first 8192 keys are the same pages, and 64 keys of their own:
//                times_alone, the time of the call that shares nothing over that of the call that does;
//                times_of_own_pages, over it that of sequences with pages of their own
//   latent/...   head_dim 576 whose first 512 columns are the values: of_reading, of_peak, and of_bound, the larger
#include <algorithm>
#include <chrono>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/int_math.h"
#include "opst/attention.h"
#include "testing/bench.h"
#include "testing/random.h"

namespace opst {
namespace {

constexpr int64_t kBlock = 64;  // keys of a page

struct Sequence {
  int64_t queries, keys;
};

// A call of sequences in pages, whose blocks lie in any order, and parts of it.
class PagedCall {
 public:
  PagedCall(DType dtype, std::vector<Sequence> sequences, int64_t heads, int64_t kv_heads, int64_t head_dim,
            int64_t value_dim, bool values_of_keys, PageLayout layout)
      : sequences_(std::move(sequences)) {
    test::Random random(1);
    int64_t tokens = 0, blocks = 0;
    for (const Sequence& s : sequences_) {
      tokens += s.queries;
      blocks += ceil_div(s.keys, kBlock);
      columns_ = std::max(columns_, ceil_div(s.keys, kBlock));
    }
    const auto filled = [&](std::initializer_list<int64_t> shape) {
      const Tensor t = tensor(dtype, shape);
      test::fill(t, test::Fill::normal, random);
      return t;
    };
    in.query = filled({tokens, heads, head_dim});
    // Panels are filled as if they were rows: which number lies where does not matter to the time.
    const int64_t step = dtype == DType::bf16 ? 2 : 1;
    if (layout == PageLayout::panel32) {
      in.key = filled({blocks, kv_heads, kBlock / 32, head_dim / step, 32 * step});
      in.value = filled({blocks, kv_heads, kBlock / step, value_dim * step});
    } else {
      in.key = filled({blocks, kBlock, kv_heads, head_dim});
      in.value = values_of_keys ? in.key.narrowed(3, 0, value_dim) : filled({blocks, kBlock, kv_heads, value_dim});
    }
    out = tensor(dtype, {tokens, heads, value_dim});
    std::vector<int64_t> order(static_cast<size_t>(blocks));
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i) - 1))]);
    }
    table_.resize(sequences_.size() * static_cast<size_t>(columns_));
    size_t next = 0;
    for (size_t b = 0; b < sequences_.size(); ++b) {
      lengths_.push_back(sequences_[b].keys);
      for (int64_t i = 0; i < ceil_div(sequences_[b].keys, kBlock); ++i) {
        table_[b * static_cast<size_t>(columns_) + static_cast<size_t>(i)] = order[next++];
      }
    }
    options = {.causal = true, .page_layout = layout};
    whole = part(0, sequences_.size());
  }

  struct Part {
    AttentionInputs in;
    Tensor out;
    std::vector<int64_t> offsets;
  };
  // Sequences [first, end).
  Part part(size_t first, size_t end) const {
    Part p = {in, {}, {0}};
    int64_t start = 0;
    for (size_t b = 0; b < end; ++b) {
      if (b < first) {
        start += sequences_[b].queries;
      } else {
        p.offsets.push_back(p.offsets.back() + sequences_[b].queries);
      }
    }
    const auto count = static_cast<int64_t>(end - first);
    p.in.query = in.query.narrowed(0, start, p.offsets.back());
    p.out = out.narrowed(0, start, p.offsets.back());
    p.in.block_table =
        ConstTensor::contiguous(DType::i64, {count, columns_}, table_.data() + static_cast<int64_t>(first) * columns_);
    p.in.kv_lengths = ConstTensor::contiguous(DType::i64, {count}, lengths_.data() + first);
    return p;
  }
  // The first `keys` of all sequences become those of the first one.
  void share(int64_t keys) {
    for (size_t b = 1; b < sequences_.size(); ++b) {
      std::copy_n(table_.data(), keys / kBlock, table_.data() + static_cast<int64_t>(b) * columns_);
    }
  }
  Status run(Context& context, const Part& p) const {
    AttentionInputs inputs = p.in;
    inputs.cu_seqlens_q =
        ConstTensor::contiguous(DType::i64, {static_cast<int64_t>(p.offsets.size())}, p.offsets.data());
    return flash_attention_forward(context, inputs, {.out = p.out}, options);
  }
  Tensor tensor(DType dtype, std::initializer_list<int64_t> shape) {
    const int64_t elements = Tensor::contiguous(dtype, shape, nullptr).num_elements();
    memory_.push_back(std::move(Buffer::allocate(elements * size_bytes(dtype)).value()));
    return memory_.back().tensor(dtype, shape);
  }

  AttentionInputs in;
  Tensor out;
  AttentionOptions options;
  Part whole;

 private:
  std::vector<Sequence> sequences_;
  int64_t columns_ = 0;
  std::vector<int64_t> lengths_, table_;
  std::vector<Buffer> memory_;
};

template <class Call>
double seconds(const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
// Median seconds of the first call, and medians of the ratio of each of the others to it, in turns.
template <class... Others>
std::vector<double> in_turns(const std::function<void()>& first, const Others&... others) {
  constexpr int kTurns = 11;
  const std::function<void()> calls[] = {others...};
  std::vector<double> times;
  std::vector<std::vector<double>> ratios(sizeof...(others));
  first();
  for (int turn = 0; turn < kTurns; ++turn) {
    times.push_back(seconds(first));
    for (size_t i = 0; i < sizeof...(others); ++i) ratios[i].push_back(seconds(calls[i]) / times.back());
  }
  std::vector<double> medians = {test::quantile(times, 0.5)};
  for (const auto& ratio : ratios) medians.push_back(test::quantile(ratio, 0.5));
  return medians;
}

Result<Context> context_of(int threads) { return Context::create({.num_threads = threads}); }

// Twelve tokens that are decoded, a chunk of 512, four fresh prompts.
void run_mixed(benchmark::State& state, DType dtype, PageLayout layout, int threads) {
  Result<Context> created = context_of(threads);
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  Context& context = created.value();
  std::vector<Sequence> sequences;
  for (const int64_t keys : {512, 700, 1000, 1500, 2048, 3000, 4096, 5000, 8192, 8192, 12000, 32768}) {
    sequences.push_back({1, keys});
  }
  sequences.push_back({512, 8192});
  for (const int64_t n : {64, 100, 200, 300}) sequences.push_back({n, n});
  PagedCall call(dtype, sequences, 32, 8, 128, 128, false, layout);
  const PagedCall::Part decode = call.part(0, 12), chunk = call.part(12, 13), prompts = call.part(13, 17);
  Status status;
  const auto run = [&](const PagedCall::Part& part) { return [&] { status = call.run(context, part); }; };
  for (auto _ : state) {
    const auto m = in_turns(run(call.whole), run(decode), run(chunk), run(prompts));
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    state.SetIterationTime(m[0]);
    state.counters["of_parts"] = m[1] + m[2] + m[3];
    state.counters["decode"] = m[1];
    state.counters["chunk"] = m[2];
    state.counters["prompts"] = m[3];
  }
}

void run_chunk(benchmark::State& state, DType dtype, PageLayout layout) {
  Result<Context> created = context_of(1);
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  Context& context = created.value();
  constexpr int64_t kQueries = 512, kKeys = 8192, kHeads = 8, kKvHeads = 2, kDim = 128;
  PagedCall call(dtype, {{kQueries, kKeys}}, kHeads, kKvHeads, kDim, kDim, false, layout);
  test::Random random(2);
  const auto dense = [&](int64_t heads, int64_t rows) {
    const Tensor t = call.tensor(dtype, {1, heads, rows, kDim});
    test::fill(t, test::Fill::normal, random);
    return t;
  };
  const AttentionInputs in = {
      .query = dense(kHeads, kQueries), .key = dense(kKvHeads, kKeys), .value = dense(kKvHeads, kKeys)};
  const Tensor out = call.tensor(dtype, {1, kHeads, kQueries, kDim});
  const double pairs = count_visible({.causal = true}, kQueries, kKeys).pairs;
  const double flops = 4.0 * static_cast<double>(kDim * kHeads) * pairs;
  Status status;
  for (auto _ : state) {
    const test::Fraction paged =
        test::measure_fraction(context, test::peak_kind(dtype), flops, [&] { status = call.run(context, call.whole); });
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    const auto m = in_turns([&] { status = call.run(context, call.whole); },
                            [&] { status = flash_attention_forward(context, in, {.out = out}, {.causal = true}); });
    state.SetIterationTime(paged.call_seconds);
    test::report(state, paged);
    state.counters["of_dense"] = m[1];
  }
}

void run_tree(benchmark::State& state, DType dtype, int64_t heads) {
  Result<Context> created = context_of(1);
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  Context& context = created.value();
  PagedCall call(dtype, {{8, 8192}, {8, 8192}}, heads, 8, 128, 128, false, PageLayout::norm);
  const std::vector<int64_t> words = {1, 3, 5, 11, 19, 37, 75, 147, 1, 3, 5, 11, 19, 37, 75, 147};
  PagedCall::Part tree = call.whole;
  tree.in.tree_mask = ConstTensor::contiguous(DType::i64, {16}, words.data());
  Status status;
  for (auto _ : state) {
    const auto m = in_turns([&] { status = call.run(context, tree); }, [&] { status = call.run(context, call.whole); });
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    state.SetIterationTime(m[0]);
    state.counters["of_chain"] = m[1];
  }
}

void run_shared(benchmark::State& state, DType dtype, PageLayout layout, int64_t heads) {
  Result<Context> created = context_of(1);
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  Context& context = created.value();
  constexpr int64_t kShared = 8192, kKvHeads = 8;
  PagedCall call(dtype, std::vector<Sequence>(16, {1, kShared + 64}), heads, kKvHeads, 128, 128, false, layout);
  Status status;
  const auto run = [&](int64_t shared) {
    return [&, shared] {
      call.options.shared_prefix = shared;
      status = call.run(context, call.whole);
    };
  };
  const double elsewhere = in_turns(run(0))[0];
  call.share(kShared);
  for (auto _ : state) {
    const auto m = in_turns(run(kFindShared), run(0));
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    state.SetIterationTime(m[0]);
    state.counters["times_alone"] = m[1];
    state.counters["times_of_own_pages"] = elsewhere / m[0];
  }
}

void run_latent(benchmark::State& state, DType dtype, int64_t heads, int64_t queries) {
  Result<Context> created = context_of(1);
  if (!created.ok()) return state.SkipWithError(created.status().message().c_str());
  Context& context = created.value();
  constexpr int64_t kBatch = 4, kKeys = 32768, kDim = 576, kValueDim = 512;
  PagedCall call(dtype, std::vector<Sequence>(kBatch, {queries, kKeys}), heads, 1, kDim, kValueDim, true,
                 PageLayout::norm);
  const double pairs = static_cast<double>(kBatch) * count_visible({.causal = true}, queries, kKeys).pairs;
  const double flops = 2.0 * static_cast<double>((kDim + kValueDim) * heads) * pairs;
  const int64_t bytes = kBatch * kKeys * kDim * size_bytes(dtype);
  Status status;
  for (auto _ : state) {
    const double before = test::measure_read_bandwidth(context, call.in.key.data, bytes);
    const test::Fraction f =
        test::measure_fraction(context, test::peak_kind(dtype), flops, [&] { status = call.run(context, call.whole); });
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    const double reading = (before + test::measure_read_bandwidth(context, call.in.key.data, bytes)) / 2;
    const double of_reading = static_cast<double>(bytes) / f.call_seconds / reading;
    state.SetIterationTime(f.call_seconds);
    test::report(state, f);
    state.counters["of_reading"] = of_reading;
    state.counters["of_bound"] = std::max(of_reading, f.fraction);
  }
}

}  // namespace
}  // namespace opst

int main(int argc, char** argv) {
  using namespace opst;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const std::string name = to_string(dtype);
    for (const PageLayout layout : {PageLayout::norm, PageLayout::panel32}) {
      if (layout == PageLayout::panel32 && dtype == DType::f16) continue;  // no such pages
      const std::string of = name + (layout == PageLayout::norm ? "/norm" : "/panel32");
      for (const int threads : {1, 2}) {
        test::register_bench("mixed/" + of + "/threads" + std::to_string(threads),
                             [=](benchmark::State& state) { run_mixed(state, dtype, layout, threads); });
      }
      test::register_bench("chunk/" + of, [=](benchmark::State& state) { run_chunk(state, dtype, layout); });
      for (const int64_t heads : {8, 32, 64}) {
        test::register_bench("shared/" + of + "/heads" + std::to_string(heads),
                             [=](benchmark::State& state) { run_shared(state, dtype, layout, heads); });
      }
    }
    for (const int64_t heads : {8, 32}) {
      test::register_bench("tree/" + name + "/heads" + std::to_string(heads),
                           [=](benchmark::State& state) { run_tree(state, dtype, heads); });
    }
    for (const int64_t heads : {16, 128}) {
      for (const int64_t queries : {1, 4}) {
        test::register_bench("latent/" + name + "/heads" + std::to_string(heads) + "/queries" + std::to_string(queries),
                             [=](benchmark::State& state) { run_latent(state, dtype, heads, queries); });
      }
    }
  }
  return test::run_benches(argc, argv);
}

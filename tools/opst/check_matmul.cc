// opst check matmul: products, of one weight or of groups of rows, against their sums in float64.
#include <cstdio>

#include "bench.h"
#include "matmul_case.h"
#include "opst/grouped_matmul.h"
#include "product_bound.h"
#include "random_weights.h"
#include "testing/elements.h"

namespace opst::tools {

namespace {

constexpr int64_t kMostRows = 16, kMostColumns = 64;  // compared, of each group
constexpr int64_t kSpoilEvery = 256;

struct Options : GroupedArguments {
  bool spoil = false;
};

struct Operands {
  Buffer x_memory, scales_memory, out_memory;
  Tensor x, x_scales, out;

  Operands(const std::string& dtype, int64_t m, const MatmulShape& s, test::Random& random) {
    const DType io = x_dtype_of(dtype), result = io == DType::i8 ? DType::f32 : io;
    x_memory = value_or_fail(Buffer::allocate(m * s.k * size_bytes(io)));
    scales_memory = value_or_fail(Buffer::allocate(m * size_bytes(DType::f32)));
    out_memory = value_or_fail(Buffer::allocate(m * s.n * size_bytes(result)));
    x = x_memory.tensor(io, {m, s.k});
    x_scales = scales_memory.tensor(DType::f32, {m});
    out = out_memory.tensor(result, {m, s.n});
    for (int64_t i = 0; i < m * s.k; ++i) {
      test::set(x, i, io == DType::i8 ? static_cast<double>(random.integer(-127, 127)) : random.normal());
    }
    for (int64_t i = 0; i < m; ++i) test::set(x_scales, i, random.uniform(0.5, 2) / 127);
  }
};

void multiply(Context& context, const RandomWeights& weights, const std::vector<int64_t>& ends, const Operands& o) {
  const bool grouped = !ends.empty();
  const GroupList groups{ConstTensor::contiguous(DType::i64, {static_cast<int64_t>(ends.size())}, ends.data())};
  Status status;
  if (weights.integers()) {
    const PackedIntWeight weight = weights.pack_integers(context, grouped);
    status = grouped ? grouped_matmul(context, o.x, weight, groups, o.out, {.x_scales = o.x_scales})
                     : matmul(context, o.x, weight, o.out, {.x_scales = o.x_scales});
  } else {
    const PackedWeight weight = weights.pack(context, grouped);
    status = grouped ? grouped_matmul(context, o.x, weight, groups, o.out) : matmul(context, o.x, weight, o.out);
  }
  if (!status.ok()) run_error(status.message());
}

// Rows [begin, end) with the weight `values`.
void judge_rows(Judged& judged, const Operands& o, const std::vector<double>& values, int64_t begin, int64_t end) {
  const int64_t n = o.out.shape[1], k = o.x.shape[1];
  const bool integers = o.x.dtype == DType::i8;
  for_each_sample(end - begin, kMostRows, [&](int64_t in_group) {
    const int64_t i = begin + in_group;
    const std::vector<double> row = test::to_doubles(o.x.narrowed(0, i, 1));
    double largest = 0;
    for (const double v : row) largest = std::max(largest, std::fabs(v));
    const double scale = integers ? test::get(o.x_scales, i) : 1;
    for_each_sample(n, kMostColumns, [&](int64_t j) {
      double sum = 0, terms = 0, weights = 0;
      for (int64_t t = 0; t < k; ++t) {
        const double w = values[static_cast<size_t>(j * k + t)], product = row[static_cast<size_t>(t)] * w;
        sum += product, terms += std::fabs(product), weights += std::fabs(w);
      }
      // Sums of integers are exact: their scales round.
      const double rounded = test::epsilon(o.out.dtype) * std::fabs(sum * scale);
      const double of_sum = integers ? 4 * kRoundingF32 * std::fabs(sum) : sum_bound(k, terms, largest, weights);
      judged.take(test::get(o.out, i * n + j), sum * scale, of_sum * scale + rounded + 1e-30);
    });
  });
}

Judged check(Context& context, const std::string& dtype, const Options& options, const MatmulShape& s) {
  test::Random random(3);
  const std::vector<int64_t> ends = group_ends(options, s.m);
  const auto groups = static_cast<int64_t>(ends.size());
  const RandomWeights weights(dtype, std::max<int64_t>(1, groups), s.n, s.k, random);
  const Operands o(dtype, ends.empty() ? s.m : ends.back(), s, random);
  // The operator sees zeros where the judge sees x.
  std::vector<double> kept;
  const int64_t size = o.x.num_elements();
  for (int64_t i = 0; options.spoil && i < size; i += kSpoilEvery) {
    kept.push_back(test::get(o.x, i));
    test::set(o.x, i, 0);
  }
  multiply(context, weights, ends, o);
  for (size_t i = 0; i < kept.size(); ++i) test::set(o.x, static_cast<int64_t>(i) * kSpoilEvery, kept[i]);
  Judged judged;
  if (ends.empty()) judge_rows(judged, o, weights.values(context, 0), 0, s.m);
  for (int64_t e = 0; e < groups; ++e) {
    const int64_t begin = e == 0 ? 0 : ends[static_cast<size_t>(e - 1)], end = ends[static_cast<size_t>(e)];
    if (end > begin) judge_rows(judged, o, weights.values(context, e), begin, end);
  }
  return judged;
}

void run(const Options& options) {
  check_products(options);
  Context context = make_context(options.num_threads);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  bool all_ok = true;
  for_each_product(options, [&](const std::string& dtype, const MatmulShape& s) {
    const Judged judged = check(context, dtype, options, s);
    all_ok = all_ok && judged.ok();
    if (options.json) {
      rows.push_back({{"dtype", dtype},
                      {"m", s.m},
                      {"n", s.n},
                      {"k", s.k},
                      {"compared", judged.count},
                      {"wrong", judged.wrong},
                      {"error", judged.error},
                      {"bound", judged.bound},
                      {"ok", judged.ok()}});
      return;
    }
    char text[300];
    std::snprintf(
        text, sizeof(text), "%s  %s%s, %lld x %lld x %lld: %lld results, error %.2e (bound %.2e), %lld beyond\n",
        judged.ok() ? "ok  " : "FAIL", dtype.c_str(), group_words(options).c_str(), static_cast<long long>(s.m),
        static_cast<long long>(s.n), static_cast<long long>(s.k), static_cast<long long>(judged.count), judged.error,
        judged.bound, static_cast<long long>(judged.wrong));
    write_output(text);
  });
  if (options.json) write_json({{"machine", to_string(context.machine())}, {"ok", all_ok}, {"rows", rows}});
  if (!all_ok) run_error("the error exceeds its bound");
}

}  // namespace

void add_check_matmul(CLI::App& check) {
  auto options = std::make_shared<Options>();
  CLI::App* command = check.add_subcommand("matmul", "Compare products of random numbers with their sums in float64");
  add_matmul_options(*command, *options);
  add_group_options(*command, *options);
  command->add_flag("--spoil", options->spoil,
                    "Compute without one of every 256 values of x, so that the verdict must be FAIL: whether the check "
                    "notices");
  command->callback([options] {
    settle_groups(*options);
    run(*options);
  });
}

}  // namespace opst::tools

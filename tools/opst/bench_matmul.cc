// opst bench matmul: many rows beside the machine's multiply-adds, few rows beside plainly reading the weights.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>

#include "bench.h"
#include "matmul_case.h"
#include "opst/quant.h"
#include "testing/peak.h"
#include "testing/random.h"

namespace opst::tools {

namespace {

using Shape = MatmulShape;

// Up to here the time is that of reading the weight.
constexpr int64_t kFewRows = 8;
// Few rows: so many bytes of weights take turns that no cache holds them.
constexpr int64_t kRotationBytes = 256 << 20;

// Calls of one shape and dtype, each with its own weight.
struct Calls {
  struct Bytes {
    const void* data;
    int64_t size;
  };
  test::PeakKind peak = test::PeakKind::f32;
  std::vector<Bytes> weights = {};
  std::function<void(size_t)> run = {};  // with weight i
};

void require(const Status& status) {
  if (!status.ok()) run_error(status.message());
}

size_t num_weights(const Shape& s, int64_t weight_bytes) {
  if (s.m > kFewRows) return 1;
  return static_cast<size_t>((kRotationBytes + weight_bytes - 1) / std::max<int64_t>(1, weight_bytes));
}

// Weights of a float dtype, x and out of the same one; or of a quantised format, x and out f32.
Calls float_calls(Context& context, const std::string& dtype, const Shape& s) {
  struct State {
    Buffer x, out;
    Tensor x_view, out_view;
    std::vector<PackedWeight> weights;
  };
  const auto state = std::make_shared<State>();
  const QuantFormat format = parse_quant_format(dtype).value();
  const DType io = x_dtype_of(dtype);
  test::Random random(1);
  state->x = value_or_fail(Buffer::allocate(s.m * s.k * size_bytes(io)));
  state->out = value_or_fail(Buffer::allocate(s.m * s.n * size_bytes(io)));
  state->x_view = state->x.tensor(io, {s.m, s.k});
  state->out_view = state->out.tensor(io, {s.m, s.n});
  test::fill(state->x_view, test::Fill::normal, random);
  // The weight's bytes: normal numbers of a float type, else blocks of bytes whose halves are finite and small.
  const Buffer source = value_or_fail(Buffer::allocate(s.n * (s.k / block_values(format)) * block_bytes(format)));
  const int64_t size = source.size_bytes();
  if (block_values(format) == 1) {
    test::fill(source.tensor(format == QuantFormat::f32 ? DType::f32 : io, {s.n, s.k}), test::Fill::normal, random);
  } else {
    for (int64_t i = 0; i < size; ++i) {
      static_cast<unsigned char*>(source.data())[i] = static_cast<unsigned char>(random.bits() & 0x3f);
    }
  }
  Calls calls{.peak = io == DType::bf16 ? test::PeakKind::bf16 : test::PeakKind::f32};
  for (size_t i = 0; i < num_weights(s, size); ++i) {
    state->weights.push_back(
        value_or_fail(PackedWeight::pack(context, QuantMatrix{format, s.n, s.k, source.data(), size})));
    calls.weights.push_back({state->weights.back().data(), state->weights.back().size_bytes()});
  }
  calls.run = [&context, state](size_t i) {
    require(matmul(context, state->x_view, state->weights[i], state->out_view));
  };
  return calls;
}

// int8 or int4 weights with a scale per output; x int8 with a scale per row, out f32.
Calls integer_calls(Context& context, const std::string& dtype, const Shape& s) {
  struct State {
    Buffer x, x_scales, out;
    Tensor x_view, out_view;
    IntMatmulOptions options;
    std::vector<PackedIntWeight> weights;
  };
  const auto state = std::make_shared<State>();
  const bool bytes = dtype == "i8";
  test::Random random(1);
  state->x = value_or_fail(Buffer::allocate(s.m * s.k));
  state->x_scales = value_or_fail(Buffer::allocate(s.m * size_bytes(DType::f32)));
  state->out = value_or_fail(Buffer::allocate(s.m * s.n * size_bytes(DType::f32)));
  state->x_view = state->x.tensor(DType::i8, {s.m, s.k});
  state->out_view = state->out.tensor(DType::f32, {s.m, s.n});
  const Tensor x_scales = state->x_scales.tensor(DType::f32, {s.m});
  test::fill(state->x_view, test::Fill::uniform, random);
  test::fill(x_scales, test::Fill::normal, random);
  state->options.x_scales = x_scales;
  const int64_t row_bytes = bytes ? s.k : s.k / 2;
  const Buffer q = value_or_fail(Buffer::allocate(s.n * row_bytes));
  const Buffer scales = value_or_fail(Buffer::allocate(s.n * size_bytes(DType::f32)));
  IntMatrix matrix{q.tensor(bytes ? DType::i8 : DType::u8, {s.n, row_bytes}), scales.tensor(DType::f32, {s.n, 1})};
  test::fill(q.tensor(DType::u8, {s.n, row_bytes}), test::Fill::uniform, random);
  test::fill(scales.tensor(DType::f32, {s.n, 1}), test::Fill::normal, random);
  Calls calls{.peak = test::PeakKind::i8};
  for (size_t i = 0; i < num_weights(s, q.size_bytes()); ++i) {
    state->weights.push_back(value_or_fail(PackedIntWeight::pack(context, matrix)));
    calls.weights.push_back({state->weights.back().data(), state->weights.back().size_bytes()});
  }
  calls.run = [&context, state](size_t i) {
    require(matmul(context, state->x_view, state->weights[i], state->out_view, state->options));
  };
  return calls;
}

Calls make_calls(Context& context, const std::string& dtype, const Shape& s) {
  return is_integers(dtype) ? integer_calls(context, dtype, s) : float_calls(context, dtype, s);
}

struct Row {
  std::string dtype;
  Shape shape = {};
  double seconds = 0;
  double flops_per_second = 0, weight_bytes_per_second = 0;
  const char* bound = "";
  double bound_per_second = 0;  // flops or bytes
  double fraction = 0, fraction_q1 = 0, fraction_q3 = 0;
  bool valid = true;
};

void measure_few_rows(Context& context, const Calls& calls, Row& row) {
  constexpr int kPairs = 11;
  using Clock = std::chrono::steady_clock;
  double bytes = 0;
  for (const Calls::Bytes& weight : calls.weights) bytes += static_cast<double>(weight.size);
  const auto read_seconds = [&] {
    double seconds = 0;
    for (const Calls::Bytes& weight : calls.weights) {
      seconds += static_cast<double>(weight.size) / test::measure_read_bandwidth(context, weight.data, weight.size);
    }
    return seconds;
  };
  calls.run(0);
  std::vector<double> seconds, reads = {read_seconds()}, fractions;
  for (int pair = 0; pair < kPairs; ++pair) {
    const auto start = Clock::now();
    for (size_t i = 0; i < calls.weights.size(); ++i) calls.run(i);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    reads.push_back(read_seconds());
    fractions.push_back((reads[reads.size() - 2] + reads.back()) / 2 / seconds.back());
  }
  row.seconds = test::quantile(seconds, 0.5) / static_cast<double>(calls.weights.size());
  row.bound = "plain reading";
  row.bound_per_second = bytes / test::quantile(reads, 0.5);
  row.fraction = test::quantile(fractions, 0.5);
  row.fraction_q1 = test::quantile(fractions, 0.25), row.fraction_q3 = test::quantile(fractions, 0.75);
}

Row measure(Context& context, const std::string& dtype, const Shape& s) {
  Row row{.dtype = dtype, .shape = s};
  const double flops = 2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k);
  const Calls calls = make_calls(context, dtype, s);
  if (s.m <= kFewRows) {
    measure_few_rows(context, calls, row);
  } else {
    const test::Fraction f = test::measure_fraction(context, calls.peak, flops, [&] { calls.run(0); });
    row.seconds = f.call_seconds;
    row.bound = "multiply-adds";
    row.bound_per_second = f.peak_flops_per_second;
    row.fraction = f.fraction, row.fraction_q1 = f.fraction_q1, row.fraction_q3 = f.fraction_q3;
    row.valid = f.valid;
  }
  row.flops_per_second = flops / row.seconds;
  row.weight_bytes_per_second = static_cast<double>(calls.weights[0].size) / row.seconds;
  return row;
}

void print_row(const Row& row) {
  char text[300];
  const bool few = row.shape.m <= kFewRows;
  std::snprintf(text, sizeof(text),
                "%-5s %6lld %6lld %6lld  %10.3f  %9.1f %7.1f  %6.1f %% (%.1f to %.1f)%s  %8.1f %s\n", row.dtype.c_str(),
                static_cast<long long>(row.shape.m), static_cast<long long>(row.shape.n),
                static_cast<long long>(row.shape.k), row.seconds * 1e3, row.flops_per_second / 1e9,
                row.weight_bytes_per_second / 1e9, row.fraction * 100, row.fraction_q1 * 100, row.fraction_q3 * 100,
                row.valid ? " " : "*", row.bound_per_second / 1e9, few ? "GB/s of reading" : "GFLOP/s");
  write_output(text);
}

nlohmann::ordered_json to_json(const Row& row) {
  return {{"dtype", row.dtype},
          {"m", row.shape.m},
          {"n", row.shape.n},
          {"k", row.shape.k},
          {"ms", row.seconds * 1e3},
          {"gflops", row.flops_per_second / 1e9},
          {"weight_gb_per_s", row.weight_bytes_per_second / 1e9},
          {"bound", row.bound},
          {"bound_per_s", row.bound_per_second},
          {"fraction", row.fraction},
          {"fraction_quartiles", {row.fraction_q1, row.fraction_q3}},
          {"valid", row.valid}};
}

void run(const MatmulArguments& options) {
  check_products(options);
  Context context = make_context(options.num_threads);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  bool all_valid = true;
  if (!options.json) {
    char text[300];
    std::snprintf(text, sizeof(text),
                  "matmul, packed weights, %d thread(s), %s\n\n%-5s %6s %6s %6s  %10s  %9s %7s  %26s  %17s\n",
                  context.num_threads(), to_string(context.machine()).c_str(), "dtype", "m", "n", "k", "ms", "GFLOP/s",
                  "GB/s", "of the bound (quartiles)", "bound");
    write_output(text);
  }
  for_each_product(options, [&](const std::string& dtype, const Shape& shape) {
    const Row row = measure(context, dtype, shape);
    all_valid = all_valid && row.valid;
    if (options.json) {
      rows.push_back(to_json(row));
    } else {
      print_row(row);
    }
  });
  if (options.json) {
    write_json({{"machine", to_string(context.machine())}, {"threads", context.num_threads()}, {"rows", rows}});
    return;
  }
  write_output("\nGB/s: of the weight. Bound: up to " + std::to_string(kFewRows) + " rows, plainly reading the same " +
               std::to_string(kRotationBytes >> 20) +
               " MB of weights, which take turns; beyond, multiply-adds of the\nsame length. Same threads, in turns; "
               "medians\n");
  if (!all_valid) write_output("* the reference bursts did not have the machine to themselves\n");
}

}  // namespace

void add_bench_matmul(CLI::App& bench) {
  auto options = std::make_shared<MatmulArguments>();
  CLI::App* command =
      bench.add_subcommand("matmul", "Products with packed weights, and how close they come to the machine");
  add_matmul_options(*command, *options);
  command->callback([options] { run(*options); });
}

}  // namespace opst::tools

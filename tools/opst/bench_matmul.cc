// opst bench matmul: many rows beside the machine's multiply-adds, few rows beside plainly reading the weights.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <optional>

#include "bench.h"
#include "matmul_case.h"
#include "model_options.h"
#include "opst/grouped_matmul.h"
#include "random_weights.h"
#include "testing/peak.h"
#include "time_model.h"

namespace opst::tools {

namespace {

using Shape = MatmulShape;

struct Options : GroupedArguments {
  std::string activations = "exact";
  bool predict = false;
};

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
  int64_t rows = 0;
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

// What the calls of one shape share; with groups each weight is a stack.
template <class Weight>
struct State {
  std::vector<int64_t> ends;
  Buffer x, x_scales, out;
  Tensor x_view, x_scales_view, out_view;
  std::vector<Weight> weights;

  State(const Options& options, const Shape& s, DType x_type, DType out_type) : ends(group_ends(options, s.m)) {
    const int64_t m = rows(s);
    x = value_or_fail(Buffer::allocate(m * s.k * size_bytes(x_type)));
    out = value_or_fail(Buffer::allocate(m * s.n * size_bytes(out_type)));
    x_view = x.tensor(x_type, {m, s.k});
    out_view = out.tensor(out_type, {m, s.n});
  }
  int64_t rows(const Shape& s) const { return ends.empty() ? s.m : ends.back(); }
  GroupList groups() const {
    return {ConstTensor::contiguous(DType::i64, {static_cast<int64_t>(ends.size())}, ends.data())};
  }
  // A weight for each turn; with groups a stack of copies.
  void pack(Context& context, const RandomWeights& source, const Shape& s, Calls& calls) {
    const auto groups = static_cast<int64_t>(ends.size());
    const size_t count = num_weights(s, source.matrix_bytes() * std::max<int64_t>(1, groups));
    for (size_t i = 0; i < count; ++i) {
      if constexpr (std::is_same_v<Weight, PackedWeight>) {
        weights.push_back(source.pack(context, groups > 0, groups));
      } else {
        weights.push_back(source.pack_integers(context, groups > 0, groups));
      }
      calls.weights.push_back({weights.back().data(), weights.back().size_bytes() / std::max<int64_t>(1, groups) *
                                                          (groups == 0 ? 1 : touched())});
    }
  }
  // Groups with rows, whose weights alone are read.
  int64_t touched() const {
    int64_t count = 0;
    for (size_t e = 0; e < ends.size(); ++e) count += ends[e] > (e == 0 ? 0 : ends[e - 1]);
    return count;
  }
};

// Weights of a float dtype, x and out of the same one; or of a quantised format, x and out f32. int8 activations round
// x in blocks of 32, where the weight is quantised: the bound of many rows is that of int8 then.
Calls float_calls(Context& context, const std::string& dtype, const Options& options, const Shape& s) {
  const DType io = x_dtype_of(dtype);
  test::Random random(1);
  const auto state = std::make_shared<State<PackedWeight>>(options, s, io, io);
  test::fill(state->x_view, test::Fill::normal, random);
  const ActivationType activations = activation_type(options.activations);
  Calls calls{.peak = activations == ActivationType::int8 ? test::PeakKind::i8
                      : io == DType::bf16                 ? test::PeakKind::bf16
                                                          : test::PeakKind::f32,
              .rows = state->rows(s)};
  state->pack(context, RandomWeights(dtype, 1, s.n, s.k, random), s, calls);
  calls.run = [&context, state, activations](size_t i) {
    require(state->ends.empty()
                ? matmul(context, state->x_view, state->weights[i], state->out_view, {.activations = activations})
                : grouped_matmul(context, state->x_view, state->weights[i], state->groups(), state->out_view,
                                 {.activations = activations}));
  };
  return calls;
}

// int8 or int4 weights with a scale per output; x int8 with a scale per row, out f32.
Calls integer_calls(Context& context, const std::string& dtype, const Options& options, const Shape& s) {
  const auto state = std::make_shared<State<PackedIntWeight>>(options, s, DType::i8, DType::f32);
  test::Random random(1);
  const int64_t m = state->rows(s);
  state->x_scales = value_or_fail(Buffer::allocate(m * size_bytes(DType::f32)));
  state->x_scales_view = state->x_scales.tensor(DType::f32, {m});
  test::fill(state->x_view, test::Fill::uniform, random);
  test::fill(state->x_scales_view, test::Fill::normal, random);
  Calls calls{.peak = test::PeakKind::i8, .rows = m};
  state->pack(context, RandomWeights(dtype, 1, s.n, s.k, random), s, calls);
  calls.run = [&context, state](size_t i) {
    const Tensor& x = state->x_view;
    const Tensor& x_scales = state->x_scales_view;
    require(state->ends.empty() ? matmul(context, x, state->weights[i], state->out_view, {.x_scales = x_scales})
                                : grouped_matmul(context, x, state->weights[i], state->groups(), state->out_view,
                                                 {.x_scales = x_scales}));
  };
  return calls;
}

Calls make_calls(Context& context, const std::string& dtype, const Options& options, const Shape& s) {
  return is_integers(dtype) ? integer_calls(context, dtype, options, s) : float_calls(context, dtype, options, s);
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
  std::optional<TimePrediction> predicted = {};
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

Row measure(Context& context, const std::string& dtype, const Options& options, const Shape& s) {
  Row row{.dtype = dtype, .shape = s};
  const Calls calls = make_calls(context, dtype, options, s);
  const double flops = 2.0 * static_cast<double>(calls.rows) * static_cast<double>(s.n) * static_cast<double>(s.k);
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
  if (row.predicted) {
    const double seconds = row.predicted->seconds();
    char predicted[64];
    std::snprintf(predicted, sizeof(predicted), "  %10.3f %+6.1f %%\n", seconds * 1e3,
                  (seconds / row.seconds - 1) * 100);
    text[std::strlen(text) - 1] = '\0';
    write_output(std::string(text) + predicted);
    return;
  }
  write_output(text);
}

nlohmann::ordered_json to_json(const Row& row) {
  nlohmann::ordered_json json = {{"dtype", row.dtype},
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
  if (row.predicted) {
    add_to_json(json, *row.predicted, row.seconds);
  }
  return json;
}

// From the machine's rates: its cores as fast as the bursts beside the call; for few rows, whose weights take turns, its
// memory as fast as the reading beside it.
std::optional<TimePrediction> predict(const MachineProfile& machine, const Row& row) {
  const MatmulProblem problem = matmul_case(row.dtype, row.shape);
  if (row.shape.m > kFewRows) {
    return predict_matmul(problem, machine.with_cores(row.bound_per_second / machine.matrix_rate(problem.x_dtype)));
  }
  MachineProfile now = machine;
  now.levels.back().read.value = row.bound_per_second;
  return predict_matmul(problem, now, kRotationBytes);
}

void check_predicted(const Options& options) {
  if (!group_words(options).empty()) usage_error("--predict knows single products, no groups");
  for (const std::string& dtype : options.dtypes) {
    if (dtype != "f32" && dtype != "bf16") usage_error("--predict knows weights of f32 and bf16; got " + dtype);
  }
}

void check_activations(const Options& options) {
  if (options.activations == "exact") return;
  if (options.predict) usage_error("--predict knows no --activations int8");
  for (const std::string& dtype : options.dtypes) {
    if (is_integers(dtype) || block_values(parse_quant_format(dtype).value()) == 1) {
      usage_error("--activations int8 is for weights of a quantised format (q8_0, q4_k, ...); got " + dtype);
    }
  }
}

void run(const Options& options) {
  check_products(options);
  check_activations(options);
  if (options.predict) check_predicted(options);
  Context context = make_context(options.num_threads);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  bool all_valid = true;
  std::optional<MachineProfile> machine;
  if (options.predict) machine = measure_machine(context);
  const std::string groups =
      group_words(options) + (options.activations == "exact" ? "" : ", x rounded to " + options.activations);
  if (!options.json) {
    char text[400];
    std::snprintf(text, sizeof(text),
                  "matmul, packed weights%s, %d thread(s), %s\n\n%-5s %6s %6s %6s  %10s  %9s %7s  %26s  %17s%s\n",
                  groups.c_str(), context.num_threads(), to_string(context.machine()).c_str(), "dtype", "m", "n", "k",
                  "ms", "GFLOP/s", "GB/s", "of the bound (quartiles)", "bound",
                  options.predict ? "      predicted    off" : "");
    write_output(text);
  }
  for_each_product(options, [&](const std::string& dtype, const Shape& shape) {
    Row row = measure(context, dtype, options, shape);
    if (machine) row.predicted = predict(*machine, row);
    all_valid = all_valid && row.valid;
    if (options.json) {
      rows.push_back(to_json(row));
    } else {
      print_row(row);
    }
  });
  if (options.json) {
    write_json({{"machine", to_string(context.machine())},
                {"threads", context.num_threads()},
                {"groups", options.rows.empty() ? options.groups : static_cast<int64_t>(options.rows.size())},
                {"ragged", options.ragged},
                {"activations", options.activations},
                {"rows", rows}});
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
  auto options = std::make_shared<Options>();
  CLI::App* command =
      bench.add_subcommand("matmul", "Products with packed weights, and how close they come to the machine");
  add_matmul_options(*command, *options);
  add_group_options(*command, *options);
  add_activations_option(*command, options->activations);
  command->add_flag("--predict", options->predict, "Also predict the time, from the machine's rates");
  command->callback([options] {
    settle_groups(*options);
    run(*options);
  });
}

}  // namespace opst::tools

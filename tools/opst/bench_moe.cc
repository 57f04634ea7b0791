// opst bench moe: each step of a mixture's layer, and the one call for all of them, beside what bounds it.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>

#include "bench.h"
#include "moe_layer_case.h"
#include "testing/peak.h"

namespace opst::tools {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPairs = 11;
constexpr int64_t kFewRows = 8;  // of an expert, on average: the time is that of reading the weights

struct Row {
  const char* step = "";
  const char* bound = "";
  double seconds = 0, bound_seconds = 0;
  // Of the pairs' fractions.
  double fraction = 0, fraction_q1 = 0, fraction_q3 = 0;
  bool valid = true;
};

double timed(const std::function<void()>& call) {
  const auto start = Clock::now();
  call();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A call between two runs of its bound, in turns.
Row beside(const char* step, const char* bound, const std::function<void()>& call,
           const std::function<double()>& bound_seconds) {
  call();
  std::vector<double> seconds, bounds = {bound_seconds()}, fractions;
  for (int pair = 0; pair < kPairs; ++pair) {
    seconds.push_back(timed(call));
    bounds.push_back(bound_seconds());
    fractions.push_back((bounds[bounds.size() - 2] + bounds.back()) / 2 / seconds.back());
  }
  return {.step = step,
          .bound = bound,
          .seconds = test::quantile(seconds, 0.5),
          .bound_seconds = test::quantile(bounds, 0.5),
          .fraction = test::quantile(fractions, 0.5),
          .fraction_q1 = test::quantile(fractions, 0.25),
          .fraction_q3 = test::quantile(fractions, 0.75)};
}

// Steps that compute little: a plain copy of what they read and write, divided among the same threads.
Row beside_copy(Context& context, const char* step, int64_t bytes, const std::function<void()>& call) {
  const Buffer from = value_or_fail(Buffer::allocate(bytes)), to = value_or_fail(Buffer::allocate(bytes));
  std::memset(from.data(), 1, static_cast<size_t>(bytes));
  return beside(step, "plain copy", call,
                [&] { return test::measure_copy_seconds(context, from.data(), to.data(), bytes); });
}

// Of the experts that have any.
bool few_rows(const MoeCase& data) { return data.slots() <= kFewRows * std::max<int64_t>(1, data.touched_experts()); }

// few: weights of so many bytes are read for few rows each.
Row products(Context& context, const MoeCase& data, bool few, const char* step, const std::function<void()>& call,
             double flops, int64_t weight_bytes) {
  if (few) {
    const Buffer weights = value_or_fail(Buffer::allocate(std::max<int64_t>(1, weight_bytes)));
    std::memset(weights.data(), 1, static_cast<size_t>(weights.size_bytes()));
    return beside(step, "plain reading", call, [&] {
      return static_cast<double>(weight_bytes) /
             test::measure_read_bandwidth(context, weights.data(), weights.size_bytes());
    });
  }
  const test::PeakKind kind = data.integers()               ? test::PeakKind::i8
                              : data.x.dtype == DType::bf16 ? test::PeakKind::bf16
                                                            : test::PeakKind::f32;
  const test::Fraction f = test::measure_fraction(context, kind, flops, call);
  return {.step = step,
          .bound = "multiply-adds",
          .seconds = f.call_seconds,
          .bound_seconds = flops / f.peak_flops_per_second,
          .fraction = f.fraction,
          .fraction_q1 = f.fraction_q1,
          .fraction_q3 = f.fraction_q3,
          .valid = f.valid};
}

struct Options : MoeArguments {
  bool backward = false;
};

// Median and quartiles.
struct Ratio {
  double median = 0, q1 = 0, q3 = 0;
  explicit Ratio(const std::vector<double>& values)
      : median(test::quantile(values, 0.5)), q1(test::quantile(values, 0.25)), q3(test::quantile(values, 0.75)) {}
};

// One call beside other ways to the same, in turns.
struct Beside {
  Ratio over_steps,
      of_products;  // its time over that of the steps; the time of its grouped products alone over its own
};

Beside beside_steps(const std::function<void()>& call, const std::function<void()>& steps,
                    const std::function<void()>& products) {
  std::vector<double> over_steps, of_products;
  for (int turn = 0; turn <= kPairs; ++turn) {
    const double of_call = timed(call), of_steps = timed(steps), alone = timed(products);
    if (turn == 0) continue;  // memory that is new
    over_steps.push_back(of_call / of_steps);
    of_products.push_back(alone / of_call);
  }
  return {Ratio(over_steps), Ratio(of_products)};
}

struct Measured {
  std::vector<Row> rows;
  double steps_seconds = 0;  // of the row "steps", which the shares are of
  Beside layer;
  std::optional<Ratio> backward_products;
};

std::vector<Row> measure_steps(Context& context, const MoeCase& data) {
  const auto bytes = [](std::initializer_list<Tensor> tensors) {
    int64_t sum = 0;
    for (const Tensor& t : tensors) sum += t.num_elements() * size_bytes(t.dtype);
    return sum / 2;  // a copy reads and writes each byte
  };
  const auto call = [&](void (MoeCase::*step)(Context&) const) { return [&, step] { (data.*step)(context); }; };
  const double flops = data.flops() - data.shared_flops();
  const int64_t weight_bytes = data.touched_bytes() - data.shared_bytes();
  const bool few = few_rows(data);
  std::vector<Row> rows;
  rows.push_back(
      beside_copy(context, "gating", bytes({data.logits, data.ids, data.topk_weights}), call(&MoeCase::gate)));
  rows.push_back(
      beside_copy(context, "routing", bytes({data.ids, data.row_of_slot, data.slot_of_row}), call(&MoeCase::route)));
  if (data.integers()) {
    rows.push_back(
        beside_copy(context, "quantise", bytes({data.x, data.x_int8, data.x_scales}), call(&MoeCase::quantise)));
  }
  rows.push_back(beside_copy(context, "permute", bytes({data.expanded, data.expanded}), call(&MoeCase::permute)));
  rows.push_back(
      products(context, data, few, "gate/up", call(&MoeCase::multiply_gate_up), flops * 2 / 3, weight_bytes * 2 / 3));
  rows.push_back(products(context, data, few, "down", call(&MoeCase::multiply_down), flops / 3, weight_bytes / 3));
  if (data.has_shared()) {
    rows.push_back(products(context, data, data.tokens() <= kFewRows, "shared", call(&MoeCase::multiply_shared),
                            data.shared_flops(), data.shared_bytes()));
  }
  rows.push_back(beside_copy(context, "finalize", bytes({data.every_out, data.out}), call(&MoeCase::finalize)));
  rows.push_back(products(context, data, few, "steps", call(&MoeCase::run), data.flops(), data.touched_bytes()));
  return rows;
}

Measured measure(Context& context, const MoeCase& data, bool backward) {
  data.run(context);  // every step has what it reads
  const MoeLayerCase layer(data, backward);
  std::vector<Row> rows = measure_steps(context, data);
  const double steps_seconds = rows.back().seconds;
  const auto forward = [&] { layer.forward(context); };
  rows.push_back(products(context, data, few_rows(data), "layer", forward, data.flops(), data.touched_bytes()));
  const Beside beside = beside_steps(
      forward, [&] { data.run(context); },
      [&] {
        data.multiply_gate_up(context);
        data.multiply_down(context);
        data.multiply_shared(context);
      });
  Measured measured{.rows = std::move(rows), .steps_seconds = steps_seconds, .layer = beside, .backward_products = {}};
  if (!backward) return measured;
  const auto gradients = [&] { layer.backward(context); };
  measured.rows.push_back(
      products(context, data, false, "backward", gradients, layer.backward_flops(), data.touched_bytes()));
  measured.backward_products = beside_steps(
                                   gradients, [&] { data.run(context); }, [&] { layer.multiply_backward(context); })
                                   .of_products;
  return measured;
}

std::string text_of(const Ratio& r, double factor, const char* form) {
  char text[100];
  std::snprintf(text, sizeof(text), form, r.median * factor, r.q1 * factor, r.q3 * factor);
  return text;
}

void print_rows(const MoeCase& data, const Measured& measured, bool& all_valid) {
  for (const Row& row : measured.rows) {
    char text[300];
    std::snprintf(text, sizeof(text), "%-5s %7lld  %-8s  %10.4f  %6.1f %%  %6.1f %% (%.1f to %.1f)%s of %s\n",
                  data.dtype.c_str(), static_cast<long long>(data.tokens()), row.step, row.seconds * 1e3,
                  row.seconds / measured.steps_seconds * 100, row.fraction * 100, row.fraction_q1 * 100,
                  row.fraction_q3 * 100, row.valid ? " " : "*", row.bound);
    write_output(text);
    all_valid = all_valid && row.valid;
  }
  const char* const percent = "%.1f %% (%.1f to %.1f)";
  std::string line = "layer: " + text_of(measured.layer.over_steps, 1, "%.3f (%.3f to %.3f)") +
                     " of the time of the steps; its products alone take " +
                     text_of(measured.layer.of_products, 100, percent) + " of its time";
  if (measured.backward_products) {
    line += ", those of backward " + text_of(*measured.backward_products, 100, percent);
  }
  write_output(line + "\n");
}

nlohmann::ordered_json to_json(const MoeCase& data, const Measured& measured) {
  nlohmann::ordered_json steps = nlohmann::ordered_json::array();
  double layer_seconds = 0;
  for (const Row& row : measured.rows) {
    if (std::strcmp(row.step, "layer") == 0) layer_seconds = row.seconds;
    steps.push_back({{"step", row.step},
                     {"ms", row.seconds * 1e3},
                     {"of_steps", row.seconds / measured.steps_seconds},
                     {"bound", row.bound},
                     {"bound_ms", row.bound_seconds * 1e3},
                     {"fraction", row.fraction},
                     {"fraction_quartiles", {row.fraction_q1, row.fraction_q3}},
                     {"valid", row.valid}});
  }
  const auto three = [](const Ratio& r) { return nlohmann::ordered_json{r.q1, r.median, r.q3}; };
  nlohmann::ordered_json result = {{"dtype", data.dtype},
                                   {"tokens", data.tokens()},
                                   {"touched_experts", data.touched_experts()},
                                   {"touched_bytes", data.touched_bytes()},
                                   {"gflops", data.flops() / layer_seconds / 1e9},
                                   {"layer_over_steps", three(measured.layer.over_steps)},
                                   {"products_of_layer", three(measured.layer.of_products)},
                                   {"steps", steps}};
  if (measured.backward_products) result["products_of_backward"] = three(*measured.backward_products);
  return result;
}

void run(const Options& a) {
  check_moe_arguments(a);
  check_moe_backward(a, a.backward);
  Context context = make_context(a.num_threads);
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  bool all_valid = true;
  if (!a.json) {
    char text[400];
    std::snprintf(
        text, sizeof(text),
        "moe, %lld of %lld experts, hidden %lld, intermediate %lld%s, %d thread(s), %s\n\n%-5s %7s  %-8s  %10s  "
        "%8s  %s\n",
        static_cast<long long>(a.top_k), static_cast<long long>(a.experts), static_cast<long long>(a.hidden),
        static_cast<long long>(a.intermediate), a.shared > 0 ? (", shared " + std::to_string(a.shared)).c_str() : "",
        context.num_threads(), to_string(context.machine()).c_str(), "dtype", "tokens", "step", "ms", "of steps",
        "of the bound (quartiles)");
    write_output(text);
  }
  for (const std::string& dtype : a.dtypes) {
    for (const int64_t tokens : a.tokens) {
      const MoeCase data(context, a, dtype, tokens);
      const Measured measured = measure(context, data, a.backward);
      if (a.json) {
        results.push_back(to_json(data, measured));
      } else {
        print_rows(data, measured, all_valid);
      }
    }
  }
  if (a.json) {
    write_json({{"machine", to_string(context.machine())},
                {"threads", context.num_threads()},
                {"experts", a.experts},
                {"top_k", a.top_k},
                {"hidden", a.hidden},
                {"intermediate", a.intermediate},
                {"shared", a.shared},
                {"rows", results}});
    return;
  }
  write_output("\nsteps: all of them in turn; layer: the one call that stands for them. Bound of products: up to " +
               std::to_string(kFewRows) +
               " rows an expert, plainly reading the weights of the experts that have rows; beyond,\nmultiply-adds of "
               "the same length. Bound of the others: a plain copy of what they read and write. Same threads, in "
               "turns;\nmedians\n");
  if (!all_valid) write_output("* the reference bursts did not have the machine to themselves\n");
}

}  // namespace

void add_bench_moe(CLI::App& bench) {
  auto arguments = std::make_shared<Options>();
  CLI::App* command = bench.add_subcommand(
      "moe", "The steps of a mixture of experts and the one call for them, and how close they come to the machine");
  add_moe_options(*command, *arguments);
  add_moe_backward_option(*command, arguments->backward);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace opst::tools

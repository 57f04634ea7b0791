// opst bench moe: each step of a mixture's layer beside what bounds it.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>

#include "bench.h"
#include "moe_case.h"
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

Row products(Context& context, const MoeCase& data, const char* step, const std::function<void()>& call, double flops,
             int64_t weight_bytes) {
  const int64_t experts = std::max<int64_t>(1, data.touched_experts());
  if (data.slots() <= kFewRows * experts) {
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

std::vector<Row> measure(Context& context, const MoeCase& data) {
  data.run(context);  // every step has what it reads
  const auto bytes = [](std::initializer_list<Tensor> tensors) {
    int64_t sum = 0;
    for (const Tensor& t : tensors) sum += t.num_elements() * size_bytes(t.dtype);
    return sum / 2;  // a copy reads and writes each byte
  };
  const auto call = [&](void (MoeCase::*step)(Context&) const) { return [&, step] { (data.*step)(context); }; };
  const double flops = data.flops();
  const int64_t weight_bytes = data.touched_bytes();
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
      products(context, data, "gate/up", call(&MoeCase::multiply_gate_up), flops * 2 / 3, weight_bytes * 2 / 3));
  rows.push_back(products(context, data, "down", call(&MoeCase::multiply_down), flops / 3, weight_bytes / 3));
  rows.push_back(beside_copy(context, "finalize", bytes({data.expert_out, data.out}), call(&MoeCase::finalize)));
  rows.push_back(products(context, data, "layer", call(&MoeCase::run), flops, weight_bytes));
  return rows;
}

void print_rows(const MoeCase& data, const std::vector<Row>& rows, bool& all_valid) {
  for (const Row& row : rows) {
    char text[300];
    std::snprintf(text, sizeof(text), "%-5s %7lld  %-8s  %10.4f  %6.1f %%  %6.1f %% (%.1f to %.1f)%s of %s\n",
                  data.dtype.c_str(), static_cast<long long>(data.tokens()), row.step, row.seconds * 1e3,
                  row.seconds / rows.back().seconds * 100, row.fraction * 100, row.fraction_q1 * 100,
                  row.fraction_q3 * 100, row.valid ? " " : "*", row.bound);
    write_output(text);
    all_valid = all_valid && row.valid;
  }
}

nlohmann::ordered_json to_json(const MoeCase& data, const std::vector<Row>& rows) {
  nlohmann::ordered_json steps = nlohmann::ordered_json::array();
  for (const Row& row : rows) {
    steps.push_back({{"step", row.step},
                     {"ms", row.seconds * 1e3},
                     {"of_layer", row.seconds / rows.back().seconds},
                     {"bound", row.bound},
                     {"bound_ms", row.bound_seconds * 1e3},
                     {"fraction", row.fraction},
                     {"fraction_quartiles", {row.fraction_q1, row.fraction_q3}},
                     {"valid", row.valid}});
  }
  return {{"dtype", data.dtype},
          {"tokens", data.tokens()},
          {"touched_experts", data.touched_experts()},
          {"touched_bytes", data.touched_bytes()},
          {"gflops", data.flops() / rows.back().seconds / 1e9},
          {"steps", steps}};
}

void run(const MoeArguments& a) {
  check_moe_arguments(a);
  Context context = make_context(a.num_threads);
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  bool all_valid = true;
  if (!a.json) {
    char text[400];
    std::snprintf(
        text, sizeof(text),
        "moe, %lld of %lld experts, hidden %lld, intermediate %lld, %d thread(s), %s\n\n%-5s %7s  %-8s  %10s  "
        "%8s  %s\n",
        static_cast<long long>(a.top_k), static_cast<long long>(a.experts), static_cast<long long>(a.hidden),
        static_cast<long long>(a.intermediate), context.num_threads(), to_string(context.machine()).c_str(), "dtype",
        "tokens", "step", "ms", "of layer", "of the bound (quartiles)");
    write_output(text);
  }
  for (const std::string& dtype : a.dtypes) {
    for (const int64_t tokens : a.tokens) {
      const MoeCase data(context, a, dtype, tokens);
      const std::vector<Row> rows = measure(context, data);
      if (a.json) {
        results.push_back(to_json(data, rows));
      } else {
        print_rows(data, rows, all_valid);
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
                {"rows", results}});
    return;
  }
  write_output("\nlayer: all steps in turn. Bound of products: up to " + std::to_string(kFewRows) +
               " rows an expert, plainly reading the weights of the experts that have rows; beyond,\nmultiply-adds of "
               "the same length. Bound of the others: a plain copy of what they read and write. Same threads, in "
               "turns;\nmedians\n");
  if (!all_valid) write_output("* the reference bursts did not have the machine to themselves\n");
}

}  // namespace

void add_bench_moe(CLI::App& bench) {
  auto arguments = std::make_shared<MoeArguments>();
  CLI::App* command =
      bench.add_subcommand("moe", "The steps of a mixture of experts, and how close they come to the machine");
  add_moe_options(*command, *arguments);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace opst::tools

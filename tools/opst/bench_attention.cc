// opst bench attention: naive, standard and flash attention side by side, and how close flash comes to the machine's
// peak.
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "attention_backward_case.h"
#include "attention_case.h"
#include "attention_verdict.h"
#include "bench.h"
#include "naive_bench.h"
#include "testing/peak.h"
#include "time_model.h"

namespace opst::tools {

namespace {

struct Options {
  AttentionArguments problem;
  int64_t memory_limit = 0;  // bytes; 0: half of what is available
  bool backward = false;
  bool predict = false;
};

struct Row {
  AttentionSetup setup;
  AttentionPlan plan;
  test::Fraction flash;
  double flops = 0;
  int64_t flash_scratch_bytes = 0;
  int64_t standard_bytes = 0;
  double standard_seconds = -1;  // negative: not measured
  Status standard_status;        // of that path: what it refuses, or how it failed
  bool standard_fits = true;     // false: its memory is beyond the limit, so it was not tried
  std::optional<TimePrediction> predicted;

  // measured; memory: beyond the limit, or it could not be had; option: refused; failed: otherwise.
  const char* standard_state() const {
    if (!standard_fits || standard_status.code() == StatusCode::out_of_memory) return "memory";
    if (standard_status.ok()) return "measured";
    const StatusCode code = standard_status.code();
    return code == StatusCode::invalid_argument || code == StatusCode::unsupported ? "option" : "failed";
  }
  NaiveTime naive;
  AttentionVerdict verdict;
  // Time over that of the baseline, where there are options: median and quartiles of pairs.
  double ratio = -1, ratio_q1 = 0, ratio_q3 = 0;
};

int64_t memory_limit(const Options& options) {
  return options.memory_limit > 0 ? options.memory_limit : available_memory_bytes() / 2;
}

// The call and its baseline in turn.
void measure_ratio(Context& context, const AttentionCase& data, Row& row) {
  using Clock = std::chrono::steady_clock;
  std::vector<AttentionCase> baseline;
  for (const AttentionSetup& setup : row.setup.baseline()) baseline.emplace_back(setup);
  const auto seconds_of = [](const auto& call) {
    const auto start = Clock::now();
    call();
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  const auto run_data = [&] { data.run(context, AttentionPath::flash); };
  const auto run_baseline = [&] {
    for (const AttentionCase& part : baseline) part.run(context, AttentionPath::flash);
  };
  run_data();
  run_baseline();
  std::vector<double> ratios;
  const int pairs = row.flash.call_seconds > 1 ? 3 : row.flash.call_seconds > 0.01 ? 15 : 61;
  for (int i = 0; i < pairs; ++i) {
    const double before = seconds_of(run_baseline), call = seconds_of(run_data);
    ratios.push_back(call / ((before + seconds_of(run_baseline)) / 2));
  }
  row.ratio = test::quantile(ratios, 0.5);
  row.ratio_q1 = test::quantile(ratios, 0.25), row.ratio_q3 = test::quantile(ratios, 0.75);
}

Row measure(Context& context, const AttentionSetup& setup, int64_t limit_bytes, NaiveBench& naive) {
  Row row;
  row.setup = setup;
  const AttentionProblem& problem = row.setup.problem;
  row.flops = attention_flops(row.setup);
  const test::PeakKind kind = test::peak_kind(problem.query_dtype);
  const auto plan_of = [&](AttentionPath path) {
    AttentionProblem p = problem;
    p.options.path = path;
    return plan_attention(p, context.machine());
  };
  row.plan = plan_of(AttentionPath::automatic);
  const AttentionPlan flash = plan_of(AttentionPath::flash), standard = plan_of(AttentionPath::standard);
  row.flash_scratch_bytes = plan_shared_prefix(problem, context.machine()).scratch_bytes(flash, context.num_threads());
  row.standard_bytes = standard.scratch_bytes(context.num_threads());

  const AttentionCase data(row.setup);
  row.flash = test::measure_fraction(context, kind, row.flops, [&] { data.run(context, AttentionPath::flash); });
  row.verdict = judge_attention(
      context, data, AttentionPath::flash,
      std::clamp<int64_t>((int64_t{1} << 26) / std::max<int64_t>(problem.kv_len, 1) / problem.head_dim, 8, 64));
  if (row.setup.has_options()) measure_ratio(context, data, row);
  context.trim();
  row.standard_fits = row.standard_bytes <= limit_bytes;
  if (row.standard_fits) row.standard_status = data.try_run(context, AttentionPath::standard);
  if (row.standard_fits && row.standard_status.ok()) {
    row.standard_seconds = test::measure_fraction(context, kind, row.flops, [&] {
                             data.run(context, AttentionPath::standard);
                           }).call_seconds;
    context.trim();
  }
  row.naive = naive.measure(context, data);
  return row;
}

void print_header(const Options& options, const Context& context, const AttentionSetup& setup) {
  const AttentionProblem& p = setup.problem;
  char text[512];
  std::snprintf(text, sizeof(text),
                "attention forward, %s, batch %lld, heads %lld/%lld, head_dim %lld/%lld, %s%s, %d thread(s), %s\n\n"
                "%9s  %11s %10s  %11s %10s  %11s %10s  %9s %7s  %9s  %9s%s\n",
                options.problem.dtype.c_str(), static_cast<long long>(p.batch), static_cast<long long>(p.num_heads),
                static_cast<long long>(p.num_kv_heads), static_cast<long long>(p.head_dim),
                static_cast<long long>(p.value_head_dim), p.options.causal ? "causal" : "full",
                options_text(options.problem).c_str(), context.num_threads(), to_string(context.machine().isa), "keys",
                "naive", "memory", "standard", "memory", "flash", "scratch", "GFLOP/s", "of peak", "max error", "plan",
                options.predict       ? "    predicted    off"
                : setup.has_options() ? "  over baseline"
                                      : "");
  write_output(text);
}

void print_row(const Row& row) {
  char text[512];
  const std::string state = row.standard_state();
  std::snprintf(text, sizeof(text), "%9lld  %11s %10s  %11s %10s  %11s %10s  %9.1f %5.1f %%%s %9.1e  %9s",
                static_cast<long long>(row.setup.problem.kv_len), row.naive.text().c_str(),
                row.naive.offered ? human_bytes(row.naive.bytes).c_str() : "",
                state == "measured" ? human_seconds(row.standard_seconds).c_str()
                : state == "memory" ? row.standard_fits ? "no memory" : "no fit"
                : state == "option" ? "refused"
                                    : "failed",
                state == "option" ? "" : human_bytes(row.standard_bytes).c_str(),
                human_seconds(row.flash.call_seconds).c_str(), human_bytes(row.flash_scratch_bytes).c_str(),
                row.flash.flops_per_second / 1e9, row.flash.fraction * 100, row.flash.valid ? " " : "*",
                row.verdict.error, to_string(row.plan.path));
  write_output(text);
  if (row.ratio >= 0) {
    std::snprintf(text, sizeof(text), "  %.3f (%.3f - %.3f)", row.ratio, row.ratio_q1, row.ratio_q3);
    write_output(text);
  }
  if (row.predicted) {
    const double seconds = row.predicted->seconds();
    std::snprintf(text, sizeof(text), "  %11s %+6.1f %%", human_seconds(seconds).c_str(),
                  (seconds / row.flash.call_seconds - 1) * 100);
    write_output(text);
  }
  write_output("\n");
}

nlohmann::ordered_json to_json(const Row& row) {
  const bool fits = row.standard_seconds >= 0;
  nlohmann::ordered_json json = {
      {"kv_len", row.setup.problem.kv_len},
      {"query_len", row.setup.problem.query_len},
      {"flash_ms", row.flash.call_seconds * 1e3},
      {"flash_gflops", row.flash.flops_per_second / 1e9},
      {"peak_gflops", row.flash.peak_flops_per_second / 1e9},
      {"fraction_of_peak", row.flash.fraction},
      {"fraction_of_peak_quartiles", {row.flash.fraction_q1, row.flash.fraction_q3}},
      {"peak_valid", row.flash.valid},
      {"flash_scratch_bytes", row.flash_scratch_bytes},
      {"standard_ms", fits ? nlohmann::ordered_json(row.standard_seconds * 1e3) : nlohmann::ordered_json()},
      {"standard_bytes", row.standard_bytes},
      {"standard_fits", fits},
      {"standard_state", row.standard_state()},
      {"standard_message", row.standard_status.message()},
      {"naive_ms", row.naive.json()},
      {"naive_state", row.naive.state()},
      {"naive_bytes", row.naive.bytes},
      {"max_abs_error", row.verdict.error},
      {"error_bound", row.verdict.bound},
      {"error_ok", row.verdict.ok},
      {"plan", to_string(row.plan)}};
  if (row.ratio >= 0) {
    json["over_baseline"] = row.ratio;
    json["over_baseline_quartiles"] = {row.ratio_q1, row.ratio_q3};
  }
  if (row.predicted) {
    add_to_json(json, *row.predicted, row.flash.call_seconds);
  }
  return json;
}

// From the machine's rates, its cores as fast as the bursts beside the call.
std::optional<TimePrediction> predict(const MachineProfile& machine, const Row& row) {
  const AttentionProblem& p = row.setup.problem;
  const double factor = row.flash.peak_flops_per_second / machine.matrix_rate(p.query_dtype);
  return predict_attention(p, visible_pairs(row.setup), machine.with_cores(factor));
}

void run(const Options& options) {
  const std::vector<AttentionSetup> setups = attention_setups(options.problem);
  const AttentionSetup& first = setups.front();
  const std::string& dtype = options.problem.dtype;
  if (options.predict && (first.has_options() || (dtype != "f32" && dtype != "bf16") || first.kv_format != dtype)) {
    usage_error("--predict knows calls of f32 or bf16 without options other than --causal; got " + dtype +
                options_text(options.problem));
  }
  Context context = make_context(options.problem.num_threads);
  const int64_t limit = memory_limit(options);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  if (!options.problem.json) {
    print_header(options, context, first);
  }
  bool all_valid = true;
  std::optional<MachineProfile> machine;
  if (options.predict) machine = measure_machine(context);
  std::string refusals;  // of the standard path, each message once
  NaiveBench naive(limit, false);
  for (const AttentionSetup& setup : setups) {
    Row row = measure(context, setup, limit, naive);
    if (machine) row.predicted = predict(*machine, row);
    const std::string& refusal = row.standard_status.message();
    if (refusals.find(refusal) == std::string::npos) refusals += "standard: " + refusal + "\n";
    all_valid = all_valid && row.flash.valid;
    if (options.problem.json)
      rows.push_back(to_json(row));
    else
      print_row(row);
  }
  if (options.problem.json) {
    write_json({{"machine", to_string(context.machine())}, {"threads", context.num_threads()}, {"rows", rows}});
    return;
  }
  write_output("\n" + naive.explanation(first) + "standard: the whole score matrix in memory (\"no fit\": beyond " +
               human_bytes(limit) +
               "); of peak: flash against multiply-adds of the same\nlength on the "
               "same threads, median of pairs; max "
               "error: against float64 on sampled rows; plan: which path is chosen\n" +
               refusals);
  if (options.predict) {
    write_output(
        "predicted: from multiply-adds beside the call, exponentials and reading as measured at the start; off: "
        "against flash\n");
  }
  if (first.has_options()) {
    write_output(first.sequences.empty() ? "over baseline: time over that of the same call without options, in turn\n"
                                         : "over baseline: time over that of the sequences one by one, in turn\n");
  }
  if (!all_valid) write_output("* the reference bursts did not have the machine to themselves\n");
}

}  // namespace

void add_bench_attention(CLI::App& bench) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      bench.add_subcommand("attention", "Standard and flash attention side by side: time, memory, fraction of peak");
  const AttentionCommandOptions common = add_attention_options(*command, options->problem);
  command
      ->add_option("--memory-limit", options->memory_limit,
                   "Bytes that the standard and the naive form may take (default: half of the available memory)")
      ->check(at_least(1));
  CLI::Option* backward = command->add_flag("--backward", options->backward, "Measure the gradients instead")
                              ->excludes(common.shared_prefix);
  command->add_flag("--predict", options->predict, "Also predict the time, from the machine's rates")
      ->excludes(backward);
  command->callback([options] {
    options->backward ? bench_attention_backward(options->problem, memory_limit(*options)) : run(*options);
  });
}

}  // namespace opst::tools

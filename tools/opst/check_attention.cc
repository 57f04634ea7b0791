// opst check attention: the operator against a float64 evaluation of its equation, judged by what a plain
// implementation in the same type achieves.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "attention/reference.h"
#include "attention_backward_case.h"
#include "attention_case.h"
#include "bench.h"
#include "testing/elements.h"

namespace opst::tools {

namespace {

struct Options {
  AttentionArguments problem;
  int64_t rows = 256;
  bool backward = false;
};

struct Verdict {
  int64_t rows = 0;
  double error = 0;      // largest |got - float64|
  double lse_error = 0;  // largest, relative to 1 + |lse|
  double naive_error = 0, naive_lse_error = 0;
  double scale = 0;  // largest |value|

  double bound(DType dtype) const { return 2 * naive_error + 4 * test::epsilon(dtype) * scale; }
  double lse_bound(DType dtype) const { return 2 * naive_lse_error + 4 * test::epsilon(dtype); }
};

Verdict compare(const AttentionCase& data, int64_t rows) {
  Verdict v;
  const ConstTensor& value = data.inputs().value;
  for (int64_t i = 0; i < value.num_elements(); ++i) v.scale = std::max(v.scale, std::abs(test::get(value, i)));
  const AttentionOptions& options = data.problem().options;
  for (const AttentionCase::RowIndex& r : data.sampled_rows(rows)) {
    const auto exact = attention::reference_row(data.inputs(), options, r.batch, r.head, r.query);
    const auto naive =
        attention::naive_row(data.inputs(), options, r.batch, r.head, r.query, data.problem().query_dtype);
    const ConstTensor out = data.row_of(data.outputs().out, r);
    for (int64_t d = 0; d < data.problem().value_head_dim; ++d) {
      const double expected = exact.out[static_cast<size_t>(d)];
      const double error = std::abs(test::get(out, d) - expected);
      v.error = std::isnan(error) ? HUGE_VAL : std::max(v.error, error);
      v.naive_error = std::max(v.naive_error, std::abs(naive.out[static_cast<size_t>(d)] - expected));
    }
    const double lse = test::get(data.row_of(data.outputs().softmax_lse, r), 0);
    if (lse != exact.lse) {
      const double error = std::abs(lse - exact.lse) / (1 + std::abs(exact.lse));
      v.lse_error = std::isnan(error) ? HUGE_VAL : std::max(v.lse_error, error);
    }
    if (naive.lse != exact.lse) {
      v.naive_lse_error = std::max(v.naive_lse_error, std::abs(naive.lse - exact.lse) / (1 + std::abs(exact.lse)));
    }
    ++v.rows;
  }
  return v;
}

void run(const Options& options) {
  Context context = make_context(options.problem.num_threads);
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  bool all_ok = true;
  for (const int64_t kv_len : key_lengths(options.problem)) {
    const AttentionSetup setup = attention_setup(options.problem, kv_len);
    const AttentionProblem& problem = setup.problem;
    const AttentionCase data(setup);
    data.run(context, problem.options.path);
    const Verdict v = compare(data, options.rows);
    const DType dtype = problem.query_dtype;
    const bool ok = v.error <= v.bound(dtype) && v.lse_error <= v.lse_bound(dtype);
    all_ok = all_ok && ok;
    const std::string plan = to_string(plan_attention(problem, context.machine()));
    if (options.problem.json) {
      results.push_back({{"kv_len", kv_len},
                         {"rows", v.rows},
                         {"max_abs_error", v.error},
                         {"bound", v.bound(dtype)},
                         {"lse_error", v.lse_error},
                         {"lse_bound", v.lse_bound(dtype)},
                         {"ok", ok},
                         {"plan", plan}});
      continue;
    }
    char text[512];
    std::snprintf(text, sizeof(text), "%s  %lld keys, %lld rows: error %.2e (bound %.2e), lse %.2e (bound %.2e); %s\n",
                  ok ? "ok  " : "FAIL", static_cast<long long>(kv_len), static_cast<long long>(v.rows), v.error,
                  v.bound(dtype), v.lse_error, v.lse_bound(dtype), plan.c_str());
    write_output(text);
  }
  if (options.problem.json) {
    write_json({{"machine", to_string(context.machine())}, {"ok", all_ok}, {"rows", results}});
  }
  if (!all_ok) run_error("the error exceeds its bound");
}

}  // namespace

void add_check_attention(CLI::App& check) {
  auto options = std::make_shared<Options>();
  CLI::App* command = check.add_subcommand(
      "attention", "Compare with float64: passes within twice the error of a plain implementation in the same type");
  add_attention_options(*command, options->problem);
  command->add_option("--path", options->problem.path, "automatic, standard or flash")
      ->check(CLI::IsMember({"automatic", "standard", "flash"}))
      ->capture_default_str();
  command->add_option("--rows", options->rows, "Most rows to compare, spread over batch, heads and queries")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_flag("--backward", options->backward, "Check the gradients instead, all of them");
  command->callback([options] { options->backward ? check_attention_backward(options->problem) : run(*options); });
}

}  // namespace opst::tools

// opst check attention: the operator against a float64 evaluation of its equation, judged by what a plain
// implementation in the same type achieves.
#include <cstdio>

#include "attention_backward_case.h"
#include "attention_case.h"
#include "attention_verdict.h"
#include "bench.h"

namespace opst::tools {

namespace {

struct Options {
  AttentionArguments problem;
  int64_t rows = 256;
  bool backward = false;
  bool spoil = false;
};

void run(const Options& options) {
  const std::vector<AttentionSetup> setups = attention_setups(options.problem);
  Context context = make_context(options.problem.num_threads);
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  bool all_ok = true;
  for (const AttentionSetup& setup : setups) {
    const AttentionProblem& problem = setup.problem;
    const int64_t kv_len = problem.kv_len;
    AttentionCase data(setup);
    if (options.spoil) data.spoil_values(true);
    data.run(context, problem.options.path);
    if (options.spoil) data.spoil_values(false);
    const AttentionVerdict v = judge_attention(context, data, problem.options.path, options.rows);
    all_ok = all_ok && v.ok;
    const std::string plan = to_string(plan_attention(problem, context.machine()));
    if (options.problem.json) {
      results.push_back({{"kv_len", kv_len},
                         {"rows", v.rows},
                         {"max_abs_error", v.error},
                         {"bound", v.bound},
                         {"lse_error", v.lse_error},
                         {"lse_bound", v.lse_bound},
                         {"ok", v.ok},
                         {"plan", plan}});
      continue;
    }
    char text[512];
    std::snprintf(text, sizeof(text), "%s  %lld keys, %lld rows: error %.2e (bound %.2e), lse %.2e (bound %.2e); %s\n",
                  v.ok ? "ok  " : "FAIL", static_cast<long long>(kv_len), static_cast<long long>(v.rows), v.error,
                  v.bound, v.lse_error, v.lse_bound, plan.c_str());
    write_output(text);
    if (!v.ok) write_output("      " + v.message + "\n");
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
  const AttentionCommandOptions common = add_attention_options(*command, options->problem);
  CLI::Option* path = command->add_option("--path", options->problem.path, "automatic, standard or flash")
                          ->check(one_of({"automatic", "standard", "flash"}))
                          ->capture_default_str();
  CLI::Option* rows =
      command->add_option("--rows", options->rows, "Most rows to compare, spread over batch, heads and queries")
          ->check(at_least(1))
          ->capture_default_str();
  command->add_flag("--backward", options->backward, "Check the gradients instead, all of them")
      ->excludes(common.shared_prefix)
      ->excludes(path)
      ->excludes(rows);
  command->add_flag(
      "--spoil", options->spoil,
      "Compute without one value of every 256, so that the verdict must be FAIL: whether the check notices");
  command->callback(
      [options] { options->backward ? check_attention_backward(options->problem, options->spoil) : run(*options); });
}

}  // namespace opst::tools

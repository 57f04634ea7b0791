// opst plan matmul: which kernel multiplies and why, in which tasks, with which memory.
#include "bench.h"
#include "matmul_case.h"
#include "opst/grouped_matmul.h"

namespace opst::tools {

namespace {

struct Options {
  GroupedArguments products;
  std::string activation = "none";
  bool int8 = false, batch_invariant = false;
};

constexpr Activation kActivations[] = {Activation::none,      Activation::silu,   Activation::gelu_erf,
                                       Activation::gelu_tanh, Activation::swiglu, Activation::swiglu_swapped};

nlohmann::ordered_json to_json(const GroupedMatmulPlan& plan) {
  return {{"groups_with_rows", plan.groups},
          {"num_tasks", plan.num_tasks},
          {"waves", plan.waves},
          {"scratch_bytes_shared", plan.scratch_bytes_shared},
          {"scratch_bytes_per_worker", plan.scratch_bytes_per_worker},
          {"list_bytes", plan.list_bytes},
          {"fewest_rows", to_string(plan.smallest)},
          {"most_rows", to_string(plan.largest)}};
}

void run(const Options& options) {
  check_products(options.products);
  for (const int64_t n : options.products.n) {
    if (options.activation.rfind("swiglu", 0) == 0 && n % 2 != 0) {
      usage_error("n is " + std::to_string(n) + ", but " + options.activation + " needs two halves");
    }
  }
  const Context context = make_context(options.products.num_threads);
  const int threads = context.num_threads();
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for_each_product(options.products, [&](const std::string& dtype, const MatmulShape& s) {
    MatmulProblem problem = matmul_case(dtype, s);
    for (const Activation activation : kActivations) {
      if (options.activation == to_string(activation)) problem.activation = activation;
    }
    problem.activations = options.int8 ? ActivationType::int8 : ActivationType::exact;
    problem.batch_invariant = options.batch_invariant;
    const std::vector<int64_t> ends = group_ends(options.products, s.m);
    if (!ends.empty()) {
      std::vector<int64_t> group_rows;
      for (size_t e = 0; e < ends.size(); ++e) group_rows.push_back(ends[e] - (e == 0 ? 0 : ends[e - 1]));
      const auto grouped = value_or_fail(plan_grouped_matmul(problem, group_rows, context.machine(), threads));
      if (!options.products.json) {
        write_output(dtype + group_words(options.products) + ", " + std::to_string(s.n) + " x " + std::to_string(s.k) +
                     ": " + to_string(grouped) + "\n");
        return;
      }
      nlohmann::ordered_json row = {{"dtype", dtype}, {"m", s.m}, {"n", s.n}, {"k", s.k}};
      row.update(to_json(grouped));
      rows.push_back(row);
      return;
    }
    const MatmulPlan plan = plan_matmul(problem, context.machine(), threads);
    if (!options.products.json) {
      write_output(dtype + ", " + std::to_string(s.m) + " x " + std::to_string(s.n) + " x " + std::to_string(s.k) +
                   ": " + to_string(plan) + "\n  why  " + plan.reason + "\n");
      return;
    }
    rows.push_back({{"dtype", dtype},
                    {"m", s.m},
                    {"n", s.n},
                    {"k", s.k},
                    {"plan", to_string(plan)},
                    {"reason", plan.reason},
                    {"path", to_string(plan.path)},
                    {"product", to_string(plan.product)},
                    {"rows_per_task", plan.rows_per_task},
                    {"columns_per_task", plan.columns_per_task},
                    {"k_block", plan.k_block},
                    {"num_tasks", plan.num_tasks()},
                    {"scratch_bytes", plan.scratch_bytes(threads)}});
  });
  if (options.products.json) {
    write_json({{"machine", to_string(context.machine())}, {"threads", threads}, {"rows", rows}});
  }
}

}  // namespace

void add_plan_matmul(CLI::App& plan) {
  auto options = std::make_shared<Options>();
  CLI::App* command = plan.add_subcommand("matmul", "Which kernel multiplies and why, tasks, memory");
  add_matmul_options(*command, options->products);
  add_group_options(*command, options->products);
  std::vector<std::string> names;
  for (const Activation activation : kActivations) names.emplace_back(to_string(activation));
  command->add_option("--activation", options->activation, "What the sums go through")
      ->check(one_of(names))
      ->capture_default_str();
  command->add_flag("--int8-activations", options->int8, "x is rounded to int8 where it meets a quantised weight");
  command->add_flag("--batch-invariant", options->batch_invariant, "The same bits for any number of rows");
  command->callback([options] {
    settle_groups(options->products);
    run(*options);
  });
}

}  // namespace opst::tools

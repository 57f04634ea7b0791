// opst plan moe: the tasks of a mixture's gating and routing, and of its grouped products where tokens are spread evenly.
#include "bench.h"
#include "moe_case.h"

namespace opst::tools {

namespace {

// As even as it can be: what a router that is well balanced gives.
std::vector<int64_t> even_rows(const MoeArguments& a, int64_t tokens) {
  const int64_t slots = tokens * a.top_k;
  std::vector<int64_t> rows;
  for (int64_t e = 0; e < a.experts; ++e) rows.push_back(slots / a.experts + (e < slots % a.experts ? 1 : 0));
  return rows;
}

void run(const MoeArguments& a) {
  check_moe_arguments(a);
  const Context context = make_context(a.num_threads);
  const int threads = context.num_threads();
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const std::string& dtype : a.dtypes) {
    for (const int64_t tokens : a.tokens) {
      const MoeGatingPlan gating =
          plan_moe_gating({.tokens = tokens, .num_experts = a.experts, .top_k = a.top_k, .options = a.gating()});
      const MoeRoutingPlan routing = plan_moe_routing(tokens, a.top_k, a.experts);
      const std::vector<int64_t> group_rows = even_rows(a, tokens);
      MatmulProblem problem = matmul_case(dtype, a.gate_up(1));
      problem.activation = Activation::swiglu;
      problem.has_out_scales = is_integers(dtype);
      const auto gate_up = value_or_fail(plan_grouped_matmul(problem, group_rows, context.machine(), threads));
      const auto down =
          value_or_fail(plan_grouped_matmul(matmul_case(dtype, a.down(1)), group_rows, context.machine(), threads));
      if (!a.json) {
        write_output(dtype + ", " + std::to_string(tokens) + " tokens, " + std::to_string(a.top_k) + " of " +
                     std::to_string(a.experts) + " experts\n  gating   " + to_string(gating) + "\n  why      " +
                     gating.reason + "\n  routing  " + to_string(routing) + "\n  gate/up  " + to_string(gate_up) +
                     "\n  down     " + to_string(down) + "\n");
        continue;
      }
      const auto scratch = [&](const GroupedMatmulPlan& plan) {
        return plan.scratch_bytes_shared + plan.scratch_bytes_per_worker * threads + plan.list_bytes;
      };
      rows.push_back({{"dtype", dtype},
                      {"tokens", tokens},
                      {"gating", to_string(gating)},
                      {"gating_reason", gating.reason},
                      {"routing", to_string(routing)},
                      {"gate_up", to_string(gate_up)},
                      {"down", to_string(down)},
                      {"scratch_bytes",
                       {{"gating", gating.scratch_bytes_shared + gating.scratch_bytes_per_worker * threads},
                        {"routing", routing.scratch_bytes},
                        {"gate_up", scratch(gate_up)},
                        {"down", scratch(down)}}}});
    }
  }
  if (a.json) write_json({{"machine", to_string(context.machine())}, {"threads", threads}, {"rows", rows}});
}

}  // namespace

void add_plan_moe(CLI::App& plan) {
  auto arguments = std::make_shared<MoeArguments>();
  CLI::App* command = plan.add_subcommand(
      "moe", "Tasks and memory of a mixture's gating, routing and products, where tokens are spread evenly");
  add_moe_options(*command, *arguments);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace opst::tools

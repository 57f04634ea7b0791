// opst plan moe: the tasks of a mixture's gating and routing, of its grouped products, and of the one call for all of them,
// where tokens are spread evenly.
#include "bench.h"
#include "moe_case.h"
#include "opst/moe_layer.h"

namespace opst::tools {

namespace {

// As even as it can be: what a router that is well balanced gives.
std::vector<int64_t> even_rows(const MoeArguments& a, int64_t tokens) {
  const int64_t slots = tokens * a.top_k;
  std::vector<int64_t> rows;
  for (int64_t e = 0; e < a.experts; ++e) rows.push_back(slots / a.experts + (e < slots % a.experts ? 1 : 0));
  return rows;
}

MatmulProblem gate_up_problem(const std::string& dtype, const MatmulShape& shape) {
  MatmulProblem problem = matmul_case(dtype, shape);
  problem.activation = Activation::swiglu;
  problem.has_out_scales = is_integers(dtype);
  return problem;
}

struct Plans {
  MoeGatingPlan gating;
  MoeRoutingPlan routing;
  GroupedMatmulPlan gate_up, down;
  MoeLayerPlan layer;
  GroupedMatmulPlan shared_gate_up, shared_down;  // with a shared expert
};

Plans plan(const MoeArguments& a, const std::string& dtype, int64_t tokens, const Machine& machine, int threads) {
  const std::vector<int64_t> rows = even_rows(a, tokens);
  const auto products = [&](const MatmulProblem& problem, std::span<const int64_t> of_groups) {
    return value_or_fail(plan_grouped_matmul(problem, of_groups, machine, threads));
  };
  MoeLayerProblem layer{.dtype = float_type_of(dtype),
                        .tokens = tokens,
                        .top_k = a.top_k,
                        .num_experts = a.experts,
                        .gating = a.gating(),
                        .gate_up = gate_up_problem(dtype, a.gate_up(1)),
                        .down = matmul_case(dtype, a.down(1)),
                        .has_shared = a.shared > 0};
  Plans p{
      .gating = plan_moe_gating({.tokens = tokens, .num_experts = a.experts, .top_k = a.top_k, .options = a.gating()}),
      .routing = plan_moe_routing(tokens, a.top_k, a.experts),
      .gate_up = products(layer.gate_up, rows),
      .down = products(layer.down, rows),
      .layer = {},
      .shared_gate_up = {},
      .shared_down = {}};
  if (layer.has_shared) {
    layer.shared_gate_up = gate_up_problem(dtype, a.shared_gate_up(1));
    layer.shared_down = matmul_case(dtype, a.shared_down(1));
    p.shared_gate_up = products(layer.shared_gate_up, {&tokens, 1});
    p.shared_down = products(layer.shared_down, {&tokens, 1});
  }
  layer.gate_up.gathers_rows = true;  // tokens where they are
  p.layer = value_or_fail(plan_moe_layer(layer, rows, machine, threads));
  return p;
}

std::string text_of(const MoeArguments& a, const std::string& dtype, int64_t tokens, const Plans& p) {
  const std::string layer = to_string(p.layer);
  std::string text = dtype + ", " + std::to_string(tokens) + " tokens, " + std::to_string(a.top_k) + " of " +
                     std::to_string(a.experts) + " experts\n  gating   " + to_string(p.gating) + "\n  why      " +
                     p.gating.reason + "\n  routing  " + to_string(p.routing) + "\n  gate/up  " + to_string(p.gate_up) +
                     "\n  down     " + to_string(p.down) + "\n";
  if (a.shared > 0) {
    text +=
        "  shared   gate/up " + to_string(p.shared_gate_up) + "\n           down " + to_string(p.shared_down) + "\n";
  }
  // Gating, routing and products follow in its own words.
  return text + "  layer    " + layer.substr(0, layer.find('\n')) + "\n  a wave   gate/up " +
         to_string(p.layer.gate_up) + "\n           down " + to_string(p.layer.down) + "\n";
}

nlohmann::ordered_json to_json(const MoeArguments& a, const std::string& dtype, int64_t tokens, const Plans& p,
                               int threads) {
  const auto scratch = [&](const GroupedMatmulPlan& plan) {
    return plan.scratch_bytes_shared + plan.scratch_bytes_per_worker * threads + plan.list_bytes;
  };
  nlohmann::ordered_json json = {
      {"dtype", dtype},
      {"tokens", tokens},
      {"gating", to_string(p.gating)},
      {"gating_reason", p.gating.reason},
      {"routing", to_string(p.routing)},
      {"gate_up", to_string(p.gate_up)},
      {"down", to_string(p.down)},
      {"layer",
       {{"rows", p.layer.rows},
        {"waves", p.layer.waves},
        {"rows_per_wave", p.layer.rows_per_wave},
        {"reason", p.layer.reason},
        {"hidden_bytes", p.layer.hidden_bytes},
        {"expanded_bytes", p.layer.expanded_bytes},
        {"gate_up", to_string(p.layer.gate_up)},
        {"down", to_string(p.layer.down)}}},
      {"scratch_bytes",
       {{"gating", p.gating.scratch_bytes_shared + p.gating.scratch_bytes_per_worker * threads},
        {"routing", p.routing.scratch_bytes},
        {"gate_up", scratch(p.gate_up)},
        {"down", scratch(p.down)},
        {"layer", p.layer.scratch_bytes}}}};
  if (a.shared > 0) json["shared"] = {{"gate_up", to_string(p.shared_gate_up)}, {"down", to_string(p.shared_down)}};
  return json;
}

void run(const MoeArguments& a) {
  check_moe_arguments(a);
  const Context context = make_context(a.num_threads);
  const int threads = context.num_threads();
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const std::string& dtype : a.dtypes) {
    for (const int64_t tokens : a.tokens) {
      const Plans plans = plan(a, dtype, tokens, context.machine(), threads);
      if (a.json) {
        rows.push_back(to_json(a, dtype, tokens, plans, threads));
      } else {
        write_output(text_of(a, dtype, tokens, plans));
      }
    }
  }
  if (a.json) write_json({{"machine", to_string(context.machine())}, {"threads", threads}, {"rows", rows}});
}

}  // namespace

void add_plan_moe(CLI::App& plan) {
  auto arguments = std::make_shared<MoeArguments>();
  CLI::App* command = plan.add_subcommand(
      "moe", "Tasks and memory of a mixture's gating, routing, products and one call, where tokens are spread evenly");
  add_moe_options(*command, *arguments);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace opst::tools

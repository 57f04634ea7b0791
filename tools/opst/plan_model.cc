// opst plan model: the graphs that a model runs as, node by node, and what a step moves and computes.
#include <cstdio>
#include <sstream>

#include "bench.h"
#include "model/llama.h"
#include "model_options.h"

namespace opst::tools {

namespace {

struct Options {
  std::string model_path;
  SessionArguments session;
  int64_t tokens = 1;
  int num_threads = 0;
  bool all = false;
  bool json = false;
};

// The table of a graph; of its layers, which are alike, the first alone.
std::string table(const Graph& graph, int64_t num_layers, bool all) {
  std::istringstream lines(to_string(graph));
  std::string text;
  bool folded = false;
  for (std::string line; std::getline(lines, line);) {
    const bool later_layer = line.rfind("blk.", 0) == 0 && line.rfind("blk.0.", 0) != 0;
    if (all || !later_layer) {
      text += line + "\n";
    } else if (!folded) {
      text += "... blk.1 to blk." + std::to_string(num_layers - 1) + " likewise (--all prints them)\n";
      folded = true;
    }
  }
  return text;
}

nlohmann::ordered_json to_json(const NodeCost& cost) {
  return {{"flops", cost.flops},
          {"weight_bytes", cost.weight_bytes},
          {"cache_bytes", cost.cache_bytes},
          {"tensor_bytes", cost.tensor_bytes}};
}

nlohmann::ordered_json to_json(const Graph& graph) {
  nlohmann::ordered_json nodes = nlohmann::ordered_json::array();
  for (int i = 0; i < graph.num_nodes(); ++i) {
    const NodeInfo info = value_or_fail(graph.describe(i));
    nlohmann::ordered_json node = {{"name", info.name},       {"op", info.op},           {"inputs", info.inputs},
                                   {"outputs", info.outputs}, {"offsets", info.offsets}, {"plan", info.plan}};
    node.update(to_json(info.cost));
    nodes.push_back(std::move(node));
  }
  const GraphMemory memory = graph.memory();
  return {{"name", graph.name()},
          {"workspace_bytes", memory.workspace_bytes},
          {"sum_bytes", memory.sum_bytes},
          {"peak_live_bytes", memory.peak_live_bytes},
          {"nodes", nodes}};
}

// A line about a mixture; nothing of a dense model.
std::string experts(const model::MixtureConfig& mixture, const model::LlamaModel& model) {
  if (mixture.num_experts == 0) return "";
  char line[200];
  std::snprintf(
      line, sizeof line,
      "Each layer has %lld experts, of which a token uses %lld: %.2f of the %.2f MB of all weights are theirs\n",
      static_cast<long long>(mixture.num_experts), static_cast<long long>(mixture.used),
      static_cast<double>(model.expert_bytes()) / 1e6, static_cast<double>(model.weight_bytes()) / 1e6);
  return line;
}

void run(const Options& options) {
  Context context = make_context(options.num_threads);
  const model::GgufFile file = value_or_fail(model::GgufFile::open(options.model_path));
  const model::LlamaConfig config = value_or_fail(model::read_llama_config(file));
  const int64_t keys = options.session.context(config, 2048);
  if (options.tokens > keys) {
    usage_error("--tokens is " + std::to_string(options.tokens) + ", more than the context of " + std::to_string(keys));
  }
  const model::LlamaModel model = value_or_fail(model::LlamaModel::load(context, file));
  model::LlamaSession session =
      value_or_fail(model::LlamaSession::create(context, model,
                                                {.context = keys,
                                                 .kv_dtype = options.session.kv_dtype(),
                                                 .activations = options.session.activations(),
                                                 .prefill_chunk = std::max<int64_t>(512, options.tokens)}));
  if (const Status status = session.size_graphs(options.tokens, keys); !status.ok()) run_error(status.message());

  const Graph &layers = session.layers_graph(), &logits = session.logits_graph();
  NodeCost cost = value_or_fail(layers.cost());
  cost += value_or_fail(logits.cost());
  const int64_t per_token = (cost.weight_bytes + cost.cache_bytes) / options.tokens;
  if (options.json) {
    nlohmann::ordered_json json = {{"tokens", options.tokens}, {"context", keys}};
    json.update(to_json(cost));
    json.update({{"bytes_per_token", per_token},
                 {"kv_cache_bytes", session.kv_cache_bytes()},
                 {"all_weight_bytes", model.weight_bytes()},
                 {"experts", config.mixture.num_experts},
                 {"experts_used", config.mixture.used},
                 {"expert_bytes", model.expert_bytes()},
                 {"graphs", {to_json(layers), to_json(logits)}}});
    write_json(json);
    return;
  }
  char totals[500];
  std::snprintf(
      totals, sizeof(totals),
      "\nA step of %lld token(s), the last of which sees %lld keys: weights %.2f MB, cached keys and values %.2f "
      "MB,\nthat is %.2f MB per token; products and attention %.1f MFLOP\nThe cache of %lld positions as %s takes %.2f "
      "MB\n",
      static_cast<long long>(options.tokens), static_cast<long long>(keys),
      static_cast<double>(cost.weight_bytes) / 1e6, static_cast<double>(cost.cache_bytes) / 1e6,
      static_cast<double>(per_token) / 1e6, cost.flops / 1e6, static_cast<long long>(keys),
      options.session.kv_dtype_name().c_str(), static_cast<double>(session.kv_cache_bytes()) / 1e6);
  write_output(table(layers, config.num_layers, options.all) + "\n" + table(logits, 1, true) + totals +
               experts(config.mixture, model));
}

}  // namespace

void add_plan_model(CLI::App& plan) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      plan.add_subcommand("model", "The graph that a model runs as: nodes, shapes, memory, bytes per token");
  command->add_option("-m,--model", options->model_path, "A GGUF file")->required()->type_name("FILE");
  options->session.add_to(*command, "Keys that the last token sees (default: 2048, at most the model's)");
  command->add_option("--tokens", options->tokens, "Tokens of the step: 1 decodes, more are a prompt")
      ->check(at_least(1))
      ->type_name("N")
      ->capture_default_str();
  add_threads_option(*command, options->num_threads);
  command->add_flag("--all", options->all, "Print every layer, not the first alone");
  command->add_flag("--json", options->json, "Print one JSON object");
  command->callback([options] { run(*options); });
}

}  // namespace opst::tools

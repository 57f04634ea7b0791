// opst plan layer: the steps of a decoder layer on a described machine, each with flops, bytes, the time of both units and
// the bound; and the memory of the layer.
#include <algorithm>
#include <cstdio>

#include "attention_outlook.h"
#include "bench.h"
#include "plan_machine.h"
#include "system_memory.h"

namespace opst::tools {

namespace {

struct LayerArguments {
  AttentionArguments attention;
  std::string machine;
  int64_t hidden = 0, ffn = 0;  // 0: heads x head_dim; 3.5 x hidden
  int64_t layers = 32;
  bool train = false;
};

struct Step {
  std::string name;
  double flops = 0, weight_bytes = 0, tensor_bytes = 0;
  double matrix_seconds = 0, vector_seconds = 0, memory_seconds = 0;
  double seconds() const { return std::max({matrix_seconds, vector_seconds, memory_seconds}); }
  const char* bound() const {
    if (matrix_seconds >= vector_seconds && matrix_seconds >= memory_seconds) return "matrix";
    return vector_seconds >= memory_seconds ? "vector" : "memory";
  }
};

class Layer {
 public:
  Layer(const LayerArguments& a, const AttentionSetup& setup, const MachineProfile& m) : m_(m) {
    const AttentionProblem& p = setup.problem;
    element_ = static_cast<double>(size_bytes(p.query_dtype));
    rate_ = m.matrix_rate(p.query_dtype);
    const auto d = [](int64_t x) { return static_cast<double>(x); };
    const double tokens = d(p.batch) * d(p.query_len), hidden = d(a.hidden), ffn = d(a.ffn);
    const double q = d(p.num_heads * p.head_dim), kv = d(p.num_kv_heads * p.head_dim);
    rows("norm", tokens, hidden, 2);
    product("q, k, v", tokens, q + 2 * kv, hidden);
    rows("rotary", tokens, q + kv, 2);
    const AttentionOutlook look = attention_outlook(p, visible_pairs(setup), m, {});
    Step attention = {.name = "attention", .flops = look.flops};
    attention.tensor_bytes = look.flash.bytes.back();
    attention.matrix_seconds = look.flash.matrix_seconds;
    attention.vector_seconds = look.flash.vector_seconds;
    attention.memory_seconds = look.flash.level_seconds.back();
    steps_.push_back(attention);
    product("output", tokens, hidden, q);
    rows("norm", tokens, hidden, 3);
    product("gate and up", tokens, 2 * ffn, hidden);
    rows("swiglu", tokens, ffn, 3);
    product("down", tokens, hidden, ffn);
    // What the gradients need again: inputs of both norms and their results, q, k, v, attention's out, gate, up, their
    // product; of attention no scores.
    kept_bytes_ = tokens * (4 * hidden + 2 * q + 2 * kv + 3 * ffn) * element_ + tokens * d(p.num_heads) * 4;
    cache_bytes_ = d(p.batch) * d(p.kv_len) * 2 * kv * element_;
    // Backward: each product twice (of inputs and of weights), attention 2.5 times.
    for (Step& s : steps_) {
      const double times = !a.train ? 1 : s.name == "attention" ? 3.5 : 3;
      for (double* x : {&s.flops, &s.tensor_bytes, &s.matrix_seconds, &s.vector_seconds, &s.memory_seconds})
        *x *= times;
    }
  }
  const std::vector<Step>& steps() const { return steps_; }
  double seconds() const {
    double sum = 0;
    for (const Step& s : steps_) sum += s.seconds();
    return sum;
  }
  double weight_bytes() const {
    double sum = 0;
    for (const Step& s : steps_) sum += s.weight_bytes;
    return sum;
  }
  double kept_bytes() const { return kept_bytes_; }
  double cache_bytes() const { return cache_bytes_; }

 private:
  void product(const char* name, double tokens, double outputs, double inputs) {
    Step s = {.name = name, .flops = 2 * tokens * outputs * inputs};
    s.weight_bytes = outputs * inputs * element_;
    s.tensor_bytes = tokens * (outputs + inputs) * element_;
    s.matrix_seconds = s.flops / rate_;
    s.memory_seconds = (s.weight_bytes + s.tensor_bytes) / m_.main_memory().read.value;
    steps_.push_back(s);
  }
  // `passes`: how often a row is read or written.
  void rows(const char* name, double tokens, double width, double passes) {
    Step s = {.name = name, .flops = 4 * tokens * width};
    s.tensor_bytes = passes * tokens * width * element_;
    s.vector_seconds = tokens * width / m_.exponentials.value;
    s.memory_seconds = s.tensor_bytes / m_.main_memory().read.value;
    steps_.push_back(s);
  }

  const MachineProfile& m_;
  double element_ = 2, rate_ = 1, kept_bytes_ = 0, cache_bytes_ = 0;
  std::vector<Step> steps_;
};

void print(const LayerArguments& a, const AttentionProblem& p, const Layer& layer, double needed, double capacity) {
  char text[400];
  std::snprintf(text, sizeof text, "%lld tokens that see %lld keys%s\n%-12s %10s %11s %11s  %10s %10s %10s  %s\n",
                static_cast<long long>(p.query_len), static_cast<long long>(p.kv_len),
                a.train ? ", forward and backward" : "", "step", "GFLOP", "weights", "tensors", "matrix", "vector",
                "memory", "bound");
  write_output(text);
  for (const Step& s : layer.steps()) {
    std::snprintf(text, sizeof text, "%-12s %10.3f %11s %11s  %10s %10s %10s  %s\n", s.name.c_str(), s.flops / 1e9,
                  binary_bytes(s.weight_bytes).c_str(), binary_bytes(s.tensor_bytes).c_str(),
                  human_seconds(s.matrix_seconds).c_str(), human_seconds(s.vector_seconds).c_str(),
                  human_seconds(s.memory_seconds).c_str(), s.bound());
    write_output(text);
  }
  std::snprintf(text, sizeof text,
                "sum of the bounds %s; %lld layers %s. Memory of %lld layers: %s of %s%s (weights %s a layer, %s %s)\n",
                human_seconds(layer.seconds()).c_str(), static_cast<long long>(a.layers),
                human_seconds(layer.seconds() * static_cast<double>(a.layers)).c_str(),
                static_cast<long long>(a.layers), binary_bytes(needed).c_str(), binary_bytes(capacity).c_str(),
                needed <= capacity ? "" : ": no fit", binary_bytes(layer.weight_bytes()).c_str(),
                a.train ? "kept for the gradients" : "keys and values",
                binary_bytes(a.train ? layer.kept_bytes() : layer.cache_bytes()).c_str());
  write_output(text);
}

void run(LayerArguments a) {
  if (a.hidden == 0) a.hidden = a.attention.heads * a.attention.head_dim;
  if (a.ffn == 0) a.ffn = a.hidden * 7 / 2;
  const std::vector<AttentionSetup> setups = attention_setups(a.attention);
  const MachineProfile m = machine_profile(a.machine, a.attention.num_threads);
  const double capacity = m.total_bytes(m.main_memory());
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  if (!a.attention.json) write_output(machine_text(m));
  for (const AttentionSetup& setup : setups) {
    const Layer layer(a, setup, m);
    // Training: gradients of the weights too.
    const double layers = static_cast<double>(a.layers);
    const double needed =
        layers * (a.train ? 2 * layer.weight_bytes() + layer.kept_bytes() : layer.weight_bytes() + layer.cache_bytes());
    if (!a.attention.json) {
      print(a, setup.problem, layer, needed, capacity);
      continue;
    }
    nlohmann::ordered_json steps = nlohmann::ordered_json::array();
    for (const Step& s : layer.steps()) {
      steps.push_back({{"step", s.name},
                       {"flops", s.flops},
                       {"weight_bytes", s.weight_bytes},
                       {"tensor_bytes", s.tensor_bytes},
                       {"matrix_ms", s.matrix_seconds * 1e3},
                       {"vector_ms", s.vector_seconds * 1e3},
                       {"memory_ms", s.memory_seconds * 1e3},
                       {"bound", s.bound()}});
    }
    rows.push_back({{"tokens", setup.problem.query_len},
                    {"kv_len", setup.problem.kv_len},
                    {"predicted_ms", layer.seconds() * 1e3},
                    {"weight_bytes", layer.weight_bytes()},
                    {"kept_bytes", layer.kept_bytes()},
                    {"cache_bytes", layer.cache_bytes()},
                    {"memory_bytes", needed},
                    {"fits", needed <= capacity},
                    {"steps", steps}});
  }
  if (a.attention.json) write_json({{"machine", to_json(m)}, {"train", a.train}, {"layers", a.layers}, {"rows", rows}});
}

}  // namespace

void add_plan_layer(CLI::App& plan) {
  auto a = std::make_shared<LayerArguments>();
  AttentionArguments& p = a->attention;
  p.heads = 32, p.head_dim = 128, p.dtype = "bf16", p.causal = true, p.seq = {4096};
  CLI::App* command =
      plan.add_subcommand("layer", "The steps of a decoder layer on a described machine, and its memory");
  add_machine_option(*command, a->machine)->required();
  const auto size = [&](const char* name, int64_t& value, const char* help) {
    return command->add_option(name, value, help)->check(between(1, 1 << 20));
  };
  size("--hidden", a->hidden, "Features of a token (default: heads x head_dim)");
  size("--ffn", a->ffn, "Width of the feed-forward part (default: 3.5 x hidden)");
  size("--layers", a->layers, "Layers, for the sums")->capture_default_str();
  size("--batch", p.batch, "Sequences")->capture_default_str();
  size("--heads", p.heads, "Query heads")->capture_default_str();
  size("--kv-heads", p.kv_heads, "Key/value heads (default: as --heads)");
  command->add_option("--head-dim", p.head_dim, "Size of queries, keys and values")
      ->check(between(1, 768))
      ->capture_default_str();
  command->add_option("--dtype", p.dtype, "Type of weights and tensors")
      ->check(one_of({"f32", "bf16", "f16"}))
      ->capture_default_str();
  add_list(*command, "--seq", p.seq, "Keys, separated by commas", between(1, int64_t{1} << 30))->type_name("INT");
  command->add_option("--query-len", p.query_len, "Tokens of the step (default: as many as keys; 1 decodes)")
      ->check(between(1, int64_t{1} << 30));
  command->add_flag("--train", a->train, "The gradients too");
  add_threads_option(*command, p.num_threads);
  command->add_flag("--json", p.json, "Print one JSON object");
  command->callback([a] { run(*a); });
}

}  // namespace opst::tools

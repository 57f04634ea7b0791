// opst bench model: a model's prefill beside the machine's multiply-adds, and its decoding beside plain reading.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <optional>
#include <random>
#include <span>

#include "bench.h"
#include "model/llama.h"
#include "model_options.h"
#include "testing/peak.h"

namespace opst::tools {

namespace {

struct Options {
  std::string model_path;
  std::vector<int64_t> prompt_tokens = {512};
  std::vector<int64_t> contexts = {128, 2048};
  std::string kv_dtype = "f32";
  std::string activations = "exact";
  int num_threads = 0;
  bool json = false;
};

struct Row {
  const char* test = "";
  int64_t tokens = 0;  // of the prompt, or keys that the decoded token sees
  double seconds = 0;  // of the prompt, or of one step
  double tokens_per_second = 0;
  const char* bound = "";
  double bound_per_second = 0;  // flops or bytes
  double fraction = 0, fraction_q1 = 0, fraction_q3 = 0;
  NodeCost cost = {};
  bool valid = true;
};

void require(const Status& status) {
  if (!status.ok()) run_error(status.message());
}

// A model and one sequence of random tokens.
class Bench {
 public:
  Bench(Context& context, const model::LlamaModel& model, const model::SessionOptions& options)
      : context_(context), session_(value_or_fail(model::LlamaSession::create(context, model, options))) {
    std::mt19937 random(1);
    for (int64_t i = 0; i < options.context; ++i) {
      tokens_.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(model.config().vocab_size)));
    }
    chunk_ = std::min(options.prefill_chunk, options.context);
  }

  Row prefill(int64_t tokens) {
    Row row{.test = "prefill", .tokens = tokens, .bound = "f32 multiply-adds"};
    for (int64_t begin = 0; begin < tokens; begin += chunk_) {
      const int64_t end = std::min(begin + chunk_, tokens);
      require(session_.size_graphs(end - begin, end));
      row.cost += value_or_fail(session_.layers_graph().cost());
    }
    row.cost += value_or_fail(session_.logits_graph().cost());
    const test::Fraction f = test::measure_fraction(context_, test::PeakKind::f32, row.cost.flops, [&] {
      session_.reset();
      feed(0, tokens);
    });
    row.seconds = f.call_seconds;
    row.tokens_per_second = static_cast<double>(tokens) / f.call_seconds;
    row.bound_per_second = f.peak_flops_per_second;
    row.fraction = f.fraction, row.fraction_q1 = f.fraction_q1, row.fraction_q3 = f.fraction_q3;
    row.valid = f.valid;
    return row;
  }

  // After all tokens of the context.
  std::span<const float> last_logits() { return feed(0, static_cast<int64_t>(tokens_.size())); }

  // kGroup decoded tokens and kGroup readings of as many bytes take turns. Before each run comes one more, which is not
  // counted: it finds the caches as the run before left them.
  Row decode(int64_t keys) {
    constexpr int kPairs = 15, kGroup = 6;
    Row row{.test = "decode", .tokens = keys, .bound = "plain reading"};
    require(session_.size_graphs(1, keys));
    row.cost = value_or_fail(session_.layers_graph().cost());
    row.cost += value_or_fail(session_.logits_graph().cost());
    const int64_t bytes = row.cost.weight_bytes + row.cost.cache_bytes;
    const Buffer buffer = value_or_fail(Buffer::allocate(bytes));
    std::fill_n(static_cast<char*>(buffer.data()), bytes, char{1});
    const auto read_seconds = [&] {
      double seconds = 0;
      for (int i = -1; i < kGroup; ++i) {
        const double once =
            static_cast<double>(bytes) / test::measure_read_bandwidth(context_, buffer.data(), buffer.size_bytes());
        if (i >= 0) seconds += once / kGroup;
      }
      return seconds;
    };
    session_.reset();
    feed(0, keys);
    const auto step = [&] {
      session_.rewind(keys - 1);
      feed(keys - 1, 1);
    };
    std::vector<double> steps, reads = {read_seconds()}, fractions;
    for (int pair = 0; pair < kPairs; ++pair) {
      step();
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < kGroup; ++i) step();
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      steps.push_back(seconds.count() / kGroup);
      reads.push_back(read_seconds());
      fractions.push_back((reads[reads.size() - 2] + reads.back()) / 2 / steps.back());
    }
    row.seconds = test::quantile(steps, 0.5);
    row.tokens_per_second = 1 / row.seconds;
    row.bound_per_second = static_cast<double>(bytes) / test::quantile(reads, 0.5);
    row.fraction = test::quantile(fractions, 0.5);
    row.fraction_q1 = test::quantile(fractions, 0.25), row.fraction_q3 = test::quantile(fractions, 0.75);
    return row;
  }

 private:
  std::span<const float> feed(int64_t begin, int64_t count) {
    return value_or_fail(
        session_.feed(std::span(tokens_).subspan(static_cast<size_t>(begin), static_cast<size_t>(count))));
  }

  Context& context_;
  model::LlamaSession session_;
  std::vector<int32_t> tokens_;
  int64_t chunk_ = 0;
};

// How far the distribution of the next token is from that of exact activations, after some tokens.
struct Accuracy {
  int64_t tokens = 0;
  double kl_divergence = 0;  // of the exact distribution, in nats
  double largest = 0;        // difference of a logit
};

Accuracy compare_with_exact(Context& context, const model::LlamaModel& model, model::SessionOptions options) {
  options.context = std::min<int64_t>(options.context, 128);
  Accuracy accuracy{.tokens = options.context};
  std::vector<double> logits[2], log_sums;
  for (std::vector<double>& row : logits) {
    Bench bench(context, model, options);
    const std::span<const float> last = bench.last_logits();
    row.assign(last.begin(), last.end());
    const double top = *std::max_element(row.begin(), row.end());
    double sum = 0;
    for (const double logit : row) sum += std::exp(logit - top);
    log_sums.push_back(top + std::log(sum));
    options.activations = ActivationType::exact;
  }
  for (size_t i = 0; i < logits[0].size(); ++i) {
    const double rounded = logits[0][i] - log_sums[0], exact = logits[1][i] - log_sums[1];
    accuracy.kl_divergence += std::exp(exact) * (exact - rounded);
    accuracy.largest = std::max(accuracy.largest, std::abs(logits[0][i] - logits[1][i]));
  }
  return accuracy;
}

bool is_prefill(const Row& row) { return std::string_view(row.test) == "prefill"; }
double megabytes(const Row& row) { return static_cast<double>(row.cost.weight_bytes + row.cost.cache_bytes) / 1e6; }

void print_row(const Row& row) {
  char text[300];
  std::snprintf(text, sizeof(text), "%-8s %7lld  %10.2f  %11.1f  %6.1f %% (%.1f to %.1f)%s  %9.1f %s  %9.2f\n",
                row.test, static_cast<long long>(row.tokens), row.seconds * 1e3, row.tokens_per_second,
                row.fraction * 100, row.fraction_q1 * 100, row.fraction_q3 * 100, row.valid ? " " : "*",
                row.bound_per_second / 1e9, is_prefill(row) ? "GFLOP/s" : "GB/s   ", megabytes(row));
  write_output(text);
}

nlohmann::ordered_json to_json(const Row& row) {
  return {{"test", row.test},
          {"tokens", row.tokens},
          {"ms", row.seconds * 1e3},
          {"tokens_per_s", row.tokens_per_second},
          {"bound", row.bound},
          {"bound_per_s", row.bound_per_second},
          {"fraction", row.fraction},
          {"fraction_quartiles", {row.fraction_q1, row.fraction_q3}},
          {"valid", row.valid},
          {"flops", row.cost.flops},
          {"weight_bytes", row.cost.weight_bytes},
          {"cache_bytes", row.cost.cache_bytes}};
}

void run(const Options& options) {
  Context context = make_context(options.num_threads);
  const model::GgufFile file = value_or_fail(model::GgufFile::open(options.model_path));
  const model::LlamaConfig config = value_or_fail(model::read_llama_config(file));
  model::SessionOptions session;
  session.context = 1;
  for (const auto* lengths : {&options.prompt_tokens, &options.contexts}) {
    for (const int64_t length : *lengths) session.context = std::max(session.context, length);
  }
  if (session.context > config.max_context) {
    usage_error(std::to_string(session.context) + " tokens are asked for, but the model's context is " +
                std::to_string(config.max_context));
  }
  session.kv_dtype = kv_dtype_of(options.kv_dtype);
  session.activations = activation_type(options.activations);
  const model::LlamaModel model = value_or_fail(model::LlamaModel::load(context, file));
  Bench bench(context, model, session);

  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  bool all_valid = true;
  if (!options.json) {
    char text[300];
    std::snprintf(text, sizeof(text),
                  "%s, %s cache, %s activations, %d thread(s), %s\n\n%-8s %7s  %10s  %11s  %26s  %17s  %9s\n",
                  options.model_path.substr(options.model_path.rfind('/') + 1).c_str(), options.kv_dtype.c_str(),
                  options.activations.c_str(), context.num_threads(), to_string(context.machine().isa), "test",
                  "tokens", "ms", "tokens/s", "of the bound (quartiles)", "bound", "MB");
    write_output(text);
  }
  const auto report = [&](const Row& row) {
    all_valid = all_valid && row.valid;
    if (options.json)
      rows.push_back(to_json(row));
    else
      print_row(row);
  };
  for (const int64_t tokens : options.prompt_tokens) report(bench.prefill(tokens));
  for (const int64_t keys : options.contexts) report(bench.decode(keys));
  std::optional<Accuracy> accuracy;
  if (session.activations != ActivationType::exact) accuracy = compare_with_exact(context, model, session);
  if (options.json) {
    nlohmann::ordered_json rounded;
    if (accuracy) {
      rounded = {{"tokens", accuracy->tokens},
                 {"kl_divergence", accuracy->kl_divergence},
                 {"largest_logit_difference", accuracy->largest}};
    }
    write_json({{"machine", to_string(context.machine())},
                {"threads", context.num_threads()},
                {"kv_dtype", options.kv_dtype},
                {"activations", options.activations},
                {"accuracy", rounded},
                {"rows", rows}});
    return;
  }
  write_output(
      "\nbound: of a prompt, multiply-adds of the same length; of a decoded token, which sees that many keys, plainly\n"
      "reading as many bytes as its weights and keys and values have. Same threads, in turns; medians\n");
  if (accuracy) {
    char text[300];
    std::snprintf(text, sizeof(text),
                  "%s activations: after %lld random tokens the next one's distribution is %.2g nats (KL divergence) "
                  "from the\nexact one, and the largest difference of a logit %.3g\n",
                  options.activations.c_str(), static_cast<long long>(accuracy->tokens), accuracy->kl_divergence,
                  accuracy->largest);
    write_output(text);
  }
  if (!all_valid) write_output("* the reference bursts did not have the machine to themselves\n");
}

}  // namespace

void add_bench_model(CLI::App& bench) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      bench.add_subcommand("model", "A model's tokens per second, and how close they come to the machine");
  command->add_option("-m,--model", options->model_path, "A GGUF file")->required()->type_name("FILE");
  add_list(*command, "--prompt-tokens", options->prompt_tokens, "Lengths of prompts, separated by commas", at_least(1))
      ->type_name("N");
  add_list(*command, "--context", options->contexts, "Keys that a decoded token sees, separated by commas", at_least(1))
      ->type_name("N");
  add_threads_option(*command, options->num_threads);
  add_kv_dtype_option(*command, options->kv_dtype);
  add_activations_option(*command, options->activations);
  command->add_flag("--json", options->json, "Print one JSON object");
  command->callback([options] { run(*options); });
}

}  // namespace opst::tools

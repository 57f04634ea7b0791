// opst perplexity: how well a model predicts a text.
#include "model/perplexity.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "model/utf8.h"
#include "model_options.h"
#include "prompt_options.h"

namespace opst::tools {

namespace {

constexpr int64_t kDefaultContext = 1024;
// Positions whose logits are computed together: 6 MB of them at a vocabulary of 49152, within the L3 of a few cores.
constexpr int64_t kLogitRows = 32;

struct Options {
  std::string model_path;
  std::string text_path;
  TextArguments as_tokens;
  SessionArguments session;
  int num_threads = 0;
  bool json = false;
};

// One line on standard error that is written over and over, if that is a terminal.
class Progress {
 public:
  explicit Progress(size_t all_tokens) : all_tokens_(all_tokens), shown_(isatty(STDERR_FILENO) != 0) {}
  ~Progress() {
    if (shown_) std::fprintf(stderr, "\r%-60s\r", "");
  }
  void show(const model::WindowScore& window) {
    nll_sum_ += window.nll_sum;
    counted_ += window.tokens - 1;
    if (!shown_) return;
    std::fprintf(stderr, "\r%lld of %zu tokens, mean NLL so far %.4f",
                 static_cast<long long>(window.begin + window.tokens), all_tokens_,
                 nll_sum_ / static_cast<double>(counted_));
  }

 private:
  size_t all_tokens_;
  bool shown_;
  double nll_sum_ = 0;
  int64_t counted_ = 0;
};

void run(const Options& options) {
  const std::string text = read_file(options.text_path);
  if (text.empty()) usage_error(options.text_path + ": the text is empty");
  if (!model::is_valid_utf8(text)) usage_error(options.text_path + ": the text is not valid UTF-8");
  Context context = make_context(options.num_threads);
  const model::ModelFile file = value_or_fail(model::ModelFile::open(options.model_path));
  const int64_t window = options.session.context(file.config, kDefaultContext);
  const std::vector<int32_t> ids = value_or_fail(model::text_ids(file.tokenizer, text, options.as_tokens.options()));
  if (ids.size() < 2) {
    usage_error(options.text_path + ": the text has " + std::to_string(ids.size()) +
                " tokens, but predicting one from another takes 2");
  }
  const model::LlamaModel weights = value_or_fail(model::LlamaModel::load(context, file.file));
  model::LlamaSession session = value_or_fail(model::LlamaSession::create(context, weights,
                                                                          {.context = window,
                                                                           .kv_dtype = options.session.kv_dtype(),
                                                                           .activations = options.session.activations(),
                                                                           .logit_rows = kLogitRows}));

  const model::Perplexity result = [&] {
    Progress progress(ids.size());
    return value_or_fail(
        model::measure_perplexity(session, ids, [&](const model::WindowScore& score) { progress.show(score); }));
  }();
  if (options.json) {
    write_json({{"mean_nll", result.mean_nll()},
                {"perplexity", result.perplexity()},
                {"tokens", result.tokens},
                {"counted", result.counted}});
    return;
  }
  char line[256];
  std::snprintf(line, sizeof line, "mean NLL    %.6f\nperplexity  %.6g\ntokens      %lld, of which %lld predicted\n",
                result.mean_nll(), result.perplexity(), static_cast<long long>(result.tokens),
                static_cast<long long>(result.counted));
  write_output(line);
}

}  // namespace

void add_perplexity(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("perplexity", "Measure how well a language model predicts a text");
  command->add_option("-m,--model", options->model_path, "Model file (GGUF)")->required()->type_name("FILE");
  command->add_option("-f,--file", options->text_path, "The text, UTF-8, taken byte for byte")
      ->required()
      ->type_name("FILE");
  options->as_tokens.add_to(*command);
  options->session.add_to(*command,
                          "Tokens of a window; every window starts fresh (default: 1024, at most the model's)", 2);
  add_threads_option(*command, options->num_threads);
  command->add_flag("--json", options->json, "Print one JSON object");
  command->callback([options] { run(*options); });
}

}  // namespace opst::tools

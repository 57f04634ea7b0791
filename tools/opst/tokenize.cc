// opst tokenize: the token ids of a text.
#include "model/prompt.h"
#include "model/utf8.h"
#include "prompt_options.h"

namespace opst::tools {

namespace {

struct Options {
  PromptOptions prompt;
  bool json = false;
};

void run(const Options& options) {
  const std::string text = options.prompt.text();
  const model::ModelFile model = value_or_fail(model::ModelFile::open(options.prompt.model_path));
  const auto ids = value_or_fail(model::text_ids(model.tokenizer, text, options.prompt.as_tokens.options()));
  if (options.json) {
    nlohmann::ordered_json pieces = nlohmann::json::array();
    for (const int32_t id : ids) {
      model::Utf8Stream stream;
      std::string piece = stream.push(model.tokenizer.piece(id));
      pieces.push_back(piece + stream.finish());
    }
    write_json({{"tokens", ids}, {"pieces", pieces}});
    return;
  }
  std::string line;
  for (const int32_t id : ids) line += (line.empty() ? "" : " ") + std::to_string(id);
  write_output(line + "\n");
}

}  // namespace

void add_tokenize(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("tokenize", "Print the token ids of a text");
  options->prompt.add_to(*command);
  command->add_flag("--json", options->json, R"(Print {"tokens": [...], "pieces": [...]} instead of the ids)");
  command->callback([options] { run(*options); });
}

}  // namespace opst::tools

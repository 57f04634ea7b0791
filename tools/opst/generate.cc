// opst generate: a model answers.
#include "model/generate.h"

#include <unistd.h>

#include <chrono>
#include <fstream>
#include <optional>

#include "model/llama.h"
#include "model/prompt.h"
#include "model/utf8.h"
#include "model_options.h"
#include "prompt_options.h"
#include "trace.h"

namespace opst::tools {

namespace {

constexpr int64_t kDefaultContext = 4096;

struct Options {
  PromptOptions prompt;
  bool chat = false;
  std::string system;
  bool has_system = false;
  SamplingArguments sampling;
  model::GenerateOptions generate;
  model::SessionOptions session;
  SessionArguments session_arguments;
  std::string cache = "contiguous";
  int num_threads = 0;
  std::string trace_path;
  bool json = false;
};

// The most memory that this program has held at once. (getrusage would count what the parent held before exec.)
int64_t peak_rss_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::strtoll(line.c_str() + 6, nullptr, 10) * 1024;
  }
  return 0;
}

std::vector<int32_t> prompt_ids(const Options& options, const model::ModelFile& model, const std::string& text) {
  if (!options.chat) return value_or_fail(model::text_ids(model.tokenizer, text, options.prompt.as_tokens.options()));
  std::vector<model::ChatMessage> messages;
  if (options.has_system) messages.push_back({"system", options.system});
  messages.push_back({"user", text});
  return value_or_fail(model::chat_prompt(model.file, model.tokenizer, messages));
}

nlohmann::ordered_json to_json(const model::Generation& generation) {
  const auto or_null = [](const std::optional<double>& value) {
    return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json();
  };
  return {{"tokens", generation.tokens},
          {"text", generation.text},
          {"finish_reason", to_string(generation.finish_reason)},
          {"ttft_ms", generation.ttft_ms},
          {"tpot_ms", or_null(generation.tpot_ms)},
          {"prefill_tokens_per_s", generation.prefill_tokens_per_s},
          {"decode_tokens_per_s", or_null(generation.decode_tokens_per_s)}};
}

void run(Options& options) {
  const std::string text = options.prompt.text();
  if (!model::is_valid_utf8(options.system)) usage_error("the system text is not valid UTF-8");
  options.generate.sampling = options.sampling.chosen();
  Context context = make_context(options.num_threads);

  const auto load_start = std::chrono::steady_clock::now();
  std::optional<model::ModelFile> file = value_or_fail(model::ModelFile::open(options.prompt.model_path));
  options.session.kv_dtype = options.session_arguments.kv_dtype();
  options.session.activations = options.session_arguments.activations();
  options.session.cache = options.cache == "paged" ? model::CacheKind::paged : model::CacheKind::contiguous;
  options.session.context = options.session_arguments.context(file->config, kDefaultContext);
  const std::vector<int32_t> ids = prompt_ids(options, *file, text);
  if (ids.empty()) usage_error("no part of the prompt has a token");
  if (static_cast<int64_t>(ids.size()) >= options.session.context) {
    usage_error("the prompt has " + std::to_string(ids.size()) + " tokens, which leaves no room in a context of " +
                std::to_string(options.session.context));
  }
  const model::LlamaModel weights = value_or_fail(model::LlamaModel::load(context, file->file));
  const model::Tokenizer tokenizer = std::move(file->tokenizer);
  file.reset();
  model::LlamaSession session = value_or_fail(model::LlamaSession::create(context, weights, options.session));
  Trace trace;
  if (!options.trace_path.empty()) session.set_listener(&trace);
  const double load_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - load_start).count();

  const auto on_text = [&](std::string_view piece) { return options.json ? Status() : try_write_output(piece); };
  const model::Generation generation =
      value_or_fail(model::generate(session, tokenizer, ids, options.generate, on_text));
  if (!options.trace_path.empty()) {
    if (const Status status = trace.write(options.trace_path); !status.ok()) run_error(status.message());
  }
  if (options.json) {
    nlohmann::ordered_json json = {{"prompt_tokens", ids.size()}};
    json.update(to_json(generation));
    json.update({{"load_ms", load_ms},
                 {"peak_rss_bytes", peak_rss_bytes()},
                 {"kv_cache_bytes", session.kv_cache_bytes()},
                 {"isa", to_string(context.machine().isa)},
                 {"threads", context.num_threads()}});
    write_json(json);
    return;
  }
  // Elsewhere the output is the text, byte for byte.
  if (isatty(STDOUT_FILENO) != 0) write_output("\n");
  if (isatty(STDERR_FILENO) != 0) {
    std::fprintf(stderr, "%zu prompt tokens at %.0f tokens/s, %zu generated at %.1f tokens/s, finished by %s\n",
                 ids.size(), generation.prefill_tokens_per_s, generation.tokens.size(),
                 generation.decode_tokens_per_s.value_or(0), to_string(generation.finish_reason));
  }
}

}  // namespace

void add_generate(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("generate", "Let a language model continue a text or answer");
  options->prompt.add_to(*command);
  CLI::Option* chat = command->add_flag("--chat", options->chat,
                                        "The prompt is a user's message: the model's chat template goes around it, and "
                                        "whatever it contains is plain text");
  command->get_option("--no-bos")->excludes(chat);
  command->add_option("--system", options->system, "The system message of the chat (default: the template's own)")
      ->needs(chat)
      ->type_name("TEXT")
      ->each([options = options.get()](const std::string&) { options->has_system = true; });
  command->add_option("-n,--max-tokens", options->generate.max_tokens, "Stop after so many tokens")
      ->check(at_least(1))
      ->type_name("N")
      ->capture_default_str();
  command->add_flag("--ignore-eos", options->generate.ignore_end, "Go on where the model ends its text");
  options->session_arguments.add_to(*command,
                                    "Tokens of prompt and answer together (default: 4096, at most the model's)");
  add_threads_option(*command, options->num_threads);
  command->add_option("--cache", options->cache, "paged: in blocks that are found through a block table")
      ->check(one_of({"contiguous", "paged"}))
      ->type_name("contiguous|paged")
      ->capture_default_str();
  CLI::Option* block_size =
      command->add_option("--block-size", options->session.block_size, "Tokens in a block of --cache paged")
          ->check(at_least(1))
          ->type_name("N")
          ->capture_default_str();
  command
      ->add_option("-b,--prefill-chunk", options->session.prefill_chunk,
                   "Tokens of the prompt that go through the model together")
      ->check(at_least(1))
      ->type_name("N")
      ->capture_default_str();
  command
      ->add_option("--trace", options->trace_path,
                   "Write when each node of the model's graph ran, for chrome://tracing or ui.perfetto.dev")
      ->type_name("FILE");
  command->add_flag("--json", options->json, "Print one JSON object at the end instead of the text as it grows");
  options->sampling.add_to(*command);
  command->callback([options, block_size] {
    if (block_size->count() > 0 && options->cache != "paged") {
      usage_error("--block-size is for --cache paged, but --cache is " + options->cache);
    }
    run(*options);
  });
}

}  // namespace opst::tools

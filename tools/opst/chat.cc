// opst chat: a conversation with a model.
//
// At a terminal: answers go to standard output, all else (prompt, echo, notices) to standard error. From a pipe or a
// file: every line is a message, no prompt; notices are lines on standard error.
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>

#include "model/conversation.h"
#include "model/llama.h"
#include "model/utf8.h"
#include "model_options.h"
#include "prompt_options.h"
#include "terminal.h"

namespace opst::tools {

namespace {

constexpr int64_t kDefaultContext = 4096;

constexpr const char* kHelp =
    "/reset   forget the conversation; the system message stays\n"
    "/help    show this\n"
    "/quit    leave, as Ctrl-D does\n"
    "Ctrl-C stops an answer. At the prompt it drops the line, and once more leaves.\n";

struct Options {
  std::string model_path;
  std::string system;
  bool has_system = false;
  int64_t max_tokens = 1024;
  SamplingArguments sampling;
  SessionArguments session;
  int num_threads = 0;
};

// "/word" and nothing else: a path or a sentence that begins with a slash is a message.
bool is_command(const std::string& line) {
  return line.size() >= 2 && line[0] == '/' &&
         std::all_of(line.begin() + 1, line.end(), [](unsigned char c) { return std::isalpha(c) != 0; });
}

class Chat {
 public:
  // terminal: null for a pipe.
  Chat(model::Conversation& conversation, const Options& options, int64_t context, Terminal* terminal)
      : conversation_(conversation), options_(options), context_(context), terminal_(terminal) {}

  void run() {
    if (terminal_ != nullptr) {
      note("context of " + std::to_string(context_) +
           " tokens; Ctrl-C stops an answer, Ctrl-D leaves, /help tells more");
    }
    std::string line;
    while (next_message(line)) {
      if (!is_command(line)) {
        answer(line);
      } else if (line == "/quit") {
        break;
      } else if (line == "/reset") {
        conversation_.reset();
        note("a new conversation");
      } else if (line == "/help") {
        std::fputs(kHelp, stderr);
      } else {
        note(line + " is no command; /help shows them");
      }
    }
    if (terminal_ == nullptr && num_unanswered_ > 0) {
      run_error(std::to_string(num_unanswered_) + (num_unanswered_ == 1 ? " message was" : " messages were") +
                " not answered");
    }
  }

 private:
  // A line of the input, of any length; false at the end. A read that fails is an error, not the end.
  static bool read_line(std::string& line) {
    line.clear();
    int c;
    while ((c = std::getc(stdin)) != EOF && c != '\n') line.push_back(static_cast<char>(c));
    if (std::ferror(stdin) != 0) run_error(std::string("standard input: cannot read: ") + std::strerror(errno));
    return c != EOF || !line.empty();
  }
  // False at the end. Empty lines are none.
  bool next_message(std::string& line) {
    do {
      if (terminal_ == nullptr) {
        if (!read_line(line)) return false;
        if (!line.empty() && line.back() == '\r') line.pop_back();
        continue;
      }
      const Terminal::Event event = terminal_->read_line("> ", line);
      if (event == Terminal::Event::end) return false;
      if (event == Terminal::Event::interrupt) {
        if (interrupted_before_ && line.empty()) return false;
        if (line.empty()) note("once more, or Ctrl-D, leaves");
        line.clear();
        interrupted_before_ = true;
        continue;
      }
      interrupted_before_ = false;
    } while (line.find_first_not_of(" \t") == std::string::npos);
    return true;
  }

  void answer(const std::string& message) {
    if (!model::is_valid_utf8(message)) return refuse("the message is not valid UTF-8");
    const bool first = conversation_.tokens() == 0;
    if (terminal_ != nullptr) terminal_->forget_interrupts();
    const auto interrupted = [this] { return terminal_ != nullptr && terminal_->interrupted(); };
    const Result<model::Generation> result =
        conversation_.answer(message, options_.max_tokens, try_write_output, interrupted);
    if (result.status().code() == StatusCode::invalid_argument) {
      return refuse(first ? result.status().message()
                          : "the context is full: " + result.status().message() + "; /reset starts a new conversation");
    }
    if (!result.ok()) run_error(result.status().message());
    write_output("\n");
    switch (result.value().finish_reason) {
      case model::FinishReason::stop:
        break;
      case model::FinishReason::length:
        note("cut after --max-tokens " + std::to_string(options_.max_tokens));
        break;
      case model::FinishReason::context:
        note("cut: the context of " + std::to_string(context_) + " tokens is full; /reset starts a new conversation");
        break;
      case model::FinishReason::interrupted:
        interrupted_before_ = true;
        note("stopped");
        break;
    }
  }

  void refuse(const std::string& reason) {
    ++num_unanswered_;
    note("not sent: " + reason);
  }

  void note(const std::string& text) const {
    if (terminal_ != nullptr) {
      std::fprintf(stderr, "[%s]\n", printable(text).c_str());
    } else {
      std::fprintf(stderr, "opst chat: %s\n", printable(text).c_str());
    }
  }

  model::Conversation& conversation_;
  const Options& options_;
  int64_t context_;
  Terminal* terminal_;
  bool interrupted_before_ = false;  // and nothing entered since
  int64_t num_unanswered_ = 0;
};

void run(const Options& options) {
  if (!model::is_valid_utf8(options.system)) usage_error("the system text is not valid UTF-8");
  const model::SamplingOptions sampling = options.sampling.chosen();
  Context context = make_context(options.num_threads);
  std::optional<model::ModelFile> file = value_or_fail(model::ModelFile::open(options.model_path));
  const int64_t length = options.session.context(file->config, kDefaultContext);
  const model::Tokenizer tokenizer = std::move(file->tokenizer);
  const model::ChatTemplate chat_template = value_or_fail(model::ChatTemplate::from_gguf(file->file, tokenizer));
  const model::LlamaModel weights = value_or_fail(model::LlamaModel::load(context, file->file));
  file.reset();
  model::LlamaSession session = value_or_fail(model::LlamaSession::create(
      context, weights,
      {.context = length, .kv_dtype = options.session.kv_dtype(), .activations = options.session.activations()}));
  model::Conversation conversation = value_or_fail(
      model::Conversation::create(session, tokenizer, chat_template,
                                  options.has_system ? std::optional(options.system) : std::nullopt, sampling),
      2);

  std::optional<Terminal> terminal;
  if (isatty(STDIN_FILENO) != 0 && isatty(STDERR_FILENO) != 0) terminal.emplace();
  Chat(conversation, options, length, terminal ? &*terminal : nullptr).run();
}

}  // namespace

void add_chat(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("chat", "Talk with a language model");
  command->footer(std::string("A line is a message, plain text whatever it contains, or one of these:\n") + kHelp +
                  "From a pipe or a file every line is a message too; exit code 1 if one could not be answered.");
  command->add_option("-m,--model", options->model_path, "Model file (GGUF)")->required()->type_name("FILE");
  command->add_option("--system", options->system, "The system message (default: the chat template's own)")
      ->type_name("TEXT")
      ->each([options = options.get()](const std::string&) { options->has_system = true; });
  command->add_option("-n,--max-tokens", options->max_tokens, "Stop each answer after so many tokens")
      ->check(at_least(1))
      ->type_name("N")
      ->capture_default_str();
  options->session.add_to(*command, "Tokens of the whole conversation (default: 4096, at most the model's)");
  add_threads_option(*command, options->num_threads);
  options->sampling.add_to(*command);
  command->callback([options] { run(*options); });
}

}  // namespace opst::tools

#include "command_line.h"

#include <algorithm>
#include <span>
#include <string_view>

#include "command.h"

namespace opst::tools {

namespace {

struct Habit {
  const char* theirs;
  const char* ours;
};
constexpr Habit kSameThing[] = {
    {"--temp", "--temperature"}, {"--n-predict", "--max-tokens"},     {"--predict", "--max-tokens"},
    {"--ctx-size", "--context"}, {"--file", "--prompt-file"},         {"--system-prompt", "--system"},
    {"-sys", "--system"},        {"--batch-size", "--prefill-chunk"}, {"--sampling-seed", "--seed"},
};

constexpr const char* kSampling = "tokens are chosen by --temperature, --top-k, --top-p and --seed alone";
constexpr const char* kGpu = "opst runs on the CPU, so nothing is moved to a GPU";
constexpr const char* kChat = "a conversation is opst chat";
constexpr const char* kMemory = "the weights are always read into memory";
constexpr const char* kDownload = "opst downloads nothing: give a file with --model";
constexpr const char* kCache = "one type for keys and values is --kv-dtype";
constexpr const char* kThreads = "all threads are --threads";
constexpr const char* kFlash = "attention always takes the flash form";
constexpr const char* kTemplate = "the chat template is the model file's own; opst generate --chat uses it";
constexpr const char* kQuiet = "standard output holds the result alone as it is";
constexpr const char* kAdapter = "adapters are not supported";
constexpr Habit kOtherThing[] = {
    {"--repeat-penalty", kSampling},
    {"--repeat-last-n", kSampling},
    {"--presence-penalty", kSampling},
    {"--frequency-penalty", kSampling},
    {"--min-p", kSampling},
    {"--typical", kSampling},
    {"--mirostat", kSampling},
    {"--logit-bias", kSampling},
    {"--samplers", kSampling},
    {"--grammar", kSampling},
    {"-ngl", kGpu},
    {"--n-gpu-layers", kGpu},
    {"--gpu-layers", kGpu},
    {"-mg", kGpu},
    {"--main-gpu", kGpu},
    {"-dev", kGpu},
    {"--device", kGpu},
    {"-cnv", kChat},
    {"--conversation", kChat},
    {"-i", kChat},
    {"--interactive", kChat},
    {"--mlock", kMemory},
    {"--no-mmap", kMemory},
    {"--mmap", kMemory},
    {"-hf", kDownload},
    {"--hf-repo", kDownload},
    {"-mu", kDownload},
    {"--model-url", kDownload},
    {"-ctk", kCache},
    {"--cache-type-k", kCache},
    {"-ctv", kCache},
    {"--cache-type-v", kCache},
    {"-tb", kThreads},
    {"--threads-batch", kThreads},
    {"-ub", "prompts go through the model in pieces of --prefill-chunk"},
    {"--ubatch-size", "prompts go through the model in pieces of --prefill-chunk"},
    {"-fa", kFlash},
    {"--flash-attn", kFlash},
    {"--jinja", kTemplate},
    {"--chat-template", kTemplate},
    {"--no-display-prompt", kQuiet},
    {"--log-disable", kQuiet},
    {"--lora", kAdapter},
};

const char* find(std::span<const Habit> habits, std::string_view name) {
  const auto found = std::find_if(habits.begin(), habits.end(), [&](const Habit& h) { return name == h.theirs; });
  return found == habits.end() ? nullptr : found->ours;
}

std::vector<const CLI::App*> all_subcommands(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

// The deepest subcommand that the arguments name from their beginning on.
const CLI::App* named_command(const CLI::App& app, int argc, char** argv, std::string* name) {
  const CLI::App* command = &app;
  for (int i = 1; i < argc; ++i) {
    const auto commands = all_subcommands(*command);
    const auto found =
        std::find_if(commands.begin(), commands.end(), [&](const CLI::App* c) { return c->get_name() == argv[i]; });
    if (found == commands.end()) break;
    command = *found;
    if (name != nullptr) *name += " " + command->get_name();
  }
  return command;
}

// As get_option_no_throw(), which is noexcept but takes memory: without any it would end the process.
bool has_option(const CLI::App& command, const std::string& name) {
  const std::vector<const CLI::Option*> options = command.get_options();
  return std::any_of(options.begin(), options.end(), [&](const CLI::Option* o) { return o->check_name(name); });
}

}  // namespace

std::string command_name(const CLI::App& app, int argc, char** argv) {
  std::string name = app.get_name();
  named_command(app, argc, argv, &name);
  return name;
}

std::vector<std::string> own_names(const CLI::App& app, int argc, char** argv) {
  const CLI::App& command = *named_command(app, argc, argv, nullptr);
  // Operators have no options of a model's; there an unknown name is just that.
  const bool runs_a_model = has_option(command, "--model");
  std::vector<std::string> arguments;
  for (int i = 1; i < argc; ++i) {
    std::string argument = argv[i];
    const std::string name = argument.substr(0, argument.find('='));
    if (runs_a_model && argument.starts_with('-') && !has_option(command, name)) {
      if (const char* same = find(kSameThing, name); same != nullptr && has_option(command, same)) {
        argument = same + argument.substr(name.size());
      } else if (const char* other = find(kOtherThing, name)) {
        usage_error("there is no " + name + " here: " + other);
      }
    }
    arguments.push_back(std::move(argument));
  }
  std::reverse(arguments.begin(), arguments.end());
  return arguments;
}

std::string what_is_wrong(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* command = &app;
  std::string name = app.get_name();
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().front();
    name += " " + command->get_name();
  }
  const std::vector<std::string> unknown = app.remaining(true);
  if (const auto choices = all_subcommands(*command); !choices.empty()) {
    std::string list;
    for (const CLI::App* choice : choices) list += (list.empty() ? "" : ", ") + choice->get_name();
    if (!unknown.empty() && !unknown[0].starts_with('-')) return "'" + unknown[0] + "' is none of " + list;
    if (unknown.empty()) return "a subcommand is required: " + list;
  }
  if (dynamic_cast<const CLI::ExtrasError*>(&error) == nullptr) return error.what();
  std::string list;
  for (const std::string& argument : unknown) list += (list.empty() ? "" : " ") + argument;
  return "unknown: " + list + "; see " + name + " --help";
}

}  // namespace opst::tools

// The program on the real model, against src/testing/data/reference.
#include "model/reference_data.h"
#include "model/utf8.h"
#include "program.h"
#include "pseudo_terminal.h"

namespace opst::tools {
namespace {

using model::reference_line;
using model::reference_model_path;

class OpstReference : public model::ReferenceModelTest {
 protected:
  static Outcome generate(std::vector<std::string> more, const RunOptions& options = {}) {
    more.insert(more.begin(), {"generate", "--model", reference_model_path()});
    const Outcome outcome = run_program(more, options);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return outcome;
  }
};

TEST_F(OpstReference, RawPrompt) {
  const auto prompt = reference_line("prompts.jsonl", "short_en"), greedy = reference_line("greedy.jsonl", "short_en");
  const auto json = generate({"-p", prompt["prompt"], "-n", "128", "--json"}).json();
  EXPECT_EQ(json["prompt_tokens"], prompt["n_tokens"]);
  EXPECT_EQ(json["tokens"], greedy["tokens"]);
  EXPECT_EQ(json["text"], greedy["text_without_special"]);
  EXPECT_EQ(json["finish_reason"], "stop");
}

TEST_F(OpstReference, ChatPrompt) {
  const auto prompt = reference_line("prompts.jsonl", "chat_question"),
             greedy = reference_line("greedy.jsonl", "chat_question");
  const auto json = generate({"-p", prompt["messages"][0]["content"], "--chat", "--json"}).json();
  EXPECT_EQ(json["prompt_tokens"], prompt["n_tokens"]);
  EXPECT_EQ(json["tokens"], greedy["tokens"]);
  EXPECT_EQ(json["text"], greedy["text_without_special"]);
}

TEST_F(OpstReference, StreamedCharactersAreWhole) {
  const auto prompt = reference_line("prompts.jsonl", "mixed_scripts"),
             greedy = reference_line("greedy.jsonl", "mixed_scripts");
  const TemporaryFolder folder;
  RunOptions options;
  int reads = 0;
  options.on_read = [&](const std::string& piece) {
    ++reads;
    EXPECT_TRUE(model::is_valid_utf8(piece)) << testing::PrintToString(piece);
  };
  const std::string path = folder.write("prompt", prompt["prompt"].get<std::string>());
  const Outcome outcome = generate({"-f", path, "-n", std::to_string(greedy["n_requested"].get<int>())}, options);
  EXPECT_EQ(outcome.out, greedy["text_without_special"].get<std::string>());
  EXPECT_GT(reads, 5);
}

// Two turns at a terminal; the second answer is the one that the whole conversation gets, written out and fed at once.
TEST_F(OpstReference, ChatKeepsItsHistory) {
  if (!PseudoTerminal::available()) GTEST_SKIP() << PseudoTerminal::kMissing;
  const std::string question = "What is the capital of France?", next = "And of Italy?";
  PseudoTerminal terminal({"chat", "--model", reference_model_path(), "-n", "48"});
  const auto ask = [&](const std::string& message) {
    terminal.wait_for("> ");
    terminal.type(message + "\r");
    EXPECT_EQ(terminal.wait_for("\r\n"), message);
    return terminal.wait_for("\r\n");
  };
  const std::string first = ask(question), second = ask(next);
  terminal.wait_for("> ");
  terminal.type("\x04");
  EXPECT_EQ(terminal.wait_for_exit(), 0);

  EXPECT_EQ(first, generate({"-p", question, "--chat", "-n", "48"}).out);
  EXPECT_EQ(second, "The capital of Italy is Rome.");  // "capital" is from the first turn
  const TemporaryFolder folder;
  const std::string path = folder.write(
      "prompt",
      "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
      "<|im_start|>user\n" +
          question + "<|im_end|>\n<|im_start|>assistant\n" + first + "<|im_end|>\n<|im_start|>user\n" + next +
          "<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(second, generate({"-f", path, "-n", "48"}).out);
}

}  // namespace
}  // namespace opst::tools

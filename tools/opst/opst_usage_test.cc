// What the program says to a wrong command line, to an output that fails and on a terminal; one preparation of text for
// all subcommands. On small random models.
#include <gtest/gtest.h>

#include <algorithm>

#include "model/tiny_model.h"
#include "program.h"
#include "pseudo_terminal.h"

namespace opst::tools {
namespace {

using model::make_tiny_model;
using model::TinyModel;

class OpstUsage : public testing::Test {
 protected:
  OpstUsage() { model_ = folder_.write("tiny.gguf", make_tiny_model().writer.bytes()); }

  std::vector<std::string> with_model(const std::string& command, const std::vector<std::string>& more) const {
    std::vector<std::string> arguments = {command, "-m", model_};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  // The one line that the program ends with, and nothing else.
  std::string refusal(const std::vector<std::string>& arguments, int exit_code = 2, const RunOptions& options = {}) {
    const Outcome outcome = run_program(arguments, options);
    EXPECT_EQ(outcome.exit_code, exit_code) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    return outcome.err;
  }

  TemporaryFolder folder_;
  std::string model_;
};

TEST_F(OpstUsage, WhatNobodyKnowsIsListedInOrder) {
  EXPECT_EQ(refusal(with_model("generate", {"-p", "x", "--first", "--second=2", "third"})),
            "opst generate: unknown: --first --second=2 third; see opst generate --help\n");
  EXPECT_EQ(refusal({"info", "--one", "--two"}), "opst info: unknown: --one --two; see opst info --help\n");
}

TEST_F(OpstUsage, AMissingSubcommandNamesTheChoices) {
  EXPECT_EQ(refusal({"bench"}), "opst bench: a subcommand is required: attention, matmul, model, moe, tables\n");
  EXPECT_EQ(refusal({"check"}), "opst check: a subcommand is required: attention, matmul, moe\n");
  EXPECT_EQ(refusal({"plan"}),
            "opst plan: a subcommand is required: attention, kv, layer, matmul, memory, model, moe\n");
  EXPECT_EQ(refusal({"plan", "dance"}),
            "opst plan: 'dance' is none of attention, kv, layer, matmul, memory, model, moe\n");
  EXPECT_EQ(refusal({"dance"}).rfind("opst: 'dance' is none of generate, chat, ", 0), 0u);
}

// A table whose later rows cannot be has no first row either.
TEST_F(OpstUsage, EveryCombinationIsCheckedBeforeTheFirstRow) {
  for (const char* const command : {"plan", "bench"}) {
    EXPECT_EQ(refusal({command, "matmul", "--m", "1", "--n", "8", "--k", "64,40", "--dtype", "f32,q4_1"}),
              std::string("opst ") + command + " matmul: k is 40, but q4_1 has blocks of 32 values\n");
    EXPECT_EQ(refusal({command, "matmul", "--m", "1", "--n", "8", "--k", "3", "--dtype", "f32,i4"}),
              std::string("opst ") + command + " matmul: k is 3, but i4 has two values to a byte\n");
  }
  EXPECT_EQ(refusal({"plan", "matmul", "--m", "1", "--n", "8,7", "--k", "64", "--activation", "swiglu"}),
            "opst plan matmul: n is 7, but swiglu needs two halves\n");
}

TEST_F(OpstUsage, NamesOfLlamaCppAreUnderstood) {
  const auto generate = [&](const std::vector<std::string>& more) {
    const Outcome outcome = run_program(with_model("generate", more));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return outcome.out;
  };
  EXPECT_EQ(generate({"--prompt", "hello", "--n-predict", "9", "--temp", "2", "--ctx-size=64", "--batch-size", "8"}),
            generate({"-p", "hello", "-n", "9", "--temperature", "2", "-c", "64", "-b", "8"}));
  const std::string text = folder_.write("text", "hello");
  EXPECT_EQ(generate({"--file", text, "-n", "5"}), generate({"-p", "hello", "-n", "5"}));
  EXPECT_EQ(refusal(with_model("generate", {"-p", "x", "-ngl", "99"})),
            "opst generate: there is no -ngl here: opst runs on the CPU, so nothing is moved to a GPU\n");
  EXPECT_EQ(
      refusal(with_model("generate", {"-p", "x", "--repeat-penalty", "1.1"})),
      "opst generate: there is no --repeat-penalty here: tokens are chosen by --temperature, --top-k, --top-p and "
      "--seed alone\n");
  // Another subcommand's names are not ours to explain.
  EXPECT_EQ(refusal({"info", "--temp", "1"}), "opst info: unknown: --temp 1; see opst info --help\n");
}

TEST_F(OpstUsage, NumbersThatDoNotFitAreRefused) {
  const std::string huge = "99999999999999999999";
  for (const char* option : {"--max-tokens", "--context", "--threads", "--prefill-chunk", "--block-size", "--top-k"}) {
    const std::string line = refusal(with_model("generate", {"-p", "x", option, huge}));
    EXPECT_NE(line.find(option), std::string::npos) << line;
    EXPECT_NE(line.find("'" + huge + "' is larger than 9223372036854775807"), std::string::npos) << line;
  }
  EXPECT_NE(refusal(with_model("generate", {"-p", "x", "-n", "12x"})).find("is not a whole number"), std::string::npos);
  EXPECT_NE(refusal(with_model("generate", {"-p", "x", "-n", "-3"})).find("from 1 on"), std::string::npos);
  EXPECT_NE(refusal(with_model("generate", {"-p", "x", "-s", "18446744073709551616"})).find("is larger than"),
            std::string::npos);
  EXPECT_EQ(run_program(with_model("generate", {"-p", "x", "-n", "1", "-s", "18446744073709551615"})).exit_code, 0);
}

TEST_F(OpstUsage, OptionsThatWouldSayNothingAreRefused) {
  const std::string blocks = "opst generate: --block-size is for --cache paged, but --cache is contiguous\n";
  EXPECT_EQ(refusal(with_model("generate", {"-p", "x", "--block-size", "32"})), blocks);
  EXPECT_EQ(refusal(with_model("generate", {"-p", "x", "--block-size", "32", "--cache", "contiguous"})), blocks);
  for (const char* list : {"1,,2", "1,", ","}) {
    const std::string said = std::string(": '") + list + "' has an empty item: values are separated by single commas";
    EXPECT_EQ(refusal({"bench", "matmul", "--m", list}), "opst bench matmul: --m" + said + "\n");
    EXPECT_NE(refusal({"bench", "model", "-m", model_, "--context", list}).find("--context" + said), std::string::npos);
  }
  EXPECT_NE(refusal({"bench", "matmul", "--dtype", "f32,,i8"}).find("has an empty item"), std::string::npos);
}

TEST_F(OpstUsage, EveryOutputThatFailsIsAFailure) {
  const std::vector<std::vector<std::string>> commands = {
      {"--version"},
      {"--help"},
      {"generate", "--help"},
      with_model("generate", {"-p", "x", "-n", "1"}),
      with_model("tokenize", {"-p", "x"}),
      with_model("perplexity", {"-f", folder_.write("text", "hello world")}),
      {"plan", "attention"},
      {"plan", "attention", "--machine", "ascend-910"},
      {"plan", "memory", "--machine", "ascend-910"},
      {"plan", "kv", "--machine", "ascend-910"},
      {"plan", "layer", "--machine", "ascend-910"},
      {"plan", "matmul"},
      {"plan", "model", "-m", model_},
      {"info"},
  };
  for (const std::vector<std::string>& command : commands) {
    const std::string line = refusal(command, 1, {.output = RunOptions::Output::full_disk});
    EXPECT_NE(line.find("cannot write to standard output"), std::string::npos) << command[0] << ": " << line;
  }
}

TEST_F(OpstUsage, AnInputThatCannotBeReadIsAFailure) {
  EXPECT_EQ(refusal({"chat", "-m", model_}, 1, {.input_path = "/"}),
            "opst chat: standard input: cannot read: Is a directory\n");
  EXPECT_NE(
      refusal(with_model("tokenize", {"-f", "/dev/zero"}), 1).find("/dev/zero: a text of more than 268435456 bytes"),
      std::string::npos);
}

TEST_F(OpstUsage, NoControlCharacterOfANameReachesTheTerminal) {
  const std::string name =
      "\x1B]0;title\x07\x1B[31mred\xC2\x9B"
      "2J\xFF.gguf";
  const std::string line = refusal({"generate", "-m", name, "-p", "x"}, 1);
  EXPECT_NE(line.find("\\x1B]0;title\\x07\\x1B[31mred\\xC2\\x9B2J\\xFF.gguf"), std::string::npos) << line;
  for (const char c : line) EXPECT_TRUE(c == '\n' || (c >= ' ' && c <= '~')) << line;
  const std::string environment = refusal({"info"}, 2, {.environment = {"OPST_ISA=\x1B[31m"}});
  EXPECT_EQ(environment.find('\x1B'), std::string::npos);
  EXPECT_NE(environment.find("\\x1B[31m"), std::string::npos) << environment;
  EXPECT_EQ(refusal({"generate", "--\x1B[31m"}).find('\x1B'), std::string::npos);
}

// A model may write anything. Into a file it goes as it is; on a terminal it must not move the cursor.
TEST_F(OpstUsage, NoControlCharacterOfAnAnswerReachesTheTerminal) {
  if (!PseudoTerminal::available()) GTEST_SKIP() << PseudoTerminal::kMissing;
  const auto arguments = with_model("generate", {"-p", "hello", "-n", "400", "--ignore-eos", "--temperature", "4"});
  const auto controls = [](const std::string& text) {
    return std::count_if(text.begin(), text.end(), [](char c) {
      return (c >= 0 && c < ' ' && c != '\n' && c != '\r' && c != '\t') || c == '\x7F';
    });
  };
  const Outcome file = run_program(arguments);
  ASSERT_GT(controls(file.out), 0);
  PseudoTerminal terminal(arguments);
  terminal.wait_for("finished by length");
  EXPECT_EQ(terminal.wait_for_exit(), 0);
  EXPECT_EQ(controls(terminal.screen()), 0);
  EXPECT_NE(terminal.screen().find("\\x"), std::string::npos);
}

// tokenize shows what every other subcommand reads.
TEST_F(OpstUsage, OnePreparationOfText) {
  TinyModel tiny = make_tiny_model();
  tiny.writer.boolean("tokenizer.ggml.add_bos_token", true);
  model_ = folder_.write("bos.gguf", tiny.writer.bytes());
  const std::string text = "he<|im_end|>ll", path = folder_.write("text", text);
  const std::vector<std::vector<std::string>> switches = {
      {}, {"--no-bos"}, {"--no-special"}, {"--no-bos", "--no-special"}};
  const size_t expected[] = {4, 3, 13, 12};
  for (size_t i = 0; i < 4; ++i) {
    const auto json = [&](const std::string& command, std::vector<std::string> more) {
      more.insert(more.end(), switches[i].begin(), switches[i].end());
      more.push_back("--json");
      return run_program(with_model(command, more)).json();
    };
    EXPECT_EQ(json("tokenize", {"-p", text})["tokens"].size(), expected[i]);
    EXPECT_EQ(json("generate", {"-p", text, "-n", "1"})["prompt_tokens"], expected[i]);
    EXPECT_EQ(json("perplexity", {"-f", path})["tokens"], expected[i]);
  }
  EXPECT_NE(refusal(with_model("generate", {"-p", "x", "--chat", "--no-bos"})).find("--no-bos"), std::string::npos);
}

TEST_F(OpstUsage, MoreRowsThanTokensAreRefusedByAll) {
  model_ = folder_.write("rows.gguf", make_tiny_model({.extra_rows = 3}).writer.bytes());
  const std::string text = folder_.write("text", "hello world"),
                    words = "rows.gguf: the tokenizer has 269 tokens, but the model has 272\n";
  for (const auto& command : {with_model("generate", {"-p", "x"}), with_model("tokenize", {"-p", "x"}),
                              with_model("perplexity", {"-f", text}), with_model("chat", {})}) {
    const std::string line = refusal(command, 1);
    EXPECT_EQ(line.substr(line.size() - std::min(line.size(), words.size())), words) << line;
  }
}

}  // namespace
}  // namespace opst::tools

// opst chat at a terminal and from a file, on a small random model.
#include <gtest/gtest.h>

#include "model/conversation.h"
#include "model/tiny_model.h"
#include "program.h"
#include "pseudo_terminal.h"

namespace opst::tools {
namespace {

constexpr int64_t kModelContext = 100'000;

class OpstChat : public testing::Test {
 protected:
  OpstChat() { model_ = folder_.write("tiny.gguf", bytes_); }

  std::vector<std::string> chat(const std::vector<std::string>& more) const {
    std::vector<std::string> arguments = {"chat", "-m", model_, "-t", "1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  Outcome chat_from_file(const std::string& input, const std::vector<std::string>& more) const {
    return run_program(chat(more), {.input_path = folder_.write("input", input)});
  }

  // The answers, each from the whole conversation, nothing of which was cached.
  std::vector<std::string> answers(const std::vector<std::string>& messages, int64_t max_tokens,
                                   int64_t context_length = 512) const {
    Context context = std::move(Context::create({.num_threads = 1}).value());
    const model::GgufFile file = std::move(model::GgufFile::parse("f.gguf", model::as_bytes(bytes_)).value());
    const model::Tokenizer tokenizer = std::move(model::Tokenizer::from_gguf(file).value());
    const model::LlamaModel weights = std::move(model::LlamaModel::load(context, file).value());
    model::LlamaSession session =
        std::move(model::LlamaSession::create(context, weights, {.context = context_length}).value());
    std::vector<int32_t> ids;
    const auto append = [&](const std::vector<int32_t>& more) { ids.insert(ids.end(), more.begin(), more.end()); };
    const auto plain = [&](const std::string& text) { return tokenizer.encode(text, false).value(); };
    std::vector<std::string> texts;
    for (const std::string& message : messages) {
      if (ids.empty()) {
        ids = model::chat_prompt(file, tokenizer, {{"user", message}}).value();
      } else {
        append({2});
        append(plain("\n"));
        append({1});
        append(plain("user\n" + message));
        append({2});
        append(plain("\n"));
        append({1});
        append(plain("assistant\n"));
      }
      const auto answer = model::generate(session, tokenizer, ids, {.max_tokens = max_tokens},
                                          [](std::string_view) { return Status(); });
      EXPECT_TRUE(answer.ok()) << answer.status().message();
      EXPECT_NE(answer.value().finish_reason, model::FinishReason::stop);  // no end token in `ids` then
      append(answer.value().tokens);
      texts.push_back(answer.value().text);
    }
    return texts;
  }

  // As a terminal shows it.
  static std::string shown(const std::string& text) {
    std::string shown;
    for (const char c : text) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\x%02X", static_cast<unsigned>(static_cast<unsigned char>(c)));
      const bool control = (c >= 0 && c < ' ' && c != '\n' && c != '\t') || c == '\x7F';
      shown += c == '\n' ? std::string("\r\n") : control ? std::string(escape) : std::string(1, c);
    }
    return shown;
  }

  TemporaryFolder folder_;
  std::string bytes_ = model::make_tiny_model({.context = kModelContext}).writer.bytes();
  std::string model_;
};

TEST_F(OpstChat, TheSecondAnswerKnowsTheFirst) {
  if (!PseudoTerminal::available()) GTEST_SKIP() << PseudoTerminal::kMissing;
  const std::vector<std::string> expected = answers({"hello", "and now?"}, 12);
  ASSERT_NE(expected[1], answers({"and now?"}, 12)[0]);
  PseudoTerminal terminal(chat({"-n", "12"}));
  terminal.wait_for("> ");
  EXPECT_FALSE(terminal.edits_and_echoes());
  terminal.type("hello\r");
  EXPECT_EQ(terminal.wait_for("\r\n"), "hello");
  EXPECT_EQ(terminal.wait_for("[cut after --max-tokens 12]\r\n> "), shown(expected[0] + "\n"));
  terminal.type("and now?\r");
  EXPECT_EQ(terminal.wait_for("\r\n"), "and now?");
  EXPECT_EQ(terminal.wait_for("[cut after --max-tokens 12]\r\n> "), shown(expected[1] + "\n"));
  terminal.type("\x04");
  EXPECT_EQ(terminal.wait_for_exit(), 0);
  EXPECT_TRUE(terminal.edits_and_echoes());
}

TEST_F(OpstChat, InterruptStopsTheAnswerAndNotTheProgram) {
  if (!PseudoTerminal::available()) GTEST_SKIP() << PseudoTerminal::kMissing;
  PseudoTerminal terminal(chat({"-n", "1000000", "-c", std::to_string(kModelContext)}));
  terminal.wait_for("> ");
  for (int i = 0; i < 2; ++i) {
    terminal.type("hello\r");
    terminal.wait_for("hello\r\n");
    terminal.wait_for_bytes(200);
    terminal.type("\x03");
    terminal.wait_for("\r\n[stopped]\r\n> ");
  }
  terminal.type("/quit\r");
  EXPECT_EQ(terminal.wait_for_exit(), 0);
  EXPECT_TRUE(terminal.edits_and_echoes());
}

TEST_F(OpstChat, ASecondInterruptAtThePromptLeaves) {
  if (!PseudoTerminal::available()) GTEST_SKIP() << PseudoTerminal::kMissing;
  PseudoTerminal terminal(chat({"-n", "1000000", "-c", std::to_string(kModelContext)}));
  terminal.wait_for("> ");
  terminal.type("\x03");
  terminal.wait_for("^C\r\n[once more, or Ctrl-D, leaves]\r\n> ");
  terminal.type("hello\r");
  terminal.wait_for("hello\r\n");
  terminal.wait_for_bytes(50);
  terminal.type("\x03");
  terminal.wait_for("[stopped]\r\n> ");
  terminal.type("\x03");
  EXPECT_EQ(terminal.wait_for_exit(), 0);
  EXPECT_TRUE(terminal.edits_and_echoes());
}

TEST_F(OpstChat, LinesAreEdited) {
  if (!PseudoTerminal::available()) GTEST_SKIP() << PseudoTerminal::kMissing;
  const std::vector<std::string> expected = answers({"hello"}, 12);
  for (const char* keys : {"hellp\x7fo\r",                  // erase a character
                           "he\xC3\xA9\x7fllo\r",           // of two bytes
                           "he\xE2\x82\xAC\bllo\r",         // of three
                           "nothing of it\x15hello\r",      // erase the line
                           "hello you\x17\x7f\r",           // a word
                           "he\x1b[A\x1b[1;5Cll\x1bOPo\r",  // arrow and function keys
                           "\x7f\x17hel\x01lo\x04\r",  // nothing to erase; control characters; not at the beginning
                           "what\x03hello\r",          // Ctrl-C drops the line
                           " \r\rhello\n"}) {          // empty lines
    SCOPED_TRACE(testing::PrintToString(keys));
    PseudoTerminal terminal(chat({"-n", "12"}));
    terminal.wait_for("> ");
    std::string_view rest = keys;
    if (const size_t interrupt = rest.find('\x03'); interrupt != std::string_view::npos) {
      // Ctrl-C makes the terminal forget what was not read yet.
      terminal.type(rest.substr(0, interrupt));
      terminal.wait_for(std::string(rest.substr(0, interrupt)));
      terminal.type("\x03");
      terminal.wait_for("^C\r\n> ");
      rest = rest.substr(interrupt + 1);
    }
    terminal.type(rest);
    terminal.wait_for(shown("\n" + expected[0] + "\n"));
    terminal.type("\x04");
    EXPECT_EQ(terminal.wait_for_exit(), 0);
  }
}

TEST_F(OpstChat, ALineMayBeLongerThanATerminalsBuffer) {
  if (!PseudoTerminal::available()) GTEST_SKIP() << PseudoTerminal::kMissing;
  const std::string message(6000, 'x');
  const std::vector<std::string> expected = answers({message}, 12, 8000);
  PseudoTerminal terminal(chat({"-n", "12", "-c", "8000"}));
  terminal.wait_for("> ");
  terminal.type(message + "\r");
  EXPECT_EQ(terminal.wait_for("\r\n"), message);
  EXPECT_EQ(terminal.wait_for("[cut"), shown(expected[0] + "\n"));
}

TEST_F(OpstChat, WhatIsTypedDuringAnAnswerWaits) {
  if (!PseudoTerminal::available()) GTEST_SKIP() << PseudoTerminal::kMissing;
  const std::vector<std::string> expected = answers({"hello", "more", "xx"}, 12);
  PseudoTerminal terminal(chat({"-n", "12"}));
  terminal.wait_for("> ");
  terminal.type("hello\rmore\rxx\r");
  for (const std::string& answer : expected) terminal.wait_for(shown("\n" + answer + "\n"));
}

TEST_F(OpstChat, AFullContextIsSaidAndResetStartsAnew) {
  if (!PseudoTerminal::available()) GTEST_SKIP() << PseudoTerminal::kMissing;
  const std::string filled = answers({"hello"}, 1000, 128)[0];
  PseudoTerminal terminal(chat({"-c", "128"}));
  for (int i = 0; i < 2; ++i) {
    terminal.wait_for("> ");
    terminal.type("hello\r");
    EXPECT_EQ(terminal.wait_for("\r\n"), "hello");
    EXPECT_EQ(terminal.wait_for("[cut: the context of 128 tokens is full; /reset starts a new conversation]\r\n> "),
              shown(filled + "\n"));
    terminal.type("more\r");
    EXPECT_EQ(terminal.wait_for("\r\n"), "more");
    terminal.wait_for("[not sent: the context is full: the message has ");
    terminal.wait_for("; /reset starts a new conversation]\r\n> ");
    terminal.type("/reset\r");
    terminal.wait_for("[a new conversation]\r\n");
  }
  terminal.wait_for("> ");
  terminal.type(std::string(200, 'x') + "\r");
  EXPECT_NE(
      terminal.wait_for("tokens, which leaves no room in a context of 128]\r\n").find("[not sent: the message has"),
      std::string::npos);
}

TEST_F(OpstChat, CommandsAndMistakes) {
  if (!PseudoTerminal::available()) GTEST_SKIP() << PseudoTerminal::kMissing;
  PseudoTerminal terminal(chat({"-n", "3"}));
  terminal.wait_for("> ");
  terminal.type("/help\r");
  terminal.wait_for("/reset");
  terminal.wait_for("/quit");
  terminal.wait_for("> ");
  terminal.type("/rest\r");
  terminal.wait_for("[/rest is no command; /help shows them]\r\n> ");
  terminal.type("\xC3(\r");
  terminal.wait_for("[not sent: the message is not valid UTF-8]\r\n> ");
  terminal.type("/etc/hosts\r");
  EXPECT_EQ(terminal.wait_for("\r\n"), "/etc/hosts");
  EXPECT_EQ(terminal.wait_for("[cut after"), shown(answers({"/etc/hosts"}, 3)[0] + "\n"));
}

TEST_F(OpstChat, ASignalThatEndsItRestoresTheTerminal) {
  if (!PseudoTerminal::available()) GTEST_SKIP() << PseudoTerminal::kMissing;
  for (const int signal_number : {SIGTERM, SIGHUP, SIGQUIT}) {
    PseudoTerminal terminal(chat({}));
    terminal.wait_for("> ");
    EXPECT_FALSE(terminal.edits_and_echoes());
    terminal.send_signal(signal_number);
    EXPECT_EQ(terminal.wait_for_exit(), 128 + signal_number);
    EXPECT_TRUE(terminal.edits_and_echoes());
  }
}

TEST_F(OpstChat, FromAFileEveryLineIsAMessage) {
  const std::string forged = "<|im_end|>\n";  // the mark is plain text, the line ends there
  const std::vector<std::string> expected = answers({"hello", "<|im_end|>", "more"}, 12);
  const Outcome outcome = chat_from_file("hello\r\n\n" + forged + "more", {"-n", "12"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, expected[0] + "\n" + expected[1] + "\n" + expected[2] + "\n");
  EXPECT_EQ(outcome.err,
            "opst chat: cut after --max-tokens 12\nopst chat: cut after --max-tokens 12\n"
            "opst chat: cut after --max-tokens 12\n");
  EXPECT_EQ(chat_from_file("", {}).exit_code, 0);
  EXPECT_EQ(chat_from_file("", {}).out + chat_from_file("/quit\nhello\n", {}).out, "");

  const Outcome bad = chat_from_file("\xFF\nhello\n", {"-n", "12"});
  EXPECT_EQ(bad.exit_code, 1);
  EXPECT_EQ(bad.out, expected[0] + "\n");
  EXPECT_EQ(bad.err,
            "opst chat: not sent: the message is not valid UTF-8\nopst chat: cut after --max-tokens 12\n"
            "opst chat: 1 message was not answered\n");
}

TEST_F(OpstChat, OptionsReachTheModel) {
  const auto out = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"-n", "30"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Outcome outcome = chat_from_file("hello\nmore\n", arguments);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return outcome.out;
  };
  EXPECT_EQ(out({}), out({"--greedy"}));
  EXPECT_EQ(out({"-s", "5"}), out({"-s", "5"}));
  EXPECT_NE(out({"-s", "5"}), out({"-s", "6"}));
  EXPECT_NE(out({"--system", "x"}), out({}));
  EXPECT_NE(out({"--system", ""}), out({"--system", "x"}));
  for (const char* dtype : {"bf16", "int8", "int4", "fp8", "f8_e4m3", "f8_e5m2"}) {
    EXPECT_EQ(out({"--kv-dtype", dtype}).empty(), false) << dtype;
  }
}

TEST_F(OpstChat, WrongUsageIsExitCode2) {
  const auto refused = [&](const std::vector<std::string>& more, const std::string& message) {
    const Outcome outcome = run_program(chat(more));
    EXPECT_EQ(outcome.exit_code, 2);
    EXPECT_EQ(outcome.out, "");
    EXPECT_NE(outcome.err.find(message), std::string::npos) << outcome.err;
  };
  refused({"-c", "100001"}, "--context is 100001, but the model's is 100000");
  refused({"-c", "16"}, "leaves no room in a context of 16");
  refused({"-n", "0"}, "--max-tokens");
  refused({"--system", "\xFF"}, "the system text is not valid UTF-8");
  refused({"--top-p", "0"}, "top_p is 0.000000, must be in (0, 1]");
  refused({"--greedy", "--top-k", "3"}, "--greedy");
  refused({"--kv-dtype", "i8"}, "--kv-dtype");
  EXPECT_EQ(run_program({"chat"}).exit_code, 2);
  EXPECT_EQ(run_program({"chat", "-m", folder_.path("none.gguf")}).exit_code, 1);
}

TEST_F(OpstChat, OutputThatCannotBeWritten) {
  const std::string path = folder_.write("input", "hello\n");
  for (const auto output : {RunOptions::Output::closed_pipe, RunOptions::Output::full_disk}) {
    const Outcome outcome = run_program(chat({}), {.input_path = path, .output = output});
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_NE(outcome.err.find("cannot write to standard output"), std::string::npos) << outcome.err;
  }
}

}  // namespace
}  // namespace opst::tools

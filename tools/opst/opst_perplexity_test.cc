// opst perplexity from outside, on a small random model. Its figures: src/model/perplexity_test.cc and
// perplexity_reference_test.cc.
#include <gtest/gtest.h>

#include <cmath>

#include "model/tiny_model.h"
#include "program.h"
#include "pseudo_terminal.h"

namespace opst::tools {
namespace {

class OpstPerplexity : public testing::Test {
 protected:
  OpstPerplexity() { model_ = folder_.write("tiny.gguf", model::make_tiny_model().writer.bytes()); }

  std::vector<std::string> arguments(const std::string& text, const std::vector<std::string>& more) const {
    std::vector<std::string> all = {"perplexity", "-m", model_, "-f", folder_.write("text", text)};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  nlohmann::json measure(const std::string& text, std::vector<std::string> more) const {
    more.push_back("--json");
    const Outcome outcome = run_program(arguments(text, more));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    return outcome.json();
  }

  TemporaryFolder folder_;
  std::string model_;
};

TEST_F(OpstPerplexity, JsonAndText) {
  const std::string text(50, 'x');
  const nlohmann::json json = measure(text, {"-c", "16"});
  EXPECT_EQ(json.size(), 4u);
  EXPECT_EQ(json["tokens"], 50);
  EXPECT_EQ(json["counted"], 46);
  EXPECT_NEAR(json["perplexity"].get<double>(), std::exp(json["mean_nll"].get<double>()), 1e-9);
  const Outcome plain = run_program(arguments(text, {"-c", "16"}));
  EXPECT_EQ(plain.exit_code, 0);
  EXPECT_EQ(plain.err, "");
  EXPECT_NE(plain.out.find("50, of which 46 predicted"), std::string::npos) << plain.out;
  EXPECT_NE(plain.out.find("mean NLL    " + std::to_string(json["mean_nll"].get<double>())), std::string::npos)
      << plain.out;
}

TEST_F(OpstPerplexity, WindowsAndTokens) {
  const std::string text(700, 'x');
  EXPECT_EQ(measure(text, {})["counted"], 698);  // 1024, but the model's context is 512
  EXPECT_EQ(measure(text, {"-c", "512"}), measure(text, {}));
  EXPECT_EQ(measure(text, {"-c", "2"})["counted"], 350);
  EXPECT_EQ(measure("<|im_end|>x", {})["tokens"], 2);
  EXPECT_EQ(measure("<|im_end|>", {"--no-special"})["tokens"], 10);
  EXPECT_EQ(measure("hello\r\n", {})["tokens"], 3);
}

TEST_F(OpstPerplexity, ThreadsDoNotMatterRoundedCachesDo) {
  const std::string text = "The quick brown fox jumps over the lazy dog";
  const nlohmann::json exact = measure(text, {"-t", "1"});
  EXPECT_EQ(measure(text, {"-t", "2"}), exact);
  for (const auto& [dtype, most] :
       {std::pair("bf16", 0.1), {"f16", 0.1}, {"int8", 0.1}, {"int4", 0.5}, {"fp8", 0.2}, {"f8_e5m2", 0.4}}) {
    const nlohmann::json rounded = measure(text, {"--kv-dtype", dtype, "-t", "1"});
    EXPECT_EQ(measure(text, {"--kv-dtype", dtype, "-t", "2"}), rounded) << dtype;
    EXPECT_NE(rounded["mean_nll"], exact["mean_nll"]) << dtype;
    EXPECT_NEAR(rounded["mean_nll"].get<double>(), exact["mean_nll"].get<double>(), most) << dtype;
  }
  // Two names of one type.
  EXPECT_EQ(measure(text, {"--kv-dtype", "fp8"})["mean_nll"], measure(text, {"--kv-dtype", "f8_e4m3"})["mean_nll"]);
}

TEST_F(OpstPerplexity, RoundedActivationsAreNearTheExactOnes) {
  const std::string text = "The quick brown fox jumps over the lazy dog";
  const nlohmann::json exact = measure(text, {});
  EXPECT_EQ(measure(text, {"--activations", "exact"}), exact);
  const nlohmann::json rounded = measure(text, {"--activations", "int8", "-t", "1"});
  EXPECT_EQ(measure(text, {"--activations", "int8", "-t", "2"}), rounded);
  EXPECT_NE(rounded["mean_nll"], exact["mean_nll"]);
  EXPECT_NEAR(rounded["mean_nll"].get<double>(), exact["mean_nll"].get<double>(), 0.1);
}

TEST_F(OpstPerplexity, Refusals) {
  const auto refused = [&](const Outcome& outcome, int exit_code, const std::string& message) {
    EXPECT_EQ(outcome.exit_code, exit_code);
    EXPECT_EQ(outcome.out, "");
    EXPECT_NE(outcome.err.find(message), std::string::npos) << outcome.err;
  };
  refused(run_program(arguments("", {})), 2, "text: the text is empty");
  refused(run_program(arguments("caf\xE9", {})), 2, "text: the text is not valid UTF-8");
  refused(run_program(arguments("x", {})), 2, "text: the text has 1 tokens, but predicting one from another takes 2");
  refused(run_program(arguments("\x04\x04", {})), 2, "text: the text has 0 tokens");
  refused(run_program(arguments("hello", {"-c", "1"})), 2, "--context");
  refused(run_program(arguments("hello", {"-c", "513"})), 2, "--context is 513, but the model's is 512");
  refused(run_program(arguments("hello", {"--kv-dtype", "i8"})), 2,
          "--kv-dtype: 'i8' is none of f32, bf16, f16, int8, int4, fp8, f8_e4m3, f8_e5m2");
  refused(run_program(arguments("hello", {"--activations", "int4"})), 2, "--activations");
  refused(run_program({"perplexity", "-m", model_}), 2, "--file");
  refused(run_program({"perplexity", "-m", model_, "-f", folder_.path("none")}), 1, "none: cannot read");
  refused(run_program({"perplexity", "-m", folder_.path("none"), "-f", model_}), 2, "not valid UTF-8");
}

TEST_F(OpstPerplexity, ProgressIsForTerminals) {
  if (!PseudoTerminal::available()) GTEST_SKIP() << PseudoTerminal::kMissing;
  PseudoTerminal terminal(arguments(std::string(50, 'x'), {"-c", "16"}));
  terminal.wait_for("16 of 50 tokens, mean NLL so far");
  terminal.wait_for("50 of 50 tokens, mean NLL so far");
  terminal.wait_for("perplexity");
  EXPECT_EQ(terminal.wait_for_exit(), 0);
}

}  // namespace
}  // namespace opst::tools

// The program from outside, on a small random model.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>

#include "model/tiny_model.h"
#include "model/utf8.h"
#include "program.h"

namespace opst::tools {
namespace {

using model::make_tiny_model;

class Opst : public testing::Test {
 protected:
  Opst() { model_ = folder_.write("tiny.gguf", make_tiny_model().writer.bytes()); }

  // "generate" or "tokenize" with the model, and more.
  std::vector<std::string> with_model(const std::string& command, const std::vector<std::string>& more) const {
    std::vector<std::string> arguments = {command, "-m", model_};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  nlohmann::json generate_json(std::vector<std::string> more, const RunOptions& options = {}) const {
    more.push_back("--json");
    const Outcome outcome = run_program(with_model("generate", more), options);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    return outcome.json();
  }

  TemporaryFolder folder_;
  std::string model_;
};

void expect_failure(const Outcome& outcome, int exit_code, const std::string& message) {
  EXPECT_EQ(outcome.exit_code, exit_code) << outcome.err;
  EXPECT_EQ(outcome.out, "");
  EXPECT_NE(outcome.err.find(message), std::string::npos) << outcome.err;
  EXPECT_EQ(outcome.err.rfind("opst", 0), 0u) << outcome.err;
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
}

TEST_F(Opst, HelpAndVersion) {
  const Outcome version = run_program({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_EQ(version.out.find_first_not_of("0123456789.\n"), std::string::npos) << version.out;
  const Outcome help = run_program({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const char* word : {"generate", "chat", "perplexity", "tokenize", "info", "OPST_ISA"}) {
    EXPECT_NE(help.out.find(word), std::string::npos) << word;
  }
  const Outcome generate = run_program({"generate", "--help"});
  EXPECT_EQ(generate.exit_code, 0);
  for (const char* option :
       {"-m,--model",   "-p,--prompt",  "-f,--prompt-file", "--chat",        "--system", "-n,--max-tokens",
        "--ignore-eos", "--greedy",     "--temperature",    "--top-k",       "--top-p",  "-s,--seed",
        "-t,--threads", "-c,--context", "--kv-dtype",       "--activations", "--json",   "-b,--prefill-chunk",
        "--cache",      "--block-size", "--no-special"}) {
    EXPECT_NE(generate.out.find(option), std::string::npos) << option;
  }
  EXPECT_EQ(run_program({"tokenize", "--help"}).exit_code, 0);
  EXPECT_EQ(run_program({"info", "--help"}).exit_code, 0);
}

TEST_F(Opst, WrongUsageIsExitCode2) {
  const auto refused = [&](const std::vector<std::string>& arguments, const std::string& message) {
    expect_failure(run_program(arguments), 2, message);
  };
  refused({}, "subcommand");
  refused({"dance"}, "dance");
  refused({"generate", "-p", "x"}, "--model");
  refused(with_model("generate", {}), "prompt");
  refused(with_model("generate", {"-p", "x", "-f", "y"}), "prompt");
  refused(with_model("generate", {"-p", ""}), "the prompt is empty");
  refused(with_model("generate", {"-p", "\xC3"}), "the prompt is not valid UTF-8");
  refused(with_model("generate", {"-f", folder_.write("empty", "")}), "the prompt is empty");
  refused(with_model("generate", {"-f", folder_.write("latin", "caf\xE9")}), "the prompt is not valid UTF-8");
  refused(with_model("generate", {"-p", std::string(512, 'x')}),
          "the prompt has 512 tokens, which leaves no room in a context of 512");
  refused(with_model("generate", {"-p", "xxxx", "-c", "4"}),
          "the prompt has 4 tokens, which leaves no room in a context of 4");
  refused(with_model("generate", {"-p", "\x04"}), "no part of the prompt has a token");
  refused(with_model("generate", {"-p", "x", "-c", "513"}), "--context is 513, but the model's is 512");
  refused(with_model("generate", {"-p", "x", "-c", "0"}), "--context");
  refused(with_model("generate", {"-p", "x", "-n", "0"}), "--max-tokens");
  refused(with_model("generate", {"-p", "x", "-n", "many"}), "--max-tokens");
  refused(with_model("generate", {"-p", "x", "-t", "0"}), "--threads");
  refused(with_model("generate", {"-p", "x", "-b", "0"}), "--prefill-chunk");
  refused(with_model("generate", {"-p", "x", "--block-size", "-1"}), "--block-size");
  refused(with_model("generate", {"-p", "x", "--kv-dtype", "i8"}),
          "--kv-dtype: 'i8' is none of f32, bf16, f16, int8, int4, fp8, f8_e4m3, f8_e5m2");
  refused(with_model("generate", {"-p", "x", "--activations", "f16"}), "--activations");
  refused(with_model("generate", {"-p", "x", "--cache", "heap"}), "--cache");
  refused(with_model("generate", {"-p", "x", "--greedy", "--top-k", "3"}), "--greedy");
  refused(with_model("generate", {"-p", "x", "--top-p", "0"}), "top_p is 0.000000, must be in (0, 1]");
  refused(with_model("generate", {"-p", "x", "--top-p", "nan"}), "top_p");
  refused(with_model("generate", {"-p", "x", "--temperature", "-1"}), "temperature");
  refused(with_model("generate", {"-p", "x", "--seed", "-1"}), "--seed");
  refused(with_model("generate", {"-p", "x", "--system", "y"}), "--chat");
  refused(with_model("generate", {"-p", "x", "--chat", "--system", "\xFF"}), "not valid UTF-8");
  refused(with_model("tokenize", {"-p", ""}), "the prompt is empty");
  expect_failure(run_program({"info"}, {.environment = {"OPST_ISA=quantum"}}), 2, "quantum");
}

TEST_F(Opst, BadFilesAreExitCode1) {
  const auto refused = [&](const std::string& path, const std::string& message) {
    for (const char* command : {"generate", "tokenize"}) {
      expect_failure(run_program({command, "-m", path, "-p", "x"}), 1, message);
    }
  };
  refused(folder_.path("none.gguf"), "none.gguf: cannot open: No such file or directory");
  refused(folder_.write("text.gguf", "hello, world"), "text.gguf: is not a GGUF file");
  const std::string good = read_file(model_);
  refused(folder_.write("cut.gguf", good.substr(0, good.size() - 100)), "but the file ends at");
  refused("/tmp", "/tmp: is a folder");
  expect_failure(run_program(with_model("generate", {"-f", folder_.path("none.txt")})), 1, "none.txt: cannot read");
  expect_failure(run_program(with_model("generate", {"-f", "/tmp"})), 1, "/tmp: cannot read");
}

TEST_F(Opst, GenerateJson) {
  const nlohmann::json json = generate_json({"-p", "hello world", "-n", "9", "--ignore-eos", "-t", "1"});
  const std::vector<std::string> fields = {"prompt_tokens",
                                           "tokens",
                                           "text",
                                           "finish_reason",
                                           "ttft_ms",
                                           "tpot_ms",
                                           "prefill_tokens_per_s",
                                           "decode_tokens_per_s",
                                           "load_ms",
                                           "peak_rss_bytes",
                                           "kv_cache_bytes",
                                           "isa",
                                           "threads"};
  for (const std::string& field : fields) EXPECT_TRUE(json.contains(field)) << field;
  EXPECT_EQ(json.size(), fields.size());
  EXPECT_EQ(json["prompt_tokens"], 4);
  EXPECT_EQ(json["tokens"].size(), 9u);
  EXPECT_EQ(json["finish_reason"], "length");
  for (const char* time : {"ttft_ms", "tpot_ms", "prefill_tokens_per_s", "decode_tokens_per_s", "load_ms"}) {
    EXPECT_GT(json[time].get<double>(), 0) << time;
  }
  EXPECT_GT(json["peak_rss_bytes"].get<int64_t>(), 1 << 20);
  EXPECT_EQ(json["kv_cache_bytes"],
            512 * 2 * 2 * 32 * 4);  // the model's context, layers, keys and values, head_dim, f32
  EXPECT_EQ(json["threads"], 1);
}

TEST_F(Opst, TheStreamIsTheText) {
  const std::vector<std::string> arguments = {"-p", "hello", "-n", "400", "--ignore-eos", "--temperature", "2"};
  const std::string expected = generate_json(arguments)["text"];
  // Enough tokens for several slices of processor time; yet on a busy machine all of it may have been written before
  // the first read: then once more.
  int reads = 0;
  for (int attempt = 0; attempt < 20 && reads <= 1; ++attempt) {
    reads = 0;
    RunOptions options;
    options.on_read = [&](const std::string& piece) {
      ++reads;
      EXPECT_TRUE(model::is_valid_utf8(piece)) << testing::PrintToString(piece);
    };
    const Outcome stream = run_program(with_model("generate", arguments), options);
    EXPECT_EQ(stream.exit_code, 0) << stream.err;
    EXPECT_EQ(stream.err, "");
    EXPECT_EQ(stream.out, expected);
  }
  EXPECT_GT(reads, 1);
}

TEST_F(Opst, SamplingIsReproducible) {
  const auto tokens = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"-p", "hello", "-n", "24", "--ignore-eos"});
    return generate_json(more)["tokens"];
  };
  EXPECT_EQ(tokens({}), tokens({"--greedy"}));
  EXPECT_EQ(tokens({"-s", "5"}), tokens({"--seed", "5", "--temperature", "1"}));
  EXPECT_NE(tokens({"-s", "5"}), tokens({"-s", "6"}));
  EXPECT_NE(tokens({"-s", "5"}), tokens({}));
  EXPECT_EQ(tokens({"--temperature", "0"}), tokens({}));
  EXPECT_EQ(tokens({"--top-k", "1", "-s", "9"}), tokens({}));
  EXPECT_EQ(tokens({"-s", "5", "-t", "2"}), tokens({"-s", "5", "-t", "1"}));
}

TEST_F(Opst, CachesAndChunksDoNotMatter) {
  const std::vector<std::string> base = {"-p", "The quick brown fox", "-n", "20", "--ignore-eos"};
  const nlohmann::json expected = generate_json(base);
  const std::vector<std::vector<std::string>> variants = {{"-b", "1"},
                                                          {"-b", "7"},
                                                          {"--cache", "paged"},
                                                          {"--cache", "paged", "--block-size", "33", "-b", "5"},
                                                          {"-t", "2"}};
  for (std::vector<std::string> variant : variants) {
    variant.insert(variant.end(), base.begin(), base.end());
    EXPECT_EQ(generate_json(variant)["tokens"], expected["tokens"]) << variant[0] << variant[1];
  }
}

// Bytes of a token, for its one head in two layers.
TEST_F(Opst, CachesOfEveryTypeTakeTheirMemory) {
  for (const auto& [dtype, bytes] : {std::pair("f32", 128),
                                     {"bf16", 64},
                                     {"f16", 64},
                                     {"int8", 32 + 4},
                                     {"int4", 16 + 4},
                                     {"fp8", 32},
                                     {"f8_e4m3", 32},
                                     {"f8_e5m2", 32}}) {
    for (const char* cache : {"contiguous", "paged"}) {
      const nlohmann::json json = generate_json(
          {"-p", "The quick brown fox", "-n", "20", "--ignore-eos", "--kv-dtype", dtype, "--cache", cache});
      EXPECT_EQ(json["kv_cache_bytes"], 512 * 2 * 2 * bytes) << dtype << ", " << cache;
      EXPECT_EQ(json["tokens"].size(), 20u) << dtype << ", " << cache;
    }
  }
  const std::vector<std::string> text = {"-p", "The quick brown fox", "-n", "20", "--ignore-eos"};
  const auto tokens = [&](const std::string& dtype) {
    std::vector<std::string> options = text;
    options.insert(options.end(), {"--kv-dtype", dtype});
    return generate_json(options)["tokens"];
  };
  EXPECT_EQ(tokens("fp8"), tokens("f8_e4m3"));
  const Outcome help = run_program({"generate", "--help"});
  EXPECT_NE(help.out.find("f32|bf16|f16|int8|int4|fp8|f8_e4m3|f8_e5m2"), std::string::npos) << help.out;
}

TEST_F(Opst, FinishReasons) {
  const nlohmann::json full = generate_json({"-p", "hello", "-c", "12", "--ignore-eos"});
  EXPECT_EQ(full["finish_reason"], "context");
  EXPECT_EQ(full["tokens"].size(), 12 - full["prompt_tokens"].get<size_t>());
  const nlohmann::json one = generate_json({"-p", "hello", "-n", "1", "--ignore-eos"});
  EXPECT_TRUE(one["tpot_ms"].is_null());
  for (int seed = 0; seed < 100; ++seed) {
    const nlohmann::json json =
        generate_json({"-p", "hello", "-n", "120", "--temperature", "4", "-s", std::to_string(seed)});
    if (json["finish_reason"] != "stop") continue;
    EXPECT_EQ(json["tokens"].back(), 2);
    EXPECT_EQ(json["text"].get<std::string>().find("<|im_end|>"), std::string::npos);
    return;
  }
  ADD_FAILURE() << "no seed gave the end token";
}

TEST_F(Opst, TokenizeGivesIdsAndPieces) {
  const Outcome plain = run_program(with_model("tokenize", {"-p", "<|im_end|>aaaa"}));
  EXPECT_EQ(plain.exit_code, 0) << plain.err;
  EXPECT_EQ(plain.out, "2 265\n");
  const nlohmann::json json = run_program(with_model("tokenize", {"-p", "he\xC3\xA9\xE2\x82\xAC", "--json"})).json();
  EXPECT_EQ(json["pieces"],
            (std::vector<std::string>{"he", "\xC3\xA9", "\xEF\xBF\xBD", "\xEF\xBF\xBD", "\xEF\xBF\xBD"}));
  EXPECT_EQ(json["tokens"].size(), 5u);
  EXPECT_EQ(json.size(), 2u);
  EXPECT_EQ(run_program(with_model("tokenize", {"-p", "<|im_end|>", "--no-special", "--json"})).json()["tokens"].size(),
            10u);
}

TEST_F(Opst, PromptFilesAreTakenByteForByte) {
  const std::string text("he\r\n\0ll \n", 9);
  const std::string path = folder_.write("prompt", text);
  const nlohmann::json json = run_program(with_model("tokenize", {"-f", path, "--json"})).json();
  std::string joined;
  for (const std::string piece : json["pieces"]) joined += piece;
  EXPECT_EQ(joined, text);
  EXPECT_EQ(generate_json({"-f", path, "-n", "1"})["prompt_tokens"], json["tokens"].size());
}

TEST_F(Opst, ChatContentIsPlainText) {
  const auto prompt_tokens = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--chat", "-n", "1"});
    return generate_json(more)["prompt_tokens"].get<int64_t>();
  };
  // Ten characters without merges: as text ten tokens, as the special token one.
  EXPECT_EQ(prompt_tokens({"-p", "x<|im_end|>"}), prompt_tokens({"-p", "x"}) + 10);
  EXPECT_EQ(prompt_tokens({"-p", "x", "--system", "s<|im_end|>"}), prompt_tokens({"-p", "x", "--system", "s"}) + 10);
  EXPECT_GT(prompt_tokens({"-p", "x"}), prompt_tokens({"-p", "x", "--system", "s"}));  // the template's own is longer
  // An empty system message is one, not the template's.
  EXPECT_EQ(prompt_tokens({"-p", "x", "--system", ""}), prompt_tokens({"-p", "x", "--system", "s"}) - 1);
}

TEST_F(Opst, OutputThatCannotBeWritten) {
  using Output = RunOptions::Output;
  for (const Output output : {Output::closed_pipe, Output::full_disk, Output::closed}) {
    for (const char* json : {"--json", "--ignore-eos"}) {
      const Outcome outcome = run_program(with_model("generate", {"-p", "hello", json}), {.output = output});
      expect_failure(outcome, 1, "cannot write to standard output");
    }
  }
  EXPECT_EQ(run_program({"--help"}, {.output = Output::full_disk}).exit_code, 1);
}

TEST_F(Opst, ClosedInputDoesNotMatter) {
  const Outcome outcome = run_program(with_model("generate", {"-p", "hello", "-n", "3"}), {.close_stdin = true});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
}

TEST_F(Opst, InfoShowsMachineAndChoices) {
  const nlohmann::json json = run_program({"info", "--json", "-t", "2"}, {.environment = {"OPST_ISA=generic"}}).json();
  EXPECT_EQ(json["isa"], "generic");
  EXPECT_EQ(json["threads"], 2);
  for (const char* field : {"version", "isa_detected", "cores", "l1d_bytes", "l2_bytes", "l3_bytes_per_core",
                            "bf16_product", "bf16_product_reason"}) {
    EXPECT_TRUE(json.contains(field)) << field;
  }
  for (const char* rate : {"f32_flops_per_second", "bf16_flops_per_second", "read_bytes_per_second"}) {
    EXPECT_GT(json[rate].get<double>(), 1e6) << rate;
  }
  const Outcome text = run_program({"info"});
  EXPECT_EQ(text.exit_code, 0);
  for (const char* word : {"isa", "cores", "threads", "caches", "bf16 product", "GFLOP/s", "GB/s"}) {
    EXPECT_NE(text.out.find(word), std::string::npos) << word;
  }
  EXPECT_EQ(generate_json({"-p", "x", "-n", "1"}, {.environment = {"OPST_ISA=generic"}})["isa"], "generic");
}

}  // namespace
}  // namespace opst::tools

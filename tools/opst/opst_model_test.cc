// opst plan model, bench model and generate --trace, from outside, on a small random model.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "model/tiny_model.h"
#include "program.h"

namespace opst::tools {
namespace {

class OpstModel : public testing::Test {
 protected:
  OpstModel() { model_ = folder_.write("tiny.gguf", model::make_tiny_model(options_).writer.bytes()); }

  nlohmann::json json_of(std::vector<std::string> arguments) const {
    arguments.insert(arguments.end(), {"-m", model_, "--json"});
    const Outcome outcome = run_program(arguments);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return outcome.json();
  }

  model::TinyModelOptions options_ = {.num_layers = 3, .context = 200};
  TemporaryFolder folder_;
  std::string model_;
};

TEST_F(OpstModel, PlanCountsNodesBytesAndFlops) {
  const nlohmann::json plan = json_of({"plan", "model", "--tokens", "4", "--context", "100", "--kv-dtype", "bf16"});
  const nlohmann::json &layers = plan["graphs"][0], &logits = plan["graphs"][1];
  EXPECT_EQ(layers["nodes"].size(), static_cast<size_t>(2 + 3 * 12));
  EXPECT_EQ(logits["nodes"].size(), 2u);
  std::map<std::string, nlohmann::json> nodes;
  for (const nlohmann::json& node : layers["nodes"]) nodes[node["name"]] = node;
  const int64_t dim = options_.head_dim, heads = options_.num_heads, kv_heads = options_.num_kv_heads;
  const int64_t width = heads * dim;
  EXPECT_EQ(nodes["blk.1.attn_q"]["flops"], 2 * 4 * width * width);
  EXPECT_EQ(nodes["blk.1.attention"]["cache_bytes"], 100 * 2 * kv_heads * dim * 2);
  EXPECT_EQ(nodes["blk.2.attention"]["flops"], 4 * dim * heads * (97 + 98 + 99 + 100));
  EXPECT_NE(nodes["blk.2.attention"]["plan"].get<std::string>().find("flash"), std::string::npos);
  // Which kernel multiplies four rows, and why.
  EXPECT_NE(nodes["blk.1.attn_q"]["plan"].get<std::string>().find(": few_rows, up to 8 rows: "), std::string::npos);
  EXPECT_LE(layers["peak_live_bytes"], layers["workspace_bytes"]);
  EXPECT_LT(layers["workspace_bytes"], layers["sum_bytes"].get<int64_t>() / 3);
  EXPECT_EQ(plan["bytes_per_token"], (plan["weight_bytes"].get<int64_t>() + plan["cache_bytes"].get<int64_t>()) / 4);
}

TEST_F(OpstModel, ExpertsAreDescribed) {
  model_ = folder_.write("mixture.gguf", model::make_tiny_model({.num_experts = 5, .shared_size = 32}).writer.bytes());
  const nlohmann::json info = json_of({"info"});
  EXPECT_EQ(info["architecture"], "llama");
  EXPECT_EQ(info["experts"], 5);
  EXPECT_EQ(info["experts_used"], 2);
  EXPECT_EQ(info["shared_expert_size"], 32);
  EXPECT_LT(info["expert_bytes"], info["tensor_bytes"]);
  const Outcome text = run_program({"info", "-m", model_});
  EXPECT_NE(text.out.find("experts       5 of 160, 2 used by each token, and a shared one of 32\n"), std::string::npos)
      << text.out;
  const nlohmann::json plan = json_of({"plan", "model", "--context", "100"});
  EXPECT_EQ(plan["experts"], 5);
  EXPECT_EQ(plan["experts_used"], 2);
  int64_t read = 0;  // by one token
  for (const nlohmann::json& node : plan["graphs"][0]["nodes"]) {
    if (node["op"] == "moe_layer") read += node["weight_bytes"].get<int64_t>();
  }
  EXPECT_EQ(read, plan["expert_bytes"].get<int64_t>() * 2 / 5);
  const Outcome table = run_program({"plan", "model", "-m", model_, "--context", "100"});
  EXPECT_NE(table.out.find("5 experts of 160, 2 used by each token: gate and up q4_1, down q8_0"), std::string::npos)
      << table.out;
  EXPECT_NE(table.out.find("Each layer has 5 experts, of which a token uses 2"), std::string::npos) << table.out;
}

// A token of one head: numbers and scales, read and written.
TEST_F(OpstModel, PlanCountsScales) {
  for (const auto& [dtype, bytes] : {std::pair("int8", 32 + 4), {"int4", 16 + 4}, {"fp8", 32}, {"f8_e5m2", 32}}) {
    const nlohmann::json plan = json_of({"plan", "model", "--context", "100", "--kv-dtype", dtype});
    EXPECT_EQ(plan["kv_cache_bytes"], 128 * 3 * 2 * bytes) << dtype;  // 100 positions in panels of 32
    for (const nlohmann::json& node : plan["graphs"][0]["nodes"]) {
      if (node["name"] == "blk.1.attention") {
        EXPECT_EQ(node["cache_bytes"], 100 * 2 * bytes) << dtype;
      } else if (node["name"] == "blk.1.rope_write") {
        EXPECT_EQ(node["cache_bytes"], 2 * bytes) << dtype;
      }
    }
    const Outcome text = run_program({"plan", "model", "-m", model_, "--context", "100", "--kv-dtype", dtype});
    EXPECT_NE(text.out.find("The cache of 100 positions as " + std::string(dtype) + " takes 0.0"), std::string::npos)
        << text.out;
  }
}

TEST_F(OpstModel, PlanPrintsTheFirstLayerOrAll) {
  const Outcome first = run_program({"plan", "model", "-m", model_});
  EXPECT_EQ(first.exit_code, 0) << first.err;
  for (const char* word :
       {"embedding", "blk.0.attention", "blk.1 to blk.2 likewise", "output_norm", "workspace", "per token"}) {
    EXPECT_NE(first.out.find(word), std::string::npos) << word;
  }
  EXPECT_EQ(first.out.find("blk.1.attention"), std::string::npos);
  const Outcome all = run_program({"plan", "model", "-m", model_, "--all"});
  EXPECT_NE(all.out.find("blk.2.attention"), std::string::npos);
}

TEST_F(OpstModel, ATraceHasEveryNodeOfEveryStep) {
  const std::string path = folder_.path("trace.json");
  const Outcome outcome =
      run_program({"generate", "-m", model_, "-p", "hello", "-n", "5", "--ignore-eos", "--trace", path});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const nlohmann::json trace = nlohmann::json::parse(read_file(path), nullptr, false);
  ASSERT_TRUE(trace.is_object());
  std::map<std::string, int> counts;
  double last = 0;
  for (const nlohmann::json& event : trace["traceEvents"]) {
    ++counts[event["name"]];
    EXPECT_EQ(event["ph"], "X");
    EXPECT_GE(event["dur"], 0.0);
    EXPECT_GE(event["ts"].get<double>(), last);
    last = event["ts"].get<double>() + event["dur"].get<double>() - 0.01;
  }
  EXPECT_EQ(counts.size(), static_cast<size_t>(2 + 3 * 12 + 2));
  for (const auto& [name, count] : counts) EXPECT_EQ(count, 5) << name;
  const Outcome failed =
      run_program({"generate", "-m", model_, "-p", "hello", "-n", "1", "--trace", folder_.path("no/such/folder")});
  EXPECT_EQ(failed.exit_code, 1);
  EXPECT_NE(failed.err.find("cannot be written"), std::string::npos) << failed.err;
}

TEST_F(OpstModel, BenchCountsWhatAStepMovesAndComputes) {
  const nlohmann::json bench = json_of({"bench", "model", "--prompt-tokens", "20,40", "--context", "30", "-t", "1"});
  ASSERT_EQ(bench["rows"].size(), 3u);
  const nlohmann::json plan = json_of({"plan", "model", "--context", "30"});
  const nlohmann::json& decode = bench["rows"][2];
  EXPECT_EQ(decode["test"], "decode");
  EXPECT_EQ(decode["tokens"], 30);
  for (const char* what : {"flops", "weight_bytes", "cache_bytes"}) EXPECT_EQ(decode[what], plan[what]) << what;
  // 512 tokens at most go through the layers together; logits once.
  const nlohmann::json prompt = json_of({"plan", "model", "--context", "40", "--tokens", "40"});
  EXPECT_EQ(bench["rows"][1]["flops"], prompt["flops"]);
  for (const nlohmann::json& row : bench["rows"]) {
    EXPECT_GT(row["tokens_per_s"], 0.0);
    EXPECT_GT(row["fraction"], 0.0);
    EXPECT_LE(row["fraction_quartiles"][0], row["fraction"]);
    EXPECT_LE(row["fraction"], row["fraction_quartiles"][1]);
  }
}

TEST_F(OpstModel, WrongSizesAreRefused) {
  const Outcome bench = run_program({"bench", "model", "-m", model_, "--prompt-tokens", "201"});
  EXPECT_EQ(bench.exit_code, 2);
  const Outcome plan = run_program({"plan", "model", "-m", model_, "--context", "10", "--tokens", "11"});
  EXPECT_EQ(plan.exit_code, 2);
  EXPECT_NE(plan.err.find("--tokens is 11, more than the context of 10"), std::string::npos) << plan.err;
  EXPECT_EQ(run_program({"plan", "model", "-m", folder_.path("none")}).exit_code, 1);
}

}  // namespace
}  // namespace opst::tools

// opst bench tables from outside: text, JSON and what it refuses.
#include <gtest/gtest.h>

#include <algorithm>

#include "program.h"

namespace opst::tools {
namespace {

Outcome tables(std::vector<std::string> options) {
  options.insert(options.begin(), {"bench", "tables"});
  return run_program(options);
}
nlohmann::json json_of(std::vector<std::string> options) {
  options.emplace_back("--json");
  const Outcome outcome = tables(options);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  return outcome.json();
}
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(OpstTables, EveryRowOfTinyTables) {
  const std::vector<std::string> tiny = {"--max-seq", "512", "--head-dim", "32", "--heads", "2"};
  const nlohmann::json result = json_of(tiny);
  EXPECT_EQ(result["measured"], true);
  EXPECT_EQ(result["dtype"], "bf16");
  EXPECT_EQ(result["left_out"], 8);
  for (const char* key : {"machine", "isa", "threads", "head_dim", "budget_s", "memory_limit_bytes"}) {
    EXPECT_TRUE(result.contains(key)) << key;
  }
  ASSERT_EQ(result["rows"].size(), 6u);
  const int lengths[] = {128, 256, 512, 128, 256, 512};
  for (size_t i = 0; i < 6; ++i) {
    const nlohmann::json& row = result["rows"][i];
    EXPECT_EQ(row["table"], i < 3 ? "inference" : "training");
    EXPECT_EQ(row["mode"], row["table"]);
    EXPECT_EQ(row["kv_len"], lengths[i]);
    EXPECT_EQ(row["batch"], 1);
    EXPECT_EQ(row["times"], 128.0 / row["heads"].get<double>());
    EXPECT_EQ(row["published"]["computed_score_bytes"], (i < 3 ? 1.0 : 3.0) * 4 * 32 * lengths[i] * lengths[i] * 2);
    EXPECT_EQ(row["error_ok"], true) << row;
    EXPECT_LT(row["difference"], 0.05) << row;
    EXPECT_GT(row["speedup"], 0);
    for (const char* form : {"standard", "flash"}) {
      EXPECT_EQ(row[form]["state"], "measured") << row;
      EXPECT_GT(row[form]["ms"], 0);
      EXPECT_LE(row[form]["ms_quartiles"][0], row[form]["ms"]);
      EXPECT_GT(row[form]["bytes"], 0);
    }
  }
  const Outcome text = tables(tiny);
  EXPECT_EQ(text.exit_code, 0) << text.err;
  for (const char* words : {"published: batch 4", "inference: forward", "training: forward and backward",
                            "8 row(s) of more than 512 tokens (--max-seq) are left out", "does not fit: beyond the"}) {
    EXPECT_TRUE(has(text.out, words)) << words << "\n" << text.out;
  }
  EXPECT_EQ(text.err, "");
}

TEST(OpstTables, WhatIsNotMeasuredHasNoFigures) {
  const nlohmann::json small = json_of({"--tables", "inference", "--max-seq", "512", "--memory-limit", "400000"});
  const nlohmann::json& last = small["rows"][2];  // 512: 512 KiB of tensors
  EXPECT_EQ(last["standard"]["state"], "memory");
  EXPECT_EQ(last["standard"]["ms"], nullptr);
  EXPECT_EQ(last["standard"]["bytes"], nullptr);
  EXPECT_GT(last["standard"]["computed_bytes"], 400000);
  EXPECT_EQ(last["speedup"], nullptr);
  EXPECT_EQ(last["memory_ratio"], nullptr);
  EXPECT_EQ(small["rows"][0]["standard"]["state"], "measured");
  EXPECT_EQ(small["memory_limit_bytes"], 400000);
  const Outcome text = tables({"--tables", "inference", "--max-seq", "512", "--memory-limit", "400000"});
  EXPECT_TRUE(has(text.out, "does not fit")) << text.out;
  EXPECT_TRUE(has(text.out, "beyond the 391 KiB that the command may take")) << text.out;

  const std::vector<std::string> no_time = {"--tables", "training", "--max-seq", "512", "--budget", "0"};
  for (const nlohmann::json& row : json_of(no_time)["rows"]) {
    for (const char* form : {"standard", "flash"}) {
      EXPECT_EQ(row[form]["state"], "time");
      EXPECT_EQ(row[form]["ms"], nullptr);
      EXPECT_GT(row[form]["predicted_ms"], 0);
    }
    EXPECT_EQ(row["max_abs_error"], nullptr);
  }
  EXPECT_TRUE(has(tables(no_time).out, "no time ~"));

  const std::vector<std::string> planned = {"--max-seq", "512", "--plan"};
  const nlohmann::json plan = json_of(planned);
  EXPECT_EQ(plan["measured"], false);
  for (const nlohmann::json& row : plan["rows"]) {
    EXPECT_EQ(row["flash"]["state"], "planned");
    EXPECT_EQ(row["flash"]["ms"], nullptr);
    EXPECT_EQ(row["repeats"], 0);
  }
  EXPECT_TRUE(has(tables(planned).out, "planned, nothing of it measured"));
}

// The row of 256K tokens costs what 256K x 256K pairs cost; its decoded token can be had.
TEST(OpstTables, TheLongTableDecodesAToken) {
  const nlohmann::json result =
      json_of({"--tables", "long", "--head-dim", "8", "--heads", "1", "--budget", "4", "--memory-limit", "1000000000"});
  ASSERT_EQ(result["rows"].size(), 2u);
  const nlohmann::json &forward = result["rows"][0], &token = result["rows"][1];
  EXPECT_EQ(forward["kv_len"], 262144);
  EXPECT_EQ(forward["standard"]["state"], "memory");
  EXPECT_EQ(forward["flash"]["state"], "time");
  EXPECT_EQ(token["mode"], "decode");
  EXPECT_EQ(token["query_len"], 1);
  if (token["flash"]["state"] == "time") GTEST_SKIP() << "this machine is too slow for the budget of 4 s";
  EXPECT_EQ(token["standard"]["state"], "measured") << token;
  EXPECT_EQ(token["error_ok"], true) << token;
}

TEST(OpstTables, EveryTypeAndOneTable) {
  for (const char* dtype : {"f32", "f16"}) {
    const nlohmann::json result =
        json_of({"--tables", "training", "--max-seq", "64", "--head-dim", "16", "--dtype", dtype, "--threads", "1"});
    EXPECT_EQ(result["dtype"], dtype);
    EXPECT_EQ(result["threads"], 1);
    for (const nlohmann::json& row : result["rows"]) {
      EXPECT_EQ(row["table"], "training");
      EXPECT_EQ(row["error_ok"], true) << row;
      EXPECT_LT(row["difference"], 0.02) << row;
    }
  }
}

TEST(OpstTables, WrongCommandLinesAreRefused) {
  const auto refused = [](std::vector<std::string> options, const std::string& message) {
    const Outcome outcome = tables(options);
    EXPECT_EQ(outcome.exit_code, 2) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    EXPECT_TRUE(has(outcome.err, message)) << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1);
  };
  refused({"--tables", "inference,audio"}, "'audio' is none of inference, training, video, long");
  refused({"--tables", "inference,,long"}, "has an empty item");
  refused({"--budget", "-1"}, "'-1' is not a number from 0 to 1e+06");
  refused({"--max-seq", "0"}, "--max-seq");
  refused({"--heads", "33"}, "'33' is not a whole number from 1 to 32");
  refused({"--head-dim", "769"}, "--head-dim");
  refused({"--dtype", "f64"}, "'f64' is none of f32, bf16, f16");
  refused({"--memory-limit", "0"}, "--memory-limit");
  refused({"--tables", "video,long", "--max-seq", "16383"}, "--max-seq 16383 leaves no row of video, long");
  refused({"--seq", "64"}, "unknown: --seq 64; see opst bench tables --help");
}

}  // namespace
}  // namespace opst::tools

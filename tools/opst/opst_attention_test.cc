// opst bench, check and plan attention with options, from outside.
#include <gtest/gtest.h>

#include "program.h"

namespace opst::tools {
namespace {

const std::vector<std::vector<std::string>> kOptions = {
    {},
    {"--causal", "--dropout", "0.2"},
    {"--window", "20,0", "--prefix", "7"},
    {"--window", "-1,3", "--top-left"},
    {"--mask", "bool", "--softcap", "5"},
    {"--mask", "additive", "--alibi", "--causal"},
    {"--varlen", "1,70,5:90,0,33", "--causal", "--dropout", "0.5"},
    {"--varlen", "64,3:80", "--mask", "additive", "--alibi", "--prefix", "40", "--window", "5,0"},
    {"--dtype", "bf16", "--mask", "bool", "--dropout", "0.1", "--causal", "--softcap", "20"},
};

nlohmann::json json_of(const std::string& command, std::vector<std::string> options) {
  options.insert(options.begin(), {command, "attention", "--heads", "4", "--kv-heads", "2", "--seq", "90", "--json"});
  const Outcome outcome = run_program(options);
  std::string line;
  for (const std::string& option : options) line += option + " ";
  EXPECT_EQ(outcome.exit_code, 0) << line << outcome.err;
  return outcome.json();
}

TEST(OpstAttention, CheckPassesWithEveryOption) {
  for (const auto& options : kOptions) {
    const nlohmann::json result = json_of("check", options);
    EXPECT_EQ(result["ok"], true) << result;
    EXPECT_GT(result["rows"][0]["rows"], 8);
  }
}

TEST(OpstAttention, BenchSetsOptionsBesideTheirBaseline) {
  for (const auto& options : kOptions) {
    const nlohmann::json row = json_of("bench", options)["rows"][0];
    EXPECT_EQ(row.contains("over_baseline"), !options.empty()) << row;
    EXPECT_LT(row["max_abs_error"], 0.05);
  }
}

TEST(OpstAttention, PlanCountsWhatTheStructureShows) {
  const auto flops = [](std::vector<std::string> options) {
    return json_of("plan", std::move(options))["rows"][0]["flops"];
  };
  const int64_t per_pair = 2 * (64 + 64) * 4;
  EXPECT_EQ(flops({}), per_pair * 90 * 90);
  EXPECT_EQ(flops({"--causal"}), per_pair * 90 * 91 / 2);
  EXPECT_EQ(flops({"--window", "9,0"}), per_pair * (80 * 10 + 55));  // rows 0 to 9 see 1 to 10 keys
  EXPECT_EQ(flops({"--window", "0,0", "--prefix", "2"}), per_pair * (88 * 3 + 2 * 2));
  EXPECT_EQ(flops({"--varlen", "10,3:20"}), per_pair * (100 + 60));
}

TEST(OpstAttention, RefusesWhatMakesNoSense) {
  for (const std::vector<std::string>& options :
       std::vector<std::vector<std::string>>{{"--window", "3"},
                                             {"--dropout", "1"},
                                             {"--mask", "float"},
                                             {"--varlen", "3,x"},
                                             {"--varlen", "3", "--query-len", "2"}}) {
    std::vector<std::string> arguments = {"plan", "attention"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const Outcome outcome = run_program(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << options[0] << " " << outcome.err;
    EXPECT_NE(outcome.err, "");
  }
}

}  // namespace
}  // namespace opst::tools

// opst bench matmul, from outside.
#include <gtest/gtest.h>

#include "program.h"

namespace opst::tools {
namespace {

TEST(OpstMatmul, BenchGivesARowForEveryCombination) {
  const Outcome outcome = run_program({"bench", "matmul", "--m", "9,20", "--n", "40,33", "--k", "256", "--dtype",
                                       "f32,bf16,q4_1,q6_k", "-t", "2", "--json"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const nlohmann::json result = outcome.json();
  EXPECT_EQ(result["threads"], 2);
  ASSERT_EQ(result["rows"].size(), 16u);
  EXPECT_EQ(result["rows"][0]["dtype"], "f32");
  EXPECT_EQ(result["rows"][1]["m"], 20);
  EXPECT_EQ(result["rows"][2]["n"], 33);
  EXPECT_EQ(result["rows"][15]["dtype"], "q6_k");
  for (const nlohmann::json& row : result["rows"]) {
    EXPECT_EQ(row["bound"], "multiply-adds") << row;
    EXPECT_GT(row["fraction"], 0) << row;
    EXPECT_GT(row["gflops"], 0) << row;
  }
}

TEST(OpstMatmul, FewRowsAreSetBesideReading) {
  const Outcome outcome =
      run_program({"bench", "matmul", "--m", "2", "--n", "4096", "--k", "4096", "--dtype", "f16", "-t", "1", "--json"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const nlohmann::json row = outcome.json()["rows"][0];
  EXPECT_EQ(row["bound"], "plain reading");
  EXPECT_NEAR(static_cast<double>(row["weight_gb_per_s"]), 4096 * 4096 * 2 / static_cast<double>(row["ms"]) / 1e6,
              1e-3);
}

TEST(OpstMatmul, RefusesWhatMakesNoSense) {
  const auto message = [](std::vector<std::string> options) {
    options.insert(options.begin(), {"bench", "matmul"});
    const Outcome outcome = run_program(options);
    EXPECT_EQ(outcome.exit_code, 2) << outcome.err;
    EXPECT_EQ(outcome.err.rfind("opst bench matmul: ", 0), 0u) << outcome.err;
    return outcome.err;
  };
  EXPECT_NE(message({"--m", "0"}).find("--m"), std::string::npos);
  EXPECT_NE(message({"--dtype", "f64"}).find("f64"), std::string::npos);
  EXPECT_EQ(message({"--m", "16", "--k", "40", "--dtype", "q4_1"}),
            "opst bench matmul: k is 40, but q4_1 has blocks of 32 values\n");
}

}  // namespace
}  // namespace opst::tools

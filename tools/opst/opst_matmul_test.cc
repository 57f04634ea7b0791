// opst bench and plan matmul, from outside.
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
  for (const std::string groups : {"0", "-1", "4097", "x"}) {
    EXPECT_EQ(message({"--groups", groups})
                  .rfind("opst bench matmul: --groups: '" + groups + "' is not a whole number from 1 to 4096", 0),
              0u)
        << message({"--groups", groups});
  }
  EXPECT_NE(message({"--ragged"}).find("--ragged requires --groups"), std::string::npos) << message({"--ragged"});
  for (const std::string dtype : {"f32", "i8"}) {
    EXPECT_EQ(message({"--dtype", dtype, "--activations", "int8"}),
              "opst bench matmul: --activations int8 is for weights of a quantised format (q8_0, q4_k, ...); got " +
                  dtype + "\n");
  }
  EXPECT_NE(message({"--activations", "int4"}).find("--activations"), std::string::npos);
}

// Rows rounded to int8 are multiplied as int8, alone and in groups, few and many.
TEST(OpstMatmul, BenchOfActivationsInInt8) {
  for (const std::vector<std::string>& groups : {std::vector<std::string>{}, {"--groups", "2"}}) {
    std::vector<std::string> options = {"bench",   "matmul", "--m",           "2,20", "--n", "40", "--k",   "256",
                                        "--dtype", "q4_k",   "--activations", "int8", "-t",  "1",  "--json"};
    options.insert(options.end(), groups.begin(), groups.end());
    const Outcome outcome = run_program(options);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const nlohmann::json json = outcome.json();
    EXPECT_EQ(json["activations"], "int8");
    ASSERT_EQ(json["rows"].size(), 2u);
    EXPECT_EQ(json["rows"][0]["bound"], "plain reading");
    EXPECT_EQ(json["rows"][1]["bound"], "multiply-adds");
  }
}

TEST(OpstMatmul, PlanNamesPathAndReason) {
  const auto rows_of = [](std::vector<std::string> options) {
    options.insert(options.begin(), {"plan", "matmul", "-t", "2", "--n", "64"});
    options.push_back("--json");
    const Outcome outcome = run_program(options);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return outcome.json()["rows"];
  };
  const nlohmann::json exact = rows_of({"--m", "3,9", "--k", "256", "--dtype", "q4_k,i8,bf16"});
  ASSERT_EQ(exact.size(), 6u);
  const char* const paths[] = {"few_rows", "many_rows", "weights_int_few_rows", "weights_int_many_rows",
                               "few_rows", "many_rows"};
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(exact[i]["path"], paths[i]) << exact[i];
    EXPECT_NE(exact[i]["reason"], "") << exact[i];
    EXPECT_EQ(exact[i]["m"], i % 2 == 0 ? 3 : 9);
  }
  const nlohmann::json int8 = rows_of({"--m", "9", "--k", "256", "--dtype", "q4_k", "--int8-activations"});
  EXPECT_EQ(int8[0]["path"], "activations_int8_many_rows");
  const nlohmann::json alike = rows_of({"--m", "1", "--k", "256", "--dtype", "q4_k", "--batch-invariant"});
  EXPECT_EQ(alike[0]["path"], "few_rows");
  // A second half of sums.
  const nlohmann::json none = rows_of({"--m", "300", "--k", "8", "--dtype", "f32"});
  const nlohmann::json halves = rows_of({"--m", "300", "--k", "8", "--dtype", "f32", "--activation", "swiglu"});
  EXPECT_GT(halves[0]["scratch_bytes"], none[0]["scratch_bytes"]);

  const Outcome text = run_program({"plan", "matmul", "--m", "9", "--n", "64", "--k", "256", "--dtype", "q4_k"});
  EXPECT_EQ(text.out.rfind("q4_k, 9 x 64 x 256: many_rows f32, tasks of 9 x 64, ", 0), 0u) << text.out;
  EXPECT_NE(text.out.find("\n  why  more than 8 rows: "), std::string::npos) << text.out;
  EXPECT_EQ(run_program({"plan", "matmul", "--n", "63", "--activation", "swiglu"}).err,
            "opst plan matmul: n is 63, but swiglu needs two halves\n");
}

}  // namespace
}  // namespace opst::tools

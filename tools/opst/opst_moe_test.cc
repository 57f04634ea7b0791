// opst bench, check and plan moe, and check matmul, from outside.
#include <gtest/gtest.h>

#include "program.h"

namespace opst::tools {
namespace {

const std::vector<std::string> kSmall = {"--experts", "8", "--top-k",        "2",  "--hidden", "256",
                                         "-t",        "2", "--intermediate", "256"};

Outcome run_small(std::vector<std::string> command, const std::vector<std::string>& more) {
  command.insert(command.end(), kSmall.begin(), kSmall.end());
  command.insert(command.end(), more.begin(), more.end());
  return run_program(command);
}

TEST(OpstMoe, EveryStepAgreesWithFloat64InEveryType) {
  const Outcome outcome =
      run_small({"check", "moe"}, {"--tokens", "1,70", "--dtype", "f32,bf16,f16,q8_0,q4_1,q4_k,i8,i4", "--json"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err << outcome.out;
  const nlohmann::json result = outcome.json();
  EXPECT_EQ(result["ok"], true);
  EXPECT_EQ(result["rows"].size(), 2u * (6 * 8 + 2 * 9));
  for (const nlohmann::json& row : result["rows"]) {
    EXPECT_EQ(row["ok"], true) << row;
    EXPECT_GT(row["compared"], 0) << row;
  }
  EXPECT_EQ(run_small({"check", "moe"}, {"--scores", "sigmoid", "--no-renormalise"}).exit_code, 0);
}

std::vector<std::string> steps_of(const nlohmann::json& rows, const std::string& dtype) {
  std::vector<std::string> steps;
  for (const nlohmann::json& row : rows) {
    if (row["dtype"] == dtype) steps.push_back(row["step"]);
  }
  return steps;
}

TEST(OpstMoe, TheOneCallAndItsGradientsAgreeWithFloat64AndWithTheSteps) {
  const Outcome forward = run_small(
      {"check", "moe"}, {"--tokens", "9", "--dtype", "f32,bf16,f16,q8_0,q4_k,i8,i4", "--shared", "512", "--json"});
  ASSERT_EQ(forward.exit_code, 0) << forward.err << forward.out;
  EXPECT_EQ(steps_of(forward.json()["rows"], "i8"),
            (std::vector<std::string>{"gating", "routing", "quantise", "permute", "gate/up", "down", "shared",
                                      "finalize", "layer", "layer bits"}));
  for (const std::string scores : {"softmax", "sigmoid"}) {
    const Outcome outcome = run_small({"check", "moe"}, {"--tokens", "1,40", "--dtype", "f32,bf16,f16", "--shared",
                                                         "96", "--scores", scores, "--backward", "--json"});
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err << outcome.out;
    const nlohmann::json rows = outcome.json()["rows"];
    EXPECT_EQ(rows.size(), 2u * 3 * (7 + 9));
    for (const nlohmann::json& row : rows) {
      EXPECT_EQ(row["ok"], true) << row;
      EXPECT_GT(row["compared"], 0) << row;
      // Of three runs beside the first one: the steps, and 1 and 2 threads.
      if (row["step"] == "layer bits") {
        EXPECT_EQ(row["compared"], 3 * 256 * row["tokens"].get<int>()) << row;
      }
    }
    const std::vector<std::string> steps = steps_of(rows, "f16");
    EXPECT_EQ(std::vector<std::string>(steps.end() - 9, steps.end()),
              (std::vector<std::string>{"layer", "layer bits", "grad x", "grad logits", "grad gate_up", "grad down",
                                        "grad shared_gate_up", "grad shared_down", "grad bits"}));
  }
}

TEST(OpstMoe, TheCheckSaysNoToEverySpoiledStep) {
  const Outcome outcome =
      run_small({"check", "moe"}, {"--tokens", "5,70", "--dtype", "f32,bf16,q4_k,i8", "--spoil", "--json"});
  const Outcome gradients = run_small({"check", "moe"}, {"--tokens", "5,70", "--dtype", "f32,bf16", "--shared", "64",
                                                         "--backward", "--spoil", "--json"});
  ASSERT_EQ(outcome.json()["rows"].size(), 2u * (3 * 8 + 9));
  ASSERT_EQ(gradients.json()["rows"].size(), 2u * 2 * (7 + 9));
  for (const Outcome* each : {&outcome, &gradients}) {
    EXPECT_EQ(each->exit_code, 1);
    EXPECT_EQ(each->err, "opst check moe: a step or the one call exceeds its bound\n");
    const nlohmann::json result = each->json();
    EXPECT_EQ(result["ok"], false);
    for (const nlohmann::json& row : result["rows"]) {
      EXPECT_EQ(row["ok"], false) << row;
      EXPECT_GT(row["wrong"], 0) << row;
    }
  }
}

TEST(OpstMoe, BenchSetsEveryStepBesideItsBound) {
  const Outcome outcome = run_small({"bench", "moe"}, {"--tokens", "2,300", "--dtype", "bf16,i8", "--json"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const nlohmann::json result = outcome.json();
  EXPECT_EQ(result["threads"], 2);
  ASSERT_EQ(result["rows"].size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    const nlohmann::json& row = result["rows"][i];
    EXPECT_EQ(row["dtype"], i < 2 ? "bf16" : "i8");
    EXPECT_EQ(row["steps"].size(), i < 2 ? 8u : 9u);
    for (const nlohmann::json& step : row["steps"]) {
      EXPECT_GT(step["ms"], 0) << step;
      EXPECT_GT(step["fraction"], 0) << step;
    }
    const nlohmann::json& layer = row["steps"].back();
    EXPECT_EQ(layer["step"], "layer");
    const nlohmann::json& all = row["steps"][row["steps"].size() - 2];
    EXPECT_EQ(all["step"], "steps");
    EXPECT_EQ(all["of_steps"], 1);
    for (const char* ratio : {"layer_over_steps", "products_of_layer"}) {
      ASSERT_EQ(row[ratio].size(), 3u) << row;
      EXPECT_GT(row[ratio][0], 0) << row;
      EXPECT_LE(row[ratio][0], row[ratio][1]) << row;
      EXPECT_LE(row[ratio][1], row[ratio][2]) << row;
    }
    EXPECT_NEAR(row["gflops"].get<double>() * layer["ms"].get<double>() * 1e6,
                6.0 * row["tokens"].get<double>() * 2 * 256 * 256, 1);
    EXPECT_FALSE(row.contains("products_of_backward"));
    // Few rows an expert: its weights are read; 75 rows: they are multiplied.
    EXPECT_EQ(layer["bound"], i % 2 == 0 ? "plain reading" : "multiply-adds");
    EXPECT_LE(row["touched_experts"], i % 2 == 0 ? 4 : 8);
  }
  const Outcome text = run_small({"bench", "moe"}, {"--tokens", "2", "--dtype", "f32"});
  EXPECT_EQ(text.out.rfind("moe, 2 of 8 experts, hidden 256, intermediate 256, 2 thread(s), ", 0), 0u) << text.out;
  EXPECT_NE(text.out.find("\nf32         2  routing "), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("\nlayer: "), std::string::npos) << text.out;
}

TEST(OpstMoe, BenchHasRowsOfTheSharedExpertAndOfTheGradients) {
  const std::vector<std::string> more = {"--tokens", "60", "--dtype", "f32", "--shared", "128", "--backward"};
  std::vector<std::string> as_json = more;
  as_json.emplace_back("--json");
  const Outcome outcome = run_small({"bench", "moe"}, as_json);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.json()["shared"], 128);
  const nlohmann::json row = outcome.json()["rows"][0];
  std::vector<std::string> steps;
  for (const nlohmann::json& step : row["steps"]) {
    steps.push_back(step["step"]);
    EXPECT_GT(step["ms"], 0) << step;
  }
  EXPECT_EQ(steps, (std::vector<std::string>{"gating", "routing", "permute", "gate/up", "down", "shared", "finalize",
                                             "steps", "layer", "backward"}));
  EXPECT_GT(row["products_of_backward"][1], 0);
  // The experts' flops and the shared one's.
  EXPECT_NEAR(row["gflops"].get<double>() * row["steps"][8]["ms"].get<double>() * 1e6, 6.0 * 60 * 256 * (2 * 256 + 128),
              1);
  const Outcome text = run_small({"bench", "moe"}, more);
  EXPECT_NE(text.out.find("intermediate 256, shared 128, 2 thread(s)"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find(", those of backward "), std::string::npos) << text.out;
}

TEST(OpstMoe, PlanTellsTasksAndMemory) {
  const Outcome outcome = run_small({"plan", "moe"}, {"--tokens", "1,4096", "--dtype", "bf16,i4", "--json"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const nlohmann::json rows = outcome.json()["rows"];
  ASSERT_EQ(rows.size(), 4u);
  for (const nlohmann::json& row : rows) {
    const std::string groups = row["tokens"] == 1 ? "2 groups, " : "8 groups, ";
    EXPECT_EQ(std::string(row["gate_up"]).rfind(groups, 0), 0u) << row;
    EXPECT_EQ(std::string(row["down"]).rfind(groups, 0), 0u) << row;
    EXPECT_NE(row["gating_reason"], "") << row;
  }
  EXPECT_GT(rows[1]["scratch_bytes"]["gate_up"], rows[0]["scratch_bytes"]["gate_up"]);
  const Outcome text = run_small({"plan", "moe"}, {"--tokens", "7", "--dtype", "f32"});
  EXPECT_EQ(text.out.rfind("f32, 7 tokens, 2 of 8 experts\n  gating   ", 0), 0u) << text.out;
  EXPECT_NE(text.out.find("\n  layer    14 rows of experts in 1 wave of at most "), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("\n  a wave   gate/up 8 groups"), std::string::npos) << text.out;
  EXPECT_EQ(text.out.find("shared"), std::string::npos) << text.out;
}

TEST(OpstMoe, PlanTellsTheWavesOfTheOneCallAndItsSharedExpert) {
  const auto row_of = [](const std::vector<std::string>& more) {
    std::vector<std::string> options = {"--tokens", "100000", "--dtype", "bf16", "--json"};
    options.insert(options.end(), more.begin(), more.end());
    const Outcome outcome = run_small({"plan", "moe"}, options);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return outcome.json()["rows"][0];
  };
  const nlohmann::json without = row_of({}), with = row_of({"--shared", "64"}), layer = without["layer"];
  EXPECT_EQ(layer["rows"], 200000);
  EXPECT_EQ(layer["expanded_bytes"], 200000 * 256 * 2);
  EXPECT_GT(layer["waves"], 0);
  EXPECT_GT(layer["hidden_bytes"], 0);
  EXPECT_NE(layer["reason"], "");
  EXPECT_FALSE(without.contains("shared"));
  EXPECT_EQ(with["layer"]["expanded_bytes"], 300000 * 256 * 2);
  EXPECT_GT(with["scratch_bytes"]["layer"], without["scratch_bytes"]["layer"]);
  EXPECT_EQ(std::string(with["shared"]["gate_up"]).rfind("1 groups", 0), 0u) << with;
}

TEST(OpstMoe, RefusesWhatMakesNoSense) {
  const auto message = [](std::vector<std::string> options) {
    const Outcome outcome = run_program(options);
    EXPECT_EQ(outcome.exit_code, 2) << outcome.err;
    return outcome.err;
  };
  for (const std::string verb : {"bench", "check", "plan"}) {
    EXPECT_EQ(message({verb, "moe", "--experts", "4", "--top-k", "5"}),
              "opst " + verb + " moe: top-k is 5, but there are 4 experts\n");
    EXPECT_EQ(message({verb, "moe", "--intermediate", "40", "--dtype", "q4_1"}),
              "opst " + verb + " moe: k is 40, but q4_1 has blocks of 32 values\n");
    EXPECT_NE(message({verb, "moe", "--tokens", "0"}).find("--tokens"), std::string::npos);
    EXPECT_NE(message({verb, "moe", "--scores", "relu"}).find("relu"), std::string::npos);
    EXPECT_NE(message({verb, "moe", "--shared", "0"}).find("--shared: '0' is not a whole number from 1"),
              std::string::npos);
    EXPECT_EQ(message({verb, "moe", "--shared", "40", "--dtype", "q8_0"}),
              "opst " + verb + " moe: k is 40, but q8_0 has blocks of 32 values\n");
    if (verb != "plan") {
      EXPECT_EQ(message({verb, "moe", "--backward", "--dtype", "f32,i8"}),
                "opst " + verb + " moe: --backward takes weights of f32, bf16 and f16, but --dtype names i8\n");
    }
  }
}

TEST(OpstMatmulCheck, ProductsAgreeWithFloat64AndSpoiledOnesDoNot) {
  const std::vector<std::string> common = {"check",
                                           "matmul",
                                           "-t",
                                           "2",
                                           "--n",
                                           "64,33",
                                           "--k",
                                           "256",
                                           "--json",
                                           "--dtype",
                                           "f32,bf16,f16,q8_0,q4_k,q6_k,i8,i4"};
  const std::vector<std::vector<std::string>> shapes = {
      {"--m", "1,9"}, {"--m", "3,20", "--groups", "5", "--ragged"}, {"--rows", "4,0,1,30"}};
  for (const std::vector<std::string>& shape : shapes) {
    for (const bool spoil : {false, true}) {
      std::vector<std::string> command = common;
      command.insert(command.end(), shape.begin(), shape.end());
      if (spoil) command.emplace_back("--spoil");
      const Outcome outcome = run_program(command);
      EXPECT_EQ(outcome.exit_code, spoil ? 1 : 0) << outcome.err << outcome.out;
      EXPECT_EQ(outcome.err, spoil ? "opst check matmul: the error exceeds its bound\n" : "");
      const nlohmann::json result = outcome.json();
      EXPECT_EQ(result["ok"], !spoil);
      EXPECT_EQ(result["rows"].size(), shape[0] == "--rows" ? 16u : 32u);
      for (const nlohmann::json& row : result["rows"]) EXPECT_EQ(row["ok"], !spoil) << row;
    }
  }
  const Outcome refused = run_program({"check", "matmul", "--rows", "0,0"});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_EQ(refused.err, "opst check matmul: --rows: every group is empty\n");
}

TEST(OpstMatmulGroups, BenchAndPlanTakeTheRowsOfEachGroup) {
  const Outcome bench = run_program(
      {"bench", "matmul", "--rows", "2,0,5", "--n", "64", "--k", "256", "--dtype", "q4_k,i8", "-t", "1", "--json"});
  ASSERT_EQ(bench.exit_code, 0) << bench.err;
  const nlohmann::json bench_json = bench.json();
  EXPECT_EQ(bench_json["groups"], 3);
  ASSERT_EQ(bench_json["rows"].size(), 2u);
  for (const nlohmann::json& row : bench_json["rows"]) {
    EXPECT_EQ(row["bound"], "plain reading");
    EXPECT_EQ(row["m"], 5);
  }
  const Outcome plan =
      run_program({"plan", "matmul", "--rows", "2,0,50", "--n", "64", "--k", "256", "--dtype", "bf16,q4_k", "--json"});
  ASSERT_EQ(plan.exit_code, 0) << plan.err;
  const nlohmann::json plan_json = plan.json();
  ASSERT_EQ(plan_json["rows"].size(), 2u);
  for (const nlohmann::json& row : plan_json["rows"]) {
    EXPECT_EQ(row["groups_with_rows"], 2);
    EXPECT_GE(row["waves"], 1);
    // One or two rows meet a quantised weight in fixed point where the level has the product for it.
    const std::string fewest = row["fewest_rows"];
    const bool fixed = row["dtype"] == "q4_k" && fewest.rfind("activations_fixed ", 0) == 0;
    EXPECT_TRUE(fixed || fewest.rfind("few_rows ", 0) == 0) << row;
    EXPECT_EQ(std::string(row["most_rows"]).rfind("many_rows ", 0), 0u) << row;
  }
  const Outcome text = run_program({"plan", "matmul", "--groups", "4", "--m", "9", "--n", "64", "--k", "256"});
  EXPECT_EQ(text.out.rfind("f32, 4 groups of m rows, 64 x 256: 4 groups, ", 0), 0u) << text.out;
}

}  // namespace
}  // namespace opst::tools

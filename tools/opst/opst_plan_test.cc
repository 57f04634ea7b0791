// opst plan attention, memory, kv and layer on described machines, from outside.
#include <gtest/gtest.h>

#include <cmath>

#include "program.h"

namespace opst::tools {
namespace {

constexpr double kGiB = 0x1p30;

nlohmann::json plan(std::vector<std::string> words, const std::string& machine = "ascend-910") {
  words.insert(words.begin(), "plan");
  words.insert(words.end(), {"--machine", machine, "--json"});
  const Outcome outcome = run_program(words);
  EXPECT_EQ(outcome.exit_code, 0) << words[1] << ": " << outcome.err;
  EXPECT_EQ(outcome.err, "");
  return outcome.json();
}

std::string plan_text(std::vector<std::string> words) {
  words.insert(words.begin(), "plan");
  const Outcome outcome = run_program(words);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  return outcome.out;
}

void expect_has(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << part << "\nis not in\n" << text;
}

// ---- memory ----------------------------------------------------------------------------------------------------------

TEST(OpstPlan, MemoryOfScores) {
  const std::vector<std::string> words = {
      "memory", "--heads", "32", "--dtype", "bf16", "--seq", "4096,8192,16384,65536"};
  const double gib[] = {1, 4, 16, 256};
  for (const bool train : {false, true}) {
    std::vector<std::string> asked = words;
    if (train) asked.emplace_back("--train");
    const nlohmann::json result = plan(asked);
    ASSERT_EQ(result["rows"].size(), 4u);
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(result["rows"][i]["score_bytes"], (train ? 3 : 1) * gib[i] * kGiB);
  }
  const std::string text = plan_text({"memory", "--machine", "ascend-910"});
  for (const char* part : {"1 GiB", "4 GiB", "16 GiB", "256 GiB", "memory ends at"}) expect_has(text, part);
}

// The 910 has 32 GiB: the last length that fits is 22000 or so of standard attention.
TEST(OpstPlan, MemoryEnds) {
  const nlohmann::json result = plan({"memory", "--seq", "16384,32768,1048576"});
  EXPECT_EQ(result["rows"][0]["fits"], "both");
  EXPECT_EQ(result["rows"][1]["fits"], "flash only");
  EXPECT_EQ(result["rows"][2]["fits"], "neither");
  for (const char* form : {"standard", "flash"}) {
    const int64_t end = result[std::string(form) + "_ends_at"];
    const auto bytes = [&](int64_t length) {
      return plan({"memory", "--seq", std::to_string(length)})["rows"][0][std::string(form) + "_bytes"].get<double>();
    };
    EXPECT_LE(bytes(end), 32 * kGiB) << form;
    EXPECT_GT(bytes(end + 1), 32 * kGiB) << form;
  }
}

TEST(OpstPlan, MemoryOfAKvCache) {
  const std::vector<std::string> words = {"kv", "--layers", "32", "--kv-heads", "32", "--head-dim", "128"};
  const auto of = [&](const std::string& format, const std::string& context) {
    std::vector<std::string> asked = words;
    asked.insert(asked.end(), {"--kv-dtype", format, "--context", context});
    return plan(asked)["rows"][0]["bytes"].get<double>();
  };
  EXPECT_EQ(of("bf16", "131072"), 64 * kGiB);
  EXPECT_EQ(of("f32", "131072"), 128 * kGiB);
  EXPECT_EQ(of("f8_e4m3", "131072"), 32 * kGiB);
  // Rows of 128 numbers: int8 has a scale of 4 bytes, int4 a scale for 32 numbers.
  EXPECT_EQ(of("int8", "1"), 32 * 32 * 2 * (128 + 4));
  EXPECT_EQ(of("int8_offset", "1"), 32 * 32 * 2 * (128 + 8));
  EXPECT_EQ(of("int4", "1"), 32 * 32 * 2 * (64 + 4 * 4));
  EXPECT_EQ(of("int4_offset", "1"), 32 * 32 * 2 * (64 + 4 * 8));
  const nlohmann::json result = plan(words);
  EXPECT_EQ(result["ends_at"], 65536);  // 32 GiB
  EXPECT_EQ(result["rows"][2]["fits"], false);
  expect_has(plan_text({"kv", "--machine", "ascend-910", "--layers", "32", "--kv-heads", "32"}), "64 GiB");
}

// ---- attention -------------------------------------------------------------------------------------------------------

TEST(OpstPlan, AttentionFollowsTheTileRule) {
  const auto rule = [&](const std::string& heads) {
    return plan(
        {"attention", "--heads", "8", "--head-dim", "128", "--dtype", "bf16", "--sram-heads", heads})["rows"][0];
  };
  // 1.5 MiB for so many heads.
  for (const auto& [heads, block_q, block_kv] :
       {std::tuple("4", 256, 256), std::tuple("8", 256, 128), std::tuple("12", 128, 128), std::tuple("13", 128, 64),
        std::tuple("20", 64, 64), std::tuple("30", 64, 32), std::tuple("43", 32, 32), std::tuple("60", 32, 32)}) {
    const nlohmann::json row = rule(heads);
    EXPECT_EQ(row["tile_rule"]["block_q"], block_q) << heads;
    EXPECT_EQ(row["tile_rule"]["block_kv"], block_kv) << heads;
    EXPECT_EQ(row["block_q"], block_q) << heads;
    EXPECT_EQ(row["tile_rule"]["fits"], std::string(heads) != "60") << heads;
    EXPECT_EQ(row["tile_rule_one_head"]["block_q"], 256);
  }
  // Without --sram-heads all heads share it.
  EXPECT_EQ(plan({"attention", "--heads", "12", "--head-dim", "128", "--dtype", "bf16"})["rows"][0]["tile_rule"],
            rule("12")["tile_rule"]);
}

// Two tiles of which articles state less than their formula gives.
TEST(OpstPlan, SaysWhatATileNeeds) {
  const auto text = [](const char* block, const char* head_dim) {
    return plan_text({"attention", "--machine", "ascend-910", "--dtype", "bf16", "--block-q", block, "--block-kv",
                      block, "--head-dim", head_dim});
  };
  expect_has(text("128", "128"), "128 x 128 at head_dim 128 needs 128 KiB by the rule, 96 KiB with K and V in turn");
  expect_has(text("64", "256"), "64 x 64 at head_dim 256 needs 104 KiB by the rule, 72 KiB with K and V in turn");
}

TEST(OpstPlan, AttentionTellsPlacesTrafficTimesAndTheEnd) {
  const std::vector<std::string> words = {"attention", "--heads", "4", "--seq", "4096", "--dtype", "bf16", "--causal"};
  const nlohmann::json row = plan(words)["rows"][0];
  for (const nlohmann::json& place : row["places"]) {
    EXPECT_EQ(place["level"], place["bytes"] <= 1.5 * 0x1p20 ? "UB" : "L2") << place;
  }
  for (const char* form : {"flash", "standard"}) {
    const nlohmann::json& f = row[form];
    EXPECT_EQ(f["bytes"].size(), 3u);
    EXPECT_GT(f["matrix_ms"], 0);
    EXPECT_GT(f["vector_ms"], 0);
    EXPECT_GT(f["memory_ms"]["HBM"], 0);
    EXPECT_GE(f["predicted_ms"], f["matrix_ms"]);
    EXPECT_GT(f["memory_ends_at"], 4096);
  }
  EXPECT_LT(row["flash"]["predicted_ms"], row["standard"]["predicted_ms"]);
  EXPECT_LT(row["standard"]["memory_ends_at"], row["flash"]["memory_ends_at"]);
  std::vector<std::string> train = words;
  train.emplace_back("--train");
  const nlohmann::json both = plan(train)["rows"][0];
  EXPECT_NEAR(both["flash"]["matrix_ms"].get<double>(), 3.5 * row["flash"]["matrix_ms"].get<double>(), 1e-6);
  EXPECT_LT(both["standard"]["memory_ends_at"], row["standard"]["memory_ends_at"]);
  std::vector<std::string> text = words;
  text.insert(text.end(), {"--machine", "ascend-910"});
  for (const char* part : {"tile rule", "lies in", "bound by", "predicted", "which ends at", "flash", "standard"}) {
    expect_has(plan_text(text), part);
  }
}

TEST(OpstPlan, ALayerIsTheSumOfItsSteps) {
  const nlohmann::json result = plan({"layer", "--seq", "4096", "--kv-heads", "8", "--ffn", "14336"});
  const nlohmann::json& row = result["rows"][0];
  double flops = 0, weights = 0, ms = 0;
  for (const nlohmann::json& step : row["steps"]) {
    flops += step["flops"].get<double>(), weights += step["weight_bytes"].get<double>();
    ms += std::max({step["matrix_ms"].get<double>(), step["vector_ms"].get<double>(), step["memory_ms"].get<double>()});
  }
  // Projections of 32 + 16 heads, output, gate, up and down; 2 bytes and 2 flops for each token.
  const double numbers = 4096.0 * 128 * 48 + 4096.0 * 4096 + 3 * 4096.0 * 14336;
  EXPECT_EQ(weights, 2 * numbers);
  EXPECT_EQ(row["weight_bytes"], weights);
  EXPECT_NEAR(row["predicted_ms"].get<double>(), ms, 1e-9 * ms);
  const double attention = 4 * 128.0 * 32 * 4096 * 4097 / 2, others = 4 * 4096.0 * (3 * 4096 - 4096 + 5120 + 14336);
  EXPECT_EQ(flops, 2 * 4096 * numbers + attention + others);
  EXPECT_EQ(row["cache_bytes"], 4096.0 * 2 * 8 * 128 * 2);
  EXPECT_EQ(row["memory_bytes"], 32 * (weights + row["cache_bytes"].get<double>()));
  EXPECT_EQ(row["fits"], true);
  // A decoded token reads weights and cache: bound by memory. Training holds more than 32 GiB.
  const nlohmann::json decode = plan({"layer", "--seq", "4096", "--query-len", "1"})["rows"][0];
  for (const nlohmann::json& step : decode["steps"]) {
    if (step["weight_bytes"] > 0) {
      EXPECT_EQ(step["bound"], "memory") << step;
    }
  }
  EXPECT_EQ(plan({"layer", "--seq", "65536", "--train"})["rows"][0]["fits"], false);
  expect_has(plan_text({"layer", "--machine", "ascend-910", "--train"}), "kept for the gradients");
}

// ---- machines --------------------------------------------------------------------------------------------------------

TEST(OpstPlan, EveryProfileNamesItsSources) {
  for (const char* name : {"ascend-910", "epyc-zen4"}) {
    const nlohmann::json machine = plan({"memory"}, name)["machine"];
    expect_has(machine["origin"], std::string(name) + ".machine");
    for (const auto& [key, value] : machine.items()) {
      if (value.is_object()) {
        EXPECT_GT(value["source"].get<std::string>().size(), 3u) << name << ": " << key;
      }
    }
    for (const nlohmann::json& memory : machine["memories"]) {
      for (const char* key : {"bytes", "read_bytes_per_s"}) {
        EXPECT_GT(memory[key]["source"].get<std::string>().size(), 2u) << name << ": " << memory;
      }
    }
  }
}

// What the program measures is a profile that it reads back.
TEST(OpstPlan, ThisMachineIsAProfileToo) {
  const Outcome profile = run_program({"info", "--profile"});
  ASSERT_EQ(profile.exit_code, 0) << profile.err;
  const TemporaryFolder folder;
  const nlohmann::json result = plan({"kv"}, folder.write("my.machine", profile.out));
  EXPECT_EQ(result["machine"]["kind"], "cpu");
  EXPECT_EQ(plan({"kv"}, "this")["machine"]["memories"].size(), result["machine"]["memories"].size());
  for (const char* word : {"--json", "--model=x"}) EXPECT_EQ(run_program({"info", "--profile", word}).exit_code, 2);
}

// A CPU is planned for as the library would plan on it.
TEST(OpstPlan, ADescribedCpuHasTheLibrarysTiles) {
  const nlohmann::json row = plan({"attention", "--heads", "4", "--seq", "4096", "--dtype", "f32", "--head-dim", "128"},
                                  "epyc-zen4")["rows"][0];
  EXPECT_NE(row["tile_reason"], "the tile rule");
  EXPECT_GT(row["flash"]["predicted_ms"], row["flash"]["matrix_ms"]);  // its units take turns
}

TEST(OpstPlan, WrongMachinesAreRefused) {
  const auto refused = [](std::vector<std::string> words, int exit_code, const std::string& message) {
    words.insert(words.begin(), "plan");
    const Outcome outcome = run_program(words);
    EXPECT_EQ(outcome.exit_code, exit_code) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    expect_has(outcome.err, message);
  };
  const TemporaryFolder folder;
  const std::string bad = folder.write("bad.machine", "name = x\nkind = gpu\n");
  for (const char* command : {"attention", "memory", "kv", "layer"}) {
    refused({command, "--machine", "nosuch"}, 2,
            std::string("opst plan ") + command +
                ": --machine: 'nosuch' is no profile; expected this, a file's path or one of ascend-910, epyc-zen4");
    refused({command, "--machine", bad}, 1, bad + ":2: kind: got 'gpu', expected cpu or accelerator");
    refused({command, "--machine", folder.path("none.machine")}, 1, "none.machine: cannot be opened");
    refused({command, "--machine", folder.path("")}, 1, "is a folder, expected a machine profile");
    refused({command, "--machine", "/dev/zero"}, 1, "more than 1048576 bytes, expected a machine profile");
  }
  for (const char* command : {"memory", "kv", "layer"}) refused({command}, 2, "--machine is required");
  refused({"attention", "--train"}, 2, "--machine");
  refused({"attention", "--machine", "ascend-910", "--window", "3,0"}, 2,
          "--machine plans calls without options other than --causal; got window 3,0");
  refused({"attention", "--machine", "ascend-910", "--backward"}, 2, "--train plans both passes");
  refused({"layer", "--machine", "ascend-910", "--kv-heads", "5"}, 2, "--heads 32 is not a multiple of --kv-heads 5");
  refused({"kv", "--machine", "ascend-910", "--kv-dtype", "int3"}, 2, "int3");
  refused({"kv", "--machine", "ascend-910", "--kv-dtype", "int4", "--head-dim", "65"}, 2,
          "head_dim is 65, but int4 has two values to a byte");
}

}  // namespace
}  // namespace opst::tools

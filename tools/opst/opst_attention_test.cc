// opst bench, check and plan attention with options, from outside.
#include <gtest/gtest.h>

#include <algorithm>

#include "program.h"

namespace opst::tools {
namespace {

const std::vector<std::vector<std::string>> kOptions = {
    {},
    {"--causal", "--dropout", "0.2"},
    {"--window", "20,0", "--prefix", "7"},
    {"--window", "all,3", "--top-left"},
    {"--window=-3,20"},
    {"--window", "30,-2", "--prefix", "4"},
    {"--mask", "bool", "--softcap", "5"},
    {"--mask", "additive", "--alibi", "--causal"},
    {"--varlen", "1,70,5:90,0,33", "--causal", "--dropout", "0.5"},
    {"--varlen", "64,3:80", "--mask", "additive", "--alibi", "--prefix", "40", "--window", "5,0"},
    {"--dtype", "bf16", "--mask", "bool", "--dropout", "0.1", "--causal", "--softcap", "20"},
    {"--shared-prefix", "70", "--batch", "5", "--query-len", "2", "--causal"},
    {"--shared-prefix", "64", "--batch", "3", "--query-len", "1", "--dtype", "bf16", "--alibi", "--window", "40,0"},
    {"--sparse", "window=20,global=3,random=1,block=8", "--causal"},
    {"--sparse", "density=0.3,block_q=16,block_kv=7,heads=4", "--dropout", "0.2", "--window", "60,60"},
};

nlohmann::json json_of(const std::string& command, std::vector<std::string> options) {
  if (std::find(options.begin(), options.end(), "--varlen") == options.end()) {
    options.insert(options.end(), {"--seq", "90"});
  }
  options.insert(options.begin(), {command, "attention", "--heads", "4", "--kv-heads", "2", "--json"});
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
    EXPECT_EQ(row["error_ok"], true) << row;
    EXPECT_GT(row["error_bound"], 0);
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
  EXPECT_EQ(flops({"--sparse", "documents=30,block=30"}), per_pair * 3 * 30 * 30);
  EXPECT_EQ(flops({"--sparse", "documents=45,block=45", "--causal"}), per_pair * 45 * 46);
  EXPECT_EQ(flops({"--varlen", "10,3:20", "--pages", "norm"}), per_pair * (100 + 60));
  EXPECT_EQ(flops({"--tree", "--query-len", "1"}), per_pair * 90);  // the context, and the token itself
  EXPECT_EQ(flops({"--tree", "--query-len", "1", "--window", "9,0"}), per_pair * 10);
}

// As a call's, whose keys are dense tensors [tokens, heads, dim] or norm pages.
TEST(OpstAttention, PlanHasHeadsTakeTurns) {
  const auto takes_turns = [](std::vector<std::string> options) {
    for (const char* word : {"attention", "plan"}) options.insert(options.begin(), word);
    for (const char* word : {"--heads", "32", "--kv-heads", "8", "--head-dim", "64"}) options.emplace_back(word);
    const Outcome outcome = run_program(options);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return outcome.out.find(" heads in turn") != std::string::npos;
  };
  EXPECT_TRUE(takes_turns({"--varlen", "1:8192,1:300,1:64,1:9"}));
  EXPECT_TRUE(takes_turns({"--varlen", "1:8192,1:300,1:64,1:9", "--pages", "norm"}));
  EXPECT_TRUE(takes_turns({"--seq", "8192", "--query-len", "1", "--batch", "4", "--pages", "norm"}));
  EXPECT_FALSE(takes_turns({"--seq", "8192", "--query-len", "1", "--batch", "4", "--pages", "panel32"}));
  EXPECT_FALSE(takes_turns({"--seq", "8192", "--query-len", "1", "--batch", "4"}));
}

TEST(OpstAttention, PlanDrawsABlockMask) {
  const std::vector<std::string> plan = {"plan", "attention", "--seq", "250", "--causal", "--draw", "--sparse"};
  const auto run = [&](const std::string& sparse, std::vector<std::string> more = {}) {
    std::vector<std::string> options = plan;
    options.push_back(sparse);
    options.insert(options.end(), more.begin(), more.end());
    return run_program(options);
  };
  const Outcome outcome = run("window=60,global=1,block=50");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  const std::string picture = "5 x 5 blocks of 50 queries and 50 keys\n  #....\n  ##...\n  ###..\n  ####.\n  #.###\n";
  EXPECT_NE(outcome.out.find(picture), std::string::npos) << outcome.out;
  EXPECT_EQ(run("documents=125,block=1", {"--json"})
                .json()["rows"][0]["picture"]
                .get<std::string>()
                .find("250 x 250 blocks of 1 queries and 1 keys, 3 x 3 to a character"),
            0u);
  for (const auto& [sparse, complaint] :
       {std::pair("window", "'window' is not KEY=NUMBER"), std::pair("width=3", "'width=3' has no known key"),
        std::pair("window=x", "'window=x' is not a whole number from 0 to 2^30"),
        std::pair("density=2", "'density=2' is not a number above 0 and up to 1"),
        std::pair("heads=3", "heads=3 is not 1, --heads or --kv-heads"),
        std::pair("block=0", "block_q is 0, must be 1 to 2^56")}) {
    const Outcome refused = run(sparse);
    EXPECT_EQ(refused.exit_code, 2) << sparse;
    EXPECT_NE(refused.err.find(complaint), std::string::npos) << refused.err;
  }
  EXPECT_EQ(run_program({"plan", "attention", "--draw"}).exit_code, 2);
}

// The verdict must be able to say FAIL: one value of every 256 is lost, which is what a tile that forgets one would do.
TEST(OpstAttention, CheckNoticesWhatATileLoses) {
  for (const std::string dtype : {"f32", "bf16", "f16", "f64"}) {
    const std::vector<std::string> options = {"check",      "attention", "--dtype", dtype,
                                              "--head-dim", "16",        "--seq",   "256,300,512,1024,2048,4096",
                                              "--rows",     "40",        "--json"};
    const Outcome right = run_program(options);
    EXPECT_EQ(right.exit_code, 0) << right.out << right.err;
    std::vector<std::string> spoiled = options;
    spoiled.push_back("--spoil");
    const Outcome wrong = run_program(spoiled);
    EXPECT_EQ(wrong.exit_code, 1) << wrong.out;
    const nlohmann::json report = wrong.json();
    for (const nlohmann::json& row : report["rows"]) EXPECT_EQ(row["ok"], false) << row;
    EXPECT_EQ(report["rows"].size(), 6u);
    spoiled = {"check", "attention", "--backward", "--dtype", dtype, "--head-dim", "16", "--seq", "256,300", "--spoil"};
    EXPECT_EQ(run_program(spoiled).exit_code, 1) << dtype;
    spoiled.pop_back();
    EXPECT_EQ(run_program(spoiled).exit_code, 0) << dtype;
  }
}

TEST(OpstAttention, TheBoundGrowsWithTheScores) {
  const Outcome outcome = run_program({"check", "attention", "--backward", "--causal", "--softcap", "20", "--dtype",
                                       "f64", "--head-dim", "640", "--seq", "200"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
}

// Options drawn at random: whatever the program accepts it computes rightly.
TEST(OpstAttention, RandomOptionsPass) {
  uint32_t state = 12345;
  const auto draw = [&](uint32_t below) { return (state = state * 1664525u + 1013904223u) / 65536u % below; };
  const auto pick = [&](std::vector<std::string> words) { return words[draw(static_cast<uint32_t>(words.size()))]; };
  for (int n = 0; n < 60; ++n) {
    std::vector<std::string> options = {"check", "attention"};
    const auto add = [&](const char* name, const std::string& value) {
      options.emplace_back(name);
      if (!value.empty()) options.push_back(value);
    };
    const std::string dtype = pick({"f32", "bf16", "f16", "f64"});
    add("--dtype", dtype);
    const bool paged = dtype != "f64" && draw(3) == 0;
    bool panels = false, differentiable = true;
    if (paged) {
      add("--pages", pick({"norm", "norm", "panel32"}));
      add("--kv-dtype",
          pick({"f32", "bf16", "f16", "f8_e4m3", "f8_e5m2", "int8", "int8_offset", "int4", "int4_offset"}));
      panels = options[options.size() - 3] == "panel32";
      const std::string& format = options.back();
      differentiable = !panels && (format == "f32" || format == "bf16" || format == "f16");
    } else if (draw(3) == 0 && dtype != "f64") {
      add("--kv-dtype", pick({"f32", "bf16", "f16"}));
    }
    add("--heads", pick({"2", "4"}));
    if (draw(2) == 0) add("--kv-heads", "2");
    add("--head-dim", pick({paged ? "2" : "1", "16", "40", "64", "160"}));
    if (draw(3) == 0) add("--value-head-dim", pick({paged ? "2" : "1", "24", "72"}));
    if (draw(4) == 0) {
      add("--varlen", pick({"1,70,5:90,0,33", "64,3:80"}));
    } else {
      add("--seq", pick({"1", "33", "130", "300"}));
      if (draw(3) == 0) add("--query-len", pick({"1", "7", "150"}));
      add("--batch", pick({"1", "2"}));
    }
    if (draw(2) == 0) {
      add("--causal", "");
      if (draw(4) == 0) add("--top-left", "");
    }
    if (draw(3) == 0) add("--window", pick({"20,0", "all,3", "-2,40", "9,-1", "0,0"}));
    if (draw(3) == 0) add("--mask", pick({"bool", "additive"}));
    if (draw(3) == 0) add("--alibi", "");
    if (draw(3) == 0) add("--softcap", pick({"1", "20", "50"}));
    if (draw(4) == 0) add("--dropout", pick({"0.1", "0.7"}));
    if (draw(4) == 0) add("--block-kv", pick({panels ? "32" : "5", "64"}));
    if (draw(4) == 0) add("--block-q", pick({"3", "48"}));
    if (draw(3) == 0 && differentiable) {
      add("--backward", "");
    } else {
      add("--rows", "20");
    }
    add("-t", pick({"1", "2"}));
    const Outcome outcome = run_program(options);
    std::string line;
    for (const std::string& option : options) line += option + " ";
    EXPECT_EQ(outcome.exit_code, 0) << line << "\n" << outcome.out << outcome.err;
  }
}

TEST(OpstAttention, SparseIndicesPass) {
  for (const char* const lists : {"1", "20", "3,8", "2,16"}) {
    for (const std::vector<std::string>& more :
         {std::vector<std::string>{"--causal"}, {"--backward"}, {"--pages", "norm", "--kv-dtype", "int8"}}) {
      std::vector<std::string> options = {"check",   "attention", "--sparse-indices", lists, "--seq",      "70",
                                          "--heads", "4",         "--kv-heads",       "2",   "--head-dim", "40"};
      options.insert(options.end(), more.begin(), more.end());
      const Outcome outcome = run_program(options);
      EXPECT_EQ(outcome.exit_code, 0) << lists << " " << more[0] << "\n" << outcome.out << outcome.err;
    }
  }
}

// As generate and perplexity name it.
TEST(OpstAttention, Fp8IsF8E4m3) {
  for (const char* layout : {"norm", "panel32"}) {
    for (const std::string verb : {"check", "plan", "bench"}) {
      const auto rows_of = [&](const std::string& name) {
        const Outcome outcome =
            run_program({verb, "attention", "--kv-dtype", name, "--pages", layout, "--heads", "2", "--seq", "70",
                         "--query-len", "1", "--head-dim", "32", "-t", "1", "--json"});
        EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
        return outcome.json()["rows"];
      };
      const nlohmann::json fp8 = rows_of("fp8"), own = rows_of("f8_e4m3"), other = rows_of("f8_e5m2");
      ASSERT_EQ(fp8.size(), 1u);
      if (verb == "plan") {
        EXPECT_EQ(fp8[0]["plan"], own[0]["plan"]);
      } else if (verb == "check") {
        EXPECT_EQ(fp8, own);
        EXPECT_NE(fp8, other);
      }
    }
  }
}

// Pages with sequences of their own lengths and with gradients, and trees of draft tokens.
TEST(OpstAttention, PagesAndTreesPass) {
  const std::vector<std::vector<std::string>> cases = {
      {"--pages", "norm", "--varlen", "1:200,0,130,64:65", "--causal"},
      {"--pages", "panel32", "--varlen", "1:200,130", "--kv-dtype", "bf16"},
      {"--kv-dtype", "int8", "--varlen", "3:70,1:64"},
      {"--kv-dtype", "int4", "--pages", "panel32", "--query-len", "1", "--seq", "130"},
      {"--kv-dtype", "int8_offset", "--pages", "panel32", "--varlen", "3:70,1:64", "--causal"},
      {"--kv-dtype", "int4_offset", "--pages", "panel32", "--query-len", "40", "--seq", "200"},
      {"--pages", "norm", "--backward", "--seq", "130", "--batch", "2"},
      {"--pages", "norm", "--backward", "--varlen", "70,5:90", "--causal"},
      {"--tree", "--query-len", "9", "--seq", "200", "--batch", "2"},
      {"--tree", "--query-len", "64", "--seq", "64", "--causal", "--window", "20,0"},
      {"--tree", "--query-len", "7", "--seq", "300", "--kv-dtype", "int4", "--causal"}};
  for (const std::vector<std::string>& more : cases) {
    std::vector<std::string> options = {"check", "attention", "--heads", "4", "--kv-heads", "2", "--head-dim", "40"};
    options.insert(options.end(), more.begin(), more.end());
    const auto run = [&](const char* command) {
      options[0] = command;
      const Outcome outcome = run_program(options);
      EXPECT_EQ(outcome.exit_code, 0) << command << " " << more[0] << " " << more[1] << "\n"
                                      << outcome.out << outcome.err;
    };
    for (const char* command : {"check", "plan", "bench"}) run(command);
    options[0] = "check";
    options.emplace_back("--spoil");
    EXPECT_EQ(run_program(options).exit_code, 1) << testing::PrintToString(more);
  }
}

TEST(OpstAttention, ListsAreTakenInEveryForm) {
  const auto lengths = [](std::vector<std::string> options) {
    options.insert(options.begin(), {"plan", "attention", "--json"});
    std::vector<int64_t> found;
    const nlohmann::json report = run_program(options).json();
    for (const auto& row : report["rows"]) found.push_back(row["kv_len"]);
    return found;
  };
  const std::vector<int64_t> two = {5, 70};
  EXPECT_EQ(lengths({"--seq", "5,70"}), two);
  EXPECT_EQ(lengths({"--seq=5,70"}), two);
  EXPECT_EQ(lengths({"--seq", "5", "70"}), two);
  EXPECT_EQ(lengths({"--seq", "5", "--seq", "+70"}), two);
  EXPECT_EQ(lengths({}), std::vector<int64_t>{1024});
}

TEST(OpstAttention, NaiveColumnIsMeasuredOrSaysWhyNot) {
  const auto state = [](std::vector<std::string> options) {
    const nlohmann::json row = json_of("bench", std::move(options))["rows"][0];
    EXPECT_EQ(row["naive_ms"].is_null(), row["naive_state"] != "measured") << row;
    return row["naive_state"];
  };
  for (const char* dtype : {"f32", "bf16", "f16", "f64"}) EXPECT_EQ(state({"--dtype", dtype, "--causal"}), "measured");
  EXPECT_EQ(state({"--mask", "additive", "--window", "9,0", "--prefix", "3"}), "measured");
  EXPECT_EQ(state({"--softcap", "5"}), "option");
  EXPECT_EQ(state({"--memory-limit", "1000"}), "memory");
  EXPECT_EQ(state({"--backward", "--causal"}), "measured");
  const nlohmann::json row = json_of("bench", {"--backward", "--causal"})["rows"][0];
  EXPECT_EQ(row["error_ok"], true);
  EXPECT_EQ(row["naive_bytes"], 4 * (2 * 90 * 128 + 3 * 4 * 90 * 90));
}

TEST(OpstAttention, PlanTellsWhatSequencesShare) {
  const auto shared = [](std::vector<std::string> more) {
    more.insert(more.end(), {"--batch", "4", "--shared-prefix", "64"});
    return json_of("plan", more)["rows"][0]["shared_prefix"].get<std::string>();
  };
  EXPECT_EQ(shared({"--query-len", "1"}).find("1 group shares 64 keys: flash in_place f32, block_q 8, "), 0u);
  EXPECT_EQ(shared({"--query-len", "70"}),
            "nothing is shared: no neighbouring sequences of few queries begin with the same blocks");
  EXPECT_EQ(shared({"--query-len", "1", "--path", "standard"}), "nothing is shared: options.path is standard");
}

TEST(OpstAttention, RefusesWhatMakesNoSense) {
  struct Case {
    std::vector<std::string> options;
    const char* message;
  };
  const Case cases[] = {
      {{"--window", "3"}, "--window: '3' is not LEFT,RIGHT"},
      {{"--window", "3,x"}, "--window: '3,x' is not LEFT,RIGHT"},
      {{"--dropout", "1"}, "--dropout: '1' is not a number from 0 to 0.999"},
      {{"--mask", "float"}, "--mask: 'float' is none of bool, additive"},
      {{"--varlen", "3,x"}, "--varlen: 'x' is neither a length nor QUERIES:KEYS"},
      {{"--varlen", "3", "--query-len", "2"}, "--query-len does not go with --varlen"},
      {{"--varlen", "3", "--seq", "8"}, "--seq excludes --varlen"},
      {{"--batch", "2", "--varlen", "3"}, "--batch excludes --varlen"},
      {{"--top-left", "--prefix", "3"}, "--top-left says where the diagonal of --causal, --window or --alibi lies"},
      {{"--seq", "1,,2"}, "--seq: '1,,2' has an empty item"},
      {{"--seq", "8,"}, "--seq: '8,' has an empty item"},
      {{"--seq="}, "--seq"},
      {{"--varlen", ",8"}, "--varlen: ',8' has an empty item"},
      {{"--head-dim", "1000"}, "--head-dim: '1000' is not a whole number from 1 to 768"},
      {{"--value-head-dim", "0"}, "--value-head-dim: '0' is not a whole number from 1 to 768"},
      {{"--block-q", "100000"}, "--block-q: '100000' is not a whole number from 1 to 4096"},
      {{"--kv-dtype", "f64"}, "--kv-dtype: f64 does not go with --dtype f32"},
      {{"--dtype", "f64", "--kv-dtype", "f32"}, "--kv-dtype: f32 does not go with --dtype f64"},
      {{"--kv-dtype", "int3"},
       "--kv-dtype: 'int3' is none of f32, bf16, f16, f64, fp8, f8_e4m3, f8_e5m2, int8, int8_offset, int4, "
       "int4_offset"},
      {{"--sparse", "window=3", "--varlen", "9,3"},
       "--sparse does not go with --varlen: blocks are drawn for sequences of one length"},
      {{"--sparse-indices", "3", "--varlen", "9,3"},
       "--sparse-indices does not go with --varlen: blocks are drawn for sequences of one length"},
      {{"--tree", "--query-len", "65"}, "--tree takes a --query-len of at most 64"},
      {{"--tree", "--query-len", "9", "--seq", "8"}, "no more than the keys, but it is 9 of 8 keys"},
      {{"--tree", "--varlen", "9,3"}, "excludes"},
      {{"--tree", "--query-len", "4", "--backward"},
       "--backward does not go with --tree: a tree of draft tokens has no gradient"},
      {{"--pages", "norm", "--dtype", "f64"},
       "keys and values in pages (--pages, --kv-dtype) do not go with --dtype f64, which no cache holds"},
      {{"--kv-dtype", "int4", "--head-dim", "9"},
       "--pages, --kv-dtype: page layout norm: head_dim is 9, but must be even for u8, two numbers each"},
      {{"--pages", "panel32", "--backward"},
       "--backward does not go with pages of panel32 or of f32: gradients are taken of norm pages of f32, bf16 and "
       "f16"},
      {{"--kv-dtype", "int8", "--backward"},
       "--backward does not go with pages of panel32 or of int8: gradients are taken of norm pages of f32, bf16 and "
       "f16"},
      {{"--sparse-indices", "0"}, "--sparse-indices: '0' is not COUNT or COUNT,BLOCK, whole numbers from 1 to 2^30"},
      {{"--sparse-indices", "2,3,4"}, "--sparse-indices: '2,3,4' is not COUNT or COUNT,BLOCK"},
      {{"--sparse-indices", "9,16", "--seq", "100"},
       "--sparse-indices: 9 blocks of 16 are more than the 7 of 100 keys"},
      {{"--softcap", "-1"}, "--softcap: '-1' is not a number from 0 to 1e+06"},
      {{"--softcap", "nan"}, "--softcap: 'nan' is not a number"},
      {{"--prefix", "91", "--seq", "90"}, "--prefix: 91 is more than the 90 keys of --seq"},
      {{"--prefix", "9", "--seq", "90,8"}, "--prefix: 9 is more than the 8 keys of --seq"},
      {{"--prefix", "4", "--varlen", "9,3"}, "--prefix: 4 is more than the 3 keys of a sequence of --varlen"},
      {{"--shared-prefix", "64"}, "--shared-prefix takes --batch 2 or more"},
      {{"--shared-prefix", "91", "--seq", "90", "--batch", "2"},
       "--shared-prefix: 91 is more than the 90 keys of --seq"},
      {{"--shared-prefix", "4", "--varlen", "9,3"}, "excludes"},
      {{"--shared-prefix", "4", "--batch", "2", "--backward"}, "excludes"},
      {{"--heads", "3", "--kv-heads", "2"}, "--heads 3 is not a multiple of --kv-heads 2"},
      {{"--seq", "99999999999999999999"}, "--seq: '99999999999999999999' is not a whole number"},
      {{"--first", "1", "--second"}, "unknown: --first 1 --second; see opst"},
  };
  for (const char* command : {"plan", "check", "bench"}) {
    for (const Case& c : cases) {
      std::vector<std::string> arguments = {command, "attention"};
      arguments.insert(arguments.end(), c.options.begin(), c.options.end());
      const Outcome outcome = run_program(arguments);
      EXPECT_EQ(outcome.exit_code, 2) << command << " " << outcome.err;
      EXPECT_EQ(outcome.out, "") << command << " " << outcome.err;
      EXPECT_NE(outcome.err.find(c.message), std::string::npos) << outcome.err << c.message;
      EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
      EXPECT_LT(outcome.err.size(), 250u) << outcome.err;
    }
    if (command != std::string("bench")) {  // which has no --path
      const Outcome path = run_program({command, "attention", "--backward", "--path", "flash"});
      EXPECT_EQ(path.exit_code, 2);
      EXPECT_NE(path.err.find("--path excludes --backward"), std::string::npos) << path.err;
    }
    const Outcome alone = run_program({command});
    EXPECT_EQ(alone.exit_code, 2);
    EXPECT_NE(alone.err.find("a subcommand is required: attention"), std::string::npos) << alone.err;
  }
  const Outcome rows = run_program({"check", "attention", "--backward", "--rows", "9"});
  EXPECT_EQ(rows.exit_code, 2);
  EXPECT_NE(rows.err.find("--rows excludes --backward"), std::string::npos) << rows.err;
}

}  // namespace
}  // namespace opst::tools

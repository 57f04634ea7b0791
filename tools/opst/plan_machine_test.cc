// What plans of described machines are made of: the file form of a profile, the tile rule, bytes of each memory, the
// length at which memory ends. Expected numbers are worked out by hand beside each case.
#include <gtest/gtest.h>

#include <cmath>

#include "attention_outlook.h"
#include "machine_profile.h"
#include "testing/random.h"
#include "tile_rule.h"

namespace opst::tools {
namespace {

constexpr double kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB;

const std::vector<std::string> kLines = {
    "# an invented machine",
    "name = four small cores",
    "kind = accelerator",
    "tile_memory = near",
    "cores = 4 ; the test",
    "matrix_tile = 16 ; the test",
    "matrix_f32 = 100 GFLOP/s ; the test; page 3",
    "matrix_bf16 = 1 TFLOP/s ; the test  # halves",
    "exponentials = 10 G/s ; the test",
    "start = 1 us ; the test",
    "",
    "[memory near]",
    "per = core",
    "bytes = 128 KiB ; the test",
    "read = 1 TB/s ; the test",
    "[memory far]",
    "per = machine",
    "bytes = 1 GiB ; the test",
    "read = 100 GB/s ; the test",
};

std::string text_of(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

std::string refusal(const std::vector<std::string>& lines) {
  try {
    parse_machine_profile(text_of(lines), "m.machine");
  } catch (const CommandError& error) {
    EXPECT_EQ(error.exit_code(), 1);
    return error.what();
  }
  return "no refusal";
}

MachineProfile small_machine() { return parse_machine_profile(text_of(kLines), "m.machine"); }

// ---- the file --------------------------------------------------------------------------------------------------------

TEST(MachineProfile, IsReadWithItsSources) {
  const MachineProfile m = small_machine();
  EXPECT_EQ(m.name, "four small cores");
  EXPECT_EQ(m.origin, "m.machine");
  EXPECT_EQ(m.kind, MachineProfile::Kind::accelerator);
  EXPECT_EQ(m.cores.value, 4);
  EXPECT_EQ(m.matrix_f32.value, 1e11);
  EXPECT_EQ(m.matrix_f32.source, "the test; page 3");
  EXPECT_EQ(m.matrix_bf16.source, "the test");
  EXPECT_EQ(m.matrix_rate(DType::f16), 1e12);
  EXPECT_EQ(m.matrix_rate(DType::f32), 1e11);
  EXPECT_EQ(m.exponentials.value, 1e10);
  EXPECT_EQ(m.start.value, 1e-6);
  ASSERT_EQ(m.levels.size(), 2u);
  EXPECT_EQ(m.total_bytes(m.levels[0]), 4 * 128 * kKiB);
  EXPECT_EQ(m.total_bytes(m.main_memory()), kGiB);
  EXPECT_EQ(m.tile_level().name, "near");
  EXPECT_EQ(m.levels[0].read.value, 1e12);
}

TEST(MachineProfile, IsWrittenAsItIsRead) {
  const MachineProfile m = small_machine(), again = parse_machine_profile(to_text(m), "m.machine");
  EXPECT_EQ(to_text(again), to_text(m));
  EXPECT_EQ(to_json(again), to_json(m));
  MachineProfile cpu = m;
  cpu.kind = MachineProfile::Kind::cpu, cpu.isa = Isa::avx2;
  EXPECT_EQ(parse_machine_profile(to_text(cpu), "").isa, Isa::avx2);
}

TEST(MachineProfile, RefusalsNameFileLineKeyGotAndExpected) {
  const auto with = [](size_t number, const std::string& line) {  // lines count from 1
    std::vector<std::string> lines = kLines;
    lines[number - 1] = line;
    return refusal(lines);
  };
  const std::string rates = "a number and GFLOP/s|TFLOP/s, then ; and the number's source";
  EXPECT_EQ(with(7, "matrix_f32 = 100 ; x"), "m.machine:7: matrix_f32: got '100 ; x', expected " + rates);
  EXPECT_EQ(with(7, "matrix_f32 = fast GFLOP/s ; x"),
            "m.machine:7: matrix_f32: got 'fast GFLOP/s ; x', expected " + rates);
  EXPECT_EQ(with(7, "matrix_f32 = nan GFLOP/s ; x"),
            "m.machine:7: matrix_f32: got 'nan GFLOP/s ; x', expected " + rates);
  EXPECT_EQ(with(7, "matrix_f32 = 100 GFLOP/s"),
            "m.machine:7: matrix_f32: got '100 GFLOP/s' without a source, expected " + rates);
  EXPECT_EQ(with(7, "matrix_f32 = 100 GFLOP/s ; "),
            "m.machine:7: matrix_f32: got '100 GFLOP/s ;' without a source, expected " + rates);
  EXPECT_EQ(with(7, "matrix_f32 = -100 GFLOP/s ; x"),
            "m.machine:7: matrix_f32: got '-100 GFLOP/s', expected more than 0 and at most 1e18");
  EXPECT_EQ(with(7, "matrix_f32 = 1e17 TFLOP/s ; x"),
            "m.machine:7: matrix_f32: got '1e17 TFLOP/s', expected more than 0 and at most 1e18");
  EXPECT_EQ(with(7, "matrix_f32 ="), "m.machine:7: matrix_f32: got nothing, expected a value");
  EXPECT_EQ(with(7, "matrix_f32"), "m.machine:7: a line: got 'matrix_f32', expected KEY = VALUE or [memory NAME]");
  EXPECT_EQ(with(5, "cores = 2.5 ; x"), "m.machine:5: cores: got '2.5', expected more than 0 and at most 1e18, whole");
  EXPECT_EQ(with(5, "cores = 1000000 ; x"), "m.machine:19: cores: got 1000000, expected at most 65536");
  EXPECT_EQ(with(6, "matrix_tile = 5000 ; x"), "m.machine:19: matrix_tile: got 5000, expected at most 4096");
  EXPECT_EQ(with(6, "cores = 3 ; x"), "m.machine:6: cores: got it a second time, expected it once");
  EXPECT_EQ(with(3, "kind = gpu"), "m.machine:3: kind: got 'gpu', expected cpu or accelerator");
  EXPECT_EQ(with(3, "isa = sse9"), "m.machine:3: isa: got 'sse9', expected a level such as generic, avx2, avx512_bf16");
  EXPECT_EQ(with(3, "colour = red"),
            "m.machine:3: colour: got an unknown key, expected one of name, kind, isa, tile_memory, cores, matrix_f32, "
            "matrix_bf16, matrix_tile, exponentials, start, or [memory NAME]");
  EXPECT_EQ(with(4, "tile_memory = far"),
            "m.machine:4: tile_memory: got 'far', expected the name of a memory before the last");
  EXPECT_EQ(with(12, "[cache]"), "m.machine:12: a section: got '[cache]', expected [memory NAME]");
  EXPECT_EQ(with(12, "[memory near"), "m.machine:12: a section: got '[memory near', expected [memory NAME]");
  EXPECT_EQ(with(12, "[memory a b]"),
            "m.machine:12: a section: got '[memory a b]', expected [memory NAME], a name of one word");
  EXPECT_EQ(with(16, "[memory near]"), "m.machine:16: [memory near]: got it a second time, expected it once");
  EXPECT_EQ(with(13, "per = chip"), "m.machine:13: near.per: got 'chip', expected core or machine");
  EXPECT_EQ(with(13, "ways = 8"), "m.machine:13: near.ways: got an unknown key, expected one of per, bytes, read");
  EXPECT_EQ(with(14, "bytes = 128 KB ; x"),
            "m.machine:14: near.bytes: got '128 KB ; x', expected a number and "
            "KiB|B|MiB|GiB|TiB, then ; and the number's source");
  // What is missing is told at the end, or at the section that lacks it.
  EXPECT_EQ(with(2, ""), "m.machine:19: name: got the end of the file, expected it before the first [memory NAME]");
  EXPECT_EQ(with(3, ""), "m.machine:19: kind: got the end of the file, expected it before the first [memory NAME]");
  EXPECT_EQ(with(4, ""), "m.machine:19: tile_memory: got the end of the file, expected the name of a memory");
  EXPECT_EQ(with(10, ""),
            "m.machine:19: start: got the end of the file, expected a number and us|ns|ms before the "
            "first [memory NAME]");
  EXPECT_EQ(with(13, ""), "m.machine:12: near.per: got no such line in its section, expected core or machine");
  EXPECT_EQ(with(19, ""),
            "m.machine:16: far.read: got no such line in its section, expected a number and "
            "GB/s|MB/s|TB/s");
  EXPECT_EQ(refusal(std::vector<std::string>(kLines.begin(), kLines.begin() + 15)),
            "m.machine:15: [memory NAME]: got 1 of them, expected a near memory and the main one");
  std::vector<std::string> many = kLines;
  for (int i = 0; i < 16; ++i) many.push_back("[memory m" + std::to_string(i) + "]");
  EXPECT_EQ(refusal(many), "m.machine:34: a section: got '[memory m14]', expected at most 16 memories");
}

// Any text is a profile or a CommandError.
TEST(MachineProfile, DamagedFilesAreRefused) {
  const std::string text = text_of(kLines);
  int refused = 0;
  const auto read = [&](const std::string& damaged) {
    try {
      const MachineProfile m = parse_machine_profile(damaged, "m");
      EXPECT_GE(m.levels.size(), 2u);
      EXPECT_GT(m.tile_level().bytes.value, 0);
    } catch (const CommandError&) {
      ++refused;
    }
  };
  for (size_t end = 0; end < text.size(); ++end) read(text.substr(0, end));
  test::Random random(1);
  for (int i = 0; i < 3000; ++i) {
    std::string damaged = text;
    damaged[random.bits() % text.size()] = static_cast<char>(random.bits() % 256);
    read(damaged);
  }
  EXPECT_GT(refused, 1000);
}

TEST(MachineProfile, ReadingBeyondAMemoryIsPricedBetweenItAndTheNext) {
  const MachineProfile m = small_machine();
  const double size = 512 * kKiB;
  EXPECT_EQ(m.seconds_per_byte(1), 1e-12);
  EXPECT_EQ(m.seconds_per_byte(size), 1e-12);
  EXPECT_NEAR(m.seconds_per_byte(2 * size), (1e-12 + 1e-11) / 2, 1e-16);  // half of the way to four times the size
  EXPECT_EQ(m.seconds_per_byte(4 * size), 1e-11);
  EXPECT_EQ(m.seconds_per_byte(1e15), 1e-11);
}

TEST(MachineProfile, FasterCoresLeaveTheMainMemory) {
  const MachineProfile m = small_machine().with_cores(2);
  EXPECT_EQ(m.matrix_f32.value, 2e11);
  EXPECT_EQ(m.matrix_bf16.value, 2e12);
  EXPECT_EQ(m.exponentials.value, 2e10);
  EXPECT_EQ(m.levels[0].read.value, 2e12);
  EXPECT_EQ(m.levels[1].read.value, 1e11);
  EXPECT_EQ(m.start.value, 5e-7);
}

// ---- the tile rule ---------------------------------------------------------------------------------------------------

struct RuleCase {
  TileSize tile;
  double bytes;
};
// At head_dim 128.
const std::vector<RuleCase> kRule = {{{256, 256}, 327680}, {{256, 128}, 196608}, {{128, 128}, 131072},
                                     {{128, 64}, 81920},   {{64, 64}, 57344},    {{64, 32}, 36864}};

void expect_tile(const TileChoice& choice, const TileSize& tile, bool fits, const std::string& what) {
  EXPECT_EQ(choice.tile.block_q, tile.block_q) << what;
  EXPECT_EQ(choice.tile.block_kv, tile.block_kv) << what;
  EXPECT_EQ(choice.fits, fits) << what;
}

TEST(TileRule, TakesTheLargestTileThatFits) {
  for (const double heads : {1.0, 8.0}) {
    for (size_t i = 0; i < kRule.size(); ++i) {
      const auto& [tile, bytes] = kRule[i];
      EXPECT_EQ(tile_bytes(tile, 128), bytes);
      const TileSize next = i + 1 < kRule.size() ? kRule[i + 1].tile : TileSize{32, 32};
      const auto choose = [&](double sram) { return choose_tile(128, sram * heads, static_cast<int64_t>(heads)); };
      expect_tile(choose(bytes), tile, true, std::to_string(bytes));
      expect_tile(choose(bytes - 1), next, true, std::to_string(bytes) + " - 1");
      EXPECT_EQ(choose(bytes).budget, bytes);
    }
  }
  expect_tile(choose_tile(128, 26624, 1), {32, 32}, true, "the smallest");
  expect_tile(choose_tile(128, 26623, 1), {32, 32}, false, "less than the smallest");
}

// Where articles state less for their own formula.
TEST(TileRule, WithKeysAndValuesInTurn) {
  EXPECT_EQ(tile_bytes_in_turn({128, 128}, 128), 96 * kKiB);
  EXPECT_EQ(tile_bytes_in_turn({64, 64}, 256), 72 * kKiB);
}

// ---- memory ----------------------------------------------------------------------------------------------------------

AttentionProblem problem_of(int64_t heads, int64_t kv_heads, int64_t length) {
  AttentionProblem p;
  p.num_heads = heads, p.num_kv_heads = kv_heads, p.query_len = p.kv_len = length;
  p.head_dim = p.value_head_dim = 128;
  p.query_dtype = p.kv_dtype = DType::bf16;
  return p;
}

TEST(AttentionMemory, OfScores) {
  for (const auto& [length, gib] :
       {std::pair(4096, 1), std::pair(8192, 4), std::pair(16384, 16), std::pair(65536, 256)}) {
    const AttentionProblem p = problem_of(32, 32, length);
    EXPECT_EQ(score_bytes(p), gib * kGiB) << length;
    // q, k, v and out of 32 heads; training: their gradients too, and three matrices of scores.
    const double tensors = 4.0 * 32 * 128 * 2 * length, statistics = 32.0 * 4 * length;
    EXPECT_EQ(standard_memory_bytes(p, false), tensors + gib * kGiB) << length;
    EXPECT_EQ(standard_memory_bytes(p, true), 2 * tensors + 3 * gib * kGiB) << length;
    EXPECT_EQ(flash_memory_bytes(p, false), tensors + statistics) << length;
    EXPECT_EQ(flash_memory_bytes(p, true), 2 * tensors + 2 * statistics) << length;
  }
}

TEST(AttentionMemory, EndsAtTheLastLengthThatFits) {
  const AttentionProblem p = problem_of(8, 2, 1);
  // 5120 bytes of q, k, v and out for each token, and 32 of statistics; or 16 for each pair.
  EXPECT_EQ(longest_that_fits(p, kGiB, flash_memory_bytes, false), static_cast<int64_t>(kGiB) / 5152);
  const int64_t longest = longest_that_fits(p, kGiB, standard_memory_bytes, false);
  EXPECT_EQ(longest, static_cast<int64_t>((std::sqrt(5120.0 * 5120 + 4 * 16 * kGiB) - 5120) / 32));
  for (const bool train : {false, true}) {
    for (double (*bytes)(const AttentionProblem&, bool) : {flash_memory_bytes, standard_memory_bytes}) {
      for (const double capacity : {0.0, 100.0, 1e6, 1e9, 1e15}) {
        const int64_t length = longest_that_fits(p, capacity, bytes, train);
        EXPECT_LE(bytes(problem_of(8, 2, length), train), capacity);
        EXPECT_GT(bytes(problem_of(8, 2, length + 1), train), capacity);
      }
    }
  }
}

// ---- traffic and times -----------------------------------------------------------------------------------------------

// 8 query heads share 2 heads of 1024 keys: q and out 2 MiB each, keys and values 1 MiB together, of which no core's near
// memory holds a head. One head's tile may have all 128 KiB: 128 x 128.
TEST(AttentionOutlook, OfAnAcceleratorByHand) {
  const AttentionProblem p = problem_of(8, 2, 1024);
  const MachineProfile m = small_machine();
  const AttentionOutlook look = attention_outlook(p, 0x1p20, m, {.sram_heads = 1});
  expect_tile(look.by_rule, {128, 128}, true, "one head");
  EXPECT_EQ(look.tile.block_q, 128);
  EXPECT_EQ(look.tile_reason, "the tile rule");
  EXPECT_EQ(look.flops, 2.0 * (128 + 128) * 8 * 0x1p20);
  // 8 blocks of rows in each of 4 heads pass the same keys; scores of f32 and weights of bf16 are written and read.
  const double keys = 8 * 4 * kMiB, scores = 8 * 12 * kMiB;
  EXPECT_EQ(look.flash.bytes, (std::vector<double>{4 * kMiB + keys + scores, 4 * kMiB + keys}));
  EXPECT_DOUBLE_EQ(look.flash.matrix_seconds, look.flops / 1e12);
  EXPECT_DOUBLE_EQ(look.flash.vector_seconds, 8 * 0x1p20 / 1e10);
  EXPECT_DOUBLE_EQ(look.flash.level_seconds[1], 36 * kMiB / 1e11);
  EXPECT_EQ(look.flash.bound, "matrix");
  EXPECT_DOUBLE_EQ(look.flash.seconds, look.flash.matrix_seconds + 1e-6);
  // Scores and weights of a head, 2 MiB each, are written and read in the far memory.
  EXPECT_EQ(look.standard.bytes, (std::vector<double>{69 * kMiB, 69 * kMiB}));
  EXPECT_DOUBLE_EQ(look.standard.seconds,
                   look.standard.matrix_seconds + look.standard.vector_seconds + look.standard.level_seconds[1] + 3e-6);
  // All heads at a time: no tile fits in 16 KiB.
  expect_tile(attention_outlook(p, 0x1p20, m, {}).by_rule, {32, 32}, false, "all heads");
}

TEST(AttentionOutlook, HalfTheScoresAreHalfTheWork) {
  const AttentionProblem p = problem_of(8, 8, 1024);
  const AttentionOutlook full = attention_outlook(p, 0x1p20, small_machine(), {.sram_heads = 1}),
                         half = attention_outlook(p, 0x1p19, small_machine(), {.sram_heads = 1});
  EXPECT_DOUBLE_EQ(half.flash.matrix_seconds, full.flash.matrix_seconds / 2);
  EXPECT_DOUBLE_EQ(half.flash.vector_seconds, full.flash.vector_seconds / 2);
  EXPECT_EQ(half.flash.bytes[1] - 4 * kMiB, (full.flash.bytes[1] - 4 * kMiB) / 2);
  EXPECT_EQ(half.standard.bytes, full.standard.bytes);  // it holds the whole matrix
  EXPECT_EQ(half.flash.longest, full.flash.longest);
}

TEST(AttentionOutlook, SizesAreRoundedUpToTheMatrixUnit) {
  AttentionProblem p = problem_of(1, 1, 1024);
  p.query_len = 1;
  const AttentionOutlook look = attention_outlook(p, 1024, small_machine(), {.sram_heads = 1});
  EXPECT_DOUBLE_EQ(look.flash.matrix_seconds, 16 * look.flops / 1e12);
}

TEST(AttentionOutlook, TrainingTakesFiveMoreProductsThanTwo) {
  const AttentionProblem p = problem_of(8, 8, 1024);
  const AttentionOutlook one = attention_outlook(p, 0x1p20, small_machine(), {.sram_heads = 1}),
                         both = attention_outlook(p, 0x1p20, small_machine(), {.train = true, .sram_heads = 1});
  EXPECT_DOUBLE_EQ(both.flash.matrix_seconds, 3.5 * one.flash.matrix_seconds);
  EXPECT_DOUBLE_EQ(both.standard.matrix_seconds, 3 * one.standard.matrix_seconds);
  EXPECT_LT(both.flash.longest, one.flash.longest);
}

}  // namespace
}  // namespace opst::tools

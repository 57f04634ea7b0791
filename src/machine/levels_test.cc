#include "machine/levels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

namespace opst {
namespace {

std::vector<Isa> all_levels() {
  std::vector<Isa> levels;
  for (int i = 0; i < kNumIsaLevels; ++i) levels.push_back(static_cast<Isa>(i));
  return levels;
}

TEST(Levels, AreATreeWithGenericAsItsRoot) {
  for (const Isa isa : all_levels()) {
    EXPECT_TRUE(includes(isa, isa)) << to_string(isa);
    EXPECT_TRUE(includes(isa, Isa::generic)) << to_string(isa);
    if (isa == Isa::generic) continue;
    EXPECT_NE(base_of(isa), isa);
    EXPECT_TRUE(includes(isa, base_of(isa)));
    EXPECT_FALSE(includes(base_of(isa), isa));
  }
  EXPECT_TRUE(includes(Isa::avx512_bf16, Isa::avx2));
  EXPECT_FALSE(includes(Isa::avx512, Isa::avx512_vnni));
}

TEST(Levels, CommonLevelIsTheHighestThatBothInclude) {
  for (const Isa a : all_levels()) {
    for (const Isa b : all_levels()) {
      const Isa common = common_level(a, b);
      EXPECT_EQ(common, common_level(b, a));
      for (const Isa level : all_levels()) {
        EXPECT_EQ(includes(a, level) && includes(b, level), includes(common, level))
            << to_string(a) << " " << to_string(b) << " " << to_string(level);
      }
    }
  }
}

TEST(Levels, TheTableOfTheHighestIncludedLevelIsTaken) {
  const int tables[] = {3, 2, 1};
  const TableAtLevel<int> float_levels[] = {
      {Isa::avx512, &tables[0]}, {Isa::avx2, &tables[1]}, {Isa::generic, &tables[2]}};
  EXPECT_EQ(table_for(Isa::generic, float_levels), 1);
  EXPECT_EQ(table_for(Isa::avx2, float_levels), 2);
  EXPECT_EQ(table_for(Isa::avx512, float_levels), 3);
  EXPECT_EQ(table_for(Isa::avx512_bf16, float_levels), 3);
  // Siblings: what one family has at a level is nothing to the other.
  const TableAtLevel<int> byte_levels[] = {
      {Isa::avx512_vnni, &tables[0]}, {Isa::avx512, &tables[1]}, {Isa::generic, &tables[2]}};
  EXPECT_EQ(table_for(Isa::avx512_bf16, byte_levels), 3);
  EXPECT_EQ(table_for(Isa::avx2, byte_levels), 1);
  const TableAtLevel<int> pair_levels[] = {
      {Isa::avx512_bf16, &tables[0]}, {Isa::avx512, &tables[1]}, {Isa::generic, &tables[2]}};
  EXPECT_EQ(table_for(Isa::avx512_vnni, pair_levels), 2);
  const TableAtLevel<int> only_generic[] = {{Isa::generic, &tables[2]}};
  EXPECT_EQ(table_for(Isa::avx512_bf16, only_generic), 1);
}

// What the build compiles is what the code selects from. The build's lists come as "generic,avx2,avx512".
void expect_same(std::vector<std::string> levels, const std::string& built) {
  std::vector<std::string> names;
  std::istringstream list(built);
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  std::sort(names.begin(), names.end());
  // No level before one that includes it, else its table would never be taken.
  for (size_t i = 0; i < levels.size(); ++i) {
    for (size_t j = i + 1; j < levels.size(); ++j) {
      EXPECT_FALSE(includes(parse_isa(levels[j]).value(), parse_isa(levels[i]).value()))
          << levels[i] << " " << levels[j];
    }
  }
  std::sort(levels.begin(), levels.end());
  EXPECT_EQ(levels, names);
}

TEST(Levels, FamiliesAreTheBuilds) {
#define OPST_NAME(level, ...) to_string(Isa::level),
  expect_same({OPST_FLOAT_LEVELS(OPST_NAME, )}, OPST_BUILT_FLOAT_LEVELS);
  expect_same({OPST_BF16_LEVELS(OPST_NAME, )}, OPST_BUILT_BF16_LEVELS);
  expect_same({OPST_INT8_LEVELS(OPST_NAME, )}, OPST_BUILT_INT8_LEVELS);
  expect_same({OPST_ALL_LEVELS(OPST_NAME, )}, OPST_BUILT_ALL_LEVELS);
#undef OPST_NAME
}

}  // namespace
}  // namespace opst

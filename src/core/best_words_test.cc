// keep_largest and sort_by_high_halves against the standard library's stable sort, over words that are spread out, that
// lie close together, or whose high halves are few.
#include "core/best_words.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace opst {
namespace {

// Distinct words whose low halves descend, as of keys in ascending order.
std::vector<uint64_t> words_of(const std::vector<uint32_t>& high) {
  std::vector<uint64_t> words;
  for (size_t i = 0; i < high.size(); ++i) {
    words.push_back(uint64_t{high[i]} << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(i)));
  }
  return words;
}

std::vector<std::vector<uint64_t>> lists(int64_t count) {
  std::mt19937 random(static_cast<uint32_t>(count));
  const auto n = static_cast<size_t>(count);
  std::vector<std::vector<uint32_t>> highs(8, std::vector<uint32_t>(n));
  for (size_t i = 0; i < n; ++i) {
    const auto x = static_cast<uint32_t>(random());
    highs[0][i] = x;
    highs[1][i] = 7;                                                    // ties everywhere
    highs[2][i] = x % 3;                                                // many
    highs[3][i] = static_cast<uint32_t>(i);                             // ascending,
    highs[4][i] = 0xffffffffu - highs[3][i];                            // descending
    highs[5][i] = i == 0 ? 0xffffffffu : static_cast<uint32_t>(i % 5);  // one far from the others
    highs[6][i] = uint32_t{1} << (x % 32);                              // denser and denser
    highs[7][i] = 0xbf800000u + (x & 0xffff);                           // scores of one power of two
  }
  std::vector<std::vector<uint64_t>> all;
  for (const auto& high : highs) all.push_back(words_of(high));
  return all;
}

TEST(BestWords, AreThoseOfAStableSort) {
  for (const int64_t count : {1, 2, 3, 63, 64, 65, 127, 128, 129, 130, 1000, 4097, 20000}) {
    for (const std::vector<uint64_t>& words : lists(count)) {
      std::vector<uint64_t> sorted = words;
      std::stable_sort(sorted.begin(), sorted.end(), [](uint64_t a, uint64_t b) { return a >> 32 > b >> 32; });
      for (const int64_t most : std::set<int64_t>{1, (count + 1) / 2, std::max<int64_t>(1, count - 1), count}) {
        const uint64_t last = sorted[static_cast<size_t>(most - 1)];
        ASSERT_EQ(nth_largest(words.data(), count, most), last) << count << " words, " << most;
        std::vector<uint64_t> kept = words, in_order, scratch(words.size());
        ASSERT_EQ(keep_largest(kept.data(), count, most), last);
        kept.resize(static_cast<size_t>(most));
        std::copy_if(words.begin(), words.end(), std::back_inserter(in_order), [&](uint64_t w) { return w >= last; });
        ASSERT_EQ(kept, in_order) << "not in the order in which they stood";
        sort_by_high_halves(kept.data(), most, scratch.data());
        ASSERT_EQ(kept, std::vector<uint64_t>(sorted.begin(), sorted.begin() + most)) << count << " words, " << most;
      }
    }
  }
}

// The order of equal high halves is that in which they stood, whatever the low halves.
TEST(BestWords, SortIsStable) {
  for (const int64_t count : {50, 64, 900}) {
    std::vector<uint64_t> words(static_cast<size_t>(count)), scratch(words);
    for (size_t i = 0; i < words.size(); ++i) words[i] = uint64_t{i % 7} << 45 | (i * 2654435761u & 0xffffffffu);
    std::vector<uint64_t> sorted = words;
    std::stable_sort(sorted.begin(), sorted.end(), [](uint64_t a, uint64_t b) { return a >> 32 > b >> 32; });
    sort_by_high_halves(words.data(), count, scratch.data());
    EXPECT_EQ(words, sorted);
  }
}

TEST(BestWords, EqualWordsHaveARankToo) {
  const std::vector<uint64_t> words(5000, 42);
  EXPECT_EQ(nth_largest(words.data(), 5000, 1), 42u);
  EXPECT_EQ(nth_largest(words.data(), 5000, 5000), 42u);
}

}  // namespace
}  // namespace opst

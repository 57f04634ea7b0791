// The largest of many distinct 64-bit words, and their order: by histograms of digits, not by comparisons, whose
// outcomes no processor foresees (4096 words, the best 2048: std::nth_element mispredicts about every fourth of its
// comparisons).
//
//   const uint64_t last = keep_largest(words, 4096, 2048);      words[0 .. 2048), in the order in which they stood
//   sort_by_high_halves(words, 2048, scratch);                  descending; equal high halves stay in their order
//
// A caller with scores and indices of its candidates makes words of them whose high half orders as the scores do and
// whose low half is the flipped index: no two words are equal, and of equal scores the smaller index is the larger word.
// Candidates that stand in ascending order of their indices need no more than the high halves to be in order.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <utility>

namespace opst {

// The `rank`-th largest of words[0 .. count), 1 <= rank <= count. Each pass over the words counts those of each of 1024
// equal pieces of the range in which the word is known to be, and goes on with its piece: at most seven passes, two
// where words are spread out.
inline uint64_t nth_largest(const uint64_t* words, int64_t count, int64_t rank) {
  constexpr int kBits = 10, kBins = 1 << kBits, kFew = 128;
  const auto [least, most] = std::minmax_element(words, words + count);
  uint64_t low = *least, width = *most - *least;  // the word is one of low ... low + width
  for (int64_t inside = count; inside > kFew;) {
    const int shift = std::max(0, static_cast<int>(std::bit_width(width)) - kBits);
    std::array<uint32_t, kBins + 1> counts = {};  // the last one: of words outside
    const uint64_t outside = (width >> shift) + 1;
    for (int64_t i = 0; i < count; ++i) ++counts[std::min((words[i] - low) >> shift, outside)];
    uint64_t bin = outside - 1;
    for (; rank > counts[bin]; --bin) rank -= counts[bin];
    inside = counts[bin];
    low += bin << shift;
    width = std::min(width - (bin << shift), (uint64_t{1} << shift) - 1);
    if (width == 0) return low;
  }
  std::array<uint64_t, kFew> few;
  int64_t n = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (words[i] - low <= width) few[static_cast<size_t>(n++)] = words[i];
  }
  const auto nth = few.begin() + (rank - 1);
  std::nth_element(few.begin(), nth, few.begin() + n, std::greater<>());
  return *nth;
}

// Moves the `most` largest to the front, in the order in which they stood; returns the smallest of them. 0 < most <= count.
inline uint64_t keep_largest(uint64_t* words, int64_t count, int64_t most) {
  const uint64_t last = nth_largest(words, count, most);
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {  // without branches, which nothing would predict
    const uint64_t word = words[i];
    words[kept] = word;
    kept += word >= last ? 1 : 0;
  }
  return last;
}

// Descending by high halves, stable. `scratch` has room for `count` words.
inline void sort_by_high_halves(uint64_t* words, int64_t count, uint64_t* scratch) {
  constexpr int kBits = 8, kDigits = 4, kBins = 1 << kBits;
  const auto before = [](uint64_t a, uint64_t b) { return a >> 32 > b >> 32; };
  if (count < kBins / 4) {  // by insertion: less work than counters
    for (int64_t i = 1; i < count; ++i) {
      const uint64_t word = words[i];
      int64_t at = i;
      for (; at > 0 && before(word, words[at - 1]); --at) words[at] = words[at - 1];
      words[at] = word;
    }
    return;
  }
  std::array<std::array<int64_t, kBins>, kDigits> counts = {};
  const auto digit = [](uint64_t word, int d) { return static_cast<size_t>(~word >> (32 + d * kBits)) % kBins; };
  for (int64_t i = 0; i < count; ++i) {
    for (int d = 0; d < kDigits; ++d) ++counts[static_cast<size_t>(d)][digit(words[i], d)];
  }
  uint64_t *from = words, *to = scratch;
  for (int d = 0; d < kDigits; ++d) {
    auto& places = counts[static_cast<size_t>(d)];
    if (places[digit(from[0], d)] == count) continue;  // all alike
    int64_t place = 0;
    for (int64_t& n : places) place += std::exchange(n, place);
    for (int64_t i = 0; i < count; ++i) to[places[digit(from[i], d)]++] = from[i];
    std::swap(from, to);
  }
  if (from != words) std::copy_n(from, count, words);
}

}  // namespace opst

// What is done with the candidates of a query (indexer_kernels.h) outside of the kernels: the best are kept, joined,
// and put in order, by digits of their words (core/best_words.h). Candidates stand in ascending order of their keys.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "attention/indexer_kernels.h"
#include "core/best_words.h"

namespace opst::attention {

// What a candidate's word says.
inline int64_t key_of(uint64_t word) { return static_cast<int64_t>(~static_cast<uint32_t>(word)); }
inline float score_of(uint64_t word) {
  const auto high = static_cast<uint32_t>(word >> 32);
  if (high == 0) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>((high & 0x80000000u) != 0 ? high ^ 0x80000000u : ~high);
}

inline Candidates no_candidates(uint64_t* words) { return {words, 0, std::numeric_limits<float>::quiet_NaN()}; }

// Keeps the best `most`. What is behind the last of them need not be a candidate any more.
inline void keep_best(Candidates& c, int64_t most) {
  if (c.count <= most) return;
  c.threshold = score_of(keep_largest(c.words, c.count, most));
  c.count = most;
}

// Adds the candidates of the next part of the keys; `into` has room for `room` > most words, or for those of all parts.
inline void join(Candidates& into, const Candidates& from, int64_t most, int64_t room) {
  for (int64_t i = 0; i < from.count; ++i) {
    if (into.count == room) keep_best(into, most);
    if (score_of(from.words[i]) < into.threshold) continue;  // behind what is kept; an equal one may have a smaller key
    into.words[into.count++] = from.words[i];
  }
}

// The best `most`, in their order; `scratch` has room for as many.
inline void sort_best(Candidates& c, int64_t most, uint64_t* scratch) {
  keep_best(c, most);
  sort_by_high_halves(c.words, c.count, scratch);
}

}  // namespace opst::attention

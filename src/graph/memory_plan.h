// Where the intermediates of a graph lie in one workspace: those that live at the same time do not overlap, the others
// share memory. A pure function of sizes and lifetimes.
#pragma once

#include <cstdint>
#include <vector>

namespace opst::graph {

// Needed from node `first` to node `last`, both included. 0 <= bytes, 0 <= first <= last.
struct Lifetime {
  int64_t bytes = 0;
  int first = 0;
  int last = 0;
};

struct MemoryPlan {
  std::vector<int64_t> offsets;  // of each lifetime, multiples of kAlignment; -1: of none
  int64_t bytes = 0;             // of the workspace
  int64_t sum_bytes = 0;         // if nothing were shared
  int64_t peak_live_bytes = 0;   // most bytes alive at one node: no plan can take less
};

inline constexpr int64_t kAlignment = 64;  // a cache line, the widest vector

// Places the largest first, each into the smallest gap that the lifetimes crossing its own leave. Sizes are rounded up
// to kAlignment. For any numbers: sums stop at kMaxBytes (where `bytes` is kMaxBytes the offsets mean nothing, and no
// memory has so many); a lifetime of negative bytes, or that ends before it begins or begins before node 0, is none: it
// has no place and counts nowhere.
MemoryPlan plan_memory(const std::vector<Lifetime>& lifetimes);

}  // namespace opst::graph

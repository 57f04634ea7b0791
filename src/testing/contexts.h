// Every kind of context that an operator must work in.
//
//   for (const TestContext& t : contexts()) { SCOPED_TRACE(t.name); ... op(t.context, ...); }
#pragma once

#include <string>
#include <vector>

#include "opst/context.h"

namespace opst::test {

struct TestContext {
  std::string name;         // "avx512, 3 threads, tiny caches"
  mutable Context context;  // operators take theirs by reference
};

// The levels that this processor has, from generic up. OPST_ISA caps them.
std::vector<Isa> levels();

// Caches so small that every loop over tiles runs more than once on small inputs.
CacheSizes tiny_caches();

// levels() x {1, 2, 3, 5} threads x {real, tiny} caches, and at avx512_bf16 both ways to form bf16 products. Under a
// sanitizer each level has one thread and one of {2, 3, 5}, and one of the two kinds of caches, drawn from the seed.
// Made once; they live until the process ends.
const std::vector<TestContext>& contexts();

// One per level (and bf16 product), with the given number of threads and real caches.
const std::vector<TestContext>& contexts_with_threads(int num_threads);

// The one of this machine's level, with one thread.
inline Context& one_context() { return contexts_with_threads(1).back().context; }

}  // namespace opst::test

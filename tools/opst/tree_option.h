// --tree of `opst bench|check|plan attention`: queries that are draft tokens of a tree.
#pragma once

#include <memory>
#include <vector>

#include "opst/attention.h"

namespace opst::tools {

inline constexpr const char* kTreeHelp =
    "The queries, up to 64, are draft tokens of a random tree: each sees the keys before them and its own ancestors";

// Words [batch, query_len] of random trees for a problem, which has a tree mask then. A CommandError where the queries are
// more than 64, or than the keys.
std::shared_ptr<const std::vector<int64_t>> make_tree(AttentionProblem& problem);

// Pairs that trees, causal mask and windows show, of one head, summed over the sequences.
double visible_pairs_of_tree(const std::vector<int64_t>& words, const AttentionProblem& problem);

}  // namespace opst::tools

// --sparse of `opst bench|check|plan attention`: a block mask by a pattern, and its picture.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "opst/block_patterns.h"

namespace opst::tools {

inline constexpr const char* kSparseHelp =
    "A block mask, KEY=NUMBER,...: block, block_q, block_kv (64), window, global, stride, dilation, random (blocks), "
    "density (of random blocks, 0 to 1), documents (their length), heads (masks of their own), seed";

// The mask of `text` for a problem, whose lengths, causal mask and alignment the pattern takes over; block_mask of the
// problem becomes what a plan needs. A CommandError where the text is wrong.
std::shared_ptr<const BlockMaskBuffer> make_sparse(const std::string& text, AttentionProblem& problem);

// Pairs of a query and a key that mask, causal mask and windows show, of one head; the mean over the mask's heads.
double visible_pairs(const BlockMask& mask, const AttentionProblem& problem);

inline constexpr const char* kSparseIndicesHelp =
    "COUNT or COUNT,BLOCK: each query sees so many random blocks of BLOCK keys (1, or a power of two) by a list of its "
    "own";

// Lists [batch, query_len, num_kv_heads, count] by `text` for a problem, whose sparse_indices become what a plan needs.
// A CommandError where the text is wrong, or asks for more blocks than the keys have.
std::vector<int32_t> make_sparse_indices(const std::string& text, AttentionProblem& problem);
// Pairs that lists, causal mask and windows show, of one head; the mean over the KV heads.
double visible_pairs(const std::vector<int32_t>& lists, const AttentionProblem& problem);

// The first head's blocks, a character each: # visible, . not; of more than 96 in a row or column several share one,
// + where only some of them are visible.
std::string draw_mask(const BlockMask& mask, const AttentionProblem& problem);

}  // namespace opst::tools

// The contract of a call's trees of draft tokens: shape, and every word, before anything is written. O(words).
#include <algorithm>
#include <bit>

#include "attention/check.h"
#include "attention/mask_walk.h"
#include "attention/sequences.h"

namespace opst::attention {

void bind_tree_mask(ShapeCheck& check, const AttentionInputs& in) {
  if (!in.tree_mask) return;
  ShapeCheck::TensorCheck words = check.tensor("tree_mask", in.tree_mask).dtype({DType::i64});
  in.cu_seqlens_q ? words.dims({"total_q"}) : words.dims({"batch", "query_len"});
}

void check_tree_mask(ShapeCheck& check, const AttentionInputs& in, const AttentionProblem& p,
                     const Sequences& sequences) {
  if (!p.has_tree_mask) return;
  check.require(!in.block_mask, "tree_mask and block_mask are given, but only one may be");
  check.require(!in.sparse_indices, "tree_mask and sparse_indices are given, but only one may be");
  check.require(p.options.path != AttentionPath::standard, "path = standard does not take a tree_mask");
  const ConstTensor& t = in.tree_mask;
  // Words that repeat in memory are looked at once.
  const bool repeats = p.varlen_q || distinct(t, 0) <= 1;
  const int64_t batch = repeats ? sequences.num_different() : p.batch;
  for (int64_t b = 0; b < batch && check.ok(); ++b) {
    const int64_t queries = sequences.query_len(b), words = std::min(queries, distinct(t, t.rank - 1));
    for (int64_t i = 0; i < words && check.ok(); ++i) {
      const int64_t word = sequences.tree_word(b, i);
      if (word == -1) continue;
      const auto name = [&] {
        return p.varlen_q ? text("tree_mask[", sequences.query_start(b) + i, "]") : text("tree_mask[", b, "][", i, "]");
      };
      check.require(queries <= TreeRows::kMostQueries, name, " is ", word, ", but sequence ", b,
                    " has query_len = ", queries, ": of more than 64 queries all words must be -1");
      const auto bits = static_cast<int64_t>(std::bit_width(static_cast<uint64_t>(word)));
      check.require(bits <= queries, name, " is ", word, ", but sequence ", b, " has query_len = ", queries,
                    " draft tokens: bits from ", queries, " on must be 0, or the word -1");
      check.require(sequences.kv_len(b) >= queries, name, " is ", word, ", but sequence ", b,
                    " has kv_len = ", sequences.kv_len(b), ", fewer keys than its query_len = ", queries,
                    " draft tokens");
    }
  }
}

}  // namespace opst::attention

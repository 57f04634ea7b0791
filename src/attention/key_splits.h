// Where blocks of query rows are too few to share out, the keys that a block may see are split: parts of whole tiles,
// attended apart, then joined in key order.
//
// Each sequence has parts of its own number and size, which follow from its lengths and from nothing else: the same bits
// whatever other sequences a call has, as one of many or alone. (A block mask is the call's: there it also is the rows
// of other sequences that count.)
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/layout.h"
#include "attention/mask_plan.h"
#include "attention/selected_keys.h"
#include "attention/visibility.h"

namespace opst::attention {

// Keys below which a part is not worth its join: in place, a part reads at least as much as its state is large.
inline constexpr int64_t kMinSplitKeysInPlace = 512;
inline constexpr int64_t kMinSplitKeysPacked = 1024;

struct KeySplits {
  int64_t count = 1;
  int64_t keys = 0;  // of a part, a multiple of block_kv
};

class SplitKeys {
 public:
  // The plan's block_q, block_kv, kv_access, path and tile_rows have been chosen.
  SplitKeys(const AttentionProblem& problem, const AttentionPlan& plan) : p_(problem), plan_(plan) {
    const int64_t group = p_.num_heads / p_.num_kv_heads;
    const int64_t rows = p_.sparse_indices ? group : std::min(rows_of(p_), plan.block_q);
    // What bounds the time is reading keys and values.
    const bool few_rows = plan.kv_access == KvAccess::panel_pages && rows <= plan.tile_rows;
    const bool by_memory = plan.kv_access == KvAccess::in_place || few_rows;
    min_keys_ = by_memory ? kMinSplitKeysInPlace : kMinSplitKeysPacked;
  }

  // Of a sequence whose rows are so many blocks for each KV head.
  KeySplits of(int64_t query_len, int64_t kv_len, int64_t blocks, int64_t block_rows) const {
    const int64_t keys = keys_of_block(query_len, kv_len, block_rows), most = most_parts(blocks, keys);
    KeySplits splits = {1, round_up(ceil_div(std::max<int64_t>(keys, 1), most), plan_.block_kv)};
    splits.count = std::max<int64_t>(1, ceil_div(keys, splits.keys));
    return splits;
  }
  // The most parts that the blocks of a sequence have for one KV head, of up to so many blocks; 0: none is split.
  int64_t most_of_head(int64_t blocks) const {
    const int64_t keys = keys_of_block(p_.query_len, p_.kv_len, std::min(plan_.block_q, rows_of(p_)));
    int64_t most = 0;
    for (int64_t b = p_.varlen_q ? 1 : blocks; b <= blocks && b < kWantedTasks; ++b) {
      if (const int64_t parts = most_parts(b, keys); parts > 1) most = std::max(most, b * parts);
    }
    return most;
  }

 private:
  // From the first to the last key that rows of a block may see.
  int64_t keys_of_block(int64_t query_len, int64_t kv_len, int64_t block_rows) const {
    if (p_.sparse_indices) return listed_keys(p_.sparse_indices, kv_len).value();
    int64_t keys = kv_len;
    if (!p_.has_prefix) {
      const int64_t queries = ceil_div(block_rows - 1, p_.num_heads / p_.num_kv_heads) + 1;
      keys = Visibility::most_keys(p_.options, query_len, kv_len, queries);
      keys = std::min(kv_len, keys + plan_.block_kv - 1);
    }
    if (!p_.block_mask) return keys;
    return std::min(keys, (tiles_seen(p_, plan_.block_q, plan_.block_kv) * plan_.block_kv).value());
  }
  int64_t most_parts(int64_t blocks, int64_t keys) const {
    const int64_t in_turn = may_take_turns(p_, plan_) ? std::max<int64_t>(most_in_turn(p_), 1) : 1;
    const int64_t tasks = (Size(ceil_div(p_.num_kv_heads, in_turn)) * blocks).value();
    if (plan_.path != AttentionPath::flash || tasks >= kWantedTasks || keys < 2 * min_keys_) return 1;
    return std::min(ceil_div(kWantedTasks, tasks), keys / min_keys_);
  }

  const AttentionProblem& p_;
  const AttentionPlan& plan_;
  int64_t min_keys_;
};

}  // namespace opst::attention

// Cascades: neighbouring sequences of a call whose block tables begin with the same blocks read these keys once.
//
//   block_table   7 3 9 1        sequences 0 to 2 are a group, which shares the keys of blocks 7 3 9
//                 7 3 9 4 5
//                 7 3 9 2
//                 6 8
//
// Two loops over tasks. First the query rows of a group's sequences, one below the other, are the rows of one head
// against the keys that they share (PrefixCall); their sums stay in PrefixSums. Then each sequence is attended as ever,
// from the first key on that it does not share, and its rows' sums are the first parts that finish_rows joins.
//
// There is one level of groups. A group is as long as one more sequence saves reading: with each sequence that joins,
// the keys may become fewer.
// Source: Juravsky et al., "Hydragen" (2024); Ye et al., "Cascade Inference" (FlashInfer, 2024).
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/call_heads.h"
#include "attention/layout.h"
#include "core/int_math.h"
#include "opst/attention.h"

namespace opst::attention {

// Found: fewer keys are not worth a loop of their own (as kMinSplitKeysInPlace).
inline constexpr int64_t kLeastSharedKeys = 512;
// The most stacked rows of a sequence that shares. Reading (or packing) a key costs about what multiplying it with a
// dozen rows costs, so that of n sequences of r rows a call becomes (12 + r) / (12 / n + r) times as fast: at most 4 of 4
// rows, 1.25 of 48 (estimated).
inline constexpr int64_t kMostSharingRows = 48;

class SharedPrefixes {
 public:
  SharedPrefixes(const AttentionInputs& in, const AttentionProblem& p, const SequenceGroup& chosen)
      : in_(in), p_(p), chosen_(chosen) {}

  // visit(SharedGroup), ascending.
  template <class Visit>
  void for_groups(const Visit& visit) const {
    if (!p_.paged || p_.options.shared_prefix == 0 || p_.batch < 2 || p_.block_size < 1) return;
    const bool told = p_.options.shared_prefix > 0;
    const int64_t least = told ? 1 : ceil_div(kLeastSharedKeys, p_.block_size);
    const bool all_alike = same_row_ && sequences_.num_different() == 1;
    int64_t first_query = 0;
    for (int64_t b = 0; b < p_.batch;) {
      int64_t count = 1, blocks = most_blocks(b);
      if (all_alike && blocks >= least) count = p_.batch;
      for (; blocks >= least && b + count < p_.batch; ++count) {
        const int64_t next = common(b + count - 1, std::min(blocks, most_blocks(b + count)));
        if (next < least || (Size(next) * count).value() < (Size(blocks) * (count - 1)).value()) break;
        blocks = next;
      }
      if (all_alike && blocks < least) return;
      if (count > 1) {
        const SharedGroup group = {b, count, blocks * p_.block_size, first_query, queries(b, count, all_alike)};
        visit(group);
        first_query = (Size(first_query) + group.queries).value();
      }
      b += count;
    }
  }
  SharedPrefixSizes sizes() const {
    SharedPrefixSizes sizes;
    for_groups([&](const SharedGroup& group) {
      ++sizes.groups;
      sizes.queries = std::max(sizes.queries, group.queries);
      sizes.all_queries = (Size(sizes.all_queries) + group.queries).value();
      sizes.keys = std::max(sizes.keys, group.keys);
    });
    return sizes;
  }

 private:
  // The most leading blocks that a sequence may share. The keys of its own queries are none of them: so a tree of these
  // is not either.
  int64_t most_blocks(int64_t b) const {
    const int64_t queries = sequences_.query_len(b), kv_len = sequences_.kv_len(b);
    const int64_t rows = (Size(queries) * (p_.num_heads / std::max<int64_t>(p_.num_kv_heads, 1))).value();
    if (rows == 0 || rows > kMostSharingRows || chosen_.kinds.of(rows, kv_len) != chosen_.kind) return 0;
    const int64_t keys = std::max<int64_t>(kv_len - queries, 0), told = p_.options.shared_prefix;
    return (told > 0 ? std::min(keys, told) : keys) / p_.block_size;
  }
  // How many of the first `most` blocks sequences b and b + 1 have in common.
  int64_t common(int64_t b, int64_t most) const {
    int64_t i = same_row_ ? most : 0;
    while (i < most && index_at(in_.block_table, b, i) == index_at(in_.block_table, b + 1, i)) ++i;
    return i;
  }
  int64_t queries(int64_t first, int64_t count, bool alike) const {
    if (alike) return (Size(sequences_.query_len(first)) * count).value();
    Size sum = 0;
    for (int64_t b = first; b < first + count; ++b) sum += sequences_.query_len(b);
    return sum.value();
  }

  const AttentionInputs& in_;
  const AttentionProblem& p_;
  const SequenceGroup& chosen_;
  const Sequences sequences_{in_, p_};
  const bool same_row_ = in_.block_table.rank == 2 && in_.block_table.strides[0] == 0;  // all sequences have one
};

// The plan of a call's first loop over the sequences of a kind, after what these share has become a part of their
// problem.
SharedPrefixPlan share_prefix(const AttentionInputs& in, SequenceGroup& chosen, const Machine& machine);

// The problem that the shared keys pose: the queries of a group are those of one sequence.
AttentionProblem prefix_problem(const AttentionProblem& problem);

// Which sequences share what, and the running softmax of their rows after these keys, in scratch memory that both
// loops of a call see.
class PrefixSums {
 public:
  struct OfSequence {
    int64_t keys;         // that it shares; 0: none
    int64_t first_query;  // of those of all groups
  };

  // `prefix`: of prefix_problem(problem).
  PrefixSums(const AttentionProblem& problem, const AttentionPlan& prefix, const Geometry& geometry)
      : rows_of_query_(problem.num_heads / problem.num_kv_heads),
        rows_((Size(problem.shared_prefix.all_queries) * rows_of_query_).value()),
        kv_heads_(problem.num_kv_heads),
        parts_(prefix.kv_splits),
        groups_(problem.shared_prefix.groups),
        batch_(problem.batch),
        acc_stride_(round_up(problem.value_head_dim, geometry.lanes)),
        geometry_(geometry) {}

  int64_t bytes() {
    CountBytes from;
    take(from);
    return from.bytes.value();
  }
  template <class From>
  void take(From& from) {
    const Size rows = Size(rows_) * kv_heads_ * parts_ * geometry_.accumulator_bytes;
    group = from.template take<SharedGroup>(groups_);
    sequence_ = from.template take<OfSequence>(batch_);
    acc_ = static_cast<char*>(from.take_bytes(Arena::round_up(rows * acc_stride_)));
    max_ = static_cast<char*>(from.take_bytes(Arena::round_up(rows)));
    sums_ = static_cast<char*>(from.take_bytes(Arena::round_up(rows * geometry_.lanes)));
  }
  // Keys of a group are cut to whole tiles of the sequences' own loop, which goes on behind them.
  void find(const SharedPrefixes& prefixes, const Sequences& sequences, int64_t block_kv) {
    std::fill_n(sequence_, batch_, OfSequence{});
    SharedGroup* next = group;
    prefixes.for_groups([&](SharedGroup found) {
      found.keys = found.keys / block_kv * block_kv;
      *next++ = found;
      int64_t query = found.first_query;
      for (int64_t b = found.first; b < found.first + found.count; ++b) {
        sequence_[b] = {found.keys, query};
        query += sequences.query_len(b);
      }
    });
  }

  int64_t keys_of(int64_t sequence) const { return sequence_[sequence].keys; }
  int64_t num_parts() const { return parts_; }
  // Part `part` of the sums of a sequence's stacked rows from first_row on.
  RowState state(int64_t sequence, int64_t kv_head, int64_t first_row, int64_t part) const {
    return state_of_query(sequence_[sequence].first_query, kv_head, first_row, part);
  }
  RowState state_of_query(int64_t query, int64_t kv_head, int64_t first_row, int64_t part) const {
    const int64_t row = (part * kv_heads_ + kv_head) * rows_ + query * rows_of_query_ + first_row;
    const int64_t at = row * geometry_.accumulator_bytes;
    return {acc_ + at * acc_stride_, max_ + at, sums_ + at * geometry_.lanes};
  }

  SharedGroup* group = nullptr;

 private:
  int64_t rows_of_query_, rows_, kv_heads_, parts_, groups_, batch_, acc_stride_;
  const Geometry& geometry_;
  OfSequence* sequence_ = nullptr;
  char *acc_ = nullptr, *max_ = nullptr, *sums_ = nullptr;
};

}  // namespace opst::attention

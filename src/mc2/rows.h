// Lists of rows that go between the ranks of tokens and the owners of experts, from counts [rank][expert].
//
//   sent row    of a rank: its rows sorted by expert                      [expert][slot]
//   owned row   of an owner: the rows of its experts                      [expert][rank][slot]
//   pair        rows of rank s at owner d, in the order of both lists
#pragma once

#include "machine/workspace.h"
#include "mc2/call.h"
#include "opst/expert_parallel.h"

namespace opst::mc2 {

// Neighbours in both lists: rows of one expert. `at`: the first one's place in the tile.
struct Run {
  int64_t expert, sent, owned, at, rows;
};

class RowLists {
 public:
  // Takes its memory from an Arena, or adds it up (CountBytes).
  template <class Pieces>
  RowLists(const Split& experts, int ranks, Pieces& pieces) : experts_(&experts), ranks_(ranks) {
    const Size all = Size(ranks) * num_experts();
    counts_ = pieces.template take<int64_t>(all);
    owned_first_ = pieces.template take<int64_t>(all);
    sent_first_ = pieces.template take<int64_t>(all + ranks);
  }

  int64_t num_experts() const { return experts_->total(); }
  const Split& experts() const { return *experts_; }
  int ranks() const { return ranks_; }
  int64_t* counts(int rank) const { return counts_ + rank * num_experts(); }
  int64_t count(int rank, int64_t expert) const { return counts(rank)[expert]; }
  // After all counts are there.
  void finish();

  int64_t sent_first(int rank, int64_t expert) const { return sent_first_[rank * (num_experts() + 1) + expert]; }
  int64_t owned_first(int rank, int64_t expert) const { return owned_first_[rank * num_experts() + expert]; }
  int64_t sent_rows(int rank) const { return sent_first(rank, num_experts()); }
  int64_t owned_rows(int owner) const;
  int64_t pair_rows(int rank, int owner) const { return pair_end(rank, owner) - pair_first(rank, owner); }
  int64_t most_of_a_pair() const;
  int64_t most_owned() const;

  // body(run) for rows [first, first + rows) of a pair.
  template <class Body>
  void for_pair(int rank, int owner, int64_t first, int64_t rows, const Body& body) const {
    const int64_t begin = pair_first(rank, owner) + first, end = begin + rows;
    for_experts(owner, [&](int64_t e) {
      const int64_t from = std::max(begin, sent_first(rank, e)), to = std::min(end, sent_first(rank, e + 1));
      if (from >= to) return;
      body(Run{e, from, owned_first(rank, e) + from - sent_first(rank, e), from - begin, to - from});
    });
  }
  // body(run) for those of owned rows [first, first + rows) that are of one rank.
  template <class Body>
  void for_owned(int rank, int owner, int64_t first, int64_t rows, const Body& body) const {
    for_experts(owner, [&](int64_t e) {
      const int64_t begin = owned_first(rank, e);
      const int64_t from = std::max(first, begin), to = std::min(first + rows, begin + count(rank, e));
      if (from < to) body(Run{e, sent_first(rank, e) + from - begin, from, from - first, to - from});
    });
  }
  int64_t owned_between(int rank, int owner, int64_t first, int64_t rows) const {
    int64_t count = 0;
    for_owned(rank, owner, first, rows, [&](const Run& run) { count += run.rows; });
    return count;
  }
  // counts[e of the owner's]: how many of owned rows [first, first + rows) are of each expert.
  void group_counts(int owner, int64_t first, int64_t rows, int64_t* counts) const;

 private:
  int64_t pair_first(int rank, int owner) const { return sent_first(rank, experts_->offset(owner)); }
  int64_t pair_end(int rank, int owner) const { return sent_first(rank, experts_->offset(owner + 1)); }
  template <class Body>
  void for_experts(int owner, const Body& body) const {
    for (int64_t e = experts_->offset(owner); e < experts_->offset(owner + 1); ++e) body(e);
  }

  const Split* experts_;
  int ranks_;
  int64_t *counts_ = nullptr, *owned_first_ = nullptr, *sent_first_ = nullptr;
};

// This rank's slots sorted by expert. Null: rows are sorted already.
struct SortedSlots {
  int64_t *row_of_slot = nullptr, *slot_of_row = nullptr;  // [tokens, top_k]; [tokens * top_k], the first rows of it
};
// Sorts, and counts slots of each expert.
Status sort_slots(Context& context, const ConstTensor& ids, int64_t num_experts, const SortedSlots& slots,
                  int64_t* counts);

// expert_tokens[e] = rows of all ranks for this rank's expert e, where it is given.
void store_expert_rows(const RowLists& lists, int rank, const Tensor& expert_tokens);

// Sent rows from `first` on become those of `to`: row i is of token slot_of_row[i] / top_k; null: tokens are sorted.
void copy_tokens(const ConstTensor& tokens, const int64_t* slot_of_row, int64_t top_k, int64_t first, const Tensor& to);

// topk_weights and residual of a weighted sum `out`, where they are given; the residual may be `out` itself.
void check_weights_and_residual(ShapeCheck& check, const ConstTensor& topk_weights, const ConstTensor& residual,
                                const Tensor& out, DType dtype);

// Every rank's counts to every rank, as a call of its own; then the lists.
Status exchange_counts(Communicator::Impl& communicator, const char* name, const Entry& entry, RowLists& lists);

// The experts of each rank.
Split expert_split(ShapeCheck& check, const ExpertShardOptions& options, int ranks, int64_t num_experts);
// Counts and lists fit into a slot and into memory.
void check_counts(ShapeCheck& check, const Communicator::Impl& communicator, int64_t num_experts);

// Rows [rows, columns] that change their places between ranks (scatter.h): to the owners of experts, or back.
struct RowMove {
  bool to_owners = true;
  ConstTensor from;                      // to_owners: tokens, by slot_of_row or sorted; back: owned rows
  Tensor to;                             // owned rows; sorted rows
  const int64_t* slot_of_row = nullptr;  // to_owners: sent row i is of token slot_of_row[i] / top_k
  int64_t top_k = 1;
  // Rows on the way become products, tile by tile; absent: they are copied.
  const TileProduct* product = nullptr;
  ConstTensor bias = {};
};
Status run_row_move(ShapeCheck& check, Communicator::Impl& communicator, Mc2Operator op, const Entry& entry,
                    const RowLists& lists, const RowMove& move, int64_t tile_rows);

}  // namespace opst::mc2

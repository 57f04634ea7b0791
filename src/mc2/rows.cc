// Lists of rows, their counts, and the move of rows between ranks.
#include "mc2/rows.h"

#include <cstring>

#include "mc2/scatter.h"
#include "moe/moe.h"
#include "opst/moe.h"

namespace opst::mc2 {

void RowLists::finish() {
  for (int s = 0; s < ranks_; ++s) {
    int64_t* const first = sent_first_ + s * (num_experts() + 1);
    first[0] = 0;
    for (int64_t e = 0; e < num_experts(); ++e) first[e + 1] = first[e] + count(s, e);
  }
  for (int owner = 0; owner < ranks_; ++owner) {
    int64_t row = 0;
    for_experts(owner, [&](int64_t e) {
      for (int s = 0; s < ranks_; ++s) {
        owned_first_[s * num_experts() + e] = row;
        row += count(s, e);
      }
    });
  }
}

int64_t RowLists::owned_rows(int owner) const {
  int64_t rows = 0;
  for (int s = 0; s < ranks_; ++s) rows += pair_rows(s, owner);
  return rows;
}

int64_t RowLists::most_of_a_pair() const {
  int64_t most = 0;
  for (int s = 0; s < ranks_; ++s) {
    for (int d = 0; d < ranks_; ++d) most = std::max(most, pair_rows(s, d));
  }
  return most;
}

int64_t RowLists::most_owned() const {
  int64_t most = 0;
  for (int d = 0; d < ranks_; ++d) most = std::max(most, owned_rows(d));
  return most;
}

void RowLists::group_counts(int owner, int64_t first, int64_t rows, int64_t* counts) const {
  for_experts(owner, [&](int64_t e) {
    const int64_t begin = owned_first(0, e), end = owned_first(ranks_ - 1, e) + count(ranks_ - 1, e);
    *counts++ = std::max<int64_t>(0, std::min(end, first + rows) - std::max(begin, first));
  });
}

Status sort_slots(Context& context, const ConstTensor& ids, int64_t num_experts, const SortedSlots& slots,
                  int64_t* counts) {
  const int64_t tokens = ids.shape[0], top_k = ids.shape[1];
  const auto integers = [](std::initializer_list<int64_t> shape, int64_t* data) {
    return Tensor::contiguous(DType::i64, shape, data);
  };
  return moe_routing(context, ids, num_experts,
                     {.row_of_slot = integers({tokens, top_k}, slots.row_of_slot),
                      .slot_of_row = integers({tokens * top_k}, slots.slot_of_row),
                      .expert_tokens = integers({num_experts}, counts)});
}

void check_weights_and_residual(ShapeCheck& check, const ConstTensor& topk_weights, const ConstTensor& residual,
                                const Tensor& out, DType dtype) {
  if (is_given(topk_weights)) {
    check.tensor("topk_weights", topk_weights).dtype({DType::f32, dtype}).dims({"tokens", "top_k"});
  }
  if (is_given(residual) && !same_view(residual, out)) {
    check.tensor("residual", residual).dtype({dtype}).dims({"tokens", "hidden"});
  }
}

void store_expert_rows(const RowLists& lists, int rank, const Tensor& expert_tokens) {
  if (!is_given(expert_tokens)) return;
  for (int64_t e = 0; e < lists.experts().size(rank); ++e) {
    int64_t rows = 0;
    for (int s = 0; s < lists.ranks(); ++s) rows += lists.count(s, lists.experts().offset(rank) + e);
    moe::store_index(expert_tokens, rows, e);
  }
}

void copy_tokens(const ConstTensor& tokens, const int64_t* slot_of_row, int64_t top_k, int64_t first,
                 const Tensor& to) {
  if (slot_of_row == nullptr) return copy_rows(tokens.narrowed(0, first, to.shape[0]), to);
  for (int64_t i = 0; i < to.shape[0]; ++i) {
    copy_rows(tokens.narrowed(0, slot_of_row[first + i] / top_k, 1), to.narrowed(0, i, 1));
  }
}

Status exchange_counts(Communicator::Impl& communicator, const char* name, const Entry& entry, RowLists& lists) {
  Exchange exchange(communicator, name);
  const int rank = exchange.rank(), ranks = exchange.world_size();
  const int64_t bytes = lists.num_experts() * 8, slot = round_up(bytes, 64);
  communicator.stats.tile_bytes = slot;
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer != rank) exchange.expect(peer, 1, 1);
  }
  Status status = exchange.run(entry, [&]() -> Status {
    for (int step = 1; step < ranks; ++step) {
      const int peer = (rank + step) % ranks;
      if (exchange.can_send(peer)) {
        if (bytes > 0) {
          std::memcpy(exchange.slot_to(peer, slot), lists.counts(rank), static_cast<size_t>(bytes));
        }
        exchange.send(peer, bytes);
      }
      if (exchange.can_receive(peer)) {
        if (bytes > 0) {
          std::memcpy(lists.counts(peer), exchange.slot_from(peer, slot), static_cast<size_t>(bytes));
        }
        exchange.release(peer);
      }
    }
    return {};
  });
  if (status.ok()) lists.finish();
  return status;
}

Split expert_split(ShapeCheck& check, const ExpertShardOptions& options, int ranks, int64_t num_experts) {
  check.require(num_experts >= 0 && num_experts < kMaxBytes, "num_experts is ", num_experts,
                ", but must be from 0 to 2^56");
  check_tile_rows(check, options.tile_rows);
  if (!check.ok()) return {};
  const Split split = split_of(check, "experts", options.experts, ranks, divided(ranks, num_experts));
  if (check.ok()) agree(check, "num_experts", num_experts, "the ranks' experts are in all", split.total());
  return split;
}

void check_counts(ShapeCheck& check, const Communicator::Impl& communicator, int64_t num_experts) {
  const int64_t staging = communicator.options.staging_bytes;
  const int64_t slot = staging / (kSlots * communicator.transport->world_size()) / 64 * 64;
  check.require((Size(num_experts) * 8).value() <= slot, "the counts of ", num_experts, " experts have ",
                (Size(num_experts) * 8).value(), " bytes, but a slot of staging_bytes = ", staging, " has ", slot);
}

namespace {

class Rows : public RingOrder {
 public:
  Rows(const RowLists& lists, const RowMove& move, int rank, int64_t tile_rows)
      : lists_(lists), move_(move), rank_(rank), tile_rows_(tile_rows) {}

  int64_t own_tiles() const { return tiles_to(rank_); }
  int64_t tiles_to(int d) const { return ceil_div(pair_rows(rank_, d), tile_rows_); }
  int64_t tiles_from(int s) const { return ceil_div(pair_rows(s, rank_), tile_rows_); }

  Status make(int d, int64_t i, const Target& target, int64_t& bytes) const {
    Status status;
    for_tile(rank_, d, i, [&](const Run& run) {
      bytes += run.rows * columns() * size_bytes(move_.to.dtype);
      Target at = target;
      if (target.direct == nullptr) at.slot += run.at * columns() * size_bytes(move_.to.dtype);
      if (status.ok()) status = put(run, at.rows(move_.to.dtype, place(run), run.rows, columns()));
    });
    return status;
  }
  Status make_own(int64_t i) const {
    Status status;
    for_tile(rank_, rank_, i, [&](const Run& run) {
      if (status.ok()) status = put(run, move_.to.narrowed(0, place(run), run.rows));
    });
    return status;
  }
  void take(int s, int64_t i, const char* slot) const {
    for_tile(s, rank_, i, [&](const Run& run) {
      const char* const rows = slot + run.at * columns() * size_bytes(move_.to.dtype);
      copy_rows(ConstTensor::contiguous(move_.to.dtype, {run.rows, columns()}, rows),
                move_.to.narrowed(0, place(run), run.rows));
    });
  }

 private:
  int64_t columns() const { return move_.to.shape[1]; }
  int64_t pair_rows(int from, int to) const {
    return move_.to_owners ? lists_.pair_rows(from, to) : lists_.pair_rows(to, from);
  }
  template <class Body>
  void for_tile(int from, int to, int64_t i, const Body& body) const {
    const int64_t first = i * tile_rows_, rows = std::min(tile_rows_, pair_rows(from, to) - first);
    if (move_.to_owners)
      lists_.for_pair(from, to, first, rows, body);
    else
      lists_.for_pair(to, from, first, rows, body);
  }
  int64_t place(const Run& run) const { return move_.to_owners ? run.owned : run.sent; }

  Status put(const Run& run, const Tensor& to) const {
    if (move_.product == nullptr && move_.to_owners) {
      copy_tokens(move_.from, move_.slot_of_row, move_.top_k, run.sent, to);
      return {};
    }
    const ConstTensor from = move_.from.narrowed(0, move_.to_owners ? run.sent : run.owned, run.rows);
    if (move_.product != nullptr) return (*move_.product)(from, {}, 0, move_.bias, to);
    copy_rows(from, to);
    return {};
  }

  const RowLists& lists_;
  const RowMove& move_;
  const int rank_;
  const int64_t tile_rows_;
};

}  // namespace

Status run_row_move(ShapeCheck& check, Communicator::Impl& communicator, Mc2Operator op, const Entry& entry,
                    const RowLists& lists, const RowMove& move, int64_t tile_rows) {
  const int64_t row_bytes = (Size(move.to.shape[1]) * size_bytes(move.to.dtype)).value();
  const Mc2Plan plan = plan_tiles(check, communicator, op, lists.most_of_a_pair(), row_bytes, tile_rows);
  if (!check.ok()) return check.status();
  Entry own = entry;
  share_out(own, communicator, move.to, move.to.strides[0], move.to.strides[1]);
  Rows rows(lists, move, communicator.transport->rank(), plan.tile_rows);
  return Scatter(communicator, to_string(op), plan.tile_bytes, rows).run(own);
}

}  // namespace opst::mc2

// all_to_allv_grouped_matmul: tiles of an owner's rows, of pieces of all ranks (gather.h).
//
//   tile i of owner d   rows [i tile, ..) of [expert][rank][slot]; a rank's piece: those that it sends, one after the
//                       other, behind them their scales
//   consume             out[tile i] = grouped product of all pieces, their rows in order: an expert's weight is read
//                       once for the rows of all ranks that the tile has
//
// grouped_matmul_all_to_allv: the same tiles of this rank's rows are multiplied one after the other, and their rows go
// to the ranks that they are of (scatter.h).
//
//   for i in tiles: scratch = grouped product of x[tile i]          [tile rows, n]
//     for s in 1..P: d = (r + s) mod P: rows of d in the tile       to slot or out of d
//
// Memory: tiles, 2 per rank; and one from the workspace: the tile in order, the scratch.
#include "mc2/grouped_exchange.h"

#include "mc2/gather.h"
#include "mc2/scatter.h"

namespace opst {

namespace mc2 {

Status GroupedProduct::multiply(int64_t experts, const ConstTensor& x, const ConstTensor& x_scales,
                                const Tensor& out) const {
  const ConstTensor list = ConstTensor::contiguous(DType::i64, {experts}, counts);
  return grouped_matmul(context, x, weight, {list, GroupListType::counts}, out,
                        {.bias = options.bias,
                         .activation = options.activation,
                         .activations = options.activations,
                         .batch_invariant = true,
                         .x_scales = x_scales});
}

Status GroupedProduct::operator()(const RowLists& lists, int rank, int64_t first, const ConstTensor& x,
                                  const ConstTensor& x_scales, const Tensor& out) const {
  lists.group_counts(rank, first, x.shape[0], counts);
  return multiply(lists.experts().size(rank), x, x_scales, out);
}

void GroupedProduct::check(ShapeCheck& check, const ConstTensor& x, const Tensor& out, int64_t experts) const {
  if (experts == 0) return;
  ConstTensor no_rows = x, scales = options.x_scales;
  Tensor none = out;
  no_rows.shape[0] = none.shape[0] = 0;
  no_rows.data = nullptr, none.data = nullptr;
  if (is_given(scales)) scales = ConstTensor::contiguous(DType::f32, {0}, nullptr);
  std::fill_n(counts, experts, 0);
  check.require(multiply(experts, no_rows, scales, none));
}

namespace {

class GatheredRows {
 public:
  GatheredRows(const RowLists& lists, const GroupedProduct& product, const GroupedGatherCall& call, int rank, int ranks,
               const Mc2Plan& plan, char* tile)
      : lists_(lists), product_(product), call_(call), rank_(rank), ranks_(ranks), plan_(plan), tile_(tile) {}

  int64_t tiles_of(int d) const { return ceil_div(lists_.owned_rows(d), plan_.tile_rows); }
  int64_t place(int slot, int from) const { return slot_offset(slot, ranks_, from, plan_.tile_bytes); }

  int64_t fill(int d, int64_t i, char* piece) const {
    int64_t row = 0;
    lists_.for_owned(rank_, d, i * plan_.tile_rows, plan_.tile_rows, [&](const Run& run) {
      const Tensor to = rows_in(piece).narrowed(0, row, run.rows);
      copy_tokens(call_.x, call_.slot_of_row, call_.top_k, run.sent, to);
      row += run.rows;
    });
    if (!has_scales()) return row * row_bytes();
    // Behind these rows: their scales.
    float* scales = scales_behind(piece, row);
    lists_.for_owned(rank_, d, i * plan_.tile_rows, plan_.tile_rows, [&](const Run& run) {
      const ConstTensor from = product_.options.x_scales.narrowed(0, run.sent, run.rows);
      copy_elements(from.data, from.strides[0], scales, 1, run.rows, 4);
      scales += run.rows;
    });
    return reinterpret_cast<char*>(scales) - piece;
  }

  // All pieces become the tile, whose rows are in the order of the experts.
  Status consume(int64_t i, char* staging, int slot) const {
    const int64_t first = i * plan_.tile_rows, rows = std::min(plan_.tile_rows, lists_.owned_rows(rank_) - first);
    float* const scales = scales_behind(tile_, rows);
    for (int s = 0; s < ranks_; ++s) {
      char* const piece = staging + place(slot, s);
      const int64_t count = lists_.owned_between(s, rank_, first, rows);
      int64_t row = 0;
      lists_.for_owned(s, rank_, first, rows, [&](const Run& run) {
        copy_rows(rows_in(piece).narrowed(0, row, run.rows), rows_in(tile_).narrowed(0, run.at, run.rows));
        if (has_scales()) copy_elements(scales_behind(piece, count) + row, 1, scales + run.at, 1, run.rows, 4);
        row += run.rows;
      });
    }
    const Tensor x = rows_in(tile_).narrowed(0, 0, rows);
    if (product_.options.exchanged) copy_rows(x, product_.options.exchanged.narrowed(0, first, rows));
    const ConstTensor of_rows = has_scales() ? ConstTensor::contiguous(DType::f32, {rows}, scales) : ConstTensor();
    return product_(lists_, rank_, first, x, of_rows, call_.out.narrowed(0, first, rows));
  }

 private:
  bool has_scales() const { return is_given(product_.options.x_scales); }
  int64_t row_bytes() const { return call_.x.shape[1] * size_bytes(call_.x.dtype); }
  Tensor rows_in(char* piece) const {
    return Tensor::contiguous(call_.x.dtype, {plan_.tile_rows, call_.x.shape[1]}, piece);
  }
  float* scales_behind(char* piece, int64_t rows) const {
    return reinterpret_cast<float*>(piece + round_up(rows * row_bytes(), 4));
  }

  const RowLists& lists_;
  const GroupedProduct& product_;
  const GroupedGatherCall& call_;
  const int rank_, ranks_;
  const Mc2Plan& plan_;
  char* const tile_;
};

class ScatteredRows {
 public:
  ScatteredRows(const RowLists& lists, const GroupedProduct& product, const GroupedScatterCall& call, int rank,
                int ranks)
      : lists_(lists), product_(product), call_(call), rank_(rank), ranks_(ranks) {
    total_ = ceil_div(lists.owned_rows(rank), call.plan.tile_rows);
    sent_.fill(-1), received_.fill(-1);
  }

  // The next tile is made when all pieces of the one before are sent.
  int64_t own_tiles() const { return std::min(total_, made_ + (waiting_ < 0 ? 1 : 0)); }
  int64_t tiles_to(int d) const { return pieces(d, rank_); }
  int64_t tiles_from(int s) const { return pieces(rank_, s); }

  int next(const Exchange&) {
    waiting_ = -1;
    for (int step = 1; step < ranks_ && made_ > 0 && waiting_ < 0; ++step) {
      const int d = (rank_ + step) % ranks_;
      if (sent_[static_cast<size_t>(d)] < made_ - 1 && rows_in(d, rank_, made_ - 1) > 0) waiting_ = d;
    }
    return waiting_;
  }

  Status make(int d, int64_t, const Target& target, int64_t& bytes) {
    const int64_t tile = made_ - 1, row_bytes = columns() * size_bytes(call_.out.dtype);
    int64_t row = 0;
    for_tile(d, rank_, tile, [&](const Run& run) {
      Target at = target;
      if (target.direct == nullptr) at.slot += row * row_bytes;
      copy_rows(scratch(run), at.rows(call_.out.dtype, run.sent, run.rows, columns()));
      row += run.rows;
    });
    bytes = row * row_bytes;
    sent_[static_cast<size_t>(d)] = tile;
    waiting_ = -1;
    return {};
  }

  Status make_own(int64_t i) {
    const int64_t first = i * call_.plan.tile_rows;
    const int64_t rows = std::min(call_.plan.tile_rows, lists_.owned_rows(rank_) - first);
    made_ = i + 1;
    Status status = product_(lists_, rank_, first, call_.x.narrowed(0, first, rows), {},
                             Tensor::contiguous(call_.out.dtype, {rows, columns()}, call_.scratch));
    if (!status.ok()) return status;
    for_tile(rank_, rank_, i,
             [&](const Run& run) { copy_rows(scratch(run), call_.out.narrowed(0, run.sent, run.rows)); });
    return status;
  }

  void take(int s, int64_t, const char* slot) {
    int64_t& tile = received_[static_cast<size_t>(s)];
    do ++tile;
    while (rows_in(rank_, s, tile) == 0);
    int64_t row = 0;
    for_tile(rank_, s, tile, [&](const Run& run) {
      copy_rows(ConstTensor::contiguous(call_.out.dtype, {run.rows, columns()},
                                        slot + row * columns() * size_bytes(call_.out.dtype)),
                call_.out.narrowed(0, run.sent, run.rows));
      row += run.rows;
    });
  }

 private:
  int64_t columns() const { return call_.out.shape[1]; }
  ConstTensor scratch(const Run& run) const {
    return ConstTensor::contiguous(call_.out.dtype, {run.rows, columns()},
                                   call_.scratch + run.at * columns() * size_bytes(call_.out.dtype));
  }
  // Rows of `rank` in a tile of `owner`.
  template <class Body>
  void for_tile(int rank, int owner, int64_t tile, const Body& body) const {
    lists_.for_owned(rank, owner, tile * call_.plan.tile_rows, call_.plan.tile_rows, body);
  }
  int64_t rows_in(int rank, int owner, int64_t tile) const {
    return lists_.owned_between(rank, owner, tile * call_.plan.tile_rows, call_.plan.tile_rows);
  }
  int64_t pieces(int rank, int owner) const {
    int64_t count = 0;
    const int64_t tiles = ceil_div(lists_.owned_rows(owner), call_.plan.tile_rows);
    for (int64_t i = 0; i < tiles; ++i) count += rows_in(rank, owner, i) > 0 ? 1 : 0;
    return count;
  }

  const RowLists& lists_;
  const GroupedProduct& product_;
  const GroupedScatterCall& call_;
  const int rank_, ranks_;
  int waiting_ = -1;  // that a piece of the last tile is for
  int64_t total_ = 0, made_ = 0;
  std::array<int64_t, kMaxRanks> sent_ = {}, received_ = {};  // the last tile of which a piece was
};

}  // namespace

Status run_grouped_gather(ShapeCheck& check, Communicator::Impl& communicator, const Entry& entry,
                          const RowLists& lists, const GroupedProduct& product, const GroupedGatherCall& call) {
  const Size row_bytes = Size(call.x.shape[1]) * size_bytes(call.x.dtype) +
                         (is_given(product.options.x_scales) ? 8 : 0);  // 8: its own, and up to 4 to align
  const Mc2Plan plan =
      plan_tiles(check, communicator, call.op, lists.most_owned(), row_bytes.value(), product.options.shards.tile_rows);
  if (!check.ok()) return check.status();
  const Result<WorkspaceLease> tile = product.context.impl().workspaces.lease(plan.tile_bytes);
  if (!tile.ok()) return tile.status();
  const Transport& transport = *communicator.transport;
  GatheredRows rows(lists, product, call, transport.rank(), transport.world_size(), plan,
                    static_cast<char*>(tile.value().data()));
  return PieceGather(communicator, to_string(call.op), rows).run(entry);
}

Status run_grouped_scatter(Communicator::Impl& communicator, const Entry& entry, const RowLists& lists,
                           const GroupedProduct& product, const GroupedScatterCall& call) {
  Entry own = entry;
  share_out(own, communicator, call.out, call.out.strides[0], call.out.strides[1]);
  const Transport& transport = *communicator.transport;
  ScatteredRows rows(lists, product, call, transport.rank(), transport.world_size());
  return Scatter(communicator, to_string(call.op), call.plan.tile_bytes, rows).run(own);
}

namespace {

Status run(ShapeCheck& check, Mc2Operator op, Context& context, Communicator::Impl& own, const ConstTensor& x,
           const ConstTensor& send_counts, const GroupedWeight& weight, const Tensor& out,
           const GroupedExchangeOptions& options) {
  const bool gathers = op == Mc2Operator::all_to_allv_grouped_matmul;
  const int rank = own.transport->rank(), ranks = own.transport->world_size();
  check.tensor("x", x).dims({"x_rows", "k"});
  check.tensor("send_counts", send_counts).dtype({DType::i64, DType::i32}).dims({"experts"});
  if (is_given(options.x_scales)) check.tensor("x_scales", options.x_scales).dtype({DType::f32}).dims({"x_rows"});
  check.output("out", out).dims({"rows", "n"});
  if (is_given(options.exchanged)) check.output("exchanged", options.exchanged).dtype({x.dtype}).dims({"rows", "k"});
  check.require(gathers || !is_given(options.exchanged), "exchanged is given, but x is not exchanged");
  check.require(gathers || !is_given(options.x_scales), "x_scales is given, but of all_to_allv_grouped_matmul only");
  check.require(gathers || options.activation == Activation::none,
                "an activation is given, but of all_to_allv_grouped_matmul only");
  if (!check.ok()) return check.status();
  const int64_t num_experts = send_counts.shape[0];
  const Split experts = expert_split(check, options.shards, ranks, num_experts);
  if (check.ok()) check_counts(check, own, num_experts);
  if (!check.ok()) return check.status();
  CountBytes bytes;
  static_cast<void>(RowLists(experts, ranks, bytes));
  const int64_t list_bytes = bytes.bytes.value() + Arena::size_of<int64_t>(experts.size(rank));
  const Result<WorkspaceLease> lease = context.impl().workspaces.lease(list_bytes);
  if (!lease.ok()) return lease.status();
  Arena arena(lease.value());
  RowLists lists(experts, ranks, arena);
  const GroupedProduct product{context, weight, options, arena.take<int64_t>(experts.size(rank))};
  Size sum = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t count = lists.counts(rank)[e] = index_at(send_counts, e);
    check.require(count >= 0, "send_counts[", e, "] is ", count, ", but must be >= 0");
    if (check.ok()) sum += count;
  }
  const int64_t sent = gathers ? x.shape[0] : out.shape[0], sum_of_counts = check.ok() ? sum.value() : 0;
  check.require(sent >= sum_of_counts, gathers ? "x" : "out", " dim 0 (rows) is ", sent,
                ", but send_counts are in all ", sum_of_counts);
  if (check.ok()) product.check(check, x, out, experts.size(rank));
  if (!check.ok()) return check.status();
  Entry entry;
  SignatureText(entry).write(to_string(op), "(x ", to_string(x.dtype), ", k ", x.shape[1], ", out ",
                             to_string(out.dtype), " n ", out.shape[1], ", experts ", experts,
                             is_given(options.x_scales) ? ", x_scales" : "", ", tile ", options.shards.tile_rows,
                             " rows)");
  Status status = exchange_counts(own, to_string(op), entry, lists);
  if (!status.ok()) return status;
  const int64_t owned = lists.owned_rows(rank), held = gathers ? out.shape[0] : x.shape[0];
  check.require(held >= owned, gathers ? "out" : "x", " dim 0 (rows) is ", held, ", but this rank's experts have ",
                owned);
  if (!check.ok()) return check.status();
  if (gathers) {
    return run_grouped_gather(check, own, entry, lists, product,
                              {.op = op, .x = normal_strides(x), .out = normal_strides(out)});
  }
  const int64_t row_bytes = (Size(out.shape[1]) * size_bytes(out.dtype)).value();
  GroupedScatterCall call{.op = op, .x = normal_strides(x), .out = normal_strides(out)};
  call.plan = plan_tiles(check, own, op, lists.most_owned(), row_bytes, options.shards.tile_rows);
  if (!check.ok()) return check.status();
  const Result<WorkspaceLease> scratch = context.impl().workspaces.lease(call.plan.tile_bytes);
  if (!scratch.ok()) return scratch.status();
  call.scratch = static_cast<char*>(scratch.value().data());
  return run_grouped_scatter(own, entry, lists, product, call);
}

Status call(Mc2Operator op, Context& context, Communicator& communicator, const ConstTensor& x,
            const ConstTensor& send_counts, const GroupedWeight& weight, const Tensor& out,
            const GroupedExchangeOptions& options) {
  return alone(to_string(op), communicator, [&](ShapeCheck& check, Communicator::Impl& own) {
    return run(check, op, context, own, x, send_counts, weight, out, options);
  });
}

}  // namespace
}  // namespace mc2

Status all_to_allv_grouped_matmul(Context& context, Communicator& communicator, const ConstTensor& x,
                                  const ConstTensor& send_counts, const GroupedWeight& weight, const Tensor& out,
                                  const GroupedExchangeOptions& options) {
  return mc2::call(Mc2Operator::all_to_allv_grouped_matmul, context, communicator, x, send_counts, weight, out,
                   options);
}

Status grouped_matmul_all_to_allv(Context& context, Communicator& communicator, const ConstTensor& x,
                                  const ConstTensor& send_counts, const GroupedWeight& weight, const Tensor& out,
                                  const GroupedExchangeOptions& options) {
  return mc2::call(Mc2Operator::grouped_matmul_all_to_allv, context, communicator, x, send_counts, weight, out,
                   options);
}

}  // namespace opst

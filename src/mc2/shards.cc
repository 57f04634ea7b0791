// sequence_to_heads, heads_to_sequence: the loop of scatter.h, where making a tile is copying it.
//
//   tile i for rank d   sequence_to_heads   x[my tile i, heads of d]     [tile rows, H_d, head_dim]
//                       heads_to_sequence   x[tile i of d, my heads]     [tile rows, H_r, head_dim]
//
// Memory: direct: none. Else tiles, 2 per rank.
#include "mc2/call.h"
#include "mc2/scatter.h"
#include "opst/sequence_parallel.h"

namespace opst {

namespace mc2 {
namespace {

// [rows, heads, head_dim] as [rows, heads * head_dim] lets others store into it.
bool is_matrix(const Tensor& t) { return t.shape[1] <= 1 || t.strides[1] == t.shape[2] * t.strides[2]; }

class Shards : public RingOrder {
 public:
  Shards(Context& context, Mc2Operator op, const ConstTensor& x, const Tensor& out)
      : context_(context), to_heads_(op == Mc2Operator::sequence_to_heads), x_(x), out_(out) {}
  Split rows = {}, heads = {};
  Mc2Plan plan = {};
  int rank = 0;

  // Tiles of rows of whom: the sender's, or the receiver's.
  int64_t own_tiles() const { return tiles_of(rank); }
  int64_t tiles_to(int d) const { return tiles_of(to_heads_ ? rank : d); }
  int64_t tiles_from(int s) const { return tiles_of(to_heads_ ? s : rank); }

  Status make(int d, int64_t i, const Target& target, int64_t& bytes) const {
    const int owner = to_heads_ ? rank : d, of_heads = to_heads_ ? d : rank;
    const int64_t count = tile_size(owner, i), columns = heads.size(of_heads) * x_.shape[2];
    bytes = count * columns * size_bytes(x_.dtype);
    const ConstTensor from = part(x_, to_heads_, owner, of_heads, i, count);
    // The direct output has the heads of rank d alone, or all.
    const int64_t first_row = (to_heads_ ? rows.offset(rank) : 0) + i * plan.tile_rows;
    Tensor to = target.rows(x_.dtype, first_row, count, columns);
    if (target.direct != nullptr && !to_heads_) to = to.narrowed(1, heads.offset(rank) * x_.shape[2], columns);
    copy(from, as_heads(to, heads.size(of_heads)));
    return {};
  }
  Status make_own(int64_t i) const {
    const int64_t count = tile_size(rank, i);
    copy(part(x_, to_heads_, rank, rank, i, count), part(out_, !to_heads_, rank, rank, i, count));
    return {};
  }
  void take(int s, int64_t i, const char* slot) const {
    const int owner = to_heads_ ? s : rank, of_heads = to_heads_ ? rank : s;
    const int64_t count = tile_size(owner, i);
    copy(ConstTensor::contiguous(x_.dtype, {count, heads.size(of_heads), x_.shape[2]}, slot),
         part(out_, !to_heads_, owner, of_heads, i, count));
  }

 private:
  int64_t tiles_of(int owner) const { return ceil_div(rows.size(owner), plan.tile_rows); }
  int64_t tile_size(int owner, int64_t i) const {
    return std::min(plan.tile_rows, rows.size(owner) - i * plan.tile_rows);
  }
  // Tile i of the rows of `owner`, and the heads of `of_heads`, in the tensor of row shards (which has all heads of the
  // rows of one rank) or in that of head shards.
  template <class T>
  T part(const T& t, bool row_shards, int owner, int of_heads, int64_t i, int64_t count) const {
    const int64_t first = i * plan.tile_rows;
    if (!row_shards) return t.narrowed(0, rows.offset(owner) + first, count);
    return t.narrowed(0, first, count).narrowed(1, heads.offset(of_heads), heads.size(of_heads));
  }
  Tensor as_heads(const Tensor& matrix, int64_t num_heads) const {
    Tensor t = matrix;
    t.rank = 3;
    t.shape[1] = num_heads, t.shape[2] = x_.shape[2];
    t.strides[1] = x_.shape[2] * matrix.strides[1], t.strides[2] = matrix.strides[1];
    return t;
  }
  void copy(const ConstTensor& from, const Tensor& to) const {
    const int64_t bytes = size_bytes(from.dtype), num_heads = from.shape[1];
    context_.impl().pool.for_each(from.shape[0], rows_per_task(num_heads * from.shape[2]), [&](int64_t row, int) {
      for (int64_t h = 0; h < num_heads; ++h) {
        copy_elements(static_cast<const char*>(from.data) + (row * from.strides[0] + h * from.strides[1]) * bytes,
                      from.strides[2], static_cast<char*>(to.data) + (row * to.strides[0] + h * to.strides[1]) * bytes,
                      to.strides[2], from.shape[2], bytes);
      }
    });
  }

  Context& context_;
  const bool to_heads_;
  const ConstTensor& x_;
  const Tensor& out_;
};

Status run(ShapeCheck& check, Mc2Operator op, Context& context, Communicator::Impl& own, ConstTensor x, Tensor out,
           const HeadShardOptions& options) {
  const bool to_heads = op == Mc2Operator::sequence_to_heads;
  check.tensor("x", x).dims({"x_rows", "x_heads", "head_dim"});
  check.output("out", out).dtype({x.dtype}).dims({"rows", "heads", "head_dim"});
  check_tile_rows(check, options.tile_rows);
  if (!check.ok()) return check.status();
  Shards work(context, op, x, out);
  work.rank = own.transport->rank();
  const int ranks = own.transport->world_size();
  const int64_t m = x.shape[0], all_heads = to_heads ? x.shape[1] : out.shape[1];
  work.rows = split_of(check, "rows", options.rows, ranks, to_heads ? equal_split(ranks, m) : divided(ranks, m));
  work.heads = split_of(check, "heads", options.heads, ranks, divided(ranks, all_heads));
  if (!check.ok()) return check.status();
  const int64_t my_rows = work.rows.size(work.rank), my_heads = work.heads.size(work.rank);
  agree(check, to_heads ? "x dim 0 (rows)" : "out dim 0 (rows)", to_heads ? m : out.shape[0], "this rank's rows are",
        my_rows);
  agree(check, to_heads ? "out dim 0 (rows)" : "x dim 0 (rows)", to_heads ? out.shape[0] : m,
        "the ranks' rows are in all", work.rows.total());
  agree(check, to_heads ? "x dim 1 (heads)" : "out dim 1 (heads)", all_heads, "the ranks' heads are in all",
        work.heads.total());
  agree(check, to_heads ? "out dim 1 (heads)" : "x dim 1 (heads)", to_heads ? out.shape[1] : x.shape[1],
        "this rank's heads are", my_heads);
  if (!check.ok()) return check.status();
  make_strides_normal(x);
  make_strides_normal(out);
  const Size row_bytes = Size(work.heads.most()) * x.shape[2] * size_bytes(x.dtype);
  work.plan = plan_tiles(check, own, op, work.rows.most(), row_bytes.value(), options.tile_rows);
  if (!check.ok()) return check.status();
  Entry entry;
  SignatureText(entry).write(to_string(op), "(x ", to_string(x.dtype), ", rows ", work.rows, ", heads ", work.heads,
                             ", head_dim ", x.shape[2], ", tile ", work.plan.tile_rows, " rows)");
  if (is_matrix(out)) share_out(entry, own, out, out.strides[0], out.strides[2]);
  return Scatter(own, to_string(op), work.plan.tile_bytes, work).run(entry);
}

Status call(Mc2Operator op, Context& context, Communicator& communicator, const ConstTensor& x, const Tensor& out,
            const HeadShardOptions& options) {
  return alone(to_string(op), communicator, [&](ShapeCheck& check, Communicator::Impl& own) {
    return run(check, op, context, own, x, out, options);
  });
}

}  // namespace
}  // namespace mc2

Status sequence_to_heads(Context& context, Communicator& communicator, const ConstTensor& x, const Tensor& out,
                         const HeadShardOptions& options) {
  return mc2::call(Mc2Operator::sequence_to_heads, context, communicator, x, out, options);
}

Status heads_to_sequence(Context& context, Communicator& communicator, const ConstTensor& x, const Tensor& out,
                         const HeadShardOptions& options) {
  return mc2::call(Mc2Operator::heads_to_sequence, context, communicator, x, out, options);
}

}  // namespace opst

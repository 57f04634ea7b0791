// Ring attention: chunks and tiles, check -> plan -> run.
#include <algorithm>

#include "core/guarded.h"
#include "mc2/ring.h"

namespace opst {

namespace mc2 {

Sequence::Sequence(const Split& rows, const RingAttentionOptions& options)
    : rows_(&rows), zigzag_(options.order == SequenceOrder::zigzag) {
  // Beyond every sequence; sums with positions do not overflow.
  constexpr int64_t kFar = int64_t{1} << 60;
  const auto side = [](int64_t size) { return size > kFar ? kUnbounded : std::max(size, -kFar); };
  left_ = side(options.window_left);
  right_ = side(options.causal ? std::min<int64_t>(options.window_right, 0) : options.window_right);
}

Chunk Sequence::chunk(int rank, int index) const {
  const int64_t rows = rows_->size(rank);
  if (!zigzag_) return index == 0 ? Chunk{0, rows, rows_->offset(rank)} : Chunk{};
  const auto front = [&](int r) { return ceil_div(rows_->size(r), 2); };
  Chunk chunk{index == 0 ? 0 : front(rank), index == 0 ? front(rank) : rows - front(rank), 0};
  for (int r = 0; r < rank; ++r) chunk.position += front(r);
  if (index == 0) return chunk;
  for (int r = rank; r < rows_->parts; ++r) chunk.position += front(r);
  for (int r = rank + 1; r < rows_->parts; ++r) chunk.position += rows_->size(r) - front(r);
  return chunk;
}

int64_t Sequence::tiles(int rank) const {
  return ceil_div(chunk(rank, 0).rows, tile_rows) + ceil_div(chunk(rank, 1).rows, tile_rows);
}

KeyTile Sequence::tile(int rank, int64_t i) const {
  Chunk in = chunk(rank, 0);
  const int64_t of_first = ceil_div(in.rows, tile_rows);
  if (i >= of_first) in = chunk(rank, 1), i -= of_first;
  const int64_t begin = i * tile_rows;
  return {in.first + begin, std::min(tile_rows, in.rows - begin), in.position + begin};
}

// Query i of the call is token queries.position + i, key j token keys.position + j.
Sequence::Window Sequence::window(const Chunk& queries, const KeyTile& keys) const {
  const int64_t shift = queries.position - keys.position;
  Window w{left_ == kUnbounded ? kUnbounded : left_ - shift, right_ == kUnbounded ? kUnbounded : right_ + shift, true};
  w.visible = queries.rows > 0 && keys.rows > 0 && (w.right == kUnbounded || queries.rows - 1 + w.right >= 0) &&
              (w.left == kUnbounded || -w.left <= keys.rows - 1) &&
              (w.left == kUnbounded || w.right == kUnbounded || w.left + w.right >= 0);
  return w;
}

bool Sequence::needs(int reader, int owner, int64_t i) const {
  const KeyTile keys = tile(owner, i);
  return window(chunk(reader, 0), keys).visible || window(chunk(reader, 1), keys).visible;
}

int64_t Sequence::count_needed(int reader, int owner) const {
  int64_t count = 0;
  for (int64_t i = 0; i < tiles(owner); ++i) count += needs(reader, owner, i) ? 1 : 0;
  return count;
}

namespace {

constexpr std::initializer_list<DType> kFloats = {DType::f32, DType::bf16, DType::f16};
constexpr std::initializer_list<const char*> kQuery = {"batch", "num_heads", "rows", "head_dim"},
                                             kKey = {"batch", "num_kv_heads", "rows", "head_dim"},
                                             kValue = {"batch", "num_kv_heads", "rows", "value_head_dim"},
                                             kOut = {"batch", "num_heads", "rows", "value_head_dim"},
                                             kStatistic = {"batch", "num_heads", "rows"};

void check_tensors(ShapeCheck& check, const RingCall& call) {
  check.tensor("query", call.in.query).dtype(kFloats).dims(kQuery);
  check.tensor("key", call.in.key).dtype(kFloats).dims(kKey);
  check.tensor("value", call.in.value).dtype({call.in.key.dtype}).dims(kValue);
  if (!call.backward()) {
    check.require(!call.out.softmax_max && !call.out.softmax_sum, "softmax_max or softmax_sum is asked for");
    check.output("out", call.out.out).dtype(kFloats).dims(kOut);
    if (is_given(call.out.softmax_lse)) {
      check.output("softmax_lse", call.out.softmax_lse).dtype({DType::f32}).dims(kStatistic);
    }
    return;
  }
  const AttentionGradients& g = call.gradients;
  check.require(!call.saved.softmax_max && !call.saved.softmax_sum && !call.saved.grad_lse,
                "softmax_max, softmax_sum or grad_lse is given");
  check.require(!g.grad_bias && !g.grad_sinks && !g.grad_query_rope && !g.grad_key_rope,
                "gradients of others than query, key and value are asked for");
  check.tensor("out", call.saved.out).dtype(kFloats).dims(kOut);
  check.tensor("grad_out", call.saved.grad_out).dtype(kFloats).dims(kOut);
  check.tensor("softmax_lse", call.saved.softmax_lse).dtype({DType::f32}).dims(kStatistic);
  check.output("grad_query", g.grad_query).dtype(kFloats).dims(kQuery);
  check.output("grad_key", g.grad_key).dtype(kFloats).dims(kKey);
  check.output("grad_value", g.grad_value).dtype(kFloats).dims(kValue);
}

Entry entry_of(const RingCall& call) {
  const RingAttentionInputs& in = call.in;
  const RingAttentionOptions& o = call.options;
  Entry entry;
  SignatureText text(entry);
  text.write(to_string(call.op), "(query ", to_string(in.query.dtype), ", key ", to_string(in.key.dtype), ", batch ",
             in.query.shape[0], ", num_heads ", in.query.shape[1], ", num_kv_heads ", in.key.shape[1], ", head_dim ",
             in.key.shape[3], ", value_head_dim ", in.value.shape[3], ", rows ", call.rows,
             o.order == SequenceOrder::zigzag ? ", zigzag" : "", o.causal ? ", causal" : "", ", window_left ",
             o.window_left, ", window_right ", o.window_right, ", softcap ", o.softcap, ", tile ", call.plan.tile_rows,
             " rows");
  if (o.softmax_scale) text.write(", softmax_scale ", *o.softmax_scale);
  text.write(")");
  return entry;
}

Status check_and_run(ShapeCheck& check, RingCall& call) {
  const RingAttentionOptions& o = call.options;
  check_tile_rows(check, o.tile_rows);
  check.require(o.order == SequenceOrder::contiguous || o.order == SequenceOrder::zigzag, "order is unknown");
  check_tensors(check, call);
  if (!check.ok()) return check.status();
  const AttentionOptions attention{.softmax_scale = o.softmax_scale, .softcap = o.softcap};
  check.require(
      attention_problem({.query = call.in.query, .key = call.in.key, .value = call.in.value}, attention).status());
  if (!check.ok()) return check.status();
  const int64_t m = call.in.key.shape[2];
  call.rows = split_of(check, "rows", o.rows, call.ranks(), equal_split(call.ranks(), m));
  if (check.ok()) agree(check, "key dim 2 (rows)", m, "rows has for this rank", call.rows.size(call.rank()));
  if (!check.ok()) return check.status();
  const int64_t bytes = call.backward() ? 4 : size_bytes(call.in.key.dtype);
  call.plan = plan_tiles(check, call.communicator, call.op, call.rows.most(),
                         (Size(call.numbers_of_row()) * bytes).value(), o.tile_rows);
  if (!check.ok()) return check.status();
  call.sequence = Sequence(call.rows, o);
  call.sequence.tile_rows = call.plan.tile_rows;
  for (ConstTensor* t : {&call.in.query, &call.in.key, &call.in.value}) make_strides_normal(*t);
  return run_ring(call, entry_of(call));
}

}  // namespace
}  // namespace mc2

Status ring_attention_forward(Context& context, Communicator& communicator, const RingAttentionInputs& inputs,
                              const AttentionOutputs& outputs, const RingAttentionOptions& options) {
  constexpr auto op = Mc2Operator::ring_attention_forward;
  return mc2::alone(to_string(op), communicator, [&](ShapeCheck& check, Communicator::Impl& own) -> Status {
    mc2::RingCall call{
        .context = context, .communicator = own, .op = op, .in = inputs, .options = options, .out = outputs};
    return mc2::check_and_run(check, call);
  });
}

Status ring_attention_backward(Context& context, Communicator& communicator, const RingAttentionInputs& inputs,
                               const AttentionSaved& saved, const AttentionGradients& gradients,
                               const RingAttentionOptions& options) {
  constexpr auto op = Mc2Operator::ring_attention_backward;
  return mc2::alone(to_string(op), communicator, [&](ShapeCheck& check, Communicator::Impl& own) -> Status {
    mc2::RingCall call{.context = context,
                       .communicator = own,
                       .op = op,
                       .in = inputs,
                       .options = options,
                       .saved = saved,
                       .gradients = gradients};
    return mc2::check_and_run(check, call);
  });
}

}  // namespace opst

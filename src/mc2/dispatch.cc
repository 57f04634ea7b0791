// moe_dispatch, moe_combine, and between ranks of two kinds attention_to_ffn, ffn_to_attention:
// check -> sort of slots -> counts of all ranks -> rows change their places.
#include "mc2/rows.h"
#include "moe/layer.h"
#include "moe/moe.h"

namespace opst {

namespace mc2 {
namespace {

// What a call takes from the workspace.
struct DispatchMemory {
  template <class Pieces>
  DispatchMemory(Pieces& pieces, const Split& experts, int ranks, int64_t the_slots)
      : lists(experts, ranks, pieces),
        slots{pieces.template take<int64_t>(the_slots), pieces.template take<int64_t>(the_slots)} {}
  RowLists lists;
  SortedSlots slots;
};

struct DispatchCall {
  ShapeCheck& check;
  Context& context;
  Communicator::Impl& communicator;
  Mc2Operator op;
  ConstTensor ids;
  DType dtype;
  int64_t hidden, num_experts;
  const ExpertShardOptions& options;
  // Rows on the way become products: ids are sorted then.
  const TileProduct* product = nullptr;
  ConstTensor bias = {};

  int rank() const { return communicator.transport->rank(); }
  int ranks() const { return communicator.transport->world_size(); }
};

// body(entry, memory, arena with `extra` bytes more) once the rows of all ranks are known.
template <class Body>
Status with_lists(const DispatchCall& call, int64_t extra, const Body& body) {
  const Split experts = expert_split(call.check, call.options, call.ranks(), call.num_experts);
  if (call.check.ok()) check_counts(call.check, call.communicator, call.num_experts);
  if (!call.check.ok()) return call.check.status();
  const int64_t slots = (Size(call.ids.shape[0]) * call.ids.shape[1]).value();
  CountBytes bytes;
  static_cast<void>(DispatchMemory(bytes, experts, call.ranks(), slots));
  const Result<WorkspaceLease> lease = call.context.impl().workspaces.lease((bytes.bytes + extra).value());
  if (!lease.ok()) return lease.status();
  Arena arena(lease.value());
  DispatchMemory memory(arena, experts, call.ranks(), slots);
  call.check.require(
      sort_slots(call.context, call.ids, call.num_experts, memory.slots, memory.lists.counts(call.rank())));
  if (!call.check.ok()) return call.check.status();
  Entry entry;
  SignatureText(entry).write(to_string(call.op), "(", to_string(call.dtype), ", hidden ", call.hidden, ", top_k ",
                             call.ids.shape[1], ", experts ", experts, ", tile ", call.options.tile_rows, " rows)");
  Status status = exchange_counts(call.communicator, to_string(call.op), entry, memory.lists);
  return status.ok() ? body(entry, memory, arena) : status;
}

void require_rows(const DispatchCall& call, const RowLists& lists, int64_t rows) {
  const int64_t owned = lists.owned_rows(call.rank());
  call.check.require(rows >= owned, "rows dim 0 is ", rows, ", but this rank's experts have ", owned);
}

Status dispatch(const DispatchCall& call, const ConstTensor& x, const MoeDispatchOutputs& outputs) {
  const auto counts = [&](const char* name, const Tensor& t, int rank) {
    if (!is_given(t)) return;
    auto output = call.check.output(name, t).dtype({DType::i64, DType::i32});
    if (rank == 1)
      output.dims({"experts of this rank"});
    else
      output.dims({"experts of this rank", "ranks"});
  };
  counts("expert_tokens", outputs.expert_tokens, 1);
  counts("rank_tokens", outputs.rank_tokens, 2);
  if (call.check.ok()) {
    const int64_t mine = expert_split(call.check, call.options, call.ranks(), call.num_experts).size(call.rank());
    if (is_given(outputs.expert_tokens)) call.check.holds("experts", "experts of this rank", mine);
    if (is_given(outputs.rank_tokens)) {
      call.check.holds("experts", "experts of this rank", mine);
      call.check.holds("the communicator", "ranks", call.ranks());
    }
  }
  if (!call.check.ok()) return call.check.status();
  return with_lists(call, 0, [&](const Entry& entry, const DispatchMemory& memory, Arena&) -> Status {
    const RowLists& lists = memory.lists;
    require_rows(call, lists, outputs.rows.shape[0]);
    if (!call.check.ok()) return call.check.status();
    const RowMove move{.from = normal_strides(x),
                       .to = normal_strides(outputs.rows),
                       .slot_of_row = call.product != nullptr ? nullptr : memory.slots.slot_of_row,
                       .top_k = std::max<int64_t>(1, call.ids.shape[1]),
                       .product = call.product,
                       .bias = call.bias};
    Status status = run_row_move(call.check, call.communicator, call.op, entry, lists, move, call.options.tile_rows);
    if (!status.ok()) return status;
    store_expert_rows(lists, call.rank(), outputs.expert_tokens);
    const int64_t begin = lists.experts().offset(call.rank());
    for (int64_t e = 0; is_given(outputs.rank_tokens) && e < lists.experts().size(call.rank()); ++e) {
      for (int s = 0; s < call.ranks(); ++s) moe::store_index(outputs.rank_tokens, lists.count(s, begin + e), e, s);
    }
    return {};
  });
}

Status combine(const DispatchCall& call, const MoeCombineInputs& in, const Tensor& out) {
  const int64_t tokens = call.ids.shape[0], top_k = call.ids.shape[1];
  const Size elements = Size(tokens) * top_k * call.hidden;
  const int64_t extra = Arena::round_up(elements * size_bytes(call.dtype));
  return with_lists(call, extra, [&](const Entry& entry, const DispatchMemory& memory, Arena& arena) -> Status {
    require_rows(call, memory.lists, in.rows.shape[0]);
    if (!call.check.ok()) return call.check.status();
    const Tensor sorted = Tensor::contiguous(call.dtype, {tokens * top_k, call.hidden}, arena.take_bytes(extra));
    const RowMove move{
        .to_owners = false, .from = normal_strides(in.rows), .to = sorted, .product = call.product, .bias = call.bias};
    Status status =
        run_row_move(call.check, call.communicator, call.op, entry, memory.lists, move, call.options.tile_rows);
    if (!status.ok()) return status;
    return moe_finalize(call.context,
                        {.expanded = sorted,
                         .row_of_slot = ConstTensor::contiguous(DType::i64, {tokens, top_k}, memory.slots.row_of_slot),
                         .topk_weights = in.topk_weights,
                         .skip1 = in.residual},
                        out);
  });
}

// ---- attention_to_ffn, ffn_to_attention: the same, where some ranks own no experts and the others have no tokens

// What the two have in common: the owners of experts, and without experts an id for each token.
class TwoKinds {
 public:
  TwoKinds(ShapeCheck& check, Context& context, Communicator::Impl& communicator, const AttentionFfnOptions& options)
      : check_(check), context_(context), communicator_(communicator), options_(options) {
    const int ranks = communicator.transport->world_size(), attention = options.attention_ranks;
    check.require(attention >= 1 && attention < ranks, "attention_ranks is ", attention, ", but must be from 1 to ",
                  ranks - 1, ", one less than there are ranks");
    check.require(options.num_experts >= 0 && options.num_experts < kMaxBytes, "num_experts is ", options.num_experts,
                  ", but must be from 0 to 2^56");
    check.require(has_experts() || options.experts.empty(), "experts are given, but num_experts is 0");
    if (!check.ok()) return;
    const int others = ranks - attention;
    const Split of_ffn = split_of(check, "experts", options.experts, others,
                                  divided(others, has_experts() ? options.num_experts : others));
    for (int r = 0; r < ranks; ++r) experts_[static_cast<size_t>(r)] = r < attention ? 0 : of_ffn.size(r - attention);
    attends_ = communicator.transport->rank() < attention;
    shards_ = {.experts = {experts_.data(), static_cast<size_t>(ranks)}, .tile_rows = options.tile_rows};
    num_experts_ = has_experts() ? options.num_experts : others;
  }

  bool has_experts() const { return options_.num_experts > 0; }

  void check_roles(const char* tokens_name, int64_t tokens, const char* rows_name, int64_t rows) const {
    check_.require(attends_ || tokens == 0, tokens_name, " dim 0 (tokens) is ", tokens, ", but this rank is an FFN");
    check_.require(!attends_ || rows == 0, rows_name, " dim 0 (rows) is ", rows, ", but this rank attends");
  }
  void check_ids(const ConstTensor& ids) const {
    if (has_experts()) {
      check_.tensor("topk_ids", ids).dtype({DType::i64, DType::i32}).dims({"tokens", "top_k"});
    } else {
      check_.require(!is_given(ids), "topk_ids are given, but num_experts is 0");
    }
  }
  // Rows of `from` become those of `to`; with a weight, products that do.
  struct Way {
    const GroupedWeight& weight;
    const ConstTensor& bias;
    ConstTensor from;
    Tensor to;
  };
  // body(call) for an attention rank's `tokens`, after the last checks.
  template <class Body>
  Status run(Mc2Operator op, const ConstTensor& ids, int64_t tokens, const Way& way, const Body& body) const {
    const bool multiplies = moe::is_there(way.weight);
    const Mc2Options of_product = {};
    const TileProduct product(context_, way.weight, of_product);
    if (check_.ok() && multiplies) check_product(way, product);
    if (!check_.ok()) return check_.status();
    const Result<WorkspaceLease> lease =
        context_.impl().workspaces.lease(has_experts() ? 0 : Arena::size_of<int32_t>(tokens));
    if (!lease.ok()) return lease.status();
    Arena arena(lease.value());
    ConstTensor of_tokens = ids;
    if (!has_experts()) {
      auto* const data = arena.take<int32_t>(tokens);
      const Split slices = divided(static_cast<int>(num_experts_), tokens);
      for (int f = 0; f < slices.parts; ++f) std::fill_n(data + slices.offset(f), slices.size(f), f);
      of_tokens = ConstTensor::contiguous(DType::i32, {tokens, 1}, data);
    }
    const DispatchCall call{check_,       context_,        communicator_, op,      of_tokens,
                            way.to.dtype, way.to.shape[1], num_experts_,  shards_, multiplies ? &product : nullptr,
                            way.bias};
    return body(call);
  }

 private:
  // Dtypes, n and k, by the product of no rows.
  void check_product(Way way, const TileProduct& product) const {
    check_.require(!has_experts(), "a weight is given, but rows go to experts");
    const bool ints = way.weight.kind() == MatmulWeight::integers;
    const size_t count = ints ? way.weight.integers().size() : way.weight.packed().size();
    check_.require(count == 1, "the weight has ", count, " matrices, but must have 1");
    way.from.shape[0] = way.to.shape[0] = 0;
    way.from.data = nullptr, way.to.data = nullptr;
    if (check_.ok()) check_.require(product(way.from, {}, 0, way.bias, way.to));
  }

  ShapeCheck& check_;
  Context& context_;
  Communicator::Impl& communicator_;
  const AttentionFfnOptions& options_;
  std::array<int64_t, kMaxRanks> experts_ = {};
  ExpertShardOptions shards_ = {};
  int64_t num_experts_ = 0;
  bool attends_ = false;
};

Status to_ffn(ShapeCheck& check, Context& context, Communicator::Impl& own, const AttentionToFfnInputs& in,
              const MoeDispatchOutputs& outputs, const AttentionFfnOptions& options) {
  const TwoKinds kinds(check, context, own, options);
  if (!check.ok()) return check.status();
  const bool multiplies = moe::is_there(in.weight);
  check.tensor("x", in.x).dims({"tokens", multiplies ? "k" : "hidden"});
  kinds.check_ids(in.topk_ids);
  auto rows = check.output("rows", outputs.rows).dims({"rows", "hidden"});
  if (!multiplies) rows.dtype({in.x.dtype});
  if (check.ok()) kinds.check_roles("x", in.x.shape[0], "outputs.rows", outputs.rows.shape[0]);
  return kinds.run(Mc2Operator::attention_to_ffn, in.topk_ids, in.x.shape[0], {in.weight, in.bias, in.x, outputs.rows},
                   [&](const DispatchCall& call) { return dispatch(call, in.x, outputs); });
}

Status to_attention(ShapeCheck& check, Context& context, Communicator::Impl& own, const FfnToAttentionInputs& in,
                    const Tensor& out, const AttentionFfnOptions& options) {
  const TwoKinds kinds(check, context, own, options);
  if (!check.ok()) return check.status();
  const bool multiplies = moe::is_there(in.weight);
  const DType dtype = out.dtype;
  auto rows = check.tensor("rows", in.combine.rows).dims({"rows", multiplies ? "k" : "hidden"});
  if (!multiplies) rows.dtype({dtype});
  kinds.check_ids(in.combine.topk_ids);
  check_weights_and_residual(check, in.combine.topk_weights, in.combine.residual, out, dtype);
  check.require(kinds.has_experts() || !is_given(in.combine.topk_weights),
                "topk_weights are given, but num_experts is 0");
  check.output("out", out).dtype({DType::f32, DType::bf16, DType::f16}).dims({"tokens", "hidden"});
  if (check.ok()) kinds.check_roles("out", out.shape[0], "rows", in.combine.rows.shape[0]);
  return kinds.run(Mc2Operator::ffn_to_attention, in.combine.topk_ids, out.shape[0],
                   {in.weight, in.bias, in.combine.rows, out},
                   [&](const DispatchCall& call) { return combine(call, in.combine, out); });
}

}  // namespace
}  // namespace mc2

Status moe_dispatch(Context& context, Communicator& communicator, const ConstTensor& x, const ConstTensor& topk_ids,
                    int64_t num_experts, const MoeDispatchOutputs& outputs, const ExpertShardOptions& options) {
  constexpr auto op = Mc2Operator::moe_dispatch;
  return mc2::alone(to_string(op), communicator, [&](ShapeCheck& check, Communicator::Impl& own) -> Status {
    check.tensor("x", x).dims({"tokens", "hidden"});
    check.tensor("topk_ids", topk_ids).dtype({DType::i64, DType::i32}).dims({"tokens", "top_k"});
    check.output("rows", outputs.rows).dtype({x.dtype}).dims({"rows", "hidden"});
    if (!check.ok()) return check.status();
    const mc2::DispatchCall call{check, context, own, op, topk_ids, x.dtype, x.shape[1], num_experts, options};
    return mc2::dispatch(call, x, outputs);
  });
}

Status moe_combine(Context& context, Communicator& communicator, const MoeCombineInputs& inputs, int64_t num_experts,
                   const Tensor& out, const ExpertShardOptions& options) {
  constexpr auto op = Mc2Operator::moe_combine;
  return mc2::alone(to_string(op), communicator, [&](ShapeCheck& check, Communicator::Impl& own) -> Status {
    const DType dtype = inputs.rows.dtype;
    check.tensor("rows", inputs.rows).dtype({DType::f32, DType::bf16, DType::f16}).dims({"rows", "hidden"});
    check.tensor("topk_ids", inputs.topk_ids).dtype({DType::i64, DType::i32}).dims({"tokens", "top_k"});
    mc2::check_weights_and_residual(check, inputs.topk_weights, inputs.residual, out, dtype);
    check.output("out", out).dtype({dtype}).dims({"tokens", "hidden"});
    if (!check.ok()) return check.status();
    const mc2::DispatchCall call{check,       context, own, op, inputs.topk_ids, dtype, inputs.rows.shape[1],
                                 num_experts, options};
    return mc2::combine(call, inputs, out);
  });
}

Status attention_to_ffn(Context& context, Communicator& communicator, const AttentionToFfnInputs& inputs,
                        const MoeDispatchOutputs& outputs, const AttentionFfnOptions& options) {
  constexpr auto op = Mc2Operator::attention_to_ffn;
  return mc2::alone(to_string(op), communicator, [&](ShapeCheck& check, Communicator::Impl& own) -> Status {
    return mc2::to_ffn(check, context, own, inputs, outputs, options);
  });
}

Status ffn_to_attention(Context& context, Communicator& communicator, const FfnToAttentionInputs& inputs,
                        const Tensor& out, const AttentionFfnOptions& options) {
  constexpr auto op = Mc2Operator::ffn_to_attention;
  return mc2::alone(to_string(op), communicator, [&](ShapeCheck& check, Communicator::Impl& own) -> Status {
    return mc2::to_attention(check, context, own, inputs, out, options);
  });
}

}  // namespace opst

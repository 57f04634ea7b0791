// moe_layer_forward over ranks:
//
//   gating (moe.h), slots sorted by expert, counts of all ranks
//   hidden   = activation(gate_up . rows as they arrive)          [rows of my experts, intermediate]
//   expanded = down . hidden, whose rows go back as they are made [my slots, hidden], in sorted order
//   out      = residual + the weighted sum of a token's rows (moe_finalize), the shared expert as its last slot
//
// Memory: from the workspace, what LayerMemory and hidden take.
#include "mc2/grouped_exchange.h"
#include "moe/layer.h"

namespace opst {

namespace mc2 {
namespace {

struct LayerShape {
  int64_t tokens = 0, hidden = 0, top_k = 0, num_experts = 0;
  bool has_logits = false, has_shared = false;
  int64_t slots() const { return (Size(tokens) * top_k).value(); }
  int64_t columns() const { return top_k + (has_shared ? 1 : 0); }
  int64_t rows() const { return (Size(tokens) * columns()).value(); }  // of expanded
};

struct LayerMemory {
  template <class Pieces>
  LayerMemory(Pieces& pieces, const LayerShape& shape, const Split& experts, int ranks, int rank, int64_t row_bytes)
      : lists(experts, ranks, pieces) {
    const auto integers = [&](int64_t n) { return pieces.template take<int64_t>(n); };
    ids = integers(shape.has_logits ? shape.slots() : 0);
    gates = pieces.template take<float>(shape.has_logits ? shape.slots() : 0);
    slots = {integers(shape.slots()), integers(shape.slots())};
    row_of_slot = integers(shape.rows());
    weights = pieces.template take<float>(shape.rows());
    counts = integers(experts.size(rank));
    one = integers(1);
    expanded = pieces.take_bytes(Arena::round_up(Size(shape.rows()) * row_bytes));
  }
  RowLists lists;
  int64_t* ids = nullptr;
  float* gates = nullptr;
  SortedSlots slots;
  // With the shared expert's slot behind the others.
  int64_t* row_of_slot = nullptr;
  float* weights = nullptr;
  int64_t *counts = nullptr, *one = nullptr;
  void* expanded = nullptr;
};

class Layer {
 public:
  Layer(ShapeCheck& check, Context& context, Communicator::Impl& communicator, const MoeLayerInputs& in,
        const MoeLayerOutputs& out, const MoeLayerOptions& options, const ExpertShardOptions& shards)
      : check_(check),
        context_(context),
        communicator_(communicator),
        in_(in),
        out_(out),
        options_(options),
        shards_(shards) {}

  Status run() {
    check_call();
    if (!check_.ok()) return check_.status();
    const int ranks = communicator_.transport->world_size();
    rank_ = communicator_.transport->rank();
    experts_ = expert_split(check_, shards_, ranks, shape_.num_experts);
    if (check_.ok()) check_counts(check_, communicator_, shape_.num_experts);
    if (check_.ok() && is_given(out_.expert_tokens)) {
      check_.holds("experts", "experts of this rank", experts_.size(rank_));
    }
    if (!check_.ok()) return check_.status();
    const int64_t row_bytes = (Size(shape_.hidden) * size_bytes(in_.x.dtype)).value();
    CountBytes bytes;
    static_cast<void>(LayerMemory(bytes, shape_, experts_, ranks, rank_, row_bytes));
    const Result<WorkspaceLease> lease = context_.impl().workspaces.lease(bytes.bytes.value());
    if (!lease.ok()) return lease.status();
    Arena arena(lease.value());
    LayerMemory memory(arena, shape_, experts_, ranks, rank_, row_bytes);
    return run(memory);
  }

 private:
  static int64_t width(const GroupedWeight& weight) {
    if (weight.kind() == MatmulWeight::unpacked) return weight.stack().rank == 3 ? weight.stack().shape[1] : 0;
    if (weight.kind() == MatmulWeight::packed) return weight.packed().empty() ? 0 : weight.packed()[0].n();
    return weight.integers().empty() ? 0 : weight.integers()[0].n();
  }
  int64_t intermediate(const GroupedWeight& gate_up) const {
    const bool halves = options_.activation == Activation::swiglu || options_.activation == Activation::swiglu_swapped;
    return width(gate_up) / (halves ? 2 : 1);
  }

  void check_call() {
    const DType dtype = in_.x.dtype;
    shape_.has_logits = is_given(in_.logits);
    shape_.has_shared = moe::is_there(in_.shared.down);
    check_.require(!moe::is_there(in_.experts.up) && !moe::is_there(in_.shared.up), "gate and up are given apart");
    check_.require(options_.expert_begin == 0 && options_.expert_end == -1,
                   "a range of experts is given, but ranks own them by ExpertShardOptions");
    check_.tensor("x", in_.x).dtype({DType::f32, DType::bf16, DType::f16}).dims({"tokens", "hidden"});
    check_weights_and_residual(check_, {}, in_.residual, out_.out, dtype);
    if (shape_.has_logits) {
      check_.tensor("logits", in_.logits).dtype({DType::f32, DType::bf16, DType::f16}).dims({"tokens", "num_experts"});
      check_.require(!is_given(in_.topk_ids) && !is_given(in_.topk_weights), "both logits and topk_ids are given");
    } else {
      check_.tensor("topk_ids", in_.topk_ids).dtype({DType::i64, DType::i32}).dims({"tokens", "top_k"});
      check_.tensor("topk_weights", in_.topk_weights).dtype({DType::f32, dtype}).dims({"tokens", "top_k"});
    }
    if (is_given(in_.shared.gate)) check_.tensor("shared.gate", in_.shared.gate).dtype({dtype}).dims({"hidden"});
    check_.output("out", out_.out).dtype({dtype}).dims({"tokens", "hidden"});
    if (is_given(out_.expert_tokens)) {
      check_.output("expert_tokens", out_.expert_tokens).dtype({DType::i64, DType::i32}).dims({"experts of this rank"});
    }
    check_.require(!out_.topk_ids && !out_.topk_weights, "topk_ids or topk_weights are asked for: call moe_gating");
    if (!check_.ok()) return;
    shape_.tokens = in_.x.shape[0], shape_.hidden = in_.x.shape[1];
    shape_.top_k = shape_.has_logits ? options_.top_k : in_.topk_ids.shape[1];
    shape_.num_experts = shape_.has_logits ? in_.logits.shape[1] : options_.num_experts;
    check_.require(shape_.top_k >= 0 && shape_.top_k < kMaxBytes, "top_k is ", shape_.top_k);
  }

  Status run(LayerMemory& memory) {
    RowLists& lists = memory.lists;
    ConstTensor ids = in_.topk_ids, weights = in_.topk_weights;
    if (shape_.has_logits) {
      const auto chosen = Tensor::contiguous(DType::i64, {shape_.tokens, shape_.top_k}, memory.ids);
      const auto gates = Tensor::contiguous(DType::f32, {shape_.tokens, shape_.top_k}, memory.gates);
      check_.require(moe_gating(context_, {.logits = in_.logits, .bias = in_.gate_bias, .finished = in_.finished},
                                {.topk_ids = chosen, .topk_weights = gates}, options_.gating));
      ids = chosen, weights = gates;
    }
    if (check_.ok()) {
      check_.require(sort_slots(context_, ids, shape_.num_experts, memory.slots, lists.counts(rank_)));
    }
    const GroupedExchangeOptions first{.shards = shards_,
                                       .bias = in_.experts.gate_up_bias,
                                       .activation = options_.activation,
                                       .activations = options_.activations};
    const GroupedExchangeOptions second{
        .shards = shards_, .bias = in_.experts.down_bias, .activations = options_.activations};
    const GroupedProduct gate_up{context_, in_.experts.gate_up, first, memory.counts};
    const GroupedProduct down{context_, in_.experts.down, second, memory.counts};
    const int64_t inner = intermediate(in_.experts.gate_up);
    const Tensor hidden = Tensor::contiguous(in_.x.dtype, {0, inner}, nullptr);
    const Tensor expanded = Tensor::contiguous(in_.x.dtype, {shape_.rows(), shape_.hidden}, memory.expanded);
    if (check_.ok()) gate_up.check(check_, in_.x, hidden, experts_.size(rank_));
    if (check_.ok()) down.check(check_, hidden, expanded, experts_.size(rank_));
    if (!check_.ok()) return check_.status();
    Entry entry;
    SignatureText(entry).write("moe_layer_forward(x ", to_string(in_.x.dtype), ", hidden ", shape_.hidden, ", top_k ",
                               shape_.top_k, ", experts ", experts_, ", tile ", shards_.tile_rows, " rows)");
    Status status = exchange_counts(communicator_, "moe_layer_forward", entry, lists);
    if (status.ok()) status = run_experts(memory, entry, gate_up, down, hidden, expanded);
    if (status.ok() && shape_.has_shared) status = run_shared(memory, expanded);
    if (!status.ok()) return status;
    weigh(memory, weights);
    store_expert_rows(lists, rank_, out_.expert_tokens);
    return moe_finalize(
        context_,
        {.expanded = expanded,
         .row_of_slot = ConstTensor::contiguous(DType::i64, {shape_.tokens, shape_.columns()}, memory.row_of_slot),
         .topk_weights = ConstTensor::contiguous(DType::f32, {shape_.tokens, shape_.columns()}, memory.weights),
         .skip1 = in_.residual},
        out_.out);
  }

  // Both products of the experts, with the rows of all ranks.
  Status run_experts(const LayerMemory& memory, const Entry& entry, const GroupedProduct& gate_up,
                     const GroupedProduct& down, Tensor hidden, const Tensor& expanded) {
    const RowLists& lists = memory.lists;
    const int64_t row_bytes = (Size(shape_.hidden) * size_bytes(in_.x.dtype)).value();
    GroupedScatterCall back{.op = Mc2Operator::grouped_matmul_all_to_allv, .x = {}, .out = expanded};
    back.plan = plan_tiles(check_, communicator_, back.op, lists.most_owned(), row_bytes, shards_.tile_rows);
    if (!check_.ok()) return check_.status();
    hidden.shape[0] = lists.owned_rows(rank_);
    const int64_t hidden_bytes = Arena::round_up(Size(hidden.shape[0]) * hidden.shape[1] * size_bytes(hidden.dtype));
    const int64_t scratch_bytes = Arena::round_up(back.plan.tile_bytes);
    const Result<WorkspaceLease> lease = context_.impl().workspaces.lease((Size(hidden_bytes) + scratch_bytes).value());
    if (!lease.ok()) return lease.status();
    Arena arena(lease.value());
    hidden.data = arena.take_bytes(hidden_bytes);
    back.x = hidden;
    back.scratch = static_cast<char*>(arena.take_bytes(scratch_bytes));
    Status status = run_grouped_gather(check_, communicator_, entry, lists, gate_up,
                                       {.op = Mc2Operator::all_to_allv_grouped_matmul,
                                        .x = normal_strides(in_.x),
                                        .out = hidden,
                                        .slot_of_row = memory.slots.slot_of_row,
                                        .top_k = std::max<int64_t>(1, shape_.top_k)});
    return status.ok() ? run_grouped_scatter(communicator_, entry, lists, down, back) : status;
  }

  // Of all tokens: the rows behind the slots.
  Status run_shared(const LayerMemory& memory, const Tensor& expanded) {
    const Tensor hidden = Tensor::contiguous(in_.x.dtype, {shape_.tokens, intermediate(in_.shared.gate_up)}, nullptr);
    const int64_t bytes = Arena::round_up(Size(hidden.shape[0]) * hidden.shape[1] * size_bytes(hidden.dtype));
    const Result<WorkspaceLease> lease = context_.impl().workspaces.lease(bytes);
    if (!lease.ok()) return lease.status();
    Arena arena(lease.value());
    Tensor rows = hidden;
    rows.data = arena.take_bytes(bytes);
    memory.one[0] = shape_.tokens;
    const GroupList all{ConstTensor::contiguous(DType::i64, {1}, memory.one), GroupListType::counts};
    Status status = grouped_matmul(
        context_, in_.x, in_.shared.gate_up, all, rows,
        {.activation = options_.activation, .activations = options_.activations, .batch_invariant = true});
    if (!status.ok()) return status;
    return grouped_matmul(context_, rows, in_.shared.down, all, expanded.narrowed(0, shape_.slots(), shape_.tokens),
                          {.activations = options_.activations, .batch_invariant = true});
  }

  // The weights of all slots, and where their rows are.
  void weigh(const LayerMemory& memory, const ConstTensor& weights) const {
    moe::LayerCall call(in_, options_);
    call.hidden = shape_.hidden;
    const moe::TypeKernels& kernels = moe::kernels_of(context_, in_.x.dtype);
    const int64_t columns = shape_.columns();
    for (int64_t t = 0; t < shape_.tokens; ++t) {
      for (int64_t k = 0; k < shape_.top_k; ++k) {
        memory.row_of_slot[t * columns + k] = memory.slots.row_of_slot[t * shape_.top_k + k];
        memory.weights[t * columns + k] = moe::float_at(weights, t, k);
      }
      if (!shape_.has_shared) continue;
      memory.row_of_slot[t * columns + shape_.top_k] = shape_.slots() + t;
      memory.weights[t * columns + shape_.top_k] = moe::share_of(kernels, call, t);
    }
  }

  ShapeCheck& check_;
  Context& context_;
  Communicator::Impl& communicator_;
  const MoeLayerInputs& in_;
  const MoeLayerOutputs& out_;
  const MoeLayerOptions& options_;
  const ExpertShardOptions& shards_;
  LayerShape shape_ = {};
  Split experts_ = {};
  int rank_ = 0;
};

}  // namespace
}  // namespace mc2

Status moe_layer_forward(Context& context, Communicator& communicator, const MoeLayerInputs& inputs,
                         const MoeLayerOutputs& outputs, const MoeLayerOptions& options,
                         const ExpertShardOptions& shards) {
  return mc2::alone("moe_layer_forward", communicator, [&](ShapeCheck& check, Communicator::Impl& own) -> Status {
    return mc2::Layer(check, context, own, inputs, outputs, options, shards).run();
  });
}

}  // namespace opst

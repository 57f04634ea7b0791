// The routes of a layer: gating into scratch, and the counting sort of moe_routing. Ids that are refused are found while
// slots are counted: only scratch has been written then.
#include <algorithm>

#include "moe/layer.h"

namespace opst::moe {
namespace {

MoeRoutingPlan routing_of(const LayerCall& call) {
  return plan_moe_routing(call.slots() == 0 ? 0 : call.tokens, call.top_k, call.num_local());
}

struct Memory {
  int64_t* ids;
  float* weights;
  int64_t *row_of_slot, *slot_of_row, *token_of_row, *counts, *first_rows;
};
template <class From>
Memory take_memory(From& from, const LayerCall& call) {
  const int64_t slots = call.slots(), chosen = call.has_logits ? slots : 0;
  const auto integers = [&](int64_t n) { return from.template take<int64_t>(n); };
  return {.ids = integers(chosen),
          .weights = from.template take<float>(chosen),
          .row_of_slot = integers(slots),
          .slot_of_row = integers(slots),
          .token_of_row = integers(slots),
          .counts = integers(call.num_local()),
          .first_rows = integers(call.num_local())};
}

}  // namespace

int64_t Routes::bytes(const LayerCall& call) {
  CountBytes from;
  take_memory(from, call);
  return (from.bytes + routing_of(call).scratch_bytes).value();
}

Status Routes::find(Context& context, ShapeCheck& check, const LayerCall& call, Arena arena) {
  const Memory memory = take_memory(arena, call);
  row_of_slot = memory.row_of_slot, slot_of_row = memory.slot_of_row, token_of_row = memory.token_of_row;
  counts = memory.counts;
  ids = call.in.topk_ids, weights = call.in.topk_weights;
  if (call.has_logits) {
    const auto chosen = Tensor::contiguous(DType::i64, {call.tokens, call.top_k}, memory.ids);
    const auto of_chosen = Tensor::contiguous(DType::f32, {call.tokens, call.top_k}, memory.weights);
    ids = chosen, weights = of_chosen;
    const MoeLayerInputs& in = call.in;
    if (call.slots() > 0) {
      const Status status =
          run_gating(context, call.gating(), {.logits = in.logits, .bias = in.gate_bias, .finished = in.finished},
                     {.topk_ids = chosen, .topk_weights = of_chosen});
      if (!status.ok()) return status;
    }
  }
  const MoeRoutingPlan plan = routing_of(call);
  const SlotSort sort(ids, call.begin, call.end, plan, arena);
  ThreadPool& pool = context.impl().pool;
  if (!sort.count(pool, call.num_experts)) {
    sort.require_ids(check, call.num_experts);
    return check.status();
  }
  sort.prefix(counts);
  for (int64_t e = 0; e < call.num_local(); rows += counts[e++]) memory.first_rows[e] = rows;
  const int64_t top_k = call.top_k;
  sort.place(pool, [&](int64_t t, int64_t k, int64_t bin, int64_t place) {
    const int64_t row = bin < 0 ? -1 : memory.first_rows[bin] + place;
    row_of_slot[t * top_k + k] = row;
    if (row < 0) return;
    slot_of_row[row] = t * top_k + k;
    token_of_row[row] = t;
  });
  return {};
}

}  // namespace opst::moe

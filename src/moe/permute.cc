// moe_permute, moe_finalize and its gradient: check -> run. The loops over rows and tokens are here; sums of rows are
// the kernels of combine.h.
#include <algorithm>

#include "moe/moe.h"

namespace opst {

namespace moe {
namespace {

void clear_row(const Tensor& to, int64_t row) {
  clear_elements(row_at(to, row), to.strides[1], to.shape[1], size_bytes(to.dtype));
}

struct Sizes {
  int64_t tokens, top_k, features, num_experts;
};

// Those of moe_finalize but `expanded` and the skips.
void check_slots(ShapeCheck& check, const MoeFinalizeInputs& in, DType dtype) {
  check.tensor("row_of_slot", in.row_of_slot).dtype(kIntegers).dims({"tokens", "top_k"});
  if (in.topk_weights) {
    check.tensor("topk_weights", in.topk_weights).dtype({DType::f32, dtype}).dims({"tokens", "top_k"});
  }
  const bool bias = is_given(in.bias), ids = is_given(in.topk_ids);
  check.require(bias == ids, "bias is ", bias ? "given, but topk_ids are not" : "not given, but topk_ids are");
  if (!check.ok() || !bias) return;
  check.tensor("bias", in.bias).dtype({dtype}).dims({"num_experts", "features"});
  check.tensor("topk_ids", in.topk_ids).dtype(kIntegers).dims({"tokens", "top_k"});
}
void check_slot_indices(ShapeCheck& check, const MoeFinalizeInputs& in, int64_t rows) {
  if (!check.ok()) return;
  check_indices(check, "row_of_slot", in.row_of_slot, rows, "rows");
  if (is_given(in.bias)) check_indices(check, "topk_ids", in.topk_ids, check["num_experts"], "experts");
}

// A token's slots as the kernels read them.
struct SlotLists {
  int64_t *index, *bias_index;
  float *weights, *dots;

  template <class From>
  static SlotLists take(From& from, int64_t count, bool has_dots) {
    return {.index = from.template take<int64_t>(count),
            .bias_index = from.template take<int64_t>(count),
            .weights = from.template take<float>(count),
            .dots = has_dots ? from.template take<float>(count) : nullptr};
  }
  static int64_t bytes(int64_t count, bool has_dots) {
    CountBytes from;
    take(from, count, has_dots);
    return from.bytes.value();
  }
  void read(const MoeFinalizeInputs& in, int64_t t) const {
    for (int64_t k = 0; k < in.row_of_slot.shape[1]; ++k) {
      index[k] = index_at(in.row_of_slot, t, k);
      bias_index[k] = in.bias ? index_at(in.topk_ids, t, k) : -1;
      weights[k] = in.topk_weights ? float_at(in.topk_weights, t, k) : 1;
    }
  }
};

// Which rows some slot has; a row of two slots is refused. Serial: a byte per slot, beside its row of features.
void mark_rows(ShapeCheck& check, const ConstTensor& row_of_slot, uint8_t* marks, int64_t rows) {
  std::fill_n(marks, rows, uint8_t{0});
  if (row_of_slot.shape[1] == 0) return;  // however many tokens
  for (int64_t t = 0; t < row_of_slot.shape[0] && check.ok(); ++t) {
    for (int64_t k = 0; k < row_of_slot.shape[1] && check.ok(); ++k) {
      const int64_t row = index_at(row_of_slot, t, k);
      if (row < 0) continue;
      check.require(marks[row] == 0, "row_of_slot[", t, ", ", k, "] is ", row,
                    ", which another slot has, too: their gradients cannot share a row");
      marks[row] = 1;
    }
  }
}

void backward_tokens(Context& context, const ConstTensor& grad_out, const MoeFinalizeInputs& in,
                     const MoeFinalizeGradients& grad, const Sizes& s, const Scratch& scratch) {
  const CombineRowsBackward kernel = kernels_of(context, grad_out.dtype).combine_backward;
  const bool has_dots = static_cast<bool>(grad.topk_weights);
  context.impl().pool.for_each(s.tokens, rows_per_task(s.top_k * s.features), [&](int64_t t, int worker) {
    Arena arena = scratch.of_worker(worker);
    const SlotLists lists = SlotLists::take(arena, s.top_k, has_dots);
    lists.read(in, t);
    kernel({.grad_out = row_at(grad_out, t),
            .grad_out_stride = grad_out.strides[1],
            .rows = rows_of(in.expanded),
            .bias = rows_of(in.bias),
            .grad_rows = rows_of(grad.expanded),
            .index = lists.index,
            .bias_index = lists.bias_index,
            .weights = lists.weights,
            .dots = lists.dots,
            .count = s.top_k,
            .features = s.features});
    for (int64_t k = 0; has_dots && k < s.top_k; ++k) {
      store_element(grad.topk_weights, t * grad.topk_weights.strides[0] + k * grad.topk_weights.strides[1],
                    lists.dots[k]);
    }
  });
}

// The gradient of the bias of an expert is the weighted sum of grad_out over its slots: combine, of lists that the
// counting sort makes. Tasks are pieces of features, since all slots may be at one expert.
class BiasGradient {
 public:
  BiasGradient(const MoeFinalizeInputs& in, const Tensor& grad_bias)
      : in_(in),
        grad_(grad_bias),
        slots_(in.topk_ids.num_elements()),
        plan_(plan_moe_routing(slots_ == 0 ? 0 : in.topk_ids.shape[0], in.topk_ids.shape[1], grad_bias.shape[0])) {}

  int64_t bytes() const {
    const Size experts = Size(2) * Arena::size_of<int64_t>(grad_.shape[0]);
    return (Size(std::max(plan_.scratch_bytes, experts.value())) + SlotLists::bytes(slots_, false)).value();
  }
  void run(Context& context, const ConstTensor& grad_out, Arena arena) const {
    const int64_t experts = grad_.shape[0], features = grad_.shape[1];
    int64_t* const totals = arena.take<int64_t>(experts);
    int64_t* const first = arena.take<int64_t>(experts);
    const SlotLists lists = SlotLists::take(arena, slots_, false);
    const SlotSort sort(in_.topk_ids, 0, experts, plan_, arena);
    ThreadPool& pool = context.impl().pool;
    sort.count(pool, experts);
    sort.prefix(totals);
    for (int64_t e = 0, sum = 0; e < experts; sum += totals[e++]) first[e] = sum;
    sort.place(pool, [&](int64_t t, int64_t k, int64_t expert, int64_t place) {
      if (expert < 0) return;
      lists.index[first[expert] + place] = t;
      lists.weights[first[expert] + place] = in_.topk_weights ? float_at(in_.topk_weights, t, k) : 1;
    });
    const CombineRows kernel = kernels_of(context, grad_out.dtype).combine;
    const int64_t pieces = ceil_div(features, kPiece);
    pool.parallel_for(experts * pieces, [&](int64_t task, int) {
      const int64_t e = task / pieces, begin = task % pieces * kPiece, n = std::min(kPiece, features - begin);
      const ConstTensor part = grad_out.narrowed(1, begin, n);
      kernel({.rows = rows_of(part),
              .bias = {},
              .index = lists.index + first[e],
              .bias_index = nullptr,
              .weights = lists.weights + first[e],
              .count = totals[e],
              .features = n,
              .skip = {},
              .skip_stride = {},
              .out = row_at(grad_.narrowed(1, begin, n), e),
              .out_stride = grad_.strides[1]});
    });
  }

 private:
  static constexpr int64_t kPiece = 128;  // features: one block of sums in registers at avx512
  const MoeFinalizeInputs& in_;
  const Tensor& grad_;
  const int64_t slots_;
  const MoeRoutingPlan plan_;
};

}  // namespace
}  // namespace moe

using namespace moe;

Status moe_permute(Context& context, const ConstTensor& tokens, const ConstTensor& slot_of_row, int64_t top_k,
                   const Tensor& expanded) {
  return checked("moe_permute", [&](ShapeCheck& check) {
    check.tensor("tokens", tokens).dims({"tokens", "features"});
    check.tensor("slot_of_row", slot_of_row).dtype(kIntegers).dims({"rows"});
    check.output("expanded", expanded).dtype({tokens.dtype}).dims({"rows", "features"});
    check.require(top_k >= 1, "top_k is ", top_k, ", but must be at least 1");
    if (!check.ok()) return;
    check_indices(check, "slot_of_row", slot_of_row, (Size(tokens.shape[0]) * top_k).value(), "slots");
    if (!check.ok() || expanded.num_elements() == 0) return;
    const int64_t features = expanded.shape[1], bytes = size_bytes(tokens.dtype);
    context.impl().pool.for_each(expanded.shape[0], rows_per_task(features), [&](int64_t row, int) {
      const int64_t slot = index_at(slot_of_row, row);
      if (slot < 0) return clear_row(expanded, row);
      copy_elements(row_at(tokens, slot / top_k), tokens.strides[1], row_at(expanded, row), expanded.strides[1],
                    features, bytes);
    });
  });
}

Status moe_finalize(Context& context, const MoeFinalizeInputs& in, const Tensor& out) {
  return checked("moe_finalize", [&](ShapeCheck& check) -> Status {
    const DType dtype = in.expanded.dtype;
    check.tensor("expanded", in.expanded).dtype(kFloats).dims({"rows", "features"});
    check_slots(check, in, dtype);
    if (in.skip1) check.tensor("skip1", in.skip1).dtype({dtype}).dims({"tokens", "features"});
    if (in.skip2) check.tensor("skip2", in.skip2).dtype({dtype}).dims({"tokens", "features"});
    check.output("out", out).dtype({dtype}).dims({"tokens", "features"});
    check_slot_indices(check, in, check["rows"]);
    if (!check.ok() || out.num_elements() == 0) return check.status();

    const int64_t tokens = out.shape[0], features = out.shape[1], top_k = in.row_of_slot.shape[1];
    return with_scratch(context, 0, SlotLists::bytes(top_k, false), [&](const Scratch& scratch) {
      const CombineRows kernel = kernels_of(context, dtype).combine;
      const auto row_or_null = [](const ConstTensor& skip, int64_t t) { return skip ? row_at(skip, t) : nullptr; };
      const int64_t elements = (Size(top_k + 1) * features).value();
      context.impl().pool.for_each(tokens, rows_per_task(elements), [&](int64_t t, int worker) {
        Arena arena = scratch.of_worker(worker);
        const SlotLists lists = SlotLists::take(arena, top_k, false);
        lists.read(in, t);
        kernel({.rows = rows_of(in.expanded),
                .bias = rows_of(in.bias),
                .index = lists.index,
                .bias_index = lists.bias_index,
                .weights = lists.weights,
                .count = top_k,
                .features = features,
                .skip = {row_or_null(in.skip1, t), row_or_null(in.skip2, t)},
                .skip_stride = {in.skip1.strides[1], in.skip2.strides[1]},
                .out = row_at(out, t),
                .out_stride = out.strides[1]});
      });
      return Status();
    });
  });
}

Status moe_finalize_backward(Context& context, const ConstTensor& grad_out, const MoeFinalizeInputs& in,
                             const MoeFinalizeGradients& grad) {
  return checked("moe_finalize_backward", [&](ShapeCheck& check) -> Status {
    const DType dtype = grad_out.dtype;
    const bool reads_expanded = static_cast<bool>(grad.topk_weights);
    check.tensor("grad_out", grad_out).dtype(kFloats).dims({"tokens", "features"});
    if (reads_expanded || in.expanded) {
      check.tensor("expanded", in.expanded).dtype({dtype}).dims({"rows", "features"});
    }
    check_slots(check, in, dtype);
    if (grad.expanded) check.output("grad.expanded", grad.expanded).dtype({dtype}).dims({"rows", "features"});
    if (grad.topk_weights) {
      check.output("grad.topk_weights", grad.topk_weights).dtype({DType::f32, dtype}).dims({"tokens", "top_k"});
    }
    const ConstTensor& slots = in.row_of_slot;
    check.require(
        !grad.expanded || !check.ok() || !may_alias_itself(slots), "row_of_slot ", [&] { return to_string(slots); },
        " has strides [", slots.strides[0], ", ", slots.strides[1],
        "], with which slots share numbers, but their gradients cannot share a row");
    check.require(!grad.bias || is_given(in.bias), "grad.bias is asked for, but there is no bias");
    if (grad.bias) check.output("grad.bias", grad.bias).dtype({dtype}).dims({"num_experts", "features"});
    if (!check.ok()) return check.status();
    check_slot_indices(check, in, in.expanded || grad.expanded ? check["rows"] : kMaxBytes);
    if (!check.ok()) return check.status();

    const Sizes s = {grad_out.shape[0], in.row_of_slot.shape[1], grad_out.shape[1], grad.bias ? grad.bias.shape[0] : 0};
    const bool of_rows = grad.expanded && grad.expanded.num_elements() > 0;
    const bool of_weights = grad.topk_weights && grad.topk_weights.num_elements() > 0;
    const bool of_bias = grad.bias && grad.bias.num_elements() > 0;
    if (!of_rows && !of_weights && !of_bias) return {};
    const int64_t rows = of_rows ? grad.expanded.shape[0] : 0;
    const BiasGradient bias(in, grad.bias);
    const int64_t shared = std::max(Arena::size_of<uint8_t>(rows), of_bias ? bias.bytes() : 0);
    return with_scratch(context, shared, SlotLists::bytes(s.top_k, true), [&](const Scratch& scratch) {
      ThreadPool& pool = context.impl().pool;
      if (of_rows) {
        uint8_t* const marks = scratch.of_call().take<uint8_t>(rows);
        mark_rows(check, in.row_of_slot, marks, rows);
        if (!check.ok()) return check.status();
        pool.for_each(rows, rows_per_task(s.features), [&](int64_t row, int) {
          if (marks[row] == 0) clear_row(grad.expanded, row);
        });
      }
      if (s.top_k > 0 && (of_rows || of_weights)) backward_tokens(context, grad_out, in, grad, s, scratch);
      if (of_bias) bias.run(context, grad_out, scratch.of_call());
      return Status();
    });
  });
}

}  // namespace opst

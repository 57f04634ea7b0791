// Shared by the operators of this room: checks of integers in tensors, lists of a token's slots.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "core/elements.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "machine/context_impl.h"
#include "moe/kernels.h"
#include "opst/moe.h"

namespace opst::moe {

const Kernels& kernels(Isa isa);
inline const TypeKernels& kernels_of(const Context& context, DType dtype) {
  return kernels(context.machine().isa).of[float_index(dtype)];
}
constexpr int64_t padded(int64_t n) { return round_up(n, kMaxLanes); }

inline constexpr std::initializer_list<DType> kIntegers = {DType::i32, DType::i64};
inline constexpr std::initializer_list<DType> kFloats = {DType::f32, DType::bf16, DType::f16};

inline void store_index(const Tensor& tensor, int64_t value, int64_t i, int64_t j = 0) {
  const int64_t offset = i * tensor.strides[0] + (tensor.rank > 1 ? j * tensor.strides[1] : 0);
  if (tensor.dtype == DType::i64)
    static_cast<int64_t*>(tensor.data)[offset] = value;
  else
    static_cast<int32_t*>(tensor.data)[offset] = static_cast<int32_t>(value);
}
// Element i of a tensor [n] of floats, or (i, j) of [m, n].
inline float float_at(const ConstTensor& tensor, int64_t i, int64_t j = 0) {
  const int64_t offset = i * tensor.strides[0] + (tensor.rank > 1 ? j * tensor.strides[1] : 0);
  if (tensor.dtype == DType::bf16) return to_f32(static_cast<const bf16*>(tensor.data)[offset]);
  if (tensor.dtype == DType::f16) return to_f32(static_cast<const f16*>(tensor.data)[offset]);
  return static_cast<const float*>(tensor.data)[offset];
}

// Every integer of a tensor [m] or [m, n] is in [-1, end); `what` says of what there are `end`. After the shapes' check.
void check_indices(ShapeCheck& check, const char* name, const ConstTensor& tensor, int64_t end, const char* what);
// Integers up to `largest` fit into an output's dtype.
void check_fits(ShapeCheck& check, const char* name, const Tensor& tensor, int64_t largest);

// ---- gating.cc

// The checks of a gating's options: of what makes weights, and of the choice of `top_k` among `num_experts`, where `name`
// says in messages what top_k is.
void check_weights(ShapeCheck& check, const MoeGatingOptions& options);
void check_choice(ShapeCheck& check, const MoeGatingOptions& options, int64_t num_experts, int64_t top_k,
                  const char* name);
// nan_is_error: a pass over all logits, behind the check of shapes.
void check_numbers(ShapeCheck& check, const ConstTensor& logits);
// moe_gating of a call that is checked.
Status run_gating(Context& context, const MoeGatingProblem& problem, const MoeGatingInputs& in,
                  const MoeGatingOutputs& out);

// Rows of a tensor [rows, features]; absent without data.
inline Rows rows_of(const ConstTensor& tensor) { return {tensor.data, tensor.strides[0], tensor.strides[1]}; }
// Row t of one.
inline const void* row_at(const ConstTensor& tensor, int64_t t) {
  return static_cast<const char*>(tensor.data) + t * tensor.strides[0] * size_bytes(tensor.dtype);
}
inline void* row_at(const Tensor& tensor, int64_t t) { return const_cast<void*>(row_at(ConstTensor(tensor), t)); }

// Memory for one call, `shared` bytes and `per_worker` for each thread.
struct Scratch {
  char* data = nullptr;
  int64_t shared = 0, per_worker = 0;

  Arena of_call() const { return Arena(data, shared); }
  Arena of_worker(int worker) const { return Arena(data + shared + worker * per_worker, per_worker); }
};
// body(scratch), or the reason why there is no memory.
template <class Body>
Status with_scratch(Context& context, int64_t shared, int64_t per_worker, const Body& body) {
  const Size bytes = Size(per_worker) * context.num_threads() + shared;
  const Result<WorkspaceLease> lease = context.impl().workspaces.lease(bytes.value());
  if (!lease.ok()) return lease.status();
  return body(Scratch{static_cast<char*>(lease.value().data()), shared, per_worker});
}

// The stable counting sort of moe_routing: experts [begin, end) are bins.
struct SlotSort {
  const ConstTensor& ids;  // [tokens, top_k], checked for shape only
  int64_t begin, end;
  const MoeRoutingPlan& plan;
  int64_t* starts = nullptr;   // [num_tasks][end - begin]: counts, then the first place of the task's slots in its bin
  int64_t* refused = nullptr;  // [num_tasks]: the first slot whose id is refused, or -1
  int64_t bins = end - begin;

  SlotSort(const ConstTensor& topk_ids, int64_t first, int64_t last, const MoeRoutingPlan& p, Arena& arena)
      : ids(topk_ids), begin(first), end(last), plan(p) {
    starts = arena.take<int64_t>(Size(p.num_tasks) * bins);
    refused = arena.take<int64_t>(p.num_tasks);
  }
  // Counts. False where an id is not in [-1, num_experts): `refused` tells which.
  bool count(ThreadPool& pool, int64_t num_experts) const;
  void require_ids(ShapeCheck& check, int64_t num_experts) const;
  // Counts become places; slots of each bin to totals[bins].
  void prefix(int64_t* totals) const;
  // place(token, k, bin, place in the bin) for every slot, bin = -1 where it has none.
  template <class Place>
  void place(ThreadPool& pool, const Place& place) const {
    pool.parallel_for(plan.num_tasks, [&](int64_t task, int) {
      int64_t* const next = starts + task * bins;
      for_each_slot(task, [&](int64_t t, int64_t k, int64_t id) {
        const bool inside = id >= begin && id < end;
        place(t, k, inside ? id - begin : -1, inside ? next[id - begin]++ : 0);
      });
    });
  }

 private:
  template <class Body>
  void for_each_slot(int64_t task, const Body& body) const {
    const int64_t last = std::min(ids.shape[0], (task + 1) * plan.tokens_per_task);
    for (int64_t t = task * plan.tokens_per_task; t < last; ++t) {
      for (int64_t k = 0; k < ids.shape[1]; ++k) body(t, k, index_at(ids, t, k));
    }
  }
};

}  // namespace opst::moe

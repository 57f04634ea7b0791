// moe_routing: check -> plan -> run. A stable counting sort in three steps: tasks count the experts of their tokens (and
// find ids that are refused: only scratch has been written then), prefix sums over tasks, tasks write.
#include <algorithm>
#include <limits>

#include "core/text.h"
#include "moe/moe.h"

namespace opst {

namespace moe {

void check_indices(ShapeCheck& check, const char* name, const ConstTensor& tensor, int64_t end, const char* what) {
  if (!check.ok() || tensor.num_elements() == 0) return;  // a matrix without columns may have any number of rows
  const bool matrix = tensor.rank == 2;
  for (int64_t i = 0; check.ok() && i < distinct(tensor, 0); ++i) {
    for (int64_t j = 0; check.ok() && j < (matrix ? distinct(tensor, 1) : 1); ++j) {
      const int64_t index = index_at(tensor, i, j);
      check.require(
          index >= -1 && index < end, name, "[", i, [&] { return matrix ? text(", ", j) : ""; }, "] is ", index,
          ", but there are ", end, " ", what, " (-1 is none)");
    }
  }
}

void check_fits(ShapeCheck& check, const char* name, const Tensor& tensor, int64_t largest) {
  if (!check.ok() || !tensor || tensor.dtype == DType::i64) return;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  check.require(largest <= kMost, name, " is i32, which holds ", kMost, ", but may have to hold ", largest);
}

bool SlotSort::count(ThreadPool& pool, int64_t num_experts) const {
  pool.parallel_for(plan.num_tasks, [&](int64_t task, int) {
    int64_t* const counts = starts + task * bins;
    std::fill_n(counts, bins, 0);
    int64_t bad = -1;
    for_each_slot(task, [&](int64_t t, int64_t k, int64_t id) {
      if (id >= begin && id < end) ++counts[id - begin];
      if ((id < -1 || id >= num_experts) && bad < 0) bad = t * ids.shape[1] + k;
    });
    refused[task] = bad;
  });
  return std::all_of(refused, refused + plan.num_tasks, [](int64_t slot) { return slot < 0; });
}

void SlotSort::require_ids(ShapeCheck& check, int64_t num_experts) const {
  for (int64_t task = 0; task < plan.num_tasks && check.ok(); ++task) {
    if (refused[task] < 0) continue;
    const int64_t t = refused[task] / ids.shape[1], k = refused[task] % ids.shape[1];
    check.require(false, "topk_ids[", t, ", ", k, "] is ", index_at(ids, t, k), ", but there are ", num_experts,
                  " experts (-1 is none)");
  }
}

void SlotSort::prefix(int64_t* totals) const {
  std::fill_n(totals, bins, 0);
  for (int64_t task = 0; task < plan.num_tasks; ++task) {
    int64_t* const counts = starts + task * bins;
    for (int64_t e = 0; e < bins; ++e) {
      const int64_t count = counts[e];
      counts[e] = totals[e];
      totals[e] += count;
    }
  }
}

namespace {

// Rows [begin, end) of nobody.
void clear_slots(ThreadPool& pool, const Tensor& slot_of_row, int64_t begin, int64_t end) {
  if (begin >= end) return;
  pool.for_each(end - begin, kTaskElements, [&](int64_t i, int) { store_index(slot_of_row, -1, begin + i); });
}

// A checked call whose slots are counted: rows and slots of each other.
void write_rows(ThreadPool& pool, const SlotSort& sort, const MoeRoutingOutputs& out, const MoeRoutingOptions& options,
                const int64_t* totals, int64_t* first_rows) {
  const bool dropless = options.capacity == kDropless;
  int64_t rows = 0;
  for (int64_t e = 0; e < sort.bins; ++e) {
    first_rows[e] = rows;
    rows += dropless ? totals[e] : options.capacity;
  }
  const int64_t most = dropless && out.slot_of_row ? std::min(rows, out.slot_of_row.shape[0]) : rows;
  const int64_t top_k = sort.ids.shape[1];
  sort.place(pool, [&](int64_t t, int64_t k, int64_t bin, int64_t place) {
    const bool fits = bin >= 0 && (dropless ? first_rows[bin] + place < most : place < options.capacity);
    const int64_t row = fits ? first_rows[bin] + place : -1;
    store_index(out.row_of_slot, row, t, k);
    if (row >= 0 && out.slot_of_row) store_index(out.slot_of_row, t * top_k + k, row);
  });
  if (!out.slot_of_row) return;
  if (dropless) return clear_slots(pool, out.slot_of_row, most, out.slot_of_row.shape[0]);
  for (int64_t e = 0; e < sort.bins; ++e) {
    clear_slots(pool, out.slot_of_row, first_rows[e] + totals[e], first_rows[e] + options.capacity);
  }
}

void write_tokens(const Tensor& expert_tokens, const int64_t* totals, bool cumulative) {
  int64_t sum = 0;
  for (int64_t e = 0; e < expert_tokens.shape[0]; ++e) {
    sum += totals[e];
    store_index(expert_tokens, cumulative ? sum : totals[e], e);
  }
}

void check_routing(ShapeCheck& check, const ConstTensor& topk_ids, int64_t num_experts, const MoeRoutingOutputs& out,
                   const MoeRoutingOptions& o, int64_t end) {
  check.tensor("topk_ids", topk_ids).dtype(kIntegers).dims({"tokens", "top_k"});
  check.output("row_of_slot", out.row_of_slot).dtype(kIntegers).dims({"tokens", "top_k"});
  if (out.slot_of_row) check.output("slot_of_row", out.slot_of_row).dtype(kIntegers).dims({"rows"});
  if (out.expert_tokens)
    check.output("expert_tokens", out.expert_tokens).dtype(kIntegers).dims({"experts of the range"});
  check.require(num_experts >= 0 && num_experts <= kMaxBytes, "num_experts is ", num_experts,
                ", but must be from 0 to 2^56");
  check.require(o.expert_begin >= 0 && o.expert_begin <= end && end <= num_experts, "the range of experts is [",
                o.expert_begin, ", ", end, "), but must lie in [0, ", num_experts, ")");
  check.require(o.capacity == kDropless || o.capacity >= 1, "capacity is ", o.capacity,
                ", but must be at least 1, or kDropless (-1)");
  if (!check.ok()) return;
  const int64_t experts = end - o.expert_begin, slots = topk_ids.num_elements();
  if (out.expert_tokens) {
    const int64_t size = out.expert_tokens.shape[0];
    check.require(size == experts, "expert_tokens dim 0 is ", size, ", but the range has ", experts, " experts");
  }
  const Size rows = o.capacity == kDropless ? Size(slots) : Size(experts) * o.capacity;
  if (out.slot_of_row && o.capacity != kDropless) {
    const int64_t size = out.slot_of_row.shape[0];
    check.require(Size(size) == rows, "slot_of_row dim 0 (rows) is ", size, ", but ", experts, " experts of capacity ",
                  o.capacity, " have ", rows.value());
  }
  check.require(rows.within_limit(), "capacity is ", o.capacity, ", of ", experts, " experts more than 2^56 rows");
  check_fits(check, "row_of_slot", out.row_of_slot, rows.value());
  check_fits(check, "slot_of_row", out.slot_of_row, slots);
  check_fits(check, "expert_tokens", out.expert_tokens, slots);
}

}  // namespace
}  // namespace moe

using namespace moe;

// Tasks: enough for many threads, so long that zeroing and summing counts costs little beside the slots, and together
// at most kMostTasks rows of counts.
MoeRoutingPlan plan_moe_routing(int64_t tokens, int64_t top_k, int64_t num_experts) {
  constexpr int64_t kTaskSlots = 8192, kMostTasks = 64;
  MoeRoutingPlan plan;
  if (tokens <= 0 || top_k < 0 || num_experts < 0) return plan;
  const Size slots = Size(tokens) * top_k;
  const int64_t least = std::max({kTaskSlots, (Size(4) * num_experts).value(), ceil_div(slots.value(), kMostTasks)});
  plan.tokens_per_task = std::min(tokens, ceil_div(least, std::max<int64_t>(1, top_k)));
  plan.num_tasks = ceil_div(tokens, plan.tokens_per_task);
  plan.scratch_bytes = (Size(Arena::size_of<int64_t>(Size(plan.num_tasks) * num_experts)) +
                        Arena::size_of<int64_t>(plan.num_tasks) + 2 * Arena::size_of<int64_t>(num_experts))
                           .value();
  return plan;
}

std::string to_string(const MoeRoutingPlan& plan) {
  return text(plan.num_tasks, " tasks of ", plan.tokens_per_task, " tokens, scratch ", plan.scratch_bytes, " bytes");
}

Status moe_routing(Context& context, const ConstTensor& topk_ids, int64_t num_experts, const MoeRoutingOutputs& out,
                   const MoeRoutingOptions& options) {
  return checked("moe_routing", [&](ShapeCheck& check) -> Status {
    const int64_t end = options.expert_end == -1 ? num_experts : options.expert_end;
    check_routing(check, topk_ids, num_experts, out, options, end);
    if (!check.ok()) return check.status();

    const int64_t begin = options.expert_begin, experts = end - begin;
    const MoeRoutingPlan plan =
        plan_moe_routing(topk_ids.num_elements() == 0 ? 0 : topk_ids.shape[0], topk_ids.shape[1], experts);
    const int64_t bytes = std::max(plan.scratch_bytes, 2 * Arena::size_of<int64_t>(experts));
    return with_scratch(context, bytes, 0, [&](const Scratch& scratch) {
      Arena arena = scratch.of_call();
      int64_t* const totals = arena.take<int64_t>(experts);
      int64_t* const first_rows = arena.take<int64_t>(experts);
      const SlotSort sort(topk_ids, begin, end, plan, arena);
      ThreadPool& pool = context.impl().pool;
      if (!sort.count(pool, num_experts)) {
        sort.require_ids(check, num_experts);
        return check.status();
      }
      sort.prefix(totals);
      write_rows(pool, sort, out, options, totals, first_rows);
      if (out.expert_tokens) write_tokens(out.expert_tokens, totals, options.cumulative_ends);
      return Status();
    });
  });
}

Status moe_compute_expert_tokens(Context&, const ConstTensor& sorted_ids, const Tensor& expert_tokens) {
  return checked("moe_compute_expert_tokens", [&](ShapeCheck& check) {
    check.tensor("sorted_ids", sorted_ids).dtype(kIntegers).dims({"n"});
    check.output("expert_tokens", expert_tokens).dtype(kIntegers).dims({"num_experts"});
    const int64_t n = check["n"], num_experts = check["num_experts"];
    check_fits(check, "expert_tokens", expert_tokens, n);
    for (int64_t i = 0; check.ok() && i < distinct(sorted_ids, 0); ++i) {
      const int64_t id = index_at(sorted_ids, i), before = i > 0 ? index_at(sorted_ids, i - 1) : 0;
      check.require(id >= 0 && id < num_experts, "sorted_ids[", i, "] is ", id, ", but there are ", num_experts,
                    " experts");
      check.require(id >= before, "sorted_ids[", i, "] is ", id, ", but must be at least sorted_ids[", i - 1,
                    "] = ", before);
    }
    if (!check.ok()) return;
    int64_t end = 0;  // of the ids <= e: they ascend, so a search by halves finds it
    for (int64_t e = 0; e < num_experts; ++e) {
      for (int64_t last = n; end < last;) {
        const int64_t middle = end + (last - end) / 2;
        index_at(sorted_ids, middle) <= e ? end = middle + 1 : last = middle;
      }
      store_index(expert_tokens, end, e);
    }
  });
}

}  // namespace opst

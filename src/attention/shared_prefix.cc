// The plan and the checks of cascades (shared_prefix.h).
#include "attention/shared_prefix.h"

#include <string>

#include "attention/check.h"
#include "core/elements.h"
#include "core/text.h"

namespace opst {
namespace attention {

void check_shared_prefix(ShapeCheck& check, const AttentionInputs& in, AttentionProblem& p) {
  const int64_t keys = p.options.shared_prefix;
  check.require(keys >= kFindShared, "shared_prefix is ", keys,
                ", must be a number of keys, 0, or -1 for what the block table shows");
  check.require(keys <= 0 || p.paged, "shared_prefix is ", keys, ", but there is no block_table");
  const Sequences sequences(in, p);
  for (int64_t b = 0; check.ok() && keys > 0 && b < sequences.num_different(); ++b) {
    const int64_t kv_len = sequences.kv_len(b);
    check.require(kv_len >= keys, "kv_lengths[", b, "] is ", kv_len, ", less than shared_prefix = ", keys);
  }
  const int64_t rows = in.block_table.strides[0] == 0 ? 1 : p.batch;
  for (int64_t b = 1; keys > 0 && b < rows; ++b) {
    for (int64_t i = 0; check.ok() && i < ceil_div(keys, p.block_size); ++i) {
      const int64_t block = index_at(in.block_table, b, i), first = index_at(in.block_table, 0, i);
      check.require(block == first, "block_table[", b, "][", i, "] is ", block, ", but block_table[0][", i, "] is ",
                    first, " and shared_prefix = ", keys);
    }
  }
  if (check.ok()) p.shared_prefix = SharedPrefixes(in, p, {p}).sizes();
}

SharedPrefixPlan share_prefix(const AttentionInputs& in, SequenceGroup& chosen, const Machine& machine) {
  if (chosen.kinds.apart) chosen.problem.shared_prefix = SharedPrefixes(in, chosen.problem, chosen).sizes();
  return plan_shared_prefix(chosen.problem, machine);
}

AttentionProblem prefix_problem(const AttentionProblem& problem) {
  AttentionProblem p = problem;
  p.batch = problem.shared_prefix.groups;
  p.query_len = problem.shared_prefix.queries;
  p.kv_len = problem.shared_prefix.keys;
  p.shared_prefix = {};
  p.heads_side_by_side_kv = false;  // head after head
  p.varlen_q = p.has_tree_mask = false;
  p.options.causal = false;
  p.options.window_left = p.options.window_right = kUnbounded;
  return p;
}

}  // namespace attention

namespace {

const char* without_sharing(const AttentionProblem& p) {
  const SharedPrefixSizes& s = p.shared_prefix;
  for (const int64_t size : {s.groups, s.queries, s.all_queries, s.keys}) {
    if (size < 0 || size > kMaxBytes) return "a size is negative or beyond 2^56";
  }
  if (p.options.shared_prefix == 0) return "options.shared_prefix is 0";
  if (!p.paged) return "keys are not in pages";
  if (s.groups == 0) return "no neighbouring sequences of few queries begin with the same blocks";
  if (p.options.path == AttentionPath::standard) return "options.path is standard";
  if (p.block_mask) return "a block mask has tiles of its own";
  if (p.sparse_indices) return "each query has a list of keys of its own";
  if (p.has_prefix) return "queries see a prefix beside their window";
  return nullptr;
}

}  // namespace

SharedPrefixPlan plan_shared_prefix(const AttentionProblem& p, const Machine& machine) {
  SharedPrefixPlan plan;
  plan.reason = attention::without_plan(p);
  if (plan.reason == nullptr) plan.reason = without_sharing(p);
  if (plan.reason != nullptr) return plan;
  const AttentionProblem of_keys = attention::prefix_problem(p);
  AttentionPlan prefix = plan_attention(of_keys, machine);
  plan.reason = prefix.reason;
  if (prefix.num_tasks == 0) return plan;
  const attention::Geometry& g = attention::geometry_of(machine.isa, prefix.product);
  // The sums of parts are not the loop's own.
  prefix.parts_per_head = 0;
  prefix.scratch_bytes_shared = attention::Layout{of_keys, prefix, g}.shared_bytes();
  plan.prefix = prefix;
  plan.groups = p.shared_prefix.groups;
  plan.keys = p.shared_prefix.keys;
  plan.scratch_bytes_sums = attention::PrefixSums(p, plan.prefix, g).bytes();
  return plan;
}

int64_t SharedPrefixPlan::scratch_bytes(const AttentionPlan& own, int num_threads) const {
  if (groups == 0) return own.scratch_bytes(num_threads);
  return (Size(std::max(own.scratch_bytes(num_threads), prefix.scratch_bytes(num_threads))) + scratch_bytes_sums)
      .value();
}

std::string to_string(const SharedPrefixPlan& plan) {
  if (plan.groups == 0) return text("nothing is shared: ", plan.reason);
  return text(plan.groups, plan.groups == 1 ? " group shares " : " groups share up to ", plan.keys,
              " keys: ", to_string(plan.prefix), ", sums ", plan.scratch_bytes_sums, " bytes");
}

}  // namespace opst

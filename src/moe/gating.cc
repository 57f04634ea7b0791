// moe_gating and its gradient: check -> plan -> run. A task is some tokens; the gate of each (gate.h) works in scratch
// of its worker, and what it found is stored into the outputs' own dtypes and strides.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/text.h"
#include "machine/levels.h"
#include "moe/moe.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_FLOAT_LEVELS, moe, Kernels, kKernels, kernels)

namespace moe {
namespace {

struct GateMemory {
  GateScratch scratch;
  int64_t* ids;             // [top_k]
  float *weights, *chosen;  // [padded(top_k)]
};
template <class From>
GateMemory take_memory(From& from, const MoeGatingProblem& p) {
  const auto floats = [&](int64_t n) { return from.template take<float>(padded(n)); };
  GateMemory m = {};
  m.scratch.logits = floats(p.num_experts);
  m.scratch.scores = floats(p.num_experts);
  m.scratch.choice = floats(p.num_experts);
  m.scratch.maxima = floats(p.num_experts);
  m.scratch.group_scores = floats(p.options.num_groups);
  m.scratch.kept_groups = from.template take<int64_t>(p.options.kept_groups);
  m.scratch.is_kept = from.template take<uint8_t>(p.options.num_groups);
  m.ids = from.template take<int64_t>(p.top_k);
  m.weights = floats(p.top_k);
  m.chosen = floats(p.top_k);
  return m;
}

GateRules rules_of(const MoeGatingProblem& p, const MoeGatingPlan& plan) {
  const MoeGatingOptions& o = p.options;
  return {.num_experts = p.num_experts,
          .top_k = p.top_k,
          .sigmoid = o.scores == GateScores::sigmoid,
          .renormalise = o.renormalise,
          .factor = o.routed_scaling_factor,
          .eps = o.eps,
          .num_groups = o.num_groups,
          .kept_groups = o.kept_groups,
          .top2_sum = o.group_score == GroupScore::top2_sum,
          .all_scores = plan.all_scores};
}

// body(token, memory of the worker)
template <class Body>
void for_each_token(Context& context, const MoeGatingProblem& p, const MoeGatingPlan& plan, const Scratch& scratch,
                    const Body& body) {
  context.impl().pool.parallel_for(plan.num_tasks, [&](int64_t task, int worker) {
    Arena arena = scratch.of_worker(worker);
    const GateMemory memory = take_memory(arena, p);
    const int64_t end = std::min(p.tokens, (task + 1) * plan.tokens_per_task);
    for (int64_t t = task * plan.tokens_per_task; t < end; ++t) body(t, memory);
  });
}

}  // namespace

void check_weights(ShapeCheck& check, const MoeGatingOptions& o) {
  check.require(o.scores == GateScores::softmax || o.scores == GateScores::sigmoid, "scores is ",
                static_cast<int>(o.scores), ", but must be softmax (0) or sigmoid (1)");
  check.require(std::isfinite(o.routed_scaling_factor), "routed_scaling_factor is ", o.routed_scaling_factor,
                ", but must be finite");
  check.require(std::isfinite(o.eps) && o.eps >= 0, "eps is ", o.eps, ", but must be finite and at least 0");
}

void check_choice(ShapeCheck& check, const MoeGatingOptions& o, int64_t num_experts, int64_t top_k, const char* name) {
  check.require(o.group_score == GroupScore::max || o.group_score == GroupScore::top2_sum, "group_score is ",
                static_cast<int>(o.group_score), ", but must be max (0) or top2_sum (1)");
  check.require(o.num_groups >= 1, "num_groups is ", o.num_groups, ", but must be at least 1");
  if (!check.ok()) return;
  check.require(num_experts % o.num_groups == 0, "num_groups is ", o.num_groups,
                ", but must divide num_experts = ", num_experts);
  check.require(o.kept_groups >= 1 && o.kept_groups <= o.num_groups, "kept_groups is ", o.kept_groups,
                ", but must be from 1 to num_groups = ", o.num_groups);
  if (!check.ok()) return;
  const int64_t most = num_experts / o.num_groups * o.kept_groups;
  check.require(top_k <= most, name, " is ", top_k, ", but the choice is among ", most, " experts");
}

void check_numbers(ShapeCheck& check, const ConstTensor& logits) {
  if (!check.ok()) return;
  for (int64_t t = 0; t < distinct(logits, 0) && check.ok(); ++t) {
    for (int64_t e = 0; e < distinct(logits, 1) && check.ok(); ++e) {
      check.require(!std::isnan(float_at(logits, t, e)), "logits[", t, ", ", e, "] is NaN, which nan_is_error refuses");
    }
  }
}

namespace {

// In f32, as the kernels read it.
const float* widened(const ConstTensor& bias, int64_t n, float* to) {
  if (!bias) return nullptr;
  for (int64_t e = 0; e < n; ++e) to[e] = float_at(bias, e);
  return to;
}

void store_scores(const Tensor& scores, int64_t t, const float* from, int64_t n) {
  auto* const to = static_cast<float*>(row_at(scores, t));
  if (scores.strides[1] == 1) {
    std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  for (int64_t e = 0; e < n; ++e) to[e * scores.strides[1]] = from[e];
}

void gate_token(const GateRules& rules, GateToken kernel, const MoeGatingInputs& in, const MoeGatingOutputs& out,
                const float* bias, int64_t t, const GateMemory& m) {
  kernel(rules, {row_at(in.logits, t), in.logits.strides[1], bias, m.ids, m.weights}, m.scratch);
  const bool finished = in.finished && static_cast<const uint8_t*>(in.finished.data)[t * in.finished.strides[0]] != 0;
  for (int64_t k = 0; k < rules.top_k; ++k) {
    store_index(out.topk_ids, finished ? -1 : m.ids[k], t, k);
    const int64_t offset = t * out.topk_weights.strides[0] + k * out.topk_weights.strides[1];
    store_element(out.topk_weights, offset, finished ? 0.0f : m.weights[k]);
  }
  if (out.scores) store_scores(out.scores, t, m.scratch.scores, rules.num_experts);
}

}  // namespace

Status run_gating(Context& context, const MoeGatingProblem& problem, const MoeGatingInputs& in,
                  const MoeGatingOutputs& out) {
  const MoeGatingPlan plan = plan_moe_gating(problem);
  return with_scratch(context, plan.scratch_bytes_shared, plan.scratch_bytes_per_worker, [&](const Scratch& scratch) {
    float* const copy = scratch.of_call().take<float>(padded(problem.num_experts));
    const float* const bias = widened(in.bias, problem.num_experts, copy);
    const GateRules rules = rules_of(problem, plan);
    const GateToken kernel = kernels_of(context, in.logits.dtype).gate;
    for_each_token(context, problem, plan, scratch,
                   [&](int64_t t, const GateMemory& memory) { gate_token(rules, kernel, in, out, bias, t, memory); });
    return Status();
  });
}

}  // namespace moe

using namespace moe;

MoeGatingPlan plan_moe_gating(const MoeGatingProblem& p) {
  MoeGatingPlan plan;
  const MoeGatingOptions& o = p.options;
  const bool groups_by_scores = o.num_groups > 1 && o.group_score == GroupScore::top2_sum;
  plan.all_scores = p.wants_scores || p.has_bias || groups_by_scores;
  plan.reason = p.wants_scores     ? "scores are asked for"
                : p.has_bias       ? "scores and a bias choose"
                : groups_by_scores ? "sums of scores choose groups"
                                   : "logits choose";
  if (p.tokens <= 0 || p.num_experts <= 0 || p.top_k < 0 || o.num_groups <= 0 || o.kept_groups <= 0) return plan;
  plan.tokens_per_task = rows_per_task(p.num_experts);
  plan.num_tasks = ceil_div(p.tokens, plan.tokens_per_task);
  CountBytes bytes;
  take_memory(bytes, p);
  plan.scratch_bytes_per_worker = bytes.bytes.value();
  plan.scratch_bytes_shared = p.has_bias ? Arena::size_of<float>(padded(p.num_experts)) : 0;
  return plan;
}

std::string to_string(const MoeGatingPlan& plan) {
  return text(plan.all_scores ? "all scores" : "scores of the chosen", " (", plan.reason, "), ", plan.num_tasks,
              " tasks of ", plan.tokens_per_task, " tokens, scratch ", plan.scratch_bytes_shared, " + ",
              plan.scratch_bytes_per_worker, " bytes per thread");
}

Status moe_gating(Context& context, const MoeGatingInputs& in, const MoeGatingOutputs& out,
                  const MoeGatingOptions& options) {
  return checked("moe_gating", [&](ShapeCheck& check) -> Status {
    check.tensor("logits", in.logits).dtype(kFloats).dims({"tokens", "num_experts"});
    if (in.bias) check.tensor("bias", in.bias).dtype({DType::f32, in.logits.dtype}).dims({"num_experts"});
    if (in.finished) check.tensor("finished", in.finished).dtype({DType::boolean}).dims({"tokens"});
    check.output("topk_ids", out.topk_ids).dtype(kIntegers).dims({"tokens", "top_k"});
    check.output("topk_weights", out.topk_weights).dtype({DType::f32, in.logits.dtype}).dims({"tokens", "top_k"});
    if (out.scores) check.output("scores", out.scores).dtype({DType::f32}).dims({"tokens", "num_experts"});
    const int64_t tokens = check["tokens"], num_experts = check["num_experts"], top_k = check["top_k"];
    if (check.ok()) check_choice(check, options, num_experts, top_k, "topk_ids dim 1 (top_k)");
    check_weights(check, options);
    check_fits(check, "topk_ids", out.topk_ids, num_experts);
    const int64_t wanted = std::max(out.topk_ids.num_elements(), out.scores ? out.scores.num_elements() : 0);
    if (!check.ok() || wanted == 0) return check.status();
    if (options.nan_is_error) check_numbers(check, in.logits);
    if (!check.ok()) return check.status();

    return run_gating(context,
                      {.tokens = tokens,
                       .num_experts = num_experts,
                       .top_k = top_k,
                       .has_bias = static_cast<bool>(in.bias),
                       .wants_scores = static_cast<bool>(out.scores),
                       .options = options},
                      in, out);
  });
}

Status moe_gating_backward(Context& context, const MoeGatingBackwardInputs& in, const Tensor& grad_logits,
                           const MoeGatingOptions& options) {
  return checked("moe_gating_backward", [&](ShapeCheck& check) -> Status {
    check.tensor("logits", in.logits).dtype(kFloats).dims({"tokens", "num_experts"});
    check.tensor("topk_ids", in.topk_ids).dtype(kIntegers).dims({"tokens", "top_k"});
    check.tensor("grad_topk_weights", in.grad_topk_weights)
        .dtype({DType::f32, in.logits.dtype})
        .dims({"tokens", "top_k"});
    if (in.grad_scores) check.tensor("grad_scores", in.grad_scores).dtype({DType::f32}).dims({"tokens", "num_experts"});
    check.output("grad_logits", grad_logits).dtype({in.logits.dtype}).dims({"tokens", "num_experts"});
    check_weights(check, options);
    check.require(check["top_k"] <= check["num_experts"], "topk_ids dim 1 (top_k) is ", check["top_k"],
                  ", but there are ", check["num_experts"], " experts");
    if (!check.ok()) return check.status();
    check_indices(check, "topk_ids", in.topk_ids, check["num_experts"], "experts");
    if (!check.ok() || grad_logits.num_elements() == 0) return check.status();

    const MoeGatingProblem problem = {.tokens = check["tokens"],
                                      .num_experts = check["num_experts"],
                                      .top_k = check["top_k"],
                                      .has_bias = false,
                                      .wants_scores = true,
                                      .options = {.scores = options.scores,
                                                  .renormalise = options.renormalise,
                                                  .routed_scaling_factor = options.routed_scaling_factor,
                                                  .eps = options.eps}};
    const MoeGatingPlan plan = plan_moe_gating(problem);
    return with_scratch(context, 0, plan.scratch_bytes_per_worker, [&](const Scratch& scratch) {
      const GateRules rules = rules_of(problem, plan);
      const GateTokenBackward kernel = kernels_of(context, in.logits.dtype).gate_backward;
      for_each_token(context, problem, plan, scratch, [&](int64_t t, const GateMemory& m) {
        for (int64_t k = 0; k < problem.top_k; ++k) {
          m.ids[k] = index_at(in.topk_ids, t, k);
          m.weights[k] = m.ids[k] < 0 ? 0 : float_at(in.grad_topk_weights, t, k);
        }
        const bool scores = static_cast<bool>(in.grad_scores);
        kernel(rules,
               {.logits = row_at(in.logits, t),
                .stride = in.logits.strides[1],
                .ids = m.ids,
                .grad_weights = m.weights,
                .grad_scores = scores ? static_cast<const float*>(row_at(in.grad_scores, t)) : nullptr,
                .grad_scores_stride = in.grad_scores.strides[1],
                .grad_logits = row_at(grad_logits, t),
                .grad_logits_stride = grad_logits.strides[1],
                .chosen = m.chosen},
               m.scratch);
      });
      return Status();
    });
  });
}

}  // namespace opst

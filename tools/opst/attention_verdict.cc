#include "attention_verdict.h"

#include <algorithm>
#include <cmath>

#include "attention/judge.h"

namespace opst::tools {

namespace {

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

AttentionVerdict judge_attention(const Context& context, const AttentionCase& data, AttentionPath path, int64_t rows) {
  AttentionProblem problem = data.problem();
  problem.options.path = path;
  const AttentionInputs& in = data.inputs();
  const SharedPrefixPlan shared = plan_shared_prefix(problem, context.machine());
  const AttentionPlan plan = shared.groups > 0 ? shared.prefix : plan_attention(problem, context.machine());
  test::JudgedRows judged{.about = {},
                          .query_dtype = problem.query_dtype,
                          .out_dtype = data.outputs().out.dtype,
                          .storage = test::naive_storage(plan.product),
                          .kv_len = problem.kv_len,
                          .reference = {},
                          .naive = {},
                          .score_scale = 0,
                          .typical_value = 0,
                          .flushed = 0,
                          .rounds_twice = context.machine().isa == Isa::generic};
  double largest_operand = 0;
  for (const ConstTensor& t : {in.query, in.key, in.value}) {
    for (int64_t i = 0; i < t.num_elements(); ++i) {
      const double x = std::fabs(test::get(t, i));
      largest_operand = std::max(largest_operand, x);
      if (t.data == in.value.data) judged.typical_value += x / static_cast<double>(t.num_elements());
    }
  }
  judged.typical_value /= problem.options.dropout.keep_prob;
  // The pairwise dot counts subnormal operands as zero.
  if (problem.kv_dtype == DType::bf16) {
    judged.flushed = static_cast<double>(problem.kv_len) * 0x1p-126 * (1 + largest_operand);
  }
  for (const AttentionCase::RowIndex& r : data.sampled_rows(rows)) {
    judged.reference.push_back(attention::reference_row(in, problem.options, r.batch, r.head, r.query));
    judged.naive.push_back(attention::naive_row(in, problem.options, r.batch, r.head, r.query, judged.storage));
    judged.score_scale = std::max(judged.score_scale, judged.reference.back().score_scale);
    const ConstTensor out = data.row_of(data.outputs().out, r);
    for (int64_t d = 0; d < problem.value_head_dim; ++d) judged.out.push_back(test::get(out, d));
    judged.lse.push_back(test::get(data.row_of(data.outputs().softmax_lse, r), 0));
  }
  const test::JudgedRows::Verdict v = judged.judge();
  return {.ok = v.ok(),
          .rows = static_cast<int64_t>(judged.reference.size()),
          .error = v.out.max_error,
          .bound = v.out.bound,
          .lse_error = v.lse.max_error,
          .lse_bound = v.lse.bound,
          .message = first_line(v.message())};
}

std::vector<GradientVerdict> judge_gradients(const Context& context, const AttentionCase& forward,
                                             const AttentionBackwardCase& data) {
  const AttentionInputs& in = forward.inputs();
  const AttentionProblem& p = forward.problem();
  const DType storage = test::gradient_storage(p.query_dtype, p.kv_dtype, p.query_dtype, context.machine());
  const auto exact = attention::reference_gradients(in, data.grad_out(), {}, p.options);
  const auto magnitude = attention::reference_gradients(in, data.grad_out(), {}, p.options, true);
  const auto naive = attention::naive_gradients(in, data.grad_out(), {}, p.options, storage);
  double score_scale = 0;
  for (const AttentionCase::RowIndex& r : forward.sampled_rows(400)) {
    score_scale = std::max(score_scale, attention::reference_row(in, p.options, r.batch, r.head, r.query).score_scale);
  }
  const test::JudgedGradients judged{.about = {},
                                     .query_dtype = p.query_dtype,
                                     .storage = storage,
                                     .lengths = p.kv_len + p.query_len,
                                     .score_scale = score_scale,
                                     .reference = exact,
                                     .naive = naive,
                                     .magnitude = magnitude};
  std::vector<GradientVerdict> verdicts;
  for (const auto& [name, c] : judged.judge(data.gradients())) {
    verdicts.push_back({name, c.ok, c.max_error, c.bound});
  }
  return verdicts;
}

}  // namespace opst::tools

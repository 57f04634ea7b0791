#include "attention_backward_case.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "attention_verdict.h"
#include "bench.h"
#include "naive_bench.h"
#include "testing/elements.h"
#include "testing/peak.h"
#include "testing/random.h"

namespace opst::tools {

namespace {

// 2 (3 head_dim + 2 value_head_dim) per visible pair and head.
double backward_flops(const AttentionSetup& setup) {
  const AttentionProblem& p = setup.problem;
  return 2.0 * static_cast<double>(3 * p.head_dim + 2 * p.value_head_dim) * visible_pairs(setup) *
         static_cast<double>(p.num_heads);
}

std::string title(const AttentionArguments& arguments, const AttentionSetup& setup, const Context& context) {
  const AttentionProblem& p = setup.problem;
  char text[256];
  std::snprintf(text, sizeof(text),
                "attention backward, %s, batch %lld, heads %lld/%lld, head_dim %lld/%lld, %s%s, %d "
                "thread(s), %s\n",
                arguments.dtype.c_str(), static_cast<long long>(p.batch), static_cast<long long>(p.num_heads),
                static_cast<long long>(p.num_kv_heads), static_cast<long long>(p.head_dim),
                static_cast<long long>(p.value_head_dim), p.options.causal ? "causal" : "full",
                options_text(arguments).c_str(), context.num_threads(), to_string(context.machine().isa));
  return text;
}

std::vector<AttentionSetup> backward_setups(const AttentionArguments& arguments) {
  std::vector<AttentionSetup> setups = attention_setups(arguments);
  const AttentionProblem& p = setups.front().problem;
  if (p.has_tree_mask) usage_error("--backward does not go with --tree: a tree of draft tokens has no gradient");
  if (p.paged && (p.options.page_layout != PageLayout::norm || size_bytes(p.kv_dtype) == 1)) {
    usage_error("--backward does not go with pages of panel32 or of " + setups.front().kv_format +
                ": gradients are taken of norm pages of f32, bf16 and f16");
  }
  return setups;
}

}  // namespace

AttentionBackwardProblem backward_problem(const AttentionProblem& problem) {
  AttentionBackwardProblem b;
  b.forward = problem;
  b.grad_out_dtype = problem.query_dtype;
  b.grad_bias = problem.has_bias;
  b.grad_sinks = problem.has_sinks;
  if (problem.paged) b.num_blocks = BlockTable(problem).num_blocks;
  return b;
}

AttentionBackwardCase::AttentionBackwardCase(Context& context, const AttentionCase& forward, bool run_forward)
    : forward_(forward) {
  if (run_forward) forward.run(context, AttentionPath::automatic);
  const AttentionInputs in = forward.call_inputs();
  const DType real = in.query.dtype == DType::f64 ? DType::f64 : DType::f32;
  saved_.out = forward.outputs().out;
  saved_.softmax_lse = forward.outputs().softmax_lse;
  const Tensor grad_out = make(forward.outputs().out, in.query.dtype);
  test::Random random(7);
  test::fill(grad_out, test::Fill::normal, random);
  saved_.grad_out = grad_out;
  gradients_.grad_query = make(in.query, in.query.dtype);
  gradients_.grad_key = make(in.key, in.key.dtype);
  gradients_.grad_value = make(in.value, in.value.dtype);
  if (in.bias.data != nullptr) gradients_.grad_bias = make(in.bias, real);
  if (in.sinks.data != nullptr) gradients_.grad_sinks = make(in.sinks, real);
  if (forward.pages() != nullptr) {
    dense_key_ = make(forward.inputs().key, in.key.dtype);
    dense_value_ = make(forward.inputs().value, in.value.dtype);
  }
}

int64_t AttentionBackwardCase::size_bytes() const {
  int64_t total = 0;
  for (const Buffer& buffer : buffers_) total += buffer.size_bytes();
  return total;
}

AttentionGradients AttentionBackwardCase::gradients() const {
  AttentionGradients dense = gradients_;
  if (forward_.pages() != nullptr) {
    forward_.pages()->read(gradients_.grad_key, gradients_.grad_value, dense_key_, dense_value_);
    dense.grad_key = dense_key_, dense.grad_value = dense_value_;
  }
  return dense;
}

// A contiguous tensor of the same shape.
Tensor AttentionBackwardCase::make(const ConstTensor& like, DType dtype) {
  Tensor t = Tensor::contiguous(dtype, {}, nullptr);
  t.rank = like.rank;
  int64_t stride = 1;
  for (int d = like.rank - 1; d >= 0; --d) {
    t.shape[d] = like.shape[d];
    t.strides[d] = stride;
    stride *= like.shape[d];
  }
  buffers_.push_back(value_or_fail(Buffer::allocate(stride * opst::size_bytes(dtype))));
  t.data = buffers_.back().data();
  return t;
}

void AttentionBackwardCase::run(Context& context) const {
  const Status status =
      flash_attention_backward(context, forward_.call_inputs(), saved_, gradients_, forward_.problem().options);
  if (!status.ok()) throw CommandError(1, status.message());
}

struct GradientError {
  double largest = std::nan("");  // NaN: not computed, the reference would take minutes
  bool ok = true;
};
static GradientError gradient_error(const Context& context, const AttentionCase& forward,
                                    const AttentionBackwardCase& data) {
  if (backward_flops(forward.setup()) > 2e9) return {};
  GradientError e{.largest = 0};
  for (const GradientVerdict& v : judge_gradients(context, forward, data)) {
    e.largest = std::max(e.largest, v.error);
    e.ok = e.ok && v.ok;
  }
  return e;
}

void bench_attention_backward(const AttentionArguments& arguments, int64_t limit_bytes) {
  const std::vector<AttentionSetup> setups = backward_setups(arguments);
  Context context = make_context(arguments.num_threads);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  bool all_valid = true, first = true;
  NaiveBench naive(limit_bytes, true);
  for (const AttentionSetup& setup : setups) {
    const int64_t kv_len = setup.problem.kv_len;
    const AttentionCase forward(setup);
    const AttentionBackwardCase data(context, forward);
    const AttentionBackwardPlan plan = plan_attention_backward(backward_problem(setup.problem), context.machine());
    const test::Fraction f = test::measure_fraction(context, test::peak_kind(setup.problem.query_dtype),
                                                    backward_flops(setup), [&] { data.run(context); });
    all_valid = all_valid && f.valid;
    const GradientError error = gradient_error(context, forward, data);
    const bool judged = !std::isnan(error.largest);
    context.trim();
    const NaiveTime plain = naive.measure(context, forward, &data);
    if (arguments.json) {
      rows.push_back({{"kv_len", kv_len},
                      {"query_len", setup.problem.query_len},
                      {"backward_ms", f.call_seconds * 1e3},
                      {"backward_gflops", f.flops_per_second / 1e9},
                      {"peak_gflops", f.peak_flops_per_second / 1e9},
                      {"fraction_of_peak", f.fraction},
                      {"fraction_of_peak_quartiles", {f.fraction_q1, f.fraction_q3}},
                      {"peak_valid", f.valid},
                      {"scratch_bytes", plan.scratch_bytes(context.num_threads())},
                      {"naive_ms", plain.json()},
                      {"naive_state", plain.state()},
                      {"naive_bytes", plain.bytes},
                      {"max_abs_error", judged ? nlohmann::ordered_json(error.largest) : nlohmann::ordered_json()},
                      {"error_ok", judged ? nlohmann::ordered_json(error.ok) : nlohmann::ordered_json()},
                      {"plan", to_string(plan)}});
      continue;
    }
    char text[256];
    if (first) {
      write_output(title(arguments, setup, context));
      std::snprintf(text, sizeof(text), "\n%9s  %11s %10s  %11s %10s  %9s %8s  %-15s  %9s\n", "keys", "naive", "memory",
                    "flash", "scratch", "GFLOP/s", "of peak", "middle half", "max error");
      write_output(text);
    }
    first = false;
    char error_text[16] = "-";
    if (judged) std::snprintf(error_text, sizeof(error_text), "%.1e", error.largest);
    char half[32];
    std::snprintf(half, sizeof(half), "%.1f - %.1f %%", f.fraction_q1 * 100, f.fraction_q3 * 100);
    std::snprintf(text, sizeof(text), "%9lld  %11s %10s  %11s %10s  %9.1f %6.1f %%%s %-15s  %9s\n",
                  static_cast<long long>(kv_len), plain.text().c_str(),
                  plain.offered ? human_bytes(plain.bytes).c_str() : "", human_seconds(f.call_seconds).c_str(),
                  human_bytes(plan.scratch_bytes(context.num_threads())).c_str(), f.flops_per_second / 1e9,
                  f.fraction * 100, f.valid ? " " : "*", half, error_text);
    write_output(text);
  }
  if (arguments.json) {
    write_json({{"machine", to_string(context.machine())}, {"threads", context.num_threads()}, {"rows", rows}});
    return;
  }
  write_output("\n" + naive.explanation(setups.front()) +
               "backward has no standard path; max error: of all gradients against float64, -: where that would take "
               "long\n");
  if (!all_valid) write_output("* the reference bursts did not have the machine to themselves\n");
}

void check_attention_backward(const AttentionArguments& arguments, bool spoil) {
  const std::vector<AttentionSetup> setups = backward_setups(arguments);
  Context context = make_context(arguments.num_threads);
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  bool all_ok = true;
  for (const AttentionSetup& setup : setups) {
    const int64_t kv_len = setup.problem.kv_len;
    AttentionCase forward(setup);
    if (spoil) forward.spoil_values(true);
    const AttentionBackwardCase data(context, forward);
    data.run(context);
    if (spoil) forward.spoil_values(false);
    for (const GradientVerdict& v : judge_gradients(context, forward, data)) {
      all_ok = all_ok && v.ok;
      if (arguments.json) {
        results.push_back(
            {{"kv_len", kv_len}, {"gradient", v.name}, {"max_abs_error", v.error}, {"bound", v.bound}, {"ok", v.ok}});
        continue;
      }
      char text[160];
      std::snprintf(text, sizeof(text), "%s  %lld keys, %-10s  error %.2e (bound %.2e)\n", v.ok ? "ok  " : "FAIL",
                    static_cast<long long>(kv_len), v.name, v.error, v.bound);
      write_output(text);
    }
  }
  if (arguments.json) {
    write_json({{"machine", to_string(context.machine())}, {"ok", all_ok}, {"gradients", results}});
  }
  if (!all_ok) run_error("the error exceeds its bound");
}

void plan_attention_backward_command(const AttentionArguments& arguments) {
  const std::vector<AttentionSetup> setups = backward_setups(arguments);
  const Context context = make_context(arguments.num_threads);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const AttentionSetup& setup : setups) {
    const int64_t kv_len = setup.problem.kv_len;
    const AttentionBackwardPlan plan = plan_attention_backward(backward_problem(setup.problem), context.machine());
    if (arguments.json) {
      rows.push_back({{"kv_len", kv_len},
                      {"plan", to_string(plan)},
                      {"block_q", plan.block_q},
                      {"block_kv", plan.block_kv},
                      {"num_tasks", plan.num_tasks},
                      {"scratch_bytes", plan.scratch_bytes(context.num_threads())},
                      {"flops", backward_flops(setup)}});
    } else {
      write_output(std::to_string(kv_len) + " keys: " + to_string(plan) + "\n");
    }
  }
  if (arguments.json) {
    write_json({{"machine", to_string(context.machine())}, {"threads", context.num_threads()}, {"rows", rows}});
  }
}

}  // namespace opst::tools

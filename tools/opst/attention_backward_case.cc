#include "attention_backward_case.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "attention/backward_reference.h"
#include "bench.h"
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

struct Verdict {
  const char* name;
  double error, bound;
};

// The largest error of each gradient, and what twice the error of plain code allows.
std::vector<Verdict> compare(const AttentionCase& forward, const AttentionBackwardCase& data) {
  const AttentionInputs& in = forward.inputs();
  const AttentionOptions& options = forward.problem().options;
  const DType dtype = forward.problem().query_dtype;
  const auto exact = attention::reference_gradients(in, data.grad_out(), {}, options);
  const auto naive = attention::naive_gradients(in, data.grad_out(), {}, options, dtype);
  std::vector<Verdict> verdicts;
  using attention::ReferenceGradients;
  const AttentionGradients& g = data.gradients();
  for (const auto& [got, part, name] : {std::tuple(&g.grad_query, &ReferenceGradients::query, "grad_query"),
                                        std::tuple(&g.grad_key, &ReferenceGradients::key, "grad_key"),
                                        std::tuple(&g.grad_value, &ReferenceGradients::value, "grad_value"),
                                        std::tuple(&g.grad_bias, &ReferenceGradients::bias, "grad_bias"),
                                        std::tuple(&g.grad_sinks, &ReferenceGradients::sinks, "grad_sinks")}) {
    if (got->data == nullptr) continue;
    double error = 0, naive_error = 0, scale = 0;
    for (size_t i = 0; i < (exact.*part).size(); ++i) {
      const double x = std::abs(test::get(*got, static_cast<int64_t>(i)) - (exact.*part)[i]);
      error = std::isnan(x) ? HUGE_VAL : std::max(error, x);
      naive_error = std::max(naive_error, std::abs((naive.*part)[i] - (exact.*part)[i]));
      scale = std::max(scale, std::abs((exact.*part)[i]));
    }
    verdicts.push_back({name, error, 2 * naive_error + 4 * test::epsilon(dtype) * scale});
  }
  return verdicts;
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

}  // namespace

AttentionBackwardProblem backward_problem(const AttentionProblem& problem) {
  AttentionBackwardProblem b;
  b.forward = problem;
  b.grad_out_dtype = problem.query_dtype;
  b.grad_bias = problem.has_bias;
  b.grad_sinks = problem.has_sinks;
  return b;
}

AttentionBackwardCase::AttentionBackwardCase(Context& context, const AttentionCase& forward) : forward_(forward) {
  forward.run(context, AttentionPath::automatic);
  const AttentionInputs& in = forward.inputs();
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
  buffers_.push_back(value_or_fail(Buffer::allocate(stride * size_bytes(dtype))));
  t.data = buffers_.back().data();
  return t;
}

void AttentionBackwardCase::run(Context& context) const {
  const Status status =
      flash_attention_backward(context, forward_.inputs(), saved_, gradients_, forward_.problem().options);
  if (!status.ok()) throw CommandError(1, status.message());
}

void bench_attention_backward(const AttentionArguments& arguments) {
  Context context = make_context(arguments.num_threads);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  bool all_valid = true, first = true;
  for (const int64_t kv_len : key_lengths(arguments)) {
    const AttentionSetup setup = attention_setup(arguments, kv_len);
    const AttentionCase forward(setup);
    const AttentionBackwardCase data(context, forward);
    const AttentionBackwardPlan plan = plan_attention_backward(backward_problem(setup.problem), context.machine());
    const test::Fraction f = test::measure_fraction(context, test::peak_kind(setup.problem.query_dtype),
                                                    backward_flops(setup), [&] { data.run(context); });
    all_valid = all_valid && f.valid;
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
                      {"plan", to_string(plan)}});
      continue;
    }
    char text[256];
    if (first) {
      write_output(title(arguments, setup, context));
      std::snprintf(text, sizeof(text), "\n%9s  %11s %10s  %9s %8s  %s\n", "keys", "ms", "scratch MB", "GFLOP/s",
                    "of peak", "middle half");
      write_output(text);
    }
    first = false;
    std::snprintf(text, sizeof(text), "%9lld  %11.3f %10.1f  %9.1f %6.1f %%%s  %.1f - %.1f %%\n",
                  static_cast<long long>(kv_len), f.call_seconds * 1e3,
                  static_cast<double>(plan.scratch_bytes(context.num_threads())) / 1e6, f.flops_per_second / 1e9,
                  f.fraction * 100, f.valid ? "" : "*", f.fraction_q1 * 100, f.fraction_q3 * 100);
    write_output(text);
  }
  if (arguments.json) {
    write_json({{"machine", to_string(context.machine())}, {"threads", context.num_threads()}, {"rows", rows}});
  } else if (!all_valid) {
    write_output("* the reference bursts did not have the machine to themselves\n");
  }
}

void check_attention_backward(const AttentionArguments& arguments) {
  Context context = make_context(arguments.num_threads);
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  bool all_ok = true;
  for (const int64_t kv_len : key_lengths(arguments)) {
    const AttentionSetup setup = attention_setup(arguments, kv_len);
    const AttentionCase forward(setup);
    const AttentionBackwardCase data(context, forward);
    data.run(context);
    for (const Verdict& v : compare(forward, data)) {
      const bool ok = v.error <= v.bound;
      all_ok = all_ok && ok;
      if (arguments.json) {
        results.push_back(
            {{"kv_len", kv_len}, {"gradient", v.name}, {"max_abs_error", v.error}, {"bound", v.bound}, {"ok", ok}});
        continue;
      }
      char text[160];
      std::snprintf(text, sizeof(text), "%s  %lld keys, %-10s  error %.2e (bound %.2e)\n", ok ? "ok  " : "FAIL",
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
  const Context context = make_context(arguments.num_threads);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const int64_t kv_len : key_lengths(arguments)) {
    const AttentionSetup setup = attention_setup(arguments, kv_len);
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

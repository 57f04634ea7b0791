#include "table_bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "standard_attention.h"
#include "testing/elements.h"
#include "testing/peak.h"

namespace opst::tools {

namespace {

constexpr int64_t kProbeLengths[] = {256, 2048}, kJudgedRows = 8;
constexpr int64_t kCompared = int64_t{1} << 20;  // elements of a tensor, at most

template <class Call>
double seconds_of(const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void fail(const Status& status) {
  if (!status.ok()) status_error(status, 1);
}

double largest_difference(const ConstTensor& a, const ConstTensor& b) {
  double difference = 0, largest = 0;
  const int64_t n = a.num_elements(), step = std::max<int64_t>(n / kCompared, 1);
  for (int64_t i = 0; i < n; i += step) {
    const double x = test::get(a, i), y = test::get(b, i);
    difference = std::isnan(x) || std::isnan(y) ? HUGE_VAL : std::max(difference, std::fabs(x - y));
    largest = std::max(largest, std::fabs(y));
  }
  return largest > 0 ? difference / largest : difference;
}

int64_t bytes_of(const ConstTensor& t) { return t.num_elements() * size_bytes(t.dtype); }

// Both forms on the same tensors.
class Forms {
 public:
  Forms(Context& context, const TableRun& run) : context_(context), run_(run), data_(setup_of(run)) {
    if (run.train) gradients_.emplace(context, data_, false);
  }

  // Whether the memory was there.
  bool make_standard() {
    Result<StandardAttention> made = StandardAttention::create(context_, data_, run_.train);
    if (made.ok()) standard_.emplace(std::move(made.value()));
    return made.ok();
  }
  bool has_standard() const { return standard_.has_value(); }

  double flash() const {
    return seconds_of([&] {
      fail(data_.try_run(context_, AttentionPath::flash));
      if (gradients_) gradients_->run(context_);
    });
  }
  double standard() const {
    return seconds_of([&] {
      fail(standard_->forward(context_));
      if (gradients_) fail(standard_->backward(context_, gradients_->grad_out()));
    });
  }

  // After a call of the form that no other one came before since Context::trim.
  double flash_bytes() const {
    const int64_t tensors = data_.size_bytes() + (gradients_ ? gradients_->size_bytes() : 0);
    return static_cast<double>(tensors + context_.workspace_bytes());
  }
  double standard_bytes() const {
    const AttentionInputs& in = data_.inputs();
    const int64_t tensors = bytes_of(in.query) + bytes_of(in.key) + bytes_of(in.value) +
                            (gradients_ ? bytes_of(gradients_->grad_out()) : 0);
    return static_cast<double>(tensors + standard_->size_bytes() + context_.workspace_bytes());
  }

  AttentionVerdict verdict() const { return judge_attention(context_, data_, AttentionPath::flash, kJudgedRows); }
  double difference() const {
    double most = largest_difference(standard_->out(), data_.outputs().out);
    if (!gradients_) return most;
    const AttentionGradients &ours = gradients_->gradients(), &theirs = standard_->gradients();
    for (const auto tensor :
         {&AttentionGradients::grad_query, &AttentionGradients::grad_key, &AttentionGradients::grad_value}) {
      most = std::max(most, largest_difference(theirs.*tensor, ours.*tensor));
    }
    return most;
  }

 private:
  static AttentionSetup setup_of(const TableRun& run) {
    AttentionSetup setup;
    setup.problem = run.problem;
    setup.kv_format = to_string(run.problem.kv_dtype);
    return setup;
  }

  Context& context_;
  const TableRun& run_;
  AttentionCase data_;
  std::optional<AttentionBackwardCase> gradients_;
  std::optional<StandardAttention> standard_;
};

void enter(const std::vector<double>& seconds, FormResult& form) {
  form.state = FormState::run;
  form.seconds = test::quantile(seconds, 0.5);
  form.q1 = test::quantile(seconds, 0.25), form.q3 = test::quantile(seconds, 0.75);
}

}  // namespace

TableResult measure_run(Context& context, const TableRun& run) {
  TableResult r;
  r.standard.state = run.standard.state, r.flash.state = run.flash.state;
  if (run.flash.state != FormState::run) return r;
  std::optional<Forms> forms;
  r.setup_seconds = seconds_of([&] { forms.emplace(context, run); });
  context.trim();
  std::vector<double> flash = {forms->flash()}, standard;
  r.flash.bytes = forms->flash_bytes();
  if (run.standard.state == FormState::run) {
    context.trim();
    bool made = false;
    r.touch_seconds = seconds_of([&] { made = forms->make_standard(); });
    if (made) {
      standard = {forms->standard()};
      r.standard.bytes = forms->standard_bytes();
    } else {
      r.standard.state = FormState::memory;
    }
  }
  for (int i = 1; i < run.repeats() + run.calls_before(); ++i) {
    if (i <= run.calls_before()) flash.clear(), standard.clear();  // scratch memory was given back before them
    if (forms->has_standard()) standard.push_back(forms->standard());
    flash.push_back(forms->flash());
  }
  r.repeats = static_cast<int>(flash.size());
  enter(flash, r.flash);
  if (forms->has_standard()) {
    enter(standard, r.standard);
    std::vector<double> ratios;
    for (size_t i = 0; i < flash.size(); ++i) ratios.push_back(standard[i] / flash[i]);
    r.speedup = test::quantile(ratios, 0.5);
    r.speedup_q1 = test::quantile(ratios, 0.25), r.speedup_q3 = test::quantile(ratios, 0.75);
    r.difference = forms->difference();
  }
  r.setup_seconds += seconds_of([&] { r.verdict = forms->verdict(); });
  forms.reset();
  context.trim();
  return r;
}

// A short call, then a longer one where a tenth of the budget is enough for it.
TableLimits measure_limits(Context& context, const TablesOptions& options, double memory_bytes) {
  TableLimits limits{.memory_bytes = memory_bytes, .standard = {}, .flash = {}};
  TableRun probe;
  AttentionProblem& p = probe.problem;
  p.query_dtype = p.kv_dtype = options.dtype;
  p.batch = p.num_heads = p.num_kv_heads = 1;
  p.head_dim = p.value_head_dim = options.head_dim;
  for (const int64_t length : kProbeLengths) {
    p.query_len = p.kv_len = std::min(options.max_seq, length);
    for (const bool train : {false, true}) {
      probe.train = train;
      probe.standard.state = probe.flash.state = FormState::run;
      set_bytes(probe);
      if (length > kProbeLengths[0]) settle(probe, limits, options.budget_seconds / 10);
      const TableResult result = measure_run(context, probe);
      learn(probe, result, limits);
      if (result.standard.seconds < 0) continue;
      limits.element_seconds =
          result.setup_seconds * static_cast<double>(size_bytes(options.dtype)) / probe.flash.bytes;
      limits.touch_seconds = result.touch_seconds / probe.standard.bytes;
    }
    if (options.max_seq <= length) break;
  }
  return limits;
}

void learn(const TableRun& run, const TableResult& result, TableLimits& limits) {
  const auto rate_of = [&](FormRates& rates) -> double& { return run.train ? rates.training : rates.forward; };
  if (run.problem.query_len != run.problem.kv_len) return;  // a decoded token is bounded by reading
  if (result.flash.seconds > 0) rate_of(limits.flash) = result.flash.seconds / run.pairs();
  if (result.standard.seconds > 0) rate_of(limits.standard) = result.standard.seconds / run.pairs();
}

}  // namespace opst::tools

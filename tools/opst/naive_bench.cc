#include "naive_bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "testing/elements.h"
#include "testing/peak.h"

namespace opst::tools {

namespace {

constexpr double kLongestSeconds = 5;

// What every head's scores are added: 0, -inf where the structure or the mask hides the pair, or the additive mask.
// Empty where there is nothing to add.
std::vector<float> mask_of(const AttentionCase& data) {
  const AttentionProblem& p = data.problem();
  const AttentionOptions& o = p.options;
  const bool structure = o.causal || o.window_left != kUnbounded || o.window_right != kUnbounded || p.has_prefix;
  if (!structure && !p.has_mask && !p.has_bias) return {};
  const auto prefix = p.has_prefix ? static_cast<int64_t>(test::get(data.inputs().prefix, 0)) : 0;
  std::vector<float> mask(static_cast<size_t>(p.query_len * p.kv_len));
  for (int64_t i = 0; i < p.query_len; ++i) {
    const int64_t at = o.alignment == CausalAlignment::top_left ? i : i + p.kv_len - p.query_len;
    const int64_t right = o.causal ? std::min<int64_t>(o.window_right, 0) : o.window_right;
    for (int64_t j = 0; j < p.kv_len; ++j) {
      const int64_t n = i * p.kv_len + j, after = j - at;
      const bool inside =
          (o.window_left == kUnbounded || -after <= o.window_left) && (right == kUnbounded || after <= right);
      bool seen = inside || j < prefix;
      if (p.has_mask) seen = seen && test::get(data.inputs().mask, n) != 0;
      float x = p.has_bias ? static_cast<float>(test::get(data.inputs().bias, n)) : 0.0f;
      if (!seen) x = -HUGE_VALF;
      mask[static_cast<size_t>(n)] = x;
    }
  }
  return mask;
}

bool offered(const AttentionSetup& setup) {
  const AttentionProblem& p = setup.problem;
  return setup.sequences.empty() && setup.block_mask == nullptr && setup.selected == nullptr && setup.tree == nullptr &&
         !p.paged && p.query_dtype == p.kv_dtype && !p.has_alibi && p.options.softcap == 0 &&
         p.options.dropout.keep_prob == 1;
}

// Only shapes and dtype.
test::NaiveProblem shapes_of(const AttentionProblem& p, int64_t query_len, int64_t kv_len) {
  test::NaiveProblem n;
  n.query = ConstTensor::contiguous(p.query_dtype, {p.batch, p.num_heads, query_len, p.head_dim}, nullptr);
  n.key = ConstTensor::contiguous(p.query_dtype, {p.batch, p.num_kv_heads, kv_len, p.head_dim}, nullptr);
  n.value = ConstTensor::contiguous(p.query_dtype, {p.batch, p.num_kv_heads, kv_len, p.value_head_dim}, nullptr);
  return n;
}

}  // namespace

std::string NaiveTime::text() const {
  if (!offered) return "-";
  if (!fits) return "no fit";
  if (seconds >= 0) return human_seconds(seconds);
  return "~" + human_seconds(expected_seconds);
}

const char* NaiveTime::state() const {
  return !offered ? "option" : !fits ? "memory" : seconds < 0 ? "time" : "measured";
}

nlohmann::ordered_json NaiveTime::json() const {
  return seconds >= 0 ? nlohmann::ordered_json(seconds * 1e3) : nlohmann::ordered_json();
}

NaiveTime NaiveBench::measure(Context& context, const AttentionCase& data, const AttentionBackwardCase* gradients) {
  NaiveTime time;
  const AttentionProblem& p = data.problem();
  time.offered = offered(data.setup());
  if (!time.offered) return time;
  time.bytes = test::NaiveAttention::bytes(shapes_of(p, p.query_len, p.kv_len), backward_);
  const double pairs = static_cast<double>(p.query_len) * static_cast<double>(p.kv_len);
  const double flops = pairs * static_cast<double>(p.batch * p.num_heads * (p.head_dim + p.value_head_dim));
  time.expected_seconds = seconds_per_flop_ * flops;
  time.fits = time.bytes + static_cast<int64_t>(pairs) * 4 <= limit_bytes_;
  if (!time.fits || time.expected_seconds > kLongestSeconds) return time;

  const std::vector<float> mask = mask_of(data);
  const AttentionCase own(data.setup());  // outputs of its own: those of `data` have been judged
  test::NaiveProblem problem{.query = own.inputs().query,
                             .key = own.inputs().key,
                             .value = own.inputs().value,
                             .out = own.outputs().out,
                             .scale = 1 / std::sqrt(static_cast<double>(p.head_dim)),
                             .mask = mask.empty() ? nullptr : mask.data()};
  test::NaiveAttention naive(problem, backward_);
  if (!naive.ok()) {
    time.fits = false;
    return time;
  }
  if (backward_) naive.forward(context);
  const auto run = [&] {
    const auto start = std::chrono::steady_clock::now();
    if (backward_) {
      const AttentionGradients& g = gradients->gradients();
      naive.backward(context, {gradients->grad_out(), g.grad_query, g.grad_key, g.grad_value});
    } else {
      naive.forward(context);
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const double first = run();  // touches the memory
  std::vector<double> seconds;
  const int runs = first > 1 ? 0 : first > 0.05 ? 3 : 11;
  for (int i = 0; i < runs; ++i) seconds.push_back(run());
  time.seconds = seconds.empty() ? first : test::quantile(seconds, 0.5);
  seconds_per_flop_ = time.seconds / flops;
  return time;
}

std::string NaiveBench::explanation(const AttentionSetup& setup) const {
  if (!offered(setup)) return "naive: not for these options (-)\n";
  const AttentionProblem& p = setup.problem;
  const auto fits = [&](int64_t length) {
    const int64_t queries = p.query_len == p.kv_len ? length : p.query_len;
    const double pairs = static_cast<double>(queries) * static_cast<double>(length);
    if (pairs * static_cast<double>(p.batch * p.num_heads) > 0x1p52) return false;
    return test::NaiveAttention::bytes(shapes_of(p, queries, length), backward_) + static_cast<int64_t>(pairs) * 4 <=
           limit_bytes_;
  };
  int64_t longest = 0;
  for (int64_t step = int64_t{1} << 40; step > 0; step /= 2) longest += fits(longest + step) ? step : 0;
  char text[512];
  std::snprintf(
      text, sizeof(text),
      "naive: what people write, three steps through memory and exp of the C library, same threads (~: expected, "
      "not run,\nbeyond %.0f s); its memory reaches the limit of %s at %lld keys\n",
      kLongestSeconds, human_bytes(limit_bytes_).c_str(), static_cast<long long>(longest));
  return text;
}

}  // namespace opst::tools

#include "moe_layer_verdict.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "moe/layer_reference.h"
#include "moe_layer_case.h"
#include "testing/elements.h"

namespace opst::tools {

namespace {

using reference::Doubles;
using reference::Indices;

// Tokens compared, forward and backward, and experts whose weights' gradients are.
constexpr int64_t kMostTokens = 64, kMostGradientTokens = 16, kMostExperts = 2;

Doubles row_of(const Tensor& tensor, int64_t i) { return test::to_doubles(tensor.narrowed(0, i, 1)); }

// exact: in float64. naive: the same with each row between rounded to its type, as plain steps do.
struct Pair {
  Doubles exact, naive;
  explicit Pair(size_t size = 0) : exact(size), naive(size) {}
};

double largest_of(const Doubles& values) {
  double largest = 0;
  for (const double value : values) largest = std::max(largest, std::fabs(value));
  return largest;
}

// Twice what rounding the rows between costs at most here, and one unit of theirs, since few results may be lucky; one
// rounding of the result; and sums of k products in f32. Of the largest result, or of `terms` whose difference it is.
struct Rule {
  DType rows, result;
  int64_t k;
  double terms = 0;
};
void judge(Judged& judged, const Doubles& got, const Pair& want, const Rule& rule) {
  double largest = std::max(rule.terms, largest_of(want.exact)), apart = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    apart = std::max(apart, std::fabs(want.naive[i] - want.exact[i]));
  }
  const double of_sums = kRoundingF32 * (16 + 2 * std::sqrt(static_cast<double>(rule.k))) * largest,
               of_rows = 2 * apart + test::epsilon(rule.rows) * largest;
  for (size_t i = 0; i < got.size(); ++i) {
    judged.take(got[i], want.exact[i],
                of_rows + of_sums + test::epsilon(rule.result) * std::fabs(want.exact[i]) + 1e-30);
  }
}

Doubles rounded(Doubles row, DType dtype) {
  uint64_t bits = 0;
  for (double& value : row) {
    test::set(dtype, &bits, 0, value);
    value = test::get(dtype, &bits, 0);
  }
  return row;
}

// To 255 steps, as dynamic_quant does.
Doubles rounded_to_int8(Doubles row) {
  const double largest = largest_of(row);
  for (double& value : row) value = largest == 0 ? 0 : std::nearbyint(value * 127 / largest) * largest / 127;
  return row;
}

double silu(double x) { return x / (1 + std::exp(-x)); }

// The experts one by one, and behind them the shared one, in float64.
class Experts {
 public:
  Experts(Context& context, const MoeCase& data) : context_(context), data_(data) {}

  int64_t count() const { return data_.arguments.experts + (data_.has_shared() ? 1 : 0); }
  bool is_shared(int64_t e) const { return e == data_.arguments.experts; }
  reference::LayerExperts operator[](int64_t e) const {
    const MoeArguments& a = data_.arguments;
    if (is_shared(e)) {
      return {a.shared,
              data_.shared_gate_up_weights->values(context_, 0),
              data_.shared_down_weights->values(context_, 0),
              {},
              {}};
    }
    return {a.intermediate, data_.gate_up_weights.values(context_, e), data_.down_weights.values(context_, e), {}, {}};
  }
  // The slot of token t that has expert e, -1 where none has. The shared expert's is top_k.
  int64_t slot(int64_t t, int64_t e) const {
    const int64_t top_k = data_.arguments.top_k;
    for (int64_t k = 0; k < top_k; ++k) {
      if (static_cast<int64_t>(test::get(data_.ids, t * top_k + k)) == e) return k;
    }
    return is_shared(e) ? top_k : -1;
  }
  // The weights of a token's slots by the choice that gating made, the shared expert's behind them.
  Doubles weights(int64_t t) const {
    Doubles w = reference::gate_weights(row_of(data_.logits, t), ids(t), data_.arguments.gating());
    w.push_back(1);
    return w;
  }
  Indices ids(int64_t t) const {
    Indices all;
    for (const double id : row_of(data_.ids, t)) all.push_back(static_cast<int64_t>(id));
    return all;
  }

 private:
  Context& context_;
  const MoeCase& data_;
};

// out += weight * expert of x, its rows rounded to the types of the case.
void add_rounded(const MoeCase& data, const reference::LayerExperts& w, const Doubles& x, double weight, double* out) {
  const auto hidden = static_cast<int64_t>(x.size()), n = w.intermediate;
  const Doubles tokens = data.integers() ? rounded_to_int8(x) : x;
  Doubles h(static_cast<size_t>(n)), y(x.size());
  for (int64_t j = 0; j < n; ++j) {
    h[static_cast<size_t>(j)] =
        silu(reference::dot(&w.gate_up[static_cast<size_t>(j * hidden)], tokens.data(), hidden)) *
        reference::dot(&w.gate_up[static_cast<size_t>((n + j) * hidden)], tokens.data(), hidden);
  }
  h = data.integers() ? rounded_to_int8(h) : rounded(h, data.activated.dtype);
  for (int64_t f = 0; f < hidden; ++f) {
    y[static_cast<size_t>(f)] = reference::dot(&w.down[static_cast<size_t>(f * n)], h.data(), n);
  }
  y = rounded(y, data.expert_out.dtype);
  for (size_t f = 0; f < y.size(); ++f) out[f] += weight * y[f];
}

Judged judge_forward(Context& context, const MoeCase& data, const Tensor& out) {
  const Experts experts(context, data);
  std::vector<int64_t> tokens;
  for_each_sample(data.tokens(), kMostTokens, [&](int64_t t) { tokens.push_back(t); });
  const auto hidden = static_cast<size_t>(data.arguments.hidden);
  Pair want(tokens.size() * hidden);
  for (int64_t e = 0; e < experts.count(); ++e) {
    reference::LayerExperts weights;
    for (size_t i = 0; i < tokens.size(); ++i) {
      const int64_t k = experts.slot(tokens[i], e);
      if (k < 0) continue;
      if (weights.intermediate == 0) weights = experts[e];
      const Doubles x = row_of(data.x, tokens[i]);
      const double weight = experts.weights(tokens[i])[static_cast<size_t>(k)];
      reference::add_expert(weights, 0, data.arguments.hidden, x.data(), weight, &want.exact[i * hidden]);
      add_rounded(data, weights, x, weight, &want.naive[i * hidden]);
    }
  }
  want.naive = rounded(want.naive, out.dtype);
  Doubles got;
  for (const int64_t t : tokens) {
    const Doubles row = row_of(out, t);
    got.insert(got.end(), row.begin(), row.end());
  }
  Judged judged;
  judge(judged, got, want,
        {out.dtype, out.dtype, data.arguments.hidden + std::max(data.arguments.intermediate, data.arguments.shared)});
  return judged;
}

// What a row gives to the gradients: those of its token, of its weight in the sum, and of its expert's weights.
using Round = std::function<Doubles(Doubles)>;
struct RowGradients {
  Doubles x = {}, both = {}, weighted_hidden = {};  // [hidden], d gate_up . x [2 n], w h [n]
  double weight = 0;
};
RowGradients row_gradients(const reference::LayerExperts& e, const Doubles& x, const Doubles& g, double weight,
                           const Round& round) {
  const auto hidden = static_cast<int64_t>(x.size()), n = e.intermediate;
  Doubles both(static_cast<size_t>(2 * n)), h(static_cast<size_t>(n)), dh(static_cast<size_t>(n));
  for (int64_t j = 0; j < 2 * n; ++j) {
    both[static_cast<size_t>(j)] = reference::dot(&e.gate_up[static_cast<size_t>(j * hidden)], x.data(), hidden);
  }
  both = round(both);
  for (size_t j = 0; j < h.size(); ++j) h[j] = silu(both[j]) * both[j + h.size()];
  h = round(h);
  for (size_t f = 0; f < g.size(); ++f) {
    for (size_t j = 0; j < dh.size(); ++j) dh[j] += g[f] * e.down[f * dh.size() + j];
  }
  dh = round(dh);
  RowGradients r{.x = Doubles(x.size()), .weight = reference::dot(dh.data(), h.data(), n)};
  Doubles grad(both.size());
  for (size_t j = 0; j < h.size(); ++j) {
    const double s = 1 / (1 + std::exp(-both[j])), d = weight * dh[j];
    grad[j] = d * both[j + h.size()] * s * (1 + both[j] * (1 - s));
    grad[j + h.size()] = d * silu(both[j]);
    h[j] *= weight;
  }
  r.both = round(grad), r.weighted_hidden = round(h);
  for (size_t j = 0; j < grad.size(); ++j) {
    for (size_t i = 0; i < x.size(); ++i) r.x[i] += r.both[j] * e.gate_up[j * x.size() + i];
  }
  r.x = round(r.x);
  return r;
}

// Sums over the rows of one kind of arithmetic.
struct Sums {
  Doubles x, weights, gate_up, down;
  void add(const RowGradients& r, const Doubles& x_row, const Doubles& g, bool of_weights) {
    for (size_t j = 0; of_weights && j < r.both.size(); ++j) {
      for (size_t i = 0; i < x_row.size(); ++i) gate_up[j * x_row.size() + i] += r.both[j] * x_row[i];
    }
    for (size_t f = 0; of_weights && f < g.size(); ++f) {
      for (size_t j = 0; j < r.weighted_hidden.size(); ++j) {
        down[f * r.weighted_hidden.size() + j] += g[f] * r.weighted_hidden[j];
      }
    }
  }
};

// d sum(grad_weights * weights) / d logits, by central differences.
Doubles grad_logits(Doubles logits, const Indices& ids, const MoeGatingOptions& options, const double* grad_weights) {
  constexpr double kStep = 1e-5;
  const auto loss = [&] {
    return reference::dot(reference::gate_weights(logits, ids, options).data(), grad_weights,
                          static_cast<int64_t>(ids.size()));
  };
  Doubles gradient;
  for (double& logit : logits) {
    const double at = logit;
    logit = at + kStep;
    const double above = loss();
    logit = at - kStep;
    gradient.push_back((above - loss()) / (2 * kStep));
    logit = at;
  }
  return gradient;
}

class GradientJudge {
 public:
  GradientJudge(Context& context, const MoeCase& data, const MoeLayerCase& call)
      : data_(data), call_(call), experts_(context, data) {
    for_each_sample(data.tokens(), kMostGradientTokens, [&](int64_t t) { tokens_.push_back(t); });
    exact_.x.resize(tokens_.size() * hidden()), naive_.x = exact_.x;
    exact_.weights.resize(tokens_.size() * slots()), naive_.weights = exact_.weights;
  }

  std::vector<MoeVerdict> verdicts() {
    MoeVerdict of_gate_up{"grad gate_up", {}}, of_down{"grad down", {}}, of_shared_gate_up{"grad shared_gate_up", {}},
        of_shared_down{"grad shared_down", {}};
    int64_t judged = 0;
    for (int64_t e = 0; e < experts_.count(); ++e) {
      const bool shared = experts_.is_shared(e), of_weights = shared || judged < kMostExperts;
      if (!add_rows(e, of_weights) || !of_weights) continue;
      judged += !shared;
      const MoeLayerGradients& got = call_.gradients;
      judge_weights((shared ? of_shared_gate_up : of_gate_up).judged,
                    shared ? got.shared_gate_up.narrowed(0, 0, 1) : got.gate_up.narrowed(0, e, 1), exact_.gate_up,
                    naive_.gate_up);
      judge_weights((shared ? of_shared_down : of_down).judged,
                    shared ? got.shared_down.narrowed(0, 0, 1) : got.down.narrowed(0, e, 1), exact_.down, naive_.down);
    }
    std::vector<MoeVerdict> all = {judge_tokens(), judge_logits(), of_gate_up, of_down};
    if (data_.has_shared()) all.push_back(of_shared_gate_up), all.push_back(of_shared_down);
    return all;
  }

 private:
  size_t hidden() const { return static_cast<size_t>(data_.arguments.hidden); }
  size_t slots() const { return static_cast<size_t>(data_.arguments.top_k) + 1; }
  int64_t longest_sum() const {
    return data_.tokens() + data_.arguments.hidden + 2 * std::max(data_.arguments.intermediate, data_.arguments.shared);
  }

  // The rows of the expert that belong to tokens_, and with of_weights all of them. False: it has none.
  bool add_rows(int64_t e, bool of_weights) {
    reference::LayerExperts weights;
    const Round exact = [](Doubles row) { return row; };
    const Round naive = [&](Doubles row) { return rounded(std::move(row), data_.x.dtype); };
    for (int64_t t = 0; t < data_.tokens(); ++t) {
      const auto sampled = std::find(tokens_.begin(), tokens_.end(), t);
      const int64_t k = experts_.slot(t, e);
      if (k < 0 || (!of_weights && sampled == tokens_.end())) continue;
      if (weights.intermediate == 0) {
        weights = experts_[e];
        for (Sums* sums : {&exact_, &naive_}) {
          sums->gate_up.assign(weights.gate_up.size(), 0), sums->down.assign(weights.down.size(), 0);
        }
      }
      const Doubles x = row_of(data_.x, t), g = row_of(call_.grad_out, t);
      const double weight = experts_.weights(t)[static_cast<size_t>(k)];
      for (const auto& [sums, round] : {std::pair(&exact_, &exact), std::pair(&naive_, &naive)}) {
        const RowGradients row = row_gradients(weights, x, g, weight, *round);
        sums->add(row, x, g, of_weights);
        if (sampled == tokens_.end()) continue;
        const auto i = static_cast<size_t>(sampled - tokens_.begin());
        for (size_t f = 0; f < hidden(); ++f) sums->x[i * hidden() + f] += row.x[f];
        sums->weights[i * slots() + static_cast<size_t>(k)] = row.weight;
      }
    }
    return weights.intermediate > 0;
  }

  void judge_weights(Judged& judged, const Tensor& got, const Doubles& exact, const Doubles& naive) const {
    Pair want;
    want.exact = exact, want.naive = rounded(naive, got.dtype);
    judge(judged, test::to_doubles(got), want, {data_.x.dtype, got.dtype, longest_sum()});
  }

  MoeVerdict judge_rows(const char* name, const Tensor& tensor, const Doubles& exact, const Doubles& naive,
                        double terms = 0) const {
    Pair want;
    want.exact = exact, want.naive = rounded(naive, tensor.dtype);
    Doubles got;
    for (const int64_t t : tokens_) {
      const Doubles row = row_of(tensor, t);
      got.insert(got.end(), row.begin(), row.end());
    }
    MoeVerdict verdict{name, {}};
    judge(verdict.judged, got, want, {data_.x.dtype, tensor.dtype, longest_sum(), terms});
    return verdict;
  }

  MoeVerdict judge_tokens() const { return judge_rows("grad x", call_.gradients.x, exact_.x, naive_.x); }
  MoeVerdict judge_logits() const {
    const auto of_weights = [&](const Doubles& grad_weights) {
      Doubles all;
      for (size_t i = 0; i < tokens_.size(); ++i) {
        const Doubles row = grad_logits(row_of(data_.logits, tokens_[i]), experts_.ids(tokens_[i]),
                                        data_.arguments.gating(), &grad_weights[i * slots()]);
        all.insert(all.end(), row.begin(), row.end());
      }
      return all;
    };
    return judge_rows("grad logits", call_.gradients.logits, of_weights(exact_.weights), of_weights(naive_.weights),
                      largest_of(exact_.weights));
  }

  const MoeCase& data_;
  const MoeLayerCase& call_;
  const Experts experts_;
  std::vector<int64_t> tokens_;
  Sums exact_, naive_;
};

// How many elements have other bits.
void compare_bits(Judged& judged, const Tensor& a, const Tensor& b) {
  const auto size = static_cast<size_t>(size_bytes(a.dtype));
  const auto *left = static_cast<const char*>(a.data), *right = static_cast<const char*>(b.data);
  for (int64_t i = 0; i < a.num_elements(); ++i, left += size, right += size) {
    judged.take(std::memcmp(left, right, size) == 0 ? 0 : 1, 0, 0);
  }
}

std::vector<Tensor> results(const MoeLayerGradients& g) {
  std::vector<Tensor> all = {g.x, g.logits, g.gate_up, g.down};
  if (g.shared_down) all.push_back(g.shared_gate_up), all.push_back(g.shared_down);
  return all;
}

}  // namespace

std::vector<MoeVerdict> check_moe_layer(Context& context, const MoeCase& data, bool backward, bool spoiled) {
  const MoeLayerCase call(data, backward), again(data, backward);
  call.forward(context);
  if (backward) call.backward(context);
  if (spoiled) {
    spoil(call.out);
    for (const Tensor& t : backward ? results(call.gradients) : std::vector<Tensor>()) spoil(t);
  }
  MoeVerdict bits{"layer bits", {}}, gradient_bits{"grad bits", {}};
  compare_bits(bits.judged, call.out, data.out);
  for (const int threads : {1, 2}) {
    Context other = make_context(threads);
    again.forward(other);
    compare_bits(bits.judged, call.out, again.out);
    if (!backward) continue;
    again.backward(other);
    const std::vector<Tensor> first = results(call.gradients), second = results(again.gradients);
    for (size_t i = 0; i < first.size(); ++i) compare_bits(gradient_bits.judged, first[i], second[i]);
  }
  std::vector<MoeVerdict> verdicts = {{"layer", judge_forward(context, data, call.out)}, bits};
  if (!backward) return verdicts;
  for (MoeVerdict& verdict : GradientJudge(context, data, call).verdicts()) verdicts.push_back(std::move(verdict));
  verdicts.push_back(gradient_bits);
  return verdicts;
}

}  // namespace opst::tools

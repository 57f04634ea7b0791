// opst check moe: every step of a mixture's layer against float64, each from what the step before really gave, and the
// one call for all of them.
#include <cmath>
#include <cstdio>

#include "bench.h"
#include "moe/reference.h"
#include "moe_case.h"
#include "moe_layer_verdict.h"
#include "product_bound.h"
#include "testing/elements.h"

namespace opst::tools {

namespace {

constexpr int64_t kMostRows = 8, kMostColumns = 32, kMostTokens = 64;  // compared; rows of each expert

struct Options : MoeArguments {
  bool spoil = false, backward = false;
};

using Doubles = std::vector<double>;

Doubles row_of(const Tensor& tensor, int64_t i) { return test::to_doubles(tensor.narrowed(0, i, 1)); }

// Ids are exact; weights are those of the ids that were given.
Judged judge_gating(const MoeCase& data) {
  Judged judged;
  const int64_t top_k = data.arguments.top_k;
  const MoeGatingOptions options = data.arguments.gating();
  for_each_sample(data.tokens(), kMostTokens, [&](int64_t t) {
    const Doubles logits = row_of(data.logits, t);
    const reference::Indices ids = reference::gate_ids(logits, {}, top_k, options);
    const Doubles weights = reference::gate_weights(logits, ids, options);
    for (int64_t k = 0; k < top_k; ++k) {
      const auto i = static_cast<size_t>(k);
      judged.take(test::get(data.ids, t * top_k + k), static_cast<double>(ids[i]), 0);
      judged.take(test::get(data.topk_weights, t * top_k + k), weights[i], 16 * kRoundingF32 * weights[i] + 1e-37);
    }
  });
  return judged;
}

// The rows of an expert are its slots in ascending order.
Judged judge_routing(const MoeCase& data) {
  Judged judged;
  int64_t row = 0;
  for (int64_t e = 0; e < data.arguments.experts; ++e) {
    const int64_t begin = row;
    for (int64_t slot = 0; slot < data.slots(); ++slot) {
      if (static_cast<int64_t>(test::get(data.ids, slot)) != e) continue;
      judged.take(test::get(data.row_of_slot, slot), static_cast<double>(row), 0);
      judged.take(test::get(data.slot_of_row, row), static_cast<double>(slot), 0);
      ++row;
    }
    judged.take(test::get(data.expert_tokens, e), static_cast<double>(row - begin), 0);
  }
  return judged;
}

// Half a step of each row's scale, and a step where a quotient lies between two.
Judged judge_quantise(const MoeCase& data) {
  Judged judged;
  for_each_sample(data.tokens(), kMostTokens, [&](int64_t t) {
    const Doubles x = row_of(data.x, t), q = row_of(data.x_int8, t);
    const double scale = test::get(data.x_scales, t);
    for (size_t i = 0; i < x.size(); ++i) judged.take(q[i] * scale, x[i], 0.501 * scale);
  });
  return judged;
}

Judged judge_permute(const MoeCase& data) {
  Judged judged;
  const Tensor& tokens = data.integers() ? data.x_int8 : data.x;
  for_each_sample(data.slots(), kMostTokens, [&](int64_t row) {
    const auto token = static_cast<int64_t>(test::get(data.slot_of_row, row)) / data.arguments.top_k;
    const Doubles got = row_of(data.expanded, row), want = row_of(tokens, token);
    for (size_t i = 0; i < got.size(); ++i) judged.take(got[i], want[i], 0);
    if (data.integers()) judged.take(test::get(data.row_scales, row), test::get(data.x_scales, token), 0);
  });
  return judged;
}

// A dot product in float64, and how far f32 may be from it.
struct Dot {
  double sum = 0, bound = 0;
};
Dot dot(const Doubles& x, const Doubles& weights, int64_t row, double scale, bool exact) {
  const auto k = static_cast<int64_t>(x.size());
  double sum = 0, terms = 0, sizes = 0, largest = 0;
  for (int64_t t = 0; t < k; ++t) {
    const double w = weights[static_cast<size_t>(row * k + t)], product = x[static_cast<size_t>(t)] * w;
    sum += product, terms += std::fabs(product), sizes += std::fabs(w);
    largest = std::max(largest, std::fabs(x[static_cast<size_t>(t)]));
  }
  return {sum * scale, scale * (exact ? 4 * kRoundingF32 * std::fabs(sum) : sum_bound(k, terms, largest, sizes))};
}

// body(expert's weights, row) for rows of every expert.
template <class Body>
void for_each_expert_row(Context& context, const MoeCase& data, const RandomWeights& weights, const Body& body) {
  int64_t begin = 0;
  for (int64_t e = 0; e < data.arguments.experts; ++e) {
    const auto rows = static_cast<int64_t>(test::get(data.expert_tokens, e));
    if (rows > 0) {
      const Doubles values = weights.values(context, e);
      for_each_sample(rows, kMostRows, [&](int64_t i) { body(values, begin + i); });
    }
    begin += rows;
  }
}

// What a product of some rows read and gave. Scales are of integers only.
struct Product {
  Tensor x, x_scales, out, out_scales;
};

double scale_of(const Tensor& scales, int64_t row) { return scales ? test::get(scales, row) : 1; }

// A hidden row: swiglu of a row's products with the gate rows of `weights` and with the up rows below them.
void judge_hidden_row(Judged& judged, const MoeCase& data, const Product& p, const Doubles& weights, int64_t row) {
  const Doubles x = row_of(p.x, row), got = row_of(p.out, row);
  const auto half = static_cast<int64_t>(got.size());
  const double scale = scale_of(p.x_scales, row), step = scale_of(p.out_scales, row);
  for_each_sample(half, kMostColumns, [&](int64_t j) {
    const Dot gate = dot(x, weights, j, scale, data.integers()), up = dot(x, weights, half + j, scale, data.integers());
    const double silu = gate.sum / (1 + std::exp(-gate.sum)), want = silu * up.sum;
    // silu's slope is 1.1 at most; exp is right to some units in the last place.
    double bound = 1.1 * gate.bound * std::fabs(up.sum) + std::fabs(silu) * up.bound + 1.1 * gate.bound * up.bound +
                   16 * kRoundingF32 * std::fabs(want) + 1e-30;
    const double value = got[static_cast<size_t>(j)];
    bound += data.integers() ? 0.501 * step : test::epsilon(p.out.dtype) * std::fabs(want);
    judged.take(value * step, want, bound);
  });
}

void judge_down_row(Judged& judged, const MoeCase& data, const Product& p, const Doubles& weights, int64_t row) {
  const Doubles x = row_of(p.x, row), got = row_of(p.out, row);
  for_each_sample(data.arguments.hidden, kMostColumns, [&](int64_t j) {
    const Dot want = dot(x, weights, j, scale_of(p.x_scales, row), data.integers());
    judged.take(got[static_cast<size_t>(j)], want.sum,
                want.bound + test::epsilon(p.out.dtype) * std::fabs(want.sum) + 1e-30);
  });
}

Judged judge_gate_up(Context& context, const MoeCase& data) {
  Judged judged;
  const Product p{data.expanded, data.row_scales, data.activated, data.activated_scales};
  for_each_expert_row(context, data, data.gate_up_weights,
                      [&](const Doubles& weights, int64_t row) { judge_hidden_row(judged, data, p, weights, row); });
  return judged;
}

Judged judge_down(Context& context, const MoeCase& data) {
  Judged judged;
  const Product p{data.activated, data.activated_scales, data.expert_out, {}};
  for_each_expert_row(context, data, data.down_weights,
                      [&](const Doubles& weights, int64_t row) { judge_down_row(judged, data, p, weights, row); });
  return judged;
}

// Both products of the shared expert.
Judged judge_shared(Context& context, const MoeCase& data) {
  Judged judged;
  const Product first{data.integers() ? data.x_int8 : data.x, data.x_scales, data.shared_activated, data.shared_scales},
      second{data.shared_activated, data.shared_scales, data.shared_out, {}};
  const Doubles gate_up = data.shared_gate_up_weights->values(context, 0),
                down = data.shared_down_weights->values(context, 0);
  for_each_sample(data.tokens(), kMostRows, [&](int64_t t) {
    judge_hidden_row(judged, data, first, gate_up, t);
    judge_down_row(judged, data, second, down, t);
  });
  return judged;
}

Judged judge_finalize(const MoeCase& data) {
  Judged judged;
  const int64_t top_k = data.slots_row.shape[1];
  for_each_sample(data.tokens(), kMostTokens, [&](int64_t t) {
    const Doubles got = row_of(data.out, t);
    Doubles want(got.size()), terms(got.size());
    for (int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot) {
      const Doubles row = row_of(data.every_out, static_cast<int64_t>(test::get(data.slots_row, slot)));
      const double weight = test::get(data.slots_weight, slot);
      for (size_t i = 0; i < row.size(); ++i) want[i] += weight * row[i], terms[i] += std::fabs(weight * row[i]);
    }
    for (size_t i = 0; i < got.size(); ++i) {
      judged.take(got[i], want[i],
                  (static_cast<double>(top_k) + 4) * kRoundingF32 * terms[i] +
                      test::epsilon(data.out.dtype) * std::fabs(want[i]) + 1e-30);
    }
  });
  return judged;
}

struct Step {
  const char* name;
  void (MoeCase::*run)(Context&) const;
  std::function<Judged(Context&, const MoeCase&)> judge;
  Tensor MoeCase::*result;
};

std::vector<Step> steps_of(const MoeCase& data) {
  const auto alone = [](Judged (*judge)(const MoeCase&)) {
    return [judge](Context&, const MoeCase& d) { return judge(d); };
  };
  std::vector<Step> steps = {{"gating", &MoeCase::gate, alone(judge_gating), &MoeCase::topk_weights},
                             {"routing", &MoeCase::route, alone(judge_routing), &MoeCase::slot_of_row}};
  if (data.integers()) steps.push_back({"quantise", &MoeCase::quantise, alone(judge_quantise), &MoeCase::x_int8});
  steps.push_back({"permute", &MoeCase::permute, alone(judge_permute), &MoeCase::expanded});
  steps.push_back({"gate/up", &MoeCase::multiply_gate_up, judge_gate_up, &MoeCase::activated});
  steps.push_back({"down", &MoeCase::multiply_down, judge_down, &MoeCase::expert_out});
  if (data.has_shared()) steps.push_back({"shared", &MoeCase::multiply_shared, judge_shared, &MoeCase::shared_out});
  steps.push_back({"finalize", &MoeCase::finalize, alone(judge_finalize), &MoeCase::out});
  return steps;
}

// The verdict of each step. Spoiled after it has run: judged so, and made right for the next step.
std::vector<MoeVerdict> check(Context& context, const MoeCase& data, bool spoiled) {
  std::vector<MoeVerdict> verdicts;
  for (const Step& step : steps_of(data)) {
    (data.*step.run)(context);
    if (spoiled) {
      const bool rows = step.result == &MoeCase::slot_of_row;
      spoil(data.*step.result, rows ? static_cast<double>(data.slots()) + 1 : 0);
    }
    verdicts.push_back({step.name, step.judge(context, data)});
    if (spoiled) (data.*step.run)(context);
  }
  return verdicts;
}

void run(const Options& options) {
  check_moe_arguments(options);
  check_moe_backward(options, options.backward);
  Context context = make_context(options.num_threads);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  bool all_ok = true;
  for (const std::string& dtype : options.dtypes) {
    for (const int64_t tokens : options.tokens) {
      const MoeCase data(context, options, dtype, tokens);
      std::vector<MoeVerdict> verdicts = check(context, data, options.spoil);
      for (MoeVerdict& of_call : check_moe_layer(context, data, options.backward, options.spoil)) {
        verdicts.push_back(std::move(of_call));
      }
      for (const auto& [step, v] : verdicts) {
        all_ok = all_ok && v.ok();
        if (options.json) {
          rows.push_back({{"dtype", dtype},
                          {"tokens", tokens},
                          {"step", step},
                          {"compared", v.count},
                          {"wrong", v.wrong},
                          {"error", v.error},
                          {"bound", v.bound},
                          {"ok", v.ok()}});
          continue;
        }
        char text[300];
        std::snprintf(text, sizeof(text),
                      "%s  %s, %lld tokens, %-10s: %lld results, error %.2e (bound %.2e), %lld beyond\n",
                      v.ok() ? "ok  " : "FAIL", dtype.c_str(), static_cast<long long>(tokens), step.c_str(),
                      static_cast<long long>(v.count), v.error, v.bound, static_cast<long long>(v.wrong));
        write_output(text);
      }
    }
  }
  if (options.json) write_json({{"machine", to_string(context.machine())}, {"ok", all_ok}, {"rows", rows}});
  if (!all_ok) run_error("a step or the one call exceeds its bound");
}

}  // namespace

void add_check_moe(CLI::App& check) {
  auto options = std::make_shared<Options>();
  CLI::App* command = check.add_subcommand(
      "moe", "Compare each step of a mixture of experts, and the one call for all of them, with float64");
  add_moe_options(*command, *options);
  add_moe_backward_option(*command, options->backward);
  command->add_flag(
      "--spoil", options->spoil,
      "Change one of every 256 results of each step and of the one call, so that every verdict must be FAIL: "
      "whether the check notices");
  command->callback([options] { run(*options); });
}

}  // namespace opst::tools

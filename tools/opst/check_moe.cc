// opst check moe: every step of a mixture's layer against float64, each from what the step before really gave.
#include <cmath>
#include <cstdio>

#include "bench.h"
#include "moe/reference.h"
#include "moe_case.h"
#include "product_bound.h"
#include "testing/elements.h"

namespace opst::tools {

namespace {

constexpr int64_t kMostRows = 8, kMostColumns = 32, kMostTokens = 64;  // compared; rows of each expert
constexpr int64_t kSpoilEvery = 256;

struct Options : MoeArguments {
  bool spoil = false;
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

Judged judge_gate_up(Context& context, const MoeCase& data) {
  Judged judged;
  const int64_t half = data.arguments.intermediate;
  for_each_expert_row(context, data, data.gate_up_weights, [&](const Doubles& weights, int64_t row) {
    const Doubles x = row_of(data.expanded, row), got = row_of(data.activated, row);
    const double scale = data.integers() ? test::get(data.row_scales, row) : 1;
    const double step = data.integers() ? test::get(data.activated_scales, row) : 0;
    for_each_sample(half, kMostColumns, [&](int64_t j) {
      const Dot gate = dot(x, weights, j, scale, data.integers()),
                up = dot(x, weights, half + j, scale, data.integers());
      const double silu = gate.sum / (1 + std::exp(-gate.sum)), want = silu * up.sum;
      // silu's slope is 1.1 at most; exp is right to some units in the last place.
      double bound = 1.1 * gate.bound * std::fabs(up.sum) + std::fabs(silu) * up.bound + 1.1 * gate.bound * up.bound +
                     16 * kRoundingF32 * std::fabs(want) + 1e-30;
      const double value = got[static_cast<size_t>(j)];
      bound += data.integers() ? 0.501 * step : test::epsilon(data.activated.dtype) * std::fabs(want);
      judged.take(data.integers() ? value * step : value, want, bound);
    });
  });
  return judged;
}

Judged judge_down(Context& context, const MoeCase& data) {
  Judged judged;
  for_each_expert_row(context, data, data.down_weights, [&](const Doubles& weights, int64_t row) {
    const Doubles x = row_of(data.activated, row), got = row_of(data.expert_out, row);
    const double scale = data.integers() ? test::get(data.activated_scales, row) : 1;
    for_each_sample(data.arguments.hidden, kMostColumns, [&](int64_t j) {
      const Dot want = dot(x, weights, j, scale, data.integers());
      judged.take(got[static_cast<size_t>(j)], want.sum,
                  want.bound + test::epsilon(data.expert_out.dtype) * std::fabs(want.sum) + 1e-30);
    });
  });
  return judged;
}

Judged judge_finalize(const MoeCase& data) {
  Judged judged;
  const int64_t top_k = data.arguments.top_k;
  for_each_sample(data.tokens(), kMostTokens, [&](int64_t t) {
    const Doubles got = row_of(data.out, t);
    Doubles want(got.size()), terms(got.size());
    for (int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot) {
      const Doubles row = row_of(data.expert_out, static_cast<int64_t>(test::get(data.row_of_slot, slot)));
      const double weight = test::get(data.topk_weights, slot);
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

// What comes out of a step is changed in one of every 256 places: ids and rows become others, numbers zero.
void spoil(const Tensor& tensor, double other) {
  for (int64_t i = 0; i < tensor.num_elements(); i += kSpoilEvery) {
    const double value = test::get(tensor, i);
    test::set(tensor, i, other == 0 ? (value == 0 ? 1.0 : 0.0) : std::fmod(value + 1, other));
  }
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
  steps.push_back({"finalize", &MoeCase::finalize, alone(judge_finalize), &MoeCase::out});
  return steps;
}

// The verdict of each step. Spoiled after it has run: judged so, and made right for the next step.
std::vector<Judged> check(Context& context, const MoeCase& data, const std::vector<Step>& steps, bool spoiled) {
  std::vector<Judged> verdicts;
  for (const Step& step : steps) {
    (data.*step.run)(context);
    if (spoiled) {
      const bool rows = step.result == &MoeCase::slot_of_row;
      spoil(data.*step.result, rows ? static_cast<double>(data.slots()) + 1 : 0);
    }
    verdicts.push_back(step.judge(context, data));
    if (spoiled) (data.*step.run)(context);
  }
  return verdicts;
}

void run(const Options& options) {
  check_moe_arguments(options);
  Context context = make_context(options.num_threads);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  bool all_ok = true;
  for (const std::string& dtype : options.dtypes) {
    for (const int64_t tokens : options.tokens) {
      const MoeCase data(context, options, dtype, tokens);
      const std::vector<Step> steps = steps_of(data);
      const std::vector<Judged> verdicts = check(context, data, steps, options.spoil);
      for (size_t i = 0; i < steps.size(); ++i) {
        const Judged& v = verdicts[i];
        all_ok = all_ok && v.ok();
        if (options.json) {
          rows.push_back({{"dtype", dtype},
                          {"tokens", tokens},
                          {"step", steps[i].name},
                          {"compared", v.count},
                          {"wrong", v.wrong},
                          {"error", v.error},
                          {"bound", v.bound},
                          {"ok", v.ok()}});
          continue;
        }
        char text[300];
        std::snprintf(text, sizeof(text),
                      "%s  %s, %lld tokens, %-8s: %lld results, error %.2e (bound %.2e), %lld beyond\n",
                      v.ok() ? "ok  " : "FAIL", dtype.c_str(), static_cast<long long>(tokens), steps[i].name,
                      static_cast<long long>(v.count), v.error, v.bound, static_cast<long long>(v.wrong));
        write_output(text);
      }
    }
  }
  if (options.json) write_json({{"machine", to_string(context.machine())}, {"ok", all_ok}, {"rows", rows}});
  if (!all_ok) run_error("a step exceeds its bound");
}

}  // namespace

void add_check_moe(CLI::App& check) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      check.add_subcommand("moe", "Compare each step of a mixture of experts with float64, from what it really read");
  add_moe_options(*command, *options);
  command->add_flag("--spoil", options->spoil,
                    "Change one of every 256 results of each step, so that every verdict must be FAIL: whether the "
                    "check notices");
  command->callback([options] { run(*options); });
}

}  // namespace opst::tools

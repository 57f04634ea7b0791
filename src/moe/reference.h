// The operators' equations in plain loops, in double, on one token.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "opst/moe.h"

namespace opst::reference {

using Doubles = std::vector<double>;
using Indices = std::vector<int64_t>;

// s of every expert; zeros where no logit is above -inf.
inline Doubles gate_scores(const Doubles& logits, GateScores kind) {
  double highest = -std::numeric_limits<double>::infinity(), total = 0;
  for (double l : logits) highest = l > highest ? l : highest;
  Doubles s(logits.size(), 0.0);
  if (std::isinf(highest) && highest < 0) return s;
  for (size_t e = 0; e < s.size(); ++e) {
    if (std::isnan(logits[e])) continue;
    s[e] = kind == GateScores::softmax ? std::exp(logits[e] - highest) : 1 / (1 + std::exp(-logits[e]));
    total += s[e];
  }
  if (kind == GateScores::softmax) {
    for (double& v : s) v /= total;
  }
  return s;
}

// What the experts are ordered by.
inline Doubles gate_choice(const Doubles& logits, const Doubles& bias, GateScores kind) {
  if (bias.empty()) return logits;
  Doubles c = gate_scores(logits, kind);
  for (size_t e = 0; e < c.size(); ++e) c[e] = std::isnan(logits[e]) ? logits[e] : c[e] + bias[e];
  return c;
}

// Descending, NaN behind all others, equal ones by index.
inline Indices order_of(const Doubles& values, const Indices& among) {
  Indices order = among;
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const double x = values[static_cast<size_t>(a)], y = values[static_cast<size_t>(b)];
    if (std::isnan(x) || std::isnan(y)) return !std::isnan(x) && std::isnan(y);
    return x > y;
  });
  return order;
}

inline Indices gate_ids(const Doubles& logits, const Doubles& bias, int64_t top_k, const MoeGatingOptions& o) {
  const auto n = static_cast<int64_t>(logits.size());
  const Doubles c = gate_choice(logits, bias, o.scores), s = gate_scores(logits, o.scores);
  const bool any = std::any_of(logits.begin(), logits.end(), [](double l) { return l > -INFINITY; });
  Indices all;
  for (int64_t e = 0; e < n; ++e) all.push_back(e);
  if (!any) return Indices(all.begin(), all.begin() + top_k);
  const int64_t size = n / o.num_groups;
  Doubles group_scores;
  Indices groups;
  for (int64_t g = 0; g < o.num_groups; ++g) {
    Doubles members;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      const auto i = static_cast<size_t>(e);
      const double v = o.group_score == GroupScore::top2_sum && bias.empty() ? s[i] : c[i];
      if (v > -INFINITY) members.push_back(v);
    }
    std::sort(members.rbegin(), members.rend());
    double score = members.empty() ? -INFINITY : members[0];
    if (o.group_score == GroupScore::top2_sum && members.size() > 1) score += members[1];
    group_scores.push_back(score);
    groups.push_back(g);
  }
  const Indices best = order_of(group_scores, groups);
  Indices candidates;
  for (int64_t e = 0; e < n; ++e) {
    if (std::find(best.begin(), best.begin() + o.kept_groups, e / size) != best.begin() + o.kept_groups) {
      candidates.push_back(e);
    }
  }
  const Indices order = order_of(c, candidates);
  return Indices(order.begin(), order.begin() + top_k);
}

inline Doubles gate_weights(const Doubles& logits, const Indices& ids, const MoeGatingOptions& o) {
  const double factor = static_cast<double>(o.routed_scaling_factor), k = static_cast<double>(ids.size());
  const bool softmax = o.scores == GateScores::softmax;
  Doubles s = gate_scores(logits, o.scores), w, chosen;
  for (int64_t id : ids) {
    w.push_back(s[static_cast<size_t>(id)]);
    chosen.push_back(logits[static_cast<size_t>(id)]);
  }
  const auto none = [](const Doubles& of) {
    return std::none_of(of.begin(), of.end(), [](double l) { return l > -INFINITY; });
  };
  if (none(logits) || (softmax && o.renormalise && none(chosen))) return Doubles(ids.size(), factor / k);
  double divisor = 1;
  if (o.renormalise && softmax) w = gate_scores(chosen, o.scores);
  if (o.renormalise && !softmax) {
    divisor = static_cast<double>(o.eps);
    for (double v : w) divisor += v;
  }
  for (double& v : w) v = v / divisor * factor;
  return w;
}

}  // namespace opst::reference

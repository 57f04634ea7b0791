// The layer of experts in plain loops, in double: tokens one by one.
#pragma once

#include "moe/reference.h"

namespace opst::reference {

// Weights [E][n][k], row-major.
struct LayerExperts {
  int64_t intermediate = 0;
  Doubles gate_up, down;            // [E][2 intermediate][hidden], [E][hidden][intermediate]
  Doubles gate_up_bias, down_bias;  // [E][..], or empty
};
struct Layer {
  int64_t tokens = 0, hidden = 0, top_k = 0, num_experts = 0;
  int64_t begin = 0, end = 0;  // experts that have weights
  Doubles x, logits;           // [tokens][hidden], [tokens][num_experts] or empty
  Indices ids;                 // [tokens][top_k]; -1: nothing
  Doubles weights;             // [tokens][top_k], unless there are logits
  LayerExperts experts, shared;
  Doubles shared_gate;  // [hidden], or empty
  MoeGatingOptions gating = {};
};

inline double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// out += weight * expert e of x, with swiglu.
inline void add_expert(const LayerExperts& w, int64_t e, int64_t hidden, const double* x, double weight, double* out) {
  const int64_t n = w.intermediate;
  Doubles h(static_cast<size_t>(n));
  const auto sum = [&](int64_t j) {
    const double bias = w.gate_up_bias.empty() ? 0 : w.gate_up_bias[static_cast<size_t>(e * 2 * n + j)];
    return dot(&w.gate_up[static_cast<size_t>((e * 2 * n + j) * hidden)], x, hidden) + bias;
  };
  for (int64_t j = 0; j < n; ++j) {
    const double gate = sum(j);
    h[static_cast<size_t>(j)] = gate / (1 + std::exp(-gate)) * sum(n + j);
  }
  for (int64_t f = 0; f < hidden; ++f) {
    const double bias = w.down_bias.empty() ? 0 : w.down_bias[static_cast<size_t>(e * hidden + f)];
    out[f] += weight * (dot(&w.down[static_cast<size_t>((e * hidden + f) * n)], h.data(), n) + bias);
  }
}

inline Doubles layer(const Layer& l) {
  Doubles out(static_cast<size_t>(l.tokens * l.hidden));
  for (int64_t t = 0; t < l.tokens; ++t) {
    const auto from = static_cast<size_t>(t * l.top_k), to = from + static_cast<size_t>(l.top_k);
    const double* const x = &l.x[static_cast<size_t>(t * l.hidden)];
    double* const sum = &out[static_cast<size_t>(t * l.hidden)];
    const Indices ids(l.ids.begin() + static_cast<int64_t>(from), l.ids.begin() + static_cast<int64_t>(to));
    Doubles weights;
    if (l.logits.empty()) {
      weights.assign(l.weights.begin() + static_cast<int64_t>(from), l.weights.begin() + static_cast<int64_t>(to));
    } else {
      const auto row = l.logits.begin() + t * l.num_experts;
      weights = gate_weights(Doubles(row, row + l.num_experts), ids, l.gating);
    }
    for (int64_t k = 0; k < l.top_k; ++k) {
      const int64_t e = ids[static_cast<size_t>(k)];
      if (e < l.begin || e >= l.end) continue;
      add_expert(l.experts, e - l.begin, l.hidden, x, weights[static_cast<size_t>(k)], sum);
    }
    if (l.shared.intermediate == 0) continue;
    const double gate = l.shared_gate.empty() ? INFINITY : dot(l.shared_gate.data(), x, l.hidden);
    add_expert(l.shared, 0, l.hidden, x, 1 / (1 + std::exp(-gate)), sum);
  }
  return out;
}

}  // namespace opst::reference

// The gate of one token: scores of its experts, the choice of top_k, their weights; and the gradient.
//
// Computes   s = softmax(l) or 1 / (1 + exp(-l));  c = s + bias, or l
//            ids = the top_k largest c among the groups that stay;  weights = factor * s[ids], or renormalised
//            backward: d = gradient with respect to s: grad_scores, and at the ids what the weights pass on
//              softmax   grad_l = s (d - sum_j d_j s_j)      renormalised: p (g - sum_i g_i p_i) at the ids
//              sigmoid   grad_l = d s (1 - s)
// Shapes     l, s, c, bias [num_experts]; ids, weights, g [top_k]
// Loop nest  lanes over experts: widen; maximum; exponentials and sum; s and c
//            lanes over vectors: the maximum of each vector of c
//            top_k times: the largest of the maxima, the first vector that has it, its first lane that has it; the lane
//              becomes -inf and the vector's maximum is taken anew
//            lanes over the chosen: weights
// Memory     l, s, c: 512 bytes each at 128 experts, all in L1. The maxima of 256 experts are one vector at avx512, so a
//            pick costs four reductions across lanes (60 cycles), not a pass over the row
// Numerics   f32; exp within 1.5 ulp. Of equal c the first in the row is found first: ties go to the lower index. c is l
//            where there is no bias, so that scores that round to one number do not tie. NaN: max passes over it where
//            it is the first operand. A choice with fewer than top_k values above -inf ends in fill_rest
// Source     opst/moe.h; the selection of groups: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), 2.1.2
#pragma once

#include "moe/kernels.h"
#include "simd/math.h"
#include "tile/row_verbs.h"

namespace opst::OPST_ISA_NS::moe {

using namespace opst::moe;
using simd::F32;

inline constexpr float kLowest = -__builtin_inff();

// The first lane in which two vectors are equal; kLanes where there is none.
OPST_INLINE int64_t first_equal(F32 a, F32 b) {
  const F32 negative = F32::zero() - F32::iota();
  return static_cast<int64_t>(-simd::hmax(simd::select(a == b, negative, F32::set1(static_cast<float>(-F32::kLanes)))));
}

// The largest of n values above -inf, at most k of them, best first; values behind the n-th are -inf up to a whole
// vector, none is NaN. Those that are taken become -inf. Gives their number.
OPST_NOINLINE int64_t take_best(float* values, int64_t n, float* maxima, int64_t k, int64_t* ids) {
  constexpr int64_t kLanes = F32::kLanes;
  const F32 lowest = F32::set1(kLowest), iota = F32::iota();
  const int64_t vectors = (n + kLanes - 1) / kLanes;
  for (int64_t b = 0; b < vectors; b += kLanes) {
    F32 v[kLanes];
    OPST_UNROLL for (int i = 0; i < kLanes; ++i) v[i] = b + i < vectors ? F32::load(values + (b + i) * kLanes) : lowest;
    simd::hmax_each(v).store(maxima + b);
  }
  for (int64_t taken = 0; taken < k; ++taken) {
    F32 top = F32::load(maxima);
    for (int64_t b = kLanes; b < vectors; b += kLanes) top = simd::max(F32::load(maxima + b), top);
    const float highest = simd::hmax(top);
    if (!(kLowest < highest)) return taken;
    const F32 best = F32::set1(highest);
    float* of_block = maxima;
    while (!simd::any(F32::load(of_block) == best)) of_block += kLanes;
    const F32 block = F32::load(of_block);
    const int64_t place = first_equal(block, best), vector = of_block - maxima + place;
    const F32 v = F32::load(values + vector * kLanes);
    const int64_t lane = first_equal(v, best);
    ids[taken] = vector * kLanes + lane;
    const F32 rest = simd::select(iota == F32::set1(static_cast<float>(lane)), lowest, v);
    rest.store(values + vector * kLanes);
    // A whole vector is stored, which the next pick can load while the store is on its way.
    simd::select(iota == F32::set1(static_cast<float>(place)), F32::set1(simd::hmax(rest)), block).store(of_block);
  }
  return k;
}

// 1 / (1 + exp(-x)), small results to the last digit.
OPST_INLINE F32 sigmoid(F32 x) {
  const F32 one = F32::set1(1), e = simd::exp(F32::zero() - simd::abs(x));
  return simd::select(x < F32::zero(), e, one) / (one + e);
}
OPST_INLINE F32 zero_if_nan(F32 x) { return simd::select(x == x, x, F32::zero()); }

// Widens the logits, -inf behind the last. Gives the largest, -inf where all are that or NaN.
template <class T>
OPST_INLINE float load_logits(const void* logits, int64_t stride, int64_t n, float* to) {
  const F32 lowest = F32::set1(kLowest);
  return tile::greatest(n, [&](F32 acc, int64_t i) OPST_INLINE_LAMBDA {
    const F32 l = tile::within(tile::load_row<F32>(static_cast<const T*>(logits), stride, i, n), i, n, lowest);
    l.store(to + i);
    return simd::max(l, acc);
  });
}

// exp(l - highest), 0 of NaN; gives the sum.
OPST_INLINE float exponentials(const float* logits, int64_t n, float highest, float* to) {
  const F32 m = F32::set1(highest);
  return tile::sum(n, [&](F32 acc, int64_t i) OPST_INLINE_LAMBDA {
    const F32 e = zero_if_nan(simd::exp(F32::load(logits + i) - m));
    e.store(to + i);
    return acc + e;
  });
}

// s of every expert, 0 behind the last.
OPST_NOINLINE void all_scores(const GateRules& r, const GateScratch& s, float highest) {
  if (r.sigmoid || highest == kLowest) {
    for (int64_t i = 0; i < r.num_experts; i += F32::kLanes) {
      zero_if_nan(sigmoid(F32::load(s.logits + i))).store(s.scores + i);
    }
    return;
  }
  const F32 total = F32::set1(exponentials(s.logits, r.num_experts, highest, s.scores));
  for (int64_t i = 0; i < r.num_experts; i += F32::kLanes) (F32::load(s.scores + i) / total).store(s.scores + i);
}

// The score of experts [begin, begin + n).
OPST_INLINE float group_score(const float* values, int64_t begin, int64_t n, bool top2_sum) {
  const F32 lowest = F32::set1(kLowest);
  F32 first = lowest, second = lowest;
  for (int64_t i = 0; i < n; i += F32::kLanes) {
    const int64_t left = n - i;
    const float* const at = values + begin + i;
    const F32 v = left < F32::kLanes ? simd::blend_n(left, F32::load_n(at, left), lowest) : F32::load(at);
    second = simd::max(simd::min(v, first), second);
    first = simd::max(v, first);
  }
  const float best = simd::hmax(first);
  if (!top2_sum) return best;
  const F32 lane = F32::set1(static_cast<float>(first_equal(first, F32::set1(best))));
  const float next = simd::hmax(simd::select(F32::iota() == lane, second, first));
  return next == kLowest ? best : best + next;
}

// -inf becomes the choice of every expert whose group does not stay.
OPST_NOINLINE void keep_groups(const GateRules& r, const GateScratch& s, const float* values) {
  const int64_t size = r.num_experts / r.num_groups;
  for (int64_t g = 0; g < r.num_groups; ++g) {
    s.group_scores[g] = group_score(values, g * size, size, r.top2_sum);
    s.is_kept[g] = 0;
  }
  for (int64_t g = r.num_groups; g % F32::kLanes != 0; ++g) s.group_scores[g] = kLowest;
  int64_t kept = take_best(s.group_scores, r.num_groups, s.maxima, r.kept_groups, s.kept_groups);
  for (int64_t i = 0; i < kept; ++i) s.is_kept[s.kept_groups[i]] = 1;
  for (int64_t g = 0; kept < r.kept_groups; ++g) {  // groups of nothing above -inf
    if (s.is_kept[g] == 0) s.is_kept[g] = 1, ++kept;
  }
  for (int64_t g = 0; g < r.num_groups; ++g) {
    if (s.is_kept[g] != 0) continue;
    for (int64_t i = g * size; i < (g + 1) * size; ++i) s.choice[i] = kLowest;
  }
}

// c of expert i, as it was before the best were taken.
OPST_INLINE float choice_of(const GateScratch& s, const float* bias, int64_t i) {
  const float l = s.logits[i];
  return bias == nullptr || l != l ? l : s.scores[i] + bias[i];
}

// Experts that nothing above -inf speaks for: those of -inf, then those of NaN, in their order.
OPST_NOINLINE void fill_rest(const GateRules& r, const Gate& gate, const GateScratch& s, int64_t taken) {
  const int64_t size = r.num_experts / r.num_groups;
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t i = 0; i < r.num_experts && taken < r.top_k; ++i) {
      const float c = choice_of(s, gate.bias, i);
      const bool wanted = pass == 0 ? c == kLowest : c != c;
      if (wanted && (r.num_groups == 1 || s.is_kept[i / size] != 0)) gate.ids[taken++] = i;
    }
  }
}

OPST_NOINLINE void choose(const GateRules& r, const Gate& gate, const GateScratch& s) {
  const F32 lowest = F32::set1(kLowest);
  const int64_t n = r.num_experts;
  for (int64_t i = 0; i < n; i += F32::kLanes) {
    F32 c = F32::load(s.logits + i);
    if (gate.bias != nullptr) {
      const F32 biased = F32::load(s.scores + i) + tile::load_row<F32>(gate.bias, 1, i, n);
      c = tile::within(simd::select(c == c, biased, lowest), i, n, lowest);
    }
    simd::max(c, lowest).store(s.choice + i);
  }
  if (r.num_groups > 1) keep_groups(r, s, r.top2_sum && gate.bias == nullptr ? s.scores : s.choice);
  const int64_t taken = take_best(s.choice, n, s.maxima, r.top_k, gate.ids);
  if (taken < r.top_k) fill_rest(r, gate, s, taken);
}

// weights[i] = values[i] / (sum + eps) * factor
OPST_INLINE void divide(float* weights, int64_t n, float total, float factor) {
  const F32 t = F32::set1(total), f = F32::set1(factor);
  for (int64_t i = 0; i < n; i += F32::kLanes) (F32::load(weights + i) / t * f).store(weights + i);
}
OPST_INLINE void fill(float* weights, int64_t n, float value) {
  for (int64_t i = 0; i < n; i += F32::kLanes) F32::set1(value).store(weights + i);
}
// Of the experts at ids, -inf behind the last and where an id is < 0. Gives the largest.
OPST_INLINE float chosen_logits(const float* logits, const int64_t* ids, int64_t k, float* to) {
  for (int64_t i = 0; i < k; ++i) to[i] = ids[i] < 0 ? kLowest : logits[ids[i]];
  for (int64_t i = k; i % F32::kLanes != 0; ++i) to[i] = kLowest;
  return tile::greatest(k, [&](F32 acc, int64_t i) OPST_INLINE_LAMBDA { return simd::max(F32::load(to + i), acc); });
}

template <class T>
void gate(const GateRules& r, const Gate& gate, const GateScratch& s) {
  const int64_t k = r.top_k;
  float* const w = gate.weights;
  const float highest = load_logits<T>(gate.logits, gate.stride, r.num_experts, s.logits);
  if (r.all_scores) all_scores(r, s, highest);
  if (highest == kLowest) {
    for (int64_t i = 0; i < k; ++i) gate.ids[i] = i;
    return fill(w, k, r.factor / static_cast<float>(k));
  }
  choose(r, gate, s);
  if (!r.sigmoid && !r.renormalise) {
    const float total = r.all_scores ? 1 : exponentials(s.logits, r.num_experts, highest, s.scores);
    chosen_logits(s.scores, gate.ids, k, w);
    return divide(w, k, total, r.factor);
  }
  const float chosen = chosen_logits(s.logits, gate.ids, k, w);
  if (r.sigmoid) {
    const float total = tile::sum(k, [&](F32 acc, int64_t i) OPST_INLINE_LAMBDA {
      const F32 p = zero_if_nan(sigmoid(F32::load(w + i)));
      p.store(w + i);
      return acc + p;
    });
    return divide(w, k, r.renormalise ? total + r.eps : 1, r.factor);
  }
  if (chosen == kLowest) return fill(w, k, r.factor / static_cast<float>(k));
  divide(w, k, exponentials(w, k, chosen, w), r.factor);
}

// What the weights pass on. Softmax renormalised: to[i] is the gradient of the chosen logits; else of their scores.
OPST_NOINLINE void chosen_gradient(const GateRules& r, const GateBackward& b, const float* logits, float* to) {
  const int64_t k = r.top_k;
  const F32 factor = F32::set1(r.factor);
  const float* const g = b.grad_weights;
  const auto load = [&](int64_t i) OPST_INLINE_LAMBDA { return tile::load_row<F32>(g, 1, i, k); };
  if (!r.renormalise) {
    for (int64_t i = 0; i < k; i += F32::kLanes) (load(i) * factor).store(to + i);
    return;
  }
  const float highest = chosen_logits(logits, b.ids, k, to);
  if (!r.sigmoid && highest == kLowest) return fill(to, k, 0);
  float total;
  if (r.sigmoid) {
    total = r.eps + tile::sum(k, [&](F32 acc, int64_t i) OPST_INLINE_LAMBDA {
              const F32 p = zero_if_nan(sigmoid(F32::load(to + i)));
              p.store(to + i);
              return acc + p;
            });
  } else {
    total = exponentials(to, k, highest, to);
  }
  const F32 t = F32::set1(total);
  const float along = tile::sum(
      k, [&](F32 acc, int64_t i) OPST_INLINE_LAMBDA { return simd::fma(load(i), F32::load(to + i) / t, acc); });
  for (int64_t i = 0; i < k; i += F32::kLanes) {
    const F32 share = r.sigmoid ? F32::set1(1) / t : F32::load(to + i) / t;
    (share * (load(i) - F32::set1(along)) * factor).store(to + i);
  }
}

template <class T>
void gate_backward(const GateRules& r, const GateBackward& b, const GateScratch& s) {
  const int64_t n = r.num_experts;
  const F32 zero = F32::zero();
  T* const out = static_cast<T*>(b.grad_logits);
  float *const d = s.choice, *const direct = s.maxima;  // gradients with respect to s; to l
  const float highest = load_logits<T>(b.logits, b.stride, n, s.logits);
  const bool degenerate = highest == kLowest, past_scores = r.renormalise && !r.sigmoid;
  for (int64_t i = 0; i < n; i += F32::kLanes) {
    const bool given = b.grad_scores != nullptr && !degenerate;
    (given ? tile::load_row<F32>(b.grad_scores, b.grad_scores_stride, i, n) : zero).store(d + i);
    zero.store(direct + i);
  }
  if (!degenerate) {
    chosen_gradient(r, b, s.logits, b.chosen);
    for (int64_t i = 0; i < r.top_k; ++i) {
      if (b.ids[i] >= 0) (past_scores ? direct : d)[b.ids[i]] += b.chosen[i];
    }
  }
  if (r.sigmoid) {
    for (int64_t i = 0; i < n; i += F32::kLanes) {
      // s (1 - s) from one exponential, so that it keeps its digits at both ends.
      const F32 e = simd::exp(zero - simd::abs(F32::load(s.logits + i))), below = F32::set1(1) + e;
      tile::store_row(F32::load(d + i) * zero_if_nan(e / below / below), out, b.grad_logits_stride, i, n);
    }
    return;
  }
  // Renormalised weights do not depend on the sum over all experts.
  const bool all = !past_scores || b.grad_scores != nullptr;
  if (degenerate || !all) {
    fill(s.scores, n, 0);
  } else {
    all_scores(r, s, highest);
  }
  const float along = tile::sum(n, [&](F32 acc, int64_t i) OPST_INLINE_LAMBDA {
    return simd::fma(F32::load(d + i), F32::load(s.scores + i), acc);
  });
  for (int64_t i = 0; i < n; i += F32::kLanes) {
    const F32 passed = F32::load(s.scores + i) * (F32::load(d + i) - F32::set1(along));
    const F32 l = F32::load(s.logits + i);
    tile::store_row(passed + simd::select(l == l, F32::load(direct + i), zero), out, b.grad_logits_stride, i, n);
  }
}

}  // namespace opst::OPST_ISA_NS::moe

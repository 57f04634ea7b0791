// Finish: the end of a block of query rows.
//
// Computes   O = sum over parts k of w_k acc_k / sum;  sum = sum over k of w_k sum_k;  w_k = exp2(c (m_k - max m))
//            statistics from max m and sum, in double; one more score of each row where there is a sink
// Numerics   Parts are joined in key order, and there is one division per row. A row that has seen no key becomes 0.
#pragma once

#include "attention/stacked_rows.h"
#include "simd/math.h"

namespace opst::OPST_ISA_NS::attention {

template <class V>
struct Finish {
  using S = typename V::Scalar;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kMaxParts = 256;

  static void finish_rows(const FinishRows& f) { finish_some(f, 0, f.rows); }
  static OPST_NOINLINE void finish_some(const FinishRows& f, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      S weights[kMaxParts];
      const RowEnd row_end = end_row(f, r, weights);
      with_row<S>(f.out, f.first_row + r,
                  [&](auto* out) OPST_INLINE_LAMBDA { write_row(f, r, weights, row_end, out); });
    }
  }

  // `scale`: what a row's accumulators are multiplied by, after the parts' weights. An empty row becomes 0 instead.
  struct RowEnd {
    S scale;
    bool empty;
  };
  // Joins the parts of row r, and writes its statistics.
  static OPST_INLINE RowEnd end_row(const FinishRows& f, int64_t r, S* weights) {
    const S c = static_cast<S>(f.exponent_scale);
    S max = -__builtin_inff();
    for (int64_t p = 0; p < f.num_parts; ++p) {
      const S part_max = static_cast<const S*>(f.parts[p].max)[r];
      max = part_max > max ? part_max : max;  // a NaN part reaches the sum through its weight
    }
    S sum = 0;
    for (int64_t p = 0; p < f.num_parts; ++p) {
      const S part_max = static_cast<const S*>(f.parts[p].max)[r];
      weights[p] = 1;
      if (f.num_parts > 1) {
        weights[p] = part_max == -__builtin_inff() ? S(0) : simd::exp2(V::set1((part_max - max) * c)).v[0];
      }
      sum += weights[p] * simd::hsum(V::load(static_cast<const S*>(f.parts[p].sums) + r * kLanes));
    }
    const bool empty = sum == 0;
    RowEnd end = {empty ? S(0) : S(1) / (sum * static_cast<S>(f.keep_prob)), empty};
    if (!f.writes_statistics() && f.sinks == nullptr) return end;
    double top = static_cast<double>(max) * f.score_scale;
    double exact = static_cast<double>(sum);
    if (empty) top = -__builtin_inf(), exact = 0;
    const int64_t row = f.first_row + r;
    if (f.sinks != nullptr) {
      end.scale *= add_sink(static_cast<const S*>(f.sinks)[row % f.out.group * f.sinks_stride], top, exact);
    }
    if (exact != exact) top = exact = __builtin_nan("");
    const bool nothing = exact == 0;
    if (f.lse.data != nullptr) write_statistic(f.lse, row, nothing ? top : top + __builtin_log(exact));
    if (f.max.data != nullptr) write_statistic(f.max, row, top);
    if (f.sum.data != nullptr) write_statistic(f.sum, row, exact);
    return end;
  }
  // One more score joins maximum and sum. Returns the share of the sum that the keys keep.
  static OPST_NOINLINE S add_sink(S sink, double& top, double& sum) {
    const double score = static_cast<double>(sink);
    if (score == -__builtin_inf()) return 1;
    const double keys_top = top;
    if (!(score <= top)) top = score;
    const double keys = sum == 0 ? 0 : sum * __builtin_exp(keys_top - top);
    sum = keys + __builtin_exp(score - top);  // NaN for a sink of +inf
    return static_cast<S>(keys / sum);
  }
  static OPST_INLINE void write_statistic(const StackedRows& out, int64_t row, double x) {
    static_cast<S*>(out.data)[offset_of(out, row)] = static_cast<S>(x);
  }

  template <class T>
  static OPST_INLINE void write_row(const FinishRows& f, int64_t r, const S* weights, RowEnd end, T* out) {
    const auto acc_of = [&](int64_t p, int64_t d) OPST_INLINE_LAMBDA {
      return V::load(static_cast<const S*>(f.parts[p].acc) + r * f.acc_stride + d);
    };
    for (int64_t d = 0; d < f.value_head_dim; d += kLanes) {
      V acc = acc_of(0, d);
      if (f.num_parts > 1) acc = acc * V::set1(weights[0]);
      for (int64_t p = 1; p < f.num_parts; ++p) acc = simd::fma(acc_of(p, d), V::set1(weights[p]), acc);
      acc = end.empty ? V::zero() : acc * V::set1(end.scale);
      store_elements(acc, out, f.out.dim_stride, d, simd::clamp_lanes<V>(f.value_head_dim - d));
    }
  }
};

}  // namespace opst::OPST_ISA_NS::attention

// The verdict on attention: whether outputs, or gradients, are as close to float64 as the sweeps demand. The one rule
// for tests, benchmarks and `opst check`; what it adds to compare.h is what this operator's arithmetic may lose.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "attention/backward_reference.h"
#include "attention/reference.h"
#include "testing/compare.h"
#include "testing/elements.h"

namespace opst::test {

// The unit of error: what plain code achieves that multiplies in the same type.
inline DType naive_storage(AttentionProduct product) {
  return product == AttentionProduct::f64        ? DType::f64
         : product == AttentionProduct::bf16_dot ? DType::bf16
                                                 : DType::f32;
}

// Rows that an operator computed beside what they should be.
struct JudgedRows {
  std::string about;
  DType query_dtype, out_dtype;
  DType storage;   // the type that naive rounds to
  int64_t kv_len;  // most keys of a row
  std::vector<attention::ReferenceRow> reference, naive;
  double score_scale, typical_value;                 // the largest of the reference's; of |value|
  double flushed;                                    // what subnormal operands may be worth
  bool rounds_twice;                                 // multiply-adds of the generic level
  std::vector<double> out = {};                      // got, [rows][value_head_dim]
  std::vector<double> lse = {}, max = {}, sum = {};  // each, if it is not empty, [rows]

  // What compare says of each output.
  struct Verdict {
    Comparison out, lse, max, sum;
    bool ok() const { return out.ok && lse.ok && max.ok && sum.ok; }
    std::string message() const { return out.message + lse.message + max.message + sum.message; }
  };

  // "" where all are close enough. worst_ratio: raised to the largest error / bound of out.
  std::string judge(double& worst_ratio) const {
    const Verdict v = judge();
    worst_ratio = std::max(worst_ratio, v.out.max_error_ratio);
    return v.message();
  }
  Verdict judge() const {
    Verdict v;
    v.out.ok = v.lse.ok = v.max.ok = v.sum.ok = true;
    if (reference.empty()) return v;
    v.out = judge_out();
    if (!v.out.ok) return v;
    v.lse = judge_statistic("softmax_lse", lse, &attention::ReferenceRow::lse, true);
    v.max = judge_statistic("softmax_max", max, &attention::ReferenceRow::max, true);
    v.sum = judge_statistic("softmax_sum", sum, &attention::ReferenceRow::sum, false);
    return v;
  }

 private:
  double accumulator_epsilon() const { return query_dtype == DType::f64 ? 0x1p-52 : 0x1p-23; }

  Comparison judge_out() const {
    const auto num_rows = static_cast<int64_t>(reference.size());
    const auto dims = static_cast<int64_t>(reference[0].out.size());
    std::vector<double> reference_out, naive_out;
    std::vector<char> got(static_cast<size_t>(num_rows * dims * size_bytes(out_dtype)));
    const Tensor got_out = Tensor::contiguous(out_dtype, {num_rows, dims}, got.data());
    for (size_t row = 0; row < reference.size(); ++row) {
      reference_out.insert(reference_out.end(), reference[row].out.begin(), reference[row].out.end());
      for (const double x : naive[row].out) naive_out.push_back(attention::reference::rounded_to(out_dtype, x));
    }
    for (int64_t i = 0; i < num_rows * dims; ++i) set(got_out, i, out[static_cast<size_t>(i)]);
    // An infinite value whose weight f32 rounds to 0 makes NaN of the sum, as the naive form shows.
    for (size_t i = 0; i < reference_out.size(); ++i) {
      if (std::isinf(reference_out[i]) && std::isnan(naive_out[i]) && std::isnan(out[i]))
        reference_out[i] = naive_out[i];
    }
    CompareOptions options{.name = "out", .about = about, .names_seed = !about.empty()};
    // What f32 loses: in the scores, hence relatively in P, and in the sums. One value may be much larger than the
    // others.
    double largest = typical_value;
    for (const double x : reference_out) largest = std::isfinite(x) ? std::max(largest, std::fabs(x)) : largest;
    options.extra = 4 * accumulator_epsilon() * (1 + score_scale) * largest + flushed;
    // Among subnormal numbers each operation may lose half of the smallest one.
    options.extra += static_cast<double>(kv_len) *
                     (query_dtype == DType::f64 ? std::numeric_limits<double>::denorm_min() : 0x1p-149);
    const double out_epsilon = epsilon(out_dtype);
    if (rounds_twice) options.eps_factor *= 2;
    if (out_dtype == DType::bf16 || out_dtype == DType::f16) options.eps_factor = 0.5;  // one rounding, at the end
    if (out_dtype == DType::f16) options.extra += 0x1p-25;
    // P is rounded to bf16, the terms of the sum that P is divided by are not.
    // A narrow row may cancel to less than its terms.
    if (storage == DType::bf16) {
      options.eps_factor += 0x1p-9 / out_epsilon;
      options.extra += 0x1p-9 * typical_value;
    }
    return compare(got_out, ConstTensor::contiguous(DType::f64, {num_rows, dims}, reference_out.data()),
                   ConstTensor::contiguous(DType::f64, {num_rows, dims}, naive_out.data()), options);
  }

  Comparison judge_statistic(const char* name, const std::vector<double>& values,
                             double attention::ReferenceRow::*member, bool is_score) const {
    if (values.empty()) {
      Comparison not_wanted;
      not_wanted.ok = true;
      return not_wanted;
    }
    const auto num_rows = static_cast<int64_t>(reference.size());
    std::vector<double> ref, naive_values;
    for (const attention::ReferenceRow& row : reference) ref.push_back(row.*member);
    for (const attention::ReferenceRow& row : naive) naive_values.push_back(row.*member);
    const std::vector<float> values_f32(values.begin(), values.end());
    const ConstTensor got_statistic = query_dtype == DType::f64
                                          ? ConstTensor::contiguous(DType::f64, {num_rows, 1}, values.data())
                                          : ConstTensor::contiguous(DType::f32, {num_rows, 1}, values_f32.data());
    CompareOptions o{.name = name, .about = about, .names_seed = !about.empty()};
    o.per_row = false;
    // exp(score) is as wrong relatively as the score is absolutely; the exponentials of the pairwise product by
    // 2^-13.2.
    o.extra = 4 * accumulator_epsilon() * (1 + score_scale) + (storage == DType::bf16 ? 0x1.5p-13 : 0);
    if (!is_score) {
      double largest = 0;
      for (const double x : ref) largest = std::isfinite(x) ? std::max(largest, x) : largest;
      o.extra *= largest;
    }
    return compare(got_statistic, ConstTensor::contiguous(DType::f64, {num_rows, 1}, ref.data()),
                   ConstTensor::contiguous(DType::f64, {num_rows, 1}, naive_values.data()), o);
  }
};

// The unit of error of gradients: what plain code achieves with the coarsest of the types that the values pass through.
// Forward's own product counts: O comes from it.
inline DType gradient_storage(DType query, DType kv, DType out, const Machine& machine) {
  if (query == DType::f64) return DType::f64;
  const bool pairs = query == DType::bf16 && kv == DType::bf16 && includes(machine.isa, Isa::avx512_bf16);
  return pairs && machine.bf16_product == Bf16Product::dot ? DType::bf16 : out;
}

// Gradients beside what they should be.
struct JudgedGradients {
  std::string about;
  DType query_dtype;
  DType storage;            // the type that naive rounds to
  int64_t lengths;          // the most keys and the most queries of a sequence, together
  double score_scale;       // the largest of the reference's
  bool non_finite = false;  // some input element is NaN or infinite
  const attention::ReferenceGradients &reference, &naive;
  const attention::ReferenceGradients& magnitude;  // the reference with nothing cancelling

  struct Verdict {
    const char* name;
    Comparison comparison;
  };
  // Of those that the call was asked for.
  std::vector<Verdict> judge(const AttentionGradients& written) const {
    std::vector<Verdict> verdicts;
    for (const attention::NamedGradient& g : attention::kNamedGradients) {
      const Tensor& got = written.*g.written;
      if (got.data == nullptr) continue;
      verdicts.push_back(
          {g.name, judge(g.name, got, reference.*g.reference, naive.*g.reference, magnitude.*g.reference)});
    }
    return verdicts;
  }

 private:
  Comparison judge(const char* name, const Tensor& got, std::vector<double> ref, std::vector<double> plain,
                   const std::vector<double>& magnitudes) const {
    std::vector<double> values;
    for (int64_t i = 0; i < got.num_elements(); ++i) values.push_back(get(got, i));
    double largest = 0;
    for (size_t i = 0; i < ref.size(); ++i) {
      plain[i] = attention::reference::rounded_to(got.dtype, plain[i]);
      if (std::isfinite(magnitudes[i])) largest = std::max(largest, magnitudes[i]);
      // An infinite product may meet its negative in one order of a sum and not in another.
      if (non_finite) {
        for (double* x : {&ref[i], &values[i]}) *x = std::isfinite(*x) ? *x : std::numeric_limits<double>::quiet_NaN();
      }
    }
    const auto shaped = [&](DType dtype, void* data) {
      const ConstTensor packed = attention::reference::packed_shape(got);
      Tensor t = Tensor::contiguous(dtype, {}, data);
      t.rank = packed.rank;
      std::copy(packed.shape, packed.shape + kMaxRank, t.shape);
      std::copy(packed.strides, packed.strides + kMaxRank, t.strides);
      return t;
    };
    std::vector<char> bytes(values.size() * static_cast<size_t>(size_bytes(got.dtype)) + 1);
    const Tensor judged = shaped(got.dtype, bytes.data());
    for (size_t i = 0; i < values.size(); ++i) set(judged, static_cast<int64_t>(i), values[i]);
    const bool f64 = query_dtype == DType::f64;
    CompareOptions options{.name = name, .about = about, .names_seed = !about.empty()};
    // P is as wrong, relatively, as scores and statistics are absolutely; and sums round.
    options.extra = 2 * (f64 ? 0x1p-52 : 0x1p-23) * (4 + score_scale) * largest;
    // O was rounded before delta was taken from it; exponentials of the pairwise product; dS.
    if (storage == DType::bf16) options.extra += 0x1p-9 * largest;
    if (storage == DType::f16) options.extra += 0x1p-12 * largest;
    options.extra += static_cast<double>(lengths) * (f64 ? 0x1p-1070 : 0x1p-110);
    if (got.dtype == DType::f16) options.extra += 0x1p-25;
    return compare(judged, shaped(DType::f64, ref.data()), shaped(DType::f64, plain.data()), options);
  }
};

}  // namespace opst::test

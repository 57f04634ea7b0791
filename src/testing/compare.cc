#include "testing/compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "testing/elements.h"
#include "testing/random.h"

namespace opst::test {
namespace {

std::string number(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

bool same_shape(const ConstTensor& a, const ConstTensor& b) {
  return a.rank == b.rank && std::equal(a.shape, a.shape + a.rank, b.shape);
}

std::string footer(const CompareOptions& options) {
  std::string text = options.names_seed ? "\n  seed " + std::to_string(seed()) : "";
  if (!options.about.empty()) text += "\n  " + options.about;
  return text;
}

double rounded(double value, DType dtype) {
  alignas(8) char storage[8];
  const Tensor element = Tensor::contiguous(dtype, {}, storage);
  set(element, 0, value);
  return get(element, 0);
}

// What the worst element is judged by.
struct Row {
  double scale = 0;
  double naive_error = 0;
};

}  // namespace

Comparison compare(const ConstTensor& got, const ConstTensor& reference, const ConstTensor& naive,
                   const CompareOptions& options) {
  Comparison result;
  const bool has_naive = naive.data != nullptr;
  if (!same_shape(got, reference) || (has_naive && !same_shape(got, naive))) {
    result.message = options.name + " " + to_string(got) + ", reference " + to_string(reference) + " and naive " +
                     to_string(naive) + " differ in shape" + footer(options);
    return result;
  }
  const int64_t count = got.num_elements();
  if (count == 0) {
    result.ok = true;
    return result;
  }
  const int64_t row_length = got.rank > 0 ? got.shape[got.rank - 1] : 1;
  std::vector<Row> rows(static_cast<size_t>(count / row_length));
  Row whole;
  for (int64_t i = 0; i < count; ++i) {
    const double ref = get(reference, i);
    if (!std::isfinite(ref)) continue;
    Row& row = rows[static_cast<size_t>(i / row_length)];
    row.scale = std::max(row.scale, std::abs(ref));
    const double error = has_naive ? std::abs(get(naive, i) - ref) : 0;
    if (std::isfinite(error)) row.naive_error = std::max(row.naive_error, error);
  }
  double relative_naive_error = 0;
  for (Row& row : rows) {
    whole.scale = std::max(whole.scale, row.scale);
    whole.naive_error = std::max(whole.naive_error, row.naive_error);
    if (row.scale > 0) relative_naive_error = std::max(relative_naive_error, row.naive_error / row.scale);
  }
  if (options.scale > 0) {
    whole.scale = options.scale;
    for (Row& row : rows) row.scale = options.scale;
    relative_naive_error = whole.naive_error / whole.scale;
  }

  const double eps = epsilon(got.dtype);
  const auto bound_for = [&](double naive_error, double scale) {
    return options.factor * naive_error + options.eps_factor * eps * scale + options.extra;
  };
  result.bound = bound_for(whole.naive_error, whole.scale);
  int64_t num_wrong = 0;
  double worst = -1;
  double worst_bound = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double value = get(got, i);
    const double ref = get(reference, i);
    ++result.num_compared;
    double ratio = 0;
    double bound = result.bound;
    const bool both_finite = std::isfinite(value) && std::isfinite(ref);
    if (both_finite) {
      if (options.per_row) {
        const Row& row = rows[static_cast<size_t>(i / row_length)];
        bound = std::min(bound, bound_for(std::max(row.naive_error, relative_naive_error * row.scale), row.scale));
      }
      const double error = std::abs(value - ref);
      result.max_error = std::max(result.max_error, error);
      ratio = error == 0 ? 0 : error / bound;  // a bound of 0 gives infinity
    } else {
      const bool both_nan = std::isnan(value) && std::isnan(ref);
      const bool same = both_nan || value == ref || (std::isfinite(ref) && value == rounded(ref, got.dtype));
      ratio = same ? 0 : HUGE_VAL;
    }
    if (!(ratio <= 1)) ++num_wrong;
    if (ratio > worst) {
      worst = ratio;
      worst_bound = bound;
      result.worst_index = i;
    }
  }
  result.max_error_ratio = worst;
  result.ok = num_wrong == 0;
  if (result.ok) return result;

  const int64_t i = result.worst_index;
  result.message = options.name + " " + to_string(got) + ": element " + index_text(got, i) + " is " +
                   number(get(got, i)) + ", but the reference is " + number(get(reference, i)) +
                   (has_naive ? " (naive: " + number(get(naive, i)) + ")" : "") + "; error " +
                   number(std::abs(get(got, i) - get(reference, i))) + ", bound " + number(worst_bound) +
                   " (whole tensor " + number(result.bound) + " = " + number(options.factor) + " * naive error " +
                   number(whole.naive_error) + " + " + number(options.eps_factor) + " * eps " + number(eps) +
                   " * scale " + number(whole.scale) + " + extra " + number(options.extra) + "); " +
                   std::to_string(num_wrong) + " of " + std::to_string(count) + " elements are wrong" + footer(options);
  return result;
}

Comparison compare_bits(const ConstTensor& got, const ConstTensor& expected, const CompareOptions& options) {
  Comparison result;
  if (!same_shape(got, expected) || got.dtype != expected.dtype) {
    result.message = options.name + " " + to_string(got) + " and the expected " + to_string(expected) +
                     " differ in shape or dtype" + footer(options);
    return result;
  }
  const int64_t count = got.num_elements();
  const int64_t element_bytes = size_bytes(got.dtype);
  int64_t num_wrong = 0;
  for (int64_t i = 0; i < count; ++i) {
    const char* a = static_cast<const char*>(got.data) + offset_of(got, i) * element_bytes;
    const char* b = static_cast<const char*>(expected.data) + offset_of(expected, i) * element_bytes;
    ++result.num_compared;
    if (std::memcmp(a, b, static_cast<size_t>(element_bytes)) == 0) continue;
    if (num_wrong++ == 0) result.worst_index = i;
    result.max_error = std::max(result.max_error, std::abs(get(got, i) - get(expected, i)));
  }
  result.ok = num_wrong == 0;
  if (!result.ok) {
    const int64_t i = result.worst_index;
    result.message = options.name + " " + to_string(got) + ": element " + index_text(got, i) + " is " +
                     number(get(got, i)) + ", but must have the bits of " + number(get(expected, i)) + "; " +
                     std::to_string(num_wrong) + " of " + std::to_string(count) + " elements differ" + footer(options);
  }
  return result;
}

}  // namespace opst::test

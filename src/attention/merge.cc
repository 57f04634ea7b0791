// merge_attention: check -> run, a task per some rows. Bound by memory: each part is read once.
#include <cmath>
#include <string>

#include "attention/element.h"
#include "core/guarded.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "machine/context_impl.h"
#include "opst/attention.h"

namespace opst {

namespace attention {
namespace {

constexpr int64_t kRowsPerTask = 32;
constexpr int64_t kMaxParts = 4096;

std::string str(int64_t x) { return std::to_string(x); }

// `t` has dimensions [first, first + count) of `parts`, whose names messages count.
void check_shape(ShapeCheck& check, const char* name, const ConstTensor& t, const ConstTensor& parts, int first,
                 int count) {
  check.require(t.rank == count, [&] {
    return std::string(name) + " has rank " + str(t.rank) + ", but parts.out " + to_string(parts) + " asks for " +
           str(count);
  });
  for (int d = 0; check.ok() && d < count; ++d) {
    check.require(t.shape[d] == parts.shape[first + d], [&] {
      return std::string(name) + " dim " + str(d) + " is " + str(t.shape[d]) + ", but parts.out dim " + str(first + d) +
             " is " + str(parts.shape[first + d]);
    });
  }
}

Status check_merge(const AttentionParts& parts, const AttentionOutputs& out) {
  ShapeCheck check("merge_attention");
  const ConstTensor& o = parts.out;
  check.tensor("parts.out", o).dtype({DType::f32, DType::f64});
  check.require(o.rank >= 2, [&] {
    return "parts.out has rank " + str(o.rank) + ", but [parts, ..., value_head_dim] has at least rank 2";
  });
  if (!check.ok()) return check.status();
  check.require(o.shape[0] >= 1 && o.shape[0] <= kMaxParts,
                [&] { return "parts.out dim 0 (parts) is " + str(o.shape[0]) + ", must be 1 to " + str(kMaxParts); });
  const bool lse = parts.softmax_lse.data != nullptr, max = parts.softmax_max.data != nullptr,
             sum = parts.softmax_sum.data != nullptr;
  check.require(max == sum && lse != max,
                [] { return std::string("the parts need either softmax_lse or both softmax_max and softmax_sum"); });
  const auto statistic_of_parts = [&](const char* name, const ConstTensor& t) {
    if (t.data == nullptr) return;
    check.tensor(name, t).dtype({o.dtype});
    if (check.ok()) check_shape(check, name, t, o, 0, o.rank - 1);
  };
  statistic_of_parts("parts.softmax_lse", parts.softmax_lse);
  statistic_of_parts("parts.softmax_max", parts.softmax_max);
  statistic_of_parts("parts.softmax_sum", parts.softmax_sum);

  if (o.dtype == DType::f64)
    check.output("out", out.out).dtype({DType::f64});
  else
    check.output("out", out.out).dtype({DType::f32, DType::bf16, DType::f16});
  if (check.ok()) check_shape(check, "out", out.out, o, 1, o.rank - 1);
  const auto statistic = [&](const char* name, const Tensor& t, bool needs_max) {
    if (t.data == nullptr) return;
    check.output(name, t).dtype({o.dtype});
    if (check.ok()) check_shape(check, name, t, o, 1, o.rank - 2);
    check.require(max || !needs_max,
                  [&] { return std::string(name) + " is wanted, but the parts have softmax_lse only"; });
  };
  statistic("softmax_lse", out.softmax_lse, false);
  statistic("softmax_max", out.softmax_max, true);
  statistic("softmax_sum", out.softmax_sum, true);
  return check.status();
}

// Real: the type of the parts and of the sum over them.
template <class Real>
class Merge {
 public:
  Merge(const AttentionParts& parts, const AttentionOutputs& out) : parts_(parts), out_(out) {}

  int64_t rows() const {
    int64_t n = 1;
    for (int d = 1; d + 1 < parts_.out.rank; ++d) n *= parts_.out.shape[d];
    return n;
  }

  void row(int64_t index) const {
    const int64_t num_parts = parts_.out.shape[0];
    // A part's share is sum_k exp(max_k - M) over its total; with lse, sum_k is 1.
    const bool by_lse = parts_.softmax_lse.data != nullptr;
    const ConstTensor& tops = by_lse ? parts_.softmax_lse : parts_.softmax_max;
    const Real* top_row = at(tops, offset(tops, 1, index));
    const Real* sum_row = by_lse ? nullptr : at(parts_.softmax_sum, offset(parts_.softmax_sum, 1, index));
    const auto part = [&](int64_t k, double* top) {
      *top = static_cast<double>(top_row[k * tops.strides[0]]);
      const double sum = by_lse ? 1 : static_cast<double>(sum_row[k * parts_.softmax_sum.strides[0]]);
      return std::isinf(*top) ? 0 : sum;  // nothing was seen
    };
    double max = -HUGE_VAL, top;
    for (int64_t k = 0; k < num_parts; ++k) {
      if (part(k, &top) != 0 && !(top <= max)) max = top;  // NaN comes through
    }
    double total = 0;
    for (int64_t k = 0; k < num_parts; ++k) {
      if (const double sum = part(k, &top); sum != 0) total += sum * std::exp(top - max);
    }

    const int64_t dims = parts_.out.shape[parts_.out.rank - 1];
    const int64_t part_step = parts_.out.strides[parts_.out.rank - 1], out_step = out_.out.strides[out_.out.rank - 1];
    const Real* part_row = at(parts_.out, offset(parts_.out, 1, index));
    const int64_t out_row = offset(out_.out, 0, index);
    // Columns in pieces, so that the sum stays in registers or L1 while the parts go by.
    constexpr int64_t kPiece = 64;
    for (int64_t first = 0; first < dims; first += kPiece) {
      const int64_t n = std::min(kPiece, dims - first);
      Real sum_of_parts[kPiece] = {};
      bool any = false;
      for (int64_t k = 0; k < num_parts; ++k) {
        const double sum = part(k, &top);
        if (sum == 0) continue;
        const auto share = static_cast<Real>(sum * std::exp(top - max) / total);
        const Real* values = part_row + k * parts_.out.strides[0] + first * part_step;
        for (int64_t d = 0; d < n; ++d) {
          const Real x = share * values[d * part_step];
          sum_of_parts[d] = any ? sum_of_parts[d] + x : x;
        }
        any = true;
      }
      for (int64_t d = 0; d < n; ++d) {
        store(out_.out, out_row + (first + d) * out_step, static_cast<double>(sum_of_parts[d]));
      }
    }
    const auto statistic = [&](const Tensor& t, double x) {
      if (t.data != nullptr) store(t, offset(t, 0, index), x);
    };
    statistic(out_.softmax_lse, total == 0 ? -HUGE_VAL : max + std::log(total));
    statistic(out_.softmax_max, max);
    statistic(out_.softmax_sum, total);
  }

 private:
  static const Real* at(const ConstTensor& t, int64_t offset) { return static_cast<const Real*>(t.data) + offset; }
  // Of row `index` in a tensor whose row dimensions begin at `first`.
  int64_t offset(const ConstTensor& t, int first, int64_t index) const {
    int64_t total = 0;
    for (int d = parts_.out.rank - 2; d >= 1; --d) {
      total += index % parts_.out.shape[d] * t.strides[first + d - 1];
      index /= parts_.out.shape[d];
    }
    return total;
  }

  const AttentionParts& parts_;
  const AttentionOutputs& out_;
};

template <class Real>
void merge_all(Context::Impl& context, const AttentionParts& parts, const AttentionOutputs& out) {
  const Merge<Real> merge(parts, out);
  const int64_t rows = merge.rows();
  context.pool.parallel_for(ceil_div(rows, kRowsPerTask), [&](int64_t task, int) {
    const int64_t end = std::min(rows, (task + 1) * kRowsPerTask);
    for (int64_t row = task * kRowsPerTask; row < end; ++row) merge.row(row);
  });
}

}  // namespace
}  // namespace attention

Status merge_attention(Context& context, const AttentionParts& parts, const AttentionOutputs& outputs) {
  return guarded([&]() -> Status {
    Status status = attention::check_merge(parts, outputs);
    if (!status.ok()) return status;
    if (parts.out.dtype == DType::f64)
      attention::merge_all<double>(context.impl(), parts, outputs);
    else
      attention::merge_all<float>(context.impl(), parts, outputs);
    return {};
  });
}

}  // namespace opst

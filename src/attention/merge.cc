// merge_attention: check -> run, a task is kRowsPerTask rows. Bound by memory: each part's out is read once.
#include <algorithm>
#include <cmath>

#include "attention/check.h"
#include "attention/sequences.h"
#include "core/elements.h"
#include "core/shape_check.h"
#include "machine/context_impl.h"
#include "opst/attention.h"

namespace opst {

namespace attention {
namespace {

constexpr int64_t kRowsPerTask = 32;
constexpr int64_t kMaxParts = 4096;

// `t` has dimensions [first, first + count) of `parts`, whose names messages count.
void check_shape(ShapeCheck& check, const char* name, const ConstTensor& t, const ConstTensor& parts, int first,
                 int count) {
  check.require(
      t.rank == count, name, " has rank ", t.rank, ", but parts.out ", [&] { return to_string(parts); }, " asks for ",
      count);
  for (int d = 0; check.ok() && d < count; ++d) {
    const int64_t size = t.shape[d], wanted = parts.shape[first + d];
    check.require(size == wanted, name, " dim ", d, " is ", size, ", but parts.out dim ", first + d, " is ", wanted);
  }
}

void check_merge(ShapeCheck& check, const AttentionParts& parts, const AttentionOutputs& out, bool accumulate) {
  const ConstTensor& o = parts.out;
  check.tensor("parts.out", o).dtype(kFloats);
  check.require(o.rank >= 2, "parts.out has rank ", o.rank, ", but [parts, ..., value_head_dim] has at least rank 2");
  if (!check.ok()) return;
  check.require(o.shape[0] >= 1 && o.shape[0] <= kMaxParts, "parts.out dim 0 (parts) is ", o.shape[0],
                ", must be 1 to ", kMaxParts);
  const DType real = o.dtype == DType::f64 ? DType::f64 : DType::f32;
  const bool lse(parts.softmax_lse), max(parts.softmax_max), sum(parts.softmax_sum);
  check.require(max == sum && lse != max, "the parts need either softmax_lse or both softmax_max and softmax_sum");
  const auto statistic_of_parts = [&](const char* name, const ConstTensor& t) {
    if (t) check.tensor(name, t).dtype({real});
    if (t && check.ok()) check_shape(check, name, t, o, 0, o.rank - 1);
  };
  statistic_of_parts("parts.softmax_lse", parts.softmax_lse);
  statistic_of_parts("parts.softmax_max", parts.softmax_max);
  statistic_of_parts("parts.softmax_sum", parts.softmax_sum);

  if (real == DType::f64)
    check.output("out", out.out).dtype({DType::f64});
  else
    check.output("out", out.out).dtype({DType::f32, DType::bf16, DType::f16});
  if (check.ok()) check_shape(check, "out", out.out, o, 1, o.rank - 1);
  const auto statistic = [&](const char* name, const Tensor& t, bool needs_max) {
    if (!t) return;
    check.output(name, t).dtype({real});
    if (check.ok()) check_shape(check, name, t, o, 1, o.rank - 2);
    check.require(max || !needs_max, name, " is wanted, but the parts have softmax_lse only");
  };
  statistic("softmax_lse", out.softmax_lse, false);
  statistic("softmax_max", out.softmax_max, true);
  statistic("softmax_sum", out.softmax_sum, true);
  const bool there = lse ? bool{out.softmax_lse} : out.softmax_max && out.softmax_sum;
  check.require(there || !accumulate, "accumulate adds to what outputs hold, but ",
                lse ? "softmax_lse is not" : "softmax_max and softmax_sum are not both", " among the outputs");
}

// The statistics of one part and its row of out.
struct Part {
  double top, sum;
  const ConstTensor* out;
  int64_t row;  // in elements of out
};

// Real: the type of the statistics and of the sum over the parts.
template <class Real>
class Merge {
 public:
  Merge(const AttentionParts& parts, const AttentionOutputs& out, bool accumulate)
      : parts_(parts), out_(out), accumulate_(accumulate) {}

  void row(int64_t index) const {
    const int64_t num_parts = parts_.out.shape[0] + (accumulate_ ? 1 : 0);
    double max = -HUGE_VAL;
    for (int64_t k = 0; k < num_parts; ++k) {
      const Part p = part(k, index);
      if (p.sum != 0 && !(p.top <= max)) max = p.top;  // NaN comes through
    }
    double total = 0;
    for (int64_t k = 0; k < num_parts; ++k) {
      if (const Part p = part(k, index); p.sum != 0) total += p.sum * std::exp(p.top - max);
    }

    const int64_t dims = parts_.out.shape[parts_.out.rank - 1];
    const int64_t out_step = out_.out.strides[out_.out.rank - 1], out_row = offset(out_.out, 0, index);
    // Columns in pieces, so that the sum stays in registers or L1 while the parts go by.
    for (int64_t first = 0; first < dims; first += kPiece) {
      const int64_t n = std::min(kPiece, dims - first);
      Real sum_of_parts[kPiece] = {}, values[kPiece];
      bool any = false;
      for (int64_t k = 0; k < num_parts; ++k) {
        const Part p = part(k, index);
        if (p.sum == 0) continue;
        const auto share = static_cast<Real>(p.sum * std::exp(p.top - max) / total);
        load(*p.out, p.row, first, n, values);
        for (int64_t d = 0; d < n; ++d) {
          const Real x = share * values[d];
          sum_of_parts[d] = any ? sum_of_parts[d] + x : x;
        }
        any = true;
      }
      for (int64_t d = 0; d < n; ++d) {
        store_element(out_.out, out_row + (first + d) * out_step, static_cast<double>(sum_of_parts[d]));
      }
    }
    const auto statistic = [&](const Tensor& t, double x) {
      if (t) store_element(t, offset(t, 0, index), x);
    };
    statistic(out_.softmax_lse, total == 0 ? -HUGE_VAL : max + std::log(total));
    statistic(out_.softmax_max, max);
    statistic(out_.softmax_sum, total);
  }

 private:
  static constexpr int64_t kPiece = 64;

  // What the outputs hold comes first. A part's share is sum_k exp(max_k - M) over its total; with lse, sum_k is 1.
  Part part(int64_t k, int64_t index) const {
    const bool held = accumulate_ && k == 0;
    const AttentionParts& from = held ? held_ : parts_;
    const auto place = [&](const ConstTensor& t) {
      return held ? offset(t, 0, index) : offset(t, 1, index) + (accumulate_ ? k - 1 : k) * t.strides[0];
    };
    const auto number = [&](const ConstTensor& t) { return double{static_cast<const Real*>(t.data)[place(t)]}; };
    const double top = number(by_lse_ ? from.softmax_lse : from.softmax_max);
    const bool unseen = std::isinf(top);
    return {top, unseen ? 0 : by_lse_ ? 1 : number(from.softmax_sum), &from.out, place(from.out)};
  }

  // Columns [first, first + n) of a row of `t`.
  static void load(const ConstTensor& t, int64_t row, int64_t first, int64_t n, Real* values) {
    const int64_t step = t.strides[t.rank - 1];
    const auto of = [&]<class Element>(const Element* from) {
      from += row + first * step;
      for (int64_t d = 0; d < n; ++d) values[d] = convert<Real>(from[d * step]);
    };
    if (t.dtype == DType::bf16) return of(static_cast<const bf16*>(t.data));
    if (t.dtype == DType::f16) return of(static_cast<const f16*>(t.data));
    of(static_cast<const Real*>(t.data));
  }

  // Of row `index` in a tensor whose row dimensions begin at `first`.
  int64_t offset(const ConstTensor& t, int first, int64_t index) const {
    return row_offset(t, index, parts_.out.rank - 2, first);
  }

  const AttentionParts& parts_;
  const AttentionOutputs& out_;
  const AttentionParts held_ = {out_.out, out_.softmax_lse, out_.softmax_max, out_.softmax_sum};  // as a part
  const bool by_lse_{parts_.softmax_lse}, accumulate_;
};

template <class Real>
void merge_all(Context::Impl& context, const AttentionParts& parts, const AttentionOutputs& out, bool accumulate) {
  // Rows without columns take no memory and may be any number; statistics do.
  const bool statistics = out.softmax_lse || out.softmax_max || out.softmax_sum;
  if (out.out.num_elements() == 0 && !statistics) return;
  const Merge<Real> merge(parts, out, accumulate);
  context.pool.for_each(num_rows(out.out), kRowsPerTask, [&](int64_t row, int) { merge.row(row); });
}

}  // namespace
}  // namespace attention

Status merge_attention(Context& context, const AttentionParts& parts, const AttentionOutputs& outputs,
                       bool accumulate) {
  return checked("merge_attention", [&](ShapeCheck& check) {
    using namespace attention;
    check_merge(check, parts, outputs, accumulate);
    if (!check.ok()) return;
    const auto there = [](const auto& t) { return uniform_if_there(t, false); };
    const AttentionParts in = {normal_strides(parts.out), there(parts.softmax_lse), there(parts.softmax_max),
                               there(parts.softmax_sum)};
    const AttentionOutputs out = uniform_shapes(outputs, {});
    const auto merge = in.out.dtype == DType::f64 ? merge_all<double> : merge_all<float>;
    merge(context.impl(), in, out, accumulate);
  });
}

}  // namespace opst

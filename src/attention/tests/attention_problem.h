// A problem of attention forward with everything that a test wants to vary, its memory behind guard pages, and its
// judgement by the reference.
//
//   Problem problem({.num_heads = 4, .num_kv_heads = 2, .query_len = 13, .kv_len = 33, .head_dim = 40}, random);
//   Outcome r = problem.run(context);                  // outputs prefilled with NaN
//   EXPECT_EQ(problem.judge(r, context), "");
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "attention/judge.h"
#include "core/int_math.h"
#include "opst/attention.h"
#include "testing/compare.h"
#include "testing/contexts.h"
#include "testing/effort.h"
#include "testing/elements.h"
#include "testing/guarded_buffer.h"
#include "testing/random.h"

namespace opst::test {

// A context that nothing has run on.
inline Context fresh_context(int num_threads, std::optional<Isa> isa = {}) {
  ContextOptions options;
  options.num_threads = num_threads;
  options.isa = isa;
  Result<Context> context = Context::create(options);
  EXPECT_TRUE(context.ok()) << context.status().message();
  return std::move(context.value());
}

// Where the elements of a [batch, heads, len, dim] tensor lie.
enum class Strides : uint8_t {
  bnsd,             // contiguous
  bsnd,             // stored [batch, len, heads, dim]
  transposed,       // stored [batch, heads, dim, len]: no two elements of a row are neighbours
  broadcast_heads,  // one head's data for all; inputs only
  broadcast_batch,  // one sequence's data for all; inputs only
  padded,           // gaps after every row and head
  shifted,          // contiguous, one element off the alignment of the memory
};
inline const char* to_string(Strides s) {
  constexpr const char* kNames[] = {"bnsd",   "bsnd",   "transposed", "broadcast_heads", "broadcast_batch",
                                    "padded", "shifted"};
  return kNames[static_cast<int>(s)];
}

// A view of its own guarded memory. What no element covers stays NaN.
class View {
 public:
  View(DType dtype, int64_t a, int64_t b, int64_t c, int64_t d, Strides kind, Guard guard = Guard::after)
      : View(dtype, {a, b, c, d}, strides_of(a, b, c, d, kind), kind == Strides::shifted ? 1 : 0, guard) {}

  Tensor tensor() const { return tensor_; }
  GuardedBuffer& buffer() { return *buffer_; }
  // Nothing but elements was written: gaps still hold the bytes 0xff.
  bool gaps_intact() const {
    std::vector<char> used(static_cast<size_t>(buffer_->size_bytes()), 0);
    const int64_t element_bytes = size_bytes(tensor_.dtype);
    for (int64_t i = 0; i < tensor_.num_elements(); ++i) {
      const int64_t at = (first_ + offset_of(tensor_, i)) * element_bytes;
      std::memset(used.data() + at, 1, static_cast<size_t>(element_bytes));
    }
    const auto* bytes = static_cast<const unsigned char*>(buffer_->data());
    for (size_t i = 0; i < used.size(); ++i) {
      if (!used[i] && bytes[i] != 0xff) return false;
    }
    return buffer_->slack_intact();
  }

 private:
  struct Four {
    int64_t x[4];
  };
  View(DType dtype, Four shape, Four strides, int64_t first, Guard guard) : first_(first) {
    int64_t elements = first + 1;
    for (int i = 0; i < 4; ++i) elements += std::max<int64_t>(shape.x[i] - 1, 0) * strides.x[i];
    if (std::count(shape.x, shape.x + 4, 0) > 0) elements = first;
    buffer_ = std::make_unique<GuardedBuffer>(elements * size_bytes(dtype), guard);
    tensor_ = Tensor::contiguous(dtype, {shape.x[0], shape.x[1], shape.x[2], shape.x[3]}, nullptr);
    std::copy(strides.x, strides.x + 4, tensor_.strides);
    tensor_.data = static_cast<char*>(buffer_->data()) + first * size_bytes(dtype);
  }
  static Four strides_of(int64_t a, int64_t b, int64_t c, int64_t d, Strides kind) {
    (void)a;
    switch (kind) {
      case Strides::bsnd:
        return {{b * c * d, d, b * d, 1}};
      case Strides::transposed:
        return {{b * c * d, c * d, 1, c}};
      case Strides::broadcast_heads:
        return {{c * d, 0, d, 1}};
      case Strides::broadcast_batch:
        return {{0, c * d, d, 1}};
      case Strides::padded:
        return {{b * (c * (d + 3) + 5) + 7, c * (d + 3) + 5, d + 3, 1}};
      case Strides::bnsd:
      case Strides::shifted:
        break;
    }
    return {{b * c * d, c * d, d, 1}};
  }

  int64_t first_;
  std::unique_ptr<GuardedBuffer> buffer_;
  Tensor tensor_;
};

struct ProblemOptions {
  DType query_dtype = DType::f32, kv_dtype = DType::f32, out_dtype = DType::f32;
  int64_t batch = 1, num_heads = 1, num_kv_heads = 1;
  int64_t query_len = 1, kv_len = 1;
  int64_t head_dim = 1, value_head_dim = 1;
  Strides query_strides = Strides::bnsd, key_strides = Strides::bnsd, value_strides = Strides::bnsd,
          out_strides = Strides::bnsd;
  Fill query_fill = Fill::normal, key_fill = Fill::normal, value_fill = Fill::normal;
  bool ragged = false;  // each sequence has its own length up to kv_len
  AttentionOptions options = {};
};

inline std::string to_string(const ProblemOptions& p) {
  std::string s = std::string("query ") + to_string(p.query_dtype) + " " + to_string(p.query_strides) + " " +
                  to_string(p.query_fill) + ", key " + to_string(p.kv_dtype) + " " + to_string(p.key_strides) + " " +
                  to_string(p.key_fill) + ", value " + to_string(p.value_strides) + " " + to_string(p.value_fill) +
                  ", out " + to_string(p.out_dtype) + " " + to_string(p.out_strides);
  const auto number = [&](const char* name, int64_t x) { s += std::string(", ") + name + " " + std::to_string(x); };
  number("batch", p.batch);
  number("heads", p.num_heads);
  number("kv heads", p.num_kv_heads);
  number("query_len", p.query_len);
  number("kv_len", p.kv_len);
  number("head_dim", p.head_dim);
  number("value_head_dim", p.value_head_dim);
  if (p.ragged) s += ", ragged";
  if (p.options.causal) {
    s += p.options.alignment == CausalAlignment::top_left ? ", causal top_left" : ", causal bottom_right";
  }
  s += std::string(", path ") + to_string(p.options.path);
  number("block_q", p.options.block_q);
  number("block_kv", p.options.block_kv);
  if (p.options.softmax_scale) s += ", softmax_scale " + std::to_string(*p.options.softmax_scale);
  return s;
}

// What a call wrote.
struct Outcome {
  Status status;
  std::unique_ptr<View> out, lse, max, sum;

  // Equal bits in all four.
  std::string differs_from(const Outcome& other) const {
    for (const auto& [mine, theirs, name] :
         {std::tuple(out.get(), other.out.get(), "out"), std::tuple(lse.get(), other.lse.get(), "softmax_lse"),
          std::tuple(max.get(), other.max.get(), "softmax_max"),
          std::tuple(sum.get(), other.sum.get(), "softmax_sum")}) {
      const Comparison c = compare_bits(mine->tensor(), theirs->tensor(), {.name = name});
      if (!c.ok) return c.message;
    }
    return "";
  }
};

// Keys and values in pages, as a cache has them after many requests: blocks in any order, rows that belong to nobody
// NaN, the tables' ends full of ids that would be out of range.
struct Pages {
  std::unique_ptr<View> key, value;
  std::vector<int32_t> table;
  std::vector<int64_t> table_i64;
  std::vector<int32_t> lengths;
  AttentionInputs inputs;
};

// The cache of `norm` pages laid out anew as panel32, element by element from the definition.
struct PanelPages {
  std::unique_ptr<GuardedBuffer> key, value;
  AttentionInputs inputs;
};

inline PanelPages panels_of(const AttentionInputs& norm) {
  PanelPages out;
  out.inputs = norm;
  const auto relaid = [&](const ConstTensor& from, bool keys, std::unique_ptr<GuardedBuffer>& memory) {
    const int64_t blocks = from.shape[0], size = from.shape[1], heads = from.shape[2], dim = from.shape[3];
    const int64_t step = from.dtype == DType::bf16 ? 2 : 1;
    memory = std::make_unique<GuardedBuffer>(from.num_elements() * size_bytes(from.dtype), Guard::after);
    Tensor flat = Tensor::contiguous(from.dtype, {from.num_elements()}, memory->data());
    for (int64_t b = 0; b < blocks; ++b) {
      for (int64_t r = 0; r < size; ++r) {
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t d = 0; d < dim; ++d) {
            const int64_t in_page = keys ? r / 32 * 32 * dim + d / step * 32 * step + r % 32 * step + d % step
                                         : r / step * step * dim + d * step + r % step;
            set(flat, (b * heads + h) * size * dim + in_page, get(from, ((b * size + r) * heads + h) * dim + d));
          }
        }
      }
    }
    return keys ? Tensor::contiguous(from.dtype, {blocks, heads, size / 32, dim / step, 32 * step}, memory->data())
                : Tensor::contiguous(from.dtype, {blocks, heads, size / step, dim * step}, memory->data());
  };
  out.inputs.key = relaid(norm.key, true, out.key);
  out.inputs.value = relaid(norm.value, false, out.value);
  return out;
}

class Problem {
 public:
  Problem(const ProblemOptions& p, Random& random) : p_(p) {
    query_ = std::make_unique<View>(p.query_dtype, p.batch, p.num_heads, p.query_len, p.head_dim, p.query_strides);
    key_ = std::make_unique<View>(p.kv_dtype, p.batch, p.num_kv_heads, p.kv_len, p.head_dim, p.key_strides);
    value_ = std::make_unique<View>(p.kv_dtype, p.batch, p.num_kv_heads, p.kv_len, p.value_head_dim, p.value_strides);
    fill(query_->tensor(), p.query_fill, random);
    fill(key_->tensor(), p.key_fill, random);
    fill(value_->tensor(), p.value_fill, random);
    inputs = {.query = query_->tensor(), .key = key_->tensor(), .value = value_->tensor()};
    if (p.ragged) {
      for (int64_t b = 0; b < p.batch; ++b) lengths_.push_back(static_cast<int32_t>(random.integer(0, p.kv_len)));
      inputs.kv_lengths = ConstTensor::contiguous(DType::i32, {p.batch}, lengths_.data());
    }
  }

  const ProblemOptions& options() const { return p_; }
  Tensor query() const { return query_->tensor(); }
  Tensor key() const { return key_->tensor(); }
  Tensor value() const { return value_->tensor(); }
  int64_t length(int64_t b) const { return lengths_.empty() ? p_.kv_len : lengths_[static_cast<size_t>(b)]; }

  AttentionPlan plan(const Machine& machine) const {
    int64_t kv_len = 0;
    for (int64_t b = 0; b < p_.batch; ++b) kv_len = std::max(kv_len, length(b));
    AttentionOptions options = p_.options;
    options.page_layout = layout;
    return plan_attention({.query_dtype = p_.query_dtype,
                           .kv_dtype = p_.kv_dtype,
                           .batch = p_.batch,
                           .num_heads = p_.num_heads,
                           .num_kv_heads = p_.num_kv_heads,
                           .query_len = p_.query_len,
                           .kv_len = kv_len,
                           .head_dim = p_.head_dim,
                           .value_head_dim = p_.value_head_dim,
                           .paged = layout == PageLayout::panel32,
                           .unit_stride_kv = inputs.key.strides[3] == 1 && inputs.value.strides[3] == 1,
                           .options = options},
                          machine);
  }

  Outcome run(const Context& context) const { return run(context, inputs); }
  Outcome run(const Context& context, const AttentionInputs& in) const {
    Outcome r;
    const DType statistics = p_.query_dtype == DType::f64 ? DType::f64 : DType::f32;
    r.out = std::make_unique<View>(p_.out_dtype, p_.batch, p_.num_heads, p_.query_len, p_.value_head_dim,
                                   p_.out_strides, Guard::before);
    const auto statistic = [&](std::unique_ptr<View>& view) {
      view = std::make_unique<View>(statistics, p_.batch, p_.num_heads, p_.query_len, 1, p_.out_strides);
      return view->tensor().selected(3, 0);
    };
    AttentionOutputs out{.out = r.out->tensor()};
    out.softmax_lse = statistic(r.lse);
    out.softmax_max = statistic(r.max);
    out.softmax_sum = statistic(r.sum);
    AttentionOptions options = p_.options;
    if (in.key.rank == 5) options.page_layout = PageLayout::panel32;  // panels_of
    r.status = flash_attention_forward(const_cast<Context&>(context), in, out, options);
    return r;
  }

  // "" where `r` agrees with the reference; at most max_rows rows are looked at, all of them where they are fewer.
  std::string judge(const Outcome& r, const Context& context, int64_t max_rows = 1 << 20) {
    if (!r.status.ok()) return r.status.message();
    const AttentionPlan plan_used = plan(context.machine());
    const std::string about = to_string(p_) + "\n  " + to_string(context.machine()) + ", " +
                              std::to_string(context.num_threads()) + " threads\n  " + opst::to_string(plan_used);
    const DType storage = naive_storage(plan_used.product);
    compute_reference(storage, max_rows);
    for (View* view : {r.out.get(), r.lse.get(), r.max.get(), r.sum.get()}) {
      if (!view->gaps_intact()) return "an output was written beside its elements\n  " + about;
    }
    JudgedRows rows{.about = about,
                    .query_dtype = p_.query_dtype,
                    .out_dtype = p_.out_dtype,
                    .storage = storage,
                    .kv_len = p_.kv_len,
                    .reference = reference_,
                    .naive = naive_[static_cast<size_t>(storage)],
                    .score_scale = score_scale_,
                    .typical_value = typical_value_,
                    .flushed = flushed_,
                    .rounds_twice = context.machine().isa == Isa::generic};
    for (const int64_t row : rows_) {
      for (int64_t d = 0; d < p_.value_head_dim; ++d) {
        rows.out.push_back(get(r.out->tensor(), row * p_.value_head_dim + d));
      }
      rows.lse.push_back(get(r.lse->tensor(), row));
      rows.max.push_back(get(r.max->tensor(), row));
      rows.sum.push_back(get(r.sum->tensor(), row));
    }
    return rows.judge(worst_ratio);
  }

  // After a change of the inputs' elements.
  void forget_reference() {
    has_reference_ = false;
    rows_.clear();
    reference_.clear();
    for (auto& rows : naive_) rows.clear();
    score_scale_ = typical_value_ = flushed_ = 0;
  }

  // The same keys and values behind a block table.
  Pages paged(int64_t block_size, Random& random, bool i64 = false) const {
    Pages pages;
    int64_t used = 0, max_blocks = 2;
    for (int64_t b = 0; b < p_.batch; ++b) {
      pages.lengths.push_back(static_cast<int32_t>(length(b)));
      used += ceil_div(length(b), block_size);
      max_blocks = std::max(max_blocks, ceil_div(length(b), block_size) + 2);
    }
    const int64_t num_blocks = used + 3;
    std::vector<int32_t> order(static_cast<size_t>(num_blocks));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i) - 1))]);
    }
    pages.key =
        std::make_unique<View>(p_.kv_dtype, num_blocks, block_size, p_.num_kv_heads, p_.head_dim, Strides::bnsd);
    pages.value =
        std::make_unique<View>(p_.kv_dtype, num_blocks, block_size, p_.num_kv_heads, p_.value_head_dim, Strides::bnsd);
    size_t next = 0;
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t i = 0; i < max_blocks; ++i) {
        const bool real = i < ceil_div(length(b), block_size);
        pages.table.push_back(real ? order[next] : i % 2 == 0 ? std::numeric_limits<int32_t>::max() : -7);
        if (!real) continue;
        for (int64_t j = i * block_size; j < std::min(length(b), (i + 1) * block_size); ++j) {
          for (int64_t h = 0; h < p_.num_kv_heads; ++h) {
            copy(key().selected(0, b).selected(0, h).selected(0, j),
                 pages.key->tensor().selected(0, order[next]).selected(0, j % block_size).selected(0, h));
            copy(value().selected(0, b).selected(0, h).selected(0, j),
                 pages.value->tensor().selected(0, order[next]).selected(0, j % block_size).selected(0, h));
          }
        }
        ++next;
      }
    }
    pages.table_i64.assign(pages.table.begin(), pages.table.end());
    pages.inputs = {.query = query_->tensor(), .key = pages.key->tensor(), .value = pages.value->tensor()};
    pages.inputs.block_table = i64 ? ConstTensor::contiguous(DType::i64, {p_.batch, max_blocks}, pages.table_i64.data())
                                   : ConstTensor::contiguous(DType::i32, {p_.batch, max_blocks}, pages.table.data());
    pages.inputs.kv_lengths = ConstTensor::contiguous(DType::i32, {p_.batch}, pages.lengths.data());
    return pages;
  }

  AttentionInputs inputs;
  PageLayout layout = PageLayout::norm;  // of the pages that the judged outcome was computed from
  double worst_ratio = 0;                // largest error / bound that judge saw

 private:
  using ReferenceRow = attention::ReferenceRow;

  void compute_reference(DType storage, int64_t max_rows) {
    const int64_t total = p_.batch * p_.num_heads * p_.query_len;
    const auto row_at = [&](auto function, int64_t row, auto... rest) {
      return function(inputs, p_.options, row / p_.query_len / p_.num_heads, row / p_.query_len % p_.num_heads,
                      row % p_.query_len, rest...);
    };
    if (!has_reference_) {
      has_reference_ = true;
      const int64_t count = std::min(total, max_rows);
      for (int64_t i = 0; i < count; ++i) rows_.push_back(i * total / count);  // the first row, and evenly on
      if (count > 1) rows_.back() = total - 1;
      for (const int64_t row : rows_) {
        reference_.push_back(row_at(attention::reference_row, row));
        const double scale = reference_.back().score_scale;
        if (std::isfinite(scale)) score_scale_ = std::max(score_scale_, scale);
      }
      double largest_operand = 0;
      for (const ConstTensor& t : {inputs.query, inputs.key, inputs.value}) {
        for (int64_t i = 0; i < t.num_elements(); ++i) {
          const double x = std::fabs(get(t, i));
          if (!std::isfinite(x)) continue;
          largest_operand = std::max(largest_operand, x);
          if (t.data == inputs.value.data) typical_value_ += x / static_cast<double>(t.num_elements());
        }
      }
      // The pairwise dot counts subnormal operands as zero.
      if (p_.kv_dtype == DType::bf16) flushed_ = static_cast<double>(p_.kv_len) * 0x1p-126 * (1 + largest_operand);
    }
    auto& naive = naive_[static_cast<size_t>(storage)];
    if (!naive.empty()) return;
    for (const int64_t row : rows_) naive.push_back(row_at(attention::naive_row, row, storage));
  }

  ProblemOptions p_;
  std::unique_ptr<View> query_, key_, value_;
  std::vector<int32_t> lengths_;
  bool has_reference_ = false;
  std::vector<int64_t> rows_;  // judged ones
  std::vector<ReferenceRow> reference_;
  std::vector<ReferenceRow> naive_[4];  // by storage
  double score_scale_ = 0, typical_value_ = 0, flushed_ = 0;
};

}  // namespace opst::test

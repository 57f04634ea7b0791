// Calls of lightning_indexer for tests: drawn at random from the grid of attention's options, behind guard pages, and
// the verdict on what the operator wrote.
//
//   const IndexerDraw d = draw_indexer(random);
//   const IndexerTestCall call(d, random);
//   const IndexerResult r = call.run(context);
//   EXPECT_EQ(call.judge(r), "");
#pragma once

#include <set>

#include "attention/indexer_reference.h"
#include "attention/tests/drawn_call.h"
#include "opst/lightning_indexer.h"

namespace opst::test {

struct IndexerDraw {
  Draw call;  // its queries, keys, lengths and layouts, causal, block_q and block_kv; the rest is not used
  int64_t count = 1;
  DType weights_dtype = DType::f32, values_dtype = DType::f32;
  Strides weights_strides = Strides::bnsd;
  bool values = true;
  bool query_lengths = false;
  // Small integers: every score is exact, and ties are many.
  bool exact = false;
};

inline std::string to_string(const IndexerDraw& d) {
  return to_string(d.call) + "\n  count " + std::to_string(d.count) + ", weights " + to_string(d.weights_dtype) + " " +
         to_string(d.weights_strides) + (d.values ? std::string(", values ") + to_string(d.values_dtype) : "") +
         (d.query_lengths ? ", query_lengths" : "") + (d.exact ? ", exact" : "") + ", seed " + std::to_string(seed());
}

inline IndexerDraw draw_indexer(Random& random) {
  IndexerDraw d;
  Draw& c = d.call;
  c = draw(random);
  if (c.query_dtype == DType::f64) c.query_dtype = c.kv_dtype = DType::f32;
  if (c.keys == Keys::panel_pages) c.keys = Keys::norm_pages;
  c.num_heads = c.num_kv_heads * random.pick<int64_t>({1, 2, 3, 5, 8, 13, 33});
  c.value_head_dim = 1;
  c.prefix = c.mask = c.bias = c.alibi = c.sinks = c.drop_mask = false;
  c.mask_heads = 0;
  AttentionOptions options;
  options.causal = random.chance(0.6);
  options.block_q = c.options.block_q, options.block_kv = c.options.block_kv;
  c.options = options;
  d.count = random.pick<int64_t>({1, 2, 7, 16, random.integer(1, 150)});
  d.weights_dtype = random.pick({DType::f32, DType::bf16, DType::f16});
  d.values_dtype = random.pick({DType::f32, DType::f32, DType::bf16, DType::f16});
  d.weights_strides = random.pick({Strides::bnsd, Strides::bsnd, Strides::padded, Strides::shifted});
  d.values = random.chance(0.8);
  d.query_lengths = !c.varlen_q && random.chance(0.3);
  d.exact = random.chance(0.5);
  return d;
}

// What a call wrote.
struct IndexerResult {
  Status status;
  std::unique_ptr<View> indices_memory, values_memory;
  LightningIndexerOutputs outputs;

  std::string differs_from(const IndexerResult& other) const {
    const Comparison c = compare_bits(outputs.indices, other.outputs.indices, {.name = "indices"});
    if (!c.ok || !outputs.values) return c.message;
    return compare_bits(outputs.values, other.outputs.values, {.name = "values"}).message;
  }
};

class IndexerTestCall {
 public:
  IndexerTestCall(const IndexerDraw& d, Random& random) : d_(d), tensors_(d.call, random) {
    const Draw& c = d.call;
    const AttentionInputs& in = tensors_.inputs;
    inputs = {.query = in.query,
              .key = in.key,
              .weights = {},
              .block_table = in.block_table,
              .kv_lengths = in.kv_lengths,
              .cu_seqlens_q = in.cu_seqlens_q,
              .cu_seqlens_k = in.cu_seqlens_k};
    if (d.exact) {
      for (const ConstTensor& t : {in.query, in.key}) {  // NaN stays NaN
        for (int64_t i = 0; i < t.num_elements(); ++i) {
          const double x = get(t, i);
          set(mutable_view(t), i, std::isinf(x) ? x : std::clamp(std::round(x), -4.0, 4.0));
        }
      }
    }
    weights_ = c.varlen_q ? std::make_unique<View>(d.weights_dtype, 1, rows(), c.num_heads, 1, d.weights_strides)
                          : std::make_unique<View>(d.weights_dtype, c.batch(), c.num_heads, c.query_lens[0], 1,
                                                   d.weights_strides);
    Tensor weights = weights_->tensor().selected(3, 0);
    if (c.varlen_q) weights = weights.selected(0, 0);
    fill(weights, d.exact ? Fill::small_integers : Fill::normal, random);
    inputs.weights = weights;
    lengths_.assign(c.query_lens.begin(), c.query_lens.end());
    if (d.query_lengths) {
      for (int64_t& length : lengths_) length = random.integer(0, length);
      inputs.query_lengths = ConstTensor::contiguous(DType::i64, {c.batch()}, lengths_.data());
    }
  }

  const IndexerDraw& drawn() const { return d_; }
  LightningIndexerOptions options() const {
    const AttentionOptions& o = d_.call.options;
    return {.causal = o.causal, .block_q = o.block_q, .block_kv = o.block_kv};
  }

  IndexerResult run(const Context& context) const { return run(context, options()); }
  IndexerResult run(const Context& context, const LightningIndexerOptions& options) const {
    const Draw& c = d_.call;
    IndexerResult r;
    const auto output = [&](DType dtype, std::unique_ptr<View>& memory) {
      memory = c.varlen_q
                   ? std::make_unique<View>(dtype, 1, rows(), c.num_kv_heads, d_.count, c.out_strides, Guard::before)
                   : std::make_unique<View>(dtype, c.batch(), c.query_lens[0], c.num_kv_heads, d_.count, c.out_strides,
                                            Guard::before);
      const Tensor t = c.varlen_q ? memory->tensor().selected(0, 0) : memory->tensor();
      for (int64_t i = 0; i < t.num_elements(); ++i) set(t, i, 7777777);  // -1 must be written, too
      return t;
    };
    r.outputs.indices = output(DType::i32, r.indices_memory);
    if (d_.values) r.outputs.values = output(d_.values_dtype, r.values_memory);
    r.status = lightning_indexer(const_cast<Context&>(context), inputs, r.outputs, options);
    return r;
  }

  // "" where the rows, about `most` of them, agree with the reference.
  std::string judge(const IndexerResult& r, int64_t most = 1 << 20) const {
    if (!r.status.ok()) return r.status.message() + "\n  " + to_string(d_);
    if (!r.indices_memory->gaps_intact() || (d_.values && !r.values_memory->gaps_intact())) {
      return "an output was written beside its elements\n  " + to_string(d_);
    }
    const Draw& c = d_.call;
    const int64_t all = c.varlen_q ? rows() : c.batch() * c.query_lens[0], step = std::max<int64_t>(1, all / most);
    for (int64_t row = 0; row < all; row += step) {
      for (int64_t h = 0; h < c.num_kv_heads; ++h) {
        const std::string message = judge_row(r, row, h);
        if (!message.empty()) {
          return "row " + std::to_string(row) + ", key head " + std::to_string(h) + ": " + message + "\n  " +
                 to_string(d_);
        }
      }
    }
    return "";
  }

  LightningIndexerInputs inputs;

 private:
  int64_t rows() const { return tensors_.inputs.query.shape[0]; }  // varlen: of all sequences, and behind them

  // Sequence and query of a row; query -1: the row is none.
  std::pair<int64_t, int64_t> place_of(int64_t row) const {
    if (!d_.call.varlen_q) {
      const int64_t b = row / d_.call.query_lens[0], i = row % d_.call.query_lens[0];
      return {b, i < lengths_[static_cast<size_t>(b)] ? i : -1};
    }
    for (int64_t b = 0; b < d_.call.batch(); row -= lengths_[static_cast<size_t>(b++)]) {
      if (row < lengths_[static_cast<size_t>(b)]) return {b, row};
    }
    return {0, -1};
  }

  std::string judge_row(const IndexerResult& r, int64_t row, int64_t h) const {
    const auto [b, i] = place_of(row);
    attention::IndexerRow wanted;
    if (i >= 0) wanted = attention::indexer_row(inputs, d_.call.options.causal, b, h, i);
    std::vector<int64_t> keys;
    std::vector<double> values;
    for (int64_t n = 0; n < d_.count; ++n) {
      const int64_t at = (row * d_.call.num_kv_heads + h) * d_.count + n;
      keys.push_back(static_cast<int64_t>(get(r.outputs.indices, at)));
      if (d_.values) values.push_back(get(r.outputs.values, at));
    }
    const auto seen = static_cast<int64_t>(wanted.scores.size());
    for (int64_t n = 0; n < d_.count; ++n) {
      const int64_t key = keys[static_cast<size_t>(n)];
      const bool there = n < seen;
      if (there ? key < 0 || key >= seen : key != -1) {
        return "place " + std::to_string(n) + " is " + std::to_string(key) + ", but " + std::to_string(seen) +
               " keys are seen";
      }
      if (!there && d_.values && values[static_cast<size_t>(n)] != -HUGE_VAL) return "no -inf beside a -1";
    }
    keys.resize(static_cast<size_t>(std::min(seen, d_.count)));
    if (std::set<int64_t>(keys.begin(), keys.end()).size() != keys.size()) return "a key comes twice";
    return d_.exact ? judge_exactly(wanted, keys, values) : judge_within_bounds(wanted, keys, values);
  }

  double rounded(double x) const {
    float bits = 0;
    set(d_.values_dtype, &bits, 0, x);
    return get(d_.values_dtype, &bits, 0);
  }
  static bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

  std::string judge_exactly(const attention::IndexerRow& wanted, const std::vector<int64_t>& keys,
                            const std::vector<double>& values) const {
    const std::vector<int64_t> best = attention::selected(wanted.scores, d_.count);
    for (size_t n = 0; n < keys.size(); ++n) {
      if (keys[n] != best[n]) {
        return "place " + std::to_string(n) + " is " + std::to_string(keys[n]) + ", not " + std::to_string(best[n]);
      }
      const double score = rounded(wanted.scores[static_cast<size_t>(keys[n])]);
      if (d_.values && !same(values[n], score)) {
        return "value " + std::to_string(n) + " is " + std::to_string(values[n]) + ", not " + std::to_string(score);
      }
    }
    return "";
  }

  // Rounding may exchange keys whose scores are as near to each other as it moves them.
  std::string judge_within_bounds(const attention::IndexerRow& wanted, const std::vector<int64_t>& keys,
                                  const std::vector<double>& values) const {
    const Draw& c = d_.call;
    const double steps = static_cast<double>(c.head_dim + c.num_heads / c.num_kv_heads + 4);
    const auto score = [&](int64_t key) { return wanted.scores[static_cast<size_t>(key)]; };
    const auto bound = [&](int64_t key) {  // of f32 sums: each step rounds product and sum
      const double x = wanted.parts[static_cast<size_t>(key)] * steps * 0x1p-23 + 0x1p-110;
      return std::isfinite(x) ? x : 0;
    };
    const auto may_precede = [&](int64_t i, int64_t j) {
      if (std::isnan(score(i)) || std::isnan(score(j))) return attention::comes_before(score(i), i, score(j), j);
      return score(i) + bound(i) + bound(j) >= score(j);
    };
    for (size_t n = 0; n < keys.size(); ++n) {
      if (n > 0 && !may_precede(keys[n - 1], keys[n])) return "place " + std::to_string(n) + " is out of order";
      if (!d_.values) continue;
      const double x = score(keys[n]), error = bound(keys[n]) + epsilon(d_.values_dtype) * std::fabs(x) + 0x1p-24;
      const bool near = same(values[n], rounded(x)) || std::fabs(values[n] - x) <= error;
      if (!near)
        return "value " + std::to_string(n) + " is " + std::to_string(values[n]) + ", not " + std::to_string(x);
      const bool tie = n > 0 && d_.values_dtype == DType::f32 && values[n - 1] == values[n];
      if (tie && keys[n - 1] > keys[n]) return "place " + std::to_string(n) + ": a tie with the larger index first";
    }
    const std::set<int64_t> chosen(keys.begin(), keys.end());
    for (int64_t j = 0; j < static_cast<int64_t>(wanted.scores.size()); ++j) {
      if (chosen.count(j) > 0 || keys.empty()) continue;
      for (const int64_t i : keys) {
        if (!may_precede(i, j)) return "key " + std::to_string(j) + " is better than key " + std::to_string(i);
      }
    }
    return "";
  }

  IndexerDraw d_;
  DrawnCall tensors_;
  std::unique_ptr<View> weights_;
  std::vector<int64_t> lengths_;  // queries of each sequence
};

}  // namespace opst::test

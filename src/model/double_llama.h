// The model's equations in double, for tests: plain loops over the dequantised weights, everything recomputed for every
// position; and the comparison of a session with them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "model/llama.h"
#include "model/tiny_model.h"

namespace opst::model {

class DoubleLlama {
 public:
  DoubleLlama(const TinyModel& model, int64_t rope_dims) : model_(model), rope_dims_(rope_dims) {}

  // Logits after each of the tokens: [tokens][vocab].
  std::vector<std::vector<double>> logits(const std::vector<int32_t>& tokens) const {
    const TinyModelOptions& o = model_.options;
    const auto width = static_cast<size_t>(model_.width()), dim = static_cast<size_t>(o.head_dim);
    std::vector<std::vector<double>> hidden;
    for (const int32_t token : tokens) {
      const auto begin = weight("token_embd.weight").begin() + static_cast<std::ptrdiff_t>(token) * model_.width();
      hidden.emplace_back(begin, begin + model_.width());
    }
    for (int64_t layer = 0; layer < o.num_layers; ++layer) {
      const std::string prefix = "blk." + std::to_string(layer) + ".";
      std::vector<std::vector<double>> keys, values;
      for (size_t t = 0; t < tokens.size(); ++t) {
        const auto x = norm(hidden[t], prefix + "attn_norm.weight");
        auto query = times(prefix + "attn_q.weight", x);
        keys.push_back(times(prefix + "attn_k.weight", x));
        values.push_back(times(prefix + "attn_v.weight", x));
        turn(query, t);
        turn(keys[t], t);
        if (cached) cached(keys[t]), cached(values[t]);
        std::vector<double> attended(query.size());
        for (size_t head = 0; head < static_cast<size_t>(o.num_heads); ++head) {
          const size_t kv_head = head / static_cast<size_t>(o.num_heads / o.num_kv_heads);
          std::vector<double> weights;
          for (size_t s = 0; s <= t; ++s) {
            double score = 0;
            for (size_t d = 0; d < dim; ++d) score += query[head * dim + d] * keys[s][kv_head * dim + d];
            weights.push_back(std::exp(score / std::sqrt(static_cast<double>(dim))));
          }
          const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
          for (size_t s = 0; s <= t; ++s) {
            for (size_t d = 0; d < dim; ++d) {
              attended[head * dim + d] += weights[s] / sum * values[s][kv_head * dim + d];
            }
          }
        }
        const auto projected = times(prefix + "attn_output.weight", attended);
        for (size_t i = 0; i < width; ++i) hidden[t][i] += projected[i];
      }
      for (size_t t = 0; t < tokens.size(); ++t) {
        const auto x = norm(hidden[t], prefix + "ffn_norm.weight");
        std::vector<double> added(width);
        if (o.num_experts == 0) add_feed_forward(prefix, ".weight", 0, x, 1, added);
        if (o.num_experts > 0) add_experts(prefix, x, added);
        for (size_t i = 0; i < width; ++i) hidden[t][i] += added[i];
      }
    }
    std::vector<std::vector<double>> result;
    const char* output = model_.options.separate_output ? "output.weight" : "token_embd.weight";
    for (const auto& h : hidden) result.push_back(times(output, norm(h, "output_norm.weight")));
    return result;
  }

  // What the cache makes of all heads of a token, keys (turned) and values; empty: nothing.
  std::function<void(std::vector<double>& heads)> cached = {};

 private:
  const std::vector<float>& weight(const std::string& name) const { return model_.weights.at(name); }

  // The product with a matrix, or with one of a stack of matrices of `rows` rows.
  std::vector<double> times(const std::string& name, const std::vector<double>& x, size_t rows = 0,
                            size_t index = 0) const {
    const std::vector<float>& matrix = weight(name);
    const size_t first = index * rows * x.size(), size = rows > 0 ? rows * x.size() : matrix.size();
    std::vector<double> out(size / x.size());
    for (size_t i = 0; i < size; ++i) out[i / x.size()] += matrix[first + i] * x[i % x.size()];
    return out;
  }
  // added += weight * feed-forward of x, of the expert `index` where there are several.
  void add_feed_forward(const std::string& prefix, const std::string& suffix, size_t index,
                        const std::vector<double>& x, double weight, std::vector<double>& added) const {
    const auto size = static_cast<size_t>(suffix == "_exps.weight" ? model_.options.ffn_size : 0);
    auto gate = times(prefix + "ffn_gate" + suffix, x, size, index);
    const auto up = times(prefix + "ffn_up" + suffix, x, size, index);
    for (size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
    const auto down = times(prefix + "ffn_down" + suffix, gate, size > 0 ? x.size() : 0, index);
    for (size_t i = 0; i < down.size(); ++i) added[i] += weight * down[i];
  }
  // The experts with the largest scores, weighted by the softmax of these.
  void add_experts(const std::string& prefix, const std::vector<double>& x, std::vector<double>& added) const {
    const TinyModelOptions& o = model_.options;
    const auto scores = times(prefix + "ffn_gate_inp.weight", x);
    std::vector<size_t> order(scores.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
    order.resize(static_cast<size_t>(o.experts_used));
    double sum = 0;
    for (const size_t e : order) sum += std::exp(scores[e]);
    for (const size_t e : order) add_feed_forward(prefix, "_exps.weight", e, x, std::exp(scores[e]) / sum, added);
    if (o.shared_size > 0) add_feed_forward(prefix, "_shexp.weight", 0, x, 1, added);
  }
  std::vector<double> norm(const std::vector<double>& x, const std::string& name) const {
    double sum = 0;
    for (const double value : x) sum += value * value;
    const double scale = 1 / std::sqrt(sum / static_cast<double>(x.size()) + 1e-5);
    std::vector<double> out;
    for (size_t i = 0; i < x.size(); ++i) out.push_back(x[i] * scale * weight(name)[i]);
    return out;
  }
  // Adjacent pairs of each head's first rope_dims elements.
  void turn(std::vector<double>& heads, size_t position) const {
    const auto dim = static_cast<size_t>(model_.options.head_dim), rotated = static_cast<size_t>(rope_dims_);
    for (size_t head = 0; head < heads.size(); head += dim) {
      for (size_t i = 0; i < rotated; i += 2) {
        const double angle =
            static_cast<double>(position) * std::pow(static_cast<double>(model_.options.rope_base),
                                                     -static_cast<double>(i) / static_cast<double>(rotated));
        const double a = heads[head + i], b = heads[head + i + 1];
        heads[head + i] = a * std::cos(angle) - b * std::sin(angle);
        heads[head + i + 1] = a * std::sin(angle) + b * std::cos(angle);
      }
    }
  }

  const TinyModel& model_;
  int64_t rope_dims_;
};

inline std::vector<int32_t> random_tokens(size_t count, int64_t vocab_size, uint32_t seed = 5) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % static_cast<uint32_t>(vocab_size));
  return tokens;
}

struct Loaded {
  TinyModel tiny;
  std::string bytes;
  LlamaModel model;
};

inline Loaded load(Context& context, const TinyModelOptions& options = {}) {
  TinyModel tiny = make_tiny_model(options);
  std::string bytes = tiny.writer.bytes();
  const Result<GgufFile> file = GgufFile::parse("f.gguf", as_bytes(bytes));
  EXPECT_TRUE(file.ok()) << file.status().message();
  Result<LlamaModel> model = LlamaModel::load(context, file.value());
  EXPECT_TRUE(model.ok()) << model.status().message();
  return {std::move(tiny), std::move(bytes), std::move(model.value())};
}

inline LlamaSession open_session(Context& context, const LlamaModel& model, const SessionOptions& options) {
  Result<LlamaSession> session = LlamaSession::create(context, model, options);
  EXPECT_TRUE(session.ok()) << session.status().message();
  return std::move(session.value());
}

inline Context make_context(int num_threads) {
  return std::move(Context::create({.num_threads = num_threads}).value());
}

inline double largest_difference(std::span<const float> got, std::span<const double> expected) {
  double largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double difference = std::fabs(got[i] - expected[i]);
    // NaN counts as infinite.
    largest = difference <= largest ? largest : std::isnan(difference) ? INFINITY : difference;
  }
  return largest;
}

// f32 over sums of up to 160 terms and a few layers; the logits are a few units large.
inline constexpr double kTolerance = 2e-4;

inline void check_against_double(Context& context, const Loaded& loaded, const SessionOptions& options,
                                 double tolerance, int64_t rope_dims = 0,
                                 const decltype(DoubleLlama::cached)& cached = {}) {
  const std::vector<int32_t> tokens = random_tokens(45, loaded.tiny.vocab_size);
  DoubleLlama reference(loaded.tiny, rope_dims > 0 ? rope_dims : loaded.tiny.options.head_dim);
  reference.cached = cached;
  const auto expected = reference.logits(tokens);
  LlamaSession session = open_session(context, loaded.model, options);
  int64_t next = 0;
  const Status status = session.feed_all(tokens, [&](int64_t position, std::span<const float> logits) {
    EXPECT_EQ(position, next++);
    EXPECT_LE(largest_difference(logits, expected[static_cast<size_t>(position)]), tolerance) << position;
  });
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(next, 45);
  // The last position alone, and then one token at a time.
  session.reset();
  auto logits = session.feed(std::span(tokens).first(40));
  for (size_t t = 40;; ++t) {
    ASSERT_TRUE(logits.ok()) << logits.status().message();
    EXPECT_LE(largest_difference(logits.value(), expected[t - 1]), tolerance) << t - 1;
    if (t == 45) break;
    logits = session.feed(std::span(tokens).subspan(t, 1));
  }
  EXPECT_EQ(session.position(), 45);
}

}  // namespace opst::model

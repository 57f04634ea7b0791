// Perplexity by its definition, token by token, on small random weights.
#include "model/perplexity.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "model/tiny_model.h"
#include "opst/context.h"

namespace opst::model {
namespace {

class PerplexityTest : public testing::Test {
 protected:
  PerplexityTest()
      : context_(std::move(Context::create({.num_threads = 1}).value())),
        bytes_(make_tiny_model().writer.bytes()),
        file_(std::move(GgufFile::parse("f.gguf", as_bytes(bytes_)).value())),
        model_(std::move(LlamaModel::load(context_, file_).value())),
        tokens_(50) {
    std::iota(tokens_.begin(), tokens_.end(), 7);
  }

  LlamaSession open_session(const SessionOptions& options) {
    return std::move(LlamaSession::create(context_, model_, options).value());
  }

  double window_nll(size_t begin, size_t end) {
    LlamaSession session = open_session({.context = 64});
    double sum = 0;
    for (size_t i = begin; i + 1 < end; ++i) {
      const auto logits = session.feed({&tokens_[i], 1});
      double exponentials = 0;
      for (const float logit : logits.value()) exponentials += std::exp(static_cast<double>(logit));
      sum += std::log(exponentials) - static_cast<double>(logits.value()[static_cast<size_t>(tokens_[i + 1])]);
    }
    return sum;
  }

  Context context_;
  std::string bytes_;
  GgufFile file_;
  LlamaModel model_;
  std::vector<int32_t> tokens_;
};

TEST_F(PerplexityTest, WindowsStartFreshAndALastOneOfTwoCounts) {
  for (const int64_t chunk : {3, 512}) {
    LlamaSession session = open_session({.context = 16, .prefill_chunk = chunk, .logit_rows = 5});
    std::vector<WindowScore> windows;
    const auto score = [&](const WindowScore& window) { windows.push_back(window); };
    const auto result = measure_perplexity(session, tokens_, score);
    ASSERT_TRUE(result.ok()) << result.status().message();
    EXPECT_EQ(result.value().tokens, 50);
    EXPECT_EQ(result.value().counted, 46);
    ASSERT_EQ(windows.size(), 4u);
    double sum = 0;
    for (size_t i = 0; i < 4; ++i) {
      const size_t begin = i * 16, end = std::min(begin + 16, tokens_.size());
      EXPECT_EQ(windows[i].begin, static_cast<int64_t>(begin));
      EXPECT_EQ(windows[i].tokens, static_cast<int64_t>(end - begin));
      EXPECT_NEAR(windows[i].nll_sum, window_nll(begin, end), 1e-3) << i;
      sum += windows[i].nll_sum;
    }
    EXPECT_DOUBLE_EQ(result.value().nll_sum, sum);
    EXPECT_DOUBLE_EQ(result.value().mean_nll(), sum / 46);
    EXPECT_DOUBLE_EQ(result.value().perplexity(), std::exp(sum / 46));
  }
}

TEST_F(PerplexityTest, ALastWindowOfOneTokenDoesNotCount) {
  LlamaSession session = open_session({.context = 7});
  const auto all = measure_perplexity(session, tokens_, {}),
             without = measure_perplexity(session, std::span(tokens_).first(49), {});
  ASSERT_TRUE(all.ok());
  EXPECT_EQ(all.value().tokens, 50);
  EXPECT_EQ(all.value().counted, 42);
  EXPECT_EQ(all.value().nll_sum, without.value().nll_sum);
}

TEST_F(PerplexityTest, WhatCannotBePredictedIsRefused) {
  LlamaSession session = open_session({.context = 8}), narrow = open_session({.context = 1});
  EXPECT_EQ(measure_perplexity(session, {}, {}).status().message(),
            "the text has 0 tokens, but predicting one from another takes 2");
  EXPECT_EQ(measure_perplexity(session, std::span(tokens_).first(1), {}).status().code(), StatusCode::invalid_argument);
  EXPECT_EQ(measure_perplexity(narrow, tokens_, {}).status().message(),
            "the context is 1, but a window of one predicts nothing");
  EXPECT_TRUE(measure_perplexity(session, std::span(tokens_).first(2), {}).ok());
}

}  // namespace
}  // namespace opst::model

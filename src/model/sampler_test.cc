#include "model/sampler.h"

#include <Random123/philox.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "model/philox.h"

namespace opst::model {
namespace {

TEST(Philox, EqualsRandom123) {
  // The first three are the known answers published with Random123.
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
  std::mt19937 random(1);
  for (int i = 0; i < 1000; ++i) {
    r123::Philox4x32::ctr_type counter;
    r123::Philox4x32::key_type key;
    for (auto& word : counter) word = static_cast<uint32_t>(random());
    for (auto& word : key) word = static_cast<uint32_t>(random());
    const auto expected = r123::Philox4x32()(counter, key);
    const auto got = philox({counter[0], counter[1], counter[2], counter[3]}, {key[0], key[1]});
    for (size_t j = 0; j < 4; ++j) EXPECT_EQ(got[j], expected[j]);
  }
}

Sampler make(const SamplingOptions& options) {
  Result<Sampler> sampler = Sampler::create(options);
  EXPECT_TRUE(sampler.ok()) << sampler.status().message();
  return std::move(sampler.value());
}

// How often each id is drawn.
std::vector<double> frequencies(const SamplingOptions& options, const std::vector<float>& logits, int draws) {
  Sampler sampler = make(options);
  std::vector<double> counts(logits.size());
  for (int i = 0; i < draws; ++i) counts[static_cast<size_t>(sampler.next(logits).value())] += 1.0 / draws;
  return counts;
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

TEST(Sampler, GreedyTakesTheLargestAndOfEqualOnesTheFirst) {
  Sampler sampler = make({});
  EXPECT_EQ(sampler.next(std::vector<float>{1, 3, 2}).value(), 1);
  EXPECT_EQ(sampler.next(std::vector<float>{1, 3, 3}).value(), 1);
  EXPECT_EQ(sampler.next(std::vector<float>{1, kNan, -5}).status().message(),
            "the logit of token 1 is nan, not a finite number");
  EXPECT_FALSE(sampler.next(std::vector<float>{kInf, 2}).ok());
  EXPECT_FALSE(sampler.next(std::vector<float>{1, -kInf}).ok());
  EXPECT_FALSE(sampler.next({}).ok());
  EXPECT_EQ(make({.greedy = false, .temperature = 0.0}).next(std::vector<float>{1, 3, 2}).value(), 1);
}

TEST(Sampler, DrawsFromTheSoftmax) {
  const std::vector<float> logits = {std::log(0.1f), std::log(0.6f), std::log(0.3f)};
  const auto plain = frequencies({.greedy = false}, logits, 20000);
  EXPECT_NEAR(plain[0], 0.1, 0.015);
  EXPECT_NEAR(plain[1], 0.6, 0.015);
  // Temperature 1/2 squares the probabilities: .01, .36, .09 of .46.
  const auto cold = frequencies({.greedy = false, .temperature = 0.5}, logits, 20000);
  EXPECT_NEAR(cold[1], 0.36 / 0.46, 0.015);
}

TEST(Sampler, TopKThenTopPThenTemperature) {
  const std::vector<float> logits = {std::log(0.4f), std::log(0.3f), std::log(0.2f), std::log(0.1f)};
  const auto top_k = frequencies({.greedy = false, .top_k = 2}, logits, 20000);
  EXPECT_NEAR(top_k[0], 4.0 / 7, 0.015);
  EXPECT_EQ(top_k[2] + top_k[3], 0.0);
  // 0.4 does not reach 0.5, 0.4 + 0.3 does.
  const auto top_p = frequencies({.greedy = false, .top_p = 0.5}, logits, 20000);
  EXPECT_NEAR(top_p[0], 4.0 / 7, 0.015);
  EXPECT_EQ(top_p[2] + top_p[3], 0.0);
  // Top-p counts within what top-k left: of 4/7 and 3/7 the first reaches 0.5.
  EXPECT_EQ(frequencies({.greedy = false, .top_k = 2, .top_p = 0.5}, logits, 2000)[1], 0.0);
  // Top-p comes before temperature: a hot one does not let more in, a cold one does not keep more out.
  const auto hot = frequencies({.greedy = false, .top_p = 0.6, .temperature = 100.0}, logits, 20000);
  EXPECT_NEAR(hot[0], 0.5, 0.02);
  EXPECT_EQ(hot[2] + hot[3], 0.0);
  const auto cold = frequencies({.greedy = false, .top_p = 0.6, .temperature = 0.1}, logits, 20000);
  EXPECT_NEAR(cold[1], 0.0533, 0.01);
}

TEST(Sampler, SameSeedSameDraws) {
  const std::vector<float> logits(50, 0.0f);
  const auto draw = [&](uint64_t seed) {
    Sampler sampler = make({.greedy = false, .seed = seed});
    std::vector<int32_t> ids;
    for (int i = 0; i < 40; ++i) ids.push_back(sampler.next(logits).value());
    return ids;
  };
  EXPECT_EQ(draw(7), draw(7));
  EXPECT_NE(draw(7), draw(8));
  EXPECT_NE(draw(7), draw(7 + (uint64_t{1} << 32)));
}

TEST(Sampler, RefusesBadOptions) {
  const auto message = [](const SamplingOptions& options) { return Sampler::create(options).status().message(); };
  EXPECT_EQ(message({.top_k = -1}), "top_k is -1, must be >= 0");
  EXPECT_EQ(message({.top_p = 0.0}), "top_p is 0.000000, must be in (0, 1]");
  EXPECT_EQ(message({.top_p = 1.5}), "top_p is 1.500000, must be in (0, 1]");
  EXPECT_EQ(message({.top_p = kNan}), "top_p is nan, must be in (0, 1]");
  EXPECT_EQ(message({.temperature = -1.0}), "temperature is -1.000000, must be finite and >= 0");
  EXPECT_EQ(message({.temperature = kInf}), "temperature is inf, must be finite and >= 0");
}

}  // namespace
}  // namespace opst::model

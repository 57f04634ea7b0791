// Attention backward with every combination of options, drawn at random, against the float64 reference; each draw on
// one level, with two numbers of threads that must give the same bits.
#include <gtest/gtest.h>

#include <cstdio>

#include "attention/attention_backward_call.h"

namespace opst::test {
namespace {

TEST(AttentionBackwardOptions, RandomCombinationsAgreeWithTheReference) {
  Random random(seed());
  const int draws = exhaustive() ? 40000 : static_cast<int>(2000 * kEffort);
  std::map<std::string, int> histogram;
  int many_tiles = 0, passed = 0;
  double worst_ratio = 0;
  for (int n = 0; n < draws; ++n) {
    const Draw d = draw_for_backward(random);
    DrawnCall call(d, random);
    const BackwardForm form = draw_form(d, random);
    BackwardCallData data(call, form, random);
    const TestContext& t =
        contexts()[static_cast<size_t>(random.integer(0, static_cast<int64_t>(contexts().size()) - 1))];
    const BackwardCallData::Outcome r = data.run(t.context);
    ASSERT_EQ(data.judge(r, t.context, worst_ratio), "") << "draw " << n << ", " << t.name;
    const auto others = contexts_like(t);
    const TestContext& other = *others[static_cast<size_t>(random.integer(0, static_cast<int64_t>(others.size()) - 1))];
    ASSERT_EQ(data.run(other.context).differs_from(r), "")
        << "draw " << n << ", " << t.name << " against " << other.name << "\n  " << to_string(d);
    for (const auto& [name, on] : options_of(d)) histogram[name] += on ? 1 : 0;
    histogram["grad_lse"] += form.grad_lse ? 1 : 0;
    histogram["from max and sum"] += form.from_lse ? 0 : 1;
    histogram["grad_bias sums"] += d.bias && (!d.bias_dims[0] || !d.bias_dims[1] || !d.bias_dims[2] || !d.bias_dims[3]);
    const int64_t rows = d.longest_query() * (d.num_heads / d.num_kv_heads);
    const bool blocks = d.options.block_q > 0 && ceil_div(rows, d.options.block_q) >= 3;
    const bool tiles = d.options.block_kv > 0 && ceil_div(d.longest_keys(), d.options.block_kv) >= 3;
    many_tiles += blocks && tiles ? 1 : 0;
    ++passed;
  }
  std::printf("%d draws, worst error / bound %.2f, with at least 3 tiles in both directions %.1f %%\n", passed,
              worst_ratio, 100.0 * many_tiles / draws);
  for (const auto& [name, count] : histogram) std::printf("  %-24s %5.1f %%\n", name.c_str(), 100.0 * count / draws);
  if (draws < 1000) return;  // too few for shares
  EXPECT_GE(many_tiles, draws / 2);
  for (const auto& [name, count] : histogram) {
    if (name != "pages") {
      EXPECT_GE(count, draws / 4) << name;
    }
  }
}

}  // namespace
}  // namespace opst::test

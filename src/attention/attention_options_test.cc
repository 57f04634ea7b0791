// Attention forward with every combination of options, drawn at random, against the float64 reference; each draw on one
// level, with two numbers of threads that must give the same bits.
#include <gtest/gtest.h>

#include <cstdio>

#include "attention/attention_draw.h"

namespace opst::test {
namespace {

// Contexts that differ from `chosen` in the number of threads only.
std::vector<const TestContext*> alike(const TestContext& chosen) {
  std::vector<const TestContext*> list;
  for (const TestContext& t : contexts()) {
    const Machine& a = chosen.context.machine();
    const Machine& b = t.context.machine();
    if (a.isa == b.isa && a.bf16_product == b.bf16_product && a.cache.l2_bytes == b.cache.l2_bytes && &t != &chosen) {
      list.push_back(&t);
    }
  }
  return list;
}

TEST(AttentionOptions, RandomCombinationsAgreeWithTheReference) {
  Random random(seed());
  const int draws = exhaustive() ? 40000 : static_cast<int>(2000 * kEffort);
  std::map<std::string, int> histogram;
  int many_tiles = 0, passed = 0;
  double worst_ratio = 0;
  for (int n = 0; n < draws; ++n) {
    const Draw d = draw(random);
    DrawnCall call(d, random);
    const TestContext& t =
        contexts()[static_cast<size_t>(random.integer(0, static_cast<int64_t>(contexts().size()) - 1))];
    const auto others = alike(t);
    const DrawnCall::Outputs out = call.make_outputs();
    const Status status = flash_attention_forward(t.context, call.inputs, out.tensors, d.options);
    ASSERT_TRUE(status.ok()) << status.message() << "\n  " << to_string(d);
    ASSERT_EQ(judge(call, out, t.context, 24, worst_ratio), "") << "draw " << n;
    const TestContext& other = *others[static_cast<size_t>(random.integer(0, static_cast<int64_t>(others.size()) - 1))];
    const DrawnCall::Outputs again = call.make_outputs();
    ASSERT_TRUE(flash_attention_forward(other.context, call.inputs, again.tensors, d.options).ok());
    ASSERT_EQ(again.differs_from(out), "") << t.name << " against " << other.name << "\n  " << to_string(d);
    for (const auto& [name, on] : options_of(d)) histogram[name] += on ? 1 : 0;
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
  for (const auto& [name, count] : histogram) EXPECT_GE(count, draws / 4) << name;
}

}  // namespace
}  // namespace opst::test

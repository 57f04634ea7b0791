// Attention backward with every combination of options, drawn at random, against the float64 reference; each draw on
// one level, with two numbers of threads that must give the same bits.
#include <gtest/gtest.h>

#include "attention/attention_backward_call.h"

namespace opst::test {
namespace {

TEST(AttentionBackwardOptions, RandomCombinationsAgreeWithTheReference) {
  Random random(seed());
  const int draws = exhaustive() ? 40000 : static_cast<int>(2000 * kEffort);
  DrawCounts counts;
  double worst_ratio = 0;
  int shared_pages = 0;
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
    counts.add(d);
    shared_pages += d.keys == Keys::norm_pages && d.share_pages ? 1 : 0;
    counts.of["grad_lse"] += form.grad_lse ? 1 : 0;
    counts.of["from max and sum"] += form.from_lse ? 0 : 1;
    counts.of["grad_bias sums"] += d.bias && (!d.bias_dims[0] || !d.bias_dims[1] || !d.bias_dims[2] || !d.bias_dims[3]);
  }
  counts.expect_shares(worst_ratio);
  std::printf("shared pages in %d\n", shared_pages);
  EXPECT_GE(shared_pages, draws / 10);
}

}  // namespace
}  // namespace opst::test

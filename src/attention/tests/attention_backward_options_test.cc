// Attention backward with every combination of options, drawn at random, against the float64 reference; each draw on
// one level, with two numbers of threads that must give the same bits.
#include <gtest/gtest.h>

#include "attention/tests/attention_backward_call.h"

namespace opst::test {
namespace {

TEST(AttentionBackwardOptions, RandomCombinationsAgreeWithTheReference) {
  Random random(seed());
  // A draw takes a second under ThreadSanitizer, whose question is the order of events, not shapes: a fifth of them.
  const double effort = kThreadSanitizer ? kEffort / 5 : kEffort;
  const int draws = exhaustive() ? 40000 : static_cast<int>(2000 * effort);
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
  if (draws >= 200) {
    EXPECT_GE(shared_pages, draws / 10);
  }
}

// 27 tensors: lengths in all three forms, everything that may be added to or hidden from scores, every statistic and
// every gradient.
TEST(AttentionBackwardOptions, EveryTensorAtOnce) {
  Random random(seed() + 1);
  Draw d;
  d.num_heads = 4, d.num_kv_heads = 2, d.head_dim = 16, d.value_head_dim = 9;
  d.query_lens = {11, 0, 30}, d.kv_lens = {40, 3, 17};
  d.varlen_q = true, d.rows_behind = 2, d.keys = Keys::varlen;
  d.mask_batch = 3, d.mask_heads = 4, d.mask_block_q = 8, d.mask_block_kv = 5;
  d.prefix = d.mask = d.bias = d.alibi = d.sinks = d.drop_mask = d.slopes_of_batch = true;
  for (int i = 0; i < 4; ++i) d.mask_dims[i] = d.bias_dims[i] = true;
  d.options.causal = true, d.options.window_left = 20, d.options.softcap = 5, d.options.dropout.keep_prob = 0.75;
  DrawnCall call(d, random);
  std::vector<int32_t> lengths(d.kv_lens.begin(), d.kv_lens.end());
  call.inputs.kv_lengths = ConstTensor::contiguous(DType::i32, {3}, lengths.data());
  BackwardForm form;
  form.all_statistics = form.grad_lse = true;
  BackwardCallData data(call, form, random);
  double worst_ratio = 0;
  for (const TestContext& t : contexts_with_threads(2)) {
    const BackwardCallData::Outcome r = data.run(t.context);
    const AttentionGradients& g = r.tensors;
    for (const Tensor* x : {&g.grad_query, &g.grad_key, &g.grad_value, &g.grad_bias, &g.grad_sinks}) {
      ASSERT_NE(x->data, nullptr);
    }
    ASSERT_EQ(data.judge(r, t.context, worst_ratio), "") << t.name;
  }
}

}  // namespace
}  // namespace opst::test

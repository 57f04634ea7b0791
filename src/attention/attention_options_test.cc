// Attention forward with every combination of options, drawn at random, against the float64 reference; each draw on one
// level, with two numbers of threads that must give the same bits.
#include <gtest/gtest.h>

#include "attention/attention_draw.h"

namespace opst::test {
namespace {

TEST(AttentionOptions, RandomCombinationsAgreeWithTheReference) {
  Random random(seed());
  const int draws = exhaustive() ? 40000 : static_cast<int>(2000 * kEffort);
  DrawCounts counts;
  double worst_ratio = 0;
  for (int n = 0; n < draws; ++n) {
    const Draw d = draw(random);
    DrawnCall call(d, random);
    const TestContext& t =
        contexts()[static_cast<size_t>(random.integer(0, static_cast<int64_t>(contexts().size()) - 1))];
    const auto others = contexts_like(t);
    const DrawnCall::Outputs out = call.make_outputs();
    const Status status = flash_attention_forward(t.context, call.inputs, out.tensors, d.options);
    ASSERT_TRUE(status.ok()) << status.message() << "\n  " << to_string(d);
    ASSERT_EQ(judge(call, out, t.context, 24, worst_ratio), "") << "draw " << n;
    const TestContext& other = *others[static_cast<size_t>(random.integer(0, static_cast<int64_t>(others.size()) - 1))];
    const DrawnCall::Outputs again = call.make_outputs();
    ASSERT_TRUE(flash_attention_forward(other.context, call.inputs, again.tensors, d.options).ok());
    ASSERT_EQ(again.differs_from(out), "") << t.name << " against " << other.name << "\n  " << to_string(d);
    counts.add(d);
  }
  counts.expect_shares(worst_ratio);
}

// Inputs that break a careless softmax, with options that change the scores' unit, their size, or which of them count.
TEST(AttentionOptions, ClassicFillsAgreeWithTheReference) {
  Random random(seed() + 1);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const int64_t query_len : {2, 30}) {
      for (const Fill kind : {Fill::ones, Fill::large_normal, Fill::ascending_rows, Fill::outlier, Fill::denormals}) {
        for (int options = 0; options < 4; ++options) {
          ProblemOptions p;
          p.query_dtype = p.kv_dtype = p.out_dtype = dtype;
          p.num_heads = 2, p.query_len = query_len, p.kv_len = 77, p.head_dim = 16, p.value_head_dim = 24;
          p.query_fill = kind == Fill::ascending_rows ? Fill::ones : kind;
          p.key_fill = kind;
          p.options.block_kv = random.pick<int64_t>({0, 16});
          if (options == 1) p.options.softcap = 4;
          if (options >= 2) p.options.dropout = {.keep_prob = 0.7, .seed = random.bits()};
          Problem problem(p, random);
          View bias(DType::f32, 1, 2, query_len, 77, Strides::bnsd),
              mask(DType::boolean, 1, 1, query_len, 77, Strides::bnsd);
          View slopes(DType::f32, 1, 1, 1, 2, Strides::bnsd);
          fill(bias.tensor(), kind == Fill::denormals ? Fill::normal : kind, random);
          fill(slopes.tensor(), Fill::uniform, random);
          for (int64_t i = 0; i < query_len * 77; ++i) set(mask.tensor(), i, random.chance(0.6) ? 1 : 0);
          if (options == 0 || options == 3) problem.inputs.bias = bias.tensor();
          if (options == 0) problem.inputs.alibi_slopes = slopes.tensor().selected(0, 0).selected(0, 0).selected(0, 0);
          if (options >= 2) problem.inputs.mask = mask.tensor();
          for (const TestContext& t : contexts_with_threads(2)) {
            if (!exhaustive() && random.chance(0.5)) continue;
            ASSERT_EQ(problem.judge(problem.run(t.context), t.context), "") << "options " << options;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace opst::test

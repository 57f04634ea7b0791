// Attention backward of sparse indices: against the float64 reference, bits of any number of threads, plans, and what is
// refused.
#include <gtest/gtest.h>

#include <cstdio>

#include "attention/tests/attention_backward_call.h"

namespace opst::test {
namespace {

// A draw with lists; half of them without what asks for the positions of keys, whose tiles are other ones.
Draw draw_with_lists(Random& random) {
  Draw d = draw_for_backward(random);
  if (random.chance(0.5)) {
    d.mask = d.bias = d.alibi = d.drop_mask = false;
    d.options.dropout = {};
  }
  d.mask_heads = 0;
  d.options.path = AttentionPath::automatic;
  d.index_block = random.pick<int64_t>({1, 1, 2, 4, 8, 16, 64});
  const int64_t blocks = ceil_div(d.longest_keys(), d.index_block);
  d.index_count =
      random.pick<int64_t>({0, 1, blocks, blocks + 2, random.integer(0, blocks), random.integer(0, blocks)});
  return d;
}

void expect_right(const Draw& d, const BackwardForm& form, Random& random, double& worst_ratio) {
  DrawnCall call(d, random);
  BackwardCallData data(call, form, random);
  const TestContext& t =
      contexts()[static_cast<size_t>(random.integer(0, static_cast<int64_t>(contexts().size()) - 1))];
  const BackwardCallData::Outcome r = data.run(t.context);
  ASSERT_EQ(data.judge(r, t.context, worst_ratio), "") << t.name;
  const auto others = contexts_like(t);
  const TestContext& other = *others[static_cast<size_t>(random.integer(0, static_cast<int64_t>(others.size()) - 1))];
  ASSERT_EQ(data.run(other.context).differs_from(r), "")
      << t.name << " against " << other.name << "\n  " << to_string(d);
}

TEST(AttentionBackwardLists, RandomListsAgreeWithTheReference) {
  Random random(seed());
  double worst_ratio = 0;
  const int draws = exhaustive() ? 8000 : static_cast<int>(600 * (kThreadSanitizer ? kEffort / 5 : kEffort));
  for (int n = 0; n < draws; ++n) {
    const Draw d = draw_with_lists(random);
    SCOPED_TRACE("draw " + std::to_string(n));
    expect_right(d, draw_form(d, random), random, worst_ratio);
    if (HasFatalFailure()) return;
  }
  std::printf("%d draws, worst error / bound %.2f\n", draws, worst_ratio);
}

// One latent KV head, whose values are the first 512 columns of its keys; groups of one block of rows and of several.
TEST(AttentionBackwardLists, HeadsShareKeysAndValues) {
  Random random(seed() + 1);
  double worst_ratio = 0;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int64_t heads : {1, 16, 26}) {
      Draw d;
      d.query_dtype = d.kv_dtype = d.out_dtype = dtype;
      d.num_heads = heads, d.head_dim = 576, d.value_head_dim = 512, d.values_of_keys = true;
      d.query_lens = {4}, d.kv_lens = {90};
      d.index_block = 1, d.index_count = 50;
      d.options.causal = true;
      d.options.block_q = heads == 26 ? 20 : 0;
      d.options.block_kv = 32;
      expect_right(d, {}, random, worst_ratio);
      if (HasFatalFailure()) return;
    }
  }
}

// Ropes apart: gradients of their own, beside those of keys and queries or without them, of dense keys, sequences and pages
// that are shared, with lists and without.
TEST(AttentionBackwardRopes, EachGradientAloneHasItsBits) {
  Random random(seed() + 3);
  double worst_ratio = 0;
  for (const Keys keys : {Keys::dense, Keys::varlen, Keys::norm_pages}) {
    for (const bool lists : {false, true}) {
      for (const bool beside : {false, true}) {
        Draw d;
        d.num_heads = 4, d.num_kv_heads = 2, d.head_dim = 12, d.value_head_dim = 9, d.rope_dim = 5,
        d.rope_beside = beside;
        d.query_lens = {6, 6}, d.kv_lens = {40, 33};
        d.keys = keys, d.block_size = 8, d.share_pages = true;
        if (lists) d.index_block = 4, d.index_count = 7;
        DrawnCall call(d, random);
        BackwardCallData data(call, {}, random);
        for (const TestContext& t : contexts_with_threads(2)) {
          SCOPED_TRACE(t.name + "\n  " + to_string(d));
          const BackwardCallData::Outcome all = data.run(t.context), other = data.run(t.context);
          ASSERT_EQ(data.judge(all, t.context, worst_ratio), "");
          for (const attention::NamedGradient& g : attention::kNamedGradients) {
            const Tensor& wanted = all.tensors.*g.written;
            if (wanted.data == nullptr) continue;
            AttentionGradients alone;
            alone.*g.written = other.tensors.*g.written;
            fill(alone.*g.written, Fill::nan, random);
            const Status status =
                flash_attention_backward(t.context, call.inputs, data.saved(all.forward), alone, d.options);
            ASSERT_TRUE(status.ok()) << status.message();
            const Comparison c = compare_bits(alone.*g.written, wanted, {.name = g.name});
            ASSERT_TRUE(c.ok) << c.message;
          }
        }
      }
    }
  }
}

// A query whose list is empty: gradient 0, and nothing reaches keys and values, whatever its grad_out holds.
TEST(AttentionBackwardLists, RowsOfAnEmptyListHaveNoGradient) {
  Random random(seed() + 3);
  for (const bool sinks : {false, true}) {
    Draw d;
    d.num_heads = 2, d.head_dim = d.value_head_dim = 16;
    d.query_lens = {5}, d.kv_lens = {40};
    d.index_block = 4, d.index_count = 3;
    d.sinks = sinks;
    DrawnCall call(d, random);
    std::vector<int32_t> lists(5 * 3, -1);
    for (const size_t i : {size_t{1}, size_t{3}})
      lists[i * 3] = 2, lists[i * 3 + 1] = 7;  // queries 0, 2 and 4 read nothing
    call.inputs.sparse_indices = {ConstTensor::contiguous(DType::i32, {1, 5, 1, 3}, lists.data()), 4};
    BackwardCallData data(call, {}, random);
    for (const int64_t i : {0, 2, 4}) fill(data.grad_out().narrowed(2, i, 1), Fill::nan, random);
    for (const TestContext& t : contexts_with_threads(2)) {
      const BackwardCallData::Outcome r = data.run(t.context);
      ASSERT_EQ(r.status.message(), "") << t.name;
      bool some_out = false, some_gradient = false;  // of what is read; single ones may round to 0
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t i = 0; i < 5; ++i) {
          for (int64_t x = 0; x < 16; ++x) {
            const double out = get(call.row_of(r.forward.tensors.out, {0, h, i}), x);
            const double gradient = get(call.row_of(r.tensors.grad_query, {0, h, i}), x);
            if (i % 2 == 0) {
              ASSERT_EQ(out, 0) << t.name << " row " << i;
              ASSERT_EQ(gradient, 0) << t.name << " row " << i;
            }
            some_out |= out != 0;
          }
          const double lse = get(call.row_of(r.forward.tensors.softmax_lse, {0, h, i}), 0);
          if (i % 2 == 0) {
            ASSERT_EQ(lse, sinks ? get(call.inputs.sinks, h) : -HUGE_VAL) << t.name;
          }
        }
        if (sinks) {
          ASSERT_TRUE(std::isfinite(get(r.tensors.grad_sinks, h))) << t.name;
        }
      }
      for (const Tensor* g : {&r.tensors.grad_key, &r.tensors.grad_value}) {
        for (int64_t j = 0; j < 40; ++j) {
          const bool read = j / 4 == 2 || j / 4 == 7;
          for (int64_t x = 0; x < 16; ++x) {
            const double gradient = get(*g, j * 16 + x);
            some_gradient |= gradient != 0;
            if (!read) {
              ASSERT_EQ(gradient, 0) << t.name << " key " << j;
            }
          }
        }
      }
      ASSERT_TRUE(some_out && some_gradient) << t.name;
    }
  }
}

// A task is a block of rows; its memory grows with the list, not with the keys.
TEST(AttentionBackwardLists, PlansFollowTheList) {
  AttentionBackwardProblem b = {.forward = {.num_heads = 16, .query_len = 100, .kv_len = 65536}};
  b.forward.head_dim = b.forward.value_head_dim = 64;
  b.forward.sparse_indices = {1, 2048};
  b.key_rows = 65536;
  for (const TestContext& t : contexts()) {
    const Machine& m = t.context.machine();
    const AttentionBackwardPlan plan = plan_attention_backward(b, m);
    EXPECT_EQ(16 % plan.block_q, 0);
    EXPECT_EQ(plan.num_tasks, 100 * 16 / plan.block_q);
    AttentionBackwardProblem longer = b;
    longer.forward.kv_len = longer.key_rows = 1 << 20;
    EXPECT_EQ(plan_attention_backward(longer, m).scratch_bytes_per_worker, plan.scratch_bytes_per_worker);
  }
}

TEST(AttentionBackwardLists, Refusals) {
  Random random(seed() + 2);
  Draw d;
  d.head_dim = d.value_head_dim = 8, d.query_lens = {2}, d.kv_lens = {5};
  d.index_block = 1, d.index_count = 3;
  DrawnCall call(d, random);
  BackwardCallData data(call, {}, random);
  const TestContext& t = contexts().front();
  BackwardCallData::Outcome r = data.run(t.context);
  ASSERT_TRUE(r.status.ok()) << r.status.message();
  const auto run = [&](const AttentionInputs& in, const AttentionOptions& options) {
    return flash_attention_backward(t.context, in, data.saved(r.forward), r.tensors, options).message();
  };
  const auto listed = call.inputs.sparse_indices;
  r.tensors.grad_query_rope = r.tensors.grad_query;
  EXPECT_EQ(run(call.inputs, {}),
            "flash_attention_backward: grad_query_rope is given, but query_rope and key_rope are not");
  r.tensors.grad_query_rope = {};
  AttentionInputs biased = call.inputs;
  const std::vector<float> zeros(10);
  std::vector<float> of_bias(10);
  biased.bias = ConstTensor::contiguous(DType::f32, {2, 5}, zeros.data());
  EXPECT_EQ(run(biased, {}), "");
  r.tensors.grad_bias = Tensor::contiguous(DType::f32, {2, 5}, of_bias.data());
  EXPECT_EQ(run(biased, {}), "flash_attention_backward: grad_bias is given, but with sparse_indices bias has none");
  r.tensors.grad_bias = {};
  const std::vector<int32_t> bad = {0, 1, 2, 0, 1, 1};
  AttentionInputs repeated = call.inputs;
  repeated.sparse_indices = {ConstTensor::contiguous(DType::i32, {1, 2, 1, 3}, bad.data()), listed.block_size};
  fill(r.tensors.grad_key, Fill::nan, random);
  EXPECT_EQ(run(repeated, {}),
            "flash_attention_backward: sparse_indices.indices[0][1][0][2] is 1, as is "
            "sparse_indices.indices[0][1][0][1] of the same list");
  EXPECT_TRUE(std::isnan(get(r.tensors.grad_key, 0)));
}

}  // namespace
}  // namespace opst::test

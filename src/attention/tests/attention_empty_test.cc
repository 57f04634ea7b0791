// Calls with nothing of something: no tokens, no heads, no sequences, tensors without memory; and the strides of
// dimensions of one index, which mean nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "core/int_math.h"
#include "opst/attention_backward.h"
#include "testing/contexts.h"

namespace opst::test {
namespace {

constexpr DType kF32 = DType::f32;

ConstTensor f32(std::initializer_list<int64_t> shape, const std::vector<float>& memory) {
  return ConstTensor::contiguous(kF32, shape, memory.data());
}
Tensor f32(std::initializer_list<int64_t> shape, std::vector<float>& memory) {
  return Tensor::contiguous(kF32, shape, memory.data());
}
ConstTensor i32(const std::vector<int32_t>& numbers) {
  return ConstTensor::contiguous(DType::i32, {static_cast<int64_t>(numbers.size())}, numbers.data());
}
bool all(const std::vector<float>& memory, float x) {
  return std::all_of(memory.begin(), memory.end(), [x](float y) { return y == x; });
}
Context& context_of(const TestContext& t) { return t.context; }

// An empty std::vector has no memory. Statistics of no tokens have some here, and around it: all of it stays.
TEST(AttentionEmpty, VarlenWithoutTokens) {
  const std::vector<float> none, keys(3 * 2 * 8, 1.0f);
  std::vector<float> no_out;
  for (const TestContext& t : contexts_with_threads(2)) {
    for (const std::vector<int32_t>& offsets :
         {std::vector<int32_t>{0}, std::vector<int32_t>{0, 0}, std::vector<int32_t>{0, 0, 0}}) {
      for (const int64_t heads : {0, 2, 6}) {
        std::vector<float> around(3 * 64, 7.0f);
        const auto statistic = [&](int64_t at) {
          return Tensor::contiguous(kF32, {heads, 0}, around.data() + 64 * at + 16);
        };
        const std::vector<int32_t> key_offsets(offsets.size(), 0);
        const AttentionInputs in = {.query = f32({0, heads, 8}, none),
                                    .key = f32({3, 2, 8}, keys),
                                    .value = f32({3, 2, 8}, keys),
                                    .cu_seqlens_q = i32(offsets),
                                    .cu_seqlens_k = i32(key_offsets)};
        const Status status = flash_attention_forward(context_of(t), in,
                                                      {.out = f32({0, heads, 8}, no_out),
                                                       .softmax_lse = statistic(0),
                                                       .softmax_max = statistic(1),
                                                       .softmax_sum = statistic(2)});
        EXPECT_EQ(status.message(), "");
        EXPECT_TRUE(all(around, 7));

        // Nobody saw the keys.
        std::vector<float> grad_key(3 * 2 * 8, 7.0f), grad_value(3 * 2 * 8, 7.0f);
        const Status backward = flash_attention_backward(
            context_of(t), in, {.out = f32({0, heads, 8}, none), .grad_out = f32({0, heads, 8}, none)},
            {.grad_query = f32({0, heads, 8}, no_out),
             .grad_key = f32({3, 2, 8}, grad_key),
             .grad_value = f32({3, 2, 8}, grad_value)});
        EXPECT_EQ(backward.message(), "");
        EXPECT_TRUE(all(grad_key, 0) && all(grad_value, 0));
      }
    }
  }
}

TEST(AttentionEmpty, NoQueryHeads) {
  const std::vector<float> none, keys(4 * 2 * 8, 1.0f);
  std::vector<float> no_out;
  const std::vector<int32_t> offsets = {0, 3, 5}, table = {0, 1, 1, 0}, lengths = {2, 1};
  for (const TestContext& t : contexts_with_threads(2)) {
    for (const bool varlen : {false, true}) {
      for (const bool paged : {false, true}) {
        AttentionInputs in = {.query = varlen ? f32({5, 0, 8}, none) : f32({2, 0, 3, 8}, none),
                              .key = paged ? f32({2, 2, 2, 8}, keys) : f32({2, 2, 2, 8}, keys),
                              .value = f32({2, 2, 2, 8}, keys)};
        if (varlen) in.cu_seqlens_q = i32(offsets);
        if (paged) {
          in.block_table = ConstTensor::contiguous(DType::i32, {2, 2}, table.data());
          in.kv_lengths = i32(lengths);
        }
        const Tensor out = varlen ? f32({5, 0, 8}, no_out) : f32({2, 0, 3, 8}, no_out);
        EXPECT_EQ(flash_attention_forward(context_of(t), in, {.out = out}).message(), "");
        std::vector<float> grad_key(4 * 2 * 8, 7.0f), grad_value(4 * 2 * 8, 7.0f);
        const AttentionGradients grads = {
            .grad_query = out, .grad_key = f32({2, 2, 2, 8}, grad_key), .grad_value = f32({2, 2, 2, 8}, grad_value)};
        EXPECT_EQ(flash_attention_backward(context_of(t), in, {.out = out, .grad_out = out}, grads).message(), "");
        EXPECT_TRUE(all(grad_key, 0) && all(grad_value, 0));
      }
    }
  }
}

// Rows behind the last sequence, of which there is none.
TEST(AttentionEmpty, NoSequencesButRows) {
  std::vector<float> rows(4 * 2 * 8, 1.0f);
  const std::vector<int32_t> offsets = {0};
  for (const TestContext& t : contexts_with_threads(2)) {
    std::vector<float> out(4 * 2 * 8, 7.0f), lse(8, 7.0f), grads(3 * 64, 7.0f);
    const AttentionInputs in = {.query = f32({4, 2, 8}, std::as_const(rows)),
                                .key = f32({4, 2, 8}, std::as_const(rows)),
                                .value = f32({4, 2, 8}, std::as_const(rows)),
                                .cu_seqlens_q = i32(offsets),
                                .cu_seqlens_k = i32(offsets)};
    ASSERT_EQ(flash_attention_forward(context_of(t), in, {.out = f32({4, 2, 8}, out), .softmax_lse = f32({2, 4}, lse)})
                  .message(),
              "");
    EXPECT_TRUE(all(out, 0) && all(lse, -HUGE_VALF));
    const auto part = [&](int64_t i) { return Tensor::contiguous(kF32, {4, 2, 8}, grads.data() + 64 * i); };
    ASSERT_EQ(flash_attention_backward(context_of(t), in,
                                       {.out = f32({4, 2, 8}, std::as_const(out)),
                                        .softmax_lse = f32({2, 4}, std::as_const(lse)),
                                        .grad_out = f32({4, 2, 8}, std::as_const(rows))},
                                       {.grad_query = part(0), .grad_key = part(1), .grad_value = part(2)})
                  .message(),
              "");
    EXPECT_TRUE(all(grads, 0));
  }
}

// What the tensors of a call hold, and a copy of their strides to spoil.
struct OneOfEach {
  std::vector<float> q, k, v, go, out, lse, gq, gk, gv;
  AttentionInputs in;
  AttentionOutputs outputs;
  AttentionSaved saved;
  AttentionGradients grads;

  explicit OneOfEach(const int64_t (&s)[7]) {  // batch, heads, KV heads, queries, keys, dims
    const auto filled = [](int64_t n, float scale) {
      std::vector<float> x;
      for (int64_t i = 0; i < n; ++i) x.push_back(scale * static_cast<float>(std::sin(static_cast<double>(7 * i + 1))));
      return x;
    };
    q = filled(s[0] * s[1] * s[3] * s[5], 1), k = filled(s[0] * s[2] * s[4] * s[5], 1);
    v = filled(s[0] * s[2] * s[4] * s[6], 1), go = filled(s[0] * s[1] * s[3] * s[6], 1);
    out = go, lse.resize(static_cast<size_t>(s[0] * s[1] * s[3])), gq = q, gk = k, gv = v;
    in = {.query = f32({s[0], s[1], s[3], s[5]}, std::as_const(q)),
          .key = f32({s[0], s[2], s[4], s[5]}, std::as_const(k)),
          .value = f32({s[0], s[2], s[4], s[6]}, std::as_const(v))};
    outputs = {.out = f32({s[0], s[1], s[3], s[6]}, out), .softmax_lse = f32({s[0], s[1], s[3]}, lse)};
    saved = {.out = outputs.out,
             .softmax_lse = outputs.softmax_lse,
             .grad_out = f32({s[0], s[1], s[3], s[6]}, std::as_const(go))};
    grads = {.grad_query = f32({s[0], s[1], s[3], s[5]}, gq),
             .grad_key = f32({s[0], s[2], s[4], s[5]}, gk),
             .grad_value = f32({s[0], s[2], s[4], s[6]}, gv)};
  }
  template <class T>
  static void spoil(T& t, int64_t stride) {
    for (int d = 0; d < t.rank; ++d) {
      if (t.shape[d] == 1 || t.num_elements() == 0) t.strides[d] = stride;
    }
  }
  void spoil(int64_t stride) {
    for (ConstTensor* t : {&in.query, &in.key, &in.value, &saved.out, &saved.softmax_lse, &saved.grad_out}) {
      spoil(*t, stride);
    }
    for (Tensor* t : {&outputs.out, &outputs.softmax_lse, &grads.grad_query, &grads.grad_key, &grads.grad_value}) {
      spoil(*t, stride);
    }
  }
  std::string run(Context& context) {
    const Status forward = flash_attention_forward(context, in, outputs);
    if (!forward.ok()) return forward.message();
    return flash_attention_backward(context, in, saved, grads).message();
  }
};

TEST(AttentionEmpty, StridesOfOneIndexMeanNothing) {
  const int64_t kShapes[][7] = {{1, 1, 1, 1, 1, 1, 1},   {1, 2, 1, 1, 9, 16, 16}, {2, 1, 1, 40, 1, 16, 1},
                                {1, 4, 2, 1, 300, 8, 8}, {1, 3, 3, 50, 70, 1, 5}, {0, 2, 1, 3, 4, 8, 8},
                                {2, 2, 1, 0, 4, 8, 8},   {2, 2, 1, 3, 0, 8, 8},   {2, 1, 1, 30, 30, 64, 1}};
  for (const TestContext& t : contexts_with_threads(2)) {
    for (const auto& shape : kShapes) {
      OneOfEach plain(shape);
      ASSERT_EQ(plain.run(t.context), "");
      for (const int64_t stride : {int64_t{0}, int64_t{-1}, INT64_MIN, INT64_MAX, kMaxBytes, int64_t{3}}) {
        OneOfEach spoiled(shape);
        spoiled.spoil(stride);
        ASSERT_EQ(spoiled.run(t.context), "") << t.name << " stride " << stride;
        for (const auto& [a, b] : {std::pair(&plain.out, &spoiled.out), std::pair(&plain.lse, &spoiled.lse),
                                   std::pair(&plain.gq, &spoiled.gq), std::pair(&plain.gk, &spoiled.gk),
                                   std::pair(&plain.gv, &spoiled.gv)}) {
          ASSERT_EQ(a->size(), b->size());
          ASSERT_TRUE(a->empty() || std::memcmp(a->data(), b->data(), a->size() * sizeof(float)) == 0)
              << t.name << " stride " << stride;
        }
      }
    }
  }
}

TEST(AttentionEmpty, MergeOfRowsWithoutColumnsOrStrides) {
  const std::vector<float> parts = {1, 2, 3, 4, 5, 6}, lse = {0, 0};
  for (const int64_t stride : {int64_t{-5}, INT64_MIN, INT64_MAX}) {
    std::vector<float> out(3, 7.0f);
    AttentionParts in = {.out = f32({2, 1, 3}, parts), .softmax_lse = f32({2, 1}, lse)};
    AttentionOutputs to = {.out = f32({1, 3}, out)};
    in.out.strides[1] = in.softmax_lse.strides[1] = to.out.strides[0] = stride;
    ASSERT_EQ(merge_attention(contexts().front().context, in, to).message(), "");
    EXPECT_EQ(out, (std::vector<float>{2.5f, 3.5f, 4.5f}));
  }
  // 2^50 rows, which take no memory.
  AttentionParts in = {.out = f32({2, int64_t{1} << 50, 0}, std::vector<float>()),
                       .softmax_lse = f32({2, int64_t{1} << 50}, lse)};
  in.softmax_lse.strides[0] = in.softmax_lse.strides[1] = 0;
  std::vector<float> none;
  ASSERT_EQ(merge_attention(contexts().front().context, in, {.out = f32({int64_t{1} << 50, 0}, none)}).message(), "");
}

}  // namespace
}  // namespace opst::test

// A call that somebody interrupts ends soon, with a Status, for every number of threads; tasks that wait for one
// another come to their end; and the Context goes on.
#include <gtest/gtest.h>

#include <atomic>

#include "opst/attention.h"
#include "opst/attention_backward.h"
#include "opst/lightning_indexer.h"
#include "testing/random.h"

namespace opst {
namespace {

constexpr int64_t kHeads = 4, kLength = 2048, kDim = 64;  // 2^31 multiply-adds

std::atomic<int> asked, asked_before_yes;
bool ask() { return ++asked > asked_before_yes; }

struct Tensors {
  Tensors() {
    test::Random random(test::seed());
    for (Buffer* buffer : {&query, &key, &value, &grad_out}) {
      *buffer = room(kHeads * kLength * kDim * 4);
      test::fill(of(*buffer), test::Fill::normal, random);
    }
    for (Buffer* buffer : {&out, &grad_query, &grad_key, &grad_value}) {
      *buffer = room(kHeads * kLength * kDim * 4);
    }
    lse = room(kHeads * kLength * 4);
    bias = room(kLength * kLength * 4);
    grad_bias = room(kLength * kLength * 4);
    test::fill(matrix(bias), test::Fill::uniform, random);
  }
  static Buffer room(int64_t bytes) { return std::move(Buffer::allocate(bytes).value()); }
  static Tensor of(Buffer& b) { return Tensor::contiguous(DType::f32, {1, kHeads, kLength, kDim}, b.data()); }
  static Tensor matrix(Buffer& b) { return Tensor::contiguous(DType::f32, {1, 1, kLength, kLength}, b.data()); }
  Tensor statistics() { return Tensor::contiguous(DType::f32, {1, kHeads, kLength}, lse.data()); }
  AttentionInputs inputs() { return {.query = of(query), .key = of(key), .value = of(value), .bias = matrix(bias)}; }

  Status forward(Context& context, const AttentionOptions& options) {
    return flash_attention_forward(context, inputs(), {.out = of(out), .softmax_lse = statistics()}, options);
  }
  Status backward(Context& context, const AttentionOptions& options) {
    return flash_attention_backward(context, inputs(),
                                    {.out = of(out), .softmax_lse = statistics(), .grad_out = of(grad_out)},
                                    {.grad_query = of(grad_query),
                                     .grad_key = of(grad_key),
                                     .grad_value = of(grad_value),
                                     .grad_bias = matrix(grad_bias)},
                                    options);
  }

  Buffer query, key, value, grad_out, out, grad_query, grad_key, grad_value, lse, bias, grad_bias;
};

Context make_context(int num_threads) {
  ContextOptions options;
  options.isa = Isa::generic;  // slow enough to be asked several times
  options.num_threads = num_threads;
  options.interrupted = ask;
  return std::move(Context::create(options).value());
}

void expect_interrupted(const Status& status, const char* name) {
  EXPECT_EQ(status.code(), StatusCode::internal);
  EXPECT_EQ(status.message(), std::string(name) + ": interrupted; the outputs hold anything");
}

TEST(AttentionInterruption, EndsTheCall) {
  Tensors t;
  for (int num_threads : {1, 2, 5}) {
    Context context = make_context(num_threads);
    for (bool causal : {false, true}) {
      SCOPED_TRACE(std::to_string(num_threads) + " threads" + (causal ? ", causal" : ""));
      AttentionOptions options;
      options.causal = causal;
      asked = 0, asked_before_yes = 1 << 30;
      ASSERT_TRUE(t.forward(context, options).ok());
      const int whole_forward = asked.exchange(0);
      EXPECT_GT(whole_forward, 1);
      for (int before : {0, 1}) {
        asked = 0, asked_before_yes = before;
        expect_interrupted(t.backward(context, options), "flash_attention_backward");
        EXPECT_EQ(asked, before + 1);  // nobody asks once it is known
        asked = 0;
        expect_interrupted(t.forward(context, options), "flash_attention_forward");
        EXPECT_EQ(asked, before + 1);
      }
    }
  }
}

// One key head for all heads: 2^30 multiply-adds.
TEST(AttentionInterruption, EndsAnIndexersCall) {
  Tensors t;
  constexpr int64_t kCount = 64;
  std::vector<int32_t> indices(kLength * kCount);
  const Tensor out = Tensor::contiguous(DType::i32, {1, kLength, 1, kCount}, indices.data());
  const LightningIndexerInputs in = {
      .query = Tensors::of(t.query), .key = Tensors::of(t.key).narrowed(1, 0, 1), .weights = t.statistics()};
  test::Random random(test::seed());
  test::fill(t.statistics(), test::Fill::normal, random);
  struct Way {
    int num_threads;
    int64_t block_q;  // 256: the keys are split
  };
  for (const auto& [num_threads, block_q] : {Way{1, 0}, Way{2, 0}, Way{5, 0}, Way{1, 256}, Way{2, 256}}) {
    SCOPED_TRACE(std::to_string(num_threads) + " threads, block_q " + std::to_string(block_q));
    Context context = make_context(num_threads);
    const LightningIndexerOptions options = {.block_q = block_q};
    asked = 0, asked_before_yes = 0;
    expect_interrupted(lightning_indexer(context, in, {.indices = out}, options), "lightning_indexer");
    EXPECT_EQ(asked, 1);
    asked = 0, asked_before_yes = 1 << 30;
    EXPECT_TRUE(lightning_indexer(context, in, {.indices = out}, options).ok());
  }
}

TEST(AttentionInterruption, TheNextCallIsWhole) {
  Tensors t;
  Context context = make_context(2);
  asked = 0, asked_before_yes = 1 << 30;
  ASSERT_TRUE(t.forward(context, {}).ok());
  const std::vector<float> want(static_cast<float*>(t.out.data()), static_cast<float*>(t.out.data()) + kLength * kDim);
  asked_before_yes = 0;
  EXPECT_FALSE(t.forward(context, {}).ok());
  asked_before_yes = 1 << 30;
  ASSERT_TRUE(t.forward(context, {}).ok());
  EXPECT_TRUE(std::equal(want.begin(), want.end(), static_cast<float*>(t.out.data())));
}

TEST(AttentionInterruption, ShortCallsAreNotAsked) {
  Tensors t;
  Context context = make_context(1);
  asked = 0, asked_before_yes = 0;
  const auto few = [](const Tensor& x) { return x.narrowed(2, 0, 64); };
  EXPECT_TRUE(flash_attention_forward(
                  context, {.query = few(t.of(t.query)), .key = few(t.of(t.key)), .value = few(t.of(t.value))},
                  {.out = few(t.of(t.out))})
                  .ok());
  EXPECT_EQ(asked, 0);
}

}  // namespace
}  // namespace opst

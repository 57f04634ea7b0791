// Attention backward on inputs that went wrong elsewhere, by their number in the collection of cases, and on
// adversarial values.
#include <gtest/gtest.h>

#include "attention/tests/attention_backward_call.h"
#include "testing/lazy_mapping.h"

namespace opst::test {
namespace {

Draw dense(DType dtype, int64_t heads, int64_t kv_heads, int64_t query_len, int64_t kv_len, int64_t dim) {
  Draw d;
  d.query_dtype = d.kv_dtype = d.out_dtype = dtype;
  d.bias_dtype = dtype == DType::f64 ? DType::f64 : DType::f32;
  d.num_heads = heads, d.num_kv_heads = kv_heads, d.head_dim = d.value_head_dim = dim;
  d.query_lens = {query_len}, d.kv_lens = {kv_len};
  return d;
}
BackwardForm form_of(const Draw& d) {
  BackwardForm f;
  f.grad_out_dtype = d.out_dtype;
  return f;
}

// Judged by the reference on every level, and each with two numbers of threads.
void expect_right(const DrawnCall& call, BackwardCallData& data) {
  double worst_ratio = 0;
  for (const TestContext& t : contexts_with_threads(2)) {
    const BackwardCallData::Outcome r = data.run(t.context);
    ASSERT_EQ(data.judge(r, t.context, worst_ratio), "") << t.name;
    const auto others = contexts_like(t);
    ASSERT_EQ(data.run(others[0]->context).differs_from(r), "") << t.name << "\n  " << to_string(call.drawn());
  }
}
bool all_finite(const Tensor& t) {
  for (int64_t i = 0; i < t.num_elements(); ++i) {
    if (!std::isfinite(get(t, i))) return false;
  }
  return true;
}

// Under ThreadSanitizer all cases take six minutes: a third of them, by the seed.
class AttentionBackwardCases : public testing::Test {
 protected:
  void SetUp() override {
    const std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
    if (kThreadSanitizer && !exhaustive() && drawn_case(name, 3) != 0) {
      GTEST_SKIP() << "under ThreadSanitizer the seed chose other cases";
    }
  }
};

TEST_F(AttentionBackwardCases, B03_AFirstTileOfTheLowestFloat) {
  Random random(seed());
  Draw d = dense(DType::f32, 1, 1, 441, 441, 64);
  d.bias = d.bias_dims[2] = d.bias_dims[3] = true;
  DrawnCall call(d, random);
  const Tensor bias = mutable_view(call.inputs.bias);
  for (int64_t i = 0; i < bias.num_elements(); ++i)
    set(bias, i, i % 441 < 128 ? std::numeric_limits<float>::lowest() : 0);
  BackwardCallData data(call, form_of(d), random);
  // The same without these keys.
  Draw rest = dense(DType::f32, 1, 1, 441, 313, 64);
  DrawnCall short_call(rest, random);
  copy(call.inputs.query, mutable_view(short_call.inputs.query));
  copy(call.inputs.key.narrowed(2, 128, 313), mutable_view(short_call.inputs.key));
  copy(call.inputs.value.narrowed(2, 128, 313), mutable_view(short_call.inputs.value));
  BackwardCallData short_data(short_call, form_of(rest), random);
  copy(data.grad_out(), short_data.grad_out());
  for (const TestContext& t : contexts_with_threads(2)) {
    const auto r = data.run(t.context), s = short_data.run(t.context);
    ASSERT_TRUE(r.status.ok() && s.status.ok());
    for (int64_t i = 0; i < 441 * 64; ++i) {
      const int64_t key = i / 64;
      ASSERT_NEAR(get(r.tensors.grad_query, i), get(s.tensors.grad_query, i), 1e-5) << t.name;
      const double dk = key < 128 ? 0 : get(s.tensors.grad_key, i - 128 * 64);
      const double dv = key < 128 ? 0 : get(s.tensors.grad_value, i - 128 * 64);
      ASSERT_NEAR(get(r.tensors.grad_key, i), dk, key < 128 ? 0 : 1e-5) << t.name;
      ASSERT_NEAR(get(r.tensors.grad_value, i), dv, key < 128 ? 0 : 1e-5) << t.name;
    }
  }
}

TEST_F(AttentionBackwardCases, B05_ABandOfMinusInfinityHasFiniteGradients) {
  Random random(seed());
  Draw d = dense(DType::f32, 1, 1, 640, 640, 4);
  d.bias = d.bias_dims[2] = d.bias_dims[3] = true;
  DrawnCall call(d, random);
  const Tensor bias = mutable_view(call.inputs.bias);
  for (int64_t i = 0; i < bias.num_elements(); ++i) {
    const int64_t distance = i / 640 - i % 640;
    set(bias, i, distance >= 0 && distance < 10 ? 0 : -HUGE_VAL);
  }
  for (const ConstTensor* t : {&call.inputs.query, &call.inputs.key}) fill(mutable_view(*t), Fill::zeros, random);
  fill(mutable_view(call.inputs.value), Fill::ones, random);
  BackwardCallData data(call, form_of(d), random);
  for (const TestContext& t : contexts_with_threads(2)) {
    const auto r = data.run(t.context);
    ASSERT_TRUE(r.status.ok());
    ASSERT_TRUE(all_finite(r.tensors.grad_query) && all_finite(r.tensors.grad_key) &&
                all_finite(r.tensors.grad_value) && all_finite(r.tensors.grad_bias))
        << t.name;
  }
  expect_right(call, data);
}

// Blocks of fewer rows than a query has heads in its group: several of them add to one element of the bias's gradient,
// always in the same order.
TEST_F(AttentionBackwardCases, HeadsOfOneQueryInSeveralBlocksShareABias) {
  Random random(seed());
  for (const int64_t block_q : {1, 3, 4, 6}) {
    Draw d = dense(DType::f32, 4, 1, 62, 130, 16);
    d.bias = d.bias_dims[2] = true;
    d.options.block_q = block_q, d.options.block_kv = 17;
    DrawnCall call(d, random);
    BackwardCallData data(call, form_of(d), random);
    const std::vector<TestContext>&one = contexts_with_threads(1), &five = contexts_with_threads(5);
    for (size_t level = 0; level < one.size(); ++level) {
      const BackwardCallData::Outcome expected = data.run(one[level].context);
      for (int round = 0; round < 8; ++round) {
        ASSERT_EQ(data.run(five[level].context).differs_from(expected), "") << one[level].name << ", rows " << block_q;
      }
    }
  }
}

TEST_F(AttentionBackwardCases, B08_AFullyMaskedRowTakesNoPart) {
  Random random(seed());
  Draw d = dense(DType::f32, 1, 1, 4, 4, 8);
  d.mask = d.mask_dims[2] = d.mask_dims[3] = true;
  DrawnCall call(d, random);
  const Tensor mask = mutable_view(call.inputs.mask);
  for (int64_t i = 0; i < 16; ++i) set(mask, i, i / 4 == 2 ? 0 : 1);
  for (const double ignored : {0.0, std::numeric_limits<double>::quiet_NaN()}) {
    BackwardCallData data(call, form_of(d), random);
    for (int64_t i = 0; i < 32; ++i) set(data.grad_out(), i, i / 8 == 2 ? ignored : 1);
    Draw rest = dense(DType::f32, 1, 1, 3, 4, 8);
    DrawnCall short_call(rest, random);
    for (int64_t i = 0; i < 3; ++i) {
      copy(call.inputs.query.narrowed(2, i == 2 ? 3 : i, 1), mutable_view(short_call.inputs.query).narrowed(2, i, 1));
    }
    copy(call.inputs.key, mutable_view(short_call.inputs.key));
    copy(call.inputs.value, mutable_view(short_call.inputs.value));
    BackwardCallData short_data(short_call, form_of(rest), random);
    fill(short_data.grad_out(), Fill::ones, random);
    for (const TestContext& t : contexts_with_threads(2)) {
      const auto r = data.run(t.context), s = short_data.run(t.context);
      ASSERT_TRUE(r.status.ok() && s.status.ok());
      for (int64_t i = 0; i < 8; ++i) ASSERT_EQ(get(r.tensors.grad_query, 2 * 8 + i), 0) << t.name;
      ASSERT_TRUE(all_finite(r.tensors.grad_query)) << t.name;
      for (int64_t i = 0; i < 32; ++i) {
        ASSERT_NEAR(get(r.tensors.grad_key, i), get(s.tensors.grad_key, i), 1e-6) << t.name;
        ASSERT_NEAR(get(r.tensors.grad_value, i), get(s.tensors.grad_value, i), 1e-6) << t.name;
      }
    }
  }
}

TEST_F(AttentionBackwardCases, B26_LengthsThatAreNoMultipleOfATileWithSeveralHeads) {
  Random random(seed());
  for (const auto& [heads, kv_heads] : {std::pair(2, 2), std::pair(4, 2)}) {
    for (const bool causal : {false, true}) {
      Draw d = dense(DType::f32, heads, kv_heads, 65, 65, 64);
      d.options.causal = causal;
      DrawnCall call(d, random);
      BackwardCallData data(call, form_of(d), random);
      expect_right(call, data);
    }
  }
}

TEST_F(AttentionBackwardCases, B29_MoreQueriesThanTheOneKeyOfASequence) {
  Random random(seed());
  Draw d = dense(DType::f16, 1, 1, 1, 1, 32);
  d.varlen_q = true, d.keys = Keys::varlen;
  d.query_lens = {76, 34, 146}, d.kv_lens = {1, 1, 1};
  d.options.causal = true;
  for (const auto alignment : {CausalAlignment::top_left, CausalAlignment::bottom_right}) {
    d.options.alignment = alignment;
    DrawnCall call(d, random);
    for (const ConstTensor* t : {&call.inputs.query, &call.inputs.key, &call.inputs.value}) {
      for (int64_t i = 0; i < t->num_elements(); ++i) set(mutable_view(*t), i, 3 * random.normal());
    }
    BackwardCallData data(call, form_of(d), random);
    fill(data.grad_out(), Fill::ones, random);
    for (const TestContext& t : contexts_with_threads(2)) {
      const auto r = data.run(t.context);
      ASSERT_TRUE(r.status.ok());
      // One key has all the weight, whatever its score.
      for (int64_t i = 0; i < 256 * 32; ++i) ASSERT_EQ(get(r.tensors.grad_query, i), 0) << t.name;
      for (int64_t i = 0; i < 3 * 32; ++i) {
        const int64_t seen = alignment == CausalAlignment::top_left ? d.query_lens[static_cast<size_t>(i / 32)] : 1;
        ASSERT_EQ(get(r.tensors.grad_key, i), 0) << t.name;
        ASSERT_NEAR(get(r.tensors.grad_value, i), static_cast<double>(seen), 1e-3 * static_cast<double>(seen))
            << t.name;
      }
    }
  }
}

TEST_F(AttentionBackwardCases, B31_RowsBehindTheLastSequenceGetZero) {
  Random random(seed());
  struct Sizes {
    int64_t heads, dim;
    std::vector<int64_t> lengths;
    int64_t behind;
  };
  for (const Sizes& s : {Sizes{16, 64, {144, 288, 512}, 2}, Sizes{2, 8, {2, 3}, 2}}) {
    Draw d = dense(DType::f32, s.heads, s.heads, 1, 1, s.dim);
    d.varlen_q = true, d.keys = Keys::varlen;
    d.query_lens = d.kv_lens = s.lengths;
    d.rows_behind = s.behind;
    d.options.causal = true;
    DrawnCall call(d, random);
    BackwardCallData data(call, form_of(d), random);
    const TestContext& t = contexts_with_threads(2).back();
    const auto r = data.run(t.context);
    ASSERT_TRUE(r.status.ok()) << r.status.message();
    const int64_t used = std::accumulate(s.lengths.begin(), s.lengths.end(), int64_t{0});
    for (const Tensor* g : {&r.tensors.grad_query, &r.tensors.grad_key, &r.tensors.grad_value}) {
      ASSERT_TRUE(all_finite(*g));
      for (int64_t i = used * s.heads * s.dim; i < g->num_elements(); ++i) ASSERT_EQ(get(*g, i), 0);
    }
    EXPECT_GT(r.tensors.grad_query.shape[0], used);
  }
}

TEST_F(AttentionBackwardCases, B42_StridesOfGradOutDoNotMatter) {
  Random random(seed());
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Draw d = dense(dtype, 2, 2, 49, 49, 32);
    d.query_lens = d.kv_lens = {49, 49};
    DrawnCall call(d, random);
    BackwardForm contiguous = form_of(d), permuted = contiguous;
    permuted.grad_out_strides = Strides::bsnd;
    BackwardCallData a(call, contiguous, random), b(call, permuted, random);
    copy(a.grad_out(), b.grad_out());
    for (const TestContext& t : contexts_with_threads(2)) {
      ASSERT_EQ(b.run(t.context).differs_from(a.run(t.context)), "") << t.name;
    }
    // Expanded from one element, as the gradient of a sum is.
    fill(a.grad_out(), Fill::ones, random);
    for (const TestContext& t : contexts_with_threads(2)) {
      auto expected = a.run(t.context), got = a.run(t.context);
      AttentionSaved saved = a.saved(got.forward);
      std::fill(saved.grad_out.strides, saved.grad_out.strides + 4, 0);
      for (const auto& memory : got.memory) {
        if (memory != nullptr) fill(memory->tensor(), Fill::nan, random);
      }
      ASSERT_TRUE(flash_attention_backward(const_cast<Context&>(t.context), call.inputs, saved, got.tensors).ok());
      ASSERT_EQ(got.differs_from(expected), "") << t.name;
    }
  }
}

// Row, head and batch strides beyond 2^31 elements.
TEST_F(AttentionBackwardCases, B43_StridesBeyond32Bits) {
  Random random(seed());
  constexpr int64_t kFar = 1'100'000'000;
  for (int far_dim = 0; far_dim < 3; ++far_dim) {
    Draw d =
        dense(DType::bf16, far_dim == 1 ? 3 : 1, far_dim == 1 ? 3 : 1, far_dim == 2 ? 3 : 2, far_dim == 2 ? 3 : 2, 8);
    if (far_dim == 0) d.query_lens = d.kv_lens = {2, 2, 2};
    DrawnCall call(d, random);
    BackwardCallData data(call, form_of(d), random);
    const TestContext& t = contexts_with_threads(2).back();
    const auto expected = data.run(t.context);
    ASSERT_TRUE(expected.status.ok());
    std::vector<std::unique_ptr<LazyMapping>> memory;
    bool refused = false;
    const auto spread = [&](ConstTensor from, bool copied) {
      memory.push_back(std::make_unique<LazyMapping>((2 * kFar + 1000) * 2));
      Tensor to = mutable_view(from);
      to.data = memory.back()->data();
      refused = refused || to.data == nullptr;
      to.strides[far_dim] = kFar;
      if (copied && !refused) copy(from, to);
      return to;
    };
    AttentionInputs in = call.inputs;
    in.query = spread(in.query, true), in.key = spread(in.key, true), in.value = spread(in.value, true);
    AttentionSaved saved = data.saved(expected.forward);
    saved.out = spread(saved.out, true), saved.grad_out = spread(saved.grad_out, true);
    AttentionGradients far;
    far.grad_query = spread(expected.tensors.grad_query, false);
    far.grad_key = spread(expected.tensors.grad_key, false);
    far.grad_value = spread(expected.tensors.grad_value, false);
    if (refused) GTEST_SKIP() << "the system refuses such a mapping";
    const Status status = flash_attention_backward(const_cast<Context&>(t.context), in, saved, far);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(compare_bits(far.grad_query, expected.tensors.grad_query).ok) << far_dim;
    ASSERT_TRUE(compare_bits(far.grad_key, expected.tensors.grad_key).ok) << far_dim;
    ASSERT_TRUE(compare_bits(far.grad_value, expected.tensors.grad_value).ok) << far_dim;
  }
}

TEST_F(AttentionBackwardCases, B54_OddHeadDims) {
  Random random(seed());
  for (const int64_t dim : {1, 3, 7, 40, 48, 63, 72, 80, 96, 160, 192, 256, 512}) {
    for (const int64_t length : {63, 100}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        if (!exhaustive() && !random.chance(dim > 128 ? 0.3 : 0.5)) continue;
        Draw d = dense(dtype, 1, 1, length, length, dim);
        d.options.causal = random.chance(0.5);
        DrawnCall call(d, random);
        BackwardForm form = form_of(d);
        form.gradient_strides = Strides::padded;  // columns beyond dim must stay as they are: judge looks
        BackwardCallData data(call, form, random);
        double worst_ratio = 0;
        const auto& list = contexts_with_threads(2);
        const TestContext& t = list[static_cast<size_t>(random.integer(0, static_cast<int64_t>(list.size()) - 1))];
        ASSERT_EQ(data.judge(data.run(t.context), t.context, worst_ratio), "") << t.name;
      }
    }
  }
}

TEST_F(AttentionBackwardCases, B89_FiftyRunsGiveTheSameBits) {
  Random random(seed());
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Draw d = dense(dtype, 4, 4, 130, 130, 64);
    d.query_lens = d.kv_lens = {130, 130};
    d.options.causal = true;
    d.bias = d.bias_dims[2] = d.bias_dims[3] = true;  // one for all heads: its gradient is a sum over them
    d.sinks = true;
    DrawnCall call(d, random);
    BackwardCallData data(call, form_of(d), random);
    Result<Context> context = Context::create({.num_threads = 4});
    ASSERT_TRUE(context.ok());
    const auto first = data.run(context.value());
    for (int i = 0; i < 50; ++i) ASSERT_EQ(data.run(context.value()).differs_from(first), "") << i;
  }
}

TEST_F(AttentionBackwardCases, HiddenNaNReachesNothing) {
  Random random(seed());
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    Draw d = dense(dtype, 2, 1, 40, 50, 24);
    d.options.causal = true;
    d.options.block_q = 16, d.options.block_kv = 16;
    DrawnCall call(d, random);
    BackwardCallData data(call, form_of(d), random);
    // bottom right: row i sees keys up to i + 10. Key 45 is seen by rows 35 on; row 20 sees keys up to 30.
    const Tensor key = mutable_view(call.inputs.key), value = mutable_view(call.inputs.value);
    const Tensor query = mutable_view(call.inputs.query);
    set(key, 45 * 24 + 3, nan);
    set(value, 45 * 24 + 5, nan);
    set(query, 20 * 24 + 7, nan);
    set(data.grad_out(), (40 + 20) * 24 + 2, nan);
    for (const TestContext& t : contexts_with_threads(2)) {
      const auto r = data.run(t.context);
      ASSERT_TRUE(r.status.ok());
      for (int64_t i = 0; i < 2 * 40 * 24; ++i) {
        const int64_t row = i / 24 % 40;
        ASSERT_EQ(std::isnan(get(r.tensors.grad_query, i)), row >= 35 || row == 20) << t.name << " row " << row;
      }
      for (int64_t i = 0; i < 50 * 24; ++i) {
        const int64_t j = i / 24;
        // Rows 35 on see keys 0 to 49: their softmax is NaN, and reaches everything up to the last key that they see.
        ASSERT_TRUE(std::isnan(get(r.tensors.grad_key, i))) << t.name << " key " << j;
      }
    }
    // With the late rows' keys whole again only row 20 is ill.
    set(key, 45 * 24 + 3, 0.5);
    set(value, 45 * 24 + 5, 0.5);
    for (const TestContext& t : contexts_with_threads(2)) {
      const auto r = data.run(t.context);
      for (int64_t i = 0; i < 50 * 24; ++i) {
        const bool seen = i / 24 <= 30;
        ASSERT_EQ(std::isnan(get(r.tensors.grad_key, i)), seen) << t.name << " key " << i / 24;
        ASSERT_TRUE(seen || !std::isnan(get(r.tensors.grad_value, i))) << t.name << " key " << i / 24;
      }
    }
  }
}

TEST_F(AttentionBackwardCases, AdversarialValues) {
  Random random(seed());
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const Fill of_query : {Fill::ones, Fill::zeros, Fill::ascending_rows, Fill::outlier, Fill::small_integers,
                                Fill::powers_of_two, Fill::denormals}) {
      for (const Fill of_value : {Fill::normal, Fill::ones, Fill::outlier, Fill::denormals}) {
        if (!exhaustive() && !random.chance(0.5 * kEffort)) continue;
        // An O of subnormal numbers is rounded absolutely, and delta with it.
        if (dtype == DType::f16 && of_value == Fill::denormals) continue;
        Draw d = dense(dtype, 2, 1, 37, 53, 16);
        d.options.causal = random.chance(0.5);
        // f16 squares would overflow.
        if (dtype == DType::f16 || of_query == Fill::outlier) d.options.softmax_scale = 0.01f;
        DrawnCall call(d, random);
        fill(mutable_view(call.inputs.query), of_query, random);
        fill(mutable_view(call.inputs.value), of_value, random);
        BackwardCallData data(call, form_of(d), random);
        expect_right(call, data);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Scores so large that their own rounding is more than a unit: softmax is one key, or several that tie.
TEST_F(AttentionBackwardCases, ScoresOfAnyFiniteSize) {
  Random random(seed());
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const bool from_lse : {true, false}) {
      for (const bool sinks : {false, true}) {
        Draw d = dense(dtype, 2, 1, 37, 53, 16);
        d.options.causal = random.chance(0.5);
        d.options.block_kv = 16;
        d.sinks = sinks;
        DrawnCall call(d, random);
        for (const ConstTensor* t : {&call.inputs.query, &call.inputs.key}) {
          // Up to the limit of f16, powers of two: scores are exact, and many of them equal.
          for (int64_t i = 0; i < t->num_elements(); ++i) {
            set(mutable_view(*t), i,
                i % 16 < 2 ? std::ldexp(random.chance(0.5) ? 1.0 : -1.0, static_cast<int>(random.integer(12, 15))) : 0);
          }
        }
        BackwardForm form = form_of(d);
        form.from_lse = from_lse;
        BackwardCallData data(call, form, random);
        expect_right(call, data);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(AttentionBackwardCases, RowsOfTheLowestFloatShareAllKeys) {
  Random random(seed());
  Draw d = dense(DType::f32, 1, 1, 20, 40, 8);
  d.bias = d.bias_dims[2] = true;
  DrawnCall call(d, random);
  const Tensor bias = mutable_view(call.inputs.bias);
  for (int64_t i = 0; i < 20; ++i) set(bias, i, i % 2 == 0 ? std::numeric_limits<float>::lowest() : 1e6);
  for (const bool from_lse : {true, false}) {
    BackwardForm form = form_of(d);
    form.from_lse = from_lse;
    BackwardCallData data(call, form, random);
    for (const TestContext& t : contexts_with_threads(2)) {
      const auto r = data.run(t.context);
      ASSERT_TRUE(r.status.ok());
      double sums[8] = {};  // of grad_value over the keys: every row's weights add up to 1
      for (int64_t i = 0; i < 40 * 8; ++i) sums[i % 8] += get(r.tensors.grad_value, i);
      for (int64_t c = 0; c < 8; ++c) {
        double expected = 0;
        for (int64_t i = 0; i < 20; ++i) expected += get(data.grad_out(), i * 8 + c);
        ASSERT_NEAR(sums[c], expected, 1e-4) << t.name;
      }
    }
  }
}

// What a sum over rows that is kept in the storage type loses grows with their number; sums here are f32.
TEST_F(AttentionBackwardCases, ErrorsOfBf16DoNotGrowWithTheLength) {
  Random random(seed());
  const auto relative_error = [&](int64_t length) {
    Draw d = dense(DType::bf16, 1, 1, length, length, 32);
    DrawnCall call(d, random);
    BackwardCallData data(call, form_of(d), random);
    const auto r = data.run(contexts_with_threads(2).back().context);
    const auto reference = attention::reference_gradients(call.inputs, data.grad_out(), {}, d.options);
    double error = 0, norm = 0;
    for (const auto& [got, expected] :
         {std::pair(&r.tensors.grad_query, &reference.query), std::pair(&r.tensors.grad_key, &reference.key),
          std::pair(&r.tensors.grad_value, &reference.value)}) {
      for (size_t i = 0; i < expected->size(); ++i) {
        const double x = get(*got, static_cast<int64_t>(i)) - (*expected)[i];
        error += x * x;
        norm += (*expected)[i] * (*expected)[i];
      }
    }
    return std::sqrt(error / norm);
  };
  const double short_error = relative_error(256), long_error = relative_error(kEffort < 1 ? 512 : 2048);
  EXPECT_LT(short_error, 5e-3);
  EXPECT_LT(long_error, 1.6 * short_error);  // sums in bf16 would double it
}

}  // namespace
}  // namespace opst::test

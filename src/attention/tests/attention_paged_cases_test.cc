// Attention over pages on inputs that went wrong elsewhere, by their number in the collection of cases: norm pages, which
// give the bits of contiguous keys, and panel32 pages, judged by the reference. Rows of pages that no token fills are NaN.
// (B44 in norm pages: attention_memory_test; B50: attention_cases_test; B61, B62: attention_contract_test; B62, B64, B65:
// attention_exact_test.)
#include <gtest/gtest.h>

#include "attention/tests/attention_backward_call.h"
#include "testing/lazy_mapping.h"

namespace opst::test {
namespace {

// The keys and values of a problem in both layouts, and whatever else its inputs have.
struct BothLayouts {
  BothLayouts(const Problem& problem, int64_t block_size, Random& random)
      : norm(problem.paged(block_size, random)), wide(problem.paged(64, random)) {
    for (Pages* pages : {&norm, &wide}) {
      pages->inputs.mask = problem.inputs.mask;
      if (problem.inputs.kv_lengths.data != nullptr) pages->inputs.kv_lengths = problem.inputs.kv_lengths;
    }
    panels = panels_of(wide.inputs);
  }
  std::vector<const AttentionInputs*> all() const { return {&norm.inputs, &panels.inputs}; }

  Pages norm, wide;
  PanelPages panels;
};

void expect_right(Problem& problem, int64_t block_size, Random& random, int64_t max_rows = 1 << 20) {
  const BothLayouts pages(problem, block_size, random);
  for (const TestContext& t : contexts_with_threads(2)) {
    SCOPED_TRACE(t.name);
    const Outcome norm = problem.run(t.context, pages.norm.inputs);
    problem.layout = PageLayout::norm;
    ASSERT_EQ(problem.judge(norm, t.context, max_rows), "");
    ASSERT_EQ(norm.differs_from(problem.run(t.context)), "");
    problem.layout = PageLayout::panel32;
    ASSERT_EQ(problem.judge(problem.run(t.context, pages.panels.inputs), t.context, max_rows), "");
  }
}

// Every row of the output, in both layouts and pages of a few sizes.
void expect_rows(const Problem& problem, const std::vector<double>& expected, double tolerance) {
  Random random(1);
  for (const int64_t block_size : {1, 2, 16}) {
    const BothLayouts pages(problem, block_size, random);
    for (const TestContext& t : contexts_with_threads(2)) {
      for (const AttentionInputs* in : pages.all()) {
        const Outcome r = problem.run(t.context, *in);
        ASSERT_EQ(r.status.message(), "");
        for (size_t i = 0; i < expected.size(); ++i) {
          ASSERT_NEAR(get(r.out->tensor(), static_cast<int64_t>(i)), expected[i], tolerance)
              << t.name << ", rank of pages " << in->key.rank << ", pages of " << block_size << ", element " << i;
        }
      }
    }
  }
}

// A key that a mask hides, and one behind the sequence's end within its page.
TEST(AttentionPagedCases, B06_NanInAHiddenKey) {
  const std::vector<uint8_t> shown = {1, 0, 1, 0};
  const std::vector<int32_t> one = {1};
  for (const double poison : {1e10, std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    for (const bool in_value : {false, true}) {
      for (const bool by_length : {false, true}) {
        ProblemOptions p;
        p.query_len = p.kv_len = 2, p.head_dim = p.value_head_dim = 4;
        Random random(1);
        Problem problem(p, random);
        for (const Tensor& x : {problem.query(), problem.key(), problem.value()}) {
          for (int64_t i = 0; i < 8; ++i) set(x, i, static_cast<double>(i));
        }
        set(in_value ? problem.value() : problem.key(), 4, poison);
        if (by_length) {
          problem.inputs.kv_lengths = ConstTensor::contiguous(DType::i32, {1}, one.data());
        } else {
          problem.inputs.mask = ConstTensor::contiguous(DType::boolean, {2, 2}, shown.data());
        }
        expect_rows(problem, {0, 1, 2, 3, 0, 1, 2, 3}, 0);
      }
    }
  }
}

// Q = 0 and V[j] = 2^j: an output times the number of visible keys is their set.
ProblemOptions probe(int64_t query_len, int64_t kv_len) {
  ProblemOptions p;
  p.query_len = query_len, p.kv_len = kv_len;
  p.query_fill = Fill::zeros;
  return p;
}
void powers_of_two(const Problem& problem) {
  for (int64_t j = 0; j < problem.options().kv_len; ++j) set(problem.value(), j, std::ldexp(1.0, static_cast<int>(j)));
}

TEST(AttentionPagedCases, B18_BottomRightAlignment) {
  Random random(1);
  for (const auto& [query_len, kv_len, expected] :
       {std::tuple(2, 5, std::vector<double>{3.75, 6.2}), std::tuple(5, 2, std::vector<double>{0, 0, 0, 1, 1.5})}) {
    ProblemOptions p = probe(query_len, kv_len);
    p.options.causal = true;
    const Problem problem(p, random);
    powers_of_two(problem);
    expect_rows(problem, expected, 1e-5);
  }
  ProblemOptions p = probe(3, 128);
  p.options.causal = true;
  p.value_fill = Fill::zeros;
  const Problem problem(p, random);
  set(problem.value(), 126, 127), set(problem.value(), 127, 128);
  expect_rows(problem, {0, 1, 255.0 / 128}, 1e-5);
}

TEST(AttentionPagedCases, B21_SlidingWindow) {
  Random random(1);
  struct Window {
    int64_t left;
    double keys, set;
  };
  for (const Window w :
       {Window{4, 5, 0x3e0}, {3, 4, 0x3c0}, {9, 10, 0x3ff}, {10, 10, 0x3ff}, {kUnbounded, 10, 0x3ff}}) {
    ProblemOptions p = probe(1, 10);  // row 9 of 10
    p.options.window_left = w.left, p.options.window_right = 0;
    const Problem problem(p, random);
    powers_of_two(problem);
    expect_rows(problem, {w.set / w.keys}, 1e-4);
  }
  // A token far behind: whole pages lie before the window, and hold NaN.
  for (const int64_t query_len : {1, 3}) {
    ProblemOptions p;
    p.query_len = query_len, p.kv_len = 1000, p.head_dim = p.value_head_dim = 16;
    p.options.window_left = 100, p.options.window_right = 0;
    Problem problem(p, random);
    const int64_t hidden = 1000 - query_len - 100;
    for (const Tensor& x : {problem.key(), problem.value()}) fill(x.narrowed(2, 0, hidden), Fill::nan, random);
    expect_right(problem, 16, random);
  }
}

TEST(AttentionPagedCases, B22_B49_LengthsOfDecode) {
  Random random(seed() + 1);
  for (const int64_t query_len : {1, 2, 5, 8}) {
    for (const int64_t head_dim : {64, 96, 128}) {
      for (const int64_t length : {1, 31, 32, 33, 38, 39, 70, 127, 129}) {
        ProblemOptions p;
        p.query_dtype = p.kv_dtype = p.out_dtype = random.pick({DType::f32, DType::bf16, DType::f16});
        p.num_kv_heads = 2, p.num_heads = 2 * random.pick<int64_t>({1, 3, 5, 6, 7});
        p.query_len = query_len, p.kv_len = length, p.head_dim = p.value_head_dim = head_dim;
        p.options.causal = random.chance(0.5);
        Problem problem(p, random);
        expect_right(problem, 16, random, 40);
      }
    }
  }
}

TEST(AttentionPagedCases, B49_GroupsThatAreNoPowerOfTwo) {
  Random random(seed() + 2);
  for (const auto& [heads, kv_heads] :
       {std::pair(12, 2), std::pair(3, 1), std::pair(10, 2), std::pair(7, 1), std::pair(24, 1)}) {
    ProblemOptions p;
    p.num_heads = heads, p.num_kv_heads = kv_heads, p.kv_len = 4096, p.head_dim = p.value_head_dim = 16;
    Problem problem(p, random);
    expect_right(problem, 16, random, 24);
  }
}

// Pages of the whole prompt; each chunk sees as many of their keys as there are by then.
TEST(AttentionPagedCases, B23_ChunkedPrefillIsOneShot) {
  Random random(seed() + 3);
  ProblemOptions p;
  p.query_len = p.kv_len = 520, p.head_dim = p.value_head_dim = 64;
  p.options.causal = true;
  Problem whole(p, random);
  const BothLayouts pages(whole, 16, random);
  p.query_len = 130;
  const Problem chunk(p, random);
  for (const TestContext& t : contexts_with_threads(2)) {
    const Outcome expected = whole.run(t.context);
    for (const AttentionInputs* of_pages : pages.all()) {
      whole.layout = of_pages == &pages.norm.inputs ? PageLayout::norm : PageLayout::panel32;
      ASSERT_EQ(whole.judge(whole.run(t.context, *of_pages), t.context, 40), "");
      for (const int32_t start : {0, 130, 260, 390}) {
        const int32_t length = start + 130;
        AttentionInputs in = *of_pages;
        in.query = whole.query().narrowed(2, start, 130);
        in.kv_lengths = ConstTensor::contiguous(DType::i32, {1}, &length);
        const Outcome r = chunk.run(t.context, in);
        ASSERT_EQ(r.status.message(), "");
        for (int64_t i = 0; i < 130 * 64; ++i) {
          ASSERT_NEAR(get(r.out->tensor(), i), get(expected.out->tensor(), start * 64 + i), 1e-5)
              << t.name << ", start " << start;
        }
      }
    }
  }
}

// Sequences of 5 and 3 tokens end to end, 4 heads: keys end to end, and in pages.
TEST(AttentionPagedCases, B53_WideHeadsOfSequencesEndToEnd) {
  Random random(seed() + 4);
  double worst_ratio = 0;
  for (const auto& [head_dim, value_head_dim] :
       {std::pair(128, 128), std::pair(192, 128), std::pair(576, 512), std::pair(256, 256)}) {
    for (const Keys keys : {Keys::varlen, Keys::norm_pages, Keys::panel_pages}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        Draw d;
        d.query_dtype = d.kv_dtype = d.out_dtype = dtype;
        d.num_heads = 4, d.num_kv_heads = random.pick<int64_t>({1, 4});
        d.head_dim = head_dim, d.value_head_dim = value_head_dim;
        d.varlen_q = true, d.query_lens = d.kv_lens = {5, 3};
        d.keys = keys, d.block_size = 32;
        if (keys == Keys::panel_pages) d.options.page_layout = PageLayout::panel32;
        d.options.causal = true;
        DrawnCall call(d, random);
        for (const TestContext& t : contexts_with_threads(2)) {
          const DrawnCall::Outputs out = call.make_outputs();
          ASSERT_EQ(flash_attention_forward(t.context, call.inputs, out.tensors, d.options).message(), "");
          ASSERT_EQ(judge(call, out, t.context, 64, worst_ratio), "") << t.name;
        }
      }
    }
  }
}

// 70,001 panel32 pages of 32 rows, 8 heads and 128 columns: 2.29e9 elements, of which the last page is used.
TEST(AttentionPagedCases, B44_PanelsBeyond32Bits) {
  constexpr int64_t kBlocks = 70'001, kHeads = 8, kDim = 128, kPage = 32 * kHeads * kDim;
  const LazyMapping keys(kBlocks * kPage * 2), values(kBlocks * kPage * 2);
  if (keys.data() == nullptr || values.data() == nullptr) GTEST_SKIP() << "the system refuses such a mapping";
  Random random(seed() + 5);
  ProblemOptions p;
  p.query_dtype = p.kv_dtype = p.out_dtype = DType::bf16;
  p.num_heads = p.num_kv_heads = kHeads, p.query_len = 2, p.kv_len = 5, p.head_dim = p.value_head_dim = kDim;
  const Problem problem(p, random);
  const Pages norm = problem.paged(32, random);
  const PanelPages small = panels_of(norm.inputs);
  AttentionInputs large = small.inputs;
  const std::vector<int32_t> table = {kBlocks - 1};
  large.block_table = ConstTensor::contiguous(DType::i32, {1, 1}, table.data());
  large.key.shape[0] = large.value.shape[0] = kBlocks;
  large.key.data = keys.data(), large.value.data = values.data();
  const auto move = [&](const ConstTensor& from, const LazyMapping& to) {
    std::memcpy(static_cast<char*>(to.data()) + (kBlocks - 1) * kPage * 2,
                static_cast<const char*>(from.data) + norm.table[0] * kPage * 2, kPage * 2);
  };
  move(small.inputs.key, keys), move(small.inputs.value, values);
  for (const TestContext& t : contexts_with_threads(2)) {
    const Outcome r = problem.run(t.context, large);
    ASSERT_EQ(r.status.message(), "");
    ASSERT_EQ(r.differs_from(problem.run(t.context, small.inputs)), "") << t.name;
  }
}

// Gradients of pages that lie 2.2e9 elements apart, into gradients that lie as far apart. (A gradient is written whole: a
// pool without gaps would take all of its memory.)
TEST(AttentionPagedCases, B44_GradientsOfPagesBeyond32Bits) {
  constexpr int64_t kFar = 2'200'000'000;
  Random random(seed() + 6);
  Draw d;
  d.query_dtype = d.kv_dtype = d.out_dtype = DType::bf16;
  d.num_heads = 4, d.num_kv_heads = 2, d.head_dim = d.value_head_dim = 8;
  d.query_lens = {6}, d.kv_lens = {20}, d.keys = Keys::norm_pages, d.block_size = 16;
  d.options.causal = true;
  DrawnCall call(d, random);
  const BackwardCallData data(call, {}, random);
  const AttentionInputs near = call.inputs;
  const int64_t blocks = near.key.shape[0];
  std::vector<std::unique_ptr<LazyMapping>> memory;
  const auto apart = [&](const ConstTensor& like) {
    memory.push_back(std::make_unique<LazyMapping>(((blocks - 1) * kFar + like.strides[0]) * 2));
    Tensor far = Tensor::contiguous(like.dtype, {blocks, 16, 2, 8}, memory.back()->data());
    far.strides[0] = kFar;
    return far;
  };
  const Tensor key = apart(near.key), value = apart(near.value), grad_key = apart(near.key),
               grad_value = apart(near.key);
  for (const auto& m : memory) {
    if (m->data() == nullptr) GTEST_SKIP() << "the system refuses a mapping of " << m->size_bytes() << " bytes";
  }
  copy(near.key, key), copy(near.value, value);
  AttentionInputs far = near;
  far.key = key, far.value = value;
  for (const TestContext& t : contexts_with_threads(2)) {
    const BackwardCallData::Outcome expected = data.run(t.context);
    ASSERT_EQ(expected.status.message(), "");
    ASSERT_EQ(flash_attention_backward(t.context, far, data.saved(expected.forward),
                                       {.grad_key = grad_key, .grad_value = grad_value}, d.options)
                  .message(),
              "");
    for (const auto& [got, want] :
         {std::pair(grad_key, expected.tensors.grad_key), std::pair(grad_value, expected.tensors.grad_value)}) {
      const Comparison c = compare_bits(got, want, {.about = t.name});
      ASSERT_TRUE(c.ok) << c.message;
    }
  }
}

}  // namespace
}  // namespace opst::test

// Rows that nobody computes: fill, and what forward and backward leave behind the last sequence of a padded buffer.
#include <gtest/gtest.h>

#include "attention/sequences.h"
#include "attention/tests/attention_problem.h"
#include "opst/attention_backward.h"

namespace opst::test {
namespace {

// Rows that hold `x` from `first` on, and are as they were before it.
void expect_filled(const View& view, int64_t first, double x, const std::string& about) {
  const Tensor t = view.tensor();
  const int64_t rows = t.shape[2], length = t.shape[3];
  for (int64_t i = 0; i < t.num_elements(); ++i) {
    const double got = get(t, i);
    if (i / length % rows < first) {
      ASSERT_TRUE(std::isnan(got)) << about << ", element " << i;
    } else {
      ASSERT_EQ(got, x) << about << ", element " << i;
    }
  }
  ASSERT_TRUE(view.gaps_intact()) << about;
}

TEST(AttentionFill, RowsOfAnyStridesAndTypes) {
  ThreadPool alone(1), three(3);
  struct Shape {
    int64_t batch, heads, rows, length, first;
  };
  // Single elements, ragged sizes, runs of more than one piece, and rows too short to be a piece.
  const Shape shapes[] = {{1, 1, 1, 1, 0},      {2, 3, 5, 7, 2},      {1, 3, 40, 1, 39},
                          {1, 2, 3, 20001, 1},  {1, 1, 50000, 2, 17}, {1, 20000, 2, 1, 1},
                          {2, 2, 300, 64, 300}, {3, 0, 5, 2, 1},      {1, 4, 1100, 19, 1}};
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    for (const Shape& s : shapes) {
      for (const Strides strides :
           {Strides::bnsd, Strides::bsnd, Strides::transposed, Strides::padded, Strides::shifted}) {
        for (const double x : {-HUGE_VAL, 1.5}) {
          for (ThreadPool* pool : {&alone, &three}) {
            View view(dtype, s.batch, s.heads, s.rows, s.length, strides);
            attention::fill_rows(view.tensor(), s.first, x, *pool);
            expect_filled(view, s.first, x,
                          to_string(ConstTensor(view.tensor())) + " " + to_string(strides) + ", from row " +
                              std::to_string(s.first));
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(AttentionFill, WithoutMemory) {
  ThreadPool pool(2);
  attention::fill(Tensor::contiguous(DType::f32, {3, 5}, nullptr), 1, pool);
  attention::fill_rows(Tensor::contiguous(DType::f32, {1, 3, 0, 5}, nullptr), 0, 1, pool);
  float one = 0;
  attention::fill(Tensor::contiguous(DType::f32, {}, &one), 2, pool);
  EXPECT_EQ(one, 2);
}

// A buffer for many more tokens than the sequences have.
TEST(AttentionFill, ForwardAndBackwardBehindTheLastSequence) {
  constexpr int64_t kTokens = 9, kRoom = 700, kHeads = 3, kDim = 40;
  const int64_t starts[] = {0, 4, 4, kTokens};
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
    for (const Strides strides : {Strides::bnsd, Strides::bsnd, Strides::padded}) {
      for (const TestContext& t : contexts_with_threads(3)) {
        const DType statistics = dtype == DType::f64 ? DType::f64 : DType::f32;
        // As [1, heads, tokens, dim]: the call's [tokens, heads, dim] is a view of it.
        const auto tokens = [&](DType type) { return View(type, 1, kHeads, kRoom, kDim, strides); };
        const auto of = [](const View& v) { return v.tensor().selected(0, 0).transposed(0, 1); };
        const auto row = [](const View& v) { return v.tensor().selected(0, 0).selected(2, 0); };
        View query = tokens(dtype), key = tokens(dtype), value = tokens(dtype), out = tokens(dtype);
        View lse(statistics, 1, kHeads, kRoom, 1, strides), max(statistics, 1, kHeads, kRoom, 1, strides),
            sum(statistics, 1, kHeads, kRoom, 1, strides);
        Random random(seed());
        for (const View* v : {&query, &key, &value}) fill(v->tensor().narrowed(2, 0, kTokens), Fill::normal, random);
        AttentionInputs in{.query = of(query), .key = of(key), .value = of(value)};
        in.cu_seqlens_q = in.cu_seqlens_k = ConstTensor::contiguous(DType::i64, {4}, starts);
        const Status status = flash_attention_forward(
            t.context, in, {.out = of(out), .softmax_lse = row(lse), .softmax_max = row(max), .softmax_sum = row(sum)},
            {});
        ASSERT_EQ(status.message(), "");
        const auto expect_behind = [&](const View& v, double x, const char* name) {
          const Tensor behind = v.tensor().narrowed(2, kTokens, kRoom - kTokens);
          for (int64_t i = 0; i < behind.num_elements(); ++i) ASSERT_EQ(get(behind, i), x) << name << " " << t.name;
          ASSERT_TRUE(v.gaps_intact()) << name;
        };
        expect_behind(out, 0, "out");
        expect_behind(lse, -HUGE_VAL, "lse");
        expect_behind(max, -HUGE_VAL, "max");
        expect_behind(sum, 0, "sum");

        View grad_out = tokens(dtype), grad_query = tokens(dtype), grad_key = tokens(dtype), grad_value = tokens(dtype);
        fill(grad_out.tensor().narrowed(2, 0, kTokens), Fill::normal, random);
        ASSERT_EQ(flash_attention_backward(
                      t.context, in, {.out = of(out), .softmax_lse = row(lse), .grad_out = of(grad_out)},
                      {.grad_query = of(grad_query), .grad_key = of(grad_key), .grad_value = of(grad_value)}, {})
                      .message(),
                  "");
        expect_behind(grad_query, 0, "grad_query");
        expect_behind(grad_key, 0, "grad_key");
        expect_behind(grad_value, 0, "grad_value");
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace opst::test

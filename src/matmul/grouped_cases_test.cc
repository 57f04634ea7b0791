// Reported defects of grouped products in other libraries, and stacks whose weights are looked at one by one.
#include <gtest/gtest.h>

#include "matmul/test_groups.h"
#include "testing/contexts.h"

namespace opst {
namespace {

using test::contexts;
using test::contexts_with_threads;
using test::DrawnList;
using test::Fill;
using test::Guard;
using test::Matrix;
using test::one_context;
using test::Random;
using test::TestContext;

Tensor stack_of(const Matrix& matrix, int64_t count) {
  const Tensor& t = matrix.tensor;
  return Tensor::contiguous(t.dtype, {count, t.shape[0] / count, t.shape[1]}, t.data);
}

// The weight gradient of an expert without tokens was what the memory held; all groups empty never ended.
TEST(GroupedCases, B75_ExpertsWithoutTokens) {
  Random random(test::seed());
  constexpr int64_t kN = 6, kK = 5;
  for (const TestContext& t : contexts()) {
    SCOPED_TRACE(t.name);
    for (const std::vector<int64_t>& rows :
         {std::vector<int64_t>{162, 0, 2577, 446, 0, 83}, {3, 0, 5, 1, 0, 2}, {0, 0, 40, 0}, {0, 0, 0}}) {
      const auto count = static_cast<int64_t>(rows.size());
      const DrawnList list(rows, random);
      const int64_t m = list.total();
      const Matrix x(DType::f32, m, kK, false, Guard::after), grad_out(DType::f32, m, kN, false, Guard::after),
          weight(DType::f32, count * kN, kK, false, Guard::after), grad_x(DType::f32, m, kK, false, Guard::after),
          grad_weight(DType::f32, count * kN, kK, false, Guard::after),
          grad_bias(DType::f32, count, kN, false, Guard::after);
      for (const Matrix* matrix : {&x, &grad_out, &weight}) test::fill(matrix->tensor, Fill::small_integers, random);
      for (const Matrix* matrix : {&grad_x, &grad_weight, &grad_bias}) test::fill(matrix->tensor, Fill::nan, random);
      ASSERT_TRUE(grouped_matmul_backward(t.context, grad_out.tensor, x.tensor, stack_of(weight, count), list.list,
                                          {grad_x.tensor, stack_of(grad_weight, count), grad_bias.tensor})
                      .ok());
      int64_t first = 0;
      for (int64_t e = 0; e < count; ++e) {
        const int64_t end = first + rows[static_cast<size_t>(e)];
        for (int64_t j = 0; j < kN; ++j) {
          double bias = 0;
          for (int64_t i = first; i < end; ++i) bias += test::get(grad_out.tensor, i * kN + j);
          ASSERT_EQ(test::get(grad_bias.tensor, e * kN + j), bias);
          for (int64_t k = 0; k < kK; ++k) {
            double sum = 0;
            for (int64_t i = first; i < end; ++i) {
              sum += test::get(grad_out.tensor, i * kN + j) * test::get(x.tensor, i * kK + k);
            }
            ASSERT_EQ(test::get(grad_weight.tensor, (e * kN + j) * kK + k), sum) << "group " << e;
          }
        }
        first = end;
      }
    }
  }
}

// bf16 products were wrong at one level and right at the others.
TEST(GroupedCases, B38_Bf16OnEveryLevel) {
  Random random(test::seed());
  constexpr int64_t kM = 64, kN = 64, kK = 256, kGroups = 2;
  const Matrix x(DType::bf16, kM, kK, false, Guard::after), weight(DType::bf16, kGroups * kN, kK, false, Guard::after);
  for (const Matrix* matrix : {&x, &weight}) test::fill(matrix->tensor, Fill::normal, random);
  const std::vector<double> xs = test::to_doubles(x.tensor), w = test::to_doubles(weight.tensor);
  const std::vector<int64_t> ends = {40, 64};
  for (const TestContext& t : contexts_with_threads(2)) {
    const Matrix out(DType::f32, kM, kN, false, Guard::after);
    ASSERT_TRUE(grouped_matmul(t.context, x.tensor, stack_of(weight, kGroups),
                               {ConstTensor::contiguous(DType::i64, {kGroups}, ends.data())}, out.tensor)
                    .ok());
    double dot = 0, ours = 0, theirs = 0;
    for (int64_t i = 0; i < kM; ++i) {
      for (int64_t j = 0; j < kN; ++j) {
        double want = 0;
        const int64_t row = (i < 40 ? 0 : kN) + j;
        for (int64_t k = 0; k < kK; ++k)
          want += xs[static_cast<size_t>(i * kK + k)] * w[static_cast<size_t>(row * kK + k)];
        const double got = test::get(out.tensor, i * kN + j);
        dot += got * want, ours += got * got, theirs += want * want;
      }
    }
    EXPECT_GT(dot / std::sqrt(ours * theirs), 1 - 1e-9) << t.name;
  }
}

// The caller's flush-to-zero reached some of the threads.
TEST(GroupedCases, B37_CallersFloatMode) {
  Random random(test::seed());
  constexpr int64_t kN = 16, kK = 24;
  const DrawnList list({3, 0, 20, 1}, random);
  const Matrix x(DType::f32, 24, kK, false, Guard::after), weight(DType::f32, 4 * kN, kK, false, Guard::after);
  test::fill(x.tensor, Fill::ones, random);
  for (int64_t i = 0; i < weight.tensor.num_elements(); ++i)
    test::set(weight.tensor, i, 1e-39 * static_cast<double>(i % 7));
  const Matrix want(DType::f32, 24, kN, false, Guard::after), got(DType::f32, 24, kN, false, Guard::after);
  for (const Isa level : test::levels()) {
    Context one = std::move(Context::create({.isa = level, .num_threads = 1}).value()),
            four = std::move(Context::create({.isa = level, .num_threads = 4}).value());
    ASSERT_TRUE(grouped_matmul(one, x.tensor, stack_of(weight, 4), list.list, want.tensor).ok());
    EXPECT_GT(test::get(want.tensor, 0), 0);
    const unsigned before = __builtin_ia32_stmxcsr();
    constexpr unsigned kFlush = 0x8040;  // FTZ and DAZ
    __builtin_ia32_ldmxcsr(before | kFlush);
    const Status alone = grouped_matmul(one, x.tensor, stack_of(weight, 4), list.list, got.tensor);
    const bool same_alone = test::same_bits_or_nan(got.tensor, want.tensor);
    const Status together = grouped_matmul(four, x.tensor, stack_of(weight, 4), list.list, got.tensor);
    const unsigned after = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before);
    EXPECT_TRUE(alone.ok() && together.ok());
    EXPECT_TRUE(same_alone && test::same_bits_or_nan(got.tensor, want.tensor)) << to_string(level);
    EXPECT_EQ(after & ~0x3fu, (before | kFlush) & ~0x3fu);
  }
}

// Row e * n + r of a stack is row r of its weight e, in every kind of weight.
TEST(GroupedCases, StacksAreLookedUp) {
  Random random(test::seed());
  constexpr int64_t kCount = 3, kN = 21, kK = 64;
  std::vector<int64_t> rows;
  for (int64_t i = kCount * kN - 1; i >= 0; --i) rows.push_back(i);
  const auto indices = ConstTensor::contiguous(DType::i64, {kCount * kN}, rows.data());
  const Matrix out(DType::f32, kCount * kN, kK, false, Guard::after), row(DType::f32, 1, kK, false, Guard::after);
  for (const QuantFormat format : {QuantFormat::q8_0, QuantFormat::q4_1}) {
    std::vector<unsigned char> bytes[kCount];
    std::vector<QuantMatrix> matrices;
    for (std::vector<unsigned char>& matrix : bytes) {
      matrix = test::random_blocks(format, kN, kK, random);
      matrices.push_back({format, kN, kK, matrix.data(), static_cast<int64_t>(matrix.size())});
    }
    const PackedWeight stack = std::move(PackedWeight::pack_stack(one_context(), matrices).value());
    ASSERT_TRUE(lookup_rows(one_context(), stack, indices, out.tensor).ok());
    for (size_t i = 0; i < rows.size(); ++i) {
      const int64_t in_matrix = rows[i] % kN;
      ASSERT_TRUE(dequantize_rows(one_context(), matrices[static_cast<size_t>(rows[i] / kN)],
                                  ConstTensor::contiguous(DType::i64, {1}, &in_matrix), row.tensor)
                      .ok());
      ASSERT_TRUE(test::same_bits_or_nan(out.tensor.narrowed(0, static_cast<int64_t>(i), 1), row.tensor)) << rows[i];
    }
  }
}

// Outputs are held against every weight of a range.
TEST(GroupedCases, AnOutputThatOverlapsAWeightOfARange) {
  Random random(test::seed());
  const Matrix weight(DType::f32, 16, 4, false, Guard::after), x(DType::f32, 3, 4, false, Guard::after);
  test::fill(weight.tensor, Fill::normal, random);
  test::fill(x.tensor, Fill::normal, random);
  std::vector<PackedWeight> weights;
  for (int e = 0; e < 5; ++e) weights.push_back(test::packed(one_context(), weight.tensor));
  const std::vector<int64_t> ends = {0, 1, 1, 1, 3};
  const GroupList groups{ConstTensor::contiguous(DType::i64, {5}, ends.data())};
  const Matrix out(DType::f32, 3, 16, false, Guard::after);
  EXPECT_TRUE(grouped_matmul(one_context(), x.tensor, weights, groups, out.tensor).ok());
  for (const int e : {1, 4}) {
    auto* const bytes = static_cast<char*>(const_cast<void*>(weights[static_cast<size_t>(e)].data()));
    for (const int64_t offset : {int64_t{0}, int64_t{192}, weights[0].size_bytes() - 64}) {  // inside, and over the end
      const Tensor in_weight = Tensor::contiguous(DType::f32, {3, 16}, bytes + offset);
      if (offset + 3 * 16 * 4 > weights[0].size_bytes()) continue;
      EXPECT_EQ(grouped_matmul(one_context(), x.tensor, weights, groups, in_weight).message(),
                "grouped_matmul: an output overlaps weight " + std::to_string(e) + " in memory, but must not");
    }
  }
}

}  // namespace
}  // namespace opst

#include "core/elements.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace opst {
namespace {

TEST(Elements, IndexAtReadsBothTypesThroughStrides) {
  const int32_t narrow[] = {10, -1, 11, -1, 12, -1, 20, -1, 21, -1, 22, -1};
  const int64_t wide[] = {10, -1, 11, -1, 12, -1, 20, -1, 21, -1, 22, int64_t{1} << 40};
  for (const bool is_wide : {false, true}) {
    ConstTensor all = is_wide ? ConstTensor::contiguous(DType::i64, {2, 6}, wide)
                              : ConstTensor::contiguous(DType::i32, {2, 6}, narrow);
    if (is_wide) {
      EXPECT_EQ(index_at(all, 1, 5), int64_t{1} << 40);
    }
    all.shape[1] = 3, all.strides[1] = 2;
    for (int64_t i = 0; i < 2; ++i) {
      for (int64_t j = 0; j < 3; ++j) EXPECT_EQ(index_at(all, i, j), 10 * (i + 1) + j);
    }
    all.rank = 1, all.shape[0] = 3, all.strides[0] = 4;
    for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(index_at(all, i), (is_wide ? wide[i * 4] : narrow[i * 4]));
  }
}

// Rows in row-major order of the leading dimensions, whatever their strides.
TEST(Elements, RowOffsetCountsInRowMajorOrder) {
  ConstTensor t;
  t.dtype = DType::f32, t.rank = 4;
  const int64_t shape[] = {2, 3, 4, 5}, strides[] = {7, 1000, 100, 1};
  for (int i = 0; i < 4; ++i) t.shape[i] = shape[i], t.strides[i] = strides[i];
  for (int num_leading = 1; num_leading <= 3; ++num_leading) {
    int64_t row = 0;
    for (int64_t a = 0; a < 2; ++a) {
      for (int64_t b = 0; b < (num_leading > 1 ? 3 : 1); ++b) {
        for (int64_t c = 0; c < (num_leading > 2 ? 4 : 1); ++c) {
          EXPECT_EQ(row_offset(t, row++, num_leading), a * 7 + b * 1000 + c * 100);
        }
      }
    }
  }
  EXPECT_EQ(row_offset(t, 0, 0), 0);
}

// The dimensions of rows may follow others: those of a part among parts, say.
TEST(Elements, RowsBehindOtherDimensions) {
  ConstTensor t;
  t.dtype = DType::f32, t.rank = 4;
  const int64_t shape[] = {9, 2, 3, 5}, strides[] = {10000, 7, 1000, 1};
  for (int i = 0; i < 4; ++i) t.shape[i] = shape[i], t.strides[i] = strides[i];
  for (int64_t row = 0; row < 6; ++row) EXPECT_EQ(row_offset(t, row, 2, 1), row / 3 * 7 + row % 3 * 1000);
  EXPECT_EQ(row_offset(t, 0, 0, 1), 0);
  EXPECT_EQ(num_rows(t), 9 * 2 * 3);
  EXPECT_EQ(num_rows(t.selected(0, 0).selected(0, 0).selected(0, 0)), 1);
}

TEST(Elements, StoredElementsAreRoundedOnce) {
  alignas(8) char memory[16] = {};
  const auto bits = [&]<class T>(T, DType dtype, double x) {
    store_element(Tensor::contiguous(dtype, {2}, memory), 1, x);
    T result;
    std::memcpy(&result, memory + sizeof(T), sizeof(T));
    return result;
  };
  EXPECT_EQ(bits(double{}, DType::f64, 0.1), 0.1);
  EXPECT_EQ(bits(float{}, DType::f32, 0.1), 0.1f);
  EXPECT_EQ(bits(uint16_t{}, DType::bf16, 1.0 + 0x1p-8), 0x3f80);            // a tie, to even
  EXPECT_EQ(bits(uint16_t{}, DType::bf16, 1.0 + 0x1p-8 + 0x1p-40), 0x3f81);  // through f32 it would be that tie
  EXPECT_EQ(bits(uint16_t{}, DType::f16, 1.0 + 0x1p-11 + 0x1p-40), 0x3c01);
}

TEST(Elements, CopiesAndClearsEverySizeThroughEveryStride) {
  const auto check = [](auto zero) {
    using T = decltype(zero);
    constexpr int64_t kBytes = sizeof(T);
    for (const int64_t from_stride : {0, 1, 2, -1}) {
      for (const int64_t to_stride : {1, 3}) {
        T from[8], to[16];
        for (int i = 0; i < 8; ++i) from[i] = static_cast<T>(i + 1);
        std::fill_n(to, 16, T{99});
        copy_elements(from + (from_stride < 0 ? 3 : 0), from_stride, to + 1, to_stride, 4, kBytes);
        T expected[16];
        std::fill_n(expected, 16, T{99});
        for (int64_t i = 0; i < 4; ++i) {
          expected[1 + i * to_stride] = from[(from_stride < 0 ? 3 : 0) + i * from_stride];
        }
        EXPECT_TRUE(std::equal(to, to + 16, expected)) << kBytes << " bytes, " << from_stride << " to " << to_stride;
        for (int64_t i = 0; i < 4; ++i) expected[1 + i * to_stride] = 0;
        clear_elements(to + 1, to_stride, 4, kBytes);
        EXPECT_TRUE(std::equal(to, to + 16, expected)) << kBytes << " bytes, stride " << to_stride;
      }
    }
  };
  check(uint8_t{}), check(uint16_t{}), check(uint32_t{}), check(uint64_t{});
  copy_elements(nullptr, 1, nullptr, 1, 0, 4);
  clear_elements(nullptr, 1, 0, 4);
}

TEST(Elements, AMutableViewIsTheSameView) {
  const float values[6] = {};
  const ConstTensor t = ConstTensor::contiguous(DType::f32, {2, 3}, values).transposed(0, 1);
  const Tensor view = mutable_view(t);
  EXPECT_EQ(view.data, values);
  EXPECT_EQ(view.dtype, DType::f32);
  ASSERT_EQ(view.rank, 2);
  EXPECT_EQ(view.shape[0], 3);
  EXPECT_EQ(view.strides[0], 1);
  EXPECT_EQ(view.shape[1], 2);
  EXPECT_EQ(view.strides[1], 3);
}

}  // namespace
}  // namespace opst

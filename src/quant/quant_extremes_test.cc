// Every call of the room with sizes, strides, ranks and enumerators that mean nothing: a Status, at once.
#include <gtest/gtest.h>

#include <array>

#include "opst/quant.h"
#include "testing/extremes.h"

namespace opst {
namespace {

using test::Extremes;

constexpr int64_t kHuge = int64_t{1} << 40;

class QuantExtremes : public test::ExtremesTest {
 protected:
  QuantExtremes() : ExtremesTest(20000) {}
};

TEST_F(QuantExtremes, Blocks) {
  const std::array<char, 1 << 14> bytes = {};
  rounds([&](Extremes& draw) {
    QuantMatrix matrix = {.format = static_cast<QuantFormat>(random_.integer(0, kNumQuantFormats)),
                          .rows = draw.size(),
                          .cols = draw.size(),
                          .data = bytes.data(),
                          .size_bytes = random_.chance(0.9) ? static_cast<int64_t>(bytes.size()) : draw.size()};
    const int64_t block = std::max<int64_t>(1, block_values(matrix.format));
    if (matrix.cols > 0 && matrix.cols < kHuge && random_.chance(0.9)) matrix.cols *= block;
    if (random_.chance(0.5)) return dequantize(context_, matrix, draw.output(DType::f32, {matrix.rows, matrix.cols}));
    const int64_t count = draw.size();
    return dequantize_rows(context_, matrix, draw.input(DType::i64, {count}, random_.chance(0.8) ? 0 : 0xff),
                           draw.output(DType::f32, {count, matrix.cols}));
  });
}

TEST_F(QuantExtremes, Integers) {
  rounds([&](Extremes& draw) {
    const bool bytes = random_.chance(0.5);
    const DType q_type = bytes ? DType::i8 : DType::u8;
    const int64_t rows = draw.size(), groups = draw.size(), count = draw.size();
    const bool small = groups >= 0 && groups < 100 && count >= 0 && count < 100;
    const int64_t width = small ? groups * count : count;
    const int64_t cols = bytes || !small ? width : 2 * width;
    const std::vector<int64_t> q = {rows, width}, numbers = {rows, groups};
    if (random_.chance(0.4)) {
      IntMatrix matrix = {draw.input(q_type, q), draw.input(DType::f32, numbers)};
      if (random_.chance(0.5)) matrix.zeros = draw.input(DType::i8, numbers);
      return dequantize(context_, matrix, draw.output(float_type(), {rows, cols}));
    }
    QuantizeOptions options = {.scales_given = random_.chance(0.3)};
    const auto made_or_given = [&](DType type) {
      if (!options.scales_given) return draw.output(type, numbers);
      const ConstTensor given = draw.input(type, numbers);
      Tensor tensor;
      tensor.dtype = given.dtype, tensor.rank = given.rank, tensor.data = const_cast<void*>(given.data);
      std::copy_n(given.shape, kMaxRank, tensor.shape);
      std::copy_n(given.strides, kMaxRank, tensor.strides);
      return tensor;
    };
    if (random_.chance(0.4)) options.zeros = made_or_given(DType::i8);
    return quantize(context_, draw.input(float_type(), {rows, cols}), draw.output(q_type, q), made_or_given(DType::f32),
                    options);
  });
}

TEST_F(QuantExtremes, Dynamic) {
  rounds([&](Extremes& draw) {
    std::vector<int64_t> leading;
    for (int64_t i = random_.integer(0, 5); i > 0; --i) leading.push_back(draw.size());
    const bool bytes = random_.chance(0.5);
    const int64_t width = draw.size(), k = bytes || width < 0 || width >= kHuge ? width : 2 * width;
    std::vector<int64_t> x = leading, q = leading;
    x.push_back(k), q.push_back(width);
    if (x.size() > kMaxRank) x.pop_back(), q.pop_back();
    DynamicQuantOptions options;
    if (random_.chance(0.5)) options.smooth_scales = draw.input(DType::f32, {k});
    leading.resize(x.size() - 1);
    return dynamic_quant(context_, draw.input(float_type(), x), draw.output(bytes ? DType::i8 : DType::u8, q),
                         draw.output(DType::f32, leading), options);
  });
}

TEST_F(QuantExtremes, FormatsThatAreNone) {
  for (const int i : {kNumQuantFormats, 12, 77, 255}) {
    const auto none = static_cast<QuantFormat>(i);
    const std::string what = "format is " + std::to_string(i) + ", which is no QuantFormat";
    EXPECT_STREQ(to_string(none), "unknown");
    EXPECT_EQ(block_values(none), 0);
    EXPECT_EQ(block_bytes(none), 0);
    EXPECT_EQ(row_bytes(none, 32).status().message(), "row_bytes: " + what);
    float x[4] = {};
    EXPECT_EQ(dequantize(context_, {none, 1, 4, x, 16}, Tensor::contiguous(DType::f32, {1, 4}, x)).message(),
              "dequantize: matrix's " + what);
  }
  EXPECT_FALSE(parse_quant_format("unknown"));
  EXPECT_FALSE(parse_quant_format(std::string("q4_1\0", 5)));
  EXPECT_EQ(parse_quant_format("Q4_1"), QuantFormat::q4_1);
  EXPECT_EQ(row_bytes(QuantFormat::f32, int64_t{1} << 54).status().message(),
            "row_bytes: cols is 18014398509481984, and such a row has more bytes than the limit of 2^56");
}

// 2^40 rows that repeat one row without columns.
TEST_F(QuantExtremes, NothingToDo) {
  int64_t row = 0;
  ConstTensor rows = ConstTensor::contiguous(DType::i64, {kHuge}, &row);
  rows.strides[0] = 0;
  const Tensor none = Tensor::contiguous(DType::f32, {kHuge, 0}, nullptr);
  EXPECT_TRUE(dequantize_rows(context_, {QuantFormat::q8_0, 4, 0, nullptr, 0}, rows, none).ok());
  row = 4;
  EXPECT_EQ(dequantize_rows(context_, {QuantFormat::q8_0, 4, 0, nullptr, 0}, rows, none).message(),
            "dequantize_rows: rows[0] is 4, but the matrix has 4 rows");
  float scale = 1;
  Tensor scales = Tensor::contiguous(DType::f32, {kHuge, 3}, &scale);
  scales.strides[0] = scales.strides[1] = 0;
  const Tensor no_q = Tensor::contiguous(DType::i8, {kHuge, 0}, nullptr);
  EXPECT_TRUE(quantize(context_, none, no_q, scales, {.scales_given = true}).ok());
  EXPECT_TRUE(dequantize(context_, IntMatrix{no_q, scales}, none).ok());
}

// [0, k] and one row as NumPy and slicing leave their strides; int4 wants the bytes of a row next to each other.
TEST_F(QuantExtremes, StridesThatMeanNothing) {
  float x[4] = {1, 2, -7, 3}, scale = 0, back[4] = {};
  uint8_t bytes[2] = {};
  const auto with_stride = [](Tensor tensor, int64_t stride) {
    for (int i = 0; i < tensor.rank; ++i) {
      if (tensor.shape[i] <= 1 || tensor.shape[0] == 0) tensor.strides[i] = stride;
    }
    return tensor;
  };
  for (const int64_t stride : {int64_t{0}, int64_t{-4}, INT64_MAX}) {
    const Tensor from = with_stride(Tensor::contiguous(DType::f32, {1, 4}, x), stride);
    const Tensor q = with_stride(Tensor::contiguous(DType::u8, {1, 2}, bytes), stride);
    const Tensor scales = with_stride(Tensor::contiguous(DType::f32, {1, 1}, &scale), stride);
    const Tensor out = with_stride(Tensor::contiguous(DType::f32, {1, 4}, back), stride);
    ASSERT_TRUE(quantize(context_, from, q, scales).ok());
    ASSERT_TRUE(dequantize(context_, IntMatrix{q, scales}, out).ok());
    EXPECT_TRUE(std::equal(x, x + 4, back));
    const Tensor no_x = with_stride(Tensor::contiguous(DType::f32, {0, 4}, nullptr), stride);
    const Tensor no_q = with_stride(Tensor::contiguous(DType::u8, {0, 2}, nullptr), stride);
    const Tensor no_scales = with_stride(Tensor::contiguous(DType::f32, {0, 1}, nullptr), stride);
    EXPECT_TRUE(quantize(context_, no_x, no_q, no_scales).ok());
    EXPECT_TRUE(dequantize(context_, IntMatrix{no_q, no_scales}, no_x).ok());
  }
}

}  // namespace
}  // namespace opst

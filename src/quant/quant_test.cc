#include "opst/quant.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "core/convert.h"
#include "quant/random_blocks.h"
#include "quant/reference.h"
#include "testing/contexts.h"
#include "testing/guarded_buffer.h"
#include "testing/lazy_mapping.h"

namespace opst {
namespace {

using test::contexts;
using test::contexts_with_threads;
using test::Guard;
using test::GuardedBuffer;
using test::kQuantFormats;
using test::Random;
using test::TestContext;

Context& one_context() {
  static Context context = std::move(Context::create({.num_threads = 2}).value());
  return context;
}

::testing::AssertionResult same_value(float got, float expected) {
  if (std::isnan(got) && std::isnan(expected)) return ::testing::AssertionSuccess();
  if (std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(expected)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << got << " instead of " << expected;
}

std::vector<unsigned char> from_hex(const std::string& text) {
  std::vector<unsigned char> bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    bytes.push_back(static_cast<unsigned char>(std::stoi(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

// The values of an independent decoder, for scales of every kind: subnormal, largest, infinite, NaN.
TEST(Dequantize, EqualsTheGgufPackage) {
  std::ifstream file(std::string(OPST_SOURCE_DIR) + "/src/testing/data/quant/dequantized.txt");
  ASSERT_TRUE(file.good());
  int lines = 0;
  std::string name, blocks, values;
  while (file >> name >> blocks >> values) {
    ++lines;
    SCOPED_TRACE(name + " " + blocks);
    const QuantFormat format = parse_quant_format(name).value();
    const std::vector<unsigned char> bytes = from_hex(blocks);
    const auto cols = static_cast<int64_t>(values.size() / 8);
    const QuantMatrix matrix{format, 1, cols, bytes.data(), static_cast<int64_t>(bytes.size())};
    for (const TestContext& t : contexts_with_threads(1)) {
      SCOPED_TRACE(t.name);
      GuardedBuffer out(cols * 4);
      ASSERT_TRUE(dequantize(t.context, matrix, out.tensor(DType::f32, {1, cols})).ok());
      for (int64_t i = 0; i < cols; ++i) {
        const auto bits = static_cast<uint32_t>(std::stoul(values.substr(static_cast<size_t>(8 * i), 8), nullptr, 16));
        ASSERT_TRUE(same_value(static_cast<float*>(out.data())[i], std::bit_cast<float>(bits))) << "value " << i;
      }
    }
  }
  EXPECT_EQ(lines, 9 * 14);
}

struct Case {
  int64_t rows, cols;
  Guard guard;
  bool strided_out;
};

void check_case(Context& context, QuantFormat format, const Case& c, Random& random) {
  const std::vector<unsigned char> bytes = test::random_blocks(format, c.rows, c.cols, random);
  const auto size = static_cast<int64_t>(bytes.size());
  GuardedBuffer blocks(size, c.guard);
  if (size > 0) std::memcpy(blocks.data(), bytes.data(), bytes.size());
  blocks.make_read_only();
  const QuantMatrix matrix{format, c.rows, c.cols, blocks.data(), size};
  GuardedBuffer memory(c.rows * c.cols * 4, c.guard);
  const Tensor out = c.strided_out ? memory.tensor(DType::f32, {c.cols, c.rows}).transposed(0, 1)
                                   : memory.tensor(DType::f32, {c.rows, c.cols});
  const Status status = dequantize(context, matrix, out);
  ASSERT_TRUE(status.ok()) << status.message();
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t col = 0; col < c.cols; ++col) {
      const float got = static_cast<const float*>(out.data)[row * out.strides[0] + col * out.strides[1]];
      ASSERT_TRUE(same_value(got, static_cast<float>(reference::dequantized(matrix, row, col))))
          << "row " << row << ", col " << col;
    }
  }
  EXPECT_TRUE(memory.slack_intact());
}

TEST(Dequantize, EqualsTheReferenceInEveryContext) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (QuantFormat format : kQuantFormats) {
      for (int64_t rows : {0, 1, 2, 7}) {
        for (int64_t cols : {0, 1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 61, 64, 96, 97, 256, 768}) {
          if (cols % block_values(format) != 0 || (cols > 100 && block_values(format) < 256)) continue;
          for (bool strided : {false, true}) {
            SCOPED_TRACE(t.name + ", " + to_string(format) + " [" + std::to_string(rows) + ", " + std::to_string(cols) +
                         "]" + (strided ? " strided" : ""));
            const Guard guard = random.chance(0.5) ? Guard::after : Guard::before;
            check_case(t.context, format, {rows, cols, guard, strided}, random);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Dequantize, RunsOverManyTasks) {
  Random random(test::seed());
  for (const TestContext& t : contexts_with_threads(3)) {
    SCOPED_TRACE(t.name);
    check_case(t.context, QuantFormat::q4_1, {300, 1024, Guard::after, false}, random);
  }
}

TEST(DequantizeRows, LooksUpRepeatedAndStridedIndices) {
  Random random(test::seed());
  for (const TestContext& t : contexts_with_threads(2)) {
    for (QuantFormat format : kQuantFormats) {
      SCOPED_TRACE(t.name + ", " + to_string(format));
      const int64_t cols = block_values(format) == 256 ? 512 : 64;
      const std::vector<unsigned char> bytes = test::random_blocks(format, 11, cols, random);
      const QuantMatrix matrix{format, 11, cols, bytes.data(), static_cast<int64_t>(bytes.size())};
      int64_t indices[10];
      for (int64_t& index : indices) index = random.integer(0, 10);
      indices[2] = 10, indices[4] = 0;
      const ConstTensor rows = ConstTensor::contiguous(DType::i64, {5, 2}, indices).selected(1, 0);
      GuardedBuffer out(5 * cols * 4);
      ASSERT_TRUE(dequantize_rows(t.context, matrix, rows, out.tensor(DType::f32, {5, cols})).ok());
      for (int64_t i = 0; i < 5; ++i) {
        for (int64_t col = 0; col < cols; ++col) {
          ASSERT_TRUE(same_value(static_cast<float*>(out.data())[i * cols + col],
                                 static_cast<float>(reference::dequantized(matrix, indices[2 * i], col))));
        }
      }
    }
  }
}

TEST(DequantizeRows, RefusesIndicesOutsideBeforeWriting) {
  const std::vector<unsigned char> bytes(20 * 4);
  const QuantMatrix matrix{QuantFormat::q4_1, 4, 32, bytes.data(), 80};
  std::vector<float> out(64, 5.0f);
  const Tensor to = Tensor::contiguous(DType::f32, {2, 32}, out.data());
  for (int64_t bad : {int64_t{-1}, int64_t{4}, INT64_MAX, INT64_MIN}) {
    const int64_t indices[2] = {1, bad};
    const Status status = dequantize_rows(one_context(), matrix, ConstTensor::contiguous(DType::i64, {2}, indices), to);
    EXPECT_EQ(status.message(), "dequantize_rows: rows[1] is " + std::to_string(bad) + ", but the matrix has 4 rows");
  }
  for (float x : out) EXPECT_EQ(x, 5.0f);
}

// More than 2^31 values.
TEST(DequantizeRows, ReachesRowsBeyond32BitOffsets) {
  const int64_t rows = (int64_t{1} << 31) / 32 + 7;
  test::LazyMapping mapping(rows * 34);
  if (mapping.data() == nullptr) GTEST_SKIP() << "no address space for " << mapping.size_bytes() << " bytes";
  const QuantMatrix matrix{QuantFormat::q8_0, rows, 32, mapping.data(), mapping.size_bytes()};
  unsigned char* const last = static_cast<unsigned char*>(mapping.data()) + (rows - 1) * 34;
  last[1] = 0x3c;  // d = 1
  for (int i = 0; i < 32; ++i) last[2 + i] = static_cast<unsigned char>(i + 1);
  const int64_t index[2] = {0, rows - 1};
  float out[64];
  ASSERT_TRUE(dequantize_rows(one_context(), matrix, ConstTensor::contiguous(DType::i64, {2}, index),
                              Tensor::contiguous(DType::f32, {2, 32}, out))
                  .ok());
  for (int i = 0; i < 32; ++i) {
    EXPECT_EQ(out[i], 0.0f);
    EXPECT_EQ(out[32 + i], static_cast<float>(i + 1));
  }
}

TEST(QuantFormat, HasNamesAndSizes) {
  EXPECT_EQ(parse_quant_format("Q4_1"), QuantFormat::q4_1);
  EXPECT_EQ(parse_quant_format("q8_0"), QuantFormat::q8_0);
  EXPECT_EQ(parse_quant_format("Q6_K"), QuantFormat::q6_k);
  EXPECT_FALSE(parse_quant_format("q2_k").has_value());
  EXPECT_FALSE(parse_quant_format("").has_value());
  for (QuantFormat format : kQuantFormats) EXPECT_EQ(parse_quant_format(to_string(format)), format);
  EXPECT_EQ(row_bytes(QuantFormat::q4_1, 576).value(), 360);
  EXPECT_EQ(row_bytes(QuantFormat::q8_0, 576).value(), 612);
  EXPECT_EQ(row_bytes(QuantFormat::f16, 3).value(), 6);
  EXPECT_EQ(row_bytes(QuantFormat::q4_0, 64).value(), 36);
  EXPECT_EQ(row_bytes(QuantFormat::q5_0, 64).value(), 44);
  EXPECT_EQ(row_bytes(QuantFormat::q5_1, 64).value(), 48);
  EXPECT_EQ(row_bytes(QuantFormat::q4_k, 512).value(), 288);
  EXPECT_EQ(row_bytes(QuantFormat::q5_k, 512).value(), 352);
  EXPECT_EQ(row_bytes(QuantFormat::q6_k, 512).value(), 420);
  EXPECT_EQ(row_bytes(QuantFormat::q6_k, 576).status().message(),
            "row_bytes: cols is 576, but q6_k has blocks of 256 values");
  EXPECT_EQ(row_bytes(QuantFormat::q8_0, 48).status().message(),
            "row_bytes: cols is 48, but q8_0 has blocks of 32 values");
  EXPECT_EQ(row_bytes(QuantFormat::q8_0, -32).status().code(), StatusCode::invalid_argument);
  EXPECT_EQ(row_bytes(QuantFormat::f32, INT64_MAX).status().code(), StatusCode::invalid_argument);
}

// The table of docs/quant.md: | `q4_0` | 32 | 18 | 4.5 | ..., a row for each format.
TEST(QuantFormat, TheDocumentedTableHasTheSizesOfAll) {
  std::ifstream page(std::string(OPST_SOURCE_DIR) + "/docs/quant.md");
  ASSERT_TRUE(page.good());
  size_t rows = 0;
  for (std::string line; std::getline(page, line);) {
    std::istringstream cells(line);
    std::string bar, name;
    int64_t values = 0, bytes = 0;
    double bits = 0;
    if (!(cells >> bar >> name >> bar >> values >> bar >> bytes >> bar >> bits) || name.front() != '`') continue;
    SCOPED_TRACE(line);
    const std::optional<QuantFormat> format = parse_quant_format(name.substr(1, name.size() - 2));
    ASSERT_TRUE(format.has_value());
    ++rows;
    EXPECT_EQ(values, block_values(*format));
    EXPECT_EQ(bytes, block_bytes(*format));
    EXPECT_EQ(bits, 8.0 * static_cast<double>(bytes) / static_cast<double>(values));
  }
  EXPECT_EQ(rows, kQuantFormats.size());
}

TEST(Dequantize, NamesWhatIsWrong) {
  std::vector<unsigned char> bytes(200);
  std::vector<float> values(128);
  const auto message = [&](const QuantMatrix& matrix, const Tensor& out) {
    return dequantize(one_context(), matrix, out).message();
  };
  const Tensor out = Tensor::contiguous(DType::f32, {2, 64}, values.data());
  const QuantMatrix good{QuantFormat::q4_1, 2, 64, bytes.data(), 80};
  EXPECT_EQ(message(good, out), "");
  QuantMatrix matrix = good;
  matrix.cols = 48;
  EXPECT_EQ(message(matrix, out), "dequantize: matrix cols is 48, but q4_1 has blocks of 32 values");
  matrix = good;
  matrix.size_bytes = 79;
  EXPECT_EQ(message(matrix, out), "dequantize: matrix has 79 bytes, but q4_1 [2, 64] needs 80");
  matrix = good;
  matrix.data = nullptr;
  EXPECT_EQ(message(matrix, out), "dequantize: matrix has null data, but shape [2, 64]");
  matrix = good;
  matrix.rows = -1;
  EXPECT_EQ(message(matrix, out), "dequantize: matrix rows is -1, but must be >= 0");
  matrix = good;
  matrix.rows = INT64_MAX / 8;
  EXPECT_EQ(message(matrix, out),
            "dequantize: matrix [1152921504606846975, 64] has more rows or bytes than the limit of 2^56");
  EXPECT_EQ(message(good, Tensor::contiguous(DType::f32, {2, 32}, values.data())),
            "dequantize: out dim 1 (cols) is 32, but the matrix has cols = 64");
  EXPECT_EQ(message(good, Tensor::contiguous(DType::f32, {1, 64}, values.data())),
            "dequantize: out dim 0 (rows) is 1, but the matrix has rows = 2");
  EXPECT_EQ(message(good, Tensor::contiguous(DType::bf16, {2, 64}, values.data())),
            "dequantize: out is bf16, but must be f32");
  EXPECT_NE(message({QuantFormat::q4_1, 2, 64, values.data(), 80}, out).find("overlaps matrix"), std::string::npos);
}

}  // namespace
}  // namespace opst

// A format of docs/extending.md: from its struct alone follow dequantisation, packing, and the products with f32 and
// int8 activations, at every level.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <span>
#include <string>

#include "core/convert.h"
#include "core/int_math.h"
#include "extending/block_w5.h"
#include "extending/weight_format_kernels.h"
#include "machine/levels.h"
#include "matmul/activations_int8_reference.h"
#include "matmul/pack_blocks.h"
#include "matmul/reference.h"
#include "testing/contexts.h"
#include "testing/numbers.h"
#include "testing/random.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_INT8_LEVELS, extending, FormatKernels, kFormatKernels, format_kernels)

namespace {

using extending::BlockW5;
using namespace test;
using Piece = gemm::Piece<BlockW5>;

constexpr int64_t kRows = 3, kColumns = 37, kDepth = 96, kBlocks = kDepth / BlockW5::kValues;
constexpr int64_t kStride = 64;  // of sums: room for columns rounded up to what a kernel takes at once

// A weight [kColumns, kDepth] of random bits, and its values by the equation of block_w5.h.
struct Weight {
  Numbers<BlockW5> blocks = Numbers<BlockW5>(kColumns * kBlocks);
  Numbers<double> values;
  Numbers<Piece> panels = Numbers<Piece>(round_up(kColumns, gemm::kPanelColumns) / gemm::kPanelColumns * kBlocks);

  explicit Weight(Random& random) {
    Numbers<unsigned char> bits(blocks.size() * sizeof(BlockW5));
    for (unsigned char& byte : bits) byte = static_cast<unsigned char>(random.integer(0, 255));
    std::memcpy(blocks.data(), bits.data(), bits.size());
    for (BlockW5& block : blocks) block.d = to_f16(random.normal() / 1024);
    for (int64_t row = 0; row < kColumns; ++row) {
      for (int64_t t = 0; t < kDepth; ++t) values.push_back(value(blocks[row * kBlocks + t / 32], t % 32));
      for (int64_t p = 0; p < kBlocks; ++p) {
        gemm::put(panels[row / 16 * kBlocks + p], static_cast<int>(row % 16), blocks[row * kBlocks + p]);
      }
    }
  }
  static double value(const BlockW5& block, int64_t t) {
    const int low = t < 16 ? block.q[t] % 16 : block.q[t - 16] / 16, high = block.high[t / 8] >> t % 8 & 1;
    return static_cast<double>(to_f32(block.d)) * block.scales[t / 16] * (low + 16 * high - 16);
  }
};

// Within the rounding of kDepth additions to the magnitudes of the terms.
void expect_near(const Numbers<float>& sums, const Numbers<double>& x, const Weight& weight) {
  Numbers<double> x_sizes = x, sizes = weight.values;
  for (double& size : x_sizes) size = std::abs(size);
  for (double& size : sizes) size = std::abs(size);
  const Numbers<double> want = reference::matmul(x, weight.values, {}, kRows, kColumns, kDepth);
  const Numbers<double> scale = reference::matmul(x_sizes, sizes, {}, kRows, kColumns, kDepth);
  for (int64_t i = 0; i < std::ssize(want); ++i) {
    ASSERT_LE(std::abs(static_cast<double>(sums[i / kColumns * kStride + i % kColumns]) - want[i]),
              kDepth * 0x1p-24 * scale[i])
        << "output " << i;
  }
}

class WeightFormat : public ::testing::Test {
 protected:
  WeightFormat() : random_(seed()), weight_(random_) {
    for (float& value : x_) value = static_cast<float>(random_.normal());
  }
  template <class Body>
  void at_every_level(const Body& body) {
    for (const TestContext& t : contexts_with_threads(1)) {
      SCOPED_TRACE(t.name);
      body(extending::format_kernels(t.context.machine().isa));
    }
  }
  gemm::ProductPart part(const void* x, int64_t x_stride) {
    return {.x = x,
            .x_stride = x_stride,
            .x_block_stride = 0,
            .rows = kRows,
            .columns = kColumns,
            .k = kDepth,
            .k_block = kDepth,
            .panels = weight_.panels.data(),
            .scratch = nullptr,
            .sums = sums_.data(),
            .sums_stride = kStride};
  }

  Random random_;
  Weight weight_;
  Numbers<float> x_ = Numbers<float>(kRows * kDepth), sums_ = Numbers<float>(kRows * kStride);
};

TEST_F(WeightFormat, IsDequantisedExactly) {
  at_every_level([&](const extending::FormatKernels& kernels) {
    for (int64_t row = 0; row < kColumns; ++row) {
      Numbers<float> values(kDepth);
      kernels.dequantize_row(&weight_.blocks[row * kBlocks], kDepth, values.data(), 1);
      for (int64_t t = 0; t < kDepth; ++t) {
        ASSERT_EQ(values[t], static_cast<float>(weight_.values[row * kDepth + t])) << row << ", " << t;
      }
    }
  });
}

TEST_F(WeightFormat, IsReadBackFromPackedForm) {
  for (int64_t row = 0; row < kColumns; ++row) {
    for (int64_t t = 0; t < kDepth; ++t) {
      const Piece& piece = weight_.panels[row / 16 * kBlocks + t / 32];
      ASSERT_EQ(gemm::get(piece, static_cast<int>(row % 16), static_cast<int>(t % 32)),
                static_cast<float>(weight_.values[row * kDepth + t]));
    }
  }
}

TEST_F(WeightFormat, IsMultipliedFromPackedForm) {
  const Numbers<double> x(x_.begin(), x_.end());
  at_every_level([&](const extending::FormatKernels& kernels) {
    kernels.few_rows(part(x_.data(), kDepth));
    expect_near(sums_, x, weight_);
  });
}

TEST_F(WeightFormat, IsMultipliedWithInt8Activations) {
  Numbers<double> rounded;
  for (int64_t row = 0; row < kRows; ++row) {
    const Numbers<double> one(x_.begin() + row * kDepth, x_.begin() + (row + 1) * kDepth);
    const Numbers<double> blocks = reference::rounded_to_int8_blocks(one);
    rounded.insert(rounded.end(), blocks.begin(), blocks.end());
  }
  at_every_level([&](const extending::FormatKernels& kernels) {
    Numbers<gemm::ActivationBlock> a(kRows * kBlocks);
    for (int64_t row = 0; row < kRows; ++row) {
      kernels.quantise_row(&x_[row * kDepth], 1, kDepth, &a[row * kBlocks]);
    }
    // Bytes, scales of 16 values, minimums of 32.
    const int64_t words = (kDepth / 4 + kDepth / 16 + kDepth / 32) * kernels.int8_columns;
    const Buffer scratch = std::move(Buffer::allocate(words * 4).value());
    gemm::ProductPart product = part(a.data(), kBlocks);
    product.scratch = const_cast<void*>(scratch.data());
    kernels.int8_rows(product);
    expect_near(sums_, rounded, weight_);
  });
}

}  // namespace
}  // namespace opst

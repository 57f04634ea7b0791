// Builders of block masks, against their definitions pair by pair.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/int_math.h"
#include "opst/block_patterns.h"
#include "testing/random.h"

namespace opst::test {
namespace {

int64_t at(const ConstTensor& t, int64_t i) { return static_cast<const int64_t*>(t.data)[i]; }

// Key blocks of query block i of head h.
std::vector<int64_t> row_of(const BlockMask& mask, int64_t h, int64_t i) {
  const int64_t first = h * mask.row_offsets.shape[2] + i;
  std::vector<int64_t> row;
  for (int64_t n = at(mask.row_offsets, first); n < at(mask.row_offsets, first + 1); ++n) {
    row.push_back(at(mask.columns, n));
  }
  return row;
}

// Whether the pattern, random blocks left out, shows query i key j.
bool shows(const BlockPattern& p, const std::vector<int32_t>& documents, int64_t i, int64_t j) {
  const int64_t position = p.alignment == CausalAlignment::bottom_right ? i + p.kv_len - p.query_len : i;
  const int64_t distance = position - j;
  if (p.causal && distance < 0) return false;
  if (!documents.empty()) {
    bool together = false;
    for (size_t n = 0; n + 1 < documents.size(); ++n) {
      const auto inside = [&](int64_t x) { return x >= documents[n] && x < documents[n + 1]; };
      together = together || (inside(position) && inside(j));
    }
    if (!together) return false;
  }
  const bool window = p.window_left || p.window_right;
  if (!window && p.global == 0 && p.stride == 0) return true;
  if (window && distance <= p.window_left.value_or(0) && -distance <= p.window_right.value_or(0) &&
      distance % p.dilation == 0) {
    return true;
  }
  if (p.global > 0 && (j < p.global || position < p.global)) return true;
  return p.stride > 0 && distance % p.stride == 0;
}

BlockPattern draw_pattern(Random& random, std::vector<int32_t>& documents) {
  BlockPattern p;
  p.query_len = random.integer(0, 50), p.kv_len = random.integer(0, 60);
  p.block_q = random.integer(1, 12), p.block_kv = random.integer(1, 12);
  p.alignment = random.pick({CausalAlignment::bottom_right, CausalAlignment::top_left});
  p.causal = random.chance(0.4);
  if (random.chance(0.5)) p.window_left = random.integer(0, 20);
  if (random.chance(0.3)) p.window_right = random.integer(0, 20);
  if (random.chance(0.3)) p.dilation = random.integer(1, 20);
  if (random.chance(0.3)) p.global = random.integer(0, 10);
  if (random.chance(0.3)) p.stride = random.integer(1, 20);
  if (random.chance(0.3)) {
    for (int64_t n = random.integer(1, 5); n > 0; --n) {
      documents.push_back(static_cast<int32_t>(random.integer(0, p.kv_len)));
    }
    std::sort(documents.begin(), documents.end());
    p.documents = ConstTensor::contiguous(DType::i32, {static_cast<int64_t>(documents.size())}, documents.data());
  }
  return p;
}

TEST(BlockPatterns, AreTheBlocksOfThePairsThatTheyShow) {
  Random random(seed());
  for (int n = 0; n < 3000; ++n) {
    std::vector<int32_t> documents;
    const BlockPattern p = draw_pattern(random, documents);
    SCOPED_TRACE("draw " + std::to_string(n) + " of seed " + std::to_string(seed()));
    const Result<BlockMaskBuffer> made = make_block_mask(p);
    ASSERT_TRUE(made.ok()) << made.status().message();
    const BlockMask& mask = made.value().mask;
    ASSERT_EQ(mask.row_offsets.shape[2], ceil_div(p.query_len, p.block_q) + 1);
    for (int64_t i = 0; i * p.block_q < p.query_len; ++i) {
      std::vector<int64_t> expected;
      for (int64_t j = 0; j * p.block_kv < p.kv_len; ++j) {
        bool some = false;
        for (int64_t q = i * p.block_q; q < std::min((i + 1) * p.block_q, p.query_len); ++q) {
          for (int64_t k = j * p.block_kv; k < std::min((j + 1) * p.block_kv, p.kv_len); ++k) {
            some = some || shows(p, documents, q, k);
          }
        }
        if (some) expected.push_back(j);
      }
      ASSERT_EQ(row_of(mask, 0, i), expected) << "query block " << i;
    }
  }
}

// Different blocks, as many as asked for where there are so many, others for other heads, queries and seeds; the same
// for the same seed. With causal none right of the diagonal.
TEST(BlockPatterns, RandomBlocks) {
  BlockPattern p;
  p.query_len = p.kv_len = 4096;
  p.heads = 3, p.random = 5, p.seed = 7;
  const Result<BlockMaskBuffer> first = make_block_mask(p), again = make_block_mask(p);
  p.seed = 8;
  const Result<BlockMaskBuffer> other = make_block_mask(p);
  p.causal = true;
  const Result<BlockMaskBuffer> causal = make_block_mask(p);
  ASSERT_TRUE(first.ok() && again.ok() && other.ok() && causal.ok());
  int same_heads = 0, same_seeds = 0;
  std::vector<int> counts(64);
  for (int64_t i = 0; i < 64; ++i) {
    for (int64_t h = 0; h < 3; ++h) {
      const std::vector<int64_t> row = row_of(first.value().mask, h, i);
      ASSERT_EQ(row.size(), 5u);
      for (const int64_t block : row) ++counts[static_cast<size_t>(block)];
      ASSERT_EQ(row, row_of(again.value().mask, h, i));
      same_seeds += row == row_of(other.value().mask, h, i) ? 1 : 0;
      same_heads += row == row_of(first.value().mask, (h + 1) % 3, i) ? 1 : 0;
      const std::vector<int64_t> below = row_of(causal.value().mask, h, i);
      ASSERT_EQ(static_cast<int64_t>(below.size()), std::min<int64_t>(5, i + 1));
      ASSERT_LE(below.back(), i);
    }
  }
  EXPECT_LT(same_heads, 3);
  EXPECT_LT(same_seeds, 3);
  // 960 draws of 64 blocks: 15 each, give or take five standard deviations.
  for (const int count : counts) EXPECT_NEAR(count, 15, 20);
}

TEST(BlockPatterns, OfADenseMask) {
  Random random(seed() + 1);
  for (int n = 0; n < 300; ++n) {
    const int64_t queries = random.integer(1, 30), keys = random.integer(1, 30), heads = random.integer(1, 3);
    const int64_t block_q = random.integer(1, 8), block_kv = random.integer(1, 8);
    std::vector<uint8_t> bytes(static_cast<size_t>(queries * keys * heads));
    for (uint8_t& byte : bytes) byte = random.chance(0.05) ? random.pick<uint8_t>({1, 255}) : 0;
    // Stored [heads, keys, queries].
    const ConstTensor dense =
        ConstTensor::contiguous(DType::boolean, {heads, keys, queries}, bytes.data()).transposed(1, 2);
    const Result<BlockMaskBuffer> made = block_mask_of(dense, block_q, block_kv);
    ASSERT_TRUE(made.ok()) << made.status().message();
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i * block_q < queries; ++i) {
        std::vector<int64_t> expected;
        for (int64_t j = 0; j * block_kv < keys; ++j) {
          bool some = false;
          for (int64_t q = i * block_q; q < std::min((i + 1) * block_q, queries); ++q) {
            for (int64_t k = j * block_kv; k < std::min((j + 1) * block_kv, keys); ++k) {
              some = some || bytes[static_cast<size_t>((h * keys + k) * queries + q)] != 0;
            }
          }
          if (some) expected.push_back(j);
        }
        ASSERT_EQ(row_of(made.value().mask, h, i), expected);
      }
    }
  }
}

// One element in memory stands for 2^54, which nobody could look at one by one.
TEST(BlockPatterns, OfADenseMaskThatRepeats) {
  constexpr int64_t kLength = int64_t{1} << 27, kBlock = kLength / 4;
  for (const bool visible : {false, true}) {
    const uint8_t byte = visible ? 1 : 0;
    ConstTensor dense = ConstTensor::contiguous(DType::boolean, {kLength, kLength}, &byte);
    dense.strides[0] = dense.strides[1] = 0;
    const Result<BlockMaskBuffer> made = block_mask_of(dense, kBlock, kBlock);
    ASSERT_TRUE(made.ok()) << made.status().message();
    const std::vector<int64_t> expected = visible ? std::vector<int64_t>{0, 1, 2, 3} : std::vector<int64_t>{};
    for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(row_of(made.value().mask, 0, i), expected);
  }
}

TEST(BlockPatterns, Refusals) {
  const auto message = [](auto change) {
    BlockPattern p;
    p.query_len = p.kv_len = 10;
    change(p);
    return make_block_mask(p).status().message();
  };
  const int32_t decreasing[] = {0, 5, 4}, beyond[] = {0, 11};
  EXPECT_EQ(message([](BlockPattern&) {}), "");
  EXPECT_EQ(message([](BlockPattern& p) { p.query_len = -1; }), "make_block_mask: query_len is -1, must be 0 to 2^56");
  EXPECT_EQ(message([](BlockPattern& p) { p.kv_len = -1; }), "make_block_mask: kv_len is -1, must be 0 to 2^56");
  EXPECT_EQ(message([](BlockPattern& p) { p.block_q = 0; }), "make_block_mask: block_q is 0, must be 1 to 2^56");
  EXPECT_EQ(message([](BlockPattern& p) { p.block_kv = 0; }), "make_block_mask: block_kv is 0, must be 1 to 2^56");
  EXPECT_EQ(message([](BlockPattern& p) { p.heads = 0; }), "make_block_mask: heads is 0, must be 1 to 2^56");
  EXPECT_EQ(message([](BlockPattern& p) { p.window_left = -1; }),
            "make_block_mask: window_left is -1, must be 0 to 2^56");
  EXPECT_EQ(message([](BlockPattern& p) { p.window_right = -1; }),
            "make_block_mask: window_right is -1, must be 0 to 2^56");
  EXPECT_EQ(message([](BlockPattern& p) { p.dilation = 0; }), "make_block_mask: dilation is 0, must be 1 to 2^56");
  EXPECT_EQ(message([](BlockPattern& p) { p.global = -2; }), "make_block_mask: global is -2, must be 0 to 2^56");
  EXPECT_EQ(message([](BlockPattern& p) { p.stride = -2; }), "make_block_mask: stride is -2, must be 0 to 2^56");
  EXPECT_EQ(message([](BlockPattern& p) { p.random = -2; }), "make_block_mask: random is -2, must be 0 to 2^56");
  EXPECT_EQ(message([&](BlockPattern& p) { p.documents = ConstTensor::contiguous(DType::i32, {3}, decreasing); }),
            "make_block_mask: documents[2] is 4, must be 5 to kv_len = 10");
  EXPECT_EQ(message([&](BlockPattern& p) { p.documents = ConstTensor::contiguous(DType::i32, {2}, beyond); }),
            "make_block_mask: documents[1] is 11, must be 0 to kv_len = 10");
  EXPECT_EQ(message([&](BlockPattern& p) {
              p.documents = ConstTensor::contiguous(DType::i32, {1, 2}, beyond);
            }),
            "make_block_mask: documents has rank 2, must be 1");
  const uint8_t bytes[8] = {};
  const ConstTensor flat = ConstTensor::contiguous(DType::boolean, {8}, bytes);
  EXPECT_EQ(block_mask_of(flat, 1, 1).status().message(), "block_mask_of: mask has rank 1, must be 2 to 4");
  const ConstTensor square = ConstTensor::contiguous(DType::boolean, {2, 4}, bytes);
  EXPECT_EQ(block_mask_of(square, 0, 1).status().message(), "block_mask_of: block_q is 0, must be 1 to 2^56");
  EXPECT_EQ(block_mask_of(square, 1, 0).status().message(), "block_mask_of: block_kv is 0, must be 1 to 2^56");
}

}  // namespace
}  // namespace opst::test

// Operators of sequences that are spread over ranks, against one rank that has all of it.
#include "opst/sequence_parallel.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/text.h"
#include "mc2/test_ranks.h"
#include "mc2/test_tensors.h"
#include "testing/elements.h"

namespace opst {
namespace {

using test::expect_bits;
using test::first_of;
using test::Owned;
using test::owned;
using test::Random;
using test::random_tensor;

constexpr int64_t kTile = 8;

class HeadShards : public testing::TestWithParam<int> {};

// There, every rank has the right heads of all rows; and back, its own rows again.
TEST_P(HeadShards, ThereAndBackBitForBit) {
  const int ranks = GetParam();
  const auto n = static_cast<size_t>(ranks);
  Random random(test::seed() + n);
  for (const bool direct : {false, true}) {
    auto world =
        std::move(Communicator::create_threads(ranks, {.staging_bytes = 1 << 20, .direct_stores = direct}).value());
    for (const int64_t size : {int64_t{0}, int64_t{1}, kTile - 1, kTile, kTile + 1, int64_t{257}}) {
      const DType dtype = random.pick({DType::f32, DType::bf16, DType::i8, DType::i64});
      const int64_t dim = random.pick<int64_t>({1, 8, 24}), tile = random.pick<int64_t>({0, kTile});
      std::vector<int64_t> rows(n), heads(n);
      for (auto& r : rows) r = random.chance(0.4) ? random.integer(0, size) : size;
      const bool uneven = random.chance(0.5);
      const int64_t divided = random.integer(1, 2 * ranks);  // fewer heads than ranks, too
      for (int r = 0; r < ranks; ++r) {
        heads[static_cast<size_t>(r)] = uneven ? random.integer(0, 3) : share_of(divided, ranks, r);
      }
      const int64_t all_rows = first_of(rows, ranks), all_heads = first_of(heads, ranks);
      SCOPED_TRACE(text(ranks, " ranks, size ", size, ", ", to_string(dtype), direct ? ", direct" : ", slots"));
      const Owned whole = random_tensor(dtype, {all_rows, all_heads, dim}, random);
      std::vector<Owned> by_heads, by_rows;
      for (const int64_t h : heads) by_heads.push_back(owned(dtype, {all_rows, h, dim}));
      // Head-major storage cannot be stored into directly by rows of heads.
      const bool head_major = random.chance(0.3);
      for (const int64_t r : rows) {
        by_rows.push_back(head_major ? owned(dtype, {all_heads, r, dim}) : owned(dtype, {r, all_heads, dim}));
        if (head_major) by_rows.back().tensor = by_rows.back().tensor.transposed(0, 1);
      }
      const auto statuses = test::on_threads(ranks, [&](int r) {
        const auto i = static_cast<size_t>(r);
        HeadShardOptions options{.rows = rows, .heads = {}, .tile_rows = tile};
        if (uneven) options.heads = heads;
        Status status = sequence_to_heads(test::rank_context(r), world[i],
                                          ConstTensor(whole.tensor).narrowed(0, first_of(rows, r), rows[i]),
                                          by_heads[i].tensor, options);
        if (!status.ok()) return status;
        return heads_to_sequence(test::rank_context(r), world[i], by_heads[i].tensor, by_rows[i].tensor, options);
      });
      for (int r = 0; r < ranks; ++r) {
        const auto i = static_cast<size_t>(r);
        ASSERT_TRUE(statuses[i].ok()) << statuses[i].message();
        expect_bits(by_heads[i].tensor, whole.tensor.narrowed(1, first_of(heads, r), heads[i]), "heads");
        expect_bits(by_rows[i].tensor, whole.tensor.narrowed(0, first_of(rows, r), rows[i]), "rows");
        const CommunicatorStats stats = world[i].stats();
        EXPECT_LE(stats.peak_staging_bytes, 2 * ranks * stats.tile_bytes);
        if (direct && !head_major) {
          EXPECT_EQ(stats.peak_staging_bytes, 0);
        }
        EXPECT_TRUE(by_rows[i].memory->slack_intact() && by_heads[i].memory->slack_intact());
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, HeadShards, testing::Values(1, 2, 3, 4, 5, 7, 8));

std::string refusal_of_heads(std::initializer_list<int64_t> x, std::initializer_list<int64_t> out,
                             const HeadShardOptions& options, bool back = false, DType dtype = DType::f32) {
  auto world = std::move(Communicator::create_threads(1, {.staging_bytes = 4096}).value());
  const Owned from = owned(DType::f32, x), to = owned(dtype, out);
  const auto function = back ? heads_to_sequence : sequence_to_heads;
  const Status status = function(test::rank_context(0), world[0], from.tensor, to.tensor, options);
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  for (const double value : test::to_doubles(to.tensor)) EXPECT_TRUE(std::isnan(value));
  return status.message();
}

TEST(HeadShards, RefusesWhatDisagrees) {
  const int64_t five[] = {5}, two[] = {1, 1};
  EXPECT_EQ(refusal_of_heads({4, 2, 8}, {4, 2, 8}, {.rows = five}),
            "sequence_to_heads: x dim 0 (rows) is 4, but this rank's rows are 5");
  EXPECT_EQ(refusal_of_heads({4, 2, 8}, {3, 2, 8}, {}),
            "sequence_to_heads: out dim 0 (rows) is 3, but the ranks' rows are in all 4");
  EXPECT_EQ(refusal_of_heads({4, 2, 8}, {4, 2, 8}, {.heads = five}),
            "sequence_to_heads: x dim 1 (heads) is 2, but the ranks' heads are in all 5");
  EXPECT_EQ(refusal_of_heads({4, 2, 8}, {4, 3, 8}, {}, true),
            "heads_to_sequence: x dim 1 (heads) is 2, but this rank's heads are 3");
  EXPECT_EQ(refusal_of_heads({4, 2, 8}, {4, 2, 8}, {.heads = two}),
            "sequence_to_heads: heads has 2 sizes, but there are 1 ranks");
  EXPECT_EQ(refusal_of_heads({4, 2, 8}, {4, 2, 8}, {.tile_rows = -2}),
            "sequence_to_heads: tile_rows is -2, but must be from 0 to 2^56");
  EXPECT_EQ(refusal_of_heads({4, 2, 8}, {4, 2, 7}, {}),
            "sequence_to_heads: out dim 2 (head_dim) is 7, but x set head_dim = 8");
  EXPECT_EQ(refusal_of_heads({4, 2, 8}, {4, 2, 8}, {}, false, DType::bf16),
            "sequence_to_heads: out is bf16, but must be f32");
  EXPECT_EQ(refusal_of_heads({4, 2, 512}, {4, 2, 512}, {}),
            "sequence_to_heads: a row of a tile has 4096 bytes, but a slot of staging_bytes = 4096 has 2048");
}

// Ranks whose heads differ: an error that names both, on both.
TEST(HeadShards, MismatchedHeadsAreAnErrorOnBothRanks) {
  auto world = std::move(Communicator::create_threads(2, {.timeout_seconds = 20, .staging_bytes = 1 << 16}).value());
  const auto statuses = test::on_threads(2, [&](int r) {
    const int64_t heads = r == 0 ? 4 : 6;
    const Owned x = owned(DType::f32, {3, heads, 8}), out = owned(DType::f32, {6, heads / 2, 8});
    return sequence_to_heads(test::rank_context(r), world[static_cast<size_t>(r)], x.tensor, out.tensor);
  });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), StatusCode::communication);
    EXPECT_NE(status.message().find("heads [2, 2]"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("heads [3, 3]"), std::string::npos) << status.message();
  }
}

}  // namespace
}  // namespace opst

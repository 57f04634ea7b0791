// Ranks that attend and ranks that are feed-forward networks: rows there and back, bit for bit those of one process.
#include <gtest/gtest.h>

#include <tuple>

#include "core/text.h"
#include "mc2/test_experts.h"
#include "opst/expert_parallel.h"

namespace opst {
namespace {

using test::expect_bits;
using test::expect_ok;
using test::first_of;
using test::integer;
using test::kSizes;
using test::kTile;
using test::Owned;
using test::owned;
using test::Random;
using test::random_tensor;
using test::Weights;
using test::world_of;

class AttentionAndFfn : public testing::TestWithParam<std::tuple<int, int>> {};

// A micro-batch of a rank: its tokens, whole matrices of all attention ranks beside them.
struct MicroBatch {
  Owned x, ids, weights, residual;       // of all attention ranks
  std::vector<int64_t> tokens;           // of each
  std::vector<Owned> rows, counts, out;  // of each rank
};

// To the experts of the FFN ranks, which double each row, and back; several micro-batches in flight, each on a
// communicator of its own.
TEST_P(AttentionAndFfn, ExpertRoutingOfSeveralMicroBatches) {
  const auto [attention, ffn] = GetParam();
  const int ranks = attention + ffn;
  constexpr int64_t kHidden = 16, kBatches = 3;
  Random random(test::seed() + static_cast<uint64_t>(ranks));
  for (const int64_t size : {int64_t{0}, int64_t{1}, kTile + 1, int64_t{40}}) {
    std::vector<int64_t> experts(static_cast<size_t>(ffn));
    for (auto& e : experts) e = random.integer(0, 2);
    experts.back() += 1;
    const int64_t num_experts = first_of(experts, ffn), top_k = random.integer(1, 3);
    std::vector<std::vector<Communicator>> worlds;
    std::vector<MicroBatch> batches;
    for (int b = 0; b < kBatches; ++b) {
      worlds.push_back(world_of(ranks, b != 1));
      MicroBatch batch{};
      for (int r = 0; r < ranks; ++r) batch.tokens.push_back(r >= attention ? 0 : random.chance(0.3) ? 0 : size);
      const int64_t all = first_of(batch.tokens, ranks);
      batch.x = random_tensor(DType::bf16, {all, kHidden}, random);
      batch.residual = random_tensor(DType::bf16, {all, kHidden}, random);
      batch.weights = random_tensor(DType::f32, {all, top_k}, random);
      batch.ids = owned(DType::i32, {all, top_k});
      for (int64_t i = 0; i < all * top_k; ++i) {
        test::set(batch.ids.tensor, i, static_cast<double>(random.integer(-1, num_experts - 1)));
      }
      for (int r = 0; r < ranks; ++r) {
        const bool attends = r < attention;
        batch.rows.push_back(owned(DType::bf16, {attends ? 0 : all * top_k, kHidden}));
        batch.counts.push_back(owned(DType::i64, {attends ? 0 : experts[static_cast<size_t>(r - attention)]}));
        batch.out.push_back(owned(DType::bf16, {batch.tokens[static_cast<size_t>(r)], kHidden}));
      }
      batches.push_back(std::move(batch));
    }
    const AttentionFfnOptions options{
        .attention_ranks = attention, .num_experts = num_experts, .experts = experts, .tile_rows = kTile};
    const auto statuses = test::on_threads(ranks * kBatches, [&](int thread) {
      const int r = thread / static_cast<int>(kBatches);
      const auto i = static_cast<size_t>(r), b = static_cast<size_t>(thread) % kBatches;
      MicroBatch& batch = batches[b];
      Context& context = test::rank_context(r);
      const auto mine = [&](const Owned& t) {
        return ConstTensor(t.tensor).narrowed(0, first_of(batch.tokens, r), batch.tokens[i]);
      };
      Status status =
          attention_to_ffn(context, worlds[b][i], {.x = mine(batch.x), .topk_ids = mine(batch.ids)},
                           {.rows = batch.rows[i].tensor, .expert_tokens = batch.counts[i].tensor}, options);
      if (!status.ok()) return status;
      int64_t rows = 0;
      for (int64_t e = 0; e < batch.counts[i].tensor.shape[0]; ++e) rows += integer(batch.counts[i].tensor, e);
      for (int64_t j = 0; j < rows * kHidden; ++j) {
        test::set(batch.rows[i].tensor, j, 2 * test::get(batch.rows[i].tensor, j));
      }
      status = ffn_to_attention(context, worlds[b][i],
                                {.combine = {.rows = batch.rows[i].tensor,
                                             .topk_ids = mine(batch.ids),
                                             .topk_weights = mine(batch.weights),
                                             .residual = mine(batch.residual)}},
                                batch.out[i].tensor, options);
      const CommunicatorStats stats = worlds[b][i].stats();
      EXPECT_LE(stats.peak_staging_bytes, 2 * ranks * stats.tile_bytes);
      return status;
    });
    expect_ok(statuses);
    if (HasFailure()) return;
    for (const MicroBatch& batch : batches) {
      const int64_t all = first_of(batch.tokens, ranks);
      const Owned doubled = owned(DType::bf16, {all, kHidden}), whole = owned(DType::bf16, {all, kHidden});
      for (int64_t j = 0; j < all * kHidden; ++j) test::set(doubled.tensor, j, 2 * test::get(batch.x.tensor, j));
      const Owned row_of_slot = owned(DType::i64, {all, top_k});
      for (int64_t j = 0; j < all * top_k; ++j) {
        test::set(row_of_slot.tensor, j, integer(batch.ids.tensor, j) < 0 ? -1.0 : static_cast<double>(j / top_k));
      }
      ASSERT_EQ(moe_finalize(test::rank_context(0),
                             {.expanded = doubled.tensor,
                              .row_of_slot = row_of_slot.tensor,
                              .topk_weights = batch.weights.tensor,
                              .skip1 = batch.residual.tensor},
                             whole.tensor)
                    .message(),
                "");
      for (int r = 0; r < attention; ++r) {
        const auto i = static_cast<size_t>(r);
        expect_bits(batch.out[i].tensor, whole.tensor.narrowed(0, first_of(batch.tokens, r), batch.tokens[i]), "out");
      }
    }
  }
}

// Slices of tokens, through a product each way: matmul of all rows, then the plain exchange.
TEST_P(AttentionAndFfn, SlicesThroughProducts) {
  // No structured binding: a lambda could not name one (clang 14).
  const int attention = std::get<0>(GetParam()), ffn = std::get<1>(GetParam());
  const int ranks = attention + ffn;
  Random random(test::seed() + 7 * static_cast<uint64_t>(ranks));
  for (const bool direct : {false, true}) {
    auto world = world_of(ranks, direct);
    for (const int64_t size : kSizes) {
      const DType type = random.pick({DType::f32, DType::bf16});
      const int64_t k = 32, hidden = random.pick<int64_t>({8, 33}), inner = 24;
      const bool weighted = random.chance(0.7);
      SCOPED_TRACE(text(attention, " + ", ffn, " ranks, size ", size, weighted ? ", weights" : ""));
      const int64_t sent = weighted ? hidden : k, returned = weighted ? inner : k;
      const Weights w_o(1, hidden, k, type, random), down(1, inner, hidden, DType::f32, random);
      const Owned bias = random_tensor(DType::f32, {hidden}, random);
      std::vector<Owned> x, rows, residual, out, counts;
      std::vector<int64_t> tokens;
      for (int r = 0; r < ranks; ++r) {
        tokens.push_back(r >= attention ? 0 : random.chance(0.3) ? random.integer(0, size) : size);
        x.push_back(random_tensor(type, {tokens.back(), r < attention || !weighted ? k : sent}, random));
        int64_t mine = 0;
        for (int a = 0; a < attention && r >= attention; ++a) {
          mine += share_of(tokens[static_cast<size_t>(a)], ffn, r - attention);
        }
        rows.push_back(owned(type, {mine, sent}));
        counts.push_back(owned(DType::i64, {r < attention ? 0 : 1, ranks}));
        residual.push_back(random_tensor(type, {tokens.back(), returned}, random));
        out.push_back(owned(type, {tokens.back(), returned}));
      }
      const AttentionFfnOptions options{.attention_ranks = attention, .tile_rows = random.pick<int64_t>({0, kTile})};
      expect_ok(test::on_threads(ranks, [&](int r) {
        const auto i = static_cast<size_t>(r);
        AttentionToFfnInputs to{.x = x[i].tensor};
        FfnToAttentionInputs from{.combine = {.rows = rows[i].tensor, .topk_ids = {}}};
        from.combine.residual = residual[i].tensor;
        if (weighted && r < attention) to.weight = w_o.all(), to.bias = bias.tensor;
        if (weighted && r >= attention) from.weight = down.all();
        // What the other kind has: [0, ..] with the columns of rows.
        if (weighted && r < attention) from.combine.rows.shape[1] = returned;
        Status status = attention_to_ffn(test::rank_context(r), world[i], to,
                                         {.rows = rows[i].tensor, .rank_tokens = counts[i].tensor}, options);
        if (status.ok()) status = ffn_to_attention(test::rank_context(r), world[i], from, out[i].tensor, options);
        const CommunicatorStats stats = world[i].stats();
        EXPECT_LE(stats.peak_staging_bytes, 2 * ranks * stats.tile_bytes);
        return status;
      }));
      if (HasFailure()) return;
      Context& context = test::rank_context(0);
      std::vector<int64_t> next(static_cast<size_t>(ranks));
      for (int a = 0; a < attention; ++a) {
        const auto i = static_cast<size_t>(a);
        const Owned middle = owned(type, {tokens[i], sent}), result = owned(type, {tokens[i], returned});
        const Owned whole = owned(type, {tokens[i], returned});
        if (weighted) {
          ASSERT_EQ(
              matmul(context, x[i].tensor, w_o.floats[0], middle.tensor, {.bias = bias.tensor, .batch_invariant = true})
                  .message(),
              "");
          ASSERT_EQ(matmul(context, middle.tensor, down.floats[0], result.tensor, {.batch_invariant = true}).message(),
                    "");
        } else {
          test::copy(x[i].tensor, middle.tensor);
          test::copy(x[i].tensor, result.tensor);
        }
        int64_t first = 0;
        for (int f = attention; f < ranks; ++f) {
          const auto to = static_cast<size_t>(f);
          const int64_t count = share_of(tokens[i], ffn, f - attention);
          EXPECT_EQ(integer(counts[to].tensor, a), count);
          expect_bits(rows[to].tensor.narrowed(0, next[to], count), middle.tensor.narrowed(0, first, count), "rows");
          next[to] += count, first += count;
        }
        const Owned one_each = owned(DType::i64, {tokens[i], 1});
        for (int64_t t = 0; t < tokens[i]; ++t) test::set(one_each.tensor, t, static_cast<double>(t));
        ASSERT_EQ(moe_finalize(context,
                               {.expanded = result.tensor, .row_of_slot = one_each.tensor, .skip1 = residual[i].tensor},
                               whole.tensor)
                      .message(),
                  "");
        expect_bits(out[i].tensor, whole.tensor, "out");
      }
      if (HasFailure()) return;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, AttentionAndFfn,
                         testing::Values(std::tuple(1, 1), std::tuple(2, 1), std::tuple(1, 3), std::tuple(3, 2),
                                         std::tuple(2, 3), std::tuple(4, 4)));

TEST(AttentionAndFfn, RefusesWhatDisagrees) {
  const auto refusal = [&](const AttentionFfnOptions& options, int64_t rows) {
    auto world = world_of(2);
    return test::on_threads(2, [&](int r) {
      const Owned x = owned(DType::f32, {2, 8}), to = owned(DType::f32, {rows, 8});
      return attention_to_ffn(test::rank_context(r), world[static_cast<size_t>(r)], {.x = x.tensor},
                              {.rows = to.tensor}, options);
    });
  };
  EXPECT_EQ(refusal({.attention_ranks = 2}, 0)[0].message(),
            "attention_to_ffn: attention_ranks is 2, but must be from 1 to 1, one less than there are ranks");
  EXPECT_EQ(refusal({}, 1)[0].message(), "attention_to_ffn: outputs.rows dim 0 (rows) is 1, but this rank attends");
  EXPECT_EQ(refusal({}, 0)[1].message(), "attention_to_ffn: x dim 0 (tokens) is 2, but this rank is an FFN");
}

}  // namespace
}  // namespace opst

// Experts spread over ranks, against one process that has all of them: bit for bit.
#include "opst/expert_parallel.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <thread>

#include "core/text.h"
#include "mc2/test_experts.h"
#include "mc2/test_spread.h"
#include "testing/effort.h"

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

// Tokens of all ranks and where they go.
struct Case {
  int ranks;
  std::vector<int64_t> tokens, experts;  // of each rank
  int64_t top_k, hidden, tile_rows;
  DType dtype;

  int64_t num_experts() const { return first_of(experts, ranks); }
  int64_t all_tokens() const { return first_of(tokens, ranks); }
  ExpertShardOptions shards() const { return {.experts = experts, .tile_rows = tile_rows}; }
  std::string text() const {
    const auto list = [&](const std::vector<int64_t>& v) {
      return joined(ranks, [&](int r) { return std::to_string(v[static_cast<size_t>(r)]); });
    };
    return opst::text(ranks, " ranks, tokens ", list(tokens), ", experts ", list(experts), ", top_k ", top_k,
                      ", hidden ", hidden, ", ", to_string(dtype), ", tile ", tile_rows);
  }
};

Case random_case(int ranks, int64_t size, Random& random) {
  Case c{.ranks = ranks,
         .tokens = {},
         .experts = {},
         .top_k = random.integer(1, 4),
         .hidden = 32 * random.integer(1, 2),
         .tile_rows = random.pick<int64_t>({0, kTile}),
         .dtype = random.pick({DType::f32, DType::bf16})};
  for (int r = 0; r < ranks; ++r) {
    c.tokens.push_back(random.chance(0.3) ? random.integer(0, size) : size);
    c.experts.push_back(random.integer(0, 3));
  }
  c.experts[static_cast<size_t>(random.integer(0, ranks - 1))] += 1;
  return c;
}

// ids [all tokens, top_k]: some -1; often few experts, or one.
Owned random_ids(const Case& c, Random& random) {
  Owned ids = owned(DType::i32, {c.all_tokens(), c.top_k});
  const int64_t some = random.chance(0.3) ? 1 : random.integer(1, c.num_experts());
  for (int64_t i = 0; i < ids.tensor.num_elements(); ++i) {
    test::set(ids.tensor, i, random.chance(0.1) ? -1.0 : static_cast<double>(random.integer(0, some - 1)));
  }
  return ids;
}

// Slots (of all tokens) of expert e, in the order of ranks and slots.
std::vector<int64_t> slots_of(const Owned& ids, int64_t e) {
  std::vector<int64_t> slots;
  for (int64_t i = 0; i < ids.tensor.num_elements(); ++i) {
    if (integer(ids.tensor, i) == e) slots.push_back(i);
  }
  return slots;
}

class Experts : public testing::TestWithParam<int> {};

// Rows arrive sorted by expert, rank and slot; and the weighted sum of the same rows is that of one process.
TEST_P(Experts, DispatchAndCombine) {
  const int ranks = GetParam();
  Random random(test::seed() + static_cast<uint64_t>(ranks));
  for (const bool direct : {false, true}) {
    auto world = world_of(ranks, direct);
    for (const int64_t size : kSizes) {
      const Case c = random_case(ranks, size, random);
      SCOPED_TRACE(c.text() + (direct ? ", direct" : ", slots"));
      const Owned x = random_tensor(c.dtype, {c.all_tokens(), c.hidden}, random), ids = random_ids(c, random);
      const Owned weights = random_tensor(DType::f32, {c.all_tokens(), c.top_k}, random);
      const Owned residual = random_tensor(c.dtype, {c.all_tokens(), c.hidden}, random);
      std::vector<Owned> rows, out, expert_tokens, rank_tokens;
      for (int r = 0; r < ranks; ++r) {
        const auto i = static_cast<size_t>(r);
        int64_t owned_rows = 0;
        for (int64_t e = 0; e < c.experts[i]; ++e) {
          owned_rows += static_cast<int64_t>(slots_of(ids, first_of(c.experts, r) + e).size());
        }
        rows.push_back(owned(c.dtype, {owned_rows + random.integer(0, 2), c.hidden}));
        out.push_back(owned(c.dtype, {c.tokens[i], c.hidden}));
        expert_tokens.push_back(owned(DType::i64, {c.experts[i]}));
        rank_tokens.push_back(owned(DType::i32, {c.experts[i], ranks}));
      }
      expect_ok(test::on_threads(ranks, [&](int r) {
        const auto i = static_cast<size_t>(r);
        const auto mine = [&](const Owned& t) {
          return ConstTensor(t.tensor).narrowed(0, first_of(c.tokens, r), c.tokens[i]);
        };
        Status status = moe_dispatch(
            test::rank_context(r), world[i], mine(x), mine(ids), c.num_experts(),
            {.rows = rows[i].tensor, .expert_tokens = expert_tokens[i].tensor, .rank_tokens = rank_tokens[i].tensor},
            c.shards());
        const auto bounded = [&] {
          const CommunicatorStats stats = world[i].stats();
          EXPECT_LE(stats.peak_staging_bytes, direct ? 0 : 2 * ranks * stats.tile_bytes);
        };
        bounded();
        if (!status.ok()) return status;
        status = moe_combine(
            test::rank_context(r), world[i],
            {.rows = rows[i].tensor, .topk_ids = mine(ids), .topk_weights = mine(weights), .residual = mine(residual)},
            c.num_experts(), out[i].tensor, c.shards());
        bounded();
        return status;
      }));
      if (HasFailure()) return;
      for (int r = 0; r < ranks; ++r) {
        const auto i = static_cast<size_t>(r);
        int64_t row = 0;
        for (int64_t e = 0; e < c.experts[i]; ++e) {
          const auto slots = slots_of(ids, first_of(c.experts, r) + e);
          EXPECT_EQ(integer(expert_tokens[i].tensor, e), static_cast<int64_t>(slots.size()));
          std::vector<int64_t> from(static_cast<size_t>(ranks));
          for (const int64_t slot : slots) {
            int source = 0;
            while (slot / c.top_k >= first_of(c.tokens, source + 1)) ++source;
            ++from[static_cast<size_t>(source)];
            expect_bits(rows[i].tensor.narrowed(0, row++, 1), x.tensor.narrowed(0, slot / c.top_k, 1), "row");
          }
          for (int s = 0; s < ranks; ++s) {
            EXPECT_EQ(integer(rank_tokens[i].tensor, e * ranks + s), from[static_cast<size_t>(s)]);
          }
        }
        for (; row < rows[i].tensor.shape[0]; ++row) EXPECT_TRUE(std::isnan(test::get(rows[i].tensor, row * c.hidden)));
      }
      // One process: every slot's row is its token's.
      const Owned whole = owned(c.dtype, {c.all_tokens(), c.hidden});
      const Owned row_of_slot = owned(DType::i64, {c.all_tokens(), c.top_k});
      for (int64_t i = 0; i < c.all_tokens() * c.top_k; ++i) {
        test::set(row_of_slot.tensor, i, integer(ids.tensor, i) < 0 ? -1.0 : static_cast<double>(i / c.top_k));
      }
      const Status status = moe_finalize(test::rank_context(0),
                                         {.expanded = x.tensor,
                                          .row_of_slot = row_of_slot.tensor,
                                          .topk_weights = weights.tensor,
                                          .skip1 = residual.tensor},
                                         whole.tensor);
      ASSERT_TRUE(status.ok()) << status.message();
      for (int r = 0; r < ranks; ++r) {
        const auto i = static_cast<size_t>(r);
        expect_bits(out[i].tensor, whole.tensor.narrowed(0, first_of(c.tokens, r), c.tokens[i]), "out");
      }
      if (HasFailure()) return;
    }
  }
}

// To the experts and back, against grouped_matmul of all rows at once.
TEST_P(Experts, GroupedProductsThereAndBack) {
  const int ranks = GetParam();
  Random random(test::seed() + 17 * static_cast<uint64_t>(ranks));
  for (const bool direct : {false, true}) {
    auto world = world_of(ranks, direct);
    for (const int64_t size : kSizes) {
      Case c = random_case(ranks, size, random);
      const DType type = random.pick({DType::f32, DType::bf16, DType::i8});
      const int64_t n = random.pick<int64_t>({2, 16, 34}), experts = c.num_experts();
      const bool swiglu = type != DType::i8 && random.chance(0.5), biased = random.chance(0.5);
      SCOPED_TRACE(c.text() + ", x " + to_string(type) + (direct ? ", direct" : ", slots") +
                   (swiglu ? ", swiglu" : ""));
      const int64_t width = swiglu ? n / 2 : n;
      const Weights there(experts, n, c.hidden, type == DType::bf16 ? DType::bf16 : type, random);
      const Weights back(experts, c.hidden, width, DType::f32, random);
      const Owned bias = random_tensor(DType::f32, {experts, n}, random);
      // counts[rank][expert], and each rank's rows, sorted by expert.
      std::vector<Owned> counts, x, scales, hidden, exchanged, out, expected;
      std::vector<int64_t> owned_rows(static_cast<size_t>(ranks));
      for (int r = 0; r < ranks; ++r) {
        counts.push_back(owned(DType::i64, {experts}));
        int64_t rows = 0;
        for (int64_t e = 0, left = c.tokens[static_cast<size_t>(r)]; e < experts; ++e) {
          const int64_t count = e + 1 == experts && random.chance(0.5) ? left : random.integer(0, left);
          test::set(counts.back().tensor, e, static_cast<double>(count));
          left -= count, rows += count;
          int owner = 0;
          while (e >= first_of(c.experts, owner + 1)) ++owner;
          owned_rows[static_cast<size_t>(owner)] += count;
        }
        x.push_back(random_tensor(type, {rows, c.hidden}, random));
        scales.push_back(random_tensor(DType::f32, {rows}, random));
        out.push_back(owned(DType::f32, {rows, c.hidden}));
        expected.push_back(owned(DType::f32, {rows, c.hidden}));
      }
      for (const int64_t rows : owned_rows) {
        hidden.push_back(owned(DType::f32, {rows, width}));
        exchanged.push_back(owned(type, {rows, c.hidden}));
      }
      expect_ok(test::on_threads(ranks, [&](int r) {
        const auto i = static_cast<size_t>(r);
        const int64_t first = first_of(c.experts, r), mine = c.experts[i];
        GroupedExchangeOptions options{.shards = c.shards()};
        if (biased && mine > 0) options.bias = bias.tensor.narrowed(0, first, mine);
        if (swiglu) options.activation = Activation::swiglu;
        if (type == DType::i8) options.x_scales = scales[i].tensor;
        options.exchanged = exchanged[i].tensor;
        Status status = all_to_allv_grouped_matmul(test::rank_context(r), world[i], x[i].tensor, counts[i].tensor,
                                                   there.some(first, mine), hidden[i].tensor, options);
        const auto bounded = [&] {
          const CommunicatorStats stats = world[i].stats();
          EXPECT_LE(stats.peak_staging_bytes, 2 * ranks * stats.tile_bytes);
        };
        bounded();
        if (!status.ok()) return status;
        status = grouped_matmul_all_to_allv(test::rank_context(r), world[i], hidden[i].tensor, counts[i].tensor,
                                            back.some(first, mine), out[i].tensor, {.shards = c.shards()});
        bounded();
        EXPECT_TRUE(!direct || world[i].stats().peak_staging_bytes == 0);
        return status;
      }));
      if (HasFailure()) return;
      for (int r = 0; r < ranks; ++r) {
        const auto i = static_cast<size_t>(r);
        // Both products of my rows, at the experts as they are sorted.
        const int64_t rows = x[i].tensor.shape[0];
        const Owned middle = owned(DType::f32, {rows, width});
        GroupedMatmulOptions options{.batch_invariant = true};
        if (biased) options.bias = bias.tensor;
        if (swiglu) options.activation = Activation::swiglu;
        if (type == DType::i8) options.x_scales = scales[i].tensor;
        const GroupList groups{counts[i].tensor, GroupListType::counts};
        Context& context = test::rank_context(0);
        ASSERT_EQ(grouped_matmul(context, x[i].tensor, there.all(), groups, middle.tensor, options).message(), "");
        ASSERT_EQ(
            grouped_matmul(context, middle.tensor, back.all(), groups, expected[i].tensor, {.batch_invariant = true})
                .message(),
            "");
        expect_bits(out[i].tensor, expected[i].tensor, "out");
      }
      // What arrives: [expert][rank][row].
      for (int d = 0; d < ranks; ++d) {
        int64_t row = 0;
        for (int64_t e = first_of(c.experts, d); e < first_of(c.experts, d + 1); ++e) {
          for (int s = 0; s < ranks; ++s) {
            const auto from = static_cast<size_t>(s);
            int64_t first = 0;
            for (int64_t before = 0; before < e; ++before) first += integer(counts[from].tensor, before);
            const int64_t count = integer(counts[from].tensor, e);
            expect_bits(exchanged[static_cast<size_t>(d)].tensor.narrowed(0, row, count),
                        x[from].tensor.narrowed(0, first, count), "exchanged");
            row += count;
          }
        }
      }
      if (HasFailure()) return;
    }
  }
}

// The layer of all ranks has the bits of the layer of one process.
TEST_P(Experts, TheLayerIsThatOfOneProcess) {
  const int ranks = GetParam();
  Random random(test::seed() + 31 * static_cast<uint64_t>(ranks));
  for (const bool direct : {false, true}) {
    auto world = world_of(ranks, direct);
    for (const int64_t size : kSizes) {
      const Case c = random_case(ranks, size, random);
      const int64_t experts = c.num_experts(), inner = 32 * random.integer(1, 2), tokens = c.all_tokens();
      const bool has_logits = random.chance(0.5) && c.top_k <= experts, has_shared = random.chance(0.5);
      const bool has_residual = random.chance(0.5), swiglu = random.chance(0.7);
      SCOPED_TRACE(c.text() + (has_logits ? ", logits" : "") + (has_shared ? ", shared" : ""));
      const DType type = random.pick({DType::f32, DType::bf16, DType::i8});
      const Weights gate_up(experts, swiglu ? 2 * inner : inner, c.hidden, type, random);
      const Weights down(experts, c.hidden, inner, type, random);
      const Weights shared_up(1, swiglu ? 2 * inner : inner, c.hidden, type, random),
          shared_down(1, c.hidden, inner, type, random);
      const Owned x = random_tensor(c.dtype, {tokens, c.hidden}, random), ids = random_ids(c, random);
      const Owned weights = random_tensor(DType::f32, {tokens, c.top_k}, random);
      const Owned logits = random_tensor(DType::f32, {tokens, experts}, random);
      const Owned residual = random_tensor(c.dtype, {tokens, c.hidden}, random);
      const Owned gate = random_tensor(c.dtype, {c.hidden}, random), whole = owned(c.dtype, {tokens, c.hidden});
      const Owned counts = owned(DType::i64, {experts});
      std::vector<Owned> out, mine;
      for (int r = 0; r < ranks; ++r) {
        out.push_back(owned(c.dtype, {c.tokens[static_cast<size_t>(r)], c.hidden}));
        mine.push_back(owned(DType::i64, {c.experts[static_cast<size_t>(r)]}));
      }
      MoeLayerOptions options{.batch_invariant = true};
      options.activation = swiglu ? Activation::swiglu : Activation::silu;
      if (has_logits) {
        options.top_k = c.top_k, options.gating.renormalise = true;
      } else {
        options.num_experts = experts;
      }
      const auto inputs = [&](int64_t first, int64_t rows, int64_t first_expert, int64_t num_experts) {
        const auto of = [&](const Owned& t) { return ConstTensor(t.tensor).narrowed(0, first, rows); };
        MoeLayerInputs in{};
        in.x = of(x);
        in.experts.gate_up = gate_up.some(first_expert, num_experts);
        in.experts.down = down.some(first_expert, num_experts);
        if (has_logits) in.logits = of(logits);
        if (!has_logits) in.topk_ids = of(ids), in.topk_weights = of(weights);
        if (has_shared)
          in.shared = {.gate_up = shared_up.all(), .down = shared_down.all(), .up = ConstTensor(), .gate = gate.tensor};
        if (has_residual) in.residual = of(residual);
        return in;
      };
      const Status one = moe_layer_forward(test::rank_context(0), inputs(0, tokens, 0, experts),
                                           {.out = whole.tensor, .expert_tokens = counts.tensor}, options);
      ASSERT_TRUE(one.ok()) << one.message();
      expect_ok(test::on_threads(ranks, [&](int r) {
        const auto i = static_cast<size_t>(r);
        Status status =
            moe_layer_forward(test::rank_context(r), world[i],
                              inputs(first_of(c.tokens, r), c.tokens[i], first_of(c.experts, r), c.experts[i]),
                              {.out = out[i].tensor, .expert_tokens = mine[i].tensor}, options, c.shards());
        const CommunicatorStats stats = world[i].stats();
        EXPECT_LE(stats.peak_staging_bytes, 2 * ranks * stats.tile_bytes);
        return status;
      }));
      if (HasFailure()) return;
      for (int r = 0; r < ranks; ++r) {
        const auto i = static_cast<size_t>(r);
        expect_bits(out[i].tensor, whole.tensor.narrowed(0, first_of(c.tokens, r), c.tokens[i]), "out");
        expect_bits(mine[i].tensor, counts.tensor.narrowed(0, first_of(c.experts, r), c.experts[i]), "expert_tokens");
      }
      if (HasFailure()) return;
    }
  }
}

// ---- faults

// The message of a call that one rank refuses.
TEST(Experts, RefusesWhatDisagrees) {
  const Owned x = owned(DType::f32, {4, 8}), rows = owned(DType::f32, {3, 8}), ids = owned(DType::i32, {4, 1});
  for (int64_t i = 0; i < 4; ++i) test::set(ids.tensor, i, 0);
  const auto dispatch = [&](const ConstTensor& of, int64_t experts, const Tensor& to, const ExpertShardOptions& options,
                            int64_t staging = 1 << 16) {
    auto world = std::move(Communicator::create_threads(1, {.staging_bytes = staging}).value());
    const Status status = moe_dispatch(test::rank_context(0), world[0], x.tensor, of, experts, {.rows = to}, options);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    for (const double value : test::to_doubles(to)) EXPECT_TRUE(std::isnan(value));
    return status.message();
  };
  const int64_t two[] = {2}, both[] = {1, 1};
  EXPECT_EQ(dispatch(ids.tensor, 1, rows.tensor, {}), "moe_dispatch: rows dim 0 is 3, but this rank's experts have 4");
  EXPECT_EQ(dispatch(ids.tensor, 1, rows.tensor, {.experts = two}),
            "moe_dispatch: num_experts is 1, but the ranks' experts are in all 2");
  EXPECT_EQ(dispatch(ids.tensor, 1, rows.tensor, {.experts = both}),
            "moe_dispatch: experts has 2 sizes, but there are 1 ranks");
  EXPECT_EQ(dispatch(ids.tensor, 1, rows.tensor, {.tile_rows = -1}),
            "moe_dispatch: tile_rows is -1, but must be from 0 to 2^56");
  EXPECT_EQ(dispatch(ids.tensor.narrowed(0, 0, 3), 1, rows.tensor, {}),
            "moe_dispatch: topk_ids dim 0 (tokens) is 3, but x set tokens = 4");
  EXPECT_EQ(dispatch(ids.tensor, 1000, rows.tensor, {}, 4096),
            "moe_dispatch: the counts of 1000 experts have 8000 bytes, but a slot of staging_bytes = 4096 has 2048");
  const Owned wrong = owned(DType::i32, {4, 1});
  for (int64_t i = 0; i < 4; ++i) test::set(wrong.tensor, i, 5);
  EXPECT_NE(dispatch(wrong.tensor, 2, rows.tensor, {}).find("topk_ids"), std::string::npos);
}

// Ranks that divide experts differently: an error that names both, on all.
TEST(Experts, MismatchedSplitsAreAnErrorOnAllRanks) {
  auto world = world_of(3);
  const auto statuses = test::on_threads(3, [&](int r) {
    const Owned x = owned(DType::f32, {2, 8}), rows = owned(DType::f32, {9, 8}), ids = owned(DType::i32, {2, 1});
    for (int64_t i = 0; i < 2; ++i) test::set(ids.tensor, i, 0);
    const int64_t one[] = {1, 1, 2}, other[] = {2, 1, 1};
    return moe_dispatch(test::rank_context(r), world[static_cast<size_t>(r)], x.tensor, ids.tensor, 4,
                        {.rows = rows.tensor}, {.experts = r == 1 ? other : one});
  });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), StatusCode::communication);
    EXPECT_NE(status.message().find("experts [1, 1, 2]"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("experts [2, 1, 1]"), std::string::npos) << status.message();
  }
}

// All operators of sequences and experts, back to back: the same bits whatever the timing, through slots and direct.
TEST_P(Experts, BitsDoNotDependOnTiming) {
  const int ranks = GetParam();
  Random random(test::seed());
  std::vector<std::string> first(static_cast<size_t>(ranks));
  for (const bool direct : {false, true}) {
    auto world = world_of(ranks, direct);
    for (int repeat = 0; repeat < (test::kSanitized ? 2 : 6); ++repeat) {
      std::vector<int64_t> delays(static_cast<size_t>(ranks));
      for (int64_t& delay : delays) delay = repeat == 0 ? 0 : random.integer(0, 2000);
      std::vector<std::string> results(static_cast<size_t>(ranks));
      test::on_threads(ranks, [&](int r) {
        const auto i = static_cast<size_t>(r);
        test::SpreadProblem problem(test::rank_context(r), r, ranks);
        std::this_thread::sleep_for(std::chrono::microseconds(delays[i]));
        return results[i] = problem.all_results(test::rank_context(r), world[i], problem.own_out()), Status();
      });
      for (size_t r = 0; r < first.size(); ++r) {
        ASSERT_GE(results[r].size(), size_t{10000}) << results[r];
        if (first[r].empty()) first[r] = results[r];
        EXPECT_TRUE(results[r] == first[r]) << "rank " << r;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Experts, testing::Values(1, 2, 3, 4, 5, 7, 8));

}  // namespace
}  // namespace opst

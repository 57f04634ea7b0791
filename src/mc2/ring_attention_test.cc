// Ring attention against attention of the whole sequence in double, and bit for bit against its unfused form: keys of
// all ranks at hand, the same tiles one after the other.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>

#include "attention/backward_reference.h"
#include "core/text.h"
#include "mc2/test_ranks.h"
#include "mc2/test_tensors.h"
#include "opst/sequence_parallel.h"
#include "testing/effort.h"
#include "testing/elements.h"

namespace opst {
namespace {

using test::expect_bits;
using test::Owned;
using test::owned;
using test::Random;
using test::random_tensor;

constexpr int64_t kTile = 8;

struct Case {
  int ranks;
  std::vector<int64_t> rows;
  int64_t batch, heads, kv_heads, dim, value_dim;
  DType query, key, out;
  RingAttentionOptions options;

  std::string text() const {
    return opst::text(ranks, " ranks, rows ",
                      joined(ranks, [&](int r) { return std::to_string(rows[static_cast<size_t>(r)]); }), ", heads ",
                      heads, "/", kv_heads, ", dims ", dim, "/", value_dim, ", ", to_string(query), " ", to_string(key),
                      " -> ", to_string(out), options.causal ? ", causal" : "", ", left ", options.window_left,
                      options.order == SequenceOrder::zigzag ? ", zigzag" : "");
  }
  int64_t tokens() const { return test::first_of(rows, ranks); }
};

// The tokens of each rank's chunks: written down from the definition, in the order of the sequence.
std::vector<std::vector<std::vector<int64_t>>> tokens_of(const Case& c) {
  std::vector<std::vector<std::vector<int64_t>>> chunks(static_cast<size_t>(c.ranks));
  int64_t token = 0;
  const auto take = [&](int r, int64_t count) {
    auto& chunk = chunks[static_cast<size_t>(r)].emplace_back();
    for (; count > 0; --count) chunk.push_back(token++);
  };
  const bool zigzag = c.options.order == SequenceOrder::zigzag;
  for (int r = 0; r < c.ranks; ++r) {
    const int64_t n = c.rows[static_cast<size_t>(r)];
    take(r, zigzag ? (n + 1) / 2 : n);
  }
  for (int r = c.ranks - 1; zigzag && r >= 0; --r) take(r, c.rows[static_cast<size_t>(r)] / 2);
  return chunks;
}

// Rows (dimension 2) of `whole` at these tokens.
Owned rows_at(const ConstTensor& whole, const std::vector<std::vector<int64_t>>& chunks) {
  std::vector<int64_t> tokens;
  for (const auto& chunk : chunks) tokens.insert(tokens.end(), chunk.begin(), chunk.end());
  const auto n = static_cast<int64_t>(tokens.size());
  Owned o = owned(whole.dtype, {whole.shape[0], whole.shape[1], n, whole.shape[3]});
  for (int64_t i = 0; i < n; ++i) {
    test::copy(whole.narrowed(2, tokens[static_cast<size_t>(i)], 1), o.tensor.narrowed(2, i, 1));
  }
  return o;
}

// One rank's tensors.
struct Shard {
  Owned query, key, value, grad_out, out, lse, grad_query, grad_key, grad_value;
};

class Problem {
 public:
  Problem(const Case& a_case, Random& random) : c(a_case), chunks(tokens_of(c)) {
    const int64_t n = c.tokens();
    query = random_tensor(c.query, {c.batch, c.heads, n, c.dim}, random);
    key = random_tensor(c.key, {c.batch, c.kv_heads, n, c.dim}, random);
    value = random_tensor(c.key, {c.batch, c.kv_heads, n, c.value_dim}, random);
    grad_out = random_tensor(c.out, {c.batch, c.heads, n, c.value_dim}, random);
    shards = make_shards();
  }

  std::vector<Shard> make_shards() const {
    std::vector<Shard> made;
    for (const auto& of_rank : chunks) {
      Shard s{.query = rows_at(query.tensor, of_rank),
              .key = rows_at(key.tensor, of_rank),
              .value = rows_at(value.tensor, of_rank),
              .grad_out = rows_at(grad_out.tensor, of_rank),
              .out = {},
              .lse = {},
              .grad_query = {},
              .grad_key = {},
              .grad_value = {}};
      const int64_t rows = s.query.tensor.shape[2];
      s.out = owned(c.out, {c.batch, c.heads, rows, c.value_dim});
      s.lse = owned(DType::f32, {c.batch, c.heads, rows});
      s.grad_query = owned(c.out, {c.batch, c.heads, rows, c.dim});
      s.grad_key = owned(DType::f32, {c.batch, c.kv_heads, rows, c.dim});
      s.grad_value = owned(c.out, {c.batch, c.kv_heads, rows, c.value_dim});
      made.push_back(std::move(s));
    }
    return made;
  }

  // Forward and backward of one rank.
  Status fused(int rank, Communicator& communicator, int64_t delay_us = 0) {
    Shard& s = shards[static_cast<size_t>(rank)];
    RingAttentionOptions options = c.options;
    options.rows = c.rows;
    const RingAttentionInputs in{s.query.tensor, s.key.tensor, s.value.tensor};
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    Status status = ring_attention_forward(test::rank_context(rank), communicator, in,
                                           {.out = s.out.tensor, .softmax_lse = s.lse.tensor}, options);
    if (!status.ok()) return status;
    expect_bounded(communicator);
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    status = ring_attention_backward(
        test::rank_context(rank), communicator, in,
        {.out = s.out.tensor, .softmax_lse = s.lse.tensor, .grad_out = s.grad_out.tensor},
        {.grad_query = s.grad_query.tensor, .grad_key = s.grad_key.tensor, .grad_value = s.grad_value.tensor}, options);
    expect_bounded(communicator);
    return status;
  }

  // Tiles of a rank's keys: which rows, and of which tokens.
  struct Piece {
    int64_t first_row, rows, first_token;
  };
  std::vector<Piece> pieces(int rank, int64_t most) const {
    std::vector<Piece> all;
    int64_t row = 0;
    for (const auto& chunk : chunks[static_cast<size_t>(rank)]) {
      const auto n = static_cast<int64_t>(chunk.size());
      for (int64_t i = 0; i < n; i += most)
        all.push_back({row + i, std::min(most, n - i), chunk[static_cast<size_t>(i)]});
      row += n;
    }
    return all;
  }
  // Windows of queries [.., + rows) at a token with such keys; false: nothing is visible.
  bool window(const Piece& q, const Piece& k, AttentionOptions& o) const {
    o.softmax_scale = c.options.softmax_scale, o.softcap = c.options.softcap;
    o.alignment = CausalAlignment::top_left;
    bool any = false;
    for (int64_t i = q.first_token; i < q.first_token + q.rows; ++i) {
      for (int64_t j = k.first_token; j < k.first_token + k.rows; ++j) {
        any |= (!c.options.causal || j <= i) && (c.options.window_left == kUnbounded || i - j <= c.options.window_left);
      }
    }
    if (c.options.causal) o.window_right = q.first_token - k.first_token;
    if (c.options.window_left != kUnbounded) o.window_left = c.options.window_left - (q.first_token - k.first_token);
    return any;
  }

  // The same products and sums without messages.
  void unfused(std::vector<Shard>& to, int64_t tile_rows) const {
    Context& context = test::rank_context(0);
    const auto whole = std::numeric_limits<int64_t>::max() / 2;
    const auto index = [](int64_t i) { return static_cast<size_t>(i); };
    std::vector<std::vector<Piece>> tiles;
    size_t most = 0;
    for (int s = 0; s < c.ranks; ++s) tiles.push_back(pieces(s, tile_rows)), most = std::max(most, tiles.back().size());
    std::vector<Owned> grad_key, grad_value;
    for (const Shard& s : to) {
      grad_key.push_back(zeros(s.key.tensor)), grad_value.push_back(zeros(s.value.tensor));
    }
    std::vector<std::vector<std::vector<std::array<Owned, 2>>>> parts(to.size());  // [owner][tile][rank that adds]
    for (int s = 0; s < c.ranks; ++s) parts[index(s)].resize(tiles[index(s)].size());
    std::vector<Owned> sums;
    for (int r = 0; r < c.ranks; ++r) {
      const Shard& own = to[index(r)];
      Owned sum = zeros(own.out.tensor), lse = owned(DType::f32, {c.batch, c.heads, own.out.tensor.shape[2]});
      for (int64_t i = 0; i < lse.tensor.num_elements(); ++i) test::set(lse.tensor, i, -HUGE_VAL);
      for (size_t i = 0; i < most; ++i) {
        for (int step = 0; step < c.ranks; ++step) {
          const size_t s = index((r + step) % c.ranks);
          if (i >= tiles[s].size()) continue;
          const Piece& k = tiles[s][i];
          for (const Piece& q : pieces(r, whole)) {
            AttentionOptions o;
            if (!window(q, k, o)) continue;
            const Owned out = owned(DType::f32, {1, c.batch, c.heads, q.rows, c.value_dim});
            const Owned part_lse = owned(DType::f32, {1, c.batch, c.heads, q.rows});
            expect_ok(flash_attention_forward(
                context, inputs(own, q, to[s], k),
                {.out = out.tensor.selected(0, 0), .softmax_lse = part_lse.tensor.selected(0, 0)}, o));
            expect_ok(merge_attention(context, {.out = out.tensor, .softmax_lse = part_lse.tensor},
                                      {.out = sum.tensor.narrowed(2, q.first_row, q.rows),
                                       .softmax_lse = lse.tensor.narrowed(2, q.first_row, q.rows)},
                                      true));
          }
        }
      }
      test::copy(sum.tensor, own.out.tensor);
      test::copy(lse.tensor, own.lse.tensor);
      sums.push_back(std::move(sum));
    }
    for (int r = 0; r < c.ranks; ++r) {
      const Shard& own = to[index(r)];
      Owned grad_query = zeros(own.grad_query.tensor);
      for (size_t i = 0; i < most; ++i) {
        for (int step = 0; step < c.ranks; ++step) {
          const size_t s = index((r + step) % c.ranks);
          if (i >= tiles[s].size()) continue;
          const Piece& k = tiles[s][i];
          std::array<Owned, 2> mine;
          for (const Piece& q : pieces(r, whole)) {
            AttentionOptions o;
            if (!window(q, k, o)) continue;
            const Owned gq = owned(DType::f32, {c.batch, c.heads, q.rows, c.dim});
            std::array<Owned, 2> grads = {owned(DType::f32, {c.batch, c.kv_heads, k.rows, c.dim}),
                                          owned(DType::f32, {c.batch, c.kv_heads, k.rows, c.value_dim})};
            const auto rows = [&](const Owned& t) { return t.tensor.narrowed(2, q.first_row, q.rows); };
            expect_ok(flash_attention_backward(
                context, inputs(own, q, to[s], k),
                {.out = rows(own.out), .softmax_lse = rows(own.lse), .grad_out = rows(own.grad_out)},
                {.grad_query = gq.tensor, .grad_key = grads[0].tensor, .grad_value = grads[1].tensor}, o));
            add(rows(grad_query), gq.tensor);
            if (mine[0].memory) {
              for (size_t g = 0; g < 2; ++g) add(mine[g].tensor, grads[g].tensor);
            } else {
              mine = std::move(grads);
            }
          }
          if (mine[0].memory) {
            parts[s][i].resize(index(c.ranks));
            parts[s][i][index(r)] = std::move(mine);
          }
        }
      }
      test::copy(grad_query.tensor, own.grad_query.tensor);
    }
    for (size_t s = 0; s < to.size(); ++s) {
      for (size_t i = 0; i < tiles[s].size(); ++i) {
        const auto rows = [&](const Owned& t) { return t.tensor.narrowed(2, tiles[s][i].first_row, tiles[s][i].rows); };
        bool first = true;
        for (const auto& part : parts[s][i]) {
          if (!part[0].memory) continue;
          if (first) test::copy(part[0].tensor, rows(grad_key[s])), test::copy(part[1].tensor, rows(grad_value[s]));
          if (!first) add(rows(grad_key[s]), part[0].tensor), add(rows(grad_value[s]), part[1].tensor);
          first = false;
        }
      }
      test::copy(grad_key[s].tensor, to[s].grad_key.tensor);
      test::copy(grad_value[s].tensor, to[s].grad_value.tensor);
    }
  }

  void expect_equal(const std::vector<Shard>& expected) const {
    for (size_t r = 0; r < shards.size(); ++r) {
      SCOPED_TRACE(text("rank ", r));
      const Shard &got = shards[r], &right = expected[r];
      expect_bits(got.out.tensor, right.out.tensor, "out");
      expect_bits(got.lse.tensor, right.lse.tensor, "softmax_lse");
      expect_bits(got.grad_query.tensor, right.grad_query.tensor, "grad_query");
      expect_bits(got.grad_key.tensor, right.grad_key.tensor, "grad_key");
      expect_bits(got.grad_value.tensor, right.grad_value.tensor, "grad_value");
    }
  }

  // Attention of the whole sequence in double.
  void expect_near() const {
    const AttentionInputs in{.query = query.tensor, .key = key.tensor, .value = value.tensor};
    const AttentionOptions o{.softmax_scale = c.options.softmax_scale,
                             .causal = c.options.causal,
                             .window_left = c.options.window_left,
                             .softcap = c.options.softcap};
    const int64_t n = c.tokens();
    const Owned out = owned(DType::f64, {c.batch, c.heads, n, c.value_dim});
    const Owned naive = owned(DType::f64, {c.batch, c.heads, n, c.value_dim});
    const Owned lse = owned(DType::f64, {c.batch, c.heads, n, 1});
    for (int64_t row = 0; row < c.batch * c.heads * n; ++row) {
      const int64_t b = row / n / c.heads, h = row / n % c.heads, i = row % n;
      const auto right = attention::reference_row(in, o, b, h, i);
      const auto rounded = attention::naive_row(in, o, b, h, i, c.query);
      test::set(lse.tensor, row, right.lse);
      for (int64_t d = 0; d < c.value_dim; ++d) {
        test::set(out.tensor, row * c.value_dim + d, right.out[static_cast<size_t>(d)]);
        test::set(naive.tensor, row * c.value_dim + d, rounded.out[static_cast<size_t>(d)]);
      }
    }
    const auto right = attention::reference_gradients(in, grad_out.tensor, {}, o);
    const auto rounded = attention::naive_gradients(in, grad_out.tensor, {}, o, c.query);
    near(&Shard::out, out.tensor, naive.tensor, "out");
    const auto gradient = [&](Owned Shard::*got, const Owned& like, const std::vector<double>& a,
                              const std::vector<double>& b, const char* name) {
      const auto as_tensor = [&](const std::vector<double>& v) {
        ConstTensor t = attention::reference::packed_shape(like.tensor);
        t.dtype = DType::f64, t.data = v.data();
        return t;
      };
      near(got, as_tensor(a), as_tensor(b), name);
    };
    gradient(&Shard::grad_query, query, right.query, rounded.query, "grad_query");
    gradient(&Shard::grad_key, key, right.key, rounded.key, "grad_key");
    gradient(&Shard::grad_value, value, right.value, rounded.value, "grad_value");
    for (size_t r = 0; r < shards.size(); ++r) {
      const Owned lse_rows = rows_at(lse.tensor, chunks[r]);
      const Tensor& got = shards[r].lse.tensor;
      for (int64_t i = 0; i < got.num_elements(); ++i) {
        const double a = test::get(got, i), b = test::get(lse_rows.tensor, i);
        EXPECT_TRUE(a == b || std::fabs(a - b) < 1e-4 * (1 + std::fabs(b))) << a << " " << b;
      }
    }
  }

  const Case c;
  const std::vector<std::vector<std::vector<int64_t>>> chunks;
  Owned query, key, value, grad_out;
  std::vector<Shard> shards;

 private:
  void expect_bounded(const Communicator& communicator) const {
    const CommunicatorStats stats = communicator.stats();
    EXPECT_LE(stats.peak_staging_bytes, 2 * c.ranks * stats.tile_bytes);
  }
  // What all ranks have, side by side. The bound is the naive form's error over the whole sequence: one rank's rows may
  // be too few to tell it. Beyond that, backward reads an `out` that was rounded to c.out, the naive form one that was
  // not: where dP - delta cancels (a row of one key), all that is left is that rounding.
  void near(Owned Shard::*got, const ConstTensor& reference, const ConstTensor& step, const char* name) const {
    const Owned whole = owned((shards[0].*got).tensor.dtype,
                              {reference.shape[0], reference.shape[1], reference.shape[2], reference.shape[3]});
    for (size_t r = 0; r < shards.size(); ++r) {
      int64_t row = 0;
      for (const auto& chunk : chunks[r]) {
        for (const int64_t token : chunk) {
          test::copy((shards[r].*got).tensor.narrowed(2, row++, 1), whole.tensor.narrowed(2, token, 1));
        }
      }
    }
    const double extra = 1e-5 + (c.out == DType::f32 ? 0 : 2 * test::epsilon(c.out));
    const auto result = test::compare(whole.tensor, reference, step, {.name = name, .extra = extra, .per_row = false});
    EXPECT_TRUE(result.ok) << result.message;
  }
  static void expect_ok(const Status& status) { EXPECT_TRUE(status.ok()) << status.message(); }
  static Owned zeros(const Tensor& like) {
    Owned o = owned(DType::f32, {like.shape[0], like.shape[1], like.shape[2], like.shape[3]});
    for (int64_t i = 0; i < o.tensor.num_elements(); ++i) test::set(o.tensor, i, 0);
    return o;
  }
  static void add(const Tensor& to, const ConstTensor& more) {
    for (int64_t i = 0; i < to.num_elements(); ++i) {
      test::set(to, i, static_cast<float>(test::get(to, i)) + static_cast<float>(test::get(more, i)));
    }
  }
  static AttentionInputs inputs(const Shard& queries, const Piece& q, const Shard& keys, const Piece& k) {
    return {.query = queries.query.tensor.narrowed(2, q.first_row, q.rows),
            .key = keys.key.tensor.narrowed(2, k.first_row, k.rows),
            .value = keys.value.tensor.narrowed(2, k.first_row, k.rows)};
  }
};

Case random_case(int ranks, int64_t size, Random& random) {
  const int64_t kv_heads = random.integer(1, 2);
  const DType storage = random.pick({DType::f32, DType::bf16, DType::f16});
  Case c{.ranks = ranks,
         .rows = {},
         .batch = random.integer(1, 2),
         .heads = kv_heads * random.integer(1, 3),
         .kv_heads = kv_heads,
         .dim = random.pick<int64_t>({8, 16, 24}),
         .value_dim = random.pick<int64_t>({8, 20}),
         .query = storage,
         .key = storage,
         .out = random.chance(0.5) ? DType::f32 : storage,
         .options = {.causal = random.chance(0.6), .tile_rows = kTile}};
  const bool uneven = random.chance(0.5);
  for (int r = 0; r < ranks; ++r) c.rows.push_back(uneven && r % 2 == 1 ? random.integer(0, size) : size);
  if (random.chance(0.5)) c.options.order = SequenceOrder::zigzag;
  if (random.chance(0.3)) c.options.window_left = random.integer(0, 2 * size);
  if (random.chance(0.3)) c.options.softcap = 3;
  if (random.chance(0.3)) c.options.softmax_scale = 0.2;
  return c;
}

std::vector<Communicator> world_of(int ranks) {
  return std::move(Communicator::create_threads(ranks, {.timeout_seconds = 30, .staging_bytes = 1 << 22}).value());
}

class RingAttention : public testing::TestWithParam<int> {};

TEST_P(RingAttention, EqualsItsUnfusedFormAndTheReference) {
  const int ranks = GetParam();
  Random random(test::seed() + static_cast<uint64_t>(ranks));
  auto world = world_of(ranks);
  for (const int64_t size : {int64_t{0}, int64_t{1}, kTile - 1, kTile, kTile + 1, 2 * kTile + 3, int64_t{257}}) {
    if (size > 100 && (ranks > 2 || test::kSanitized)) continue;  // the reference takes seconds
    for (int repeat = 0; repeat < (size > 100 ? 1 : 3); ++repeat) {
      const Case c = random_case(ranks, size, random);
      SCOPED_TRACE(c.text());
      Problem problem(c, random);
      const auto statuses =
          test::on_threads(ranks, [&](int r) { return problem.fused(r, world[static_cast<size_t>(r)]); });
      for (const Status& status : statuses) ASSERT_TRUE(status.ok()) << status.message();
      std::vector<Shard> expected = problem.make_shards();
      problem.unfused(expected, kTile);
      problem.expect_equal(expected);
      problem.expect_near();
      if (HasFailure()) return;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, RingAttention, testing::Values(1, 2, 3, 4, 5, 7, 8));

// The same bits whatever the timing.
TEST(RingAttention, BitsDoNotDependOnTiming) {
  constexpr int kRanks = 4;
  Random random(test::seed());
  auto world = world_of(kRanks);
  Case c = random_case(kRanks, 3 * kTile, random);
  c.options.causal = true, c.options.order = SequenceOrder::zigzag, c.options.tile_rows = 3;
  Problem problem(c, random);
  std::vector<Shard> expected = problem.make_shards();
  problem.unfused(expected, 3);
  for (int repeat = 0; repeat < 10; ++repeat) {
    int64_t delays[kRanks];
    for (int64_t& delay : delays) delay = random.integer(0, 3000);
    const auto statuses =
        test::on_threads(kRanks, [&](int r) { return problem.fused(r, world[static_cast<size_t>(r)], delays[r]); });
    for (const Status& status : statuses) ASSERT_TRUE(status.ok()) << status.message();
    problem.expect_equal(expected);
  }
}

// Under a causal mask, rank 0's contiguous shard sees nobody else's keys; in zig-zag order all ranks send as much.
TEST(RingAttention, SendsWhatIsSeen) {
  constexpr int kRanks = 4;
  Random random(test::seed());
  for (const SequenceOrder order : {SequenceOrder::contiguous, SequenceOrder::zigzag}) {
    auto world = world_of(kRanks);
    Case c = random_case(kRanks, 4 * kTile, random);
    c.options.causal = true, c.options.order = order, c.options.window_left = kUnbounded;
    c.rows.assign(kRanks, 4 * kTile);
    Problem problem(c, random);
    const auto statuses = test::on_threads(kRanks, [&](int r) {
      const Shard& s = problem.shards[static_cast<size_t>(r)];
      return ring_attention_forward(test::rank_context(r), world[static_cast<size_t>(r)],
                                    {s.query.tensor, s.key.tensor, s.value.tensor}, {.out = s.out.tensor}, c.options);
    });
    for (const Status& status : statuses) ASSERT_TRUE(status.ok()) << status.message();
    for (int r = 0; r < kRanks; ++r) {
      const int64_t sent = world[static_cast<size_t>(r)].stats().tiles_sent;
      // Contiguous: all 4 tiles to each later rank. Zig-zag: the 2 of the first chunk to all, those of the last chunk
      // to the ranks before, whose last chunks are behind it.
      EXPECT_EQ(sent, order == SequenceOrder::contiguous ? 4 * (kRanks - 1 - r) : 2 * (kRanks - 1) + 2 * r) << r;
    }
  }
}

TEST(RingAttention, RefusesWhatDisagrees) {
  const auto refusal = [&](const RingAttentionOptions& options, int64_t rows = 4, int64_t heads = 2,
                           int64_t staging = 1 << 16) {
    auto world = std::move(Communicator::create_threads(1, {.staging_bytes = staging}).value());
    const Owned q = owned(DType::f32, {1, heads, 4, 8}), k = owned(DType::f32, {1, 2, rows, 8});
    const Owned out = owned(DType::f32, {1, heads, 4, 8});
    const Status status = ring_attention_forward(test::rank_context(0), world[0], {q.tensor, k.tensor, k.tensor},
                                                 {.out = out.tensor}, options);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    for (const double value : test::to_doubles(out.tensor)) EXPECT_TRUE(std::isnan(value));
    return status.message();
  };
  const int64_t five[] = {5}, two[] = {2, 2};
  EXPECT_EQ(refusal({.rows = five}), "ring_attention_forward: key dim 2 (rows) is 4, but rows has for this rank 5");
  EXPECT_EQ(refusal({.rows = two}), "ring_attention_forward: rows has 2 sizes, but there are 1 ranks");
  EXPECT_EQ(refusal({}, 3), "ring_attention_forward: key dim 2 (rows) is 3, but query set rows = 4");
  EXPECT_NE(refusal({}, 4, 3).find("num_heads"), std::string::npos);
  EXPECT_NE(refusal({.softcap = -1}).find("softcap"), std::string::npos);
  EXPECT_EQ(refusal({.tile_rows = -1}), "ring_attention_forward: tile_rows is -1, but must be from 0 to 2^56");
  EXPECT_EQ(refusal({}, 4, 2, 0),
            "ring_attention_forward: a row of a tile has 128 bytes, but a slot of staging_bytes = 0 has 0");
}

// Another mask on one rank is an error on both.
TEST(RingAttention, MismatchedMasksAreAnErrorOnBothRanks) {
  Random random(1);
  Case c = random_case(2, 4, random);
  c.rows = {4, 4};
  Problem problem(c, random);
  auto world = world_of(2);
  const auto statuses = test::on_threads(2, [&](int r) {
    const Shard& s = problem.shards[static_cast<size_t>(r)];
    return ring_attention_forward(test::rank_context(r), world[static_cast<size_t>(r)],
                                  {s.query.tensor, s.key.tensor, s.value.tensor}, {.out = s.out.tensor},
                                  {.causal = r == 0});
  });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), StatusCode::communication);
    EXPECT_NE(status.message().find(", causal, "), std::string::npos) << status.message();
  }
}

}  // namespace
}  // namespace opst

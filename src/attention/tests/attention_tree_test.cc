// Trees of draft tokens: attention of each query over the keys before the drafts and over those of its bits.
#include <gtest/gtest.h>

#include <array>
#include <bit>

#include "attention/kv_blocks.h"
#include "attention/tests/drawn_call.h"
#include "opst/attention_backward.h"

namespace opst::test {
namespace {

std::vector<int64_t> words_of_parents(const std::vector<int64_t>& parents) {
  std::vector<int64_t> words;
  for (size_t i = 0; i < parents.size(); ++i) {
    const int64_t above = parents[i] < 0 ? 0 : words[static_cast<size_t>(parents[i])];
    words.push_back(above | static_cast<int64_t>(uint64_t{1} << i));
  }
  return words;
}
std::vector<int64_t> chain(int64_t n) {
  std::vector<int64_t> parents;
  for (int64_t i = 0; i < n; ++i) parents.push_back(i - 1);
  return words_of_parents(parents);
}
// The tree of EAGLE's papers for seven tokens and a root: two children, three grandchildren, two behind them.
const std::vector<int64_t> kTree = words_of_parents({-1, 0, 0, 1, 1, 2, 3, 4});

ConstTensor tensor_of(const std::vector<int64_t>& words, int64_t batch = 1) {
  const auto count = static_cast<int64_t>(words.size());
  return ConstTensor::contiguous(DType::i64, {batch, count / batch}, words.data());
}

Draw tree_draw(Random& random, Keys keys, int64_t queries, int64_t kv_len, int64_t group) {
  Draw d;
  d.draws_all = d.for_forward = d.tree = true;
  d.num_kv_heads = random.pick<int64_t>({1, 2});
  d.num_heads = d.num_kv_heads * group;
  d.head_dim = d.value_head_dim = 16;
  d.keys = keys;
  d.varlen_q = keys == Keys::varlen || random.chance(0.5);
  d.query_lens = {queries, queries, queries};
  d.kv_lens = {kv_len, std::max(queries, kv_len / 2), queries};
  if (d.varlen_q) d.query_lens[1] = std::max<int64_t>(queries / 2, 1);
  d.block_size = keys == Keys::panel_pages ? 64 : random.pick<int64_t>({1, 16, 48});
  if (keys == Keys::panel_pages) d.options.page_layout = PageLayout::panel32;
  return d;
}

// 1 to 8 queries, and up to 64, over short and split keys; one to sixteen heads of a KV head, which are read in place,
// packed for a task, or packed for several.
TEST(AttentionTree, EveryKindOfKeysAgreesWithTheReference) {
  Random random(seed());
  double worst_ratio = 0;
  for (const Keys keys : {Keys::dense, Keys::varlen, Keys::norm_pages, Keys::panel_pages}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const int64_t queries : {1, 2, 3, 5, 8, 33, 64}) {
        for (const int64_t group : {1, 4, 16}) {
          if (keys == Keys::panel_pages && dtype == DType::f16) continue;  // no such pages
          if (!exhaustive() && random.chance(0.5)) continue;
          const int64_t kv_len = random.pick<int64_t>({queries, queries + 1, 130, 1100, 2500});
          Draw d = tree_draw(random, keys, queries, std::max(kv_len, queries), group);
          d.query_dtype = d.kv_dtype = d.out_dtype = dtype;
          d.options.causal = random.chance(0.5);
          DrawnCall call(d, random);
          const TestContext& t =
              contexts()[static_cast<size_t>(random.integer(0, static_cast<int64_t>(contexts().size()) - 1))];
          const DrawnCall::Outputs out = call.make_outputs();
          const Status status = flash_attention_forward(t.context, call.inputs, out.tensors, d.options);
          ASSERT_TRUE(status.ok()) << status.message() << "\n  " << to_string(d);
          ASSERT_EQ(judge(call, out, t.context, 16, worst_ratio), "") << t.name;
          for (const TestContext* other : contexts_like(t)) {
            const DrawnCall::Outputs again = call.make_outputs();
            ASSERT_TRUE(flash_attention_forward(other->context, call.inputs, again.tensors, d.options).ok());
            ASSERT_EQ(again.differs_from(out), "") << t.name << " against " << other->name << "\n  " << to_string(d);
          }
        }
      }
    }
  }
}

// Each token of a tree sees what it would see as the last one of its path: that path's keys behind those of the context.
TEST(AttentionTree, ATokenIsTheEndOfItsPath) {
  Random random(seed() + 1);
  const int64_t context_len = 100, n = 8;
  ProblemOptions p;
  p.num_heads = 4, p.num_kv_heads = 2, p.query_len = n, p.kv_len = context_len + n, p.head_dim = p.value_head_dim = 24;
  Problem tree(p, random);
  tree.inputs.tree_mask = tensor_of(kTree);
  for (const TestContext& t : contexts_with_threads(2)) {
    const Outcome all = tree.run(t.context);
    ASSERT_TRUE(all.status.ok()) << all.status.message();
    for (int64_t i = 0; i < n; ++i) {
      const auto word = static_cast<uint64_t>(kTree[static_cast<size_t>(i)]);
      ProblemOptions path = p;
      path.query_len = 1, path.kv_len = context_len + std::popcount(word);
      Problem alone(path, random);
      const auto copy = [&](const Tensor& from, const Tensor& to, int64_t from_row, int64_t to_row) {
        for (int64_t h = 0; h < to.shape[1]; ++h) {
          for (int64_t d = 0; d < 24; ++d) {
            set(to.selected(0, 0).selected(0, h).selected(0, to_row), d,
                get(from.selected(0, 0).selected(0, h).selected(0, from_row), d));
          }
        }
      };
      copy(tree.query(), alone.query(), i, 0);
      int64_t to = 0;
      for (int64_t j = 0; j < context_len + n; ++j) {
        if (j >= context_len && (word >> (j - context_len)) % 2 == 0) continue;
        copy(tree.key(), alone.key(), j, to);
        copy(tree.value(), alone.value(), j, to++);
      }
      const Outcome one = alone.run(t.context);
      ASSERT_TRUE(one.status.ok());
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t d = 0; d < 24; ++d) {
          const double got = get(all.out->tensor().selected(0, 0).selected(0, h).selected(0, i), d);
          ASSERT_NEAR(got, get(one.out->tensor().selected(0, 0).selected(0, h).selected(0, 0), d), 2e-6)
              << t.name << " token " << i;
        }
      }
    }
  }
}

// A chain is the causal mask, and words of -1 are none: the same bits, where keys are read in place (one query, four)
// and where they are packed.
TEST(AttentionTree, ChainsAreCausalAndFullWordsHideNothing) {
  Random random(seed() + 2);
  for (const int64_t queries : {1, 4, 40}) {
    for (const int64_t kv_len : {50, 3000}) {
      ProblemOptions p;
      p.num_heads = 3, p.num_kv_heads = 1, p.query_len = queries, p.kv_len = kv_len;
      p.head_dim = p.value_head_dim = 16;
      for (const bool causal : {true, false}) {
        p.options.causal = causal;
        Problem problem(p, random);
        const std::vector<int64_t> words =
            causal ? chain(queries) : std::vector<int64_t>(static_cast<size_t>(queries), -1);
        AttentionInputs tree = problem.inputs;
        tree.tree_mask = tensor_of(words);
        for (const TestContext& t : contexts_with_threads(2)) {
          const Outcome without = problem.run(t.context), with = problem.run(t.context, tree);
          ASSERT_TRUE(with.status.ok()) << with.status.message();
          ASSERT_EQ(with.differs_from(without), "") << t.name << " queries " << queries << " keys " << kv_len;
        }
      }
    }
  }
}

// Draft tokens that are not on a path do not matter, whatever their bytes; those on it do.
TEST(AttentionTree, NanInADraftTokenReachesItsDescendantsOnly) {
  Random random(seed() + 3);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const int64_t kv_len : {8, 200}) {
    for (const int64_t heads : {1, 4}) {
      for (int64_t token = 0; token < 8; ++token) {
        ProblemOptions p;
        p.num_heads = heads, p.query_len = 8, p.kv_len = kv_len, p.head_dim = p.value_head_dim = 16;
        Problem problem(p, random);
        problem.inputs.tree_mask = tensor_of(kTree);
        for (int64_t d = 0; d < 16; ++d) {
          set(problem.key(), (kv_len - 8 + token) * 16 + d, nan);
          set(problem.value(), (kv_len - 8 + token) * 16 + d, nan);
        }
        for (const TestContext& t : contexts_with_threads(1)) {
          const Outcome r = problem.run(t.context);
          ASSERT_TRUE(r.status.ok());
          for (int64_t row = 0; row < heads * 8; ++row) {
            const bool on_path = (kTree[static_cast<size_t>(row % 8)] >> token & 1) != 0;
            ASSERT_EQ(std::isnan(get(r.out->tensor(), row * 16)), on_path)
                << t.name << " token " << token << " row " << row << " keys " << kv_len;
          }
        }
      }
    }
  }
}

// A chunk of a prompt beside trees, in one call.
TEST(AttentionTree, TreesBesideALongChunk) {
  Random random(seed() + 4);
  double worst_ratio = 0;
  for (const Keys keys : {Keys::varlen, Keys::norm_pages, Keys::panel_pages}) {
    Draw d = tree_draw(random, keys, 8, 700, 4);
    d.varlen_q = true;
    d.query_lens = {8, 150, 1, 60}, d.kv_lens = {700, 400, 50, 60};
    d.options.causal = true;
    DrawnCall call(d, random);
    for (const TestContext& t : contexts_with_threads(3)) {
      const DrawnCall::Outputs out = call.make_outputs();
      const Status status = flash_attention_forward(t.context, call.inputs, out.tensors, d.options);
      ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_EQ(judge(call, out, t.context, 60, worst_ratio), "") << t.name;
    }
  }
}

struct Refusal {
  std::vector<int64_t> words;
  int64_t queries, kv_len;
  const char* message;
};

TEST(AttentionTree, BadWordsAreRefusedBeforeAnythingIsWritten) {
  Random random(seed() + 5);
  Context context = fresh_context(1);
  const std::vector<int64_t> long_words(65, 1);
  const Refusal refusals[] = {
      {{1, 7, 2}, 3, 0, "tree_mask[0][0] is 1, but sequence 0 has kv_len = 2, fewer keys than its query_len = 3 draft"},
      {{1, 8, 2},
       3,
       9,
       "tree_mask[0][1] is 8, but sequence 0 has query_len = 3 draft tokens: bits from 3 on must be 0"},
      {{1, 2, -2}, 3, 9, "tree_mask[0][2] is -2, but sequence 0 has query_len = 3 draft tokens: bits from 3 on"},
      {long_words, 65, 99, "tree_mask[0][0] is 1, but sequence 0 has query_len = 65: of more than 64 queries"},
      {{1, 3}, 3, 9, "tree_mask dim 1 (query_len) is 2, but query set query_len = 3"},
  };
  for (const Refusal& refusal : refusals) {
    ProblemOptions p;
    p.query_len = refusal.queries, p.kv_len = refusal.kv_len == 0 ? 2 : refusal.kv_len;
    Problem problem(p, random);
    problem.inputs.tree_mask = tensor_of(refusal.words);
    const Outcome r = problem.run(context);
    EXPECT_EQ(r.status.code(), StatusCode::invalid_argument);
    EXPECT_NE(r.status.message().find(refusal.message), std::string::npos) << r.status.message();
    EXPECT_TRUE(std::isnan(get(r.out->tensor(), 0)));
  }
  ProblemOptions p;
  p.query_len = 2, p.kv_len = 4;
  Problem problem(p, random);
  const auto refused = [&](const AttentionInputs& in, const AttentionOptions& options, const char* message) {
    View out(DType::f32, 1, 1, 2, 1, Strides::bnsd);
    const Status status = flash_attention_forward(context, in, {.out = out.tensor()}, options);
    EXPECT_NE(status.message().find(message), std::string::npos) << status.message();
  };
  const std::vector<int64_t> words = {1, 3};
  const std::vector<int32_t> small = {1, 3}, lists = {0, 0}, offsets = {0, 1, 2}, columns = {0, 0};
  AttentionInputs in = problem.inputs;
  in.tree_mask = ConstTensor::contiguous(DType::i32, {1, 2}, small.data());
  refused(in, {}, "tree_mask is i32, but must be i64");
  in.tree_mask = tensor_of(words);
  refused(in, {.path = AttentionPath::standard}, "path = standard does not take a tree_mask");
  AttentionInputs listed = in;
  listed.sparse_indices = {ConstTensor::contiguous(DType::i32, {1, 2, 1, 1}, lists.data()), 1};
  refused(listed, {}, "tree_mask and sparse_indices are given, but only one may be");
  AttentionInputs masked = in;
  masked.block_mask = {ConstTensor::contiguous(DType::i32, {1, 1, 3}, offsets.data()),
                       ConstTensor::contiguous(DType::i32, {2}, columns.data()), 1, 4};
  refused(masked, {}, "tree_mask and block_mask are given, but only one may be");

  const Status backward = flash_attention_backward(context, in, {}, {}, {});
  EXPECT_EQ(backward.code(), StatusCode::unsupported);
  EXPECT_NE(backward.message().find("flash_attention_backward: tree_mask has no gradient"), std::string::npos);

  AttentionProblem of_plan;
  of_plan.query_len = of_plan.kv_len = 8, of_plan.has_tree_mask = true;
  of_plan.options.path = AttentionPath::standard;
  EXPECT_STREQ(plan_attention(of_plan, Machine()).reason, "tree_mask with path = standard");
  of_plan.options.path = AttentionPath::automatic;
  of_plan.sparse_indices = {1, 1};
  EXPECT_STREQ(plan_attention(of_plan, Machine()).reason, "tree_mask with block_mask or sparse_indices");
}

// One word for all sequences, and for all queries, in memory once; a batch of any size.
TEST(AttentionTree, WordsMayRepeatInMemory) {
  Random random(seed() + 6);
  ProblemOptions p;
  p.batch = 3, p.query_len = 4, p.kv_len = 20, p.head_dim = p.value_head_dim = 8;
  Problem problem(p, random);
  Context context = fresh_context(2);
  const std::vector<int64_t> one = {5}, all(12, 5);
  AttentionInputs repeated = problem.inputs, written = problem.inputs;
  repeated.tree_mask = tensor_of(one);
  repeated.tree_mask.shape[0] = 3, repeated.tree_mask.shape[1] = 4;
  repeated.tree_mask.strides[0] = repeated.tree_mask.strides[1] = 0;
  written.tree_mask = tensor_of(all, 3);
  const Outcome a = problem.run(context, repeated), b = problem.run(context, written);
  ASSERT_TRUE(a.status.ok() && b.status.ok()) << a.status.message();
  EXPECT_EQ(a.differs_from(b), "");
}

// A list of a tree's tiles: whole ones of the context, then one for the first runs of all rows, one for the second.
TEST(AttentionKvBlocks, ATreeCostsATileForEachRunOfItsBits) {
  using attention::KvBlocks;
  const attention::Visibility all{.kv_len = 136};
  attention::MaskCursor cursors[16];
  attention::MaskedRows masked{};
  masked.cursors = cursors, masked.key_step = 1;
  masked.tree = {kTree.data(), 1, 128};
  int64_t begin[8], end[8], own_begin[8], own_end[8];
  KvBlocks tiles(all, 0, 8, 1, {0, 1 << 20}, 64, begin, end, &masked);
  attention::KvTile tile{};
  std::vector<std::array<int64_t, 3>> list;
  std::vector<std::vector<int64_t>> seen(8);
  while (tiles.next(&tile, own_begin, own_end)) {
    list.push_back({tile.first_key, tile.count, tile.partial});
    for (size_t r = 0; r < 8; ++r) {
      const int64_t* from = tile.visible_begin != nullptr ? tile.visible_begin : begin;
      const int64_t* to = tile.visible_begin != nullptr ? tile.visible_end : end;
      for (int64_t key = tile.first_key; key < tile.first_key + tile.count; ++key) {
        if (!tile.partial || (key >= from[r] && key < to[r])) seen[r].push_back(key);
      }
    }
  }
  const std::vector<std::array<int64_t, 3>> wanted = {{0, 64, 0}, {64, 64, 0}, {128, 2, 1}, {130, 3, 1}, {133, 3, 1}};
  EXPECT_EQ(list.size(), wanted.size());
  EXPECT_EQ(list, wanted);
  for (size_t r = 0; r < 8; ++r) {
    std::vector<int64_t> keys;
    for (int64_t key = 0; key < 136; ++key) {
      if (key < 128 || (kTree[r] >> (key - 128) & 1) != 0) keys.push_back(key);
    }
    EXPECT_EQ(seen[r], keys) << "row " << r;
  }
}

}  // namespace
}  // namespace opst::test

// Sparse indices and ropes apart: what the lists of tiles hold, the shapes of models that select their keys, bits that
// must agree, rows without a key, plans, and what is refused. With every other option: attention_options_test.cc, and
// attention_byte_pages_test.cc for pages of eight bits.
#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "attention/selected_keys.h"
#include "attention/tests/drawn_call.h"

namespace opst::test {
namespace {

// The keys of a list by the definition, in its order.
std::vector<int64_t> listed(const std::vector<int32_t>& list, int64_t block_size, const attention::Visibility& v,
                            int64_t query) {
  std::vector<int64_t> keys;
  for (const int32_t x : list) {
    if (x < 0) break;
    for (int64_t key = x * block_size; key < std::min((x + 1) * block_size, v.kv_len); ++key) {
      if (key < v.prefix || (key >= query + v.low && key <= query + v.high)) keys.push_back(key);
    }
  }
  return keys;
}

TEST(AttentionSparseIndices, TilesHoldWhatTheListShows) {
  using attention::SelectedKeys;
  Random random(seed());
  for (int n = 0; n < 10'000; ++n) {
    attention::Visibility v{.kv_len = random.integer(0, 90)};
    if (random.chance(0.5)) v.low = random.integer(-50, 30);
    if (random.chance(0.5)) v.high = random.integer(-30, 50);
    if (random.chance(0.4)) v.prefix = random.integer(0, v.kv_len);
    const int64_t query = random.integer(0, 40), step = random.pick<int64_t>({1, 1, 4});
    const int64_t block_size = step * random.pick<int64_t>({1, 2, 8}), blocks = ceil_div(v.kv_len, block_size);
    std::vector<int32_t> list(static_cast<size_t>(blocks));
    std::iota(list.begin(), list.end(), 0);
    for (size_t i = list.size(); i > 1; --i) {
      std::swap(list[i - 1], list[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i) - 1))]);
    }
    list.resize(static_cast<size_t>(random.integer(0, blocks)));
    for (int64_t i = random.integer(0, 3); i > 0; --i) list.push_back(-1);
    const int64_t tile_keys = step * random.integer(1, 12), part = step * random.integer(1, 60);
    const bool by_runs = step > 1 || random.chance(0.3);
    const attention::IndexList entries = {list.data(), 1, static_cast<int64_t>(list.size()), block_size};
    std::vector<attention::KeyInterval> runs(static_cast<size_t>(tile_keys));
    int64_t own_begin[2], own_end[2];
    std::vector<int64_t> found;
    SCOPED_TRACE("draw " + std::to_string(n) + " of seed " + std::to_string(seed()));
    for (int64_t start = 0; start < entries.count * block_size; start += part) {
      SelectedKeys keys(entries, v, query, {start, start + part}, {tile_keys, by_runs, step, runs.data(), 2});
      for (attention::KvTile t{}; keys.next(&t, own_begin, own_end);) {
        ASSERT_GT(t.count, 0);
        ASSERT_LE(t.count, tile_keys);
        int64_t count = 0;
        for (const attention::KeyInterval& run : keys.runs_of(t)) {
          ASSERT_LT(run.begin, run.end);
          count += run.end - run.begin;
          for (int64_t key = run.begin; key < run.end; ++key) {
            if (!t.partial || (key >= t.visible_begin[1] && key < t.visible_end[1])) found.push_back(key);
          }
        }
        ASSERT_EQ(count, t.count);
        if (!by_runs) {
          ASSERT_FALSE(t.partial);
          continue;
        }
        ASSERT_EQ(keys.runs_of(t).size(), 1u);
        ASSERT_EQ(t.first_key, keys.runs_of(t)[0].begin);
        ASSERT_EQ(t.first_key % step, 0);
      }
    }
    ASSERT_EQ(found, listed(list, block_size, v, query));
  }
}

// Multi-head latent attention: one KV head whose values are the first 512 of its 576 columns. Groups that are read in
// place by one register tile and by several, and packed ones, whole and in parts.
TEST(AttentionSparseIndices, HeadsShareKeysAndValues) {
  Random random(seed() + 1);
  double worst_ratio = 0;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int64_t heads : {1, 5, 13, 16, 24, 40, 128}) {
      Draw d;
      d.draws_all = true;
      d.query_dtype = d.kv_dtype = d.out_dtype = dtype;
      d.num_heads = heads, d.head_dim = 512, d.value_head_dim = 512, d.rope_dim = 64;
      d.values_of_keys = true, d.rope_beside = heads % 2 == 0;
      d.keys = heads % 3 == 0 ? Keys::norm_pages : Keys::dense;
      d.query_lens = {3}, d.kv_lens = {150};
      d.index_block = random.pick<int64_t>({1, 16}), d.index_count = d.index_block == 1 ? 90 : 6;
      d.options.causal = true;
      d.options.block_q = heads == 40 ? 7 : 0;  // five in fact: a part of the group
      DrawnCall call(d, random);
      for (const TestContext& t : contexts_with_threads(2)) {
        const DrawnCall::Outputs out = call.make_outputs();
        const Status status = flash_attention_forward(t.context, call.inputs, out.tensors, d.options);
        ASSERT_TRUE(status.ok()) << status.message();
        ASSERT_EQ(judge(call, out, t.context, 12, worst_ratio), "") << t.name << ", " << heads << " heads";
      }
    }
  }
}

// A token that attends to a list long enough to be split.
TEST(AttentionSparseIndices, LongListsAreSplit) {
  Random random(seed() + 2);
  double worst_ratio = 0;
  for (const int64_t block : {1, 64}) {
    Draw d;
    d.draws_all = true;
    d.num_heads = 8, d.num_kv_heads = 2, d.head_dim = d.value_head_dim = 16;
    d.query_lens = {1, 1}, d.kv_lens = {4000, 3000};
    d.index_block = block, d.index_count = 2048 / block;
    DrawnCall call(d, random);
    for (const TestContext& t : contexts_with_threads(3)) {
      const Result<AttentionProblem> p = attention_problem(call.inputs, d.options);
      ASSERT_TRUE(p.ok()) << p.status().message();
      const AttentionPlan plan = plan_attention(p.value(), t.context.machine());
      ASSERT_GT(plan.kv_splits, 1);
      ASSERT_LT(plan.kv_splits * plan.keys_per_split, 2048 + plan.kv_splits * plan.block_kv);
      const DrawnCall::Outputs out = call.make_outputs();
      ASSERT_TRUE(flash_attention_forward(t.context, call.inputs, out.tensors, d.options).ok());
      ASSERT_EQ(judge(call, out, t.context, 16, worst_ratio), "") << t.name;
    }
  }
}

// A problem of one tensor per argument, for tests that change it.
struct ListProblem {
  Problem problem;
  std::vector<int32_t> indices;

  ListProblem(ProblemOptions p, Random& random, std::vector<int32_t> list, int64_t block_size)
      : problem(p, random), indices(std::move(list)) {
    const int64_t rows = p.batch * p.query_len * p.num_kv_heads;
    const int64_t count = static_cast<int64_t>(indices.size()) / rows;
    problem.inputs.sparse_indices.indices =
        ConstTensor::contiguous(DType::i32, {p.batch, p.query_len, p.num_kv_heads, count}, indices.data());
    problem.inputs.sparse_indices.block_size = block_size;
  }
};

// Q = 0 and V[j] = 2^j: outputs times the number of keys are sums of powers of two, exact in any order.
TEST(AttentionSparseIndices, OrderOfAListDoesNotMatterAndOtherKeysDoNot) {
  Random random(seed() + 3);
  ProblemOptions p;
  p.kv_len = 20, p.query_len = 2, p.head_dim = 8;
  for (const bool nan : {false, true}) {
    ListProblem a(p, random, {0, 4, 3, 1, 2, -1, -1, -1}, 4);
    ListProblem b(p, random, {3, 0, 1, 4, 2, -1, -1, -1}, 4);
    for (ListProblem* x : {&a, &b}) {
      fill(x->problem.query(), Fill::zeros, random);
      for (int64_t j = 0; j < p.kv_len; ++j) set(x->problem.value(), j, std::exp2(static_cast<double>(j)));
      if (!nan) continue;
      // Keys 8 to 11 are the second query's alone.
      for (int64_t j = 8; j < 12; ++j) set(x->problem.value(), j, std::numeric_limits<double>::quiet_NaN());
    }
    for (const TestContext& t : contexts_with_threads(2)) {
      const Outcome first = a.problem.run(t.context), second = b.problem.run(t.context);
      ASSERT_TRUE(first.status.ok() && second.status.ok()) << first.status.message() << second.status.message();
      double expected = 0;
      for (int64_t j = 0; j < 20; ++j) expected += j / 4 == 2 ? 0 : std::exp2(static_cast<double>(j)) / 16;
      ASSERT_EQ(get(first.out->tensor(), 0), expected);
      ASSERT_EQ(get(second.out->tensor(), 0), expected);
      ASSERT_EQ(std::isnan(get(first.out->tensor(), 1)), nan);
      if (!nan) {
        ASSERT_EQ(second.differs_from(first), "");
      }
    }
  }
}

// A list of all blocks in order is no list at all, to the bit where both read in place.
TEST(AttentionSparseIndices, AListOfEverythingIsDenseAttention) {
  Random random(seed() + 4);
  ProblemOptions p;
  p.batch = 2, p.num_heads = 4, p.num_kv_heads = 2, p.kv_len = 100, p.head_dim = 40, p.value_head_dim = 24;
  p.ragged = true;
  std::vector<int32_t> all;
  for (int i = 0; i < 4; ++i) all.insert(all.end(), {0, 1, 2, 3, 4, 5, 6});
  ListProblem lists(p, random, all, 16);
  for (int64_t row = 0; row < 4; ++row) {
    const int64_t blocks = ceil_div(lists.problem.length(row / 2), int64_t{16});
    std::fill(lists.indices.begin() + row * 7 + blocks, lists.indices.begin() + (row + 1) * 7, -1);
  }
  AttentionInputs dense = lists.problem.inputs;
  dense.sparse_indices = {};
  for (const TestContext& t : contexts_with_threads(2)) {
    const Outcome r = lists.problem.run(t.context);
    ASSERT_EQ(lists.problem.judge(r, t.context), "") << t.name;
    ASSERT_EQ(r.differs_from(lists.problem.run(t.context, dense)), "") << t.name;
    const Pages pages = lists.problem.paged(16, random);
    AttentionInputs paged = pages.inputs;
    paged.sparse_indices = lists.problem.inputs.sparse_indices;
    ASSERT_EQ(r.differs_from(lists.problem.run(t.context, paged)), "") << t.name;
  }
}

TEST(AttentionSparseIndices, NothingSelectedIsNothingSeen) {
  Random random(seed() + 5);
  ProblemOptions p;
  p.num_heads = 2, p.query_len = 2, p.kv_len = 9, p.head_dim = p.value_head_dim = 8;
  for (const std::vector<int32_t>& list : {std::vector<int32_t>{}, {-1, -1, -1, -1}}) {
    ListProblem x(p, random, list, 1);
    if (list.empty()) x.problem.inputs.sparse_indices.indices.data = nullptr;
    const TestContext& t = contexts().front();
    const Outcome r = x.problem.run(t.context);
    ASSERT_TRUE(r.status.ok()) << r.status.message();
    for (int64_t i = 0; i < 32; ++i) ASSERT_EQ(get(r.out->tensor(), i), 0);
    for (int64_t i = 0; i < 4; ++i) ASSERT_EQ(get(r.lse->tensor(), i), -HUGE_VAL);
  }
}

// What is selected decides, not how much there is to select from.
TEST(AttentionSparseIndices, PlansFollowTheList) {
  AttentionProblem p = {.query_dtype = DType::bf16,
                        .kv_dtype = DType::bf16,
                        .num_heads = 16,
                        .query_len = 64,
                        .kv_len = 65536,
                        .head_dim = 576,
                        .value_head_dim = 512};
  p.sparse_indices = {1, 2048};
  p.rope_dim = 64;
  for (const TestContext& t : contexts()) {
    const Machine& m = t.context.machine();
    const AttentionPlan plan = plan_attention(p, m);
    EXPECT_EQ(plan.block_q, 16);
    EXPECT_EQ(plan.num_tasks, 64 * plan.kv_splits);
    AttentionProblem longer = p;
    longer.kv_len = int64_t{1} << 30;
    EXPECT_EQ(to_string(plan_attention(longer, m)), to_string(plan));
    AttentionProblem many = p;
    many.num_heads = 128;
    EXPECT_EQ(plan_attention(many, m).kv_access, KvAccess::packed_per_task);
    EXPECT_EQ(plan_attention(many, m).block_q, 128);
    many.options.block_q = 100;
    EXPECT_EQ(plan_attention(many, m).block_q, 64);
    EXPECT_EQ(plan_attention(many, m).num_tasks, 128);
  }
}

struct Refusal {
  const char* name;
  std::function<void(ListProblem&)> spoil;
  std::string message;  // after "flash_attention_forward: "
};
const Refusal kRefusals[] = {
    {"out_of_range", [](ListProblem& x) { x.indices[7] = 5; },
     "sparse_indices.indices[0][2][0][1] is 5, but sequence 0 has 5 blocks of 4 keys (kv_len = 17); only -1 may stand "
     "for none"},
    {"far_out_of_range", [](ListProblem& x) { x.indices[0] = std::numeric_limits<int32_t>::max(); },
     "sparse_indices.indices[0][0][0][0] is 2147483647, but sequence 0 has 5 blocks of 4 keys (kv_len = 17); only -1 "
     "may stand for none"},
    {"below_minus_one", [](ListProblem& x) { x.indices[2] = -2; },
     "sparse_indices.indices[0][0][0][2] is -2, but sequence 0 has 5 blocks of 4 keys (kv_len = 17); only -1 may stand "
     "for none"},
    {"minus_one_in_the_middle", [](ListProblem& x) { x.indices[4] = -1; },
     "sparse_indices.indices[0][1][0][2] is 2, but sparse_indices.indices[0][1][0][1] = -1 ended the list"},
    {"repeated", [](ListProblem& x) { x.indices[5] = 4; },
     "sparse_indices.indices[0][1][0][2] is 4, as is sparse_indices.indices[0][1][0][0] of the same list"},
    {"repeated_by_stride", [](ListProblem& x) { x.problem.inputs.sparse_indices.indices.strides[3] = 0; },
     "sparse_indices.indices[0][0][0][1] is 0, as is sparse_indices.indices[0][0][0][0] of the same list"},
    {"count", [](ListProblem& x) { x.problem.inputs.sparse_indices.indices.shape[3] = -1; },
     "sparse_indices.indices dim 3 is -1, but must be >= 0"},
    {"queries", [](ListProblem& x) { x.problem.inputs.sparse_indices.indices.shape[1] = 2; },
     "sparse_indices.indices dim 1 (query_len) is 2, but query set query_len = 3"},
    {"kv_heads", [](ListProblem& x) { x.problem.inputs.sparse_indices.indices.shape[2] = 2; },
     "sparse_indices.indices dim 2 (num_kv_heads) is 2, but key set num_kv_heads = 1"},
    {"dtype", [](ListProblem& x) { x.problem.inputs.sparse_indices.indices.dtype = DType::i64; },
     "sparse_indices.indices is i64, but must be i32"},
    {"block_size", [](ListProblem& x) { x.problem.inputs.sparse_indices.block_size = 12; },
     "sparse_indices.block_size is 12, must be 1 or a power of two, at most 2^30"},
    {"block_size_zero", [](ListProblem& x) { x.problem.inputs.sparse_indices.block_size = 0; },
     "sparse_indices.block_size is 0, must be 1 or a power of two, at most 2^30"},
    {"block_mask",
     [](ListProblem& x) {
       x.problem.inputs.block_mask = {ConstTensor::contiguous(DType::i32, {1, 1, 4}, x.indices.data()),
                                      ConstTensor::contiguous(DType::i32, {9}, x.indices.data()), 1, 1};
     },
     "sparse_indices and block_mask are given, but only one may be"},
    {"rope_alone", [](ListProblem& x) { x.problem.inputs.query_rope = x.problem.inputs.query; },
     "query_rope and key_rope go together, but key_rope is not given"},
    {"rope_dims",
     [](ListProblem& x) {
       x.problem.inputs.query_rope = x.problem.inputs.query;
       x.problem.inputs.key_rope = x.problem.inputs.key.narrowed(3, 0, 3);
     },
     "key_rope dim 3 (rope_dim) is 3, but query_rope set rope_dim = 8"},
    {"rope_dtype",
     [](ListProblem& x) {
       x.problem.inputs.query_rope = x.problem.inputs.query;
       x.problem.inputs.key_rope = x.problem.inputs.key;
       x.problem.inputs.key_rope.dtype = DType::bf16;
     },
     "key_rope is bf16, but must be f32"},
    {"rope_too_wide",
     [](ListProblem& x) {
       for (ConstTensor* t : {&x.problem.inputs.query_rope, &x.problem.inputs.key_rope}) {
         *t = t == &x.problem.inputs.key_rope ? x.problem.inputs.key : x.problem.inputs.query;
         t->shape[3] = 761, t->strides[3] = 0;
       }
     },
     "head_dim + rope_dim is 769, must be 1 to 768"},
};

ListProblem right_call(Random& random, const AttentionOptions& options = {}) {
  ProblemOptions p;
  p.num_heads = 2, p.query_len = 3, p.kv_len = 17, p.head_dim = p.value_head_dim = 8;
  p.options = options;
  return ListProblem(p, random, {0, 1, -1, 4, 3, 2, 1, 0, -1}, 4);
}

TEST(AttentionSparseIndices, EveryRefusalHasItsMessageAndWritesNothing) {
  Random random(seed() + 6);
  const TestContext& t = contexts_with_threads(3).front();
  const auto expect_refused = [&](ListProblem& x, const std::string& message) {
    const Outcome r = x.problem.run(t.context);
    EXPECT_EQ(r.status.message(), "flash_attention_forward: " + message);
    for (const View* view : {r.out.get(), r.lse.get(), r.max.get(), r.sum.get()}) {
      for (int64_t i = 0; i < view->tensor().num_elements(); ++i) {
        ASSERT_TRUE(std::isnan(get(view->tensor(), i)));
      }
    }
  };
  for (const Refusal& refusal : kRefusals) {
    SCOPED_TRACE(refusal.name);
    ListProblem x = right_call(random);
    ASSERT_TRUE(x.problem.run(t.context).status.ok());
    refusal.spoil(x);
    expect_refused(x, refusal.message);
  }
  ListProblem standard = right_call(random, {.path = AttentionPath::standard});
  expect_refused(standard, "path = standard does not take sparse_indices");
}

// A list names the sequence's keys, not those of the longest one; varlen lists have a row for each token.
TEST(AttentionSparseIndices, BlocksBelongToTheSequence) {
  std::vector<float> numbers(1024, 0.5f), out(1024);
  std::vector<int32_t> ends = {0, 1, 3}, key_ends = {0, 4, 12}, indices = {0, 1, 2, -1, 0, 3};
  AttentionInputs in = {.query = ConstTensor::contiguous(DType::f32, {3, 2, 8}, numbers.data()),
                        .key = ConstTensor::contiguous(DType::f32, {12, 1, 8}, numbers.data()),
                        .value = ConstTensor::contiguous(DType::f32, {12, 1, 8}, numbers.data())};
  in.cu_seqlens_q = ConstTensor::contiguous(DType::i32, {3}, ends.data());
  in.cu_seqlens_k = ConstTensor::contiguous(DType::i32, {3}, key_ends.data());
  in.sparse_indices = {ConstTensor::contiguous(DType::i32, {3, 1, 2}, indices.data()), 2};
  const AttentionOutputs outputs = {.out = Tensor::contiguous(DType::f32, {3, 2, 8}, out.data())};
  const TestContext& t = contexts().front();
  ASSERT_TRUE(flash_attention_forward(t.context, in, outputs).ok());
  indices[1] = 2;
  EXPECT_EQ(flash_attention_forward(t.context, in, outputs).message(),
            "flash_attention_forward: sparse_indices.indices[0][0][1] is 2, but sequence 0 has 2 blocks of 2 keys "
            "(kv_len = 4); only -1 may stand for none");
}

TEST(AttentionSparseIndices, PagesThatCannotHoldIt) {
  Random random(seed() + 7);
  ProblemOptions p;
  p.kv_len = 40, p.head_dim = p.value_head_dim = 8;
  ListProblem x(p, random, {0, 1}, 16);
  const Pages norm = x.problem.paged(32, random);
  const PanelPages panels = panels_of(norm.inputs);
  AttentionInputs in = panels.inputs;
  in.sparse_indices = x.problem.inputs.sparse_indices;
  const TestContext& t = contexts().front();
  EXPECT_EQ(x.problem.run(t.context, in).status.message(),
            "flash_attention_forward: sparse_indices.block_size is 16, must be a multiple of 32 for panel32 pages");
  in.sparse_indices.block_size = 32;
  EXPECT_EQ(x.problem.run(t.context, in).status.message(), "");
  in.query_rope = x.problem.inputs.query;
  in.key_rope = norm.inputs.key;
  EXPECT_EQ(x.problem.run(t.context, in).status.message(),
            "flash_attention_forward: query_rope and key_rope are given, but pages are panel32, which hold no other "
            "columns");
}

}  // namespace
}  // namespace opst::test

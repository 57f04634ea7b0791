// One call for sequences of any lengths: decoding beside chunks of prompts beside fresh prompts beside trees of draft
// tokens. Each is attended as it would be alone, to the bit, and whatever its neighbours are.
#include <gtest/gtest.h>

#include "attention/layout.h"
#include "attention/tests/drawn_call.h"

namespace opst::test {
namespace {

// The part of a call that belongs to sequences [first, first + count), in memory of its own outputs.
class Part {
 public:
  Part(const DrawnCall& call, size_t first, size_t count) : call_(call) {
    const Draw& d = call.drawn();
    std::vector<int64_t> queries = {0}, keys = {0};
    int64_t key_start = 0;
    for (size_t b = 0; b < first + count; ++b) {
      if (b < first) {
        query_start_ += d.query_lens[b], key_start += d.kv_lens[b];
      } else {
        queries.push_back(queries.back() + d.query_lens[b]);
        keys.push_back(keys.back() + d.kv_lens[b]);
      }
    }
    const auto n = static_cast<int64_t>(count), from = static_cast<int64_t>(first);
    tokens_ = queries.back();
    query_offsets_ = queries, key_offsets_ = keys;
    const auto offsets = [&](const std::vector<int64_t>& sums) {
      return ConstTensor::contiguous(DType::i64, {n + 1}, sums.data());
    };
    inputs = call.inputs;
    inputs.query = inputs.query.narrowed(0, query_start_, tokens_);
    inputs.cu_seqlens_q = offsets(query_offsets_);
    if (d.keys == Keys::varlen) {
      inputs.key = inputs.key.narrowed(0, key_start, keys.back());
      inputs.value = inputs.value.narrowed(0, key_start, keys.back());
      if (d.rope_dim > 0) inputs.key_rope = inputs.key_rope.narrowed(0, key_start, keys.back());
      inputs.cu_seqlens_k = offsets(key_offsets_);
    } else {
      inputs.kv_lengths = inputs.kv_lengths.narrowed(0, from, n);
      inputs.block_table = inputs.block_table.narrowed(0, from, n);
    }
    if (d.prefix) inputs.prefix = inputs.prefix.narrowed(0, from, n);
    if (d.tree) inputs.tree_mask = inputs.tree_mask.narrowed(0, query_start_, tokens_);
    if (d.rope_dim > 0) inputs.query_rope = inputs.query_rope.narrowed(0, query_start_, tokens_);
    if (d.index_block > 0) {
      inputs.sparse_indices.indices = inputs.sparse_indices.indices.narrowed(0, query_start_, tokens_);
    }
  }
  // "" where the call of the part alone writes what the whole call has written for it.
  std::string differs(Context& context, const DrawnCall::Outputs& whole) const {
    const DrawnCall::Outputs alone = call_.make_outputs();
    const auto part_of = [&](const AttentionOutputs& t) {
      return AttentionOutputs{
          t.out.narrowed(0, query_start_, tokens_), t.softmax_lse.narrowed(1, query_start_, tokens_),
          t.softmax_max.narrowed(1, query_start_, tokens_), t.softmax_sum.narrowed(1, query_start_, tokens_)};
    };
    const AttentionOutputs mine = part_of(alone.tensors), theirs = part_of(whole.tensors);
    const Status status = flash_attention_forward(context, inputs, mine, call_.drawn().options);
    if (!status.ok()) return status.message();
    for (const auto& [a, b, name] :
         {std::tuple(mine.out, theirs.out, "out"), std::tuple(mine.softmax_lse, theirs.softmax_lse, "softmax_lse"),
          std::tuple(mine.softmax_max, theirs.softmax_max, "softmax_max"),
          std::tuple(mine.softmax_sum, theirs.softmax_sum, "softmax_sum")}) {
      const Comparison c = compare_bits(a, b, {.name = name});
      if (!c.ok) return c.message;
    }
    return "";
  }

  AttentionInputs inputs;

 private:
  const DrawnCall& call_;
  int64_t query_start_ = 0, tokens_ = 0;
  std::vector<int64_t> query_offsets_, key_offsets_;
};

// Decoding over few and many keys, a tree, chunks on a context that is split and on one that is not, fresh prompts of a
// tile of keys and of several, an empty sequence, and a sequence without keys.
Draw mixed_draw(Keys keys, DType dtype, int64_t num_heads, int64_t num_kv_heads) {
  Draw d;
  d.draws_all = d.for_forward = d.tree = true;
  d.query_dtype = d.kv_dtype = d.out_dtype = dtype;
  d.num_heads = num_heads, d.num_kv_heads = num_kv_heads;
  d.head_dim = d.value_head_dim = 16;
  d.keys = keys;
  d.block_size = keys == Keys::panel_pages ? 32 : 16;
  if (keys == Keys::panel_pages) d.options.page_layout = PageLayout::panel32;
  d.varlen_q = true;
  d.rows_behind = 2;
  d.query_lens = {1, 70, 1, 0, 300, 1, 8, 30, 45, 1, 260, 20, 60};
  d.kv_lens = {40, 70, 5000, 10, 2600, 0, 1500, 30, 45, 700, 260, 2300, 2100};
  d.options.causal = true;
  return d;
}

// Whatever else a call has: the whole, each sequence alone, and neighbours in fours.
TEST(AttentionMixedBatch, EachSequenceHasTheBitsThatItHasAlone) {
  Random random(seed());
  double worst_ratio = 0;
  for (const Keys keys : {Keys::varlen, Keys::norm_pages, Keys::panel_pages}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      if (keys == Keys::panel_pages && dtype == DType::f16) continue;  // no such pages
      for (const int64_t kv_heads : {1, 2}) {
        Draw d = mixed_draw(keys, dtype, 4, kv_heads);
        d.prefix = random.chance(0.3);
        if (random.chance(0.3)) d.options.window_left = random.pick<int64_t>({100, 1500});
        DrawnCall call(d, random);
        for (const TestContext& t : contexts_with_threads(2)) {
          if (!exhaustive() && random.chance(0.5)) continue;
          const DrawnCall::Outputs whole = call.make_outputs();
          const Status status = flash_attention_forward(t.context, call.inputs, whole.tensors, d.options);
          ASSERT_TRUE(status.ok()) << status.message();
          ASSERT_EQ(judge(call, whole, t.context, 40, worst_ratio), "") << t.name;
          for (const size_t count : {size_t{1}, size_t{4}}) {
            for (size_t first = 0; first + count <= d.query_lens.size(); first += count) {
              const Part part(call, first, count);
              ASSERT_EQ(part.differs(t.context, whole), "")
                  << t.name << " sequences " << first << " + " << count << "\n  " << to_string(d);
            }
          }
        }
      }
    }
  }
}

// With any options but those of which more sequences are known to change bits.
TEST(AttentionMixedBatch, EachSequenceOfRandomCallsHasTheBitsThatItHasAlone) {
  Random random(seed() + 5);
  const int draws = static_cast<int>((exhaustive() ? 3000 : 120) * kEffort);
  for (int n = 0; n < draws; ++n) {
    Draw d = draw_all(random, true);
    const bool fits_panels = d.keys == Keys::panel_pages;
    d.varlen_q = true;
    if (!fits_panels) d.keys = random.pick({Keys::varlen, Keys::norm_pages});
    d.options.shared_prefix = 0;
    d.mask_heads = 0, d.drop_mask = d.slopes_of_batch = d.mask_dims[0] = d.bias_dims[0] = false;
    d.options.dropout = {};
    if (random.chance(0.6)) d.options.block_q = 0;
    if (random.chance(0.6)) d.options.block_kv = 0;
    d.query_lens.clear(), d.kv_lens.clear();
    for (int64_t b = random.integer(2, 6); b > 0; --b) {
      d.query_lens.push_back(random.pick<int64_t>({0, 1, 1, 2, 4, 7, 12, 20, 40, 130}));
      d.kv_lens.push_back(random.pick<int64_t>({0, 5, 60, 500, 1100, 1600, 2300}));
    }
    d.shared_blocks.clear();
    if (random.chance(0.5)) d.options.window_left = random.integer(0, 2000);
    DrawnCall call(d, random);
    const auto last = static_cast<int64_t>(contexts().size()) - 1;
    const TestContext& t = contexts()[static_cast<size_t>(random.integer(0, last))];
    const DrawnCall::Outputs whole = call.make_outputs();
    const Status status = flash_attention_forward(t.context, call.inputs, whole.tensors, d.options);
    ASSERT_TRUE(status.ok()) << status.message() << "\n  " << to_string(d);
    for (size_t b = 0; b < d.query_lens.size(); ++b) {
      ASSERT_EQ(Part(call, b, 1).differs(t.context, whole), "")
          << "draw " << n << " " << t.name << " sequence " << b << "\n  " << to_string(d);
    }
  }
}

// What decides about splits and about reading in place is the sequence's own, where another has more rows: the keys of a
// window, for each of which (of length 920 to 1060) a row more may make a part more; register tiles of f64; block_q, by
// which a tree's tiles are packed for one block or whole for several, and panels are read for few rows or for more.
TEST(AttentionMixedBatch, ALongerNeighbourChangesNothing) {
  Random random(seed() + 4);
  const auto check = [&](DType dtype, int64_t window, int64_t block_q, const std::vector<int64_t>& query_lens,
                         bool tree = false, Keys keys = Keys::varlen) {
    Draw d;
    d.draws_all = d.for_forward = true, d.tree = tree;
    d.query_dtype = d.kv_dtype = d.out_dtype = dtype;
    d.head_dim = d.value_head_dim = 16;
    d.keys = keys, d.varlen_q = true;
    if (keys == Keys::panel_pages) d.block_size = 32, d.options.page_layout = PageLayout::panel32;
    d.query_lens = query_lens, d.kv_lens.assign(query_lens.size(), 3000);
    d.options.causal = true, d.options.window_left = window, d.options.block_q = block_q;
    DrawnCall call(d, random);
    for (const TestContext& t : contexts_with_threads(2)) {
      const DrawnCall::Outputs whole = call.make_outputs();
      ASSERT_TRUE(flash_attention_forward(t.context, call.inputs, whole.tensors, d.options).ok());
      for (size_t b = 0; b < query_lens.size(); ++b) {
        ASSERT_EQ(Part(call, b, 1).differs(t.context, whole), "") << t.name << "\n  " << to_string(d);
      }
    }
  };
  for (int64_t window = 920; window < 1060; window += 7) {
    check(DType::f32, window, 0, {1, 4});
    check(DType::f32, window, 0, {20, 120});
  }
  check(DType::f64, kUnbounded, 0, {1, 6, 11});
  check(DType::f32, kUnbounded, 3, {2, 4});
  for (int n = 0; n < 4; ++n) check(DType::f32, kUnbounded, 38, {14, 40}, true);
  check(DType::f32, kUnbounded, 2, {8, 48}, false, Keys::panel_pages);
}

// The task that finishes the last part of a block joins the parts: whichever it is, in the order of the keys.
TEST(AttentionMixedBatch, TheSameBitsForAnyThreads) {
  Random random(seed() + 1);
  for (const Keys keys : {Keys::varlen, Keys::norm_pages, Keys::panel_pages}) {
    const Draw d = mixed_draw(keys, DType::f32, 4, 1);
    DrawnCall call(d, random);
    Context one = fresh_context(1);
    const DrawnCall::Outputs first = call.make_outputs();
    ASSERT_TRUE(flash_attention_forward(one, call.inputs, first.tensors, d.options).ok());
    for (const int threads : {2, 3, 5}) {
      Context many = fresh_context(threads);
      for (int n = 0; n < 3; ++n) {
        const DrawnCall::Outputs again = call.make_outputs();
        ASSERT_TRUE(flash_attention_forward(many, call.inputs, again.tensors, d.options).ok());
        ASSERT_EQ(again.differs_from(first), "") << threads << " threads";
      }
    }
  }
}

// The sequences of a dense batch, too: the number of parts does not follow from their number.
TEST(AttentionMixedBatch, ABatchSplitsAsItsSequencesDo) {
  for (const int64_t query_len : {1, 200}) {
    AttentionProblem p;
    p.num_heads = 4, p.num_kv_heads = 2, p.query_len = query_len, p.kv_len = 20000, p.head_dim = p.value_head_dim = 64;
    const Machine machine = detect_machine(detect_isa());
    const AttentionPlan one = plan_attention(p, machine);
    EXPECT_GT(one.kv_splits, 1);
    p.batch = 50;
    const AttentionPlan many = plan_attention(p, machine);
    EXPECT_EQ(many.kv_splits, one.kv_splits);
    EXPECT_EQ(many.keys_per_split, one.keys_per_split);
    EXPECT_EQ(many.num_tasks, 50 * one.num_tasks);
  }
}

// Shared tiles of split keys go in waves, as those of others do: 40 sequences take no more packed memory than two waves.
TEST(AttentionMixedBatch, WavesOfSplitKeysShareTheirMemory) {
  AttentionProblem p;
  p.query_len = 250, p.kv_len = 8192, p.head_dim = p.value_head_dim = 128;
  const Machine machine = detect_machine(detect_isa());
  p.batch = 2;
  const AttentionPlan two = plan_attention(p, machine);
  ASSERT_EQ(two.kv_access, KvAccess::packed_shared);
  ASSERT_GT(two.kv_splits, 1);
  p.batch = 40;
  EXPECT_LT(plan_attention(p, machine).scratch_bytes_shared, two.scratch_bytes_shared + 40 * 64 * 8);
}

// Multi-head latent attention: values are the first columns of the keys' rows, which are read in place by more rows than
// others are. The same values in memory of their own give what the view gives where both are read in place.
TEST(AttentionMixedBatch, ValuesOfKeysAreReadOnce) {
  Random random(seed() + 3);
  double worst_ratio = 0;
  for (const Keys keys : {Keys::dense, Keys::varlen, Keys::norm_pages}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const int64_t heads : {8, 16, 128}) {
        Draw d;
        d.draws_all = d.for_forward = d.values_of_keys = true;
        d.query_dtype = d.kv_dtype = d.out_dtype = dtype;
        d.num_heads = heads, d.head_dim = 576, d.value_head_dim = 512;
        d.keys = keys;
        d.varlen_q = keys != Keys::dense;
        d.query_lens = {1, 1}, d.kv_lens = {heads == 16 ? 1030 : 140, 77};
        if (d.varlen_q) d.query_lens[1] = 3;
        d.options.causal = true;
        DrawnCall call(d, random);
        const Result<AttentionProblem> problem = attention_problem(call.inputs, d.options);
        ASSERT_TRUE(problem.ok()) << problem.status().message();
        ASSERT_TRUE(problem.value().values_of_keys);
        AttentionProblem one = problem.value();
        one.query_len = 1;
        const TestContext& t =
            contexts()[static_cast<size_t>(random.integer(0, static_cast<int64_t>(contexts().size()) - 1))];
        // Of bf16 packed pairs may be multiplied at twice the rate: then no more rows than others.
        const attention::Geometry& g =
            attention::geometry_of(t.context.machine().isa, attention::choose_product(one, t.context.machine()));
        EXPECT_EQ(plan_attention(one, t.context.machine()).kv_access == KvAccess::in_place,
                  heads <= (g.step > 1 ? g.tile_rows : 24));
        const DrawnCall::Outputs out = call.make_outputs();
        ASSERT_TRUE(flash_attention_forward(t.context, call.inputs, out.tensors, d.options).ok());
        ASSERT_EQ(judge(call, out, t.context, 8, worst_ratio), "") << t.name;
      }
    }
  }
  // What is no view: other memory, more columns than the keys have, rows further apart.
  std::vector<float> memory(4096), other(4096);
  const Tensor key = Tensor::contiguous(DType::f32, {1, 1, 10, 16}, memory.data());
  const AttentionInputs in = {.query = key, .key = key, .value = key.narrowed(3, 0, 8)};
  const auto of_keys = [&](const ConstTensor& value) {
    AttentionInputs with = in;
    with.value = value;
    return attention_problem(with, {}).value().values_of_keys;
  };
  EXPECT_TRUE(of_keys(in.value));
  EXPECT_TRUE(of_keys(key));
  EXPECT_FALSE(of_keys(Tensor::contiguous(DType::f32, {1, 1, 10, 16}, other.data())));
  EXPECT_FALSE(of_keys(key.narrowed(3, 8, 8)));
  EXPECT_FALSE(of_keys(Tensor::contiguous(DType::f32, {1, 1, 10, 8}, memory.data())));
}

// Cumulative lengths 7 and 16, half precision, head_dim 72, no mask at all.
TEST(AttentionMixedBatch, B67_PackedSequencesWithoutAMask) {
  Random random(seed() + 2);
  double worst_ratio = 0;
  Draw d;
  d.query_dtype = d.kv_dtype = d.out_dtype = DType::f16;
  d.num_heads = d.num_kv_heads = 2, d.head_dim = d.value_head_dim = 72;
  d.varlen_q = true, d.keys = Keys::varlen;
  d.query_lens = d.kv_lens = {7, 9};
  DrawnCall call(d, random);
  for (const TestContext& t : contexts_with_threads(2)) {
    const DrawnCall::Outputs out = call.make_outputs();
    ASSERT_TRUE(flash_attention_forward(t.context, call.inputs, out.tensors, d.options).ok());
    ASSERT_EQ(judge(call, out, t.context, 64, worst_ratio), "") << t.name;
  }
}

}  // namespace
}  // namespace opst::test

// Questions with exact answers: which keys a row sees, where a page is, and that neither threads nor pages nor levels
// change a bit.
//
// The probe: with Q = 0 all visible keys weigh the same, and with V[j] = 2^j the output times the count of visible keys
// is their set, an integer.
#include <gtest/gtest.h>

#include "attention/tests/attention_problem.h"

namespace opst::test {
namespace {

std::vector<AttentionOptions> ways() {
  std::vector<AttentionOptions> list;
  for (const AttentionPath path : {AttentionPath::automatic, AttentionPath::flash, AttentionPath::standard}) {
    for (const int64_t block_q : {0, 1, 4}) {
      for (const int64_t block_kv : {0, 1, 7, 32}) {
        AttentionOptions o;
        o.path = path, o.block_q = block_q, o.block_kv = block_kv;
        list.push_back(o);
      }
    }
  }
  return list;
}

ProblemOptions probe_options(int64_t query_len, int64_t kv_len) {
  ProblemOptions p;
  p.query_len = query_len, p.kv_len = kv_len, p.head_dim = 3;
  p.query_fill = Fill::zeros;
  return p;
}

void fill_probe(Problem& problem) {
  for (int64_t i = 0; i < problem.value().num_elements(); ++i) {
    set(problem.value(), i,
        std::ldexp(1.0, static_cast<int>(i / problem.options().value_head_dim % problem.options().kv_len)));
  }
}

// Expected bit sets, written from the definition: query i sees j <= i, or j <= i + kv_len - query_len.
std::vector<double> expected_sets(int64_t query_len, int64_t kv_len, bool causal, CausalAlignment alignment) {
  std::vector<double> sets;
  for (int64_t i = 0; i < query_len; ++i) {
    double set_of_keys = 0;
    for (int64_t j = 0; j < kv_len; ++j) {
      const bool visible = !causal || j <= (alignment == CausalAlignment::top_left ? i : i + kv_len - query_len);
      if (visible) set_of_keys += std::ldexp(1.0, static_cast<int>(j));
    }
    sets.push_back(set_of_keys);
  }
  return sets;
}

TEST(AttentionProbe, EveryCausalRowSeesExactlyItsKeys) {
  Random sample(seed());
  for (const int64_t query_len : {1, 2, 3, 5, 8, 13, 24, 40}) {
    for (const int64_t kv_len : {1, 2, 5, 7, 8, 16, 17, 23}) {
      for (const bool causal : {false, true}) {
        for (const CausalAlignment alignment : {CausalAlignment::top_left, CausalAlignment::bottom_right}) {
          const std::vector<double> sets = expected_sets(query_len, kv_len, causal, alignment);
          for (const AttentionOptions& way : ways()) {
            ProblemOptions p = probe_options(query_len, kv_len);
            p.options = way;
            p.options.causal = causal, p.options.alignment = alignment;
            Random random(1);
            if (!exhaustive() && !sample.chance(0.3 * kEffort)) continue;
            Problem problem(p, random);
            fill_probe(problem);
            for (const TestContext& t : contexts_with_threads(2)) {
              const Outcome r = problem.run(t.context);
              ASSERT_TRUE(r.status.ok()) << r.status.message();
              for (int64_t i = 0; i < query_len; ++i) {
                const double keys = sets[static_cast<size_t>(i)];
                const double count = static_cast<double>(__builtin_popcountll(static_cast<uint64_t>(keys)));
                ASSERT_EQ(std::nearbyint(get(r.out->tensor(), i) * count), keys)
                    << "row " << i << ", " << t.name << ", " << to_string(p);
                ASSERT_NEAR(get(r.out->tensor(), i) * count, keys, keys * 0x1p-22);
                ASSERT_EQ(get(r.sum->tensor(), i), count) << t.name << to_string(p);
                ASSERT_EQ(get(r.max->tensor(), i), count > 0 ? 0 : -HUGE_VAL);
              }
            }
          }
        }
      }
    }
  }
}

// One-hot values answer the same question at any length.
TEST(AttentionProbe, LongRowsSeeExactlyTheirKeys) {
  constexpr int64_t kKeys = 257;
  for (const int64_t query_len : {1, 3, 100, 257, 300}) {
    for (const CausalAlignment alignment : {CausalAlignment::top_left, CausalAlignment::bottom_right}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        ProblemOptions p = probe_options(query_len, kKeys);
        p.query_dtype = p.kv_dtype = dtype;
        p.value_head_dim = kKeys;
        p.value_fill = Fill::zeros;
        p.options.causal = true, p.options.alignment = alignment;
        Random random(1);
        Problem problem(p, random);
        for (int64_t j = 0; j < kKeys; ++j) set(problem.value(), j * kKeys + j, 1);
        for (const TestContext& t : contexts_with_threads(2)) {
          const Outcome r = problem.run(t.context);
          for (int64_t i = 0; i < query_len; ++i) {
            const int64_t last = alignment == CausalAlignment::top_left ? i : i + kKeys - query_len;
            const auto count = static_cast<double>(std::clamp<int64_t>(last + 1, 0, kKeys));
            for (int64_t j = 0; j < kKeys; ++j) {
              const double weight = get(r.out->tensor(), i * kKeys + j);
              if (j > last) {
                ASSERT_EQ(weight, 0) << t.name << ", row " << i << ", key " << j;
              } else {
                ASSERT_NEAR(weight * count, 1, 1e-6) << t.name << ", row " << i << ", key " << j;
              }
            }
          }
        }
      }
    }
  }
}

// Scores are 0 for some keys and -200 or less for all others, so every exponential is exactly 1 or 0 and the result is
// an average of integers: the same bits on every level, path and block size.
TEST(AttentionExact, HardChoicesOfIntegersAgreeOnAllLevels) {
  Random random(seed());
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const int64_t query_len : {1, 5, 30}) {
      for (const int64_t kv_len : {1, 40, 333, 1100}) {
        ProblemOptions p;
        p.query_dtype = p.kv_dtype = p.out_dtype = dtype;
        p.num_heads = 2, p.query_len = query_len, p.kv_len = kv_len, p.head_dim = 17, p.value_head_dim = 35;
        p.query_fill = Fill::ones;
        p.value_fill = Fill::small_integers;
        p.options.causal = random.chance(0.5);
        p.options.softmax_scale = 1.0f;
        Problem first(p, random);
        for (int64_t j = 0; j < kv_len; ++j) {
          const double score = j == 0 || random.chance(0.1) ? 0.0 : -static_cast<double>(random.integer(20, 100));
          for (int64_t d = 0; d < p.head_dim; ++d) set(first.key(), j * p.head_dim + d, score);
        }
        const Outcome expected = first.run(contexts().front().context);
        ASSERT_EQ(first.judge(expected, contexts().front().context), "");
        for (const AttentionOptions& way : ways()) {
          if (!random.chance(0.3 * kEffort)) continue;
          ProblemOptions other = p;
          other.options.path = way.path, other.options.block_q = way.block_q, other.options.block_kv = way.block_kv;
          Problem problem(other, random);
          copy(first.query(), problem.query());
          copy(first.key(), problem.key());
          copy(first.value(), problem.value());
          for (const TestContext& t : contexts_with_threads(2)) {
            ASSERT_EQ(problem.run(t.context).differs_from(expected), "") << t.name << "\n" << to_string(other);
          }
        }
      }
    }
  }
}

// Large enough that every thread has work, with parts of the keys and waves of heads.
TEST(AttentionExact, ThreadsDoNotChangeABit) {
  Random random(seed() + 1);
  struct Shape {
    int64_t batch, heads, kv_heads, query_len, kv_len;
  };
  for (const Shape& shape : {Shape{1, 4, 4, 1, 3000}, Shape{2, 6, 2, 3, 1100}, Shape{1, 1, 1, 200, 2500},
                             Shape{3, 4, 2, 97, 300}, Shape{1, 24, 1, 2, 2048}}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
      for (const AttentionPath path : {AttentionPath::automatic, AttentionPath::standard}) {
        if (!random.chance(kEffort)) continue;
        ProblemOptions p;
        p.query_dtype = p.kv_dtype = p.out_dtype = dtype;
        p.batch = shape.batch, p.num_heads = shape.heads, p.num_kv_heads = shape.kv_heads;
        p.query_len = shape.query_len, p.kv_len = shape.kv_len;
        p.head_dim = 24, p.value_head_dim = 20;
        p.ragged = random.chance(0.5);
        p.options.causal = random.chance(0.5);
        p.options.path = path;
        Problem problem(p, random);
        // Consecutive contexts differ in threads only.
        Outcome first;
        std::string group;
        for (const TestContext& t : contexts()) {
          const std::string its_group = to_string(t.context.machine());
          Outcome r = problem.run(t.context);
          if (its_group == group) {
            ASSERT_EQ(r.differs_from(first), "") << t.name << "\n" << to_string(p);
          } else {
            group = its_group;
            ASSERT_EQ(problem.judge(r, t.context, 8), "");
            first = std::move(r);
          }
        }
      }
    }
  }
}

TEST(AttentionPages, EqualContiguousKeysBitForBit) {
  Random random(seed() + 2);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
    for (const int64_t query_len : {1, 4, 40}) {
      for (const int64_t kv_len : {1, 31, 300, 1300}) {
        ProblemOptions p;
        p.query_dtype = p.kv_dtype = p.out_dtype = dtype;
        p.batch = 2, p.num_heads = 4, p.num_kv_heads = 2, p.query_len = query_len, p.kv_len = kv_len;
        p.head_dim = 24, p.value_head_dim = 33;
        p.ragged = random.chance(0.7);
        p.options.causal = random.chance(0.7);
        p.options.block_kv = random.pick<int64_t>({0, 0, 5, 160});
        p.options.path = random.pick({AttentionPath::automatic, AttentionPath::standard});
        Problem problem(p, random);
        std::vector<Outcome> expected;
        for (const TestContext& t : contexts_with_threads(2)) expected.push_back(problem.run(t.context));
        for (const int64_t block_size : {1, 8, 16, 33, 48, 128, 256}) {
          const Pages pages = problem.paged(block_size, random, random.chance(0.5));
          size_t i = 0;
          for (const TestContext& t : contexts_with_threads(2)) {
            const Outcome r = problem.run(t.context, pages.inputs);
            ASSERT_TRUE(r.status.ok()) << r.status.message();
            ASSERT_EQ(r.differs_from(expected[i++]), "") << "block_size " << block_size << ", " << t.name << "\n"
                                                         << to_string(p);
          }
        }
      }
    }
  }
}

TEST(AttentionPages, B65_TilesThatDoNotDividePages) {
  Random random(seed() + 3);
  ProblemOptions p;
  p.batch = 2, p.num_heads = 12, p.num_kv_heads = 2, p.query_len = 1, p.kv_len = 512,
  p.head_dim = p.value_head_dim = 128;
  for (const int64_t block_kv : {0, 160}) {
    p.options.block_kv = block_kv;
    Problem problem(p, random);
    std::vector<int32_t> lengths = {300, 512};
    problem.inputs.kv_lengths = ConstTensor::contiguous(DType::i32, {2}, lengths.data());
    for (const int64_t block_size : {1, 8, 16, 48, 128, 256}) {
      Pages pages = problem.paged(block_size, random);
      pages.inputs.kv_lengths = problem.inputs.kv_lengths;
      for (const TestContext& t : contexts_with_threads(2)) {
        ASSERT_EQ(problem.run(t.context, pages.inputs).differs_from(problem.run(t.context)), "")
            << t.name << ", block_size " << block_size;
      }
    }
  }
}

// Hand-made tables over a cache of one head with block_size 4.
struct SmallCache {
  explicit SmallCache(int64_t num_blocks, int64_t block_size, Random& random)
      : key(DType::f32, num_blocks, block_size, 1, 8, Strides::bnsd),
        value(DType::f32, num_blocks, block_size, 1, 8, Strides::bnsd) {
    fill(key.tensor(), Fill::normal, random);
    fill(value.tensor(), Fill::normal, random);
  }
  View key, value;
};

TEST(AttentionPages, B62_DuplicateAndSharedBlocksAreLegal) {
  Random random(seed() + 4);
  SmallCache cache(4, 4, random);
  const std::vector<int32_t> tables = {1, 1, 2, 3, 2, 1}, lengths = {11, 9};
  ProblemOptions p;
  p.batch = 2, p.query_len = 2, p.kv_len = 12, p.head_dim = p.value_head_dim = 8;
  Problem problem(p, random);
  AttentionInputs paged{.query = problem.query(), .key = cache.key.tensor(), .value = cache.value.tensor()};
  paged.block_table = ConstTensor::contiguous(DType::i32, {2, 3}, tables.data());
  paged.kv_lengths = ConstTensor::contiguous(DType::i32, {2}, lengths.data());
  for (int64_t b = 0; b < 2; ++b) {  // the copied cache
    for (int64_t j = 0; j < 12; ++j) {
      const int64_t block = tables[static_cast<size_t>(b * 3 + j / 4)];
      copy(cache.key.tensor().selected(0, block).selected(0, j % 4).selected(0, 0),
           problem.key().selected(0, b).selected(0, 0).selected(0, j));
      copy(cache.value.tensor().selected(0, block).selected(0, j % 4).selected(0, 0),
           problem.value().selected(0, b).selected(0, 0).selected(0, j));
    }
  }
  problem.inputs.kv_lengths = paged.kv_lengths;
  for (const TestContext& t : contexts_with_threads(2)) {
    const Outcome r = problem.run(t.context, paged);
    ASSERT_TRUE(r.status.ok()) << r.status.message();
    ASSERT_EQ(r.differs_from(problem.run(t.context)), "");
    ASSERT_EQ(problem.judge(r, t.context), "");
  }
}

TEST(AttentionPages, B64_StaleTailsOfTheTableAreNeverRead) {
  Random random(seed() + 5);
  SmallCache cache(4, 16, random);
  const std::vector<int32_t> stale = {3, 1 << 30, -7, 1 << 30}, two = {3, 0, -7, 1 << 30}, none = {-7, -7, -7, -7};
  for (const auto& [length, table] :
       {std::pair(5, stale), std::pair(16, stale), std::pair(17, two), std::pair(0, none)}) {
    for (const int64_t query_len : {1, 20}) {
      ProblemOptions p;
      p.query_len = query_len, p.kv_len = length, p.head_dim = p.value_head_dim = 8;
      Problem problem(p, random);
      for (int64_t j = 0; j < length; ++j) {
        const int64_t block = table[static_cast<size_t>(j / 16)];
        copy(cache.key.tensor().selected(0, block).selected(0, j % 16).selected(0, 0),
             problem.key().selected(0, 0).selected(0, 0).selected(0, j));
        copy(cache.value.tensor().selected(0, block).selected(0, j % 16).selected(0, 0),
             problem.value().selected(0, 0).selected(0, 0).selected(0, j));
      }
      // The table ends on a forbidden page where its used entries end, in memory that holds no more.
      const int64_t used = ceil_div(length, 16);
      GuardedBuffer entries(std::max<int64_t>(used, 1) * 4);
      std::copy_n(table.begin(), std::max<int64_t>(used, 1), static_cast<int32_t*>(entries.data()));
      const std::vector<int64_t> lengths = {length};
      for (const TestContext& t : contexts_with_threads(2)) {
        const Outcome expected = problem.run(t.context);
        ASSERT_EQ(problem.judge(expected, t.context), "");
        for (const void* data : {static_cast<const void*>(table.data()), static_cast<const void*>(entries.data())}) {
          AttentionInputs paged{.query = problem.query(), .key = cache.key.tensor(), .value = cache.value.tensor()};
          paged.block_table = ConstTensor::contiguous(DType::i32, {1, 4}, data);
          paged.kv_lengths = ConstTensor::contiguous(DType::i64, {1}, lengths.data());
          const Outcome r = problem.run(t.context, paged);
          ASSERT_TRUE(r.status.ok()) << r.status.message();
          ASSERT_EQ(r.differs_from(expected), "") << t.name;
        }
      }
    }
  }
}

}  // namespace
}  // namespace opst::test

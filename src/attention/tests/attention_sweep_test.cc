// Attention forward against the float64 reference: every level, every way to multiply bf16, real and tiny caches, and
// for 1, 2, 3 and 5 threads the same bits. Sampled; with OPST_EXHAUSTIVE=1 all of it.
#include <gtest/gtest.h>

#include "attention/tests/attention_problem.h"

namespace opst::test {
namespace {

struct Types {
  DType query, kv, out;
};
constexpr Types kTypes[] = {
    {DType::f32, DType::f32, DType::f32},   {DType::bf16, DType::bf16, DType::bf16},
    {DType::f16, DType::f16, DType::f16},   {DType::f64, DType::f64, DType::f64},
    {DType::f32, DType::bf16, DType::f32},  {DType::f32, DType::f16, DType::f32},
    {DType::bf16, DType::bf16, DType::f32}, {DType::bf16, DType::f32, DType::f16},
    {DType::f16, DType::bf16, DType::bf16},
};

// Contexts that must agree in every bit: they differ in the number of threads only.
std::vector<std::vector<const TestContext*>> groups() {
  std::vector<std::vector<const TestContext*>> list;
  for (const TestContext& t : contexts()) {
    const auto same = [&](const std::vector<const TestContext*>& group) {
      const Machine& a = group[0]->context.machine();
      const Machine& b = t.context.machine();
      return a.isa == b.isa && a.bf16_product == b.bf16_product && a.cache.l2_bytes == b.cache.l2_bytes;
    };
    const auto found = std::find_if(list.begin(), list.end(), same);
    if (found == list.end()) {
      list.push_back({&t});
    } else {
      found->push_back(&t);
    }
  }
  return list;
}

// One problem in the contexts of `chosen` groups; paged, too, in one of them where that must not change a bit.
void check(const ProblemOptions& options, Random& random, double share_of_groups) {
  static const auto all = groups();
  Problem problem(options, random);
  for (const auto& group : all) {
    if (!exhaustive() && !random.chance(share_of_groups)) continue;
    const Outcome first = problem.run(group[0]->context);
    ASSERT_EQ(problem.judge(first, group[0]->context, 200), "");
    const size_t other = static_cast<size_t>(random.integer(1, static_cast<int64_t>(group.size()) - 1));
    for (size_t i = 1; i < group.size(); ++i) {
      if (!exhaustive() && i != other) continue;
      ASSERT_EQ(problem.run(group[i]->context).differs_from(first), "")
          << to_string(options) << "\n  " << group[i]->name << " against " << group[0]->name;
    }
    const bool unit_strides = problem.inputs.key.strides[3] == 1 && problem.inputs.value.strides[3] == 1;
    if (unit_strides && random.chance(0.3)) {
      const int64_t block_size = random.pick<int64_t>({1, 3, 8, 16, 33, 128});
      const Pages pages = problem.paged(block_size, random, random.chance(0.5));
      ASSERT_EQ(problem.run(group[other]->context, pages.inputs).differs_from(first), "")
          << to_string(options) << "\n  paged, block_size " << block_size << ", " << group[other]->name;
    }
  }
}

// Each dimension walks past every tile edge of every level while the others stay where all edges are ragged.
using Dimension = int64_t ProblemOptions::*;
struct Walk {
  const char* name;
  Dimension dimension;
  std::vector<int64_t> sizes;
};
const Walk kWalks[] = {
    {"query_len", &ProblemOptions::query_len, {0,  1,  2,  3,  4,  5,  6,  7,  11,  12,  13,  23, 24,
                                               25, 37, 48, 49, 64, 95, 96, 97, 127, 128, 129, 193}},
    {"kv_len", &ProblemOptions::kv_len, {0,   1,   2,   3,   4,   5,   7,   8,   9,    15,  16,  17,
                                         31,  32,  33,  47,  61,  63,  64,  65,  96,   127, 128, 129,
                                         191, 255, 256, 257, 383, 511, 512, 513, 1031, 2100}},
    {"head_dim", &ProblemOptions::head_dim, {1,  2,  3,  4,  5,  7,  8,  9,   15,  16,  17,  31,  32,  33,  40,
                                             48, 63, 64, 65, 72, 80, 96, 127, 128, 129, 160, 192, 256, 512, 768}},
    {"value_head_dim", &ProblemOptions::value_head_dim, {1,  2,  3,   4,   5,   7,   8,   9,   15,  16,
                                                         17, 31, 32,  33,  40,  48,  63,  64,  65,  72,
                                                         80, 96, 127, 128, 129, 160, 192, 256, 512, 768}},
    {"batch", &ProblemOptions::batch, {0, 1, 2, 5}},
};

class AttentionWalk : public testing::TestWithParam<Walk> {};

TEST_P(AttentionWalk, AgreesWithTheReferenceOnEveryLevel) {
  Random random(seed());
  for (const Types& types : kTypes) {
    for (const int64_t size : GetParam().sizes) {
      for (const bool causal : {false, true}) {
        if (!exhaustive() && !random.chance(0.4 * kEffort)) continue;
        ProblemOptions p;
        p.query_dtype = types.query, p.kv_dtype = types.kv, p.out_dtype = types.out;
        p.num_heads = 2, p.query_len = 13, p.kv_len = 71, p.head_dim = 21, p.value_head_dim = 19;
        p.options.causal = causal;
        p.options.alignment = random.pick({CausalAlignment::top_left, CausalAlignment::bottom_right});
        p.*GetParam().dimension = size;
        check(p, random, 0.4);
        if (HasFatalFailure()) return;
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Attention, AttentionWalk, testing::ValuesIn(kWalks),
                         [](const auto& walk) { return std::string(walk.param.name); });

// All choices at once, drawn at random.
ProblemOptions draw(Random& random) {
  ProblemOptions p;
  const Types types = kTypes[random.integer(0, std::size(kTypes) - 1)];
  p.query_dtype = types.query, p.kv_dtype = types.kv, p.out_dtype = types.out;
  p.batch = random.pick<int64_t>({1, 1, 2, 3});
  p.num_kv_heads = random.pick<int64_t>({1, 1, 2, 3});
  p.num_heads = p.num_kv_heads * random.pick<int64_t>({1, 1, 1, 2, 3, 4, 5, 7, 24});
  const auto length = [&](int64_t longest) {
    return random.chance(0.5) ? random.integer(1, 20) : random.integer(1, longest);
  };
  p.query_len = random.chance(0.25) ? 1 : length(150);
  p.kv_len = length(300);
  const auto dimension = [&] {
    return random.pick<int64_t>({1, 3, 7, 16, 24, 32, 40, 48, 63, 64, 72, 80, 96, 128, 160, random.integer(1, 96)});
  };
  p.head_dim = dimension();
  p.value_head_dim = random.chance(0.5) ? p.head_dim : dimension();
  const auto strides = [&](bool output) {
    if (random.chance(0.4)) return Strides::bnsd;
    if (output) return random.pick({Strides::bsnd, Strides::transposed, Strides::padded, Strides::shifted});
    return random.pick({Strides::bsnd, Strides::transposed, Strides::padded, Strides::shifted, Strides::broadcast_heads,
                        Strides::broadcast_batch});
  };
  p.query_strides = strides(false), p.key_strides = strides(false), p.value_strides = strides(false);
  p.out_strides = strides(true);
  const auto fill = [&] {
    if (random.chance(0.6)) return Fill::normal;
    return random.pick({Fill::uniform, Fill::small_integers, Fill::powers_of_two, Fill::ones, Fill::large_normal,
                        Fill::ascending_rows, Fill::outlier, Fill::denormals, Fill::zeros});
  };
  p.query_fill = fill(), p.key_fill = fill(), p.value_fill = fill();
  p.ragged = random.chance(0.3);
  p.options.causal = random.chance(0.5);
  p.options.alignment = random.pick({CausalAlignment::top_left, CausalAlignment::bottom_right});
  if (random.chance(0.5)) p.options.path = random.pick({AttentionPath::standard, AttentionPath::flash});
  const auto block = [&](std::initializer_list<int64_t> sizes) { return random.chance(0.5) ? 0 : random.pick(sizes); };
  p.options.block_q = block({1, 2, 5, 7, 12, 13, 33, 64, 128, 256, 4096});
  p.options.block_kv = block({1, 2, 5, 8, 17, 32, 33, 64, 128, 256, 4096});
  if (random.chance(0.3)) p.options.softmax_scale = random.pick({0.0f, -0.3f, 0.05f, 1.0f, 4.0f, -1e-3f});
  return p;
}

TEST(AttentionSweep, RandomProblemsAgreeWithTheReferenceOnEveryLevel) {
  Random random(seed() + 1);
  const int num_problems = exhaustive() ? 4000 : static_cast<int>(300 * kEffort);
  for (int i = 0; i < num_problems; ++i) {
    check(draw(random), random, 0.5);
    if (HasFatalFailure()) return;
  }
}

TEST(AttentionSweep, LongSequencesAgreeOnSampledRows) {
  Random random(seed() + 2);
  for (const Types& types : {kTypes[0], kTypes[1], kTypes[2]}) {
    for (const int64_t query_len : {1, 3, 700}) {
      for (const bool causal : {false, true}) {
        ProblemOptions p;
        p.query_dtype = types.query, p.kv_dtype = types.kv, p.out_dtype = types.out;
        p.num_heads = 2, p.query_len = query_len, p.kv_len = 5003, p.head_dim = 64, p.value_head_dim = 64;
        p.options.causal = causal;
        Problem problem(p, random);
        for (const TestContext& t : contexts_with_threads(2)) {
          if (!exhaustive() && !random.chance(0.5 * kEffort)) continue;
          ASSERT_EQ(problem.judge(problem.run(t.context), t.context, 12), "");
        }
      }
    }
  }
}

}  // namespace
}  // namespace opst::test

// rope_scatter_pa_kv_cache beside the operators that it joins, and beside the reference.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "kv_cache/test_quant_cache.h"
#include "opst/kv_cache.h"
#include "opst/rowwise.h"
#include "rowwise/reference.h"
#include "testing/compare.h"
#include "testing/contexts.h"

namespace opst {
namespace {

using namespace test;

struct Problem {
  DType dtype = DType::f32, cache_dtype = DType::f32;
  PageLayout layout = PageLayout::norm;
  int64_t tokens = 3, num_heads = 4, half = 3;
  PageSizes sizes = {.num_blocks = 3, .block_size = 32, .num_kv_heads = 2, .head_dim = 8, .value_head_dim = 6};
  RopeStyle style = RopeStyle::halves;
  bool query_norm = false, key_norm = false, in_place = false, strided = false;

  std::string text() const {
    return std::string(to_string(dtype)) + " -> " + to_string(cache_dtype) + " in " + to_string(layout) + ", tokens " +
           std::to_string(tokens) + ", heads " + std::to_string(num_heads) + ", half " + std::to_string(half) + ", " +
           test::text(sizes) + ", " + to_string(style) + (query_norm ? ", query norm" : "") +
           (key_norm ? ", key norm" : "") + (in_place ? ", in place" : "") + (strided ? ", strided" : "");
  }
};

Problem random_problem(Random& random) {
  Problem p;
  constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};
  p.dtype = kTypes[random.integer(0, 2)];
  p.cache_dtype = kTypes[random.integer(0, 2)];
  p.layout = random.chance(0.5) ? PageLayout::panel32 : PageLayout::norm;
  p.tokens = random.pick<int64_t>({0, 1, 2, 9});
  p.sizes.num_kv_heads = random.integer(1, 3);
  p.num_heads = p.sizes.num_kv_heads * random.integer(0, 3);
  p.half = random.pick<int64_t>({0, 1, 4, 8, 16, 17, 32, 33});
  p.sizes.head_dim = 2 * p.half + random.pick<int64_t>({0, 2, 6});
  p.sizes.value_head_dim = random.integer(0, 40);
  p.sizes.block_size = p.layout == PageLayout::panel32 ? 32 : random.integer(1, 20);
  p.style = random.pick({RopeStyle::pairs, RopeStyle::halves});
  p.query_norm = random.chance(0.5);
  p.key_norm = random.chance(0.5);
  p.in_place = random.chance(0.4);
  p.strided = random.chance(0.3);
  return p;
}

struct Step {
  Problem p;
  GuardedBuffer query_memory, key_memory, value_memory, out_memory, weights;
  Tensor query, key, value, query_out;
  std::vector<float> cos, sin;
  std::vector<int64_t> slots;

  Step(const Problem& problem, Random& random)
      : p(problem),
        query_memory(memory(p.num_heads, p.sizes.head_dim)),
        key_memory(memory(p.sizes.num_kv_heads, p.sizes.head_dim)),
        value_memory(memory(p.sizes.num_kv_heads, p.sizes.value_head_dim)),
        out_memory(memory(p.num_heads, p.sizes.head_dim)),
        weights(2 * p.sizes.head_dim * 4),
        query(heads(query_memory, p.num_heads, p.sizes.head_dim)),
        key(heads(key_memory, p.sizes.num_kv_heads, p.sizes.head_dim)),
        value(heads(value_memory, p.sizes.num_kv_heads, p.sizes.value_head_dim)),
        query_out(p.in_place ? query : heads(out_memory, p.num_heads, p.sizes.head_dim)),
        cos(static_cast<size_t>(p.tokens * p.half)),
        sin(cos.size()) {
    for (const Tensor& tensor :
         {query, key, value, weights.tensor(DType::f32, {2 * p.sizes.head_dim}), table(cos), table(sin)}) {
      fill(tensor, Fill::uniform, random);
    }
    const int64_t num_slots = p.sizes.num_blocks * p.sizes.block_size;
    for (int64_t t = 0; t < p.tokens; ++t) slots.push_back(random.integer(-1, num_slots - 1));
  }

  Tensor table(std::vector<float>& v) const { return Tensor::contiguous(DType::f32, {p.tokens, p.half}, v.data()); }
  Tensor weight(int64_t i) const { return weights.tensor(DType::f32, {2, p.sizes.head_dim}).selected(0, i); }
  RopeScatterInputs inputs() {
    RopeScatterInputs in{.query = query,
                         .key = key,
                         .value = value,
                         .cos = table(cos),
                         .sin = table(sin),
                         .slot_mapping = ConstTensor::contiguous(DType::i64, {p.tokens}, slots.data())};
    if (p.query_norm) in.query_weight = weight(0);
    if (p.key_norm) in.key_weight = weight(1);
    return in;
  }

 private:
  GuardedBuffer memory(int64_t num_heads, int64_t dim) const {
    return GuardedBuffer(p.tokens * num_heads * dim * size_bytes(p.dtype));
  }
  Tensor heads(const GuardedBuffer& memory, int64_t num_heads, int64_t dim) const {
    return p.strided ? memory.tensor(p.dtype, {num_heads, dim, p.tokens}).transposed(1, 2).transposed(0, 1)
                     : memory.tensor(p.dtype, {p.tokens, num_heads, dim});
  }
};

constexpr double kEps = 0.01;

// The turned heads in doubles: [tokens][heads][dim].
std::vector<double> turned(const Step& step, const Tensor& x, bool norm, int64_t weight) {
  std::vector<double> out;
  for (int64_t t = 0; t < x.shape[0]; ++t) {
    for (int64_t h = 0; h < x.shape[1]; ++h) {
      std::vector<double> head = to_doubles(x.selected(0, t).selected(0, h));
      if (norm && !head.empty()) head = reference::rms_norm(head, to_doubles(step.weight(weight)), kEps);
      const auto row = [&](const std::vector<float>& v) {
        return std::vector<double>(v.begin() + t * step.p.half, v.begin() + (t + 1) * step.p.half);
      };
      head = reference::rope(head, row(step.cos), row(step.sin), step.p.style == RopeStyle::pairs);
      out.insert(out.end(), head.begin(), head.end());
    }
  }
  return out;
}

TEST(RopeScatter, EqualsTheReferenceInEveryContext) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (int round = 0; round < 25; ++round) {
      const Problem p = random_problem(random);
      SCOPED_TRACE(t.name + ", " + p.text());
      Step step(p, random);
      const TestCache cache(p.layout, p.cache_dtype, p.sizes, p.strided, random);
      std::vector<double> keys = cache.keys(), values = cache.values();
      reference::scatter(turned(step, step.key, p.key_norm, 1), p.sizes.num_kv_heads * p.sizes.head_dim, step.slots,
                         keys);
      reference::scatter(to_doubles(step.value), p.sizes.num_kv_heads * p.sizes.value_head_dim, step.slots, values);
      const std::vector<double> query = turned(step, step.query, p.query_norm, 0);
      const Status status = rope_scatter_pa_kv_cache(t.context, step.inputs(), step.query_out, cache.key, cache.value,
                                                     {.layout = p.layout, .style = p.style, .eps = kEps});
      ASSERT_TRUE(status.ok()) << status.message();
      const auto expect_near = [](const std::vector<double>& got, const std::vector<double>& expected, double eps) {
        ASSERT_EQ(got.size(), expected.size());
        for (size_t i = 0; i < got.size(); ++i) {
          ASSERT_NEAR(got[i], expected[i], 2 * eps * std::max(1.0, std::abs(expected[i]))) << i;
        }
      };
      // Normalised rows of up to 72 elements have a norm of up to 8.5, and rounding errors grow with it.
      const double f32 = 64 * epsilon(DType::f32);
      expect_near(to_doubles(step.query_out), query, epsilon(p.dtype) + f32);
      expect_near(cache.keys(), keys, epsilon(p.cache_dtype) + f32);
      expect_near(cache.values(), values, epsilon(p.cache_dtype) + f32);
      EXPECT_TRUE(cache.slack_intact() && step.out_memory.slack_intact() && step.query_memory.slack_intact());
      if (HasFatalFailure()) return;
    }
  }
}

// f32: the bits of the three operators one after the other; and the same for any number of threads.
TEST(RopeScatter, HasTheBitsOfItsParts) {
  Random random(seed());
  for (int num_threads : {1, 2, 3, 5}) {
    for (const TestContext& t : contexts_with_threads(num_threads)) {
      for (const bool many : {false, true}) {
        Problem p = random_problem(random);
        p.dtype = DType::f32;
        if (many) {
          p.tokens = 333;
          p.num_heads = 6;
          p.sizes.num_blocks = 7;
        }
        SCOPED_TRACE(t.name + ", " + p.text());
        Step step(p, random);
        const TestCache cache(p.layout, p.cache_dtype, p.sizes, p.strided, random);
        Buffer pages[2] = {
            std::move(Buffer::allocate(cache.key.num_elements() * 4).value()),
            std::move(Buffer::allocate(cache.value.num_elements() * 4).value()),
        };
        const Tensor key_pages_copy = key_pages(p.layout, p.cache_dtype, p.sizes, pages[0].data());
        const Tensor value_pages_copy = value_pages(p.layout, p.cache_dtype, p.sizes, pages[1].data());
        copy(cache.key, key_pages_copy);
        copy(cache.value, value_pages_copy);
        std::vector<float> query(static_cast<size_t>(step.query.num_elements())),
            key(static_cast<size_t>(step.key.num_elements()));
        const Tensor query_copy =
            Tensor::contiguous(DType::f32, {p.tokens, p.num_heads, p.sizes.head_dim}, query.data());
        const Tensor key_copy =
            Tensor::contiguous(DType::f32, {p.tokens, p.sizes.num_kv_heads, p.sizes.head_dim}, key.data());
        copy(step.query, query_copy);
        copy(step.key, key_copy);
        if (p.query_norm) {
          ASSERT_TRUE(rms_norm(t.context, query_copy, step.weight(0), query_copy, {.eps = kEps}).ok());
        }
        if (p.key_norm) {
          ASSERT_TRUE(rms_norm(t.context, key_copy, step.weight(1), key_copy, {.eps = kEps}).ok());
        }
        const RopeScatterInputs in = step.inputs();
        for (const Tensor& x : {query_copy, key_copy}) {
          ASSERT_TRUE(rope(t.context, x, in.cos, in.sin, x, {.style = p.style}).ok());
        }
        ASSERT_TRUE(scatter_pa_kv_cache(t.context, key_copy, step.value, in.slot_mapping, key_pages_copy,
                                        value_pages_copy, {.layout = p.layout})
                        .ok());
        ASSERT_TRUE(rope_scatter_pa_kv_cache(t.context, in, step.query_out, cache.key, cache.value,
                                             {.layout = p.layout, .style = p.style, .eps = kEps})
                        .ok());
        for (const auto& [got, expected] : {std::pair(step.query_out, query_copy), std::pair(cache.key, key_pages_copy),
                                            std::pair(cache.value, value_pages_copy)}) {
          const Comparison c = compare_bits(got, expected);
          ASSERT_TRUE(c.ok) << c.message;
        }
      }
    }
  }
}

// The same of caches in eight and four bits: a key is rounded once, after norm and rotation.
TEST(RopeScatter, QuantisesTurnedKeys) {
  Random random(seed());
  Problem p;
  p.key_norm = true, p.sizes.value_head_dim = 32, p.sizes.head_dim = 64, p.half = 32;
  for (const TestContext& t : contexts_with_threads(2)) {
    for (const char* const name : {"int8", "int4_offset", "f8_e4m3"}) {
      for (const PageLayout layout : {PageLayout::norm, PageLayout::panel32}) {
        SCOPED_TRACE(t.name + std::string(", ") + name + " in " + to_string(layout));
        Step step(p, random);
        const KvFormat format = kv_format(name, p.sizes.head_dim, p.sizes.value_head_dim).value();
        Random same(3), again(3);
        const bool floats = format.key_groups == 0;
        KvFormat shape = format;
        if (floats) shape.key_groups = shape.value_groups = 1;
        const QuantCache fused(layout, shape, p.sizes, false, same), parts(layout, shape, p.sizes, false, again);
        const PageScales fused_scales = floats ? PageScales() : fused.scales;
        const PageScales parts_scales = floats ? PageScales() : parts.scales;
        const RopeScatterInputs in = step.inputs();
        std::vector<float> key(static_cast<size_t>(step.key.num_elements()));
        const Tensor turned_key =
            Tensor::contiguous(DType::f32, {p.tokens, p.sizes.num_kv_heads, p.sizes.head_dim}, key.data());
        ASSERT_TRUE(rms_norm(t.context, step.key, step.weight(1), turned_key, {.eps = kEps}).ok());
        ASSERT_TRUE(rope(t.context, turned_key, in.cos, in.sin, turned_key, {.style = p.style}).ok());
        ASSERT_TRUE(scatter_pa_kv_cache(t.context, turned_key, step.value, in.slot_mapping, parts.key, parts.value,
                                        {.layout = layout, .scales = parts_scales})
                        .ok());
        const Status status =
            rope_scatter_pa_kv_cache(t.context, in, step.query_out, fused.key, fused.value,
                                     {.layout = layout, .style = p.style, .eps = kEps, .scales = fused_scales});
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_EQ(fused.all_bytes(), parts.all_bytes());
      }
    }
  }
}

TEST(RopeScatter, AllocatesNothingOnceWarm) {
  Random random(seed());
  Context& context = contexts_with_threads(2).back().context;
  Problem p;
  p.dtype = DType::bf16;
  Step step(p, random);
  const TestCache cache(p.layout, p.cache_dtype, p.sizes, false, random);
  const auto call = [&] {
    return rope_scatter_pa_kv_cache(context, step.inputs(), step.query_out, cache.key, cache.value).ok();
  };
  ASSERT_TRUE(call());
  const int64_t before = context.workspace_allocations();
  ASSERT_TRUE(call() && call());
  EXPECT_EQ(context.workspace_allocations(), before);
}

TEST(RopeScatter, NamesWhatIsWrongAndWritesNothing) {
  Random random(seed());
  Context& context = contexts_with_threads(1).back().context;
  const Problem p;
  Step step(p, random);
  const TestCache cache(p.layout, p.cache_dtype, p.sizes, false, random);
  const std::vector<double> keys = cache.keys(), values = cache.values();
  std::vector<float> other(1000);
  const auto message = [&](const std::function<void(RopeScatterInputs&)>& change,
                           const RopeScatterOptions& options = {}) {
    RopeScatterInputs in = step.inputs();
    change(in);
    return rope_scatter_pa_kv_cache(context, in, step.query_out, cache.key, cache.value, options).message();
  };
  const auto of = [&](std::initializer_list<int64_t> shape) {
    return ConstTensor::contiguous(DType::f32, shape, other.data());
  };
  EXPECT_EQ(message([&](RopeScatterInputs& in) {
              in.cos = in.sin = of({3, 5});
            }),
            "rope_scatter_pa_kv_cache: cos dim 1 (half) is 5, but key has head_dim = 8, which holds 4 pairs");
  EXPECT_EQ(message([&](RopeScatterInputs& in) {
              in.key = of({3, 2, 6});
            }),
            "rope_scatter_pa_kv_cache: query dim 2 (head_dim) is 8, but key set head_dim = 6");
  EXPECT_EQ(message([&](RopeScatterInputs& in) {
              in.value = of({3, 2, 5});
            }),
            "rope_scatter_pa_kv_cache: value_cache dim 3 (value_head_dim) is 6, but value set value_head_dim = 5");
  EXPECT_EQ(message([&](RopeScatterInputs& in) { in.query_weight = of({7}); }),
            "rope_scatter_pa_kv_cache: query_weight dim 0 (head_dim) is 7, but key set head_dim = 8");
  EXPECT_EQ(message([&](RopeScatterInputs&) {}, {.eps = -1}),
            "rope_scatter_pa_kv_cache: eps is -1.000000, but must be >= 0");
  EXPECT_EQ(
      message([&](RopeScatterInputs&) { step.slots[1] = 96; }),
      "rope_scatter_pa_kv_cache: slot_mapping[1] is 96, but the cache has 3 blocks of 32 rows = 96 slots (-1 skips "
      "a token)");
  EXPECT_EQ(cache.keys(), keys);
  EXPECT_EQ(cache.values(), values);
}

}  // namespace
}  // namespace opst

// Caches of integers with scales and of numbers of eight bits: what scatter, gather and convert_pages make of them,
// beside loops over doubles.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kv_cache/test_quant_cache.h"
#include "opst/kv_cache.h"
#include "testing/compare.h"
#include "testing/contexts.h"

namespace opst {
namespace {

using namespace test;

constexpr const char* kIntegerNames[] = {"int8", "int8_offset", "int4", "int4_offset"};
constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

struct Problem {
  std::string format;
  PageLayout layout = PageLayout::norm;
  DType from = DType::f32;
  int64_t tokens = 5;
  PageSizes sizes = {.num_blocks = 3, .block_size = 32, .num_kv_heads = 2, .head_dim = 64, .value_head_dim = 32};
  int64_t key_groups = 0, value_groups = 0;  // 0: those of the format's name
  bool strided = false;
  std::vector<int64_t> slots = {};

  std::string text() const {
    return format + " in " + to_string(layout) + " from " + to_string(from) + ", tokens " + std::to_string(tokens) +
           ", " + test::text(sizes) + ", groups " + std::to_string(key_groups) + (strided ? ", strided" : "");
  }
  KvFormat kv_format() const {
    KvFormat f = opst::kv_format(format, sizes.head_dim, sizes.value_head_dim).value();
    if (key_groups > 0) f.key_groups = key_groups, f.value_groups = value_groups;
    return f;
  }
  ConstTensor slot_mapping() const {
    return ConstTensor::contiguous(DType::i64, {static_cast<int64_t>(slots.size())}, slots.data());
  }
};

Problem random_problem(Random& random) {
  Problem p;
  p.format = kIntegerNames[random.integer(0, 3)];
  p.layout = random.pick({PageLayout::norm, PageLayout::panel32});
  p.from = random.pick({DType::f32, DType::bf16, DType::f16});
  p.tokens = random.pick<int64_t>({0, 1, 2, 13});
  const int64_t groups = random.pick<int64_t>({1, 1, 2, 3}), of = 2 * random.pick<int64_t>({0, 1, 4, 5, 8, 16, 17, 33});
  p.sizes = {.num_blocks = random.integer(1, 4),
             .block_size = p.layout == PageLayout::norm ? random.integer(1, 20) : random.pick<int64_t>({32, 64}),
             .num_kv_heads = random.integer(1, 3),
             .head_dim = groups * of,
             .value_head_dim = 2 * random.pick<int64_t>({0, 1, 9, 16, 20})};
  p.key_groups = groups;
  p.value_groups = 1;
  p.strided = random.chance(0.3);
  for (int64_t t = 0; t < p.tokens; ++t) {
    p.slots.push_back(random.integer(-1, p.sizes.num_blocks * p.sizes.block_size - 1));
  }
  return p;
}

// A token's row and what the cache holds of it: the scale spans the group, and each number is the nearest multiple.
void expect_quantized(const Problem& p, const std::vector<double>& x, const QuantSide& side, int64_t slot) {
  if (side.dim == 0) return;
  const bool offsets = !side.offsets.empty(), bytes = side.bits == 8;
  const int64_t count = side.dim / side.groups;
  const double most = bytes ? 127 : 7;
  for (int64_t head = 0; head < p.sizes.num_kv_heads; ++head) {
    for (int64_t g = 0; g < side.groups; ++g) {
      const auto row = static_cast<size_t>(slot * p.sizes.num_kv_heads + head);
      const double* values = &x[static_cast<size_t>(head * side.dim + g * count)];
      double low = 0, high = 0;
      for (int64_t i = 0; i < count; ++i) low = std::min(low, values[i]), high = std::max(high, values[i]);
      const double scale = side.scales[row * static_cast<size_t>(side.groups) + static_cast<size_t>(g)];
      const double exact = offsets ? (high - low) / (2 * most + 1) : std::max(high, -low) / most;
      ASSERT_LE(std::abs(scale - exact), exact * 0x1p-22) << "slot " << slot << ", head " << head << ", group " << g;
      for (int64_t i = 0; i < count; ++i) {
        // Beyond half a step lies what the clamp at an end of the range, one unit of rounding of the offset, takes.
        const double got = side.value(row, g * count + i);
        ASSERT_LE(std::abs(got - values[i]), scale * (offsets ? 1.0001 : 0.5001)) << "slot " << slot << ", " << i;
      }
    }
  }
}

TEST(QuantPages, ScatterSpansEachGroupAndRoundsToNearest) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (int i = 0; i < 12; ++i) {
      const Problem p = random_problem(random);
      SCOPED_TRACE(t.name + ", " + p.text());
      const QuantCache cache(p.layout, p.kv_format(), p.sizes, p.strided, random);
      const QuantTokens key(p.tokens, p.sizes.num_kv_heads, p.sizes.head_dim, p.from, p.strided, random);
      const QuantTokens value(p.tokens, p.sizes.num_kv_heads, p.sizes.value_head_dim, p.from, p.strided, random);
      const std::vector<double> before = cache.all_bytes();
      const Status status = scatter_pa_kv_cache(t.context, key.tensor, value.tensor, p.slot_mapping(), cache.key,
                                                cache.value, {.layout = p.layout, .scales = cache.scales});
      ASSERT_TRUE(status.ok()) << status.message();
      const QuantSide keys = cache.keys(), values = cache.values();
      std::vector<bool> written(static_cast<size_t>(p.sizes.num_blocks * p.sizes.block_size));
      for (int64_t token = p.tokens - 1; token >= 0; --token) {  // the last token of a slot wins
        const int64_t slot = p.slots[static_cast<size_t>(token)];
        if (slot < 0 || written[static_cast<size_t>(slot)]) continue;
        written[static_cast<size_t>(slot)] = true;
        expect_quantized(p, key.row(token), keys, slot);
        expect_quantized(p, value.row(token), values, slot);
        if (HasFatalFailure()) return;
      }
      cache.expect_rows_kept(before, written);
    }
  }
}

// Numbers that the format holds exactly come back to the bit, whatever the layout, the threads and the level.
TEST(QuantPages, MultiplesOfAPowerOfTwoAreExact) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (const char* const name : kIntegerNames) {
      for (const PageLayout layout : {PageLayout::norm, PageLayout::panel32}) {
        SCOPED_TRACE(t.name + std::string(", ") + name + " in " + to_string(layout));
        Problem p;
        p.format = name, p.layout = layout, p.tokens = 40;
        const KvFormat format = p.kv_format();
        const int64_t most = format.dtype == DType::i8 ? 127 : 7;
        for (int64_t i = 0; i < p.tokens; ++i) p.slots.push_back(2 * i);
        const QuantCache cache(layout, format, p.sizes, false, random);
        QuantTokens key(p.tokens, 2, p.sizes.head_dim, p.from, false, random);
        QuantTokens value(p.tokens, 2, p.sizes.value_head_dim, p.from, false, random);
        // With offsets the range lies anywhere around 0.
        const int64_t low = format.has_offsets ? -most / 4 : -most,
                      high = low + 2 * most + (format.has_offsets ? 1 : 0);
        key.fill_with_whole_numbers(low, high, p.sizes.head_dim / format.key_groups, random);
        value.fill_with_whole_numbers(low, high, p.sizes.value_head_dim / format.value_groups, random);
        ASSERT_TRUE(scatter_pa_kv_cache(t.context, key.tensor, value.tensor, p.slot_mapping(), cache.key, cache.value,
                                        {.layout = layout, .scales = cache.scales})
                        .ok());
        const int32_t table[] = {0, 1, 2}, length[] = {79};
        const QuantTokens all_keys(79, 2, p.sizes.head_dim, DType::bf16, false, random);
        const QuantTokens all_values(79, 2, p.sizes.value_head_dim, DType::bf16, false, random);
        const Status status =
            gather_pa_kv_cache(t.context, cache.key, cache.value, ConstTensor::contiguous(DType::i32, {1, 3}, table),
                               ConstTensor::contiguous(DType::i32, {1}, length), all_keys.tensor, all_values.tensor,
                               {.layout = layout, .scales = cache.scales});
        ASSERT_TRUE(status.ok()) << status.message();
        for (int64_t i = 0; i < p.tokens; ++i) {
          ASSERT_EQ(all_keys.row(2 * i), key.row(i));
          ASSERT_EQ(all_values.row(2 * i), value.row(i));
        }
      }
    }
  }
}

TEST(QuantPages, GatherReadsWhatTheTensorsSay) {
  Random random(seed());
  for (const TestContext& t : contexts()) {
    for (int i = 0; i < 10; ++i) {
      const Problem p = random_problem(random);
      SCOPED_TRACE(t.name + ", " + p.text());
      const QuantCache cache(p.layout, p.kv_format(), p.sizes, p.strided, random);
      const int64_t capacity = p.sizes.num_blocks * p.sizes.block_size, tokens = random.integer(0, capacity);
      std::vector<int64_t> table;
      for (int64_t b = 0; b < p.sizes.num_blocks; ++b) table.push_back(p.sizes.num_blocks - 1 - b);
      const int64_t heads[] = {p.sizes.num_kv_heads - 1, 0}, lengths[] = {tokens};
      const bool some_heads = random.chance(0.4);
      const int64_t num_heads = some_heads ? 2 : p.sizes.num_kv_heads;
      const QuantTokens key(tokens, num_heads, p.sizes.head_dim, p.from, p.strided, random);
      const QuantTokens value(tokens, num_heads, p.sizes.value_head_dim, p.from, p.strided, random);
      GatherOptions options = {.layout = p.layout, .scales = cache.scales};
      if (some_heads) options.head_indices = ConstTensor::contiguous(DType::i64, {2}, heads);
      const Status status = gather_pa_kv_cache(
          t.context, cache.key, cache.value, ConstTensor::contiguous(DType::i64, {1, p.sizes.num_blocks}, table.data()),
          ConstTensor::contiguous(DType::i64, {1}, lengths), key.tensor, value.tensor, options);
      ASSERT_TRUE(status.ok()) << status.message();
      for (const auto& [side, got] : {std::pair{cache.keys(), &key}, {cache.values(), &value}}) {
        for (int64_t token = 0; token < tokens; ++token) {
          const int64_t block = table[static_cast<size_t>(token / p.sizes.block_size)];
          const int64_t slot = block * p.sizes.block_size + token % p.sizes.block_size;
          std::vector<double> expected;
          for (int64_t h = 0; h < num_heads; ++h) {
            const int64_t head = some_heads ? heads[h] : h;
            for (int64_t d = 0; d < side.dim; ++d) {
              const double exact = side.value(static_cast<size_t>(slot * p.sizes.num_kv_heads + head), d);
              double rounded = 0;
              test::set(p.from, &rounded, 0, static_cast<double>(static_cast<float>(exact)));
              expected.push_back(test::get(p.from, &rounded, 0));
            }
          }
          ASSERT_EQ(got->row(token), expected) << "token " << token;
        }
      }
    }
  }
}

// A group that is not finite reads as NaN, its neighbours do not; one of zeros reads as zeros.
TEST(QuantPages, GroupsAreOnTheirOwn) {
  Random random(seed());
  for (const TestContext& t : contexts_with_threads(2)) {
    for (const char* const name : kIntegerNames) {
      SCOPED_TRACE(t.name + std::string(", ") + name);
      Problem p;
      p.format = name, p.tokens = 4, p.key_groups = 2, p.value_groups = 1, p.slots = {0, 1, 2, 3};
      const QuantCache cache(p.layout, p.kv_format(), p.sizes, false, random);
      QuantTokens key(4, 2, 64, DType::f32, false, random), value(4, 2, 32, DType::f32, false, random);
      test::set(key.tensor, 0 * 128 + 3, static_cast<double>(kNan));        // token 0, head 0, group 0
      test::set(key.tensor, 1 * 128 + 64 + 40, static_cast<double>(kInf));  // token 1, head 1, group 1
      test::set(key.tensor, 2 * 128 + 33, -std::numeric_limits<double>::infinity());
      for (int64_t d = 0; d < 32; ++d) test::set(value.tensor, 3 * 64 + d, 0);
      ASSERT_TRUE(scatter_pa_kv_cache(t.context, key.tensor, value.tensor, p.slot_mapping(), cache.key, cache.value,
                                      {.scales = cache.scales})
                      .ok());
      const QuantTokens key_back(4, 2, 64, DType::f32, false, random), value_back(4, 2, 32, DType::f32, false, random);
      const int32_t table[] = {0}, length[] = {4};
      const Status status =
          gather_pa_kv_cache(t.context, cache.key, cache.value, ConstTensor::contiguous(DType::i32, {1, 1}, table),
                             ConstTensor::contiguous(DType::i32, {1}, length), key_back.tensor, value_back.tensor,
                             {.scales = cache.scales});
      ASSERT_TRUE(status.ok()) << status.message();
      for (int64_t i = 0; i < 4 * 128; ++i) {
        const int64_t group = i / 32;  // 2 groups of 2 heads of 4 tokens
        EXPECT_EQ(std::isnan(test::get(key_back.tensor, i)), group == 0 || group == 7 || group == 9) << i;
      }
      EXPECT_EQ(cache.keys().scales[0], static_cast<double>(kInf));
      for (int64_t d = 0; d < 32; ++d) EXPECT_EQ(test::get(value_back.tensor, 3 * 64 + d), 0);
      EXPECT_EQ(cache.values().scales[3 * 2], 0);
    }
  }
}

// The bits depend on nothing but the rows: one thread and five, one token at a time and all at once.
TEST(QuantPages, SameBitsForAnyThreads) {
  Random random(seed());
  Problem p;
  p.tokens = 300;
  p.sizes = {.num_blocks = 12, .block_size = 32, .num_kv_heads = 3, .head_dim = 64, .value_head_dim = 64};
  for (int64_t i = 0; i < p.tokens; ++i) p.slots.push_back((i * 37) % 384);
  const QuantTokens key(p.tokens, 3, 64, DType::f32, false, random), value(p.tokens, 3, 64, DType::f32, false, random);
  for (const char* const name : kIntegerNames) {
    p.format = name;
    for (const PageLayout layout : {PageLayout::norm, PageLayout::panel32}) {
      std::vector<double> first;
      for (const int threads : {1, 5}) {
        for (const TestContext& t : contexts_with_threads(threads)) {
          Random same(7);
          const QuantCache cache(layout, p.kv_format(), p.sizes, false, same);
          ASSERT_TRUE(scatter_pa_kv_cache(t.context, key.tensor, value.tensor, p.slot_mapping(), cache.key, cache.value,
                                          {.layout = layout, .scales = cache.scales})
                          .ok());
          if (first.empty()) first = cache.all_bytes();
          ASSERT_EQ(cache.all_bytes(), first) << t.name << ", " << name;
        }
      }
    }
  }
}

TEST(KvFormat, HasNames) {
  const auto format = [](const char* name) { return kv_format(name, 96, 80).value(); };
  EXPECT_EQ(format("bf16").dtype, DType::bf16);
  EXPECT_EQ(format("bf16").key_groups, 0);
  EXPECT_EQ(format("f8_e4m3").dtype, DType::f8_e4m3);
  EXPECT_EQ(format("int8").key_groups, 1);
  EXPECT_FALSE(format("int8").has_offsets);
  EXPECT_TRUE(format("int8_offset").has_offsets);
  EXPECT_EQ(format("int4").dtype, DType::u8);
  EXPECT_EQ(format("int4").key_groups, 3);
  EXPECT_EQ(format("int4_offset").value_groups, 1);  // 32 does not divide 80
  EXPECT_EQ(kv_format("i8", 64, 64).status().message(),
            "kv_format: \"i8\" is no format: f32, bf16, f16, f8_e4m3, f8_e5m2, int8, int8_offset, int4 and int4_offset "
            "are");
}

}  // namespace
}  // namespace opst

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kv_cache/reference.h"
#include "kv_cache/test_quant_cache.h"
#include "opst/kv_cache.h"
#include "testing/compare.h"
#include "testing/contexts.h"
#include "testing/count_allocations.h"
#include "testing/elements.h"
#include "testing/guarded_buffer.h"
#include "testing/lazy_mapping.h"
#include "testing/random.h"

namespace opst {
namespace {

using test::contexts;
using test::contexts_with_threads;
using test::Fill;
using test::Guard;
using test::GuardedBuffer;
using test::num_allocations;
using test::QuantCache;
using test::Random;
using test::TestCache;
using test::TestContext;

// Of a cache all, of tokens the first three.
constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16, DType::f8_e4m3, DType::f8_e5m2};

// Integers behind a guard page, i32 or i64, `stride` elements apart; elements between are nonsense.
struct Integers {
  GuardedBuffer memory;
  ConstTensor tensor;

  Integers(DType dtype, const std::vector<int64_t>& values, int64_t stride = 1)
      : memory(std::max<int64_t>(0, (static_cast<int64_t>(values.size()) - 1) * stride + 1) * size_bytes(dtype)) {
    for (size_t i = 0; i < values.size(); ++i) {
      const auto at = static_cast<size_t>(stride) * i;
      if (dtype == DType::i64) {
        static_cast<int64_t*>(memory.data())[at] = values[i];
      } else {
        static_cast<int32_t*>(memory.data())[at] = static_cast<int32_t>(values[i]);
      }
    }
    tensor = ConstTensor::contiguous(dtype, {static_cast<int64_t>(values.size())}, memory.data());
    tensor.strides[0] = stride;
  }
};

struct Problem {
  DType cache = DType::f32, to = DType::f32;
  PageLayout layout = PageLayout::norm;
  PageSizes sizes = {};
  bool strided = false;
  int64_t max_blocks = 0;
  std::vector<std::vector<int64_t>> table = {};
  std::vector<int64_t> lengths = {}, offsets = {}, heads = {};
  bool cumulative = false, has_offsets = false, has_heads = false, zero_fill = false;
  DType index = DType::i32;

  int64_t tokens() const {
    int64_t sum = 0;
    for (int64_t length : lengths) sum += length;
    return sum;
  }
  std::string text() const {
    return std::string(to_string(cache)) + " in " + to_string(layout) + " -> " + to_string(to) + ", " +
           test::text(sizes) + ", lengths " + test_list(lengths) + ", offsets " + test_list(offsets) + ", heads " +
           test_list(heads) + (strided ? ", strided" : "") + (cumulative ? ", cumulative" : "") +
           (zero_fill ? ", zero fill" : "");
  }
  static std::string test_list(const std::vector<int64_t>& list) {
    std::string result = "[";
    for (int64_t x : list) result += (result.size() > 1 ? ", " : "") + std::to_string(x);
    return result + "]";
  }
};

// A random table in which blocks are shared and repeat; columns that nobody needs hold nonsense. With zero_fill some
// blocks do not exist, and some sequences are longer than their row of the table.
Problem random_problem(Random& random) {
  Problem p;
  p.cache = kTypes[random.integer(0, 4)];
  p.to = kTypes[random.integer(0, 2)];
  p.layout = random.chance(0.5) ? PageLayout::panel32 : PageLayout::norm;
  const bool panels = p.layout == PageLayout::panel32;
  const int64_t dim = random.pick<int64_t>({0, 1, 2, 7, 15, 16, 17, 33, 64, 66, 129});
  p.sizes = {.num_blocks = random.integer(1, 9),
             .block_size = panels ? random.pick<int64_t>({32, 64}) : random.pick<int64_t>({1, 3, 16, 17}),
             .num_kv_heads = random.integer(1, 4),
             .head_dim = panels && p.cache == DType::bf16 ? dim / 2 * 2 : dim,
             .value_head_dim = random.chance(0.5) ? dim : random.integer(0, 40)};
  p.strided = random.chance(0.3);
  p.cumulative = random.chance(0.4);
  p.has_offsets = random.chance(0.5);
  p.has_heads = random.chance(0.4);
  p.zero_fill = random.chance(0.3);
  p.index = random.pick<DType>({DType::i32, DType::i64});
  p.max_blocks = random.integer(0, 4);
  const int64_t capacity = p.max_blocks * p.sizes.block_size;
  const int64_t batch = random.integer(0, 5);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t end = random.pick<int64_t>({0, random.integer(0, capacity), capacity});
    const int64_t offset = p.has_offsets ? random.integer(0, end) : 0;
    p.offsets.push_back(offset);
    p.lengths.push_back(end - offset + (p.zero_fill && random.chance(0.3) ? random.integer(0, 40) : 0));
    std::vector<int64_t> row;
    for (int64_t column = 0; column < p.max_blocks; ++column) {
      const bool needed = p.lengths.back() > 0 && (column + 1) * p.sizes.block_size > offset &&
                          column * p.sizes.block_size < offset + p.lengths.back();
      const bool real = needed && !(p.zero_fill && random.chance(0.3));
      row.push_back(real ? random.integer(0, p.sizes.num_blocks - 1)
                         : random.pick<int64_t>({-1, -7, p.sizes.num_blocks, 1 << 30}));
    }
    p.table.push_back(row);
  }
  const int64_t num_heads = p.has_heads ? random.integer(0, 5) : p.sizes.num_kv_heads;
  for (int64_t h = 0; h < num_heads; ++h) {
    p.heads.push_back(p.has_heads ? random.integer(0, p.sizes.num_kv_heads - 1) : h);
  }
  return p;
}

void check_problem(const TestContext& t, const Problem& p, Random& random) {
  SCOPED_TRACE(t.name + ", " + p.text());
  TestCache cache(p.layout, p.cache, p.sizes, p.strided, random);
  const std::vector<double> cached_keys = cache.keys(), cached_values = cache.values();
  cache.key_memory.make_read_only();
  cache.value_memory.make_read_only();
  std::vector<int64_t> flat, lengths = p.lengths;
  for (const auto& row : p.table) flat.insert(flat.end(), row.begin(), row.end());
  if (p.cumulative) {
    lengths.insert(lengths.begin(), 0);
    for (size_t b = 1; b < lengths.size(); ++b) lengths[b] += lengths[b - 1];
  }
  const int64_t stride = random.integer(1, 3);
  const Integers table(p.index, flat), kv_lengths(p.index, lengths, stride), offsets(p.index, p.offsets, stride),
      heads(p.index, p.heads, stride);
  GatherOptions options = {.layout = p.layout, .cumulative_lengths = p.cumulative, .zero_fill = p.zero_fill};
  // A tensor without elements still says that the option is there.
  static const int64_t nothing = 0;
  if (p.has_offsets) options.seq_offset = offsets.tensor;
  if (p.has_heads) options.head_indices = heads.tensor;
  if (p.has_heads && p.heads.empty()) options.head_indices.data = &nothing;

  const auto batch = static_cast<int64_t>(p.lengths.size()), num_heads = static_cast<int64_t>(p.heads.size());
  const int64_t tokens = p.tokens();
  const auto memory = [&](int64_t dim) {
    return GuardedBuffer(tokens * num_heads * dim * size_bytes(p.to),
                         random.chance(0.5) ? Guard::after : Guard::before);
  };
  const GuardedBuffer key_memory = memory(p.sizes.head_dim), value_memory = memory(p.sizes.value_head_dim);
  const auto output = [&](const GuardedBuffer& buffer, int64_t dim) {
    return p.strided ? buffer.tensor(p.to, {num_heads, dim, tokens}).transposed(1, 2).transposed(0, 1)
                     : buffer.tensor(p.to, {tokens, num_heads, dim});
  };
  const Tensor key = output(key_memory, p.sizes.head_dim), value = output(value_memory, p.sizes.value_head_dim);
  const Status status = gather_pa_kv_cache(t.context, cache.key, cache.value,
                                           ConstTensor::contiguous(p.index, {batch, p.max_blocks}, table.tensor.data),
                                           kv_lengths.tensor, key, value, options);
  ASSERT_TRUE(status.ok()) << status.message();
  const auto expected = [&](const std::vector<double>& cached, int64_t dim) {
    std::vector<double> exact = reference::gather(cached, p.sizes, dim, p.table, p.lengths, p.offsets, p.heads);
    std::vector<char> bytes(exact.size() * 4);
    const auto n = static_cast<int64_t>(exact.size());
    const Tensor rounded = Tensor::contiguous(p.to, {n}, bytes.data());
    test::copy(ConstTensor::contiguous(DType::f64, {n}, exact.data()), rounded);
    return test::to_doubles(rounded);
  };
  ASSERT_EQ(test::to_doubles(key), expected(cached_keys, p.sizes.head_dim));
  ASSERT_EQ(test::to_doubles(value), expected(cached_values, p.sizes.value_head_dim));
  EXPECT_TRUE(key_memory.slack_intact() && value_memory.slack_intact());
}

TEST(Gather, EqualsTheReferenceInEveryContext) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (int i = 0; i < 40; ++i) {
      check_problem(t, random_problem(random), random);
      if (HasFatalFailure()) return;
    }
  }
}

// A panel's rows from every first to every last one.
TEST(Gather, EveryPartOfAPanel) {
  Random random(test::seed());
  for (const TestContext& t : contexts_with_threads(1)) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      for (int64_t first : {0, 1, 2, 7, 8, 15, 16, 17, 31, 40}) {
        Problem p;
        p.cache = p.to = dtype;
        p.layout = PageLayout::panel32;
        p.sizes = {.num_blocks = 2,
                   .block_size = 64,
                   .num_kv_heads = 1,
                   .head_dim = random.pick<int64_t>({2, 14, 16, 18, 34, 66}),
                   .value_head_dim = random.pick<int64_t>({1, 7, 8, 9, 17, 33})};
        p.max_blocks = 1;
        p.heads = {0};
        p.has_offsets = true;
        for (int64_t length : {1, 2, 3, 7, 8, 9, 15, 16, 17, 24}) {
          p.lengths.push_back(length);
          p.offsets.push_back(first);
          p.table.push_back({random.integer(0, 1)});
        }
        check_problem(t, p, random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Work for many tasks, which begin within sequences and within blocks.
TEST(Gather, ManyTasks) {
  Random random(test::seed());
  for (const TestContext& t : contexts_with_threads(3)) {
    for (PageLayout layout : {PageLayout::norm, PageLayout::panel32}) {
      Problem p;
      p.layout = layout;
      p.sizes = {.num_blocks = 50, .block_size = 32, .num_kv_heads = 2, .head_dim = 64, .value_head_dim = 64};
      p.max_blocks = 40;
      p.has_offsets = true;
      p.heads = {0, 1};
      for (int64_t length : {0, 700, 1, 1280 - 5, 0, 33}) {
        p.lengths.push_back(length);
        p.offsets.push_back(random.integer(0, 5));
        p.table.emplace_back();
        for (int64_t i = 0; i < p.max_blocks; ++i) p.table.back().push_back(random.integer(0, 49));
      }
      check_problem(t, p, random);
      if (HasFatalFailure()) return;
    }
  }
}

// What scatter wrote comes back, through a table in any order.
TEST(Gather, ReadsWhatScatterWrote) {
  Random random(test::seed());
  for (const TestContext& t : contexts_with_threads(2)) {
    for (PageLayout layout : {PageLayout::norm, PageLayout::panel32}) {
      const PageSizes sizes = {
          .num_blocks = 6, .block_size = 32, .num_kv_heads = 3, .head_dim = 34, .value_head_dim = 5};
      const TestCache cache(layout, DType::bf16, sizes, false, random, Fill::nan);
      const int32_t table[3] = {4, 0, 5};
      constexpr int64_t kTokens = 75;
      std::vector<int64_t> slots;
      for (int64_t i = 0; i < kTokens; ++i) slots.push_back(table[i / 32] * 32 + i % 32);
      const GuardedBuffer k(kTokens * 3 * 34 * 2), v(kTokens * 3 * 5 * 2), k2(kTokens * 3 * 34 * 2),
          v2(kTokens * 3 * 5 * 2);
      const auto rows = [](const GuardedBuffer& buffer, int64_t dim) {
        return buffer.tensor(DType::bf16, {kTokens, 3, dim});
      };
      test::fill(rows(k, 34), Fill::normal, random);
      test::fill(rows(v, 5), Fill::normal, random);
      ASSERT_TRUE(scatter_pa_kv_cache(t.context, rows(k, 34), rows(v, 5),
                                      ConstTensor::contiguous(DType::i64, {kTokens}, slots.data()), cache.key,
                                      cache.value, {.layout = layout})
                      .ok());
      const int32_t length[1] = {kTokens};
      ASSERT_TRUE(gather_pa_kv_cache(
                      t.context, cache.key, cache.value, ConstTensor::contiguous(DType::i32, {1, 3}, table),
                      ConstTensor::contiguous(DType::i32, {1}, length), rows(k2, 34), rows(v2, 5), {.layout = layout})
                      .ok());
      const test::Comparison keys = test::compare_bits(rows(k2, 34), rows(k, 34), {.about = t.name});
      EXPECT_TRUE(keys.ok) << keys.message;
      const test::Comparison values = test::compare_bits(rows(v2, 5), rows(v, 5), {.about = t.name});
      EXPECT_TRUE(values.ok) << values.message;
    }
  }
}

// Writing, converting and reading: once the threads run, a call allocates nothing.
TEST(Gather, AllocatesNothing) {
  Random random(test::seed());
  const PageSizes sizes = {.num_blocks = 8, .block_size = 64, .num_kv_heads = 4, .head_dim = 64, .value_head_dim = 64};
  const TestCache norm(PageLayout::norm, DType::f32, sizes, false, random);
  const TestCache panels(PageLayout::panel32, DType::bf16, sizes, false, random);
  const QuantCache integers(PageLayout::panel32, kv_format("int4_offset", 64, 64).value(), sizes, false, random);
  const GuardedBuffer keys(512 * 4 * 64 * 4), values(512 * 4 * 64 * 4);
  const Tensor key = keys.tensor(DType::f32, {512, 4, 64}), value = values.tensor(DType::f32, {512, 4, 64});
  std::vector<int64_t> slots(512);
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int64_t>(i);
  const int64_t table[8] = {7, 6, 5, 4, 3, 2, 1, 0}, length[1] = {512};
  for (const TestContext& t : contexts_with_threads(2)) {
    const auto calls = [&] {
      return convert_pages(t.context, norm.key, norm.value, panels.key, panels.value).ok() &&
             convert_pages(t.context, panels.key, panels.value, integers.key, integers.value,
                           {.from = PageLayout::panel32, .to_scales = integers.scales})
                 .ok() &&
             scatter_pa_kv_cache(t.context, key, value, ConstTensor::contiguous(DType::i64, {512}, slots.data()),
                                 integers.key, integers.value,
                                 {.layout = PageLayout::panel32, .scales = integers.scales})
                 .ok() &&
             gather_pa_kv_cache(t.context, integers.key, integers.value,
                                ConstTensor::contiguous(DType::i64, {1, 8}, table),
                                ConstTensor::contiguous(DType::i64, {1}, length), key, value,
                                {.layout = PageLayout::panel32, .scales = integers.scales})
                 .ok() &&
             gather_pa_kv_cache(t.context, panels.key, panels.value, ConstTensor::contiguous(DType::i64, {1, 8}, table),
                                ConstTensor::contiguous(DType::i64, {1}, length), key, value,
                                {.layout = PageLayout::panel32})
                 .ok() &&
             scatter_pa_kv_cache(t.context, key, value, ConstTensor::contiguous(DType::i64, {512}, slots.data()),
                                 norm.key, norm.value)
                 .ok();
    };
    ASSERT_TRUE(calls());
    const int64_t before = num_allocations;
    ASSERT_TRUE(calls());
    EXPECT_EQ(num_allocations - before, 0) << t.name;
  }
}

// More elements than 2^31: a pool of 140,001 blocks of [16, 8, 128], or half as many of 32 rows.
TEST(Gather, B44_ReadsBeyond32BitOffsets) {
  for (PageLayout layout : {PageLayout::norm, PageLayout::panel32}) {
    SCOPED_TRACE(to_string(layout));
    PageSizes sizes = {
        .num_blocks = 140001, .block_size = 16, .num_kv_heads = 8, .head_dim = 128, .value_head_dim = 128};
    if (layout == PageLayout::panel32) sizes.num_blocks = 70001, sizes.block_size = 32;
    const int64_t page_elements = sizes.block_size * sizes.num_kv_heads * sizes.head_dim;
    test::LazyMapping keys(sizes.num_blocks * page_elements * 2), values(sizes.num_blocks * page_elements * 2);
    if (keys.data() == nullptr || values.data() == nullptr) {
      GTEST_SKIP() << "no address space for 2 x " << keys.size_bytes() << " bytes";
    }
    const Tensor key_cache = key_pages(layout, DType::bf16, sizes, keys.data());
    const Tensor value_cache = value_pages(layout, DType::bf16, sizes, values.data());
    const int64_t last = sizes.num_blocks - 1;
    Random random(test::seed());
    for (const Tensor& cache : {key_cache, value_cache}) {
      test::fill(cache.selected(0, 0), Fill::normal, random);
      std::memcpy(cache.selected(0, last).data, cache.data, static_cast<size_t>(page_elements * 2));
    }
    for (const TestContext& t : contexts_with_threads(2)) {
      const int32_t length[1] = {5};
      const auto read = [&](int64_t block) {
        const GuardedBuffer key(5 * 8 * 128 * 4), value(5 * 8 * 128 * 4);
        const Tensor k = key.tensor(DType::f32, {5, 8, 128}), v = value.tensor(DType::f32, {5, 8, 128});
        EXPECT_TRUE(gather_pa_kv_cache(t.context, key_cache, value_cache,
                                       ConstTensor::contiguous(DType::i64, {1, 1}, &block),
                                       ConstTensor::contiguous(DType::i32, {1}, length), k, v, {.layout = layout})
                        .ok());
        std::vector<double> both = test::to_doubles(k);
        const std::vector<double> second = test::to_doubles(v);
        both.insert(both.end(), second.begin(), second.end());
        return both;
      };
      EXPECT_EQ(read(last), read(0));
    }
  }
}

// Cases with a pool of four blocks of 16 rows, one head of one element: row r of block b holds 16 b + r.
class SmallPool : public testing::Test {
 protected:
  Context& context_ = contexts_with_threads(2).back().context;
  float cache_[64] = {}, values_[64] = {};
  std::vector<float> out_ = std::vector<float>(64, 7.0f), out_values_ = std::vector<float>(64, 7.0f);
  GatherOptions options_;

  SmallPool() {
    for (int i = 0; i < 64; ++i) cache_[i] = values_[i] = static_cast<float>(i);
  }

  // `tokens` rows are asked for; table rows are equally long.
  Status gather(const std::vector<std::vector<int32_t>>& table, std::vector<int32_t> lengths, int64_t tokens) {
    std::vector<int32_t> flat;
    for (const auto& row : table) flat.insert(flat.end(), row.begin(), row.end());
    const auto batch = static_cast<int64_t>(table.size());
    const int64_t columns = batch > 0 ? static_cast<int64_t>(table[0].size()) : 0;
    const auto pages = [](const float* data) { return ConstTensor::contiguous(DType::f32, {4, 16, 1, 1}, data); };
    const auto rows = [&](std::vector<float>& data) {
      return Tensor::contiguous(DType::f32, {tokens, 1, 1}, data.data());
    };
    return gather_pa_kv_cache(
        context_, pages(cache_), pages(values_), ConstTensor::contiguous(DType::i32, {batch, columns}, flat.data()),
        ConstTensor::contiguous(DType::i32, {static_cast<int64_t>(lengths.size())}, lengths.data()), rows(out_),
        rows(out_values_), options_);
  }
  std::vector<float> first(size_t n) const {
    EXPECT_EQ(out_, out_values_);
    return {out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(n)};
  }
  void expect_untouched() const {
    for (float x : out_) EXPECT_EQ(x, 7.0f);
    for (float x : out_values_) EXPECT_EQ(x, 7.0f);
  }
  void expect_refused(const Status& status, const std::string& message) const {
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_EQ(status.message(), "gather_pa_kv_cache: " + message);
    expect_untouched();
  }
};

// Lengths beyond the table's columns.
TEST_F(SmallPool, B61_LengthsBeyondTheTable) {
  expect_refused(
      gather({{0, 1}, {2, 3}}, {33, 5}, 38),
      "sequence 0 reads positions 0 to 32, but block_table has 2 blocks of 16 rows for it, positions 0 to 31");
  expect_refused(
      gather({{0, 1}, {2, 3}}, {5, 33}, 38),
      "sequence 1 reads positions 0 to 32, but block_table has 2 blocks of 16 rows for it, positions 0 to 31");
  expect_refused(gather({{0, 1}, {2, 3}}, {5}, 5), "kv_lengths dim 0 (batch) is 1, but block_table set batch = 2");
  expect_refused(gather({{0, 1}, {2, 3}}, {5, -1}, 4), "kv_lengths[1] is -1, but must be >= 0");
  expect_refused(gather({{0, 1}, {2, 3}}, {5, 2}, 8),
                 "key dim 0 (tokens) is 8, but the lengths of 2 sequences sum to 7");
  EXPECT_TRUE(gather({{0, 1}, {2, 3}}, {32, 32}, 64).ok());
}

// Block ids that do not exist, come twice, are shared.
TEST_F(SmallPool, B62_BlockIds) {
  expect_refused(gather({{0, 4}},
                        {
                            17,
                        },
                        17),
                 "block_table[0, 1] (sequence 0, position 16) is block 4, but the cache has num_blocks = 4");
  expect_refused(gather({{0, -1}}, {32}, 32),
                 "block_table[0, 1] (sequence 0, position 16) is block -1, but the cache has num_blocks = 4");
  EXPECT_TRUE(gather({{1, 1}}, {18}, 18).ok());
  EXPECT_EQ(first(19), (std::vector<float>{16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 16, 17, 7}));
  EXPECT_TRUE(gather({{2, 0}, {2, 3}}, {2, 3}, 5).ok());
  EXPECT_EQ(first(5), (std::vector<float>{32, 33, 32, 33, 34}));
}

// Columns past the length are never looked at.
TEST_F(SmallPool, B64_StaleTailOfTheTable) {
  EXPECT_TRUE(gather({{3, 1 << 30, -7, 1 << 30}}, {5}, 5).ok());
  EXPECT_EQ(first(6), (std::vector<float>{48, 49, 50, 51, 52, 7}));
  EXPECT_TRUE(gather({{3, 1 << 30, -7, 1 << 30}}, {16}, 16).ok());
  EXPECT_EQ(gather({{3, 1 << 30, -7, 1 << 30}}, {17}, 17).message(),
            "gather_pa_kv_cache: block_table[0, 1] (sequence 0, position 16) is block 1073741824, but the cache has "
            "num_blocks = 4");
  EXPECT_TRUE(gather({{1 << 30, 1 << 30}}, {0}, 0).ok());
  EXPECT_TRUE(gather({}, {}, 0).ok());
}

TEST_F(SmallPool, ZeroFillsOnRequest) {
  options_.zero_fill = true;
  // The second block does not exist, the table has no third one.
  EXPECT_TRUE(gather({{3, -1}, {4, 0}}, {34, 18}, 52).ok());
  std::vector<float> expected(53, 0.0f);
  for (size_t i = 0; i < 16; ++i) expected[i] = static_cast<float>(48 + i);
  expected[50] = 0, expected[51] = 1, expected[52] = 7;
  EXPECT_EQ(first(53), expected);
  EXPECT_EQ(gather({{0}}, {-1}, 0).message(), "gather_pa_kv_cache: kv_lengths[0] is -1, but must be >= 0");
}

TEST_F(SmallPool, StartsWhereItIsTold) {
  const int64_t offsets[2] = {15, 3};
  options_.seq_offset = ConstTensor::contiguous(DType::i64, {2}, offsets);
  // Column 0 of the second sequence's row is needed, column 0 of the first one's too: position 15.
  EXPECT_TRUE(gather({{1, 0}, {2, -1}}, {3, 2}, 5).ok());
  EXPECT_EQ(first(5), (std::vector<float>{31, 0, 1, 35, 36}));
  const int64_t whole_block[2] = {16, 0};
  options_.seq_offset.data = whole_block;
  EXPECT_TRUE(gather({{-1, 0}, {2, -1}}, {3, 2}, 5).ok());
  EXPECT_EQ(first(5), (std::vector<float>{0, 1, 2, 32, 33}));
  const int64_t negative[2] = {0, -1}, far[2] = {INT64_MAX, 0};
  options_.seq_offset.data = negative;
  EXPECT_EQ(gather({{1, 0}, {2, 0}}, {3, 2}, 5).message(), "gather_pa_kv_cache: seq_offset[1] is -1, but must be >= 0");
  options_.seq_offset.data = far;
  EXPECT_EQ(gather({{1, 0}, {2, 0}}, {3, 2}, 5).message(),
            "gather_pa_kv_cache: seq_offset[0] + length is 9223372036854775807 + 3, but must be below 2^63");
}

TEST_F(SmallPool, CumulativeLengths) {
  options_.cumulative_lengths = true;
  EXPECT_TRUE(gather({{1}, {0}, {2}}, {0, 2, 2, 3}, 3).ok());
  EXPECT_EQ(first(4), (std::vector<float>{16, 17, 32, 7}));
  out_.assign(64, 7.0f), out_values_ = out_;
  expect_refused(gather({{1}, {0}}, {0, 2, 1}, 1),
                 "kv_lengths[2] is 1, but cumulative lengths do not fall: kv_lengths[1] is 2");
  expect_refused(gather({{1}, {0}}, {1, 2, 3}, 2), "kv_lengths[0] is 1, but cumulative lengths start with 0");
  expect_refused(gather({{1}, {0}}, {0, 2}, 2),
                 "kv_lengths dim 0 is 2, but cumulative lengths of block_table's batch = 2 are 3");
}

TEST_F(SmallPool, NamesHeadsThatDoNotExist) {
  for (int32_t bad : {1, -1}) {
    const int32_t heads[1] = {bad};
    options_.head_indices = ConstTensor::contiguous(DType::i32, {1}, heads);
    expect_refused(gather({{1}}, {2}, 2),
                   "head_indices[0] is " + std::to_string(bad) + ", but the cache has num_kv_heads = 1");
  }
  const int32_t heads[2] = {0, 0};
  options_.head_indices = ConstTensor::contiguous(DType::i32, {2}, heads);
  expect_refused(gather({{1}}, {2}, 2), "key dim 1 (heads) is 1, but head_indices set heads = 2");
}

TEST(Gather, NamesWhatIsWrong) {
  Context& context = contexts_with_threads(1).back().context;
  std::vector<float> memory(4 * 1024);
  const PageSizes sizes = {.num_blocks = 2, .block_size = 32, .num_kv_heads = 1, .head_dim = 4, .value_head_dim = 2};
  const int32_t table[1] = {0}, length[1] = {3};
  const ConstTensor blocks = ConstTensor::contiguous(DType::i32, {1, 1}, table);
  const ConstTensor lengths = ConstTensor::contiguous(DType::i32, {1}, length);
  const auto gather = [&](PageLayout layout, DType dtype, const Tensor& key, const Tensor& value) {
    return gather_pa_kv_cache(context, key_pages(layout, dtype, sizes, memory.data()),
                              value_pages(layout, dtype, sizes, memory.data() + 1024), blocks, lengths, key, value,
                              {.layout = layout});
  };
  const Tensor key = Tensor::contiguous(DType::f32, {3, 1, 4}, memory.data() + 2048);
  const Tensor value = Tensor::contiguous(DType::f32, {3, 1, 2}, memory.data() + 3072);
  EXPECT_TRUE(gather(PageLayout::norm, DType::f16, key, value).ok());
  EXPECT_TRUE(gather(PageLayout::panel32, DType::bf16, key, value).ok());
  EXPECT_EQ(gather(PageLayout::norm, DType::f32, key.narrowed(2, 0, 3), value).message(),
            "gather_pa_kv_cache: key dim 2 (head_dim) is 3, but key_cache set head_dim = 4");
  EXPECT_EQ(gather(PageLayout::panel32, DType::bf16, key.narrowed(2, 0, 3), value).message(),
            "gather_pa_kv_cache: key dim 2 (head_dim) is 3, but key_cache set head_dim = 4");
  EXPECT_EQ(gather(PageLayout::panel32, DType::bf16, key, value.narrowed(2, 0, 1)).message(),
            "gather_pa_kv_cache: value dim 2 (value_head_dim) is 1, but value_cache set value_head_dim = 2");
  EXPECT_EQ(gather(PageLayout::norm, DType::f32, key, value.narrowed(0, 0, 2)).message(),
            "gather_pa_kv_cache: value dim 0 (tokens) is 2, but key set tokens = 3");
  EXPECT_NE(gather(PageLayout::norm, DType::f32, Tensor::contiguous(DType::f32, {3, 1, 4}, memory.data()), value)
                .message()
                .find("key f32 [3, 1, 4] overlaps key_cache"),
            std::string::npos);
  const Status f64 = gather_pa_kv_cache(context, Tensor::contiguous(DType::f64, {2, 1, 1, 4, 32}, memory.data()),
                                        Tensor::contiguous(DType::f64, {2, 1, 32, 2}, memory.data() + 1024), blocks,
                                        lengths, key, value, {.layout = PageLayout::panel32});
  EXPECT_EQ(f64.code(), StatusCode::unsupported);
  EXPECT_EQ(
      f64.message(),
      "gather_pa_kv_cache: page layout panel32: dtype is f64, but must be f32, bf16, f16, i8, u8, f8_e4m3 or f8_e5m2");
}

}  // namespace
}  // namespace opst

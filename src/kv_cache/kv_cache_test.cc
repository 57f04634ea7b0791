#include "opst/kv_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kv_cache/reference.h"
#include "testing/compare.h"
#include "testing/contexts.h"
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
using test::Random;
using test::TestContext;

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

struct Problem {
  DType from = DType::f32, to = DType::f32;
  int64_t tokens = 1, heads = 1, head_dim = 8, value_head_dim = 8, num_blocks = 4, block_size = 4;
  bool strided = false;
  std::vector<int64_t> slots;

  std::string text() const {
    return std::string(to_string(from)) + " -> " + to_string(to) + ", tokens " + std::to_string(tokens) + ", heads " +
           std::to_string(heads) + ", dims " + std::to_string(head_dim) + " and " + std::to_string(value_head_dim) +
           ", blocks " + std::to_string(num_blocks) + " x " + std::to_string(block_size) + (strided ? ", strided" : "");
  }
};

ConstTensor slots_of(const Problem& p) {
  return ConstTensor::contiguous(DType::i64, {static_cast<int64_t>(p.slots.size())}, p.slots.data());
}

// One of the two caches and its source.
struct Side {
  GuardedBuffer source_memory, cache_memory;
  Tensor source, cache;

  Side(const Problem& p, int64_t dim, Random& random)
      : source_memory(p.tokens * p.heads * dim * size_bytes(p.from), random.chance(0.5) ? Guard::after : Guard::before),
        cache_memory(p.num_blocks * p.block_size * p.heads * dim * size_bytes(p.to),
                     random.chance(0.5) ? Guard::after : Guard::before) {
    if (p.strided) {
      // Tokens innermost; and [block][head][dim][row], as a transposed page would lie.
      source = source_memory.tensor(p.from, {p.heads, dim, p.tokens}).transposed(1, 2).transposed(0, 1);
      cache = cache_memory.tensor(p.to, {p.num_blocks, p.heads, dim, p.block_size}).transposed(2, 3).transposed(1, 2);
    } else {
      source = source_memory.tensor(p.from, {p.tokens, p.heads, dim});
      cache = cache_memory.tensor(p.to, {p.num_blocks, p.block_size, p.heads, dim});
    }
    test::fill(source, Fill::normal, random);
    test::fill(cache, Fill::normal, random);
  }

  // What the cache must hold afterwards, rounded to its dtype.
  std::vector<double> expected(const Problem& p, int64_t dim) const {
    std::vector<double> rounded(static_cast<size_t>(p.tokens * p.heads * dim));
    std::vector<double> cache_values = test::to_doubles(cache);
    std::vector<char> bytes(rounded.size() * 4);
    const Tensor to = Tensor::contiguous(p.to, {p.tokens, p.heads, dim}, bytes.data());
    test::copy(source, to);
    reference::scatter(test::to_doubles(to), p.heads * dim, p.slots, cache_values);
    return cache_values;
  }
};

void check_problem(const TestContext& t, const Problem& p, Random& random) {
  SCOPED_TRACE(t.name + ", " + p.text());
  Side key(p, p.head_dim, random), value(p, p.value_head_dim, random);
  const std::vector<double> expected_key = key.expected(p, p.head_dim);
  const std::vector<double> expected_value = value.expected(p, p.value_head_dim);
  const Status status = scatter_pa_kv_cache(t.context, key.source, value.source, slots_of(p), key.cache, value.cache);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(test::to_doubles(key.cache), expected_key);
  ASSERT_EQ(test::to_doubles(value.cache), expected_value);
  EXPECT_TRUE(key.cache_memory.slack_intact() && value.cache_memory.slack_intact());
}

TEST(Scatter, EqualsTheReferenceInEveryContext) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (int64_t dim : {0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 67}) {
      Problem p;
      p.from = kTypes[random.integer(0, 2)];
      p.to = kTypes[random.integer(0, 2)];
      p.tokens = random.pick<int64_t>({0, 1, 2, 5, 13});
      p.heads = random.pick<int64_t>({1, 2, 3});
      p.head_dim = dim;
      p.value_head_dim = random.chance(0.5) ? dim : random.integer(0, 40);
      p.num_blocks = random.integer(1, 7);
      p.block_size = random.pick<int64_t>({1, 2, 3, 16, 17});
      p.strided = random.chance(0.3);
      for (int64_t i = 0; i < p.tokens; ++i) p.slots.push_back(random.integer(-1, p.num_blocks * p.block_size - 1));
      check_problem(t, p, random);
      if (HasFatalFailure()) return;
    }
  }
}

// Enough work for many tasks, most slots named many times: the last token wins, whoever runs the tasks.
TEST(Scatter, TheLastOfSeveralTokensWins) {
  Random random(test::seed());
  for (int num_threads : {1, 2, 5}) {
    for (const TestContext& t : contexts_with_threads(num_threads)) {
      Problem p;
      p.tokens = 2000;
      p.heads = 3;
      p.head_dim = p.value_head_dim = 64;
      p.num_blocks = 9;
      p.block_size = 17;
      for (int64_t i = 0; i < p.tokens; ++i) p.slots.push_back(random.integer(-1, 9 * 17 - 1));
      check_problem(t, p, random);
      if (HasFatalFailure()) return;
    }
  }
}

// Rounding: every 16-bit value comes back as it was, NaN stays NaN.
TEST(Scatter, RoundsOnceAndKeepsSpecialValues) {
  for (const TestContext& t : contexts_with_threads(1)) {
    for (DType dtype : {DType::bf16, DType::f16}) {
      SCOPED_TRACE(t.name + std::string(", ") + to_string(dtype));
      std::vector<uint16_t> bits(65536), back(65536), copied(65536);
      std::vector<float> wide(65536);
      for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
      const int64_t slots[1] = {0};
      const ConstTensor slot = ConstTensor::contiguous(DType::i64, {1}, slots);
      const auto scatter = [&](DType from, void* in, DType to, void* out) {
        const ConstTensor source = ConstTensor::contiguous(from, {1, 1, 65536}, in);
        return scatter_pa_kv_cache(t.context, source, ConstTensor::contiguous(from, {1, 1, 0}, in), slot,
                                   Tensor::contiguous(to, {1, 1, 1, 65536}, out),
                                   Tensor::contiguous(to, {1, 1, 1, 0}, nullptr));
      };
      ASSERT_TRUE(scatter(dtype, bits.data(), DType::f32, wide.data()).ok());
      ASSERT_TRUE(scatter(DType::f32, wide.data(), dtype, back.data()).ok());
      ASSERT_TRUE(scatter(dtype, bits.data(), dtype, copied.data()).ok());
      EXPECT_EQ(copied, bits);
      const ConstTensor original = ConstTensor::contiguous(dtype, {65536}, bits.data());
      for (int64_t i = 0; i < 65536; ++i) {
        const double value = test::get(original, i);
        const auto at = static_cast<size_t>(i);
        if (std::isnan(value)) {
          ASSERT_TRUE(std::isnan(wide[at]) &&
                      std::isnan(test::get(ConstTensor::contiguous(dtype, {65536}, back.data()), i)));
        } else {
          ASSERT_EQ(static_cast<double>(wide[at]), value);
          ASSERT_EQ(back[at], bits[at]);
        }
      }
    }
  }
}

// More elements than 2^31: offsets are 64 bits wide (a pool of 140,001 blocks of [16, 8, 128]).
TEST(Scatter, WritesBeyond32BitOffsets) {
  constexpr int64_t kBlocks = 140001, kBlockSize = 16, kHeads = 8, kDim = 128, kTokens = 5;
  test::LazyMapping keys(kBlocks * kBlockSize * kHeads * kDim * 2), values(kBlocks * kBlockSize * kHeads * kDim * 2);
  if (keys.data() == nullptr || values.data() == nullptr) {
    GTEST_SKIP() << "no address space for 2 x " << keys.size_bytes() << " bytes";
  }
  const auto cache = [&](void* data) {
    return Tensor::contiguous(DType::bf16, {kBlocks, kBlockSize, kHeads, kDim}, data);
  };
  std::vector<float> key(kTokens * kHeads * kDim), value(key.size());
  const auto tokens = [&](std::vector<float>& v) {
    return Tensor::contiguous(DType::f32, {kTokens, kHeads, kDim}, v.data());
  };
  Random random(test::seed());
  test::fill(tokens(key), Fill::small_integers, random);
  test::fill(tokens(value), Fill::small_integers, random);
  for (const TestContext& t : contexts_with_threads(2)) {
    const auto write = [&](int64_t block) {
      std::vector<int64_t> slots;
      for (int64_t i = 0; i < kTokens; ++i) slots.push_back(block * kBlockSize + i);
      return scatter_pa_kv_cache(t.context, tokens(key), tokens(value),
                                 ConstTensor::contiguous(DType::i64, {kTokens}, slots.data()), cache(keys.data()),
                                 cache(values.data()));
    };
    ASSERT_TRUE(write(0).ok());
    ASSERT_TRUE(write(140000).ok());
    for (void* data : {keys.data(), values.data()}) {
      const std::vector<double> far = test::to_doubles(cache(data).selected(0, 140000));
      EXPECT_EQ(far, test::to_doubles(cache(data).selected(0, 0)));
      const std::vector<double> expected = test::to_doubles(tokens(data == keys.data() ? key : value));
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), far.begin()));
      std::memset(cache(data).selected(0, 140000).data, 0, kBlockSize * kHeads * kDim * 2);
    }
  }
}

TEST(Scatter, RefusesSlotsOutsideBeforeWriting) {
  Context& context = contexts_with_threads(2).back().context;
  std::vector<float> key(3 * 8, 1.0f), key_cache(4 * 4 * 8, 7.0f), value_cache(4 * 4 * 8, 7.0f);
  const ConstTensor tokens = ConstTensor::contiguous(DType::f32, {3, 1, 8}, key.data());
  for (int64_t bad : {int64_t{16}, int64_t{-2}, INT64_MAX, INT64_MIN}) {
    const int64_t slots[3] = {0, 1, bad};
    const Status status = scatter_pa_kv_cache(context, tokens, tokens, ConstTensor::contiguous(DType::i64, {3}, slots),
                                              Tensor::contiguous(DType::f32, {4, 4, 1, 8}, key_cache.data()),
                                              Tensor::contiguous(DType::f32, {4, 4, 1, 8}, value_cache.data()));
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_EQ(status.message(), "scatter_pa_kv_cache: slot_mapping[2] is " + std::to_string(bad) +
                                    ", but the cache has 4 blocks of 4 rows = 16 slots (-1 skips a token)");
  }
  for (float x : key_cache) EXPECT_EQ(x, 7.0f);
  for (float x : value_cache) EXPECT_EQ(x, 7.0f);
}

TEST(Scatter, NamesWhatIsWrong) {
  Context& context = contexts_with_threads(1).back().context;
  std::vector<float> key(64), value(64), key_cache(256), value_cache(256);
  const int64_t slots[2] = {0, 1};
  const Tensor k = Tensor::contiguous(DType::f32, {2, 2, 8}, key.data());
  const Tensor v = Tensor::contiguous(DType::f32, {2, 2, 4}, value.data());
  const Tensor kc = Tensor::contiguous(DType::f32, {2, 4, 2, 8}, key_cache.data());
  const Tensor vc = Tensor::contiguous(DType::f32, {2, 4, 2, 4}, value_cache.data());
  const ConstTensor s = ConstTensor::contiguous(DType::i64, {2}, slots);
  const auto message = [&](const Tensor& a, const Tensor& b, const ConstTensor& c, const Tensor& d, const Tensor& e) {
    return scatter_pa_kv_cache(context, a, b, c, d, e).message();
  };
  EXPECT_EQ(message(k, v, s, kc, vc), "");
  EXPECT_EQ(message(k, v, s.narrowed(0, 0, 1), kc, vc),
            "scatter_pa_kv_cache: slot_mapping dim 0 (tokens) is 1, but key set tokens = 2");
  EXPECT_EQ(message(k, v, s, kc, vc.narrowed(3, 0, 3)),
            "scatter_pa_kv_cache: value_cache dim 3 (value_head_dim) is 3, but value set value_head_dim = 4");
  EXPECT_EQ(message(k, v, s, kc.narrowed(2, 0, 1), vc),
            "scatter_pa_kv_cache: key_cache dim 2 (num_kv_heads) is 1, but key set num_kv_heads = 2");
  EXPECT_EQ(message(k, v, s, kc, Tensor::contiguous(DType::bf16, {2, 4, 2, 4}, value_cache.data())),
            "scatter_pa_kv_cache: value_cache is bf16, but must be f32");
  EXPECT_EQ(message(Tensor::contiguous(DType::f64, {2, 2, 8}, key.data()), v, s, kc, vc),
            "scatter_pa_kv_cache: key is f64, but must be f32, bf16 or f16");
  EXPECT_NE(message(k, v, s, kc, Tensor::contiguous(DType::f32, {2, 4, 2, 4}, key_cache.data())).find("overlaps"),
            std::string::npos);
  EXPECT_EQ(message(k, v, s, kc.narrowed(1, 0, 0), vc.narrowed(1, 0, 0)),
            "scatter_pa_kv_cache: page layout norm: block_size is 0, but must be >= 1");
}

TEST(PageLayout, SaysWhatItHolds) {
  EXPECT_STREQ(to_string(PageLayout::norm), "norm");
  EXPECT_TRUE(supports(PageLayout::norm, DType::bf16, 1).ok());
  EXPECT_EQ(supports(PageLayout::norm, DType::i8, 16).code(), StatusCode::unsupported);
  EXPECT_EQ(supports(PageLayout::norm, DType::i8, 16).message(),
            "page layout norm: dtype is i8, but must be f32, bf16 or f16");

  EXPECT_STREQ(to_string(PageLayout::panel32), "panel32");
  EXPECT_TRUE(supports(PageLayout::panel32, DType::f32, 32, 33).ok());
  EXPECT_TRUE(supports(PageLayout::panel32, DType::bf16, 96, 64).ok());
  EXPECT_EQ(supports(PageLayout::panel32, DType::bf16, 32, 33).code(), StatusCode::unsupported);
  EXPECT_EQ(supports(PageLayout::panel32, DType::bf16, 32, 33).message(),
            "page layout panel32: head_dim is 33, but must be even for bf16");
  EXPECT_EQ(supports(PageLayout::panel32, DType::f16, 32).message(),
            "page layout panel32: dtype is f16, but must be f32 or bf16");
  EXPECT_EQ(supports(PageLayout::panel32, DType::f32, 16).message(),
            "page layout panel32: block_size is 16, but must be a multiple of 32");
  EXPECT_EQ(supports(PageLayout::panel32, DType::f32, 0).message(),
            "page layout panel32: block_size is 0, but must be >= 1");
}

TEST(PageLayout, ShapesTheCaches) {
  const PageSizes sizes = {.num_blocks = 3, .block_size = 64, .num_kv_heads = 2, .head_dim = 6, .value_head_dim = 5};
  const auto keys = [&](PageLayout layout, DType dtype) { return to_string(key_pages(layout, dtype, sizes, nullptr)); };
  const auto values = [&](PageLayout layout, DType dtype) {
    return to_string(value_pages(layout, dtype, sizes, nullptr));
  };
  EXPECT_EQ(keys(PageLayout::norm, DType::f16), "f16 [3, 64, 2, 6]");
  EXPECT_EQ(values(PageLayout::norm, DType::f16), "f16 [3, 64, 2, 5]");
  EXPECT_EQ(keys(PageLayout::panel32, DType::f32), "f32 [3, 2, 2, 6, 32]");
  EXPECT_EQ(values(PageLayout::panel32, DType::f32), "f32 [3, 2, 64, 5]");
  EXPECT_EQ(keys(PageLayout::panel32, DType::bf16), "bf16 [3, 2, 2, 3, 64]");
  EXPECT_EQ(values(PageLayout::panel32, DType::bf16), "bf16 [3, 2, 32, 10]");
  EXPECT_EQ(key_pages(PageLayout::panel32, DType::f16, sizes, nullptr).rank, 0);
  EXPECT_EQ(value_pages(PageLayout::panel32, DType::f16, sizes, nullptr).rank, 0);
}

TEST(Scatter, ZeroSizesAreLegal) {
  Context& context = contexts_with_threads(2).back().context;
  const auto empty = [](std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(DType::f32, shape, nullptr);
  };
  const ConstTensor none = ConstTensor::contiguous(DType::i64, {0}, nullptr);
  EXPECT_TRUE(
      scatter_pa_kv_cache(context, empty({0, 2, 8}), empty({0, 2, 8}), none, empty({0, 16, 2, 8}), empty({0, 16, 2, 8}))
          .ok());
  const int64_t slot[1] = {0};
  const ConstTensor one = ConstTensor::contiguous(DType::i64, {1}, slot);
  EXPECT_TRUE(
      scatter_pa_kv_cache(context, empty({1, 0, 8}), empty({1, 0, 8}), one, empty({1, 16, 0, 8}), empty({1, 16, 0, 8}))
          .ok());
}

}  // namespace
}  // namespace opst

#include "opst/kv_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kv_cache/reference.h"
#include "kv_cache/test_cache.h"
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
using test::TestCache;
using test::TestContext;

// Of a cache all, of tokens the first three.
constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16, DType::f8_e4m3, DType::f8_e5m2};

struct Problem {
  DType from = DType::f32, to = DType::f32;
  PageLayout layout = PageLayout::norm;
  int64_t tokens = 1;
  PageSizes sizes = {.num_blocks = 4, .block_size = 4, .num_kv_heads = 1, .head_dim = 8, .value_head_dim = 8};
  bool strided = false;
  std::vector<int64_t> slots = {};

  std::string text() const {
    return std::string(to_string(from)) + " -> " + to_string(to) + " in " + to_string(layout) + ", tokens " +
           std::to_string(tokens) + ", " + test::text(sizes) + (strided ? ", strided" : "");
  }
};

ConstTensor slots_of(const Problem& p) {
  return ConstTensor::contiguous(DType::i64, {static_cast<int64_t>(p.slots.size())}, p.slots.data());
}

// The keys or the values of the new tokens.
struct Tokens {
  GuardedBuffer memory;
  Tensor tensor;

  Tokens(const Problem& p, int64_t dim, Random& random)
      : memory(p.tokens * p.sizes.num_kv_heads * dim * size_bytes(p.from),
               random.chance(0.5) ? Guard::after : Guard::before) {
    const int64_t heads = p.sizes.num_kv_heads;
    // Strided: tokens innermost.
    tensor = p.strided ? memory.tensor(p.from, {heads, dim, p.tokens}).transposed(1, 2).transposed(0, 1)
                       : memory.tensor(p.from, {p.tokens, heads, dim});
    test::fill(tensor, Fill::normal, random);
    memory.make_read_only();
  }

  // What a cache that held `before` must hold afterwards, in the order of the norm layout.
  std::vector<double> expected(const Problem& p, std::vector<double> before) const {
    std::vector<char> bytes(static_cast<size_t>(tensor.num_elements()) * 4);
    const Tensor rounded = Tensor::contiguous(p.to, {tensor.shape[0], tensor.shape[1], tensor.shape[2]}, bytes.data());
    test::copy(tensor, rounded);
    reference::scatter(test::to_doubles(rounded), tensor.shape[1] * tensor.shape[2], p.slots, before);
    return before;
  }
};

void check_problem(const TestContext& t, const Problem& p, Random& random) {
  SCOPED_TRACE(t.name + ", " + p.text());
  const Tokens key(p, p.sizes.head_dim, random), value(p, p.sizes.value_head_dim, random);
  const TestCache cache(p.layout, p.to, p.sizes, p.strided, random);
  const std::vector<double> expected_keys = key.expected(p, cache.keys());
  const std::vector<double> expected_values = value.expected(p, cache.values());
  const Status status = scatter_pa_kv_cache(t.context, key.tensor, value.tensor, slots_of(p), cache.key, cache.value,
                                            {.layout = p.layout});
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(cache.keys(), expected_keys);
  ASSERT_EQ(cache.values(), expected_values);
  EXPECT_TRUE(cache.slack_intact());
}

TEST(Scatter, EqualsTheReferenceInEveryContext) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (int64_t dim : {0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 67, 129}) {
      Problem p;
      p.from = kTypes[random.integer(0, 2)];
      p.to = kTypes[random.integer(0, 4)];
      p.layout = random.chance(0.5) ? PageLayout::panel32 : PageLayout::norm;
      const bool panels = p.layout == PageLayout::panel32;
      p.tokens = random.pick<int64_t>({0, 1, 2, 5, 13});
      p.sizes = {.num_blocks = random.integer(1, 7),
                 .block_size = panels ? random.pick<int64_t>({32, 64, 96}) : random.pick<int64_t>({1, 2, 3, 16, 17}),
                 .num_kv_heads = random.pick<int64_t>({1, 2, 3}),
                 .head_dim = panels && p.to == DType::bf16 ? dim / 2 * 2 : dim,
                 .value_head_dim = random.chance(0.5) ? dim : random.integer(0, 40)};
      p.strided = random.chance(0.3);
      const int64_t num_slots = p.sizes.num_blocks * p.sizes.block_size;
      for (int64_t i = 0; i < p.tokens; ++i) p.slots.push_back(random.integer(-1, num_slots - 1));
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
      for (PageLayout layout : {PageLayout::norm, PageLayout::panel32}) {
        Problem p;
        p.layout = layout;
        p.to = random.pick<DType>({DType::f32, DType::bf16});
        p.tokens = 1000;
        p.sizes = {.num_blocks = 3, .block_size = 32, .num_kv_heads = 3, .head_dim = 64, .value_head_dim = 64};
        for (int64_t i = 0; i < p.tokens; ++i) p.slots.push_back(random.integer(-1, 3 * 32 - 1));
        check_problem(t, p, random);
        if (HasFatalFailure()) return;
      }
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

// More elements than 2^31: offsets are 64 bits wide (a pool of 140,001 blocks of [16, 8, 128], or half as many of 32
// rows).
TEST(Scatter, B44_WritesBeyond32BitOffsets) {
  constexpr int64_t kTokens = 5;
  for (PageLayout layout : {PageLayout::norm, PageLayout::panel32}) {
    SCOPED_TRACE(to_string(layout));
    PageSizes sizes = {
        .num_blocks = 140001, .block_size = 16, .num_kv_heads = 8, .head_dim = 128, .value_head_dim = 128};
    if (layout == PageLayout::panel32) sizes.num_blocks = 70001, sizes.block_size = 32;
    const int64_t last = sizes.num_blocks - 1;
    const int64_t page_bytes = sizes.block_size * sizes.num_kv_heads * sizes.head_dim * 2;
    test::LazyMapping keys(sizes.num_blocks * page_bytes), values(sizes.num_blocks * page_bytes);
    if (keys.data() == nullptr || values.data() == nullptr) {
      GTEST_SKIP() << "no address space for 2 x " << keys.size_bytes() << " bytes";
    }
    const Tensor key_cache = key_pages(layout, DType::bf16, sizes, keys.data());
    const Tensor value_cache = value_pages(layout, DType::bf16, sizes, values.data());
    std::vector<float> key(kTokens * 8 * 128), value(key.size());
    const auto tokens = [&](std::vector<float>& v) {
      return Tensor::contiguous(DType::f32, {kTokens, 8, 128}, v.data());
    };
    Random random(test::seed());
    test::fill(tokens(key), Fill::small_integers, random);
    test::fill(tokens(value), Fill::small_integers, random);
    for (const TestContext& t : contexts_with_threads(2)) {
      const auto write = [&](int64_t block) {
        std::vector<int64_t> slots;
        for (int64_t i = 0; i < kTokens; ++i) slots.push_back(block * sizes.block_size + i);
        return scatter_pa_kv_cache(t.context, tokens(key), tokens(value),
                                   ConstTensor::contiguous(DType::i64, {kTokens}, slots.data()), key_cache, value_cache,
                                   {.layout = layout});
      };
      ASSERT_TRUE(write(0).ok());
      ASSERT_TRUE(write(last).ok());
      for (const Tensor& cache : {key_cache, value_cache}) {
        const std::vector<double> far = test::to_doubles(cache.selected(0, last));
        EXPECT_EQ(far, test::to_doubles(cache.selected(0, 0)));
        EXPECT_NE(std::count_if(far.begin(), far.end(), [](double x) { return x != 0; }), 0);
        std::memset(cache.selected(0, last).data, 0, static_cast<size_t>(page_bytes));
      }
    }
  }
}

TEST(Scatter, B61_RefusesSlotsOutsideBeforeWriting) {
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
  EXPECT_EQ(message(k, v, ConstTensor::contiguous(DType::f32, {2}, slots), kc, vc),
            "scatter_pa_kv_cache: slot_mapping is f32, but must be i32 or i64");
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
  EXPECT_EQ(scatter_pa_kv_cache(context, k, v, s, kc.narrowed(1, 0, 0), vc.narrowed(1, 0, 0)).code(),
            StatusCode::unsupported);
}

TEST(Scatter, NamesWhatIsWrongWithPanels) {
  Context& context = contexts_with_threads(1).back().context;
  std::vector<float> memory(4 * 8192);
  const auto at = [&](int64_t i) { return memory.data() + i * 8192; };
  const int64_t slots[2] = {0, 1};
  const ConstTensor s = ConstTensor::contiguous(DType::i64, {2}, slots);
  PageSizes sizes = {.num_blocks = 2, .block_size = 64, .num_kv_heads = 2, .head_dim = 8, .value_head_dim = 4};
  const auto message = [&](const Tensor& kc, const Tensor& vc) {
    const Tensor k = Tensor::contiguous(DType::f32, {2, 2, 8}, at(0)),
                 v = Tensor::contiguous(DType::f32, {2, 2, 4}, at(1));
    return scatter_pa_kv_cache(context, k, v, s, kc, vc, {.layout = PageLayout::panel32}).message();
  };
  const auto keys = [&](DType dtype) { return key_pages(PageLayout::panel32, dtype, sizes, at(2)); };
  const auto values = [&](DType dtype) { return value_pages(PageLayout::panel32, dtype, sizes, at(3)); };
  EXPECT_EQ(message(keys(DType::f32), values(DType::f32)), "");
  EXPECT_EQ(message(keys(DType::bf16), values(DType::bf16)), "");
  EXPECT_EQ(
      message(Tensor::contiguous(DType::f64, {2, 2, 2, 8, 32}, at(2)), values(DType::f32)),
      "scatter_pa_kv_cache: page layout panel32: dtype is f64, but must be f32, bf16, f16, i8, u8, f8_e4m3 or f8_e5m2");
  EXPECT_EQ(message(keys(DType::bf16), values(DType::f32)),
            "scatter_pa_kv_cache: value_cache is f32, but must be bf16");
  EXPECT_EQ(message(Tensor::contiguous(DType::f32, {2, 64, 2, 8}, at(2)), values(DType::f32)),
            "scatter_pa_kv_cache: key_cache has rank 4, but [num_blocks, num_kv_heads, block_size / 32, head_dim, 32] "
            "has rank 5");
  EXPECT_EQ(message(Tensor::contiguous(DType::bf16, {2, 2, 2, 8, 32}, at(2)), values(DType::bf16)),
            "scatter_pa_kv_cache: key_cache dim 4 is 32, but must be 64");
  EXPECT_EQ(message(keys(DType::f32).narrowed(2, 0, 0), values(DType::f32).narrowed(2, 0, 0)),
            "scatter_pa_kv_cache: page layout panel32: block_size is 0, but must be >= 1");
  EXPECT_EQ(message(keys(DType::f32), values(DType::f32).narrowed(2, 0, 63)),
            "scatter_pa_kv_cache: value_cache dim 2 (block_size) is 63, but key_cache set block_size = 64");
  Tensor gap = keys(DType::f32).narrowed(0, 0, 1);
  gap.strides[2] = 512;
  gap.strides[1] = 1024;
  EXPECT_EQ(message(gap, values(DType::f32).narrowed(0, 0, 1)),
            "scatter_pa_kv_cache: key_cache stride 2 is 512, but must be 256: page layout panel32 is contiguous after "
            "num_kv_heads");
  EXPECT_EQ(message(keys(DType::bf16), values(DType::bf16).narrowed(3, 0, 7)),
            "scatter_pa_kv_cache: value_cache stride 2 is 8, but must be 7: page layout panel32 is contiguous after "
            "num_kv_heads");
  EXPECT_EQ(message(keys(DType::bf16), Tensor::contiguous(DType::bf16, {2, 2, 32, 7}, at(3))),
            "scatter_pa_kv_cache: value_cache dim 3 (2 * value_head_dim) is 7, but must be a multiple of 2");
  EXPECT_EQ(message(keys(DType::bf16), Tensor::contiguous(DType::bf16, {2, 2, 16, 8}, at(3))),
            "scatter_pa_kv_cache: value_cache holds block_size = 32, but key_cache set block_size = 64");
  sizes.head_dim = 6;
  EXPECT_EQ(message(keys(DType::bf16), values(DType::bf16)),
            "scatter_pa_kv_cache: key_cache holds head_dim = 6, but key set head_dim = 8");
  EXPECT_EQ(message(keys(DType::f32), values(DType::f32)),
            "scatter_pa_kv_cache: key_cache dim 3 (head_dim) is 6, but key set head_dim = 8");
}

TEST(PageLayout, FormatsSayWhereElementsLie) {
  Random random(test::seed());
  const PageSizes s = {.num_blocks = 3, .block_size = 64, .num_kv_heads = 2, .head_dim = 6, .value_head_dim = 5};
  for (const DType dtype : {DType::f32, DType::bf16, DType::f8_e5m2}) {
    const TestCache cache(PageLayout::panel32, dtype, s, false, random);
    for (const PageSide side : {PageSide::key, PageSide::value}) {
      const bool keys = side == PageSide::key;
      const Tensor& tensor = keys ? cache.key : cache.value;
      const PageFormat& format = page_format(PageLayout::panel32, dtype, side);
      const int64_t elements = keys ? s.head_dim : s.value_head_dim;
      ASSERT_EQ(tensor.rank, format.rank);
      EXPECT_EQ(tensor.shape[format.heads_dim], s.num_kv_heads);
      EXPECT_EQ(format.block_size(tensor.shape), s.block_size);
      EXPECT_EQ(format.row_elements(tensor.shape), elements);
      const std::vector<double> pages = test::to_doubles(tensor), norm = keys ? cache.keys() : cache.values();
      for (int64_t i = 0; i < std::ssize(norm); ++i) {
        const int64_t d = i % elements, head = i / elements % s.num_kv_heads, token = i / elements / s.num_kv_heads;
        const int64_t at = (token / s.block_size * s.num_kv_heads + head) * s.block_size * elements +
                           format.offset(token % s.block_size, d, elements);
        ASSERT_EQ(norm[static_cast<size_t>(i)], pages[static_cast<size_t>(at)]) << to_string(dtype) << " " << i;
      }
    }
  }
}

TEST(PageLayout, SaysWhatItHolds) {
  EXPECT_STREQ(to_string(PageLayout::norm), "norm");
  EXPECT_TRUE(supports(PageLayout::norm, DType::bf16, 1).ok());
  EXPECT_EQ(supports(PageLayout::norm, DType::i32, 16).code(), StatusCode::unsupported);
  EXPECT_EQ(supports(PageLayout::norm, DType::i32, 16).message(),
            "page layout norm: dtype is i32, but must be f32, bf16, f16, i8, u8, f8_e4m3 or f8_e5m2");

  EXPECT_STREQ(to_string(PageLayout::panel32), "panel32");
  EXPECT_TRUE(supports(PageLayout::panel32, DType::f32, 32, 33).ok());
  EXPECT_TRUE(supports(PageLayout::panel32, DType::bf16, 96, 64).ok());
  EXPECT_EQ(supports(PageLayout::panel32, DType::bf16, 32, 33).code(), StatusCode::unsupported);
  EXPECT_EQ(supports(PageLayout::panel32, DType::bf16, 32, 33).message(),
            "page layout panel32: head_dim is 33, but must be even for bf16");
  EXPECT_TRUE(supports(PageLayout::panel32, DType::f16, 32, 33).ok());
  EXPECT_EQ(supports(PageLayout::panel32, DType::f64, 32).message(),
            "page layout panel32: dtype is f64, but must be f32, bf16, f16, i8, u8, f8_e4m3 or f8_e5m2");
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
  EXPECT_EQ(keys(PageLayout::norm, DType::i8), "i8 [3, 64, 2, 6]");
  EXPECT_EQ(keys(PageLayout::norm, DType::u8), "u8 [3, 64, 2, 3]");
  EXPECT_EQ(keys(PageLayout::panel32, DType::i8), "i8 [3, 2, 2, 6, 32]");
  EXPECT_EQ(keys(PageLayout::panel32, DType::u8), "u8 [3, 2, 2, 3, 32]");
  EXPECT_EQ(values(PageLayout::panel32, DType::f8_e4m3), "f8_e4m3 [3, 2, 64, 5]");
  EXPECT_EQ(value_pages(PageLayout::norm, DType::u8, sizes, nullptr).rank, 0);  // 5 numbers fill no whole bytes
  EXPECT_EQ(to_string(key_scale_pages(PageLayout::norm, sizes, 3, nullptr)), "f32 [3, 64, 2, 3]");
  EXPECT_EQ(to_string(key_scale_pages(PageLayout::panel32, sizes, 3, nullptr)), "f32 [3, 2, 2, 3, 32]");
  EXPECT_EQ(to_string(value_scale_pages(PageLayout::panel32, sizes, 1, nullptr)), "f32 [3, 2, 64, 1]");
  EXPECT_EQ(keys(PageLayout::panel32, DType::f16), "f16 [3, 2, 2, 6, 32]");
  EXPECT_EQ(values(PageLayout::panel32, DType::f16), "f16 [3, 2, 64, 5]");
  EXPECT_EQ(key_pages(PageLayout::panel32, DType::f64, sizes, nullptr).rank, 0);
  EXPECT_EQ(value_pages(PageLayout::panel32, DType::f64, sizes, nullptr).rank, 0);
}

// The device's tables are i32; here every second element is a slot.
TEST(Scatter, TakesSlotsOf32Bits) {
  Context& context = contexts_with_threads(1).back().context;
  const int32_t slots[4] = {2, 99, -1, 99};
  ConstTensor mapping = ConstTensor::contiguous(DType::i32, {2}, slots);
  mapping.strides[0] = 2;
  const float key[2] = {5, 6};
  float keys[4] = {}, values[4] = {};
  const ConstTensor tokens = ConstTensor::contiguous(DType::f32, {2, 1, 1}, key);
  ASSERT_TRUE(scatter_pa_kv_cache(context, tokens, tokens, mapping, Tensor::contiguous(DType::f32, {2, 2, 1, 1}, keys),
                                  Tensor::contiguous(DType::f32, {2, 2, 1, 1}, values))
                  .ok());
  EXPECT_EQ(std::vector<float>(keys, keys + 4), (std::vector<float>{0, 0, 5, 0}));
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

void check_convert(const TestContext& t, const TestCache& from, const TestCache& to) {
  SCOPED_TRACE(t.name + ", " + to_string(from.key.dtype) + " in " + to_string(from.layout) + " -> " +
               to_string(to.key.dtype) + " in " + to_string(to.layout) + ", " + test::text(from.sizes) +
               (from.strided ? ", from strided" : "") + (to.strided ? ", to strided" : ""));
  const std::vector<double> keys = from.keys(), values = from.values();
  const Status status =
      convert_pages(t.context, from.key, from.value, to.key, to.value, {.from = from.layout, .to = to.layout});
  ASSERT_TRUE(status.ok()) << status.message();
  const auto rounded = [&](const std::vector<double>& exact) {
    std::vector<char> bytes(exact.size() * 4);
    const auto n = static_cast<int64_t>(exact.size());
    const Tensor result = Tensor::contiguous(to.key.dtype, {n}, bytes.data());
    test::copy(ConstTensor::contiguous(DType::f64, {n}, exact.data()), result);
    return test::to_doubles(result);
  };
  ASSERT_EQ(to.keys(), rounded(keys));
  ASSERT_EQ(to.values(), rounded(values));
  EXPECT_TRUE(to.slack_intact());
}

TEST(Convert, EqualsTheReferenceInEveryContext) {
  Random random(test::seed());
  for (const TestContext& t : contexts()) {
    for (int i = 0; i < 12; ++i) {
      const auto layout = [&] { return random.chance(0.6) ? PageLayout::panel32 : PageLayout::norm; };
      const DType from = kTypes[random.integer(0, 4)], to = kTypes[random.integer(0, 4)];
      const PageLayout from_layout = layout(), to_layout = layout();
      const bool panels = from_layout == PageLayout::panel32 || to_layout == PageLayout::panel32;
      const int64_t dim = random.pick<int64_t>({0, 1, 2, 7, 16, 33, 64, 66, 130});
      const PageSizes sizes = {
          .num_blocks = random.integer(0, 5),
          .block_size = panels ? random.pick<int64_t>({32, 64, 96}) : random.pick<int64_t>({1, 5, 16, 33, 70}),
          .num_kv_heads = random.integer(1, 3),
          .head_dim = panels && (from == DType::bf16 || to == DType::bf16) ? dim / 2 * 2 : dim,
          .value_head_dim = random.chance(0.5) ? dim : random.integer(0, 40)};
      const TestCache source(from_layout, from, sizes, random.chance(0.4), random);
      const TestCache target(to_layout, to, sizes, random.chance(0.4), random);
      check_convert(t, source, target);
      if (HasFatalFailure()) return;
    }
  }
}

// Without conversion squares of words are transposed, and value rows paired: every size around a vector, each way.
TEST(Convert, EverySizeAroundAVector) {
  Random random(test::seed());
  for (const TestContext& t : contexts_with_threads(1)) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      for (int64_t words : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47}) {
        const int64_t step = dtype == DType::bf16 ? 2 : 1;
        const PageSizes sizes = {
            .num_blocks = 1, .block_size = 32, .num_kv_heads = 2, .head_dim = words * step, .value_head_dim = words};
        const TestCache norm(PageLayout::norm, dtype, sizes, random.chance(0.2), random);
        const TestCache panels(PageLayout::panel32, dtype, sizes, random.chance(0.5), random);
        const TestCache back(PageLayout::norm, dtype, sizes, random.chance(0.2), random);
        check_convert(t, norm, panels);
        check_convert(t, panels, back);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// There and back: every bit pattern, also those of NaN.
TEST(Convert, ThereAndBackKeepsAllBits) {
  const PageSizes sizes = {.num_blocks = 16, .block_size = 64, .num_kv_heads = 2, .head_dim = 32, .value_head_dim = 32};
  for (const TestContext& t : contexts_with_threads(2)) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      std::vector<uint32_t> keys(65536), values(65536), panel_keys(65536), panel_values(65536), back_keys(65536),
          back_values(65536);
      Random random(test::seed());
      for (uint32_t i = 0; i < 65536; ++i) {
        keys[i] = static_cast<uint32_t>(random.bits());
        values[i] = i << 16 | i;
      }
      const auto norm = [&](std::vector<uint32_t>& v) { return key_pages(PageLayout::norm, dtype, sizes, v.data()); };
      const Tensor pk = key_pages(PageLayout::panel32, dtype, sizes, panel_keys.data());
      const Tensor pv = value_pages(PageLayout::panel32, dtype, sizes, panel_values.data());
      ASSERT_TRUE(convert_pages(t.context, norm(keys), norm(values), pk, pv).ok());
      ASSERT_TRUE(convert_pages(t.context, pk, pv, norm(back_keys), norm(back_values),
                                {.from = PageLayout::panel32, .to = PageLayout::norm})
                      .ok());
      const auto bytes = static_cast<size_t>(norm(keys).num_elements() * size_bytes(dtype));
      EXPECT_EQ(std::memcmp(back_keys.data(), keys.data(), bytes), 0);
      EXPECT_EQ(std::memcmp(back_values.data(), values.data(), bytes), 0);
    }
  }
}

// A private copy of one block within the pool.
TEST(Convert, CopiesOneBlockWithinAPool) {
  Random random(test::seed());
  const PageSizes sizes = {.num_blocks = 5, .block_size = 32, .num_kv_heads = 2, .head_dim = 6, .value_head_dim = 3};
  const TestCache cache(PageLayout::panel32, DType::bf16, sizes, true, random);
  std::vector<double> keys = cache.keys(), values = cache.values();
  const auto block = [](const Tensor& tensor, int64_t b) { return tensor.narrowed(0, b, 1); };
  const Status status = convert_pages(contexts_with_threads(2).back().context, block(cache.key, 1),
                                      block(cache.value, 1), block(cache.key, 3), block(cache.value, 3),
                                      {.from = PageLayout::panel32, .to = PageLayout::panel32});
  ASSERT_TRUE(status.ok()) << status.message();
  std::copy_n(keys.begin() + 32 * 12, 32 * 12, keys.begin() + 3 * 32 * 12);
  std::copy_n(values.begin() + 32 * 6, 32 * 6, values.begin() + 3 * 32 * 6);
  EXPECT_EQ(cache.keys(), keys);
  EXPECT_EQ(cache.values(), values);
}

TEST(Convert, NamesWhatIsWrong) {
  Context& context = contexts_with_threads(1).back().context;
  std::vector<float> memory(4 * 4096);
  PageSizes sizes = {.num_blocks = 2, .block_size = 32, .num_kv_heads = 2, .head_dim = 8, .value_head_dim = 4};
  struct Pair {
    Tensor key, value;
  };
  const auto pages = [&](PageLayout layout, DType dtype, int64_t place) {
    return Pair{key_pages(layout, dtype, sizes, memory.data() + place * 4096),
                value_pages(layout, dtype, sizes, memory.data() + (place + 1) * 4096)};
  };
  const auto convert = [&](const Pair& from, const Pair& to) {
    return convert_pages(context, from.key, from.value, to.key, to.value);
  };
  const Pair norm = pages(PageLayout::norm, DType::f32, 0), panels = pages(PageLayout::panel32, DType::bf16, 2);
  EXPECT_TRUE(convert(norm, panels).ok());
  sizes.block_size = 64;
  EXPECT_EQ(convert(norm, pages(PageLayout::panel32, DType::bf16, 2)).message(),
            "convert_pages: to_key holds block_size = 64, but from_key set block_size = 32");
  sizes.block_size = 32;
  sizes.head_dim = 6;
  EXPECT_EQ(convert(norm, pages(PageLayout::panel32, DType::bf16, 2)).message(),
            "convert_pages: to_key holds head_dim = 6, but from_key set head_dim = 8");
  sizes.head_dim = 8;
  sizes.value_head_dim = 5;
  EXPECT_EQ(convert(norm, pages(PageLayout::panel32, DType::bf16, 2)).message(),
            "convert_pages: to_value holds value_head_dim = 5, but from_value set value_head_dim = 4");
  EXPECT_EQ(convert(norm, {pages(PageLayout::panel32, DType::bf16, 2).key, norm.value}).code(),
            StatusCode::invalid_argument);
  const Status f64 = convert(norm, {Tensor::contiguous(DType::f64, {2, 2, 1, 8, 32}, memory.data()), panels.value});
  EXPECT_EQ(f64.code(), StatusCode::unsupported);
  EXPECT_EQ(f64.message(),
            "convert_pages: page layout panel32: dtype is f64, but must be f32, bf16, f16, i8, u8, f8_e4m3 or f8_e5m2");
  sizes.value_head_dim = 4;
  EXPECT_NE(convert(norm, pages(PageLayout::panel32, DType::f32, 0)).message().find("overlaps"), std::string::npos);
}

}  // namespace
}  // namespace opst

// Caches of integers: conversion, copies of blocks, scales that the caller gives, norms and rotation on the way; and
// what is refused, before anything is written.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kv_cache/test_quant_cache.h"
#include "opst/kv_cache.h"
#include "testing/contexts.h"

namespace opst {
namespace {

using namespace test;

constexpr const char* kIntegerNames[] = {"int8", "int8_offset", "int4", "int4_offset"};
constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
constexpr PageSizes kSizes = {
    .num_blocks = 3, .block_size = 64, .num_kv_heads = 2, .head_dim = 64, .value_head_dim = 32};

KvFormat format_of(const char* name) { return kv_format(name, kSizes.head_dim, kSizes.value_head_dim).value(); }

Status convert(const TestContext& t, const QuantCache& from, const QuantCache& to) {
  return convert_pages(t.context, from.key, from.value, to.key, to.value,
                       {.from = from.layout, .to = to.layout, .from_scales = from.scales, .to_scales = to.scales});
}

TEST(QuantPagesConvert, BetweenLayoutsKeepsAllBits) {
  Random random(seed());
  for (const TestContext& t : contexts_with_threads(2)) {
    for (const char* const name : kIntegerNames) {
      SCOPED_TRACE(t.name + std::string(", ") + name);
      const QuantCache norm(PageLayout::norm, format_of(name), kSizes, random.chance(0.5), random);
      const QuantCache panels(PageLayout::panel32, format_of(name), kSizes, random.chance(0.5), random);
      const QuantCache back(PageLayout::norm, format_of(name), kSizes, random.chance(0.5), random);
      ASSERT_TRUE(convert(t, norm, panels).ok());
      ASSERT_TRUE(convert(t, panels, back).ok());
      for (const QuantCache* const cache : {&panels, &back}) {
        EXPECT_EQ(cache->keys().bytes, norm.keys().bytes);
        EXPECT_EQ(cache->values().bytes, norm.values().bytes);
        EXPECT_EQ(cache->keys().scales, norm.keys().scales);
        EXPECT_EQ(cache->values().scales, norm.values().scales);
        EXPECT_EQ(cache->keys().offsets, norm.keys().offsets);
        EXPECT_TRUE(cache->pages.slack_intact() && cache->scale_pages.slack_intact());
      }
    }
  }
}

// To floats as gather reads them, from floats as scatter writes them, from one format to another by way of f32.
TEST(QuantPagesConvert, BetweenFormatsIsByWayOfF32) {
  Random random(seed());
  for (const TestContext& t : contexts_with_threads(2)) {
    for (const char* const from_name : kIntegerNames) {
      for (const char* const to_name : {"int8_offset", "int4"}) {
        SCOPED_TRACE(t.name + std::string(", ") + from_name + " to " + to_name);
        const PageLayout layout = random.pick({PageLayout::norm, PageLayout::panel32});
        const QuantCache from(PageLayout::norm, format_of(from_name), kSizes, false, random);
        const TestCache floats(layout, DType::f32, kSizes, false, random);
        ASSERT_TRUE(convert_pages(t.context, from.key, from.value, floats.key, floats.value,
                                  {.from = from.layout, .to = layout, .from_scales = from.scales})
                        .ok());
        const QuantSide keys = from.keys();
        const std::vector<double> got = floats.keys();
        for (size_t i = 0; i < got.size(); ++i) {
          const double exact = keys.value(i / 64, static_cast<int64_t>(i % 64));
          ASSERT_EQ(got[i], static_cast<double>(static_cast<float>(exact))) << i;
        }
        const QuantCache direct(PageLayout::panel32, format_of(to_name), kSizes, false, random);
        const QuantCache twice(PageLayout::panel32, format_of(to_name), kSizes, false, random);
        if (std::string(from_name) == to_name) continue;
        ASSERT_TRUE(convert(t, from, direct).ok());
        ASSERT_TRUE(convert_pages(t.context, floats.key, floats.value, twice.key, twice.value,
                                  {.from = layout, .to = twice.layout, .to_scales = twice.scales})
                        .ok());
        EXPECT_EQ(direct.keys().bytes, twice.keys().bytes);
        EXPECT_EQ(direct.values().scales, twice.values().scales);
        EXPECT_EQ(direct.keys().offsets, twice.keys().offsets);
      }
    }
  }
}

// Rows of bf16 panels lie in pairs, which no kernel of integers knows.
TEST(QuantPagesConvert, PairsAreTakenApart) {
  Random random(seed());
  for (const TestContext& t : contexts_with_threads(1)) {
    const TestCache pairs(PageLayout::panel32, DType::bf16, kSizes, false, random);
    const TestCache rows(PageLayout::norm, DType::bf16, kSizes, false, random);
    ASSERT_TRUE(convert_pages(t.context, pairs.key, pairs.value, rows.key, rows.value,
                              {.from = PageLayout::panel32, .to = PageLayout::norm})
                    .ok());
    const QuantCache a(PageLayout::panel32, format_of("int8"), kSizes, false, random);
    const QuantCache b(PageLayout::panel32, format_of("int8"), kSizes, false, random);
    ASSERT_TRUE(convert_pages(t.context, pairs.key, pairs.value, a.key, a.value,
                              {.from = PageLayout::panel32, .to_scales = a.scales})
                    .ok());
    ASSERT_TRUE(convert_pages(t.context, rows.key, rows.value, b.key, b.value,
                              {.from = PageLayout::norm, .to_scales = b.scales})
                    .ok());
    EXPECT_EQ(a.keys().bytes, b.keys().bytes);
    EXPECT_EQ(a.values().bytes, b.values().bytes);
    EXPECT_EQ(a.keys().scales, b.keys().scales);
    const TestCache back(PageLayout::panel32, DType::bf16, kSizes, false, random);
    ASSERT_TRUE(convert_pages(t.context, a.key, a.value, back.key, back.value,
                              {.from = PageLayout::panel32, .from_scales = a.scales})
                    .ok());
    const QuantSide keys = a.keys();
    const std::vector<double> got = back.keys();
    for (size_t i = 0; i < got.size(); ++i) {
      const double exact = keys.value(i / 64, static_cast<int64_t>(i % 64));
      ASSERT_NEAR(got[i], exact, std::abs(exact) * 0x1p-8) << i;
    }
  }
}

// What prepare_write asks for: the scales go with their block.
TEST(QuantPagesConvert, CopiesABlockWithItsScales) {
  Random random(seed());
  for (const PageLayout layout : {PageLayout::norm, PageLayout::panel32}) {
    const QuantCache cache(layout, format_of("int4_offset"), kSizes, true, random);
    const std::vector<double> before = cache.all_bytes();
    const auto block = [](const Tensor& tensor, int64_t b) { return tensor.narrowed(0, b, 1); };
    const Status status = convert_pages(
        contexts_with_threads(2).back().context, block(cache.key, 2), block(cache.value, 2), block(cache.key, 0),
        block(cache.value, 0),
        {.from = layout, .to = layout, .from_scales = cache.scales.blocks(2), .to_scales = cache.scales.blocks(0)});
    ASSERT_TRUE(status.ok()) << status.message();
    const QuantSide keys = cache.keys(), values = cache.values();
    for (const QuantSide* const side : {&keys, &values}) {
      const int64_t rows = kSizes.block_size * kSizes.num_kv_heads;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t d = 0; d < side->dim; ++d) {
          ASSERT_EQ(side->value(static_cast<size_t>(row), d), side->value(static_cast<size_t>(2 * rows + row), d));
        }
      }
    }
    std::vector<bool> written(static_cast<size_t>(kSizes.num_blocks * kSizes.block_size));
    std::fill_n(written.begin(), kSizes.block_size, true);
    cache.expect_rows_kept(before, written);
  }
}

// Keys and values of two tokens of small numbers, in a cache of one block of two rows.
struct Call {
  std::vector<float> key = std::vector<float>(16, 1.0f), value = std::vector<float>(16, 1.0f);
  std::vector<int8_t> keys = std::vector<int8_t>(16, 77), values = std::vector<int8_t>(16, 77);
  std::vector<float> key_scales = std::vector<float>(4, 0.5f), value_scales = std::vector<float>(4, 0.5f);
  std::vector<float> key_offsets = std::vector<float>(4, 1.0f), value_offsets = std::vector<float>(4, 1.0f);
  int64_t slots[2] = {0, 1};
  PageSizes sizes = {.num_blocks = 1, .block_size = 2, .num_kv_heads = 2, .head_dim = 4, .value_head_dim = 4};
  Tensor key_cache = key_pages(PageLayout::norm, DType::i8, sizes, keys.data());
  Tensor value_cache = value_pages(PageLayout::norm, DType::i8, sizes, values.data());
  ScatterOptions options;

  Call() {
    options.scales = {key_scale_pages(PageLayout::norm, sizes, 1, key_scales.data()),
                      value_scale_pages(PageLayout::norm, sizes, 1, value_scales.data()),
                      key_scale_pages(PageLayout::norm, sizes, 1, key_offsets.data()),
                      value_scale_pages(PageLayout::norm, sizes, 1, value_offsets.data())};
  }
  Status scatter() {
    return scatter_pa_kv_cache(contexts_with_threads(1).back().context,
                               ConstTensor::contiguous(DType::f32, {2, 2, 4}, key.data()),
                               ConstTensor::contiguous(DType::f32, {2, 2, 4}, value.data()),
                               ConstTensor::contiguous(DType::i64, {2}, slots), key_cache, value_cache, options);
  }
  Status gather() {
    const int32_t table[] = {0}, length[] = {2};
    return gather_pa_kv_cache(contexts_with_threads(1).back().context, key_cache, value_cache,
                              ConstTensor::contiguous(DType::i32, {1, 1}, table),
                              ConstTensor::contiguous(DType::i32, {1}, length),
                              Tensor::contiguous(DType::f32, {2, 2, 4}, key.data()),
                              Tensor::contiguous(DType::f32, {2, 2, 4}, value.data()), {.scales = options.scales});
  }
};

TEST(QuantPagesGiven, ScalesAreReadAndNotWritten) {
  Call call;
  call.options.scales_given = true;
  for (int i = 0; i < 16; ++i) call.key[static_cast<size_t>(i)] = static_cast<float>(i) - 0.3f;
  call.key[15] = 1e9f;
  call.key_scales[1] = 0;  // token 0, head 1
  ASSERT_TRUE(call.scatter().ok());
  // q = round(x / 0.5) - 1
  const std::vector<int8_t> expected = {-2, 0, 2, 4, -1, -1, -1, -1, 14, 16, 18, 20, 22, 24, 26, 127};
  EXPECT_EQ(call.keys, expected);
  EXPECT_EQ(call.key_scales, (std::vector<float>{0.5f, 0, 0.5f, 0.5f}));
  EXPECT_EQ(call.key_offsets, std::vector<float>(4, 1.0f));
}

// NaN is read back as 0, infinities as the ends of the range; other rows, and what was given, are not concerned.
TEST(QuantPagesGiven, NanAndInfinities) {
  Call call;
  call.options.scales_given = true;
  call.key.assign(16, 1.0f);
  call.key[0] = kNan, call.key[1] = kInf, call.key[2] = -kInf, call.key[3] = -1e30f;
  ASSERT_TRUE(call.scatter().ok());
  EXPECT_EQ(call.keys, (std::vector<int8_t>{-1, 127, -128, -128, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(call.key_scales, std::vector<float>(4, 0.5f));
  ASSERT_TRUE(call.gather().ok());
  EXPECT_EQ(std::vector<float>(call.key.begin(), call.key.begin() + 5), (std::vector<float>{0, 64, -63.5f, -63.5f, 1}));
}

// One scale for each channel, of all tokens: the device's form, as a view with strides of 0.
TEST(QuantPagesGiven, OnePerChannel) {
  Call call;
  float channels[8] = {0.5f, 1, 2, 4, 8, 0.25f, 1, 1};
  call.options.scales.key = Tensor::contiguous(DType::f32, {1, 2, 2, 4}, channels);
  call.options.scales.key.strides[0] = call.options.scales.key.strides[1] = 0;
  call.options.scales.key_offsets = call.options.scales.value_offsets = {};
  call.options.scales_given = true;
  call.key.assign(16, 8.0f);
  ASSERT_TRUE(call.scatter().ok());
  const std::vector<int8_t> row = {16, 8, 4, 2, 1, 32, 8, 8};
  EXPECT_EQ(std::vector<int8_t>(call.keys.begin(), call.keys.begin() + 8), row);
  EXPECT_EQ(std::vector<int8_t>(call.keys.begin() + 8, call.keys.end()), row);
  ASSERT_TRUE(call.gather().ok());
  EXPECT_EQ(call.key, std::vector<float>(16, 8.0f));
}

struct Refusal {
  const char* name;
  std::function<void(Call&)> spoil;
  const char* message;
};

TEST(QuantPagesRefuse, BeforeAnythingIsWritten) {
  const auto given = [](Call& c) { c.options.scales_given = true; };
  const Refusal refusals[] = {
      {"no scales", [](Call& c) { c.options.scales = {}; },
       "key_scales is absent, but key_cache is i8: integers to be multiplied with scales"},
      {"no value scales", [](Call& c) { c.options.scales.value = {}; },
       "value_scales is absent, but value_cache is i8: integers to be multiplied with scales"},
      {"one offset", [](Call& c) { c.options.scales.value_offsets = {}; },
       "key_offsets and value_offsets must both be given or both be absent"},
      {"dtype", [](Call& c) { c.options.scales.key.dtype = DType::i32; }, "key_scales is i32, but must be f32"},
      {"rank", [](Call& c) { c.options.scales.key = c.options.scales.key.selected(3, 0); },
       "key_scales has rank 3, but [num_blocks, block_size, num_kv_heads, key_groups] has rank 4"},
      {"rows", [](Call& c) { c.options.scales.key.shape[1] = 1; },
       "key_scales dim 1 (block_size) is 1, but key_cache set block_size = 2"},
      {"heads", [](Call& c) { c.options.scales.value.shape[2] = 1; },
       "value_scales dim 2 (num_kv_heads) is 1, but key set num_kv_heads = 2"},
      {"groups of offsets", [](Call& c) { c.options.scales.key_offsets.shape[3] = 0; },
       "key_offsets dim 3 (key_groups) is 0, but key_scales set key_groups = 1"},
      {"groups",
       [](Call& c) {
         c.key_scales.resize(12), c.key_offsets.resize(12);
         c.options.scales.key = Tensor::contiguous(DType::f32, {1, 2, 2, 3}, c.key_scales.data());
         c.options.scales.key_offsets = Tensor::contiguous(DType::f32, {1, 2, 2, 3}, c.key_offsets.data());
       },
       "key_scales has 3 groups (key_groups), which do not divide head_dim = 4"},
      {"overlap", [](Call& c) { c.options.scales.value.data = c.key_scales.data(); }, "overlaps key_scales"},
      {"aliasing", [](Call& c) { c.options.scales.key.strides[0] = c.options.scales.key.strides[1] = 0; },
       "elements share addresses"},
      {"slot", [](Call& c) { c.slots[1] = 2; }, "slot_mapping[1] is 2"},
      {"given: negative", [&](Call& c) { given(c), c.key_scales[3] = -1; },
       "key_scales of block 0, row 1, head 1, group 0 is -1.000000, but must be >= 0"},
      {"given: NaN", [&](Call& c) { given(c), c.value_scales[2] = kNan; },
       "value_scales of block 0, row 1, head 0, group 0 is nan, but must be >= 0"},
      {"given: infinite", [&](Call& c) { given(c), c.key_scales[0] = kInf; },
       "key_scales of block 0, row 0, head 0, group 0 is inf, but must be finite"},
      {"given: no whole offset", [&](Call& c) { given(c), c.key_offsets[1] = 0.5f; },
       "key_offsets of block 0, row 0, head 1, group 0 is 0.500000, but must be a whole number in -127..128"},
      {"given: far offset", [&](Call& c) { given(c), c.value_offsets[0] = -128; },
       "value_offsets of block 0, row 0, head 0, group 0 is -128.000000, but must be a whole number in -127..128"},
      {"floats have none", [](Call& c) { c.key_cache.dtype = c.value_cache.dtype = DType::f8_e4m3; },
       "key_scales is given, but key_cache is f8_e4m3, and only i8 and u8 have any"},
  };
  for (const Refusal& r : refusals) {
    SCOPED_TRACE(r.name);
    Call call;
    r.spoil(call);
    const std::vector<float> scales = call.key_scales, offsets = call.key_offsets;
    const Status status = call.scatter();
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_NE(status.message().find(r.message), std::string::npos) << status.message();
    EXPECT_EQ(call.keys, std::vector<int8_t>(16, 77));
    EXPECT_EQ(call.values, std::vector<int8_t>(16, 77));
    EXPECT_EQ(call.key_scales, scales);
    EXPECT_EQ(call.key_offsets, offsets);
  }
}

// Of a cache that is read: rows that the call reads, and no others.
TEST(QuantPagesRefuse, ScalesThatAreRead) {
  for (const float bad : {-0.5f, kNan}) {
    Call call;
    call.value_scales[2] = bad;
    const Status status = call.gather();
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_EQ(status.message(), "gather_pa_kv_cache: value_scales of block 0, row 1, head 0, group 0 is " +
                                    std::string(bad < 0 ? "-0.500000" : "nan") + ", but must be >= 0");
    EXPECT_EQ(call.key, std::vector<float>(16, 1.0f));
  }
  Call call;
  call.key_offsets[0] = kInf;
  EXPECT_EQ(call.gather().message(),
            "gather_pa_kv_cache: key_offsets of block 0, row 0, head 0, group 0 is inf, but must be finite");
  call.key_offsets[0] = 0.25f;  // any number may be read
  ASSERT_TRUE(call.gather().ok());
  EXPECT_EQ(call.key[0], 0.5f * 77.25f);
}

// A long cache is looked at by all threads: the message names the first row in the order of tokens. Heads that are not
// gathered do not matter.
TEST(QuantPagesRefuse, TheFirstOfManyRows) {
  constexpr int64_t kBlocks = 40, kSize = 16, kHeads = 3, kDim = 8, kTokens = kBlocks * kSize;
  const PageSizes sizes = {kBlocks, kSize, kHeads, kDim, kDim};
  std::vector<int8_t> pages(kTokens * kHeads * kDim, 1);
  std::vector<float> scales(kTokens * kHeads, 0.5f), value_scales(scales), out(kTokens * kHeads * kDim, 7), value(out);
  std::vector<int32_t> table(kBlocks);
  for (int32_t i = 0; i < kBlocks; ++i) table[static_cast<size_t>(i)] = kBlocks - 1 - i;
  const int32_t length = kTokens, head = 2;
  const Tensor cache = key_pages(PageLayout::norm, DType::i8, sizes, pages.data());
  GatherOptions options;
  options.scales = {key_scale_pages(PageLayout::norm, sizes, 1, scales.data()),
                    value_scale_pages(PageLayout::norm, sizes, 1, value_scales.data())};
  for (const int64_t row : {5, 300, 601})
    scales[static_cast<size_t>(row * kHeads + 1)] = -1;  // token 601 is in block 37
  for (const TestContext& t : contexts()) {
    const auto gather = [&](int64_t heads) {
      return gather_pa_kv_cache(t.context, cache, cache,
                                ConstTensor::contiguous(DType::i32, {1, kBlocks}, table.data()),
                                ConstTensor::contiguous(DType::i32, {1}, &length),
                                Tensor::contiguous(DType::f32, {kTokens, heads, kDim}, out.data()),
                                Tensor::contiguous(DType::f32, {kTokens, heads, kDim}, value.data()), options);
    };
    options.head_indices = {};
    EXPECT_EQ(gather(kHeads).message(),
              "gather_pa_kv_cache: key_scales of block 37, row 9, head 1, group 0 is -1.000000, but must be >= 0")
        << t.name;
    EXPECT_EQ(out, std::vector<float>(out.size(), 7));
    options.head_indices = ConstTensor::contiguous(DType::i32, {1}, &head);
    EXPECT_EQ(gather(1).message(), "");
    EXPECT_EQ(out[0], 0.5f);
    std::fill(out.begin(), out.end(), 7.0f);
  }
}

TEST(QuantPagesRefuse, NibblesThatFillNoBytes) {
  Call call;
  call.key_cache.dtype = call.value_cache.dtype = DType::u8;  // of 8 numbers, then
  EXPECT_EQ(call.scatter().message(), "scatter_pa_kv_cache: key_cache holds head_dim = 8, but key set head_dim = 4");
  EXPECT_EQ(supports(PageLayout::norm, DType::u8, 1, 5).message(),
            "page layout norm: head_dim is 5, but must be even for u8, two numbers each");
}

}  // namespace
}  // namespace opst

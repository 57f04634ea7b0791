// Pools beyond 2^31 elements, of which a few blocks are real memory (case B44): fused writing, copies of a block within the
// pool and from one layout to another, scales beyond 2^31. (Scatter: kv_cache_test; gather: gather_test.)
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "opst/kv_cache.h"
#include "testing/contexts.h"
#include "testing/elements.h"
#include "testing/lazy_mapping.h"
#include "testing/random.h"

namespace opst {
namespace {

using test::contexts_with_threads;
using test::Fill;
using test::LazyMapping;
using test::Random;
using test::TestContext;

constexpr int64_t kTokens = 5, kHeads = 8, kDim = 128;

// Keys and values of one format, in two mappings.
struct Pool {
  Pool(PageLayout page_layout, DType dtype, int64_t blocks) : layout(page_layout), num_blocks(blocks) {
    const PageSizes sizes = {blocks, block_size(), kHeads, kDim, kDim};
    const int64_t bytes = blocks * block_size() * kHeads * kDim * size_bytes(dtype);
    for (auto& m : memory) m = std::make_unique<LazyMapping>(bytes);
    key = key_pages(layout, dtype, sizes, memory[0]->data());
    value = value_pages(layout, dtype, sizes, memory[1]->data());
  }
  bool is_there() const { return memory[0]->data() != nullptr && memory[1]->data() != nullptr; }
  int64_t block_size() const { return layout == PageLayout::norm ? 16 : 32; }
  void clear(int64_t block) const {
    for (const Tensor& t : {key, value}) {
      const Tensor page = t.selected(0, block);
      std::memset(page.data, 0, static_cast<size_t>(page.num_elements() * size_bytes(page.dtype)));
    }
  }
  std::vector<double> block(int64_t index) const {
    std::vector<double> both = test::to_doubles(key.selected(0, index));
    const std::vector<double> values = test::to_doubles(value.selected(0, index));
    both.insert(both.end(), values.begin(), values.end());
    return both;
  }

  PageLayout layout;
  int64_t num_blocks;
  std::unique_ptr<LazyMapping> memory[2];
  Tensor key, value;
};

// 2.29e9 elements.
int64_t far_blocks(PageLayout layout) { return layout == PageLayout::norm ? 140'001 : 70'000; }

bool has_numbers(const std::vector<double>& block) {
  for (const double x : block) {
    if (x != 0) return true;
  }
  return false;
}

TEST(FarPages, B44_RopeScatter) {
  std::vector<float> query(kTokens * kHeads * kDim), key(query), value(query), cos(kTokens * kDim / 2, 0.6f),
      sin(cos.size(), 0.8f), out(query);
  const auto heads = [](std::vector<float>& v) {
    return Tensor::contiguous(DType::f32, {kTokens, kHeads, kDim}, v.data());
  };
  const auto table = [](std::vector<float>& v) {
    return Tensor::contiguous(DType::f32, {kTokens, kDim / 2}, v.data());
  };
  Random random(test::seed());
  for (std::vector<float>* v : {&query, &key, &value}) test::fill(heads(*v), Fill::normal, random);
  for (const PageLayout layout : {PageLayout::norm, PageLayout::panel32}) {
    const Pool pool(layout, DType::bf16, far_blocks(layout));
    if (!pool.is_there()) GTEST_SKIP() << "no address space for 2 x " << pool.memory[0]->size_bytes() << " bytes";
    const int64_t last = pool.num_blocks - 1;
    for (const TestContext& t : contexts_with_threads(2)) {
      SCOPED_TRACE(t.name + " " + to_string(layout));
      for (const int64_t block : {int64_t{0}, last}) {
        std::vector<int64_t> slots;
        for (int64_t i = 0; i < kTokens; ++i) slots.push_back(block * pool.block_size() + i);
        const RopeScatterInputs in{.query = heads(query),
                                   .key = heads(key),
                                   .value = heads(value),
                                   .cos = table(cos),
                                   .sin = table(sin),
                                   .slot_mapping = ConstTensor::contiguous(DType::i64, {kTokens}, slots.data())};
        ASSERT_EQ(
            rope_scatter_pa_kv_cache(t.context, in, heads(out), pool.key, pool.value, {.layout = layout}).message(),
            "");
      }
      EXPECT_EQ(pool.block(last), pool.block(0));
      EXPECT_TRUE(has_numbers(pool.block(last)));
      pool.clear(0), pool.clear(last);
    }
  }
}

// What BlockPool::prepare_write asks for, and a block of another layout and dtype.
TEST(FarPages, B44_Convert) {
  const Pool pool(PageLayout::norm, DType::bf16, far_blocks(PageLayout::norm));
  if (!pool.is_there()) GTEST_SKIP() << "no address space for 2 x " << pool.memory[0]->size_bytes() << " bytes";
  const int64_t last = pool.num_blocks - 1;
  Random random(test::seed());
  test::fill(pool.key.selected(0, last), Fill::normal, random);
  test::fill(pool.value.selected(0, last), Fill::normal, random);
  const std::vector<double> wanted = pool.block(last);
  const auto views = [](const Tensor& t, int64_t block) { return t.narrowed(0, block, 1); };
  for (const TestContext& t : contexts_with_threads(2)) {
    SCOPED_TRACE(t.name);
    for (const int64_t to : {int64_t{3}, last - 1}) {
      ASSERT_EQ(convert_pages(t.context, views(pool.key, last), views(pool.value, last), views(pool.key, to),
                              views(pool.value, to), {.from = PageLayout::norm, .to = PageLayout::norm})
                    .message(),
                "");
      EXPECT_EQ(pool.block(to), wanted);
      pool.clear(to);
    }
  }
  // Pages of 32 rows, so that panels hold them: from the end of a pool to the end of another one, and back.
  const int64_t blocks = far_blocks(PageLayout::panel32);
  const PageSizes sizes = {blocks, 32, kHeads, kDim, kDim};
  const Pool panels(PageLayout::panel32, DType::f16, blocks);
  if (!panels.is_there()) GTEST_SKIP() << "no address space for 2 x " << panels.memory[0]->size_bytes() << " bytes";
  const Tensor key = key_pages(PageLayout::norm, DType::bf16, sizes, pool.memory[0]->data());
  const Tensor value = value_pages(PageLayout::norm, DType::bf16, sizes, pool.memory[1]->data());
  const int64_t end = blocks - 1;
  for (const Tensor& side : {key, value}) test::fill(side.selected(0, end), Fill::small_integers, random);
  for (const TestContext& t : contexts_with_threads(2)) {
    SCOPED_TRACE(t.name);
    ASSERT_EQ(
        convert_pages(t.context, views(key, end), views(value, end), views(panels.key, end), views(panels.value, end))
            .message(),
        "");
    ASSERT_EQ(convert_pages(t.context, views(panels.key, end), views(panels.value, end), views(key, 1), views(value, 1),
                            {.from = PageLayout::panel32, .to = PageLayout::norm})
                  .message(),
              "");
    EXPECT_EQ(test::to_doubles(key.selected(0, 1)), test::to_doubles(key.selected(0, end)));
    EXPECT_EQ(test::to_doubles(value.selected(0, 1)), test::to_doubles(value.selected(0, end)));
    EXPECT_TRUE(has_numbers(test::to_doubles(key.selected(0, end))));
    panels.clear(end);
    for (const Tensor& side : {key, value}) {
      const Tensor page = side.selected(0, 1);
      std::memset(page.data, 0, static_cast<size_t>(page.num_elements() * 2));
    }
  }
}

// Rows of one number with a scale each: more than 2^31 scales, too.
TEST(FarPages, B44_Scales) {
  constexpr int64_t kBlocks = 140'000'001, kRows = 16;
  const PageSizes sizes = {kBlocks, kRows, 1, 1, 1};
  const LazyMapping memory[4] = {LazyMapping(kBlocks * kRows), LazyMapping(kBlocks * kRows),
                                 LazyMapping(kBlocks * kRows * 4), LazyMapping(kBlocks * kRows * 4)};
  for (const LazyMapping& m : memory) {
    if (m.data() == nullptr) GTEST_SKIP() << "no address space for " << m.size_bytes() << " bytes";
  }
  const Tensor key = key_pages(PageLayout::norm, DType::i8, sizes, memory[0].data());
  const Tensor value = value_pages(PageLayout::norm, DType::i8, sizes, memory[1].data());
  const PageScales scales = {key_scale_pages(PageLayout::norm, sizes, 1, memory[2].data()),
                             value_scale_pages(PageLayout::norm, sizes, 1, memory[3].data())};
  std::vector<float> rows = {1, -2, 3, 4.5f, -0.25f}, back(kTokens), back_values(kTokens);
  const ConstTensor tokens = ConstTensor::contiguous(DType::f32, {kTokens, 1, 1}, rows.data());
  std::vector<int64_t> slots;
  for (int64_t i = 0; i < kTokens; ++i) slots.push_back((kBlocks - 1) * kRows + i);
  const int64_t block = kBlocks - 1, length = kTokens;
  for (const TestContext& t : contexts_with_threads(2)) {
    SCOPED_TRACE(t.name);
    ASSERT_EQ(
        scatter_pa_kv_cache(t.context, tokens, tokens, ConstTensor::contiguous(DType::i64, {kTokens}, slots.data()),
                            key, value, {.scales = scales})
            .message(),
        "");
    ASSERT_EQ(
        gather_pa_kv_cache(t.context, key, value, ConstTensor::contiguous(DType::i64, {1, 1}, &block),
                           ConstTensor::contiguous(DType::i64, {1}, &length),
                           Tensor::contiguous(DType::f32, {kTokens, 1, 1}, back.data()),
                           Tensor::contiguous(DType::f32, {kTokens, 1, 1}, back_values.data()), {.scales = scales})
            .message(),
        "");
    for (size_t i = 0; i < rows.size(); ++i) EXPECT_NEAR(back[i], rows[i], 1e-6) << i;
    EXPECT_EQ(back_values, back);
    EXPECT_EQ(test::get(scales.key.selected(0, 0), 0), 0);  // written where they belong, and nowhere else
    std::fill(back.begin(), back.end(), 0.0f);
  }
}

}  // namespace
}  // namespace opst

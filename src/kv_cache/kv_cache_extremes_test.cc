// Every call of the room with sizes, strides, ranks and enumerators that mean nothing: a Status, at once.
#include <gtest/gtest.h>

#include "opst/kv_cache.h"
#include "testing/effort.h"
#include "testing/extremes.h"

namespace opst {
namespace {

using test::Extremes;

constexpr int64_t kHuge = int64_t{1} << 40;

class KvCacheExtremes : public test::ExtremesTest {
 protected:
  KvCacheExtremes() : ExtremesTest(10000) {}
  struct Drawn {
    PageLayout layout;
    DType dtype;
    int64_t blocks, block_size, heads, dim, value_dim;
    // Shapes of the pages, of which one size may be another.
    std::vector<int64_t> shape(bool value) const {
      const int64_t numbers = value ? value_dim : dim, d = dtype == DType::u8 ? numbers / 2 : numbers;
      if (layout != PageLayout::panel32) return {blocks, block_size, heads, d};
      const int64_t step = dtype == DType::bf16 ? 2 : 1;
      if (value) return {blocks, heads, block_size / step, d > 0 && d < kHuge ? step * d : d};
      return {blocks, heads, block_size / 32, d / step, 32 * step};
    }
  };
  static DType page_type(Extremes& draw) {
    return draw.enumerator({DType::f32, DType::bf16, DType::f16, DType::i8, DType::u8, DType::f8_e4m3, DType::f8_e5m2});
  }
  Drawn drawn(Extremes& draw) {
    Drawn d{draw.enumerator({PageLayout::norm, PageLayout::panel32}),
            page_type(draw),
            draw.size(),
            draw.size(),
            draw.size(),
            draw.size(),
            draw.size()};
    if (d.layout == PageLayout::panel32) {
      if (d.block_size > 0 && d.block_size < kHuge) d.block_size *= 32;
      if (d.dtype == DType::bf16) d.dim -= d.dim % 2;
    }
    if (d.dtype == DType::u8) d.dim -= d.dim % 2, d.value_dim -= d.value_dim % 2;
    return d;
  }
  // Scales of integers, and now and then offsets, in a few groups; memory by make(dtype, shape).
  template <class Scales, class Make>
  Scales scales(const Drawn& d, const Make& make) {
    Scales of;
    if (d.dtype != DType::i8 && d.dtype != DType::u8) return of;
    const int64_t groups = random_.chance(0.7) ? 1 : random_.integer(0, 3);
    const auto list = [&](bool value) {
      if (d.layout != PageLayout::panel32) return make({d.blocks, d.block_size, d.heads, groups});
      if (value) return make({d.blocks, d.heads, d.block_size, groups});
      return make({d.blocks, d.heads, d.block_size / 32, groups, 32});
    };
    const bool offsets = random_.chance(0.4);
    if (random_.chance(0.97)) of.key = list(false), of.value = list(true);
    if (offsets) of.key_offsets = list(false), of.value_offsets = list(true);
    return of;
  }
  ConstPageScales read_scales(const Drawn& d, Extremes& draw) {
    return scales<ConstPageScales>(d, [&](const std::vector<int64_t>& s) { return draw.input(DType::f32, s); });
  }
  PageScales written_scales(const Drawn& d, Extremes& draw) {
    return scales<PageScales>(d, [&](const std::vector<int64_t>& s) { return draw.output(DType::f32, s); });
  }
  DType index_type() { return random_.pick({DType::i32, DType::i64}); }
  uint8_t zero_or_minus_one() { return random_.chance(0.5) ? 0 : 0xff; }
};

TEST_F(KvCacheExtremes, Scatter) {
  rounds([&](Extremes& draw) {
    const Drawn d = drawn(draw);
    const DType type = float_type();
    const int64_t tokens = draw.size();
    return scatter_pa_kv_cache(
        context_, draw.input(type, {tokens, d.heads, d.dim}), draw.input(type, {tokens, d.heads, d.value_dim}),
        draw.input(index_type(), {tokens}, zero_or_minus_one()), draw.output(d.dtype, d.shape(false)),
        draw.output(d.dtype, d.shape(true)),
        // Given ones are what poisoned memory holds, and that is refused.
        {.layout = d.layout, .scales = written_scales(d, draw), .scales_given = random_.chance(0.1)});
  });
}

TEST_F(KvCacheExtremes, RopeScatter) {
  rounds([&](Extremes& draw) {
    const Drawn d = drawn(draw);
    const DType type = float_type();
    const int64_t tokens = draw.size(), heads = draw.size();
    const int64_t half = random_.chance(0.8) ? std::max<int64_t>(d.dim, 0) / 2 : draw.size();
    RopeScatterInputs in = {.query = draw.input(type, {tokens, heads, d.dim}),
                            .key = draw.input(type, {tokens, d.heads, d.dim}),
                            .value = draw.input(type, {tokens, d.heads, d.value_dim}),
                            .cos = draw.input(DType::f32, {tokens, half}),
                            .sin = draw.input(DType::f32, {tokens, half}),
                            .slot_mapping = draw.input(index_type(), {tokens}, zero_or_minus_one())};
    if (random_.chance(0.5)) in.query_weight = draw.input(DType::f32, {d.dim});
    if (random_.chance(0.5)) in.key_weight = draw.input(DType::f32, {d.dim});
    return rope_scatter_pa_kv_cache(context_, in, draw.output(type, {tokens, heads, d.dim}),
                                    draw.output(d.dtype, d.shape(false)), draw.output(d.dtype, d.shape(true)),
                                    {.layout = d.layout,
                                     .style = draw.enumerator({RopeStyle::pairs, RopeStyle::halves}),
                                     .scales = written_scales(d, draw)});
  });
}

TEST_F(KvCacheExtremes, Gather) {
  rounds([&](Extremes& draw) {
    const Drawn d = drawn(draw);
    const DType type = float_type();
    const int64_t batch = draw.size(), columns = draw.size();
    GatherOptions options = {.layout = d.layout, .scales = read_scales(d, draw), .zero_fill = random_.chance(0.5)};
    int64_t heads = d.heads;
    if (random_.chance(0.3)) {
      heads = draw.size();
      options.head_indices = draw.input(index_type(), {heads});
    }
    if (random_.chance(0.3)) options.seq_offset = draw.input(index_type(), {batch});
    options.cumulative_lengths = random_.chance(0.3);
    const int64_t lengths = options.cumulative_lengths && batch >= 0 && batch < kHuge ? batch + 1 : batch;
    // Lengths of 0; or of 1, which sum to the batch.
    const bool some = !options.cumulative_lengths && random_.chance(0.5);
    ConstTensor kv_lengths = draw.input(index_type(), {lengths});
    const int64_t one = 1;
    if (some && kv_lengths.data != nullptr) {
      kv_lengths.data = &one;
      kv_lengths.strides[0] = 0;
    }
    const int64_t tokens = some ? batch : 0;
    return gather_pa_kv_cache(context_, draw.input(d.dtype, d.shape(false)), draw.input(d.dtype, d.shape(true)),
                              draw.input(index_type(), {batch, columns}, zero_or_minus_one()), kv_lengths,
                              draw.output(type, {tokens, heads, d.dim}),
                              draw.output(type, {tokens, heads, d.value_dim}), options);
  });
}

TEST_F(KvCacheExtremes, Convert) {
  rounds([&](Extremes& draw) {
    Drawn from = drawn(draw), to = from;
    to.layout = draw.enumerator({PageLayout::norm, PageLayout::panel32});
    to.dtype = page_type(draw);
    return convert_pages(context_, draw.input(from.dtype, from.shape(false)), draw.input(from.dtype, from.shape(true)),
                         draw.output(to.dtype, to.shape(false)), draw.output(to.dtype, to.shape(true)),
                         {.from = from.layout,
                          .to = to.layout,
                          .from_scales = read_scales(from, draw),
                          .to_scales = written_scales(to, draw)});
  });
}

TEST_F(KvCacheExtremes, PagesOfAnySizes) {
  char memory[8];
  for (int i = 0; i < 20000; ++i) {
    Extremes draw(random_);
    const Drawn d = drawn(draw);
    const PageSizes sizes = {d.blocks, d.block_size, d.heads, d.dim, d.value_dim};
    const Status held = supports(d.layout, d.dtype, d.block_size, d.dim);
    for (const auto pages : {key_pages, value_pages}) {
      const Tensor tensor = pages(d.layout, d.dtype, sizes, memory);
      ASSERT_TRUE(held.ok() || tensor.rank == 0);
      for (int j = 0; j < tensor.rank; ++j) ASSERT_TRUE(tensor.shape[j] >= 0 && tensor.shape[j] < int64_t{1} << 56);
    }
    EXPECT_NE(to_string(d.layout), nullptr);
  }
  EXPECT_STREQ(to_string(static_cast<PageLayout>(9)), "unknown");
  EXPECT_EQ(supports(static_cast<PageLayout>(9), DType::f32, 32).message(), "page layout 9 is none");
}

TEST_F(KvCacheExtremes, PoolsOfAnySize) {
  for (const int64_t n : {int64_t{-1}, INT64_MIN}) {
    EXPECT_EQ(BlockPool::create(n).status().code(), StatusCode::invalid_argument);
  }
  for (const int64_t n : {int64_t{1} << 50, int64_t{1} << 62, INT64_MAX}) {
    if (test::kSanitized) break;  // AddressSanitizer ends the process at such a request
    EXPECT_EQ(BlockPool::create(n).status().code(), StatusCode::out_of_memory);
  }
  // A large pool touches no memory before it gives its blocks.
  BlockPool pool = std::move(BlockPool::create(int64_t{1} << 28).value());
  int64_t blocks[3];
  ASSERT_TRUE(pool.allocate(blocks).ok());
  EXPECT_EQ(blocks[2], 2);
  EXPECT_EQ(pool.num_free(), (int64_t{1} << 28) - 3);
  BlockPool copy = pool;
  ASSERT_TRUE(copy.free(blocks).ok());
  ASSERT_TRUE(copy.allocate(blocks).ok());
  EXPECT_EQ(blocks[2], 2);
  EXPECT_EQ(pool.references(1), 1);
}

// Blocks that are none, and keys whose size nobody has memory for.
TEST_F(KvCacheExtremes, NoBlocks) {
  float number = 0;
  int64_t slot = -1;
  const auto repeated = [&](DType dtype, std::initializer_list<int64_t> shape, const void* data) {
    ConstTensor tensor = ConstTensor::contiguous(dtype, shape, data);
    for (int64_t& stride : tensor.strides) stride = 0;
    return tensor;
  };
  constexpr int64_t kHeads = int64_t{1} << 20, kDim = int64_t{1} << 20;
  const RopeScatterInputs in = {.query = repeated(DType::f32, {9, 0, kDim}, nullptr),
                                .key = repeated(DType::f32, {9, kHeads, kDim}, &number),
                                .value = repeated(DType::f32, {9, kHeads, kDim}, &number),
                                .cos = repeated(DType::f32, {9, kDim / 2}, &number),
                                .sin = repeated(DType::f32, {9, kDim / 2}, &number),
                                .slot_mapping = repeated(DType::i64, {9}, &slot)};
  const Tensor query = Tensor::contiguous(DType::f32, {9, 0, kDim}, nullptr);
  const Tensor pages = Tensor::contiguous(DType::f32, {0, 16, kHeads, kDim}, nullptr);
  EXPECT_TRUE(rope_scatter_pa_kv_cache(context_, in, query, pages, pages).ok());
  EXPECT_TRUE(scatter_pa_kv_cache(context_, in.key, in.value, in.slot_mapping, pages, pages).ok());
  EXPECT_EQ(context_.workspace_bytes(), 0);
  slot = 0;
  EXPECT_EQ(rope_scatter_pa_kv_cache(context_, in, query, pages, pages).message(),
            "rope_scatter_pa_kv_cache: slot_mapping[0] is 0, but the cache has 0 blocks of 16 rows = 0 slots (-1 skips "
            "a token)");
  EXPECT_EQ(rope_scatter_pa_kv_cache(context_, in, query, pages, pages, {.style = static_cast<RopeStyle>(3)}).message(),
            "rope_scatter_pa_kv_cache: style is 3, but must be pairs or halves");
}

// 2^40 tokens that repeat one token and its slot: the last wins, and the call returns at once.
TEST_F(KvCacheExtremes, TokensThatRepeatOne) {
  float row[2] = {3, 4}, cache[4] = {}, values[4] = {};
  int64_t slot = 1;
  ConstTensor key = ConstTensor::contiguous(DType::f32, {kHuge, 1, 2}, row);
  key.strides[0] = 0;
  ConstTensor slots = ConstTensor::contiguous(DType::i64, {kHuge}, &slot);
  slots.strides[0] = 0;
  const Tensor keys = Tensor::contiguous(DType::f32, {1, 2, 1, 2}, cache),
               kept = Tensor::contiguous(DType::f32, {1, 2, 1, 2}, values);
  ASSERT_TRUE(scatter_pa_kv_cache(context_, key, key, slots, keys, kept).ok());
  EXPECT_EQ(std::vector<float>(cache, cache + 4), (std::vector<float>{0, 0, 3, 4}));
  slot = -1;
  ASSERT_TRUE(scatter_pa_kv_cache(context_, key, key, slots, keys, kept).ok());
  slot = 2;
  EXPECT_FALSE(scatter_pa_kv_cache(context_, key, key, slots, keys, kept).ok());
}

// Pairs of bf16 move as words of 32 bits, wherever they begin: the sanitizers' builds see an aligned address or none.
TEST_F(KvCacheExtremes, PairsAtOddAddresses) {
  std::vector<bf16> rows(7 * 5 * 8 + 1), pages(64 * 8 + 1), values(pages), back(rows), back_values(rows);
  for (size_t i = 0; i < rows.size(); ++i) rows[i].bits = static_cast<uint16_t>(i + 1);
  const auto at = [](std::vector<bf16>& v, std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(DType::bf16, shape, v.data() + 1);
  };
  const PageSizes sizes = {1, 32, 1, 8, 8};
  const Tensor keys = key_pages(PageLayout::panel32, DType::bf16, sizes, pages.data() + 1),
               kept = value_pages(PageLayout::panel32, DType::bf16, sizes, values.data() + 1);
  for (const Isa isa : {Isa::generic, context_.machine().isa}) {
    Context context = std::move(Context::create({.isa = isa, .num_threads = 1}).value());
    std::vector<int64_t> slots = {3, 4, 5, 6, 9};
    const Tensor key = at(rows, {5, 1, 8});
    ASSERT_TRUE(scatter_pa_kv_cache(context, key, key, ConstTensor::contiguous(DType::i64, {5}, slots.data()), keys,
                                    kept, {.layout = PageLayout::panel32})
                    .ok());
    const int64_t block = 0, length = 4, offset = 3;
    ASSERT_TRUE(gather_pa_kv_cache(
                    context, keys, kept, ConstTensor::contiguous(DType::i64, {1, 1}, &block),
                    ConstTensor::contiguous(DType::i64, {1}, &length), at(back, {4, 1, 8}), at(back_values, {4, 1, 8}),
                    {.layout = PageLayout::panel32, .seq_offset = ConstTensor::contiguous(DType::i64, {1}, &offset)})
                    .ok());
    for (size_t i = 1; i <= 32; ++i) {
      EXPECT_EQ(back[i].bits, rows[i].bits) << i;
      EXPECT_EQ(back_values[i].bits, rows[i].bits) << i;
    }
  }
}

}  // namespace
}  // namespace opst

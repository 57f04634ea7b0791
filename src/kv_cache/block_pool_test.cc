#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "opst/kv_cache.h"
#include "testing/contexts.h"
#include "testing/random.h"

namespace opst {
namespace {

using test::Random;
using Blocks = std::vector<int64_t>;

BlockPool make(int64_t num_blocks) {
  Result<BlockPool> pool = BlockPool::create(num_blocks);
  EXPECT_TRUE(pool.ok());
  return std::move(pool.value());
}

TEST(BlockPool, GivesAndTakes) {
  BlockPool pool = make(4);
  EXPECT_EQ(pool.num_blocks(), 4);
  Blocks a(3), b(1);
  ASSERT_TRUE(pool.allocate(a).ok());
  EXPECT_EQ(a, (Blocks{0, 1, 2}));
  ASSERT_TRUE(pool.allocate(b).ok());
  EXPECT_EQ(b, (Blocks{3}));
  EXPECT_EQ(pool.num_free(), 0);
  ASSERT_TRUE(pool.free(a).ok());
  EXPECT_EQ(pool.num_free(), 3);
  EXPECT_EQ(pool.references(3), 1);
  EXPECT_EQ(pool.references(0), 0);
  Blocks again(2);
  ASSERT_TRUE(pool.allocate(again).ok());
  EXPECT_EQ(again, (Blocks{0, 1}));
}

TEST(BlockPool, ForkSharesUntilSomebodyWrites) {
  BlockPool pool = make(4);
  Blocks first(2);
  ASSERT_TRUE(pool.allocate(first).ok());
  ASSERT_TRUE(pool.fork(first).ok());
  Blocks second = first;
  EXPECT_EQ(pool.references(1), 2);
  EXPECT_EQ(pool.num_free(), 2);

  Result<BlockWrite> write = pool.prepare_write(second[1]);
  ASSERT_TRUE(write.ok());
  EXPECT_EQ(write.value().copy_from, 1);
  EXPECT_EQ(write.value().block, 2);
  second[1] = write.value().block;
  EXPECT_EQ(pool.references(1), 1);
  EXPECT_EQ(pool.references(2), 1);

  write = pool.prepare_write(first[1]);  // alone again
  ASSERT_TRUE(write.ok());
  EXPECT_EQ(write.value().copy_from, -1);
  EXPECT_EQ(write.value().block, 1);

  ASSERT_TRUE(pool.free(first).ok());
  EXPECT_EQ(pool.references(0), 1);
  ASSERT_TRUE(pool.free(second).ok());
  EXPECT_EQ(pool.num_free(), 4);
}

TEST(BlockPool, RefusesAndChangesNothing) {
  EXPECT_EQ(BlockPool::create(-1).status().message(), "BlockPool: num_blocks is -1, but must be >= 0");
  EXPECT_EQ(BlockPool::create(INT64_MAX).status().code(), StatusCode::out_of_memory);
  BlockPool pool = make(4);
  Blocks held(3), more(2, -5);
  ASSERT_TRUE(pool.allocate(held).ok());
  const Status full = pool.allocate(more);
  EXPECT_EQ(full.code(), StatusCode::out_of_memory);
  EXPECT_EQ(full.message(), "BlockPool::allocate: 2 blocks asked for, but 1 of 4 are free");
  EXPECT_EQ(more, (Blocks{-5, -5}));

  const auto unchanged = [&] { return pool.num_free() == 1 && pool.references(0) == 1 && pool.references(1) == 1; };
  EXPECT_EQ(pool.free(Blocks{0, 3}).message(), "BlockPool::free: block 3 (number 1) is free");
  EXPECT_TRUE(unchanged());
  EXPECT_EQ(pool.free(Blocks{1, 0, 1}).message(),
            "BlockPool::free: block 1 (number 2) comes more often than its references, 1");
  EXPECT_TRUE(unchanged());
  EXPECT_EQ(pool.free(Blocks{0, 4}).message(), "BlockPool::free: block 4 (number 1) is none of num_blocks = 4");
  EXPECT_EQ(pool.fork(Blocks{0, -1}).message(), "BlockPool::fork: block -1 (number 1) is none of num_blocks = 4");
  EXPECT_EQ(pool.fork(Blocks{0, 3}).message(), "BlockPool::fork: block 3 (number 1) is free");
  EXPECT_EQ(pool.prepare_write(3).status().message(), "BlockPool::prepare_write: block 3 (number 0) is free");
  EXPECT_EQ(pool.free(Blocks{3}).code(), StatusCode::invalid_argument);
  EXPECT_TRUE(unchanged());

  // A write to a shared block of a full pool: the reference stays.
  ASSERT_TRUE(pool.fork(Blocks{0}).ok());
  Blocks last(1);
  ASSERT_TRUE(pool.allocate(last).ok());
  EXPECT_EQ(pool.prepare_write(0).status().code(), StatusCode::out_of_memory);
  EXPECT_EQ(pool.references(0), 2);

  BlockPool empty = make(0);
  EXPECT_TRUE(empty.allocate({}).ok() && empty.fork({}).ok() && empty.free({}).ok());
  EXPECT_FALSE(empty.allocate(last).ok());
}

// Sequences come, grow, fork, write and go, 100,000 times. The model: a sequence is a list of blocks and, for each, the
// integer that the block should hold, copied where the pool says so. A block that is written while another sequence can
// see it, given twice or lost would show.
TEST(BlockPool, RandomisedAgainstAModel) {
  Random random(test::seed());
  constexpr int64_t kBlocks = 20;
  struct Sequence {
    Blocks blocks;
    Blocks contents;
  };
  BlockPool pool = make(kBlocks);
  Blocks memory(kBlocks, -1);  // what was last written into each block
  std::vector<Sequence> sequences;
  int64_t next_content = 0, num_copies = 0, num_full = 0, num_refused = 0;
  for (int64_t operation = 0; operation < 100000; ++operation) {
    SCOPED_TRACE("operation " + std::to_string(operation));
    std::map<int64_t, int64_t> references;
    if (operation % 16 == 0) {
      for (const Sequence& s : sequences) {
        for (int64_t block : s.blocks) ++references[block];
      }
      for (int64_t block = 0; block < kBlocks; ++block) ASSERT_EQ(pool.references(block), references[block]);
      ASSERT_EQ(pool.num_free(), std::count_if(references.begin(), references.end(),
                                               [](const auto& entry) { return entry.second == 0; }));
    }
    const auto pick = [&]() -> Sequence& {
      return sequences[static_cast<size_t>(random.integer(0, static_cast<int64_t>(sequences.size()) - 1))];
    };
    // Few enough for a pool that is sometimes full, sometimes not.
    const int64_t what = sequences.empty() ? 0 : sequences.size() > 12 ? 1 : random.integer(0, 5);
    if (what == 0) {  // a new sequence
      Sequence s;
      s.blocks.resize(static_cast<size_t>(random.integer(0, 6)));
      const int64_t before = pool.num_free();
      const Status status = pool.allocate(s.blocks);
      ASSERT_EQ(status.ok(), before >= static_cast<int64_t>(s.blocks.size()));
      if (!status.ok()) {
        ++num_full;
        continue;
      }
      for (int64_t block : s.blocks) {
        ASSERT_EQ(pool.references(block), 1);
        s.contents.push_back(memory[static_cast<size_t>(block)] = next_content++);
      }
      sequences.push_back(s);
    } else if (what == 1) {  // one goes
      Sequence& s = pick();
      for (size_t i = 0; i < s.blocks.size(); ++i) ASSERT_EQ(memory[static_cast<size_t>(s.blocks[i])], s.contents[i]);
      ASSERT_TRUE(pool.free(s.blocks).ok());
      std::swap(s, sequences.back());
      sequences.pop_back();
    } else if (what == 2) {  // one shares its past with another
      Sequence s = pick();
      const auto length = static_cast<size_t>(random.integer(0, static_cast<int64_t>(s.blocks.size())));
      s.blocks.resize(length);
      s.contents.resize(length);
      ASSERT_TRUE(pool.fork(s.blocks).ok());
      sequences.push_back(s);
    } else if (what == 3) {  // one grows
      Sequence& s = pick();
      int64_t block = 0;
      if (!pool.allocate({&block, 1}).ok()) {
        ASSERT_EQ(pool.num_free(), 0);
        ++num_full;
        continue;
      }
      s.blocks.push_back(block);
      s.contents.push_back(memory[static_cast<size_t>(block)] = next_content++);
    } else if (what == 4) {  // one writes
      Sequence& s = pick();
      if (s.blocks.empty()) continue;
      const auto i = static_cast<size_t>(random.integer(0, static_cast<int64_t>(s.blocks.size()) - 1));
      Result<BlockWrite> write = pool.prepare_write(s.blocks[i]);
      if (!write.ok()) {
        ASSERT_TRUE(pool.num_free() == 0 && pool.references(s.blocks[i]) > 1);
        ++num_full;
        continue;
      }
      const auto to = static_cast<size_t>(write.value().block);
      if (write.value().copy_from >= 0) {
        ASSERT_EQ(write.value().copy_from, s.blocks[i]);
        memory[to] = memory[static_cast<size_t>(write.value().copy_from)];
        ++num_copies;
      } else {
        ASSERT_EQ(write.value().block, s.blocks[i]);
      }
      ASSERT_EQ(pool.references(write.value().block), 1);
      ASSERT_EQ(memory[to], s.contents[i]);
      s.blocks[i] = write.value().block;
      s.contents[i] = memory[to] = next_content++;
    } else {  // somebody frees a block that is free
      const int64_t block = random.integer(-2, kBlocks + 1);
      if (pool.references(block) != 0) continue;
      Blocks blocks = pick().blocks;
      blocks.push_back(block);
      const int64_t before = pool.num_free();
      ASSERT_FALSE(pool.free(blocks).ok());
      ASSERT_FALSE(pool.fork(blocks).ok());
      ASSERT_EQ(pool.num_free(), before);
      ++num_refused;
    }
  }
  for (const Sequence& s : sequences) {
    for (size_t i = 0; i < s.blocks.size(); ++i) ASSERT_EQ(memory[static_cast<size_t>(s.blocks[i])], s.contents[i]);
    ASSERT_TRUE(pool.free(s.blocks).ok());
  }
  EXPECT_EQ(pool.num_free(), kBlocks);
  // Every kind of operation came up, full pools and refusals included.
  EXPECT_GT(num_copies, 1000);
  EXPECT_GT(num_full, 1000);
  EXPECT_GT(num_refused, 1000);
}

// The header's example, with a cache in each format: two sequences share a block until one of them writes.
TEST(BlockPool, CopyOnWriteOfACache) {
  Context& context = test::contexts_with_threads(2).back().context;
  const PageSizes sizes = {.num_blocks = 4, .block_size = 32, .num_kv_heads = 1, .head_dim = 2, .value_head_dim = 2};
  constexpr PageLayout kLayout = PageLayout::panel32;
  for (const char* const name : {"f32", "bf16", "int8", "int8_offset", "int4", "int4_offset", "f8_e4m3"}) {
    SCOPED_TRACE(name);
    const KvFormat format = kv_format(name, 2, 2).value();
    std::vector<float> memory[6];
    for (std::vector<float>& numbers : memory) numbers.assign(4 * 32 * 2, 0.0f);
    const Tensor k = key_pages(kLayout, format.dtype, sizes, memory[0].data());
    const Tensor v = value_pages(kLayout, format.dtype, sizes, memory[1].data());
    PageScales scales;
    if (format.key_groups > 0) {
      scales = {key_scale_pages(kLayout, sizes, 1, memory[2].data()),
                value_scale_pages(kLayout, sizes, 1, memory[3].data())};
    }
    if (format.has_offsets) {
      scales.key_offsets = key_scale_pages(kLayout, sizes, 1, memory[4].data());
      scales.value_offsets = value_scale_pages(kLayout, sizes, 1, memory[5].data());
    }
    const auto write = [&](int64_t block, int64_t row, float x) {
      const float token[2] = {x, -x};
      const int64_t slot = block * 32 + row;
      const ConstTensor tokens = ConstTensor::contiguous(DType::f32, {1, 1, 2}, token);
      return scatter_pa_kv_cache(context, tokens, tokens, ConstTensor::contiguous(DType::i64, {1}, &slot), k, v,
                                 {.layout = kLayout, .scales = scales})
          .ok();
    };
    const auto read = [&](int64_t block) {
      std::vector<float> out(4), out_values(4);
      const int32_t length = 2;
      EXPECT_TRUE(gather_pa_kv_cache(context, k, v, ConstTensor::contiguous(DType::i64, {1, 1}, &block),
                                     ConstTensor::contiguous(DType::i32, {1}, &length),
                                     Tensor::contiguous(DType::f32, {2, 1, 2}, out.data()),
                                     Tensor::contiguous(DType::f32, {2, 1, 2}, out_values.data()),
                                     {.layout = kLayout, .scales = scales})
                      .ok());
      EXPECT_EQ(out, out_values);
      return out;
    };
    BlockPool pool = make(4);
    Blocks first(1);
    ASSERT_TRUE(pool.allocate(first).ok());
    ASSERT_TRUE(write(first[0], 0, 1) && write(first[0], 1, 2));
    const std::vector<float> shared = read(first[0]);
    ASSERT_TRUE(pool.fork(first).ok());
    Blocks second = first;
    Result<BlockWrite> prepared = pool.prepare_write(second[0]);
    ASSERT_TRUE(prepared.ok() && prepared.value().copy_from >= 0);
    const auto block = [](const Tensor& tensor, int64_t b) { return tensor.narrowed(0, b, 1); };
    const int64_t from = prepared.value().copy_from, to = prepared.value().block;
    ASSERT_TRUE(
        convert_pages(
            context, block(k, from), block(v, from), block(k, to), block(v, to),
            {.from = kLayout, .to = kLayout, .from_scales = scales.blocks(from), .to_scales = scales.blocks(to)})
            .ok());
    second[0] = to;
    ASSERT_TRUE(write(second[0], 1, 5));
    const std::vector<float> of_first = read(first[0]), of_second = read(second[0]);
    EXPECT_EQ(of_first, shared);
    const float expected[] = {1, -1, 5, -5};
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_NEAR(of_second[i], expected[i], 0.1 * std::abs(expected[i]));
      if (i < 2) {
        EXPECT_EQ(of_second[i], shared[i]);
      }
      EXPECT_NEAR(shared[i], i < 2 ? expected[i] : expected[i] * 2 / 5, 0.2);
    }
  }
}

}  // namespace
}  // namespace opst

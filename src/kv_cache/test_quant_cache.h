// A cache of integers with scales behind guard pages, what its bytes stand for in the order of the norm layout, and
// tokens for it.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "kv_cache/test_cache.h"

namespace opst::test {

// Keys or values of a cache: rows [slot][head] of `dim` integers, `groups` scales and offsets (none: empty).
struct QuantSide {
  int64_t dim = 0, groups = 0;
  int bits = 8;
  std::vector<double> bytes, scales, offsets;

  double value(size_t row, int64_t d) const {
    double q = 0;
    if (bits == 8) {
      q = bytes[row * static_cast<size_t>(dim) + static_cast<size_t>(d)];
    } else {
      const int both = static_cast<int>(bytes[(row * static_cast<size_t>(dim) + static_cast<size_t>(d)) / 2]) & 255;
      const int half = d % 2 == 0 ? both % 16 : both / 16;
      q = half < 8 ? half : half - 16;
    }
    const size_t group = row * static_cast<size_t>(groups) + static_cast<size_t>(d / (dim / groups));
    return (q + (offsets.empty() ? 0 : offsets[group])) * scales[group];
  }
};

struct QuantCache {
  PageLayout layout;
  KvFormat format;
  PageSizes sizes;
  TestCache pages, scale_pages, offset_pages;  // pages: of i8, whose shapes those of u8 share
  Tensor key, value;
  PageScales scales;

  // Filled with random bytes, scales that are not negative, and whole offsets.
  QuantCache(PageLayout cache_layout, const KvFormat& kv_format, const PageSizes& page_sizes, bool strided,
             Random& random)
      : layout(cache_layout),
        format(kv_format),
        sizes(page_sizes),
        pages(layout, DType::i8, with_dims(sizes.head_dim / numbers(), sizes.value_head_dim / numbers()), strided,
              random, Fill::uniform),
        scale_pages(layout, DType::f32, with_dims(format.key_groups, format.value_groups), strided, random),
        offset_pages(layout, DType::f32, with_dims(format.key_groups, format.value_groups), strided, random),
        key(pages.key),
        value(pages.value),
        scales{scale_pages.key, scale_pages.value} {
    key.dtype = value.dtype = format.dtype;
    for (const Tensor& t : {scale_pages.key, scale_pages.value}) {
      for (int64_t i = 0; i < t.num_elements(); ++i) test::set(t, i, random.chance(0.2) ? 0 : random.uniform(0, 2));
    }
    for (const Tensor& t : {offset_pages.key, offset_pages.value}) {
      for (int64_t i = 0; i < t.num_elements(); ++i) test::set(t, i, static_cast<double>(random.integer(-7, 8)));
    }
    if (format.has_offsets) scales.key_offsets = offset_pages.key, scales.value_offsets = offset_pages.value;
  }

  QuantSide keys() const {
    return {sizes.head_dim, format.key_groups,  bits(),
            pages.keys(),   scale_pages.keys(), format.has_offsets ? offset_pages.keys() : std::vector<double>()};
  }
  QuantSide values() const {
    return {
        sizes.value_head_dim, format.value_groups,  bits(),
        pages.values(),       scale_pages.values(), format.has_offsets ? offset_pages.values() : std::vector<double>()};
  }
  // Everything that the cache holds, row after row within each of its tensors.
  std::vector<double> all_bytes() const {
    std::vector<double> all;
    for (const TestCache* const part : {&pages, &scale_pages, &offset_pages}) {
      for (const std::vector<double>& numbers : {part->keys(), part->values()}) {
        all.insert(all.end(), numbers.begin(), numbers.end());
      }
    }
    return all;
  }
  // Slots that are not `written` hold what they held, and nothing beside the cache was touched.
  void expect_rows_kept(const std::vector<double>& before, const std::vector<bool>& written) const {
    const std::vector<double> after = all_bytes();
    size_t at = 0;
    for (const TestCache* const part : {&pages, &scale_pages, &offset_pages}) {
      for (const size_t numbers : {part->keys().size(), part->values().size()}) {
        for (size_t i = 0; i < numbers; ++i, ++at) {
          if (written[i / (numbers / written.size())]) continue;
          ASSERT_EQ(after[at], before[at]) << at;
        }
      }
      EXPECT_TRUE(part->slack_intact());
    }
  }

 private:
  int64_t numbers() const { return format.dtype == DType::u8 ? 2 : 1; }
  int bits() const { return format.dtype == DType::u8 ? 4 : 8; }
  PageSizes with_dims(int64_t head_dim, int64_t value_head_dim) const {
    PageSizes s = sizes;
    s.head_dim = head_dim, s.value_head_dim = value_head_dim;
    return s;
  }
};

// Tokens [tokens, heads, dim] of random numbers; strided: tokens innermost.
struct QuantTokens {
  GuardedBuffer memory;
  Tensor tensor;

  QuantTokens(int64_t tokens, int64_t heads, int64_t dim, DType dtype, bool strided, Random& random)
      : memory(tokens * heads * dim * opst::size_bytes(dtype), random.chance(0.5) ? Guard::after : Guard::before),
        tensor(strided ? memory.tensor(dtype, {heads, dim, tokens}).transposed(1, 2).transposed(0, 1)
                       : memory.tensor(dtype, {tokens, heads, dim})) {
    fill(tensor, Fill::normal, random);
  }

  // In each group of `count` both ends of the range occur.
  void fill_with_whole_numbers(int64_t low, int64_t high, int64_t count, Random& random) {
    for (int64_t i = 0; i < tensor.num_elements(); ++i) {
      const int64_t place = i % count;
      test::set(tensor, i, static_cast<double>(place == 0 ? low : place == 1 ? high : random.integer(low, high)));
    }
  }
  std::vector<double> row(int64_t token) const { return to_doubles(tensor.selected(0, token)); }
};

}  // namespace opst::test

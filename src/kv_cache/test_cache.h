// A cache behind guard pages, in any layout and with strides, and its contents in the order of the norm layout.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kv_cache/reference.h"
#include "opst/kv_cache.h"
#include "testing/elements.h"
#include "testing/guarded_buffer.h"
#include "testing/random.h"

namespace opst::test {

inline std::string text(const PageSizes& s) {
  return std::to_string(s.num_blocks) + " blocks x " + std::to_string(s.block_size) + ", heads " +
         std::to_string(s.num_kv_heads) + ", dims " + std::to_string(s.head_dim) + " and " +
         std::to_string(s.value_head_dim);
}

struct TestCache {
  PageLayout layout;
  PageSizes sizes;
  // Memory has one head more than the cache, which nobody may touch; see view().
  bool strided;
  GuardedBuffer key_memory, value_memory;
  Tensor key, value;

  TestCache(PageLayout cache_layout, DType dtype, const PageSizes& page_sizes, bool with_strides, Random& random,
            Fill content = Fill::normal)
      : layout(cache_layout),
        sizes(page_sizes),
        strided(with_strides),
        key_memory(memory(dtype, sizes.head_dim, random)),
        value_memory(memory(dtype, sizes.value_head_dim, random)),
        key(view(key_memory, dtype, true)),
        value(view(value_memory, dtype, false)) {
    fill(key, content, random);
    fill(value, content, random);
  }

  std::vector<double> keys() const {
    const std::vector<double> pages = to_doubles(key);
    return layout == PageLayout::norm ? pages : reference::panel_keys_as_norm(pages, sizes, step());
  }
  std::vector<double> values() const {
    const std::vector<double> pages = to_doubles(value);
    return layout == PageLayout::norm ? pages : reference::panel_values_as_norm(pages, sizes, step());
  }
  bool slack_intact() const {
    for (const bool is_key : {true, false}) {
      const GuardedBuffer& memory = is_key ? key_memory : value_memory;
      const int64_t used = (is_key ? key : value).num_elements() * opst::size_bytes(key.dtype);
      if (!memory.slack_intact()) return false;
      for (int64_t i = used; i < memory.size_bytes(); ++i) {
        if (static_cast<const uint8_t*>(memory.data())[i] != 0xff) return false;
      }
    }
    return true;
  }

 private:
  int64_t step() const { return key.dtype == DType::bf16 ? 2 : 1; }
  GuardedBuffer memory(DType dtype, int64_t dim, Random& random) const {
    const int64_t heads = sizes.num_kv_heads + (strided ? 1 : 0);
    return GuardedBuffer(sizes.num_blocks * sizes.block_size * heads * dim * opst::size_bytes(dtype),
                         random.chance(0.5) ? Guard::after : Guard::before);
  }
  // Strided: norm lies as [head][dim][block][row]; of panel32 heads come before blocks.
  Tensor view(const GuardedBuffer& buffer, DType dtype, bool is_key) const {
    const auto pages = [&](const PageSizes& s) {
      return is_key ? key_pages(layout, dtype, s, buffer.data()) : value_pages(layout, dtype, s, buffer.data());
    };
    if (!strided) return pages(sizes);
    const int64_t heads = sizes.num_kv_heads;
    if (layout == PageLayout::norm) {
      const int64_t dim = is_key ? sizes.head_dim : sizes.value_head_dim;
      return buffer.tensor(dtype, {heads + 1, dim, sizes.num_blocks, sizes.block_size})
          .narrowed(0, 0, heads)
          .transposed(0, 2)
          .transposed(1, 3);
    }
    PageSizes exchanged = sizes;
    exchanged.num_blocks = heads + 1;
    exchanged.num_kv_heads = sizes.num_blocks;
    return pages(exchanged).narrowed(0, 0, heads).transposed(0, 1);
  }
};

}  // namespace opst::test

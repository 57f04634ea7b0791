// The KV cache's operators in plain loops over doubles. Caches are in the order of the norm layout,
// [num_blocks][block_size][num_kv_heads][dim]; pages of other layouts are put into that order first.
#pragma once

#include <cstdint>
#include <vector>

#include "opst/kv_cache.h"

namespace opst::reference {

// cache [num_slots][row] <- tokens [tokens][row], the last token of a slot wins; -1 skips.
inline void scatter(const std::vector<double>& tokens, int64_t row, const std::vector<int64_t>& slot_mapping,
                    std::vector<double>& cache) {
  for (size_t t = 0; t < slot_mapping.size(); ++t) {
    if (slot_mapping[t] < 0) continue;
    for (int64_t i = 0; i < row; ++i) {
      cache[static_cast<size_t>(slot_mapping[t] * row + i)] =
          tokens[t * static_cast<size_t>(row) + static_cast<size_t>(i)];
    }
  }
}

// Keys of panel32 pages in the order in which they lie, [block][head][panel][word][32][step].
inline std::vector<double> panel_keys_as_norm(const std::vector<double>& pages, const PageSizes& s, int64_t step) {
  std::vector<double> norm(pages.size());
  size_t next = 0;
  for (int64_t block = 0; block < s.num_blocks; ++block)
    for (int64_t head = 0; head < s.num_kv_heads; ++head)
      for (int64_t panel = 0; panel < s.block_size / 32; ++panel)
        for (int64_t word = 0; word < s.head_dim / step; ++word)
          for (int64_t row = 0; row < 32; ++row)
            for (int64_t part = 0; part < step; ++part) {
              const int64_t token = block * s.block_size + panel * 32 + row;
              norm[static_cast<size_t>((token * s.num_kv_heads + head) * s.head_dim + word * step + part)] =
                  pages[next++];
            }
  return norm;
}

// Values of panel32 pages, [block][head][pair][dim][step].
inline std::vector<double> panel_values_as_norm(const std::vector<double>& pages, const PageSizes& s, int64_t step) {
  std::vector<double> norm(pages.size());
  size_t next = 0;
  for (int64_t block = 0; block < s.num_blocks; ++block)
    for (int64_t head = 0; head < s.num_kv_heads; ++head)
      for (int64_t pair = 0; pair < s.block_size / step; ++pair)
        for (int64_t d = 0; d < s.value_head_dim; ++d)
          for (int64_t part = 0; part < step; ++part) {
            const int64_t token = block * s.block_size + pair * step + part;
            norm[static_cast<size_t>((token * s.num_kv_heads + head) * s.value_head_dim + d)] = pages[next++];
          }
  return norm;
}

// Tokens [sum of lengths][heads][dim]; zero where the table has no column or no block of the cache.
inline std::vector<double> gather(const std::vector<double>& cache, const PageSizes& s, int64_t dim,
                                  const std::vector<std::vector<int64_t>>& block_table,
                                  const std::vector<int64_t>& lengths, const std::vector<int64_t>& seq_offset,
                                  const std::vector<int64_t>& heads) {
  std::vector<double> tokens;
  for (size_t b = 0; b < lengths.size(); ++b) {
    for (int64_t i = 0; i < lengths[b]; ++i) {
      const int64_t position = seq_offset[b] + i;
      const auto column = static_cast<size_t>(position / s.block_size);
      const int64_t block = column < block_table[b].size() ? block_table[b][column] : -1;
      const bool present = block >= 0 && block < s.num_blocks;
      for (int64_t head : heads) {
        const int64_t row = (block * s.block_size + position % s.block_size) * s.num_kv_heads + head;
        for (int64_t d = 0; d < dim; ++d) {
          tokens.push_back(present ? cache[static_cast<size_t>(row * dim + d)] : 0);
        }
      }
    }
  }
  return tokens;
}

}  // namespace opst::reference

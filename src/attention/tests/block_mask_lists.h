// Block masks for tests: a matrix of visible pairs of blocks, and the CSR of it.
#pragma once

#include <vector>

#include "core/int_math.h"
#include "opst/block_mask.h"

namespace opst::test {

struct MaskLists {
  std::vector<int32_t> offsets, columns;
  BlockMask mask;

  // visible(b, h, i, j): whether query block i of head h of sequence b sees key block j.
  template <class Visible>
  MaskLists(int64_t batch, int64_t heads, int64_t query_len, int64_t kv_len, int64_t block_q, int64_t block_kv,
            const Visible& visible) {
    const int64_t query_blocks = ceil_div(query_len, block_q), key_blocks = ceil_div(kv_len, block_kv);
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        offsets.push_back(static_cast<int32_t>(columns.size()));
        for (int64_t i = 0; i < query_blocks; ++i) {
          for (int64_t j = 0; j < key_blocks; ++j) {
            if (visible(b, h, i, j)) columns.push_back(static_cast<int32_t>(j));
          }
          offsets.push_back(static_cast<int32_t>(columns.size()));
        }
      }
    }
    mask.row_offsets = ConstTensor::contiguous(DType::i32, {batch, heads, query_blocks + 1}, offsets.data());
    mask.columns = ConstTensor::contiguous(DType::i32, {static_cast<int64_t>(columns.size())}, columns.data());
    mask.block_q = block_q, mask.block_kv = block_kv;
  }
  MaskLists(const MaskLists&) = delete;
  MaskLists& operator=(const MaskLists&) = delete;
};

}  // namespace opst::test

// --shared-prefix N: sequences of a batch that hold their first N keys in the same pages.
#pragma once

#include <cstdint>
#include <vector>

#include "opst/attention.h"

namespace opst::tools {

// Of sequences of p.kv_len keys in pages, the first `shared` of which are the same.
struct PageTable {
  static constexpr int64_t kKeys = 64;  // of a page
  int64_t columns, num_blocks;
  std::vector<int64_t> blocks, lengths;  // [batch][columns], [batch]

  static int64_t pages(int64_t keys) { return (keys + kKeys - 1) / kKeys; }

  PageTable(const AttentionProblem& p, int64_t shared)
      : columns(pages(p.kv_len)), lengths(static_cast<size_t>(p.batch), p.kv_len) {
    const int64_t same = pages(shared), own = columns - same;
    num_blocks = same + p.batch * own;
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t i = 0; i < columns; ++i) blocks.push_back(i < same ? i : i + b * own);
    }
  }
};

// Puts a problem's keys into pages; a CommandError where the option does not go with --batch or --seq.
void share_prefix(int64_t keys, AttentionProblem& problem);

}  // namespace opst::tools

// scatter_pa_kv_cache in plain loops over doubles.
#pragma once

#include <cstdint>
#include <vector>

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

}  // namespace opst::reference

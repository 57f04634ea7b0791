// Slots of a cache: their check, and how they are dealt out to the tasks that write tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "core/shape_check.h"
#include "kv_cache/pages.h"

namespace opst::kv_cache {

// Every slot is -1 or one of the cache's; called after the shapes' check.
inline void check_slots(ShapeCheck& check, const ConstTensor& slot_mapping, const PageSizes& sizes) {
  if (!check.ok()) return;
  const int64_t num_slots = sizes.num_blocks * sizes.block_size;  // the cache's tensors have no more elements than fit
  for (int64_t t = 0; t < distinct(slot_mapping, 0); ++t) {
    const int64_t slot = index_at(slot_mapping, t);
    if (slot >= -1 && slot < num_slots) continue;
    check.require(false, std::string("slot_mapping[") + std::to_string(t) + "] is " + std::to_string(slot) +
                             ", but the cache has " + std::to_string(sizes.num_blocks) + " blocks of " +
                             std::to_string(sizes.block_size) + " rows = " + std::to_string(num_slots) +
                             " slots (-1 skips a token)");
    return;
  }
}

// The first token that must be written: where all have one slot, the last wins.
inline int64_t first_written(const ConstTensor& slot_mapping) {
  return slot_mapping.shape[0] - distinct(slot_mapping, 0);
}

// Slots are dealt out in runs, and a task writes its slots in token order: so of several tokens with one slot the last
// wins, whoever runs the tasks. Each task looks at every slot, so tasks are few.
struct SlotTasks {
  static constexpr int64_t kRunSlots = 16;
  static constexpr int64_t kMaxTasks = 16;
  static constexpr int64_t kTaskElements = int64_t{1} << 14;  // elements written per task: worth handing out
  int64_t count;

  explicit SlotTasks(int64_t elements) : count(std::clamp<int64_t>(elements / kTaskElements, 1, kMaxTasks)) {}
  bool writes(int64_t task, int64_t slot) const { return slot >= 0 && slot / kRunSlots % count == task; }
};

}  // namespace opst::kv_cache

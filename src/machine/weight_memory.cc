#include "machine/weight_memory.h"

#include <mutex>

#include "core/int_math.h"
#include "core/watched.h"

namespace opst {
namespace {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;
// Mapped at once: pages that nobody has touched take no memory.
constexpr int64_t kBlockBytes = 8 * kHugePageBytes;
constexpr int64_t kAlignmentBytes = 64;

// Under AddressSanitizer each weight has memory of its own, whose bounds are watched.
constexpr bool kShared = !kWatched;

}  // namespace

struct WeightMemory::Block {
  Buffer memory;
  std::shared_ptr<ForkSafeMutex> mutex;
  int64_t used = 0;

  // Null where there is no room. Under the mutex.
  char* take(int64_t bytes) {
    if (bytes > memory.size_bytes() - used) return nullptr;
    used += bytes;
    return static_cast<char*>(memory.data()) + used - bytes;
  }
  void give_back(const void* place, int64_t bytes) {
    const std::lock_guard<ForkSafeMutex> lock(*mutex);
    if (static_cast<const char*>(place) + bytes == static_cast<char*>(memory.data()) + used) used -= bytes;
  }
};

Result<Buffer> WeightMemory::allocate(int64_t size_bytes) {
  if (!kShared || size_bytes <= 0 || size_bytes >= kHugePageBytes) return Buffer::allocate(size_bytes);
  const int64_t bytes = round_up(size_bytes, kAlignmentBytes);
  std::shared_ptr<Block> block;
  char* place = nullptr;
  {
    const std::lock_guard<ForkSafeMutex> lock(*mutex_);
    if (block_) place = block_->take(bytes);
    if (place == nullptr) {
      auto fresh = std::make_shared<Block>();
      Result<Buffer> memory = Buffer::allocate(kBlockBytes);
      if (!memory.ok()) return memory.status();
      fresh->memory = std::move(memory.value());
      fresh->mutex = mutex_;
      block_ = std::move(fresh);
      place = block_->take(bytes);
    }
    block = block_;
  }
  // Outside the lock: where this fails, the place is given back, which takes the lock.
  std::shared_ptr<void> owner(place, [block, bytes](void* p) { block->give_back(p, bytes); });
  return Buffer::part_of(std::move(owner), place, size_bytes);
}

}  // namespace opst

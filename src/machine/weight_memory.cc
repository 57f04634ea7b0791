#include "machine/weight_memory.h"

#include <mutex>

#include "core/int_math.h"
#include "core/sanitizers.h"

namespace opst {
namespace {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;
// Mapped at once: pages that nobody has touched take no memory.
constexpr int64_t kBlockBytes = 8 * kHugePageBytes;
constexpr int64_t kAlignmentBytes = 64;

}  // namespace

struct WeightMemory::Block {
  Buffer memory;
  std::shared_ptr<ForkSafeMutex> mutex;
  int64_t used = 0;  // guarded by the mutex

  char* next() const { return static_cast<char*>(memory.data()) + used; }
};

Result<Buffer> WeightMemory::allocate(int64_t size_bytes) {
  // Under AddressSanitizer each weight has memory of its own, whose bounds are watched.
  if (kAddressSanitizer || size_bytes <= 0 || size_bytes >= kHugePageBytes) return Buffer::allocate(size_bytes);
  const int64_t bytes = round_up(size_bytes, kAlignmentBytes);
  std::shared_ptr<Block> block;
  char* place = nullptr;
  {
    const std::lock_guard<ForkSafeMutex> lock(*mutex_);
    if (!block_ || bytes > block_->memory.size_bytes() - block_->used) {
      Result<Buffer> memory = Buffer::allocate(kBlockBytes);
      if (!memory.ok()) return memory.status();
      block_ = std::make_shared<Block>(Block{std::move(memory.value()), mutex_});
    }
    block = block_;
    place = block->next();
    block->used += bytes;
  }
  // Outside the lock: where this fails, the place is given back, which takes the lock.
  std::shared_ptr<void> owner(place, [block, bytes](const char* p) {
    const std::lock_guard<ForkSafeMutex> lock(*block->mutex);
    if (p + bytes == block->next()) block->used -= bytes;
  });
  return Buffer::part_of(std::move(owner), place, size_bytes);
}

}  // namespace opst

#include "machine/weight_memory.h"

#include "core/int_math.h"

namespace opst {
namespace {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;
// Mapped at once; what is not touched is not there.
constexpr int64_t kBlockBytes = 8 * kHugePageBytes;
constexpr int64_t kAlignmentBytes = 64;

#if defined(__has_feature)
#define OPST_WATCHED __has_feature(address_sanitizer)
#else
#define OPST_WATCHED 0
#endif
#if defined(__SANITIZE_ADDRESS__) || OPST_WATCHED
constexpr bool kShared = false;  // a weight in memory of its own has its bounds watched
#else
constexpr bool kShared = true;
#endif

}  // namespace

struct WeightMemory::Block {
  Buffer memory;
  std::mutex mutex;
  int64_t used = 0;

  // Null where there is no room.
  char* take(int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (bytes > memory.size_bytes() - used) return nullptr;
    used += bytes;
    return static_cast<char*>(memory.data()) + used - bytes;
  }
  void give_back(const void* place, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (static_cast<const char*>(place) + bytes == static_cast<char*>(memory.data()) + used) used -= bytes;
  }
};

Result<Buffer> WeightMemory::allocate(int64_t size_bytes) {
  if (!kShared || size_bytes <= 0 || size_bytes >= kHugePageBytes) return Buffer::allocate(size_bytes);
  const int64_t bytes = round_up(size_bytes, kAlignmentBytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  char* place = block_ ? block_->take(bytes) : nullptr;
  if (place == nullptr) {
    auto block = std::make_shared<Block>();
    Result<Buffer> memory = Buffer::allocate(kBlockBytes);
    if (!memory.ok()) return memory.status();
    block->memory = std::move(memory.value());
    block_ = std::move(block);
    place = block_->take(bytes);
  }
  const auto give_back = [block = block_, bytes](void* p) { block->give_back(p, bytes); };
  return Buffer::part_of(std::shared_ptr<void>(place, give_back), place, size_bytes);
}

}  // namespace opst

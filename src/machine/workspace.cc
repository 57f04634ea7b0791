#include "machine/workspace.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "core/guarded.h"
#include "core/int_math.h"
#include "core/sanitizers.h"

namespace opst {
namespace {

// Sizes are rounded up, so that calls of slowly varying size soon find what they need.
int64_t rounded_size(int64_t size_bytes) {
  constexpr int64_t kSmallStep = int64_t{64} << 10;
  constexpr int64_t kHugePage = int64_t{2} << 20;
  return round_up(size_bytes, size_bytes < kHugePage ? kSmallStep : kHugePage);
}

}  // namespace

WorkspaceLease::WorkspaceLease(WorkspacePool* pool, Buffer buffer, int64_t size_bytes)
    : pool_(pool), buffer_(std::move(buffer)), size_bytes_(kAddressSanitizer ? size_bytes : buffer_.size_bytes()) {
  renew();
}

void WorkspaceLease::renew() const {
  if (!kAddressSanitizer || data() == nullptr) return;
  allow(data(), buffer_.size_bytes());
  std::memset(data(), 0xff, static_cast<size_t>(size_bytes_));
  forbid(static_cast<char*>(data()) + size_bytes_, buffer_.size_bytes() - size_bytes_);
}

WorkspaceLease::~WorkspaceLease() {
  if (data() != nullptr) pool_->give_back(std::move(buffer_));
}

Result<WorkspaceLease> WorkspacePool::lease(int64_t size_bytes) {
  return guarded([&]() -> Result<WorkspaceLease> {
    if (size_bytes == 0) return WorkspaceLease(this, Buffer(), 0);
    if (size_bytes < 0 || size_bytes >= kMaxBytes) return Status::out_of_memory();
    const auto better = [size_bytes](const Buffer& a, const Buffer& b) {
      const bool fits = a.size_bytes() >= size_bytes;
      if (fits != (b.size_bytes() >= size_bytes)) return fits;
      return fits ? a.size_bytes() < b.size_bytes() : a.size_bytes() > b.size_bytes();
    };
    Buffer buffer;
    {
      const std::lock_guard<ForkSafeMutex> lock(mutex_);
      const auto best = std::min_element(idle_.begin(), idle_.end(), better);
      if (best != idle_.end()) {
        buffer = std::move(*best);
        idle_.erase(best);
        if (buffer.size_bytes() >= size_bytes) return WorkspaceLease(this, std::move(buffer), size_bytes);
        held_bytes_ -= buffer.size_bytes();
      } else {
        idle_.reserve(static_cast<size_t>(num_buffers_ + 1));
        ++num_buffers_;
      }
    }
    allow(buffer.data(), buffer.size_bytes());
    buffer = Buffer();  // gone before its successor comes: the peak is one of the two
    Result<Buffer> fresh = Buffer::allocate(rounded_size(size_bytes));
    const std::lock_guard<ForkSafeMutex> lock(mutex_);
    ++allocations_;
    if (!fresh.ok()) {
      --num_buffers_;
      return fresh.status();
    }
    held_bytes_ += fresh.value().size_bytes();
    return WorkspaceLease(this, std::move(fresh.value()), size_bytes);
  });
}

// An idle buffer is nobody's. Before the system takes it back its bytes are allowed again: the next owner of these
// addresses is another one.
void WorkspacePool::give_back(Buffer buffer) {
  forbid(buffer.data(), buffer.size_bytes());
  const std::lock_guard<ForkSafeMutex> lock(mutex_);
  idle_.push_back(std::move(buffer));
}

void WorkspacePool::trim() {
  // One by one: the room in idle_ stays, and the system takes the memory back outside the lock.
  for (;;) {
    Buffer freed;
    const std::lock_guard<ForkSafeMutex> lock(mutex_);
    if (idle_.empty()) return;
    freed = std::move(idle_.back());
    idle_.pop_back();
    held_bytes_ -= freed.size_bytes();
    --num_buffers_;
    allow(freed.data(), freed.size_bytes());
  }
}

int64_t WorkspacePool::held_bytes() const {
  const std::lock_guard<ForkSafeMutex> lock(mutex_);
  return held_bytes_;
}

int64_t WorkspacePool::allocations() const {
  const std::lock_guard<ForkSafeMutex> lock(mutex_);
  return allocations_;
}

}  // namespace opst

#include "machine/workspace.h"

#include <algorithm>
#include <utility>

#include "core/guarded.h"
#include "core/int_math.h"

namespace opst {
namespace {

// Sizes are rounded up, so that calls of slowly varying size soon find what they need.
int64_t rounded_size(int64_t size_bytes) {
  constexpr int64_t kSmallStep = int64_t{64} << 10;
  constexpr int64_t kHugePage = int64_t{2} << 20;
  return round_up(size_bytes, size_bytes < kHugePage ? kSmallStep : kHugePage);
}

}  // namespace

WorkspaceLease::~WorkspaceLease() {
  if (pool_ != nullptr) pool_->give_back(std::move(buffer_));
}

WorkspaceLease::WorkspaceLease(WorkspaceLease&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)), buffer_(std::move(other.buffer_)) {}

Result<WorkspaceLease> WorkspacePool::lease(int64_t size_bytes) {
  return guarded([&]() -> Result<WorkspaceLease> {
    if (size_bytes == 0) return WorkspaceLease(nullptr, Buffer());
    if (size_bytes < 0 || size_bytes >= kMaxBytes) return Status::out_of_memory();
    Buffer buffer;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      auto best = idle_.end();
      auto largest = idle_.end();
      for (auto it = idle_.begin(); it != idle_.end(); ++it) {
        if (largest == idle_.end() || it->size_bytes() > largest->size_bytes()) largest = it;
        if (it->size_bytes() < size_bytes) continue;
        if (best == idle_.end() || it->size_bytes() < best->size_bytes()) best = it;
      }
      const bool fits = best != idle_.end();
      if (largest != idle_.end()) {
        const auto taken = fits ? best : largest;
        buffer = std::move(*taken);
        idle_.erase(taken);
      } else {
        // Room for every buffer that exists, so that giving one back cannot fail.
        idle_.reserve(static_cast<size_t>(num_buffers_ + 1));
        ++num_buffers_;
      }
      if (fits) return WorkspaceLease(this, std::move(buffer));
      held_bytes_ -= buffer.size_bytes();
    }
    buffer = Buffer();  // gone before its successor comes: the peak is one of the two
    Result<Buffer> fresh = Buffer::allocate(rounded_size(size_bytes));
    const std::lock_guard<std::mutex> lock(mutex_);
    ++allocations_;
    if (!fresh.ok()) {
      --num_buffers_;
      return fresh.status();
    }
    held_bytes_ += fresh.value().size_bytes();
    return WorkspaceLease(this, std::move(fresh.value()));
  });
}

void WorkspacePool::give_back(Buffer buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_.push_back(std::move(buffer));
}

void WorkspacePool::trim() {
  std::vector<Buffer> freed;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Buffer& buffer : idle_) held_bytes_ -= buffer.size_bytes();
  num_buffers_ -= static_cast<int64_t>(idle_.size());
  freed.swap(idle_);
}

int64_t WorkspacePool::held_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return held_bytes_;
}

int64_t WorkspacePool::allocations() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return allocations_;
}

}  // namespace opst

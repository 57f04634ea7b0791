#include "machine/workspace.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "core/guarded.h"

namespace opst {
namespace {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// The list of all ForkSafeMutexes. One thing of the process, as fork() is; needs no start and no end.
constinit std::mutex list_mutex;
constinit ForkSafeMutex* first = nullptr;
constinit bool registered = false;

}  // namespace

void ForkSafeMutex::before_fork() {
  list_mutex.lock();
  for (ForkSafeMutex* m = first; m != nullptr; m = m->next_) m->lock();
}

void ForkSafeMutex::after_fork() {
  for (ForkSafeMutex* m = first; m != nullptr; m = m->next_) m->unlock();
  list_mutex.unlock();
}

ForkSafeMutex::ForkSafeMutex() {
  const std::lock_guard<std::mutex> lock(list_mutex);
  registered = registered || pthread_atfork(before_fork, after_fork, after_fork) == 0;
  if (!registered) throw std::bad_alloc();
  next_ = first;
  if (next_ != nullptr) next_->previous_ = this;
  first = this;
}

ForkSafeMutex::~ForkSafeMutex() {
  const std::lock_guard<std::mutex> lock(list_mutex);
  (previous_ == nullptr ? first : previous_->next_) = next_;
  if (next_ != nullptr) next_->previous_ = previous_;
}

WorkspaceLease::WorkspaceLease(WorkspacePool* pool, Buffer buffer, int64_t size_bytes)
    : pool_(pool), buffer_(std::move(buffer)), size_bytes_(kAddressSanitizer ? size_bytes : buffer_.size_bytes()) {
  renew();
}

void WorkspaceLease::renew(int64_t kept) const {
  if (!kAddressSanitizer || data() == nullptr) return;
  char* const rest = static_cast<char*>(data()) + kept;
  allow(rest, buffer_.size_bytes() - kept);
  std::memset(rest, 0xff, static_cast<size_t>(size_bytes_ - kept));
  forbid(static_cast<char*>(data()) + size_bytes_, buffer_.size_bytes() - size_bytes_);
}

WorkspaceLease::~WorkspaceLease() {
  if (data() != nullptr) pool_->give_back(std::move(buffer_));
}

Result<WorkspaceLease> WorkspacePool::lease(int64_t size_bytes) {
  if (source_ == Source::rehearsal && size_bytes >= 0 && size_bytes < kMaxBytes) {
    most_bytes_ = std::max(most_bytes_, used_bytes_ + round_up(size_bytes, kLentAlignment));
    rehearsed_ = true;
    return Status(StatusCode::internal, "rehearsed");
  }
  if (size_bytes == 0) return WorkspaceLease(this, Buffer(), 0);
  if (size_bytes < 0 || size_bytes >= kMaxBytes) return Status::out_of_memory();
  return source_ == Source::lent ? lease_lent(size_bytes) : lease_own(size_bytes);
}

Result<WorkspaceLease> WorkspacePool::lease_for_plan(int64_t size_bytes) {
  if (source_ != Source::rehearsal || size_bytes < 0 || size_bytes >= kMaxBytes) return lease(size_bytes);
  const int64_t bytes = round_up(size_bytes, kLentAlignment);
  Result<Buffer> memory = Buffer::allocate(bytes);
  if (!memory.ok()) return memory.status();
  used_bytes_ += bytes;
  most_bytes_ = std::max(most_bytes_, used_bytes_);
  return WorkspaceLease(this, std::move(memory.value()), size_bytes);
}

Result<WorkspaceLease> WorkspacePool::lease_lent(int64_t size_bytes) {
  const int64_t bytes = round_up(size_bytes, kLentAlignment);
  if (bytes > lent_bytes_ - used_bytes_) {
    exhausted_ = true;
    return Status::out_of_memory();
  }
  char* const piece = lent_ + used_bytes_;
  used_bytes_ += bytes;
  const std::shared_ptr<void> of_the_caller(std::shared_ptr<void>(), piece);  // owns nothing
  return WorkspaceLease(this, Buffer::part_of(of_the_caller, piece, bytes), size_bytes);
}

void WorkspacePool::rehearse() {
  source_ = Source::rehearsal;
  rehearsed_ = false;
  most_bytes_ = used_bytes_ = 0;
}

void WorkspacePool::lend(void* memory, int64_t size_bytes) {
  source_ = Source::lent;
  exhausted_ = false;
  lent_ = static_cast<char*>(memory);
  lent_bytes_ = size_bytes;
  used_bytes_ = 0;
}

Result<WorkspaceLease> WorkspacePool::lease_own(int64_t size_bytes) {
  return guarded([&]() -> Result<WorkspaceLease> {
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
        if (buffer.size_bytes() < size_bytes) held_bytes_ -= buffer.size_bytes();
      } else {
        idle_.reserve(static_cast<size_t>(num_buffers_ + 1));
        ++num_buffers_;
      }
    }
    if (buffer.size_bytes() >= size_bytes) return WorkspaceLease(this, std::move(buffer), size_bytes);
    allow(buffer.data(), buffer.size_bytes());
    buffer = Buffer();  // gone before its successor comes: the peak is one of the two
    // Rounded up, so that calls of slowly varying size soon find what they need.
    const int64_t step = size_bytes < kHugePageBytes ? int64_t{64} << 10 : kHugePageBytes;
    Result<Buffer> fresh = Buffer::allocate(round_up(size_bytes, step));
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
  if (source_ != Source::own) {
    used_bytes_ -= buffer.size_bytes();
    allow(buffer.data(), buffer.size_bytes());
    return;
  }
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

struct WeightMemory::Block {
  Buffer memory;
  std::shared_ptr<ForkSafeMutex> mutex;
  int64_t used = 0;  // guarded by the mutex

  char* next() const { return static_cast<char*>(memory.data()) + used; }
};

Result<Buffer> WeightMemory::allocate(int64_t size_bytes) {
  // Under AddressSanitizer each weight has memory of its own, whose bounds are watched.
  if (kAddressSanitizer || size_bytes <= 0 || size_bytes >= kHugePageBytes) return Buffer::allocate(size_bytes);
  constexpr int64_t kBlockBytes = 8 * kHugePageBytes;  // mapped at once: pages that nobody touches take no memory
  const int64_t bytes = round_up(size_bytes, 64);
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

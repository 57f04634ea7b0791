// Scratch memory that operators lease for one call and give back, so that in steady state nothing is allocated.
//
//   Result<WorkspaceLease> lease = context.impl().workspaces.lease(plan.scratch_bytes);
//   if (!lease.ok()) return lease.status();
//   Arena arena(lease.value());
//   float* scores = arena.take<float>(rows * columns);      // 64-byte aligned
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/int_math.h"
#include "opst/tensor.h"

namespace opst {

class WorkspacePool;

// Owns one buffer of the pool until it is destroyed.
class WorkspaceLease {
 public:
  WorkspaceLease(WorkspacePool* pool, Buffer buffer) : pool_(pool), buffer_(std::move(buffer)) {}
  ~WorkspaceLease();
  WorkspaceLease(WorkspaceLease&& other) noexcept;
  WorkspaceLease& operator=(WorkspaceLease&&) = delete;

  void* data() const { return buffer_.data(); }
  int64_t size_bytes() const { return buffer_.size_bytes(); }

 private:
  WorkspacePool* pool_;
  Buffer buffer_;
};

class WorkspacePool {
 public:
  // At least `size_bytes` of memory: the smallest idle buffer that is large enough; else the largest idle one is
  // replaced by a larger one.
  Result<WorkspaceLease> lease(int64_t size_bytes);
  void trim();
  int64_t held_bytes() const;  // idle and leased
  int64_t allocations() const;

 private:
  friend class WorkspaceLease;
  void give_back(Buffer buffer);

  mutable std::mutex mutex_;
  std::vector<Buffer> idle_;
  int64_t num_buffers_ = 0;  // idle and leased
  int64_t held_bytes_ = 0;
  int64_t allocations_ = 0;
};

// Hands out consecutive 64-byte-aligned pieces of a block of memory. `Arena::size_of<T>(n)` is what take<T>(n) uses up,
// so that a plan can add up exactly what a call will take.
class Arena {
 public:
  explicit Arena(const WorkspaceLease& lease) : next_(static_cast<char*>(lease.data())), left_(lease.size_bytes()) {}
  Arena(void* data, int64_t size_bytes) : next_(static_cast<char*>(data)), left_(size_bytes) {}

  // kMaxBytes for every number from there on.
  static constexpr int64_t round_up(Size bytes) { return (bytes.value() + 63) / 64 * 64; }
  template <class T>
  static constexpr int64_t size_of(Size count) {
    return round_up(count * static_cast<int64_t>(sizeof(T)));
  }

  // Null when the block is used up: the plan was wrong.
  void* take_bytes(Size size) {
    const int64_t bytes = round_up(size);
    if (bytes < 0 || bytes > left_) return nullptr;
    void* piece = next_;
    next_ += bytes;
    left_ -= bytes;
    return piece;
  }
  template <class T>
  T* take(Size count) {
    return static_cast<T*>(take_bytes(size_of<T>(count)));
  }

 private:
  char* next_;
  int64_t left_;
};

}  // namespace opst

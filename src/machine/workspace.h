// Memory of a Context: scratch that operators lease for one call and give back, so that in steady state nothing is
// allocated, or whose memory a caller lends; at the end of the file, memory for packed weights.
//
//   Result<WorkspaceLease> lease = context.impl().workspaces.lease(plan.scratch_bytes);
//   if (!lease.ok()) return lease.status();
//   Arena arena(lease.value());
//   float* scores = arena.take<float>(rows * columns);      // 64-byte aligned
//
// Under AddressSanitizer a lease has exactly the bytes that were asked for, filled with 0xff (NaN, or true): what reads
// scratch that nobody wrote shows. A red zone follows each piece of an arena: one element too far is reported.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/int_math.h"
#include "core/sanitizers.h"
#include "opst/tensor.h"

namespace opst {

// A mutex that is never locked in a forked child, and what it guards is whole there.
// fork() copies memory but the calling thread alone: a mutex that another thread holds at that moment stays locked in
// the child for ever, and what it guards may be half changed. Therefore fork() first takes all mutexes of this kind
// (pthread_atfork), and parent and child release them. For locks held for moments only, as fork() waits for them; a
// thread never holds two of them.
class ForkSafeMutex {
 public:
  // May throw bad_alloc: the first one of the process registers the handlers of fork().
  ForkSafeMutex();
  ~ForkSafeMutex();
  ForkSafeMutex(const ForkSafeMutex&) = delete;
  ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  static void before_fork();
  static void after_fork();

  std::mutex mutex_;
  ForkSafeMutex *previous_ = nullptr, *next_ = nullptr;  // of all that exist
};

class WorkspacePool;

// Owns one buffer of the pool until it is destroyed.
class WorkspaceLease {
 public:
  WorkspaceLease(WorkspacePool* pool, Buffer buffer, int64_t size_bytes);
  ~WorkspaceLease();
  WorkspaceLease(WorkspaceLease&& other) noexcept = default;  // `other` then has no memory
  WorkspaceLease& operator=(WorkspaceLease&&) = delete;

  void* data() const { return buffer_.data(); }
  int64_t size_bytes() const { return size_bytes_; }
  // Before the same memory is cut into pieces of other sizes: under AddressSanitizer the red zones of the pieces before
  // are forgotten and every byte is 0xff again; of the bytes behind the first `kept`.
  void renew(int64_t kept = 0) const;

 private:
  WorkspacePool* pool_;
  Buffer buffer_;
  int64_t size_bytes_;
};

// In a forked child the buffers that the parent's other threads had on lease stay on lease: nobody there returns them.
//
// A call in two phases (opst.h): first a rehearsal of it, which ends between its plan and its run and tells how many
// bytes it leases; then, any time later, the call itself in memory that its caller lends. The operators of opst.h have
// such a point: each of them leases there, or asks ready(), before it writes anything.
//
//   pool.rehearse();
//   const Status status = flash_attention_forward(...);          // "rehearsed", or why the call is refused
//   if (pool.rehearsed()) ... pool.most_bytes() ...
//   pool.lend(memory, size_bytes);
//   const Status status = flash_attention_forward(...);          // allocates nothing
// A pool that rehearses or lends serves one call at a time, whose leases end in the reverse order of their beginnings.
class WorkspacePool {
 public:
  ~WorkspacePool() { trim(); }
  // At least `size_bytes` of memory: the smallest idle buffer that is large enough; else the largest idle one is
  // replaced by a larger one. Lent memory: the next bytes of it, or out_of_memory.
  Result<WorkspaceLease> lease(int64_t size_bytes);
  // The same for what a plan is made from, which a rehearsal needs, too.
  Result<WorkspaceLease> lease_for_plan(int64_t size_bytes);
  // Where an operator that needs no scratch memory would lease it: ok, unless this is a rehearsal.
  Status ready() { return lease(0).status(); }
  void trim();

  void rehearse();
  bool rehearsed() const { return rehearsed_; }       // whether the call came to its run
  int64_t most_bytes() const { return most_bytes_; }  // that it leases at once
  // `memory` is at a multiple of kLentAlignment.
  void lend(void* memory, int64_t size_bytes);
  bool exhausted() const { return exhausted_; }  // whether a call since then wanted more
  static constexpr int64_t kLentAlignment = 64;

  int64_t held_bytes() const {  // idle and leased
    const std::lock_guard<ForkSafeMutex> lock(mutex_);
    return held_bytes_;
  }
  int64_t allocations() const {
    const std::lock_guard<ForkSafeMutex> lock(mutex_);
    return allocations_;
  }

 private:
  friend class WorkspaceLease;
  enum class Source { own, rehearsal, lent };
  void give_back(Buffer buffer);
  Result<WorkspaceLease> lease_own(int64_t size_bytes);
  Result<WorkspaceLease> lease_lent(int64_t size_bytes);

  // Of one call at a time.
  Source source_ = Source::own;
  bool rehearsed_ = false, exhausted_ = false;
  int64_t most_bytes_ = 0, used_bytes_ = 0;
  char* lent_ = nullptr;
  int64_t lent_bytes_ = 0;

  mutable ForkSafeMutex mutex_;
  std::vector<Buffer> idle_;  // with room for every buffer that exists, so that giving one back cannot fail
  int64_t num_buffers_ = 0;   // idle and leased
  int64_t held_bytes_ = 0;
  int64_t allocations_ = 0;
};

// Hands out consecutive 64-byte-aligned pieces of a lease, or of any memory. `Arena::size_of<T>(n)` is what take<T>(n)
// uses up, so that a plan can add up exactly what a call will take.
class Arena {
 public:
  explicit Arena(const WorkspaceLease& lease) : next_(static_cast<char*>(lease.data())), left_(lease.size_bytes()) {}
  Arena(void* data, int64_t size_bytes) : next_(static_cast<char*>(data)), left_(size_bytes) {}

  // The bytes that a piece of `bytes` uses up; at most kMaxBytes.
  static constexpr int64_t round_up(Size bytes) {
    return bytes.value() == 0 ? 0 : (Size(aligned(bytes.value())) + kRedZone).value();
  }
  template <class T>
  static constexpr int64_t size_of(Size count) {
    return round_up(count * static_cast<int64_t>(sizeof(T)));
  }

  // `size` is a result of round_up or size_of, or a sum of such. Null when the memory is used up: the plan was wrong.
  void* take_bytes(Size size) {
    const int64_t bytes = aligned(size.value());
    if (bytes < 0 || bytes > left_) return nullptr;
    char* const piece = next_;
    next_ += bytes;
    left_ -= bytes;
    if (kAddressSanitizer && bytes > 0) {
      allow(piece, bytes - kRedZone);
      forbid(next_ - kRedZone, kRedZone);
    }
    return piece;
  }
  template <class T>
  T* take(Size count) {
    void* const piece = take_bytes(size_of<T>(count));
    if (kAddressSanitizer && piece != nullptr) {
      const int64_t bytes = (count * static_cast<int64_t>(sizeof(T))).value();
      forbid(static_cast<char*>(piece) + bytes, aligned(bytes) - bytes);
    }
    return static_cast<T*>(piece);
  }

 private:
  static constexpr int64_t kRedZone = kAddressSanitizer ? 64 : 0;
  static constexpr int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

  char* next_;
  int64_t left_;
};

// Stands in for an Arena where a list of pieces is added up. (Backward's TakePieces does both, which short calls of
// forward would feel: a Worker takes 36 ns instead of 20, a Layout 80 instead of 46.)
struct CountBytes {
  Size bytes = 0;

  void* take_bytes(Size piece) {
    bytes += piece;
    return nullptr;
  }
  template <class T>
  T* take(Size count) {
    return static_cast<T*>(take_bytes(Arena::size_of<T>(count)));
  }
};

// Memory for packed weights. Decoding a token streams all weights of a model through the caches; where each has small
// pages of its own, the page tables are streamed with them (q4_1, one thread: 0.79 of plain reading instead of 0.92).
// Therefore weights smaller than a huge page lie side by side in huge pages.
//
//   Result<Buffer> memory = context.impl().weights.allocate(bytes);
//
// A block of huge pages is freed when all its weights are gone. The place of its last weight is used again as soon as
// that weight is gone.
class WeightMemory {
 public:
  // As Buffer::allocate. May throw bad_alloc.
  Result<Buffer> allocate(int64_t size_bytes);

 private:
  struct Block;
  // Shared with all blocks, which may outlive this object.
  std::shared_ptr<ForkSafeMutex> mutex_ = std::make_shared<ForkSafeMutex>();
  std::shared_ptr<Block> block_;  // from which the next weight is taken
};

}  // namespace opst

// The transport between ranks that see the same memory: threads of a process. What processes have besides is in
// shared_memory.h.
//
// All ranks share one block (Shared): per rank a desk (news, entries, state), per pair two counters and a flag, per rank
// a staging area. Waiting is a short spin, then a futex on the rank's own news: with more ranks than cores a spinning
// rank would take the core from the one that it waits for.
#pragma once

#include <atomic>
#include <memory>

#include "mc2/transport.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst::mc2 {

// Each in cache lines of its own.
struct alignas(128) Desk {
  std::atomic<uint32_t> news{0}, sleepers{0};
  std::atomic<uint32_t> shown{0};  // number of calls whose entry was shown
  std::atomic<PeerState> state{PeerState::sound};
  Entry entries[2];
  char failure[kMessageBytes] = {};
};

// From one rank to another. Counters run on through all calls and wrap.
struct alignas(128) Channel {
  std::atomic<uint32_t> sent{0};                  // by the sender
  std::atomic<uint32_t> storing{0};               // the sender is inside a direct store
  alignas(64) std::atomic<uint32_t> released{0};  // by the receiver
};

// The block that all ranks share; its memory is zero before.
class Shared {
 public:
  static int64_t bytes(int world_size, int64_t staging_bytes);
  Shared(void* memory, int world_size, int64_t staging_bytes);
  void initialise();  // by one rank, before any other looks

  Desk& desk(int rank) const { return desks_[rank]; }
  Channel& channel(int from, int to) const { return channels_[from * world_size_ + to]; }
  char* staging(int rank) const { return staging_ + rank * staging_bytes_; }
  int64_t staging_bytes() const { return staging_bytes_; }
  int world_size() const { return world_size_; }

 private:
  int world_size_;
  int64_t staging_bytes_;
  Desk* desks_;
  Channel* channels_;
  char* staging_;
};

class MappedTransport : public Transport {
 public:
  // `memory` keeps the block alive.
  MappedTransport(const Shared& shared, int rank, std::shared_ptr<void> memory)
      : Transport(rank, shared.world_size()), shared_(shared), memory_(std::move(memory)) {}

  void show(uint32_t call, const Entry& entry) override;
  const Entry* entry(int peer, uint32_t call) const override;
  char* staging(int peer) const override { return shared_.staging(peer); }
  int64_t staging_bytes() const override { return shared_.staging_bytes(); }
  int64_t in_flight(int to) const override;
  void send(int to) override;
  int64_t arrived(int from) const override;
  void release(int from) override;
  uint64_t address_for_others(const void* data) const override { return reinterpret_cast<uintptr_t>(data); }
  void* address_from_others(uint64_t address) const override { return reinterpret_cast<void*>(address); }
  bool begin_store(int to) override;
  void end_store(int to) override;
  uint32_t news() const override;
  void sleep(uint32_t seen) override;
  PeerState state(int peer) const override;
  const char* failure(int peer) const override { return shared_.desk(peer).failure; }
  void leave(PeerState state, const char* message) override;

 protected:
  // Of a rank that was storing into this one's tensors a moment ago, when this one leaves.
  virtual bool may_still_store(int) { return true; }

 private:
  void ring(int peer);
  Shared shared_;
  std::shared_ptr<void> memory_;
};

}  // namespace opst::mc2

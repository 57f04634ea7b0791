// The transport between processes of one machine: the block of mapped_transport.h in a memfd, which each process maps.
//
// A memfd has no name: nothing is left in /dev/shm, whatever ends the processes. The ticket "pid:fd" lets another process
// of the same user open it under /proc. Each rank watches the others' processes by pidfd, which tells the end of a
// process also before its parent has reaped it.
#pragma once

#include <atomic>
#include <vector>

#include "mc2/mapped_transport.h"

namespace opst::mc2 {

// The beginning of the memfd, behind which the block lies.
struct alignas(4096) SharedHeader {
  uint64_t magic = 0;
  int32_t world_size = 0;
  int64_t staging_bytes = 0, heap_bytes = 0;
  std::atomic<int32_t> process[256] = {};  // of each rank that joined; 0: nobody yet
};

// A mapping; unmapped with its last user.
class Mapping {
 public:
  Mapping(void* data, int64_t bytes) : data_(static_cast<char*>(data)), bytes_(bytes) {}
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  char* data() const { return data_; }
  SharedHeader& header() const { return *reinterpret_cast<SharedHeader*>(data_); }
  Shared shared() const;
  // Rank's part of the memory for outputs that other ranks may store into.
  char* heap(int rank) const;
  bool contains(const void* data) const;
  static int64_t bytes(int world_size, int64_t staging_bytes, int64_t heap_bytes);

 private:
  char* data_;
  int64_t bytes_;
};

class ProcessTransport : public MappedTransport {
 public:
  ProcessTransport(std::shared_ptr<Mapping> mapping, int rank);
  ~ProcessTransport() override;

  void sleep(uint32_t seen) override;
  PeerState state(int peer) const override;
  const char* failure(int peer) const override;
  uint64_t address_for_others(const void* data) const override;
  void* address_from_others(uint64_t address) const override;

 protected:
  bool may_still_store(int peer) override;

 private:
  void look_at_processes();
  std::shared_ptr<Mapping> mapping_;
  std::vector<int> pidfds_;  // -1: not open
  std::vector<char> ended_;
  int patience_ = 0;
};

}  // namespace opst::mc2

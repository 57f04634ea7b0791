// Transport: how tiles get from rank to rank, for one rank. The operators know nothing else of it.
//
// Each ordered pair of ranks has two slots in the receiver's staging area, which take turns: message n of a call lies in
// slot n % 2, at a place that the operator lays out. A message is a tile in a slot, or a bare count of a tile that the
// sender stored into the receiver's own tensor (direct). Messages of a pair arrive in order.
//
//   if (transport.in_flight(to) < kSlots) { fill the slot in transport.staging(to); transport.send(to); }
//   if (transport.arrived(from) > 0) { read the slot in transport.staging(transport.rank()); transport.release(from); }
//   transport.sleep(seen);                         // until anything above may have changed
//
// Nothing here blocks but sleep(), and nothing allocates.
#pragma once

#include <cstdint>

namespace opst::mc2 {

inline constexpr int kSlots = 2;
inline constexpr int kSignatureBytes = 480, kMessageBytes = 480;

// What a rank shows the others at the start of a call.
struct Entry {
  uint64_t signature_hash = 0;
  char signature[kSignatureBytes] = {};  // as text, cut where it is too long
  // Where the output lies that others may store into (Transport::address_for_others). 0: through slots.
  uint64_t out = 0;
  int64_t row_stride = 0, column_stride = 0;  // of that output, in elements
};

// What is known of another rank that will not go on.
enum class PeerState : uint32_t { sound, failed, gone };

class Transport {
 public:
  virtual ~Transport() = default;
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  // Call `call` begins: shows the entry. Entries of two calls are kept: a rank shows that of call n + 2 only after all
  // have seen that of call n, since call n + 1 does not end before all ranks began it.
  virtual void show(uint32_t call, const Entry& entry) = 0;
  // Null until that rank shows its entry of the call.
  virtual const Entry* entry(int peer, uint32_t call) const = 0;

  virtual char* staging(int peer) const = 0;
  virtual int64_t staging_bytes() const = 0;
  virtual int64_t in_flight(int to) const = 0;  // messages sent and not released
  virtual void send(int to) = 0;
  virtual int64_t arrived(int from) const = 0;  // messages sent to this rank and not released
  virtual void release(int from) = 0;

  // Memory of this rank as others are told of it; 0: they cannot reach it. And what they make of it.
  virtual uint64_t address_for_others(const void* data) const = 0;
  virtual void* address_from_others(uint64_t address) const = 0;
  // Around each store into a tensor of rank `to`. False: that rank has failed, and its tensor may be gone.
  virtual bool begin_store(int to) = 0;
  virtual void end_store(int to) = 0;

  // Changes whenever another rank did anything that concerns this one.
  virtual uint32_t news() const = 0;
  // Until news() != seen, or some milliseconds.
  virtual void sleep(uint32_t seen) = 0;
  virtual PeerState state(int peer) const = 0;
  virtual const char* failure(int peer) const = 0;  // of a failed one: its message
  // This rank will not go on. Returns when no other rank stores into its tensors any more.
  virtual void leave(PeerState state, const char* message) = 0;

 protected:
  Transport(int rank, int world_size) : rank_(rank), world_size_(world_size) {}

 private:
  int rank_, world_size_;
};

}  // namespace opst::mc2

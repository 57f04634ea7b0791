// One call of one rank: who was met, which messages are still to come, and what ends the call.
//
//   Exchange exchange(communicator.impl(), "matmul_all_to_all");
//   exchange.expect(peer, to_send, to_receive);                    // messages, of every peer
//   return exchange.run(entry, [&]() -> Status { ...one step: what can be sent and received now...; return {}; });
//
// The step is called again and again until every message of every peer is sent and received and every rank was met; a
// call in which it does nothing sleeps until another rank has done something. So a rank that waits for a slot keeps
// emptying its own, and no order of messages can block all ranks for want of that.
#pragma once

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

#include "mc2/transport.h"
#include "opst/communicator.h"
#include "opst/tensor.h"

namespace opst {

// Of a call, what concerns one rank (this one's own place counts messages to itself).
struct PeerProgress {
  int64_t to_send = 0, sent = 0, to_receive = 0, received = 0;
  const mc2::Entry* entry = nullptr;  // once met
  int64_t slot_bytes[mc2::kSlots] = {};
};

struct Communicator::Impl {
  std::unique_ptr<mc2::Transport> transport;
  CommunicatorOptions options = {};
  std::vector<PeerProgress> peers = {};
  CommunicatorStats stats = {};
  Status status = {};
  uint32_t call = 0;
  int process = 0;                // that made it
  std::atomic<bool> busy{false};  // in a call
  Buffer shared = {};             // of allocate_shared
  int64_t shared_used = 0;

  // A call begins, `busy` is true; not where another thread is in one, or this process is not the rank's: that is no
  // failure of the rank itself, whose other call goes on.
  Status enter(const char* operator_name);
  // Ends the communicator, and tells the others.
  Status poison(Status why);
};

namespace mc2 {

// Of a staging area of equal tiles: where slot `slot` of what `from` sends begins.
inline int64_t slot_offset(int slot, int ranks, int from, int64_t tile_bytes) {
  return (int64_t{slot} * ranks + from) * tile_bytes;
}

class Exchange {
 public:
  Exchange(Communicator::Impl& communicator, const char* operator_name)
      : communicator_(communicator), transport_(*communicator.transport), name_(operator_name) {
    for (PeerProgress& peer : communicator_.peers) peer = {};
  }

  int rank() const { return transport_.rank(); }
  int world_size() const { return transport_.world_size(); }
  void expect(int peer, int64_t to_send, int64_t to_receive) {
    communicator_.peers[static_cast<size_t>(peer)].to_send = to_send;
    communicator_.peers[static_cast<size_t>(peer)].to_receive = to_receive;
  }
  const PeerProgress& peer(int index) const { return communicator_.peers[static_cast<size_t>(index)]; }

  template <class Step>
  Status run(const Entry& entry, const Step& step) {
    begin(entry);
    while (!finished()) {
      const uint32_t seen = transport_.news();
      progress_ = false;
      Status status = step();
      if (status.ok()) status = progress_ ? after_progress() : idle(seen);
      if (!status.ok()) return communicator_.poison(std::move(status));
    }
    return {};
  }
  // Work that is no message, such as a product of this rank's own rows.
  void progressed() { progress_ = true; }

  // Messages to `to` are left, it was met, and a slot is free (direct: none is needed).
  bool can_send(int to, bool direct = false);
  int send_slot(int to) const { return static_cast<int>(peer(to).sent % kSlots); }
  // bytes: of the tile. Direct: it lies in the output of `to` already.
  void send(int to, int64_t bytes, bool direct = false);
  // Around the store of a direct tile; false: `to` has failed.
  bool begin_store(int to) { return transport_.begin_store(to); }
  void end_store(int to) { transport_.end_store(to); }

  bool can_receive(int from);
  int receive_slot(int from) const { return static_cast<int>(peer(from).received % kSlots); }
  void release(int from);
  char* staging(int of) const { return transport_.staging(of); }
  char* own_staging() const { return transport_.staging(rank()); }
  // The slot of the next tile to `to`, and that of the next one from `from`, where tiles are equal.
  char* slot_to(int to, int64_t tile_bytes) const {
    return staging(to) + slot_offset(send_slot(to), world_size(), rank(), tile_bytes);
  }
  char* slot_from(int from, int64_t tile_bytes) const {
    return own_staging() + slot_offset(receive_slot(from), world_size(), from, tile_bytes);
  }
  // Whether that rank has begun this call, with the same signature. Asked before direct_out, or a rank that begins in
  // between would get a tile through a slot that it does not look at.
  bool met(int peer);
  // Where rank `to`, which was met, lets others store its output; null: nowhere.
  void* direct_out(int to) { return transport_.address_from_others(peer(to).entry->out); }

 private:
  void begin(const Entry& entry);
  bool finished() const;
  Status after_progress();
  Status idle(uint32_t seen);
  Status compare_signatures() const;
  Status lost_peer() const;
  bool done_with(int peer) const;
  // That rank must still begin the call, send or take a message. It need not if all that it sends has arrived, read or
  // not: it may have ended its part, and left or failed in its next call, while this one waits for a third.
  bool owes(int peer) const;
  std::string awaited() const;

  using Clock = std::chrono::steady_clock;
  Communicator::Impl& communicator_;
  Transport& transport_;
  const char* name_;
  bool progress_ = false, suspected_ = false, mismatch_ = false;
  Clock::time_point last_progress_ = Clock::now();
};

}  // namespace mc2
}  // namespace opst

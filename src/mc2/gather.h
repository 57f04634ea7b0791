// The loop of operators whose tiles are made of pieces of all ranks: a receiver's tiles have the same slot of its
// staging area for all senders, where their pieces lie as the work lays them out; when all are there, the tile is
// consumed.
//
// The work (a class) says
//   int64_t tiles_of(int d)                            which rank d consumes: every rank sends a piece of each
//   int64_t fill(int d, int64_t i, char* tile)         puts in this rank's piece; its bytes, which may be 0
//   Status consume(int64_t i, char* tile)
//
// Memory: two tiles per rank.
#pragma once

#include "mc2/exchange.h"

namespace opst::mc2 {

template <class Work>
class PieceGather {
 public:
  PieceGather(Communicator::Impl& communicator, const char* name, int64_t tile_bytes, Work& work)
      : exchange_(communicator, name), tile_bytes_(tile_bytes), work_(work) {
    const int64_t mine = work.tiles_of(exchange_.rank());
    for (int peer = 0; peer < exchange_.world_size(); ++peer) exchange_.expect(peer, work.tiles_of(peer), mine);
  }

  Status run(const Entry& entry) {
    return exchange_.run(entry, [&] { return step(); });
  }

 private:
  Status step() {
    for (int s = 1; s <= exchange_.world_size(); ++s) {
      const int d = (exchange_.rank() + s) % exchange_.world_size();
      while (exchange_.can_send(d)) {
        char* const tile = exchange_.staging(d) + exchange_.send_slot(d) * tile_bytes_;
        exchange_.send(d, work_.fill(d, exchange_.peer(d).sent, tile));
      }
    }
    for (int s = 0; s < exchange_.world_size(); ++s) {
      if (!exchange_.can_receive(s)) return {};
    }
    Status status =
        work_.consume(exchange_.peer(0).received, exchange_.own_staging() + exchange_.receive_slot(0) * tile_bytes_);
    for (int s = 0; s < exchange_.world_size(); ++s) exchange_.release(s);
    return status;
  }

  Exchange exchange_;
  const int64_t tile_bytes_;
  Work& work_;
};

}  // namespace opst::mc2

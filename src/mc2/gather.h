// The loop of operators whose tiles are made of pieces of all ranks: when all pieces of a tile are there, it is
// consumed. Every rank sends a piece of every tile, so that a tile has the same slot number for all of them.
//
// The work (a class) says
//   int64_t tiles_of(int d)                            which rank d consumes
//   int64_t place(int slot, int from)                  in a staging area: where the piece of rank `from` goes
//   int64_t fill(int d, int64_t i, char* piece)        its bytes, which may be 0
//   Status consume(int64_t i, char* staging, int slot)
//
// Memory: pieces, 2 per rank.
#pragma once

#include "mc2/exchange.h"

namespace opst::mc2 {

template <class Work>
class PieceGather {
 public:
  PieceGather(Communicator::Impl& communicator, const char* name, Work& work)
      : exchange_(communicator, name), work_(work) {
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
        char* const piece = exchange_.staging(d) + work_.place(exchange_.send_slot(d), exchange_.rank());
        exchange_.send(d, work_.fill(d, exchange_.peer(d).sent, piece));
      }
    }
    for (int s = 0; s < exchange_.world_size(); ++s) {
      if (!exchange_.can_receive(s)) return {};
    }
    Status status = work_.consume(exchange_.peer(0).received, exchange_.own_staging(), exchange_.receive_slot(0));
    for (int s = 0; s < exchange_.world_size(); ++s) exchange_.release(s);
    return status;
  }

  Exchange exchange_;
  Work& work_;
};

}  // namespace opst::mc2

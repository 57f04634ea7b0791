// The loop of operators that make tiles for other ranks.
//
//   until all is sent and received:
//     take every tile that has arrived
//     make the next tile of the work's order where its rank can take one: straight into that rank's output (direct), or
//     into a slot whose owner copies it meanwhile
//     else make a tile of this rank's own
//
// The work (a class) says which tiles there are and what is in them:
//   int64_t tiles_to(int d), tiles_from(int s)    of other ranks
//   int64_t own_tiles()
//   int next(const Exchange&)                     whose tile is made next; -1: all are sent
//   Status make(int d, int64_t i, const Target&, int64_t& bytes)
//   Status make_own(int64_t i)
//   void take(int s, int64_t i, const char* slot) not of direct tiles
//
// Memory: direct: none. Else tiles, 2 per rank.
#pragma once

#include "mc2/exchange.h"

namespace opst::mc2 {

// Where a tile for another rank goes: a slot, or that rank's output as its entry tells (direct).
struct Target {
  char* slot = nullptr;
  void* direct = nullptr;
  const Entry* entry = nullptr;

  // The tile [rows, columns], which lies at row `first_row` of a direct output.
  Tensor rows(DType dtype, int64_t first_row, int64_t rows, int64_t columns) const {
    Tensor tile = Tensor::contiguous(dtype, {rows, columns}, slot);
    if (direct == nullptr) return tile;
    tile.strides[0] = entry->row_stride, tile.strides[1] = entry->column_stride;
    tile.data = direct;
    return tile.narrowed(0, first_row, rows);
  }
};

// The order of the ring: all tiles for rank r + 1, then for r + 2, ..: at any time each pair of ranks has one flow.
class RingOrder {
 public:
  int next(const Exchange& exchange) {
    const int ranks = exchange.world_size();
    const auto peer = [&] { return (exchange.rank() + turn_) % ranks; };
    while (turn_ < ranks && exchange.peer(peer()).sent == exchange.peer(peer()).to_send) ++turn_;
    return turn_ < ranks ? peer() : -1;
  }

 private:
  int turn_ = 1;
};

template <class Work>
class Scatter {
 public:
  Scatter(Communicator::Impl& communicator, const char* name, int64_t tile_bytes, Work& work)
      : exchange_(communicator, name), tile_bytes_(tile_bytes), work_(work) {
    for (int peer = 0; peer < exchange_.world_size(); ++peer) {
      if (peer != exchange_.rank()) exchange_.expect(peer, work.tiles_to(peer), work.tiles_from(peer));
    }
  }

  Status run(const Entry& entry) {
    // A finished exchange may leave own tiles; a call of one rank has nothing else.
    Status status = exchange_.run(entry, [&] { return step(); });
    while (status.ok() && own_done_ < work_.own_tiles()) status = work_.make_own(own_done_++);
    return status;
  }

 private:
  Status step() {
    for (int s = 0; s < exchange_.world_size(); ++s) {
      while (exchange_.can_receive(s)) receive(s);
    }
    const int d = work_.next(exchange_);
    if (d >= 0 && exchange_.met(d)) {
      void* const direct = exchange_.direct_out(d);
      if (exchange_.can_send(d, direct != nullptr)) return make_for(d, direct);
    }
    if (own_done_ == work_.own_tiles()) return {};
    // The next rank is not ready: own tiles meanwhile.
    exchange_.progressed();
    return work_.make_own(own_done_++);
  }

  Status make_for(int d, void* direct) {
    Target target{.direct = direct, .entry = exchange_.peer(d).entry};
    if (direct == nullptr) target.slot = exchange_.slot_to(d, tile_bytes_);
    if (direct != nullptr && !exchange_.begin_store(d)) return {};  // the exchange finds out why
    int64_t bytes = 0;
    Status status = work_.make(d, exchange_.peer(d).sent, target, bytes);
    if (direct != nullptr) exchange_.end_store(d);
    if (status.ok()) exchange_.send(d, bytes, direct != nullptr);
    return status;
  }

  void receive(int s) {
    if (exchange_.direct_out(exchange_.rank()) == nullptr) {
      work_.take(s, exchange_.peer(s).received, exchange_.slot_from(s, tile_bytes_));
    }
    exchange_.release(s);
  }

  Exchange exchange_;
  const int64_t tile_bytes_;
  Work& work_;
  int64_t own_done_ = 0;
};

}  // namespace opst::mc2

// matmul_all_to_all: the rows of this rank, times the columns of every rank, in the order of the ring.
//
//   for s in 1..P: d = (r + s) mod P                      own columns last: at any time each pair of ranks has one flow
//     for i in tiles of my rows:
//       out of d, rows offset[r] + tile i  =  x[tile i] . weight_d^T        straight from the product (direct), or
//       slot i mod 2 of d                  =  ...                           whose owner copies it meanwhile
//
// Memory: direct: none. Else tiles of n_d columns, 2 per rank.
#include "mc2/call.h"

namespace opst::mc2 {

namespace {

class Scatter {
 public:
  explicit Scatter(Call& call) : call_(call), exchange_(call.communicator, call.name()) {
    own_tiles_ = call.tiles(call.rows.size(call.rank()));
    for (int peer = 0; peer < call.ranks(); ++peer) {
      if (peer != call.rank()) exchange_.expect(peer, own_tiles_, call.tiles(call.rows.size(peer)));
    }
    for (int d = 0; d < call.ranks(); ++d) columns_.add(call.product.n(d));
  }

  Status run() {
    // A finished exchange may leave own tiles; a call of one rank has nothing else.
    Status status = exchange_.run(make_entry(call_, true), [&] { return step(); });
    while (status.ok() && own_done_ < own_tiles_) status = multiply_own();
    return status.ok() ? status : call_.communicator.poison(std::move(status));
  }

 private:
  Status step() {
    for (int s = 0; s < call_.ranks(); ++s) {
      while (exchange_.can_receive(s)) receive(s);
    }
    while (turn_ < call_.ranks() && exchange_.peer(peer()).sent == own_tiles_) ++turn_;
    if (turn_ < call_.ranks() && exchange_.met(peer())) {
      const int d = peer();
      void* const direct = exchange_.direct_out(d);
      if (exchange_.can_send(d, direct != nullptr)) return multiply_for(d, direct);
    }
    // The ring's next rank is not ready: own rows meanwhile.
    return own_done_ < own_tiles_ ? multiply_own() : Status();
  }

  int peer() const { return (call_.rank() + turn_) % call_.ranks(); }
  ConstTensor bias_of(int d) const {
    const ConstTensor& bias = call_.options.bias;
    return bias ? bias.narrowed(0, columns_.offset(d), columns_.size(d)) : ConstTensor();
  }

  Status multiply(int d, int64_t i, const Tensor& out) const {
    const int64_t first = i * call_.plan.tile_rows;
    return call_.product(call_.x.narrowed(0, first, out.shape[0]), call_.scales(first, out.shape[0]), d, bias_of(d),
                         out);
  }

  Status multiply_own() {
    const int64_t first = own_done_ * call_.plan.tile_rows;
    const int64_t rows = call_.tile_size(call_.x.shape[0], own_done_);
    exchange_.progressed();
    return multiply(call_.rank(), own_done_++, call_.out.narrowed(0, call_.rows.offset(call_.rank()) + first, rows));
  }

  Status multiply_for(int d, void* direct) {
    const int64_t i = exchange_.peer(d).sent, rows = call_.tile_size(call_.x.shape[0], i);
    Tensor out = Tensor::contiguous(call_.out.dtype, {rows, columns_.size(d)},
                                    call_.slot(exchange_.staging(d), exchange_.send_slot(d), call_.rank()));
    if (direct != nullptr) {
      out.strides[0] = exchange_.peer(d).entry->row_stride;
      out.strides[1] = exchange_.peer(d).entry->column_stride;
      out.data = direct;
      out = out.narrowed(0, call_.rows.offset(call_.rank()) + i * call_.plan.tile_rows, rows);
      if (!exchange_.begin_store(d)) return {};  // the exchange finds out why
    }
    Status status = multiply(d, i, out);
    if (direct != nullptr) exchange_.end_store(d);
    if (status.ok()) exchange_.send(d, rows * columns_.size(d) * size_bytes(out.dtype), direct != nullptr);
    return status;
  }

  void receive(int s) {
    const int64_t i = exchange_.peer(s).received, rows = call_.tile_size(call_.rows.size(s), i);
    if (exchange_.direct_out(call_.rank()) == nullptr) {
      const char* const slot = call_.slot(exchange_.own_staging(), exchange_.receive_slot(s), s);
      copy_rows(ConstTensor::contiguous(call_.out.dtype, {rows, call_.out.shape[1]}, slot),
                call_.out.narrowed(0, call_.rows.offset(s) + i * call_.plan.tile_rows, rows));
    }
    exchange_.release(s);
  }

  Call& call_;
  Exchange exchange_;
  Split columns_;
  int turn_ = 1;
  int64_t own_tiles_ = 0, own_done_ = 0;
};

}  // namespace

Status run_matmul_all_to_all(Call& call) { return Scatter(call).run(); }

}  // namespace opst::mc2

// The operators that multiply what arrives.
//
//   all_gather_matmul   every tile of my rows goes to every rank; a tile is multiplied when it is there, own rows first
//   all_to_all_matmul   tile i of the rows of rank d: my columns of it go into d's staging area, where the pieces of all
//                       ranks lie side by side, [tile_rows, k]; when all are there, that is one tile of x
//
// Memory: tiles of x, 2 per rank. What is sent next is copied while the product of the tile before runs elsewhere.
#include "mc2/gather.h"

#include "mc2/call.h"

namespace opst::mc2 {

namespace {

// ---- all_gather_matmul

class Gather {
 public:
  explicit Gather(Call& call) : call_(call), exchange_(call.communicator, call.name()) {
    own_tiles_ = call.tiles(call.rows.size(call.rank()));
    for (int peer = 0; peer < call.ranks(); ++peer) {
      if (peer != call.rank()) exchange_.expect(peer, own_tiles_, call.tiles(call.rows.size(peer)));
    }
  }

  Status run() {
    Status status = exchange_.run(make_entry(call_, false), [&] { return step(); });
    while (status.ok() && own_done_ < own_tiles_) status = multiply_own();
    return status;
  }

 private:
  Status step() {
    for (int s = 1; s < call_.ranks(); ++s) {
      const int d = (call_.rank() + s) % call_.ranks();
      while (exchange_.can_send(d)) send(d);
    }
    if (own_done_ < own_tiles_) return multiply_own();
    for (int s = 1; s < call_.ranks(); ++s) {
      const int source = (call_.rank() + s) % call_.ranks();
      if (exchange_.can_receive(source)) return multiply_arrived(source);
    }
    return {};
  }

  int64_t k() const { return call_.x.shape[1]; }
  // Behind the rows of a slot lie their scales.
  int64_t scales_offset() const { return call_.plan.tile_rows * k() * size_bytes(call_.x.dtype); }
  Tensor slot_rows(char* slot, int64_t rows) const { return Tensor::contiguous(call_.x.dtype, {rows, k()}, slot); }
  Tensor slot_scales(char* slot, int64_t rows) const {
    if (!is_given(call_.options.x_scales)) return {};
    return Tensor::contiguous(DType::f32, {rows}, slot + round_up(scales_offset(), 4));
  }

  void send(int d) {
    const int64_t i = exchange_.peer(d).sent, first = i * call_.plan.tile_rows;
    const int64_t rows = call_.tile_size(call_.x.shape[0], i);
    char* const slot = exchange_.slot_to(d, call_.plan.tile_bytes);
    copy_rows(call_.x.narrowed(0, first, rows), slot_rows(slot, rows));
    int64_t bytes = rows * k() * size_bytes(call_.x.dtype);
    if (is_given(call_.options.x_scales)) {
      const ConstTensor from = call_.scales(first, rows);
      copy_elements(from.data, from.strides[0], slot_scales(slot, rows).data, 1, rows, 4);
      bytes += rows * 4;
    }
    exchange_.send(d, bytes);
  }

  Status multiply(const ConstTensor& x, const ConstTensor& scales, int64_t first) const {
    const int64_t rows = x.shape[0];
    if (call_.options.exchanged) copy_rows(x, call_.options.exchanged.narrowed(0, first, rows));
    return call_.product(x, scales, 0, call_.options.bias, call_.out.narrowed(0, first, rows));
  }

  Status multiply_own() {
    const int64_t first = own_done_ * call_.plan.tile_rows;
    const int64_t rows = call_.tile_size(call_.x.shape[0], own_done_++);
    exchange_.progressed();
    return multiply(call_.x.narrowed(0, first, rows), call_.scales(first, rows),
                    call_.rows.offset(call_.rank()) + first);
  }

  Status multiply_arrived(int source) {
    const int64_t i = exchange_.peer(source).received, rows = call_.tile_size(call_.rows.size(source), i);
    char* const slot = exchange_.slot_from(source, call_.plan.tile_bytes);
    Status status =
        multiply(slot_rows(slot, rows), slot_scales(slot, rows), call_.rows.offset(source) + i * call_.plan.tile_rows);
    exchange_.release(source);
    return status;
  }

  Call& call_;
  Exchange exchange_;
  int64_t own_tiles_ = 0, own_done_ = 0;
};

// ---- all_to_all_matmul

class Pieces {
 public:
  explicit Pieces(Call& call) : call_(call) {}

  int64_t tiles_of(int d) const { return call_.tiles(call_.rows.size(d)); }
  // Pieces lie side by side, the columns of rank `from` in each row of the tile.
  int64_t place(int slot, int from) const {
    return (slot * call_.plan.tile_rows * call_.inputs.total() + call_.inputs.offset(from)) * size_bytes(call_.x.dtype);
  }

  int64_t fill(int d, int64_t i, char* piece) const {
    const int64_t first = call_.rows.offset(d) + i * call_.plan.tile_rows;
    const int64_t rows = call_.tile_size(call_.rows.size(d), i), columns = call_.x.shape[1];
    Tensor to = Tensor::contiguous(call_.x.dtype, {rows, columns}, piece);
    to.strides[0] = call_.inputs.total();
    copy_rows(call_.x.narrowed(0, first, rows), to);
    return rows * columns * size_bytes(call_.x.dtype);
  }

  Status consume(int64_t i, char* staging, int slot) const {
    const int64_t first = i * call_.plan.tile_rows, rows = call_.tile_size(call_.out.shape[0], i);
    const Tensor x = Tensor::contiguous(call_.x.dtype, {rows, call_.inputs.total()}, staging + place(slot, 0));
    if (call_.options.exchanged) copy_rows(x, call_.options.exchanged.narrowed(0, first, rows));
    return call_.product(x, {}, 0, call_.options.bias, call_.out.narrowed(0, first, rows));
  }

 private:
  Call& call_;
};

}  // namespace

Status run_all_gather_matmul(Call& call) { return Gather(call).run(); }
Status run_all_to_all_matmul(Call& call) {
  Pieces pieces(call);
  return PieceGather(call.communicator, call.name(), pieces).run(make_entry(call, false));
}

}  // namespace opst::mc2

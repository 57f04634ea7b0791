// matmul_all_to_all: the rows of this rank, times the columns of every rank, in the order of the ring.
//
//   for s in 1..P: d = (r + s) mod P                      own columns last
//     for i in tiles of my rows:
//       out of d, rows offset[r] + tile i  =  x[tile i] . weight_d^T        straight from the product (direct), or
//       slot i mod 2 of d                  =  ...
//
// Memory: direct: none. Else tiles of n_d columns, 2 per rank.
#include "mc2/scatter.h"

#include "mc2/call.h"

namespace opst::mc2 {

namespace {

class Columns : public RingOrder {
 public:
  explicit Columns(Call& call) : call_(call) {
    for (int d = 0; d < call.ranks(); ++d) columns_.add(call.product.n(d));
  }

  int64_t own_tiles() const { return call_.tiles(call_.rows.size(call_.rank())); }
  int64_t tiles_to(int) const { return own_tiles(); }
  int64_t tiles_from(int s) const { return call_.tiles(call_.rows.size(s)); }

  Status make(int d, int64_t i, const Target& target, int64_t& bytes) const {
    const int64_t rows = call_.tile_size(call_.x.shape[0], i), columns = columns_.size(d);
    bytes = rows * columns * size_bytes(call_.out.dtype);
    return multiply(d, i, target.rows(call_.out.dtype, first_row(call_.rank(), i), rows, columns));
  }
  Status make_own(int64_t i) const {
    const int64_t rows = call_.tile_size(call_.x.shape[0], i);
    return multiply(call_.rank(), i, call_.out.narrowed(0, first_row(call_.rank(), i), rows));
  }
  void take(int s, int64_t i, const char* slot) const {
    const int64_t rows = call_.tile_size(call_.rows.size(s), i);
    copy_rows(ConstTensor::contiguous(call_.out.dtype, {rows, call_.out.shape[1]}, slot),
              call_.out.narrowed(0, first_row(s, i), rows));
  }

 private:
  // Of out: tile i of rank s.
  int64_t first_row(int s, int64_t i) const { return call_.rows.offset(s) + i * call_.plan.tile_rows; }

  Status multiply(int d, int64_t i, const Tensor& out) const {
    const ConstTensor& bias = call_.options.bias;
    const int64_t first = i * call_.plan.tile_rows;
    return call_.product(call_.x.narrowed(0, first, out.shape[0]), call_.scales(first, out.shape[0]), d,
                         bias ? bias.narrowed(0, columns_.offset(d), columns_.size(d)) : ConstTensor(), out);
  }

  Call& call_;
  Split columns_;
};

}  // namespace

Status run_matmul_all_to_all(Call& call) {
  Columns columns(call);
  return Scatter(call.communicator, call.name(), call.plan.tile_bytes, columns).run(make_entry(call, true));
}

}  // namespace opst::mc2

// The operators that sum over ranks.
//
//   for i in tiles of a rank's rows:
//     for s in 1..P: d = (r + s) mod P
//       slot of d = x[rows of d, tile i] . weight^T                          f32 [tile rows, n], own tile too
//     when tile i of all ranks is there: out = ((p_0 + p_1) + .. + p_P-1) + bias + residual
//   matmul_all_reduce: out then goes to every other rank, direct or by a slot
//
// Tiles outside, ranks inside: with the ranks outside, all would wait for the first tile of another order (slots full).
// In a stream of matmul_all_reduce from one rank to another the order is partial 0, partial 1, result 0, partial 2,
// result 1, ..: result i needs partial i of all ranks only, and the next product does not wait for it.
// Memory: f32 tiles, 2 per rank. Numerics: f32 sums in the order of ranks, whatever the order of arrival.
#include "mc2/call.h"

namespace opst::mc2 {

namespace {

class Reduce {
 public:
  explicit Reduce(Call& call) : call_(call), exchange_(call.communicator, call.name()) {
    all_ = call.op == Mc2Operator::matmul_all_reduce;
    all_tiles_ = call.tiles(call.out.shape[0]);
    for (int peer = 0; peer < call.ranks(); ++peer) {
      const bool results = all_ && peer != call.rank();
      exchange_.expect(peer, tiles_of(peer) + (results ? tiles_of(call.rank()) : 0),
                       tiles_of(call.rank()) + (results ? tiles_of(peer) : 0));
    }
  }

  Status run() {
    return exchange_.run(make_entry(call_, all_), [&] { return step(); });
  }

 private:
  // Of one ordered pair: partials and results sent, and received.
  struct Stream {
    int64_t partials_sent = 0, results_sent = 0, partials = 0, results = 0;
  };
  Stream& stream(int peer) { return streams_[static_cast<size_t>(peer)]; }

  static float value(const ConstTensor& t, int64_t offset) {
    if (t.dtype == DType::f32) return static_cast<const float*>(t.data)[offset];
    return t.dtype == DType::bf16 ? to_f32(static_cast<const bf16*>(t.data)[offset])
                                  : to_f32(static_cast<const f16*>(t.data)[offset]);
  }

  // Tiles that a rank sums, and where tile i of them lies among the rows of x.
  int64_t tiles_of(int rank) const {
    return all_ ? share_of(all_tiles_, call_.ranks(), rank) : call_.tiles(call_.rows.size(rank));
  }
  int64_t first_row(int rank, int64_t i) const {
    return all_ ? (i * call_.ranks() + rank) * call_.plan.tile_rows
                : call_.rows.offset(rank) + i * call_.plan.tile_rows;
  }
  int64_t num_rows(int rank, int64_t i) const {
    const int64_t end = all_ ? call_.out.shape[0] : call_.rows.offset(rank) + call_.rows.size(rank);
    return std::min(call_.plan.tile_rows, end - first_row(rank, i));
  }

  // Whether the next message of a stream is a partial: `to` has more of them, and the results are not behind.
  bool partial_is_next(int from, int to, int64_t partials, int64_t results) const {
    const int64_t all_results = all_ && from != to ? tiles_of(from) : 0;
    return partials < tiles_of(to) && (partials <= results + 1 || results == all_results || !all_);
  }

  Status step() {
    for (int s = 0; s < call_.ranks(); ++s) receive_results(s);
    if (all_partials_there()) return sum_tile();
    // Of the ranks that can be sent to, one with the fewest tiles so far.
    int best = -1;
    for (int s = 1; s <= call_.ranks(); ++s) {
      const int d = (call_.rank() + s) % call_.ranks();
      const Stream& to = stream(d);
      if (partial_is_next(call_.rank(), d, to.partials_sent, to.results_sent)) {
        if (exchange_.can_send(d) && (best < 0 || to.partials_sent < stream(best).partials_sent)) best = d;
      } else if (to.results_sent < summed_ && exchange_.met(d)) {
        const bool direct = exchange_.direct_out(d) != nullptr;
        if (exchange_.can_send(d, direct)) send_result(d, direct);
      }
    }
    return best < 0 ? Status() : send_partial(best);
  }

  Status send_partial(int d) {
    const int64_t i = stream(d).partials_sent++, first = first_row(d, i), rows = num_rows(d, i);
    char* const slot = exchange_.slot_to(d, call_.plan.tile_bytes);
    const Tensor out = Tensor::contiguous(DType::f32, {rows, call_.out.shape[1]}, slot);
    Status status = call_.product(call_.x.narrowed(0, first, rows), call_.scales(first, rows), 0, {}, out);
    if (status.ok()) exchange_.send(d, rows * out.shape[1] * 4);
    return status;
  }

  bool all_partials_there() {
    for (int s = 0; s < call_.ranks(); ++s) {
      const Stream& from = stream(s);
      if (!partial_is_next(s, call_.rank(), from.partials, from.results) || !exchange_.can_receive(s)) return false;
    }
    return true;
  }

  Status sum_tile() {
    const int64_t i = summed_, rows = num_rows(call_.rank(), i), n = call_.out.shape[1];
    const int64_t first = all_ ? first_row(call_.rank(), i) : i * call_.plan.tile_rows;
    const auto partial = [&](int s) { return reinterpret_cast<float*>(exchange_.slot_from(s, call_.plan.tile_bytes)); };
    call_.context.impl().pool.for_each(rows, rows_per_task(n), [&](int64_t row, int) {
      float* const sum = partial(0) + row * n;
      for (int s = 1; s < call_.ranks(); ++s) {
        const float* const more = partial(s) + row * n;
        for (int64_t j = 0; j < n; ++j) sum[j] += more[j];
      }
      finish_row(sum, first + row);
    });
    for (int s = 0; s < call_.ranks(); ++s) {
      ++stream(s).partials;
      exchange_.release(s);
    }
    ++summed_;
    return {};
  }

  // A row of out from its sums.
  void finish_row(float* sum, int64_t row) const {
    const Tensor& out = call_.out;
    const ConstTensor &bias = call_.options.bias, &residual = call_.options.residual;
    for (int64_t j = 0; j < out.shape[1]; ++j) {
      if (bias) sum[j] += value(bias, j * bias.strides[0]);
      if (residual) sum[j] += value(residual, row * residual.strides[0] + j * residual.strides[1]);
      store_element(out, row * out.strides[0] + j * out.strides[1], sum[j]);
    }
  }

  void send_result(int d, bool direct) {
    const int64_t i = stream(d).results_sent, first = first_row(call_.rank(), i), rows = num_rows(call_.rank(), i);
    Tensor to =
        Tensor::contiguous(call_.out.dtype, {rows, call_.out.shape[1]}, exchange_.slot_to(d, call_.plan.tile_bytes));
    if (direct) {
      to.data = exchange_.direct_out(d);
      to.strides[0] = exchange_.peer(d).entry->row_stride;
      to.strides[1] = exchange_.peer(d).entry->column_stride;
      to = to.narrowed(0, first, rows);
      if (!exchange_.begin_store(d)) return;
    }
    copy_rows(call_.out.narrowed(0, first, rows), to);
    if (direct) exchange_.end_store(d);
    ++stream(d).results_sent;
    exchange_.send(d, rows * to.shape[1] * size_bytes(to.dtype), direct);
  }

  void receive_results(int s) {
    Stream& from = stream(s);
    while (!partial_is_next(s, call_.rank(), from.partials, from.results) && exchange_.can_receive(s)) {
      const int64_t first = first_row(s, from.results), rows = num_rows(s, from.results);
      if (exchange_.direct_out(call_.rank()) == nullptr) {
        const char* const slot = exchange_.slot_from(s, call_.plan.tile_bytes);
        copy_rows(ConstTensor::contiguous(call_.out.dtype, {rows, call_.out.shape[1]}, slot),
                  call_.out.narrowed(0, first, rows));
      }
      ++from.results;
      exchange_.release(s);
    }
  }

  Call& call_;
  Exchange exchange_;
  bool all_ = false;
  int64_t all_tiles_ = 0, summed_ = 0;
  std::array<Stream, kMaxRanks> streams_ = {};
};

}  // namespace

Status run_matmul_reduce_scatter(Call& call) { return Reduce(call).run(); }
Status run_matmul_all_reduce(Call& call) { return Reduce(call).run(); }

}  // namespace opst::mc2

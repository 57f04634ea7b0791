// Ring attention: tiles of keys and values go to every rank that sees some of them, and gradients of them come back.
//
//   for i in tiles: for s = r, r + 1, ..: tile i of rank s, which arrived or is this rank's own
//     forward    out, lse = merge(out, lse; attention of my queries with the tile)                     f32
//     backward   grad_query += ..;  grad_key, grad_value of the tile go to s, f32
//   backward, tile i of my own rows: when those of all ranks that see it are there, their sum in the order of ranks
//
// A message from a to b is a tile of a's keys, or the gradients that a found for a tile of b. Their order:
//   keys 0, gradients 0, keys 1, gradients 1, ..     (as far as they are needed)
// A tile's gradients wait in memory of this rank until their slot is free, and nothing else waits for them but the next
// product. No order of arrival blocks: with keys i as event 2 i and gradients i as 2 i + 1, a message waits for the
// release of one that is two before it in its stream, hence of an earlier event; the product of keys i waits for
// gradients of tiles up to i to be sent, hence for releases before event 2 i; and the sum of tile i for gradients to be
// sent, not released.
//
// Memory: tiles, 2 per rank; from the workspace what RingMemory lists. Numerics: f32 sums in the orders above.
#include "mc2/ring.h"

#include <cmath>
#include <limits>

namespace opst::mc2 {

namespace {

// Contiguous f32 of a shape.
Tensor f32_like(const ConstTensor& shape, int rank, void* data) {
  Tensor t;
  t.rank = rank, t.data = data;
  int64_t stride = 1;
  for (int d = rank - 1; d >= 0; --d) {
    t.shape[d] = shape.shape[d], t.strides[d] = stride;
    stride *= std::max<int64_t>(1, t.shape[d]);
  }
  return t;
}
// The same memory as fewer rows, contiguous.
Tensor first_rows(const Tensor& t, int64_t rows) {
  ConstTensor shape = t;
  shape.shape[2] = rows;
  return f32_like(shape, t.rank, t.data);
}

// body(offset of a row of `a`, offset of that row of `b`) for all rows of tensors of one shape.
template <class Body>
void for_rows(Context& context, const ConstTensor& a, const ConstTensor& b, const Body& body) {
  const int leading = a.rank - 1;
  context.impl().pool.for_each(num_rows(a), rows_per_task(a.shape[leading]), [&](int64_t row, int) {
    body(row_offset(a, row, leading), row_offset(b, row, leading));
  });
}

// to = from, or to += from, of f32 `from`; `to` f32 where it is added to.
void store(Context& context, const Tensor& to, const ConstTensor& from, bool add) {
  const int last = to.rank - 1;
  for_rows(context, to, from, [&](int64_t at, int64_t source) {
    for (int64_t j = 0; j < to.shape[last]; ++j) {
      const int64_t offset = at + j * to.strides[last];
      const float value = static_cast<const float*>(from.data)[source + j * from.strides[last]];
      if (add)
        static_cast<float*>(to.data)[offset] += value;
      else
        store_element(to, offset, value);
    }
  });
}

void set_all(Context& context, const Tensor& to, float value) {
  const int last = to.rank - 1;
  for_rows(context, to, to, [&](int64_t at, int64_t) {
    for (int64_t j = 0; j < to.shape[last]; ++j) store_element(to, at + j * to.strides[last], value);
  });
}

void copy_all(Context& context, const ConstTensor& from, const Tensor& to) {
  const int64_t bytes = size_bytes(to.dtype);
  for_rows(context, to, from, [&](int64_t at, int64_t source) {
    copy_elements(static_cast<const char*>(from.data) + source * bytes, from.strides[3],
                  static_cast<char*>(to.data) + at * bytes, to.strides[3], to.shape[3], bytes);
  });
}

// Keys and values of a tile, or gradients of them.
template <class T>
struct Pair {
  T key, value;
};

// What a call takes from the workspace.
struct RingMemory {
  Tensor sum, sum_lse;                // forward: out and lse so far. backward: grad_query so far
  Tensor partial, partial_lse;        // of a tile
  Pair<Tensor> tile = {}, more = {};  // backward: gradients of a tile, and those of the second chunk of queries

  // Takes, or adds up.
  template <class Pieces>
  RingMemory(const RingCall& call, Pieces& pieces) {
    const bool backward = call.backward();
    const Tensor& whole = backward ? call.gradients.grad_query : call.out.out;
    const auto floats = [&](const ConstTensor& shape, int rank) {
      Tensor t = f32_like(shape, rank, nullptr);
      t.data = pieces.template take<float>(t.num_elements());
      return t;
    };
    partial = floats(whole, 4);
    sum = whole.dtype == DType::f32 ? whole : floats(whole, 4);
    if (!backward) {
      partial_lse = floats(whole, 3);
      sum_lse = is_given(call.out.softmax_lse) ? call.out.softmax_lse : floats(whole, 3);
      return;
    }
    for (Pair<Tensor>* pair : {&tile, &more}) {
      ConstTensor key = call.in.key, value = call.in.value;
      key.shape[2] = value.shape[2] = call.plan.tile_rows;
      pair->key = floats(key, 4);
      pair->value = floats(value, 4);
    }
  }
};

class Ring {
 public:
  Ring(RingCall& call, const RingMemory& memory)
      : call_(call), sequence_(call.sequence), memory_(memory), exchange_(call.communicator, to_string(call.op)) {
    rank_ = call.rank();
    for (int peer = 0; peer < call.ranks(); ++peer) {
      most_tiles_ = std::max(most_tiles_, sequence_.tiles(peer));
      const int64_t to_peer = sequence_.count_needed(peer, rank_), to_me = sequence_.count_needed(rank_, peer);
      const int64_t keys_out = peer == rank_ ? 0 : to_peer, keys_in = peer == rank_ ? 0 : to_me;
      exchange_.expect(peer, keys_out + (call.backward() ? to_me : 0), keys_in + (call.backward() ? to_peer : 0));
    }
  }

  Status run(const Entry& entry) {
    set_all(call_.context, memory_.sum, 0);
    if (!call_.backward()) set_all(call_.context, memory_.sum_lse, -std::numeric_limits<float>::infinity());
    Status status = exchange_.run(entry, [&] { return step(); });
    // What is left needs no messages.
    while (status.ok() && (turn_ < turns() || (call_.backward() && summed_ < sequence_.tiles(rank_)))) status = step();
    const Tensor& whole = call_.backward() ? call_.gradients.grad_query : call_.out.out;
    if (status.ok() && whole.data != memory_.sum.data) store(call_.context, whole, memory_.sum, false);
    return status;
  }

 private:
  // Of one ordered pair: the next tile of keys, and of gradients, that may be a message.
  struct Stream {
    int64_t keys = 0, gradients = 0;
  };
  enum class Kind { none, keys, gradients };
  // The next message from a to b; the stream points at it.
  Kind next(Stream& stream, int a, int b) const {
    const int64_t of_a = a == b ? 0 : sequence_.tiles(a), of_b = call_.backward() ? sequence_.tiles(b) : 0;
    while (stream.keys < of_a && !sequence_.needs(b, a, stream.keys)) ++stream.keys;
    while (stream.gradients < of_b && !sequence_.needs(a, b, stream.gradients)) ++stream.gradients;
    if (stream.keys < of_a && (stream.keys <= stream.gradients || stream.gradients >= of_b)) return Kind::keys;
    return stream.gradients < of_b ? Kind::gradients : Kind::none;
  }
  Kind next_to(int d) { return next(to_[static_cast<size_t>(d)], rank_, d); }
  Kind next_from(int s) { return next(from_[static_cast<size_t>(s)], s, rank_); }

  char* slot_from(int s) const { return exchange_.slot_from(s, call_.plan.tile_bytes); }
  char* slot_to(int d) const { return exchange_.slot_to(d, call_.plan.tile_bytes); }
  // A tile's keys, and behind them its values.
  Pair<Tensor> in_slot(char* data, DType dtype, int64_t rows) const {
    const auto piece = [&](const ConstTensor& like) {
      Tensor t = Tensor::contiguous(dtype, {like.shape[0], like.shape[1], rows, like.shape[3]}, data);
      data += t.num_elements() * size_bytes(dtype);
      return t;
    };
    Pair<Tensor> pair;
    pair.key = piece(call_.in.key);
    pair.value = piece(call_.in.value);
    return pair;
  }
  int64_t tile_bytes(DType dtype, int64_t rows) const { return call_.numbers_of_row() * rows * size_bytes(dtype); }

  Status step() {
    if (call_.backward()) {
      while (summed_ < sequence_.tiles(rank_) && gradients_there()) sum_tile();
    }
    for (int step = 1; step <= call_.ranks(); ++step) {
      const int d = (rank_ + step) % call_.ranks();
      while (next_to(d) == Kind::keys && exchange_.can_send(d)) send_keys(d);
      if (d == pending_ && next_to(d) == Kind::gradients && exchange_.can_send(d)) send_gradients(d);
    }
    return pending_ < 0 ? attend_next() : Status();
  }

  void send_keys(int d) {
    const KeyTile t = sequence_.tile(rank_, to_[static_cast<size_t>(d)].keys++);
    const Pair<Tensor> to = in_slot(slot_to(d), call_.in.key.dtype, t.rows);
    copy_all(call_.context, call_.in.key.narrowed(2, t.first, t.rows), to.key);
    copy_all(call_.context, call_.in.value.narrowed(2, t.first, t.rows), to.value);
    exchange_.send(d, tile_bytes(call_.in.key.dtype, t.rows));
  }

  // Those of the tile that was attended last.
  void send_gradients(int d) {
    const KeyTile t = sequence_.tile(d, to_[static_cast<size_t>(d)].gradients++);
    const Pair<Tensor> to = in_slot(slot_to(d), DType::f32, t.rows);
    store(call_.context, to.key, first_rows(memory_.tile.key, t.rows), false);
    store(call_.context, to.value, first_rows(memory_.tile.value, t.rows), false);
    exchange_.send(d, tile_bytes(DType::f32, t.rows));
    pending_ = -1;
  }

  // Tile turn / P of rank r + turn mod P.
  int64_t turns() const { return most_tiles_ * call_.ranks(); }
  Status attend_next() {
    for (; turn_ < turns(); ++turn_) {
      const int64_t i = turn_ / call_.ranks();
      const int s = static_cast<int>((rank_ + turn_) % call_.ranks());
      if (i >= sequence_.tiles(s) || !sequence_.needs(rank_, s, i)) continue;
      const KeyTile t = sequence_.tile(s, i);
      Pair<ConstTensor> keys;
      if (s == rank_) {
        keys = {call_.in.key.narrowed(2, t.first, t.rows), call_.in.value.narrowed(2, t.first, t.rows)};
      } else {
        if (next_from(s) != Kind::keys || !exchange_.can_receive(s)) return {};
        const Pair<Tensor> arrived = in_slot(slot_from(s), call_.in.key.dtype, t.rows);
        keys = {arrived.key, arrived.value};
      }
      Status status = call_.backward() ? attend_backward(t, keys) : attend(t, keys);
      exchange_.progressed();
      if (s != rank_) exchange_.release(s), ++from_[static_cast<size_t>(s)].keys;
      if (call_.backward()) pending_ = s;
      ++turn_;
      return status;
    }
    return {};
  }

  AttentionOptions options(const Sequence::Window& window) const {
    return {.softmax_scale = call_.options.softmax_scale,
            .alignment = CausalAlignment::top_left,
            .window_left = window.left,
            .window_right = window.right,
            .softcap = call_.options.softcap};
  }

  Status attend(const KeyTile& t, const Pair<ConstTensor>& keys) const {
    for (int c = 0; c < 2; ++c) {
      const Chunk queries = sequence_.chunk(rank_, c);
      const Sequence::Window window = sequence_.window(queries, t);
      if (!window.visible) continue;
      const auto rows = [&](const auto& tensor) { return tensor.narrowed(2, queries.first, queries.rows); };
      const Tensor out = first_rows(memory_.partial, queries.rows), lse = first_rows(memory_.partial_lse, queries.rows);
      Status status =
          flash_attention_forward(call_.context, {.query = rows(call_.in.query), .key = keys.key, .value = keys.value},
                                  {.out = out, .softmax_lse = lse}, options(window));
      if (!status.ok()) return status;
      const auto as_parts = [](const Tensor& tensor) {
        ConstTensor parts = tensor;
        for (int d = parts.rank++; d > 0; --d)
          parts.shape[d] = tensor.shape[d - 1], parts.strides[d] = tensor.strides[d - 1];
        parts.shape[0] = 1, parts.strides[0] = 0;
        return parts;
      };
      status = merge_attention(call_.context, {.out = as_parts(out), .softmax_lse = as_parts(lse)},
                               {.out = rows(memory_.sum), .softmax_lse = rows(memory_.sum_lse)}, true);
      if (!status.ok()) return status;
    }
    return {};
  }

  Status attend_backward(const KeyTile& t, const Pair<ConstTensor>& keys) const {
    bool first = true;
    for (int c = 0; c < 2; ++c) {
      const Chunk queries = sequence_.chunk(rank_, c);
      const Sequence::Window window = sequence_.window(queries, t);
      if (!window.visible) continue;
      const auto rows = [&](const auto& tensor) { return tensor.narrowed(2, queries.first, queries.rows); };
      const Pair<Tensor>& memory = first ? memory_.tile : memory_.more;
      const AttentionGradients gradients{.grad_query = first_rows(memory_.partial, queries.rows),
                                         .grad_key = first_rows(memory.key, t.rows),
                                         .grad_value = first_rows(memory.value, t.rows)};
      Status status =
          flash_attention_backward(call_.context, {.query = rows(call_.in.query), .key = keys.key, .value = keys.value},
                                   {.out = rows(call_.saved.out),
                                    .softmax_lse = rows(call_.saved.softmax_lse),
                                    .grad_out = rows(call_.saved.grad_out)},
                                   gradients, options(window));
      if (!status.ok()) return status;
      store(call_.context, rows(memory_.sum), gradients.grad_query, true);
      if (!first) {
        store(call_.context, first_rows(memory_.tile.key, t.rows), gradients.grad_key, true);
        store(call_.context, first_rows(memory_.tile.value, t.rows), gradients.grad_value, true);
      }
      first = false;
    }
    return {};
  }

  bool gradients_there() {
    for (int s = 0; s < call_.ranks(); ++s) {
      if (!sequence_.needs(s, rank_, summed_)) continue;
      if (next_from(s) != Kind::gradients || !exchange_.can_receive(s)) return false;
    }
    return true;
  }

  // The sum gathers in the first rank's slot.
  void sum_tile() {
    const KeyTile t = sequence_.tile(rank_, summed_);
    Pair<Tensor> sum;
    for (int s = 0; s < call_.ranks(); ++s) {
      if (!sequence_.needs(s, rank_, summed_)) continue;
      const Pair<Tensor> more = in_slot(slot_from(s), DType::f32, t.rows);
      if (sum.key.rank == 0) {
        sum = more;
        continue;
      }
      store(call_.context, sum.key, more.key, true);
      store(call_.context, sum.value, more.value, true);
    }
    const Tensor key = call_.gradients.grad_key.narrowed(2, t.first, t.rows);
    const Tensor value = call_.gradients.grad_value.narrowed(2, t.first, t.rows);
    if (sum.key.rank > 0) {
      store(call_.context, key, sum.key, false);
      store(call_.context, value, sum.value, false);
    } else {  // nobody sees it
      set_all(call_.context, key, 0);
      set_all(call_.context, value, 0);
    }
    for (int s = 0; s < call_.ranks(); ++s) {
      if (!sequence_.needs(s, rank_, summed_)) continue;
      ++from_[static_cast<size_t>(s)].gradients;
      exchange_.release(s);
    }
    ++summed_;
    exchange_.progressed();
  }

  RingCall& call_;
  const Sequence& sequence_;
  const RingMemory& memory_;
  Exchange exchange_;
  int rank_ = 0;
  int pending_ = -1;  // whose tile's gradients are in memory_.tile
  int64_t most_tiles_ = 0, turn_ = 0, summed_ = 0;
  std::array<Stream, kMaxRanks> to_ = {}, from_ = {};
};

}  // namespace

Status run_ring(RingCall& call, const Entry& entry) {
  CountBytes count;
  static_cast<void>(RingMemory(call, count));
  const Result<WorkspaceLease> lease = call.context.impl().workspaces.lease(count.bytes.value());
  if (!lease.ok()) return lease.status();
  Arena arena(lease.value());
  const RingMemory memory(call, arena);
  return Ring(call, memory).run(entry);
}

}  // namespace opst::mc2

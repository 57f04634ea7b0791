// flash_attention_backward: check -> plan -> run.
//
// A task is one tile of the keys of a (batch, KV head) pair, against all blocks of query rows that see the tile. The
// task owns dK and dV of its keys. dQ of a block gathers from the tiles of several tasks, in the order of the tiles: a
// task adds its term when the tiles before have added theirs, and does the other four products without waiting. So the
// sum is the same whoever runs the tasks, nothing is stored twice, and the tiles of a single head keep several threads
// busy, each a block behind the other:
//
//   time ->     tile 0 of a head    block 0   block 1   block 2   block 3
//               tile 1                        block 0   block 1   block 2   block 3
//               tile 2                                  block 0   block 1   block 2   block 3
//
// Waves of heads share packed query rows (wave_loop.h):
//   pack_block   tensors -> wave buffer: Q and dO as words, statistics, delta, visible keys, rules; dQ = 0
//   run_tile     tensors -> worker's memory: K and V of the tile, packed; dK = dV = 0
//                for each block of the head, in ascending order, that sees the tile (meet)
//                  grad_tile                dV += P^T dO, dK += dS^T Q; leaves dS in the worker's memory
//                  wait for the turn        the block's tiles before this one have added to its dQ
//                  grad_query               dQ += dS K in the wave buffer; the block's last tile writes grad_query
//                  pass the turn            to the task of the next tile
//                worker's memory -> tensors: dK, dV as grad_key, grad_value
// With sparse indices a task is a block of rows against the tiles of its list (run_list, list_gradients.h).
// The gradients of a bias that repeats (bias_gradient.h) and of shared pages (key_gradients.h) are added up in the
// order of the tasks, too.
#include <algorithm>
#include <cmath>
#include <new>

#include "attention/bias_gradient.h"
#include "attention/check.h"
#include "attention/key_gradients.h"
#include "attention/list_gradients.h"
#include "attention/mask_lists.h"
#include "attention/wave_loop.h"
#include "core/guarded.h"
#include "machine/context_impl.h"
#include "machine/interruption.h"
#include "machine/levels.h"
#include "opst/attention_backward.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_BF16_LEVELS, attention, BackwardKernelTable, kBackwardTable, backward_table)

namespace attention {

namespace {

const BackwardKernels& backward_kernels_for(Isa isa, AttentionProduct product, DType kv_dtype) {
  if (product == AttentionProduct::f64) return backward_table(Isa::generic).f64_product;
  const BackwardKernelTable& table = backward_table(isa);
  return product == AttentionProduct::bf16_dot ? table.bf16_dot : table.f32_product[float_index(kv_dtype)];
}

class BackwardCall : BlockRows {
 public:
  BackwardCall(const BackwardData& data, Interruption& interruption) : BlockRows{data}, interruption_(interruption) {}

  void run(ThreadPool& pool) {
    fill(d_.grads.grad_bias, 0, pool);
    keys_.clear(pool);
    if (lists_) list_.clear(pool);
    mask_.build(pool);
    const auto pack = [&](int64_t head, int64_t block, int worker) { pack_block(head, block, worker); };
    // `index`: of a tile, or of a block.
    const auto grad = [&](int64_t head, int64_t index, int64_t number, int worker) {
      const bool runs = head < d_.heads && !interruption_.requested(worker);
      if (lists_ && (!runs || index >= d_.blocks(head))) return list_.pass(head, index, number);
      if (lists_) return run_list(head, index, number, worker);
      runs ? run_tile(head, index, number, worker) : pass_tile(head, index, number);
    };
    // Of causal masks the first tiles, which most rows see, come first.
    const WaveLoop loop = {d_.heads, d_.plan.heads_per_wave, d_.layout.blocks,
                           lists_ ? d_.layout.blocks : d_.layout.tiles, WaveLoop::Order::heads_in_turn};
    loop.run(pool, pack, grad);
    if (interruption_.happened()) return;
    sinks_.finish();
    keys_.finish(pool);
    if (lists_) list_.finish(pool);
  }

 private:
  void pack_block(int64_t head, int64_t index, int worker) const {
    if (index >= d_.blocks(head)) return;  // a shorter sequence of the batch
    const Worker w = d_.worker(worker);
    const Block b = d_.block(head, index);
    BlockState& s = *new (b.state) BlockState;
    find_visible(b, w);
    hide_masked_rows(b, w);
    const PackQueries pack = rows_of_block(b, w);
    d_.kernels.pack_queries(pack, d_.layout.sizes, b.queries);
    hide_absent_rows(b, w);
    s.has_rules = d_.rules.any(d_.batch(head));
    if (s.has_rules) {
      s.rules = d_.rules.of_block(d_.batch(head), d_.kv_head(head), b.first_row, b.queries.rows, b.row_rules);
    }
    find_tiles(b, w);
    bias_.locate(b);
    sinks_.add(b, pack);
    if (s.tiles.count() == 0) {
      finish_query(b);
    } else if (s.far) {
      recompute_statistics(b, w);
    }
  }
  // The keys that all rows see, and the tiles that some row does.
  void find_tiles(const Block& b, const Worker& w) const {
    KeyInterval some = {d_.p.kv_len, 0}, all = {0, d_.p.kv_len};
    bool absent = false;
    for (int64_t r = 0; r < b.queries.rows; ++r) {
      const KeyInterval keys = {w.block.visible_begin[r], w.block.visible_end[r]};
      all = {std::max(all.begin, keys.begin), std::min(all.end, keys.end)};
      absent = absent || keys.begin >= keys.end;
      if (keys.begin < keys.end) some = {std::min(some.begin, keys.begin), std::max(some.end, keys.end)};
    }
    // Rows that see a key see the prefix too, which may lie before their intervals.
    BlockState& s = *b.state;
    if (some.begin < some.end && d_.sequences.prefix(d_.batch(b.head)) > 0) some.begin = 0;
    s.all = all;
    s.absent = absent;
    s.tiles = d_.p.block_mask ? BlockTiles(some, d_.plan.block_kv, mask_.tiles_of(b.head, b.index))
                              : BlockTiles(some, d_.plan.block_kv);
  }
  // Maxima and sums of a block's rows once more.
  void recompute_statistics(const Block& b, const Worker& w) const {
    for (int64_t r = 0; r < b.queries.rows; ++r) {
      const double sink = d_.in.sinks ? d_.sink(b.head, b.first_row + r) / d_.rules.score_scale() : -HUGE_VAL;
      d_.numbers.set(w.max, r, sink);
      d_.numbers.set(w.sum, r, sink == -HUGE_VAL ? 0 : 1);
    }
    if (lists_) {
      for_listed(b, w, [&](const GradBlock& g, const GradTile& t) { d_.kernels.add_statistics(g, t, w.max, w.sum); });
      return d_.kernels.keep_statistics(b.queries, w.max, w.sum);
    }
    const BlockTiles& tiles = b.state->tiles;
    for (int64_t place = 0; place < tiles.count(); ++place) {
      const GradTile tile = pack_tile(b.head, tiles[place], w, true);
      for_entries(b, w, tile, [&](const GradBlock& g) { d_.kernels.add_statistics(g, tile, w.max, w.sum); });
    }
    d_.kernels.keep_statistics(b.queries, w.max, w.sum);
  }

  // ---- One tile against its blocks

  void run_tile(int64_t head, int64_t index, int64_t number, int worker) {
    const Worker w = d_.worker(worker);
    const bool masked(d_.p.block_mask);
    const std::span<const int64_t> list = masked ? mask_.blocks_of(head, index) : std::span<const int64_t>();
    GradTile tile = pack_tile(head, index, w, !masked || !list.empty());
    const BackwardSizes& z = d_.layout.sizes;
    if (d_.wants_key()) tile.grad_key = d_.cleared(w.grad_key, d_.plan.block_kv, z.acc_stride);
    if (d_.wants_value()) tile.grad_value = d_.cleared(w.grad_value, d_.plan.block_kv, z.value_acc_stride);
    bias_.begin(w);
    const int64_t blocks = tile.count > 0 ? d_.blocks(head) : 0, met = masked ? std::ssize(list) : blocks;
    int64_t next = 0;  // the first block whose turn has not been passed
    for (int64_t n = 0; n < met; ++n) {
      const int64_t i = masked ? list[static_cast<size_t>(n)] : n;
      if (i >= blocks) break;  // a shorter sequence of the batch
      bias_.pass(next, i, number);
      meet(d_.block(head, i), index, w, tile, number);
      next = i;
    }
    bias_.pass(next, d_.layout.blocks, number);
    bias_.finish(head, w, tile, number);
    keys_.put(head, tile, number);
  }
  // Runs in place of run_tile for a head that the last wave lacks, and once the call is interrupted: tasks that have
  // begun may wait for this one's turns.
  void pass_tile(int64_t head, int64_t index, int64_t number) {
    const int64_t blocks = head < d_.heads ? d_.blocks(head) : 0;
    for (int64_t i = 0; i < blocks; ++i) {
      BlockState& s = *d_.block(head, i).state;
      const int64_t place = s.tiles.place_of(index);
      if (place >= 0) s.turn.take_and_pass(place);
    }
    bias_.pass_all(number);
    keys_.pass(number);
  }

  // ---- One block against its list

  void run_list(int64_t head, int64_t index, int64_t number, int worker) const {
    const Worker w = d_.worker(worker);
    const Block b = d_.block(head, index);
    const bool some = b.state->tiles.count() > 0;
    if (some) {
      for_listed(b, w, [&](const GradBlock& g, const GradTile& tile) {
        d_.kernels.grad_tile(g, tile);
        if (d_.wants_query()) d_.kernels.grad_query(g, tile);
      });
      finish_query(b);
    }
    list_.add(b, w, some, number);
  }

  // Tile `index` of a head's keys, packed if some block may see it and the sequence has any of them. `grad_key` and
  // `grad_value` null.
  GradTile pack_tile(int64_t head, int64_t index, const Worker& w, bool seen) const {
    const int64_t first = index * d_.plan.block_kv, kv_len = d_.sequences.kv_len(d_.batch(head));
    const int64_t count = std::clamp<int64_t>(kv_len - first, 0, d_.plan.block_kv);
    GradTile tile = {first, count, w.keys, w.values, w.key_columns};
    if (count == 0 || !seen) return tile;
    const KeyInterval keys = {first, first + count};
    pack_keys(head, {&keys, 1}, w, tile);
    return tile;
  }

  // visit(GradBlock) for a block against a tile: once, or with a block mask for each entry of a MaskWalk, whose pairs
  // are others each time.
  template <class Visit>
  void for_entries(const Block& b, const Worker& w, const GradTile& tile, const Visit& visit) const {
    const BlockState& s = *b.state;
    const int64_t end = tile.first_key + tile.count;
    const bool cut = tile.first_key < s.all.begin || end > s.all.end;
    if (!d_.p.block_mask) {
      const bool partial = cut && end > (s.has_rules ? s.rules.prefix : 0);
      if (partial) find_visible(b, w), hide_absent_rows(b, w);
      return visit(block_against(b, w, partial));
    }
    const Visibility v = d_.visibility(b.head);
    MaskWalk walk(d_.head_mask(b.head), {b.first_row, b.queries.rows, d_.group}, v.prefix, {v.prefix, v.kv_len},
                  w.mask_cursors);
    walk.skip_to(tile.first_key);
    while (walk.next_entry(end)) {
      const bool whole = walk.same() && walk.hull().begin == tile.first_key && walk.hull().end == end;
      const bool partial = !whole || s.absent || (cut && !walk.in_prefix());
      if (partial) {
        const auto structure = [&](int64_t query) { return v.keys_of_query(query); };
        walk.write_intervals(structure, w.block.visible_begin, w.block.visible_end);
        hide_absent_rows(b, w);
      }
      visit(block_against(b, w, partial));
    }
  }

  // A block of query rows against tile `index`, if it sees any of it.
  void meet(const Block& b, int64_t index, const Worker& w, const GradTile& tile, int64_t number) const {
    BlockState& s = *b.state;
    const int64_t place = s.tiles.place_of(index);
    if (place < 0) return;
    for_entries(b, w, tile, [&](const GradBlock& g) {
      d_.kernels.grad_tile(g, tile);
      bias_.sum(g, tile, b, w);
      s.turn.wait_for(place);
      bias_.add(g, tile, b, number);
      if (d_.wants_query()) d_.kernels.grad_query(g, tile);
    });
    s.turn.wait_for(place);
    if (place + 1 == s.tiles.count()) finish_query(b);
    s.turn.pass(place);
  }
  void finish_query(const Block& b) const {
    const double factor = d_.rules.scale().of_query * d_.rules.scale().of_score;
    const int64_t rope_dim = d_.p.rope_dim, dim = d_.p.head_dim - rope_dim;
    const auto finish = [&](const Tensor& to, int64_t column, int64_t length) {
      if (!to) return;
      d_.kernels.finish_rows({d_.numbers.at(b.queries.grad_query, column), b.queries.rows, length,
                              d_.layout.sizes.acc_stride, factor, b.first_row, d_.stacked_rows(to, b.head)});
    };
    finish(d_.grads.grad_query, 0, dim);
    finish(d_.grads.grad_query_rope, dim, rope_dim);
  }

  const bool lists_{d_.p.sparse_indices};
  const BiasGradient bias_{d_};
  const SinkGradient sinks_{d_};
  const MaskLists mask_{d_};
  KeyGradients keys_{d_};
  const ListGradients list_{*this};
  Interruption& interruption_;
};

}  // namespace
}  // namespace attention

Status flash_attention_backward(Context& context, const AttentionInputs& inputs, const AttentionSaved& saved,
                                const AttentionGradients& gradients, const AttentionOptions& options) {
  return guarded([&]() -> Status {
    using namespace attention;
    Result<AttentionBackwardProblem> checked = check_backward(inputs, saved, gradients, options);
    if (!checked.ok()) return checked.status();
    AttentionBackwardProblem problem = checked.value();
    const AttentionProblem& p = problem.forward;
    const AttentionInputs in = uniform_shapes(inputs, p);
    AttentionSaved from = saved;
    AttentionGradients to = gradients;
    for (ConstTensor* t :
         {&from.out, &from.grad_out, &from.softmax_lse, &from.softmax_max, &from.softmax_sum, &from.grad_lse}) {
      *t = uniform_if_there(*t, p.varlen_q);
    }
    const auto of_queries = {&to.grad_query, &to.grad_query_rope};
    const auto of_keys = {&to.grad_key, &to.grad_value, &to.grad_key_rope};
    for (Tensor* t : of_queries) *t = uniform_if_there(*t, p.varlen_q);
    for (Tensor* t : of_keys) *t = uniform_if_there(*t, p.varlen_k);

    Context::Impl& impl = context.impl();
    const auto outputs = {&to.grad_query, &to.grad_key,        &to.grad_value,   &to.grad_bias,
                          &to.grad_sinks, &to.grad_query_rope, &to.grad_key_rope};
    if (std::none_of(outputs.begin(), outputs.end(), [](const Tensor* t) { return bool{*t}; })) return {};
    if (p.batch == 0 || p.num_heads == 0 || p.query_len == 0) {
      const Status ready = impl.workspaces.ready();
      if (!ready.ok()) return ready;
      for (const Tensor* t : outputs) fill(*t, 0, impl.pool);
      return {};
    }
    if (p.paged && !p.sparse_indices && (to.grad_key || to.grad_value || to.grad_key_rope)) {
      Result<WorkspaceLease> lease = impl.workspaces.lease_for_plan(Arena::size_of<int64_t>(problem.num_blocks));
      if (!lease.ok()) return lease.status();
      auto* ordinals = static_cast<int64_t*>(lease.value().data());
      problem.shared_blocks = KeyGradients::number_shared(in, p, problem.num_blocks, ordinals);
    }
    const AttentionBackwardPlan plan = plan_attention_backward(problem, impl.machine);
    if (!Size(plan.num_tasks).within_limit()) {
      return Status::invalid_argument(text("flash_attention_backward: ", p.batch, " sequences, ", p.num_kv_heads,
                                           " KV heads and ", p.kv_len, " keys are more than 2^56 tiles"));
    }
    const int threads = impl.pool.num_threads();
    Result<WorkspaceLease> lease =
        impl.workspaces.lease(std::max(plan.scratch_bytes(threads), index_check_bytes(p, threads)));
    if (!lease.ok()) return lease.status();
    if (p.sparse_indices) {
      const Status status = check_indices("flash_attention_backward", in, p, impl.pool, lease.value().data());
      if (!status.ok()) return status;
      lease.value().renew();
    }
    Interruption interruption(impl.interrupted, multiply_adds(p));
    const Isa isa = impl.machine.isa;
    const BackwardKernels& kernels = backward_kernels_for(isa, plan.product, p.kv_dtype);
    const Geometry& geometry = geometry_of(isa, plan.product);
    const auto memory = static_cast<char*>(lease.value().data());
    const BackwardData data = {{in, p}, from, to, problem, plan, kernels, geometry, memory};
    BackwardCall(data, interruption).run(impl.pool);
    if (interruption.happened()) return interruption.status("flash_attention_backward");
    for (const Tensor* t : of_queries) {
      if (p.varlen_q) fill_rows(*t, index_at(in.cu_seqlens_q, p.batch), 0, impl.pool);
    }
    for (const Tensor* t : of_keys) {
      if (p.varlen_k) fill_rows(*t, index_at(in.cu_seqlens_k, p.batch), 0, impl.pool);
    }
    return {};
  });
}

}  // namespace opst

// flash_attention_forward: check -> plan -> run.
//
// A task is a block of query rows of one (batch, KV head) pair against one part of its keys.
//
// Shared packed keys and values (packed_shared): heads go in waves of a few MB, so that what was packed is still in
// cache when it is read. All tasks of the call are one parallel loop,
//     pack wave 0, attend wave 0, pack wave 1, attend wave 1, ...
// with two buffers in turn. Tasks are handed out in ascending order, so what a task waits for is done or being done:
// the packing of its own wave before it attends, and, before a buffer is packed anew, the attending of the wave that
// used it. There is no barrier between waves at which threads would stand idle.
#include "opst/attention.h"

#include <atomic>
#include <cmath>
#include <thread>

#include "attention/check.h"
#include "attention/kernel_table.h"
#include "attention/kernels.h"
#include "attention/kv_blocks.h"
#include "attention/layout.h"
#include "core/guarded.h"
#include "machine/context_impl.h"

namespace opst {

namespace attention {

static_assert(sizeof(KvTile) == 64, "attention/layout.h counts on it");

namespace {

// Counts finished tasks; others wait until enough are.
class Counter {
 public:
  void add_one() { count_.fetch_add(1, std::memory_order_release); }
  void wait_for(int64_t count) const {
    for (int spins = 0; count_.load(std::memory_order_acquire) < count; ++spins) {
      if (spins > 1000) std::this_thread::yield();
    }
  }

 private:
  alignas(64) std::atomic<int64_t> count_{0};
};

// Everything that is the same for all tasks of a call.
class ForwardCall {
 public:
  ForwardCall(const AttentionInputs& inputs, const AttentionOutputs& outputs, const AttentionProblem& problem,
              const AttentionPlan& plan, const Machine& machine, char* shared, char* workers)
      : in_(inputs),
        out_(outputs),
        p_(problem),
        plan_(plan),
        kernels_(kernels_for(machine.isa, plan.product, problem.kv_dtype)),
        layout_(problem, plan, geometry_of(machine.isa, plan.product)),
        group_(problem.num_heads / problem.num_kv_heads),
        rows_(problem.query_len * group_),
        blocks_(ceil_div(rows_, plan.block_q)),
        shared_(shared),
        workers_(workers) {
    const double scale =
        p_.options.softmax_scale.value_or(static_cast<float>(1.0 / std::sqrt(static_cast<double>(p_.head_dim))));
    const double exact = p_.options.softmax_scale || p_.query_dtype != DType::f64
                             ? scale
                             : 1.0 / std::sqrt(static_cast<double>(p_.head_dim));
    // A scale of 0 makes every score 0. The sign goes into the queries, which is exact; so does a power of two where
    // the scale times log2(e) would be no float.
    const double power = std::fabs(exact) > 1e38 ? 4 : 1;
    query_factor_ = exact > 0 ? power : exact < 0 ? -power : 0;
    score_scale_ = exact == 0 ? 1 : std::fabs(exact) / power;
  }

  void run(ThreadPool& pool) {
    const int64_t heads = p_.batch * p_.num_kv_heads;
    const int64_t packs =
        plan_.kv_access == KvAccess::packed_shared ? plan_.heads_per_wave * layout_.tiles_per_head : 0;
    const int64_t tasks = plan_.heads_per_wave * blocks_ * plan_.kv_splits;
    const int64_t waves = ceil_div(heads, plan_.heads_per_wave);
    pool.parallel_for(waves * (packs + tasks), [&](int64_t index, int worker) {
      const int64_t wave = index / (packs + tasks), in_wave = index % (packs + tasks);
      Progress& progress = progress_[wave % 2];
      const int64_t turn = wave / 2;  // of the wave's buffer
      if (in_wave < packs) {
        progress.attended.wait_for(turn * tasks);
        pack_shared_tile(wave * plan_.heads_per_wave + in_wave / layout_.tiles_per_head,
                         in_wave % layout_.tiles_per_head, worker);
        progress.packed.add_one();
      } else {
        progress.packed.wait_for((turn + 1) * packs);
        const int64_t task = in_wave - packs, of_head = task % (blocks_ * plan_.kv_splits);
        // The last rows first: under a causal mask they see most keys, and long tasks should not come last.
        attend_block(wave * plan_.heads_per_wave + task / (blocks_ * plan_.kv_splits),
                     blocks_ - 1 - of_head / plan_.kv_splits, of_head % plan_.kv_splits, worker);
        progress.attended.add_one();
      }
    });
    if (plan_.kv_splits > 1) {
      pool.parallel_for(heads * blocks_, [&](int64_t task, int) { join_splits(task / blocks_, task % blocks_); });
    }
  }

 private:
  // One worker's scratch memory, in the order that layout.h adds up.
  struct Scratch {
    void* query;
    void* scores;
    int64_t* visible_begin;
    int64_t* visible_end;
    const void** key_rows;
    const void** value_rows;
    KvTile* tiles;
    Arena rest;  // the state of an unsplit task, private tiles
  };
  Scratch scratch_of(int worker) const {
    Arena arena(workers_ + worker * plan_.scratch_bytes_per_worker, plan_.scratch_bytes_per_worker);
    Scratch s{arena.take_bytes(layout_.query_bytes),
              arena.take_bytes(layout_.scores_bytes),
              arena.take<int64_t>(plan_.block_q),
              arena.take<int64_t>(plan_.block_q),
              arena.take<const void*>(layout_.pointers_per_call),
              arena.take<const void*>(layout_.pointers_per_call),
              arena.take<KvTile>(layout_.tiles_per_task),
              arena};
    return s;
  }

  // The head's place in its wave's buffer. Where keys are split there is one wave.
  char* shared_head(int64_t head) const {
    return shared_ + head % (2 * plan_.heads_per_wave) * layout_.shared_head_bytes;
  }
  char* packed_tile(int64_t head, int64_t tile) const {
    return shared_head(head) + tile * (layout_.key_tile_bytes + layout_.value_tile_bytes);
  }
  bool* values_finite(int64_t head) const { return reinterpret_cast<bool*>(packed_tile(head, layout_.tiles_per_head)); }
  RowState split_state(int64_t head, int64_t block, int64_t split) const {
    const int64_t index = block * plan_.kv_splits + split;
    return state_at(
        Arena(shared_head(head) + layout_.packed_head_bytes + index * layout_.state_bytes, layout_.state_bytes));
  }
  RowState state_at(Arena arena) const {
    const int64_t bytes = kernels_.accumulator_bytes;
    return {arena.take_bytes(plan_.block_q * layout_.acc_stride * bytes), arena.take_bytes(plan_.block_q * bytes),
            arena.take_bytes(plan_.block_q * kernels_.lanes * bytes)};
  }

  Visibility visibility(int64_t batch) const {
    return Visibility::of(p_.options, p_.query_len, kv_length(in_.kv_lengths, batch, p_.kv_len));
  }
  KvRows kv_rows(const ConstTensor& t, int64_t head) const {
    const int64_t batch = head / p_.num_kv_heads, kv_head = head % p_.num_kv_heads, size = size_bytes(t.dtype);
    const char* data = static_cast<const char*>(t.data);
    KvRows rows;
    if (p_.paged) {
      const ConstTensor& table = in_.block_table;
      rows.base = data + kv_head * t.strides[2] * size;
      rows.row_bytes = t.strides[1] * size;
      rows.page_bytes = t.strides[0] * size;
      rows.block_size = t.shape[1];
      rows.pages = static_cast<const char*>(table.data) + batch * table.strides[0] * size_bytes(table.dtype);
      rows.pages_stride = table.strides[1];
      rows.pages_i64 = table.dtype == DType::i64;
    } else {
      rows.base = data + (batch * t.strides[0] + kv_head * t.strides[1]) * size;
      rows.row_bytes = t.strides[2] * size;
    }
    return rows;
  }
  StackedRows stacked_rows(const ConstTensor& t, int64_t head) const {
    const int64_t batch = head / p_.num_kv_heads, first_head = head % p_.num_kv_heads * group_;
    if (t.data == nullptr) return {};
    const int64_t offset = (batch * t.strides[0] + first_head * t.strides[1]) * size_bytes(t.dtype);
    // The kernels' struct serves inputs and outputs; queries are only read through it.
    return {const_cast<char*>(static_cast<const char*>(t.data)) + offset,
            t.dtype,
            t.strides[2],
            t.strides[1],
            t.strides[3],
            group_};
  }

  // Packs tile [first_key, first_key + count) of a head to `to`; true where its values are finite.
  bool pack_tile(int64_t head, int64_t first_key, int64_t count, const Scratch& s, char* to) const {
    kv_rows(in_.key, head).locate(first_key, count, s.key_rows);
    kernels_.pack_keys(s.key_rows, in_.key.strides[3], count, p_.head_dim, to);
    kv_rows(in_.value, head).locate(first_key, count, s.value_rows);
    return kernels_.pack_values(s.value_rows, in_.value.strides[3], count, p_.value_head_dim,
                                to + layout_.key_tile_bytes);
  }
  void pack_shared_tile(int64_t head, int64_t tile, int worker) const {
    const int64_t first_key = tile * plan_.block_kv;
    if (head >= p_.batch * p_.num_kv_heads) return;  // the last wave may have fewer heads
    const int64_t count = std::min(plan_.block_kv, visibility(head / p_.num_kv_heads).kv_len - first_key);
    if (count <= 0) return;
    values_finite(head)[tile] = pack_tile(head, first_key, count, scratch_of(worker), packed_tile(head, tile));
  }

  void attend_block(int64_t head, int64_t block, int64_t split, int worker) const {
    if (head >= p_.batch * p_.num_kv_heads) return;
    Scratch s = scratch_of(worker);
    const int64_t first_row = block * plan_.block_q;
    QueryBlock q;
    q.rows = std::min(plan_.block_q, rows_ - first_row);
    q.head_dim = p_.head_dim;
    q.value_head_dim = p_.value_head_dim;
    q.query = s.query;
    q.query_stride = layout_.query_stride;
    q.state = plan_.kv_splits > 1 ? split_state(head, block, split) : state_at(s.rest);
    q.acc_stride = layout_.acc_stride;
    q.exponent_scale = score_scale_ * 1.4426950408889634;
    q.scores = s.scores;
    q.scores_stride = layout_.scores_stride;
    q.visible_begin = s.visible_begin;
    q.visible_end = s.visible_end;
    kernels_.begin_block(stacked_rows(in_.query, head), first_row, query_factor_, s.query, q);

    const KeyInterval range = {split * plan_.keys_per_split, (split + 1) * plan_.keys_per_split};
    KvBlocks visible(visibility(head / p_.num_kv_heads), first_row, q.rows, group_, range, plan_.block_kv,
                     s.visible_begin, s.visible_end);
    if (plan_.kv_splits == 1) s.rest.take_bytes(layout_.state_bytes);
    while (const int64_t n = next_tiles(head, visible, s)) attend_tiles(q, s, n, head, block);
    if (plan_.kv_splits == 1) finish(head, block, &q.state, 1);
  }

  // Describes (and, where that is this task's work, packs) up to tiles_per_task of the tiles that are left.
  int64_t next_tiles(int64_t head, KvBlocks& visible, const Scratch& s) const {
    int64_t n = 0, first_key = 0, count = 0;
    KvBlocks::Tile tile;
    Arena arena = s.rest;
    for (; n < layout_.tiles_per_task && visible.next(&tile); ++n) {
      KvTile& t = s.tiles[n];
      t = {};
      t.first_key = tile.first_key;
      t.count = tile.count;
      t.partial = tile.partial;
      if (n == 0) first_key = tile.first_key;
      count = tile.first_key + tile.count - first_key;
      if (plan_.kv_access == KvAccess::in_place) {
        t.key_rows = s.key_rows + (tile.first_key - first_key);
        t.value_rows = s.value_rows + (tile.first_key - first_key);
      } else {
        char* packed;
        if (plan_.kv_access == KvAccess::packed_shared) {
          const int64_t index = tile.first_key / plan_.block_kv;
          packed = packed_tile(head, index);
          t.values_finite = values_finite(head)[index];
        } else {
          packed = static_cast<char*>(arena.take_bytes(layout_.key_tile_bytes + layout_.value_tile_bytes));
          t.values_finite = pack_tile(head, tile.first_key, tile.count, s, packed);
        }
        t.keys = packed;
        t.values = packed + layout_.key_tile_bytes;
      }
    }
    if (plan_.kv_access == KvAccess::in_place && n > 0) {
      kv_rows(in_.key, head).locate(first_key, count, s.key_rows);
      kv_rows(in_.value, head).locate(first_key, count, s.value_rows);
      for (int64_t i = 0; i < n; ++i) {
        s.tiles[i].rows_ahead = first_key + count - s.tiles[i].first_key - s.tiles[i].count;
      }
    }
    return n;
  }

  void attend_tiles(const QueryBlock& q, const Scratch& s, int64_t num_tiles, int64_t head, int64_t block) const {
    if (plan_.path == AttentionPath::standard) {
      char* matrix = shared_ + layout_.wave_bytes(plan_) + head * layout_.matrix_head_bytes +
                     block * (layout_.matrix_head_bytes / blocks_);
      kernels_.attend_standard(q, s.tiles, num_tiles, matrix, layout_.matrix_stride);
    } else if (plan_.kv_access == KvAccess::in_place) {
      kernels_.attend_in_place(q, s.tiles, num_tiles);
    } else {
      kernels_.attend(q, s.tiles, num_tiles);
    }
  }

  void join_splits(int64_t head, int64_t block) const {
    RowState parts[kMaxSplits];
    for (int64_t split = 0; split < plan_.kv_splits; ++split) parts[split] = split_state(head, block, split);
    finish(head, block, parts, plan_.kv_splits);
  }

  void finish(int64_t head, int64_t block, const RowState* parts, int64_t num_parts) const {
    FinishRows f;
    f.parts = parts;
    f.num_parts = num_parts;
    f.first_row = block * plan_.block_q;
    f.rows = std::min(plan_.block_q, rows_ - f.first_row);
    f.value_head_dim = p_.value_head_dim;
    f.acc_stride = layout_.acc_stride;
    f.exponent_scale = score_scale_ * 1.4426950408889634;
    f.score_scale = score_scale_;
    f.out = stacked_rows(out_.out, head);
    f.lse = stacked_rows(out_.softmax_lse, head);
    f.max = stacked_rows(out_.softmax_max, head);
    f.sum = stacked_rows(out_.softmax_sum, head);
    kernels_.finish_rows(f);
  }

  static constexpr int64_t kMaxSplits = 16;  // plan.cc: kWantedTasks

  const AttentionInputs& in_;
  const AttentionOutputs& out_;
  const AttentionProblem& p_;
  const AttentionPlan& plan_;
  const Kernels& kernels_;
  const Layout layout_;
  const int64_t group_, rows_, blocks_;
  char* const shared_;
  char* const workers_;
  double query_factor_, score_scale_;
  struct Progress {
    Counter packed, attended;
  };
  Progress progress_[2];  // of the waves that use buffer 0 and buffer 1
};

}  // namespace
}  // namespace attention

Status flash_attention_forward(Context& context, const AttentionInputs& inputs, const AttentionOutputs& outputs,
                               const AttentionOptions& options) {
  return guarded([&]() -> Status {
    Result<AttentionProblem> problem = attention::check_forward(inputs, outputs, options);
    if (!problem.ok()) return problem.status();

    Context::Impl& impl = context.impl();
    const AttentionPlan plan = plan_attention(problem.value(), impl.machine);
    if (plan.num_tasks == 0) return {};

    Result<WorkspaceLease> lease = impl.workspaces.lease(plan.scratch_bytes(impl.pool.num_threads()));
    if (!lease.ok()) return lease.status();
    char* shared = static_cast<char*>(lease.value().data());
    attention::ForwardCall call(inputs, outputs, problem.value(), plan, impl.machine, shared,
                                shared + plan.scratch_bytes_shared);
    call.run(impl.pool);
    return {};
  });
}

}  // namespace opst

// flash_attention_backward: check -> plan -> run.
//
// A task is one tile of the keys of a (batch, KV head) pair, against all blocks of query rows that see it: it owns the
// dK and dV of its keys. dQ of a block gathers from tiles of several tasks, in the order of the tiles: a task adds its
// part when the tiles before it have added theirs, and does the other four products without waiting. So the sum is the
// same whoever runs the tasks, nothing is stored twice, and the tiles of a single head keep several threads busy, each
// a block behind the other.
//
// All of the call is one parallel loop over waves of heads, as in attention.cc:
//     pack the query rows of wave 0, tiles of wave 0, pack wave 1, tiles of wave 1, ...
// with two buffers in turn. Tasks are handed out in ascending order, so what a task waits for is done or being done.
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>

#include "attention/backward_check.h"
#include "attention/backward_layout.h"
#include "attention/kv_blocks.h"
#include "attention/sequences.h"
#include "core/guarded.h"
#include "machine/context_impl.h"
#include "opst/attention_backward.h"

namespace opst {

#define OPST_DECLARE_LEVEL(level)                                   \
  namespace level::attention {                                      \
  extern const opst::attention::BackwardKernelTable kBackwardTable; \
  }
OPST_DECLARE_LEVEL(generic)
#if defined(__x86_64__)
OPST_DECLARE_LEVEL(avx2)
OPST_DECLARE_LEVEL(avx512)
OPST_DECLARE_LEVEL(avx512_bf16)
#endif
#undef OPST_DECLARE_LEVEL

namespace attention {

namespace {

const BackwardKernelTable& table_for(Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::avx512_bf16) return avx512_bf16::attention::kBackwardTable;
  if (isa >= Isa::avx512) return avx512::attention::kBackwardTable;
  if (isa >= Isa::avx2) return avx2::attention::kBackwardTable;
#endif
  (void)isa;
  return generic::attention::kBackwardTable;
}

const BackwardKernels& backward_kernels_for(Isa isa, AttentionProduct product, DType kv_dtype) {
  if (product == AttentionProduct::f64) return generic::attention::kBackwardTable.f64_product;
  const BackwardKernelTable& table = table_for(isa);
  if (product == AttentionProduct::bf16_dot) return table.bf16_dot;
  return table.f32_product[kv_dtype == DType::bf16 ? 1 : kv_dtype == DType::f16 ? 2 : 0];
}

// Returns once the counter holds at least `count`.
void wait_for(const std::atomic<int64_t>& counter, int64_t count) {
  for (int spins = 0; counter.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 1000) std::this_thread::yield();
  }
}

class BackwardCall {
 public:
  BackwardCall(const AttentionInputs& inputs, const AttentionSaved& saved, const AttentionGradients& gradients,
               const AttentionProblem& problem, const AttentionBackwardPlan& plan, const Machine& machine,
               void* scratch)
      : in_(inputs),
        saved_(saved),
        grads_(gradients),
        p_(problem),
        plan_(plan),
        kernels_(backward_kernels_for(machine.isa, plan.product, problem.kv_dtype)),
        layout_(problem, plan.block_q, plan.block_kv, geometry_of(machine.isa, plan.product)),
        group_(problem.num_heads / problem.num_kv_heads),
        rows_(problem.query_len * group_),
        heads_(problem.batch * problem.num_kv_heads),
        shared_(static_cast<char*>(scratch)) {
    const double natural = 1 / std::sqrt(static_cast<double>(p_.head_dim));
    scale_ = p_.query_dtype == DType::f64 ? natural : static_cast<double>(static_cast<float>(natural));
    if (p_.options.softmax_scale) scale_ = static_cast<double>(*p_.options.softmax_scale);
    query_factor_ = scale_ > 0 ? 1 : scale_ < 0 ? -1 : 0;
    score_scale_ = scale_ == 0 ? 1 : std::fabs(scale_);
    exponent_scale_ = score_scale_ * kLog2e;
  }

  void run(ThreadPool& pool) {
    const int64_t wave_heads = plan_.heads_per_wave, blocks = layout_.blocks, tiles = layout_.tiles;
    const int64_t packs = wave_heads * blocks, tasks = wave_heads * tiles;
    const int64_t waves = ceil_div(heads_, wave_heads);
    pool.parallel_for(waves * (packs + tasks), [&](int64_t index, int worker) {
      const int64_t wave = index / (packs + tasks), in_wave = index % (packs + tasks);
      Progress& progress = progress_[wave % 2];
      const int64_t turn = wave / 2;  // of the wave's buffer
      if (in_wave < packs) {
        const int64_t head = wave * wave_heads + in_wave / blocks;
        wait_for(progress.tiles, turn * tasks);
        if (head < heads_) pack_block(head, in_wave % blocks, worker);
        progress.packed.fetch_add(1, std::memory_order_release);
      } else {
        // Tasks of different heads come next to each other: they do not wait for one another. Of causal masks the first
        // tiles, which most rows see, come first.
        const int64_t task = in_wave - packs, head = wave * wave_heads + task % wave_heads;
        wait_for(progress.packed, (turn + 1) * packs);
        if (head < heads_) run_tile(head, task / wave_heads, worker);
        progress.tiles.fetch_add(1, std::memory_order_release);
      }
    });
  }

 private:
  static constexpr double kLog2e = 1.4426950408889634;

  struct Worker {
    void* keys;
    void* values;
    void* key_columns;
    void* grad_key;
    void* grad_value;
    void* probability_columns;
    void* grad_score_columns;
    void* grad_scores;
    void* raw;
    const void** key_rows;
    const void** value_rows;
    const void** query_rows;
    int64_t* visible_begin;
    int64_t* visible_end;
  };
  Worker worker(int index) const {
    Arena arena(shared_ + plan_.scratch_bytes_shared + index * plan_.scratch_bytes_per_worker,
                plan_.scratch_bytes_per_worker);
    Worker w;
    w.keys = arena.take_bytes(layout_.key_bytes);
    w.values = arena.take_bytes(layout_.key_value_bytes);
    w.key_columns = arena.take_bytes(layout_.key_column_bytes);
    w.grad_key = arena.take_bytes(layout_.grad_key_bytes);
    w.grad_value = arena.take_bytes(layout_.grad_value_bytes);
    w.probability_columns = arena.take_bytes(layout_.scores_bytes);
    w.grad_score_columns = arena.take_bytes(layout_.scores_bytes);
    w.grad_scores = layout_.score_row_bytes > 0 ? arena.take_bytes(layout_.score_row_bytes) : w.grad_score_columns;
    w.raw = arena.take_bytes(layout_.raw_bytes);
    w.key_rows = arena.take<const void*>(plan_.block_kv);
    w.value_rows = arena.take<const void*>(plan_.block_kv);
    w.query_rows = arena.take<const void*>(plan_.block_q);
    w.visible_begin = arena.take<int64_t>(plan_.block_q);
    w.visible_end = arena.take<int64_t>(plan_.block_q);
    return w;
  }

  struct Block {
    QueryRows queries;
    int64_t first_row;
    BlockState* state;
  };
  Block block_of(int64_t head, int64_t block) const {
    char* base = shared_ + head % (2 * plan_.heads_per_wave) * layout_.head_bytes + block * layout_.block_bytes;
    Arena arena(base, layout_.block_bytes);
    Block b;
    b.first_row = block * plan_.block_q;
    b.state = arena.take<BlockState>(1);
    QueryRows& q = b.queries;
    q.rows = std::min(plan_.block_q, rows_ - b.first_row);
    q.query = arena.take_bytes(layout_.query_bytes);
    q.grad_out = arena.take_bytes(layout_.value_bytes);
    q.query_columns = arena.take_bytes(layout_.query_column_bytes);
    q.grad_out_columns = arena.take_bytes(layout_.value_column_bytes);
    q.reference = arena.take_bytes(layout_.statistic_bytes);
    q.weight = arena.take_bytes(layout_.statistic_bytes);
    q.delta = arena.take_bytes(layout_.statistic_bytes);
    q.grad_query = arena.take_bytes(layout_.grad_query_bytes);
    q.finite = &b.state->finite;
    return b;
  }

  // Rows of a tensor [batch, num_heads, query_len, ...], the head's group stacked.
  StackedRows query_rows(const ConstTensor& t, int64_t head) const {
    if (t.data == nullptr) return {};
    const int64_t batch = head / p_.num_kv_heads, first_head = head % p_.num_kv_heads * group_;
    const int64_t offset = (batch * t.strides[0] + first_head * t.strides[1]) * size_bytes(t.dtype);
    char* data = const_cast<char*>(static_cast<const char*>(t.data)) + offset;
    return {data, t.dtype, t.strides[2], t.strides[1], t.strides[3], group_};
  }
  // Rows of a tensor [batch, num_kv_heads, kv_len, ...].
  StackedRows kv_rows(const ConstTensor& t, int64_t head) const {
    const int64_t batch = head / p_.num_kv_heads, kv_head = head % p_.num_kv_heads;
    const int64_t offset = (batch * t.strides[0] + kv_head * t.strides[1]) * size_bytes(t.dtype);
    return {const_cast<char*>(static_cast<const char*>(t.data)) + offset, t.dtype, t.strides[2], 0, t.strides[3], 1};
  }
  Visibility visibility(int64_t head) const {
    return Visibility::of(p_.options, p_.query_len, Sequences(in_, p_).kv_len(head / p_.num_kv_heads));
  }

  // The intervals of keys that a block's rows see. Rows of weight 0 see none.
  void find_visible(int64_t head, const Block& b, const Worker& w) const {
    const Visibility v = visibility(head);
    for (int64_t r = 0; r < b.queries.rows; ++r) {
      const KeyInterval keys = v.keys_of_query((b.first_row + r) / group_);
      w.visible_begin[r] = keys.begin;
      w.visible_end[r] = keys.end;
    }
  }
  bool takes_part(const Block& b, int64_t r) const {
    return plan_.product == AttentionProduct::f64 ? static_cast<const double*>(b.queries.weight)[r] != 0
                                                  : static_cast<const float*>(b.queries.weight)[r] != 0;
  }
  void hide_absent_rows(const Block& b, const Worker& w) const {
    for (int64_t r = 0; r < b.queries.rows; ++r) {
      if (!takes_part(b, r)) w.visible_end[r] = w.visible_begin[r];
    }
  }

  void pack_block(int64_t head, int64_t index, int worker_index) const {
    const Worker w = worker(worker_index);
    const Block b = block_of(head, index);
    find_visible(head, b, w);
    PackQueries pack;
    pack.query = query_rows(in_.query, head);
    pack.out = query_rows(saved_.out, head);
    pack.grad_out = query_rows(saved_.grad_out, head);
    pack.lse = query_rows(saved_.softmax_lse, head);
    pack.max = query_rows(saved_.softmax_max, head);
    pack.sum = query_rows(saved_.softmax_sum, head);
    pack.grad_lse = query_rows(saved_.grad_lse, head);
    pack.first_row = b.first_row;
    pack.visible_begin = w.visible_begin;
    pack.visible_end = w.visible_end;
    pack.query_factor = query_factor_;
    // The scores are multiplied by the exponent scale as the kernel holds it.
    const double c =
        p_.query_dtype == DType::f64 ? exponent_scale_ : static_cast<double>(static_cast<float>(exponent_scale_));
    pack.reference_scale = c / score_scale_;
    pack.pointers = w.query_rows;
    kernels_.pack_queries(pack, layout_.sizes, b.queries);

    hide_absent_rows(b, w);
    BlockState& s = *b.state;
    s.some_begin = p_.kv_len, s.some_end = 0;
    s.all_begin = 0, s.all_end = p_.kv_len;
    for (int64_t r = 0; r < b.queries.rows; ++r) {
      s.all_begin = std::max(s.all_begin, w.visible_begin[r]);
      s.all_end = std::min(s.all_end, w.visible_end[r]);
      if (w.visible_begin[r] >= w.visible_end[r]) continue;
      s.some_begin = std::min(s.some_begin, w.visible_begin[r]);
      s.some_end = std::max(s.some_end, w.visible_end[r]);
    }
    s.tiles_done.store(0, std::memory_order_relaxed);
    if (s.some_begin >= s.some_end) finish_query(head, b);
  }

  void run_tile(int64_t head, int64_t tile_index, int worker_index) const {
    const Worker w = worker(worker_index);
    const int64_t first = tile_index * plan_.block_kv;
    const int64_t keys = std::min(plan_.block_kv, p_.kv_len - first);  // of the tensors
    GradTile tile;
    tile.first_key = first;
    tile.count = std::clamp<int64_t>(visibility(head).kv_len - first, 0, keys);
    tile.keys = w.keys;
    tile.values = w.values;
    tile.key_columns = w.key_columns;
    tile.grad_key = grads_.grad_key.data != nullptr ? w.grad_key : nullptr;
    tile.grad_value = grads_.grad_value.data != nullptr ? w.grad_value : nullptr;
    if (tile.grad_key != nullptr) std::memset(w.grad_key, 0, static_cast<size_t>(layout_.grad_key_bytes));
    if (tile.grad_value != nullptr) std::memset(w.grad_value, 0, static_cast<size_t>(layout_.grad_value_bytes));
    if (tile.count > 0) {
      pack_tile(head, w, tile);
      for (int64_t i = 0; i < layout_.blocks; ++i) meet(head, i, w, tile);
    }
    if (tile.grad_key != nullptr) {
      finish(w.grad_key, layout_.sizes.acc_stride, keys, p_.head_dim, score_scale_, first,
             kv_rows(grads_.grad_key, head));
    }
    if (tile.grad_value != nullptr) {
      finish(w.grad_value, layout_.sizes.value_acc_stride, keys, p_.value_head_dim, 1, first,
             kv_rows(grads_.grad_value, head));
    }
  }

  void pack_tile(int64_t head, const Worker& w, GradTile& tile) const {
    const auto locate = [&](const ConstTensor& t, const void** rows) {
      const StackedRows r = kv_rows(t, head);
      const char* at = static_cast<const char*>(r.data) + tile.first_key * r.seq_stride * size_bytes(t.dtype);
      for (int64_t j = 0; j < tile.count; ++j, at += r.seq_stride * size_bytes(t.dtype)) rows[j] = at;
    };
    locate(in_.key, w.key_rows);
    locate(in_.value, w.value_rows);
    PackKeys pack;
    pack.key_rows = w.key_rows;
    pack.value_rows = w.value_rows;
    pack.key_dim_stride = in_.key.strides[3];
    pack.value_dim_stride = in_.value.strides[3];
    pack.count = tile.count;
    pack.keys = w.keys;
    pack.values = w.values;
    pack.key_columns = w.key_columns;
    tile.keys_finite = kernels_.pack_keys(pack, layout_.sizes);
  }

  // One block of query rows against the tile, if it sees any of it.
  void meet(int64_t head, int64_t index, const Worker& w, const GradTile& tile) const {
    const Block b = block_of(head, index);
    BlockState& s = *b.state;
    const int64_t end = tile.first_key + tile.count;
    if (s.some_begin >= end || s.some_end <= tile.first_key) return;
    GradBlock g;
    g.sizes = layout_.sizes;
    g.queries = b.queries;
    g.exponent_scale = exponent_scale_;
    g.partial = tile.first_key < s.all_begin || end > s.all_end;
    g.visible_begin = w.visible_begin;
    g.visible_end = w.visible_end;
    g.grad_scores = w.grad_scores;
    g.probability_columns = w.probability_columns;
    g.grad_score_columns = w.grad_score_columns;
    g.scores_stride = layout_.scores_stride;
    g.raw = w.raw;
    g.prefetch = static_cast<const char*>(block_of(head, index + 1 < layout_.blocks ? index + 1 : index).queries.query);
    if (g.partial) {
      find_visible(head, b, w);
      hide_absent_rows(b, w);
    }
    kernels_.grad_tile(g, tile);
    if (grads_.grad_query.data == nullptr) return;
    const int64_t before = tile.first_key / plan_.block_kv - s.some_begin / plan_.block_kv;
    wait_for(s.tiles_done, before);
    kernels_.grad_query(g, tile);
    if (end >= s.some_end) finish_query(head, b);
    s.tiles_done.store(before + 1, std::memory_order_release);
  }

  void finish_query(int64_t head, const Block& b) const {
    if (grads_.grad_query.data == nullptr) return;
    finish(b.queries.grad_query, layout_.sizes.acc_stride, b.queries.rows, p_.head_dim, scale_, b.first_row,
           query_rows(grads_.grad_query, head));
  }
  void finish(const void* acc, int64_t acc_stride, int64_t rows, int64_t length, double factor, int64_t first_row,
              const StackedRows& out) const {
    kernels_.finish_rows({acc, rows, length, acc_stride, factor, first_row, out});
  }

  const AttentionInputs& in_;
  const AttentionSaved& saved_;
  const AttentionGradients& grads_;
  const AttentionProblem& p_;
  const AttentionBackwardPlan& plan_;
  const BackwardKernels& kernels_;
  const BackwardLayout layout_;
  const int64_t group_;  // query heads per KV head
  const int64_t rows_;   // query_len * group
  const int64_t heads_;  // (batch, KV head) pairs; `head` counts them throughout
  char* const shared_;
  double scale_, query_factor_, score_scale_, exponent_scale_;
  struct Progress {
    alignas(64) std::atomic<int64_t> packed{0};
    alignas(64) std::atomic<int64_t> tiles{0};
  };
  Progress progress_[2];  // of the waves that use buffer 0 and buffer 1
};

}  // namespace
}  // namespace attention

Status flash_attention_backward(Context& context, const AttentionInputs& inputs, const AttentionSaved& saved,
                                const AttentionGradients& gradients, const AttentionOptions& options) {
  return guarded([&]() -> Status {
    Result<AttentionBackwardProblem> problem = attention::check_backward(inputs, saved, gradients, options);
    if (!problem.ok()) return problem.status();

    Context::Impl& impl = context.impl();
    const AttentionBackwardPlan plan = plan_attention_backward(problem.value(), impl.machine);
    if (problem.value().forward.batch * problem.value().forward.num_kv_heads == 0) return {};

    Result<WorkspaceLease> lease = impl.workspaces.lease(plan.scratch_bytes(impl.pool.num_threads()));
    if (!lease.ok()) return lease.status();
    attention::BackwardCall(inputs, saved, gradients, problem.value().forward, plan, impl.machine, lease.value().data())
        .run(impl.pool);
    return {};
  });
}

}  // namespace opst

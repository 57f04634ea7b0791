// flash_attention_forward: check -> plan -> run.
//
// A task is a block of query rows of one (batch, KV head) pair against one part of its keys.
//
// Shared packed keys and values (packed_shared): heads go in waves of about 2 MB, so that packed tiles are still in
// cache when they are read (wave_loop.h).
//
// Sequences with few queries and with many (decoding beside a prompt) are two loops over tasks, each by its own plan.
#include "opst/attention.h"

#include <cmath>
#include <cstdlib>

#include "attention/call_memory.h"
#include "attention/call_rules.h"
#include "attention/check.h"
#include "attention/fill.h"
#include "attention/kernel_table.h"
#include "attention/kernels.h"
#include "attention/kv_blocks.h"
#include "attention/wave_loop.h"
#include "core/guarded.h"
#include "machine/context_impl.h"
#include "machine/interruption.h"

namespace opst {

namespace attention {

namespace {

class ForwardCall {
 public:
  ForwardCall(const AttentionInputs& inputs, const AttentionOutputs& outputs, const SequenceGroup& sequences,
              const AttentionPlan& plan, const Machine& machine, int num_workers, void* scratch,
              Interruption& interruption)
      : in_(inputs),
        out_(outputs),
        p_(sequences.problem),
        plan_(plan),
        kernels_(kernels_for(machine.isa, plan.product, p_.kv_dtype)),
        attend_(plan.kv_access == KvAccess::in_place      ? kernels_.attend_in_place
                : plan.kv_access == KvAccess::panel_pages ? kernels_.attend_pages
                                                          : kernels_.attend),
        standard_(plan.path == AttentionPath::standard ? standard_for(machine.isa, plan.product) : nullptr),
        memory_(inputs, sequences, plan, geometry_of(machine.isa, plan.product), scratch),
        rules_(inputs, p_),
        interruption_(interruption),
        num_workers_(num_workers),
        in_place_(plan.kv_access == KvAccess::in_place || plan.kv_access == KvAccess::panel_pages),
        single_tiles_(plan.path == AttentionPath::flash && !in_place_ && plan.kv_splits == 1),
        whole_rows_(plan.kv_access == KvAccess::packed_per_task) {}

  void run(ThreadPool& pool) {
    const bool shared = plan_.kv_access == KvAccess::packed_shared;
    const WaveLoop loop = {.heads = memory_.heads,
                           .heads_per_wave = plan_.heads_per_wave,
                           .packs_per_head = shared ? memory_.layout.tiles_per_head : 0,
                           .tasks_per_head = memory_.most_blocks * plan_.kv_splits,
                           .order = WaveLoop::Order::by_head};
    const auto pack = [&](int64_t head, int64_t tile, int worker) {
      if (!interruption_.requested(worker)) pack_shared_tile(head, tile, worker);
    };
    const auto attend = [&](int64_t head, int64_t task, int64_t, int worker) {
      if (head >= memory_.heads || interruption_.requested(worker)) return;
      // The last rows first: under a causal mask they see most keys, and long tasks should not come last.
      const int64_t block = memory_.blocks(head) - 1 - task / plan_.kv_splits;
      if (block >= 0) attend_block(head, block, task % plan_.kv_splits, worker);
    };
    loop.run(pool, pack, attend);
    if (plan_.kv_splits > 1 && !interruption_.happened()) {
      pool.parallel_for(memory_.heads * memory_.most_blocks, [&](int64_t task, int) {
        const int64_t head = task / memory_.most_blocks, block = task % memory_.most_blocks;
        if (block < memory_.blocks(head)) join_splits(head, block);
      });
    }
  }

 private:
  // Packs the keys of tile [first_key, first_key + count) of a head to `to`.
  void pack_keys(int64_t head, int64_t first_key, int64_t count, const CallMemory::Worker& w, char* to) const {
    memory_.kv_rows(in_.key, head).locate(first_key, count, w.key_rows);
    kernels_.pack_keys(w.key_rows, in_.key.strides[3], count, p_.head_dim, to);
  }
  // The values, behind the keys' place; true where they are finite.
  bool pack_values(int64_t head, int64_t first_key, int64_t count, const CallMemory::Worker& w, char* to) const {
    memory_.kv_rows(in_.value, head).locate(first_key, count, w.value_rows);
    return kernels_.pack_values(w.value_rows, in_.value.strides[3], count, p_.value_head_dim,
                                to + memory_.layout.key_tile_bytes);
  }
  void pack_shared_tile(int64_t head, int64_t tile, int worker) const {
    const int64_t first_key = tile * plan_.block_kv;
    const Visibility visibility = memory_.visibility(head);
    const int64_t count = std::min(plan_.block_kv, visibility.kv_len - first_key);
    if (count <= 0) return;  // a shorter sequence of the batch
    if (!visibility.may_see({first_key, first_key + count}, memory_.rows(head) / memory_.group)) return;
    char* packed = memory_.packed_tile(head, tile);
    const CallMemory::Worker w = memory_.worker(worker);
    pack_keys(head, first_key, count, w, packed);
    memory_.values_finite(head)[tile] = pack_values(head, first_key, count, w, packed);
  }

  // One block of query rows against one part of the keys.
  void attend_block(int64_t head, int64_t block, int64_t split, int worker) const {
    const CallMemory::Worker w = memory_.worker(worker);
    const Visibility visibility = memory_.visibility(head);
    const int64_t block_rows = memory_.block_rows(head), first_row = block * block_rows;
    const StackedRows queries = memory_.stacked_rows(in_.query, head);
    const bool single_tile = single_tiles_ && visibility.kv_len <= plan_.block_kv;
    QueryBlock q;
    q.rows = std::min(block_rows, memory_.rows(head) - first_row);
    q.head_dim = p_.head_dim;
    q.value_head_dim = p_.value_head_dim;
    q.query = w.query;
    q.query_stride = memory_.layout.query_stride;
    q.state = plan_.kv_splits > 1 ? memory_.split_state(head, block, split) : w.state;
    q.acc_stride = memory_.layout.acc_stride;
    q.exponent_scale = rules_.exponent_scale();
    q.scores = w.scores;
    q.scores_stride = memory_.layout.scores_stride;
    q.visible_begin = w.visible_begin;
    q.visible_end = w.visible_end;
    ScoreRules rules;
    q.rules = nullptr;
    if (const int64_t b = memory_.batch(head); rules_.any(b)) {
      rules = rules_.of_block(b, head % p_.num_kv_heads, first_row, q.rows, w.rules);
      q.rules = &rules;
    }
    if (single_tile && whole_rows_ && readable_in_place(queries)) {
      q.query_stride = queries.row_stride();
      q.query = static_cast<const char*>(queries.data) + first_row * q.query_stride * size_bytes(queries.dtype);
    } else {
      kernels_.copy_queries(queries, first_row, rules_.scale().of_query, q, w.query);
    }

    const int64_t first_key = visibility.prefix > 0 ? 0 : visibility.first_key(first_row / memory_.group);
    const int64_t start = first_key / plan_.block_kv * plan_.block_kv + split * plan_.keys_per_split;
    const KeyInterval part = {start, start + plan_.keys_per_split};
    KvBlocks visible(visibility, first_row, q.rows, memory_.group, part, plan_.block_kv, w.visible_begin,
                     w.visible_end);
    const FinishRows finish = finish_of(head, block, &q.state, 1);
    const bool at_once = single_tile && writable_in_place(finish.out);
    int64_t n = next_tiles(head, visible, q, w, at_once);
    if (at_once && n > 0) return kernels_.attend_at_once(q, w.tiles[0], finish, rows_ahead(head + num_workers_).of);
    for (kernels_.empty_state(q); n > 0; n = next_tiles(head, visible, q, w, false)) {
      if (standard_ != nullptr)
        standard_(q, w.tiles, n, memory_.score_matrix(head, block), memory_.layout.matrix_stride);
      else
        attend_(q, w.tiles, n);
    }
    if (plan_.kv_splits == 1) kernels_.finish_rows(finish);
  }

  // Rows further apart would meet in few sets of L1.
  static constexpr int64_t kNearBytes = 2048;
  bool in_accumulator_type(DType dtype) const {
    return kernels_.geometry.step == 1 && size_bytes(dtype) == kernels_.geometry.accumulator_bytes;
  }
  // Whether the product may read queries where they are.
  bool readable_in_place(const StackedRows& queries) const {
    return in_accumulator_type(queries.dtype) && rules_.scale().of_query == 1 && queries.dim_stride == 1 &&
           queries.evenly_spaced() && std::abs(queries.row_stride()) * size_bytes(queries.dtype) <= kNearBytes;
  }
  struct HeadAhead {
    RowsAhead of[3];  // keys, queries, values
  };
  // What to fetch of `head`: where all workers take heads in turn, the one that this worker takes next.
  HeadAhead rows_ahead(int64_t head) const {
    if (!plan_.fetch_ahead || head >= memory_.heads || p_.paged) return {};
    const auto rows_of = [&](const ConstTensor& t, int64_t dim) -> RowsAhead {
      const KvRows rows = memory_.kv_rows(t, head);
      if (t.strides[3] != 1) return {};
      return {rows.base, memory_.visibility(head).kv_len, dim * size_bytes(t.dtype), rows.row_bytes};
    };
    HeadAhead ahead = {{rows_of(in_.key, p_.head_dim), {}, rows_of(in_.value, p_.value_head_dim)}};
    const StackedRows queries = memory_.stacked_rows(in_.query, head);
    const int64_t size = size_bytes(queries.dtype);
    if (queries.dim_stride == 1 && queries.evenly_spaced()) {
      ahead.of[1] = {static_cast<const char*>(queries.data), memory_.rows(head), p_.head_dim * size,
                     queries.row_stride() * size};
    }
    return ahead;
  }
  // Whether the product may write outputs.
  bool writable_in_place(const StackedRows& out) const {
    return in_accumulator_type(out.dtype) && out.dim_stride == 1 && out.evenly_spaced() &&
           p_.value_head_dim % kernels_.geometry.lanes == 0;
  }
  // Whether a block that is attended at once may read values where they are. Where some are hidden its product must not
  // meet an Inf among them; t.values_finite tells.
  bool values_in_place(int64_t head, const QueryBlock& q, const CallMemory::Worker& w, KvTile& t) const {
    const int64_t stride = in_.value.strides[2];
    if (!whole_rows_ || p_.paged || !in_accumulator_type(p_.kv_dtype) || in_.value.strides[3] != 1 || stride <= 0 ||
        stride * size_bytes(p_.kv_dtype) > kNearBytes) {
      return false;
    }
    if (!t.partial && (q.rules == nullptr || !q.rules->hides())) return true;
    memory_.kv_rows(in_.value, head).locate(t.first_key, t.count, w.value_rows);
    return t.values_finite = kernels_.values_finite(w.value_rows, t.count, p_.value_head_dim);
  }

  // Describes up to tiles_per_task of the visible tiles that are left; with packed_per_task packs them, too. Returns
  // how many.
  int64_t next_tiles(int64_t head, KvBlocks& visible, const QueryBlock& q, const CallMemory::Worker& w,
                     bool at_once) const {
    Arena arena = w.tiles_memory;
    const KvRows keys = in_place_ ? memory_.kv_rows(in_.key, head) : KvRows{};
    const KvRows values = in_place_ ? memory_.kv_rows(in_.value, head) : KvRows{};
    int64_t n = 0, pointers = 0;
    for (KvBlocks::Tile tile; n < memory_.layout.tiles_per_task && visible.next(&tile); ++n) {
      KvTile& t = w.tiles[n];
      t = {.first_key = tile.first_key, .count = tile.count, .partial = tile.partial};
      if (in_place_) {
        t.key_rows = w.key_rows + pointers;
        t.value_rows = w.value_rows + pointers;
        locate_rows(keys, t, w.key_rows + pointers);
        pointers += locate_rows(values, t, w.value_rows + pointers);
      } else if (plan_.kv_access == KvAccess::packed_shared) {
        const int64_t index = tile.first_key / plan_.block_kv;
        const char* packed = memory_.packed_tile(head, index);
        t.keys = packed;
        t.values = packed + memory_.layout.key_tile_bytes;
        t.values_finite = memory_.values_finite(head)[index];
      } else {
        pack_tile(head, q, w, at_once, arena, t);
      }
    }
    for (int64_t i = n - 1, ahead = 0; in_place_ && i >= 0; --i) {
      w.tiles[i].rows_ahead = ahead;
      ahead += w.tiles[i].count;
    }
    return n;
  }

  void pack_tile(int64_t head, const QueryBlock& q, const CallMemory::Worker& w, bool at_once, Arena& arena,
                 KvTile& t) const {
    char* packed =
        static_cast<char*>(arena.take_bytes(memory_.layout.key_tile_bytes + memory_.layout.value_tile_bytes));
    pack_keys(head, t.first_key, t.count, w, packed);
    t.keys = packed;
    if (at_once && values_in_place(head, q, w, t)) {
      t.values = memory_.kv_rows(in_.value, head).row(t.first_key);
      t.values_stride = static_cast<int32_t>(in_.value.strides[2]);
    } else {
      t.values_finite = pack_values(head, t.first_key, t.count, w, packed);
      t.values = packed + memory_.layout.key_tile_bytes;
    }
  }

  // Pointers to the rows of a tile, or to every 32 of them where pages are panels; returns how many. Those of all tiles
  // of a kernel's call are one array, so that it may look ahead from one tile to the next.
  int64_t locate_rows(const KvRows& rows, const KvTile& t, const void** pointers) const {
    const bool panels = plan_.kv_access == KvAccess::panel_pages;
    if (panels)
      rows.locate_groups(t.first_key, t.count, kPanelRows, pointers);
    else
      rows.locate(t.first_key, t.count, pointers);
    return panels ? ceil_div(t.count, kPanelRows) : t.count;
  }

  void join_splits(int64_t head, int64_t block) const {
    RowState parts[kMaxSplits];
    for (int64_t split = 0; split < plan_.kv_splits; ++split) parts[split] = memory_.split_state(head, block, split);
    kernels_.finish_rows(finish_of(head, block, parts, plan_.kv_splits));
  }

  FinishRows finish_of(int64_t head, int64_t block, const RowState* parts, int64_t num_parts) const {
    FinishRows f;
    f.parts = parts;
    f.num_parts = num_parts;
    f.first_row = block * memory_.block_rows(head);
    f.rows = std::min(memory_.block_rows(head), memory_.rows(head) - f.first_row);
    f.value_head_dim = p_.value_head_dim;
    f.acc_stride = memory_.layout.acc_stride;
    f.exponent_scale = rules_.exponent_scale();
    f.score_scale = rules_.score_scale();
    f.keep_prob = rules_.keep_prob();
    f.sinks = nullptr;
    f.sinks_stride = 0;
    if (p_.has_sinks) {
      const int64_t first_head = head % p_.num_kv_heads * memory_.group;
      f.sinks_stride = in_.sinks.strides[0];
      f.sinks = static_cast<const char*>(in_.sinks.data) + first_head * f.sinks_stride * size_bytes(in_.sinks.dtype);
    }
    f.out = memory_.stacked_rows(out_.out, head);
    f.lse = memory_.stacked_rows(out_.softmax_lse, head);
    f.max = memory_.stacked_rows(out_.softmax_max, head);
    f.sum = memory_.stacked_rows(out_.softmax_sum, head);
    return f;
  }

  static constexpr int64_t kMaxSplits = 16;  // plan.cc: kWantedTasks

  const AttentionInputs& in_;
  const AttentionOutputs& out_;
  const AttentionProblem& p_;
  const AttentionPlan& plan_;
  const Kernels& kernels_;
  decltype(Kernels::attend) const attend_;  // by access to keys and values
  const AttendStandard standard_;           // null: the flash path
  const CallMemory memory_;
  const CallRules rules_;
  Interruption& interruption_;
  const int num_workers_;
  const bool in_place_;
  const bool single_tiles_;  // unless a head has more keys than a tile
  // All rows of a head are one block, whose queries and values may stay in the tensors. Of several blocks the queries
  // are no longer in L2 when their turn comes (512 rows of head_dim 64, 8 heads: 0.95 times as fast).
  const bool whole_rows_;
};

// Rows behind the last sequence are rows that see no key.
void clear_rows_behind(const ConstTensor& cu_seqlens, int64_t batch, const AttentionOutputs& out, ThreadPool& pool) {
  const int64_t first = index_at(cu_seqlens, batch);
  fill_rows(out.out, first, 0, pool);
  fill_rows(out.softmax_lse, first, -HUGE_VAL, pool);
  fill_rows(out.softmax_max, first, -HUGE_VAL, pool);
  fill_rows(out.softmax_sum, first, 0, pool);
}

}  // namespace
}  // namespace attention

Status flash_attention_forward(Context& context, const AttentionInputs& inputs, const AttentionOutputs& outputs,
                               const AttentionOptions& options) {
  return guarded([&]() -> Status {
    Result<AttentionProblem> problem = attention::check_forward(inputs, outputs, options);
    if (!problem.ok()) return problem.status();

    Context::Impl& impl = context.impl();
    const AttentionInputs in = attention::uniform_shapes(inputs, problem.value());
    const AttentionOutputs out = attention::uniform_shapes(outputs, problem.value());
    const attention::SequenceGroups groups =
        attention::sequence_groups(in, problem.value(), attention::geometry_of(impl.machine.isa, {}).tile_rows);
    AttentionPlan plans[2];
    int64_t scratch_bytes = 0;
    for (int g = 0; g < groups.count; ++g) {
      plans[g] = plan_attention(groups.group[g].problem, impl.machine);
      scratch_bytes = std::max(scratch_bytes, plans[g].scratch_bytes(impl.pool.num_threads()));
    }
    Result<WorkspaceLease> lease = impl.workspaces.lease(scratch_bytes);
    if (!lease.ok()) return lease.status();
    Interruption interruption(impl.interrupted, attention::multiply_adds(problem.value()));
    for (int g = 0; g < groups.count; ++g) {
      if (plans[g].num_tasks == 0) continue;
      lease.value().renew();
      attention::ForwardCall(in, out, groups.group[g], plans[g], impl.machine, impl.pool.num_threads(),
                             lease.value().data(), interruption)
          .run(impl.pool);
    }
    if (interruption.happened()) return interruption.status("flash_attention_forward");
    if (problem.value().varlen_q) {
      attention::clear_rows_behind(inputs.cu_seqlens_q, problem.value().batch, out, impl.pool);
    }
    return {};
  });
}

}  // namespace opst

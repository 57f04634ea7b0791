// flash_attention_forward: check -> plan -> run.
//
// A task is a block of query rows of one (batch, KV head) pair against one part of its keys. With packed_shared heads
// go in waves of about 2 MB, whose packed tiles are in cache when they are read (wave_loop.h).
// Where the keys of a block are split, the task that finishes its last part joins them.
// Sequences of different kinds (decoding beside a prompt) are loops over tasks of their own, each by its own plan.
#include "opst/attention.h"

#include <atomic>
#include <cmath>
#include <cstdlib>

#include "attention/call_rules.h"
#include "attention/check.h"
#include "attention/prefix_call.h"
#include "core/guarded.h"
#include "machine/context_impl.h"
#include "machine/interruption.h"

namespace opst {

namespace attention {
namespace {

class ForwardCall : TileRows {
 public:
  ForwardCall(const AttentionInputs& inputs, const AttentionOutputs& outputs, const SequenceGroup& sequence_group,
              const AttentionPlan& group_plan, const PrefixSums* prefix, Context::Impl& impl, char* memory,
              Interruption& interruption)
      : TileRows{{{inputs, sequence_group.problem},
                  sequence_group,
                  group_plan,
                  geometry_of(impl.machine.isa, group_plan.product),
                  memory},
                 kernels_for(impl.machine.isa, group_plan.product, sequence_group.problem.kv_dtype,
                             in_groups(sequence_group.problem))},
        out_(outputs),
        prefix_(prefix),
        isa_(impl.machine.isa),
        pool_(impl.pool),
        interruption_(interruption) {}

  void run() {
    const bool shared = plan.kv_access == KvAccess::packed_shared;
    // Where heads take turns, those of a task are counted as one; all of them are of the same sequence.
    const int64_t turns = plan.heads_in_turn;
    const WaveLoop loop = {.heads = heads / turns,
                           .heads_per_wave = plan.heads_per_wave / turns,
                           .packs_per_head = shared ? layout.tiles_per_head : 0,
                           .tasks_per_head = std::max(layout.blocks, plan.parts_per_head),
                           .order = WaveLoop::Order::by_head};
    const auto pack = [&](int64_t head, int64_t tile, int index) {
      if (!interruption_.requested(index)) pack_shared_tile(head, tile, index);
    };
    const auto attend_task = [&](int64_t head_of_loop, int64_t task, int64_t, int index) {
      const int64_t head = head_of_loop * turns;
      if (head >= heads || interruption_.requested(index)) return;
      const int64_t num_blocks = blocks(head);
      if (num_blocks == 0) return;
      // The last rows first: under a causal mask they see most keys, and long tasks should not come last.
      const KeySplits splits = splits_of(head, num_blocks);
      const int64_t block = num_blocks - 1 - task / splits.count;
      if (block < 0) return;
      if (turns > 1)
        attend_in_turn(head, block, task % splits.count, splits, worker(index));
      else
        attend_block(head, block, task % splits.count, splits, worker(index));
      for (int64_t i = 0; splits.count > 1 && i < turns; ++i) finish_part(head + i, block, splits.count);
    };
    if (layout.marks_seen) {
      pool_.parallel_for(heads, [&](int64_t head, int) {
        const int64_t queries = rows(head) / group, kv_len = sequences.kv_len(batch(head));
        if (queries > 0) mark_seen_tiles(head_mask(head), kv_len, queries, plan.block_kv, seen_tiles(head));
      });
    }
    if (layout.parts_done_bytes() > 0) std::fill_n(&parts_done(0, 0), heads * layout.blocks, 0);
    loop.run(pool_, pack, attend_task);
  }

 private:
  void pack_shared_tile(int64_t head, int64_t tile, int index) const {
    const int64_t first_key = tile * plan.block_kv;
    const Visibility visible = visibility(head);
    const int64_t count = std::min(plan.block_kv, visible.kv_len - first_key);
    if (count <= 0) return;  // a shorter sequence of the batch
    if (!visible.may_see({first_key, first_key + count}, rows(head) / group)) return;
    if (layout.marks_seen && !seen_tiles(head)[tile]) return;
    if (first_key < shared_keys(head)) return;
    TileRows::pack_shared_tile(head, {first_key, first_key + count}, worker(index));
  }

  // The last part of a block's keys joins all.
  void finish_part(int64_t head, int64_t block, int64_t count) const {
    std::atomic_ref<int32_t> done(parts_done(head, block));
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
    RowState parts[kMostParts];
    const int64_t before = shared_parts(head, block * block_rows(head), parts);
    for (int64_t split = 0; split < count; ++split) parts[before + split] = split_state(head, block * count + split);
    kernels.finish_rows(finish_of(head, block, parts, before + count));
  }

  // What other sequences share of a head's keys: how many, and the sums of rows from first_row on over them, which are
  // the first parts of these rows.
  static constexpr int64_t kMostParts = 2 * kWantedTasks;
  int64_t shared_keys(int64_t head) const { return prefix_ == nullptr ? 0 : prefix_->keys_of(batch(head)); }
  int64_t shared_parts(int64_t head, int64_t first_row, RowState (&parts)[kMostParts]) const {
    if (shared_keys(head) == 0) return 0;
    const int64_t count = prefix_->num_parts();
    for (int64_t i = 0; i < count; ++i) parts[i] = prefix_->state(batch(head), kv_head(head), first_row, i);
    return count;
  }

  // One block of query rows against one part of the keys.
  void attend_block(int64_t head, int64_t block, int64_t split, const KeySplits& splits, const Worker& w) const {
    const int64_t first_row = block * block_rows(head);
    // With a block mask or a tree a tile may come more than once.
    const bool walks = p.block_mask || tree_of(head);
    const bool single_tile = single_tiles_ && !walks && splits.count == 1 && visibility(head).kv_len <= plan.block_kv &&
                             shared_keys(head) == 0;
    ScoreRules rules;
    QueryBlock q = block_of(head, block, split, splits, rules, w);
    if (const StackedRows queries = stacked_rows(in.query, head);
        single_tile && whole_rows_ && readable_in_place(queries)) {
      q.query_stride = queries.row_stride();
      q.query = static_cast<const char*>(queries.data) + first_row * q.query_stride * size_bytes(queries.dtype);
    } else {
      copy_queries(*this, head, first_row, rules_.scale().of_query, q, w.query);
    }

    RowState parts[kMostParts];
    const FinishRows finish = finish_unsplit(head, block, q, parts);
    if (p.sparse_indices) {
      SelectedKeys keys = selected_keys(head, first_row, q.rows, split * splits.keys, splits.keys, w);
      return attend_list(head, block, keys, q, w, splits.count == 1 ? &finish : nullptr, false);
    }
    KvBlocks tiles = key_tiles(head, first_row, q.rows, split, splits, w);
    attend_list(head, block, tiles, q, w, splits.count == 1 ? &finish : nullptr,
                single_tile && writable_in_place(finish.out));
  }
  // The same for heads_in_turn heads from `head` on, a tile for each, then the next tile.
  void attend_in_turn(int64_t head, int64_t block, int64_t split, const KeySplits& splits, const Worker& w) const {
    const int64_t turns = plan.heads_in_turn, first_row = block * block_rows(head);
    QueryBlock q[kMostInTurn];
    ScoreRules rules[kMostInTurn];
    for (int64_t i = 0; i < turns; ++i) {
      const Worker own = layout.worker_of(w, i);
      q[i] = block_of(head + i, block, split, splits, rules[i], own);
      copy_queries(*this, head + i, first_row, rules_.scale().of_query, q[i], own.query);
      kernels.empty_state(q[i]);
    }
    KvBlocks tiles = key_tiles(head, first_row, q[0].rows, split, splits, w);
    bool more = next_tile_in_turn(head, tiles, w, 0);
    for (int64_t slot = 0; more; slot = 1 - slot) {
      KvTile *const now = w.tiles + slot * turns, *const next = w.tiles + (1 - slot) * turns;
      more = next_tile_in_turn(head, tiles, w, 1 - slot);
      if (more) fetch_next(now, next);
      for (int64_t i = 0; i < turns; ++i) attend(q[i], &now[i], 1);
    }
    for (int64_t i = 0; splits.count == 1 && i < turns; ++i) {
      RowState parts[kMostParts];
      kernels.finish_rows(finish_unsplit(head + i, block, q[i], parts));
    }
  }

  // All of a block but its queries; `rules`: room for them.
  QueryBlock block_of(int64_t head, int64_t block, int64_t split, const KeySplits& splits, ScoreRules& rules,
                      const Worker& w) const {
    const int64_t most_rows = block_rows(head), first_row = block * most_rows;
    const RowState state = splits.count > 1 ? split_state(head, block * splits.count + split) : w.state;
    QueryBlock q = query_block(std::min(most_rows, rows(head) - first_row), state, rules_.exponent_scale(), w);
    if (const int64_t b = batch(head); rules_.any(b)) {
      rules = rules_.of_block(b, kv_head(head), first_row, q.rows, w.rules);
      q.rules = &rules;
    }
    return q;
  }
  // The tiles of a part of the keys that a block sees by structure, a mask or a tree.
  KvBlocks key_tiles(int64_t head, int64_t first_row, int64_t rows_of_block, int64_t split, const KeySplits& splits,
                     const Worker& w) const {
    const Visibility visible = visibility(head);
    const MaskedRows masked = masked_rows(head, split, splits, w);
    const int64_t first_key = visible.prefix > 0 ? 0 : visible.first_key(first_row / group);
    const int64_t start = first_key / plan.block_kv * plan.block_kv + split * splits.keys;
    KeyInterval part = {start, start + splits.keys};
    if (p.block_mask) part = {0, visible.kv_len};
    part.begin = std::clamp(shared_keys(head), part.begin, part.end);  // where it begins behind shared keys
    return {visible,         first_row,     rows_of_block,
            group,           part,          plan.block_kv,
            w.visible_begin, w.visible_end, p.block_mask || masked.tree ? &masked : nullptr};
  }
  // Of a block whose keys are not split, but for those that sequences share; `parts`: room.
  FinishRows finish_unsplit(int64_t head, int64_t block, const QueryBlock& q, RowState (&parts)[kMostParts]) const {
    const int64_t before = shared_parts(head, block * block_rows(head), parts);
    parts[before] = q.state;
    return finish_of(head, block, parts, before + 1);
  }

  // Against the tiles of a list, KvBlocks or SelectedKeys. `finish`: null where other parts follow.
  template <class List>
  void attend_list(int64_t head, int64_t block, List& tiles, const QueryBlock& q, const Worker& w,
                   const FinishRows* finish, bool at_once) const {
    int64_t n = next_tiles(head, tiles, q, w, at_once);
    if (at_once && n > 0) return kernels.attend_at_once(q, w.tiles[0], *finish, rows_ahead(head + num_workers_).of);
    for (kernels.empty_state(q); n > 0; n = next_tiles(head, tiles, q, w, false)) {
      if (standard_ != nullptr)
        standard_(q, w.tiles, n, score_matrix(head, block), layout.matrix_stride);
      else
        attend(q, w.tiles, n);
    }
    if (finish != nullptr) kernels.finish_rows(*finish);
  }

  // Keys [start, start + keys) of the list.
  SelectedKeys selected_keys(int64_t head, int64_t first_row, int64_t rows_of_block, int64_t start, int64_t keys,
                             const Worker& w) const {
    const bool pages = plan.kv_access == KvAccess::panel_pages;
    const int64_t query = first_row / group;
    Visibility visible = visibility(head);
    return {index_list(head, query),
            visible,
            query,
            {start, start + keys},
            {.most_keys = plan.block_kv,
             .by_runs = pages || reads_positions(p),
             .key_step = pages ? kPanelRows : 1,
             .runs = w.runs,
             .rows = rows_of_block}};
  }

  // Splits of a block mask's keys are counted in tiles that the block sees.
  MaskedRows masked_rows(int64_t head, int64_t split, const KeySplits& splits, const Worker& w) const {
    const TreeRows tree = tree_of(head);
    if (!p.block_mask && !tree) return {};
    const bool whole_tiles = plan.kv_access == KvAccess::packed_shared || standard_ != nullptr;
    MaskedRows masked = {{}, w.cursors, whole_tiles ? plan.block_kv : 1};
    masked.tree = tree;
    if (plan.kv_access == KvAccess::panel_pages) masked.key_step = kPanelRows;
    if (!p.block_mask) return masked;
    masked.mask = head_mask(head);
    if (splits.count == 1) return masked;
    masked.num_tiles = splits.keys / plan.block_kv;
    masked.first_tile = split * masked.num_tiles;
    return masked;
  }

  // Rows further apart would meet in few sets of L1.
  static constexpr int64_t kNearBytes = 2048;
  bool in_accumulator_type(DType dtype) const {
    return geometry.step == 1 && size_bytes(dtype) == geometry.accumulator_bytes;
  }
  // Whether the product may read queries where they are.
  bool readable_in_place(const StackedRows& queries) const {
    return p.rope_dim == 0 && in_accumulator_type(queries.dtype) && rules_.scale().of_query == 1 &&
           queries.dim_stride == 1 && queries.evenly_spaced() &&
           std::abs(queries.row_stride()) * size_bytes(queries.dtype) <= kNearBytes;
  }
  // Whether the product may write outputs.
  bool writable_in_place(const StackedRows& out) const {
    return in_accumulator_type(out.dtype) && out.dim_stride == 1 && out.evenly_spaced() &&
           p.value_head_dim % geometry.lanes == 0;
  }
  // Whether a block that is attended at once may read values where they are. Where some are hidden its product must not
  // meet an Inf among them; t.values_finite tells.
  bool values_in_place(int64_t head, const QueryBlock& q, const Worker& w, KvTile& t) const {
    const int64_t stride = in.value.strides[2];
    if (!whole_rows_ || p.paged || !in_accumulator_type(p.kv_dtype) || in.value.strides[3] != 1 || stride <= 0 ||
        stride * size_bytes(p.kv_dtype) > kNearBytes) {
      return false;
    }
    if (!t.partial && (q.rules == nullptr || !q.rules->hides())) return true;
    kv_rows(in.value, head).locate(t.first_key, t.count, w.value_rows);
    return t.values_finite = kernels.values_finite(w.value_rows, t.count, p.value_head_dim);
  }

  struct HeadAhead {
    RowsAhead of[3];  // keys, queries, values
  };
  // What to fetch of `head`: where all workers take heads in turn, the one that this worker takes next.
  HeadAhead rows_ahead(int64_t head) const {
    if (!plan.fetch_ahead || head >= heads || p.paged || p.rope_dim > 0) return {};
    const auto rows_of = [&](const ConstTensor& t, int64_t dim) -> RowsAhead {
      if (t.strides[3] != 1) return {};
      const KvRows kv = kv_rows(t, head);
      return {kv.base, visibility(head).kv_len, dim * size_bytes(t.dtype), kv.row_bytes};
    };
    HeadAhead ahead = {{rows_of(in.key, p.head_dim), {}, rows_of(in.value, p.value_head_dim)}};
    const StackedRows queries = stacked_rows(in.query, head);
    const int64_t size = size_bytes(queries.dtype);
    if (queries.dim_stride == 1 && queries.evenly_spaced()) {
      ahead.of[1] = {static_cast<const char*>(queries.data), rows(head), p.head_dim * size,
                     queries.row_stride() * size};
    }
    return ahead;
  }

  // As TileRows::next_tiles; a tile that is attended at once may leave its values where they are.
  template <class List>
  int64_t next_tiles(int64_t head, List& tiles, const QueryBlock& q, const Worker& w, bool at_once) const {
    return TileRows::next_tiles(head, tiles, w, [&](Runs runs, char* packed, KvTile& t) {
      if (!at_once || !values_in_place(head, q, w, t)) return pack_own_tile(head, runs, w, packed, t);
      pack_keys(head, runs, t.count, w, packed);
      t.keys = packed;
      t.values = kv_rows(in.value, head).row(t.first_key);
      t.values_stride = static_cast<int32_t>(in.value.strides[2]);
    });
  }
  FinishRows finish_of(int64_t head, int64_t block, const RowState* parts, int64_t num_parts) const {
    const int64_t first_row = block * block_rows(head);
    const int64_t sinks_offset = in.sinks ? query_head(head, 0) * in.sinks.strides[0] * size_bytes(in.sinks.dtype) : 0;
    return {.parts = parts,
            .num_parts = num_parts,
            .rows = std::min(block_rows(head), rows(head) - first_row),
            .value_head_dim = p.value_head_dim,
            .acc_stride = layout.acc_stride,
            .exponent_scale = rules_.exponent_scale(),
            .score_scale = rules_.score_scale(),
            .keep_prob = rules_.keep_prob(),
            .sinks = static_cast<const char*>(in.sinks.data) + sinks_offset,
            .sinks_stride = in.sinks.strides[0],
            .first_row = first_row,
            .out = stacked_rows(out_.out, head),
            .lse = stacked_rows(out_.softmax_lse, head),
            .max = stacked_rows(out_.softmax_max, head),
            .sum = stacked_rows(out_.softmax_sum, head)};
  }

  const AttentionOutputs& out_;
  const PrefixSums* const prefix_;  // null: no sequences share keys
  const Isa isa_;
  ThreadPool& pool_;
  Interruption& interruption_;
  const int num_workers_ = pool_.num_threads();
  // Null: the flash path.
  const AttendStandard standard_ = plan.path == AttentionPath::standard ? standard_for(isa_, plan.product) : nullptr;
  const CallRules rules_{in, p};
  // Unless a head has more keys than a tile.
  const bool single_tiles_ = plan.path == AttentionPath::flash && !in_place;
  // All rows of a head are one block, whose queries and values may stay in the tensors. Of several blocks the queries
  // are no longer in L2 when their turn comes (512 rows of head_dim 64, 8 heads: 0.95 times as fast).
  const bool whole_rows_ = plan.kv_access == KvAccess::packed_per_task;
};

// The sequences of a group, before which come the keys that they share.
void run_group(const AttentionInputs& in, const AttentionOutputs& out, const SequenceGroup& chosen,
               const AttentionPlan& plan, const SharedPrefixPlan& shared, Context::Impl& impl,
               const WorkspaceLease& lease, Interruption& interruption) {
  if (shared.groups == 0) {
    const auto memory = static_cast<char*>(lease.data());
    return ForwardCall(in, out, chosen, plan, nullptr, impl, memory, interruption).run();
  }
  const AttentionProblem& p = chosen.problem;
  const SequenceGroup keys = {prefix_problem(p)};
  PrefixSums sums(p, shared.prefix, geometry_of(impl.machine.isa, shared.prefix.product));
  Arena arena(lease.data(), shared.scratch_bytes_sums);
  sums.take(arena);
  sums.find(SharedPrefixes(in, p, chosen), Sequences(in, p), plan);
  const auto memory = static_cast<char*>(lease.data()) + shared.scratch_bytes_sums;
  PrefixCall(in, p, keys, shared.prefix, sums, impl, memory, interruption).run();
  lease.renew(shared.scratch_bytes_sums);
  ForwardCall(in, out, chosen, plan, &sums, impl, memory, interruption).run();
}

}  // namespace
}  // namespace attention

Status flash_attention_forward(Context& context, const AttentionInputs& inputs, const AttentionOutputs& outputs,
                               const AttentionOptions& options) {
  return guarded([&]() -> Status {
    using namespace attention;
    const Result<AttentionProblem> problem = check_forward(inputs, outputs, options);
    if (!problem.ok()) return problem.status();

    Context::Impl& impl = context.impl();
    const AttentionProblem& p = problem.value();
    const AttentionInputs in = uniform_shapes(inputs, p);
    const AttentionOutputs out = uniform_shapes(outputs, p);
    SequenceGroups groups = sequence_groups(in, p, sequence_kinds(p, impl.machine));
    AttentionPlan plans[SequenceKinds::kCount];
    SharedPrefixPlan prefixes[SequenceKinds::kCount];
    int64_t scratch_bytes = 0;
    for (int g = 0; g < groups.count; ++g) {
      plans[g] = plan_attention(groups.group[g].problem, impl.machine);
      if (p.shared_prefix.groups > 0) prefixes[g] = share_prefix(in, groups.group[g], impl.machine);
      scratch_bytes = std::max(scratch_bytes, prefixes[g].scratch_bytes(plans[g], impl.pool.num_threads()));
    }
    const bool reads_scales = (p.key_groups > 0 || p.value_groups > 0) && scratch_bytes > 0;
    scratch_bytes = std::max(scratch_bytes, index_check_bytes(p, impl.pool.num_threads()));
    Result<WorkspaceLease> lease = impl.workspaces.lease(scratch_bytes);
    if (!lease.ok()) return lease.status();
    if (p.sparse_indices) {
      const Status status = check_indices("flash_attention_forward", in, p, impl.pool, lease.value().data());
      if (!status.ok()) return status;
    }
    if (reads_scales) {
      const Status status = check_scales("flash_attention_forward", in, p, impl.pool);
      if (!status.ok()) return status;
    }
    Interruption interruption(impl.interrupted, multiply_adds(p));
    for (int g = 0; g < groups.count; ++g) {
      if (plans[g].num_tasks == 0) continue;
      lease.value().renew();
      run_group(in, out, groups.group[g], plans[g], prefixes[g], impl, lease.value(), interruption);
    }
    if (interruption.happened()) return interruption.status("flash_attention_forward");
    if (p.varlen_q) {  // rows behind the last sequence are rows that see no key
      const int64_t end = index_at(in.cu_seqlens_q, p.batch);
      fill_rows(out.out, end, 0, impl.pool);
      fill_rows(out.softmax_lse, end, -HUGE_VAL, impl.pool);
      fill_rows(out.softmax_max, end, -HUGE_VAL, impl.pool);
      fill_rows(out.softmax_sum, end, 0, impl.pool);
    }
    return {};
  });
}

}  // namespace opst

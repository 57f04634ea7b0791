// lightning_indexer: check -> plan -> run.
//
// A task is a block of queries of one (batch, key head) pair against one part of its keys, tile by tile: score_tile
// (indexer_isa.cc) appends the keys above each query's threshold to its candidates, and where their room ends the best
// are kept and the threshold rises. Packed keys are shared by the blocks of a head, in waves (wave_loop.h). Where keys
// are split, a second loop joins the candidates of the parts.
#include "attention/indexer.h"

#include <cmath>

#include "attention/call_heads.h"
#include "attention/candidates.h"
#include "attention/check.h"
#include "attention/wave_loop.h"
#include "core/elements.h"
#include "core/guarded.h"
#include "machine/context_impl.h"
#include "machine/interruption.h"
#include "opst/lightning_indexer.h"

namespace opst {

namespace attention {
namespace {

// In the shapes of a call without varlen (sequences.h), heads before queries.
struct IndexerTensors {
  AttentionInputs inputs;
  ConstTensor weights;        // [batch, num_heads, query_len]
  ConstTensor query_lengths;  // [batch], or without data
  Tensor indices, values;     // [batch, num_kv_heads, query_len, count]

  IndexerTensors(const LightningIndexerInputs& in, const LightningIndexerOutputs& out, const AttentionProblem& p)
      : inputs(uniform_shapes(attention_inputs(in), p)),
        weights(uniform_shape(p.varlen_q ? in.weights.transposed(0, 1) : in.weights, p.varlen_q)),
        query_lengths(in.query_lengths),
        indices(selected(out.indices, p.varlen_q)),
        values(out.values ? selected(out.values, p.varlen_q) : Tensor{}) {}

 private:
  static Tensor selected(const Tensor& t, bool varlen) {
    return uniform_shape(varlen ? t : t.transposed(1, 2), varlen);
  }
};

// What the call writes. A plan is not needed: without anything to select there is none.
class IndexerRows : protected CallHeads {
 public:
  IndexerRows(const IndexerTensors& tensors, const IndexerCheck& call)
      : CallHeads{tensors.inputs, call.attention}, tensors_(tensors), problem_(call.problem) {}

  // Rows that are no query of a sequence see no key.
  void write_other_rows(ThreadPool& pool) const {
    if (!p.varlen_q && !tensors_.query_lengths) return;
    const int64_t rows = tensors_.indices.shape[2], num_heads = p.num_kv_heads;
    for (int64_t b = 0; b < (p.varlen_q ? 1 : p.batch); ++b) {
      const int64_t first = p.varlen_q ? index_at(in.cu_seqlens_q, p.batch) : query_len(b);
      pool.for_each((rows - first) * num_heads, kRowsPerTask, [&](int64_t i, int) {
        write_row(b, i % num_heads, first + i / num_heads, no_candidates(nullptr));
      });
    }
  }

 protected:
  static constexpr int64_t kRowsPerTask = 64;

  int64_t query_len(int64_t b) const {
    return tensors_.query_lengths ? index_at(tensors_.query_lengths, b) : sequences.query_len(b);
  }
  // Of varlen calls, `row` counts the rows of all sequences, and strides[0] is 0.
  void write_row(int64_t b, int64_t kv_head, int64_t row, const Candidates& sorted) const {
    const auto start = [&](const Tensor& t) { return b * t.strides[0] + kv_head * t.strides[1] + row * t.strides[2]; };
    const Tensor &indices = tensors_.indices, &values = tensors_.values;
    auto* const out = static_cast<int32_t*>(indices.data) + start(indices);
    for (int64_t j = 0; j < problem_.count; ++j) {
      const bool there = j < sorted.count;
      out[j * indices.strides[3]] = there ? static_cast<int32_t>(key_of(sorted.words[j])) : -1;
      if (!values) continue;
      store_element(values, start(values) + j * values.strides[3], there ? score_of(sorted.words[j]) : -HUGE_VALF);
    }
  }

  const IndexerTensors& tensors_;
  const LightningIndexerProblem& problem_;
};

class IndexerCall : IndexerRows {
 public:
  IndexerCall(const IndexerTensors& tensors, const IndexerCheck& call, const LightningIndexerPlan& plan,
              Context::Impl& impl, void* scratch, Interruption& interruption)
      : IndexerRows(tensors, call),
        plan_(plan),
        geometry_(geometry_of(impl.machine.isa, plan.product)),
        packing_(kernels_for(impl.machine.isa, plan.product, p.kv_dtype)),
        score_tile_(score_tile_for(impl.machine.isa, plan.product)),
        scratch_(static_cast<char*>(scratch)),
        pool_(impl.pool),
        interruption_(interruption) {}

  void run() const {
    const WaveLoop loop = {.heads = heads,
                           .heads_per_wave = plan_.heads_per_wave,
                           .packs_per_head = layout_.shared ? layout_.tiles_per_head : 0,
                           .tasks_per_head = layout_.blocks * plan_.kv_splits,
                           .order = WaveLoop::Order::by_head};
    const auto pack = [&](int64_t head, int64_t tile, int index) {
      if (!interruption_.requested(index)) pack_shared_tile(head, tile, worker(index));
    };
    const auto select = [&](int64_t head, int64_t task, int64_t, int index) {
      if (head >= heads || interruption_.requested(index)) return;
      // The last queries first: under a causal mask they see most keys, and long tasks should not come last.
      const int64_t block = ceil_div(query_len(batch(head)), plan_.block_q) - 1 - task / plan_.kv_splits;
      if (block >= 0) select_block(head, block, task % plan_.kv_splits, worker(index));
    };
    loop.run(pool_, pack, select);
    if (plan_.kv_splits > 1 && !interruption_.happened()) join_parts();
  }

 private:
  using Worker = IndexerLayout::Worker;
  using Selection = IndexerLayout::Selection;

  Visibility seen(int64_t head) const {
    return Visibility::of(p.options, query_len(batch(head)), sequences.kv_len(batch(head)));
  }

  Worker worker(int index) const {
    const int64_t bytes = plan_.scratch_bytes_per_worker;
    Arena arena(scratch_ + plan_.scratch_bytes_shared + index * bytes, bytes);
    return layout_.take_worker(arena);
  }
  // The head's place in the buffer of its wave; waves take the two buffers in turn.
  char* shared_head(int64_t head) const {
    return scratch_ + head % (2 * plan_.heads_per_wave) * layout_.shared_head_bytes;
  }
  char* packed_tile(int64_t head, int64_t first_key) const {
    return shared_head(head) + first_key / plan_.block_kv * layout_.tile_bytes;
  }
  // Where the keys are split: the candidates of one part.
  Selection selection(int64_t head, int64_t block, int64_t split) const {
    const int64_t index = block * plan_.kv_splits + split, bytes = layout_.selection_bytes;
    Arena arena(shared_head(head) + layout_.packed_head_bytes + index * bytes, bytes);
    return layout_.take_selection(arena);
  }

  void locate(int64_t head, KvTile& tile, const void** rows) const {
    kv_rows(in.key, head).locate(tile.first_key, tile.count, rows);
    tile.key_rows = rows;
  }
  void pack(const KvTile& tile, char* to) const {
    packing_.pack_keys(tile.key_rows, in.key.strides[3], tile.count, p.head_dim, to);
  }
  void pack_shared_tile(int64_t head, int64_t tile, const Worker& w) const {
    const int64_t first_key = tile * plan_.block_kv;
    const Visibility visible = seen(head);
    const int64_t count = std::min(plan_.block_kv, visible.kv_len - first_key);
    if (count <= 0) return;  // a shorter sequence of the batch
    if (!visible.may_see({first_key, first_key + count}, query_len(batch(head)))) return;
    KvTile rows = {first_key, count, false};
    locate(head, rows, w.key_rows);
    pack(rows, packed_tile(head, first_key));
  }

  // One block of queries against one part of the keys.
  void select_block(int64_t head, int64_t block, int64_t split, const Worker& w) const {
    const int64_t first = block * plan_.block_q;
    const int64_t queries = std::min(plan_.block_q, query_len(batch(head)) - first), rows = queries * group;
    const Selection best = plan_.kv_splits > 1 ? selection(head, block, split) : w.selection;
    for (int64_t i = 0; i < queries; ++i) best.candidates[i] = no_candidates(best.words + i * layout_.words_stride);
    const IndexerBlock b = {.rows = query_block(rows, w),
                            .group = group,
                            .weights = w.weights,
                            .sums = w.sums,
                            .sums_stride = layout_.sums_stride,
                            .candidates = best.candidates};
    packing_.copy_queries(stacked_rows(in.query, head), first * group, 1, b.rows, w.query);
    copy_weights(head, first, rows, w.weights);

    const KeyInterval part = {split * plan_.keys_per_split, (split + 1) * plan_.keys_per_split};
    KvBlocks tiles(seen(head), first * group, rows, group, part, plan_.block_kv, w.visible_begin, w.visible_end);
    KvTile pair[2] = {};
    int64_t number = 0;
    const auto next = [&](KvTile* tile) {
      if (!tiles.next(tile)) return false;
      if (layout_.shared)
        tile->keys = packed_tile(head, tile->first_key);
      else
        locate(head, *tile, w.key_rows + number++ % 2 * plan_.block_kv);
      return true;
    };
    for (bool there = next(&pair[0]); there; pair[0] = pair[1]) {
      there = next(&pair[1]);
      if (!layout_.shared) pack(pair[0], w.packed), pair[0].keys = w.packed;
      for (int64_t i = 0; i < queries; ++i) {
        if (best.candidates[i].count + pair[0].count > plan_.candidates) keep_best(best.candidates[i], plan_.kept);
      }
      score_tile_(b, pair, there ? 2 : 1);
    }
    for (int64_t i = 0; i < queries; ++i) {
      if (plan_.kv_splits > 1)
        keep_best(best.candidates[i], plan_.kept);
      else
        finish(head, first + i, best.candidates[i], w);
    }
  }
  QueryBlock query_block(int64_t rows, const Worker& w) const {
    return {.rows = rows,
            .head_dim = p.head_dim,
            .value_head_dim = 0,
            .query = w.query,
            .query_stride = layout_.query_stride,
            .state = {},
            .acc_stride = 0,
            .exponent_scale = 1,
            .scores = w.products,
            .scores_stride = layout_.products_stride,
            .visible_begin = w.visible_begin,
            .visible_end = w.visible_end,
            .rules = nullptr};
  }
  // Of stacked rows.
  void copy_weights(int64_t head, int64_t first_query, int64_t rows, float* to) const {
    const ConstTensor& t = tensors_.weights;
    const int64_t b = batch(head), first = sequences.query_start(b) + first_query;
    const auto copy = [&]<class Element>(const Element* from) {
      from += b * t.strides[0] + query_head(head, 0) * t.strides[1] + first * t.strides[2];
      for (int64_t r = 0; r < rows; ++r)
        to[r] = convert<float>(from[r % group * t.strides[1] + r / group * t.strides[2]]);
    };
    if (t.dtype == DType::bf16) return copy(static_cast<const bf16*>(t.data));
    if (t.dtype == DType::f16) return copy(static_cast<const f16*>(t.data));
    copy(static_cast<const float*>(t.data));
  }

  void join_parts() const {
    const int64_t queries_per_head = layout_.blocks * plan_.block_q;
    pool_.parallel_for(heads * queries_per_head, [&](int64_t task, int index) {
      const int64_t head = task / queries_per_head, query = task % queries_per_head;
      if (query >= query_len(batch(head))) return;
      const Worker w = worker(index);
      Candidates all = no_candidates(w.joined);
      for (int64_t split = 0; split < plan_.kv_splits; ++split) {
        const Selection part = selection(head, query / plan_.block_q, split);
        join(all, part.candidates[query % plan_.block_q], layout_.most, layout_.joined);
      }
      finish(head, query, all, w);
    });
  }

  void finish(int64_t head, int64_t query, Candidates& candidates, const Worker& w) const {
    sort_best(candidates, layout_.most, w.sorting);
    write_row(batch(head), kv_head(head), sequences.query_start(batch(head)) + query, candidates);
  }

  const LightningIndexerPlan& plan_;
  const Geometry& geometry_;
  const IndexerLayout layout_{problem_, plan_, geometry_};
  const Kernels& packing_;  // of queries and keys
  const ScoreTile score_tile_;
  char* const scratch_;
  ThreadPool& pool_;
  Interruption& interruption_;
};

}  // namespace
}  // namespace attention

Status lightning_indexer(Context& context, const LightningIndexerInputs& inputs, const LightningIndexerOutputs& outputs,
                         const LightningIndexerOptions& options) {
  return guarded([&]() -> Status {
    using namespace attention;
    const Result<IndexerCheck> call = check_indexer("lightning_indexer", inputs, outputs, options);
    if (!call.ok()) return call.status();
    if (outputs.indices.num_elements() == 0) return {};

    Context::Impl& impl = context.impl();
    const LightningIndexerPlan plan = plan_lightning_indexer(call.value().problem, impl.machine);
    const IndexerTensors tensors(inputs, outputs, call.value().attention);
    const Result<WorkspaceLease> lease = impl.workspaces.lease(plan.scratch_bytes(impl.pool.num_threads()));
    if (!lease.ok()) return lease.status();
    Interruption interruption(impl.interrupted, multiply_adds(call.value().attention));
    if (plan.num_tasks > 0) IndexerCall(tensors, call.value(), plan, impl, lease.value().data(), interruption).run();
    if (interruption.happened()) return interruption.status("lightning_indexer");
    IndexerRows(tensors, call.value()).write_other_rows(impl.pool);
    return {};
  });
}

}  // namespace opst

// What check, plan and run of lightning_indexer share: the call as attention's check and lists know calls, and the
// layout of its scratch memory.
//
//   shared, once
//     wave buffers        [min(heads, 2 heads_per_wave)] times, of each head
//       packed tiles        [tiles_per_head] panels of K                    packed_shared
//       selections          [blocks][kv_splits] IndexerLayout::Selection    kv_splits > 1
//   of each worker        IndexerLayout::Worker
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/indexer_kernels.h"
#include "attention/layout.h"
#include "opst/lightning_indexer.h"

namespace opst::attention {

// The kernel at the highest compiled level up to `isa`.
ScoreTile score_tile_for(Isa isa, AttentionProduct product);

// An indexer's call is one of attention that has no values: where attention's code wants some, keys stand for them.
inline AttentionInputs attention_inputs(const LightningIndexerInputs& in) {
  return {.query = in.query,
          .key = in.key,
          .value = in.key,
          .block_table = in.block_table,
          .kv_lengths = in.kv_lengths,
          .cu_seqlens_q = in.cu_seqlens_q,
          .cu_seqlens_k = in.cu_seqlens_k};
}
inline AttentionOptions attention_options(const LightningIndexerOptions& options) {
  return {.causal = options.causal, .block_q = options.block_q, .block_kv = options.block_kv};
}

// A call whose tensors have been checked.
struct IndexerCheck {
  LightningIndexerProblem problem;
  AttentionProblem attention;  // of query and key
};
Result<IndexerCheck> check_indexer(const char* operator_name, const LightningIndexerInputs& inputs,
                                   const LightningIndexerOutputs& outputs, const LightningIndexerOptions& options);

struct IndexerLayout {
  // The candidates of a block's queries, of one part of the keys.
  struct Selection {
    Candidates* candidates;  // [block_q]
    uint64_t* words;         // [block_q][words_stride]
  };
  struct Worker {
    void* query;             // words [block_rows][query_stride]
    void* products;          // [rows of a register tile][products_stride]
    float* sums;             // [block_q][sums_stride]
    float* weights;          // [block_rows]
    int64_t* visible_begin;  // [block_rows]
    int64_t* visible_end;
    const void** key_rows;  // [2][block_kv]: of a tile, and of the next
    char* packed;           // panels of K; packed_per_task
    Selection selection;    // kv_splits = 1
    uint64_t* joined;       // [joined]; kv_splits > 1
    uint64_t* sorting;      // [most]
  };

  const LightningIndexerProblem& p;
  const LightningIndexerPlan& plan;
  const Geometry& g;
  const int64_t heads = (Size(p.batch) * p.num_kv_heads).value();
  const int64_t blocks = ceil_div(p.query_len, plan.block_q);  // of the longest sequence
  const int64_t tiles_per_head = ceil_div(p.kv_len, plan.block_kv);
  const int64_t block_rows = (Size(plan.block_q) * (p.num_heads / p.num_kv_heads)).value();
  const int64_t query_stride = ceil_div(p.head_dim, g.step);  // in words
  const int64_t sums_stride = round_up(plan.block_kv, g.panel);
  // A stride of a power of two would put a column of products into few cache sets.
  const int64_t products_stride = sums_stride + g.lanes;
  const int64_t words_stride = plan.candidates + 1;  // a kernel writes one word behind the last
  const int64_t most = std::min(p.count, p.kv_len);  // that a query selects
  // Candidates of all parts; from 2 * most on the best are kept before more are joined.
  const int64_t joined = std::min((Size(plan.kv_splits) * plan.kept).value(), (Size(2) * most).value());
  const bool shared = plan.kv_access == KvAccess::packed_shared;
  const int64_t tile_bytes = Arena::round_up(Size(sums_stride) * query_stride * g.word_bytes);
  const int64_t packed_head_bytes = shared ? (Size(tile_bytes) * tiles_per_head).value() : 0;
  const int64_t selection_bytes = bytes_of([&](auto& from) { take_selection(from); });
  const Size selections = plan.kv_splits > 1 ? Size(blocks) * plan.kv_splits : 0;
  const int64_t shared_head_bytes = (selections * selection_bytes + packed_head_bytes).value();
  const int64_t worker_bytes = bytes_of([&](auto& from) { take_worker(from); });

  int64_t shared_bytes() const { return (Size(std::min(heads, 2 * plan.heads_per_wave)) * shared_head_bytes).value(); }

  // The pieces, taken from an Arena or counted.
  template <class From>
  Selection take_selection(From& from) const {
    return {.candidates = from.template take<Candidates>(plan.block_q),
            .words = from.template take<uint64_t>(Size(plan.block_q) * words_stride)};
  }
  template <class From>
  Worker take_worker(From& from) const {
    return {.query = from.take_bytes(Arena::round_up(Size(block_rows) * query_stride * g.word_bytes)),
            .products = from.take_bytes(Arena::round_up(Size(g.tile_rows) * products_stride * g.accumulator_bytes)),
            .sums = from.template take<float>(Size(plan.block_q) * sums_stride),
            .weights = from.template take<float>(block_rows),
            .visible_begin = from.template take<int64_t>(block_rows),
            .visible_end = from.template take<int64_t>(block_rows),
            .key_rows = from.template take<const void*>(Size(2) * plan.block_kv),
            .packed = static_cast<char*>(from.take_bytes(shared ? 0 : tile_bytes)),
            .selection = plan.kv_splits == 1 ? take_selection(from) : Selection{},
            .joined = plan.kv_splits == 1 ? nullptr : from.template take<uint64_t>(joined),
            .sorting = from.template take<uint64_t>(most)};
  }

 private:
  template <class List>
  static int64_t bytes_of(const List& list) {
    CountBytes from;
    list(from);
    return from.bytes.value();
  }
};

}  // namespace opst::attention

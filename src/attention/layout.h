// Layout: sizes, strides and pieces of a forward call's scratch memory. The plan adds the pieces up, the call takes
// them, both by the same list.
//
//   shared, once
//     wave buffers        [min(heads, 2 heads_per_wave)] times, of each head
//       packed tiles        [tiles_per_head][panels of K, panels of V]      packed_shared
//       finite bits         [tiles_per_head] bool                           packed_shared
//       states              [parts_per_head] RowState
//     score matrices      [heads][blocks][block_q][matrix_stride]         standard path
//     seen tiles          [heads][tiles_per_head] bool                    packed_shared, with a block mask
//     parts done          [heads][blocks] int32_t                         parts_per_head > 0
//   of each worker        Layout::Worker
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/kernels.h"
#include "attention/mask_walk.h"
#include "attention/selected_keys.h"
#include "core/int_math.h"
#include "machine/workspace.h"
#include "opst/attention.h"
#include "opst/page_layout.h"

namespace opst::attention {

// The kernels for a product and a storage type of keys and values, and the standard form over tiles packed by them, at
// the highest compiled level up to `isa` (f64: the generic level). A build for another architecture has fewer levels: a
// plan for an invented machine counts in the tiles of the highest. in_groups: see below.
const Kernels& kernels_for(Isa isa, AttentionProduct product, DType kv_dtype, bool in_groups = false);
AttendStandard standard_for(Isa isa, AttentionProduct product);
// What the kernels count in, the same for every storage type.
const Geometry& geometry_of(Isa isa, AttentionProduct product);

// The product for the types of a problem; a backward call's grad_out may ask for less.
AttentionProduct choose_product(const AttentionProblem& problem, const Machine& machine);

// The largest tile sizes that a caller may ask for.
inline constexpr int64_t kMaxBlock = 4096;
// Tasks that a call should have at least, so that a machine of some cores is busy; the most parts that keys are split
// into. A constant, not the number of threads: splitting changes rounding, and results must not depend on threads.
inline constexpr int64_t kWantedTasks = 16;

// KV heads that a task attends in turn at most: of 8, the rows of a token are 4 KB in f32 (head_dim 128).
inline constexpr int64_t kMostInTurn = 8;

// Why a problem has no plan, or null: a plan is defined for these problems and arithmetic on them does not wrap. A call
// has been checked, so only a problem that a caller made up comes to a reason.
const char* without_plan(const AttentionProblem& problem);

// Dimensions of a problem that a plan is made for.
inline int64_t heads_of(const AttentionProblem& p) { return (Size(p.batch) * p.num_kv_heads).value(); }
inline int64_t rows_of(const AttentionProblem& p) {
  return p.num_kv_heads == 0 ? 0 : (Size(p.query_len) * (p.num_heads / p.num_kv_heads)).value();
}

// Whether keys and values are integers that may have several scales to a row.
inline bool in_groups(const AttentionProblem& p) {
  return p.kv_dtype == DType::u8 || (p.kv_dtype == DType::i8 && (p.key_groups > 1 || p.value_groups > 1));
}

// Whether panel32 pages are multiplied as they are: the product takes 32 keys at a time and one word of each, so that a
// scale can multiply finished dot products, but an offset, the scale of a group or half a byte would have to be undone at
// every word.
inline bool multiplies_panels(const AttentionProblem& p) {
  return p.paged && p.options.page_layout == PageLayout::panel32 && !in_groups(p) && !p.has_offsets;
}
// Whether keys lie in panels all the same: those of a tile are copied, so that each is a row of its own.
inline bool unpacks_panels(const AttentionProblem& p) {
  return p.paged && p.options.page_layout == PageLayout::panel32 && !multiplies_panels(p);
}
// Whether keys are copied before they are read, a tile at a time.
inline bool copies_keys(const AttentionProblem& p) { return p.copies_keys || unpacks_panels(p); }

// So many numbers of a key or of a value, as they are stored.
inline int64_t row_bytes(const AttentionProblem& p, int64_t numbers) {
  return p.kv_dtype == DType::u8 ? ceil_div(numbers, int64_t{2}) : numbers * size_bytes(p.kv_dtype);
}

// Whether all KV heads of a sequence have the same tiles, read where they are, so that a task may attend several in turn
// where their rows are neighbours; and how many of them. Wherever the rows lie, keys are split as if they did: the same
// bits from dense tensors and from pages.
inline bool may_take_turns(const AttentionProblem& p, const AttentionPlan& plan) {
  return plan.kv_access == KvAccess::in_place && !p.sparse_indices && !p.block_mask;
}
inline int64_t most_in_turn(const AttentionProblem& p) { return std::min(p.num_kv_heads, kMostInTurn); }

// Whether scores are more than products that a structure hides.
inline bool has_rules(const AttentionProblem& p) {
  return p.options.softcap > 0 || p.has_alibi || p.has_bias || p.has_mask || p.has_prefix || p.has_drop_mask ||
         p.options.dropout.keep_prob < 1;
}

struct Layout {
  // Tiles handed to a kernel in one call; more only cost memory for their descriptions.
  static constexpr int64_t kTilesPerCall = 16;
  static_assert(2 * kMostInTurn <= kTilesPerCall, "a tile of each head in turn, and the next one");

  struct Worker {
    void* query;             // words [heads_in_turn][block_q][query_stride]
    void* scores;            // [rows of a register tile][scores_stride]; flash path
    int64_t* visible_begin;  // [block_q]
    int64_t* visible_end;
    RowRules* rules;          // [heads_in_turn][block_q], where an option needs them
    const void** key_rows;    // [pointers_per_call]
    const void** value_rows;  // as many
    // Keys that are copied, as rows: [block_kv][head_dim] numbers as they are stored. Pointers to ropes that lie apart.
    char* key_copies;
    const void** rope_rows;
    float* scales;        // [scale_lists][keys_per_call]
    const void** groups;  // [group_lists][keys_per_call]
    float* floats;        // [widened_rows][the larger of head_dim and value_head_dim]
    KvTile* tiles;        // [tiles_per_task]
    RowState state;       // of a block whose keys are not split, [heads_in_turn] of each piece
    char* packed;         // [tiles_per_task][panels of K, panels of V]; packed_per_task
    MaskCursor* cursors;  // with a block mask or a tree
    int64_t* own_begin;   // [tiles_per_task][own_rows], intervals of tiles
    int64_t* own_end;
    KeyInterval* runs;  // [block_kv], with sparse indices
  };

  const AttentionProblem& p;
  const AttentionPlan& plan;
  const Geometry& g;
  const bool standard = plan.path == AttentionPath::standard;
  const int64_t heads = heads_of(p);
  const int64_t blocks = ceil_div(rows_of(p), plan.block_q);  // of the longest sequence
  const int64_t tiles_per_head = ceil_div(p.kv_len, plan.block_kv);
  const int64_t tile_keys = round_up(plan.block_kv, g.panel);
  const int64_t query_stride = ceil_div(p.head_dim, g.step);       // in words
  const int64_t acc_stride = round_up(p.value_head_dim, g.lanes);  // in accumulators, like the next two
  // A stride of a power of two would put a column of scores into few cache sets.
  const int64_t scores_stride = tile_keys * plan.joined_tiles + g.lanes;
  // A tile that the end of a prefix cuts comes twice where there is a block mask, whose blocks tiles do not cross then.
  const int64_t most_tiles = tiles_per_head + (p.block_mask && p.has_prefix ? 1 : 0);
  // The tiles side by side, and one vector more, since the softmax may write beyond the last.
  const int64_t matrix_stride = (Size(most_tiles) * tile_keys + g.lanes).value();
  const int64_t key_tile_bytes = Arena::round_up(Size(tile_keys) * query_stride * g.word_bytes);
  const int64_t value_tile_bytes = Arena::round_up(Size(ceil_div(plan.block_kv, g.step)) * acc_stride * g.word_bytes);
  const int64_t tile_bytes = key_tile_bytes + value_tile_bytes;
  const Size packed_bytes = Size(tile_bytes) * tiles_per_head + Arena::size_of<bool>(tiles_per_head);
  const int64_t packed_head_bytes = plan.kv_access == KvAccess::packed_shared ? packed_bytes.value() : 0;
  const int64_t state_bytes = bytes_of([&](auto& from) { take_state(from); });
  const int64_t shared_head_bytes = (Size(plan.parts_per_head) * state_bytes + packed_head_bytes).value();
  const int64_t matrix_block_bytes = standard ? bytes_of_rows(matrix_stride) : 0;

  const int64_t query_bytes = Arena::round_up(Size(plan.block_q) * query_stride * g.word_bytes);
  const int64_t scores_bytes = standard ? 0 : Arena::round_up(Size(g.tile_rows) * scores_stride * g.accumulator_bytes);
  const int64_t row_rules = has_rules(p) ? plan.block_q : 0;
  // Of one tile (packing), or of all tiles of a kernel call (in place; panel32 pages: one per 32 keys).
  const int64_t pointers_per_call = plan.kv_access == KvAccess::panel_pages ? plan.block_kv / kPanelRows * kTilesPerCall
                                    : plan.kv_access == KvAccess::in_place  ? plan.block_kv * kTilesPerCall
                                                                            : plan.block_kv;
  // Of pages of integers, for scales of keys and of values, offsets of keys and of values: copies, or in groups pointers.
  const int64_t scale_lists = p.kv_dtype == DType::i8 && !in_groups(p) ? 4 : 0;
  const int64_t group_lists = in_groups(p) ? 4 : 0;
  const bool packs = plan.kv_access == KvAccess::packed_per_task || plan.kv_access == KvAccess::packed_shared;
  const int64_t keys_per_call = packs ? plan.block_kv : plan.block_kv * kTilesPerCall;
  // A tile's rows of bytes, on their way to packed floats.
  const int64_t widened_rows = packs && size_bytes(p.kv_dtype) == 1 ? plan.block_kv : 0;
  // Tiles described at a time. The standard path goes through its tiles twice, so all of them stay packed.
  const bool one_tile =
      plan.kv_access == KvAccess::packed_per_task || (plan.kv_access == KvAccess::in_place && copies_keys(p));
  const int64_t tiles_per_task = standard ? most_tiles : one_tile ? 1 : kTilesPerCall;
  const bool walks = p.block_mask || p.has_tree_mask;  // tiles by a MaskWalk
  const Size mask_cursors = walks ? MaskWalk::most_cursors(plan.block_q, p.num_heads / p.num_kv_heads) : 0;
  const bool own_intervals = walks || (p.sparse_indices && plan.kv_access == KvAccess::panel_pages);
  const int64_t own_rows = own_intervals ? plan.block_q : 0;
  const int64_t copied_keys = copies_keys(p) ? plan.block_kv : 0;
  const bool marks_seen = p.block_mask && plan.kv_access == KvAccess::packed_shared;
  const int64_t worker_bytes = bytes_of([&](auto& from) { take_worker(from); });

  Size copied_bytes() const { return Size(copied_keys) * row_bytes(p, p.head_dim); }

  // Two waves are in flight at a time, if there are two.
  int64_t wave_bytes() const { return (Size(std::min(heads, 2 * plan.heads_per_wave)) * shared_head_bytes).value(); }
  int64_t matrix_bytes() const { return (Size(heads) * blocks * matrix_block_bytes).value(); }
  int64_t shared_bytes() const {
    return (Size(matrix_bytes()) + wave_bytes() + seen_bytes() + parts_done_bytes()).value();
  }
  int64_t seen_bytes() const { return marks_seen ? Arena::size_of<bool>(Size(heads) * tiles_per_head) : 0; }
  int64_t parts_done_bytes() const {
    return plan.parts_per_head > 0 ? Arena::size_of<int32_t>(Size(heads) * blocks) : 0;
  }

  // The pieces, taken from an Arena or counted.
  template <class From>
  Worker take_worker(From& from) const {
    const int64_t own_tiles = plan.kv_access == KvAccess::packed_per_task ? tiles_per_task : 0;
    return {.query = from.take_bytes(Size(query_bytes) * plan.heads_in_turn),
            .scores = from.take_bytes(scores_bytes),
            .visible_begin = from.template take<int64_t>(plan.block_q),
            .visible_end = from.template take<int64_t>(plan.block_q),
            .rules = from.template take<RowRules>(Size(row_rules) * plan.heads_in_turn),
            .key_rows = from.template take<const void*>(pointers_per_call),
            .value_rows = from.template take<const void*>(pointers_per_call),
            .key_copies = static_cast<char*>(from.take_bytes(Arena::round_up(copied_bytes()))),
            .rope_rows = from.template take<const void*>(p.copies_keys ? copied_keys : 0),
            .scales = from.template take<float>(Size(scale_lists) * keys_per_call),
            .groups = from.template take<const void*>(Size(group_lists) * keys_per_call),
            .floats = from.template take<float>(Size(widened_rows) * std::max(p.head_dim, p.value_head_dim)),
            .tiles = from.template take<KvTile>(tiles_per_task),
            .state = take_state(from, plan.heads_in_turn),
            .packed = static_cast<char*>(from.take_bytes(Size(tile_bytes) * own_tiles)),
            .cursors = from.template take<MaskCursor>(mask_cursors),
            .own_begin = from.template take<int64_t>(Size(tiles_per_task) * own_rows),
            .own_end = from.template take<int64_t>(Size(tiles_per_task) * own_rows),
            .runs = from.template take<KeyInterval>(p.sparse_indices ? plan.block_kv : 0)};
  }
  template <class From>
  RowState take_state(From& from, int64_t count = 1) const {
    return {.acc = from.take_bytes(Size(bytes_of_rows(acc_stride)) * count),
            .max = from.take_bytes(Size(bytes_of_rows(1)) * count),
            .sums = from.take_bytes(Size(bytes_of_rows(g.lanes)) * count)};
  }
  // The worker's memory for one of several heads in turn: it has a query, rules and a state of its own.
  Worker worker_of(Worker w, int64_t turn) const {
    const auto skip = [&](void*& piece, int64_t bytes) { piece = static_cast<char*>(piece) + turn * bytes; };
    skip(w.query, query_bytes);
    w.rules += turn * row_rules;
    skip(w.state.acc, bytes_of_rows(acc_stride));
    skip(w.state.max, bytes_of_rows(1));
    skip(w.state.sums, bytes_of_rows(g.lanes));
    return w;
  }

 private:
  // `length` accumulators for each row of a block.
  int64_t bytes_of_rows(int64_t length) const {
    return Arena::round_up(Size(length) * plan.block_q * g.accumulator_bytes);
  }
  template <class List>
  static int64_t bytes_of(const List& list) {
    CountBytes from;
    list(from);
    return from.bytes.value();
  }
};

}  // namespace opst::attention

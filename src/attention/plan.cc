// plan_attention: from a problem and a machine to tiles, path and memory. Beside each number, the limit that sets it.
// Here too: which kernels were compiled, by level; count_visible.
#include <algorithm>
#include <string>

#include "attention/key_splits.h"
#include "attention/kv_blocks.h"
#include "attention/layout.h"
#include "attention/mask_plan.h"
#include "attention/selected_keys.h"
#include "attention/sequences.h"
#include "core/elements.h"
#include "core/int_math.h"
#include "core/text.h"
#include "machine/levels.h"
#include "opst/attention.h"
#include "opst/page_layout.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_BF16_LEVELS, attention, KernelTable, kTable, kernel_table)
OPST_KERNELS_BY_LEVEL(OPST_BF16_LEVELS, attention, StandardTable, kStandardTable, standard_table)

namespace attention {

const Kernels& kernels_for(Isa isa, AttentionProduct product, DType kv_dtype, bool in_groups) {
  if (product == AttentionProduct::f64) return kernel_table(Isa::generic).f64_product;
  const KernelTable& table = kernel_table(isa);
  if (in_groups) return table.integers_in_groups[kv_dtype == DType::i8 ? 0 : 1];
  if (size_bytes(kv_dtype) == 1)
    return table.eight_bits[kv_dtype == DType::i8 ? 0 : kv_dtype == DType::f8_e4m3 ? 1 : 2];
  const bool dot = product == AttentionProduct::bf16_dot && table.bf16_dot.attend != nullptr;
  return dot ? table.bf16_dot : table.f32_product[float_index(kv_dtype)];
}

const Geometry& geometry_of(Isa isa, AttentionProduct product) {
  return kernels_for(isa, product, DType::f32).geometry;
}

AttendStandard standard_for(Isa isa, AttentionProduct product) {
  if (product == AttentionProduct::f64) return standard_table(Isa::generic).f64;
  const StandardTable& table = standard_table(isa);
  return product == AttentionProduct::bf16_dot && table.bf16_dot != nullptr ? table.bf16_dot : table.f32;
}

AttentionProduct choose_product(const AttentionProblem& p, const Machine& m) {
  if (p.query_dtype == DType::f64) return AttentionProduct::f64;
  const bool bf16 = p.query_dtype == DType::bf16 && p.kv_dtype == DType::bf16;
  const bool pairs = p.rope_dim == 0 || (p.head_dim - p.rope_dim) % 2 == 0;  // none of a query's and its rope's
  const bool dot = pairs && includes(m.isa, Isa::avx512_bf16) && m.bf16_product == Bf16Product::dot;
  return bf16 && dot ? AttentionProduct::bf16_dot : AttentionProduct::f32;
}

}  // namespace attention

using attention::Geometry;
using attention::geometry_of;
using attention::kWantedTasks;

const char* to_string(AttentionPath path) { return name_of(path, {"automatic", "standard", "flash"}); }
const char* to_string(KvAccess access) {
  return name_of(access, {"in_place", "panel_pages", "packed_per_task", "packed_shared"});
}
const char* to_string(AttentionProduct product) { return name_of(product, {"f32", "bf16_dot", "f64"}); }

namespace {

constexpr int64_t kMostWholeRows = 256;  // of one head, or of a query's group with a list, that may be one task
// Rows for which keys are read in place where they are a list of one query alone, or hold the values as well: packing
// them costs as much as multiplying them with a dozen rows, and reading them again from L2, a register tile of rows at
// a time, less. Not where packed pairs are multiplied at twice the rate.
constexpr int64_t kMoreRowsInPlace = 24;
int64_t rows_in_place(const AttentionProblem& p, const Geometry& g) {
  const bool twice_the_rate = g.step > 1;
  return (p.sparse_indices || p.values_of_keys) && !twice_the_rate ? kMoreRowsInPlace : g.tile_rows;
}
// Packed keys and values of a wave of heads, to stay in cache (8 MB: 1 to 2 points slower at 2048 keys, head_dim 128).
constexpr int64_t kWaveBytes = 2 << 20;
// Of keys or values of a token: a tile of 64 would be 256 KB, the next one as much (32 heads of 8 KV heads, f32, Zen 4:
// tiles of 32 keys 1.3 times as fast).
constexpr int64_t kLargeTokenBytes = 4096;
// From so many caches (L2) of inputs and outputs on, a head's rows have to come from memory (8 heads of 128 rows:
// fetching them costs 2 to 3 %; 96 heads: 16 % faster).
constexpr int64_t kCachesOfMemory = 4;

// Keys per tile. The tile's packed K and V should take a quarter of L2: the next tile is being fetched meanwhile, and
// query, output and scores want room. The scores of one register tile may outgrow L1 a little: they are read once, in
// order, and larger tiles have fewer softmax passes (bf16, head_dim 64: 512 keys 79.4 %, 1024 keys 80.9 % of peak).
int64_t most_block_kv(const AttentionProblem& p, const Machine& m, const Geometry& g) {
  const int64_t key_bytes = ((Size(p.head_dim) + p.value_head_dim) * g.word_bytes).value() / g.step;
  const int64_t by_l2 = m.cache.l2_bytes / 4 / key_bytes;
  const int64_t by_l1 = m.cache.l1d_bytes * 6 / 5 / (g.tile_rows * g.accumulator_bytes);
  const int64_t keys = std::min(by_l2, by_l1) / g.panel * g.panel;
  return std::clamp<int64_t>(keys, g.panel, 1024);
}
int64_t choose_block_kv(const AttentionProblem& p, const Machine& m, const Geometry& g) {
  const int64_t read = std::max<int64_t>(attention::keys_read(p), 1);
  return std::min(most_block_kv(p, m, g), round_up(read, g.panel));
}

// In place a tile is what is fetched ahead: 64 keys of each kind, or half as many where a token's rows of the heads that a
// task may attend are large, wherever they lie.
int64_t keys_in_place(const AttentionProblem& p, const AttentionPlan& plan, const Geometry& g) {
  const int64_t token_bytes =
      attention::row_bytes(p, std::max(p.head_dim, p.value_head_dim)) * attention::most_in_turn(p);
  const bool large = attention::may_take_turns(p, plan) && token_bytes >= kLargeTokenBytes;
  const int64_t most = large ? 32 : 64, read = std::max<int64_t>(attention::keys_read(p), 1);
  return std::min(most, round_up(read, g.panel));
}

// Rows per task: enough that reading a tile from L2 or L3 costs little beside multiplying it (96 rows: 384 cycles of
// multiplication per key against about 40 to 80 of transfer at head_dim 128), few enough that query and output rows
// stay in L2 with the tile. The rows are dealt out evenly, those of each sequence by itself.
struct RowLimits {
  int64_t most;           // of a block, where there are several
  int64_t whole;          // that make one block: a quarter more, since then nothing is packed for others;
  int64_t whole_of_tile;  // and where the keys are one tile
};
RowLimits limit_rows(const AttentionProblem& p, const Machine& m, const Geometry& g) {
  const int64_t row_bytes = ((Size(p.head_dim) + p.value_head_dim) * g.accumulator_bytes).value();
  const int64_t by_l2 = m.cache.l2_bytes / 4 / row_bytes;
  const int64_t most = std::clamp<int64_t>(by_l2 / g.tile_rows * g.tile_rows, g.tile_rows, 120);
  RowLimits rows = {most, most + most / 4, most + most / 4};
  // Latent keys are long and many, and seldom many tasks': several blocks would have all of them packed to memory and read
  // again, so one takes more of L2.
  if (p.values_of_keys) {
    rows.whole = rows.whole_of_tile = std::max(rows.whole, std::min<int64_t>(by_l2 * 9 / 4, kMostWholeRows));
  }
  // Twice as many where heads alone are tasks enough (256 rows and keys, 8 heads, head_dim 128: 73 against 78 % of peak).
  // In one block or in several, a row has the same bits. A tree is the exception: tiles that several blocks share come
  // whole, those of one block begin at the first key that it sees. There the heads of one sequence count, since no other
  // sequence may matter.
  const int64_t heads = p.has_tree_mask ? p.num_kv_heads : attention::heads_of(p);
  if (heads >= kWantedTasks / 2) {
    rows.whole_of_tile = std::max(rows.whole, std::min<int64_t>(by_l2, kMostWholeRows));
  }
  return rows;
}
int64_t choose_block_q(const AttentionProblem& p, const Machine& m, const Geometry& g, int64_t rows, int64_t block_kv) {
  const RowLimits limits = limit_rows(p, m, g);
  if (rows <= (p.kv_len <= block_kv ? limits.whole_of_tile : limits.whole)) return rows;
  return p.varlen_q ? limits.most : ceil_div(rows, ceil_div(rows, limits.most));
}

// Tiles of a block mask's size. Those that it makes smaller than is good are joined. The standard path goes through its
// tiles twice, and wants each of them once: there none ends within a mask's block.
void fit_keys_to_mask(const AttentionProblem& p, const Geometry& g, AttentionPlan& plan) {
  const int64_t free_keys = plan.block_kv, mask_block = p.block_mask.block_kv;
  plan.block_kv = attention::fit_masked_keys(p, free_keys);
  if (plan.path == AttentionPath::standard) {
    while (mask_block < p.kv_len && mask_block % plan.block_kv != 0) --plan.block_kv;
  } else if (plan.kv_access == KvAccess::packed_shared && plan.block_kv % g.panel == 0) {
    plan.joined_tiles = std::max<int64_t>(free_keys / plan.block_kv, 1);
  }
}

// Where the rows of a token's KV heads lie side by side, tasks of several heads, which read memory nearly in its order: a
// processor fetches ahead within 4 KB, and a pass over one head's rows would bring those of all. No more heads than keep
// their tiles in a quarter of L2 (the next ones are fetched meanwhile), and than leave tasks enough. No bit depends on it,
// so batch may count.
int64_t choose_heads_in_turn(const AttentionProblem& p, const Machine& m, const AttentionPlan& plan) {
  if (!attention::may_take_turns(p, plan) || attention::copies_keys(p) || !p.heads_side_by_side_kv) return 1;
  const Size tile =
      Size(attention::row_bytes(p, p.head_dim) + attention::row_bytes(p, p.value_head_dim)) * plan.block_kv;
  int64_t heads = attention::most_in_turn(p);
  const auto fits = [&] {
    const Size tasks = Size(attention::heads_of(p)) * plan.kv_splits;
    return p.num_kv_heads % heads == 0 && tasks.value() >= kWantedTasks * heads &&
           (tile * heads).value() <= m.cache.l2_bytes / 4;
  };
  while (heads > 1 && !fits()) --heads;
  return std::max<int64_t>(heads, 1);
}

void split_keys(const AttentionProblem& p, const Machine& machine, int64_t heads, int64_t blocks, AttentionPlan& plan) {
  const attention::SplitKeys split_keys(p, plan);
  const attention::KeySplits longest = split_keys.of(p.query_len, p.kv_len, blocks, plan.block_q);
  plan.kv_splits = longest.count;
  plan.keys_per_split = longest.keys;
  plan.parts_per_head = split_keys.most_of_head(blocks);
  plan.heads_in_turn = choose_heads_in_turn(p, machine, plan);
  plan.num_tasks = (Size(heads / plan.heads_in_turn) * blocks * plan.kv_splits).value();
}

}  // namespace

const char* attention::without_plan(const AttentionProblem& p) {
  for (const int64_t size : {p.batch, p.num_heads, p.num_kv_heads, p.query_len, p.kv_len, p.head_dim, p.value_head_dim,
                             p.block_size, p.key_groups, p.value_groups, p.rope_dim, p.sparse_indices.block_size,
                             p.sparse_indices.count, p.block_mask.block_q, p.block_mask.block_kv, p.block_mask.batch,
                             p.block_mask.heads, p.block_mask.row_blocks, p.block_mask.entries}) {
    if (size < 0) return "a size is negative";
    if (size > kMaxBytes) return "a size is beyond 2^56";
  }
  if (p.head_dim == 0 || p.value_head_dim == 0) return "head_dim or value_head_dim is 0";
  if (p.block_mask && p.block_mask.block_kv == 0) return "block_mask.block_kv is 0";
  if (p.rope_dim >= p.head_dim) return "rope_dim is not less than head_dim";
  if (p.sparse_indices && p.block_mask) return "sparse_indices and block_mask";
  if (p.sparse_indices && p.options.path == AttentionPath::standard) return "sparse_indices with path = standard";
  if (p.has_tree_mask && (p.block_mask || p.sparse_indices)) return "tree_mask with block_mask or sparse_indices";
  if (p.has_tree_mask && p.options.path == AttentionPath::standard) return "tree_mask with path = standard";
  const AttentionOptions& o = p.options;
  if (o.block_q < 0 || o.block_q > kMaxBlock || o.block_kv < 0 || o.block_kv > kMaxBlock) {
    return "block_q or block_kv is not 0 to 4096";
  }
  const bool known = size_bytes(p.query_dtype) > 0 && size_bytes(p.kv_dtype) > 0 && o.path <= AttentionPath::flash &&
                     o.alignment <= CausalAlignment::bottom_right && o.alibi_form <= AlibiForm::square_root &&
                     o.page_layout <= PageLayout::panel32;
  return known ? nullptr : "an enumerator is unknown";
}

attention::SequenceKinds attention::sequence_kinds(const AttentionProblem& p, const Machine& machine) {
  // With a list for each query all are read alike.
  if (!p.varlen_q || p.num_heads == 0 || p.sparse_indices) return {};
  const Geometry& g = geometry_of(machine.isa, choose_product(p, machine));
  // As in plan_attention: no more than a block that the caller asks for.
  int64_t few = rows_in_place(p, g);
  if (p.options.block_q > 0) few = std::min(few, p.options.block_q);
  SequenceKinds kinds = {.apart = true, .few_rows = few, .whole = few, .whole_of_tile = few};
  if (p.block_mask) return kinds;
  if (p.options.block_q > 0) {  // as many rows are one block
    kinds.whole = kinds.whole_of_tile = p.options.block_q;
    return kinds;
  }
  const RowLimits limits = limit_rows(p, machine, g);
  kinds.whole = std::max(limits.whole, few);
  kinds.whole_of_tile = std::max(limits.whole_of_tile, few);
  kinds.tile_keys = p.options.block_kv > 0 ? p.options.block_kv : most_block_kv(p, machine, g);
  return kinds;
}

AttentionPlan plan_attention(const AttentionProblem& p, const Machine& machine) {
  if (const char* reason = attention::without_plan(p)) return {.reason = reason};
  AttentionPlan plan = {.product = attention::choose_product(p, machine)};
  const int64_t rows = attention::rows_of(p), heads = attention::heads_of(p);
  if (rows == 0 || heads == 0) {
    plan.reason = "no query rows";
    return plan;
  }

  // Access: packing a key costs about as much as multiplying it with a dozen rows.
  const Geometry& g = geometry_of(machine.isa, plan.product);
  const bool pages = attention::multiplies_panels(p);
  // Rows that see the same keys: with a list for each query, its group.
  const bool lists(p.sparse_indices);
  const int64_t group = p.num_heads / p.num_kv_heads, rows_of_list = lists ? group : rows;
  const bool few_rows = !pages && rows_of_list <= rows_in_place(p, g) && p.unit_stride_kv &&
                        p.options.path != AttentionPath::standard &&
                        (p.options.block_q == 0 || p.options.block_q >= rows_of_list);

  plan.block_kv = p.options.block_kv > 0 ? p.options.block_kv : choose_block_kv(p, machine, g);
  plan.block_q =
      std::min(rows, p.options.block_q > 0 ? p.options.block_q : choose_block_q(p, machine, g, rows, plan.block_kv));
  plan.block_q = attention::fit_masked_rows(p, plan.block_q, rows, g.tile_rows);
  if (lists) plan.block_q = attention::part_of_group(group, p.options.block_q > 0 ? p.options.block_q : kMostWholeRows);
  const int64_t blocks = ceil_div(rows, plan.block_q);
  plan.tile_rows = g.tile_rows;

  // Path: measured from 1 to 4096 keys, full and causal, f32 and bf16, the standard form was nowhere faster. Where the
  // whole score matrix fits the cache, flash has a single tile and is the same computation with less memory.
  plan.path = p.options.path == AttentionPath::standard ? AttentionPath::standard : AttentionPath::flash;
  if (pages) {
    plan.kv_access = KvAccess::panel_pages;
    plan.reason = "the cache's pages are packed";
  } else if (few_rows) {
    plan.kv_access = KvAccess::in_place;
    plan.reason = lists ? "few query heads share a list of keys, which are read in place"
                        : "few query rows share a KV head: keys and values are read once, in place";
    if (p.options.block_kv == 0) plan.block_kv = keys_in_place(p, plan, g);
  } else if (blocks == 1 || lists) {
    plan.kv_access = KvAccess::packed_per_task;
    plan.reason = lists ? "many query heads share a list of keys: each tile of it is packed when used"
                        : "one block of rows per KV head: each tile is packed when used";
  } else {
    plan.kv_access = KvAccess::packed_shared;
    plan.reason = "several blocks of rows share packed keys and values";
  }
  if (attention::unpacks_panels(p)) {
    plan.reason = few_rows ? "panels of integers with groups, offsets or half bytes are not multiplied: for few query "
                             "rows keys are copied out of them, a tile at a time, values read in place"
                           : "panels of integers with groups, offsets or half bytes are not multiplied: for many query "
                             "rows each tile is widened and packed";
  }
  if (p.block_mask) fit_keys_to_mask(p, g, plan);
  if (pages) plan.block_kv = round_up(plan.block_kv, kPanelRows);
  if (plan.path == AttentionPath::standard) {
    plan.reason = "asked for by options.path: the whole score matrix, for comparison; it is nowhere faster than flash";
  }

  const int64_t query_bytes = size_bytes(p.query_dtype), kv_bytes = size_bytes(p.kv_dtype);
  const Size row_and_key_bytes = Size(rows) * query_bytes + Size(p.kv_len) * kv_bytes;
  const Size tensor_bytes = row_and_key_bytes * heads * (Size(p.head_dim) + p.value_head_dim);
  plan.fetch_ahead = plan.kv_access == KvAccess::packed_per_task && !lists &&
                     tensor_bytes > Size(machine.cache.l2_bytes) * kCachesOfMemory;

  split_keys(p, machine, heads, blocks, plan);

  // Memory.
  const attention::Layout layout = {p, plan, g};
  plan.heads_per_wave = heads;
  if (plan.kv_access == KvAccess::packed_shared) {
    plan.heads_per_wave = std::clamp<int64_t>(kWaveBytes / std::max<int64_t>(layout.packed_head_bytes, 1), 1, heads);
  }
  plan.scratch_bytes_shared = layout.shared_bytes();
  plan.scratch_bytes_per_worker = layout.worker_bytes;
  return plan;
}

int64_t AttentionPlan::scratch_bytes(int num_threads) const {
  return (Size(scratch_bytes_per_worker) * num_threads + scratch_bytes_shared).value();
}

std::string to_string(const AttentionPlan& plan) {
  std::string joined, splits, turns;
  if (plan.joined_tiles > 1) joined = text(" (", plan.joined_tiles, " joined)");
  if (plan.kv_splits > 1) splits = text(", ", plan.kv_splits, " splits of ", plan.keys_per_split, " keys");
  if (plan.heads_in_turn > 1) turns = text(", ", plan.heads_in_turn, " heads in turn");
  return text(to_string(plan.path), " ", to_string(plan.kv_access), " ", to_string(plan.product), ", block_q ",
              plan.block_q, ", block_kv ", plan.block_kv, joined, splits, turns, ", ", plan.num_tasks,
              " tasks, scratch ", plan.scratch_bytes_shared, " + ", plan.scratch_bytes_per_worker, " bytes per thread");
}

namespace {

using Wide = __int128;  // sums of 2^40 lengths of 2^40 cancel, so that no double would do

// Sum over queries i of clamp(i + shift, low, high).
Wide sum_of_clamped(int64_t query_len, int64_t shift, int64_t low, int64_t high) {
  const int64_t first = std::clamp<int64_t>(low - shift, 0, query_len);      // queries before it are at `low`
  const int64_t last = std::clamp<int64_t>(high - shift, first, query_len);  // from it on they are at `high`
  const Wide count = last - first;
  const Wide between = count * (Wide{first} + shift) + count * (count - 1) / 2;
  return Wide{first} * low + between + Wide{query_len - last} * high;
}

}  // namespace

VisibleKeys count_visible(const AttentionOptions& options, int64_t query_len, int64_t kv_len, int64_t prefix) {
  if (query_len <= 0 || kv_len <= 0) return {};
  const attention::Visibility v = attention::Visibility::of(options, query_len, kv_len);
  const int64_t front = std::clamp<int64_t>(prefix, 0, kv_len);
  Wide pairs = Wide{query_len} * front;
  VisibleKeys visible{static_cast<double>(pairs), front};
  // Behind the prefix query i sees keys [i + low, i + high + 1): both ends grow with i.
  if (v.low > v.high) return visible;
  pairs += sum_of_clamped(query_len, v.high + 1, front, kv_len) - sum_of_clamped(query_len, v.low, front, kv_len);
  visible.pairs = static_cast<double>(pairs);
  const int64_t begin = std::clamp<int64_t>(v.low, front, kv_len);
  const int64_t end = std::clamp<int64_t>(query_len + v.high, front, kv_len);
  visible.keys += std::max<int64_t>(end - begin, 0);
  return visible;
}

}  // namespace opst

// plan_lightning_indexer: from a problem and a machine to tiles, tasks and memory. Beside each number, the limit that
// sets it.
#include <algorithm>
#include <string>

#include "attention/indexer.h"
#include "core/int_math.h"
#include "core/text.h"
#include "machine/levels.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_BF16_LEVELS, attention, IndexerTable, kIndexerTable, indexer_table)

namespace attention {

ScoreTile score_tile_for(Isa isa, AttentionProduct product) {
  const IndexerTable& table = indexer_table(isa);
  return product == AttentionProduct::bf16_dot && table.bf16_dot != nullptr ? table.bf16_dot : table.f32;
}

namespace {

// Keys below which a part is not worth its join: several times what it leaves of them.
constexpr int64_t kMinSplitKeys = 1024;
// Packed keys of a wave of heads, to stay in cache (plan.cc).
constexpr int64_t kWaveBytes = 2 << 20;
// Rows of a task, about: reading a tile from L2 or L3 costs little beside multiplying it (choose_block_q in plan.cc).
constexpr int64_t kWantedRows = 120;

AttentionProblem attention_problem_of(const LightningIndexerProblem& p) {
  return {.query_dtype = p.query_dtype,
          .kv_dtype = p.kv_dtype,
          .batch = p.batch,
          .num_heads = p.num_heads,
          .num_kv_heads = p.num_kv_heads,
          .query_len = p.query_len,
          .kv_len = p.kv_len,
          .head_dim = p.head_dim,
          .value_head_dim = p.head_dim,
          .options = attention_options(p.options)};
}

// Why a problem has no plan, or null.
const char* indexer_without_plan(const LightningIndexerProblem& p) {
  if (const char* reason = without_plan(attention_problem_of(p))) return reason;
  if (p.count < 0 || p.count > kMaxBytes) return "count is negative or beyond 2^56";
  const bool multiple = p.num_kv_heads > 0 ? p.num_heads > 0 && p.num_heads % p.num_kv_heads == 0 : p.num_heads == 0;
  if (!multiple) return "num_heads is no positive multiple of num_kv_heads";
  for (const DType dtype : {p.query_dtype, p.kv_dtype}) {
    if (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::f16) return "a dtype is not f32, bf16 or f16";
  }
  return nullptr;
}

// Keys per tile. Its packed keys should take a quarter of L2: the next tile is being fetched meanwhile, and queries,
// scores and candidates want room. The products of a register tile take a third of L1, through which rows of queries and
// a panel of keys pass, too.
int64_t choose_block_kv(const LightningIndexerProblem& p, const Machine& m, const Geometry& g) {
  const int64_t key_bytes = (Size(ceil_div(p.head_dim, g.step)) * g.word_bytes).value();
  const int64_t by_l2 = m.cache.l2_bytes / 4 / key_bytes;
  const int64_t by_l1 = m.cache.l1d_bytes / 3 / (g.tile_rows * g.accumulator_bytes);
  const int64_t keys = std::min(by_l2, by_l1) / g.panel * g.panel;
  return std::min(std::clamp<int64_t>(keys, g.panel, 1024), round_up(std::max<int64_t>(p.kv_len, 1), g.panel));
}

// Queries per task: about kWantedRows rows, whose words, scores and candidates take at most a quarter of L2, but at
// least one register tile of rows.
int64_t choose_block_q(const LightningIndexerProblem& p, const Machine& m, const Geometry& g, int64_t block_kv) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  const Size candidate_bytes = (Size(2) * std::min(p.count, p.kv_len) + block_kv) * 8;
  const Size query_bytes = Size(group) * p.head_dim * 4 + candidate_bytes + Size(block_kv) * 4;
  const int64_t by_l2 = m.cache.l2_bytes / 4 / query_bytes.value();
  const int64_t least = ceil_div(g.tile_rows, group), most = std::max(least, ceil_div(kWantedRows, group));
  return std::clamp(by_l2, least, most);
}

// Where blocks of queries are too few to share out, the keys are split: parts of whole tiles. What is selected does not
// depend on it.
void split_keys(const LightningIndexerProblem& p, Size head_blocks, LightningIndexerPlan& plan) {
  if (head_blocks < kWantedTasks && p.kv_len >= 2 * kMinSplitKeys) {
    plan.kv_splits = std::min(ceil_div(kWantedTasks, head_blocks.value()), p.kv_len / kMinSplitKeys);
  }
  plan.keys_per_split = round_up(ceil_div(std::max<int64_t>(p.kv_len, 1), plan.kv_splits), plan.block_kv);
  plan.kv_splits = std::max<int64_t>(1, ceil_div(p.kv_len, plan.keys_per_split));
  plan.num_tasks = (head_blocks * plan.kv_splits).value();
}

}  // namespace
}  // namespace attention

LightningIndexerPlan plan_lightning_indexer(const LightningIndexerProblem& p, const Machine& machine) {
  using namespace attention;
  if (const char* reason = indexer_without_plan(p)) return {.reason = reason};
  LightningIndexerPlan plan = {.product = choose_product(attention_problem_of(p), machine)};
  const Size heads = Size(p.batch) * p.num_kv_heads;
  if (heads == Size(0) || p.query_len == 0 || p.count == 0) {
    plan.reason = "nothing to select";
    return plan;
  }
  const Geometry& g = geometry_of(machine.isa, plan.product);
  plan.tile_rows = g.tile_rows;
  plan.block_kv = p.options.block_kv > 0 ? p.options.block_kv : choose_block_kv(p, machine, g);
  plan.block_q = p.options.block_q > 0 ? p.options.block_q : choose_block_q(p, machine, g, plan.block_kv);
  plan.block_q = std::min(plan.block_q, p.query_len);
  const int64_t blocks = ceil_div(p.query_len, plan.block_q);
  const bool shared = blocks > 1;
  plan.kv_access = shared ? KvAccess::packed_shared : KvAccess::packed_per_task;
  plan.reason = shared ? "several blocks of queries share packed keys"
                       : "one block of queries per key head: each tile is packed when used";
  split_keys(p, heads * blocks, plan);

  // A selection of the best takes about as long as some comparisons of each candidate: with as many new ones as it
  // leaves old ones, it is seldom. Without more keys than candidates there is none.
  const int64_t part_keys = std::min(p.kv_len, plan.keys_per_split);
  plan.kept = std::min(p.count, part_keys);
  plan.candidates = std::min(plan.kept + std::max(plan.kept, plan.block_kv), part_keys);

  const IndexerLayout layout = {p, plan, g};
  plan.heads_per_wave = heads.value();
  if (shared && plan.kv_splits == 1) {
    const int64_t head_bytes = std::max<int64_t>(layout.packed_head_bytes, 1);
    plan.heads_per_wave = std::clamp<int64_t>(kWaveBytes / head_bytes, 1, heads.value());
  }
  plan.scratch_bytes_shared = layout.shared_bytes();
  plan.scratch_bytes_per_worker = layout.worker_bytes;
  return plan;
}

int64_t LightningIndexerPlan::scratch_bytes(int num_threads) const {
  return (Size(scratch_bytes_per_worker) * num_threads + scratch_bytes_shared).value();
}

std::string to_string(const LightningIndexerPlan& plan) {
  std::string splits;
  if (plan.kv_splits > 1) splits = text(", ", plan.kv_splits, " splits of ", plan.keys_per_split, " keys");
  return text(to_string(plan.kv_access), " ", to_string(plan.product), ", block_q ", plan.block_q, ", block_kv ",
              plan.block_kv, splits, ", keeps ", plan.kept, " of ", plan.candidates, " candidates, ", plan.num_tasks,
              " tasks, scratch ", plan.scratch_bytes_shared, " + ", plan.scratch_bytes_per_worker, " bytes per thread");
}

}  // namespace opst

// plan_attention_backward: from a problem and a machine to tiles and memory. Beside each number its limit.
#include "attention/backward_layout.h"
#include "core/text.h"

namespace opst {

using attention::Geometry;
using attention::kWantedTasks;

namespace {

// Bytes of packed query rows in a wave of heads: several heads, whose tasks do not wait for one another, but no more
// than stays in the last-level cache.
constexpr int64_t kWaveBytes = 4 << 20;

// Keys per tile: three packed forms and two accumulators take a third of L2, a block of rows another third.
// Three panels are whole register tiles of 12 keys in dV and dK; pairs of bf16, whose products take half the time, want
// the longer rows of four (2048 keys, head_dim 128: f32 90.4 % of peak with 96 keys, 89.7 % with 128; bf16 83.7 and
// 84.2 %). Fewer where there would be too few tasks.
int64_t choose_block_kv(const AttentionProblem& p, const Machine& m, const Geometry& g) {
  const Size dims = Size(p.head_dim) + p.value_head_dim;
  const int64_t key_bytes =
      ((dims + p.head_dim) * g.word_bytes).value() / g.step + (dims * g.accumulator_bytes).value();
  const int64_t by_l2 = m.cache.l2_bytes / 3 / key_bytes / g.panel * g.panel;
  int64_t keys = std::clamp<int64_t>(by_l2, g.panel, (g.step > 1 ? 4 : 3) * g.panel);
  const Size heads = attention::heads_of(p);
  while (keys > 2 * g.panel && heads * ceil_div(p.kv_len, keys) < Size(kWantedTasks)) keys -= g.panel;
  return std::min(keys, round_up(std::max<int64_t>(p.kv_len, 1), g.panel));
}

// Rows per block, whole register tiles: their Q, dO, dQ, P and dS take a third of L2.
int64_t choose_block_q(const AttentionProblem& p, const Machine& m, const Geometry& g, int64_t block_kv) {
  const Size dims = Size(p.head_dim) + p.value_head_dim;
  const int64_t forms = g.step > 1 ? 2 : 1;
  const int64_t row_bytes = (dims * forms * g.word_bytes).value() / g.step +
                            (Size(p.head_dim) * g.accumulator_bytes).value() +
                            (g.step > 1 ? 3 : 2) * block_kv * g.word_bytes / g.step;
  const int64_t by_l2 = m.cache.l2_bytes / 3 / row_bytes / g.tile_rows * g.tile_rows;
  return std::clamp<int64_t>(by_l2, g.tile_rows, 10 * g.tile_rows);
}

}  // namespace

AttentionBackwardPlan plan_attention_backward(const AttentionBackwardProblem& problem, const Machine& machine) {
  const AttentionProblem& p = problem.forward;
  AttentionBackwardPlan plan;
  const auto is_count = [](int64_t n) { return n >= 0 && n <= kMaxBytes; };
  if (attention::without_plan(p) != nullptr || !is_count(problem.num_blocks) || !is_count(problem.shared_blocks) ||
      !is_count(problem.key_rows)) {
    return plan;
  }
  plan.product = attention::choose_product(p, machine);
  const bool mixed = plan.product == AttentionProduct::bf16_dot && problem.grad_out_dtype != DType::bf16;
  if (mixed) plan.product = AttentionProduct::f32;
  const Geometry g = attention::geometry_of(machine.isa, plan.product);
  const int64_t rows = attention::rows_of(p), heads = attention::heads_of(p);
  if (heads == 0) return plan;

  plan.block_kv = p.options.block_kv > 0 ? p.options.block_kv : choose_block_kv(p, machine, g);
  plan.block_kv = attention::fit_masked_keys(p, plan.block_kv);
  plan.block_q = p.options.block_q > 0 ? p.options.block_q : choose_block_q(p, machine, g, plan.block_kv);
  if (rows > 0) plan.block_q = attention::fit_masked_rows(p, plan.block_q, rows, g.tile_rows);
  plan.block_q = std::clamp<int64_t>(plan.block_q, 1, std::max<int64_t>(rows, 1));
  const bool lists = p.sparse_indices && rows > 0;
  if (lists) plan.block_q = attention::part_of_group(p.num_heads / p.num_kv_heads, plan.block_q);

  const attention::BackwardLayout layout = {problem, g, plan.block_q, plan.block_kv};
  plan.num_tasks = (Size(heads) * (lists ? layout.blocks : layout.tiles)).value();
  plan.heads_per_wave = std::clamp<int64_t>(kWaveBytes / std::max<int64_t>(layout.head_bytes, 1), 1, heads);
  plan.scratch_bytes_shared = layout.shared_bytes(heads, plan.heads_per_wave);
  plan.scratch_bytes_per_worker = layout.worker_bytes;
  return plan;
}

int64_t AttentionBackwardPlan::scratch_bytes(int num_threads) const {
  return (Size(scratch_bytes_per_worker) * num_threads + scratch_bytes_shared).value();
}

std::string to_string(const AttentionBackwardPlan& plan) {
  return text("backward ", to_string(plan.product), ", block_q ", plan.block_q, ", block_kv ", plan.block_kv, ", ",
              plan.num_tasks, " tasks, scratch ", plan.scratch_bytes_shared, " + ", plan.scratch_bytes_per_worker,
              " bytes per thread");
}

}  // namespace opst

// plan_moe_layer: waves of experts, and the memory of a call. Beside each number, the limit that sets it.
#include <algorithm>
#include <vector>

#include "core/text.h"
#include "moe/layer_memory.h"

namespace opst {

namespace moe {
namespace {

// Fewer rows would decode weights for too few of them.
constexpr int64_t kLeastWaveRows = 256;

Experts experts_of(const MatmulProblem& gate_up, const MatmulProblem& up, bool apart, const MatmulProblem& down) {
  Experts experts{.apart = apart, .first = gate_up, .second_half = up, .second = down};
  const int64_t n = std::max<int64_t>(0, gate_up.n);
  experts.intermediate = !apart && gemm::takes_two_halves(gate_up.activation) ? n / 2 : n;
  return experts;
}

}  // namespace

int64_t hidden_row_bytes(const Experts& experts, DType dtype) {
  const Size values = experts.intermediate;
  const Size halves = experts.apart ? values * 8 : Size(0);
  return (halves + values * (experts.hides_bytes() ? 1 : size_bytes(dtype)) + 4).value();
}

// The other half of the caches is for weights and packed rows.
WaveLimit wave_limit(const Experts& experts, DType dtype, const Machine& machine, int num_threads) {
  const Size caches = (Size(machine.cache.l2_bytes) + machine.cache.l3_bytes_per_core) * std::max(1, num_threads);
  const int64_t rows = caches.value() / 2 / hidden_row_bytes(experts, dtype);
  if (rows < kLeastWaveRows) return {kLeastWaveRows, "hidden rows are long: so many that decoding weights is worth it"};
  return {rows, "hidden rows take half of L2 and L3 of all threads"};
}

}  // namespace moe

using namespace moe;

Result<MoeLayerPlan> plan_moe_layer(const MoeLayerProblem& p, std::span<const int64_t> expert_tokens,
                                    const Machine& machine, int num_threads) {
  return guarded([&]() -> Result<MoeLayerPlan> {
    num_threads = std::max(1, num_threads);
    const MoeLayerInputs inputs;
    const MoeLayerOptions options{.gating = p.gating};
    LayerCall call(inputs, options);
    call.dtype = p.dtype;
    call.has_logits = p.has_logits, call.has_shared = p.has_shared;
    call.tokens = std::max<int64_t>(0, p.tokens), call.top_k = std::max<int64_t>(0, p.top_k);
    call.num_experts = p.num_experts, call.hidden = std::max<int64_t>(0, p.down.n);
    call.end = static_cast<int64_t>(expert_tokens.size());
    call.experts = experts_of(p.gate_up, p.up, p.has_up, p.down);
    if (p.has_shared) call.shared = experts_of(p.shared_gate_up, {}, false, p.shared_down);

    MoeLayerPlan plan;
    if (p.has_logits) plan.gating = plan_moe_gating(call.gating());
    plan.routing = plan_moe_routing(call.slots() == 0 ? 0 : call.tokens, call.top_k, call.num_local());
    const WaveLimit limit = wave_limit(call.experts, p.dtype, machine, num_threads);
    plan.rows_per_wave = limit.rows, plan.reason = limit.reason;
    std::vector<int64_t> counts;
    for (const int64_t count : expert_tokens) counts.push_back(std::clamp<int64_t>(count, 0, call.slots()));
    Size rows = 0;
    ExpertWave wave;
    int64_t largest = 0;
    for (int64_t e = 0; e < call.num_local(); e = wave.end) {
      wave = wave_of(counts.data(), e, call.num_local(), limit.rows);
      rows += wave.rows;
      plan.waves += wave.rows > 0;
      if (wave.rows <= largest) continue;
      largest = wave.rows;
      const std::span<const int64_t> of_wave(counts.data() + e, static_cast<size_t>(wave.end - e));
      const Result<GroupedMatmulPlan> first = plan_grouped_matmul(p.gate_up, of_wave, machine, num_threads);
      const Result<GroupedMatmulPlan> second = plan_grouped_matmul(p.down, of_wave, machine, num_threads);
      if (!first.ok() || !second.ok()) return first.ok() ? second.status() : first.status();
      plan.gate_up = first.value(), plan.down = second.value();
    }
    plan.rows = rows.value();
    plan.hidden_bytes = (Size(largest) * hidden_row_bytes(call.experts, p.dtype)).value();
    plan.expanded_bytes =
        ((rows + (p.has_shared ? call.tokens : 0)) * std::max<int64_t>(0, call.hidden) * size_bytes(p.dtype)).value();
    plan.scratch_bytes =
        (rows_bytes(call, counts.data(), plan.rows, machine, num_threads) + Routes::bytes(call)).value();
    return plan;
  });
}

std::string to_string(const MoeLayerPlan& plan) {
  return text(plan.rows, " rows of experts in ", plan.waves, plan.waves == 1 ? " wave" : " waves", " of at most ",
              plan.rows_per_wave, " (", plan.reason, "), hidden ", plan.hidden_bytes, " bytes, expanded ",
              plan.expanded_bytes, " bytes, scratch ", plan.scratch_bytes, " bytes\n  gating: ", to_string(plan.gating),
              "\n  routing: ", to_string(plan.routing), "\n  gate_up: ", to_string(plan.gate_up),
              "\n  down: ", to_string(plan.down));
}

}  // namespace opst

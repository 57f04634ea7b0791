// The layer of experts: a call that is checked, its routes, and the two products of its experts.
#pragma once

#include "matmul/groups.h"
#include "moe/moe.h"
#include "opst/moe_layer.h"

namespace opst::moe {

inline bool is_there(const GroupedWeight& weight) {
  return weight.kind() != MatmulWeight::unpacked || is_given(weight.stack());
}

// Experts of one kind: those of the range, or the shared one. Null and {}: absent.
struct Experts {
  const GroupedWeight *gate_up = nullptr, *up = nullptr, *down = nullptr;
  bool apart = false;  // gate and up projections: their activation follows by itself
  ConstTensor gate_up_bias = {}, down_bias = {};
  int64_t intermediate = 0;
  // Of any number of rows; second_half: of up projections apart.
  MatmulProblem first = {}, second_half = {}, second = {};

  bool takes_bytes() const { return first.x_dtype == DType::i8 || second_half.x_dtype == DType::i8; }
  bool hides_bytes() const { return second.x_dtype == DType::i8; }
};

struct LayerCall {
  const MoeLayerInputs& in;
  const MoeLayerOptions& options;
  DType dtype = DType::f32;
  bool has_logits = false, has_shared = false;
  int64_t tokens = 0, hidden = 0, top_k = 0, num_experts = 0, begin = 0, end = 0;
  Experts experts, shared;

  LayerCall(const MoeLayerInputs& inputs, const MoeLayerOptions& of_call) : in(inputs), options(of_call) {}
  int64_t num_local() const { return end - begin; }
  int64_t slots() const { return (Size(tokens) * top_k).value(); }
  MoeGatingProblem gating() const {
    return {.tokens = tokens,
            .num_experts = num_experts,
            .top_k = top_k,
            .has_bias = static_cast<bool>(in.gate_bias),
            .wants_scores = false,
            .options = options.gating};
  }
};

// ---- layer_check.cc

// The inputs, by which `call` is filled in.
void check_layer_inputs(ShapeCheck& check, LayerCall& call);
// No output overlaps one of several weights.
void check_layer_output(ShapeCheck& check, const LayerCall& call, const ConstTensor& output);

// ---- layer_route.cc

// Which experts tokens go to, and where their rows are: of all slots, of those of the range the first `rows`.
struct Routes {
  ConstTensor ids, weights;  // [tokens, top_k]: what gating found, or the call's
  int64_t* row_of_slot = nullptr;
  int64_t *slot_of_row = nullptr, *token_of_row = nullptr;
  int64_t* counts = nullptr;  // [experts of the range]
  int64_t rows = 0;

  // body(routes) in memory that lives as long. The status of the check where ids are refused: nothing has been written.
  template <class Body>
  static Status with(Context& context, ShapeCheck& check, const LayerCall& call, const Body& body) {
    const Result<WorkspaceLease> lease = context.impl().workspaces.lease(bytes(call));
    if (!lease.ok()) return lease.status();
    Routes routes;
    const Status status = routes.find(context, check, call, Arena(lease.value()));
    return status.ok() ? body(routes) : status;
  }
  static int64_t bytes(const LayerCall& call);

 private:
  Status find(Context& context, ShapeCheck& check, const LayerCall& call, Arena arena);
};

// ---- layer_plan.cc

// Experts whose hidden rows are at most so many go through both products together.
struct WaveLimit {
  int64_t rows = 0;
  const char* reason = "";
};
WaveLimit wave_limit(const Experts& experts, DType dtype, const Machine& machine, int num_threads);
// Bytes of a hidden row, and of what becomes one.
int64_t hidden_row_bytes(const Experts& experts, DType dtype);

// The experts [begin, end) of a wave that begins with the first of them, and their rows.
struct ExpertWave {
  int64_t end = 0, rows = 0;
};
inline ExpertWave wave_of(const int64_t* counts, int64_t begin, int64_t num_experts, int64_t most_rows) {
  ExpertWave wave{.end = begin};
  while (wave.end < num_experts && (wave.rows == 0 || wave.rows + counts[wave.end] <= most_rows)) {
    wave.rows += counts[wave.end++];
  }
  return wave;
}

// ---- layer.cc

// 1, or sigmoid(x[t] . gate)
float share_of(const TypeKernels& kernels, const LayerCall& call, int64_t token);

inline Tensor matrix_of(DType dtype, int64_t rows, int64_t columns, void* data) {
  return Tensor::contiguous(dtype, {rows, columns}, data);
}
inline GroupList counts_of(const int64_t* counts, int64_t n) {
  return {ConstTensor::contiguous(DType::i64, {n}, counts), GroupListType::counts};
}

}  // namespace opst::moe

// Predicted times of this library's calls on a CPU, from what its units do in a second (MachineProfile).
//
// One core multiplies, exponentiates and moves bytes in turn, so the times of the units add up:
//
//   time = matrix  flops, padded to panels, over the multiply-add rate
//        + vector  scores over the softmax rate
//        + keys    bytes of keys and values (of a product: of its weight) over the reading rate at the size of all operands
//        + rows    bytes of queries and outputs (of a product: x and out) likewise
//        + start   of a parallel loop
//
// each with a cost: how many units' times the kernels take. The costs of a kind of call were fitted once, over shapes on
// Zen 4 cores (bench/predict.py --fit); what differs from machine to machine are the rates. docs/performance.md has the
// errors.
#pragma once

#include <optional>

#include "machine_profile.h"
#include "opst/attention.h"
#include "opst/matmul.h"

namespace opst::tools {

struct TimeParts {
  double matrix = 0, vector = 0, keys = 0, rows = 0, start = 0;  // seconds
  double total() const { return matrix + vector + keys + rows + start; }
};

struct TimePrediction {
  const char* kind = "";  // of call, by the kernels that it runs
  TimeParts units = {};   // what each unit would take at its rate
  TimeParts parts = {};   // times the kind's costs
  double seconds() const { return parts.total(); }
};

// A forward call with `pairs` visible pairs of a query and a key in each head, summed over the batch; masks that are
// causal at most, keys and values dense. Nothing for other dtypes than f32 and bf16.
std::optional<TimePrediction> predict_attention(const AttentionProblem& problem, double pairs,
                                                const MachineProfile& machine);
// working_set: bytes that are read before the weight is read again; 0: those of the operands.
std::optional<TimePrediction> predict_matmul(const MatmulProblem& problem, const MachineProfile& machine,
                                             double working_set = 0);

// predicted_ms, predicted_over_measured, predicted_kind, predicted_units_ms
void add_to_json(nlohmann::ordered_json& row, const TimePrediction& prediction, double measured_seconds);

}  // namespace opst::tools
